"""`nondet trace`, and with --replay the replay of a recorded run."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nondet.core.records import Control
from nondet.core.runfile import check_free, check_outputs, read_run
from nondet.errors import UserError, reason_of
from nondet.sampling.plan import Load, parse_load
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, latest_run, pick_device
from nondet.services.sample import implementations, open_model, prompt_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nondet.core.records import Completion, Replayed, Run
    from nondet.sampling.model import LoadedModel
    from nondet.trace.search import Arm, Search


def _replay(request: TraceRequest, path: Path, sink: Sink) -> Path:
    """Replay recorded completions: as recorded, solo, or with a minimal set of others that still changes them."""
    from nondet.sampling.replay import select_completions

    output = Output(request, "replay", sink)
    recorded = _read(path)
    wanted = select_completions(recorded, request.request or [], request.impl)[: request.most]
    if not wanted:
        raise UserError(f"no completion of {path} has a rarer trace", "Name one with --request.")
    loaded = _load_recorded(recorded, request)
    pick_device(loaded.device, request.threads or threads_of(recorded, loaded))
    plan = {
        "run": str(path),
        "requests": [c.request for c in wanted],
        "impl": wanted[0].impl,
        "model": {"name": loaded.name, **loaded.identity},
        "device": loaded.device,
        "dtype": loaded.dtype,
        "solo": request.solo,
        "shrink": request.shrink,
    }
    again: list[bool] = []
    said: Counter[str] = Counter()
    seed, total = int(recorded.header.plan.get("seed", 0)), len(wanted) * (1 + request.solo + request.shrink)
    with output.recording("replay", plan, seed, total) as writer, sink.steps() as say:
        for record in _played(recorded, path, request, loaded, wanted, writer.done):
            writer.write(record)
            again += [record.same] if record.how == "as recorded" else []
            same = record.sentence.replace(record.request, "", 1).strip(" :")
            said[same] += 1
            if said[same] == 1:
                say(record.sentence)
    for same, count in said.items():
        if count > 1:
            sink.say(f"{count - 1} more: {same}")
    return output.present(code=int(not all(again)))


def _read(path: Path) -> Run:
    recorded = read_run(path, allow_truncated=True)
    if recorded.servers:
        raise UserError(f"{path} is a run of a server, which can't be traced", "Name a model's run with --run.")
    return recorded


def _load_recorded(recorded: Run, request: TraceRequest) -> LoadedModel:
    """The model of a recorded run, at its dtype, with its weights. Raises UserError: the run names none, the model is
    gone, or it has other weights."""
    from nondet.core.records import engine_of
    from nondet.sampling.model import EMBEDDED, load_model

    plan = recorded.header.plan
    described = plan.get("model")
    if not isinstance(described, dict) or not isinstance(described.get("name"), str) or not recorded.completions:
        raise UserError(f"{recorded.source} is no run of `nondet sample`", "Give a run file that holds completions.")
    if engine := engine_of(recorded):
        raise UserError(f"{recorded.source}: --engine {engine} is not replayed", f"nondet trace --engine {engine}")
    name = request.model or described["name"]
    device = str(plan.get("device", "auto")) if request.device == "auto" else request.device
    o.DEVICES.check("--device", device)
    loaded = load_model(
        None if name == EMBEDDED else name, str(plan.get("dtype", "bfloat16")), pick_device(device),
        trust_remote_code=request.trust_remote_code,
    )  # fmt: skip
    for key, value in loaded.identity.items():
        if key in described and described[key] != value:
            raise UserError(
                f"{loaded.name} is not the model of {recorded.source}: {key} is {value}, and was {described[key]}",
                "Load the model that the run was made with: --model.",
            )
    return loaded


def threads_of(recorded: Run, loaded: LoadedModel) -> int | None:
    """The CPU threads of a recorded run, where they change bits: on a CPU."""
    threads = recorded.header.environment.get("num_threads")
    return threads if loaded.device == "cpu" and isinstance(threads, int) else None


def _played(
    recorded: Run, path: Path, request: TraceRequest, loaded: LoadedModel, wanted: list[Completion],
    done: set[tuple[str, ...]],
) -> Iterable[Replayed]:  # fmt: skip
    """Round by round, so that completions of one round share a session."""
    from nondet.core.compare import weights_digest
    from nondet.core.traces import read_traces
    from nondet.sampling.engine import TransformersEngine
    from nondet.sampling.implementations import implementation
    from nondet.sampling.replay import Player, recording_of

    traces, _ = read_traces(path)
    weights = weights_digest(loaded.model)
    rounds: dict[int, list[Completion]] = {}
    for completion in wanted:
        rounds.setdefault(completion.round, []).append(completion)
    with implementation(wanted[0].impl):
        for completions in rounds.values():
            player = Player(TransformersEngine(loaded.model), recording_of(recorded, completions[0], weights))
            missing = [c for c in completions if ("replayed", c.impl, c.request, "as recorded") not in done]
            if missing:
                yield from player.as_recorded(missing, traces)
            for c in completions:
                if request.solo and ("replayed", c.impl, c.request, "alone") not in done:
                    yield player.solo(c, traces)
                if request.shrink and ("replayed", c.impl, c.request, "shrunk") not in done:
                    yield player.shrunk(c, traces)


@dataclass(frozen=True, kw_only=True)
class TraceRequest(o.ModelOptions, Request):
    """The options of `nondet trace`."""

    prompt: o.PROMPT = None
    prompt_file: o.PROMPT_FILE = None
    max_tokens: int = o.own("Tokens in the completion.", default=64)
    model: o.MODEL = None
    impl: str | None = o.own(
        "What to trace: stock, invariant, or only one family invariant. With --replay one of the run's.",
        shown="stock; with --replay also the run's only one",
        complete=o.SAMPLE_IMPLS,
    )
    load: str = o.own("Concurrent requests of the second arm, as of `sample`.", default="default", complete=o.LOADS)
    engine: o.ENGINE = "transformers"
    run: Path | None = o.own("Trace a completion of this recorded run.", shown="with --request: the latest in runs/")
    request: list[str] | None = o.own(
        "A completion of --run, traced solo against its recorded batch. Given twice: the two against each other. "
        'With --replay any number, or "divergent": all but the most common trace.',
        shown="with --run: a rare trace",
    )
    replay: bool = o.own("Only replay the --request of --run and compare every bit with the record.", default=False)
    solo: bool = o.own("With --replay: also run it without the other requests.", default=False)
    shrink: bool = o.own("With --replay: also find the fewest concurrent requests that still change it.", default=False)
    most: int | None = o.own("With --replay: at most this many completions.", min=1)
    repro: Path | None = o.own("Write a standalone script (.py) that repeats the call found.")
    record: Path | None = o.own("Only write the inputs and results of every operator to this file (.safetensors).")
    against: Path | None = o.own("Compare this model, operator by operator, with such a file, of another environment.")
    match: Path | None = o.own('With --against: a JSON file, {"name of a module there": "name here"}; * is a number.')

    def _check(self) -> None:
        if self.engine == "vllm":
            others = ("run", "request", "repro", "trust_remote_code")
            self.refuse(others, "--engine vllm and {} exclude each other", "It traces a prompt, solo and in a batch.")
        elif self.engine != "transformers":  # `nondet sample` has it
            raise UserError(f"--engine {self.engine} can't be traced", "Use transformers or vllm.")
        if self.replay:
            self._check_replay()
            return
        self._check_recording()
        for option in ("solo", "shrink", "most"):
            if getattr(self, option):
                raise UserError(f"--{option} without --replay", "Add --replay, or leave it out.")
        if len(self.impls) != 1:
            raise UserError(f"--impl {self.impl} is more than one implementation", "Trace one at a time.")
        if len(self.request or []) > 2:
            raise UserError("--run goes with one --request, or two", "Name them, or none.")
        if self.request is None and self.engine_load.graphs:
            raise UserError("--load graphs=on can't be traced: a replayed graph runs no Python", "Leave it out.")
        if self.repro is not None:
            if self.repro.suffix != ".py":
                raise UserError(f"--repro {self.repro}: not a .py file", "Give a name that ends in .py.")
            from nondet.trace.repro import inputs_path

            for path in (self.repro, inputs_path(self.repro)):
                check_free(path, force=self.force or self.resume)

    def _check_recording(self) -> None:
        if self.match is not None and self.against is None:
            raise UserError("--match without --against", "Add --against, or leave it out.")
        others = ("load", "run", "request", "repro", "resume")
        for name in ("record", "against") if self.record or self.against else ():
            if getattr(self, name) is not None:
                own = ("against", "out") if name == "record" else ("engine", "prompt", "prompt_file", "max_tokens")
                self.refuse((*others, *own), f"--{name} and {{}} exclude each other", "See docs/trace.md.")
        if self.record is not None:
            if self.record.suffix != ".safetensors":
                raise UserError(f"--record {self.record}: not a .safetensors file", "Give a name that ends so.")
            check_free(self.record, force=self.force)

    def _check_replay(self) -> None:
        if not self.request:
            raise UserError("--replay needs --request", "Name a completion, or divergent for all that differ.")
        others = (
            "prompt",
            "prompt_file",
            "max_tokens",
            "load",
            "engine",
            "repro",
            "dtype",
            "seed",
            "record",
            "against",
            "match",
        )
        self.refuse(others, "--replay and {} exclude each other", "The run says how its completions were made.")

    @cached_property
    def impls(self) -> list[str]:
        """The implementation to trace, exactly one."""
        return implementations([self.impl or "stock"], self.engine)

    @cached_property
    def engine_load(self) -> Load:
        """The other requests of the second arm."""
        return parse_load(self.load)


def trace(request: TraceRequest, sink: Sink) -> Path:
    """Find the responsible operator: the first call with equal inputs and unequal outputs, and its cure."""
    path = request.run or (latest_run(sink.say, ("sample", "diagnose")) if request.request else None)
    check_outputs({"run": path, "against": request.against, "match": request.match, "out": request.out})
    if request.record is not None:
        return _record(request, request.record, sink)
    if request.against is not None:
        return _against(request, request.against, sink)
    if request.replay and path is not None:
        return _replay(request, path, sink)
    output = Output(request, "trace", sink)

    from nondet.trace.search import Search

    expected: dict[str, str] = {}
    if path is None:
        loaded, arms, plan = _fresh(request, sink)
    else:
        loaded, arms, plan, expected = _recorded(request, path, request.request or [], sink)
        pick_device(loaded.device, request.threads or plan["threads"])
    with ExitStack() as stack:
        kind: type[Search] = Search
        engine: Any
        if request.engine == "vllm":
            from nondet.trace.vllm import VllmTrace
            from nondet.vllm.engine import VllmEngine

            kind = VllmTrace
            longest = max(len(r.prompt) + r.max_new_tokens for r in arms[1].requests)
            engine = stack.enter_context(closing(VllmEngine(loaded, arms[1].load, longest)))
            plan["engine"] = engine.describe()
        else:
            from nondet.sampling.engine import TransformersEngine

            engine = TransformersEngine(loaded.model)
        writer = stack.enter_context(output.recording("trace", plan, request.seed))
        say = stack.enter_context(sink.steps())
        earlier = read_run(output.path, allow_truncated=True)
        search = kind(
            engine, loaded.model, *arms, impl=plan["impls"][0],
            choose=path is None, expected=expected, write=writer.write, say=say,
            earlier=list(earlier.records()), script=request.repro is not None,
        )  # fmt: skip
        if writer.resumed:  # earlier records are those of a stopped process, the record of its failure included
            sentence = "the trace was stopped, and continued from its records"
            search.keep(Control(name="resumed", passed=None, sentence=sentence))
        if not earlier.trace_verdicts:
            _searched(search, request.repro)
    return output.present()


def _record(request: TraceRequest, path: Path, sink: Sink) -> Path:
    """Write the operators' inputs and results for a prompt and its completion."""
    import torch

    from nondet.core.environment import collect
    from nondet.sampling.implementations import implementation
    from nondet.sampling.model import check_lengths
    from nondet.trace.against import LONG, MOST_BYTES, record, text_of
    from nondet.trace.vllm import played

    text, of_vllm = prompt_text(request.prompt, request.prompt_file), request.engine == "vllm"
    loaded = open_model(request, sink)
    prompt = loaded.encode(text)
    check_lengths(loaded, prompt, request.max_tokens)
    made = collect()
    of = [f"{name} {made[name]}" for name in ("torch", "transformers", "cpu", "gpu") if made.get(name)]
    made_by = ", ".join([*["vLLM"][:of_vllm], loaded.name, loaded.dtype, request.impls[0], *of])[:400]
    about = {"dtype": loaded.dtype, "threads": torch.get_num_threads(), "made_by": made_by}
    with implementation("stock" if of_vllm else request.impls[0]):
        least = 0 if "max_tokens" in request.given else LONG
        tokens = text_of(loaded, prompt, request.max_tokens, least)
        play = partial(played, loaded, request.impls[0]) if of_vllm else None
        recorded = record(loaded.model, tokens, path, about, play)
    calls = sum(map(len, recorded.calls))
    left = f"; {recorded.left_out:,} calls without their numbers, beyond {MOST_BYTES >> 30} GiB"
    sink.say(
        f"recorded: {calls:,} calls of {len(tokens)} tokens, in {len(recorded.calls)} forwards"
        + left * (recorded.left_out > 0)
    )
    sink.say(f"compare: nondet trace --model MODEL --against {path}")
    return path


