"""RMSNorm: one row while the number of rows changes."""

from __future__ import annotations

from nondet.probes.rows import RowProbe

__all__ = ["RMSNorm"]


class RMSNorm(RowProbe):
    """x * rsqrt(mean(x^2) + eps) * weight, over the hidden size of Qwen3-8B, a head's, and an odd one."""

    name = "rms-norm"
    operators = ("rms_norm",)
    axis = "H"
    widths = (4096, 128, 4097)
    width_keys = ("hidden", "head_dim")
    weighted = True
