"""What a reader wants first: affected or not, on what, and the chain from the token to the cure, each known or not.

What a line does not know it says, with the command that would tell.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from nondet.core.records import Axis, Role, role_of
from nondet.diagnose.verdict import NOT_GREEDY, UNKNOWN
from nondet.errors import one_line
from nondet.reports import figures
from nondet.reports.cases import CaseFamily, CaseGroup
from nondet.reports.chain import (
    CURE,
    PROBE_OF,
    STOCK,
    Step,
    asked_rows,
    chain,
    clearest,
    cure_refuted,
    guilty_family,
    parted_rows,
    stock_summaries,
    trace_command,
)
from nondet.reports.content import Report, RunSection, SampleSection
from nondet.reports.headline import Problem
from nondet.verdict.findings import Finding, Verdict, plural
from nondet.verdict.rows import axis_of

__all__ = ["FirstScreen", "Step", "first_screen"]


@dataclass(frozen=True)
class FirstScreen:
    """The answer, what it was seen on, the chain, one picture, and what to do next.

    Attributes:
        affected: "yes", "none observed", or "not known".
        case, sample: The picture: a class map, or curves of agreement; at most one of them is there.
    """

    affected: str
    answer: str
    machines: tuple[str, ...]
    steps: tuple[Step, ...]
    command: str
    why: str
    case: CaseFamily | None
    sample: SampleSection | None


def first_screen(report: Report) -> FirstScreen | None:
    """The first screen; None of a report that holds no verdict, a bench's say."""
    affected, answer = _affected(report)
    if not affected:
        return None
    steps = chain(report)
    command, why = _next(report, affected, steps)
    case, sample = _picture(report)
    machines = dict.fromkeys(
        figures.environment_line({k: v for k, v in r.run.header.environment.items() if k != "commit"})
        for r in report.runs
    )
    return FirstScreen(affected, answer, tuple(machines), steps, command, why, case, sample)


def _affected(report: Report) -> tuple[str, str]:
    """What a user has by default, completions before operators; ("", "") where no verdict was asked for."""
    told = next((r.story for r in report.runs if r.story), None)
    if told is not None:
        affected = "none observed" if told.finding == Finding.CLEAN else "yes"
        if told.finding in (UNKNOWN, NOT_GREEDY, Finding.WRONG):
            affected = "not known"
        return affected, one_line(dict(told.answers).get("Whether", told.finding), 400)
    traced = [v for r in report.runs for v in r.run.trace_verdicts]
    largest_first = sorted(report.runs, key=lambda r: -len(r.run.completions))
    verdicts = [(r, v) for r in largest_first for v in r.verdicts]
    subjects = [(r, v) for r, v in verdicts if v.role in STOCK] or [
        (r, v) for r, v in verdicts if v.role not in (Role.INVARIANT, Role.PART)
    ]
    if not subjects and not traced:
        if not verdicts:
            return "", ""
        return "not known", f"no stock implementation was measured here. {_headline(report, verdicts)}"
    for verdict in traced:
        if verdict.finding not in (Finding.CLEAN.value, "unknown") and not any(v.is_fault for _, v in subjects):
            return "yes", one_line((verdict.sentences or [verdict.finding])[0], 300)
    for asked in (lambda v: v.prompt is not None, lambda v: v.prompt is None):
        faults = [v for _, v in subjects if asked(v) and v.is_fault]
        if faults:
            return "yes", _said(faults)
    clean = [v for _, v in subjects if v.finding == Finding.CLEAN]
    if clean:
        return "none observed", _said(clean)
    unproven = [v for _, v in subjects if v.finding == Finding.UNPROVEN]
    if unproven:
        return "not known", _said(unproven)
    return "not known", "nothing was compared under stock"


def _headline(report: Report, verdicts: Sequence[tuple[RunSection, Verdict]]) -> str:
    return one_line(next((r.headline for r, _ in verdicts), report.title), 300)


