"""Run files: written line by line under a lock and resumable, read within bounds, never overwritten without --force.

A killed run has whole lines and at most one cut-off line; resuming removes that one in place and continues. Each line
is read and checked before it is written: what a reader would reject never gets into a file.
"""

from __future__ import annotations

import errno
import gzip
import itertools
import lzma
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from io import BufferedIOBase
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from nondet.core.records import FORMAT, LINE, SCHEMA_VERSION, ContradictionError, End, Header, Record, Run, RunChecks
from nondet.errors import UnrecordableError, UserError, one_line, shortened, without_path

try:
    import fcntl
except ImportError:  # Windows has none: there only the exclusive create keeps two writers apart
    fcntl = None  # type: ignore[assignment] # checked where it is used


# More than any line of nondet's: a round of 100,000 requests takes 10 MB. Decoded, a line is many times larger.
LINE_MOST = 32 * 2**20
# A packed file may unpack to this many bytes, or this many times its size. Kept runs unpack to 2 to 25 times.
_UNPACKED_LEAST, _UNPACKED_TIMES = 256 * 2**20, 200
# Lists and objects of a file, each at least 60 bytes of memory: this many, or this many for each byte on disk; a line
# may have as many as the first. Kept runs have 2 per packed byte; a round of 100,000 requests takes 600,000.
_NESTED_LEAST, _NESTED_TIMES = 2**21, 16
_LINK = "Name the file itself, or remove the link."
PACKED: dict[str, Callable[[Path], BufferedIOBase]] = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile}
# A file system without locks (some network ones) gives one of these: there the exclusive create must suffice.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@contextmanager
def disk_errors(path: Path, hint: str = "Choose another --out.") -> Iterator[None]:
    """Turn an error of the file system into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kept = "go on with --resume; what was written is kept" if path.suffix == ".jsonl" else "try again"
            raise UserError(f"the disk is full: {path}", f"Free some space and {kept}.") from error
        if error.errno == errno.ELOOP:
            raise UserError(f"{path} is a symbolic link", _LINK) from error
        raise UserError(f"can't write {path}: {error.strerror or error}", hint) from error


def check_free(path: Path, *, force: bool, hint: str = "Use --force to overwrite it, or another name.") -> None:
    """Refuse, as a `UserError`, to write to an existing file, and with `force` to a link, which is not followed."""
    if path.is_symlink() and (path.is_file() or not path.exists()):  # /dev/stdout is a link to a terminal or a pipe
        raise UserError(f"{path} is a symbolic link", _LINK)
    if path.exists() and not force:
        raise UserError(f"{path} exists", hint)


def check_outputs(options: Mapping[str, Any]) -> None:
    """Refuse, as a `UserError`, a file to write that the same command reads, or writes twice: --force would destroy it.
    Of a command's options those of `_OUTPUTS` are written; every other file, and the traces of a run, are read."""
    written: list[tuple[str, Path]] = []
    read: list[tuple[str, Path]] = []
    for name, value in options.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, str | Path) and str(one):
                (written if name in _OUTPUTS else read).append((f"--{name.replace('_', '-')}", Path(one)))
    for number, (option, path) in enumerate(written):
        for other, taken in (*read, *written[:number]):
            if any(_same_file(a, b) for a in _with_traces(path) for b in _with_traces(taken)):
                what = "reads" if (other, taken) in read else "writes as well"
                raise UserError(f"{option} {path} is a file that this command {what}", "Give the output another name.")
            if other == "--rollouts" and path.exists() and taken.resolve() in path.resolve().parents:
                raise UserError(f"{option} {path} is one of the rollouts", "Give the output another name.")


_OUTPUTS = frozenset({"out", "report", "junit", "summary", "repro"})


def traces_path(run: Path) -> Path:
    """The side file of a run: RUN.jsonl -> RUN.traces.jsonl; likewise with .gz or .xz at the end."""
    packed = run.suffix if run.suffix in PACKED else ""
    return run.with_name(run.name.removesuffix(packed).removesuffix(".jsonl") + ".traces.jsonl" + packed)


