"""Runs to a terminal: 25 lines at most, the verdict last, where the eye is; all of it with -v.

Untrusted text is only ever given to rich as `Text` (never as markup), on one line and made printable, so that no escape
sequence in a completion or a name reaches the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from nondet.bench.summary import Section
from nondet.core.records import Axis, Role, Row, Run, Status, role_of
from nondet.core.statistics import percent
from nondet.errors import one_line
from nondet.reports import bench as bench_text
from nondet.reports import text as figures
from nondet.reports.axes import AxesTable, terminal_lines
from nondet.reports.classes import map_text
from nondet.reports.content import ProbeSection, Report, RunSection, SampleSection, build
from nondet.reports.endpoint import EndpointSection
from nondet.reports.first_screen import FirstScreen, first_screen
from nondet.reports.samples import BranchView, branch_views, comparison_lines, line_of, overall_table
from nondet.reports.traces import Story
from nondet.sampling.analysis import DEFINITION, HOST_NOTE, NAME, SampleSummary, TreeNode, ratio_text
from nondet.verdict.findings import Finding, Verdict, plural, subject_name
from nondet.verdict.rows import axis_of


def _say(console: Console, text: str, style: str = "") -> None:
    """One paragraph of plain text."""
    console.print(Text(one_line(text, 4000), style=style))


def print_endpoint(endpoint: EndpointSection, console: Console) -> None:
    """Servers, contract, arms, times, comparisons."""
    for line in endpoint.servers:
        _say(console, line, "bold")
    _say(console, "Contract", "bold")
    for row in endpoint.contract:
        for impl, (answer, seen) in zip(endpoint.impls, row.answers, strict=True):
            who = f"{impl}: " if len(endpoint.impls) > 1 else ""
            style = {"yes": "green", "no": "red"}.get(answer, "yellow")
            question = one_line(f"{who}{row.question}", 200)
            text = Text.assemble((f"{answer:8}", style), question, (f": {one_line(seen)}", "dim"))
            console.print(Padding(text, (0, 0, 0, 2)))
    for title, head, rows in (
        ("Arms", endpoint.ARMS_HEAD, endpoint.arms),
        ("Times", endpoint.LATENCY_HEAD, endpoint.latency),
    ):
        _say(console, title, "bold")
        for cells in rows:
            told = ", ".join(f"{name} {cell}" for name, cell in zip(head[1:], cells[1:], strict=True))
            console.print(
                Padding(Text.assemble((one_line(cells[0]), "bold"), ": ", one_line(told, 1000)), (0, 0, 0, 2))
            )
    _say(console, "Held against each other", "bold")
    for impl, prompt, seen, finding, why in endpoint.comparisons:
        line = f"{impl}, prompt {prompt}: {seen}: {finding}" + (f". {why}" if why else "")
        console.print(Padding(Text(one_line(line, 1000), overflow="fold"), (0, 0, 0, 2)))
    if endpoint.omitted:
        _say(console, f"  … and {plural(endpoint.omitted, 'more comparison')}, in which nothing parted.", "dim")


# Runs to a terminal, all of it (-v): tables that fit 80 columns, and the verdicts last, where the eye is.
#
# Untrusted text is only ever given to rich as `Text` (never as markup), on one line and made printable, so that no
# escape sequence in a completion or a name reaches the terminal.

_BRANCHES_MOST = 4
_NODES_MOST = 24
_PROBLEMS_MOST_FULL = 8
_BARS = "▁▂▃▄▅▆▇█"


def render_full(report: Report, console: Console) -> None:
    """Print everything but the report's last words, which are the caller's."""
    for number, section in enumerate(report.runs):
        if number:
            console.print()
        _run(section, console)
    _speeds(report, console)


def _say_full(console: Console, text: str, style: str = "", limit: int = 4000) -> None:
    """One paragraph of plain text."""
    console.print(Text(one_line(text, limit), style=style))


def _cell(text: str, style: str = "", limit: int = 400) -> Text:
    return Text(one_line(text, limit), style=style, overflow="fold")


def _run(section: RunSection, console: Console) -> None:
    _say_full(console, f"{section.name} · {section.facts}", "dim")
    _say_full(console, figures.environment_line(section.run.header.environment), "dim")
    if not section.run.complete:
        _say_full(
            console, "This run did not come to its end: every count is of what was measured so far.", "bold yellow"
        )
    if section.story:
        _story(section.story, console)
    for block in section.traced:
        console.print()
        _say_full(console, block.title, "bold")
        for line in block.lines:
            console.print(Padding(_cell(line, limit=2000), (0, 0, 0, 2)))
    if section.bench:
        console.print()
        limits = bench_text.limits_text(section.run.limits, section.bench)
        if limits:
            _say_full(console, limits, "dim")
        _say_full(console, bench_text.method_text(section.bench), "dim")
    for bench in section.bench:
        _bench(bench, console)
    if section.axes:
        _axes(section.axes, console)
    if section.endpoint is not None:
        print_endpoint(section.endpoint, console)
    _overall(section, console)
    for sample in section.shown:
        _sample_full(sample, console, several=len(section.samples) > 1)
    for probe in section.probes:
        _probe(probe, console)
    for line in section.coverage_text:
        console.print()
        _say_full(console, f"Coverage of {line}.", "dim")
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
        _say_full(console, axes.made_longer, "dim")
    for axis in axes.lines:
        for value, impl, holds, proof in axis.proofs:
            _say_full(console, f"  {axis.axis}={value}, {impl}: {'' if holds else 'unproven: '}{proof}", "dim")


def _story(told: Story, console: Console) -> None:
    """A diagnosis: its steps, then what was varied alone, then its answers."""
    _say_full(console, "Step by step", "bold")
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
    _say_full(console, f"{probe.name}: {probe.summary}", "bold")
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
        _say_full(console, f" Nothing parted in {cases} ({trials} trials).", "dim")


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
    _say_full(console, f"All {plural(len(section.samples), section.overall[0].unit)}", "bold")
    table = Table(expand=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for name in ("", *(o.impl for o in section.overall)):
        table.add_column(_cell(name), overflow="fold")
    for name, cells in overall_table(section.overall):
        table.add_row(_cell(name, "dim"), *map(_cell, cells))
    console.print(table)
    for line in comparison_lines(section.overall):
        _say_full(console, line)


def _sample_full(sample: SampleSection, console: Console, several: bool) -> None:
    console.print()
    title = f"Completions of {sample.name}" if several else "Completions"
    _say_full(console, f"{title}: {one_line(sample.prompt_text, 200)}", "bold")
    table = Table(expand=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold")
    for summary in sample.main:
        table.add_column(_cell(summary.impl), overflow="fold")
    for name, cells in figures.sample_table(sample.main, sample.replays):
        table.add_row(_cell(name, "dim"), *(_cell(cell) for cell in cells))
    console.print(table)
    if sample.speed is not None:
        _say_full(console, figures.sentence(ratio_text(sample.speed).replace(NAME, NAME.capitalize(), 1)))
        _say_full(console, f"{DEFINITION.capitalize()}.", "dim")
    for test in sample.families:
        distinct = f"{test.summary.distinct_completions} distinct of {test.summary.n}"
        distinct += f", {plural(test.summary.distinct_traces, 'distinct trace')}"
        _say_full(console, f"Replacing {test.family} alone: {distinct}; {test.result}.")
    for summary in sample.main:
        _parting(summary, console)


def _parting(summary: SampleSummary, console: Console) -> None:
    fork = summary.first_fork
    if fork is None:
        return
    console.print()
    _say_full(console, f"{summary.impl} parts at token {fork.index}, after: {one_line(fork.before, 200)}", "bold")
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
        _say_full(
            console, f"  … and {plural(rest, 'rarer branch', 'rarer branches')}: see the .html or .md report.", "dim"
        )


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
    _say_full(console, f"{section.name}, {section.dtype} on {section.device}", "bold")
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
        _say_full(console, " ~ within noise: the interval of the ratio holds 1.", "dim")
    for summary in section.summaries:
        _say_full(console, f" {summary.impl}: {bench_text.summary_text(summary, section)}.")
    for count in section.bits:
        _say_full(console, f" {count.impl}: {bench_text.bits_text(count, section)}.")


def _speeds(report: Report, console: Console) -> None:
    if not report.speeds:
        return
    console.print()
    _say_full(console, "End to end: tokens/s of everybody, by load", "bold")
    table = Table(expand=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for name in ("run", "stock that ran", "stock", "invariant", NAME, "distinct, invariant"):
        table.add_column(name, overflow="fold")
    for s in report.speeds:
        rates = (f"{s.speed.stock:.0f}", f"{s.speed.invariant:.0f}", f"{s.speed.ratio:.2f}")
        table.add_row(_cell(s.run), _cell(s.speed.baseline), *map(_cell, (*rates, f"{s.distinct} of {s.completions}")))
    console.print(table)
    if any(s.speed.host_bound for s in report.speeds):
        _say_full(console, f"Against plain stock: {HOST_NOTE}.", "dim")


def _problems(section: RunSection, console: Console) -> None:
    if not section.problems:
        return
    console.print()
    _say_full(console, section.counts or plural(len(section.problems), "note"), "bold")
    for problem in section.problems[:_PROBLEMS_MOST_FULL]:
        console.print(Padding(_cell(f"{problem.kind}: {problem.name}: {problem.reason}", limit=300), (0, 0, 0, 2)))
    rest = len(section.problems) - _PROBLEMS_MOST_FULL
    if rest > 0:
        _say_full(console, f"  … and {rest} more: see the .html or .md report.", "dim")


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


LINES_MOST = 25
_PROBLEMS_MOST = 2


def render(runs: list[Run], console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print the report.

    Args:
        verbose: All of it, however long.
        quiet: The verdict alone.

    Raises:
        UserError: a sampled run's side file is missing, malformed or another run's.
    """
    report = build(runs)
    screen = first_screen(report)
    tail = _last_words(report, screen, console, next_too=not quiet)
    if verbose and not quiet:
        render_full(report, console)
        console.print()
    elif not quiet:
        room = LINES_MOST - sum(_height(text, console) for text in tail) - 1
        body = list(_body(report, screen, console))
        if sum(_height(text, console) for text in body) > room:
            room -= 1
            kept: list[Text] = []
            for text in body:
                room -= _height(text, console)
                if room < 0:
                    break
                kept.append(text)
            body = [*kept, Text("… more with -v, or in a report: --out report.html", style="dim")]
        for text in body:
            console.print(text)
        console.print()
    for text in tail:
        console.print(text)


