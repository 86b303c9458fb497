"""FP8 products on a CPU: exact sums, one order, blind to the batch; and the family "fp8" under batch_invariant()."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from nondet.core.compare import error_against, identical
from nondet.core.proof import PRODUCT_INPUTS
from nondet.kernels import reference
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.dispatch.replacements import scaled_grouped_mm, scaled_grouped_mm_v2, scaled_mm_v2
from nondet.kernels.dispatch.state import Leave, kernels_for
from nondet.kernels.scaled.cpu import anchor, exact, in_order, scaled_grouped_matmul, scaled_matmul
from nondet.kernels.scaled.functions import FLOAT8, SCALES, operands, quantize_block, quantize_by, quantize_row
from tests.build import needs_row_scales
from tests.kernels.tiers import at_length

E4M3, E5M2 = FLOAT8
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]


@pytest.mark.parametrize(("left", "right"), [PAIRS[0], PAIRS[3], *at_length(*PAIRS[1:3])])
def test_sums_of_128_are_exact_or_their_parts_are(left, right):
    """The largest and the smallest numbers in one sum: as fractions say, to the last bit where e4m3 is alone."""
    rng = torch.Generator().manual_seed(1)
    a, b = (torch.arange(256, dtype=torch.uint8).view(d) for d in (left, right))
    a, b = a[a.float().isfinite()], b[b.float().isfinite()]
    a = a.view(torch.uint8)[torch.randint(len(a), (6, 128), generator=rng)].view(left)
    b = b.view(torch.uint8)[torch.randint(len(b), (128, 5), generator=rng)].view(right)
    got = exact(a, b)
    for m in range(6):
        for n in range(5):
            pairs = zip(a[m].double().tolist(), b[:, n].double().tolist(), strict=True)
            right_sum = sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(0))
            if left == right == E4M3:
                assert Fraction(got[m, n].item()) == right_sum
            else:
                assert got[m, n].item() == pytest.approx(float(right_sum), rel=2**-50)


@pytest.mark.parametrize("how", SCALES)
@pytest.mark.parametrize("pair", [PAIRS[0], *at_length(*((pair,) for pair in PAIRS[1:]))])
def test_the_anchor_s_bits_for_any_batch(pair, how):
    """Library products give what one k after the other gives, for a tail of K and N, at every batch size and place."""
    for kind in PRODUCT_INPUTS:
        a, b, scale_a, scale_b = operands(kind, how, (37, 300, 140), pair, "cpu", 3)
        for dtype in (torch.float32, torch.bfloat16):
            whole = anchor(a, b, scale_a, scale_b, dtype)
            assert identical(scaled_matmul(a, b, scale_a, scale_b, dtype), whole), kind
            for start, stop in ((0, 1), (20, 37)):
                scale = scale_a if how == "tensor" else scale_a[start:stop]
                assert identical(scaled_matmul(a[start:stop], b, scale, scale_b, dtype), whole[start:stop]), kind


@pytest.mark.parametrize("how", SCALES)
def test_other_orders_have_other_bits(how):
    """A promotion every 64 k and a split of K show in float32: or the bits above would prove nothing."""
    given = operands("order-wide", how, (16, 1024, 64), (E4M3, E4M3), "cpu", 0)
    right = scaled_matmul(*given, torch.float32)
    assert not identical(in_order(*given, torch.float32, interval=64), right)
    assert not identical(in_order(*given, torch.float32, splits=2), right)
    if how != "block":
        assert not identical(in_order(*given, torch.float32, interval=0), right)


def test_infinities_and_nan_stay_in_their_row_and_other_products_are_refused():
    """float8_e5m2 has both: a row that holds one is no number, the others have the bits that they had."""
    a, b, scale_a, scale_b = operands("bell", "row", (4, 256, 8), (E5M2, E4M3), "cpu", 0)
    before = scaled_matmul(a, b, scale_a, scale_b, torch.float32)
    wide = a.float()
    wide[1, 7], wide[2, 9] = torch.inf, torch.nan
    after = scaled_matmul(wide.to(E5M2), b, scale_a, scale_b, torch.float32)
    assert identical(after[[0, 3]], before[[0, 3]])
    assert not torch.isfinite(after[1:3]).any()
    assert after[1].isinf().any()
    assert after[2].isnan().all()
    a, b, scale_a, scale_b = operands("bell", "row", (4, 256, 8), (E4M3, E4M3), "cpu", 0)
    for given, kind, words in (
        ((a, b, scale_a[:3], scale_b), ValueError, "do not fit"),
        ((a, b[:100], scale_a, scale_b), ValueError, "takes"),
        ((a.float(), b, scale_a, scale_b), NotImplementedError, "no invariant product"),
        ((a, b, scale_a.double(), scale_b), NotImplementedError, "scales of"),
    ):
        with pytest.raises(kind, match=words):
            scaled_matmul(*given, torch.float32)


def test_quantizers_give_numbers_that_mean_what_was_there():
    """Numbers times scales are within half a step of the operand, for tails of K and N; the largest is kept exactly."""
    x = torch.randn(70, 300, generator=torch.Generator().manual_seed(0))
    for q, scale in (quantize_row(x), quantize_block(x), quantize_by(x.abs().amax() / 448, x)):
        assert (q.shape, q.dtype, scale.dtype) == (x.shape, E4M3, torch.float32)
        back = reference.dequantized(q, scale)
        step = reference.dequantized(torch.ones_like(x), scale) * 2**-9
        assert ((back - x).abs() <= x.abs().double() * 2**-4 + step).all()
        assert (back.abs().amax() - x.abs().amax()).abs() <= x.abs().amax() * 2**-22


@pytest.mark.usefixtures("stock_fp8")
def test_under_batch_invariant_scaled_mm_is_replaced_and_told():
    given = a, b, scale_a, scale_b = operands("order-wide", "tensor", (16, 512, 64), (E4M3, E4M3), "cpu", 0)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    right, out, call = scaled_matmul(*given, torch.float32), torch.empty(16, 64), torch._scaled_mm
    with batch_invariant(["fp8"]) as block:
        assert identical(call(*given, out_dtype=torch.float32), right)
        assert identical(call(a[:1], b, scale_a, scale_b, out_dtype=torch.float32), right[:1])
        for fast in (False, True):
            got = call(*given, bias, out_dtype=torch.bfloat16, use_fast_accum=fast)
            assert identical(got, scaled_matmul(*given, torch.bfloat16, bias))
        call(*given, out_dtype=torch.float32, out=out)
        assert identical(out, right)
        call(*given)
    told = block.coverage()
    assert told.replaced == {"_scaled_mm": 4, "_scaled_mm.out": 1}
    assert [n for n in told.left if n.startswith("_scaled_mm")] == ["_scaled_mm float8_e4m3fn: a result in FP8"]
    with batch_invariant(["matmul"]) as block:
        call(*given, out_dtype=torch.float32)
    assert block.coverage().at_risk["_scaled_mm float8_e4m3fn"] == 1


@pytest.mark.usefixtures("stock_fp8")
@needs_row_scales
def test_torch_s_public_scaled_mm_is_replaced_too():
    """torch.nn.functional.scaled_mm calls another operator: the same bits, one scale or one a row."""
    from torch.nn.functional import ScalingType, scaled_mm

    for how, recipe in (("tensor", ScalingType.TensorWise), ("row", ScalingType.RowWise)):
        a, b, scale_a, scale_b = operands("order-wide", how, (32, 1024, 256), (E4M3, E4M3), "cpu", 0)
        bias = torch.randn(256, generator=torch.Generator().manual_seed(0))

        def call(a, scale_a, b=b, scale_b=scale_b, recipe=recipe, **more):
            return scaled_mm(a, b, scale_a, recipe, scale_b, recipe, output_dtype=torch.float32, **more)

        one = scale_a[:1]
        assert not identical(call(a, scale_a)[:1], call(a[:1], one))  # stock
        with batch_invariant(["fp8"]) as block:
            assert identical(call(a, scale_a)[:1], call(a[:1], one))
            flat, biased = call(a, scale_a.flatten()), call(a, scale_a, bias=bias)
        assert identical(flat, scaled_matmul(a, b, scale_a, scale_b, torch.float32))
        assert identical(biased, scaled_matmul(a, b, scale_a, scale_b, torch.float32, bias))
        assert block.coverage().replaced == {"_scaled_mm_v2": 4}
        assert not block.coverage().at_risk
        with batch_invariant(["norm"]) as block:
            call(a, scale_a)
        assert block.coverage().at_risk["_scaled_mm_v2 float8_e4m3fn"] == 1


@needs_row_scales
def test_scales_in_blocks_by_torch_s_public_function():
    """1x128 beside 128x128, whose rows may be padded to four: cuBLASLt's order on a GPU, here the class of a CPU."""
    a, b, scale_a, scale_b = operands("bell", "block", (5, 384, 256), (E4M3, E4M3), "cpu", 0)
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    padded = torch.nn.functional.pad(scale_b, (0, 0, 0, 1))
    with batch_invariant(["fp8"]) as block:
        for right in (scale_b, padded):
            got = F.scaled_mm(a, b, scale_a, kinds[0], right, kinds[1], output_dtype=torch.float32)
            assert identical(got, scaled_matmul(a, b, scale_a, scale_b, torch.float32))
        fine = scale_b.repeat_interleave(128, 1)
        got = F.scaled_mm(a, b, scale_a, kinds[0], fine.mT, kinds[0], output_dtype=torch.float32)
        assert identical(got, scaled_matmul(a, b, scale_a, scale_b, torch.float32))
        own = torch.rand(3, 256) + 0.5  # of each column, [N, K / 128] as torch takes them
        got = F.scaled_mm(a, b, scale_a, kinds[0], own.mT.contiguous(), kinds[0], output_dtype=torch.float32)
        right = reference.scaled_matmul(a, b, scale_a, own, torch.float32)
        assert error_against(got, right).relative_norm < 1e-5
        for of_a, of_b in (([5], [4]), ([3], [3])):  # blocks of rows, and MX's: torch has none on a CPU
            with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
                torch._scaled_mm_v2(a, b, [scale_a], of_a, [0], [scale_b], of_b, [0], None, torch.float32)
    assert block.coverage().replaced == {"_scaled_mm_v2": 4}
    with pytest.raises(Leave, match="one scale for 128 rows of a"):
        scaled_mm_v2(kernels_for("cpu"), a, b, [scale_a], [5], [0], [scale_b], [4], [0])


