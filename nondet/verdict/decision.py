"""What a gate decides on a run: open, shut, or not to be said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from nondet.core.records import RECORDS, Run
from nondet.core.statistics import percent
from nondet.errors import UnknownNameError, UserError
from nondet.verdict.findings import Finding, Verdict, plural
from nondet.verdict.gate import exit_code, judge
from nondet.verdict.power import Power, power_of
from nondet.verdict.served_notes import unseeded

__all__ = ["CODES", "Decision", "Outcome", "decide", "of_impls", "power_text"]


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
