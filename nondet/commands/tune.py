"""`nondet tune`: measure the members of class "chain" on the GPU at hand, and keep which is the fastest where."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as Printed

from nondet.commands.common import progress_bar, say
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.kernels.matmul.cuda_tables import Row

__all__ = ["TuneRequest", "run", "shapes_of"]

_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class TuneRequest:
    """What the command line asked for; `shapes` as "4096x6144", K by N."""

    shapes: list[str]
    preset: str | None
    model: Path | None
    ms: list[int] | None
    dtypes: list[str] | None
    out: Path | None
    force: bool


def shapes_of(request: TuneRequest) -> list[tuple[int, int]]:
    """(K, N) of every product asked for.

    Raises:
        UserError: nothing was asked for, or no shape could be made of it.
    """
    from nondet.probes.presets import preset, read_config

    shapes = []
    for text in request.shapes:
        match = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text)
        if match is None:
            raise UserError(f"--shape {text!r} is no shape", "Give K by N, as 4096x6144.")
        shapes.append((int(match[1]), int(match[2])))
    if request.preset is not None:
        shapes += [(k, n) for _, k, n in preset(request.preset).layers]
    if request.model is not None:
        shapes += [(k, n) for _, k, n in read_config(request.model).layers]
    if not shapes:
        raise UserError("nothing to tune", "Name a --preset, a --model or a --shape.")
    return list(dict.fromkeys(shapes))


def run(request: TuneRequest) -> None:
    """Measure, print, and write the table that dispatch reads from now on.

    Raises:
        UserError: no CUDA device, unusable options, or a file that can't be written.
    """
    shapes = shapes_of(request)
    names = request.dtypes or ["bfloat16"]
    for name in names:
        if name not in _DTYPES:
            raise UserError(f"unknown --dtype {name!r}", f"Known: {', '.join(_DTYPES)}.")
    for m in request.ms or []:
        if not 1 <= m <= 2**24:
            raise UserError(f"--m {m} makes no sense", "Give numbers of rows from 1 to 16,777,216.")
    import torch

    if not torch.cuda.is_available():
        raise UserError("nondet tune measures GPU kernels, and there is no CUDA device", "Run it on the GPU machine.")
    from nondet.kernels.matmul import cuda_tables as matmul_tables
    from nondet.runfile import disk_errors
    from nondet.tuning import DEFAULT_MS, measure, table_of

    device = torch.device("cuda", torch.cuda.current_device())
    path = _path(request, torch.cuda.get_device_name(device))
    ms = request.ms or list(DEFAULT_MS)
    rows: list[Row] = []
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=len(names) * len(shapes) * len(ms))
        for name in names:
            for (m, k, n), found in measure(shapes, ms, getattr(torch, name), device):
                bar.advance(task)
                if isinstance(found, str):
                    say(f"{name} M={m} K={k} N={n}: left out, {found}")
                else:
                    rows.append(found)
    if not rows:
        raise UserError("nothing could be measured", "The lines above say why.")
    kept = _kept(path, rows) if request.out is None else []
    with disk_errors(path):
        matmul_tables.write(path, table_of(rows + kept, device))
    matmul_tables.forget()
    _show(rows)
    say(f"table: {path}")


def _path(request: TuneRequest, gpu: str) -> Path:
    from nondet.kernels.matmul.cuda_tables import slug, user_folder

    if request.out is not None:
        if request.out.exists() and not request.force:
            raise UserError(f"{request.out} exists", "Use --force to overwrite it, or another name.")
        return request.out
    folder = user_folder()
    if folder is None:
        raise UserError("there is no cache folder to keep the table in", "Set NONDET_CACHE, or name a file with --out.")
    return folder / f"{slug(gpu)}.json"


def _kept(path: Path, fresh: list[Row]) -> list[Row]:
    """Rows of the table at `path` that were not measured again, if they are of the same cuBLASLt."""
    from nondet.kernels.matmul import cublaslt
    from nondet.kernels.matmul import cuda_tables as matmul_tables

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
