"""The numerics classes: for each operator the order of reduction that its bits are defined by, and who claims it.

Two implementations of one class give equal bits for every input, whatever their tiles, their library or the batch, so
that the faster one may be taken at each shape. A class is an order written down, not a tolerance: `order` says it in
words, `formula` in symbols, and `anchors` names the implementation that all others are compared with, bit by bit.

Claims are claims until `nondet certify` or a dispatcher's first use has proven them on the machine at hand: hardware
and libraries decide whether a chain of matrix instructions really adds in the order in which its source is written.

What is claimed stands in the operators' declarations (`nondet.kernels.declaration.Claim`); this module turns it round:
class by class. It imports nothing heavy; `nondet list` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from nondet.errors import UnknownNameError, UserError
from nondet.kernels.declaration import INVARIANT, ONE_ROW, OrderClass
from nondet.registry import declared

__all__ = ["INVARIANT", "ONE_ROW", "NumericsClass", "classes", "classes_for", "operators"]


@dataclass(frozen=True, kw_only=True)
class NumericsClass(OrderClass):
    """An order class with everybody who claims it.

    Attributes:
        anchors: operator -> target, or `ONE_ROW`.
        members: operator -> name -> target, or `INVARIANT`.
    """

    anchors: Mapping[str, str]
    members: Mapping[str, Mapping[str, str]]


def classes() -> dict[str, NumericsClass]:
    """Every class that some declared operator claims, CUDA's first, in the order of the declarations."""
    claims = [(operator.name, claim) for operator in declared().values() for claim in operator.claims]
    orders = {claim.order.name: claim.order for _, claim in claims}
    return {
        name: NumericsClass(
            **asdict(order),
            anchors={operator: claim.anchor for operator, claim in claims if claim.order.name == name},
            members={operator: claim.members for operator, claim in claims if claim.order.name == name},
        )
        for name, order in sorted(orders.items(), key=lambda item: item[1].device != "cuda")
    }


def operators(device: str) -> list[str]:
    """Every operator that some class of the device has members for."""
    return list(dict.fromkeys(op for c in classes().values() if c.device == device for op in c.members))


def classes_for(operator: str, device: str, name: str | None = None) -> list[NumericsClass]:
    """The classes that an operator has on a device, or the one asked for.

    Raises:
        UnknownNameError: no such class.
        UserError: the class is another device's or another operator's.
    """
    fitting = [c for c in classes().values() if c.device == device and operator in c.members]
    if name is None:
        return fitting
    known_classes = classes()
    if name not in known_classes:
        raise UnknownNameError("numerics class", name, known_classes)
    chosen = known_classes[name]
    if chosen.device != device:
        known = f"On {device} {operator} has: {', '.join(c.name for c in fitting)}." if fitting else ""
        raise UserError(f"class {name!r} belongs to {chosen.device}, and this is {device}", known or "Try --device.")
    if operator not in chosen.members:
        raise UserError(f"class {name!r} has no {operator}", f"It has: {', '.join(chosen.members)}.")
    return [chosen]
