"""Softmax and log_softmax over a vocabulary: one row while the number of rows changes."""

from __future__ import annotations

from nondet.probes.rows import RowProbe

__all__ = ["LogSoftmax", "Softmax"]


class Softmax(RowProbe):
    """Over an odd width, and over the vocabularies of Llama 2 and Qwen3."""

    name = "softmax"
    operators = ("softmax",)
    axis = "V"
    widths = (1000, 32000, 151936)
    width_keys = ("vocabulary",)
    hard_scale = 2.0**-8  # unscaled, the largest logit takes it all and no sum is left to round


class LogSoftmax(Softmax):
    """The same rows; what a sampler's logprobs are made by."""

    name = "log-softmax"
    operators = ("log_softmax",)
