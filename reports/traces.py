"""Traces, replays, diagnoses and an encoder's arms in words and tables, the same for every reporter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import msgspec

from nondet.core.records import Culprit, Neighbours, OperatorCompared, Replay, Replayed, Run, Step
from nondet.diagnose.verdict import QUESTIONS, axis_title, batch_step, blamed, conclude, solo_of
from nondet.reports.document import ALL, Bit, Block, Details, Figure, Heading, Items, Paragraph, Table
from nondet.reports.text import counted, number, ulp_text
from nondet.sampling.analysis import diagnosed_cost
from nondet.verdict.findings import Finding, plural

# Names in the records -> what a reader is shown instead.
_CONTROLS = {"company": "concurrent requests", "parting": "first difference", "tape": "record"}
_ARMS = {"alone": "solo", "in company": "with concurrent requests"}


def trace_headline(run: Run) -> str:
    """The finding of a trace or of replays in one sentence, without its full stop; "" for other runs."""
    if run.trace_verdicts:
        verdict = run.trace_verdicts[-1]
        text = (verdict.sentences or [verdict.finding])[0]
        cure = " and ".join(verdict.families or ())
        return text + (f"; replacing {cure} by the invariant implementation removes the divergence" if cure else "")
    if again := [r for r in run.replayed if r.how == "as recorded"]:
        return f"{sum(r.same for r in again):,} of {len(again):,} completions were bit-identical when replayed"
    if run.culprits:
        return f"the first operator to differ: {run.culprits[0].sentence}"
    if run.layer_standings:
        counts = Counter[str]()
        for one in run.layer_standings:
            counts[one.standing] += one.layers
        return ", ".join(f"{plural(n, 'layer')} {name}" for name, n in counts.items())
    return "no operator was named yet" if run.controls else ""


def trace_blocks(run: Run, number: int, opened: bool) -> list[Block]:
    """A part for each kind of record of a trace, of replays, of layers under an engine, and of an encoder."""
    made: list[Block] = []

    def part(title: str, lines: Sequence[str], details: Sequence[str] = (), figures: Sequence[Figure] = ()) -> None:
        if lines:
            place, toc = f"trace-{number}-{len(made) + 1}", "" if made else "trace"
            drawn = [replace(figure, id=f"{place}-pair") for figure in figures]
            within: list[Block] = [Items(lines, only=ALL), *drawn, Details("details", [Items(details)])]
            made.append(Details(title, within, place, "", toc, opened=opened, only=ALL))

    last = run.trace_verdicts[-1:]
    if not run.steps:  # a diagnosis has them in its steps; the headline has the first
        part("Verdict", [_without_trees(sentence, run) for v in last for sentence in v.sentences[1:]])
    if compared := run.operators_compared:
        made.append(_operators(compared, f"operators-{number}", opened))
    named = [(_CONTROLS.get(c.name, c.name.replace("tape of", "record of")), c) for c in run.controls]
    part("Controls", [f"{name}{' (FAILS)' * (c.passed is False)}: {c.sentence}" for name, c in named])
    repro = [v.repro for v in last if v.repro]
    for culprit in run.culprits:
        title = f"{'Differing operator' if culprit.call else 'Difference without an operator'} {culprit.number}"
        lines = [f"{r.name}: {_without_trees(r.sentence, run)}" for r in culprit.replays]
        pair = [pair_of(culprit, run)] if culprit.call else []
        part(title, [culprit.sentence, *repro, *lines], _details(culprit), pair)
        repro = []
    risky = [s for s in run.substitutions if s.at_risk]
    left = [f"left stock with {'+'.join(s.families)}: {', '.join(s.at_risk[:8])}" for s in risky]
    part("Replacements: the whole run with them", [s.sentence for s in run.substitutions], left)
    alike: dict[str, list[Replayed]] = {}  # by what is said of them
    for replayed in run.replayed:
        alike.setdefault(replayed.sentence.removeprefix(f"{replayed.request}: "), []).append(replayed)
    groups = [(said, of) for said, of in alike.items() if len(of) > 1]
    lines = [f"{plural(len(of), 'completion')}: {said}" for said, of in groups]
    lines += [of[0].sentence for of in alike.values() if len(of) == 1]
    part("Replays", lines, [", ".join(r.request for r in of) for _, of in groups])
    layers = sorted(run.layer_standings, key=lambda one: one.standing != "at risk")
    said_of = "{0.standing}: {1} {0.kind}, the first {0.first}: {0.why}"
    under = {"sglang": "SGLang"}.get(run.header.command, "vLLM")
    part(f"Layers under {under}", [said_of.format(one, plural(one.layers, "layer")) for one in layers])
    for impl in dict.fromkeys(p.impl for p in run.embed_passes):
        part(f"{impl}: vectors in batches compared with one text at a time", *_vectors(run, impl))
    if run.embed_passes and run.header.plan.get("cut"):
        what = plural(run.header.plan["cut"], "text was", "texts were")
        part("Texts", [f"{what} longer than the model's context and cut."])
    return made


def _operators(compared: Sequence[OperatorCompared], place: str, opened: bool) -> Details:
    """Each operator of two implementations: those that differ in a table, the others in a list."""
    rows, equal = [], []
    for op in compared:
        if not op.differing:
            equal.append((Bit(op.call, "code"), f" of {op.module}: {plural(op.calls, 'call')}"))
            continue
        far, calls = ulp_text(op.difference.max_ulp) if op.difference else "", f"{op.differing:,} of {op.calls:,}"
        times = number(op.times) if op.times < 1e300 else ""
        rows.append((Bit(op.call, "code"), Bit(op.module, "code"), calls, far, op.verdict, times, op.bound))
    head = ("operator", "module", "other bits", "at most", "finding", "times", "of what")
    table = Table(head, rows, ("", "wide", "num", "num", "nowrap", "num", "wide"), unshown=("of what",), only=ALL)
    title = f"Operator by operator: {len(rows)} of {plural(len(compared), 'operator')} differ"
    same = Details("equal bits in every call", [Items(equal)], f"{place}-equal", plural(len(equal), "operator"))
    return Details(title, [table, same] if equal else [table], place, "", "operators", opened=opened, only=ALL)


def _without_trees(text: str, run: Run) -> str:
    """A text of the records, in which reduction trees are said in a sentence: the details of a culprit have them."""
    for replay in (r for c in run.culprits for r in c.replays if r.name == "tree"):
        long, short = replay.sentence, _tree_text(replay)
        text = text.replace(long, short).replace(long[:1].upper() + long[1:], short[:1].upper() + short[1:])
    return text


def _tree_text(replay: Replay) -> str:
    """What the reduction trees of a call show."""
    if replay.status == "error":
        return replay.sentence
    seem, unproven = ("seem to ", " (not proven)") if "not both proven" in replay.sentence else ("", "")
    if replay.status == "divergent":
        return f"the arms {seem}add the values in different orders{unproven}"
    cause = "so the cause may be something else: precision, fused multiply-add or promotion"
    rest = "; the softmax's own sums were not tested" if "exponentials were not tested" in replay.sentence else ""
    return f"both arms {seem}add the values in the same order{unproven}, {cause}{rest}"


_ROWS = {"tokens": "row", "keys": "key"}


def pair_of(culprit: Culprit, run: Run, place: str = "") -> Figure:
    """The call in both arms, at its sizes, with its kernels."""
    captured = next((list(c.figures) for c in run.controls if c.name == "capture" and len(c.figures) == 2), None)
    arms = []
    for name, shapes, kernels in zip_longest(captured or ("first arm", "second arm"), culprit.shapes, culprit.kernels):
        roles = ((role, where, i) for where, of in culprit.axes.items() for i, role in enumerate(of) if role)
        sizes = {_ROWS.get(role, role): shapes[where][i] for role, where, i in roles if where in (shapes or {})}
        arms.append((_ARMS.get(name, name), ", ".join(plural(n, role) for role, n in sizes.items()), kernels or []))
    return Figure("pair", arms, place, f"`{culprit.call}` of {culprit.module}, by arm", of=culprit)


def _details(culprit: Culprit) -> list[str]:
    lines = []
    for arm, shapes in zip(("first", "second"), culprit.shapes, strict=False):
        shown = ", ".join(f"{place} {'x'.join(map(str, shape))}" for place, shape in shapes.items())
        lines.append(f"shapes of the {arm} arm: {shown}")
    if axes := [f"{p}: {', '.join(a or 'fixed' for a in roles)}" for p, roles in culprit.axes.items()]:
        lines.append(f"what each dimension counts: {'; '.join(axes)}")
    if culprit.digests:
        lines.append("inputs of this request: " + ", ".join(f"{p} {d}" for p, d in culprit.digests.items()))
    for replay in culprit.replays:
        if replay.name == "tree" and replay.status != "error":
            lines.append(replay.sentence)
        if replay.labels and replay.distinct > 1:
            pairs = [f"{v}: {chr(65 + label % 26)}" for v, label in zip(replay.values, replay.labels, strict=False)]
            lines.append(f"classes over {replay.name}: {', '.join(pairs)}")
    if culprit.unmatched:
        lines.append(f"calls made by one arm only: {', '.join(culprit.unmatched[:12])}")
    if culprit.not_understood:
        lines.append(f"tensors that were not compared: {', '.join(culprit.not_understood)}")
    return lines


class Story:
    """What `nondet diagnose` found, how, and its limits: what was not tested, or has no answer. A run that was stopped
    gives what it reached."""

    def __init__(self, run: Run) -> None:
        self.run, cost = run, diagnosed_cost(run)
        self.steps = []  # in the words of their answers
        for s in run.steps:
            sentence = _batch_again(run, s) if s.name == "batch" else s.sentence
            sentence = (cost.rstrip(".") or sentence) if s.name == "cost" else sentence
            self.steps.append(msgspec.structs.replace(s, sentence=_without_trees(sentence, run)))
        # in the words and by the formulas of this version
        anew = conclude(msgspec.structs.replace(run, steps=self.steps))
        verdict = next((d for d in run.diagnoses[-1:] if d.finding != anew.finding), anew)
        answers = {name.capitalize(): getattr(verdict, name) for name in ("whether", "where", "why", "cure", "cost")}
        answers["Cost"] = cost or verdict.cost
        # question -> answer; no entry where the question did not arise
        self.answers = {name: _without_trees(text, run) for name, text in answers.items() if text}
        self.finding, self.limits = verdict.finding, verdict.limits
        # whether the invariant implementation was seen to leave no divergence
        self.cured = any(s.name == "cure" and s.outcome == "yes" for s in self.steps)


def _batch_again(run: Run, batch: Step) -> str:
    """The step in this version's words, by its completions; its own where the records are not those of the step."""
    again = batch_step(run) if {"trace", "tokens"} <= solo_of(run).keys() else batch
    return again.sentence if again.figures.items() <= batch.figures.items() else batch.sentence


