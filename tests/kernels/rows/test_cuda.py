"""Row operators: the written-out order is the order that runs, and nothing about the other rows enters it."""

import functools
import math
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from nondet.core import inputs
from nondet.core.compare import identical
from nondet.core.launch import listen
from nondet.kernels import reference, triton_common
from nondet.kernels.dispatch import replacements
from nondet.kernels.dispatch import transformers as hf_norms
from nondet.kernels.rows import cuda as triton_rows
from nondet.kernels.rows import cuda_softmax
from nondet.kernels.rows.cuda import module_norm
from nondet.kernels.rows.cuda_softmax import plan, takes
from tests.build import DEVICE, accuracy_bound, error, rand
from tests.kernels.rows.test_cpu import ALL, call
from tests.kernels.tiers import at_length, on_hopper, untouched

# NumPy, which the interpreter computes with, warns of the NaN that some tests ask for.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
]
HALF_AND_SINGLE = [torch.float32, *at_length(torch.float16)]
run = functools.partial(call, triton_rows)


def make(kind: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return inputs.make(kind, shape, dtype, DEVICE, inputs.generator(0, DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.float16, torch.float64)])
@pytest.mark.parametrize("shape", [(2, 3, 128), (1, 17000), *at_length(((3, 70),), ((1, 5000),), ((9,),), ((4, 1),))])
def test_within_the_accuracy_bound(dtype, shape):
    x = make("bell", *shape, dtype=dtype)
    width = shape[-1]
    for name in ALL[:5]:
        ref = getattr(reference, name)(x)
        # sums of a bell nearly cancel: their error is measured against the size of what was added
        size = float(x.double().norm()) if name == "sum" else float(ref.norm())
        size = size / width if name == "mean" else size
        gap = float((getattr(triton_rows, name)(x).double() - ref).norm())
        assert gap <= accuracy_bound(dtype, width) * max(size, float(ref.norm())), name
    weight, residual = make("bell", width), make("wide", *shape, dtype=dtype)
    pairs = [(triton_rows.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))]
    both = [module.rms_norm_residual(x, residual, weight) for module in (triton_rows, reference)]
    for ours, ref in (*pairs, *zip(*both, strict=True)):
        assert error(ours, ref) <= accuracy_bound(dtype, width)


@pytest.mark.parametrize("width", [70, 17000, *at_length(16385)])
def test_exponentials_add_up_in_the_written_order(width):
    """The maximum and the sum of every chunk, merged by the tree over chunks."""
    x = make("wide", 3, width)

    def exp(y: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.exp(y.numpy()))

    if DEVICE == "cpu":  # NumPy's exp is the interpreter's
        chunk, top = 4096 if width > 16384 else width, x.amax(-1, keepdim=True)
        sums = []
        for part in x.split(chunk, -1):
            most = part.amax(-1, keepdim=True)
            filled = torch.nn.functional.pad(exp(part - most), (0, chunk - part.shape[-1]))
            sums.append(triton_rows.lanes_sum(filled)[:, None] * exp(most - top))
        total = triton_rows.lanes_sum(torch.cat(sums, -1))
        expected = torch.from_numpy(np.log(total.numpy())) + top[:, 0]
        assert identical(triton_rows.logsumexp(x), expected)
    ours = triton_rows.log_softmax(x).double()
    torch.testing.assert_close(ours, torch.log_softmax(x.double(), -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "width"), [("softmax", 17000), *at_length(("softmax", 40000), ("log_softmax", 17000))]
)
def test_one_launch_is_two_launches(name, width, monkeypatch):
    """A wide row has the same bits when its pairs and its results share a launch, with rows in between and without."""
    x, log = make("wide", 2, width), name == "log_softmax"
    apart = cuda_softmax.softmax_by(name, x, log=log, at_once=False)
    assert identical(cuda_softmax.softmax_by(name, x, log=log, at_once=True), apart)
    assert identical(cuda_softmax.softmax_by(name, x[1:], log=log, at_once=True), apart[1:])
    monkeypatch.setattr(cuda_softmax, "LAG_BYTES", 1)  # a row's results follow its pairs at once
    assert identical(cuda_softmax.softmax_by(name, x, log=log, at_once=True), apart)


