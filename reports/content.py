"""The content of a report, gathered from run files once and written by every reporter in its own way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from msgspec import structs

from nondet.bench.summary import failures, sections
from nondet.core.records import Role, Run, Status
from nondet.core.traces import Trace, check_traces, read_traces
from nondet.diagnose.verdict import diagnosed_effect, traced_effect
from nondet.errors import one_line
from nondet.reports.axes import axes_blocks, axes_of
from nondet.reports.bench import bench_blocks, bench_headline
from nondet.reports.document import ALL, BRIEF, Bit, Block, Details, Heading, Inline, Items, Paragraph, Table
from nondet.reports.endpoint import Servers, endpoint_blocks, machine_line
from nondet.reports.fingerprint import fingerprint_blocks, fingerprint_headline
from nondet.reports.mismatch import mismatch_blocks, training_blocks
from nondet.reports.probes import probe_blocks, probes_of
from nondet.reports.samples import Samples, sample_blocks
from nondet.reports.text import counted, environment_line, environment_rows, findings_text, sentence
from nondet.reports.traces import Story, story_blocks, story_headline, trace_blocks, trace_headline
from nondet.sampling.analysis import coverage_rows, coverage_text, summarize_all
from nondet.verdict.findings import Effect, Finding, Verdict, plural, sort_impls, subject_name, subject_unit
from nondet.verdict.gate import judge
from nondet.verdict.samples import is_replay, is_varied
from nondet.verdict.served import is_endpoint
from nondet.verdict.size import size_of_samples
from nondet.verdict.wording import phrase, words

STOCK = (Role.STOCK, Role.BACKEND)
INCOMPLETE = "This run did not come to its end: every count is of what was measured so far."
_TITLES = {"diagnose": "Diagnosis", "sample": "Completions", "probe": "Operators", "bench": "Speed", "embed": "Vectors"}
_TITLES |= {"certify": "Certificate", "rl": "Training", "mismatch": "Sampler and trainer"}
_TITLES |= {"vllm": "Layers under vLLM", "sglang": "Layers under SGLang"}
_PROBLEMS_MOST = 2  # of a terminal's 25 lines
_CLEAN_MOST = 80  # characters of a fix's counts in a page's head
# Names that runs record, which resuming and comparing match, and sentences of earlier versions -> what a report prints.
_PLAIN = {
    r"\b(each )?alone\b": "one at a time",
    r"\bat every place\b": "at every position",
    r"\bat places\b": "at several positions",
    r"\bin company of\b": "beside",
    r"\bthe asked rows\b": "the compared rows",
    r"\basked of its counters: (.* can) then be held against\b": r"its counters show it: \1 be compared with",
    r"\bthe (.*) are not told\b": r"answers do not include the \1",
    r"\bto hold against\b": "to compare with",
}
_RECORDED = {"rows": ("case", "values"), "contract": ("evidence",), "embed_passes": ("arm",), "neighbours": ("arm",)}


@dataclass(frozen=True)
class Problem:
    """A case or request without a figure, or with one that needs a warning; `count` rows or requests have it."""

    kind: str
    name: str
    reason: str
    count: int = 1


def _plain(value: Any) -> Any:
    for recorded, said in _PLAIN.items() if isinstance(value, str) else ():
        value = re.sub(recorded, said, value)
    return [*map(_plain, value)] if isinstance(value, list) else value


def _in_plain_words(run: Run) -> Run:
    """The run with its own names as reports print them; a user's, of `nondet.check`, stay."""
    changed = {}
    for kind, fields in _RECORDED.items():
        own = [(r, fields if getattr(r, "probe", "") != "check" else ()) for r in getattr(run, kind)]
        changed[kind] = [structs.replace(r, **{field: _plain(getattr(r, field)) for field in of}) for r, of in own]
    return structs.replace(run, **changed)


def headline(run: Run, verdicts: Sequence[Verdict], *, brief: bool = False) -> str:
    """The finding in one sentence, without its full stop: the same at the head of every report. `brief`: a page's head,
    which leaves the bounds of what is no default to the verdicts below it."""
    return ("" if run.complete else "incomplete run, so far: ") + _found(run, verdicts, brief)


