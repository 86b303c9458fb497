"""A second call takes a short way: the bits, the coverage and the notes of the first, and nothing stale."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nondet.core.compare import identical
from nondet.core.inputs import generator
from nondet.core.launch import listen
from nondet.kernels.attention.cuda import attention
from nondet.kernels.dispatch.again import short_way
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.dispatch.functions import _plainly
from nondet.kernels.rows import cuda
from nondet.kernels.triton_common import forget
from tests.build import DEVICE
from tests.kernels.tiers import at_length, in_full

WAYS_ON_A_GPU = (
    *("_softmax", "_log_softmax", "mean.dim", "sum.dim_IntList", "rms_norm", "native_layer_norm"),
    "scaled_dot_product_attention",
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed, "cpu")).to(dtype)


def calls(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    """Operator -> (call, operands); widths that no other test has."""
    x, wide, cube = drawn(5, 77, dtype=dtype), drawn(5, 320, dtype=dtype), drawn(2, 3, 77, dtype=dtype)
    weight, bias = drawn(77, dtype=dtype, seed=2), drawn(77, dtype=dtype, seed=3)
    layer, large = drawn(48, 77, dtype=dtype, seed=4), drawn(320, 320, dtype=dtype, seed=5)
    q, k = drawn(2, 4, 1, 16, dtype=dtype), drawn(2, 4, 70, 16, dtype=dtype, seed=6)
    return {
        "linear": (F.linear, (x, layer)),
        "linear, 3 axes and a bias": (F.linear, (cube, layer, bias[:48])),
        "linear, large": (F.linear, (wide, large)),
        "mm": (torch.mm, (x, layer.t().contiguous())),
        "mm, transposed": (torch.mm, (wide, large.t())),
        "addmm": (torch.addmm, (bias[:48], x, layer.t())),
        "softmax": (lambda x: torch.softmax(x, -1), (x,)),
        "softmax, 3 axes": (lambda x: torch.softmax(x, -1), (cube,)),
        "softmax, the other axis": (lambda x: torch.softmax(x, 0), (x,)),
        "softmax, hidden": (lambda x: torch.softmax(x * 1e4, -1), (cube,)),
        "log_softmax": (lambda x: torch.log_softmax(x, -1), (x,)),
        "mean": (lambda x: x.mean(-1), (x,)),
        "mean, kept": (lambda x: x.mean(-1, keepdim=True), (cube,)),
        "mean over the batch": (lambda x: x.mean(0), (x,)),
        "sum": (lambda x: x.sum(1), (x,)),
        "rms_norm": (lambda x, w: F.rms_norm(x, (77,), w, 1e-6), (cube, weight)),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (77,), w, b), (cube, weight, bias)),
        "layer_norm, bare": (lambda x: F.layer_norm(x, (77,)), (x,)),
        "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), (q, k)),
        "attention, causal": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (k,)),
        "attention, GQA": (
            lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True, scale=0.3),
            (q, k[:, :2].contiguous()),
        ),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *at_length(torch.float16)])
def test_a_second_call_is_the_first_one_again(dtype: torch.dtype, device: str) -> None:
    """In full the replacement runs; else it may at the first call, and later ones take the short way, also
    while torch would record a gradient that nobody asks for."""
    few = dtype == torch.bfloat16 and device == "cpu"  # what a CPU computes by another library than float32
    for name, (call, given) in calls(dtype).items():
        if few and name not in ("linear", "mm", "softmax", "rms_norm", "attention"):
            continue
        operands = tuple(x.to(device) for x in given)
        for recorded in (False, True):
            seen, noted, counted = [], [], []
            with torch.set_grad_enabled(recorded), strictly(device):
                for full in (True, True, False, False, False):  # the first proves, and notes that too
                    way = in_full() if full else nullcontext()
                    with batch_invariant() as block, listen() as notes, way:
                        seen.append(call(*operands))
                    noted.append(dict(notes))
                    counted.append(block.coverage().counts())
            assert all(identical(out, seen[0]) for out in seen), name
            assert all(out.stride() == seen[0].stride() for out in seen), name
            assert noted[1:] == noted[1:2] * 4, name
            assert counted == counted[:1] * 5, name


def strictly(device: str) -> Any:
    """Warnings are errors; on a GPU ours alone, for Triton's compiler has others."""
    return warnings.catch_warnings(action="error", category=Warning if device == "cpu" else RuntimeWarning)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_plan_was_not_made_for_is_no_second_call(device: str) -> None:
    """Strided rows, another place in memory, other numbers there, NaN and infinities: as the replacement has them."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.numel() + 1, device=device)[1:].view(x.shape).copy_(x)

    def strided(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(*x.shape[:-1], 2 * x.shape[-1], device=device)[..., : x.shape[-1]].copy_(x)

    def odd(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[(0,) * (y.dim() - 1)][:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
        return y

    with torch.no_grad(), batch_invariant(), strictly(device):
        for name, (call, given) in calls(torch.float32).items():
            operands = tuple(x.to(device) for x in given)
            for change in (torch.clone, moved, strided, odd, torch.neg):
                for first in (True, False):
                    others = [change(x) if (i == 0) is first else x for i, x in enumerate(operands)]
                    with in_full():
                        right = call(*others)
                    for _ in range(2):
                        call(*operands)
                        assert identical(call(*others), right), (name, change)


def test_a_gradient_that_is_asked_for_has_no_short_way() -> None:
    """And one that is not, has: whatever torch would record."""
    x, weight = drawn(2, 8), torch.nn.Parameter(drawn(8))
    with torch.no_grad():
        assert _plainly((x, weight, 0.1))
    with torch.enable_grad():
        assert _plainly((x, weight.detach(), [8], None))
        assert not _plainly((x, weight))
        assert not _plainly((x.clone().requires_grad_(),))


def test_what_is_trained_can_be_added_in_place() -> None:
    """To the result of what is not, as torch allows: at the first call, and by the short way."""
    x, weight = drawn(1, 2, 5, 16), drawn(16, 16, seed=2)
    added = drawn(16, seed=3).requires_grad_()
    with batch_invariant():
        for call in (lambda: F.linear(x, weight), lambda: F.scaled_dot_product_attention(x, x, x)):
            for _ in range(3):
                out = call()
                out += added
                (gradient,) = torch.autograd.grad(out.sum(), added)
                assert gradient.tolist() == [10.0] * 16


def test_a_plan_is_of_its_settings() -> None:
    """Another number of threads is another proof; a plan of one is none of the other."""
    x, weight = drawn(5, 91), drawn(64, 91, seed=2)
    threads = torch.get_num_threads()
    with torch.no_grad(), batch_invariant():
        for _ in range(3):
            F.linear(x, weight)
        try:
            torch.set_num_threads(threads + 1)
            with in_full():
                right = F.linear(x, weight)
            assert identical(F.linear(x, weight), right)
        finally:
            torch.set_num_threads(threads)


def test_attention_is_asked_for_as_a_whole(request: pytest.FixtureRequest) -> None:
    """One pair of shapes, and a flag, a scale, a mask or what stands in the mask decides: no plan takes another's."""
    q, k, v = (drawn(2, 4, 9, 16, seed=seed) for seed in (1, 2, 3))
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    mask[..., 0] = False
    attend = F.scaled_dot_product_attention
    asked: dict[str, Callable[[], torch.Tensor]] = {
        "whole": lambda: attend(q, k, v),
        "causal": lambda: attend(q, k, v, is_causal=True),
        "scaled": lambda: attend(q, k, v, scale=0.5),
        "masked": lambda: attend(q, k, v, attn_mask=mask),
        "by token": lambda: attend(q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        "fewer heads": lambda: attend(q, k[:, :2], v[:, :2], enable_gqa=True),
        "half": lambda: attend(q.half(), k.half(), v.half()),
    }
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    with torch.no_grad(), batch_invariant():
        for turn in range(3):
            torch.set_num_threads(threads + turn % 2)
            with in_full():
                right = {name: call() for name, call in asked.items()}
            for name, call in asked.items():
                assert identical(call(), right[name]), (name, turn)
            assert len({out.float().sum().item() for out in right.values()}) == 6  # by token is whole
            with pytest.raises(RuntimeError):
                attend(q, k[:, :2], v[:, :2])  # torch's own error, though such shapes with enable_gqa were before
            mask[1, :, :, : turn + 2] = False  # the mask's content, in place


def test_numbers_that_are_to_be_read_negated() -> None:
    """As the imaginary part of a conjugate is: composed operators are met before torch negates them."""
    for name in ("linear", "linear, 3 axes and a bias", "rms_norm", "attention"):
        call, operands = calls(torch.float32)[name]
        for place, mode in itertools.product(range(len(operands)), (torch.no_grad, torch.inference_mode, nullcontext)):
            negated, plain = list(operands), list(operands)
            negated[place], plain[place] = torch.complex(operands[place], operands[place]).conj().imag, -operands[place]
            assert negated[place].is_neg()
            with mode(), batch_invariant():
                right = call(*plain)
                assert all(identical(call(*negated), right) for _ in range(3)), name
                assert not identical(call(*operands), right), name


def test_a_norms_parameters_of_another_dtype_are_torchs_error() -> None:
    """Neither rounded nor robbed of their imaginary part, at the first call and after one of these shapes."""
    x, weight = drawn(5, 77), drawn(77, seed=2)
    with torch.no_grad(), batch_invariant():
        for dtype in (torch.float64, torch.bfloat16, torch.complex64):
            for given in ((weight.to(dtype), weight), (weight, weight.to(dtype)), (weight.to(dtype), None)):
                with pytest.raises(RuntimeError, match="scalar type"):
                    F.layer_norm(x, (77,), *given)
            F.layer_norm(x, (77,), weight, weight)
        half = x.bfloat16()
        assert identical(F.layer_norm(half, (77,), weight, weight), F.layer_norm(half, (77,), weight, weight))


@pytest.mark.parametrize("layout", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn])
def test_a_layout_without_plain_memory_is_left_to_torch(layout: Callable[..., torch.Tensor]) -> None:
    """Also where a plain call of these shapes was before; nobody is warned of a fault of ours."""
    operands = [drawn(5, 77), drawn(48, 77, seed=4)]
    for place in (0, 1):
        unusual = [layout(x) if i == place else x for i, x in enumerate(operands)]
        with torch.no_grad(), warnings.catch_warnings(action="error", category=RuntimeWarning):
            try:
                right = F.linear(*unusual)
            except RuntimeError:  # torch has none
                right = None
            with batch_invariant() as block:
                F.linear(*operands)
                for _ in range(2):
                    if right is None:
                        with pytest.raises((RuntimeError, NotImplementedError)):
                            F.linear(*unusual)
                    else:
                        made = F.linear(*unusual)
                        assert made.layout == right.layout
                        assert torch.allclose(made.to_dense(), right.to_dense(), atol=1e-4)  # stock's, in parts
        assert block.coverage().replaced["linear"] == 1


