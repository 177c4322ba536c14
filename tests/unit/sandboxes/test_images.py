"""Docker archives and directories become SIF files: whole or absent, and nothing is written outside."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from swerve.cli.main import main
from swerve.sandboxes.docker_archive import read_archive, unpack_archive
from swerve.sandboxes.images import Source, build_images, read_manifest, sources_of, verify_images
from swerve.sandboxes.sif import read_sif
from swerve.types import MachineError, SwerveError

from .roots import APPTAINER_BIN, tool

Member = tuple[str, str | bytes] | tuple[str, str, str]
"""A file with its content, a directory (no content) or a link (`->` or `=>`, and where to)."""


def layer(*members: Member | tarfile.TarInfo) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as file:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                file.addfile(member)
                continue
            information = tarfile.TarInfo(member[0].rstrip("/"))
            information.mode, information.mtime = 0o600, 1_000_000_000
            content = member[-1].encode() if isinstance(member[-1], str) else member[-1]
            if len(member) == 3:
                information.type = tarfile.SYMTYPE if member[1] == "->" else tarfile.LNKTYPE
                information.linkname, content = member[2], b""
            elif member[0].endswith("/"):
                information.type, information.mode = tarfile.DIRTYPE, 0o700
            information.size = len(content)
            file.addfile(information, io.BytesIO(content))
    return data.getvalue()


def put(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    information = tarfile.TarInfo(name)
    information.size = len(data)
    archive.addfile(information, io.BytesIO(data))


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def configuration(layers: list[bytes]) -> bytes:
    return json.dumps({"rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha(data)}" for data in layers]}}).encode()


def docker(path: Path, layers: list[bytes], stored: list[bytes] | None = None, images: int = 1) -> Path:
    config = configuration(layers)
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": f"{sha(config)}.json", "RepoTags": [f"x:{n}"], "Layers": names} for n in range(images)]
    with tarfile.open(path, "w") as archive:
        put(archive, "manifest.json", json.dumps(manifest).encode())
        put(archive, f"{sha(config)}.json", config)
        for name, data in zip(names, stored or layers, strict=True):
            put(archive, name, data)
    return path


def oci(path: Path, layers: list[bytes], architectures: tuple[str, ...] = ("amd64",)) -> Path:
    config, packed = configuration(layers), [gzip.compress(data) for data in layers]
    blobs = [config, *packed]

    def descriptor(data: bytes, **more: Any) -> dict[str, Any]:
        return {"digest": f"sha256:{sha(data)}", "size": len(data), **more}

    manifest = json.dumps({"config": descriptor(config), "layers": [descriptor(data) for data in packed]}).encode()
    entries = [descriptor(manifest, platform={"architecture": name, "os": "linux"}) for name in architectures]
    index = json.dumps({"manifests": [*entries, descriptor(b"", platform={"architecture": "unknown"})]}).encode()
    with tarfile.open(path, "w") as archive:
        put(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        put(archive, "index.json", json.dumps({"manifests": [descriptor(index)]}).encode())
        for data in [*blobs, manifest, index]:
            put(archive, f"blobs/sha256/{sha(data)}", data)
    return path


def tree(root: Path) -> dict[str, str]:
    """What a directory holds: text of files, where links lead, `/` for directories."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        found[name] = f"-> {path.readlink()}" if path.is_symlink() else "/" if path.is_dir() else path.read_text()
    return found


def unpacked(path: Path, target: Path) -> dict[str, str]:
    target.mkdir()
    unpack_archive(path, target)
    return tree(target)


