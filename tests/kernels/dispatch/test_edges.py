"""What torch computes or refuses, the block computes or refuses, too: empty tensors, misfits, gradients, layouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nondet.core.compare import identical
from nondet.kernels.dispatch import functions
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.dispatch.state import kernels_for
from tests.build import rand

EMPTY: dict[str, Callable[[], Any]] = {
    "mm without rows": lambda: torch.mm(rand(0, 4), rand(4, 3)),
    "mm without a depth": lambda: torch.mm(rand(2, 0), rand(0, 3)),
    "bmm without batches": lambda: torch.bmm(rand(0, 2, 4), rand(0, 4, 3)),
    "bmm without a depth": lambda: torch.bmm(rand(2, 2, 0), rand(2, 0, 3)),
    "linear without rows": lambda: F.linear(rand(0, 4), rand(3, 4), rand(3)),
    "linear without outputs": lambda: F.linear(rand(2, 4), rand(0, 4)),
    "addmm without a depth": lambda: torch.addmm(rand(3), rand(2, 0), rand(0, 3)),
    "mv without rows": lambda: torch.mv(rand(0, 4), rand(4)),
    "dot of nothing": lambda: torch.dot(rand(0), rand(0)),
    "sum of nothing": lambda: rand(3, 0).sum(-1),
    "mean of nothing": lambda: rand(3, 0).mean(-1),
    "sum without rows": lambda: rand(0, 3).sum(-1),
    "sum over no rows": lambda: rand(0, 3).sum(0),
    "softmax without rows": lambda: torch.softmax(rand(0, 3), -1),
    "softmax of nothing": lambda: torch.softmax(rand(3, 0), -1),
    "log_softmax of nothing": lambda: torch.log_softmax(rand(3, 0), -1),
    "logsumexp of nothing": lambda: torch.logsumexp(rand(3, 0), -1),
    "rms_norm without rows": lambda: F.rms_norm(rand(0, 4), (4,), rand(4), 1e-6),
    "layer_norm without rows": lambda: F.layer_norm(rand(0, 4), (4,)),
    "attention without queries": lambda: F.scaled_dot_product_attention(
        rand(1, 2, 0, 8), rand(1, 2, 3, 8), rand(1, 2, 3, 8)
    ),
    "attention without requests": lambda: F.scaled_dot_product_attention(*[rand(0, 2, 3, 8)] * 3),
    "silu of nothing": lambda: F.silu(rand(0, 3)),
    "topk of no rows": lambda: torch.topk(rand(0, 5), 2),
    "index_add of nothing": lambda: rand(3, 2).index_add(0, torch.zeros(0, dtype=torch.int64), rand(0, 2)),
    "cumsum of nothing": lambda: rand(3, 0).cumsum(-1),
}


@pytest.mark.parametrize("case", EMPTY)
def test_empty_tensors_are_torchs(case: str) -> None:
    """Nothing to compute: the same shapes, dtypes and constants."""
    with torch.no_grad():
        stock = EMPTY[case]()
        with batch_invariant():
            got = EMPTY[case]()
    pairs = list(zip(*((x if isinstance(x, tuple) else (x,)) for x in (stock, got)), strict=True))
    assert pairs
    for a, b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert identical(a, b)


WRONG: dict[str, Callable[[], Any]] = {
    "mm of columns": lambda: torch.mm(rand(2, 1), rand(2, 1)),
    "mm of a vector": lambda: torch.mm(rand(4), rand(4, 3)),
    "bmm of other batches": lambda: torch.bmm(rand(2, 3, 1), rand(3, 1, 3)),
    "bmm of columns": lambda: torch.bmm(rand(2, 3, 1), rand(2, 2, 1)),
    "addmm with a bias that fits nowhere": lambda: torch.addmm(rand(5, 2, 3), rand(2, 4), rand(4, 3)),
    "mv of a misfit": lambda: torch.mv(rand(2, 1), rand(3)),
    "linear of a misfit": lambda: F.linear(rand(2, 1), rand(3, 4)),
    "linear with a bias of one": lambda: F.linear(rand(2, 4), rand(3, 4), rand(2)),
    "softmax of no axis": lambda: torch.softmax(rand(2, 3), 2),
    "sum of no axis": lambda: rand(2, 3).sum(5),
    "sum of an axis twice": lambda: rand(2, 3).sum((1, 1)),
    "rms_norm of another width": lambda: F.rms_norm(rand(2, 4), (3,), rand(3), 1e-6),
    "layer_norm of another width": lambda: F.layer_norm(rand(2, 4), (3,)),
    "layer_norm with a weight of one": lambda: F.layer_norm(rand(2, 4), (4,), rand(1)),
}


@pytest.mark.parametrize("case", WRONG)
def test_torchs_own_errors_are_kept(case: str) -> None:
    """What torch refuses is refused inside, with torch's type and words."""
    with pytest.raises((RuntimeError, IndexError)) as stock:
        WRONG[case]()
    with batch_invariant(), pytest.raises((RuntimeError, IndexError)) as got:
        WRONG[case]()
    assert (got.type, str(got.value)) == (stock.type, str(stock.value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm_has_a_gradient_in_every_dtype(dtype: torch.dtype) -> None:
    """Its backward takes the mean and deviation that the forward saved."""
    gradients = []
    for families in ([], ["norm"]):
        x = rand(3, 8).to(dtype).requires_grad_()
        with batch_invariant(families):
            F.layer_norm(x, (8,), torch.ones(8, dtype=dtype)).float().pow(2).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.float())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.1, atol=0.05)


