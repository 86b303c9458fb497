"""What measuring commands share: device, threads, signals, where they write, and how they show, report and answer."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, cast

import typer
from rich.console import Console

from nondet.core.registry import REPORTERS
from nondet.core.runfile import check_free
from nondet.errors import UserError, no_commands, one_line, suggestion

if TYPE_CHECKING:
    from rich.progress import Progress

    from nondet.core.records import Run
    from nondet.core.runfile import RunWriter

# Threads beyond this are a typing error: each is a thread of the system, and torch makes them all at once.
_THREADS_MOST = 1024
# Characters that JSON leaves as they are and that a terminal acts on (C1 controls, overrides, invisible
# separators), or a CI's runner (##[).
_UNSAFE = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|(?<=#)#(?=\\[|vso\\[)")


def pick_device(asked: str) -> str:
    """ "auto" is CUDA where there is one.

    Raises:
        UserError: an unknown device, or CUDA without one.
    """
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked not in ("cpu", "cuda"):
        raise UserError(f"unknown device {asked!r}", suggestion(asked, ["auto", "cpu", "cuda"]))
    if asked == "cuda" and not torch.cuda.is_available():
        build = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no CUDA device"
        raise UserError(f"--device cuda: {build}", "Use --device cpu, or --device auto to take what there is.")
    return asked


def set_threads(threads: int | None) -> None:
    """Pin the CPU threads, if asked to: the thread count changes GEMM bits.

    Raises:
        UserError: not a positive number, or more threads than any machine has use for.
    """
    import torch

    if threads is None:
        return
    most = max(_THREADS_MOST // 4, min(_THREADS_MOST, 2 * (os.cpu_count() or 1)))
    if not 1 <= threads <= most:
        raise UserError(f"--threads {threads} makes no sense here", f"Give a number of CPU threads from 1 to {most}.")
    torch.set_num_threads(threads)


def check_fail_on(asked: str | None) -> None:
    """Refuse anything but "divergent".

    Raises:
        UserError: as said.
    """
    if asked not in (None, "divergent"):
        raise UserError(f"unknown --fail-on {asked!r}", "Known: divergent.")


def check_reports(paths: Iterable[Path], *, force: bool) -> None:
    """Refuse report paths that can't be written, before any work is done.

    Raises:
        UserError: an unknown suffix, or a file that exists without --force.
    """
    for path in paths:
        if path.suffix not in REPORTERS:
            known = ", ".join(s for s in REPORTERS if s.startswith("."))
            raise UserError(f"no report ends in {path.suffix!r} ({path})", f"Known: {known}.")
        check_free(path, force=force)


def write_reports(paths: Iterable[Path], runs: list[Run], *, full: bool = False) -> list[Path]:
    """Render and write each report; returns the paths written.

    Args:
        full: Markdown of all that GitHub takes, not of what somebody reads in a pull request.

    Raises:
        UserError: the disk is full or a path can't be written.
    """
    from nondet.core.registry import load_object
    from nondet.core.runfile import replace_text

    written = []
    for path in paths:
        render = load_object(REPORTERS[path.suffix][0])
        replace_text(path, render(runs, full=True) if full and path.suffix == ".md" else render(runs))
        written.append(path)
    return written


def user_sources(impls: Iterable[str]) -> dict[str, dict[str, str]]:
    """For a run's plan: {"sources": {a user's function: digest of its file}}, or {} where there is none.

    A function that was edited is another one: the run that it began is not gone on with.
    """
    import hashlib
    import inspect

    from nondet.core.registry import load_object

    digests = {}
    for impl in impls:
        if ":" in impl:  # loaded before, when the cases were planned: a name that no case takes was refused there
            try:
                path = inspect.getsourcefile(inspect.unwrap(load_object(impl)))
                digests[impl] = hashlib.sha256(Path(path or "").read_bytes()).hexdigest()[:16]
            except (TypeError, OSError):  # a builtin, or made in memory
                digests[impl] = "unknown"
    return {"sources": digests} if digests else {}


def progress_bar() -> Progress:
    """A bar on stderr, for people: quiet where stderr is no terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def say(text: str) -> None:
    """A line on stderr, beside the results: where files are, how to go on. Whatever a name holds, it is one line."""
    print(no_commands(one_line(text, 4000)), file=sys.stderr)  # noqa: T201 - this is the commands' voice


