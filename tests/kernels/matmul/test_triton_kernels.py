"""The chain matmul, its TMA member and that of Hopper for few rows: equal bits in any batch, and what they take."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from nondet.core import inputs
from nondet.core.compare import identical
from nondet.kernels import reference
from nondet.kernels.matmul import hopper
from nondet.kernels.matmul.cuda import Operands, member, proof_inputs
from nondet.kernels.matmul.gluon_kernels import barriers_of
from nondet.kernels.matmul.hopper import HOPPER_TILES, bind_hopper, hopper_takes
from nondet.kernels.matmul.triton_kernels import TMA_TILES, Tile, anchor, bind_tma, matmul_chain, tiles, tma_takes
from tests.build import DEVICE, accuracy_bound, bell, error
from tests.kernels.tiers import at_length, on_hopper, untouched

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
brain = functools.partial(bell, dtype=torch.bfloat16)


def run(bind: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    out = torch.full((1, a.shape[1], b.shape[2]), torch.nan, dtype=a.dtype, device=a.device)
    bind(a, b, bias, tile)(a, b, bias, out)
    return out


@pytest.mark.parametrize("by_rows", [True, *at_length(False)])
def test_tails_layouts_and_bias(chained_dot, by_rows):
    """Sizes that fill no tile, either layout of b, a bias: within the bound, and the bits of the pointer kernel."""
    a, weight, bias = half(1, 37, 72), half(56, 72, seed=1), half(56, seed=2)
    b = weight.T.contiguous()[None] if by_rows else weight.T[None]
    tile = Tile(64, 64, 32, 4, 2)
    for extra in (None, bias):
        out = run(bind_tma, a, b, extra, tile)
        exact = reference.linear(a[0], weight, extra)
        assert error(out[0], exact) <= accuracy_bound(torch.float16, 73)
        assert identical(out, matmul_chain(a, b, extra))
    assert not identical(run(bind_tma, a, b, bias, tile), run(bind_tma, a, b, None, tile))


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
            assert identical(run(bind_tma, a, b, None, tile), wanted)


@on_hopper
@pytest.mark.parametrize(
    ("m", "k", "n", "dtype"),
    [
        (1, 4096, 1024, torch.bfloat16),
        (130, 14336, 1024, torch.bfloat16),
        (37, 1000, 777, torch.bfloat16),
        (37, 1000, 777, torch.float16),
    ],
)
def test_every_tile_for_few_rows_has_the_bits_of_the_class(m, k, n, dtype):
    """On inputs that show any other order, at sizes that fill no tile, there with a bias as well."""
    a, weight, bias = brain(1, m, k, dtype=dtype), brain(n, k, dtype=dtype), brain(n, dtype=dtype)
    cases = list(proof_inputs(Operands(a, weight.T[None], bias if n == 777 else None, alignment=256)))
    assert cases
    assert HOPPER_TILES
    for _, (left, right, added) in cases:
        wanted = matmul_chain(left, right, added, anchor(dtype))
        for tile in HOPPER_TILES:
            assert hopper_takes(left, right, tile)
            for _ in range(3):  # what lies behind the rows in shared memory differs from call to call
                assert identical(run(bind_hopper, left, right, added, tile), wanted)


@on_hopper
@pytest.mark.parametrize("captured", [False, True])
def test_an_early_start_reads_nothing_too_early(captured):
    """Products that start before the kernel ahead has ended: each reads what that one wrote, as x and as the weight, in
    a chain of 24 against the same chain with a wait after every kernel, 40 times."""
    m, width, depth = 8, 1024, 24
    tile = next(t for t in HOPPER_TILES if t.block_n < 32)
    pool = brain(depth, width, width) / 32
    x, weight = torch.empty_like(brain(1, m, width)), torch.empty_like(pool[0])
    between, out = torch.empty_like(x), torch.empty_like(x)
    launch = bind_hopper(x, weight.T[None], None, tile)

    def chain(wait: bool) -> None:
        """x through every weight twice, the second product right behind the first."""
        left = x
        for number in range(depth):
            weight.copy_(pool[number])
            for right, result in ((left, between), (between, out)):
                if wait:
                    torch.cuda.synchronize()
                launch(right, weight.T[None], None, result)
            left = out

    x.copy_(brain(1, m, width))
    chain(True)  # compiled here, not in a capture
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            chain(False)
    for turn in range(40):
        x.copy_(brain(1, m, width, seed=turn))
        chain(True)
        wanted = out.clone()
        out.fill_(torch.nan)
        if captured:
            graph.replay()
        else:
            chain(False)
        torch.cuda.synchronize()
        assert bool(wanted.isfinite().all())
        assert identical(out, wanted), turn


@on_hopper
def test_rows_that_are_not_there_do_not_reach_the_result():
    """The rows that wgmma computes beyond those brought in are never written, whatever they hold."""
    a, weight = brain(1, 17, 4096), brain(64, 4096)
    room = torch.full((40, 64), 7.0, dtype=a.dtype, device=DEVICE)
    bind_hopper(a, weight.T[None], None, HOPPER_TILES[0])(a, weight.T[None], None, room[:17])
    assert bool((room[17:] == 7.0).all())
    assert identical(room[None, :17], matmul_chain(a, weight.T[None]))


@on_hopper
def test_the_kernel_for_few_rows_takes_what_it_can_read():
    tile = HOPPER_TILES[0]
    a, b = brain(1, 8, 64), brain(32, 64).T[None]
    assert hopper_takes(a, b, tile)
    assert not hopper_takes(a, b.contiguous(), tile)
    assert not hopper_takes(a.float(), b.float(), tile)
    assert not hopper_takes(brain(2, 8, 64), brain(2, 32, 64).mT, tile)
    assert not hopper_takes(brain(1, 8, 72)[:, :, 1:65], b, tile)
    bound = member(f"hopper:{tile.name}", Operands(a, b))
    assert not bound.is_anchor
    assert member(f"hopper:{tile.name}", Operands(a, b, tf32=True)) is None


def test_tiles_for_few_rows_that_do_not_fit():
    """What has no room in shared memory or registers, or is no part of 64 rows, is no tile; and no CPU takes one."""
    assert all(hopper.tile_fits(tile) for tile in HOPPER_TILES)
    for tile in (
        Tile(64, 64, 256, 4, 8), Tile(128, 32, 256, 4, 2), Tile(16, 24, 256, 4, 4), Tile(16, 32, 96, 4, 4),
        Tile(16, 32, 256, 4, 4), Tile(4, 8, 256, 4, 4),
    ):  # fmt: skip
        assert not hopper.tile_fits(tile)
    if DEVICE == "cpu":
        assert not hopper_takes(torch.zeros(1, 8, 64).half(), torch.zeros(1, 64, 32).half(), HOPPER_TILES[0])


def test_barriers_are_found_or_refused():
    """A kernel whose barriers can't be told from its text is never launched: it would wait for ever."""
    init = "add.s32 \t%r7, %r1, 1024;\n@%p1 mbarrier.init.shared::cta.b64 [%r7], 1;\n"
    second = "add.s32 \t%r8, %r1, 1040;\n@%p1 mbarrier.init.shared::cta.b64 [%r8], 4;\n"
    assert barriers_of(init + second, 4) == (1024, 1040)
    for text in ("", init, second + init, init + second.replace("1040", "%r2"), init + second.replace(", 4;", ", 1;")):
        with pytest.raises(RuntimeError, match="not recognised"):
            barriers_of(text, 4)
