"""The client of one server: what it is, what it can be asked, every answer or failure as plain data.

    async with connect("http://127.0.0.1:8000", model="tiny") as client:
        answer = await client.complete(Ask(id="a", prompt="Once upon", max_tokens=16))

Nothing of the environment but the key is used: no proxies, no .netrc. The key goes to the URL's origin only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from httpx import Response

from nondet.endpoint.arms import Answer, Ask
from nondet.endpoint.formats import FORMATS, Parts, answer_from
from nondet.endpoint.http import (
    FULL,
    AttemptError,
    Events,
    Key,
    Limits,
    Times,
    Transport,
    item,
    key_from_environment,
    malformed,
    optional,
    parse,
    read_address,
    wait_before_retry,
)
from nondet.errors import UnknownNameError, UserError, suggestion

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]{0,199})(?:\{[^\n]*\})?[ \t]+([0-9eE.+-]{1,40})(?:[ \t]+-?\d+)?[ \t]*")
_MOST = 10_000


def read_metrics(text: str) -> dict[str, float]:
    """Each metric's name -> its value, summed over all labels. Histograms' buckets, NaN and infinities are left out.

    Args:
        text: What a server sent; lines that are no samples are skipped.
    """
    metrics: dict[str, float] = {}
    for line in text.split("\n"):
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match is None or match[1].endswith("_bucket"):
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value) and (match[1] in metrics or len(metrics) < _MOST):
            metrics[match[1]] = metrics.get(match[1], 0.0) + value
    return {name: value for name, value in metrics.items() if math.isfinite(value)}  # a sum may overflow


# Field -> why it is not the user's.
_OURS = {
    **dict.fromkeys(("n", "best_of", "n_cmpl", "use_beam_search"), "one request gives one completion"),
    **dict.fromkeys(("prompt", "messages", "text", "input_ids", "inputs"), "prompts come from --prompts"),
    **dict.fromkeys(("stream", "echo", "stream_options", "response_fields"), "it changes what an answer looks like"),
    "model": "say --model",
}
_NESTED = ("sampling_params", "parameters")  # SGLang's and TGI's, which are merged with ours


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse fields that would make a run mean something else.

    Args:
        extra: Field -> value, for every request's body; `sampling_params` (SGLang) and `parameters` (TGI) are merged
            with the ones that are sent anyway.

    Raises:
        UserError: A field that is not the user's, an object that is none, or what JSON can't hold.
    """
    for name, value in extra.items():
        if name in _NESTED:
            if not isinstance(value, Mapping):
                raise UserError(f"the field {name!r} is no object", 'Give it as {"name": value}.')
            check_extra(value)
        elif name in _OURS:
            raise UserError(f"the field {name!r} can't be set", f"Leave it out: {_OURS[name]}.")
    try:
        json.dumps(dict(extra), allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise UserError(
            "a field of the request that JSON can't hold", "Give numbers, texts, lists and objects."
        ) from None


_NO_SERVER = {"connect", "certificate", "reset", "cut-off", "timeout", "protocol", "redirect"}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which protocol is spoken with which model, and why.

    Attributes:
        protocol: A key of `FORMATS`.
        model: The name to send.
        server: What the server is, "vllm 0.11.0"; "" where nobody can say.
        evidence: What it was known by, a line each.
    """

    protocol: str
    model: str
    server: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class _Question:
    """A page that only one kind of server has: what raises if it is another's, and where the version is."""

    server: str
    path: str
    known_by: Callable[[Any], object]
    version: str = ""


def _routes(document: Any) -> object:
    return item(item(document, "paths", dict), "/load_model", dict)


_QUESTIONS = (
    _Question("sglang", "/get_model_info", lambda page: item(page, "is_generation", bool)),
    _Question("sglang", "/model_info", lambda page: item(page, "is_generation", bool)),
    _Question("llama.cpp", "/props", lambda page: item(page, "default_generation_settings", dict), "build_info"),
    _Question("tgi", "/info", lambda page: item(page, "max_total_tokens", int), "version"),
    _Question("vllm", "/version", lambda page: item(page, "version", str), "version"),
    _Question("transformers", "/openapi.json", _routes),
)
# What a server says of its models' owner -> the question that confirms it and knows the version.
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
_OPENAI = {"openai", "openai-internal", "system"}
# Server and whether the URL ends in /v1/chat/completions -> the form that says most.
_NATIVE = {
    ("vllm", False): "vllm",
    ("vllm", True): "vllm-chat",
    ("sglang", False): "sglang",
    ("sglang", True): "openai-chat",
    ("llama.cpp", False): "llama.cpp",
    ("llama.cpp", True): "openai-chat",
    ("tgi", False): "tgi",
    ("tgi", True): "openai-chat",
    ("transformers", False): "transformers",
    ("transformers", True): "transformers-chat",
}


async def choose(transport: Transport, *, protocol: str, model: str | None) -> Choice:
    """Ask the server what it is and what it holds.

    Args:
        transport: Where.
        protocol: "auto" or what the user said, which is then kept.
        model: What the user said; None takes the only one that is listed.

    Raises:
        UserError: No server, none that is understood, or a model that it does not list.
    """
    listed, owners, evidence = await _models(transport)
    server, version, lines = await _server(transport, [_OWNERS[owner] for owner in owners if owner in _OWNERS])
    evidence += lines
    chosen = protocol
    if protocol == "auto":
        path = transport.address.protocol
        chosen = _NATIVE.get((server, path == "openai-chat"), path)
        if not chosen and _OPENAI & set(owners):
            chosen = "openai-chat"
            evidence += ("the models' owner is OpenAI, whose models chat",)
        elif not chosen:
            chosen, line = await _openai(transport)
            evidence += (line,)
    name = _model(transport, model, listed, strict=server != "transformers")  # which lists what it could load
    return Choice(protocol=chosen, model=name, server=f"{server} {version}".strip(), evidence=evidence)


async def _models(transport: Transport) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Names and owners of /v1/models; the one question whose failure may mean that there is no server.

    Raises:
        UserError: Nothing there that answers.
    """
    key, names, owners = transport.key, [], []
    try:
        for entry in item(await _ask(transport, "/v1/models"), "data", list):
            names.append(key.reason(item(entry, "id", str)))
            owners.append(key.reason(optional(entry, "owned_by", str) or "", 40))
    except AttemptError as failure:
        url = transport.address.url
        if failure.kind in _NO_SERVER:
            hints = {
                "certificate": "Name its certificate with --ca-file, or see --insecure.",
                "redirect": "Give the address that it redirects to, if you trust it.",
            }
            raise UserError(
                f"no server that can be asked at {url}: {transport.reason(failure.reason)}",
                hints.get(failure.kind, "Is it running, and is the address right?"),
            ) from None
        if failure.kind in ("http-401", "http-403"):
            hint = "Put the key into NONDET_API_KEY, or name its variable with --key-env."
            raise UserError(f"the server at {url} refuses: {transport.reason(failure.reason)}", hint) from None
        return [], [], (f"/v1/models: {transport.reason(failure.reason, 80)}",)
    said = f"/v1/models lists {len(names)}" + (f", owned by {owners[0]}" if owners and owners[0] else "")
    return names, owners, (said,)


async def _server(transport: Transport, named: list[str]) -> tuple[str, str, tuple[str, ...]]:
    """Which server has the page that only it has, the one that the models' owner names first."""
    for question in sorted(_QUESTIONS, key=lambda question: question.server not in named):
        try:
            page = await _ask(transport, question.path)
            question.known_by(page)
            version = optional(page, question.version, str) or "" if question.version else ""
        except AttemptError:
            continue
        version = transport.key.reason(version, 40)
        return question.server, version, (f"{question.path} is there: {question.server} {version}".rstrip(),)
    if named:
        return named[0], "", (f"the models' owner names {named[0]}",)
    return "", "", ("no page that a known server has",)


async def _openai(transport: Transport) -> tuple[str, str]:
    """Whether a server has /v1/completions: an empty request is refused there, but not as unknown."""
    try:
        async with transport.exchange("POST", "/v1/completions", {}, within_s=transport.limits.page_s):
            return "openai", "/v1/completions is there"
    except AttemptError as failure:
        if failure.kind in ("http-404", "http-405", "http-501"):
            return "openai-chat", f"/v1/completions is not there (HTTP {failure.kind[5:]})"
        return "openai", "/v1/completions is there"


async def _ask(transport: Transport, path: str) -> Any:
    """The JSON at a path.

    Raises:
        AttemptError: Whatever went wrong.
    """
    async with transport.exchange("GET", path, within_s=transport.limits.page_s) as response:
        return parse(await transport.body(response, transport.limits.most_page_bytes))


def _model(transport: Transport, model: str | None, listed: list[str], strict: bool) -> str:
    """The model's name as the server knows it.

    Raises:
        UserError: None named and not exactly one listed, or one that is not listed.
    """
    url = transport.address.url
    if model is None:
        if len(listed) == 1:
            return listed[0]
        hint = f"Name one with --model: {', '.join(listed[:8])}" if listed else "Name it with --model."
        raise UserError(f"the server at {url} lists {len(listed) or 'no'} models", hint)
    if strict and listed and model not in listed:
        raise UserError(f"the server at {url} has no model {model!r}", suggestion(model, listed))
    return model


# What a server can be asked besides completions: its models, its counters, to forget its prefix cache.
#
# This belongs to the server, whichever protocol its completions are asked in: a llama.cpp that chats has its slots,
# too.

_NOT_THERE = {"http-401", "http-403", "http-404", "http-405", "http-501"}


def _slots(page: Any) -> dict[str, float]:
    """How many slots of a llama.cpp work, under the name that its /metrics has for it."""
    if not isinstance(page, list):
        raise malformed("slots that are no list")
    return {"llamacpp:requests_processing": float(sum(item(slot, "is_processing", bool) for slot in page))}


@dataclass(frozen=True)
class _Server:
    """Where one kind of server has its counters and empties its cache.

    Attributes:
        flush: The path that empties the prefix cache, by POST; "" where there is none.
        state: A page that shows what runs where /metrics is off, with its reader.
    """

    flush: str = ""
    state: tuple[str, Callable[[Any], dict[str, float]]] | None = None


_SERVERS = {
    "vllm": _Server(flush="/reset_prefix_cache"),  # with VLLM_SERVER_DEV_MODE=1
    "sglang": _Server(flush="/flush_cache"),  # refused while requests run
    "llama.cpp": _Server(state=("/slots", _slots)),  # /metrics needs --metrics, erasing slots --slot-save-path
}


class Sides:
    """One server's pages, each within the limits of a page.

    Args:
        transport: Where.
        server: A name of `nondet.endpoint.client`, "" for one that nobody knows.
    """

    def __init__(self, transport: Transport, server: str) -> None:
        self._transport = transport
        self._server = _SERVERS.get(server, _Server())
        self._missing: set[str] = set()  # pages that are not there are not asked for at every poll

    async def models(self) -> list[str]:
        """The names that the server lists; empty where it lists none."""
        try:
            listed = item(parse(await self._page("GET", "/v1/models")), "data", list)
            return [self._transport.key.reason(item(entry, "id", str)) for entry in listed]
        except AttemptError:
            return []

    async def metrics(self) -> dict[str, float]:
        """The server's own counters by name, summed over labels; empty if it has none that can be read."""
        try:
            raw = await self._page("GET", "/metrics")
            counters = read_metrics(self._transport.key.redact(raw.decode("utf-8", "replace")))
        except AttemptError:
            counters = {}
        if counters or self._server.state is None:
            return counters
        path, read = self._server.state
        try:
            return read(parse(await self._page("GET", path)))
        except AttemptError:
            return {}

    async def flush(self) -> bool:
        """Empty the prefix cache; False where the server can't be asked to, refuses, or says that it did not.

        True is the server's word only: a vLLM of 2025 says nothing about success, and other requests fill the cache
        again. `Answer.cached_tokens` and the counters of `metrics` are what proves a cold answer.
        """
        if not self._server.flush:
            return False
        try:
            raw = await self._page("POST", self._server.flush)
        except AttemptError:
            return False
        try:
            return optional(parse(raw), "success", bool) is not False
        except AttemptError:  # nothing, or text: SGLang's "Cache flushed."
            return True

    async def _page(self, method: str, path: str) -> bytes:
        """What is at a path.

        Raises:
            AttemptError: Whatever went wrong.
        """
        if path in self._missing:
            raise AttemptError("http-404", "not there, as was found before")
        limits = self._transport.limits
        try:
            async with self._transport.exchange(method, path, within_s=limits.page_s) as response:
                return await self._transport.body(response, limits.most_page_bytes)
        except AttemptError as failure:
            if failure.kind in _NOT_THERE:
                self._missing.add(path)
            raise


def connect(
    url: str,
    *,
    model: str | None = None,
    protocol: str = "auto",
    stream: bool = False,
    key_env: str | None = None,
    limits: Limits | None = None,
    allow_plain_http: bool = False,
    insecure: bool = False,
    ca_file: str | None = None,
) -> HttpClient:
    """A client that is not connected yet; use it with `async with`, which asks the server what it is.

    Args:
        url: http://HOST:PORT or https://HOST/v1; the full path of a completions endpoint names the protocol too.
        model: As the server calls it; None takes the only one that it lists.
        protocol: A key of `FORMATS`, or "auto" to find out.
        stream: Whether answers are asked for as server-sent events, which gives the time of the first token.
        key_env: The environment variable that holds the key; None takes NONDET_API_KEY or OPENAI_API_KEY, if set.
        limits: What a request may cost; None takes the defaults.
        allow_plain_http: Whether a key may go unencrypted to another machine.
        insecure: Whether any certificate is taken.
        ca_file: A file of certificates to trust instead of the usual ones.

    Raises:
        UserError: A URL that is none or holds a password, an unknown protocol, a key that is missing or would go out
            unencrypted, certificates that can't be read.
    """
    address = read_address(url)
    if protocol != "auto" and protocol not in FORMATS:
        raise UnknownNameError("protocol", protocol, ["auto", *FORMATS])
    key = key_from_environment(key_env)
    if key and address.scheme == "http" and not address.local and not allow_plain_http:
        raise UserError(
            f"a key would go unencrypted to {address.origin}",
            "Use https, unset the key's variable, or say --allow-plain-http.",
        )
    return HttpClient(
        Transport(address, key, limits or Limits(), verify=(ca_file or True) if not insecure else False),
        model=model,
        protocol=protocol,
        stream=stream,
    )


class HttpClient:
    """A connection to one server; see `connect`, and `nondet.endpoint.arms.Client` for what others rely on.

    Attributes:
        protocol: The format in use, a key of `FORMATS`; set on entry, like the following.
        model: The model's name.
        server: What the server seems to be, with its version where it says one.
        evidence: How that was found out, a line each.
    """

    def __init__(self, transport: Transport, *, model: str | None, protocol: str, stream: bool) -> None:
        self._transport = transport
        self._limits = transport.limits
        self._wanted = (model, protocol)
        self._stream = stream
        self._full_since: float | None = None  # on time.monotonic(): the first refusal of those since the last answer
        self.url = transport.address.url
        self.protocol = protocol
        self.model = model or ""
        self.server = ""
        self.evidence: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"HttpClient({self.url!r}, protocol={self.protocol!r}, model={self.model!r})"

    async def __aenter__(self) -> Self:
        """Find out what the server is.

        Raises:
            UserError: No server, none that is understood, or a model that it does not list.
        """
        model, protocol = self._wanted
        self._transport.open()
        try:
            choice: Choice = await choose(self._transport, protocol=protocol, model=model)
        except BaseException:
            await self._transport.close()
            raise
        self.protocol, self.model = choice.protocol, choice.model
        self.server, self.evidence = choice.server, choice.evidence
        self._format = FORMATS[choice.protocol]
        self._sides = Sides(self._transport, choice.server.partition(" ")[0] or choice.protocol.removesuffix("-chat"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        await self._transport.close()

    async def complete(self, ask: Ask) -> Answer:
        """Send one request and wait for its end, retrying by the table of `wait_before_retry`.

        Never raises but for cancellation: what goes wrong is an answer with a kind and a reason.
        """
        refusals: Counter[str] = Counter()
        for attempt in range(1, self._limits.attempts + 1):
            times = Times()
            try:
                answer = await self._once(ask, times)
                self._full_since = None
            except AttemptError as failure:
                if failure.kind in FULL:
                    self._full_since = self._full_since or times.done
                wait_s = wait_before_retry(
                    failure,
                    refusals[failure.kind],
                    ask.id,
                    first_s=self._limits.first_wait_s,
                    most_s=self._limits.most_wait_s,
                )
                if times.done - (self._full_since or times.done) > self._limits.patience_s:
                    wait_s = None  # it takes nothing from anybody: asking again is for a resumed run
                if wait_s is not None and attempt < self._limits.attempts:
                    refusals[failure.kind] += 1
                    await asyncio.sleep(wait_s)
                    continue
                reason = self._transport.reason(failure.reason)
                answer = Answer(ask=ask.id, finish="error", kind=failure.kind, reason=reason)
            return dataclasses.replace(
                answer,
                sent=times.sent,
                first=times.first if answer.ok else None,
                done=times.done,
                attempts=attempt,
                refusals=dict(refusals),
            )
        raise AssertionError("at least one attempt is made")

    async def models(self) -> list[str]:
        """The names that the server lists; empty where it lists none."""
        return await self._sides.models()

    async def metrics(self) -> dict[str, float]:
        """The server's own counters by name, summed over labels; empty if it has none that can be read."""
        return await self._sides.metrics()

    async def flush(self) -> bool:
        """Empty the server's prefix cache; False where it can't be asked to, or says that it did not."""
        return await self._sides.flush()

    async def _once(self, ask: Ask, times: Times) -> Answer:
        """One attempt.

        Raises:
            AttemptError: Whatever went wrong.
        """
        try:
            check_extra(ask.extra)
        except UserError as error:
            raise AttemptError("unsupported", str(error)) from None
        parts = Parts()
        most = self._limits.bytes_for(ask)
        stream = self._stream and self._format.streams
        body = self._format.body(ask, self.model, stream)
        async with self._transport.exchange("POST", self._format.path, body, times) as response:
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind == "text/event-stream" or (stream and kind != "application/json"):
                await self._follow(response, Events(most, self._limits.events_for(ask)), most, parts, times)
            else:
                self._format.take(parse(await self._transport.body(response, most)), parts, False)
        return self._checked(answer_from(ask, parts))

    async def _follow(self, response: Response, events: Events, most: int, parts: Parts, times: Times) -> None:
        """Read a stream up to its end mark, or up to the end of the body if the answer said that it ended."""
        parts.streamed = True
        async for piece in self._transport.pieces(response, most):
            for event in events.feed(piece):
                self._take_event(event, parts, times)
            if parts.ended:
                return
        for event in events.close():
            self._take_event(event, parts, times)
        if not parts.ended and not parts.finish:
            raise AttemptError("cut-off", "the stream ended in mid-answer")
        if not parts.ended:
            parts.note("a stream without [DONE]")

    def _take_event(self, event: bytes, parts: Parts, times: Times) -> None:
        came = time.monotonic()
        if event.strip() == b"[DONE]":
            parts.ended = True
        elif not parts.ended:
            self._format.take(parse(event), parts, True)
            # an event that names a role alone is no token: the request may still be waiting for its turn
            if times.first is None and (any(parts.text) or parts.ids or parts.bytes or parts.chosen):
                times.first = came

    def _checked(self, answer: Answer) -> Answer:
        """The answer, if it does not hold the key; what is neither text nor token is redacted.

        Raises:
            AttemptError: "leaked-key".
        """
        key: Key = self._transport.key
        if key.leaked(answer.text) or key.leaked(b"".join(answer.token_bytes or ())):
            raise AttemptError("leaked-key", "the completion holds the key that it was asked with")
        return dataclasses.replace(
            answer,
            fingerprint=self._transport.reason(answer.fingerprint, 200),
            model=self._transport.reason(answer.model, 200),
        )
