"""The Hopper member of class "chain" for few rows: the class's bits at every tail, and what it leaves to others."""

from __future__ import annotations

import pytest
import torch

from nondet.core import compare, inputs
from nondet.kernels.matmul import hopper
from nondet.kernels.matmul.cuda import Operands, member, proof_inputs
from nondet.kernels.matmul.gluon_kernels import barriers_of
from nondet.kernels.matmul.hopper import HOPPER_TILES, bind_hopper, hopper_takes
from nondet.kernels.matmul.triton_kernels import Tile, anchor, matmul_chain
from tests.build import DEVICE
from tests.kernels.tiers import on_hopper


def bell(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return inputs.make("bell", shape, dtype, DEVICE, inputs.generator(seed, DEVICE))


def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    out = torch.full((1, a.shape[1], b.shape[2]), torch.nan, dtype=a.dtype, device=a.device)
    bind_hopper(a, b, bias, tile)(a, b, bias, out)
    return out


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
def test_every_tile_has_the_bits_of_the_class(m, k, n, dtype):
    """On inputs that show any other order, at sizes that fill no tile, there with a bias as well."""
    a, weight, bias = bell(1, m, k, dtype=dtype), bell(n, k, dtype=dtype), bell(n, dtype=dtype)
    cases = list(proof_inputs(Operands(a, weight.T[None], bias if n == 777 else None, alignment=256)))
    assert cases
    assert HOPPER_TILES
    for _, (left, right, added) in cases:
        wanted = matmul_chain(left, right, added, anchor(dtype))
        for tile in HOPPER_TILES:
            assert hopper_takes(left, right, tile)
            for _ in range(3):  # what lies behind the rows in shared memory differs from call to call
                assert compare.identical(run(left, right, added, tile), wanted)


@on_hopper
@pytest.mark.parametrize("captured", [False, True])
def test_an_early_start_reads_nothing_too_early(captured):
    """Products that start before the kernel ahead has ended: each reads what that one wrote, as x and as the weight, in
    a chain of 24 against the same chain with a wait after every kernel, 40 times."""
    m, width, depth = 8, 1024, 24
    tile = next(t for t in HOPPER_TILES if t.block_n < 32)
    pool = bell(depth, width, width) / 32
    x, weight = torch.empty_like(bell(1, m, width)), torch.empty_like(pool[0])
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

    x.copy_(bell(1, m, width))
    chain(True)  # compiled here, not in a capture
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            chain(False)
    for turn in range(40):
        x.copy_(bell(1, m, width, seed=turn))
        chain(True)
        wanted = out.clone()
        out.fill_(torch.nan)
        if captured:
            graph.replay()
        else:
            chain(False)
        torch.cuda.synchronize()
        assert bool(wanted.isfinite().all())
        assert compare.identical(out, wanted), turn


@on_hopper
def test_rows_that_are_not_there_do_not_reach_the_result():
    """The rows that wgmma computes beyond those brought in are never written, whatever they hold."""
    a, weight = bell(1, 17, 4096), bell(64, 4096)
    room = torch.full((40, 64), 7.0, dtype=a.dtype, device=DEVICE)
    bind_hopper(a, weight.T[None], None, HOPPER_TILES[0])(a, weight.T[None], None, room[:17])
    assert bool((room[17:] == 7.0).all())
    assert compare.identical(room[None, :17], matmul_chain(a, weight.T[None]))


@on_hopper
def test_takes_what_it_can_read():
    tile = HOPPER_TILES[0]
    a, b = bell(1, 8, 64), bell(32, 64).T[None]
    assert hopper_takes(a, b, tile)
    assert not hopper_takes(a, b.contiguous(), tile)
    assert not hopper_takes(a.float(), b.float(), tile)
    assert not hopper_takes(bell(2, 8, 64), bell(2, 32, 64).mT, tile)
    assert not hopper_takes(bell(1, 8, 72)[:, :, 1:65], b, tile)
    bound = member(f"hopper:{tile.name}", Operands(a, b))
    assert not bound.is_anchor
    assert member(f"hopper:{tile.name}", Operands(a, b, tf32=True)) is None


def test_tiles_that_do_not_fit():
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
