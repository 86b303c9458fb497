"""The steps of a diagnosis, in order. Each reads what is in the run file and adds its own evidence to it.

So a run that was killed continues with the first step that has no record, and reaches the same records: only the model
is carried in memory from step to step. A time limit is kept by looking at the clock between sessions, never by an
estimate: rounds and values are left out once it has passed, and the step's record says which.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle, islice
from typing import Any

import msgspec

from nondet.core.compare import first_difference
from nondet.core.records import AxisTried, Record, Run, Step
from nondet.core.runfile import RunWriter, read_run
from nondet.core.traces import nonfinite_logprobs, tokens_digest
from nondet.diagnose.verdict import (
    NOT_MET,
    QUESTIONS,
    axis_title,
    batch_step,
    blamed,
    conclude,
    coverage_gaps,
    cure_step,
    differing_rounds,
    margin_step,
    run_step,
    settled,
    steps_of,
)
from nondet.errors import EngineStoppedError
from nondet.kernels.dispatch.block import make_ready
from nondet.sampling.axes import Conditions
from nondet.sampling.collect import Here, Survey, collect
from nondet.sampling.engine import TransformersEngine, pinned
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Engine, Load, Plan, Request, Session, long_prompt
from nondet.sampling.replay import digest_of
from nondet.trace.search import Arm, Pace, Search
from nondet.verdict.findings import Finding, plural

STOCK, INVARIANT = "stock", "invariant"
ALL = "(--within 0 runs all)"


def greedy_step(sessions: Sequence[Session], decode: Callable[[Sequence[int]], str]) -> Step:
    """The answer for all tokens of the sessions, the first of which is the solo run: its digests are kept."""
    outcomes = [(o, session.tops.get(o.request.id, [])) for session in sessions for o in session.outcomes]
    lost = sum(nonfinite_logprobs(o.logprobs) for o, _ in outcomes)
    margins, wrong, ties = list[float](), list[str](), 0
    for o, tops in outcomes:
        for index, (token, (top, second, likeliest, _)) in enumerate(zip(o.token_ids, tops, strict=False)):
            margins.append(top - second)
            ties += top == second
            if token != likeliest and top != second:
                wrong.append(f"{o.request.id}, token {index}: {token} where {likeliest} has the top logit")
    chosen, finite = len(margins), [m for m in margins if math.isfinite(m)]
    everywhere, sentence = f"{chosen:,} chosen tokens, solo and in batches,", "the engine gives no logits"
    if lost:
        sentence = f"{lost:,} of {everywhere} have a NaN or infinite logprob"
    elif wrong:
        sentence = f"{len(wrong):,} of {everywhere} do not have the largest logit ({wrong[0]})"
    elif chosen:
        margin = f"by a margin of {min(finite):.4g} or more" if finite else "and no other is finite"
        sentence = f"each of {everywhere} has the largest logit, {margin}; {ties:,} are exact ties"
    figures = {"tokens": chosen, "ties": ties, "wrong": len(wrong), "nonfinite": lost}
    solo = sessions[0].outcomes[0]
    facts = {"trace": digest_of(solo), "tokens": tokens_digest(solo.token_ids), "text": decode(solo.token_ids)}
    return Step(
        name="greedy",
        outcome="no" if wrong or lost else "yes" if chosen else "unknown",
        sentence=sentence,
        figures={**figures, "smallest_margin": min(finite, default=-1.0)},
        facts=facts,
    )


def cost_step(play: Callable[[], Session], times: int = 2) -> Step:
    """Time the round under stock and under invariant, which both have run in this process."""
    speeds: dict[str, list[float]] = {STOCK: [], INVARIANT: []}
    for _ in range(times):  # alternating, so that a slower minute of the machine affects both
        for impl, seen in speeds.items():
            with implementation(impl):
                session = play()
            seen.append(session.tokens / max(session.seconds, 1e-9))
    stock, invariant = (max(seen) for seen in speeds.values())
    pairs = [ours / theirs for theirs, ours in zip(*speeds.values(), strict=True)]
    figures = {"stock_tokens_per_second": stock, "invariant_tokens_per_second": invariant, "rounds": times}
    figures["invariant_ratio"] = invariant / stock
    figures |= {"invariant_ratio_low": min(pairs), "invariant_ratio_high": max(pairs)}
    sentence = f"warm rounds, the better of {times}: stock {stock:,.0f} tokens/s, invariant {invariant:,.0f}"
    return Step(name="cost", outcome="yes", sentence=sentence, figures=figures)


# Every trial is an engine session of its own that differs from the solo request in one thing: batch size, ragged
# lengths, short requests with a long one, chunks of a prefill, or shared prefixes. All its completions of the prompt
# are compared with the reference, token by token and logprob bit by bit.

_NEW = 8  # tokens of each completion: differences show in the first few
_BATCHES = (2, 3, 4, 8, 16, 32)
_LENGTHS, _ARRIVALS = (1, 7, 33, 120), (0, 5)
_CHUNKS = (1, 7, 16, 32)
# tokens of a long prompt: attention takes its keys in tiles of 64 to 512, so a short one needs only one tile
_FAR, _BESIDE = 640, 7


@dataclass(frozen=True)
class RequestAxis:
    """One varied property of the other requests."""

    name: str
    held: str
    reference: Arm  # the session that the others are compared with
    trials: tuple[Arm, ...]  # a session for each value; every request under study is compared
    shares: bool = False  # whether a trial counts only if the engine took keys from the cache


def make_axes(
    load: Load, prompt: Sequence[int], completion: Sequence[int], context: int, seed: int = 0
) -> list[RequestAxis]:
    """The axes for a prompt.

    Args:
        load: Gives the page size; the other limits are wide enough to chunk nothing by accident.
        completion: The solo completion of the prompt: it makes a short prompt longer.
        context: Number of positions of the model.
    """
    prompt = tuple(prompt)
    long = long_prompt(prompt, completion, context)
    far = tuple(islice(cycle((*prompt, *completion)), max(len(long), min(_FAR, context - _NEW))))
    new, new_long, new_far = (max(1, min(_NEW, len(completion), context - len(p))) for p in (prompt, long, far))
    lengths = [n for n in _LENGTHS if n + new <= context]
    budget = max(_BATCHES) * len(prompt) + max([len(far), *lengths]) + max(_BATCHES) + _BESIDE * len(long)
    wide = replace(load, budget=budget, requests=max(_BATCHES), sharing=False, graphs=False)

    def trial(name: str, *requests: Request, **limits: Any) -> Arm:
        return Arm(name, "t0", requests, replace(wide, **limits), seed)

    one, long_one = Request("t0", True, prompt, new, 0), Request("t0", True, long, new_long, 0)
    far_one = Request("t0", True, far, new_far, 0)
    batches = [trial(f"{size} requests", *(replace(one, id=f"t{i}") for i in range(size))) for size in _BATCHES]
    ragged = []
    for arrival in _ARRIVALS:
        for length in lengths:
            other = Request("b0", False, tuple(islice(cycle([*long[1:], long[0]]), length)), new, arrival)
            name = f"{length} tokens, {f'{arrival} steps later' if arrival else 'at once'}"
            ragged.append(trial(name, one, other))
    chunks = [trial(f"chunks of {size}", long_one, budget=size) for size in _CHUNKS if size < len(long)]
    beside = [Request(f"b{i}", False, long[i:], new_long, 0) for i in range(min(_BESIDE, len(long)))]
    late = [replace(r, arrival_step=2 + i) for i, r in enumerate(beside)]
    fars = [
        trial(f"{len(beside)} short requests at once", far_one, *beside),
        trial(f"{len(beside)} short requests that begin beside its decode", far_one, *late),
    ]
    half = max(load.page, len(far) // 2)
    donors = {"the whole prompt": far, "its first half": (*far[:half], *reversed(far[half:]))}
    # the donor has finished by then, so no other request is in any step of this one; its second token is needed because
    # the engine only keeps pages of a request that has decoded
    later = replace(far_one, arrival_step=2 * len(far) + 8)
    shared = [trial(name, Request("b0", False, d, 2, 0), later, sharing=True) for name, d in donors.items()]
    off = trial("nothing shared", *shared[0].requests)
    solo, whole, far_solo = trial("alone", one), trial("in one piece", long_one), trial("alone", far_one)
    tokens, far_tokens, plain = (*(f"a prompt of {len(p)} tokens" for p in (long, far)), "no chunks, no sharing")
    same = f"all requests have the same prompt and begin at once; {plain}"
    other_length = f"one other request with a prompt of another length; {plain}"
    donor = f"no other request in its steps, {far_tokens}, no chunks; an earlier request shares the prefix"
    return [
        RequestAxis("batch size", same, solo, tuple(batches)),
        RequestAxis("ragged company", other_length, solo, tuple(ragged)),
        RequestAxis("long prompt", f"{far_tokens} beside short requests; {plain}", far_solo, tuple(fars)),
        RequestAxis("chunked prefill", f"no other request, {tokens}, no sharing", whole, tuple(chunks)),
        RequestAxis("prefix sharing", donor, off, tuple(shared), shares=True),
    ]


def try_axis(
    engine: Engine, axis: RequestAxis, impl: str, values: Collection[str] = (), over: Callable[[], bool] = lambda: False
) -> AxisTried:
    """Run the reference, and the trials of these values (() for all), the last one first, since kernels change at the
    extremes; no more once it is `over`. An `EngineStoppedError`, or a `UserError` where sizes are refused."""
    target = next(o for o in _session(engine, axis.reference).outcomes if o.request.target)
    differences: dict[str, list[tuple[int | None, int | None]]] = {}  # (other token, other logprob) of each completion
    unmet = []
    for trial in reversed([t for t in axis.trials if t.name in values or not values]):
        if differences and over():
            break
        session = _session(engine, trial)
        if axis.shares and not session.figures["hits"]:
            unmet.append(trial.name)
        else:
            differences[trial.name] = [first_difference(target, o) for o in session.outcomes if o.request.target]
    differences = dict(reversed(differences.items()))
    seen = [pair for pairs in differences.values() for pair in pairs]
    differing = [at for _, at in seen if at is not None]
    note = f"the engine took no keys from the cache: {', '.join(unmet)}" if unmet else ""
    return AxisTried(
        axis=axis.name,
        impl=impl,
        held=axis.held,
        values=list(differences),
        parted=[value for value, pairs in differences.items() if any(at is not None for _, at in pairs)],
        tried=len(seen),
        traces=len(differing),
        tokens=sum(token is not None for token, _ in seen),
        first=min(differing, default=None),
        note=note if axis.trials else "the prompt is too short for this",
    )


def _session(engine: Engine, arm: Arm) -> Session:
    session = engine.run(arm.requests, arm.load, seed=arm.seed)
    failed = [f"{o.request.id} failed: {o.reason}" for o in session.outcomes if o.finish == "error"]
    if session.fatal or failed:
        where = f"{arm.name}: " if arm.name else ""
        raise EngineStoppedError(where + (session.fatal or failed[0]))
    return session


# About how long a diagnosis of the default size may take, by device.
WITHIN_S = {"cpu": 180.0, "cuda": 120.0}
_FEWEST = 2  # rounds: completions of one round are not independent
_RATE_S = 8.0  # for rounds where the first has shown that the batch matters: further ones only narrow the rate
_FOR_ROUNDS, _FOR_TRACE = 0.5, 0.7  # of the limit, by when the rounds of stock, and the trace, are to end


@dataclass
class Diagnoser:
    """One diagnosis."""

    loaded: LoadedModel
    plan: Plan  # rounds of completions of one prompt among others
    writer: RunWriter
    seed: int
    threads: int | None
    say: Callable[[str], None]  # takes a line of text as each step begins and ends
    within_s: float = 0.0  # about how long it may take; 0.0: no limit
    bound: bool = False  # enforced to the end by leaving steps out; else it only limits rounds and values of stock
    clock: Callable[[], float] = time.perf_counter
    _kept: dict[int | None, Session] = field(default_factory=dict)
    _began: float = 0.0
    _warm: bool = False  # whether this process has run the first round under both implementations

    def run(self) -> None:
        """Every step that the run file lacks, then the verdict; raises as `try_axis`, and finished steps are kept."""
        takes = (
            self._greedy, self._run_to_run, self._batch, self._axes, self._operator, self._margin, self._cure,
            self._cost,
        )  # fmt: skip
        self._began = self.clock() - sum(step.seconds for step in self._so_far().steps)
        if self.loaded.device == "cuda":  # while stock's sessions wait for cuDNN's plans, outside of Python
            threading.Thread(target=make_ready, name="nondet-ready", daemon=True).start()
        with pinned(self.threads):
            for number, ((name, question), take) in enumerate(zip(QUESTIONS.items(), takes, strict=True), 1):
                so_far = self._so_far()
                known = next((s for s in so_far.steps if s.name == name), None)
                if known is None:
                    self.say(f"[{number}/{len(QUESTIONS)}] {question}")
                    self.writer.write(known := self._timed(name, take, so_far))
                # the answer that a user waits for, and why a step has none; the report has the others
                shown = known.name == "batch" or known.outcome in ("skipped", "unknown")
                why = f": {known.sentence}" if shown else ""
                self.say(f"[{number}/{len(QUESTIONS)}] {question} {known.outcome}{why}")
        self._write(conclude(self._so_far()))

    def _timed(self, name: str, step: Callable[[Run], Step], so_far: Run) -> Step:
        started = self.clock()
        reason = settled(so_far, name)
        if not reason and name not in ("greedy", "run", "batch") and self._over(self.bound):
            reason = f"of {self.within_s:.0f} s none are left {ALL}"
        if reason:
            return Step(name=name, outcome="skipped", sentence=reason)
        return msgspec.structs.replace(step(so_far), seconds=self.clock() - started)

    @property
    def _left(self) -> float:
        """Seconds of the limit that are left, those of an earlier process counted; below 0 after an overrun."""
        return self._began + self.within_s - self.clock() if self.within_s else math.inf

    def _over(self, limited: bool = True) -> bool:
        return limited and self._left <= 0

    def _greedy(self, _: Run) -> Step:
        return greedy_step((self._known(None), self._known(0)), self.loaded.decode)

    def _run_to_run(self, so_far: Run) -> Step:
        """Two more solo runs, and the first round twice."""
        traces = [digest_of(self._session(None).outcomes[0]) for _ in range(2)]
        self._collect(STOCK, lambda number: number == 0)
        return run_step(self._so_far(), STOCK, [steps_of(so_far)["greedy"].facts["trace"], *traces])

    def _batch(self, so_far: Run) -> Step:
        seconds, few = max(self._known(0).seconds, 1e-9), self._is_proven(so_far)

        def wanted(number: int) -> bool:
            if few:
                return number < max(1, int(_RATE_S / seconds))
            return number < _FEWEST or self._left - seconds > (1 - _FOR_ROUNDS) * self.within_s

        self._collect(STOCK, wanted)
        step, planned = batch_step(self._so_far(), STOCK, steps_of(so_far)["greedy"].facts), len(self.plan.rounds)
        ran = int(step.figures["rounds"])
        why = "the first round differs from the solo run, which is proof: " if few else ""
        return _with_less(step, f"{why}{plural(ran, 'round')} of {planned} run {ALL}" if ran < planned else "")

    def _is_proven(self, so_far: Run) -> bool:
        """Whether, under a limit, the first round, repeated with equal bits, differs from the solo run: which proves
        that the batch matters, so that more of the load or of an axis cannot change the answer."""
        steps = steps_of(so_far)
        differ = batch_step(so_far, STOCK, steps["greedy"].facts).figures["repeated_round_traces"]
        return bool(self.within_s and differ) and steps["run"].outcome == "yes"

    def _axes(self, so_far: Run) -> Step:
        tried, late, ran, planned = [], [], 0, 0
        few, known = self._is_proven(so_far), {a.axis: a for a in so_far.axes if a.impl == STOCK}
        for axis in self._all_axes:
            record, title = known.get(axis.name), axis_title(axis.name)
            if record is None and self._over(self.bound):
                late.append(f"{title} not tried: of {self.within_s:.0f} s none are left {ALL}")
                continue
            if record is None:
                last = [t.name for t in axis.trials[-1:]] if few and not axis.shares else ()
                record = try_axis(self.engine, axis, STOCK, last, self._over)
                self._write(record)
            differ = f"{record.traces} of {record.tried} traces, {record.tokens} of {record.tried} completions"
            tried.append((f"{title}: {differ if record.tried else 'not met'}", record))
            ran, planned = ran + max(1, len(record.values)), planned + max(1, len(axis.trials))
            self.say(f"  {tried[-1][0]}")
        differing = [record.axis for _, record in tried if record.traces]
        counts = "; ".join(text for text, _ in tried)
        sentence = f"differ from the solo run, one property changed at a time: {counts}"
        answer = "yes" if differing else "no" if tried else "unknown"
        step = Step(name="axes", outcome=answer, sentence=sentence, facts={"parted": ", ".join(differing)})
        if ran < planned:
            late.append(f"{ran} of {planned} values of the axes run {ALL}")
        return _with_less(step, "; ".join(late))

    def _operator(self, so_far: Run) -> Step:
        """A trace of a round with a differing completion, of an axis, or of the round that differs from itself."""
        arms, for_others = self._arms(so_far), (1 - _FOR_TRACE) * self.within_s
        search = Search(
            self.engine, self.loaded.model, *arms, impl=STOCK, choose=arms[1].name == "in company",
            write=self._write, say=lambda line: self.say(f"  {line}"),
            sweeps=self.loaded.device != "cuda",  # cuDNN plans for each size, Triton compiles: many seconds
            pace=Pace(lambda: self._left - for_others if self.bound else math.inf, self.clock),
        )  # fmt: skip
        verdict = search.run()
        self._write(verdict)
        named = [c for c in self._so_far().culprits if c.call]
        outcome = "yes" if named else "no" if verdict.finding == "no divergence observed" else "unknown"
        sentence = "; ".join(verdict.sentences)
        met = verdict.finding == "run-to-run" or blamed(self._so_far(), Finding.RUN_TO_RUN)
        if steps_of(so_far)["run"].outcome == "no" and not met:
            outcome, sentence = "unknown", f"{NOT_MET}: {sentence}"
        facts = {"families": "+".join(verdict.families or [])}
        return _with_less(Step(name="operator", outcome=outcome, sentence=sentence, facts=facts), search.late)

    def _margin(self, so_far: Run) -> Step:
        first = (differing_rounds(so_far, STOCK, steps_of(so_far)["greedy"].facts) or [0])[0]
        return margin_step(self._known(None), self._known(first))

    def _cure(self, so_far: Run) -> Step:
        """The same load under the invariant implementation, the solo request, and the axes that differed."""
        again = settled(so_far, "batch") != ""  # run-to-run: only one round, run twice, can be compared
        # one round proves that stock differs; that the fix does not takes all
        most, late = 1 if again else len(self.plan.rounds), []
        self._collect(INVARIANT, lambda number: number < min(most, _FEWEST) or not (again or self._over(self.bound)))
        self._warm = True
        with implementation(INVARIANT):
            solo = self._session(None).outcomes[0]
            tried = {a.axis: a.values for a in so_far.axes if a.impl == STOCK and a.traces}
            for axis in self._all_axes:
                if axis.name not in tried or ("axis", INVARIANT, axis.name) in self.writer.done:
                    continue
                if self._over(self.bound):
                    late.append(f"{axis_title(axis.name)} not tried under the cure")
                else:
                    self._write(try_axis(self.engine, axis, INVARIANT, tried[axis.name]))
        run = self._so_far()
        step = cure_step(run, INVARIANT, digest_of(solo), coverage_gaps(run, INVARIANT))
        if step.figures["rounds"] < most:
            late.insert(0, f"{plural(int(step.figures['rounds']), 'round')} of {most} run under the cure")
        return _with_less(step, f"{'; '.join(late)} {ALL}" if late else "")

    def _cost(self, _: Run) -> Step:
        play = partial(self._session, 0)
        if not self._warm:  # the cure was tried by an earlier process
            cost_step(play, times=1)
        return cost_step(play)

    @cached_property
    def engine(self) -> Engine:
        """The engine under study."""
        return TransformersEngine(self.loaded.model)

    @cached_property
    def _target(self) -> Request:
        return next(r for r in self.plan.rounds[0] if r.target)

    @cached_property
    def _all_axes(self) -> list[RequestAxis]:
        solo = self._known(None).outcomes[0]
        context = self.loaded.context or 2**31
        return make_axes(self.plan.load, self._target.prompt, solo.token_ids, context, self.seed)

    def _known(self, number: int | None) -> Session:
        """A stock session of that round, or the solo one, run once in this process, for its logits."""
        if number not in self._kept:
            self._kept[number] = self._session(number)
        return self._kept[number]

    def _session(self, number: int | None) -> Session:
        requests = [replace(self._target, arrival_step=0)] if number is None else self.plan.rounds[number]
        return _session(self.engine, self._arm("", requests))

    def _collect(self, impl: str, wanted: Callable[[int], bool]) -> None:
        """Sample the plan's rounds under the implementation, as far as each is wanted when its turn comes."""
        base = Conditions(self.plan.load, self.loaded.dtype, threads=self.threads)
        survey = Survey(self.loaded, self.plan, base, [impl], seed=self.seed, wanted=wanted)
        collect(survey, Here(self.loaded), self.writer, played=self._known(0) if impl == STOCK else None)

    def _arms(self, so_far: Run) -> tuple[Arm, Arm]:
        rounds = differing_rounds(so_far, STOCK, steps_of(so_far)["greedy"].facts)
        unsteady = steps_of(so_far)["run"].outcome == "no"
        if rounds or unsteady:
            requests = self.plan.rounds[rounds[0] if rounds else 0]
            target = next(r for r in requests if r.target)
            return self._arm("alone", [target]), self._arm("in company", requests)
        record = next(a for a in so_far.axes if a.impl == STOCK and a.traces)
        axis = next(a for a in self._all_axes if a.name == record.axis)
        trial = next(t for t in axis.trials if t.name == record.parted[0])
        return replace(axis.reference, name="alone"), replace(trial, name=f"{axis.name}: {trial.name}")

    def _arm(self, name: str, requests: Sequence[Request]) -> Arm:
        target = next(r for r in requests if r.target)
        return Arm(name, target.id, tuple(requests), self.plan.load, self.seed)

    def _so_far(self) -> Run:
        return read_run(self.writer.path, allow_truncated=True)

    def _write(self, record: Record) -> None:
        """Write the record, unless a killed run already did."""
        if record.key not in self.writer.done:
            self.writer.write(record)


def _with_less(step: Step, less: str) -> Step:
    return msgspec.structs.replace(step, facts={**step.facts, "less": less}) if less else step
