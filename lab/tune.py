"""Measure which member of class "chain" is the fastest at each shape, and make the table that dispatch reads.

    python lab/tune.py --preset qwen3-8b      on the GPU machine, in a checkout of nondet's repository

Every candidate is proven against the class's anchor before it is timed: what has other bits is no candidate. Times are
those of CUDA graphs over rotating buffers, candidates in turn (`nondet.bench.cells`): first all of them shortly, then
the best few and torch's own product again, for longer. What comes of it changes speed, never bits.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table as Printed

from nondet.bench.cells import CudaGraphs, interleave, rotation
from nondet.commands.output import Terminal, say
from nondet.core.launch import note
from nondet.core.runfile import disk_errors
from nondet.errors import UserError
from nondet.kernels.matmul import cublaslt
from nondet.kernels.matmul import cuda as matmul_tables
from nondet.kernels.matmul.cuda import Member, Operands, Row, Table, member, prove, stands
from nondet.kernels.matmul.hopper import HOPPER_TILES
from nondet.kernels.matmul.triton_kernels import TMA_TILES, tiles
from nondet.probes.models import preset as preset_sizes
from nondet.probes.models import read_config
from nondet.services import options as o

DEFAULT_MS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)

# The winners of a search over some 40 tiles on an H200, by the largest M that they are for.
_HALF = (
    (16, "16x16x256w2s4 16x32x128w4s4 16x32x128w4s7 16x32x256w4s4 16x64x64w4s6 16x64x256w4s4"),
    (32, "32x16x128w4s6 32x32x64w4s6 32x32x256w4s4 32x64x128w4s4"),
    (64, "64x32x128w4s5 64x64x64w4s6 64x64x128w4s4 64x128x64w4s4"),
    (256, "64x64x64w4s4 64x64x128w4s3 128x64x64w4s4 128x128x64w8s4"),
    (2**31, "128x128x64w8s4 128x256x64w8s4"),
)
_FINALISTS = 5
_TMA_LEAST_US = 20.0
# Of no GPU in particular, and only to see how many calls make a replay long enough
_BYTES_PER_US, _FLOPS_PER_US = 4e6, 1e9
# A library's favourite is taken unless another candidate is faster by more than noise.
_WORTH = 0.985


def candidates(m: int, dtype: torch.dtype, ranks: int) -> list[str]:
    """Names of the members that may be fastest at m rows: the library's first `ranks` algorithms, then tiles."""
    found = [f"cublaslt:{rank}" for rank in range(ranks)]
    if dtype not in (torch.float16, torch.bfloat16):
        return found + [tile.name for tile in tiles(dtype)]
    found += next(names for most, names in _HALF if m <= most).split()
    found += [f"hopper:{tile.name}" for tile in HOPPER_TILES if m <= 4 * tile.block_m]
    return found + [f"tma:{tile.name}" for tile in TMA_TILES if (16 < m <= 512 if tile.block_m <= 64 else m > 128)]


def measure(
    shapes: Sequence[tuple[int, int]], ms: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[tuple[int, int, int], Row | str]]:
    """Measure x [m, k] times weight [n, k] transposed for each (k, n) and m: ((m, k, n), row or what went wrong)."""
    for k, n in shapes:
        for m in sorted(ms):
            try:
                yield (m, k, n), _cell(m, k, n, dtype, device)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                yield (m, k, n), "not enough memory"


