"""What is sampled, and the one loop that samples it: rounds in arms under implementations, into a run file.

An arm is the plan's rounds under one set of conditions: one arm by itself, or the base and every value that is varied.
A round is written when it is over: its traces first, then its completions, then its `Round` record. So a completion's
trace is always on disk, and a stopped run is resumed at the first round without a `Round` record.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import msgspec

from nondet.core.compare import weights_digest
from nondet.core.launch import listen
from nondet.core.records import BASE_ARM, AxisValue, Completion, Round, arm_of
from nondet.core.runfile import RunWriter, read_run
from nondet.core.traces import RoundCollector, Trace, open_traces
from nondet.errors import EngineStoppedError, UserError
from nondet.sampling import plan as plans
from nondet.sampling import replay
from nondet.sampling.analysis import TIMED_TOKENS, TIMED_US
from nondet.sampling.axes import CHANGES, Conditions, Proof, Seen, Varied
from nondet.sampling.engine import TransformersEngine, pinned, warm_up
from nondet.sampling.implementations import implementation
from nondet.sampling.model import DTYPES, LoadedModel, check_lengths, piece_of
from nondet.sampling.plan import Engine, Load, Notes, Outcome, Plan, Request, Sampling, Session
from nondet.sampling.ranks import RanksEngine
from nondet.sampling.routing import route
from nondet.sampling.schedule import admission_number, summed_figures

OnTokens = Callable[[Request, int], None]
_SUMMED = ("steps", "tokens", "seconds", "first_use_seconds")  # figures of a session, which its round has as well


@dataclass(frozen=True)
class Arm:
    """The plan's rounds under these conditions; without a name where it is the only one."""

    name: str
    conditions: Conditions


@dataclass(frozen=True)
class Survey:
    """What is sampled: the plan's rounds in every arm, under every implementation."""

    loaded: LoadedModel
    plan: Plan
    base: Conditions
    impls: Sequence[str]
    axes: Sequence[Varied] = ()  # what is varied; () where there is one arm
    seed: int = 0
    turns: bool = False  # run each round under every implementation before the next one, so that times are comparable
    settle: int = 0  # most rounds that are run again beside the first, see `nondet.sampling.replay.rounds_to_settle`
    wanted: Callable[[int], bool] = lambda number: True  # whether a round is still to be run, when its turn comes

    @cached_property
    def arms(self) -> list[Arm]:
        """The base, then every value of every axis, in the order in which they are run."""
        others = (Arm(arm_of(v.axis.name, value), conditions) for v in self.axes for value, conditions in v.values)
        return [Arm(BASE_ARM if self.axes else "", self.base), *others]

    @property
    def rounds(self) -> int:
        """Rounds of an implementation, over all arms."""
        return len(self.arms) * len(self.plan.rounds)

    def at(self, number: int) -> tuple[Arm, int]:
        """The arm of a round, and which of the plan's rounds it is."""
        arm, index = divmod(number, len(self.plan.rounds))
        return self.arms[arm], index


def plan_prompts(
    loaded: LoadedModel, load: Load, texts: Sequence[str], n: int, length: int, seed: int, impls: Sequence[str],
    samplings: Sequence[Sampling] = (), riders: Sequence[str] = (), tokens: Sequence[Sequence[int]] = (),
) -> tuple[Plan, dict[str, Any]]:  # fmt: skip
    """The rounds in which the prompts are completed, and their description in a run's header. `riders` are background
    prompts: those that fit the context run where there are enough targets; `tokens` are the texts' ids, where they are
    not just encoded. A `UserError` of a prompt without tokens, or too long with its completion: which of several."""
    tokens = tokens or [loaded.encode(text) for text in texts]
    for number, ids in enumerate(tokens, 1):
        check_lengths(loaded, ids, length, f"prompt {number}: " if len(texts) > 1 else "")
    context = loaded.context or 2**31
    fit = {text: ids for text in riders if len(ids := loaded.encode(text)) + length <= context}
    if n * len(texts) * max(1, len(samplings)) < 2 * plans.RIDERS_EVERY:
        fit = {}  # a round of one target would have nothing to compare
    plan = plans.build_plan(
        load, n=n, seed=seed, prompts=tokens, samplings=samplings, max_new_tokens=length, context=context,
        encode=loaded.encode_plain, riders=list(fit.values()),
    )  # fmt: skip
    listed: list[dict[str, Any]] = [
        {"text": str(text), "tokens": len(ids)} for text, ids in [*zip(texts, tokens, strict=True), *fit.items()]
    ]
    if samplings:
        listed = [subject | {"seed": sampling.seed} for subject in listed for sampling in samplings]
    described = describe(loaded, plan, listed, length, seed, impls)
    return plan, described | ({"riders": len(fit)} if fit else {})


