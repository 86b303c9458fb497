"""`nondet gate`, of a model here or of a server."""

from __future__ import annotations

import os
import time
from pathlib import Path

import typer

from nondet.commands.output import Terminal, command_of, put, say, to_stdout
from nondet.services.gate import GateRequest, ask_endpoint
from nondet.services.run import latest_run


def _gate(request: GateRequest, sink: Terminal) -> None:
    """Pass or fail a run in CI. Exit 3: divergence or a wrong result; 4: too few samples to detect --rate."""
    from nondet.core.runfile import append_text, check_outputs, read_run, replace_text
    from nondet.reports import gate as gate_text
    from nondet.verdict.gate import decide

    started = time.perf_counter()
    path = request.run or (None if request.endpoint else latest_run(say))
    summary = request.summary or os.environ.get("GITHUB_STEP_SUMMARY")
    check_outputs({"run": path, "junit": request.junit, "summary": summary})
    if path is None:
        path = ask_endpoint(request, sink)
        say(f"run file: {path}", quiet=sink.quiet)
    run, (rate, confidence) = read_run(path), request.power
    given = (request.rate, request.confidence, request.by) != (None, None, None)
    limits = {"differ": request.mismatch_bits, "k3": request.k3, "mult_prob_error": request.mult_prob_error}
    decision = decide(
        run, impls=request.impl or (), rate=rate, confidence=confidence, by=request.unit, given=given, limits=limits
    )
    if request.junit is not None:
        replace_text(request.junit, gate_text.junit(decision, run, time.perf_counter() - started))
    if summary:
        append_text(Path(summary), gate_text.summary(decision, run))
    lines = [gate_text.as_json(decision)] if sink.as_json else gate_text.text(decision, run)
    if failed := to_stdout(lambda: put(lines[-1:] if sink.quiet else lines, as_json=sink.as_json)):
        say(f"nondet: {failed}")
    if decision.code:
        raise typer.Exit(decision.code)


gate = command_of(_gate, without=("report", "browse", "fail_on", "verbose"))
