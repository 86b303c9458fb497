"""`nondet bench`."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.bench.work import RANK_OPERATORS, timed_operators
from nondet.commands import bench_engine as engine
from nondet.commands import completion
from nondet.commands import options as o
from nondet.commands.common import pick_device, progress_bar, say, set_threads, user_sources
from nondet.commands.output import Output
from nondet.core.records import Cell, Record
from nondet.errors import UnknownNameError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nondet.bench.cells import BenchCase
    from nondet.bench.ranks import RanksCase
    from nondet.core.operator import BenchSizes
    from nondet.core.records import Run

__all__ = ["bench"]

_SLOWER_MOST = 1000.0


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPERATOR]...",
            help=f"all, or some of: {', '.join(timed_operators())}. "
            f"Over several ranks, by name alone: {', '.join(RANK_OPERATORS)}. By itself: engine, whole models "
            "under continuous batching.",
            show_default="all",
            autocompletion=o.choices("all", *timed_operators(), *RANK_OPERATORS, engine.ENGINE),
        ),
    ] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            help="stock, invariant, a rival library by name, or your own package.module:function. Repeatable.",
            show_default="stock, invariant, and every rival that is installed",
            autocompletion=completion.bench_impls,
        ),
    ] = None,
    device: o.DEVICE = "auto",
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            help="bfloat16, float16 or float32. Repeatable.",
            show_default="bfloat16 on CUDA, float32 on a CPU",
        ),
    ] = None,
    m: Annotated[
        list[str] | None,
        typer.Option(
            "--m",
            help="Rows (attention: batch): 16, or 1-4096 around the borders of tiles, or 1-4096:64. Repeatable.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", help="K of a product, a row operator's width, attention's KV length.", show_default=False),
    ] = None,
    n: Annotated[int | None, typer.Option("--n", help="N of a product.", show_default=False)] = None,
    jigsaw: Annotated[
        bool, typer.Option("--jigsaw", help="Products at M on both sides of every border of tiles, up to 4096.")
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks",
            help='Numbers of ranks to start, for cells over ranks, and for engine, where 1 is this process: "2,4".',
            show_default="2; of engine none",
        ),
    ] = None,
    models: engine.MODELS = None,
    requests: engine.REQUESTS = None,
    runs: engine.RUNS = None,
    cuda_graphs: engine.GRAPHS = None,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            help="A kept run file: exit with 3 where a ratio to stock, or the bits, regressed beyond noise.",
            show_default=False,
        ),
    ] = None,
    slower: Annotated[
        float | None,
        typer.Option(
            "--slower",
            help="Of --check: how many times slower against stock is a regression, on any CPU with the kept run's "
            "vector instructions, any GPU of its compute capability.",
            show_default="a tenth slower in a cell, a twentieth in a section, on the kept run's machine",
        ),
    ] = None,
    clock: Annotated[
        str,
        typer.Option(
            "--clock",
            help="wall, or on a CPU cpu: this process's own time, in which others on the machine do not show.",
            autocompletion=o.choices("wall", "cpu"),
        ),
    ] = "wall",
    seed: o.SEED = 0,
    threads: o.THREADS = None,
    out: o.OUT = None,
    force: o.FORCE = False,
    resume: o.RESUME = False,
    report: o.REPORT = None,
    as_json: o.JSON = False,
    fail_on: o.FAIL_ON = None,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Time stock, invariant and rival kernels in one run, in turn, beside what the machine can do at most."""
    operators, rows = names or ["all"], m or []
    of_engine = engine.EngineOptions(models, requests, runs, cuda_graphs, ranks)
    of_engine.check_alone(operators)
    _check_slower(slower, check)
    output = Output.of(
        f"bench-{'-'.join(operators)}",
        out=out, force=force, resume=resume, reports=report, as_json=as_json, fail_on=fail_on,
        verbose=verbose, quiet=quiet,
    )  # fmt: skip

    if engine.ENGINE in operators:
        others = {"--m": m, "--k": k, "--n": n, "--jigsaw": jigsaw or None, "--check": check}
        others["--clock"] = (clock != "wall") or None
        for option, value in others.items():
            if value is not None:
                raise UserError(f"{option} is not for engine", "Leave it out; its sizes are --models and --requests.")
        engine.bench_engine(of_engine, output, impl, device, dtype, seed, threads)
        return

    import torch

    from nondet.bench.cells import parse_sizes, plan_cases, stopwatch_for
    from nondet.bench.collect import collect, implementations_of, planned_keys
    from nondet.bench.ranks import collect_ranks, ranks_keys
    from nondet.bench.rivals import found_rivals
    from nondet.core.operator import BenchSizes
    from nondet.core.runfile import read_run

    target = pick_device(device)
    set_threads(torch.get_num_threads() if threads is None else threads)
    sizes = BenchSizes(m=parse_sizes("m", rows), k=k, n=n, jigsaw=jigsaw)
    over_ranks = [name for name in operators if name in RANK_OPERATORS]
    ranks_cases = _over_ranks(over_ranks, ranks, target, dtype, sizes)
    alone = [name for name in operators if name not in RANK_OPERATORS]
    cases = plan_cases(alone, sizes, target, tuple(dtype) if dtype else None) if alone else []
    rivals = found_rivals()
    wanted = impl or ["stock", "invariant", *rivals]
    rank_impls = impl or ["stock", "invariant", "rank-free"]
    impls = {
        operator: implementations_of(operator, wanted, target, list(rivals))
        for operator in dict.fromkeys(case.operator for case in cases)
    }
    for name in wanted:
        if ":" in name and not any(name in chosen for chosen in impls.values()):
            raise UserError(f"--impl {name!r}: no operator asked for takes it", "Name the one that it computes.")
    cases = [case for case in cases if impls[case.operator]]
    if not cases and not ranks_cases:
        raise UserError(
            f"nothing to time: no operator asked for has --impl {','.join(wanted)} on {target}", "See `nondet list`."
        )
    _check_clock(clock, target, bool(ranks_cases))
    stopwatch = stopwatch_for(target, clock)
    kept = _kept(check, cases, stopwatch.method) if check is not None else None
    plan: dict[str, Any] = {
        "operators": operators,
        "impls": wanted,
        "rivals": rivals,
        "device": target,
        "dtypes": dtype,
        "sizes": {"m": rows, "k": k, "n": n, "jigsaw": jigsaw},
        "seed": seed,
    } | user_sources(wanted)
    if clock != "wall":
        plan["clock"] = clock
    if ranks_cases:
        plan["ranks"] = sorted({case.world for case in ranks_cases})
    say(f"rivals found: {', '.join(f'{name} {version}' for name, version in rivals.items()) or 'none'}")
    writer = output.open("bench", plan, seed)
    earlier = read_run(writer.path, allow_truncated=True) if writer.done else None
    keys = (planned_keys(cases, impls, target) if cases else []) + ranks_keys(ranks_cases, rank_impls, target)
    with output.measuring(writer, len(keys)), progress_bar() as progress, torch.no_grad():
        task = progress.add_task("timing", total=len(keys), completed=sum(key in writer.done for key in keys))
        records = collect(cases, impls, target, seed, stopwatch, earlier) if cases else ()
        for record in chain(records, collect_ranks(ranks_cases, rank_impls, target, seed, writer.done)):
            writer.write(record)
            progress.update(task, advance=1, description=_name(record))
    if kept is None:
        output.present()
        return
    from nondet.bench.summary import check_runs

    result = check_runs(kept, read_run(output.path), slower)
    output.present(notes=lambda _: (*result.notes, *(f"regression: {line}" for line in result.regressions)))
    if result.regressions:
        raise typer.Exit(3)


