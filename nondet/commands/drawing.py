"""Options of drawing at a temperature, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.sampling.plan import Sampling

__all__ = ["PANEL", "SEEDS", "TEMPERATURE", "TOP_K", "TOP_P", "check_drawn", "samplings_of", "subjects_of"]

PANEL = "Drawing"

TEMPERATURE = Annotated[
    float, typer.Option("--temperature", help="0: greedy. Above: tokens are drawn.", rich_help_panel=PANEL)
]
TOP_K = Annotated[int, typer.Option("--top-k", help="Keep so many of the largest; 0: all.", rich_help_panel=PANEL)]
TOP_P = Annotated[
    float,
    typer.Option("--top-p", help="Keep the fewest that hold this share of the mass; 1: all.", rich_help_panel=PANEL),
]
SEEDS = Annotated[
    int,
    typer.Option(
        "--seeds", help="Seeds, 0 and up, each with --n completions of each prompt.", rich_help_panel=PANEL
    ),
]  # fmt: skip


def samplings_of(temperature: float, top_k: int, top_p: float, seeds: int) -> list[Sampling]:
    """One for each seed; none for greedy requests.

    Raises:
        UserError: a value that makes no sense.
    """
    from nondet.sampling.plan import Sampling, check_sampling

    if not check_sampling(temperature, top_k, top_p, seeds):
        return []
    return [Sampling(temperature, top_k, top_p, seed) for seed in range(seeds)]


def check_drawn(impls: Sequence[str], drawn: bool, graphs: bool) -> None:
    """Refuse implementations that differ in the draw alone where nothing is drawn, and our draw inside of graphs.

    Raises:
        UserError: as said.
    """
    from nondet.sampling.plan import DRAWN, draws_itself

    for impl in impls:
        if not drawn and impl in DRAWN:
            raise UserError(f"--impl {impl} draws, and greedy completions draw nothing", "Add --temperature 0.8, say.")
        if drawn and graphs and not draws_itself(impl):
            raise UserError(f"--impl {impl} draws in a hook, which a CUDA graph does not run", "Leave CUDA graphs out.")


def subjects_of(
    texts: Sequence[str], tokens: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> list[dict[str, Any]]:
    """The prompts of a run's header, one for each prompt and seed, in the plan's order."""
    plain = [{"text": str(text), "tokens": len(ids)} for text, ids in zip(texts, tokens, strict=True)]
    return [p | {"seed": s.seed} for p in plain for s in samplings] if samplings else plain
