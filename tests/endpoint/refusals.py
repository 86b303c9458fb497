"""Behaviours of `tests.endpoint.hostile` that refuse, send elsewhere, or send a key back."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from typing import TYPE_CHECKING

from tests.endpoint.behaviours import answer, behaviour, choice
from tests.endpoint.wire import STREAM_END, STREAM_HEAD, Request, event, json_response, response

if TYPE_CHECKING:
    from tests.endpoint.hostile import Hostile


@behaviour
async def busy_once(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """429 with seconds to wait, then an answer."""
    if server.seen["busy-once"] == 1:
        writer.write(json_response({"error": {"message": "slow down"}}, 429, "Retry-After: 0\r\n"))
    else:
        writer.write(json_response(answer()))
    return True


@behaviour
async def busy_until_a_date(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """503 with a date to wait for, then an answer."""
    if server.seen["busy-until-a-date"] == 1:
        date = formatdate(time.time() - 5, usegmt=True)
        writer.write(json_response({"message": "loading"}, 503, f"Retry-After: {date}\r\n"))
    else:
        writer.write(json_response(answer()))
    return True


@behaviour
async def busy_for_a_year(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """503, come back in a year, every time."""
    writer.write(json_response({"message": "loading"}, 503, "Retry-After: 31536000\r\n"))
    return True


@behaviour
async def busy_for_ever(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """429, come back in thirty years, every time."""
    writer.write(json_response({"error": {"message": "slow down"}}, 429, "Retry-After: 1000000000\r\n"))
    return True


@behaviour
async def broken(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """500, every time."""
    writer.write(response(500, b"Internal Server Error", "text/plain"))
    return True


@behaviour
async def refused(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """400 with a reason of a megabyte, control characters and an attempt to clear the screen."""
    writer.write(json_response({"error": {"message": "\x1b[2Jno\r\nsuch " + "x" * (1 << 20)}}, 400))
    return True


@behaviour
async def redirect_elsewhere(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """To another origin, where a key must not go."""
    writer.write(response(307, b"", extra=f"Location: {server.elsewhere}/v1/completions\r\n"))
    return True


@behaviour
async def redirect_to_nowhere(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """To what is no address."""
    writer.write(response(308, b"", extra="Location: http://[::1:x/\r\n"))
    return True


@behaviour
async def redirect_round(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """To itself, for ever."""
    writer.write(response(307, b"", extra="Location: /v1/completions\r\n"))
    return True


@behaviour
async def redirect_as_get(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """A 302, which makes a GET of a POST."""
    writer.write(response(302, b"", extra="Location: /v1/completions\r\n"))
    return True


@behaviour
async def redirect_here(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """To another path of the same origin, where an honest answer waits."""
    writer.write(response(307, b"", extra="Location: /redirected/v1/completions\r\n"))
    return True


@behaviour
async def echo_in_error(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """The key, sent back in an error."""
    writer.write(json_response({"error": {"message": f"bad {request.headers.get('authorization')}"}}, 403))
    return True


@behaviour
async def echo_in_text(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """The key, sent back as the completion, in two events."""
    key = request.headers.get("authorization", "Bearer none").removeprefix("Bearer ")
    halves = (key[: len(key) // 2], key[len(key) // 2 :])
    events = [event(answer(choices=choice(text=half, finish_reason="stop"))) for half in halves]
    writer.write(STREAM_HEAD + b"".join(events) + STREAM_END)
    return True


@behaviour
async def echo_in_fingerprint(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
    """The key, sent back where a server says what it is."""
    key = request.headers.get("authorization", "")
    writer.write(json_response(answer(model=key, system_fingerprint=f"{key}-1")))
    return True
