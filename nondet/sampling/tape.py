"""The tape of a round: what is needed to play it again, and to see whether it was played as before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from nondet.core.records import Completion, Run, Tape, TapedRequest
from nondet.errors import UserError
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Load, Request
from nondet.sampling.schedule import Span
from nondet.sampling.temperature import Sampling, is_sampling

__all__ = ["check_weights", "first_other_step", "load_of", "make_tape", "requests_of", "select_completions", "tape_of"]


def make_tape(
    requests: Sequence[Request],
    load: Load,
    packs: Mapping[int, tuple[Span, ...]],
    *,
    impl: str,
    round: int,
    seed: int,
    eos: Sequence[int],
    engine: dict[str, Any],
    weights: str,
) -> Tape:
    """The tape of a session that went through."""
    prompts: dict[tuple[int, ...], int] = {}
    for request in requests:
        prompts.setdefault(request.prompt, len(prompts))
    return Tape(
        impl=impl,
        round=round,
        requests=[
            TapedRequest(
                id=r.id,
                target=r.target,
                prompt=prompts[r.prompt],
                new=r.max_new_tokens,
                arrival=r.arrival_step,
                sampling=None if r.sampling is None else asdict(r.sampling),
            )
            for r in requests
        ],
        prompts=[list(p) for p in prompts],
        load=asdict(load),
        seed=seed,
        eos=list(eos),
        engine=engine,
        weights=weights,
        steps=_run_lengths(packs, {r.id: i for i, r in enumerate(requests)}),
        padding="the sizes of CUDA graphs" if load.graphs else "",
    )


def _run_lengths(packs: Mapping[int, tuple[Span, ...]], index: Mapping[str, int]) -> list[list[Any]]:
    entries: list[list[Any]] = []
    for step in sorted(packs):
        spans = [[index[s.request], s.first, s.rows] for s in packs[step]]
        if entries:
            first, count, *before = entries[-1]
            if step == first + count and spans == [[i, at + count * rows, rows] for i, at, rows in before]:
                entries[-1][1] += 1
                continue
        entries.append([step, 1, *spans])
    return entries


def requests_of(tape: Tape) -> list[Request]:
    """The round's requests, in the plan's order."""
    return [
        Request(
            r.id, r.target, tuple(tape.prompts[r.prompt]), r.new, r.arrival,
            sampling=None if r.sampling is None else Sampling(**r.sampling),
        )
        for r in tape.requests
    ]  # fmt: skip


def load_of(tape: Tape) -> Load:
    """The engine's limits."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tape.load.items()}
    return Load(**values)


def first_other_step(tape: Tape, requests: Sequence[Request], packs: Mapping[int, tuple[Span, ...]]) -> int | None:
    """The first step in which somebody else, or other positions, ran than on the tape; None where none did."""
    played = _expand(_run_lengths(packs, {r.id: i for i, r in enumerate(requests)}))
    taped = _expand(tape.steps)
    return next((step for step in sorted(played.keys() | taped.keys()) if played.get(step) != taped.get(step)), None)


def _expand(entries: Sequence[Sequence[Any]]) -> dict[int, list[list[int]]]:
    return {
        first + n: [[i, at + n * rows, rows] for i, at, rows in spans]
        for first, count, *spans in entries
        for n in range(count)
    }


def select_completions(run: Run, wanted: Sequence[str], impl: str | None) -> list[Completion]:
    """The recorded completions of these requests; "divergent" stands for all whose trace is not the commonest.

    The commonest of its own prompt, in its own arm: those of another prompt are answers to another question.

    Raises:
        UserError: no such request, or several implementations have it and none was named.
    """
    impls = list(dict.fromkeys(c.impl for c in run.completions))
    if impl is not None and impl not in impls:
        raise UserError(
            f"{run.source} has no completions under --impl {impl}", f"It has: {', '.join(impls) or 'none'}."
        )
    chosen = impl or ("stock" if "stock" in impls else impls[0] if len(impls) == 1 else None)
    if chosen is None:
        raise UserError(
            f"{run.source} has completions under {', '.join(impls) or 'no implementation'}", "Name one with --impl."
        )
    by_id = {c.request: c for c in run.completions if c.impl == chosen}
    out: dict[str, Completion] = {}
    for name in wanted:
        if name == "divergent":
            groups: dict[tuple[int, str], Counter[str]] = {}
            good = {i: c for i, c in by_id.items() if c.status == "ok"}
            for c in good.values():
                groups.setdefault((c.prompt, c.arm), Counter())[c.trace] += 1
            # of equally common ones the first that was drawn
            commonest = {key: max(traces, key=lambda trace: traces[trace]) for key, traces in groups.items()}
            out.update({i: c for i, c in good.items() if c.trace != commonest[c.prompt, c.arm]})
            continue
        if name not in by_id:
            ids = sorted(by_id)
            raise UserError(
                f"{run.source} has no request {name!r} under {chosen}", f"It has {ids[0]} to {ids[-1]}." if ids else ""
            )
        if by_id[name].status != "ok":
            raise UserError(f"{name} failed in {run.source}: {by_id[name].reason}", "Name one that came to its end.")
        out[name] = by_id[name]
    return list(out.values())


def tape_of(run: Run, completion: Completion) -> Tape:
    """The tape of a completion's round.

    Raises:
        UserError: the run has none.
    """
    for tape in run.tapes:
        if (tape.impl, tape.round) == (completion.impl, completion.round):
            _check_whole(tape, completion, run.source)
            if tape.engine.get("ranks", 1) != 1:
                raise UserError(
                    f"{completion.request} of {run.source} ran over {tape.engine['ranks']} ranks",
                    "Rounds are played again, and traced, on one rank alone.",
                )
            return tape
    raise UserError(
        f"{run.source} has no tape of {completion.impl}, round {completion.round}",
        "Runs hold tapes since nondet 0.2: sample again.",
    )


def _check_whole(tape: Tape, completion: Completion, source: str) -> None:
    """Refuse a tape that can't be played: a file comes from anywhere.

    Raises:
        UserError: a request without a prompt or with sizes that make no sense, limits that are none, steps of nobody.
    """
    broken = UserError(
        f"the tape of {tape.impl}, round {tape.round}, in {source} is not whole", "Was it edited by hand? Sample again."
    )
    ids = {r.id for r in tape.requests}
    if len(ids) != len(tape.requests) or completion.request not in ids:
        raise broken
    for r in tape.requests:
        if not 0 <= r.prompt < len(tape.prompts) or not tape.prompts[r.prompt] or r.new < 1 or r.arrival < 0:
            raise broken
        if r.sampling is not None and not is_sampling(r.sampling):
            raise broken
    if any(token < 0 for prompt in tape.prompts for token in prompt) or set(tape.load) != {
        f.name for f in fields(Load)
    }:
        raise broken
    limits = [tape.load[name] for name in ("budget", "requests", "page")]
    if not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise broken
    for entry in tape.steps:
        if len(entry) < 3 or not all(isinstance(s, list) and len(s) == 3 for s in entry[2:]):
            raise broken


def check_weights(tape: Tape, loaded: LoadedModel, weights: str, source: str) -> None:
    """Refuse another model than the one on the tape.

    Raises:
        UserError: the digests of the weights differ, or the request does not fit.
    """
    if tape.weights != weights:
        raise UserError(
            f"the weights of {loaded.name} have digest {weights}, those of {source} had {tape.weights}",
            "Load the model that the run was made with: --model.",
        )