def describe(
    loaded: LoadedModel, plan: Plan, prompts: Sequence[dict[str, Any]], length: int, seed: int, impls: Sequence[str]
) -> dict[str, Any]:
    """The plan of a sampled run, for its header: what decides the records. A run is resumed only under an equal one.
    `prompts` are the subjects in the plan's order, as {"text", "tokens"} and "seed" where they have one."""
    return {
        "prompts": list(prompts),
        "n": plan.targets,
        "max_tokens": length,
        "model": {"name": loaded.name, **loaded.identity},
        "device": loaded.device,
        "dtype": loaded.dtype,
        "impls": list(impls),
        "load": asdict(plan.load),
        "load_digest": plan.digest,  # covers the background prompts, which come from the running Python's documentation
        "seed": seed,
        "eos": [],  # no token ends a completion: all are equally long
    }


class Host(Protocol):
    """What plays rounds: transformers' engine in this process or over ranks, or vLLM in a process of its own. `layers`
    is the model whose layers can be called before a first round; None where it is in other processes."""

    layers: Any

    def under(self, impl: str) -> AbstractContextManager[Callable[[], Counter[str]]]:
        """Put the implementation under it; yields a function that counts what ran so far."""

    def play(
        self, requests: Sequence[Request], conditions: Conditions, impl: str, seed: int, on_tokens: OnTokens | None
    ) -> Session:
        """Run the requests from an empty engine; `on_tokens` is called with each finished one and its tokens."""

    def describe(self, conditions: Conditions) -> dict[str, Any]:
        """What is fixed in addition to the load."""

    def close(self) -> None:
        """End its processes."""


class Here:
    """transformers' engine in this process, or over ranks where the conditions name several: one group of ranks at a
    time, and one copy of the model in another dtype. `apart`: every session is over ranks, none in this process."""

    def __init__(self, loaded: LoadedModel, *, apart: bool = False) -> None:
        self.loaded, self.apart, self.layers = loaded, apart, None if apart else loaded.model
        self._cast: tuple[str, Any] = ("", None)
        self._ranks: RanksEngine | None = None

    def under(self, impl: str) -> AbstractContextManager[Callable[[], Counter[str]]]:
        """See `Host`."""
        return nullcontext(Counter) if self.apart else implementation(impl, self.loaded.model)

    def play(
        self, requests: Sequence[Request], conditions: Conditions, impl: str, seed: int, on_tokens: OnTokens | None
    ) -> Session:
        """See `Host`; with the conditions' threads, on all of their replicas."""
        options: dict[str, Any] = {"seed": seed, "on_token_count": on_tokens, "setting": conditions.setting}
        with pinned(conditions.threads):
            if conditions.ranks == 1:
                engine = TransformersEngine(self._model(conditions.dtype))
                replicas = (conditions.replicas, conditions.routing)
                return play_replicas(engine, requests, conditions.load, *replicas, **options)
            ranks = self._over(conditions.ranks)
        session = ranks.run(requests, conditions.load, impl, **options)
        return replace(session, figures=session.figures | {"ranks_most": ranks.world, "share_most": ranks.shares[0]})

    def describe(self, conditions: Conditions) -> dict[str, Any]:
        """See `Host`."""
        if conditions.ranks == 1:
            return TransformersEngine(self._model(conditions.dtype)).describe()
        return self._over(conditions.ranks).describe()

    def _over(self, ranks: int) -> RanksEngine:
        if self._ranks is None or self._ranks.world != ranks or not self._ranks.pids:
            self.close()
            self._ranks = RanksEngine(self.loaded, ranks)
        return self._ranks

    def _model(self, dtype: str) -> Any:
        if dtype == self.loaded.dtype:
            self._cast = ("", None)
            return self.loaded.model
        if self._cast[0] != dtype:
            self._cast = ("", None)  # frees the previous copy first
            self._cast = (dtype, copy.deepcopy(self.loaded.model).to(DTYPES[dtype]))
        return self._cast[1]

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def collect(
    survey: Survey, host: Host, writer: RunWriter, notes: Notes | None = None, played: Session | None = None
) -> None:
    """Run whatever the run file does not hold yet. `played` is the first round as this process has run it already under
    the single implementation: then no warm-up is needed, and the recorded round is compared with this one.

    Raises:
        UserError: unknown implementation, full disk, an engine that refuses, a resumed round with different results.
        EngineStoppedError: the engine died; its round is on disk, with the reason in each request that it ended.
        KeyboardInterrupt: Ctrl-C; finished rounds are on disk.
    """
    weights = weights_digest(survey.loaded.model)
    with closing(open_traces(writer, piece_of(survey.loaded))) as traces:
        parts = [
            _Rounds(writer, traces, impl, survey, host, notes or Notes(), weights, played) for impl in survey.impls
        ]
        for part, steps in groupby(_in_order(parts, survey), key=itemgetter(0)):
            with host.under(part.impl) as part.counted:
                for _, step in steps:
                    step()


