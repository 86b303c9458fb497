"""nondet in Python: load a run file or measure one, read its verdict, have its records as pandas frames.

    >>> run = nondet.load("runs/quickstart-sample.jsonl")
    >>> run.verdict()
    >>> run.frame("completions").groupby("impl")["trace"].nunique()
    >>> nondet.probe("softmax", dtype="float32").frame("rows")

What measures is in `nondet.measuring`. Importing either imports neither torch nor pandas: each is loaded by what needs
it.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nondet.core.records import Run
from nondet.core.runfile import read_run
from nondet.errors import one_line

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from nondet.verdict.findings import Verdict

__all__ = ["LoadedRun", "load"]


class LoadedRun:
    """A run file: what was asked, where, and what came of it.

    Attributes:
        records: The typed records, as the file has them (`nondet.core.records.Run`).
        path: Where it was read from.
    """

    def __init__(self, records: Run, path: Path) -> None:
        self.records, self.path = records, path

    @property
    def command(self) -> str:
        """The command that wrote it: probe, sample, bench, certify, ..."""
        return self.records.header.command

    @property
    def environment(self) -> dict[str, Any]:
        """Everything known to change bits or speed there: GPU or CPU, versions, switches, environment variables."""
        return self.records.header.environment

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return self.records.complete

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each implementation, as every report gives them."""
        from nondet.verdict.gate import judge

        return judge(self.records)

    def verdict(self) -> str:
        """The finding in one sentence: the first line of every report of this run."""
        from nondet.reports.content import headline

        return f"{headline(self.records, self.verdicts)}."

    def frame(self, kind: str | None = None) -> pd.DataFrame:
        """Records as a pandas frame.

        Args:
            kind: "rows", "classes", "completions", "rounds" or "cells"; None where the run holds one kind only.

        Raises:
            UnknownNameError: no such kind.
            UserError: no kind was named, and the run holds several.
        """
        from nondet.export.frames import frame, only_kind

        return frame([self.records], kind or only_kind([self.records]))

    def figure(self, name: str) -> Figure:
        """A matplotlib figure: class-map, speed, jigsaw, survival or tree.

        Raises:
            UnknownNameError: no such figure.
            UserError: the run holds nothing that it draws.
        """
        from nondet.export.figures import draw

        return draw(name, [self.records])

    def __repr__(self) -> str:
        state = "" if self.complete else ", incomplete"
        return f"<nondet run {one_line(str(self.path), 120)}: {self.command}{state}; {one_line(self.verdict(), 300)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the machine, and a line for each implementation."""
        from nondet.reports.text import environment_line

        lines = "".join(
            f"<tr><td>{html.escape(one_line(v.impl, 80))}</td><td>{html.escape(one_line(v.text, 1000))}</td></tr>"
            for v in self.verdicts
        )
        title = html.escape(one_line(f"nondet {self.command}: {self.path.name}", 200))
        machine = html.escape(environment_line(self.environment))
        return f"<p><b>{title}</b><br>{machine}</p><table>{lines}</table>"


def load(path: str | Path, *, allow_truncated: bool = False) -> LoadedRun:
    """Read a run file.

    Args:
        allow_truncated: Take the whole lines of a run that was killed while writing.

    Raises:
        UserError: missing, malformed, cut off or from a newer nondet; the message says which line.
    """
    path = Path(path)
    return LoadedRun(read_run(path, allow_truncated=allow_truncated), path)
