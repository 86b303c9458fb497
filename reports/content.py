"""What a report says, gathered from run files once and written by every reporter in its own way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from nondet.bench.summary import Section, failures, sections
from nondet.core.records import Role, Row, Run, Status, families_of, role_of
from nondet.core.traces import check_traces, read_traces
from nondet.errors import one_line
from nondet.reports.axes import AxesTable, axes_table
from nondet.reports.bench import bench_headline
from nondet.reports.document import BRIEF, Bit, Block, Cells, Details, Heading, Inline, Items, Paragraph, Table
from nondet.reports.endpoint import EndpointSection, counts_alone, endpoint_section
from nondet.reports.probes import ProbeSection, probe_sections
from nondet.reports.text import counted, environment_line, environment_rows, sentence
from nondet.reports.traces import (
    Story,
    Told,
    embed_blocks,
    embed_headline,
    story,
    story_headline,
    trace_blocks,
    trace_headline,
)
from nondet.sampling.analysis import (
    DEFINITION,
    HOST_NOTE,
    NAME,
    Overall,
    SampleSummary,
    SpeedRatio,
    coverage_rows,
    coverage_text,
    guilty,
    overall,
    speed_ratio_of,
    summarize_all,
)
from nondet.verdict.findings import Finding, Verdict, plural, sort_impls, subject_name, subject_unit
from nondet.verdict.gate import judge
from nondet.verdict.samples import is_replay, is_varied, replays


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


_PROBLEMS_MOST = 2  # of a terminal's 25 lines
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


# Prompts of one run that are told one by one, with their forks and branches; of more, those that part most.
SAMPLES_MOST = 24


@dataclass(frozen=True)
class SampleSection:
    """One prompt under every implementation, stock first.

    Attributes:
        name: "prompt 2", with its seed where it has one.
        replays: Implementation -> the rows of rounds that were run again.
        speed: What the cure costs in this run; None unless both ran.
    """

    prompt: int
    name: str
    summaries: tuple[SampleSummary, ...]
    families: tuple[FamilyTest, ...]
    replays: dict[str, list[Row]]
    speed: SpeedRatio | None = None

    @property
    def main(self) -> tuple[SampleSummary, ...]:
        """What the report is about: everything but the replacements of single families, if there is anything else."""
        return tuple(s for s in self.summaries if role_of(s.impl) != Role.PART) or self.summaries

    @property
    def partial(self) -> tuple[SampleSummary, ...]:
        """Replacements of single families, where they are beside the main ones."""
        return tuple(s for s in self.summaries if s not in self.main)

    @property
    def most_texts(self) -> int:
        """Distinct completions under the implementation that gave most."""
        return max(s.distinct_completions for s in self.summaries)

    @property
    def prompt_text(self) -> str:
        """The prompt."""
        return self.summaries[0].prompt_text

    @property
    def invariant(self) -> SampleSummary | None:
        """The summary of the whole invariant implementation."""
        return next((s for s in self.summaries if role_of(s.impl) == Role.INVARIANT), None)


@dataclass(frozen=True)
class RunSection:
    """One run file."""

    run: Run
    name: str
    headline: str
    verdicts: tuple[Verdict, ...]
    problems: tuple[Problem, ...]
    probes: tuple[ProbeSection, ...]
    samples: tuple[SampleSection, ...]
    bench: tuple[Section, ...] = ()
    overall: tuple[Overall, ...] = ()
    endpoint: EndpointSection | None = None
    axes: AxesTable | None = None

    @property
    def shown(self) -> tuple[SampleSection, ...]:
        """The prompts that are told one by one: all of a few, else those that part most, by their number."""
        if len(self.samples) <= SAMPLES_MOST:
            return self.samples
        weight = {p.prompt: (-p.most_texts, -max(s.distinct_traces for s in p.summaries)) for p in self.samples}
        kept = sorted(self.samples, key=lambda p: (weight[p.prompt], p.prompt))[:SAMPLES_MOST]
        return tuple(sorted(kept, key=lambda p: p.prompt))

    @property
    def told(self) -> tuple[Verdict, ...]:
        """The verdicts of what is shown; the headline counts all."""
        shown = {p.prompt for p in self.shown}
        if len(shown) == len(self.samples):
            return self.verdicts
        return tuple(v for v in self.verdicts if v.prompt is None or v.prompt in shown)

    @property
    def facts(self) -> str:
        """When and how much, in one line."""
        run = self.run
        counts = [plural(len(run.rows), "row")] if run.rows else []
        counts += [plural(len(run.completions), "completion")] if run.completions else []
        counts += [plural(len(run.cells), "cell")] if run.cells else []
        state = "complete" if run.complete else "incomplete: it was stopped or is still running"
        return one_line(" · ".join([f"nondet {run.header.command}", run.header.started, *counts, state]), 300)

    @property
    def coverage(self) -> list[tuple[str, str, str, int]]:
        """What `batch_invariant()` counted: (implementation, group, operator, calls)."""
        return coverage_rows(self.run)

    @property
    def coverage_text(self) -> list[str]:
        """A sentence for each implementation that has a coverage."""
        return coverage_text(self.run)

    @property
    def kernel_names(self) -> list[str]:
        """Every kernel that a row saw, by its whole name."""
        return sorted({k for row in self.run.rows for names in row.kernel_sets for k in names})

    @property
    def story(self) -> Story | None:
        """A diagnosis."""
        return story(self.run)

    @property
    def traced(self) -> list[Told]:
        """Traces and replays; an encoder's arms."""
        return [*trace_blocks(self.run), *embed_blocks(self.run)]

    @property
    def counts(self) -> str:
        """ "2 failed, 1 skipped", or nothing."""
        named = [(kind, sum(p.count for p in self.problems if p.kind == kind)) for kind in ("failed", "skipped")]
        return ", ".join(f"{count} {kind}" for kind, count in named if count)


