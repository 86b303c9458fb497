"""Runs to a terminal, all of it (-v): tables that fit 80 columns, and the verdicts last, where the eye is.

Untrusted text is only ever given to rich as `Text` (never as markup), on one line and made printable, so that no escape
sequence in a completion or a name reaches the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from nondet.bench.summary import Section
from nondet.core.records import Axis, Row, Status
from nondet.core.statistics import percent
from nondet.errors import one_line
from nondet.reports import bench_text, figures
from nondet.reports.axes_text import AxesTable, terminal_lines
from nondet.reports.cases import ProbeSection
from nondet.reports.classmap import map_text
from nondet.reports.content import Report, RunSection, SampleSection
from nondet.reports.draw_samples import BranchView, branch_views
from nondet.reports.endpoint_terminal import print_endpoint
from nondet.reports.overall_text import comparison_lines, overall_table
from nondet.reports.story import Story
from nondet.sampling.analysis import DEFINITION, HOST_NOTE, NAME, SampleSummary, TreeNode, ratio_text
from nondet.verdict.findings import Finding, Verdict, plural, subject_name
from nondet.verdict.rows import axis_of

__all__ = ["render_full", "sparkline"]

_BRANCHES_MOST = 4
_NODES_MOST = 24
_PROBLEMS_MOST = 8
_BARS = "▁▂▃▄▅▆▇█"


def render_full(report: Report, console: Console) -> None:
    """Print everything but the report's last words, which are the caller's."""
    for number, section in enumerate(report.runs):
        if number:
            console.print()
        _run(section, console)
    _speeds(report, console)


def _say(console: Console, text: str, style: str = "", limit: int = 4000) -> None:
    """One paragraph of plain text."""
    console.print(Text(one_line(text, limit), style=style))


def _cell(text: str, style: str = "", limit: int = 400) -> Text:
    return Text(one_line(text, limit), style=style, overflow="fold")


def _run(section: RunSection, console: Console) -> None:
    _say(console, f"{section.name} · {section.facts}", "dim")
    _say(console, figures.environment_line(section.run.header.environment), "dim")
    if not section.run.complete:
        _say(console, "This run did not come to its end: every count is of what was measured so far.", "bold yellow")
    if section.story:
        _story(section.story, console)
    for block in section.traced:
        console.print()
        _say(console, block.title, "bold")
        for line in block.lines:
            console.print(Padding(_cell(line, limit=2000), (0, 0, 0, 2)))
    if section.bench:
        console.print()
        limits = bench_text.limits_text(section.run.limits, section.bench)
        if limits:
            _say(console, limits, "dim")
        _say(console, bench_text.method_text(section.bench), "dim")
    for bench in section.bench:
        _bench(bench, console)
    if section.axes:
        _axes(section.axes, console)
    if section.endpoint is not None:
        print_endpoint(section.endpoint, console)
    _overall(section, console)
    for sample in section.shown:
        _sample(sample, console, several=len(section.samples) > 1)
    for probe in section.probes:
        _probe(probe, console)
    for line in section.coverage_text:
        console.print()
        _say(console, f"Coverage of {line}.", "dim")
    _problems(section, console)
    for verdict in section.told:
        which = ""
        if len(section.samples) > 1 and verdict.prompt is not None:
            which = f", {subject_name(section.run.header.plan, verdict.prompt)}"
        _verdict(verdict, console, which)


def _axes(axes: AxesTable, console: Console) -> None:
    """What was varied alone, then what proves that each value took effect."""
    console.print()
    for line in terminal_lines(axes, console.width):
        console.print(Text(line, no_wrap=True))
    if axes.made_longer:
        _say(console, axes.made_longer, "dim")
    for axis in axes.lines:
        for value, impl, holds, proof in axis.proofs:
            _say(console, f"  {axis.axis}={value}, {impl}: {'' if holds else 'unproven: '}{proof}", "dim")


def _story(told: Story, console: Console) -> None:
    """A diagnosis: its steps, then what was varied alone, then its answers."""
    _say(console, "Step by step", "bold")
    for question, outcome, text in told.steps:
        console.print(Padding(Text.assemble(one_line(question), " ", (one_line(outcome), "bold")), (0, 0, 0, 2)))
        console.print(Padding(_cell(text, "dim", 4000), (0, 0, 0, 5)))
    for axis, impl, _, traces, tokens, where in told.axes:
        line = f"{axis}, {impl}: {traces} traces differ, {tokens or 'no'} completions; parted at: {where}"
        console.print(Padding(_cell(line, limit=600), (0, 0, 0, 2)))
    for line in told.limits:
        console.print(Padding(_cell(line, "dim", 2000), (0, 0, 0, 2)))
    console.print()
    for label, text in told.answers:
        console.print(Text.assemble((f"{label}. ", "bold"), one_line(text, 6000)))


def _verdict(verdict: Verdict, console: Console, which: str = "") -> None:
    """The verdict and what it does not cover. Completions' verdicts are whole in the headline already."""
    style = "red" if verdict.is_fault else "green" if verdict.finding == Finding.CLEAN else ""
    text = ", ".join(f.value for f in verdict.findings) if verdict.prompt is not None else one_line(verdict.text)
    console.print()
    console.print(Text.assemble((one_line(verdict.impl), "bold"), which, ": ", (text, style)))
    for note in verdict.notes:
        console.print(Padding(Text(one_line(note, 2000), style="dim"), (0, 0, 0, 2)))


