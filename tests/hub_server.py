"""A Hub on this machine: real sockets, real redirects, and whatever may go wrong between two machines."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c" * 40
REPOSITORY = "maker/thing"
PAGE = 2
"""Entries of a page of the list."""


@dataclass
class Fault:
    """How one answer to a request for a file goes wrong.

    Attributes:
        status: Answered in place of the file, if not 0.
        retry_after: Header of such an answer.
        drop_after: Bytes of the body after which the connection is gone; `None` for all.
        reset: Gone by a reset rather than an end.
        ignore_range: Send the whole file whatever is asked for.
        shift: Send a range that begins so many bytes later than it was asked for, and say so.
        content: Sent in place of the file's own, with its own length.
        flip: Offset of a byte of the body that is altered.
        etag: Of this answer.
        pause: Waited for, by the server, after `drop_after` bytes.
    """

    status: int = 0
    retry_after: str = ""
    drop_after: int | None = None
    reset: bool = False
    ignore_range: bool = False
    shift: int = 0
    content: bytes | None = None
    flip: int | None = None
    etag: str = ""
    pause: threading.Event | None = None


@dataclass
class Hub:
    """What is served, how it goes wrong, and what was asked.

    Attributes:
        files: Content by path.
        large: Paths that are listed by SHA-256, the others by git's digest.
        faults: By path, of one request after the other; later ones are answered well.
        token: Needed to see anything, if not empty.
        cdn: URL of a server that files are redirected to.
        asked: Path and headers of each request, in order.
        sent: Bytes of bodies by path.
        port: Where it listens.
    """

    files: dict[str, bytes]
    large: set[str] = field(default_factory=set)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    token: str = ""
    cdn: str = ""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listed(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = [{"type": "directory", "path": "sub", "oid": "0" * 40, "size": 0}]
        for path, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry = {"type": "file", "path": path, "size": len(content), "oid": blob}
            if path in self.large:
                sha256 = hashlib.sha256(content).hexdigest()
                entry |= {"oid": "f" * 40, "lfs": {"oid": sha256, "size": len(content), "pointerSize": 134}}
            entries.append(entry)
        return entries

    def files_asked(self) -> list[tuple[str, dict[str, str]]]:
        return [(path, headers) for path, headers in self.asked if "/api/" not in path]


@contextlib.contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        served = hub

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.port = server.server_port
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield hub
    finally:
        for fault in (fault for faults in hub.faults.values() for fault in faults):
            if fault.pause:
                fault.pause.set()
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    served: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, url = self.served, urlsplit(self.path)
        hub.asked.append((self.path, dict(self.headers)))
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._answer(401, b"", {"X-Error-Message": "Repository not found"})
        path = unquote(url.path)
        for kind in ("models", "datasets"):
            api = f"/api/{kind}/{REPOSITORY}/"
            if path in (f"{api}revision/main", f"{api}revision/{COMMIT}"):
                return self._answer(200, json.dumps({"sha": COMMIT, "siblings": []}).encode())
            if path == f"{api}tree/{COMMIT}":
                return self._page(url.path, int(parse_qs(url.query).get("cursor", ["0"])[0]))
        name = path.removeprefix("/datasets").removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/").removeprefix("/cdn/")
        if name not in hub.files:
            return self._answer(404, b"", {"X-Error-Message": "Entry not found"})
        if hub.cdn and not path.startswith("/cdn/"):
            return self._answer(302, b"", {"Location": f"{hub.cdn}/cdn{url.path[url.path.rindex('/') :]}"})
        return self._file(name, hub.faults[name].pop(0) if hub.faults.get(name) else Fault())

    def _page(self, path: str, cursor: int) -> None:
        entries = self.served.listed()
        headers = {}
        if cursor + PAGE < len(entries):
            link = f"{self.served.url}{path}?recursive=true&expand=false&cursor={cursor + PAGE}"
            headers["Link"] = f'<{link}>; rel="next"'
        self._answer(200, json.dumps(entries[cursor : cursor + PAGE]).encode(), headers)

    def _file(self, name: str, fault: Fault) -> None:
        if fault.status:
            return self._answer(fault.status, b"", {"Retry-After": fault.retry_after} if fault.retry_after else {})
        content = self.served.files[name] if fault.content is None else fault.content
        etag = fault.etag or f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers, status, body = {"ETag": etag}, 200, content
        asked, only_if = self.headers.get("Range"), self.headers.get("If-Range")
        if asked and not fault.ignore_range and only_if in (None, etag):
            first = int(asked.removeprefix("bytes=").removesuffix("-")) + fault.shift
            if first >= len(content):
                return self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            status, body = 206, content[first:]
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if fault.flip is not None:
            body = body[: fault.flip] + bytes([body[fault.flip] ^ 1]) + body[fault.flip + 1 :]
        self._answer(status, body, headers, fault, name)

    def _answer(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        fault: Fault | None = None,
        name: str = "",
    ) -> None:
        fault = fault or Fault()
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        whole = fault.drop_after is None
        part = body if whole else body[: fault.drop_after]
        self.wfile.write(part)
        self.served.sent[name] += len(part)
        if fault.pause:
            fault.pause.wait(60)
        if not whole and fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
