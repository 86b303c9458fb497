"""Row operators on a CPU: a row's bits are its own, and near float64."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from nondet.core.compare import error_against, identical
from nondet.core.inputs import generator, make
from nondet.errors import UserError
from nondet.kernels import reference, stock
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.rows import cpu as cpu_rows
from nondet.kernels.rows.cpu import square_roots
from tests.build import accuracy_bound

ALL = ["sum", "mean", "softmax", "log_softmax", "logsumexp", "cross_entropy", "rms_norm", "rms_norm_residual"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def call(module: Any, operator: str, x: torch.Tensor) -> Any:
    """The operator of that module; a weight, target or residual is one that only a row's own elements decide."""
    weight = torch.linspace(0.5, 2.0, x.shape[-1], device=x.device).to(x.dtype)
    if operator == "rms_norm_residual":
        return torch.cat(module.rms_norm_residual(x, x.flip(-1), weight), -1)
    if operator == "cross_entropy":
        return module.cross_entropy(x, torch.full(x.shape[:-1], x.shape[-1] // 2, device=x.device))
    return getattr(module, operator)(x, *[weight] * (operator == "rms_norm"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", ALL)
def test_a_row_does_not_depend_on_the_batch(operator: str, dtype: torch.dtype) -> None:
    for width in (5, 1000):
        x = make("wide" if operator == "sum" else "bell", (70, width), dtype, "cpu", generator(5, "cpu"))
        whole = call(cpu_rows, operator, x)
        for rows in (1, 2, 3, 16, 33):
            for start in (0, 1, 70 - rows):
                assert identical(call(cpu_rows, operator, x[start : start + rows]), whole[start : start + rows])
        assert identical(call(cpu_rows, operator, x.t().contiguous().t()), whole)
        assert identical(call(cpu_rows, operator, x.view(7, 10, width)).reshape(whole.shape), whole)


@pytest.mark.parametrize("operator", ["sum", "mean"])
def test_one_long_row_on_two_threads(operator: str) -> None:
    """Stock torch shares out a single long row among its threads, and gives it other bits; here it keeps its own."""
    torch.set_num_threads(2)
    x = make("bell", (3, 100_000), torch.float32, "cpu", generator(6, "cpu"))
    whole = call(cpu_rows, operator, x)
    assert all(identical(call(cpu_rows, operator, x[i : i + 1]), whole[i : i + 1]) for i in range(3))
    together = call(stock, operator, x)
    if all(identical(call(stock, operator, x[i : i + 1]), together[i : i + 1]) for i in range(3)):
        pytest.skip(f"torch's own {operator} of one row of 100,000 agrees with three rows on this machine")


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype: torch.dtype) -> None:
    for operator in ALL:
        for kind in ("bell", "outlier"):
            x = make(kind, (9, 513), dtype, "cpu", generator(7, "cpu"))
            got, right = call(cpu_rows, operator, x), call(reference, operator, x)
            assert error_against(got, right).relative_norm <= accuracy_bound(dtype, 513), (operator, kind)


def test_logsumexp_and_cross_entropy_at_the_edges() -> None:
    """Infinities as in PyTorch; the loss is log_softmax's, 0 where ignored, NaN where there is no such column."""
    x = make("bell", (5, 40), torch.float32, "cpu", generator(8, "cpu"))
    x[1, ::2], x[2], x[3, 5], x[4, 0] = -torch.inf, -torch.inf, torch.nan, torch.inf
    torch.testing.assert_close(cpu_rows.logsumexp(x), torch.logsumexp(x, -1), equal_nan=True)
    assert cpu_rows.logsumexp(torch.rand(2, 0)).tolist() == [-torch.inf, -torch.inf]
    losses = cpu_rows.cross_entropy(x[:2].repeat(2, 1), torch.tensor([3, 39, -100, 40]))
    assert identical(losses[:2], -cpu_rows.log_softmax(x)[[0, 1], [3, 39]])
    assert losses[2] == 0
    assert losses[3].isnan()


def test_empty_and_misused() -> None:
    assert cpu_rows.softmax(torch.rand(0, 4)).shape == (0, 4)
    assert cpu_rows.sum(torch.rand(2, 0, 4)).shape == (2, 0)
    with pytest.raises(UserError, match="int64"):
        cpu_rows.sum(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(UserError, match="no gradients"):
        cpu_rows.mean(torch.rand(2, 2, requires_grad=True))


@pytest.mark.parametrize("name", ["Qwen3RMSNorm", "Gemma3RMSNorm", "Olmo2RMSNorm"])
def test_a_norm_of_transformers_gives_a_row_its_own_bits(name: str) -> None:
    """By one kernel, with the bits of its operators; where norms alone are replaced, the square root is torch's."""
    model = name.removesuffix("RMSNorm").lower()
    norm = vars(importlib.import_module(f"transformers.models.{model}.modeling_{model}"))[name](100)
    norm.weight.data = make("bell", (100,), torch.float32, "cpu", generator(5, "cpu"))
    x = make("wide", (1, 700, 100), torch.bfloat16, "cpu", generator(6, "cpu"))
    with torch.no_grad(), batch_invariant() as block:
        got = norm.to(x.dtype)(x)
        for start, stop in ((0, 1), (7, 10), (600, 617)):
            assert identical(norm(x[:, start:stop].clone()), got[:, start:stop].contiguous())
        with torch.enable_grad():
            assert identical(norm(x).detach(), got)
    assert dict(block.coverage().replaced) == {"RMSNorm module": 4, "mean.dim": 1, "rsqrt": 1}
    assert not block.coverage().at_risk
    with batch_invariant(["norm"]) as block:
        norm(x)
    assert dict(block.coverage().replaced) == {"mean.dim": 1}
    assert dict(block.coverage().at_risk) == {"rsqrt float32": 1}


def test_square_roots_are_correctly_rounded() -> None:
    """MKL's, which torch takes, are not; ours are those of the exact root, at every place of every length."""
    x = torch.rand(4099, generator=generator(7, "cpu")) * 1e3
    right = torch.from_numpy(np.sqrt(x.double().numpy())).float()
    assert identical(square_roots(x), right)
    assert identical(torch.cat([square_roots(part) for part in x.split(7)]), right)
    with torch.no_grad(), batch_invariant():
        assert identical(torch.rsqrt(x), 1.0 / right)