class _Log:
    """A stream as it is, but for `no_commands`: rich writes whole lines, wrapped, at once."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(no_commands(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PipedConsole(Console):
    """Stdout: a reader that went away is the caller's to see, and no line that was wrapped is a command to a CI."""

    def __init__(self) -> None:
        super().__init__(file=cast("IO[str]", _Log(sys.stdout)))

    def on_broken_pipe(self) -> None:
        """Leave it to the caller."""
        raise BrokenPipeError


def show(
    run: Run,
    out: Path,
    *,
    as_json: bool,
    render: Callable[[Run], None] | None = None,
    verbose: bool = False,
    quiet: bool = False,
) -> UserError | None:
    """Print the run on stdout.

    A reader that goes away (head, less) ends the printing, and nothing that follows it. Where stdout can't be written
    at all, the error is returned: what the caller still has to do comes first.
    """
    try:
        if as_json:
            with out.open(encoding="utf-8") as lines:
                for line in lines:
                    sys.stdout.write(_json_line(line, sys.stdout))
        elif render is not None:
            render(run)
        else:
            from nondet.reports.terminal import render as render_terminal

            render_terminal([run], PipedConsole(), verbose=verbose, quiet=quiet)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()
    except OSError as error:
        drop_stdout()
        return UserError(f"can't write to stdout: {error.strerror or error}", f"The run itself is in {out}.")
    return None


def put(lines: Iterable[str], *, as_json: bool = False) -> None:
    """Lines on stdout, safe to show there whatever they quote; of JSON the same JSON."""
    for line in lines:
        sys.stdout.write(_json_line(f"{line}\n", sys.stdout) if as_json else no_commands(f"{line}\n"))
    sys.stdout.flush()


