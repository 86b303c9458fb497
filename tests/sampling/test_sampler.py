"""The draw that belongs to a seed and a position: its distribution, its borders, and that the batch never enters."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from nondet.core.records import Run
from nondet.core.traces import read_traces
from nondet.errors import UserError
from nondet.sampling import engine
from nondet.sampling.engine import Draw, TransformersEngine, draw_rows, philox, uniform_bits
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Sampling
from nondet.sampling.replay import Player, digest_of, recording_of, select_completions
from nondet.services.sample import SampleRequest
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from tests.build import tiers
from tests.sampling.conftest import planned, sampled_into

PLAIN = Sampling(0.8, 0, 1.0, 0)
LOAD = "others=2,targets=4,spread=6,prompt=4-12,tokens=2-4,budget=12,page=4"
IMPLS = ["stock", "stock-seeded", "unseeded-invariant", "invariant"]


def draw(logits: list[float], sampling: Sampling = PLAIN, position: int = 0) -> Draw:
    return draw_rows(torch.tensor([logits]), [(sampling, position)])[0]


def test_philox_gives_the_published_words() -> None:
    """The known answers that come with Random123, for ten rounds of four 32-bit words."""
    full = 0xFFFFFFFF
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((full,) * 4, (full, full)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    bits = [uniform_bits(s, p) for s in range(60) for p in range(60)]
    assert len(set(bits)) == 3600
    assert 0 <= min(bits) < max(bits) < 2**53


@pytest.mark.parametrize(("top_k", "top_p"), tiers([(6, 0.9)], [(0, 1.0), (5, 1.0), (0, 0.8)]))
def test_tokens_come_as_often_as_their_probability_says(top_k: int, top_p: float) -> None:
    """Chi-square of 4,000 draws against the exact probabilities after temperature, top-k and nucleus."""
    logits = np.random.default_rng(1).normal(0, 1.5, 16)
    order = np.argsort(-logits)
    p = np.exp(logits[order] / 0.8)
    p[top_k or 16 :] = 0
    p /= p.sum()
    kept = int(np.searchsorted(np.cumsum(p), top_p - 1e-12)) + 1
    p[kept:] = 0
    p /= p.sum()
    n = 4000
    asked = [(Sampling(0.8, top_k, top_p, seed), position) for seed in range(80) for position in range(n // 80)]
    rows = torch.tensor(logits, dtype=torch.float32).repeat(n, 1)
    counts = Counter(d.token for d in draw_rows(rows, asked))
    seen = np.array([counts[int(token)] for token in order])
    assert seen[kept:].sum() == 0
    statistic = float(((seen[:kept] - n * p[:kept]) ** 2 / (n * p[:kept])).sum())
    # 99.9% of chi-square by Wilson and Hilferty's approximation
    degrees = kept - 1
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    flat = n / kept
    assert float(((seen[:kept] - flat) ** 2 / flat).sum()) > 20 * degrees  # the test would see other probabilities


def test_a_row_draws_the_same_in_every_batch() -> None:
    """Alone, among others, in another order, of another layout: token, logprob and distances, bit for bit."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(9, 333, generator=generator).to(torch.bfloat16).float()  # many exact ties
    asked = [(Sampling(0.7, 20 if i % 2 else 0, 0.95, i), 5 * i) for i in range(9)]
    together = draw_rows(rows, asked)
    for i, expected in enumerate(together):
        assert repr(draw_rows(rows[i : i + 1], asked[i : i + 1])[0]) == repr(expected)
    backwards = draw_rows(rows.flip(0), asked[::-1])[::-1]
    assert repr(backwards) == repr(together)
    wide = torch.full((9, 700), 7.0)
    wide[:, 100:433] = rows
    assert repr(draw_rows(wide[:, 100:433], asked)) == repr(together)
    assert len({d.token for d in together}) > 4
    # nothing dropped, in the order of ids, or the vocabulary's many largest: one token, one logprob, one distance
    rows = torch.randn(12, 1003, generator=torch.Generator().manual_seed(4)).bfloat16().float()  # exact ties
    rows[3, ::2], rows[3, 1::2], rows[4, 7], rows[5, 9] = 0.0, -0.0, -torch.inf, torch.nan
    whole, kept = ([(Sampling(0.9, top_k, 1.0, i), i) for i in range(12)] for top_k in (0, 1003))
    assert repr(draw_rows(rows, whole)) == repr(draw_rows(rows, kept))
    mixed = [(whole, kept)[i % 2][i] for i in range(12)]
    assert repr(draw_rows(rows, mixed)) == repr(draw_rows(rows, whole))
    assert repr(draw_rows(rows, [(Sampling(0.9, 900, 1.0, i), i) for i in range(12)])) != repr(draw_rows(rows, whole))


