"""The plugin's contract with SGLang, against toys of its functions: all of it or nothing, and refusals by name."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nondet import engines
from nondet.core import compare
from nondet.core.runfile import read_run
from nondet.engines import layers
from nondet.errors import UserError
from nondet.sglang import plugin
from tests.sglang import toys

Toy = dict[str, ModuleType]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    yield from _with(monkeypatch, toys.modules())


def _with(monkeypatch: pytest.MonkeyPatch, made: Toy) -> Iterator[Toy]:
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(engines.ENABLED, "1")
    monkeypatch.setattr(plugin, "REGISTERED", [])
    monkeypatch.setattr(plugin, "INSTALLED", {})
    sys.modules.pop("nondet.sglang.attention", None)
    yield made
    sys.modules.pop("nondet.sglang.attention", None)
    layers.use_counts([])


@pytest.fixture
def log() -> Iterator[list[str]]:
    handler, logger = toys.Log(), logging.getLogger("sglang.nondet")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)


def at(toy: Toy, path: str) -> Any:
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), toy[f"sglang.srt.{module}"])


LINEAR, NORM = "layers.quantization.unquant:UnquantizedLinearMethod", "layers.layernorm:RMSNorm"


def untouched(toy: Toy) -> bool:
    hooked = at(toy, f"{LINEAR}.apply"), at(toy, f"{NORM}.forward_cuda"), at(toy, "models.utils:apply_qk_norm")
    return not toys.BACKENDS and not toys.CHOICES and not any(hasattr(one, "__wrapped__") for one in hooked)


def test_it_installs_every_hook_once_and_only_where_it_is_asked(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0"):
        monkeypatch.setenv(engines.ENABLED, value)
        plugin.register()
        assert untouched(toy)
    monkeypatch.setenv(engines.ENABLED, "1")
    plugin.register()
    assert {path for path in plugin.PATCHED if hasattr(plugin.object_at(path), "__wrapped__")} == {*plugin.HOOKS}
    assert [*toys.BACKENDS] == ["nondet"]
    assert toys.CHOICES == [["nondet"]] * 3
    apply = at(toy, f"{LINEAR}.apply")
    plugin.register()  # a process may call it twice
    assert at(toy, f"{LINEAR}.apply") is apply


def other_parameters(toy: Toy) -> None:
    at(toy, LINEAR).apply = lambda self, layer, x, bias, scale: None


def another_plugin(toy: Toy) -> None:
    theirs = at(toy, f"{NORM}.forward_cuda")
    at(toy, NORM).forward_cuda = functools.wraps(theirs)(lambda *args: theirs(*args))


def lost_hook(toy: Toy) -> None:
    at(toy, "plugins.hook_registry:HookRegistry").lost = "RMSNorm"


def gone(toy: Toy) -> None:
    del vars(toy["sglang.srt.models.utils"])["apply_qk_norm"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            other_parameters,
            r"UnquantizedLinearMethod\.apply takes \(self layer x bias scale\), not .*Use SGLang 0\.5\.17",
        ),
        (another_plugin, r"RMSNorm\.forward_cuda was replaced by .*test_plugin"),
        (lost_hook, r"SGLang did not apply the hook of .*RMSNorm\.forward_cuda"),
        (gone, r"SGLang 0\.5\.17 does not fit .*apply_qk_norm is not there"),
    ],
)
def test_a_refusal_ends_the_process(toy: Toy, change: Callable[[Toy], None], named: str) -> None:
    """SGLang logs a plugin's `Exception`, and would serve without it."""
    change(toy)
    with pytest.raises(SystemExit, match=f"^nondet: .*{named}"):
        plugin.register()
    assert not toys.BACKENDS
    assert not plugin.REGISTERED


def test_another_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in _with(monkeypatch, toys.modules(cuda=False)):
        with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
            plugin.register()
        assert untouched(made)
        monkeypatch.setenv(engines.ENABLED, "yes")
        with pytest.raises(SystemExit, match="=yes makes no sense"):
            plugin.register()


