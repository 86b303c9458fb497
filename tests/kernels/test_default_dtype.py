"""torch.set_default_dtype(bfloat16), as some serve whole models under it, changes no bit and no dtype of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nondet
from nondet.core.compare import identical
from nondet.core.inputs import order_revealing
from nondet.kernels.dispatch.block import batch_invariant
from tests.kernels.dispatch.test_again import calls
from tests.kernels.tiers import at_length

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
