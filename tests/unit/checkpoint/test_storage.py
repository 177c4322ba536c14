"""Directories here and behind URLs behave alike, and their faults are one line."""

import functools
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from swerve.checkpoint import open_directory, write_file
from swerve.types import MachineError, SwerveError


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://bucket/model"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["path", "text", "file", "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path, memory: str) -> str | Path:
    place = tmp_path / "a b"
    return {"path": place, "text": str(place), "file": f"file://{place}", "memory": memory}[request.param]


def test_files_are_written_listed_read_in_parts_and_removed(location: str | Path) -> None:
    directory = open_directory(location)
    assert directory.sizes() == {}
    write_file(directory, "x", b"0123456789")
    write_file(directory, "y", "text")
    again = open_directory(location)
    assert again.sizes() == {"x": 10, "y": 4}
    assert again.read("y") == b"text"
    part = bytearray(4)
    again.read_into("x", 3, memoryview(part))
    assert part == b"3456"
    before = again.stamp("x")
    write_file(again, "x", b"other")
    assert (again.size("x"), again.stamp("x") == before) == (5, False)
    again.remove("x")
    again.remove("x")
    assert again.sizes() == {"y": 4}


def test_a_file_is_whole_or_absent(location: str | Path) -> None:
    directory = open_directory(location)
    with pytest.raises(RuntimeError, match="midway"), directory.create("x") as file:
        file.write(b"half")
        raise RuntimeError("midway")
    assert directory.sizes() == {}


def test_absent_and_short_files_are_named(location: str | Path) -> None:
    directory = open_directory(location)
    with pytest.raises(SwerveError, match=r"/x: cannot be read: [Nn]o such file"):
        directory.read("x")
    with pytest.raises(SwerveError, match=r"/x: cannot be read: [Nn]o such file"):
        directory.size("x")
    write_file(directory, "x", b"short")
    with pytest.raises(SwerveError, match="/x: "):
        directory.read_into("x", 3, memoryview(bytearray(4)))


def test_schemes_say_what_they_need() -> None:
    with pytest.raises(SwerveError, match=r"odd://x: .*odd.*: name a local path, or s3://"):
        open_directory("odd://x")
    if not importlib.util.find_spec("s3fs"):
        with pytest.raises(SwerveError, match=r"s3:// needs a package that is not installed: .*s3fs"):
            open_directory("s3://bucket/model")


class Locked(MemoryFileSystem):
    """A file system that lets nobody in."""

    protocol = "locked"
    fault: Exception = PermissionError("who are you?")

    def ls(self, path: str, detail: bool = True, **options: object) -> list:
        raise self.fault

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        raise self.fault


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (PermissionError("who are you?"), SwerveError, r"access denied \(PermissionError: who are you\?\): log in"),
        (RuntimeError("Unable to\nlocate credentials"), SwerveError, "access denied .*Unable to locate credentials"),
        (TimeoutError("10 s"), MachineError, "cannot be read: TimeoutError: 10 s: check the address and the network"),
    ],
)
def test_faults_of_a_file_system_are_one_line(fault: Exception, kind: type, message: str) -> None:
    fsspec.register_implementation("locked", Locked, clobber=True)
    Locked.fault = fault
    directory = open_directory("locked://bucket/model")
    with pytest.raises(kind, match=f"^locked://bucket/model: {message}"):
        directory.sizes()
    with pytest.raises(kind, match=f"^locked://bucket/model/x: {message}") as caught:
        directory.read("x")
    assert "\n" not in str(caught.value)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves files, with byte ranges unless told otherwise."""

    ranges = True

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        if asked is None or not self.ranges:
            return super().do_GET()
        content = Path(self.translate_path(self.path)).read_bytes()
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_web_servers_are_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "x").write_bytes(bytes(range(256)) * 100)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Ranges, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        directory = open_directory(f"http://127.0.0.1:{server.server_port}")
        part = bytearray(300)
        directory.read_into("x", 200, memoryview(part))
        assert part == (bytes(range(256)) * 3)[200:500]
        assert directory.size("x") == 25_600
        assert directory.sizes() == {"x": 25_600}
        with pytest.raises(SwerveError, match="/y: cannot be read: no such file"):
            directory.read("y")
        monkeypatch.setattr(Ranges, "ranges", False)
        with pytest.raises(SwerveError, match="does not serve byte ranges"):
            directory.read_into("x", 200, memoryview(part))
    finally:
        server.shutdown()
        server.server_close()
