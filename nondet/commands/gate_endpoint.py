"""`nondet gate --endpoint`: a server asked until it diverges, or until a divergence would have been seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nondet.commands.common import progress_bar
from nondet.commands.endpoint import EndpointOptions, reach
from nondet.commands.output import Output
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.core.records import Run
    from nondet.sampling.plan import Sampling

__all__ = ["ask_endpoint"]

_LOADS_MOST = 20_000


def ask_endpoint(
    options: EndpointOptions,
    output: Output,
    prompts: Sequence[str],
    model: str | None,
    samplings: Sequence[Sampling] = (),
    *,
    rate: float,
    confidence: float,
    by: str,
    max_tokens: int,
    load: str,
    seed: int,
) -> Run:
    """Ask the server, and give the run that it was written to.

    Args:
        samplings: How tokens are drawn, one for each seed; empty for greedy requests. A prompt with a seed is asked as
            a prompt of its own: only answers of equal seeds are compared.

    Raises:
        UserError: options that make no sense, a server that gives no completion, or where tokens are drawn one that is
            not shown to keep to a seed.
        ServerStoppedError: it stopped answering; what was finished is on disk.
    """
    from nondet.core.runfile import read_run
    from nondet.core.traces import traces_path
    from nondet.endpoint.arms import Settings, build_arms, describe, parse_endpoint_load
    from nondet.endpoint.collect import SOLO, Watcher, collect, loaded_each
    from nondet.sampling.plan import background_text

    if not 1 <= max_tokens <= 1_000_000:
        raise UserError(f"--max-tokens {max_tokens} makes no sense", "Give the tokens of each completion.")
    texts = [text for text in prompts for _ in range(max(1, len(samplings)))]
    wanted = parse_endpoint_load(load)
    each = loaded_each(wanted, len(texts), rate, confidence, by)
    if each * len(texts) // wanted.targets > _LOADS_MOST:
        raise UserError(
            f"--rate {rate:g} with {confidence:.0%} takes more than {_LOADS_MOST:,} loads",
            "Give a larger --rate, or --by request.",
        )
    servers = options.servers(model)
    plan = build_arms(
        {"solo": SOLO, "loaded": each},
        wanted,
        prompts=len(texts),
        max_tokens=max_tokens,
        seed=seed,
        texts=background_text(),
    )
    settings = Settings.drawn(prompts, max_tokens, samplings)
    described = describe(servers, plan, settings, wanted, seed=seed, protocol=options.protocol, stream=options.stream)
    described["gate"] = {"rate": rate, "confidence": confidence, "by": by}
    reach(servers, cuts=settings.top_k > 0)
    writer = output.open("gate", described, seed)
    watcher = Watcher(rate, confidence, by, len(texts))
    try:
        with output.measuring(writer), progress_bar() as progress:
            task = progress.add_task("asking", total=sum(r.targets for r in plan.rounds))

            def advance(_: str, arm: str, done: int) -> None:
                progress.update(task, completed=done, description=f"{arm}, {watcher.loads} loads")

            collect(servers, plan, settings, writer, progress=advance, enough=watcher.enough, seeded=bool(samplings))
    except UserError:
        if not writer.done and not writer.resumed:
            for path in (output.path, traces_path(output.path)):
                path.unlink(missing_ok=True)
        raise
    return read_run(output.path)
