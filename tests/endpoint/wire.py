"""As much HTTP/1.1 as a fake server needs, by hand on asyncio streams, so that it can also be done wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar

_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}


@dataclass(frozen=True)
class Request:
    """What a client sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body's document; {} without a body."""
        return json.loads(self.body) if self.body else {}


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request of a connection; None where it ended."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body)


def response(status: int, body: bytes, content_type: str = "application/json", extra: str = "") -> bytes:
    """A whole answer with its length."""
    head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{extra}\r\n".encode() + body


def json_response(document: Any, status: int = 200, extra: str = "") -> bytes:
    """A whole answer that is a document."""
    return response(status, json.dumps(document).encode(), extra=extra)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document: Any) -> bytes:
    """One server-sent event as a piece of a chunked body."""
    return chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


def awaited(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, in an event loop of its own, for a minute at most."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), 60))

    return run


Handler = Callable[[Request, asyncio.StreamWriter], Awaitable[bool]]
AnyServer = TypeVar("AnyServer", bound="Server")


@contextlib.contextmanager
def in_thread(server: AnyServer) -> Iterator[AnyServer]:
    """A server beside code that has an event loop of its own, or none."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
        yield server
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


class Server:
    """A server on a free port of 127.0.0.1, an async context manager.

    Args:
        handler: Answers one request; False closes the connection.
        ssl: A context for https.
    """

    def __init__(self, handler: Handler, ssl: Any = None) -> None:
        self._handler, self._port, self._ssl = handler, 0, ssl
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{'https' if self._ssl else 'http'}://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self._port, ssl=self._ssl)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError, TimeoutError):
            while (request := await read_request(reader)) is not None:
                if not await self._handler(request, writer):
                    break
                await writer.drain()
        self._tasks.discard(task)
        with contextlib.suppress(ConnectionError, RuntimeError):
            writer.close()