def story_headline(found: Story) -> str:
    """What was found, with its number, its operator and its cure: a sentence without its full stop."""
    batch = next((s.figures for s in found.steps if s.name == "batch" and s.outcome == "yes"), {})
    parts = [found.answers.get("Whether", found.finding).rstrip(".")]
    if found.finding == Finding.BATCH and {"n", "tokens", "traces"} <= batch.keys():  # without the step's intervals
        n, tokens, traces = (f"{batch[key]:,.0f}" for key in ("n", "tokens", "traces"))
        logprobs = f"{'all ' * (traces == n)}{traces} have different logprobs"
        same = "other tokens than the same prompt has solo"
        parts = [f"{found.finding}: {tokens} of {n} completions have {same}, and {logprobs}"]
    named = [c for c in blamed(found.run, found.finding) if c.call][:1]
    parts += [f"the first operator to differ is `{c.call}` of {c.module}" for c in named]
    return "; ".join([*parts, *(["batch_invariant() left no divergence"] if found.cured else [])])


def story_blocks(found: Story, number: int, opened: bool) -> list[Block]:
    """The answers, the steps, what was varied, what was not tested."""
    numbers = {name: i for i, name in enumerate(QUESTIONS, 1)}
    made: list[Block] = [Heading("Answers", only="vm")]  # a page has them in its steps
    for label, text in found.answers.items():
        # of a terminal's few lines; the first is the headline's
        only, lines = "vm" if label == "Whether" else "bvm", 3 + (label == "Why")
        made.append(Paragraph((Bit(f"{label}. ", "strong"), text), only=only, lines=lines))
    rows = [
        (f"{numbers.get(s.name, '?')}. {QUESTIONS.get(s.name, s.name)}", Bit(s.outcome, "strong"), f"{s.sentence}.")
        for s in found.steps
    ]
    table, said = Table(("question", "answer", "evidence"), rows, ("wide", "", "wide")), plural(len(rows), "step")
    made.append(Details("Step by step", [table], f"story-{number}", said, "diagnosis", fold=True, opened=opened))
    varied = []
    for a in found.run.axes:
        counts = [f"{n} of {a.tried}" for n in (a.traces, a.tokens)] if a.tried else ["not met", ""]
        varied.append((axis_title(a.axis), a.impl, a.held, *counts, ", ".join(a.parted) or "nowhere"))
    table = Table(("varied", "under", "unchanged", "other traces", "other tokens", "differ at"), varied)
    title, said = "One property changed at a time", "compared with the solo request"
    made.append(Details(title, [table], f"axes-{number}", said, fold=True, opened=opened))
    return [*made, Details("What this does not show", [Items(found.limits)])]


