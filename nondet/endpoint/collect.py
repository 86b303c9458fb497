"""Endpoint runs into a run file: the contract, then the arms round by round, until a gate has enough data.

A round without a `Round` record is resumed: its completions are kept, the rest are requested among the same neighbours.
Failures are written too, but not those of a dead server: a resumed run repeats the requests.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from nondet.core.certificates import digest_of
from nondet.core.records import Completion, ContractAnswer, Round, Run, Served, ServerSeen, Traffic
from nondet.core.runfile import RunWriter, read_run
from nondet.core.statistics import trials_to_see
from nondet.core.traces import RoundCollector, Trace, facts_of, open_traces
from nondet.endpoint.arms import (
    Answer,
    ArmPlan,
    ArmRound,
    Ask,
    Client,
    EndpointLoad,
    KnownBy,
    Planned,
    Server,
    Settings,
    Tokens,
)
from nondet.endpoint.contract import Contract
from nondet.endpoint.traffic import play, run, served_of
from nondet.errors import ServerStoppedError, UnrecordableError, UserError, one_line

_KEY_HINT = "Put its key into NONDET_API_KEY, or name its variable with --key-env."
_HINTS = {"connect": "Is it running, and is that its address?", "http-401": _KEY_HINT, "http-403": _KEY_HINT}


def refused(url: str, model: str, answer: Answer, listed: Sequence[str]) -> UserError:
    """Why there is nothing to sample, in one line."""
    hint = _HINTS.get(answer.kind, "See whether it answers a request of another client.")
    if listed and model not in listed:
        hint = f"It has: {', '.join(listed[:8])}."
    return UserError(f"{url} gave no completion: {answer.reason or answer.kind}", hint)


def check_same(first: ServerSeen, now: ServerSeen) -> None:
    """Refuse, as a `UserError`, to mix two servers in one run."""
    for name in ("model", "answered_as", "fingerprint", "protocol", "known_by", "logprobs"):
        was, is_ = getattr(first, name), getattr(now, name)
        if was != is_:
            shown = name.replace("_", " ")
            what = f"the server is not the one that the run began with: {shown} was {was!r}, is {is_!r}"
            raise UserError(what, "Start a new run with another --out, and compare the two with `nondet diff`.")


def check_seeded(url: str, contract: Sequence[ContractAnswer]) -> None:
    """Refuse, as a `UserError` with the contract's evidence, a server that is not shown to respect a seed."""
    seen = next((a for a in contract if a.question == "seed"), None)
    greedy = next((a for a in contract if a.question == "tempered" and a.answer == "no"), None)
    if greedy is not None:
        raise UserError(f"{url} ignores the temperature: {greedy.evidence}", "Gate it at temperature 0.")
    answer, evidence = (seen.answer, seen.evidence) if seen else ("unknown", "it was not tested")
    if answer != "yes":
        shown = "does not respect a seed" if answer == "no" else "is not shown to respect a seed"
        hint = "Gate it at temperature 0; `nondet sample --temperature` counts what differs."
        raise UserError(f"{url} {shown}, so its draws show nothing about batches: {evidence}", hint)


# When a gate has enough data: at the first divergence, or at the required power.
#
# Looking after each load costs nothing while nothing diverged: see `nondet.verdict.gate`.

SOLO = 4  # solo answers of each prompt: two before the loads, two after them
CACHE = 2  # without a cached prefix, and as many with one
_SPARE = 1.5  # loads that are planned for each needed one, because not every load forms
_SPARE_LEAST = 4


def loaded_each(load: EndpointLoad, prompts: int, rate: float, confidence: float, by: str) -> int:
    """Completions of each prompt that the arm "loaded" is planned with, so that some loads may fail to form."""
    needed = trials_to_see(rate, confidence)
    targets = needed * load.targets if by == "load" else needed
    spare = max(_SPARE * targets, targets + _SPARE_LEAST * load.targets)
    return max(1, math.ceil(spare / prompts))


class Watcher:
    """Counts comparisons, load by load, up to the required power, see `nondet.verdict.gate.Power`; each of the prompts
    must have had a load before there is enough data. `diverged`: an answer differs from its prompt's first in tokens,
    logprobs or end."""

    def __init__(self, rate: float, confidence: float, by: str, prompts: int = 1) -> None:
        self._needed, self._by = trials_to_see(rate, confidence), by
        self._first: dict[tuple[str, int], tuple[str, str]] = {}
        self._tries: Counter[tuple[str, int]] = Counter()
        self._prompts = prompts
        self._loads: Counter[str] = Counter()
        self.diverged = False

    @property
    def loads(self) -> int:
        """Loads so far, of all servers, in which a request under study is known to have run with others."""
        return self._loads.total()

    def enough(self, ended: Round, completions: Sequence[Completion]) -> bool:
        """Whether the round's server needs no more requests; other servers' loads don't count for it."""
        good: Counter[tuple[str, int]] = Counter()
        for completion in completions:
            if completion.status == "ok":
                who = (completion.impl, completion.prompt)
                answer = (completion.trace, completion.finish)
                self.diverged |= answer != self._first.setdefault(who, answer) or completion.nonfinite > 0
                good[who] += 1
        if ended.arm == "loaded":
            accompanied = ended.traffic.in_company if ended.traffic is not None else 0
            solo = max(0, ended.targets - accompanied)
            self._tries.update({who: count - solo for who, count in good.items() if count > solo})
            self._loads[ended.impl] += accompanied > 0
        # as `nondet.verdict.served.proven_tries` counts them, which may all have been one prompt's
        counts = [count for (impl, _), count in self._tries.items() if impl == ended.impl]
        tries = self._loads[ended.impl] if self._by == "load" else sum(counts)
        return self.diverged or (tries >= self._needed and len(counts) >= self._prompts)


