"""Attention: one query's output while the batch, the chunk that it is computed in, or the cache before it change.

A request's tokens are a decode step, in a chunk of a prefill, in a batch of ragged requests, or come after a cache hit.
A kernel that picks its tile, or the number of parts of the keys, by these sizes adds the same terms in another order.
If cached keys are reduced in blocks separate from the new ones, the order changes where the cache ends: 80 cached and
48 new keys in blocks of 32 are 3 + 2 blocks, not 4 (He & Thinking Machines Lab 2025, doi 10.64434/tml.20250910).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from nondet.core.compare import same
from nondet.core.inputs import EXACT
from nondet.core.measure import Trial
from nondet.core.operands import of_attention
from nondet.probes import base
from nondet.probes.base import Case, Classes, Operator, Options, Probe, dtypes, kinds

# Calls of each size, each with its own numbers: a trace saw one call, in which one element of hundreds may differ.
_DRAWS = 32


def packed_trials(
    operator: Operator, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: int, met: Sequence[tuple[int, int]]
) -> Iterator[Trial]:
    """The last query and the last `own` keys, solo and among as many rows and keys of others as the trace saw: they are
    the first keys of the call, in its middle, and the last, because vector bodies and tails depend on position.

    `operator`: stock attention, which takes an additive `mask`. q [B, Hq, Tq, D], k, v [B, Hkv, Tk, D] are of the
    largest sizes, for B calls of one packed row each.
    """

    def last(rows: int, keys: int, start: int) -> torch.Tensor:
        """The rows' results [B, Hq, 1, D]. Other rows see the other keys."""
        seen = torch.zeros((1, 1, rows, keys), dtype=torch.bool, device=q.device)
        seen[..., -1, start : start + own] = seen[..., :-1, :start] = seen[..., :-1, start + own :] = True
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, torch.finfo(q.dtype).min)
        first, others = k.shape[2] - own, keys - own
        order = [*range(start), *range(first, first + own), *range(start, others)]  # others' keys around its own
        # transformers repeats keys and values for each query head where there is a mask
        ks, vs = (x[:, :, order].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        calls = zip(q[:, :, q.shape[2] - rows :].split(1), ks.split(1), vs.split(1), strict=True)
        return torch.cat([operator(*call, mask=mask)[:, :, -1:] for call in calls])

    yield Trial(f"alone, {own} keys", partial(last, 1, own, 0))
    for rows, keys in dict.fromkeys(met):
        for start in sorted({0, (keys - own) // 2, keys - own}) if keys > own else ():
            yield Trial(f"{rows} rows, {keys} keys, its own from key {start}", partial(last, rows, keys, start))


class _Heads(NamedTuple):
    query: int
    key: int
    dim: int


_HEADS = {"cuda": _Heads(32, 8, 128), "cpu": _Heads(8, 2, 64)}  # of Qwen3-8B on a GPU
_DTYPES = {"cuda": ("bfloat16",), "cpu": ("bfloat16", "float32")}
_BATCHES = {"cuda": (1, 2, 3, 4, 8, 16, 32, 64), "cpu": (1, 2, 3, 4, 8, 16)}
# Tokens of a prompt, and keys of a decode step. cuDNN plans for tens of milliseconds for every new length: no long
# sweeps of them.
_LENGTHS = {"cuda": (512, 2048), "cpu": (256, 512)}
_FULL = {"cuda": (2048, 8192), "cpu": (1024, 2048)}
_CHUNKS = {"cuda": (256, 100, 65), "cpu": (256, 100, 64, 33, 17)}
_FULL_CHUNKS = (512, 256, 128, 100, 64, 33, 32, 17, 16, 7, 1)
# Not position 0, which has one key and so no sum; cuDNN refuses it, which would lose its whole row.
_POSITIONS = (1, 2, 15, 16, 31, 33, 63, 64, 100, 127, 128, 200, 255, 300, 511, 512, 777, 1023, 1024, 1500, 2047)
_FEW_POSITIONS = (1, 15, 31, 64, 127, 200, 300, 511)
# all tokens; the last ones, which are compared; how many of the others were cached before
_BOUNDARY = (128, 48, (0, 32, 64, 72, 80))
# Caches that end at, before and after the boundaries of blocks and splits; some of them and one other are drawn.
_CACHES = (1, 2, 15, 17, 31, 33, 63, 65, 127, 128, 129, 191, 255, 256, 257, 511, 513, 769, 1023, 1025)
_HEAD_DIMS = (32, 40, 64, 72, 80, 96, 112, 128, 192, 256)
_GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
_REQUESTS = 2  # in each call of a prefill, a chunk, a cached prompt
_DENSE = 16  # every number of requests up to here is tested
_LONG = (256, 257, 280, 299)
_SEEN_OF = (40, 100)  # tokens that are compared, of a prompt's
_SCALE = 0.25  # of the scores, where a model gives one of its own
JOINED = (1, 2, 8, 17, 63, 64, 65, 128, 256)  # queries of the longest request in the batch


class Attention(Probe):
    """Grouped-query attention under every backend: decode in a batch, prefill, chunks, longer prompts, others."""

    name = "attention"
    answers = EXACT

    def cases(self, options: Options) -> Iterable[Case]:
        """The heads of `options.config` if it names any; --m, --k and --n are not attention's and are ignored."""
        device, config, chosen = options.device, options.config, "heads" in options.config
        heads = _Heads(config["heads"], config["kv_heads"], config["head_dim"]) if chosen else _HEADS[device]
        chosen_dtypes = dtypes(options, "attention", _DTYPES[device])
        for dtype in chosen_dtypes:
            plain = _Maker(options, dtype, heads)
            if options.met:
                yield plain.packed()
            yield from _decodes(plain)
            yield from _prefills(plain)
            for kind in ("bell", "positive"):
                yield plain.case(f"requests among 6, {base.AXES['neighbour_values']}", "neighbour_values", 200, kind)
            yield plain.case("the last of 300 tokens while the longest query grows", "neighbour_length", 300, "order")
            if dtype == chosen_dtypes[-1] or options.full:
                yield from _drawn(plain, chosen=chosen)
                yield from _forms(plain, chosen=chosen)

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """q [B, Hq, Tq, D]; k, v [B, Hkv, Tk, D], v's kind along the tokens."""
        return dict(zip("qkv", of_attention(case.inputs, "", case.shape, case.torch_dtype, device, seed), strict=True))

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """See `cases`; the others are compared with the first variant."""
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        T = k.shape[2]
        if form := {name: case.data[name] for name in ("causal", "scale") if name in case.data}:
            base.require_arguments(operator, q, k, v, **form)
            operator = partial(operator, **form)

        def upto(start: int, stop: int, kept: slice | list[int] = slice(None)) -> torch.Tensor:
            """Queries start ... stop - 1, with all keys up to the last of them; returns the queries `kept` of these."""
            return operator(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop])[:, :, kept]

        def in_pieces(pieces: list[tuple[int, int]]) -> torch.Tensor:
            return torch.cat([upto(*piece) for piece in pieces], 2)

        def of_requests(start: int, stop: int) -> torch.Tensor:
            return operator(q[start:stop], k[start:stop], v[start:stop])

        def turned(*by_token: torch.Tensor) -> torch.Tensor:
            """Of tensors [T, H, B, D], with a result in the same layout."""
            return operator(*(x.transpose(0, 2).contiguous() for x in by_token)).transpose(0, 2)

        by_value: dict[str, Operator] = {
            "batch_size": partial(base.in_slices, of_requests, q.shape[0]),
            "query_chunk": lambda c: in_pieces([(s, min(s + c, T)) for s in range(0, T, c)]),
            "prompt_length": lambda length: upto(0, length, slice(64)),
            "cache": lambda cached: upto(cached, T, slice(-case.data["new"], None)),
        }
        if case.varied == "load":
            yield from packed_trials(operator, q, k, v, case.data["own"], case.data["met"])
        elif case.varied == "hidden_keys":
            seen = torch.arange(T, device=q.device) < _SEEN_OF[0]
            call = base.Call.of([x.transpose(0, 2) for x in (q, k, v)], seen, batched=2)
            yield from base.shared_trials("neighbour_values", call, turned)
        elif case.varied in base.AXES:  # decode steps: of three requests in a row the second is compared
            call = base.Call.of((q[:, :, -1:], k, v), batched=3)
            yield from base.shared_trials(case.varied, call, operator)
        elif case.varied == "neighbour_length":
            yield from _joined(operator, q, k, v)
        elif positions := case.data.get("positions"):
            yield Trial("prefill", partial(upto, 0, T, list(positions)))
            yield Trial("decode", partial(in_pieces, [(p, p + 1) for p in positions]))
        else:
            for value in case.data["values"]:
                yield Trial(value, partial(by_value[case.varied], value))

    def findings(self, case: Case, inputs: Any, classes: Classes, operator: Operator) -> dict[str, Any]:
        """Which positions differ between prefill and decode, for any request."""
        if not (positions := case.data.get("positions")):
            return {}
        equal = torch.stack([same(classes.results[0], result) for result in classes.results]).all(0)
        by_position = equal.transpose(0, 2).flatten(1).all(-1).tolist()
        named = [position for position, alike in zip(positions, by_position, strict=True) if not alike]
        return {"positions": list(positions), "positions_differing": named}


def _joined(operator: Operator, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[Trial]:
    """The last token of each request, while the batch's longest query grows; ragged batches where they are served."""
    T = k.shape[2]
    lengths = [n for n in JOINED if n <= T]
    ragged: Any = getattr(operator, "ragged", None)
    decodes = [(q[b, :, T - 1 :], k[b], v[b]) for b in range(len(q))]

    def last_of(length: int) -> torch.Tensor:
        return operator(q[:, :, T - length :], k, v)[:, :, -1:]

    def last_of_ragged(length: int) -> torch.Tensor:
        prompt = (q[0, :, :length], k[0, :, :length], v[0, :, :length])
        return torch.stack(ragged([*decodes[:1], prompt, *decodes[1:]])[:1] + ragged([prompt, *decodes])[2:])

    for length in lengths:
        yield Trial(length, partial(last_of, length))
    for length in lengths if ragged is not None else ():
        yield Trial(f"ragged, {length} queries join", partial(last_of_ragged, length))


class _Maker(NamedTuple):
    options: Options
    dtype: str
    heads: _Heads
    narrow: bool = False  # values are half as wide as keys

    def packed(self) -> Case:
        """One query and its keys among those of others, at the sizes that a trace saw. Only stock attention is called
        with a mask: ours keep the requests of a pack apart."""
        own, met = self.options.own, self.options.met
        rows, keys = map(max, zip(*met, strict=True))
        name = f"one query and its {own} keys packed with others', as a trace met them, {self._named()}"
        shape, data = self._shape(_DRAWS, rows, keys), {"own": own, "met": met}
        return Case(name, "attention", shape, self.dtype, "load", impls=("stock",), data=data)

    def case(self, name: str, varied: str, keys: int, kind: str = "bell", **data: Any) -> Case:
        """A case over `keys` keys; a `UserError` for one that does not fit in memory."""
        batch = max(data["values"]) if varied == "batch_size" else 6 if varied in base.AXES else _REQUESTS
        queries, heads = 1 if varied == "batch_size" and data.get("causal", True) else keys, self.heads
        elements = batch * heads.dim * (2 * heads.key * keys + 2 * heads.query * queries)
        # numbers are drawn in float32; the oracle holds a float64 score for each pair of a query and a key
        needed = elements * (getattr(torch, self.dtype).itemsize + 16) + batch * heads.query * queries * keys * 8 * 3
        base.require_memory(self.options.device, needed, f"attention of {keys} keys, Hq={heads.query}")
        shape, name = self._shape(batch, queries, keys), f"{name}, {self._named()}, {kind}"
        if self.narrow:
            shape, data = shape | {"Dv": heads.dim // 2}, data | {"may_refuse": True}
        axis = "other" if varied == "hidden_keys" else None
        exact = False if "positions" in data else None  # 1 / 3 of a sum is rounded
        return Case(name, "attention", shape, self.dtype, varied, kind, axis=axis, exact=exact, data=data)

    def _shape(self, batch: int, queries: int, keys: int) -> dict[str, int]:
        query, key, dim = self.heads
        return {"B": batch, "Hq": query, "Hkv": key, "Tq": queries, "Tk": keys, "D": dim}

    def _named(self) -> str:
        return "Hq={} Hkv={} D={}".format(*self.heads)

    def decode(self, what: str, keys: int, kind: str = "order", **data: Any) -> Case:
        """Decode steps in batches of every size."""
        return self.case(f"decode of {what}", "batch_size", keys, kind, **{"values": (1, 2, 3, 5), **data})

    def tokens(self) -> tuple[int, int]:
        """Tokens of a prompt, and keys of a decode step."""
        return (_FULL if self.options.full else _LENGTHS)[self.options.device]


def _decodes(maker: _Maker) -> Iterator[Case]:
    options, (_, cache), batches = maker.options, maker.tokens(), _BATCHES[maker.options.device]
    yield maker.case(f"decode of requests among 6, 96 keys, {base.AXES['history']}", "history", 96, "mixed")
    for kind in kinds(options, ("bell", "order", "outlier")):
        dense = {*range(1, _DENSE + 1), *base.drawn(max(batches), options, above=_DENSE)} if kind == "order" else set()
        what = f"{max(batches)} requests in batches of B, {cache} keys"
        yield maker.decode(what, cache, kind, values=sorted({*batches, *dense}))
    if options.inputs is None:
        yield maker.decode(f"8 requests in batches of B, {cache} keys", cache, "integers", values=(1, 3, 8))


def _prefills(maker: _Maker) -> Iterator[Case]:
    options, (tokens, _) = maker.options, maker.tokens()
    few = tuple(p for p in _FEW_POSITIONS if p < tokens)
    many = tuple(p for p in _POSITIONS if p < tokens) if options.full or options.device == "cpu" else few
    name = f"prefill of {tokens} tokens against decode of the same positions"
    for kind in kinds(options, ("bell", "wide")):
        some = many if kind == "bell" or options.full else few
        yield maker.case(name, "query_chunk", tokens, kind, positions=some)
    yield maker.case(f"{name}, scale={_SCALE}", "query_chunk", tokens, positions=few, scale=_SCALE)
    chunks = (c for c in (_FULL_CHUNKS if options.full else _CHUNKS[options.device]) if c < tokens)
    yield maker.case(f"prefill of {tokens} tokens in chunks", "query_chunk", tokens, values=(tokens, *chunks))
    lengths = tuple(t for t in (64, 65, 100, 128, 200, tokens // 2 + 1, tokens) if t <= tokens)
    name = f"the first 64 positions of a prompt that grows to {tokens}"
    yield maker.case(name, "prompt_length", tokens, values=lengths)
    total, new, cached = _BOUNDARY
    yield maker.case(f"the last {new} of {total} tokens, after as many cached", "cache", total, values=cached, new=new)


def _forms(plain: _Maker, *, chosen: bool) -> Iterator[Case]:
    five, heads = "5 requests in batches of B, 160 keys", plain.heads
    name = "requests of 40 tokens in batches of B, not causal"
    yield plain.case(name, "batch_size", 40, "order", values=(1, 2, 3, 5), causal=False)
    yield plain.decode(f"{five}, scale={_SCALE}", 160, scale=_SCALE)
    narrow = plain._replace(narrow=True)
    yield narrow.decode(f"{five}, values half as wide as keys", 160)
    prefill, positions = "prefill of 100 tokens against decode", (1, 31, 64, 99)
    yield narrow.case(f"{prefill}, values half as wide as keys", "query_chunk", 100, positions=positions)
    name = f"the first {_SEEN_OF[0]} of {_SEEN_OF[1]} tokens while keys that they do not see hold other values"
    yield plain.case(name, "hidden_keys", _SEEN_OF[1])
    if plain.tokens()[0] <= _LONG[-1]:
        name = f"prefill of {_LONG[-1] + 1} tokens against decode, beyond the first 256"
        yield plain.case(name, "query_chunk", _LONG[-1] + 1, positions=_LONG)
    others = {heads.query} if chosen else {1, heads.query}
    if not (chosen or plain.options.one_of_all):
        others.add(heads.query // 2)
    for key in sorted(others - {heads.key}):
        maker = plain._replace(heads=heads._replace(key=key))
        yield maker.decode(five, 160)
        if not plain.options.brief:  # each compiles kernels that no other case has
            yield maker.case(prefill, "query_chunk", 100, positions=positions)


def _drawn(plain: _Maker, *, chosen: bool) -> Iterator[Case]:
    """Cache lengths, and unless a model was named a number of heads and their size, new for each seed."""
    seed = plain.options.seed
    rng, seeded = random.Random(seed), f"drawn from seed {seed}"  # noqa: S311 - sizes, not a secret
    listed = rng.sample(_CACHES, len(_CACHES) if plain.options.full else 2)
    for length in sorted({*listed, rng.randint(2, 1200), rng.randint(1025, 3000)}):
        yield plain.decode(f"5 requests in batches of B, {length} keys, {seeded}", length)
    if not chosen:
        key, groups, dim, tokens = rng.randint(1, 4), rng.choice(_GROUPS), rng.choice(_HEAD_DIMS), rng.randint(65, 300)
        maker = plain._replace(heads=_Heads(key * groups, key, dim))
        yield maker.decode(f"5 requests, {tokens} keys, {seeded}", tokens)
        if not plain.options.brief:
            name = f"prefill of {tokens} tokens against decode, {seeded}"
            yield maker.case(name, "query_chunk", tokens, positions=(1, 33, 64))