LAYERS = [
    layer(
        *(("usr/", ""), ("usr/bin/", ""), ("bin", "->", "usr/bin"), ("usr/bin/sh", "sh")),
        *(("usr/bin/dash", "=>", "usr/bin/sh"), ("etc/", ""), ("etc/a", "1"), ("etc/b", "2")),
        *(("opt/deep/x/", ""), ("opt/deep/x/lower", "low"), ("opt/file", "f"), ("gone/", ""), ("gone/x", "y")),
    ),
    layer(
        *(("bin/tool", "through the link"), ("etc/.wh.a", ""), ("etc/a2", "new"), (".wh.gone", "")),
        *(("opt/deep/x/upper", "up"), ("opt/.wh..wh..opq", ""), ("opt/later", "l"), ("etc/b/", "")),
        *(("etc/b/c", "a file became a directory"), ("usr/bin/sh", "new sh"), ("etc/.wh.a2", "")),
    ),
]
EXPECTED = {
    "bin": "-> usr/bin", "etc": "/", "etc/a2": "new", "etc/b": "/", "etc/b/c": "a file became a directory", "opt": "/",
    "opt/deep": "/", "opt/deep/x": "/", "opt/deep/x/upper": "up", "opt/later": "l", "usr": "/", "usr/bin": "/",
    "usr/bin/dash": "sh", "usr/bin/sh": "new sh", "usr/bin/tool": "through the link",
}  # fmt: skip


def test_layers_are_laid_over_one_another(tmp_path: Path) -> None:
    assert unpacked(docker(tmp_path / "a.tar", LAYERS), tmp_path / "a") == EXPECTED
    packed = [gzip.compress(data) for data in LAYERS]
    assert unpacked(docker(tmp_path / "b.tar", LAYERS, packed), tmp_path / "b") == EXPECTED
    assert unpacked(oci(tmp_path / "c.tar", LAYERS), tmp_path / "c") == EXPECTED
    whole = tmp_path / "d.tar.gz"
    whole.write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    assert unpacked(whole, tmp_path / "d") == EXPECTED
    assert read_archive(whole).image_id == f"sha256:{sha(configuration(LAYERS))}"


def test_everybody_may_read_and_times_are_kept(tmp_path: Path) -> None:
    program = tarfile.TarInfo("bin/tool")
    program.mode = 0o4700
    device = tarfile.TarInfo("dev/null")
    device.type = tarfile.CHRTYPE
    temporary = tarfile.TarInfo("tmp")
    temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
    data = layer(("root/", ""), ("root/secret", "x"), program, device, temporary)
    unpacked(docker(tmp_path / "a.tar", [data]), tmp_path / "a")
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "a").rglob("*")}
    assert modes == {"root": 0o755, "secret": 0o644, "bin": 0o755, "tool": 0o755, "dev": 0o755, "tmp": 0o1777}
    assert (tmp_path / "a" / "root" / "secret").stat().st_mtime == 1_000_000_000


