"""nondet's class "segments" as an attention backend of vLLM: prefill, chunks of it, decode, warm prefixes, one class.

The cache is FlashAttention's, [blocks, 2, page, heads, dim], and so is the writing of keys and values into it. For each
step one small kernel writes every key's index in the flat cache, from the block tables, into a buffer with a fixed
address, which captured graphs read. K is then the flat cache without its last page and V the one without its first,
[tokens, heads, dim] both, and a request's keys are looked up by `Call.key_index`. From vLLM 0.26 on K and V of a token
are one row (`IN_ROWS`), [blocks, heads, page, 2 dim], token by token: K and V are then the rows' halves.

A step is cut into launches: the requests of one query together, further requests together, and each chunk that is large
enough for the dense prefill, its keys and values gathered first. Which launch serves a request changes no bit: a
query's bits follow from its position and its keys (`nondet.kernels.attention.cuda`); each way is proven at start.

Imports vLLM at its top, because vLLM loads it by name.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from nondet.core.launch import first_uses
from nondet.errors import UserError
from nondet.kernels.attention.cuda import (
    MAX_HEAD_DIM,
    Call,
    as_dense,
    attention,
    compute,
    form_of,
    prove_way,
    quickest,
    stands,
)
from nondet.kernels.attention.hopper import compile_merges
from nondet.kernels.attention.triton_kernels import SEGMENT, Way, plan_for
from nondet.kernels.triton_common import again, launch
from nondet.vllm import log
from nondet.vllm.operators import float32_default

_ELSE = "Unset NONDET_BATCH_INVARIANT for this model."
_CACHES = (None, "auto", "float16", "bfloat16")
DENSE_ITEMS = 64  # blocks of 128 queries of a head from which a chunk may be computed densely, as `attention` does
# Queries times keys times heads above which it is: below, gathering and an extra launch cost more than the quicker
# kernel saves. Four times this took 3% off the prefill of 8B's shape. Only speed depends on it: the dense prefill is
# proven at start to have the bits of the other way.
DENSE_WORK = 3 << 24
# missing from vLLM 0.29 on: layouts have names there
_shape = getattr(FlashAttentionBackend, "get_kv_cache_shape", None)
IN_ROWS = _shape is None or len(_shape(2, 16, 3, 64)) == 4
RESERVED: list[torch.Tensor] = []  # indexes of keys that no builder has taken yet
_LARGE_SPAN = 4  # segments of one program where a chunk's queries by themselves do not fill a GPU
_FEW_PROGRAMS = 66


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


@triton.jit(do_not_specialize=["stride", "page_step"])
def key_index_kernel(cu_ptr, table_ptr, out_ptr, stride, page_step, PAGE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # Triton reads annotations itself
    """out[cu[r] + j] = page_step table[r, j // PAGE] + j % PAGE: key j of request r is that token of the cache."""
    r = tl.program_id(0)
    first = tl.load(cu_ptr + r)
    count = tl.load(cu_ptr + r + 1) - first
    for start in range(tl.program_id(1) * BLOCK, count, BLOCK * tl.num_programs(1)):
        j = start + tl.arange(0, BLOCK)
        page = tl.load(table_ptr + r.to(tl.int64) * stride + j // PAGE, mask=j < count, other=0)
        tl.store(out_ptr + first + j, page * page_step + j % PAGE, mask=j < count)


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
class SegmentsMetadata(FlashAttentionMetadata):
    """FlashAttention's metadata, each key's index in the cache, and the step's launches."""

    cu_k: torch.Tensor | None = None
    key_index: torch.Tensor | None = None
    pieces: list[Piece] = field(default_factory=list)
    bounds: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # of a piece: cu_q and cu_k
    # of a chunk that is computed by itself, by its request
    token_index: dict[int, torch.Tensor] = field(default_factory=dict)


class SegmentsBuilder(FlashAttentionMetadataBuilder):
    """Metadata of a step. Buffers that a captured graph reads are made once."""

    # the index of each key would stay that of the other block table
    supports_update_block_table: bool = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Whole graphs for steps of one query per request; other steps' attention runs between pieces of graphs."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        requests, longest = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
        self.cu_k = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        fits = RESERVED and RESERVED[-1].numel() >= requests * longest
        self.key_index = RESERVED.pop() if fits else torch.zeros(requests * longest, dtype=torch.int32, device=device)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names if name in layers]
        # the dense prefill takes neither window nor soft cap
        self.may_gather = all(i.sliding_window[0] < 0 and not i.logits_soft_cap for i in impls)
        if device.type == "cuda":
            warm(impls, kv_cache_spec.dtype, requests, longest, device, self.block_size)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Never: a shared prefix is attended to by each request itself."""
        return False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SegmentsMetadata:
        """The step's metadata, with the keys' indexes on the device."""
        common = common_attn_metadata
        if common.causal is not True:
            raise UserError("nondet's attention under vLLM is causal", _ELSE)
        meta = SegmentsMetadata(**vars(super().build(0, common, fast_build)))
        n = common.num_reqs
        torch.cumsum(meta.seq_lens[:n], 0, dtype=torch.int32, out=self.cu_k[1 : n + 1])
        grid = (n, max(1, min(32, -(-meta.max_seq_len // 1024))))
        table = meta.block_table
        page = self.block_size
        step = page if IN_ROWS else 2 * page
        sizes = {"PAGE": page, "BLOCK": 1024}
        launch(key_index_kernel, grid, (self.cu_k, table, self.key_index), (table.stride(0), step), sizes)
        meta.cu_k, meta.key_index = self.cu_k[: n + 1], self.key_index
        if meta.max_query_len <= 1:
            meta.pieces = [Piece(0, n, 1, meta.max_seq_len)]
        else:
            lengths = common.seq_lens_cpu_upper_bound  # exact without speculation, which is refused
            meta.pieces = pieces_of(
                common.query_start_loc_cpu[: n + 1].tolist(),
                None if lengths is None else lengths[:n].tolist(),
                meta.max_seq_len,
                self.num_heads_q,
                self.may_gather,
            )
            token = torch.arange(page, dtype=torch.int32, device=table.device)
            for piece in meta.pieces:
                if piece.dense is not None:
                    pages = table[piece.first, : -(-piece.keys // page), None] * step
                    meta.token_index[piece.first] = (pages + token).flatten()[: piece.keys]
        ranges = [slice(piece.first, piece.last + 1) for piece in meta.pieces]
        meta.bounds = [(meta.query_start_loc[one], meta.cu_k[one]) for one in ranges]
        return meta


def reserve(model: torch.nn.Module, config: Any) -> None:
    """Allocate the indexes of keys before vLLM measures memory: one for each builder, that is per group of layers.
    vLLM's groups have as many layers as the rarest kind, of one window, has."""
    impls: list[Any] = [getattr(one, "impl", None) for one in model.modules()]
    kinds = Counter(impl.sliding_window for impl in impls if isinstance(impl, SegmentsImpl))
    groups = sum(-(-count // min(kinds.values())) for count in kinds.values())
    keys = config.scheduler_config.max_num_seqs * config.model_config.max_model_len
    device = next(model.parameters()).device
    RESERVED[:] = [torch.zeros(keys, dtype=torch.int32, device=device) for _ in range(groups)]
    log(f"attention keeps {groups * 4 * keys / 2**20:,.0f} MiB for the index of each key of a step.")


def ways_of(
    impl: Any, dtype: torch.dtype, requests: int, longest: int, device: torch.device, page: int
) -> dict[Way, Call]:
    """The ways that `way_for` can choose, each with a call that it is chosen for; the calls are never computed."""
    cache = torch.zeros(64, impl.num_kv_heads, impl.head_size, dtype=dtype, device=device)
    halves = cache.view(32, impl.num_kv_heads, -1).split(impl.head_size, -1) if IN_ROWS else (cache[:32], cache[32:])
    k, v = map(as_dense, halves)
    q = as_dense(cache.new_zeros(1, impl.num_heads, impl.head_size))
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    decodes = [(n, 1) for n in dict.fromkeys((*(2**i for i in range(requests.bit_length())), requests))]
    ways: dict[Way, Call] = {}
    for count, queries in [*decodes, (1, 2), (1, 128), (1, 4096), (8, 128)]:
        for segments in dict.fromkeys(
            (*(2**i for i in range((longest // SEGMENT).bit_length())), -(-longest // SEGMENT))
        ):
            keys = min(segments * SEGMENT, longest)
            call = impl.call((q, k, v, torch.empty_like(q)), (count, queries, keys), (zeros,) * 3, page)
            ways.setdefault(way_for(call), call)
    # other numbers of requests and keys choose the same blocks with other spans: every power of two up to theirs
    steps = [(way, call) for way, call in ways.items() if call.tq == 1]
    for split in [way for way, _ in steps if way.span][:1]:
        for (way, call), power in itertools.product(steps, range((-(-longest // SEGMENT) - 1).bit_length())):
            ways.setdefault(split._replace(plan=way.plan, tiles=way.tiles, span=2**power), call)
    return ways


def warm(
    impls: Iterable[Any], dtype: torch.dtype, requests: int, longest: int, device: torch.device, page: int
) -> None:
    """Prove and compile every way that `way_for` can choose, before requests are served, and log the cost."""
    count, began = 0, time.perf_counter()
    with first_uses() as uses, float32_default(), torch.inference_mode():
        for impl in {(i.num_heads, i.num_kv_heads, i.sliding_window, i.logits_soft_cap): i for i in impls}.values():
            ways = ways_of(impl, dtype, requests, longest, device, page)
            lanes = False
            for way, call in ways.items():
                if stands(call, way):
                    # where a certificate made a proof unnecessary it compiles
                    prove_way(form_of(call), way, device, dry=True)
                    lanes = lanes or way.lanes
            if lanes:
                compile_merges(dtype, impl.head_size, -(-longest // SEGMENT), device)
            if impl.sliding_window[0] < 0 and not impl.logits_soft_cap:  # the dense prefill takes neither
                q, kv = (
                    as_dense(torch.zeros(4096, heads, impl.head_size, dtype=dtype, device=device))
                    for heads in (impl.num_heads, impl.num_kv_heads)
                )
                attention(q, kv, kv.clone())
            count += len(ways)
    what = (
        f"attention in {count} ways: {uses.proofs} proofs, {uses.compiled} kernel{'s' * (uses.compiled != 1)} compiled"
    )
    log(f"{what}, in {time.perf_counter() - began:.1f} s.")


def dense_views(cache: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(tokens of a page, K, V), both [1, heads, tokens, dim] and views of one layer's cache; see the module. Raises
    RuntimeError: a cache that is not stored token by token."""
    if IN_ROWS:
        _, heads, page, width = cache.shape
        k, v = cache.transpose(1, 2).view(-1, heads, width).split(width // 2, -1)
        return page, as_dense(k), as_dense(v)
    page, heads, dim = cache.shape[2:]
    flat = cache.view(-1, heads * dim)
    row, begin = flat.stride(0), flat.storage_offset()
    size = (1, heads, len(flat) - page, dim)
    stride = (size[2] * row, dim, row, 1)  # in fewer calls than slices of it, because each layer asks at each step
    return page, flat.as_strided(size, stride, begin), flat.as_strided(size, stride, begin + page * row)


class SegmentsImpl(FlashAttentionImpl):
    """Attention of one layer; the cache is written as FlashAttention's is."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """As FlashAttention's. Raises UserError: what nondet's attention does not do, by name."""
        bound = inspect.signature(super().__init__).bind(*given, **named)
        bound.apply_defaults()
        wanted = bound.arguments
        cache, kind, dim = (wanted[name] for name in ("kv_cache_dtype", "attn_type", "head_size"))
        faults = {
            "ALiBi": wanted["alibi_slopes"] is not None,
            "attention sinks": wanted["sinks"] is not None,
            f"a {cache} KV cache": cache not in _CACHES,
            f"{kind} attention": kind != AttentionType.DECODER,
            f"heads of {dim}": dim > MAX_HEAD_DIM or dim % 8 != 0,
        }
        for what in (name for name, applies in faults.items() if applies):
            raise UserError(f"nondet's attention under vLLM has no {what}", _ELSE)
        super().__init__(*given, **named)

    def call(self, operands: tuple[Any, ...], sizes: tuple[int, int, int], packed: tuple[Any, ...], page: int) -> Call:
        """A launch of this layer's attention. operands: q, k, v, out [1, H, T, D]. sizes: Requests, the most queries
        and keys of one. packed: cu_q and cu_k [requests + 1], index [keys]. page: Tokens of a block of the cache."""
        window = None if self.sliding_window[0] < 0 else self.sliding_window[0] + 1
        cap = self.logits_soft_cap or None
        together = min(page & -page, 128)  # what the copy engine fetches at once
        q, k, v, out = operands
        cu_q, cu_k, index = packed
        return Call(q, k, v, out, *sizes, self.scale, True, window, cap, cu_q, cu_k, None, index, together)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, **_: Any
    ) -> torch.Tensor:
        """query [T, Hq, D] over the cache, as `dense_views` takes it, into output [T, Hq, D]."""
        if attn_metadata is None:
            return output.fill_(0)
        meta = attn_metadata
        page, k, v = dense_views(kv_cache)
        dim = k.shape[-1]
        query, out = query.view(-1, self.num_heads, dim), output.view(-1, self.num_heads, dim)
        for piece, (cu_q, cu_k) in zip(meta.pieces, meta.bounds, strict=True):
            first, last = piece.first, piece.last
            if piece.dense is not None:
                begin, end = piece.dense
                tokens = meta.token_index[first]
                gathered = (as_dense(x[0].transpose(0, 1).index_select(0, tokens)) for x in (k, v))
                done = attention(as_dense(query[begin:end]), *gathered, scale=self.scale)
                out[begin:end].copy_(done[0].transpose(0, 1))
                continue
            upto = last if piece.queries == 1 and first == 0 else meta.num_actual_tokens
            operands = (as_dense(query[:upto]), k, v, as_dense(out[:upto]))
            sizes, packed = (last - first, piece.queries, piece.keys), (cu_q, cu_k, meta.key_index)
            what = ("paged", *sizes, page, self.scale, self.sliding_window, self.logits_soft_cap)
            if again(what, *operands, *packed) is None:  # else an earlier layer had an equal launch
                call = self.call(operands, sizes, packed, page)
                compute(call, way_for(call), what=what)
        return output


class SegmentsBackend(FlashAttentionBackend):
    """Registered as vLLM's CUSTOM attention backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    # FlashAttention's allows them: the last is a window that ends at the prompt, of later versions
    supports_non_causal = supports_mm_prefix = supports_sink = classmethod(lambda cls: False)
    supports_per_head_quant_scales = supports_rswa = supports_non_causal

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's list under which it is registered."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SegmentsImpl]:
        """What computes a layer."""
        return SegmentsImpl

    @staticmethod
    def get_builder_cls() -> type[SegmentsBuilder]:
        """What makes a step's metadata."""
        return SegmentsBuilder

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        """Tokens of a page before its heads, as the flat cache is read."""
        return "NHD"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """The same, for a vLLM with `IN_ROWS`."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Always."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Only decoders."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """As the kernels."""
        return head_size <= MAX_HEAD_DIM and head_size % 8 == 0

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """Only half precision."""
        return kv_cache_dtype in _CACHES