def _probe(probe: ProbeSection, console: Console) -> None:
    console.print()
    _say(console, f"{probe.name}: {probe.summary}", "bold")
    for case in probe.parted:
        console.print(Padding(_cell(f"{case.head.case}, {case.head.dtype}"), (0, 0, 0, 1)))
        width = max(len(r.impl) for r in case.rows)
        for row in case.rows:
            console.print(Padding(_figures(row, width), (0, 0, 0, 3)))
            if row.parted and map_text(row):
                most = 4 if axis_of(row) == Axis.ORDER else 8  # which order gave which class says little
                console.print(Padding(Text(one_line(map_text(row, most), 700), style="dim"), (0, 0, 0, 5)))
        for impls, text in figures.extras([r for r in case.rows if r.parted]):
            console.print(Padding(Text(one_line(f"{impls}: {text}", 500), style="dim"), (0, 0, 0, 3)))
    if probe.clean:
        trials = figures.counted(sum(r.trials for c in probe.clean for r in c.measured))
        cases = plural(len(probe.clean), "other case" if probe.parted else "case")
        _say(console, f" Nothing parted in {cases} ({trials} trials).", "dim")


def _figures(row: Row, width: int) -> Text:
    """ "stock  4 classes in 208 trials, up to 3 ULP apart, error 0.001731"."""
    name = (one_line(row.impl).ljust(min(width, 40)), "bold")
    if row.status in (Status.ERROR, Status.SKIPPED):
        return Text.assemble(name, "  ", (one_line(row.status), "yellow"), ": ", one_line(row.reason, 200))
    classes = f"{plural(row.distinct, 'class', 'classes')} in {figures.counted(row.trials)} trials"
    if row.wrong:
        classes = f"{Status.WRONG}: {one_line(row.reason, 200)}; {classes}"
    parts = [figures.apart_text(row.difference)] if row.difference and row.parted else []
    if row.error is not None:
        parts.append(f"error {figures.error_text(row.worst_error or row.error)}")
    if figures.run_rate(row):
        parts.append(figures.run_rate(row))
    rest = "".join(f", {part}" for part in parts)
    return Text.assemble(name, "  ", (classes, "bold red" if row.parted or row.wrong else "green"), rest)


