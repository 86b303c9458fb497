"""Tapes: a round comes again bit for bit, and the smallest company in which a request still parts is the smallest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nondet.core.compare import weights_digest
from nondet.core.records import Completion, Run, Status
from nondet.core.traces import Trace, read_traces
from nondet.errors import UserError
from nondet.sampling.engine import TransformersEngine, run_session
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Outcome, Pace, Request, Session, parse_load
from nondet.sampling.replay import (
    Player,
    first_other_step,
    load_of,
    minimal,
    recording_of,
    repeated,
    requests_of,
    rounds_to_settle,
    select_completions,
    with_session,
)
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from tests.build import completion
from tests.sampling import test_collect
from tests.sampling.conftest import change_bits, planned, sampled_into
from tests.sampling.test_collect import sample

LOAD = "others=6,targets=6,spread=12,prompt=4-24,tokens=4-16,budget=16,page=4"


@pytest.fixture(scope="module")
def recorded(tiny_float32: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Trace]]:
    """Two rounds of a float32 model, whose products depend on M on every CPU."""
    path = tmp_path_factory.mktemp("tape") / "run.jsonl"
    text = "The following exceptions are raised when"
    plan = planned(tiny_float32, LOAD, text, n=12, seed=3, new=12)
    return sampled_into(path, tiny_float32, plan), read_traces(path)[0]


def test_divergent_completions_come_again_bit_for_bit(recorded, tiny_float32) -> None:
    """From the tape alone: tokens and logprob bits of every rarer completion, and every step as it ran."""
    run, traces = recorded
    rare = select_completions(run, ["divergent"], None)
    assert len(rare) >= 4, "the load does not part enough requests to test anything"
    for number in (0, 1):
        mine = [c for c in rare if c.round == number]
        playing = Player(TransformersEngine(tiny_float32.model), recording_of(run, mine[0]))
        for replayed in playing.as_recorded(mine, traces):
            assert replayed.same, replayed.sentence
            assert "every step as recorded" in replayed.sentence


def test_a_recording_holds_the_plan_and_the_schedule(recorded: tuple[Run, dict[str, Trace]], tiny: LoadedModel) -> None:
    """Requests, prompts and limits come back as they were, and another schedule is seen at its first step."""
    record, load = recorded[0].tapes[1], parse_load(LOAD)
    requests = requests_of(record)
    assert (load_of(record), len(requests), record.engine["engine"]) == (load, 12, "transformers")
    assert str(Path.home()) not in str(record.engine), "a recording may be handed on"
    session = run_session(tiny.model, requests, load)
    assert first_other_step(record, requests, session.packs) is None  # other weights, same batches
    late = [replace(r, arrival_step=r.arrival_step + 1) for r in requests]
    assert first_other_step(record, late, run_session(tiny.model, late, load).packs) == min(session.packs)


def test_what_is_not_in_the_run_is_said(recorded: tuple[Run, dict[str, Trace]], tiny: LoadedModel) -> None:
    """A request or an implementation that is not there, a run without recordings, and other weights, both digests."""
    run, _ = recorded
    with pytest.raises(UserError, match=f"have digest .*, those of .* had {run.tapes[0].weights}"):
        recording_of(run, run.completions[0], weights_digest(tiny.model))
    with pytest.raises(UserError, match="no request 't999999'"):
        select_completions(run, ["t999999"], None)
    with pytest.raises(UserError, match="none under --impl invariant"):
        select_completions(run, ["t000000"], "invariant")
    bare = Run(header=run.header, completions=run.completions, source="old.jsonl")
    with pytest.raises(UserError, match=r"old.jsonl has no tape of stock, round 0"):
        recording_of(bare, run.completions[0])


def test_divergent_is_of_its_own_prompt_and_arm(recorded: tuple[Run, dict[str, Trace]]) -> None:
    """Three prompts that each agree with themselves hold nothing divergent; one odd completion of one of them is."""
    run, _ = recorded

    def prompts(*traces: str) -> Run:
        made = [completion(f"t{i}", trace, prompt=i % 3, arm=f"{i % 2}") for i, trace in enumerate(traces)]
        return Run(header=run.header, completions=made)

    same = [f"{i % 3} {i % 2}" for i in range(18)]
    assert select_completions(prompts(*same), ["divergent"], None) == []
    odd = [*same[:-1], "odd"]
    assert [c.request for c in select_completions(prompts(*odd), ["divergent"], None)] == ["t17"]


def test_a_shrunk_company_still_parts_and_nobody_can_be_left_out(recorded, tiny_float32) -> None:
    """Checked here again, member by member, in sessions of their own."""
    run, traces = recorded
    (completion,) = select_completions(run, ["divergent"], None)[:1]
    playing = Player(TransformersEngine(tiny_float32.model), recording_of(run, completion))
    alone = playing.solo(completion, traces)
    assert not alone.same
    shrunk = playing.shrunk(completion, traces)
    assert 1 <= len(shrunk.company) < 11
    assert "none of them can be left out" in shrunk.sentence

    def answer(*others: str) -> object:
        session = playing.play([*others, completion.request])
        outcome = next(o for o in session.outcomes if o.request.id == completion.request)
        return outcome.token_ids if alone.first_token is not None else (outcome.token_ids, outcome.logprobs)

    assert answer() != answer(*shrunk.company)
    for member in shrunk.company:
        assert answer() == answer(*(x for x in shrunk.company if x != member))


def test_delta_debugging_ends_at_a_minimum() -> None:
    """For conditions that are not monotonous either: what remains still holds, and holds without no single member."""
    for seed in range(20):
        rng = random.Random(seed)  # noqa: S311 - test data
        needed = set(rng.sample(range(30), rng.randint(1, 5)))
        spoilers = set(rng.sample(sorted(set(range(30)) - needed), 2))

        def still(items: Sequence[int], needed: set[int] = needed, spoilers: set[int] = spoilers) -> bool:
            return needed <= set(items) and (not spoilers & set(items) or spoilers <= set(items))

        kept = minimal(list(range(30)), still)
        assert still(kept)
        assert not any(still([x for x in kept if x != left]) for left in kept)
    assert minimal([1, 2, 3], lambda items: True) == []


def test_forced_tokens_are_fed_and_the_session_can_be_cut(tiny: LoadedModel) -> None:
    """A request that is fed what it would have chosen anyway is unchanged; fed others, its logprobs follow them."""
    prompt = tuple(tiny.encode("The following"))
    requests = [Request("a", True, prompt, 6, 0), Request("b", False, prompt[::-1], 30, 0)]
    load = parse_load("light,sharing=off")
    free = run_session(tiny.model, requests, load).outcomes[0]
    same = run_session(tiny.model, requests, load, forced={"a": free.token_ids}, until="a")
    assert (same.outcomes[0].token_ids, same.outcomes[0].logprobs) == (free.token_ids, free.logprobs)
    assert same.outcomes[1].finish == "cut"
    others = [t + 1 for t in free.token_ids]
    fed = run_session(tiny.model, requests, load, forced={"a": others}).outcomes[0]
    assert fed.token_ids[:-1] == others[:-1]
    assert fed.logprobs[:4] == free.logprobs[:4]
    assert fed.logprobs[4:] != free.logprobs[4:]


# Which rounds are run again, so that a prompt's divergence can be told from noise.


def completions(*rounds: dict[int, str]) -> list[Completion]:
    """Round by round: prompt -> one trace name for each of its completions there."""
    made = []
    for number, members in enumerate(rounds):
        for prompt, names in members.items():
            made += [completion(f"{number}-{prompt}", name, round=number, prompt=prompt) for name in names]
    return made


def test_rounds_are_chosen_by_what_they_settle() -> None:
    """None where the first round shows it or nothing parts; else what settles most; two where it takes two."""
    assert rounds_to_settle(completions({0: "ab"}, {0: "cd"}), 3) == []
    assert rounds_to_settle(completions({0: "aa", 1: "xx"}, {0: "a", 1: "x"}), 3) == []
    parted = completions({0: "a", 1: "x", 2: "p"}, {0: "b", 1: "x"}, {0: "b", 1: "y", 2: "p"})
    assert rounds_to_settle(parted, 3) == [2]
    assert rounds_to_settle(parted, 0) == []
    later = completions({0: "a"}, {1: "x"}, {1: "y"})
    assert rounds_to_settle(later, 3) == [1, 2]
    assert len(rounds_to_settle(completions({9: "a"}, *({i: "ab"} for i in range(8))), 3)) == 3


def test_a_prompt_that_parts_between_rounds_is_settled(tiny_float32, tmp_path, monkeypatch) -> None:
    """One completion a round: the first alone can't tell, further rounds run again do, and noise there is seen."""
    monkeypatch.setattr(test_collect, "LOAD", "others=3,targets=1,spread=6,prompt=4-16,tokens=2-6,budget=16,page=4")
    open_ = sample(tiny_float32, tmp_path / "open.jsonl", n=4)
    assert [v.finding for v in judge(open_)] == [Finding.UNATTRIBUTED]
    settled = sample(tiny_float32, tmp_path / "settled.jsonl", n=4, settle=3)
    assert [v.finding for v in judge(settled)] == [Finding.BATCH]
    (_, *further) = settled.rows
    assert [r.extra["round"] for r in further] == rounds_to_settle(open_.completions, 3) != []
    assert sample(tiny_float32, tmp_path / "settled.jsonl", n=4, settle=3, resume=True).rows == settled.rows
    change_bits(monkeypatch, lambda call: call if call > 5 else 0)  # after a warm-up, the first round, and four rounds
    noisy = sample(tiny_float32, tmp_path / "noisy.jsonl", n=4, settle=3)
    assert [v.finding for v in judge(noisy)] == [Finding.RUN_TO_RUN]


def test_steps_before_a_capture_are_held_against_their_like(tiny_float32: LoadedModel) -> None:
    """What a graph gave against what ran without one is no run to run: no answer, whether it parts or not."""

    def session(captured: tuple[bool, ...], logprobs: bytes) -> Session:
        outcome = Outcome(Request("t0", True, (1,), 1, 0), [5], logprobs, finish="length")
        return Session([outcome], 2, 1, 0.2, pace=[Pace(0.1, 1, step) for step in captured])

    once = session((True, False), bytes(4))
    for captured, logprobs, status in (
        ((True, False), bytes(4), Status.IDENTICAL),
        ((True, False), bytes([0, 0, 0, 1]), Status.DIVERGENT),
        ((False, True), bytes(4), Status.ERROR),
        ((False, False), bytes([0, 0, 0, 1]), Status.ERROR),
    ):
        made = with_session(repeated(tiny_float32, "stock", 0, 0.0), once, session(captured, logprobs))
        assert made.status == status
        assert ("captured in other steps" in made.reason) == (status == Status.ERROR)
