"""What services share: where they tell what they do, the run file they write, device, threads and Ctrl-C.

A service measures: it takes a request (a dataclass, made from argv or from a Python call, whose fields are the
command's options), writes a run file, and gives its path. `nondet.commands` and `nondet.api` both call it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from nondet.errors import UserError, suggestion
from nondet.services import options as o

if TYPE_CHECKING:
    from rich.progress import Progress

    from nondet.core.runfile import RunWriter
    from nondet.probes.models import ModelSizes

# Threads beyond this are a typing error: each is a thread of the system, and torch makes them all at once.
_THREADS_MOST = 1024


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every measuring command can be told about its run file. A field with an option is one of the command's.

    Attributes:
        given: Names of the fields that somebody gave, their default or not.
    """

    given: frozenset[str] = frozenset()
    out: o.OUT = None
    force: o.FORCE = False
    resume: o.RESUME = False


class Sink:
    """Where a service tells what it does. This one keeps silent: a caller in Python has the run file."""

    shown = False  # whether this is a command, in a process of its own
    quiet = True

    def say(self, text: str) -> None:
        """A line for people, beside the results."""

    def progress(self) -> Progress:
        """A bar for people."""
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        return progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not (self.shown and console.is_terminal),
            transient=True,
        )

    def present(self, path: Path, notes: Iterable[str] = (), code: int = 0) -> None:
        """Show a finished run.

        Args:
            notes: Lines to say before it.
            code: What the command exits with, where --fail-on does not say otherwise.
        """


@dataclass(frozen=True)
class Output:
    """The run file that a service writes.

    Attributes:
        path: The one asked for, or a new one.
    """

    path: Path
    force: bool
    resume: bool
    sink: Sink

    @classmethod
    def of(cls, request: Request, stem: str, sink: Sink) -> Output:
        """Check --out, --force and --resume, before anything is measured.

        Args:
            stem: What the file is called after where --out names none.

        Raises:
            UserError: --resume without --out, both --force and --resume, or a suffix that is not .jsonl.
        """
        if request.force and request.resume:
            raise UserError("--force and --resume exclude each other", "Overwrite the run, or go on with it.")
        if request.out is None and request.resume:
            raise UserError("--resume without --out", "Name the run file to go on with.")
        path = request.out or Path("runs") / f"{stem[:80]}-{datetime.now():%Y%m%d-%H%M%S-%f}.jsonl"
        if path.suffix != ".jsonl":
            what = f"--out {str(path)!r} is not a .jsonl file"
            raise UserError(what, "Run files end in .jsonl; for a report use --report.")
        return cls(path, request.force, request.resume, sink)

    def check_side_file(self) -> None:
        """The traces of a run that was moved away are somebody's data, too: only a run that is resumed may go on.

        Raises:
            UserError: they are there, and --force was not given.
        """
        from nondet.core.runfile import begun, check_free
        from nondet.core.traces import traces_path

        if not (self.resume and begun(self.path)):
            side = traces_path(self.path)
            check_free(side, force=self.force, hint="Use --force to overwrite it, or another --out.")

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
            self.sink.say(f"nondet: stopped; {kept} in {self.path}.")
            self.sink.say(f"Repeat the command with --out {self.path} --resume.")
            raise
        finally:
            writer.close()

    @contextmanager
    def unless_nothing(self, writer: RunWriter) -> Iterator[None]:
        """Delete the run file where an error ends it before anything was measured: the command can be tried again."""
        from nondet.core.traces import traces_path

        try:
            yield
        except UserError:
            if not writer.done and not writer.resumed:
                for path in (self.path, traces_path(self.path)):
                    path.unlink(missing_ok=True)
            raise

    def present(self, notes: Iterable[str] = (), code: int = 0) -> Path:
        """Show the finished run, and give its path."""
        self.sink.present(self.path, notes, code)
        return self.path


def pick_device(wanted: str) -> str:
    """ "auto" is CUDA where there is one.

    Raises:
        UserError: an unknown device, or CUDA without one.
    """
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted not in ("cpu", "cuda"):
        raise UserError(f"unknown device {wanted!r}", suggestion(wanted, ["auto", "cpu", "cuda"]))
    if wanted == "cuda" and not torch.cuda.is_available():
        build = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no CUDA device"
        raise UserError(f"--device cuda: {build}", "Use --device cpu, or --device auto to take what there is.")
    return wanted


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


def model_sizes(preset: str | None, model: Path | None) -> ModelSizes | None:
    """Layer shapes of a preset or of a model's folder; None where neither was named.

    Raises:
        UserError: both, or one that is none.
    """
    from nondet.probes import models

    if preset is not None and model is not None:
        raise UserError("--preset and --model exclude each other", "Give one source of layer shapes.")
    return models.preset(preset) if preset is not None else models.read_config(model) if model is not None else None


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


@contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C is a KeyboardInterrupt, the second ends the process: what is done is on disk."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, end_now)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is first:
            signal.signal(signal.SIGINT, before)


def end_now(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C by ending the process at once, with 130 and one line."""
    os.write(2, b"nondet: stopped\n")
    os._exit(130)
