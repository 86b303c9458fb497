"""The attention backend against toys of vLLM's, in Triton's interpreter: places of keys, launches, pages anywhere."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nondet.core import compare
from nondet.core.certificates import Certificates
from nondet.engines import attention
from nondet.errors import UserError
from nondet.kernels import triton_common
from nondet.kernels.attention import cuda, hopper, triton_kernels
from tests.kernels.tiers import at_length
from tests.vllm import toys

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16
SPEC = SimpleNamespace(block_size=PAGE, dtype=torch.float16)
NEEDED = {"num_heads": HEADS, "head_size": DIM, "scale": DIM**-0.5, "num_kv_heads": KV_HEADS, "alibi_slopes": None}
NEEDED |= {"sliding_window": None, "kv_cache_dtype": "auto"}


pytestmark = pytest.mark.slow
LAYOUTS = pytest.mark.parametrize("version", ["0.25.1", "0.26.0", *at_length("0.29.0")])


@pytest.fixture
def version() -> str:
    """The cache: [blocks, 2, page, heads, dim], or [blocks, heads, page, 2 dim] of vLLM 0.26 and later."""
    return "0.25.1"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, version: str) -> Iterator[ModuleType]:
    """nondet.vllm.attention over the toy's FlashAttention; it is loaded anew, and gone afterwards."""
    for name, module in toys.modules(version=version).items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("nondet.vllm.attention", None)
    yield importlib.import_module("nondet.vllm.attention")
    sys.modules.pop("nondet.vllm.attention", None)


