"""A small HTTP/1.1 server on the event loop: requests in, whole responses out, connections kept alive.

    accept --> connection: read a request --> handler --> write the response --+
                    ^                             |                            |
                    +-- next request -------------|----------------------------+
               the client hangs up ---------------+--> the handler is cancelled

h11 speaks the protocol; this module owns the sockets. It listens on the loopback device only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import h11

from swerve.types import MachineError

MAX_BODY_BYTES = 64 << 20
_READ_BYTES = 1 << 16
_MAX_HEADER_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request.

    Attributes:
        method: Upper case.
        path: Without the query.
        headers: By lower-case name; of a name that comes twice, the last.
        body: As sent.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One response.

    Attributes:
        status: HTTP status code.
        body: As sent.
        content_type: Of the body.
        headers: Further ones.
    """

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Awaitable[Response]]


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON value as a response."""
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return Response(status=status, body=body, headers=headers or {})


class HttpServer:
    """Serves one handler, which must not raise; an asynchronous context manager. The system chooses its port."""

    def __init__(self, handler: Handler) -> None:
        """Set the handler; `__aenter__` begins to listen."""
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        """Port on 127.0.0.1, once it listens."""

    async def __aenter__(self) -> HttpServer:
        """Begin to listen.

        Raises:
            MachineError: The machine has no loopback device or no port.
        """
        try:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        except OSError as error:
            raise MachineError(f"cannot listen on 127.0.0.1: {error.strerror}") from None
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and cancel what is still being answered."""
        assert self._server is not None
        self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await _Connection(reader, writer, self._handler).serve()
        except (ConnectionError, h11.RemoteProtocolError, asyncio.CancelledError):
            pass  # the client's fault, or the server's end; nobody is there to be told
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


class _Connection:
    """One client, one request after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
        self._reader, self._writer, self._handler = reader, writer, handler
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEADER_BYTES)

    async def serve(self) -> None:
        """Answer until either side closes."""
        while (request := await self._read()) is not None:
            response = (
                Response(status=413, body=b"{}") if len(request.body) > MAX_BODY_BYTES else await self._answer(request)
            )
            if response is None:
                return
            await self._write(response, close=response.status == 413)
            if self._protocol.our_state is h11.MUST_CLOSE:
                return
            self._protocol.start_next_cycle()

    async def _event(self) -> Any:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            if self._protocol.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self._writer.write(self._protocol.send(go_on) or b"")
            self._protocol.receive_data(await self._reader.read(_READ_BYTES))
        return event

    async def _read(self) -> Request | None:
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                break
        return Request(
            method=head.method.decode("ascii"),
            path=head.target.decode("latin-1").partition("?")[0],
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers},
            body=bytes(body),
        )

    async def _answer(self, request: Request) -> Response | None:
        """The handler's response; `None`, and a cancelled handler, where the client hung up."""
        working = asyncio.ensure_future(self._handler(request))
        listening = asyncio.ensure_future(self._reader.read(_READ_BYTES))
        try:
            await asyncio.wait([working, listening], return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and listening.result():  # the next request, early
                await asyncio.wait([working])
            return working.result() if working.done() else None
        finally:
            working.cancel()
            listening.cancel()
            await asyncio.wait([working, listening])
            if not listening.cancelled() and listening.exception() is None and listening.result():
                self._protocol.receive_data(listening.result())

    async def _write(self, response: Response, *, close: bool) -> None:
        headers = [
            ("content-type", response.content_type),
            ("content-length", str(len(response.body))),
            *response.headers.items(),
            *([("connection", "close")] if close else []),
        ]
        send = self._protocol.send
        head = h11.Response(status_code=response.status, headers=headers)
        self._writer.write(
            (send(head) or b"") + (send(h11.Data(data=response.body)) or b"") + (send(h11.EndOfMessage()) or b"")
        )
        await self._writer.drain()
