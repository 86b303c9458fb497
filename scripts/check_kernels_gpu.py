"""Prove the Triton kernels on the GPU at hand: equal bits wherever they are promised, accuracy against float64.

    python scripts/check_kernels_gpu.py [matmul rows split-k attention attention-float32]

A line a case: how many comparisons of bits were made, where the first failed, and the largest error against its bound.
Exits with 1 if anything failed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton

from nondet.compare import bits, error_against
from nondet.inputs import KINDS, generator, make
from nondet.kernels import reference, triton_rows
from nondet.kernels.triton_attention import attention, attention_varlen
from nondet.kernels.triton_matmul import linear, matmul, matmul_chain, tiles
from nondet.kernels.triton_split_k import fixed_chunk, split_k

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SWEEP = [
    *range(1, 65),
    72,
    96,
    100,
    127,
    128,
    129,
    192,
    255,
    256,
    257,
    384,
    511,
    512,
    700,
    1024,
    1537,
    2048,
    3001,
    4096,
]
SHORT = [1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65, 128, 300, 1024, 4095]
failures = 0


class Check:
    """Collects the comparisons of one case and prints its line."""

    def __init__(self, what: str) -> None:
        self.what, self.made, self.failed, self.note = what, 0, 0, ""
        self.worst = (0.0, 0.0, 1.0)  # error / bound, error, bound
        self.started = time.perf_counter()

    def same(self, label: str, out: torch.Tensor, expected: torch.Tensor) -> None:
        """Count one comparison of all bits (any NaN equals any NaN)."""
        self.made += 1
        if not torch.equal(bits(out), bits(expected)):
            self.failed += 1
            if self.failed == 1:
                differ = int((bits(out) != bits(expected)).sum())
                self.note += f" first at {label}: {differ} of {out.numel()} elements"

    def within(self, label: str, out: torch.Tensor, ref: torch.Tensor, bound: float) -> None:
        """Hold the relative error (Frobenius) against its bound, and half the spacing of subnormal numbers besides.

        The bound is of numbers with a full mantissa. Many float16 results have none: 1 / 151936 is subnormal there.
        """
        spacing = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
        bound += spacing / 2 * math.sqrt(ref.numel()) / max(float(ref.norm()), torch.finfo(F64).tiny)
        error = relative_error(out, ref)
        self.worst = max(self.worst, (error / bound, error, bound))
        if not error <= bound:
            self.failed += 1
            self.note += f" error at {label}: {error:.2e} against {bound:.2e}"

    def done(self) -> None:
        """Print the line."""
        global failures
        failures += self.failed > 0
        verdict = f"FAIL {self.failed}" if self.failed else "PASS"
        accuracy = f"error {self.worst[1]:.1e} <= {self.worst[2]:.1e}" if self.worst[1] else ""
        seconds = time.perf_counter() - self.started
        print(f"{verdict} {self.what:<52} {self.made:>5} {accuracy:<26} {seconds:5.1f}s{self.note}", flush=True)


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||, infinite where something is not finite that should be."""
    error = error_against(out, ref).relative_norm
    return math.inf if error is None else error


def name(dtype: torch.dtype) -> str:
    """bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def draw(kind: str, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Inputs on the GPU."""
    return make(kind, shape, dtype, "cuda", generator(seed, "cuda"))


