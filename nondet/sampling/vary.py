"""One thing about the engine varied at a time: the same plan of requests at the base and at every value of every axis.

The base is run once for all axes, and its first round twice: the same requests in the same batches must give the same
bits, or nothing that parts can be laid to an axis. A round is written when it is over, as in `nondet.sampling.collect`.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from nondet.core.launch import listen, note
from nondet.core.records import BASE_ARM, AxisValue, Completion, Round, arm_of
from nondet.core.runfile import RunWriter, read_run
from nondet.core.traces import TraceWriter, traces_path
from nondet.errors import EngineStoppedError
from nondet.sampling.again import completion_of, repeat_key, repeat_row
from nondet.sampling.axes.base import Conditions
from nondet.sampling.axes.table import Varied
from nondet.sampling.collect import check_partly_written, trace_of
from nondet.sampling.conditions import cheap_collections, pinned
from nondet.sampling.implementations import implementation
from nondet.sampling.loading import DTYPES
from nondet.sampling.model import LoadedModel
from nondet.sampling.pieces import piece_of
from nondet.sampling.plan import Plan, Request
from nondet.sampling.protocol import Session, make_engine
from nondet.sampling.ranks_engine import RanksEngine
from nondet.sampling.routing import route

__all__ = ["Arm", "arms_of", "run_replicas", "vary"]

Progress = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class Arm:
    """The sessions of one value, or of the base.

    Attributes:
        first: Number of its first round within the implementation.
    """

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
    progress: Progress | None = None,
) -> None:
    """Run whatever the run file does not hold yet.

    Args:
        plan: The requests, the same for every arm.
        progress: Called with (implementation, arm, arms done, arms) as arms begin and at the end.

    Raises:
        UserError: an engine that refuses, a full disk, a resumed round that came out otherwise.
        EngineStoppedError: the engine died; its round is on disk.
        KeyboardInterrupt: Ctrl-C; finished rounds are on disk.
    """
    begun = any(key[0] in ("completion", "round") for key in writer.done)
    resume = begun or (writer.resumed and traces_path(writer.path).exists())
    traces = TraceWriter(writer.path, resume=resume, piece=piece_of(loaded), prompts=writer.long_prompts)
    arms = arms_of(base, axes, len(plan.rounds))
    models = _Models(loaded)
    try:
        with cheap_collections():
            for impl in impls:
                with implementation(impl, loaded.model) as said:
                    run = _Run(plan, writer, traces, models, impl, seed, said)
                    run.base(arms)
                    for i, arm in enumerate(arms):
                        if progress is not None:
                            progress(impl, arm.name, i, len(arms))
                        run.arm(arm)
                    if progress is not None:
                        progress(impl, "", len(arms), len(arms))
                    run.judge(arms, axes)
    finally:
        models.close()
        traces.close()


@dataclass
class _Models:
    """The model in the dtypes that are asked of it: one copy at a time beside the one that was loaded."""

    loaded: LoadedModel
    cast: tuple[str, Any] = ("", None)
    spread: RanksEngine | None = None

    def over(self, ranks: int) -> RanksEngine:
        """It, cut over that many ranks: one group of them at a time."""
        if self.spread is None or self.spread.world != ranks or not self.spread.pids:
            self.close()
            self.spread = RanksEngine(self.loaded, ranks)
        return self.spread

    def close(self) -> None:
        """End the ranks."""
        if self.spread is not None:
            self.spread.close()
            self.spread = None

    def of(self, dtype: str) -> Any:
        if dtype == self.loaded.dtype:
            self.cast = ("", None)
            return self.loaded.model
        if self.cast[0] != dtype:
            self.cast = ("", None)  # the copy before it goes first
            self.cast = (dtype, copy.deepcopy(self.loaded.model).to(DTYPES[dtype]))
        return self.cast[1]


@dataclass
class _Run:
    """One implementation's rounds."""

    plan: Plan
    writer: RunWriter
    traces: TraceWriter
    models: _Models
    impl: str
    seed: int
    said: Callable[[], Counter[str]]

    def base(self, arms: Sequence[Arm]) -> None:
        """The first round twice, before everything else.

        Of a run that was stopped once more, where arms are to come: they are held against what another process wrote.

        Raises:
            UserError: it came out otherwise.
        """
        base, first = arms[0], self.plan.rounds[0]
        if repeat_key(self.models.loaded, self.impl) not in self.writer.done:
            started = time.perf_counter()
            once, again = (self._session(first, base.conditions)[0] for _ in range(2))
            self.writer.write(repeat_row(self.models.loaded, self.impl, once, again, started))
            return
        numbers = range(len(arms) * len(self.plan.rounds))
        on_disk = [("round", self.impl, str(number)) in self.writer.done for number in numbers]
        if on_disk[0] and not all(on_disk):
            session, _ = self._session(first, base.conditions)
            targets = [o for o in session.outcomes if o.request.target]
            records = [_of_arm(completion_of(o, self.impl, base.first), base.name) for o in targets]
            check_partly_written(records, self.writer)

    def arm(self, arm: Arm) -> None:
        """The rounds of one arm that are not on disk yet."""
        for i, requests in enumerate(self.plan.rounds):
            number = arm.first + i
            if ("round", self.impl, str(number)) in self.writer.done:
                continue
            before = self.said()
            with listen() as launched:
                session, figures = self._session(requests, arm.conditions)
            self._write(session, figures, arm, number, dict(launched + (self.said() - before)))
            if session.fatal:
                raise EngineStoppedError(f"{self.impl}, {arm.name}, round {number}: {session.fatal}")

    def judge(self, arms: Sequence[Arm], axes: Sequence[Varied]) -> None:
        """Whether each value took effect, by what its rounds and the base's did."""
        rounds = {r.round: r for r in read_run(self.writer.path, allow_truncated=True).rounds if r.impl == self.impl}
        per_arm = len(self.plan.rounds)
        seen = {arm.name: [rounds[arm.first + i].figures for i in range(per_arm)] for arm in arms}
        base = _summed(seen[BASE_ARM], seen[BASE_ARM])
        for varied in axes:
            axis = varied.axis
            values = [(varied.base, BASE_ARM), *((v, arm_of(axis.name, v)) for v, _ in varied.values)]
            for value, arm in values if varied.values else []:
                # the value that the base has is what it is: whether that too can be seen is told, not asked
                proof = axis.proof(value, _summed(seen[arm], seen[BASE_ARM]), base)
                self._value(varied, value, arm, proof.holds or arm == BASE_ARM, proof.text)
            if not varied.values:
                self._value(varied, "", "", False, "")

    def _value(self, varied: Varied, value: str, arm: str, proven: bool, proof: str) -> None:
        axis = varied.axis
        held = axis.held or self.impl in axis.held_by
        record = AxisValue(
            impl=self.impl, axis=axis.name, value=value, arm=arm, held=held, proven=proven, proof=proof,
            changes=axis.changes, note=varied.note,
        )  # fmt: skip
        if record.key not in self.writer.done:
            self.writer.write(record)

    def _session(self, requests: Sequence[Request], conditions: Conditions) -> tuple[Session, dict[str, int]]:
        """One round under these conditions, and what it did."""
        if conditions.ranks > 1:
            return self._over_ranks(requests, conditions)
        model = self.models.of(conditions.dtype)
        with pinned(conditions.threads):
            return run_replicas(model, requests, conditions, self.seed)

    def _over_ranks(self, requests: Sequence[Request], conditions: Conditions) -> tuple[Session, dict[str, int]]:
        """One round over ranks. What the dispatcher says in a rank is noted as what ran."""
        with pinned(conditions.threads):
            engine = self.models.over(conditions.ranks)
        with engine.implementation(self.impl) as coverage:
            session = engine.run(requests, conditions.load, seed=self.seed, setting=conditions.setting)
            for name, times in coverage().items():
                note(name, times)
        figures = {"ranks_most": engine.world, "share_most": engine.shares[0], "order": _order(session.admitted)}
        return session, session.figures | figures

    def _write(self, session: Session, figures: dict[str, int], arm: Arm, number: int, ran: dict[str, int]) -> None:
        targets = [o for o in session.outcomes if o.request.target]
        records = [_of_arm(completion_of(o, self.impl, number), arm.name) for o in targets]
        check_partly_written(records, self.writer)
        self.traces.write(
            trace_of(o, r.trace, self.models.loaded) for o, r in zip(targets, records, strict=True) if r.trace
        )
        for record in records:
            if record.key not in self.writer.done:
                self.writer.write(record)
        self.writer.write(
            Round(
                impl=self.impl, round=number, targets=len(targets), others=len(session.outcomes) - len(targets),
                steps=session.steps, tokens=session.tokens, seconds=session.seconds,
                first_use_seconds=session.first_use_seconds, ran=ran, arm=arm.name,
                figures=figures,
            )
        )  # fmt: skip


