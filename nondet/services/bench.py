"""`nondet bench`, and `nondet bench engine`: whole models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.bench.work import RANK_OPERATORS, timed_operators
from nondet.core.records import Cell, Record
from nondet.errors import UnknownNameError, UserError, suggestion
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, pick_device, set_threads, user_sources

if TYPE_CHECKING:
    from nondet.bench.cells import BenchCase
    from nondet.bench.ranks import RanksCase
    from nondet.core.operator import BenchSizes
    from nondet.core.records import Run

ENGINE = "engine"
_REQUESTS_MOST, _RUNS_MOST = 4096, 1000
_IMPLS = ("stock", "stock-no-cudnn", "stock-flash", "invariant")
_RANK_FREE = "rank-free"
_SLOWER_MOST = 1000.0


@dataclass(frozen=True, kw_only=True)
class BenchRequest(Request):
    """The options of `nondet bench`.

    Raises:
        UserError: the engine's beside operators, or theirs beside the engine, or a --slower that bounds nothing.
    """

    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPERATOR]...",
            help=f"all, or some of: {', '.join(timed_operators())}. "
            f"Over several ranks, by name alone: {', '.join(RANK_OPERATORS)}. By itself: engine, whole models "
            "under continuous batching.",
            show_default="all",
            autocompletion=o.choices("all", *timed_operators(), *RANK_OPERATORS, ENGINE),
        ),
    ] = None
    impl: Annotated[
        list[str] | None,
        o.opt(
            "stock, invariant, a rival library by name, or your own package.module:function. Repeatable.",
            shown="stock, invariant, and every rival that is installed",
            complete=o.bench_impls,
        ),
    ] = None
    device: o.DEVICE = "auto"
    dtype: Annotated[
        list[str] | None,
        o.opt("bfloat16, float16 or float32. Repeatable.", shown="bfloat16 on CUDA, float32 on a CPU"),
    ] = None
    m: Annotated[
        list[str] | None,
        o.opt("Rows (attention: batch): 16, or 1-4096 around the borders of tiles, or 1-4096:64. Repeatable."),
    ] = None
    k: Annotated[int | None, o.opt("K of a product, a row operator's width, attention's KV length.")] = None
    n: Annotated[int | None, o.opt("N of a product.")] = None
    jigsaw: Annotated[bool, o.opt("Products at M on both sides of every border of tiles, up to 4096.", "--jigsaw")] = (
        False
    )
    ranks: Annotated[
        str | None,
        o.opt(
            'Numbers of ranks to start, for cells over ranks, and for engine, where 1 is this process: "2,4".',
            shown="2; of engine none",
        ),
    ] = None
    models: Annotated[
        list[str] | None,
        o.opt(
            "Of engine: folders, hub names, random weights or embedded. Repeatable.",
            shown="random:qwen3-0.6b and random:qwen3-8b; on a CPU random:qwen3-2x128",
        ),
    ] = None
    requests: Annotated[str | None, o.opt("Of engine: requests at a time.", shown='"8,32,128"; on a CPU "2,8"')] = None
    runs: Annotated[int | None, o.opt("Of engine: timed runs of each implementation.", shown="5")] = None
    cuda_graphs: Annotated[
        bool | None,
        o.opt(
            "Of engine: its steps as CUDA graphs, padded to a few sizes.",
            "--cuda-graphs/--no-cuda-graphs",
            shown="on where there is CUDA",
        ),
    ] = None
    check: Annotated[
        Path | None,
        o.opt("A kept run file: exit with 3 where a ratio to stock, or the bits, regressed beyond noise."),
    ] = None
    slower: Annotated[
        float | None,
        o.opt(
            "Of --check: how many times slower against stock is a regression, on any CPU with the kept run's "
            "vector instructions, any GPU of its compute capability.",
            shown="a tenth slower in a cell, a twentieth in a section, on the kept run's machine",
        ),
    ] = None
    clock: Annotated[
        str,
        o.opt(
            "wall, or on a CPU cpu: this process's own time, in which others on the machine do not show.",
            shown=True,
            complete=o.choices("wall", "cpu"),
        ),
    ] = "wall"
    seed: o.SEED = 0
    threads: o.THREADS = None

    def __post_init__(self) -> None:
        operators = self.names or []
        engine = ENGINE in operators
        if engine and len(operators) > 1:
            others = " ".join(name for name in operators if name != ENGINE)
            raise UserError(f"{ENGINE} is timed by itself, and {others} was asked for beside it", "Run it apart.")
        # options of the other kind, those that were given
        kind = ("m", "k", "n", "jigsaw", "check", "clock") if engine else ("models", "requests", "runs", "cuda_graphs")
        for field in fields(self):
            if field.name in kind and getattr(self, field.name) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                if engine:
                    hint = "Leave it out; its sizes are --models and --requests."
                    raise UserError(f"{option} is not for engine", hint)
                raise UserError(f"{option} is for {ENGINE}, which was not asked for", f"Write nondet bench {ENGINE}.")
        if self.slower is None:
            return
        if self.check is None:
            raise UserError(
                f"--slower {self.slower:g} is a bound of --check, which was not asked for", "Give --check FILE."
            )
        if not 1 < self.slower <= _SLOWER_MOST:  # NaN is not
            raise UserError(
                f"--slower {self.slower:g} makes no sense", f"Give a factor above 1, up to {_SLOWER_MOST:g}."
            )


def _bench_engine(request: BenchRequest, output: Output) -> None:
    """Time whole models; other options of `nondet bench` are refused by the request.

    Raises:
        UserError: sizes or names that make no sense.
    """
    import torch

    from nondet.bench.engine import RUNS as RUNS_USUAL
    from nondet.bench.engine import check_cut, collect_engine, engine_keys, plan_engine
    from nondet.sampling.engine import pinned
    from nondet.sampling.model import DTYPES

    requests, runs = _requests(request.requests), RUNS_USUAL if request.runs is None else request.runs
    if not 1 <= runs <= _RUNS_MOST:
        raise UserError(f"--runs {runs} makes no sense", f"Give a number from 1 to {_RUNS_MOST}.")
    for name in request.dtype or ():
        if name not in DTYPES:
            raise UserError(f"--dtype {name!r} is not one that models run in here", suggestion(name, DTYPES))
    for model in request.models or ():
        _check_name(model)
    target = pick_device(request.device)
    graphs = target == "cuda" if request.cuda_graphs is None else request.cuda_graphs
    worlds = _worlds(request.ranks, target)
    cases = plan_engine(request.models, requests, target, request.dtype, graphs=graphs, ranks=worlds or (1,))
    for model, world in dict.fromkeys((case.model, case.ranks) for case in cases):
        if world > 1:
            check_cut(model, world)
    impls = _impls(request.impl, target, graphs, over_ranks=worlds is not None)
    set_threads(torch.get_num_threads() if request.threads is None else request.threads)
    plan: dict[str, Any] = {
        "operators": [ENGINE],
        "impls": impls,
        "device": target,
        "dtypes": request.dtype,
        "models": sorted({case.model for case in cases}),
        "requests": sorted({case.requests for case in cases}),
        "runs": runs,
        "graphs": graphs,
        "seed": request.seed,
    } | ({"ranks": list(worlds)} if worlds is not None else {})
    writer = output.open("bench", plan, request.seed)
    keys = engine_keys(cases, impls, target)
    with output.measuring(writer, len(keys)), pinned(request.threads), output.sink.progress() as progress:
        task = progress.add_task("timing", total=len(keys), completed=sum(key in writer.done for key in keys))
        for record in collect_engine(cases, impls, target, request.seed, runs, writer.done):
            writer.write(record)
            progress.update(task, advance=1, description=record.key[1])


def _check_name(model: str) -> None:
    """Refuse what no model can be called, before anything is measured. That one is there is seen when it is loaded.

    Raises:
        UserError: as said.
    """
    from nondet.sampling.model import EMBEDDED, is_random, local_folder, random_config

    if is_random(model):
        random_config(model, vocabulary=512)
    elif model != EMBEDDED:
        local_folder(model)


def _requests(text: str | None) -> list[int] | None:
    """ "8,32,128" as numbers.

    Raises:
        UserError: it is none.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdigit() and 1 <= int(p) <= _REQUESTS_MOST for p in parts):
        raise UserError(f"--requests {text!r} makes no sense", f'Give numbers from 1 to {_REQUESTS_MOST}: "8,32,128".')
    return [int(p) for p in parts]


