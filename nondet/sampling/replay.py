"""Rounds and completions replayed: a round's recording, the same batches again, solo, and with the fewest others."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, TypeVar

import msgspec

from nondet.core.compare import first_difference
from nondet.core.measure import row_of
from nondet.core.records import Completion, Replayed, Row, Run, Status, Tape, TapedRequest
from nondet.core.traces import Trace, nonfinite_logprobs, tokens_digest, trace_digest
from nondet.errors import EngineStoppedError, UserError
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Engine, Load, Outcome, Request, Sampling, Session, Span


def recording(requests: Sequence[Request], load: Load, packs: Mapping[int, tuple[Span, ...]], **named: Any) -> Tape:
    """The recording of a completed session; `named` as in `Tape`: impl, round, seed, eos, engine, weights."""
    prompts: dict[tuple[int, ...], int] = {}
    taken = []
    for r in requests:
        sampling = None if r.sampling is None else asdict(r.sampling)
        size = {"prompt": prompts.setdefault(r.prompt, len(prompts)), "new": r.max_new_tokens}
        taken.append(TapedRequest(id=r.id, target=r.target, arrival=r.arrival_step, sampling=sampling, **size))
    steps: list[list[Any]] = []
    for step, spans in sorted(_numbered(requests, packs).items()):
        if steps:
            first, count, *before = steps[-1]
            if step == first + count and spans == [[i, at + count * rows, rows] for i, at, rows in before]:
                steps[-1][1] += 1
                continue
        steps.append([step, 1, *spans])
    padding = "the sizes of CUDA graphs" if load.graphs else ""
    known = [list(p) for p in prompts]
    return Tape(requests=taken, prompts=known, load=asdict(load), steps=steps, padding=padding, **named)


def _numbered(requests: Sequence[Request], packs: Mapping[int, tuple[Span, ...]]) -> dict[int, list[list[int]]]:
    """Step -> its [request, first position, rows], requests by their index."""
    index = {r.id: i for i, r in enumerate(requests)}
    return {step: [[index[s.request], s.first, s.rows] for s in pack] for step, pack in packs.items()}


def requests_of(record: Tape) -> list[Request]:
    """The round's requests, in the plan's order."""
    drawn = [r.sampling if r.sampling is None else msgspec.convert(r.sampling, Sampling) for r in record.requests]
    return [
        Request(r.id, r.target, tuple(record.prompts[r.prompt]), r.new, r.arrival, sampling=sampling)
        for r, sampling in zip(record.requests, drawn, strict=True)
    ]


def load_of(record: Tape) -> Load:
    """The engine's limits."""
    return msgspec.convert(record.load, Load)


def first_other_step(record: Tape, requests: Sequence[Request], packs: Mapping[int, tuple[Span, ...]]) -> int | None:
    """The first step with other requests, or other positions, than in the recording; None where none has."""
    played = _numbered(requests, packs)
    recorded = {
        first + n: [[i, at + n * rows, rows] for i, at, rows in spans]
        for first, count, *spans in record.steps
        for n in range(count)
    }
    return min((s for s in played.keys() | recorded.keys() if played.get(s) != recorded.get(s)), default=None)


def select_completions(run: Run, wanted: Sequence[str], impl: str | None) -> list[Completion]:
    """The recorded completions of these requests; "divergent" means all whose trace is not the most common of their
    prompt and arm. Raises UserError: no such request, or several implementations have it."""
    impls = list(dict.fromkeys(c.impl for c in run.completions))
    chosen = impl or ("stock" if "stock" in impls else impls[0] if len(impls) == 1 else None)
    if chosen not in impls:
        what = f"{run.source} has completions under {', '.join(impls) or 'no implementation'}"
        raise UserError(what + (f", and none under --impl {impl}" if impl else ""), "Name one with --impl.")
    by_id = {c.request: c for c in run.completions if c.impl == chosen}
    out: dict[str, Completion] = {}
    for name in wanted:
        if name == "divergent":
            out |= _divergent(by_id)
        elif name not in by_id:
            raise UserError(
                f"{run.source} has no request {name!r} under {chosen}", f"It has {min(by_id)} to {max(by_id)}."
            )
        elif by_id[name].status != "ok":
            raise UserError(f"{name} failed in {run.source}: {by_id[name].reason}", "Name one that came to its end.")
        else:
            out[name] = by_id[name]
    return list(out.values())