@pytest.mark.parametrize(
    "members",
    [
        [("../outside/x", "y")],
        [("a/", ""), ("a/../../outside/x", "y")],
        [("a", "->", "../outside"), ("a/x", "y")],
        [("a", "->", "/../outside"), ("a/x", "y")],
        [("b/", ""), ("b/a", "->", "../../outside"), ("b/a/x", "y")],
        [("a", "=>", "../outside/victim"), ("a", "y")],
        [("l", "->", "../outside"), ("a", "=>", "l/victim")],
        [("a", "->", "b"), ("b", "->", "a"), ("a/x", "y")],
        [("a", "=>", "etc/not-there")],
        [(".wh...", "")],
        [("l", "->", ".."), ("l/outside/.wh.victim", "")],
        [("l", "->", ".."), ("l/outside/.wh..wh..opq", "")],
    ],
)
def test_nothing_leads_out_of_the_root(tmp_path: Path, members: list[Member]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("unharmed")
    archive = docker(tmp_path / "a.tar", [layer(*members)])
    with pytest.raises(SwerveError, match=r"a.tar: 0/layer.tar: member .* (leads? out of|links? to|lies below)"):
        unpacked(archive, tmp_path / "root")
    assert tree(outside) == {"victim": "unharmed"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "outside", "root"]


def test_absolute_links_count_from_the_images_root(tmp_path: Path) -> None:
    members: list[Member] = [("data", "->", "/srv/data"), ("data/x", "y"), ("far", "->", "/etc/../../../etc/passwd")]
    found = unpacked(docker(tmp_path / "a.tar", [layer(*members)]), tmp_path / "a")
    assert found["srv/data/x"] == "y"
    assert found["far"] == "-> /etc/../../../etc/passwd"


def test_archives_at_fault(tmp_path: Path) -> None:
    good = docker(tmp_path / "good.tar", LAYERS).read_bytes()
    other = [LAYERS[0], layer(("x", "y"))]
    cases = {
        "no such archive": None,
        r"is no whole archive": b"nonsense" * 1000,
        r"is no whole archive.*|holds neither": b"",
        r"holds 2 images \(x:0, x:1\): save them one by one": docker(tmp_path / "1", LAYERS, images=2).read_bytes(),
        r"1/layer.tar unpacks to sha256:.*, expected": docker(tmp_path / "2", LAYERS, other).read_bytes(),
        r"compressed with zstd": docker(tmp_path / "3", LAYERS, [b"\x28\xb5\x2f\xfd123", LAYERS[1]]).read_bytes(),
        r"the archive is damaged|is no whole archive": good.replace(b'"type": "layers"', b'"type": "l4yers"'),
        r"holds 2 images for": oci(tmp_path / "4", LAYERS, ("amd64", "amd64")).read_bytes(),
    }  # fmt: skip
    for number, (told, data) in enumerate(cases.items()):
        path = tmp_path / f"case{number}.tar"
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(SwerveError, match=told):
            unpacked(path, tmp_path / f"root{number}")
    for length in (700, 5000, len(good) // 2, len(good) - 9000):
        (tmp_path / "cut.tar").write_bytes(good[:length])
        with pytest.raises(SwerveError, match=r"cut.tar: "):
            unpacked(tmp_path / "cut.tar", tmp_path / f"cut{length}")


# ------------------------------------------------------------------------------------------------ building


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(APPTAINER_BIN), prepend=":")
    tool("mksquashfs", "squashfs-tools, or `make apptainer`")
    tool("unsquashfs", "squashfs-tools, or `make apptainer`")


def contents(sif: Path, target: Path) -> dict[str, str]:
    part = read_sif(sif)
    subprocess.run(
        ["unsquashfs", "-quiet", "-no-progress", "-offset", str(part.offset), "-dest", target, sif],
        check=True,
        capture_output=True,
    )
    return tree(target)


@pytest.mark.usefixtures("tools")
def test_images_are_built_once_and_again_where_something_changed(tmp_path: Path) -> None:
    archive, directory, out = docker(tmp_path / "one.tar", LAYERS), tmp_path / "two", tmp_path / "out"
    (directory / "etc").mkdir(parents=True)
    (directory / "etc/x").write_text("y")
    for place in ("dev", "proc"):
        (directory / place).mkdir()
        (directory / place / "of-the-kernel").touch()
    broken = tmp_path / "three.tar"
    broken.write_bytes(b"nonsense" * 1000)
    sources, lines = sources_of([archive, directory, broken], []), []
    assert [source.name for source in sources] == ["one", "two", "three"]

    def build() -> list[str]:
        return [outcome.status for outcome in build_images(sources, out, lines.append)]

    assert build() == ["built", "built", "failed"]
    assert "1/3 one: unpacking layers" in lines and any(line.startswith("3/3 three: failed: ") for line in lines)
    assert contents(out / "one.sif", tmp_path / "seen1") == EXPECTED
    assert contents(out / "two.sif", tmp_path / "seen2") == {"etc": "/", "etc/x": "y", "dev": "/", "proc": "/"}
    known = read_manifest(out)
    assert known["one"].image_id == f"sha256:{sha(configuration(LAYERS))}" and known["two"].image_id == ""
    assert known["one"].sha256 == sha((out / "one.sif").read_bytes())
    assert sorted(path.name for path in out.iterdir()) == ["images.json", "one.sif", "two.sif"]
    before = (out / "one.sif").stat().st_mtime_ns
    assert build() == ["skipped", "skipped", "failed"]
    assert (out / "one.sif").stat().st_mtime_ns == before
    (out / "two.sif").write_bytes((out / "two.sif").read_bytes()[:-1])
    docker(archive, LAYERS[:1])
    assert [outcome.status for outcome in verify_images(out)] == ["ok", "differs"]
    assert build() == ["built", "built", "failed"]
    (out / "two.sif").unlink()
    assert [outcome.status for outcome in verify_images(out)] == ["ok", "missing"]


@pytest.mark.usefixtures("tools")
def test_a_killed_builder_leaves_no_half_file(tmp_path: Path) -> None:
    archive, out = docker(tmp_path / "one.tar", LAYERS), tmp_path / "out"
    code = (
        "import os, signal, sys; from pathlib import Path; from swerve.sandboxes.images import *\n"
        "def tell(line):\n    if 'compressing' in line: os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_images([Source(name='one', path=Path(sys.argv[1]))], Path(sys.argv[2]), tell)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, archive, out], env=os.environ | {"PYTHONPATH": ":".join(sys.path)}, check=False
    )
    assert done.returncode == -9
    left = list(out.iterdir())
    assert [path.name[:7] for path in left] == [".build-"]
    build_images([Source(name="one", path=archive)], out, lambda line: None)
    assert sorted(path.name for path in out.iterdir()) == ["images.json", "one.sif"]


@pytest.mark.usefixtures("tools")
def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive, out = docker(tmp_path / "one.tar", LAYERS), tmp_path / "out"
    image_id = read_archive(archive).image_id
    wanted = {"task__1": {"source": "one.tar", "image_id": image_id}, "task__2": {"source": "absent.tar"}}
    manifest = tmp_path / "wanted.json"
    manifest.write_text(json.dumps({"images": wanted}))
    assert main(["sandbox", "build", str(manifest), "--out", str(out), "--json"]) == 1
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert (report["built"], report["at_fault"]) == (1, 1)
    assert [image["status"] for image in report["images"]] == ["built", "failed"]
    assert "1/2 task__1: compressing" in told.err and "absent.tar: no such archive" in told.err
    assert main(["sandbox", "images", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] == 1
    wanted["task__1"]["image_id"] = "sha256:" + "0" * 64
    manifest.write_text(json.dumps({"images": {"task__1": wanted["task__1"]}}))
    assert main(["sandbox", "build", str(manifest), "--out", str(out)]) == 1
    assert f"is image {image_id}, expected sha256:000" in capsys.readouterr().out
    (out / "task__1.sif").write_bytes(b"")
    assert main(["sandbox", "images", str(out)]) == 1
    assert "task__1: differs: " in capsys.readouterr().out
    assert main(["sandbox", "build", str(archive), "--out", str(out), "--name", "other"]) == 0
    assert set(read_manifest(out)) == {"task__1", "other"}


def test_words_at_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SwerveError, match="--name: 1 for 2 sources"):
        sources_of([Path("a"), Path("b")], ["x"])
    with pytest.raises(SwerveError, match="the image name a occurs twice"):
        sources_of([Path("x/a.tar"), Path("y/a.tar.gz")], [])
    with pytest.raises(SwerveError, match=r"'\.\./a' cannot name an image"):
        sources_of([Path("x/a.tar")], ["../a"])
    for text, told in (
        ("{", "no manifest"),
        ('{"images": {"a": {}}}', "key images.a: expected an object with a source"),
        ('{"images": {"a": {"source": "x", "md5": ""}}}', "key images.a.md5: unknown"),
    ):
        (tmp_path / "images.json").write_text(text)
        with pytest.raises(SwerveError, match=told):
            sources_of([tmp_path / "images.json"], [])
    (tmp_path / "images.json").write_text('{"images": {"a": {"source": "x"}}}')
    with pytest.raises(SwerveError, match=r"key images.a.image_id: missing"):
        read_manifest(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="install your system's package squashfs-tools"):
        build_images([], tmp_path / "out", print)
