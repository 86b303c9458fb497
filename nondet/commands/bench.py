"""`nondet bench`."""

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
from nondet.result import Cell, Record

__all__ = ["BenchRequest", "run"]


@dataclass(frozen=True)
class BenchRequest:
    """The command line of `nondet bench`, as typed."""

    names: list[str]
    impls: list[str] | None = None
    device: str = "auto"
    dtypes: list[str] | None = None
    m: list[str] = field(default_factory=list)
    k: int | None = None
    n: int | None = None
    jigsaw: bool = False
    seed: int = 0
    threads: int | None = None
    out: Path | None = None
    force: bool = False
    resume: bool = False
    reports: list[Path] = field(default_factory=list)
    as_json: bool = False
    fail_on: str | None = None


def run(request: BenchRequest) -> None:
    """Time every cell, streaming records to the run file, then show them.

    Raises:
        UserError: bad input, found before anything is measured or written.
        typer.Exit: as `gate` says.
    """
    check_fail_on(request.fail_on)
    check_reports(request.reports, force=request.force)
    out = pick_out(request.out, f"bench-{'-'.join(request.names)}", force=request.force, resume=request.resume)
    sys.path.insert(0, "")  # a user's module:function is looked for where they stand, as with `python -m`

    import torch

    from nondet.bench.cases import Sizes, parse_sizes, plan_cases
    from nondet.bench.collect import collect, implementations_of, planned_keys
    from nondet.bench.rivals import found_rivals
    from nondet.bench.timing import stopwatch_for
    from nondet.environment import collect as collect_environment
    from nondet.errors import UserError
    from nondet.runfile import open_run, read_run

    device = pick_device(request.device)
    set_threads(torch.get_num_threads() if request.threads is None else request.threads)
    sizes = Sizes(m=parse_sizes("m", request.m), k=request.k, n=request.n, jigsaw=request.jigsaw)
    cases = plan_cases(request.names, sizes, device, tuple(request.dtypes) if request.dtypes else None)
    found = found_rivals()
    asked = request.impls or ["stock", "invariant", *found]
    impls = {
        operator: implementations_of(operator, asked, device, list(found))
        for operator in dict.fromkeys(case.operator for case in cases)
    }
    cases = [case for case in cases if impls[case.operator]]
    if not cases:
        raise UserError(
            f"nothing to time: no operator asked for has --impl {','.join(asked)} on {device}", "See `nondet list`."
        )
    plan = {
        "operators": request.names,
        "impls": asked,
        "rivals": found,
        "device": device,
        "dtypes": request.dtypes,
        "sizes": {"m": request.m, "k": request.k, "n": request.n, "jigsaw": request.jigsaw},
        "seed": request.seed,
    }
    say(f"rivals found: {', '.join(f'{name} {version}' for name, version in found.items()) or 'none'}")
    earlier = read_run(out, allow_truncated=True) if request.resume and out.exists() else None
    environment = collect_environment(request.seed)
    writer = open_run(
        out, command="bench", plan=plan, environment=environment, force=request.force, resume=request.resume
    )
    keys = planned_keys(cases, impls, device)
    try:
        with progress_bar() as progress, torch.no_grad():
            task = progress.add_task("timing", total=len(keys), completed=sum(key in writer.done for key in keys))
            for record in collect(cases, impls, device, request.seed, stopwatch_for(device), earlier):
                writer.write(record)
                progress.update(task, advance=1, description=_name(record))
        writer.finish()
    except KeyboardInterrupt:
        writer.close()
        say(f"nondet: stopped; {len(writer.done)} of {len(keys)} records are in {out}.")
        say(f"Repeat the command with --out {out} --resume.")
        raise
    finished = read_run(out)
    show(finished, out, as_json=request.as_json)
    say(f"run file: {out}")
    for path in write_reports(request.reports, [finished]):
        say(f"report: {path}")
    gate(finished, request.fail_on)


def _name(record: Record) -> str:
    """What the progress bar says was just done."""
    return f"{record.section} {record.group}" if isinstance(record, Cell) else record.key[1]