def _cell(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> Row | str:
    stopwatch = CudaGraphs()
    size = torch.empty(0, dtype=dtype).element_size()
    moved = size * (m * k + k * n + m * n)
    shortest_us = max(moved / _BYTES_PER_US, 2.0 * m * n * k / _FLOPS_PER_US)
    turns = rotation(moved, shortest_us, stopwatch.cache_bytes, replay_us=200.0)
    sets = [
        (torch.randn(1, m, k, dtype=dtype, device=device), torch.randn(n, k, dtype=dtype, device=device).T[None])
        for _ in range(turns.sets)
    ]
    found = _proven(candidates(m, dtype, 8 if m <= 512 else 4), *sets[0])
    if all(name.startswith("cublaslt:") for name in found):
        return "no Triton tile has the class's bits here"
    calls = {name: _launcher(one, m, n, dtype, device) for name, one in found.items()}

    def timed(names: Iterable[str], budget_us: float, least: int) -> dict[str, float]:
        stopwatch.budget_us = budget_us
        replays = {name: stopwatch.record(calls[name], sets, turns.calls) for name in names}
        samples = interleave(replays, stopwatch, least=least, most=15)
        return {name: statistics.median(us) / turns.calls for name, us in samples.items()}

    rough = timed(calls, 1_000.0, 3)
    best = sorted(rough, key=lambda name: rough[name])
    plain = [name for name in best if ":" not in name]
    calls["stock"] = lambda x, weight: F.linear(x[0], weight[0].T)
    finalists = [*best[:_FINALISTS], *plain[:2], *(name for name in ["cublaslt:0"] if name in rough), "stock"]
    times = timed(dict.fromkeys(finalists), 8_000.0, 5)
    stock_us = times.pop("stock")
    # Triton builds TMA descriptors on the host at every launch: 20 us, which a shorter kernel does not hide
    quick = {name: us for name, us in times.items() if not name.startswith("tma:") or us > _TMA_LEAST_US}
    choice = min(quick, key=lambda name: quick[name])
    if "cublaslt:0" in times and times[choice] > _WORTH * times["cublaslt:0"]:
        choice = "cublaslt:0"
    triton = min((name for name in quick if not name.startswith("cublaslt:")), key=lambda name: times[name])
    name = str(dtype).removeprefix("torch.")
    return Row(name, k, n, m, choice, round(times[choice], 2), triton, round(times[triton], 2), round(stock_us, 2))


def _proven(names: Sequence[str], x: torch.Tensor, weight: torch.Tensor) -> dict[str, Member]:
    """The candidates that there are for this product and that have the class's bits."""
    given = Operands(x, weight, alignment=256)
    offered = ((name, member(name, given)) for name in names)
    members = {name: bound for name, bound in offered if bound is not None}

    def standing(name: str) -> bool | None:
        return stands(members[name], given, may_prove=False)

    unknown = [name for name in members if standing(name) is None]
    proven = prove([members[name] for name in unknown], given)  # all on the same inputs
    holds = dict(zip(unknown, proven, strict=True))
    return {name: bound for name, bound in members.items() if holds.get(name, standing(name))}


def _launcher(
    one: Member, m: int, n: int, dtype: torch.dtype, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(1, m, n, dtype=dtype, device=device)
        note(one.label)
        one.launch(x, weight, None, out)
        return out

    return call


def table_of(rows: list[Row], device: torch.device) -> Table:
    """The rows with what they hold for."""
    import triton

    gpu = torch.cuda.get_device_name(device)
    return Table(gpu, torch.__version__, triton.__version__, cublaslt.version(), rows)


def write(path: Path, table: Table) -> None:
    """Write a table, one row a line."""
    head = {"form": matmul_tables.FORM} | {n: getattr(table, n) for n in ("gpu", "torch", "triton", "cublaslt")}
    rows = ",\n".join("  " + json.dumps(list(row)) for row in sorted(table.rows))
    text = (
        json.dumps(head, indent=1)[:-2]
        + f',\n "columns": {json.dumps(list(Row._fields))},\n "rows": [\n{rows}\n ]\n}}\n'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)  # atomically: other processes read the table meanwhile


_DTYPES = ("bfloat16", "float16", "float32")


def tune(
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="K by N of a weight, as 4096x6144. Repeatable.")
    ] = None,
    preset: o.PRESET = None,
    model: o.MODEL_FOLDER = None,
    m: Annotated[
        list[int] | None, typer.Option("--m", help="Rows. Repeatable.", show_default="19 from 1 to 8192")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="bfloat16, float16 or float32. Repeatable.", show_default="bfloat16"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Table to write (.json). Default: this GPU's, in the cache folder.", show_default=False
        ),
    ] = None,
    force: o.FORCE = False,
) -> None:
    """Measure on this GPU which invariant matmul is fastest at each shape. Changes speed, never bits."""
    shapes = shapes_of(shape, preset, model)
    names = dtype or ["bfloat16"]
    for name in names:
        if name not in _DTYPES:
            raise UserError(f"unknown --dtype {name!r}", f"Known: {', '.join(_DTYPES)}.")
    for rows_ in m or []:
        if not 1 <= rows_ <= 2**24:
            raise UserError(f"--m {rows_} makes no sense", "Give numbers of rows from 1 to 16,777,216.")
    if not torch.cuda.is_available():
        raise UserError("GPU kernels are measured, and there is no CUDA device", "Run it on the GPU machine.")
    device = torch.device("cuda", torch.cuda.current_device())
    path = _path(out, force, torch.cuda.get_device_name(device))
    ms = m or list(DEFAULT_MS)
    rows: list[Row] = []
    with Terminal().progress() as bar:
        task = bar.add_task("measuring", total=len(names) * len(shapes) * len(ms))
        for name in names:
            for (rows_, k, n), found in measure(shapes, ms, getattr(torch, name), device):
                bar.advance(task)
                if isinstance(found, str):
                    say(f"{name} M={rows_} K={k} N={n}: left out, {found}")
                else:
                    rows.append(found)
    if not rows:
        raise UserError("nothing could be measured", "The lines above say why.")
    kept = kept_rows(path, rows) if out is None else []
    with disk_errors(path):
        write(path, table_of(rows + kept, device))
    matmul_tables.forget_tables()
    _show(rows)
    say(f"table: {path}")