def _in_order(parts: Sequence[_Rounds], survey: Survey) -> Iterator[tuple[_Rounds, Callable[[], object]]]:
    """What is to be done, step by step. In turns the order of the implementations rotates by one each round: so a drift
    of the machine affects all of them alike, and none always follows the same other one."""
    for group in [parts] if survey.turns else [[part] for part in parts]:
        yield from ((part, part.begin) for part in group)
        for number in range(survey.rounds):
            first = number % len(group)
            yield from ((part, partial(part.play, number)) for part in (*group[first:], *group[:first]))
        yield from ((part, part.finish) for part in group)


@dataclass(eq=False)
class _Rounds(RoundCollector):
    """The rounds of one implementation. Each is written when it is over, unless it is on disk."""

    survey: Survey
    host: Host
    notes: Notes
    weights: str
    played: Session | None
    counted: Callable[[], Counter[str]] = Counter  # what ran so far, as the host gives it
    done: int = 0
    tokens: int = 0
    left: set[int] = field(default_factory=set)  # the rounds that are not on disk yet
    # whether the first one is to be compared with itself in advance: a difference is run-to-run nondeterminism
    again: bool = False
    first: Session | None = None

    def begin(self) -> None:
        """Find out what is left to do; if anything is, run the first round once in advance."""
        survey, rounds = self.survey, self.survey.plan.rounds
        self.left = set(self.missing(range(survey.rounds)))
        self.again = replay.repeat_key(survey.loaded, self.impl) not in self.writer.done
        there = (survey.at(number)[1] for number in range(survey.rounds) if number not in self.left)
        self.done = sum(r.target for index in there for r in rounds[index])
        if self.played is None and (self.left or self.again or self._open_rounds()):
            play, report = partial(self._play, survey.arms[0]), partial(self.notes.preparing, self.impl)
            layers = None if survey.axes else self.host.layers  # other arms' steps have other sizes
            self.played = warm_up(layers, survey.plan, survey.loaded.device, play, report)
            if survey.axes and 0 not in self.left:
                # the process that wrote the base's rounds gave them these bits, or no difference is an axis' effect
                self._check(self._records(self.played, 0), 0)

    def play(self, number: int) -> None:
        """Run a round and write it, unless it is on disk."""
        if number not in self.left or not self.survey.wanted(number):
            return
        survey = self.survey
        arm, index = survey.at(number)
        before = self.counted()
        with listen() as launched:
            session = self._play(arm, survey.plan.rounds[index], partial(self._count, arm.name))
        ran = dict(launched + (self.counted() - before))
        targets = [o for o in session.outcomes if o.request.target]
        others = [o for o in session.outcomes if not o.request.target]
        records = self._records(session, number)
        self._check(records, number)
        # a failed request has no trace, and its completion names none
        pairs = zip(targets, records, strict=True)
        self.traces.write(self._trace(o, record.trace) for o, record in pairs if record.trace)
        self.write(*records)
        if not arm.name and not session.fatal:
            requests, engine = self._drawn(survey.plan.rounds[index]), self.host.describe(survey.base)
            named = {"impl": self.impl, "round": index, "seed": survey.seed, "eos": [], "weights": self.weights}
            self.write(replay.recording(requests, survey.plan.load, session.packs, engine=engine, **named))
        same = {name: getattr(session, name) for name in _SUMMED}
        background = {} if arm.name else {o.request.id: o.schedule for o in others}
        figures = session.figures if arm.name else _beside_captures(session)
        self.writer.write(
            Round(
                impl=self.impl,
                round=number,
                targets=len(targets),
                others=len(others),
                background=background,
                ran=ran,
                arm=arm.name,
                figures=figures,
                **same,
            )
        )
        if session.fatal:
            where = f"{arm.name}, " if arm.name else ""
            raise EngineStoppedError(f"{self.impl}, {where}round {number}: {session.fatal}")
        if number == 0:
            self.first = session
            if survey.rounds > 1 and not arm.name:
                self.notes.first_round(self.impl, self._recorded())

    def finish(self) -> None:
        """Compare the first round with the one in advance, repeat others, and record the axes' proofs."""
        survey, stored = self.survey, list[int]()
        if self.again and self.first is not None and self.played is not None:
            head = replay.repeated(survey.loaded, self.impl, 0, time.perf_counter())
            self.writer.write(replay.with_session(head, self.played, self.first))
        elif self.again:
            stored = [0]  # a resumed run compares it with what is on disk
        for index in stored + self._open_rounds():
            started = time.perf_counter()
            session = self.played if index == 0 else None
            session = session or self._play(survey.arms[0], survey.plan.rounds[index])
            before = {c.key: c for c in self._recorded() if c.round == index}
            head = replay.repeated(survey.loaded, self.impl, index, started)
            self.writer.write(replay.with_records(head, before, self._records(session, index)))
        if survey.axes:
            self._judge_axes()

    def _judge_axes(self) -> None:
        """Record whether each value took effect, from its rounds and the base's."""
        seen: dict[str, list[dict[str, int]]] = {}
        for r in read_run(self.writer.path, allow_truncated=True).rounds:
            if r.impl == self.impl:
                seen.setdefault(r.arm, []).append(r.figures)
        base = _figures(seen[BASE_ARM], seen[BASE_ARM])
        for varied in self.survey.axes:
            axis = varied.axis
            values = [(varied.base, BASE_ARM), *((v, arm_of(axis.name, v)) for v, _ in varied.values)]
            for value, arm in values if varied.values else [("", "")]:
                # the base's own value needs no proof
                proof = axis.proof(value, _figures(seen[arm], seen[BASE_ARM]), base) if arm else Proof(False, "")
                self.write(
                    AxisValue(
                        impl=self.impl,
                        axis=axis.name,
                        value=value,
                        arm=arm,
                        changes=CHANGES[axis.name],
                        note=varied.note,
                        held=axis.held or self.impl in axis.held_by,
                        proof=proof.text,
                        proven=proof.holds or arm == BASE_ARM,
                    )
                )

    def _play(self, arm: Arm, requests: Sequence[Request], on_tokens: OnTokens | None = None) -> Session:
        return self.host.play(self._drawn(requests), arm.conditions, self.impl, self.survey.seed, on_tokens)

    def _drawn(self, requests: Sequence[Request]) -> list[Request]:
        seeded = self.impl not in plans.UNSEEDED
        return [r if r.sampling is None else replace(r, sampling=replace(r.sampling, seeded=seeded)) for r in requests]

    def _count(self, arm: str, request: Request, new: int) -> None:
        self.tokens += new
        self.done += request.target
        if request.target:
            self.notes.progress(self.impl, arm, self.done, self.tokens)

    def _open_rounds(self) -> list[int]:
        """The rounds that are to be repeated in addition to the first, and have not been."""
        settle = 0 if self.survey.axes else self.survey.settle
        rounds = replay.rounds_to_settle(self._recorded(), settle) if settle else []
        return [r for r in rounds if replay.repeat_key(self.survey.loaded, self.impl, r) not in self.writer.done]

    def _recorded(self) -> list[Completion]:
        run = read_run(self.writer.path, allow_truncated=True)
        return [c for c in run.completions if c.impl == self.impl and c.status == "ok"]

    def _records(self, session: Session, number: int) -> list[Completion]:
        """The records of a round's targets."""
        arm = self.survey.at(number)[0].name
        records = [replay.completion_of(o, self.impl, number) for o in session.outcomes if o.request.target]
        if not arm:
            return records
        # a request is there once per arm; thousands of schedules are left out, because plan and arm determine them
        return [msgspec.structs.replace(r, request=f"{arm} {r.request}", schedule=[], arm=arm) for r in records]

    def _check(self, records: Sequence[Completion], number: int) -> None:
        """Records that are on disk, because their round was cut off and is run again, must be the same bit for bit."""
        if not any(r.key in self.writer.done for r in records):
            return
        before = {c.key: c for c in read_run(self.writer.path, allow_truncated=True).completions}
        for record in records:
            if before.get(record.key, record) != record:
                raise UserError(
                    f"{self.impl}, round {number}: {record.request} differs from before the stop",
                    "This model is not run-to-run deterministic here: start again with --force, and don't stop it.",
                )

    def _trace(self, outcome: Outcome, digest: str) -> Trace:
        same = ("token_ids", "logprobs", "margins", "runner_up", "border", "cut", "nucleus")
        figures = {name: getattr(outcome, name) for name in same} | {"seed": replay.seed_of(outcome)}
        return Trace(digest=digest, text=self.survey.loaded.decode(outcome.token_ids), **figures)