def test_a_version_that_was_not_run_is_said(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    for version, lines in (("0.5.17", 0), ("0.5.23", 1)):
        for made in _with(monkeypatch, toys.modules(version=version)):
            log.clear()
            plugin.register()
            at(made, "server_args:ServerArgs")()
            assert sum("was never run under nondet: 0.5.17 was" in line for line in log) == lines


def test_the_arguments_say_what_the_plugin_needs(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    arguments = at(toy, "server_args:ServerArgs")
    for given in ({}, {"attention_backend": "nondet"}, {"page_size": 1}):
        made = arguments(**given)
        assert made.get_attention_backends() == ("nondet", "nondet")
        assert made.resolved  # before SGLang derives anything from it
    graphs = toys.arguments_of()["cuda_graph_config"]
    for given, named in (
        ({"attention_backend": "fa3"}, "--attention-backend fa3 and"),
        ({"decode_attention_backend": "triton"}, "--decode-attention-backend triton and"),
        ({"tp_size": 2}, "tensor parallelism"),
        ({"dp_size": 2, "ep_size": 2}, "data parallelism, expert parallelism"),
        ({"enable_lora": True}, "LoRA adapters"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"quantization": "fp8"}, "quantization"),
        ({"page_size": 64}, r"pages of 64 tokens \(--page-size\)"),
        ({"page_size": 16}, "pages of 16 tokens"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "a KV cache of fp8_e4m3"),
        ({"enable_torch_compile": True}, "torch.compile"),
        ({"enable_two_batch_overlap": True}, "two batches at a time"),
        ({"disaggregation_mode": "prefill"}, r"disaggregation \(prefill\)"),
        ({"offload_group_size": 4}, "offloaded layers"),
        ({"cuda_graph_config": SimpleNamespace(decode=graphs.decode, prefill=graphs.decode)}, "prefill as one"),
        ({"cuda_graph_config": SimpleNamespace(decode=graphs.prefill, prefill=graphs.prefill)}, "decode in parts"),
    ):
        with pytest.raises(UserError, match=named):
            arguments(**given)
    monkeypatch.setattr(toys.ServerArgs, "get_attention_backends", lambda _: ("fa3", "nondet"))
    with pytest.raises(UserError, match="does not cover attention by fa3 and nondet"):  # SGLang chose for the model
        plugin.refuse(toys.ServerArgs())


def test_every_setting_that_is_refused_exists(toy: Toy) -> None:
    """A name that SGLang has no more would refuse nothing."""
    asked = {*plugin._NOT_COVERED.values(), *(f"{name}_size" for name in plugin._PARALLEL.values())}
    assert asked <= {*toys.arguments_of()}


def method(toy: Toy, name: str = "UnquantizedLinearMethod") -> Any:
    return at(toy, f"layers.quantization.unquant:{name}")()


def test_products_and_logits_are_padded_and_a_row_minds_no_neighbour(toy: Toy) -> None:
    plugin.register()
    layers.use_counts([1, 2, 4, 8, 16])
    x, layer = torch.randn(16, 40), toys.RowParallelLinear(40, 24, method(toy), bias=True)
    whole = layer(x)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-4)
    for rows in (1, 3, 5, 16):
        assert compare.identical(layer(x[:rows]), whole[:rows])
        out = torch.empty(rows, 24)
        assert layer.quant_method.apply_into(layer, x[:rows], out, bias=layer.bias) is out
        assert compare.identical(out, whole[:rows])
    head = toys.ParallelLMHead(40, 24, method(toy, "UnquantizedEmbeddingMethod"))
    processor = at(toy, "layers.logits_processor:LogitsProcessor")()
    logits = processor._compute_lm_head(x, head)
    assert compare.identical(processor._compute_lm_head(x[5:6], head, None), logits[5:6])
    torch.testing.assert_close(logits, x @ head.weight.T, rtol=1e-4, atol=1e-4)
    head.set_lora = None
    assert processor._compute_lm_head(x, head) == "SGLang's own"
    del head.set_lora
    processor.use_fp32_lm_head = True
    assert processor._compute_lm_head(x, head) == "SGLang's own"
    assert plugin.unfit_head(processor, head) == "logits in float32"


