"""One HTTP exchange within its limits: the URL, the key, the response as strict JSON or events, or a one-line error."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import html
import ipaddress
import json
import logging
import os
import random
import re
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote, unquote, urlsplit

import httpx
import msgspec
import numpy as np

from nondet.endpoint.arms import Ask
from nondet.errors import UserError, one_line, without_path


@dataclass(eq=False)
class AttemptError(Exception):
    """One attempt that gave no completion."""

    kind: str  # a word for counting: "timeout", "http-429", "malformed", ... (see `RETRIED`)
    reason: str  # one line for a reader; text from a server is redacted and made printable
    retry_after_s: float | None = None  # seconds that the server requested to wait; None where it did not

    def __str__(self) -> str:
        return self.reason


def malformed(reason: str) -> AttemptError:
    """A server's response can't be read as an answer."""
    return AttemptError("malformed", reason)


# Kinds by which a server reports that it is full: its Retry-After is followed, up to `most_wait_s`; requests are no
# longer repeated after `patience_s` of nothing else.
FULL = ("http-429", "http-503", "http-529")
# Kind -> most repetitions (`attempts` bounds all kinds together). Other kinds would fail again, or (a timeout) may
# still be running on the server, where a second one adds load.
RETRIED = {
    "connect": 3,  # nothing listened, or the name did not resolve
    "reset": 3,  # closed before the answer's header was whole
    "cut-off": 2,  # closed in the middle of the answer
    "http-408": 3,
    "http-425": 3,
    "http-429": 8,
    "http-500": 1,  # the request itself may be what crashes the server
    "http-502": 3,
    "http-503": 8,
    "http-504": 1,
    "http-529": 8,
}


def wait_before_retry(failure: AttemptError, times: int, request: str, limits: Limits) -> float | None:
    """Seconds to wait before a request is repeated, by `RETRIED`, or None; `times`: repetitions of this kind so far.

    A completion changes nothing on a server, so sending it twice is safe; every repetition is counted in
    `Answer.refusals`, because the first attempt may have been part of the load. The wait doubles from `first_wait_s` to
    `most_wait_s`, times a factor between 0.5 and 1 that is drawn from the request's id (so that refused requests do not
    all return at once, and a run can be repeated).
    """
    if times >= RETRIED.get(failure.kind, 0):
        return None
    if failure.retry_after_s is not None:
        return min(failure.retry_after_s, limits.most_wait_s)
    wait = min(limits.most_wait_s, limits.first_wait_s * 2**times)
    return wait * random.Random(f"{request} {failure.kind} {times}").uniform(0.5, 1)  # noqa: S311 - a wait, no secret


KEY_VARIABLES = ("NONDET_API_KEY", "OPENAI_API_KEY")
_LOGGERS = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.proxy")
_MASKED = re.compile(r"\S{0,200}\*{3}\S{0,200}")
_ESCAPE = re.compile(r"\\(?:x|u00)([0-9a-fA-F]{2})")
_SHORTEST_SECRET = 8  # "EMPTY", "none" and "x" are common where a server accepts any key


class Key:
    """A key that shows itself only in the header of a request. Its repr and str are "[key]"; it can't be pickled or
    copied into a record by accident. `name` is "key", or "path" for one in an address."""

    __slots__ = ("_parts", "_shown", "_value")

    def __init__(self, value: str = "", name: str = "key") -> None:
        self._value, self._shown = value, f"[{name}]"
        plain, size = _squeezed(unquote(value)), _SHORTEST_SECRET
        self._parts = {text[i : i + size] for text in (plain, plain[::-1]) for i in range(len(text) - size + 1)}

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return self._shown if self._value else "[no key]"

    def __reduce__(self) -> str:
        raise TypeError("a key is not written anywhere")

    def headers(self) -> dict[str, str]:
        """The headers that authorize one request; empty without a key."""
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def redact(self, text: str) -> str:
        """The text with the key, as it is or percent-encoded, replaced by "[key]". Apply it before cutting the text."""
        for form in self._forms():
            text = text.replace(form, self._shown)
        return text

    def reason(self, text: str, limit: int = 300) -> str:
        """A server's message for one line of a report: printable, cut, without the key or a recognizable part of it.

        A part is eight characters in a row, or a word that a server has masked itself ("sk-abc***xyz"). A line that
        still has one in one of the forms of `_views` is withheld. A server that has the key could still hide it
        in what it sends: this protects only against carelessness.
        """
        line = _MASKED.sub("[masked]", one_line(self.redact(text), limit))
        for start in range(len(self._value) - _SHORTEST_SECRET + 1):
            line = line.replace(self._value[start : start + _SHORTEST_SECRET], self._shown)
        if any(part in view for view in map(_squeezed, _views(line)) for part in self._parts):
            return f"{self._shown} (the rest is withheld)"[:limit]
        return line

    def leaked(self, text: str | bytes) -> bool:
        """Whether a text holds the key; never for one too short to be a secret."""
        if len(self._value) < _SHORTEST_SECRET:
            return False
        whole = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return any(form.encode() in whole for form in self._forms())

    def _forms(self) -> set[str]:
        value = self._value
        return {value, unquote(value), quote(value, safe=""), value.replace("/", "\\/")} if value else set()


def _squeezed(text: str) -> str:
    """Only letters and digits, in lower case, to ignore wrapping, spaces and capitals."""
    return "".join(filter(str.isalnum, text.casefold()))


def _views(line: str) -> Iterator[str]:
    """The line in other forms: escapes and entities undone (twice), base64, hex, and codes of characters."""
    yield line
    for _ in range(2):
        line = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), html.unescape(unquote(line)))
        yield line
    for run in re.findall(r"[\w+/-]{11,}", line, re.ASCII):
        for start in range(4):  # the beginning of the encoding within the run is unknown
            text = run[start:].translate({ord("-"): "+", ord("_"): "/"})
            yield base64.b64decode(text[: len(text) // 4 * 4]).decode("latin-1")
    digits = re.sub(r"0x|[^0-9a-fA-F]", "", line)
    for run in [digits, digits[1:], *re.findall(r"[0-9a-fA-F]{16,}", line)]:
        yield bytes.fromhex(run[: len(run) // 2 * 2]).decode("latin-1")
    yield "".join(chr(int(code)) for code in re.findall(r"\d+", line) if len(code) < 4)


def key_from_environment(variable: str | None = None, environment: Mapping[str, str] | None = None) -> Key:
    """The key in this environment variable, or in the first of `KEY_VARIABLES` that is set, if one is. Raises
    UserError: the named variable is not set, or holds what can't be sent in a header."""
    environment = os.environ if environment is None else environment
    for name in (variable,) if variable else KEY_VARIABLES:
        value = environment.get(name, "").strip()
        if value:
            if not (value.isascii() and value.isprintable() and " " not in value):
                raise UserError(f"the key in {name} has characters that no HTTP header takes", "Set it again.")
            return Key(value)
    if variable:
        hint = "Name the variable that holds the key, not the key itself."
        raise UserError("--key-env names an environment variable that is not set", hint)  # or is itself the key
    return Key()


