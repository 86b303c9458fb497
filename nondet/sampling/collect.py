"""The plan under each implementation, or along each axis, round by round, into a run file and its side file.

A round is written when it is over: its traces first, then its completions, then its `Round` record. So a completion's
trace is always on disk, and a stopped run is resumed at the first round without a `Round` record.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import msgspec

from nondet.core.compare import weights_digest
from nondet.core.launch import FirstUses, listen, note
from nondet.core.records import BASE_ARM, AxisValue, Completion, Round, Tape, arm_of
from nondet.core.runfile import RunWriter, read_run
from nondet.core.traces import RoundCollector, Trace, open_traces
from nondet.errors import EngineStoppedError, UserError
from nondet.sampling.analysis import TIMED_TOKENS, TIMED_US
from nondet.sampling.axes import Conditions, Proof, Varied
from nondet.sampling.engine import cheap_collections, pinned, warm_up
from nondet.sampling.implementations import implementation
from nondet.sampling.model import DTYPES, LoadedModel, piece_of
from nondet.sampling.plan import Engine, Outcome, Plan, Request, Session, draws_itself, make_engine
from nondet.sampling.ranks import RanksEngine
from nondet.sampling.replay import (
    completion_of,
    make_tape,
    repeat_key,
    repeat_row,
    rounds_to_settle,
    seed_of,
    settling_row,
)
from nondet.sampling.schedule import route

Progress = Callable[[str, int, int, int], None]
Preparing = Callable[[str, int, int, FirstUses], None]
Told = Callable[[str, Sequence[Completion]], None]
Play = Callable[[Sequence[Request], Conditions, str], Session]
Under = Callable[[str], AbstractContextManager[Callable[[], Counter[str]]]]


class Elsewhere(Engine, Protocol):
    """An engine whose model is in other processes."""

    def implementation(self, name: str) -> AbstractContextManager[Callable[[], Counter[str]]]:
        """Put the implementation under it; yields a function that counts what ran so far."""


def describe(
    loaded: LoadedModel,
    plan: Plan,
    *,
    prompt: str = "",
    prompt_tokens: int = 0,
    max_new_tokens: int,
    seed: int,
    impls: Sequence[str],
    prompts: Sequence[dict[str, Any]] = (),
    sampling: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The plan of a sampled run, for its header: what decides the records. A run is resumed only under an equal one.

    Args:
        prompts: Several subjects in the plan's order, as {"text", "tokens"} and "seed" where they have one; instead of
            `prompt` and `prompt_tokens`.
        sampling: Temperature, top_k, top_p and the number of seeds; None for greedy ones.
    """
    return {
        "prompts": list(prompts) or [{"text": prompt, "tokens": prompt_tokens}],
        "n": plan.targets,
        "max_tokens": max_new_tokens,
        "model": {"name": loaded.name, **loaded.identity},
        "device": loaded.device,
        "dtype": loaded.dtype,
        "impls": list(impls),
        "load": asdict(plan.load),
        "load_digest": plan.digest,  # covers the background prompts, which come from the running Python's documentation
        "seed": seed,
        "eos": [],  # no token ends a completion: all are equally long
        **({"sampling": sampling} if sampling else {}),
    }


