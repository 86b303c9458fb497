"""Files that survive: errors in one line, a lock, a page that is replaced at once, reads that end."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from nondet.errors import UserError
from nondet.text import one_line

try:
    import fcntl
except ImportError:  # Windows has none: there only the exclusive create keeps two writers apart
    fcntl = None  # type: ignore[assignment] # told apart where it is used

__all__ = ["LINE_MOST", "create_locked", "disk_errors", "lines_of", "open_locked", "replace_text"]

# No line that nondet writes comes near: a round of 100,000 requests takes 10 MB. Decoded, a line is many times larger.
LINE_MOST = 32 * 2**20
# A file system without locks (some network ones) says one of these: the exclusive create must do there.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@contextmanager
def disk_errors(path: Path, hint: str = "Choose another --out.") -> Iterator[None]:
    """Turn what the file system says into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk is full: {path}", "Free some space and go on with --resume; what was written is kept."
            ) from error
        raise UserError(f"can't write {path}: {error.strerror or error}", hint) from error


def create_locked(path: Path, *, force: bool) -> IO[bytes]:
    """Create the file, or with `force` empty the one that is there, holding its lock from before the first byte.

    Raises:
        UserError: another process writes it; it exists (without force); it can't be written.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    try:
        with disk_errors(path):
            try:
                # without force nobody else's file is opened, and no symbolic link is followed
                number = os.open(path, flags if force else flags | os.O_EXCL, 0o666)
            except FileExistsError:
                raise UserError(
                    f"{path} exists", "Use --resume to go on with it, --force to overwrite it, or another --out."
                ) from None
            stream = os.fdopen(number, "r+b", buffering=0)
            _lock(stream, path)
            if stat.S_ISREG(os.fstat(number).st_mode):
                stream.truncate(0)
    except UserError:
        raise
    return stream


def open_locked(path: Path) -> IO[bytes]:
    """Open an existing file to read and to append, holding its lock. Links, owner and mode stay as they are.

    Raises:
        UserError: another process writes it, or it can't be opened.
    """
    regular(path)
    with disk_errors(path):
        stream = os.fdopen(os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0)), "r+b", buffering=0)
    _lock(stream, path)
    return stream


def _lock(stream: IO[bytes], path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise UserError(
            f"another nondet is writing {path}", "Wait until it has ended, or choose another --out."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            stream.close()
            raise UserError(f"can't lock {path}: {error.strerror or error}", "Choose another --out.") from error


def replace_text(path: Path, text: str) -> None:
    """Write beside the file and rename: a full disk or a kill leaves the old one whole. A link's target is replaced.

    Raises:
        UserError: the disk is full or the path can't be written.
    """
    data = text.encode("utf-8", "backslashreplace")
    with disk_errors(path, "Choose another name for the report."):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))
        try:
            mode: int | None = stat.S_IMODE(target.stat().st_mode)
        except FileNotFoundError:
            mode = None
        if target.exists() and not target.is_file():  # /dev/stdout, a FIFO: nothing to keep, nothing to rename
            target.write_bytes(data)
            return
        number, name = tempfile.mkstemp(prefix=".nondet-", suffix=".tmp", dir=target.parent)
        try:
            with os.fdopen(number, "wb") as stream:
                stream.write(data)
            if mode is None:
                mask = os.umask(0)
                os.umask(mask)
                mode = 0o666 & ~mask
            os.chmod(name, mode)
            os.replace(name, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def regular(path: Path) -> None:
    """Refuse what is no file: a FIFO would be waited for, a device never ends.

    Raises:
        UserError: it is none, or it can't be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}", "Give a readable run file.") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise UserError(f"can't read {path}: it is {what}", "Give a file.")


def lines_of(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(number from 1, line without its end, whether it had one) of a regular file, in bounded memory.

    A name that ends in .gz is unpacked on the way: a kept run of 1,000 completions is a tenth as large so.

    Raises:
        FileNotFoundError: it isn't there.
        UserError: it is no file, can't be read, or has a line beyond `LINE_MOST`.
    """
    regular(path)
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            while line := stream.readline(LINE_MOST + 1):
                number += 1
                if len(line) > LINE_MOST:
                    raise UserError(
                        f"{path} has a line of more than {LINE_MOST >> 20} MiB, line {number}",
                        "Is it a run file? No line of one is that long.",
                    )
                whole = line.endswith(b"\n")
                yield number, line[:-1] if whole else line, whole
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"can't unpack {path}: {one_line(str(error), 80)}", "Give a whole gzip file.") from error
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}", "Give a readable run file.") from error
