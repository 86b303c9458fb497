"""One HTTP exchange within its limits: what arrives, or one line on why nothing did.

Proxies and .netrc of the environment are not used (httpx's trust_env is off): the request goes where the user said, and
the key with it. Compressed answers are not asked for and not accepted, so that no few bytes become gigabytes. A
connection carries one request: what a server sends too much can't become the answer to another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from ..errors import UserError
from .address import Address, read_address
from .document import parse
from .failures import AttemptError, malformed
from .keys import Key, kept_out_of_logs
from .limits import Limits

__all__ = ["Times", "Transport"]

_MOST_REDIRECTS = 3


@dataclass
class Times:
    """Seconds on `time.monotonic()`: the first byte sent, the answer's header whole, the first event, the end."""

    sent: float = 0.0
    header: float | None = None
    first: float | None = None
    done: float = 0.0


class Transport:
    """Connections to one origin.

    Args:
        address: Where.
        key: Sent to this origin only.
        limits: Of each exchange.
        verify: False takes any certificate; a path is a file of certificates to trust instead of the usual ones.

    Raises:
        UserError: That file can't be read.
    """

    def __init__(self, address: Address, key: Key, limits: Limits, verify: bool | str = True) -> None:
        self.address, self.key, self.limits = address, key, limits
        self.secrets = (*address.secrets, key)
        self._open = contextlib.ExitStack()
        try:
            trusted = verify if isinstance(verify, bool) else ssl.create_default_context(cafile=verify)
        except (OSError, ssl.SSLError):
            raise UserError(f"no certificates that can be read in {verify!r}", "Name a file in PEM form.") from None
        self._http = httpx.AsyncClient(
            verify=trusted,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=limits.connect_s),  # the others are kept here, over the whole
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"Accept-Encoding": "identity", "Connection": "close", "User-Agent": "nondet"},
        )

    def open(self) -> None:
        """Before the first exchange: from here to `close` the key is kept out of logs."""
        self._open.enter_context(kept_out_of_logs(self.secrets))

    def reason(self, text: str, limit: int = 300) -> str:
        """What a server or a library said, for one line of a report: as `Key.reason`, for the address's path too."""
        for secret in self.secrets:
            text = secret.redact(text)
        for secret in self.secrets:
            text = secret.reason(text, limit)
        return text

    async def close(self) -> None:
        """Close what is open."""
        self._open.close()
        await self._http.aclose()

    @contextlib.asynccontextmanager
    async def exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        times: Times | None = None,
        within_s: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """The answer to one request once its header is there; status 200 to 299, or a failure.

        Args:
            method: "GET" or "POST".
            path: Behind the address's prefix.
            body: To send as JSON.
            times: Filled in.
            within_s: Seconds for all of it; None takes the limits' `total_s`.

        Raises:
            AttemptError: Whatever went wrong, inside the block as well.
        """
        times = times if times is not None else Times()
        within_s = self.limits.total_s if within_s is None else within_s
        times.sent = time.monotonic()
        try:
            async with asyncio.timeout(within_s):
                response = await self._header(method, self.address.prefix + path, body, times)
                try:
                    times.header = time.monotonic()
                    if not 200 <= response.status_code < 300:
                        raise await self._refusal(response)
                    coding = response.headers.get("content-encoding", "identity").strip().lower()
                    if coding not in ("identity", ""):
                        raise malformed(f"compressed ({self.reason(coding, 20)}), though that was not asked for")
                    yield response
                finally:
                    await response.aclose()
        except TimeoutError:
            raise AttemptError("timeout", f"not done after {within_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, UnicodeError) as error:
            raise self._failure(error, times) from None
        finally:
            times.done = time.monotonic()

    async def pieces(self, response: httpx.Response, most_bytes: int) -> AsyncIterator[bytes]:
        """The body as it arrives.

        Raises:
            AttemptError: "too-large" or "timeout".
        """
        size = 0
        pieces = response.aiter_raw()
        while True:
            try:
                async with asyncio.timeout(self.limits.idle_s):
                    piece = await anext(pieces, None)
            except TimeoutError:
                raise AttemptError("timeout", f"silent for {self.limits.idle_s:g} s in mid-answer") from None
            if piece is None:
                return
            size += len(piece)
            if size > most_bytes:
                raise AttemptError("too-large", f"more than {most_bytes:,} bytes")
            yield piece

    async def body(self, response: httpx.Response, most_bytes: int) -> bytes:
        """The whole body.

        Raises:
            AttemptError: "too-large" or "timeout".
        """
        return b"".join([piece async for piece in self.pieces(response, most_bytes)])

    async def _header(self, method: str, path: str, body: Mapping[str, Any] | None, times: Times) -> httpx.Response:
        async def trace(event: str, _: Mapping[str, Any]) -> None:
            if event.endswith("send_request_headers.started"):
                times.sent = time.monotonic()

        headers = self.key.headers()
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = _encoded(body) if body is not None else None
        for _ in range(_MOST_REDIRECTS + 1):
            request = self._http.build_request(
                method, self.address.origin + path, content=content, headers=headers, extensions={"trace": trace}
            )
            # The trace is kept beside httpx's own "timeout" extension, which build_request sets.
            request.extensions.setdefault("timeout", httpx.Timeout(None, connect=self.limits.connect_s).as_dict())
            try:
                async with asyncio.timeout(self.limits.connect_s + self.limits.first_byte_s):
                    response = await self._http.send(request, stream=True)
            except TimeoutError:
                raise AttemptError("timeout", f"no answer within {self.limits.first_byte_s:g} s") from None
            if response.status_code not in (301, 302, 303, 307, 308):
                return response
            await response.aclose()
            path = self._redirected(request.url, response)
        raise AttemptError("redirect", f"more than {_MOST_REDIRECTS} redirects")

    def _redirected(self, url: httpx.URL, response: httpx.Response) -> str:
        """The path that a redirect within the same origin names; only 307 and 308 keep a POST a POST."""
        try:
            target = url.join(response.headers.get("location", ""))
            where = read_address(str(target.copy_with(query=None, fragment=None))).origin
        except Exception:  # noqa: BLE001 - a Location can be anything, and httpx raises several kinds of errors on it
            raise AttemptError("redirect", "redirects to no address") from None
        if where != self.address.origin:
            raise AttemptError("redirect", f"redirects elsewhere, to {self.reason(where, 100)} (not followed)")
        if response.status_code not in (307, 308):
            raise AttemptError("redirect", f"redirects with status {response.status_code} (not followed)")
        return target.raw_path.decode("ascii", "replace")

    async def _refusal(self, response: httpx.Response) -> AttemptError:
        """A status that is no success, with what the server said of it."""
        with contextlib.suppress(AttemptError):  # an error's body that can't be read is still that error
            raw = await self.body(response, self.limits.most_error_bytes)
            said = self.reason(_message(raw))
            status = f"HTTP {response.status_code}"
            return AttemptError(
                f"http-{response.status_code}",
                f"{status}: {said}" if said else status,
                _retry_after(response.headers.get("retry-after", "")),
            )
        retry_after_s = _retry_after(response.headers.get("retry-after", ""))
        return AttemptError(f"http-{response.status_code}", f"HTTP {response.status_code}", retry_after_s)

    def _failure(self, error: Exception, times: Times) -> AttemptError:
        """What an exception of httpx, TLS or the sockets means."""
        said = self.reason(str(error), 200) or type(error).__name__
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(cause):
                return AttemptError("certificate", f"the server's certificate is not trusted: {said}")
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, httpx.RemoteProtocolError) and "location header" in said:
            return AttemptError("redirect", "redirects to no address")  # httpx reads it though nobody follows it
        if isinstance(error, httpx.ConnectTimeout):
            return AttemptError("connect", f"no connection within {self.limits.connect_s:g} s")
        if isinstance(error, httpx.ConnectError | httpx.InvalidURL | UnicodeError):  # IDNA knows no such host
            return AttemptError("connect", f"no connection: {said}")
        if isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in said and "closed" not in said:
            return AttemptError("protocol", f"not HTTP: {said}")
        if times.header is None:
            return AttemptError("reset", f"closed before an answer: {said}")
        return AttemptError("cut-off", f"closed in mid-answer: {said}")


def _encoded(body: Mapping[str, Any]) -> bytes:
    """A request's JSON, in ASCII: half a surrogate pair in a prompt is no error of ours.

    Raises:
        AttemptError: "unsupported": NaN, or something that JSON does not have, among the user's own fields.
    """
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (ValueError, TypeError, RecursionError):
        raise AttemptError("unsupported", "a field of the request that JSON can't hold") from None


def _retry_after(value: str) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date; None where it can't be read."""
    value = value.strip()[:64]
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _message(raw: bytes) -> str:
    """What an error's body says: its message where it is JSON of one of the usual forms, else its text."""
    try:
        document = parse(raw)
    except AttemptError:
        return raw.decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        value = document.get(key) if isinstance(document, dict) else None
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str):
            return value
    return raw.decode("utf-8", "replace")
