"""A small `vllm` whose functions have the signatures of vLLM 0.25.1, for contract tests without it.

Nothing here computes what vLLM computes but the toys' own products and the writing of a cache, which tests look at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.build import with_packages

VERSION = "0.25.1"


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, layer.weight, bias)


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    apply = UnquantizedLinearMethod.apply


class LinearBase(nn.Module):
    def __init__(self, width: int, out: int, method: Any = None, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(out), requires_grad=False) if bias else None
        self.input_size_per_partition, self.skip_bias_add = width, False
        self.quant_method = method or UnquantizedLinearMethod()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, self.bias)


class QKVParallelLinear(LinearBase):
    pass


class ReplicatedLinear(LinearBase):
    pass


class GateLinear(ReplicatedLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * self.weight[:, 0]  # by a kernel of its own


class VocabParallelEmbedding(LinearBase):
    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, UnquantizedEmbeddingMethod())


class RMSNorm(nn.Module):
    def __init__(self, width: int, has_weight: bool = True, variance_size_override: Any = None) -> None:
        super().__init__()
        self.weight, self.has_weight = nn.Parameter(torch.ones(width), requires_grad=False), has_weight
        self.variance_size_override, self.variance_epsilon = variance_size_override, 1e-6

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return self.forward_native(x, residual)

    def forward_cuda(self, x: Any, residual: Any = None) -> Any:
        raise AssertionError("vLLM's own kernel")

    def forward_native(self, x: Any, residual: Any = None) -> Any:
        whole = x if residual is None else x + residual
        wide = whole.double()  # exact enough that no order of the mean shows
        out = (wide * (wide * wide).mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype) * self.weight.to(x.dtype)
        return out if residual is None else (out, whole)


class GemmaRMSNorm(RMSNorm):
    """Times 1 + weight."""

    def forward_native(self, x: Any, residual: Any = None) -> Any:
        raise AssertionError("vLLM's own")

    forward_cuda = forward_native


class GroupCoordinator:
    """Ranks, this one among them; `summed` is their sum."""

    unique_name, device, rank_in_group, summed = "tp:0", torch.device("cpu"), 0, None

    def all_reduce(self, input_: Any) -> Any:
        return self._all_reduce_out_place(input_)

    def _all_reduce_out_place(self, input_: Any) -> Any:
        return self.summed(input_)


class SiluAndMul(nn.Module):
    def forward_cuda(self, x: Any) -> Any:
        return torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


class FusedMoEMethodBase:
    pass


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, nn.Module):
    """In float64, but for the order along K: in blocks of so many as vLLM's default configuration takes for M tokens.
    Up to E of them it is one (block_size_k 64 in vLLM), above another (32); here rounded after each block."""

    def __init__(self) -> None:
        super().__init__()
        self.unquantized_backend = SimpleNamespace(name="TRITON")

    def apply(
        self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any, shared_experts_input: Any
    ) -> Any:
        block = 8 if x.shape[0] <= layer.global_num_experts else 4

        def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            total = rows.new_zeros(len(rows), len(weight))
            for a, b in zip(rows.split(block, 1), weight.split(block, 1), strict=True):
                total = (total.double() + (a[:, None].double() * b[None].double()).sum(-1)).to(rows.dtype)
            return total

        out = torch.zeros_like(x)
        for rank in range(topk_ids.shape[1]):
            for expert in range(len(layer.w13_weight)):
                at = topk_ids[:, rank] == expert
                gates, up = product(x[at], layer.w13_weight[expert]).chunk(2, 1)
                given = product(torch.nn.functional.silu(gates) * up, layer.w2_weight[expert])
                out[at] += given * topk_weights[at, rank, None].to(x.dtype)
        return out


class RoutedExperts(nn.Module):
    quant_method: Any

    def __init__(self, width: int, inner: int, count: int, top: int) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.randn(count, 2 * inner, width), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.randn(count, width, inner), requires_grad=False)
        self.global_num_experts, self.top_k, self.renormalize = count, top, True
        self.activation, self.moe_config = SimpleNamespace(value="silu"), SimpleNamespace(has_bias=False)
        self.apply_router_weight_on_input, self.expert_map, self.swiglu_limit = False, None, None


class FusedTopKRouter:
    eplb_state, scoring_func = None, "softmax"

    def __init__(self, top_k: int, renormalize: bool = True) -> None:
        self.top_k, self.renormalize = top_k, renormalize

    def _compute_routing(
        self, hidden_states: Any, router_logits: Any, indices_type: Any, *, input_ids: Any = None
    ) -> Any:
        weights, chosen = router_logits.float().softmax(-1).topk(self.top_k)
        return weights / weights.sum(-1, keepdim=True) if self.renormalize else weights, chosen.to(torch.int32)


class MoERunner(nn.Module):
    def __init__(self, width: int = 16, inner: int = 32, count: int = 8, top: int = 3, made: Any = None) -> None:
        super().__init__()
        linear = made["vllm.model_executor.layers.linear"].UnquantizedLinearMethod() if made else None
        self.gate = ReplicatedLinear(width, count, linear)
        self.routed_experts = RoutedExperts(width, inner, count, top)
        place = "vllm.model_executor.layers.fused_moe."
        method = made[f"{place}unquantized_fused_moe_method"] if made else None
        self.routed_experts.quant_method = method.UnquantizedFusedMoEMethod() if method else UnquantizedFusedMoEMethod()
        router = made[f"{place}router.fused_topk_router"].FusedTopKRouter if made else FusedTopKRouter
        self.router: Any = router(top)
        self.shared_experts = self.shared_expert_gate = None
        self.routed_input_transform = self.routed_output_transform = None
        self.moe_config = SimpleNamespace(is_sequence_parallel=False, tp_size=1, dp_size=1, ep_size=1, pcp_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router._compute_routing(x, self.gate(x), None)
        layer = self.routed_experts
        return layer.quant_method.apply(layer, x, weights, chosen, None, None)


class AttentionLayerBase:
    """Of all that has a cache."""


class Mixer(nn.Module, AttentionLayerBase):
    """As vLLM's state spaces: products as its parts, a scan of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = QKVParallelLinear(8, 8)


