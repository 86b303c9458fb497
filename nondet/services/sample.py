"""`nondet sample`: one prompt or a set, on one device or over ranks, or one setting of the engine changed at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nondet.core.runfile import read_whole
from nondet.embedded import DEFAULT_PROMPT
from nondet.errors import UnknownNameError, UserError
from nondet.ranks.group import parse_ranks
from nondet.sampling.plan import DRAWN, UNSEEDED, Notes, load_prompts, long_prompts, parse_load
from nondet.services import endpoint as e
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, check_worlds, pick_device

if TYPE_CHECKING:
    from rich.progress import Progress

    from nondet.core.launch import FirstUses
    from nondet.core.records import Completion
    from nondet.core.runfile import RunWriter
    from nondet.sampling.axes import Varied
    from nondet.sampling.collect import Host, Survey
    from nondet.sampling.model import LoadedModel
    from nondet.sampling.plan import Load

COMPLETIONS_MOST = 1_000_000
_FILE_MOST = 4 * 2**20  # bytes of --prompt-file, as of one row of --prompts: beyond the context of any model here
# Completions without --n: for one prompt, and for each of several at least. 30 rounds of the default load: `gate`
# needs 29 loads by default, and the first is what the others are compared with.
_COMPLETIONS, _EACH_LEAST = 1200, 20
_N_VARIED = 40  # completions of each value of each axis: one round of the default load
# Completions of the arm loaded of a server: for one prompt; for each of many at least the second.
_N_LOADED, _N_LOADED_LEAST = 200, 10
_ARMS = "solo,cold,warm,chunked,loaded"
_QUICK = "solo=3,cold=2,warm=2,chunked=1,equal=8,loaded=8"  # of each prompt: of three 72, 21 one at a time
# Options of nondet's own engine, which a server decides for itself.
_OWN_ENGINE = (
    *("impl", "dtype", "device", "threads", "trust_remote_code"),
    *("vary", "turns", "draft_model", "ranks", "cuda_graphs", "engine"),
)
# Most prompts of the embedded model have diverged by then; it takes about a minute on two cores.
_MAX_TOKENS = 40
_WHOLE = ("stock", "stock-no-cudnn", "stock-flash", "stock-seeded", "invariant", "unseeded-invariant", "rank-free")
# Rounds to repeat besides the first, where it does not distinguish the batch from the run.
_SETTLE = 3
_ROUNDS_MOST = 25_000  # a round has fixed work before its first token; more of them is a mistake in --load


@dataclass(frozen=True, kw_only=True)
class SampleRequest(o.Drawing, e.EndpointOptions, o.ModelOptions, Request):
    """The options of `nondet sample`."""

    n: int | None = o.own(
        "Completions of each prompt; with --vary, of each value.",
        shown="1200 in all, at least 20 of each; 40 with --vary; with --endpoint 200 in all, at least 10 of each",
        check=o.Range(1, COMPLETIONS_MOST, "Give the number of completions, from 1 to 1,000,000."),
    )
    prompt: o.PROMPT = None
    prompt_file: o.PROMPT_FILE = None
    prompts: Path | None = o.own("File of prompts: .jsonl (a field), .txt (one per line), .csv or .parquet (a column).")
    column: str | None = o.own("Field or column of --prompts that holds the prompt.", shown='"prompt", or the only one')
    max_tokens: int | None = o.own("Tokens in each completion.", shown=str(_MAX_TOKENS))
    model: str | None = o.own(
        "Folder, hub name, random weights such as random:qwen3-12x1024, or with --endpoint the server's name.",
        shown="the embedded model, or the server's",
    )
    impl: list[str] | None = o.own(
        "stock, stock-no-cudnn (attention without cuDNN), stock-flash (FlashAttention), invariant, both (stock and "
        "invariant), or one family, such as invariant:attention. With --temperature also stock-seeded and "
        "unseeded-invariant, which separate the drawing of tokens from the kernels. Repeatable.",
        shown="both",
        complete=o.SAMPLE_IMPLS,
    )
    engine: o.ENGINE = "transformers"
    load: str = o.own(
        'Concurrent requests: none, light, default, heavy, or "others=60,budget=256,...".',
        default="default",
        complete=o.LOADS,
    )
    cuda_graphs: bool | None = o.own(
        "Run the engine's steps as CUDA graphs, padded to a few sizes, for every implementation.",
        "--cuda-graphs/--no-cuda-graphs",
        shown="on for plain dense decoders on CUDA, if tokens are greedy, without --vary and --ranks, and if the "
        "load's steps are padded to more than one size",
    )
    turns: bool = o.own("Let implementations take turns, round by round, to compare speed.", default=False)
    vary: str | None = o.own(
        f"Change one setting of the engine at a time: {', '.join(o.AXES.names[:-1])}, or all. With your own "
        "values: chunk=8:16."
    )
    draft_model: str | None = o.own(
        "Smaller model with the same tokens, which drafts for --vary speculative=model. Folder or hub name."
    )
    quick: bool = o.own(
        "With --endpoint: some dozen requests, most often in less than a minute, and ten lines to paste into an issue.",
        default=False,
        panel=e.PANEL,
    )
    ranks: str | None = o.own(
        "Split the model over this many ranks by its tensor-parallel plan: nondet's own processes, one per GPU "
        "(NCCL), or on a CPU (gloo). With --impl rank-free its answers do not depend on their number.",
        shown="1",
    )

    def _check(self) -> None:
        impls, drawn = self.impls, bool(self.samplings)
        if self.compare_endpoint is None and self.compare_model is not None:
            raise UserError("--compare-model without --compare-endpoint", "Name the second server.")
        if self.endpoint is not None:
            self.refuse(_OWN_ENGINE, "--endpoint and {} exclude each other", "The server decides that for itself.")
            if self.max_tokens is not None:
                e.LENGTHS.check("--max-tokens", self.max_tokens)
            self.refuse(("n", "arms") if self.quick else (), "--quick and {} exclude each other", "Leave one out.")
            return
        if self.engine in o.ENGINES:
            others = ("draft_model", "ranks", "temperature", "trust_remote_code", "turns")
            self.refuse(others, f"--engine {self.engine} and {{}} exclude each other", "It is greedy, on one device.")
        for name in (part.partition("=")[0].strip() for part in (self.vary or "").split(",")):
            if name:  # an empty part has its own message
                o.AXES.check("--vary", name)
        alone = ["quick", *(field.name for field in fields(e.EndpointOptions) if field.name != "endpoint")]
        self.refuse(alone, "{} without --endpoint", "Name the server: --endpoint URL.")
        world, load = self.world, self.engine_load
        if self.turns and (self.vary is not None or len(impls) < 2):
            what = "--vary" if self.vary is not None else f"one --impl, {impls[0]},"
            raise UserError(f"--turns and {what} exclude each other", "Several implementations can take turns.")
        if drawn and (self.vary is not None or world > 1):
            other = "--vary" if self.vary is not None else "--ranks"
            raise UserError(f"{other} and --temperature exclude each other", "Axes and ranks are compared greedily.")
        for impl in impls:
            if not drawn and impl in DRAWN:
                what = f"--impl {impl} draws, and greedy completions draw nothing"
                raise UserError(what, "Add --temperature 0.8, say.")
            if drawn and load.graphs and impl not in UNSEEDED:
                what = f"--impl {impl} draws in a hook, which a CUDA graph does not run"
                raise UserError(what, "Leave CUDA graphs out.")

    @cached_property
    def impls(self) -> list[str]:
        """The implementations, each once."""
        return implementations(self.impl, self.engine, drawn=bool(self.samplings))

    @cached_property
    def length(self) -> int:
        """Tokens of each completion."""
        return _MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @cached_property
    def engine_load(self) -> Load:
        """The load of nondet's own engine; by default, steps may still become CUDA graphs."""
        load, graphs = parse_load(self.load), self.cuda_graphs
        if graphs is not None and names_graphs(self.load) and graphs != load.graphs:
            option = "--cuda-graphs" if graphs else "--no-cuda-graphs"
            raise UserError(f"{option} and --load {self.load} contradict each other", "Leave one of the two out.")
        return load if graphs is None else replace(load, graphs=graphs)

    @cached_property
    def world(self) -> int:
        """Processes that the model is divided over."""
        worlds = parse_ranks(self.ranks) or (1,)
        if self.ranks is not None and self.vary is not None:
            raise UserError("--ranks and --vary exclude each other", "Write --vary ranks=2 to have both in one run.")
        if len(worlds) != 1:
            raise UserError(f"--ranks {self.ranks} is several numbers", "Give one, or --vary ranks=2:4 for several.")
        return worlds[0]


