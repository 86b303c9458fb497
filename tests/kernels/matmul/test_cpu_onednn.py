"""Weights kept in oneDNN's layout: the plain weight's bits, and only as long as the weight is what was copied."""

from __future__ import annotations

import pytest
import torch

from nondet import batch_invariant
from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.core.launch import listen
from nondet.errors import UserError
from nondet.kernels.matmul import cpu
from nondet.kernels.matmul.cpu import linear

DTYPES = [torch.bfloat16, torch.float32]


def layer(dtype: torch.dtype, bias: bool) -> torch.nn.Linear:
    made = torch.nn.Linear(192, 160, bias=bias)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(make("wide", tuple(parameter.shape), torch.float32, "cpu", generator(3, "cpu")))
    return made.to(dtype)


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a layout for the dtype here, as it has none in bfloat16 without AVX-512."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(32, 32, dtype=dtype), None)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_and_plain_have_the_same_bits(dtype: torch.dtype, bias: bool) -> None:
    """At every number of rows, those between the certified ones too; and a row has its own bits in all of them."""
    module = layer(dtype, bias)
    x = make("wide", (70, 192), dtype, "cpu", generator(4, "cpu"))
    with torch.no_grad(), batch_invariant() as block:
        plain = {rows: module(x[:rows]) for rows in (1, 2, 3, 5, 16, 17, 33, 41, 70)}
        assert (block.pack(module) > 0) == packs(dtype)
        with listen() as notes:
            for rows, expected in plain.items():
                got = module(x[:rows])
                assert identical(got, expected)
                assert identical(got, plain[70][:rows])
        assert any("packed" in note for note in notes) == packs(dtype)
    assert not cpu._packed


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_changed_is_not_taken_from_its_copy(dtype: torch.dtype) -> None:
    """An optimizer's step in the block: the product is the new weight's. Another layer's copy still serves."""
    if not packs(dtype):
        pytest.skip("oneDNN has no layout for it here")
    module, other = layer(dtype, False), layer(dtype, False)
    x = make("wide", (5, 192), dtype, "cpu", generator(4, "cpu"))
    with torch.no_grad(), batch_invariant() as block:
        block.pack(torch.nn.Sequential(module, other))
        before = module(x)
        module.weight.mul_(2.0)
        with listen() as notes:
            after = module(x)
        assert not any("packed" in note for note in notes)
        assert identical(after, before * 2.0)
        with listen() as notes:
            assert identical(other(x), before)
        assert any("packed" in note for note in notes)


def test_no_more_is_copied_than_was_allowed() -> None:
    """Room for one of two weights: one is copied, the other computed plainly. There is none outside of a block."""
    modules = torch.nn.Sequential(layer(torch.float32, False), torch.nn.Linear(160, 192, bias=False))
    size = 192 * 160 * 4
    with torch.no_grad(), batch_invariant() as block:
        assert block.pack(modules, most=size - 1) == 0
        assert block.pack(modules, most=2 * size - 1) == size
        assert len(cpu._packed) == 1
    with pytest.raises(UserError, match="outside"):
        block.pack(modules)


def test_float32_layers_take_no_sixteen_rows_for_one() -> None:
    """A float32 weight's class is oneDNN's inner product, which has few rows in it; a small operand's is the GEMM's."""
    x, weight = torch.rand(3, 192), layer(torch.float32, False).weight.detach()
    with listen() as notes:
        linear(x, weight)
        linear(x[:, :8], weight[:8, :8].contiguous())
    assert [n.partition("[")[0] for n in notes] == ["cpu_matmul float32 inner product", "cpu_matmul float32"]


def test_blocks_left_in_any_order_leave_no_copy() -> None:
    """First in, first out: a later block that packs nothing reads the weight as it is by then."""
    module = layer(torch.float32, False)
    x = make("wide", (4, 192), torch.float32, "cpu", generator(4, "cpu"))
    with torch.no_grad():
        first, second = batch_invariant(), batch_invariant()
        first.__enter__().pack(module)
        second.__enter__().pack(module)
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert not cpu._packed
        module.weight.data.copy_(-module.weight)
        with batch_invariant():
            assert torch.allclose(module(x), torch.nn.functional.linear(x, module.weight), rtol=1e-3, atol=1e-1)


def test_what_counts_no_changes_is_not_packed() -> None:
    """Weights made in inference mode; and one turned around in its place is not taken for what was copied."""
    with torch.inference_mode():
        unseen = layer(torch.float32, False)
    square = torch.nn.Linear(160, 160, bias=False)
    x = make("bell", (4, 160), torch.float32, "cpu", generator(4, "cpu"))
    with torch.no_grad(), batch_invariant() as block:
        assert block.pack(unseen) == 0
        block.pack(square)
        square(x)
        square.weight.data = square.weight.data.t()
        wanted = x.double() @ square.weight.double().t()
        assert torch.allclose(square(x).double(), wanted, atol=1e-4)
