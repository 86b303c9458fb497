"""The proof at first use that a way to launch attention has, on this machine, the bits of the one plan.

Which kernel, which tile and how many segments a program walks follow from quantities of the batch. So each is held to
the plan that can serve every call (`cuda_plan.one_plan`), which computes each request alone, densely, in contiguous
memory: whole answers, and answers that begin at another query, so that every row has another place among its
neighbours. That takes milliseconds, once for each way and form on a machine; the certificate is kept.

Inputs: "values" has equal scores and values whose exact sum is zero, so that a result is nothing but the rounding
errors of the order along the keys, segments and their merge included. "scores" has queries and keys whose exact product
is zero, at a scale that makes their rounding errors decide the probabilities. "bell" and "wide" are what is ordinary;
they move the maximum, and with it every rescaling. The sums of probabilities are additions written out in the source;
where results are rounded to half precision, another order of those would show in few elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from nondet.core import inputs
from nondet.core.certificates import certificates
from nondet.core.proof import Claim, operands_key, prove
from nondet.kernels.attention import cuda_plan
from nondet.kernels.attention import hopper as hopper_attention
from nondet.kernels.attention.cuda_launch import Call, form_of, launch
from nondet.kernels.attention.cuda_plan import Form, Way, one_plan

__all__ = ["excluded", "forget", "hopper_stands", "prove_hopper", "prove_way", "stands"]

_KINDS = ("values", "scores", "bell", "wide")
_HEADS_KV = 2
_BLOCKS = 2.3  # of queries: whole ones and a tail
_SOFTCAP = 5.0
_HOPPER_QUERIES = 300  # two whole blocks of 128 and a tail
_HOPPER = "hopper 128x128"
_MOST_KNOWN = 16384

_known: dict[tuple[Any, ...], bool] = {}


class _Case(NamedTuple):
    """Requests of q [1, Hq, nq, D] over k, v [1, Hkv, nk, D]; of each, queries from `skip` on (the last at least)."""

    requests: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    skip: int
    scale: float | None
    causal: bool
    window: int | None
    softcap: float | None


def stands(call: Call, way: Way) -> bool:
    """Is the way proven for calls of this form? If nobody knows, it is proven now, unless a CUDA graph is captured."""
    q, k, v, out = call.q, call.k, call.v, call.out
    at = (
        way,
        q.dtype,
        q.shape,
        k.shape[1],
        (q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15),
        (q.stride(), k.stride(), v.stride(), out.stride()),
        (call.causal, call.window is None, call.softcap is None, call.cu_q is None),
        None if call.positions is None else call.positions.dtype,
        None if call.key_index is None else call.key_index.dtype,
        q.device,
    )
    known = _known.get(at)
    if known is None:
        form = form_of(call)
        return _settled(at, way.name, _key(form), lambda: prove_way(form, way, q.device))
    return known


def excluded(call: Call, way: Way) -> bool:
    """Has the way been seen to give other bits? It is proven now where nobody knows and it can be."""
    if stands(call, way):
        return False
    proof = certificates().proof(way.name, _key(form_of(call)))
    return proof is not None and not proof.holds


def hopper_stands(q: torch.Tensor, k: torch.Tensor, causal: bool) -> bool:
    """As `stands`, for the warp-specialized prefill of q [B, Hq, Tq, D] over k [B, Hkv, Tk, D]."""
    group = q.shape[1] // k.shape[1]
    at = (_HOPPER, q.dtype, q.shape[3], group, causal, q.device)
    known = _known.get(at)
    if known is None:
        key = _hopper_key(q.dtype, q.shape[3], group, causal)
        prove_now = lambda: prove_hopper(q.dtype, q.shape[3], group, causal, q.device)  # noqa: E731 - a name for the line
        return _settled(at, _HOPPER, key, prove_now)
    return known


def forget() -> None:
    """Look certificates up again: after they have changed within the process."""
    _known.clear()


def prove_way(form: Form, way: Way, device: torch.device) -> bool | None:
    """Hold the way to the one plan in this form, and record what is seen; see `nondet.core.proof.prove`."""
    spans = 2 * way.span + 1 if way.span else 3
    queries = max(2, math.ceil(_BLOCKS * way.plan.block_m / form.group))

    def member(case: _Case) -> torch.Tensor:
        call = _packed(case, form) if form.packed else _dense(case, form)
        launch(call, way)
        return call.out.transpose(1, 2).flatten(0, 1)

    return _prove(Claim(way.name, _key(form), member), form, queries, spans, device)


def prove_hopper(dtype: torch.dtype, head_dim: int, group: int, causal: bool, device: torch.device) -> bool | None:
    """As `prove_way`, for the warp-specialized prefill."""
    form = Form(dtype, head_dim, group, causal, False, False, False, None, None, ((True,) * 3,) * 4, (True,) * 3)

    def member(case: _Case) -> torch.Tensor:
        call = _dense(case, form)
        out = hopper_attention.prefill(call.q, call.k, call.v, causal=causal, scale=case.scale)
        return out.transpose(1, 2).flatten(0, 1)

    claim = Claim(_HOPPER, _hopper_key(dtype, head_dim, group, causal), member)
    return _prove(claim, form, _HOPPER_QUERIES, 3, device)


def _key(form: Form) -> str:
    return operands_key("segments", (), form.words())


def _hopper_key(dtype: torch.dtype, head_dim: int, group: int, causal: bool) -> str:
    name = str(dtype).removeprefix("torch.")
    return operands_key("segments", (), (f"{name} D={head_dim} group={group}", *(["causal"] if causal else [])))


def _settled(at: tuple[Any, ...], member: str, key: str, prove_now: Callable[[], bool | None]) -> bool:
    """What is known of the member, proven now if it has to be and can be; only what is known is remembered."""
    holds = certificates().standing(member, key)
    if holds is None and not torch.cuda.is_current_stream_capturing():
        holds = prove_now()
    if holds is None:
        return False
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[at] = holds
    return holds


def _prove(claim: Claim, form: Form, queries: int, segments: int, device: torch.device) -> bool | None:
    one = one_plan(form.head_dim, form.dtype)

    def anchor(case: _Case) -> torch.Tensor:
        parts = []
        for q, k, v in case.requests:
            out = torch.full_like(q, torch.nan)
            sizes = (1, q.shape[2], k.shape[2])
            launch(Call(q, k, v, out, *sizes, case.scale, case.causal, case.window, case.softcap), one)
            parts.append(out[0, :, min(case.skip, q.shape[2] - 1) :].transpose(0, 1))
        return torch.cat(parts)

    with torch.no_grad():
        (verdict,) = prove([claim], anchor, _cases(form, queries, segments, device), certificates())
    return verdict


def _cases(form: Form, queries: int, segments: int, device: torch.device) -> Iterator[tuple[str, tuple[_Case]]]:
    """Two requests: of one length where they are dense, else the second is a decode step over fewer keys."""
    segment = cuda_plan.SEGMENT
    keys = max(segments * segment, 2 * queries + 3 * segment) - 37
    lengths = [(queries, keys), (1, segment + 70) if form.packed else (queries, keys)]
    window = keys - segment // 2 - 11 - queries if form.window else None
    softcap = _SOFTCAP if form.softcap else None
    for kind in _KINDS:
        requests, scale = [], None
        for seed, (nq, nk) in enumerate(lengths):
            drawn, own = _drawn(kind, form, nq, nk, window, 2 * seed + 1, device)
            requests.append(drawn)
            scale = scale or own
        if kind == "scores" and scale is None:
            continue  # of so few terms that they add up exactly in any order
        for skip in (0, 1, queries - 1) if kind == "values" else (0,):
            name = kind if not skip else f"{kind} from query {skip}"
            yield name, (_Case(requests, skip, scale, form.causal, window, softcap),)


def _drawn(
    kind: str, form: Form, nq: int, nk: int, window: int | None, seed: int, device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], float | None]:
    """One request's q [1, Hq, nq, D], k, v [1, Hkv, nk, D], and the scale of its scores where that is not the usual."""
    heads, dim, dtype = _HEADS_KV * form.group, form.head_dim, form.dtype
    rng = inputs.generator(seed, device)

    def made(how: str, count: int, tokens: int) -> torch.Tensor:
        return inputs.make(how, (1, count, tokens, dim), dtype, device, rng)

    q, k = made("bell", heads, nq), made("bell", _HEADS_KV, nk)
    if kind == "values":  # every score is 0 and every probability 1; the sum is zero over the keys that all queries see
        v = torch.zeros_like(k)
        start = 0 if window is None else max(0, nk - window)
        width = ((nk - nq + 1 if form.causal else nk) - start) // 2 * 2
        spread = 20  # binades: numbers of 8 bits less far apart would add up exactly
        rows = inputs.order_revealing(_HEADS_KV * dim, width, dtype, seed, negate=True, binades=spread, device=device)
        v[0, :, start : start + width] = rows.view(_HEADS_KV, dim, width).mT
        return (torch.zeros_like(q), k, v), None
    v = made("wide" if kind == "wide" else "bell", _HEADS_KV, nk)
    if kind != "scores":
        return (q, k, v), None
    how: dict[str, Any] = {"binades": 12, "device": device}
    q = inputs.order_revealing(heads * nq, dim, dtype, seed, negate=True, **how).view(q.shape)
    k = inputs.order_revealing(_HEADS_KV * nk, dim, dtype, seed, negate=False, **how).view(k.shape)
    errors = (q[0, 0, :32].float() @ k[0, 0, :512].float().mT).abs().mean()
    size = float(errors)
    return (q, k, v), (2.0 / size if size else None)


