"""K cut up on a CPU: a number of parts changes bits, a size of parts does not."""

from __future__ import annotations

import pytest
import torch

from nondet.core.compare import error_against, identical
from nondet.core.inputs import generator, make
from nondet.core.launch import listen
from nondet.kernels import reference
from nondet.kernels.matmul.split_k_cpu import fixed_chunk, split_k
from tests.build import accuracy_bound


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
