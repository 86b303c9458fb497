"""`nondet diagnose`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from nondet.errors import UserError
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, pick_device, set_threads
from nondet.services.sample import prompt_text

# Many short rounds: completions of one round are not independent, and a difference shows within a few tokens.
_LOAD, _N, _MAX_TOKENS = "default,targets=12,others=12,spread=24", 60, 64
_MOST = 10_000


@dataclass(frozen=True, kw_only=True)
class DiagnoseRequest(Request):
    """The options of `nondet diagnose`.

    Raises:
        UserError: an --n or a --within that makes no sense.
    """

    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, hub name, or random weights such as random:qwen3-12x1024. Default: the embedded model.",
            show_default=False,
        ),
    ] = None
    prompt: o.PROMPT = None
    prompt_file: o.PROMPT_FILE = None
    load: Annotated[
        str,
        o.opt(
            'What runs alongside: light, default, heavy, or "others=60,budget=256,...".', shown=True, complete=o.loads
        ),
    ] = _LOAD
    n: Annotated[int | None, o.opt(f"Completions of the prompt in company. Default: {_N}.")] = None
    within: Annotated[
        float | None,
        o.opt(
            "How many seconds it may take: parts that no longer fit are left out, and the report says which. "
            "0: everything is asked. Default: about 180 on a CPU, 120 on a GPU, which only thins rounds and values; 0 "
            "where --n is given."
        ),
    ] = None
    max_tokens: Annotated[int, o.opt("Tokens of each completion.", shown=True)] = _MAX_TOKENS
    seed: o.SEED = 0
    dtype: o.MODEL_DTYPE = "bfloat16"
    device: o.DEVICE = "auto"
    threads: o.THREADS = None
    trust_remote_code: o.TRUST = False

    def __post_init__(self) -> None:
        if self.n is not None and not 2 <= self.n <= _MOST:
            raise UserError(f"--n {self.n} makes no sense", f"Give the number of completions, from 2 to {_MOST:,}.")
        if self.within is not None and not 0 <= self.within < math.inf:
            raise UserError(f"--within {self.within:g} makes no sense", "Give seconds, or 0 for no limit.")


def diagnose(request: DiagnoseRequest, sink: Sink) -> Path:
    """Whether a model's output depends on its batch, where, why, what cures it, and what that costs: one verdict."""
    output = Output.of(request, "diagnose", sink)
    output.check_side_file()
    text = prompt_text(request.prompt, request.prompt_file)

    from nondet.diagnose.steps import WITHIN_S, Diagnoser
    from nondet.sampling.collect import describe
    from nondet.sampling.model import check_lengths, load_model
    from nondet.sampling.plan import build_plan, parse_load

    wanted = parse_load(request.load)
    if wanted.graphs:
        raise UserError("--load graphs=on can't be diagnosed: a replayed graph runs no Python", "Leave it out.")
    if wanted.requests < 2 or wanted.others + wanted.targets < 2:
        raise UserError(
            f"--load {request.load}: every request would run alone", "Give a load with company, such as default."
        )
    target = pick_device(request.device)
    set_threads(request.threads)
    loaded = load_model(request.model, request.dtype, target, trust_remote_code=request.trust_remote_code)
    tokens = loaded.encode(text)
    check_lengths(loaded, tokens, request.max_tokens)
    plan = build_plan(
        wanted,
        n=_N if request.n is None else request.n,
        seed=request.seed,
        prompt=tokens,
        max_new_tokens=request.max_tokens,
        context=loaded.context or 2**31,
        encode=loaded.encode_plain,
    )
    described = describe(
        loaded, plan, prompt=text, prompt_tokens=len(tokens), max_new_tokens=request.max_tokens, seed=request.seed,
        impls=["stock", "invariant"],
    )  # fmt: skip
    within_s = request.within if request.within is not None else WITHIN_S[target] if request.n is None else 0.0
    bound = bool(request.within)
    writer = output.open(
        "diagnose", {**described, "within_s": within_s, **({"bound": True} if bound else {})}, request.seed
    )
    with output.measuring(writer):
        Diagnoser(loaded, plan, writer, request.seed, request.threads, sink.say, within_s, bound).run()
    return output.present()