def shapes_of(texts: list[str] | None, preset: str | None, model: Path | None) -> list[tuple[int, int]]:
    """(K, N) of every product asked for, from texts such as "4096x6144".

    Raises:
        UserError: nothing was asked for, or no shape could be made of it.
    """
    shapes = []
    for text in texts or []:
        match = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text)
        if match is None:
            raise UserError(f"--shape {text!r} is no shape", "Give K by N, as 4096x6144.")
        shapes.append((int(match[1]), int(match[2])))
    if preset is not None:
        shapes += [(k, n) for _, k, n in preset_sizes(preset).layers]
    if model is not None:
        shapes += [(k, n) for _, k, n in read_config(model).layers]
    if not shapes:
        raise UserError("nothing to tune", "Name a --preset, a --model or a --shape.")
    return list(dict.fromkeys(shapes))


def _path(out: Path | None, force: bool, gpu: str) -> Path:
    if out is not None:
        if out.exists() and not force:
            raise UserError(f"{out} exists", "Use --force to overwrite it, or another name.")
        return out
    folder = matmul_tables.user_folder()
    if folder is None:
        raise UserError("there is no cache folder to keep the table in", "Set NONDET_CACHE, or name a file with --out.")
    return folder / f"{matmul_tables.slug(gpu)}.json"


def kept_rows(path: Path, fresh: list[Row]) -> list[Row]:
    """Rows of the table at `path` that were not measured again, if they are of the same cuBLASLt."""
    if not path.is_file():
        return []
    try:
        table = matmul_tables.read(path)
    except (ValueError, KeyError, TypeError):
        return []
    if table.cublaslt != cublaslt.version():
        return []
    again = {(row.dtype, row.k, row.n) for row in fresh}
    return [row for row in table.rows if (row.dtype, row.k, row.n) not in again]


def _show(rows: list[Row]) -> None:
    printed = Printed("dtype", "K x N", "M", "fastest", "us", "Triton", "us", "stock us", "stock / fastest")
    for row in rows:
        ratio = row.stock_us / row.choice_us
        printed.add_row(
            row.dtype,
            f"{row.k} x {row.n}",
            str(row.m),
            row.choice,
            f"{row.choice_us:.1f}",
            row.triton,
            f"{row.triton_us:.1f}",
            f"{row.stock_us:.1f}",
            f"{ratio:.2f}",
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has no width, and a table cut to 80 columns can't be read
    console.print(printed)
    mean = math.exp(sum(math.log(row.stock_us / row.choice_us) for row in rows) / len(rows))
    console.print(f"stock over fastest, geometric mean of {len(rows)}: {mean:.3f}")


if __name__ == "__main__":
    try:
        typer.run(tune)
    except UserError as error:
        print(f"tune: {error}", file=sys.stderr)
        sys.exit(2)
