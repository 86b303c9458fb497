"""`nondet sample`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nondet.commands import completion
from nondet.commands import drawing as d
from nondet.commands import endpoint as e
from nondet.commands import options as o
from nondet.commands.common import pick_device, progress_bar, say, set_threads
from nondet.commands.graphs import GRAPHS, check_graphs, load_with_graphs
from nondet.commands.output import Output
from nondet.commands.prompts import COMPLETIONS_MOST, completions_each, encode_all, prompt_texts
from nondet.commands.ranks import RANKS, check_world
from nondet.commands.vary import DRAFT_MODEL, VARY, VaryOptions, check_vary, sample_varied
from nondet.commands.vary import N as VARIED_N
from nondet.errors import UnknownNameError, UserError

if TYPE_CHECKING:
    from nondet.core.launch import FirstUses
    from nondet.core.runfile import RunWriter
    from nondet.sampling.model import LoadedModel
    from nondet.sampling.plan import Load, Plan

__all__ = ["check_side_file", "implementations", "sample"]

# Long enough for most prompts of the embedded model to part, short enough for 1,000 completions in a minute or two.
_MAX_TOKENS = 64
_WHOLE = ("stock", "stock-no-cudnn", "stock-flash", "stock-seeded", "invariant", "unseeded-invariant", "rank-free")
# Rounds run again beside the first, where it alone does not tell the batch from the run.
_SETTLE = 3
# A round has a header's worth of work before its first token; more of them than this is a slip in --load.
_ROUNDS_MOST, _ROUNDS_QUIET = 25_000, 2_000


def sample(
    ctx: typer.Context,
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            help="Completions of each prompt, or of each value with --vary (there 40).",
            show_default="1000 of one prompt; 1000 in all and 20 of each of several; 200 of an endpoint's arm loaded",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="The prompt. Default: the embedded model's.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="Read the prompt from a UTF-8 text file.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="Several prompts: .jsonl (a field), .txt (one a line), .csv or .parquet (a column).",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            "--column",
            help='Field or column of --prompts that holds the prompt. Default: "prompt", or the only one.',
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens of each completion.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Folder, hub name, or random weights such as random:qwen3-12x1024; of an endpoint what the server "
            "calls it. Default: the embedded model; the server's only one.",
            show_default=False,
        ),
    ] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            help="stock, stock-no-cudnn (attention without cuDNN), stock-flash (FlashAttention by request), invariant, "
            "both (stock and invariant), or one family replaced, such as invariant:attention. Where tokens are drawn "
            "also stock-seeded and unseeded-invariant, which tell the draw from the kernels. Repeatable.",
            show_default="both",
            autocompletion=completion.sample_impls,
        ),
    ] = None,
    load: Annotated[
        str,
        typer.Option(
            "--load",
            help='What runs alongside: none, light, default, heavy, or "others=60,budget=256,...".',
            autocompletion=completion.loads,
        ),
    ] = "default",
    cuda_graphs: GRAPHS = None,
    vary: VARY = None,
    draft_model: DRAFT_MODEL = None,
    ranks: RANKS = None,
    temperature: d.TEMPERATURE = 0.0,
    top_k: d.TOP_K = 0,
    top_p: d.TOP_P = 1.0,
    seeds: d.SEEDS = 1,
    endpoint: e.ENDPOINT = None,
    protocol: e.PROTOCOL = "auto",
    arms: e.ARMS = None,
    concurrency: e.CONCURRENCY = None,
    rate: e.RATE = None,
    stream: e.STREAM = True,
    key_env: e.KEY_ENV = None,
    allow_plain_http: e.ALLOW_PLAIN_HTTP = False,
    insecure: e.INSECURE = False,
    ca_file: e.CA_FILE = None,
    compare_endpoint: e.COMPARE_ENDPOINT = None,
    compare_model: e.COMPARE_MODEL = None,
    seed: o.SEED = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    device: o.DEVICE = "auto",
    threads: o.THREADS = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that a model repository brings. Off unless given.")
    ] = False,
    out: o.OUT = None,
    force: o.FORCE = False,
    resume: o.RESUME = False,
    report: o.REPORT = None,
    as_json: o.JSON = False,
    fail_on: o.FAIL_ON = None,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Complete a prompt, or a set of them, N times under a changing load: whether, where and how completions part."""
    e.check_options(endpoint, e.given_options(ctx))
    if n is not None and not 1 <= n <= COMPLETIONS_MOST:
        raise UserError(f"--n {n} makes no sense", "Give the number of completions, from 1 to 1,000,000.")
    samplings = d.samplings_of(temperature, top_k, top_p, seeds)
    impls = implementations(impl, drawn=bool(samplings))
    output = Output.of(
        "sample",
        out=out,
        force=force,
        resume=resume,
        reports=report,
        as_json=as_json,
        fail_on=fail_on,
        verbose=verbose,
        quiet=quiet,
    )
    check_side_file(output)
    texts = prompt_texts(prompt, prompt_file, prompts, column)
    if endpoint is not None:
        e.sample_endpoint(e.EndpointOptions.of(ctx.params), output, texts, model, n, max_tokens, load, seed, samplings)
        return
    axes = check_vary(vary, texts, draft_model)
    world = check_world(ranks, pick_device(device), impls, varied=axes is not None)

    from nondet.sampling.collect import describe
    from nondet.sampling.model import load_model
    from nondet.sampling.plan import build_plan, parse_load
    from nondet.sampling.ranks import check_heads

    wanted = parse_load(load)
    check_graphs(cuda_graphs, load, wanted)
    wanted = wanted if cuda_graphs is None else replace(wanted, graphs=cuda_graphs)
    target = pick_device(device)
    d.check_drawn(impls, bool(samplings), wanted.graphs)
    if samplings and (axes is not None or world > 1):
        other = "--vary" if axes is not None else "--ranks"
        raise UserError(f"{other} and --temperature exclude each other", "Axes and ranks are compared greedily.")
    subjects = len(texts) * max(1, len(samplings))
    each = VARIED_N if axes is not None and n is None else completions_each(n, subjects)
    _check_rounds(each, subjects, wanted)
    _check_device(target, wanted, impls)
    set_threads(threads)
    loaded = load_model(model, dtype, target, trust_remote_code=trust_remote_code)
    length = _MAX_TOKENS if max_tokens is None else max_tokens
    if axes is not None:
        sample_varied(
            VaryOptions(str(texts[0]), each, length, seed, threads, impls, draft_model or ""),
            axes,
            wanted,
            loaded,
            output,
        )
        return
    wanted = load_with_graphs(cuda_graphs, load, wanted, target, loaded.model, plain=not samplings and world == 1)
    tokens = encode_all(loaded, texts, length)
    plan = build_plan(
        wanted,
        n=each,
        seed=seed,
        prompts=tokens,
        samplings=samplings,
        max_new_tokens=length,
        context=loaded.context or 2**31,
        encode=loaded.encode_plain,
    )
    if world > 1:
        check_heads(loaded.name, loaded.model.config, world)
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seeds": seeds} if samplings else None
    listed = d.subjects_of(texts, tokens, samplings)
    described = describe(loaded, plan, prompts=listed, max_new_tokens=length, seed=seed, impls=impls, sampling=drawn)
    if world > 1:
        described["ranks"] = world
    writer = output.open("sample", described, seed)
    with output.measuring(writer):
        _collect(loaded, plan, impls, writer, seed=seed, threads=threads, ranks=world)
    output.present()


