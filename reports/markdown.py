"""Runs to markdown that reads well in a pull request: headline, small tables, details for what is long.

Untrusted text is only ever printed as a code span, inside a fence, or with its ASCII punctuation as character
references: there it can't open a link, a mention, a table cell or a tag.
"""

from __future__ import annotations

from collections.abc import Sequence

from nondet.bench.summary import Section
from nondet.core.records import Row, Run
from nondet.core.statistics import percent
from nondet.reports import bench as bench_text
from nondet.reports import text
from nondet.reports import text as figures
from nondet.reports.axes import AxesTable
from nondet.reports.classes import letter, map_text
from nondet.reports.content import CaseGroup, ProbeSection, Report, RunSection, SampleSection, build
from nondet.reports.endpoint import EndpointSection
from nondet.reports.first_screen import first_screen
from nondet.reports.samples import BranchView, branch_views, comparison_lines, overall_table, prompt_table
from nondet.reports.text import code, details, escape, fence, table
from nondet.reports.traces import Story
from nondet.sampling.analysis import DEFINITION, HOST_NOTE, NAME, SampleSummary
from nondet.verdict.findings import Verdict, plural, subject_name

_PROOF_HEAD = ("axis", "value", "under", "took effect", "proof")


def axes_blocks(axes: AxesTable) -> list[str]:
    """Blocks of a run's section."""
    columns = [f"{code(i)}: {name}" for i in axes.impls for name in ("traces", "texts", "moved", "first")]
    rows = []
    for line in axes.lines:
        values = ", ".join(line.values) + (f"; unproven: {', '.join(line.unproven)}" if line.unproven else "")
        row = [escape(line.axis), escape(line.note or values)]
        for impl in axes.impls:
            cell = line.cells.get(impl)
            if cell is None:
                row += ["", "", "", ""]
            else:
                row += [
                    cell.traces,
                    cell.texts,
                    cell.moved or "may differ",
                    "–" if cell.first is None else str(cell.first),
                ]
        rows.append(row)
    proofs = [
        (escape(line.axis), escape(value), code(impl), "yes" if holds else "unproven", escape(proof))
        for line in axes.lines
        for value, impl, holds, proof in line.proofs
    ]
    return [
        "### One thing about the engine varied at a time",
        f"Prompt: {code(axes.prompt, cell=False)}. {escape(axes.made_longer)}",
        table(["axis", "values", *columns], rows),
        escape(axes.legend),
        details("What proves that each value took effect", [table(_PROOF_HEAD, proofs)]),
    ]


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
        (name, *(escape(cell) for cell in cells)) for name, cells in text.sample_table(sample.summaries, sample.replays)
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
        distinct = f"{text.counted(f.summary.distinct_completions)} of {text.counted(f.summary.n)}"
        rows.append((code(f.family), distinct, text.counted(f.summary.distinct_traces), f.result))
    return table(("replaced", "distinct completions", "distinct traces", "result"), rows)


def _fork(summary: SampleSummary) -> list[str]:
    fork = summary.first_fork
    if fork is None:
        return []
    rows = []
    for b in fork.branches:
        margin = "not recorded" if b.margin_min is None else text.number(b.margin_min)
        median = "" if b.margin_median is None else f" / {text.number(b.margin_median)}"
        rows.append((code(text.token(b.text)), f"{b.count} of {summary.n}", margin + median, code(b.continuation)))
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
    return f"{view.before}⟦{text.visible(view.token)}⟧{view.after}" if view.token else view.before + view.after


def endpoint_blocks(endpoint: EndpointSection) -> list[str]:
    """Servers and arms open, the rest folded."""
    blocks = ["### Servers", "\n".join(f"- {escape(line)}" for line in endpoint.servers) or "None answered."]
    if endpoint.arms:
        rows = [tuple(escape(cell) for cell in cells) for cells in endpoint.arms]
        blocks += ["Arms:", table(endpoint.ARMS_HEAD, rows)]
    if endpoint.comparisons:
        rows = [
            (code(impl), escape(prompt), escape(text), f"**{escape(finding)}**", escape(why) or "–")
            for impl, prompt, text, finding, why in endpoint.comparisons
        ]
        blocks.append(table(endpoint.COMPARISONS_HEAD, rows))
    if endpoint.omitted:
        blocks.append(f"… and {plural(endpoint.omitted, 'more comparison')}, in which nothing parted.")
    if endpoint.contract:
        rows = []
        for row in endpoint.contract:
            cells = [f"**{escape(answer)}** {escape(text, 400)}" for answer, text in row.answers]
            rows.append((escape(row.question), *cells))
        broken = plural(
            len(endpoint.broken), "question is not answered with yes", "questions are not answered with yes"
        )
        head = ("contract", *(code(impl) for impl in endpoint.impls))
        blocks.append(details(f"Contract: {broken}", [table(head, rows)]))
    if endpoint.latency:
        rows = [tuple(escape(cell) for cell in cells) for cells in endpoint.latency]
        blocks.append(details("Times", [table(endpoint.LATENCY_HEAD, rows)]))
    return blocks