def _vectors(run: Run, impl: str) -> tuple[list[str], list[str]]:
    """The arms of an encoder's implementation compared with the solo texts, and the duration of the passes."""
    lines, details = [], []
    for record in (p for p in run.embed_passes if p.impl == impl):
        if record.reason:
            lines.append(f"{record.arm}: not measured: {record.reason}")
            continue
        lines += [neighbours_text(n) for n in run.neighbours if (n.impl, n.arm) == (impl, record.arm)]
        rate = f", {record.texts / record.seconds:,.0f} texts/s" if record.seconds > 0 else ""
        padding = record.computed - record.tokens
        tokens = f"{counted(record.tokens)} tokens{f' and {counted(padding)} of padding' if padding else ''}"
        details.append(f"{record.arm}: {plural(record.batches, 'pass', 'passes')}, {tokens}{rate}")
    return lines, details


def neighbours_text(n: Neighbours) -> str:
    """How an arm's vectors differ from those of one text at a time."""
    head = f"{n.arm}, {n.pooling}"
    if not n.parted:
        return f"{head}: {plural(n.texts, 'vector')} bit-identical"
    return (
        f"{head}: {counted(n.parted)} of {counted(n.texts)} have other bits, up to {ulp_text(n.max_ulp)}, 1 - cosine "
        f"up to {number(n.cosine_distance)}; nearest neighbour changed for {counted(n.top1_changed)}, the set of "
        f"{n.k} nearest for {counted(n.topk_changed)}, only its order for {counted(n.topk_reordered)}"
    )