def collect(
    loaded: LoadedModel,
    plan: Plan,
    impls: Sequence[str],
    writer: RunWriter,
    *,
    seed: int = 0,
    threads: int | None = None,
    repeat: bool = True,
    settle: int = 0,
    ranks: int = 1,
    elsewhere: Elsewhere | None = None,
    progress: Progress | None = None,
    preparing: Preparing | None = None,
    told: Told | None = None,
    played: Session | None = None,
    turns: bool = False,
) -> None:
    """Run whatever the run file does not hold yet.

    Args:
        turns: Run each round under every implementation before the next round, so that their times can be compared;
            else all rounds of one implementation come before those of the next.
        elsewhere: An engine in another process, which switches implementations by itself.
        played: The first round as this process has run it already under the named single implementation: then no
            warm-up is needed, and the recorded round is compared with this one.
        repeat: After an implementation's rounds, run its first one again and compare every bit: this separates
            batch-dependent from run-to-run nondeterministic.
        settle: How many further rounds may be run again, where a prompt diverged and the first round does not show
            whether the batch caused it; see `nondet.sampling.replay.rounds_to_settle`.
        progress: Called with (implementation, targets done, targets, tokens so far) whenever a target is finished.
        preparing: Called with (implementation, calls done, calls, first uses so far) before its first round.
        told: Called with (implementation, its completions so far) after its first round, where more follow.

    Raises:
        UserError: unknown implementation, full disk, an engine that refuses, a resumed round with different results.
        EngineStoppedError: the engine died; its round is on disk, with the reason in each request that it ended.
        KeyboardInterrupt: Ctrl-C; finished rounds are on disk.
    """
    weights = weights_digest(loaded.model)
    with ExitStack() as stack:
        traces = stack.enter_context(closing(open_traces(writer, piece_of(loaded))))
        stack.enter_context(pinned(threads))
        stack.enter_context(cheap_collections())
        engine: Engine = make_engine("transformers", loaded.model)
        under: Under = partial(implementation, model=loaded.model)
        if ranks > 1:
            elsewhere = stack.enter_context(RanksEngine(loaded, ranks))
        if elsewhere is not None:
            engine, under = elsewhere, elsewhere.implementation
        common = (loaded, plan, seed, Counter, engine, weights, settle, progress, preparing, told, played)
        parts = [_Rounds(writer, traces, impl, *common) for impl in impls]
        if turns:
            _take_turns(parts, under, repeat)
            return
        for part in parts:
            with under(part.impl) as part.counted:
                part.begin(repeat)
                for index in part.left:
                    part.play(index)
                part.finish()


def _take_turns(parts: Sequence[_Rounds], under: Under, repeat: bool) -> None:
    """Round after round, every implementation once, in an order that rotates by one each round. So a drift of the
    machine affects all of them alike, and none always follows the same other one."""
    for part in parts:
        with under(part.impl) as part.counted:
            part.begin(repeat)
    for index in range(len(parts[0].plan.rounds)):
        first = index % len(parts)
        for part in (*parts[first:], *parts[:first]):
            if index in part.left:
                with under(part.impl) as part.counted:
                    part.play(index)
    for part in parts:
        with under(part.impl) as part.counted:
            part.finish()


@dataclass
class _Sessions(RoundCollector):
    """Runs rounds of one implementation and writes each when it is over, unless it is on disk."""

    loaded: LoadedModel
    plan: Plan
    seed: int
    counted: Callable[[], Counter[str]]  # the dispatcher's counts so far, as `implementation` gives them

    def collect(self, number: int, play: Callable[[], Session], arm: str = "") -> Session:
        """Run a round and write it: its traces first, then its completions, and last its `Round`. Along axes `arm` is
        in the completions, and the `Round` holds the session's figures."""
        before = self.counted()
        with listen() as launched:
            session = play()
        ran = dict(launched + (self.counted() - before))
        targets = [o for o in session.outcomes if o.request.target]
        others = [o for o in session.outcomes if not o.request.target]
        records = self.completions(targets, number, arm)
        # a failed request has no trace, and its completion names none
        pairs = zip(targets, records, strict=True)
        self.traces.write(self._trace(o, record.trace) for o, record in pairs if record.trace)
        self.write(*records, *([] if session.fatal else self.tapes(session, number)))
        self.writer.write(
            Round(
                impl=self.impl,
                round=number,
                targets=len(targets),
                others=len(others),
                steps=session.steps,
                tokens=session.tokens,
                seconds=session.seconds,
                first_use_seconds=session.first_use_seconds,
                background={} if arm else {o.request.id: o.schedule for o in others},
                ran=ran,
                arm=arm,
                figures=session.figures if arm else _beside_captures(session),
            )
        )
        if session.fatal:
            where = f"{arm}, " if arm else ""
            raise EngineStoppedError(f"{self.impl}, {where}round {number}: {session.fatal}")
        return session

    def completions(self, targets: Sequence[Outcome], number: int, arm: str = "") -> list[Completion]:
        """The records of a round's targets; those that are on disk must be the same, bit for bit."""
        records = [completion_of(o, self.impl, number) for o in targets]
        # a request is there once per arm; thousands of schedules are left out, because plan and arm determine them
        if arm:
            records = [msgspec.structs.replace(r, request=f"{arm} {r.request}", schedule=[], arm=arm) for r in records]
        if any(r.key in self.writer.done for r in records):  # cut off while it was being written, and run again
            before = {c.key: c for c in read_run(self.writer.path, allow_truncated=True).completions}
            for record in records:
                if before.get(record.key, record) != record:
                    raise UserError(
                        f"{self.impl}, round {number}: {record.request} differs from before the stop",
                        "This model is not run-to-run deterministic here: start again with --force, and don't stop it.",
                    )
        return records

    def _trace(self, outcome: Outcome, digest: str) -> Trace:
        same = ("token_ids", "logprobs", "margins", "runner_up", "border", "cut", "nucleus")
        figures = {name: getattr(outcome, name) for name in same}
        return Trace(digest=digest, text=self.loaded.decode(outcome.token_ids), seed=seed_of(outcome), **figures)

    def tapes(self, session: Session, number: int) -> list[Tape]:
        return []