@dataclass(frozen=True)
class Speed:
    """Stock and invariant sampling under one load, end to end.

    Attributes:
        distinct: Distinct completions of all `completions` of invariant's.
    """

    run: str
    load: str
    speed: SpeedRatio
    distinct: int
    completions: int


@dataclass(frozen=True)
class Report:
    """All of it."""

    runs: tuple[RunSection, ...]

    @property
    def speeds(self) -> tuple[Speed, ...]:
        """Tokens per second under each load, where the report has several: one load has it in its own section."""
        entries = []
        for run in self.runs:
            for sample in run.samples[:1]:  # a round serves all prompts, so every prompt has the same speed
                speed, invariant = sample.speed, sample.invariant
                if speed is not None and invariant is not None:
                    load = one_line(_load(run.run.header.plan.get("load")), 200)
                    entries.append(Speed(run.name, load, speed, invariant.distinct_completions, invariant.n))
        return tuple(entries) if len(entries) > 1 else ()

    @property
    def folded(self) -> bool:
        """Whether there is so much that a page shows each part by its title and one sentence."""
        return len(self.runs) > 1 or sum(len(p.families) for r in self.runs for p in r.probes) > 12

    @property
    def operators(self) -> list[str]:
        """What the cases of probes ask of."""
        return sorted({one_line(c.head.operator, 80) for r in self.runs for p in r.probes for c in p.cases})

    @property
    def impls(self) -> list[str]:
        """Implementations of the probes' cases."""
        names = (row.impl for r in self.runs for p in r.probes for c in p.cases for row in c.rows)
        return [one_line(name, 80) for name in sort_impls(names)]

    @property
    def title(self) -> str:
        """The page's title."""
        return one_line("nondet: " + ", ".join(r.name for r in self.runs), 200)


def _load(load: object) -> str:
    """ "60 others, budget 64, ..." in the plan's own words."""
    if not isinstance(load, dict):
        return str(load or "not recorded")
    return ", ".join(f"{key} {'-'.join(map(str, v)) if isinstance(v, list) else v}" for key, v in load.items())


def build(runs: Sequence[Run]) -> Report:
    """Gather everything. Sampled runs are read with the side file beside them.

    Raises:
        UserError: a side file is missing, malformed or another run's.
    """
    return Report(tuple(section(run, *_loaded(run)) for run in runs))


def load_summaries(run: Run) -> list[SampleSummary]:
    """A summary for each implementation and prompt that completed anything.

    Raises:
        UserError: as `build`.
    """
    return _loaded(run)[0]


def _loaded(run: Run) -> tuple[list[SampleSummary], EndpointSection | None]:
    """What follows from the side file, which is read once."""
    if is_varied(run) or not any(c.status == "ok" for c in run.completions):
        return [], endpoint_section(run, {})  # completions of many settings are no one sample: see `axes_table`
    traces, pieces = read_traces(Path(run.source))
    check_traces(run, traces)
    summaries, endpoint = summarize_all(run, traces, pieces), endpoint_section(run, traces)
    return summaries if endpoint is None else [counts_alone(s) for s in summaries], endpoint


