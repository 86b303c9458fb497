"""Decode attention in Gluon on a GPU: the bits of the one plan, whatever the way, and nothing is read too early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nondet.core import compare, inputs
from nondet.core.launch import listen
from nondet.kernels.attention import triton_kernels
from nondet.kernels.attention.cuda import Call, attention, attention_by_one_plan, attention_varlen, launch
from nondet.kernels.attention.triton_kernels import Plan, Way, one_plan

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs compute capability 9.0")

WAYS = {"a segment at a time": (4, 6, 4), "two programs to a multiprocessor": (4, 3, 2)}  # warps, slots, tiles


def qkv(b: int, hq: int, hkv: int, tq: int, tk: int, d: int, dtype: torch.dtype, kind: str) -> list[torch.Tensor]:
    rng = inputs.generator(3 * tk + tq, torch.device("cuda"))
    shapes = ((b, hq, tq, d), (b, hkv, tk, d), (b, hkv, tk, d))
    return [inputs.make("bell" if i < 1 else kind, shape, dtype, "cuda", rng) for i, shape in enumerate(shapes)]


def by(way: Way, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    launch(Call(q, k, v, out, q.shape[0], q.shape[2], k.shape[2], None, causal, None, None), way)
    return out


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("span", [0, 1, 3])
def test_its_bits_are_those_of_the_one_plan(name: str, span: int) -> None:
    """Lengths around tiles and segments, more segments than a merge takes at once, both head dims, several blocks."""
    warps, slots, tiles = WAYS[name]
    for b, hq, hkv, tq, tk, d, kind, causal in (
        (2, 8, 2, 1, 1024, 128, "bell", True),
        (1, 8, 2, 1, 1, 128, "bell", True),
        (2, 8, 2, 1, 129, 128, "wide", True),
        (1, 8, 2, 2, 513, 128, "outlier", True),
        (3, 8, 2, 3, 2100, 128, "wide", False),
        (2, 8, 2, 9, 1300, 128, "bell", True),
        (1, 8, 2, 4, 3, 128, "bell", True),  # a query that sees no key
        (1, 8, 2, 9, 2, 128, "bell", True),  # a whole block of them
        (1, 32, 8, 1, 35000, 128, "wide", True),
        (2, 14, 2, 2, 1700, 64, "wide", True),
    ):
        dtype = torch.bfloat16 if d == 128 else torch.float16
        q, k, v = qkv(b, hq, hkv, tq, tk, d, dtype, kind)
        way = Way(Plan(16, 128, d, warps, slots, False), span, span > 0, tiles, span > 0, True)
        assert compare.identical(by(way, q, k, v, causal), by(one_plan(d, dtype), q, k, v, causal)), (tk, d)
    if span:  # the merge alone, behind the Triton kernel
        way = Way(triton_kernels.plan_for(1, 128, torch.bfloat16), span, True, lanes=True)
        q, k, v = qkv(2, 8, 2, 2, 3000, 128, torch.bfloat16, "outlier")
        assert compare.identical(by(way, q, k, v), by(one_plan(128, torch.bfloat16), q, k, v))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", WAYS)
def test_infinities_and_nan_are_those_of_the_one_plan(name: str) -> None:
    """NaN and infinite keys and values, within a segment and over a whole one: the same bits reach the same rows."""
    warps, slots, tiles = WAYS[name]
    for what in ("nan key", "infinite value", "infinite keys", "large keys"):
        q, k, v = qkv(2, 8, 2, 1, 2500, 128, torch.bfloat16, "bell")
        if what == "nan key":
            k[0, 0, 700, 3] = torch.nan
        elif what == "infinite value":
            v[0, 1, 1200, :5] = torch.inf
        elif what == "infinite keys":
            k[1, 0, 512:1024] = torch.inf
        else:
            k[1, 1, 100:1500] *= 1e30
        expected = by(one_plan(128, torch.bfloat16), q, k, v)
        for span in (0, 1):
            way = Way(Plan(16, 128, 128, warps, slots, False), span, span > 0, tiles, span > 0, True)
            assert compare.identical(by(way, q, k, v), expected), (what, span)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [700, 9000, 40000])
def test_a_step_that_starts_early_waits_for_what_it_reads(tokens: int, packed: bool) -> None:
    """In a graph, each step's query, and a key and a value that it sees, are the step before's: none may be stale."""
    q, k, v = qkv(2, 32, 8, 1, tokens, 128, torch.bfloat16, "wide")
    first = q.clone()
    keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # [B, T, H, D] in memory
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (1, tokens))
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 1, "max_seqlen_k": tokens}

    def step(out: torch.Tensor) -> torch.Tensor:
        if packed:
            cache = (x.transpose(1, 2).flatten(0, 1) for x in (keys, values))
            return attention_varlen(out[:, :, 0], *cache, **lengths)[:, :, None]
        return attention(out, keys, values)

    def steps(one: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        keys.copy_(k)
        values.copy_(v)
        out = first
        for number in range(4):
            keys[:, :, tokens // 2 + number] = out[:, ::4, 0]
            values[:, :, tokens - 1 - number] = out[:, 1::4, 0]
            out = one(out)
        return out

    steps(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = steps(step)
    for _ in range(4):
        first.copy_(torch.randn_like(first))
        graph.replay()
        ran = result.clone()
        assert compare.identical(ran, steps(lambda out: attention_by_one_plan(out, keys, values)))


@pytest.mark.gpu
@on_hopper
def test_it_is_what_a_decode_step_runs() -> None:
    """Dense steps run it, packed ones its merge, once proven; and both have the bits of a prefill."""
    q, k, v = qkv(1, 32, 8, 3000, 3000, 128, torch.bfloat16, "bell")
    whole = attention(q, k, v)
    for at in (0, 127, 511, 512, 1023, 2047, 2999):
        step = [q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1]]
        attention(*step)
        with listen() as notes:
            out = attention(*step)
        assert compare.identical(out, whole[:, :, at : at + 1])
        assert all("decode" in name for name in notes), notes
        tokens = [x[0].transpose(0, 1).contiguous() for x in step]
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (1, at + 1))
        packed = attention_varlen(*tokens, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=1, max_seqlen_k=at + 1)
        assert compare.identical(packed, out[0].transpose(0, 1))
