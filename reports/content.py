"""What a report says, gathered from run files once and written by every reporter in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nondet.bench.summary import Section, sections
from nondet.registry import PROBES
from nondet.reports.classmap import axis_name
from nondet.reports.headline import FamilyTest, Problem, family_tests, headline, problems
from nondet.reports.story import Story, story
from nondet.reports.trace_text import Block, trace_blocks
from nondet.result import Role, Row, Run, role_of
from nondet.sampling.analysis import summarize
from nondet.sampling.summary import SampleSummary
from nondet.text import one_line
from nondet.traces import check_traces, read_traces
from nondet.verdict import Verdict, is_replay, judge, plural, replays, sort_impls

__all__ = ["CaseGroup", "ProbeSection", "Report", "RunSection", "SampleSection", "Speed", "build", "load_summaries"]

# Rows that come with completions, not from a probe.
_HELP = {
    "sample": "the model's own operators, at the sizes that the completions met",
    "bench": "row 0, or the last query, beside company of every size that was timed",
}


@dataclass(frozen=True)
class CaseGroup:
    """One case under every implementation that it was put to; the rows differ in `impl` and their figures alone."""

    rows: tuple[Row, ...]

    @property
    def head(self) -> Row:
        """The row to read the case's own fields from."""
        return self.rows[0]

    @property
    def parted(self) -> bool:
        """Whether any implementation parted."""
        return any(r.parted for r in self.rows)

    @property
    def axis(self) -> str:
        """What the values are called."""
        return axis_name(self.head)

    @property
    def measured(self) -> tuple[Row, ...]:
        """Rows that hold figures."""
        return tuple(r for r in self.rows if r.measured)


@dataclass(frozen=True)
class ProbeSection:
    """One probe's cases, in the order of the run file; demonstrations come after measurements."""

    name: str
    help: str
    cases: tuple[CaseGroup, ...]

    @property
    def parted(self) -> tuple[CaseGroup, ...]:
        """Cases in which an implementation parted."""
        return tuple(c for c in self.cases if c.parted)

    @property
    def clean(self) -> tuple[CaseGroup, ...]:
        """Cases that were measured and in which none did. What was not measured at all is a problem, not a result."""
        return tuple(c for c in self.cases if c.measured and not c.parted)

    @property
    def summary(self) -> str:
        """ "stock parted in 3 of 8 cases, invariant in 0 of 8"."""
        rows = [r for c in self.cases for r in c.measured]
        counts = []
        for impl in sort_impls(r.impl for r in rows):
            mine = [r for r in rows if r.impl == impl]
            counts.append(f"{impl} parted in {sum(r.parted for r in mine)} of {plural(len(mine), 'case')}")
        return ", ".join(counts) or "nothing was measured"


@dataclass(frozen=True)
class SampleSection:
    """One prompt under every implementation, stock first.

    Attributes:
        replays: Implementation -> the rows of rounds that were run again.
    """

    prompt: int
    summaries: tuple[SampleSummary, ...]
    families: tuple[FamilyTest, ...]
    replays: dict[str, list[Row]]

    @property
    def main(self) -> tuple[SampleSummary, ...]:
        """What the report is about: everything but the replacements of single families, if there is anything else."""
        return tuple(s for s in self.summaries if role_of(s.impl) != Role.PART) or self.summaries

    @property
    def partial(self) -> tuple[SampleSummary, ...]:
        """Replacements of single families, where they are beside the main ones."""
        return tuple(s for s in self.summaries if s not in self.main)

    @property
    def prompt_text(self) -> str:
        """The prompt."""
        return self.summaries[0].prompt_text

    @property
    def invariant(self) -> SampleSummary | None:
        """The summary of the whole invariant implementation."""
        return next((s for s in self.summaries if role_of(s.impl) == Role.INVARIANT), None)

    @property
    def best_stock(self) -> SampleSummary | None:
        """The fastest of stock and its variants, stock-no-cudnn say: what a speed is compared with."""
        stock = [s for s in self.summaries if role_of(s.impl) in (Role.STOCK, Role.BACKEND)]
        return max(stock, key=lambda s: s.tokens_per_second, default=None)

    @property
    def speed_ratio(self) -> float | None:
        """Invariant's tokens per second over the best stock's; None unless both ran."""
        stock, invariant = self.best_stock, self.invariant
        if stock is None or invariant is None or not stock.tokens_per_second > 0:
            return None
        return invariant.tokens_per_second / stock.tokens_per_second


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
    def story(self) -> Story | None:
        """A diagnosis."""
        return story(self.run)

    @property
    def traced(self) -> list[Block]:
        """Traces and replays."""
        return trace_blocks(self.run)

    @property
    def counts(self) -> str:
        """ "2 failed, 1 skipped", or nothing."""
        named = [(kind, sum(p.count for p in self.problems if p.kind == kind)) for kind in ("failed", "skipped")]
        return ", ".join(f"{count} {kind}" for kind, count in named if count)


