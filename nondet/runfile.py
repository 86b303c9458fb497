"""Writing run files: streamed, locked, resumable, and never overwritten without being asked.

A record is one line, written as it is made. So a run that is killed anywhere has whole lines and at most one that is
cut off; resuming cuts that one away in place and goes on. Reading is `nondet.reading`'s, and each line is read and
checked before it is written: what no reader would take never gets into a file.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from nondet.errors import UnrecordableError, UserError
from nondet.files import create_locked, disk_errors, lines_of, open_locked
from nondet.reading import encoded, read_run, torn_header
from nondet.result import FORMAT, SCHEMA_VERSION, End, Header, Record, Run
from nondet.text import one_line, shortened, without_path
from nondet.validation import RunChecks

__all__ = ["RunWriter", "begun", "disk_errors", "open_run", "read_run", "write_run"]

AnyRecord = TypeVar("AnyRecord", bound=Record)
_PROMPTS_MOST = 16 * 2**20  # bytes of all prompts in a header; beyond, each is cut and the side file has it whole
_CUTS = (1000, 200, 0)  # characters that are left of each, the most that fits


class RunWriter:
    """Appends records to a run file, one line each, holding the file's lock until it is closed.

    Attributes:
        done: Keys of the records that were already there when the file was opened to resume.
        resumed: Whether the file had a header already.
        long_prompts: Whole texts of prompts that the header has cut, for the side file.
    """

    def __init__(self, path: Path, stream: IO[bytes], header: Header, run: Run | None = None) -> None:
        self.path, self.resumed = path, run is not None
        self.done: set[tuple[str, ...]] = set()
        self.long_prompts: list[str] = []
        self._stream, self._started = stream, time.perf_counter()
        self._checks = RunChecks(header)
        for record in run.records() if run is not None else ():
            self._checks.record(record)
            self.done.add(record.key)
        if run is None:
            self._bytes(encoded(header)[0])

    def write(self, record: AnyRecord) -> AnyRecord:
        """Append one record, and say what was written: one that no reader would take is written as a failure.

        Raises:
            UserError: the disk is full or the file can't be written.
            UnrecordableError: no reader would take it even so.
        """
        try:
            line = self._checked(record)
        except ValueError as error:
            why = one_line(str(error), 300)
            record = record.refused(f"it can't be recorded: {why}")
            try:
                line = self._checked(record)
            except ValueError:
                raise UnrecordableError(
                    f"{self.path}: a record ({one_line(' '.join(record.key), 100)}) that no reader would take: {why}",
                    "What was written before it is whole; report this, with the command.",
                ) from None
        self._bytes(line)
        self.done.add(record.key)
        return record

    def finish(self) -> None:
        """Write the end line: the run is complete."""
        self._bytes(encoded(End(records=len(self.done), seconds=time.perf_counter() - self._started))[0])
        self.close()

    def close(self) -> None:
        """Close without an end line: the run can be resumed. Closing twice is fine."""
        with disk_errors(self.path):
            self._stream.close()

    def _checked(self, record: Record) -> bytes:
        """The line. Raises ValueError."""
        line, read = encoded(record)
        self._checks.record(read)
        return line

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
            resumed; it can't be written; the plan is too large.
    """
    try:
        header = Header(
            format=FORMAT, schema=SCHEMA_VERSION, command=command, plan=_bounded(plan), environment=environment,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        header = encoded(header)[1]  # what a reader gets back, so that like is compared with like
        RunChecks(header).header(header)
    except ValueError as error:
        raise UserError(f"no run file can hold this plan: {one_line(str(error), 200)}", "Give less of it.") from None
    writer = _opened(path, header, force=force, resume=resume)
    kept = {p["text"] for p in header.plan.get("prompts", [])}
    writer.long_prompts = [t for t in dict.fromkeys(p["text"] for p in plan.get("prompts", [])) if t not in kept]
    return writer


def _opened(path: Path, header: Header, *, force: bool, resume: bool) -> RunWriter:
    if resume and path.exists():
        stream = open_locked(path)
        try:
            return _resume(path, stream, header)
        except BaseException:
            stream.close()
            raise
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return RunWriter(path, create_locked(path, force=force), header)


def begun(path: Path) -> bool:
    """Whether there is a run file at `path` whose header is whole, so that resuming goes on with it."""
    try:
        _, line, whole = next(lines_of(path))
    except (FileNotFoundError, StopIteration):
        return False
    return bool(line.strip()) and (whole or not torn_header(line))


def _bounded(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan as a header has it: prompts cut where all of them would be too long for one line, no path of a server.

    Of a plan that is one already it is the same, and of one of an older nondet what this one would have written.
    """
    prompts: Any = plan.get("prompts")
    endpoint = plan.get("endpoint")
    if isinstance(endpoint, dict) and isinstance(endpoint.get("servers"), list):
        shown = [
            {**s, "url": without_path(str(s.get("url")))} if isinstance(s, dict) else s for s in endpoint["servers"]
        ]
        plan = {**plan, "endpoint": {**endpoint, "servers": shown}}
    for most in _CUTS if isinstance(prompts, list) else ():
        if len(msgspec.json.encode(plan["prompts"])) > _PROMPTS_MOST:
            plan = {**plan, "prompts": [{**p, "text": shortened(p["text"], most)} for p in prompts]}
    return plan


def _resume(path: Path, stream: IO[bytes], header: Header) -> RunWriter:
    """Go on with a locked file. Its links, its owner and its mode stay: it is cut and appended to in place."""
    if not begun(path):  # empty, or killed within its very first line: there is no record that could be lost
        with disk_errors(path):
            stream.truncate(0)
        return RunWriter(path, stream, header)
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
    writer = RunWriter(path, stream, run.header, run)
    if unfinished:
        writer._bytes(b"\n")
    return writer


def _check_same(path: Path, theirs: Header, ours: Header) -> None:
    """Records of two plans, machines or toolchains don't belong in one run.

    Raises:
        UserError: they differ, with the names of what does.
    """
    from nondet.environment import moved

    if theirs.command != ours.command:
        raise UserError(f"{path} was made by nondet {theirs.command}", "Choose another --out.")
    before, plan = _bounded(theirs.plan), ours.plan
    if before != plan:
        changed = sorted(k for k in before.keys() | plan.keys() if before.get(k) != plan.get(k))
        raise UserError(
            f"{path} was made with other options ({', '.join(changed)})", "Repeat its options, or choose another --out."
        )
    differing = moved(theirs.environment, ours.environment)
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
