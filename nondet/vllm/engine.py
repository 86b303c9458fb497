"""vLLM itself as an engine of `nondet sample`: in a process of its own for each implementation, followed step by step.

The process holds vLLM's engine core (without a second process behind it), so each step's batch is read in the
scheduler, requests arrive at the planned step, and prefix-cache hits and preemptions are counted. nondet never needs
vLLM: where it is not installed one line reports that.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from nondet.core.launch import note
from nondet.core.processes import end_with_parent, no_main, obituary
from nondet.errors import UserError, one_line
from nondet.sampling.axes import Conditions
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Load, Outcome, Request, Session, Span
from nondet.sampling.ranks import model_folder
from nondet.sampling.schedule import SessionLog, parts_of, scheduled, session_figures
from nondet.vllm import ENABLED, OWN, WRITTEN

# implementation -> vLLM's own flag, the plugin's
WAYS = {"stock": ("0", "0"), "vllm-invariant": ("1", "0"), "invariant": ("1", "1")}
_QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # requests are found by their names
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
GRAINS = {"cuda": 16, "cpu": 32}  # tokens that a page is a multiple of, as vLLM's attention requires
_START_S, _ROUND_S = 900.0, 3600.0
_SPARE = 1.5  # a cache of keys is this much larger than the load needs: layers of several kinds do not share evenly


def check_installed() -> None:
    """Refuse, as a `UserError`, where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        hint = "pip install vllm==0.25.1 beside nondet, or test a running server with --endpoint."
        raise UserError("vLLM is not installed in this environment", hint)


def cache_bytes(config: Any, tokens: int, itemsize: int = 2) -> int:
    """Bytes of K and V of `tokens` tokens in all layers of a transformers config; 0 where it has no number of heads."""
    text = config.get_text_config()
    heads, layers = getattr(text, "num_key_value_heads", None), getattr(text, "num_hidden_layers", None)
    if not isinstance(heads, int) or not isinstance(layers, int):
        return 0
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * layers * heads * width * itemsize * tokens


