"""Grouped products and the routing around them: right against float64, and blind to the other tokens."""

import itertools
from typing import Any

import pytest
import torch

from nondet.core import compare, inputs
from nondet.core.certificates import Certificates
from nondet.core.launch import listen
from nondet.core.proof import product_inputs
from nondet.kernels import triton_common
from nondet.kernels.experts import cpu as cpu_grouped_matmul
from nondet.kernels.experts import cuda as grouped
from nondet.kernels.experts import cuda as triton_routing
from nondet.kernels.experts import topk as ordered_topk
from nondet.kernels.experts.cuda import grouped_chain, grouped_matmul, takes_tma, tiles
from nondet.kernels.matmul.triton_kernels import anchor, matmul_chain, matmul_operands
from tests.build import DEVICE, bell
from tests.kernels.experts.test_cpu import OFFSETS
from tests.kernels.tiers import at_length, captured

pytestmark = pytest.mark.slow
# The interpreter multiplies the raw bits of bfloat16, so that dtype is left to the GPU.
TMA = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (9, 0)  # the interpreter has it


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N] by the plain chain itself, which is the order that is promised: no other member of it."""
    return matmul_chain(*matmul_operands(a, b))[0]


def at(offsets: list[int]) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=DEVICE)


def alone(x: torch.Tensor, weight: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    out = torch.zeros(x.shape[0], weight.shape[2], device=DEVICE, dtype=x.dtype)
    for expert, (start, end) in enumerate(itertools.pairwise([0, *offsets])):
        for row in range(start, end):
            out[row] = matmul(x[row : row + 1], weight[expert])[0]
    return out


@pytest.mark.parametrize("dtype", [torch.float16, *at_length(torch.float32)])
@pytest.mark.parametrize("offsets", [OFFSETS[0], *at_length(*OFFSETS[1:3])])
def test_bits_are_those_of_the_row_alone(chained_dot, dtype, offsets):
    """In any company a row has the bits of the plain product of it with its expert; another expert's are others."""
    x, weight = bell(42, 72, dtype=dtype), bell(6, 40, 72, dtype=dtype, seed=1).mT
    right = alone(x, weight, offsets)
    for tile in (None, tiles(dtype)[-1]):
        for tma in {False, takes_tma(x, weight)}:
            assert compare.identical(grouped_chain(x, weight, at(offsets), tile, tma), right)
    assert not compare.identical(grouped_matmul(x, weight.flip(0), at(offsets)), right)


def test_strides_do_not_change_bits(chained_dot):
    """A module's [G, N, K] transposed, a contiguous [G, K, N], and sliced rows are read alike, and not all by TMA."""
    x, weight = bell(42, 144, dtype=torch.float16)[:, ::2], bell(6, 40, 72, dtype=torch.float16, seed=1).mT
    right = grouped_matmul(x.contiguous(), weight, at(OFFSETS[0]))
    grouped_matmul(x, weight.contiguous(), at(OFFSETS[0]))  # proves the tile, which is noted too
    with listen() as notes:
        assert compare.identical(grouped_matmul(x, weight, at(OFFSETS[0])), right)
        assert compare.identical(grouped_matmul(x.contiguous(), weight.contiguous(), at(OFFSETS[0])), right)
        assert compare.identical(grouped_matmul(x.contiguous(), weight, at(OFFSETS[0])), right)
    assert set(notes) == {"grouped_matmul[16x64x64]", *(["grouped_matmul[16x64x64 tma]"] if TMA else [])}
    odd = x[:, :71].contiguous()  # rows of 142 bytes: no multiple of 16
    assert not takes_tma(odd, weight[:, :71])
    assert compare.identical(
        grouped_matmul(odd, weight[:, :71], at(OFFSETS[0])), alone(odd, weight[:, :71], OFFSETS[0])
    )


def test_offsets_beyond_the_rows_and_empty_sizes():
    """What a caller gets wrong in device memory can't be refused: it must not be written outside of the result."""
    x, weight = bell(20, 16), bell(3, 8, 16, seed=1).mT
    out = grouped_matmul(x, weight, at([5, 30, 40]))
    assert compare.identical(out, grouped_matmul(x, weight, at([5, 20, 20])))
    assert grouped_matmul(bell(0, 8), bell(2, 8, 4), at([0, 0])).shape == (0, 4)
    assert grouped_matmul(bell(3, 8), bell(2, 8, 0), at([1, 3])).shape == (3, 0)
    assert not grouped_matmul(bell(3, 8), bell(0, 8, 4), at([])).any()
    assert not grouped_matmul(bell(3, 0), bell(2, 0, 4), at([1, 3])).any()


