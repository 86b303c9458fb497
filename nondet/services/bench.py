"""`nondet bench`, and `nondet bench engine`: whole models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.bench.work import RANK_OPERATORS, timed_operators
from nondet.core.records import Cell, Record
from nondet.core.runfile import read_run
from nondet.errors import UnknownNameError, UserError, each_once
from nondet.ranks.group import parse_ranks
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, check_worlds, pick_device, user_sources
from nondet.services.sample import implementations

if TYPE_CHECKING:
    from nondet.bench.cells import BenchCase
    from nondet.bench.ranks import RanksCase
    from nondet.core.operator import BenchSizes
    from nondet.core.records import Run
    from nondet.core.runfile import RunWriter

ENGINE, HOST = "engine", "host"
_REQUESTS_MOST, _RUNS_MOST = 4096, 1000
_IMPLS = ("stock", "stock-no-cudnn", "stock-flash", "invariant")
_RANK_FREE = "rank-free"
_SLOWER_MOST = 1000.0


@dataclass(frozen=True, kw_only=True)
class BenchRequest(Request):
    """The options of `nondet bench`; those of the engine and those of operators exclude each other."""

    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPERATOR]...",
            help=f"all, or some of: {', '.join(timed_operators())}. "
            f"Over several ranks, only by name: {', '.join(RANK_OPERATORS)}. By themselves: engine, whole models "
            "under continuous batching; host, what a call costs without CUDA graphs.",
            show_default="all",
            autocompletion=o.choices("all", *timed_operators(), *RANK_OPERATORS, ENGINE, HOST),
        ),
    ] = None
    impl: Annotated[
        list[str] | None,
        o.opt(
            "stock, invariant, or your own package.module:function. Repeatable.",
            shown="stock, invariant",
            complete=o.BENCH_IMPLS,
        ),
    ] = None
    device: o.DEVICE = "auto"
    dtype: Annotated[
        list[str] | None,
        o.opt("bfloat16, float16 or float32. Repeatable.", shown="bfloat16 on CUDA, float32 on a CPU"),
        o.OneOf((*o.FLOATS.names, "float8_e4m3fn"), o.FLOATS.what),  # the latter of scaled-matmul alone
    ] = None
    m: Annotated[
        list[str] | None,
        o.opt("Rows (attention: batch): 16, 1-4096 (around tile borders), or 1-4096:64. Repeatable."),
    ] = None
    k: Annotated[int | None, o.opt("K of a product, width of a row operator, KV length of attention.")] = None
    n: Annotated[int | None, o.opt("N of a product.")] = None
    jigsaw: Annotated[bool, o.opt("Products at M on both sides of every tile border, up to 4096.", "--jigsaw")] = False
    ranks: Annotated[
        str | None,
        o.opt(
            'Numbers of ranks, for operators over ranks and for engine (there 1 is this process): "2,4".',
            shown="2; for engine none",
        ),
    ] = None
    models: Annotated[
        list[str] | None,
        o.opt(
            "For engine: folders, hub names, random weights or embedded. Repeatable.",
            shown="random:qwen3-0.6b and random:qwen3-8b; on a CPU random:qwen3-2x128",
        ),
    ] = None
    requests: Annotated[str | None, o.opt("For engine: requests at once.", shown='"8,32,128"; on a CPU "2,8"')] = None
    runs: Annotated[
        int | None,
        o.opt("For engine: timed runs of each implementation.", shown="5"),
        o.Range(1, _RUNS_MOST, f"Give a number from 1 to {_RUNS_MOST}."),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        o.opt(
            "For engine: run its steps as CUDA graphs, padded to a few sizes.",
            "--cuda-graphs/--no-cuda-graphs",
            shown="on with CUDA",
        ),
    ] = None
    check: Annotated[
        Path | None,
        o.opt("Kept run file: exit 3 if a ratio to stock, or the bits, regressed beyond noise."),
    ] = None
    slower: Annotated[
        float | None,
        o.opt(
            "For --check: how many times slower, relative to stock, is a regression, on any CPU with the kept run's "
            "vector instructions or any GPU of its compute capability.",
            shown="a tenth slower in a cell, a twentieth in a section, on the kept run's machine",
        ),
        o.Range(math.nextafter(1, 2), _SLOWER_MOST, f"Give a factor above 1, up to {_SLOWER_MOST:g}."),
    ] = None
    clock: Annotated[
        str,
        o.opt(
            "wall, or (on a CPU) cpu: this process's own time, without that of other processes.",
            shown=True,
            complete=o.choices("wall", "cpu"),
        ),
        o.OneOf(("wall", "cpu"), "unknown clock {value!r}"),
    ] = "wall"
    seed: o.SEED = 0
    threads: o.THREADS = None

    def _check(self) -> None:
        engine = self.engine
        for name in (ENGINE, HOST):
            beside = [other for other in self.names or [] if other != name]
            if beside and name in (self.names or []):
                what = f"{name} is timed by itself, and {' '.join(beside)} was named beside it"
                raise UserError(what, "Run it apart.")
        # options of the other kind, those that were given
        kind = ("m", "k", "n", "jigsaw", "check", "clock") if engine else ("models", "requests", "runs", "cuda_graphs")
        for field in fields(self):
            if field.name in kind and getattr(self, field.name) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                if engine:
                    hint = "Leave it out; its sizes are --models and --requests."
                    raise UserError(f"{option} is not for engine", hint)
                raise UserError(f"{option} is for {ENGINE}, which was not asked for", f"Write nondet bench {ENGINE}.")
        for name in ("impl", "m", "k", "n", "jigsaw", "ranks", "clock") if self.names == [HOST] else ():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise UserError(f"--{name} is not for {HOST}", "Leave it out: its cells are always the same.")
        if self.slower is not None and self.check is None:
            what = f"--slower {self.slower:g} is a bound of --check, which was not asked for"
            raise UserError(what, "Give --check FILE.")
        for name in (self.dtype or ()) if engine or self.names == [HOST] else ():
            o.MODEL_DTYPES.check("--dtype", name)
        _ = self.requests_at_a_time

    @property
    def engine(self) -> bool:
        """Whether whole models are timed."""
        return ENGINE in (self.names or [])

    @property
    def requests_at_a_time(self) -> list[int] | None:
        """ "8,32,128" as numbers; None for the engine's own."""
        if self.requests is None:
            return None
        parts = [part.strip() for part in self.requests.split(",")]
        if not all(p.isascii() and p.isdigit() and 1 <= int(p) <= _REQUESTS_MOST for p in parts):
            what = f"--requests {self.requests!r} makes no sense"
            raise UserError(what, f'Give numbers from 1 to {_REQUESTS_MOST}: "8,32,128".')
        return [int(p) for p in each_once("--requests", (str(int(p)) for p in parts))]


