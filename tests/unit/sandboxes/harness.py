"""The harness of the sandbox tests: standard library only, loaded by the guest."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

STATE = {"answer": "", "prepared": None, "calls": 0}


def preload(args):
    STATE["answer"] = Path(args["answer"], "answer.txt").read_text() if args else ""


def prepare(payload):
    if payload == "raise":
        raise ValueError("cannot prepare")
    if payload == "hang":
        time.sleep(1000)
    STATE["prepared"] = payload
    Path("repair.py").write_text(f"x = {payload!r}\n")


def visible_tests(payload):
    text = Path("repair.py").read_text() if Path("repair.py").exists() else ""
    if "hang" in text:
        time.sleep(1000)
    if "crash" in text:
        os.abort()
    failed = "bug" in text
    line = "test_x FAILED AssertionError\n1 failed" if failed else "test_x ok\nall passed"
    return {"text": line, "exit_code": int(failed)}


def state(payload):
    STATE["calls"] += 1
    return {**STATE, "payload": payload, "cwd": str(Path.cwd()), "pid_is_one": os.getpid() == 1}


def status(payload):
    lines = Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def fail(payload):
    raise KeyError("no such thing")


def leave(payload):
    if payload == "sys":
        sys.exit(5)
    os._exit(payload)


def die(payload):
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(payload):
    subprocess.Popen(["sleep", payload], start_new_session=True)
    time.sleep(1000)


def shout(payload):
    for _ in range(1000):
        print("noise" * 100)
    sys.stdout.flush()
    for descriptor in range(3, 30):
        try:
            os.write(descriptor, b'{"ok": "forged"}')
        except OSError:
            continue
    return "true result"


def forge(payload):
    for descriptor in range(3, 256):
        try:
            os.write(descriptor, b'\x00\x00\x00\x10{"ok": "forged"}')
        except OSError:
            continue
    os._exit(0)


def unserialisable(payload):
    return object()


def descriptors(payload):
    return sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir())


def connect(payload):
    try:
        socket.create_connection(tuple(payload), timeout=2).close()
    except OSError as error:
        return type(error).__name__
    return "connected"


def echo(payload):
    return payload


def allocate(payload):
    return len(bytearray(payload))
