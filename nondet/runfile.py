"""Writing run files: streamed, locked, resumable, and never overwritten without being asked.

A record is one line, written as it is made. So a run that is killed anywhere has whole lines and at most one that is
cut off; resuming cuts that one away in place and goes on. Reading is `nondet.reading`'s.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from nondet.errors import UserError
from nondet.files import create_locked, disk_errors, lines_of, open_locked
from nondet.reading import read_run, torn_header
from nondet.result import FORMAT, SCHEMA_VERSION, End, Header, Record, Run

__all__ = ["RunWriter", "begun", "disk_errors", "open_run", "read_run", "write_run"]

_ENCODER = msgspec.json.Encoder()


class RunWriter:
    """Appends records to a run file, one line each, holding the file's lock until it is closed.

    Attributes:
        done: Keys of the records that were already there when the file was opened to resume.
        resumed: Whether the file had a header already.
    """

    def __init__(
        self, path: Path, stream: IO[bytes], done: set[tuple[str, ...]], records: int, *, resumed: bool = False
    ) -> None:
        self.path, self.done, self.resumed = path, done, resumed
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
        """Close without an end line: the run can be resumed. Closing twice is fine."""
        with disk_errors(self.path):
            self._stream.close()

    def _line(self, record: msgspec.Struct) -> None:
        self._bytes(_ENCODER.encode(record) + b"\n")

    def _bytes(self, data: bytes) -> None:
        with disk_errors(self.path):
            while data:  # an unbuffered write may take a part: what is left then says why
                data = data[self._stream.write(data) :]


def open_run(
    path: Path,
    *,
    command: str,
    plan: dict[str, Any],
    environment: dict[str, Any],
    force: bool = False,
    resume: bool = False,
) -> RunWriter:
    """Open a run file for writing, and lock it.

    Args:
        path: Its folder is made if it is missing.
        plan: What decides the records; must be JSON-able.
        force: Overwrite what exists.
        resume: Go on with what exists, if its plan and everything that changes bits are the same.

    Raises:
        UserError: it exists and neither force nor resume was asked for; another process is writing it; it can't be
            resumed; it can't be written.
    """
    header = Header(
        format=FORMAT,
        schema=SCHEMA_VERSION,
        command=command,
        plan=plan,
        environment=environment,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if resume and path.exists():
        stream = open_locked(path)
        try:
            return _resume(path, stream, header)
        except BaseException:
            stream.close()
            raise
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return _begin(path, create_locked(path, force=force), header)


def begun(path: Path) -> bool:
    """Whether there is a run file at `path` whose header is whole, so that resuming goes on with it."""
    try:
        _, line, whole = next(lines_of(path))
    except (FileNotFoundError, StopIteration):
        return False
    return bool(line.strip()) and (whole or not torn_header(line))


def _begin(path: Path, stream: IO[bytes], header: Header) -> RunWriter:
    writer = RunWriter(path, stream, set(), 0)
    writer._line(header)
    return writer


def _resume(path: Path, stream: IO[bytes], header: Header) -> RunWriter:
    """Go on with a locked file. Its links, its owner and its mode stay: it is cut and appended to in place."""
    if not begun(path):  # empty, or killed within its very first line: there is no record that could be lost
        with disk_errors(path):
            stream.truncate(0)
        return _begin(path, stream, header)
    run = read_run(path, allow_truncated=True)
    _check_same(path, run.header, header)
    whole = ended = 0
    unfinished = False
    for number, line, complete in lines_of(path):
        if number == 1 and not complete:
            unfinished = True  # the header lacks nothing but its line end
            whole = len(line)
        elif complete:
            ended, whole = whole, whole + len(line) + 1
    if not run.complete:
        ended = whole
    with disk_errors(path):
        stream.truncate(ended)
        stream.seek(0, os.SEEK_END)
    records = list(run.records())
    writer = RunWriter(path, stream, {r.key for r in records}, len(records), resumed=True)
    if unfinished:
        writer._bytes(b"\n")
    return writer


def _check_same(path: Path, theirs: Header, ours: Header) -> None:
    """Records of two plans, machines or toolchains don't belong in one run.

    Raises:
        UserError: they differ, with the names of what does.
    """
    from nondet.environment import moved

    # what a reader gets back, so that like is compared with like
    plan, environment = msgspec.json.decode(msgspec.json.encode((ours.plan, ours.environment)))
    if theirs.command != ours.command:
        raise UserError(f"{path} was made by nondet {theirs.command}", "Choose another --out.")
    if theirs.plan != plan:
        changed = sorted(k for k in theirs.plan.keys() | plan.keys() if theirs.plan.get(k) != plan.get(k))
        raise UserError(
            f"{path} was made with other options ({', '.join(changed)})", "Repeat its options, or choose another --out."
        )
    differing = moved(theirs.environment, environment)
    if differing:
        raise UserError(
            f"{path} was made on another machine or toolchain ({', '.join(differing)})",
            "Go on with it where it was begun, or choose another --out.",
        )


def write_run(path: Path, run: Run, *, force: bool = False) -> None:
    """Write a run that was measured in memory, whole.

    Raises:
        UserError: as `open_run` and `RunWriter.write` say.
    """
    header = run.header
    writer = open_run(path, command=header.command, plan=header.plan, environment=header.environment, force=force)
    try:
        for record in run.records():
            writer.write(record)
        writer.finish()
    finally:
        writer.close()
