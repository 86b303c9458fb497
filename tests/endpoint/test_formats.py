"""From bytes to float32 logprobs, margins and events: what is exact is checked against fractions."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from nondet.endpoint.arms import Answer, Ask, KnownBy
from nondet.endpoint.client import read_metrics
from nondet.endpoint.formats import FORMATS, Alternative, Parts, answer_from
from nondet.endpoint.http import AttemptError, Events, Limits, float32_bytes, parse, wait_before_retry
from tests.build import tiers
from tests.endpoint.honest import DIALECTS, Told, context_of, step, tokenize


def _nearest(decimal: str) -> np.float32:
    exact = Fraction(decimal)
    near = np.float32(float(decimal))
    with np.errstate(over="ignore"):
        around = [np.nextafter(near, np.float32(s), dtype=np.float32) for s in (-math.inf, math.inf)] + [near]
    finite = [candidate for candidate in around if np.isfinite(candidate)]
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def test_decimals_are_rounded_once() -> None:
    draw = random.Random(0)  # noqa: S311 - a repeatable test
    decimals = [repr(-draw.expovariate(1)) for _ in range(500)]
    for _ in range(500):  # just beside, on, and just beyond the middle of two float32
        low = np.float32(-draw.expovariate(1))
        middle = (Fraction(float(low)) + Fraction(float(np.nextafter(low, np.float32(0), dtype=np.float32)))) / 2
        whole = f"{int(abs(middle) * 10**60):061d}"
        decimals += [f"-{whole[:-60] or '0'}.{whole[-60:]}{tail}" for tail in ("", "1", "00000000001")]
    decimals += ["-1e-45", "-7.006492321624085e-46", "-7.1e-46", "1e-400", "-0.0", "-9999.0", "-3.4028234663852886e+38"]
    found = np.frombuffer(float32_bytes(decimals), "<f4")
    wanted = np.array([_nearest(decimal) for decimal in decimals], "<f4")
    assert np.array_equal(found.view(np.uint32) & 0x7FFFFFFF, wanted.view(np.uint32) & 0x7FFFFFFF)
    twice = np.array([float(decimal) for decimal in decimals]).astype("<f4")
    assert not np.array_equal(twice, found)  # the cases are hard enough to tell
    signed = parse(b"[-0.0, -0, 0, 0.0]")  # a logprob of -0 is not one of 0, however it is written
    assert float32_bytes(signed) == np.array([-0.0, -0.0, 0.0, 0.0], "<f4").tobytes()


def _ask(tokens: int = 2) -> Ask:
    return Ask(id="a", prompt="x", max_tokens=tokens)


def _parts(**fields: object) -> Parts:
    return Parts(text=["ab"], finish="length", **fields)  # type: ignore[arg-type]


def test_margins_and_runners_up() -> None:
    """Of lists that do not fit each other tokens can't be told from logprobs of others."""
    chosen = [Alternative("a", "-0.5", 1), Alternative("b", "-3.0", 2), Alternative("c", "-1.0", 3)]
    top = [
        [Alternative("a", "-0.5", 1), Alternative("x", "-1.75", 7)],
        [Alternative("y", "-0.25", 8), Alternative("x", "-0.75", 7)],  # the chosen one is not listed, nor the top
        [Alternative("y", "-1.0", 8)],  # a tie
    ]
    answer = answer_from(_ask(3), _parts(ids=[1, 2, 3], chosen=chosen, top=top))
    assert answer.margins == np.array([1.25, 0.5, 0.0], "<f4").tobytes()
    assert answer.chosen_is_top == 2
    assert answer.runner_up == (7, 8, 8)
    assert answer_from(_ask(2), _parts(ids=[1, 2, 3])).notes == ("more tokens than max_tokens",)
    # where the server lists the chosen token alone, there is no margin at all
    answer = answer_from(_ask(), _parts(chosen=[Alternative("a", "-1")], top=[[Alternative("a", "-1")]]))
    assert (answer.margins, answer.chosen_is_top, answer.runner_up) == (b"", None, ())
    assert answer.logprobs == np.array([-1], "<f4").tobytes()
    one, two = Alternative("a", "-1", 1), Alternative("b", "-1", 2)
    unfit: list[dict[str, object]] = [{"ids": [1], "chosen": [one, two]}, {"ids": [1], "chosen": [two]}]
    for given in [*unfit, {"top": [[one]]}, {"ids": [1, 2], "bytes": [b"a"]}]:
        with pytest.raises(AttemptError, match=r"different"):
            answer_from(_ask(), _parts(**given))


