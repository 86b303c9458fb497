"""`nondet sample`: one prompt or a set, on one device or over ranks, or one thing about the engine varied at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.commands import endpoint as e
from nondet.commands import options as o
from nondet.commands.output import Output, pick_device, progress_bar, say, set_threads
from nondet.core.runfile import read_whole
from nondet.errors import UnknownNameError, UserError

if TYPE_CHECKING:
    from nondet.core.launch import FirstUses
    from nondet.core.runfile import RunWriter
    from nondet.sampling.axes import Conditions, Subject
    from nondet.sampling.model import LoadedModel
    from nondet.sampling.plan import Load, Plan

COMPLETIONS_MOST = 1_000_000
_FILE_MOST = 4 * 2**20  # bytes of --prompt-file, as of one row of --prompts: beyond the context of any model here
# Where --n is not given: of one prompt, and of each of several at least.
_COMPLETIONS, _EACH_LEAST = 1000, 20


def completions_each(n: int | None, subjects: int) -> int:
    """Completions of each subject, from --n or its default.

    Raises:
        UserError: more of them in all than a run file holds.
    """
    each = n if n is not None else _COMPLETIONS if subjects == 1 else max(_EACH_LEAST, _COMPLETIONS // subjects)
    if each * subjects > COMPLETIONS_MOST:
        raise UserError(
            f"--n {each} of {subjects:,} prompts and seeds makes {each * subjects:,} completions",
            f"Stay within {COMPLETIONS_MOST:,}: a smaller --n, or fewer prompts.",
        )
    return each


def encode_all(loaded: LoadedModel, texts: Sequence[str], length: int) -> list[list[int]]:
    """Token ids of the prompts.

    Raises:
        UserError: one has no tokens, or does not fit the context with its completion; of a file, its place is named.
    """
    from nondet.sampling.model import check_lengths

    ids = []
    for text in texts:
        tokens = loaded.encode(text)
        try:
            check_lengths(loaded, tokens, length)
        except UserError as error:
            place = getattr(text, "place", "")
            raise (UserError(f"{place}: {error.what}", error.hint) if place else error) from None
        ids.append(tokens)
    return ids


def prompt_texts(prompt: str | None, file: Path | None, prompts: Path | None, column: str | None) -> Sequence[str]:
    """The prompts: those of a set, or the one.

    Raises:
        UserError: as `prompt_text` and `nondet.sampling.plan.load_prompts`, or prompts named twice.
    """
    if prompts is None:
        if column is not None:
            raise UserError("--column belongs to --prompts", "Give a file of prompts, or leave it out.")
        return [prompt_text(prompt, file)]
    if prompt is not None or file is not None:
        raise UserError("--prompts excludes --prompt and --prompt-file", "Put that prompt into the file.")
    from nondet.sampling.plan import load_prompts

    return load_prompts(prompts, column)


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The text of the prompt.

    Raises:
        UserError: two prompts, an empty one, or a file that is none, too large, or can't be read as UTF-8.
    """
    if prompt is not None and file is not None:
        raise UserError("--prompt and --prompt-file exclude each other", "Give one prompt.")
    if file is not None:
        try:
            text = read_whole(file, _FILE_MOST).decode("utf-8")
        except FileNotFoundError:
            raise UserError(f"no prompt file at {file}", "Check the path.") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text (byte {error.start})", "Save it as UTF-8.") from error
        except OSError as error:
            raise UserError(f"can't read {file}: {error.strerror}", "Give a readable text file.") from error
    elif prompt is not None:
        text = prompt
    else:
        from nondet.embedded import DEFAULT_PROMPT

        text = DEFAULT_PROMPT
    if not text.strip():
        raise UserError("the prompt is empty", "Give some text.")
    return text


GRAPHS = Annotated[
    bool | None,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="Run the engine's steps as CUDA graphs, padded to a few sizes, for every implementation alike.",
        show_default="on for plain dense decoders on CUDA, where nothing is drawn, varied or cut over ranks, "
        "and the load's steps are padded to more than one size",
    ),
]


def check_graphs(given: bool | None, spec: str, load: Load) -> None:
    """Refuse an option that the load contradicts.

    Raises:
        UserError: as said.
    """
    if given is not None and names_graphs(spec) and given != load.graphs:
        option = "--cuda-graphs" if given else "--no-cuda-graphs"
        raise UserError(f"{option} and --load {spec} contradict each other", "Leave one of the two out.")


def names_graphs(spec: str) -> bool:
    """Whether `--load` says itself what is to be."""
    return any(part.partition("=")[0].strip() == "graphs" for part in spec.split(","))