def _with_traces(path: Path) -> list[Path]:
    return [path, traces_path(path)] if ".jsonl" in path.name else [path]


def _same_file(a: Path, b: Path) -> bool:
    """Whether two paths are one file on disk, or will be; terminals and pipes are not compared."""
    try:
        return a.samefile(b) and a.is_file()
    except (OSError, ValueError):  # one does not exist, or is not a path at all
        return os.path.abspath(a) == os.path.abspath(b)


def no_link(name: str, flags: int, mode: int = 0o666) -> int:
    """An opener for `open` that follows no symbolic link and does not wait for a FIFO."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), mode)


def create_locked(path: Path, *, force: bool) -> IO[bytes]:
    """Create the file, or with `force` empty the existing one, holding its lock from before the first byte. A
    `UserError` if another process writes it, if it exists, is a link or a FIFO, or can't be written."""
    with disk_errors(path):
        try:
            number = no_link(str(path), os.O_RDWR | os.O_CREAT | (0 if force else os.O_EXCL))
        except FileExistsError:
            hint = "Use --resume to go on with it, --force to overwrite it, or another --out."
            raise UserError(f"{path} exists", hint) from None
        stream = os.fdopen(number, "r+b", buffering=0)
        mode = os.fstat(number).st_mode
        if stat.S_ISFIFO(mode):  # it may have no reader, and a write would wait
            stream.close()
            raise UserError(f"can't write {path}: it is not a regular file", "Choose another --out.")
        _lock(stream, path)
        if stat.S_ISREG(mode):
            stream.truncate(0)
    return stream


