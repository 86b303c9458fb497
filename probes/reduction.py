"""Sum and mean over the last axis: one row while the number of rows changes."""

from __future__ import annotations

from nondet.probes.rows import RowProbe

__all__ = ["Reduction"]


class Reduction(RowProbe):
    """Over a hidden size (the mean of RMSNorm, as transformers writes it), an odd width, and a vocabulary."""

    name = "reduction"
    operators = ("sum", "mean")
    widths = (4096, 1000, 151936)
    width_keys = ("hidden", "vocabulary")
    hard_scale = 2.0**-4  # unscaled, a sum of 4,096 of them overflows float16
    sums = ("sum", "mean")
    exact = ("sum",)
