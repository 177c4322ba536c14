"""The server of outside agents, spoken to over raw sockets."""

import asyncio

import pytest

from swerve.agents.outside.http import MAX_BODY_BYTES, HttpServer, Response, json_response


async def echo(request):
    return json_response({"method": request.method, "path": request.path, "body": request.body.decode()})


@pytest.fixture
def talk(run):
    """Sends bytes on one connection and returns what comes back until the server closes or stays silent."""

    def talk(*sent, handler=echo):
        async def conversation():
            async with HttpServer(handler) as server:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                received = []
                for data in sent:
                    writer.write(data)
                    received.append(await _read_response(reader))
                writer.close()
                return received

        return run(asyncio.wait_for(conversation(), 20))

    return talk


async def _read_response(reader):
    """One response: its status and its body; `None` where the connection was closed."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(next(line for line in head.splitlines() if line.lower().startswith("content-length"))[15:])
        return int(head.split()[1]), (await reader.readexactly(length)).decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def test_one_connection_carries_many_requests(talk):
    get = b"GET /a?b=c HTTP/1.1\r\nHost: x\r\n\r\n"
    post = b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"
    chunked = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    assert talk(get, post, chunked, get) == [
        (200, '{"method": "GET", "path": "/a", "body": ""}'),
        (200, '{"method": "POST", "path": "/p", "body": "hi"}'),
        (200, '{"method": "POST", "path": "/c", "body": "abc"}'),
        (200, '{"method": "GET", "path": "/a", "body": ""}'),
    ]
    assert talk(get + post, b"") == [(200, '{"method": "GET", "path": "/a", "body": ""}'),
                                     (200, '{"method": "POST", "path": "/p", "body": "hi"}')]  # fmt: skip


def test_a_client_that_asks_to_close_is_obeyed(talk):
    get = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    first, second = talk(get, b"")
    assert first[0] == 200
    assert second is None


@pytest.mark.parametrize("nonsense", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET\r\n\r\n", b"A" * 200_000])
def test_what_is_no_http_closes_the_connection(talk, nonsense):
    assert talk(nonsense) == [None]


def test_a_body_beyond_measure_is_refused(talk):
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode()
    assert talk(head + b" " * (MAX_BODY_BYTES + 1))[0][0] == 413


def test_a_client_that_hangs_up_cancels_its_request_and_no_other(run):
    async def conversation():
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(request):
            if request.path == "/slow":
                started.set()
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise
            return Response()

        async with HttpServer(handler) as server:
            _, slow = await asyncio.open_connection("127.0.0.1", server.port)
            slow.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            await started.wait()
            reader, fast = await asyncio.open_connection("127.0.0.1", server.port)
            slow.close()
            await cancelled.wait()
            fast.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await _read_response(reader))[0] == 200
            started.clear()
            cancelled.clear()
            fast.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            await started.wait()
        assert cancelled.is_set()  # and so does the end of the server
        fast.close()

    run(asyncio.wait_for(conversation(), 20))
