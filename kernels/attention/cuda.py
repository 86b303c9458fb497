"""Attention with fixed KV segments on CUDA: prefill, chunked prefill and decode of a position give equal bits.

The order of reduction is `SEGMENTS` of operator.py: segments of SEGMENT keys and tiles of `tile_keys` keys, both
anchored at key 0, an online softmax over a segment's tiles, the segments merged in order, one rounding. Only the
position and the head enter, not how many queries, requests, cached tokens or chunks there are. How many segments a
program processes (all, some, or one: split-KV decode) and how many rows it holds changes only speed. A fixed segment
*size* instead of a number of splits is what He & Thinking Machines Lab (2025, doi 10.64434/tml.20250910) propose; the
merge is that of flash decoding. FMA contraction is off (enable_fp_fusion=False), because next to a merge it would
depend on the kernel; every fused multiply-add is in the source. That narrow mma.sync and wide wgmma tiles accumulate
alike is a property of the hardware. So each way to launch is proven by bits at its first use on a machine, against the
one plan that supports every call. That plan runs where a way is not proven, or can't be while a CUDA graph is captured.

Long prefills of half precision on Hopper go to `hopper.prefill`, a faster member of the same class.

An infinite or NaN value at a key that a query may not see can still reach it (0 * inf), as in PyTorch's math.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from nondet.core import inputs
from nondet.core.certificates import certificates
from nondet.core.launch import note
from nondet.core.proof import Claim, established, operands_key, prove
from nondet.kernels.attention import hopper, triton_kernels
from nondet.kernels.attention.masks import starts
from nondet.kernels.attention.triton_kernels import SEGMENT as SEGMENT
from nondet.kernels.attention.triton_kernels import Form, Way, attend_kernel, has_pdl, merge_kernel, one_plan, plan_for
from nondet.kernels.triton_common import HALF, INTERPRETED, Step, again, on_device, remember, require
from nondet.kernels.triton_common import forget as forget_calls
from nondet.kernels.triton_common import launch as triton_launch

_MAX_PARTIAL_ELEMENTS = 2**28  # 1 GiB of float32 for the segments' results
_LOG2_E = math.log2(math.e)
MERGE_UNROLL = 8  # segments that a merge loads at a time


class Call(NamedTuple):
    """Operands and sizes of one call: q, out [B, Hq, T, D] and k, v [B, Hkv, T, D], last stride 1.

    Packed (cu_q given): B = 1, and requests are ranges of T.

    Attributes:
        tq, tk: Sizes of every request, or packed, the largest; tk counts from position 0.
        page: Of a paged cache, the number of keys that lie together: key i * page + j of a request is j after key i *
            page. 0 where it is unknown.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    requests: int
    tq: int
    tk: int
    scale: float | None
    causal: bool
    window: int | None
    softcap: float | None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    key_index: torch.Tensor | None = None
    page: int = 0


def form_of(call: Call) -> Form:
    """What the kernels are compiled for."""
    axis = 2 if call.cu_q is not None else 0
    operands = (call.q, call.k, call.v, call.out)
    return Form(
        dtype=call.q.dtype,
        head_dim=call.q.shape[3],
        group=call.q.shape[1] // call.k.shape[1],
        causal=call.causal,
        window=call.window is not None,
        softcap=call.softcap is not None,
        packed=call.cu_q is not None,
        positions=None if call.positions is None else call.positions.dtype,
        paged=None if call.key_index is None else call.key_index.dtype,
        page=call.page,
        steps=tuple(tuple(x.stride(i) % 16 == 0 for i in (axis, 1, 2)) for x in operands),
        aligned=tuple(x.data_ptr() % 16 == 0 for x in (call.q, call.k, call.v)),
    )


