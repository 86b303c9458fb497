"""The TMA member of class "chain": right at tails and in both layouts, and the bits of the other Triton kernel."""

from __future__ import annotations

import pytest
import torch

from nondet.core import compare, inputs
from nondet.kernels import reference
from nondet.kernels.matmul.triton_kernels import TMA_TILES, Tile, anchor, bind_tma, matmul_chain, tma_takes
from tests.build import DEVICE, accuracy_bound


def bell(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return inputs.make("bell", shape, dtype, DEVICE, inputs.generator(seed, DEVICE))


def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    out = torch.full((1, a.shape[1], b.shape[2]), torch.nan, dtype=a.dtype, device=a.device)
    bind_tma(a, b, bias, tile)(a, b, bias, out)
    return out


@pytest.mark.parametrize("by_rows", [True, False])
def test_tails_layouts_and_bias(chained_dot, by_rows):
    """Sizes that fill no tile, either layout of b, a bias: within the bound, and the bits of the pointer kernel."""
    a, weight, bias = bell(1, 37, 72), bell(56, 72, seed=1), bell(56, seed=2)
    b = weight.T.contiguous()[None] if by_rows else weight.T[None]
    tile = Tile(64, 64, 32, 4, 2)
    for extra in (None, bias):
        out = run(a, b, extra, tile)
        exact = reference.linear(a[0], weight, extra)
        assert compare.error_against(out[0], exact).relative_norm <= accuracy_bound(torch.float16, 73)
        assert compare.identical(out, matmul_chain(a, b, extra))
    assert not compare.identical(run(a, b, bias, tile), run(a, b, None, tile))


def test_takes_what_the_accelerator_can_read():
    """Rows that start off a 16-byte border, other dtypes and batches are for the pointer kernel."""
    a, b = bell(1, 8, 64), bell(1, 64, 32)
    assert tma_takes(a, b)
    assert tma_takes(a, bell(32, 64).T[None])
    assert not tma_takes(a.float(), b.float())
    assert not tma_takes(bell(2, 8, 64), bell(2, 64, 32))
    assert not tma_takes(bell(1, 8, 65)[:, :, :64], b)
    assert not tma_takes(bell(1, 8, 72)[:, :, 1:65], b)
    assert not tma_takes(a[:, :0], b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tile_has_the_bits_of_the_class(dtype):
    """Also at sizes that fill no tile."""
    a, weight = bell(1, 300, 1032, dtype=dtype), bell(520, 1032, seed=1, dtype=dtype)
    for b in (weight.T[None], weight.T.contiguous()[None]):
        wanted = matmul_chain(a, b, tile=anchor(dtype))
        assert TMA_TILES
        for tile in TMA_TILES:
            assert compare.identical(run(a, b, None, tile), wanted)