def test_what_does_not_hold_all_of_an_answer_is_not_taken() -> None:
    for said, streamed, finish, kept in [
        (2, False, "stop", True), (3, True, "stop", True), (3, True, "length", False), (3, False, "stop", False),
    ]:  # fmt: skip
        parts = _parts(ids=[1, 2], bytes=[b"a", b"b"], completion_tokens=said, ids_of_logprobs=True, streamed=streamed)
        parts.finish = finish
        answer = answer_from(_ask(), parts)
        assert answer.known_by is (KnownBy.IDS if kept else KnownBy.TEXT)
        assert ("2 of 3 token ids (none taken)" in answer.notes) != kept
    for pieces, kept in (([b"a", b"b"], True), ([b"a", b"b", b"</s>"], True), ([b"a"], False)):
        assert answer_from(_ask(3), _parts(bytes=pieces)).known_by is (KnownBy.BYTES if kept else KnownBy.TEXT)

    # half a pair is replaced: text can always be written as UTF-8, and a note says where it was not what was sent
    whole = answer_from(_ask(), Parts(text=["\ud83d", "\ude00"], finish="stop"))
    half = answer_from(_ask(), Parts(text=["a\ud83d"], finish="stop"))
    assert (whole.text, whole.notes) == ("\U0001f600", ())
    assert (half.text, half.notes) == ("a\ufffd", ("half a surrogate pair in the text (replaced)",))


def test_events_do_not_depend_on_the_pieces() -> None:
    lines = b": hi|data: one||event: x|data:two|data: lines|id: 3|||data: last|".split(b"|")
    for size, end in product((1, 2, 3, 1000), (b"\n", b"\r\n")):
        body = b"".join(line + end for line in lines)
        events, found = Events(1000, 10), []
        for start in range(0, len(body), size):
            found += events.feed(body[start : start + size])
        assert found == [b"one", b"two\nlines", b"last"]
    events = Events(1000, 10)
    assert events.feed(b"data: half") == []
    for bound in ((10, 100), (1000, 3)):  # bytes of one event, number of events
        with pytest.raises(AttemptError) as caught:
            Events(*bound).feed(b"data: 0123456789\n\n" * 5)
        assert caught.value.kind == "too-large"


def test_waits_double_up_to_the_most_and_keep_what_the_server_asks() -> None:
    busy, limits = AttemptError("http-429", "busy"), Limits(first_wait_s=1, most_wait_s=5)
    waits = [wait_before_retry(busy, times, "a", limits) for times in range(8)]
    assert all(wait is not None and 0.5 * min(2**i, 5) <= wait <= min(2**i, 5) for i, wait in enumerate(waits))
    assert wait_before_retry(busy, 8, "a", limits) is None
    assert wait_before_retry(busy, 0, "a", limits) != wait_before_retry(busy, 0, "b", limits)
    for asked, kept in ((3.0, 3.0), (1e9, 5.0), (0.0, 0.0)):
        assert wait_before_retry(AttemptError("http-503", "", asked), 0, "a", limits) == kept
    for kind in ("timeout", "malformed", "certificate", "redirect", "http-400", "leaked-key"):
        assert wait_before_retry(AttemptError(kind, "", 1.0), 0, "a", limits) is None


def test_metrics_are_summed_and_nonsense_is_skipped() -> None:
    lines = ['hits{engine="0",model="a} b"} 3.0', 'hits{engine="1"} 4', 'time_bucket{le="1"} 9', "# HELP hits some"]
    lines += ["nan NaN", "inf +Inf", "plain 1e3 1700000000", "not a metric", "bad{ 1", "e eee"]
    assert read_metrics("\n".join(lines)) == {"hits": 7.0, "plain": 1000.0}


def test_an_odd_count_is_none_and_a_note() -> None:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    for n in (2, -1, 2**24 + 1, 2**53, 10**30):
        counts = {"tokens_evaluated": n, "tokens_predicted": n, "timings": {"cache_n": n}}
        for form, document in [
            ("llama.cpp", {"content": "ab", "stop": True, "stop_type": "limit", **counts}),
            ("sglang", {"text": "ab", "output_ids": [1, 2], "meta_info": dict.fromkeys(names, n)}),
        ]:
            parts = Parts()
            FORMATS[form].take(document, parts)
            assert [getattr(parts, name) for name in names] == [2 if n == 2 else None] * 3
            assert len([note for note in parts.notes if f" of {n} (not taken)" in note]) == (0 if n == 2 else 3)


ASK = Ask(id="a", prompt="For example, the", max_tokens=3)


def answer(protocol: str, *documents: dict[str, Any], streamed: bool = False) -> Answer:
    parts = Parts(streamed=streamed)
    for document in documents:
        FORMATS[protocol].take(parse(json.dumps(document).encode()), parts)
    return answer_from(ASK, parts)


