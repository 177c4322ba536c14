"""Requests to a guest and its replies, over one stream per sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
from typing import Any, cast

from swerve.sandboxes import protocol
from swerve.sandboxes.protocol import ExecResult, Json, SandboxLostError

_ANSWER_GRACE_S = 60.0
_CALL_ERRORS: dict[str, type[protocol.CallError]] = {
    "exited": protocol.CallExitedError,
    "crashed": protocol.CallCrashedError,
    "timeout": protocol.CallTimeoutError,
}


class Channel(asyncio.Protocol):
    """Numbered requests over a stream; the replies may come in any order.

    Attributes:
        lost_kind: Of the fault that the guest named last, before its end; empty if it named none.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._lost = ""
        self.lost_kind = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received += data
        while len(self._received) >= 4:
            (length,) = struct.unpack_from(">I", self._received)
            if len(self._received) < 4 + length:
                return
            message = json.loads(bytes(self._received[4 : 4 + length]))
            del self._received[: 4 + length]
            if message["id"] == -1:
                self._lost = message["error"]["message"]
                self.lost_kind = message["error"]["kind"]
            future = self._pending.pop(message["id"], None)
            if future is not None and not future.done():
                future.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._error())
        self._pending.clear()

    def _error(self) -> SandboxLostError:
        cause = f": {self._lost}" if self._lost else ""
        return SandboxLostError(f"{self._what} is gone{cause}")

    def close(self) -> None:
        """Close this end. What waits for a reply fails."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, message: dict[str, Any]) -> None:
        """Write one message; nothing waits for it to be read."""
        if self._transport is None:
            raise self._error()
        payload = json.dumps(message).encode()
        self._transport.write(struct.pack(">I", len(payload)) + payload)

    async def request(self, operation: str, **fields: Json) -> dict[str, Any]:
        """Send a request and wait for its reply; if the waiting is cancelled, what it started is killed.

        The sandbox keeps the request's own time limit. One that does not answer long after it is given up.
        """
        number = next(self._numbers)
        self.send({"id": number, "op": operation, **fields})
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._pending[number] = future
        watchdog = None
        if operation != "prepare":
            watchdog = loop.call_later(fields.get("timeout_s", 0.0) + _ANSWER_GRACE_S, self._give_up)
        try:
            return await future
        except asyncio.CancelledError:
            self._pending.pop(number, None)
            with contextlib.suppress(SandboxLostError):
                self.send({"id": next(self._numbers), "op": "abort", "target": number})
            raise
        finally:
            if watchdog is not None:
                watchdog.cancel()

    def _give_up(self) -> None:
        self._lost = f"it did not answer for {_ANSWER_GRACE_S:g} s after its time limit"
        self.close()


class RemoteSandbox:
    """The host's side of a guest, whatever it lives in; a subclass knows how to end it."""

    def __init__(self, image_name: str, channel: Channel) -> None:
        self._image_name = image_name
        self._channel = channel

    async def _ask(self, operation: str, **fields: Json) -> Json:
        reply = await self._channel.request(operation, **fields)
        if "ok" in reply:
            return reply["ok"]
        error = reply["error"]
        kind, message = error["kind"], error["message"]
        if kind == "file":
            raise protocol.SandboxFileError(f"{fields['path']}: {message}")
        name = f"{self._image_name}: {fields.get('entry', operation)}"
        if kind == "raised":
            raise protocol.CallRaisedError(f"{name}: {message}", error.get("detail", ""))
        if kind in _CALL_ERRORS:
            raise _CALL_ERRORS[kind](f"{name}: {message}")
        raise SandboxLostError(f"{name}: {message}")

    async def prepare(self, payload: Json) -> None:
        """Run the harness's `prepare`."""
        await self._ask("prepare", payload=payload)

    async def exec(self, command: str, timeout_s: float) -> ExecResult:
        """See `Sandbox.exec`."""
        return ExecResult(**await self._ask("exec", command=command, timeout_s=timeout_s))

    async def shell(self, command: str, timeout_s: float) -> ExecResult:
        """See `Sandbox.shell`."""
        return ExecResult(**await self._ask("shell", command=command, timeout_s=timeout_s))

    async def read_file(self, path: str) -> str:
        """See `Sandbox.read_file`."""
        return (await self._ask("read", path=path))["text"]

    async def write_file(self, path: str, text: str, mode: int = 0o644) -> None:
        """See `Sandbox.write_file`."""
        await self._ask("write", path=path, text=text, mode=mode)

    async def call(self, entry: str, payload: Json, timeout_s: float) -> Json:
        """See `Sandbox.call`."""
        return await self._ask("call", entry=entry, payload=payload, timeout_s=timeout_s)
