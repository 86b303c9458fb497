"""A second call on CUDA is decided: the bits, the coverage and the notes of the first, and nothing stale."""

import ast
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nondet
from nondet.core.compare import identical
from nondet.core.inputs import generator, order_revealing
from nondet.core.launch import listen
from nondet.kernels.dispatch.again import BINDERS, Binder
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.dispatch.functions import call_key, replacing
from nondet.kernels.dispatch.state import kernels_for
from tests.kernels.tiers import at_length, in_full


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *at_length(torch.float16)])
def test_a_second_call_is_the_first_one_again(dtype: torch.dtype) -> None:
    """In full the replacement runs; else only at the first call, also while torch would record a gradient that nobody
    asks for."""
    for name, (call, given) in calls(dtype).items():
        operands = tuple(x.cuda() for x in given)
        for recorded in (False, True):
            seen, noted, counted = [], [], []
            with torch.set_grad_enabled(recorded), strictly():
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


def strictly() -> Any:
    """Our warnings are errors; Triton's compiler has others."""
    return warnings.catch_warnings(action="error", category=RuntimeWarning)


@pytest.mark.gpu
def test_what_a_plan_was_not_made_for_is_no_second_call() -> None:
    """Strided rows, another place in memory, other numbers there, NaN and infinities: as the replacement has them."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape).copy_(x)

    def strided(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(*x.shape[:-1], 2 * x.shape[-1], device="cuda")[..., : x.shape[-1]].copy_(x)

    def odd(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[(0,) * (y.dim() - 1)][:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
        return y

    with torch.no_grad(), batch_invariant(), strictly():
        for name, (call, given) in calls(torch.float32).items():
            operands = tuple(x.cuda() for x in given)
            for change in (torch.clone, moved, strided, odd, torch.neg):
                for first in (True, False):
                    others = [change(x) if (i == 0) is first else x for i, x in enumerate(operands)]
                    with in_full():
                        right = call(*others)
                    for _ in range(2):
                        call(*operands)
                        assert identical(call(*others), right), (name, change)


def test_a_call_whose_gradient_is_needed_has_no_key() -> None:
    """And one whose gradient is not, has: whatever torch would record."""
    x, weight = drawn(2, 8), torch.nn.Parameter(drawn(8))

    def key(*args: Any) -> tuple[object, ...]:
        return call_key("mm", args, {}, 64, ())

    with torch.no_grad():
        assert key(x, weight, 0.1)
    with torch.enable_grad():
        assert key(x, weight.detach(), [8], None)
        assert not key(x, weight)
        assert not key(x.clone().requires_grad_())


def test_a_decision_is_for_calls_that_agree_in_all_that_decides() -> None:
    """Shapes, strides, dtypes, alignment, numbers, options, settings and the block: each change is decided anew."""
    settings, decided = ["one"], list[Any]()

    def bind(*args: Any, **kwargs: Any) -> Any:
        decided.append((args, kwargs))
        return lambda *args, **kwargs: args[0]

    stock = SimpleNamespace(call_boxed=lambda *args, **kwargs: pytest.fail("stock ran"))
    binder = Binder(bind, lambda: settings[0])
    call = functools.partial(
        replacing("mm", "matmul", lambda: kernels_for("cpu"), stock, lambda kernels, *args, **kwargs: args[0], binder),
        torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
    )
    room = torch.zeros(256)
    room = room[-room.data_ptr() // 4 % 64 :]  # at a multiple of 256 bytes
    x = room[:64].view(8, 8)
    same = [x, room[64:128].view(8, 8), torch.nn.Parameter(x, requires_grad=False)]
    different: list[tuple[Any, ...]] = [
        (x.t(),), (x.view(4, 16),), (x.view(torch.int32),), (room[1:65].view(8, 8),),
        (x, 1), (x, 2), (x, None), (x, x), (x, [1]), (x, [1, 2]), (x, {"beta": 2}), (x, {"alpha": 2}),
    ]  # fmt: skip
    with torch.no_grad(), batch_invariant(["matmul"]):
        for alike in same:
            call(alike)
        assert len(decided) == 1
        for count, given in enumerate(different, 2):
            kwargs = given[-1] if isinstance(given[-1], dict) else {}
            for _ in range(2):
                call(*given[: len(given) - bool(kwargs)], **kwargs)
            assert len(decided) == count, given
        for settings[0] in ("two", "one"):
            call(x)
        with batch_invariant(["softmax"]):
            call(x)
        call(x)
    assert len(decided) == len(different) + 4, "other settings, once, and after each change of what is on"
    products, launches = BINDERS["mm"], BINDERS["_softmax"]
    seen = {products.settings()}
    before = torch.backends.cuda.matmul.fp32_precision
    for torch.backends.cuda.matmul.fp32_precision in ("tf32", "ieee"):
        seen.add(products.settings())
    torch.backends.cuda.matmul.fp32_precision = before
    assert {"tf32", "ieee"} <= seen
    if torch.cuda.is_available():
        assert launches.settings() == torch.cuda.current_device()
    by_products = {name for name, binder in BINDERS.items() if binder.settings is products.settings}
    assert by_products == {"linear", "mm", "addmm"}


# Of these torch asks the default dtype where none is named.
FACTORIES = frozenset({"empty", "eye", "linspace", "normal", "ones", "rand", "randn", "zeros"})
KERNELS = sorted((Path(nondet.__file__).parent / "kernels").glob("**/*.py"))


@pytest.fixture(params=[torch.bfloat16, *at_length(torch.float64)], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Entered by the test itself, for what is drawn before is float32."""
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.bfloat16)], ids=str)
def test_a_call_and_its_second_are_those_of_float32(dtype: torch.dtype, default: torch.dtype, device: str) -> None:
    """A CPU made a mean of float64 then, or ended in NumPy's TypeError, as attention did."""
    for name, (call, given) in calls(dtype).items():
        operands = tuple(x.to(device) for x in given)
        with torch.no_grad(), batch_invariant():
            right = call(*operands)
            torch.set_default_dtype(default)
            made = [call(*operands) for _ in range(2)]
            torch.set_default_dtype(torch.float32)
        assert [out.dtype for out in made] == [right.dtype] * 2, name
        assert all(identical(out, right) for out in made), name


def test_proofs_draw_their_inputs_in_float32(default: torch.dtype) -> None:
    right = order_revealing(8, 96, torch.float32, 3, negate=True)
    torch.set_default_dtype(default)
    assert identical(order_revealing(8, 96, torch.float32, 3, negate=True), right)


def test_every_room_of_a_kernel_names_its_dtype() -> None:
    """Kernels of a GPU, too: sums of float32 in a room of bfloat16 would be rounded on their way."""
    assert len(KERNELS) > 50
    unnamed = [
        f"{path}:{node.lineno}"
        for path in KERNELS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and not any(keyword.arg in ("dtype", "out") for keyword in node.keywords)
    ]
    assert not unnamed
