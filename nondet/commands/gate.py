"""`nondet gate`, of a model here or of a server."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nondet.commands import endpoint as e
from nondet.commands import options as o
from nondet.commands.endpoint import EndpointOptions, reach
from nondet.commands.output import Output, progress_bar, say
from nondet.core.runfile import check_free
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.core.records import Run
    from nondet.sampling.plan import Sampling
    from nondet.verdict.gate import Decision

_LOADS_MOST = 20_000


def ask_endpoint(
    options: EndpointOptions,
    output: Output,
    prompts: Sequence[str],
    model: str | None,
    samplings: Sequence[Sampling] = (),
    *,
    rate: float,
    confidence: float,
    by: str,
    max_tokens: int,
    load: str,
    seed: int,
) -> Run:
    """Ask the server, and give the run that it was written to.

    Args:
        samplings: How tokens are drawn, one for each seed; empty for greedy requests. A prompt with a seed is asked as
            a prompt of its own: only answers of equal seeds are compared.

    Raises:
        UserError: options that make no sense, a server that gives no completion, or where tokens are drawn one that is
            not shown to keep to a seed.
        ServerStoppedError: it stopped answering; what was finished is on disk.
    """
    from nondet.core.runfile import read_run
    from nondet.core.traces import traces_path
    from nondet.endpoint.arms import Settings, build_arms, describe, parse_endpoint_load
    from nondet.endpoint.collect import SOLO, Watcher, collect, loaded_each
    from nondet.sampling.plan import background_text

    if not 1 <= max_tokens <= 1_000_000:
        raise UserError(f"--max-tokens {max_tokens} makes no sense", "Give the tokens of each completion.")
    texts = [text for text in prompts for _ in range(max(1, len(samplings)))]
    wanted = parse_endpoint_load(load)
    each = loaded_each(wanted, len(texts), rate, confidence, by)
    if each * len(texts) // wanted.targets > _LOADS_MOST:
        raise UserError(
            f"--rate {rate:g} with {confidence:.0%} takes more than {_LOADS_MOST:,} loads",
            "Give a larger --rate, or --by request.",
        )
    servers = options.servers(model)
    plan = build_arms(
        {"solo": SOLO, "loaded": each},
        wanted,
        prompts=len(texts),
        max_tokens=max_tokens,
        seed=seed,
        texts=background_text(),
    )
    settings = Settings.drawn(prompts, max_tokens, samplings)
    described = describe(servers, plan, settings, wanted, seed=seed, protocol=options.protocol, stream=options.stream)
    described["gate"] = {"rate": rate, "confidence": confidence, "by": by}
    reach(servers, cuts=settings.top_k > 0)
    writer = output.open("gate", described, seed)
    watcher = Watcher(rate, confidence, by, len(texts))
    try:
        with output.measuring(writer), progress_bar() as progress:
            task = progress.add_task("asking", total=sum(r.targets for r in plan.rounds))

            def advance(_: str, arm: str, done: int) -> None:
                progress.update(task, completed=done, description=f"{arm}, {watcher.loads} loads")

            collect(servers, plan, settings, writer, progress=advance, enough=watcher.enough, seeded=bool(samplings))
    except UserError:
        if not writer.done and not writer.resumed:
            for path in (output.path, traces_path(output.path)):
                path.unlink(missing_ok=True)
        raise
    return read_run(output.path)


_POWER = "Power"
PANEL = "Endpoint"
_OF_A_SERVER = (
    "model", "prompt", "prompts", "max_tokens", "load", "protocol", "stream", "key_env", "allow_plain_http", "insecure",
    "ca_file", "temperature", "top_k", "top_p", "seeds", "seed", "out", "resume",
)  # fmt: skip
_RATE, _CONFIDENCE = 0.1, 0.95


def gate(
    ctx: typer.Context,
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Run file to judge.", show_default=False)] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl", help="Judge this implementation alone, e.g. invariant. Repeatable.", show_default="all of the run"
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            help='A rate of divergence that must have been seen: "1%" or 0.01.',
            show_default="10%",
            rich_help_panel=_POWER,
        ),
    ] = None,
    confidence: Annotated[
        str | None,
        typer.Option("--confidence", help="How surely.", show_default="95%", rich_help_panel=_POWER),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            help='What the rate is of: "load", or "request", which takes requests of one load as independent.',
            show_default="load",
            autocompletion=o.choices("load", "request"),
            rich_help_panel=_POWER,
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            help="Ask this server, until it diverges or the power is reached.",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="What the server calls it.", show_default="its only one", rich_help_panel=PANEL),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="The prompt.", show_default=False, rich_help_panel=PANEL)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="A file of prompts: .txt, .jsonl, .csv, .parquet.",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Tokens of each completion.", rich_help_panel=PANEL)
    ] = 64,
    load: Annotated[
        str,
        typer.Option(
            "--load",
            help='light, default, heavy, or "others=16,targets=4,...": many short loads tell most.',
            rich_help_panel=PANEL,
        ),
    ] = "light",
    protocol: e.PROTOCOL = "auto",
    stream: e.STREAM = True,
    key_env: e.KEY_ENV = None,
    allow_plain_http: e.ALLOW_PLAIN_HTTP = False,
    insecure: e.INSECURE = False,
    ca_file: e.CA_FILE = None,
    temperature: o.TEMPERATURE = 0.0,
    top_k: o.TOP_K = 0,
    top_p: o.TOP_P = 1.0,
    seeds: Annotated[
        int,
        typer.Option("--seeds", help="Seeds, 0 and up, with which each prompt is asked.", rich_help_panel=o.PANEL),
    ] = 1,
    seed: o.SEED = 0,
    out: o.OUT = None,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", help="Write JUnit XML.", show_default=False, rich_help_panel=o.OUTPUT),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            "--summary",
            help="Append a markdown summary to this file.",
            show_default="$GITHUB_STEP_SUMMARY",
            rich_help_panel=o.OUTPUT,
        ),
    ] = None,
    force: o.FORCE = False,
    resume: o.RESUME = False,
    as_json: o.JSON = False,
    quiet: o.QUIET = False,
) -> None:
    """Open or shut on a run: 3 where it diverged or is wrong, 4 where too little was compared for the power asked."""
    from nondet.verdict.gate import decide

    started = time.perf_counter()
    asked = rate is not None or confidence is not None or by is not None
    power = {
        "rate": _RATE if rate is None else _share("--rate", rate),
        "confidence": _CONFIDENCE if confidence is None else _share("--confidence", confidence),
    }
    if by not in (None, "load", "request"):
        raise UserError(f"unknown --by {by!r}", "Known: load, request.")
    if junit is not None:
        check_free(junit, force=force or resume)
    if (run is None) == (endpoint is None):
        raise UserError("gate judges a run file or a server", "Name a run file, or give --endpoint URL.")
    _check_given(ctx, endpoint)
    unit = by or "load"

    from nondet.core.runfile import read_run

    if run is not None:
        records = read_run(run)
    else:
        from nondet.commands.sample import check_side_file, prompt_texts

        options = e.EndpointOptions(
            str(endpoint), protocol=protocol, stream=stream, key_env=key_env, allow_plain_http=allow_plain_http,
            insecure=insecure, ca_file=ca_file,
        )  # fmt: skip
        output = Output.of("gate", out=out, force=force, resume=resume, reports=None, as_json=False, fail_on=None)
        check_side_file(output)
        samplings = o.samplings_of(temperature, top_k, top_p, seeds)
        texts = prompt_texts(prompt, None, prompts, None)
        records = ask_endpoint(
            options, output, texts, model, samplings, by=unit, max_tokens=max_tokens, load=load, seed=seed, **power
        )
        if not quiet:
            say(f"run file: {output.path}")
    decision = decide(records, impls=impl or (), by=unit, asked=asked, **power)
    _write(decision, records, junit, summary, time.perf_counter() - started)
    _print(decision, records, as_json=as_json, quiet=quiet)
    if decision.code:
        raise typer.Exit(decision.code)


def _check_given(ctx: typer.Context, endpoint: str | None) -> None:
    """Refuse options of a server where there is none.

    Raises:
        UserError: as said.
    """
    if endpoint is None:
        for name in _OF_A_SERVER:
            if name in e.given_options(ctx):
                raise UserError(f"--{name.replace('_', '-')} without --endpoint", "A run file has been asked already.")


def _share(flag: str, word: str) -> float:
    """ "1%" or 0.01.

    Raises:
        UserError: not a number between 0 and 1.
    """
    number = word.strip().removesuffix("%").strip()
    try:
        value = float(number) / (100.0 if word.strip().endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 1e-9 <= value <= 1 - 1e-9:
        raise UserError(f"{flag} {word!r} is no rate", 'Give one between 0 and 1, like "1%" or 0.01.')
    return value


def _write(decision: Decision, run: Run, junit: Path | None, summary: Path | None, seconds: float) -> None:
    """JUnit XML and the step summary.

    Raises:
        UserError: a path that can't be written.
    """
    from nondet.core.runfile import append_text, replace_text
    from nondet.reports import gate as gate_text

    if junit is not None:
        replace_text(junit, gate_text.junit(decision, run, seconds))
    target = summary or (Path(named) if (named := os.environ.get("GITHUB_STEP_SUMMARY")) else None)
    if target is not None:
        append_text(target, gate_text.summary(decision, run))


def _print(decision: Decision, run: Run, *, as_json: bool, quiet: bool) -> None:
    from nondet.commands.output import drop_stdout, put
    from nondet.reports import gate as gate_text

    lines = [gate_text.as_json(decision)] if as_json else gate_text.text(decision, run)
    try:
        put(lines[-1:] if quiet else lines, as_json=as_json)
    except BrokenPipeError:
        drop_stdout()
    except OSError as error:
        drop_stdout()
        say(f"nondet: can't write to stdout: {error.strerror or error}")
