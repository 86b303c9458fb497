"""Attention on a CPU: one query, one answer, whether prefilled, chunked, decoded, batched, packed or padded."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from nondet.core.certificates import Certificates
from nondet.core.compare import error_against, identical
from nondet.core.inputs import generator, make
from nondet.errors import UserError
from nondet.kernels import reference
from nondet.kernels.attention import cpu as cpu_attention
from nondet.kernels.attention.cpu import attention, attention_varlen
from nondet.kernels.attention.masks import Span, attend_packed, packing_of, spans_of
from tests.build import accuracy_bound
from tests.kernels.tiers import at_length

LENGTH = 150
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype, heads=(4, 2), dim=64, kind="bell", batch=2) -> Three:
    rng = generator(4, "cpu")
    q, k, v = (make(kind, (batch, h, LENGTH, dim), dtype, "cpu", rng) for h in (heads[0], heads[1], heads[1]))
    return q, k, v


def upto(x: Three, start: int, end: int) -> Three:
    return x[0][:, :, start:end], x[1][:, :, :end], x[2][:, :, :end]


def ends(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0)


def packed(x: Three, pieces: list[tuple[int, int, int]], **more: Any) -> list[torch.Tensor]:
    """Of each (b, start, end): queries [start, end) of row b over all keys up to `end`."""
    q = torch.cat([x[0][b, :, s:e].transpose(0, 1) for b, s, e in pieces])
    k, v = (torch.cat([y[b, :, :e].transpose(0, 1) for b, _, e in pieces]) for y in x[1:])
    sizes, keys = [e - s for _, s, e in pieces], [e for *_, e in pieces]
    lengths = {"cu_seqlens_q": ends(sizes), "cu_seqlens_k": ends(keys), "max_seqlen_q": max(sizes)}
    out = attention_varlen(q, k, v, **lengths, max_seqlen_k=LENGTH, **more)
    return [part.transpose(0, 1) for part in out.split(sizes)]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, "wide"),
        (torch.bfloat16, "outlier"),
        *at_length((torch.float16, "bell"), (torch.float32, "bell"), (torch.bfloat16, "wide")),
    ],
)
def test_decode_and_chunks_have_the_bits_of_the_prefill(threads: int, dtype: torch.dtype, kind: str) -> None:
    """Every position, decoded alone, and chunks that begin and end anywhere, around the borders of blocks too; whatever
    stands in the keys after them."""
    x = inputs(dtype, kind=kind)
    whole = attention(*x)
    chunks = ((0, 64), (3, 20), (63, 65), (13, 140), (128, 150))
    for start, end in (*((p, p + 1) for p in (0, 1, 62, 63, 64, 65, 127, 128, LENGTH - 1)), *chunks):
        assert identical(attention(*upto(x, start, end)), whole[:, :, start:end])
    x[1][:, :, 70:], x[2][:, :, 70:] = 1e4, -1e4
    assert identical(attention(*x)[:, :, :70], whole[:, :, :70])


@pytest.mark.parametrize(
    ("heads", "dim"), [((4, 2), 64), *at_length(((6, 6), 80), ((8, 1), 16), ((4, 2), 16), ((6, 6), 64), ((8, 1), 80))]
)
def test_packed_requests_have_the_bits_they_have_alone(heads: tuple[int, int], dim: int) -> None:
    """A pack of decodes and chunks, in any order and company, for grouped, equal and single key heads; queries of
    nobody, with which an engine fills a step up, get zeros."""
    x = inputs(torch.float32, heads, dim)
    whole = attention(*x)
    decodes = [(b, p, p + 1) for b in (0, 1) for p in range(0, LENGTH, 13)]
    mixes = (decodes, [*decodes[:5], (0, 30, 94), (1, 0, 150)], [(1, 149, 150)], [(0, 5, 6), (1, 5, 6), (0, 0, 64)])
    for pieces in mixes:
        for (b, start, end), got in zip(pieces, packed(x, pieces), strict=True):
            assert identical(got, whole[b, :, start:end])
    assert identical(torch.cat([attention(*(y[b : b + 1] for y in x)) for b in (0, 1)]), whole)
    q, k, v = (y[0, :, :9].transpose(0, 1) for y in x)
    cu = torch.tensor([0, 5, 5, 5])
    padded = attention_varlen(q, k[:5], v[:5], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5)
    assert identical(padded[:5].transpose(0, 1), whole[0, :, :5])
    assert not padded[5:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_values(dtype: torch.dtype, causal: bool) -> None:
    for heads in ((4, 2), (6, 6), (8, 1)):
        q, k, v = inputs(dtype, heads)
        bound = accuracy_bound(dtype, LENGTH + 64)
        for start in (0, 100, LENGTH - 1):
            got = attention(q[:, :, start:], k, v, causal=causal, scale=0.2)
            right = reference.attention(q[:, :, start:], k, v, causal=causal, scale=0.2)
            assert error_against(got, right).relative_norm <= bound, heads


@pytest.mark.parametrize(
    ("window", "cap"), [(40, None), (40, 0.7), *at_length((1, None), (64, None), (1000, None), (None, 0.7))]
)
def test_a_window_hides_keys_and_a_soft_cap_bends_the_scores(window: int | None, cap: float | None) -> None:
    x = q, k, v = inputs(torch.float32, (2, 2), batch=1)
    how = {"softcap": cap, "window": window}
    got = attention(*x, **how)
    position = torch.arange(LENGTH)
    seen = (position[None] <= position[:, None]) & (position[None] > position[:, None] - (window or LENGTH))
    scores = q.double() @ k.double().mT / 8
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    right = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v.double()
    assert error_against(got, right).relative_norm <= accuracy_bound(torch.float32, LENGTH)
    for p in (0, 63, 64, 149):
        assert identical(attention(*upto(x, p, p + 1), **how), got[:, :, p : p + 1])
        assert identical(packed(x, [(0, p, p + 1)], **how)[0], got[0, :, p : p + 1])
    assert window == 1 or not identical(attention(*x, softcap=0.8, window=window), got)


def test_layouts_and_places_in_a_cache_do_not_matter() -> None:
    """Heads before tokens or after, cached keys cut out of a longer cache: the same bits. Floats of 8 bits are those
    numbers."""
    q, k, v = inputs(torch.bfloat16)
    right = attention(q, k, v)
    assert identical(attention(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))), right)
    assert identical(attention(q, *(torch.cat([x, x], 2)[:, :, :LENGTH] for x in (k, v))), right)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        narrow = [x[:, :, -n:].to(dtype) for x, n in zip((q, k, v), (1, 70, 70), strict=True)]
        assert identical(attention(*narrow).float(), attention(*(x.float() for x in narrow)).to(dtype).float())
    q, k, v = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in inputs(torch.bfloat16))
    more = {"cu_seqlens_q": ends([1, 1]), "cu_seqlens_k": ends([70, 30]), "max_seqlen_q": 1, "max_seqlen_k": 70}
    index = torch.randint(len(k), (100,), generator=generator(5, "cpu"))
    gathered = attention_varlen(q[:2], k[index], v[index], **more)
    assert identical(attention_varlen(q[:2], k, v, key_index=index, **more), gathered)


def test_misuse_is_refused_and_a_broken_promise_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If blocks were merged in an order that depends on the batch, the first use would say so and not compute."""
    q, k, v = inputs(torch.float32)
    tokens = [x[0].transpose(0, 1)[:n] for x, n in ((q, 2), (k, 9), (v, 9))]
    sizes = {"cu_seqlens_q": ends([2]), "cu_seqlens_k": ends([9]), "max_seqlen_q": 2, "max_seqlen_k": 99}
    for call, given, how, words in (
        (attention, (q, k[:, :, :10], v[:, :, :10]), {}, "150 queries but 10 keys"),
        (attention, (q.double(), k.double(), v.double()), {}, "float64"),
        (attention, (q[:, :3], k, v), {}, "multiple"),
        (attention, (q.clone().requires_grad_(), k, v), {}, "no gradients"),
        (attention_varlen, tokens, {"window": 9, "positions": torch.tensor([5, 6])}, "9 keys up to position 6"),
        (attention_varlen, tokens, {"positions": ends([50])}, "positions"),
    ):
        with pytest.raises(UserError, match=words):
            call(*given, **how, **(sizes if call is attention_varlen else {}))
    honest, kept = cpu_attention.computed, Certificates({"device": "cpu"}, None)

    def dishonest(q: torch.Tensor, *more: Any) -> torch.Tensor:
        result = honest(q, *more)
        return torch.nextafter(result, torch.ones(())) if q.numel() >= 100 * q.shape[-1] else result

    monkeypatch.setattr(cpu_attention, "computed", dishonest)
    monkeypatch.setattr(cpu_attention, "VERIFIED", {})
    monkeypatch.setattr(cpu_attention, "certificates", lambda device: kept)
    with pytest.raises(RuntimeError, match="other bits in the batch"):
        attention(*inputs(torch.float32))