def section(run: Run, summaries: Sequence[SampleSummary], endpoint: EndpointSection | None = None) -> RunSection:
    """One run's part of the report."""
    operators = [r for r in run.rows if not is_replay(r)]
    verdicts = judge(run)
    samples = _samples(run, summaries)
    ordered = [s for impl in sort_impls(s.impl for s in summaries) for s in summaries if s.impl == impl]
    rounds: dict[str, set[int]] = {}
    for c in run.completions:
        if c.status == "ok":
            rounds.setdefault(c.impl, set()).add(c.round)
    return RunSection(
        run=run,
        name=one_line(Path(run.source).name.removesuffix(".gz") or "run", 120),
        headline=headline(run, verdicts) + (f"; {endpoint.gap}" if endpoint is not None and endpoint.gap else ""),
        verdicts=tuple(verdicts),
        problems=tuple(problems(run)),
        probes=tuple(probe_sections(operators)),
        samples=tuple(samples),
        # arms of a server are no sample of one thing: what their bounds rest on is in its own section
        overall=()
        if endpoint is not None or len(samples) < 2
        else tuple(overall(ordered, {i: len(r) for i, r in rounds.items()}, subject_unit(run.header.plan))),
        bench=tuple(sections(run)),
        endpoint=endpoint,
        axes=axes_table(run),
    )


def _samples(run: Run, summaries: Sequence[SampleSummary]) -> list[SampleSection]:
    speed = speed_ratio_of(run)
    order = {impl: i for i, impl in enumerate(sort_impls(s.impl for s in summaries))}
    sections = []
    for prompt in sorted({s.prompt for s in summaries}):
        mine = sorted((s for s in summaries if s.prompt == prompt), key=lambda s: order[s.impl])
        name = subject_name(run.header.plan, prompt)
        sections.append(SampleSection(prompt, name, tuple(mine), tuple(family_tests(mine)), replays(run), speed))
    return sections


# A run's part, in order: what it has of its own -> who tells of it, read only where there is something to tell.
_TELLERS = (
    ("story", "traces:story_parts"),
    ("traced", "traces:trace_parts"),
    ("endpoint", "endpoint:endpoint_parts"),
    ("axes", "axes:axes_parts"),
    ("samples", "samples:sample_parts"),
    ("bench", "bench:bench_parts"),
    ("probes", "probes:probe_parts"),
)


def run_blocks(report: Report, number: int) -> list[Block]:
    """All that is told of one run, counted from 1: who it is, what it found, what it has of each kind, its machine."""
    section = report.runs[number - 1]
    made = _head(report, section)
    for field, place in _TELLERS:
        if getattr(section, field):
            module, _, name = place.partition(":")
            parts = getattr(import_module(f"nondet.reports.{module}"), name)(report, section, number)
            if section.story and field != "story":  # evidence, which the story's answers name
                parts = [replace(part, only=part.only.replace(BRIEF, "")) for part in parts]
            made += parts
    return made + _tail(report, section, number)


def _head(report: Report, section: RunSection) -> list[Block]:
    run, machine = section.run, environment_line(section.run.header.environment)
    end = sentence(section.headline)
    verdicts = _verdicts(section)
    made: list[Block] = [
        Heading((Bit(section.name, "code"), ": ", end), level=2, only="m"),
        Heading(Bit(section.name), level=2, only="p"),
        Paragraph(f"{section.name} · {section.facts}", "soft", "bv"),
        Paragraph(section.facts, "soft", "mp"),
        Paragraph(machine or "No environment was recorded.", "soft", "bvm"),
    ]
    if not run.complete:
        made.append(Paragraph("This run did not come to its end: every count is of what was measured so far.", "warn"))
        made.append(Paragraph("Go on with it by repeating its command with `--resume`.", "soft", "p"))
    made.append(Paragraph(end, "headline", "p"))
    if section.verdicts:
        title = f"{plural(len(section.verdicts), 'verdict')}, and what they do not cover"
        made += [verdicts, Details(title, [replace(verdicts, only="p")], opened=not report.folded, only="p")]
    made += [Paragraph(f"Coverage of {line}.", "soft", "mp") for line in section.coverage_text]
    return made


