"""Wrong types everywhere: whatever stands where in an answer, it is read or refused, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from nondet.endpoint.arms import Answer, Ask
from nondet.endpoint.formats import FORMATS, Parts, answer_from
from nondet.endpoint.http import AttemptError, parse
from tests.endpoint.dialects import DIALECTS, Told
from tests.endpoint.model import Context, step, tokenize

_ASK = Ask(id="a", prompt="Once upon", max_tokens=2)
_WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**70,
    "1.5",
    "",
    "x",
    [],
    [[]],
    [None],
    {},
    {"a": None},
    {"\ud800": 1},
    "\ud800",
)
_DIALECT = {"openai-chat": "openai", "vllm-chat": "vllm", "transformers-chat": "transformers"}
_TGI = {
    "generated_text": "ab",
    "details": {
        "finish_reason": "length",
        "generated_tokens": 1,
        "tokens": [{"id": 3, "text": "a", "logprob": -0.5, "special": False}],
        "top_tokens": [[{"id": 3, "text": "a", "logprob": -0.5}, {"id": 4, "text": "b", "logprob": -1.5}]],
    },
}


def _documents(protocol: str, stream: bool) -> list[dict[str, Any]]:
    """What an honest server sends for one short answer."""
    if protocol == "tgi":
        return [_TGI]
    context = Context(tokenize(_ASK.prompt))
    steps = [step(context, temperature=0, draw=(), eos=False, alternatives=2) for _ in range(2)]
    body = FORMATS[protocol].body(_ASK, "hash-1", stream)
    told = Told(body, (1, 2), 0, "length", "")
    return DIALECTS[_DIALECT.get(protocol, protocol)](steps, told, stream, protocol.endswith("-chat"))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a document with each of its keys or indices."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


def _read(protocol: str, documents: list[dict[str, Any]], stream: bool) -> Answer:
    parts = Parts()
    for document in documents:
        FORMATS[protocol].take(parse(json.dumps(document).encode()), parts, stream)
    return answer_from(_ASK, parts)


def _cases() -> list[tuple[str, bool]]:
    return [
        (protocol, stream) for protocol in FORMATS for stream in (False, True) if not (protocol == "tgi" and stream)
    ]


@pytest.mark.parametrize(("protocol", "stream"), _cases())
def test_wrong_types_are_refused_in_one_line(protocol: str, stream: bool) -> None:
    """Each value of each document in turn is left out or becomes something else; what is read is a sound answer."""
    whole = _documents(protocol, stream)
    right = _read(protocol, whole, stream)
    assert right.ok
    refused = 0
    for index in range(len(list(_places(whole)))):
        for wrong in (*_WRONG, Ellipsis):
            documents = copy.deepcopy(whole)
            container, key = list(_places(documents))[index]
            if wrong is Ellipsis:
                del container[key]
            else:
                container[key] = wrong
            answer = None
            with contextlib.suppress(AttemptError):
                answer = _read(protocol, documents, stream)
            refused += answer is None
            if answer is not None:
                answer.text.encode()
                assert len(answer.logprobs) in (0, 4 * len(answer.token_ids or [0] * (len(answer.logprobs) // 4)))
                assert len(answer.margins) in (0, len(answer.logprobs))
    assert refused > 20


@pytest.mark.parametrize("protocol", FORMATS)
def test_every_format_asks_for_what_it_reads(protocol: str) -> None:
    """A request says its limit, its temperature and its stream, and JSON can hold it."""
    ask = Ask(id="a", prompt="x", max_tokens=77, temperature=0.25, seed=5, cached=False)
    body = json.dumps(FORMATS[protocol].body(ask, "m", False))
    assert "77" in body
    assert "0.25" in body
    assert "a" not in json.loads(body).values()  # the id stays here