def _bench_engine(request: BenchRequest, output: Output) -> None:
    """Time whole models."""
    import torch

    from nondet.bench.engine import RUNS, check_cut, collect_engine, engine_keys, plan_engine
    from nondet.sampling.engine import pinned
    from nondet.sampling.model import EMBEDDED, is_random, local_folder, random_config

    for model in request.models or ():  # that one is there is seen when it is loaded
        if is_random(model):
            random_config(model, vocabulary=512)
        elif model != EMBEDDED:
            local_folder(model)
    target = pick_device(request.device)
    graphs = target == "cuda" if request.cuda_graphs is None else request.cuda_graphs
    requests, runs, worlds = request.requests_at_a_time, request.runs or RUNS, _worlds(request.ranks, target)
    cases = plan_engine(request.models, requests, target, request.dtype, graphs=graphs, ranks=worlds or (1,))
    for model, world in dict.fromkeys((case.model, case.ranks) for case in cases):
        if world > 1:
            check_cut(model, world)
    impls = _impls(request.impl, target, graphs, over_ranks=worlds is not None)
    pick_device(target, request.threads or torch.get_num_threads())
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
    with pinned(request.threads):
        _time(
            output, plan, engine_keys(cases, impls, target),
            lambda writer: collect_engine(cases, impls, target, request.seed, runs, writer.done),
        )  # fmt: skip


