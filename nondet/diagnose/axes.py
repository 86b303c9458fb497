"""What about the company matters: batch size, ragged lengths, chunks of a prefill, shared prefixes, each varied alone.

How a session's limits are changed, and what shows that a change took effect, is the table's of `nondet sample --vary`
(`nondet.sampling.axes`): the request alone in steps of a small budget is chunked, and nothing else.

Every trial is an engine session of its own in which one thing is not as it is for the request alone; all completions of
the prompt in it are compared with the reference, token by token and logprob bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from nondet.core.compare import first_difference
from nondet.core.records import AxisTried
from nondet.errors import EngineStoppedError
from nondet.sampling.axes import AXES as TABLE
from nondet.sampling.axes import Conditions, Subject
from nondet.sampling.plan import Engine, Load, Outcome, Request, Session, long_prompt
from nondet.trace.search import Arm

__all__ = ["AXES", "Axis", "Trial", "arms_of_axis", "make_axes", "try_axis"]

AXES = ("batch size", "ragged company", "chunked prefill", "prefix sharing")

_NEW = 32  # tokens of each completion: differences show in the first few
_BATCHES = (2, 3, 4, 8, 16, 32)
_LENGTHS, _ARRIVALS = (1, 7, 33, 120), (0, 5)
_CHUNKS = (1, 7, 16, 32)


@dataclass(frozen=True)
class Trial:
    """One session.

    Attributes:
        targets: Ids of the requests that are compared.
    """

    value: str
    requests: tuple[Request, ...]
    load: Load
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """One thing that is varied.

    Attributes:
        reference: The session that the others are compared with.
        shares: Whether a trial counts only if the engine took keys from the cache.
    """

    name: str
    held: str
    reference: Trial
    trials: tuple[Trial, ...]
    shares: bool = False


def make_axes(load: Load, prompt: Sequence[int], completion: Sequence[int], context: int) -> list[Axis]:
    """The axes for a prompt.

    Args:
        load: Whose page size is taken; the other limits are wide enough to chunk nothing by accident.
        completion: The prompt's completion alone: it makes a short prompt longer.
        context: Positions that the model has.
    """
    prompt = tuple(prompt)
    long = long_prompt(prompt, completion, context)
    new, new_long = (max(1, min(_NEW, len(completion), context - len(p))) for p in (prompt, long))
    lengths = [n for n in _LENGTHS if n + new <= context]
    wide = replace(
        load,
        budget=max(_BATCHES) * len(prompt) + max([len(long), *lengths]) + max(_BATCHES),
        requests=max(_BATCHES),
        sharing=False,
        graphs=False,
    )

    def request(name: str, tokens: Sequence[int], count: int, arrival: int = 0) -> Request:
        return Request(name, name.startswith("t"), tuple(tokens), count, arrival)

    def at(axis: str, value: str) -> Load:
        return TABLE[axis].apply(Subject(Conditions(wide, dtype=""), device=""), value).load

    def session(value: str, *requests: Request, load: Load = wide) -> Trial:
        return Trial(value, requests, load, tuple(r.id for r in requests if r.target))

    alone = session("alone", request("t0", prompt, new))
    whole = session("in one piece", request("t0", long, new_long))
    batches = tuple(
        session(f"{size} requests", *(request(f"t{i}", prompt, new) for i in range(size))) for size in _BATCHES
    )
    ragged = tuple(
        session(
            f"{length} tokens, {'at once' if arrival == 0 else f'{arrival} steps later'}",
            request("t0", prompt, new),
            request("b0", tuple(islice(cycle([*long[1:], long[0]]), length)), new, arrival),
        )
        for arrival in _ARRIVALS
        for length in lengths
    )
    chunks = tuple(
        session(f"chunks of {size}", request("t0", long, new_long), load=at("budget", str(size)))
        for size in _CHUNKS
        if size < len(long)
    )
    half = max(load.page, len(long) // 2)
    donors = {"the whole prompt": long, "its first half": (*long[:half], *reversed(long[half:]))}
    later = (
        2 * len(long) + 8
    )  # the donor is through by then: nobody else is in any step of the request. Its second token
    # is there for the engine, which keeps only pages of a request that has decoded
    shared, off = [], None
    for value, donor in donors.items():
        requests = (request("b0", donor, 2), request("t0", long, new_long, later))
        off = off or session("nothing shared", *requests)
        shared.append(session(value, *requests, load=at("sharing", "on")))
    return [
        Axis("batch size", "everybody has the same prompt and begins at once, no chunks, no sharing", alone, batches),
        Axis("ragged company", "one other request, its prompt of another length, no chunks or sharing", alone, ragged),
        Axis("chunked prefill", f"nobody else, a prompt of {len(long)} tokens, no sharing", whole, chunks),
        Axis(
            "prefix sharing",
            f"nobody else in its steps, a prompt of {len(long)} tokens, no chunks; an earlier request had",
            off or whole,
            tuple(shared),
            shares=True,
        ),
    ]  # fmt: skip


def try_axis(engine: Engine, axis: Axis, impl: str, seed: int, say: Callable[[str], None] | None = None) -> AxisTried:
    """Run the reference and every trial.

    Raises:
        EngineStoppedError: the engine died, or a request failed in it.
        UserError: the engine refuses the sizes.
    """
    reference = _targets(_session(engine, axis.reference, seed), axis.reference)[0]
    values, parted = [], []
    tried = traces = tokens = 0
    first: list[int] = []
    unmet = []
    for trial in axis.trials:
        session = _session(engine, trial, seed)
        outcomes = _targets(session, trial)
        if axis.shares and not TABLE["sharing"].proof("on", session.figures, {}).holds:
            unmet.append(trial.value)
            continue
        values.append(trial.value)
        differences = [first_difference(reference, outcome) for outcome in outcomes]
        places = [place for _, place in differences if place is not None]
        tried += len(outcomes)
        traces += len(places)
        tokens += sum(token is not None for token, _ in differences)
        first += places
        if places:
            parted.append(trial.value)
    note = f"the engine took no keys from the cache: {', '.join(unmet)}" if unmet else ""
    if not axis.trials:
        note = "the prompt is too short for this"
    return AxisTried(
        axis=axis.name, impl=impl, held=axis.held, values=values, parted=parted, tried=tried, traces=traces,
        tokens=tokens, first=min(first, default=None), note=note,
    )  # fmt: skip


def arms_of_axis(axis: Axis, value: str, seed: int) -> tuple[Arm, Arm]:
    """The reference and one trial as the arms of a trace."""
    trial = next(t for t in axis.trials if t.value == value)
    a, b = axis.reference, trial
    return (
        Arm("alone", a.targets[0], a.requests, a.load, seed),
        Arm(f"{axis.name}: {value}", b.targets[0], b.requests, b.load, seed),
    )


def _session(engine: Engine, trial: Trial, seed: int) -> Session:
    session = engine.run(trial.requests, trial.load, seed=seed)
    failed = next(_reasons(session), "")
    if failed:
        raise EngineStoppedError(f"{trial.value}: {failed}")
    return session


def _targets(session: Session, trial: Trial) -> list[Outcome]:
    by_id = {o.request.id: o for o in session.outcomes}
    return [by_id[name] for name in trial.targets]


def _reasons(session: Session) -> Iterator[str]:
    if session.fatal:
        yield session.fatal
    for outcome in session.outcomes:
        if outcome.finish == "error":
            yield f"{outcome.request.id} failed: {outcome.reason}"
