"""The Hopper kernels: their bits are those of the one plan; what they take, and when they are chosen."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nondet.core import compare, inputs
from nondet.core.launch import listen
from nondet.kernels.attention import cuda, hopper, triton_kernels
from nondet.kernels.attention.cuda import Call, attention, attention_by_one_plan, attention_varlen, launch, quickest
from nondet.kernels.attention.hopper import prefill, supports
from nondet.kernels.attention.masks import starts
from nondet.kernels.attention.triton_kernels import Plan, Way, one_plan
from tests.kernels.tiers import captured, on_hopper


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def qkv(b, hq, hkv, tq, tk, d, dtype=torch.bfloat16, kind="bell"):
    """As a model lays them out, [B, T, H, D] seen as [B, H, T, D]."""
    rng = inputs.generator(0, "cuda")
    shapes = ((tq, hq), (tk, hkv), (tk, hkv))
    return tuple(inputs.make(kind, (b, t, h, d), dtype, "cuda", rng).transpose(1, 2) for t, h in shapes)


def of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return prefill(q, k, v, causal=True, scale=None)


@on_hopper
@pytest.mark.parametrize("kind", ["bell", "wide", "outlier"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_a_prefill_s_bits_are_those_of_the_one_plan(kind, dtype, causal):
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
        assert compare.identical(out, attention_by_one_plan(q, k, v, causal=causal)), shape
    scaled = prefill(q, k, v, causal=causal, scale=0.5)
    assert compare.identical(scaled, attention_by_one_plan(q, k, v, causal=causal, scale=0.5))
    with pytest.raises(ValueError, match="above 0"):
        prefill(q, k, v, causal=causal, scale=0.0)


@on_hopper
def test_neighbours_layout_and_a_graph_change_no_bit():
    """A request alone or in a batch, contiguous by head, beside a cache's NaN, replayed from a CUDA graph."""
    q, k, v = qkv(3, 8, 2, 700, 900, 128)
    batch = of(q, k, v)
    for _ in range(3):  # a call again, whose operands lie elsewhere
        assert compare.identical(attention(*(x.clone() for x in (q, k, v))), batch)
    for i in range(3):
        alone = [x[i : i + 1].contiguous() for x in (q, k, v)]
        assert compare.identical(of(*alone), batch[i : i + 1])
    cache = [torch.nn.functional.pad(x, (0, 0, 0, 100), value=math.nan)[:, :, :900] for x in (k, v)]
    assert compare.identical(of(q, *cache), batch)
    graph, out = captured(of, q, k, v)
    q.copy_(q.flip(0))
    graph.replay()
    assert compare.identical(out, of(q, k, v))
    assert not compare.identical(out, batch)


CPU = torch.device("cpu")


def call_of(q: torch.Tensor, k: torch.Tensor, **more: Any) -> Call:
    how = {"scale": None, "causal": True, "window": None, "softcap": None} | more
    return Call(q, k, k, torch.empty_like(q), q.shape[0], q.shape[2], k.shape[2], **how)


@pytest.fixture
def decoding_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are taken for those of a Hopper GPU of 132 multiprocessors."""
    monkeypatch.setattr(hopper, "available", lambda device: None)
    monkeypatch.setattr(cuda, "has_pdl", lambda device: True)


@pytest.mark.usefixtures("decoding_on_hopper")
def test_what_it_takes_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By dtype, head dim, mask, rows and layout; and where a user asks for split or not, the Triton kernels run."""
    step, keys = half(1, 8, 1, 128), half(1, 2, 1024, 128)
    for q, k, more, taken in (
        (step, keys, {}, True),
        (half(2, 8, 4, 64).half(), half(2, 2, 900, 64).half(), {"causal": False}, True),
        (step, half(1, 1024, 2, 128).transpose(1, 2), {}, True),
        (half(1, 8, 1, 96), half(1, 2, 1024, 96), {}, False),
        (step, keys, {"window": 100}, False),
        (step, keys, {"softcap": 30.0}, False),
        (half(1, 8, 5, 128), keys, {}, False),  # 20 rows
        (step, half(1, 2, 1024, 132)[..., :128], {}, False),  # 8 bytes
    ):
        call = call_of(q, k, **more)
        assert (quickest(call).tiles > 0) is taken
        assert quickest(call, True).tiles == quickest(call, False).tiles == 0

    way = triton_kernels.few_rows(8, 2, 128, CPU)
    others = [way._replace(plan=way.plan._replace(**change)) for change in ({"warps": 8}, {"stages": 3})]
    others += [way._replace(**{name: getattr(way, name) + 1}) for name in ("span", "tiles")]
    others += [way._replace(**{name: not getattr(way, name)}) for name in ("pdl", "lanes", "early")]
    assert len({way.name, *(other.name for other in others)}) == 8
    q8, k8 = half(1, 4, 8, 128), half(1, 2, 8, 128)
    assert hopper.SEGMENT == cuda.SEGMENT
    for q, k, options, reason in (
        (q8, k8, {}, None),
        (half(2, 4, 8, 64).half(), half(2, 2, 20, 64).half(), {"causal": False}, None),
        (half(1, 8, 4, 128).transpose(1, 2), half(1, 8, 2, 128).transpose(1, 2), {}, None),
        (q8.float(), k8.float(), {}, "float32"),
        (half(1, 4, 8, 96), half(1, 2, 8, 96), {}, "96"),
        (q8, k8, {"window": 4}, "window"),
        (q8, k8, {"softcap": 30.0}, "soft cap"),
        (half(1, 4, 9, 128), k8, {}, "8 and 9"),
        (half(1, 4, 128, 8).mT, k8, {}, "q's last stride"),
        (q8, half(1, 2, 8, 129)[..., 1:], {}, "k"),
        (half(1, 4, 8, 132)[..., :128], k8, {}, "16 bytes"),
        (q8, half(1, 1, 8, 128).expand(1, 2, 8, 128), {}, "k has strides"),
    ):
        call = {"causal": True, "window": None, "softcap": None} | options
        fault = supports(q, k, k, **call)
        assert fault is None if reason is None else reason in fault
    # while torch.compile traces, the answer is no, before anything is asked that a traced tensor cannot say
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q, k = (torch.empty(1, heads, n, 128, device="meta") for heads, n in ((8, 1), (2, 700)))
    assert "torch.compile" in supports(q, k, k, True, None, None)
    assert not cuda.has_few_row_kernels(call_of(q, k))


