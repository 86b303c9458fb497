"""`nondet gate --endpoint`: a server is tested until it diverges, or the requested power is reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from nondet.core.runfile import check_free
from nondet.errors import UserError
from nondet.services import endpoint as e
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink
from nondet.services.sample import prompt_texts

_POWER, _THRESHOLDS = "Power", "Thresholds of a sampler and a trainer"
_AT_LEAST_0 = o.Range(0, 2**53, "Give 0 or more.")
# The most loads of a run, far more than a user would wait for.
_LOADS_MOST = 20_000
_OF_A_SERVER = (
    *("model", "prompt", "prompts", "max_tokens", "load", "seed", "out", "resume"),
    *(field.name for part in (e.Connection, o.Drawing) for field in fields(part)),
)


@dataclass(frozen=True, kw_only=True)
class GateRequest(e.Connection, o.Drawing, Request):
    """The options of `nondet gate`."""

    run: Path | None = o.own("Run file to judge.", metavar="[RUN]", shown="the latest in runs/")
    impl: list[str] | None = o.own(
        "Judge only this implementation, e.g. invariant. Repeatable.", shown="all of the run"
    )
    rate: str | None = o.own(
        'Rate of divergence that the run must be able to detect: "1%" or 0.01.', shown="10%", panel=_POWER
    )
    confidence: str | None = o.own("Confidence level for --rate.", shown="95%", panel=_POWER)
    by: str | None = o.own(
        'Unit of --rate: "load", or "request", which treats requests of one load as independent.',
        shown="load",
        panel=_POWER,
        check=o.OneOf(("load", "request")),
    )
    mismatch_bits: int | None = o.own(
        "Most tokens per arm whose logprobs may differ.", panel=_THRESHOLDS, check=_AT_LEAST_0
    )
    k3: float | None = o.own("Largest K3, for rl of any step; prime-rl: 0.015.", panel=_THRESHOLDS, check=_AT_LEAST_0)
    mult_prob_error: float | None = o.own(
        "Largest mean exp |d|, of rl in a step; NeMo RL's is 1.05.", panel=_THRESHOLDS, check=_AT_LEAST_0
    )
    endpoint: str | None = o.own("Test this server until it diverges or the power is reached.", panel=e.PANEL)
    model: str | None = o.own("The server's name for the model.", shown="its only one", panel=e.PANEL)
    prompt: str | None = o.own("The prompt.", shown="the embedded model's", panel=e.PANEL)
    prompts: Path | None = o.own("File of prompts: .txt, .jsonl, .csv or .parquet.", panel=e.PANEL)
    max_tokens: int = o.own("Tokens in each completion.", default=64, panel=e.PANEL, check=e.LENGTHS)
    load: str = o.own(
        'Concurrent requests: light, default, heavy, or "others=16,targets=4,...". Many short loads show most.',
        default="light",
        panel=e.PANEL,
    )
    seed: int = o.own("Seed of all random draws.", default=0, min=0, max=2**32 - 1, panel=o.MACHINE)
    junit: Path | None = o.own("Write JUnit XML.", panel=o.OUTPUT)
    summary: Path | None = o.own(
        "Append a markdown summary to this file.", shown="$GITHUB_STEP_SUMMARY", panel=o.OUTPUT
    )

    def _check(self) -> None:
        _ = self.power
        if self.junit is not None:
            check_free(self.junit, force=self.force or self.resume)
        if self.run is not None and self.endpoint is not None:
            raise UserError("gate judges a run file or a server", "Leave one of the two out.")
        if self.endpoint is None:
            self.refuse(_OF_A_SERVER, "{} without --endpoint", "A run file is tested already.")

    @cached_property
    def power(self) -> tuple[float, float]:
        """The rate to detect, and the confidence."""
        return _share("--rate", self.rate, 0.1), _share("--confidence", self.confidence, 0.95)

    @property
    def unit(self) -> str:
        """What the rate is per."""
        return self.by or "load"


def _share(flag: str, word: str | None, usual: float) -> float:
    """ "1%" or 0.01."""
    if word is None:
        return usual
    number = word.strip().removesuffix("%").strip()
    try:
        value = float(number) / (100.0 if word.strip().endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 1e-9 <= value <= 1 - 1e-9:
        raise UserError(f"{flag} must be between 0 and 1; got {word!r}", 'Give it like "1%" or 0.01.')
    return value


def ask_endpoint(request: GateRequest, sink: Sink, prompts: Sequence[str] = ()) -> Path:
    """Test the server, with the request's prompts or these; returns the path of the run. Where tokens are drawn, a
    prompt with a seed is a prompt of its own: only answers of equal seeds are compared.

    Raises:
        UserError: a server without completions, or where tokens are drawn one that is not shown to respect a seed.
        ServerStoppedError: it stopped answering; finished records are on disk.
    """
    from nondet.endpoint.arms import parse_endpoint_load
    from nondet.endpoint.collect import CACHE, SOLO, Watcher, loaded_each

    (rate, confidence), by = request.power, request.unit
    output = Output(request, "gate", sink)
    output.check_side_file()
    load = parse_endpoint_load(request.load)
    servers = [e.server(request, "server", request.endpoint, request.model)]
    texts = prompts or prompt_texts(request.prompt, None, request.prompts, None)
    if loaded_each(load, 1, rate, confidence, by) // load.targets > _LOADS_MOST:
        raise UserError(
            f"--rate {rate:g} with {confidence:.0%} takes more than {_LOADS_MOST:,} loads",
            "Give a larger --rate, or --by request.",
        )
    texts, subjects = e.meet(output, servers, texts, request.max_tokens, own=bool(prompts))
    arms = {"solo": SOLO, "cold": CACHE, "warm": CACHE, "loaded": loaded_each(load, subjects, rate, confidence, by)}
    e.ask(
        "gate", output, texts, servers, load, arms, request.max_tokens,
        Watcher(rate, confidence, by, subjects), gate={"rate": rate, "confidence": confidence, "by": by},
    )  # fmt: skip
    return output.path
