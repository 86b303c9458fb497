"""Gradients as operators: the bits of autograd under the block, near float64, and no row sees another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nondet
from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.core.launch import listen
from nondet.core.registry import load_implementation, operators
from nondet.kernels.dispatch.replacements import root
from nondet.kernels.gradients import cuda
from nondet.kernels.rows import cuda as rows
from tests.build import DEVICE, bell
from tests.kernels.tiers import at_length, exposed

FORWARD: dict[str, Any] = {
    "softmax_gradient": lambda x: x.softmax(-1),
    "log_softmax_gradient": lambda x: x.log_softmax(-1),
    "silu_gradient": F.silu,
    "rms_norm_gradient": lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
    "attention_gradient": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
}
SIZES = {"W": 300, "T": 20, "Hq": 2, "Hkv": 1, "D": 16}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def operands(name: str, dtype: str, device: str, rows: int = 9, seed: int = 5) -> list[torch.Tensor]:
    rng = generator(seed, device)
    sizes = [tuple(({"M": rows} | SIZES)[a] for a in operand.axes) for operand in operators()[name].operands]
    return [make("bell", size, getattr(torch, dtype), device, rng) for size in sizes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", *at_length("bfloat16")])
@pytest.mark.parametrize("name", FORWARD)
def test_it_is_what_autograd_gives_under_the_block(name: str, dtype: str, device: str) -> None:
    """So what is certified and timed is what a trainer runs; and each row alone has the bits that it has in a batch."""
    call = load_implementation(name, "invariant", device).call
    x, gradient, *others = operands(name, dtype, device)
    found = call(x, gradient, *others)
    leaves = [t.clone().requires_grad_() for t in (x, *others)]
    with nondet.batch_invariant(training=True) as block:
        of = torch.autograd.grad(FORWARD[name](*leaves), leaves, gradient)
    assert not exposed(block)
    assert identical(found, torch.cat(of, 1) if name == "attention_gradient" else of[0])
    batched = [o.axes[0] == "M" for o in operators()[name].operands]
    for i in (0, 4, 8):
        alone = [t[i : i + 1] if mine else t for t, mine in zip((x, gradient, *others), batched, strict=True)]
        assert identical(call(*alone), found[i : i + 1])


DTYPES = [torch.float32, *at_length(torch.float16, *[torch.bfloat16] * (DEVICE == "cuda"))]
SHAPES = [(5, 1003), *at_length((70, 128), (1, 7)), (3, 17000)]  # the last of several chunks


def exp(x: torch.Tensor) -> torch.Tensor:
    """What the kernel runs on: CUDA's, or the interpreter's."""
    return x.exp() if DEVICE == "cuda" else torch.from_numpy(np.exp(x.numpy()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "width"), SHAPES)
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "width"), SHAPES[:3])
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


@pytest.mark.slow
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
