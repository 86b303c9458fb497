"""K cut up, on a CPU and by Triton: a number of parts changes bits, a size of parts does not."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from nondet.core import inputs
from nondet.core.compare import error_against, identical
from nondet.core.launch import listen
from nondet.kernels import reference
from nondet.kernels.matmul import split_k_cpu, split_k_cuda
from nondet.kernels.matmul.cuda import matmul
from tests.build import DEVICE, accuracy_bound
from tests.kernels.tiers import at_length

MODULES = pytest.mark.parametrize("module", [split_k_cpu, pytest.param(split_k_cuda, marks=pytest.mark.slow)])


def operands(module, m=4, k=700, n=40, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    device = DEVICE if module is split_k_cuda else "cpu"
    rng = inputs.generator(0, device)
    return inputs.make("wide", (m, k), dtype, device, rng), inputs.make("bell", (k, n), dtype, device, rng)


def test_a_drawn_order_changes_bits_from_call_to_call() -> None:
    """Eight parts in an order drawn afresh give several results; two parts give one, since a sum of two commutes."""
    a, b = operands(split_k_cpu)
    with listen() as heard:
        split_k_cpu.split_k(a, b, splits=4, ordered=False)
    assert any("standing for atomics" in name for name in heard)
    eight = {split_k_cpu.split_k(a, b, splits=8, ordered=False).numpy().tobytes() for _ in range(20)}
    two = {split_k_cpu.split_k(a, b, splits=2, ordered=False).numpy().tobytes() for _ in range(20)}
    assert len(eight) > 1
    assert len(two) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_workers_nor_the_batch_change_fixed_chunks(dtype: torch.dtype) -> None:
    """Real threads, any number of them, and any number of rows: the same bits."""
    a, b = operands(split_k_cpu, 9, 1500, 20, dtype)
    whole = split_k_cpu.fixed_chunk(a, b, workers=1)
    for workers in (2, 3, 64):
        assert identical(split_k_cpu.fixed_chunk(a, b, workers=workers), whole)
    assert identical(split_k_cpu.fixed_chunk(a[4:5], b, workers=2), whole[4:5])
    if dtype == torch.float32:
        assert not identical(split_k_cpu.fixed_chunk(a, b, workers=1, chunk=100), whole)


@pytest.mark.slow
def test_fixed_chunks_of_triton_do_not_depend_on_workers() -> None:
    """One worker adding in registers or many leaving chunks to an ordered sum: the same bits. Other chunks: not."""
    a, b = operands(split_k_cuda)
    alone = split_k_cuda.fixed_chunk(a, b, workers=1, chunk=128)
    for workers in (3, 100):
        assert identical(split_k_cuda.fixed_chunk(a, b, workers=workers, chunk=128), alone)
    assert not identical(split_k_cuda.fixed_chunk(a, b, workers=1, chunk=64), alone)
    by_column = b.T.contiguous().T  # as a linear layer has it
    assert identical(split_k_cuda.fixed_chunk(a, by_column, workers=2, chunk=128), alone)
    # equal cuts are one order of reduction, and one part is the serial chain
    four = split_k_cuda.split_k(a[:, :512], b[:512], splits=4, ordered=True)
    assert identical(four, split_k_cuda.fixed_chunk(a[:, :512], b[:512], workers=2, chunk=128))
    for ordered in (True, False):
        assert identical(split_k_cuda.split_k(a, b, splits=1, ordered=ordered), matmul(a, b))


@MODULES
@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.float16)])
def test_both_are_within_the_accuracy_bound(module: ModuleType, dtype: torch.dtype) -> None:
    """However K is cut, with tails in every direction, nothing is lost or counted twice."""
    a, b = operands(module, 3, 257, 33, dtype)
    results = [module.split_k(a, b, splits=s, ordered=o) for s in (1, 3, 40) for o in (True, False)]
    results += [module.fixed_chunk(a, b, workers=w, chunk=c) for w, c in ((1, 64), (2, 30), (9, 1000))]
    for out in results:
        assert out.dtype == dtype
        assert error_against(out, reference.matmul(a, b)).relative_norm <= accuracy_bound(dtype, 257)


@MODULES
def test_misuse_is_refused(module: ModuleType) -> None:
    a, b = operands(module, 3, 8, 4)
    for call, given, how, words in (
        (module.split_k, (a, b), {"splits": 0, "ordered": True}, "splits of at least 1, got 0"),
        (module.fixed_chunk, (a, b), {"workers": 1, "chunk": 0}, "chunk of at least 1"),
        (module.split_k, (a, a), {"splits": 1, "ordered": True}, "takes"),
        (module.fixed_chunk, (a.double(), b.double()), {"workers": 1}, "float64"),
    ):
        with pytest.raises(NotImplementedError if words == "float64" else ValueError, match=words):
            call(*given, **how)
    assert module.split_k(a[:0], b, splits=2, ordered=True).shape == (0, 4)
    assert not module.split_k(a[:, :0], b[:0], splits=3, ordered=True).any()
