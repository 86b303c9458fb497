"""A fake server that breaks every rule, by name; beside it the same server answers honestly.

    async with Hostile() as server:          # a prompt "hostile:drip" meets BEHAVIOURS["drip"], any other is answered

Each behaviour is a function of the request's body and the connection, written straight to the socket. What it returns
says whether the connection stays open.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import Any

from tests.endpoint.honest import Honest
from tests.endpoint.wire import STREAM_END, STREAM_HEAD, Request, chunk, event, json_response, response

PREFIX = "hostile:"
Behaviour = Callable[["Hostile", Request, asyncio.StreamWriter], Awaitable[bool]]
BEHAVIOURS: dict[str, Behaviour] = {}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class Hostile(Honest):
    """See the module.

    Args:
        elsewhere: Where "redirect-elsewhere" points.

    Attributes:
        seen: How often each behaviour was met.
    """

    def __init__(self, elsewhere: str = "http://127.0.0.1:9", **options: Any) -> None:
        super().__init__(**options)
        self.elsewhere = elsewhere
        self.seen: Counter[str] = Counter()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        body = request.json()
        prompt = body.get("prompt", "") if isinstance(body, dict) else ""
        if isinstance(prompt, str) and prompt.startswith(PREFIX):
            name = prompt.removeprefix(PREFIX)
            self.seen[name] += 1
            if "redirected" not in request.path:
                return await BEHAVIOURS[name](self, request, writer)
            request = Request("POST", "/v1/completions", request.headers, request.body)
        return await super()._answer(request, writer)


def behaviour(function: Behaviour) -> Behaviour:
    """Put a function into `BEHAVIOURS`, with hyphens in its name."""
    BEHAVIOURS[function.__name__.replace("_", "-")] = function
    return function


def answer(**fields: Any) -> dict[str, Any]:
    """A completion as it should be, but for the fields given."""
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    return {"model": "hash-1", "choices": [choice], "usage": usage, **fields}


def choice(**fields: Any) -> list[dict[str, Any]]:
    """The only choice, as it should be, but for the fields given."""
    return [{"index": 0, "text": "ab", "finish_reason": "length", "logprobs": None, **fields}]


def logprobs(**fields: Any) -> dict[str, Any]:
    """Logprobs of two tokens as they should be, but for the fields given."""
    top = [{"a": -0.5, "b": -1.5}, {"b": -0.25, "c": -2.0}]
    return {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25], "top_logprobs": top, **fields}


# Bodies that are wrong, each sent as it is with status 200.
BODIES: dict[str, bytes] = {
    "empty-body": b"",
    "html": b"<html><body>Login</body></html>",
    "truncated-json": json.dumps(answer()).encode()[:-9],
    "nan": json.dumps(answer(choices=choice(logprobs=logprobs(token_logprobs=[-0.5, float("nan")])))).encode(),
    "infinity": json.dumps(answer(choices=choice(logprobs=logprobs(token_logprobs=[-0.5, float("inf")])))).encode(),
    "beyond-float32": json.dumps(answer(choices=choice(logprobs=logprobs(token_logprobs=[-0.5, -1e39])))).encode(),
    "invalid-utf8": json.dumps(answer()).encode().replace(b"ab", b"a\xff"),
    "duplicate-keys": b'{"choices": [], ' + json.dumps(answer()).encode()[1:],
    "deep-nesting": b"[" * 100_000 + b"]" * 100_000,
    "many-containers": b"[" + b"[]," * 600_000 + b"[]]",
    "endless-number": b'{"choices": ' + b"9" * 100_000 + b"}",
    "two-choices": json.dumps(answer(choices=choice() + choice(index=1))).encode(),
    "same-choice-twice": json.dumps(answer(choices=choice() * 2)).encode(),
    "other-choice": json.dumps(answer(choices=choice(index=3))).encode(),
    "no-choices": json.dumps(answer(choices=[])).encode(),
    "missing-choices": json.dumps({"model": "hash-1"}).encode(),
    "choices-text": json.dumps(answer(choices="ab")).encode(),
    "choice-null": json.dumps(answer(choices=[None])).encode(),
    "text-number": json.dumps(answer(choices=choice(text=7))).encode(),
    "text-null": json.dumps(answer(choices=choice(text=None))).encode(),
    "finish-list": json.dumps(answer(choices=choice(finish_reason=["length"]))).encode(),
    "finish-unknown": json.dumps(answer(choices=choice(finish_reason="bored"))).encode(),
    "finish-missing": json.dumps(answer(choices=choice(finish_reason=None))).encode(),
    "usage-text": json.dumps(answer(usage={"prompt_tokens": "1"})).encode(),
    "usage-true": json.dumps(answer(usage={"prompt_tokens": True})).encode(),
    "logprobs-list": json.dumps(answer(choices=choice(logprobs=[1]))).encode(),
    "logprobs-null": json.dumps(answer(choices=choice(logprobs=logprobs(token_logprobs=[-0.5, None])))).encode(),
    "logprobs-text": json.dumps(answer(choices=choice(logprobs=logprobs(token_logprobs=["x", -1])))).encode(),
    "logprobs-short": json.dumps(answer(choices=choice(logprobs=logprobs(token_logprobs=[-0.5])))).encode(),
    "tokens-numbers": json.dumps(answer(choices=choice(logprobs=logprobs(tokens=[1, 2])))).encode(),
    "top-list": json.dumps(answer(choices=choice(logprobs=logprobs(top_logprobs=[[], []])))).encode(),
    "top-text": json.dumps(answer(choices=choice(logprobs=logprobs(top_logprobs=[{"a": "x"}, {"b": 1}])))).encode(),
    "two-logprobs": json.dumps(
        answer(choices=choice(logprobs=logprobs(top_logprobs=[{"a": -0.75, "b": -1.5}, {"b": -0.25, "c": -2.0}])))
    ).encode(),
    "array": b"[]",
    "text": b'"hello"',
    "null": b"null",
    "error-in-200": json.dumps({"error": {"message": "out of memory", "code": 500}}).encode(),
    "usage-contradicts": json.dumps(
        answer(choices=choice(logprobs=logprobs()), usage={"prompt_tokens": 1, "completion_tokens": 3})
    ).encode(),
}


def _sends(body: bytes) -> Behaviour:
    async def send(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(response(200, body))
        return True

    return send


BEHAVIOURS |= {name: _sends(body) for name, body in BODIES.items()}


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