def _divergent(by_id: Mapping[str, Completion]) -> dict[str, Completion]:
    good = {name: c for name, c in by_id.items() if c.status == "ok"}
    groups: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    for c in good.values():
        groups[c.prompt, c.arm][c.trace] += 1
    # of equally common ones the first that was drawn
    most_common = {key: max(traces, key=traces.__getitem__) for key, traces in groups.items()}
    return {name: c for name, c in good.items() if c.trace != most_common[c.prompt, c.arm]}


def recording_of(run: Run, completion: Completion, weights: str = "") -> Tape:
    """The recording of a completion's round; a `UserError` where the run has none, one of other weights than these, or,
    because any file may be read, an inconsistent one."""
    record = next((t for t in run.tapes if (t.impl, t.round) == (completion.impl, completion.round)), None)
    if record is None:
        what = f"{run.source} has no tape of {completion.impl}, round {completion.round}"
        raise UserError(what, "Runs hold tapes since nondet 0.2: sample again.")
    try:
        load_of(record)
        requests = requests_of(record)
    except (msgspec.ValidationError, IndexError):
        requests = []
    ids = {r.id for r in requests}
    whole = (
        len(ids) == len(requests) and completion.request in ids,
        all(r.prompt for r in requests) and not record.eos,  # no token ends a completion
        all(len(e) >= 3 and all(isinstance(s, list) and len(s) == 3 for s in e[2:]) for e in record.steps),
    )
    if not all(whole):
        what = f"the tape of {record.impl}, round {record.round}, in {run.source} is not whole"
        raise UserError(what, "Was it edited by hand? Sample again.")
    if record.engine.get("ranks", 1) != 1:
        what = f"{completion.request} of {run.source} ran over {record.engine['ranks']} ranks"
        raise UserError(what, "Rounds are replayed and traced on one rank only.")
    if weights not in ("", record.weights):
        what = f"the model's weights have digest {weights}, those of {run.source} had {record.weights}"
        raise UserError(what, "Load the model that the run was made with: --model.")
    return record


# Running rounds again separates batch-dependent from run-to-run nondeterministic, but only for the rounds that were run
# again: always the first, and as few others as needed where a prompt diverged but its completions in that round agree.


def completion_of(outcome: Outcome, impl: str, index: int) -> Completion:
    """The record of one request under study, of round `index`."""
    failed, request = outcome.finish == "error", outcome.request
    tokens, trace = ("", "") if failed else (tokens_digest(outcome.token_ids), digest_of(outcome))
    same = {name: getattr(outcome, name) for name in ("finish", "schedule", "batch_min", "batch_max", "reason")}
    return Completion(
        impl=impl,
        request=request.id,
        round=index,
        prompt=request.subject,
        arrival_step=request.arrival_step,
        tokens_digest=tokens,
        trace=trace,
        n_tokens=len(outcome.token_ids),
        nonfinite=nonfinite_logprobs(outcome.logprobs),
        status="error" if failed else "ok",
        **same,
    )


def seed_of(outcome: Outcome) -> int | None:
    """Of its draws; None of greedy ones."""
    return None if outcome.request.sampling is None else outcome.request.sampling.seed


def digest_of(outcome: Outcome) -> str:
    """Of its trace."""
    return trace_digest(outcome.token_ids, outcome.logprobs, seed_of(outcome))


def rounds_to_settle(completions: Sequence[Completion], most: int) -> list[int]:
    """Rounds to repeat in addition to the first, so that each prompt that diverged does so within repeated rounds: of
    all completions that succeeded under one implementation. Greedy: the round that settles most prompts first, the
    earlier one among equals. A prompt may need two rounds; those that need more than `most` stay open."""
    traces: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for c in completions:
        traces[c.prompt][c.round].add(c.trace)
    open_ = {p: rounds for p, rounds in traces.items() if len(set().union(*rounds.values())) > 1}
    seen = {p: set(rounds.get(0, ())) for p, rounds in open_.items()}
    chosen: list[int] = []
    while len(chosen) < most:
        gains: dict[int, tuple[int, int]] = {}
        for p, rounds in open_.items():
            if len(seen[p]) > 1:
                continue
            for number, members in rounds.items():
                settled, nearer = gains.get(number, (0, 0))
                union = len(seen[p] | members)
                gains[number] = (settled + (union > 1), nearer + (union > len(seen[p])))
        gains = {number: gain for number, gain in gains.items() if any(gain) and number not in (0, *chosen)}
        if not gains:
            break
        best = min(gains, key=lambda number: (-gains[number][0], -gains[number][1], number))
        chosen.append(best)
        for p, rounds in open_.items():
            seen[p] |= rounds.get(best, set())
    return chosen


