"""Row operators: the written-out order is the order that runs, and nothing about the other rows enters it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nondet import compare, inputs
from nondet.kernels import reference, triton_rows
from nondet.kernels.launch import listen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# NumPy, which the interpreter computes with, warns of the NaN that some tests ask for.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
OPERATORS = ["sum", "mean", "softmax", "log_softmax"]


def make(kind: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return inputs.make(kind, shape, dtype, DEVICE, inputs.generator(0, DEVICE))


def run(name: str, x: torch.Tensor) -> torch.Tensor:
    """The operator, RMSNorm with a weight that only the width decides."""
    if name == "rms_norm":
        return triton_rows.rms_norm(x, torch.linspace(0.5, 2.0, x.shape[-1], device=DEVICE).to(x.dtype))
    return getattr(triton_rows, name)(x)


def written_order(x: np.ndarray) -> np.ndarray:
    """The sum in the order that the module's docstring promises, in float32: lanes in order, then neighbours."""
    block = min(4096, 1 << max(0, x.shape[1] - 1).bit_length())
    padded = np.zeros((x.shape[0], -(-x.shape[1] // block) * block), np.float32)
    padded[:, : x.shape[1]] = x
    lanes = np.zeros((x.shape[0], block), np.float32)
    for start in range(0, padded.shape[1], block):
        lanes += padded[:, start : start + block]
    while lanes.shape[1] > 1:
        lanes = lanes[:, 0::2] + lanes[:, 1::2]
    return lanes[:, 0]


@pytest.mark.parametrize("width", [1, 7, 70, 1024, 5000, 9001])
def test_sum_runs_in_the_written_order(width):
    """The docstring's order, written again in NumPy, gives the kernel's bits; adding from left to right does not."""
    x = make("cancel", 3, width)
    ours = triton_rows.sum(x).cpu()
    assert compare.identical(ours, torch.from_numpy(written_order(x.cpu().numpy())))
    if width > 64:
        left_to_right = np.add.accumulate(x.cpu().numpy(), axis=1, dtype=np.float32)[:, -1]
        assert not compare.identical(ours, torch.from_numpy(left_to_right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 70), (2, 3, 128), (1, 5000), (9,), (4, 1)])
def test_within_the_accuracy_bound(dtype, shape):
    """Tails, several axes and several blocks a row reach the float64 result."""
    x = make("bell", *shape, dtype=dtype)
    width = shape[-1]
    for name in OPERATORS:
        ref = getattr(reference, name)(x)
        # sums of a bell nearly cancel: their error is measured against the size of what was added
        size = float(x.double().norm()) if name == "sum" else float(ref.norm())
        size = size / width if name == "mean" else size
        gap = float((getattr(triton_rows, name)(x).double() - ref).norm())
        assert gap <= reference.accuracy_bound(dtype, width) * max(size, float(ref.norm())), name
    weight = make("bell", width)
    figures = compare.error_against(triton_rows.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert figures.relative_norm <= reference.accuracy_bound(dtype, width)


def test_rms_norm_rounds_once():
    """In float16 the result is the float64 one, rounded, give or take a tie; two roundings miss it far more often."""
    x, weight = make("bell", 8, 256, dtype=torch.float16), make("bell", 256, dtype=torch.float16)
    exact = reference.rms_norm(x, weight)
    rounded = exact.to(torch.float16)
    once = triton_rows.rms_norm(x, weight)
    twice = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).half() * weight
    assert float((once != rounded).double().mean()) < 0.01
    assert float((twice != rounded).double().mean()) > 0.1


@pytest.mark.parametrize("name", [*OPERATORS, "rms_norm"])
@pytest.mark.parametrize("width", [70, 4100])
def test_a_row_does_not_depend_on_the_others(name, width):
    """Alone, among others, at another place: the same bits; another row has other bits."""
    x = make("wide", 4, width)
    together = run(name, x)
    for i in range(4):
        assert compare.identical(run(name, x[i : i + 1])[0], together[i])
        assert compare.identical(run(name, x.roll(-i, 0))[0], together[i])
    assert not compare.identical(together[0], together[1])


@pytest.mark.parametrize("name", [*OPERATORS, "rms_norm"])
def test_strides_and_alignment_do_not_change_bits(name):
    """Columns of a wider tensor, a transposed one, rows that start off any alignment: the bits of the plain copy."""
    x = make("bell", 5, 96, dtype=torch.float16)
    plain = run(name, x)
    wider = torch.zeros(5, 200, device=DEVICE, dtype=torch.float16)
    wider[:, 7:103] = x
    shifted = torch.zeros(5 * 96 + 1, device=DEVICE, dtype=torch.float16)
    shifted[1:] = x.flatten()
    for view in (wider[:, 7:103], x.T.contiguous().T, shifted[1:].view(5, 96)):
        assert compare.identical(run(name, view), plain)
    by_axis = x.view(5, 2, 48).transpose(0, 1)  # no single row stride: [2, 5, 48]
    assert compare.identical(run(name, by_axis), run(name, by_axis.contiguous()))


def test_infinities_and_nan_stay_in_their_row():
    """Masked logits get probability 0, a row of only -inf gives NaN as in PyTorch, other rows stay as they were."""
    x = make("bell", 4, 40)
    before = triton_rows.softmax(x)
    x[1, ::2] = -math.inf
    x[2] = -math.inf
    x[3, 5] = math.nan
    for ours, theirs in ((triton_rows.softmax, torch.softmax), (triton_rows.log_softmax, torch.log_softmax)):
        out = ours(x)
        torch.testing.assert_close(out, theirs(x, -1), equal_nan=True, rtol=1e-5, atol=1e-6)
        assert out[2:].isnan().all()
    assert compare.identical(triton_rows.softmax(x)[0], before[0])
    assert triton_rows.sum(x)[3].isnan()


def test_empty_shapes():
    """No rows give no results, no columns the value of an empty sum."""
    assert triton_rows.softmax(make("bell", 0, 5)).shape == (0, 5)
    assert triton_rows.sum(make("bell", 3, 4)[:0]).shape == (0,)
    assert triton_rows.sum(torch.zeros(2, 0, device=DEVICE)).tolist() == [0.0, 0.0]
    assert triton_rows.mean(torch.zeros(2, 0, device=DEVICE)).isnan().all()


def test_launch_is_noted():
    """The note names the operator, the rows of a program and the block."""
    with listen() as notes:
        triton_rows.mean(make("bell", 3, 100))
        triton_rows.rms_norm(make("bell", 3, 5000), make("bell", 5000))
    assert list(notes) == ["mean_rows[8x128]", "rms_norm_rows[1x4096]"]


def test_refuses_what_it_has_no_kernel_for():
    """Integers, scalars and a weight of another width are refused by name."""
    with pytest.raises(NotImplementedError, match="int64"):
        triton_rows.sum(torch.ones(2, 2, device=DEVICE, dtype=torch.int64))
    with pytest.raises(ValueError, match="scalar"):
        triton_rows.softmax(torch.ones((), device=DEVICE))
    with pytest.raises(ValueError, match="rms_norm takes"):
        triton_rows.rms_norm(make("bell", 2, 8), make("bell", 9))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [4096, 5121, 151936])
def test_bits_do_not_depend_on_the_batch(dtype, width):
    """On a GPU, where layouts are real, all row counts give a row the same bits."""
    x = make("outlier", 300, width, dtype=dtype)
    for name in (*OPERATORS, "rms_norm"):
        whole = run(name, x)
        for m in (1, 2, 3, 8, 15, 64, 299):
            assert compare.identical(run(name, x[:m]), whole[:m])
            assert compare.identical(run(name, x[-m:]), whole[-m:])
