"""A server as an engine of sampling: requests of token ids go in, outcomes come out, in the engines' protocol.

What a server can't do is refused, not left out: it forces no tokens and nobody looks on from inside. It tells no
schedule, so outcomes have none, and `arrival_step` is no more than the order in which requests are sent. The arms of
`nondet sample --endpoint` have a collector of their own (`nondet.endpoint.collect`), which writes every completion as
it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from nondet.core.records import Served
from nondet.endpoint.exchange import Answer, Ask, Client, KnownBy
from nondet.endpoint.plan import ArmRound, Planned
from nondet.endpoint.running import run
from nondet.endpoint.tokens import Tokens
from nondet.endpoint.traffic import Played, play
from nondet.errors import UserError
from nondet.sampling.plan import PLAIN, Load, Outcome, Request, Session, Setting, Watcher

__all__ = ["EndpointEngine"]


class EndpointEngine:
    """One server.

    Args:
        connect: Makes its client: `functools.partial(nondet.endpoint.client.connect, url)`.
    """

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Client]]) -> None:
        self._connect = connect

    def describe(self) -> dict[str, Any]:
        """What is fixed beside the load."""
        return {"name": "endpoint", "gives": ["token ids", "logprobs and margins where the server sends them"]}

    def run(
        self,
        requests: Sequence[Request],
        load: Load,
        *,
        seed: int = 0,
        eos: Sequence[int] = (),
        on_token_count: Callable[[Request, int], None] | None = None,
        forced: Mapping[str, Sequence[int]] | None = None,
        watcher: Watcher | None = None,
        until: str | None = None,
        setting: Setting = PLAIN,
    ) -> Session:
        """Send the requests, `load.requests` of them under way at once, in the order of their arrival.

        Args:
            load: Only `requests` is a limit that a client can keep; the others are the server's own.
            seed: Not sent: decoding is greedy.
            on_token_count: Called once for each answer, with all of its tokens.

        Raises:
            UserError: forced tokens, a watcher, end-of-text ids or a setting, none of which a server takes.
        """
        if forced or watcher is not None or until is not None or eos or setting != PLAIN:
            raise UserError(
                "a server takes no forced tokens, no watcher, no end-of-text ids and no setting of nondet's engine",
                "Trace its model in process: nondet trace --model FOLDER.",
            )
        ordered = sorted(requests, key=lambda r: r.arrival_step)
        return run(self._run(ordered, list(requests), load, on_token_count))

    async def _run(
        self,
        ordered: Sequence[Request],
        requests: Sequence[Request],
        load: Load,
        on_token_count: Callable[[Request, int], None] | None,
    ) -> Session:
        by_id = {r.id: r for r in requests}
        answers: dict[str, Answer] = {}

        def take(planned: Planned, answer: Answer, _: Served) -> None:
            answers[planned.id] = answer
            if on_token_count is not None and answer.ok:
                on_token_count(by_id[planned.id], len(answer.token_ids or ()))

        def ask(planned: Planned) -> Ask:
            request = by_id[planned.id]
            return Ask(id=request.id, prompt=request.prompt, max_tokens=request.max_new_tokens)

        planned = tuple(Planned(r.id, r.target, 0, "", r.max_new_tokens) for r in ordered)
        round_ = ArmRound(0, "loaded", planned, load.requests, 0.0, False, "as the plan says")
        async with self._connect() as client:
            played: Played = await play(client, round_, planned, ask, take)
        outcomes = [_outcome(r, answers[r.id]) for r in requests]
        return Session(outcomes, steps=0, tokens=played.tokens, seconds=played.seconds)


def _outcome(request: Request, answer: Answer) -> Outcome:
    """An answer without token ids is no outcome: ids are what all engines give."""
    trace = Tokens.of(KnownBy.IDS).trace(answer) if answer.ok else answer.reason or answer.kind
    if isinstance(trace, str):
        return Outcome(request, [], b"", b"", [], "error", [], 0, 0, trace)
    return Outcome(request, trace.token_ids, trace.logprobs, trace.margins, trace.runner_up, answer.finish, [], 0, 0)
