"""The first screen of a report: what changes, on what, and the chain from the token to the fix, a line each. A line
whose answer is not known shows the command that finds it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from nondet.core.records import Axis, Culprit, Role, Row, Run, engine_of, families_of, role_of
from nondet.core.statistics import percent
from nondet.diagnose.verdict import NOT_MET, blamed
from nondet.errors import one_line
from nondet.reports import text as figures
from nondet.reports.classes import map_text, short_kernel
from nondet.reports.content import STOCK, Problem, Report, RunSection
from nondet.reports.document import BRIEF, MARKDOWN, Bit, Block, Figure, Heading, Paragraph
from nondet.reports.mismatch import mismatch_figure, training_figure
from nondet.reports.plots import Picture, card_of
from nondet.reports.probes import Case
from nondet.reports.samples import REMOVED, Sample, answers_of
from nondet.reports.text import MACHINE, MODEL, SAMPLE, SERVER, own_options, repeated
from nondet.reports.traces import pair_of
from nondet.sampling.analysis import Fork, SampleSummary, ratio_text, smallest_cures, speed_ratio_of
from nondet.sampling.plan import UNSEEDED
from nondet.verdict.findings import Effect, Finding, plural
from nondet.verdict.rows import axis_of
from nondet.verdict.wording import words

# Family of batch_invariant() -> the probe that tests the same operator by itself.
PROBE_OF = {name: name for name in ("attention", "matmul", "softmax")} | {"norm": "rms-norm", "moe": "grouped-matmul"}
# Options of a run that a command about the same encoder, operators or training takes over, as they were typed.
_EMBED = ("--model", "--texts", "--column", "--batch", "--dtype", *MACHINE)
_PROBE = ("--dtype", "--inputs", "--map", "--k", "--n", "--preset", "--model", *MACHINE)
_RL = ("--model", "--arms", "--steps", "--seeds", "--task", "--prompts", "--group", "--tokens", "--lr", "--epochs",
       "--micro", "--cap", "--sampler", "--seed", "--dtype", "--trust-remote-code", *MACHINE)  # fmt: skip
_BESIDE = ("sample", "bench")  # what rows come beside, that no probe tested
_OF_BATCHES = (Axis.BATCH, Axis.RUN)
_POSTED = ("operator", "cause", "cure", "cost")  # lines of the chain that are on a card
ISOLATED = "isolated"  # the label of what was found of operators by themselves
NOT_RUN = "the invariant implementation was not run here"
_OF_MODELS = ("sample", "diagnose", "trace")  # commands whose runs are of one model and one prompt


class Step(NamedTuple):
    """One line of the chain; `command` would find an answer that is not known."""

    label: str
    text: str
    known: bool = True
    command: str = ""


def chain(report: Report) -> list[Step]:
    """Token, operator, kernel, fix and its cost; for servers, which can't be traced, the token and its cause."""
    if all(r.endpoint is not None for r in report.runs):
        return [_token(report), *_of_servers(report)]
    if all(r.is_of_trainer for r in report.runs):
        return _of_sides(report)
    if all(r.run.embed_passes for r in report.runs):
        return _of_vectors(report.runs[0].run)
    if all(r.run.header.command == "certify" for r in report.runs):
        return [_of_classes(report)]
    if all(r.run.operators_compared for r in report.runs):
        return []  # the headline has the operator
    if _own_rows(report):  # no completions: only the function is known
        return [_operator(report), _kernel(report)]
    return [_token(report), _operator(report), _kernel(report), *_cure(report)]


def _of_sides(report: Report) -> list[Step]:
    """What verdicts on a sampler and a trainer know besides their counts."""
    reasons = [reason for r in report.runs for v in r.verdicts for reason in v.reasons]
    steps = []
    for label in ("kind", "call", "reward"):  # the codes of their reasons begin so
        text = next((words(reason) for reason in reasons if reason.code.partition("-")[0] == label), "")
        steps += [Step(label, text.removeprefix("Kind: ").removeprefix("First diverging call: "))] if text else []
    return steps


def _of_vectors(run: Run) -> list[Step]:
    """The operator and the fix of an encoder, whose sentence has its vectors."""
    differing, impls = {n.impl for n in run.neighbours if n.parted}, {n.impl for n in run.neighbours}
    parts = {impl for impl in impls if role_of(impl) == Role.PART}
    steps = []
    if any(role_of(impl) in STOCK for impl in differing):
        cures = sorted(parts - differing)
        text = f"replacing only {', '.join(cures)} removed it" if cures else "which operator is not known"
        tried = [word for name in ("matmul", "attention", "norm") for word in ("--impl", f"invariant:{name}")]
        command = "" if parts else repeated(run.header, "embed", "--impl", "stock", *tried, names=_EMBED)
        steps.append(Step("operator", text, bool(cures), command))
    if not any(role_of(impl) == Role.INVARIANT for impl in impls):
        steps.append(Step("cure", NOT_RUN, False, repeated(run.header, "embed", "--impl", "both", names=_EMBED)))
    return steps


