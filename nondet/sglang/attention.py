"""nondet's class "segments" as an attention backend of SGLang: prefill, chunks, decode, cached prefixes, one class.

The cache is SGLang's, K and V [tokens, heads, dim] of each layer, and so is the writing of keys and values into it. A
request's tokens lie anywhere in it, as its row of `req_to_token` says. For each step one small kernel writes every
key's place into a buffer with a fixed address, which captured graphs read: before a graph is replayed, because
SGLang's scheduler may write to that table from then on. A step's launches are those of `nondet.engines.attention`.

Imports SGLang at its top, because `nondet.sglang.plugin` loads it only under SGLang.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from nondet.engines.attention import Layer, Piece, Step, pieces_of, run, warm
from nondet.errors import UserError
from nondet.kernels.attention.cuda import MAX_HEAD_DIM, as_dense
from nondet.kernels.triton_common import launch
from nondet.sglang import log

_ELSE = "Unset NONDET_BATCH_INVARIANT for this model."
_LEAST_REQUESTS = 256  # for which the kernel is compiled, so that few forms are


@triton.jit(do_not_specialize=["stride"])
def places_kernel(lengths_ptr, rows_ptr, table_ptr, cu_ptr, out_ptr, stride, MOST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # Triton reads annotations itself
    """cu[r + 1] = lengths[0] + ... + lengths[r]; out[cu[r] + j] = table[rows[r], j] for each key j of request r."""
    r = tl.program_id(0)
    each = tl.arange(0, MOST)
    first = tl.sum(tl.load(lengths_ptr + each, mask=each < r, other=0), 0).to(tl.int32)
    count = tl.load(lengths_ptr + r).to(tl.int32)
    tl.store(cu_ptr + r + 1, first + count)
    row = table_ptr + tl.load(rows_ptr + r).to(tl.int64) * stride
    for start in range(tl.program_id(1) * BLOCK, count, BLOCK * tl.num_programs(1)):
        j = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + first + j, tl.load(row + j, mask=j < count, other=0), mask=j < count)


def unfit(layer: Any) -> str:
    """Why nondet's attention can't compute SGLang's RadixAttention; "" where it can."""
    faults = {
        f"heads of {layer.head_dim} and {layer.v_head_dim}": layer.head_dim != layer.v_head_dim,
        f"heads of {layer.head_dim}": layer.head_dim > MAX_HEAD_DIM or layer.head_dim % 8 != 0,
        "a window": layer.sliding_window_size is not None and layer.sliding_window_size > -1,
        "cross attention": layer.is_cross_attention,
        f"{getattr(layer.attn_type, 'value', layer.attn_type)} queries": getattr(layer.attn_type, "value", "decoder")
        != "decoder",
        "chunks that are requests (iRoPE)": bool(layer.use_irope),
        "a temperature": getattr(layer, "xai_temperature_len", -1) > 0,
        "scales of its cache": layer.k_scale is not None or layer.v_scale is not None,
    }
    return ", ".join(what for what, applies in faults.items() if applies)


