"""A small `sglang` whose functions have the signatures of SGLang 0.5.17, for contract tests without it.

Nothing here computes what SGLang computes but the toys' own products and norms, and the writing of a cache.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.build import with_packages

VERSION = "0.5.17"


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, layer.weight, bias)

    def apply_into(self, layer: Any, x: Any, output: Any, bias: Any = None) -> Any:
        return output.copy_(torch.nn.functional.linear(x, layer.weight, bias))


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    pass


class LinearBase(nn.Module):
    def __init__(self, width: int, out: int, method: Any, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(out), requires_grad=False) if bias else None
        self.skip_bias_add, self.quant_method = False, method

    def forward(self, x: torch.Tensor) -> Any:
        return self.quant_method.apply(self, x, bias=self.bias)


class RowParallelLinear(LinearBase):
    pass


class GateLinear(LinearBase):
    def forward(self, x: torch.Tensor) -> Any:
        return x[:, :1] * self.weight[:, 0]  # by a kernel of its own


class VocabParallelEmbedding(nn.Module):
    def __init__(self, width: int, out: int, method: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width), requires_grad=False)
        self.quant_method = method

    def forward(self, ids: Any) -> Any:
        raise RuntimeError("LMHead's weights should be used in the sampler.")


class ParallelLMHead(VocabParallelEmbedding):
    pass


class RMSNorm(nn.Module):
    def __init__(self, width: int, **changed: Any) -> None:
        super().__init__()
        self.weight, self.has_weight = nn.Parameter(torch.ones(width), requires_grad=False), True
        self.variance_size_override, self.variance_epsilon = None, 1e-6
        self.cast_x_before_out_mul = self.fp32_residual = False
        self.override_orig_dtype = None
        vars(self).update(changed)
        self._forward_method = self.forward_cuda  # bound when it is made, as SGLang's

    def forward(self, *args: Any, **named: Any) -> Any:
        return self._forward_method(*args, **named)

    def forward_cuda(self, x: Any, residual: Any = None, post_residual_addition: Any = None) -> Any:
        return "SGLang's own"


class SiluAndMul(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


class LogitsProcessor(nn.Module):
    use_fp32_lm_head, rl_on_policy_target = False, None

    def _compute_lm_head(self, hidden_states: Any, lm_head: Any, embedding_bias: Any = None) -> Any:
        return "SGLang's own"


def apply_qk_norm(
    q: Any, k: Any, q_norm: Any, k_norm: Any, head_dim: int, alt_stream: Any = None, allow_inplace: bool = True
) -> Any:
    return "SGLang's own"


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(nn.Module):
    def __init__(self, heads: int, dim: int, kv_heads: int, layer_id: int = 0, **changed: Any) -> None:
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.head_dim, self.v_head_dim = heads, kv_heads, dim, dim
        self.scaling, self.layer_id, self.logit_cap, self.sliding_window_size = dim**-0.5, layer_id, 0.0, -1
        self.is_cross_attention = self.use_irope = False
        self.attn_type, self.k_scale, self.v_scale = AttentionType.DECODER, None, None
        vars(self).update(changed)

    def forward(
        self, q: Any, k: Any, v: Any, forward_batch: Any, save_kv_cache: bool = True, key_value_num_tokens: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        raise AssertionError("the tests call a backend")


class AttentionBackend:
    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        raise AssertionError("a backend's own")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        pass

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise NotImplementedError

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        raise NotImplementedError

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        raise NotImplementedError


class MHATokenToKVPool:
    def __init__(self, layers: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.k = [torch.full((tokens, heads, dim), 7.0, dtype=dtype) for _ in range(layers)]
        self.v = [torch.full((tokens, heads, dim), 7.0, dtype=dtype) for _ in range(layers)]

    def get_kv_buffer(self, layer_id: int) -> Any:
        return self.k[layer_id], self.v[layer_id]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any, k_scale: Any = None, v_scale: Any = None,
        layer_id_override: Any = None, dcp_kv_mask: Any = None,
    ) -> None:  # fmt: skip
        self.k[layer.layer_id][loc_info], self.v[layer.layer_id][loc_info] = cache_k, cache_v


class ServerArgs:
    def __init__(self, **given: Any) -> None:
        vars(self).update(arguments_of(**given))
        self.__post_init__()

    def __post_init__(self) -> None:
        self.resolved = self.enable_deterministic_inference  # type: ignore[has-type] # set by the line above

    def get_attention_backends(self) -> tuple[Any, Any]:
        given: Any = vars(self)
        return tuple(
            given[f"{phase}_attention_backend"] or given["attention_backend"] for phase in ("prefill", "decode")
        )  # type: ignore[return-value] # two of them


def arguments_of(**changes: Any) -> dict[str, Any]:
    """A server's arguments, as SGLang has them by default; changes by name."""
    none = (
        "attention_backend", "prefill_attention_backend", "decode_attention_backend", "lora_paths", "enable_lora",
        "speculative_algorithm", "quantization", "rl_on_policy_target", "dllm_algorithm", "max_running_requests",
    )  # fmt: skip
    no = (
        "enable_deterministic_inference", "enable_torch_compile", "enable_two_batch_overlap", "enable_pdmux",
        "enable_single_batch_overlap", "enable_hierarchical_cache", "enable_lmcache", "enable_unified_memory",
        "enable_hisparse", "enable_fp32_lm_head", "is_embedding", "encoder_only", "prefill_only_disable_kv_cache",
        "debug_cuda_graph", "enable_symm_mem", "enable_mis", "enable_fused_qk_norm_rope",
    )  # fmt: skip
    graphs = SimpleNamespace(
        decode=SimpleNamespace(backend="full", bs=[1, 2, 4, 8]),
        prefill=SimpleNamespace(backend="breakable", bs=[16, 32, 64]),
    )
    made: dict[str, Any] = {
        **dict.fromkeys(none), **dict.fromkeys(no, False), "kv_cache_dtype": "auto", "disaggregation_mode": "null",
        "torchao_config": "", "cpu_offload_gb": 0, "offload_group_size": -1, "chunked_prefill_size": 64,
        "max_prefill_tokens": 16384, "page_size": 1, "model_path": "toy", "cuda_graph_config": graphs,
        **dict.fromkeys(("tp_size", "pp_size", "dp_size", "ep_size", "attn_cp_size", "dcp_size"), 1),
    }  # fmt: skip
    return made | changes


