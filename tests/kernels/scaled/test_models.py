"""FP8 copies of the embedded model: what the script writes, and transformers' FP8 layers under batch_invariant()."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import finegrained_fp8
from transformers.utils.quantization_config import FineGrainedFP8Config

from nondet.core.compare import error_against, identical
from nondet.kernels import reference
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.scaled.functions import quantize_block

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("block", "tensor", "row")


def script() -> Any:
    spec = importlib.util.spec_from_file_location("fp8_model", ROOT / "scripts" / "fp8_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("fp8")
    for how in KINDS:
        assert script().convert(how, where / how) == 28
    return {how: where / how for how in KINDS}


def fp8_model(folder: Path) -> Any:
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


@pytest.mark.parametrize("how", KINDS)
def test_a_copy_means_what_the_model_means(folders, how):
    """Each quantized weight is within half a step of its own, scales have their kind's form, the rest is as it was."""
    before = load_file(script().EMBEDDED / "model.safetensors")
    after = load_file(folders[how] / "model.safetensors")
    scale_name = "weight_scale" if how == "row" else "weight_scale_inv"
    for name, w in before.items():
        if not name.endswith("_proj.weight"):
            assert identical(after[name], w)
            continue
        q, scale = after[name], after[f"{name.removesuffix('weight')}{scale_name}"]
        assert (q.dtype, q.shape, scale.dtype) == (torch.float8_e4m3fn, w.shape, torch.float32)
        assert scale.shape == {"tensor": (), "row": (len(w), 1), "block": (len(w) // 128, w.shape[1] // 128)}[how]
        back, step = reference.dequantized(q, scale), reference.dequantized(torch.ones_like(w), scale) * 2**-9
        assert ((back - w.double()).abs() <= w.double().abs() * 2**-4 + step).all()


def test_nothing_is_overwritten_and_odd_sizes_are_refused(folders):
    """One line, and the folder stays as it was; a weight of no whole blocks is refused by its sizes."""
    with pytest.raises(SystemExit, match="is there already"):
        script().convert("row", folders["row"])
    with pytest.raises(SystemExit, match="whole blocks"):
        script().quantized(torch.ones(100, 128), "block")


@pytest.mark.parametrize("how", ["block", "tensor"])
def test_a_copy_loads_as_bfloat16_on_a_cpu(folders, how):
    """As transformers says it does where there is no GPU: --model takes the folder, and meets plain linear layers."""
    if torch.cuda.is_available():
        pytest.skip("this is a GPU")
    model = AutoModelForCausalLM.from_pretrained(folders[how])
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


@pytest.mark.parametrize("how", ["block", "tensor"])
def test_a_request_has_the_same_bits_in_any_batch(folders, how):
    """The whole model: FP8 layers are replaced and told; a request's logits do not follow the other requests."""
    model = fp8_model(folders[how])
    ids = torch.randint(0, 4096, (9, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), batch_invariant() as block:
        whole = model(ids).logits
        assert identical(model(ids[3:4]).logits, whole[3:4])
        assert identical(model(ids[5:8]).logits, whole[5:8])
    told = block.coverage()
    assert told.replaced["transformers FP8Linear"] == 3 * 28
    assert not [what for what in told.at_risk if "FP8" in what or "scaled" in what]
    plain = AutoModelForCausalLM.from_pretrained(script().EMBEDDED, dtype=torch.bfloat16)
    with torch.no_grad():
        near = torch.nn.functional.cosine_similarity(whole.float(), plain(ids).logits.float(), dim=-1)
    assert near.mean() > 0.98  # it is the same model: not a figure of merit


def test_a_layer_s_product_is_that_of_its_operands(folders):
    """One layer beside float64 of the quantized activations and weights, with its bias."""
    layer = fp8_model(folders["block"]).model.layers[1].mlp.down_proj
    layer.bias = torch.nn.Parameter(torch.randn(256, generator=torch.Generator().manual_seed(1)).bfloat16())
    x = torch.randn(2, 5, 768, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad(), batch_invariant(["fp8"]):
        got = layer(x)
    q, scale = quantize_block(x.flatten(0, 1))
    right = reference.scaled_matmul(q, layer.weight.t(), scale, layer.weight_scale_inv.detach().t(), torch.bfloat16)
    assert got.shape == (2, 5, 256)
    assert error_against(got.flatten(0, 1), right + layer.bias.detach().double()).relative_norm <= 2**-8


def test_what_is_not_replaced_is_at_risk(folders, monkeypatch):
    """The family off, a gradient, blocks of another size: transformers' own layer computes, and is counted by name."""
    layer = fp8_model(folders["block"]).model.layers[0].self_attn.q_proj
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
