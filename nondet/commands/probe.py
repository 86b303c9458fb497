"""`nondet probe`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.commands import options as o
from nondet.commands.output import Output, is_shown, pick_device, progress_bar, say, set_threads, user_sources
from nondet.core.registry import OPERATOR_PROBES, PROBES
from nondet.errors import UnknownNameError, UserError

if TYPE_CHECKING:
    from nondet.probes.runner import Met

__all__ = ["probe"]

_RUNS_MOST = 1_000_000
_SLOW_ON_A_CPU = ("all-reduce",)  # nearly a minute of starting ranks, where all others take a quarter of one


def probe(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            help='Probes to run (see `nondet list`), or "all".',
            show_default=False,
            autocompletion=o.probes,
        ),
    ] = None,
    from_trace: Annotated[
        Path | None,
        typer.Option(
            "--from-trace",
            help="Run file of `nondet trace` or `diagnose`: asks its guilty operator's probe, at the shapes met.",
            show_default=False,
        ),
    ] = None,
    impl: o.IMPLS = None,
    device: o.DEVICE = "auto",
    dtype: o.DTYPES = None,
    m: o.LARGEST_M = None,
    k: o.K = None,
    n: o.N = None,
    preset: o.PRESET = None,
    model: o.MODEL_FOLDER = None,
    inputs: o.INPUTS = None,
    runs: Annotated[
        int | None, typer.Option("--runs", help="Repetitions of run-to-run cases.", show_default=False)
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", help='Numbers of ranks to start, for all-reduce: "2,4".', show_default=False),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="The long sweep (M up to 4096) instead of the default list.")
    ] = False,
    seed: o.SEED = 0,
    threads: o.THREADS = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            help="Processes that share the cases out among them, on one device. The rows are the same.",
            show_default="on CUDA one for two cores, up to 8, and 12 where nothing is proven yet; on a CPU 1",
            rich_help_panel=o.MACHINE,
        ),
    ] = None,
    out: o.OUT = None,
    force: o.FORCE = False,
    resume: o.RESUME = False,
    report: o.REPORT = None,
    as_json: o.JSON = False,
    fail_on: o.FAIL_ON = None,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Ask operators whether their bits depend on the batch: classes of equal bits, kernel names, ULP, error."""
    met = None
    if from_trace is not None:
        met = _met(names, from_trace, preset, model)
        names = [met.probe]
    if not names:
        raise UserError("no probe was named", "Name some (see `nondet list`), or give --from-trace RUN.")
    probes = _probe_names(names)
    output = Output.of(
        f"probe-{'-'.join(names)}",
        out=out, force=force, resume=resume, reports=report, as_json=as_json, fail_on=fail_on,
        verbose=verbose, quiet=quiet,
    )  # fmt: skip

    from nondet.core.processes import keep_freed_memory
    from nondet.probes.jobs import Crew, Order, SharedRun, check_workers, default_workers, workers_ahead

    check_workers(workers)
    if is_shown():
        keep_freed_memory()
    with Crew(workers_ahead(names, device, impl or [], workers)) as crew:
        import torch

        from nondet.probes.base import Options
        from nondet.probes.models import ModelSizes, read_config
        from nondet.probes.models import preset as preset_sizes
        from nondet.probes.runner import plan_jobs
        from nondet.ranks.group import check_ranks, parse_ranks

        target = pick_device(device)
        left_out = []
        if "all" in names and target == "cpu" and ranks is None:
            left_out = [name for name in _SLOW_ON_A_CPU if name not in names]
        if left_out:
            probes = [name for name in probes if name not in left_out]
            say(f"nondet: {', '.join(left_out)} is left out of all on a CPU: it starts processes; ask for it by name.")
        set_threads(threads)
        if preset is not None and model is not None:
            raise UserError("--preset and --model exclude each other", "Give one source of layer shapes.")
        sizes: ModelSizes | None = None
        if preset is not None:
            sizes = preset_sizes(preset)
        elif model is not None:
            sizes = read_config(model)
        impls = _as_operator(names, impl or ["stock", "invariant"])
        options = Options(
            device=target,
            dtypes=tuple(dtype) if dtype else None,
            m=m,
            k=k,
            n=n,
            layers=sizes.layers if sizes else (),
            config=sizes.config if sizes else {},
            inputs=tuple(inputs) if inputs else None,
            runs=runs,
            ranks=parse_ranks(ranks),
            seed=seed,
            full=full,
        )
        if met is not None:
            options = met.options(options)
        _check(options)
        if options.ranks is not None:  # before workers start
            check_ranks(options.ranks, target, torch.cuda.device_count() if target == "cuda" else 0)
        order = Order.of(probes, impls, options, seed)
        crew.brief(order)
        jobs = plan_jobs(probes, impls, options)
        plan: dict[str, Any] = {
            "probes": probes,
            "impls": impls,
            "device": target,
            "dtypes": dtype,
            "sizes": {"m": m, "k": k, "n": n, "model": sizes.name if sizes else None},
            "inputs": inputs,
            "runs": runs,
            "ranks": options.ranks,
            "full": full,
            "seed": seed,
        } | user_sources(impls)
        if left_out:
            plan["left_out"] = left_out
        if met is not None:
            plan["met"] = {"shapes": met.shapes, "own": met.own, "k": met.k, "n": met.n, "config": met.config}
            plan["met"] |= {"operator": met.operator} if met.operator else {}
        writer = output.open("probe", plan, seed)
        completed = sum(job.key in writer.done for job in jobs)
        count = default_workers(target, impls, len(jobs) - completed) if workers is None else workers
        with (
            output.measuring(writer, len(jobs)),
            SharedRun(jobs, order, writer.done, count, say, crew) as shared,
            progress_bar() as progress,
        ):
            importlib.import_module("nondet.reports.terminal")  # while others measure
            task = progress.add_task("probing", total=len(jobs), completed=completed)
            for row in shared.rows():
                writer.write(row)
                progress.update(task, advance=1, description=f"{row.probe} ({row.impl})")
        output.present()  # while workers leave the GPU, which takes them a while


