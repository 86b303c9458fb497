"""torch's backward operators under `batch_invariant()`: right, each row by itself, sums in the order of the call."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nondet
from nondet.core.compare import identical
from nondet.errors import UserError
from nondet.kernels.pointwise.cpu import vectors_only
from tests.kernels.tiers import exposed, tiny

pytestmark = pytest.mark.usefixtures("held")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 3, 17, 33)
POINTWISE = ("silu", "gelu", "sigmoid", "tanh")
OF_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "_softmax_backward_data": lambda x: torch.softmax(x, -1),
    "_log_softmax_backward_data": lambda x: torch.log_softmax(x, -1),
    "native_layer_norm_backward": lambda x: F.layer_norm(x, x.shape[-1:]),
    "silu_backward": F.silu,
    "gelu_backward": F.gelu,
    "sigmoid_backward": torch.sigmoid,
    "tanh_backward": torch.tanh,
}


def gradient(call: Callable[..., torch.Tensor], x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    call(x).backward(upstream)
    assert x.grad is not None
    return x.grad


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2).to(dtype).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_gradient_is_its_own(dtype: torch.dtype, device: str) -> None:
    """As alone, beside any number of others, at a width that no vector divides; replaced on a CPU, never at risk."""
    x, upstream = drawn((max(ROWS), 1003), dtype, device), drawn((max(ROWS), 1003), dtype, device, 1)
    for name, call in OF_ROWS.items():
        with nondet.batch_invariant() as invariance:
            alone = [gradient(call, x[i : i + 1], upstream[i : i + 1]) for i in range(4)]
            for rows in ROWS:
                together = gradient(call, x[:rows], upstream[:rows])
                for i in range(min(rows, 4)):
                    assert identical(together[i : i + 1], alone[i]), (name, rows, i)
        coverage = invariance.coverage()
        assert not coverage.at_risk, name
        assert coverage.replaced[name] == 4 + len(ROWS) or (device == "cuda" and name.split("_")[0] in POINTWISE)


def test_two_operands_go_through_vectors_alone() -> None:
    """An operator whose last elements take another formula gives each element one: its own bits at any length."""

    def with_a_tail(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out, body = a * b, a.numel() // 64 * 64
        out[body:] += 1
        return out

    a, b = drawn((40000,), torch.float32, "cpu"), drawn((40000,), torch.float32, "cpu", 1)
    assert not identical(with_a_tail(a, b)[:65], with_a_tail(a[:65], b[:65]))
    for count in (1, 63, 64, 65, 16385, 39999):
        assert identical(vectors_only(with_a_tail, a[:count], b[:count]), a[:count] * b[:count]), count
    square = a[:900].view(30, 30)
    for other in (b[:900].view(30, 30).t(), b[:30].expand(30, 30)):  # strides of another order, and none
        assert identical(vectors_only(with_a_tail, square, other), square * other)
        assert identical(vectors_only(with_a_tail, square.t(), other), square.t() * other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embeddings_gradient_is_added_in_the_order_of_the_tokens(dtype: torch.dtype, device: str) -> None:
    """In float32, one after the other, rounded once; another order has other bits; padding has none."""
    ids = torch.randint(0, 7, (4, 50), generator=torch.Generator().manual_seed(0)).to(device)
    upstream = drawn((4, 50, 24), dtype, device)
    weight = torch.zeros((7, 24), dtype=dtype, device=device)

    def of(ids: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
        return gradient(lambda w: F.embedding(ids, w, padding_idx=3), weight, upstream)

    expected = torch.zeros((7, 24))
    for token, row in zip(ids.flatten().tolist(), upstream.reshape(-1, 24).float().cpu(), strict=True):
        expected[token] += row
    expected[3] = 0
    with nondet.batch_invariant() as invariance:
        ours, again = of(ids, upstream), of(ids, upstream)
        backwards = of(ids.flip(0, 1), upstream.flip(0, 1))
    assert identical(ours.cpu(), expected.to(dtype))
    assert identical(ours, again)
    assert identical(ours, backwards) == (dtype == torch.bfloat16)  # where one rounding hides it
    assert not invariance.coverage().at_risk
    assert invariance.coverage().replaced["embedding_dense_backward"] == 3


INDICES: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "rows": lambda x, device: x[torch.tensor([0, 2, 2, -1, 0, 2], device=device)],
    "two axes": lambda x, device: x[torch.tensor([[0], [2]], device=device), torch.tensor([1, 1, -2], device=device)],
    "the second axis": lambda x, device: x[:, torch.tensor([1, 1, 0], device=device)],
    "the last two": lambda x, device: x[:, torch.tensor([1, 1], device=device), torch.tensor([3, 3], device=device)],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
def test_what_was_gathered_is_added_up_in_order(transposed: bool, device: str) -> None:
    """The gradient of an advanced index: torch's numbers, twice the same bits, and nothing at risk."""
    x = drawn((4, 4, 5), torch.float32, device)
    x = x.transpose(0, 1) if transposed else x
    for name, index in INDICES.items():
        call = functools.partial(index, device=device)
        upstream = drawn(tuple(call(x).shape), torch.float32, device, 1)
        stock = gradient(call, x, upstream)
        with nondet.batch_invariant() as invariance:
            ours, again = gradient(call, x, upstream), gradient(call, x, upstream)
        torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-6)  # up to six additions in another order
        assert identical(ours, again), name
        assert invariance.coverage().replaced["_index_put_impl_"] == 2, name
        assert not invariance.coverage().at_risk, name


