"""`nondet sample --endpoint`: a server asked over HTTP. Its options, and what becomes of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.commands.output import Output, progress_bar, say
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.endpoint.arms import Server
    from nondet.sampling.plan import Sampling

__all__ = [
    "ALLOW_PLAIN_HTTP",
    "ARMS",
    "CA_FILE",
    "COMPARE_ENDPOINT",
    "COMPARE_MODEL",
    "CONCURRENCY",
    "ENDPOINT",
    "INSECURE",
    "KEY_ENV",
    "PROTOCOL",
    "RATE",
    "STREAM",
    "EndpointOptions",
    "check_options",
    "given_options",
    "sample_endpoint",
]

PANEL = "Endpoint"

ENDPOINT = Annotated[
    str | None,
    typer.Option(
        "--endpoint", help="Sample a server: http://HOST:PORT, or https://HOST/v1.", show_default=False,
        rich_help_panel=PANEL,
    ),
]  # fmt: skip
PROTOCOL = Annotated[
    str,
    typer.Option(
        "--protocol", help="How to speak to it: auto, or openai, openai-chat, vllm, ...", rich_help_panel=PANEL
    ),
]
ARMS = Annotated[
    str | None,
    typer.Option(
        "--arms",
        help="What to compare, each with its completions if you like: solo=50,loaded,cold,warm,chunked.",
        show_default="solo,cold,warm,chunked,loaded",
        rich_help_panel=PANEL,
    ),
]
CONCURRENCY = Annotated[
    int | None,
    typer.Option(
        "--concurrency", help="Requests under way at once in the arm loaded.", show_default="32", rich_help_panel=PANEL
    ),
]
RATE = Annotated[
    float | None,
    typer.Option(
        "--rate", help="Requests a second in the arm loaded; else as many as fit.", show_default=False,
        rich_help_panel=PANEL,
    ),
]  # fmt: skip
STREAM = Annotated[
    bool,
    typer.Option(
        "--stream/--no-stream",
        help="Ask for streams: they show what ran at the same time, and the time to the first token.",
        rich_help_panel=PANEL,
    ),
]
KEY_ENV = Annotated[
    str | None,
    typer.Option(
        "--key-env", help="The environment variable that holds the key.",
        show_default="NONDET_API_KEY or OPENAI_API_KEY", rich_help_panel=PANEL,
    ),
]  # fmt: skip
ALLOW_PLAIN_HTTP = Annotated[
    bool,
    typer.Option("--allow-plain-http", help="Let a key go unencrypted to another machine.", rich_help_panel=PANEL),
]
INSECURE = Annotated[
    bool, typer.Option("--insecure", help="Take any certificate of the server.", rich_help_panel=PANEL)
]
CA_FILE = Annotated[
    str | None,
    typer.Option("--ca-file", help="Certificates to trust instead.", show_default=False, rich_help_panel=PANEL),
]
COMPARE_ENDPOINT = Annotated[
    str | None,
    typer.Option(
        "--compare-endpoint", help="A second server, asked the same.", show_default=False, rich_help_panel=PANEL
    ),
]
COMPARE_MODEL = Annotated[
    str | None,
    typer.Option(
        "--compare-model", help="What the second server calls the model.", show_default="as --model",
        rich_help_panel=PANEL,
    ),
]  # fmt: skip

# Options of nondet's own engine, which a server decides for itself.
_OWN_ENGINE = (
    *("impl", "dtype", "device", "threads", "trust_remote_code"),
    *("vary", "draft_model", "ranks", "cuda_graphs"),
)
_ARMS = "solo,cold,warm,chunked,loaded"
# Completions of the arm loaded: of one prompt; of each of many no fewer than the second.
_N, _N_LEAST, _MAX_TOKENS = 200, 10, 64
_TOGETHER_QUIET = 20_000


@dataclass(frozen=True)
class EndpointOptions:
    """The options above, as given."""

    endpoint: str
    protocol: str = "auto"
    arms: str | None = None
    concurrency: int | None = None
    rate: float | None = None
    stream: bool = True
    key_env: str | None = None
    allow_plain_http: bool = False
    insecure: bool = False
    ca_file: str | None = None
    compare_endpoint: str | None = None
    compare_model: str | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> EndpointOptions:
        """From the command's parameters."""
        return cls(**{field.name: params[field.name] for field in fields(cls)})

    def servers(self, model: str | None) -> list[Server]:
        """The one or two servers to ask.

        Raises:
            UserError: a URL that is none, an unknown protocol, a key that would go out unencrypted.
        """
        from nondet.endpoint.arms import Server
        from nondet.endpoint.client import connect

        servers = []
        pairs = [("server", self.endpoint, model), ("server-2", self.compare_endpoint, self.compare_model or model)]
        for impl, url, name in pairs:
            if url is None:
                continue
            make = partial(
                connect,
                url,
                model=name,
                protocol=self.protocol,
                stream=self.stream,
                key_env=self.key_env,
                allow_plain_http=self.allow_plain_http,
                insecure=self.insecure,
                ca_file=self.ca_file,
            )
            client = make()  # what is wrong with the address or the key is said before anything is written
            servers.append(Server(impl, make, client.url, name or ""))
        if self.compare_endpoint is None and self.compare_model is not None:
            raise UserError("--compare-model without --compare-endpoint", "Name the second server.")
        return servers