class SegmentsBackend(AttentionBackend):
    """What SGLang makes for --attention-backend nondet."""

    def __init__(self, runner: Any) -> None:
        """Raises UserError: a layer or a cache that nondet's attention does not compute, by name."""
        super().__init__()
        modules = (one for one in runner.model.modules() if type(one).__name__ == "RadixAttention")
        attentions = {one.layer_id: one for one in modules}
        for fault in filter(None, map(unfit, attentions.values())):
            raise UserError(f"nondet's attention under SGLang has no {fault}", _ELSE)
        self.layers = {
            at: Layer(one.tp_q_head_num, one.tp_k_head_num, one.head_dim, one.scaling, None, one.logit_cap or None)
            for at, one in attentions.items()
        }
        self.pool, self.table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
        kind = type(self.pool).__name__
        if kind != "MHATokenToKVPool":
            raise UserError(f"nondet's attention under SGLang reads no cache by {kind}", _ELSE)
        self.longest = self.table.shape[1]
        requests, device = runner.req_to_token_pool.size, self.table.device
        # one more for each that fills the largest graph up
        self.cu_decode = torch.arange(requests + _LEAST_REQUESTS + 1, dtype=torch.int32, device=device)
        self.cu_q, self.cu_k = (torch.zeros_like(self.cu_decode) for _ in range(2))
        self.key_index = torch.zeros(0, dtype=torch.int32, device=device)
        self.step: Step | None = None
        if device.type == "cuda":
            k, _ = self.views(next(iter(self.layers)))

            def cache_of(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
                cache = torch.zeros(64, layer.kv_heads, layer.head_dim, dtype=k.dtype, device=device)
                return as_dense(cache[:32]), as_dense(cache[32:])

            log(warm(self.layers.values(), cache_of, requests, self.longest, page=1))

    def views(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, [1, heads, tokens, dim]. Raises UserError: a cache that is not stored token by token."""
        k, v = self.pool.get_kv_buffer(layer_id)
        if k.ndim != 3 or k.shape != v.shape:
            raise UserError(f"nondet's attention under SGLang reads no cache of {list(k.shape)}", _ELSE)
        return as_dense(k), as_dense(v)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """A place for each key of the largest step that is captured."""
        keys = max(max_bs * self.longest, self.key_index.numel())
        self.key_index = torch.zeros(keys, dtype=torch.int32, device=self.table.device)
        log(f"attention keeps {4 * keys / 2**20:,.0f} MiB for the place of each key of a step.")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Of a request that fills a graph up: it attends to the cache's first token, which is no request's."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The step's launches. A graph's read buffers that are as large as any, and are written here."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle() or not batch.batch_size:
            self.step = None
            return
        if mode.is_decode():
            self._decode(batch, batch.batch_size)
        else:
            self._extend(batch, batch.batch_size)

    def _placed(self, batch: Any, n: int, keys: int, longest: int) -> torch.Tensor:
        """The place of each key of n requests with so many in all, and `longest` of one, at most. Fills cu_k."""
        index = self.key_index
        if index.numel() < keys:
            index = torch.empty(keys, dtype=torch.int32, device=self.table.device)
        grid = (n, max(1, min(16, -(-longest // 1024))))
        operands = (batch.seq_lens, batch.req_pool_indices, self.table, self.cu_k, index)
        sizes = {"MOST": max(_LEAST_REQUESTS, 1 << (n - 1).bit_length()), "BLOCK": 1024}
        launch(places_kernel, grid, operands, (self.table.stride(0),), sizes)
        return index

    def _decode(self, batch: Any, n: int) -> None:
        lengths = batch.seq_lens_cpu
        # in a graph the host does not know how many keys there will be
        most = n * self.longest <= self.key_index.numel() or lengths is None
        keys, longest = (n * self.longest, self.longest) if most else (int(lengths.sum()), int(lengths.max()))
        index = self._placed(batch, n, keys, longest)
        self.step = Step.of(n, index, [Piece(0, n, 1, longest)], self.cu_decode, self.cu_k)

    def _extend(self, batch: Any, n: int) -> None:
        new, cached = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        if new is None or cached is None:
            new, lengths = batch.extend_seq_lens.tolist(), batch.seq_lens.tolist()
        else:
            lengths = [a + b for a, b in zip(cached, new, strict=True)]
        index = self._placed(batch, n, sum(lengths), max(lengths))
        starts = [0, *itertools.accumulate(new)]
        torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32, out=self.cu_q[1 : n + 1])
        one = next(iter(self.layers.values()))
        gathers = all(layer.may_gather for layer in self.layers.values())
        pieces = pieces_of(starts, lengths, max(lengths), one.heads, gathers)
        self.step = Step.of(starts[-1], index, pieces, self.cu_q, self.cu_k)
        for piece in pieces:
            if piece.dense is not None:
                begin = sum(lengths[: piece.first])
                self.step.token_index[piece.first] = index[begin : begin + piece.keys]

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """q [T, Hq D] over the cache, after k and v [T, Hkv, D] are written into it -> [T, Hq D]."""
        return self._forward(q, k, v, layer, forward_batch, save=save_kv_cache, out=None, more=kwargs)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """The same for chunks of prompts, into what SGLang made for the output, if it did."""
        out = getattr(forward_batch, "_attn_output", None)
        return self._forward(q, k, v, layer, forward_batch, save=save_kv_cache, out=out, more=kwargs)

    def _forward(
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *, save: bool, out: Any, more: dict[str, Any]
    ) -> torch.Tensor:
        given = [name for name, value in more.items() if value is not None]
        if given:
            raise UserError(f"nondet's attention under SGLang has no {' and '.join(given)}", _ELSE)
        if k is not None and save:
            self.pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        out = torch.empty_like(q) if out is None else out
        if self.step is not None:
            form = self.layers[layer.layer_id]
            rows = -1, form.heads, form.head_dim
            run(form, self.step, (q.view(rows), *self.views(layer.layer_id), out.view(rows)), page=1)
        return out