def _overall(section: RunSection, console: Console) -> None:
    """All prompts together, where there are several."""
    if not section.overall:
        return
    console.print()
    _say(console, f"All {plural(len(section.samples), section.overall[0].unit)}", "bold")
    table = Table(expand=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for name in ("", *(o.impl for o in section.overall)):
        table.add_column(_cell(name), overflow="fold")
    for name, cells in overall_table(section.overall):
        table.add_row(_cell(name, "dim"), *map(_cell, cells))
    console.print(table)
    for line in comparison_lines(section.overall):
        _say(console, line)


def _sample(sample: SampleSection, console: Console, several: bool) -> None:
    console.print()
    title = f"Completions of {sample.name}" if several else "Completions"
    _say(console, f"{title}: {one_line(sample.prompt_text, 200)}", "bold")
    table = Table(expand=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold")
    for summary in sample.main:
        table.add_column(_cell(summary.impl), overflow="fold")
    for name, cells in figures.sample_table(sample.main, sample.replays):
        table.add_row(_cell(name, "dim"), *(_cell(cell) for cell in cells))
    console.print(table)
    if sample.speed is not None:
        _say(console, figures.sentence(ratio_text(sample.speed).replace(NAME, NAME.capitalize(), 1)))
        _say(console, f"{DEFINITION.capitalize()}.", "dim")
    for test in sample.families:
        distinct = f"{test.summary.distinct_completions} distinct of {test.summary.n}"
        distinct += f", {plural(test.summary.distinct_traces, 'distinct trace')}"
        _say(console, f"Replacing {test.family} alone: {distinct}; {test.result}.")
    for summary in sample.main:
        _parting(summary, console)


def _parting(summary: SampleSummary, console: Console) -> None:
    fork = summary.first_fork
    if fork is None:
        return
    console.print()
    _say(console, f"{summary.impl} parts at token {fork.index}, after: {one_line(fork.before, 200)}", "bold")
    for b in fork.branches:
        margin = "" if b.margin_min is None else f", top-1 − top-2 logit {figures.number(b.margin_min)} or more"
        head = f"{b.count} of {summary.n}{margin}: "
        text = Text.assemble(head, (one_line(figures.token(b.text), 60), "reverse"), " ", one_line(b.continuation, 90))
        console.print(Padding(text, (0, 0, 0, 2)))
    if len(summary.survival) > 1:
        ends = (
            f"{percent(summary.survival[0])} at token 0, {percent(summary.survival[-1])} at {len(summary.survival) - 1}"
        )
        bars = sparkline(summary.survival, 48)
        console.print(Text(f"  agreement {bars} {ends}", style="dim"))
    console.print(_tree(summary))
    for view in branch_views(summary)[:_BRANCHES_MOST]:
        console.print(Padding(_branch(view, summary.n), (0, 0, 0, 2)))
    rest = summary.distinct_completions - _BRANCHES_MOST
    if rest > 0:
        _say(console, f"  … and {plural(rest, 'rarer branch', 'rarer branches')}: see the .html or .md report.", "dim")


def _branch(view: BranchView, n: int) -> Text:
    """The text around the first different token, which stands out."""
    mark = "(ends here)" if view.ends else one_line(figures.visible(view.token), 60)
    head = ((f"{view.letter} ", "bold"), f"{view.count} of {n}: ", (one_line(view.before, 200)[-60:], "dim"))
    return Text.assemble(*head, " ", (mark, "reverse"), " ", one_line(view.after, 100))


def _tree(summary: SampleSummary) -> Tree:
    """The tree of branches: tokens shared and their count at each node. A loop: trees may be deep."""
    root = Tree(_node(summary.tree, summary.n), guide_style="dim")
    pending = [(root, summary.tree)]
    shown = 1
    while pending:
        drawn, node = pending.pop(0)
        for i, child in enumerate(node.children):
            if shown >= _NODES_MOST:
                drawn.add(Text(f"… {len(node.children) - i} more", style="dim"))
                break
            pending.append((drawn.add(_node(child, summary.n)), child))
            shown += 1
    return root


def _node(node: TreeNode, n: int) -> Text:
    span = f"tokens {node.start}-{node.start + node.length - 1}" if node.length else f"ends at {node.start}"
    return Text.assemble(f"{node.count} of {n}, {span} ", (one_line(node.text, 36), "dim"))


def _bench(section: Section, console: Console) -> None:
    """A line for each cell, and what they come to."""
    console.print()
    _say(console, f"{section.name}, {section.dtype} on {section.device}", "bold")
    rows = bench_text.table_rows(section)
    several = len({row.impl for row in rows}) > 1
    unit = bench_text.time_unit(section)
    lines = [("cell", f"stock {unit}", unit, "ratio", "limit", "ran")]
    for row in rows:
        ran = f"{row.impl}: {row.kernel or row.reason}" if several else row.kernel or row.reason
        lines.append((row.cell, row.stock, row.time, row.ratio + "~" * row.noise, row.share, one_line(ran)))
    widths = [min(max(map(cell_len, column)), 40) for column in list(zip(*lines, strict=True))[:-1]]
    table = Table(expand=False, pad_edge=False, box=None, padding=(0, 1, 0, 0), show_header=False)
    for number, width in enumerate(widths):  # figures stay whole, names give way
        table.add_column(width=width, justify="right" if number else "left")
    table.add_column(max_width=max(8, console.width - sum(widths) - len(widths)), no_wrap=True, overflow="ellipsis")
    table.add_row(*(Text(name, style="dim") for name in lines[0]))
    for row, (*texts, ran) in zip(rows, lines[1:], strict=True):
        styles = {3: "red" if row.slow else "dim" if row.noise else "green" if row.ratio != "–" else ""}
        table.add_row(*(_cell(text, styles.get(i, "")) for i, text in enumerate(texts)), Text(ran))
    console.print(table)
    if any(row.noise for row in rows):
        _say(console, " ~ within noise: the interval of the ratio holds 1.", "dim")
    for summary in section.summaries:
        _say(console, f" {summary.impl}: {bench_text.summary_text(summary, section)}.")
    for count in section.bits:
        _say(console, f" {count.impl}: {bench_text.bits_text(count, section)}.")


def _speeds(report: Report, console: Console) -> None:
    if not report.speeds:
        return
    console.print()
    _say(console, "End to end: tokens/s of everybody, by load", "bold")
    table = Table(expand=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for name in ("run", "stock that ran", "stock", "invariant", NAME, "distinct, invariant"):
        table.add_column(name, overflow="fold")
    for s in report.speeds:
        rates = (f"{s.speed.stock:.0f}", f"{s.speed.invariant:.0f}", f"{s.speed.ratio:.2f}")
        table.add_row(_cell(s.run), _cell(s.speed.baseline), *map(_cell, (*rates, f"{s.distinct} of {s.completions}")))
    console.print(table)
    if any(s.speed.host_bound for s in report.speeds):
        _say(console, f"Against plain stock: {HOST_NOTE}.", "dim")


def _problems(section: RunSection, console: Console) -> None:
    if not section.problems:
        return
    console.print()
    _say(console, section.counts or plural(len(section.problems), "note"), "bold")
    for problem in section.problems[:_PROBLEMS_MOST]:
        console.print(Padding(_cell(f"{problem.kind}: {problem.name}: {problem.reason}", limit=300), (0, 0, 0, 2)))
    rest = len(section.problems) - _PROBLEMS_MOST
    if rest > 0:
        _say(console, f"  … and {rest} more: see the .html or .md report.", "dim")


def sparkline(shares: Sequence[float], width: int) -> str:
    """Shares as bars, the lowest of each stretch; full height is 1, the foot is the lowest of all."""
    low = min(shares)
    if low >= 1.0:
        return _BARS[-1] * min(width, len(shares))
    cells = []
    count = min(width, len(shares))
    for i in range(count):
        stretch = shares[i * len(shares) // count : (i + 1) * len(shares) // count]
        cells.append(_BARS[round((min(stretch) - low) / (1.0 - low) * (len(_BARS) - 1))])
    return "".join(cells)
