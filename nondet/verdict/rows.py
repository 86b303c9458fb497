"""Verdicts on rows: what variants that ought to agree show, in words that claim no more than they show.

What may be said:
  * A result that is no answer to the question (another shape or dtype, an error beyond the bound, NaN where the oracle
    is finite, inputs written to) is wrong, whether its variants agree or not.
  * Divergence while the same call was repeated is run-to-run nondeterminism.
  * Divergence while the batch changed is batch dependence, unless the same operator also parts from run to run: then
    one can't be told from the other. Where nothing was repeated, it is divergence and no more.
  * Divergence while the order of a reduction was changed on purpose is neither: it is what floating-point does.
  * No divergence is never called deterministic. A sweep over chosen sizes is no sample of anything, so it gives counts
    and no rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nondet.core.records import Axis, Row, Status
from nondet.verdict.findings import Finding, Verdict, plural, sort_impls

__all__ = ["axis_of", "judge_rows"]

_OPERATORS_MOST = 6  # named in a phrase; more are counted
_RANGES_MOST = 24  # of sizes, the same


@dataclass(frozen=True)
class _Phrase:
    """A finding with its count of cases: in full, with the operators behind it, and in brief, for a headline."""

    finding: Finding
    text: str
    brief: str


def axis_of(row: Row) -> Axis:
    """The kind of what varied, as it counts for the verdict.

    Other orders of reduction may give other bits, so parting there is no fault; but it is one where the order can't
    matter (every partial sum is exact), and where the implementation claims that how the work is split doesn't.
    """
    axis = Axis(row.axis) if row.axis in set(Axis) else Axis.OTHER
    if axis == Axis.ORDER and (row.claims_invariance or (row.parted and row.exact)):
        return Axis.OTHER
    return axis


def judge_rows(rows: Sequence[Row]) -> list[Verdict]:
    """One verdict for each implementation that the rows ask about."""
    return [_judge_all(name, [r for r in rows if r.impl == name]) for name in sort_impls(r.impl for r in rows)]


def _judge_all(impl: str, rows: list[Row]) -> Verdict:
    """Demonstrations apart from the rest, unless there is nothing else or the implementation claims to be invariant."""
    apart = [r for r in rows if r.demonstration and not r.claims_invariance and not r.wrong]
    if not apart or len(apart) == len(rows):
        return _judge_impl(impl, rows)
    verdict = _judge_impl(impl, [r for r in rows if r not in apart])
    shown = _judge_impl(impl, apart)
    operators = ", ".join(sorted({r.operator for r in apart}))
    note = f"Built by the probe to show a cause, and no part of this verdict ({operators}): {shown.text}."
    return replace(verdict, notes=(*verdict.notes, note))


def _judge_impl(impl: str, rows: list[Row]) -> Verdict:
    usable = [r for r in rows if _compared(r)]
    left_out = _left_out(rows)
    phrases: list[_Phrase] = []
    if any(r.wrong for r in rows):
        measured = [r for r in rows if r.measured]
        phrases.append(_counted(Finding.WRONG, Finding.WRONG, measured, lambda r: r.wrong))
    if not usable and not phrases:
        return Verdict(impl, Finding.UNTESTED, f"nothing was compared in {plural(len(rows), 'case')}", left_out)
    unsteady = {_family(r) for r in usable if _parted_from_run_to_run(r)}
    on = {axis: [r for r in usable if axis_of(r) == axis] for axis in Axis}
    # where results change from run to run anyway, a sweep over anything else shows nothing of its own
    steady = {axis: [r for r in on[axis] if _family(r) not in unsteady] for axis in Axis}
    phrases += _divergences(usable, steady)
    notes = (*_row_notes(on, steady), *left_out)
    if phrases:
        first, *others = dict.fromkeys(p.finding for p in phrases)
        text, brief = ("; ".join(texts) for texts in zip(*((p.text, p.brief) for p in phrases), strict=True))
        return Verdict(impl, first, text, notes, others=tuple(others), brief=brief)
    clean = [r for axis in (Axis.RUN, Axis.BATCH, Axis.OTHER) for r in on[axis]]
    if clean:
        phrase = _clean_rows(clean)
        return Verdict(impl, Finding.CLEAN, phrase.text, notes, brief=phrase.brief)
    if any(r.parted for r in on[Axis.ORDER]):
        phrase = _counted(Finding.ORDER, Finding.ORDER, on[Axis.ORDER])
        fault = ": floating-point at work, and no fault"
        return Verdict(impl, Finding.ORDER, phrase.text + fault, notes[1:], brief=phrase.brief + fault)
    phrase, how = _clean_rows(on[Axis.ORDER]), " while the order of reduction changed"
    return Verdict(impl, Finding.CLEAN, phrase.text + how, notes, brief=phrase.brief + how)


def _divergences(usable: list[Row], steady: dict[Axis, list[Row]]) -> list[_Phrase]:
    """What parted, and what it may be blamed on."""
    phrases = []
    if any(_parted_from_run_to_run(r) for r in usable):
        repeated = [r for r in usable if _repeated(r)]
        phrases.append(_counted(Finding.RUN_TO_RUN, Finding.RUN_TO_RUN, repeated, _parted_from_run_to_run))
    tried = {_family(r) for r in usable if _repeated(r)}
    for finding, rows in (
        (Finding.BATCH, [r for r in steady[Axis.BATCH] if _family(r) in tried]),
        (Finding.UNATTRIBUTED, [r for r in steady[Axis.BATCH] if _family(r) not in tried]),
    ):
        if any(r.parted for r in rows):
            phrases.append(_counted(finding, finding, rows))
    for varied in dict.fromkeys(r.varied for r in steady[Axis.OTHER] if r.parted):
        # "class": compared with the anchor of a numerics class, by `nondet certify`
        what = "left its numerics class" if varied == "class" else f"bits depend on {varied.replace('_', ' ')}"
        rows = [r for r in steady[Axis.OTHER] if r.varied == varied]
        phrases.append(_counted(Finding.OTHER, what, rows))
    return phrases


def _compared(row: Row) -> bool:
    """Whether the row compares anything: a single variant has nothing to differ from."""
    return row.measured and (row.trials > 1 or row.parted)


def _left_out(rows: Sequence[Row]) -> tuple[str, ...]:
    """What the verdict rests on nothing of, and what weakens it."""
    counts = {
        "failed": sum(r.status == Status.ERROR for r in rows),
        "skipped": sum(r.status == Status.SKIPPED for r in rows),
    }
    parts = [f"{plural(count, 'case')} {what}" for what, count in counts.items() if count]
    notes = [f"{' and '.join(parts)}: in no other figure."] if parts else []
    nonfinite = sum(r.nonfinite > 0 and not r.wrong for r in rows)
    if nonfinite:
        cases = plural(nonfinite, "case gave", "cases gave")
        notes.append(f"{cases} NaN or infinity, which agree with themselves whatever was computed.")
    noted = sum(bool(r.reason) for r in rows if r.measured)
    if noted:
        notes.append(f"{plural(noted, 'case carries', 'cases carry')} a note, listed below.")
    return tuple(notes)


def _repeated(row: Row) -> bool:
    """Whether the row computed anything twice."""
    return axis_of(row) == Axis.RUN or row.replays > 0


def _parted_from_run_to_run(row: Row) -> bool:
    """Whether a repetition of the same call came out otherwise."""
    return row.replays_parted > 0 or (axis_of(row) == Axis.RUN and row.parted)


def _family(row: Row) -> tuple[str, str, str]:
    """Rows that share kernels closely enough for run-to-run nondeterminism in one to cast doubt on the others."""
    return (row.operator, row.dtype, row.device)


def _counted(
    finding: Finding, what: str, tried: Sequence[Row], is_hit: Callable[[Row], bool] = lambda row: row.parted
) -> _Phrase:
    """ "what in 5 of 12 cases", in full with the operators that were hit."""
    return _Phrase(finding, f"{what} in {_where(tried, is_hit)}", f"{what} in {_where(tried, is_hit, most=0)}")


def _where(
    tried: Sequence[Row], is_hit: Callable[[Row], bool] = lambda row: row.parted, most: int = _OPERATORS_MOST
) -> str:
    """ "5 of 12 cases (linear 3 of 4, attention 2 of 8)"; of several operators up to `most` are named."""
    hit, tried_of = Counter(r.operator for r in tried if is_hit(r)), Counter(r.operator for r in tried)
    count = f"{sum(hit.values())} of {plural(len(tried), 'case')}"
    if len(tried_of) == 1:
        return f"{count} ({next(iter(tried_of))})"
    if not most:
        return count
    named = ", ".join(f"{operator} {n} of {tried_of[operator]}" for operator, n in hit.most_common(most))
    more = f", and {plural(len(hit) - most, 'more operator')}" if len(hit) > most else ""
    return f"{count} ({named}{more})"


def _clean_rows(rows: Sequence[Row]) -> _Phrase:
    """Counts of what was compared and what was tried: chosen sizes are no sample, so there is no rate to bound.

    The first variant of a case is what the others are compared with, so it adds a trial and no comparison.
    """
    trials, comparisons = sum(r.trials for r in rows), sum(r.trials - 1 for r in rows)
    brief = f"{Finding.CLEAN} in {plural(trials, 'trial')} of {plural(len(rows), 'case')}"
    compared = f"0 of {plural(comparisons, 'comparison')} differed"
    varied = ", ".join(dict.fromkeys(r.varied.replace("_", " ") for r in rows))
    operators = list(dict.fromkeys(r.operator for r in rows))
    more = f" and {len(operators) - _OPERATORS_MOST} more" if len(operators) > _OPERATORS_MOST else ""
    tried = f"tried: {varied}, of {', '.join(operators[:_OPERATORS_MOST])}{more}{_sizes(rows)}"
    return _Phrase(Finding.CLEAN, f"{brief} ({compared}; {tried})", f"{brief} ({compared})")


def _sizes(rows: Sequence[Row]) -> str:
    """ "; batch sizes in one case or another: 1-17, 24, 31-33", in ranges of sizes that follow each other."""
    sizes = sorted({v for r in rows if r.varied == "batch_size" for v in r.values if isinstance(v, int)})
    starts = [v for v in sizes if v - 1 not in sizes]
    ends = [v for v in sizes if v + 1 not in sizes]
    ranges = [f"{a}-{b}" if a < b else str(a) for a, b in zip(starts, ends, strict=True)]
    hidden = f" and {len(ranges) - _RANGES_MOST} more up to {sizes[-1]}" if len(ranges) > _RANGES_MOST else ""
    return f"; batch sizes in one case or another: {', '.join(ranges[:_RANGES_MOST])}{hidden}" if ranges else ""


def _row_notes(on: dict[Axis, list[Row]], steady: dict[Axis, list[Row]]) -> tuple[str, ...]:
    """What the rows of one implementation do not show, as sentences."""
    notes = []
    if any(r.parted for r in steady[Axis.ORDER]):
        notes.append(
            f"Another order of reduction, taken on purpose, gave other bits in {_where(steady[Axis.ORDER])}: "
            "that is floating-point at work, and no fault."
        )
    unsteady = {_family(r) for rows in on.values() for r in rows if _parted_from_run_to_run(r)}
    swept = [r for axis in (Axis.BATCH, Axis.OTHER, Axis.ORDER) for r in on[axis]]
    mixed = [r for r in swept if _family(r) in unsteady and r.parted]
    if mixed:
        operators = ", ".join(sorted({r.operator for r in mixed}))
        notes.append(
            f"{plural(len(mixed), 'sweep')} of {operators} parted too, whose results change from run to run: "
            "whether what was swept matters there can't be told."
        )
    if not on[Axis.BATCH] and on[Axis.RUN]:
        notes.append("The batch was not varied: this says nothing about batch dependence.")
    dependent = {_family(r) for r in steady[Axis.BATCH] if r.parted}
    tried = {_family(r) for rows in on.values() for r in rows if _repeated(r)}
    untried = sorted({family[0] for family in dependent - tried})
    if untried:
        notes.append(f"No call of {', '.join(untried)} was repeated: batch or run may be the cause there.")
    return tuple(notes)
