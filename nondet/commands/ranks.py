"""`--ranks` of `nondet sample`: the same completions from a model that is cut over several processes."""

from __future__ import annotations

from typing import Annotated

import typer

from nondet.errors import UserError

__all__ = ["RANKS", "check_world"]

RANKS = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        help="Cut the model over that many ranks by its tensor-parallel plan: processes of nondet's own, one a GPU "
        "(NCCL), or on a CPU (gloo). With --impl rank-free its answers do not follow their number.",
        show_default="1",
    ),
]


def check_world(text: str | None, device: str, impls: list[str], *, varied: bool) -> int:
    """The number of ranks, before anything is loaded.

    Raises:
        UserError: no single number, ranks that can't be had, an implementation that ranks lack, or --vary beside it.
    """
    if text is None:
        return 1
    from nondet.ranks.group import check_ranks, parse_ranks
    from nondet.sampling.ranks import RANK_WAYS, check_loader

    worlds = parse_ranks(text) or ()
    if varied:
        raise UserError("--ranks and --vary exclude each other", "Write --vary ranks=2 to have both in one run.")
    if len(worlds) != 1:
        raise UserError(f"--ranks {text} is several numbers", "Give one, or --vary ranks=2:4 for several.")
    if worlds == (1,):
        return 1
    import torch

    check_loader()
    check_ranks(worlds, device, torch.cuda.device_count() if device == "cuda" else 0)
    for impl in impls:
        if impl not in RANK_WAYS:
            raise UserError(f"--impl {impl} is not to be had over ranks", f"Use {', '.join(RANK_WAYS)}.")
    return worlds[0]
