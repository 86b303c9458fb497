"""The verdicts: what a run shows, in words that claim no more than it shows. Pure logic over rows and summaries.

What may be said:
  * Divergence while the same call was repeated is run-to-run nondeterminism.
  * Divergence while the batch changed is batch dependence, unless the same operator also parts from run to run: then
    one can't be told from the other, and the stronger word is left out.
  * Divergence while the order of a reduction was changed on purpose is neither: it is what floating-point does.
  * No divergence is never called deterministic: it is an observation of n trials, with the rate that they exclude.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nondet.reports.intervals import one_sided_bound, percent
from nondet.result import Row, Status

__all__ = ["DEMONSTRATIONS", "Axis", "Finding", "Verdict", "axis_of", "judge_rows", "parted", "plural", "sort_impls"]


class Axis(StrEnum):
    """What kind of thing varied between the variants of a row."""

    RUN = "run"
    BATCH = "batch"
    ORDER = "order"
    OTHER = "other"


# `Row.varied` -> the kind. What is not listed is called by its name: bits depend on length, say.
_AXES: dict[str, Axis] = {
    "run": Axis.RUN,
    "batch_size": Axis.BATCH,
    "position": Axis.BATCH,
    "query_chunk": Axis.BATCH,
    "routing": Axis.BATCH,  # which experts the other tokens go to
    "cache": Axis.BATCH,
    "load": Axis.BATCH,
    "prompt_length": Axis.BATCH,  # more tokens of the same prompt ride along
    "split": Axis.ORDER,
    "order": Axis.ORDER,
}
# Operators that a probe builds itself to show a cause. What they do is no verdict on what a library runs by default.
DEMONSTRATIONS = {"float_sum", "split_k"}
# Inputs whose every partial sum is exact: there all orders must agree, and what parts is a bug.
_EXACT_INPUTS = {"integers", "ones"}


class Finding(StrEnum):
    """What was found of one implementation, in the words of the report."""

    RUN_TO_RUN = "run-to-run nondeterministic"
    BATCH = "batch-dependent"
    UNATTRIBUTED = "divergent"
    OTHER = "dependent on what was varied"
    ORDER = "dependent on the order of reduction"
    CLEAN = "no divergence observed"
    UNTESTED = "nothing compared"

    @property
    def is_divergence(self) -> bool:
        """Whether bits parted that a user would want equal."""
        return self in (Finding.RUN_TO_RUN, Finding.BATCH, Finding.UNATTRIBUTED, Finding.OTHER)


@dataclass(frozen=True)
class Verdict:
    """What a run shows of one implementation.

    Attributes:
        finding: The strongest one.
        text: The verdict in a phrase that follows "impl: ".
        notes: Whole sentences: what the verdict does not cover.
        prompt: Index of the prompt, for a sampled run.
        others: Further findings, in other cases.
    """

    impl: str
    finding: Finding
    text: str
    notes: tuple[str, ...] = ()
    prompt: int | None = None
    others: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them, the strongest first."""
        return (self.finding, *self.others)


def axis_of(row: Row) -> Axis:
    """The kind of what varied.

    Other orders of reduction may give other bits, so parting there is no fault; but it is one where the order can't
    matter (every partial sum is exact), and where the implementation claims that how the work is split doesn't.
    """
    axis = _AXES.get(row.varied, Axis.OTHER)
    if axis == Axis.ORDER and (row.impl.startswith("invariant") or (parted(row) and row.inputs in _EXACT_INPUTS)):
        return Axis.OTHER
    return axis


def parted(row: Row) -> bool:
    """Whether the variants of a row fell into more than one class. Count and status are both believed."""
    return row.distinct > 1 or row.status == Status.DIVERGENT


def _compared(row: Row) -> bool:
    """Whether the row compares anything: a single variant has nothing to differ from."""
    return row.status not in (Status.SKIPPED, Status.ERROR) and (row.trials > 1 or parted(row))