def arguments_of(folder: Path, dtype: str, device: str, load: Load, longest: int, config: Any = None) -> dict[str, Any]:
    """The arguments of vLLM's LLM. `longest` is the most tokens of a request, its completion among them. `config`, the
    model's, gives the cache's size on a GPU: what all requests of a step need, so that nothing is preempted and the
    rest of the GPU stays free. None: nine tenths of the GPU, as vLLM takes them."""
    made: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": 0,
        "max_model_len": longest,
        "max_num_seqs": min(load.requests, load.budget),
        "max_num_batched_tokens": load.budget,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": load.sharing,
        "enforce_eager": not load.graphs,
        "async_scheduling": False,  # a step is decided when it is run, so that arrivals are on time
        "disable_log_stats": True,
    }
    if device != "cuda":
        return made | {"gpu_memory_utilization": 0.5}  # a share of the machine's memory, whatever its name
    page = -(-load.page // GRAINS["cuda"]) * GRAINS["cuda"]
    tokens = made["max_num_seqs"] * -(-(longest + page) // page) * page
    needed = cache_bytes(config, tokens, 4 if dtype == "float32" else 2) if config is not None else 0
    # with a size given, the share only has to be free when it starts
    share = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": int(_SPARE * needed)}
    return made | {"block_size": page} | (share if needed else {"gpu_memory_utilization": 0.9})


class Played(NamedTuple):
    """One round, as the other process saw it."""

    answers: dict[str, tuple[list[int], list[float] | None, str, int]]  # ids, logprobs, finish, cached prompt tokens
    steps: list[dict[str, int]]  # the tokens that each request had in a step
    seconds: float
    preempted: list[str]  # the request of each preemption
    page: int = 0  # tokens in a page of its cache
    graphs: bool = False  # whether its steps may run as CUDA graphs


def play(engine: Any, requests: Sequence[Request], eos: Sequence[int], taken: list[Any]) -> Played:
    """Run the requests from an empty engine (vLLM's LLMEngine) to an empty one, each from its step of arrival on. The
    scheduler's outputs arrive in `taken`, one per step."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    waiting = sorted(requests, key=lambda r: r.arrival_step)
    answers: dict[str, tuple[list[int], list[float] | None, str, int]] = {}
    steps: list[dict[str, int]] = []
    preempted: list[str] = []
    step, began = 0, time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            step = max(step, waiting[0].arrival_step)
            steps += [{}] * (step - len(steps))
        while waiting and waiting[0].arrival_step <= step:
            request = waiting.pop(0)
            engine.add_request(
                request.id,
                {"prompt_token_ids": list(request.prompt)},
                SamplingParams(
                    temperature=0.0,
                    max_tokens=request.max_new_tokens,
                    stop_token_ids=list(eos),
                    ignore_eos=True,  # nondet's own stop tokens stop it
                    logprobs=0 if request.target else None,
                    detokenize=False,
                ),
            )
        taken.clear()
        for done in engine.step():
            if done.finished:
                one = done.outputs[0]
                ids = list(one.token_ids)
                logprobs = [top[i].logprob for top, i in zip(one.logprobs, ids, strict=True)] if one.logprobs else None
                finish = "eos" if one.finish_reason == "stop" else "length"
                answers[done.request_id] = (ids, logprobs, finish, int(done.num_cached_tokens or 0))
        steps.append({name: count for out in taken for name, count in out.num_scheduled_tokens.items()})
        preempted += [name for out in taken for name in out.preempted_req_ids or ()]
        step += 1
    config = getattr(engine, "vllm_config", None)
    page = config.cache_config.block_size if config else 0
    mode = config.compilation_config.cudagraph_mode if config else None
    graphs = mode is not None and mode.name != "NONE"
    return Played(answers, steps, time.perf_counter() - began, preempted, page, graphs)


def serve(pipe: Any, log: str, environment: Mapping[str, str], arguments: Mapping[str, Any], eos: list[int]) -> None:
    """The other process: vLLM, and one answer per request. Its output goes into a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= environment
    threading.Thread(target=end_with_parent, args=(lambda: os._exit(1),), daemon=True).start()
    try:
        import vllm

        llm = vllm.LLM(**arguments)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        taken: list[Any] = []
        decide = scheduler.schedule

        def schedule(*rest: Any, **more: Any) -> Any:
            taken.append(decide(*rest, **more))
            return taken[-1]

        scheduler.schedule = schedule
        if environment[ENABLED] == "1" and f"{__package__}.plugin" not in sys.modules:
            raise UserError("vLLM did not load nondet's plugin", "VLLM_PLUGINS, if set, must name nondet.")
        pipe.send(("ready", vllm.__version__))
        while True:
            requests, watcher = pipe.recv()
            with watcher.attached(llm, taken) if watcher is not None else nullcontext():
                played = play(llm.llm_engine, requests, eos, taken)
            pipe.send(("played", (played, watcher)))
    except EOFError:  # the parent has finished
        return
    except BaseException as error:  # noqa: BLE001 - whatever vLLM raises, the parent has to hear of it
        with suppress(OSError):
            pipe.send(("failed", one_line(reason_of(error), 400)))
        sys.exit(1)


def reason_of(error: BaseException) -> str:
    """vLLM's error in a line: the last of its own, without pydantic's text around it."""
    if isinstance(error, UserError):
        return error.what
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line.partition(" [type=")[0] for line in lines if line and not line.startswith("For further information")]
    return f"{type(error).__name__}: {lines[-1]}".rstrip(". ") if lines else type(error).__name__


class VllmEngine:
    """vLLM under one implementation at a time, started when that begins and ended when it is over.

    Args:
        loaded: The model as nondet loaded it: vLLM loads the same folder, or the weights written to one.
        longest: Most tokens of a request, its completion among them.
        more: Further arguments of vLLM's LLM, which override those of the load.
    """

    def __init__(self, loaded: LoadedModel, load: Load, longest: int, **more: Any) -> None:
        self._loaded, self._stack = loaded, ExitStack()
        folder = self._stack.enter_context(model_folder(loaded))
        self._arguments = arguments_of(folder, loaded.dtype, loaded.device, load, longest, loaded.model.config) | more
        self._pipe: Any = None
        self._process: Any = None
        self._covered: Counter[str] = Counter()

    def close(self) -> None:
        """Delete the files written for vLLM."""
        self._end()
        self._stack.close()

    def describe(self) -> dict[str, Any]:
        """What is fixed in addition to the load."""
        kept = {name: value for name, value in self._arguments.items() if name != "model"}
        return {"name": "vllm", "sampling": "greedy", **kept}

    @contextmanager
    def implementation(self, name: str) -> Iterator[Callable[[], Counter[str]]]:
        """Start vLLM under the implementation: one of `WAYS`. Raises UserError: it did not start, with its reason."""
        own, enabled = WAYS[name]
        with tempfile.TemporaryDirectory(prefix="nondet-vllm-") as scratch:
            log, coverage = Path(scratch) / "vllm.log", Path(scratch) / "coverage.jsonl"
            environment = _QUIET | {OWN: own, ENABLED: enabled, WRITTEN: str(coverage)}
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            settings = (theirs, str(log), environment, self._arguments, list(self._loaded.eos))
            self._process = context.Process(target=serve, args=settings, name="nondet-vllm")
            try:
                with no_main():
                    self._process.start()
                theirs.close()
                kind, said = self._hear(_START_S)
                if kind != "ready":
                    raise UserError(
                        f"vLLM did not start as {name}: {said}", "Leave this --impl out, or see docs/engines.md."
                    )
                self._covered = _coverage(coverage)
                yield Counter
            finally:
                self._end()

    def run(self, requests: Sequence[Request], load: Load, watcher: Any = None, **options: Any) -> Session:
        """One round from an empty cache. An engine that died gives a session with its reason. A `watcher` goes to
        vLLM's process, watches there as `attached(llm, taken)`, and returns what it saw."""
        on_token_count = options.get("on_token_count")
        kind: str = "failed"
        played: Any = "it has ended"
        if self._process is not None and self._process.is_alive():
            try:
                self._pipe.send((list(requests), watcher))
                kind, played = self._hear(_ROUND_S)
            except OSError as error:
                played = str(error)
        if kind != "played":
            reason = f"vLLM failed: {played}"
            lost = [Outcome(request, reason=reason) for request in requests]
            return Session(outcomes=lost, steps=0, tokens=0, seconds=0.0, fatal=reason)
        played, seen = played
        if watcher is not None:
            vars(watcher).update(vars(seen))
        for name, count in self._covered.items():
            note(name, count)
        cached = sum(tokens for *_, tokens in played.answers.values())
        for name, count in (("cached prompt tokens", cached), ("preemptions", len(played.preempted))):
            if count:
                note(f"vLLM's {name}", count)
        session = session_of(played, requests)
        if on_token_count is not None:
            for outcome in session.outcomes:
                on_token_count(outcome.request, len(outcome.token_ids))
        return session

    def _hear(self, limit_s: float) -> tuple[str, Any]:
        if not self._pipe.poll(limit_s):
            return "failed", f"no answer within {limit_s:g} s"
        try:
            kind, said = self._pipe.recv()
        except (EOFError, OSError):
            return "failed", obituary(self._process)
        return kind, said

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.join(20.0)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(5.0)
        self._pipe = self._process = None


class VllmHost:
    """vLLM under the conditions of an arm and an implementation, restarted for each; `nondet.sampling.collect.Host`.
    Along axes a page is a multiple of `grain` tokens; 0: pages and prefills are as vLLM has them."""

    layers: Any = None  # they are in another process
    grains, graphs, check_installed = GRAINS, True, staticmethod(check_installed)

    def __init__(self, loaded: LoadedModel, longest: int, grain: int = 0) -> None:
        self._loaded, self._longest, self._grain = loaded, longest, grain
        self._key: tuple[Conditions, str] | None = None
        self._stack = ExitStack()

    def _engine(self, conditions: Conditions) -> VllmEngine:
        load, more = conditions.load, {}
        if self._grain:
            more["block_size"] = -(-load.page // self._grain) * self._grain
            more["long_prefill_token_threshold"] = conditions.setting.chunk or 0
        return VllmEngine(self._loaded, load, self._longest, **more)

    def under(self, impl: str) -> AbstractContextManager[Callable[[], Counter[str]]]:
        """Nothing: vLLM is started with its implementation, and notes what ran itself."""
        return nullcontext(Counter)

    def describe(self, conditions: Conditions) -> dict[str, Any]:
        """What the engine is started with."""
        with closing(self._engine(conditions)) as engine:
            return engine.describe()

    def play(
        self, requests: Sequence[Request], conditions: Conditions, impl: str, seed: int, on_tokens: Any
    ) -> Session:
        """One round from an empty cache. Raises UserError: vLLM did not start under these conditions."""
        if self._key != (conditions, impl):
            self.close()
            self._running = self._stack.enter_context(closing(self._engine(conditions)))
            self._stack.enter_context(self._running.implementation(impl))
            self._key = (conditions, impl)
        return self._running.run(requests, conditions.load, on_token_count=on_tokens)

    def close(self) -> None:
        """End the running one."""
        self._key = None
        self._stack.close()


def _coverage(path: Path) -> Counter[str]:
    """The plugin's coverage of the layers, in the dispatcher's form; empty under another implementation."""
    from nondet.core.runfile import read_run

    if not path.exists():
        return Counter()
    standings = read_run(path).layer_standings
    said = {"replaced": "replaced", "at risk": "at risk", "certified stock": "left stock", "elementwise": "left stock"}
    return Counter({f"{said[s.standing]}: {s.kind} (of vLLM's layers)": s.layers for s in standings})


def session_of(played: Played, requests: Sequence[Request]) -> Session:
    """The round as nondet records one, with the figures of `session_figures` as far as vLLM reports what they count."""
    log = SessionLog({}, page=played.page, graphs=played.graphs, preempted=played.preempted)
    first = {name: cached for name, (*_, cached) in played.answers.items()}  # position that is computed next
    for number, step in enumerate(played.steps):
        log.packs[number] = tuple(Span(name, first.get(name, 0), rows, True) for name, rows in step.items())
        first |= {span.request: span.first + span.rows for span in log.packs[number]}
    outcomes = []
    for request in requests:
        if request.id not in played.answers:
            outcomes.append(Outcome(request, reason="vLLM gave no answer"))
            continue
        ids, logprobs, finish, _ = played.answers[request.id]
        packed = struct.pack(f"<{len(logprobs)}f", *logprobs) if logprobs else b""
        outcomes.append(Outcome(request, token_ids=ids, logprobs=packed, finish=finish))
    parts = parts_of(log.packs)
    return Session(
        outcomes=scheduled(outcomes, parts, log),
        steps=len(played.steps),
        tokens=sum(len(o.token_ids) for o in outcomes),
        seconds=played.seconds,
        figures=session_figures(outcomes, log, parts),
    )
