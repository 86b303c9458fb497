"""nondet's class "segments" over an engine's paged cache: the launches of a step, and the proofs of all at start.

A request's keys are looked up by `Call.key_index` in a flat cache, K and V [tokens, heads, dim]. A step is cut into
launches: the requests of one query together, further requests together, and each chunk that is large enough for the
dense prefill, its keys and values gathered first. Which launch serves a request changes no bit: a query's bits follow
from its position and its keys (`nondet.kernels.attention.cuda`); each way is proven at start.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nondet.core.launch import first_uses
from nondet.engines.layers import float32_default
from nondet.kernels.attention.cuda import Call, as_dense, attention, compute, form_of, prove_way, quickest, stands
from nondet.kernels.attention.hopper import compile_merges
from nondet.kernels.attention.triton_kernels import SEGMENT, Way, plan_for
from nondet.kernels.triton_common import again

DENSE_ITEMS = 64  # blocks of 128 queries of a head from which a chunk may be computed densely, as `attention` does
# Queries times keys times heads above which it is: below, gathering and an extra launch cost more than the quicker
# kernel saves. Four times this took 3% off the prefill of 8B's shape. Only speed depends on it: the dense prefill is
# proven at start to have the bits of the other way.
DENSE_WORK = 3 << 24
_LARGE_SPAN = 4  # segments of one program where a chunk's queries by themselves do not fill a GPU
_FEW_PROGRAMS = 66


class Layer(NamedTuple):
    """What a layer's attention is. `window`: the keys that a query sees, itself among them; None: all."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    @property
    def may_gather(self) -> bool:
        """Whether the dense prefill computes it, which takes neither window nor soft cap."""
        return self.window is None and self.softcap is None

    def call(self, operands: tuple[Any, ...], sizes: tuple[int, int, int], packed: tuple[Any, ...], page: int) -> Call:
        """A launch of this layer's attention. operands: q, k, v, out [1, H, T, D]. sizes: Requests, the most queries
        and keys of one. packed: cu_q and cu_k [requests + 1], index [keys]. page: Tokens of a block of the cache."""
        together = min(page & -page, 128)  # what the copy engine fetches at once
        q, k, v, out = operands
        cu_q, cu_k, index = packed
        scale, window, cap = self.scale, self.window, self.softcap
        return Call(q, k, v, out, *sizes, scale, True, window, cap, cu_q, cu_k, None, index, together)


class Piece(NamedTuple):
    """One launch: requests first ... last - 1 of a step, of at most `queries` and `keys`. `dense`: (first query, end)
    of a chunk that is computed by itself, over as many keys; else None."""

    first: int
    last: int
    queries: int
    keys: int
    dense: tuple[int, int] | None = None


