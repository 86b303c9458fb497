"""The plugin's contract with vLLM, against toys of its functions: all of it or nothing, and refusals by name."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import nondet.vllm
from nondet import engines
from nondet.core import compare
from nondet.core.runfile import read_run
from nondet.engines import coverage, layers
from nondet.errors import UserError
from nondet.vllm import operators, plugin
from scripts import vllm_seams
from tests.vllm import toys

Toy = dict[str, ModuleType]
# of experts, whose products run in Triton's interpreter
FEW = {"scheduler_config__max_num_batched_tokens": 4, "compilation_config__cudagraph_capture_sizes": [1, 2, 4]}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    yield from _with(monkeypatch, toys.modules())


def _with(monkeypatch: pytest.MonkeyPatch, made: Toy) -> Iterator[Toy]:
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(engines.ENABLED, "1")
    monkeypatch.delenv(nondet.vllm.OWN, raising=False)
    monkeypatch.setattr(plugin, "REGISTERED", [])
    toys.LOG.clear()
    yield made
    for name in (nondet.vllm.OWN, "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        os.environ.pop(name, None)
    layers.use_counts([])


def method(toy: Toy) -> Any:
    return toy["vllm.model_executor.layers.linear"].UnquantizedLinearMethod


def untouched(toy: Toy) -> bool:
    return method(toy).apply.__module__.startswith("vllm") and not toys.OVERRIDES and nondet.vllm.OWN not in os.environ


def test_it_installs_every_function_once(toy: Toy) -> None:
    plugin.register()
    apply = method(toy).apply
    assert apply.__module__ == "nondet.vllm.plugin"
    assert os.environ[nondet.vllm.OWN] == "1"
    assert list(toys.OVERRIDES.values()) == ["nondet.vllm.attention.SegmentsBackend"]
    for norm in vars(toy["vllm.model_executor.layers.layernorm"]).values():
        if isinstance(norm, type):
            assert norm.forward_cuda is norm.forward_native  # whichever vLLM dispatches to
            assert norm.forward_cuda.__module__ == "nondet.vllm.plugin"
    plugin.register()  # vLLM calls it more than once in a process
    assert method(toy).apply is apply


def takes_another(toy: Toy) -> None:
    method(toy).apply = lambda self, layer, x, bias, scale: None


def test_a_version_that_does_not_fit_is_never_half_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = type("Worker", (), {"load_model": toys.Worker.load_model})
    for place, members, named in (
        ("model_executor.layers.linear", None, r"UnquantizedLinearMethod.apply takes \(self layer x bias scale\)"),
        ("v1.worker.gpu_worker", {"Worker": fewer}, r"Worker\.\w+ is not there"),
        ("v1.attention.backends.flash_attn", {"FlashAttentionBackend": toys.OtherLayout}, "cache has another layout"),
    ):
        for made in _with(monkeypatch, toys.modules()):
            if members is None:
                takes_another(made)
            else:
                vars(made[f"vllm.{place}"]).update(members)
            before = method(made).apply
            with pytest.raises(UserError, match=rf"{named}.*Use vLLM 0\.25\.1"):
                plugin.register()
            assert method(made).apply is before
            assert not toys.OVERRIDES
            assert nondet.vllm.OWN not in os.environ
            assert made["vllm.model_executor.layers.layernorm"].RMSNorm.forward_cuda.__module__.startswith("vllm")


def test_a_version_that_fits_is_patched_and_one_that_was_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, lines in (("0.25.1", 0), ("0.26.0", 0), ("0.29.0", 1), ("0.33.0", 1)):
        for made in _with(monkeypatch, toys.modules(version=version)):
            if version == "0.29.0":
                layouts = made["vllm.v1.kv_cache_layout"]
                for other in (SimpleNamespace(LBNHC=SimpleNamespace(value=(0, 1, 2, 3, 4))), SimpleNamespace()):
                    monkeypatch.setattr(layouts, "KVCacheLayout", other)
                    with pytest.raises(UserError, match="KV cache has another layout"):
                        plugin.register()
                    assert untouched(made)
                monkeypatch.setattr(layouts, "KVCacheLayout", toys.KVCacheLayout)
            plugin.register()
            assert not untouched(made)
            assert sum("was never run under nondet: 0.25.1 and 0.26.0 were" in line for line in toys.LOG) == lines


def test_a_refusal_is_one_line(toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in `vllm serve`; another's error keeps its traceback, and a process that asked for nothing its hook."""
    others: list[Any] = []

    def theirs(*error: Any) -> None:
        others.append(error)

    monkeypatch.setattr(sys, "excepthook", theirs)
    for value in ("", "0"):
        monkeypatch.setenv(engines.ENABLED, value)
        plugin.register()
        assert untouched(toy)
    assert sys.excepthook is theirs
    monkeypatch.setenv(engines.ENABLED, "yes")
    for _ in range(2):  # it is put in place once
        with pytest.raises(UserError) as refused:
            plugin.register()
    sys.excepthook(UserError, refused.value, None)
    assert capsys.readouterr().err == f"nondet: {engines.ENABLED}=yes makes no sense. Set it to 1, or unset it.\n"
    assert others == []
    sys.excepthook(ValueError, ValueError("theirs"), None)
    assert len(others) == 1
    assert untouched(toy)


def test_two_plugins_do_not_fight(toy: Toy) -> None:
    """functools.wraps gives a wrapper vLLM's module and parameters; ours would end it in silence. torch's may wrap."""
    toys.OVERRIDES[toys.AttentionBackendEnum.CUSTOM] = "theirs.Backend"
    with pytest.raises(UserError, match=r"CUSTOM is theirs\.Backend already"):
        plugin.register()
    toys.OVERRIDES.clear()
    theirs = method(toy).apply

    def apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return x

    for other in (apply, functools.wraps(theirs)(lambda *args, **more: theirs(*args, **more))):
        method(toy).apply = other
        with pytest.raises(UserError, match=r"LinearMethod\.apply was replaced by .*test_plugin"):
            plugin.register()
        assert method(toy).apply is other
        assert not toys.OVERRIDES
    method(toy).apply = torch.inference_mode()(theirs)
    plugin.register()
    assert not untouched(toy)


