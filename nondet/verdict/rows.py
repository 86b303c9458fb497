"""Verdicts on rows: what variants that ought to agree show, in words that claim no more than they show.

* A result that does not answer the question (another shape or dtype, an error beyond the bound, NaN where the oracle
  is finite, inputs written to) is wrong, whether its variants agree or not.
* Divergence while the same call was repeated is run-to-run nondeterminism.
* Divergence while the batch changed is batch dependence, unless the same operator also differs from run to run: then
  the two can't be told apart. Where nothing was repeated, it is divergence and no more.
* Divergence while the order of a reduction was changed on purpose is neither: floating-point sums depend on order.
* No divergence is never called deterministic. A sweep over chosen sizes gives counts and no rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nondet.core.records import Axis, Judged, Row, Status
from nondet.verdict.findings import Finding, Verdict, sort_impls
from nondet.verdict.wording import LOOKS, Reason, reason, stated

_WHOLE = ("check", "embed")  # probes whose first row has the finding for all of them
_COUNTED = 1e6  # a larger share of a scale is a NaN, an infinity, or beyond counting


def axis_of(row: Row) -> Axis:
    """The kind of what varied, as it counts for the verdict.

    Other orders of reduction may give other bits, so a difference there is not a fault; but it is one where the order
    can't matter (every partial sum is exact), and where the implementation claims that how the work is split doesn't.
    """
    must_agree = row.claims_invariance or (row.differs and row.exact)
    return Axis.OTHER if row.axis == Axis.ORDER and must_agree else Axis(row.axis)


def judge_rows(rows: Sequence[Row]) -> list[Verdict]:
    """One verdict for each implementation in the rows."""
    return [_judge_all(name, [r for r in rows if r.impl == name]) for name in sort_impls(r.impl for r in rows)]


def _judge_all(impl: str, rows: list[Row]) -> Verdict:
    """Demonstrations are judged only where there is nothing else or the implementation claims to be invariant."""
    apart = [r for r in rows if r.demonstration and not r.claims_invariance and not r.wrong]
    if len(apart) in (0, len(rows)):
        return _judge_impl(impl, rows)
    verdict = _judge_impl(impl, [r for r in rows if r not in apart])
    operators = tuple(sorted({r.operator for r in apart}))
    built = reason("built", operators=operators, shown=_judge_impl(impl, apart).counts)
    return replace(verdict, reasons=(*verdict.reasons, built))


def _judge_impl(impl: str, rows: list[Row]) -> Verdict:
    usable = [r for r in rows if r.measured and (r.trials > 1 or r.differs)]  # one variant has nothing to differ from
    unsteady = {_family(r) for r in usable if _differs_again(r)}
    tried = {_family(r) for r in usable if _repeated(r)}
    on = {axis: [r for r in usable if axis_of(r) == axis] for axis in Axis}
    # where results change from run to run anyway, a sweep over anything else shows nothing by itself
    steady = {axis: [r for r in on[axis] if _family(r) not in unsteady] for axis in Axis}
    table = (
        (Finding.WRONG, _cases([r for r in rows if r.measured or r.wrong], lambda r: r.wrong)),
        (Finding.RUN_TO_RUN, _cases([r for r in usable if _repeated(r)], _differs_again)),
        (Finding.BATCH, _cases([r for r in steady[Axis.BATCH] if _family(r) in tried])),
        (Finding.UNATTRIBUTED, _cases([r for r in steady[Axis.BATCH] if _family(r) not in tried])),
    )
    found = [(f, reason("rows", finding=f, hits=hits)) for f, hits in table if any(was_hit for _, was_hit in hits)]
    for varied in dict.fromkeys(r.varied for r in steady[Axis.OTHER] if r.differs):
        # "class": compared with the reference kernel of a numerics class, by `nondet certify`
        hits = _cases([r for r in steady[Axis.OTHER] if r.varied == varied])
        code = "rows-class" if varied == "class" else "rows-depend"
        found.append((Finding.OTHER, reason(code, varied=varied.replace("_", " "), hits=hits)))
    if not usable and not found:
        return Verdict(impl, (Finding.UNTESTED,), (reason("rows-none", n=len(rows)),), tuple(_left_out(rows)))
    reasons = (*_reasons(usable, on, steady, unsteady), *_left_out(rows))
    if found:
        said = (*_judged(usable), *(c for _, c in found), *_of_cases(usable), *_elements(usable))
        return Verdict(impl, tuple(dict.fromkeys(finding for finding, _ in found)), said, reasons)
    clean = [r for axis in (Axis.RUN, Axis.BATCH, Axis.OTHER) for r in on[axis]]
    if clean:
        return Verdict(impl, (Finding.CLEAN,), (_clean_rows(clean), *_elements(usable)), reasons)
    if any(r.differs for r in on[Axis.ORDER]):  # its own count already says the first reason
        counts = reason("rows", finding=Finding.ORDER, hits=_cases(on[Axis.ORDER]))
        return Verdict(impl, (Finding.ORDER,), (counts, reason("no-fault")), reasons[1:])
    return Verdict(impl, (Finding.CLEAN,), (_clean_rows(on[Axis.ORDER]), reason("order-changed")), reasons)


def _judged(rows: Sequence[Row]) -> list[Reason]:
    """Rounding or not, where a row has it."""
    made = []
    for found in (row.judged for row in rows if isinstance(row.judged, Judged) and row.probe in _WHOLE):
        far, look = _far(found), LOOKS.get(found.look, "")
        numbers = {"bound": found.bound or 0.0, "dtype": found.dtype, "look": look, "far": far}
        numbers["expected"] = None if found.bound is None else reason("expected", **numbers)
        code = {"rounding": "rounding", "bug": "bug", "open": "open"}[found.kind]
        data = code == "bug" and found.look in ("leak", "leak-factor", "nan")
        made.append(reason("bug-data" if data else code, **numbers))
    return made


def _far(found: Judged) -> str:
    of = "its integers" if found.dtype.startswith(("int", "uint", "bool")) else "the scale"
    return f"up to {found.far:.2g} of {of}" if found.far < _COUNTED else "NaN, infinity or numbers far beyond the scale"


def _of_cases(rows: Sequence[Row]) -> list[Reason]:
    """Rounding or not, of a probe's cases that differ or are wrong; nothing of run files that do not have it."""
    cases = [(r.judged, r) for r in rows if isinstance(r.judged, Judged) and r.probe not in _WHOLE]
    bugs = [(found, row) for found, row in cases if found.kind == "bug"]
    shares = [found.far / (found.bound or 1.0) for found, _ in cases if found.kind == "rounding"]
    left = sum(r.differs or r.wrong for r in rows) - len(shares) - len(bugs)
    numbers = {"n": len(shares), "left": left, "share": max(shares, default=0.0)}
    if bugs:
        found, row = max(bugs, key=lambda pair: pair[0].far)
        where = f"{row.operator} over {row.varied.replace('_', ' ')} in {row.dtype}"
        return [reason("cases-bug", bugs=len(bugs), where=where, far=_far(found), **numbers)]
    return [reason("cases-some" if left else "cases-rounding", **numbers)] if cases else []


