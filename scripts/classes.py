"""The numerics classes as markdown: `python scripts/classes.py` prints a part of docs/classes.md."""

from __future__ import annotations

import sys

from nondet.core.operator import INVARIANT, ONE_ROW
from nondet.core.registry import NumericsClass, classes


def markdown() -> str:
    """One section a class, in the order of the table."""
    return "\n".join(_section(found) for found in classes().values())


def _section(found: NumericsClass) -> str:
    lines = [
        f"### `{found.name}` ({found.device})",
        "",
        found.order,
        "",
        f"    {found.formula}",
        "",
        f"Dtypes: {', '.join(found.dtypes)}. Sums are kept in: {found.accumulator}.",
        "",
        "| operator | anchor | members |",
        "|---|---|---|",
    ]
    for operator, members in found.members.items():
        names = ", ".join(f"`{name}`" for name in members)
        lines.append(f"| {operator.replace('_', '-')} | {_anchor(found.anchors[operator])} | {names} |")
    return "\n".join([*lines, ""])


def _anchor(target: str) -> str:
    if target in (ONE_ROW, INVARIANT):
        return target
    return f"`{target.rpartition(':')[2]}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