def check_matmul() -> None:
    """Every M, every place, every tile, hard inputs, strides, bias, batch."""
    layers = [(4096, 4096), (12288, 4096), (3072, 1024), (4096, 24576), (1000, 333), (257, 129), (63, 8200), (2048, 1)]
    for dtype in (BF16, F16, F32, F64):
        for k, n in layers if dtype != F64 else layers[-4:]:
            check = Check(f"linear {name(dtype)} K={k} N={n}")
            for kind in KINDS:
                dense = kind == "bell" and (dtype in (BF16, F16) or k * n < 2**22)
                x, weight = draw(kind, 4096, k, dtype=dtype), draw(kind, n, k, dtype=dtype, seed=1)
                whole = linear(x, weight)
                for m in SWEEP if dense else SHORT:
                    check.same(f"{kind} M={m}", linear(x[:m], weight), whole[:m])
                    lo = (m * 7919) % (4096 - m + 1)
                    check.same(f"{kind} M={m} from {lo}", linear(x[lo : lo + m], weight), whole[lo : lo + m])
                for tile in tiles(dtype):
                    out = matmul_chain(x[None, :300], weight.T[None], tile=tile)[0]
                    check.same(f"{kind} {tile}", out, whole[:300])
                ref = reference.linear(x[:256], weight)
                bound = reference.accuracy_bound(dtype, k)
                if kind != "bell":  # no bound holds where terms cancel: stock on the same inputs is the measure
                    bound += 4.0 * relative_error(F.linear(x[:256], weight), ref)
                if float(ref.abs().max()) < torch.finfo(dtype).max:
                    check.within(kind, whole[:256], ref, bound)
            check.done()
        check = Check(f"matmul {name(dtype)} strides, alignment, bias, batch")
        a, b = draw("bell", 24, 70, 515, dtype=dtype), draw("bell", 24, 515, 130, dtype=dtype, seed=1)
        whole = matmul(a, b)
        for i in range(24):
            check.same(f"batch {i}", matmul(a[i], b[i]), whole[i])
        check.same("strides", matmul(a.mT.contiguous().mT, b.mT.contiguous().mT), whole)
        shifted = torch.empty(a.numel() + 1, device="cuda", dtype=dtype)[1:].view_as(a).copy_(a)
        check.same("alignment", matmul(shifted, b), whole)
        bias = draw("bell", 130, dtype=dtype, seed=2)
        biased = linear(a[0], b[0].T, bias)
        check.same("bias", linear(a[0, :9], b[0].T, bias), biased[:9])
        check.within("bias", biased, reference.linear(a[0], b[0].T, bias), reference.accuracy_bound(dtype, 516))
        check.done()


def check_rows() -> None:
    """Every number of rows, place, stride and alignment."""
    for operator in (
        *("sum", "mean", "softmax", "log_softmax", "logsumexp", "cross_entropy"),
        *("rms_norm", "rms_norm_residual"),
    ):
        for dtype in (BF16, F16, F32, F64):
            check = Check(f"{operator} {name(dtype)}")
            for width in (128, 1000, 4096, 5121, 151936):
                for kind in KINDS if dtype != F64 else ("bell",):
                    check_row(check, operator, draw(kind, 4096, width, dtype=dtype), kind)
            check.done()


