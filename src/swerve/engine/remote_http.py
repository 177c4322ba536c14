"""HTTP/1.1 to one server: streams on the event loop, single answers blocking. What fails names the server and the way.

h11 speaks the protocol; this module owns the sockets. Each request has a connection of its own: an answer takes
seconds, and a closed connection is how a server learns that nobody waits for the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11

from swerve.engine.errors import EngineError

API_KEY = "VLLM_API_KEY"
"""Environment variable with the servers' key, if they have one; theirs is called the same."""
_READ_BYTES = 1 << 16
_MAX_HEADER_BYTES = 1 << 16
_MAX_FAULT_BYTES = 1 << 16
_KEEP_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Seconds of silence, seconds between probes, and unanswered probes after which a machine counts as gone."""
T = TypeVar("T")


class RefusedError(EngineError):
    """The server answered with a status other than 200.

    Attributes:
        status: Which.
    """

    def __init__(self, message: str, status: int) -> None:
        """Set message and status."""
        super().__init__(message)
        self.status = status


class HttpClient:
    """One server.

    Args:
        url: `http://host:port` or `https://host:port`.
        timeout_s: Seconds without a word after which the server counts as dead.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        self.url = url
        self.host = parts.hostname or ""
        self.port = parts.port or 0
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout_s = timeout_s

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """Post a JSON value, and read the answer's server-sent events, up to `[DONE]`, as JSON values.

        Closing the generator closes the connection.

        Raises:
            EngineError: The server cannot be reached, refuses, is silent for too long, or ends too early.
        """
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await self._soon(asyncio.open_connection(self.host, self.port, ssl=self._tls))
            _watch(writer.get_extra_info("socket"))
            protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEADER_BYTES)
            content = json.dumps(body).encode()
            request = h11.Request(method="POST", target=path, headers=list(self._headers(content).items()))
            for event in (request, h11.Data(data=content), h11.EndOfMessage()):
                writer.write(protocol.send(event) or b"")
            await self._soon(writer.drain())
            async for line in self._lines(protocol, reader, path):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
            raise EngineError(f"{self.url}: the answer to {path} ended early")
        except (OSError, h11.RemoteProtocolError, ValueError) as error:
            raise EngineError(f"{self.url}: {path}: {self._words(error)}") from error
        finally:
            if writer is not None:
                writer.close()

    async def _lines(
        self, protocol: h11.Connection, reader: asyncio.StreamReader, path: str
    ) -> AsyncGenerator[bytes, None]:
        """The lines of an answer's body as they come."""
        status, rest = 0, b""
        while not isinstance(event := protocol.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                protocol.receive_data(await self._soon(reader.read(_READ_BYTES)))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                if status != 200:
                    rest = (rest + event.data)[:_MAX_FAULT_BYTES]
                    continue
                *whole, rest = (rest + event.data).split(b"\n")
                for line in whole:
                    yield line.rstrip(b"\r")
        if status != 200:
            raise self._refused(path, status, rest)

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Ask for one JSON value, blocking.

        Args:
            method: HTTP's.
            path: With its query.
            body: JSON value that is sent, if any.
            timeout_s: Seconds without a word; as for streams if `None`.

        Returns:
            The value; `None` where the answer is empty.

        Raises:
            EngineError: The server cannot be reached, refuses, or is silent for too long.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        content = None if body is None else json.dumps(body).encode()
        seconds = None if limit == float("inf") else limit
        if self._tls:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=seconds, context=self._tls)
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            connection.connect()
            _watch(connection.sock)
            connection.request(method, path, body=content, headers=self._headers(content))
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200:
                raise self._refused(path, answer.status, data)
            return json.loads(data) if data else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineError(f"{self.url}: {path}: {self._words(error, limit)}") from error
        finally:
            connection.close()

    async def _soon(self, work: Awaitable[T]) -> T:
        """Wait for something that the server has to do."""
        async with asyncio.timeout(None if self._timeout_s == float("inf") else self._timeout_s):
            return await work

    def _headers(self, content: bytes | None) -> dict[str, str]:
        headers = {"Host": f"{self.host}:{self.port}", "Accept": "*/*", "Connection": "close"}
        if content is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def _refused(self, path: str, status: int, data: bytes) -> RefusedError:
        return RefusedError(f"{self.url}: {path} answers {status}: {_fault(data)}", status)

    def _words(self, error: Exception, timeout_s: float | None = None) -> str:
        if isinstance(error, TimeoutError):
            return f"not a word in {self._timeout_s if timeout_s is None else timeout_s:g} s"
        if isinstance(error, OSError):
            return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return f"not what was expected: {error}"


def _watch(connection: socket.socket) -> None:
    """Have the kernel notice that the machine at the other end is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _fault(data: bytes) -> str:
    """What a refusal says, in one line."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            inner = value.get("error", value.get("detail", value))
            text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return " ".join(text.split())[:500] or "no reason given"