def _dense(case: _Case, form: Form) -> Call:
    q, k, v = (torch.cat([request[i] for request in case.requests]) for i in range(3))
    q, k, v, out = _laid_out(q[:, :, min(case.skip, q.shape[2] - 1) :], k, v, form)
    sizes = (q.shape[0], q.shape[2], k.shape[2])
    return Call(q, k, v, out, *sizes, case.scale, case.causal, case.window, case.softcap)


def _packed(case: _Case, form: Form) -> Call:
    """The requests one after the other, their first keys dropped and their tokens scattered, as the form has it."""
    device = case.requests[0][0].device
    queries = [q[:, :, min(case.skip, q.shape[2] - 1) :] for q, _, _ in case.requests]
    kept = [k.shape[2] for _, k, _ in case.requests]
    if form.positions is not None and case.window is not None:
        kept = [min(n, q.shape[2] + case.window - 1) for n, q in zip(kept, queries, strict=True)]
    k, v = (
        torch.cat([x[i][:, :, x[i].shape[2] - n :] for x, n in zip(case.requests, kept, strict=True)], 2)
        for i in (1, 2)
    )
    positions = key_index = None
    if form.positions is not None:
        ends = [(q.shape[2], x[1].shape[2]) for q, x in zip(queries, case.requests, strict=True)]
        positions = torch.cat([torch.arange(nk - nq, nk, device=device) for nq, nk in ends]).to(form.positions)
    if form.paged is not None:  # a cache with room for more, its tokens anywhere
        tokens = k.shape[2]
        places = torch.randperm(tokens + 13, generator=inputs.generator(5, device), device=device)[:tokens]
        k, v = (x.new_zeros(1, x.shape[1], tokens + 13, x.shape[3]).index_copy_(2, places, x) for x in (k, v))
        key_index = places.to(form.paged)
    lengths = [q.shape[2] for q in queries]
    q, k, v, out = _laid_out(torch.cat(queries, 2), k, v, form)
    longest = max(x[1].shape[2] for x in case.requests)
    how = (case.scale, case.causal, case.window, case.softcap)
    return Call(
        *(q, k, v, out, len(lengths), max(lengths), longest),
        *how,
        cu_q=_starts(lengths, device),
        cu_k=_starts(kept, device),
        positions=positions,
        key_index=key_index,
    )


def _starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def _laid_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and room for the result, in memory as the form says; the result begins as NaN."""
    aligned = (*form.aligned, True)
    results: list[torch.Tensor] = []
    for x, steps, at_16 in zip((q, k, v, torch.full_like(q, torch.nan)), form.steps, aligned, strict=True):
        strides = [1]
        least = x.shape[3]
        for size, whole in zip(reversed(x.shape[:3]), reversed(steps), strict=True):
            step = -(-least // 16) * 16 if whole else least + (least % 16 == 0)
            strides.insert(0, step)
            least = step * size
        offset = 0 if at_16 else 1
        results.append(x.new_empty(least + offset).as_strided(x.shape, strides, offset).copy_(x))
    return results[0], results[1], results[2], results[3]
