"""Sums of class "fold" by Triton: right, carried from call to call without a change, and refused where unproven."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nondet.core.launch import listen
from nondet.errors import UserError
from nondet.kernels.fold import cuda, gradients
from nondet.kernels.matmul.triton_kernels import Tile
from tests.build import DEVICE, bell
from tests.kernels.tiers import at_length, compiled

DTYPES = [torch.float32, *at_length(torch.float16, *[torch.bfloat16] * (DEVICE == "cuda"))]
_TILES = (Tile(32, 32, 16, 4, 2), Tile(64, 32, 32, 4, 2), Tile(32, 64, 64, 4, 2))


def folded(grad: torch.Tensor, x: torch.Tensor, tile: Tile, *borders: int) -> torch.Tensor:
    acc = torch.zeros(grad.shape[1], x.shape[1], device=DEVICE)
    for begin, end in zip((0, *borders), (*borders, len(grad)), strict=True):
        cuda.launch(acc, grad[begin:end], x[begin:end], tile)
    return acc


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "n", "k"), [(16, 32, 32), (48, 65, 33)])
def test_the_product_is_right(dtype: torch.dtype, tokens: int, n: int, k: int) -> None:
    """On top of what was there, tails of N and K included; no farther from float64 than a float32 product."""
    grad, x = bell(tokens, n, dtype=dtype), bell(tokens, k, dtype=dtype, seed=1)
    acc = bell(n, k, seed=2)
    right = acc.double() + grad.double().t() @ x.double()
    cuda.fold_product(acc, grad, x)
    assert acc.dtype == torch.float32
    assert (acc - right).norm() / right.norm() < 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("chained_dot")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chain_is_carried_whatever_the_tile(dtype: torch.dtype) -> None:
    """Cut at multiples of 16 tokens or not at all, in steps of 16 to 64; a sum of separate parts is another order."""
    grad, x = bell(112, 40, dtype=dtype), bell(112, 48, dtype=dtype, seed=1)
    whole = folded(grad, x, cuda.ANCHOR)
    for tile in _TILES:
        for borders in ((), (16,), (32, 80)):
            assert torch.equal(folded(grad, x, tile, *borders), whole), (tile, borders)
    parts = folded(grad[:48], x[:48], cuda.ANCHOR) + folded(grad[48:], x[48:], cuda.ANCHOR)
    assert not torch.equal(parts, whole)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_taken_from_where_they_lie(dtype: torch.dtype) -> None:
    """By index, the bits of operands that were laid out before; what nobody's place holds is not read."""
    grad, x = bell(50, 40, dtype=dtype), bell(50, 24, dtype=dtype, seed=1)
    grad[8], x[31] = torch.nan, torch.inf  # padding
    layout = gradients.Layout((5, 10), [gradients.Span(4, 1, 9), gradients.Span(0, 0, 7), gradients.Span(1, 0, 10)])
    at = layout.places(50, x.device)
    assert at is not None
    assert at.taken is not None
    assert at.taken.tolist() == [*range(41, 50), *[-1] * 7, *range(7), *[-1] * 9, *range(10, 20), *[-1] * 6]
    laid = [torch.zeros(48, t.shape[1], dtype=dtype, device=DEVICE) for t in (grad, x)]
    for to, t in zip(laid, (grad, x), strict=True):
        to[at.slots] = t[at.rows]
    taken, right = torch.zeros(40, 24, device=DEVICE), torch.zeros(40, 24, device=DEVICE)
    cuda.fold_product(right, *laid)
    cuda.fold_product(taken, grad, x, at.taken)
    assert torch.isfinite(right).all()
    assert torch.equal(taken, right)


def test_steps_are_added_one_after_the_other() -> None:
    """As a loop would, in float64, on top of what was there; it is what ran."""
    rows, acc = bell(37, 70).double(), bell(70, seed=1).double()
    right = acc.clone()
    for row in rows:
        right += row
    with listen() as heard:
        cuda.fold_steps(acc, rows)
    assert torch.equal(acc, right)
    assert list(heard) == ["fold_steps"]


_COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nondet.kernels.fold import cuda

kernel = cuda._fold_kernel
names = kernel.arg_names
numbers = {"acc_ptr": "*fp32", "at_ptr": "*i32", "S": "i32", "N": "i32", "K": "i32"}
for tile in (cuda.ANCHOR, *cuda.WIDE):
    for by_index in (False, True):
        fixed = {"BLOCK_N": tile.block_m, "BLOCK_K": tile.block_n, "BLOCK_S": tile.block_k}
        fixed |= {} if by_index else {"at_ptr": None}
        types = {name: "constexpr" if name in fixed else numbers.get(name, "*bf16") for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in fixed and name != "S"}
        options = {"num_warps": tile.warps, "num_stages": 2 * tile.stages - 1 if by_index else tile.stages}
        source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=aligned)
        built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = built.asm["ptx"]
        print("built", built.metadata.shared, ptx.count("wgmma.mma_async.sync"), ptx.count("mma.sync.aligned.m16"))
