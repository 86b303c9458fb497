"""transformers' own continuous batching, driven from a plan so that one seed means one sequence of batches.

The engine is the real one: ragged batches under a token budget, decodes before prefills, chunked prefill, prefix
sharing. Ours are only the arrival times (see `nondet.sampling.schedule`), what is written down, and at a temperature
the draw of requests that bring a seed (see `nondet.sampling.sampler`). Synchronous batching: what runs in a step
depends on the plan alone, never on the clock. Where the load asks for CUDA graphs steps are padded to a few sizes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from nondet.core.launch import first_uses
from nondet.errors import UserError, reason_of
from nondet.sampling.batching import batching_config, masks_at_once, quiet, stock_attention, stop_now
from nondet.sampling.conditions import cheap_collections
from nondet.sampling.drafters import make_draft
from nondet.sampling.figures import session_figures
from nondet.sampling.orders import ORDERS
from nondet.sampling.plan import Load, Request
from nondet.sampling.protocol import Outcome, Session, Watcher
from nondet.sampling.sampler import Drawing, drawn_outcome, generation
from nondet.sampling.schedule import SessionLog, run_lengths, scheduler_class
from nondet.sampling.setting import PLAIN, Setting
from nondet.sampling.speculation import Speculation
from nondet.sampling.tops import TopRing

__all__ = ["Outcome", "Session", "TransformersEngine", "engine_of", "run_session"]

# How long the main thread waits for a result before it looks whether the engine's thread is still alive, and whether
# a watcher has seen what it came for.
_POLL_SECONDS, _WATCHED_SECONDS = 0.5, 0.02


class TransformersEngine:
    """transformers' continuous batching as a member of the table of engines, see `nondet.sampling.protocol`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def describe(self) -> dict[str, Any]:
        """What is fixed beside the load."""
        import transformers

        return {
            "engine": "transformers",
            "version": transformers.__version__,
            "attention": self.model.config._attn_implementation,
            "scheduler": "first come, first served, decodes before prefills, arrivals in steps",
            "asynchronous": False,
            "sampling": "greedy; at a temperature our draw by seed and position, or the engine's own",
            "gives": ["token ids", "logprobs", "margins", "schedule"],
        }

    def run(
        self,
        requests: Sequence[Request],
        load: Load,
        *,
        seed: int = 0,
        eos: Sequence[int] = (),
        on_token_count: Callable[[Request, int], None] | None = None,
        forced: Mapping[str, Sequence[int]] | None = None,
        watcher: Watcher | None = None,
        until: str | None = None,
        setting: Setting = PLAIN,
    ) -> Session:
        """See `run_session`."""
        return run_session(
            self.model,
            requests,
            load,
            seed=seed,
            eos=eos,
            on_token_count=on_token_count,
            forced=forced,
            watcher=watcher,
            until=until,
            setting=setting,
        )