def causal(q_len: int, k_len: int, hidden_left: int = 0, hidden_right: int = 0, window: int = 99) -> np.ndarray:
    """Queries at the end of k_len keys, some keys on either side padding; each sees the last `window` keys."""
    position, key = np.arange(q_len)[:, None] + k_len - q_len, np.arange(k_len)[None]
    seen = (key <= position) & (key > position - window)
    return seen & (key >= hidden_left) & (key < k_len - hidden_right)


def test_what_masks_mean() -> None:
    """Rows that see nothing are padding; padding after the real queries sees every real key; the others are causal."""
    static = np.pad(causal(3, 7), ((0, 0), (0, 9)))  # a cache longer than what it holds
    packed = np.zeros((8, 16), dtype=bool)  # a decode, a chunk, a prefill, then padding
    for block, q, k in ((causal(1, 5), 0, 0), (causal(3, 7), 1, 5), (causal(2, 2), 4, 12)):
        packed[q : q + block.shape[0], k : k + block.shape[1]] = block
    ended = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]], dtype=bool)
    # behind a window it sees fewer and fewer keys, which no window leaves; the real queries keep their anchor
    behind = [Span(0, 0, 6, 0, 6, True, 4), *(Span(0, q, q + 1, q - 3, 6, False) for q in (6, 7, 8))]
    for what, visible, queries, spans in (
        ("a window that ends", [ended], 4, [Span(0, 0, 3, 0, 3, True, 2), Span(0, 3, 4, 0, 4, True)]),
        ("left padding", [causal(6, 6), causal(6, 6, 2)], 6, [Span(0, 0, 6, 0, 6, True), Span(1, 2, 6, 2, 6, True)]),
        ("right padding", [causal(6, 6, 0, 2)], 6, [Span(0, 0, 4, 0, 4, True), Span(0, 4, 6, 0, 4, False)]),
        ("a chunk", [causal(3, 10, 4)], 3, [Span(0, 0, 3, 4, 10, True)]),
        ("a decode", [causal(1, 10, 4)], 1, [Span(0, 0, 1, 4, 10, True)]),
        ("one row for all", [causal(1, 10, 4)], 2, [Span(0, 0, 2, 4, 10, False)]),
        ("a static cache", [static], 3, [Span(0, 0, 3, 0, 7, True)]),
        ("padding behind a window", [causal(9, 9, 0, 3, 4)], 9, behind),
        ("packed", [packed], 8, [Span(0, 0, 1, 0, 5, True), Span(0, 1, 4, 5, 12, True), Span(0, 4, 6, 12, 14, True)]),
    ):
        assert spans_of(np.stack(visible), queries) == spans, what


