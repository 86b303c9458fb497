"""Runs to markdown that reads well in a pull request: headline, small tables, details for what is long.

Untrusted text is only ever printed as a code span, inside a fence, or with its ASCII punctuation as character
references: there it can't open a link, a mention, a table cell or a tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nondet.bench.summary import Section
from nondet.reports import bench_text, figures
from nondet.reports.classmap import letter, map_text
from nondet.reports.content import CaseGroup, ProbeSection, Report, RunSection, SampleSection, build
from nondet.reports.draw_samples import BranchView, branch_views
from nondet.reports.story import Story
from nondet.result import Row, Run
from nondet.sampling.summary import SampleSummary
from nondet.statistics import percent
from nondet.text import one_line, printable
from nondet.verdict import Verdict, plural

__all__ = ["code", "escape", "fence", "render", "render_report"]

_BRANCHES_MOST = 12
_SURVIVAL_POINTS = 8
# All but what starts nothing in markdown, or only at the start of a line, where escaped text never stands.
_HARMFUL = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[^A-Za-z0-9\s.,:;()=+%/_-]")
_WORD_JOINER = "&#8288;"


def render(runs: list[Run]) -> str:
    """The document.

    Raises:
        UserError: a sampled run's side file is missing, malformed or another run's.
    """
    return render_report(build(runs))


def render_report(report: Report) -> str:
    """The document of what was gathered already: blocks, with a blank line between any two."""
    blocks = [block for section in report.runs for block in _run(section)] + _speeds(report)
    return "\n\n".join(blocks or ["No run was given."]) + "\n"


def escape(text: str, limit: int = 2000) -> str:
    """Text on one line in which nothing is markup, link or mention.

    GitHub looks for mentions and references in the rendered text, where a character reference is the character
    itself: a word joiner after @ and # keeps them from being taken for one.
    """

    def reference(match: re.Match[str]) -> str:
        char = match.group()
        if not char.isascii():
            return char
        return f"&#{ord(char)};" + (_WORD_JOINER if char in "@#" else "")

    plain = _HARMFUL.sub(reference, one_line(text, limit))
    return re.sub(r"(?i)(www)\.", r"\1&#46;", plain.replace(":/", "&#58;/"))


def code(text: str, limit: int = 400, *, cell: bool = True) -> str:
    """A code span on one line. In a table cell a pipe must be escaped even inside it."""
    flat = one_line(text, limit) or " "
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", flat)), default=0))
    pad = " " if flat.startswith(("`", " ")) or flat.endswith(("`", " ")) else ""
    span = f"{ticks}{pad}{flat}{pad}{ticks}"
    return span.replace("|", "\\|") if cell else span


def fence(text: str) -> str:
    """A fenced block that nothing in the text can end."""
    shown = printable(text)
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", shown)), default=0))
    return f"{ticks}text\n{shown}\n{ticks}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def _details(summary: str, blocks: Sequence[str]) -> str:
    return "\n\n".join([f"<details><summary>{summary}</summary>", *blocks, "</details>"])


def _run(section: RunSection) -> list[str]:
    blocks = [f"## {escape(figures.sentence(section.headline))}"]
    if not section.run.complete:
        blocks.append("**This run did not come to its end.** Every count is of what was measured so far.")
    environment = section.run.header.environment
    blocks.append(f"{code(section.name, cell=False)} · {escape(section.facts)}")
    blocks.append(escape(figures.environment_line(environment)) or "No environment was recorded.")
    if section.verdicts:
        blocks.append("\n".join(_verdict(v, len(section.samples) > 1) for v in section.verdicts))
    if section.story:
        blocks += _story(section.story)
    for block in section.traced:
        blocks += [f"### {escape(block.title)}", "\n".join(f"- {escape(line)}" for line in block.lines)]
        if block.details:
            blocks.append(_details("details", ["\n".join(f"- {escape(line)}" for line in block.details)]))
    if section.bench:
        blocks.append(escape(bench_text.limits_text(section.run.limits)))
        blocks.append(escape(bench_text.method_text(section.bench)))
    for bench in section.bench:
        blocks += _bench(bench)
    for sample in section.samples:
        blocks += _sample(sample, several=len(section.samples) > 1)
    for probe in section.probes:
        blocks += _probe(probe)
    if section.problems:
        rows = [(p.kind, code(p.name), code(p.reason)) for p in section.problems]
        title = escape(section.counts or plural(len(rows), "note"))
        blocks.append(_details(title, [_table(("what", "which", "why"), rows)]))
    facts = [(escape(name), code(value)) for name, value in figures.environment_rows(environment)]
    options = [(escape(name), code(value)) for name, value in figures.environment_rows(section.run.header.plan)]
    tables = [_table(("environment", "value"), facts), _table(("option", "value"), options)]
    return [*blocks, _details("Environment and options", tables)]


def _story(told: Story) -> list[str]:
    """The answers, the steps, what was varied."""
    blocks = ["### The verdict", "\n".join(f"- **{label}.** {escape(text, 6000)}" for label, text in told.answers)]
    steps = [(escape(question), f"**{escape(outcome)}**", escape(text, 6000)) for question, outcome, text in told.steps]
    blocks += ["### Step by step", _table(("question", "answer", "evidence"), steps)]
    if told.axes:
        rows = [[escape(cell) for cell in row] for row in told.axes]
        blocks += ["### One thing varied at a time, against the request alone", _table(told.AXES_HEAD, rows)]
    if told.limits:
        blocks.append(_details("What this does not say", ["\n".join(f"- {escape(line)}" for line in told.limits)]))
    return blocks


def _verdict(verdict: Verdict, several: bool) -> str:
    """An item with the findings in bold, and a sub-item for each note."""
    text = escape(figures.sentence(verdict.text))
    for finding in verdict.findings:
        text = text.replace(finding.value, f"**{finding.value}**", 1)
    which = f" (prompt {verdict.prompt + 1})" if several and verdict.prompt is not None else ""
    lines = [f"- {code(verdict.impl, cell=False)}{which}: {text}", *(f"  - {escape(note)}" for note in verdict.notes)]
    return "\n".join(lines)


def _probe(probe: ProbeSection) -> list[str]:
    blocks = [f"### {escape(probe.name)}", escape(figures.sentence(probe.summary))]
    if probe.parted:
        blocks.append(_figures_table(probe.parted))
        blocks.append(_details("Class maps", [block for case in probe.parted for block in _maps(case)]))
    if probe.clean:
        title = f"{plural(len(probe.clean), 'case')} in which nothing parted"
        blocks.append(_details(title, [_figures_table(probe.clean)]))
    return blocks


def _maps(case: CaseGroup) -> list[str]:
    """One line for each implementation: `M 1-3: A | 4-64: B (nvjet_splitK)`."""
    lines = []
    for row in case.measured:
        lines.append(f"- {code(row.impl, cell=False)}: {code(map_text(row) or 'no values listed', 1500, cell=False)}")
    lines += [f"- {code(impl, cell=False)}: {escape(text)}" for impl, text in figures.extras(case.measured)]
    return [f"**{escape(case.head.case)}**, {escape(case.head.dtype)}", "\n".join(lines)]


_FIGURES = ("case", "impl", "result", "classes / trials", "differing", "max abs", "max ULP", "first", "relative error")


def _figures_table(cases: Sequence[CaseGroup]) -> str:
    return _table(_FIGURES, [_figures_row(row) for case in cases for row in case.rows])


def _figures_row(row: Row) -> tuple[str, ...]:
    d = row.difference
    trials = f"{figures.counted(row.distinct)} / {figures.counted(row.trials)}" if row.trials else "–"
    if figures.run_rate(row):
        trials += f"; {escape(figures.run_rate(row))}"
    apart = (figures.difference_text(d), figures.number(d.max_abs), figures.counted(d.max_ulp)) if d else ("–",) * 3
    first = figures.first_mismatch(d)
    status = escape(row.status) if row.status == "identical" else f"**{escape(row.status)}**"
    case = f"{escape(row.case)}, {escape(row.dtype)}"
    return (case, code(row.impl), status, trials, *apart, escape(first), figures.error_span(row))


def _bench(section: Section) -> list[str]:
    """The means in sentences, then a row for each cell."""
    lines = [f"- {code(s.impl, cell=False)}: {escape(bench_text.summary_text(s, section))}." for s in section.summaries]
    lines += [f"- {code(b.impl, cell=False)}: {escape(bench_text.bits_text(b, section))}." for b in section.bits]
    rows = [
        (
            escape(r.cell),
            escape(r.stock),
            code(r.impl),
            escape(r.time),
            f"**{r.ratio}**" if r.slow else r.ratio,
            escape(r.interval) + (" (noise)" if r.noise else ""),
            escape(r.share),
            code(r.kernel or r.reason or "–", 120),
        )
        for r in bench_text.table_rows(section)
    ]
    head = ("cell", "best stock, µs", "impl", "µs", "ratio", "95%", "of the limit", "ran")
    return [
        f"### {escape(section.name)}, {escape(section.dtype)}",
        *(["\n".join(lines)] if lines else []),
        _details(plural(len(section.cells), "cell"), [_table(head, rows)]),
    ]


def _speeds(report: Report) -> list[str]:
    """Tokens per second by load, where there are several."""
    if not report.speeds:
        return []
    rows = [
        (
            code(s.run),
            escape(s.load),
            code(s.baseline),
            f"{s.stock:.0f}",
            f"{s.invariant:.0f}",
            f"{s.ratio:.2f}",
            f"{s.distinct} of {s.completions}",
        )
        for s in report.speeds
    ]
    head = (
        "run",
        "load",
        "stock that ran",
        "stock, tokens/s",
        "invariant, tokens/s",
        "ratio",
        "distinct completions, invariant",
    )
    return ["## End to end, by load", _table(head, rows)]


def _sample(sample: SampleSection, several: bool) -> list[str]:
    title = f"### Completions of prompt {sample.prompt + 1}" if several else "### Completions"
    rows = [
        (name, *(escape(cell) for cell in cells))
        for name, cells in figures.sample_table(sample.summaries, sample.replays)
    ]
    blocks = [
        title,
        f"Prompt: {code(sample.prompt_text, cell=False)}",
        _table(("", *(code(s.impl) for s in sample.summaries)), rows),
    ]
    if sample.speed_ratio is not None and sample.best_stock is not None:
        ratio, against = f"{sample.speed_ratio:.2f}", code(sample.best_stock.impl, cell=False)
        blocks.append(f"Invariant runs at {ratio} times the speed of {against} (tokens/s, one measurement each).")
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
    return _table(("replaced", "distinct completions", "distinct traces", "result"), rows)


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
        _table(("token", "completions", "top-1 − top-2 logit, min / median", "goes on"), rows),
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
    return ["Share that agrees with the commonest completion, by tokens:", _table(("tokens", *map(str, places)), rows)]


def _branches(summary: SampleSummary) -> str:
    views = branch_views(summary)
    blocks: list[str] = []
    for view in views[:_BRANCHES_MOST]:
        blocks += [f"**{letter(view.label)}**, {view.count} of {summary.n}{_parts(view)}", fence(_marked(view))]
    if len(views) > _BRANCHES_MOST:
        blocks.append(f"… and {len(views) - _BRANCHES_MOST} rarer ones.")
    title = f"{plural(len(views), 'branch', 'branches')} of {escape(summary.impl)}, the first different token in ⟦ ⟧"
    return _details(title, blocks)


def _parts(view: BranchView) -> str:
    return "" if view.parts_at is None else f", token {view.parts_at}"


def _marked(view: BranchView) -> str:
    if view.ends:
        return f"{view.before}⟦ends here⟧"
    return f"{view.before}⟦{figures.visible(view.token)}⟧{view.after}" if view.token else view.before + view.after
