"""The client of one server: its kind and abilities, and every answer or failure as plain data.

    async with HttpClient("http://127.0.0.1:8000", model="tiny") as client:
        answer = await client.complete(Ask(id="a", prompt="Once upon", max_tokens=16))

Only the key is taken from the environment: no proxies, no .netrc. It is sent only to the URL's origin.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import re
import time
from collections import Counter
from typing import Any, Self, cast

from httpx import Response
from msgspec import Struct, defstruct

from nondet.endpoint.arms import DETERMINISTIC, Answer, Ask
from nondet.endpoint.formats import FORMATS, Parts, answer_from
from nondet.endpoint.http import (
    FULL,
    AttemptError,
    Events,
    Key,
    Limits,
    Times,
    Transport,
    key_from_environment,
    parse,
    read,
    read_address,
    wait_before_retry,
)
from nondet.errors import UnknownNameError, UserError, suggestion

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]{0,199})(?:\{[^\n]*\})?[ \t]+([0-9eE.+-]{1,40})(?:[ \t]+-?\d+)?[ \t]*")
_MOST = 10_000


def read_metrics(text: str) -> dict[str, float]:
    """Each metric's name -> its value, summed over all labels; buckets, NaN, infinities and other lines left out."""
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


_NO_SERVER = {"connect", "certificate", "reset", "cut-off", "timeout", "protocol", "redirect"}
_HINTS = {
    "certificate": "Name its certificate with --ca-file, or see --insecure.",
    "redirect": "Give the address that it redirects to, if you trust it.",
}
_NOT_THERE = {"http-401", "http-403", "http-404", "http-405", "http-501"}


class _Model(Struct):
    id: str
    owned_by: str | None = None
    max_model_len: Any = None


class _Models(Struct):
    data: list[_Model]


class _Sglang(Struct):
    """The fields of /server_info that describe how it computes."""

    version: str = ""
    enable_deterministic_inference: bool = False
    attention_backend: str | None = None


class _Slot(Struct):
    is_processing: bool


_ROUTES = defstruct("_Routes", [("load_model", dict)], rename={"load_model": "/load_model"})
# Server, a page that only this kind has, what is on it, and the field with its version.
_PAGES: tuple[tuple[str, str, tuple[str, type], str], ...] = (
    ("sglang", "/model_info", ("is_generation", bool), ""),
    ("sglang", "/get_model_info", ("is_generation", bool), ""),  # of older ones, and deprecated
    ("llama.cpp", "/props", ("default_generation_settings", dict), "build_info"),
    ("vllm", "/version", ("version", str), "version"),
    ("transformers", "/openapi.json", ("paths", _ROUTES), ""),
)
# A server's entry for its models' owner -> the server whose page confirms it and has the version.
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
_OPENAI = {"openai", "openai-internal", "system"}
# Paths that empty the prefix cache, by POST. llama.cpp erases slots only with --slot-save-path.
_FLUSH = {
    "vllm": "/reset_prefix_cache",  # with VLLM_SERVER_DEV_MODE=1
    "sglang": "/flush_cache",  # refused while requests run
}