def _elements(rows: Sequence[Row]) -> list[Reason]:
    """How many elements were compared, where a row has their number."""
    few = {False: None, True: reason("elements-few")}
    return [
        reason("elements", n=n, dtype=row.dtype, few=few["needed" in row.extra])
        for row in rows
        if row.probe == "check" and isinstance(n := row.extra.get("elements"), int)
    ]


def _cases(rows: Sequence[Row], hit: Callable[[Row], bool] = lambda r: r.differs) -> tuple[tuple[str, bool], ...]:
    """The operator of each case, "" where it only repeats the function's name, and whether it is a hit."""
    return tuple((r.operator if r.operator != r.impl else "", hit(r)) for r in rows)


def _left_out(rows: Sequence[Row]) -> list[Reason]:
    absent = [(sum(r.status == s for r in rows), w) for s, w in ((Status.ERROR, "failed"), (Status.SKIPPED, "skipped"))]
    cases = tuple(reason("cases", n=n, what=what) for n, what in absent if n)
    nonfinite = sum(r.nonfinite > 0 and not r.wrong for r in rows)
    noted = sum(bool(r.reason) for r in rows if r.measured)
    return stated(
        (cases, reason("left-out", cases=cases)),
        (nonfinite, reason("rows-nonfinite", n=nonfinite)),
        (noted, reason("rows-noted", n=noted)),
    )


def _repeated(row: Row) -> bool:
    return axis_of(row) == Axis.RUN or row.replays > 0 or row.replays_parted > 0


def _differs_again(row: Row) -> bool:
    return row.replays_parted > 0 or (axis_of(row) == Axis.RUN and row.differs)


def _family(row: Row) -> tuple[str, str, str]:
    """Rows that share kernels closely enough for run-to-run nondeterminism in one to cast doubt on the others."""
    return (row.operator, row.dtype, row.device)


def _clean_rows(rows: Sequence[Row]) -> Reason:
    """Counts of what was compared and tried: chosen sizes are not a sample, so no rate can be bounded. The first
    variant of a case is what the others are compared with, so it adds a trial but no comparison."""
    tried = {
        "varied": list(dict.fromkeys(r.varied.replace("_", " ") for r in rows)),
        "operators": list(dict.fromkeys(r.operator for r in rows)),
        "sizes": sorted({v for r in rows if r.varied == "batch_size" for v in r.values if isinstance(v, int)}),
    }
    trials = sum(r.trials for r in rows)
    counts = {"trials": trials, "n": len(rows), "comparisons": trials - len(rows)}
    return reason("rows-clean", finding=Finding.CLEAN, tried=tried, **counts)


def _reasons(
    usable: list[Row], on: dict[Axis, list[Row]], steady: dict[Axis, list[Row]], unsteady: set[tuple[str, str, str]]
) -> list[Reason]:
    """What the rows of one implementation do not show; other orders of reduction come first."""
    mixed = [r for r in usable if axis_of(r) != Axis.RUN and _family(r) in unsteady and r.differs]
    operators = tuple(sorted({r.operator for r in mixed}))
    dependent = {_family(r) for r in steady[Axis.BATCH] if r.differs}
    untried = tuple(sorted({operator for operator, *_ in dependent - {_family(r) for r in usable if _repeated(r)}}))
    return stated(
        (any(r.differs for r in steady[Axis.ORDER]), reason("order", hits=_cases(steady[Axis.ORDER]))),
        (mixed, reason("unsteady", n=len(mixed), operators=operators)),
        (not on[Axis.BATCH] and on[Axis.RUN], reason("batch-not-varied")),
        (untried, reason("not-repeated", operators=untried)),
    )
