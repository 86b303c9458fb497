"""The content of a report, gathered from run files once and written by every reporter in its own way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nondet.bench.summary import failures, sections
from nondet.core.records import Role, Row, Run, Status
from nondet.core.traces import Trace, check_traces, read_traces
from nondet.diagnose.verdict import diagnosed_effect, traced_effect
from nondet.errors import one_line
from nondet.reports.document import ALL, BRIEF, VERBOSE, Bit, Block, Details, Heading, Inline, Items, Paragraph, Table
from nondet.reports.text import counted, environment_line, environment_rows, findings_text, sentence
from nondet.sampling.analysis import SampleSummary, coverage_rows, coverage_text, summarize_all
from nondet.verdict.findings import Effect, Finding, Verdict, plural, sort_impls, subject_name, subject_unit
from nondet.verdict.gate import judge
from nondet.verdict.samples import is_replay, is_varied
from nondet.verdict.served import is_endpoint
from nondet.verdict.wording import phrase

if TYPE_CHECKING:
    from nondet.reports.axes import AxesTable
    from nondet.reports.endpoint import EndpointSection
    from nondet.reports.probes import ProbeSection
    from nondet.reports.samples import Samples, SampleSection
    from nondet.reports.traces import Story

STOCK = (Role.STOCK, Role.BACKEND)
INCOMPLETE = "This run did not come to its end: every count is of what was measured so far."
_TITLES = {"diagnose": "Diagnosis", "sample": "Completions", "probe": "Operators", "bench": "Speed", "embed": "Vectors"}
_TITLES |= {"certify": "Certificate", "rl": "Training", "vllm": "Layers under vLLM", "mismatch": "Sampler and trainer"}
_PROBLEMS_MOST = 2  # of a terminal's 25 lines
_CLEAN_MOST = 80  # characters of a fix's counts in a page's head


def _load(place: str) -> Callable[..., Any]:
    """A function of a section, "traces:story": imported only where a run has that section."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"nondet.reports.{module}"), name)
    return function


@dataclass(frozen=True)
class Problem:
    """A case or request without a figure, or with one that needs a warning; `count` rows or requests have it."""

    kind: str
    name: str
    reason: str
    count: int = 1


def headline(run: Run, verdicts: Sequence[Verdict], *, brief: bool = False) -> str:
    """The finding in one sentence, without its full stop: the same at the head of every report. `brief`: a page's head,
    which leaves the bounds of what is no default to the verdicts below it."""
    return ("" if run.complete else "incomplete run, so far: ") + _found(run, verdicts, brief)


def _found(run: Run, verdicts: Sequence[Verdict], brief: bool) -> str:
    own: str = ""
    if run.cells:
        own = _load("bench:bench_headline")(run)
    elif run.steps:
        own = _load("traces:story_headline")(_load("traces:story")(run))
    elif _traced(run):
        own = _load("traces:trace_headline")(run)
    if own:
        return own
    if not verdicts:
        return "nothing was compared" if run.rows or run.completions else "nothing was measured"
    shown = _worth_a_headline(verdicts)
    if len({v.prompt for v in verdicts if v.prompt is not None}) > 1:
        return "; ".join(
            _over_prompts(impl, [v for v in shown if v.impl == impl], subject_unit(run.header.plan))
            for impl in sort_impls(v.impl for v in shown)
        )
    return findings_text(shown, 3 if brief else 5, partial(_clauses, brief=brief))


def _clauses(verdict: Verdict, *, brief: bool) -> str:
    """Without what an axis may change, which its table shows. `brief`: for a page's head, which has two lines."""
    short = brief and verdict.role in (Role.INVARIANT, Role.PART)
    clauses = [clause for clause in (verdict.counts if short else verdict.clauses) if clause.code != "axis-apart"]
    if brief:  # which axes and, of a backend, what else was found stand below
        clauses = [replace(clause, numbers={**clause.numbers, "which": None}) for clause in clauses]
        clauses = clauses[:1] if verdict.role == Role.BACKEND else clauses
    text = phrase(clauses, brief=True)
    return str(verdict.finding) if short and len(text) > _CLEAN_MOST else text


def _traced(run: Run) -> bool:
    traced = (run.trace_verdicts, run.controls, run.culprits, run.substitutions)
    return any((*traced, run.replayed, run.embed_passes, run.layer_standings))


