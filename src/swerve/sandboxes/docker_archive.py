"""Archives of `docker save` and OCI layouts in a tar file: their layers, checked, as one directory.

Layers are laid one over the other as a container's root would show them: what a layer whites out is gone, links are
followed as from inside, and nothing is ever written through one that leads out. Owners, special files and set-user-id
bits are dropped, and everybody may read all of it: sandboxes run as an ordinary user.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from swerve.types import SwerveError

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_MAX_LINKS = 40
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_FAULTS = (
    *(tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error),
    *(ValueError, KeyError, IndexError, TypeError, AttributeError),
)
"""What reading a damaged or foreign archive raises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchivedImage:
    """The one image of an archive.

    Attributes:
        image_id: `sha256:` and the digest of its configuration, which Docker knows it by.
        layers: Members of the archive, lowest first.
        layer_ids: Digest of each layer once it is unpacked.
    """

    image_id: str
    layers: tuple[str, ...]
    layer_ids: tuple[str, ...]


def read_archive(path: Path) -> ArchivedImage:
    """Find the image that an archive holds.

    Raises:
        SwerveError: It is no such archive, is cut short, or holds more than one image.
    """
    with _opened(path) as archive:
        names = set(archive.getnames())
        if "manifest.json" in names:
            config_name, layers = _docker_manifest(archive, path)
        elif "index.json" in names:
            config_name, layers = _oci_manifest(archive, path)
        else:
            raise SwerveError(f"{path}: holds neither manifest.json nor index.json: make it with `docker save`")
        data = _bytes(archive, config_name)
        config = json.loads(data)
        digest = hashlib.sha256(data).hexdigest()
        if Path(config_name).stem != digest:
            raise SwerveError(f"{path}: {config_name} has SHA-256 {digest}: the archive is damaged; save it again")
        layer_ids = tuple(config["rootfs"]["diff_ids"])
        if len(layer_ids) != len(layers) or not set(layers) <= names:
            raise SwerveError(f"{path}: not all {len(layer_ids)} layers are there: save it again")
        return ArchivedImage(image_id=f"sha256:{digest}", layers=tuple(layers), layer_ids=layer_ids)


def unpack_archive(path: Path, target: Path) -> ArchivedImage:
    """Lay the layers of an archive's image into an empty directory.

    Returns:
        The image.

    Raises:
        SwerveError: It is no such archive, is damaged, or a layer would write outside the directory.
        OSError: The directory cannot be written.
    """
    image = read_archive(path)
    tree = _Tree(target)
    with _opened(path) as archive:
        for name, layer_id in zip(image.layers, image.layer_ids, strict=True):
            stream = archive.extractfile(name)
            if stream is None:
                raise SwerveError(f"{path}: {name} is no file")
            digest = tree.lay(stream, f"{path}: {name}")
            if digest != layer_id:
                raise SwerveError(f"{path}: {name} unpacks to {digest}, expected {layer_id}: save it again")
    tree.finish()
    return image


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    if not path.is_file():
        raise SwerveError(f"{path}: no such archive")
    try:
        with tarfile.open(path) as archive:
            yield archive
    except _FAULTS as error:
        told = " ".join(str(error).split()) or type(error).__name__
        raise SwerveError(f"{path}: is no whole archive of an image ({told}): make it with `docker save`") from None


