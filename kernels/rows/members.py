"""The anchor of class "lanes": its order in elementwise additions, for `nondet.core.registry` to name."""

from __future__ import annotations

import torch

__all__ = ["lanes_sum"]

_ONE_CHUNK, _CHUNK, _LEAST_LANES, _MOST_LANES = 16384, 4096, 256, 2048


def lanes_sum(x: torch.Tensor) -> torch.Tensor:
    """x [..., W] -> [...]: the order of class lanes in PyTorch's elementwise additions, which have no order to choose.

    Written from the class's words (`nondet.core.registry`) alone. float32, float64 for float64; any device.
    """
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    width = x.shape[-1]
    size = _power_of_two(width) if width <= _ONE_CHUNK else _CHUNK
    lanes = min(size, max(_LEAST_LANES, min(size // 4, _MOST_LANES)))
    sums = []
    for start in range(0, max(width, 1), size):
        part = wide[..., start : start + size]
        part = torch.nn.functional.pad(part, (0, size - part.shape[-1]))
        while part.shape[-1] > lanes:
            half = part.shape[-1] // 2
            part = part[..., :half] + part[..., half:]
        sums.append(_neighbours(part))
    chunks = torch.stack(sums, -1)
    return _neighbours(torch.nn.functional.pad(chunks, (0, _power_of_two(len(sums)) - len(sums)))).to(x.dtype)


def _neighbours(x: torch.Tensor) -> torch.Tensor:
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