"""


@pytest.mark.nightly
def test_its_tiles_compile_for_hopper(tmp_path: Path) -> None:
    """No GPU needed: products are warpgroups', asynchronous, from shared memory that suffices; hardly a spill."""
    said = compiled(_COMPILE, tmp_path)
    built = [tuple(map(int, found)) for found in re.findall(r"built (\d+) (\d+) (\d+)", said)]
    assert len(built) == 2 * (1 + len(cuda.WIDE))
    assert all(shared <= 227 * 1024 and warpgroups and not warps for shared, warpgroups, warps in built)
    assert "serialized" not in said
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", said)]
    assert len(spills) == len(built)
    assert max(spills) <= 256  # the widest, of half of the registers for its accumulator: 80 by Triton 3.6, 168 by 3.9


def test_operands_that_do_not_fit_are_refused() -> None:
    """Rather than something else computed: no multiple of 16, other shapes, another dtype or device."""
    acc, grad, x = torch.zeros(8, 8, device=DEVICE), bell(16, 8), bell(16, 8)
    for bad in ((acc, grad[:15], x[:15]), (acc[:4], grad, x), (acc, grad, x[:8]), (acc.t()[:, :4], grad[:, :4], x)):
        with pytest.raises(ValueError, match="fold_product got"):
            cuda.fold_product(*bad)
    with pytest.raises(NotImplementedError, match="float64"):
        cuda.fold_product(acc, grad.double(), x.double())


@pytest.mark.slow
def test_a_machine_that_cannot_carry_a_chain_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, kept) -> None:
    """The kernel loses what was there: the proof fails, and the line says where and what to do."""
    honest = cuda.launch

    def forgetful(acc: torch.Tensor, *rest: object) -> None:
        acc.zero_()
        honest(acc, *rest)

    monkeypatch.setattr(cuda, "certificates", lambda device: kept)
    cuda.tile_for.cache_clear()  # what an earlier test proved
    device = torch.device(DEVICE)
    assert cuda.tile_for(torch.float32, 33, 20, device) == cuda.ANCHOR
    monkeypatch.setattr(cuda, "launch", forgetful)
    with pytest.raises(UserError, match=r"not proven on this machine \(fold \| float32 N=33 K=21\)"):
        cuda.tile_for(torch.float32, 33, 21, device)
    cuda.tile_for.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("padding", ["packed", "left"])
def test_a_graph_holds_it(padding: str) -> None:
    """A layout that was met before copies nothing from the host; replayed on other numbers, the bits are theirs."""
    lengths = torch.tensor([100, 64, 7])
    x, grad = bell(171, 96, dtype=torch.bfloat16), bell(171, 64, dtype=torch.bfloat16, seed=1)
    gradients.linear_weight_gradient(x, grad, lengths, 0, padding)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gradients.linear_weight_gradient(x, grad, lengths, 0, padding)
    x.copy_(bell(171, 96, dtype=torch.bfloat16, seed=2))
    graph.replay()
    assert torch.equal(out, gradients.linear_weight_gradient(x, grad, lengths, 1, padding))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_gpus_chain_is_carried(dtype: torch.dtype) -> None:
    """One call or many, bit for bit, at a layer's size; and sums of rows and lookups as on a CPU."""
    grad, x = bell(1040, 1024, dtype=dtype), bell(1040, 3072, dtype=dtype, seed=1)

    def run(*borders: int) -> torch.Tensor:
        acc = torch.zeros(1024, 3072, device=DEVICE)
        for begin, end in zip((0, *borders), (*borders, 1040), strict=True):
            gradients.fold_product(acc, grad[begin:end], x[begin:end])
        return acc

    whole = run()
    assert torch.equal(whole, run(16)) and torch.equal(whole, run(*range(16, 1040, 16)))  # noqa: PT018
    right = grad.double().t() @ x.double()
    stock = torch.mm(grad.t(), x)
    # float32 in one chain of 1,040 additions, cuBLAS's in parts: 1.98 times its error on an H200
    assert (whole - right).norm() <= (2.2 if dtype == torch.float32 else 1.1) * (stock - right).norm()
    rows, ids = bell(1040, 64), torch.randint(0, 40, (1040,))
    on_gpu, on_cpu = (torch.zeros(64, dtype=torch.float64, device=d) for d in (DEVICE, "cpu"))
    gradients.fold_rows(on_gpu, rows[:, None])
    gradients.fold_rows(on_cpu, rows[:, None].cpu())
    assert torch.equal(on_gpu.cpu(), on_cpu)
    table, other = torch.zeros(40, 64, device=DEVICE), torch.zeros(40, 64)
    gradients.fold_lookup(table, rows, ids.to(DEVICE))
    gradients.fold_lookup(other, rows.cpu(), ids)
    assert torch.equal(table.cpu(), other)