class ModelRunner:
    """`ran`: what SGLang's captured model runs."""

    def __init__(self, model: nn.Module, server_args: Any, ran: Callable[[], object] = list) -> None:
        self.model, self.server_args, self.dtype, self.ran = model, server_args, torch.bfloat16, ran
        self.loaded = False

    def load_model(self) -> None:
        self.loaded = True

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        self.ran()


class HookType(Enum):
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    """As SGLang's: what can't be applied is logged, no more."""

    hooks: dict[str, list[tuple[HookType, Any]]] = {}  # noqa: RUF012 - each toy's own, see `modules`
    made: dict[str, ModuleType] = {}  # noqa: RUF012 - the same
    lost: str = ""  # a hook that it can't apply

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AROUND, *, source: Any = None) -> None:
        cls.hooks.setdefault(target, []).append((hook_type, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls.hooks.items():
            module = next(name for name in sorted(cls.made, key=len, reverse=True) if target.startswith(f"{name}."))
            *path, last = target.removeprefix(f"{module}.").split(".")
            owner = functools.reduce(getattr, path, cls.made[module])
            for kind, hook in hooks:
                if cls.lost and cls.lost in target:
                    continue
                original = getattr(owner, last)
                called = hook if kind is HookType.REPLACE else functools.partial(hook, original)
                setattr(owner, last, _wrapped(original, called))


def _wrapped(original: Any, called: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **named: Any) -> Any:
        return called(*args, **named)

    return wrapper


BACKENDS: dict[str, Any] = {}
CHOICES: list[list[str]] = []


def register_attention_backend(name: str) -> Any:
    return functools.partial(BACKENDS.__setitem__, name)


def add_attention_backend_choices(choices: Any) -> None:
    CHOICES.append(choices)


def add_deterministic_attention_backend_choices(choices: Any) -> None:
    CHOICES.append(choices)


def add_radix_supported_deterministic_attention_backend_choices(choices: Any) -> None:
    CHOICES.append(choices)


PLACES: dict[str, tuple[Any, ...]] = {
    "layers.quantization.unquant": (UnquantizedLinearMethod, UnquantizedEmbeddingMethod),
    "layers.layernorm": (RMSNorm,),
    "layers.logits_processor": (LogitsProcessor,),
    "models.utils": (apply_qk_norm,),
    "server_args": (
        ServerArgs,
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    ),
    "model_executor.model_runner": (ModelRunner,),
    "plugins.hook_registry": (HookRegistry, HookType),
    "layers.attention.attention_registry": (register_attention_backend,),
    "layers.attention.base_attn_backend": (AttentionBackend,),
    "layers.radix_attention": (RadixAttention,),
    "mem_cache.memory_pool": (MHATokenToKVPool,),
}


def modules(cuda: bool = True, version: str = VERSION) -> dict[str, ModuleType]:
    """A fresh toy, for sys.modules: its classes are made anew each time, because hooks change them."""
    made: dict[str, ModuleType] = {"sglang": ModuleType("sglang"), "sglang.srt.utils": ModuleType("sglang.srt.utils")}
    vars(made["sglang"])["__version__"] = version
    vars(made["sglang.srt.utils"])["is_cuda"] = lambda: cuda
    BACKENDS.clear()
    CHOICES.clear()
    for place, members in PLACES.items():
        name = f"sglang.srt.{place}"
        made[name] = ModuleType(name)
        for member in members:
            if isinstance(member, type) and not issubclass(member, Enum):
                member = type(member.__name__, (member,), dict(member.__dict__))
                for function in vars(member).values():
                    function = getattr(function, "__func__", function)
                    if inspect.isfunction(function):
                        function.__module__ = name
            elif inspect.isfunction(member):
                member.__module__ = name
            setattr(made[name], member.__name__, member)
    registry: Any = made["sglang.srt.plugins.hook_registry"]
    registry.HookRegistry.hooks, registry.HookRegistry.made = {}, made
    return with_packages(made)


class Log(logging.Handler):
    """SGLang's log, as lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
