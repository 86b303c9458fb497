"""Is the model of a fused step (`kernels/emulator.py`) this GPU's? 10^6 sums a type and instruction, bit by bit.

python lab/emulator_gpu.py [OUT.jsonl]     needs torch, Triton and NumPy; under a minute on an H200

One JSON line for the environment, then one for each type, instruction and depth: sums compared, differences (bits; any
NaN is NaN, a zero's sign counted apart), up to 20 of them with their operands in hex, the instructions that the
compiled kernel really holds, and, where there are differences, the parameters that fit best. A type that fails is a
line with its reason. Tiles of 16 rows are mma.sync, of 64 rows wgmma where the chip has it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import platform
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("emulator", ROOT / "kernels" / "emulator.py")
if _spec is None or _spec.loader is None:
    raise SystemExit("kernels/emulator.py is not beside this script's folder")
emulator = importlib.util.module_from_spec(_spec)
sys.modules["emulator"] = emulator
_spec.loader.exec_module(emulator)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
ROWS = {"mma": 16, "wgmma": 64}
COLUMNS = 16
SUMS = int(os.environ.get("EMULATOR_SUMS", "1000000"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("bell", "wide", "cancel", "outlier", "zeros", "tiny", "large", "integers")


@triton.jit
def one_tile(a_ptr, b_ptr, c_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """a [M, K] times b [N, K] transposed, plus c [M, N], of one tile."""
    tile = tl.program_id(0)
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + tile * M * K + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + tile * N * K + n[None, :] * K + k[:, None])
    at = tile * M * N + m[:, None] * N + n[None, :]
    acc = tl.load(c_ptr + at)
    tl.store(out_ptr + at, tl.dot(a, b, acc, input_precision="tf32"))


def drawn(kind: str, shape: tuple[int, ...], dtype: str, rng: Any) -> Any:
    """float32 numbers of a kind that the type can hold."""
    x = rng.standard_normal(shape)
    reach = {"float16": 6, "float8_e4m3fn": 4, "float8_e5m2": 7}.get(dtype, 14)
    if kind == "wide":
        x *= 2.0 ** rng.integers(-reach, reach + 1, shape)
    elif kind == "cancel":
        x *= 2.0 ** rng.integers(-3, 4, shape)
    elif kind == "outlier":
        x = np.where(rng.random(shape) < 1 / 16, x * 2.0**reach, x)
    elif kind == "zeros":
        x = np.where(rng.random(shape) < 0.5, 0.0, x)
    elif kind == "tiny":  # subnormal operands, products at the floor
        x *= 2.0 ** {"float16": -15.0, "float8_e4m3fn": -7.0, "float8_e5m2": -15.0}.get(dtype, -66.0)
    elif kind == "large":
        x *= 2.0 ** (reach if reach < 14 else 60)
    elif kind == "integers":
        x = rng.integers(-8, 9, shape).astype(np.float64)
    return x.astype(np.float32)


def operands(dtype: str, tiles: int, M: int, K: int, rng: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a [tiles, M, K], b [tiles, N, K], c [tiles, M, N]: the kinds in turn, under four kinds of accumulator."""
    a, b = np.empty((tiles, M, K), np.float32), np.empty((tiles, COLUMNS, K), np.float32)
    for i, kind in enumerate(KINDS):
        a[i :: len(KINDS)] = drawn(kind, a[i :: len(KINDS)].shape, dtype, rng)
        b[i :: len(KINDS)] = drawn(kind, b[i :: len(KINDS)].shape, dtype, rng)
        if kind == "cancel":
            a[i :: len(KINDS), :, 1::2] = a[i :: len(KINDS), :, ::2]
            b[i :: len(KINDS), :, 1::2] = -b[i :: len(KINDS), :, ::2]
    ta, tb = (torch.from_numpy(x).to(DTYPES[dtype]) for x in (a, b))
    exact = ta.float().double() @ tb.float().double().mT
    c = torch.zeros(tiles, M, COLUMNS, dtype=torch.float64)
    turn = torch.arange(tiles) // len(KINDS) % 4
    noise = torch.from_numpy(rng.standard_normal(c.shape))
    c = torch.where((turn == 1)[:, None, None], -exact, c)
    c = torch.where((turn == 2)[:, None, None], exact * noise, c)
    c = torch.where((turn == 3)[:, None, None], exact.abs().amax((1, 2), keepdim=True) * noise * 2.0**12, c)
    return ta, tb, c.float()