def _found(run: Run, verdicts: Sequence[Verdict], brief: bool) -> str:
    if run.cells:
        return bench_headline(run)
    if run.steps:
        return story_headline(Story(run))
    if run.fingerprints:
        return fingerprint_headline(run)
    if own := trace_headline(run):
        return own
    if not verdicts:
        return "nothing was compared" if run.rows or run.completions else "nothing was measured"
    shown = _worth_a_headline(verdicts)
    if len({v.prompt for v in verdicts if v.prompt is not None}) > 1:
        unit, parts = subject_unit(run.header.plan), []
        for impl in sort_impls(v.impl for v in shown):
            hits = Counter(v.finding for v in shown if v.impl == impl)
            total = plural(hits.total(), unit)
            parts.append(f"{impl}: {', '.join(f'{f} on {hits[f]} of {total}' for f in Finding if hits[f])}")
        wrong = [words(v.counts[0]) for v in shown if v.finding == Finding.WRONG]
        return "; ".join([*_once(shown), *wrong[:1], *parts])
    return "; ".join([*_once(shown), findings_text(shown, 3 if brief else 5, partial(_clauses, brief=brief))])


def _once(verdicts: Sequence[Verdict]) -> list[str]:
    """That only the very first answer of a server differs, where nothing else does."""
    doubts = [r.numbers for v in verdicts for r in v.reasons if r.code == "doubt"]
    first = [d["why"] for d in doubts if d["why"].code == "first-alone"]
    return [words(why).partition(". ")[0] for why in first[:1] if {d["arm"] for d in doubts} == {"first"}]


def _clauses(verdict: Verdict, *, brief: bool) -> str:
    """Without what an axis may change, which its table shows. `brief`: for a page's head, which has two lines."""
    short = brief and verdict.role in (Role.INVARIANT, Role.PART)
    clauses = [clause for clause in (verdict.counts if short else verdict.clauses) if clause.code != "axis-apart"]
    if brief:  # which axes and, of a backend, what else was found stand below
        clauses = [replace(clause, numbers={**clause.numbers, "which": None}) for clause in clauses]
        clauses = clauses[:1] if verdict.role == Role.BACKEND else clauses
    text = phrase(clauses, brief=True)
    return str(verdict.finding) if short and len(text) > _CLEAN_MOST else text