WAYS = {"a segment at a time": (4, 6, 4), "two programs to a multiprocessor": (4, 3, 2)}  # warps, slots, tiles


def gluon_way(name: str, d: int, span: int) -> Way:
    warps, slots, tiles = WAYS[name]
    return Way(Plan(16, 128, d, warps, slots, False), span, span > 0, tiles, span > 0, True)


def decode_qkv(b, hq, hkv, tq, tk, d, dtype=torch.bfloat16, kind="bell") -> list[torch.Tensor]:
    rng = inputs.generator(3 * tk + tq, torch.device("cuda"))
    shapes = ((b, hq, tq, d), (b, hkv, tk, d), (b, hkv, tk, d))
    return [inputs.make("bell" if i < 1 else kind, shape, dtype, "cuda", rng) for i, shape in enumerate(shapes)]


def by(way: Way, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    launch(Call(q, k, v, out, q.shape[0], q.shape[2], k.shape[2], None, causal, None, None), way)
    return out


@on_hopper
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("span", [0, 1, 3])
def test_its_bits_are_those_of_the_one_plan(name: str, span: int) -> None:
    """Lengths around tiles and segments, more segments than a merge takes at once, both head dims, several blocks."""
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
        given = (*decode_qkv(b, hq, hkv, tq, tk, d, dtype, kind), causal)
        assert compare.identical(by(gluon_way(name, d, span), *given), by(one_plan(d, dtype), *given)), (tk, d)
    if span:  # the merge alone, behind the Triton kernel
        way = Way(triton_kernels.plan_for(1, 128, torch.bfloat16), span, True, lanes=True)
        q, k, v = decode_qkv(2, 8, 2, 2, 3000, 128, kind="outlier")
        assert compare.identical(by(way, q, k, v), by(one_plan(128, torch.bfloat16), q, k, v))


@on_hopper
@pytest.mark.parametrize("page", hopper.PAGES)
@pytest.mark.parametrize("name", WAYS)
def test_over_pages_its_bits_are_those_of_the_one_plan(name: str, page: int) -> None:
    """Pages anywhere in a cache that holds NaN wherever none of these requests wrote, last pages' ends among it."""
    for lengths, queries, hq, hkv, d, kind in (
        ([1, 129, 1024, 513, 2100, 64, 16, 17], 1, 32, 8, 128, "wide"),
        ([700, 1], 1, 16, 8, 128, "bell"),
        ([9000], 1, 32, 8, 128, "outlier"),
        ([40, 1300], 3, 8, 2, 128, "wide"),
        ([1700, 600], 2, 14, 2, 64, "bell"),
    ):
        dtype = torch.bfloat16 if d == 128 else torch.float16
        counts = [-(-n // page) for n in lengths]
        pages = torch.randperm(sum(counts) + 5, device="cuda").to(torch.int32)
        cache = torch.full((2, hkv, len(pages) * page, d), torch.nan, device="cuda", dtype=dtype)
        alone, index = [], []
        for i, n in enumerate(lengths):
            q, k, v = decode_qkv(1, hq, hkv, queries, n, d, dtype, kind)
            mine = pages[sum(counts[:i]) :][: counts[i], None] * page + torch.arange(page, device="cuda")
            places = mine.flatten()[:n]
            cache[0][:, places], cache[1][:, places] = k[0], v[0]
            index.append(places.to(torch.int32))
            alone.append((q, by(one_plan(d, dtype), q, k, v)))
        q, expected = (torch.cat([pair[i] for pair in alone], 2) for i in (0, 1))
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1)[None] for x in cache)
        cu_q, cu_k = (starts(each, torch.device("cuda")) for each in ([queries] * len(lengths), lengths))
        for span in (0, 1, 2):
            out = torch.full_like(q, torch.nan)
            sizes = (len(lengths), queries, max(lengths), None, True, None, None)
            call = Call(q, k, v, out, *sizes, cu_q, cu_k, key_index=torch.cat(index), page=page)
            launch(call, gluon_way(name, d, span))
            assert compare.identical(out, expected), (lengths, span)


@on_hopper
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [700, 9000, 40000])
def test_a_step_that_starts_early_waits_for_what_it_reads(tokens: int, packed: bool) -> None:
    """In a graph, each step's query, and a key and a value that it sees, are the step before's: none may be stale."""
    q, k, v = decode_qkv(2, 32, 8, 1, tokens, 128, kind="wide")
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
    graph, result = captured(steps, step)
    for _ in range(4):
        first.copy_(torch.randn_like(first))
        graph.replay()
        ran = result.clone()
        assert compare.identical(ran, steps(lambda out: attention_by_one_plan(out, keys, values)))