def test_a_refusal_is_one_again_where_somebody_tries_again(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls a plugin once a process, and says before that it has; a start after a refusal was vLLM's own."""
    loader: Any = toy["vllm.plugins"]
    for change in (lambda: monkeypatch.setenv(engines.ENABLED, "yes"), lambda: takes_another(toy)):
        change()
        loader.plugins_loaded = True
        with pytest.raises(UserError):
            plugin.register()
        assert not loader.plugins_loaded
        monkeypatch.setenv(engines.ENABLED, "1")
    monkeypatch.setattr(plugin, "check_patched", lambda: 1 / 0)  # whatever goes wrong, vLLM's own flag is as it was
    with pytest.raises(ZeroDivisionError):
        plugin.register()
    assert nondet.vllm.OWN not in os.environ
    assert not toys.OVERRIDES


def test_a_plugin_that_comes_after_ours_is_seen(toy: Toy) -> None:
    plugin.register()
    linear = method(toy)

    def another(kernel: Fp8) -> None:
        linear.apply = lambda self, layer, x, bias=None: kernel.apply(layer, x, bias)

    another(Fp8())
    loaded(toy, model())
    assert "5 replaced, 2 certified stock" in "\n".join(toys.LOG)
    another(Fp8(parts=32))
    with pytest.raises(UserError, match=r"2 layers are at risk.*different bits at M=1 and M=64"):
        loaded(toy, model())


def test_the_configuration_says_what_the_plugin_needs(toy: Toy) -> None:
    plugin.register()
    arguments = toy["vllm.engine.arg_utils"].EngineArgs()
    arguments.create_engine_config()
    assert arguments.attention_backend is toys.AttentionBackendEnum.CUSTOM
    assert arguments.compilation_config.custom_ops == ["+silu_and_mul", "+rotary_embedding", "+quant_fp8"]
    # vLLM keys its compile cache on this; two states of the plugin must not share one
    assert arguments.additional_config == {"nondet": f"{plugin.VERSION} {plugin.sources()}"}
    # nothing is fused: vLLM's own fusions would take norms that are ours out of the compiled model
    assert vars(arguments.compilation_config.pass_config) == {
        "enable_qk_norm_rope_fusion": False, "fuse_norm_quant": False, "eliminate_noops": True,
    }  # fmt: skip
    arguments.create_engine_config()  # once more changes nothing
    assert arguments.compilation_config.custom_ops == ["+silu_and_mul", "+rotary_embedding", "+quant_fp8"]


def test_steps_with_prompts_in_them_are_graphed(toy: Toy) -> None:
    """Up to 2,048 tokens; sizes that somebody chose, and an engine without graphs, stay as they are."""
    plugin.register()
    arguments = toy["vllm.engine.arg_utils"].EngineArgs
    sizes = [1, 2, 4, 8, 16, 32, 64]

    def compiled(tokens: int, given: list[int], **chosen: Any) -> Any:
        changes = {"compilation_config__cudagraph_capture_sizes": [*given]}
        made = toys.config(**changes, scheduler_config__max_num_batched_tokens=tokens)
        return arguments(made=made, **chosen).create_engine_config().compilation_config

    for tokens, added in ((100, [100]), (300, [128, 256, 300]), (9000, [*range(128, 2049, 128)]), (64, [])):
        found = compiled(tokens, sizes)
        assert found.cudagraph_capture_sizes == [*sizes, *added]
        if added:
            assert found.max_cudagraph_capture_size == added[-1]
        assert compiled(tokens, []).cudagraph_capture_sizes == []
        for chosen in ({"cudagraph_capture_sizes": sizes}, {"max_cudagraph_capture_size": 64}):
            assert compiled(tokens, sizes, **chosen).cudagraph_capture_sizes == sizes


def test_what_is_not_covered_is_refused_by_name(toy: Toy) -> None:
    plugin.register()
    arguments, triton = toy["vllm.engine.arg_utils"].EngineArgs, toys.AttentionBackendEnum.TRITON_ATTN
    for given, named in (
        ({"attention_backend": triton}, "--attention-backend TRITON_ATTN"),
        ({"attention_config": SimpleNamespace(backend=triton)}, "--attention-backend TRI"),
        ({"additional_config": object()}, "compile cache can't be keyed"),
    ):
        with pytest.raises(UserError, match=named):
            arguments(**given).create_engine_config()
    for given, named in (
        ({"lora_config": object()}, "LoRA"),
        ({"compilation_config__pass_config": SimpleNamespace(fuse_norm_quant=True)}, "pass_config.fuse_norm_quant"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"parallel_config__worker_cls": "mine.Worker"}, "workers by mine.Worker"),
        ({"cache_config__cache_dtype": "fp8_e4m3"}, "a KV cache of fp8_e4m3"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"parallel_config__ubatch_size": 2}, "two batches at a time"),
        ({"model_config__use_mla": True}, "MLA"),
        ({"model_config__rswa_window": 64}, r"a window that ends at the prompt"),
        ({"model_config__enable_sleep_mode": True}, "sleep mode"),
        ({"kv_transfer_config": object()}, "a transfer of KV caches"),
        ({"model_config__dtype": torch.float32}, "torch.float32 as the model's dtype"),
    ):
        with pytest.raises(UserError, match=f"does not cover {named}"):
            arguments(made=toys.config(**given)).create_engine_config()
    arguments(made=toys.config()).create_engine_config()
    worker = toy["vllm.v1.worker.gpu_worker"].Worker(nn.Module(), toys.config())
    for name in ("reload_weights", "update_weights", "sleep", "add_lora"):
        with pytest.raises(UserError, match=f"{name} is not covered"):
            getattr(worker, name)(1)


