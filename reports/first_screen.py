"""What a reader wants first: affected or not, on what, and the chain from the token to the cure, each known or not.

What a line does not know it says, with the command that would tell.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nondet.diagnose.verdict import NOT_GREEDY, UNKNOWN
from nondet.reports import figures
from nondet.reports.classmap import map_text, short_kernel
from nondet.reports.content import CaseFamily, CaseGroup, Report, RunSection, SampleSection
from nondet.reports.kinds import kind_of
from nondet.result import Axis, Role, Row, role_of
from nondet.sampling.summary import SampleSummary
from nondet.text import one_line
from nondet.verdict import Finding, Verdict, axis_of, plural

__all__ = ["FirstScreen", "Step", "first_screen"]

# Family of batch_invariant() -> the probe that asks the same operator alone.
_PROBE_OF = {
    "attention": "attention",
    "matmul": "matmul",
    "norm": "rms-norm",
    "softmax": "softmax",
    "moe": "grouped-matmul",
}
_CURE = "nondet sample --impl both"
_STOCK = (Role.STOCK, Role.BACKEND)


@dataclass(frozen=True)
class Step:
    """One line of the chain.

    Attributes:
        label: token, operator, kernel or cure.
        known: Whether this report holds the answer.
        command: What would tell; "" where nothing is missing.
    """

    label: str
    text: str
    known: bool
    command: str = ""


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
    steps = (_token(report), _operator(report), _kernel(report), _cure(report))
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
        if told.finding in (UNKNOWN, NOT_GREEDY):
            affected = "not known"
        return affected, one_line(dict(told.answers).get("Whether", told.finding), 400)
    traced = [v for r in report.runs for v in r.run.trace_verdicts]
    largest_first = sorted(report.runs, key=lambda r: -len(r.run.completions))
    verdicts = [(r, v) for r in largest_first for v in r.verdicts]
    subjects = [(r, v) for r, v in verdicts if v.role in _STOCK] or [
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
    return "not known", "nothing was compared under stock"


def _headline(report: Report, verdicts: Sequence[tuple[RunSection, Verdict]]) -> str:
    return one_line(next((r.headline for r, _ in verdicts), report.title), 300)


def _said(verdicts: Sequence[Verdict]) -> str:
    """The verdict of most weight in a phrase: stock's own before its backends'."""
    first = min(verdicts, key=lambda v: (list(Finding).index(v.finding), v.role != Role.STOCK))
    text = f"{first.impl}: {first.brief or first.text}"
    return one_line(text + (f"; {plural(len(verdicts) - 1, 'more verdict')} like it" if len(verdicts) > 1 else ""), 300)


def _summaries(report: Report) -> Iterator[tuple[RunSection, SampleSection, SampleSummary]]:
    """Stock completions, stock itself before its backends, the largest sample first."""
    rows = [(r, p, s) for r in report.runs for p in r.samples for s in p.summaries if role_of(s.impl) in _STOCK]
    return iter(sorted(rows, key=lambda row: (role_of(row[2].impl) != Role.STOCK, -row[2].n)))


def _token(report: Report) -> Step:
    sampled = list(_summaries(report))
    for _, _, s in sampled:
        fork = s.first_fork
        if fork is not None:
            ways = [f"{b.count:,} go on with {one_line(figures.token(b.text), 40)}" for b in fork.branches[:3]]
            margins = [b.margin_min for b in fork.branches if b.margin_min is not None]
            near = f"; top-1 − top-2 logit there {figures.number(min(margins))}" if margins else ""
            text = f"{s.impl} parts at token {fork.index}: of {s.n:,} completions {', '.join(ways)}{near}"
            return Step("token", text, known=True)
    parted = [c for r in report.runs for c in r.run.culprits if c.token >= 0]
    if parted:
        return Step("token", f"the traced difference reaches the logits of token {parted[0].token}", known=True)
    if sampled:
        _, _, s = max(sampled, key=lambda row: row[2].n)
        if s.distinct_traces > 1:
            text = f"none parted in {s.n:,} completions of {s.impl}, but their logprobs did: a closer race would part"
        else:
            text = f"none parted in {s.n:,} completions of {s.impl}"
        return Step("token", text, known=True)
    return Step("token", "no completions here", known=False, command="nondet sample")


def _operator(report: Report) -> Step:
    for r in report.runs:
        for c in sorted(r.run.culprits, key=lambda c: c.number):
            # the pair that was traced need not be the completions whose token is named above
            ahead = f", ahead of token {c.token}" if c.token >= 0 else ""
            text = one_line(f"in the pair traced{ahead}: {c.sentence}", 320)
            return Step("operator", text, known=bool(c.call), command="" if c.call else _trace(report))
    guilty = [(t.family, t.summary) for r in report.runs for p in r.samples for t in p.families if t.removed]
    if guilty:
        named = ", ".join(dict.fromkeys(family for family, _ in guilty))
        text = f"{named}: replacing it alone removed every divergence seen, in {guilty[0][1].n:,} completions"
        return Step("operator", text, known=True)
    parted = list(dict.fromkeys(r.operator for r in _parted_rows(report)))
    command = _trace(report)
    if parted:
        text = f"not traced; asked alone, stock parts in {', '.join(one_line(p, 40) for p in parted[:6])}"
        return Step("operator", text, known=not any(True for _ in _summaries(report)), command=command)
    if _probed(report):
        return Step("operator", "none of those probed parted alone", known=True)
    return Step("operator", "not traced yet", known=False, command=command)


def _trace(report: Report) -> str:
    """The trace of the run's model and prompt."""
    for r, p, s in _summaries(report):
        if s.distinct_traces < 2:
            continue
        words = ["nondet trace"]
        model = (r.run.header.plan.get("model") or {}).get("name", "embedded")
        if model != "embedded":
            words += [
                "--model",
                shlex.quote(one_line(str(model), 120)),
                "--prompt",
                shlex.quote(one_line(p.prompt_text, 120)),
            ]
        return " ".join(words)
    return "nondet trace"