def _height(text: Text, console: Console) -> int:
    return len(console.render_lines(text, console.options.update(width=console.width)))


def _line(text: str, style: str = "", limit: int = 240) -> Text:
    return Text(one_line(text, limit), style=style)


def _last_words(report: Report, screen: FirstScreen | None, console: Console, *, next_too: bool) -> list[Text]:
    """What to run next, then the verdict."""
    words = []
    if next_too and screen is not None:
        words.append(Text.assemble(("next: ", "dim"), one_line(screen.command, 200), (f"  {screen.why}", "dim")))
    if any(not section.run.complete for section in report.runs):
        text = "This run did not come to its end: every count is of what was measured so far."
        words.append(_line(text, "bold yellow"))
    if len(report.runs) == 1:
        section = report.runs[0]
        bad = any(v.is_fault and v.role not in (Role.PART, Role.OTHER) for v in section.verdicts)
        words.append(_line(figures.sentence(section.headline), "bold red" if bad else "bold", limit=12 * console.width))
    elif screen is not None:
        style = "bold red" if screen.affected == "yes" else "bold"
        words.append(_line(f"Affected: {screen.affected}. {figures.sentence(screen.answer)}", style))
    return words


def _body(report: Report, screen: FirstScreen | None, console: Console) -> Iterator[Text]:
    """Lines, those of most weight first: what does not fit is cut off at the end."""
    if len(report.runs) > 1:
        if screen is not None:
            yield from _chain(screen)
        for section in report.runs:
            yield _line(f"{section.name}: {section.headline}", limit=console.width)
        for s in report.speeds:
            host = " (host-bound, no cost)" if s.speed.host_bound else ""
            yield _line(f"{s.run}: {NAME} {s.speed.ratio:.2f} against {s.speed.baseline}{host}", limit=console.width)
        return
    for section in report.runs:
        yield _line(f"{section.name} · {section.facts}", "dim", 2 * console.width)
        yield _line(figures.environment_line(section.run.header.environment), "dim")
        yield from _section(section, console)
        if screen is not None and not section.story:
            yield from _chain(screen)


