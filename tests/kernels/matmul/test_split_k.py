"""K cut up on a CPU: a number of parts changes bits, a size of parts does not."""

from __future__ import annotations

import pytest
import torch

from nondet.core import compare, inputs
from nondet.core.compare import error_against, identical
from nondet.core.inputs import generator, make
from nondet.core.launch import listen
from nondet.kernels import reference
from nondet.kernels.matmul.split_k_cpu import fixed_chunk, split_k
from nondet.kernels.matmul.split_k_cuda import fixed_chunk as cuda_fixed_chunk
from nondet.kernels.matmul.split_k_cuda import split_k as cuda_split_k
from nondet.kernels.matmul.triton_kernels import matmul
from tests.build import DEVICE, accuracy_bound


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(8, "cpu")
    return make("wide", (9, 1500), dtype, "cpu", rng), make("bell", (1500, 20), dtype, "cpu", rng)


def test_the_number_of_parts_changes_bits() -> None:
    """Ordered or not, another number of parts is another sum; the same number, in order, is the same."""
    a, b = operands()
    results = [split_k(a, b, splits=s, ordered=True) for s in (1, 2, 8)]
    assert not identical(results[0], results[1])
    assert not identical(results[0], results[2])
    assert identical(split_k(a, b, splits=8, ordered=True), results[2])


def test_a_drawn_order_changes_bits_from_call_to_call() -> None:
    """Eight parts in an order drawn afresh give several results; two parts give one, since a sum of two commutes."""
    a, b = operands()
    eight = {split_k(a, b, splits=8, ordered=False).numpy().tobytes() for _ in range(20)}
    two = {split_k(a, b, splits=2, ordered=False).numpy().tobytes() for _ in range(20)}
    assert len(eight) > 1
    assert len(two) == 1


