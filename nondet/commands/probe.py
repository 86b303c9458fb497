"""`nondet probe`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from nondet.commands.common import (
    check_fail_on,
    check_reports,
    gate,
    pick_device,
    pick_out,
    progress_bar,
    say,
    set_threads,
    show,
    write_reports,
)
from nondet.errors import UnknownNameError, UserError
from nondet.registry import PROBES

__all__ = ["ProbeRequest", "run"]


@dataclass(frozen=True)
class ProbeRequest:
    """The command line of `nondet probe`, as typed."""

    names: list[str]
    impls: list[str] | None = None
    device: str = "auto"
    dtypes: list[str] | None = None
    m: int | None = None
    k: int | None = None
    n: int | None = None
    preset: str | None = None
    model: Path | None = None
    inputs: list[str] | None = None
    runs: int | None = None
    full: bool = False
    seed: int = 0
    threads: int | None = None
    out: Path | None = None
    force: bool = False
    resume: bool = False
    reports: list[Path] = field(default_factory=list)
    as_json: bool = False
    fail_on: str | None = None


def run(request: ProbeRequest) -> None:
    """Measure every case, streaming rows to the run file, then show them.

    Raises:
        UserError: bad input, found before anything is measured or written.
        typer.Exit: as `gate` says.
    """
    names = _probe_names(request.names)
    check_fail_on(request.fail_on)
    check_reports(request.reports, force=request.force)
    out = pick_out(request.out, f"probe-{'-'.join(request.names)}", force=request.force, resume=request.resume)
    sys.path.insert(0, "")  # a user's module:function is looked for where they stand, as with `python -m`

    from nondet.environment import collect
    from nondet.probes.base import Options
    from nondet.probes.presets import ModelSizes, preset, read_config
    from nondet.runfile import open_run, read_run
    from nondet.runner import plan_jobs, run_jobs

    device = pick_device(request.device)
    set_threads(request.threads)
    if request.preset is not None and request.model is not None:
        raise UserError("--preset and --model exclude each other", "Give one source of layer shapes.")
    sizes: ModelSizes | None = None
    if request.preset is not None:
        sizes = preset(request.preset)
    elif request.model is not None:
        sizes = read_config(request.model)
    impls = request.impls or ["stock", "invariant"]
    options = Options(
        device=device,
        dtypes=tuple(request.dtypes) if request.dtypes else None,
        m=request.m,
        k=request.k,
        n=request.n,
        layers=sizes.layers if sizes else (),
        config=sizes.config if sizes else {},
        inputs=tuple(request.inputs) if request.inputs else None,
        runs=request.runs,
        seed=request.seed,
        full=request.full,
    )
    jobs = plan_jobs(names, impls, options)
    plan = {
        "probes": names,
        "impls": impls,
        "device": device,
        "dtypes": request.dtypes,
        "sizes": {"m": request.m, "k": request.k, "n": request.n, "model": sizes.name if sizes else None},
        "inputs": request.inputs,
        "runs": request.runs,
        "full": request.full,
        "seed": request.seed,
    }
    writer = open_run(
        out, command="probe", plan=plan, environment=collect(request.seed), force=request.force, resume=request.resume
    )
    try:
        with progress_bar() as progress:
            task = progress.add_task("probing", total=len(jobs), completed=sum(job.key in writer.done for job in jobs))
            for row in run_jobs(jobs, request.seed, writer.done):
                writer.write(row)
                progress.update(task, advance=1, description=f"{row.probe} ({row.impl})")
        writer.finish()
    except KeyboardInterrupt:
        writer.close()
        say(f"nondet: stopped; {len(writer.done)} of {len(jobs)} rows are in {out}.")
        say(f"Repeat the command with --out {out} --resume.")
        raise
    finished = read_run(out)
    show(finished, out, as_json=request.as_json)
    say(f"run file: {out}")
    for path in write_reports(request.reports, [finished]):
        say(f"report: {path}")
    gate(finished, request.fail_on)


def _probe_names(asked: list[str]) -> list[str]:
    """The probes, each once, in the registry's order where "all" is among them."""
    for name in asked:
        if name != "all" and name not in PROBES:
            raise UnknownNameError("probe", name, [*PROBES, "all"])
    return list(PROBES) if "all" in asked else list(dict.fromkeys(asked))