class HttpClient:
    """A connection to one server, which `async with` identifies. Its interface: `nondet.endpoint.arms.Client`.

    Raises UserError: a URL that is invalid or holds a password, an unknown protocol, a key that is missing or would be
    sent unencrypted, certificates that can't be read.

    Args:
        url: http://HOST:PORT or https://HOST/v1; the full path of a completions endpoint names the protocol too.
        model: As the server calls it; None takes the only one that it lists.
        protocol: A key of `FORMATS`, or "auto" to find out.
        stream: Whether answers are requested as server-sent events, which gives the time of the first token.
        key_env: The environment variable that holds the key; None takes the first of `KEY_VARIABLES` that is set.
        insecure, ca_file: Whether any certificate is accepted; a file of those to trust instead of the usual ones.
    """

    def __init__(
        self,
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
    ) -> None:
        address = read_address(url)
        if protocol != "auto" and protocol not in FORMATS:
            raise UnknownNameError("protocol", protocol, ["auto", *FORMATS])
        key = key_from_environment(key_env)
        if key and address.scheme == "http" and not address.local and not allow_plain_http:
            raise UserError(
                f"a key would go unencrypted to {address.origin}",
                "Use https, unset the key's variable, or give --allow-plain-http.",
            )
        self._limits, self._wanted_model, self._stream = limits or Limits(), model, stream
        self._transport = Transport(address, key, self._limits, verify=(ca_file or True) if not insecure else False)
        self._full_since: float | None = None  # on time.monotonic(): the first refusal since the last answer
        self._missing: set[str] = set()  # missing pages are not requested at every poll
        self.url, self.protocol, self.model = address.url, protocol, model or ""
        self.server, self.listed = "", list[str]()
        self.context: int | None = None

    async def __aenter__(self) -> Self:
        """Identify the server; a `UserError` if there is none, it is not understood, or it lacks the model."""
        self._transport.open()
        try:
            await self._recognize()
        except BaseException:
            await self._transport.close()
            raise
        self._format = FORMATS[self.protocol]
        self._kind = self.server.partition(" ")[0] or self.protocol.removesuffix("-chat")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every connection."""
        await self._transport.close()

    async def complete(self, ask: Ask) -> Answer:
        """As `nondet.endpoint.arms.Client`: repeated as `wait_before_retry` decides."""
        refusals: Counter[str] = Counter()
        for attempt in range(1, self._limits.attempts + 1):
            times = Times()
            try:
                answer = await self._once(ask, times)
                self._full_since = None
            except AttemptError as failure:
                if failure.kind in FULL:
                    self._full_since = self._full_since or times.done
                wait_s = wait_before_retry(failure, refusals[failure.kind], ask.id, self._limits)
                if times.done - (self._full_since or times.done) > self._limits.patience_s:
                    wait_s = None  # no repetition here: a resumed run repeats it
                if wait_s is not None and attempt < self._limits.attempts:
                    refusals[failure.kind] += 1
                    await asyncio.sleep(wait_s)
                    continue
                reason = self._transport.reason(failure.reason)
                answer = Answer(ask=ask.id, finish="error", kind=failure.kind, reason=reason)
            seen: dict[str, Any] = {"sent": times.sent, "first": times.first if answer.ok else None, "done": times.done}
            return dataclasses.replace(answer, **seen, attempts=attempt, refusals=dict(refusals))
        raise AssertionError("at least one attempt is made")

    async def metrics(self) -> dict[str, float]:
        """As `nondet.endpoint.arms.Client`; summed over labels."""
        with contextlib.suppress(AttemptError):
            raw = await self._page("GET", "/metrics")
            if counters := read_metrics(self._transport.key.redact(raw.decode("utf-8", "replace"))):
                return counters
        with contextlib.suppress(AttemptError):
            if self._kind == "llama.cpp":  # its /metrics needs --metrics; the name is the one that it has there
                slots = read(parse(await self._page("GET", "/slots")), list[_Slot])
                return {"llamacpp:requests_processing": float(sum(slot.is_processing for slot in slots))}
        return {}

    async def flush(self) -> bool:
        """Empty the prefix cache; False where the server can't do that, refuses, or reports that it did not. True is
        only the server's claim: a vLLM of 2025 reports no success, and other requests fill the cache again. What proves
        a cold answer are `Answer.cached_tokens` and the counters of `metrics`."""
        flushed = False
        with contextlib.suppress(AttemptError):
            if self._kind in _FLUSH:
                raw = await self._page("POST", _FLUSH[self._kind])
                flushed = True  # nothing may follow, or text: SGLang's "Cache flushed."
                flushed = read(parse(raw), dict[str, Any]).get("success") is not False
        return flushed

    async def _page(self, method: str, path: str) -> bytes:
        """The content of a path other than completions."""
        if path in self._missing:
            raise AttemptError("http-404", "not there, as found before")
        try:
            async with self._transport.exchange(method, path) as response:
                return await self._transport.body(response, self._limits.most_page_bytes)
        except AttemptError as failure:
            if failure.kind in _NOT_THERE:
                self._missing.add(path)
            raise

    async def _recognize(self) -> None:
        """Find out the server's kind, models and form of requests."""
        try:
            listed = read(parse(await self._page("GET", "/v1/models")), _Models).data
        except AttemptError as failure:  # only this request's failure may mean that there is no server
            reason = self._transport.reason(failure.reason)
            if failure.kind in _NO_SERVER:
                hint = _HINTS.get(failure.kind, "Is it running, and is the address right?")
                raise UserError(f"no server answers at {self.url}: {reason}", hint) from None
            if failure.kind in ("http-401", "http-403"):
                hint = "Put the key into NONDET_API_KEY, or name its variable with --key-env."
                raise UserError(f"the server at {self.url} refuses: {reason}", hint) from None
            listed = []
        owners = [self._transport.key.reason(model.owned_by or "", 40) for model in listed]
        self.server = await self._known_page([_OWNERS[owner] for owner in owners if owner in _OWNERS])
        self.context = min((m.max_model_len for m in listed if isinstance(m.max_model_len, int)), default=None)
        name = self.server.partition(" ")[0]
        if self.protocol == "auto":
            path = self._transport.address.protocol
            own = f"{name}-chat" if path == "openai-chat" else name  # its own form is the most informative one
            self.protocol = own if own in FORMATS else path or await self._openai(owners)
        self.listed = [self._transport.key.reason(model.id) for model in listed]
        self.model = self._one_of(self.listed, strict=name != "transformers")  # which lists what it could load

    async def _known_page(self, named: list[str]) -> str:
        """The server that has the page that only it has, with its version; that of the models' owner is tried first."""
        for server, path, (key, kind), version_key in sorted(_PAGES, key=lambda page: page[0] not in named):
            try:
                page = read(parse(await self._page("GET", path)), dict[str, Any])
                read(page.get(key), kind)
                version = self._transport.key.reason(read(page.get(version_key) or "", str), 40)
            except AttemptError:
                continue
            return f"{server} {version or await self._mode(server)}".rstrip()
        return named[0] if named else ""

    async def _mode(self, server: str) -> str:
        """Version, mode and attention of a SGLang; "" of others."""
        if server != "sglang":
            return ""
        with contextlib.suppress(AttemptError):
            info = read(parse(await self._page("GET", "/server_info")), _Sglang)
            mode = [DETERMINISTIC] if info.enable_deterministic_inference else []
            backend = [f"attention {info.attention_backend}"] if info.attention_backend else []
            return self._transport.key.reason(", ".join([info.version or "of no version", *mode, *backend]), 80)
        return ""

    async def _openai(self, owners: list[str]) -> str:
        """Chat, or whether a server has /v1/completions: a list is refused there as no request, and not as unknown."""
        if _OPENAI & set(owners):
            return "openai-chat"
        try:
            async with self._transport.exchange("POST", "/v1/completions", cast("Any", [])):
                pass
        except AttemptError as failure:
            if failure.kind in ("http-404", "http-405", "http-501"):
                return "openai-chat"
        return "openai"

    def _one_of(self, listed: list[str], strict: bool) -> str:
        model = self._wanted_model
        if model is None:
            if len(listed) == 1:
                return listed[0]
            hint = f"Name one with --model: {', '.join(listed[:8])}" if listed else "Name it with --model."
            raise UserError(f"the server at {self.url} lists {len(listed) or 'no'} models", hint)
        if strict and listed and model not in listed:
            raise UserError(f"the server at {self.url} has no model {model!r}", suggestion(model, listed))
        return model

    async def _once(self, ask: Ask, times: Times) -> Answer:
        """One attempt, or an AttemptError."""
        parts = Parts()
        most = self._limits.bytes_for(ask)
        body = self._format.body(ask, self.model, self._stream)
        async with self._transport.exchange("POST", self._format.path, body, times) as response:
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind == "text/event-stream" or (self._stream and kind != "application/json"):
                # some servers send no event for a token, none sends many
                events = Events(most, 8 * ask.max_tokens + 256)
                await self._follow(response, events, most, parts, times)
            else:
                self._format.take(parse(await self._transport.body(response, most)), parts)
        return self._checked(answer_from(ask, parts))

    async def _follow(self, response: Response, events: Events, most: int, parts: Parts, times: Times) -> None:
        """Read a stream up to its end mark, or up to the end of the body if the answer reported its end."""
        parts.streamed = True
        async for piece in self._transport.pieces(response, most):
            for event in events.feed(piece):
                self._take_event(event, parts, times)
            if parts.ended:
                return
        if not parts.ended and not parts.finish:
            raise AttemptError("cut-off", "the stream ended in mid-answer")
        if not parts.ended:
            parts.note("a stream without [DONE]")

    def _take_event(self, event: bytes, parts: Parts, times: Times) -> None:
        came = time.monotonic()
        if event.strip() == b"[DONE]":
            parts.ended = True
        elif not parts.ended:
            self._format.take(parse(event), parts)
            # an event with only a role is not a token: the request may still be queued
            if times.first is None and (any(parts.text) or parts.ids or parts.bytes or parts.chosen):
                times.first = came

    def _checked(self, answer: Answer) -> Answer:
        """The answer, if it does not hold the key; what is neither text nor token is redacted."""
        key: Key = self._transport.key
        if key.leaked(answer.text) or key.leaked(b"".join(answer.token_bytes or ())):
            raise AttemptError("leaked-key", "the completion contains the API key of its request")
        fingerprint, model = (self._transport.reason(text, 200) for text in (answer.fingerprint, answer.model))
        return dataclasses.replace(answer, fingerprint=fingerprint, model=model)
