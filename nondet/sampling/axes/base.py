"""What an axis is: one thing about the engine that is varied while everything else is held.

An axis names its values, says how a session is run at each, and judges from what the session did whether the value took
effect at all. A value that did not is unproven: that nothing parted there says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nondet.errors import UserError
from nondet.sampling.plan import Load, Request
from nondet.sampling.setting import PLAIN, Setting

__all__ = ["Axis", "Conditions", "Proof", "Seen", "Subject", "number"]

# What sessions did, over all rounds: sums, and maxima for names that end in "_most" and for "page".
Seen = Mapping[str, int]


@dataclass(frozen=True)
class Conditions:
    """How the sessions of one value are run.

    Attributes:
        dtype: Of the model, a key of `nondet.sampling.model.DTYPES`.
        threads: CPU threads; None leaves them as they are.
        replicas: Engines that the requests of a round are spread over.
        routing: By which policy, a key of `nondet.sampling.routing.POLICIES`; "" with one replica.
        ranks: Processes that the model is cut over by its tensor-parallel plan.
    """

    load: Load
    dtype: str
    setting: Setting = PLAIN
    threads: int | None = None
    replicas: int = 1
    routing: str = ""
    ranks: int = 1


@dataclass(frozen=True)
class Subject:
    """What an axis may go by when it chooses its values.

    Attributes:
        base: The conditions that every axis is varied from.
        device: "cpu" or "cuda".
        requests: Of all rounds of the plan.
        threads: That the process has.
        earlier: The earlier text that the editing form of speculation starts from.
        gpus: GPUs of this host.
        heads: Greatest common divisor of the model's heads and key heads: ranks have to divide it. 0 if unknown.
        halves: Whether a draft model can be made of the model's first layers.
        draft_model: Another one to draft with; "" for none.
    """

    base: Conditions
    device: str
    requests: Sequence[Request] = ()
    threads: int = 1
    earlier: tuple[int, ...] = ()
    gpus: int = 0
    heads: int = 0
    halves: bool = True
    draft_model: str = ""


@dataclass(frozen=True)
class Proof:
    """Whether a value took effect, and the figures that say so."""

    holds: bool
    text: str


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        name: As it is written after --vary.
        changes: What is varied, in a phrase.
        why: Why bits may follow it, in a phrase.
        value: The value that the base conditions have.
        values: The others that are tried where none are named; () where the axis has none here.
        apply: The base conditions at another value; raises `UserError` for one that makes no sense.
        proof: Whether a value took effect: (value, what its sessions did, what those of the base did).
        held: Whether an invariant engine gives one trace over all values. Over dtypes, say, it does not: only the
            completions at one value are then compared.
        held_by: Implementations of which the same is asked though `held` is False.
        lacking: Why this device or engine has no such axis; "" where it does.
        apart: Why "all" leaves it out, though it can be named; "" where it does not.
    """

    name: str
    changes: str
    why: str
    value: Callable[[Subject], str]
    values: Callable[[Subject], Sequence[str]]
    apply: Callable[[Subject, str], Conditions]
    proof: Callable[[str, Seen, Seen], Proof]
    held: bool = True
    held_by: tuple[str, ...] = ()
    lacking: Callable[[Subject], str] = field(default=lambda subject: "")
    apart: Callable[[Subject], str] = field(default=lambda subject: "")


def number(axis: str, text: str, least: int, most: int = 1_000_000) -> int:
    """A value that is a whole number.

    Raises:
        UserError: it is none, or out of range.
    """
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise UserError(
            f"--vary: {axis}={text} makes no sense", f"Give whole numbers from {least} to {most}, such as {axis}=16:32."
        )
    return int(text)
