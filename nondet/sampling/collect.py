"""The plan under each implementation, round by round, into a run file and its side file.

A round is written when it is over: its traces first, then its completions, then its `Round` record. So a completion's
trace is always on disk, and a run that is stopped anywhere goes on with the first round that has no `Round` record.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from nondet.core.compare import weights_digest
from nondet.core.launch import FirstUses, listen
from nondet.core.records import Completion, Round, Tape
from nondet.core.runfile import RunWriter, read_run
from nondet.core.traces import Trace, TraceWriter, traces_path
from nondet.errors import EngineStoppedError, UserError
from nondet.sampling.again import completion_of, repeat_key, repeat_row, rounds_to_settle, settling_row
from nondet.sampling.conditions import cheap_collections, pinned
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel
from nondet.sampling.pieces import piece_of
from nondet.sampling.plan import Plan, Request
from nondet.sampling.protocol import Engine, Outcome, Session, make_engine
from nondet.sampling.ranks_engine import RanksEngine
from nondet.sampling.tape import make_tape
from nondet.sampling.temperature import draws_itself
from nondet.sampling.warm_up import warm_up

__all__ = ["check_partly_written", "collect", "describe", "trace_of"]

Progress = Callable[[str, int, int, int], None]
Preparing = Callable[[str, int, int, FirstUses], None]
OnTokenCount = Callable[[Request, int], None]
Under = Callable[[str], AbstractContextManager[Callable[[], Counter[str]]]]


def describe(
    loaded: LoadedModel,
    plan: Plan,
    *,
    prompt: str = "",
    prompt_tokens: int = 0,
    max_new_tokens: int,
    seed: int,
    impls: Sequence[str],
    eos: Sequence[int] = (),
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
        "eos": list(eos),
        **({"sampling": sampling} if sampling else {}),
    }


def collect(
    loaded: LoadedModel,
    plan: Plan,
    impls: Sequence[str],
    writer: RunWriter,
    *,
    seed: int = 0,
    eos: Sequence[int] = (),
    threads: int | None = None,
    repeat: bool = True,
    settle: int = 0,
    ranks: int = 1,
    progress: Progress | None = None,
    preparing: Preparing | None = None,
) -> None:
    """Run whatever the run file does not hold yet.

    Args:
        writer: Open on the run file; its `done` says what is there.
        eos: Token ids that end a completion; () makes all completions equally long.
        threads: CPU threads to pin; None leaves them as they are.
        repeat: After an implementation's rounds, run its first one again and compare every bit: whether the same call
            gives the same bits is what tells batch-dependent from run-to-run nondeterministic.
        settle: How many further rounds may be run again, where a prompt parted and the first round alone can't tell
            whether the batch did it; see `nondet.sampling.again.rounds_to_settle`.
        ranks: Processes that the model is cut over; see `nondet.sampling.ranks_engine`.
        progress: Called with (implementation, targets done, targets, tokens so far) whenever a target is finished.
        preparing: Called with (implementation, calls done, calls, first uses so far) before its first round.

    Raises:
        UserError: unknown implementation, full disk, an engine that refuses, a resumed round that came out otherwise.
        EngineStoppedError: the engine died; its round is on disk, with the reason in each request that it took along.
        KeyboardInterrupt: Ctrl-C; finished rounds are on disk.
    """
    # a run that was stopped before its first traces has no side file yet; other kinds of record need none
    begun = any(key[0] in ("completion", "round") for key in writer.done)
    resume = begun or (writer.resumed and traces_path(writer.path).exists())
    traces = TraceWriter(writer.path, resume=resume, piece=piece_of(loaded), prompts=writer.long_prompts)
    weights = weights_digest(loaded.model)
    try:
        with pinned(threads), cheap_collections(), ExitStack() as stack:
            engine: Engine = make_engine("transformers", loaded.model)
            under: Under = partial(implementation, model=loaded.model)
            if ranks > 1:
                spread = stack.enter_context(RanksEngine(loaded, ranks))
                engine, under = spread, spread.implementation
            collector = _Collector(
                loaded, plan, writer, traces, seed, eos, progress, preparing, engine, weights, settle
            )
            for impl in impls:
                with under(impl) as said:
                    collector.run(impl, said, repeat)
    finally:
        traces.close()


@dataclass
class _Collector:
    """What `collect` was given, and how far the implementation in hand has come."""

    loaded: LoadedModel
    plan: Plan
    writer: RunWriter
    traces: TraceWriter
    seed: int
    eos: Sequence[int]
    progress: Progress | None
    preparing: Preparing | None
    engine: Engine
    weights: str
    settle: int
    impl: str = ""
    done: int = 0
    tokens: int = 0

    def run(self, impl: str, said: Callable[[], Counter[str]], repeat: bool) -> None:
        """The rounds of one implementation that are not on disk yet, then the first one again."""
        rounds = self.plan.rounds
        missing = [i for i in range(len(rounds)) if ("round", impl, str(i)) not in self.writer.done]
        again = repeat and repeat_key(self.loaded, impl) not in self.writer.done
        settle = self._open_rounds(impl) if not missing and not again else None
        if settle == []:
            return
        self.impl = impl
        self.done = sum(r.target for i, requests in enumerate(rounds) if i not in missing for r in requests)
        self.tokens = 0
        self._warm_up()
        first: Session | None = None
        for index in missing:
            before = said()
            with listen() as launched:
                session = self._session(rounds[index], lambda request, new: self._count(impl, request, new))
            first = session if index == 0 else first
            self._write(session, impl, index, dict(launched + (said() - before)))
            if session.fatal:
                raise EngineStoppedError(f"{impl}, round {index}: {session.fatal}")
        if again and first is not None:
            started = time.perf_counter()
            self.writer.write(repeat_row(self.loaded, impl, first, self._session(rounds[0]), started))
        held = [0] if again and first is None else []  # a resumed run holds it against what another process wrote
        for index in held + (self._open_rounds(impl) if settle is None else settle):
            started = time.perf_counter()
            recorded = {c.key: c for c in self._recorded(impl) if c.round == index}
            session = self._session(rounds[index])
            self.writer.write(settling_row(self.loaded, impl, index, recorded, session, started))

    def _open_rounds(self, impl: str) -> list[int]:
        """The rounds that are to be run again beside the first, and have not been."""
        if not self.settle:
            return []
        rounds = rounds_to_settle(self._recorded(impl), self.settle)
        return [r for r in rounds if repeat_key(self.loaded, impl, r) not in self.writer.done]

    def _recorded(self, impl: str) -> list[Completion]:
        run = read_run(self.writer.path, allow_truncated=True)
        return [c for c in run.completions if c.impl == impl and c.status == "ok"]

    def _session(self, requests: Sequence[Request], on_token_count: OnTokenCount | None = None) -> Session:
        return self.engine.run(
            self._drawn(requests), self.plan.load, seed=self.seed, eos=self.eos, on_token_count=on_token_count
        )

    def _drawn(self, requests: Sequence[Request]) -> list[Request]:
        """As this implementation draws."""
        return [
            r if r.sampling is None else replace(r, sampling=replace(r.sampling, seeded=not draws_itself(self.impl)))
            for r in requests
        ]

    def _count(self, impl: str, request: Request, new: int) -> None:
        self.tokens += new
        self.done += request.target
        if request.target and self.progress is not None:
            self.progress(impl, self.done, self.plan.targets, self.tokens)

    def _warm_up(self) -> None:
        told, impl = self.preparing, self.impl
        model = getattr(self.engine, "model", None)  # over ranks it is in other processes
        report = None if told is None else lambda done, total, uses: told(impl, done, total, uses)
        warm_up(model, self.plan, self.loaded.device, self._session, report)

    def _write(self, session: Session, impl: str, index: int, ran: dict[str, int]) -> None:
        targets = [o for o in session.outcomes if o.request.target]
        others = [o for o in session.outcomes if not o.request.target]
        records = [completion_of(o, impl, index) for o in targets]
        check_partly_written(records, self.writer)
        # a failed request has no trace, and its completion names none
        self.traces.write(trace_of(o, r.trace, self.loaded) for o, r in zip(targets, records, strict=True) if r.trace)
        for record in records:
            if record.key not in self.writer.done:
                self.writer.write(record)
        if not session.fatal and ("tape", impl, str(index)) not in self.writer.done:
            self.writer.write(self._tape(session, impl, index))
        self.writer.write(
            Round(
                impl=impl,
                round=index,
                targets=len(targets),
                others=len(others),
                steps=session.steps,
                tokens=session.tokens,
                seconds=session.seconds,
                first_use_seconds=session.first_use_seconds,
                background={o.request.id: o.schedule for o in others},
                ran=ran,
            )
        )

    def _tape(self, session: Session, impl: str, index: int) -> Tape:
        """What is needed to play the round again."""
        return make_tape(
            self._drawn(self.plan.rounds[index]),
            self.plan.load,
            session.packs,
            impl=impl,
            round=index,
            seed=self.seed,
            eos=self.eos,
            engine=self.engine.describe(),
            weights=self.weights,
        )


def check_partly_written(records: list[Completion], writer: RunWriter) -> None:
    """A round cut off while it was being written is run again: it must come out bit for bit as before."""
    if not any(r.key in writer.done for r in records):
        return
    before = {c.key: c for c in read_run(writer.path, allow_truncated=True).completions}
    for record in records:
        if record.key in before and before[record.key] != record:
            raise UserError(
                f"{record.impl}, round {record.round}: {record.request} came out otherwise than before the stop",
                "This model is not run-to-run deterministic here: start again with --force, and don't stop it.",
            )


def trace_of(outcome: Outcome, digest: str, loaded: LoadedModel) -> Trace:
    """What the side file holds of a completion."""
    return Trace(
        digest=digest,
        token_ids=outcome.token_ids,
        logprobs=outcome.logprobs,
        margins=outcome.margins,
        runner_up=outcome.runner_up,
        text=loaded.decode(outcome.token_ids),
        seed=None if outcome.request.sampling is None else outcome.request.sampling.seed,
        border=outcome.border,
        cut=outcome.cut,
        nucleus=outcome.nucleus,
    )
