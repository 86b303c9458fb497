"""The SGLang plugin: SGLang calls it at start in each of its processes; by default it does nothing.

`register` is the entry point. With NONDET_BATCH_INVARIANT=1 it first checks the signature of every function of SGLang
that it hooks, so SGLang is never half-patched. Then it registers its hooks and its attention backend with SGLang: the
server's arguments get what it needs (SGLang's own deterministic mode, which fixes sampling and all other operators),
or are refused by name; products, norms and logits are nondet's; and when weights are loaded, members are proven for
them, every layer is checked, and one at risk refuses the start. You get invariance, or an error that names the
obstacle.

SGLang logs every exception of a plugin, and goes on without it. So a refusal is a `SystemExit`, which is none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nondet.engines import ALLOWED, ENABLED, Engine
from nondet.engines.coverage import (
    AT_RISK,
    ELEMENTWISE,
    REPLACED,
    Standing,
    ancestors,
    refuse_missed,
    report,
    rows_of,
)
from nondet.engines.hooks import checked, enabled, object_at
from nondet.errors import UserError, one_line
from nondet.sglang import BACKEND, log
from nondet.version import VERSION

if TYPE_CHECKING:
    from nondet.engines import layers

TRIED = ("0.5.17",)  # versions of SGLang whose signatures fit, and that were run

_LAYERS = "sglang.srt.layers"
_LINEAR = f"{_LAYERS}.quantization.unquant:UnquantizedLinearMethod"
_NORM = f"{_LAYERS}.layernorm:RMSNorm.forward_cuda"
_QK_NORM = "sglang.srt.models.utils:apply_qk_norm"
_HEAD = f"{_LAYERS}.logits_processor:LogitsProcessor._compute_lm_head"
_ARGUMENTS = "sglang.srt.server_args:ServerArgs.__post_init__"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_HOOKS = "sglang.srt.plugins.hook_registry:HookRegistry"
_BACKENDS = f"{_LAYERS}.attention.attention_registry"
_BASE = f"{_LAYERS}.attention.base_attn_backend:AttentionBackend"
_POOL = "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool"
_CHOICES = ("attention_backend", "deterministic_attention_backend", "radix_supported_deterministic_attention_backend")
# functions of SGLang that the plugin hooks or relies on, "module:attribute", and their parameters' names
PATCHED = {
    f"{_LINEAR}.apply": "self layer x bias",
    f"{_LINEAR}.apply_into": "self layer x output bias",
    _NORM: "self x residual post_residual_addition",
    _QK_NORM: "q k q_norm k_norm head_dim alt_stream allow_inplace",
    _HEAD: "self hidden_states lm_head embedding_bias",
    _ARGUMENTS: "self",
    f"{_RUNNER}.load_model": "self",
    f"{_RUNNER}.init_cuda_graphs": "self capture_decode_cuda_graph",
    f"{_HOOKS}.register": "cls target hook hook_type source",
    f"{_HOOKS}.apply_hooks": "cls",
    f"{_BACKENDS}:register_attention_backend": "name",
    **{f"sglang.srt.server_args:add_{name}_choices": "choices" for name in _CHOICES},
    f"{_BASE}.init_forward_metadata": "self forward_batch",
    f"{_BASE}.init_forward_metadata_out_graph": "self forward_batch in_capture",
    f"{_BASE}.init_cuda_graph_state": "self max_bs max_num_tokens",
    **{f"{_BASE}.forward_{how}": "self q k v layer forward_batch save_kv_cache kwargs" for how in ("decode", "extend")},
    f"{_POOL}.get_kv_buffer": "self layer_id",
    f"{_POOL}.set_kv_buffer": "self layer loc_info cache_k cache_v k_scale v_scale layer_id_override dcp_kv_mask",
    f"{_LAYERS}.radix_attention:RadixAttention.forward": "self q k v forward_batch save_kv_cache key_value_num_tokens "
    "kwargs",
}
REGISTERED: list[int] = []  # the process that has registered: a fork inherits the hooks
INSTALLED: dict[str, Any] = {}  # path of a hook -> what SGLang calls there


def engine() -> Engine:
    """SGLang in this process."""
    import sglang

    return Engine("SGLang", "sglang", str(sglang.__version__), TRIED, log)


def register() -> None:
    """SGLang's entry point: does nothing unless NONDET_BATCH_INVARIANT=1. Raises SystemExit: no Linux, no NVIDIA GPU, a
    SGLang whose signatures do not fit, or another plugin in the way."""
    try:
        if enabled() and not REGISTERED:
            _register()
    except UserError as error:
        raise SystemExit(f"nondet: {error}") from error
    except Exception as error:
        raise SystemExit(f"nondet: {type(error).__name__}: {one_line(str(error), 400)}") from error


def _register() -> None:
    if sys.platform != "linux":
        raise UserError(f"{ENABLED}=1 needs Linux and an NVIDIA GPU, this is {sys.platform}", f"Unset {ENABLED}.")
    if not object_at("sglang.srt.utils:is_cuda")():
        raise UserError(f"{ENABLED}=1 needs an NVIDIA GPU, and SGLang finds none", engine().stock)
    found = checked(engine(), PATCHED)
    kinds = object_at("sglang.srt.plugins.hook_registry:HookType")
    for path, hook in HOOKS.items():
        kind = kinds.REPLACE if hook in (apply, apply_into) else kinds.AROUND
        found[f"{_HOOKS}.register"](path.replace(":", "."), hook, kind)
    found[f"{_HOOKS}.apply_hooks"]()  # at once, because SGLang only logs a hook that it could not apply
    for path in HOOKS:
        INSTALLED[path] = object_at(path)
        if INSTALLED[path] is found[path]:
            raise UserError(f"SGLang did not apply the hook of {path}", engine().stock)
    for name in _CHOICES:
        found[f"sglang.srt.server_args:add_{name}_choices"]([BACKEND])

    @found[f"{_BACKENDS}:register_attention_backend"](BACKEND)
    def created(runner: Any) -> Any:
        from nondet.sglang.attention import SegmentsBackend

        return SegmentsBackend(runner)

    REGISTERED.append(os.getpid())


# Hooks.


def apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    """Of a linear layer: in class chain."""
    from nondet.engines.layers import product

    return product(x, layer.weight, bias)


def apply_into(self: Any, layer: Any, x: Any, output: Any, bias: Any = None) -> Any:
    """The same, into the caller's tensor."""
    return output.copy_(apply(self, layer, x, bias))