@cheap_collections()
def run_session(
    model: Any,
    requests: Sequence[Request],
    load: Load,
    *,
    seed: int = 0,
    eos: Sequence[int] = (),
    on_token_count: Callable[[Request, int], None] | None = None,
    forced: Mapping[str, Sequence[int]] | None = None,
    watcher: Watcher | None = None,
    until: str | None = None,
    setting: Setting = PLAIN,
) -> Session:
    """Run the requests through a fresh engine, from empty to empty.

    Args:
        model: A causal LM of transformers, on its device.
        requests: By arrival, as in a plan's round.
        eos: Token ids that end a completion; none by default, so that all completions have one length.
        on_token_count: Called with each finished request and its number of tokens, on the calling thread.
        forced: Request id -> the tokens that it is fed, whatever it chose; a request that is not named goes its own
            way. The logprobs stay those of the tokens that it would have chosen.
        watcher: Looks on from inside of the engine's thread; once it is `done` the session is cut short, and requests
            that have not finished by then have the finish "cut".
        until: The session is likewise cut short once this request has finished.
        setting: The engine's own settings beside the load.

    Raises:
        UserError: the engine refuses the model or the sizes, or runs the model and does not serve it.
        KeyboardInterrupt: Ctrl-C; the engine's thread has ended by then.
    """
    if load.graphs and watcher is not None:
        raise UserError("steps that run as CUDA graphs can't be watched: a replay runs no Python", "Leave them out.")
    log = SessionLog({r.id: r.arrival_step for r in requests}, forced=forced or {})
    by_id = {r.id: r for r in requests}
    found: dict[str, Any] = {}
    log.cut = lambda: until in found or (watcher is not None and watcher.done)
    fatal = ""
    watching = nullcontext() if watcher is None else watcher.attached(model, log)
    wait = _POLL_SECONDS if watcher is None else _WATCHED_SECONDS
    speculation = _speculation(model, load, log, setting)
    drawing = Drawing.of(requests, log)
    with (
        first_uses() as log.first_uses,
        engine_of(
            model, requests, load, log, seed=seed, eos=eos, setting=setting, speculation=speculation, drawing=drawing
        ) as manager,
        watching,
    ):
        for request in requests:
            manager.add_request(list(request.prompt), request_id=request.id, max_new_tokens=request.max_new_tokens)
        manager.start()
        attention = str(model.config._attn_implementation).removeprefix("paged|")  # as the engine has set it by now
        while len(found) < len(requests) and not log.cut():
            result = manager.get_result(timeout=wait)
            if result is None:
                if manager.is_running():
                    continue
                result = manager.get_result()  # what came between the last look and the thread's end
                if result is None:
                    break
            if result.is_finished():
                found[result.request_id] = result
                if on_token_count is not None:
                    on_token_count(by_id[result.request_id], len(result.generated_tokens))
        error = manager.background_thread_status.fatal_error
        if isinstance(error, MemoryError) and log.steps == 0:
            raise UserError(
                f"the engine's cache does not fit: {reason_of(error)}", "Use a smaller --load, prompt or --max-tokens."
            ) from error
        if isinstance(error, UserError):  # no smaller load would help: the model is refused from inside
            raise error
        if error is not None:
            fatal = f"the engine stopped in step {log.steps}: {reason_of(error)}"
        cut = log.cut()
        if cut:
            stop_now(manager)  # a step may be under way: it ends while its hooks are in place
        if log.steps and not fatal:
            log.kept.check()  # of a session that was one step long
        log.drain()
    ran = {
        f"ran attention {attention}": 1,
        f"ran dtype {str(model.dtype).removeprefix('torch.')}": 1,
        f"ran threads {log.threads}": 1,
    }
    margins = log.margins()
    outcomes = [_outcome(r, found.get(r.id), log, margins.get(r.id, []), eos, fatal, cut) for r in requests]
    if drawing is not None:
        outcomes = [drawn_outcome(o, drawing.drawn.get(o.request.id, [])) for o in outcomes]
    return Session(
        outcomes=outcomes,
        steps=log.steps,
        tokens=sum(len(o.token_ids) for o in outcomes),
        seconds=log.spent(log.started, log.ended),
        first_use_seconds=log.first_uses.within(log.started, log.ended),
        fatal=fatal,
        packs=log.packs,
        tops=log.tops(),
        figures=session_figures(outcomes, log, load, speculation) | ran,
        admitted=log.admitted,
        pace=log.pace(),
    )


