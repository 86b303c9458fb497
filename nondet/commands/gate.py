"""`nondet gate`, of a model here or of a server."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nondet.commands.output import Terminal, command_of, drop_stdout, put, say
from nondet.services.gate import GateRequest, ask_endpoint

if TYPE_CHECKING:
    from nondet.core.records import Run
    from nondet.verdict.gate import Decision


def _gate(request: GateRequest, sink: Terminal) -> None:
    """Pass or fail a run in CI. Exit 3: divergence or a wrong result; 4: too few samples for the power asked."""
    from nondet.core.runfile import check_outputs, read_run
    from nondet.verdict.gate import decide
    from nondet.verdict.mismatch import Thresholds

    started = time.perf_counter()
    check_outputs({"run": request.run, "summary": os.environ.get("GITHUB_STEP_SUMMARY")})
    path = request.run or ask_endpoint(request, sink)
    if request.run is None and not sink.quiet:
        say(f"run file: {path}")
    run, (rate, confidence) = read_run(path), request.power
    asked = (request.rate, request.confidence, request.by) != (None, None, None)
    limits = Thresholds(request.mismatch_bits, request.k3, request.mult_prob_error)
    decision = decide(
        run, impls=request.impl or (), rate=rate, confidence=confidence, by=request.unit, asked=asked, limits=limits
    )
    _write(decision, run, request.junit, request.summary, time.perf_counter() - started)
    _print(decision, run, as_json=sink.as_json, quiet=sink.quiet)
    if decision.code:
        raise typer.Exit(decision.code)


gate = command_of(_gate, without=("report", "fail_on", "verbose"))


def _write(decision: Decision, run: Run, junit: Path | None, summary: Path | None, seconds: float) -> None:
    """JUnit XML and the step summary."""
    from nondet.core.runfile import append_text, replace_text
    from nondet.reports import gate as gate_text

    if junit is not None:
        replace_text(junit, gate_text.junit(decision, run, seconds))
    target = summary or (Path(named) if (named := os.environ.get("GITHUB_STEP_SUMMARY")) else None)
    if target is not None:
        append_text(target, gate_text.summary(decision, run))


def _print(decision: Decision, run: Run, *, as_json: bool, quiet: bool) -> None:
    from nondet.reports import gate as gate_text

    lines = [gate_text.as_json(decision)] if as_json else gate_text.text(decision, run)
    try:
        put(lines[-1:] if quiet else lines, as_json=as_json)
    except BrokenPipeError:
        drop_stdout()
    except OSError as error:
        drop_stdout()
        say(f"nondet: can't write to stdout: {error.strerror or error}")
