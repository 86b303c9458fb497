"""`--cuda-graphs` of `nondet sample`: whether the engine's steps run as CUDA graphs, and when they do unasked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.commands.common import say
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.sampling.plan import Load

__all__ = ["GRAPHS", "check_graphs", "load_with_graphs"]

GRAPHS = Annotated[
    bool | None,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="Run the engine's steps as CUDA graphs, padded to a few sizes, for every implementation alike.",
        show_default="on for plain dense decoders on CUDA, where nothing is drawn, varied or cut over ranks, "
        "and the load's steps are padded to more than one size",
    ),
]


def check_graphs(given: bool | None, spec: str, load: Load) -> None:
    """Refuse an option that the load contradicts.

    Raises:
        UserError: as said.
    """
    if given is not None and names_graphs(spec) and given != load.graphs:
        option = "--cuda-graphs" if given else "--no-cuda-graphs"
        raise UserError(f"{option} and --load {spec} contradict each other", "Leave one of the two out.")


def names_graphs(spec: str) -> bool:
    """Whether `--load` says itself what is to be."""
    return any(part.partition("=")[0].strip() == "graphs" for part in spec.split(","))


def load_with_graphs(given: bool | None, spec: str, load: Load, device: str, model: Any, *, plain: bool) -> Load:
    """The load, its steps as CUDA graphs where that was asked for, or where nobody said and they can be.

    Args:
        plain: Whether nothing is drawn, varied or cut over ranks.
    """
    from nondet.sampling.engine import query_step, why_no_graphs

    if given is not None or names_graphs(spec) or device != "cuda" or not plain:
        return load if given is None else replace(load, graphs=given)
    reason = why_no_graphs(model.config)
    if not reason and query_step(load.requests, load.budget) >= load.budget:
        # no product would meet another number of rows: what the run is to show could not come out
        reason = "as CUDA graphs all of them would be padded to one size"
    if reason:
        say(f"steps are launched one by one: {reason}")
        return load
    say("steps run as CUDA graphs, padded to a few sizes; --no-cuda-graphs launches them one by one")
    return replace(load, graphs=True)