def repeat_key(loaded: LoadedModel, impl: str, index: int = 0) -> tuple[str, ...]:
    """The key of a repeated round's row, for a resumed run."""
    return ("row", "sample", _case(index), loaded.dtype, loaded.device, impl)


def _case(index: int) -> str:
    return "the first round, twice" if index == 0 else f"round {index}, twice"


def repeated(loaded: LoadedModel, impl: str, index: int, started: float) -> Row:
    """The row of a round that was run again, before it is compared."""
    identity = loaded.identity
    shape = {k: identity[k] for k in ("layers", "hidden", "vocabulary") if isinstance(identity.get(k), int)}
    return Row(
        probe="sample",
        case=_case(index),
        operator="engine",
        inputs="prompts",
        varied="run",
        impl=impl,
        status="",
        shape=shape,
        dtype=loaded.dtype,
        device=loaded.device,
        extra={"round": index} if index else {},
        seconds=time.perf_counter() - started,
    )


def with_session(head: Row, once: Session, again: Session) -> Row:
    """The first round, twice: tokens, logprobs, margins and schedules of all requests, bit for bit. Under CUDA graphs
    the first step of each size runs without one, and then is captured: each session has an engine of its own, so that
    two equal ones do so in the same steps. If they did not, a step without a graph would be compared with a replay, and
    a difference would not be random: such a pair has no answer."""
    failed = [o.reason for s in (once, again) for o in s.outcomes if o.finish == "error"]
    captured = [[number for number, step in enumerate(s.pace) if step.captured] for s in (once, again)]
    if captured[0] != captured[1]:
        failed.append(
            "CUDA graphs were captured in other steps the second time, so a replay would be compared with a plain step"
        )
    differ = sum(a != b for a, b in zip(once.outcomes, again.outcomes, strict=True))
    return _compared(head, len(once.outcomes), differ, failed)


def with_records(head: Row, before: Mapping[tuple[str, ...], Completion], records: Sequence[Completion]) -> Row:
    """A round's completions, `records`, compared with those on disk, `before` by key: traces and schedules. So is the
    first one of a stopped run: a difference between two processes is not an effect of the batch."""
    failed = [r.reason for r in records if r.status != "ok"]
    differ = sum(r.key in before and before[r.key] != r for r in records)
    return _compared(head, len(before), differ, failed)


def _compared(head: Row, requests: int, differ: int, failed: Sequence[str]) -> Row:
    extra = {"requests": requests, "requests_parted": differ, **head.extra}
    more = {"status": Status.ERROR, "reason": failed[0]} if failed else {}
    return row_of(head, [1, 2], [0, bool(differ)], extra=extra, **more)


T = TypeVar("T")