def quickest(call: Call, split: bool | None = None) -> Way:
    """The way that should take the least time: of all, or of those that split (True) or do not (False)."""
    heads, heads_kv, head_dim = call.q.shape[1], call.k.shape[1], call.q.shape[3]
    group = heads // heads_kv
    plan = plan_for(min(call.tq * group, 128), head_dim, call.q.dtype)
    segments = -(-call.tk // triton_kernels.SEGMENT)
    programs = call.requests * heads_kv * -(-call.tq * group // plan.block_m)
    slots = call.q.shape[0] * call.q.shape[2] * heads * segments
    fits = slots * (head_dim + 2) <= _MAX_PARTIAL_ELEMENTS
    few = split is None and plan.block_m == triton_kernels.FEW_ROWS and has_few_row_kernels(call)
    together = call.cu_q is None or (call.page in hopper.PAGES and call.positions is None)
    if few and together and hopper.call_fault(call.q, call.k, call.v) is None:
        return triton_kernels.few_rows(programs, segments if fits else 1, head_dim, call.q.device)
    if split is None:
        span = triton_kernels.span_for(programs, segments, triton_kernels.SEGMENT // plan.block_n, call.q.device)
        if not fits or call.positions is not None:
            span = 0  # with positions, the host does not know how many segments there are
    else:
        span = 1 if split else 0
    pdl = span > 0 and not INTERPRETED and torch.version.hip is None and has_pdl(call.q.device)
    lanes = few and span > 0 and head_dim % hopper.MERGE_COLUMNS == 0
    return Way(plan if call.window is None else plan._replace(peel=False), span, pdl, lanes=lanes)


def has_few_row_kernels(call: Call) -> bool:
    """Whether the call has no window and no soft cap, on a GPU that has the kernels of `hopper.decode_kernel`."""
    if torch.compiler.is_compiling():
        return False  # they can't be traced, and need not be: the one plan runs there
    return call.window is None and call.softcap is None and hopper.available(call.q.device) is None


def launch(call: Call, way: Way, why: str = "", what: object = None) -> None:
    """Compute call.out in this way.

    `why` is added to the note, where another way would have been faster. `what`: the key of its cached launches; for a
    packed call without positions, all that its tensors don't show.
    """
    q, k, v, out = call.q, call.k, call.v, call.out
    plan, span = way.plan, way.span
    heads, heads_kv, head_dim = q.shape[1], k.shape[1], q.shape[3]
    group = heads // heads_kv
    segment = triton_kernels.SEGMENT
    blocks = -(-call.tq * group // plan.block_m)
    segments = -(-call.tk // segment)
    programs = call.requests * heads_kv * blocks
    slots = q.shape[0] * q.shape[2] * heads * segments
    packed = call.cu_q is not None
    scale = 1.0 / math.sqrt(head_dim) if call.scale is None else call.scale
    qk_scale = scale * _LOG2_E if call.softcap is None else _LOG2_E
    caps = (0.0, 0.0) if call.softcap is None else (2.0 * _LOG2_E * scale / call.softcap, call.softcap)
    window = call.window or 0
    axis = 2 if packed else 0  # a packed request starts at a token, a dense one at a batch entry
    part = None
    if span:
        spare = hopper.MERGE_CHUNK * head_dim if way.lanes else 0
        part = torch.empty(slots * (head_dim + 2) + spare, device=q.device, dtype=torch.float32)
    mask = {"VARLEN": packed, "CAUSAL": call.causal}
    masks = mask | {"WINDOW": window > 0}
    block = f"{plan.block_m}x{plan.block_n}"
    name = ("attention_decode_split" if span else "attention_decode") if way.tiles else None
    name = name or ("attention_split" if span else "attention_one_pass")
    label = f"{name}[{block}, {span} of {segments} x {segment}]" if span else f"{name}[{block}{why}]"
    note(label)
    rows_per_start = 1 if packed else call.tq
    pointers = (call.cu_q, call.cu_k, call.positions)
    strides = tuple(x.stride(i) for x in (q, k, v, out) for i in (axis, 1, 2))
    dims = {"HEAD_DIM": head_dim, "SEGMENT": segment}
    grid = (programs, -(-segments // span) if span else 1)
    with on_device(q):
        if way.tiles:
            page = call.page if packed else 0
            boxes = (hopper.descriptor(x, page or plan.block_n) for x in (k, v))
            launched = triton_launch(
                hopper.decode_kernel,
                grid,
                (q, *boxes, out, part, call.cu_q, call.cu_k, call.key_index),
                (
                    *(call.tq, call.tk, blocks, heads_kv, span, segments, rows_per_start, slots, qk_scale),
                    *(*strides[:3], *strides[9:]),
                ),
                {"SPLIT": span > 0, "TILES": way.tiles, "SLOTS": plan.stages, "EARLY": way.early, **mask}
                | {"GROUP": group, **dims, "BLOCK_N": plan.block_n, "PAGE": page, "WARPS": plan.warps},
                num_warps=plan.warps,
                maxnreg=hopper.DECODE_REGISTERS,
                enable_fp_fusion=False,
                **({"launch_pdl": True} if way.early else {}),
            )
        else:
            launched = triton_launch(
                attend_kernel,
                grid,
                (q, k, v, out, part, *pointers, call.key_index),
                (
                    *(call.tq, call.tk, blocks, heads_kv, window, segments, rows_per_start, slots, qk_scale),
                    *(*caps, *strides),
                ),
                {"SPAN": span, "PEEL": plan.peel, "PDL": way.pdl, **masks, "SOFTCAP": call.softcap is not None}
                | {"GROUP": group, **dims}
                | {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_D": plan.block_d},
                num_warps=plan.warps,
                num_stages=plan.stages,
                enable_fp_fusion=False,
            )
        rows = call.requests * call.tq * heads
        if not span:
            merged = None
        elif way.lanes:
            merged = hopper.merge(
                rows,
                segments,
                (part, out, call.cu_q, call.cu_k),
                (*(call.tq, call.tk, heads, call.tq * heads, segments, rows_per_start, slots, qk_scale), *strides[9:]),
                pdl=way.pdl,
                **mask,
                **dims,
            )
        else:
            merged = triton_launch(
                merge_kernel,
                (rows,),
                (part, out, *pointers),
                (
                    *(call.tq, call.tk, heads, call.tq * heads, window, segments, rows_per_start, slots, qk_scale),
                    *strides[9:],
                ),
                {"UNROLL": MERGE_UNROLL, "PDL": way.pdl, **masks, **dims, "BLOCK_D": plan.block_d},
                num_warps=1,
                enable_fp_fusion=False,
                **({"launch_pdl": True} if way.pdl else {}),
            )
    if what is None:
        return
    given: tuple[Any, ...] = (q, k, v, out, call.cu_q, call.cu_k, call.key_index) if packed else (q, k, v)
    ends = (4, 5, -1, 6) if packed else (-1,) * 4
    buffers = [*(() if packed else (out.transpose(1, 2),)), *(() if part is None else (part,))]
    at = -1 if part is None else len(given) + len(buffers) - 1
    steps = [Step(launched, (0, 1, 2, 3, at, *ends))]
    if way.tiles:
        patterns = ((i, i, hopper.pattern(x, page or plan.block_n)) for i, x in ((1, k), (2, v)))
        steps = [Step(launched, (0, 1, 2, 3, at, *ends[:2], ends[3]), (*patterns,))]
    if part is not None:
        steps.append(Step(merged, (at, 3, *ends[: 2 if way.lanes else 3])))
    remember(what, given, (*buffers,), label, *steps)


# The proof at first use that a way to launch attention has, on this machine, the bits of the one plan.
# The kernel, the tile and the number of segments per program depend on the batch. So each way is compared with the plan
# that supports every call (`one_plan`), which computes each request solo, densely, in contiguous memory:
# whole results, and results that begin at another query, so that every row has another position among its neighbours.
# That takes milliseconds, once per way and form on a machine; the certificate is kept.
# Inputs: "values" has equal scores and values whose exact sum is zero, so that a result consists of the rounding errors
# of the order along the keys, including segments and their merge. "scores" has queries and keys whose exact product is
# zero, at a scale that makes their rounding errors decide the probabilities. "bell" and "wide" are ordinary; they move
# the maximum, and with it every rescaling. The sums of probabilities are additions written out in the source; where
# results are rounded to half precision, another order of those would show in few elements.

PROOF_KINDS = ("values", "scores", "bell", "wide")
PROOF_HEADS = 2
PROOF_BLOCKS = 2.3  # of queries: whole ones and a tail
_SOFTCAP = 5.0
_HOPPER_QUERIES = 300  # two whole blocks of 128 and a tail
_HOPPER = "hopper 128x128"
_MOST_KNOWN = 16384

_known: dict[tuple[Any, ...], bool] = {}


class _Case(NamedTuple):
    """Requests of q [1, Hq, nq, D] over k, v [1, Hkv, nk, D]; each with its queries from `skip` on."""

    requests: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    skip: int
    scale: float | None
    causal: bool
    window: int | None
    softcap: float | None


def stands(call: Call, way: Way) -> bool:
    """Whether the way is proven for calls of this form. Proven now if unknown, unless a CUDA graph is captured."""
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
        None if call.key_index is None else (call.key_index.dtype, call.page),
        q.device,
    )
    known = _known.get(at)
    if known is None:
        form = form_of(call)
        return _settled(at, way.name, form_key(form), partial(prove_way, form, way, q.device))
    return known


def excluded(call: Call, way: Way) -> bool:
    """Whether the way gave different bits. Proven now if unknown and possible."""
    if stands(call, way):
        return False
    proof = certificates().proof(way.name, form_key(form_of(call)))
    return proof is not None and not proof.holds


def hopper_stands(q: torch.Tensor, k: torch.Tensor, causal: bool) -> bool:
    """As `stands`, for the warp-specialized prefill of q [B, Hq, Tq, D] over k [B, Hkv, Tk, D]."""
    group = q.shape[1] // k.shape[1]
    at = (_HOPPER, q.dtype, q.shape[3], group, causal, q.device)
    known = _known.get(at)
    if known is None:
        about = (q.dtype, q.shape[3], group, causal)
        return _settled(at, _HOPPER, _hopper_key(*about), partial(prove_hopper, *about, q.device))
    return known


def forget() -> None:
    """Read the certificates again: after they have changed within the process."""
    _known.clear()
    forget_calls()


def prove_way(form: Form, way: Way, device: torch.device, *, dry: bool = False) -> bool | None:
    """Compare the way with the one plan in this form, and record the result; `dry` only compiles the kernels."""
    spans = 2 * way.span + 1 if way.span else 3
    queries = max(2, math.ceil(PROOF_BLOCKS * way.plan.block_m / form.group))

    def member(case: _Case) -> torch.Tensor:
        call = _packed(case, form) if form.packed else _dense(case, form)
        launch(call, way)
        return call.out.transpose(1, 2).flatten(0, 1)

    return _prove(Claim(way.name, form_key(form), member), form, queries, spans, device, dry)


def prove_hopper(dtype: torch.dtype, head_dim: int, group: int, causal: bool, device: torch.device) -> bool | None:
    """As `prove_way`, for the warp-specialized prefill."""
    form = Form(dtype, head_dim, group, causal, False, False, False, None, None, ((True,) * 3,) * 4, (True,) * 3)

    def member(case: _Case) -> torch.Tensor:
        call = _dense(case, form)
        out = hopper.prefill(call.q, call.k, call.v, causal=causal, scale=case.scale)
        return out.transpose(1, 2).flatten(0, 1)

    claim = Claim(_HOPPER, _hopper_key(dtype, head_dim, group, causal), member)
    return _prove(claim, form, _HOPPER_QUERIES, 3, device)


def form_key(form: Form) -> str:
    """The key of its certificates."""
    return operands_key("segments", (), form.words())


def _hopper_key(dtype: torch.dtype, head_dim: int, group: int, causal: bool) -> str:
    name = str(dtype).removeprefix("torch.")
    return operands_key("segments", (), (f"{name} D={head_dim} group={group}", *(["causal"] if causal else [])))


def _settled(at: tuple[Any, ...], member: str, key: str, prove_now: Callable[[], bool | None]) -> bool:
    """The member's proof, made now if it is needed and possible; only a known result is cached."""
    holds = established(member, key, certificates(), prove_now)
    if holds is None:
        return False
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[at] = holds
    return holds


def _prove(
    claim: Claim, form: Form, queries: int, segments: int, device: torch.device, dry: bool = False
) -> bool | None:
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
        cases = proof_cases(form, queries, segments, device)
        if dry:
            _, operands = next(cases)
            anchor(*operands), claim.call(*operands)
            return None
        (verdict,) = prove([claim], anchor, cases, certificates())
    return verdict


def proof_cases(form: Form, queries: int, segments: int, device: torch.device) -> Iterator[tuple[str, tuple[_Case]]]:
    """Two requests: of one length where they are dense, else the second is a decode step over fewer keys."""
    segment = triton_kernels.SEGMENT
    keys = max(segments * segment, 2 * queries + 3 * segment) - 37
    lengths = [(queries, keys), (1, segment + 70) if form.packed else (queries, keys)]
    window = keys - segment // 2 - 11 - queries if form.window else None
    softcap = _SOFTCAP if form.softcap else None
    for kind in PROOF_KINDS:
        requests, scale = [], None
        for seed, (nq, nk) in enumerate(lengths):
            drawn, own = proof_operands(kind, form, nq, nk, window, 2 * seed + 1, device)
            requests.append(drawn)
            scale = scale or own
        if kind == "scores" and scale is None:
            continue  # so few terms add up exactly in any order
        for skip in (0, 1, queries - 1) if kind == "values" else (0,):
            name = kind if not skip else f"{kind} from query {skip}"
            yield name, (_Case(requests, skip, scale, form.causal, window, softcap),)


def proof_operands(
    kind: str, form: Form, nq: int, nk: int, window: int | None, seed: int, device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], float | None]:
    """One request's q [1, Hq, nq, D], k, v [1, Hkv, nk, D], and the scale of its scores where it is not the default."""
    heads, dim, dtype = PROOF_HEADS * form.group, form.head_dim, form.dtype
    rng = inputs.generator(seed, device)

    def made(how: str, count: int, tokens: int) -> torch.Tensor:
        return inputs.make(how, (1, count, tokens, dim), dtype, device, rng)

    q, k = made("bell", heads, nq), made("bell", PROOF_HEADS, nk)
    if kind == "values":  # every score is 0 and every probability 1; the sum is zero over the keys that all queries see
        v = torch.zeros_like(k)
        start = 0 if window is None else max(0, nk - window)
        width = ((nk - nq + 1 if form.causal else nk) - start) // 2 * 2
        spread = 20  # binades: numbers of 8 bits less far apart would add up exactly
        rows = inputs.order_revealing(PROOF_HEADS * dim, width, dtype, seed, negate=True, binades=spread, device=device)
        v[0, :, start : start + width] = rows.view(PROOF_HEADS, dim, width).mT
        return (torch.zeros_like(q), k, v), None
    v = made("wide" if kind == "wide" else "bell", PROOF_HEADS, nk)
    if kind != "scores":
        return (q, k, v), None
    how: dict[str, Any] = {"binades": 12, "device": device}
    q = inputs.order_revealing(heads * nq, dim, dtype, seed, negate=True, **how).view(q.shape)
    k = inputs.order_revealing(PROOF_HEADS * nk, dim, dtype, seed, negate=False, **how).view(k.shape)
    errors = (q[0, 0, :32].float() @ k[0, 0, :512].float().mT).abs().mean()
    size = float(errors)
    return (q, k, v), (2.0 / size if size else None)


def _dense(case: _Case, form: Form) -> Call:
    q, k, v = (torch.cat([request[i] for request in case.requests]) for i in range(3))
    q, k, v, out = _laid_out(q[:, :, min(case.skip, q.shape[2] - 1) :], k, v, form)
    sizes = (q.shape[0], q.shape[2], k.shape[2])
    return Call(q, k, v, out, *sizes, case.scale, case.causal, case.window, case.softcap)


def _packed(case: _Case, form: Form) -> Call:
    """The requests in sequence, their first keys dropped and their tokens scattered, as the form has it."""
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
    if form.paged is not None:  # a cache with spare space, its pages anywhere, NaN where nothing was written
        page = max(form.page, 1)
        counts = [-(-n // page) for n in kept]
        pages = torch.randperm(sum(counts) + 13, generator=inputs.generator(5, device), device=device)
        offsets = torch.arange(page, device=device)
        firsts = [sum(counts[:i]) for i in range(len(kept))]
        whole = [(pages[a : a + c, None] * page + offsets).flatten() for a, c in zip(firsts, counts, strict=True)]
        places = torch.cat([x[:n] for x, n in zip(whole, kept, strict=True)])
        tokens = len(pages) * page
        k, v = (x.new_full((1, x.shape[1], tokens, x.shape[3]), torch.nan).index_copy_(2, places, x) for x in (k, v))
        key_index = places.to(form.paged)
    lengths = [q.shape[2] for q in queries]
    q, k, v, out = _laid_out(torch.cat(queries, 2), k, v, form)
    longest = max(x[1].shape[2] for x in case.requests)
    how = (case.scale, case.causal, case.window, case.softcap)
    return Call(
        *(q, k, v, out, len(lengths), max(lengths), longest),
        *how,
        cu_q=starts(lengths, device),
        cu_k=starts(kept, device),
        positions=positions,
        key_index=key_index,
        page=form.page,
    )


def _laid_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and an output buffer of NaN, in memory as the form describes."""
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


MAX_HEAD_DIM = 256
_DTYPES = (*HALF, torch.float32)
_HOPPER_ITEMS = 64  # blocks of 128 queries of a head from which the kernel that fills a whole GPU is the faster one


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> None:
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(
            f"attention takes k and v of one shape and head dims of 1 to {MAX_HEAD_DIM}, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} KV heads")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"a window needs causal=True and at least 1 key, got causal={causal}, window={window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    require("attention", _DTYPES, q, k, v)


def compute(call: Call, way: Way, *, forced: bool = False, what: object = None) -> bool:
    """Compute call.out in this way where it is proven on this machine, else by the one plan; whether it was this way,
    proven.

    `forced`: use this way even where it is not proven. `what`: as in `launch`, for what is proven. Raises
    NotImplementedError: the one plan itself gave a row different bits at another position.
    """
    if forced or INTERPRETED:  # NumPy's products there: they show nothing about the hardware
        launch(call, way, what=what)
        return False
    one = one_plan(call.q.shape[3], call.q.dtype)
    if torch.compiler.is_compiling():
        launch(call, one, why=", the one plan")
    elif stands(call, way):
        launch(call, way, what=what)
        return True
    elif excluded(call, one):
        raise NotImplementedError("attention's one plan gives a row other bits at another place on this machine")
    else:
        launch(call, one, why=", the one plan")
    return False


def _unit_last_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def as_dense(x: torch.Tensor) -> torch.Tensor:
    """Packed [T, H, D] as a view [1, H, T, D]."""
    return _unit_last_stride(x).unsqueeze(0).transpose(1, 2)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    split: bool | None = None,
) -> torch.Tensor:
    """q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D] -> [B, Hq, Tq, D]; Hq a multiple of Hkv (GQA), D to 256, any strides.

    float16, bfloat16 or float32, one dtype for all; accumulated in float32 in the module's order; forward only. Causal
    is aligned to the end: query i has position Tk - Tq + i. A query that sees no key gives NaN. The bits of a query
    depend on its position, its head and the keys it sees: not on B, Tq, Tk beyond its position, strides, `split`.

    Args:
        scale: Of the scores, above 0; None for 1 / sqrt(D).
        window: See only the last `window` keys, one's own included (sliding-window attention); needs causal.
        softcap: Scores s become softcap * tanh(s / softcap), as in Gemma 2; part of the class where it is given.
        split: True gives each segment a program of its own, False processes all in one, both in the Triton kernels and
            proven or not; None chooses the fastest proven way, and sends large half-precision prefills on Hopper to
            `hopper.prefill`.

    NotImplementedError: a device or dtype without a kernel. ValueError: shapes that do not fit, no keys at all, a
    window without causal, a scale that is not above 0.
    """
    what = ("attention", causal, scale, window, softcap) if split is None else None
    made = None if what is None else again(what, q, k, v)
    if made is not None:
        return made[0].transpose(1, 2)
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0]:
        raise ValueError(f"attention takes [B, H, T, D], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    _check(q, k, v, causal, window, softcap, scale)
    batch, heads, tq, head_dim = q.shape
    if k.shape[2] == 0 and q.numel():
        raise ValueError("attention over no keys is undefined")
    if (
        split is None
        and tq > 64
        and batch * heads * -(-tq // 128) >= _HOPPER_ITEMS
        and hopper.supports(q, k, v, causal, window, softcap) is None
        and hopper_stands(q, k, causal)
    ):
        return hopper.prefill(q, k, v, causal=causal, scale=scale, what=what)
    # Laid out as [B, T, H, D], the order that models need.
    out = torch.empty(batch, tq, heads, head_dim, device=q.device, dtype=q.dtype).transpose(1, 2)
    if out.numel() == 0:
        return out
    operands = (_unit_last_stride(q), _unit_last_stride(k), _unit_last_stride(v), out)
    call = Call(*operands, batch, tq, k.shape[2], scale, causal, window, softcap)
    way = quickest(call, split)
    whole = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    compute(call, way, forced=split is not None, what=what if whole else None)
    return out


def attention_by_one_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """`attention` by the plan that defines the class's bits, at any size; it may be slow."""
    _check(q, k, v, causal, None, None, scale)
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    if out.numel():
        operands = (_unit_last_stride(q), _unit_last_stride(k), _unit_last_stride(v), out)
        call = Call(*operands, q.shape[0], q.shape[2], k.shape[2], scale, causal, None, None)
        launch(call, one_plan(q.shape[3], q.dtype))
    return out


attention_split = partial(attention, split=True)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    positions: torch.Tensor | None = None,
    key_index: torch.Tensor | None = None,
    split: bool | None = None,
) -> torch.Tensor:
    """A packed ragged batch in one launch: q [Tq, Hq, D] over k, v [Tk, Hkv, D] -> [Tq, Hq, D].

    Request i owns queries cu_seqlens_q[i] ... cu_seqlens_q[i + 1] and the keys between the same entries of
    cu_seqlens_k, and sees no others; causal is aligned to the end of each. Its bits are those of `attention` on the
    request solo. Requests without queries are allowed, and so are tokens beyond the last entry: their output is left
    unwritten. The host reads nothing back, so you can capture a launch in a CUDA graph and replay it with other
    lengths, as long as max_seqlen_q and max_seqlen_k bound them.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 [requests + 1] on q's device.
        max_seqlen_q: At least the largest number of queries of a request; queries beyond it would not be computed.
        max_seqlen_k: At least the largest number of keys of a request; with `positions` and split=True, at least the
            largest position plus 1.
        scale: As in `attention`, and so are causal, window, softcap and split, and what is raised.
        positions: Integers [Tq], each query's position in its request, where a sliding-window cache has dropped the
            first keys: the keys that are left end at the last query's position, and segments stay anchored at position
            0. None: a request's first key has position 0.
        key_index: Integers [keys of all requests], for a paged cache: k and v are the cache, [tokens, Hkv, D], and key
            i of cu_seqlens_k's count is its token key_index[i]. Nothing is gathered first.
    """
    if q.ndim != 3 or k.ndim != 3:
        raise ValueError(f"attention_varlen takes [T, H, D], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    _check(q, k, v, causal, window, softcap, scale)
    for cu in (cu_seqlens_q, cu_seqlens_k):
        if cu.dtype != torch.int32 or cu.ndim != 1 or cu.shape != cu_seqlens_q.shape or cu.device != q.device:
            raise ValueError(
                f"cu_seqlens must be two int32 [requests + 1] on {q.device}, "
                f"got {cu.dtype} {tuple(cu.shape)} on {cu.device}"
            )
    if positions is not None and (
        window is None or positions.ndim != 1 or positions.shape[0] < q.shape[0] or positions.device != q.device
    ):
        raise ValueError("positions [Tq] on q's device go with a window: without one, no key may be missing")
    if key_index is not None and (
        key_index.ndim != 1 or key_index.dtype not in (torch.int32, torch.int64) or key_index.device != q.device
    ):
        raise ValueError(f"key_index must be int32 or int64 [keys] on {q.device}, got {key_index.dtype}")
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    requests = cu_seqlens_q.shape[0] - 1
    if out.numel() == 0 or requests < 1 or max_seqlen_q < 1:
        return out
    call = Call(
        *(as_dense(q), as_dense(k), as_dense(v), as_dense(out), requests, max_seqlen_q, max_seqlen_k),
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        cu_q=cu_seqlens_q.contiguous(),
        cu_k=cu_seqlens_k.contiguous(),
        positions=positions,
        key_index=None if key_index is None else key_index.contiguous(),
    )
    compute(call, quickest(call, split), forced=split is not None)
    return out
