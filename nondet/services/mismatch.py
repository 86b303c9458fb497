"""`nondet mismatch`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nondet.core.runfile import is_run
from nondet.embedded import DEFAULT_PROMPT
from nondet.errors import UserError, each_once
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink
from nondet.services.sample import implementations, open_model

_MODEL = "Folder, hub name, or random weights; samples, trains, and computes hypotheses."
_TEXTS = (DEFAULT_PROMPT, "Return a", "The class is a subclass of", "If the argument is not given, the default is")
_DRAWN = ("prompt", "n", "tokens", "arms")


@dataclass(frozen=True, kw_only=True)
class MismatchRequest(o.ModelOptions, Request):
    """The options of `nondet mismatch`."""

    run: Path | None = o.own("A run of `nondet sample` to test.", metavar="[RUN]")
    model: str | None = o.own(_MODEL, shown="the embedded model")
    trainer: str = o.own(
        "dtype=float32, autocast=bfloat16, padding=right, left or packed, micro=4 (rollouts of one forward), "
        "head=float32, formula=log_softmax; with commas.",
        default="",
        shown="as the sampler, padding=right",
    )
    rollouts: Path | None = o.own(
        "A trainer's saved tokens and logprobs, a .jsonl file or a folder of them: nothing is sampled."
    )
    older: str | None = o.own(
        "Older weights that one side may still use (folder or hub name): a checkpoint, a base model."
    )
    arms: str = o.own(
        "Comma-separated: stock, sampler-only, invariant, or only a family of operators invariant on both sides, "
        "such as invariant:attention.",
        default="stock,invariant",
    )
    prompt: list[str] | None = o.own("A prompt. Repeatable.", shown="four of the embedded model's")
    n: int = o.own("Rollouts of each prompt.", default=12, check=o.Range(1, 10_000))
    tokens: int = o.own("Tokens of each rollout.", default=48, check=o.Range(1, 100_000))

    def _check(self) -> None:
        if self.rollouts is not None and self.run is not None:
            raise UserError("--rollouts with a run file", "Give one of the two.")
        if self.run is not None and self.run.is_file() and not is_run(self.run):
            raise UserError(f"{self.run} is no run file", f"Rollouts of another trainer: --rollouts {self.run}.")
        if self.rollouts is not None or self.run is not None:
            self.refuse(_DRAWN, "{} where rollouts are read", "Nothing is sampled then.")
        each_once("--prompt", self.prompt or ())
        implementations([name for name in self.arm_names if ":" in name] or None)

    @cached_property
    def arm_names(self) -> tuple[str, ...]:
        """The arms, in order."""
        return o.arms(self.arms, ("stock", "sampler-only", "invariant", "invariant:FAMILY"))


def mismatch(request: MismatchRequest, sink: Sink) -> Path:
    """Compare a sampler with a trainer: whether their logprobs differ, what kind of mismatch it is, what cures it."""
    output = Output(request, "mismatch", sink)

    from nondet.core.certificates import digest_of
    from nondet.mismatch.collect import FILE, RolloutPlan, collect
    from nondet.mismatch.rollouts import check_vocabulary, read_rollouts, rollouts_of_run
    from nondet.mismatch.trainer import parse_spec
    from nondet.sampling.model import check_lengths

    spec = parse_spec(request.trainer)
    by_arm = {FILE: read_rollouts(request.rollouts)} if request.rollouts is not None else {}
    if any(r.trainer is None for r in by_arm.get(FILE, ())) and request.model is None:
        what = f"{request.rollouts} has no trainer_logprobs, and no --model to compute them"
        raise UserError(what, "Give the --model that was trained.")
    plan: dict[str, Any] = {"trainer": asdict(spec)}
    models, sampled = dict[str, Any](), None
    if not by_arm or request.model is not None:
        loaded = _opened(request, sink, model=request.model, dtype=request.dtype)
        models["sampler"] = loaded
        plan |= {"model": {"name": loaded.name, **loaded.identity}, "device": loaded.device, "dtype": loaded.dtype}
        if request.run is not None:
            by_arm = rollouts_of_run(request.run, loaded)
        vocabulary = loaded.model.config.get_text_config().vocab_size
        check_vocabulary([r for rollouts in by_arm.values() for r in rollouts], vocabulary, loaded.context, loaded.name)
        if spec.dtype and spec.dtype != loaded.dtype:
            models["trainer"] = _opened(request, sink, model=request.model, dtype=spec.dtype)
        if request.older is not None:
            models["older"] = older = _opened(request, sink, model=request.older, dtype=request.dtype)
            plan["older"] = older.identity
            _check_same_form(loaded.model, older.model, request.older)
    elif request.older is not None:
        raise UserError("--older without --model", "Hypotheses are computed by the model that was trained.")
    if by_arm:
        read = [r for rollouts in by_arm.values() for r in rollouts]
        text = "".join(f"{list(r.ids)} {list(r.drawn)} {r.sampler.tobytes()!r}" for r in read)
        plan |= {"arms": list(by_arm), "scored": {arm: len(rollouts) for arm, rollouts in by_arm.items()}}
        plan["tokens_digest"] = digest_of(text.encode())
    else:
        texts = request.prompt or list(_TEXTS)
        for prompt in texts:
            check_lengths(loaded, loaded.encode(prompt), request.tokens)
        plan |= {"arms": list(request.arm_names), "texts": texts, "n": request.n, "tokens": request.tokens}
        sampled = RolloutPlan(texts, request.n, request.tokens, request.seed)
    with output.recording("mismatch", plan, request.seed) as writer, sink.steps() as say:
        collect(plan["arms"], writer, spec, say, models, sampled, by_arm)
    return output.present()


def _opened(request: MismatchRequest, sink: Sink, *, model: str | None, dtype: str) -> Any:
    return open_model(replace(request, model=None if model == "embedded" else model, dtype=dtype), sink)


def _check_same_form(model: Any, older: Any, name: str) -> None:
    shapes = [{n: tuple(p.shape) for n, p in m.named_parameters()} for m in (model, older)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"--older {name} is another model: its parameters have other names or shapes",
            "Give a checkpoint of --model.",
        )
