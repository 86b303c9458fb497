"""Which kernels a model runs on, by name: stock, one of its named backends, or what `batch_invariant()` puts there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nondet.errors import UnknownNameError, UserError
from nondet.sampling.flash import STOCK_FLASH, stock_flash
from nondet.sampling.temperature import kernels_of

__all__ = ["RANK_FREE", "STOCK_NO_CUDNN", "implementation"]

STOCK_NO_CUDNN = "stock-no-cudnn"
RANK_FREE = "rank-free"


@contextmanager
def implementation(name: str, model: Any = None) -> Iterator[Callable[[], Counter[str]]]:
    """Put the implementation under every model in this process: stock, invariant, or invariant:FAMILY[+FAMILY].

    "rank-free" is invariant, with the row-parallel layers of `model` in a class that does not follow the ranks.
    Names that differ in the draw alone are those of their kernels, see `nondet.sampling.temperature`.
    "stock-no-cudnn" is stock with cuDNN's attention switched off, so that torch takes its next choice; "stock-flash"
    has FlashAttention over each request's keys, see `nondet.sampling.flash`.

    Yields:
        What the dispatcher says so far: "replaced: mm", "left stock: mm float64" or "at risk: mm bfloat16" -> calls.

    Raises:
        UserError: no such implementation or family.
    """
    name = kernels_of(name)
    if name == "stock":
        yield Counter
        return
    if name == STOCK_NO_CUDNN:
        with _no_cudnn_attention():
            yield Counter
        return
    if name == STOCK_FLASH:
        with stock_flash():
            yield Counter
        return
    base, _, families = name.partition(":")
    if base != "invariant" and name != RANK_FREE:
        known = ["stock", STOCK_NO_CUDNN, STOCK_FLASH, "invariant", "invariant:FAMILY", RANK_FREE]
        raise UnknownNameError("implementation", name, known)
    from nondet.kernels.dispatch.block import batch_invariant

    if name == RANK_FREE:
        from nondet.kernels.dispatch.rank_free import rank_free

        with batch_invariant() as invariance, rank_free(model):
            yield invariance.coverage().counts
        return

    with batch_invariant(families=families.split("+") if families else None) as invariance:
        if model is not None and "matmul" in invariance.families:
            invariance.pack(model)  # nobody trains here: the weights are those that were loaded
        yield invariance.coverage().counts


@contextmanager
def _no_cudnn_attention() -> Iterator[None]:
    """scaled_dot_product_attention without cuDNN, in every thread.

    cuDNN builds a plan for each new length of keys, which costs the host more than the attention of a small model costs
    the GPU; a comparison of kernels wants this out of the way.
    """
    if not torch.cuda.is_available():
        raise UserError(f"{STOCK_NO_CUDNN} needs a CUDA device: there is no cuDNN to switch off", "Use --impl stock.")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