def _beside_captures(session: Session) -> dict[str, int]:
    """Time and tokens of the steps without a capture of a CUDA graph, where others had one: capturing is slow."""
    if not any(step.captured for step in session.pace):
        return {}
    timed = [step for step in session.pace if not step.captured]
    spent = round(1e6 * sum(step.seconds for step in timed))
    return {TIMED_TOKENS: sum(step.tokens for step in timed), TIMED_US: spent}


def _figures(rounds: Sequence[dict[str, int]], base: Sequence[dict[str, int]]) -> Seen:
    """An arm's figures over its rounds, with how many were in another order than the base's."""
    total = summed_figures(rounds)
    total["rounds"] = len(rounds)
    total["reordered"] = sum(a.get("order") != b.get("order") for a, b in zip(rounds, base, strict=True))
    return total


def play_replicas(
    engine: Engine, requests: Sequence[Request], load: Load, count: int, policy: str, **options: Any
) -> Session:
    """Play a round on `count` replicas, one after the other: each has its requests and its own cache. The session of
    several has neither packs nor logits nor the pace of steps, because steps (also of schedules) are numbered by
    replica; outcomes are in the order of the requests, seconds summed."""
    if count == 1:
        session = engine.run(requests, load, **options)
        return replace(session, figures=session.figures | {"replicas_most": 1})
    turns, replicas = [i % count for i in range(len(requests))], route(policy, requests, count)
    shares: dict[int, list[Request]] = {}
    for request, replica in zip(requests, replicas, strict=True):
        shares.setdefault(replica, []).append(request)
    sessions = [engine.run(share, load, **options) for _, share in sorted(shares.items())]
    outcomes = {o.request.id: o for session in sessions for o in session.outcomes}
    admitted = [name for s in sessions for name in s.admitted]
    figures = summed_figures([s.figures for s in sessions])
    figures["replicas_most"] = sum(any(r.target for r in share) for share in shares.values())
    figures["order"] = admission_number(admitted)
    figures["rerouted"] = sum(a != b for a, b in zip(replicas, turns, strict=True))
    summed = {name: sum(getattr(s, name) for s in sessions) for name in _SUMMED}
    fatal, joined = next((s.fatal for s in sessions if s.fatal), ""), [outcomes[r.id] for r in requests]
    return Session(joined, fatal=fatal, figures=dict(figures), admitted=admitted, **summed)
