"""The process tree of an outside agent, and what is left of it when Swerve itself is killed: nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import swerve
from swerve.agents.outside.program import Program

STARTER = """
import asyncio, sys
from swerve.agents.outside.program import Program

async def main():
    program = await Program.start(sys.argv[1:], {"PATH": "/usr/bin:/bin"})
    await program.wait()

asyncio.run(main())
"""


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_launcher_leaves_nothing(tmp_path, how):
    tree = f"echo $$ >{tmp_path}/a; setsid sh -c 'echo $$ >{tmp_path}/b; sleep 99' & sleep 99"
    files = [tmp_path / "a", tmp_path / "b"]
    here = os.environ | {"PYTHONPATH": str(Path(swerve.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", STARTER, "/bin/sh", "-c", tree], env=here) as launcher:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        pids = [int(file.read_text()) for file in files]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        os.kill(launcher.pid, how)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_output_is_read_whatever_its_length_and_the_last_line_stays(run):
    async def play():
        script = "import sys; sys.stdout.write('x' * 10**7); sys.stderr.write('y' * 10**6 + '\\n  the last  one\\n\\n')"
        program = await Program.start([sys.executable, "-c", script], {})
        code = await program.wait()
        await program.close()
        await program.close()
        return code, program.last_line

    assert run(play()) == (0, "the last one")


def test_signals_reach_the_program_as_they_are(run):
    async def play(script):
        program = await Program.start(["/bin/sh", "-c", script], {})
        code = await program.wait()
        await program.close()
        return code

    assert run(play("kill -TERM $$; sleep 9")) == 128 + signal.SIGTERM  # it does not inherit that it is ignored
    assert run(play("kill -INT $$; sleep 9")) == 128 + signal.SIGINT
    assert run(play("exit 7")) == 7