def compute_lm_head(
    original: Callable[..., Any], self: Any, hidden_states: Any, lm_head: Any, embedding_bias: Any = None
) -> Any:
    """Logits: in class chain where `unfit_head` has no fault."""
    if unfit_head(self, lm_head):
        return original(self, hidden_states, lm_head, embedding_bias)
    return apply(None, lm_head, hidden_states.to(lm_head.weight.dtype))


def unfit_head(processor: Any, lm_head: Any) -> str:
    """Why SGLang computes its logits by something else than one product of the weight; "" where it does not."""
    method = type(getattr(lm_head, "quant_method", None)).__name__
    faults = {
        "logits of adapters": hasattr(lm_head, "set_lora"),
        f"logits by {method}": method not in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"),
        "logits in float32": bool(getattr(processor, "use_fp32_lm_head", False)),
        "logits as a trainer computes them": getattr(processor, "rl_on_policy_target", None) is not None,
    }
    return ", ".join(what for what, applies in faults.items() if applies)


def forward_norm(
    original: Callable[..., Any], self: Any, x: Any, residual: Any = None, post_residual_addition: Any = None
) -> Any:
    """RMSNorm in class lanes where `unfit_norm` has no fault."""
    from nondet.engines.layers import add_rms_norm, rms_norm

    if unfit_norm(self):
        return original(self, x, residual, post_residual_addition)
    if residual is None:
        return rms_norm(x, self.weight.data, self.variance_epsilon)
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)


def unfit_norm(norm: Any) -> str:
    """Why `forward_norm` can't compute SGLang's RMSNorm; "" where it can."""
    faults = {
        "a norm without weight": not norm.has_weight,
        "a norm of a part": norm.variance_size_override is not None,
        "a norm that is rounded twice": norm.cast_x_before_out_mul,
        "a norm with a residual in float32": norm.fp32_residual,
        "a norm into another dtype": norm.override_orig_dtype is not None,
    }
    return ", ".join(what for what, applies in faults.items() if applies)