def test_norms_are_ours(toy: Toy) -> None:
    plugin.register()
    norms, x, residual = at(toy, NORM), torch.randn(9, 64), torch.randn(9, 64)
    norm = norms(64)
    norm.weight.copy_(torch.randn(64))
    whole = norm(x)
    torch.testing.assert_close(whole, torch.nn.functional.rms_norm(x, (64,), norm.weight, 1e-6))
    assert compare.identical(norm(x[4:5]), whole[4:5])
    out, added = norm(x, residual)
    assert compare.identical(added, x + residual)
    assert compare.identical(out, norm(added))
    more = torch.randn(9, 64)
    assert compare.identical(norm(x, residual, more)[1], x + (residual + more))
    for changed in (
        {"has_weight": False}, {"variance_size_override": 8}, {"cast_x_before_out_mul": True}, {"fp32_residual": True},
        {"override_orig_dtype": torch.float32},
    ):  # fmt: skip
        odd = norms(64, **changed)
        assert odd(x) == "SGLang's own"
        assert plugin.unfit_norm(odd)


def test_norms_of_heads_take_slices_as_they_are(toy: Toy) -> None:
    plugin.register()
    apply, norms = at(toy, "models.utils:apply_qk_norm"), at(toy, NORM)
    of_q, of_k = norms(16), norms(16)
    of_q.weight.copy_(torch.randn(16))
    qkv = torch.randn(7, 4 * 16 + 2 * 16 + 2 * 16)
    q, k, _ = qkv.split([64, 32, 32], -1)
    before = qkv.clone()
    made = apply(q=q, k=k, q_norm=of_q, k_norm=of_k, head_dim=16, alt_stream=None)
    for one, norm, given in zip(made, (of_q, of_k), (q, k), strict=True):
        assert one.shape == given.shape
        assert compare.identical(one, norm(given.reshape(-1, 16)).view(given.shape))
    assert compare.identical(qkv, before)
    assert compare.identical(apply(q[3:4], k[3:4], of_q, of_k, 16)[0], made[0][3:4])
    assert apply(q, k, of_q, norms(16, has_weight=False), 16) == "SGLang's own"


class Block(nn.Module):
    """One of each kind that is covered."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.qkv = toys.RowParallelLinear(8, 12, method(toy))
        self.norm = at(toy, NORM)(8)
        self.act = toys.SiluAndMul()
        self.attn = at(toy, "layers.radix_attention:RadixAttention")(4, 32, 2)


def model(toy: Toy, *more: nn.Module) -> nn.Module:
    head = toys.ParallelLMHead(8, 32, method(toy, "UnquantizedEmbeddingMethod"))
    return nn.Sequential(Block(toy), Block(toy), head, *more)


def loaded(toy: Toy, it: nn.Module, ran: Callable[[], object] = list, **changes: Any) -> Any:
    """A runner that has loaded it."""
    arguments = at(toy, "server_args:ServerArgs")(**changes)
    runner = at(toy, "model_executor.model_runner:ModelRunner")(it, arguments, ran)
    runner.load_model()
    return runner


def test_a_coverage_file_says_what_computes_each_layer(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: list[str]
) -> None:
    plugin.register()
    path = tmp_path / "coverage.jsonl"
    monkeypatch.setenv(engines.WRITTEN, str(path))
    assert loaded(toy, model(toy)).loaded
    run = read_run(path)
    assert {(s.kind, s.standing): s.layers for s in run.layer_standings} == {
        ("RowParallelLinear", "replaced"): 2,
        ("RMSNorm", "replaced"): 2,
        ("SiluAndMul", "elementwise"): 2,
        ("RadixAttention", "replaced"): 2,
        ("ParallelLMHead", "replaced"): 1,
    }
    assert run.header.plan["sglang"] == toys.VERSION
    assert "nondet: 7 replaced, 0 certified stock, 2 elementwise, 0 at risk." in log
    assert f"nondet: coverage: nondet report {path}" in log
    from nondet.reports.markdown import render

    page = render([run])
    assert "7 layers replaced, 2 layers elementwise" in page
    assert "Layers under SGLang" in page
    assert "vLLM" not in page


class FusedMoE(nn.Module):
    """Of a name that nondet looks for, with a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Identity()


class OtherAttention(toys.RadixAttention):
    """Whatever it adds."""


