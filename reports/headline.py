"""One sentence for a whole run, and the list of what was measured badly or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nondet.bench.summary import failures, sections
from nondet.core.records import Role, Row, Run, Status, families_of, role_of
from nondet.reports.bench_text import bench_headline
from nondet.reports.embed_text import embed_headline
from nondet.reports.story import story_headline
from nondet.reports.trace_text import trace_headline
from nondet.sampling.analysis import SampleSummary, guilty
from nondet.verdict.findings import Finding, Verdict, plural, sort_impls, subject_unit

__all__ = ["FamilyTest", "Problem", "family_tests", "headline", "problems"]


@dataclass(frozen=True)
class Problem:
    """A case or request that gave no figure, or gave one that needs a warning.

    Attributes:
        kind: "failed", "skipped", "wrong" or "note".
        count: Rows or requests that it stands for.
    """

    kind: str
    name: str
    reason: str
    count: int = 1


_HEADLINE_MOST = 5  # of several that agree, more are counted and told below


@dataclass(frozen=True)
class FamilyTest:
    """What remained when one family of operators alone was replaced."""

    family: str
    summary: SampleSummary
    removed: bool

    @property
    def result(self) -> str:
        """What it says of the family."""
        if self.removed:
            return "replacing it alone removed every divergence seen"
        return "divergence remains" if self.summary.distinct_traces > 1 else "too few completions to tell"


def headline(run: Run, verdicts: Sequence[Verdict]) -> str:
    """The finding in one sentence, without its full stop."""
    prefix = "" if run.complete else "incomplete run, so far: "
    if run.cells:
        return prefix + bench_headline(sections(run))
    if run.neighbours and verdicts:
        return prefix + embed_headline(run, verdicts)
    if story_headline(run) or trace_headline(run):
        return prefix + (story_headline(run) or trace_headline(run))
    if not run.rows and not run.completions:
        return f"{prefix}nothing was measured"
    if not verdicts:
        return f"{prefix}nothing was compared"
    shown = _worth_a_headline(verdicts)
    if len({v.prompt for v in verdicts if v.prompt is not None}) > 1:
        text = "; ".join(
            _over_prompts(impl, [v for v in shown if v.impl == impl], subject_unit(run.header.plan))
            for impl in sort_impls(v.impl for v in shown)
        )
    else:
        named = [v for v in shown if v.finding != Finding.CLEAN or v.role in (Role.STOCK, Role.INVARIANT)]
        if len(shown) <= _HEADLINE_MOST or not named:
            named = shown
        text = "; ".join(f"{v.impl}: {v.brief or v.text}" for v in named)
        if len(named) < len(shown):
            text += f"; {plural(len(shown) - len(named), 'other')}: no divergence observed"
    return prefix + text


def _worth_a_headline(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The completions' verdicts, where there are any: operators compared beside them are told below.

    Without partial replacements, which have a table, and sums in another order, which are no finding.
    """
    sampled = [v for v in verdicts if v.prompt is not None]
    main = [v for v in sampled or verdicts if v.role != Role.PART and v.finding != Finding.ORDER]
    return [v for v in main if not _said_by_stock(v, main)] or sampled or list(verdicts)


def _said_by_stock(verdict: Verdict, verdicts: Sequence[Verdict]) -> bool:
    """Whether it is of one of stock's backends and finds nothing that stock's own verdict does not."""
    stock = next((v for v in verdicts if v.role == Role.STOCK), None)
    if stock is None or verdict.role != Role.BACKEND or verdict.impl == "stock-seeded":  # another draw, no backend
        return False
    return not verdict.is_fault or set(verdict.findings) <= set(stock.findings)


def _over_prompts(impl: str, verdicts: Sequence[Verdict], unit: str) -> str:
    """Several prompts: how many of them, under each finding."""
    parts = []
    for finding in Finding:
        hit = sum(v.finding == finding for v in verdicts)
        if hit:
            parts.append(f"{finding} on {hit} of {plural(len(verdicts), unit)}")
    return f"{impl}: {', '.join(parts)}"


def problems(run: Run) -> list[Problem]:
    """Every failed, skipped and wrong row by name, every note, and the failed requests by reason."""
    kinds = {Status.ERROR: "failed", Status.SKIPPED: "skipped", Status.WRONG: "wrong"}
    listed = [
        Problem(kind, _row_name(r), r.reason or "no reason recorded")
        for status, kind in kinds.items()
        for r in run.rows
        if r.status == status
    ]
    failed: dict[tuple[str, str], int] = {}
    for c in run.completions:
        if c.status != "ok":
            key = (c.impl, c.reason or "no reason recorded")
            failed[key] = failed.get(key, 0) + 1
    listed += [
        Problem("failed", f"{plural(count, 'request')} ({impl})", reason, count)
        for (impl, reason), count in failed.items()
    ]
    listed += [Problem(kinds[status], which, reason) for status, which, reason in failures(sections(run))]
    noted = [r for r in run.rows if r.reason and r.status not in kinds]
    return listed + [Problem("note", _row_name(r), r.reason) for r in noted]


def _row_name(row: Row) -> str:
    return f"{row.probe}: {row.case}, {row.dtype}, {row.impl}"


def family_tests(summaries: Sequence[SampleSummary]) -> list[FamilyTest]:
    """What replacing one family at a time left of one prompt's divergence; empty unless stock diverged."""
    if not any(role_of(s.impl) == Role.STOCK and s.distinct_traces > 1 for s in summaries):
        return []
    removing = guilty(summaries)
    named = [(families_of(s.impl), s) for s in summaries if role_of(s.impl) == Role.PART]
    return [FamilyTest(family, summary, family in removing) for family, summary in named]