def _worlds(text: str | None, device: str) -> tuple[int, ...] | None:
    """Numbers of ranks, None where none were asked for; 1 stands for this process, to have it in the same run.

    Raises:
        UserError: no list of numbers, or ranks that can't be had.
    """
    if text is None:
        return None
    import torch

    from nondet.ranks.group import check_ranks, parse_ranks
    from nondet.sampling.ranks import check_loader

    worlds = parse_ranks(text) or ()
    several = [world for world in worlds if world != 1]
    check_ranks(several, device, torch.cuda.device_count() if device == "cuda" else 0)
    if several:
        check_loader()
    return worlds


def _impls(wanted: list[str] | None, device: str, graphs: bool, *, over_ranks: bool) -> list[str]:
    """The implementations by name.

    Raises:
        UserError: one that the engine has not, or that needs a GPU, or ranks.
    """
    from nondet.bench.engine import engine_impls

    known = [*_IMPLS, _RANK_FREE] if over_ranks else [*_IMPLS, "invariant:FAMILY"]
    names = wanted or (["stock", "invariant", _RANK_FREE] if over_ranks else ["stock", "invariant"])
    for name in names:
        if name == _RANK_FREE and not over_ranks:
            raise UserError(f"--impl {name} is for a model over ranks", "Add --ranks 2, or --ranks 1,2.")
        if name.startswith("invariant:"):
            if over_ranks:
                raise UserError(f"--impl {name} is not to be had over ranks", f"Use {', '.join(known)}.")
            from nondet.services.sample import implementations

            implementations([name])
        elif name not in known:
            raise UnknownNameError("implementation", name, known)
        elif device != "cuda" and name.startswith("stock-"):
            raise UserError(f"--impl {name} needs a CUDA device", "Use --impl stock.")
    return engine_impls(names, device, graphs)