def test_gradients_take_no_short_way() -> None:
    """What autograd records is the operator: a second call has its gradient as the first."""
    x, weight = drawn(5, 77), drawn(48, 77, seed=4).requires_grad_()
    gradients = []
    with batch_invariant():
        for _ in range(3):
            (gradient,) = torch.autograd.grad(F.linear(x, weight).sum(), weight)
            gradients.append(gradient)
            with torch.no_grad():
                F.linear(x, weight)
    assert identical(gradients[0], gradients[1])
    assert identical(gradients[0], gradients[2])


def test_kept_memory_leaves_nothing_behind() -> None:
    """Few rows, or few blocks of keys, are written into memory that stands ready.

    Not for the next call, another thread or another mode to meet, and never given away.
    """
    weight, rows = drawn(64, 93, seed=2), [drawn(count, 93, seed=count + 5) for count in (1, 2, 3, 5)]
    heads = [drawn(1, 4, count, 16, seed=count) for count in (1, 2, 70, 130)]
    operators: list[tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]] = [
        (lambda x: F.linear(x, weight), rows),
        (lambda x: torch.mm(x, weight.t()), rows),
        (lambda x: F.scaled_dot_product_attention(x[:, :, :1], x, x), heads),
        (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), heads),
    ]
    wrong: list[tuple[int, tuple[int, ...]]] = []

    def compute(turns: int) -> None:
        with torch.no_grad():
            for _ in range(turns):
                for i, (call, inputs) in enumerate(operators):
                    for x, right in zip(inputs, expected[i], strict=True):
                        call(torch.full_like(x, torch.nan))
                        got = call(x)
                        call(x.neg())  # what was given is nobody's to write anew
                        wrong.extend([(i, tuple(x.shape))] * (not identical(got, right)))

    with batch_invariant():
        with torch.no_grad(), in_full():
            expected = [[call(x) for x in inputs] for call, inputs in operators]
        with torch.inference_mode():
            compute(3)
        compute(3)
        threads = [threading.Thread(target=compute, args=(10,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        compute(10)
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.slow
def test_short_ways_of_a_gpu_are_the_launches_remembered() -> None:
    """Run in Triton's interpreter: what fits is the launcher's result again, and anything else has no short way."""
    if DEVICE != "cpu":
        pytest.skip("on a GPU the operators themselves are run, above")
    forget()
    x, weight, bias = drawn(2, 3, 84), drawn(84, seed=2), drawn(84, seed=3)
    q, k, v = (drawn(2, heads, 9, 16, seed=heads) for heads in (4, 2, 6))
    v = v[:, :2].contiguous()
    ways = {name: short_way(name, "CUDA", torch.softmax, False) for name in WAYS_ON_A_GPU}
    asked: list[tuple[str, Callable[[], Any], tuple[Any, ...], dict[str, Any], list[tuple[Any, ...]]]] = [
        ("_softmax", lambda: cuda.softmax(x), (x, -1, False), {}, [(x, 0, False), (x, -1, True)]),
        ("_log_softmax", lambda: cuda.log_softmax(x), (x, 2, False), {}, [(x, 3, False)]),
        ("mean.dim", lambda: cuda.mean(x)[..., None], (x, [-1], True), {}, [(x, [0, 2], False), (x, [0], True)]),
        ("sum.dim_IntList", lambda: cuda.sum(x), (x, [2]), {}, [(x, None), (x, [])]),
        ("rms_norm", lambda: cuda.rms_norm(x, weight, 0.1), (x, [84], weight, 0.1), {}, [(x, [84], weight, 0.2)]),
        (
            "native_layer_norm",
            lambda: cuda.layer_norm(x, weight, bias, 0.1),
            (x, [84], weight, bias, 0.1),
            {},
            [(x, [3, 84], weight, bias, 0.1), (x, [84], weight, None, 0.1)],
        ),
        (
            "scaled_dot_product_attention",
            lambda: attention(q, k, v, causal=True, scale=0.3),
            (q, k, v, None, 0.0, True),
            {"scale": 0.3, "enable_gqa": True},
            [(q, k, v, None, 0.5, True), (q, k, v, None, 0.0, False), (q[:, :, :1], k, v)],
        ),
    ]
    for name, launcher, args, kwargs, others in asked:
        way = ways[name]
        assert way is not None
        assert way(*args, **kwargs) is None, name  # nothing is remembered yet
        with listen() as expected:
            wanted = launcher()
        with listen() as notes:
            made = way(*args, **kwargs)
        assert made is not None
        assert notes == expected
        for got, out in zip(*(x if isinstance(x, tuple) else (x,) for x in (made, wanted)), strict=True):
            assert identical(got, out)
            assert (got.shape, got.stride()) == (out.shape, out.stride())
        assert all(way(*other, **kwargs) is None for other in others), name
    assert ways["scaled_dot_product_attention"](q, k, v, None, 0.0, True, scale=0.3) is None  # heads that differ
    for spread in (1.0, 1e3):
        with batch_invariant() as block:
            assert ways["_softmax"](x * spread, -1, False) is not None
            assert any("hidden" in line for line in block.coverage().lines()) == (spread > 1)


class Tagged(torch.Tensor):
    """A tensor with a type of its own, as users make them."""


@pytest.mark.slow
def test_a_launch_again_has_a_first_ones_type() -> None:
    """Room is made like an operand, but not of its class, whose functions may be its own."""
    if DEVICE != "cpu":
        pytest.skip("in Triton's interpreter")
    forget()
    x = drawn(3, 84).as_subclass(Tagged)
    assert [type(cuda.softmax(x)) for _ in range(2)] == [torch.Tensor] * 2