def test_what_vllm_would_take_anyway_is_a_warning(toy: Toy) -> None:
    """vLLM's own determinism tests name FlashAttention, in either place, and a kernel for norms: they start."""
    plugin.register()
    flash, norms = toys.AttentionBackendEnum.FLASH_ATTN, SimpleNamespace(rms_norm=["vllm_c"], fused_add_rms_norm=None)
    for given in ({"attention_backend": flash}, {"attention_config": SimpleNamespace(backend=flash)}):
        arguments = toy["vllm.engine.arg_utils"].EngineArgs(**given, ir_op_priority=norms)
        arguments.create_engine_config()
        set_to = [arguments.attention_backend, arguments.attention_config.backend]
        assert sorted(set_to, key=bool) == [None, toys.AttentionBackendEnum.CUSTOM]  # vLLM refuses both
    assert [line.split(" here")[0] for line in toys.LOG[-2:]] == [
        "nondet: warning: --attention-backend FLASH_ATTN computes nothing",
        "nondet: warning: --ir-op-priority rms_norm computes nothing",
    ]


def test_vllms_flags_are_what_the_plugin_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.31 on its own mode gives torch.compile up, unless told not to. Switched off, then or later, it fails."""
    for cuda, own, named in ((False, "", "needs an NVIDIA GPU, vLLM runs on cpu"), (True, "0", "exclude each other")):
        for made in _with(monkeypatch, toys.modules(cuda=cuda)):
            if own:
                monkeypatch.setenv(nondet.vllm.OWN, own)
            with pytest.raises(UserError, match=named):
                plugin.register()
            assert method(made).apply.__module__.startswith("vllm")
            assert not toys.OVERRIDES
    breakable = "VLLM_USE_BREAKABLE_CUDAGRAPH"
    monkeypatch.setenv(breakable, "1")
    for _ in _with(monkeypatch, toys.modules()):
        plugin.register()
        assert os.environ[breakable] == "1"  # as the user has it
    monkeypatch.delenv(breakable, raising=False)
    for made in _with(monkeypatch, toys.modules()):
        toys.OVERRIDES[toys.AttentionBackendEnum.CUSTOM] = "theirs.Backend"
        with pytest.raises(UserError):
            plugin.register()
        assert breakable not in os.environ
        toys.OVERRIDES.clear()
        plugin.register()
        assert os.environ[breakable] == "0"
        for value in ("0", ""):
            monkeypatch.setenv(nondet.vllm.OWN, value)
            with pytest.raises(UserError, match=r"VLLM_BATCH_INVARIANT is (0|not set) since nondet's kernels were"):
                made["vllm.engine.arg_utils"].EngineArgs().create_engine_config()


class Fp8(toys.UnquantizedLinearMethod):
    """A quantized layer's own kernel; from `parts` rows on it adds in the other order; `fault`: what it makes of that.
    `rows`: the numbers of rows that it ran at."""

    def __init__(self, parts: int = 10**9, fault: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> None:
        self.parts, self.fault, self.rows = parts, fault, set[int]()

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        self.rows.add(len(x))
        order = range(x.shape[1]) if len(x) < self.parts else reversed(range(x.shape[1]))
        total = torch.zeros(x.shape[0], layer.weight.shape[0], dtype=x.dtype)
        for i in order:
            total = total + x[:, i, None] * layer.weight[:, i].to(x.dtype)
        return total if self.fault is None else self.fault(layer, total)

    def embedding(self, layer: Any, ids: Any) -> Any:
        return layer.weight[ids]


def odd_first(_: Any, out: torch.Tensor) -> torch.Tensor:
    out[0] *= 1.0625
    return out


class Block(nn.Module):
    """One of each kind that is covered."""

    def __init__(self, method: Any = None) -> None:
        super().__init__()
        self.qkv = toys.QKVParallelLinear(8, 12, method)
        self.norm = toys.RMSNorm(8)
        self.act = toys.SiluAndMul()
        self.attn = toys.Attention(toys.SegmentsImpl())


class OtherNorm(toys.RMSNorm):
    """As another plugin registers it in place of vLLM's."""

    def forward_oot(self, x: torch.Tensor, residual: Any = None) -> Any:
        raise AssertionError


class StaticSinkAttention(toys.Attention):
    """As vLLM's: sinks that no implementation is told of, but by keys of the cache."""


def model(*more: nn.Module, method: Any = None) -> nn.Module:
    return nn.Sequential(Block(method), Block(method), toys.VocabParallelEmbedding(8, 32), *more)


def loaded(toy: Toy, it: nn.Module, **changes: Any) -> Any:
    """A worker that has loaded it, its layers' methods those of the vLLM that was patched."""
    plugin.register()
    for module in it.modules():
        name = type(getattr(module, "quant_method", None)).__name__
        place = "linear" if "Linear" in name else "vocab_parallel_embedding"
        if name in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
            module.quant_method = getattr(toy[f"vllm.model_executor.layers.{place}"], name)()
        if type(module) is toys.RMSNorm:
            module.__class__ = toy["vllm.model_executor.layers.layernorm"].RMSNorm
    worker = toy["vllm.v1.worker.gpu_worker"].Worker(it, toys.config(**changes))
    worker.load_model()
    return worker


RISKY: list[tuple[nn.Module, str]] = [
    (toys.GateLinear(8, 4), "a product by GateLinear's own forward"),
    (toys.Attention(object()), "attention by object"),
    (toys.RMSNorm(8, has_weight=False), "a norm without weight"),
    (toys.RMSNorm(8, variance_size_override=4), "a norm without weight, or of a part"),
    (nn.LayerNorm(8), "a layer that nondet does not know"),
    (OtherNorm(8), "a norm by OtherNorm's own forward"),
    (type("RMSNorm", (toys.RMSNorm,), {})(8), "a norm that was replaced after nondet's"),
    (toys.Mixer(), "attention by Mixer, which is not proven"),
    (StaticSinkAttention(toys.SegmentsImpl()), "attention as a StaticSinkAttention needs it"),
]