def test_logprobs_of_chats_on_completions_are_read() -> None:
    """llama.cpp's have ids. vLLM's chats stream ids outside of them: they take none away."""
    one, two, three, four = (
        {"id": token, "token": "x", "bytes": [120], "logprob": logprob}
        for token, logprob in [
            (1751, -2.9094841480255127), (471, -3.0309998989105225), (2889, -1.886509656906128),
            (757, -2.4855220317840576),
        ]
    )  # fmt: skip
    content = [{**top[0], "top_logprobs": list(top)} for top in ((one, two), (three, four))]
    choice = {"text": "xx", "index": 0, "logprobs": {"content": content}, "finish_reason": "length"}
    usage = {"completion_tokens": 2, "prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}
    said = answer("openai", {"choices": [choice], "system_fingerprint": "b0-unknown", "usage": usage})
    assert (said.known_by, said.token_ids, said.runner_up) == (KnownBy.IDS, (1751, 2889), (471, 757))
    assert said.logprobs == np.array([-2.9094841480255127, -1.886509656906128], "<f4").tobytes()
    assert (said.chosen_is_top, said.cached_tokens, said.notes) == (2, 3, ())
    pieces = []
    for token, finish in ((1751, None), (2889, "length")):
        logprobs = {"content": [{"token": f"token_id:{token}", "logprob": -1.0, "bytes": [120]}]}
        delta = {"delta": {"content": "x"}, "logprobs": logprobs, "token_ids": [token]}
        pieces.append({"choices": [{"index": 0, "finish_reason": finish, **delta}]})
    said = answer("vllm-chat", *pieces, streamed=True)
    assert (said.known_by, said.token_ids, said.token_bytes) == (KnownBy.IDS, (1751, 2889), None)


def test_a_stream_of_llama_cpp_that_left_tokens_out_has_no_ids() -> None:
    """It sends nothing for a token that begins a character: ids with holes compare nothing."""
    pieces = [{"content": text, "tokens": [token], "stop": False} for token, text in ((110, "é"), (183, "x"))]
    for counted, stop, ids in [(3, "limit", None), (2, "limit", (110, 183)), (3, "eos", (110, 183))]:
        last = {"content": "", "tokens": [], "stop": True, "stop_type": stop, "tokens_predicted": counted}
        said = answer("llama.cpp", *pieces, last, streamed=True)
        assert (said.token_ids, said.text, said.known_by is KnownBy.IDS) == (ids, "éx", ids is not None)
        assert ("2 of 3 token ids (none taken)" in said.notes) == (ids is None)


_WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, "1.5", "", "x", [], [[]], [None], {}, {"a": None}, {"\ud800": 1}, "\ud800", Ellipsis,
)  # fmt: skip
_DIALECT = {"openai-chat": "openai", "vllm-chat": "vllm", "transformers-chat": "transformers"}


def _documents(protocol: str, stream: bool) -> list[dict[str, Any]]:
    context = context_of(tokenize(ASK.prompt))
    steps = [step(context, temperature=0, draw=(), alternatives=2) for _ in range(2)]
    body = FORMATS[protocol].body(ASK, "hash-1", stream)
    told = Told(body, (1, 2), 0, "length")
    return DIALECTS[_DIALECT.get(protocol, protocol)](steps, told, stream, protocol.endswith("-chat"))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


@pytest.mark.parametrize("each", tiers([12], [1]))
@pytest.mark.parametrize("protocol", FORMATS)
def test_wrong_types_are_refused_in_one_line(protocol: str, each: int) -> None:
    """In every run one in twelve of all pairs of a place and a value, drawn by the protocol's name."""
    for stream in (False, True):
        whole = _documents(protocol, stream)
        assert answer(protocol, *whole, streamed=stream).ok
        refused, pairs = 0, list(product(range(len(list(_places(whole)))), _WRONG))
        for index, wrong in random.Random(protocol).sample(pairs, len(pairs) // each):  # noqa: S311 - a draw of tests
            documents = copy.deepcopy(whole)
            container, key = list(_places(documents))[index]
            if wrong is Ellipsis:
                del container[key]
            else:
                container[key] = wrong
            try:
                read = answer(protocol, *documents, streamed=stream)
            except AttemptError:
                refused += 1
                continue
            read.text.encode()
            assert len(read.logprobs) in (0, 4 * len(read.token_ids or [0] * (len(read.logprobs) // 4)))
            assert len(read.margins) in (0, len(read.logprobs))
        assert refused > 24 // each


def test_every_format_asks_for_what_it_reads() -> None:
    ask = Ask(id="a", prompt="x", max_tokens=77, temperature=0.25, seed=54321, cached=False)
    for form in FORMATS.values():
        body = json.dumps(form.body(ask, "m", False))
        assert all(figure in body for figure in ("77", "0.25", "54321"))
        assert "a" not in json.loads(body).values()  # the id stays here
