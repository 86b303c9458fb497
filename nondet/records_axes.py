"""What a run of `nondet sample --vary` holds beside its completions and rounds. Plain typed data, no torch."""

from __future__ import annotations

from nondet.records import Record, Role, role_of

__all__ = ["BASE_ARM", "AxisValue", "arm_of"]

# The arm of the completions that every axis is varied from.
BASE_ARM = "base"


def arm_of(axis: str, value: str) -> str:
    """The arm that the completions of a value belong to: "chunk=16"."""
    return f"{axis}={value}"


class AxisValue(Record, frozen=True, tag="axis-value", kw_only=True):
    """One value of one axis that was varied alone, and whether it took effect.

    Attributes:
        impl: Under which implementation.
        axis: "sharing", "chunk", ...: a key of `nondet.sampling.axes.table.AXES`.
        value: As it is written after --vary; "" where the axis has no value to vary here.
        arm: Of its completions: "base" for the value that the base has.
        held: Whether the completions of all values are held against each other: an axis such as dtype changes the
            arithmetic itself, and only completions of one of its values are.
        proven: Whether the engine's own steps show that the value took effect.
        proof: The figures that say so, or that do not.
        changes: What the axis varies, in a phrase.
        note: Why nothing was run.
    """

    impl: str
    axis: str
    value: str
    arm: str
    held: bool
    proven: bool
    proof: str
    changes: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """As `Record.key`."""
        return ("axis-value", self.impl, self.axis, self.value)

    @property
    def role(self) -> Role:
        """What the implementation is to a reader."""
        return role_of(self.impl)