def load_with_graphs(given: bool | None, spec: str, load: Load, device: str, model: Any, *, plain: bool) -> Load:
    """The load, its steps as CUDA graphs where that was asked for, or where nobody said and they can be.

    Args:
        plain: Whether nothing is drawn, varied or cut over ranks.
    """
    from nondet.sampling.engine import query_step, why_no_graphs

    if given is not None or names_graphs(spec) or device != "cuda" or not plain:
        return load if given is None else replace(load, graphs=given)
    reason = why_no_graphs(model.config)
    if not reason and query_step(load.requests, load.budget) >= load.budget:
        # no product would meet another number of rows: what the run is to show could not come out
        reason = "as CUDA graphs all of them would be padded to one size"
    if reason:
        say(f"steps are launched one by one: {reason}")
        return load
    say("steps run as CUDA graphs, padded to a few sizes; --no-cuda-graphs launches them one by one")
    return replace(load, graphs=True)


RANKS = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        help="Cut the model over that many ranks by its tensor-parallel plan: processes of nondet's own, one a GPU "
        "(NCCL), or on a CPU (gloo). With --impl rank-free its answers do not follow their number.",
        show_default="1",
    ),
]


def check_world(text: str | None, device: str, impls: list[str], *, varied: bool) -> int:
    """The number of ranks, before anything is loaded.

    Raises:
        UserError: no single number, ranks that can't be had, an implementation that ranks lack, or --vary beside it.
    """
    if text is None:
        return 1
    from nondet.ranks.group import check_ranks, parse_ranks
    from nondet.sampling.ranks import RANK_WAYS, check_loader

    worlds = parse_ranks(text) or ()
    if varied:
        raise UserError("--ranks and --vary exclude each other", "Write --vary ranks=2 to have both in one run.")
    if len(worlds) != 1:
        raise UserError(f"--ranks {text} is several numbers", "Give one, or --vary ranks=2:4 for several.")
    if worlds == (1,):
        return 1
    import torch

    check_loader()
    check_ranks(worlds, device, torch.cuda.device_count() if device == "cuda" else 0)
    for impl in impls:
        if impl not in RANK_WAYS:
            raise UserError(f"--impl {impl} is not to be had over ranks", f"Use {', '.join(RANK_WAYS)}.")
    return worlds[0]


# Completions of each value of each axis: one round of the default load.
N = 40
VARY = Annotated[
    str | None,
    typer.Option(
        "--vary",
        help="Vary one thing about the engine at a time: sharing, chunk, budget, page, scheduler, preemption, "
        "speculative, routing, graphs, dtype, attention, threads, ranks, or all. Values of your own: chunk=8:16. "
        "--n is then the completions of each value.",
        show_default=False,
    ),
]
DRAFT_MODEL = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="A smaller model of the same tokens, to draft with: --vary speculative=model. Folder or hub name.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class VaryOptions:
    """The options of `nondet sample` that a varied run shares.

    Attributes:
        text: The prompt.
        n: Completions of each value.
    """

    text: str
    n: int
    max_tokens: int
    seed: int
    threads: int | None
    impls: list[str]
    draft_model: str = ""


def check_vary(spec: str | None, prompts: Sequence[str], draft_model: str | None = None) -> dict[str, list[str]] | None:
    """The axes that were named, before anything is loaded; None where none is to be varied.

    Raises:
        UserError: as `nondet.sampling.axes.parse_vary` says, several prompts, or a draft model for nothing.
    """
    from nondet.sampling.axes import parse_vary

    if spec is None:
        if draft_model is not None:
            raise UserError("--draft-model without --vary", "Add --vary speculative.")
        return None
    if len(prompts) > 1:
        raise UserError(f"--vary takes one prompt, and --prompts has {len(prompts):,}", "Give one with --prompt.")
    wanted = parse_vary(spec)
    values = wanted.get("speculative", wanted.get("all"))
    if draft_model is not None and (values is None or (values and "model" not in values)):
        raise UserError("--draft-model drafts in --vary speculative=model alone", "Add speculative to --vary.")
    return wanted


