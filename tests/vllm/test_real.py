"""The plugin's functions in a real vLLM: `pytest -m vllm tests/vllm`, in an environment that has 0.25.1."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from lab.vllm_load import made_folder
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.vllm import plugin

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_what_coverage_asks_of_its_layers_and_modes_is_there() -> None:
    """By name: what no CPU can be given is where its configuration has it."""
    import vllm.plugins
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    assert all("AttentionLayerBase" in {c.__name__ for c in cls.__mro__} for cls in (Attention, MambaMixer2))
    assert isinstance(vllm.plugins.plugins_loaded, bool)
    config = EngineArgs(model=made_folder("tiny"), skip_tokenizer_init=True, load_format="dummy").create_engine_config()
    for name in ("model_config.use_mla", "model_config.enable_sleep_mode", "parallel_config.enable_dbo"):
        assert attrgetter(name)(config) is False
    assert attrgetter("parallel_config.ubatch_size")(config) == 0
    for name in ("decode_context", "prefill_context", "tensor", "pipeline"):
        assert attrgetter(f"parallel_config.{name}_parallel_size")(config) == 1
    assert attrgetter("cache_config.block_size")(config) > 0


STARTED = """
import sys

import vllm.plugins
from vllm import LLM
from vllm.platforms import current_platform

from nondet.vllm import plugin
from lab.vllm_load import made_folder

if __name__ == "__main__":
    vllm.plugins.plugins_loaded = True
    found = plugin.check_patched()  # loads vLLM's modules, as a CPU has them
    assert set(found) == set(plugin.PATCHED)
    current_platform.is_cuda = lambda: True
    plugin.register()
    del current_platform.is_cuda
    try:
        LLM(made_folder("tiny"), skip_tokenizer_init=True, dtype="bfloat16", load_format="dummy", max_model_len=64,
            max_num_seqs=4, max_num_batched_tokens=63, enforce_eager=True)
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__} {error}\\n")
"""


def test_a_start_from_configuration_to_coverage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "coverage.jsonl"
    for name, value in {
        "NONDET_BATCH_INVARIANT": "1", "NONDET_COVERAGE": str(path), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=False)
    said = "UserError 2 layers are at risk, the first model.layers.0.self_attn.attn (Attention): attention by CPU"
    assert said in done.stdout, (done.stdout[-2000:], done.stderr[-2000:])
    found = {(s.kind, s.standing): s.layers for s in read_run(path).layer_standings}
    assert found["Attention", "at risk"] == 2
    assert found["RMSNorm", "replaced"] == 9
    products = ("VocabParallelEmbedding", "ParallelLMHead", "QKVParallelLinear", "RowParallelLinear")
    assert [found[kind, "replaced"] for kind in products] == [1, 1, 2, 4]
    assert {standing for _, standing in found} == {"replaced", "elementwise", "at risk"}


PLAIN = {"skip_tokenizer_init": True, "dtype": "bfloat16", "load_format": "dummy"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_lora": True}, "LoRA adapters"),
    ({"speculative_config": NGRAM}, "speculative decoding"),
    ({"kv_cache_dtype": "fp8"}, "a KV cache of fp8"),
    ({"compilation_config": {"pass_config": {"fuse_norm_quant": True}}}, "pass_config.fuse_norm_quant"),
    ({"cpu_offload_gb": 1}, "offloaded weights"),
    ({"offload_backend": "prefetch", "offload_group_size": 2}, "offloaded weights"),
    ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "a transfer of KV caches"),
    ({"weight_transfer_config": {"backend": "nccl"}}, "a transfer of weights"),
    ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
    ({"dtype": "float32"}, "torch.float32 as the model's dtype"),
]


def test_what_is_refused_is_where_its_configuration_has_it() -> None:
    """A name that this vLLM has elsewhere would be a refusal that never comes."""
    from vllm.engine.arg_utils import EngineArgs

    plain = PLAIN | {"model": made_folder("tiny")}
    plugin.refuse(EngineArgs(**plain).create_engine_config())
    for given, named in REFUSED:
        with pytest.raises(UserError, match=f"does not cover {named}"):
            plugin.refuse(EngineArgs(**(plain | given)).create_engine_config())


def test_nothing_is_fused_that_the_plugin_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM turns its fusions of norms on where a norm is not native, as ours is not: batch-dependent FP8 kernels."""
    from vllm.engine.arg_utils import EngineArgs

    fused = []
    for prepared in (False, True):
        arguments = EngineArgs(**PLAIN, model=made_folder("tiny"))
        before = arguments.attention_backend
        if prepared:
            with monkeypatch.context() as patch:
                patch.setenv("VLLM_BATCH_INVARIANT", "1")
                plugin.prepare(arguments)
        arguments.attention_backend, arguments.ir_op_priority.rms_norm = before, ["vllm_c", "native"]
        passes = arguments.create_engine_config().compilation_config.pass_config
        fused.append([name for name, on in vars(passes).items() if on is True and name != "eliminate_noops"])
    assert fused == [["fuse_norm_quant"], []]


def _replaced(model: Any) -> int:
    """In the worker's process: every FP8 layer gets nondet's product; what it is compared with."""
    import torch

    from nondet.core import compare
    from nondet.engines.layers import use_counts
    from nondet.kernels.scaled import cpu
    from nondet.kernels.scaled.functions import quantize_row
    from nondet.vllm import operators

    layers = {name: one for name, one in model.named_modules() if getattr(one, "scheme", None) is not None}
    use_counts([4])
    for layer in layers.values():
        x = torch.randn(3, layer.input_size_per_partition, dtype=torch.bfloat16)
        before = layer.quant_method.apply(layer, x)
        assert operators.unfit_scaled(layer) == ""
        operators.replace_scaled(layer, [4], torch.bfloat16, {})
        q, left = quantize_row(x)
        right = layer.weight_scale.reshape(1, -1).expand(1, layer.weight.shape[1])
        scaled = operators.scaled_product(x, layer.weight, layer.nondet_scales)
        assert compare.identical(scaled, cpu.scaled_matmul(q, layer.weight, left, right, x.dtype))
        # two quantizers round some numbers to neighbours in FP8, 1/16 apart; other scales or strides are far beyond
        assert (scaled - before).float().norm() < before.float().norm() / 64
    return len(layers)


def test_an_fp8_layer_is_what_ours_takes_it_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM

    from lab.fp8_model import convert

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    convert("row", tmp_path / "row", vllm=True)
    given = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 256, "enforce_eager": True}
    llm = LLM(model=str(tmp_path / "row"), **given, gpu_memory_utilization=0.3)
    assert llm.apply_model(_replaced) == [16]
