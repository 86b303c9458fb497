"""FP8 products by Triton: the logic in the interpreter, the bits on a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import fbgemm_fp8, finegrained_fp8
from transformers.utils.quantization_config import FineGrainedFP8Config

from lab import fp8_model
from nondet.bench.collect import implementations_of
from nondet.core.certificates import Certificates
from nondet.core.compare import error_against, identical
from nondet.core.launch import listen
from nondet.core.proof import PRODUCT_INPUTS
from nondet.core.registry import load_object, operators
from nondet.kernels import reference, stock, triton_common
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.scaled import cpu, cuda
from nondet.kernels.scaled.functions import FLOAT8, SCALES, operands, quantize_block, quantize_row
from nondet.sampling.model import load_model, quantization_of
from tests.build import DEVICE, needs_accelerate, needs_row_scales
from tests.kernels.tiers import at_length

pytestmark = pytest.mark.slow
E4M3, E5M2 = FLOAT8
PAIRS = [(E4M3, E4M3), (E5M2, E4M3)]


def bell(how, *sizes):
    return operands("bell", how, sizes, (E4M3, E4M3), "cpu", 0)


OUT = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's bfloat16 is wrong
SIZES = (37, 300, 140)  # tails of every tile and of the stretch of 128


@pytest.mark.parametrize("tile", [cuda.TILES[0], *at_length(*((tile,) for tile in cuda.TILES[1:]))])
@pytest.mark.parametrize("how", SCALES)
@pytest.mark.parametrize("pair", [PAIRS[0], *at_length((PAIRS[1],))])
def test_exact_sums_come_out_in_every_tile(pair, how, tile):
    """Of -1, 0 and 1 with scales of powers of two there is one answer: no k, row or column is lost or read twice."""
    given = operands("integers", how, SIZES, pair, DEVICE, 0)
    right = reference.scaled_matmul(*given, torch.float32)
    for dtype in (torch.float32, OUT):
        assert identical(cuda.scaled_matmul(*given, dtype, tile=tile), right.to(dtype))


@pytest.mark.parametrize("how", ["block", *at_length("tensor", "row")])
def test_right_beside_float64(how):
    a, b, scale_a, scale_b = operands("bell", how, SIZES, (E4M3, E4M3), DEVICE, 0)
    bias = torch.rand(SIZES[2], device=DEVICE)
    right = reference.scaled_matmul(a, b, scale_a, scale_b, torch.float32) + bias.double()
    for right_b in (b, b.contiguous()):
        got = cuda.scaled_matmul(a, right_b, scale_a, scale_b, torch.float32, bias)
        # a GPU's matrix unit may keep 13 bits within 128 k: tensor core models of Hopper (microsoft/MMA-Sim)
        assert error_against(got, right).relative_norm <= (2**-11 if DEVICE == "cuda" else 2**-20)


@pytest.mark.parametrize("how", ["row", *at_length("tensor", "block")])
def test_many_rows_go_in_parts(how, monkeypatch):
    given = operands("integers", how, (37, 256, 48), (E4M3, E4M3), DEVICE, 0)
    bias = torch.arange(48.0, device=DEVICE)
    whole = cuda.scaled_matmul(*given, torch.float32, bias)
    monkeypatch.setattr(cuda, "MOST_ROWS", 16)
    assert identical(cuda.scaled_matmul(*given, torch.float32, bias), whole)


def test_what_has_no_kernel_is_refused(monkeypatch):
    given = bell("row", 4, 128, 16)
    if triton_common.INTERPRETED:
        with pytest.raises(NotImplementedError, match="interpreter"):
            cuda.scaled_matmul(*given, torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"into torch\.float64"):
        cuda.scaled_matmul(*given, torch.float64)
    monkeypatch.setattr(cuda, "INTERPRETED", False)
    with pytest.raises(NotImplementedError, match="it runs on CUDA"):
        cuda.scaled_matmul(*given, torch.float32)


@pytest.fixture
def kept(monkeypatch):
    """Certificates in memory, and proofs as on a GPU: in the interpreter nothing is proven otherwise."""
    found = Certificates({"device": "test"}, None)
    monkeypatch.setattr(cuda, "certificates", lambda: found)
    monkeypatch.setattr(cuda, "INTERPRETED", False)
    monkeypatch.setattr(cuda, "ROWS_PROVEN", 20)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    return found


def test_a_tile_that_leaves_the_class_is_excluded_and_the_anchor_s_stands_in(kept, monkeypatch):
    """Each tile is proven at its first use; one with other bits is never launched again, and the anchor serves."""
    launched = []

    def planted(a, b, scale_a, scale_b, dtype, bias=None, *, tile=None):
        launched.append(tile)
        return cpu.in_order(a, b, scale_a, scale_b, dtype, bias, interval=64 if tile == cuda.TILES[0] else 128)

    a, b, _, _ = bell("row", 4, 1024, 32)
    monkeypatch.setattr(cuda, "scaled_matmul", planted)
    assert cuda.proven_tile(a, b, False, torch.float32, cuda.TILES[1]) == cuda.TILES[1]
    assert cuda.proven_tile(a, b, False, torch.float32, cuda.TILES[0]) == cuda.ANCHOR
    assert [c.member for c in kept.excluded()] == [f"triton {cuda.TILES[0].name}"]
    assert all(c.key.startswith("chain-fp8 | float8_e4m3fn float8_e4m3fn into float32 K=1024 N=32") for c in kept.all())
    launched.clear()
    assert cuda.proven_tile(a, b, False, torch.float32, cuda.TILES[0]) == cuda.ANCHOR
    assert launched == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match="is proven to be of class chain-fp8"):
        cuda.proven_tile(a, b, True, torch.float32, cuda.TILES[0])


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("how", SCALES)
@pytest.mark.parametrize(("k", "n"), [(4096, 1024), (1000, 777)])
def test_bits_do_not_depend_on_the_batch(pair, how, k, n):
    """M, place and tile, on hard inputs: row by row the bits of the largest batch."""
    for kind in PRODUCT_INPUTS:
        a, b, scale_a, scale_b = operands(kind, how, (513, k, n), pair, "cuda", 1)
        for dtype in (torch.float32, torch.bfloat16):
            whole = cuda.scaled_matmul(a, b, scale_a, scale_b, dtype)
            for start, stop in ((0, 1), (3, 5), (0, 16), (17, 50), (100, 165), (300, 513)):
                scale = scale_a if how == "tensor" else scale_a[start:stop]
                assert identical(cuda.scaled_matmul(a[start:stop], b, scale, scale_b, dtype), whole[start:stop])


def test_torch_s_own_product_serves_where_it_is_proven_and_nowhere_else(kept, monkeypatch):
    """At each M anew: one that adds in another order from 64 rows on is excluded there alone, and a tile serves."""

    def planted(a, b, scale_a, scale_b, bias=None, out_dtype=None):
        return cpu.in_order(a, b, scale_a, scale_b, out_dtype, bias, interval=64 if len(a) >= 64 else 128)

    def tiles(a, b, scale_a, scale_b, dtype, bias=None, *, tile=None):
        return cpu.in_order(a, b, scale_a, scale_b, dtype, bias)

    monkeypatch.setattr(torch, "_scaled_mm", planted)
    monkeypatch.setattr(cuda, "scaled_matmul", tiles)
    for rows, holds in ((60, True), (64, False)):
        given = bell("row", rows, 512, 32)
        bias = torch.zeros(32)
        assert (cuda.library_step(given, torch.float32, None) == 1) is holds
        assert (cuda.library_step(given, torch.float32, bias) == 1) is holds
    assert {c.member for c in kept.all()} == {cuda.LIBRARY}
    assert len(kept.excluded()) == 2
    a, b, *scales = bell("row", 60, 512, 32)
    assert cuda.library_step((a, b, *scales), torch.float32, None)
    wider, deeper = (torch.zeros(n, 528, dtype=torch.uint8).view(E4M3)[:, :512] for n in (60, 32))
    for refused in (
        bell("row", 8, 512, 32),  # the tiles are faster
        (*given[:3], given[3][:, :1].clone()),  # torch has no such product
        (given[0], given[1].contiguous(), *given[2:]),
        (wider, b, *scales),  # a proof's rows lie side by side
        (a, deeper.mT, *scales),
    ):
        assert not cuda.library_step(refused, torch.float32, None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    block = bell("block", 60, 512, 32)
    assert not cuda.library_step(block, torch.float32, None)


def test_the_library_is_asked_for_more_rows_where_it_leaves_the_class_at_few(kept, monkeypatch):
    """With scales in blocks: one that splits K below 64 rows serves as one of 64."""

    def planted(a, b, scale_a, scale_b, bias=None, out_dtype=None):
        return cpu.in_order(a, b, scale_a, scale_b, out_dtype, bias, splits=2 if len(a) < 64 else 1)

    monkeypatch.setattr(torch, "_scaled_mm", planted)
    monkeypatch.setattr(cuda, "scaled_matmul", lambda *given, tile: cpu.in_order(*given))
    for rows, step in ((5, 64), (60, 64), (63, 4), (70, 4)):
        given = bell("block", rows, 512, 128)
        assert cuda.library_step(given, torch.float32, None) == step
        assert identical(cuda.library(*given, torch.float32, step=step), cpu.in_order(*given, torch.float32))


def test_block_scales_keep_their_values_in_columns_of_four():
    """Whatever they lay like; what is added is zero."""
    left, right = torch.rand(8, 6), torch.rand(6, 3)
    for given in (right, right.mT.contiguous().mT):
        a, b = stock.block_scales(left, given)
        assert identical(a, left)
        assert identical(b, right)
        assert (a.stride(0), b.stride()) == (1, (1, 8))
        assert float(torch.as_strided(b, (2, 3), (1, 8), 6).abs().sum()) == 0
        assert stock.block_scales(left, given, 1)[1].stride() == (1, 6)


@pytest.mark.parametrize("rows", [3, *at_length(1, 4)])
def test_rows_are_padded_for_the_library_s_blocks(rows, monkeypatch):
    """In multiples of four, scales with the first axis nearest; what comes back are the rows that came."""

    def planted(a, b, scale_a, scale_b, bias=None, out_dtype=None):
        assert len(a) == len(scale_a) == 4
        assert scale_a.stride(0) == scale_b.stride(0) == 1
        return cpu.in_order(a, b, scale_a, scale_b, out_dtype, bias)

    monkeypatch.setattr(torch, "_scaled_mm", planted)
    given = bell("block", rows, 512, 256)
    stock_padded = load_object(operators()["scaled_matmul"].implementation("stock-padded").target("cuda"))
    for library in (cuda.library, stock_padded):  # the latter is asked about beside stock, which refuses a single row
        with listen() as ran:
            assert identical(library(*given, torch.float32), cpu.scaled_matmul(*given, torch.float32))
    assert "torch._scaled_mm, rows in fours" in ran
    assert "stock-padded" in implementations_of("scaled_matmul", ["stock"], "cuda")
    by_row = bell("row", rows, 512, 256)
    apart = by_row[2].repeat(1, 2)[:, :1], by_row[3].mT.repeat(1, 2)[:, :1].mT  # torch takes no such scales
    asked = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, *scales, **_: asked.extend(scales[:2]) or a.float())
    cuda.library(*by_row[:2], *apart, torch.float32)
    assert [scale.is_contiguous() for scale in asked] == [True, True]
    with pytest.raises(NotImplementedError, match="nothing is padded"):
        stock_padded(*bell("row", rows, 512, 256), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("how", SCALES)
def test_torch_s_own_product_has_the_bits_of_the_tiles(how):
    """Where it serves, at M of all kinds; and it does serve somewhere on a GPU of compute capability 9.0."""
    served = 0
    for m in (1, 3, 16, 64, 65, 100, 513, 1000):
        given = operands("wide", how, (m, 1024, 512), (E4M3, E4M3), "cuda", 2)
        for bias in (None, torch.rand(512, device="cuda", dtype=torch.bfloat16)):
            with listen() as ran:
                got = cuda.scaled_matmul(*given, torch.bfloat16, bias)
            served += f"scaled_matmul[{cuda.LIBRARY}]" in ran
            assert identical(got, cuda.scaled_matmul(*given, torch.bfloat16, bias, tile=cuda.ANCHOR))
    assert served or torch.cuda.get_device_capability() != (9, 0)


def grouped(kind: str, *sizes: int) -> tuple[torch.Tensor, ...]:
    """What a grouped product of 3 experts takes: rows, weights, and the scales of each."""
    m, k, n = sizes
    a, b, scale_a, scale_b = operands(kind, "row", (m, k, 3 * n), (E4M3, E4M3), DEVICE, 0)
    return a, b.mT.unflatten(0, (3, n)).mT, scale_a[:, 0].contiguous(), scale_b[0].view(3, n).contiguous()


def test_experts_rows_are_their_own_products():
    given = (*grouped("integers", 9, 256, 16), torch.tensor([2, 2, 7], device=DEVICE))
    right = reference.scaled_grouped_matmul(*given, torch.float32)
    assert identical(cuda.scaled_grouped_matmul(*given, torch.float32), right.float())


@pytest.mark.gpu
def test_torch_s_products_are_replaced_on_a_gpu():
    """torch._scaled_grouped_mm under the block: each row as its own plain product, torch._scaled_mm, in any batch."""
    a, weight, scale_a, scales = grouped("wide", 64, 512, 128)
    ends = torch.tensor([16, 48, 64], device="cuda", dtype=torch.int32)
    with batch_invariant(["fp8"]) as block, listen() as ran:
        got = torch._scaled_grouped_mm(a, weight, scale_a, scales, offs=ends)
        rows = [slice(16, 48), slice(17, 18)]
        own = [torch._scaled_mm(a[r], weight[1], scale_a[r, None], scales[1][None], out_dtype=OUT) for r in rows]
    assert block.coverage().replaced == {"_scaled_grouped_mm": 1, "_scaled_mm": 2}
    assert [identical(got[r], one) for r, one in zip(rows, own, strict=True)] == [True, True]
    assert any(name.startswith("scaled_matmul[") for name in ran)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("fp8")
    for how in SCALES:
        assert fp8_model.convert(how, where / how) == 28
    return {how: where / how for how in SCALES}


def fp8_layers(folder: Path) -> Any:
    """The copy with transformers' own FP8 layers, on a CPU too, where from_pretrained makes bfloat16 of them."""
    if not hasattr(finegrained_fp8, "fp8_linear"):
        pytest.skip("another transformers, whose FP8 layers are made otherwise")
    config = AutoConfig.from_pretrained(folder)
    settings = FineGrainedFP8Config(**json.loads((folder / "config.json").read_text())["quantization_config"])
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    finegrained_fp8.replace_with_fp8_linear(model, ["lm_head"], settings)
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False, assign=True)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def test_quantized_weights_that_stay_are_told_as_they_are():
    """A model that keeps its config's method computes with it; one that lost it has plain weights."""
    given = SimpleNamespace(quant_method="fbgemm_fp8")
    kept, lost = (SimpleNamespace(config=SimpleNamespace(quantization_config=one)) for one in (given, None))
    made = {"quantization": "fp8, of which loading made bfloat16"}
    assert quantization_of(given, kept, "bfloat16") == {"quantization": "fbgemm_fp8"}
    assert quantization_of({"quant_method": "fp8"}, lost, "bfloat16") == made
    assert quantization_of(None, lost, "bfloat16") == {}