def pieces_of(starts: list[int], lengths: list[int] | None, longest: int, heads: int, may_gather: bool) -> list[Piece]:
    """How a step's requests, beginning at the queries `starts`, are launched. `lengths` are the exact numbers of keys,
    or None where the host does not know them; `longest` is at least the largest. `may_gather`: chunks may be computed
    densely."""
    counts = [b - a for a, b in itertools.pairwise(starts)]
    pieces: list[Piece] = []
    begin = 0
    for i, count in enumerate(counts):
        work = heads * count * lengths[i] if lengths and lengths[i] >= count > 64 else 0
        if may_gather and lengths and work >= DENSE_WORK and heads * -(-count // 128) >= DENSE_ITEMS:
            if begin < i:
                pieces.append(Piece(begin, i, max(counts[begin:i]), longest))
            pieces.append(Piece(i, i + 1, count, lengths[i], (starts[i], starts[i + 1])))
            begin = i + 1
        elif i + 1 == len(counts) or (count <= 1) != (counts[i + 1] <= 1):
            pieces.append(Piece(begin, i + 1, max(counts[begin : i + 1]), longest))
            begin = i + 1
    return [piece for piece in pieces if piece.queries]


def way_for(call: Call) -> Way:
    """The way that a call is launched in, one of those that `warm` has proven and compiled. One query per request:
    spans of segments are powers of two. More: the largest block, one program per block or one for each `_LARGE_SPAN`
    segments. Only speed depends on it, as in `nondet.kernels.attention.cuda.quickest`."""
    heads, dim = call.q.shape[1], call.q.shape[3]
    way = quickest(call)
    if call.tq == 1:
        return way._replace(span=1 << (way.span - 1).bit_length() if way.span else 0)
    group = heads // call.k.shape[1]
    plan = plan_for(128, dim, call.q.dtype)
    programs = call.requests * call.k.shape[1] * -(-call.tq * group // plan.block_m)
    split = way.span and programs < _FEW_PROGRAMS and call.tk > _LARGE_SPAN * SEGMENT
    plan = plan if call.window is None else plan._replace(peel=False)
    return Way(plan, _LARGE_SPAN if split else 0, bool(split) and way.pdl)


@dataclass
class Step:
    """The launches of a step's attention, for every layer of it."""

    tokens: int
    key_index: torch.Tensor  # of all requests' keys, one request after the other
    pieces: list[Piece]
    bounds: list[tuple[torch.Tensor, torch.Tensor]]  # of a piece: cu_q and cu_k
    token_index: dict[int, torch.Tensor] = field(default_factory=dict)  # of a chunk that is computed by itself

    @classmethod
    def of(cls, tokens: int, key_index: torch.Tensor, pieces: list[Piece], *cu: torch.Tensor) -> Step:
        """cu: cu_q and cu_k of all requests."""
        ranges = [slice(piece.first, piece.last + 1) for piece in pieces]
        return cls(tokens, key_index, pieces, [(cu[0][one], cu[1][one]) for one in ranges])


def run(layer: Layer, step: Step, operands: tuple[torch.Tensor, ...], page: int) -> None:
    """A layer's attention at a step. operands: q [T, Hq, D]; k, v [1, Hkv, tokens, D], the cache; out as q."""
    query, k, v, out = operands
    for piece, (cu_q, cu_k) in zip(step.pieces, step.bounds, strict=True):
        first, last = piece.first, piece.last
        if piece.dense is not None:
            begin, end = piece.dense
            tokens = step.token_index[first]
            gathered = (as_dense(x[0].transpose(0, 1).index_select(0, tokens)) for x in (k, v))
            done = attention(as_dense(query[begin:end]), *gathered, scale=layer.scale)
            out[begin:end].copy_(done[0].transpose(0, 1))
            continue
        upto = last if piece.queries == 1 and first == 0 else step.tokens
        dense = (as_dense(query[:upto]), k, v, as_dense(out[:upto]))
        sizes, packed = (last - first, piece.queries, piece.keys), (cu_q, cu_k, step.key_index)
        what = ("paged", *sizes, page, layer.scale, layer.window, layer.softcap)
        if again(what, *dense, *packed) is None:  # else an earlier layer had an equal launch
            call = layer.call(dense, sizes, packed, page)
            compute(call, way_for(call), what=what)


def ways_of(
    layer: Layer, cache: tuple[torch.Tensor, torch.Tensor], requests: int, longest: int, page: int
) -> dict[Way, Call]:
    """The ways that `way_for` can choose, each with a call that it is chosen for; the calls are never computed.
    `cache`: a small k and v, laid out as the engine's."""
    k, v = cache
    q = as_dense(k.new_zeros(1, layer.heads, layer.head_dim))
    zeros = torch.zeros(1, dtype=torch.int32, device=k.device)
    decodes = [(n, 1) for n in dict.fromkeys((*(2**i for i in range(requests.bit_length())), requests))]
    ways: dict[Way, Call] = {}
    for count, queries in [*decodes, (1, 2), (1, 128), (1, 4096), (8, 128)]:
        for segments in dict.fromkeys(
            (*(2**i for i in range((longest // SEGMENT).bit_length())), -(-longest // SEGMENT))
        ):
            keys = min(segments * SEGMENT, longest)
            call = layer.call((q, k, v, torch.empty_like(q)), (count, queries, keys), (zeros,) * 3, page)
            ways.setdefault(way_for(call), call)
    # other numbers of requests and keys choose the same blocks with other spans: every power of two up to theirs
    steps = [(way, call) for way, call in ways.items() if call.tq == 1]
    for split in [way for way, _ in steps if way.span][:1]:
        for (way, call), power in itertools.product(steps, range((-(-longest // SEGMENT) - 1).bit_length())):
            ways.setdefault(split._replace(plan=way.plan, tiles=way.tiles, span=2**power), call)
    return ways


def warm(
    layers: Iterable[Layer],
    cache_of: Callable[[Layer], tuple[torch.Tensor, torch.Tensor]],
    requests: int,
    longest: int,
    page: int,
) -> str:
    """Prove and compile every way that `way_for` can choose, before requests are served; what it took, in words.
    `cache_of`: a layer's `cache` as `ways_of` takes it."""
    count, began = 0, time.perf_counter()
    with first_uses() as uses, float32_default(), torch.inference_mode():
        for layer in dict.fromkeys(layers):
            cache = cache_of(layer)
            ways, dtype, device = ways_of(layer, cache, requests, longest, page), cache[0].dtype, cache[0].device
            lanes = False
            for way, call in ways.items():
                if stands(call, way):
                    # where a certificate made a proof unnecessary it compiles
                    prove_way(form_of(call), way, device, dry=True)
                    lanes = lanes or way.lanes
            if lanes:
                compile_merges(dtype, layer.head_dim, -(-longest // SEGMENT), device)
            if layer.may_gather:
                q, kv = (
                    as_dense(torch.zeros(4096, heads, layer.head_dim, dtype=dtype, device=device))
                    for heads in (layer.heads, layer.kv_heads)
                )
                attention(q, kv, kv.clone())
            count += len(ways)
    what = f"attention in {count} ways: {uses.proofs} proofs"
    kernels = f"{uses.compiled} kernel{'s' * (uses.compiled != 1)} compiled"
    return f"{what}, {kernels}, in {time.perf_counter() - began:.1f} s."
