"""Other people's kernels, timed where they are installed and never required.

Each is found by name alone (nothing is imported to look), and called by the functions that its sources have today
under our operators' signatures. What is missing in an installed version raises `NotImplementedError`, which becomes a
row with that reason.

Sources read for the calls:
  * batch_invariant_ops: github.com/thinking-machines-lab/batch_invariant_ops, batch_invariant_ops.py
  * SGLang: python/sglang/srt/batch_invariant_ops/batch_invariant_ops.py (DeepGEMM for bf16 where it is installed)
  * vLLM: vllm/model_executor/layers/batch_invariant.py. Its Triton product is what it uses on Ampere; on Hopper it
    restricts cuBLAS by environment variables of the whole process, which can't stand beside stock cuBLAS in one.
  * flash-attn 2: flash_attn/flash_attn_interface.py; flash-attn 3: hopper/flash_attn_interface.py
  * DeepGEMM: deepseek-ai/DeepGEMM, docs/API_REFERENCE.md at b8feb7d (fp8_gemm_nt), and the former name of the same call
  * vLLM's CUTLASS products of FP8: vllm/_custom_ops.py of 0.25.1, cutlass_scaled_mm
  * FlashInfer: flashinfer/norm.py, decode.py, prefill.py; attention of a single request, without a plan made ahead
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

Call = Callable[..., Any]


@dataclass(frozen=True)
class Rival:
    """A library."""

    package: str  # what to look for; found means installed, not that it works here
    module: str  # what to import when it is called
    distribution: str  # its name on package indexes, for the version
    operators: Mapping[str, Callable[[Any], Call]]  # operator -> (module) -> a call with its signature


def _function(module: Any, *names: str) -> Call:
    for name in names:
        function: Call | None = getattr(module, name, None)
        if function is not None:
            return function
    raise NotImplementedError(f"{module.__name__} has no {' or '.join(names)}")


def _persistent_linear(module: Any) -> Call:
    """matmul_persistent(a [M, K], b [K, N], bias) of the three libraries that share it."""
    product = _function(module, "matmul_persistent")
    return lambda x, weight, bias=None: product(x, weight.t(), bias=bias)


def _last_axis(name: str) -> Callable[[Any], Call]:
    """A function of (input, dim) over the last axis."""

    def bind(module: Any) -> Call:
        function = _function(module, name)
        return lambda x: function(x, -1)

    return bind


def _norm(*names: str) -> Callable[[Any], Call]:
    """A function of (input, weight, eps)."""

    def bind(module: Any) -> Call:
        function = _function(module, *names)
        return lambda x, weight, eps=1e-6: function(x, weight, eps)

    return bind


def _one(result: Any) -> Any:
    """The output alone, of versions that also return the logsumexp."""
    return result[0] if isinstance(result, tuple) else result


def _flash(module: Any) -> Call:
    """Tokens before heads: [B, T, H, D] views of our [B, H, T, D]; causal is aligned to the end, as ours.

    A single query goes by the function for decoding, which splits the keys.
    """
    whole, cached = _function(module, "flash_attn_func"), _function(module, "flash_attn_with_kvcache")

    def attention(q: Any, k: Any, v: Any, *, causal: bool = True, scale: float | None = None) -> Any:
        call = cached if q.shape[2] == 1 else whole
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _one(call(q, k, v, softmax_scale=scale, causal=causal)).transpose(1, 2)

    return attention


def _flashinfer_attention(module: Any) -> Call:
    """Calls for one request: decode takes q [Hq, D], prefill q [T, Hq, D]; keys and values [Hkv, T, D] ("HND")."""
    decode = _function(module, "single_decode_with_kv_cache")
    prefill = _function(module, "single_prefill_with_kv_cache")

    def attention(q: Any, k: Any, v: Any, *, causal: bool = True, scale: float | None = None) -> Any:
        if q.shape[0] != 1:
            raise NotImplementedError("FlashInfer's calls without a plan take one request; batches are not timed")
        if q.shape[2] == 1:
            out = decode(q[0, :, 0], k[0], v[0], kv_layout="HND", use_tensor_cores=True, sm_scale=scale)
            return out[None, :, None]
        out = prefill(q[0].transpose(0, 1), k[0], v[0], causal=causal, kv_layout="HND", sm_scale=scale)
        return out.transpose(0, 1)[None]

    return attention


def deep_gemm(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: Any) -> Any:
    """fp8_gemm_nt((a [M, K], [M, K / 128]), (b as [N, K], [N / 128, K / 128]), out), in blocks, into bfloat16."""
    product = _function(importlib.import_module("deep_gemm"), "fp8_gemm_nt", "gemm_fp8_fp8_bf16_nt")
    in_blocks = scale_a.numel() == a.shape[0] * -(-a.shape[1] // 128)
    if not in_blocks or f"{a.dtype} {dtype}" != "torch.float8_e4m3fn torch.bfloat16":
        raise NotImplementedError("DeepGEMM takes float8_e4m3fn with scales in blocks, into bfloat16")
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    product((a, scale_a), (b.t(), scale_b.t().contiguous()), out)
    return out


def vllm_cutlass(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: Any) -> Any:
    """cutlass_scaled_mm(a, b, scale_a, scale_b, dtype), scales in blocks laid out by columns.

    Where K or N is no multiple of 16 vLLM takes another kernel, of Triton, which is not what is asked about.
    """
    product = _function(importlib.import_module("vllm._custom_ops"), "cutlass_scaled_mm")
    if b.shape[0] % 16 or b.shape[1] % 16 or str(dtype) == "torch.float32":
        raise NotImplementedError("vLLM's CUTLASS product takes K and N in steps of 16, into half precision")
    if scale_a.dim() == 2 and scale_a.shape[1] > 1:
        scale_a, scale_b = scale_a.mT.contiguous().mT, scale_b.mT.contiguous().mT
    return product(a, b, scale_a, scale_b, dtype)


_SHARED = {"linear": _persistent_linear, "log_softmax": _last_axis("log_softmax"), "mean": _last_axis("mean_dim")}

RIVALS: dict[str, Rival] = {
    "batch-invariant-ops": Rival(
        "batch_invariant_ops", "batch_invariant_ops.batch_invariant_ops", "batch_invariant_ops", _SHARED
    ),
    "sglang": Rival(
        "sglang",
        "sglang.srt.batch_invariant_ops.batch_invariant_ops",
        "sglang",
        {**_SHARED, "rms_norm": _norm("rms_norm_batch_invariant", "rms_norm")},
    ),
    "vllm-triton": Rival(
        "vllm",
        "vllm.model_executor.layers.batch_invariant",
        "vllm",
        {
            **_SHARED,
            "softmax": _last_axis("softmax_batch_invariant"),
            "rms_norm": _norm("rms_norm_batch_invariant", "rms_norm"),
        },
    ),
    "deep-gemm": Rival("deep_gemm", "deep_gemm", "deep_gemm", {"scaled_matmul": lambda _: deep_gemm}),
    "vllm-cutlass": Rival("vllm", "vllm._custom_ops", "vllm", {"scaled_matmul": lambda _: vllm_cutlass}),
    "flash-attn": Rival("flash_attn", "flash_attn", "flash-attn", {"attention": _flash}),
    "flash-attn-3": Rival("flash_attn_interface", "flash_attn_interface", "flash-attn-3", {"attention": _flash}),
    "flashinfer": Rival(
        "flashinfer",
        "flashinfer",
        "flashinfer-python",
        {"rms_norm": _norm("rmsnorm"), "attention": _flashinfer_attention},
    ),
}


def installed_rivals() -> dict[str, str]:
    """Installed rivals with their versions ("unknown" where the package does not tell). Imports none of them."""
    found = {}
    for name, rival in RIVALS.items():
        with suppress(ImportError, ValueError):  # of a half-removed package: __spec__ is None
            if importlib.util.find_spec(rival.package) is not None:
                found[name] = "unknown"
                found[name] = metadata.version(rival.distribution)
    return found


def rival_call(name: str, operator: str) -> Call:
    """The rival's function under the operator's signature; a `NotImplementedError` where it has none."""
    rival = RIVALS[name]
    bind = rival.operators.get(operator)
    if bind is None:
        raise NotImplementedError(f"{name} has no {operator}")
    return bind(importlib.import_module(rival.module))