def sample_varied(
    options: VaryOptions, wanted: dict[str, list[str]], load: Load, loaded: LoadedModel, output: Output
) -> None:
    """Run the base and every value of every axis under each implementation, and present what was found."""
    from nondet.sampling.axes import Conditions, plan_axes
    from nondet.sampling.collect import arms_of, describe, vary
    from nondet.sampling.speculation import check_draft_model

    base = Conditions(load=load, dtype=loaded.dtype, threads=options.threads)
    prompt, earlier = _texts(loaded, base, options)
    plan = _plan(loaded, load, prompt, options)
    axes = plan_axes(wanted, _subject(base, loaded, plan, earlier, options.draft_model))
    given = len(loaded.encode(options.text))
    described = describe(
        loaded,
        plan,
        prompt=options.text,
        prompt_tokens=len(prompt),
        max_new_tokens=options.max_tokens,
        seed=options.seed,
        impls=options.impls,
    ) | {
        "vary": {v.axis.name: [v.base, *(value for value, _ in v.values)] for v in axes},
        "prompt_lengthened_by": len(prompt) - given,
    }
    if options.draft_model:
        described["draft_model"] = check_draft_model(options.draft_model, loaded)
    for v in axes:
        if v.note and not output.quiet:
            say(f"--vary {v.axis.name}: {v.note}: left out")
    writer = output.open("sample", described, options.seed)
    total = len(arms_of(base, axes, len(plan.rounds)))
    with output.measuring(writer), progress_bar() as progress:
        tasks = {impl: progress.add_task(impl, total=total, start=False) for impl in options.impls}

        def advance(impl: str, arm: str, done: int, arms: int) -> None:
            progress.start_task(tasks[impl])
            progress.update(tasks[impl], completed=done, description=f"{impl} {arm}")

        vary(loaded, plan, base, axes, options.impls, writer, seed=options.seed, progress=advance)
    output.present()


def _texts(loaded: LoadedModel, base: Conditions, options: VaryOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompt, made long enough, and the earlier text that is edited: from one completion alone, under stock.

    Raises:
        UserError: the model can't hold them, or the engine refuses it.
    """
    from nondet.sampling.engine import pinned, run_session
    from nondet.sampling.model import check_lengths
    from nondet.sampling.plan import LONG, PRESETS, Request, earlier_text, long_prompt

    tokens = loaded.encode(options.text)
    check_lengths(loaded, tokens, options.max_tokens)
    more = max(0, LONG - len(tokens))
    context = loaded.context or 2**31
    length = min(options.max_tokens + more, context - len(tokens))
    with pinned(base.threads):
        alone = run_session(loaded.model, [Request("t0", True, tuple(tokens), length, 0)], PRESETS["none"])
    if alone.outcomes[0].reason:
        raise UserError(f"the prompt alone failed: {alone.outcomes[0].reason}", "Choose another prompt or model.")
    whole = (*tokens, *alone.outcomes[0].token_ids)
    prompt = long_prompt(tokens, whole[len(tokens) :], context - options.max_tokens + 1)
    check_lengths(loaded, prompt, options.max_tokens)
    return prompt, earlier_text(whole[len(prompt) :])


def _plan(loaded: LoadedModel, load: Load, prompt: tuple[int, ...], options: VaryOptions) -> Plan:
    from nondet.sampling.plan import build_plan

    return build_plan(
        load, n=options.n, seed=options.seed, prompts=[prompt], max_new_tokens=options.max_tokens,
        context=loaded.context or 2**31, encode=loaded.encode_plain,
    )  # fmt: skip


def _subject(base: Conditions, loaded: LoadedModel, plan: Plan, earlier: tuple[int, ...], draft_model: str) -> Subject:
    import torch

    from nondet.sampling.axes import Subject
    from nondet.sampling.speculation import has_halves

    requests: list[Any] = [request for requests in plan.rounds for request in requests]
    text = loaded.model.config.get_text_config()
    heads = math.gcd(getattr(text, "num_attention_heads", 0), getattr(text, "num_key_value_heads", 0))
    gpus = torch.cuda.device_count() if loaded.device == "cuda" else 0
    halves = has_halves(loaded.model)
    return Subject(base, loaded.device, requests, torch.get_num_threads(), earlier, gpus, heads, halves, draft_model)


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
            autocompletion=o.sample_impls,
        ),
    ] = None,
    load: Annotated[
        str,
        typer.Option(
            "--load",
            help='What runs alongside: none, light, default, heavy, or "others=60,budget=256,...".',
            autocompletion=o.loads,
        ),
    ] = "default",
    cuda_graphs: GRAPHS = None,
    vary: VARY = None,
    draft_model: DRAFT_MODEL = None,
    ranks: RANKS = None,
    temperature: o.TEMPERATURE = 0.0,
    top_k: o.TOP_K = 0,
    top_p: o.TOP_P = 1.0,
    seeds: o.SEEDS = 1,
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
    samplings = o.samplings_of(temperature, top_k, top_p, seeds)
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
    o.check_drawn(impls, bool(samplings), wanted.graphs)
    if samplings and (axes is not None or world > 1):
        other = "--vary" if axes is not None else "--ranks"
        raise UserError(f"{other} and --temperature exclude each other", "Axes and ranks are compared greedily.")
    subjects = len(texts) * max(1, len(samplings))
    each = N if axes is not None and n is None else completions_each(n, subjects)
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
    listed = o.subjects_of(texts, tokens, samplings)
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