OTHER_BITS = "its kernel gives a row different bits at M=1 and M=64"
FAULTY: list[tuple[Fp8, str]] = [
    (Fp8(parts=32), OTHER_BITS),  # on the number of rows, from one of the graphs' sizes on
    (Fp8(fault=odd_first), OTHER_BITS),  # on a row's place among them
    (Fp8(fault=lambda _, out: out.view(5, 8) if len(out) == 4 else out), "its kernel could not be tested: M=4: bell "),
    (Fp8(fault=lambda _, out: out.double()), r".*; not replaced: it gives torch\.float64 for torch\.bfloat16"),
]


def test_at_risk_refuses_to_start(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer, named in RISKY:
        with pytest.raises(UserError, match=f"1 layers are at risk, the first 3 .*{named}"):
            loaded(toy, model(layer))
    for method, named in FAULTY:
        with pytest.raises(UserError, match=rf"2 layers are at risk, the first 0\.qkv \(.*\): {named}"):
            loaded(toy, model(method=method))
    for name, why in (
        ("tensor", "the sum over ranks could not be tested: "),
        ("pipeline", "what ranks exchange was not"),
    ):
        with pytest.raises(UserError, match=f"the first {name} parallelism .*: {why}"):
            loaded(toy, model(), **{f"parallel_config__{name}_parallel_size": 2})
    monkeypatch.setenv(engines.ALLOWED, "1")
    loaded(toy, model(RISKY[0][0]))
    assert any("at risk: 3" in line for line in toys.LOG)


def test_what_did_not_run_at_start_by_ours_is_no_replaced_layer(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where vLLM rewrites the model that it compiled: a norm and the product after it by one kernel of its own."""
    it = model()
    worker = loaded(toy, it)
    assert worker.compile_or_warm_up_model() == 1.5
    assert toys.LOG[-1] == "nondet: 4 of 4 layers that were looked for ran by nondet's operators."
    for fused, named in (([it[0].norm], "1 layers .* the first 0.norm"), ([it[1].qkv, it[0].norm], "2 .* 0.norm")):
        worker = loaded(toy, it)
        worker.fused = fused
        with pytest.raises(UserError, match=f"{named}.*Set NONDET_ALLOW_AT_RISK=1"):
            worker.compile_or_warm_up_model()
    monkeypatch.setenv(engines.ALLOWED, "1")
    worker = loaded(toy, it)
    worker.fused = [it[1].norm]
    assert worker.compile_or_warm_up_model() == 1.5
    assert any("1 layers reported as proven did not run" in line for line in toys.LOG)
    layers.product(torch.ones(1, 8), it[0].qkv.weight)  # after start nothing is kept
    assert layers.not_run({"qkv": it[1].qkv.weight}) == []


def group_of(toy: Toy, summed: Any, ranks: int, rank: int = 0) -> Any:
    state: Any = toy["vllm.distributed.parallel_state"]
    group = state.GroupCoordinator()
    group.summed, group.rank_in_group = summed, rank
    group.all_gather = lambda x, dim: torch.cat((x,) * ranks, dim)
    state.get_tp_group, state.graph_capture = lambda: group, None
    return group


def test_a_sum_over_two_ranks_is_asked_at_start(toy: Toy) -> None:
    """Either rank's view; from 16 rows on a sum that travels in fewer bits, or begins with a zero, is another one."""
    asked: list[int] = []
    faults: dict[str, Any] = {"bits": lambda x: x.to(torch.float8_e5m2).to(x.dtype), "sign": lambda x: x + 0.0}

    def summed(x: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        other = x.roll(-1 if group.rank_in_group else 1, -1)
        other[:, 0] = -0.0  # as the other rank has it
        return x + (faults[faulty](other) if faulty and len(x) >= 16 else other)

    group = group_of(toy, summed, 2)
    for rank, faulty in itertools.product((0, 1), ("", "bits", "sign")):
        group.rank_in_group = rank
        asked.clear()
        if faulty:
            with pytest.raises(UserError, match="the sum over ranks gives a row different bits at M=1 and M=64"):
                loaded(toy, model(), parallel_config__tensor_parallel_size=2)
        else:
            standing = loaded(toy, model(), parallel_config__tensor_parallel_size=2).of_nondet[0]
            assert standing.standing == coverage.CERTIFIED
            assert "the sum over 2 ranks has equal bits at all 7 row counts, the only ones" in standing.why
            assert {*asked} == {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize("order", ["tree", "ring", "ring from 33 rows on"])
def test_a_sum_over_four_ranks_at_proven_row_counts(toy: Toy, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """One order for all numbers stands, a ring's does not; each count above the graphs is filled up to one of a few."""
    asked: set[int] = set()

    def summed(x: torch.Tensor) -> torch.Tensor:
        asked.add(len(x))
        of = [x.roll(rank - 1, -1) for rank in range(4)]  # this is rank 1
        for part in of:
            part[:, 0] = -0.0
        if order == "tree" or (order != "ring" and len(x) < 33):
            return (of[0] + of[1]) + (of[2] + of[3])
        rings = torch.stack([of[i] + of[(i + 1) % 4] + of[(i + 2) % 4] + of[(i + 3) % 4] for i in range(4)]).view(4, -1)
        chunk = torch.arange(x.numel()) * 4 // x.numel()
        return rings.gather(0, chunk[None])[0].view(x.shape)

    group = group_of(toy, summed, 4, rank=1)
    four = {"parallel_config__tensor_parallel_size": 4}
    if order != "tree":
        with pytest.raises(UserError, match="the sum over ranks gives a row different bits at M="):
            loaded(toy, model(), **four)
        return
    monkeypatch.setattr(operators, "PROBED_KINDS", ("bell",))
    found = loaded(
        toy, nn.Sequential(toys.SiluAndMul()), **four, scheduler_config__max_num_batched_tokens=4096
    ).of_nondet
    assert found[0].standing == coverage.CERTIFIED
    assert f"equal bits at all {len(asked)} row counts, the only ones that it runs at" in found[0].why
    assert {1, 8, 64, 128, 4096} <= asked
    assert len(asked) < 60
    x = torch.randn(4096, 8).bfloat16()
    whole, proven = group.all_reduce(x), {*asked}
    for rows in (1, 3, 63, 65, 2100, 3999):
        assert compare.identical(group.all_reduce(x[:rows]), whole[:rows])
    assert asked == proven
    assert group.all_reduce(torch.ones(5, 3, 8).bfloat16()).shape == (5, 3, 8)
    group.unique_name, group.summed = "dp:0", lambda x: x.shape  # another group's ranks may differ in their steps
    assert group.all_reduce(x[:3]) == (3, 8)


@pytest.mark.parametrize("faulty", [False, True])
def test_two_ranks_judge_alike_after_as_many_calls(faulty: bool) -> None:
    meet, given, calls = threading.Barrier(2, timeout=60), [torch.empty(0)] * 2, [0, 0]

    class Rank:
        device = torch.device("cpu")

        def __init__(self, number: int) -> None:
            self.rank_in_group = number

        def both(self, x: torch.Tensor) -> list[torch.Tensor]:
            calls[self.rank_in_group] += 1
            given[self.rank_in_group] = x
            meet.wait()
            found = [*given]
            meet.wait()
            return found

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            mine, other = self.both(x)
            assert not compare.identical(mine, other)
            return mine + (
                other.to(torch.float8_e5m2).to(x.dtype) if faulty and len(x) == self.rank_in_group else other
            )

        def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
            return torch.cat(self.both(x), dim)

    def judged(number: int) -> int | None:
        return operators.first_sum_that_differs(Rank(number), nullcontext, 32, torch.bfloat16, [1, 2, 8], [1, 2])

    with ThreadPoolExecutor(2) as ranks:
        assert [*ranks.map(judged, (0, 1))] == ([1, 1] if faulty else [None, None])
    assert calls[0] == calls[1] > 0


def test_a_sum_that_fails_on_one_rank_ends_it(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is allowed: the other rank waits in a sum, and adds to this one's next sum what is of another."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        if len(x) in lost:
            raise RuntimeError("lost")
        return x + x

    group_of(toy, summed, 1)
    monkeypatch.setenv(engines.ALLOWED, "1")
    for rows, why in ((range(99), "lost"), ((4,), "M=4: bell from row 0: RuntimeError: lost")):
        lost = {*rows}
        with pytest.raises(UserError, match=f"^the sum over ranks could not be tested: {why}"):
            loaded(toy, model(), parallel_config__tensor_parallel_size=2)


def test_a_sound_layer_answers_for_none_of_another_setting_or_shape(toy: Toy) -> None:
    wide = Fp8(fault=lambda layer, out: odd_first(layer, out) if len(layer.weight) == 16 else out)
    for first, second in ((Fp8(), Fp8(parts=32)), (wide, wide)):
        pair = toys.QKVParallelLinear(8, 12, first), toys.QKVParallelLinear(8, 16, second)
        with pytest.raises(UserError, match=r"1 layers are at risk, the first 1 "):
            loaded(toy, nn.Sequential(*pair))


def test_a_kernel_of_its_own_runs_at_the_row_counts_that_are_proven(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "PROBED_KINDS", ("bell",))
    methods = [Fp8(fault=lambda _, out: out * (1.0625 if len(out) == 3 else 1.0)) for _ in range(2)]
    head = toys.VocabParallelEmbedding(8, 12)  # as the product but for its rows: it is asked as well
    head.quant_method = methods[1]
    it = nn.Sequential(toys.QKVParallelLinear(8, 12, methods[0]), head)
    x = torch.randn(9, 8).bfloat16()
    alone = Fp8().apply(it[0], x)
    scheduled = {"max_num_batched_tokens": 16384, "max_num_seqs": 1024}
    worker = loaded(toy, it, **{f"scheduler_config__{name}": value for name, value in scheduled.items()})
    assert {one.standing for one in worker.of_nondet} == {coverage.CERTIFIED}
    assert all(why.endswith("row counts, the only ones that it runs at") for *_, why in worker.of_nondet)
    proven = [{*method.rows} for method in methods]
    assert [max(rows) for rows in proven] == [16384, 1024]
    many = torch.randn(1500, 8).bfloat16()  # logits of prompts: more rows than requests, which are 1,024
    assert compare.identical(head(many)[1400:], head(many[1400:]))
    for layer in it:
        whole = layer(x)
        for rows in (1, 2, 3, 5, 9):
            assert compare.identical(layer(x[:rows]), whole[:rows])
    assert [method.rows for method in methods] == proven
    assert compare.identical(it[0](x), alone)
    assert compare.identical(head.quant_method.embedding(head, 3), head.weight[3])
    assert worker.compile_or_warm_up_model() == 1.5
    assert toys.LOG[-1] == "nondet: 1 of 1 layers that were looked for ran by nondet's operators."
    worker.fused = [it[0]]  # by a kernel at a row count that nothing proved
    layers.watch()
    with pytest.raises(UserError, match="1 layers reported as proven did not run by nondet's operators, the first 0"):
        worker.compile_or_warm_up_model()
    kept = weakref.ref(head)
    del it, head, layer, worker
    gc.collect()
    assert kept() is None  # an engine that ended in this process keeps no memory


def test_a_coverage_file_keeps_what_it_says(toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "coverage.jsonl"
    monkeypatch.setenv(engines.WRITTEN, str(path))
    assert loaded(toy, model()).loaded
    run, before = read_run(path), path.read_bytes()
    assert {(s.kind, s.standing): s.layers for s in run.layer_standings} == {
        ("QKVParallelLinear", "replaced"): 2,
        ("RMSNorm", "replaced"): 2,
        ("SiluAndMul", "elementwise"): 2,
        ("Attention", "replaced"): 2,
        ("VocabParallelEmbedding", "replaced"): 1,
    }
    assert "7 replaced, 0 certified stock, 2 elementwise, 0 at risk." in "\n".join(toys.LOG)
    from nondet.reports.markdown import render

    assert "7 layers replaced, 2 layers elementwise" in render([run])
    loaded(toy, nn.Sequential(Block()))
    assert path.read_bytes() == before
    [beside] = tmp_path.glob("coverage-*.jsonl")
    assert sum(s.layers for s in read_run(beside).layer_standings) == 4
    assert f"nondet: coverage: nondet report {beside}" in toys.LOG
    for name in (str(path / "under" / "a-file.jsonl"), "/", f"{tmp_path}/{'x' * 300}.jsonl"):
        monkeypatch.setenv(engines.WRITTEN, name)
        toys.LOG.clear()
        assert loaded(toy, model()).loaded
        assert any(line.startswith("nondet: no coverage file: ") for line in toys.LOG)


class HeadNorm(toys.RMSNorm):
    """Over [M, heads, 4]: from 20 rows of M times heads on, the mean's order is another."""

    def forward(self, x: torch.Tensor, residual: Any = None) -> Any:
        out = super().forward(x, residual)
        return out * (1.0 if x.numel() // x.shape[-1] < 20 else 1.0625)


class AddingNorm(toys.RMSNorm):
    """Sound, but for what is added before: above 16 rows that is rounded once more."""

    def forward(self, x: torch.Tensor, residual: Any = None) -> Any:
        return super().forward(x, residual if residual is None or len(x) <= 16 else residual * 1.0625)


def looked_at(it: nn.Module, **changes: Any) -> dict[str, tuple[str, str]]:
    """Kind -> standing and why, of `nondet certify --vllm` in vLLM's process."""
    llm = SimpleNamespace(collective_rpc=lambda _: [it], llm_engine=SimpleNamespace(vllm_config=toys.config(**changes)))
    look = plugin.Look()
    with look.attached(llm, []):
        return {one.kind: (one.standing, one.why) for one in look.found}


def test_without_the_plugin_every_layer_s_own_kernel_is_asked() -> None:
    found = looked_at(nn.Sequential(Block(Fp8())))
    assert found["QKVParallelLinear by Fp8"][0] == coverage.CERTIFIED
    assert found["RMSNorm"] == (coverage.CERTIFIED, "its kernel gives equal bits at all 64 row counts")
    assert found["SiluAndMul"][0] == coverage.ELEMENTWISE
    assert found["Attention"] == (coverage.AT_RISK, "attention by SegmentsImpl, which is not proven")
    found = looked_at(nn.Sequential(Block(Fp8(parts=32)), HeadNorm(4), AddingNorm(8)))
    assert found["QKVParallelLinear by Fp8"] == (coverage.AT_RISK, OTHER_BITS)
    assert found["HeadNorm"][0] == found["AddingNorm"][0] == coverage.AT_RISK
    assert "M=1 and M=64" in found["AddingNorm"][1]
    found = looked_at(nn.Sequential(toys.RMSNorm(4)), model_config__get_num_kv_heads=None)
    assert found["RMSNorm"][0] == coverage.AT_RISK
    assert "could not be tested" in found["RMSNorm"][1]


def test_a_refused_model_is_refused_before_anything_is_proven(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    group_of(toy, lambda x: 1 / 0, 2)
    monkeypatch.setattr(layers, "certify_product", None)
    two = {"parallel_config__tensor_parallel_size": 2}
    with pytest.raises(UserError, match=r"1 layers are at risk, the first 3 .*attention by object"):
        loaded(toy, model(toys.Attention(object()), method=Fp8(parts=2)), **two)
    with pytest.raises(UserError, match=r"1 layers are at risk, the first pipeline parallelism"):
        loaded(toy, model(method=Fp8(parts=2)), **two, parallel_config__pipeline_parallel_size=2)


@pytest.mark.slow
@pytest.mark.usefixtures("chained_dot")
def test_experts_go_by_the_token_alone(toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM's own take the order along K by the number of tokens: alone a token has other bits. Ours has the same."""
    torch.manual_seed(3)
    path = tmp_path / "coverage.jsonl"
    monkeypatch.setenv(engines.WRITTEN, str(path))
    it, x = toys.MoERunner(made=toy), torch.randn(12, 16)
    assert not compare.identical(it(x[:3]), it(x)[:3])
    before = it(x)
    loaded(toy, nn.Sequential(it), **FEW)
    assert {s.kind: s.standing for s in read_run(path).layer_standings} == dict.fromkeys(
        ("MoERunner", "ReplicatedLinear", "RoutedExperts"), "replaced"
    )
    whole = it(x)
    assert all(compare.identical(it(x[a:b]), whole[a:b]) for a, b in ((0, 1), (3, 10), (11, 12)))
    order = torch.randperm(12)
    assert compare.identical(it(x[order]), whole[order])
    torch.testing.assert_close(whole, before, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("chained_dot")
def test_experts_have_the_bits_of_their_class(toy: Toy) -> None:
    from nondet.kernels.experts import cuda
    from nondet.kernels.matmul.cuda import matmul

    torch.manual_seed(4)
    layer = toys.RoutedExperts(16, 32, 8, 3)
    x, logits = torch.randn(12, 16), torch.randn(12, 8)
    weights, chosen = cuda.route(logits, 3, renormalize=True)
    out = cuda.weighted_experts(x, layer.w13_weight, layer.w2_weight, weights, chosen)
    for token, (shares, owners) in enumerate(zip(weights, chosen, strict=True)):
        given = []
        for share, owner in zip(shares, owners.tolist(), strict=True):
            w13, w2, row = layer.w13_weight[owner], layer.w2_weight[owner], x[token : token + 1]
            gates, up = matmul(row, w13.mT).chunk(2, 1)
            given.append(matmul(torch.nn.functional.silu(gates) * up, w2.mT) * share)
        assert compare.identical(out[token : token + 1], cuda.sum_middle(torch.stack(given, 1)))
    whole, by_hand = logits.double().softmax(-1).topk(3)
    assert torch.equal(chosen, by_hand)
    torch.testing.assert_close(weights.double(), whole / whole.sum(-1, keepdim=True), rtol=1e-6, atol=1e-7)
    weights, chosen = cuda.route(torch.zeros(5, 8), 3, renormalize=False)  # of equal ones the first
    assert chosen.tolist() == [[0, 1, 2]] * 5
    assert weights.unique().tolist() == [0.125]
    none = cuda.weighted_experts(x[:0], layer.w13_weight, layer.w2_weight, weights[:0], chosen[:0])
    assert none.shape == (0, 16)


def _experts(**changes: Any) -> Callable[[Any], None]:
    return lambda it: [setattr(it.routed_experts, name, value) for name, value in changes.items()] and None


OTHER_EXPERTS: list[tuple[Callable[[Any], None], str]] = [
    (_experts(swiglu_limit=7.0), "experts that are clamped"),
    (_experts(apply_router_weight_on_input=True), "tokens weighted before their experts"),
    (_experts(activation=SimpleNamespace(value="gelu")), "experts with gelu"),
    (_experts(moe_config=SimpleNamespace(has_bias=True)), "experts with a bias"),
    (_experts(quant_method=nn.Identity()), "experts by Identity"),
    (lambda it: setattr(it.router, "scoring_func", "sigmoid"), "scored by another function"),
    (lambda it: setattr(it, "shared_experts", nn.Identity()), "experts that all tokens share"),
    (lambda it: setattr(it.moe_config, "ep_size", 2), "more than one rank"),
    (lambda it: setattr(it, "router", SimpleNamespace(eplb_state=None)), "chosen by SimpleNamespace"),
    (lambda it: setattr(it.routed_experts.quant_method.unquantized_backend, "name", "AITER"), "experts by AITER"),
]


def test_other_experts_keep_vllms_kernels_and_are_at_risk(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    certify, proven = plugin.certify_experts, list[Any]()
    monkeypatch.setattr(plugin, "certify_experts", lambda *given: proven.append(given) or certify(*given))
    for change, named in OTHER_EXPERTS:
        torch.manual_seed(5)
        it = toys.MoERunner(made=toy)
        change(it)
        with pytest.raises(UserError, match=f"1 layers are at risk.*{named}"):
            loaded(toy, nn.Sequential(it), **FEW)
    assert proven == []
    monkeypatch.setenv(engines.ALLOWED, "1")
    for change, _ in (OTHER_EXPERTS[0], OTHER_EXPERTS[5]):  # of the experts, and of their choice alone
        it = toys.MoERunner(made=toy)
        change(it)
        loaded(toy, nn.Sequential(it), **FEW)
    assert len(proven) == 1


def test_experts_that_are_not_proven_keep_vllms_kernels(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    it, x = toys.MoERunner(made=toy), torch.randn(5, 16)
    chosen = it.router._compute_routing(x, it.gate(x), None)
    before = it.routed_experts.quant_method.apply(it.routed_experts, x, *chosen, None, None)
    refused = Mock(side_effect=NotImplementedError("none is proven"))
    monkeypatch.setattr("nondet.kernels.experts.cuda.grouped_matmul", refused)
    with pytest.raises(UserError, match=r"1 layers are at risk.*RoutedExperts.*no product.*none is proven"):
        loaded(toy, nn.Sequential(it), **FEW)
    after = it.routed_experts.quant_method.apply(it.routed_experts, x, *chosen, None, None)
    assert compare.identical(before, after)


SHAPES = {"": ("num_blocks", "2", "block_size", "num_kv_heads", "head_size")}
SHAPES["rows"] = ("num_blocks", "num_kv_heads", "block_size", "2 * head_size")
SHAPES["other"] = ("num_blocks", "block_size", "num_kv_heads", "2 * head_size")


def sources(folder: Path, change: Callable[[str], str] = str, functions: Any = None, shape: str = "") -> str:
    held: dict[str, dict[str, list[str]]] = {}
    for place, takes in functions or plugin.PATCHED.items():
        module, _, path = place.partition(":")
        cls, _, name = path.rpartition(".")
        body = f"return ({', '.join(SHAPES[shape])})" if place == plugin.SHAPE else "..."
        held.setdefault(module, {}).setdefault(cls, []).append(f"def {name}({', '.join(takes.split())}): {body}")
    for module, classes in held.items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(
            "\n".join([f"class {cls}:", *(f"    {one}" for one in functions)] if cls else functions) + "\n"
            for cls, functions in classes.items()
        )
        path.write_text(change(text), encoding="utf-8")
    (folder / "vllm" / "__init__.py").touch()
    return str(folder)


def test_functions_and_a_cache_are_read_from_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters alone do not show a cache's layout: 0.26 changed what the function returns, later it has a name."""
    assert vllm_seams.main([sources(tmp_path / "fits")]) == 0
    assert f"fits: {len(plugin.PATCHED)} of {len(plugin.PATCHED)} functions fit" in capsys.readouterr().out

    def changed(text: str) -> str:
        text = text.replace("(self, level)", "(self, level, tags)").replace("register_backend", "put")
        claims = "    def supports_sink(cls): ...\n    def supports_time_travel(cls): ...\n"
        return text.replace("class FlashAttentionBackend:\n", f"class FlashAttentionBackend:\n{claims}")

    assert vllm_seams.main([sources(tmp_path / "changed", changed)]) == 1
    said = capsys.readouterr().out
    for line in (
        f"changed: {len(plugin.PATCHED) - 2} of {len(plugin.PATCHED)} functions fit",
        "Worker.sleep: takes (self level tags), not (self level)",
        "registry:register_backend: not there",
        "FlashAttentionBackend.supports_time_travel: not reviewed",
    ):
        assert line in said
    assert "supports_sink" not in said
    with pytest.raises(SystemExit, match="holds no sources of vLLM"):
        vllm_seams.main([str(tmp_path)])
    assert vllm_seams.main([sources(tmp_path / "rows", shape="rows")]) == 0
    assert vllm_seams.main([sources(tmp_path / "other", shape="other")]) == 1
    assert "another layout of the KV cache: (num_blocks, block_size, num_kv_heads, 2" in capsys.readouterr().out
    later = [plugin.MOVED.get(path, (path, takes)) for path, takes in plugin.PATCHED.items()]
    for axes, code in (("(0, 1, 3, 2, 4)", 0), ("(0, 1, 2, 3, 4)", 1)):
        folder = Path(sources(tmp_path / axes, functions=later))
        (folder / "vllm/v1/kv_cache_layout.py").write_text(f"class KVCacheLayout:\n    LBNHC = {axes}\n")
        assert vllm_seams.main([str(folder)]) == code


def test_row_counts_reach_every_step() -> None:
    counts = layers.row_counts([1, 2, 4, 8, 512], 8192)
    assert counts[:5] == [1, 2, 4, 8, 512]
    assert counts[-1] == 8192
    assert {576, 2048, 2304} <= set(counts)
    assert 2112 not in counts
    assert layers.row_counts([1, 2, 1024], 100)[-1] == 100
    assert layers.row_counts([], 600)[-1] == 600


def test_a_product_is_padded_and_a_row_minds_no_neighbour(toy: Toy) -> None:
    """Any M, three dimensions, odd strides. At another place NumPy's products, the interpreter's, have other bits."""
    plugin.register()
    layers.use_counts([1, 2, 4, 8, 16])
    x, layer = torch.randn(16, 40), toys.LinearBase(40, 24, bias=True)
    apply = method(toy)().apply
    whole = apply(layer, x, layer.bias)
    assert compare.identical(whole, method(toy)().apply(layer, x, layer.bias))
    for rows in (1, 3, 5, 16):
        assert compare.identical(apply(layer, x[:rows], layer.bias), whole[:rows])
    assert compare.identical(apply(layer, x.view(2, 8, 40), layer.bias), whole.view(2, 8, 24))
    strided = torch.stack([x, x], 2)[:, :, 0]
    assert compare.identical(apply(layer, strided, layer.bias), whole)
    torch.testing.assert_close(whole, toys.UnquantizedLinearMethod().apply(layer, x, layer.bias), rtol=1e-4, atol=1e-4)
    layer.weight.copy_(torch.randn(24, 40))  # in place, as reinforcement learning loads them: nothing of one is kept
    after = apply(layer, x, layer.bias)
    torch.testing.assert_close(after, toys.UnquantizedLinearMethod().apply(layer, x, layer.bias), rtol=1e-4, atol=1e-4)
    assert compare.identical(after[7:8], apply(layer, x[7:8], layer.bias))


def test_silu_and_mul_and_norms_are_ours(toy: Toy) -> None:
    layer, x = toy["vllm.model_executor.layers.activation"].SiluAndMul(), torch.randn(9, 64, dtype=torch.float16)
    before = layer.forward_cuda(x)
    plugin.register()
    after = layer.forward_cuda(x)
    assert compare.identical(after, operators.silu_mul(x))
    torch.testing.assert_close(after, before)
    wide = x.float()  # of which there is no kernel: as torch does it
    assert compare.identical(layer.forward_cuda(wide), torch.nn.functional.silu(wide[:, :32]) * wide[:, 32:])
    norms = toy["vllm.model_executor.layers.layernorm"]
    x, residual = torch.randn(9, 64), torch.randn(9, 64)
    norm, gemma = norms.RMSNorm(64), norms.GemmaRMSNorm(64)
    norm.weight.copy_(torch.randn(64))
    gemma.weight.copy_(norm.weight - 1.0)
    whole = norm.forward_cuda(x)
    torch.testing.assert_close(whole, toys.RMSNorm.forward_native(norm, x))
    assert compare.identical(norm.forward_native(x[4:5]), whole[4:5])
    out, added = norm.forward_cuda(x, residual)
    assert compare.identical(added, x + residual)
    assert compare.identical(out, norm.forward_native(x + residual))
    torch.testing.assert_close(gemma.forward_cuda(x), whole)
    for odd in (norms.RMSNorm(64, has_weight=False), norms.RMSNorm(64, variance_size_override=8)):
        assert compare.identical(odd.forward_cuda(x), toys.RMSNorm.forward_native(odd, x))


@pytest.mark.slow
def test_a_compiler_keeps_every_operator_whole(toy: Toy) -> None:
    it = nn.Sequential(*(toys.QKVParallelLinear(8, 8, method) for method in (None, Fp8(), Fp8())), toys.RMSNorm(8))
    product, first, second, norm = loaded(toy, it).model
    silu = toy["vllm.model_executor.layers.activation"].SiluAndMul()
    graphs: list[torch.fx.GraphModule] = []

    def layers(x: torch.Tensor) -> torch.Tensor:
        out, added = norm(norm(product(x)), x)
        return silu.forward_cuda(second(first(out)) + added)

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layers, backend=keep, fullgraph=True, dynamic=True)
    for rows in (9, 5):
        x = torch.randn(rows, 8)
        assert compare.identical(compiled(x), layers(x))
    [graph] = graphs
    calls = [node for node in graph.graph.nodes if str(node.target).startswith("vllm.")]
    kinds = [str(node.target).removeprefix("vllm.nondet_") for node in calls]
    assert kinds == ["product", "rms_norm", "add_rms_norm", "own_product", "own_product", "silu_mul"]
    constants = [[arg for arg in node.args if not isinstance(arg, torch.fx.Node)] for node in calls[3:5]]
    assert constants == [[8, None], [8, None]]
    torch._dynamo.reset()