def prompt_texts(prompt: str | None, file: Path | None, prompts: Path | None, column: str | None) -> Sequence[str]:
    """The prompts: those of a set, or the one. Raises UserError: as `prompt_text` and
    `nondet.sampling.plan.load_prompts`, or prompts named twice."""
    if prompts is None:
        if column is not None:
            raise UserError("--column belongs to --prompts", "Give a file of prompts, or leave it out.")
        return [prompt_text(prompt, file)]
    if prompt is not None or file is not None:
        raise UserError("--prompts excludes --prompt and --prompt-file", "Put that prompt into the file.")
    return load_prompts(prompts, column)


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The text of the prompt. Raises UserError: two prompts, an empty one, or not a file, too large, or not UTF-8."""
    if prompt is not None and file is not None:
        raise UserError("--prompt and --prompt-file exclude each other", "Give one prompt.")
    text = DEFAULT_PROMPT if prompt is None else prompt
    if file is not None:
        try:
            text = read_whole(file, _FILE_MOST).decode("utf-8")
        except FileNotFoundError:
            raise UserError(f"no prompt file at {file}", "Check the path.") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text (byte {error.start})", "Save it as UTF-8.") from error
        except OSError as error:
            raise UserError(f"can't read {file}: {error.strerror}", "Give a readable text file.") from error
    if not text.strip():
        raise UserError("the prompt is empty", "Give some text.")
    return text


def open_model(request: Any, sink: Sink) -> LoadedModel:
    """The model of a request, on its device and under its threads; another engine's on the CPU, for its tokens."""
    from nondet.sampling.model import is_random, load_libraries, load_model, local_folder

    if other := o.other_engine(getattr(request, "engine", "")):
        other.check_installed()
        device = pick_device(request.device)
        pick_device("cpu", request.threads)
        return replace(load_model(request.model, request.dtype, "cpu", attention="eager"), device=device)
    device = pick_device(request.device, request.threads)
    if device == "cuda":
        load_libraries()
    if request.model is not None and not sink.quiet and (is_random(request.model) or local_folder(request.model)):
        sink.say(f"loading {request.model} ...")
    loaded = load_model(request.model, request.dtype, device, trust_remote_code=request.trust_remote_code)
    quantized = loaded.identity.get("quantization", "")
    if "loading made" in quantized and not sink.quiet:
        sink.say(f"weights are {quantized}: what is found here is of {request.dtype}")
    return loaded


