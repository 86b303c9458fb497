"""The chain matmul: right against float64, indifferent to strides and batch, refusing what it cannot do."""

from __future__ import annotations

import functools

import pytest
import torch

from nondet.core import inputs
from nondet.core.compare import identical
from nondet.kernels import reference
from nondet.kernels.matmul.triton_kernels import TMA_TILES, Tile, anchor, bind_tma, matmul_chain, tiles, tma_takes
from tests.build import DEVICE, accuracy_bound, bell, error
from tests.kernels.tiers import at_length, untouched

pytestmark = pytest.mark.slow


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return matmul_chain(x[None], weight.T[None], bias)[0]


def test_bias_is_added_before_the_one_rounding():
    """2048 + 1 + 1 is 2050 in float16; rounding before the bias would give 2048, as two operators do."""
    x = torch.tensor([[2048.0, 1.0]], device=DEVICE, dtype=torch.float16)
    ones = torch.ones(1, 2, device=DEVICE, dtype=torch.float16)
    bias = torch.ones(1, device=DEVICE, dtype=torch.float16)
    assert linear(x, ones, bias).item() == 2050.0
    assert (linear(x, ones) + bias).item() == 2048.0


def test_batched_equals_one_by_one():
    a, b = bell(3, 5, 40), bell(3, 40, 9, seed=1)
    together = matmul_chain(a, b.mT.contiguous().mT)
    for i in range(3):
        assert identical(together[i], matmul_chain(a[i : i + 1], b[i : i + 1])[0])
    assert not identical(together[:1], matmul_chain(a[:1], b[1:2]))
    shared = matmul_chain(a, b[:1].expand(3, 40, 9))
    assert identical(shared[2:], matmul_chain(a[2:], b[:1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_bits_do_not_depend_on_tile_or_batch(dtype, kind):
    """All tiles, all M and every place give one row the same bits; another chunk of K would not."""
    rng = inputs.generator(3, DEVICE)
    x, weight = inputs.make(kind, (300, 4096), dtype, DEVICE, rng), inputs.make(kind, (520, 4096), dtype, DEVICE, rng)
    whole = linear(x, weight)
    for tile in tiles(dtype):
        assert identical(matmul_chain(x[None], weight.T[None], tile=tile)[0], whole)
    for m in (1, 2, 16, 17, 33, 64, 65, 129, 299):
        assert identical(linear(x[:m], weight), whole[:m])
        assert identical(linear(x[-m:], weight), whole[-m:])
    halves = linear(x[:, :2048], weight[:, :2048]).float() + linear(x[:, 2048:], weight[:, 2048:]).float()
    if (whole.isfinite() & (whole != 0)).any():  # else NaN, infinities, and zeros whose signs are the order's
        # integers are exact in float32 in every order: there the control must not differ
        assert identical(halves.to(dtype), whole) == (kind in (*inputs.EXACT, "underflow") and dtype == torch.float32)


@pytest.mark.gpu
def test_float32_is_one_chain_in_order():
    """2^24 absorbs each 1 added to it: a chain gives 2^24 forwards and 2^24 + 4095 backwards, a tree gives neither."""
    x = torch.ones(1, 4096, device=DEVICE)
    x[0, 0] = 2.0**24
    ones = torch.ones(1, 4096, device=DEVICE)
    assert linear(x, ones).item() == 2.0**24
    assert linear(x.flip(1), ones).item() == 2.0**24 + 4096


def test_steps_beyond_32_bits(chained_dot):
    """A tile's step along K, times a stride, may pass 2^31 elements: the second step has to land where it should."""
    far, depth = 2**27, 17
    room = untouched((depth - 1) * far + 8)
    a, b = bell(3, depth, dtype=torch.float16), bell(depth, 5, dtype=torch.float16, seed=1)
    tile = Tile(16, 16, 16, 4, 1)
    near = matmul_chain(a[None], b[None], tile=tile)
    wide = room.as_strided((3, depth), (1, far)).copy_(a)
    assert identical(matmul_chain(wide[None], b[None], tile=tile), near)
    tall = room.as_strided((depth, 5), (far, 1)).copy_(b)
    assert identical(matmul_chain(a[None], tall[None], tile=tile), near)


half = functools.partial(bell, dtype=torch.float16)


def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    out = torch.full((1, a.shape[1], b.shape[2]), torch.nan, dtype=a.dtype, device=a.device)
    bind_tma(a, b, bias, tile)(a, b, bias, out)
    return out


@pytest.mark.parametrize("by_rows", [True, *at_length(False)])
def test_tails_layouts_and_bias(chained_dot, by_rows):
    """Sizes that fill no tile, either layout of b, a bias: within the bound, and the bits of the pointer kernel."""
    a, weight, bias = half(1, 37, 72), half(56, 72, seed=1), half(56, seed=2)
    b = weight.T.contiguous()[None] if by_rows else weight.T[None]
    tile = Tile(64, 64, 32, 4, 2)
    for extra in (None, bias):
        out = run(a, b, extra, tile)
        exact = reference.linear(a[0], weight, extra)
        assert error(out[0], exact) <= accuracy_bound(torch.float16, 73)
        assert identical(out, matmul_chain(a, b, extra))
    assert not identical(run(a, b, bias, tile), run(a, b, None, tile))


def test_takes_what_the_accelerator_can_read():
    a, b = half(1, 8, 64), half(1, 64, 32)
    assert tma_takes(a, b)
    assert tma_takes(a, half(32, 64).T[None])
    assert not tma_takes(a.float(), b.float())
    assert not tma_takes(half(2, 8, 64), half(2, 64, 32))
    assert not tma_takes(half(1, 8, 65)[:, :, :64], b)
    assert not tma_takes(half(1, 8, 72)[:, :, 1:65], b)
    assert not tma_takes(a[:, :0], b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tile_has_the_bits_of_the_class(dtype):
    a, weight = bell(1, 300, 1032, dtype=dtype), bell(520, 1032, seed=1, dtype=dtype)
    for b in (weight.T[None], weight.T.contiguous()[None]):
        wanted = matmul_chain(a, b, tile=anchor(dtype))
        assert TMA_TILES
        for tile in TMA_TILES:
            assert identical(run(a, b, None, tile), wanted)
