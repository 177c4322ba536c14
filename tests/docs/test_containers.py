"""The container recipe: what it is built from is pinned, what it writes down is true, and its script runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALL = ROOT / "containers" / "install.sh"
DOCKERFILE = (ROOT / "containers" / "Dockerfile").read_text()
DEFINITION = (ROOT / "containers" / "swerve.def").read_text()
LOCKS = sorted((ROOT / "containers" / "locks").glob("*.lock"))
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BASE = "python@sha256:" + "0" * 64


def pins(lock: Path) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of every package in a lock."""
    found: dict[str, tuple[str, int]] = {}
    for block in re.split(r"\n(?=[a-z])", "\n" + lock.read_text()):
        name, stated, version = re.sub(r"[ ;].*", "", block.strip().partition("\n")[0]).partition("==")
        if stated:
            found[name] = (version, block.count("--hash=sha256:"))
    return found


def install(tmp_path: Path, **variables: str) -> str:
    """What `install.sh` says when it refuses."""
    environment = {"PATH": os.environ["PATH"], "SOURCE_COMMIT": COMMIT, "BASE_IMAGE": BASE} | variables
    done = subprocess.run(
        ["sh", INSTALL, tmp_path / "source"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and not (tmp_path / "venv").exists()
    return done.stderr


def test_both_recipes_are_built_on_one_base_that_is_pinned():
    pinned = re.compile(r"^(?:ARG|   ) BASE_IMAGE=python(?::[\w.-]+)?@(sha256:[0-9a-f]{64})$", re.MULTILINE)
    (docker,), (apptainer,) = pinned.findall(DOCKERFILE), pinned.findall(DEFINITION)
    assert docker == apptainer
    assert re.findall(r"^FROM (.*)$", DOCKERFILE, re.MULTILINE) == ["${BASE_IMAGE}"]


def test_what_the_script_reads_is_given_by_both_recipes():
    read = set(re.findall(r"\$\{([A-Z_]+):-", INSTALL.read_text()))
    assert read == {"SOURCE_COMMIT", "BASE_IMAGE", "EXTRAS"}
    assert read <= set(re.findall(r"^ARG ([A-Z_]+)", DOCKERFILE.rpartition("FROM")[2], re.MULTILINE))
    assert read == set(re.findall(r"([A-Z_]+)='\{\{", DEFINITION))


def test_the_image_does_not_run_as_root_and_takes_only_what_is_named():
    instructions = re.findall(r"^([A-Z]+) (.*)$", DOCKERFILE, re.MULTILINE)
    assert [rest for name, rest in instructions if name == "USER"] == ["10001"]
    assert [name for name, _ in instructions].index("USER") > [name for name, _ in instructions].index("RUN")
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert ignored[0] == "*"
    taken = {line[1:] for line in ignored if line.startswith("!")}
    assert taken == set(re.findall(r"^    (\S+) /opt/swerve/source/\1$", DEFINITION, re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_locks_of_extras_have_hashes_and_add_to_the_lock(lock: Path):
    base, extra = pins(ROOT / "requirements.lock"), pins(lock)
    assert len(base) > 50 and extra and not base.keys() & extra.keys()
    assert all(hashes for _, hashes in (base | extra).values())


def test_a_build_that_cannot_say_what_it_is_made_of_is_refused(tmp_path: Path):
    assert "SOURCE_COMMIT must be" in install(tmp_path, SOURCE_COMMIT="")
    assert "SOURCE_COMMIT must be" in install(tmp_path, SOURCE_COMMIT="main")
    assert "40 digits of a commit, not abc" in install(tmp_path, SOURCE_COMMIT="abc")
    assert "BASE_IMAGE must name its digest" in install(tmp_path, BASE_IMAGE="python:3.11-slim")
    names = ", ".join(sorted((lock.stem for lock in LOCKS), key=["tpu", "cuda", "ray"].index))
    assert f"EXTRAS: there is no gpu: choose among {names}" in install(tmp_path, EXTRAS="gpu")


@pytest.mark.slow
def test_the_script_installs_what_the_locks_say(tmp_path: Path):
    source = tmp_path / "opt" / "source"
    source.mkdir(parents=True)
    taken = ["pyproject.toml", "requirements.lock", "README.md", "LICENSE", "src", "recipes", "containers"]
    tar = subprocess.run(["tar", "-C", str(ROOT), "-c", *taken], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(source)], input=tar.stdout, check=True)
    # The script finds the interpreter of these tests under the name that it has in the base.
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(sys.executable)
    environment = os.environ | {"SOURCE_COMMIT": COMMIT, "BASE_IMAGE": BASE, "SOURCE_DATE_EPOCH": "1700000000"}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    subprocess.run(["sh", INSTALL, str(source)], env=environment, check=True)

    home = tmp_path / "opt"
    assert sorted(path.name for path in home.iterdir()) == ["provenance.json", "recipes", "venv"]
    provenance = json.loads((home / "provenance.json").read_text())
    assert (provenance["source_commit"], provenance["base_image"]) == (COMMIT, BASE)
    assert provenance["built_at"] == "2023-11-14T22:13:20+00:00"
    assert list(provenance["locks"]) == ["requirements.lock"]
    locked = pins(ROOT / "requirements.lock")
    installed = provenance["packages"]
    assert {"jax", "mlperf-logging", "swerve"} <= installed.keys()
    assert installed["mlperf-logging"] == locked["mlperf-logging"][0]
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    read = [home / "venv/bin/swerve", "config", "show", home / "recipes/demo.toml"]
    shown = subprocess.run(read, env=clean, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "[algorithm]" in shown.stdout