def _json_line(line: str, stream: IO[str]) -> str:
    """The same JSON without a character that a terminal would act on, or that the stream can't encode."""
    safe = _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", line)
    if (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8":
        return safe
    escaped = (char if char.isascii() else char.encode("utf-16-be").hex() for char in safe)
    return "".join(c if len(c) == 1 else "".join(f"\\u{c[i : i + 4]}" for i in range(0, len(c), 4)) for c in escaped)


def drop_stdout() -> None:
    """Send what is still buffered nowhere: python flushes stdout again while it exits, and would complain."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def gate(run: Run, fail_on: str | None) -> None:
    """Answer --fail-on, if it was asked.

    Raises:
        typer.Exit: with 3 where something diverged or is wrong; with 1 where the question has no answer, since cases
            failed or nothing was compared: a gate must not open on that.
    """
    from nondet.verdict.gate import exit_code

    code, line = exit_code(run, fail_on)
    if line:
        say(f"nondet: {line}")
    if code:
        raise typer.Exit(code)


def quick_interrupt() -> Callable[[], None]:
    """Ctrl-C ends the process at once, with 130 and one line, until something is measured: see `interruptible`.

    Nothing is on disk yet that could be lost, and an exception in the middle of somebody's import comes out as
    anything. Returns what undoes it.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.signal(signal.SIGINT, _end_now)

    def undo() -> None:
        signal.signal(signal.SIGINT, before)

    return undo


@contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C is a KeyboardInterrupt, the second ends the process: what is done is on disk."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, _end_now)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is first:
            signal.signal(signal.SIGINT, before)


def _end_now(number: int, frame: FrameType | None) -> None:
    os.write(2, b"nondet: stopped\n")
    os._exit(130)


# Set while a command is called from Python: its run file is all that is wanted of it.
_UNSHOWN: ContextVar[bool] = ContextVar("unshown", default=False)


@contextmanager
def unshown() -> Iterator[None]:
    """Commands called here write their run files and print nothing of them (`nondet.probe` in Python)."""
    token = _UNSHOWN.set(True)
    try:
        yield
    finally:
        _UNSHOWN.reset(token)


def is_shown() -> bool:
    """Whether this is the command itself, in a process of its own, and not a call from Python."""
    return not _UNSHOWN.get()


@dataclass(frozen=True)
class Output:
    """The options --out, --force, --resume, --report, --json and --fail-on, checked before anything is measured.

    Attributes:
        path: The run file to write.
    """

    path: Path
    force: bool
    resume: bool
    reports: list[Path]
    as_json: bool
    fail_on: str | None
    verbose: bool = False
    quiet: bool = False

    @classmethod
    def of(
        cls,
        stem: str,
        *,
        out: Path | None,
        force: bool,
        resume: bool,
        reports: list[Path] | None,
        as_json: bool,
        fail_on: str | None,
        verbose: bool = False,
        quiet: bool = False,
    ) -> Output:
        """Check the options.

        Args:
            stem: What the file is called after where --out names none.

        Raises:
            UserError: an option that makes no sense, or a report that exists.
        """
        check_fail_on(fail_on)
        check_reports(reports or [], force=force)
        if verbose and quiet:
            raise UserError("--verbose and --quiet exclude each other", "Give one of them.")
        path = pick_out(out, stem, force=force, resume=resume)
        return cls(path, force, resume, reports or [], as_json, fail_on, verbose, quiet)

    def open(self, command: str, plan: dict[str, Any], seed: int) -> RunWriter:
        """Open the run file.

        Raises:
            UserError: as `nondet.core.runfile.open_run`.
        """
        from nondet.core.environment import collect
        from nondet.core.runfile import open_run

        return open_run(
            self.path, command=command, plan=plan, environment=collect(seed), force=self.force, resume=self.resume
        )

    @contextmanager
    def measuring(self, writer: RunWriter, total: int | None = None) -> Iterator[None]:
        """Ends the run file when the block does; after Ctrl-C says what there is and how to go on.

        Args:
            total: Records that a whole run has; None where they are not counted beforehand.
        """
        try:
            with interruptible():
                yield
            writer.finish()
        except KeyboardInterrupt:
            kept = f"{len(writer.done)} of {total} records are" if total is not None else "what was finished is"
            say(f"nondet: stopped; {kept} in {self.path}.")
            say(f"Repeat the command with --out {self.path} --resume.")
            raise
        finally:
            writer.close()

    def present(
        self,
        render: Callable[[Run], None] | None = None,
        notes: Callable[[Run], Iterable[str]] = lambda _: (),
    ) -> None:
        """Say where the finished run is, write the reports, show it on stdout, answer --fail-on.

        The verdict is the last thing on the screen. Reports are written first, so that a reader that goes away costs
        none of them.

        Args:
            render: Prints the run for people; None: the report for the terminal.
            notes: Lines to say before it.

        Raises:
            UserError: a report that can't be written, or stdout can't be.
            typer.Exit: as `gate` says.
        """
        from nondet.core.runfile import read_run

        if not is_shown():
            return
        run = read_run(self.path)
        written = write_reports(self.reports, [run])
        if not self.quiet:
            for line in notes(run):
                say(line)
            say(f"run file: {self.path}")
            for path in written:
                say(f"report: {path}")
        unshown = show(run, self.path, as_json=self.as_json, render=render, verbose=self.verbose, quiet=self.quiet)
        gate(run, self.fail_on)
        if unshown is not None:
            raise unshown


def pick_out(out: Path | None, stem: str, *, force: bool, resume: bool) -> Path:
    """The run file to write: the one asked for, or a new one under runs/ that no other run has.

    Raises:
        UserError: --resume without --out, both --force and --resume, or a suffix that is not .jsonl.
    """
    if force and resume:
        raise UserError("--force and --resume exclude each other", "Overwrite the run, or go on with it.")
    if out is None:
        if resume:
            raise UserError("--resume without --out", "Name the run file to go on with.")
        return Path("runs") / f"{stem[:80]}-{datetime.now():%Y%m%d-%H%M%S-%f}.jsonl"
    if out.suffix != ".jsonl":
        raise UserError(
            f"--out {str(out)!r} is not a .jsonl file", "Run files end in .jsonl; for a report use --report."
        )
    return out
