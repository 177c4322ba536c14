import platform
from pathlib import Path

import pytest

from swerve.sandboxes import Sandbox, SandboxPool

from .conftest import Marked, Run

_NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts")


def output(run: Run, sandbox: Sandbox, command: str) -> str:
    return run(sandbox.exec(command, 20.0)).output


def test_there_is_no_network(run: Run, sandbox: Sandbox) -> None:
    interfaces = output(run, sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1").split()
    assert interfaces == ["lo"]
    assert run(sandbox.call("connect", ["192.0.2.1", 80], 20.0)) == "OSError"
    assert run(sandbox.call("connect", ["127.0.0.1", 9], 20.0)) == "ConnectionRefusedError"


def test_host_files_are_out_of_sight(run: Run, sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for path in (tmp_path, Path(__file__), Path.cwd(), "/home", "/etc/shadow", "/var", "/sys", "/boot"):
        assert run(sandbox.exec(f"ls {path}", 20.0)).exit_code != 0, path
    seen = output(run, sandbox, "ls -A / /root 2>/dev/null").split()
    assert not {"work", "home", "mnt", "var", ".bashrc", ".ssh", ".cache"} & set(seen)


def test_nothing_but_the_workspace_is_writable(run: Run, sandbox: Sandbox) -> None:
    places = "/ /usr /usr/bin /etc /opt /run /dev /run/empty /run/scratch /proc/sys/kernel/hostname"
    command = f'for d in {places}; do if [ -d $d ]; then touch $d/x; else echo x > $d; fi && echo "wrote $d"; done'
    assert "wrote" not in output(run, sandbox, f"({command}) 2>/dev/null")
    assert output(run, sandbox, "touch /tmp/x /testbed/x /dev/shm/x && echo fine") == "fine\n"


def test_sandboxes_do_not_see_each_other(run: Run, pool: SandboxPool, sandbox: Sandbox) -> None:
    other = run(pool.start("test"))
    output(run, other, "sleep 1000 & until grep -q sleep /proc/$!/cmdline; do :; done")  # it is bash until it is sleep
    output(run, other, "for d in /tmp /testbed /dev/shm; do echo mine > $d/mine; done")
    assert "sleep" in output(run, other, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "sleep" not in output(run, sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert output(run, sandbox, "ls /tmp/mine /testbed/mine /dev/shm/mine 2>/dev/null") == ""
    command = "readlink " + " ".join(f"/proc/self/ns/{name}" for name in _NAMESPACES)
    ours, theirs = output(run, sandbox, command).split(), output(run, other, command).split()
    host = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES]
    assert len(ours) == len(_NAMESPACES)
    assert all(len({*three}) == 3 for three in zip(ours, theirs, host, strict=True))
    run(other.close())


def test_the_environment_is_built_from_nothing(
    run: Run, marked: Marked, monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox
) -> None:
    async def names() -> str:
        async with SandboxPool([marked.image]) as pool:
            return (await (await pool.start("test")).exec("env", 20.0)).output

    monkeypatch.setenv("SWERVE_SECRET", "hunter2")
    told = run(names())
    assert "SWERVE_SECRET" not in told
    assert {line.split("=")[0] for line in told.split()} == {
        *("PATH", "HOME", "USER", "LANG", "TZ", "TERM", "PWD", "SHLVL", "_", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"),
    }


def test_no_process_is_root_outside(run: Run, shared: Marked, sandbox: Sandbox) -> None:
    assert output(run, sandbox, "id -u; id -G") == "1000\n1000\n"
    for pid in shared.processes():
        text = Path(f"/proc/{pid}/status").read_text()
        assert "\nUid:\t0\t" not in text
        assert "\nGroups:\t0" not in text


@pytest.mark.parametrize("where", ["command", "call"])
def test_no_privileges_are_left(run: Run, sandbox: Sandbox, where: str) -> None:
    if where == "call":
        status = run(sandbox.call("status", None, 20.0))
    else:
        lines = output(run, sandbox, "grep -E 'Cap|NoNew' /proc/self/status").splitlines()
        status = dict(line.split(":\t") for line in lines)
    assert all(int(status[f"Cap{kind}"], 16) == 0 for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    assert status["NoNewPrivs"] == "1"


def test_privileges_cannot_be_regained(run: Run, sandbox: Sandbox) -> None:
    assert run(sandbox.exec("unshare --user true", 20.0)).exit_code != 0
    assert run(sandbox.exec("mount -t tmpfs none /tmp", 20.0)).exit_code != 0
    assert run(sandbox.exec("umount /proc /opt/swerve /run/scratch", 20.0)).exit_code != 0
    assert run(sandbox.exec("find / -xdev -perm -4000 -exec {} --version ';' -quit; su -c id", 20.0)).exit_code != 0


def test_the_interpreter_behind_the_sandbox_is_out_of_reach(run: Run, sandbox: Sandbox) -> None:
    for path in ("mem", "environ", "maps", "fd/0", "root/etc"):
        assert run(sandbox.exec(f"ls /proc/1/{path}/ /proc/1/{path} && cat /proc/1/{path}", 20.0)).exit_code != 0
    output(run, sandbox, "kill -9 1; kill -STOP 1; kill -INT 1; kill -TERM 1; kill -9 -1")
    assert output(run, sandbox, "echo alive") == "alive\n"


def test_hidden_paths_are_empty_for_commands_and_were_there_for_the_harness(
    run: Run, shared: Marked, sandbox: Sandbox
) -> None:
    assert run(sandbox.call("state", None, 20.0))["answer"] == "forty-two\n"
    assert output(run, sandbox, f"ls -A {shared.marker} /opt/swerve") == f"{shared.marker}:\n\n/opt/swerve:\n"
    assert output(run, sandbox, f"grep -rl forty-two /opt /run /etc {shared.marker}") == ""


_ADD_KEY = """
import ctypes, platform
numbers = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
add_key, keyctl = (ctypes.c_long(number) for number in numbers)
call = ctypes.CDLL(None).syscall
before = call(keyctl, ctypes.c_long(10), ctypes.c_long(-3), b"user", b"swerve", ctypes.c_long(0))
added = call(add_key, b"user", b"swerve", b"secret", ctypes.c_long(6), ctypes.c_long(-3))
print(before > 0, added > 0)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="system call numbers unknown")
def test_sandboxes_share_no_keyring(run: Run, pool: SandboxPool, sandbox: Sandbox) -> None:
    other = run(pool.start("test"))
    for one in (sandbox, other):
        run(one.write_file("add_key.py", _ADD_KEY))
        assert output(run, one, "python3 add_key.py") in ("False True\n", "False False\n")
    run(other.close())


def test_packages_of_the_host_are_hidden_but_chosen_ones_are_there(run: Run, sandbox: Sandbox) -> None:
    assert output(run, sandbox, "python3 -m pytest --version").startswith("pytest ")
    told = output(run, sandbox, "python3 -c 'import numpy'; python3 -c 'import swerve'; python3 -c 'import pip'")
    assert told.count("ModuleNotFoundError") == 3
