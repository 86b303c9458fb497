"""The steps of a diagnosis, in order. Each reads what is in the run file and adds its own evidence to it.

So a run that was killed continues with the first step that has no record, and reaches the same records: only the model
is carried in memory from step to step. Time decides before a step begins, never in it: whether it runs, and how many of
its rounds or values, by how long the first round took. The step's record says what was left out.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from typing import Any, NamedTuple

import msgspec

from nondet.core.compare import first_difference
from nondet.core.records import AxisTried, Record, Run, Step
from nondet.core.runfile import RunWriter, read_run
from nondet.core.traces import nonfinite_logprobs, shared_length, tokens_digest
from nondet.diagnose import verdict
from nondet.diagnose.verdict import INVARIANT, QUESTIONS, STOCK, axis_title, steps_of
from nondet.kernels.dispatch.block import make_ready
from nondet.sampling.axes import Conditions
from nondet.sampling.collect import Here, Survey, collect
from nondet.sampling.engine import TransformersEngine, pinned
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Engine, Load, Plan, Request, Session, long_prompt
from nondet.sampling.replay import digest_of
from nondet.trace.search import Arm, Search, arms_of
from nondet.verdict.findings import Finding, plural

ALL = "(--within 0 runs all)"


def greedy_step(sessions: Sequence[Session]) -> Step:
    """The answer for all tokens of the sessions, the first of which is the solo run: its digests are kept."""
    given = [(o, session.tops.get(o.request.id, [])) for session in sessions for o in session.outcomes]
    chosen = [(o.request.id, i, *of) for o, tops in given for i, of in enumerate(zip(o.token_ids, tops, strict=False))]
    lost, ties = sum(nonfinite_logprobs(o.logprobs) for o, _ in given), sum(top[0] == top[1] for *_, top in chosen)
    wrong = [
        f"{name}, token {index}: {token} where {likeliest} has the top logit"
        for name, index, token, (top, second, likeliest, _) in chosen
        if token != likeliest and top != second
    ]
    everywhere = f"{len(chosen):,} chosen tokens, solo and in batches,"
    table = (
        (lost, "no", f"{lost:,} of {everywhere} have a NaN or infinite logprob"),
        (wrong, "no", f"{len(wrong):,} of {everywhere} do not have the largest logit ({''.join(wrong[:1])})"),
        (chosen, "yes", f"each of {everywhere} has the largest logit; {ties:,} are exact ties"),
        (True, "unknown", "the engine gives no logits"),
    )
    outcome, sentence = next((outcome, sentence) for holds, outcome, sentence in table if holds)
    solo = sessions[0].outcomes[0]
    facts = {"trace": digest_of(solo), "tokens": tokens_digest(solo.token_ids)}
    return Step(name="greedy", outcome=outcome, sentence=sentence, figures={"nonfinite": lost}, facts=facts)


def margin_step(solo: Session, other: Session) -> Step:
    """Whether the margins of flips are within the effect of concurrent requests on the two largest logits.

    Contexts are equal up to and including the first token that differs: its own logits are those of the flip, and the
    spread is measured on the steps before it. Both logits may change, so a margin is within the noise up to twice the
    spread.
    """
    reference, spread = solo.outcomes[0], 0.0
    tops = solo.tops.get(reference.request.id, [])
    flips: list[tuple[int, float]] = []  # token, and the solo margin of its two largest logits
    for theirs in (o for o in other.outcomes if o.request.target and o.finish != "error"):
        given, shared = other.tops.get(theirs.request.id, []), shared_length(reference.token_ids, theirs.token_ids)
        for pair in zip(tops[:shared], given[:shared], strict=False):
            mine, its = (dict(zip(top[2:], top[:2], strict=True)) for top in pair)
            spread = max([spread, *(abs(mine[token] - its[token]) for token in mine.keys() & its.keys())])  # not NaN
        if shared < min(len(reference.token_ids), len(theirs.token_ids), len(tops), len(given)):
            flips.append((shared, tops[shared][0] - tops[shared][1]))
    within = sum(margin <= 2 * spread for _, margin in flips)
    noise = f"the logits of the top tokens differ by up to {spread:.4g} between the arms"
    outcome, sentence = "unknown", f"no token flipped in the rounds that were compared; {noise}"
    if flips:
        outcome = "yes" if within == len(flips) else "no"
        sentence = (
            f"{plural(len(flips), 'completion')} flipped, the first at token {min(flips)[0]}; solo, the two largest "
            f"logits at a flip are at most {max(margin for _, margin in flips):.4g} apart; {noise}, so {within} of "
            f"{len(flips)} flips are within it (at most twice that)"
        ) + "; a flip beyond it is more than this rounding explains" * (outcome == "no")
    figures = {"flips": len(flips), "within": within, "spread": spread}
    return Step(name="margin", outcome=outcome, sentence=sentence, figures=figures)


# Every trial is an engine session of its own that differs from the solo request in one thing. All its completions of
# the prompt are compared with the reference, token by token and logprob bit by bit.

_NEW = 8  # tokens of each completion: differences show in the first few
_BATCHES = (2, 3, 4, 8, 16, 32)
_LENGTHS, _ARRIVALS = (1, 7, 33, 120), {"at once": 0, "5 steps later": 5}
_CHUNKS = (1, 7, 16, 32)
# tokens of a long prompt: attention takes its keys in tiles of 64 to 512, so a short one needs only one tile
_FAR, _BESIDE = 640, 7


class RequestAxis(NamedTuple):
    """One varied property of the other requests; `held` is what does not vary."""

    name: str
    held: str
    reference: Arm  # the session that the others are compared with
    trials: Sequence[Arm]  # one for each value; one that shares counts only if the engine took keys from the cache


def make_axes(
    load: Load, prompt: Sequence[int], completion: Sequence[int], context: int, seed: int = 0
) -> list[RequestAxis]:
    """The axes for a prompt, which its solo completion makes longer where it is short, under limits that are too wide
    to chunk anything by accident. `load` gives the page size, `context` is the model's number of positions."""
    long, lengths = long_prompt(prompt, completion, context), [n for n in _LENGTHS if n < context]
    far = tuple(islice(cycle((*prompt, *completion)), max(len(long), min(_FAR, context - _NEW))))
    budget = max(_BATCHES) * (len(prompt) + 1) + max([len(far), *lengths]) + _BESIDE * len(long)
    wide = replace(load, budget=budget, requests=max(_BATCHES), sharing=False, graphs=False)

    def request(name: str, tokens: Iterable[int], arrival: int = 0) -> Request:
        fed = tuple(tokens)
        return Request(name, name == "t0", fed, max(1, min(_NEW, len(completion), context - len(fed))), arrival)

    def trial(name: str, *requests: Request, **limits: Any) -> Arm:
        return Arm(name, "t0", requests, replace(wide, **limits), seed)

    one, long_one, far_one = (request("t0", tokens) for tokens in (prompt, long, far))
    batches = [trial(f"{size} requests", *(replace(one, id=f"t{i}") for i in range(size))) for size in _BATCHES]
    ragged = [
        trial(f"{length} tokens, {when}", one, request("b0", islice(cycle((*long[1:], long[0])), length), arrival))
        for when, arrival in _ARRIVALS.items()
        for length in lengths
    ]
    beside = [request(f"b{i}", long[i:]) for i in range(min(_BESIDE, len(long)))]
    late, short = [replace(r, arrival_step=2 + i) for i, r in enumerate(beside)], f"{len(beside)} short requests"
    fars = [trial(f"{short} at once", far_one, *beside), trial(f"{short} that begin beside its decode", far_one, *late)]
    chunks = [trial(f"chunks of {size}", long_one, budget=size) for size in _CHUNKS if size < len(long)]
    half = max(load.page, len(far) // 2)
    donors = {"the whole prompt": far, "its first half": (*far[:half], *reversed(far[half:]))}
    # the donor has finished by then, so no other request is in any step of this one; its second token is needed because
    # the engine only keeps pages of a request that has decoded
    later = replace(far_one, arrival_step=2 * len(far) + 8)
    shared = [trial(name, Request("b0", False, d, 2, 0), later, sharing=True) for name, d in donors.items()]
    solo, far_solo, whole = trial("alone", one), trial("alone", far_one), trial("in one piece", long_one)
    nothing, plain = trial("nothing shared", *shared[0].requests), "no chunks, no sharing"
    donor = f"no other request in its steps, a prompt of {len(far)} tokens, no chunks; an earlier one shares the prefix"
    return [
        RequestAxis("batch size", f"all requests have the same prompt and begin at once; {plain}", solo, batches),
        RequestAxis("ragged company", f"one other request with a prompt of another length; {plain}", solo, ragged),
        RequestAxis("long prompt", f"a prompt of {len(far)} tokens beside short requests; {plain}", far_solo, fars),
        RequestAxis("chunked prefill", f"no other request, a prompt of {len(long)} tokens, no sharing", whole, chunks),
        RequestAxis("prefix sharing", donor, nothing, shared),
    ]


def try_axis(engine: Engine, axis: RequestAxis, impl: str) -> AxisTried:
    """Run the reference and the trials. An `EngineStoppedError`, or a `UserError` where sizes are refused."""
    target = axis.reference.outcome(axis.reference.run(engine, every=True))
    found, unmet = dict[str, list[tuple[int | None, int | None]]](), list[str]()  # first differences of a trial
    for trial in axis.trials:
        session = trial.run(engine, every=True)
        if trial.load.sharing and not session.figures["hits"]:
            unmet.append(trial.name)
        else:
            found[trial.name] = [first_difference(target, o) for o in session.outcomes if o.request.target]
    every = [pair for pairs in found.values() for pair in pairs]
    tokens, traces = (sum(pair[i] is not None for pair in every) for i in (0, 1))
    note = "" if axis.trials else "the prompt is too short for this"
    note = f"the engine took no keys from the cache: {', '.join(unmet)}" if unmet else note
    differing = [name for name, pairs in found.items() if any(logprob is not None for _, logprob in pairs)]
    counts: dict[str, Any] = {"tried": len(every), "traces": traces, "tokens": tokens, "parted": differing}
    return AxisTried(axis=axis.name, impl=impl, held=axis.held, values=list(found), note=note, **counts)


# About how long a diagnosis of the default size may take, by device.
WITHIN_S = {"cpu": 180.0, "cuda": 120.0}
_FEWEST = 2  # rounds: completions of one round are not independent
_FOR_ROUNDS = 0.5  # of the limit, by when the rounds of stock are to end
_RATE_S = 8.0  # for rounds where the first has shown that the batch matters: further ones only narrow the rate
_TIMED = 2  # rounds of each implementation for the cost


@dataclass
class Diagnoser:
    """One diagnosis. Each of `QUESTIONS` is answered by the method of its name, from the records so far."""

    loaded: LoadedModel
    plan: Plan  # rounds of completions of one prompt among others
    writer: RunWriter
    seed: int
    threads: int | None
    say: Callable[[str], None]  # takes a line of text as each step begins and ends
    within_s: float = 0.0  # about how long it may take; 0.0: no limit
    bound: bool = False  # leave out the steps that have not begun by then; else it only limits what of stock runs

    def __post_init__(self) -> None:
        self.engine: Engine = TransformersEngine(self.loaded.model)
        self._kept: dict[int | None, Session] = {}

    def run(self) -> None:
        """Every step that the run file lacks, then the verdict; raises as `try_axis`, and finished steps are kept."""
        if self.loaded.device == "cuda":  # while stock's sessions wait for cuDNN's plans, outside of Python
            threading.Thread(target=make_ready, name="nondet-ready", daemon=True).start()
        with pinned(self.threads):
            for number, (name, question) in enumerate(QUESTIONS.items(), 1):
                step, title = steps_of(self._so_far)[name], f"[{number}/{len(QUESTIONS)}] {question}"
                if not step.outcome:
                    self.say(title)
                    self.writer.write(step := self.answer(name))
                # the answer that a user waits for, and why a step has none; the report has the others
                shown = name == "batch" or step.outcome in ("skipped", "unknown")
                self.say(f"{title} {step.outcome}" + (f": {step.sentence}" if shown else ""))
        self._write(verdict.conclude(self._so_far))

    def answer(self, name: str) -> Step:
        """The step of that name, after those before it; skipped where they settle it or no time is left."""
        late = self.bound and name not in ("greedy", "run", "batch") and self._left <= 0
        if reason := verdict.settled(self._so_far, name) or f"of {self.within_s:.0f} s none are left {ALL}" * late:
            return Step(name=name, outcome="skipped", sentence=reason)
        started, step = time.perf_counter(), getattr(self, f"_{name}")()
        return msgspec.structs.replace(step, seconds=time.perf_counter() - started)

    @property
    def _left(self) -> float:
        """Seconds of the limit that the steps so far have left."""
        return (self.within_s or math.inf) - sum(step.seconds for step in self._so_far.steps)

    def _greedy(self) -> Step:
        return greedy_step((self._known(None), self._known(0)))

    def _run(self) -> Step:
        traces = [digest_of(self._session(None).outcomes[0]) for _ in range(2)]
        self._collect(STOCK, 1)
        return verdict.run_step(self._so_far, [verdict.solo_of(self._so_far)["trace"], *traces])

    def _batch(self) -> Step:
        few, planned = self._is_proven(), len(self.plan.rounds)
        least, left = (1, _RATE_S) if few else (_FEWEST, self._left - (1 - _FOR_ROUNDS) * self.within_s)
        first, again = self._known(0).seconds, self._so_far.rounds[0].seconds  # the last one may compile, as the first
        count = sum(number < least or (number - 1) * again + first < left for number in range(planned))
        self._collect(STOCK, count)
        why = "the first round differs from the solo run, which is proof: " if few else ""
        less = f"{why}{plural(count, 'round')} of {planned} run {ALL}" if count < planned else ""
        return msgspec.structs.replace(verdict.batch_step(self._so_far), facts={"less": less})

    def _is_proven(self) -> bool:
        """Whether, under a limit, the first round, repeated with equal bits, differs from the solo run: which proves
        that the batch matters, so that more of the load or of an axis cannot change the answer."""
        differ = verdict.batch_step(self._so_far).figures["repeated_round_traces"]
        return bool(self.within_s and differ) and steps_of(self._so_far)["run"].outcome == "yes"

    def _axes(self) -> Step:
        axes, run = self._all_axes, self._so_far
        planned = sum(len(a.trials) for a in axes)
        few = self._is_proven() or planned * run.rounds[0].seconds > self._left
        wanted = {a.name: [t.name for t in a.trials if not few or t.load.sharing or t is a.trials[-1]] for a in axes}
        self._try_axes(STOCK, wanted)
        ran = sum(len(a.values) for a in self._so_far.axes)
        less = f"{ran} of {planned} values of the axes run {ALL}" if few else ""
        return msgspec.structs.replace(verdict.axes_step(self._so_far), facts={"less": less})

    def _try_axes(self, impl: str, wanted: Mapping[str, Collection[str]]) -> None:
        """Try these axes at these values, unless that is on record."""
        for axis in self._all_axes:
            if axis.name in wanted and ("axis", impl, axis.name) not in self.writer.done:
                trials = [t for t in axis.trials if t.name in wanted[axis.name]]
                record = try_axis(self.engine, axis._replace(trials=trials), impl)
                self.writer.write(record)
                self.say(f"  {axis_title(axis.name)}: {record.traces} of {record.tried} traces differ")

    def _operator(self) -> Step:
        """A trace of a round with a differing completion, of an axis, or of the round that differs from itself."""
        arms = self._arms()
        search = Search(
            self.engine,
            self.loaded.model,
            *arms,
            impl=STOCK,
            choose=arms[1].name == "in company",
            write=self._write,
            say=lambda line: self.say(f"  {line}"),
            sweeps=self.loaded.device != "cuda",  # cuDNN plans for each size, Triton compiles: many seconds
        )
        traced = search.run()
        self._write(traced)
        run, sentence, clean = self._so_far, "; ".join(traced.sentences), traced.finding == Finding.CLEAN
        outcome = "yes" if any(c.call for c in run.culprits) else "no" if clean else "unknown"
        if steps_of(run)["run"].outcome == "no" and verdict.cause_of(run) != Finding.RUN_TO_RUN:
            outcome, sentence = "unknown", f"{verdict.NOT_MET}: {sentence}"
        families = "+".join(traced.families or [])
        return Step(name="operator", outcome=outcome, sentence=sentence, facts={"families": families})

    def _margin(self) -> Step:
        return margin_step(self._known(None), self._known(verdict.differing_round(self._so_far) or 0))

    def _cure(self) -> Step:
        """The same load under the invariant implementation, the solo request, and the axes that differed."""
        run = self._so_far
        # run-to-run: only one round, run twice, can be compared. One round proves that stock differs; that the fix does
        # not takes all
        self._collect(INVARIANT, 1 if verdict.settled(run, "batch") else len(self.plan.rounds))
        with implementation(INVARIANT):
            solo = digest_of(self._session(None).outcomes[0])
            self._try_axes(INVARIANT, {a.axis: a.values for a in run.axes if a.impl == STOCK and a.traces})
        return verdict.cure_step(self._so_far, solo)

    def _cost(self) -> Step:
        """The first round, timed under stock and under invariant, once this process has run it under both."""
        speeds: dict[str, list[float]] = {STOCK: [], INVARIANT: []}
        for _turn in range(_TIMED + (0 not in self._kept)):  # alternating: a slower minute of the machine affects both
            for impl, seen in speeds.items():
                with implementation(impl):
                    session = self._session(0)
                seen.append(session.tokens / max(session.seconds, 1e-9))
        timed = [seen[-_TIMED:] for seen in speeds.values()]
        (stock, invariant), ratios = map(max, timed), [ours / theirs for theirs, ours in zip(*timed, strict=True)]
        figures = {"stock_tokens_per_second": stock, "invariant_tokens_per_second": invariant, "rounds": _TIMED}
        figures |= {"invariant_ratio_low": min(ratios), "invariant_ratio_high": max(ratios)}
        sentence = f"warm rounds, the better of {_TIMED}: stock {stock:,.0f} tokens/s, invariant {invariant:,.0f}"
        return Step(name="cost", outcome="yes", sentence=sentence, figures=figures)

    @cached_property
    def _all_axes(self) -> list[RequestAxis]:
        solo, context = self._known(None).outcomes[0], self.loaded.context or 2**31
        return make_axes(self.plan.load, solo.request.prompt, solo.token_ids, context, self.seed)

    def _known(self, number: int | None) -> Session:
        """A stock session of that round, or the solo one, run once in this process, for its logits."""
        return self._kept.get(number) or self._kept.setdefault(number, self._session(number))

    def _session(self, number: int | None) -> Session:
        return self._arms_of(number)[number is not None].run(self.engine, every=True)

    def _arms_of(self, number: int | None) -> tuple[Arm, Arm]:
        return arms_of(self.plan.rounds[number or 0], self.plan.load, self.seed)

    def _collect(self, impl: str, count: int) -> None:
        """Sample so many of the plan's rounds under the implementation."""
        base = Conditions(self.plan.load, self.loaded.dtype, threads=self.threads)
        survey = Survey(self.loaded, self.plan, base, [impl], seed=self.seed, wanted=lambda number: number < count)
        collect(survey, Here(self.loaded), self.writer, played=self._known(0) if impl == STOCK else None)

    def _arms(self) -> tuple[Arm, Arm]:
        run, number = self._so_far, verdict.differing_round(self._so_far)
        if number is not None or steps_of(run)["run"].outcome == "no":
            return self._arms_of(number)
        record = next(a for a in run.axes if a.traces)
        axis = next(a for a in self._all_axes if a.name == record.axis)
        trial = next(t for t in axis.trials if t.name == record.parted[0])
        return replace(axis.reference, name="alone"), replace(trial, name=f"{axis.name}: {trial.name}")

    @property
    def _so_far(self) -> Run:
        return read_run(self.writer.path, allow_truncated=True)

    def _write(self, record: Record) -> None:
        """Write the record, unless a killed run already did."""
        if record.key not in self.writer.done:
            self.writer.write(record)