@LAYOUTS
def test_views_of_a_cache_are_those_of_its_flat_form(backend: ModuleType) -> None:
    shape = (5, KV_HEADS, PAGE, 2 * DIM) if backend.IN_ROWS else (5, 2, PAGE, KV_HEADS, DIM)
    cache = torch.arange(3 * 5 * 2 * PAGE * KV_HEADS * DIM, dtype=torch.float64).view(3, *shape)[1]
    cache = cache.view(5, PAGE, KV_HEADS, 2 * DIM).transpose(1, 2) if backend.IN_ROWS else cache
    rows = cache.transpose(1, 2).reshape(-1, KV_HEADS, 2 * DIM) if backend.IN_ROWS else cache.reshape(-1, KV_HEADS, DIM)
    flat = rows.split(DIM, -1) if backend.IN_ROWS else (rows[:-PAGE], rows[PAGE:])
    page, *views = backend.dense_views(cache)
    assert page == PAGE
    for one, view in zip(flat, views, strict=True):
        assert compare.identical(view, cuda.as_dense(one))
        assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def step(
    backend: ModuleType, impl: Any, lengths: list[int], new: list[int], seed: int = 0, pages_seed: int = 1, pad: int = 0
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    """Requests of so many keys, the last `new` of each asked: (output [T, H, D], each one's q, k, v). Requests'
    contents follow from `seed`, the places of their pages from `pages_seed`; `pad` requests have no token."""
    rng = torch.Generator().manual_seed(seed)
    each = [tuple(torch.randn(n, h, DIM, generator=rng).half() for n, h in ((q, HEADS), (t, KV_HEADS), (t, KV_HEADS)))
            for t, q in zip(lengths, new, strict=True)]  # fmt: skip
    most = -(-max(lengths) // PAGE)
    free = torch.randperm(len(lengths) * most + 3, generator=torch.Generator().manual_seed(pages_seed)).tolist()
    shape = (PAGE, KV_HEADS, 2 * DIM) if backend.IN_ROWS else (2, PAGE, KV_HEADS, DIM)
    cache = torch.full((len(free), *shape), 7.0).half()
    cache = cache.transpose(1, 2) if backend.IN_ROWS else cache
    table = torch.zeros(len(lengths) + pad, most, dtype=torch.int32)
    for i, (_, k, v) in enumerate(each):
        pages = [free.pop() for _ in range(-(-len(k) // PAGE))]
        table[i, : len(pages)] = torch.tensor(pages)
        slots = torch.tensor([pages[j // PAGE] * PAGE + j % PAGE for j in range(len(k))])
        impl.do_kv_cache_update(None, k, v, cache, slots)
    starts = torch.tensor([0, *new, *[0] * pad]).cumsum(0).to(torch.int32)
    common = SimpleNamespace(
        num_reqs=len(lengths) + pad, num_actual_tokens=sum(new), max_query_len=max(new), max_seq_len=max(lengths),
        query_start_loc=starts, query_start_loc_cpu=starts, causal=True, block_table_tensor=table,
        seq_lens=torch.tensor([*lengths, *[0] * pad], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([*lengths, *[0] * pad]),
    )  # fmt: skip
    layers = {"layer": SimpleNamespace(impl=impl)}
    config = toys.config(compilation_config__static_forward_context=layers, model_config__heads=HEADS)
    meta = backend.SegmentsBuilder(SPEC, ["layer"], config, torch.device("cpu")).build(0, common)
    query = torch.cat([q for q, _, _ in each])
    out = torch.full((len(query) + pad, HEADS, DIM), torch.nan).half()
    padded = torch.cat([query, query.new_zeros(pad, HEADS, DIM)])
    impl.forward(None, padded, None, None, cache, meta, out)
    return out[: len(query)], each


def exact(each: list[tuple[torch.Tensor, ...]], window: int | None = None, cap: float = torch.inf) -> torch.Tensor:
    """The answers in float64, each request alone."""
    parts = []
    for q, k, v in each:
        far, wide = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None], HEADS // KV_HEADS
        scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(wide, 1)) * DIM**-0.5
        scores = cap * torch.tanh(scores / cap) if cap < torch.inf else scores
        hidden = (far > 0) | (far <= -window if window else far > len(k))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v.double().repeat_interleave(wide, 1)))
    return torch.cat(parts)


@LAYOUTS
@pytest.mark.parametrize(
    ("lengths", "new"),
    [([5, 40, 33, 20], [1, 1, 9, 20]), *at_length(([5, 40, 17], [1, 1, 1]), ([30], [30]), ([20, 9, 40], [20, 1, 7]))],
)
def test_a_step_over_pages_anywhere(backend: ModuleType, lengths: list[int], new: list[int]) -> None:
    impl = backend.SegmentsImpl(**NEEDED)
    out, each = step(backend, impl, lengths, new)
    torch.testing.assert_close(out.double(), exact(each), rtol=5e-3, atol=5e-3)
    assert compare.identical(out, step(backend, impl, lengths, new, pages_seed=9)[0])
    assert compare.identical(out, step(backend, impl, lengths, new, pad=2)[0])
    assert not compare.identical(out, step(backend, impl, lengths, new, seed=1)[0])


def test_later_layers_are_launched_as_the_first(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    compute = attention.compute
    monkeypatch.setattr(attention, "compute", lambda *call, **how: computed.append(how) or compute(*call, **how))
    asked: tuple[list[int], list[int]] = ([5, 40, 33, 20], [1, 1, 9, 20])
    impl = backend.SegmentsImpl(**(NEEDED | {"sliding_window": 8}))
    firsts = []
    for seed in (0, 1):
        triton_common.forget()
        firsts.append(step(backend, impl, *asked, seed=seed)[0])
    triton_common.forget()
    computed.clear()
    for seed in (1, 0):
        out, each = step(backend, impl, *asked, seed=seed, pages_seed=seed + 5)
        torch.testing.assert_close(out.double(), exact(each, 8), rtol=5e-3, atol=5e-3)
        assert compare.identical(out, firsts[seed])
    assert len(computed) == 2  # decodes, and what has more queries
    step(backend, backend.SegmentsImpl(**(NEEDED | {"sliding_window": 16})), *asked)
    step(backend, impl, [5, 41, 33, 20], asked[1])
    assert len(computed) == 6


def test_soft_caps_are_asked_as_vllm_means_them(backend: ModuleType) -> None:
    """Of the scores, after their scale; with a window as in Gemma 2; other pages change no bit."""
    impl = backend.SegmentsImpl(**(NEEDED | {"logits_soft_cap": 0.5, "sliding_window": 8}))
    out, each = step(backend, impl, [40, 33], [1, 9])
    torch.testing.assert_close(out.double(), exact(each, cap=0.5, window=8), rtol=5e-3, atol=5e-3)
    assert (out.double() - exact(each, window=8)).abs().max() > 0.05
    assert compare.identical(out, step(backend, impl, [40, 33], [1, 9], pages_seed=9)[0])


def test_a_large_chunk_is_gathered_to_the_same_answers(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "DENSE_ITEMS", 1)
    monkeypatch.setattr(attention, "DENSE_WORK", HEADS * 90 * 70)
    seen: list[tuple[int, ...]] = []
    dense = attention.attention
    monkeypatch.setattr(
        attention, "attention", lambda q, *rest, **more: seen.append(q.shape) or dense(q, *rest, **more)
    )
    impl, asked = backend.SegmentsImpl(**NEEDED), ([20, 90, 9], [1, 70, 9])
    out, each = step(backend, impl, *asked)
    assert seen == [(1, HEADS, 70, DIM)]
    torch.testing.assert_close(out.double(), exact(each), rtol=5e-3, atol=5e-3)
    monkeypatch.setattr(
        attention, "DENSE_WORK", HEADS * 90 * 70 + 1
    )  # through its block table: a matter of speed alone
    assert compare.identical(step(backend, impl, *asked)[0], out)
    assert len(seen) == 1


def test_launches_of_a_step() -> None:
    piece = attention.Piece
    of = attention.pieces_of
    assert of([0, 1, 2, 3], [9, 9, 9], 50, 8, True) == [piece(0, 3, 1, 50)]
    assert of([0, 1, 2, 7, 20], [9, 9, 9, 30], 50, 8, True) == [piece(0, 2, 1, 50), piece(2, 4, 13, 50)]
    assert of([0, 1, 2049, 2054], [9, 15000, 30], 15000, 8, True) == [
        piece(0, 1, 1, 15000),
        piece(1, 2, 2048, 15000, (1, 2049)),
        piece(2, 3, 5, 15000),
    ]
    whole, first = [piece(0, 2, 2048, 15000)], piece(0, 1, 2048, 15000, (0, 2048))
    assert of([0, 2048, 4096], [15000, 3000], 15000, 8, True) == [first, piece(1, 2, 2048, 15000)]
    assert of([0, 2048, 4096], [3000, 3000], 15000, 8, True) == whole
    assert of([0, 2048, 4096], None, 15000, 8, True) == of([0, 2048, 4096], [15000, 15000], 15000, 8, False) == whole
    assert of([0, 1, 6, 6, 6], [9, 9, 0, 0], 50, 8, True) == [piece(0, 1, 1, 50), piece(1, 2, 5, 50)]


def test_what_it_does_not_do_is_refused_by_name(backend: ModuleType) -> None:
    for name, value, said in (
        ("alibi_slopes", [1.0], "no ALiBi"),
        ("sinks", torch.zeros(4), "no attention sinks"),
        ("kv_cache_dtype", "fp8", "no a fp8 KV cache|no fp8 KV cache"),
        ("attn_type", "encoder", "no encoder attention"),
        ("head_size", 512, "no heads of 512"),
    ):
        with pytest.raises(UserError, match=said):
            backend.SegmentsImpl(**(NEEDED | {name: value}))
    builder = backend.SegmentsBuilder(SPEC, [], toys.config(), torch.device("cpu"))
    with pytest.raises(UserError, match="is causal"):
        builder.build(0, SimpleNamespace(causal=False))


@LAYOUTS
def test_the_backend_answers_vllms_questions(backend: ModuleType) -> None:
    it = backend.SegmentsBackend
    assert it.supports_batch_invariance()
    assert it.get_required_kv_cache_layout() == "NHD"
    assert it.supports_head_size(64)
    assert not it.supports_head_size(260)
    assert not it.supports_kv_cache_dtype("fp8_e4m3")
    assert not any([it.supports_sink(), it.supports_mm_prefix(), it.supports_non_causal()])
    assert not backend.SegmentsBuilder.supports_update_block_table
    if hasattr(it, "get_kv_cache_shape"):
        assert it.get_kv_cache_shape(3, 16, 2, 32) == ((3, 2, 16, 64) if backend.IN_ROWS else (3, 2, 16, 2, 32))
    else:
        assert it.supported_kv_cache_layouts() == (toys.KVCacheLayout.LBNHC,)
    if backend.IN_ROWS:
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            backend.dense_views(torch.zeros(3, 2, 16, 64))  # head by head, as no layout has it that was asked for


@pytest.mark.parametrize(
    ("heads", "kv_heads", "requests", "longest"), [(8, 4, 64, 1024), *at_length((32, 8, 260, 9000), (4, 2, 9, 400))]
)
def test_no_step_is_launched_in_another_way(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, requests: int, longest: int
) -> None:
    """On a Hopper, of which multiprocessors are counted: any number of requests, over any number of keys."""
    monkeypatch.setattr(hopper, "available", lambda device: None)
    impl = backend.SegmentsImpl(**(NEEDED | {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": 128}))
    cache = backend.example(impl.as_layer, torch.float16, torch.device("cpu"))
    ways = attention.ways_of(impl.as_layer, cache, requests, longest, 16)
    call = next(call for call in ways.values() if call.tq == 1)
    steps = {
        attention.way_for(call._replace(requests=n, tk=min(512 * segments, longest)))
        for n in range(1, requests + 1)
        for segments in range(1, -(-longest // 512) + 1)
    }
    assert steps == {way for way in ways if way.tiles}
    assert len(ways) <= 16
    assert all(way.span & (way.span - 1) == 0 for way in ways)


def test_a_second_start_proves_nothing(backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kept = Certificates({"device": "a test's"}, tmp_path)
    monkeypatch.setattr(cuda, "certificates", lambda: kept)
    monkeypatch.setattr(triton_kernels, "SEGMENT", 128)
    cases = cuda.proof_cases
    monkeypatch.setattr(cuda, "proof_cases", lambda *how: itertools.islice(cases(*how), 1))
    for name, small in (("PROOF_HEADS", 1), ("PROOF_BLOCKS", 0.05), ("PROOF_KINDS", ("values",))):
        monkeypatch.setattr(cuda, name, small)
    cuda.forget()
    impls = [backend.SegmentsImpl(**(NEEDED | {"sliding_window": 8, "head_size": 16})) for _ in range(2)]
    for proofs in (2, 0):
        caches = functools.partial(backend.example, dtype=torch.float16, device=torch.device("cpu"))
        said = attention.warm((impl.as_layer for impl in impls), caches, 2, 100, PAGE)
        assert said.startswith(f"attention in 2 ways: {proofs} proofs, 0 kernels compiled, in ")
        kept = Certificates({"device": "a test's"}, tmp_path)  # as another process reads them
        cuda.forget()


def test_the_index_of_keys_is_made_before_memory_is_measured(backend: ModuleType) -> None:
    windows = [None, *[8] * 5, None, *[8] * 2]
    layers = [toys.Attention(backend.SegmentsImpl(**(NEEDED | {"sliding_window": w}))) for w in windows]
    backend.reserve(torch.nn.Sequential(toys.RMSNorm(8), *layers), toys.config(model_config__max_model_len=2**18))
    assert len(backend.RESERVED) == 1 + 4
    assert toys.LOG[-1] == "nondet: attention keeps 40 MiB for the index of each key of a step."
    made = backend.RESERVED[-1]
    builders = [backend.SegmentsBuilder(SPEC, [], toys.config(), torch.device("cpu")) for _ in range(6)]
    assert builders[0].key_index is made
    assert len({one.key_index.data_ptr() for one in builders}) == 6
    assert backend.RESERVED == []


def test_the_copy_engine_brings_what_lies_together(backend: ModuleType) -> None:
    x, places = torch.zeros(1, HEADS, 1, DIM), torch.zeros(2, dtype=torch.int32)
    for page, together in ((16, 16), (48, 16), (64, 64), (128, 128), (256, 128), (384, 128)):
        call = backend.SegmentsImpl(**NEEDED).as_layer.call((x,) * 4, (1, 1, 1), (places,) * 3, page)
        assert call.page == together