def _lock(stream: IO[bytes], path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        hint = "Wait until it has ended, or choose another --out."
        raise UserError(f"another nondet is writing {path}", hint) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            stream.close()
            raise UserError(f"can't lock {path}: {error.strerror or error}", "Choose another --out.") from error


@contextmanager
def replacing(path: Path, hint: str = "Choose another name.") -> Iterator[Path]:
    """Yield a new file in the folder of `path`, renamed to `path` at the end of the block. A full disk, a kill or an
    exception leaves the old file whole. A `UserError` for a full disk, a link, or what can't be written."""
    with disk_errors(path, hint):
        check_free(path, force=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            mask = os.umask(0)
            os.umask(mask)
            mode = 0o666 & ~mask
        number, name = tempfile.mkstemp(prefix=".nondet-", suffix=path.suffix, dir=path.parent)
        os.close(number)
        try:
            yield Path(name)
            os.chmod(name, mode)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def replace_text(path: Path, text: str) -> None:
    """Write a text whole or not at all, and raise, as `replacing`; a terminal, pipe or device is written directly."""
    with disk_errors(path):
        special = path.exists() and not path.is_file()
    if special:  # /dev/stdout: nothing to keep, nothing to rename
        append_text(path, text)
        return
    with replacing(path, "Choose another name for the report.") as scratch:
        scratch.write_bytes(text.encode("utf-8", "backslashreplace"))


def append_text(path: Path, text: str) -> None:
    """Append to a file, new or not, without waiting for a FIFO; a `UserError` if that fails, or for a broken link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
    with disk_errors(path, "Choose another file."):
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a symbolic link to nothing", _LINK)
        with open(os.open(path, flags, 0o666), "wb") as stream:
            if hasattr(os, "O_NONBLOCK"):
                os.set_blocking(stream.fileno(), True)
            stream.write(text.encode("utf-8", "backslashreplace"))


def read_whole(path: Path, most: int) -> bytes:
    """A regular file of at most `most` bytes; a `FileNotFoundError` or `UserError` where it is not one."""
    regular(path)
    with path.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path} is larger than {most >> 20} MiB", "Is it the file that was meant?")
    return data


def regular(path: Path) -> None:
    """Refuse what is not a file, for example a FIFO, as a `UserError`; a missing one is a `FileNotFoundError`."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise UserError(f"can't read {path}: {error.strerror or error}", "Give a readable file.") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise UserError(f"can't read {path}: it is {what}", "Give a file.")


def lines_of(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(number from 1, line without its end, whether it had one) of a regular file, in bounded memory. A name that ends
    in .gz or .xz is unpacked. Raises FileNotFoundError, or UserError: it is not a file, can't be read, has a line
    beyond `LINE_MOST`, or unpacks to more than a run would, in bytes or in lists and objects."""
    regular(path)
    number = read = nested = 0
    try:
        size = path.stat().st_size
        most, nested_most = max(_UNPACKED_LEAST, _UNPACKED_TIMES * size), max(_NESTED_LEAST, _NESTED_TIMES * size)
        if path.suffix == ".xz":  # `lzma` silently ignores what follows its end
            with path.open("rb") as stream:
                stream.seek(max(0, size - 2))
                if stream.read() != b"YZ":
                    raise lzma.LZMAError("its end is none of an .xz")
        with PACKED[path.suffix](path) if path.suffix in PACKED else path.open("rb") as stream:
            while line := stream.readline(LINE_MOST + 1):
                number, read = number + 1, read + len(line)
                if read > most and path.suffix in PACKED:
                    raise UserError(f"{path} unpacks to more than {most >> 20} MiB", "No run file is packed that far.")
                if len(line) > LINE_MOST:
                    what = f"{path} has a line of more than {LINE_MOST >> 20} MiB, line {number}"
                    raise UserError(what, "Is it a run file? No line of one is that long.")
                here = line.count(b"[") + line.count(b"{")
                nested += here
                if here > _NESTED_LEAST or nested > nested_most:
                    what = f"{path} has {nested:,} lists and objects by line {number}"
                    raise UserError(what, "No run file has so many.")
                whole = line.endswith(b"\n")
                yield number, line[:-1] if whole else line, whole
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"can't unpack {path}: {one_line(str(error), 80)}", "Give a whole packed file.") from error
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}", "Give a readable run file.") from error


_EDITED = "Is it a run file that was edited by hand?"
_ENCODER = msgspec.json.Encoder()
# How every header of ours begins: a cut-off first line is recognized by it.
_MAGIC = b'{"type":"header","format":"' + FORMAT.encode() + b'"'


def decode(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:
    """Decode one line; a `ValueError` gives the reason: not JSON or UTF-8, nested too deeply, wrong types."""
    try:
        return decoder.decode(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from error
    except msgspec.ValidationError as error:
        why, _, field = str(error).partition(" - at `$")
        raise ValueError(f"{field[1:-1]}: {why}{_value_at(line, field[1:-1])}" if field else why) from error
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def _value_at(line: bytes, field: str) -> str:
    """The value of a field that msgspec names, "served.done" or "labels[1]", for a message; "" where it is unknown."""
    try:
        value = msgspec.json.decode(line)
        for name in re.findall(r"\w+", field):
            value = value[int(name) if isinstance(value, list) else name]
    except (msgspec.MsgspecError, RecursionError, LookupError, ValueError, TypeError):
        return ""
    return f", not {one_line(repr(value), 60)}"


def encoded(record: msgspec.Struct, decoder: msgspec.json.Decoder[Any] = LINE) -> tuple[bytes, Any]:
    """(a record's line with its end, the record that a reader gets); a `ValueError` if a reader rejects it."""
    try:
        line = _ENCODER.encode(record) + b"\n"
    except (UnicodeError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if len(line) > LINE_MOST:
        raise ValueError(f"a line of {len(line):,} bytes, where readers take {LINE_MOST:,}")
    return line, decode(decoder, line)


def _torn(line: bytes, whole: bool) -> bool:
    """Whether a first line without an end is the beginning of a header of ours."""
    return not whole and (line.startswith(_MAGIC) or _MAGIC.startswith(line))


def read_run(path: Path, *, allow_truncated: bool = False) -> Run:
    """Read a run file, and check that it does not contradict itself. Raises UserError: missing, empty, not a run file,
    of another schema, cut off, malformed or contradicting itself; the line and the field are named. With
    `allow_truncated` a last line that is cut off (a killed run) is ignored."""
    lines = lines_of(path)
    run = Run(header=_header(path, lines), complete=False, source=str(path))
    checks, number = RunChecks(run.header), 1
    try:
        checks.header(run.header)
        for number, line, whole in lines:
            if not whole:
                if allow_truncated:
                    break
                hint = "Repeat its command with --resume, or read what is whole with --allow-truncated."
                raise UserError(f"{path} is cut off in line {number}: the run was killed while writing", hint)
            record = decode(LINE, line)
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
    except ValueError as error:
        raise UserError(f"{path} is malformed in line {number}: {one_line(str(error), 300)}", _EDITED) from error
    if not any(row.place is msgspec.UNSET for row in run.rows):
        run.rows.sort(key=attrgetter("place"))  # processes that share a plan finish its rows in any order
    return run


def _header(path: Path, lines: Iterator[tuple[int, bytes, bool]]) -> Header:
    hint = "Give a file that `nondet probe`, `sample`, `bench` or `certify` wrote."
    foreign = UserError(f"{path} is not a nondet run file", hint)
    try:
        _, line, whole = next(lines, (0, b"", True))
    except FileNotFoundError:
        raise UserError(f"no run file at {path}", hint) from None
    if not line.strip():
        if any(text.strip() for _, text, _ in itertools.islice(lines, 10_000)):
            raise foreign
        raise UserError(f"{path} is empty", "Its run never started: repeat its command with --resume.")
    if _torn(line, whole):
        what = f"{path} is cut off in line 1: the run was killed while it began"
        raise UserError(what, "Repeat its command with --resume.")
    raw: Any = None
    with suppress(ValueError):
        raw = decode(msgspec.json.Decoder(), line)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise foreign
    schema = raw.get("schema")
    if schema != SCHEMA_VERSION:
        older = isinstance(schema, int) and schema < SCHEMA_VERSION
        what = f"{path} has schema {str(schema)[:40]}, and this nondet reads {SCHEMA_VERSION}"
        raise UserError(what, "It is from before 0.3.0: read it with nondet 0.3.0." if older else "Upgrade nondet.")
    try:
        header: Header = decode(msgspec.json.Decoder(Header), line)
    except ValueError as error:
        raise UserError(f"{path} is malformed in line 1: {one_line(str(error), 300)}", _EDITED) from error
    return header


AnyRecord = TypeVar("AnyRecord", bound=Record)
_PROMPTS_MOST = 16 * 2**20  # bytes of all prompts in a header; beyond, each is cut
_CUTS = (1000, 200, 0)  # characters that are left of each, the most that fits


class RunWriter:
    """Appends records to a run file, one line each, holding the file's lock until it is closed."""

    def __init__(self, path: Path, stream: IO[bytes], header: Header, run: Run | None = None) -> None:
        self.path, self.resumed = path, run is not None
        self.done: set[tuple[str, ...]] = set()  # keys of the records in the file
        self._stream, self._started = stream, time.perf_counter()
        self._checks = RunChecks(header)
        for record in run.records() if run is not None else ():
            self._checks.record(record)
            self.done.add(record.key)
        if run is None:
            self._bytes(encoded(header)[0])

    def write(self, record: AnyRecord) -> AnyRecord:
        """Append one record, and return what was written: a record that a reader would reject is written as a failure.
        Raises UserError: the disk is full or the file can't be written; UnrecordableError: a reader would reject even
        the failure."""
        try:
            line = self._checked(record)
        except ValueError as error:
            why = one_line(str(error), 300)
            record = record.refused(f"it can't be recorded: {why}")
            try:
                line = self._checked(record)
            except ValueError:
                what = f"{self.path}: a record ({one_line(' '.join(record.key), 100)}) that no reader would take: {why}"
                hint = "What was written before it is whole; report this, with the command."
                raise UnrecordableError(what, hint) from None
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
        line, read = encoded(record)
        self._checks.record(read)
        return line

    def _bytes(self, data: bytes) -> None:
        with disk_errors(self.path):
            while data:  # an unbuffered write may be partial: the next one then raises the reason
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
    """Open a run file for writing, and lock it; its folder is made if it is missing. `plan`, which must be JSON-able,
    decides the records. With `resume` an existing file is continued if its plan and everything that changes bits are
    the same. A `UserError` if the plan is too large, or the file can't be created, resumed, locked or written."""
    try:
        header = Header(
            format=FORMAT, schema=SCHEMA_VERSION, command=command, plan=_bounded(plan), environment=environment,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        header = encoded(header)[1]  # the header as it is read back, for comparing
        RunChecks(header).header(header)
    except ValueError as error:
        raise UserError(f"no run file can hold this plan: {one_line(str(error), 200)}", "Give less of it.") from None
    if resume and path.exists():
        return _resume(path, header)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return RunWriter(path, create_locked(path, force=force), header)


def is_run(path: Path) -> bool:
    """Whether a file begins like a run: other files may be in its folder."""
    return path.is_file() and FORMAT.encode() in next(lines_of(path), (0, b"", True))[1]


def begun(path: Path) -> bool:
    """Whether there is a run file at `path` whose header is whole, so that it can be resumed."""
    try:
        _, line, whole = next(lines_of(path))
    except (FileNotFoundError, StopIteration):
        return False
    return bool(line.strip()) and not _torn(line, whole)


def _bounded(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan as a header has it: prompts are cut if all of them would be too long for one line; no path of a server.
    A plan that went through this function is unchanged; a plan of an older nondet becomes what this version writes."""
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


def _resume(path: Path, header: Header) -> RunWriter:
    """Lock a file and resume it. Its links, owner and mode stay: it is truncated and appended to in place."""
    regular(path)
    with disk_errors(path):
        stream = path.open("r+b", buffering=0)
    try:
        _lock(stream, path)
        run, whole, ended = None, 0, 0
        if begun(path):  # else empty, or killed within its first line: there is no record that could be lost
            run = read_run(path, allow_truncated=True)
            _check_same(path, run.header, header)
            for _, line, complete in lines_of(path):
                if complete:
                    ended, whole = whole, whole + len(line) + 1
        with disk_errors(path):
            stream.truncate(ended if run and run.complete else whole)  # without a torn line, or the line that ends it
            stream.seek(0, os.SEEK_END)
        return RunWriter(path, stream, run.header if run else header, run)
    except BaseException:
        stream.close()
        raise


def _check_same(path: Path, theirs: Header, ours: Header) -> None:
    """Refuse to mix records of two plans, machines or toolchains."""
    from nondet.core.environment import moved

    if theirs.command != ours.command:
        raise UserError(f"{path} was made by nondet {theirs.command}", "Choose another --out.")
    before, plan = _bounded(theirs.plan), ours.plan
    if before != plan:
        changed = sorted(k for k in before.keys() | plan.keys() if before.get(k) != plan.get(k))
        what = f"{path} was made with other options ({', '.join(changed)})"
        raise UserError(what, "Repeat its options, or choose another --out.")
    if differing := moved(theirs.environment, ours.environment):
        what = f"{path} was made on another machine or toolchain ({', '.join(differing)})"
        raise UserError(what, "Go on with it where it was begun, or choose another --out.")


def write_run(path: Path, run: Run, *, force: bool = False) -> None:
    """Write a run that was measured in memory, whole. Raises UserError as `open_run` and `RunWriter.write` do."""
    header = run.header
    writer = open_run(path, command=header.command, plan=header.plan, environment=header.environment, force=force)
    with closing(writer):
        for record in run.records():
            writer.write(record)
        writer.finish()
