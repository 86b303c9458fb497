"""A CPU's tiles as a certificate keeps them: numbers, and back."""

from __future__ import annotations

from nondet.core.certificates import Certificate
from nondet.kernels.matmul.cpu_plan import Tiles

__all__ = ["listed", "restored"]


def listed(tiles: Tiles) -> tuple[str, dict[str, list[int]]]:
    """(evidence, numbers) for the certificate."""
    evidence = f"base {tiles.base}: a row has its bits at every place; {len(tiles.sizes)} row counts have the same"
    numbers = {
        "base": [tiles.base],
        "sizes": list(tiles.sizes),
        "rejected": list(tiles.rejected),
        "nanoseconds": [round(1e9 * tiles.seconds[size]) for size in tiles.sizes],
    }
    return evidence, numbers


def restored(what: str, proof: Certificate | None) -> Tiles | None:
    """The tiles that a certificate lists; None where there is none, or none that could be tiles."""
    if proof is None or not proof.holds:
        return None
    numbers = proof.numbers
    sizes, base, spent = (tuple(numbers.get(name, ())) for name in ("sizes", "base", "nanoseconds"))
    if len(base) != 1 or base[0] not in sizes or len(spent) != len(sizes) or min(sizes) < 1:
        return None
    seconds = {size: 1e-9 * ns for size, ns in zip(sizes, spent, strict=True)}
    return Tiles(what, base[0], sizes, tuple(numbers.get("rejected", ())), seconds)