_PATHS = {
    "/v1/chat/completions": "openai-chat",
    "/v1/completions": "openai",
    "/completion": "llama.cpp",
    "/generate": "",
}
_PORTS = {"http": 80, "https": 443}
_PREFIX_LEAST, _PART_LEAST = 4, 8  # shorter parts are not redacted: "/v2" and "api" are common
# A first part of a host that looks like a key: it is written to no message and no file.
_TOKEN = re.compile(r"(((sk|pk|xai|pplx|nvapi)-|(hf|gh[opsu]|gsk|r8)_)[\w-]{12,}|\w{24,})(\..*)?", re.I)


@dataclass(frozen=True, kw_only=True)
class Address:
    """A server's address."""

    scheme: str  # "http" or "https"
    host: str  # and port, as for connecting
    port: int
    prefix: str = ""  # the path before /v1/..., without a slash at its end; usually ""
    protocol: str = ""  # what the URL's path names, for example openai-chat for .../v1/chat/completions

    @property
    def origin(self) -> str:
        """Scheme, host and port, to which a key belongs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    @property
    def url(self) -> str:
        """Origin, and a digest of the prefix, as records show it."""
        origin = f"{self.scheme}://HOST-NOT-REPEATED" if _TOKEN.fullmatch(self.host) else self.origin
        return without_path(origin + self.prefix)

    @property
    def secrets(self) -> tuple[Key, ...]:
        """The prefix and its longer parts, any of which may be a gateway's token."""
        parts = [self.prefix, *(part for part in self.prefix.split("/") if len(part) >= _PART_LEAST)]
        return tuple(Key(part, "path") for part in parts if len(part) >= _PREFIX_LEAST)

    @property
    def local(self) -> bool:
        """Whether the name is this machine's own, so that no network is used."""
        if self.host == "localhost" or self.host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_address(url: str) -> Address:
    """Read --endpoint: `http://host:port`, with or without `/v1` or the path of completions at its end. Raises
    UserError: not an http or https URL, or one with a user, a password, a query or a fragment. It is not repeated in
    the message, because it may hold a secret."""
    unusable = UserError("not the URL of a server", "Give it as http://HOST:PORT or https://HOST/v1.")
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise unusable from None
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise UserError(
            "the server's URL has a user or a password in it",
            "Leave them out; a key comes from the environment (NONDET_API_KEY, or --key-env NAME).",
        )
    if parts.scheme not in _PORTS or not parts.hostname or not parts.netloc.isprintable() or " " in parts.netloc:
        raise unusable
    if parts.query or parts.fragment:
        raise UserError("the server's URL has a query or a fragment, which may hold a secret", unusable.hint)
    path, protocol = parts.path.rstrip("/"), ""
    if ending := next((ending for ending in _PATHS if path.endswith(ending)), ""):
        path, protocol = path.removesuffix(ending), _PATHS[ending]
    port, prefix = _PORTS[parts.scheme] if port is None else port, path.removesuffix("/v1")
    return Address(scheme=parts.scheme, host=parts.hostname, port=port, prefix=prefix, protocol=protocol)