def _against(request: TraceRequest, path: Path, sink: Sink) -> Path:
    """Compare a model with a recording, operator by operator."""
    from nondet.sampling.implementations import implementation
    from nondet.sampling.model import check_lengths
    from nondet.trace.against import Against, read_names, read_recording

    recording, names = read_recording(path), read_names(request.match)
    made = recording[0]
    o.MODEL_DTYPES.check("--dtype", made.dtype)
    dtype = request.dtype if "dtype" in request.given else made.dtype
    on_cpu = pick_device(request.device) == "cpu"
    loaded = open_model(
        replace(request, dtype=dtype, threads=request.threads or (made.threads if on_cpu else None)), sink
    )
    plan = {
        "model": {"name": loaded.name, **loaded.identity},
        "device": loaded.device,
        "dtype": loaded.dtype,
        "impls": request.impls,
        "against": str(path),
        "match": names,
    }
    output = Output(request, "trace", sink)
    check_lengths(loaded, made.tokens[1:] or made.tokens, 1, "the recording: ")
    recorded, replaced = output.recording("trace", plan, request.seed), implementation(request.impls[0])
    with recorded as writer, replaced:
        for found in Against(loaded.model, recording, names).run():
            writer.write(found)
    return output.present()


def _searched(search: Search, repro: Path | None) -> None:
    from nondet.trace.repro import write_and_run

    try:
        verdict = search.run()
    except Exception as error:
        search.keep(Control(name="died", passed=False, sentence=f"the trace ended: {reason_of(error)}"))
        raise
    if repro is not None:
        line = "no script: there is no responsible call that can be made by itself"
        if search.named is not None:
            line = write_and_run(repro, search.named)
            verdict = msgspec.structs.replace(verdict, repro=line)
        search.say(line)
    search.keep(verdict)