def test_an_index_put_by_hand() -> None:
    """In the order of the indices; what does not accumulate only moves; what is wrong is torch's own error."""
    target, index = torch.zeros(3), (torch.tensor([1, 1, 1]),)
    values = torch.tensor([2.0**24, 1.0, 1.0])
    with nondet.batch_invariant() as invariance:
        assert torch.equal(target.index_put(index, values, accumulate=True), torch.tensor([0.0, 2.0**24, 0.0]))
        small_first = target.index_put(index, values.flip(0), accumulate=True)
        assert torch.equal(small_first, torch.tensor([0.0, 2.0**24 + 2, 0.0]))
        assert torch.equal(target.index_put((torch.tensor([2]),), values[:1]), torch.tensor([0.0, 0.0, 2.0**24]))
        mask = torch.tensor([True, False, True])
        assert torch.equal(target.index_put((mask,), torch.ones(()), accumulate=True), mask.float())
        with pytest.raises(IndexError):
            target.index_put((torch.tensor([3]),), values[:1], accumulate=True)
    assert invariance.coverage().replaced["_index_put_impl_"] == 2
    assert not invariance.coverage().left  # a mask picks each place once


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(weighted: bool, device: str) -> None:
    x = drawn((33, 101), torch.float32, device)
    target = torch.randint(0, 101, (33,), generator=torch.Generator().manual_seed(0)).to(device)
    target[::5] = -100
    weight = drawn((101,), torch.float32, device, 2).abs() if weighted else None
    for reduction in ("none", "mean", "sum"):
        call = functools.partial(F.cross_entropy, target=target, weight=weight, reduction=reduction)
        upstream, none = torch.ones_like(call(x)), torch.full_like(target, -100)

        def all_of_it(call: Any = call, upstream: torch.Tensor = upstream, none: torch.Tensor = none) -> list[Any]:
            return [call(x), gradient(call, x, upstream), call(x, target=none)]

        with nondet.batch_invariant() as invariance:
            ours = all_of_it()
        torch.testing.assert_close(ours, all_of_it(), equal_nan=True)
        assert not exposed(invariance), reduction


def test_shapes_that_ours_does_not_take_are_torchs() -> None:
    calls: list[tuple[Any, ...]] = [
        (torch.randn(2, 5, 3, 3), torch.zeros((2, 3, 3), dtype=torch.long)),
        (torch.randn(5), torch.zeros((), dtype=torch.long)),
        (torch.randn(4, 5, dtype=torch.float64), torch.zeros(4, dtype=torch.long)),
    ]
    for x, target in calls:
        call, upstream = functools.partial(F.cross_entropy, target=target), torch.ones((), dtype=x.dtype)
        stock = gradient(call, x, upstream)
        with nondet.batch_invariant() as invariance:
            torch.testing.assert_close(gradient(call, x, upstream), stock)
        coverage = invariance.coverage()
        assert coverage.left or coverage.at_risk


@pytest.mark.parametrize("device", DEVICES)
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