def apply_qk_norm(
    original: Callable[..., Any], q: Any, k: Any, q_norm: Any, k_norm: Any, *rest: Any, **more: Any
) -> Any:
    """The norms of all heads of q [T, Hq D] and k [T, Hkv D], which may be slices of one tensor: without a copy."""
    from nondet.engines.layers import rms_norm

    if q.ndim != 2 or any(type(norm).__name__ != "RMSNorm" or unfit_norm(norm) for norm in (q_norm, k_norm)):
        return original(q, k, q_norm, k_norm, *rest, **more)
    width = q_norm.weight.shape[0]
    return tuple(
        rms_norm(x.view(len(x), -1, width), norm.weight.data, norm.variance_epsilon).view(x.shape)
        for x, norm in ((q, q_norm), (k, k_norm))
    )


def post_init(original: Callable[..., Any], self: Any) -> None:
    """The server's arguments, once they are given."""
    prepare(self)
    original(self)
    refuse(self)


def load_model(original: Callable[..., Any], self: Any) -> None:
    """A worker's model, and its proofs, before memory is measured. The arguments are checked here too: they may come
    from a process that loaded no plugin."""
    refuse(self.server_args)
    original(self)
    self.of_nondet = start(self)


def init_cuda_graphs(original: Callable[..., Any], self: Any, *given: Any, **named: Any) -> None:
    """A worker's graphs, and whether they have nondet's operators in them."""
    original(self, *given, **named)
    check_all_ran(self)


HOOKS: dict[str, Callable[..., Any]] = {
    f"{_LINEAR}.apply": apply,
    f"{_LINEAR}.apply_into": apply_into,
    _NORM: forward_norm,
    _QK_NORM: apply_qk_norm,
    _HEAD: compute_lm_head,
    _ARGUMENTS: post_init,
    f"{_RUNNER}.load_model": load_model,
    f"{_RUNNER}.init_cuda_graphs": init_cuda_graphs,
}


# The configuration.


def prepare(arguments: Any) -> None:
    """Set what the plugin needs in the server's arguments. Raises UserError: one requests something else."""
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        wanted = getattr(arguments, name)
        if wanted not in (None, BACKEND):
            option = f"--{name.replace('_', '-')} {wanted}"
            raise UserError(f"{option} and {ENABLED}=1 exclude each other", "Leave the option out.")
    arguments.attention_backend = BACKEND
    arguments.enable_deterministic_inference = True


def refuse(arguments: Any) -> None:
    """Refuse, as a `UserError`, each unsupported setting of resolved arguments, by its name."""
    graphs = arguments.cuda_graph_config
    cache, mode = arguments.kv_cache_dtype, arguments.disaggregation_mode
    backends = {*arguments.get_attention_backends()}
    faults = {
        f"attention by {' and '.join(sorted(map(str, backends)))}": backends != {BACKEND},
        "sampling and operators outside of SGLang's deterministic mode": not arguments.enable_deterministic_inference,
        **{f"{what} parallelism": getattr(arguments, f"{name}_size") > 1 for what, name in _PARALLEL.items()},
        # with pages of 64, answers with a cached prefix had other bits on an H200, and why is not known
        f"pages of {arguments.page_size} tokens (--page-size)": arguments.page_size != 1,
        f"a KV cache of {cache}": cache not in ("auto", "bf16", "bfloat16", "fp16", "float16"),
        f"disaggregation ({mode})": mode not in (None, "null"),
        "offloaded layers": arguments.cpu_offload_gb > 0 or arguments.offload_group_size > 0,
        "CUDA graphs of prefill as one (full)": graphs.prefill.backend == "full",
        "CUDA graphs by torch.compile": "tc_piecewise" in (graphs.prefill.backend, graphs.decode.backend),
        "CUDA graphs of decode in parts (breakable)": graphs.decode.backend == "breakable",
        **{what: bool(getattr(arguments, name, None)) for what, name in _NOT_COVERED.items()},
    }
    given = [name for name, is_given in faults.items() if is_given]
    if given:
        raise UserError(f"nondet's batch invariance under SGLang does not cover {', '.join(given)}", engine().stock)
    log(f"batch invariance by nondet {VERSION}: products, attention and norms, in SGLang's deterministic mode.")
    engine().never_run()