def _verdicts(section: RunSection, only: str = "m") -> Items:
    """A verdict an item, its findings marked in it, with what it does not cover."""
    items: list[Inline] = []
    for v in section.told:
        which = ""
        if len(section.samples) > 1 and v.prompt is not None:
            which = f", {subject_name(section.run.header.plan, v.prompt)}"
        style = "bad" if v.is_fault else "good" if v.finding == Finding.CLEAN else "dull"
        words = re.split(f"({'|'.join(re.escape(f.value) for f in v.findings)})", sentence(v.text))
        marked = tuple(Bit(word, style) if i % 2 else word for i, word in enumerate(words))
        items.append((Bit(v.impl, "code"), f"{which}: ", *marked))
    return Items(items, [v.notes for v in section.told], only)


def _tail(report: Report, section: RunSection, number: int) -> list[Block]:
    made: list[Block] = []
    if section.coverage:
        rows: list[Cells] = [(Bit(i, "code"), g, Bit(n), counted(calls)) for i, g, n, calls in section.coverage[:80]]
        more = [Paragraph(f"and {len(section.coverage) - 80} more.", "soft")] if len(section.coverage) > 80 else []
        said = "which operators were replaced, which stayed stock, which are at risk"
        grid = Table(("impl", "group", "operator", "calls"), rows, ("nowrap", "nowrap", "wide", "num"))
        made.append(Details("Coverage", [grid, *more], f"coverage-{number}", said, "coverage", fold=True, only="mp"))
    if section.problems:
        title = section.counts or plural(len(section.problems), "note")
        styles = {"failed": "bad"}
        rows = [(Bit(p.kind, styles.get(p.kind, "dull")), Bit(p.name), Bit(p.reason)) for p in section.problems]
        grid = Table(("what", "which", "why"), rows, ("", "wide", "wide"))
        few: list[Inline] = [Bit(f"{p.kind}: {p.name}: {p.reason}") for p in section.problems[:_PROBLEMS_MOST]]
        if len(section.problems) > len(few):
            few.append(f"… and {len(section.problems) - len(few)} more")
        made += [Paragraph(title, "strong", BRIEF), Items(few, only=BRIEF)]
        made.append(
            Details(title, [grid], f"problems-{number}", "", "failed, skipped", fold=True, opened=not report.folded)
        )
    made += [Paragraph(f"Coverage of {line}.", "soft", "bv") for line in section.coverage_text]
    if section.kernel_names:
        names = [Items([Bit(name, "code") for name in section.kernel_names])]
        count = plural(len(names[0].items), "kernel")
        made.append(Details("Kernels by their full names", names, f"kernels-{number}", count, only="p"))
    header = section.run.header
    tables = [
        Table((name, "value"), [(label, Bit(value, "code")) for label, value in environment_rows(entries)])
        for name, entries in (("environment", header.environment), ("option", header.plan))
    ]
    title, said = "Environment and options", environment_line(header.environment)
    made.append(Details(title, tables, f"environment-{number}", said, "environment", fold=True, only="mp"))
    return [*made, replace(_verdicts(section), only="v")]  # the last thing on a terminal, where the eye is


def speed_blocks(report: Report) -> list[Block]:
    """Tokens per second by load, where there are several."""
    if not report.speeds:
        return []
    note = f" Against plain `stock`: {HOST_NOTE}." if any(s.speed.host_bound for s in report.speeds) else ""
    rows = [
        (
            Bit(s.run, "code"), Bit(s.load), Bit(s.speed.baseline, "code"), f"{s.speed.stock:.0f}",
            f"{s.speed.invariant:.0f}", f"{s.speed.ratio:.2f}", f"{s.distinct} of {s.completions}",
        )
        for s in report.speeds
    ]  # fmt: skip
    head = ("run", "load", "stock that ran", "stock", "invariant", NAME, "distinct")
    lines = [
        f"{s.run}: {NAME} {s.speed.ratio:.2f} against {s.speed.baseline}{' (host-bound, no cost)' * s.speed.host_bound}"
        for s in report.speeds
    ]
    return [
        *(Paragraph(line, only=BRIEF, room=1) for line in lines),
        Heading("End to end, by load: tokens/s", "speeds", "End to end, by load", level=2),
        Paragraph(f"{DEFINITION.capitalize()}.{note}", "soft"),
        Table(head, rows, ("nowrap", "wide", "nowrap", "num", "num", "num", "num"), unshown=("load",)),
    ]
