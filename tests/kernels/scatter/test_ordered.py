"""index_add and scatter_add in the index's own order."""

from __future__ import annotations

import pytest
import torch

from nondet.core.compare import error_against, identical
from nondet.core.inputs import generator, make
from nondet.kernels import reference
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.experts import cpu as ordered_scatter
from tests.build import DEVICE, accuracy_bound


def case(dtype: torch.dtype, kind: str = "bell") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = generator(10, DEVICE)
    target = make("bell", (40, 6), dtype, DEVICE, rng)
    index = torch.randint(0, 40, (999,), generator=rng, device=DEVICE)
    return target, index, make(kind, (999, 6), dtype, DEVICE, rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values(dtype: torch.dtype) -> None:
    """Both operators add what they should, rows without a contribution and one row for all included."""
    target, index, source = case(dtype)
    bound = accuracy_bound(dtype, 60)
    for where in (index, index.clamp_max(3), torch.full_like(index, 7)):
        got = ordered_scatter.index_add(target, where, source)
        assert got.dtype == dtype
        assert error_against(got, reference.index_add(target, where, source)).relative_norm <= bound
        flat = ordered_scatter.scatter_add(target[:, 0], where, source[:, 0])
        assert error_against(flat, reference.scatter_add(target[:, 0], where, source[:, 0])).relative_norm <= bound


def test_a_row_depends_on_its_own_contributions_alone() -> None:
    """The same bits without the other rows' contributions, with others between them, and from run to run."""
    target, index, source = case(torch.float32, "wide")
    whole = ordered_scatter.index_add(target, index, source)
    assert identical(ordered_scatter.index_add(target, index, source), whole)
    for row in (0, 13, 39):
        mine = index == row
        assert identical(ordered_scatter.index_add(target, index[mine], source[mine])[row], whole[row])
    order = torch.sort(index, stable=True).indices
    assert identical(ordered_scatter.index_add(target, index[order], source[order]), whole)


def test_the_order_of_the_index_is_the_order_of_the_sum() -> None:
    """Turning the contributions round changes bits: the order is the index's, and not, say, one by size."""
    target, index, source = case(torch.float32, "wide")
    whole = ordered_scatter.index_add(target, index, source)
    assert not identical(ordered_scatter.index_add(target, index.flip(0), source.flip(0)), whole)


def test_the_written_order() -> None:
    """scatter_add: neighbours first, pairs of pairs, the row last. index_add: onto the row, one after the other."""
    a, b, c, d, e = (torch.tensor([x]) for x in (1.0, 2.0**-24, 2.0**-24, 2.0**-24, -1.0))
    source, zeros = torch.cat([a, b, c, d, e]), torch.zeros(5, dtype=torch.int64)
    got = ordered_scatter.scatter_add(torch.full((1,), 0.5), zeros, source)
    assert got.item() == ((((a + b) + (c + d)) + e) + 0.5).item() == 0.5 + 2.0**-23
    got = ordered_scatter.index_add(torch.full((1, 1), 0.5), zeros, source[:, None])
    assert got.item() == (((((0.5 + a) + b) + c) + d) + e).item() == 0.5


def test_edges() -> None:
    """Nothing to add, integers, and an index out of range."""
    target, index, source = case(torch.float32)
    assert identical(ordered_scatter.index_add(target, index[:0], source[:0]), target)
    counts = ordered_scatter.scatter_add(torch.zeros(40, dtype=torch.int64), index, torch.ones_like(index))
    assert torch.equal(counts, torch.bincount(index, minlength=40))
    with pytest.raises(IndexError, match="target has 40 rows"):
        ordered_scatter.index_add(target, index + 1, source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter_add_under_the_block(axis: int, dtype: torch.dtype) -> None:
    """Any axis, in place and with out=: each slice has the registry's bits, alone and beside others, nothing left."""
    rng = generator(11, DEVICE)
    target = make("bell", (5, 6, 7), dtype, DEVICE, rng)
    source = make("wide", (5, 6, 700), dtype, DEVICE, rng).movedim(2, axis)
    target = target.movedim(2, axis)
    index = torch.randint(0, 7, (5, 6, 600), generator=rng, device=DEVICE).movedim(2, axis)
    kept = source.narrow(axis, 0, 600)
    with torch.no_grad(), batch_invariant() as block:
        whole = torch.scatter_add(target, axis, index, source)
        assert identical(target.clone().scatter_add_(axis, index, source).contiguous(), whole.contiguous())
        assert identical(torch.scatter_add(target, axis, index, source, out=torch.empty_like(whole)), whole)
        some = torch.scatter_add(
            target[:2] if axis else target[:, :2], axis, *(x[:2] if axis else x[:, :2] for x in (index, source))
        )
    assert identical(some.contiguous(), (whole[:2] if axis else whole[:, :2]).contiguous())
    rows = [x.movedim(axis, 2).flatten(0, 1) for x in (target, index, kept, whole)]
    for start, where, added, got in zip(*rows, strict=True):
        assert identical(ordered_scatter.scatter_add(start, where, added), got.contiguous())
    assert set(block.coverage().replaced) >= {"scatter_add", "scatter_add_", "scatter_add.out"}
    assert not block.coverage().left
    assert not block.coverage().at_risk


def test_scatter_adds_errors_and_integers_are_torchs() -> None:
    """An index out of range and misfits raise as torch does; integers are exact, and nobody counts them."""
    target, ones = torch.zeros(3, 2), torch.ones(4, 2)
    with batch_invariant() as block:
        counts = torch.zeros(3, dtype=torch.int64).scatter_add(
            0, torch.tensor([2, 2, 0]), torch.ones(3, dtype=torch.int64)
        )
        for index in (torch.full((4, 2), 3), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)):
            with pytest.raises((RuntimeError, IndexError)):
                target.scatter_add(0, index, ones)
    assert counts.tolist() == [1, 0, 2]
    assert not block.coverage().left
