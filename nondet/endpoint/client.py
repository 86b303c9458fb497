"""The client of one server: requests within limits, retried by rule, every answer or failure as plain data.

    async with connect("http://127.0.0.1:8000", model="tiny") as client:
        answer = await client.complete(Ask(id="a", prompt="Once upon", max_tokens=16))

Nothing of the environment but the key is used: no proxies, no .netrc. The key goes to the URL's origin only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from types import TracebackType
from typing import Self

from httpx import Response

from ..errors import UnknownNameError, UserError
from .address import read_address
from .detect import Choice, choose
from .document import parse
from .exchange import Answer, Ask
from .extra import check_extra
from .failures import FULL, AttemptError, wait_before_retry
from .formats import FORMATS
from .keys import Key, key_from_environment
from .limits import Limits
from .reading import Parts, answer_from
from .sides import Sides
from .stream import Events
from .transport import Times, Transport

__all__ = ["HttpClient", "connect"]


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
    """A connection to one server; see `connect`, and `nondet.endpoint.exchange.Client` for what others rely on.

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