def given_options(ctx: typer.Context) -> set[str]:
    """Names of the parameters that were given on the command line; by name: Typer may bring its own click."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def check_options(endpoint: str | None, given: Collection[str]) -> None:
    """Refuse options that the chosen engine has no use for.

    Args:
        given: Names of the parameters that the user gave.

    Raises:
        UserError: as said.
    """
    alone = [field.name for field in fields(EndpointOptions) if field.name != "endpoint"]
    for name in _OWN_ENGINE if endpoint is not None else alone:
        option = f"--{name.replace('_', '-')}"
        if name in given and endpoint is not None:
            raise UserError(f"--endpoint and {option} exclude each other", "The server decides that for itself.")
        if name in given:
            raise UserError(f"{option} without --endpoint", "Name the server: --endpoint URL.")


def sample_endpoint(
    options: EndpointOptions,
    output: Output,
    prompts: Sequence[str],
    model: str | None,
    n: int | None,
    max_tokens: int | None,
    load: str,
    seed: int,
    samplings: Sequence[Sampling] = (),
) -> None:
    """Sample the server, arm by arm, and present what was found: the options of `nondet sample` that it shares.

    Args:
        samplings: How tokens are drawn, one for each seed; empty for greedy requests.
    """
    from nondet.core.traces import traces_path
    from nondet.endpoint.arms import Settings, build_arms, describe, parse_arms, parse_endpoint_load
    from nondet.endpoint.collect import collect
    from nondet.sampling.plan import background_text

    texts = [text for text in prompts for _ in range(max(1, len(samplings)))]
    length = _MAX_TOKENS if max_tokens is None else max_tokens
    if not 1 <= length <= 1_000_000:
        raise UserError(f"--max-tokens {length} makes no sense", "Give the tokens of each completion.")
    wanted = parse_endpoint_load(load, concurrency=options.concurrency, rate=options.rate)
    arms = parse_arms(options.arms or _ARMS, max(_N_LEAST, _N // len(texts)) if n is None else n)
    servers = options.servers(model)
    needs_texts = "loaded" in arms or "chunked" in arms
    total = sum(arms.values()) * len(texts) * len(servers)
    if total > _TOGETHER_QUIET:
        say(f"{total:,} completions are asked for")
    plan = build_arms(
        arms,
        wanted,
        prompts=len(texts),
        max_tokens=length,
        seed=seed,
        texts=background_text() if needs_texts else (),
    )
    settings = Settings.drawn(prompts, length, samplings)
    described = describe(servers, plan, settings, wanted, seed=seed, protocol=options.protocol, stream=options.stream)
    reach(servers, cuts=settings.top_k > 0)
    writer = output.open("sample", described, seed)
    try:
        with output.measuring(writer), progress_bar() as progress:
            tasks = {s.impl: progress.add_task(s.impl, total=sum(r.targets for r in plan.rounds)) for s in servers}

            def advance(impl: str, arm: str, done: int) -> None:
                progress.update(tasks[impl], completed=done, description=f"{impl}, {arm}")

            collect(servers, plan, settings, writer, progress=advance)
    except UserError:
        if not writer.done and not writer.resumed:  # nothing was measured: the same command can be tried again
            for path in (output.path, traces_path(output.path)):
                path.unlink(missing_ok=True)
        raise
    output.present()


def reach(servers: Sequence[Server], *, cuts: bool = False) -> None:
    """Connect to each server and leave again, before any file is begun or overwritten.

    Args:
        cuts: Whether requests are going to say top_k.

    Raises:
        UserError: a server that is not there, speaks no known protocol, has no such model, or is told no top_k.
    """
    from nondet.endpoint.formats import FORMATS
    from nondet.endpoint.traffic import run

    async def once(server: Server) -> None:
        async with server.connect() as client:
            protocol = getattr(client, "protocol", "")
        if cuts and protocol in FORMATS and not FORMATS[protocol].cuts:
            raise UserError(f"--top-k can't be said in the protocol {protocol} of {server.url}", "Leave --top-k out.")

    for server in servers:
        run(once(server))
