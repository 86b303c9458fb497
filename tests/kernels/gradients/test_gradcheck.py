"""torch.autograd.gradcheck of what has a gradient of ours: the product's own code with float64 in the place of float32.

Under a block float64 is left to torch, so here the code is called by its functions, `require` lets float64 pass, and
`Tensor.float` gives float64. What comes before the gradient is torch's, or the oracle's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.autograd.gradcheck import GradcheckError

import nondet
from nondet.kernels import reference
from nondet.kernels.attention_backward import cpu
from nondet.kernels.dispatch import differentiable, gradients, replacements
from nondet.kernels.rows import cpu as rows
from tests.kernels.attention_backward.test_attention_backward import Case, plain, starts

TOKENS, CLASSES = 5, 6


def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    """Of packed requests: what our forward computes, in float64."""
    case = Case(dim=q.shape[-1], window=how.get("window"), softcap=how.get("softcap"))
    ends = [how[f"cu_seqlens_{side}"].tolist() for side in "qkk"]
    parts = zip(*([x[a:b] for a, b in pairwise(e)] for x, e in zip((q, k, v), ends, strict=True)), strict=True)
    return torch.cat([plain(*part, case) for part in parts])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    case = Case(dim=q.shape[-1])
    return torch.stack([plain(*(x[i].transpose(0, 1) for x in (q, k, v)), case).transpose(0, 1) for i in range(len(q))])


KERNELS: Any = SimpleNamespace(
    sum=rows.sum, mean=rows.mean, rms_norm=reference.rms_norm, linear=reference.linear, attention=attention,
    attention_varlen=attention_varlen, attention_backward=cpu.attention_backward,
)  # fmt: skip


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, replacements):
        monkeypatch.setattr(module, "require", lambda *_: None)
    monkeypatch.setattr(gradients.torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(cpu, "bmm", torch.bmm)  # whose tiles are float32's
    monkeypatch.setattr(cpu, "BLOCK_QUERIES", 3)  # so that there is more than one block of them
    monkeypatch.setattr(differentiable, "kernels_for", lambda _: KERNELS)


class _LayerNorm(torch.autograd.Function):
    """torch's forward, and our gradient for all of its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
        ctx.save_for_backward(*inputs)
        return F.layer_norm(inputs[0], [CLASSES], *inputs[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        saved = torch.native_layer_norm(x, [CLASSES], weight, bias, 1e-5)[1:]
        return gradients.layer_norm_backward(KERNELS, gradient, x, [CLASSES], *saved, weight, bias, (True, True, True))


ours = differentiable.Differentiable(KERNELS)
PACKED: dict[str, Any] = {f"cu_seqlens_{side}": starts(n, "cpu") for side, n in (("q", (4, 1)), ("k", (4, 3)))}
# name -> (function, shapes of its inputs)
CASES: dict[str, tuple[Callable[..., torch.Tensor], Sequence[tuple[int, ...]]]] = {
    "attention, later queries": (ours.attention, [(1, 2, 2, 2), (1, 1, 5, 2), (1, 1, 5, 2)]),
    "attention, window": (lambda *x: ours.attention_varlen(*x, **PACKED, window=2), [(5, 2, 2), (7, 1, 2), (7, 1, 2)]),
    "rms_norm": (lambda x, w: ours.rms_norm(x, w, 1e-5), [(2, 3, CLASSES), (CLASSES,)]),
    "linear, bias apart": (lambda x, w, b: ours.linear(x.transpose(0, 1), w, b), [(3, 2, 4), (5, 4), (5,)]),
    "layer_norm": (_LayerNorm.apply, [(4, CLASSES), (CLASSES,), (CLASSES,)]),
}


def checked(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
    """A gradient of the first input that is a thousandth too large is seen."""
    rng = torch.Generator().manual_seed(1)
    drawn = [torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_() for s in shapes]
    assert gradcheck(function, drawn, rtol=1e-4)
    with pytest.raises(GradcheckError):
        gradcheck(lambda x, *more: function(x.detach() + (x - x.detach()) * 1.001, *more), drawn, rtol=1e-4)


@pytest.mark.usefixtures("in_float64")
def test_the_gradient_is_the_derivative() -> None:
    for function, shapes in CASES.values():
        checked(function, *shapes)


def test_of_token_logprobs_as_it_is() -> None:
    """It takes float64; with top-k and top-p its sums were of logits rounded to float32."""
    for kept in ({}, {"temperature": 0.7}, {"top_k": 3, "temperature": 1.5}, {"top_p": 0.7}):
        checked(lambda x, kept=kept: nondet.token_logprobs(x, x.detach().argmax(-1), **kept), (TOKENS, CLASSES))
