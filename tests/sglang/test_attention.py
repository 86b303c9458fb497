"""The attention backend against toys of SGLang's, in Triton's interpreter: tokens anywhere, chunks, graphs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nondet.core import compare
from nondet.engines import attention
from nondet.errors import UserError
from tests.sglang import toys

HEADS, KV_HEADS, DIM, LONGEST = 4, 2, 32, 128
pytestmark = pytest.mark.slow


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """nondet.sglang.attention over the toy's base class; it is loaded anew, and gone afterwards."""
    for name, made in toys.modules().items():
        monkeypatch.setitem(sys.modules, name, made)
    sys.modules.pop("nondet.sglang.attention", None)
    yield importlib.import_module("nondet.sglang.attention")
    sys.modules.pop("nondet.sglang.attention", None)


class Engine:
    """A runner with a cache, and requests whose tokens lie anywhere in it."""

    def __init__(self, module: ModuleType, seed: int = 1, layers: int = 1, **changed: Any) -> None:
        self.attentions = [toys.RadixAttention(HEADS, DIM, KV_HEADS, i, **changed) for i in range(layers)]
        self.rng, self.tokens = torch.Generator().manual_seed(seed), 1024
        self.free = (torch.randperm(self.tokens - 1, generator=self.rng) + 1).tolist()  # 0: no request's
        self.rows = SimpleNamespace(size=16, req_to_token=torch.zeros(16, LONGEST, dtype=torch.int32))
        runner = SimpleNamespace(
            model=torch.nn.ModuleList(self.attentions), req_to_token_pool=self.rows,
            token_to_kv_pool=toys.MHATokenToKVPool(layers, self.tokens, KV_HEADS, DIM, torch.float16),
        )  # fmt: skip
        self.backend = module.SegmentsBackend(runner)

    def place(self, row: int, upto: int) -> None:
        """Give a request places for so many tokens, those that it has among them."""
        at = self.rows.req_to_token[row]
        for i in range(upto):
            if not at[i]:
                at[i] = self.free.pop()

    def step(self, rows: list[int], each: list[Any], new: list[int], pad: int = 0, host: bool = True) -> torch.Tensor:
        """The answers to the last `new` tokens of requests q, k, v at these rows of the table [T, H D]."""
        lengths = [len(k) for _, k, _ in each]
        for row, length in zip(rows, lengths, strict=True):
            self.place(row, length)
        decode = all(n == 1 for n in new)
        places = [self.rows.req_to_token[row, n - k : n].long() for row, n, k in zip(rows, lengths, new, strict=True)]
        fill = [1] * pad
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False, is_decode=lambda: decode),
            batch_size=len(rows) + pad,
            seq_lens=torch.tensor(lengths + fill), seq_lens_cpu=torch.tensor(lengths + fill),
            req_pool_indices=torch.tensor(rows + [0] * pad), extend_seq_lens=torch.tensor(new),
            extend_seq_lens_cpu=new if host else None,
            extend_prefix_lens_cpu=[n - k for n, k in zip(lengths, new, strict=True)],
            out_cache_loc=torch.cat([*places, torch.zeros(pad, dtype=torch.long)]),
        )  # fmt: skip
        q, k, v = (torch.cat([one[i][-n:] for one, n in zip(each, new, strict=True)]) for i in range(3))
        q, k, v = (torch.cat([x, x.new_zeros(pad, *x.shape[1:])]) for x in (q, k, v))
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if decode else self.backend.forward_extend
        outs = [forward(q.flatten(1), k, v, layer, batch) for layer in self.attentions]
        assert all(compare.identical(out, outs[0]) for out in outs)
        return outs[0][: sum(new)]


def request(length: int, seed: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(length, heads, DIM, generator=rng).half() for heads in (HEADS, KV_HEADS, KV_HEADS))


def exact(one: tuple[torch.Tensor, ...], new: int, cap: float = torch.inf) -> torch.Tensor:
    q, k, v = (x.double() for x in one)
    q, wide = q[-new:], HEADS // KV_HEADS
    hidden = torch.arange(len(k)) > torch.arange(len(k) - new, len(k))[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(wide, 1)) * DIM**-0.5
    scores = cap * torch.tanh(scores / cap) if cap < torch.inf else scores
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(wide, 1)).flatten(1)