_TOGETHER = 24  # cases of one table
_KEPT = 4  # of a run's blocks: headline, name, machine, verdicts stay


# Characters by default: what somebody reads in a pull request. The other is what GitHub takes.
BRIEF_MOST = 20_000
FULL_MOST = 65_536


def render(runs: list[Run], *, full: bool = False) -> str:
    """The document.

    Raises:
        UserError: a sampled run's side file is missing, malformed or another run's.
    """
    return render_report(build(runs), full=full)


def render_report(report: Report, *, full: bool = False) -> str:
    """The document of what was gathered already: the answer, then each run's blocks, as many as there is room for.

    Blocks that don't fit are left out, the last of a run first and the longest run first, and the document ends with
    what was left out. With `full` there is room for all that GitHub takes; more is never written.
    """
    if not report.runs:
        return "No run was given.\n"
    head = _answer(report)
    bodies = [_run(section) for section in report.runs]
    tail = _speeds(report)
    most = FULL_MOST if full else BRIEF_MOST
    left_out = [0] * len(bodies)

    def document() -> str:
        cut = [f"{count} of {code(r.name)}" for r, count in zip(report.runs, left_out, strict=True) if count]
        rest = "" if full else " `nondet report --full` writes more;"
        said = (
            [f"Left out for length: blocks, {', '.join(cut)}.{rest} an .html report holds everything."] if cut else []
        )
        return "\n\n".join([*head, *(block for body in bodies for block in body), *tail, *said]) + "\n"

    while len(document()) > most and any(len(body) > _KEPT for body in bodies):
        i = max(range(len(bodies)), key=lambda i: sum(map(len, bodies[i])) if len(bodies[i]) > _KEPT else -1)
        longest = max(range(_KEPT, len(bodies[i])), key=lambda j: (len(bodies[i][j]), j))
        del bodies[i][longest]
        left_out[i] += 1
    text = document()
    return text if len(text) <= most else text[: most - 60].rpartition("\n")[0] + "\n\nCut off here for length.\n"


def _answer(report: Report) -> list[str]:
    """The first screen: affected or not, on what, the chain in one table, what to run next."""
    screen = first_screen(report)
    if screen is None:
        return []
    rows = [(s.label, escape(s.text, 400) + (f" (more: {code(s.command)})" if s.command else "")) for s in screen.steps]
    return [
        f"## Affected: {screen.affected}",
        escape(figures.sentence(screen.answer)),
        "\n".join(f"- {escape(line)}" for line in screen.machines),
        table(("", "what is known"), rows),
        f"Next: {code(screen.command, cell=False)}: {escape(figures.sentence(screen.why))}",
    ]


def _run(section: RunSection) -> list[str]:
    blocks = [f"## {code(section.name, cell=False)}: {escape(figures.sentence(section.headline))}"]
    environment = section.run.header.environment
    facts_line = escape(section.facts)
    if not section.run.complete:
        facts_line += "\n\n**This run did not come to its end.** Every count is of what was measured so far."
    blocks.append(facts_line)
    blocks.append(escape(figures.environment_line(environment)) or "No environment was recorded.")
    if section.verdicts:
        blocks.append("\n".join(_verdict(v, section) for v in section.told))
    if section.coverage:
        cells = [(code(i), escape(g), code(n), figures.counted(c)) for i, g, n, c in section.coverage[:40]]
        said = "; ".join(escape(line) for line in section.coverage_text)
        blocks.append(details(f"Coverage of {said}", [table(("impl", "group", "operator", "calls"), cells)]))
    if section.story:
        blocks += _story(section.story)
    for block in section.traced:
        blocks += [f"### {escape(block.title)}", "\n".join(f"- {escape(line)}" for line in block.lines)]
        if block.details:
            blocks.append(details("details", ["\n".join(f"- {escape(line)}" for line in block.details)]))
    if section.bench:
        blocks += filter(None, [escape(bench_text.limits_text(section.run.limits, section.bench))])
        blocks.append(escape(bench_text.method_text(section.bench)))
    for bench in section.bench:
        blocks += _bench(bench)
    if section.axes:
        blocks += axes_blocks(section.axes)
    if section.endpoint is not None:
        blocks += endpoint_blocks(section.endpoint)
    blocks += overall_blocks(section)
    for sample in section.shown:
        blocks += sample_blocks(sample, several=len(section.samples) > 1)
    for probe in section.probes:
        blocks += _probe(probe)
    if section.problems:
        rows = [(p.kind, code(p.name), code(p.reason)) for p in section.problems]
        title = escape(section.counts or plural(len(rows), "note"))
        blocks.append(details(title, [table(("what", "which", "why"), rows)]))
    facts = [(escape(name), code(value)) for name, value in figures.environment_rows(environment)]
    options = [(escape(name), code(value)) for name, value in figures.environment_rows(section.run.header.plan)]
    tables = [table(("environment", "value"), facts), table(("option", "value"), options)]
    return [*blocks, details("Environment and options", tables)]


