"""Where a measuring command writes, and what all of them do when they are through: show, say, report, answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nondet.commands.common import check_fail_on, check_reports, gate, interruptible, say, show, write_reports
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.core.records import Run
    from nondet.core.runfile import RunWriter

__all__ = ["Output", "is_shown", "pick_out", "unshown"]

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