def _time(
    output: Output, plan: dict[str, Any], keys: Sequence[tuple[str, ...]],
    records: Callable[[RunWriter], Iterable[Record]],
) -> None:  # fmt: skip
    """Write what is timed as it comes; `keys` are those of a whole run."""
    with output.recording("bench", plan, plan["seed"], len(keys)) as writer, output.sink.progress() as progress:
        task = progress.add_task("timing", total=len(keys), completed=sum(key in writer.done for key in keys))
        for record in records(writer):
            writer.write(record)
            name = f"{record.section} {record.group}" if isinstance(record, Cell) else record.key[1]
            progress.update(task, advance=1, description=name)


def _worlds(text: str | None, device: str) -> tuple[int, ...] | None:
    """Numbers of ranks, None where none were asked for; 1 stands for this process, to have it in the same run."""
    if text is None:
        return None
    from nondet.sampling.ranks import check_loader

    worlds = parse_ranks(text) or ()
    several = [world for world in worlds if world != 1]
    check_worlds(several, device)
    if several:
        check_loader()
    return worlds


def _impls(wanted: list[str] | None, device: str, graphs: bool, *, over_ranks: bool) -> list[str]:
    """The implementations by name."""
    from nondet.bench.engine import engine_impls

    known = [*_IMPLS, _RANK_FREE] if over_ranks else [*_IMPLS, "invariant:FAMILY"]
    names = wanted or (["stock", "invariant", _RANK_FREE] if over_ranks else ["stock", "invariant"])
    for name in names:
        if name == _RANK_FREE and not over_ranks:
            raise UserError(f"--impl {name} is for a model over ranks", "Add --ranks 2, or --ranks 1,2.")
        if name.startswith("invariant:"):
            if over_ranks:
                raise UserError(f"--impl {name} does not run over ranks", f"Use {', '.join(known)}.")
            implementations([name])
        elif name not in known:
            raise UnknownNameError("implementation", name, known)
        elif device != "cuda" and name.startswith("stock-"):
            raise UserError(f"--impl {name} needs a CUDA device", "Use --impl stock.")
    return engine_impls(names, device, graphs)


def bench(request: BenchRequest, sink: Sink) -> Path:
    """Time stock, invariant and your own kernels in one run, interleaved, with the hardware limit."""
    operators, rows = request.names or ["all"], request.m or []
    output = Output(request, f"bench-{'-'.join(operators)}", sink)
    if request.engine:
        _bench_engine(request, output)
        return output.present()
    if operators == [HOST]:
        return _bench_host(request, output)

    import torch

    from nondet.bench.cells import parse_sizes, plan_cases, stopwatch_for
    from nondet.bench.collect import collect, implementations_of, planned_keys
    from nondet.bench.ranks import collect_ranks, ranks_keys
    from nondet.core.operator import BenchSizes

    target = pick_device(request.device, request.threads or torch.get_num_threads())
    sizes = BenchSizes(m=parse_sizes("m", rows), k=request.k, n=request.n, jigsaw=request.jigsaw)
    over_ranks = [name for name in operators if name in RANK_OPERATORS]
    ranks_cases = _over_ranks(over_ranks, request.ranks, target, request.dtype, sizes)
    alone = [name for name in operators if name not in RANK_OPERATORS]
    cases = plan_cases(alone, sizes, target, tuple(request.dtype) if request.dtype else None) if alone else []
    wanted = request.impl or ["stock", "invariant"]
    rank_impls = request.impl or ["stock", "invariant", "rank-free"]
    impls = {
        operator: implementations_of(operator, wanted, target)
        for operator in dict.fromkeys(case.operator for case in cases)
    }
    for name in wanted:
        if ":" in name and not any(name in chosen for chosen in impls.values()):
            raise UserError(f"--impl {name!r}: no operator asked for takes it", "Name the one that it computes.")
    cases = [case for case in cases if impls[case.operator]]
    if not cases and not ranks_cases:
        raise UserError(
            f"nothing to time: no operator asked for has --impl {','.join(wanted)} on {target}",
            "See `nondet bench --help-all`.",
        )
    if request.clock == "cpu" and (target == "cuda" or ranks_cases):
        what = "a GPU" if target == "cuda" else "several ranks"
        raise UserError(f"--clock cpu is no clock for {what}", "Leave it out, or time operators with --device cpu.")
    stopwatch = stopwatch_for(target, request.clock)
    kept = _kept(request.check, cases, stopwatch.method) if request.check is not None else None
    plan: dict[str, Any] = {
        "operators": operators,
        "impls": wanted,
        "device": target,
        "dtypes": request.dtype,
        "sizes": {"m": rows, "k": request.k, "n": request.n, "jigsaw": request.jigsaw},
        "seed": request.seed,
    } | user_sources(wanted)
    if request.clock != "wall":
        plan["clock"] = request.clock
    if ranks_cases:
        plan["ranks"] = sorted({case.world for case in ranks_cases})
    keys = (planned_keys(cases, impls, target) if cases else []) + ranks_keys(ranks_cases, rank_impls, target)

    def records(writer: RunWriter) -> Iterable[Record]:
        earlier = read_run(writer.path, allow_truncated=True) if writer.done else None
        if cases:
            yield from collect(cases, impls, target, request.seed, stopwatch, earlier)
        yield from collect_ranks(ranks_cases, rank_impls, target, request.seed, writer.done)

    with torch.no_grad():
        _time(output, plan, keys, records)
    return _checked(request, output, kept)