def _story(told: Story) -> list[str]:
    """The answers, the steps, what was varied."""
    blocks = ["### The verdict", "\n".join(f"- **{label}.** {escape(text, 6000)}" for label, text in told.answers)]
    steps = [(escape(question), f"**{escape(outcome)}**", escape(text, 6000)) for question, outcome, text in told.steps]
    blocks.append(details("Step by step", [table(("question", "answer", "evidence"), steps)]))
    if told.axes:
        rows = [[escape(cell) for cell in row] for row in told.axes]
        title = "One thing varied at a time, against the request alone"
        blocks.append(details(title, [table(told.AXES_HEAD, rows)]))
    if told.limits:
        blocks.append(details("What this does not say", ["\n".join(f"- {escape(line)}" for line in told.limits)]))
    return blocks


def _verdict(verdict: Verdict, section: RunSection) -> str:
    """An item with the findings in bold, and a sub-item for each note."""
    text = escape(figures.sentence(verdict.text))
    for finding in verdict.findings:
        text = text.replace(finding.value, f"**{finding.value}**", 1)
    which = ""
    if len(section.samples) > 1 and verdict.prompt is not None:
        which = f" ({subject_name(section.run.header.plan, verdict.prompt)})"
    lines = [f"- {code(verdict.impl, cell=False)}{which}: {text}", *(f"  - {escape(note)}" for note in verdict.notes)]
    return "\n".join(lines)


def _probe(probe: ProbeSection) -> list[str]:
    blocks = [f"### {escape(probe.name)}", escape(figures.sentence(probe.summary))]
    for start in range(0, len(probe.parted), _TOGETHER):  # in blocks, of which some may have to be left out
        cases = probe.parted[start : start + _TOGETHER]
        title = f"{plural(len(cases), 'case')} that parted: how far apart, how far from float64"
        blocks.append(details(title, [_figures_table(cases)]))
        blocks.append(details("Class maps", [block for case in cases for block in _maps(case)]))
    if probe.clean:
        title = f"{plural(len(probe.clean), 'case')} in which nothing parted"
        blocks.append(details(title, [_figures_table(probe.clean)]))
    return blocks


def _maps(case: CaseGroup) -> list[str]:
    """One line for each implementation: `M 1-3: A | 4-64: B (nvjet_splitK)`."""
    lines = []
    for row in case.measured:
        lines.append(f"- {code(row.impl, cell=False)}: {code(map_text(row) or 'no values listed', 1500, cell=False)}")
    lines += [f"- {code(impl, cell=False)}: {escape(text)}" for impl, text in figures.extras(case.measured)]
    return [f"**{escape(case.head.case)}**, {escape(case.head.dtype)}", "\n".join(lines)]


_FIGURES = ("case", "impl", "result", "classes / trials", "how far apart", "first", "relative error")


def _figures_table(cases: Sequence[CaseGroup]) -> str:
    return table(_FIGURES, [_figures_row(row) for case in cases for row in case.rows])


def _figures_row(row: Row) -> tuple[str, ...]:
    d = row.difference
    trials = f"{figures.counted(row.distinct)} / {figures.counted(row.trials)}" if row.trials else "–"
    if figures.run_rate(row):
        trials += f"; {escape(figures.run_rate(row))}"
    apart = escape(figures.apart_text(d)) if d and d.mismatched else "–"
    first = figures.first_mismatch(d)
    status = escape(row.status) if row.status == "identical" else f"**{escape(row.status)}**"
    case = f"{escape(row.case)}, {escape(row.dtype)}"
    return (case, code(row.impl), status, trials, apart, escape(first), figures.error_span(row))


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
    unit = bench_text.time_unit(section)
    head = ("cell", f"best stock, {unit}", "impl", unit, "ratio", "95%", "of the limit", "ran")
    return [
        f"### {escape(section.name)}, {escape(section.dtype)}",
        *(["\n".join(lines)] if lines else []),
        details(plural(len(section.cells), "cell"), [table(head, rows)]),
    ]


def _speeds(report: Report) -> list[str]:
    """Tokens per second by load, where there are several."""
    if not report.speeds:
        return []
    rows = [
        (
            code(s.run),
            escape(s.load),
            code(s.speed.baseline),
            f"{s.speed.stock:.0f}",
            f"{s.speed.invariant:.0f}",
            f"{s.speed.ratio:.2f}",
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
        NAME,
        "distinct completions, invariant",
    )
    note = f" Against plain `stock`: {HOST_NOTE}." if any(s.speed.host_bound for s in report.speeds) else ""
    return ["## End to end, by load", f"{DEFINITION.capitalize()}.{note}", table(head, rows)]