@pytest.mark.skipif(torch.cuda.is_available(), reason="turns the interpreter's programs around")
def test_one_launch_in_whatever_order_programs_start(monkeypatch):
    """The last program may start first: who waits has drawn a higher number, so nobody waits for what never starts."""
    from triton.runtime.interpreter import interpreter_builder

    x = make("wide", 2, 17000)
    apart = cuda_softmax.softmax_by("softmax", x, log=False, at_once=False)
    forward, started = interpreter_builder.set_grid_idx, []

    def backward(i, j, k):
        started.append(interpreter_builder.grid_dim[0] - 1 - i)
        forward(started[-1], j, k)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backward)
    assert identical(cuda_softmax.softmax_by("softmax", x, log=False, at_once=True), apart)
    assert started == sorted(started, reverse=True)


def test_rows_that_reach_beyond_32_bits_are_copied():
    """Columns are counted in 32 bits: a row whose last one lies further is read from a copy."""
    room, x = untouched(2**31 + 8), make("bell", 2, 5).half()
    far = room.as_strided((2, 5), (1, 2**29)).copy_(x)
    assert identical(triton_rows.softmax(far), triton_rows.softmax(x))


@pytest.mark.parametrize("dtype", [torch.float16, *at_length(torch.float32)])
@pytest.mark.parametrize("width", [70, *at_length(17000)])
def test_residual_is_two_operators(dtype, width):
    """x + residual as torch rounds it, and the norm of that: bit for bit, whatever the strides. Unrounded differs."""
    x, residual = make("bell", 3, width, dtype=dtype), make("wide", 3, width, dtype=dtype)
    weight = make("bell", width, dtype=dtype)
    out, added = triton_rows.rms_norm_residual(x, residual, weight)
    assert identical(added, x + residual)
    assert identical(out, triton_rows.rms_norm(x + residual, weight))
    apart = triton_rows.rms_norm_residual(x, residual.T.contiguous().T, weight)
    assert identical(apart[0], out)
    assert identical(apart[1], added)
    if dtype == torch.float16:
        unrounded = triton_rows.rms_norm(x.float() + residual.float(), weight.float()).half()
        assert not identical(unrounded, out)


@pytest.mark.parametrize("width", [70, *at_length(17000)])
def test_cross_entropy_is_log_softmax_at_the_target(width):
    """Bit for bit, for targets of two dtypes; ignored ones cost nothing, impossible ones are NaN."""
    x = make("bell", 2, 3, width, dtype=torch.float16)
    target = torch.tensor([[0, width - 1, 5], [-100, width, -1]], device=DEVICE)
    losses = triton_rows.cross_entropy(x, target)
    logs = triton_rows.log_softmax(x)
    assert identical(losses[0], -logs[0, [0, 1, 2], target[0]])
    assert losses[1, 0] == 0
    assert losses[1, 1:].isnan().all()
    assert identical(triton_rows.cross_entropy(x, target.int()), losses)
    assert triton_rows.cross_entropy(x, target, ignore_index=5)[0, 2] == 0


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE)
@pytest.mark.parametrize(
    ("tokens", "heads", "width"), [(3, 4, 128), (5, 3, 96), *at_length((1, 4, 64), (5, 1, 64), (70, 8, 96))]
)
def test_rms_norm_reads_heads_where_they_lie(tokens: int, heads: int, width: int, dtype: torch.dtype):
    """Queries and keys are slices of one tensor: the bits of their copy, again and elsewhere in it, and no copy."""
    whole = make("bell", tokens, (heads + 3) * width, dtype=dtype)
    weight = make("bell", width, dtype=dtype)
    for at in (0, 2):
        x = whole[:, at * width : (at + heads) * width].view(tokens, heads, width)
        copied = triton_rows.rms_norm(x.clone(memory_format=torch.contiguous_format), weight)
        for _ in range(2):
            assert identical(triton_rows.rms_norm(x, weight), copied)
        assert triton_common.again(("rms_norm", 1e-6), x, weight) is not None  # of a copy nothing is remembered
    uneven = whole.view(tokens, -1, width)[::2, ::2]
    assert identical(triton_rows.rms_norm(uneven, weight), triton_rows.rms_norm(uneven.contiguous(), weight))