def test_forward_gradients_run_on_stock() -> None:
    """jvp of an operator that is replaced as a whole: the whole has none, so its parts run."""
    x, tangent = rand(3, 8), rand(8, 3).t().contiguous()

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (8,), torch.ones(8), 1e-6)

    stock = torch.func.jvp(norm, (x,), (tangent,))
    with batch_invariant() as block:
        got = torch.func.jvp(norm, (x,), (tangent,))
    torch.testing.assert_close(got, stock)
    assert not block.coverage().replaced["rms_norm"]


def test_layouts_are_torchs() -> None:
    """silu and the like keep channels_last and transposed strides, as torch's own."""
    for x in (
        rand(2, 3, 5, 5).to(memory_format=torch.channels_last),
        rand(7, 9).t(),
        rand(4, 6)[:, ::2],
        rand(1, 5).expand(3, 5),
    ):
        with torch.no_grad():
            stock = F.silu(x)
            with batch_invariant():
                got = F.silu(x)
        assert got.stride() == stock.stride()
        torch.testing.assert_close(got, stock)


def test_a_product_with_one_column_does_not_depend_on_the_rows() -> None:
    """einsum("tk,k->t") and baddbmm with N = 1 give a row its own bits whatever the number of rows."""
    x, v = rand(300, 768), rand(768)
    with torch.no_grad(), batch_invariant() as block:
        whole = torch.einsum("tk,k->t", x, v)
        added = torch.baddbmm(rand(1, 300, 1), x[None], v[None, :, None])
        for rows in (1, 2, 7, 16, 33, 200):
            assert identical(torch.einsum("tk,k->t", x[:rows], v), whole[:rows])
            assert identical(
                torch.baddbmm(rand(1, 300, 1)[:, :rows], x[None, :rows], v[None, :, None]), added[:, :rows]
            )
    assert not block.coverage().left


def test_masked_sums_do_not_mind_padding() -> None:
    """(h * mask).sum(1) has the bits of the request alone, whatever is appended, and whoever is beside it."""
    h = rand(3, 100, 64)
    with torch.no_grad(), batch_invariant() as block:
        alone = h[:1, :37].sum(1)
        for length in (37, 38, 64, 65, 100):
            mask = (torch.arange(length) < 37).float()[None, :, None]
            assert identical((h[:, :length] * mask).sum(1)[:1], alone)
    assert block.coverage().replaced["sum.dim_IntList"] == 6
    assert not block.coverage().at_risk