def check_row(check: Check, operator: str, x: torch.Tensor, kind: str) -> None:
    """One operator over one [M, width]."""
    rows, width = x.shape
    weight = draw("bell", width, dtype=x.dtype, seed=1)
    where = f"width {width} {kind}"

    def arguments(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All but x, made of a row's own elements."""
        if operator == "cross_entropy":
            return (torch.full(x.shape[:-1], width // 2, device="cuda"),)
        return {"rms_norm": (weight,), "rms_norm_residual": (x.flip(-1), weight)}.get(operator, ())

    def call(x: torch.Tensor, module: Any = triton_rows) -> torch.Tensor:
        out = getattr(module, operator)(x, *arguments(x))
        return torch.cat(out, -1) if isinstance(out, tuple) else out

    whole = call(x)
    for m in [m for m in (SWEEP if kind == "bell" else SHORT) if m <= rows]:
        check.same(f"{where} M={m}", call(x[:m]), whole[:m])
        lo = (m * 7919) % (rows - m + 1)
        check.same(f"{where} M={m} from {lo}", call(x[lo : lo + m]), whole[lo : lo + m])
    shifted = torch.empty(9 * width + 1, device="cuda", dtype=x.dtype)[1:].view(9, width).copy_(x[:9])
    check.same(f"{where} alignment", call(shifted), whole[:9])
    check.same(f"{where} strides", call(x[:9].T.contiguous().T), whole[:9])
    few = x[:64]
    bound = reference.accuracy_bound(x.dtype, width)
    if operator in ("sum", "mean"):  # of absolute values: the bound does not hold where terms cancel
        few = few.abs() if x.dtype != F16 or operator == "mean" else few.abs() * 2**-14  # 65504 is soon reached
        check.within(where, call(few), call(few, reference), bound)
        return
    if operator == "softmax":
        # exp2 is good to 2 ULP of its argument, and an error d of the argument changes the result by e^d - 1, about d.
        # Where x - max is below -88 (-708 in float64), the result is 0 in the norm.
        reach = float((few.double() - few.double().amax(-1, keepdim=True)).abs().max())
        bound += min(reach, 88.0) * 2.0 * torch.finfo(F32 if x.dtype != F64 else F64).eps
    check.within(where, call(few), call(few, reference), bound)


def check_split_k() -> None:
    """Fixed chunks depend on neither workers nor M; splits do change bits; atomics may, from run to run."""
    for dtype, (k, n) in [(d, s) for d in (BF16, F16, F32) for s in ((4096, 1024), (12288, 4096), (1000, 333))]:
        check = Check(f"fixed_chunk, split_k {name(dtype)} K={k} N={n}")
        a, b = draw("bell", 300, k, dtype=dtype), draw("bell", n, k, dtype=dtype, seed=1).T
        for chunk in (64, 512):
            whole = fixed_chunk(a, b, workers=1, chunk=chunk)
            for m in (1, 2, 16, 17, 64, 100, 300):
                for workers in (1, 2, 3, 8):
                    out = fixed_chunk(a[:m], b, workers=workers, chunk=chunk)
                    check.same(f"chunk {chunk} M={m} workers={workers}", out, whole[:m])
        serial = matmul(a, b)
        check.same("one split", split_k(a, b, splits=1, ordered=True), serial)
        check.same("one atomic split", split_k(a, b, splits=1, ordered=False), serial)
        if k % 512 == 0:
            check.same("equal cuts", split_k(a, b, splits=k // 512, ordered=True), whole)
        check.within("", whole, reference.matmul(a, b), reference.accuracy_bound(dtype, k))
        changed = [float((split_k(a, b, splits=s, ordered=True) != serial).double().mean()) for s in (2, 4, 8)]
        runs = {split_k(a[:16], b, splits=16, ordered=False).float().cpu().numpy().tobytes() for _ in range(50)}
        check.note += (
            f" 2/4/8 splits change {'/'.join(f'{c:.1%}' for c in changed)}; 50 atomic runs: {len(runs)} results"
        )
        check.done()


def attention_bound(q: torch.Tensor, k: torch.Tensor) -> float:
    """Two roundings (probabilities, result), the sums over keys, and the error of the scores in the exponent.

    A perturbation d of a score changes its exponential by e^d - 1, about d; a score is a sum of D terms in float32, of
    size at most |q| |k| / sqrt(D), and is then multiplied twice.
    """
    dtype, keys, dim = q.dtype, k.shape[2], q.shape[3]
    size = float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()) / math.sqrt(dim)
    scores = size * reference.accuracy_bound(F32, dim)
    return reference.accuracy_bound(dtype, keys) + torch.finfo(dtype).eps / 2 + scores


def spans(length: int) -> Iterator[tuple[int, int]]:
    """Decodes at borders and elsewhere, chunks of odd sizes."""
    for p in sorted(
        {0, 1, 31, 32, 63, 64, 65, 127, 255, 500, 511, 512, 513, 1023, 1024, length // 2 + 3, length - 2, length - 1}
    ):
        if 0 <= p < length:
            yield p, p + 1
    for size in (7, 33, 100, 333, 1000, 2049):
        for lo in (0, 5, length // 3, length - size):
            if lo >= 0 and lo + size <= length:
                yield lo, lo + size


def check_attention(*dtypes: torch.dtype) -> None:
    """Decode, chunks and prefill; batch 1 to 64; packed ragged batches; windows; hard inputs."""
    heads = [(32, 8, 128), (14, 2, 64), (8, 8, 96), (8, 1, 256), (6, 3, 32), (4, 4, 16)]
    for dtype, (hq, hkv, d) in [(t, h) for t in dtypes for h in heads]:
        longest = 16384 if (dtype, d) in ((BF16, 128), (F16, 64)) else 2300
        check = Check(f"attention {name(dtype)} heads {hq}/{hkv} D={d} KV to {longest}")
        for kind in KINDS:
            tk = longest if kind == "bell" else 1500
            q = draw(kind, 1, hq, tk, d, dtype=dtype)
            k, v = (draw(kind, 1, hkv, tk, d, dtype=dtype, seed=seed) for seed in (1, 2))
            whole = attention(q, k, v, split=False)
            windowed = attention(q, k, v, window=700, split=False)
            for lo, hi in spans(tk):
                chunk, keys, values = q[:, :, lo:hi], k[:, :, :hi], v[:, :, :hi]
                for split in (True, False) if hi - lo <= 333 else (None,):
                    where = f"{kind} {lo}:{hi} split={split}"
                    check.same(where, attention(chunk, keys, values, split=split), whole[:, :, lo:hi])
                    out = attention(chunk, keys, values, window=700, split=split)
                    check.same(f"{where} window", out, windowed[:, :, lo:hi])
            packed(check, kind, q, k, v, whole)
            ref = reference.attention(q[:, :, -64:], k, v)
            if kind == "bell":
                check.within(kind, whole[:, :, -64:], ref, attention_bound(q[:, :, -64:], k))
                continue
            seen = torch.ones(64, tk, device="cuda", dtype=torch.bool).tril(tk - 64)
            stock = F.scaled_dot_product_attention(q[:, :, -64:], k, v, attn_mask=seen, enable_gqa=True)
            bound = 4.0 * relative_error(stock, ref) + reference.accuracy_bound(dtype, tk)
            check.within(kind, whole[:, :, -64:], ref, bound)
        batches(check, dtype, hq, hkv, d)
        check.done()


def packed(check: Check, kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: torch.Tensor) -> None:
    """Ragged batches of decodes and chunks of one sequence, packed: each has the bits of the prefill."""
    tk = k.shape[2]
    mixes = [
        [(tk - 1, tk)],
        [(i * 31, i * 31 + 1) for i in range(60)],
        [(0, 256), (700, 701), (64, 65), (333, 589), (5, 12)],
    ]
    for mix in mixes:
        pieces = [(q[0, :, lo:hi], k[0, :, :hi], v[0, :, :hi]) for lo, hi in mix]
        qs, ks, vs = (torch.cat([p[i] for p in pieces], 1).transpose(0, 1).contiguous() for i in range(3))
        cu_q, cu_k = (
            torch.tensor([0, *(p[i].shape[1] for p in pieces)], device="cuda").cumsum(0).to(torch.int32) for i in (0, 1)
        )
        longest = (max(hi - lo for lo, hi in mix), max(hi for _, hi in mix))
        for split in (True, False, None):
            out = attention_varlen(
                *(qs, ks, vs),
                cu_seqlens_q=cu_q,
                cu_seqlens_k=cu_k,
                max_seqlen_q=longest[0],
                max_seqlen_k=longest[1],
                split=split,
            )
            expected = torch.cat([whole[0, :, lo:hi] for lo, hi in mix], 1).transpose(0, 1)
            check.same(f"{kind} packed {len(mix)} split={split}", out, expected)


def batches(check: Check, dtype: torch.dtype, hq: int, hkv: int, d: int) -> None:
    """Decode with batch 1 to 64."""
    q = draw("bell", 64, hq, 1, d, dtype=dtype)
    k, v = (draw("bell", 64, hkv, 1111, d, dtype=dtype, seed=s) for s in (1, 2))
    whole = attention(q, k, v)
    for b in range(1, 65):
        check.same(f"B={b}", attention(q[:b], k[:b], v[:b]), whole[:b])
        check.same(f"B={b} last", attention(q[-b:], k[-b:], v[-b:], split=b % 2 == 0), whole[-b:])


SECTIONS: dict[str, Callable[[], None]] = {
    "matmul": check_matmul,
    "rows": check_rows,
    "split-k": check_split_k,
    "attention": partial(check_attention, BF16, F16),
    "attention-float32": partial(check_attention, F32),
}


def main() -> int:
    """Run the sections asked for, all by default."""
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    unknown = set(sys.argv[1:]) - set(SECTIONS)
    if unknown:
        print(f"unknown section {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for section in sys.argv[1:] or SECTIONS:
        SECTIONS[section]()
    print(f"{failures} of the cases FAILED" if failures else "all cases passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