def _of_classes(report: Report) -> Step:
    rows = [row for r in report.runs for row in r.run.rows if row.measured]
    left: dict[str, dict[str, None]] = {}  # member -> operators in which it is not in the class, each once
    for row in rows:
        if row.differs or row.wrong:
            left.setdefault(row.impl, {})[row.operator] = None
    if left:
        named = "; ".join(f"{impl} ({', '.join(operators)})" for impl, operators in left.items())
        return Step("operator", one_line(f"not in the class everywhere: {named}", 320))
    members = plural(len({row.impl for row in rows}), "member")
    return Step("operator", f"{members} tested, each in its class at every shape tested")


def _own_rows(report: Report) -> list[Row]:
    """Rows of a user's function, where the run is of such a function only."""
    commands = {r.run.header.command for r in report.runs}
    rows = _tested_rows(report) if len(report.runs) == 1 and commands <= {"probe", "check"} else []
    return [row for row in rows if role_of(row.impl) == Role.OTHER]


def _of_servers(report: Report) -> list[Step]:
    """What a run over servers shows of the cause, and the commands for the rest."""
    servers = [r.endpoint for r in report.runs if r.endpoint is not None]
    differences = [text for server in servers for text in server.differences]
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    cause = one_line("; ".join(differences[:3]) + more, 320) or "nothing differs, so there is none to name"
    prompt = one_line(next((p.text for r in report.runs for p in r.samples), ""), 80)
    greedy = "; a trace is greedy, and shows only what the logits do" if any(map(_is_drawn, report.runs)) else ""
    operator = f"a server does not show it: trace the model's folder in process{greedy}"
    cure = f"{'; '.join(dict.fromkeys(server.cure for server in servers))}; sample again, and compare the two runs"
    return [
        Step("cause", cause),
        Step("operator", operator, False, shlex.join(["nondet", "trace", "--model", "FOLDER", "--prompt", prompt])),
        Step("cure", cure, False, "nondet diff BEFORE.jsonl AFTER.jsonl"),
    ]


def _stock_summaries(report: Report) -> list[tuple[RunSection, Sample, SampleSummary]]:
    """Stock completions, else all, run by run; the default backend before the others, the largest sample first."""
    every = [(r, p, s) for r in report.runs for p in r.samples for s in p.summaries]
    rows = [found for found in every if role_of(found[2].impl) in STOCK] or every
    return sorted(rows, key=lambda row: (report.runs.index(row[0]), role_of(row[2].impl) != Role.STOCK, -row[2].n))


def _culprits_of(*sections: RunSection) -> list[Culprit]:
    """The culprits that a trace of these runs named, in order: in a diagnosis, those behind its finding."""
    return [c for r in sections if r.run.culprits for c in blamed(r.run, r.story.finding if r.story else "")]


def _cure_refuted(report: Report) -> bool:
    """Whether anything diverged under the invariant implementation here, so that it is not a fix."""
    steps = [s for r in report.runs for s in r.run.steps if s.name == "cure"]
    verdicts = [v for r in report.runs for v in r.verdicts if v.role == Role.INVARIANT]
    return any(s.outcome == "no" for s in steps) or any(v.is_fault for v in verdicts)


def _token(report: Report) -> Step:
    sampled = _stock_summaries(report)
    forked = next(((s, s.first_fork) for _, _, s in sampled if s.first_fork), None)
    if forked is not None:
        return Step("token", _fork_text(*forked))
    reached = next((c.token for c in _culprits_of(*report.runs) if c.token >= 0), None)
    if reached is not None:
        return Step("token", f"the traced difference reaches the logits of token {reached}")
    effects = [e for r in report.runs for of in (r.axes or {}).values() for e in of.values() if e.tally.tried]
    varied = [e for e in effects if role_of(e.impl) in STOCK]
    if differing := [e for e in varied if e.differs]:
        first = min((e.first for e in differing if e.first is not None), default=None)
        where = "" if first is None else f", first in the bits of token {first}"
        return Step("token", f"traces of stock differ{where}")
    if varied:
        return Step("token", "no trace changes with what was varied")
    if sampled:
        s = max((s for _, _, s in sampled), key=lambda s: s.n)
        close = ", but their logprobs did: with a smaller margin a token could change" if s.distinct_traces > 1 else ""
        return Step("token", f"none differs in {s.n:,} completions of {s.impl}{close}")
    over = ["--ranks", "2"] if {row.probe for r in report.runs for row in r.run.rows} == {"all-reduce"} else []
    return Step("token", "no completions here", known=False, command=_again(report, "sample", *over))