def _said(verdicts: Sequence[Verdict]) -> str:
    """The verdict of most weight in a phrase: stock's own before its backends'."""
    first = min(verdicts, key=lambda v: (list(Finding).index(v.finding), v.role != Role.STOCK))
    text = f"{first.impl}: {first.brief or first.text}"
    return one_line(text + (f"; {plural(len(verdicts) - 1, 'more verdict')} like it" if len(verdicts) > 1 else ""), 300)


def _next(report: Report, affected: str, steps: Sequence[Step]) -> tuple[str, str]:
    failed = [(r, p) for r in report.runs for p in r.problems if p.kind == "failed"]
    if failed and affected != "yes":  # nothing further is asked before what was asked has its answers
        return _mended(*failed[0], sum(p.count for _, p in failed))
    if report.runs and all(r.endpoint is not None for r in report.runs):
        if affected == "yes":
            operator = next(step for step in steps if step.label == "operator")
            return operator.command, "tells which operator parts, where its model's folder is at hand"
        return "nondet sample --endpoint URL --n 3000 --load heavy", "asks more often, under a heavier load"
    own = [row for row in asked_rows(report) if role_of(row.impl) == Role.OTHER]
    if own and len(report.runs) == 1:
        source = shlex.quote(one_line(report.runs[0].run.source, 200))
        return f"nondet report {source} --out report.html", "shows which sizes share their bits"
    if report.runs and all(r.run.embed_passes for r in report.runs):
        missing = next((step for step in steps if step.command), None)
        if missing is not None:
            return missing.command, f"tells the {missing.label}, with the same --model and --texts"
        return "nondet embed --dtype bfloat16", "asks in a coarser dtype, with the same --model and --texts"
    for step in steps:
        if step.command and (affected == "yes" or step.label in ("token", "cure")):
            what = "what the cure costs" if step.label == "cure" and step.command != CURE else f"the {step.label}"
            return step.command, f"tells {what}"
    if affected == "yes" and cure_refuted(report):
        return f"{trace_command(report)} --impl invariant", "tells which operator parts under it, too"
    if affected == "yes":
        return (
            "nondet certify all",
            "proves the cure's kernels on this machine; then wrap the model in nondet.batch_invariant()",
        )
    if any(True for _ in stock_summaries(report)):
        return "nondet sample --n 10000 --load heavy", "asks more often, under a heavier load"
    return "nondet sample", "asks a whole model"


def _mended(section: RunSection, problem: Problem, count: int) -> tuple[str, str]:
    """The run's own command again, and what has to be mended before: the first failure of `count`."""
    header = section.run.header
    words = [str(word) for word in header.environment.get("argv") or []][1:]
    if words[:1] != [header.command]:  # a script's own, of a run that no command line began
        words = [header.command]
    if {"--out", "-o"} & {*words} and "--force" not in words:
        words.append("--force")
    which = "the failure" if count == 1 else f"the first of {count:,} failures"
    why = f"again, once {which} is mended: {problem.name}: {problem.reason}"
    if "memory" in problem.reason.lower():
        why += " (ask for smaller sizes, or free memory)"
    return one_line(shlex.join(["nondet", *words]), 200), one_line(why, 320)


def _picture(report: Report) -> tuple[CaseFamily | None, SampleSection | None]:
    """The class map of what is guilty, or the clearest; else curves of agreement."""
    probe = PROBE_OF.get(guilty_family(report), "")
    rows = [r for r in parted_rows(report) if r.labels and r.distinct <= 12 and axis_of(r) == Axis.BATCH]
    rows = [r for r in rows if r.probe == probe] or rows
    sample = next((p for r in report.runs for p in r.samples if any(s.first_fork for s in p.main)), None)
    if not rows or (sample is not None and len(report.runs) == 1):
        return None, sample
    chosen = clearest(rows)
    for r in report.runs:
        for p in r.probes:
            for case in p.cases:
                if any(row is chosen for row in case.rows):
                    wanted = (chosen.impl, "invariant")
                    return CaseFamily((CaseGroup(tuple(x for x in case.rows if x.impl in wanted)),)), None
    return None, sample