def _beside_captures(session: Session) -> dict[str, int]:
    """Time and tokens of the steps without a capture of a CUDA graph, where others had one: capturing is slow."""
    if not any(step.captured for step in session.pace):
        return {}
    timed = [step for step in session.pace if not step.captured]
    spent = round(1e6 * sum(step.seconds for step in timed))
    return {TIMED_TOKENS: sum(step.tokens for step in timed), TIMED_US: spent}


@dataclass
class _Rounds(_Sessions):
    engine: Engine
    weights: str
    settle: int
    progress: Progress | None
    preparing: Preparing | None
    told: Told | None
    played: Session | None = None
    done: int = 0
    tokens: int = 0
    left: list[int] = field(default_factory=list)  # the rounds that are not on disk yet
    again: bool = False  # whether the first one is to be repeated
    first: Session | None = None

    def begin(self, repeat: bool) -> None:
        """Find out what is left to do, and warm up if anything is."""
        rounds = self.plan.rounds
        self.left = self.missing(range(len(rounds)))
        self.again = repeat and repeat_key(self.loaded, self.impl) not in self.writer.done
        if not (self.left or self.again or self._open_rounds()):
            return
        self.done = sum(r.target for i, requests in enumerate(rounds) if i not in self.left for r in requests)
        report = None if self.preparing is None else partial(self.preparing, self.impl)
        if self.played is None:
            model = getattr(self.engine, "model", None)  # over ranks it is in other processes
            self.played = warm_up(model, self.plan, self.loaded.device, self._session, report)

    def play(self, index: int) -> None:
        session = self.collect(index, partial(self._session, self.plan.rounds[index], self._count))
        if index == 0:
            self.first = session
            if self.told is not None and len(self.plan.rounds) > 1:
                self.told(self.impl, self._recorded())

    def finish(self) -> None:
        """Repeat the first round, and others whose differences are unexplained."""
        rounds, first = self.plan.rounds, self.first
        if self.again and first is not None:
            started = time.perf_counter()
            other = self.played or self._session(rounds[0])
            self.writer.write(repeat_row(self.loaded, self.impl, first, other, started))
        held = [0] if self.again and first is None else []  # a resumed run compares it with what another process wrote
        for index in held + self._open_rounds():
            started = time.perf_counter()
            recorded = {c.key: c for c in self._recorded() if c.round == index}
            session = self._session(rounds[index])
            self.writer.write(settling_row(self.loaded, self.impl, index, recorded, session, started))

    def _open_rounds(self) -> list[int]:
        """The rounds that are to be repeated in addition to the first, and have not been."""
        rounds = rounds_to_settle(self._recorded(), self.settle) if self.settle else []
        return [r for r in rounds if repeat_key(self.loaded, self.impl, r) not in self.writer.done]

    def _recorded(self) -> list[Completion]:
        run = read_run(self.writer.path, allow_truncated=True)
        return [c for c in run.completions if c.impl == self.impl and c.status == "ok"]

    def _session(
        self, requests: Sequence[Request], on_token_count: Callable[[Request, int], None] | None = None
    ) -> Session:
        return self.engine.run(self._drawn(requests), self.plan.load, seed=self.seed, on_token_count=on_token_count)

    def _drawn(self, requests: Sequence[Request]) -> list[Request]:
        return [
            r if r.sampling is None else replace(r, sampling=replace(r.sampling, seeded=not draws_itself(self.impl)))
            for r in requests
        ]

    def _count(self, request: Request, new: int) -> None:
        self.tokens += new
        self.done += request.target
        if request.target and self.progress is not None:
            self.progress(self.impl, self.done, self.plan.targets, self.tokens)

    def tapes(self, session: Session, number: int) -> list[Tape]:
        named: dict[str, Any] = {"impl": self.impl, "round": number, "seed": self.seed, "eos": []}
        named |= {"engine": self.engine.describe(), "weights": self.weights}
        return [make_tape(self._drawn(self.plan.rounds[number]), self.plan.load, session.packs, **named)]


