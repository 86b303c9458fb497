"""One verdict per implementation of a run, the run's statistical power, and the decision and exit code of a gate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec

from nondet.core.records import RECORDS, Conclusion, Neighbours, Role, Run, Status
from nondet.core.statistics import trials_to_see
from nondet.errors import UnknownNameError, UserError
from nondet.verdict.findings import Effect, Finding, Verdict, subject_name
from nondet.verdict.mismatch import Thresholds, held, judge_mismatch, judge_training
from nondet.verdict.rows import judge_rows
from nondet.verdict.samples import is_replay, is_varied, judge_axes, judge_samples, subjects
from nondet.verdict.served import is_endpoint, judge_served, proven_tries, unseeded
from nondet.verdict.wording import Reason, phrase, reason, stated, words


class Outcome(StrEnum):
    """The possible outcomes of a gate."""

    OPEN = "open"
    SHUT = "shut"
    NO_ANSWER = "no answer"
    NOT_ENOUGH = "not enough"


# Outcome -> exit code, as the command's help has them.
CODES: dict[Outcome, int] = {Outcome.OPEN: 0, Outcome.NO_ANSWER: 1, Outcome.SHUT: 3, Outcome.NOT_ENOUGH: 4}
_FIRST = 3  # verdicts in a reason


def judge(run: Run) -> list[Verdict]:
    """Verdicts of a run: completions first, then operators. Raises UserError: the records contradict each other."""
    if run.training_steps:
        return judge_training(run)
    if run.mismatch_rollouts:
        return judge_mismatch(run)
    judge_completions = judge_axes if is_varied(run) else judge_served if is_endpoint(run) else judge_samples
    verdicts = judge_completions(run) + judge_rows([r for r in run.rows if not is_replay(r)])
    return [_of_vectors(v, [n for n in run.neighbours if n.impl == v.impl]) for v in verdicts]


def _of_vectors(verdict: Verdict, vectors: Sequence[Neighbours]) -> Verdict:
    if not vectors:
        return verdict
    worst, findings = max(vectors, key=lambda n: n.parted), verdict.findings
    if verdict.finding == Finding.CLEAN or not worst.parted:
        arms = len({n.arm for n in vectors})
        return replace(verdict, counts=(reason("vectors-alike", findings=findings, n=worst.texts, arms=arms),))
    figures = {"far": "cosine_distance", "top1": "top1_changed", "topk": "topk_changed"}
    most = {name: max(getattr(n, of) for n in vectors) for name, of in figures.items()}
    counts = reason("vectors", findings=findings, n=worst.parted, of=worst.texts, k=worst.k, **most)
    changes = Effect.NEIGHBOURS if most["top1"] or most["topk"] else Effect.VECTORS
    judged = [count for count in verdict.counts if count.code in ("rounding", "bug", "bug-data", "open")]
    return replace(verdict, counts=(*judged, counts), changes=changes)


def exit_code(run: Run, fail_on: str | None) -> tuple[int, str]:
    """The exit code under --fail-on, that of `answer`, and the line that explains why there is none ("" otherwise).
    Without --fail-on it is 1 where cases were run and none was measured: a script should not take that for an answer.
    Raises UserError: the records contradict each other."""
    if fail_on is not None:
        conclusion = next(iter([*run.diagnoses[-1:], *run.trace_verdicts[-1:]]), None)
        outcome, why = answer(run, judge(run), conclusion=conclusion)
        return CODES[outcome], words(reason("fail-on", option=fail_on, why=why)) * (outcome == Outcome.NO_ANSWER)
    every = run.statuses + [timed.status for cell in run.cells for timed in cell.timed]
    if not every or set(every) - {Status.ERROR, Status.SKIPPED}:
        return 0, ""
    return CODES[Outcome.NO_ANSWER], words(reason("unmeasured", n=len(every)))


def answer(
    run: Run, verdicts: Sequence[Verdict], drawn: Mapping[str, str] | None = None, conclusion: Conclusion | None = None
) -> tuple[Outcome, tuple[Reason, ...]]:
    """The decision of every gate, and why.

    It fails where something diverged that a user would want equal, or where a result is wrong, even if it is
    consistent. It has no answer where neither was seen and the run was killed, cases failed, or nothing was compared
    for a requested implementation. Sums that were taken in another order on purpose are not a divergence; a difference
    in `drawn`, from `unseeded`, is neither a fault nor an answer. A `conclusion` counts beside the verdicts.
    """
    drawn = drawn or {}
    faults = [v for v in verdicts if (v.is_fault if v.impl not in drawn else Finding.WRONG in v.findings)]
    of = {p: f", {subject_name(run.header.plan, p)}" for p in {v.prompt for v in verdicts} if p is not None}
    named = [(v.impl + (of[v.prompt] if v.prompt in of and len(of) > 1 else ""), v.clauses) for v in faults or verdicts]
    first = tuple(reason("verdict", impl=name, clauses=clauses) for name, clauses in named[:_FIRST])
    if faults:
        return Outcome.SHUT, (*first, *stated((len(faults) > _FIRST, reason("more", n=len(faults) - _FIRST))))
    if conclusion is not None and conclusion.is_fault:
        return Outcome.SHUT, ()
    why = _no_answer(run, verdicts, drawn, conclusion)
    return (Outcome.NO_ANSWER, (why,)) if why else (Outcome.OPEN, first)


def _no_answer(
    run: Run, verdicts: Sequence[Verdict], drawn: Mapping[str, str], conclusion: Conclusion | None
) -> Reason | None:
    if drawn:
        return reason("drawn", each=tuple(reason("unseeded", impl=i, evidence=why) for i, why in drawn.items()))
    if not run.complete:
        return reason("incomplete")
    if failed := run.statuses.count(Status.ERROR):
        return reason("cases", n=failed, what="failed")
    if conclusion is not None:
        return reason("inconclusive") if conclusion.is_fault is None else None
    if unproven := tuple(dict.fromkeys(v.impl for v in verdicts if v.finding == Finding.UNPROVEN)):
        return reason("axis-untested" if is_varied(run) else "load-unproven", impls=unproven)
    untested = [v for v in verdicts if v.finding == Finding.UNTESTED]
    # a backend that "stock" includes may be missing here; one that was requested by its own name is an untested stock
    impls = run.header.plan.get("impls")
    named = impls if isinstance(impls, list) else []
    missing = tuple(dict.fromkeys(v.impl for v in untested if v.role != Role.BACKEND or v.impl in named))
    if missing or len(untested) == len(verdicts):
        of = reason("of-impls", impls=missing) if missing and len(missing) < len(verdicts) else None
        return reason("not-compared", of=of)
    return None


class Power:
    """What was tried under one implementation without a divergence, and the rate that it was to detect with a
    confidence. Both are by load and by request: comparisons of one with the others. Loads are independent; the requests
    of one share its batches, so their figure holds only if they were independent, and its text says so. Stopping early
    is free while nothing diverged: see `one_sided_bound`. A sweep over chosen sizes has no power of this kind."""

    def __init__(self, impl: str, requests: int, loads: int, rate: float, confidence: float, by: str) -> None:
        self.impl, self.requests, self.loads = impl, requests, loads
        self.rate, self.confidence, self.by = rate, confidence, by
        self.needed = trials_to_see(rate, confidence)  # tries that would be enough, in the unit `by`
        self.enough = self.tries(by) >= self.needed

    def tries(self, by: str) -> int:
        """Tries by one unit."""
        return self.loads if by == "load" else self.requests

    def seen(self, by: str) -> float:
        """The chance that a divergence of this rate would have been seen: 1 - (1 - p)^n."""
        return -math.expm1(self.tries(by) * math.log1p(-self.rate))

    def bound(self, by: str) -> float:
        """The rate that is excluded with this confidence, 1 - (1 - c)^(1/n); 1.0 where nothing was tried."""
        tries = self.tries(by)
        return -math.expm1(math.log1p(-self.confidence) / tries) if tries else 1.0


def power_of(run: Run, impl: str, *, rate: float, confidence: float, by: str) -> Power | None:
    """The power of the completions under `impl`; None where there are none: a sweep has counts and no rate. Several
    prompts are one sample of requests: a divergence of any of them is one. The first completion of a prompt is the
    reference of the others, and so is its load. Completions that are not known to have run in different batches are no
    tries; of a server, those that are not known to have run concurrently with others."""
    if is_varied(run) or not any(c.impl == impl for c in run.completions):
        return None
    if is_endpoint(run):
        return Power(impl, *proven_tries(run, impl), rate, confidence, by)
    tried = [counts for counts in subjects(run) if counts.impl == impl and counts.varied]
    loads = {number for counts in tried for number in counts.rounds.keys() - {min(counts.rounds)}}
    return Power(impl, sum(counts.n - 1 for counts in tried), len(loads), rate, confidence, by)


@dataclass(frozen=True)
class Decision:
    """A gate's answer."""

    outcome: Outcome
    reasons: tuple[Reason, ...]  # why: where the gate passes or fails the first verdicts behind it
    verdicts: tuple[Verdict, ...]
    power: tuple[Power, ...]  # the power of each sampled implementation; empty for sweeps
    above: frozenset[str] | None = None  # implementations that are above a threshold; None where no threshold decided

    @property
    def code(self) -> int:
        """The exit code."""
        return CODES[self.outcome]

    @property
    def reason(self) -> str:
        """The reason, in a phrase without its full stop."""
        return phrase(self.reasons, brief=True)