def _fork_text(s: SampleSummary, fork: Fork) -> str:
    """Where completions of an implementation first differ, what they continue with, and how near that was."""
    tokens = [one_line(figures.token(b.text, b.token_id), 40) for b in fork.branches[:3]]
    ways = [
        f"{b.count:,} continue with {token}{f' (id {b.token_id})' * (tokens.count(token) > 1)}"
        for b, token in zip(fork.branches, tokens, strict=False)
    ]
    near, margin = "", min((b.margin_min for b in fork.branches if b.margin_min is not None), default=None)
    if s.draws is not None:  # drawn tokens flip at a boundary between tokens, wherever the margin is
        near = f"; the nearest draw there {percent(s.draws.nearest)} of the mass from another token"
    elif margin is not None:
        near = f"; the two largest logits there are {f'{figures.number(margin)} apart' if margin else 'equal'}"
    return f"{s.impl} diverges at token {fork.index}: of {s.n:,} completions {', '.join(ways)}{near}"


def _operator(report: Report) -> Step:
    command = _trace_command(report)
    for c in _culprits_of(*report.runs):
        # the pair that was traced need not be the completions whose token is named above
        ahead = f", ahead of token {c.token}" if c.token >= 0 else ""
        # a record's own words, up to the kernels, which the next step names
        ends = [c.sentence.find(kernel) for arm in c.kernels for kernel in arm if kernel and kernel in c.sentence]
        said = c.sentence[: min(ends)].rstrip(" ;,") if ends else c.sentence
        text = one_line(f"in the pair traced{ahead}: {said}", 320)
        return Step("operator", text, bool(c.call), "" if c.call else command)
    if any(r.run.culprits for r in report.runs):
        return Step("operator", f"not named: {NOT_MET}", False, command)
    if cures := _cures(report):
        named = ", ".join(dict.fromkeys(family for family, _ in cures))
        return Step("operator", f"{named}: {REMOVED}, in {cures[0][1]:,} completions")
    if any(map(_is_drawn, report.runs)):
        return _of_drawn(report)
    if rows := _divergent_rows(report):
        operators = dict.fromkeys(one_line(r.operator, 40) for r in rows if r.operator != r.impl)
        text = f"tested in isolation, {one_line(rows[0].impl, 60)} diverges"
        text += f" in {', '.join([*operators][:6])}" * bool(operators)
        return Step("operator", text, known=not _stock_summaries(report), command=command)
    if any(row.probe not in _BESIDE for row in _tested_rows(report)):
        return Step("operator", "none of those tested depends on the batch or the run")
    return Step("operator", "not traced yet", known=False, command=command)


def _cures(report: Report) -> list[tuple[str, int]]:
    """(families whose replacement removed every divergence of a prompt, its completions)."""
    found = [(cure, p) for r in report.runs for p in r.samples for cure in smallest_cures(p.summaries)]
    return [(cure, next(s.n for s in p.summaries if families_of(s.impl) == cure)) for cure, p in found]


def _is_drawn(section: RunSection) -> bool:
    """Whether the run drew its tokens at a temperature."""
    return bool(section.run.header.plan.get("sampling"))


def _of_drawn(report: Report) -> Step:
    """A trace is greedy: it explains logits that differ under a draw, but not a draw."""
    summaries = [s for _, _, s in _stock_summaries(report)]
    differing = {s.impl for s in summaries if s.distinct_traces > 1}
    if differing - set(UNSEEDED):
        text = "not traced; a trace is greedy, and shows only what the logits do: here they differ under one draw"
        return Step("operator", text, False, _trace_command(report))
    if not differing:
        return Step("operator", "nothing differs under one seed")
    if seeded := sum(s.n for s in summaries if s.impl == "stock-seeded"):
        text = f"none seen: stock-seeded, with stock's logits, is identical in {seeded:,}; only the draw is left"
        return Step("operator", text)
    text = "not known: the engine's own draw changes texts whatever the logits; stock-seeded separates the two"
    command = _again(report, "sample", "--impl", "stock-seeded")
    if "--temperature" not in command:  # of a run that no command line began
        drawn = next(r.run.header.plan["sampling"] for r in report.runs if _is_drawn(r))
        command += f" --temperature {drawn['temperature']:g}"
    return Step("operator", text, False, command)