def test_a_stand_in_says_that_it_is_one() -> None:
    """What stands for a GPU's atomics on a CPU is named so in the row."""
    a, b = operands()
    with listen() as heard:
        split_k(a, b, splits=4, ordered=False)
    assert any("standing for atomics" in name for name in heard)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_workers_nor_the_batch_change_fixed_chunks(dtype: torch.dtype) -> None:
    """Real threads, any number of them, and any number of rows: the same bits."""
    a, b = operands(dtype)
    whole = fixed_chunk(a, b, workers=1)
    for workers in (2, 3, 64):
        assert identical(fixed_chunk(a, b, workers=workers), whole)
    assert identical(fixed_chunk(a[4:5], b, workers=2), whole[4:5])
    if dtype == torch.float32:
        assert not identical(fixed_chunk(a, b, workers=1, chunk=100), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values(dtype: torch.dtype) -> None:
    """As near to float64 as one rounding and a float32 accumulation allow."""
    rng = generator(9, "cpu")
    a, b = make("bell", (9, 700), dtype, "cpu", rng), make("bell", (700, 20), dtype, "cpu", rng)
    bound = accuracy_bound(dtype, 700)
    for got in (
        split_k(a, b, splits=5, ordered=True),
        split_k(a, b, splits=5, ordered=False),
        fixed_chunk(a, b, workers=2),
    ):
        assert got.dtype == dtype
        assert error_against(got, reference.matmul(a, b)).relative_norm <= bound


def test_misuse_is_refused() -> None:
    """Sizes below one, shapes that don't fit, dtypes without a kernel; no K at all gives zeros."""
    a, b = operands()
    with pytest.raises(ValueError, match="splits of at least 1"):
        split_k(a, b, splits=0, ordered=True)
    with pytest.raises(ValueError, match="chunk of at least 1"):
        fixed_chunk(a, b, workers=1, chunk=0)
    with pytest.raises(ValueError, match=r"\[M, K\] x \[K, N\]"):
        split_k(a, a, splits=1, ordered=True)
    with pytest.raises(NotImplementedError, match="float64"):
        fixed_chunk(a.double(), b.double(), workers=1)
    assert not split_k(a[:, :0], b[:0], splits=3, ordered=True).any()


# Split-K changes bits with the number of splits; chunks of fixed size do not with the number of workers.


def cuda_operands(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    rng = inputs.generator(0, DEVICE)
    return inputs.make("bell", (m, k), dtype, DEVICE, rng), inputs.make("bell", (k, n), dtype, DEVICE, rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("m", "k", "n"), [(3, 100, 33), (1, 257, 5), (20, 30, 70)])
def test_both_are_within_the_accuracy_bound(dtype, m, k, n):
    """However K is cut, with tails in every direction, nothing is lost or counted twice."""
    a, b = cuda_operands(m, k, n, dtype)
    bound = accuracy_bound(dtype, k)
    results = [cuda_split_k(a, b, splits=s, ordered=o) for s in (1, 3, 40) for o in (True, False)]
    results += [cuda_fixed_chunk(a, b, workers=w, chunk=c) for w, c in ((1, 64), (2, 30), (9, 1000))]
    for out in results:
        assert compare.error_against(out, reference.matmul(a, b)).relative_norm <= bound


def test_one_split_is_the_serial_chain_and_more_are_not():
    """splits=1 has the bits of matmul; 2 and 4 splits have others, which is why a library's choice by M shows."""
    a, b = cuda_operands(4, 512, 40)
    serial = matmul(a, b)
    assert compare.identical(cuda_split_k(a, b, splits=1, ordered=True), serial)
    assert compare.identical(cuda_split_k(a, b, splits=1, ordered=False), serial)
    others = [cuda_split_k(a, b, splits=s, ordered=True) for s in (2, 4)]
    assert not compare.identical(others[0], serial)
    assert not compare.identical(others[0], others[1])


def test_fixed_chunks_do_not_depend_on_workers():
    """One worker adding in registers or many leaving chunks to an ordered sum: the same bits. Other chunks: not."""
    a, b = cuda_operands(4, 700, 40)
    alone = cuda_fixed_chunk(a, b, workers=1, chunk=128)
    for workers in (2, 3, 6, 100):
        assert compare.identical(cuda_fixed_chunk(a, b, workers=workers, chunk=128), alone)
    assert not compare.identical(cuda_fixed_chunk(a, b, workers=1, chunk=64), alone)


def test_equal_cuts_are_one_order():
    """Splits into parts of 128 and chunks of 128 are the same order of reduction, so the same bits."""
    a, b = cuda_operands(4, 512, 40)
    assert compare.identical(cuda_split_k(a, b, splits=4, ordered=True), cuda_fixed_chunk(a, b, workers=2, chunk=128))


def test_strides_do_not_change_bits():
    """A transposed weight, as a linear layer has it, gives the bits of its copy."""
    a, b = cuda_operands(4, 300, 40)
    by_column = b.T.contiguous().T
    assert compare.identical(
        cuda_split_k(a, by_column, splits=3, ordered=True),
        cuda_split_k(a.clone(), b.contiguous(), splits=3, ordered=True),
    )
    assert compare.identical(
        cuda_fixed_chunk(a, by_column, workers=2, chunk=64), cuda_fixed_chunk(a, b, workers=2, chunk=64)
    )


def test_empty_and_bad_sizes():
    """Nothing to sum is zero; a count below one and shapes that do not fit are refused with the value."""
    a, b = cuda_operands(3, 8, 4)
    assert cuda_split_k(a[:0], b, splits=2, ordered=True).shape == (0, 4)
    assert not cuda_fixed_chunk(a[:, :0], b[:0], workers=2).any()
    with pytest.raises(ValueError, match="splits of at least 1, got 0"):
        cuda_split_k(a, b, splits=0, ordered=True)
    with pytest.raises(ValueError, match="chunk of at least 1, got -1"):
        cuda_fixed_chunk(a, b, workers=1, chunk=-1)
    with pytest.raises(ValueError, match="takes"):
        cuda_split_k(a, b[None], splits=1, ordered=True)
    with pytest.raises(NotImplementedError, match="float64"):
        cuda_split_k(a.double(), b.double(), splits=1, ordered=True)


def test_launch_is_noted():
    """What ran says how many parts there were and how they were added."""
    a, b = cuda_operands(2, 100, 4)
    with listen() as notes:
        cuda_split_k(a, b, splits=3, ordered=False)
        cuda_fixed_chunk(a, b, workers=8, chunk=30)
    assert list(notes) == ["split_k[16x64x32, 3 atomic]", "fixed_chunk[16x64x32, 4 x 30 by 4]"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fixed_chunks_do_not_depend_on_the_batch(dtype):
    """Workers may follow M on a GPU: bits stay. Splits that follow M would not."""
    a, b = cuda_operands(200, 4096, 520, dtype)
    whole = cuda_fixed_chunk(a, b, workers=1)
    for m in (1, 16, 17, 64, 200):
        for workers in (1, 3, 8):
            assert compare.identical(cuda_fixed_chunk(a[:m], b, workers=workers), whole[:m])
    assert not compare.identical(cuda_split_k(a, b, splits=8, ordered=True), cuda_split_k(a, b, splits=2, ordered=True))
