"""Attention on a CPU: one query, one answer, whether prefilled, chunked, decoded, batched, packed or padded."""

from __future__ import annotations

import math

import pytest
import torch

from nondet.core.certificates import Certificates
from nondet.core.compare import error_against, identical
from nondet.core.inputs import generator, make
from nondet.errors import UserError
from nondet.kernels import reference
from nondet.kernels.attention import cpu as cpu_attention
from nondet.kernels.attention.cpu import attention, attention_varlen
from tests.build import accuracy_bound
from tests.kernels.tiers import at_length

LENGTH = 150
HEADS = [(4, 2), (6, 6), (8, 1)]


def inputs(
    dtype: torch.dtype, heads: tuple[int, int] = (4, 2), dim: int = 64, kind: str = "bell", batch: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = generator(4, "cpu")
    q, kv = heads
    return (
        make(kind, (batch, q, LENGTH, dim), dtype, "cpu", rng),
        make(kind, (batch, kv, LENGTH, dim), dtype, "cpu", rng),
        make(kind, (batch, kv, LENGTH, dim), dtype, "cpu", rng),
    )


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: list[tuple[int, int, int]], **more: object
) -> list[torch.Tensor]:
    """Queries [start, end) of batch row b over the keys up to end, for each (b, start, end), in one packed call."""
    sizes = [end - start for _, start, end in pieces]
    lengths = [end for _, _, end in pieces]
    out = attention_varlen(
        torch.cat([q[b, :, s:e].transpose(0, 1) for b, s, e in pieces]),
        torch.cat([k[b, :, :e].transpose(0, 1) for b, _, e in pieces]),
        torch.cat([v[b, :, :e].transpose(0, 1) for b, _, e in pieces]),
        cu_seqlens_q=torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0),
        cu_seqlens_k=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0),
        max_seqlen_q=max(sizes),
        max_seqlen_k=max(lengths),
        **more,  # type: ignore[arg-type]  # scale or window, as the caller says
    )
    return [x.transpose(0, 1) for x in out.split(sizes)]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, "wide"),
        (torch.bfloat16, "outlier"),
        *at_length((torch.float16, "bell"), (torch.float32, "bell"), (torch.bfloat16, "wide")),
    ],
)
def test_decode_and_chunks_have_the_bits_of_the_prefill(threads: int, dtype: torch.dtype, kind: str) -> None:
    """Every position, decoded alone, and chunks that begin and end anywhere, around the borders of blocks too."""
    q, k, v = inputs(dtype, kind=kind)
    whole = attention(q, k, v)
    for p in (0, 1, 62, 63, 64, 65, 127, 128, LENGTH - 1):
        assert identical(attention(q[:, :, p : p + 1], k[:, :, : p + 1], v[:, :, : p + 1]), whole[:, :, p : p + 1])
    for start, end in ((0, 1), (0, 64), (3, 20), (63, 65), (13, 140), (128, 150)):
        assert identical(attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end]), whole[:, :, start:end])