def _again(report: Report, *words: str, names: Collection[str] = SAMPLE) -> str:
    """A command with the model, prompt and machine of these runs."""
    run = next((r.run for r in report.runs if r.run.header.command in _OF_MODELS), report.runs[0].run)
    if run.header.command not in _OF_MODELS and names in (MODEL, SAMPLE):
        names = MACHINE
    model = _model_of(run)
    if "--model" in names and model and not {"--model", f"--model={model}"} & {*own_options(run.header, names)}:
        words = (*words, "--model", model)
    return repeated(run.header, *words, names=names)


def _model_of(run: Run) -> str:
    """The name of the model of a run; "" for the embedded one, and where there is none."""
    model = run.header.plan.get("model")
    name = str(model.get("name") or "") if isinstance(model, dict) else ""
    return "" if name == "embedded" else name


def _trace_command(report: Report) -> str:
    """The trace of two recorded completions that differ, else of the run's model and prompt."""
    for r, p, s in _stock_summaries(report):
        if s.distinct_traces < 2:
            continue
        if pair := _differing(r.run, p.prompt, s.impl):
            requests = [word for name in pair for word in ("--request", name)]
            return shlex.join(["nondet", "trace", "--run", r.run.source, *requests])
        words = ["--prompt", p.text] if _model_of(r.run) else []
        names = [n for n in MODEL if not (words and "prompt" in n)]
        words += ["--impl", s.impl] if s.impl != "stock" and not _is_drawn(r) else []
        if not any("graphs=on" in word for word in figures.typed_words(r.run.header)):  # a graph can't be traced
            names.append("--load")
        return _again(Report([r]), "trace", *words, names=names)
    return _again(report, "trace", names=MODEL)


def _differing(run: Run, prompt: int, impl: str) -> tuple[str, ...]:
    """A completion of the most common trace and one of another, of other tokens if possible; () without a pair. A trace
    is greedy, and replays what a recording holds."""
    recorded = {(kept.impl, kept.round) for kept in run.tapes}
    good = [c for c in run.completions if (c.impl, c.prompt, c.status) == (impl, prompt, "ok")]
    mine = [c for c in good if (c.impl, c.round) in recorded]
    if not mine or run.header.plan.get("sampling") or run.header.plan.get("ranks") or engine_of(run):
        return ()
    most_common = Counter(c.trace for c in mine).most_common(1)[0][0]
    first = next(c for c in mine if c.trace == most_common)
    others = sorted((c for c in mine if c.trace != most_common), key=lambda c: c.tokens_digest == first.tokens_digest)
    return (first.request, others[0].request) if others else ()


def _rows(report: Report, *roles: Role) -> list[Row]:
    """Measured rows, of implementations with these roles if any are given; without demonstrations."""
    probes = (p for r in report.runs for p in r.probes if not p.demonstration)
    rows = [row for p in probes for case in p.cases for row in case.measured]
    return [row for row in rows if not roles or role_of(row.impl) in roles]


def _tested_rows(report: Report) -> list[Row]:
    """Those of stock, or of a user's functions where stock was not tested."""
    return _rows(report, *STOCK) or _rows(report, Role.OTHER)


def _divergent_rows(report: Report) -> list[Row]:
    """Rows whose bits depend on the batch or the run: of the implementation that the answer is about, else of any."""
    of_each = (_rows(report, Role.STOCK), _tested_rows(report), _rows(report))
    differ = ([r for r in rows if (r.differs or r.replays_parted) and axis_of(r) in _OF_BATCHES] for rows in of_each)
    return next(filter(None, differ), [])


def _kernel(report: Report) -> Step:
    culprits = _culprits_of(*report.runs)
    for c in (c for c in culprits if any(c.kernels)):
        arms = [", ".join(dict.fromkeys(map(short_kernel, arm))) for arm in c.kernels]
        text = " compared with ".join(arm or "none seen" for arm in arms[:2])
        if len(set(arms)) == 1:
            same = all(set(arm) == set(c.kernels[0]) for arm in c.kernels)
            text = f"{arms[0]} in both{'' if same else ', with other template arguments'}"
        return Step("kernel", one_line(text, 260))
    families = [c.family for c in culprits] + [family for family, _ in _cures(report)]
    probe = PROBE_OF.get(next(filter(None, families), ""), "")
    rows = [r for r in _divergent_rows(report) if not probe or r.probe == probe]
    if rows:
        row = clearest(rows)
        unnamed = "" if row.kernel_sets else "; kernel names are unavailable" + " on CPU" * (row.device == "cpu")
        return Step("kernel", one_line(f"{row.operator} in isolation, {row.case}: {map_text(row, 3)}{unnamed}", 300))
    if not probe and any(row.probe not in _BESIDE for row in _tested_rows(report)):
        return Step("kernel", "none to name: no operator depends on the batch or the run")
    command = _again(report, "probe", *([probe] if probe else ["matmul", "attention"]), names=("--dtype", *MACHINE))
    for r in report.runs:
        if any(c.call and c.family in PROBE_OF for c in _culprits_of(r)):
            command = repeated(r.run.header, "probe", "--from-trace", r.run.source, names=MACHINE)
            break
    return Step("kernel", "not probed yet", known=False, command=command)