def run_replicas(
    model: Any, requests: Sequence[Request], conditions: Conditions, seed: int = 0
) -> tuple[Session, dict[str, int]]:
    """A round on as many engines as the conditions have, one after the other: each has its requests and its own cache.

    Returns:
        One session of all: outcomes in the order of the requests, seconds summed, steps counted on from engine to
        engine (but for the outcomes' schedules, whose steps are their engine's); and what it did.
    """
    engine = make_engine("transformers", model)
    if conditions.replicas == 1:
        session = engine.run(requests, conditions.load, seed=seed, setting=conditions.setting)
        used = int(any(o.request.target for o in session.outcomes))
        return session, session.figures | {"replicas_most": used, "order": _order(session.admitted)}
    replicas = route(conditions.routing, requests, conditions.replicas)
    turns = route("round-robin", requests, conditions.replicas)
    sessions = []
    for replica in range(conditions.replicas):
        mine = [r for r, chosen in zip(requests, replicas, strict=True) if chosen == replica]
        if mine:
            sessions.append(engine.run(mine, conditions.load, seed=seed, setting=conditions.setting))
    outcomes = {o.request.id: o for session in sessions for o in session.outcomes}
    figures = _summed([s.figures for s in sessions], [])
    figures["replicas_most"] = len({c for r, c in zip(requests, replicas, strict=True) if r.target})
    figures["rerouted"] = sum(a != b for a, b in zip(replicas, turns, strict=True))
    admitted = [name for s in sessions for name in s.admitted]
    figures["order"] = _order(admitted)
    before = [0, *accumulate(s.steps for s in sessions)]
    return (
        Session(
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
        ),
        figures,
    )


def _order(admitted: Sequence[str]) -> int:
    """A number that tells one order of admission from another, small enough for every reader of JSON."""
    return int(hashlib.sha256(" ".join(admitted).encode()).hexdigest()[:12], 16)


def _summed(rounds: Sequence[Mapping[str, int]], base: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Over rounds: sums, maxima of "page" and of names that end in "_most", rounds in another order than the base's."""
    total: dict[str, int] = {}
    for figures in rounds:
        for name, value in figures.items():
            most = name == "page" or name.endswith("_most")
            total[name] = max(total.get(name, 0), value) if most else total.get(name, 0) + value
    total.pop("order", None)
    if base:
        total["rounds"] = len(rounds)
        total["reordered"] = sum(a.get("order") != b.get("order") for a, b in zip(rounds, base, strict=True))
    return total


def _of_arm(completion: Completion, arm: str) -> Completion:
    """A request is there once an arm; its schedule is left out of thousands of them: plan and arm give it again."""
    return msgspec.structs.replace(completion, request=f"{arm} {completion.request}", schedule=[], arm=arm)
