"""Where lists of files come from: a repository of a Hugging Face Hub at one commit, or a manifest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urljoin

from swerve.downloads.listing import ALGORITHMS, Listing, RemoteFile, checked, files_from_json
from swerve.downloads.web import Web
from swerve.types import SwerveError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_SUM = re.compile(r"([0-9a-fA-F]{64}|[0-9a-fA-F]{32}) [ *](.+)")
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')


class Source(Protocol):
    """Something that lists files."""

    name: str
    """As `Listing.source` has it."""
    revision: str
    """As it was asked for; empty for none."""

    @property
    def pin(self) -> str:
        """The revision that is asked for if it can mean one list only; empty for a branch, a tag, or none."""
        ...

    def listing(self, web: Web) -> Listing:
        """What it holds at the revision that is asked for.

        Raises:
            SwerveError: There is no such thing, or it cannot be used.
            MachineError: It cannot be reached.
        """
        ...


class HubSource:
    """A repository, by the Hub's protocol."""

    def __init__(self, kind: str, repository: str, revision: str, endpoint: str) -> None:
        """Asks nothing yet.

        Args:
            kind: `models` or `datasets`.
            repository: `ORG/NAME`.
            revision: Full hash of a commit; or a branch or tag, which is resolved to one.
            endpoint: URL of the Hub or a mirror.

        Raises:
            SwerveError: One of them is malformed.
        """
        if not _NAME.fullmatch(repository):
            raise SwerveError(f"{repository}: no name of a repository: expected ORG/NAME")
        _check_url("--endpoint", endpoint)
        self.name = f"{kind}/{repository}"
        self.revision = revision
        self._api = f"{endpoint.rstrip('/')}/api/{self.name}"
        self._files = f"{endpoint.rstrip('/')}/{'datasets/' if kind == 'datasets' else ''}{repository}/resolve"

    @property
    def pin(self) -> str:
        """The commit, if its full hash was asked for."""
        return self.revision if _COMMIT.fullmatch(self.revision) else ""

    def listing(self, web: Web) -> Listing:
        """Resolve the revision, and list the files of its commit."""
        commit = self._commit(web)
        url: str | None = f"{self._api}/tree/{commit}?recursive=true&expand=false"
        files: list[RemoteFile] = []
        while url is not None:
            body, headers = web.read(url)
            files += [_hub_file(entry, url) for entry in _json(body, url, list) if entry.get("type") == "file"]
            follows = _NEXT.search(headers.get("Link", ""))
            url = urljoin(url, follows[1]) if follows else None
        where = f"{self.name} at {commit}"
        return Listing(
            source=self.name, revision=commit, base_url=f"{self._files}/{commit}/", files=checked(files, where)
        )

    def _commit(self, web: Web) -> str:
        url = f"{self._api}/revision/{quote(self.revision, safe='')}"
        commit = str(_json(web.read(url)[0], url, dict).get("sha", ""))
        if not _COMMIT.fullmatch(commit) or (self.pin and commit != self.pin):
            raise SwerveError(f"{url}: the server answers with commit {commit!r}: not the one asked for, or none")
        if not self.pin:
            web.say(f"{self.name}: {self.revision} is {commit}")
        return commit


class ManifestSource:
    """A list of files that somebody publishes: JSON, or the lines that `sha256sum` and `md5sum` print."""

    name = "manifest"

    def __init__(self, location: str, revision: str) -> None:
        """Reads nothing yet.

        Args:
            location: Path or URL.
            revision: SHA-256 that the manifest itself must have; empty for any.

        Raises:
            SwerveError: One of them is malformed.
        """
        if "://" in location:
            _check_url("--manifest", location)
        if revision and not _SHA256.fullmatch(revision):
            raise SwerveError(f"--revision {revision}: of a manifest it is its SHA-256, 64 hexadecimal digits")
        self.revision = revision
        self._location = location

    @property
    def pin(self) -> str:
        """The manifest's SHA-256, if one was asked for."""
        return self.revision

    def listing(self, web: Web) -> Listing:
        """Read the manifest; files are beside it unless its `base_url` says where."""
        where = self._location
        if "://" in where:
            body = web.read(where)[0]
        else:
            try:
                body = Path(where).read_bytes()
            except OSError as error:
                raise SwerveError(f"{where}: cannot be read: {error.strerror}") from None
        found = hashlib.sha256(body).hexdigest()
        if self.revision and found != self.revision:
            raise SwerveError(f"{where}: sha256 is {found}, expected {self.revision}: it has changed: review it")
        base_url = urljoin(where, ".") if "://" in where else ""
        if body.lstrip().startswith(b"{"):
            manifest = _json(body, where, dict)
            base_url = str(manifest.get("base_url", base_url))
            files = files_from_json(manifest.get("files"), where)
        else:
            files = ()
        _check_url(f"{where}: key base_url", base_url)
        base_url = base_url if base_url.endswith("/") else base_url + "/"
        return Listing(
            source=self.name, revision=found, base_url=base_url, files=files or _sums(body, where, base_url, web)
        )


def _sums(body: bytes, where: str, base_url: str, web: Web) -> tuple[RemoteFile, ...]:
    """The files of a list of sums; the server says how long they are."""
    files: list[RemoteFile] = []
    for number, line in enumerate(body.decode("utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        match = _SUM.fullmatch(line.rstrip())
        if match is None:
            raise SwerveError(f"{where}: line {number}: neither JSON nor a line of sha256sum or md5sum")
        algorithm = next(name for name, digits in ALGORITHMS.items() if len(match[1]) == digits)
        path = match[2].removeprefix("./")
        files.append(RemoteFile(path=path, size=0, algorithm=algorithm, digest=match[1].lower()))
    safe = checked(files, where)
    return tuple(
        RemoteFile(path=f.path, size=web.size(base_url + quote(f.path)), algorithm=f.algorithm, digest=f.digest)
        for f in safe
    )


def _hub_file(entry: dict[str, Any], url: str) -> RemoteFile:
    """A file as the Hub lists it: large ones by SHA-256, others by the digest of their git blob."""
    try:
        large = entry.get("lfs")
        size = int((large or entry)["size"])
        digest = str((large or entry)["oid"]).removeprefix("sha256:")
        return RemoteFile(
            path=str(entry["path"]), size=size, algorithm="sha256" if large else "git_sha1", digest=digest
        )
    except (KeyError, TypeError, ValueError):
        raise SwerveError(f"{url}: a file without path, size or digest: {json.dumps(entry)[:200]}") from None


def _json(body: bytes, where: str, kind: type) -> Any:
    value: Any = None
    with contextlib.suppress(ValueError):
        value = json.loads(body)
    if not isinstance(value, kind) or (isinstance(value, list) and not all(isinstance(entry, dict) for entry in value)):
        raise SwerveError(f"{where}: not the JSON that was expected: check the address")
    return value


def _check_url(what: str, url: str) -> None:
    if not re.match(r"https?://[^/?#]+", url):
        raise SwerveError(f"{what} {url!r}: expected a URL that begins with https:// or http://")
