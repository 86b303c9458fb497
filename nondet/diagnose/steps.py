"""The steps of a diagnosis, in order. Each reads what is in the run file and adds its own evidence to it.

So a run that was killed continues with the first step that has no record, and reaches the same records: only the model
is carried in memory from step to step.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import cycle, islice

import msgspec

from nondet.core.compare import first_difference
from nondet.core.records import AxisTried, Record, Run, Step
from nondet.core.runfile import RunWriter, read_run
from nondet.core.traces import nonfinite_logprobs, tokens_digest, trace_digest
from nondet.diagnose.verdict import (
    NOT_MET,
    QUESTIONS,
    axis_title,
    batch_step,
    blamed,
    conclude,
    coverage_gaps,
    cure_step,
    margin_step,
    parted_rounds,
    run_step,
    settled,
    steps_of,
)
from nondet.errors import EngineStoppedError
from nondet.kernels.dispatch.block import make_ready
from nondet.sampling.analysis import NAME
from nondet.sampling.axes import AXES, Conditions, Subject
from nondet.sampling.collect import collect
from nondet.sampling.engine import cheap_collections, pinned
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Engine, Load, Outcome, Plan, Request, Session, long_prompt, make_engine
from nondet.trace.search import Arm, Pace, Search
from nondet.verdict.findings import Finding, plural


class Budget:
    """Seconds for a whole diagnosis, those of an earlier process included; `within_s` 0.0: no limit."""

    def __init__(
        self, within_s: float = 0.0, spent_s: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.within_s, self._clock = within_s, clock
        self._began = clock() - spent_s

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds that are left; below 0 after an overrun."""
        return self.within_s - self.spent if self.within_s else math.inf

    def kept(self, keep_s: float) -> float:
        """Seconds to keep for a later part of this length; 0.0 where it no longer fits."""
        return keep_s if keep_s <= self.left else 0.0

    def lacks(self, part: str, needs_s: float, keep_s: float = 0.0) -> str:
        """Why `part`, a noun, is left out, with `keep_s` kept for later parts; "" where it fits."""
        keep = self.kept(keep_s)
        if self.left - keep >= needs_s:
            return ""
        others = f", {keep:.0f} s of them for what follows" if keep else ""
        return (
            f"{part} would take {needs_s:.0f} s or more, and of {self.within_s:.0f} s {max(0.0, self.left):.0f} s are "
            f"left{others} (--within 0 runs all)"
        )


def greedy_step(sessions: Sequence[Session], decode: Callable[[Sequence[int]], str]) -> Step:
    """The answer for all tokens of the sessions, the first of which is the solo run: its digests are kept."""
    outcomes = [(o, session.tops.get(o.request.id, [])) for session in sessions for o in session.outcomes]
    lost = sum(nonfinite_logprobs(o.logprobs) for o, _ in outcomes)
    choices = [
        (f"{o.request.id}, token {index}: {token} where {likeliest} has the top logit", token != likeliest, top, second)
        for o, tops in outcomes
        for index, (token, (top, second, likeliest, _)) in enumerate(zip(o.token_ids, tops, strict=False))
    ]
    chosen, ties = len(choices), sum(top == second for *_, top, second in choices)
    wrong = [text for text, is_other, top, second in choices if is_other and top != second]
    margins = [top - second for *_, top, second in choices if math.isfinite(top - second)]
    alone = sessions[0].outcomes[0]
    sentence = "the engine gives no logits"
    if lost:
        sentence = f"{lost:,} of {chosen:,} chosen tokens, solo and in batches, have a NaN or infinite logprob"
    elif wrong:
        sentence = (
            f"{len(wrong):,} of {chosen:,} chosen tokens, solo and in batches, do not have the largest logit "
            f"({wrong[0]})"
        )
    elif chosen:
        margin = f"by a margin of {min(margins):.4g} or more" if margins else "and no other is finite"
        sentence = (
            f"each of {chosen:,} chosen tokens, solo and in batches, has the largest logit, {margin}; "
            f"{ties:,} are exact ties"
        )
    return Step(
        name="greedy",
        outcome="no" if wrong or lost else "yes" if chosen else "unknown",
        sentence=sentence,
        figures={
            "tokens": chosen,
            "ties": ties,
            "wrong": len(wrong),
            "nonfinite": lost,
            "smallest_margin": min(margins, default=-1.0),
        },
        facts={
            "trace": trace_digest(alone.token_ids, alone.logprobs),
            "tokens": tokens_digest(alone.token_ids),
            "text": decode(alone.token_ids),
        },
    )