def _bytes(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


def _docker_manifest(archive: tarfile.TarFile, path: Path) -> tuple[str, list[str]]:
    images = json.loads(_bytes(archive, "manifest.json"))
    if len(images) != 1:
        tags = ", ".join(tag for image in images for tag in image.get("RepoTags") or ["untagged"])
        raise SwerveError(f"{path}: holds {len(images)} images ({tags}): save them one by one")
    return images[0]["Config"], images[0]["Layers"]


def _oci_manifest(archive: tarfile.TarFile, path: Path) -> tuple[str, list[str]]:
    entries = json.loads(_bytes(archive, "index.json"))["manifests"]
    for _ in range(3):
        wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
        here = [entry for entry in entries if entry.get("platform", {}).get("architecture", wanted) == wanted]
        if len(here) != 1:
            raise SwerveError(f"{path}: holds {len(here)} images for {wanted}, expected 1: save them one by one")
        manifest = json.loads(_bytes(archive, _blob(here[0])))
        if "manifests" not in manifest:
            return _blob(manifest["config"]), [_blob(layer) for layer in manifest["layers"]]
        entries = manifest["manifests"]
    raise SwerveError(f"{path}: its index leads to no image")


def _blob(descriptor: dict[str, Any]) -> str:
    return "blobs/" + descriptor["digest"].replace(":", "/")


class _Hashing(io.RawIOBase):
    """A stream that is hashed as it is read."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self._digest.update(data)
        return data

    def finish(self) -> str:
        """Read what is left; the digest of everything."""
        while self.read(1 << 20):
            pass
        return f"sha256:{self._digest.hexdigest()}"


class _Tree:
    """A root file system in the making."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fresh: set[str] = set()

    def lay(self, stream: IO[bytes], where: str) -> str:
        """Lay one layer over what is there; returns the digest of the unpacked layer.

        Raises:
            SwerveError: A member of it leads out of the root, or it is neither plain nor gzip.
        """
        self._fresh = set()
        magic = stream.read(4)
        stream.seek(0)
        if magic[:4] == b"\x28\xb5\x2f\xfd":
            raise SwerveError(f"{where}: is compressed with zstd: save it with `docker save`, or as gzip")
        hashing = _Hashing(gzip.GzipFile(fileobj=stream) if magic[:2] == b"\x1f\x8b" else stream)
        with tarfile.open(fileobj=hashing, mode="r|") as layer:
            for member in layer:
                self._add(layer, member, where)
        return hashing.finish()

    def finish(self) -> None:
        """Give permissions that an ordinary user gets along with."""
        for directory, _, names in os.walk(self._root):
            for path in (Path(directory), *(Path(directory, name) for name in names)):
                mode = path.lstat().st_mode
                if stat.S_ISDIR(mode):
                    path.chmod(0o1777 if mode & stat.S_ISVTX else 0o755)
                elif stat.S_ISREG(mode):
                    path.chmod(0o755 if mode & 0o111 else 0o644)

    def _add(self, layer: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> None:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if not parts:
            return
        if ".." in parts:
            raise SwerveError(f"{where}: member {member.name} leads out of the image")
        parent = self._resolve(parts[:-1], member.name, where)
        name = parts[-1]
        if name == _OPAQUE:
            self._clear(parent)
        elif name.startswith(_WHITEOUT):
            hidden = parent / name.removeprefix(_WHITEOUT)
            if name.removeprefix(_WHITEOUT) in ("", ".", ".."):
                raise SwerveError(f"{where}: member {member.name} leads out of the image")
            self._hide(hidden)
        else:
            self._write(layer, member, parent / name, where)

    def _write(self, layer: tarfile.TarFile, member: tarfile.TarInfo, path: Path, where: str) -> None:
        if member.isdir():
            if path.is_symlink() or not path.is_dir():
                _remove(path)
                path.mkdir()
            path.chmod(member.mode & 0o1777 | 0o700)
        elif member.issym():
            _remove(path)
            path.symlink_to(member.linkname)
        elif member.islnk():
            source = self._hard_link(member, where)
            if source != path:
                _remove(path)
                os.link(source, path, follow_symlinks=False)
        elif member.isfile():
            _remove(path)
            source = layer.extractfile(member)
            assert source is not None
            with path.open("xb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            path.chmod(member.mode & 0o777 | 0o600)
            os.utime(path, (member.mtime, member.mtime))  # byte code is good as long as its source is of that time
        else:
            return  # a device or a pipe: sandboxes have their own
        while path != self._root and str(path) not in self._fresh:
            self._fresh.add(str(path))
            path = path.parent

    def _hard_link(self, member: tarfile.TarInfo, where: str) -> Path:
        parts = [part for part in member.linkname.split("/") if part not in ("", ".")]
        if not parts or ".." in parts:
            raise SwerveError(f"{where}: member {member.name} links to {member.linkname}, out of the image")
        source = self._resolve(parts[:-1], member.name, where) / parts[-1]
        if not source.is_symlink() and not source.is_file():
            raise SwerveError(f"{where}: member {member.name} links to {member.linkname}, which is not there")
        return source

    def _resolve(self, parts: list[str], member: str, where: str) -> Path:
        """The directory that a path means inside the image, made where it is missing.

        Links count from the image's root, as they would for a process in it.
        """
        waiting, done, num_links = list(reversed(parts)), [], 0
        while waiting:
            part = waiting.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not done:
                    raise SwerveError(f"{where}: member {member} lies below a link that leads out of the image")
                done.pop()
                continue
            path = self._root.joinpath(*done, part)
            if path.is_symlink():
                num_links += 1
                if num_links > _MAX_LINKS:
                    raise SwerveError(f"{where}: member {member} lies below links that lead to one another")
                target = str(path.readlink())
                done = [] if target.startswith("/") else done
                waiting += reversed(target.split("/"))
                continue
            if not path.is_dir():
                _remove(path)
                path.mkdir()
            done.append(part)
        return self._root.joinpath(*done)

    def _clear(self, directory: Path) -> None:
        """Remove what lower layers have put into a directory."""
        for path in sorted(directory.iterdir()):
            self._hide(path)

    def _hide(self, path: Path) -> None:
        """Remove what lower layers have put somewhere; what this layer has put there stays."""
        if str(path) not in self._fresh:
            _remove(path)
        elif path.is_dir() and not path.is_symlink():
            self._clear(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