def test_exactly_top_k_are_kept_and_ties_go_by_id() -> None:
    """Four equal logits, two kept: ids 1 and 2; -0.0 is 0.0; the tie at the border is told, and so is a gap."""
    tied = [-1.0, 0.0, -0.0, 0.0, 0.0]
    drawn = [draw(tied, Sampling(1.0, 2, 1.0, seed)) for seed in range(200)]
    assert Counter(d.token for d in drawn).keys() == {1, 2}
    assert {d.cut for d in drawn} == {0.0}
    assert draw([3.0, 1.0, 0.5], Sampling(1.0, 2, 1.0, 0)).cut == 0.5
    assert math.isnan(draw([3.0, 1.0], PLAIN).cut)


def test_the_distances_are_those_of_the_draw() -> None:
    """Two equal tokens: the border is at a half. A nucleus of 0.6 of 0.7 and 0.3 keeps one, 0.1 above."""
    for seed in range(50):
        u = uniform_bits(seed, 0) / 2**53
        d = draw([1.0, 1.0], Sampling(1.0, 0, 1.0, seed))
        assert d.token == int(u >= 0.5)
        assert d.border == pytest.approx(abs(u - 0.5), abs=1e-9)
        # a border that moves by less than the distance leaves the token, one that moves past it does not
        towards = 1 if u >= 0.5 else -1
        for share, stays in ((0.99, True), (1.01, False)):
            reach = d.border * share
            if reach < 0.499:
                moved = towards * math.log((0.5 + reach) / (0.5 - reach))
                assert (draw([1.0 + moved, 1.0], Sampling(1.0, 0, 1.0, seed)).token == d.token) is stays
    one = draw([math.log(0.7), math.log(0.3)], Sampling(1.0, 0, 0.6, 0))
    assert (one.token, one.border) == (0, 1.0)
    assert one.nucleus == pytest.approx(0.1, abs=1e-6)
    assert one.logprob == pytest.approx(math.log(0.7), abs=1e-6)  # the model's own, not the nucleus's
    # NaN and infinity give NaN logprobs, which the verdict calls wrong; -inf is a token that never comes
    for bad in ([math.nan, 1.0, 2.0], [math.inf, 1.0, 2.0]):
        assert math.isnan(draw(bad).logprob)
    assert {draw([0.0, -math.inf], Sampling(1.0, 0, 1.0, s)).token for s in range(50)} == {0}
    assert draw_rows(torch.zeros(0, 4), []) == []