@pytest.mark.parametrize("how", ["block", *at_length("tensor")])
def test_a_request_has_the_same_bits_in_any_batch(folders, how):
    """The whole model: FP8 layers are replaced and told; a request's logits do not follow the other requests."""
    model = fp8_layers(folders[how])
    ids = torch.randint(0, 4096, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), batch_invariant() as block:
        whole = model(ids).logits
        assert identical(model(ids[2:]).logits, whole[2:])
    coverage = block.coverage()
    assert coverage.replaced["transformers FP8Linear"] == 2 * 28
    assert not [what for what in coverage.at_risk if "FP8" in what or "scaled" in what]
    plain = AutoModelForCausalLM.from_pretrained(fp8_model.EMBEDDED, dtype=torch.bfloat16)
    with torch.no_grad():
        near = torch.nn.functional.cosine_similarity(whole.float(), plain(ids).logits.float(), dim=-1)
    assert near.mean() > 0.98  # it is the same model: not a figure of merit


def test_what_is_not_replaced_is_at_risk(folders, monkeypatch):
    """The family off, a gradient, blocks of another size: transformers' own layer computes, and is counted by name."""
    layer = fp8_layers(folders["block"]).model.layers[0].self_attn.q_proj
    asked = []

    def theirs(x, weight, *rest, **more):
        asked.append(len(x))
        return x @ weight.to(x.dtype).t()

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", theirs)
    x = torch.ones(3, 256, dtype=torch.bfloat16)
    for mode, family in ((torch.no_grad, "norm"), (torch.enable_grad, "fp8")):
        with mode(), batch_invariant([family]) as block:
            layer(x)
        assert block.coverage().at_risk["transformers FP8Linear"] == 1
    layer.block_size = (64, 64)  # (each of these is transformers' own product, as a kernel of its hub would be)
    with torch.no_grad(), batch_invariant(["fp8"]) as block:
        layer(x)
    assert any("blocks of (64, 64)" in what for what in block.coverage().at_risk)
    assert asked == [3, 3, 3]
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.bfloat16))
    with torch.no_grad(), batch_invariant() as block:
        layer(x)
    assert block.coverage().replaced == {"linear": 1}
    assert not block.coverage().at_risk
    forward = vars(finegrained_fp8.FP8Linear)["forward"]
    assert not hasattr(forward, "__wrapped__")  # taken out with the block