def _worth_a_headline(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The completions' verdicts, where there are any; the operators' verdicts are shown below. Without partial
    replacements, which have a table, and sums in another order, which are not a finding."""
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
    hits, total = Counter(v.finding for v in verdicts), plural(len(verdicts), unit)
    return f"{impl}: {', '.join(f'{finding} on {hits[finding]} of {total}' for finding in Finding if hits[finding])}"


def problems(run: Run) -> list[Problem]:
    """Every failed, skipped and wrong row by name, every note, and the failed requests by reason."""
    kinds = {Status.ERROR: "failed", Status.SKIPPED: "skipped", Status.WRONG: "wrong"}
    listed = [
        Problem(kind, _row_name(r), r.reason or "no reason recorded")
        for status, kind in kinds.items()
        for r in run.rows
        if r.status == status
    ]
    failed = Counter((c.impl, c.reason or "no reason recorded") for c in run.completions if c.status != "ok")
    listed += [
        Problem("failed", f"{plural(count, 'request')} ({impl})", reason, count)
        for (impl, reason), count in failed.items()
    ]
    if run.cells:
        untimed = failures(sections(run))
        listed += [Problem(kinds[status], which, reason) for status, which, reason in untimed]
    listed += [
        Problem("failed", f"{s.impl}, seed {s.seed}, step {s.step}", s.reason)
        for s in run.training_steps
        if s.status != "ok"
    ]
    listed += [Problem("failed", f"{r.impl}, {r.name}", r.reason) for r in run.mismatch_rollouts if r.status != "ok"]
    noted = [r for r in run.rows if r.reason and r.status not in kinds]
    return listed + [Problem("note", _row_name(r), r.reason) for r in noted]


def _row_name(row: Row) -> str:
    return f"{row.probe}: {row.case}, {row.dtype}, {row.impl}"


def _gravest(verdicts: Sequence[Verdict]) -> Effect:
    """The gravest effect of some. A wrong result of a backend that stock does not take by default is not stock's: it
    does not count where stock has an answer."""
    answered = any(v.role == Role.STOCK and v.effect.is_answer for v in verdicts)
    effects = [v.effect for v in verdicts if not (answered and v.role == Role.BACKEND and v.effect is Effect.WRONG)]
    return min(effects, key=lambda effect: effect.rank)


@dataclass(frozen=True)
class RunSection:
    """One run file: what it has of each kind of record, gathered where it has any."""

    run: Run
    name: str
    headline: str
    answer: str
    verdicts: Sequence[Verdict]
    problems: Sequence[Problem]
    sampled: Samples | None = None
    endpoint: EndpointSection | None = None
    axes: AxesTable | None = None

    @property
    def defaults(self) -> list[Verdict]:
        """The verdicts on what a user has by default: stock, else what is no fix, else a fix that failed; of a trainer,
        all arms."""
        if self.is_of_trainer:
            return [*self.verdicts]
        stock = [v for v in self.verdicts if v.role in STOCK]
        others = [v for v in self.verdicts if v.role not in (Role.INVARIANT, Role.PART)]
        return stock or others or [v for v in self.verdicts if v.is_fault]

    @cached_property
    def effect(self) -> Effect | None:
        """What the run shows to change by default; None where it holds neither a verdict nor times. The model's own
        answer, where there is one, stands before what was found of operators by themselves."""
        run = self.run
        if self.story is not None:
            return diagnosed_effect(run, self.story.finding)
        of_model = [v for v in self.defaults if v.prompt is not None]
        effects = [_gravest(of_model)] if of_model else []
        effects += [traced_effect(run, v) for v in run.trace_verdicts[-1:]]
        if not any(effect.is_answer for effect in effects):
            effects += [_gravest(self.defaults)] if self.defaults else []
        none = Effect.NO_STOCK if self.verdicts else Effect.SPEED if run.cells else None
        return min(effects, key=lambda effect: effect.rank, default=none)

    @property
    def is_of_model(self) -> bool:
        """Whether it tested a whole model or a server, not operators by themselves."""
        run = self.run
        sampled = run.completions or run.steps or run.trace_verdicts or run.neighbours
        return bool(sampled or self.is_of_trainer)

    @property
    def is_of_trainer(self) -> bool:
        """Whether it compares a sampler with a trainer, once or over steps of training."""
        return bool(self.run.training_steps or self.run.mismatch_rollouts)

    @cached_property
    def story(self) -> Story | None:
        """A diagnosis."""
        return _load("traces:story")(self.run) if self.run.steps else None

    @cached_property
    def probes(self) -> Sequence[ProbeSection]:
        """The rows, by probe."""
        rows = [r for r in self.run.rows if not is_replay(r)]
        return _load("probes:probe_sections")(rows) if rows else ()

    @property
    def samples(self) -> Sequence[SampleSection]:
        """The prompts that completed anything."""
        return self.sampled.prompts if self.sampled else ()

    @property
    def shown_verdicts(self) -> Sequence[Verdict]:
        """The verdicts of what is shown; the headline counts all."""
        shown = {p.prompt for p in self.sampled.shown} if self.sampled else set()
        if len(shown) == len(self.samples):
            return self.verdicts
        return [v for v in self.verdicts if v.prompt is None or v.prompt in shown]

    @property
    def facts(self) -> str:
        """When and how much, in one line."""
        run = self.run
        held: dict[str, Sequence[Any]] = {"row": run.rows, "completion": run.completions, "cell": run.cells}
        held |= {"step": run.training_steps, "rollout": run.mismatch_rollouts}
        counts = [plural(len(records), noun) for noun, records in held.items() if records]
        state = "complete" if run.complete else "incomplete: it was stopped or is still running"
        return one_line(" · ".join([f"nondet {run.header.command}", run.header.started, *counts, state]), 300)

    @property
    def title(self) -> str:
        """ "Diagnosis of Qwen3 on NVIDIA H200": what was done to what, where."""
        header = self.run.header
        model = header.plan.get("model")
        names = [model.get("class"), model.get("name")] if isinstance(model, dict) else [model]
        of = next((str(name).rpartition("/")[2] for name in names if name), "")
        of = "a server" if self.endpoint is not None else of.removesuffix("ForCausalLM").removesuffix("Model")
        machine = header.environment.get("gpu") or header.environment.get("cpu")
        # a server's machine is not this one
        on = str(machine).partition(" (family")[0] if machine and self.endpoint is None else ""
        done = _TITLES.get(header.command, header.command.capitalize())
        return one_line(f"{done}{f' of {of}' * bool(of)}{f' on {on}' * bool(on)}", 120)

    @property
    def counts(self) -> str:
        """ "2 failed, 1 skipped", or nothing."""
        named = [(kind, sum(p.count for p in self.problems if p.kind == kind)) for kind in ("failed", "skipped")]
        return ", ".join(f"{count} {kind}" for kind, count in named if count)


@dataclass(frozen=True)
class Report:
    """All runs of a report."""

    runs: tuple[RunSection, ...]

    @property
    def folded(self) -> bool:
        """Whether the report is so long that a page shows each part by its title and one sentence."""
        return len(self.runs) > 1 or sum(len(p.families) for r in self.runs for p in r.probes) > 12

    @property
    def operators(self) -> list[str]:
        """The operators of the probes' cases."""
        return sorted({one_line(c.head.operator, 80) for r in self.runs for p in r.probes for c in p.cases})

    @property
    def impls(self) -> list[str]:
        """Implementations of the probes' cases."""
        names = (row.impl for r in self.runs for p in r.probes for c in p.cases for row in c.rows)
        return [one_line(name, 80) for name in sort_impls(names)]

    @property
    def title(self) -> str:
        """The page's title."""
        return one_line("; ".join(dict.fromkeys(r.title for r in self.runs)) or "nondet", 200)


def build(runs: Sequence[Run]) -> Report:
    """Gather everything. Side files are read from next to their runs. Raises UserError: a side file is missing,
    malformed or another run's."""
    return Report(tuple(_read(run) for run in runs))


def side_file(run: Run) -> tuple[dict[str, Trace], dict[int, str]]:
    """Traces and tokens' texts, of a run that has a side file."""
    if not any(c.status == "ok" for c in run.completions):
        return {}, {}
    traces, pieces = read_traces(Path(run.source))
    check_traces(run, traces)
    return traces, pieces


def _read(run: Run) -> RunSection:
    if is_varied(run):  # completions of many settings are not one sample
        axes = _load("axes:axes_table")(run, side_file(run)[0]) if run.axis_values else None
        return section(run, [], axes=axes)
    traces, pieces = side_file(run)
    summaries = summarize_all(run, traces, pieces) if traces else []
    if not is_endpoint(run):
        return section(run, summaries)
    alone = [_load("endpoint:counts_alone")(s) for s in summaries]
    return section(run, alone, endpoint=_load("endpoint:endpoint_section")(run, traces))


def section(
    run: Run,
    summaries: Sequence[SampleSummary],
    *,
    endpoint: EndpointSection | None = None,
    axes: AxesTable | None = None,
) -> RunSection:
    """One run's part of the report."""
    verdicts = judge(run)
    gap = f"; {endpoint.gap}" if endpoint is not None and endpoint.gap else ""
    return RunSection(
        run=run,
        name=one_line(Path(run.source).name.removesuffix(".gz") or "run", 120),
        headline=headline(run, verdicts) + gap,
        answer=one_line(headline(run, verdicts, brief=True) + gap, 900),
        verdicts=tuple(verdicts),
        problems=tuple(problems(run)),
        sampled=_load("samples:samples_of")(run, summaries, served=endpoint is not None) if summaries else None,
        endpoint=endpoint,
        axes=axes,
    )


def run_blocks(report: Report, number: int) -> list[Block]:
    """All that is shown of one run, counted from 1: who it is, what it found, what it has of each kind, its machine."""
    section = report.runs[number - 1]
    run, made = section.run, _head(report, section)
    held: dict[str, Any] = {  # what writes each kind, imported only where a run has it
        "traces:story_blocks": section.story,
        "traces:trace_blocks": run if _traced(run) else None,
        "endpoint:endpoint_blocks": section.endpoint,
        "axes:axes_blocks": section.axes,
        "samples:sample_blocks": section.sampled,
        "training:training_blocks": run if run.training_steps else None,
        "mismatch:mismatch_blocks": run if run.mismatch_rollouts else None,
        "bench:bench_blocks": run if run.cells else None,
        "probes:probe_blocks": section.probes,
    }
    for place, told in held.items():
        if told:
            parts: list[Block] = _load(place)(told, number, not report.folded)
            if section.story and told is not section.story:  # evidence, which the story's answers name
                parts = [_not_brief(part) for part in parts]
            made += parts
    return made + _tail(report, section, number)


def _not_brief(block: Block) -> Block:
    """The block and its contents, left out of a terminal's 25 lines."""
    if isinstance(block, Details):
        block = replace(block, blocks=[_not_brief(inner) for inner in block.blocks])
    return replace(block, only=block.only.replace(BRIEF, ""))


def _head(report: Report, section: RunSection) -> list[Block]:
    run, machine = section.run, _load("endpoint:machine_line")(section.run)
    made: list[Block] = [
        Heading(Bit(section.title), level=2, only="mp"),
        Paragraph((Bit(section.name, "code"), f" · {section.facts}"), "soft", ALL, 1),
        Paragraph(machine or "No environment was recorded.", "soft", "bvm", 1),
    ]
    if not run.complete:
        made.append(Paragraph(INCOMPLETE, "warn"))
        made.append(Paragraph("Go on with it by repeating its command with `--resume`.", "soft", "p"))
    if len(report.runs) > 1:  # of a lone run the first screen shows it
        made.append(Paragraph(sentence(section.headline), "headline", "mp"))
    if section.verdicts:
        title = f"{plural(len(section.verdicts), 'verdict')}, and what they do not cover"
        made.append(Details(title, [_verdicts(section)], f"verdicts-{report.runs.index(section) + 1}"))
    return made


def _verdicts(section: RunSection) -> Items:
    items: list[Inline] = []
    for v in section.shown_verdicts:
        which = ""
        if len(section.samples) > 1 and v.prompt is not None:
            which = f", {subject_name(section.run.header.plan, v.prompt)}"
        style = "bad" if v.is_fault else "good" if v.finding == Finding.CLEAN else "dull"
        parts = re.split(f"({'|'.join(re.escape(f.value) for f in v.findings)})", sentence(v.text))
        marked = tuple(Bit(part, style) if i % 2 else part for i, part in enumerate(parts))
        items.append((Bit(v.impl, "code"), f"{which}: ", *marked))
    return Items(items, [v.notes for v in section.shown_verdicts])


def _tail(report: Report, section: RunSection, number: int) -> list[Block]:
    run, made = section.run, list[Block]()
    coverage = coverage_rows(run)
    if coverage:
        rows = [(Bit(impl, "code"), group, Bit(operator), counted(calls)) for impl, group, operator, calls in coverage]
        table = Table(("impl", "group", "operator", "calls"), rows, ("nowrap", "nowrap", "wide", "num"))
        said, place = "; ".join(coverage_text(run)) or "which operators were replaced", f"coverage-{number}"
        made.append(Details("Coverage", [table], place, said, "coverage", fold=True, only="mp"))
    if section.problems:
        title = section.counts or plural(len(section.problems), "note")
        named = [
            (Bit(p.kind, "bad" if p.kind == "failed" else "dull"), Bit(p.name), Bit(p.reason)) for p in section.problems
        ]
        table = Table(("what", "which", "why"), named, ("", "wide", "wide"), brief=_PROBLEMS_MOST, only=ALL)
        place, opened = f"problems-{number}", not report.folded
        made.append(Details(title, [table], place, "", "failed, skipped", fold=True, opened=opened, only=ALL))
    made += [Paragraph(f"Coverage of {line}.", "soft", BRIEF + VERBOSE) for line in coverage_text(run)]
    names = sorted({k for row in run.rows for kernels in row.kernel_sets for k in kernels})
    if names:
        listed, place = Items([Bit(name, "code") for name in names]), f"kernels-{number}"
        made.append(Details("Kernels by their full names", [listed], place, plural(len(names), "kernel"), only="p"))
    environment = run.header.environment
    tables = [
        Table((name, "value"), [(label, Bit(value, "code")) for label, value in environment_rows(entries)])
        for name, entries in (("environment", environment), ("option", run.header.plan))
    ]
    title, said = "Environment and options", environment_line(environment)
    return [*made, Details(title, tables, f"environment-{number}", said, "environment", fold=True, only="mp")]