def _bench_host(request: BenchRequest, output: Output) -> Path:
    """Time calls by what they cost the host."""
    import torch

    from nondet.bench.host import HostClock, collect_host, plan_host

    target = pick_device(request.device, request.threads or torch.get_num_threads())
    cases = plan_host(target, request.dtype)
    kept = None if request.check is None else _kept(request.check, cases, HostClock(target).method)
    same = {"operators": [HOST], "impls": ["stock", "invariant"], "device": target}
    plan: dict[str, Any] = {**same, "dtypes": request.dtype, "seed": request.seed}
    keys, seed = [case.key(target) for case in cases], request.seed
    with torch.no_grad():
        _time(output, plan, keys, lambda writer: collect_host(cases, target, seed, writer.done))
    return _checked(request, output, kept)


def _checked(request: BenchRequest, output: Output, kept: Run | None) -> Path:
    """Present the run, held against a kept one where --check asks for that."""
    if kept is None:
        return output.present()
    from nondet.bench.summary import check_runs

    result = check_runs(kept, read_run(output.path), request.slower)
    notes = (*result.notes, *(f"regression: {line}" for line in result.regressions))
    return output.present(notes, code=3 if result.regressions else 0)


def _over_ranks(
    names: list[str], ranks: str | None, device: str, dtype: list[str] | None, sizes: BenchSizes
) -> list[RanksCase]:
    """The cells over ranks."""
    from nondet.bench.ranks import plan_ranks

    worlds = parse_ranks(ranks)
    if not names:
        if worlds is not None:
            known = " and ".join(RANK_OPERATORS)
            raise UserError(f"--ranks {ranks} is for {known}, and neither was asked for", "Name one of them.")
        return []
    worlds = worlds or (2,)
    check_worlds(worlds, device)
    width = sizes.k if "row-parallel" in names else None
    return plan_ranks(names, worlds, device, dtype or ("bfloat16",), m=sizes.m, n=sizes.n, k=width)


def _kept(path: Path, cases: Sequence[BenchCase], method: str) -> Run:
    """The run to check against."""
    from nondet.bench.summary import cells_of

    run = read_run(path)
    kept = {(c.operator, tuple(sorted(c.shape.items())), c.dtype) for c in cells_of(run).values() if c.method == method}
    if not any((case.operator, tuple(sorted(case.shape.items())), case.dtype) in kept for case in cases):
        raise UserError(
            f"--check {path}: it has none of the cells that were asked for, by {method}",
            "Give a run of the same sizes and --clock.",
        )
    return run
