"""The choice of experts: the k largest of each row with ties decided, and where each expert's rows end.

torch.topk leaves ties open, and uses another algorithm for other numbers of rows. With distinct integers every
algorithm finds the same ones, so only the row decides. On a CPU, where a check is free, rows without ties take the
faster way: there torch.topk has no choice either.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nondet.core.launch import note


def even_shares(shape: Mapping[str, int], device: str) -> torch.Tensor:
    """int32 [E]: M rows over E experts, in shares as equal as possible."""
    owners = torch.arange(shape["M"], device=device) % shape["E"]
    return torch.bincount(owners, minlength=shape["E"]).cumsum(0).to(torch.int32)


_NAN = 0x7FFFFFFF


def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of x [..., W]: values [..., k] in x's dtype and indices [..., k] int64, largest first.

    Exact. Equal numbers come in ascending order of their indices, -0.0 equals 0.0, and NaN counts as the greatest.
    float64 uses a stable sort, because number and index do not fit into one integer.
    """
    if x.device.type == "cpu":
        values, indices = torch.topk(x, min(k + 1, x.shape[-1]), dim=-1)
        if bool((values[..., :-1] > values[..., 1:]).all()) and not bool(values.isnan().any()):
            note("ordered_topk[no ties]")
            return values[..., :k].contiguous(), indices[..., :k].contiguous()
    if x.dtype == torch.float64:
        note("ordered_topk[sort]")
        values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[..., :k].contiguous(), indices[..., :k].contiguous()
    note("ordered_topk[keys]")
    wide = x.float() + 0.0  # -0.0 becomes 0.0
    bits = torch.where(wide.isnan(), _NAN, wide.contiguous().view(torch.int32))
    ordered = torch.where(bits < 0, bits ^ _NAN, bits).to(torch.int64)
    last = x.shape[-1] - 1
    keys = (ordered << 32) + (last - torch.arange(last + 1, device=x.device))
    indices = last - (torch.topk(keys, k, dim=-1).values & 0xFFFFFFFF)
    return x.gather(-1, indices), indices


def check_shapes(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raise ValueError for operands of no grouped product."""
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1] or offsets.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_matmul takes [R, K], [G, K, N] and [G], got {tuple(x.shape)}, {tuple(weight.shape)} and "
            f"{tuple(offsets.shape)}"
        )
