"""Prompt sets: a file of prompts, read within bounds, with every way that this goes wrong said in one line.

JSON lines (a field), plain text (one prompt a line), CSV (a column) or Parquet (a column, with pyarrow), by its suffix.
A prompt that can't be used is named by its place in the file, and nothing is sampled: a set that silently lost one
would be another set.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from nondet.core.runfile import regular
from nondet.errors import UserError, one_line, suggestion

__all__ = ["PROMPTS_MOST", "PromptLine", "load_prompts"]

# Each prompt has its own completions, figures and section of a report; ten thousand of them are a benchmark's size.
PROMPTS_MOST = 10_000
# A row is read no further than this; a prompt of so many bytes is beyond the context of any model here.
_ROW_BYTES = 4 * 2**20
_COLUMN = "prompt"
_SUFFIXES = (".jsonl", ".ndjson", ".txt", ".csv", ".parquet")


class PromptLine(str):
    """A prompt that knows where it stands, for messages.

    Attributes:
        place: "prompts.txt, line 3".
    """

    place: str

    def __new__(cls, text: str, place: str) -> PromptLine:
        """A string like any other, with its place beside it."""
        line = super().__new__(cls, text)
        line.place = place
        return line


def load_prompts(path: Path, column: str | None = None) -> list[PromptLine]:
    """The prompts of a file, in its order; equal prompts stay apart.

    Args:
        path: .jsonl or .ndjson, .txt, .csv (with a header), or .parquet.
        column: Field or column that holds the prompt; None: "prompt", or the only one there is. Not for .txt.

    Raises:
        UserError: no such file or column, another format, not UTF-8, an empty or missing prompt (its place is named),
            no prompt at all, or more than `PROMPTS_MOST`.
    """
    suffix = path.suffix.lower()
    read = _READERS.get(suffix)
    if read is None:
        raise UserError(f"{path}: prompts in a {suffix or 'file without a suffix'}", f"Use {', '.join(_SUFFIXES)}.")
    if suffix == ".txt" and column is not None:
        raise UserError(f"--column {column}: {path.name} is plain text and has no columns", "Leave --column out.")
    prompts: list[PromptLine] = []
    try:
        regular(path)  # a FIFO would be waited for
        for place, value in read(path, column):
            where = f"{path.name}, {place}"
            if len(prompts) == PROMPTS_MOST:
                raise UserError(f"{path} holds more than {PROMPTS_MOST:,} prompts", "Draw fewer of them.")
            if not isinstance(value, str):
                shown = "no prompt" if value is None else f"{type(value).__name__} where the prompt should be"
                raise UserError(f"{where}: {shown}", "Give every row a text.")
            if not value.strip():
                raise UserError(f"{where}: the prompt is empty", "Take the row out, or give it some text.")
            if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
                raise UserError(f"{where}: the prompt holds a NUL or half a character", "Clean the row.")
            prompts.append(PromptLine(value, where))
    except FileNotFoundError:
        raise UserError(f"no prompt file at {path}", "Check the path.") from None
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}", "Give a readable file of prompts.") from error
    if not prompts:
        raise UserError(f"{path} holds no prompts", f"Write one a row; {suffix} was read as such.")
    return prompts


def _lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[int, str]]:
    """(number from 1, text without its line end): split at line feeds alone, as text may hold other separators."""
    number = 0
    while line := stream.readline(_ROW_BYTES + 1):
        number += 1
        if len(line) > _ROW_BYTES:
            raise UserError(
                f"{path.name}, line {number} is longer than {_ROW_BYTES >> 20} MiB", "Is it a file of prompts?"
            )
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path.name}, line {number} is not UTF-8 text (its byte {error.start})", "Save it as UTF-8."
            ) from error
        yield number, text.removesuffix("\n").removesuffix("\r")


def _text(path: Path, _: str | None) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as stream:
        for number, text in _lines(path, stream):
            yield f"line {number}", text


def _json(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as stream:
        for number, text in _lines(path, stream):
            place = f"line {number}"
            if not text.strip():
                raise UserError(f"{path.name}, {place} is empty", "Take the line out.")
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                message = one_line(str(error), 120)
                raise UserError(f"{path.name}, {place} is no JSON: {message}", "Write one object a line.") from error
            if isinstance(record, str) and column is None:
                yield place, record
                continue
            if not isinstance(record, dict):
                raise UserError(f"{path.name}, {place} is no JSON object", 'Write {"prompt": "..."} a line.')
            name = _named(f"{path.name}, {place}", "field", list(record), column)
            yield place, record[name]


def _csv(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as stream:
        rows = csv.reader((f"{text}\n" for _, text in _lines(path, stream)), strict=True)
        limit = csv.field_size_limit(_ROW_BYTES)
        try:
            header = next(rows, None)
            if header is None:
                return
            place = header.index(_named(path.name, "column", header, column))
            while True:
                # a quoted field may go over lines: a row is named by the line that it begins in
                begins = rows.line_num + 1
                row = next(rows, None)
                if row is None:
                    return
                if len(row) != len(header):
                    raise UserError(
                        f"{path.name}, line {begins} has {len(row)} of {len(header)} columns",
                        "Take the line out, or quote the commas in it.",
                    )
                yield f"line {begins}", row[place]
        except csv.Error as error:
            message = one_line(str(error), 120)
            raise UserError(f"{path.name}, line {rows.line_num}: {message}", "Is it CSV, with a header?") from error
        finally:
            csv.field_size_limit(limit)


def _parquet(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{path.name}: Parquet needs pyarrow, which is not installed", "Run pip install pyarrow, or save it as CSV."
        ) from error
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        with parquet.ParquetFile(path) as file:
            if file.metadata.num_rows > PROMPTS_MOST:
                raise UserError(
                    f"{path} holds {file.metadata.num_rows:,} rows; {PROMPTS_MOST:,} prompts are the most",
                    "Draw fewer of them.",
                )
            name = _named(path.name, "column", list(file.schema_arrow.names), column)
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[name]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield f"row {row}", value
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        message = one_line(str(error), 120)
        raise UserError(f"{path.name} can't be read as Parquet: {message}", "Write it again.") from error


_READERS: dict[str, Callable[[Path, str | None], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".txt": _text,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _named(where: str, kind: str, names: list[str], column: str | None) -> str:
    """The field or column to read."""
    wanted = column if column is not None else _COLUMN
    if wanted in names:
        return wanted
    if column is None and len(names) == 1:
        return names[0]
    shown = one_line(wanted, 80)
    hint = suggestion(wanted, [one_line(name, 80) for name in names[:50]]) if names else "Is there a header?"
    if column is None:
        hint = f"Name another with --column. {hint}"
    raise UserError(f"{where} has no {kind} {shown!r}", hint)
