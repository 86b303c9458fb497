"""Rivals: found by name, never imported to look, called as their sources have it, with a reason where they can't be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from nondet.bench.collect import implementations_of
from nondet.bench.rivals import RIVALS, installed_rivals, rival_call
from nondet.errors import UserError
from nondet.kernels import reference
from nondet.kernels.scaled.functions import FLOAT8, operands

SHARED = """
import torch
def matmul_persistent(a, b, bias=None):
    assert a.shape[1] == b.shape[0]
    return a @ b if bias is None else a @ b + bias
def log_softmax(input, dim=-1):
    return torch.log_softmax(input, dim)
def mean_dim(input, dim, keepdim=False, dtype=None):
    return input.mean(dim, keepdim=keepdim)
def rms_norm_batch_invariant(input, weight, eps=1e-6):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
def softmax_batch_invariant(input, dim, dtype=None):
    return torch.softmax(input, dim)
"""
FLASH = """
import torch
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    assert q.shape[1] > 1
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True).transpose(1, 2)
def flash_attn_with_kvcache(q, k_cache, v_cache, softmax_scale=None, causal=False):
    assert q.shape[1] == 1
    q, k, v = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2), "logsumexp"
"""
DEEP_GEMM = """
import torch
def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
    (a, scale_a), (b, scale_b) = a, b
    assert a.shape[1] == b.shape[1] and d.dtype == torch.bfloat16 and scale_b.is_contiguous()
    assert scale_b.shape == (-(-b.shape[0] // 128), -(-b.shape[1] // 128))
    wide = [s.repeat_interleave(128, 1)[:, :a.shape[1]].double() for s in (scale_a, scale_b)]
    d.copy_((a.double() * wide[0]) @ (b.double() * wide[1].repeat_interleave(128, 0)[:len(b)]).t())
"""
CUTLASS = """
def cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias=None):
    assert b.stride(0) == 1 and a.shape[1] == b.shape[0]
    if scale_a.shape[1] > 1:
        assert scale_a.stride(0) == scale_b.stride(0) == 1
        scale_a = scale_a.repeat_interleave(128, 1)[:, :a.shape[1]]
        scale_b = scale_b.repeat_interleave(128, 0)[:b.shape[0]].repeat_interleave(128, 1)[:, :b.shape[1]]
        return ((a.double() * scale_a) @ (b.double() * scale_b)).to(out_dtype)
    return ((a.double() @ b.double()) * scale_a * scale_b).to(out_dtype)
"""
FLASHINFER = """
import torch
def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
def single_decode_with_kv_cache(q, k, v, kv_layout="NHD", use_tensor_cores=False, sm_scale=None):
    assert kv_layout == "HND" and q.dim() == 2
    return torch.nn.functional.scaled_dot_product_attention(q[:, None], k, v, scale=sm_scale, enable_gqa=True)[:, 0]
def single_prefill_with_kv_cache(q, k, v, causal=False, kv_layout="NHD", sm_scale=None):
    assert kv_layout == "HND" and q.dim() == 3
    q = q.transpose(0, 1)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=sm_scale, enable_gqa=True).transpose(0, 1)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Toys under the rivals' names, with the signatures of their sources."""
    files = {
        "batch_invariant_ops/batch_invariant_ops.py": SHARED,
        "sglang/srt/batch_invariant_ops/batch_invariant_ops.py": SHARED,
        "vllm/model_executor/layers/batch_invariant.py": SHARED,
        "flash_attn/__init__.py": FLASH,
        "flash_attn_interface.py": FLASH,
        "flashinfer/__init__.py": FLASHINFER,
        "deep_gemm/__init__.py": DEEP_GEMM,
        "vllm/_custom_ops.py": CUTLASS,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {rival.package for rival in RIVALS.values()}:
            del sys.modules[name]


def test_nothing_is_found_where_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without rivals times stock and ours; asking for one by name is the user's error."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert installed_rivals() == {}
    assert implementations_of("linear", ["stock", "invariant"], "cuda", []) == ["stock", "invariant"]
    with pytest.raises(UserError, match="flash_attn is not installed"):
        implementations_of("attention", ["flash-attn"], "cuda", [])


def test_looking_imports_nothing(installed: Path) -> None:
    """A library that takes seconds to import, or fails to, costs nothing until it is timed."""
    (installed / "vllm" / "__init__.py").write_text("raise RuntimeError('no driver')", encoding="utf-8")
    found = installed_rivals()
    assert set(found) == set(RIVALS)
    assert "vllm" not in sys.modules
    with pytest.raises(RuntimeError, match="no driver"):
        rival_call("vllm-triton", "linear")


def test_a_broken_package_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """find_spec raises where __spec__ is None: that is not installed, and no crash."""

    def broken(name: str) -> None:
        raise ValueError(f"{name}.__spec__ is None")

    monkeypatch.setattr("importlib.util.find_spec", broken)
    assert installed_rivals() == {}


@pytest.mark.usefixtures("installed")
def test_rivals_compute_what_ours_do() -> None:
    """Layouts, argument order and alignment are right: every adapter agrees with the float64 oracle."""
    for name in RIVALS:
        x, w, norm = torch.randn(3, 8), torch.randn(5, 8), torch.rand(8)
        q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
        fp8 = [operands("bell", how, (5, 384, 256), FLOAT8[:1] * 2, "cpu", 0) for how in ("row", "block")]
        scaled = [(*given, torch.bfloat16) for given in fp8 if name != "deep-gemm" or given[2].shape[1] > 1]
        arguments = {
            "scaled_matmul": scaled,
            "linear": [(x, w)], "log_softmax": [(x,)], "softmax": [(x,)], "mean": [(x,)], "rms_norm": [(x, norm)],
            "attention": [(q, k, v), (q[:, :, -1:], k, v)],
        }  # fmt: skip
        assert RIVALS[name].operators
        for operator in RIVALS[name].operators:
            call, oracle = rival_call(name, operator), getattr(reference, operator)
            for inputs in arguments[operator]:
                rtol = 2**-8 if operator == "scaled_matmul" else 1e-4  # one rounding to bfloat16
                torch.testing.assert_close(call(*inputs).double(), oracle(*inputs), rtol=rtol, atol=1e-5)


@pytest.mark.usefixtures("installed")
def test_what_a_rival_lacks_is_said() -> None:
    """An operator that it has not, a version without the function, a batch that its call does not take."""
    with pytest.raises(NotImplementedError, match="flash-attn has no linear"):
        rival_call("flash-attn", "linear")
    import flashinfer

    del flashinfer.single_decode_with_kv_cache
    with pytest.raises(NotImplementedError, match="flashinfer has no single_decode_with_kv_cache"):
        rival_call("flashinfer", "attention")


@pytest.mark.usefixtures("installed")
def test_fp8_products_that_a_rival_has_not_are_refused() -> None:
    """DeepGEMM has no scales of rows; vLLM's call takes a kernel that is not CUTLASS's where sizes are odd."""
    rows = operands("bell", "row", (5, 384, 256), FLOAT8[:1] * 2, "cpu", 0)
    odd = operands("bell", "row", (5, 384, 250), FLOAT8[:1] * 2, "cpu", 0)
    for name, given, dtype, why in (
        ("deep-gemm", rows, torch.bfloat16, "with scales in blocks"),
        ("vllm-cutlass", odd, torch.bfloat16, "steps of 16"),
        ("vllm-cutlass", rows, torch.float32, "half precision"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            rival_call(name, "scaled_matmul")(*given, dtype)


@pytest.mark.usefixtures("installed")
def test_flashinfer_takes_one_request() -> None:
    """A batch would need a plan made ahead: a reason, and no wrong figure."""
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 6, 8)
    with pytest.raises(NotImplementedError, match="one request"):
        rival_call("flashinfer", "attention")(q, k, k)


def test_stock_stands_for_its_backends() -> None:
    """The best stock is chosen among them; the one that writes every score is timed only by its own name."""
    named = implementations_of(
        "attention", ["stock", "invariant", "flash-attn", "sglang"], "cuda", ["flash-attn", "sglang"]
    )
    assert named == ["stock", "stock-flash", "stock-efficient", "stock-cudnn", "invariant", "flash-attn"]
    assert implementations_of("attention", ["stock-math"], "cuda", []) == ["stock-math"]
    assert implementations_of("linear", ["sglang"], "cpu", ["sglang"]) == []  # their kernels need a GPU
