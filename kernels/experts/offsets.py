"""Where each expert's rows end, among rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["even_shares"]


def even_shares(shape: Mapping[str, int], device: str) -> torch.Tensor:
    """int32 [E]: M rows over E experts, in shares as equal as they go."""
    owners = torch.arange(shape["M"], device=device) % shape["E"]
    return torch.bincount(owners, minlength=shape["E"]).cumsum(0).to(torch.int32)