def test_refuses_what_it_has_no_kernel_for(monkeypatch):
    x, weight = bell(4, 8), bell(2, 8, 3)
    for given, words in (
        ((x[:, :7], weight, at([1, 2])), "takes"),
        ((x, weight[0], at([1, 2])), "takes"),
        ((x, weight, at([1])), "takes"),
        ((x, weight, torch.ones(2, device=DEVICE)), "float32"),
        ((x.long(), weight.long(), at([1, 2])), "int64"),
    ):
        with pytest.raises(NotImplementedError if words == "int64" else ValueError, match=words):
            grouped_matmul(*given)
    monkeypatch.setattr(triton_common, "INTERPRETED", False)
    with pytest.raises(NotImplementedError, match="cpu"):
        grouped_matmul(x.cpu(), weight.cpu(), at([1, 2]).cpu())


@pytest.fixture
def small_proof(monkeypatch):
    """Proofs on few and small inputs, kept in memory; as if on hardware. Gives the certificates."""
    kept = Certificates({"device": "a test's own"}, None)
    monkeypatch.setattr(grouped, "certificates", lambda: kept)
    monkeypatch.setattr(grouped, "INTERPRETED", False)

    def few(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, batch: int) -> Any:
        return product_inputs(sizes, dtype, device, batch=batch, kinds=("order",))

    monkeypatch.setattr(grouped, "product_inputs", few)
    return kept


def test_a_tile_is_proven_before_it_is_used(chained_dot, small_proof):
    x, weight = bell(10, 72), bell(3, 40, 72, seed=1).mT
    grouped_matmul(x, weight, at([2, 5, 10]))
    (proof,) = small_proof.all()
    assert (proof.member, proof.holds) == ("triton 16x64x32w4s3", True)
    assert proof.key == "grouped | float32 K=72 N=40 x=72 weight=1,72 | @16"
    assert "elements equal to the anchor's on order" in proof.evidence
    grouped_matmul(x[:7], weight, at([0, 5, 7]))  # other rows, the same product
    assert len(small_proof.all()) == 1
    grouped_matmul(x, weight.contiguous(), at([2, 5, 10]))  # another layout is another proof
    assert {c.key for c in small_proof.all()} == {proof.key, proof.key.replace("1,72", "40,1")}


def test_a_tile_of_another_order_is_excluded(chained_dot, small_proof, monkeypatch):
    x, weight = bell(10, 72), bell(3, 40, 72, seed=1).mT
    right = grouped_chain(x, weight, at([2, 5, 10]), anchor(torch.float32), False)
    sound = grouped.grouped_chain

    def backwards(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, tile: Any, tma: Any) -> torch.Tensor:
        return sound(x.flip(1), weight.flip(1), offsets, tile, tma)

    monkeypatch.setattr(grouped, "grouped_chain", backwards)
    assert grouped.prove(x, weight, tiles(torch.float32)[0], False) is False
    monkeypatch.setattr(grouped, "grouped_chain", sound)
    (excluded,) = small_proof.excluded()
    assert excluded.member == "triton 16x64x32w4s3"
    with listen() as notes:
        assert compare.identical(grouped_matmul(x, weight, at([2, 5, 10])), right)
    assert f"grouped_matmul[{anchor(torch.float32)}]" in notes
    assert f"grouped_matmul[{tiles(torch.float32)[0]}]" not in notes
    assert small_proof.standing(f"triton {anchor(torch.float32).name}", excluded.key) is True


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_gpu_bits_are_those_of_the_plain_chain(dtype, kind):
    """All tiles, both kernels, odd sizes, hard inputs: a row has the bits of the plain chain; half of K has others."""
    rng = inputs.generator(3, DEVICE)
    x, weight = (inputs.make(kind, shape, dtype, DEVICE, rng) for shape in ((700, 2048), (8, 520, 2048)))
    offsets = [0, 1, 200, 200, 329, 330, 690, 700]
    right = torch.cat([matmul(x[a:b], weight[e].mT) for e, (a, b) in enumerate(itertools.pairwise([0, *offsets]))])
    for tile in (None, *tiles(dtype)):
        for tma in {False, takes_tma(x, weight.mT)}:
            assert compare.identical(grouped_chain(x, weight.mT, at(offsets), tile, tma), right)
    for rows in (1, 17, 130):
        ends = [min(max(end - 200, 0), rows) for end in offsets]
        out = grouped_matmul(x[200 : 200 + rows], weight.mT, at(ends))
        assert compare.identical(out, right[200 : 200 + rows])
    assert compare.identical(matmul(weight[4], x[250:251].T)[:, 0], right[250])  # as decoding has it, weight first
    halves = grouped_matmul(x[:, :1024], weight.mT[:, :1024], at(offsets)).float()
    halves += grouped_matmul(x[:, 1024:], weight.mT[:, 1024:], at(offsets)).float()
    if (right.isfinite() & (right != 0)).any():  # else NaN, infinities, and zeros whose signs are the order's
        # integers are exact in float32 in every order: there the control must not differ
        assert compare.identical(halves.to(dtype), right) == (
            kind in (*inputs.EXACT, "underflow") and dtype == torch.float32
        )


