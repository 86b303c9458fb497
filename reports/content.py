"""What a report says, gathered from run files once and written by every reporter in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nondet.bench.summary import Section, sections
from nondet.core.records import Role, Row, Run, role_of
from nondet.core.traces import check_traces, read_traces
from nondet.errors import one_line
from nondet.reports.axes_text import AxesTable, axes_table
from nondet.reports.cases import CaseFamily, CaseGroup, ProbeSection, probe_sections
from nondet.reports.embed_text import embed_blocks
from nondet.reports.endpoint import EndpointSection, counts_alone, endpoint_section
from nondet.reports.headline import FamilyTest, Problem, family_tests, headline, problems
from nondet.reports.story import Story, story
from nondet.reports.trace_text import Block, trace_blocks
from nondet.sampling.analysis import (
    Overall,
    SampleSummary,
    SpeedRatio,
    coverage_rows,
    coverage_text,
    overall,
    speed_ratio_of,
    summarize_all,
)
from nondet.verdict.findings import Verdict, plural, sort_impls, subject_name, subject_unit
from nondet.verdict.gate import judge
from nondet.verdict.samples import is_replay, is_varied, replays

__all__ = [
    "CaseFamily",
    "CaseGroup",
    "ProbeSection",
    "Report",
    "RunSection",
    "SampleSection",
    "Speed",
    "build",
    "load_summaries",
]

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
    def traced(self) -> list[Block]:
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
