"""`nondet probe`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nondet.core.registry import OPERATOR_PROBES, PROBES
from nondet.core.runfile import read_run
from nondet.errors import UnknownNameError, UserError
from nondet.ranks.group import parse_ranks
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, check_worlds, model_sizes, pick_device, user_sources

_RUNS_MOST, _WORKERS_MOST = 1_000_000, 256
_SLOW_ON_A_CPU = ("all-reduce",)  # starting ranks takes nearly a minute, where all others take a quarter of one


@dataclass(frozen=True, kw_only=True)
class ProbeRequest(o.Machine, Request):
    """The options of `nondet probe`."""

    names: list[str] | None = o.own(
        'Probes to run (--help-all lists them), or "all".', metavar="NAME...", complete=o.PROBES
    )
    from_trace: Path | None = o.own(
        "Run file of `nondet trace` or `diagnose`: probe the operator that it found, at its shapes."
    )
    impl: o.IMPLS = None
    dtype: o.DTYPES = None
    m: o.LARGEST_M = None
    k: o.K = None
    n: o.N = None
    preset: o.PRESET = None
    model: o.MODEL_FOLDER = None
    inputs: o.INPUTS = None
    runs: int | None = o.own("Repetitions of run-to-run cases.", check=o.Range(2, _RUNS_MOST))
    ranks: str | None = o.own('Numbers of ranks for all-reduce: "2,4".')
    full: bool = o.own("The long sweep (M up to 4096) instead of the default list.", default=False)
    map: str | None = o.own("Draw a map of bit classes for each M up to --m, against N (mn) or K (mk). Products only.")
    workers: int | None = o.own(
        "Processes that share the cases, on one device. The rows are the same.",
        "--jobs",
        shown="on CUDA one per two cores, up to 8, or 16 if nothing is certified yet; on a CPU 1, and 2 for all",
        panel=o.MACHINE,
    )

    def _check(self) -> None:
        if self.from_trace is not None and (self.names or self.preset is not None or self.model is not None):
            raise UserError("--from-trace names the probe and its shapes", "Leave NAME, --preset and --model out.")
        if self.from_trace is None and not self.names:
            raise UserError(
                "no probe was named", "Name some (`nondet probe --help-all` lists them), or give --from-trace RUN."
            )
        names = _probe_names(self.names or [])
        if self.map not in (None, "mn", "mk"):
            raise UserError(f"--map {self.map!r} is no map", "Give mn (M and N) or mk (M and K).")
        if self.map and names != ["matmul"]:
            raise UserError("--map is of products", "Give it with `nondet probe matmul`.")
        if self.workers is not None:
            o.Range(1, _WORKERS_MOST).check("--jobs", self.workers)


def probe(request: ProbeRequest, sink: Sink) -> Path:
    """Test whether operators' bits depend on the batch: classes of equal bits, kernel names, ULP, error."""
    met, names = None, request.names or []
    if request.from_trace is not None:
        from nondet.probes.runner import met_in

        met = met_in(read_run(request.from_trace, allow_truncated=True))
        names = [met.probe]
    probes = _probe_names(names)
    output = Output(request, f"probe-{'-'.join(names)}", sink)

    from nondet.probes.jobs import Crew, Order, SharedRun, default_workers, workers_ahead

    ahead = workers_ahead(names, request.device, request.impl or [], request.workers)
    with Crew(ahead, request.device) as crew:
        from nondet.probes.base import Options
        from nondet.probes.runner import plan_jobs

        target = pick_device(request.device, request.threads)
        left_out = []
        if "all" in names and target == "cpu" and request.ranks is None:
            left_out = [name for name in _SLOW_ON_A_CPU if name not in names]
        if left_out:
            probes = [name for name in probes if name not in left_out]
            names_left = ", ".join(left_out)
            sink.say(f"nondet: {names_left} is left out of all on a CPU: it starts processes. Name it to run it.")
        sizes = model_sizes(request.preset, request.model)
        impls = _as_operator(names, request.impl or ["stock", "invariant"])
        ranks = parse_ranks(request.ranks)
        same = {name: getattr(request, name) for name in ("m", "k", "n", "runs", "seed", "full")}
        options = Options(
            device=target, ranks=ranks, **same,
            dtypes=tuple(request.dtype) if request.dtype else None,
            inputs=tuple(request.inputs) if request.inputs else None,
            map=request.map or "", layers=sizes.layers if sizes else (), config=sizes.config if sizes else {},
            one_of_all="all" in names,
        )  # fmt: skip
        if met is not None:
            options = met.options(options)
        if options.ranks is not None:  # before workers start; ranks that share a GPU also have an order
            check_worlds(options.ranks, target if probes != ["reduction-order"] else "cpu")
        crew.brief(Order.of(probes, impls, options, request.seed))
        jobs = plan_jobs(probes, impls, options)
        plan: dict[str, Any] = {
            "probes": probes,
            "impls": impls,
            "device": target,
            "dtypes": request.dtype,
            "sizes": {"m": request.m, "k": request.k, "n": request.n, "model": sizes.name if sizes else None},
            "ranks": options.ranks,
        }
        plan |= {name: getattr(request, name) for name in ("inputs", "runs", "full", "seed")} | user_sources(impls)
        if left_out:
            plan["left_out"] = left_out
        if request.map:
            plan["map"] = request.map
        if met is not None:
            plan["met"] = {"shapes": met.shapes, "own": met.own, "k": met.k, "n": met.n, "config": met.config}
            plan["met"] |= {"operator": met.operator} if met.operator else {}
        with output.recording("probe", plan, request.seed, len(jobs)) as writer:
            completed = sum(job.key in writer.done for job in jobs)
            count = request.workers or default_workers(target, impls, len(jobs) - completed, ahead)
            shared = SharedRun(crew, jobs, writer.done, count, sink.say)
            with sink.progress() as progress:
                if sink.shown:
                    importlib.import_module("nondet.reports.terminal")  # while others measure
                task = progress.add_task("probing", total=len(jobs), completed=completed)
                for row in shared.rows():
                    writer.write(row)
                    progress.update(task, advance=1, description=f"{row.probe} ({row.impl})")
        return output.present()  # while workers leave the GPU, which takes a while


def _probe_names(names: list[str]) -> list[str]:
    """The probes, each once, in the registry's order if "all" is given. An operator's name means its probe."""
    probes = [OPERATOR_PROBES.get(name.replace("-", "_"), name) for name in names]
    probes = [name.replace("_", "-") if name not in PROBES else name for name in probes]
    for name, given in zip(probes, names, strict=True):
        if name != "all" and name not in PROBES:
            raise UnknownNameError("probe", given, [*PROBES, *OPERATOR_PROBES, "all"])
    return list(PROBES) if "all" in probes else list(dict.fromkeys(probes))


def _as_operator(names: list[str], impls: list[str]) -> list[str]:
    """A user's function is judged as the operator that was named, if any: `nondet probe mean --impl my:mean`. A
    function for the probe's first operator needs no name."""
    operators = [name.replace("-", "_") for name in names if name.replace("-", "_") in OPERATOR_PROBES]
    first = {probe: operator for operator, probe in reversed(OPERATOR_PROBES.items())}
    if len(operators) != 1 or first[OPERATOR_PROBES[operators[0]]] == operators[0]:
        return impls
    return [f"{operators[0]}={impl}" if ":" in impl and "=" not in impl else impl for impl in impls]
