"""What the measuring commands share: device, threads, output paths, progress, and what they say at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nondet.errors import UserError, suggestion
from nondet.registry import REPORTERS
from nondet.result import Run

__all__ = [
    "PipedConsole",
    "check_fail_on",
    "check_reports",
    "gate",
    "pick_device",
    "pick_out",
    "progress_bar",
    "say",
    "set_threads",
    "show",
    "write_reports",
]


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
        UserError: not a positive number.
    """
    import torch

    if threads is None:
        return
    if not 1 <= threads <= 4096:
        raise UserError(f"--threads {threads} makes no sense", "Give the number of CPU threads, 1 or more.")
    torch.set_num_threads(threads)


def check_fail_on(asked: str | None) -> None:
    """Refuse anything but "divergent".

    Raises:
        UserError: as said.
    """
    if asked not in (None, "divergent"):
        raise UserError(f"unknown --fail-on {asked!r}", "Known: divergent.")


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
        return Path("runs") / f"{stem}-{datetime.now():%Y%m%d-%H%M%S-%f}.jsonl"
    if out.suffix != ".jsonl":
        raise UserError(
            f"--out {str(out)!r} is not a .jsonl file", "Run files end in .jsonl; for a report use --report."
        )
    return out


def check_reports(paths: Iterable[Path], *, force: bool) -> None:
    """Refuse report paths that can't be written, before any work is done.

    Raises:
        UserError: an unknown suffix, or a file that exists without --force.
    """
    for path in paths:
        if path.suffix not in REPORTERS:
            known = ", ".join(s for s in REPORTERS if s.startswith("."))
            raise UserError(f"no report ends in {path.suffix!r} ({path})", f"Known: {known}.")
        if path.exists() and not force:
            raise UserError(f"{path} exists", "Use --force to overwrite it, or another name.")


def write_reports(paths: Iterable[Path], runs: list[Run]) -> list[Path]:
    """Render and write each report; returns the paths written.

    Raises:
        UserError: the disk is full or a path can't be written.
    """
    from nondet.registry import load_object
    from nondet.runfile import disk_errors

    written = []
    for path in paths:
        text = load_object(REPORTERS[path.suffix][0])(runs)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def progress_bar() -> Progress:
    """A bar on stderr, for people: quiet where stderr is no terminal."""
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
    """A line on stderr, beside the results: where files are, how to go on."""
    print(text, file=sys.stderr)  # noqa: T201 - this is the commands' voice


class PipedConsole(Console):
    """Rich's own console ends the process with 1 where the reader went away."""

    def on_broken_pipe(self) -> None:
        """Leave it to the caller."""
        raise BrokenPipeError


def show(run: Run, out: Path, *, as_json: bool) -> None:
    """Print the run on stdout. A reader that goes away (head, less) ends the printing, and nothing that follows it."""
    from nondet.reports.terminal import render

    try:
        if as_json:
            sys.stdout.write(out.read_text(encoding="utf-8"))
            sys.stdout.flush()
        else:
            render([run], PipedConsole())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # python flushes stdout again while it exits


def gate(run: Run, fail_on: str | None) -> None:
    """Answer --fail-on, if it was asked.

    Raises:
        typer.Exit: with 3 where something diverged or is wrong; with 1 where the question has no answer, since cases
            failed or nothing was compared: a gate must not open on that.
    """
    from nondet.verdict import exit_code

    code, line = exit_code(run, fail_on)
    if line:
        say(f"nondet: {line}")
    if code:
        raise typer.Exit(code)
