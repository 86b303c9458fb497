"""`nondet bench`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nondet.bench.work import RANK_OPERATORS, timed_operators
from nondet.core.records import Cell, Record
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.ranks.group import parse_ranks
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, check_worlds, pick_device, user_sources

if TYPE_CHECKING:
    from nondet.bench.cells import BenchCase
    from nondet.core.operator import Sizes
    from nondet.core.records import Run
    from nondet.core.runfile import RunWriter

# Former names of this command, and what to type instead.
_GONE = {"engine": "Type nondet sample --turns.", "host": "Run python scripts/host.py in a checkout of the repository."}
_SLOWER_MOST = 1000.0


@dataclass(frozen=True, kw_only=True)
class BenchRequest(o.Machine, Request):
    """The options of `nondet bench`."""

    names: list[str] | None = o.own(
        f"all, or some of: {', '.join(timed_operators())}. "
        f"Over several ranks, only by name: {', '.join(RANK_OPERATORS)}. Whole models: nondet sample --turns.",
        metavar="[OPERATOR]...",
        shown="all",
        complete=o.choices("all", *timed_operators(), *RANK_OPERATORS),
    )
    impl: list[str] | None = o.own(
        "stock, invariant, or your own package.module:function. Repeatable.",
        shown="stock, invariant",
        complete=o.PROBE_IMPLS,
    )
    dtype: list[str] | None = o.own(
        "bfloat16, float16 or float32. Repeatable.",
        shown="bfloat16 on CUDA, float32 on a CPU",
        check=o.OneOf((*o.FLOATS.names, "float8_e4m3fn"), o.FLOATS.what),
    )
    m: list[str] | None = o.own("Rows (attention: batch): 16, 1-4096 (around tile borders), or 1-4096:64. Repeatable.")
    k: int | None = o.own("K of a product, width of a row operator, KV length of attention.")
    n: int | None = o.own("N of a product.")
    jigsaw: bool = o.own("Products at M on both sides of every tile border, up to 4096.", default=False)
    ranks: str | None = o.own('Numbers of ranks, for operators over ranks: "2,4".', shown="2")
    check: Path | None = o.own(
        "Baseline run: exit 3 if a speed relative to stock, or the bits, got worse beyond noise."
    )
    slower: float | None = o.own(
        "For --check: how many times slower, relative to stock, is a regression, on any CPU with the kept run's "
        "vector instructions or any GPU of its compute capability.",
        shown="a tenth slower in a cell, a twentieth in a section, on the kept run's machine",
        check=o.Range(math.nextafter(1, 2), _SLOWER_MOST, f"Give a factor above 1, up to {_SLOWER_MOST:g}."),
    )
    clock: str = o.own(
        "wall, or (on a CPU) cpu: this process's own time, without that of other processes.",
        default="wall",
        check=o.OneOf(("wall", "cpu"), "unknown clock {value!r}"),
    )

    def _check(self) -> None:
        for name in self.names or []:
            if name in _GONE:
                raise UserError(f"there is no nondet bench {name} any more", _GONE[name])
        if self.slower is not None and self.check is None:
            what = f"--slower {self.slower:g} is a bound of --check, which was not asked for"
            raise UserError(what, "Give --check FILE.")


def bench(request: BenchRequest, sink: Sink) -> Path:
    """Time stock, invariant and your own kernels in one run, interleaved, with the hardware limit."""
    operators, rows = request.names or ["all"], request.m or []
    output = Output(request, f"bench-{'-'.join(operators)}", sink)

    import torch

    from nondet.bench.cells import parse_sizes, plan_cases, stopwatch_for
    from nondet.bench.collect import collect, implementations_of, planned_keys
    from nondet.bench.ranks import collect_ranks, ranks_keys
    from nondet.bench.summary import check_runs
    from nondet.core.operator import Sizes

    target = pick_device(request.device, request.threads or torch.get_num_threads())
    sizes = Sizes(m=parse_sizes("m", rows), k=request.k, n=request.n, jigsaw=request.jigsaw)
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
    plan |= {"clock": request.clock} if request.clock != "wall" else {}
    if ranks_cases:
        plan["ranks"] = sorted({case.shape["ranks"] for case in ranks_cases})
    keys = (planned_keys(cases, impls, target) if cases else []) + ranks_keys(ranks_cases, rank_impls, target)

    def records(writer: RunWriter) -> Iterable[Record]:
        earlier = read_run(writer.path, allow_truncated=True) if writer.done else None
        if cases:
            yield from collect(cases, impls, target, request.seed, stopwatch, earlier)
        yield from collect_ranks(ranks_cases, rank_impls, target, request.seed, writer.done)

    with (
        torch.no_grad(),
        output.recording("bench", plan, request.seed, len(keys)) as writer,
        sink.progress() as progress,
    ):
        task = progress.add_task("timing", total=len(keys), completed=sum(key in writer.done for key in keys))
        for record in records(writer):
            writer.write(record)
            name = f"{record.section} {record.group}" if isinstance(record, Cell) else record.key[1]
            progress.update(task, advance=1, description=name)
    if kept is None:
        return output.present()
    result = check_runs(kept, read_run(output.path), request.slower)
    notes = (*result.notes, *(f"regression: {line}" for line in result.regressions))
    return output.present(notes, code=3 if result.regressions else 0)


def _over_ranks(
    names: list[str], ranks: str | None, device: str, dtype: list[str] | None, sizes: Sizes
) -> list[BenchCase]:
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
    from nondet.bench.summary import cells_of

    run = read_run(path)
    kept = {(c.operator, tuple(sorted(c.shape.items())), c.dtype) for c in cells_of(run).values() if c.method == method}
    if not any((case.operator, tuple(sorted(case.shape.items())), case.dtype) in kept for case in cases):
        raise UserError(
            f"--check {path}: it has none of the cells that were asked for, by {method}",
            "Give a run of the same sizes and --clock.",
        )
    return run