@needs_row_scales
def test_fbgemm_s_layers_are_replaced_and_a_request_keeps_its_bits(folders, monkeypatch):
    """A layer by transformers' own code, which calls torch._scaled_mm where there is no FBGEMM (on XPU), follows the
    batch where float32 shows it; ours does not, and means the same."""

    def by_row(x, scale_ub):
        q, scale = quantize_row(x, limit=scale_ub)
        return q, scale[:, 0]

    monkeypatch.setattr(fbgemm_fp8, "_is_torch_xpu_available", True)
    monkeypatch.setattr(fbgemm_fp8, "quantize_fp8_per_row", by_row, raising=False)
    tensors, name = load_file(folders["row"] / "model.safetensors"), "model.layers.0.mlp.down_proj"
    layer = fbgemm_fp8.FbgemmFp8Linear(768, 256, False)
    parts = {part: tensors[f"{name}.{part}"] for part in ("weight", "weight_scale")}
    missing, unexpected = layer.load_state_dict(parts, assign=True)
    assert not missing + unexpected
    layer.input_scale_ub.fill_(1200.0)
    x = torch.randn(33, 768, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert not identical(layer(x[:1]), layer(x)[:1])
        theirs = layer(x.bfloat16())
        with batch_invariant() as block:
            ours = layer(x.bfloat16())
            assert identical(layer(x[3:4].bfloat16()), ours[3:4])
        assert block.coverage().replaced["transformers FbgemmFp8Linear"] == 2
        assert not block.coverage().at_risk
        assert error_against(ours, theirs.double()).relative_norm <= 2**-8  # its meaning is theirs
        layer.input_scale_ub.fill_(0.5)  # numbers beyond it are cut
        with batch_invariant(["fp8"]) as block:
            assert not identical(layer(x.bfloat16()), ours)
            layer(x)
        assert layer(x.bfloat16()).abs().max() < ours.abs().max()
    assert any("activations of torch.float32" in what for what in block.coverage().at_risk)


def experts(block=(128, 128), intermediate=128, **more) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """FP8Experts of 8 weights, seeded, and what a router of 2 gives them for 11 rows."""
    config = SimpleNamespace(hidden_size=256, num_experts=8, moe_intermediate_size=intermediate, hidden_act="silu")
    config._experts_implementation = "eager"
    made = finegrained_fp8.FP8Experts(config, block_size=block, **more)
    made._is_expert_parallel = False
    rng = torch.Generator().manual_seed(0)
    for p in list(made.parameters()):
        drawn = torch.randn(p.shape, generator=rng)
        p.data = drawn.to(p.dtype) if p.element_size() == 1 else (drawn.abs() + 0.5) / 200
    x = torch.randn(11, 256, generator=rng).bfloat16()
    weights, index = torch.randn(11, 8, generator=rng).softmax(-1).topk(2)
    return made, (x, index, weights)


def test_fp8_experts_are_computed_row_by_row_and_told():
    """A row's bits alone, among others and in another order; its value is that of its two experts in float64."""
    made, (x, index, weights) = experts()
    with torch.no_grad(), batch_invariant() as block:
        whole = made(x, index, weights)
        for at in (torch.tensor([4]), torch.tensor([9, 4, 0]), torch.arange(10, -1, -1)):
            assert identical(made(x[at], index[at], weights[at]), whole[at])
    coverage = block.coverage()
    assert coverage.replaced["transformers FP8Experts"] == 4
    assert coverage.replaced["silu"]
    assert not coverage.at_risk
    for row in (0, 4):
        total = torch.zeros(256, dtype=torch.float64)
        for expert, weight in zip(index[row].tolist(), weights[row], strict=True):
            part = x[row : row + 1]
            for name in ("gate_up_proj", "down_proj"):
                q, scale = quantize_block(part)
                w, s = getattr(made, name)[expert], getattr(made, f"{name}_scale_inv")[expert]
                part = reference.scaled_matmul(q, w.t(), scale, s.t(), torch.float32).detach()
                if name == "gate_up_proj":
                    part = torch.nn.functional.silu(part[:, :128]) * part[:, 128:]
                part = part.bfloat16()
            total += part[0].double() * weight.double()
        assert error_against(whole[row], total).relative_norm <= 2**-6


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"activation_scheme": "static"}, "a static scale"),
        ({"expert_dtype": "fp4"}, "torch.int8"),
        ({"intermediate": 32}, "(2, 2) do not fit"),  # two scales for a projection of 64 columns are no block's
    ],
)
def test_experts_that_are_not_computed_are_at_risk(asked, why, monkeypatch):
    try:
        made, given = experts(**asked)
    except TypeError:
        pytest.skip("another transformers, which names FP4 elsewhere")
    ran = []
    monkeypatch.setattr(
        finegrained_fp8, "fp8_linear", lambda x, w, *_, **__: ran.append(len(x)) or x.new_ones(len(x), len(w))
    )
    with torch.no_grad(), batch_invariant() as block:
        made(*given)
    assert sum(ran) == 2 * 22
    assert [why in what for what in block.coverage().at_risk if "FP8Experts" in what] == [True]


