"""`nondet sample`: one prompt or a set, on one device or over ranks, or one thing about the engine varied at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nondet.core.runfile import read_whole
from nondet.errors import UnknownNameError, UserError
from nondet.services import endpoint as e
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, pick_device, set_threads

if TYPE_CHECKING:
    from nondet.core.launch import FirstUses
    from nondet.core.runfile import RunWriter
    from nondet.sampling.axes import Conditions, Subject
    from nondet.sampling.model import LoadedModel
    from nondet.sampling.plan import Load, Plan, Sampling

COMPLETIONS_MOST = 1_000_000
_FILE_MOST = 4 * 2**20  # bytes of --prompt-file, as of one row of --prompts: beyond the context of any model here
# Where --n is not given: of one prompt, and of each of several at least.
_COMPLETIONS, _EACH_LEAST = 1000, 20
# Long enough for most prompts of the embedded model to part, short enough for 1,000 completions in a minute or two.
_MAX_TOKENS = 64
_WHOLE = ("stock", "stock-no-cudnn", "stock-flash", "stock-seeded", "invariant", "unseeded-invariant", "rank-free")
# Rounds run again beside the first, where it alone does not tell the batch from the run.
_SETTLE = 3
# A round has a header's worth of work before its first token; more of them than this is a slip in --load.
_ROUNDS_MOST, _ROUNDS_QUIET = 25_000, 2_000


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """Its panel comes after those of the draw and of an endpoint."""

    seed: o.SEED = 0
    device: o.DEVICE = "auto"
    threads: o.THREADS = None


@dataclass(frozen=True, kw_only=True)
class SampleRequest(o.Drawing, e.EndpointOptions, _Machine, Request):
    """The options of `nondet sample`.

    Raises:
        UserError: options that exclude each other, an --n or a draw that makes no sense.
    """

    n: Annotated[
        int | None,
        o.opt(
            "Completions of each prompt, or of each value with --vary (there 40).",
            shown="1000 of one prompt; 1000 in all and 20 of each of several; 200 of an endpoint's arm loaded",
        ),
    ] = None
    prompt: o.PROMPT = None
    prompt_file: o.PROMPT_FILE = None
    prompts: Annotated[
        Path | None, o.opt("Several prompts: .jsonl (a field), .txt (one a line), .csv or .parquet (a column).")
    ] = None
    column: Annotated[
        str | None, o.opt('Field or column of --prompts that holds the prompt. Default: "prompt", or the only one.')
    ] = None
    max_tokens: Annotated[int | None, o.opt("Tokens of each completion.")] = None
    model: Annotated[
        str | None,
        o.opt(
            "Folder, hub name, or random weights such as random:qwen3-12x1024; of an endpoint what the server "
            "calls it. Default: the embedded model; the server's only one."
        ),
    ] = None
    impl: Annotated[
        list[str] | None,
        o.opt(
            "stock, stock-no-cudnn (attention without cuDNN), stock-flash (FlashAttention by request), invariant, "
            "both (stock and invariant), or one family replaced, such as invariant:attention. Where tokens are drawn "
            "also stock-seeded and unseeded-invariant, which tell the draw from the kernels. Repeatable.",
            shown="both",
            complete=o.sample_impls,
        ),
    ] = None
    load: Annotated[
        str,
        o.opt(
            'What runs alongside: none, light, default, heavy, or "others=60,budget=256,...".',
            shown=True,
            complete=o.loads,
        ),
    ] = "default"
    cuda_graphs: Annotated[
        bool | None,
        o.opt(
            "Run the engine's steps as CUDA graphs, padded to a few sizes, for every implementation alike.",
            "--cuda-graphs/--no-cuda-graphs",
            shown="on for plain dense decoders on CUDA, where nothing is drawn, varied or cut over ranks, "
            "and the load's steps are padded to more than one size",
        ),
    ] = None
    vary: Annotated[
        str | None,
        o.opt(
            "Vary one thing about the engine at a time: sharing, chunk, budget, page, scheduler, preemption, "
            "speculative, routing, graphs, dtype, attention, threads, ranks, or all. Values of your own: chunk=8:16. "
            "--n is then the completions of each value."
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        o.opt("A smaller model of the same tokens, to draft with: --vary speculative=model. Folder or hub name."),
    ] = None
    ranks: Annotated[
        str | None,
        o.opt(
            "Cut the model over that many ranks by its tensor-parallel plan: processes of nondet's own, one a GPU "
            "(NCCL), or on a CPU (gloo). With --impl rank-free its answers do not follow their number.",
            shown="1",
        ),
    ] = None
    dtype: o.MODEL_DTYPE = "bfloat16"
    trust_remote_code: o.TRUST = False

    def __post_init__(self) -> None:
        e.check_options(self.endpoint, self.given)
        if self.n is not None and not 1 <= self.n <= COMPLETIONS_MOST:
            raise UserError(f"--n {self.n} makes no sense", "Give the number of completions, from 1 to 1,000,000.")
        self.samplings()


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


def load_with_graphs(
    given: bool | None, spec: str, load: Load, device: str, model: Any, *, plain: bool, say: Callable[[str], None]
) -> Load:
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
_N_VARIED = 40


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


@dataclass(frozen=True)
class VaryOptions:
    """What a varied run makes of its request.

    Attributes:
        text: The prompt.
        n: Completions of each value.
    """

    text: str
    n: int
    max_tokens: int
    impls: list[str]


def _sample_varied(
    request: SampleRequest, options: VaryOptions, wanted: dict[str, list[str]], load: Load, loaded: LoadedModel,
    output: Output,
) -> None:  # fmt: skip
    """Run the base and every value of every axis under each implementation."""
    from nondet.sampling.axes import Conditions, plan_axes
    from nondet.sampling.collect import arms_of, describe, vary
    from nondet.sampling.plan import build_plan
    from nondet.sampling.speculation import check_draft_model

    base = Conditions(load=load, dtype=loaded.dtype, threads=request.threads)
    prompt, earlier = _texts(loaded, base, options)
    plan = build_plan(
        load, n=options.n, seed=request.seed, prompts=[prompt], max_new_tokens=options.max_tokens,
        context=loaded.context or 2**31, encode=loaded.encode_plain,
    )  # fmt: skip
    axes = plan_axes(wanted, _subject(base, loaded, plan, earlier, request.draft_model or ""))
    given = len(loaded.encode(options.text))
    described = describe(
        loaded,
        plan,
        prompt=options.text,
        prompt_tokens=len(prompt),
        max_new_tokens=options.max_tokens,
        seed=request.seed,
        impls=options.impls,
    ) | {
        "vary": {v.axis.name: [v.base, *(value for value, _ in v.values)] for v in axes},
        "prompt_lengthened_by": len(prompt) - given,
    }
    if request.draft_model:
        described["draft_model"] = check_draft_model(request.draft_model, loaded)
    for v in axes:
        if v.note and not output.sink.quiet:
            output.sink.say(f"--vary {v.axis.name}: {v.note}: left out")
    writer = output.open("sample", described, request.seed)
    total = len(arms_of(base, axes, len(plan.rounds)))
    with output.measuring(writer), output.sink.progress() as progress:
        tasks = {impl: progress.add_task(impl, total=total, start=False) for impl in options.impls}

        def advance(impl: str, arm: str, done: int, arms: int) -> None:
            progress.start_task(tasks[impl])
            progress.update(tasks[impl], completed=done, description=f"{impl} {arm}")

        vary(loaded, plan, base, axes, options.impls, writer, seed=request.seed, progress=advance)


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


def sample(request: SampleRequest, sink: Sink) -> Path:
    """Complete a prompt, or a set of them, N times under a changing load: whether, where and how completions part."""
    samplings = request.samplings()
    impls = implementations(request.impl, drawn=bool(samplings))
    output = Output.of(request, "sample", sink)
    output.check_side_file()
    texts = prompt_texts(request.prompt, request.prompt_file, request.prompts, request.column)
    if request.endpoint is not None:
        e.sample_endpoint(
            request, output, texts, request.model, request.n, request.max_tokens, request.load, request.seed, samplings
        )
        return output.present()
    axes = check_vary(request.vary, texts, request.draft_model)
    target = pick_device(request.device)
    world = check_world(request.ranks, target, impls, varied=axes is not None)

    from nondet.sampling.collect import describe
    from nondet.sampling.model import load_model
    from nondet.sampling.plan import build_plan, parse_load
    from nondet.sampling.ranks import check_heads

    graphs = request.cuda_graphs
    wanted = parse_load(request.load)
    check_graphs(graphs, request.load, wanted)
    wanted = wanted if graphs is None else replace(wanted, graphs=graphs)
    _check_drawn(impls, bool(samplings), wanted.graphs)
    if samplings and (axes is not None or world > 1):
        other = "--vary" if axes is not None else "--ranks"
        raise UserError(f"{other} and --temperature exclude each other", "Axes and ranks are compared greedily.")
    subjects = len(texts) * max(1, len(samplings))
    each = _N_VARIED if axes is not None and request.n is None else completions_each(request.n, subjects)
    _check_rounds(each, subjects, wanted, sink)
    _check_device(target, wanted, impls)
    set_threads(request.threads)
    loaded = load_model(request.model, request.dtype, target, trust_remote_code=request.trust_remote_code)
    length = _MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if axes is not None:
        _sample_varied(request, VaryOptions(str(texts[0]), each, length, impls), axes, wanted, loaded, output)
        return output.present()
    plain = not samplings and world == 1
    wanted = load_with_graphs(graphs, request.load, wanted, target, loaded.model, plain=plain, say=sink.say)
    tokens = encode_all(loaded, texts, length)
    plan = build_plan(
        wanted,
        n=each,
        seed=request.seed,
        prompts=tokens,
        samplings=samplings,
        max_new_tokens=length,
        context=loaded.context or 2**31,
        encode=loaded.encode_plain,
    )
    if world > 1:
        check_heads(loaded.name, loaded.model.config, world)
    drawn = {name: getattr(request, name) for name in ("temperature", "top_k", "top_p", "seeds")} if samplings else None
    listed = _subjects_of(texts, tokens, samplings)
    described = describe(
        loaded, plan, prompts=listed, max_new_tokens=length, seed=request.seed, impls=impls, sampling=drawn
    )
    if world > 1:
        described["ranks"] = world
    writer = output.open("sample", described, request.seed)
    with output.measuring(writer):
        _collect(loaded, plan, impls, writer, sink, seed=request.seed, threads=request.threads, ranks=world)
    return output.present()


def _check_drawn(impls: Sequence[str], drawn: bool, graphs: bool) -> None:
    """Refuse implementations that differ in the draw alone where nothing is drawn, and our draw inside of graphs.

    Raises:
        UserError: as said.
    """
    from nondet.sampling.plan import DRAWN, draws_itself

    for impl in impls:
        if not drawn and impl in DRAWN:
            raise UserError(f"--impl {impl} draws, and greedy completions draw nothing", "Add --temperature 0.8, say.")
        if drawn and graphs and not draws_itself(impl):
            raise UserError(f"--impl {impl} draws in a hook, which a CUDA graph does not run", "Leave CUDA graphs out.")


def _subjects_of(
    texts: Sequence[str], tokens: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> list[dict[str, Any]]:
    """The prompts of a run's header, one for each prompt and seed, in the plan's order."""
    plain = [{"text": str(text), "tokens": len(ids)} for text, ids in zip(texts, tokens, strict=True)]
    return [p | {"seed": s.seed} for p in plain for s in samplings] if samplings else plain


def _check_rounds(n: int, subjects: int, load: Load, sink: Sink) -> None:
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
        sink.say(f"drawing the load plan of {rounds:,} rounds")


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
    sink: Sink,
    *,
    seed: int,
    threads: int | None,
    ranks: int = 1,
) -> None:
    """Sample with a progress bar; where stock parted nowhere, compare its operators at the sizes met and say so."""
    from nondet.core.runfile import read_run
    from nondet.sampling.collect import collect
    from nondet.sampling.shapes import explain_no_divergence, shapes_met

    with sink.progress() as progress:
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
                sink.say(f"nondet: {impl}: {what} in {uses.seconds:.1f} s, kept for the next run and in no figure.")

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
