import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swerve.sandboxes import Sandbox, SandboxFileError, SandboxPool

from .conftest import LIMITS, Run


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=300))
def test_what_is_written_is_read(run: Run, sandbox: Sandbox, text: str) -> None:
    run(sandbox.write_file("some/where/file.py", text))
    assert run(sandbox.read_file("/testbed/some/where/file.py")) == text


def test_mode_and_owner(run: Run, sandbox: Sandbox) -> None:
    run(sandbox.write_file("tool", "#!/bin/sh\necho ran\n", 0o755))
    assert run(sandbox.exec("./tool; stat -c '%a %u' tool", 20.0)).output == "ran\n755 1000\n"


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../etc/passwd", "a/../../etc/passwd", "/testbed/../tmp/x", "/proc/self/environ", "/tmp/x", ""],
)
def test_paths_that_lead_out_are_refused(run: Run, sandbox: Sandbox, path: str) -> None:
    with pytest.raises(SandboxFileError):
        run(sandbox.read_file(path))
    with pytest.raises(SandboxFileError):
        run(sandbox.write_file(path, "x"))


def test_symbolic_links_that_lead_out_are_refused_and_others_followed(run: Run, sandbox: Sandbox) -> None:
    run(sandbox.exec("ln -s /etc/passwd out; ln -s /tmp tmp; echo in > real; ln -s real in; ln -s loop loop", 20.0))
    assert run(sandbox.read_file("in")) == "in\n"
    run(sandbox.write_file("in", "changed"))
    assert run(sandbox.exec("cat real; test -L in && echo link", 20.0)).output == "changedlink\n"
    for path in ("out", "tmp/x", "loop"):
        with pytest.raises(SandboxFileError):
            run(sandbox.read_file(path))
        with pytest.raises(SandboxFileError):
            run(sandbox.write_file(path, "x"))


@pytest.mark.parametrize(
    ("command", "path", "told"),
    [
        ("true", "missing", "missing: no such file or directory"),
        ("mkdir d", "d", "d: is a directory"),
        ("mkfifo f", "f", "f: is not a regular file"),
        ("printf '\\377' > b", "b", "b: is not UTF-8 text"),
        ("head -c 50001 /dev/zero > l", "l", "l: is larger than 50000 bytes"),
        ("touch n; chmod 0 n", "n", "n: permission denied"),
        ("true", "a\0b", "a\0b: has a NUL character in its name"),
    ],
)
def test_files_that_cannot_be_read(run: Run, sandbox: Sandbox, command: str, path: str, told: str) -> None:
    run(sandbox.exec(command, 20.0))
    with pytest.raises(SandboxFileError) as caught:
        run(sandbox.read_file(path))
    assert str(caught.value) == told


def test_a_file_is_written_whole_or_not_at_all(run: Run, sandbox: Sandbox) -> None:
    run(sandbox.write_file("file", "before"))
    with pytest.raises(SandboxFileError):
        run(sandbox.write_file("file", "x" * (LIMITS.file_bytes + 1)))
    run(sandbox.exec("for n in 1 2 3; do head -c 1990000 /dev/zero > /tmp/$n; done", 20.0))
    with pytest.raises(SandboxFileError, match=r"[Nn]o space left"):
        run(sandbox.write_file("file", "x" * 500_000))
    assert run(sandbox.read_file("file")) == "before"
    assert run(sandbox.exec("ls -A", 20.0)).output == "file\nrun_tests\n"


def test_prepare_writes_before_the_first_command(run: Run, pool: SandboxPool) -> None:
    sandbox = run(pool.start("test", {"a": 1}))
    assert run(sandbox.read_file("repair.py")) == "x = {'a': 1}\n"
    run(sandbox.close())