Progress = Callable[[str, str, int], None]
# Called with each round and its completions when it has ended: True ends the run, except for its last requests.
Enough = Callable[[Round, Sequence[Completion]], bool]
_ENDS = ("solo", "first")  # arms whose last rounds are run even then
_GONE = 24  # after this many failures in a row the server is considered gone
# Failures of a connection, without a response, or with one that only refuses requests at the moment.
_SILENT = ("connect", "reset", "timeout", "cut-off", "http-429", "http-502", "http-503", "http-504", "http-529")


def collect(
    servers: Sequence[Server],
    plan: ArmPlan,
    settings: Settings,
    writer: RunWriter,
    *,
    progress: Progress | None = None,
    enough: Enough | None = None,
    seeded: bool = False,
) -> None:
    """Request whatever the run file does not hold yet.

    Args:
        progress: Called with (server, arm, targets done) whenever a target has ended.
        enough: Whether the rounds so far suffice, so that only solo ones of the remaining rounds are run.
        seeded: Whether answers are only meaningful if the server respects a seed.

    Whatever it raises, what was finished is on disk: UserError (a server that does not answer, differs from the one at
    the run's beginning, or is not shown to respect a seed although it must; a full disk), ServerStoppedError (it
    stopped answering), KeyboardInterrupt.
    """
    before = read_run(writer.path, allow_truncated=True) if writer.resumed else None
    tokens = Tokens(KnownBy.IDS)
    with closing(open_traces(writer, tokens.piece)) as traces:
        tokens.pieces |= traces.pieces
        for server in servers:
            common = (writer, traces, server.impl, server, plan, settings, tokens, before)
            run(_Collector(*common, progress, enough, seeded).run())