def cost_step(play: Callable[[], Session], families: str, *, times: int = 2, warm: Collection[str] = ()) -> Step:
    """Time the round.

    `families` is the smallest fix that the trace found, "attention+matmul", or ""; `warm` has the implementations under
    which this process has run the round already.
    """
    impls = ["stock", "invariant", *([f"invariant:{families}"] if families else [])]
    speeds: dict[str, list[float]] = {impl: [] for impl in impls}
    for impl in (impl for impl in impls if impl not in warm):
        with implementation(impl):
            play()  # kernels are compiled and proven, and libraries have planned, before the timed rounds
    for _ in range(times):  # alternating, so that a slower minute of the machine affects all of them
        for impl in impls:
            with implementation(impl):
                session = play()
            speeds[impl].append(session.tokens / max(session.seconds, 1e-9))
    best = {impl: max(values) for impl, values in speeds.items()}
    parts = [f"stock {best['stock']:,.0f} tokens/s"]
    for impl in impls[1:]:
        name = "invariant" if impl == "invariant" else f"{families} only"
        parts.append(f"{name} {best[impl]:,.0f}, {_ratio(speeds, impl)}")
    figures = {f"{impl}_tokens_per_second": value for impl, value in best.items()}
    figures |= {f"{impl}_ratio": best[impl] / best["stock"] for impl in impls[1:]}
    if times > 1:
        pairs = _pairs(speeds, "invariant")
        figures |= {"rounds": times, "invariant_ratio_low": min(pairs), "invariant_ratio_high": max(pairs)}
    sentence = f"a warm round, {f'the better of {times}' if times > 1 else 'once'}: {'; '.join(parts)}"
    return Step(name="cost", outcome="yes", sentence=sentence, figures=figures)


def _pairs(speeds: dict[str, list[float]], impl: str) -> list[float]:
    return [ours / stock for ours, stock in zip(speeds[impl], speeds["stock"], strict=True)]


def _ratio(speeds: dict[str, list[float]], impl: str) -> str:
    pairs = _pairs(speeds, impl)
    best = max(speeds[impl]) / max(speeds["stock"])
    return f"{NAME} {best:.2f} ({min(pairs):.2f} to {max(pairs):.2f} in single rounds)"