def check_side_file(output: Output) -> None:
    """The traces of a run that was moved away are somebody's data, too: only a run that is resumed may go on.

    Raises:
        UserError: they are there, and --force was not given.
    """
    from nondet.core.runfile import begun, check_free
    from nondet.core.traces import traces_path

    side = traces_path(output.path)
    if not (output.resume and begun(output.path)):
        check_free(side, force=output.force, hint="Use --force to overwrite it, or another --out.")


def _check_rounds(n: int, subjects: int, load: Load) -> None:
    """Refuse more rounds than anybody waits for, and say so where drawing them takes a while.

    Raises:
        UserError: as said.
    """
    rounds = -(-n * subjects // load.targets)
    if rounds > _ROUNDS_MOST:
        raise UserError(
            f"--n {n}{f' of {subjects:,} prompts' if subjects > 1 else ''} with targets={load.targets} a round makes "
            f"{rounds:,} rounds",
            f"Stay within {_ROUNDS_MOST:,}: give --load a larger targets=, or a smaller --n.",
        )
    if rounds > _ROUNDS_QUIET:
        say(f"drawing the load plan of {rounds:,} rounds")


def _check_device(device: str, load: Load, impls: list[str]) -> None:
    """Refuse what only CUDA has, before a file is begun.

    Raises:
        UserError: CUDA graphs, or attention that only a GPU has, on a CPU.
    """
    if device == "cuda":
        return
    if load.graphs:
        raise UserError("CUDA graphs need a CUDA device", "Leave them out on a CPU.")
    if "stock-flash" in impls:
        raise UserError("--impl stock-flash needs a CUDA device", "Use --impl stock.")
    if "stock-no-cudnn" in impls:
        raise UserError(
            "--impl stock-no-cudnn needs a CUDA device: there is no cuDNN to switch off", "Use --impl stock."
        )


def _collect(
    loaded: LoadedModel,
    plan: Plan,
    impls: list[str],
    writer: RunWriter,
    *,
    seed: int,
    threads: int | None,
    ranks: int = 1,
) -> None:
    """Sample with a progress bar; where stock parted nowhere, compare its operators at the sizes met and say so."""
    from nondet.core.runfile import read_run
    from nondet.sampling.collect import collect
    from nondet.sampling.shapes import explain_no_divergence, shapes_met

    with progress_bar() as progress:
        tasks = {impl: progress.add_task(impl, total=plan.targets, start=False) for impl in impls}

        def advance(impl: str, done: int, total: int, tokens: int) -> None:
            progress.start_task(tasks[impl])
            progress.update(tasks[impl], completed=done, description=f"{impl}, {tokens} tokens")

        def preparing(impl: str, done: int, total: int, uses: FirstUses) -> None:
            what = "compiling and proving" if done < total - 1 else "playing a first round, off the clock:"
            so_far = f"{done} of {total}, {uses.compiled} kernels and {uses.proofs} proofs so far"
            progress.update(tasks[impl], description=f"{impl}: {what} {so_far}")
            if done == total and uses.seconds >= 1.0:
                what = f"{uses.proofs} proofs and {uses.compiled} compiled kernels"
                say(f"nondet: {impl}: {what} in {uses.seconds:.1f} s, kept for the next run and in no figure.")

        collect(
            loaded, plan, impls, writer, seed=seed, threads=threads, settle=_SETTLE, ranks=ranks, progress=advance,
            preparing=preparing,
        )  # fmt: skip
    if ranks > 1:
        return  # its operators ran at the sizes of a share, which no single process meets
    so_far = read_run(writer.path)
    for impl in impls:
        traces: dict[int, set[str]] = {}
        for c in so_far.completions:
            if c.impl == impl and c.status == "ok":
                traces.setdefault(c.prompt, set()).add(c.trace)
        if impl == "stock" and traces and all(len(seen) == 1 for seen in traces.values()):
            for row in explain_no_divergence(loaded, shapes_met(so_far, impl), impl, seed):
                if row.key not in writer.done:
                    writer.write(row)


def implementations(impls: list[str] | None, *, drawn: bool = False) -> list[str]:
    """The implementations, each once; "both" is stock and invariant, and where tokens are drawn stock-seeded too.

    Raises:
        UserError: an unknown one, or an unknown family after the colon.
    """
    names: list[str] = []
    for name in impls or ["both"]:
        both = ["stock", "stock-seeded", "invariant"] if drawn else ["stock", "invariant"]
        names += both if name == "both" else [name]
    for name in names:
        base, colon, families = name.partition(":")
        if name in _WHOLE:
            continue
        if base != "invariant":
            known = [*_WHOLE, "both", "invariant:FAMILY"]
            raise UnknownNameError("implementation", name, known)
        if colon:
            from nondet.kernels.dispatch.operators import FAMILIES

            for family in families.split("+"):
                if family not in FAMILIES:
                    raise UnknownNameError("operator family", family, FAMILIES)
    return list(dict.fromkeys(names))