@contextmanager
def engine_of(
    model: Any,
    requests: Sequence[Request],
    load: Load,
    log: SessionLog,
    *,
    seed: int = 0,
    eos: Sequence[int] = (),
    setting: Setting = PLAIN,
    speculation: Speculation | None = None,
    drawing: Drawing | None = None,
    watched: bool = True,
) -> Iterator[Any]:
    """A manager that has not started, with our scheduler and hooks in place; everything is undone at the end.

    Args:
        watched: Whether margins are kept, and captures noted.
    """
    from transformers import GenerationConfig
    from transformers.generation.continuous_batching import scheduler as schedulers

    name = f"nondet-{uuid.uuid4().hex}"
    if load.graphs and model.device.type != "cuda":
        raise UserError("CUDA graphs need a CUDA device", "Leave them out on a CPU.")
    if drawing is not None and (load.graphs or speculation is not None):
        raise UserError("our draw goes neither with CUDA graphs nor with speculation", "Leave them out.")
    log.graphs = load.graphs
    order = ORDERS[setting.order]({r.id: r for r in requests})
    schedulers.SCHEDULER_MAPPING[name] = scheduler_class(log, setting, order, speculation)
    hooks = []
    if speculation is not None:
        hooks.append(model.register_forward_pre_hook(speculation.widen, with_kwargs=True))
        hooks.append(model.register_forward_hook(speculation.verify, with_kwargs=True))
    elif not watched:
        pass
    elif load.graphs:
        log.ring = TopRing(min(load.requests, load.budget), model.device)
        hooks.append(model.register_forward_hook(log.ring.hook, with_kwargs=True))
        hooks.append(model.register_forward_hook(log.note_capture))
    else:
        hooks.append(model.register_forward_hook(log.record_logits, with_kwargs=True))
    if drawing is not None:
        hooks.append(model.register_forward_hook(drawing, with_kwargs=True))
    try:
        with quiet(), masks_at_once(model.device), stock_attention(model, setting.attention):
            try:
                manager = model.init_continuous_batching(
                    generation_config=GenerationConfig(**generation(requests), eos_token_id=list(eos) or -1),
                    continuous_batching_config=batching_config(
                        requests, load, pages=setting.pages, model=model, scheduler_type=name, seed=seed
                    ),
                )
            except (AttributeError, ValueError) as error:
                raise UserError(
                    f"the continuous-batching engine refuses this model: {reason_of(error)}", "Choose another model."
                ) from error
            try:
                yield manager
            finally:
                if manager._generation_thread is not None:
                    stop_now(manager)
                manager.destroy()
    finally:
        for hook in hooks:
            hook.remove()
        del schedulers.SCHEDULER_MAPPING[name]


def _speculation(model: Any, load: Load, log: SessionLog, setting: Setting) -> Speculation | None:
    """What the setting asks for.

    Raises:
        UserError: with forced tokens, or inside of CUDA graphs, where nothing can be verified.
    """
    if not setting.drafts:
        return None
    if load.graphs or log.forced:
        what = "CUDA graphs" if load.graphs else "forced tokens"
        raise UserError(f"speculative decoding does not go with {what}", "Vary one of the two.")
    return Speculation(make_draft(setting, model), setting.draft_tokens, log)


def _outcome(
    request: Request,
    result: Any,
    log: SessionLog,
    margins: list[tuple[float, int, int]],
    eos: Sequence[int],
    fatal: str,
    cut: bool,
) -> Outcome:
    entries = log.entries.get(request.id, [])
    sizes = [log.batch[step] for step, _ in entries]
    tokens = list(result.generated_tokens) if result is not None else []
    logprobs = np.asarray(result.logprobs if result is not None else [], dtype="<f4")
    reason = ""
    if result is None and cut and not fatal:
        reason = "the session was cut short before it finished"
    elif result is None:
        reason = fatal or "the engine ended without a result for it"
    elif result.error is not None:
        reason = reason_of(result.error)
    elif len(logprobs) != len(tokens):
        reason = f"the engine gave {len(logprobs)} logprobs for {len(tokens)} tokens"
    elif not tokens or (len(tokens) < request.max_new_tokens and tokens[-1] not in eos):
        reason = f"the engine ended it after {len(tokens)} of {request.max_new_tokens} tokens"
    kept = list(zip(tokens, margins, strict=True)) if not reason and len(margins) == len(tokens) else []
    return Outcome(
        request=request,
        token_ids=tokens,
        logprobs=logprobs.tobytes(),
        margins=np.asarray([gap for _, (gap, _, _) in kept], dtype="<f4").tobytes(),
        runner_up=[second if chosen == first else first for chosen, (_, first, second) in kept],
        finish="cut" if cut and result is None else "error" if reason else "eos" if tokens[-1] in eos else "length",
        schedule=run_lengths(entries),
        batch_min=min(sizes, default=0),
        batch_max=max(sizes, default=0),
        reason=reason,
    )
