"""A server asked over HTTP: its options, and what `nondet sample --endpoint` does with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated

from nondet.errors import UserError
from nondet.services import options as o

if TYPE_CHECKING:
    from nondet.endpoint.arms import Server
    from nondet.sampling.plan import Sampling
    from nondet.services.run import Output

PANEL = "Endpoint"
PROTOCOL = Annotated[str, o.opt("How to speak to it: auto, or openai, openai-chat, vllm, ...", shown=True, panel=PANEL)]
STREAM = Annotated[
    bool,
    o.opt(
        "Ask for streams: they show what ran at the same time, and the time to the first token.",
        "--stream/--no-stream", shown=True, panel=PANEL,
    ),
]  # fmt: skip
KEY_ENV = Annotated[
    str | None,
    o.opt("The environment variable that holds the key.", shown="NONDET_API_KEY or OPENAI_API_KEY", panel=PANEL),
]
ALLOW_PLAIN_HTTP = Annotated[
    bool, o.opt("Let a key go unencrypted to another machine.", "--allow-plain-http", panel=PANEL)
]
INSECURE = Annotated[bool, o.opt("Take any certificate of the server.", "--insecure", panel=PANEL)]
CA_FILE = Annotated[str | None, o.opt("Certificates to trust instead.", panel=PANEL)]

# Options of nondet's own engine, which a server decides for itself.
_OWN_ENGINE = (
    *("impl", "dtype", "device", "threads", "trust_remote_code"),
    *("vary", "draft_model", "ranks", "cuda_graphs"),
)
_ARMS = "solo,cold,warm,chunked,loaded"
# Completions of the arm loaded: of one prompt; of each of many no fewer than the second.
_N, _N_LEAST, _MAX_TOKENS = 200, 10, 64
_TOGETHER_QUIET = 20_000


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """The options of a command that asks a server."""

    endpoint: Annotated[str | None, o.opt("Sample a server: http://HOST:PORT, or https://HOST/v1.", panel=PANEL)] = None
    protocol: PROTOCOL = "auto"
    arms: Annotated[
        str | None,
        o.opt(
            "What to compare, each with its completions if you like: solo=50,loaded,cold,warm,chunked.",
            shown="solo,cold,warm,chunked,loaded", panel=PANEL,
        ),
    ] = None  # fmt: skip
    concurrency: Annotated[
        int | None, o.opt("Requests under way at once in the arm loaded.", shown="32", panel=PANEL)
    ] = None
    rate: Annotated[float | None, o.opt("Requests a second in the arm loaded; else as many as fit.", panel=PANEL)] = (
        None
    )
    stream: STREAM = True
    key_env: KEY_ENV = None
    allow_plain_http: ALLOW_PLAIN_HTTP = False
    insecure: INSECURE = False
    ca_file: CA_FILE = None
    compare_endpoint: Annotated[str | None, o.opt("A second server, asked the same.", panel=PANEL)] = None
    compare_model: Annotated[
        str | None, o.opt("What the second server calls the model.", shown="as --model", panel=PANEL)
    ] = None

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
    """Sample the server, arm by arm: the options of `nondet sample` that it shares.

    Args:
        samplings: How tokens are drawn, one for each seed; empty for greedy requests.
    """
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
        output.sink.say(f"{total:,} completions are asked for")
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
    with output.unless_nothing(writer), output.measuring(writer), output.sink.progress() as progress:
        tasks = {s.impl: progress.add_task(s.impl, total=sum(r.targets for r in plan.rounds)) for s in servers}

        def advance(impl: str, arm: str, done: int) -> None:
            progress.update(tasks[impl], completed=done, description=f"{impl}, {arm}")

        collect(servers, plan, settings, writer, progress=advance)


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
