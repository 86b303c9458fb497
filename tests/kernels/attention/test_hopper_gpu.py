"""The Hopper prefill kernel on a GPU: its bits are those of `triton_attention`'s order, written plainly."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from nondet.core import compare, inputs
from nondet.core.launch import listen
from nondet.kernels import reference
from nondet.kernels.attention import cuda as triton_attention
from nondet.kernels.attention import hopper as hopper_attention
from nondet.kernels.attention.hopper import prefill
from tests.build import accuracy_bound

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs compute capability 9.0")


@triton.jit
def _fold(x, M: tl.constexpr, N: tl.constexpr):
    return tl.sum(tl.reshape(x, (M, 2, N // 2)), 1)


@triton.jit
def _plain_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, tq, tk, qk_scale,
    stride_qh, stride_qt, stride_kh, stride_kt, stride_vh, stride_vt, stride_oh, stride_ot,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One head and 64 queries a program, keys loaded through pointers, nothing overlapped."""
    M: tl.constexpr = 64
    head = tl.program_id(1)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + head * stride_qh + rows[:, None] * stride_qt + d[None, :], rows[:, None] < tq, 0.0)
    k_ptr += head // GROUP * stride_kh
    v_ptr += head // GROUP * stride_vh
    m_all = tl.full((M,), float("-inf"), tl.float32)
    l_all = tl.zeros((M,), tl.float32)
    acc_all = tl.zeros((M, D), tl.float32)
    for segment in range(0, tk, SEGMENT):
        m = tl.full((M,), float("-inf"), tl.float32)
        l8 = tl.zeros((M, 8), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        for start in range(segment, tl.minimum(tk, segment + SEGMENT), 128):
            key = start + tl.arange(0, 128)
            k = tl.load(k_ptr + key[None, :] * stride_kt + d[:, None], key[None, :] < tk, 0.0)
            v = tl.load(v_ptr + key[:, None] * stride_vt + d[None, :], key[:, None] < tk, 0.0)
            visible = key[None, :] < tk
            if CAUSAL:
                visible &= key[None, :] <= rows[:, None] + tk - tq
            s = tl.where(visible, tl.dot(q, k), float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            neg = -(m_safe * qk_scale)
            p = tl.exp2(tl.fma(s, tl.zeros_like(s) + qk_scale, tl.zeros_like(s) + neg[:, None]))
            alpha = tl.exp2((m - m_safe) * qk_scale)
            part8 = _fold(_fold(_fold(_fold(p, M, 128), M, 64), M, 32), M, 16)
            l8 = tl.fma(l8, tl.zeros_like(l8) + alpha[:, None], part8)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
            m = m_new
        l = tl.sum(_fold(_fold(l8, M, 8), M, 4), 1)  # noqa: E741 - the literature's name
        m_new = tl.maximum(m_all, m)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        before = tl.exp2((m_all - m_safe) * qk_scale)
        now = tl.exp2((m - m_safe) * qk_scale)
        l_all = tl.fma(l_all, before, l * now)
        acc_all = tl.fma(acc_all, tl.zeros_like(acc_all) + before[:, None], acc * now[:, None])
        m_all = m_new
    out = (acc_all / l_all[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head * stride_oh + rows[:, None] * stride_ot + d[None, :], out, rows[:, None] < tq)


def plainly(q, k, v, causal):
    out = torch.empty_like(q)
    qk_scale = 1.0 / math.sqrt(q.shape[3]) * math.log2(math.e)
    for q_, k_, v_, out_ in zip(q, k, v, out, strict=True):
        _plain_kernel[(triton.cdiv(q.shape[2], 64), q.shape[1])](
            *(q_, k_, v_, out_, q.shape[2], k.shape[2], qk_scale, *q_.stride()[:2], *k_.stride()[:2]),
            *(*v_.stride()[:2], *out_.stride()[:2], q.shape[1] // k.shape[1], causal, q.shape[3]),
            *(hopper_attention.SEGMENT,),
            num_stages=1,
            enable_fp_fusion=False,
        )
    return out


def qkv(b, hq, hkv, tq, tk, d, dtype=torch.bfloat16, kind="bell"):
    """As a model lays them out, [B, T, H, D] seen as [B, H, T, D]."""
    rng = inputs.generator(0, "cuda")
    shapes = ((tq, hq), (tk, hkv), (tk, hkv))
    return tuple(inputs.make(kind, (b, t, h, d), dtype, "cuda", rng).transpose(1, 2) for t, h in shapes)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("kind", ["bell", "wide", "outlier"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_its_bits_are_those_of_the_order_written_plainly(kind, dtype, causal):
    """Tails of queries, keys and segments, one query, GQA and MQA, more items than programs, both head dims."""
    for shape in (
        (1, 4, 2, 128, 128, 128),
        (2, 4, 1, 300, 1700, 128),
        (1, 2, 1, 1, 130, 128),
        (1, 32, 8, 2048, 2048, 128),
        (1, 3, 3, 65, 513, 128),
        (2, 4, 2, 641, 2001, 64),
    ):
        q, k, v = qkv(*shape, dtype, kind)
        with listen() as ran:
            out = prefill(q, k, v, causal=causal, scale=None)
        assert list(ran) == ["attention_hopper[128x128]"]
        assert compare.identical(out, plainly(q, k, v, causal)), shape


@pytest.mark.gpu
@on_hopper
def test_chunks_and_decode_give_the_prefills_bits():
    """Chunks of any size, and the Triton kernels' prefill and decode, give them; another order of keys does not."""
    q, k, v = qkv(1, 8, 2, 1500, 1500, 128)
    whole = prefill(q, k, v, causal=True, scale=None)
    for start, end in ((0, 100), (100, 613), (613, 1499), (1499, 1500)):
        chunk = prefill(q[:, :, start:end], k[:, :, :end], v[:, :, :end], causal=True, scale=None)
        assert compare.identical(chunk, whole[:, :, start:end])
    for split in (False, True):
        assert compare.identical(triton_attention.attention(q, k, v, split=split), whole)
        for at in (0, 7, 511, 512, 1023, 1499):
            one = [q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1]]
            assert compare.identical(triton_attention.attention(*one, split=split), whole[:, :, at : at + 1])
    shifted = prefill(q, k.roll(1, 2), v.roll(1, 2), causal=False, scale=None)  # the same sums in another order
    assert not compare.identical(shifted, prefill(q, k, v, causal=False, scale=None))


@pytest.mark.gpu
@on_hopper
def test_neighbours_layout_and_a_graph_change_no_bit():
    """A request alone or in a batch, contiguous by head, beside a cache's NaN, replayed from a CUDA graph."""
    q, k, v = qkv(3, 8, 2, 700, 900, 128)
    batch = prefill(q, k, v, causal=True, scale=None)
    for i in range(3):
        alone = [x[i : i + 1].contiguous() for x in (q, k, v)]
        assert compare.identical(prefill(*alone, causal=True, scale=None), batch[i : i + 1])
    cache = [torch.nn.functional.pad(x, (0, 0, 0, 100), value=math.nan)[:, :, :900] for x in (k, v)]
    assert compare.identical(prefill(q, *cache, causal=True, scale=None), batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill(q, k, v, causal=True, scale=None)
    q.copy_(q.flip(0))
    graph.replay()
    assert compare.identical(out, prefill(q, k, v, causal=True, scale=None))
    assert not compare.identical(out, batch)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_within_the_accuracy_bound(dtype, head_dim):
    """Against float64, causal and not, and with another scale: the bound over keys and head dim, and p's rounding."""
    q, k, v = qkv(1, 4, 2, 700, 1000, head_dim, dtype)
    bound = accuracy_bound(dtype, 1000) + accuracy_bound(torch.float32, head_dim)
    bound += torch.finfo(dtype).eps / 2
    for causal, scale in ((True, None), (False, None), (True, 0.5)):
        figures = compare.error_against(
            prefill(q, k, v, causal=causal, scale=scale), reference.attention(q, k, v, causal=causal, scale=scale)
        )
        assert figures.relative_norm <= bound
    with pytest.raises(ValueError, match="above 0"):
        prefill(q, k, v, causal=True, scale=0.0)
