"""Behaviours of `tests.endpoint.hostile` on the connection: silence, drips, resets, floods, streams that break off."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import TYPE_CHECKING

from tests.endpoint.behaviours import answer, behaviour, choice
from tests.endpoint.wire import STREAM_END, STREAM_HEAD, Request, chunk, event, json_response, response

if TYPE_CHECKING:
    from tests.endpoint.hostile import Hostile

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


async def _forever(writer: asyncio.StreamWriter, piece: bytes, pause_s: float) -> bool:
    while True:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause_s)


@behaviour
async def silent(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Takes the request and says nothing."""
    await asyncio.sleep(60)
    return False


@behaviour
async def silent_after_header(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Promises a body and says nothing."""
    writer.write(_HEAD + b"Content-Length: 100\r\n\r\n")
    await writer.drain()
    await asyncio.sleep(60)
    return False


@behaviour
async def drip_header(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A header without end, a byte at a time."""
    writer.write(_HEAD + b"X-Drip: ")
    return await _forever(writer, b"a", 0.02)


@behaviour
async def drip_body(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A body without end, a blank at a time: never silent, never done."""
    writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    return await _forever(writer, chunk(b" "), 0.02)


@behaviour
async def informational_flood(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """100 Continue, for ever."""
    return await _forever(writer, b"HTTP/1.1 100 Continue\r\n\r\n", 0.005)


@behaviour
async def comments_forever(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A stream that keeps itself alive with comments and never says a word."""
    writer.write(STREAM_HEAD)
    return await _forever(writer, chunk(b": ping\n\n"), 0.02)


@behaviour
async def half_closed(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Half of what was promised, then the end of the sending side."""
    body = json.dumps(answer()).encode()
    writer.write(_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[: len(body) // 2])
    writer.write_eof()
    await asyncio.sleep(5)
    return False


@behaviour
async def reset(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A reset instead of an answer, every time."""
    writer.transport.abort()
    return False


@behaviour
async def reset_once(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A reset the first time, an answer the second."""
    if server.seen["reset-once"] == 1:
        writer.transport.abort()
        return False
    writer.write(json_response(answer()))
    return True


@behaviour
async def reset_in_body(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A reset in the middle of the body, every time."""
    writer.write(_HEAD + b'Content-Length: 1000\r\n\r\n{"choices": ')
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.transport.abort()
    return False


@behaviour
async def gigabyte(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A gigabyte of JSON."""
    writer.write(_HEAD + b'Content-Length: 1073741824\r\n\r\n{"choices": [')
    return await _forever(writer, b"1, " * 20_000, 0)


@behaviour
async def endless_stream(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Tokens without end."""
    writer.write(STREAM_HEAD)
    return await _forever(writer, event(answer(choices=choice(finish_reason=None))) * 100, 0)


@behaviour
async def giant_line(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A line without end."""
    writer.write(STREAM_HEAD + chunk(b"data: "))
    return await _forever(writer, chunk(b"x" * 65536), 0)


@behaviour
async def giant_header(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A header of a megabyte."""
    writer.write(_HEAD + b"X-Giant: " + b"x" * (1 << 20) + b"\r\nContent-Length: 0\r\n\r\n")
    return True


@behaviour
async def gzip_bomb(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A hundred megabytes of blanks in a hundred kilobytes."""
    bomb = gzip.compress(b" " * (1 << 22))
    writer.write(response(200, bomb, extra="Content-Encoding: gzip\r\n"))
    return True


@behaviour
async def chunked_nonsense(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A chunk whose length is no number."""
    writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\nlots\r\n{}\r\n0\r\n\r\n")
    return True


@behaviour
async def not_http(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Another protocol."""
    writer.write(b"220 mail.example ESMTP\r\n\r\n")
    return False


@behaviour
async def half_a_header(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """The end of the connection within the header."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-")
    return False


@behaviour
async def too_long(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """More bytes than Content-Length says: a second answer that nobody has asked for yet."""
    writer.write(json_response(answer()) + json_response(answer(choices=choice(text="SMUGGLED"))) * 5)
    return True


@behaviour
async def no_done(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A whole stream, but for [DONE]."""
    writer.write(STREAM_HEAD + event(answer()) + STREAM_END)
    return True


@behaviour
async def stream_cut(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A stream that ends properly in HTTP and not at all in what it says."""
    writer.write(STREAM_HEAD + event(answer(choices=choice(finish_reason=None))) + STREAM_END)
    return True


@behaviour
async def stream_done_only(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Nothing but [DONE]."""
    writer.write(STREAM_HEAD + chunk(b"data: [DONE]\n\n") + STREAM_END)
    return True


@behaviour
async def stream_garbage(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """An event that is no JSON."""
    writer.write(STREAM_HEAD + chunk(b"data: {oops\n\n") + STREAM_END)
    return True


@behaviour
async def stream_error(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """An error in mid-stream."""
    writer.write(STREAM_HEAD + event(answer(choices=choice(finish_reason=None))) + event({"error": "out of memory"}))
    writer.write(STREAM_END)
    return True


@behaviour
async def stream_other_choice(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A second choice in the stream."""
    events = event(answer(choices=choice(finish_reason=None))) + event(answer(choices=choice(index=1)))
    writer.write(STREAM_HEAD + events + STREAM_END)
    return True
