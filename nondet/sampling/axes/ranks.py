"""The number of ranks that the model is cut over: K of a row-parallel layer is summed in as many parts."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from nondet.errors import UserError
from nondet.sampling.axes.base import Axis, Conditions, Proof, Seen, Subject, number

__all__ = ["RANKS"]


def _ranks(subject: Subject, value: str) -> Conditions:
    from nondet.ranks.group import check_ranks
    from nondet.sampling.ranks_engine import check_loader

    check_loader()
    world = number("ranks", value, 1, 64)
    if world > 1:
        check_ranks([world], subject.device, subject.gpus)
    if subject.heads % world:
        raise UserError(
            f"--vary: ranks={value}: the model's heads and key heads can be cut by {subject.heads} at most",
            "Give a number that divides them.",
        )
    return replace(subject.base, ranks=world)


def _values(subject: Subject) -> list[str]:
    most = subject.gpus if subject.device == "cuda" else 4
    return [str(world) for world in (2, 4) if world <= most and not subject.heads % world]


def _lacking(subject: Subject) -> str:
    if subject.device == "cuda" and subject.gpus < 2:
        return "there is one GPU here"
    if importlib.util.find_spec("accelerate") is None:
        return "the package accelerate is missing, by which a model is loaded in shares"
    return ""


def _apart(subject: Subject) -> str:
    if subject.device == "cpu":
        return "on a CPU ranks are processes, and starting them takes longer than all other axes: name it"
    return ""


def _proof(value: str, seen: Seen, base: Seen) -> Proof:
    world, share = seen.get("ranks_most", 1), seen.get("share_most", 0)
    if value == "1":
        return Proof(world == 1, "one process had the whole model")
    text = f"{world} ranks came to the same ids and logprobs, the first with {share:,} parameters of the model"
    return Proof(world == int(value) and share > 0, text)


RANKS = Axis(
    name="ranks",
    changes="the number of ranks that the model is cut over by its tensor-parallel plan",
    why="K of a row-parallel layer is summed in as many parts, and the parts by an all-reduce",
    value=lambda s: str(s.base.ranks),
    values=_values,
    apply=_ranks,
    proof=_proof,
    held=False,
    held_by=("rank-free",),
    lacking=_lacking,
    apart=_apart,
)