@pytest.mark.parametrize(
    ("width", "names"),
    [(70, ALL), (17000, ["softmax", "rms_norm"]), *at_length((4100, ALL), (17000, ALL))],
    ids=["few", "chunks", "many", "all of chunks"],
)
def test_a_row_does_not_depend_on_the_others(width, names):
    x = make("wide", 3 if width < 10_000 else 2, width)
    for name in names:
        together = run(name, x)
        assert identical(run(name, x.flip(0)).flip(0), together), name
        for i in range(len(x)):
            assert identical(run(name, x[i : i + 1])[0], together[i]), name
        assert not identical(together[0], together[1]), name


def test_strides_and_alignment_do_not_change_bits():
    x = make("bell", 3, 96, dtype=torch.float16)
    wider = torch.zeros(3, 200, device=DEVICE, dtype=torch.float16)
    wider[:, 7:103] = x
    shifted = torch.zeros(3 * 96 + 1, device=DEVICE, dtype=torch.float16)
    shifted[1:] = x.flatten()
    by_axis = x.view(3, 2, 48).transpose(0, 1)  # no single row stride: [2, 3, 48]
    for name in ALL:
        plain = run(name, x)
        for view in (wider[:, 7:103], x.T.contiguous().T, shifted[1:].view(3, 96)):
            assert identical(run(name, view), plain), name
        assert identical(run(name, by_axis), run(name, by_axis.contiguous())), name


@pytest.mark.parametrize(
    ("width", "names"),
    [(40, ["softmax", "log_softmax"]), (17000, ["softmax"]), *at_length((17000, ["log_softmax"]))],
    ids=["few", "chunks", "log of chunks"],
)
def test_infinities_and_nan_stay_in_their_row(width, names):
    """Masked logits get probability 0, a row of only -inf gives what PyTorch gives, other rows stay as they were."""
    x = make("bell", 5, width)
    before = run(names[0], x[:1])
    x[1, ::2] = -math.inf
    x[2] = -math.inf
    x[3, 5] = math.nan
    x[4, width - 1] = math.inf
    torch.testing.assert_close(triton_rows.logsumexp(x), torch.logsumexp(x, -1), equal_nan=True)
    for name in names:
        out = run(name, x)
        torch.testing.assert_close(out, getattr(torch, name)(x, -1), equal_nan=True, rtol=1e-5, atol=1e-6)
        assert out[2:].isnan().all()
        assert name != names[0] or identical(out[:1], before)
    assert triton_rows.sum(x[3:4]).isnan()


def test_empty_and_refused():
    none, narrow = torch.zeros(0, 3, device=DEVICE), torch.zeros(2, 0, device=DEVICE)
    shapes = {"softmax": (0, 3), "sum": (0,), "cross_entropy": (0,), "rms_norm_residual": (0, 6)}
    assert {name: run(name, none).shape for name in shapes} == shapes
    assert triton_rows.sum(narrow).tolist() == [0.0, 0.0]
    assert triton_rows.mean(narrow).isnan().all()
    assert triton_rows.logsumexp(narrow).tolist() == [-math.inf, -math.inf]
    x, indices = make("bell", 2, 8), torch.zeros(3, device=DEVICE, dtype=torch.int64)
    for operator, given, words in (
        ("sum", (indices,), "int64"),
        ("softmax", (torch.ones((), device=DEVICE),), "scalar"),
        ("rms_norm", (x, make("bell", 9)), "rms_norm takes"),
        ("rms_norm_residual", (x, make("bell", 1, 8), make("bell", 8)), "one shape"),
        ("cross_entropy", (x, indices), "cross_entropy takes"),
        ("cross_entropy", (x, torch.zeros(2, device=DEVICE)), "float32"),
        ("layer_norm", (x, make("bell", 9), None, 1e-5), "layer_norm takes"),
    ):
        with pytest.raises(NotImplementedError if words == "int64" else ValueError, match=words):
            getattr(triton_rows, operator)(*given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [128, 4096, 5121, 151936])
def test_bits_do_not_depend_on_the_batch(dtype, width):
    """On a GPU, where layouts are real, all row counts give a row the same bits, whichever launch they take."""
    x = make("outlier", 300, width, dtype=dtype)
    for name in ALL:
        whole = run(name, x)
        for m in (1, 2, 3, 8, 15, 64, 299):
            assert identical(run(name, x[:m]), whole[:m])
            assert identical(run(name, x[-m:]), whole[-m:])