def test_a_prompt_in_chunks_beside_others_has_the_bits_that_it_has_alone(module: ModuleType) -> None:
    """Whole and solo; in two chunks, the later beside others; its last token again, as a decode."""
    one, other = request(60, 1), request(33, 2)
    alone = Engine(module).step([3], [one], [60])
    torch.testing.assert_close(alone.double(), exact(one, 60), rtol=5e-3, atol=5e-3)
    engine = Engine(module, seed=5, layers=2)
    head = tuple(x[:25] for x in one)
    assert compare.identical(engine.step([7], [head], [25]), alone[:25])
    both = engine.step([2, 7], [other, one], [33, 35], host=False)
    assert compare.identical(both[33:], alone[25:])
    torch.testing.assert_close(both[:33].double(), exact(other, 33), rtol=5e-3, atol=5e-3)
    assert compare.identical(engine.step([7, 2], [one, other], [1, 1])[:1], alone[59:])
    assert not compare.identical(both[33:], Engine(module).step([3], [request(60, 9)], [60])[25:])


def test_a_graph_reads_what_each_replay_wrote(module: ModuleType) -> None:
    """Its buffers keep their addresses, are as large as any step's, and a filled-up request changes no other's bits."""
    engine, each = Engine(module), [request(n, n) for n in (5, 40, 17)]
    for row, one in enumerate(each):
        engine.step([row], [one], [len(one[0])])
    eager = engine.step([0, 1, 2], each, [1, 1, 1])
    engine.backend.init_cuda_graph_state(8, 8)
    addresses = {engine.backend.key_index.data_ptr(), engine.backend.cu_k.data_ptr()}
    assert compare.identical(engine.step([0, 1, 2], each, [1, 1, 1], pad=5), eager)
    step = engine.backend.step
    assert step.pieces == [attention.Piece(0, 8, 1, LONGEST)]
    assert {step.key_index.data_ptr(), step.bounds[0][1].data_ptr()} == addresses
    assert compare.identical(engine.step([1, 2], each[1:], [1, 1]), eager[1:])
    assert engine.backend.step.key_index.data_ptr() in addresses
    assert engine.backend.get_cuda_graph_seq_len_fill_value() == 1


def test_a_large_chunk_is_gathered_to_the_same_answers(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = request(90, 3), request(20, 4)

    def answers() -> torch.Tensor:
        engine = Engine(module)
        engine.step([1], [tuple(x[:20] for x in one)], [20])
        return engine.step([4, 1], [other, one], [20, 70])

    before = answers()
    seen: list[tuple[int, ...]] = []
    dense = attention.attention
    monkeypatch.setattr(attention, "DENSE_ITEMS", 1)
    monkeypatch.setattr(attention, "DENSE_WORK", HEADS * 90 * 70)
    monkeypatch.setattr(attention, "attention", lambda q, *kv, **how: seen.append(q.shape) or dense(q, *kv, **how))
    assert compare.identical(answers(), before)
    assert seen == [(1, HEADS, 70, DIM)]


def test_soft_caps_and_outputs_that_sglang_made(module: ModuleType) -> None:
    one = request(40, 6)
    out = Engine(module, logit_cap=0.5).step([1], [one], [40])
    torch.testing.assert_close(out.double(), exact(one, 40, cap=0.5), rtol=5e-3, atol=5e-3)
    engine = Engine(module)
    made = engine.step([1], [one], [40])
    into = torch.full_like(made, torch.nan)
    q, k, v = (x.flatten(1) if i == 0 else x for i, x in enumerate(one))
    batch = SimpleNamespace(_attn_output=into, out_cache_loc=None)
    assert engine.backend.forward_extend(q, k, v, engine.attentions[0], batch, save_kv_cache=False) is into
    assert compare.identical(into, made)
    with pytest.raises(UserError, match="has no sinks"):
        engine.backend.forward_extend(q, k, v, engine.attentions[0], batch, sinks=torch.zeros(4), score_mod=None)
    engine.backend.init_forward_metadata(SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True)))
    assert engine.backend.step is None


def test_what_it_does_not_do_is_refused_by_name(module: ModuleType) -> None:
    for changed, named in (
        ({"sliding_window_size": 16}, "no a window"),
        ({"is_cross_attention": True}, "no cross attention"),
        ({"head_dim": 512, "v_head_dim": 512}, "no heads of 512"),
        ({"k_scale": 1.0}, "no scales of its cache"),
        ({"use_irope": True}, r"no chunks that are requests"),
    ):
        with pytest.raises(UserError, match=named):
            Engine(module, **changed)
    engine = Engine(module)
    engine.backend.pool.k[0] = engine.backend.pool.k[0].view(64, 16, KV_HEADS, DIM)
    with pytest.raises(UserError, match=r"no cache of \[64, 16, 2, 32\]"):
        engine.backend.views(0)
    runner = SimpleNamespace(
        model=engine.attentions[0], token_to_kv_pool=SimpleNamespace(), req_to_token_pool=engine.rows
    )
    with pytest.raises(UserError, match="reads no cache by SimpleNamespace"):
        module.SegmentsBackend(runner)
