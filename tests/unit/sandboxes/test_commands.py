import asyncio
import time

import pytest

from swerve.sandboxes import Sandbox

from .conftest import LIMITS, Run

_NOISE = "echo started; (while :; do echo noise; sleep 0.01; done) & echo $! > pid"
_COUNT_FORKS = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
except BlockingIOError:
    print(count)
"""


def processes(run: Run, sandbox: Sandbox) -> int:
    """Live processes of the sandbox besides its first and those that count."""
    command = "n=0; for s in /proc/[0-9]*/stat; do read -r line <$s && n=$((n + 1)); done 2>/dev/null; echo $n"
    return int(run(sandbox.exec(command, 20.0)).output) - 2


@pytest.mark.parametrize(
    ("command", "output", "exit_code"),
    [
        ("echo out; echo error >&2; pwd", "out\nerror\n/testbed\n", 0),
        ("exit 7", "", 7),
        ("kill -SEGV $$", "", 139),
        ("cat; echo end", "end\n", 0),
        ("printf '\\377\\303\\251'", "\ufffd\u00e9", 0),
        ("[[ a == a ]] && set -o pipefail && false | true", "", 1),
        ("no-such-command 2>/dev/null", "", 127),
    ],
)
def test_result(run: Run, sandbox: Sandbox, command: str, output: str, exit_code: int) -> None:
    result = run(sandbox.exec(command, 20.0))
    assert (result.output, result.exit_code, result.timed_out) == (output, exit_code, False)


def test_a_command_that_cannot_be_started_is_a_result(run: Run, sandbox: Sandbox) -> None:
    assert run(sandbox.exec("echo a\0b", 20.0)).exit_code == 126
    assert run(sandbox.exec("echo " + "a" * (1 << 18), 20.0)).exit_code == 126


def test_a_timeout_kills_the_whole_tree(run: Run, sandbox: Sandbox) -> None:
    stubborn = "setsid sh -c 'trap \"\" TERM HUP INT; (setsid sleep 1000 &) ; sleep 1000'"
    command = f"sleep 1000 & {stubborn} & echo begun; sleep 1000"
    began = time.monotonic()
    result = run(sandbox.exec(command, 0.7))
    assert (result.output, result.exit_code, result.timed_out) == ("begun\n", 124, True)
    assert 0.7 <= time.monotonic() - began < 10
    assert processes(run, sandbox) == 0


def test_no_default_cuts_the_time_a_caller_grants(run: Run, sandbox: Sandbox) -> None:
    assert LIMITS.cpu_s is None
    assert run(sandbox.exec("ulimit -t", 20.0)).output == "unlimited\n"


def test_background_processes_outlive_a_command_but_do_not_hold_it(run: Run, sandbox: Sandbox) -> None:
    began = time.monotonic()
    assert run(sandbox.exec(_NOISE, 20.0)).output.startswith("started\n")
    assert time.monotonic() - began < 10
    assert processes(run, sandbox) >= 1
    assert run(sandbox.exec("kill -9 $(cat pid); sleep 0.1", 20.0)).exit_code == 0
    assert processes(run, sandbox) == 0


def test_a_cancelled_wait_kills_the_command(run: Run, sandbox: Sandbox) -> None:
    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await sandbox.exec("sleep 1000 & sleep 1000", 1000.0)

    run(cancel())
    assert run(sandbox.exec("echo next", 20.0)).output == "next\n"
    assert processes(run, sandbox) == 0


def test_long_output_keeps_its_head_and_tail_and_tells_the_cut(run: Run, sandbox: Sandbox) -> None:
    text = run(sandbox.exec("echo first; yes | head -c 1000000; echo last", 20.0)).output
    assert text.startswith("first\ny\n")
    assert text.endswith("y\nlast\n")
    assert f"\n[{6 + 1_000_000 + 5 - LIMITS.output_bytes} bytes cut]\n" in text
    assert len(text) < LIMITS.output_bytes + 40


def test_endless_output_ends_in_time(run: Run, sandbox: Sandbox) -> None:
    result = run(sandbox.exec("yes", 0.5))
    assert result.timed_out
    assert "bytes cut" in result.output


def test_the_disk_is_bounded(run: Run, sandbox: Sandbox) -> None:
    written = run(sandbox.exec("for n in 1 2 3 4 5 6; do head -c 1000000 /dev/zero > /tmp/$n; done; du -sb /tmp", 20.0))
    assert "No space left" in written.output
    assert run(sandbox.exec("head -c 3000000 /dev/zero > /dev/shm/big", 20.0)).exit_code != 0
    assert run(sandbox.exec("rm /tmp/*; echo again > file; cat file", 20.0)).output == "again\n"


def test_the_memory_of_a_process_is_bounded(run: Run, sandbox: Sandbox) -> None:
    result = run(sandbox.exec("python3 -S -c 'bytearray(1 << 30)'", 20.0))
    assert "MemoryError" in result.output


def test_a_fork_bomb_is_bounded_and_the_sandbox_survives_it(run: Run, sandbox: Sandbox) -> None:
    result = run(sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 1000", 1.5))
    assert result.timed_out
    assert processes(run, sandbox) == 0
    run(sandbox.write_file("count.py", _COUNT_FORKS))
    assert LIMITS.num_processes - 4 <= int(run(sandbox.exec("python3 count.py", 20.0)).output) < LIMITS.num_processes
    assert run(sandbox.call("echo", 1, 20.0)) == 1


def test_commands_may_overlap(run: Run, sandbox: Sandbox) -> None:
    async def both() -> list[str]:
        slow, fast = sandbox.exec("sleep 0.3; echo slow", 20.0), sandbox.exec("echo fast", 20.0)
        return [result.output for result in await asyncio.gather(slow, fast)]

    assert run(both()) == ["slow\n", "fast\n"]