def minimal(items: Sequence[T], still: Callable[[Sequence[T]], bool]) -> list[T]:
    """A sublist for which `still` holds, and of which no member can be left out, found by leaving out ever smaller
    pieces. `still` must hold for all items; it is called with sublists in the order of `items`."""
    kept, size, shorter = list(items), len(items), True
    while kept and (size > 1 or shorter):
        size, start, shorter = max(1, size // 2), 0, False
        while start < len(kept):
            rest = kept[:start] + kept[start + size :]
            if still(rest):
                kept, shorter = rest, True
            else:
                start += size
    return kept


@dataclass
class Player:
    """Replays one recording."""

    engine: Engine
    record: Tape
    sessions: int = 0

    def play(self, only: Iterable[str] | None = None, until: str | None = None) -> Session:
        """The round, or some of its requests, from an empty engine. Raises EngineStoppedError: the engine died."""
        self.sessions += 1
        wanted = None if only is None else set(only)
        requests = [r for r in requests_of(self.record) if wanted is None or r.id in wanted]
        session = self.engine.run(requests, load_of(self.record), seed=self.record.seed, until=until)
        if session.fatal:
            raise EngineStoppedError(f"round {self.record.round}: {session.fatal}")
        return session

    def _others(self, name: str) -> list[str]:
        return [r.id for r in self.record.requests if r.id != name]

    def _beside(self, others: Sequence[str], name: str, until: str | None = None) -> Outcome:
        return _outcome(self.play([*others, name], until), name)

    def as_recorded(self, completions: Sequence[Completion], traces: Mapping[str, Trace]) -> list[Replayed]:
        """The whole round once, and these completions' results in it."""
        started = time.perf_counter()
        session = self.play()
        step = first_other_step(self.record, requests_of(self.record), session.packs)
        seconds = time.perf_counter() - started
        steps = "every step as recorded" if step is None else f"but step {step} ran another batch than recorded"
        replays = []
        for completion in completions:
            name, outcome = completion.request, _outcome(session, completion.request)
            first = _difference(traces, completion, outcome)
            where = "" if first[1] is None else f", from token {first[1]} on"
            sentence = f"{name}: trace {digest_of(outcome)} instead of {completion.trace}{where}; {steps}"
            if digest_of(outcome) == completion.trace:
                count = len(outcome.token_ids)
                sentence = f"{name}: {count} tokens and logprobs, bit-identical to the record; {steps}"
            took = {"how": "as recorded", "sentence": sentence, "seconds": seconds, "sessions": 1}
            replays.append(_replayed(completion, outcome, first, company=self._others(name), **took))
        return replays

    def solo(self, completion: Completion, traces: Mapping[str, Trace]) -> Replayed:
        """The request without others, compared with the recorded completion."""
        started, name = time.perf_counter(), completion.request
        outcome = self._beside([], name)
        token, logprob = first = _difference(traces, completion, outcome)
        what = "no token differs" if token is None else f"the first token that differs is token {token}"
        sentence = f"{name} solo first differs from the recorded completion at token {logprob}; {what}"
        if logprob is None:
            sentence = f"{name} solo is bit-identical to the record under load"
        took = {"sentence": sentence, "seconds": time.perf_counter() - started, "sessions": 1}
        return _replayed(completion, outcome, first, how="alone", company=[], **took)

    def shrunk(self, completion: Completion, traces: Mapping[str, Trace]) -> Replayed:
        """The smallest set of concurrent requests found with which the request differs from its solo completion. Tokens
        are compared where the recorded completion's tokens differ from the solo ones, else logprob bits. Raises
        UserError: the solo completion equals the recorded one, so that there is nothing to shrink."""
        started, before, name = time.perf_counter(), self.sessions, completion.request
        solo = self._beside([], name)
        token, logprob = _difference(traces, completion, solo)
        if logprob is None:
            raise UserError(f"{name} is bit-identical solo and under load", "Shrink one that differs.")
        by_tokens, others = token is not None, self._others(name)

        @cache
        def differs(*beside: str) -> bool:
            outcome = self._beside(beside, name, until=name)
            return outcome.token_ids != solo.token_ids or (not by_tokens and outcome.logprobs != solo.logprobs)

        if not differs(*others):
            what = f"{name} does not differ when the whole round is replayed"
            raise UserError(what, "Leave --shrink out: its replay shows why.")
        fewest = minimal(others, lambda beside: differs(*beside))
        needed = [x for x in fewest if not differs(*(y for y in fewest if y != x))]
        final = self._beside(fewest, name, until=name)
        token, logprob = first = first_difference(solo, final)
        what = "tokens" if by_tokens else "logprob bits"
        named = ", ".join(fewest[:8]) + (", ..." if len(fewest) > 8 else "")
        tokens = "no token differs" if token is None else f"tokens from {token} on"
        sentence = (
            f"{name} differs in {what} from itself solo with {len(fewest)} of {len(others)} concurrent requests "
            f"({named}): logprobs from token {logprob} on, {tokens}; "
            f"{'none of them' if needed == fewest else 'not every one'} can be left out"
        )
        took = {"sessions": self.sessions - before, "seconds": time.perf_counter() - started}
        return _replayed(completion, final, first, how="shrunk", company=fewest, sentence=sentence, **took)


def _replayed(
    completion: Completion, outcome: Outcome, first: tuple[int | None, int | None], **figures: Any
) -> Replayed:
    """`first`: token and position of the first difference."""
    got, recorded = digest_of(outcome), completion.trace
    named: dict[str, Any] = {"impl": completion.impl, "request": completion.request, "recorded": recorded, "got": got}
    return Replayed(same=got == recorded, first_token=first[0], first_logprob=first[1], **named, **figures)


def _outcome(session: Session, request: str) -> Outcome:
    outcome = next(o for o in session.outcomes if o.request.id == request)
    if outcome.finish in ("error", "cut"):
        raise EngineStoppedError(f"{request} failed: {outcome.reason}")
    return outcome


def _difference(traces: Mapping[str, Trace], completion: Completion, outcome: Outcome) -> tuple[int | None, int | None]:
    """`first_difference` from the recorded trace; (None, None) where none was kept."""
    recorded = traces.get(completion.trace)
    return (None, None) if recorded is None else first_difference(recorded, outcome)