@pytest.fixture(scope="module")
def drawn(tiny_float32: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two seeds, four completions each under four implementations."""
    samplings = [Sampling(1.5, 50, 0.98, seed) for seed in (0, 1)]
    text = "The following exceptions"
    plan = planned(tiny_float32, LOAD, text, n=4, new=8, samplings=samplings)
    listed = [{"text": "p", "tokens": len(tiny_float32.encode(text)), "seed": s.seed} for s in samplings]
    path, header = tmp_path_factory.mktemp("drawn") / "run.jsonl", {"sampling": {"temperature": 1.5}}
    return sampled_into(path, tiny_float32, plan, IMPLS, prompts=listed, header=header)


def test_one_text_a_seed_with_our_draw_on_invariant_kernels(drawn: Run) -> None:
    """Seed by seed: one trace with both replaced; the engine's draw alone, and stock logits alone, leave several."""
    traces = {
        (impl, seed): {c.trace for c in drawn.completions if (c.impl, c.prompt) == (impl, seed)}
        for impl in IMPLS
        for seed in (0, 1)
    }
    texts = {key: {c.tokens_digest for c in drawn.completions if (c.impl, c.prompt) == key} for key in traces}
    for seed in (0, 1):
        assert len(traces["invariant", seed]) == 1
        assert len(traces["stock-seeded", seed]) > 1
        assert len(texts["unseeded-invariant", seed]) > 1
        assert len(texts["stock", seed]) > 1
        assert len(texts["stock-seeded", seed]) < len(texts["stock", seed])
    assert texts["invariant", 0] != texts["invariant", 1]
    found = {(v.impl, v.prompt): v for v in judge(drawn)}
    assert {found["invariant", seed].finding for seed in (0, 1)} == {Finding.CLEAN}
    assert {found["unseeded-invariant", seed].finding for seed in (0, 1)} == {Finding.BATCH}
    assert "one generator for the whole batch" in " ".join(found["stock", 0].notes)
    assert "one generator" not in " ".join(found["stock-seeded", 0].notes)


def test_draws_are_recorded_and_belong_to_the_seed(drawn: Run) -> None:
    """Our draws have their distances at every token, the engine's have none; a seed is part of a trace."""
    traces, _ = read_traces(Path(drawn.source))
    for c in drawn.completions:
        t = traces[c.trace]
        ours = c.impl in ("invariant", "stock-seeded")
        assert t.seed == c.prompt
        assert (len(t.border), len(t.cut), len(t.nucleus)) == ((32, 32, 32) if ours else (0, 0, 0))
        if ours:
            assert (np.frombuffer(t.border, "<f4") >= 0).all()


def test_a_drawn_completion_is_played_again(drawn: Run, tiny_float32: LoadedModel) -> None:
    """From the tape, with its seed: as recorded, and under invariant kernels alone as in company."""
    traces, _ = read_traces(Path(drawn.source))
    for impl in ("stock", "invariant"):
        completion = select_completions(drawn, ["t000003"], impl)[0]
        with implementation(impl):
            player = Player(TransformersEngine(tiny_float32.model), recording_of(drawn, completion))
            (again,) = player.as_recorded([completion], traces)
            assert again.same
            if impl == "invariant":
                assert player.solo(completion, traces).same


def test_tokens_that_were_not_drawn_are_an_error(drawn, tiny_float32, monkeypatch) -> None:
    """An engine that goes on with other tokens than the hook drew gives no completion."""
    player = Player(TransformersEngine(tiny_float32.model), drawn.tapes[-1])
    assert {o.finish for o in player.play().outcomes} == {"length"}
    monkeypatch.setattr(engine, "_CERTAIN", -1.0)  # the engine's argmax takes any other token
    session = player.play()
    assert {o.reason for o in session.outcomes} == {"the engine continued with other tokens than those drawn"}
    assert {o.finish for o in session.outcomes} == {"error"}
    outcome = session.outcomes[0]
    greedy = replace(outcome, request=replace(outcome.request, sampling=None))
    assert digest_of(greedy) != digest_of(outcome)


def test_values_that_make_no_sense_are_refused(drawn: Run) -> None:
    """One line, with the value; nor is a tape from anywhere whole that holds any that no sampler can draw by."""
    for changed, said in [
        ({"temperature": -1.0}, "--temperature -1"),
        ({"temperature": math.nan}, "--temperature nan"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 0.0}, "--top-p 0"),
        ({"top_p": 1.5}, "--top-p 1.5"),
        ({"seeds": 0}, "--seeds 0"),
        ({"temperature": 0.0, "top_k": 5}, "need a temperature"),
    ]:
        with pytest.raises(UserError, match=said):
            SampleRequest(**({"temperature": 0.8} | changed))
    assert len(SampleRequest(temperature=0.8, top_k=50, top_p=0.95, seeds=20).samplings) == 20
    assert not SampleRequest().samplings
    tape, completion = drawn.tapes[-1], drawn.completions[-1]
    for name, value in [("temperature", 0), ("temperature", "hot"), ("top_k", -1), ("top_p", 2), ("seeded", 1)]:
        first = msgspec.structs.replace(tape.requests[0], sampling={**(tape.requests[0].sampling or {}), name: value})
        bad = msgspec.structs.replace(tape, requests=[first, *tape.requests[1:]])
        with pytest.raises(UserError, match="is not whole"):
            recording_of(msgspec.structs.replace(drawn, tapes=[bad]), completion)
