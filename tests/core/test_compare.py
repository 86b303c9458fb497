"""Equality is equality of bits, in every dtype, and distances are what the formats say."""

from __future__ import annotations

import math
import struct
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from nondet.core import compare
from nondet.core.compare import ClassBook, bits, difference, digest, error_against, identical, row_hashes, same
from nondet.sampling.plan import Session
from nondet.trace.search import logits_at_fault
from tests.build import FLOAT_DTYPES, PACKED

DTYPES = [d for d in FLOAT_DTYPES if d != PACKED]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of an 8 or 16 bit dtype, spread ones of a longer one."""
    size = dtype.itemsize
    if size <= 2:
        raw = torch.arange(2 ** (8 * size)).to(INTEGERS[size])
    else:
        raw = torch.randint(-(2**62), 2**62, (4096,), generator=torch.Generator().manual_seed(0)).to(INTEGERS[size])
    return raw.view(dtype)


def test_patterns_are_equal_when_bits_are_and_nans_always():
    assert {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn} <= {*DTYPES}
    for dtype in DTYPES:
        x = patterns(dtype)
        nan = x.to(torch.float64).isnan()
        canonical = bits(x)
        assert torch.equal(canonical[~nan], x.view(INTEGERS[x.element_size()])[~nan])
        assert len(canonical[nan].unique()) == min(1, int(nan.sum()))
        assert not torch.isin(canonical[~nan], canonical[nan]).any()
        assert identical(x, x.clone())


def test_nan_payloads_and_signs_are_one():
    a = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert a.isnan().all()
    assert identical(a, torch.full((3,), math.nan))
    c = torch.tensor([math.inf, -math.inf, math.inf, 2.0])
    d = torch.tensor([math.inf, math.inf, 1.0, 2.5])
    for one, two, figures in [
        (a, torch.tensor([math.nan, 1.0, math.inf]), (2, 2, 0.0, 0, [1])), (c, d, (3, 2, 0.5, 2**21, [1])),
    ]:  # fmt: skip
        found = difference(one, two)
        assert (found.mismatched, found.nonfinite, found.max_abs, found.max_ulp, found.first_mismatch) == figures
    assert compare.ulp_distance(c, d).tolist() == [-1, -1, -1, 2**21]


def test_neighbours_are_one_ulp_apart():
    for dtype in DTYPES:
        if dtype.itemsize > 2:
            start = torch.tensor([-1.5, 0.0, 1.0, 3e10], dtype=dtype)
            assert compare.ulp_distance(start, torch.nextafter(start, torch.full_like(start, 1e30))).tolist() == [1] * 4
            continue
        x = patterns(dtype)
        x = x[torch.isfinite(x.double())]
        x = x[x.double().argsort(stable=True)]
        steps = x[1:].double() != x[:-1].double()
        assert torch.equal(compare.ulp_distance(x[:-1], x[1:]), steps.to(torch.int64))


def test_ulp_across_zero_and_to_the_ends_of_float64():
    """Integers and complex numbers have no ULP: a number would be made up."""
    tiny = torch.tensor([5e-324, 1.0, sys.float_info.max], dtype=torch.float64)
    ordinals = tiny.view(torch.int64)
    limit = torch.iinfo(torch.int64).max
    # int64 holds 2 * the ordinal of 1.0, but not that of the largest number
    assert compare.ulp_distance(-tiny, tiny).tolist() == [2, 2 * int(ordinals[1]), limit]
    assert int(compare.ulp_distance(tiny[2:], torch.zeros(1, dtype=torch.float64))) == int(ordinals[2])
    half = torch.tensor([2**62 - 1, 2**62, 2**62 + 1], dtype=torch.int64).view(torch.float64)
    assert compare.ulp_distance(half, -half).tolist() == [2**63 - 2, limit, limit]
    for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.float64]:
        found = difference(torch.zeros(2, dtype=dtype), torch.tensor([0.0, -0.0], dtype=dtype))
        assert (found.mismatched, found.max_abs, found.max_ulp, found.nonfinite) == (1, 0.0, 0, 0)
        assert found.first_mismatch == [1]
    for a in [torch.tensor([1]), torch.tensor([True]), torch.tensor([1 + 2j])]:
        with pytest.raises(ValueError, match="no ULP"):
            compare.ulp_distance(a, a)


def test_empty_tensors():
    for shape in [(0,), (3, 0), (0, 4)]:
        x = torch.empty(shape)
        found = difference(x, x.clone())
        assert (found.mismatched, found.compared, found.first_mismatch) == (0, 0, None)
        assert error_against(x, x.double()).relative_norm == 0.0
        book = ClassBook()
        book.add(torch.empty(5, 0))
        assert book.labels == [0] * 5
        assert book.widest_difference().mismatched == 0


def test_what_is_no_plain_float_is_compared_by_its_parts():
    packed = [torch.tensor([0x12, last], dtype=torch.uint8).view(PACKED or torch.uint8) for last in (0x34, 0x35)]
    z = torch.tensor([[1 + 2j, 3 - 4j]])
    for a, b, found in [
        (z, torch.tensor([[1 + 2j, 3 - 5j]]), (1, 4, 1.0, [0, 1, 1])),
        (torch.tensor([1, 2, 3]), torch.tensor([1, -5, 3]), (1, 3, 7.0, [1])),
        (*packed, (1, 2, 0.0 if PACKED else 1.0, [1])),
    ]:
        assert identical(a, a.clone())
        seen = difference(a, b)
        assert (seen.mismatched, seen.compared, seen.max_abs, seen.first_mismatch) == found
    assert identical(z.conj(), torch.tensor([[1 - 2j, 3 + 4j]]))
    assert not identical(z.conj(), z)
    assert not identical(torch.tensor([True]), torch.tensor([False]))


def test_mixed_shapes_and_dtypes_are_refused():
    """Tensors of two shapes or dtypes are not different, they are not comparable: broadcasting would hide a bug."""
    for a, b in [(torch.ones(2), torch.ones(3)), (torch.ones(2), torch.ones(2).double())]:
        for ask in (same, difference, identical, compare.agreement):
            with pytest.raises(ValueError, match="not comparable"):
                ask(a, b)
        book = ClassBook()
        book.add(a[None])
        with pytest.raises(ValueError, match="not comparable"):
            book.add(b[None])


def test_strides_do_not_matter():
    assert bits(torch.tensor(1.0)).shape == ()
    x = torch.arange(6.0).reshape(2, 3)
    assert identical(x.T, x.T.contiguous())
    assert identical(torch.ones(1).expand(4), torch.ones(4))
    assert digest(x.T) == digest(x.T.contiguous()) != digest(x)
    a = torch.zeros(3, 4, 5)
    b = a.clone()
    b[1, 2, 3] = b[2, 0, 0] = 1.0
    assert difference(a, b).first_mismatch == [1, 2, 3]
    assert difference(a.transpose(0, 2), b.transpose(0, 2)).first_mismatch == [0, 0, 2]
    assert difference(torch.tensor(1.0), torch.tensor(2.0)).first_mismatch == []


def test_labels_do_not_depend_on_how_results_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    picks = [0, 0, 1, 1, 0, 2, 3, 2, 0, 3]
    for dtype in [*DTYPES, torch.int64, torch.bool, torch.complex64]:
        pool = torch.tensor([[1.0, 2.0], [0.0, 4.0], [2.0, 0.0], [0.0, 0.0]]).to(dtype)
        raw = pool.view(torch.uint8) if dtype.itemsize == 1 else pool  # float8 has no indexing kernel everywhere
        results = raw[picks].view(dtype)
        for most in (0, 20, 2**20):
            monkeypatch.setattr(compare, "_WAITING_MOST", most)
            for parts in ([10], [1] * 10, [1, 3, 2, 4]):
                book = ClassBook()
                for part in results.view(torch.uint8).split(parts):
                    buffer = part.clone()
                    book.add(buffer.view(dtype))
                    if most:  # a kernel may reuse its output: what waits, and what stands for a class, is a copy
                        buffer.fill_(7)
                assert book.labels == picks
                assert all(identical(a, b) for a, b in zip(book.representatives, pool, strict=True))
        for some, labels, again in [
            (results, picks, True), (results[2:3], [1], True), (results[:0], [], True), (results[:2], [0, 1], False),
            (results, [*picks[:-1], 0], False), (results, picks[:-1], False),
        ]:  # fmt: skip
            assert bool(book.come_again(some, labels)) is again
        with pytest.raises(ValueError, match="not comparable"):
            book.come_again(results[:, :1], picks)


def test_widest_difference_prefers_what_is_worst():
    base = torch.ones(4)
    near, far, lost = base.clone(), base.clone(), base.clone()
    near += torch.finfo(torch.float32).eps
    far[0] = 2.0
    lost[0] = math.nan
    book = ClassBook()
    book.add(torch.stack([base, near, far]))
    assert book.widest_difference().max_ulp == 2**23
    book.add(lost[None])
    assert book.widest_difference().nonfinite == 1
    assert ClassBook().widest_difference() is None
    book = ClassBook()
    book.add(torch.tensor([5.0, 1.0, 5.0, -0.0, 0.0, math.nan, -math.nan]))
    assert book.labels == [0, 1, 0, 2, 3, 4, 4]


def test_error_against_the_oracle():
    """A float32 oracle would hide the errors that it shares with the kernel."""
    reference = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    out = torch.tensor([1.0, 2.0, 2.0 + 2.0**-22])
    found = error_against(out, reference)
    assert found.max_abs == 2.0**-22
    assert found.relative_norm == pytest.approx(2.0**-22 / 3)
    assert found.max_ulp == 1
    assert error_against(torch.full((1,), 1 / 3), torch.full((1,), 1 / 3, dtype=torch.float64)).max_ulp == 0
    for wrong in (torch.ones(2), torch.ones(3).double()):
        with pytest.raises(ValueError, match="float64"):
            error_against(torch.ones(2), wrong)
    reference = torch.tensor([1e6, 1.0, math.nan], dtype=torch.float64)
    right = error_against(torch.tensor([math.inf, 1.0, math.nan], dtype=torch.float16), reference)
    assert (right.max_abs, right.relative_norm, right.max_ulp) == (0.0, 0.0, 0)
    for wrong in (math.nan, math.inf):
        found = error_against(torch.tensor([math.inf, wrong, math.nan], dtype=torch.float16), reference)
        assert (found.max_abs, found.relative_norm) == (None, None)
    for scale in (1e300, 1e-300):
        reference = torch.tensor([3.0, 4.0], dtype=torch.float64) * scale
        assert error_against(reference * 1.5, reference).relative_norm == pytest.approx(0.5)
    assert error_against(torch.tensor([0.5]), torch.zeros(1, dtype=torch.float64)).relative_norm == 0.5


def test_of_several_each_has_the_figures_that_it_has_by_itself():
    reference = torch.randn(4, 5, dtype=torch.float64)
    outs = [reference.float() * (1 + scale) for scale in (0.0, 1e-3, 1e-6)]
    outs += [outs[0].clone().index_fill_(0, torch.tensor([1]), value) for value in (math.nan, math.inf)]
    assert compare.errors_against(outs, reference) == [error_against(out, reference) for out in outs]
    none = compare.errors_against([torch.ones(0)], torch.ones(0, dtype=torch.float64))
    assert [(e.max_abs, e.relative_norm, e.max_ulp) for e in none] == [(0.0, 0.0, 0)]
    for chosen in (outs, outs[:3], outs[:2], outs[:1]):
        book = ClassBook()
        book.add(torch.stack(chosen))
        apart = [msgspec.structs.replace(difference(chosen[0], x), label=i) for i, x in enumerate(chosen)]
        assert book.widest_difference() == max(
            apart[1:] or [difference(chosen[0], chosen[0])], key=lambda d: (d.nonfinite, d.max_ulp, d.mismatched)
        )
    values = torch.tensor([[1.0, 2.0, 0.0], [1.0, 4.0, -0.0], [2.0, 2.0, 0.0], [1.0, 2.0, math.nan]])
    for dtype in [*FLOAT_DTYPES, torch.int64, torch.bool, torch.complex64]:
        pool = [*(values.to(torch.uint8).view(dtype) if dtype == PACKED else values.to(dtype))]
        pairs = [(a, b.clone()) for a in pool for b in pool]
        expected = [identical(a, b) for a, b in pairs]
        assert len(pool) <= sum(expected) < len(pairs)
        assert compare.looked_at([compare.agreement(a, b) for a, b in pairs]) == expected
        assert compare.looked_at([same(a, b).all() for a, b in pairs]) == expected
    assert compare.looked_at([]) == []


def test_every_figure_is_read_off_exactly_and_can_be_stored():
    """JSON has no infinity: a difference of the largest numbers is clamped."""
    given = [2**63 - 1, 1.5, -0.0, math.inf, 5e-324, True, math.nan]
    read = compare.numbers(*(torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None) for x in given))
    assert list(map(repr, read)) == list(map(repr, [*given[:5], 1, math.nan]))
    largest = torch.tensor([sys.float_info.max], dtype=torch.float64)
    for figures in (difference(largest, -largest), error_against(-largest, largest)):
        again = msgspec.json.decode(msgspec.json.encode(figures), type=type(figures))
        assert again == figures
        assert again.max_abs == sys.float_info.max


def test_digest_tells_dtype_shape_and_bits_apart():
    x = torch.tensor([0.0, 1.0])
    others = [torch.tensor([-0.0, 1.0]), x.double(), x.reshape(2, 1), torch.tensor([0.0, 1.0 + 2.0**-23])]
    assert len({digest(y) for y in (x, *others)}) == 5
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    for hashed in (digest, row_hashes):
        assert hashed(nans[:1]) == hashed(nans[1:])
    assert digest(x, x) != digest(x)


def test_where_two_answers_diverge():
    for tokens, logprobs, expected in [
        ([5, 6, 7], [0.0, 1.0, 2.0], (None, None)),
        ([5, 6, 7], [-0.0, 1.0, 2.0], (None, 0)),
        ([5, 9, 7], [0.0, 1.0, 3.0], (1, 1)),
        ([5, 6, 9], [0.0, 1.5, 2.0], (2, 1)),
        ([5, 6], [0.0, 1.0], (2, 2)),
        ([5, 6, 7, 8], [0.0, 1.0, 2.0, 3.0], (3, 3)),
        ([5, 6, 7], [0.0], (None, 1)),
        ([5, 6, 7], [], (None, 0)),
        ([], [], (0, 0)),
    ]:
        one, two = (
            SimpleNamespace(token_ids=ids, logprobs=struct.pack(f"<{len(values)}f", *values))
            for ids, values in (([5, 6, 7], [0.0, 1.0, 2.0]), (tokens, logprobs))
        )
        assert compare.first_difference(one, two) == compare.first_difference(two, one) == expected


@pytest.mark.gpu
def test_the_device_says_what_the_host_says():
    for dtype in DTYPES:
        x = patterns(dtype)
        y = x.view(INTEGERS[x.element_size()]).flip(0).view(dtype)
        assert difference(x.cuda(), y.cuda()) == difference(x, y)
        assert torch.equal(bits(x.cuda()).cpu(), bits(x))


def test_a_row_has_one_hash_in_every_batch() -> None:
    """Else the tool would be what it looks for. Sums of magnitudes or XORs would miss a swap or a sign."""
    for dtype in [torch.float32, torch.bfloat16, torch.float16, torch.int64]:
        x, order = torch.randint(-50, 50, (37, 129)).to(dtype), torch.randperm(37)
        whole = row_hashes(x)
        assert torch.equal(whole[5:6], row_hashes(x[5:6]))
        assert torch.equal(whole[order], row_hashes(x[order]))
        assert torch.equal(whole, row_hashes(x.reshape(37, 3, 43)))
    x = torch.cat([torch.rand(1, 64), torch.zeros(1, 64)]).repeat_interleave(3, 0)
    x[1].view(torch.int32)[17] ^= 1
    x[2, [3, 9]] = x[0, [9, 3]]
    x[4, 5] = -0.0
    assert len({*row_hashes(x).tolist()}) == 5


def test_logits_are_held_against_each_other_by_bits() -> None:
    """NaN agrees with itself, so that capture is not blamed for it; a sign of zero does not."""
    for without, captured, why in [
        ((2.0, 1.0), (2.0, 1.0), ""),
        ((2.0, 0.0), (2.0, -0.0), "the logits of r0 change when it is captured"),
        ((float("nan"), 1.0), (float("nan"), 1.0), "logits of r0 are NaN or infinite"),
        ((float("inf"), 1.0), (float("inf"), 1.0), "logits of r0 are NaN or infinite"),
        ((2.0, float("-inf")), (2.0, float("-inf")), ""),  # a vocabulary's masked rows
    ]:
        bare, seen = (
            Session(outcomes=[], steps=1, tokens=1, seconds=1.0, tops={"r0": [(*top, 7, 8)]})
            for top in (without, captured)
        )
        assert logits_at_fault(bare, seen).startswith(why)
        assert bool(logits_at_fault(bare, seen)) == bool(why)


def test_errors_of_classes_are_fractions_of_an_ulp() -> None:
    """A reference of zero has the ULP of the smallest normal number."""
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        reference = torch.linspace(1.0, 7.9, 4001, dtype=torch.float64)
        rounded = reference.to(dtype)
        far = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
        near, off = compare.class_errors([rounded, far], reference)
        assert near.elements == off.elements == 4001
        assert near.most <= 0.5 * (1 + 1e-9)
        assert 0.5 < off.median < 1.5
        assert off.closer == 0
        assert off.farther >= 4000  # one may be a tie
        assert off.mean == pytest.approx(near.mean + 1.0, abs=2e-2)
    reference = torch.tensor([1.0, torch.inf, 2.0, 0.0], dtype=torch.float64)
    one = torch.tensor([1.0, torch.inf, torch.nan, 0.0])
    two = torch.tensor([1.0, torch.inf, 2.0, torch.finfo(torch.float32).smallest_normal])
    first, second = compare.class_errors([one, two], reference)
    assert (first.elements, first.most) == (2, 0.0)
    assert (second.closer, second.farther, second.most) == (0, 1, 2.0**23)
    assert compare.class_errors([one[2:3], one[2:3]], reference[2:3]) == []


def test_weights_made_of_others_are_digested_part_by_part():
    """torchao's weights are numbers and scales under one tensor, which has no memory."""

    def model(first, second):
        made = torch.nn.Linear(2, 3, bias=False)
        made.weight = torch.nn.Parameter(TwoTensor(first, second), requires_grad=False)
        return made

    a, b = torch.arange(6.0).view(3, 2), torch.ones(3, 2)
    digest = compare.weights_digest(model(a, b))
    assert digest == compare.weights_digest(model(a.clone(), b.clone()))
    last = a.clone()
    last.view(torch.int32)[2, 1] ^= 1
    assert len({digest, *(compare.weights_digest(model(*two)) for two in ((b, a), (a, 2 * b), (last, b)))}) == 4
    assert compare.memory_of(TwoTensor(a, b).t()) == compare.memory_of(a) != compare.memory_of(b)