def composed(x: torch.Tensor, weight: torch.Tensor, eps: float, round_first: bool, plus_one: bool) -> torch.Tensor:
    """What a module's forward does, operator by operator, over the invariant mean."""
    wide = x.float()
    normed = wide * torch.rsqrt(triton_rows.mean(wide.pow(2))[..., None] + eps)
    if plus_one:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype) if round_first else (weight * normed).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, *at_length(torch.float32, *[torch.bfloat16] * (DEVICE == "cuda"))])
@pytest.mark.parametrize("width", [100, *at_length(128, 1024)])
def test_a_module_in_one_launch_has_the_bits_of_its_operators(width: int, dtype: torch.dtype) -> None:
    """So a forward under autograd, which runs the operators, agrees with a sampler, which runs the kernel."""
    x, weight = rand(2, 3, width).to(DEVICE, dtype), rand(width).to(DEVICE, dtype)
    forms = ((True, False), (False, False), (False, True))
    made = [module_norm(x, weight, 1e-6, round_first=first, plus_one=one) for first, one in forms]
    for got, form in zip(made, forms, strict=True):
        assert identical(got, composed(x, weight, 1e-6, *form)), form
    assert identical(made[0], made[1]) == (dtype == torch.float32)  # where there is nothing to round
    assert not identical(made[1], made[2])


def test_other_modules_dtypes_and_widths_are_left() -> None:
    """A float32 weight under half activations, rows wider than a program holds, a module with one operator more."""
    x = rand(2, 128).to(DEVICE, torch.float16)
    assert module_norm(x, rand(128).to(DEVICE), 1e-6, round_first=True, plus_one=False) is None
    wide = rand(1, 20000).to(DEVICE)
    assert module_norm(wide, wide[0], 1e-6, round_first=True, plus_one=False) is None
    assert triton_rows.layer_norm(wide, None, None, 1e-5) is None

    class Otherwise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * 2

    assert hf_norms.form_of(Gemma3RMSNorm) == ("eps", False, True)
    assert hf_norms.form_of(Otherwise) is None