@pytest.mark.gpu
def test_gpu_graph_follows_the_offsets():
    """A captured launch reads the offsets when it is replayed: nothing about the routing is baked in."""
    x, weight = bell(64, 128, dtype=torch.bfloat16), bell(4, 96, 128, dtype=torch.bfloat16, seed=1).mT
    offsets = at([16, 32, 48, 64])
    grouped_matmul(x, weight, offsets)
    torch.cuda.synchronize()
    graph, out = captured(grouped_matmul, x, weight, offsets)
    for ends in ([0, 0, 64, 64], [1, 2, 3, 50]):
        offsets.copy_(at(ends))
        graph.replay()
        assert compare.identical(out, grouped_matmul(x, weight, at(ends)))


ROUTES = [triton_routing] if DEVICE == "cuda" else [triton_routing, cpu_grouped_matmul]


@pytest.mark.parametrize("module", [triton_routing, ordered_topk])
@pytest.mark.parametrize("width", [60, *at_length(1, 8, 128)])
def test_topk_takes_the_lower_index_of_a_tie(module, width):
    """Few distinct numbers, so nearly all are ties: the order is that of a stable sort; torch.topk's is not always."""
    x = torch.randint(-2, 2, (30, width), generator=inputs.generator(0, DEVICE), device=DEVICE).float()
    x[3, 0], x[4, -1], x[5], x[6, 0] = float("nan"), float("inf"), -0.0, float("-inf")
    x[5, ::2] = 0.0
    for k in {1, min(8, width)}:
        values, indices = module.topk(x, k)
        right = torch.sort(x, dim=-1, descending=True, stable=True)
        assert torch.equal(indices, right.indices[:, :k])
        assert compare.identical(values, right.values[:, :k])
        assert compare.identical(module.topk(x[7:8], k)[1], indices[7:8])


@pytest.mark.parametrize("module", [triton_routing, ordered_topk])
def test_topk_of_other_shapes(module):
    x = bell(2, 3, 1500)
    for y, k in ((x, 5), (x[..., :40], 3), (x[0, :, :40].double(), 3), (bell(40, 6).mT, 4), (x[:0, :, :9], 2)):
        values, indices = module.topk(y, k)
        right = torch.topk(y, k)
        assert compare.identical(values, right.values)
        assert compare.identical(indices, right.indices)


@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.float16)])
def test_sum_over_the_middle_is_a_chain_in_order(dtype):
    """Each token's experts are added from first to last, whoever else is there; backwards gives other bits."""
    x = bell(7, 8, 70, dtype=dtype) * torch.tensor([2.0**p for p in range(8)], device=DEVICE, dtype=dtype)[:, None]
    total = torch.zeros(7, 70, device=DEVICE)
    for rank in range(8):
        total = total + x[:, rank].float()
    out = triton_routing.sum_middle(x)
    assert compare.identical(out, total.to(dtype))
    assert compare.identical(triton_routing.sum_middle(x[3:4]), out[3:4])
    assert compare.identical(triton_routing.sum_middle(x.mT.contiguous().mT), out)
    if dtype == torch.float32:
        assert not compare.identical(triton_routing.sum_middle(x.flip(1)), out)
    assert triton_routing.sum_middle(x[:0]).shape == (0, 70)


@pytest.mark.parametrize("module", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.float16)])
def test_index_add_is_a_chain_in_order(module, dtype):
    """Additions to a row come in the order of the index, onto the row's own number, and round once."""
    target, source = bell(9, 33, dtype=dtype), bell(60, 33, dtype=dtype, seed=1)
    index = torch.randint(0, 8, (60,), generator=inputs.generator(0, DEVICE), device=DEVICE)
    total = target.float().clone()
    for row, added in zip(index.tolist(), source.float(), strict=True):
        total[row] += added * 0.5
    got = target.clone()
    assert module.index_add_(got, index, source, 0.5) is got
    assert compare.identical(got, total.to(dtype))
    assert compare.identical(got[8], target[8])
    backwards = module.index_add_(target.clone(), index.flip(0), source.flip(0), 0.5)
    if dtype == torch.float32:
        assert not compare.identical(backwards, got)
    wide = bell(9, 66, dtype=dtype)
    wide[:, ::2] = target
    module.index_add_(wide[:, ::2], index.int(), source, 0.5)
    assert compare.identical(wide[:, ::2].contiguous(), got)