_BYTES_PER_ALTERNATIVE = 2048  # a token id, its text, its bytes as a JSON list and a logprob take under 300


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one attempt, and of how often there is another."""

    connect_s: float = 10.0  # until the connection (with TLS) is open
    first_byte_s: float = 300.0  # until the answer's header is whole: a full server keeps requests in its queue
    idle_s: float = 120.0  # between two pieces of the body
    total_s: float = 900.0  # for one attempt in total, which also ends a slow drip
    page_s: float = 20.0  # the same for a page with the server's description or counters
    most_bytes: int = 64 << 20  # of one answer, before anything is parsed; `bytes_for` is usually less
    most_page_bytes: int = 4 << 20  # of a page with the server's description or counters
    most_error_bytes: int = 64 << 10  # read of the body of an error
    attempts: int = 10  # sent at most this often, for whatever reason
    first_wait_s: float = 0.5  # the first and the longest wait between attempts, Retry-After included
    most_wait_s: float = 30.0
    patience_s: float = 300.0  # with a full server; then each request is sent once, until one is answered

    def bytes_for(self, ask: Ask) -> int:
        """The most bytes of an answer to this request: a generous share for each requested token."""
        echoed = 32 * len(ask.prompt)  # some servers return the prompt, as text, escaped, and as ids
        tokens = ask.max_tokens * (ask.top_logprobs + 2) * _BYTES_PER_ALTERNATIVE
        return min(self.most_bytes, (1 << 20) + echoed + tokens)


_MOST_CONTAINERS = 500_000  # `[],` is three bytes on the wire and sixty in memory
_MOST_COMMAS = 4_000_000

T = TypeVar("T")


def parse(raw: bytes) -> Any:
    """A JSON document with floats as strings, the decimals that were sent. NaN, Infinity, a key that occurs twice in
    one object, invalid UTF-8, nesting deeper than the interpreter's stack and more than some hundred thousand lists or
    objects are an AttemptError ("malformed" or "too-large")."""
    if raw.count(b"[") + raw.count(b"{") > _MOST_CONTAINERS or raw.count(b",") > _MOST_COMMAS:
        raise AttemptError("too-large", f"JSON of {len(raw):,} bytes with too many parts")
    text = ""
    try:
        text = raw.decode("utf-8")
        return json.loads(
            text, parse_float=str, parse_int=_integer, parse_constant=_no_constant, object_pairs_hook=_object
        )
    except UnicodeDecodeError as error:
        raise malformed(f"invalid UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        what = "an empty body" if not text.strip() else f"not JSON: {error.msg} at character {error.pos}"
        raise malformed(what) from None
    except RecursionError:
        raise malformed("JSON nested too deeply") from None
    except ValueError:  # of int(): more digits than Python reads
        raise malformed("a number of thousands of digits") from None


def _integer(digits: str) -> int | str:
    return digits if digits == "-0" else int(digits)  # an int would lose the sign of a logprob


def _no_constant(name: str) -> NoReturn:
    raise malformed(f"{name}, which is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise malformed("a key that occurs twice in one object")
    return document


def read(document: Any, kind: type[T]) -> T:
    """A parsed document as a type of msgspec's; else an AttemptError ("malformed") with the field. Strict: a bool is
    not an int, and null is accepted only where None is."""
    try:
        return msgspec.convert(document, kind)
    except UnicodeEncodeError:  # msgspec looks an object's names up in UTF-8
        raise malformed("half a surrogate pair in a name") from None
    except (msgspec.ValidationError, RecursionError) as error:
        raise malformed(str(error)) from None


def float32_bytes(decimals: list[Any], key: str = "logprobs") -> bytes:
    """Little-endian float32, each the one nearest to its decimal (ties to even), never rounded twice.

    A float64 in between is harmless except where it lies exactly half way between two float32: there the decimal itself
    decides. (Rounding keeps order, and every midpoint is a float64, so a decimal above a midpoint can't become a
    float64 below it.) Null, not a number, or one too large for float32 is an AttemptError ("malformed").
    """
    for value in decimals:
        if type(value) not in (int, str):
            raise malformed(f"{key!r} has {type(value).__name__} where a number should be")
    try:
        doubles = np.array([float(value) for value in decimals], dtype="<f8")
    except (ValueError, OverflowError):
        raise malformed(f"{key!r} has something that is not a number") from None
    with np.errstate(over="ignore"):
        rounded = doubles.astype("<f4")
        beyond = np.nextafter(rounded, np.where(doubles > rounded, np.inf, -np.inf).astype("<f4"))
    if not np.isfinite(rounded).all():
        raise malformed(f"{key!r} has a number that float32 can't hold")
    for index in np.flatnonzero((rounded.astype("<f8") + beyond) / 2 == doubles):
        exact, double = Decimal(decimals[index]), Decimal(float(doubles[index]))
        if exact != double:
            rounded[index] = (max if exact > double else min)(rounded[index], beyond[index])
    return rounded.tobytes()


class Events:
    """Collects pieces of a body and gives the data of each complete event, within `most_bytes` each and `most_events`.

    Lines end with LF or CR LF; `data:` lines of one event are joined by newlines; comments and other fields are
    skipped. An unfinished event at the end of the body is dropped, as the standard requires.
    """

    def __init__(self, most_bytes: int, most_events: int) -> None:
        self._most, self._left, self._most_events = most_bytes, most_events, most_events
        self._rest: list[bytes] = []  # pieces of one line, joined once it ends, so that a drip of single bytes is cheap
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece finished; an AttemptError ("too-large") beyond the limits."""
        self._size += len(piece)
        if self._size > self._most:
            raise AttemptError("too-large", f"an event of more than {self._most:,} bytes")
        self._rest.append(piece)
        if b"\n" not in piece:
            return []
        *lines, rest = b"".join(self._rest).split(b"\n")
        self._rest = [rest]
        return [event for line in lines if (event := self._line(line.removesuffix(b"\r"))) is not None]

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data, self._size = self._data, [], 0
            self._left -= bool(data)
            if self._left < 0:
                raise AttemptError("too-large", f"more than {self._most_events:,} events")
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None