_PARALLEL = {
    "tensor": "tp",
    "pipeline": "pp",
    "data": "dp",
    "expert": "ep",
    "context": "attn_cp",
    "decode context": "dcp",
}
_NOT_COVERED = {
    "LoRA adapters": "enable_lora",
    "adapters": "lora_paths",
    "speculative decoding": "speculative_algorithm",
    "quantization": "quantization",
    "torchao": "torchao_config",
    "torch.compile": "enable_torch_compile",
    "two batches at a time (TBO)": "enable_two_batch_overlap",
    "one batch in two parts (SBO)": "enable_single_batch_overlap",
    "prefill beside decode (PD multiplexing)": "enable_pdmux",
    "a hierarchical cache": "enable_hierarchical_cache",
    "LMCache": "enable_lmcache",
    "one memory pool for all (unified memory)": "enable_unified_memory",
    "sparse KV caches": "enable_hisparse",
    "a trainer's numerics (--rl-on-policy-target)": "rl_on_policy_target",
    "logits in float32": "enable_fp32_lm_head",
    "diffusion models": "dllm_algorithm",
    "embeddings": "is_embedding",
    "encoders": "encoder_only",
    "prefill without a KV cache": "prefill_only_disable_kv_cache",
    "CUDA graphs that run eagerly (debug)": "debug_cuda_graph",
    "symmetric memory": "enable_symm_mem",
    "several items in one prompt (multi-item scoring)": "enable_mis",
    "norms of q and k with their rotation (fused)": "enable_fused_qk_norm_rope",
}


# Coverage: which kernels compute each layer of a loaded model.

# Layers without a sum of their own: SGLang's, by the name of a class that they are or descend from, and torch's. The
# pooler runs only for embeddings, which are refused.
_ACTIVATIONS = {"SiluAndMul", "GeluAndMul", "NewGELU", "ReLU2", "QuickGELU"}
_ROTATIONS = {"RotaryEmbedding", "Phi3LongRoPEScaledRotaryEmbedding"}
_TORCHS = {"Identity", "Dropout", "SiLU", "GELU", "ReLU", "Sigmoid", "Tanh"}
_ELEMENTWISE = {*_ACTIVATIONS, *_ROTATIONS, *_TORCHS, "LogitsProcessor", "PPMissingLayer", "Pooler"}
# Their forward calls the layer's method for the product, and nothing else.
_LINEARS = {"LinearBase", "ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear"}
_BY_METHOD = {*_LINEARS, "VocabParallelEmbedding", "ParallelLMHead"}
PRODUCTS = "products in class chain, certified at start"


def standing_of(name: str, module: Any) -> Standing | None:
    """The standing of a module; None if it only holds others."""
    above, kind = ancestors(module), type(module).__name__
    if {"LinearBase", "VocabParallelEmbedding"} & above:
        return Standing(name, kind, *_of_product(module))
    if "RadixAttention" in above:
        from nondet.sglang.attention import unfit

        fault = unfit(module) if kind == "RadixAttention" else f"what a {kind} adds"
        risk = (AT_RISK, f"attention with {fault}, which nondet does not compute under SGLang")
        return Standing(name, kind, *(risk if fault else (REPLACED, "attention in class segments")))
    if kind == "RMSNorm":
        fault = unfit_norm(module) if _is_hooked(_NORM) else "a norm that was replaced after nondet's"
        return Standing(name, kind, *((AT_RISK, fault) if fault else (REPLACED, "norm in class lanes")))
    if _ELEMENTWISE & above:
        return Standing(name, kind, ELEMENTWISE, "nothing is added up")
    if next(module.children(), None) is not None and not {"FusedMoE", "TopK"} & above:
        return None
    return Standing(name, kind, AT_RISK, "a layer that nondet does not know")


def _of_product(module: Any) -> tuple[str, str]:
    around = next(cls.__name__ for cls in type(module).__mro__ if "forward" in vars(cls))
    method = type(getattr(module, "quant_method", None)).__name__
    if around not in _BY_METHOD:
        return AT_RISK, f"a product by {around}'s own forward, which nondet does not know"
    if "VocabParallelEmbedding" in ancestors(module):
        ours = method == "UnquantizedEmbeddingMethod" and _is_hooked(_HEAD)
    else:
        ours = method == "UnquantizedLinearMethod" and _is_hooked(f"{_LINEAR}.apply")
    return (REPLACED, PRODUCTS) if ours else (AT_RISK, f"a product by {method}, which is not proven")