class Attention(nn.Module, AttentionLayerBase):
    def __init__(self, impl: Any) -> None:
        super().__init__()
        self.impl = impl


class SegmentsImpl:
    """Of the name that coverage looks for."""


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "flash"
    TRITON_ATTN = "triton"
    CUSTOM = "custom"

    def get_path(self) -> str:
        if self not in OVERRIDES:
            raise ValueError("not registered")
        return OVERRIDES[self]


OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: Any, class_path: Any = None, is_mamba: bool = False) -> Any:
    OVERRIDES[backend] = class_path


class AttentionType:
    DECODER = "decoder"
    ENCODER = "encoder"


class AttentionCGSupport(Enum):
    UNIFORM_SINGLE_TOKEN_DECODE = 1


@dataclass
class FlashAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class FlashAttentionMetadataBuilder:
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.block_size, self.num_heads_q = kv_cache_spec.block_size, vllm_config.model_config.heads

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        c = common_attn_metadata
        lengths = c.query_start_loc, c.max_seq_len, c.seq_lens
        return FlashAttentionMetadata(c.num_actual_tokens, c.max_query_len, *lengths, c.block_table_tensor, None)  # type: ignore[arg-type] # the toy writes the cache itself


class FlashAttentionImpl:
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any, sliding_window: Any,
        kv_cache_dtype: str, logits_soft_cap: Any = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: Any = None, sinks: Any = None,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.logits_soft_cap = logits_soft_cap or 0

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        raise AssertionError("FlashAttention's own")

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        in_rows = kv_cache.ndim == 4  # as from vLLM 0.26 on
        k, v = kv_cache.transpose(1, 2).chunk(2, -1) if in_rows else kv_cache.unbind(1)
        page = k.shape[1]
        for i, slot in enumerate(slot_mapping.tolist()):
            k[slot // page, slot % page], v[slot // page, slot % page] = key[i], value[i]


class KVCacheLayout(Enum):
    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)


class AttentionBackend:
    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        return None


def backend_of(shape: Callable[[int, int, int, int], tuple[int, ...]]) -> Any:
    """FlashAttention's backend, its cache of that shape."""

    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return shape(num_blocks, block_size, num_kv_heads, head_size)

    get_kv_cache_shape.__module__ = "vllm.toys"
    return type("FlashAttentionBackend", (), {"get_kv_cache_shape": staticmethod(get_kv_cache_shape)})


FlashAttentionBackend = backend_of(lambda blocks, page, heads, dim: (blocks, 2, page, heads, dim))
RowsBackend = backend_of(lambda blocks, page, heads, dim: (blocks, heads, page, 2 * dim))  # as from vLLM 0.26 on
OtherLayout = backend_of(lambda blocks, page, heads, dim: (blocks, page, heads, 2 * dim))


def direct_register_custom_op(
    op_name: str, op_func: Any, mutates_args: Any = None, fake_impl: Any = None, target_lib: Any = None,
    dispatch_key: Any = None, tags: Any = (),
) -> None:  # fmt: skip
    library = torch.library.Library("vllm", "FRAGMENT")
    LIBRARIES.append(library)
    library.define(op_name + torch.library.infer_schema(op_func, mutates_args=[]))
    library.impl(op_name, op_func, "CPU")
    library._register_fake(op_name, fake_impl)


LIBRARIES: list[Any] = []  # a library that is collected takes its operators along


class EngineArgs:
    def __init__(self, made: Any = None, **given: Any) -> None:
        priorities: dict[str, Any] = {"rms_norm": None, "fused_add_rms_norm": None}
        self.made, self.attention_backend, self.attention_config = made, None, SimpleNamespace(backend=None)
        self.ir_op_priority = SimpleNamespace(**priorities)
        self.kernel_config = SimpleNamespace(ir_op_priority=SimpleNamespace(**priorities))
        passes = SimpleNamespace(enable_qk_norm_rope_fusion=None, fuse_norm_quant=None, eliminate_noops=True)
        self.compilation_config = SimpleNamespace(custom_ops=[], pass_config=passes)
        self.additional_config: Any = {}
        vars(self).update(given)

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> Any:
        return self.made or config()