def logits(m: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of ordinary size, large, tiny and wide; of nothing but -inf, half -inf, with NaN, with +inf, all NaN."""
    rng = inputs.generator(0, DEVICE)
    x = inputs.make("bell", (m, width), dtype, DEVICE, rng)
    if m > 8:
        x[1] *= 20
        x[2] = -torch.inf
        x[3, 7] = torch.nan
        x[4, : width // 2] = -torch.inf
        x[5, 5] = torch.inf
        x[6] *= 2.0**-8
        x[7] = inputs.make("wide", (1, width), dtype, DEVICE, rng)[0]
        x[8] = torch.nan
    return x


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16386, 32000, 151936])
def test_held_rows_have_the_bits_of_rows_read_twice(dtype, width):
    """Every kind of row, few and many, with either launch that reads twice; rows of the whole are rows alone."""
    x = logits(300, width, dtype)
    for name, log in (("softmax", False), ("log_softmax", True)):
        with listen() as notes:
            whole = cuda_softmax.softmax_by(name, x, log=log)
        assert any("held" in note for note in notes), notes
        for at_once in (False, True):
            assert identical(whole, cuda_softmax.softmax_by(name, x, log=log, at_once=at_once))
        for m in (1, 2, 9, 33):
            assert identical(cuda_softmax.softmax_by(name, x[:m], log=log), whole[:m])
            assert identical(cuda_softmax.softmax_by(name, x[-m:], log=log), whole[-m:])


@on_hopper
def test_rows_apart_in_memory_and_rows_in_no_whole_words():
    """A stride between rows is held too; an odd width, an odd start or a stride of columns is left to the others."""
    room = logits(150, 40002, torch.bfloat16)
    apart = room[:, 2:32002]
    with listen() as notes:
        assert identical(cuda_softmax.softmax(apart), cuda_softmax.softmax(apart.contiguous()))
    assert sum(count for note, count in notes.items() if "held" in note) == 2
    for x in (room[:, :32001], room[:, 1:32001], room[:, :36000:2]):
        assert not takes(x, plan(x.shape[1], 2))
        got = cuda_softmax.softmax(x)
        padded = torch.full((150, x.shape[1] + x.shape[1] % 2), -torch.inf, device=DEVICE, dtype=x.dtype)
        padded[:, : x.shape[1]] = x
        assert identical(got, cuda_softmax.softmax(padded)[:, : x.shape[1]])


@on_hopper
def test_waiting_ends_on_many_streams_at_once():
    """Launches that share the GPU hold each other's places, and all of them end with the bits of one alone."""
    x = logits(64, 151936, torch.bfloat16)
    alone = cuda_softmax.softmax(x)
    streams = [torch.cuda.Stream() for _ in range(16)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results = []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(cuda_softmax.softmax(x))
    torch.cuda.synchronize()
    assert all(identical(result, alone) for result in results)


def steps_of(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> list[torch.Tensor]:
    """layer_norm step by step, each mean by the kernel of class lanes: what the one launch has to give, bit for bit."""
    mean = triton_rows.mean(x.float())[..., None]
    centred = x.float() - mean
    scale = 1.0 / replacements.root(triton_rows.mean(centred * centred)[..., None] + eps)
    out = centred * scale * (1.0 if weight is None else weight.float())
    out = out if bias is None else out + bias.float()
    return [out.to(x.dtype).contiguous(), mean, scale]


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE)
@pytest.mark.parametrize(
    "shape", [(2, 3, 128), (3, 77), *at_length(((1, 4096),), ((5, 1),), ((300, 16),), ((2, 16384),))]
)
def test_layer_norm_in_one_launch_has_the_bits_of_its_steps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With and without parameters, of rows in place and strided ones, of ordinary numbers and of nearly equal ones."""
    width = shape[-1]
    weight, bias = make("bell", width, dtype=dtype), make("bell", width)
    strided = make("wide", *shape[:-1], 2 * width, dtype=dtype)[..., ::2]
    plain, near = make("bell", *shape, dtype=dtype), torch.full_like(strided, 3.0) + strided * 1e-3
    for x, parameters, eps in (
        *((plain, parameters, 1e-5) for parameters in ((weight, bias), (None, bias), (None, None))),
        *((x, (weight, None), 0.5) for x in (strided, near)),
        (near, (weight, bias), 1e-5),
    ):
        made = triton_rows.layer_norm(x, *parameters, eps)
        second = triton_rows.layer_norm(x, *parameters, eps)  # perhaps by what the first is remembered by
        for got, again, right in zip(made, second, steps_of(x, *parameters, eps), strict=True):
            assert identical(got, right)
            assert got.stride() == right.stride()
            assert identical(again, right)
    if width > 1:
        other = triton_rows.layer_norm(x, *parameters, 1e-2)
        assert not identical(other[0], made[0])


@pytest.mark.gpu
def test_layer_norm_keeps_subnormal_numbers() -> None:
    """A variance below what Triton's own roots keep, and no eps: torch's steps keep it, and so does the kernel."""
    x = torch.full((2, 64), 1e-20, device="cuda")
    x[:, ::2] *= 1.5
    made = triton_rows.layer_norm(x, None, None, 0.0)
    for got, right in zip(made, steps_of(x, None, None, 0.0), strict=True):
        assert identical(got, right)


def test_what_is_remembered_under_inference_mode_serves_outside_of_it() -> None:
    """And the other way round: a result is one of the mode that it was asked for in. A fake tensor has no place."""
    x, weight = make("bell", 3, 92), make("bell", 92)
    for first in (True, False):
        triton_common.forget()
        results = []
        for mode in (first, not first, first):
            with torch.inference_mode(mode):
                results.append(triton_rows.rms_norm(x, weight, 1e-6))
                assert results[-1].is_inference() is mode
        assert all(identical(out, results[0]) for out in results)
    assert triton_common.again(("rms_norm", 1e-6), x, weight) is not None
    with FakeTensorMode() as fake, warnings.catch_warnings(action="ignore"):  # torch warns of the place that is 0
        assert triton_common.again(("rms_norm", 1e-6), fake.from_tensor(x), fake.from_tensor(weight)) is None
