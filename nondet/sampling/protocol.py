"""What an engine is to nondet: requests under a load go in, a session with what each request met comes out.

Another engine is another file and a line in `ENGINES`. Only token ids are asked of all of them: logprobs, margins and
the schedule are what an engine can give, and everything that needs them says so where they are empty. An engine that
can force tokens and be watched from the inside can be traced; one that cannot can still be sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nondet.errors import UnknownNameError
from nondet.sampling.plan import Load, Request
from nondet.sampling.setting import PLAIN, Setting

if TYPE_CHECKING:
    from nondet.sampling.schedule import SessionLog, Span

__all__ = ["ENGINES", "Engine", "Outcome", "Pace", "Session", "Watcher", "make_engine"]

# name -> where its class is; it is made with the loaded model, an endpoint with what connects to it
ENGINES: dict[str, str] = {
    "transformers": "nondet.sampling.engine:TransformersEngine",
    "endpoint": "nondet.endpoint.engine:EndpointEngine",
}


@dataclass(frozen=True)
class Outcome:
    """What became of one request.

    Attributes:
        logprobs: Little-endian float32, one for each token; empty where the engine gives none.
        margins: Little-endian float32, top-1 minus top-2 logit of each step; empty where not recorded.
        runner_up: The better of the two top tokens that was not chosen, for each step.
        finish: "length", "eos", "error", or "cut" where a watched session ended before the request did.
        schedule: Run-length list of [first_step, steps, query_tokens]; empty where the engine does not tell.
        border, cut, nucleus: Little-endian float32, how near each draw was to another token, see
            `nondet.sampling.sampler.Draw`; empty where nothing was drawn by us.
        batch_min, batch_max: Query tokens in the steps that it took part in; 0 if it never ran.
    """

    request: Request
    token_ids: list[int]
    logprobs: bytes
    margins: bytes
    runner_up: list[int]
    finish: str
    schedule: list[list[int]]
    batch_min: int
    batch_max: int
    reason: str = ""
    border: bytes = b""
    cut: bytes = b""
    nucleus: bytes = b""


class Pace(NamedTuple):
    """One step.

    Attributes:
        seconds: From its beginning to the next one's, or to the last request's end.
        tokens: How many it generated.
        captured: Whether it ran without a CUDA graph in order to capture one.
    """

    seconds: float
    tokens: int
    captured: bool


@dataclass(frozen=True)
class Session:
    """One engine session.

    Attributes:
        outcomes: One for each request, in the plan's order.
        steps: Engine steps.
        tokens: Tokens generated for everybody.
        seconds: From the first step's beginning to the last request's end, without `first_use_seconds`.
        fatal: Why the engine died; "" if it did not.
        packs: Step -> who was in it, in the order of the rows; empty where the engine does not tell.
        tops: Request id -> the two largest logits of each generated token and their ids, cut requests included.
        figures: What the session did, counted: see `nondet.sampling.figures`; empty where the engine does not tell.
        admitted: Requests in the order in which they got their first steps; empty where the engine does not tell.
        pace: Each step's time and tokens; empty where the engine does not tell.
        first_use_seconds: Of these steps, spent on compiling kernels and proving members, once for all runs to come.
    """

    outcomes: list[Outcome]
    steps: int
    tokens: int
    seconds: float
    fatal: str = ""
    packs: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    tops: dict[str, list[tuple[float, float, int, int]]] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    pace: list[Pace] = field(default_factory=list)
    first_use_seconds: float = 0.0


class Watcher(Protocol):
    """Something that looks on from inside of the engine while it runs."""

    @property
    def done(self) -> bool:
        """Whether it has seen what it came for: the session may end."""

    def attached(self, model: Any, log: SessionLog) -> AbstractContextManager[None]:
        """Put its hooks in place for one session; `log` tells, during a step, who is in it."""


class Engine(Protocol):
    """One way to serve a model."""

    def describe(self) -> dict[str, Any]:
        """What is fixed beside the load: name, version, attention, and what it gives. JSON-able."""

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
        """Run the requests from an empty engine to an empty one; see `nondet.sampling.engine.run_session`."""


def make_engine(name: str, model: Any) -> Engine:
    """The engine of that name, serving `model`.

    Raises:
        UnknownNameError: no such engine.
    """
    from nondet.core.registry import load_object

    if name not in ENGINES:
        raise UnknownNameError("engine", name, ENGINES)
    engine: Engine = load_object(ENGINES[name])(model)
    return engine
