"""One verdict for each implementation of a run, what it had the power to see, and what a gate and its exit code
decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from nondet.core.records import RECORDS, Role, Run, Status
from nondet.core.statistics import percent, trials_to_see
from nondet.errors import UnknownNameError, UserError
from nondet.verdict.findings import Finding, Verdict, batch_evidence, plural
from nondet.verdict.rows import judge_rows
from nondet.verdict.samples import is_replay, is_varied, judge_axes, judge_samples, sample_counts
from nondet.verdict.served import is_endpoint, judge_served, proven_tries, unseeded

_OK, _NO_ANSWER, _FAULT = 0, 1, 3


def judge(run: Run) -> list[Verdict]:
    """The verdicts that every report of the run gives: completions first, then operators.

    Raises:
        UserError: the records contradict each other.
    """
    judge_completions = judge_axes if is_varied(run) else judge_served if is_endpoint(run) else judge_samples
    sampled = judge_completions(run)
    return sampled + judge_rows([r for r in run.rows if not is_replay(r)])


def exit_code(run: Run, fail_on: str | None) -> tuple[int, str]:
    """The code to end with under --fail-on, and the line that says why the question has no answer ("" otherwise).

    With "divergent": 3 where something diverged that a user would want equal, or where a result is wrong, however
    identical. 1 where neither was seen and the question has no answer: the run was killed, cases failed, or nothing was
    compared for an implementation that was asked for. A gate must not open on that. Without --fail-on 1 where cases
    were asked and not one of them was measured. 0 otherwise.
    Sums that were taken in another order on purpose are no divergence.

    Raises:
        UserError: the records contradict each other.
    """
    if fail_on is None:
        return _unmeasured(run)
    verdicts = judge(run)
    if any(verdict.is_fault for verdict in verdicts):
        return _FAULT, ""
    if not run.complete:
        return _NO_ANSWER, f"--fail-on {fail_on} can't be answered: the run did not come to its end."
    failed = sum(r.status == Status.ERROR for r in run.rows) + sum(c.status != "ok" for c in run.completions)
    if failed:
        return _NO_ANSWER, f"--fail-on {fail_on} can't be answered: {plural(failed, 'case')} failed."
    unproven = list(dict.fromkeys(v.impl for v in verdicts if v.finding == Finding.UNPROVEN))
    if unproven:
        names = ", ".join(unproven)
        why = f"under {names} an axis was not tested" if is_varied(run) else f"the load of {names} is unproven"
        return _NO_ANSWER, f"--fail-on {fail_on} can't be answered: {why}."
    untested = [v.impl for v in verdicts if v.finding == Finding.UNTESTED]
    # a backend that "stock" stands for may be missing here; one that was asked for by its own name is an untested stock
    missing = [impl for impl in dict.fromkeys(untested) if _asked_for(run, impl, verdicts)]
    if missing or all(v.finding == Finding.UNTESTED for v in verdicts):
        of = f" for {', '.join(missing)}" if missing and len(missing) < len(verdicts) else ""
        return _NO_ANSWER, f"--fail-on {fail_on} can't be answered: nothing was compared{of}."
    return _OK, ""


def _unmeasured(run: Run) -> tuple[int, str]:
    """1 and a line for a run whose every case failed or was skipped: a script should not take it for an answer."""
    asked = len(run.rows) + len(run.completions) + sum(len(cell.timed) for cell in run.cells)
    measured = (
        any(row.measured for row in run.rows)
        or any(completion.status == "ok" for completion in run.completions)
        or any(timed.status == Status.TIMED for cell in run.cells for timed in cell.timed)
    )
    if measured or not asked:
        return _OK, ""
    return (
        _NO_ANSWER,
        f"nothing was measured: {plural(asked, 'case')} failed or {'was' if asked == 1 else 'were'} skipped.",
    )


def _asked_for(run: Run, impl: str, verdicts: list[Verdict]) -> bool:
    """Whether it is no backend that came along with stock."""
    verdict = next(v for v in verdicts if v.impl == impl)
    named = run.header.plan.get("impls")
    return verdict.role != Role.BACKEND or (isinstance(named, list) and impl in named)


# What a run without a divergence would have seen: its power, by request and by load.
#
# Tries are independent where they are drawn so. Loads are; the requests of one load share its batches, so a figure by
# request holds only if requests were independent, and says so. Stopping early is free while nothing diverged: a rate p
# is excluded wrongly only if nothing was hit in the first n tries, n the fewest that exclude it, which has a chance of
# at most 1 - confidence. A sweep over chosen sizes is no sample, and has no power of this kind.

BY = ("load", "request")


@dataclass(frozen=True)
class Power:
    """What was tried under one implementation, held against what was asked.

    Attributes:
        requests: Comparisons of one request with the others; loads: of one load with the others.
        rate, confidence: A rate that ought to have been seen, and how surely; both between 0 and 1.
        by: What the rate is of, "load" or "request".
    """

    impl: str
    requests: int
    loads: int
    rate: float
    confidence: float
    by: str

    def tries(self, by: str) -> int:
        """Tries by one unit."""
        return self.loads if by == "load" else self.requests

    def seen(self, by: str) -> float:
        """The chance that a divergence of the rate asked about would have been seen: 1 - (1 - p)^n."""
        return -math.expm1(self.tries(by) * math.log1p(-self.rate))

    def bound(self, by: str) -> float:
        """The rate that is excluded with the confidence asked for, 1 - (1 - c)^(1/n); 1.0 where nothing was tried."""
        tries = self.tries(by)
        return -math.expm1(math.log1p(-self.confidence) / tries) if tries else 1.0

    @property
    def needed(self) -> int:
        """Tries by the unit asked for that would be enough."""
        return trials_to_see(self.rate, self.confidence)

    @property
    def enough(self) -> bool:
        """Whether what was tried is enough."""
        return self.tries(self.by) >= self.needed


def power_of(run: Run, impl: str, *, rate: float, confidence: float, by: str) -> Power | None:
    """What the completions under `impl` would have seen; None where there are none: a sweep has counts and no rate.

    Several prompts are one sample of requests: a divergence of any of them is one. The first completion of a prompt is
    what the others are held against, and so is its load. Completions that are not known to have met different batches
    are no try at all; of a server, those that are not known to have run beside others.
    """
    prompts = sorted({c.prompt for c in run.completions if c.impl == impl})
    if not prompts or is_varied(run):
        return None
    if is_endpoint(run):
        return Power(impl, *proven_tries(run, impl), rate, confidence, by)
    requests = 0
    loads: set[int] = set()
    for prompt in prompts:
        counts = sample_counts(run, impl, prompt)
        if not counts.n or not batch_evidence(run, impl, prompt).varied:
            continue  # equal batches, or none on record: agreement says nothing of batches
        requests += counts.n - 1
        loads |= counts.traces.keys() - {min(counts.traces)}
    return Power(impl, requests, len(loads), rate, confidence, by)


class Outcome(StrEnum):
    """What a gate may end with."""

    OPEN = "open"
    SHUT = "shut"
    NO_ANSWER = "no answer"
    NOT_ENOUGH = "not enough"


# Outcome -> exit code, as the command's help has them.
CODES: dict[Outcome, int] = {Outcome.OPEN: 0, Outcome.NO_ANSWER: 1, Outcome.SHUT: 3, Outcome.NOT_ENOUGH: 4}


@dataclass(frozen=True)
class Decision:
    """A gate's answer.

    Attributes:
        reason: Why, in a phrase without its full stop.
        power: What each sampled implementation would have shown; empty for sweeps.
    """

    outcome: Outcome
    reason: str
    verdicts: tuple[Verdict, ...]
    power: tuple[Power, ...]

    @property
    def code(self) -> int:
        """The exit code."""
        return CODES[self.outcome]


def of_impls(run: Run, impls: Sequence[str]) -> Run:
    """The run without other implementations' records; all of it where none is named.

    Raises:
        UnknownNameError: it holds nothing of that name.
    """
    if not impls:
        return run
    names = {getattr(r, "impl", "") for r in (*run.rows, *run.completions)}
    for impl in impls:
        if impl not in names:
            raise UnknownNameError("implementation in this run", impl, names - {""})
    kept = {
        field: [r for r in getattr(run, field) if getattr(r, "impl", None) in (None, *impls)]
        for field in RECORDS.values()
    }
    return msgspec.structs.replace(run, **kept)


def power_text(power: Power) -> str:
    """ "would have seen a divergence in 1% of loads with 95%: 299 loads tried", by both units."""
    parts = [
        f"a divergence in {percent(power.rate)} of {by}s would have been seen with {percent(power.seen(by), 'down')} "
        f"({plural(power.tries(by), by)} compared; below {percent(power.bound(by), 'up')} at "
        f"{percent(power.confidence)}{'' if by == 'load' else ', if requests were independent'})"
        for by in ("load", "request")
    ]
    return "; ".join(parts)


def decide(
    run: Run, *, impls: Sequence[str] = (), rate: float, confidence: float, by: str, asked: bool = False
) -> Decision:
    """Judge a run as a gate does.

    Args:
        impls: Those that must hold; none: all that the run has.
        rate, confidence, by: The power that a sample must have: see `Power`.
        asked: Whether somebody asked for that power, so that a run without a sample can't be enough.

    Raises:
        UserError: the run has no sample, and a power was asked for; or its records contradict each other.
    """
    run = of_impls(run, impls)
    verdicts = tuple(judge(run))
    names = list(dict.fromkeys(c.impl for c in run.completions))
    power = tuple(p for name in names if (p := power_of(run, name, rate=rate, confidence=confidence, by=by)))
    if asked and not power:
        raise UserError(
            f"{run.source or 'the run'} holds no sample: a sweep over chosen sizes has counts, and no rate",
            "Leave --rate, --confidence and --by out, or gate a run of `nondet sample`.",
        )
    drawn = unseeded(run)
    faults = [v for v in verdicts if v.is_fault and (v.impl not in drawn or Finding.WRONG in v.findings)]
    code, line = exit_code(run, "divergent")
    if faults:
        text = "; ".join(f"{v.impl}: {v.brief or v.text}" for v in faults[:3])
        more = f"; and {plural(len(faults) - 3, 'more verdict')}" if len(faults) > 3 else ""
        return Decision(Outcome.SHUT, text + more, verdicts, power)
    if drawn:
        text = "; ".join(f"{impl}: nothing shows that it keeps to a seed ({why})" for impl, why in drawn.items())
        return Decision(Outcome.NO_ANSWER, f"tokens were drawn, and {text}", verdicts, power)
    if code:
        reason = line.replace("--fail-on divergent can't be answered: ", "").rstrip(".") or "nothing was measured"
        return Decision(Outcome.NO_ANSWER, reason, verdicts, power)
    short = [p for p in power if not p.enough]
    if short:
        text = "; ".join(
            f"{p.impl}: {plural(p.tries(by), f'{by} was', f'{by}s were')} compared, and {p.needed:,} are needed to see "
            f"a divergence in {percent(rate)} of {by}s with {percent(confidence)}"
            for p in short
        )
        return Decision(Outcome.NOT_ENOUGH, text, verdicts, power)
    reason = "; ".join(f"{v.impl}: {v.brief or v.text}" for v in verdicts[:3])
    return Decision(Outcome.OPEN, reason, verdicts, power)