def of_impls(run: Run, impls: Sequence[str]) -> Run:
    """The run without other implementations' records; all of it where none is named. Raises UnknownNameError."""
    if not impls:
        return run
    judged: list[Any] = [*run.rows, *run.completions, *run.training_steps, *run.mismatch_rollouts]
    names = {record.impl for record in judged}
    for impl in [impl for impl in impls if impl not in names]:
        raise UnknownNameError("implementation in this run", impl, names)
    every = {field: getattr(run, field) for field in RECORDS.values()}
    mine = {field: [r for r in rs if getattr(r, "impl", None) in (None, *impls)] for field, rs in every.items()}
    return msgspec.structs.replace(run, **mine)


def power_text(power: Power) -> str:
    """By both units: "a divergence in 1% of loads would have been seen with 95% (299 loads compared; ...)"."""
    clauses = []
    for by, independent in (("load", None), ("request", reason("if-independent"))):
        numbers = {
            "tries": power.tries(by),
            "seen": power.seen(by),
            "bound": power.bound(by),
            "independent": independent,
        }
        clauses.append(reason("power", by=by, rate=power.rate, confidence=power.confidence, **numbers))
    return phrase(clauses)


def decide(
    run: Run, *, impls: Sequence[str] = (), rate: float, confidence: float, by: str, given: bool = False,
    limits: Thresholds | None = None,
) -> Decision:  # fmt: skip
    """Judge a run as a gate does: those of `impls`, or all that it has. Raises UserError: its records contradict each
    other, or it has no sample or trainer and a power (see `Power`; `given`: requested) or threshold was requested.
    Thresholds decide instead of verdicts."""
    run = of_impls(run, impls)
    verdicts = tuple(judge(run))
    names = dict.fromkeys(c.impl for c in run.completions)
    power = tuple(p for name in names if (p := power_of(run, name, rate=rate, confidence=confidence, by=by)))
    if given and not power:
        what = f"{run.source or 'the run'} holds no sample: a sweep over chosen sizes has counts and no rate"
        raise UserError(what, "Leave --rate, --confidence and --by out, or gate a run of `nondet sample`.")
    if given_limits := {figure: limit for figure, limit in (limits or {}).items() if limit is not None}:
        return _by_thresholds(run, verdicts, given_limits)
    drawn = unseeded(run)
    outcome, reasons = answer(run, verdicts, drawn=drawn)
    if outcome == Outcome.OPEN and (short := [p for p in power if not p.enough]):
        share = {"by": by, "rate": rate, "confidence": confidence}
        outcome = Outcome.NOT_ENOUGH
        reasons = tuple(reason("not-enough", impl=p.impl, tries=p.tries(by), needed=p.needed, **share) for p in short)
    return Decision(outcome, reasons, verdicts, power)


def _by_thresholds(run: Run, verdicts: tuple[Verdict, ...], limits: Mapping[str, float]) -> Decision:
    """Raises UserError: the run compared no sampler with a trainer, or holds no figure with a threshold."""
    if not run.mismatch_rollouts and not run.training_steps:
        what = f"{run.source or 'the run'} compared no sampler with a trainer, which thresholds are of"
        raise UserError(what, "Gate a run of `nondet mismatch` or `nondet rl`, or leave thresholds (--k3 ...) out.")
    every = list(held(run, limits))
    above = frozenset(impl for impl, over, _ in every if over)
    reasons = tuple(why for _, over, why in every if over or not above)
    if above:
        return Decision(Outcome.SHUT, reasons, verdicts, (), above)
    if why := _no_answer(run, verdicts, {}, None) or (None if every else reason("incomplete")):
        return Decision(Outcome.NO_ANSWER, (why,), verdicts, ())
    return Decision(Outcome.OPEN, reasons, verdicts, ())
