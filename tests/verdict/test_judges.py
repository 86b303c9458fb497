"""NaN and infinity through every judge: they agree with themselves bit for bit, and a gate must not pass on that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from nondet.core.records import ContractAnswer, Diagnosis, Run, Served, Status, TraceVerdict
from nondet.core.traces import nonfinite_logprobs
from nondet.probes.functions import check
from nondet.verdict.findings import Finding
from nondet.verdict.gate import decide, exit_code, judge, power_text
from tests.build import beside, cell, failed, header, replayed, row, run_of, timed
from tests.build import completion as completion_of
from tests.diagnose.test_verdict import IMPL, under_the_cure
from tests.verdict.test_gate import loads
from tests.verdict.test_samples import BASE, varied
from tests.verdict.test_served import changed, completion, ended, made, simple, traffic


def computed(run: Run, value: float) -> Run:
    nonfinite = nonfinite_logprobs(np.asarray([value, -0.25], "<f4").tobytes())
    return with_(changed(run, lambda _: {"nonfinite": nonfinite}))


def runs_of(value: float) -> tuple[Run, ...]:
    plan = {"prompts": [{"text": "p", "tokens": 4}], "impls": [IMPL]}
    sample = replace(under_the_cure(), header=header("sample", plan))
    rows = check(lambda x: x * value, lambda size: torch.ones(8, 16)[:size], [1, 2, 4])
    return with_(rows), *(computed(run, value) for run in (sample, varied(BASE | {"chunk=5": "AAAA"}), simple()))


def test_every_judge_calls_it_wrong_and_the_gate_fails() -> None:
    """Where nothing was compared as well; with a number in its place the run is clean and the gate passes."""
    for value in (float("nan"), float("inf"), float("-inf"), -0.5):
        sound = value == -0.5
        for run in runs_of(value):
            [verdict] = judge(run)
            assert verdict.findings == ((Finding.CLEAN,) if sound else (Finding.WRONG,))
            assert exit_code(run, "divergent") == ((0, "") if sound else (3, ""))
            assert (decide(run, rate=0.9, confidence=0.5, by="request").code == 3) == (not sound)
        _, sample, _, server = runs_of(value)
        without = computed(varied(BASE | {"chunk=5": "AAAA"}, "chunk=5"), value)
        for run in (*(with_(run, completions=run.completions[:1]) for run in (sample, server)), without):
            [verdict] = judge(run)
            assert verdict.findings == ((Finding.UNTESTED,) if sound else (Finding.WRONG, Finding.UNTESTED))
            assert exit_code(run, "divergent")[0] == (1 if sound else 3)
            assert ("hold NaN or infinite logprobs: wrong; " in verdict.text) == (not sound)


# Whole verdicts and what a gate makes of them, word for word: no clause, no note and no reason goes unseen.
# python -m tests.verdict.test_judges    writes verdicts.txt anew; read what changed

KEPT = Path(__file__).with_name("verdicts.txt")


def with_(run: Run, **fields: Any) -> Run:
    return replace(run, **({"complete": True} | fields))


def planned(run: Run, **plan: Any) -> Run:
    return with_(run, header=replace(run.header, plan=run.header.plan | plan))


def axes() -> Iterator[tuple[str, Run]]:
    both = BASE | {"chunk=5": "BBBB", "page=4": "AAAB", "page=8": "AAAA"}
    yield "every axis compared", varied(BASE | {"chunk=5": "AAAA"}, note="needs CUDA")
    yield "every axis compared, and NaN", varied(BASE | {"chunk=5": "AAAA"}, lost="A")
    yield "of two values one took effect", varied(BASE | {"chunk=5": "AAAA", "chunk=16": "AAAA"}, "chunk=5")
    beside_one = varied(BASE | {"chunk=5": "AAAA", "page=4": "AAAA"}, "chunk=5")
    yield "an axis without effect, beside one that had some", beside_one
    yield "one completion a value", varied({"base": "A", "dtype=float16": "B"})
    yield "nothing left of the base", varied({"base": ["", "", "", ""], "chunk=5": "AAAA"})
    no_base = varied(BASE | {"chunk=5": "AAAA"})
    yield "no round of the base", with_(no_base, rounds=[replace(r, arm="x") for r in no_base.rounds])
    yield "two axes of two followed", varied(both)
    yield "nothing run again", with_(varied(both), rows=[])
    yield "the base came out otherwise", with_(varied(both), rows=[replayed("stock", 4, 2)])
    yield "an axis that changes the arithmetic", varied(BASE | {"dtype=float16": "BBBB", "chunk=5": "AAAA"})
    yield "at one value several, at another one", varied(BASE | {"dtype=float16": "ABAA", "page=4": "AAAA"})
    yield "several in the round that came again", varied({"base": "AABB", "chunk=5": "AABB"})
    yield "followed in the second round alone", varied(BASE | {"chunk=5": "AAAB"}, per_round=2)
    yield "a failed request takes no other with it", varied(BASE | {"chunk=5": ["A", "", "A", "B"]})
    yield "of fewer comparisons the bound", varied(BASE | {"chunk=5": ["A", "", "", "A"], "page=4": "AAAA"})
    yield "one round, and an axis of one value", varied({"base": "AAAA", "dtype=float16": "AAAA"})
    yield "without effect, and nothing parted", varied(BASE | {"chunk=5": "AAAA"}, "chunk=5")
    yield "without effect, and bits parted", varied(BASE | {"chunk=5": "AAAB"}, "chunk=5")
    yield "without effect, beside one that had some", varied(BASE | {"chunk=5": "AAAB", "page=4": "AAAA"}, "chunk=5")
    yield "one axis unproven, one lone", varied({"base": "A", "chunk=5": "A", "page=4": "A", "dtype=x": "A"}, "chunk=5")
    yield "a lone NaN among axes", varied(BASE | {"chunk=5": "AABA"}, lost="B")


def samples() -> Iterator[tuple[str, Run]]:
    parted, graphs, drawn = loads(5, parted=[1]), {"load": {"graphs": True}}, {"sampling": {"temperature": 1.0}}
    yield "five loads alike", with_(loads(5))
    yield "one load", with_(loads(1, 4))
    yield "two loads, one of which parts", with_(loads(2, parted=[3]))
    yield "forty loads, each alone", with_(loads(40, alone=True))
    yield "ten loads of three prompts", with_(loads(10, each=2, prompts=3))
    yield "one load of three prompts", with_(loads(1, each=1, prompts=3))
    yield "parted where it was run again", with_(loads(5, parted=[1, 4]))
    yield "parted where nobody ran again", with_(loads(5, parted=[5]))
    yield "parted, and nothing was run again", with_(parted, rows=[])
    yield "run again, it parted", with_(loads(5), rows=[replayed("stock", 2, 1), replayed("stock", 2, 0, 3)])
    alone = loads(5, alone=True, parted=[3])
    yield "alone and parted", with_(alone)
    # of 20 tokens each request computed 4: the keys of a shared prefix hold bits of another request's batch
    for name, run in (("and parted", alone), ("and alike", loads(5, alone=True))):
        yield f"alone {name}, with a cached prefix", planned(run, prompts=[{"text": "p", "tokens": 20}])
    yield "batches that nobody knows", with_(parted, rounds=[])
    yield "batches that nobody knows, alike", with_(loads(5), rounds=[])
    yield "graphs", planned(loads(5), **graphs)
    yield "graphs, parted", planned(parted, **graphs)
    yield "not complete", with_(loads(5), complete=False)
    yield "drawn by one generator", planned(loads(5), **drawn)
    yield "drawn by a seed", planned(loads(5, impl="stock-seeded"), **drawn)
    for n, lost in ((1, 0), (2, 0), (2, 1), (2, 2)):
        run = with_(loads(1, n))
        run.completions[:lost] = [completion_of(f"t0-{i}", "") for i in range(lost)]
        yield f"{n} of which {lost} failed", run
    yield "many prompts parted", with_(loads(5, impl="a", prompts=4, parted=range(1, 40, 3)))
    yield "each implementation has its own power", with_(beside(loads(5, impl="a"), loads(2), "b"))


def answered(run: Run, temperature: float = 0.0, **answers: str) -> Run:
    contract = [ContractAnswer(impl="server", question=q, answer=a, evidence=f"{q} seen") for q, a in answers.items()]
    return planned(with_(run, contract=contract), temperature=temperature)


def seen(run: Run, **fields: Any) -> Run:
    return with_(run, servers=[replace(s, **fields) for s in run.servers])


def servers() -> Iterator[tuple[str, Run]]:
    part = simple(trace="B", loads=3)
    yield "proven loads", with_(simple(loads=3))
    yield "loads that part", with_(part)
    yield "one load against four alone is chance", with_(simple(trace="B", loads=1))
    yield "some of them were alone", with_(simple(loads=3, concurrent=3))
    for temperature in (0.0, 0.7):
        for answer in ("yes", "no", "unknown"):
            name = f"at {temperature} contract {answer}"
            yield name, answered(part, temperature, greedy=answer, seed=answer, sums=answer)
            yield f"{name}, alike", answered(simple(loads=3), temperature, greedy=answer, seed=answer)
        yield f"at {temperature} no contract", planned(part, temperature=temperature)
    yield "no server on record", with_(simple(loads=3), servers=[])
    yield "no fingerprint", seen(simple(loads=3), fingerprint="")
    yield "compared by text, no logprobs", seen(part, known_by="text", logprobs=False)
    yield "two fingerprints", traffic(part, "loaded", fingerprints={"a": 1, "b": 1})
    yield "streams", traffic(simple(loads=3), "loaded", running_most=None, decoding_most=2)
    yield "no streams", traffic(simple(loads=3), "loaded", running_most=None, decoding_most=1)
    yield "the load did not form", traffic(part, "loaded", running_most=1.0, decoding_most=1)
    yield "it ran two with some waiting", traffic(simple(loads=3), "loaded", running_most=2.0, waiting_most=2.0)
    yield "neighbours alone", with_(simple(loads=3, concurrent=0))
    yield "neighbours alone, and bits parted", with_(simple(loads=3, concurrent=0, trace="B"))
    odd = part.completions[1]
    noisy = changed(part, lambda c: {"trace": "C" if c is odd else c.trace})
    yield "solo does not agree with itself", with_(noisy)
    yield "and it had other clients", traffic(noisy, "solo", running_most=2.0)
    yield "nor is its cache known", changed(noisy, lambda c: {"served": Served()})
    split = changed(noisy, lambda c: {"served": Served(cached_tokens=8 if c.trace == "C" else 0)})
    yield "another answer where more was cached", split
    yield "one alone", with_(made([completion(0, "solo", round=0)], [ended(0, "solo", 1, 0)]))
    yield "two alone", with_(made([completion(i, "solo", round=i) for i in range(2)], []))
    gone = [completion(i, "solo", round=i, status="error") for i in range(2)]
    yield "none alone", with_(made([completion(2, "solo", round=2), *gone], []))
    other = changed(part, lambda c: {"served": Served(cached_tokens=4 if c.arm == "loaded" else 0)})
    yield "another cache under load", other
    for name, warm in (("alike", "A" * 8), ("parted", "B" * 8), ("parted in two ways", "B" * 7 + "C")):
        cold = [completion(100 + i, "cold", round=50 + i) for i in range(8)]
        more = [completion(200 + i, "warm", warm[i], round=60 + i, cached=4) for i in range(8)]
        yield f"cold and warm {name}, and a load", with_(part, completions=[*part.completions, *cold, *more])
        yield f"cold and warm {name} alone", with_(made([*cold, *more], []))
        hits = made([*cold, *more], [ended(60 + i, "warm", 1, 0) for i in range(8)])
        warmed = changed(hits, lambda c: {"served": None})
        yield f"a counter of hits, {name}", traffic(warmed, "warm", counters={"cache_hit": 1.0, "requests": 9.0})
    for arm, few, many in (("cold", 0, 0), ("cold", 0, 1), ("warm", 5, 5), ("warm", 1, 5), ("warm", 0, 5)):
        both = [completion(i, arm, round=i, cached=n) for i, n in enumerate((few, many))]
        yield f"{arm}, {few} and {many} cached", with_(made(both, []))
    for known_by, text in (("ids", ""), ("text", ""), ("text", "t")):
        first, second = (simple(loads=3, trace=trace, served=Served(text=text)) for trace in "AD")
        yield f"a second server by {known_by} {text}", with_(beside(first, seen(second, known_by=known_by), "server-2"))
    lone = simple(loads=3)
    yield "a second server without solo", with_(beside(lone, with_(lone, completions=lone.completions[4:]), "server-2"))
    yield "a load alone", with_(lone, completions=lone.completions[4:])
    yield "drawn, and wrong", answered(changed(simple(loads=3), lambda c: {"nonfinite": 1}), 0.7, seed="no")


def answers() -> Iterator[tuple[str, Run]]:
    for name, run in (("failed", simple(status="error")), ("none", simple(loads=0)), ("other", simple(prompt=1))):
        yield f"a planned load without an answer: {name}", with_(run)
    yield "answers without a token", with_(simple(n_tokens=0))
    for arm in ("loaded", "solo"):
        run = simple()
        for i in [i for i, c in enumerate(run.completions) if c.arm == arm][-3:]:
            run.completions[i] = replace(run.completions[i], finish="eos")
        yield f"{arm} ended otherwise", with_(run)
    run = simple()
    run.completions[-1] = completion(999, "loaded", round=39, status="error")
    yield "one failed", with_(run)
    run.completions[4:5] = [completion(0, "loaded", "B", round=10)]
    yield "a load that does not agree with itself", with_(run, completions=run.completions[4:])
    apart = [*run.completions[:4], *(completion(i, "cold", "B", round=50 + i) for i in range(4))]
    yield "arms apart, neither the other's base", with_(made(apart, run.rounds[:4]))


def others() -> Iterator[tuple[str, Run]]:
    for status in (Status.TIMED, Status.ERROR):
        yield f"a cell {status}", run_of(cells=[cell(8, timed("stock", 1.0, status=status))])
    lost = failed(), failed(Status.SKIPPED, case="b")
    yield "cases failed and were skipped", run_of(row([0, 0]), *lost, row([0, 0], nonfinite=2))
    for n in (4, 3):
        yield f"{n} implementations part", run_of(*(row([0, 1], impl=f"m:{i}") for i in range(n)))
    for finding in ("no divergence observed", "batch-dependent", "unknown"):
        last = [Diagnosis(finding=each, whether="w") for each in ("batch-dependent", finding)]
        yield f"of two diagnoses the last: {finding}", with_(loads(5), diagnoses=last)
        trace = TraceVerdict(finding=finding, culprits=[], families=None, sentences=[])
        yield f"a trace: {finding}", with_(loads(1, 1), trace_verdicts=[trace])


def told(part: str, name: str, run: Run) -> Iterator[str]:
    yield f"# {part}: {name}"
    for verdict in judge(run):
        yield f"{verdict.impl} {verdict.prompt}: {' + '.join(verdict.findings)} = {verdict.text}"
        yield from (f"  {note}" for note in verdict.notes)
    decision = decide(run, rate=0.3, confidence=0.9, by="load")
    yield f"gate: {decision.outcome}: {decision.reason}"
    yield from (f"  {p.impl}: {power_text(p)}" for p in decision.power)
    yield f"exit {exit_code(run, 'divergent')} {exit_code(run, None)}"


PARTS: tuple[Callable[[], Iterator[tuple[str, Run]]], ...] = (axes, samples, servers, answers, others)


def everything() -> str:
    return "".join(f"{line}\n" for part in PARTS for name, run in part() for line in told(part.__name__, name, run))


def test_whole_verdicts_are_what_they_were() -> None:
    """Every branch of every judge has its words here."""
    made_now = everything()
    assert made_now.count("# ") > 90
    assert made_now == KEPT.read_text(encoding="utf-8")


if __name__ == "__main__":
    KEPT.write_text(everything(), encoding="utf-8")