# One engine setting varied at a time: the same plan of requests at the base and at every value of every axis. The base
# is run once for all axes, and its first round twice: the same requests in the same batches must give the same bits, or
# no difference can be attributed to an axis.


@dataclass(frozen=True)
class Arm:
    """The sessions of one value, or of the base; `first` numbers its first round within the implementation."""

    name: str
    conditions: Conditions
    first: int


def arms_of(base: Conditions, axes: Sequence[Varied], rounds: int) -> list[Arm]:
    """The base, then every value of every axis, in the order in which they are run."""
    named = [(BASE_ARM, base)]
    named += [(arm_of(v.axis.name, value), conditions) for v in axes for value, conditions in v.values]
    return [Arm(name, conditions, i * rounds) for i, (name, conditions) in enumerate(named)]


def vary(
    loaded: LoadedModel,
    plan: Plan,
    base: Conditions,
    axes: Sequence[Varied],
    impls: Sequence[str],
    writer: RunWriter,
    *,
    seed: int = 0,
    progress: Callable[[str, str, int, int], None] | None = None,
    elsewhere: Play | None = None,
) -> None:
    """Run whatever the run file does not hold yet, with the same requests in every arm; raises as `collect`.
    `elsewhere` runs a round in another engine, `progress` is called with (implementation, arm, arms done, arms)."""
    arms = arms_of(base, axes, len(plan.rounds))
    with ExitStack() as stack:
        traces = stack.enter_context(closing(open_traces(writer, piece_of(loaded))))
        models = stack.enter_context(closing(_Models(loaded)))
        stack.enter_context(cheap_collections())
        for impl in impls:
            with implementation(impl, loaded.model) if elsewhere is None else nullcontext(Counter) as counted:
                rounds = _Arms(writer, traces, impl, loaded, plan, seed, counted, models, elsewhere)
                rounds.base(arms)
                tell = progress or (lambda *_: None)
                for i, arm in enumerate(arms):
                    tell(impl, arm.name, i, len(arms))
                    for number in rounds.missing(range(arm.first, arm.first + len(plan.rounds))):
                        requests = plan.rounds[number - arm.first]
                        rounds.collect(number, partial(rounds.session, requests, arm.conditions), arm.name)
                tell(impl, "", len(arms), len(arms))
                rounds.judge(arms, axes)


@dataclass
class _Models:
    """The model in the needed dtypes: one copy at a time in addition to the loaded one."""

    loaded: LoadedModel
    cast: tuple[str, Any] = ("", None)
    spread: RanksEngine | None = None

    def over(self, ranks: int) -> RanksEngine:
        """The model over `ranks` processes: one group of them at a time."""
        if self.spread is None or self.spread.world != ranks or not self.spread.pids:
            self.close()
            self.spread = RanksEngine(self.loaded, ranks)
        return self.spread

    def close(self) -> None:
        if self.spread is not None:
            self.spread.close()
            self.spread = None

    def of(self, dtype: str) -> Any:
        if dtype == self.loaded.dtype:
            self.cast = ("", None)
            return self.loaded.model
        if self.cast[0] != dtype:
            self.cast = ("", None)  # frees the previous copy first
            self.cast = (dtype, copy.deepcopy(self.loaded.model).to(DTYPES[dtype]))
        return self.cast[1]


