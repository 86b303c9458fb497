"""`nondet sample --vary`: one thing about the engine varied at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.commands.common import progress_bar, say
from nondet.commands.output import Output
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.sampling.axes import Conditions, Subject
    from nondet.sampling.model import LoadedModel
    from nondet.sampling.plan import Load, Plan

__all__ = ["DRAFT_MODEL", "VARY", "N", "VaryOptions", "check_vary", "sample_varied"]

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