def clearest(rows: Sequence[Row]) -> Row:
    """The row whose picture explains most: few classes and several kernels, bfloat16 and products first. Where the
    values of other rows change a row, the number of classes explains nothing."""

    def coarse(row: Row) -> int:
        pairs = zip(row.values, row.values[1:], row.labels, row.labels[1:], strict=False)
        return max((b - a for a, b, x, y in pairs if x != y and isinstance(a, int) and isinstance(b, int)), default=0)

    return min(
        rows,
        key=lambda r: (
            axis_of(r) != Axis.BATCH, "by meaning" in r.reason, not r.labels, r.varied != "neighbour_values",
            r.varied != "batch_size",
            not r.kernel_sets, role_of(r.impl) != Role.STOCK, r.dtype != "bfloat16", r.distinct > 6, coarse(r),
            -r.distinct,
        ),
    )  # fmt: skip


def _cure(report: Report) -> list[Step]:
    """The fix, and what it costs where it is one."""
    engines = [e for r in report.runs if isinstance(e := r.run.header.plan.get("engine"), dict) and e.get("impls")]
    known = all("invariant" in e["impls"] for e in engines)  # an engine without it leaves the question to nondet's own
    command = _again(report, "sample", "--impl", "both", names=[n for n in SAMPLE if known or n != "--engine"])
    stories = [r.story for r in report.runs if r.story]
    said = next((s.answers["Cure"] for s in stories if "Cure" in s.answers), "")
    traced = next((v.families for r in report.runs for v in r.run.trace_verdicts if v.families), None)
    verdicts = [v for r in report.runs for v in r.verdicts if v.role == Role.INVARIANT]
    sampled = [v for v in verdicts if v.prompt is not None] or verdicts
    if said:
        text = one_line(said.partition(" (at 95%")[0].rstrip("."), 200)  # a record's own words, its bound left out
    elif sampled:
        text = f"invariant: {min((v.finding for v in sampled), key=list(Finding).index)}"
    elif traced:
        text = one_line(f"replacing {' and '.join(traced)} removes the divergence", 420)
    else:
        return [Step("cure", NOT_RUN, known=False, command=command)]
    if _cure_refuted(report):  # its cost does not matter
        return [Step("cure", text)]
    if (said or (stories and not sampled)) and not any(s.cured for s in stories):
        return [Step("cure", text, known=False, command=command)]
    cost = _cost(report)
    return [Step("cure", text, known=cost.known), cost]  # of a terminal's lines, the two together


def _cost(report: Report) -> Step:
    """The lowest fair ratio end to end, else the command that measures it."""
    speeds = [speed_ratio_of(r.run) for r in report.runs if r.samples or r.story]
    if measured := [s for s in speeds if s is not None and not s.no_cost]:
        lowest = f", the lowest of {len(measured)}" if len(measured) > 1 else ""
        return Step("cost", f"{ratio_text(min(measured, key=lambda s: s.ratio))}{lowest}")
    command = _again(report, "sample", "--turns", names=("--model", "--dtype", *MACHINE))
    return Step("cost", "not measured", False, command)


class Suggestion(NamedTuple):
    """The command to run next, and what it shows."""

    command: str
    why: str


