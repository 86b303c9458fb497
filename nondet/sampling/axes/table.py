"""The table of axes, and `--vary` as it is written on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from nondet.errors import UnknownNameError, UserError
from nondet.sampling.axes.base import Axis, Conditions, Subject
from nondet.sampling.axes.limits import BUDGET, CHUNK, GRAPHS, PAGE, SHARING
from nondet.sampling.axes.numerics import ATTENTION, DTYPE, THREADS
from nondet.sampling.axes.ranks import RANKS
from nondet.sampling.axes.service import PREEMPTION, ROUTING, SCHEDULER
from nondet.sampling.axes.speculative import SPECULATIVE

__all__ = ["ALL", "AXES", "Varied", "parse_vary", "plan_axes"]

ALL = "all"

AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        SHARING,
        CHUNK,
        BUDGET,
        PAGE,
        SCHEDULER,
        PREEMPTION,
        SPECULATIVE,
        ROUTING,
        GRAPHS,
        DTYPE,
        ATTENTION,
        THREADS,
        RANKS,
    )
}


@dataclass(frozen=True)
class Varied:
    """An axis with the values that are tried.

    Attributes:
        base: The value that the base has.
        values: The others, each with its conditions.
        note: Why there are none here.
    """

    axis: Axis
    base: str
    values: tuple[tuple[str, Conditions], ...] = ()
    note: str = ""


def parse_vary(spec: str) -> dict[str, list[str]]:
    """Read `--vary`: axes by name, each with values of its own if need be; "all" for every axis.

    Returns:
        Axis -> values, [] for the axis's own; the single key "all" where that was written.

    Raises:
        UserError: an unknown axis, one that is named twice, or an empty part.
    """
    parts = [part.strip() for part in spec.split(",")]
    if not all(parts):
        raise UserError(f"--vary {spec!r} has an empty part", f"Name axes such as sharing,chunk=8:16, or {ALL}.")
    wanted: dict[str, list[str]] = {}
    for part in parts:
        name, equals, text = part.partition("=")
        values = [value.strip() for value in text.split(":")] if equals else []
        if name == ALL and (len(parts) > 1 or equals):
            raise UserError(f"--vary {spec!r}: {ALL} stands alone", f"Write --vary {ALL}, or name the axes.")
        if name not in AXES and name != ALL:
            raise UnknownNameError("axis", name, [*AXES, ALL])
        if name in wanted:
            raise UserError(f"--vary {spec!r} names {name} twice", f"Write {name}=VALUE:VALUE once.")
        if equals and not all(values):
            raise UserError(f"--vary: {part!r} lacks a value", f"Write {name}=VALUE, or {name} alone for its own.")
        wanted[name] = values
    return wanted


def plan_axes(wanted: dict[str, list[str]], subject: Subject) -> list[Varied]:
    """The axes with their values and conditions.

    Raises:
        UserError: an axis that the engine or the device lacks and that was named, or a value that makes no sense.
    """
    every = ALL in wanted
    varied = []
    for name in AXES if every else wanted:
        axis = AXES[name]
        lacking = axis.lacking(subject) or (axis.apart(subject) if every else "")
        if lacking and not every:
            raise UserError(f"--vary {name}: {lacking}", "Leave it out here.")
        base = axis.value(subject)
        if lacking:
            varied.append(Varied(axis, base, note=lacking))
            continue
        values = [v for v in (wanted.get(name) or axis.values(subject)) if v != base]
        conditions = tuple((value, axis.apply(subject, value)) for value in dict.fromkeys(values))
        note = "" if conditions else f"there is no other value than {base}"
        if not conditions and not every:
            raise UserError(f"--vary {name}: {note}", "Name other values, such as --vary chunk=8:16.")
        varied.append(Varied(axis, base, conditions, note))
    return varied