class Worker:
    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self.model, self.vllm_config, self.rank = model, vllm_config, 0
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.loaded, self.fused = False, list[Any]()  # layers that vLLM computes by something else

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.loaded = True

    def compile_or_warm_up_model(self) -> float:
        for layer in self.model.modules():
            if layer in self.fused:
                continue
            if isinstance(layer, LinearBase):
                layer.quant_method.apply(layer, layer.weight.new_ones(2, layer.input_size_per_partition))
            elif isinstance(layer, RMSNorm):
                layer.forward_cuda(layer.weight.new_ones(2, layer.weight.shape[0]))
        return 1.5

    def reload_weights(self, *args: Any, **kwargs: Any) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def sleep(self, level: int = 1) -> None: ...

    def add_lora(self, lora_request: Any) -> bool:
        return True


def config(**changes: Any) -> Any:
    """A configuration as the plugin reads one; changes: dotted names with two underscores."""
    made = SimpleNamespace(
        additional_config={}, lora_config=None, speculative_config=None, kv_transfer_config=None,
        weight_transfer_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, enable_dbo=False,
            tensor_parallel_size=1, pipeline_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            use_mla=False, enable_sleep_mode=False, dtype=torch.bfloat16, model="toy", max_model_len=512, heads=4,
            get_hidden_size=lambda: 8, get_num_attention_heads=lambda _: 4, get_num_kv_heads=lambda _: 2,
        ),
        offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64],
            static_forward_context={},
            pass_config=SimpleNamespace(fuse_norm_quant=False),
        ),
    )  # fmt: skip
    for path, value in changes.items():
        *above, name = path.split("__")
        at = made
        for part in above:
            at = getattr(at, part)
        setattr(at, name, value)
    return made


LAYERS, FUSED = "model_executor.layers", "model_executor.layers.fused_moe"
PLACES: dict[str, tuple[Any, ...]] = {
    f"{LAYERS}.linear": (UnquantizedLinearMethod,),
    f"{LAYERS}.vocab_parallel_embedding": (UnquantizedEmbeddingMethod,),
    f"{LAYERS}.activation": (SiluAndMul,),
    f"{FUSED}.unquantized_fused_moe_method": (UnquantizedFusedMoEMethod,),
    f"{FUSED}.router.fused_topk_router": (FusedTopKRouter,),
    "utils.torch_utils": (direct_register_custom_op,),
    f"{LAYERS}.layernorm": (RMSNorm, GemmaRMSNorm),
    "distributed.parallel_state": (GroupCoordinator,),
    "v1.attention.backends.registry": (register_backend, AttentionBackendEnum),
    "v1.attention.backend": (AttentionCGSupport, AttentionType),
    "v1.attention.backends.flash_attn": (FlashAttentionImpl, FlashAttentionMetadata, FlashAttentionMetadataBuilder),
    "engine.arg_utils": (EngineArgs,),
    "v1.worker.gpu_worker": (Worker,),
}


def modules(cuda: bool = True, version: str = VERSION) -> dict[str, ModuleType]:
    """A fresh toy, for sys.modules: its classes are made anew each time, because the plugin patches them."""
    since = tuple(map(int, version.split(".")))
    made: dict[str, ModuleType] = {}

    def module(name: str, **members: Any) -> None:
        made[name] = ModuleType(name)
        for key, value in members.items():
            if isinstance(value, type) and not issubclass(value, Enum):
                value = type(key, (value,), dict(value.__dict__))
                for function in filter(inspect.isfunction, vars(value).values()):
                    function.__module__ = name
            elif inspect.isfunction(value):
                value.__module__ = name
            setattr(made[name], key, value)

    AttentionBackend.supported_kv_cache_layouts.__func__.__module__ = "vllm.toys"  # type: ignore[attr-defined] # a method
    OVERRIDES.clear()
    logger = SimpleNamespace(info=lambda text, *values: LOG.append(text % values))
    module("vllm", __version__=version)
    module("vllm.logger", init_logger=lambda name: logger)
    platform = SimpleNamespace(is_cuda=lambda: cuda, device_type="cuda" if cuda else "cpu")
    module("vllm.platforms", current_platform=platform)
    module("vllm.plugins", plugins_loaded=True)  # as vLLM sets it before it calls any
    for place, members in PLACES.items():
        module(f"vllm.{place}", **{member.__name__: member for member in members})
    backend: Any = RowsBackend if since >= (0, 26) else FlashAttentionBackend
    if since >= (0, 29):
        backend = type("FlashAttentionBackend", (AttentionBackend,), {})
        vars(made["vllm.v1.attention.backend"])["AttentionBackend"] = AttentionBackend
        module("vllm.v1.kv_cache_layout", KVCacheLayout=KVCacheLayout)
    vars(made["vllm.v1.attention.backends.flash_attn"])["FlashAttentionBackend"] = backend
    return with_packages(made)


LOG: list[str] = []
