"""Reading and writing run files: streamed, resumable, and never overwritten without being asked."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from nondet.errors import UserError
from nondet.result import FORMAT, SCHEMA_VERSION, End, Header, Record, Run, line_decoder

__all__ = ["RunWriter", "disk_errors", "open_run", "read_run"]

_ENCODER = msgspec.json.Encoder()
_OURS = "a file that `nondet probe`, `sample`, `bench` or `certify` wrote"
_LINE = line_decoder()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the file system says into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(
                f"the disk is full: {path}", "Free some space and go on with --resume; what was written is kept."
            ) from error
        raise UserError(f"can't write {path}: {error.strerror or error}", "Choose another --out.") from error


class RunWriter:
    """Appends records to a run file, one flushed line each.

    Attributes:
        done: Keys of the records that were already there when the file was opened to resume.
    """

    def __init__(self, path: Path, stream: IO[bytes], done: set[tuple[str, ...]], records: int) -> None:
        self.path, self.done = path, done
        self._stream, self._records, self._started = stream, records, time.perf_counter()

    def write(self, record: Record) -> None:
        """Append one record.

        Raises:
            UserError: the disk is full or the file can't be written.
        """
        self._line(record)
        self.done.add(record.key)
        self._records += 1

    def finish(self) -> None:
        """Write the end line: the run is complete."""
        self._line(End(records=self._records, seconds=time.perf_counter() - self._started))
        self.close()

    def close(self) -> None:
        """Close without an end line: the run can be resumed."""
        with disk_errors(self.path):
            self._stream.close()

    def _line(self, record: msgspec.Struct) -> None:
        with disk_errors(self.path):
            self._stream.write(_ENCODER.encode(record) + b"\n")
            self._stream.flush()


def open_run(
    path: Path,
    *,
    command: str,
    plan: dict[str, Any],
    environment: dict[str, Any],
    force: bool = False,
    resume: bool = False,
) -> RunWriter:
    """Open a run file for writing.

    Args:
        path: Its folder is made if it is missing.
        plan: What decides the records; must be JSON-able.
        force: Overwrite what exists.
        resume: Go on with what exists, if its plan and machine are the same.

    Raises:
        UserError: it exists and neither force nor resume was asked for; it can't be resumed; it can't be written.
    """
    plan = msgspec.json.decode(
        msgspec.json.encode(plan)
    )  # what a reader will get back, so that resuming compares like with like
    if path.exists() and resume:
        return _resume(path, plan, environment)
    if path.exists() and not force:
        raise UserError(f"{path} exists", "Use --resume to go on with it, --force to overwrite it, or another --out.")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("wb")
    writer = RunWriter(path, stream, set(), 0)
    writer._line(
        Header(
            format=FORMAT,
            schema=SCHEMA_VERSION,
            command=command,
            plan=plan,
            environment=environment,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    )
    return writer


# What a resumed run must share with its first half, beside the plan: rows of two machines don't belong in one run.
_SAME_MACHINE = ("gpu", "cpu", "torch", "triton", "transformers", "num_threads")


def _resume(path: Path, plan: dict[str, Any], environment: dict[str, Any]) -> RunWriter:
    run = read_run(path, allow_truncated=True)
    if run.header.plan != plan:
        changed = sorted(k for k in run.header.plan.keys() | plan.keys() if run.header.plan.get(k) != plan.get(k))
        raise UserError(
            f"{path} was made with other options ({', '.join(changed)})", "Repeat its options, or choose another --out."
        )
    theirs, ours = run.header.environment, msgspec.json.decode(msgspec.json.encode(environment))
    moved = [k for k in _SAME_MACHINE if theirs.get(k) != ours.get(k)]
    if moved:
        raise UserError(
            f"{path} was made on another machine or toolchain ({', '.join(moved)} differ)", "Choose another --out."
        )
    records = list(run.records())
    with disk_errors(path):
        data = path.read_bytes()
        kept = [
            line for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True) if b'"type":"end"' not in line[:14]
        ]
        scratch = path.with_suffix(path.suffix + ".tmp")
        scratch.write_bytes(b"".join(kept))
        os.replace(scratch, path)
        stream = path.open("ab")
    return RunWriter(path, stream, {r.key for r in records}, len(records))


def read_run(path: Path, *, allow_truncated: bool = False) -> Run:
    """Read a run file.

    Args:
        allow_truncated: Take a file whose last line is cut off (a killed run), without that line.

    Raises:
        UserError: missing, empty, not a run file, from a newer schema, cut off, or malformed; the line is named.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no run file at {path}", f"Give {_OURS}.") from None
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}", "Give a readable run file.") from error
    if not data.strip():
        raise UserError(f"{path} is empty", "Its run never started: run it again, with --force.")
    lines = data.split(b"\n")
    truncated = lines.pop() != b""
    if truncated and not allow_truncated and len(lines) > 0:
        raise UserError(
            f"{path} is cut off in line {len(lines) + 1}: the run was killed while writing",
            "Repeat its command with --resume, or read what is whole with --allow-truncated.",
        )
    header = _header(path, lines[0] if lines else data)
    run = Run(header=header, complete=False, source=str(path))
    for number, line in enumerate(lines[1:], start=2):
        try:
            record = _LINE.decode(line)
        except msgspec.MsgspecError as error:
            raise UserError(
                f"{path} is malformed in line {number}: {error}", "Is it a run file that was edited by hand?"
            ) from error
        if isinstance(record, Record):
            run.add(record)
        elif isinstance(record, End):
            run.complete = True
        else:
            raise UserError(
                f"{path} has a second header in line {number}", "Were two run files joined? Give one at a time."
            )
    return run


def _header(path: Path, line: bytes) -> Header:
    not_ours = UserError(f"{path} is not a nondet run file", f"Give {_OURS}.")
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise not_ours from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise not_ours
    schema = raw.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema {schema!r}, and this nondet reads up to {SCHEMA_VERSION}", "Upgrade nondet."
        )
    try:
        header = _LINE.decode(line)
    except msgspec.MsgspecError as error:
        raise UserError(
            f"{path} is malformed in line 1: {error}", "Is it a run file that was edited by hand?"
        ) from error
    if not isinstance(header, Header):
        raise not_ours
    return header