def test_spans_mean_what_the_mask_says() -> None:
    """For random rows of first and last keys, the spans name exactly the visible pairs, or there are none."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(500):
        q_len, k_len = rng.integers(1, 6), rng.integers(1, 8)
        first = np.minimum(rng.integers(0, 2) * rng.integers(0, k_len), k_len - 1)
        last = np.minimum(np.maximum(rng.integers(-1, 3) + np.arange(q_len) * rng.integers(0, 2), -1), k_len - 1)
        visible = (np.arange(k_len) >= first) & (np.arange(k_len) <= last[:, None])
        spans = spans_of(visible[None], q_len)
        said = np.zeros_like(visible)
        for span in spans:
            for i in range(span.q_start, span.q_end):
                said[i, span.k_start : span.k_end - (span.q_end - 1 - i if span.causal else 0)] = True
        assert (said == visible).all()
        found += len(spans)
    assert found > 400


def test_other_patterns_are_not_guessed_at() -> None:
    """Holes, and windows that don't show where the request began, are none; a window keeps its anchor if it has one."""
    hole, slid = [[1, 0, 1], [1, 1, 1], [1, 1, 1]], [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    backwards = [[0, 0, 1], [0, 1, 1], [1, 1, 1]]
    for visible in (hole, slid, backwards):
        assert spans_of(np.array([visible], dtype=bool), 3) is None, visible
    shorter = causal(9, 9, hidden_right=3, window=4)[None, :, :8]
    assert spans_of(shorter, 9) is None  # of other keys than the queries' own nothing is known
    for first in (0, 3):
        whole = causal(9 - first, 9, first, window=4)
        assert spans_of(whole[None], 9 - first) == [Span(0, 0, 9 - first, first, 9, causal=True, window=4)]
    later = causal(5, 9, window=4)  # the first query sees keys 1 to 4: four, as many as the window
    assert spans_of(later[None], 5) is None
    assert spans_of(later[None], 5, anchored=False) == [Span(0, 0, 5, 1, 9, causal=True, window=4)]


def test_dropped_and_hidden_first_keys_have_the_bits_of_the_prefill() -> None:
    """With positions, a chunk and a decode step in a full window, padded or cut, are bitwise the prefill's."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, h, 150, 16, generator=rng) - 0.5 for h in (4, 2, 2))
    window, expected = 70, cpu_attention.attention(q, k, v, window=70)
    for q_len, cut in ((1, 0), (1, 80), (20, 0), (20, 50)):
        part, keys, values = q[:, :, -q_len:], k[:, :, cut:], v[:, :, cut:]
        mask = torch.from_numpy(causal(q_len, 150 - cut, window=window))[None, None]
        packings = packing_of(mask, 1, q_len, anchored=False)
        position = torch.arange(150 - q_len, 150)
        arguments = (cpu_attention.attention_varlen, part, keys, values, packings, None)
        assert identical(attend_packed(*arguments, positions=position, window=window), expected[:, :, -q_len:])
        assert not identical(attend_packed(*arguments, window=window), expected[:, :, -q_len:])


def test_float_masks_and_shapes() -> None:
    """0 and the lowest number say the same as bool; a bias, a mask for each head and wrong shapes are refused."""
    visible = torch.from_numpy(causal(5, 5, 1))[None, None]
    for dtype in (torch.float32, torch.bfloat16):
        for low in (torch.finfo(dtype).min, float("-inf")):
            mask = torch.zeros(1, 1, 5, 5, dtype=dtype).masked_fill(~visible, low)
            found = packing_of(mask, 2, 5)
            assert [p.cu_k.tolist() for p in found] == [[0, 4, 8]]
    assert packing_of(torch.zeros(1, 1, 5, 5).masked_fill(~visible, -1.0), 1, 5) is None
    assert packing_of(visible.expand(1, 2, 5, 5), 1, 5) is None
    assert packing_of(visible, 1, 4) is None
    assert packing_of(visible.to(torch.int8), 1, 5) is None
    mask = torch.from_numpy(causal(4, 4))[None, None].clone()
    first = packing_of(mask, 1, 4)
    assert first is packing_of(mask, 1, 4)
    mask[..., 0] = False
    second = packing_of(mask, 1, 4)
    assert (first[0].cu_k.tolist(), second[0].cu_k.tolist()) == ([0, 4], [0, 3])