def _fresh(request: TraceRequest, sink: Sink) -> tuple[LoadedModel, tuple[Arm, Arm], dict[str, Any]]:
    from nondet.sampling.collect import plan_prompts
    from nondet.trace.search import arms_of

    text, seed, load = prompt_text(request.prompt, request.prompt_file), request.seed, request.engine_load
    if request.engine == "vllm":
        load = replace(load, sharing=False)
    loaded = open_model(request, sink)
    plan, described = plan_prompts(loaded, load, [text], load.targets, request.max_tokens, seed, request.impls)
    return loaded, arms_of(plan.rounds[0], load, seed), described


def _recorded(
    request: TraceRequest, path: Path, names: Sequence[str], sink: Sink
) -> tuple[LoadedModel, tuple[Arm, Arm], dict[str, Any], dict[str, str]]:
    """A recorded completion solo and as recorded, or two recorded ones; arms with the traces that they must give."""
    from nondet.core.compare import weights_digest
    from nondet.sampling.replay import load_of, recording_of, requests_of, select_completions
    from nondet.trace.search import Arm

    recorded = _read(path)
    completions = select_completions(recorded, names or ["divergent"], None)[: len(names) or 1]
    if not completions:
        raise UserError(f"no completion of {path} has a rarer trace", "Name one with --request.")
    if len(completions) != (len(names) or 1):
        raise UserError(f"--request {' '.join(names)}: not {len(names)} completions", "Name each once.")
    if len({c.prompt for c in completions}) > 1:
        raise UserError(f"{' and '.join(names)} have different prompts", "Name completions of one prompt.")
    loaded = _load_recorded(recorded, request)
    weights = weights_digest(loaded.model)
    arms = []
    expected = {}
    for completion in completions:
        record = recording_of(recorded, completion, weights)
        load = load_of(record)
        if load.graphs:
            sink.say(f"{completion.request} was recorded in CUDA graphs; it is traced step by step, without")
            load = replace(load, graphs=False)
        name = f"{completion.request} as recorded"
        expected[name] = completion.trace
        arms.append(Arm(name, completion.request, requests_of(record), load, record.seed))
    if len(arms) == 1:
        own = [r for r in arms[0].requests if r.id == arms[0].request]
        arms.insert(0, Arm("alone", arms[0].request, own, arms[0].load, arms[0].seed))
    plan = {
        **{k: recorded.header.plan.get(k) for k in ("prompts", "max_tokens", "load", "load_digest", "seed")},
        "model": {"name": loaded.name, **loaded.identity},
        "device": loaded.device,
        "dtype": loaded.dtype,
        "run": str(path),
        "requests": list(names),
        "threads": threads_of(recorded, loaded),
        "impls": [completions[0].impl],
    }
    return loaded, (arms[0], arms[1]), plan, expected
