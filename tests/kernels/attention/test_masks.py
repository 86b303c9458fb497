"""Masks read as spans: what a mask means, and that a mask of another meaning is not guessed at."""

from __future__ import annotations

import numpy as np
import torch

from nondet.core.compare import identical
from nondet.kernels.attention import cpu as cpu_attention
from nondet.kernels.attention.masks import Span, attend_packed, packing_of, spans_of


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
    """Holes, and windows that do not show where the request began, are no requests one after the other."""
    hole, slid = [[1, 0, 1], [1, 1, 1], [1, 1, 1]], [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    backwards = [[0, 0, 1], [0, 1, 1], [1, 1, 1]]
    for visible in (hole, slid, backwards):
        assert spans_of(np.array([visible], dtype=bool), 3) is None, visible
    shorter = causal(9, 9, hidden_right=3, window=4)[None, :, :8]
    assert spans_of(shorter, 9) is None  # of other keys than the queries' own nothing is known


def test_a_window_keeps_its_anchor_or_says_that_it_has_none() -> None:
    """From the request's first key on, padding before it, a window is one span; from later on, only if it is asked."""
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


def test_a_mask_that_is_written_to_is_read_again() -> None:
    """One reading serves all layers, but not after the mask has changed."""
    mask = torch.from_numpy(causal(4, 4))[None, None].clone()
    first = packing_of(mask, 1, 4)
    assert first is packing_of(mask, 1, 4)
    mask[..., 0] = False
    second = packing_of(mask, 1, 4)
    assert (first[0].cu_k.tolist(), second[0].cu_k.tolist()) == ([0, 4], [0, 3])