def predicted(dtype: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, unit: Any, pool: Any) -> Any:
    """What the emulator says of c + a b, step by step: float32 [tiles, M, N]."""
    wide = [x.float().double().numpy() for x in (a, b, c)]

    def part(at: slice) -> Any:
        x, y, z = (w[at] for w in wide)
        shape = (*z.shape, x.shape[-1])
        x, y = np.broadcast_to(x[:, :, None], shape), np.broadcast_to(y[:, None], shape)
        return emulator.fused_chain(x, y, z, dtype, unit)

    size = max(1, 2**15 // (a.shape[1] * COLUMNS))
    return np.concatenate(list(pool.map(part, [slice(i, i + size) for i in range(0, len(a), size)])))


def differences(got: Any, want: Any) -> tuple[Any, int]:
    """(a mask of sums of other bits, how many zeros have another sign)."""
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    zeros = ~same & (got == 0) & (want == 0)
    return ~same & ~zeros, int(zeros.sum())


def best_fit(dtype: str, a: Any, b: Any, c: Any, got: Any, pool: Any) -> list[dict[str, Any]]:
    """Other parameters, by how many of some sums they miss."""
    few = slice(0, max(1, 8192 // (a.shape[1] * COLUMNS)))
    found = []
    for fraction, terms, kept in itertools.product((*range(12, 15), *range(22, 30)), (4, 8, 16, 32), (13, 23)):
        unit = emulator.Unit(fraction, terms, kept)
        wrong, _ = differences(got[few], predicted(dtype, a[few], b[few], c[few], unit, pool))
        found.append({"fraction": fraction, "terms": terms, "kept": kept, "missed": int(wrong.sum()), "of": wrong.size})
    return sorted(found, key=lambda x: x["missed"])[:5]


def compare(dtype: str, instruction: str, steps: int, chip: str, pool: Any) -> dict[str, Any]:
    """One type under one instruction, `steps` instructions deep."""
    unit = emulator.UNITS[chip, dtype]
    least = {"float8_e4m3fn": 32, "float8_e5m2": 32, "tf32": 8}.get(dtype, 16)
    M, K = ROWS[instruction], max(least, unit.terms) * steps
    tiles = -(-SUMS // (M * COLUMNS))
    rng = np.random.default_rng([25, steps, M])
    a, b, c = operands(dtype, tiles, M, K, rng)
    out = torch.empty_like(c, device=DEVICE)
    held = one_tile[(tiles,)](
        a.to(DEVICE), b.to(DEVICE), c.to(DEVICE), out, M, COLUMNS, K, num_warps=4 if M == 64 else 1
    )
    got = out.cpu().numpy()
    asm = getattr(held, "asm", {}).get("ptx", "") if held is not None else ""
    names = sorted(set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync[\w.:]*", asm)))
    want = predicted(dtype, a, b, c, unit, pool)
    wrong, zeros = differences(got, want)
    said: dict[str, Any] = {
        "instructions": names, "K": K, "unit": unit._asdict(), "compared": int(got.size),
        "differences": int(wrong.sum()), "zeros_of_another_sign": zeros,
        "by_kind": {kind: int(wrong[i :: len(KINDS)].sum()) for i, kind in enumerate(KINDS)},
    }  # fmt: skip
    if said["differences"]:
        said["examples"] = []
        for t, m, n in np.argwhere(wrong)[:20]:
            row = {"kind": KINDS[t % len(KINDS)], "a": a[t, m].float().tolist(), "b": b[t, n].float().tolist()}
            row = {key: [x.hex() for x in value] if isinstance(value, list) else value for key, value in row.items()}
            row |= {"c": float(c[t, m, n]).hex(), "got": float(got[t, m, n]).hex(), "want": float(want[t, m, n]).hex()}
            said["examples"].append(row)
        said["best_fit"] = best_fit(dtype, a, b, c, got, pool)
    return said


def main() -> int:
    """Every type in its own try; exit code 1 where one failed or differs."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if path is not None and path.exists():
        print(f"{path} exists: name another file", file=sys.stderr)
        return 2
    major = torch.cuda.get_device_capability() if DEVICE == "cuda" else (9, 0)
    chip = emulator.CHIPS.get(major, "")
    about = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter", "capability": major}
    about |= {"chip": chip, "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    about |= {"python": platform.python_version(), "numpy": np.__version__, "sums": SUMS}
    about["time"] = time.strftime("%FT%TZ", time.gmtime())
    failed = 0

    def say(line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text[:400], flush=True)
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    say({"environment": about})
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for dtype, instruction, steps in itertools.product(DTYPES, ROWS, (1, 4)):
            head = {"dtype": dtype, "asked": instruction, "steps": steps}
            started = time.perf_counter()
            try:
                said = compare(dtype, instruction, steps, chip, pool)
            except Exception as error:  # noqa: BLE001 - each type is tried by itself, and its reason kept
                said = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            failed += "failed" in said or bool(said["differences"])
            say(head | said | {"seconds": round(time.perf_counter() - started, 2)})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
