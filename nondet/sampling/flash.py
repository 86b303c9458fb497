"""Stock with torch's own FlashAttention over each request's keys, under transformers' continuous batching.

transformers takes such an attention from the flash-attn packages where one is installed. Without one it computes a
masked product of everybody's queries with everybody's keys, and a comparison with that flatters whatever replaces it.
So here torch's kernel, the same FlashAttention 2, stands under the name that the engine takes, on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nondet.errors import UserError
from nondet.kernels.dispatch.transformers_attention import longest, update_cache

__all__ = ["STOCK_FLASH", "stock_flash"]

STOCK_FLASH = "stock-flash"
_NAMES = ("sdpa", "paged|sdpa")


@contextmanager
def stock_flash() -> Iterator[None]:
    """While it is entered, a paged call of `sdpa` runs torch's FlashAttention; every other call runs as it did.

    Raises:
        UserError: no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UserError(f"{STOCK_FLASH} needs a CUDA device", "Use --impl stock.")
    from transformers.modeling_utils import AttentionInterface

    table = AttentionInterface()
    before = {name: table[name] for name in _NAMES if name in list(table)}
    for name, original in before.items():
        AttentionInterface.register(name, _standing_for(original))
    try:
        yield
    finally:
        for name, original in before.items():
            AttentionInterface.register(name, original)


def _standing_for(original: Any) -> Any:
    def forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if kwargs.get("cache") is None or not query.is_cuda or query.dtype == torch.float32:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        bound = {**dict(zip(("dropout", "scaling"), args, strict=False)), **kwargs}
        window = bound.get("sliding_window") or getattr(module, "sliding_window", None)
        keys, values = update_cache(
            bound["cache"], module.layer_idx, key, value, bound, "sliding_attention" if window else "full_attention"
        )
        out = torch.ops.aten._flash_attention_forward(
            query[0].transpose(0, 1),
            keys,
            values,
            bound["cu_seq_lens_q"].to(torch.int32),
            bound["cu_seq_lens_k"].to(torch.int32),
            longest("q", bound),
            longest("k", bound),
            0.0,
            True,  # causal, aligned to each request's last key
            False,
            scale=bound.get("scaling"),
            window_size_left=window - 1 if window else None,
        )[0]
        return out[None], None

    return forward
