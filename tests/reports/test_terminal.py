"""The terminal: it fits, it says what was found, and text of others can't act on it."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console

from nondet.core.records import Run, Status
from nondet.reports.terminal import LINES_MOST, render
from tests import build as hostile
from tests.build import cell, failed, h200_sweep, limits, row, run_of, sampled, timed


def printed(*runs: Run, colour: bool = False, width: int = 80, verbose: bool = True) -> str:
    stream = io.StringIO()
    system = "truecolor" if colour else None
    console = Console(file=stream, width=width, force_terminal=colour, color_system=system)
    render(list(runs), console, verbose=verbose)
    return stream.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def hostile_runs(folder: Path) -> list[Run]:
    """A sample, a probe and a bench whose texts and names come from somebody who means harm."""
    nasty = "".join(hostile.PIECES)
    run = sampled(folder, impls=("stock",), variants=hostile.parts, pieces=hostile.PIECES, prompt=nasty, n=20)
    named = {"impl": hostile.NAME, "case": nasty, "values": [nasty, "b"], "extra": {nasty: nasty}}
    probe = run_of(row([0, 1], kernels=[[nasty], ["k"]], **named), failed(reason=nasty, case="f"))
    probe.header.environment.update({"cpu": nasty, nasty: nasty})
    lost = timed("x" + nasty, 0.0, status=Status.ERROR, reason=nasty, samples_us=[])
    times = timed("stock", 2.0, kernels=[nasty]), timed(hostile.NAME, 1.0, kernels=[nasty], ran=[nasty]), lost
    named = {"section": nasty, "group": nasty, "method": nasty}
    cells = [cell(m, *times, case=nasty + str(m), **named) for m in (1, 2, 3, 4, 5)]
    return [run, probe, run_of(cells=cells, limits=limits())]


def test_hostile_text_does_nothing(tmp_path: Path) -> None:
    text = printed(*hostile_runs(tmp_path), colour=True)
    without_colours = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028]", without_colours)
    # rich opens no link (OSC 8) and prints "[bold red]" as it is
    assert "[bold red]rich[/bold red]" in flat(without_colours)
    assert "␛[31mred" in flat(without_colours)
    assert not re.search("\x1b\\[31mred", text)


def test_by_default_it_fits_a_screen_and_the_verdict_is_last(tmp_path: Path) -> None:
    crowd = run_of(*(row([0, 1], probe=f"p{i}", case=f"case {i}") for i in range(60)), failed(case="x"))
    for runs in ([crowd], [sampled(tmp_path, failures=1)], [crowd] * 12, [run_of()]):
        text = printed(*runs, verbose=False).rstrip("\n")
        assert len(text.splitlines()) <= LINES_MOST
        assert max(cell_len(line) for line in text.splitlines()) <= 80
    text = printed(run_of(*h200_sweep()), verbose=False)
    verdict = "stock: batch-dependent in 1 of 1 case (linear); invariant: no divergence observed in 208 trials"
    assert flat(text).count(verdict) == 1
    assert flat(text).rpartition("next: ")[2].startswith("nondet sample shows whether completions change")
    assert verdict in flat(text).rpartition("next: ")[2]
    stream = io.StringIO()
    render([run_of(*h200_sweep())], Console(file=stream, width=80), quiet=True)
    assert flat(stream.getvalue()).startswith(verdict)
