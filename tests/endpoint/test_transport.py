"""One exchange: what a failure is called, and how long a server asks to be left alone."""

from __future__ import annotations

import asyncio
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from nondet.endpoint.http import RETRIED, AttemptError, Key, Limits, Times, Transport, read_address
from tests.endpoint.wire import Request, Server, response


async def asked(url: str, times: Times | None = None, **limits: Any) -> AttemptError:
    """The failure of one exchange with what is there."""
    transport = Transport(read_address(url), Key(), Limits(**limits))
    try:
        with pytest.raises(AttemptError) as caught:
            async with transport.exchange("POST", "/v1/completions", {"a": 1}, times) as answer:
                await transport.body(answer, 1 << 20)
    finally:
        await transport.close()
    return caught.value


def failure(answer: bytes, **limits: Any) -> AttemptError:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer)
        return False

    async def work() -> AttemptError:
        async with Server(handler) as server:
            return await asked(server.url, **limits)

    return asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0.0),
        ("7", 7.0),
        (" 120 ", 120.0),
        ("9" * 40, 999_999_999.0),
        ("-1", None),
        ("1.5", None),
        ("\u0663".encode().decode("latin-1"), None),  # a digit of another script
        ("soon", None),
        ("", None),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
    ],
)
def test_a_server_says_how_long_to_wait(header: str, seconds: float | None) -> None:
    """In digits or as a date; what can't be read is no wait of zero."""
    refused = failure(response(503, b'{"error": "busy"}', extra=f"Retry-After: {header}\r\n"))
    assert (refused.kind, refused.reason, refused.retry_after_s) == ("http-503", "HTTP 503: busy", seconds)


def test_a_date_to_come_is_so_many_seconds() -> None:
    """From now on, by this machine's clock."""
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    wait = failure(response(429, b"", extra=f"Retry-After: {date}\r\n")).retry_after_s
    assert wait is not None
    assert 60 < wait <= 90


def test_a_server_that_says_nothing_of_a_wait() -> None:
    """None, and not zero."""
    refused = failure(response(429, b""))
    assert (refused.kind, refused.reason, refused.retry_after_s) == ("http-429", "HTTP 429", None)


def test_where_nothing_listens_there_is_no_connection() -> None:
    """The kind by which it is counted, and tried again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        times = Times()
        refused = asyncio.run(asked(f"http://127.0.0.1:{taken.getsockname()[1]}", times))
    assert refused.kind == "connect"
    assert refused.kind in RETRIED
    assert refused.reason.startswith("no connection: ")
    assert (times.header, times.done >= times.sent > 0) == (None, True)


def test_a_name_that_nobody_has_is_no_connection() -> None:
    """Neither one that does not resolve, nor one that no name can be."""
    for host in ("nobody.invalid", "a" * 70 + ".invalid"):
        assert asyncio.run(asked(f"http://{host}:1")).kind == "connect"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "reset"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "cut-off"),
        (b"220 mail.example ESMTP\r\n\r\n", "protocol"),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "redirect"),
        (response(200, b"{}", extra="Content-Encoding: gzip\r\n"), "malformed"),
        (response(200, b" " * (1 << 21)), "too-large"),
        (response(300, b"{}"), "http-300"),
        (response(400, b"no"), "http-400"),
    ],
)
def test_kinds_of_failures(answer: bytes, kind: str) -> None:
    """Each by the word that run files count it by."""
    assert failure(answer).kind == kind


@pytest.mark.parametrize(("limit", "words"), [("first_byte_s", "no answer within"), ("total_s", "not done after")])
def test_a_server_that_is_silent_is_left(limit: str, words: str) -> None:
    """At the limit that ran out first, which is named."""

    async def silent(request: Request, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(30)
        return False

    async def work() -> AttemptError:
        async with Server(silent) as server:
            return await asked(server.url, None, connect_s=0.1, **{limit: 0.2})

    late = asyncio.run(asyncio.wait_for(work(), 20))
    assert late.kind == "timeout"
    assert late.reason == f"{words} 0.2 s"