def _check_slower(slower: float | None, check: Path | None) -> None:
    """Refuse a factor that bounds nothing.

    Raises:
        UserError: as said.
    """
    if slower is None:
        return
    if check is None:
        raise UserError(f"--slower {slower:g} is a bound of --check, which was not asked for", "Give --check FILE.")
    if not 1 < slower <= _SLOWER_MOST:  # NaN is not
        raise UserError(f"--slower {slower:g} makes no sense", f"Give a factor above 1, up to {_SLOWER_MOST:g}.")


def _check_clock(clock: str, device: str, over_ranks: bool) -> None:
    """Refuse a clock that is none, or that can't be asked.

    Raises:
        UserError: as said.
    """
    from nondet.bench.cells import CLOCKS

    if clock not in CLOCKS:
        raise UnknownNameError("clock", clock, CLOCKS)
    if clock == "cpu" and (device == "cuda" or over_ranks):
        what = "a GPU" if device == "cuda" else "several ranks"
        raise UserError(f"--clock cpu is no clock for {what}", "Leave it out, or time operators with --device cpu.")


def _over_ranks(
    names: list[str], ranks: str | None, device: str, dtype: list[str] | None, sizes: BenchSizes
) -> list[RanksCase]:
    """The cells over ranks.

    Raises:
        UserError: ranks that can't be had, or --ranks where nothing over ranks was asked for.
    """
    import torch

    from nondet.bench.ranks import plan_ranks
    from nondet.ranks.group import check_ranks, parse_ranks

    worlds = parse_ranks(ranks)
    if not names:
        if worlds is not None:
            known = " and ".join(RANK_OPERATORS)
            raise UserError(f"--ranks {ranks} is for {known}, and neither was asked for", "Name one of them.")
        return []
    worlds = worlds or (2,)
    check_ranks(worlds, device, torch.cuda.device_count() if device == "cuda" else 0)
    return plan_ranks(
        names,
        worlds,
        device,
        dtype or ("bfloat16",),
        m=sizes.m,
        n=sizes.n,
        k=sizes.k if "row-parallel" in names else None,
    )


def _kept(path: Path, cases: Sequence[BenchCase], method: str) -> Run:
    """The run to check against.

    Raises:
        UserError: no run file of `nondet bench`, or one that has none of the cells.
    """
    from nondet.bench.summary import cells_of
    from nondet.core.runfile import read_run

    run = read_run(path)
    kept = {(c.operator, tuple(sorted(c.shape.items())), c.dtype) for c in cells_of(run).values() if c.method == method}
    if not any((case.operator, tuple(sorted(case.shape.items())), case.dtype) in kept for case in cases):
        raise UserError(
            f"--check {path}: it has none of the cells that were asked for, by {method}",
            "Give a run of the same sizes and --clock.",
        )
    return run


def _name(record: Record) -> str:
    """What the progress bar says was just done."""
    return f"{record.section} {record.group}" if isinstance(record, Cell) else record.key[1]