def _worth_a_headline(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The completions' verdicts, where there are any; the operators' verdicts are shown below. Without partial
    replacements, which have a table, sums in another order, which are not a finding, and those of stock's backends that
    find nothing that stock's own does not ("stock-seeded" is another draw, and no backend)."""
    sampled = [v for v in verdicts if v.prompt is not None]
    main = [v for v in sampled or verdicts if v.role != Role.PART and v.finding != Finding.ORDER]
    known = next((set(v.findings) for v in main if v.role == Role.STOCK), None)

    def adds(v: Verdict) -> bool:
        of_stock = known is not None and v.role == Role.BACKEND and v.impl != "stock-seeded"
        return not of_stock or (v.is_fault and not set(v.findings) <= (known or set()))

    return [v for v in main if adds(v)] or sampled or list(verdicts)


def problems(run: Run) -> list[Problem]:
    """Every failed, skipped and wrong row by name, every note, and the failed requests by reason; failures first."""
    kinds: dict[str, str] = {Status.ERROR: "failed", Status.SKIPPED: "skipped", Status.WRONG: "wrong"}
    listed = []
    for row in run.rows:
        if row.status in kinds or row.reason:
            name = f"{row.probe}: {row.case}, {row.dtype}, {row.impl}"
            listed.append(Problem(kinds.get(row.status, "note"), name, row.reason or "no reason recorded"))
    lost = Counter((c.impl, c.reason or "no reason recorded") for c in run.completions if c.status != "ok")
    listed += [Problem("failed", f"{plural(n, 'request')} ({impl})", why, n) for (impl, why), n in lost.items()]
    if run.cells:
        listed += [Problem(kinds[status], which, why) for status, which, why in failures(sections(run))]
    steps = [s for s in run.training_steps if s.status != "ok"]
    listed += [Problem("failed", f"{s.impl}, seed {s.seed}, step {s.step}", s.reason) for s in steps]
    listed += [Problem("failed", f"{r.impl}, {r.name}", r.reason) for r in run.mismatch_rollouts if r.status != "ok"]
    return sorted(listed, key=lambda p: [*kinds.values(), "note"].index(p.kind))


def _gravest(verdicts: Sequence[Verdict]) -> Effect:
    """The gravest effect of some. A wrong result of a backend that stock does not take by default is not stock's: it
    does not count where stock has an answer."""
    answered = any(v.role == Role.STOCK and v.effect.is_answer for v in verdicts)
    effects = [v.effect for v in verdicts if not (answered and v.role == Role.BACKEND and v.effect is Effect.WRONG)]
    return min(effects, key=lambda effect: effect.rank)


class RunSection:
    """One run file: what it has of each kind of record, gathered where it has any. Raises UserError: its side file is
    missing, malformed or another run's."""

    def __init__(self, run: Run) -> None:
        run = _in_plain_words(run)
        self.run, self.verdicts, self.problems = run, tuple(judge(run)), problems(run)
        self.name = one_line(Path(run.source).name.removesuffix(".gz") or "run", 120)
        traces, pieces = dict[str, Trace](), dict[int, str]()
        if any(c.status == "ok" for c in run.completions):
            traces, pieces = read_traces(Path(run.source))
            check_traces(run, traces)
        self.axes = axes_of(run, traces) if run.axis_values else {}
        self.endpoint = Servers(run, traces) if is_endpoint(run) else None
        # completions of many settings are not one sample
        summaries = summarize_all(run, traces, pieces) if traces and not is_varied(run) else []
        self.sampled = Samples(run, summaries) if summaries else None
        self.samples = self.sampled.prompts if self.sampled else []  # the prompts that completed anything
        self.story = Story(run) if run.steps else None  # of a diagnosis
        self.probes = probes_of([r for r in run.rows if not is_replay(r)])
        full, brief = headline(run, self.verdicts), headline(run, self.verdicts, brief=True)
        size = self.endpoint.size if self.endpoint else size_of_samples(run, summaries)
        self.headline, answer = (size.beside(full), size.beside(brief, brief=True)) if size else (full, brief)
        self.answer = one_line(answer, 900)  # for a page's head
        # whether it compares a sampler with a trainer, once or over steps of training
        self.is_of_trainer = bool(run.training_steps or run.mismatch_rollouts)
        # whether it tested a whole model or a server, not operators by themselves
        tested = run.completions or run.steps or run.trace_verdicts or run.neighbours
        self.is_of_model = bool(tested or self.is_of_trainer)

    @property
    def defaults(self) -> list[Verdict]:
        """The verdicts on what a user has: stock, else what is no fix, else a fix that failed; of a trainer, all."""
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
        on = str(machine).partition(" (family")[0] if machine and self.endpoint is None else ""  # a server's is another
        done = _TITLES.get(header.command, header.command.capitalize())
        return one_line(f"{done}{f' of {of}' * bool(of)}{f' on {on}' * bool(on)}", 120)


class Report:
    """All runs of a report."""

    def __init__(self, runs: Sequence[RunSection]) -> None:
        self.runs = runs
        # so long that a page shows each part by its title and one sentence
        self.folded = len(runs) > 1 or sum(len(p.families) for r in runs for p in r.probes) > 12
        self.title = one_line("; ".join(dict.fromkeys(r.title for r in runs)), 200)

    @cached_property
    def blocks(self) -> list[list[Block]]:
        """All that is shown of each run."""
        return [_blocks(self, number) for number in range(1, len(self.runs) + 1)]


def build(runs: Iterable[Run]) -> Report:
    """Gather everything. Raises UserError: the side file of a run is missing, malformed or another run's."""
    return Report([*map(RunSection, runs)])


def _blocks(report: Report, number: int) -> list[Block]:
    """Of a run, counted from 1: who it is, what it found, what it has of each kind, its machine."""
    section, opened = report.runs[number - 1], not report.folded
    run = section.run
    parts = trace_blocks(run, number, opened)
    if section.endpoint:
        parts += endpoint_blocks(section.endpoint, number)
    if section.axes:
        parts += axes_blocks(run, section.axes, number)
    if section.sampled:
        parts += sample_blocks(section.sampled, number, opened)
    if run.training_steps:
        parts += training_blocks(run, number, opened)
    if run.mismatch_rollouts:
        parts += mismatch_blocks(run, number, opened)
    if run.fingerprints:
        parts += fingerprint_blocks(run, number)
    if run.cells:
        parts += bench_blocks(run, number, opened)
    parts += probe_blocks(section.probes, number, opened)
    if section.story:  # the parts are the evidence, which the story's answers name
        parts = [*story_blocks(section.story, number, opened), *map(_not_brief, parts)]
    return [*_head(section, number, len(report.runs)), *parts, *_tail(section, number, opened)]


def _not_brief(block: Block) -> Block:
    """The block and its contents, left out of a terminal's 25 lines."""
    if isinstance(block, Details):
        block = replace(block, blocks=[_not_brief(inner) for inner in block.blocks])
    return replace(block, only=block.only.replace(BRIEF, ""))


def _head(section: RunSection, number: int, runs: int) -> list[Block]:
    made: list[Block] = [
        Heading(Bit(section.title), level=2, only="mp"),
        Paragraph((Bit(section.name, "code"), f" · {section.facts}"), "soft", ALL, 1),
        Paragraph(machine_line(section.run) or "No environment was recorded.", "soft", "bvm", 1),
    ]
    if not section.run.complete:
        made.append(Paragraph(INCOMPLETE, "warn"))
        made.append(Paragraph("Go on with it by repeating its command with `--resume`.", "soft", "p"))
    if runs > 1:  # of a lone run the first screen shows it
        made.append(Paragraph(sentence(section.headline), "headline", "mp"))
    items: list[Inline] = []
    for v in section.shown_verdicts:
        several = len(section.samples) > 1 and v.prompt is not None
        which = f", {subject_name(section.run.header.plan, v.prompt or 0)}" if several else ""
        style = "bad" if v.is_fault else "good" if v.finding == Finding.CLEAN else "dull"
        parts = re.split(f"({'|'.join(re.escape(f.value) for f in v.findings)})", sentence(v.text))
        marked = (Bit(part, style) if i % 2 else part for i, part in enumerate(parts))
        items.append((Bit(v.impl, "code"), f"{which}: ", *marked))
    title = f"{plural(len(section.verdicts), 'verdict')}, and what they do not cover"
    return [*made, Details(title, [Items(items, [v.notes for v in section.shown_verdicts])], f"verdicts-{number}")]


def _tail(section: RunSection, number: int, opened: bool) -> list[Block]:
    run = section.run
    rows = [(Bit(impl, "code"), group, Bit(operator), counted(n)) for impl, group, operator, n in coverage_rows(run)]
    coverage = Table(("impl", "group", "operator", "calls"), rows, ("nowrap", "nowrap", "wide", "num"))
    replaced = "; ".join(coverage_text(run)) or "which operators were replaced"
    counts = [(sum(p.count for p in section.problems if p.kind == kind), kind) for kind in ("failed", "skipped")]
    troubles = ", ".join(f"{n} {kind}" for n, kind in counts if n) or plural(len(section.problems), "note")
    kernels = sorted({name for row in run.rows for names in row.kernel_sets for name in names})
    environment = run.header.environment
    tables = [
        Table((name, "value"), [(label, Bit(value, "code")) for label, value in environment_rows(entries)])
        for name, entries in (("environment", environment), ("option", run.header.plan))
    ]
    failed, names = [_problems_table(section.problems)], [Items([Bit(name, "code") for name in kernels])]
    title, place, said = "Environment and options", f"environment-{number}", environment_line(environment)
    return [  # what has no row is not printed
        Details("Coverage", [coverage], f"coverage-{number}", replaced, "coverage", fold=True, only="mp"),
        Details(troubles, failed, f"problems-{number}", "", "failed, skipped", fold=True, opened=opened, only=ALL),
        *(Paragraph(f"Coverage of {line}.", "soft", "bv") for line in coverage_text(run)),
        Details("Kernels by their full names", names, f"kernels-{number}", plural(len(kernels), "kernel"), only="p"),
        Details(title, tables, place, said, "environment", fold=True, only="mp"),
    ]


def _problems_table(listed: Sequence[Problem]) -> Table:
    """A row for each reason, with all that has it."""
    of: dict[tuple[str, str], list[str]] = {}
    for p in listed:
        of.setdefault((p.kind, p.reason), []).append(p.name)
    rows = []
    for (kind, why), names in of.items():
        what = Bit(kind + f" in {len(names)} cases" * (len(names) > 1), "bad" if kind == "failed" else "dull")
        rows.append((what, Bit(why), Bit("; ".join(names))))
    return Table(("what", "why", "which"), rows, ("", "wide", "wide"), brief=_PROBLEMS_MOST, only=ALL)
