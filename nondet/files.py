"""Files that survive: errors in one line, a lock, files that are replaced at once, no link followed, reads that end."""

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

__all__ = [
    "LINE_MOST",
    "append_text",
    "check_free",
    "create_locked",
    "disk_errors",
    "lines_of",
    "no_link",
    "open_locked",
    "read_whole",
    "regular",
    "replace_text",
    "replacing",
]

# No line that nondet writes comes near: a round of 100,000 requests takes 10 MB. Decoded, a line is many times larger.
LINE_MOST = 32 * 2**20
# What a packed file may unpack to: this much, or so many times its size. Runs that were kept have 2 to 25 times.
_UNPACKED_LEAST, _UNPACKED_TIMES = 256 * 2**20, 200
_LINK = "Name the file itself, or remove the link."
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
        if error.errno == errno.ELOOP:
            raise UserError(f"{path} is a symbolic link", _LINK) from error
        raise UserError(f"can't write {path}: {error.strerror or error}", hint) from error


def check_free(path: Path, *, force: bool, hint: str = "Use --force to overwrite it, or another name.") -> None:
    """Refuse a file to write, before any work is done, where something is there; even with `force` where it is a link.

    Raises:
        UserError: as said. What a link points to is somebody's: to overwrite it, it must be named.
    """
    if path.is_symlink() and (path.is_file() or not path.exists()):  # /dev/stdout is one to a terminal or a pipe
        raise UserError(f"{path} is a symbolic link", _LINK)
    if path.exists() and not force:
        raise UserError(f"{path} exists", hint)


def no_link(name: str, flags: int) -> int:
    """An opener for `open`: no symbolic link is followed, and no FIFO waited for."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)


def create_locked(path: Path, *, force: bool) -> IO[bytes]:
    """Create the file, or with `force` empty the one that is there, holding its lock from before the first byte.

    Raises:
        UserError: another process writes it; it exists (without force); it is a link or a FIFO; it can't be written.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    with disk_errors(path):
        try:
            number = no_link(str(path), flags if force else flags | os.O_EXCL)
        except FileExistsError:
            raise UserError(
                f"{path} exists", "Use --resume to go on with it, --force to overwrite it, or another --out."
            ) from None
        stream = os.fdopen(number, "r+b", buffering=0)
        mode = os.fstat(number).st_mode
        if stat.S_ISFIFO(mode):  # nobody may read it, and a write would wait
            stream.close()
            raise UserError(f"can't write {path}: it is not a regular file", "Choose another --out.")
        _lock(stream, path)
        if stat.S_ISREG(mode):
            stream.truncate(0)
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


@contextmanager
def replacing(path: Path, hint: str = "Choose another name.") -> Iterator[Path]:
    """A new file beside `path` to write in the block, under a name that nobody knows; renamed to `path` at its end.

    A full disk, a kill or an exception leaves the old file whole and no scrap. No link is followed.

    Raises:
        UserError: the disk is full, or the path is a link or can't be written.
    """
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
    """Write a text whole, or not at all; see `replacing`. Into a terminal, a pipe or a device it is just written.

    Raises:
        UserError: the disk is full, or the path is a link or can't be written.
    """
    with disk_errors(path):
        special = path.exists() and not path.is_file()
    if special:  # /dev/stdout: nothing to keep, nothing to rename
        append_text(path, text)
        return
    with replacing(path, "Choose another name for the report.") as scratch:
        scratch.write_bytes(text.encode("utf-8", "backslashreplace"))


def append_text(path: Path, text: str) -> None:
    """Append to a file that may be there; nobody is waited for where it is a FIFO.

    Raises:
        UserError: it can't be written, or is a link to nothing.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
    with disk_errors(path, "Choose another file."):
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a symbolic link to nothing", _LINK)
        with open(os.open(path, flags, 0o666), "wb") as stream:
            if hasattr(os, "O_NONBLOCK"):
                os.set_blocking(stream.fileno(), True)
            stream.write(text.encode("utf-8", "backslashreplace"))


def read_whole(path: Path, most: int) -> bytes:
    """A regular file of at most `most` bytes.

    Raises:
        FileNotFoundError: it isn't there.
        UserError: it is no file, can't be looked at, or is larger.
    """
    regular(path)
    with path.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path} is larger than {most >> 20} MiB", "Is it the file that was meant?")
    return data


def regular(path: Path) -> None:
    """Refuse what is no file: a FIFO would be waited for, a device never ends.

    Raises:
        FileNotFoundError: it isn't there.
        UserError: it is none, or it can't be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}", "Give a readable file.") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise UserError(f"can't read {path}: it is {what}", "Give a file.")


def lines_of(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(number from 1, line without its end, whether it had one) of a regular file, in bounded memory.

    A name that ends in .gz is unpacked on the way: a kept run of 1,000 completions is a tenth as large so.

    Raises:
        FileNotFoundError: it isn't there.
        UserError: it is no file, can't be read, has a line beyond `LINE_MOST`, or unpacks to more than a run would.
    """
    regular(path)
    number = read = 0
    try:
        most = max(_UNPACKED_LEAST, _UNPACKED_TIMES * path.stat().st_size)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            while line := stream.readline(LINE_MOST + 1):
                number, read = number + 1, read + len(line)
                if read > most and path.suffix == ".gz":
                    raise UserError(f"{path} unpacks to more than {most >> 20} MiB", "No run file is packed that far.")
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