def bench(request: BenchRequest, sink: Sink) -> Path:
    """Time stock, invariant and rival kernels in one run, in turn, beside what the machine can do at most."""
    operators, rows = request.names or ["all"], request.m or []
    output = Output.of(request, f"bench-{'-'.join(operators)}", sink)
    if ENGINE in operators:
        _bench_engine(request, output)
        return output.present()

    import torch

    from nondet.bench.cells import parse_sizes, plan_cases, stopwatch_for
    from nondet.bench.collect import collect, implementations_of, planned_keys
    from nondet.bench.ranks import collect_ranks, ranks_keys
    from nondet.bench.rivals import found_rivals
    from nondet.core.operator import BenchSizes
    from nondet.core.runfile import read_run

    target = pick_device(request.device)
    set_threads(torch.get_num_threads() if request.threads is None else request.threads)
    sizes = BenchSizes(m=parse_sizes("m", rows), k=request.k, n=request.n, jigsaw=request.jigsaw)
    over_ranks = [name for name in operators if name in RANK_OPERATORS]
    ranks_cases = _over_ranks(over_ranks, request.ranks, target, request.dtype, sizes)
    alone = [name for name in operators if name not in RANK_OPERATORS]
    cases = plan_cases(alone, sizes, target, tuple(request.dtype) if request.dtype else None) if alone else []
    rivals = found_rivals()
    wanted = request.impl or ["stock", "invariant", *rivals]
    rank_impls = request.impl or ["stock", "invariant", "rank-free"]
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
    _check_clock(request.clock, target, bool(ranks_cases))
    stopwatch = stopwatch_for(target, request.clock)
    kept = _kept(request.check, cases, stopwatch.method) if request.check is not None else None
    plan: dict[str, Any] = {
        "operators": operators,
        "impls": wanted,
        "rivals": rivals,
        "device": target,
        "dtypes": request.dtype,
        "sizes": {"m": rows, "k": request.k, "n": request.n, "jigsaw": request.jigsaw},
        "seed": request.seed,
    } | user_sources(wanted)
    if request.clock != "wall":
        plan["clock"] = request.clock
    if ranks_cases:
        plan["ranks"] = sorted({case.world for case in ranks_cases})
    sink.say(f"rivals found: {', '.join(f'{name} {version}' for name, version in rivals.items()) or 'none'}")
    writer = output.open("bench", plan, request.seed)
    earlier = read_run(writer.path, allow_truncated=True) if writer.done else None
    keys = (planned_keys(cases, impls, target) if cases else []) + ranks_keys(ranks_cases, rank_impls, target)
    with output.measuring(writer, len(keys)), sink.progress() as progress, torch.no_grad():
        task = progress.add_task("timing", total=len(keys), completed=sum(key in writer.done for key in keys))
        records = collect(cases, impls, target, request.seed, stopwatch, earlier) if cases else ()
        for record in chain(records, collect_ranks(ranks_cases, rank_impls, target, request.seed, writer.done)):
            writer.write(record)
            progress.update(task, advance=1, description=_name(record))
    if kept is None:
        return output.present()
    from nondet.bench.summary import check_runs

    result = check_runs(kept, read_run(output.path), request.slower)
    notes = (*result.notes, *(f"regression: {line}" for line in result.regressions))
    return output.present(notes, code=3 if result.regressions else 0)


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
