"""Torch's own operator database at several batch sizes inside the block: equal bits, or the coverage says so.

Any operator that computes each row by itself, going by float64, is run with one row, with its sample's rows and with
seven times as many. Its rows then have equal bits, or the call is among what was left or is at risk.
"""

import functools
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from nondet.core.certificates import Certificates
from nondet.core.compare import identical
from nondet.kernels.dispatch import block as dispatch_block
from nondet.kernels.dispatch import functions as dispatch_certified
from nondet.kernels.dispatch import operators
from nondet.kernels.dispatch.block import Registration, batch_invariant
from nondet.kernels.dispatch.state import guarded
from tests.kernels.tiers import at_length, exposed

TIMES = 7
SAMPLES = 4
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# They write past running_mean where it has fewer channels than the input.
NORMS = {"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"}
NOT_ASKED = UNINITIALIZED | NORMS | {"torch.ops.aten._batch_norm_with_update"}
# Not watched on a CPU: with `alpha`, and on complex numbers (docs/limits.md).
ARITHMETIC = {"abs", "add", "div", "mul", "rsub", "sub", "true_divide", "__radd__", "__rdiv__", "__rmul__", "__rsub__"}


def outputs(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def plain(x: torch.Tensor) -> bool:
    return x.layout == torch.strided and not x.is_quantized and not x.is_nested


def batch(sample: Any, everything: bool, rows: int, dtype: torch.dtype | None = None) -> Any:
    """(input, args, kwargs) of one sample with so many rows: of its input, or of all tensors that share the first axis.
    Fresh copies, floating ones in the dtype if one is given."""
    first = outputs(sample.input)[0]
    own = first.shape[0]

    def change(x: torch.Tensor) -> torch.Tensor:
        floating = x.dtype.is_floating_point or x.dtype.is_complex
        if x is first or (everything and x.dim() > 0 and x.shape[0] == own):
            x = x.repeat(-(-rows // own), *[1] * (x.dim() - 1))[:rows]
            if floating:
                x[own:] *= 0.5  # not the same rows again, of which a mean would be the same
        if dtype is not None and floating:
            x = x.to(torch.complex128 if x.dtype.is_complex else dtype)
        return x.clone()

    return tree_map_only(torch.Tensor, change, (sample.input, sample.args, sample.kwargs))


def call(function: Callable[..., Any], parts: Any) -> list[torch.Tensor]:
    torch.default_generator.manual_seed(5)  # torch.manual_seed writes a stack trace down for CUDA, at each call
    value, args, kwargs = parts
    return outputs(function(value, *args, **kwargs))


def row_wise(function: Callable[..., Any], made: Callable[..., Any], rows: int) -> list[int]:
    """Which outputs compute their rows alone, going by float64."""
    small, large, alone = (call(function, made(n, torch.float64)) for n in (rows, rows * TIMES, 1))
    if not len(small) == len(large) == len(alone):
        return []
    places = []
    for place, (a, b, c) in enumerate(zip(small, large, alone, strict=True)):
        if a.dim() == 0 or a.shape[0] != rows or b.shape != (rows * TIMES, *a.shape[1:]):
            continue
        if c.shape != (1, *a.shape[1:]) or a.dtype != b.dtype or not a.numel() or not plain(a):
            continue
        if all(torch.allclose(x, y, rtol=1e-7, atol=1e-9, equal_nan=True) for x, y in ((b[: len(a)], a), (a[:1], c))):
            places.append(place)
    return places


def ask(op: Any, dtype: torch.dtype) -> tuple[int, list[str]]:
    """How many calls of its rows stand alone, and those of them that gave other bits with nothing said."""
    judged, silent = 0, []
    try:
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES))
    except Exception:  # noqa: BLE001 - a sample that this build can't make
        return judged, silent
    forms = [op.op] + ([op.inplace_variant] if op.inplace_variant is not None else [])
    for number, sample in enumerate(samples):
        if op.name in ARITHMETIC and (dtype.is_complex or sample.kwargs.get("alpha", 1) != 1):
            continue
        inputs = outputs(sample.input)
        if not inputs or not plain(inputs[0]) or inputs[0].dim() == 0 or inputs[0].shape[0] < 2:
            continue
        for everything, function in itertools.product((True, False), forms):
            made, own = functools.partial(batch, sample, everything), inputs[0].shape[0]
            sizes = (own, own * TIMES, 1)
            try:
                places = guarded(row_wise)(function, made, own)
                for rows in sizes:
                    guarded(call)(function, made(rows))
            except Exception:  # noqa: BLE001, S112 - stock takes no float64, or this way of giving it more rows does not fit
                continue
            if not places:
                continue
            with batch_invariant() as block:
                small, large, alone = (call(function, made(rows)) for rows in sizes)
            judged += 1
            for place in places:
                a, b, c = (x[place].contiguous() for x in (small, large, alone))
                alike = identical(a, b[: len(a)].contiguous()) and identical(a[:1].contiguous(), c)
                if not alike and not exposed(block):
                    silent.append(f"{op.name} {function.__name__} {dtype} sample {number} output {place}")
            break
    return judged, silent


@functools.cache
def database() -> list[Any]:
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:  # it needs expecttest, which our dev extras have: where CI lacks it this has to fail
        if os.environ.get("CI"):
            raise
        pytest.skip(f"torch's operator database can't be imported ({error})")
    return list(op_db)


def asked_of(names: set[str] | None = None) -> Iterator[Any]:
    for op in database():
        if op.name not in NOT_ASKED and (names is None or op.name in names):
            yield op


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates in memory; and the database's iterators, without the stack traces that are half of their time."""
    kept = Certificates({}, None)
    monkeypatch.setattr(dispatch_certified, "certificates", lambda device: kept)
    monkeypatch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
    database()
    for module in ("common_utils", "opinfo.core"):  # each calls it by its own name
        monkeypatch.setattr(sys.modules[f"torch.testing._internal.{module}"], "extract_test_fn", lambda: None)


def sweep(names: set[str] | None = None, dtype: torch.dtype = torch.float32) -> tuple[int, list[str]]:
    """How many operators were judged, and the calls that gave other bits with nothing said."""
    judged, silent = 0, []
    with warnings.catch_warnings(action="ignore"), torch.no_grad(), batch_invariant():
        for op in asked_of(names):
            calls, found = ask(op, dtype) if dtype in op.dtypes else (0, [])
            judged += calls > 0
            silent += found
    return judged, silent


FEW = 8  # of the database by default: each so many-th operator, and all in a run at length


@pytest.mark.parametrize(
    ("dtype", "every"),
    [(torch.float32, FEW), *at_length((torch.float32, 1), (torch.bfloat16, 1), (torch.complex64, 1))],
    ids=str,
)
def test_every_operator_is_invariant_or_said_not_to_be(dtype: torch.dtype, every: int, in_memory: None) -> None:
    judged, silent = sweep({op.name for op in [*asked_of()][::every]}, dtype)
    assert not silent, "\n".join(silent)
    assert judged > (100 if dtype == torch.complex64 else 200) // every


def test_a_wrong_entry_of_the_list_is_caught(in_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator put on the list that does not belong there is found: an atan2 that gives a single row other bits."""

    def planted(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out = torch.atan2(x, other)
        return out * (1 + 2.0**-20) if x.dtype == torch.float32 and len(x) == 1 else out

    atan2 = next(op for op in database() if op.name == "atan2")
    faulty = SimpleNamespace(
        name="atan2", op=planted, inplace_variant=None, dtypes=atan2.dtypes, sample_inputs=atan2.sample_inputs
    )
    monkeypatch.setattr(sys.modules[__name__], "database", lambda: [faulty])
    assert sweep() == (1, [])  # it is at risk, and said to be
    wrong = {**operators.EXACT, "wrong": frozenset({"atan2"})}
    monkeypatch.setattr(operators, "EXACT", wrong)
    monkeypatch.setattr(dispatch_block, "_registration", Registration(dispatch_block.decided))
    assert sweep()[1]
