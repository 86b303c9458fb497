"""Which kernels a model runs on, by name: stock, one of its named backends, or those of `batch_invariant()`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from nondet.errors import UnknownNameError, UserError
from nondet.kernels.dispatch.transformers_attention import is_paged, longest, update_cache
from nondet.sampling.plan import DRAWN

# transformers uses the flash-attn packages where one is installed. Otherwise it computes a masked product of all
# requests' queries with all keys, and a comparison with that flatters any replacement. So here torch's kernel, the same
# FlashAttention 2, is registered under the name that the engine uses, on a GPU.

STOCK_FLASH = "stock-flash"


@contextmanager
def stock_flash() -> Iterator[None]:
    """Inside the block a paged call of `sdpa` runs torch's FlashAttention, on a GPU."""
    from transformers.modeling_utils import AttentionInterface

    table = AttentionInterface()
    before = {name: table[name] for name in ("sdpa", "paged|sdpa") if name in list(table)}
    for name, original in before.items():
        AttentionInterface.register(name, partial(_flash, original))
    try:
        yield
    finally:
        for name, original in before.items():
            AttentionInterface.register(name, original)


def _flash(original: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_paged(kwargs) or not query.is_cuda or query.dtype == torch.float32:
        return original(module, query, key, value, mask, *args, **kwargs)
    bound = {**dict(zip(("dropout", "scaling"), args, strict=False)), **kwargs}
    window = bound.get("sliding_window") or getattr(module, "sliding_window", None)
    kind = "sliding_attention" if window else "full_attention"
    keys, values = update_cache(bound.get("cache"), module.layer_idx, key, value, bound, kind)
    starts = (bound[name].to(torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    sizes, left = (longest("q", bound), longest("k", bound)), window - 1 if window else None
    # no dropout; causal, aligned to each request's last key; no mask for a debugger
    out = torch.ops.aten._flash_attention_forward(
        query[0].transpose(0, 1),
        keys,
        values,
        *starts,
        *sizes,
        0.0,
        True,
        False,
        scale=bound.get("scaling"),
        window_size_left=left,
    )
    return out[0][None], None


STOCK_NO_CUDNN = "stock-no-cudnn"
RANK_FREE = "rank-free"


@contextmanager
def implementation(name: str, model: Any = None) -> Iterator[Callable[[], Counter[str]]]:
    """Put the implementation under every model in this process: stock, invariant, or invariant:FAMILY[+FAMILY].

    "rank-free" is invariant, with the row-parallel layers of `model` in a class that does not follow the ranks. Names
    that differ only in the draw have the same kernels, see `nondet.sampling.plan`. "stock-no-cudnn" is stock with
    cuDNN's attention switched off, so that torch takes its next choice; "stock-flash" has FlashAttention over each
    request's keys. Yields a function that gives the dispatcher's counts: "replaced: mm", "left stock: mm float64" or
    "at risk: mm bfloat16" -> calls. Raises UserError: no such implementation or family.
    """
    name = DRAWN.get(name, name)
    stocks: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "stock": nullcontext,
        STOCK_NO_CUDNN: _no_cudnn_attention,
        STOCK_FLASH: stock_flash,
    }
    if name in stocks:
        if name != "stock" and not torch.cuda.is_available():
            raise UserError(f"{name} needs a CUDA device", "Use --impl stock.")
        with stocks[name]():
            yield Counter
        return
    base, _, families = name.partition(":")
    if base != "invariant" and name != RANK_FREE:
        raise UnknownNameError("implementation", name, [*stocks, "invariant", "invariant:FAMILY", RANK_FREE])
    from nondet.kernels.dispatch.block import batch_invariant
    from nondet.ranks.rank_free import rank_free

    with ExitStack() as stack:
        invariance = stack.enter_context(batch_invariant(families=families.split("+") if families else None))
        if name == RANK_FREE:
            stack.enter_context(rank_free(model))
        elif model is not None and "matmul" in invariance.families:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "nondet: pack")  # only speed is lost where there is no copy
                invariance.pack(model)  # the weights don't change here
        yield invariance.coverage().counts


@contextmanager
def _no_cudnn_attention() -> Iterator[None]:
    """scaled_dot_product_attention without cuDNN, in every thread. cuDNN builds a plan for each new length of keys,
    which costs the host more time than the attention of a small model costs the GPU; a comparison of kernels leaves
    this out."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