@dataclass(frozen=True)
class Speed:
    """Stock and invariant sampling under one load, end to end.

    Attributes:
        baseline: The stock implementation that is meant, the fastest that ran.
        completions: Distinct completions of all, invariant's.
    """

    run: str
    load: str
    baseline: str
    stock: float
    invariant: float
    distinct: int
    completions: int

    @property
    def ratio(self) -> float:
        """Invariant over stock."""
        return self.invariant / self.stock


@dataclass(frozen=True)
class Report:
    """All of it."""

    runs: tuple[RunSection, ...]

    @property
    def speeds(self) -> tuple[Speed, ...]:
        """Tokens per second under each load, where the report has several: one load has it in its own section."""
        entries = []
        for run in self.runs:
            for sample in run.samples:
                stock, invariant = sample.best_stock, sample.invariant
                if sample.speed_ratio is not None and stock is not None and invariant is not None:
                    load = one_line(_load(run.run.header.plan.get("load")), 200)
                    speeds = (stock.tokens_per_second, invariant.tokens_per_second)
                    entries.append(
                        Speed(run.name, load, stock.impl, *speeds, invariant.distinct_completions, invariant.n)
                    )
        return tuple(entries) if len(entries) > 1 else ()

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
        UserError: a sampled run's side file is missing, malformed or another run's.
    """
    return Report(tuple(section(run, load_summaries(run)) for run in runs))


def load_summaries(run: Run) -> list[SampleSummary]:
    """A summary for each implementation and prompt that completed anything.

    Raises:
        UserError: as `build`.
    """
    wanted = dict.fromkeys((c.impl, c.prompt) for c in run.completions if c.status == "ok")
    if not wanted:
        return []
    traces, pieces = read_traces(Path(run.source))
    check_traces(run, traces)
    return [summarize(run, traces, pieces, impl, prompt) for impl, prompt in wanted]


def section(run: Run, summaries: Sequence[SampleSummary]) -> RunSection:
    """One run's part of the report."""
    operators = [r for r in run.rows if not is_replay(r)]
    verdicts = judge(run)
    return RunSection(
        run=run,
        name=one_line(Path(run.source).name or "run", 120),
        headline=headline(run, verdicts),
        verdicts=tuple(verdicts),
        problems=tuple(problems(run)),
        probes=tuple(_probes(operators)),
        samples=tuple(_samples(summaries, replays(run))),
        bench=tuple(sections(run)),
    )


def _probes(rows: Sequence[Row]) -> list[ProbeSection]:
    grouped: dict[str, dict[tuple[str, str, str], list[Row]]] = {}
    for row in rows:
        grouped.setdefault(row.probe, {}).setdefault((row.case, row.dtype, row.device), []).append(row)
    sections = [
        ProbeSection(
            name=name,
            help=_HELP.get(name, PROBES[name][1] if name in PROBES else ""),
            cases=tuple(CaseGroup(tuple(_by_impl(rows_of_case))) for rows_of_case in cases.values()),
        )
        for name, cases in grouped.items()
    ]
    return sorted(sections, key=lambda s: all(c.head.demonstration for c in s.cases))


def _by_impl(rows: list[Row]) -> list[Row]:
    order = {impl: i for i, impl in enumerate(sort_impls(r.impl for r in rows))}
    return sorted(rows, key=lambda r: order[r.impl])


def _samples(summaries: Sequence[SampleSummary], again: dict[str, list[Row]]) -> list[SampleSection]:
    order = {impl: i for i, impl in enumerate(sort_impls(s.impl for s in summaries))}
    sections = []
    for prompt in dict.fromkeys(s.prompt for s in summaries):
        mine = sorted((s for s in summaries if s.prompt == prompt), key=lambda s: order[s.impl])
        sections.append(SampleSection(prompt, tuple(mine), tuple(family_tests(mine)), again))
    return sections
