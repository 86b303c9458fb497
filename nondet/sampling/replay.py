"""Playing a recorded completion again: as it was, alone, and in the smallest company in which it still parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nondet.core.compare import first_difference
from nondet.core.records import Completion, Replayed, Tape
from nondet.core.traces import Trace
from nondet.errors import EngineStoppedError, UserError
from nondet.sampling.again import digest_of
from nondet.sampling.protocol import Engine, Outcome, Session
from nondet.sampling.tape import first_other_step, load_of, requests_of

__all__ = ["Player", "minimal"]

T = TypeVar("T")


def minimal(items: Sequence[T], still: Callable[[Sequence[T]], bool]) -> list[T]:
    """The smallest sublist found by delta debugging for which `still` holds: no member of it can be left out.

    `still` must hold for all items; it is asked of sublists in the order of `items`. (Zeller & Hildebrandt, 2002.)
    """
    kept, pieces = list(items), 2
    while len(kept) > 1:
        size = -(-len(kept) // pieces)
        chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
        for chunk in chunks if len(chunks) > 2 else []:
            if still(chunk):
                kept, pieces = list(chunk), 2
                break
        else:
            for index in range(len(chunks)):
                rest = [x for i, chunk in enumerate(chunks) if i != index for x in chunk]
                if still(rest):
                    kept, pieces = rest, max(2, pieces - 1)
                    break
            else:
                if size == 1:
                    break
                pieces = min(len(kept), 2 * pieces)
    if len(kept) == 1 and still([]):
        return []
    return kept


@dataclass
class Player:
    """Plays one tape.

    Attributes:
        sessions: How many it has run.
    """

    engine: Engine
    tape: Tape
    sessions: int = 0

    def play(self, only: Iterable[str] | None = None, until: str | None = None) -> Session:
        """The round, or some of its requests, from an empty engine.

        Raises:
            EngineStoppedError: the engine died.
        """
        self.sessions += 1
        wanted = None if only is None else set(only)
        requests = [r for r in requests_of(self.tape) if wanted is None or r.id in wanted]
        session = self.engine.run(requests, load_of(self.tape), seed=self.tape.seed, eos=self.tape.eos, until=until)
        if session.fatal:
            raise EngineStoppedError(f"round {self.tape.round}: {session.fatal}")
        return session

    def as_recorded(self, completions: Sequence[Completion], traces: dict[str, Trace]) -> list[Replayed]:
        """The whole round once, and what became of these completions of it."""
        started = time.perf_counter()
        session = self.play()
        step = first_other_step(self.tape, requests_of(self.tape), session.packs)
        seconds = time.perf_counter() - started
        return [self._as_recorded(c, traces, session, step, seconds) for c in completions]

    def _as_recorded(
        self, completion: Completion, traces: dict[str, Trace], session: Session, step: int | None, seconds: float
    ) -> Replayed:
        outcome = _outcome(session, completion.request)
        token, logprob = _apart(traces.get(completion.trace), outcome)
        got = digest_of(outcome)
        same = got == completion.trace
        steps = "every step as on the tape" if step is None else f"though step {step} ran otherwise than on the tape"
        if same:
            sentence = (
                f"{completion.request}: {len(outcome.token_ids)} tokens and logprobs bit for bit as recorded, {steps}"
            )
        else:
            where = "" if logprob is None else f", from token {logprob} on"
            sentence = f"{completion.request}: trace {got} instead of {completion.trace}{where}; {steps}"
        others = [r.id for r in self.tape.requests if r.id != completion.request]
        return self._record(completion, "as recorded", others, outcome, (token, logprob), sentence, seconds, 1)

    def alone(self, completion: Completion, traces: dict[str, Trace]) -> Replayed:
        """The request with nobody else there, held against the recorded completion."""
        started = time.perf_counter()
        outcome = _outcome(self.play([completion.request]), completion.request)
        token, logprob = _apart(traces.get(completion.trace), outcome)
        if logprob is None:
            sentence = f"{completion.request} alone: bit for bit as recorded in company"
        else:
            what = "no token differs" if token is None else f"the first token that differs is token {token}"
            sentence = f"{completion.request} alone parts from the recorded completion at token {logprob}; {what}"
        seconds = time.perf_counter() - started
        return self._record(completion, "alone", [], outcome, (token, logprob), sentence, seconds, 1)

    def shrunk(self, completion: Completion, traces: dict[str, Trace]) -> Replayed:
        """The smallest company found in which the request does not come out as it does alone.

        "Part" means tokens where the recorded completion's tokens part from those alone, else logprob bits.

        Raises:
            UserError: it comes out alone as recorded: there is nothing to shrink.
        """
        started, before = time.perf_counter(), self.sessions
        name = completion.request
        alone = _outcome(self.play([name]), name)
        recorded = traces.get(completion.trace)
        token, logprob = _apart(recorded, alone)
        if logprob is None:
            raise UserError(f"{name} comes out alone as it did in company", "Shrink one that parts.")
        by_tokens = token is not None
        others = [r.id for r in self.tape.requests if r.id != name]
        known: dict[tuple[str, ...], bool] = {}

        def parts(company: Sequence[str]) -> bool:
            key = tuple(company)
            if key not in known:
                outcome = _outcome(self.play([*company, name], until=name), name)
                differs = outcome.token_ids != alone.token_ids
                known[key] = differs or (not by_tokens and outcome.logprobs != alone.logprobs)
            return known[key]

        if not parts(others):
            raise UserError(
                f"{name} does not part when the whole round is played again", "Its replay says why: leave --shrink out."
            )
        company = minimal(others, parts)
        needed = [x for x in company if not parts([y for y in company if y != x])]
        final = _outcome(self.play([*company, name], until=name), name)
        token, logprob = first_difference(alone, final)
        what = "tokens" if by_tokens else "logprob bits"
        named = ", ".join(company[:8]) + (", ..." if len(company) > 8 else "")
        tokens = "no token differs" if token is None else f"tokens from {token} on"
        sentence = (
            f"{name} parts in {what} from itself alone in the company of {len(company)} of {len(others)} others "
            f"({named}): logprobs from token {logprob} on, {tokens}; "
            f"{'none of them' if needed == company else 'not every one'} can be left out"
        )
        seconds = time.perf_counter() - started
        return self._record(
            completion, "shrunk", company, final, (token, logprob), sentence, seconds, self.sessions - before
        )

    def _record(
        self,
        completion: Completion,
        how: str,
        company: list[str],
        outcome: Outcome,
        apart: tuple[int | None, int | None],
        sentence: str,
        seconds: float,
        sessions: int,
    ) -> Replayed:
        got = digest_of(outcome)
        return Replayed(
            impl=completion.impl, request=completion.request, how=how, company=company, recorded=completion.trace,
            got=got, same=got == completion.trace, first_token=apart[0], first_logprob=apart[1], sessions=sessions,
            sentence=sentence, seconds=seconds,
        )  # fmt: skip


def _outcome(session: Session, request: str) -> Outcome:
    outcome = next(o for o in session.outcomes if o.request.id == request)
    if outcome.finish in ("error", "cut"):
        raise EngineStoppedError(f"{request} failed: {outcome.reason}")
    return outcome


def _apart(recorded: Trace | None, outcome: Outcome) -> tuple[int | None, int | None]:
    """`first_difference` from the recorded trace; (None, None) where none was kept."""
    return (None, None) if recorded is None else first_difference(recorded, outcome)
