"""A fake server that breaks every rule, by name; beside it the same server answers honestly.

A prompt "hostile:drip-body" meets that behaviour: what is done on the connection, and the kind of failure that it is.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any, NamedTuple

from tests.endpoint.honest import STREAM_END, STREAM_HEAD, Honest, Request, chunk, event, json_response, response

PREFIX = "hostile:"


class Forever(NamedTuple):
    """The same bytes again and again."""

    piece: bytes
    pause_s: float


ABORT, EOF, CLOSE = "abort", "eof", "close"
# What is done: bytes are sent, a number is waited for, a word is for the connection, which stays open without one.
Actions = Sequence["bytes | float | str | Forever"]


class Behaviour(NamedTuple):
    """What a server does, and the kind of failure that comes of it: "" for an answer."""

    kind: str
    actions: Actions | Callable[[Hostile, Request], Actions]


async def act(actions: Actions, writer: asyncio.StreamWriter) -> bool:
    for action in actions:
        if isinstance(action, bytes):
            writer.write(action)
        elif isinstance(action, float):
            await writer.drain()
            await asyncio.sleep(action)
        elif isinstance(action, Forever):
            while True:
                writer.write(action.piece)
                await writer.drain()
                await asyncio.sleep(action.pause_s)
        elif action == EOF:
            writer.write_eof()
        else:
            if action == ABORT:
                writer.transport.abort()
            return False
    return True


class Hostile(Honest):
    """See the module; `elsewhere` is where "redirect-elsewhere" points, `seen` how often each behaviour was met."""

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
            actions = BEHAVIOURS[name].actions
            return await act(actions(self, request) if callable(actions) else actions, writer)
        return await super()._answer(request, writer)


def answer(**fields: Any) -> dict[str, Any]:
    return {"model": "hash-1", "choices": [choice()], "usage": {"prompt_tokens": 1, "completion_tokens": 2}, **fields}


def choice(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "text": "ab", "finish_reason": "length", "logprobs": None, **fields}


def said(**fields: Any) -> dict[str, Any]:
    return answer(choices=[choice(**fields)])


def scored(**fields: Any) -> dict[str, Any]:
    top = [{"a": -0.5, "b": -1.5}, {"b": -0.25, "c": -2.0}]
    return said(logprobs={"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25], "top_logprobs": top, **fields})


_WHOLE = json.dumps(answer()).encode()
# Bodies that are wrong, each sent as it is, or as JSON, with status 200.
BODIES: dict[str, Any] = {
    "empty-body": b"",
    "html": b"<html><body>Login</body></html>",
    "truncated-json": _WHOLE[:-9],
    "nan": scored(token_logprobs=[-0.5, float("nan")]),
    "infinity": scored(token_logprobs=[-0.5, float("inf")]),
    "beyond-float32": scored(token_logprobs=[-0.5, -1e39]),
    "invalid-utf8": _WHOLE.replace(b"ab", b"a\xff"),
    "duplicate-keys": b'{"choices": [], ' + _WHOLE[1:],
    "deep-nesting": b"[" * 100_000 + b"]" * 100_000,
    "endless-number": b'{"choices": ' + b"9" * 100_000 + b"}",
    "two-choices": answer(choices=[choice(), choice(index=1)]),
    "other-choice": said(index=3),
    "no-choices": answer(choices=[]),
    "missing-choices": {"model": "hash-1"},
    "text-number": said(text=7),
    "finish-unknown": said(finish_reason="bored"),
    "finish-missing": said(finish_reason=None),
    "usage-true": answer(usage={"prompt_tokens": True}),
    "logprobs-null": scored(token_logprobs=[-0.5, None]),
    "logprobs-short": scored(token_logprobs=[-0.5]),
    "array": b"[]",
    "null": b"null",
}
# Counts that count nothing, in answers that are whole but for them.
ODD_COUNTS: dict[str, dict[str, Any]] = {
    "prompt-negative": {"prompt_tokens": -5, "completion_tokens": 2},
    "prompt-huge": {"prompt_tokens": 2**30, "completion_tokens": 2},
    "completion-huge": {"prompt_tokens": 1, "completion_tokens": 2**53},
    "completion-endless": {"prompt_tokens": 1, "completion_tokens": 10**30},
    "cached-negative": {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": -1}},
}


def _sent(body: Any) -> list[bytes]:
    return [response(200, body if isinstance(body, bytes) else json.dumps(body).encode())]


def _stream(*events: Any) -> list[bytes]:
    """A stream of documents, or of bytes that are none; no [DONE] by itself."""
    return [STREAM_HEAD, *(chunk(e) if isinstance(e, bytes) else event(e) for e in events), STREAM_END]


def _redirect(status: int, where: str) -> list[bytes]:
    return [response(status, b"", extra=f"Location: {where}\r\n")]


def _once(name: str, first: Actions) -> Callable[[Hostile, Request], Actions]:
    return lambda server, request: first if server.seen[name] == 1 else [json_response(answer())]


def _key(request: Request) -> str:
    return request.headers.get("authorization", "Bearer none")


def _echo_in_text(server: Hostile, request: Request) -> Actions:
    key = _key(request).removeprefix("Bearer ")
    halves = (key[: len(key) // 2], key[len(key) // 2 :])
    return _stream(*(said(text=half, finish_reason="stop") for half in halves))


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
_PART = said(finish_reason=None)  # of a stream that goes on
_SLOW, _LOADING = {"error": {"message": "slow down"}}, {"message": "loading"}
_PAST = f"Retry-After: {formatdate(time.time() - 5, usegmt=True)}\r\n"
_REASON = "\x1b[2Jno\r\nsuch " + "x" * (1 << 20)  # of a megabyte, with an attempt to clear the screen
_BOMB = gzip.compress(b" " * (1 << 22))  # megabytes of blanks in some kilobytes
_TWICE = scored(top_logprobs=[{"a": -0.75, "b": -1.5}, {"b": -0.25, "c": -2.0}])
_SMUGGLED = json_response(said(text="SMUGGLED")) * 5
_MISCOUNTED = {**scored(), "usage": {"prompt_tokens": 1, "completion_tokens": 3}}

BEHAVIOURS: dict[str, Behaviour] = {
    **{name: Behaviour("malformed", _sent(body)) for name, body in BODIES.items()},
    **{name: Behaviour("", _sent({**scored(), "usage": usage})) for name, usage in ODD_COUNTS.items()},
    "many-containers": Behaviour("too-large", _sent(b"[" + b"[]," * 600_000 + b"[]]")),
    "error-in-200": Behaviour("error", _sent({"error": {"message": "out of memory", "code": 500}})),
    "usage-contradicts": Behaviour("", _sent(_MISCOUNTED)),
    "two-logprobs": Behaviour("", _sent(_TWICE)),
    # the connection: silence, drips, resets, floods, streams that break off
    "silent": Behaviour("timeout", [60.0, CLOSE]),
    "silent-after-header": Behaviour("timeout", [_HEAD + b"Content-Length: 100\r\n\r\n", 60.0, CLOSE]),
    "drip-header": Behaviour("timeout", [_HEAD + b"X-Drip: ", Forever(b"a", 0.02)]),
    "drip-body": Behaviour("timeout", [_CHUNKED, Forever(chunk(b" "), 0.02)]),  # never silent, never done
    "informational-flood": Behaviour("timeout", [Forever(b"HTTP/1.1 100 Continue\r\n\r\n", 0.005)]),
    "comments-forever": Behaviour("timeout", [STREAM_HEAD, Forever(chunk(b": ping\n\n"), 0.02)]),
    "half-closed": Behaviour(
        "cut-off", [_HEAD + b"Content-Length: %d\r\n\r\n" % len(_WHOLE) + _WHOLE[: len(_WHOLE) // 2], EOF, 5.0, CLOSE]
    ),
    "reset": Behaviour("reset", [ABORT]),
    "reset-once": Behaviour("", _once("reset-once", [ABORT])),
    "reset-in-body": Behaviour("cut-off", [_HEAD + b'Content-Length: 1000\r\n\r\n{"choices": ', 0.02, ABORT]),
    "gigabyte": Behaviour(
        "too-large", [_HEAD + b'Content-Length: 1073741824\r\n\r\n{"choices": [', Forever(b"1, " * 20_000, 0)]
    ),
    "endless-stream": Behaviour("too-large", [STREAM_HEAD, Forever(event(_PART) * 100, 0)]),
    "giant-line": Behaviour("too-large", [STREAM_HEAD + chunk(b"data: "), Forever(chunk(b"x" * 65536), 0)]),
    "giant-header": Behaviour("protocol", [_HEAD + b"X-Giant: " + b"x" * (1 << 20) + b"\r\nContent-Length: 0\r\n\r\n"]),
    "gzip-bomb": Behaviour("malformed", [response(200, _BOMB, extra="Content-Encoding: gzip\r\n")]),
    "chunked-nonsense": Behaviour("protocol", [_CHUNKED + b"lots\r\n{}\r\n0\r\n\r\n"]),
    "not-http": Behaviour("protocol", [b"220 mail.example ESMTP\r\n\r\n", CLOSE]),
    "half-a-header": Behaviour("reset", [b"HTTP/1.1 200 OK\r\nContent-", CLOSE]),
    "too-long": Behaviour("", [json_response(answer()) + _SMUGGLED]),  # an answer that nobody has asked for yet
    "no-done": Behaviour("", _stream(answer())),
    "stream-cut": Behaviour("cut-off", _stream(_PART)),
    "stream-done-only": Behaviour("malformed", _stream(b"data: [DONE]\n\n")),
    "stream-garbage": Behaviour("malformed", _stream(b"data: {oops\n\n")),
    "stream-error": Behaviour("error", _stream(_PART, {"error": "out of memory"})),
    "stream-other-choice": Behaviour("malformed", _stream(_PART, said(index=1))),
    # refusals, redirects, and a key that is sent back
    "busy-once": Behaviour("", _once("busy-once", [json_response(_SLOW, 429, "Retry-After: 0\r\n")])),
    "busy-until-a-date": Behaviour("", _once("busy-until-a-date", [json_response(_LOADING, 503, _PAST)])),
    "busy-for-a-year": Behaviour("http-503", [json_response(_LOADING, 503, "Retry-After: 31536000\r\n")]),
    "busy-for-ever": Behaviour("http-429", [json_response(_SLOW, 429, "Retry-After: 1000000000\r\n")]),
    "broken": Behaviour("http-500", [response(500, b"Internal Server Error", "text/plain")]),
    "refused": Behaviour("http-400", [json_response({"error": {"message": _REASON}}, 400)]),
    "redirect-elsewhere": Behaviour("redirect", lambda server, _: _redirect(307, f"{server.elsewhere}/v1/completions")),
    "redirect-to-nowhere": Behaviour("redirect", _redirect(308, "http://[::1:x/")),
    "redirect-here": Behaviour("redirect", _redirect(307, "/redirected/v1/completions")),
    "redirect-as-get": Behaviour("redirect", _redirect(302, "/v1/completions")),
    "redirect-endless": Behaviour(
        "redirect", [STREAM_HEAD.replace(b"200 OK", b"307 On\r\nLocation: /x"), Forever(chunk(b"x" * 65536), 0)]
    ),
    "echo-in-error": Behaviour(
        "http-403", lambda _, request: [json_response({"error": {"message": f"bad {_key(request)}"}}, 403)]
    ),
    "echo-in-text": Behaviour("leaked-key", _echo_in_text),
    "echo-in-fingerprint": Behaviour(
        "", lambda _, request: _sent(answer(model=_key(request), system_fingerprint=f"{_key(request)}-1"))
    ),
}
KINDS = {name: behaviour.kind for name, behaviour in BEHAVIOURS.items()}
