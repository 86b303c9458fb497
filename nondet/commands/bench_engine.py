"""`nondet bench engine`: whole models under transformers' continuous batching, by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from nondet.commands.common import pick_device, progress_bar, set_threads
from nondet.commands.output import Output
from nondet.errors import UnknownNameError, UserError, suggestion

__all__ = ["ENGINE", "GRAPHS", "MODELS", "REQUESTS", "RUNS", "EngineOptions", "bench_engine"]

ENGINE = "engine"
_REQUESTS_MOST, _RUNS_MOST = 4096, 1000
_IMPLS = ("stock", "stock-no-cudnn", "stock-flash", "invariant")
_RANK_FREE = "rank-free"

MODELS = Annotated[
    list[str] | None,
    typer.Option(
        "--models",
        help="Of engine: folders, hub names, random weights or embedded. Repeatable.",
        show_default="random:qwen3-0.6b and random:qwen3-8b; on a CPU random:qwen3-2x128",
    ),
]
REQUESTS = Annotated[
    str | None,
    typer.Option("--requests", help="Of engine: requests at a time.", show_default='"8,32,128"; on a CPU "2,8"'),
]
RUNS = Annotated[
    int | None, typer.Option("--runs", help="Of engine: timed runs of each implementation.", show_default="5")
]
GRAPHS = Annotated[
    bool | None,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="Of engine: its steps as CUDA graphs, padded to a few sizes.",
        show_default="on where there is CUDA",
    ),
]


@dataclass(frozen=True)
class EngineOptions:
    """The options that are the engine's own, as they were given."""

    models: list[str] | None
    requests: str | None
    runs: int | None
    graphs: bool | None
    ranks: str | None = None

    def check_alone(self, operators: Sequence[str]) -> None:
        """Refuse them beside operators, and operators beside the engine.

        Raises:
            UserError: as said.
        """
        if ENGINE in operators:
            if len(operators) > 1:
                others = " ".join(name for name in operators if name != ENGINE)
                raise UserError(f"{ENGINE} is timed by itself, and {others} was asked for beside it", "Run it apart.")
            return
        given = {
            "--models": self.models,
            "--requests": self.requests,
            "--runs": self.runs,
            "--cuda-graphs": self.graphs,
        }
        for option, value in {**given, "--cuda-graphs": self.graphs}.items():
            if value is not None:
                raise UserError(f"{option} is for {ENGINE}, which was not asked for", f"Write nondet bench {ENGINE}.")


def bench_engine(
    options: EngineOptions,
    output: Output,
    impl: list[str] | None,
    device: str,
    dtype: list[str] | None,
    seed: int,
    threads: int | None,
) -> None:
    """Time it, and show what came of it; other options of `nondet bench` are refused by who calls this.

    Raises:
        UserError: sizes or names that make no sense.
    """
    import torch

    from nondet.bench.engine import RUNS as RUNS_USUAL
    from nondet.bench.engine import check_cut, collect_engine, engine_keys, plan_engine
    from nondet.sampling.engine import pinned
    from nondet.sampling.model import DTYPES

    requests, runs = _requests(options.requests), RUNS_USUAL if options.runs is None else options.runs
    if not 1 <= runs <= _RUNS_MOST:
        raise UserError(f"--runs {runs} makes no sense", f"Give a number from 1 to {_RUNS_MOST}.")
    for name in dtype or ():
        if name not in DTYPES:
            raise UserError(f"--dtype {name!r} is not one that models run in here", suggestion(name, DTYPES))
    for model in options.models or ():
        _check_name(model)
    target = pick_device(device)
    graphs = target == "cuda" if options.graphs is None else options.graphs
    worlds = _worlds(options.ranks, target)
    cases = plan_engine(options.models, requests, target, dtype, graphs=graphs, ranks=worlds or (1,))
    for model, world in dict.fromkeys((case.model, case.ranks) for case in cases):
        if world > 1:
            check_cut(model, world)
    impls = _impls(impl, target, graphs, over_ranks=worlds is not None)
    set_threads(torch.get_num_threads() if threads is None else threads)
    plan: dict[str, Any] = {
        "operators": [ENGINE],
        "impls": impls,
        "device": target,
        "dtypes": dtype,
        "models": sorted({case.model for case in cases}),
        "requests": sorted({case.requests for case in cases}),
        "runs": runs,
        "graphs": graphs,
        "seed": seed,
    } | ({"ranks": list(worlds)} if worlds is not None else {})
    writer = output.open("bench", plan, seed)
    keys = engine_keys(cases, impls, target)
    with output.measuring(writer, len(keys)), pinned(threads), progress_bar() as progress:
        task = progress.add_task("timing", total=len(keys), completed=sum(key in writer.done for key in keys))
        for record in collect_engine(cases, impls, target, seed, runs, writer.done):
            writer.write(record)
            progress.update(task, advance=1, description=record.key[1])
    output.present()


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
            from nondet.commands.sample import implementations

            implementations([name])
        elif name not in known:
            raise UnknownNameError("implementation", name, known)
        elif device != "cuda" and name.startswith("stock-"):
            raise UserError(f"--impl {name} needs a CUDA device", "Use --impl stock.")
    return engine_impls(names, device, graphs)
