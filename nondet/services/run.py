"""The common part of services: the sink of their messages, the run file they write, device, threads and Ctrl-C.

A service measures: it takes a request (a dataclass, made from argv or from a Python call, whose fields are the
command's options), writes a run file, and returns its path. `nondet.commands` and `nondet.api` both call it.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from datetime import datetime
from inspect import get_annotations
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from nondet.errors import MisfitError, UserError
from nondet.services import options as o

if TYPE_CHECKING:
    from rich.progress import Progress

    from nondet.core.runfile import RunWriter
    from nondet.probes.models import ModelSizes


@dataclass(frozen=True, kw_only=True)
class Request:
    """The run file options of every measuring command. A request is checked when it is made, by its options' ranges and
    by its own `_check`, which raise `UserError`; the service checks only what needs a device, a model or a server."""

    given: frozenset[str] = frozenset()  # names of the fields that were given, their default or not
    out: o.OUT = None
    force: o.FORCE = False
    resume: o.RESUME = False

    def __post_init__(self) -> None:
        dtype = getattr(self, "dtype", None)
        if isinstance(dtype, str):
            object.__setattr__(self, "dtype", o.DTYPE_ALIASES.get(dtype, dtype))
        elif dtype is not None:
            object.__setattr__(self, "dtype", [o.DTYPE_ALIASES.get(name, name) for name in dtype])
        o.check_fields(self)
        self._check()
        if self.force and self.resume:
            raise UserError("--force and --resume exclude each other", "Overwrite the run, or go on with it.")
        if self.out is None and self.resume:
            raise UserError("--resume without --out", "Name the run file to go on with.")
        if self.out is not None and self.out.suffix != ".jsonl":
            what = f"--out {str(self.out)!r} is not a .jsonl file"
            raise UserError(what, "Run files end in .jsonl; for a report use --report.")

    def _check(self) -> None:
        """Refuse combinations of options of one command."""

    def refuse(self, names: Iterable[str], what: str, hint: str) -> None:
        """Refuse these options if they were given: `what` with the option's name in it."""
        for name in names:
            if name in self.given:
                raise UserError(what.format(f"--{name.replace('_', '-')}"), hint)


def options_of(part: type) -> list[Field[Any]]:
    """The fields of a dataclass that are options, its own before its bases': what is measured comes first in a help."""
    named = {field.name: field for field in fields(part) if field.name != "given"}
    order = dict.fromkeys(name for cls in part.__mro__ for name in get_annotations(cls))
    return [named[name] for name in order if name in named]


class Sink:
    """Receives a service's messages. This one discards them: a caller in Python has the run file."""

    shown = False  # whether this is a command, in a process of its own
    quiet = True

    def say(self, text: str) -> None:
        """A line of text, not part of the results."""

    def progress(self) -> Progress:
        """The progress of a run."""
        from rich.progress import Progress

        return Progress(disable=True)

    @contextmanager
    def steps(self) -> Iterator[Callable[[str], None]]:
        """As `say`, for the steps of a command, whose number is not known."""
        yield self.say

    def present(self, path: Path, notes: Iterable[str] = (), code: int = 0) -> None:
        """Show a finished run, after the lines `notes`; `code` is the exit code, unless --fail-on decides it."""


# Once a process: transformers' engine collects garbage twice a session, and over all that is loaded it takes 0.3 s.
_freeze = functools.cache(gc.freeze)


