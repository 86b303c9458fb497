"""`batch_invariant(training=True)`: a forward with gradients has the bits of one without, and a step repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import nondet
from nondet.core.compare import identical
from nondet.errors import UserError
from tests.kernels.tiers import tiny

pytestmark = pytest.mark.usefixtures("held")
DTYPES = [torch.bfloat16, torch.float32]
WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", WHERE)
def test_windows_and_soft_caps_have_the_bits_of_a_forward_without_gradients(device: str) -> None:
    """Gemma 2, padded on either side; nothing of its attention is left to torch. tests/training has other models."""
    model = tiny("gemma2", sliding_window=8, vocab_size=256).to(device).train()
    ids = torch.randint(1, 256, (3, 30), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, 20:] = 0, 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with nondet.batch_invariant(training=True) as invariance:
        with torch.no_grad():
            without = model(ids, **given).logits[mask.bool()]
        out = model(ids, **given).logits[mask.bool()]
        out.square().sum().backward()
    assert identical(out.detach(), without)
    coverage = invariance.coverage()
    assert not [what for what in (*coverage.left, *coverage.at_risk) if "attention" in what or "backward" in what]
    assert coverage.replaced["attention_backward"] >= 2  # padding behind a sequence is a packing of its own


SECOND: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w: F.rms_norm(x, (16,), w, 1e-6), [(5, 16), (16,)]),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), [(1, 2, 5, 32)]),
    "attention, later queries": (lambda q, k: F.scaled_dot_product_attention(q, k, k), [(1, 2, 2, 32), (1, 2, 5, 32)]),
    "linear, its bias apart": (lambda x, w, b: F.linear(x.mT, w, b), [(2, 16, 3), (7, 16), (7,)]),
    "token_logprobs": (lambda x: nondet.token_logprobs(x, torch.arange(5)), [(5, 16)]),
    "softmax": (lambda x: torch.softmax(x, -1), [(5, 16)]),
    "linear": (F.linear, [(5, 16), (7, 16)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (16,), w, b), [(5, 16), (16,), (16,)]),
}
BY_TORCH = ("softmax", "linear", "layer_norm")  # those are made of torch's own formulas


@pytest.mark.parametrize("name", list(SECOND))
def test_a_derivative_is_right_and_a_second_one_is_or_is_refused(name: str) -> None:
    """torch's once_differentiable refuses it to `backward` alone: torch.autograd.grad left out what went through."""
    call, shapes = SECOND[name]
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]

    def first(create: bool) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...], torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        found = torch.autograd.grad(call(*leaves).pow(3).sum(), leaves, create_graph=create)
        return leaves, found, sum((x.pow(2).sum() for x in found), torch.zeros(()))

    stock = first(False)[1]
    with nondet.batch_invariant(training=True):
        leaves, plain, _ = first(False)
        assert identical(call(*leaves).detach(), call(*inputs)), "a forward without gradients has the same bits"
        torch.testing.assert_close(plain, stock, rtol=1e-4, atol=1e-4)
        leaves, found, penalty = first(True)
        assert all(identical(a.detach(), b) for a, b in zip(found, plain, strict=True))
        if name not in BY_TORCH:
            with pytest.raises(UserError, match="second derivative"):
                torch.autograd.grad(penalty, leaves, allow_unused=True)
            with pytest.raises(UserError, match="second derivative"):
                first(True)[2].backward()
            return
        second = torch.autograd.grad(penalty, leaves)
    leaves, _, penalty = first(True)
    for got, right in zip(second, torch.autograd.grad(penalty, leaves), strict=True):
        assert torch.allclose(got, right, rtol=1e-4, atol=1e-4)


def test_packed_weights_and_training_exclude_each_other() -> None:
    """Copies of weights would be stale after a step that goes around torch's counter, without a word."""
    model = torch.nn.Linear(160, 160)
    outer = nondet.batch_invariant(training=True)
    with outer, nondet.batch_invariant() as inner, pytest.raises(UserError, match="training"):
        inner.pack(model)
    with nondet.batch_invariant() as block:
        block.pack(model)
        with pytest.raises(UserError, match="packed"), nondet.batch_invariant(training=True):
            pass
    with nondet.batch_invariant(training=True):  # what was packed went with its block
        pass