def test_grouped_products_with_scales_are_replaced():
    """A row has the bits of its own plain product, by both operators, and is zeros if it is no expert's."""
    a, b, scale_a, scale_b = operands("order", "row", (9, 256, 3 * 16), (E4M3, E4M3), "cpu", 0)
    weight, scales = b.mT.unflatten(0, (3, 16)).mT, scale_b[0].view(3, 16)
    given, ends = (a, weight, scale_a[:, 0], scales), torch.tensor([2, 2, 7], dtype=torch.int32)
    right = scaled_grouped_matmul(*given, ends, torch.bfloat16)
    kernels = kernels_for("cpu")
    assert identical(scaled_grouped_mm(kernels, *given, ends), right)
    rows = ([1], [0])
    assert identical(scaled_grouped_mm_v2(kernels, a, weight, [scale_a[:, 0]], *rows, [scales], *rows, ends), right)
    for row, expert in enumerate((0, 0, 2, 2, 2, 2, 2)):
        one = slice(row, row + 1)
        alone = scaled_matmul(a[one], weight[expert], scale_a[one], scales[expert][None], torch.bfloat16)
        assert identical(right[one], alone)
    assert not right[7:].any()
    with pytest.raises(ValueError, match="do not fit"):
        scaled_grouped_matmul(*given, torch.tensor([2, 1, 7]), torch.bfloat16)
    with pytest.raises(Leave, match="a bias"):
        scaled_grouped_mm(kernels, *given, ends, torch.zeros(3, 16))
    with pytest.raises(Leave, match="groups along K or N"):
        scaled_grouped_mm(kernels, *given)
    with pytest.raises(Leave, match="scales not of rows"):
        scaled_grouped_mm_v2(kernels, a, weight, [scale_a], [3], [0], [scales], [3], [0], ends)
