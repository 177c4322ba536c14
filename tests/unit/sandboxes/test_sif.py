"""SIF files, read and written without Apptainer."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from swerve.sandboxes import SandboxImage
from swerve.sandboxes.sif import find_sif, read_sif, root_of, unpacked_sif, write_sif
from swerve.types import SwerveError

from .roots import tool


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    squashfs = tmp_path / "data"
    squashfs.write_bytes(os.urandom(5000))
    write_sif(tmp_path / "images" / "r2egym" / "task__1.sif", squashfs)
    return tmp_path / "images" / "r2egym" / "task__1.sif"


def test_what_is_written_is_read_back(sif: Path, tmp_path: Path) -> None:
    part = read_sif(sif)
    assert part.size == 5000
    assert sif.read_bytes()[part.offset : part.offset + part.size] == (tmp_path / "data").read_bytes()
    assert sif.read_bytes()[32:41] == b"SIF_MAGIC"


def test_both_layouts_are_found_and_nothing_else(sif: Path) -> None:
    images = sif.parents[1]
    assert find_sif(images, "task__1") == sif
    sif.rename(images / "task__1.sif")
    assert find_sif(images, "task__1") == images / "task__1.sif"
    assert find_sif(images, "task__2") is None


def test_the_root_of_an_image(sif: Path, tmp_path: Path) -> None:
    images, image = str(sif.parents[1]), SandboxImage(name="task__1")
    assert root_of(image, images, mounted=True) == sif
    assert root_of(replace(image, root=str(sif)), "", mounted=True) == sif
    assert root_of(replace(image, root=str(tmp_path)), "") == tmp_path
    assert root_of(image, "") is None
    with pytest.raises(SwerveError, match="holds no other"):
        root_of(SandboxImage(name="other"), images, mounted=True)
    sif.rename(sif.parents[1] / "default.sif")
    assert root_of(SandboxImage(name="other"), images, mounted=True) == sif.parents[1] / "default.sif"
    with pytest.raises(SwerveError, match="names no directory"):
        root_of(image, "", needs_one=True)


def test_devices_of_an_image_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERVE_CACHE_DIR", str(tmp_path / "cache"))
    program, root = tool("mksquashfs", "squashfs-tools"), tmp_path / "root"
    root.mkdir()
    devices = ["-p", "dev d 755 0 0", "-p", "dev/null c 666 0 0 1 3", "-p", "etc d 755 0 0"]
    subprocess.run([program, str(root), str(tmp_path / "data"), *devices], check=True, capture_output=True)
    write_sif(tmp_path / "image.sif", tmp_path / "data")
    unpacked = unpacked_sif(tmp_path / "image.sif")
    assert {path.name for path in unpacked.iterdir()} == {"dev", "etc", "proc", "run", "tmp"}
    assert list((unpacked / "dev").iterdir()) == []


def test_a_directory_stands_for_an_image_where_there_is_no_file(sif: Path) -> None:
    images, image = sif.parents[1], SandboxImage(name="task__2")
    (images / "task__2").mkdir()
    assert root_of(image, str(images), mounted=True) == images / "task__2"
    (images / "r2egym" / "task__2").mkdir()
    assert root_of(image, str(images), mounted=True) == images / "r2egym" / "task__2"
    sif.rename(images / "task__2.sif")
    assert root_of(image, str(images), mounted=True) == images / "task__2.sif"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is no SIF file"),
        (b"\x7fELF" * 100, "is no SIF file"),
        (b"x" * 10000, "is no SIF file"),
        (None, "cut short"),
    ],
)
def test_what_is_no_whole_sif_is_refused(sif: Path, data: bytes | None, told: str) -> None:
    sif.write_bytes(sif.read_bytes()[:-3000] if data is None else data)
    with pytest.raises(SwerveError, match=told):
        read_sif(sif)
