"""torch.autograd.gradcheck of every gradient of ours: the product's own code with float64 in the place of float32.

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
from nondet.kernels.experts import cpu as experts
from nondet.kernels.rows import cpu as rows
from tests.kernels.attention_backward.test_attention_backward import Case, plain, starts

TOKENS, CLASSES = 5, 6
GRADIENTS: dict[str, Callable[..., Any]] = {
    name: getattr(gradients, name)
    for name in (
        "softmax_backward", "log_softmax_backward", "silu_backward", "gelu_backward", "sigmoid_backward",
        "tanh_backward", "layer_norm_backward", "embedding_backward",
    )
}  # fmt: skip


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    """Of a batch [B, H, T, D]: what our forward computes, in float64."""
    case = Case(dim=q.shape[-1], causal=how.get("causal", True), softcap=how.get("softcap"))
    return torch.stack([plain(*(x[i].transpose(0, 1) for x in (q, k, v)), case).transpose(0, 1) for i in range(len(q))])


def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    """Of packed requests."""
    case = Case(dim=q.shape[-1], window=how.get("window"), softcap=how.get("softcap"))
    ends = [how[f"cu_seqlens_{side}"].tolist() for side in "qkk"]
    parts = zip(*([x[a:b] for a, b in pairwise(e)] for x, e in zip((q, k, v), ends, strict=True)), strict=True)
    return torch.cat([plain(*part, case) for part in parts])


KERNELS: Any = SimpleNamespace(
    sum=rows.sum, mean=rows.mean, rms_norm=reference.rms_norm, linear=reference.linear, attention=attention,
    attention_varlen=attention_varlen, attention_backward=cpu.attention_backward, index_add_=experts.index_add_,
)  # fmt: skip


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, replacements):
        monkeypatch.setattr(module, "require", lambda *_: None)
    monkeypatch.setattr(gradients.torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(cpu, "bmm", torch.bmm)  # whose tiles are float32's
    monkeypatch.setattr(cpu, "BLOCK_QUERIES", 3)  # so that there is more than one block of them
    monkeypatch.setattr(differentiable, "kernels_for", lambda _: KERNELS)


def through(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """As a function: torch's forward, and backward(gradient, what it gave, *inputs) for all inputs that have one."""

    class Ours(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
            out = forward(*inputs)
            ctx.save_for_backward(out, *inputs)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return backward(gradient, *ctx.saved_tensors)

    return lambda *inputs: Ours.apply(*inputs)  # type: ignore[no-any-return]


def layer_norm(gradient: torch.Tensor, _: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    _, mean, scale = torch.native_layer_norm(x, [CLASSES], weight, bias, 1e-5)
    given = ([CLASSES], mean, scale, weight, bias, (True, True, True))
    return GRADIENTS["layer_norm_backward"](KERNELS, gradient, x, *given)


IDS = torch.tensor([[0, 2, 2], [1, 2, 0]])
TARGETS, SHARES = torch.tensor([1, 0, -100, 5, 5]), torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
PLACES = (torch.tensor([3, 0, 3]), torch.tensor([1, 1, -CLASSES + 1]))  # two of them are one place
ours = differentiable.Differentiable(KERNELS)
PACKED: dict[str, Any] = {f"cu_seqlens_{side}": starts(n, "cpu") for side, n in (("q", (4, 1)), ("k", (4, 3)))}


def normalized(x: torch.Tensor, log: bool, axis: int) -> torch.Tensor:
    return x.log_softmax(axis) if log else x.softmax(axis)


def normalizing(log: bool, axis: int) -> Callable[..., torch.Tensor]:
    ours_ = GRADIENTS["log_softmax_backward" if log else "softmax_backward"]
    return through(lambda x: normalized(x, log, axis), lambda g, y, _: ours_(KERNELS, g, y, axis, g.dtype))


def elementwise(name: str, call: Callable[..., Any], of_output: bool = False) -> Callable[..., torch.Tensor]:
    return through(call, lambda g, y, x: GRADIENTS[f"{name}_backward"](KERNELS, g, y if of_output else x))


# name -> (function, shapes of its inputs)
CASES: dict[str, tuple[Callable[..., torch.Tensor], Sequence[tuple[int, ...]]]] = {
    "attention": (ours.attention, [(2, 2, 4, 2), (2, 1, 4, 2), (2, 1, 4, 2)]),
    "attention, later queries": (ours.attention, [(1, 2, 2, 2), (1, 2, 5, 2), (1, 2, 5, 2)]),
    "attention, not causal": (lambda *x: ours.attention(*x, causal=False), [(1, 2, 4, 2), (1, 2, 5, 2), (1, 2, 5, 2)]),
    "attention, soft cap": (lambda *x: ours.attention(*x, softcap=1.5), [(1, 2, 4, 2)] * 3),
    "attention, packed": (lambda *x: ours.attention_varlen(*x, **PACKED), [(5, 4, 2), (7, 2, 2), (7, 2, 2)]),
    "attention, window": (lambda *x: ours.attention_varlen(*x, **PACKED, window=2), [(5, 2, 2), (7, 1, 2), (7, 1, 2)]),
    "rms_norm": (lambda x, w: ours.rms_norm(x, w, 1e-5), [(2, 3, CLASSES), (CLASSES,)]),
    "linear, bias apart": (lambda x, w, b: ours.linear(x.transpose(0, 1), w, b), [(3, 2, 4), (5, 4), (5,)]),
    "layer_norm": (through(lambda x, w, b: F.layer_norm(x, [CLASSES], w, b), layer_norm), [(4, 6), (6,), (6,)]),
    "softmax": (normalizing(False, -1), [(3, 7)]),
    "softmax, first axis": (normalizing(False, 0), [(3, 4)]),
    "log_softmax": (normalizing(True, -1), [(3, 7)]),
    "silu": (elementwise("silu", F.silu), [(5, 13)]),
    "gelu": (elementwise("gelu", F.gelu), [(5, 13)]),
    "sigmoid": (elementwise("sigmoid", torch.sigmoid, of_output=True), [(5, 13)]),
    "tanh": (elementwise("tanh", torch.tanh, of_output=True), [(5, 13)]),
    "embedding": (
        through(
            lambda w: F.embedding(IDS, w), lambda g, *_: GRADIENTS["embedding_backward"](KERNELS, g, IDS, 4, -1, 0)
        ),
        [(4, 3)],
    ),
    # what is indexed has index_put as its gradient
    "index": (
        through(
            lambda x: x[PLACES], lambda g, _, x: gradients.index_put(KERNELS, torch.zeros_like(x), PLACES, g, True)
        ),
        [(4, CLASSES)],
    ),
}  # fmt: skip


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_() for s in shapes]


def slightly_off(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """With a gradient of its first input that is a thousandth too large."""
    return lambda first, *others: function(first.detach() + (first - first.detach()) * 1.001, *others)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_derivative(name: str) -> None:
    function, shapes = CASES[name]
    assert gradcheck(function, drawn(*shapes), rtol=1e-4)
    with pytest.raises(GradcheckError):
        gradcheck(slightly_off(function), drawn(*shapes), rtol=1e-4)


@pytest.mark.parametrize("kept", [{}, {"temperature": 0.7}, {"top_k": 3, "temperature": 1.5}, {"top_p": 0.7}])
def test_of_token_logprobs_as_it_is(kept: dict[str, Any]) -> None:
    """It takes float64; with top-k and top-p its sums were of logits rounded to float32."""

    def of_largest(x: torch.Tensor) -> torch.Tensor:
        return nondet.token_logprobs(x, x.detach().argmax(-1), **kept)

    assert gradcheck(of_largest, drawn((TOKENS, CLASSES)), rtol=1e-4)
    with pytest.raises(GradcheckError):
        gradcheck(slightly_off(of_largest), drawn((TOKENS, CLASSES)), rtol=1e-4)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight", [None, SHARES])
def test_nll_loss_is_torch_s_whose_gradient_torch_computes(reduction: str, weight: torch.Tensor | None) -> None:
    """Its backward operator picks and scales: the forward is what of it was ours."""
    x = torch.randn(TOKENS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    number = {"mean": 1, "sum": 2}[reduction]
    found, _ = gradients.nll_loss(KERNELS, x, TARGETS, weight, number, -100)
    torch.testing.assert_close(found, F.nll_loss(x, TARGETS, weight, reduction=reduction), rtol=1e-14, atol=0.0)
