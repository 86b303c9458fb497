"""Row operators: the written-out order is the order that runs, and nothing about the other rows enters it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nondet.core import compare, inputs
from nondet.core.launch import listen
from nondet.kernels import reference
from nondet.kernels.rows import cuda as triton_rows
from nondet.kernels.rows import cuda_softmax as triton_softmax
from tests.build import DEVICE, accuracy_bound

# NumPy, which the interpreter computes with, warns of the NaN that some tests ask for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
]
OPERATORS = ["sum", "mean", "softmax", "log_softmax", "logsumexp"]
ALL = [*OPERATORS, "cross_entropy", "rms_norm", "rms_norm_residual"]


def make(kind: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return inputs.make(kind, shape, dtype, DEVICE, inputs.generator(0, DEVICE))


def run(name: str, x: torch.Tensor) -> torch.Tensor:
    """The operator; a weight, a target or a residual is one that only a row's own elements decide."""
    weight = torch.linspace(0.5, 2.0, x.shape[-1], device=DEVICE).to(x.dtype)
    if name == "rms_norm":
        return triton_rows.rms_norm(x, weight)
    if name == "rms_norm_residual":
        return torch.stack(triton_rows.rms_norm_residual(x, x.flip(-1), weight))[0]
    if name == "cross_entropy":
        return triton_rows.cross_entropy(x, torch.full(x.shape[:-1], x.shape[-1] // 2, device=DEVICE))
    return getattr(triton_rows, name)(x)


def tree(x: np.ndarray, lanes: int) -> np.ndarray:
    """By halves down to so many lanes, then by neighbours."""
    while x.shape[1] > lanes:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x


def chunks_of(x: np.ndarray, fill: float) -> list[np.ndarray]:
    """The chunks of rows, filled up to SPAN."""
    width = x.shape[1]
    span = 1 << max(0, width - 1).bit_length() if width <= 16384 else 4096
    padded = np.full((x.shape[0], -(-width // span) * span), fill, np.float32)
    padded[:, :width] = x
    return np.split(padded, padded.shape[1] // span, axis=1)


def added_up(parts: list[np.ndarray]) -> np.ndarray:
    """Every chunk's tree, then the tree over chunks."""
    sums = [tree(c, min(c.shape[1], max(256, min(c.shape[1] // 4, 2048)))) for c in parts]
    filled = np.zeros((len(parts[0]), 1 << (len(parts) - 1).bit_length()), np.float32)
    filled[:, : len(parts)] = np.concatenate(sums, axis=1)
    return tree(filled, filled.shape[1])


@pytest.mark.parametrize("width", [1, 7, 70, 1024, 5000, 9001, 20000])
def test_sum_runs_in_the_written_order(width):
    """The docstring's order, written again in NumPy, gives the kernel's bits; adding from left to right does not."""
    x = make("cancel", 3, width)
    ours = triton_rows.sum(x).cpu()
    assert compare.identical(ours, torch.from_numpy(added_up(chunks_of(x.cpu().numpy(), 0.0))[:, 0]))
    if width > 64:
        left_to_right = np.add.accumulate(x.cpu().numpy(), axis=1, dtype=np.float32)[:, -1]
        assert not compare.identical(ours, torch.from_numpy(left_to_right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 70), (2, 3, 128), (1, 5000), (9,), (4, 1), (2, 17000)])
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
        assert gap <= accuracy_bound(dtype, width) * max(size, float(ref.norm())), name
    weight, residual = make("bell", width), make("wide", *shape, dtype=dtype)
    figures = compare.error_against(triton_rows.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert figures.relative_norm <= accuracy_bound(dtype, width)
    for ours, ref in zip(
        triton_rows.rms_norm_residual(x, residual, weight),
        reference.rms_norm_residual(x, residual, weight),
        strict=True,
    ):
        assert compare.error_against(ours, ref).relative_norm <= accuracy_bound(dtype, width)


@pytest.mark.parametrize("width", [70, 16385, 17000])
def test_exponentials_add_up_in_the_written_order(width):
    """The maximum and the sum of every chunk, merged by the tree over chunks, in NumPy."""
    x = make("wide", 3, width)
    parts = chunks_of(x.cpu().numpy(), -math.inf)
    tops = np.stack([c.max(axis=1) for c in parts], axis=1)
    top = tops.max(axis=1, keepdims=True)
    if DEVICE == "cpu":  # NumPy's exp is the interpreter's
        sums = [
            added_up([np.exp(c - m[:, None])]) * np.exp(m[:, None] - top) for c, m in zip(parts, tops.T, strict=True)
        ]
        total = added_up(sums)[:, :1] if len(sums) > 1 else sums[0]
        expected = np.log(total) + top
        assert compare.identical(triton_rows.logsumexp(x), torch.from_numpy(expected[:, 0]))
    ours = triton_rows.log_softmax(x).double()
    torch.testing.assert_close(ours, torch.log_softmax(x.double(), -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("width", [17000, 40000])
def test_one_launch_is_two_launches(name, width):
    """A wide row has the same bits when its pairs and its results share a launch, with rows in between and without."""
    x = make("wide", 3, width)
    apart = triton_softmax._softmax(name, x, log=name == "log_softmax", at_once=False)
    assert compare.identical(triton_softmax._softmax(name, x, log=name == "log_softmax", at_once=True), apart)
    assert compare.identical(triton_softmax._softmax(name, x[2:], log=name == "log_softmax", at_once=True), apart[2:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="turns the interpreter's programs around")
def test_one_launch_in_whatever_order_programs_start(monkeypatch):
    """The last program may start first: who waits has drawn a higher number, so nobody waits for what never starts."""
    from triton.runtime.interpreter import interpreter_builder

    x = make("wide", 3, 40000)
    apart = triton_softmax._softmax("softmax", x, log=False, at_once=False)
    forward, started = interpreter_builder.set_grid_idx, []

    def backward(i, j, k):
        started.append(interpreter_builder.grid_dim[0] - 1 - i)
        forward(started[-1], j, k)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backward)
    assert compare.identical(triton_softmax._softmax("softmax", x, log=False, at_once=True), apart)
    assert started == sorted(started, reverse=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its memory is never touched, which a CPU's allocator allows")
def test_rows_that_reach_beyond_32_bits_are_copied():
    """Columns are counted in 32 bits: a row whose last one lies further is read from a copy."""
    try:
        room = torch.empty(2**31 + 8, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("the system gives no 4 GiB of memory that is not touched")
    x = make("bell", 2, 5).half()
    far = room.as_strided((2, 5), (1, 2**29)).copy_(x)
    assert compare.identical(triton_rows.softmax(far), triton_rows.softmax(x))


def test_one_launch_with_a_short_lag(monkeypatch):
    """The same where the results of a row follow its pairs at once."""
    x = make("wide", 5, 40000)
    apart = triton_softmax._softmax("softmax", x, log=False, at_once=False)
    monkeypatch.setattr(triton_softmax, "_LAG_BYTES", 1)
    assert compare.identical(triton_softmax._softmax("softmax", x, log=False, at_once=True), apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [70, 17000])
def test_residual_is_two_operators(dtype, width):
    """x + residual as torch rounds it, and the norm of that: bit for bit, whatever the strides. Unrounded differs."""
    x, residual, weight = (
        make(k, *s, dtype=dtype) for k, s in (("bell", (3, width)), ("wide", (3, width)), ("bell", (width,)))
    )
    out, added = triton_rows.rms_norm_residual(x, residual, weight)
    assert compare.identical(added, x + residual)
    assert compare.identical(out, triton_rows.rms_norm(x + residual, weight))
    apart = triton_rows.rms_norm_residual(x, residual.T.contiguous().T, weight)
    assert compare.identical(apart[0], out)
    assert compare.identical(apart[1], added)
    if dtype == torch.float16:
        unrounded = triton_rows.rms_norm(x.float() + residual.float(), weight.float()).half()
        assert not compare.identical(unrounded, out)


@pytest.mark.parametrize("width", [70, 17000])
def test_cross_entropy_is_log_softmax_at_the_target(width):
    """Bit for bit, for targets of two dtypes; ignored ones cost nothing, impossible ones are NaN."""
    x = make("bell", 2, 3, width, dtype=torch.float16)
    target = torch.tensor([[0, width - 1, 5], [-100, width, -1]], device=DEVICE)
    losses = triton_rows.cross_entropy(x, target)
    logs = triton_rows.log_softmax(x)
    assert compare.identical(losses[0], -logs[0, [0, 1, 2], target[0]])
    assert losses[1, 0] == 0
    assert losses[1, 1:].isnan().all()
    assert compare.identical(triton_rows.cross_entropy(x, target.int()), losses)
    assert triton_rows.cross_entropy(x, target, ignore_index=5)[0, 2] == 0


def test_rms_norm_rounds_once():
    """In float16 the result is the float64 one, rounded, give or take a tie; two roundings miss it far more often."""
    x, weight = make("bell", 8, 256, dtype=torch.float16), make("bell", 256, dtype=torch.float16)
    exact = reference.rms_norm(x, weight)
    rounded = exact.to(torch.float16)
    once = triton_rows.rms_norm(x, weight)
    twice = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).half() * weight
    assert float((once != rounded).double().mean()) < 0.01
    assert float((twice != rounded).double().mean()) > 0.1


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [70, 4100, 17000])
def test_a_row_does_not_depend_on_the_others(name, width):
    """Alone, among others, at another place: the same bits; another row has other bits."""
    x = make("wide", 4 if width < 10_000 else 2, width)
    together = run(name, x)
    for i in range(len(x)):
        assert compare.identical(run(name, x[i : i + 1])[0], together[i])
        assert compare.identical(run(name, x.roll(-i, 0))[0], together[i])
    assert not compare.identical(together[0], together[1])


@pytest.mark.parametrize("name", ALL)
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


@pytest.mark.parametrize("width", [40, 17000])
def test_infinities_and_nan_stay_in_their_row(width):
    """Masked logits get probability 0, a row of only -inf gives what PyTorch gives, other rows stay as they were."""
    x = make("bell", 5, width)
    before = triton_rows.softmax(x)
    x[1, ::2] = -math.inf
    x[2] = -math.inf
    x[3, 5] = math.nan
    x[4, width - 1] = math.inf
    torch.testing.assert_close(triton_rows.logsumexp(x), torch.logsumexp(x, -1), equal_nan=True)
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
    assert triton_rows.logsumexp(torch.zeros(2, 0, device=DEVICE)).tolist() == [-math.inf, -math.inf]
    empty = torch.zeros(0, 3, device=DEVICE)
    assert [o.shape for o in triton_rows.rms_norm_residual(empty, empty, torch.ones(3, device=DEVICE))] == [(0, 3)] * 2
    assert triton_rows.cross_entropy(empty, torch.zeros(0, device=DEVICE, dtype=torch.int64)).shape == (0,)


def test_launch_is_noted():
    """The note names the operator, and the chunks of a row where there are several."""
    with listen() as notes:
        triton_rows.mean(make("bell", 3, 100))
        triton_rows.rms_norm(make("bell", 3, 17000), make("bell", 17000))
    assert list(notes) == ["mean_rows[128]", "rms_norm_rows[5x4096]"]


def test_refuses_what_it_has_no_kernel_for():
    """Integers, scalars and a weight of another width are refused by name."""
    with pytest.raises(NotImplementedError, match="int64"):
        triton_rows.sum(torch.ones(2, 2, device=DEVICE, dtype=torch.int64))
    with pytest.raises(ValueError, match="scalar"):
        triton_rows.softmax(torch.ones((), device=DEVICE))
    with pytest.raises(ValueError, match="rms_norm takes"):
        triton_rows.rms_norm(make("bell", 2, 8), make("bell", 9))
    with pytest.raises(ValueError, match="one shape"):
        triton_rows.rms_norm_residual(make("bell", 2, 8), make("bell", 1, 8), make("bell", 8))
    with pytest.raises(ValueError, match="cross_entropy takes"):
        triton_rows.cross_entropy(make("bell", 2, 8), torch.zeros(3, device=DEVICE, dtype=torch.int64))
    with pytest.raises(ValueError, match="float32"):
        triton_rows.cross_entropy(make("bell", 2, 8), torch.zeros(2, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [128, 4096, 5121, 151936])
def test_bits_do_not_depend_on_the_batch(dtype, width):
    """On a GPU, where layouts are real, all row counts give a row the same bits, whichever launch they take."""
    x = make("outlier", 300, width, dtype=dtype)
    for name in ALL:
        whole = run(name, x)
        for m in (1, 2, 3, 8, 15, 64, 299):
            assert compare.identical(run(name, x[:m]), whole[:m])
            assert compare.identical(run(name, x[-m:]), whole[-m:])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 7, 128, 1024, 5000, 16384, 151936])
def test_sum_has_the_written_bits_in_bfloat16(width):
    """The GPU's layouts add as the docstring says."""
    x = make("cancel", 3, width, dtype=torch.bfloat16)
    expected = torch.from_numpy(added_up(chunks_of(x.float().cpu().numpy(), 0.0))[:, 0]).bfloat16()
    assert compare.identical(triton_rows.sum(x).cpu(), expected)