RISKY: list[tuple[Callable[[Toy], nn.Module], str]] = [
    (lambda toy: toys.GateLinear(8, 4, method(toy)), "a product by GateLinear's own forward"),
    (lambda _: toys.RowParallelLinear(8, 4, SimpleNamespace(apply=None)), "a product by SimpleNamespace, which is not"),
    (lambda toy: at(toy, NORM)(8, has_weight=False), "a norm without weight"),
    (lambda _: nn.LayerNorm(8), "a layer that nondet does not know"),
    (lambda _: FusedMoE(), "a layer that nondet does not know"),
    (lambda _: toys.RadixAttention(4, 32, 2, sliding_window_size=64), "attention with a window"),
    (lambda _: toys.RadixAttention(4, 32, 2, v_head_dim=16), "attention with heads of 32 and 16"),
    (lambda _: toys.RadixAttention(4, 32, 2, attn_type=toys.AttentionType.ENCODER_ONLY), "encoder_only queries"),
    (lambda _: OtherAttention(4, 32, 2), "what a OtherAttention adds"),
]


def test_at_risk_refuses_to_start(toy: Toy, monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    plugin.register()
    for make, named in RISKY:
        with pytest.raises(UserError, match=f"1 layers are at risk, the first 3 .*{named}"):
            loaded(toy, model(toy, make(toy)))
    at(toy, NORM).forward_cuda = lambda *_: None
    with pytest.raises(UserError, match=r"2 layers are at risk.*a norm that was replaced after nondet's"):
        loaded(toy, model(toy))
    monkeypatch.setenv(engines.ALLOWED, "1")
    loaded(toy, model(toy))
    assert any("at risk: 0.norm" in line for line in log)


def test_a_worker_checks_arguments_that_no_plugin_saw(toy: Toy) -> None:
    arguments = SimpleNamespace(**toys.arguments_of(attention_backend="fa3"))
    arguments.get_attention_backends = lambda: ("fa3", "fa3")
    plugin.register()
    runner = at(toy, "model_executor.model_runner:ModelRunner")(model(toy), arguments)
    with pytest.raises(UserError, match="attention by fa3, sampling and operators outside of SGLang's determin"):
        runner.load_model()
    runner = at(toy, "model_executor.model_runner:ModelRunner")(model(toy), at(toy, "server_args:ServerArgs")())
    runner.dtype = torch.float32
    with pytest.raises(UserError, match=r"torch\.float32 as the model's dtype"):
        runner.load_model()


def test_what_was_not_captured_by_ours_is_no_replaced_layer(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    plugin.register()
    it: Any = model(toy)
    x = torch.randn(3, 8)
    parts: list[Callable[[torch.Tensor], object]] = [it[0].qkv, it[1].qkv, it[0].norm, it[1].norm]
    loaded(toy, it, lambda: [part(x) for part in parts]).init_cuda_graphs()
    assert log[-1] == "nondet: 4 of 4 layers that were looked for ran by nondet's operators."
    runner = loaded(toy, it, lambda: [part(x) for part in parts[:3]])
    with pytest.raises(UserError, match=r"1 layers .* did not run by nondet's operators, the first 1\.norm"):
        runner.init_cuda_graphs(capture_decode_cuda_graph=True)
    graphs = toys.arguments_of()["cuda_graph_config"]
    graphs.decode.backend = graphs.prefill.backend = "disabled"
    loaded(toy, it, cuda_graph_config=graphs).init_cuda_graphs()
    assert log[-1].startswith("nondet: without CUDA graphs nothing runs at start")


def test_row_counts_are_those_of_graphs_and_of_chunks(toy: Toy) -> None:
    plugin.register()
    arguments = at(toy, "server_args:ServerArgs")
    assert plugin.limits_of(arguments()) == ([1, 2, 4, 8, 16, 32, 64], 64, 8)
    assert plugin.limits_of(arguments(chunked_prefill_size=-1, max_running_requests=100))[1:] == (16384, 100)


def test_an_unproven_product_is_at_risk(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    weight = SimpleNamespace(is_cuda=True, shape=(4, 8), stride=lambda: (8, 1), dtype=torch.bfloat16)
    standing = plugin.Standing("0", "RowParallelLinear", plugin.REPLACED, plugin.PRODUCTS)
    layer = SimpleNamespace(weight=weight)

    def refused(*_: Any) -> None:
        raise NotImplementedError("none is proven")

    monkeypatch.setattr(layers, "certify_product", refused)
    [found] = plugin._proven([(standing, layer)], [1], 1, {}, refused=False)
    assert found.standing == plugin.AT_RISK
    assert found.why == "no member is proven for this product: none is proven"
    [found] = plugin._proven([(standing, layer)], [1], 1, {}, refused=True)  # then nothing is proven
    assert found.why == "not proven, because the start is refused"