def _parted_rows(report: Report) -> list[Row]:
    """Stock's rows, demonstrations left out, whose bits depend on the batch."""
    cases = (c for r in report.runs for p in r.probes if not p.demonstration for c in p.cases)
    return [
        row
        for case in cases
        for row in case.rows
        if row.parted and role_of(row.impl) in _STOCK and axis_of(row) in (Axis.BATCH, Axis.RUN)
    ]


def _probed(report: Report) -> bool:
    return any(p.name not in ("sample", "bench") for r in report.runs for p in r.probes)


def _guilty(report: Report) -> str:
    """The family that a trace or a replacement named; "" where none did."""
    for r in report.runs:
        for c in r.run.culprits:
            if c.family:
                return c.family
        for p in r.samples:
            for t in p.families:
                if t.removed:
                    return t.family
    return ""


def _kernel(report: Report) -> Step:
    for r in report.runs:
        for c in sorted(r.run.culprits, key=lambda c: c.number):
            arms = [", ".join(dict.fromkeys(short_kernel(k) for k in arm)) for arm in c.kernels]
            if any(arms):
                same = len(set(arms)) == 1
                text = f"{arms[0]} in both" if same else " against ".join(arm or "none seen" for arm in arms[:2])
                return Step("kernel", one_line(text, 260), known=True)
    family = _guilty(report)
    probe = _PROBE_OF.get(family, "")
    rows = [r for r in _parted_rows(report) if not probe or r.probe == probe]
    if rows:
        row = _clearest(rows)
        borders = map_text(row, 3) if not row.kernel_sets else f"{plural(row.distinct, 'class', 'classes')} of bits"
        text = f"{row.operator} asked alone, {row.case}: {borders}, by {_kernels_text(row)}"
        return Step("kernel", one_line(text, 300), known=True)
    if _probed(report) and not probe:
        return Step("kernel", "nothing parted, so there is none to name", known=True)
    return Step("kernel", "not probed yet", known=False, command=f"nondet probe {probe or 'matmul attention'}")


def _kernels_text(row: Row) -> str:
    """The first kernels of each kind, and how many others there are; a CPU's have no names."""
    if not row.kernel_sets:
        return "kernels that no profiler named" if row.device != "cpu" else "kernels that have no names on a CPU"
    first_of: dict[str, str] = {}
    for names in row.kernel_sets:
        if names:
            first_of.setdefault(kind_of(names).name, short_kernel(names[0], 44))
    listed = ", ".join(f"{name} ({kind})" for kind, name in first_of.items())
    more = len(row.kernel_sets) - len(first_of)
    return listed + (f" and {plural(more, 'other set')} of kernels" if more > 0 else "")


