"""What rows of a certification say, in plain words. Pure logic over rows: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nondet.core.records import ErrorFigures, Row, Status

__all__ = ["Finding", "exclusions", "findings", "suspicion", "tried", "unanswered", "where"]

_LISTED = 12  # exclusions shown for each member and pattern; the run file has all of them

_TAILS = (128, 64, 32, 16, 8, 4, 2)


def suspicion(
    axis: str,
    asked: Sequence[int | str],
    left: Sequence[int | str],
    *,
    alike: bool,
    error: ErrorFigures | None = None,
    of: ErrorFigures | None = None,
) -> str:
    """Where a member parted from the anchor, and what that pattern usually means.

    Args:
        axis: "M", or "form" for named variants.
        asked: The variants that ran, in order.
        left: Those that gave other bits; not empty.
        alike: The member's own bits do not depend on the variant.
        error: Of the member against float64.
        of: Of the anchor, on the same inputs.
    """
    said = _pattern(axis, asked, left, alike)
    lesser = _lesser(error, of)
    return f"{said}; {lesser}" if lesser else said


def _pattern(axis: str, asked: Sequence[int | str], left: Sequence[int | str], alike: bool) -> str:
    every, at = list(asked), list(left)
    if len(at) == len(every):
        what = f"differs at every {axis} tried"
        if alike:
            return f"{what}, and by itself gives one result at all of them: another order, whatever the batch"
        return f"{what}, and not alike at all of them: another order, and one that depends on the batch"
    if axis != "M":
        kept = [str(v) for v in every if v not in at]
        return f"differs for {', '.join(map(str, at))}; not for {', '.join(kept)}"
    if at == [1]:
        return "differs only at M = 1: a matrix-vector kernel with an order of its own, it seems"
    if at == every[: len(at)]:
        return f"differs at M <= {at[-1]}, not from {every[len(at)]} on: another kernel for small batches, it seems"
    if at == every[-len(at) :]:
        return f"differs from M = {at[0]} on: another kernel for large batches (split-K, another tile), it seems"
    for tail in _TAILS:
        if set(at) == {m for m in every if isinstance(m, int) and m % tail}:
            return f"differs only where M is no multiple of {tail}: tails are handled in another order, it seems"
    return f"differs at M = {where(at)} of those tried: a choice made by M that touches the order, it seems"


def _lesser(error: ErrorFigures | None, of: ErrorFigures | None) -> str:
    """An accumulator of less precision shows as a larger error; another order alone does not."""
    if error is None or of is None or of.relative_norm is None:
        return ""
    if error.relative_norm is None:
        return "results overflow where the anchor's do not: an accumulator of less range, it seems"
    if error.relative_norm > 2 * of.relative_norm:
        return (
            f"its relative error is {error.relative_norm:.1e} against the anchor's {of.relative_norm:.1e}: an "
            "accumulator of less precision, it seems"
        )
    return ""


def plural(cases: int) -> str:
    """ "1 case", "2 cases"."""
    return f"{cases} case" if cases == 1 else f"{cases} cases"


def where(values: Sequence[int | str]) -> str:
    """ "1, 2, 3, 8 and 12 more"."""
    shown = ", ".join(map(str, values[:8]))
    return shown if len(values) <= 8 else f"{shown} and {len(values) - 8} more"


@dataclass
class Finding:
    """What all rows of one member say about one class, operator and dtype.

    Attributes:
        questions: Rows with an answer.
        variants: Answers compared with the anchor's.
        elements: Finite elements compared.
        left: Rows in which the member left its class.
        unanswered: Rows with variants that were not answered: refused, or failed.
    """

    cls: str
    operator: str
    dtype: str
    member: str
    questions: int = 0
    variants: int = 0
    elements: int = 0
    left: list[Row] = field(default_factory=list)
    unanswered: list[Row] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """In a phrase."""
        if not self.questions:
            failed = any(r.status == Status.ERROR for r in self.unanswered)
            return "failed: nothing is proven" if failed else "not applicable here: nothing is proven"
        if any(r.replays_parted for r in self.left):
            return "not in the class: nondeterministic from run to run"
        if not self.left:
            return "in the class, where it ran" if self.unanswered else "in the class"
        out = sum(len(r.extra.get("left_at", [])) for r in self.left)
        if out >= self.variants:
            return "not in the class"
        return f"in the class, but for {out} of {self.variants}: excluded there"


def findings(rows: Sequence[Row]) -> list[Finding]:
    """One for each class, operator, dtype and member, in the order of the rows."""
    found: dict[tuple[str, str, str, str], Finding] = {}
    for row in rows:
        at = (str(row.extra.get("class", "")), row.operator, row.dtype, row.impl)
        one = found.setdefault(at, Finding(*at))
        if row.status in (Status.ERROR, Status.SKIPPED) or row.extra.get("unanswered_at"):
            one.unanswered.append(row)
        if row.status in (Status.ERROR, Status.SKIPPED):
            continue
        one.questions += 1
        one.variants += row.trials - 1
        one.elements += int(row.extra.get("elements", 0))
        if row.status == Status.DIVERGENT:
            one.left.append(row)
    return list(found.values())


def exclusions(found: Sequence[Finding]) -> Iterator[str]:
    """For each member and pattern of parting: where, what it suggests, and the first differing element."""
    for one in found:
        alike: dict[str, list[Row]] = {}
        for row in one.left:
            alike.setdefault(row.reason or "the same call again gives other bits", []).append(row)
        for reason, rows in alike.items():
            yield f"\n{one.member} leaves {one.cls} ({one.operator} {one.dtype}): {reason}"
            for row in rows[:_LISTED]:
                what = row.case.removeprefix(f"{one.cls} {one.operator} ")
                yield f"  {what}: excluded at {_axis(row)} {where(row.extra.get('left_at', []))}{_first(row)}"
            if len(rows) > _LISTED:
                yield f"  and {len(rows) - _LISTED} more (see the run file)"


def _axis(row: Row) -> str:
    return "M =" if all(isinstance(v, int) for v in row.values[1:]) else "form"


def _first(row: Row) -> str:
    first = row.extra.get("first")
    if first is None:
        return ""
    return (
        f"; first: {_axis(row)} {first['at']}, element {first['element']} on {first['inputs']!r} inputs, "
        f"up to {first['max_ulp']:,} ULP"
    )


def unanswered(found: Sequence[Finding]) -> Iterator[str]:
    """For each member the questions that it did not answer, and why: nothing is proven there."""
    for one in found:
        reasons = dict.fromkeys(row.reason for row in one.unanswered)
        if reasons:
            what = f"{one.member} ({one.cls} {one.operator} {one.dtype})"
            said = "; ".join(list(reasons)[:3])
            yield f"\n{what} gave no answer, or not to all, in {plural(len(one.unanswered))}: {said}"


def tried(rows: Sequence[Row], found: Sequence[Finding]) -> Iterator[str]:
    """What a clean verdict rests on, in counts: chosen sizes and inputs are no sample, so no rate follows from them."""
    clean = [one.elements for one in found if one.questions and not one.left]
    asked = len({(row.case, row.dtype) for row in rows})
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.extra.get("inputs", [])))
    text = f"\nTried: {asked} shapes and layouts, each over batches (attention: ways to cut a prompt), on inputs "
    text += f"{', '.join(kinds)}."
    if clean:
        text += f" Where nothing differed, {min(clean):,} elements or more were compared."
        text += " Other shapes, settings and machines are not covered."
    yield text