def test_a_softmax_over_hidden_scores_is_at_risk() -> None:
    """Attention written out in a model sums over the padding's places, too, and the coverage says so."""
    scores = rand(2, 2, 5, 5)
    with torch.no_grad(), batch_invariant() as block:
        torch.softmax(scores, -1)
        assert not block.coverage().at_risk
        torch.softmax(scores.masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(torch.float32).min), -1)
    assert block.coverage().at_risk == {"softmax float32: over scores of which some are hidden": 1}


def test_a_fault_of_ours_is_said_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel fails where torch's does not: left, with the error's words, and one warning, not one for each call."""
    monkeypatch.setattr(functions, "_warned", set())
    kernels = kernels_for("cpu")

    def broken(*args: Any) -> torch.Tensor:
        raise ValueError("a slip of ours")

    _ = kernels.softmax, kernels.linear  # set, so that they can be put back
    monkeypatch.setitem(vars(kernels), "softmax", broken)
    monkeypatch.setitem(vars(kernels), "linear", broken)
    x = rand(3, 8)
    with torch.no_grad(), batch_invariant() as block:
        with pytest.warns(RuntimeWarning, match="_softmax was left to torch.*a slip of ours"):
            assert torch.equal(torch.softmax(x, -1).sum(-1).round(), torch.ones(3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.softmax(x, -1)
        with pytest.warns(RuntimeWarning, match="linear"):
            F.linear(x, x)
    assert block.coverage().left == {
        "_softmax float32: ValueError in our kernel: a slip of ours": 2,
        "linear float32: ValueError in our kernel: a slip of ours": 1,
    }


def test_torchs_own_error_is_no_fault_of_ours(recwarn: pytest.WarningsRecorder) -> None:
    """Where torch raises as well it is torch's error that comes out, and nobody is warned of ours."""
    with batch_invariant(), pytest.raises((RuntimeError, IndexError)):
        torch.zeros(3, 2).index_add_(0, torch.tensor([7]), torch.ones(1, 2))
    assert not [w for w in recwarn if "nondet" in str(w.message)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_numbers_without_autograds_help(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that keeps the other factor under another name: the same bits and dtypes as stock's, and at risk."""
    x = (rand(7, 5) * 8).to(dtype)
    calls: list[Callable[[], torch.Tensor]] = [lambda: x * 0.3, lambda: x + 3, lambda: x - 0.1, lambda: x * True]
    stock = [call() for call in calls]
    with torch.no_grad(), batch_invariant() as usual:
        assert all(identical(call(), right) for call, right in zip(calls, stock, strict=True))
    assert not [what for what in usual.coverage().at_risk if "number" in what]
    functions._made.cache_clear()
    monkeypatch.setattr(functions, "_saved", lambda node: None)
    try:
        with torch.no_grad(), batch_invariant() as block:
            got = [call() for call in calls]
    finally:
        functions._made.cache_clear()
    assert [y.dtype for y in got] == [y.dtype for y in stock]
    assert all(identical(a, b) for a, b in zip(got, stock, strict=True))
    assert [what for what in block.coverage().at_risk if what.startswith("mul.Tensor with a number")]


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: rand(4, 6, 33).transpose(0, 1),
    "permuted": lambda: rand(4, 6, 33).permute(2, 0, 1),
    "every second": lambda: rand(4, 6, 33)[:, ::2],
    "expanded": lambda: rand(1, 6, 33).expand(3, 6, 33),
    "channels last": lambda: rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_torchs(layout: str) -> None:
    """What a caller may view or hand to C: a root's, a norm's with and without a gradient, a softmax's."""
    x, width = LAYOUTS[layout](), LAYOUTS[layout]().shape[-1]
    given = LAYOUTS[layout]().requires_grad_()
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: x.rsqrt(),
        lambda: F.layer_norm(x, (width,), torch.ones(width)),
        lambda: F.layer_norm(given, (width,), torch.ones(width)),
        lambda: torch.softmax(x, -1),
        lambda: F.silu(x),
    ]
    stock = [(y.shape, y.stride()) for y in (call() for call in calls)]
    with batch_invariant() as block:
        assert [(y.shape, y.stride()) for y in (call() for call in calls)] == stock
    assert block.coverage().replaced.total() == len(calls)