# Every trial is an engine session of its own that differs from the solo request in one thing: batch size, ragged
# lengths, short requests with a long one, chunks of a prefill, or shared prefixes. All its completions of the prompt
# are compared with the reference, token by token and logprob bit by bit. This module chooses the other requests;
# `nondet.sampling.axes` changes a session's limits and proves that the change took effect.

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

    def arms(self, value: str) -> tuple[Arm, Arm]:
        """The reference and one trial as arms of a trace."""
        trial = next(t for t in self.trials if t.name == value)
        return replace(self.reference, name="alone"), replace(trial, name=f"{self.name}: {value}")


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

    def trial(name: str, *requests: Request, **limit: str) -> Arm:
        own = wide
        for axis, value in limit.items():
            own = AXES[axis].apply(Subject(Conditions(wide, dtype=""), device=""), value).load
        return Arm(name, "t0", requests, own, seed)

    one, long_one = Request("t0", True, prompt, new, 0), Request("t0", True, long, new_long, 0)
    batches = [trial(f"{size} requests", *(replace(one, id=f"t{i}") for i in range(size))) for size in _BATCHES]
    ragged = [
        trial(
            f"{length} tokens, {'at once' if arrival == 0 else f'{arrival} steps later'}",
            one,
            Request("b0", False, tuple(islice(cycle([*long[1:], long[0]]), length)), new, arrival),
        )
        for arrival in _ARRIVALS
        for length in lengths
    ]
    chunks = [trial(f"chunks of {size}", long_one, budget=str(size)) for size in _CHUNKS if size < len(long)]
    far_one = Request("t0", True, far, new_far, 0)
    beside = [Request(f"b{i}", False, long[i:], new_long, 0) for i in range(min(_BESIDE, len(long)))]
    late = [replace(one, arrival_step=2 + i) for i, one in enumerate(beside)]
    fars = [
        trial(f"{len(beside)} short requests at once", far_one, *beside),
        trial(f"{len(beside)} short requests that begin beside its decode", far_one, *late),
    ]
    half = max(load.page, len(far) // 2)
    donors = {"the whole prompt": far, "its first half": (*far[:half], *reversed(far[half:]))}
    # the donor has finished by then, so no other request is in any step of this one; its second token is needed because
    # the engine only keeps pages of a request that has decoded
    later = replace(far_one, arrival_step=2 * len(far) + 8)
    donated = {value: (Request("b0", False, donor, 2, 0), later) for value, donor in donors.items()}
    shared = [trial(value, *requests, sharing="on") for value, requests in donated.items()]
    off = trial("nothing shared", *shared[0].requests)
    alone, whole, far_alone = trial("alone", one), trial("in one piece", long_one), trial("alone", far_one)
    tokens, far_tokens = (f"a prompt of {len(p)} tokens" for p in (long, far))
    same = "all requests have the same prompt and begin at once; no chunks, no sharing"
    other = "one other request with a prompt of another length; no chunks, no sharing"
    donor = f"no other request in its steps, {far_tokens}, no chunks; an earlier request shares the prefix"
    return [
        RequestAxis("batch size", same, alone, tuple(batches)),
        RequestAxis("ragged company", other, alone, tuple(ragged)),
        RequestAxis(
            "long prompt", f"{far_tokens} beside short requests; no chunks, no sharing", far_alone, tuple(fars)
        ),
        RequestAxis("chunked prefill", f"no other request, {tokens}, no sharing", whole, tuple(chunks)),
        RequestAxis("prefix sharing", donor, off, tuple(shared), shares=True),
    ]


def try_axis(engine: Engine, axis: RequestAxis, impl: str) -> AxisTried:
    """Run the reference and every trial; an `EngineStoppedError`, or a `UserError` where sizes are refused."""
    reference = _session(engine, axis.reference)
    target = next(o for o in reference.outcomes if o.request.target)
    differences: dict[str, list[tuple[int | None, int | None]]] = {}
    unmet = []
    for trial in axis.trials:
        session = _session(engine, trial)
        if axis.shares and not AXES["sharing"].proof("on", Counter(session.figures), Counter()).holds:
            unmet.append(trial.name)
        else:
            outcomes = [o for o in session.outcomes if o.request.target]
            differences[trial.name] = [first_difference(target, outcome) for outcome in outcomes]
    seen = [pair for pairs in differences.values() for pair in pairs]
    places = [place for _, place in seen if place is not None]
    note = f"the engine took no keys from the cache: {', '.join(unmet)}" if unmet else ""
    if not axis.trials:
        note = "the prompt is too short for this"
    return AxisTried(
        axis=axis.name,
        impl=impl,
        held=axis.held,
        values=list(differences),
        parted=[value for value, pairs in differences.items() if any(place is not None for _, place in pairs)],
        tried=len(seen),
        traces=len(places),
        tokens=sum(token is not None for token, _ in seen),
        first=min(places, default=None),
        note=note,
    )


def _session(engine: Engine, arm: Arm) -> Session:
    session = engine.run(arm.requests, arm.load, seed=arm.seed)
    failed = [f"{o.request.id} failed: {o.reason}" for o in session.outcomes if o.finish == "error"]
    if session.fatal or failed:
        where = f"{arm.name}: " if arm.name else ""
        raise EngineStoppedError(where + (session.fatal or failed[0]))
    return session


# The cost of a session is measured once, after the first steps, and not estimated from the model or the device, because
# an engine can be slow for many reasons. The decision is in the step's record, so that a resumed run makes the same
# tests.

# About how long a diagnosis of the default size may take, by device.
WITHIN_S = {"cpu": 180.0, "cuda": 120.0}
_FEWEST = 2  # rounds: completions of one round are not independent
_RATE_S = 8.0  # for further rounds where the first has shown that the batch matters: they only narrow the rate
_AXIS_TRIALS, _AXIS_LAST = 26, 6  # of all axes: every value, and the last of each
_TRACE_ROUNDS = 6.0  # what a trace takes, in rounds, as counted in runs on a CPU and on an H200
_TRACE_LEAST = 5.0  # sessions of either arm to a first culprit: once freely, three times under control, once to name it
_CURE_SLOWNESS = 2.0  # how many times slower the fix is than stock, before it is measured
_AXIS_SHARE = 0.6  # of the solo session: half its tokens, some trials with more requests


@dataclass(frozen=True)
class Effort:
    """How much a diagnosis tests."""

    rounds: int  # of the plan's rounds
    every: int = 1  # every n-th value of an axis, and the last; 0: only the last
    margins: int = 2  # rounds whose flips' logits are compared
    times: int = 2
    round_s: float = 0.0  # seconds of a session with concurrent requests, and of a solo one; 0.0: not measured
    alone_s: float = 0.0

    def figures(self) -> dict[str, float]:
        """The figures for the step's record."""
        return {name: float(value) for name, value in asdict(self).items()}

    def sentence(self, planned: int, within_s: float) -> str:
        """What is left out and why; "" where there is nothing."""
        if self.every == 1 and self.rounds == planned:
            return ""
        axes = "" if self.every == 1 else f" and {_VALUES[self.every]} of each axis"
        if not self.every:
            return (
                f"the first round differs from the solo run, which is proof: {plural(self.rounds, 'round')} of "
                f"{planned}{axes} run (--within 0 runs all)"
            )
        return (
            f"a round takes {self.round_s:.1f} s here, and the prompt solo {self.alone_s:.1f} s: "
            f"{plural(self.rounds, 'round')} of {planned}{axes} run, to end in about {within_s:.0f} s "
            "(--within 0 runs all)"
        )

    @property
    def whole_s(self) -> float:
        """From here to the end, from the two measured sessions."""
        rounds = self.rounds - 1 + _TRACE_ROUNDS + self.margins - 1
        return rounds * self.round_s + self._axes_s + self.cure_s + self.cost_s

    @property
    def _axes_s(self) -> float:
        return self.axis_s(_AXIS_TRIALS) / self.every if self.every else self.axis_s(_AXIS_LAST)

    def axis_s(self, trials: int) -> float:
        """The time of this many completions with one thing varied."""
        return trials * _AXIS_SHARE * self.alone_s

    @property
    def cure_s(self) -> float:
        """The rounds and the axes once more, under the fix."""
        return ((self.rounds + 1) * self.round_s + self._axes_s / 2) * _CURE_SLOWNESS  # some axes differ

    @property
    def cost_s(self) -> float:
        """The time of the timed rounds."""
        return (1 + 2 * _CURE_SLOWNESS) * self.times * self.round_s

    @property
    def least_cure(self) -> Effort:
        """The same with the fewest rounds and values for the fix's check."""
        return replace(self, rounds=min(self.rounds, _FEWEST), every=self.every and max(_VALUES))


_VALUES = {0: "the last value", 2: "every second value", 3: "every third value"}


def chosen_effort(
    planned: int, round_s: float, alone_s: float, spent_s: float, within_s: float, *, differs: bool = False
) -> Effort:
    """The most that fits within `within_s` for everything (0.0: no limit), or the least. `differs`: whether the first
    round, which was repeated with equal bits, differs from the solo run: then it is proven that the batch matters, and
    more of the load or of an axis cannot change the answer."""
    whole = Effort(planned, round_s=round_s, alone_s=alone_s)
    if not within_s:
        return whole
    if differs:
        rounds = max(1, min(planned, int(_RATE_S / max(round_s, 1e-9))))
        return replace(whole, rounds=rounds, every=0, margins=1)
    half, least = (min(planned, max(_FEWEST, rounds)) for rounds in (-(-planned // 2), 0))
    steps = [
        whole,
        replace(whole, rounds=half),
        replace(whole, rounds=half, every=2, margins=1),
        replace(whole, rounds=least, every=3, margins=1, times=1),
    ]
    return next((effort for effort in steps if spent_s + effort.whole_s <= within_s), steps[-1])


def effort_of(run: Run, planned: int) -> Effort:
    """The effort of the run's record; all of it where there is none."""
    figures = steps_of(run)["run"].figures
    if "rounds" not in figures:
        return Effort(planned)
    counts = {name: int(figures[name]) for name in ("rounds", "every", "margins", "times")}
    return Effort(**counts, round_s=figures["round_s"], alone_s=figures["alone_s"])


def thinned(axes: Sequence[RequestAxis], every: int) -> list[RequestAxis]:
    """The axes with every n-th trial, and the last: the extremes are where kernels change."""
    kept = [axis.trials[:-1][::every] if every else () for axis in axes]
    return [
        axis if axis.shares else replace(axis, trials=(*some, *axis.trials[-1:]))
        for axis, some in zip(axes, kept, strict=True)
    ]


STOCK, INVARIANT = "stock", "invariant"


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
    bound: bool = False  # enforced to the end by leaving parts out; else it only chooses how much is tested
    clock: Callable[[], float] = time.perf_counter
    _kept: dict[int | None, Session] = field(default_factory=dict)
    _warm: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Every step that the run file lacks, then the verdict; raises as `try_axis`, and finished steps are kept."""
        takes = (
            self._greedy, self._run_to_run, self._batch, self._axes, self._operator, self._margin, self._cure,
            self._cost,
        )  # fmt: skip
        earlier = sum(step.seconds for step in self._so_far().steps)
        self._spent = Budget(self.within_s, earlier, self.clock)
        self._budget = self._spent if self.bound else Budget(clock=self.clock)
        if self.loaded.device == "cuda":  # while stock's sessions wait for cuDNN's plans, outside of Python
            threading.Thread(target=make_ready, name="nondet-ready", daemon=True).start()
        with pinned(self.threads), cheap_collections():
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
        reason = settled(so_far, name) or self._late(so_far, name)
        if reason:
            return Step(name=name, outcome="skipped", sentence=reason)
        return msgspec.structs.replace(step(so_far), seconds=self.clock() - started)

    def _late(self, so_far: Run, name: str) -> str:
        effort = self._effort(so_far)
        least_s = effort.least_cure.cure_s
        parts = {
            "axes": ("one value of an axis", effort.axis_s(1), 0.0),
            "operator": ("a trace", _TRACE_LEAST * (effort.round_s + effort.alone_s), least_s),
            "margin": ("a round", effort.round_s, 0.0),
            "cure": ("the load under the cure", least_s, 0.0),
            "cost": ("timing rounds", effort.cost_s, 0.0),
        }
        return self._budget.lacks(*parts[name]) if name in parts else ""

    # --- the steps ----------------------------------------------------------------------------------------------

    def _greedy(self, _: Run) -> Step:
        return greedy_step((self._known(None), self._known(0)), self.loaded.decode)

    def _run_to_run(self, so_far: Run) -> Step:
        """Two more solo runs, and the first round twice."""
        traces, seconds = [], []
        for _ in range(2):
            began = self.clock()
            traces.append(_trace_of(self._alone().outcomes[0]))
            seconds.append(self.clock() - began)
        self._collect(STOCK, self.plan.rounds[:1])
        facts = steps_of(so_far)["greedy"].facts
        step = run_step(self._so_far(), STOCK, [facts["trace"], *traces])
        differs = step.outcome == "yes" and batch_step(self._so_far(), STOCK, facts).outcome == "yes"
        planned = len(self.plan.rounds)
        # measured on a round that has been run: on CUDA a library plans for each shape that is new to it
        effort = chosen_effort(
            planned, self._known(0).seconds, min(seconds), self._spent.spent, self.within_s, differs=differs
        )
        less = effort.sentence(planned, self.within_s)
        sentence = f"{step.sentence}; {less}" if less else step.sentence
        figures = {**step.figures, **effort.figures()}
        return _with_less(msgspec.structs.replace(step, sentence=sentence, figures=figures), less)

    def _batch(self, so_far: Run) -> Step:
        self._collect(STOCK, self.plan.rounds[: self._effort(so_far).rounds])
        return batch_step(self._so_far(), STOCK, steps_of(so_far)["greedy"].facts)

    def _axes(self, so_far: Run) -> Step:
        counts, late = [], []
        for axis in self._thinned_axes(so_far):
            record = next((a for a in so_far.axes if (a.impl, a.axis) == (STOCK, axis.name)), None)
            if record is None:
                less = self._budget.lacks(axis_title(axis.name), self._effort(so_far).axis_s(len(axis.trials)))
                if less:
                    late.append(less)
                    continue
                record = try_axis(self.engine, axis, STOCK)
                self._write(record)
            differ = f"{record.traces} of {record.tried} traces, {record.tokens} of {record.tried} completions"
            counts.append(f"{axis_title(axis.name)}: {differ if record.tried else 'not met'}")
            self.say(f"  {counts[-1]}")
        parted = [a.axis for a in self._so_far().axes if a.impl == STOCK and a.traces]
        sentence = f"differ from the solo run, one property changed at a time: {'; '.join([*counts, *late])}"
        answer = "yes" if parted else "no" if counts else "unknown"
        step = Step(name="axes", outcome=answer, sentence=sentence, facts={"parted": ", ".join(parted)})
        return _with_less(step, "; ".join(late))

    def _operator(self, so_far: Run) -> Step:
        """A trace of a round with a differing completion, of an axis, or of the round that differs from itself."""
        arms, keep = self._arms(so_far), self._budget.kept(self._effort(so_far).least_cure.cure_s)
        search = Search(
            self.engine, self.loaded.model, *arms, impl=STOCK, choose=arms[1].name == "in company",
            write=self._write, say=lambda line: self.say(f"  {line}"),
            sweeps=self.loaded.device != "cuda",  # cuDNN plans for each size, Triton compiles: many seconds
            pace=Pace(lambda: self._budget.left - keep, self.clock),
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
        if facts["families"]:
            self._warm.add(f"{INVARIANT}:{facts['families']}")
        return _with_less(Step(name="operator", outcome=outcome, sentence=sentence, facts=facts), search.late)

    def _margin(self, so_far: Run) -> Step:
        chosen = parted_rounds(so_far, STOCK, steps_of(so_far)["greedy"].facts) or [0]
        others = (self._known(number) for number in chosen[: self._effort(so_far).margins])
        return margin_step(self._known(None), others)

    def _cure(self, so_far: Run) -> Step:
        """The same load under the invariant implementation, the solo request, and the axes that differed."""
        again = settled(so_far, "batch") != ""  # run-to-run: only one round, run twice, can be compared
        effort = self._effort(so_far)
        less = self._budget.lacks("all of the load under the cure", effort.cure_s)
        effort = effort.least_cure if less else effort
        every = len(self.plan.rounds)  # one round proves that stock differs; that the fix does not takes all
        rounds = 1 if again else effort.rounds if less or effort.every else every
        self._collect(INVARIANT, self.plan.rounds[:rounds])
        self._warm |= {STOCK, INVARIANT}
        axes = self._thinned_axes(so_far)  # made under stock
        axes = thinned(axes, effort.every) if less else axes
        with implementation(INVARIANT):
            alone = self._alone().outcomes[0]
            parted = {a.axis for a in so_far.axes if a.impl == STOCK and a.traces}
            for axis in axes:
                if axis.name in parted and ("axis", INVARIANT, axis.name) not in self.writer.done:
                    self._write(try_axis(self.engine, axis, INVARIANT))
        if less:
            less = f"{plural(effort.rounds, 'round')} and fewer values of each axis were run under the cure: {less}"
        run = self._so_far()
        return _with_less(cure_step(run, INVARIANT, _trace_of(alone), coverage_gaps(run, INVARIANT)), less)

    def _cost(self, so_far: Run) -> Step:
        families = steps_of(so_far)["operator"].facts.get("families", "")
        times = self._effort(so_far).times
        return cost_step(lambda: self._session(self.plan.rounds[0]), families, times=times, warm=self._warm)

    # --- what the steps share -----------------------------------------------------------------------------------

    @cached_property
    def engine(self) -> Engine:
        """The engine under study."""
        return make_engine("transformers", self.loaded.model)

    @cached_property
    def _target(self) -> Request:
        return next(r for r in self.plan.rounds[0] if r.target)

    @cached_property
    def _all_axes(self) -> list[RequestAxis]:
        alone = self._known(None).outcomes[0]
        context = self.loaded.context or 2**31
        return make_axes(self.plan.load, self._target.prompt, alone.token_ids, context, self.seed)

    def _effort(self, so_far: Run) -> Effort:
        return effort_of(so_far, len(self.plan.rounds))

    def _thinned_axes(self, so_far: Run) -> list[RequestAxis]:
        return thinned(self._all_axes, self._effort(so_far).every)

    def _known(self, number: int | None) -> Session:
        """A stock session of that round, or the solo one, run once in this process, for its logits."""
        if number not in self._kept:
            self._kept[number] = self._alone() if number is None else self._session(self.plan.rounds[number])
        return self._kept[number]

    def _alone(self) -> Session:
        return self._session([replace(self._target, arrival_step=0)])

    def _session(self, requests: Sequence[Request]) -> Session:
        return _session(self.engine, self._arm("", requests))

    def _collect(self, impl: str, rounds: tuple[tuple[Request, ...], ...]) -> None:
        collect(
            self.loaded, Plan(self.plan.load, rounds), [impl], self.writer, seed=self.seed, threads=self.threads,
            played=self._known(0) if impl == STOCK else None,
        )  # fmt: skip

    def _arms(self, so_far: Run) -> tuple[Arm, Arm]:
        facts = steps_of(so_far)["greedy"].facts
        rounds = parted_rounds(so_far, STOCK, facts)
        unsteady = steps_of(so_far)["run"].outcome == "no"
        if rounds or unsteady:
            requests = self.plan.rounds[rounds[0] if rounds else 0]
            target = next(r for r in requests if r.target)
            return self._arm("alone", [target]), self._arm("in company", requests)
        parted = next(a for a in so_far.axes if a.impl == STOCK and a.traces)
        return next(a for a in self._all_axes if a.name == parted.axis).arms(parted.parted[0])

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


def _trace_of(outcome: Outcome) -> str:
    return trace_digest(outcome.token_ids, outcome.logprobs)