@pytest.mark.parametrize(
    ("heads", "dim"), [((4, 2), 64), *at_length(((6, 6), 80), ((8, 1), 16), ((4, 2), 16), ((6, 6), 64), ((8, 1), 80))]
)
def test_packed_requests_have_the_bits_they_have_alone(heads: tuple[int, int], dim: int) -> None:
    """A pack of decodes and chunks, in any order and company, for grouped, equal and single key heads."""
    q, k, v = inputs(torch.float32, heads, dim)
    whole = attention(q, k, v)
    decodes = [(b, p, p + 1) for b in (0, 1) for p in range(0, LENGTH, 13)]
    mixes = (decodes, [*decodes[:5], (0, 30, 94), (1, 0, 150)], [(1, 149, 150)], [(0, 5, 6), (1, 5, 6), (0, 0, 64)])
    for pieces in mixes:
        for (b, start, end), got in zip(pieces, packed(q, k, v, pieces), strict=True):
            assert identical(got, whole[b, :, start:end])
    alone = torch.cat([attention(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in (0, 1)])
    assert identical(alone, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_values(dtype: torch.dtype, causal: bool) -> None:
    """As near to float64 as one rounding and a float32 accumulation allow: prefill, chunk and decode."""
    for heads in HEADS:
        q, k, v = inputs(dtype, heads)
        bound = accuracy_bound(dtype, LENGTH + 64)
        for start in (0, 100, LENGTH - 1):
            got = attention(q[:, :, start:], k, v, causal=causal, scale=0.2)
            right = reference.attention(q[:, :, start:], k, v, causal=causal, scale=0.2)
            assert error_against(got, right).relative_norm <= bound, heads


@pytest.mark.parametrize("window", [1, 64, *at_length(20, 100)])
def test_dropped_keys_of_a_window_leave_the_anchor(window: int) -> None:
    """A cache that dropped the keys before the window gives the bits of one that keeps all; at another place, not."""
    q, k, v = inputs(torch.float32, batch=1)
    whole = packed(q, k, v, [(0, 0, LENGTH)], window=window)[0]
    pieces = [(0, 5), (70, 71), (60, 75), (149, 150), (90, 150)]
    kept = [max(0, start - window + 1) for start, _ in pieces]

    def run(shift: int) -> list[torch.Tensor]:
        out = attention_varlen(
            torch.cat([q[0, :, s:e].transpose(0, 1) for s, e in pieces]),
            torch.cat([k[0, :, f:e].transpose(0, 1) for (_, e), f in zip(pieces, kept, strict=True)]),
            torch.cat([v[0, :, f:e].transpose(0, 1) for (_, e), f in zip(pieces, kept, strict=True)]),
            cu_seqlens_q=torch.tensor([0, *(e - s for s, e in pieces)]).cumsum(0),
            cu_seqlens_k=torch.tensor([0, *(e - f for (_, e), f in zip(pieces, kept, strict=True))]).cumsum(0),
            max_seqlen_q=60,
            max_seqlen_k=LENGTH,
            window=window,
            positions=torch.cat(
                [torch.arange(s, e) + (shift if f else 0) for (s, e), f in zip(pieces, kept, strict=True)]
            ),
        )
        return [x.transpose(0, 1) for x in out.split([e - s for s, e in pieces])]

    for (start, end), got in zip(pieces, run(0), strict=True):
        assert identical(got, whole[:, start:end])
    if window > 1:
        assert not all(identical(x, y) for x, y in zip(run(37), run(0), strict=True))


def test_positions_that_cannot_be_are_refused() -> None:
    """More keys than positions, or positions without a window: an error, not another answer."""
    q, k, v = (x[0].transpose(0, 1) for x in inputs(torch.float32, batch=1))
    sizes = {
        "cu_seqlens_q": torch.tensor([0, 2]),
        "cu_seqlens_k": torch.tensor([0, 9]),
        "max_seqlen_q": 2,
        "max_seqlen_k": 99,
    }
    with pytest.raises(UserError, match="9 keys up to position 6"):
        attention_varlen(q[:2], k[:9], v[:9], window=9, positions=torch.tensor([5, 6]), **sizes)  # type: ignore[arg-type]  # of several types
    with pytest.raises(UserError, match="positions"):
        attention_varlen(q[:2], k[:9], v[:9], positions=torch.tensor([50, 51]), **sizes)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(
    ("window", "cap"), [(40, None), (40, 0.7), *at_length((1, None), (64, None), (1000, None), (None, 0.7))]
)
def test_a_window_hides_keys_and_a_soft_cap_bends_the_scores(window: int | None, cap: float | None) -> None:
    """Against float64 with an explicit mask; decode equals prefill, also packed; another cap is another answer."""
    q, k, v = inputs(torch.float32, (2, 2), batch=1)
    got = attention(q, k, v, softcap=cap, window=window)
    position = torch.arange(LENGTH)
    seen = (position[None] <= position[:, None]) & (position[None] > position[:, None] - (window or LENGTH))
    scores = q.double() @ k.double().mT / 8
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    right = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v.double()
    assert error_against(got, right).relative_norm <= accuracy_bound(torch.float32, LENGTH)
    for p in (0, 63, 64, 149):
        alone = attention(q[:, :, p : p + 1], k[:, :, : p + 1], v[:, :, : p + 1], softcap=cap, window=window)
        assert identical(alone, got[:, :, p : p + 1])
        assert identical(packed(q, k, v, [(0, p, p + 1)], window=window, softcap=cap)[0], got[0, :, p : p + 1])
    assert not identical(attention(q, k, v, softcap=0.8, window=window), got)


def test_layouts_do_not_matter() -> None:
    """Heads before tokens or after, cached keys cut out of a longer cache: the same bits."""
    q, k, v = inputs(torch.bfloat16)
    right = attention(q, k, v)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert identical(attention(*turned), right)
    longer = [torch.cat([x, x], 2)[:, :, :LENGTH] for x in (k, v)]
    assert identical(attention(q, *longer), right)


def test_what_a_later_key_holds_does_not_matter() -> None:
    """A query's answer is the same whatever number stands in a key after it, in its own block or in the next."""
    q, k, v = inputs(torch.float32)
    right = attention(q, k, v)[:, :, :70]
    k[:, :, 70:] = 1e4
    v[:, :, 70:] = -1e30
    assert identical(attention(q, k, v)[:, :, :70], right)


def test_queries_of_no_request_give_zeros() -> None:
    """An engine pads a step to a fixed size: what belongs to nobody is defined, and nobody's bits change."""
    q, k, v = inputs(torch.float32, batch=1)
    padded = attention_varlen(
        q[0, :, :9].transpose(0, 1),
        k[0, :, :5].transpose(0, 1),
        v[0, :, :5].transpose(0, 1),
        cu_seqlens_q=torch.tensor([0, 5, 5, 5]),
        cu_seqlens_k=torch.tensor([0, 5, 5, 5]),
        max_seqlen_q=5,
        max_seqlen_k=5,
    )
    assert identical(padded[:5].transpose(0, 1), attention(q[:, :, :5], k[:, :, :5], v[:, :, :5])[0])
    assert not padded[5:].any()


def test_misuse_is_refused() -> None:
    """More queries than keys, float64, other heads and gradients: an error in words, never a guess."""
    q, k, v = inputs(torch.float32)
    with pytest.raises(UserError, match="150 queries but 10 keys"):
        attention(q, k[:, :, :10], v[:, :, :10])
    with pytest.raises(UserError, match="float64"):
        attention(q.double(), k.double(), v.double())
    with pytest.raises(UserError, match="multiple"):
        attention(q[:, :3], k, v)
    with pytest.raises(UserError, match="no gradients"):
        attention(q.requires_grad_(), k, v)


def test_a_broken_promise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If blocks were merged in an order that depends on the batch, the first use would say so and not compute."""
    honest = cpu_attention.computed

    def dishonest(q: torch.Tensor, *more: object) -> torch.Tensor:
        result = honest(q, *more)  # type: ignore[arg-type]  # passed through
        return torch.nextafter(result, torch.ones(())) if q.numel() >= 100 * q.shape[-1] else result

    monkeypatch.setattr(cpu_attention, "computed", dishonest)
    monkeypatch.setattr(cpu_attention, "VERIFIED", {})
    kept = Certificates({"device": "cpu"}, None)
    monkeypatch.setattr(cpu_attention, "certificates", lambda device: kept)
    q, k, v = inputs(torch.float32)
    with pytest.raises(RuntimeError, match="other bits in the batch"):
        attention(q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.bfloat16, torch.float16)])
def test_keys_in_a_cache_are_those_that_are_named(dtype: torch.dtype) -> None:
    """Layers of one plan, whose keys lie at the same places and then at others: each has its own."""
    q, k, v = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in inputs(dtype))
    k[7, 0, :4], v[9, 1, 3] = torch.tensor([-0.0, 1e-40, torch.inf, torch.nan], dtype=dtype), -torch.inf
    more = {"cu_seqlens_q": torch.tensor([0, 1, 2]), "cu_seqlens_k": torch.tensor([0, 70, 100])}
    places = torch.randperm(len(k), generator=generator(5, "cpu"))[:100]
    for index in (places, places, places.flip(0), places):
        for keys, values in ((k, v), (v, k)):
            gathered = attention_varlen(q[:2], keys[index], values[index], max_seqlen_q=1, max_seqlen_k=70, **more)
            got = attention_varlen(q[:2], keys, values, max_seqlen_q=1, max_seqlen_k=70, key_index=index, **more)
            assert identical(got, gathered)


def test_floats_of_8_bits_are_those_numbers() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        q, k, v = (x[:, :, -n:].to(dtype) for x, n in zip(inputs(torch.float32), (1, 70, 70), strict=True))
        wide = attention(q.float(), k.float(), v.float())
        assert identical(attention(q, k, v).float(), wide.to(dtype).float())
