"""`nondet replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.commands import options as o
from nondet.commands.common import pick_device, say, set_threads
from nondet.commands.output import Output
from nondet.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nondet.core.records import Completion, Replayed, Run
    from nondet.sampling.model import LoadedModel

__all__ = ["load_recorded", "replay", "threads_of"]


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run file of `nondet sample`.")],
    request: Annotated[
        list[str],
        typer.Option(
            "--request", help='Id of a completion, as t000017, or "divergent" for all of the rarer traces. Repeatable.'
        ),
    ],
    impl: Annotated[
        str | None,
        typer.Option("--impl", help="Which of the run's implementations.", show_default="stock, or the only one"),
    ] = None,
    solo: Annotated[bool, typer.Option("--solo", help="Also with nobody else there.")] = False,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Also find the smallest company in which it still parts from itself alone.")
    ] = False,
    most: Annotated[
        int | None, typer.Option("--most", min=1, help="Play at most this many completions.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Where the model is now, if it has moved.", show_default="as the run names it"),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.", show_default="the run's")] = None,
    threads: o.THREADS = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that a model repository brings. Off unless given.")
    ] = False,
    out: o.OUT = None,
    force: o.FORCE = False,
    resume: o.RESUME = False,
    report: o.REPORT = None,
    as_json: o.JSON = False,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Play recorded completions again, bit for bit: as they were, alone, and in the smallest company that parts."""
    from nondet.core.runfile import read_run
    from nondet.sampling.replay import select_completions

    output = Output.of(
        "replay",
        out=out,
        force=force,
        resume=resume,
        reports=report,
        as_json=as_json,
        fail_on=None,
        verbose=verbose,
        quiet=quiet,
    )
    recorded = read_run(run, allow_truncated=True)
    wanted = select_completions(recorded, request, impl)[:most]
    if not wanted:
        raise UserError(f"no completion of {run} has a rarer trace", "Name one with --request.")
    loaded = load_recorded(recorded, model, device, trust_remote_code=trust_remote_code)
    set_threads(threads_of(recorded) if threads is None and loaded.device == "cpu" else threads)
    plan = {
        "run": str(run),
        "requests": [c.request for c in wanted],
        "impl": wanted[0].impl,
        "model": {"name": loaded.name, **loaded.identity},
        "device": loaded.device,
        "dtype": loaded.dtype,
        "solo": solo,
        "shrink": shrink,
    }
    written: list[Replayed] = []
    writer = output.open("replay", plan, int(recorded.header.plan.get("seed", 0)))
    with output.measuring(writer, len(wanted) * (1 + solo + shrink)):
        for record in _played(recorded, run, loaded, wanted, writer.done, solo=solo, shrink=shrink):
            writer.write(record)
            written.append(record)
            say(record.sentence)
    output.present(notes=lambda _: _notes(written))
    if any(r.how == "as recorded" and not r.same for r in written):
        raise typer.Exit(1)


def load_recorded(recorded: Run, model: str | None, device: str | None, *, trust_remote_code: bool) -> LoadedModel:
    """The model of a recorded run, at its dtype, with its weights.

    Raises:
        UserError: the run names none, the model is gone, or its weights are others.
    """
    from nondet.sampling.model import EMBEDDED, load_model

    plan = recorded.header.plan
    described = plan.get("model")
    if not isinstance(described, dict) or not isinstance(described.get("name"), str) or not recorded.completions:
        raise UserError(f"{recorded.source} is no run of `nondet sample`", "Give a run file that holds completions.")
    name = model or described["name"]
    loaded = load_model(
        None if name == EMBEDDED else name,
        str(plan.get("dtype", "bfloat16")),
        pick_device(device or str(plan.get("device", "auto"))),
        trust_remote_code=trust_remote_code,
    )
    _check_identity(loaded, described, recorded.source)
    return loaded


def _check_identity(loaded: LoadedModel, described: dict[str, Any], source: str) -> None:
    for key, value in loaded.identity.items():
        if key in described and described[key] != value:
            raise UserError(
                f"{loaded.name} is not the model of {source}: {key} is {value}, and was {described[key]}",
                "Load the model that the run was made with: --model.",
            )


def threads_of(recorded: Run) -> int | None:
    """The CPU threads of a recorded run: they change bits."""
    threads = recorded.header.environment.get("num_threads")
    return threads if isinstance(threads, int) else None


def _played(
    recorded: Run, path: Path, loaded: LoadedModel, wanted: list[Completion], done: set[tuple[str, ...]], *,
    solo: bool, shrink: bool,
) -> Iterable[Replayed]:  # fmt: skip
    """Round by round, so that completions of one round share a session."""
    from nondet.core.compare import weights_digest
    from nondet.core.traces import read_traces
    from nondet.sampling.implementations import implementation
    from nondet.sampling.plan import make_engine
    from nondet.sampling.replay import Player, check_weights, tape_of

    traces, _ = read_traces(path)
    weights = weights_digest(loaded.model)
    rounds: dict[int, list[Completion]] = {}
    for completion in wanted:
        rounds.setdefault(completion.round, []).append(completion)
    with implementation(wanted[0].impl):
        for completions in rounds.values():
            tape = tape_of(recorded, completions[0])
            check_weights(tape, loaded, weights, recorded.source)
            player = Player(make_engine("transformers", loaded.model), tape)
            missing = [c for c in completions if ("replayed", c.impl, c.request, "as recorded") not in done]
            if missing:
                yield from player.as_recorded(missing, traces)
            for completion in completions:
                if solo and ("replayed", completion.impl, completion.request, "alone") not in done:
                    yield player.alone(completion, traces)
                if shrink and ("replayed", completion.impl, completion.request, "shrunk") not in done:
                    yield player.shrunk(completion, traces)


def _notes(written: list[Replayed]) -> Iterable[str]:
    again = [r for r in written if r.how == "as recorded"]
    if again:
        yield f"{sum(r.same for r in again)} of {len(again)} completions came again bit for bit"
