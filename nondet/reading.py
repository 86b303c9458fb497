"""Reading run files: line by line, in bounded memory, and checked once, so that nothing behind needs to check again."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec

from nondet import files
from nondet.errors import UserError
from nondet.files import lines_of
from nondet.result import FORMAT, SCHEMA_VERSION, End, Header, Run, line_decoder
from nondet.text import one_line
from nondet.validation import ContradictionError, RunChecks

__all__ = ["decode", "encoded", "read_run", "torn_header"]

_OURS = "a file that `nondet probe`, `sample`, `bench` or `certify` wrote"
_EDITED = "Is it a run file that was edited by hand?"
_LINE = line_decoder()
_ENCODER = msgspec.json.Encoder()
# How every header of ours begins: what is cut off in its first line is recognized by it.
_MAGIC = b'{"type":"header","format":"' + FORMAT.encode() + b'"'


def decode(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:
    """One line.

    Raises:
        ValueError: it is not JSON, not UTF-8, nested too deeply, or not of the decoder's types; what, in a phrase.
    """
    try:
        return decoder.decode(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from error
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def encoded(record: msgspec.Struct, decoder: msgspec.json.Decoder[Any] = _LINE) -> tuple[bytes, Any]:
    """The line that a writer writes, its end included, and what a reader will get of it.

    Raises:
        ValueError: no reader takes such a line; why, in a phrase.
    """
    try:
        line = _ENCODER.encode(record) + b"\n"
    except (UnicodeError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if len(line) > files.LINE_MOST:
        raise ValueError(f"a line of {len(line):,} bytes, where readers take {files.LINE_MOST:,}")
    return line, decode(decoder, line)


def torn_header(line: bytes) -> bool:
    """Whether a line without an end is the beginning of a header of ours, and not a whole one."""
    if not (line.startswith(_MAGIC) or _MAGIC.startswith(line)):
        return False
    try:
        return not isinstance(decode(_LINE, line), Header)
    except ValueError:
        return True


def read_run(path: Path, *, allow_truncated: bool = False) -> Run:
    """Read a run file, and check that it does not contradict itself.

    Args:
        allow_truncated: Take a file whose last line is cut off (a killed run), without that line.

    Raises:
        UserError: missing, empty, not a run file, from a newer schema, cut off, malformed or contradicting itself; the
            line and the field are named.
    """
    try:
        lines = lines_of(path)
        number, line, whole = next(lines, (0, b"", True))
    except FileNotFoundError:
        raise UserError(f"no run file at {path}", f"Give {_OURS}.") from None
    if not line.strip():
        if not any(text.strip() for _, text, _ in itertools.islice(lines, 10_000)):
            raise UserError(f"{path} is empty", "Its run never started: repeat its command with --resume.")
        raise _not_ours(path)
    if not whole and torn_header(line):
        raise UserError(
            f"{path} is cut off in line 1: the run was killed while it began", "Repeat its command with --resume."
        )
    run = Run(header=_header(path, line), complete=False, source=str(path))
    checks = RunChecks(run.header)
    try:
        checks.header(run.header)
        for number, line, whole in lines:
            if not whole:
                if not allow_truncated:
                    raise UserError(
                        f"{path} is cut off in line {number}: the run was killed while writing",
                        "Repeat its command with --resume, or read what is whole with --allow-truncated.",
                    )
                break
            record = decode(_LINE, line)
            if run.complete:
                raise ContradictionError("it comes after the end of the run")
            if isinstance(record, Header):
                raise ContradictionError("a second header: were two run files joined? Give one at a time")
            if isinstance(record, End):
                checks.end(record)
                run.complete = True
            else:
                checks.record(record)
                run.add(record)
        _in_order(run)
    except ValueError as error:
        raise UserError(f"{path} is malformed in line {number}: {one_line(str(error), 300)}", _EDITED) from error
    return run


def _in_order(run: Run) -> None:
    """Rows by their places in the plan: processes that share one finish theirs in any order."""
    if all(isinstance(row.place, int) for row in run.rows):
        run.rows.sort(key=lambda row: row.place if isinstance(row.place, int) else 0)


def _not_ours(path: Path) -> UserError:
    return UserError(f"{path} is not a nondet run file", f"Give {_OURS}.")


def _header(path: Path, line: bytes) -> Header:
    try:
        raw = decode(msgspec.json.Decoder(), line)
    except ValueError as error:
        raise _not_ours(path) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise _not_ours(path)
    schema = raw.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema {str(schema)[:40]}, and this nondet reads up to {SCHEMA_VERSION}", "Upgrade nondet."
        )
    try:
        header = decode(_LINE, line)
    except ValueError as error:
        raise UserError(f"{path} is malformed in line 1: {one_line(str(error), 300)}", _EDITED) from error
    if not isinstance(header, Header):
        raise _not_ours(path)
    return header
