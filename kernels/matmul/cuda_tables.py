"""Which member of class "chain" is the fastest at a shape: tables made by measuring, and a rule for all other shapes.

A table decides speed and nothing else: whatever it names has to have the class's bits, proven, before it is used
(`nondet.kernels.matmul.cuda`). Tables are JSON, one row a measured product: kernels/matmul/tables/ holds those that
come along, and `nondet tune` writes one for the machine at hand into the user's cache folder, whose rows come first.

A choice is called "cublaslt:R" (the library's algorithm of rank R without split-K), "tma:TILE", "hopper:TILE" or
"TILE", with tiles like 16x32x128w4s5 (BLOCK_M x BLOCK_N x BLOCK_K, warps, stages).
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from bisect import bisect_left
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nondet.core.certificates import cache_folder
from nondet.kernels.matmul import cublaslt
from nondet.kernels.matmul.cuda_tiles import tile_for
from nondet.kernels.matmul.hopper import hopper_tile

__all__ = ["FORM", "Row", "Table", "choices", "forget", "read", "rule", "user_folder", "write"]

FORM = 1
_FOLDER = Path(__file__).parent / "tables"
_CHOICE = re.compile(r"cublaslt:\d{1,3}|((tma|hopper):)?\d+x\d+x\d+w\d+s\d+")


class Row(NamedTuple):
    """One measured product, x [m, k] times weight [n, k] transposed.

    Attributes:
        choice: The fastest member, and its time.
        triton: The fastest member that needs no library, and its time.
        stock_us: torch.nn.functional.linear with torch's own settings.
    """

    dtype: str
    k: int
    n: int
    m: int
    choice: str
    choice_us: float
    triton: str
    triton_us: float
    stock_us: float


class Table(NamedTuple):
    """What was measured on one kind of GPU; `ranks` are those of one version of cuBLASLt."""

    gpu: str
    torch: str
    triton: str
    cublaslt: int
    rows: list[Row]


def slug(gpu: str) -> str:
    """A GPU's name as a file's: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def user_folder() -> Path | None:
    """Where `nondet tune` keeps tables: beside the certificates; None if there is no home."""
    folder = cache_folder()
    return None if folder is None else folder.parent / "matmul-tables"


def write(path: Path, table: Table) -> None:
    """Write a table, one row a line."""
    head = {"form": FORM, "gpu": table.gpu, "torch": table.torch, "triton": table.triton, "cublaslt": table.cublaslt}
    rows = ",\n".join("  " + json.dumps(list(row)) for row in sorted(table.rows))
    text = (
        json.dumps(head, indent=1)[:-2]
        + f',\n "columns": {json.dumps(list(Row._fields))},\n "rows": [\n{rows}\n ]\n}}\n'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)  # at once: other processes read the table while it is written


def read(path: Path) -> Table:
    """Read a table.

    Raises:
        ValueError: it is not one, of another form, or names what no member is called.
    """
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("form") != FORM or data.get("columns") != list(Row._fields):
        raise ValueError(f"{path} is no table of matmul choices of form {FORM}")
    rows = [Row(*row) for row in data["rows"]]
    for row in rows:
        if not (_CHOICE.fullmatch(row.choice) and _CHOICE.fullmatch(row.triton) and isinstance(row.m, int)):
            raise ValueError(f"{path} has a row that can't be: {list(row)}")
    return Table(data["gpu"], data["torch"], data["triton"], data["cublaslt"], rows)


def rule(m: int, n: int, k: int, dtype: torch.dtype) -> list[str]:
    """Choices for a shape that no table knows, best first; the last is Triton's, for any layout.

    From the figures of an H200. At half precision the library's favourite without split-K is the fastest nearly
    everywhere, or within a few percent of it; at one row of a narrow product its second choice is. Few columns over a
    long K leave it waiting for the chain, which the Hopper member shortens. float32 (IEEE) up to 16 rows goes by
    Triton: the library's kernels there mostly add in an order of their own.
    """
    tile = tile_for(m, n, dtype)
    if dtype in (torch.float16, torch.bfloat16):
        favourites = ["cublaslt:1", "cublaslt:0"] if m == 1 and n < 2048 else ["cublaslt:0"]
        without = next(name for most, name in _WITHOUT_LIBRARY if m <= most)
        few = hopper_tile(m, n, k)
        return [*([] if few is None else [f"hopper:{few.name}"]), *favourites, without, tile.name]
    if dtype == torch.float32 and m > 16:
        return ["cublaslt:0", "cublaslt:1", tile.name]
    return [tile.name]


# Where the library has nothing in the class: the first whose M is not exceeded
_WITHOUT_LIBRARY = (
    (16, "16x32x128w4s7"),
    (64, "tma:64x32x128w4s5"),
    (256, "tma:64x64x128w4s4"),
    (2**31, "tma:128x128x64w4s4"),
)


def choices(batch: int, m: int, n: int, k: int, dtype: torch.dtype, gpu: str) -> list[str]:
    """Choices for a product on the GPU of that name, best first: the table's for the next measured m, then the rule's.

    Where m itself was not measured, a rank of the library's algorithms means nothing, and its favourite is taken.
    """
    general = rule(m, n, k, dtype)
    by_shape, ranked_by = _tables(gpu)
    rows = by_shape.get((str(dtype).removeprefix("torch."), k, n))
    if rows is None or batch != 1 or m > 2 * rows[-1].m:
        return general
    row = rows[min(bisect_left(rows, m, key=lambda r: r.m), len(rows) - 1)]
    choice = row.choice
    if choice.startswith("cublaslt:") and (row.m != m or ranked_by != cublaslt.version()):
        choice = "cublaslt:0"
    favourite = ["cublaslt:0"] if choice.startswith("cublaslt:") else []
    return list(dict.fromkeys([choice, *favourite, row.triton, *general]))


@functools.cache
def _tables(gpu: str) -> tuple[dict[tuple[str, int, int], list[Row]], int]:
    """Rows by (dtype, k, n), each list by m, and the version of cuBLASLt that ranks are of."""
    found: dict[tuple[str, int, int], list[Row]] = {}
    ranked_by = 0
    for folder in (user_folder(), _FOLDER):
        path = None if folder is None else folder / f"{slug(gpu)}.json"
        if path is None or not path.is_file():
            continue
        try:
            table = read(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"the table of matmul choices {path} was ignored: {error}", stacklevel=2)
            continue
        ranked_by = ranked_by or table.cublaslt
        measured: dict[tuple[str, int, int], list[Row]] = {}
        for row in table.rows:
            if table.cublaslt != ranked_by and row.choice.startswith("cublaslt:"):
                row = row._replace(choice="cublaslt:0")
            measured.setdefault((row.dtype, row.k, row.n), []).append(row)
        for shape, rows in measured.items():
            found.setdefault(shape, sorted(rows, key=lambda r: r.m))
    return found, ranked_by


def forget() -> None:
    """Read the tables again at the next question."""
    _tables.cache_clear()
