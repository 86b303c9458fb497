"""nondet's class "segments" as an attention backend of vLLM: prefill, chunks of it, decode, warm prefixes, one class.

The cache is FlashAttention's, [blocks, 2, page, heads, dim], and so is the writing of keys and values into it. For each
step one small kernel writes every key's index in the flat cache, from the block tables, into a buffer with a fixed
address, which captured graphs read. K is then the flat cache without its last page and V the one without its first,
[tokens, heads, dim] both, and a request's keys are looked up by `Call.key_index`. From vLLM 0.26 on K and V of a token
are one row (`IN_ROWS`), [blocks, heads, page, 2 dim], token by token: K and V are then the rows' halves.

A step's launches are those of `nondet.engines.attention`.

Imports vLLM at its top, because vLLM loads it by name.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

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

from nondet.engines.attention import Layer, Piece, Step, pieces_of, run, warm
from nondet.errors import UserError
from nondet.kernels.attention.cuda import MAX_HEAD_DIM, as_dense
from nondet.kernels.triton_common import launch
from nondet.vllm import log

_ELSE = "Unset NONDET_BATCH_INVARIANT for this model."
_CACHES = (None, "auto", "float16", "bfloat16")
# missing from vLLM 0.29 on: layouts have names there
_shape = getattr(FlashAttentionBackend, "get_kv_cache_shape", None)
IN_ROWS = _shape is None or len(_shape(2, 16, 3, 64)) == 4
RESERVED: list[torch.Tensor] = []  # indexes of keys that no builder has taken yet


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


@dataclass
class SegmentsMetadata(FlashAttentionMetadata):
    """FlashAttention's metadata, and the step's launches."""

    step: Step | None = None


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
        self.may_gather = all(impl.as_layer.may_gather for impl in impls)
        if device.type == "cuda":
            caches = partial(example, dtype=kv_cache_spec.dtype, device=device)
            log(warm((impl.as_layer for impl in impls), caches, requests, longest, self.block_size))

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
        if meta.max_query_len <= 1:
            pieces = [Piece(0, n, 1, meta.max_seq_len)]
        else:
            lengths = common.seq_lens_cpu_upper_bound  # exact without speculation, which is refused
            pieces = pieces_of(
                common.query_start_loc_cpu[: n + 1].tolist(),
                None if lengths is None else lengths[:n].tolist(),
                meta.max_seq_len,
                self.num_heads_q,
                self.may_gather,
            )
        cu_q, cu_k = meta.query_start_loc, self.cu_k[: n + 1]
        meta.step = Step.of(meta.num_actual_tokens, self.key_index, pieces, cu_q, cu_k)
        for piece in pieces:
            if piece.dense is not None:
                token = torch.arange(page, dtype=torch.int32, device=table.device)
                pages = table[piece.first, : -(-piece.keys // page), None] * step
                meta.step.token_index[piece.first] = (pages + token).flatten()[: piece.keys]
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


def example(layer: Layer, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A small K and V, laid out as in the cache."""
    cache = torch.zeros(64, layer.kv_heads, layer.head_dim, dtype=dtype, device=device)
    halves = cache.view(32, layer.kv_heads, -1).split(layer.head_dim, -1) if IN_ROWS else (cache[:32], cache[32:])
    k, v = map(as_dense, halves)
    return k, v


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
        window = None if self.sliding_window[0] < 0 else self.sliding_window[0] + 1
        shape = self.num_heads, self.num_kv_heads, self.head_size
        self.as_layer = Layer(*shape, self.scale, window, self.logits_soft_cap or None)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, **_: Any
    ) -> torch.Tensor:
        """query [T, Hq, D] over the cache, as `dense_views` takes it, into output [T, Hq, D]."""
        if attn_metadata is None:
            return output.fill_(0)
        page, k, v = dense_views(kv_cache)
        rows = -1, self.num_heads, k.shape[-1]
        run(self.as_layer, attn_metadata.step, (query.view(rows), k, v, output.view(rows)), page)
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