def plural(count: int, noun: str, many: str = "") -> str:
    """ "1 case", "2,000 cases"."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def sort_impls(names: Iterable[str]) -> list[str]:
    """Stock, its backends, invariant, its partial forms, then others as they came; each once."""

    def rank(name: str) -> int:
        if name in ("stock", "invariant"):
            return 2 * (name == "invariant")
        return 1 if name.startswith("stock-") else 3 if name.startswith(("invariant-", "invariant:")) else 4

    return sorted(dict.fromkeys(names), key=rank)


def judge_rows(rows: Sequence[Row]) -> list[Verdict]:
    """One verdict for each implementation that the rows ask about."""
    return [_judge_all(name, [r for r in rows if r.impl == name]) for name in sort_impls(r.impl for r in rows)]


def _judge_all(impl: str, rows: list[Row]) -> Verdict:
    """Demonstrations apart from the rest, unless there is nothing else or the implementation claims to be invariant."""
    shown = [] if impl.startswith("invariant") else [r for r in rows if r.operator in DEMONSTRATIONS]
    if not shown or len(shown) == len(rows):
        return _judge_impl(impl, rows)
    verdict = _judge_impl(impl, [r for r in rows if r.operator not in DEMONSTRATIONS])
    apart = _judge_impl(impl, shown)
    operators = ", ".join(sorted({r.operator for r in shown}))
    note = f"Built by the probe to show a cause, and no part of this verdict ({operators}): {apart.text}."
    return replace(verdict, notes=(*verdict.notes, note))


def _judge_impl(impl: str, rows: list[Row]) -> Verdict:
    usable = [r for r in rows if _compared(r)]
    left_out = _left_out(rows)
    if not usable:
        return Verdict(impl, Finding.UNTESTED, f"nothing was compared in {plural(len(rows), 'case')}", left_out)
    unsteady = {_family(r) for r in usable if _parted_from_run_to_run(r)}
    on = {axis: [r for r in usable if axis_of(r) == axis] for axis in Axis}
    # where results change from run to run anyway, a sweep over anything else shows nothing of its own
    steady = {axis: [r for r in on[axis] if _family(r) not in unsteady] for axis in Axis}
    phrases: list[tuple[Finding, str]] = []
    if unsteady:
        phrases.append(
            (
                Finding.RUN_TO_RUN,
                f"{Finding.RUN_TO_RUN} in {_where([r for r in usable if _repeated(r)], _parted_from_run_to_run)}",
            )
        )
    if any(parted(r) for r in steady[Axis.BATCH]):
        phrases.append((Finding.BATCH, f"{Finding.BATCH} in {_where(steady[Axis.BATCH])}"))
    for varied in dict.fromkeys(r.varied for r in steady[Axis.OTHER] if parted(r)):
        tried = [r for r in steady[Axis.OTHER] if r.varied == varied]
        # "class": compared with the anchor of a numerics class, by `nondet certify`
        what = "left its numerics class" if varied == "class" else f"bits depend on {varied.replace('_', ' ')}"
        phrases.append((Finding.OTHER, f"{what} in {_where(tried)}"))
    notes = (*_row_notes(on, steady), *left_out)
    if phrases:
        found = list(dict.fromkeys(finding for finding, _ in phrases))
        return Verdict(impl, found[0], "; ".join(text for _, text in phrases), notes, others=tuple(found[1:]))
    clean = [r for axis in (Axis.RUN, Axis.BATCH, Axis.OTHER) for r in on[axis]]
    if clean:
        return Verdict(impl, Finding.CLEAN, _clean_rows(clean), notes)
    if any(parted(r) for r in on[Axis.ORDER]):
        text = f"{Finding.ORDER} in {_where(on[Axis.ORDER])}: floating-point at work, and no fault"
        return Verdict(impl, Finding.ORDER, text, notes[1:])
    return Verdict(impl, Finding.CLEAN, f"{_clean_rows(on[Axis.ORDER])} while the order of reduction changed", notes)


def _left_out(rows: Sequence[Row]) -> tuple[str, ...]:
    """What the verdict rests on nothing of, and what weakens it."""
    failed, skipped = (sum(r.status == status for r in rows) for status in (Status.ERROR, Status.SKIPPED))
    wrong = sum(r.extra.get("exact") is False for r in rows)
    warned = sum(bool(r.reason) for r in rows) - sum(
        bool(r.reason) for r in rows if r.status in (Status.ERROR, Status.SKIPPED)
    )
    parts = [
        text
        for count, text in (
            (failed, f"{plural(failed, 'case')} failed"),
            (skipped, f"{plural(skipped, 'case')} skipped"),
        )
        if count
    ]
    notes = [f"{' and '.join(parts)}: in no other figure."] if parts else []
    if wrong:
        notes.append(f"{plural(wrong, 'case')} missed an answer that is exact in every order: a bug, not rounding.")
    if warned:
        notes.append(f"{plural(warned, 'case carries', 'cases carry')} a note, listed below.")
    return tuple(notes)


def _repeated(row: Row) -> bool:
    """Whether the row computed anything twice."""
    return axis_of(row) == Axis.RUN or row.replays > 0


def _parted_from_run_to_run(row: Row) -> bool:
    """Whether a repetition of the same call came out otherwise."""
    return row.replays_parted > 0 or (axis_of(row) == Axis.RUN and parted(row))


def _family(row: Row) -> tuple[str, str, str]:
    """Rows that share kernels closely enough for run-to-run nondeterminism in one to cast doubt on the others."""
    return (row.operator, row.dtype, row.device)


def _where(tried: Sequence[Row], found: Callable[[Row], bool] = parted) -> str:
    """ "5 of 12 cases (linear 3 of 4, attention 2 of 8)": the operators that parted."""
    hit, all_of = Counter(r.operator for r in tried if found(r)), Counter(r.operator for r in tried)
    if len(all_of) == 1:
        return f"{sum(hit.values())} of {plural(len(tried), 'case')} ({next(iter(all_of))})"
    named = ", ".join(f"{op} {count} of {all_of[op]}" for op, count in hit.most_common(6))
    more = f", and {plural(len(hit) - 6, 'more operator')}" if len(hit) > 6 else ""
    return f"{sum(hit.values())} of {plural(len(tried), 'case')} ({named}{more})"


def _clean_rows(rows: Sequence[Row]) -> str:
    """The counts and the bound, which is on the rate averaged over the cases.

    The first variant of a case is what the others are compared with, so it adds a trial and no comparison.
    """
    trials, comparisons = sum(r.trials for r in rows), sum(r.trials - 1 for r in rows)
    bound = percent(one_sided_bound(comparisons), "up")
    return (
        f"{Finding.CLEAN} in {plural(trials, 'trial')} of {plural(len(rows), 'case')} "
        f"({plural(comparisons, 'comparison')}: rate below {bound} at 95%, one-sided)"
    )


def _row_notes(on: dict[Axis, list[Row]], steady: dict[Axis, list[Row]]) -> tuple[str, ...]:
    """What the rows of one implementation do not show, as sentences."""
    notes = []
    if any(parted(r) for r in steady[Axis.ORDER]):
        notes.append(
            f"Another order of reduction, taken on purpose, gave other bits in {_where(steady[Axis.ORDER])}: "
            "that is floating-point at work, and no fault."
        )
    unsteady = {_family(r) for rows in on.values() for r in rows if _parted_from_run_to_run(r)}
    swept = [r for axis in (Axis.BATCH, Axis.OTHER, Axis.ORDER) for r in on[axis]]
    mixed = [r for r in swept if _family(r) in unsteady and parted(r)]
    if mixed:
        operators = ", ".join(sorted({r.operator for r in mixed}))
        notes.append(
            f"{plural(len(mixed), 'sweep')} of {operators} parted too, whose results change from run to run: "
            "whether what was swept matters there can't be told."
        )
    if not on[Axis.BATCH] and on[Axis.RUN]:
        notes.append("The batch was not varied: this says nothing about batch dependence.")
    dependent = {_family(r) for r in steady[Axis.BATCH] if parted(r)}
    tried = {_family(r) for rows in on.values() for r in rows if _repeated(r)}
    untried = sorted({family[0] for family in dependent - tried})
    if untried:
        notes.append(f"Run to run was not tried for {', '.join(untried)}, so it is not ruled out as the cause there.")
    return tuple(notes)
