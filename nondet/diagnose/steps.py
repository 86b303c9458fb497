"""The steps of a diagnosis, in order. Each reads what is in the run file and adds its own evidence to it.

So a run that was killed continues with the first step that has no record, and reaches the same records: only the model
is carried in memory from step to step. A time limit is kept by looking at the clock between sessions, never by an
estimate: rounds and values are left out once it has passed, and the step's record says which.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import msgspec

from nondet.core.compare import first_difference, shared_length
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
    chosen, smallest = len(margins), min(filter(math.isfinite, margins), default=-1.0)
    everywhere, sentence = f"{chosen:,} chosen tokens, solo and in batches,", "the engine gives no logits"
    if lost:
        sentence = f"{lost:,} of {everywhere} have a NaN or infinite logprob"
    elif wrong:
        sentence = f"{len(wrong):,} of {everywhere} do not have the largest logit ({wrong[0]})"
    elif chosen:
        margin = f"by a margin of {smallest:.4g} or more" if smallest >= 0 else "and no other is finite"
        sentence = f"each of {everywhere} has the largest logit, {margin}; {ties:,} are exact ties"
    figures = {"tokens": chosen, "ties": ties, "wrong": len(wrong), "nonfinite": lost, "smallest_margin": smallest}
    solo = sessions[0].outcomes[0]
    return Step(
        name="greedy",
        outcome="no" if wrong or lost else "yes" if chosen else "unknown",
        sentence=sentence,
        figures=figures,
        facts={"trace": digest_of(solo), "tokens": tokens_digest(solo.token_ids), "text": decode(solo.token_ids)},
    )


def margin_step(solo: Session, other: Session) -> Step:
    """Whether the margins of flips are within the effect of concurrent requests on the logits, while tokens agree.

    Compares the logits of the two largest tokens of each step, in the solo run and with concurrent requests. Contexts
    are equal up to and including the first token that differs: its own logits are those of the flip, and the spread is
    measured on the steps before it. Both logits may change, so a margin is within the noise up to twice the spread.
    """
    flips, spread = list[tuple[int, float]](), 0.0  # token, and the solo margin of its two largest logits
    reference = solo.outcomes[0]
    tops = solo.tops.get(reference.request.id, [])
    for outcome in other.outcomes:
        if not outcome.request.target or outcome.finish == "error":
            continue
        theirs = other.tops.get(outcome.request.id, [])
        shared = shared_length(reference.token_ids, outcome.token_ids)
        for one, two in zip(tops[:shared], theirs[:shared], strict=False):
            mine, its = (dict(zip(top[2:], top[:2], strict=True)) for top in (one, two))
            spread = max([spread, *(abs(mine[token] - its[token]) for token in mine.keys() & its.keys())])  # not NaN
        if shared < min(len(reference.token_ids), len(outcome.token_ids), len(tops), len(theirs)):
            flips.append((shared, tops[shared][0] - tops[shared][1]))
    first, largest = min((f[0] for f in flips), default=-1), max((f[1] for f in flips), default=-1.0)
    within = sum(margin <= 2 * spread for _, margin in flips)
    figures = {"flips": len(flips), "within": within, "first_flip": first}
    sentence = f"the logits of the top tokens differ by up to {spread:.4g} between the arms"
    if flips:
        flipped = f"{plural(len(flips), 'completion')} flipped, the first at token {first}"
        apart = f"solo, the two largest logits at a flip are at most {largest:.4g} apart"
        sentence = (
            f"{flipped}; {apart}; {sentence}, so {within} of {len(flips)} flips are within it (at most twice that)"
        )
    return Step(
        name="margin",
        outcome=("yes" if within == len(flips) else "no") if flips else "unknown",
        sentence=sentence if flips else f"no token flipped in the rounds that were compared; {sentence}",
        figures=figures | {"largest_margin": largest, "spread": spread},
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
    figures |= {"invariant_ratio": invariant / stock}
    figures |= {"invariant_ratio_low": min(pairs), "invariant_ratio_high": max(pairs)}
    sentence = f"warm rounds, the better of {times}: stock {stock:,.0f} tokens/s, invariant {invariant:,.0f}"
    return Step(name="cost", outcome="yes", sentence=sentence, figures=figures)


# Every trial is an engine session of its own that differs from the solo request in one thing: batch size, ragged
# lengths, short requests with a long one, chunks of a prefill, or shared prefixes. All its completions of the prompt
# are compared with the reference, token by token and logprob bit by bit.

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
    trials: Sequence[Arm]  # a session for each value; every request under study is compared
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
    prompt, long = tuple(prompt), long_prompt(prompt, completion, context)
    far = tuple(islice(cycle((*prompt, *completion)), max(len(long), min(_FAR, context - _NEW))))
    lengths = [n for n in _LENGTHS if n < context]
    budget = max(_BATCHES) * len(prompt) + max([len(far), *lengths]) + max(_BATCHES) + _BESIDE * len(long)
    wide = replace(load, budget=budget, requests=max(_BATCHES), sharing=False, graphs=False)

    def request(name: str, tokens: Iterable[int], arrival: int = 0) -> Request:
        fed = tuple(tokens)
        return Request(name, name == "t0", fed, max(1, min(_NEW, len(completion), context - len(fed))), arrival)

    def trial(name: str, *requests: Request, **limits: Any) -> Arm:
        return Arm(name, "t0", requests, replace(wide, **limits), seed)

    one, long_one, far_one = (request("t0", tokens) for tokens in (prompt, long, far))
    batches = [trial(f"{size} requests", *(replace(one, id=f"t{i}") for i in range(size))) for size in _BATCHES]
    other = [*long[1:], long[0]]
    ragged = [
        trial(f"{length} tokens, {when}", one, request("b0", islice(cycle(other), length), arrival))
        for when, arrival in _ARRIVALS.items()
        for length in lengths
    ]
    chunks = [trial(f"chunks of {size}", long_one, budget=size) for size in _CHUNKS if size < len(long)]
    beside = [request(f"b{i}", long[i:]) for i in range(min(_BESIDE, len(long)))]
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
    solo, plain = trial("alone", one), "no chunks, no sharing"
    long_text, far_text = (f"a prompt of {len(p)} tokens" for p in (long, far))
    one_piece, whole = f"no other request, {long_text}, no sharing", trial("in one piece", long_one)
    donor = f"no other request in its steps, {far_text}, no chunks; an earlier request shares the prefix"
    unshared = trial("nothing shared", *shared[0].requests)
    return [
        RequestAxis("batch size", f"all requests have the same prompt and begin at once; {plain}", solo, batches),
        RequestAxis("ragged company", f"one other request with a prompt of another length; {plain}", solo, ragged),
        RequestAxis("long prompt", f"{far_text} beside short requests; {plain}", trial("alone", far_one), fars),
        RequestAxis("chunked prefill", one_piece, whole, chunks),
        RequestAxis("prefix sharing", donor, unshared, shared, shares=True),
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
    differing = {value: [at for _, at in pairs if at is not None] for value, pairs in differences.items()}
    places, note = sum(differing.values(), list[int]()), "" if axis.trials else "the prompt is too short for this"
    return AxisTried(
        axis=axis.name,
        impl=impl,
        held=axis.held,
        values=list(differences),
        parted=[value for value, found in differing.items() if found],
        tried=sum(map(len, differences.values())),
        traces=len(places),
        tokens=sum(token is not None for pairs in differences.values() for token, _ in pairs),
        first=min(places, default=None),
        note=f"the engine took no keys from the cache: {', '.join(unmet)}" if unmet else note,
    )


def _session(engine: Engine, arm: Arm) -> Session:
    session = engine.run(arm.requests, arm.load, seed=arm.seed)
    failed = [f"{o.request.id} failed: {o.reason}" for o in session.outcomes if o.finish == "error"]
    if session.fatal or failed:
        raise EngineStoppedError((f"{arm.name}: " if arm.name else "") + (session.fatal or failed[0]))
    return session


# About how long a diagnosis of the default size may take, by device.
WITHIN_S = {"cpu": 180.0, "cuda": 120.0}
_FEWEST = 2  # rounds: completions of one round are not independent
_RATE_S = 8.0  # for rounds where the first has shown that the batch matters: further ones only narrow the rate
_FOR_ROUNDS, _FOR_TRACE = 0.5, 0.7  # of the limit, by when the rounds of stock, and the trace, are to end


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
    bound: bool = False  # enforced to the end by leaving steps out; else it only limits rounds and values of stock
    clock: Callable[[], float] = time.perf_counter
    _kept: dict[int | None, Session] = field(default_factory=dict)
    _began: float = 0.0
    _warm: bool = False  # whether this process has run the first round under both implementations

    def run(self) -> None:
        """Every step that the run file lacks, then the verdict; raises as `try_axis`, and finished steps are kept."""
        self._began = self.clock() - sum(step.seconds for step in self._so_far().steps)
        if self.loaded.device == "cuda":  # while stock's sessions wait for cuDNN's plans, outside of Python
            threading.Thread(target=make_ready, name="nondet-ready", daemon=True).start()
        with pinned(self.threads):
            for number, (name, question) in enumerate(QUESTIONS.items(), 1):
                so_far, title = self._so_far(), f"[{number}/{len(QUESTIONS)}] {question}"
                known = next((s for s in so_far.steps if s.name == name), None)
                if known is None:
                    self.say(title)
                    self.writer.write(known := self._answer(name, so_far))
                # the answer that a user waits for, and why a step has none; the report has the others
                shown = name == "batch" or known.outcome in ("skipped", "unknown")
                self.say(f"{title} {known.outcome}" + (f": {known.sentence}" if shown else ""))
        self._write(conclude(self._so_far()))

    def _answer(self, name: str, so_far: Run) -> Step:
        started, reason = self.clock(), settled(so_far, name)
        if not reason and name not in ("greedy", "run", "batch") and self._over(self.bound):
            reason = self._none_left
        if reason:
            return Step(name=name, outcome="skipped", sentence=reason)
        step: Step = getattr(self, f"_{name}")(so_far)
        return msgspec.structs.replace(step, seconds=self.clock() - started)

    @property
    def _left(self) -> float:
        """Seconds of the limit that are left, those of an earlier process counted; below 0 after an overrun."""
        return self._began + self.within_s - self.clock() if self.within_s else math.inf

    @property
    def _none_left(self) -> str:
        return f"of {self.within_s:.0f} s none are left {ALL}"

    def _over(self, limited: bool = True) -> bool:
        return limited and self._left <= 0

    def _greedy(self, _: Run) -> Step:
        return greedy_step((self._known(None), self._known(0)), self.loaded.decode)

    def _run(self, so_far: Run) -> Step:
        """Two more solo runs, and the first round twice."""
        traces = [digest_of(self._session(None).outcomes[0]) for _ in range(2)]
        self._collect(STOCK, lambda number: number == 0)
        return run_step(self._so_far(), STOCK, [_solo(so_far)["trace"], *traces])

    def _batch(self, so_far: Run) -> Step:
        seconds, few = max(self._known(0).seconds, 1e-9), self._is_proven(so_far)

        def wanted(number: int) -> bool:
            if few:
                return number < max(1, int(_RATE_S / seconds))
            return number < _FEWEST or self._left - seconds > (1 - _FOR_ROUNDS) * self.within_s

        self._collect(STOCK, wanted)
        step, planned = batch_step(self._so_far(), STOCK, _solo(so_far)), len(self.plan.rounds)
        ran = int(step.figures["rounds"])
        why = "the first round differs from the solo run, which is proof: " if few else ""
        return _with_less(step, f"{why}{plural(ran, 'round')} of {planned} run {ALL}" if ran < planned else "")

    def _is_proven(self, so_far: Run) -> bool:
        """Whether, under a limit, the first round, repeated with equal bits, differs from the solo run: which proves
        that the batch matters, so that more of the load or of an axis cannot change the answer."""
        differ = batch_step(so_far, STOCK, _solo(so_far)).figures["repeated_round_traces"]
        return bool(self.within_s and differ) and steps_of(so_far)["run"].outcome == "yes"

    def _axes(self, so_far: Run) -> Step:
        counts, differing, late, ran, planned = list[str](), list[str](), list[str](), 0, 0
        few, known = self._is_proven(so_far), {a.axis: a for a in so_far.axes if a.impl == STOCK}
        for axis in self._all_axes:
            record, title = known.get(axis.name), axis_title(axis.name)
            if record is None and self._over(self.bound):
                late.append(f"{title} not tried: {self._none_left}")
                continue
            if record is None:
                last = [t.name for t in axis.trials[-1:]] if few and not axis.shares else ()
                record = try_axis(self.engine, axis, STOCK, last, self._over)
                self._write(record)
            differ = f"{record.traces} of {record.tried} traces, {record.tokens} of {record.tried} completions"
            counts.append(f"{title}: {differ if record.tried else 'not met'}")
            differing += [axis.name] if record.traces else []
            ran, planned = ran + max(1, len(record.values)), planned + max(1, len(axis.trials))
            self.say(f"  {counts[-1]}")
        late += [f"{ran} of {planned} values of the axes run {ALL}"] if ran < planned else []
        sentence = f"differ from the solo run, one property changed at a time: {'; '.join(counts)}"
        answer = "yes" if differing else "no" if counts else "unknown"
        step = Step(name="axes", outcome=answer, sentence=sentence, facts={"parted": ", ".join(differing)})
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
        run, sentence = self._so_far(), "; ".join(verdict.sentences)
        clean = verdict.finding == Finding.CLEAN
        outcome = "yes" if any(c.call for c in run.culprits) else "no" if clean else "unknown"
        met = verdict.finding == "run-to-run" or blamed(run, Finding.RUN_TO_RUN)
        if steps_of(so_far)["run"].outcome == "no" and not met:
            outcome, sentence = "unknown", f"{NOT_MET}: {sentence}"
        facts = {"families": "+".join(verdict.families or [])}
        return _with_less(Step(name="operator", outcome=outcome, sentence=sentence, facts=facts), search.late)

    def _margin(self, so_far: Run) -> Step:
        first = (differing_rounds(so_far, STOCK, _solo(so_far)) or [0])[0]
        return margin_step(self._known(None), self._known(first))

    def _cure(self, so_far: Run) -> Step:
        """The same load under the invariant implementation, the solo request, and the axes that differed."""
        again = settled(so_far, "batch") != ""  # run-to-run: only one round, run twice, can be compared
        # one round proves that stock differs; that the fix does not takes all
        most, late = 1 if again else len(self.plan.rounds), list[str]()
        self._collect(INVARIANT, lambda number: number < min(most, _FEWEST) or not (again or self._over(self.bound)))
        self._warm = True
        tried = {a.axis: a.values for a in so_far.axes if a.impl == STOCK and a.traces}
        with implementation(INVARIANT):
            solo = digest_of(self._session(None).outcomes[0])
            for axis in self._all_axes:
                if axis.name not in tried or ("axis", INVARIANT, axis.name) in self.writer.done:
                    continue
                if self._over(self.bound):
                    late.append(f"{axis_title(axis.name)} not tried under the cure")
                else:
                    self._write(try_axis(self.engine, axis, INVARIANT, tried[axis.name]))
        run = self._so_far()
        step = cure_step(run, INVARIANT, solo, coverage_gaps(run, INVARIANT))
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
        solo, context = self._known(None).outcomes[0], self.loaded.context or 2**31
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
        rounds = differing_rounds(so_far, STOCK, _solo(so_far))
        if rounds or steps_of(so_far)["run"].outcome == "no":
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


def _solo(so_far: Run) -> Mapping[str, str]:
    """The digests of the solo run, as the first step kept them."""
    return steps_of(so_far)["greedy"].facts


def _with_less(step: Step, less: str) -> Step:
    return msgspec.structs.replace(step, facts={**step.facts, "less": less}) if less else step
