"""transformers' own continuous batching, driven from a plan so that one seed means one sequence of batches.

The engine is the real one: ragged batches under a token budget, decodes before prefills, chunked prefill, prefix
sharing. Ours are only the arrival times, the records, and at a temperature the draw of requests with a seed. Arrivals
are counted in engine steps, and batching is synchronous: what runs in a step depends on the plan, never on the clock.
"""

from __future__ import annotations

import inspect
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nondet.core.launch import FirstUses, first_uses
from nondet.core.processes import interrupts_later
from nondet.errors import UserError, reason_of
from nondet.kernels.dispatch.block import Progress, prepare
from nondet.sampling.logprobs import largest, log_masses, nucleus_size, weights
from nondet.sampling.model import quiet
from nondet.sampling.orders import Order
from nondet.sampling.plan import PLAIN, Load, Outcome, Plan, Request, Sampling, Session, Setting, Watcher
from nondet.sampling.schedule import SessionLog, TopRing, parts_of, scheduled, session_figures
from nondet.sampling.speculation import order_of


@contextmanager
def pinned(threads: int | None) -> Iterator[None]:
    """Pin the CPU threads: the thread count changes GEMM bits. The engine's own thread inherits the setting."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Padding of steps as CUDA graphs: query tokens to a multiple of at most 64, keys to such a share of the cache. Finer
# steps pad less and capture more graphs, each of which costs two steps without one. A budget has at least four sizes if
# 8 tokens allow it, because with a single size no product would get another number of rows.
_QUERY_STEP, _KEY_SHARE, _KEY_STEP, _SIZES_LEAST = 64, 4, 256, 4

_GRAPHED, _ROTARY = ("llama", "mistral", "qwen2", "qwen3"), ("default", "linear", "llama3")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def query_step(requests: int, budget: int) -> int:
    """The multiple to which a step is padded under CUDA graphs: requests' decodes, at most a quarter of the budget."""
    decodes = 1 << (min(requests, budget) - 1).bit_length()
    return min(_QUERY_STEP, max(8, min(decodes, budget // _SIZES_LEAST // 8 * 8)))


def batching_config(
    requests: Sequence[Request], load: Load, pages: int | None = None, model: Any = None, **more: Any
) -> Any:
    """transformers' settings for these requests: everything that it would otherwise choose by itself is fixed. `pages`
    are the KV cache's over all layers, None: enough that no request is preempted. In 5.17 each kind of attention in
    `model` has blocks of its own."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    known = {f.name for f in fields(ContinuousBatchingConfig)}
    groups, page_size = 1, "page_size"
    if "page_size" not in known:  # transformers 5.17
        page_size = "block_size"
        if model is not None:
            from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

            groups = len(group_layers_by_attn_type(model.config)[0])
    # pages for as many requests as a step takes, the longest ones: no more are ever running, because running ones go
    # first. With fewer the engine would preempt, which is an axis of its own
    most = min(load.requests, load.budget)
    needed = sorted((ceil((len(r.prompt) + r.max_new_tokens) / load.page) + 1 for r in requests), reverse=True)
    blocks = sum(needed[:most])
    settings: dict[str, Any] = {}
    if load.graphs:  # so that a load's rounds have the same shapes: cuDNN plans for each, and for each cache size
        grain = _KEY_SHARE * _KEY_STEP
        blocks = ceil(ceil(blocks * load.page / grain) * grain / load.page)
        keys = groups * (pages or blocks) * load.page
        settings["q_padding_interval_size"] = query_step(load.requests, load.budget)
        settings["kv_padding_interval_size"] = _KEY_STEP * ceil(keys / _KEY_SHARE / _KEY_STEP)
    if "auto_switch_to_flash" in known:
        settings["auto_switch_to_flash"] = False  # 5.17 has no such switch, see `stock_attention`
    settings |= {page_size: load.page, "num_blocks": groups * (pages or blocks)} | more
    return ContinuousBatchingConfig(
        max_batch_tokens=load.budget,
        max_requests_per_batch=most,
        allow_block_sharing=load.sharing,
        max_blocks_per_request=0,  # the block-table path belongs to flash-attention packages
        use_async_batching=False,
        use_cuda_graph=load.graphs,
        safety_margin=0.0,
        return_logprobs=True,
        **settings,
    )


@contextmanager
def stock_attention(model: Any, name: str = "") -> Iterator[None]:
    """Keep the engine on scaled_dot_product_attention, or `name`, even if flash-attention packages are installed."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    before = model.config._attn_implementation
    if name:
        model.set_attn_implementation(name)
    if "auto_switch_to_flash" not in {f.name for f in fields(ContinuousBatchingConfig)}:
        # transformers 5.17: "paged|" marks that the choice is made
        model.set_attn_implementation(f"paged|{(name or before).removeprefix('paged|')}")
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


def why_no_graphs(config: Any) -> str:
    """Why a model's steps don't run as CUDA graphs by default; "" for plain dense decoders. The host reads back which
    experts are chosen, and scales some rotary embeddings, which no graph can; a sliding window's cache is updated by
    positions. Neither these nor unlisted architectures have been tested inside of a graph."""
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in _EXPERTS):
        return "the model has experts"
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(text, "sliding_window", None) and not hasattr(text, "layer_types")):
        return "not all of the model's layers are of full attention"
    rotary = getattr(text, "rope_parameters", None) or {}
    if text.model_type not in _GRAPHED or rotary.get("rope_type", "default") not in _ROTARY:
        return f"no {text.model_type} of this kind has been seen in CUDA graphs; --cuda-graphs tries it"
    return ""


@contextmanager
def masks_at_once(device: torch.device) -> Iterator[None]:
    """On a GPU, where launches dominate the host time of a small model, write the engine's mask of a step by
    `write_mask`: the same numbers with a few launches, where transformers has three and five views for each request."""
    from transformers.generation.continuous_batching import input_outputs

    before = getattr(input_outputs, "build_attention_mask", None)
    if before is None or device.type == "cpu":
        yield
        return
    input_outputs.build_attention_mask = write_mask
    try:
        yield
    finally:
        input_outputs.build_attention_mask = before


def write_mask(
    attention_mask: torch.Tensor,
    cumulative_seqlens_q: list[int],
    cumulative_seqlens_k: list[int],
    sliding_window: int = 1,
) -> None:
    """Write 0 where a query sees a key and the dtype's least number where it does not: transformers' own mask, [1, 1,
    queries, keys] or larger. A request's last query sees its last key; `sliding_window` are the keys that a query sees
    at most, its own included, or 1 for all."""
    bounds: list[tuple[int, int]] = []
    ranges = zip(pairwise(cumulative_seqlens_q), pairwise(cumulative_seqlens_k), strict=True)
    for (query, last_query), (first, last) in ranges:
        past = last - first - (last_query - query)
        for j in range(last_query - query):
            begin = max(first, first + past + j + 1 - sliding_window) if sliding_window > 1 else first
            bounds.append((begin, min(last, first + max(0, past) + j + 1)))
    rows, columns = len(bounds), cumulative_seqlens_k[-1]
    own = torch.tensor(bounds, dtype=torch.int32).to(attention_mask.device)
    key = torch.arange(columns, dtype=torch.int32, device=attention_mask.device)
    hidden = (key < own[:, :1]) | (key >= own[:, 1:])
    part = attention_mask[0, 0, :rows, :columns]
    part.zero_().masked_fill_(hidden, torch.finfo(attention_mask.dtype).min)


# Threads shared by engines' loops, on CUDA. torch keeps cuDNN's plans of attention per thread: 30 ms for each shape on
# an H200, which an engine with a new thread would pay again in each session.
_LOOPS = ThreadPoolExecutor(8, "nondet-engine")


class _Loop:
    """An engine's loop on a thread that has run others before; its manager uses it as a `threading.Thread`."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._target = target
        self._running: list[Future[None]] = []

    def start(self) -> None:
        self._running.append(_LOOPS.submit(self._target))

    def is_alive(self) -> bool:
        return any(not loop.done() for loop in self._running)

    def join(self, timeout: float | None = None) -> None:
        wait(self._running, timeout)


def start(manager: Any, device: torch.device) -> None:
    """Start the engine's thread, on CUDA with a `_Loop`; on a CPU only a new thread has the current thread count."""
    if device.type != "cuda":
        manager.start()
        return
    manager.background_thread_status.clear()
    loop = manager._run_generation_loop
    if "use_inference_mode" in inspect.signature(loop).parameters:  # since 5.24
        loop = partial(loop, use_inference_mode=torch.is_inference_mode_enabled())
    manager._generation_thread = _Loop(loop)
    manager._generation_thread.start()


def stop_now(manager: Any) -> None:
    """Stop the engine's thread and wait for it. It is woken first, because it polls only every tenth of a second."""
    status = manager.background_thread_status
    status.request_stop(status.HARD_STOP, manager.distributed_helper.global_rank)
    for name in ("_wake_up_loop", "_has_new_requests"):  # the event that the idle thread waits for in 5.23, in 5.17
        if hasattr(manager, name):
            getattr(manager, name).set()
    manager.stop(block=True, hard_stop=True)


# A sampler that draws by (seed, position), and gives a row the same token whatever the batch: no order of operations
# can matter in its steps, which docs/seeds.md lists. Weights are summed in the order of token ids: a logit that changes
# a little moves the boundaries a little, where an order by logits would let two tokens change places. Weights below
# 2^-44 of the largest are never drawn, a probability of less than 2^-26 for the largest vocabulary. Logprobs are the
# model's own, at temperature 1 over the whole vocabulary: so traces differ where the nucleus has a single token.

_CERTAIN = 1.0e4  # a logit among zeros: the engine's argmax takes it, and exp(-1e4) is 0 in every dtype
_BITS = 53
_MASK = 0xFFFFFFFF
_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85


class Draw(NamedTuple):
    """One token, and how near it was to another one."""

    token: int
    logprob: float  # ln p of the token at temperature 1 over the whole vocabulary; NaN where the logits are not numbers
    # distance of the draw from the nearest boundary between tokens, as a share of the mass; 1.0 without any
    border: float
    cut: float  # logit of the last token that top-k keeps minus that of the first it drops; NaN without top-k
    nucleus: float  # distance of the kept mass from top_p, at the nearer end of the last token, as a share; NaN without


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words for a counter and a key (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK, (a >> 32) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform_bits(seed: int, position: int) -> int:
    """53 bits, uniform, of the token at `position` (0 is the first generated one) under `seed`."""
    words = philox((position & _MASK, position >> 32, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return (words[0] << 21) | (words[1] >> 11)


def draw_rows(rows: torch.Tensor, wanted: Sequence[tuple[Sampling, int]]) -> list[Draw]:
    """A token for each of the rows, [R, V] float32 logits on any device."""
    if not wanted:
        return []
    vocabulary = rows.shape[-1]
    # where nothing is dropped a draw is in the order of ids, and nothing has to be sorted; each row by itself
    finite, masses = rows.isfinite().all(-1).tolist(), log_masses(rows).tolist()
    whole = [ok and not s.top_k and s.top_p >= 1.0 for ok, (s, _) in zip(finite, wanted, strict=True)]
    if any(whole):
        every, plain = np.arange(vocabulary), rows.cpu().numpy().astype(np.float64) + 0.0  # -0.0 and 0.0 are one logit
    if not all(whole):
        # one more than is kept, for the distance to the first dropped one
        widest = max(vocabulary if not s.top_k else s.top_k + 1 for s, _ in wanted)
        ids, logits = largest(rows, min(vocabulary, widest))
    return [
        draw_row(every, plain[i], masses[i], *one, plain[i].max())
        if whole[i]
        else draw_row(ids[i], logits[i], masses[i], *one)
        for i, one in enumerate(wanted)
    ]


def draw_row(
    ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float64], log_mass: float, sampling: Sampling, position: int,
    top: float | None = None,
) -> Draw:  # fmt: skip
    """One token from `ids` and `logits`, [C] candidates in falling order, one more than top_k where the vocabulary has
    more; with `top`, their largest, the whole vocabulary in the order of ids, where nothing is dropped. `log_mass` is
    ln of the sum of exp over the whole vocabulary."""
    kept = min(sampling.top_k or len(ids), len(ids))
    cut = float(logits[kept - 1] - logits[kept]) if kept < len(ids) else math.nan
    if not math.isfinite(logits[0]):  # no numbers to draw by, as the trace shows
        return Draw(int(ids[0]), math.nan, 1.0, cut, math.nan)
    masses = weights(logits[:kept], logits[0] if top is None else top, sampling.temperature)
    sums = np.cumsum(masses)  # of integers: exact in any order
    whole, nucleus = int(sums[-1]), math.nan
    if sampling.top_p < 1.0:
        need = math.ceil(sampling.top_p * whole)
        kept = nucleus_size(sums, sampling.top_p)
        before = int(sums[kept - 2]) if kept > 1 else 0
        nucleus = min(int(sums[kept - 1]) - need, need - before) / whole
    order = np.argsort(ids[:kept]) if top is None else ids
    sums = np.cumsum(masses[:kept][order])
    mass = int(sums[-1])
    point = (uniform_bits(sampling.seed, position) * mass) >> _BITS
    index = int(np.searchsorted(sums, point, side="right"))
    # the outer ends are not boundaries, because nothing is beyond them
    inner = [point - int(sums[index - 1])] if index else []
    inner += [int(sums[index]) - point] if int(sums[index]) < mass else []
    chosen = int(order[index])
    return Draw(int(ids[chosen]), float(logits[chosen]) - log_mass, min(inner, default=mass) / mass, cut, nucleus)


class Drawing:
    """Replaces the engine's draw by ours, as a forward hook: it draws from each row's logits, and returns logits from
    which the engine's own argmax takes the drawn token. `drawn`: request id -> its draws, in order."""

    def __init__(self, requests: Sequence[Request], log: SessionLog) -> None:
        self._of = {r.id: (r.sampling, len(r.prompt)) for r in requests}
        self._log = log
        self.drawn: dict[str, list[Draw]] = {r.id: [] for r in requests}

    def __call__(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """The hook."""
        logits, wanted = output.logits[0], kwargs["logits_indices"]
        settings: list[tuple[Sampling, int]] = []
        names = []
        for span in self._log.pack:
            sampling, prompt = self._of[span.request]
            if span.new and sampling is not None:
                settings.append((sampling, span.first + span.rows - prompt))
                names.append(span.request)
        # a model without logits_to_keep gives a row for every query token
        rows = wanted if logits.shape[0] != wanted.shape[0] else torch.arange(logits.shape[0], device=logits.device)
        rows = rows[: len(settings)].long()
        draws = draw_rows(logits[rows].float(), settings)
        for name, draw in zip(names, draws, strict=True):
            self.drawn[name].append(draw)
        chosen = torch.zeros_like(logits)
        chosen[rows, torch.tensor([d.token for d in draws], dtype=torch.long, device=logits.device)] = _CERTAIN
        output.logits = chosen[None]
        return output


def generation(requests: Sequence[Request]) -> dict[str, Any]:
    """transformers' own sampling, where the draw is left to it; else greedy, which takes the token that we drew."""
    sampling = next((r.sampling for r in requests if r.sampling is not None), None)
    if sampling is None or sampling.seeded:
        return {"do_sample": False}
    return {"do_sample": True} | {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}


# How often the main thread checks whether the engine's thread is alive, and whether a watcher is done.
_POLL_SECONDS, _WATCHED_SECONDS = 0.5, 0.02


class TransformersEngine:
    """transformers' continuous batching, as an engine of `nondet.sampling.plan`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def describe(self) -> dict[str, Any]:
        """What is fixed in addition to the load."""
        import transformers

        return {
            "engine": "transformers",
            "version": transformers.__version__,
            "attention": self.model.config._attn_implementation,
            "scheduler": "first come, first served, decodes before prefills, arrivals in steps",
            "sampling": "greedy; at a temperature our draw by seed and position, or the engine's own",
        }

    def run(self, requests: Sequence[Request], load: Load, **options: Any) -> Session:
        """See `run_session`."""
        return run_session(self.model, requests, load, **options)


def run_session(
    model: Any,
    requests: Sequence[Request],
    load: Load,
    *,
    seed: int = 0,
    on_token_count: Callable[[Request, int], None] | None = None,
    forced: Mapping[str, Sequence[int]] | None = None,
    watcher: Watcher | None = None,
    until: str | None = None,
    setting: Setting = PLAIN,
) -> Session:
    """Run the requests through a fresh engine, from empty to empty; after Ctrl-C its thread has ended. A `UserError` if
    it refuses the model or the sizes, or runs the model without serving it.

    Args:
        on_token_count: Called with each finished request and its number of tokens, on the calling thread.
        forced: Request id -> the tokens that it is fed, whatever it chose; other requests are not forced. The logprobs
            stay those of the tokens that it would have chosen.
        watcher: Watches from inside of the engine's thread; once it is `done` the session is cut short, and requests
            that have not finished by then have the finish "cut".
        until: The session is likewise cut short once this request has finished.
    """
    if load.graphs and watcher is not None:
        raise UserError("steps that run as CUDA graphs can't be watched: a replay runs no Python", "Leave them out.")
    log = SessionLog({r.id: r.arrival_step for r in requests}, forced=forced or {})
    by_id = {r.id: r for r in requests}
    found: dict[str, Any] = {}
    log.cut = lambda: until in found or (watcher is not None and watcher.done)
    watching = nullcontext() if watcher is None else watcher.attached(model, log)
    poll = _POLL_SECONDS if watcher is None else _WATCHED_SECONDS
    ours = [r.sampling is not None and r.sampling.seeded for r in requests]
    if any(ours) and not all(ours):
        raise ValueError("a session draws for all of its requests, or for none")
    drawing = Drawing(requests, log) if any(ours) else None
    with (
        first_uses() as log.first_uses,
        _engine_of(model, requests, load, log, seed, setting, drawing) as manager,
        watching,
    ):
        for request in requests:
            manager.add_request(list(request.prompt), request_id=request.id, max_new_tokens=request.max_new_tokens)
        with interrupts_later():
            start(manager, model.device)
        attention = str(model.config._attn_implementation).removeprefix("paged|")  # as the engine has set it
        for result in _finished(manager, len(requests), log.cut, poll):
            found[result.request_id] = result
            if on_token_count is not None:
                on_token_count(by_id[result.request_id], len(result.generated_tokens))
        fatal = _why_stopped(manager.background_thread_status.fatal_error, log.steps)
        cut = log.cut()
        if cut:
            stop_now(manager)  # a step may be running: it ends while its hooks are in place
        if log.steps and not fatal:
            log.kept.check()  # of a session that was one step long
        log.drain()
    dtype = str(model.dtype).removeprefix("torch.")
    ran = dict.fromkeys((f"ran attention {attention}", f"ran dtype {dtype}", f"ran threads {log.threads}"), 1)
    tops, parts, begun = log.tops(), parts_of(log.packs), log.marks[0] if log.marks else 0.0
    missing = "the session was cut short before it finished" if cut else "the engine ended without a result for it"
    drawn = {} if drawing is None else drawing.drawn
    per_request = [(r, found.get(r.id), tops.get(r.id, []), drawn.get(r.id)) for r in requests]
    outcomes = [_outcome(*known, fatal or missing, cut) for known in per_request]
    return Session(
        scheduled(outcomes, parts, log),
        log.steps,
        sum(len(o.token_ids) for o in outcomes),
        seconds=log.spent(begun, log.ended),
        first_use_seconds=log.first_uses.within(begun, log.ended),
        fatal=fatal,
        packs=log.packs,
        tops=tops,
        figures=session_figures(outcomes, log, parts) | ran,
        admitted=log.admitted,
        pace=log.pace(),
    )


def _why_stopped(error: Any, steps: int) -> str:
    """Why the engine stopped; "" where it did not. A `UserError` if its cache does not fit, or it refuses the model."""
    if isinstance(error, MemoryError) and steps == 0:
        what = f"the engine's cache does not fit: {reason_of(error)}"
        raise UserError(what, "Use a smaller --load, prompt or --max-tokens.") from error
    if isinstance(error, UserError):  # a smaller load would not help: the model is refused from inside
        raise error
    return "" if error is None else f"the engine stopped in step {steps}: {reason_of(error)}"


def _finished(manager: Any, count: int, over: Callable[[], bool], wait: float) -> Iterator[Any]:
    """Yield `count` results of requests, as they finish; fewer where it is over, or the engine's thread has ended."""
    while count and not over():
        result = manager.get_result(timeout=wait)
        if result is None and not manager.is_running():
            result = manager.get_result()  # what arrived between the last look and the thread's end
            if result is None:
                return
        if result is not None and result.is_finished():
            count -= 1
            yield result


_Above: Any = object  # transformers' FIFOScheduler, in the class that a session makes of both: it is loaded late


class Arrivals(_Above):
    """Extends transformers' FIFO scheduler: holds requests back until their arrival step, notes batches in `log`."""

    log: SessionLog
    order: Order  # which requests are offered to the engine first, and how much of each
    waiting_requests_order: deque[str]

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """The next step's requests, of those that have arrived."""
        log = self.log
        if log.cut():
            return [], False, 0, 0  # nothing to do, until the session is stopped
        log.before_step(self.cache, self.active_requests.values())
        self.order.before(self.active_requests.values(), self.cache)
        waiting = list(self.waiting_requests_order)
        if not self.active_requests and waiting:
            # no request is running: jump to the next arrival, because an idle step would compute nothing
            log.clock = max(log.clock, min(log.arrivals[name] for name in waiting))
        held = [name for name in waiting if log.arrivals[name] > log.clock]
        arrived = [name for name in waiting if log.arrivals[name] <= log.clock]
        self.waiting_requests_order = deque(self.order.arrange(arrived))
        scheduled = super().schedule_batch(token_budget, cache_budget)
        self.waiting_requests_order.extend(held)
        if scheduled[0]:  # None: the cache is full, and the engine tries again after making room
            for name in [f.state.request_id for f in scheduled[0] if f.state.request_id in waiting]:
                log.admitted.append(name)
                self.order.admitted(name)
            self.order.scheduled(scheduled[0])
            log.record_step(scheduled[0])
        return scheduled

    def _schedule_request(self, state: Any, request_tokens: list[int], token_budget: int, *more: Any) -> None:
        granted = self.order.allowed(state, token_budget)
        if granted is not None:
            super()._schedule_request(state, request_tokens, granted, *more)

    def add_waiting_request(self, state: Any) -> None:
        """A request arrives, or returns after its cache was freed."""
        if state.request_id in self.log.admitted:
            self.log.preempted.append(state.request_id)
        super().add_waiting_request(state)

    def finish_request(self, request_id: str) -> None:
        """A request has all its tokens."""
        self.log.ended = time.perf_counter()
        super().finish_request(request_id)


@contextmanager
def _engine_of(
    model: Any, requests: Sequence[Request], load: Load, log: SessionLog, seed: int, setting: Setting, drawing: Any
) -> Iterator[Any]:
    """Yield a manager that is not yet started, with our scheduler and hooks in place."""
    from transformers import GenerationConfig
    from transformers.generation.continuous_batching import scheduler as schedulers

    name = f"nondet-{uuid.uuid4().hex}"
    if load.graphs and model.device.type != "cuda":
        raise UserError("CUDA graphs need a CUDA device", "Leave them out on a CPU.")
    if drawing is not None and (load.graphs or setting.drafts):
        raise UserError("our draw goes neither with CUDA graphs nor with speculation", "Leave them out.")
    log.graphs = load.graphs
    order = order_of(model, requests, load, log, setting)
    before, after = order.hooks()
    if load.graphs:
        log.ring = TopRing(min(load.requests, load.budget), model.device)
        after = [log.note_capture]
    after = [*(after or [log.record_logits]), *([drawing] if drawing else [])]
    config = batching_config(requests, load, pages=setting.pages, model=model, scheduler_type=name, seed=seed)
    with ExitStack() as stack:
        own = {"log": log, "order": order}
        schedulers.SCHEDULER_MAPPING[name] = type("ArrivalScheduler", (Arrivals, schedulers.FIFOScheduler), own)
        stack.callback(schedulers.SCHEDULER_MAPPING.pop, name)
        for hook in before:
            stack.callback(model.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for hook in after:
            stack.callback(model.register_forward_hook(hook, with_kwargs=True).remove)
        for block in (quiet(), masks_at_once(model.device), stock_attention(model, setting.attention)):
            stack.enter_context(block)
        try:
            settings = GenerationConfig(**generation(requests), eos_token_id=-1)
            manager = model.init_continuous_batching(generation_config=settings, continuous_batching_config=config)
        except (AttributeError, ValueError) as error:
            what = f"the continuous-batching engine refuses this model: {reason_of(error)}"
            raise UserError(what, "Choose another model.") from error
        stack.callback(manager.destroy)
        try:
            yield manager
        finally:
            if manager._generation_thread is not None:
                stop_now(manager)


def _outcome(
    request: Request, result: Any, tops: Sequence[Any], draws: Sequence[Draw] | None, missing: str, cut: bool
) -> Outcome:
    if result is None:
        return Outcome(request, finish="cut" if cut else "error", reason=missing)
    tokens, logprobs, reason = list(result.generated_tokens), np.asarray(result.logprobs, dtype="<f4"), ""
    if result.error is not None:
        reason = reason_of(result.error)
    elif len(logprobs) != len(tokens):
        reason = f"the engine gave {len(logprobs)} logprobs for {len(tokens)} tokens"
    elif not tokens or len(tokens) < request.max_new_tokens:  # no token ends a completion: all are equally long
        reason = f"the engine ended it after {len(tokens)} of {request.max_new_tokens} tokens"
    elif draws is not None and [d.token for d in draws] != tokens:  # no completion: a hook was skipped, or ran twice
        reason = "the engine continued with other tokens than those drawn"
    kept = list(zip(tokens, tops, strict=True)) if not reason and len(tops) == len(tokens) else []
    figures: dict[str, Any] = {"logprobs": logprobs.tobytes()}
    if draws and not reason:  # the model's logprobs, and how near each draw was
        columns = zip(("logprobs", "border", "cut", "nucleus"), zip(*(d[1:] for d in draws), strict=True), strict=True)
        figures = {name: np.asarray(values, dtype="<f4").tobytes() for name, values in columns}
    figures["margins"] = np.asarray([best - second for _, (best, second, _, _) in kept], dtype="<f4").tobytes()
    runner_up = [second if chosen == first else first for chosen, (_, _, first, second) in kept]
    finish = "error" if reason else "length"
    return Outcome(request, tokens, runner_up=runner_up, finish=finish, reason=reason, **figures)


_SIZES_MOST = 256  # steps may have every size up to here; of larger ones, a full budget


def warm_up(
    model: Any, plan: Plan, device: str, play: Callable[[Sequence[Request]], Session], progress: Progress | None = None
) -> Session:
    """Run everything once that the rounds will run, under the implementation that is on; returns the first round. On
    CUDA each new size costs time (a kernel is compiled, an algorithm proven, cuDNN plans). So the layers of `model`
    (None: they are in other processes) are called first, at the sizes that steps may have. First uses in later rounds
    are left out of the timings. `progress` is called for each layer, for the round, and at each compilation or
    proof."""
    if device != "cuda" or model is None:
        return play(plan.rounds[0])
    calls, report = [0], progress or (lambda *_: None)

    def layers(done: int, total: int, _: FirstUses) -> None:
        calls.append(total)
        report(done, total + 1, uses)

    with first_uses() as uses:
        prepare(model, *sizes_of(plan.load), layers)
        uses.on_change = lambda so_far: report(calls[-1], calls[-1] + 1, so_far)
        session = play(plan.rounds[0])
    report(calls[-1] + 1, calls[-1] + 1, uses)
    return session


def sizes_of(load: Load) -> tuple[list[int], list[int]]:
    """Query tokens of steps, and requests. A step that decodes has one token of each, a prefill takes what is left."""
    requests = min(load.requests, load.budget, _SIZES_MOST)
    if load.graphs:  # padded, and so is the number of requests
        step = query_step(load.requests, load.budget)
        tokens = sorted({*[*range(step, load.budget, step)][:_SIZES_MOST], load.budget})
        return tokens, sorted({min(n, requests) for n in tokens})
    return [*range(1, min(load.budget, _SIZES_MOST) + 1), load.budget], list(range(1, requests + 1))
