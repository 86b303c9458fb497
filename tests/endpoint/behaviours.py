"""The table of behaviours of `tests.endpoint.hostile`, and those that are only a wrong body with status 200."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tests.endpoint.wire import Request, response

if TYPE_CHECKING:
    from tests.endpoint.hostile import Hostile

Behaviour = Callable[["Hostile", Request, asyncio.StreamWriter], Awaitable[bool]]
BEHAVIOURS: dict[str, Behaviour] = {}


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


# Counts that count nothing, in answers that are whole but for them.
ODD_COUNTS: dict[str, dict[str, Any]] = {
    "prompt-negative": {"prompt_tokens": -5, "completion_tokens": 2},
    "prompt-huge": {"prompt_tokens": 2**30, "completion_tokens": 2},
    "completion-huge": {"prompt_tokens": 1, "completion_tokens": 2**53},
    "completion-endless": {"prompt_tokens": 1, "completion_tokens": 10**30},
    "cached-negative": {
        "prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": -1},
    },
}  # fmt: skip
BODIES |= {
    name: json.dumps(answer(choices=choice(logprobs=logprobs()), usage=usage)).encode()
    for name, usage in ODD_COUNTS.items()
}


def _sends(body: bytes) -> Behaviour:
    async def send(server: Hostile, request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(response(200, body))
        return True

    return send


BEHAVIOURS |= {name: _sends(body) for name, body in BODIES.items()}
