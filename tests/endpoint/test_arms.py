"""Arms against a server in memory: what the contract finds, what is proven, and what the verdict may say."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from nondet.core.records import Run
from nondet.core.runfile import read_run, traces_path
from nondet.core.traces import read_traces
from nondet.endpoint.arms import Answer, Ask, KnownBy, Tokens, parse_endpoint_load
from nondet.endpoint.collect import Watcher, loaded_each
from nondet.endpoint.traffic import Played
from nondet.errors import ServerStoppedError, UserError
from nondet.verdict.findings import Finding
from nondet.verdict.gate import Outcome, decide, exit_code, judge, power_of
from nondet.verdict.served import compare_arms, evidence, subjects
from tests.endpoint.memory import ARMS, MemoryClient, planned, sampled

ODD = ("fake:num_requests_running", "fake:num_requests_waiting")


def verdict(run: Run) -> tuple[Finding, str]:
    first = judge(run)[0]
    return first.finding, f"{first.text} {' '.join(first.notes)}"


def contract(run: Run) -> dict[str, str]:
    return {a.question: a.answer for a in run.contract if a.impl == "server"}


def test_an_honest_server_is_clean_and_bounded(tmp_path: Path) -> None:
    run = sampled(tmp_path / "run.jsonl", MemoryClient(), prompts=2)
    assert [(v.prompt, v.finding) for v in judge(run)] == [(0, Finding.CLEAN), (1, Finding.CLEAN)]
    arms = evidence(run)["server", 0]
    assert {name: a.n for name, a in arms.items()} == ARMS
    assert all(a.proof for a in arms.values())
    assert "of loads (" in verdict(run)[1]
    assert exit_code(run, "divergent")[0] == 0
    assert set(contract(run).values()) == {"yes"}
    power = power_of(run, "server", rate=0.1, confidence=0.95, by="load")
    assert 0 < power.loads <= 12
    assert power.loads <= power.requests <= 42


def test_what_differs_is_laid_to_what_did_it(tmp_path: Path) -> None:
    for number, (client, arms, finding, said) in enumerate(
        [
            # existence on traces, consequence on tokens: they are told apart
            (MemoryClient(batch="bits"), None, Finding.BATCH, "tokens identical in 43 completions; none in tokens"),
            (MemoryClient(batch="tokens"), None, Finding.BATCH, "2 distinct completions of 43"),
            # cold against warm, with the hits proven; the load is not blamed for it
            (MemoryClient(cache=True), None, Finding.CACHE, ""),
            # a server that differs from itself alone is not said to depend on its batch, however it parts under load
            (MemoryClient(noisy=3), None, Finding.RUN_TO_RUN, ""),
            # one of 21 against 10 alone may be chance: that it parted is said, what by is not
            (MemoryClient(noisy=50), {"solo": 10, "loaded": 18}, Finding.UNATTRIBUTED, "fell at random"),
            # where hits are not counted, a warm prefix under load may be what parts
            (MemoryClient(batch="bits", cached=False), None, Finding.UNATTRIBUTED, "cause may be the prefix cache"),
        ]
    ):
        run = sampled(tmp_path / f"{number}.jsonl", client, plan=planned(arms))
        found, text = verdict(run)
        assert (found, [words for words in said.split("; ") if words not in text]) == (finding, []), text
        assert (Finding.BATCH in judge(run)[0].findings) == (finding == Finding.BATCH)
        assert exit_code(run, "divergent")[0] == 3


def test_only_a_proven_load_says_anything(tmp_path: Path) -> None:
    """No divergence under a load that nothing shows is not "not batch-dependent", and a gate stays shut."""
    for number, client in enumerate(
        [
            MemoryClient(counters=False),  # streams overlap in time: proven
            MemoryClient(counters=False, streams=False),
            MemoryClient(counters=False, serial=True),  # streams, but one after the other
            MemoryClient(serial=True),  # and says that it runs one
        ]
    ):
        plan = planned({"solo": 4, "loaded": 12})
        run = sampled(tmp_path / f"{number}.jsonl", client, plan=plan)
        found, text = verdict(run)
        assert found == (Finding.UNPROVEN if number else Finding.CLEAN), text
        assert exit_code(run, "divergent")[0] == (1 if number else 0)
        if number:
            assert "of loads (" not in text
            power = power_of(run, "server", rate=0.1, confidence=0.95, by="load")
            assert (power.requests, power.loads) == (0, 0)
            assert decide(run, rate=0.9, confidence=0.95, by="load").outcome != Outcome.OPEN


def test_what_is_compared_is_said(tmp_path: Path) -> None:
    assert Tokens(KnownBy.TEXT).piece(ord("a")) == "a"
    for known, traces in [("ids", 2), ("bytes", 2), ("text", 1)]:
        client = MemoryClient(known=known, batch="bits")
        run = sampled(tmp_path / f"{known}.jsonl", client, plan=planned({"solo": 2, "loaded": 6}))
        assert run.servers[0].known_by == known
        assert len({c.trace for c in run.completions}) == traces
        assert contract(run)["known-by"] == ("yes" if known == "ids" else "no")
        assert (f"compared by {known}" in verdict(run)[1]) == (known != "ids")
        watcher = Watcher(0.01, 0.95, "load")  # a gate asks for no more once an answer differs
        enough = [watcher.enough(r, [c for c in run.completions if c.round == r.round]) for r in run.rounds]
        assert (watcher.diverged, enough[-1]) == (traces > 1, traces > 1)


def test_what_ran_beside_an_answer_is_known_or_not_counted() -> None:
    """Another stream of ours, or two that the server ran while it did; what does not stream may have been waiting."""
    answer, beside, after = (0.0, 1.0, True), (0.9, 2.0, False), (1.0, 2.0, True)
    for polled, streams, unstreamed, company in [
        ([(0.5, 1.0, 0.0)], [answer], [], 0),
        ([(0.5, 2.0, None)], [answer], [], 1),
        ([(1.5, 2.0, None)], [answer], [], 0),
        ([], [answer, beside], [], 1),
        ([], [answer, after], [], 0),
        ([(0.5, 2.0, 0.0)], [], [(0.0, 1.0)], 1),
        ([(0.5, 2.0, 1.0)], [], [(0.0, 1.0)], 0),
    ]:
        played = Played(began=0.0, polled=polled, streams=streams, unstreamed=unstreamed)
        assert played.traffic(planned().rounds[0], 1).in_company == company


def test_contract(tmp_path: Path) -> None:
    for number, (client, answers) in enumerate(
        [
            (MemoryClient(greedy=False), {"greedy": "no"}),
            (MemoryClient(logprobs=False), {"greedy": "unknown", "logprobs": "no"}),
            (MemoryClient(seeded=False), {"seed": "no"}),
            (MemoryClient(varies=False), {"varies": "no", "seed": "unknown"}),
            (MemoryClient(noisy=2), {"repeatable-bits": "no"}),
            (MemoryClient(counters=False, cached=False), {"running": "no", "cache-counted": "no"}),
            (MemoryClient(listed=()), {"listed": "unknown"}),
            (MemoryClient(listed=("other",)), {"listed": "no"}),
        ]
    ):
        run = sampled(tmp_path / f"{number}.jsonl", client, plan=planned({"solo": 2}))
        assert answers.items() <= contract(run).items()
        assert run.complete


def test_failures_are_counted_by_kind(tmp_path: Path) -> None:
    client = MemoryClient(fails=9, change=lambda ask, number, answer: replace(answer, notes=("odd",)))
    run = sampled(tmp_path / "run.jsonl", client, plan=planned({"solo": 6, "loaded": 6}))
    assert {tuple(c.served.odd) for c in run.completions if c.served} == {("odd",), ()}
    failed = [(c.served and c.served.kind, c.reason) for c in run.completions if c.status == "error"]
    assert {*failed} == {("http-500", "500 no␛[31m")}
    assert "http-500" in verdict(run)[1]
    assert exit_code(run, "divergent")[0] == 1


def test_a_dead_server_stops_the_run_and_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(ServerStoppedError):
        sampled(path, MemoryClient(dies_after=45))
    before = read_run(path, allow_truncated=True)
    assert before.completions
    assert all(c.status == "ok" for c in before.completions)
    with pytest.raises(UserError, match="fingerprint was 'fake-1', is 'fake-2'"):
        sampled(path, MemoryClient(fingerprint="fake-2"), resume=True)
    away, client = traces_path(path).rename(tmp_path / "away"), MemoryClient()
    with pytest.raises(UserError, match="move the two together"):  # no report could be made of it
        sampled(path, client, resume=True)
    assert client.asked == 0
    away.rename(traces_path(path))
    run = sampled(path, client, resume=True)
    requests = (r for round_ in planned().rounds for r in round_.requests)
    assert {c.request for c in run.completions} == {r.id for r in requests if r.target}
    asked = {name for name in client.ids if not name.startswith(("contract", "r"))}
    assert not asked & {c.request for c in before.completions}
    assert verdict(run)[0] == Finding.CLEAN


def test_answered_errors_show_that_a_server_is_there(tmp_path: Path) -> None:
    """However often it is silent; without any, two dozen in a row are a dead server."""

    def busy(often: int, silent: str = "timeout") -> MemoryClient:
        def change(ask: Ask, number: int, answer: Answer) -> Answer:
            kind = silent if number % often == 0 else "http-400"
            failed = replace(answer, kind=kind, reason=f"as {kind}", token_ids=None, logprobs=b"")
            return answer if ask.id.startswith(("contract", "alive")) else failed

        return MemoryClient(change=change)

    plan = planned({"solo": 100})
    run = sampled(tmp_path / "run.jsonl", busy(2), plan=plan)
    kinds = Counter(c.served.kind for c in run.completions if c.served)
    assert kinds["timeout"] >= 40
    assert kinds.total() == 100
    for kind in ("timeout", "http-429"):
        with pytest.raises(ServerStoppedError, match="24 requests of one round failed"):
            sampled(tmp_path / f"{kind}.jsonl", busy(1, kind), plan=plan)


def test_counters_that_count_nothing_are_not_taken(tmp_path: Path) -> None:
    class Odd(MemoryClient):
        async def metrics(self) -> dict[str, float]:
            hits, running = (1e308, -1e308)[self.asked % 2], (-3.0, math.inf, 2.0)[self.asked % 3]
            return {"fake:prefix_cache_hits": hits} | dict(zip(ODD, (running, -1.0), strict=True))

    plan = planned({"solo": 4, "loaded": 6})
    run = sampled(tmp_path / "run.jsonl", Odd(), plan=plan)
    traffic = [r.traffic for r in run.rounds if r.traffic]
    assert len(traffic) == len(plan.rounds)
    assert {name for t in traffic for name in t.odd} == {*ODD}
    assert {t.running_most for t in traffic} <= {None, 2.0}
    assert {t.waiting_most for t in traffic} == {None}


def test_an_answer_of_megabytes_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most, first = 2**14, "solo-00000-000000"

    def long(ask: Ask, number: int, answer: Answer) -> Answer:
        pieces = answer.token_bytes and (b"y" * 9 * most, *answer.token_bytes[1:])
        return replace(answer, text="x" * 9 * most, token_bytes=pieces) if ask.id == first else answer

    monkeypatch.setattr("nondet.core.runfile.LINE_MOST", most)
    monkeypatch.setattr("nondet.core.traces._TEXT_MOST", 100)
    for known, bad in [("text", True), ("ids", False), ("bytes", False)]:
        path = tmp_path / f"{known}.jsonl"
        run = sampled(path, MemoryClient(known=known, change=long), plan=planned({"solo": 2}))
        assert run.complete
        failed = [(c.request, c.reason) for c in run.completions if c.status == "error"]
        assert [name for name, _ in failed] == [first] * bad
        assert all("its trace can't be recorded: a line of" in reason for _, reason in failed)
        texts = {t.text for t in read_traces(path)[0].values()}
        assert any(f"[{9 * most:,} characters, SHA-256 " in text for text in texts) != bad


def test_plans_are_drawn_from_the_seed_alone() -> None:
    once, again = planned(prompts=2), planned(prompts=2)
    assert once.digest == again.digest
    ids = [r.id for round_ in once.rounds for r in round_.requests]
    assert len(set(ids)) == len(ids)
    loaded = [r for r in once.rounds if r.arm == "loaded"]
    assert len({tuple(p.target for p in r.requests) for r in loaded}) > 1
    assert once.rounds[0].arm == once.rounds[-1].arm == "solo"
    load = parse_endpoint_load("targets=4,others=4")
    assert loaded_each(load, 1, 0.1, 0.95, "load") == 174
    assert loaded_each(load, 2, 0.1, 0.95, "request") == 23


def test_prompts_together_tell_what_one_alone_does_not(tmp_path: Path) -> None:
    """Two solo answers of one prompt leave it to chance whether the load did it; those of eight prompts do not."""
    plan = planned({"solo": 2, "loaded": 2}, prompts=8)
    run = sampled(tmp_path / "run.jsonl", MemoryClient(batch="bits"), plan=plan, prompts=8)
    assert {v.finding for v in judge(run)} == {Finding.BATCH}
    first = subjects(run)[0]
    assert [*compare_arms(first.server, first.arms, {})][-1].finding == Finding.UNATTRIBUTED
