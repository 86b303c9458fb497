"""An FP8 copy of the embedded model, or of another folder, as transformers reads it, or (--vllm) vLLM.

    python lab/fp8_model.py block FOLDER    weights in blocks of 128x128, activations 1x128 at run time (FP8Linear)
    python lab/fp8_model.py tensor FOLDER   one scale for a weight, one for its activations from a few prompts
    python lab/fp8_model.py row FOLDER      a scale for each row of both (FbgemmFp8Linear, which needs fbgemm-gpu)
    python lab/fp8_model.py torchao-row FOLDER      the same by torchao, whose layers call torch._scaled_mm
    python lab/fp8_model.py torchao-tensor FOLDER   one scale for a weight, one for all activations of a step

The linear layers of the decoder are quantized to float8_e4m3fn; embeddings, norms and the output projection stay. On a
device without FP8 transformers itself makes bfloat16 of "block" and "tensor" as it loads them, and refuses "row". Those
of torchao are made, and read, where torchao is installed (tried: 0.18); torch computes their products on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch

EMBEDDED = Path(__file__).resolve().parent.parent / "nondet" / "embedded"
MOST = torch.finfo(torch.float8_e4m3fn).max
BLOCK = 128
PROMPTS = ("The following exceptions are raised", "class Example:\n    def __init__(self", "Return a new list of")
CONFIGS = {
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    "tensor": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    "row": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
}
# As vLLM reads them: other names of the scales of "tensor", and "row" as llm-compressor writes it
OF_VLLM = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
_GROUP = {
    "targets": ["Linear"],
    "weights": _NUMBERS | {"strategy": "channel", "dynamic": False},
    "input_activations": _NUMBERS | {"strategy": "token", "dynamic": True},
}
CONFIGS_OF_VLLM = CONFIGS | {
    "row": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": _GROUP}}
}


def quantized(w: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 numbers of w [N, K] and the scales to multiply them with: [], [N, 1] or [N / 128, K / 128]."""
    wide = w.float()
    if how == "block":
        if w.shape[0] % BLOCK or w.shape[1] % BLOCK:
            raise SystemExit(f"a weight of {tuple(w.shape)} has no whole blocks of {BLOCK}x{BLOCK}; take tensor or row")
        tiles = wide.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / MOST
        return (tiles / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn), scale[:, 0, :, 0]
    largest = wide.abs().amax() if how == "tensor" else wide.abs().amax(1, keepdim=True)
    scale = largest.clamp(min=1e-12) / MOST
    return (wide / scale).clamp(-MOST, MOST).to(torch.float8_e4m3fn), scale


def activation_scales(source: Path, layers: set[str]) -> dict[str, torch.Tensor]:
    """Layer -> the scale by which the largest of its inputs on `PROMPTS` is the largest number of FP8."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    found = dict.fromkeys(layers, torch.tensor(0.0))

    def watch(name: str) -> None:
        def hook(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            found[name] = torch.maximum(found[name], given[0].abs().amax())

        model.get_submodule(name).register_forward_pre_hook(hook)

    for name in layers:
        watch(name)
    with torch.no_grad():
        for prompt in PROMPTS:
            model(**tokenizer(prompt, return_tensors="pt"))
    return {name: largest.clamp(min=1e-12) / MOST for name, largest in found.items()}


def convert(how: str, out: Path, source: Path = EMBEDDED, *, vllm: bool = False) -> int:
    """Write the folder, its scales named as transformers or as vLLM reads them; how many layers were quantized."""
    from safetensors.torch import load_file, save_file

    if out.exists():
        raise SystemExit(f"{out} is there already; name a folder that is not")
    tensors = load_file(source / "model.safetensors")
    linear = {n.removesuffix(".weight") for n, x in tensors.items() if n.endswith("_proj.weight") and x.dim() == 2}
    scales = activation_scales(source, linear) if how == "tensor" else {}
    for name in sorted(linear):
        q, scale = quantized(tensors[f"{name}.weight"], how)
        tensors[f"{name}.weight"] = q.contiguous()
        tensors[f"{name}.{'weight_scale' if how == 'row' else 'weight_scale_inv'}"] = scale.contiguous()
        if scales:
            tensors[f"{name}.activation_scale"] = scales[name]
    if vllm and how == "tensor":
        tensors = {
            f"{at}{dot}{OF_VLLM.get(n, n)}": x for name, x in tensors.items() for at, dot, n in [name.rpartition(".")]
        }
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    skipped = {key: ["lm_head"] for key in ("modules_to_not_convert", "ignore")}
    config["quantization_config"] = (CONFIGS_OF_VLLM if vllm else CONFIGS)[how] | skipped
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    return len(linear)


def by_torchao(how: str, out: Path, source: Path = EMBEDDED) -> int:
    """Write the folder as transformers and torchao do, in safetensors; how many layers were quantized."""
    if out.exists():
        raise SystemExit(f"{out} is there already; name a folder that is not")
    try:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quant_api
    except ImportError as error:
        raise SystemExit(f"{how} is written by torchao, which can't be imported here ({error}): install it") from None
    from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

    granularity = PerRow() if how == "torchao-row" else PerTensor()
    config = TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=granularity))
    # it is rounded on the CPU, for which torchao would ask for a GPU with FP8; a GPU that is there is asked about
    asked = quant_api._check_hardware_support if torch.cuda.is_available() else lambda *_, **__: None
    with mock.patch.object(quant_api, "_check_hardware_support", asked):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    return sum(type(p).__name__ == "Float8Tensor" for p in model.parameters())


def main() -> None:
    """Read the arguments and convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=[*CONFIGS, "torchao-row", "torchao-tensor"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="a folder with one model.safetensors")
    parser.add_argument("--vllm", action="store_true", help="for vLLM to read, which names things otherwise")
    options = parser.parse_args()
    if options.how in CONFIGS and not (options.model / "model.safetensors").is_file():
        parser.error(f"--model {options.model} has no model.safetensors: give a folder whose weights are one such file")
    write = partial(convert, vllm=options.vllm) if options.how in CONFIGS else by_torchao
    print(
        f"{options.out}: {write(options.how, options.out, options.model)} linear layers, {options.how}", file=sys.stderr
    )


if __name__ == "__main__":
    main()