@dataclass
class _Collector(RoundCollector):
    """One server's part, and its progress. A completion is written at once, because its request costs money."""

    server: Server
    plan: ArmPlan
    settings: Settings
    tokens: Tokens
    before: Run | None
    progress: Progress | None
    enough: Enough | None
    seeded: bool
    done: int = 0
    kept: defaultdict[int, list[Completion]] = field(default_factory=lambda: defaultdict(list))  # by round, on disk
    # failures of the round without a response: written if the server lives
    held: list[Completion] = field(default_factory=list)
    streak: int = 0  # of such failures since the last answer
    solo_seconds: list[float] = field(default_factory=list)

    async def run(self) -> None:
        before = self.before
        for completion in before.completions if before else ():
            if completion.impl == self.impl:
                self._keep(completion)
        # `enough` is called with the rounds in the file as if they had just run
        ended = [r for r in before.rounds if r.impl == self.impl] if before else []
        over = any(self._enough(r) for r in ended)
        left = [self.plan.rounds[number] for number in self.missing(range(len(self.plan.rounds)))]
        if ("server", self.impl, "0") in self.writer.done and not any(r.arm in _ENDS or not over for r in left):
            return
        try:
            async with self.server.connect() as client:
                if (opening := await self._meet(client)) is not None:
                    over, left = self._enough(opening), left[1:]
                for round_ in left:
                    if not over or round_.arm in _ENDS:
                        over = self._enough(await self._round(client, round_)) or over
        except BaseExceptionGroup as group:  # what a task raised first, for example a full disk, is the cause
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    def _enough(self, ended: Round) -> bool:
        return self.enough is not None and self.enough(ended, self.kept[ended.round])

    async def _meet(self, client: Client) -> Round | None:
        """Check the contract when the run begins; when it is resumed, whether this is still the same server. A run
        begins with a request under study, before anything has warmed the server up; returns its round, if planned."""
        listed = [one_line(name, 200) for name in client.listed][:200]
        model = client.model or self.server.model
        servers = [s for s in self.before.servers if s.impl == self.impl] if self.before else []
        answers = [a for a in self.before.contract if a.impl == self.impl] if self.before else []
        first = None if servers or self.plan.rounds[0].arm != "first" else self.plan.rounds[0]
        began, opening = time.monotonic(), None
        if first is not None:
            opening = await client.complete(self.settings.ask(first.requests[0], first.arm))
            if not opening.ok:
                raise refused(self.server.url, self.server.model, opening, listed)
        drawn = bool(self.settings.samplings)
        contract = Contract(client, self.settings.prompts[0], self.impl, model, listed, drawn)
        once, checked = await contract.check({a.question for a in answers})
        if not once.ok:
            raise refused(self.server.url, self.server.model, once, listed)
        if self.seeded:
            check_seeded(self.server.url, (*checked, *answers))
        seen = ServerSeen(
            impl=self.impl, number=len(servers), url=client.url or self.server.url, protocol=client.protocol,
            model=model, answered_as=one_line(once.model, 200), listed=listed,
            fingerprint=one_line(once.fingerprint, 200), known_by=contract.known_by.value,
            logprobs=bool(once.logprobs), software=one_line(client.server, 100),
        )  # fmt: skip
        for before in servers[:1]:
            check_same(before, seen)
        self.tokens.known_by, self.tokens.with_logprobs = contract.known_by, seen.logprobs
        self.write(*checked, seen)
        if first is None or opening is None:
            return None
        self._take(first, first.requests[0], opening, served_of(opening, began, 1))
        return self._ended(first, opening.completion_tokens or 0, max(0.0, opening.done - began), None)

    async def _round(self, client: Client, round_: ArmRound) -> Round:
        kept = {c.request for c in self.kept[round_.number]}
        left = [r for r in round_.requests if not r.target or r.id not in kept]
        if not any(r.target for r in left):
            left = []  # only the round's own record is missing: no neighbours are needed
        if round_.arm == "chunked" and left and not self.solo_seconds:  # no solo arm was requested: time one answer
            target = next(r for r in left if r.target)
            answer = await client.complete(replace(self.settings.ask(target, "solo"), id="timing"))
            self.solo_seconds += [answer.done - answer.sent] if answer.ok else []
        self.held = []
        ask, take = partial(self.settings.ask, arm=round_.arm), partial(self._take, round_)
        seconds = statistics.median(self.solo_seconds or [0.0])
        played = await play(client, round_, left, ask, take, solo_seconds=seconds)
        if self.held:  # no response to these: check whether the server is alive
            answer = await client.complete(Ask(id="alive", prompt=self.settings.prompts[0], max_tokens=1))
            if answer.kind in _SILENT:
                raise self._stopped()
        for completion in self.held:  # it is alive, so that its silence is a finding
            self._put(completion)
        return self._ended(round_, played.tokens, played.seconds, played.traffic(round_, 2 if kept else 1))

    def _ended(self, round_: ArmRound, tokens: int, seconds: float, traffic: Traffic | None) -> Round:
        others = len(round_.requests) - round_.targets
        ended = Round(
            impl=self.impl, round=round_.number, targets=round_.targets, others=others, steps=0, tokens=tokens,
            seconds=seconds, arm=round_.arm, traffic=traffic,
        )  # fmt: skip
        self.write(ended)
        return ended

    def _take(self, round_: ArmRound, planned: Planned, answer: Answer, served: Served) -> None:
        """Of a request under study the trace, then the completion that names it."""
        if not planned.target:
            return
        trace = self.tokens.trace(answer) if answer.ok else answer.reason or answer.kind
        if isinstance(trace, Trace):
            try:
                self.traces.write([trace])
            except UnrecordableError as error:
                trace = error.what
        result: dict[str, Any]
        if isinstance(trace, Trace):
            served = msgspec.structs.replace(served, text=digest_of(trace.text.encode()))
            result = {"finish": answer.finish, "trace": trace.digest, **facts_of(trace)}
        else:  # an answer that can't be compared with the others is not a completion either
            served = msgspec.structs.replace(served, kind="incomparable") if answer.ok else served
            result = {"status": "error", "finish": "error", "reason": one_line(trace, 300)}
            result |= {"tokens_digest": "", "trace": "", "n_tokens": 0}
        completion = Completion(
            impl=self.impl, arm=round_.arm, round=round_.number, request=planned.id, prompt=planned.prompt,
            served=served, arrival_step=0, schedule=[], batch_min=0, batch_max=0, **result,
        )  # fmt: skip
        if served.kind in _SILENT:
            self.held.append(completion)
            self.streak += 1
            if self.streak >= _GONE:
                raise self._stopped()
            return
        self.streak = 0  # any answer counts
        self._put(completion)

    def _stopped(self) -> ServerStoppedError:
        count = "1 request" if len(self.held) == 1 else f"{len(self.held)} requests of one round"
        what = f"{self.server.url} stopped answering: {count} failed, the last: {self.held[-1].reason}"
        return ServerStoppedError(what)

    def _put(self, completion: Completion) -> None:
        for written in self.write(completion):
            self._keep(written)
            if self.progress is not None:
                self.progress(self.impl, written.arm, self.done)

    def _keep(self, completion: Completion) -> None:
        """Update what the file holds, and the time of solo answers."""
        self.kept[completion.round].append(completion)
        self.done += 1
        if completion.arm == "solo" and completion.status == "ok" and completion.served is not None:
            self.solo_seconds.append(completion.served.done - completion.served.sent)
