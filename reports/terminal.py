"""Runs to a terminal: 25 lines at most, the verdict last, where the eye is. All of it: `nondet.reports.terminal_full`.

Untrusted text is only ever given to rich as `Text` (never as markup), on one line and made printable, so that no escape
sequence in a completion or a name reaches the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from nondet.core.records import Role, Run, role_of
from nondet.errors import one_line
from nondet.reports import bench_text, figures
from nondet.reports.axes_text import terminal_lines
from nondet.reports.content import Report, RunSection, SampleSection, build
from nondet.reports.first_screen import FirstScreen, first_screen
from nondet.reports.overall_text import line_of
from nondet.reports.terminal_full import render_full, sparkline
from nondet.sampling.analysis import NAME
from nondet.verdict.findings import plural

__all__ = ["LINES_MOST", "render", "sparkline"]

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
