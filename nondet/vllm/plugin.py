"""The vLLM plugin: vLLM calls it at start in each of its processes; by default it does nothing.

`register` is the entry point. With NONDET_BATCH_INVARIANT=1 it first checks the signature of every function of vLLM
that it replaces, so vLLM is never half-patched. Then it sets vLLM's own flag (which keeps cascade attention, fused sums
over ranks and split products off), registers the operators, and wraps two calls: the engine's configuration, to set
what it needs and to refuse what it does not support; and the loading of weights in a worker, to prove members for them,
check every layer, and refuse to start with one at risk. You get invariance, or an error that names the obstacle.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nondet.engines import ALLOWED, ENABLED, Engine
from nondet.engines.coverage import (
    AT_RISK,
    CERTIFIED,
    ELEMENTWISE,
    REPLACED,
    Standing,
    ancestors,
    get,
    grouped,
    refuse_missed,
    report,
    rows_of,
)
from nondet.engines.hooks import checked, enabled, misfit, object_at
from nondet.errors import UserError, one_line
from nondet.version import VERSION
from nondet.vllm import OWN, log

if TYPE_CHECKING:
    from nondet.core.records import LayerStanding
    from nondet.engines import layers

TRIED = ("0.25.1", "0.26.0")  # versions of vLLM whose signatures fit, and that were run
_BACKEND = "nondet.vllm.attention.SegmentsBackend"
_BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"  # 1: no torch.compile. From 0.31 on vLLM's own mode sets it for many shapes
_LAYERS = "vllm.model_executor.layers"
_NORMS = ("RMSNorm", "GemmaRMSNorm")
_APPLY = f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply"
_ROUTING = f"{_LAYERS}.fused_moe.router.fused_topk_router:FusedTopKRouter._compute_routing"
_REGISTER = "vllm.utils.torch_utils:direct_register_custom_op"
_SUM = "vllm.distributed.parallel_state:GroupCoordinator._all_reduce_out_place"
_OURS = "_nondet_proven"  # set on a router and on a layer of experts that nondet's kernels compute
_FLASH = "vllm.v1.attention.backends.flash_attn"
SHAPE = f"{_FLASH}:FlashAttentionBackend.get_kv_cache_shape"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
# functions of vLLM that the plugin replaces or relies on, "module:attribute", and their parameters' names
PATCHED = {
    f"{_LAYERS}.linear:UnquantizedLinearMethod.apply": "self layer x bias",
    f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply": "self layer x bias",
    _APPLY: "self layer x topk_weights topk_ids shared_experts shared_experts_input",
    _ROUTING: "self hidden_states router_logits indices_type input_ids",
    _REGISTER: "op_name op_func mutates_args fake_impl target_lib dispatch_key tags",
    **{f"{_LAYERS}.layernorm:{n}.forward_{by}": "self x residual" for n in _NORMS for by in ("native", "cuda")},
    f"{_LAYERS}.activation:SiluAndMul.forward_cuda": "self x",
    "vllm.v1.attention.backends.registry:register_backend": "backend class_path is_mamba",
    SHAPE: "num_blocks block_size num_kv_heads head_size cache_dtype_str",
    f"{_FLASH}:FlashAttentionMetadataBuilder.__init__": "self kv_cache_spec layer_names vllm_config device",
    f"{_FLASH}:FlashAttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata fast_build",
    f"{_FLASH}:FlashAttentionImpl.__init__": "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window "
    "kv_cache_dtype logits_soft_cap attn_type kv_sharing_target_layer_name sinks",
    f"{_FLASH}:FlashAttentionImpl.forward": "self layer query key value kv_cache attn_metadata output output_scale "
    "output_block_scale",
    f"{_FLASH}:FlashAttentionImpl.do_kv_cache_update": "self layer key value kv_cache slot_mapping",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": "self usage_context headless",
    _SUM: "self input_",
    f"{_WORKER}.load_model": "self load_dummy_weights",
    f"{_WORKER}.compile_or_warm_up_model": "self",
    f"{_WORKER}.reload_weights": "self args kwargs",
    f"{_WORKER}.update_weights": "self update_info",
    f"{_WORKER}.sleep": "self level",
    f"{_WORKER}.add_lora": "self lora_request",
}
# Where a missing hook is in later versions, and its parameters: from 0.29 on a backend is queried for a layout, and
# gives no shape.
MOVED = {SHAPE: ("vllm.v1.attention.backend:AttentionBackend.supported_kv_cache_layouts", "cls")}
_NOT_COVERED = ("reload_weights", "update_weights", "sleep", "add_lora")  # calls of a worker
REGISTERED: list[int] = []  # the process that has registered: a fork inherits the patches, and patches nothing again


def engine() -> Engine:
    """vLLM in this process."""
    import vllm

    return Engine("vLLM", "vllm", vllm.__version__, TRIED, log)


def register() -> None:
    """vLLM's entry point: does nothing unless NONDET_BATCH_INVARIANT=1. Raises UserError, before any change: no Linux,
    no NVIDIA GPU, a vLLM whose signatures do not fit, or another plugin in the way."""
    before = {name: os.environ.get(name) for name in (OWN, _BREAKABLE)}
    try:
        if enabled() and not REGISTERED:
            _register()
    except BaseException:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        # vLLM loads each plugin once per process: after a refusal, a second attempt would silently get unpatched vLLM
        loader = sys.modules.get("vllm.plugins")
        if loader is not None:
            loader.plugins_loaded = False  # type: ignore[attr-defined] # vLLM's own
        raise


def _register() -> None:
    if sys.platform != "linux":
        raise UserError(f"{ENABLED}=1 needs Linux and an NVIDIA GPU, this is {sys.platform}", engine().stock)
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise UserError(
            f"{ENABLED}=1 needs an NVIDIA GPU, vLLM runs on {current_platform.device_type} here", engine().stock
        )
    if os.environ.get(OWN, "1") not in ("", "1"):
        raise UserError(f"{ENABLED}=1 and {OWN}={os.environ[OWN]} exclude each other", f"Unset {OWN}.")
    os.environ[OWN] = "1"  # before modules are loaded that read it once
    os.environ.setdefault(_BREAKABLE, "0")
    _install(check_patched())
    REGISTERED.append(os.getpid())
    log(f"batch invariance by nondet {VERSION}: products, attention and norms; {OWN}=1 is set underneath.")
    engine().never_run()


def check_patched() -> dict[str, Any]:
    """The objects of `PATCHED` by path. Raises UserError: one is missing, takes other parameters, or was replaced."""
    found = checked(engine(), PATCHED, MOVED)
    if SHAPE in found and not _known_layout(found[SHAPE]):
        raise misfit(engine(), "FlashAttention's KV cache has another layout")
    registry = object_at("vllm.v1.attention.backends.registry:AttentionBackendEnum")
    with_custom = ""
    with suppress(ValueError):  # CUSTOM without a registered backend
        with_custom = str(registry.CUSTOM.get_path())
    if with_custom not in ("", _BACKEND):
        raise UserError(f"the attention backend CUSTOM is {with_custom} already", "Run one of the two plugins.")
    return found


def _known_layout(layout: Any) -> bool:
    """Whether the cache is one of the two that `nondet.vllm.attention.dense_views` takes."""
    if layout.__name__ == SHAPE.rpartition(".")[2]:
        return layout(2, 16, 3, 64) in ((2, 2, 16, 3, 64), (2, 3, 16, 128))
    with suppress(ImportError, AttributeError):
        return bool(object_at("vllm.v1.kv_cache_layout:KVCacheLayout.LBNHC").value == (0, 1, 3, 2, 4))
    return False


def _install(found: Mapping[str, Any]) -> None:
    """Patch everything; nothing here can fail on a checked hook."""
    import torch

    from nondet.vllm import operators

    for name, (compute, shape) in operators.OPERATORS.items():
        if not hasattr(torch.ops.vllm, name):
            found[_REGISTER](name, compute, fake_impl=shape)

    def apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:  # dynamo traces it and keeps the operator whole
        return torch.ops.vllm.nondet_product(x, layer.weight, bias)

    for method in ("linear:UnquantizedLinearMethod", "vocab_parallel_embedding:UnquantizedEmbeddingMethod"):
        object_at(f"{_LAYERS}.{method}").apply = apply
    METHODS[apply] = REPLACED, PRODUCTS
    METHODS[operators.ScaledMethod.apply] = REPLACED, _SCALED
    METHODS[operators.OwnMethod.apply] = CERTIFIED, "its own kernel, at row counts certified at start"

    def forward_cuda(self: Any, x: Any) -> Any:
        return torch.ops.vllm.nondet_silu_mul(x)

    object_at(f"{_LAYERS}.activation:SiluAndMul").forward_cuda = forward_cuda
    install_norms()
    _install_experts(found)
    _install_sum(found[_SUM])
    registry = object_at("vllm.v1.attention.backends.registry:AttentionBackendEnum")
    found["vllm.v1.attention.backends.registry:register_backend"](registry.CUSTOM, _BACKEND)
    _before_configuration(found["vllm.engine.arg_utils:EngineArgs.create_engine_config"])
    _around_start(*(found[f"{_WORKER}.{name}"] for name in ("load_model", "compile_or_warm_up_model")))


def install_norms() -> None:
    """Replace vLLM's norms by ours, of both names and in both of their forwards."""
    import torch

    def normed(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        if residual is None:
            return torch.ops.vllm.nondet_rms_norm(x, weight, epsilon)
        return torch.ops.vllm.nondet_add_rms_norm(x, residual, weight, epsilon)

    plain, gemma = (object_at(f"{_LAYERS}.layernorm:{name}") for name in _NORMS)
    theirs = plain.forward_native

    def forward(self: Any, x: Any, residual: Any = None) -> Any:
        if not self.has_weight or self.variance_size_override is not None:
            return theirs(self, x, residual)
        return normed(x, residual, self.weight.data, self.variance_epsilon)

    def forward_gemma(self: Any, x: Any, residual: Any = None) -> Any:
        return normed(x, residual, self.weight.float() + 1.0, self.variance_epsilon)

    for norm, ours in ((plain, forward), (gemma, forward_gemma)):
        norm.forward_native = norm.forward_cuda = ours
        METHODS[ours] = REPLACED, "norm in class lanes"


def _install_experts(found: Mapping[str, Any]) -> None:
    import torch

    theirs, chosen_by = found[_APPLY], found[_ROUTING]

    def apply(
        self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any, shared_experts_input: Any
    ) -> Any:
        if getattr(layer, _OURS, False):
            from nondet.engines.layers import note
            from nondet.kernels.experts.cuda import weighted_experts

            note(layer.w13_weight)
            return weighted_experts(x, layer.w13_weight.data, layer.w2_weight.data, topk_weights, topk_ids)
        return theirs(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)

    def compute_routing(
        self: Any, hidden_states: Any, router_logits: Any, indices_type: Any, *, input_ids: Any = None
    ) -> Any:
        if getattr(self, _OURS, False):
            from nondet.kernels.experts.cuda import route

            weights, chosen = route(router_logits, self.top_k, renormalize=self.renormalize)
            return weights, chosen.to(indices_type or torch.int32)
        return chosen_by(self, hidden_states, router_logits, indices_type, input_ids=input_ids)

    object_at(_APPLY.rpartition(".")[0]).apply = apply
    object_at(_ROUTING.rpartition(".")[0])._compute_routing = compute_routing


def _install_sum(theirs: Callable[..., Any]) -> None:
    """Replace vLLM's sum over tensor-parallel ranks by itself at the row counts that `start` certifies."""
    from nondet.vllm.operators import padded_sum

    def _all_reduce_out_place(self: Any, input_: Any) -> Any:
        of_tensors = self.unique_name.partition(":")[0] == "tp"
        return padded_sum(partial(theirs, self), input_) if of_tensors else theirs(self, input_)

    object_at(_SUM.rpartition(".")[0])._all_reduce_out_place = _all_reduce_out_place


def _before_configuration(original: Callable[..., Any]) -> None:
    def create_engine_config(self: Any, usage_context: Any = None, headless: bool = False) -> Any:
        prepare(self)
        given = sizes_given(self)
        config = original(self, usage_context, headless)
        refuse(config)
        if not given:
            graph_prefill(config.compilation_config, config.scheduler_config.max_num_batched_tokens)
        return config

    object_at("vllm.engine.arg_utils:EngineArgs").create_engine_config = create_engine_config


def _around_start(load: Callable[..., Any], warm_up: Callable[..., Any]) -> None:
    worker = object_at(_WORKER)

    def load_model(self: Any, *, load_dummy_weights: bool = False) -> None:
        load(self, load_dummy_weights=load_dummy_weights)
        self.of_nondet = start(self.model_runner.get_model(), self.vllm_config, getattr(self, "rank", 0))

    def compile_or_warm_up_model(self: Any) -> Any:
        done = warm_up(self)
        getattr(sys.modules.get(f"{__package__}.attention"), "RESERVED", []).clear()
        check_all_ran(self.model_runner.get_model(), getattr(self, "of_nondet", ()))
        return done

    worker.load_model, worker.compile_or_warm_up_model = load_model, compile_or_warm_up_model

    def refused(name: str, *_args: Any, **_options: Any) -> None:
        raise UserError(f"{name} is not covered by nondet's batch invariance", f"Restart the engine. {engine().stock}")

    for name in _NOT_COVERED:
        setattr(worker, name, partial(refused, name))


# The configuration.


def sources() -> str:
    """First 16 hex digits of the SHA-256 over the plugin's files: vLLM's compile cache is keyed on it."""
    sha = hashlib.sha256(VERSION.encode())
    here = Path(__file__).parent
    for path in sorted((*here.glob("*.py"), *(here.parent / "engines").glob("*.py"))):
        sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


def prepare(arguments: Any) -> None:
    """Set what the plugin needs in the engine's arguments. Raises UserError: an argument requests something else."""
    if os.environ.get(OWN) != "1":
        what = f"{OWN} is {os.environ.get(OWN) or 'not set'} since nondet's kernels were installed, which need it at 1"
        raise UserError(what, "Set it to 1 again, or start a new process without NONDET_BATCH_INVARIANT.")
    custom = object_at("vllm.v1.attention.backends.registry:AttentionBackendEnum").CUSTOM
    owner = arguments.attention_config if arguments.attention_config.backend else arguments
    field = "backend" if owner is arguments.attention_config else "attention_backend"
    wanted = getattr(getattr(owner, field), "name", getattr(owner, field))
    if wanted not in (None, "CUSTOM", "FLASH_ATTN"):
        raise UserError(f"--attention-backend {wanted} and {ENABLED}=1 exclude each other", "Leave the option out.")
    if wanted == "FLASH_ATTN":  # vLLM's own default, which its own determinism tests name
        log("warning: --attention-backend FLASH_ATTN computes nothing here; attention is nondet's, over its cache.")
    setattr(owner, field, custom)
    for name in ("rms_norm", "fused_add_rms_norm"):
        if any(get(arguments, f"{prefix}ir_op_priority.{name}") for prefix in ("", "kernel_config.")):
            log(f"warning: --ir-op-priority {name} computes nothing here: norms are nondet's.")
    # SiLU by ours, rotary and FP8's numbers by vLLM's own kernels, so that Inductor fuses none of them
    operators = arguments.compilation_config.custom_ops
    for name in ("silu_and_mul", "rotary_embedding", "quant_fp8"):
        if not {f"+{name}", f"-{name}"} & set(operators):
            operators.append(f"+{name}")
    passes = arguments.compilation_config.pass_config
    for name in _fusions(passes):  # else vLLM turns on those of norms and SiLU, because they are custom operators
        if getattr(passes, name) is None:
            setattr(passes, name, False)
    if not isinstance(arguments.additional_config, dict):
        what = f"--additional-config is a {type(arguments.additional_config).__name__}"
        raise UserError(f"{what}: the compile cache can't be keyed on nondet's version", "Give a dictionary, or none.")
    arguments.additional_config["nondet"] = f"{VERSION} {sources()}"


def _fusions(passes: Any) -> list[str]:
    """vLLM's own rewritings of a traced model: they replace the operators there by fused kernels, which may add
    in another order for another number of tokens: fused_add_rms_norm_static_fp8_quant uses 1024 threads below 256
    tokens, 256 above, in batch-invariant mode or not."""
    return [name for name in vars(passes) if name.startswith(("fuse_", "enable_"))]


_GRAPH_STEP, _GRAPHED_TO = 128, 2048  # tokens


def sizes_given(arguments: Any) -> bool:
    """Whether the engine's arguments set the sizes of CUDA graphs."""
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    owners = (arguments, arguments.compilation_config)
    return any(getattr(owner, name, None) is not None for owner in owners for name in names)


def graph_prefill(compilation: Any, tokens: int) -> None:
    """Let vLLM capture its graphs between attentions also for steps with prompts in them, up to `_GRAPHED_TO` tokens.
    vLLM stops at 512, where its own launches cost little compared with a step's work. Ours start in Python, so with a
    small model such a step waited for them. Sizes are `_GRAPH_STEP` apart, the largest step, of `tokens`, among them;
    none without CUDA graphs in vLLM's `compilation` configuration."""
    sizes = compilation.cudagraph_capture_sizes
    if not sizes:
        return
    most = min(tokens, _GRAPHED_TO)
    first = (sizes[-1] // _GRAPH_STEP + 1) * _GRAPH_STEP
    sizes.extend(size for size in dict.fromkeys((*range(first, most, _GRAPH_STEP), most)) if size > sizes[-1])
    compilation.max_cudagraph_capture_size = sizes[-1]


def refuse(config: Any) -> None:
    """Refuse, as a `UserError`, each unsupported setting of a configuration, by its name."""
    cache = str(get(config, "cache_config.cache_dtype", "auto"))
    worker = str(get(config, "parallel_config.worker_cls", "auto"))
    passes = get(config, "compilation_config.pass_config")
    fused = [name for name in (_fusions(passes) if passes is not None else ()) if getattr(passes, name)]
    faults = {
        f"pass_config.{' and '.join(fused)}": bool(fused),
        "LoRA adapters": get(config, "lora_config") is not None,
        "speculative decoding": get(config, "speculative_config") is not None,
        f"workers by {worker}": not worker.startswith(("auto", "vllm.")),
        f"a KV cache of {cache}": cache not in ("auto", "float16", "bfloat16"),
        "decode context parallelism": get(config, "parallel_config.decode_context_parallel_size", 1) > 1,
        "prefill context parallelism": get(config, "parallel_config.prefill_context_parallel_size", 1) > 1,
        "two batches at a time (DBO)": bool(get(config, "parallel_config.enable_dbo", False))
        or get(config, "parallel_config.ubatch_size", 0) > 1,
        "a window that ends at the prompt (R-SWA)": get(config, "model_config.rswa_window") is not None,
        "MLA": bool(get(config, "model_config.use_mla", False)),
        "sleep mode": bool(get(config, "model_config.enable_sleep_mode", False)),
        "a transfer of KV caches": get(config, "kv_transfer_config") is not None,
        "a transfer of weights": get(config, "weight_transfer_config") is not None,
        "offloaded weights": bool(get(config, "offload_config.uva.cpu_offload_gb", 0))
        or bool(get(config, "offload_config.prefetch.offload_group_size", 0)),
        f"{get(config, 'model_config.dtype')} as the model's dtype": str(get(config, "model_config.dtype"))
        not in ("torch.bfloat16", "torch.float16"),
    }
    given = [name for name, is_given in faults.items() if is_given]
    if given:
        raise UserError(f"nondet's batch invariance under vLLM does not cover {', '.join(given)}", engine().stock)


# Coverage: which kernels compute each layer of a loaded model.

# Layers without a sum of their own: vLLM's, by the name of a class that they are or descend from, and torch's.
_ELEMENTWISE = {
    "SiluAndMul", "MulAndSilu", "GeluAndMul", "NewGELU", "FastGELU", "QuickGELU", "ReLUSquaredActivation",
    "FatreluAndMul", "SwigluOAIAndMul", "SiluAndMulWithClamp", "RotaryEmbeddingBase", "ApplyRotaryEmb",
    "LogitsProcessor", "PPMissingLayer", "Identity", "Dropout", "SiLU", "GELU", "ReLU", "Sigmoid", "Tanh",
}  # fmt: skip
# Their forward calls the layer's method for the product, and nothing else.
_BY_METHOD = {
    "LinearBase", "ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding",
    "ParallelLMHead",
}  # fmt: skip
_EXPERTS = "experts in class grouped, certified at start"
PRODUCTS = "products in class chain, certified at start"
_SCALED = "FP8 products in class chain-fp8, certified at start: its own kernel is not proven"
_PROVEN = (_EXPERTS, PRODUCTS)  # only at start
METHODS: dict[Any, tuple[str, str]] = {}  # method or norm -> its standing, and why; see `_install`


def standing_of(
    name: str, module: Any, own: Callable[[str, Any], Standing], *, installed: bool = True
) -> Standing | None:
    """The standing of a module; None if it only holds others. own(name, module) gives that of a layer's own kernel,
    which every product and norm has where nondet's kernels are not `installed`."""
    above, kind = ancestors(module), type(module).__name__
    judged = partial(Standing, name, kind)
    if name.endswith("routed_experts.quant_method") and "FusedMoEMethodBase" in above:
        return None  # a part of the experts before it
    if {"MoERunner", "RoutedExperts", "FusedMoEMethodBase"} & above or "FusedMoE" in kind or "MoERunner" in kind:
        return judged(*_of_experts(module, above, installed=installed))
    if {"LinearBase", "VocabParallelEmbedding"} & above:
        around = next(cls.__name__ for cls in type(module).__mro__ if "forward" in vars(cls))
        if around not in _BY_METHOD:
            return judged(AT_RISK, f"a product by {around}'s own forward, which nondet does not know")
        # whatever its name: another plugin may have replaced it since
        apply = getattr(getattr(module, "quant_method", None), "apply", None)
        ours = METHODS.get(getattr(apply, "__func__", apply)) if installed else None
        return judged(*ours) if ours is not None else own(name, module)
    if "AttentionLayerBase" in above:  # whatever has a cache: state spaces and linear attention as well
        return judged(*_of_attention(module, installed=installed))
    if {*_NORMS} & above:
        return judged(*_of_norm(module)) if installed else own(name, module)
    if _ELEMENTWISE & above:
        return judged(ELEMENTWISE, "nothing is added up")
    if next(module.children(), None) is not None:
        return None
    return judged(AT_RISK, "a layer that nondet does not know")


def _of_attention(module: Any, *, installed: bool) -> tuple[str, str]:
    by, kind = type(getattr(module, "impl", module)).__name__, type(module).__name__
    if not installed or by != "SegmentsImpl":
        return AT_RISK, f"attention by {by}, which is not proven"
    if kind != "Attention":  # sinks that are keys, chunks that are requests, whole prompts: by a step's metadata
        return AT_RISK, f"attention as a {kind} needs it, which was not tried"
    return REPLACED, "attention in class segments"


def _of_norm(module: Any) -> tuple[str, str]:
    around = next(cls.__name__ for cls in type(module).__mro__ if any(n.startswith("forward") for n in vars(cls)))
    if around not in _NORMS:
        return AT_RISK, f"a norm by {around}'s own forward, which nondet does not know"
    if getattr(module, "variance_size_override", None) is not None or not getattr(module, "has_weight", True):
        return AT_RISK, "a norm without weight, or of a part"
    native, cuda = (METHODS.get(getattr(type(module), f"forward_{by}", None)) for by in ("native", "cuda"))
    if native is None or native != cuda:
        return AT_RISK, "a norm that was replaced after nondet's"
    return native


def _of_experts(module: Any, above: set[str], *, installed: bool) -> tuple[str, str]:
    """Of a mixture of experts: of its runner, which chooses them, and of the layer with their weights."""
    if not installed or not {"MoERunner", "RoutedExperts"} & above:
        return AT_RISK, "experts by vLLM's own kernels, which are not proven"
    chooses = "MoERunner" in above
    fault = _unfit_router(module) if chooses else _unfit_experts(module)
    if fault:
        return AT_RISK, f"{fault}: by vLLM's own kernels, which are not proven"
    return REPLACED, "experts chosen token by token, ties decided" if chooses else _EXPERTS


# Experts: a layer of them is replaced if `nondet.kernels.experts.cuda` can compute it, and its products are proven at
# start; else it keeps vLLM's kernels, and is at risk. All of it is inside of one operator of vLLM, which is not traced.


def _unfit_router(runner: Any) -> str:
    """Why we can't compute the choice of experts of vLLM's MoERunner, or what it adds to them; "" where we can."""
    router, moe = runner.router, runner.moe_config
    faults = {
        f"a runner of its own ({type(runner).__name__})": type(runner).__name__ != "MoERunner",
        f"experts chosen by {type(router).__name__}": type(router).__name__ != "FusedTopKRouter",
        "experts scored by another function than softmax": getattr(router, "scoring_func", "") != "softmax",
        "experts that move (EPLB)": router.eplb_state is not None,
        "experts that all tokens share": runner.shared_experts is not None or runner.shared_expert_gate is not None,
        "a product around all experts": runner.routed_input_transform is not None
        or runner.routed_output_transform is not None,
        "experts of more than one rank": moe.is_sequence_parallel
        or max(moe.tp_size, moe.dp_size, moe.ep_size, moe.pcp_size) > 1,
    }
    return ", ".join(what for what, applies in faults.items() if applies)


def _unfit_experts(layer: Any) -> str:
    """Why we can't compute the experts of vLLM's RoutedExperts; "" where we can, once they are proven."""
    method = layer.quant_method
    if type(method).__name__ != "UnquantizedFusedMoEMethod":
        return f"experts by {type(method).__name__}"
    backend, activation = method.unquantized_backend.name, layer.activation.value
    w13, w2 = getattr(layer, "w13_weight", None), getattr(layer, "w2_weight", None)
    if w13 is None or w2 is None or w13.ndim != 3 or w2.ndim != 3:
        return "experts without w13_weight and w2_weight"
    faults = {
        f"experts by {backend}, whose weights have another layout": backend != "TRITON",
        f"experts with {activation}": activation != "silu",
        "experts with a bias": layer.moe_config.has_bias,
        "experts that are clamped": any(
            getattr(layer, f"swiglu_{name}", None) is not None for name in ("limit", "alpha", "beta")
        ),
        "tokens weighted before their experts": layer.apply_router_weight_on_input,
        "experts spread over ranks": layer.expert_map is not None,
        "experts of another shape": w13.dtype != w2.dtype
        or tuple(w13.shape) != (w2.shape[0], 2 * w2.shape[2], w2.shape[1])
        or len(w13) != layer.global_num_experts,
    }
    return ", ".join(what for what, applies in faults.items() if applies)


def certify_experts(layer: Any, counts: Sequence[int]) -> layers.Certified:
    """Prove every tile that a step of these numbers of tokens can use, and compile the kernels: all of them are run,
    and one more for each pair of tiles that is in between. Raises NotImplementedError: a product has no tile."""

    from nondet.engines.layers import certified
    from nondet.kernels.experts.cuda import route, tile_for, weighted_experts

    w13, w2, top = layer.w13_weight.data, layer.w2_weight.data, layer.top_k
    tokens_by_tiles: dict[Any, int] = {}
    for tokens in range(1, max(counts) + 1):
        rows = (tokens * top, len(w13))
        tiles = tile_for(*rows, w13.shape[1], w13.dtype), tile_for(*rows, w2.shape[1], w13.dtype)
        tokens_by_tiles.setdefault(tiles, tokens)

    def launch_all() -> None:
        for tokens in sorted({*counts, *tokens_by_tiles.values()}):
            chosen = route(w13.new_zeros((tokens, len(w13))), top, renormalize=layer.renormalize)
            weighted_experts(w13.new_zeros((tokens, w13.shape[2])), w13, w2, *chosen)

    return certified(launch_all)


def config_standings(config: Any, counts: Sequence[int] = ()) -> Iterator[Standing]:
    """The standing of the sum over ranks, which needs a proof; without `counts`, numbers of rows, it is not tested."""
    for name, path in (("tensor", "tensor_parallel_size"), ("pipeline", "pipeline_parallel_size")):
        ranks = get(config, f"parallel_config.{path}", 1)
        if ranks > 1:
            tested = _of_ranks(config, ranks, counts) if name == "tensor" and counts else None
            why = "what ranks exchange was not proven under vLLM"
            yield Standing(f"{name} parallelism", f"{ranks} ranks", *(tested or (AT_RISK, why)))


def _of_ranks(config: Any, ranks: int, counts: Sequence[int]) -> tuple[str, str]:
    """(standing, why) of vLLM's sum over ranks, at the row counts to which it is padded; all else is copied. Two ranks
    are tested as well: two numbers have one sum, but it may be sent in fewer bits. Raises UserError, even with
    NONDET_ALLOW_AT_RISK=1, if the sum failed, perhaps on this rank only: else two ranks could wait for each other, or
    add what does not belong together."""
    from nondet.vllm.operators import first_sum_that_differs

    graphs, model = limits_of(config)[0], config.model_config
    what = "the sum over ranks could not be tested"
    try:
        group, capture = (object_at(f"vllm.distributed.parallel_state:{n}") for n in ("get_tp_group", "graph_capture"))
    except (ImportError, AttributeError) as error:  # on all ranks
        return AT_RISK, f"{what}: {one_line(str(error), 120)}"
    try:
        failed = first_sum_that_differs(group(), capture, model.get_hidden_size(), model.dtype, counts, graphs)
    except Exception as error:
        raise UserError(f"{what}: {one_line(str(error), 120) or type(error).__name__}", engine().stock) from error
    if failed is not None:
        return AT_RISK, f"the sum over ranks gives a row different bits at M={failed} and M={counts[-1]}"
    in_graphs = ", graphs' sizes in graphs as well" if graphs else ""
    only = f"all {len(counts)} row counts, the only ones that it runs at"
    return CERTIFIED, f"the sum over {ranks} ranks has equal bits at {only}{in_graphs}"


def limits_of(config: Any) -> tuple[list[int], int, int]:
    """(sizes of CUDA graphs, most tokens of a step, most requests of a step)."""
    graphs = list(get(config, "compilation_config.cudagraph_capture_sizes", ()) or ())
    tokens = get(config, "scheduler_config.max_num_batched_tokens")
    requests = get(config, "scheduler_config.max_num_seqs")
    return graphs, int(tokens), int(requests)


def plan_of(config: Any, seen: Mapping[Any, Any]) -> dict[str, Any]:
    """What the coverage file has about this start."""
    from nondet.engines import layers

    graphs, tokens, requests = limits_of(config)
    model, dtype = (str(get(config, f"model_config.{name}", "")) for name in ("model", "dtype"))
    sizes = layers.plan_of(seen, len(graphs), tokens, requests)
    return {"model": model, engine().package: engine().version, "dtype": dtype.removeprefix("torch."), **sizes}


def _forms_of_norm(layer: Any, weight: Any, config: Any) -> Iterator[tuple[Callable[[Any], Any], int]]:
    """(norm of [M, W], W) as a model calls it: of tokens, with and without a residual; of all their heads."""
    import torch

    model, width = config.model_config, int(weight.shape[-1])

    def added(x: Any) -> Any:
        return torch.cat(layer(x.clone(), x.flip(-1)), -1)  # the norm, and the sum that it is of

    def by_head(heads: int, x: Any) -> Any:
        return layer(x.view(-1, heads, width)).flatten(1)

    if width == model.get_hidden_size():
        yield from ((layer, width), (added, width))
        return
    for count in (model.get_num_attention_heads, model.get_num_kv_heads):
        heads = count(config.parallel_config)
        yield partial(by_head, heads), heads * width


def own_kernel(config: Any, counts: Sequence[int] = ()) -> Callable[[str, Any], Standing]:
    """A function that tests a layer's own kernel, a product's or a norm's, at `counts` or at all numbers of rows that a
    step can have; layers of one kind and shape once."""
    from nondet.engines.layers import bias_of, width_of
    from nondet.vllm.operators import first_size_that_differs

    _, tokens, requests = limits_of(config)
    known: dict[str, tuple[str, str]] = {}

    def tested(layer: Any, sizes: Sequence[int]) -> tuple[str, str]:
        method: Any = getattr(layer, "quant_method", None)

        def compute(x: Any) -> Any:
            return method.apply(layer, x, bias_of(layer))

        dtype, failed = config.model_config.dtype, None
        try:
            parameter = next(layer.parameters())
            forms = [(compute, width_of(layer))] if method is not None else _forms_of_norm(layer, parameter, config)
            for form, width in forms:
                failed = failed or first_size_that_differs(form, width, dtype, parameter.device, sizes)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, it is not proven
            return AT_RISK, f"its kernel could not be tested: {one_line(str(error), 120) or type(error).__name__}"
        if failed is not None:
            return AT_RISK, f"its kernel gives a row different bits at M={failed} and M={sizes[-1]}"
        only = ", the only ones that it runs at" if counts else ""
        return CERTIFIED, f"its kernel gives equal bits at all {len(sizes)} row counts{only}"

    def own(name: str, layer: Any) -> Standing:
        quantized = getattr(layer, "quant_method", None)
        method = type(quantized or layer)
        shapes = " ".join(f"{n}{list(p.shape)}{p.dtype}" for n, p in layer.named_parameters())
        inside = {**(vars(quantized) if quantized else {}), "scheme": getattr(layer, "scheme", None)}
        plain = {n: v if isinstance(v, int | str) else type(v).__name__ for n, v in inside.items()}
        parts = " ".join(f"{n}:{v}" for n, v in sorted(plain.items()))
        sizes = rows_of(layer, counts, requests) or range(1, tokens + 1)
        words = f"{method.__qualname__} {parts} {shapes} {sizes[-1]}"
        if words not in known:
            known[words] = tested(layer, sizes)
        standing, why = known[words]
        kind = type(layer).__name__
        return Standing(name, f"{kind} by {method.__name__}" if quantized else kind, standing, why)

    return own


def _prove(
    standing: Standing, module: Any, counts: Sequence[int], requests: int, seen: dict[Any, layers.Certified]
) -> Standing:
    """Certify a layer's kernel, once for equal layers; where that fails it is at risk."""
    from nondet.engines import layers

    weight = getattr(module, "weight", None)
    if standing.why == _EXPERTS:
        key: Any = ("experts", *(p.shape + p.stride() for p in module.parameters()), module.top_k, module.renormalize)
        try:
            seen[key] = seen.get(key) or certify_experts(module, counts)
            setattr(module, _OURS, True)
        except Exception as error:  # noqa: BLE001 - whatever the error, it is not proven
            why = one_line(str(error), 120) or type(error).__name__
            return standing._replace(standing=AT_RISK, why=f"no product of these experts is proven here: {why}")
    elif standing.standing == REPLACED and "MoERunner" in ancestors(module):
        setattr(module.router, _OURS, True)
    elif standing.why == PRODUCTS and weight is not None and weight.is_cuda:
        bias = layers.bias_of(module)
        key = (weight.shape, weight.stride(), weight.dtype, bias is None)
        if key not in seen:
            seen[key] = layers.certify_product(weight, bias, rows_of(module, counts, requests))
    return standing


def start(model: Any, config: Any, rank: int = 0) -> list[Standing]:
    """Prove members for a loaded model's products, check every layer, record its standing. Raises UserError: a layer at
    risk, and NONDET_ALLOW_AT_RISK is not 1."""
    import torch

    from nondet.engines import layers

    graphs, tokens, requests = limits_of(config)
    counts = layers.row_counts(graphs, tokens)
    unproven = "not proven, because the start is refused"  # no proof is needed, because nothing will run

    def looked_at(own: Callable[[str, Any], Standing]) -> list[tuple[Standing, Any]]:
        looked = [(s, m) for name, m in model.named_modules() if (s := standing_of(name, m, own)) is not None]
        if os.environ.get(ALLOWED) != "1" and any(s.standing == AT_RISK for s in (*found, *(s for s, _ in looked))):
            left = (s._replace(why=unproven) if s.why in _PROVEN else s for s, _ in looked)
            report([*found, *left], engine(), plan_of(config, seen), rank)
        return looked

    seen: dict[tuple[Any, ...], layers.Certified] = {}
    found = [one for one in config_standings(config) if not one.layer.startswith("tensor")]  # whose sum is tested below
    looked_at(lambda name, layer: Standing(name, type(layer).__name__, CERTIFIED, unproven))
    layers.use_counts(counts)
    attention = sys.modules.get(f"{__package__}.attention")  # if vLLM has loaded it
    if attention is not None:
        attention.reserve(model, config)
    found[:] = config_standings(config, counts)
    looked = looked_at(_kept_or_scaled(own_kernel(config, counts), counts, config, seen))
    found += [_prove(standing, module, counts, requests, seen) for standing, module in looked]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    log(layers.summary(seen, counts))
    report(found, engine(), plan_of(config, seen), rank)
    layers.watch()
    return found


def check_all_ran(model: Any, found: Sequence[Standing]) -> None:
    """Check that vLLM's runs at start, its compiled model and graphs included, called our operators. Products, norms,
    experts and kept kernels are recognized by their weights. Not checked: attention, tables of embeddings and heads,
    and Gemma's norms, whose weight is recomputed at each call. Raises UserError: a layer that no operator ran with, for
    example because vLLM put another kernel there, and NONDET_ALLOW_AT_RISK is not 1."""
    from nondet.engines import layers
    from nondet.vllm import operators

    modules, weights = dict(model.named_modules()), {}
    for one in found:
        module = modules.get(one.layer)
        kept = getattr(module, "quant_method", None)
        weight = getattr(module, kept.weight if isinstance(kept, operators.OwnMethod) else "weight", None)
        weight = getattr(module, "w13_weight", weight)
        skipped = {"VocabParallelEmbedding", "GemmaRMSNorm"} & ancestors(module)
        if one.standing in (REPLACED, CERTIFIED) and weight is not None and not skipped:
            weights[one.layer] = weight.data
    refuse_missed(layers.not_run(weights), len(weights), engine())


def _kept_or_scaled(
    own: Callable[[str, Any], Standing], counts: Sequence[int], config: Any, seen: dict[Any, layers.Certified]
) -> Callable[[str, Any], Standing]:
    """A layer's own kernel; if that is not invariant, nondet's FP8 product, if it fits and is proven."""
    from nondet.vllm import operators

    dtype, requests = config.model_config.dtype, limits_of(config)[2]

    def judged(name: str, layer: Any) -> Standing:
        standing = own(name, layer)
        if getattr(layer, "quant_method", None) is None:
            return standing
        try:
            if standing.standing == CERTIFIED:
                operators.keep_own(layer, dtype, rows_of(layer, counts, requests))
                return standing
            why = operators.unfit_scaled(layer)
            if not why:
                operators.replace_scaled(layer, counts, dtype, seen)
        except Exception as error:  # noqa: BLE001 - whatever the error, it is not proven
            why = one_line(str(error), 120) or type(error).__name__
        if why:
            return standing._replace(standing=AT_RISK, why=f"{standing.why}; not replaced: {why}")
        config.additional_config.setdefault("nondet_scaled", []).append(name)  # a graph with its own kernel is another
        return standing._replace(standing=REPLACED, why=_SCALED)

    return judged


class Look:
    """Goes into vLLM's process and records what computes each layer of the loaded model, with the plugin or without.
    `found` is complete once attached."""

    def __init__(self) -> None:
        self.found: list[Standing] = []

    @contextmanager
    def attached(self, llm: Any, _taken: Any) -> Iterator[None]:
        """Test before any request runs."""
        [model] = llm.collective_rpc(lambda worker: worker.model_runner.get_model())
        config = llm.llm_engine.vllm_config
        own, installed = own_kernel(config), bool(REGISTERED)
        seen = (standing_of(name, module, own, installed=installed) for name, module in model.named_modules())
        self.found = [*config_standings(config), *filter(None, seen)]
        yield

    def records(self) -> list[LayerStanding]:
        """What was found, as a run file holds it."""
        return grouped(self.found)
