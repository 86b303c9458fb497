"""`nondet tune`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table as Printed

from nondet.commands.output import Terminal, say
from nondet.errors import UserError
from nondet.services import options as o

if TYPE_CHECKING:
    from nondet.kernels.matmul.cuda import Row

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
    import torch

    if not torch.cuda.is_available():
        raise UserError("nondet tune measures GPU kernels, and there is no CUDA device", "Run it on the GPU machine.")
    from nondet.bench.tune import DEFAULT_MS, measure, table_of
    from nondet.core.runfile import disk_errors
    from nondet.kernels.matmul import cuda as matmul_tables

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
    kept = _kept_tune(path, rows) if out is None else []
    with disk_errors(path):
        matmul_tables.write(path, table_of(rows + kept, device))
    matmul_tables.forget_tables()
    _show(rows)
    say(f"table: {path}")


def shapes_of(texts: list[str] | None, preset: str | None, model: Path | None) -> list[tuple[int, int]]:
    """(K, N) of every product asked for, from texts such as "4096x6144".

    Raises:
        UserError: nothing was asked for, or no shape could be made of it.
    """
    from nondet.probes.models import preset as preset_sizes
    from nondet.probes.models import read_config

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
    from nondet.kernels.matmul.cuda import slug, user_folder

    if out is not None:
        if out.exists() and not force:
            raise UserError(f"{out} exists", "Use --force to overwrite it, or another name.")
        return out
    folder = user_folder()
    if folder is None:
        raise UserError("there is no cache folder to keep the table in", "Set NONDET_CACHE, or name a file with --out.")
    return folder / f"{slug(gpu)}.json"


def _kept_tune(path: Path, fresh: list[Row]) -> list[Row]:
    """Rows of the table at `path` that were not measured again, if they are of the same cuBLASLt."""
    from nondet.kernels.matmul import cublaslt
    from nondet.kernels.matmul import cuda as matmul_tables

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