def _is_hooked(path: str) -> bool:
    """Whether SGLang still calls there what `register` put there."""
    return path in INSTALLED and INSTALLED[path] is object_at(path)


def limits_of(arguments: Any) -> tuple[list[int], int, int]:
    """(sizes of CUDA graphs, most tokens of a step, most rows of logits in a graph)."""
    graphs = arguments.cuda_graph_config
    decode, prefill = (
        [] if phase.backend == "disabled" else list(phase.bs or ()) for phase in (graphs.decode, graphs.prefill)
    )
    requests = max(*decode, arguments.max_running_requests or 1, 1)
    chunk = arguments.chunked_prefill_size or -1
    tokens = max(chunk if chunk > 0 else arguments.max_prefill_tokens, requests, *prefill)
    return sorted({*decode, *prefill}), int(tokens), int(requests)


def start(runner: Any) -> list[Standing]:
    """Prove members for a loaded model's products, check every layer, record its standing. Raises UserError: a layer at
    risk, and NONDET_ALLOW_AT_RISK is not 1; or a model of another dtype."""
    import torch

    from nondet.engines import layers

    if runner.dtype not in (torch.bfloat16, torch.float16):
        what = f"nondet's batch invariance under SGLang does not cover {runner.dtype} as the model's dtype"
        raise UserError(what, engine().stock)
    graphs, tokens, requests = limits_of(runner.server_args)
    counts = layers.row_counts(graphs, tokens)
    layers.use_counts(counts)
    seen: dict[Any, layers.Certified] = {}
    looked = [(s, m) for name, m in runner.model.named_modules() if (s := standing_of(name, m)) is not None]
    refused = os.environ.get(ALLOWED) != "1" and any(s.standing == AT_RISK for s, _ in looked)
    found = list(_proven(looked, counts, requests, {} if refused else seen, refused=refused))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    log(layers.summary(seen, counts))
    model = {"model": str(runner.server_args.model_path), "sglang": engine().version}
    dtype = {"dtype": str(runner.dtype).removeprefix("torch.")}
    report(found, engine(), model | dtype | layers.plan_of(seen, len(graphs), tokens, requests))
    layers.watch()
    return found


def _proven(
    looked: list[tuple[Standing, Any]],
    counts: list[int],
    requests: int,
    seen: dict[Any, layers.Certified],
    *,
    refused: bool,
) -> Iterator[Standing]:
    """The standings, after a product's members are certified, once for equal layers; where that fails it is at risk.
    Of a model that is `refused` nothing is, because nothing will run."""
    from nondet.engines import layers

    for standing, module in looked:
        weight = getattr(module, "weight", None)
        if standing.why != PRODUCTS or weight is None:
            yield standing
            continue
        if refused:
            yield standing._replace(why="not proven, because the start is refused")
            continue
        bias = layers.bias_of(module)
        key = (weight.shape, weight.stride(), weight.dtype, bias is None)
        try:
            if key not in seen and weight.is_cuda:
                seen[key] = layers.certify_product(weight, bias, rows_of(module, counts, requests))
            yield standing
        except Exception as error:  # noqa: BLE001 - whatever the error, it is not proven
            why = one_line(str(error), 120) or type(error).__name__
            yield standing._replace(standing=AT_RISK, why=f"no member is proven for this product: {why}")


def check_all_ran(runner: Any) -> None:
    """Check that what SGLang captured called our operators; attention, tables of embeddings and heads are not looked
    for. Raises UserError: a layer that no operator ran with, and NONDET_ALLOW_AT_RISK is not 1."""
    from nondet.engines import layers

    modules = dict(runner.model.named_modules())
    weights = {
        one.layer: modules[one.layer].weight.data
        for one in getattr(runner, "of_nondet", ())
        if one.standing == REPLACED and {"LinearBase", "RMSNorm"} & ancestors(modules[one.layer])
    }
    missed = layers.not_run(weights)
    if not limits_of(runner.server_args)[0]:
        log("without CUDA graphs nothing runs at start: no layer was looked for.")
        return
    refuse_missed(missed, len(weights), engine())
