"""Servers tested over HTTP: the options of the commands that do this, and how they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from nondet.errors import UserError
from nondet.services import options as o

if TYPE_CHECKING:
    from nondet.endpoint.arms import EndpointLoad, Server
    from nondet.endpoint.collect import Watcher
    from nondet.services.run import Output

PANEL = "Endpoint"
_CHARACTERS_LEAST = 3  # a token of a text, in a server's own tokenizer

LENGTHS = o.Range(1, 1_000_000, "Give the tokens of each completion.")


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How a server is reached: options of `nondet.endpoint.client.HttpClient`, by its names."""

    protocol: str = o.own("The server's API: auto, openai, vllm, ...", default="auto", panel=PANEL)
    stream: bool = o.own(
        "Request streams: they show what ran at the same time, and the time to the first token.",
        "--stream/--no-stream",
        default=True,
        shown=True,
        panel=PANEL,
    )
    key_env: str | None = o.own(
        "Environment variable that holds the API key.", shown="NONDET_API_KEY or OPENAI_API_KEY", panel=PANEL
    )
    allow_plain_http: bool = o.own("Allow sending the key unencrypted to another machine.", default=False, panel=PANEL)
    insecure: bool = o.own("Accept any TLS certificate of the server.", default=False, panel=PANEL)
    ca_file: str | None = o.own("TLS certificates to trust instead.", panel=PANEL)


@dataclass(frozen=True, kw_only=True)
class EndpointOptions(Connection):
    """The options of a command that sends requests to a server."""

    endpoint: str | None = o.own("Test a server: http://HOST:PORT or https://HOST/v1.", panel=PANEL)
    arms: str | None = o.own(
        "What to compare, each with its number of completions if you like: solo=50,loaded,equal,cold,warm,chunked.",
        shown="solo,cold,warm,chunked,loaded",
        panel=PANEL,
    )
    concurrency: int | None = o.own(
        "Concurrent requests in the loaded arm.", shown="32", panel=PANEL, check=o.Range(1, 4096)
    )
    rate: float | None = o.own(
        "Requests per second in the loaded arm.", shown="as many as fit", panel=PANEL, check=o.Range(0.001, 100_000)
    )
    compare_endpoint: str | None = o.own("A second server, sent the same requests.", panel=PANEL)
    compare_model: str | None = o.own("The second server's name for the model.", shown="as --model", panel=PANEL)


def server(request: Any, impl: str, url: str | None, model: str | None) -> Server:
    """A server to test; its address and key are checked before anything is written. Raises UserError: not a URL, an
    unknown protocol, a key that would be sent unencrypted."""
    from nondet.endpoint.arms import Server
    from nondet.endpoint.client import HttpClient

    names = [field.name for field in fields(Connection)]
    make = partial(HttpClient, str(url), model=model, **{name: getattr(request, name) for name in names})
    return Server(impl, make, make().url, model or "")


def chosen(request: Any) -> bool:
    """Whether the user chose the prompts, which are then sent unchanged."""
    return any(getattr(request, name, None) is not None for name in ("prompt", "prompt_file", "prompts"))


def meet(
    output: Output, servers: Sequence[Server], prompts: Sequence[str], length: int, *, own: bool = False
) -> tuple[list[str], int]:
    """Connect to each server once, before any file is started; returns the prompts to send, and with their seeds how
    many: these, and unless they are the user's `own` the long ones that fit the servers' context. Raises UserError: a
    server that is not there, has no known protocol, no such model, or no top_k though requests have one."""
    from nondet.endpoint.formats import FORMATS
    from nondet.endpoint.traffic import run
    from nondet.sampling.plan import long_prompts

    request: Any = output.request
    cuts = any(s.top_k for s in request.samplings)
    if not output.sink.quiet:
        output.sink.say(f"connecting to {' and '.join(s.url for s in servers)} ...")

    async def context_of(server: Server) -> int | None:
        async with server.connect() as client:
            if cuts and client.protocol in FORMATS and not FORMATS[client.protocol].cuts:
                what = f"the protocol {client.protocol} of {server.url} has no --top-k"
                raise UserError(what, "Leave --top-k out.")
            return client.context

    contexts = [context for server in servers if (context := run(context_of(server))) is not None]
    fits = min(contexts, default=2**31)
    more = [] if own or chosen(request) else long_prompts()
    texts = [*prompts, *(text for text in more if len(text) // _CHARACTERS_LEAST + length <= fits)]
    return texts, len(texts) * max(1, len(request.samplings))


def ask(
    command: str, output: Output, prompts: Sequence[str], servers: Sequence[Server], load: EndpointLoad,
    arms: Mapping[str, int], length: int, watcher: Watcher | None = None, **described: Any,
) -> None:  # fmt: skip
    """Test the servers that were met, arm by arm, for `nondet sample` and `nondet gate`. `watcher` decides when the
    answers suffice, which mean nothing unless a server respects its seeds; `described` is more of the plan."""
    from nondet.endpoint.arms import Settings, build_arms, describe
    from nondet.endpoint.collect import collect
    from nondet.sampling.plan import background_text

    request: Any = output.request
    samplings = request.samplings
    texts = background_text() if {"loaded", "chunked"} & arms.keys() else ()
    sizes = {"prompts": len(prompts) * max(1, len(samplings)), "max_tokens": length, "seed": request.seed}
    plan = build_arms({"first": 2, **arms}, load, texts=texts, **sizes)
    settings = Settings([text for text in prompts for _ in samplings or [None]], length, [*samplings] * len(prompts))
    header = describe(
        servers, plan, settings, load, seed=request.seed, protocol=request.protocol, stream=request.stream
    )
    if not output.sink.quiet:
        each = f" of each of {len(servers)} servers" if len(servers) > 1 else ""
        output.sink.say(f"Plan: {'at most ' if watcher is not None else ''}{plan.sentence}{each}")
    with output.recording(command, header | described, request.seed) as writer, output.sink.progress() as progress:
        tasks = {
            s.impl: progress.add_task(s.impl, total=sum(r.targets for r in plan.rounds), start=False) for s in servers
        }

        def advance(impl: str, arm: str, done: int) -> None:
            loads = f", {watcher.loads} loads" if watcher is not None else ""
            progress.start_task(tasks[impl])
            progress.update(tasks[impl], completed=done, description=f"{impl}, {arm}{loads}")

        collect(
            servers, plan, settings, writer, progress=advance, enough=watcher.enough if watcher is not None else None,
            seeded=watcher is not None and bool(samplings),
        )  # fmt: skip
