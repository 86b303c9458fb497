"""`nondet diagnose`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from nondet.commands import options as o
from nondet.commands.output import Output, pick_device, say, set_threads
from nondet.commands.sample import check_side_file, prompt_text
from nondet.errors import UserError

__all__ = ["diagnose"]

# Many short rounds: completions of one round are not independent, and a difference shows within a few tokens.
_LOAD, _N, _MAX_TOKENS = "default,targets=12,others=12,spread=24", 60, 64
_MOST = 10_000


def diagnose(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, hub name, or random weights such as random:qwen3-12x1024. Default: the embedded model.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="The prompt. Default: the embedded model's.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="Read the prompt from a UTF-8 text file.", show_default=False)
    ] = None,
    load: Annotated[
        str,
        typer.Option(
            "--load",
            help='What runs alongside: light, default, heavy, or "others=60,budget=256,...".',
            autocompletion=o.loads,
        ),
    ] = _LOAD,
    n: Annotated[
        int | None,
        typer.Option("--n", help=f"Completions of the prompt in company. Default: {_N}.", show_default=False),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            "--within",
            help="How many seconds it may take: parts that no longer fit are left out, and the report says which. "
            "0: everything is asked. Default: about 180 on a CPU, 120 on a GPU, which only thins rounds and values; 0 "
            "where --n is given.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of each completion.")] = _MAX_TOKENS,
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
    """Whether a model's output depends on its batch, where, why, what cures it, and what that costs: one verdict."""
    if n is not None and not 2 <= n <= _MOST:
        raise UserError(f"--n {n} makes no sense", f"Give the number of completions, from 2 to {_MOST:,}.")
    if within is not None and not 0 <= within < math.inf:
        raise UserError(f"--within {within:g} makes no sense", "Give seconds, or 0 for no limit.")
    output = Output.of(
        "diagnose",
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
    text = prompt_text(prompt, prompt_file)

    from nondet.diagnose.steps import WITHIN_S, Diagnoser
    from nondet.sampling.collect import describe
    from nondet.sampling.model import check_lengths, load_model
    from nondet.sampling.plan import build_plan, parse_load

    wanted = parse_load(load)
    if wanted.graphs:
        raise UserError("--load graphs=on can't be diagnosed: a replayed graph runs no Python", "Leave it out.")
    if wanted.requests < 2 or wanted.others + wanted.targets < 2:
        raise UserError(f"--load {load}: every request would run alone", "Give a load with company, such as default.")
    target = pick_device(device)
    set_threads(threads)
    loaded = load_model(model, dtype, target, trust_remote_code=trust_remote_code)
    tokens = loaded.encode(text)
    check_lengths(loaded, tokens, max_tokens)
    plan = build_plan(
        wanted,
        n=_N if n is None else n,
        seed=seed,
        prompt=tokens,
        max_new_tokens=max_tokens,
        context=loaded.context or 2**31,
        encode=loaded.encode_plain,
    )
    described = describe(
        loaded, plan, prompt=text, prompt_tokens=len(tokens), max_new_tokens=max_tokens, seed=seed,
        impls=["stock", "invariant"],
    )  # fmt: skip
    within_s = within if within is not None else WITHIN_S[target] if n is None else 0.0
    bound = bool(within)
    writer = output.open("diagnose", {**described, "within_s": within_s, **({"bound": True} if bound else {})}, seed)
    with output.measuring(writer):
        Diagnoser(loaded, plan, writer, seed, threads, say, within_s, bound).run()
    output.present()