def names_graphs(spec: str) -> bool:
    """Whether `--load` itself decides about graphs."""
    return any(part.partition("=")[0].strip() == "graphs" for part in spec.split(","))


def check_vary(spec: str | None, prompts: Sequence[str], draft_model: str | None = None) -> dict[str, list[str]] | None:
    """The named axes, before anything is loaded; None where none is to be varied. Raises UserError: as
    `nondet.sampling.axes.parse_vary`, several prompts, or an unused draft model."""
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
        raise UserError("--draft-model drafts only in --vary speculative=model", "Add speculative to --vary.")
    return wanted


def _texts(loaded: LoadedModel, text: str, request: SampleRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompt, made long enough, and the earlier text that is edited: from one solo completion, under stock."""
    from nondet.sampling.engine import pinned, run_session
    from nondet.sampling.model import check_lengths
    from nondet.sampling.plan import LONG, PRESETS, Request, earlier_text, long_prompt

    tokens, context, length = loaded.encode(text), loaded.context or 2**31, request.length
    check_lengths(loaded, tokens, length)
    more = min(length + max(0, LONG - len(tokens)), context - len(tokens))
    with pinned(request.threads):
        alone = run_session(loaded.model, [Request("t0", True, tuple(tokens), more, 0)], PRESETS["none"])
    if alone.outcomes[0].reason:
        raise UserError(f"the prompt failed solo: {alone.outcomes[0].reason}", "Choose another prompt or model.")
    whole = (*tokens, *alone.outcomes[0].token_ids)
    prompt = long_prompt(tokens, whole[len(tokens) :], context - length + 1)
    return prompt, earlier_text(whole[len(prompt) :])


def sample(request: SampleRequest, sink: Sink) -> Path:
    """Complete prompts many times under a changing load: whether, where and how completions differ."""
    output = Output(request, "sample", sink)
    output.check_side_file()
    texts = prompt_texts(request.prompt, request.prompt_file, request.prompts, request.column)
    (_sample_model if request.endpoint is None else _sample_servers)(request, output, texts)
    return output.present()


def _sample_servers(request: SampleRequest, output: Output, texts: Sequence[str]) -> None:
    from nondet.endpoint.arms import parse_arms, parse_endpoint_load

    load = parse_endpoint_load(request.load, concurrency=request.concurrency, rate=request.rate)
    spec = _QUICK if request.quick else request.arms or _ARMS
    parse_arms(spec, 1)  # its errors are reported before any request
    servers = [e.server(request, "server", request.endpoint, request.model)]
    if request.compare_endpoint is not None:
        model = request.compare_model or request.model
        servers.append(e.server(request, "server-2", request.compare_endpoint, model))
    texts, subjects = e.meet(output, servers, texts, request.length)
    n = max(_N_LOADED_LEAST, _N_LOADED // subjects) if request.n is None else request.n
    arms = parse_arms(spec, n, subjects)
    described: dict[str, Any] = {"quick": True} if request.quick else {}
    e.ask("sample", output, texts, servers, load, arms, request.length, **described)


def _sample_model(request: SampleRequest, output: Output, texts: Sequence[str]) -> None:
    """Open the model, plan rounds and arms, and record them: in every engine, varied or not."""
    from nondet.sampling.collect import collect

    axes = check_vary(request.vary, texts, request.draft_model)
    _check_here(request, pick_device(request.device))
    n = _completions_each(request, len(texts))
    loaded = open_model(request, output.sink)
    survey, described = _surveyed(request, loaded, texts, n, axes, output.sink)
    with closing(_host(request, survey)) as host:
        if engine := o.ENGINES.get(request.engine):
            described["engine"] = {"name": request.engine, "impls": [*engine[1]]} | host.describe(survey.base)
        with output.recording("sample", described, request.seed) as writer, output.sink.progress() as bars:
            total = survey.plan.targets * len(survey.arms)
            collect(survey, host, writer, Shown(output.sink, bars, request.impls, total))
            # over ranks a model's operators run at the sizes of a share, and another engine's are others
            if axes is None and request.engine not in o.ENGINES and request.world == 1:
                _explain(survey, writer)


def _surveyed(
    request: SampleRequest, loaded: LoadedModel, texts: Sequence[str], n: int, wanted: dict[str, list[str]] | None,
    sink: Sink,
) -> tuple[Survey, dict[str, Any]]:  # fmt: skip
    """What is sampled, and its description in the run's header; `wanted` are the axes, None where nothing is varied."""
    from nondet.sampling.axes import Conditions
    from nondet.sampling.collect import Survey, plan_prompts

    load = load_of(request, loaded, wanted is not None, sink)
    prompt, earlier = ((), ()) if wanted is None else _texts(loaded, texts[0], request)
    default = wanted is None and load.others > 0 and not e.chosen(request)
    plan, described = plan_prompts(
        loaded, load, texts, n, request.length, request.seed, request.impls, request.samplings,
        riders=long_prompts() if default else (), tokens=[prompt] if prompt else (),
    )  # fmt: skip
    base = Conditions(load=load, dtype=loaded.dtype, threads=request.threads, ranks=request.world)
    survey = Survey(loaded, plan, base, request.impls, (), request.seed, request.turns, settle=_SETTLE)
    if wanted is not None:
        axes, more = _axes(request, survey, wanted, earlier, sink)
        survey = replace(survey, axes=axes)
        described |= more | {"prompt_lengthened_by": len(prompt) - len(loaded.encode(texts[0]))}
    if request.samplings:
        described["sampling"] = {name: getattr(request, name) for name in ("temperature", "top_k", "top_p", "seeds")}
    described |= {"turns": True} if request.turns else {}
    if request.world > 1:
        from nondet.sampling.ranks import check_heads

        check_heads(loaded.name, loaded.model.config, request.world)
        described["ranks"] = request.world
    return survey, described


def _explain(survey: Survey, writer: RunWriter) -> None:
    """Where stock never diverged, compare its operators at the sizes of the run."""
    from nondet.core.runfile import read_run
    from nondet.sampling.shapes import explain_no_divergence, shapes_met

    run = read_run(writer.path)
    traces = {(c.prompt, c.trace) for c in run.completions if c.impl == "stock" and c.status == "ok"}
    if traces and len(traces) == len({prompt for prompt, _ in traces}):
        for row in explain_no_divergence(survey.loaded, shapes_met(run, "stock"), survey.seed):
            if row.key not in writer.done:
                writer.write(row)


def load_of(request: SampleRequest, loaded: LoadedModel, varied: bool, sink: Sink) -> Load:
    """The load, with the engine's defaults: whether steps run as CUDA graphs, and pages of another engine's size."""
    from nondet.sampling.engine import query_step, why_no_graphs

    load = request.engine_load
    if varied:
        grain = _grain(request, loaded) or 1
        return replace(load, page=-(-load.page // grain) * grain)
    if loaded.device != "cuda" or request.cuda_graphs is not None or names_graphs(request.load):
        return load
    if other := o.other_engine(request.engine):
        if other.graphs:
            sink.say(f"{request.engine} captures CUDA graphs, as it is served; --no-cuda-graphs leaves them out")
        return replace(load, graphs=other.graphs)
    if request.samplings or request.world > 1:
        return load
    reason = why_no_graphs(loaded.model.config)
    if not reason and query_step(load.requests, load.budget) >= load.budget:
        # all products would have the same number of rows, which hides what the run is to show
        reason = "as CUDA graphs all of them would be padded to one size"
    graphs = "steps run as CUDA graphs, padded to a few sizes; --no-cuda-graphs launches them one by one"
    sink.say(f"steps are launched one by one: {reason}" if reason else graphs)
    return replace(load, graphs=not reason)


def _grain(request: SampleRequest, loaded: LoadedModel) -> int:
    """Tokens that a page of another engine is a multiple of; 0 for nondet's own."""
    return int(other.grains.get(loaded.device, 0)) if (other := o.other_engine(request.engine)) else 0


def _axes(
    request: SampleRequest, survey: Survey, wanted: dict[str, list[str]], earlier: tuple[int, ...], sink: Sink
) -> tuple[Sequence[Varied], dict[str, Any]]:
    """The values of the axes that are varied, and what the run's header has about them."""
    import torch

    from nondet.sampling.axes import Subject, plan_axes
    from nondet.sampling.speculation import check_draft_model, has_halves

    loaded = survey.loaded
    text = loaded.model.config.get_text_config()
    subject = Subject(
        base=survey.base,
        device=loaded.device,
        requests=[one for requests in survey.plan.rounds for one in requests],
        threads=torch.get_num_threads(),
        earlier=earlier,
        gpus=torch.cuda.device_count() if loaded.device == "cuda" else 0,
        heads=math.gcd(getattr(text, "num_attention_heads", 0), getattr(text, "num_key_value_heads", 0)),
        halves=has_halves(loaded.model),
        draft_model=request.draft_model or "",
        grain=_grain(request, loaded),
    )
    axes = plan_axes(wanted, subject)
    described: dict[str, Any] = {"vary": {v.axis.name: [v.base, *(value for value, _ in v.values)] for v in axes}}
    if request.draft_model:
        described["draft_model"] = check_draft_model(request.draft_model, loaded)
    for v in axes:
        if v.note and not sink.quiet:
            sink.say(f"--vary {v.axis.name}: {v.note}: left out")
    return axes, described


def _host(request: SampleRequest, survey: Survey) -> Host:
    """What plays the rounds."""
    from nondet.sampling.collect import Here

    other = o.other_engine(request.engine)
    if other is None:
        return Here(survey.loaded, apart=request.world > 1)
    longest = max(len(r.prompt) + r.max_new_tokens for requests in survey.plan.rounds for r in requests)
    host: Host = other(survey.loaded, longest, _grain(request, survey.loaded) if survey.axes else 0)
    return host


def _check_here(request: SampleRequest, device: str) -> None:
    """Refuse, before a file is started, what this machine or several ranks do not have."""
    if request.world != 1:
        from nondet.sampling.ranks import RANK_WAYS, check_loader

        check_loader()
        check_worlds((request.world,), device)
        for impl in request.impls:
            if impl not in RANK_WAYS:
                raise UserError(f"--impl {impl} does not run over ranks", f"Use {', '.join(RANK_WAYS)}.")
    if request.engine_load.graphs and device != "cuda":
        raise UserError("CUDA graphs need a CUDA device", "Leave them out on a CPU.")
    for impl in request.impls:
        if impl in ("stock-flash", "stock-no-cudnn") and device != "cuda":
            raise UserError(f"--impl {impl} needs a CUDA device", "Use --impl stock.")


def _completions_each(request: SampleRequest, prompts: int) -> int:
    """Completions of each subject, of no more rounds than a run file holds."""
    load, subjects = request.engine_load, prompts * max(1, len(request.samplings))
    usual = max(_EACH_LEAST, _COMPLETIONS // subjects) if request.vary is None else _N_VARIED
    n = usual if request.n is None else request.n
    rounds = -(-n * subjects // load.targets)
    if n * subjects > COMPLETIONS_MOST or rounds > _ROUNDS_MOST:
        what = f"--n {n} of {subjects:,} prompts and seeds makes {n * subjects:,} completions in {rounds:,} rounds"
        most = f"{COMPLETIONS_MOST:,} completions and {_ROUNDS_MOST:,} rounds"
        raise UserError(what, f"Stay within {most}: give a smaller --n, or --load a larger targets=.")
    return n


class Shown(Notes):
    """A bar for each implementation, and what is known long before the verdict."""

    def __init__(self, sink: Sink, bars: Progress, impls: Sequence[str], total: int) -> None:
        self._sink, self._bars = sink, bars
        self._tasks = {impl: bars.add_task(impl, total=total, start=False) for impl in impls}

    def progress(self, impl: str, arm: str, done: int, tokens: int) -> None:
        """See `nondet.sampling.plan.Notes`."""
        self._bars.start_task(self._tasks[impl])
        text = f"{impl} {arm}".rstrip()
        self._bars.update(self._tasks[impl], completed=done, description=f"{text}, {tokens} tokens")

    def preparing(self, impl: str, done: int, total: int, uses: FirstUses) -> None:
        """See `nondet.sampling.plan.Notes`."""
        what = "compiling and proving" if done < total - 1 else "playing a first round, off the clock:"
        so_far = f"{done} of {total}, {uses.compiled} kernels and {uses.proofs} proofs so far"
        self._bars.update(self._tasks[impl], description=f"{impl}: {what} {so_far}")
        if done == total and uses.seconds >= 1.0:
            what = f"{uses.proofs} proofs and {uses.compiled} compiled kernels"
            self._sink.say(f"nondet: {impl}: {what} in {uses.seconds:.1f} s, kept for the next run and in no figure.")

    def first_round(self, impl: str, completions: Sequence[Completion]) -> None:
        """The number of answers that differ from their prompt's most common one."""
        if self._sink.quiet:
            return
        prompts: dict[int, list[Completion]] = {}
        for c in completions:
            prompts.setdefault(c.prompt, []).append(c)
        groups = list(prompts.values())
        traces, texts = (
            sum(len(group) - Counter(map(digest, group)).most_common(1)[0][1] for group in groups)
            for digest in (attrgetter("trace"), attrgetter("tokens_digest"))
        )
        of = "" if len(groups) == 1 else f" of {len(groups):,} prompts, each within its own"
        self._sink.say(
            f"{impl}, so far: {texts:,} of {len(completions):,} completions{of} differ from the most common one, "
            f"{traces:,} in their logprob bits"
        )


def implementations(impls: list[str] | None, engine: str = "", *, drawn: bool = False) -> list[str]:
    """The implementations, each once; "both" is stock and invariant, and where tokens are drawn stock-seeded too.
    Raises UserError: one that the engine does not have, or an unknown family."""
    _, known = o.ENGINES.get(engine, ("", _WHOLE))
    both = [name for name in ("stock", *["stock-seeded"] * drawn, "invariant") if name in known]
    names = list(dict.fromkeys(one for name in impls or ["both"] for one in (both if name == "both" else [name])))
    for name in names:
        base, colon, families = name.partition(":")
        if name not in known and engine in o.ENGINES:
            raise UnknownNameError(f"implementation under {engine}", name, [*known, "both"])
        if name not in known and base != "invariant":
            raise UnknownNameError("implementation", name, [*known, "both", "invariant:FAMILY"])
        for family in families.split("+") if colon else ():
            if family not in o.families():
                raise UnknownNameError("operator family", family, o.families())
    return names