class FirstScreen:
    """The answer, the run whose finding it is (`section`), chain, picture and next command; a bench has neither chain
    nor picture. `effect` is None where that run holds neither a verdict nor times. Of several runs, chain and next
    command are of this run, and of the others of its model and machine (`report`)."""

    def __init__(self, report: Report) -> None:
        self.runs = runs = report.runs
        self.section = section = min(runs, key=_gravity)
        self.report = Report([section, *(r for r in runs if r is not section and _goes_with(r.run, section.run))])
        self.run = section.run
        self.command = self.run.header.command if len(self.report.runs) == 1 else ""
        self.effect, self.answer = section.effect, section.answer
        if all(r.run.cells for r in runs):
            self.effect = Effect.SPEED
        elif section.run.cells:  # whose own sentence is of speed
            self.answer = figures.findings_text(section.verdicts, 3)
        if self.effect is Effect.NONE and not all(r.run.complete for r in runs):
            self.effect = Effect.SO_FAR
        self.answer = f"{section.name}: " * (len(runs) > 1) + figures.sentence(self.answer)
        self.diverged = self.effect is not None and self.effect.is_change
        # beside a model's answer, what other runs found of operators by themselves
        others = [r for r in runs if r is not section and not r.is_of_model and r.effect and r.effect.is_change]
        isolated = [Step(ISOLATED, f"{r.name}: {r.answer}") for r in others] if section.is_of_model else []
        self.steps = () if self.effect in (None, Effect.SPEED) else (*chain(self.report), *isolated)
        self.picture = None if self.effect is Effect.SPEED else _picture(section)
        self.next = next_command(self) if self.effect else Suggestion("", "")
        more = any(v.effect.is_change for v in section.defaults) or any(s.label == ISOLATED for s in self.steps)
        self.style = "bad" if self.diverged else "good" if self.effect is Effect.NONE and not more else "dull"

    @property
    def machines(self) -> list[str]:
        """What was tested, and where; each once."""
        lines = []
        for r in self.runs:
            here = figures.environment_line({k: r.run.header.environment.get(k) for k in ("gpu", "cpu", "torch")})
            servers = [f"{s.url}: {s.software or s.protocol}, model {s.answered_as or s.model}" for s in r.run.servers]
            lines += [*(one_line(text, 200) for text in servers), f"{'requests sent from: ' * bool(servers)}{here}"]
        return [*dict.fromkeys(lines)]

    @property
    def card(self) -> Picture | None:
        """The picture of answers with facts above and below it, to be posted; None where the picture is another one."""
        if self.picture is None or self.picture.name != "answers":
            return None
        named = next((f"{c.call} of {c.module}" for c in _culprits_of(self.section) if c.call), "")
        facts = {s.label: s.text for s in self.steps if s.label in _POSTED} | ({"operator": named} if named else {})
        return card_of(self.picture.data, self.section.title, str(self.effect), facts)

    @property
    def blocks(self) -> list[Block]:
        """All of it in markdown; of a terminal's 25 lines, those of the chain that are known."""
        made: list[Block] = [Heading(self.effect, level=2, only=MARKDOWN)] if self.effect else []
        made.append(Paragraph(self.answer, only=MARKDOWN))
        for step in self.steps:
            more = (" (more: ", Bit(step.command, "code"), ")") if step.command else ()
            said = (Bit(step.label, "label"), Bit(one_line(step.text, 280)))
            made += [Paragraph(said, "", BRIEF, 20)] if step.known else []
            made.append(Paragraph((Bit(step.label, "strong"), f": {one_line(step.text, 400)}", *more), only=MARKDOWN))
        if self.next.command:
            command, why = Bit(one_line(self.next.command, 400), "code"), Bit(figures.sentence(self.next.why))
            made.append(Paragraph(("Next: ", command, ": ", why), only=MARKDOWN))
        return made


def _goes_with(one: Run, other: Run) -> bool:
    """Whether both are of one machine, and of one model if both are of any."""
    machines, models = set(), set()
    for run in (one, other):
        model = run.header.plan.get("model")
        models.add(str((model.get("name") if isinstance(model, dict) else model) or ""))
        machines.add(str(run.header.environment.get("gpu") or run.header.environment.get("cpu") or ""))
    return len(models - {""}) < 2 and len(machines - {""}) < 2


def _gravity(r: RunSection) -> tuple[bool, int, bool, int, int]:
    """A model's own answer first, then the gravest change, then a diagnosis, though it have no answer."""
    rank = len(Effect) if r.effect is None else r.effect.rank
    change = rank if rank < Effect.NONE.rank else len(Effect)
    answers = r.is_of_model and r.effect is not None and r.effect.is_answer
    return not answers, change, r.story is None, rank, -len(r.run.completions)


# What the next command shows, by the line of the chain that is open.
_WHY = {
    "token": "shows whether completions change, and from which token on",
    "operator": "names the operator that diverges first",
    "kernel": "shows which kernels run at which sizes",
    "cure": "shows whether the batch-invariant kernels remove the divergence",
    "cost": "measures what the batch-invariant kernels cost",
}