def _met(names: list[str] | None, path: Path, preset: str | None, model: Path | None) -> Met:
    """What a trace met.

    Raises:
        UserError: the run can't be read or names no operator that a probe asks; or shapes were given in another way.
    """
    if names or preset is not None or model is not None:
        raise UserError("--from-trace names the probe and its shapes", "Leave NAME, --preset and --model out.")
    from nondet.core.runfile import read_run
    from nondet.probes.runner import met_in

    return met_in(read_run(path, allow_truncated=True))


def _probe_names(names: list[str]) -> list[str]:
    """The probes, each once, in the registry's order where "all" is among them. An operator's name means its probe.

    Raises:
        UnknownNameError: neither.
    """
    asked = [OPERATOR_PROBES.get(name.replace("-", "_"), name) for name in names]
    asked = [name.replace("_", "-") if name not in PROBES else name for name in asked]
    for name, given in zip(asked, names, strict=True):
        if name != "all" and name not in PROBES:
            raise UnknownNameError("probe", given, [*PROBES, *OPERATOR_PROBES, "all"])
    return list(PROBES) if "all" in asked else list(dict.fromkeys(asked))


def _as_operator(names: list[str], impls: list[str]) -> list[str]:
    """A user's function is judged as the operator that was named, where one was: `nondet probe mean --impl my:mean`.

    The probe's first operator is what it is judged as anyway.
    """
    operators = [name.replace("-", "_") for name in names if name.replace("-", "_") in OPERATOR_PROBES]
    first = {probe: operator for operator, probe in reversed(OPERATOR_PROBES.items())}
    if len(operators) != 1 or first[OPERATOR_PROBES[operators[0]]] == operators[0]:
        return impls
    return [f"{operators[0]}={impl}" if ":" in impl and "=" not in impl else impl for impl in impls]


def _check(options: Any) -> None:
    """Options are checked whether the probes at hand look at them or not: a typing error must not pass in silence.

    Raises:
        UserError: a dtype, size, kind of input or number of runs that no probe takes.
    """
    from nondet.probes import base

    base.dtypes(options, "nondet probe", ())
    base.kinds(options, ())
    for flag, value in (("--m", options.m), ("--k", options.k), ("--n", options.n)):
        base.size(flag, value, 1)
    if base.runs(options, 2) > _RUNS_MOST:
        raise UserError(f"--runs {options.runs} would never end", f"Give from 2 to {_RUNS_MOST:,}.")