@dataclass
class _Arms(_Sessions):
    models: _Models
    elsewhere: Play | None

    def base(self, arms: Sequence[Arm]) -> None:
        base, first = arms[0], self.plan.rounds[0]
        if repeat_key(self.loaded, self.impl) not in self.writer.done:
            started = time.perf_counter()
            once, again = (self.session(first, base.conditions) for _ in range(2))
            self.writer.write(repeat_row(self.loaded, self.impl, once, again, started))
            return
        missing = self.missing(range(len(arms) * len(self.plan.rounds)))
        if missing and 0 not in missing:
            outcomes = self.session(first, base.conditions).outcomes
            self.completions([o for o in outcomes if o.request.target], base.first, base.name)

    def judge(self, arms: Sequence[Arm], axes: Sequence[Varied]) -> None:
        """Record whether each value took effect, from its rounds and the base's."""
        rounds = {r.round: r for r in read_run(self.writer.path, allow_truncated=True).rounds if r.impl == self.impl}
        per_arm = len(self.plan.rounds)
        seen = {arm.name: [rounds[arm.first + i].figures for i in range(per_arm)] for arm in arms}
        base = _summed(seen[BASE_ARM], seen[BASE_ARM])
        for varied in axes:
            axis = varied.axis
            values = [(varied.base, BASE_ARM), *((v, arm_of(axis.name, v)) for v, _ in varied.values)]
            for value, arm in values if varied.values else [("", "")]:
                # the base's own value needs no proof
                proof = axis.proof(value, _summed(seen[arm], seen[BASE_ARM]), base) if arm else Proof(False, "")
                self.write(
                    AxisValue(
                        impl=self.impl,
                        axis=axis.name,
                        value=value,
                        arm=arm,
                        held=axis.held or self.impl in axis.held_by,
                        proven=proof.holds or arm == BASE_ARM,
                        proof=proof.text,
                        changes=axis.changes,
                        note=varied.note,
                    )
                )

    def session(self, requests: Sequence[Request], conditions: Conditions) -> Session:
        if self.elsewhere is not None:
            return self.elsewhere(requests, conditions, self.impl)
        with pinned(conditions.threads):
            if conditions.ranks == 1:
                return run_replicas(self.models.of(conditions.dtype), requests, conditions, self.seed)
            engine = self.models.over(conditions.ranks)
        with engine.implementation(self.impl) as coverage:
            session = engine.run(requests, conditions.load, seed=self.seed, setting=conditions.setting)
            for name, times in coverage().items():  # a rank's dispatcher counts are noted as what ran
                note(name, times)
        figures = {"ranks_most": engine.world, "share_most": engine.shares[0], "order": _order(session.admitted)}
        return replace(session, figures=session.figures | figures)


def run_replicas(model: Any, requests: Sequence[Request], conditions: Conditions, seed: int = 0) -> Session:
    """Run a round on all engines of the conditions, one after the other: each has its requests and its own cache.

    Returns:
        One session of all: outcomes in the order of the requests, seconds summed, steps numbered on from engine to
            engine (except in the outcomes' schedules, whose steps are their engine's), and figures.
    """
    engine = make_engine("transformers", model)
    turns = route("round-robin", requests, conditions.replicas)
    replicas = route(conditions.routing, requests, conditions.replicas) if conditions.replicas > 1 else turns
    sessions = []
    for replica in range(conditions.replicas):
        mine = [r for r, chosen in zip(requests, replicas, strict=True) if chosen == replica]
        if mine:
            sessions.append(engine.run(mine, conditions.load, seed=seed, setting=conditions.setting))
    outcomes = {o.request.id: o for session in sessions for o in session.outcomes}
    admitted = [name for s in sessions for name in s.admitted]
    figures = dict(_summed([s.figures for s in sessions], []))
    figures["replicas_most"] = len({c for r, c in zip(requests, replicas, strict=True) if r.target})
    figures["order"] = _order(admitted)
    if conditions.replicas > 1:
        figures["rerouted"] = sum(a != b for a, b in zip(replicas, turns, strict=True))
    before = [0, *accumulate(s.steps for s in sessions)]
    return Session(
        outcomes=[outcomes[r.id] for r in requests],
        steps=before[-1],
        tokens=sum(s.tokens for s in sessions),
        seconds=sum(s.seconds for s in sessions),
        fatal=next((s.fatal for s in sessions if s.fatal), ""),
        packs={
            first + step: pack for first, s in zip(before, sessions, strict=False) for step, pack in s.packs.items()
        },
        tops={name: tops for s in sessions for name, tops in s.tops.items()},
        figures=figures,
        admitted=admitted,
        pace=[step for s in sessions for step in s.pace],
        first_use_seconds=sum(s.first_use_seconds for s in sessions),
    )


def _order(admitted: Sequence[str]) -> int:
    """A number that identifies an order of admission, small enough for every reader of JSON."""
    return int(hashlib.sha256(" ".join(admitted).encode()).hexdigest()[:12], 16)


def _summed(rounds: Sequence[Mapping[str, int]], base: Sequence[Mapping[str, int]]) -> Counter[str]:
    """Over rounds: sums, maxima of "page" and of names that end in "_most", rounds in another order than the base's."""
    total: Counter[str] = Counter()
    for figures in rounds:
        for name, value in figures.items():
            most = name == "page" or name.endswith("_most")
            total[name] = max(total[name], value) if most else total[name] + value
    total.pop("order", None)
    if base:
        total["rounds"] = len(rounds)
        total["reordered"] = sum(a.get("order") != b.get("order") for a, b in zip(rounds, base, strict=True))
    return total