def next_command(o: FirstScreen) -> Suggestion:
    """What to run next: first what failed, then what the kind of run, the chain or its end leave open."""
    runs = o.report.runs
    if all(r.is_of_trainer for r in runs):
        return _after_training(o.run) if o.run.training_steps else _after_mismatch(o.run)
    failed = [(r, p) for r in runs for p in r.problems if p.kind == "failed"]
    if failed and not o.diverged:  # failed cases come before new ones
        return _mended(*failed[0], sum(p.count for _, p in failed))
    if all(r.endpoint is not None for r in runs):
        if o.diverged:
            operator = next(s for s in o.steps if s.label == "operator")
            return Suggestion(operator.command, "names the operator, where the model's folder is at hand")
        command = _again(o.report, "sample", "--n", "3000", "--load", "heavy", names=SERVER)
        return Suggestion(command, "compares more answers, under a heavier load")
    if o.command == "trace":
        return Suggestion("", "") if o.run.operators_compared else _after_trace(o)
    if own := _own_rows(o.report):
        return _after_own(o, own)
    if o.command == "certify" or any(c.tokens for c in o.run.cells):
        return Suggestion("", "")  # a certificate and an engine's times are answers: nothing follows from them
    if o.command == "bench":
        model = "".join(own_options(o.run.header, ["--models"])).removeprefix("--models").removeprefix("=")
        words = ["--model", model] if model not in ("", "embedded") else []
        return Suggestion(_again(o.report, "sample", "--impl", "both", *words, names=MACHINE), _WHY["token"])
    if o.command == "probe" and all(p.demonstration for r in runs for p in r.probes):
        command = _again(o.report, "probe", "all", names=MACHINE)
        return Suggestion(command, "tests the library's own operators; these cases only demonstrate a cause")
    return _after_chain(o)


def _after_chain(o: FirstScreen) -> Suggestion:
    """What the chain leaves open, else what follows from its end."""
    refuted, embedded = o.diverged and _cure_refuted(o.report), all(r.run.embed_passes for r in o.report.runs)
    certify = _again(o.report, "certify", "all", names=MACHINE)
    tested = "tests the batch-invariant kernels bit for bit on this machine"
    wrap = f"{tested}; then wrap the model in nondet.batch_invariant()"
    if o.diverged and o.run.header.plan.get("met") and not refuted:
        return Suggestion(certify, wrap)  # what a trace found in a model was tested by itself: nothing is left to find
    open_steps = [s for s in o.steps if s.command and (o.diverged or s.label in ("token", "cure", "cost"))]
    for step in open_steps:
        if step.label != "token" or not (o.command == "diagnose" and o.diverged):  # which has tokens of its own
            return Suggestion(step.command, _WHY[step.label])
    if embedded and refuted:
        return Suggestion(certify, tested)
    if embedded and not o.diverged:
        command = _again(o.report, "embed", "--batch", "128", names=[n for n in _EMBED if n != "--batch"])
        return Suggestion(command, "compares vectors in larger batches")
    if refuted:
        command = _again(o.report, "trace", "--impl", "invariant", names=MODEL)
        return Suggestion(command, "names the operator that diverges under it, too")
    if o.command == "diagnose" and any(r.story and r.story.cured for r in o.report.runs):
        return Suggestion("with nondet.batch_invariant(): ...", "in Python: removes the divergence of what runs within")
    return Suggestion(certify, wrap) if o.diverged else _after_clean(o)


def _after_clean(o: FirstScreen) -> Suggestion:
    """Where nothing diverged and nothing is missing: a gate of what was sampled, a larger sample, or a first one."""
    sampled = _stock_summaries(o.report)
    if sampled and o.command == "sample":
        why = "passes or fails this run in CI, and says how rare a divergence it would have shown"
        return Suggestion(repeated(o.run.header, "gate", o.run.source, "--impl", sampled[0][2].impl), why)
    if sampled:
        command = _again(o.report, "sample", "--n", "10000", "--load", "heavy")
        return Suggestion(command, "compares more completions, under a heavier load")
    return Suggestion(_again(o.report, "sample"), _WHY["token"])


def _after_trace(o: FirstScreen) -> Suggestion:
    families = next((v.families for v in o.run.trace_verdicts if v.families), None)
    snippet = f"nondet.batch_invariant({families!r})" if families else ""
    if next((c.family in PROBE_OF for c in _culprits_of(o.report.runs[0]) if c.call), False):
        then = f"; {snippet} replaces it" if snippet else ""
        command = repeated(o.run.header, "probe", "--from-trace", one_line(o.run.source, 200), names=MACHINE)
        return Suggestion(command, f"tests that operator by itself, at these shapes{then}")
    if snippet:
        return Suggestion(f"with {snippet}: ...", "in Python: replaces what diverged in this trace")
    return Suggestion(_again(o.report, "sample", "--impl", "both"), _WHY["token"])


