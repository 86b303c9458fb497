"""FP8 copies of the embedded model: what the script writes, and transformers' FP8 layers under batch_invariant()."""

from __future__ import annotations

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
from nondet.core.compare import error_against, identical
from nondet.kernels import reference
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.scaled.functions import quantize_block, quantize_row
from nondet.sampling.model import load_model, quantization_of
from tests.build import needs_accelerate, needs_row_scales
from tests.kernels.tiers import at_length

pytestmark = pytest.mark.slow  # whole models
KINDS = ("block", "tensor", "row")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("fp8")
    for how in KINDS:
        assert fp8_model.convert(how, where / how) == 28
    return {how: where / how for how in KINDS}


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
    with torch.no_grad(), batch_invariant(["norm"]) as block:
        layer(x)
    assert block.coverage().at_risk["transformers FP8Linear"] == 1
    with batch_invariant(["fp8"]) as block:
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
    """transformers' own forward runs in their place, and the reason is coverage."""
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
