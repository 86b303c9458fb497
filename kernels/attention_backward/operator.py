"""The gradient of attention, declared: what `batch_invariant(training=True)` computes where torch has other bits."""

from __future__ import annotations

from nondet.core.operator import Implementation, Operator

_FOLDER = "nondet.kernels.attention_backward"

ATTENTION_BACKWARD = Operator(
    name="attention_backward",
    implementations=(
        Implementation(
            name="invariant",
            invariant=True,
            targets={"cuda": f"{_FOLDER}.cuda:attention_backward", "cpu": f"{_FOLDER}.cpu:attention_backward"},
        ),
    ),
)