def _after_own(o: FirstScreen, own: Sequence[Row]) -> Suggestion:
    """The smallest probe that shows what was found in a user's function; for a clean one the longer sweep."""
    bad = [row for row in own if row.wrong] or [row for row in own if row.differs]
    row = bad[0] if bad and bad[0].wrong else clearest(bad or own)
    target = row.impl.rpartition("=")[2]
    words = figures.probe_of_mine(row, target)
    pinned = {word for word in words if word.startswith("--")} <= {*figures.typed_words(o.run.header)}
    named = row.probe != "check" and "<" not in target and not target.startswith("__main__")  # --impl can name it
    if bad and named and not pinned:
        why = f"repeats the case in which it {'is wrong' if row.wrong else 'diverges'}"
        return Suggestion(repeated(o.run.header, *words[1:], names=MACHINE), why)
    if not bad and o.command == "probe" and not o.run.header.plan.get("full"):
        command = repeated(o.run.header, *words[1:5], "--full", names=_PROBE)
        return Suggestion(command, "tests it at batch sizes up to 4,096")
    page = repeated(o.run.header, "report", one_line(o.run.source, 200), "--out", "report.html")
    return Suggestion(page, "shows every case with its batch sizes")


def _mended(section: RunSection, problem: Problem, count: int) -> Suggestion:
    """The run's own command again, and what has to be fixed first: the first failure of `count`."""
    command, words = section.run.header.command, figures.typed_words(section.run.header)
    if words[:1] != [command]:  # a script's own, of a run that no command line began
        words = [command]
    if {"--out", "-o"} & {*words} and "--force" not in words:
        words.append("--force")
    which = "the failure" if count == 1 else f"the first of {count:,} failures"
    more = " (ask for smaller sizes, or free memory)" if "memory" in problem.reason.lower() else ""
    why = f"again, once {which} is mended: {problem.name}: {problem.reason}{more}"
    return Suggestion(shlex.join(["nondet", *words]), one_line(why, 320))


def _after_mismatch(run: Run) -> Suggestion:
    typed = own_options(run.header, ("--rollouts", "--model", "--older", "--trainer", "--dtype", *MACHINE))
    flags = {word.partition("=")[0] for word in typed}
    if "--rollouts" not in flags or {"--model", "--older"} <= flags:
        command = repeated(run.header, "rl", "--steps", "20", names=("--model", "--dtype", *MACHINE))
        return Suggestion(command, "shows what becomes of it over steps of reinforcement learning")
    more, why = ["--model", "FOLDER"], "tests what kind of mismatch it is"
    if "--model" in flags:
        more, why = ["--older", "CHECKPOINT"], "tests whether a side has weights of before"
    return Suggestion(shlex.join(["nondet", "mismatch", *typed, *more]), why)


def _after_training(run: Run) -> Suggestion:
    more, why = ["--sampler", "fp8"], "samples from rounded weights: a mismatch that no kernel removes"
    if not {"stock", "invariant"} <= {s.impl for s in run.training_steps}:
        more, why = ["--arms", "stock,invariant"], "shows sampler and trainer with and without batch-invariant kernels"
    elif len({s.seed for s in run.training_steps}) == 1:
        more, why = ["--seeds", "3"], "shows how far seeds scatter, which is what arms are to be compared with"
    return Suggestion(repeated(run.header, "rl", *more, names=[name for name in _RL if name != more[0]]), why)


def _picture(section: RunSection) -> Figure | None:
    """What shows the finding: answers that differ, a call in both arms, plots, a map, or the one answer of all."""
    forked = next((p for p in section.samples if any(s.first_fork for s in p.main)), None)
    if forked is not None:
        return _answers(section, forked)
    named = next((c for c in _culprits_of(section) if c.call), None)
    if named is not None:
        return pair_of(named, section.run, "fig-answer")
    if section.is_of_trainer:
        drawn = training_figure(section.run) if section.run.training_steps else mismatch_figure(section.run)
        return drawn and replace(drawn, data=drawn.data._replace(panels=drawn.data.panels[:2]), title="")
    found = _divergent_rows(Report([section]))
    if rows := [r for r in found if r.labels and r.distinct <= 12 and axis_of(r) == Axis.BATCH]:
        chosen = clearest(rows)
        cases = (case.rows for p in section.probes for case in p.cases)
        beside = next(of for of in cases if any(row is chosen for row in of))
        shown = Case([row for row in beside if row.impl in (chosen.impl, "invariant")])
        return Figure("family", (shown,), "fig-answer")
    return _answers(section, section.samples[0]) if section.samples else None


def _answers(section: RunSection, sample: Sample) -> Figure | None:
    """The answers under stock and invariant, and under the first implementation that differs. Where one has a fault
    that no answer and no logprob shows, such as another end, a picture of one answer would deny it."""
    first = next((s for s in sample.main if s.first_fork), None)
    denied = {v.impl for v in section.verdicts if v.is_fault} - {s.impl for s in sample.main if s.distinct_traces > 1}
    named = [s for s in sample.main if s is first or role_of(s.impl) in (Role.STOCK, Role.INVARIANT)]
    shown = tuple(s for s in named if s.impl not in denied)
    return answers_of(sample, sample.main if shown == sample.main else shown, "fig-answer") if shown else None