# Redirects are not followed, and proxies and .netrc of the environment are not used (httpx's trust_env is off): the
# request and the key go only to the user's URL. Compressed answers are not accepted, because a few bytes could become
# gigabytes. A connection carries one request, so that excess data from a server can't become the answer to another one.


@dataclass
class Times:
    """Seconds on `time.monotonic()`: the first byte sent, the answer's header whole, the first event, the end."""

    sent: float = 0.0
    header: float | None = None
    first: float | None = None
    done: float = 0.0


class Transport:
    """Connections to one origin, the only one that gets the key. `verify` False accepts any certificate; a path is a
    file of certificates to trust instead of the usual ones (a `UserError` where it can't be read)."""

    def __init__(self, address: Address, key: Key, limits: Limits, verify: bool | str = True) -> None:
        self.address, self.key, self.limits = address, key, limits
        self.secrets = (*address.secrets, key)
        try:
            trusted = verify if isinstance(verify, bool) else ssl.create_default_context(cafile=verify)
        except (OSError, ssl.SSLError):
            raise UserError(f"no certificates that can be read in {verify!r}", "Name a file in PEM form.") from None
        if address.scheme != "https":  # reading all certificates takes a tenth of a second
            trusted = False
        self._http = httpx.AsyncClient(
            verify=trusted,
            trust_env=False,
            follow_redirects=False,
            event_hooks={"response": [self._refuse_redirect]},
            # the other limits are enforced here, over the whole exchange
            timeout=httpx.Timeout(None, connect=limits.connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"Accept-Encoding": "identity", "Connection": "close", "User-Agent": "nondet"},
        )

    def open(self) -> None:
        """Prepare for the first exchange: from here to `close` the key is kept out of logs."""
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self._redacted)

    def _redacted(self, record: logging.LogRecord) -> bool:
        """Redact logs of httpx and httpcore, if they are enabled: they have addresses and the server's headers."""
        message = record.getMessage()
        for secret in self.secrets:
            message = secret.redact(message)
        if message != record.getMessage():
            record.msg, record.args = message, ()
        return True

    def reason(self, text: str, limit: int = 300) -> str:
        """A message for one line of a report: as `Key.reason`, and without the address's path."""
        for secret in self.secrets:
            text = secret.redact(text)
        for secret in self.secrets:
            text = secret.reason(text, limit)
        return text

    async def close(self) -> None:
        """Close what is open."""
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self._redacted)
        await self._http.aclose()

    @contextlib.asynccontextmanager
    async def exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, times: Times | None = None
    ) -> AsyncIterator[httpx.Response]:
        """The answer to one request once its header is there, with a status from 200 to 299. Any error is an
        AttemptError, inside of the block as well. `path` follows the address's prefix. Without `times` it is a page's,
        and ends within the limits' `page_s`."""
        within_s = self.limits.page_s if times is None else self.limits.total_s
        times = times if times is not None else Times()
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
                        raise malformed(f"compressed ({self.reason(coding, 20)}), though that was not requested")
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
        """The body as it arrives; an AttemptError ("too-large" or "timeout") where it exceeds the limits."""
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
        """The whole body; as `pieces`."""
        return b"".join([piece async for piece in self.pieces(response, most_bytes)])

    async def _header(self, method: str, path: str, body: Mapping[str, Any] | None, times: Times) -> httpx.Response:
        async def trace(event: str, _: Mapping[str, Any]) -> None:
            if event.endswith("send_request_headers.started"):
                times.sent = time.monotonic()

        headers, content = self.key.headers(), None
        if body is not None:  # in ASCII, because a prompt may hold half a surrogate pair
            headers["Content-Type"] = "application/json"
            content = json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii")
        request = self._http.build_request(
            method, self.address.origin + path, content=content, headers=headers, extensions={"trace": trace}
        )
        try:
            async with asyncio.timeout(self.limits.connect_s + self.limits.first_byte_s):
                return await self._http.send(request, stream=True)
        except TimeoutError:
            raise AttemptError("timeout", f"no answer within {self.limits.first_byte_s:g} s") from None

    async def _refuse_redirect(self, response: httpx.Response) -> None:
        """Before httpx reads the Location, which can be anything: it raises several kinds of errors on that."""
        if response.status_code in (301, 302, 303, 307, 308):
            try:
                target = response.url.join(response.headers.get("location", ""))
                where = read_address(str(target.copy_with(query=None, fragment=None))).origin
            except Exception:  # noqa: BLE001 - see above
                where = "something that is not an address"
            raise AttemptError("redirect", f"redirects to {self.reason(where, 100)} (not followed)")

    async def _refusal(self, response: httpx.Response) -> AttemptError:
        """The error of an unsuccessful status, with the server's message."""
        message = ""
        with contextlib.suppress(AttemptError):  # an error whose body can't be read is still that error
            message = self.reason(_message(await self.body(response, self.limits.most_error_bytes)))
        status = f"HTTP {response.status_code}"
        retry_after_s = _retry_after(response.headers.get("retry-after", ""))
        line = f"{status}: {message}" if message else status
        return AttemptError(f"http-{response.status_code}", line, retry_after_s)

    def _failure(self, error: Exception, times: Times) -> AttemptError:
        """The AttemptError for an exception of httpx, TLS or the sockets."""
        text = self.reason(str(error), 200) or type(error).__name__
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(cause):
                return AttemptError("certificate", f"the server's certificate is not trusted: {text}")
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, httpx.ConnectTimeout):
            return AttemptError("connect", f"no connection within {self.limits.connect_s:g} s")
        if isinstance(error, httpx.ConnectError | httpx.InvalidURL | UnicodeError):  # a name that IDNA rejects
            return AttemptError("connect", f"no connection: {text}")
        if isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in text and "closed" not in text:
            return AttemptError("protocol", f"not HTTP: {text}")
        if times.header is None:
            return AttemptError("reset", f"closed before an answer: {text}")
        return AttemptError("cut-off", f"closed in mid-answer: {text}")


def _retry_after(value: str) -> float | None:
    """Seconds of a Retry-After header, as a number or as a date; None where it can't be read."""
    value = value.strip()[:64]
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _message(raw: bytes) -> str:
    """The message in an error's body: from JSON of one of the usual forms, else the text."""
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
