"""Gradients of softmaxes and RMSNorm by Triton: the bits of the same formulas in torch's operators, and a row's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nondet.core.compare import identical
from nondet.core.launch import listen
from nondet.kernels.dispatch.replacements import root
from nondet.kernels.gradients import cuda
from nondet.kernels.rows import cuda as rows
from tests.build import DEVICE, bell
from tests.kernels.tiers import at_length

pytestmark = pytest.mark.slow
DTYPES = [torch.float32, *at_length(torch.float16, *[torch.bfloat16] * (DEVICE == "cuda"))]
SIZES = [(5, 1003), *at_length((70, 128), (1, 7)), (3, 17000)]  # the last of several chunks


def exp(x: torch.Tensor) -> torch.Tensor:
    """What the kernel runs on: CUDA's, or the interpreter's."""
    return x.exp() if DEVICE == "cuda" else torch.from_numpy(np.exp(x.numpy()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "width"), SIZES)
def test_a_softmax_s_gradient_has_the_formulas_bits(dtype: torch.dtype, m: int, width: int) -> None:
    """Operator by operator in float32, and a row by itself; of the other formula they are not."""
    g, y = bell(m, width, dtype=dtype), bell(m, width, dtype=dtype, seed=1)
    wide, out = g.float(), y.float()
    plain = ((wide - rows.sum(wide * out)[:, None]) * out).to(dtype)
    logged = (wide - exp(out) * rows.sum(wide)[:, None]).to(dtype)
    with listen() as heard:
        found = [cuda.softmax_gradient(g, y, dtype, log=log) for log in (False, True)]
    assert identical(found[0], plain)
    assert identical(found[1], logged)
    assert [name.partition("[")[0] for name in heard] == ["softmax_gradient", "log_softmax_gradient"]
    for log in (False, True):
        assert identical(cuda.softmax_gradient(g[-1:], y[-1:], dtype, log=log), found[log][-1:])
    assert identical(cuda.softmax_gradient(g, y, torch.float32, log=False).to(dtype), plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "width"), SIZES[:3])
def test_a_norm_s_gradient_has_the_formulas_bits(dtype: torch.dtype, m: int, width: int) -> None:
    """Operator by operator in float32; a row by itself; a row of several chunks is left to the operators."""
    g, x, weight = (bell(m, width, dtype=dtype, seed=seed) for seed in range(3))
    wide, weighted = x.float(), g.float() * weight[0].float()
    scale = 1.0 / root(rows.mean(wide * wide) + 1e-6)
    normed = wide * scale[:, None]
    right = ((weighted - normed * rows.mean(weighted * normed)[:, None]) * scale[:, None]).to(dtype)
    found = cuda.rms_norm_gradient(g, x, weight[0].contiguous(), 1e-6)
    assert identical(found[0], right)
    assert identical(found[1], scale)
    alone = cuda.rms_norm_gradient(g[-1:], x[-1:], weight[0].contiguous(), 1e-6)
    assert identical(alone[0], right[-1:])
    long = bell(1, 16385, dtype=dtype)
    assert cuda.rms_norm_gradient(long, long, long[0], 1e-6) is None


@pytest.mark.parametrize("m", [2, 65, *at_length(1, 300, 5000, 16385)])
def test_a_sum_over_rows_has_the_bits_of_a_sum_over_a_row(m: int) -> None:
    """Of x, and of g (x scale) as a norm's weight has it; rows in another order have other bits."""
    x, g, scale = bell(m, 70), bell(m, 70, seed=1), bell(m, seed=2).abs()
    found = cuda.sum_over_rows(x, torch.float32)
    assert identical(found, rows.sum(x.t()))
    assert identical(cuda.sum_over_rows(x, torch.float16), rows.sum(x.t()).half())
    right = rows.sum((g * (x * scale[:, None])).t())
    assert identical(cuda.sum_over_rows(x, torch.float32, g, scale), right)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert identical(cuda.sum_over_rows(x[order].contiguous(), torch.float32), found) == (m < 3)