def _chain(screen: FirstScreen) -> Iterator[Text]:
    for step in screen.steps:
        if step.known:
            yield Text.assemble((f"{step.label:9}", "bold"), one_line(step.text, 280))


def _section(section: RunSection, console: Console) -> Iterator[Text]:
    if section.story:
        for label, text in section.story.answers:
            yield Text.assemble(
                (f"{label}. ", "bold"), one_line(text, (4 if label == "Why" else 2) * console.width - 12)
            )
        for axis, impl, _, traces, _, where in section.story.axes:
            yield _line(
                f"varied alone: {axis}, {impl}: {traces} traces differ; parted at: {where}", limit=console.width
            )
        return  # the completions and the trace are its evidence, and its answers name them
    for block in section.traced:
        yield _line(block.title, "bold", console.width)
        for line in block.lines[:3]:
            yield _line(f"  {line}")
    if section.axes:
        for line in terminal_lines(section.axes, console.width):
            yield Text(line, no_wrap=True)  # columns: as they are
    if section.endpoint is not None:
        for line in section.endpoint.brief:
            yield _line(line, limit=2 * console.width)
    for part in section.overall:
        yield _line(line_of(part), limit=console.width)
    for sample in section.shown if section.endpoint is None else ():
        yield from _sample(sample, len(section.samples) > 1, console)
    if section.bench:
        limits = bench_text.limits_text(section.run.limits, section.bench)
        if limits:
            yield _line(limits, "dim")
    for bench in section.bench:
        for summary in bench.summaries:
            yield _line(bench_text.worst_text(summary, bench), limit=2 * console.width)
    clean = [probe.name for probe in section.probes if probe.clean and not probe.parted]
    for probe in section.probes:
        if probe.parted:
            shown = "(shown on purpose) " if probe.demonstration else ""
            most = max(row.distinct for case in probe.parted for row in case.rows)
            text = f"{probe.name}: {shown}{probe.summary}; up to {plural(most, 'class', 'classes')} of bits"
            yield _line(text, limit=2 * console.width)
    if clean:
        count = sum(len(probe.clean) for probe in section.probes)
        yield _line(f"nothing parted in {plural(count, 'case')}, all of {', '.join(clean)}", limit=2 * console.width)
    if section.problems:
        yield _line(section.counts or plural(len(section.problems), "note"), "bold")
        for problem in section.problems[:_PROBLEMS_MOST]:
            yield _line(f"  {problem.kind}: {problem.name}: {problem.reason}", limit=2 * console.width - 2)
        if len(section.problems) > _PROBLEMS_MOST:
            yield _line(f"  … and {len(section.problems) - _PROBLEMS_MOST} more")
    for line in section.coverage_text:
        yield _line(f"coverage of {line}", "dim", 2 * console.width)


def _sample(sample: SampleSection, several: bool, console: Console) -> Iterator[Text]:
    which = f"{sample.name}, " if several else ""
    for s in sample.summaries:
        distinct = f"{figures.counted(s.distinct_completions)} distinct of {figures.counted(s.n)}"
        traces = plural(s.distinct_traces, "logprob trace")
        rate = f", {s.tokens_per_second:,.0f} tokens/s" if role_of(s.impl) != Role.PART and not several else ""
        yield _line(f"{which}{s.impl}: {distinct}, {traces}{rate}", limit=console.width)
        if not several and len(s.survival) > 1 and s.distinct_completions > 1 and role_of(s.impl) != Role.PART:
            yield Text(f"  agreement by token {sparkline(s.survival, min(40, console.width - 24))}", style="dim")
