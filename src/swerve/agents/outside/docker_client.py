"""What an outside agent finds as `docker`: the part of its command line that agents use, for one episode's sandbox.

    docker_client.py CONNECTION.json COMMAND ...

Standard library only, and nothing of Swerve: it is a program of its own, which talks to the run that started the
agent. What it does not know, it refuses by name; nothing is ignored.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import sys
from typing import Any, NoReturn

_USAGE = """\
docker run -d [--name NAME] [-w DIR] [-e KEY=VALUE] [--rm] IMAGE sleep TIME
docker exec [-i] [-w DIR] [-e KEY=VALUE] CONTAINER COMMAND [ARGUMENT ...]
docker stop CONTAINER
docker rm [-f] CONTAINER
docker version | --version"""
_VERSION = "Docker version 0 (Swerve: one sandbox of one episode)"
_OPTIONS = {
    "run": {"-d": 0, "--detach": 0, "--rm": 0, "--name": 1, "-w": 1, "--workdir": 1, "-e": 1, "--env": 1},
    "exec": {"-i": 0, "--interactive": 0, "-w": 1, "--workdir": 1, "-e": 1, "--env": 1},
    "stop": {"-t": 1, "--time": 1, "--timeout": 1},
    "rm": {"-f": 0, "--force": 0},
}
_LONG = {"-d": "--detach", "-w": "--workdir", "-e": "--env", "-i": "--interactive", "-f": "--force"}
_FAILED = 125


def fail(text: str, code: int = _FAILED) -> NoReturn:
    """Say what is wrong, as docker does, and end."""
    sys.stderr.write(f"docker: {text}\n")
    raise SystemExit(code)


def parse(command: str, words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options by long name, each with its values, and the words after them."""
    options: dict[str, list[str]] = {}
    known = _OPTIONS[command]
    place = 0
    while place < len(words) and words[place].startswith("-"):
        option, equals, value = words[place].partition("=")
        place += 1
        if option not in known and re.fullmatch("-[a-zA-Z]{2,}", option):
            fail(f"{command}: write the flags of {option} one by one; those known are {', '.join(known)}")
        if option not in known:
            fail(f"{command}: unknown flag: {option}; those known are {', '.join(known)}")
        if known[option] and not equals:
            if place == len(words):
                fail(f"{command}: {option} needs a value")
            value, place = words[place], place + 1
        elif equals and not known[option]:
            fail(f"{command}: {option} takes no value")
        options.setdefault(_LONG.get(option, option), []).append(value)
    return options, words[place:]


def variables(options: dict[str, list[str]]) -> dict[str, str]:
    """Variables that `-e` sets; one without a value would come from outside, and is refused."""
    given = options.get("--env", [])
    for one in given:
        if "=" not in one:
            fail(f"-e {one}: needs KEY=VALUE")
    return dict(one.split("=", 1) for one in given)


def ask(connection: dict[str, Any], operation: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the run, and end with its complaint where it has one."""
    server = http.client.HTTPConnection("127.0.0.1", connection["port"])
    headers = {"Authorization": f"Bearer {connection['key']}", "Content-Type": "application/json"}
    try:
        server.request("POST", f"/sandbox/{operation}", json.dumps(body).encode("utf-8", "replace"), headers)
        response = server.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        fail(f"the episode is over ({error or type(error).__name__})")
    finally:
        server.close()
    if response.status != 200:
        complaint = answer.get("error", {}).get("message", f"HTTP {response.status}")
        fail(complaint, 1 if response.status == 404 else _FAILED)
    return answer


def run(connection: dict[str, Any], words: list[str]) -> int:
    """Begin to use the episode's sandbox; prints its id."""
    options, rest = parse("run", words)
    if "--detach" not in options:
        fail("run: only with -d: the sandbox is there before the command, and stays")
    if not rest:
        fail("run: needs an image")
    image, *command = rest
    if command and (command[0] != "sleep" or len(command) != 2):
        fail(f"run: {' '.join(command)}: only `sleep TIME` can be run; use exec for commands")
    body = {"image": image, "environment": variables(options)}
    body["name"] = options.get("--name", [""])[-1]
    body["workdir"] = options.get("--workdir", [""])[-1]
    print(ask(connection, "run", body)["id"])
    return 0


def execute(connection: dict[str, Any], words: list[str]) -> int:
    """Run a command in the sandbox; its output and its exit code are this program's."""
    options, rest = parse("exec", words)
    if len(rest) < 2:
        fail("exec: needs a container and a command")
    container, *argv = rest
    body: dict[str, Any] = {"container": container, "argv": argv, "environment": variables(options)}
    body["workdir"] = options.get("--workdir", [""])[-1]
    if "--interactive" in options:
        body["input"] = base64.b64encode(sys.stdin.buffer.read()).decode("ascii")
    answer = ask(connection, "exec", body)
    sys.stdout.buffer.write(answer["output"].encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()
    if answer["timed_out_s"] is not None:
        sys.stderr.write(f"docker: the command was killed after {answer['timed_out_s']:g} s, with all it had started\n")
    return answer["exit_code"]


def stop(connection: dict[str, Any], command: str, words: list[str]) -> int:
    """End the use of the sandbox."""
    _, containers = parse(command, words)
    if not containers:
        fail(f"{command}: needs a container")
    for container in containers:
        ask(connection, "stop", {"container": container})
        print(container)
    return 0


def main(words: list[str]) -> int:
    """Run as `python docker_client.py CONNECTION.json COMMAND ...`; returns the exit code."""
    with open(words[0], encoding="utf-8") as file:  # noqa: PTH123 - pathlib would only cost its import
        connection = json.load(file)
    command, rest = (words[1] if len(words) > 1 else ""), words[2:]
    if command in ("version", "--version", "-v"):
        print(_VERSION)
        return 0
    if command == "run":
        return run(connection, rest)
    if command == "exec":
        return execute(connection, rest)
    if command in ("stop", "rm"):
        return stop(connection, command, rest)
    fail(f"{command or 'no command'}: there are run, exec, stop, rm and version\n{_USAGE}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