def test_block_diagonal_layers_are_computed_group_by_group():
    """Each group's slice by its own part of the weight: the bits of a layer of that part alone, in any batch."""
    layer = finegrained_fp8.FP8GroupedLinear(256, 384, 3, (128, 128), has_bias=True)
    rng = torch.Generator().manual_seed(0)
    for name, p in layer.named_parameters():
        drawn = torch.randn(p.shape, generator=rng)
        p.data = drawn.to(p.dtype) if name == "weight" else drawn.abs()
    x = torch.randn(2, 5, 3, 256, generator=rng).bfloat16()
    with torch.no_grad(), batch_invariant() as block:
        whole = layer(x)
        assert identical(layer(x[1:, 2:3]), whole[1:, 2:3])
        for g in range(3):
            one = finegrained_fp8.FP8Linear(256, 128, (128, 128), has_bias=True)
            for name in ("weight", "weight_scale_inv", "bias"):
                getattr(one, name).data = getattr(layer, name).data.chunk(3)[g]
            assert identical(one(x[..., g, :]), whole[..., g, :])
    assert whole.shape == (2, 5, 3, 128)
    assert block.coverage().replaced == {"transformers FP8GroupedLinear": 2, "transformers FP8Linear": 3}
    assert not block.coverage().at_risk


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["torchao-row", "torchao-tensor"])
def test_a_copy_of_torchao_s_computes_with_torch_s_product(tmp_path, how):
    """Made and read on a CPU too: its layers' torch._scaled_mm is replaced; one scale for a step is at risk by name."""
    pytest.importorskip("torchao")
    assert fp8_model.by_torchao(how, tmp_path / how) == 28
    model = load_model(str(tmp_path / how), "bfloat16", "cpu").model
    ids = torch.randint(0, 4096, (9, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), batch_invariant() as block:
        whole = model(ids).logits
        same = identical(model(ids[3:4]).logits, whole[3:4])
    coverage = block.coverage()
    assert coverage.replaced["_scaled_mm"] == 2 * 28
    assert same == (how == "torchao-row") == (not coverage.at_risk)
    assert all("the batch's axis included" in what for what in coverage.at_risk)


@needs_accelerate
@pytest.mark.parametrize("how", ["block", *at_length("tensor")])
def test_a_copy_loads_as_bfloat16_on_a_cpu(folders, how):
    """As transformers says it does where there is no GPU: --model takes the folder, and meets plain linear layers."""
    if torch.cuda.is_available():
        pytest.skip("this is a GPU")
    model = AutoModelForCausalLM.from_pretrained(folders[how])
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    identity = load_model(str(folders[how]), "bfloat16", "cpu").identity
    assert identity["quantization"] == "fp8, of which loading made bfloat16"
    assert "quantization" not in load_model(None, "bfloat16", "cpu").identity


@needs_row_scales
def test_compressed_tensors_layers_are_cured_by_their_product():
    """They call torch.nn.functional.scaled_mm: stock follows the batch there, the replaced operator does not."""
    compressed = pytest.importorskip("transformers.integrations.compressed_tensors")
    if not hasattr(compressed, "CompressedTensorsFP8Linear"):
        pytest.skip("another transformers, which has no FP8 layer for these")
    layer = compressed.CompressedTensorsFP8Linear(1024, 256)
    rng = torch.Generator().manual_seed(0)
    layer.weight.data = torch.randn(256, 1024, generator=rng).to(torch.float8_e4m3fn)
    layer.weight_scale.data = torch.rand(1, 256, generator=rng) + 0.5
    x = torch.randn(33, 1024, generator=rng)
    with torch.no_grad():
        assert not identical(layer(x[:1]), layer(x)[:1])
        with batch_invariant() as block:
            whole = layer(x)
            for at in (slice(0, 1), slice(7, 12)):
                assert identical(layer(x[at]), whole[at])
    assert block.coverage().replaced == {"_scaled_mm_v2": 3}
    assert not block.coverage().at_risk