def _clearest(rows: Sequence[Row]) -> Row:
    """Few classes and several kernels make the picture that explains most: of bfloat16, products first."""
    return min(
        rows,
        key=lambda r: (
            axis_of(r) != Axis.BATCH, not r.labels, r.varied != "batch_size", not r.kernel_sets,
            role_of(r.impl) != Role.STOCK, r.dtype != "bfloat16", r.distinct > 6, -r.distinct,
        ),
    )  # fmt: skip


def _cure(report: Report) -> Step:
    for told in (r.story for r in report.runs if r.story):
        answers = dict(told.answers)
        if "Cure" in answers:
            cure = one_line(answers["Cure"].partition(" (at 95%")[0], 170)  # the bound stands in the verdict below
            text = f"{cure} {answers.get('Cost', '')}"
            return Step(
                "cure", one_line(text, 320), known="Cost" in answers, command="" if "Cost" in answers else _CURE
            )
    traced = [v for r in report.runs for v in r.run.trace_verdicts if v.families]
    runs = sorted(report.runs, key=lambda r: -len(r.run.completions))
    sampled = [v for r in runs for v in r.verdicts if v.role == Role.INVARIANT and v.prompt is not None]
    probed = [v for r in report.runs for v in r.verdicts if v.role == Role.INVARIANT and v.prompt is None]
    parts = []
    for verdict in sampled[:1] or probed[:1]:
        parts.append(f"invariant: {(verdict.brief or verdict.text).partition(' (at 95%')[0]}")
    if traced and not parts:
        parts.append(f"replacing {' and '.join(traced[0].families or [])} removes the divergence")
    if not parts:
        return Step(
            "cure", "the invariant implementation was not run here", known=False, command="nondet sample --impl both"
        )
    cost = _cost(report)
    parts.append(cost or "its cost was not measured here")
    return Step("cure", one_line("; ".join(parts), 320), known=bool(cost), command="" if cost else "nondet bench")


def _cost(report: Report) -> str:
    """The lowest speed ratio end to end, else the means of the operators alone."""
    speeds = [(r.name, p.speed) for r in report.runs for p in r.samples if p.speed is not None]
    if speeds:
        _, speed = min(speeds, key=lambda entry: entry[1].ratio)
        lowest = f", the lowest of {len(speeds)}" if len(speeds) > 1 else ""
        return f"speed ratio {speed.ratio:.2f} against {one_line(speed.baseline, 40)}{lowest}"
    for r in report.runs:
        means = [f"{b.name} {s.mean:.2f}" for b in r.bench for s in b.summaries if role_of(s.impl) == Role.INVARIANT]
        if means:
            return one_line(f"speed against the best stock: {', '.join(means[:5])}", 160)
    return ""


def _next(report: Report, affected: str, steps: Sequence[Step]) -> tuple[str, str]:
    for step in steps:
        if step.command and (affected == "yes" or step.label in ("token", "cure")):
            return step.command, f"tells the {step.label}"
    if affected == "yes":
        return (
            "nondet certify all",
            "proves the cure's kernels on this machine; then wrap the model in nondet.batch_invariant()",
        )
    if any(True for _ in _summaries(report)):
        return "nondet sample --n 10000 --load heavy", "asks more often, under a heavier load"
    return "nondet sample", "asks a whole model"


def _picture(report: Report) -> tuple[CaseFamily | None, SampleSection | None]:
    """The class map of what is guilty, or the clearest; else curves of agreement."""
    probe = _PROBE_OF.get(_guilty(report), "")
    rows = [r for r in _parted_rows(report) if r.labels and r.distinct <= 12 and axis_of(r) == Axis.BATCH]
    rows = [r for r in rows if r.probe == probe] or rows
    sample = next((p for r in report.runs for p in r.samples if any(s.first_fork for s in p.main)), None)
    if not rows or (sample is not None and len(report.runs) == 1):
        return None, sample
    chosen = _clearest(rows)
    for r in report.runs:
        for p in r.probes:
            for case in p.cases:
                if any(row is chosen for row in case.rows):
                    wanted = (chosen.impl, "invariant")
                    return CaseFamily((CaseGroup(tuple(x for x in case.rows if x.impl in wanted)),)), None
    return None, sample