class Output:
    """The run file that a service writes; `path` is the requested one, or a new one named after `stem`."""

    def __init__(self, request: Request, stem: str, sink: Sink) -> None:
        self.request, self.sink = request, sink
        self.path = request.out or Path("runs") / f"{stem[:80]}-{datetime.now():%Y%m%d-%H%M%S-%f}.jsonl"
        self._files = [self.path]  # files that this run may delete

    def check_side_file(self) -> None:
        """Refuse to overwrite traces without their run, which may be elsewhere: only a resumed run continues. Raises
        UserError: they exist, and --force was not given."""
        from nondet.core.runfile import begun, check_free, traces_path

        self._files.append(side := traces_path(self.path))
        if not (self.request.resume and begun(self.path)):
            check_free(side, force=self.request.force, hint="Use --force to overwrite it, or another --out.")

    @contextmanager
    def recording(self, command: str, plan: dict[str, Any], seed: int, total: int | None = None) -> Iterator[RunWriter]:
        """The run file, open for the block; `total` records are a whole run, None where they can't be counted ahead.
        After Ctrl-C it prints what was done and how to continue. Where bad input ends it before anything was measured,
        the file is deleted: the command can be tried again. A `UserError` as of `nondet.core.runfile.open_run`."""
        from nondet.core.environment import collect
        from nondet.core.runfile import open_run

        if self.sink.shown:
            _freeze()
        force, resume, empty = self.request.force, self.request.resume, False
        writer = open_run(self.path, command=command, plan=plan, environment=collect(seed), force=force, resume=resume)
        try:
            with interruptible():
                yield writer
            writer.finish()
        except KeyboardInterrupt:
            kept = f"{len(writer.done)} of {total} records are" if total is not None else "what was finished is"
            self.sink.say(f"nondet: stopped; {kept} in {self.path}.")
            self.sink.say(f"Repeat the command with --out {self.path} --resume.")
            raise
        except UserError as error:
            empty = not writer.resumed and (not writer.done or isinstance(error, MisfitError))
            raise
        finally:
            writer.close()
            for path in self._files if empty else ():
                path.unlink(missing_ok=True)

    def present(self, notes: Iterable[str] = (), code: int = 0) -> Path:
        """Show the finished run; returns its path."""
        self.sink.present(self.path, notes, code)
        return self.path


def pick_device(wanted: str, threads: int | None = None) -> str:
    """The device, "auto" being CUDA where there is one; pins CPU threads, if requested: they change GEMM bits. Raises
    UserError: CUDA without a device."""
    import torch

    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    elif wanted == "cuda" and not torch.cuda.is_available():
        build = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no CUDA device"
        raise UserError(f"--device cuda: {build}", "Use --device cpu, or --device auto to take what there is.")
    if threads is not None:
        o.THREAD_COUNTS.check("--threads", threads)  # again: it may be a recorded run's
        torch.set_num_threads(threads)
    return wanted


def latest_run(say: Callable[[str], None], commands: Iterable[str] = ()) -> Path:
    """The newest run file in runs/, of one of these commands if any is named; its path is reported, because the user
    did not name it. Raises UserError: there is none."""
    from nondet.core.runfile import is_run, read_run

    files = [path for path in Path("runs").glob("*.jsonl") if ".traces." not in path.name and is_run(path)]
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if not commands or read_run(path, allow_truncated=True).header.command in commands:
            say(f"latest run: {path}")
            return path
    raise UserError(f"no run file of {' or '.join(commands) or 'any command'} in the folder runs", "Name a run file.")


def check_worlds(worlds: Sequence[int], device: str) -> None:
    """Refuse, as a `UserError`, numbers of ranks that this machine can't run."""
    import torch

    from nondet.ranks.group import check_ranks

    check_ranks(worlds, device, torch.cuda.device_count() if device == "cuda" else 0)


def model_sizes(preset: str | None, model: Path | None) -> ModelSizes | None:
    """Layer shapes of a preset or of a model's folder; None where neither was named. Raises UserError: both, or an
    invalid one."""
    from nondet.probes import models

    if preset is not None and model is not None:
        raise UserError("--preset and --model exclude each other", "Give one source of layer shapes.")
    return models.preset(preset) if preset is not None else models.read_config(model) if model is not None else None


def source_of(impl: str) -> str | None:
    """Digest of the file of a user's function; None for a builtin, or one made in memory."""
    import inspect

    from nondet.core.certificates import digest_of
    from nondet.core.registry import load_object

    try:
        path = inspect.getsourcefile(inspect.unwrap(load_object(impl)))
        return digest_of(Path(path or "").read_bytes())
    except (TypeError, OSError):
        return None


def user_sources(impls: Iterable[str]) -> dict[str, dict[str, str]]:
    """For a run's plan: {"sources": {a user's function: digest of its file}}, or {} where there is none. An edited
    function is a different one: its earlier run can't be continued. Each was loaded before, so every name is valid."""
    digests = {impl: source_of(impl) or "unknown" for impl in impls if ":" in impl}
    return {"sources": digests} if digests else {}


@contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C is a KeyboardInterrupt, the second ends the process; finished records are on disk."""
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
