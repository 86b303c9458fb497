"""Completions in markdown: all prompts together, then each with its counts, forks, curves and branches."""

from __future__ import annotations

from nondet.core.statistics import percent
from nondet.reports import figures
from nondet.reports.classmap import letter
from nondet.reports.content import RunSection, SampleSection
from nondet.reports.draw_samples import BranchView, branch_views
from nondet.reports.markdown_text import code, details, escape, fence, table
from nondet.reports.overall_text import comparison_lines, overall_table, prompt_table
from nondet.sampling.analysis import DEFINITION, HOST_NOTE, NAME, SampleSummary
from nondet.verdict.findings import plural

__all__ = ["overall_blocks", "sample_blocks"]

_BRANCHES_MOST = 12
_SURVIVAL_POINTS = 8
_PROMPTS_MOST = 100


def overall_blocks(section: RunSection) -> list[str]:
    """All prompts together, where there are several."""
    if not section.overall:
        return []
    rows = [(escape(name), *map(escape, cells)) for name, cells in overall_table(section.overall)]
    head, prompts, left = prompt_table(section.overall, _PROMPTS_MOST)
    more = [f"… and {plural(left, section.overall[0].unit)} that part less."] if left else []
    lines = comparison_lines(section.overall)
    return [
        f"### All {plural(len(section.samples), section.overall[0].unit)}",
        table(("", *(code(o.impl) for o in section.overall)), rows),
        *(["\n".join(f"- {escape(line)}" for line in lines)] if lines else []),
        details("One by one", [table(head, [tuple(map(escape, row)) for row in prompts]), *more]),
    ]


def sample_blocks(sample: SampleSection, several: bool) -> list[str]:
    """One prompt under every implementation."""
    title = f"### Completions of {sample.name}" if several else "### Completions"
    rows = [
        (name, *(escape(cell) for cell in cells))
        for name, cells in figures.sample_table(sample.summaries, sample.replays)
    ]
    blocks = [
        title,
        f"Prompt: {code(sample.prompt_text, cell=False)}",
        table(("", *(code(s.impl) for s in sample.summaries)), rows),
    ]
    if sample.speed is not None:
        against = code(sample.speed.baseline, cell=False)
        host = f" That is no cost: {HOST_NOTE}." if sample.speed.host_bound else ""
        ratio = f"{NAME.capitalize()} {sample.speed.ratio:.2f} against {against}.{host}"
        blocks.append(f"{ratio} {DEFINITION.capitalize()}.")
    if sample.families:
        blocks.append("One family of operators replaced at a time, under the same load plan:")
        blocks.append(_families(sample))
    blocks += [block for summary in sample.main for block in _fork(summary)]
    blocks += _survival(sample)
    return blocks + [_branches(s) for s in sample.main if s.distinct_completions > 1]


def _families(sample: SampleSection) -> str:
    rows = []
    for f in sample.families:
        distinct = f"{figures.counted(f.summary.distinct_completions)} of {figures.counted(f.summary.n)}"
        rows.append((code(f.family), distinct, figures.counted(f.summary.distinct_traces), f.result))
    return table(("replaced", "distinct completions", "distinct traces", "result"), rows)


def _fork(summary: SampleSummary) -> list[str]:
    fork = summary.first_fork
    if fork is None:
        return []
    rows = []
    for b in fork.branches:
        margin = "not recorded" if b.margin_min is None else figures.number(b.margin_min)
        median = "" if b.margin_median is None else f" / {figures.number(b.margin_median)}"
        rows.append((code(figures.token(b.text)), f"{b.count} of {summary.n}", margin + median, code(b.continuation)))
    named, before = code(summary.impl, cell=False), code(fork.before, cell=False)
    return [
        f"**First divergent token** of {named}: index {fork.index}, after {before}",
        table(("token", "completions", "top-1 − top-2 logit, min / median", "goes on"), rows),
    ]


def _survival(sample: SampleSection) -> list[str]:
    """Agreement at a few positions, for all implementations in one table."""
    drawn = [s for s in sample.main if len(s.survival) > 1]
    if not any(s.survival[-1] < 1 for s in drawn):
        return []
    length = max(len(s.survival) for s in drawn) - 1
    places = sorted({round(length * i / _SURVIVAL_POINTS) for i in range(_SURVIVAL_POINTS + 1)})
    rows = []
    for s in drawn:
        shares = [percent(s.survival[p]) if p < len(s.survival) else "–" for p in places]
        rows.append((f"{code(s.impl)} (n = {s.n})", *shares))
    return ["Share that agrees with the commonest completion, by tokens:", table(("tokens", *map(str, places)), rows)]


def _branches(summary: SampleSummary) -> str:
    views = branch_views(summary)
    blocks: list[str] = []
    for view in views[:_BRANCHES_MOST]:
        blocks += [f"**{letter(view.label)}**, {view.count} of {summary.n}{_parts(view)}", fence(_marked(view))]
    if len(views) > _BRANCHES_MOST:
        blocks.append(f"… and {len(views) - _BRANCHES_MOST} rarer ones.")
    title = f"{plural(len(views), 'branch', 'branches')} of {escape(summary.impl)}, the first different token in ⟦ ⟧"
    return details(title, blocks)


def _parts(view: BranchView) -> str:
    return "" if view.parts_at is None else f", token {view.parts_at}"


def _marked(view: BranchView) -> str:
    if view.ends:
        return f"{view.before}⟦ends here⟧"
    return f"{view.before}⟦{figures.visible(view.token)}⟧{view.after}" if view.token else view.before + view.after
