"""The dispatcher of class "chain" on a GPU: whichever member serves, a row's bits are those of the anchor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nondet.core import compare, inputs
from nondet.core.launch import listen
from nondet.kernels.matmul import triton_kernels as triton_matmul
from nondet.kernels.matmul.cuda import bmm, forget, linear, matmul
from tests.build import DEVICE, bell


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    yield
    forget()


SHAPES = [(4096, 4096), (12288, 4096), (1024, 3072), (4096, 1024), (1000, 520)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_one_class_over_m_on_hard_inputs(dtype, k, n):
    """Whichever member serves an M, a row's bits are those of the anchor."""
    rng = inputs.generator(5, DEVICE)
    x = inputs.make("wide", (300, k), dtype, DEVICE, rng)
    weight = inputs.make("outlier", (n, k), dtype, DEVICE, rng)
    bias = bell(n, dtype=dtype, seed=6)
    tile = triton_matmul.anchor(dtype)
    whole = triton_matmul.matmul_chain(x[None], weight.T[None], tile=tile)[0]
    biased = triton_matmul.matmul_chain(x[None], weight.T[None], bias, tile=tile)[0]
    with listen() as notes:
        for m in (1, 2, 8, 16, 17, 64, 100, 128, 300):
            assert compare.identical(linear(x[:m], weight), whole[:m])
            assert compare.identical(linear(x[-m:], weight), whole[-m:])
            assert compare.identical(linear(x[:m], weight, bias), biased[:m])
            assert compare.identical(matmul(x[:m], weight.T.contiguous()), whole[:m])
    if dtype != torch.float32:
        assert any(note.startswith("cublaslt") for note in notes), "the library serves nothing"


@pytest.mark.gpu
def test_a_captured_graph_replays_the_same_bits():
    """A CUDA graph holds the certified member, also for a shape that was never seen outside of a capture."""
    x, weight = bell(40, 4096, dtype=torch.bfloat16), bell(4096, 4096, dtype=torch.bfloat16, seed=1)
    for rows in (x, x[:23]):
        for warm in (False, True):
            if warm:
                linear(rows, weight)
            else:
                triton_matmul.matmul_chain(rows[None], weight.T[None], tile=triton_matmul.anchor(rows.dtype))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = linear(rows, weight)
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert compare.identical(out, linear(rows, weight))


@pytest.mark.gpu
def test_inductor_runs_the_same_member():
    """The default compiler keeps the operator whole, and its bits."""
    x, weight = bell(24, 1024, dtype=torch.bfloat16), bell(512, 1024, dtype=torch.bfloat16, seed=1)
    compiled = torch.compile(lambda x, weight: linear(x, weight) * 2, fullgraph=True)
    assert compare.identical(compiled(x, weight), linear(x, weight) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_odd_sizes_batches_and_offsets(dtype):
    """Sizes and starts that no vector load likes: still the class's bits."""
    tile = triton_matmul.anchor(dtype)
    for m, k, n in ((3, 1001, 77), (33, 1024, 515), (257, 130, 9)):
        a, b = bell(m, k, dtype=dtype), bell(k, n, dtype=dtype, seed=1)
        assert compare.identical(matmul(a, b), triton_matmul.matmul_chain(a[None], b[None], tile=tile)[0])
    wide = bell(8, 1025, dtype=dtype)
    weight = bell(64, 1024, dtype=dtype, seed=1)
    assert compare.identical(linear(wide[:, 1:], weight), linear(wide[:, 1:].contiguous(), weight))
    a, b = bell(4, 24, 256, dtype=dtype), bell(4, 64, 256, dtype=dtype, seed=1)
    assert compare.identical(bmm(a, b.mT), triton_matmul.matmul_chain(a, b.mT, tile=tile))
