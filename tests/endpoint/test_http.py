"""URLs and keys: read strictly, refused in one line, shown nowhere."""

from __future__ import annotations

import asyncio
import base64
import copy
import html
import json
import logging
import pickle
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import product
from urllib.parse import quote

import pytest

from nondet.cli import main
from nondet.endpoint.arms import Ask
from nondet.endpoint.client import HttpClient
from nondet.endpoint.http import AttemptError, Key, Limits, Transport, key_from_environment, read_address
from nondet.errors import UserError
from tests.endpoint.honest import Request, Server, awaited, json_response, response

KEY = "sk-keys-0123456789"


def test_a_url_is_read_with_or_without_its_path() -> None:
    for url, shown, protocol in [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", ""),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000", ""),
        ("https://HOST.example/v1", "https://host.example", ""),
        ("https://host.example:443/v1/", "https://host.example", ""),
        ("https://host.example/proxy/v1/completions", "https://host.example/(path 1241)", "openai"),
        ("https://host.example/v2/ab12cd34ef56", "https://host.example/(path 5e22)", ""),
        ("http://[::1]:8080/v1/chat/completions", "http://[::1]:8080", "openai-chat"),
        ("http://localhost:8080/completion", "http://localhost:8080", "llama.cpp"),
    ]:
        address = read_address(url)
        assert (address.url, address.protocol) == (shown, protocol)


REFUSED = """
    localhost:8000  ftp://host/  http://  http://host:notaport  http://host:99999  http://[::1  http://ex\u202eample
    http://user:hunter2@host/  http://user@host/  http://:hunter2@host:8000  https://host/v1?api_key=hunter2
    https://host/v1#hunter2  http://user:hunter2@host:notaport/  http://host:hunter2  http://[hunter2
    http:/user:hunter2@host/  http:\\\\host\\hunter2  user:hunter2@host  localhost:8000/hunter2  ftp://host/hunter2/v1
    htps://host/v1?token=hunter2  http://host/hunter2/v1?a=b  http://host:notaport/?key=hunter2  hunter2
    sk-hunter2hunter2/  sk-hunter2hunter2:443  https://sk-hunter2hunter2/v1?a=b
"""


def test_other_urls_are_refused_without_showing_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ["", "http://ex ample:8000", "http://host /hunter2", *REFUSED.split()]:
        with pytest.raises(UserError) as caught:
            read_address(url)
        assert "hunter2" not in str(caught.value)
        assert "\n" not in str(caught.value)

    # a key where a host should be: what it is connected to, and why that failed, say that it is not repeated
    for host in ["sk-hunter2hunter2", "hf_hunter2hunter2.host", "hunter2abcdefabcdef0123456789"]:
        assert "hunter2" not in read_address(f"https://{host}:8443/v1").url
        assert main(["sample", "--endpoint", f"http://{host}"]) == 2
        said = capsys.readouterr().err
        assert "HOST-NOT-REPEATED" in said
        assert "hunter2" not in said
    for name in ("vllm-server-production-deployment-7f6d9-x2x", "key-server-production", "sk-gpu-1.example.org"):
        assert name in read_address(f"http://{name}:8000").url


def test_a_key_goes_unencrypted_to_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    HttpClient("http://10.0.0.1:8000")
    monkeypatch.setenv("NONDET_API_KEY", KEY)
    for host in ("127.0.0.2", "localhost", "[::1]"):
        HttpClient(f"http://{host}:8000")
    with pytest.raises(UserError, match="unencrypted") as caught:
        HttpClient("http://10.0.0.1:8000")
    assert KEY not in str(caught.value)
    HttpClient("http://10.0.0.1:8000", allow_plain_http=True)
    HttpClient("https://10.0.0.1:8000")


def test_keys_come_from_the_environment() -> None:
    both = {"NONDET_API_KEY": "one-0123456789", "OPENAI_API_KEY": "two-0123456789", "MINE": " three-0123456789\n"}
    for variable, wanted in ((None, "one"), ("OPENAI_API_KEY", "two"), ("MINE", "three")):
        assert key_from_environment(variable, both).headers() == {"Authorization": f"Bearer {wanted}-0123456789"}
    assert not key_from_environment(None, {})
    for name, given, hidden in [
        ("MINE", {"MINE": "a\r\nX: b"}, "X: b"), ("MINE", {"MINE": "ключ"}, "ключ"),
        # the key in place of its variable's name
        *((name, {}, name) for name in ("sk-my-secret-0123", "AKIAIOSFODNN7EXAMPLE", "hunter2")),
    ]:  # fmt: skip
        with pytest.raises(
            UserError, match="no HTTP header takes" if given else "names an environment variable"
        ) as caught:
            key_from_environment(name, given)
        assert hidden not in str(caught.value)


def test_a_key_does_not_show_itself() -> None:
    key = Key("sk/0123456789")
    assert f"{key} {key!r} {[key]}" == "[key] [key] [[key]]"
    for copying in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not written"):
            copying(key)
    assert key.redact("a sk/0123456789 b sk%2F0123456789") == "a [key] b [key]"
    assert "sk/" not in key.reason("x" * 295 + "sk/0123456789", 300)
    assert key.leaked("..sk/0123456789..")
    assert key.reason("bad key: sk/01234... or 23456789") == "bad key: [key]... or [key]"
    assert key.reason("Incorrect API key provided: sk/0****789. See") == "Incorrect API key provided: [masked] See"
    assert key.reason('{"m": "sk\\/0123456789') == '{"m": "[key]'
    assert not Key("EMPTY").leaked("an EMPTY text")  # what people write where any key will do


SECRET = "sk-proj-Ab3xY9/qLmZ+77kTw"  # noqa: S105 - nobody's
FORMS: dict[str, str] = {
    "raw": SECRET,
    "bearer": f"Authorization: Bearer {SECRET}",
    "query": f"/v1/models?api_key={SECRET}&x=1",
    "userinfo": f"https://me:{SECRET}@host/",
    "bytes": repr(f"Bearer {SECRET}".encode()),
    "json": json.dumps({"key": SECRET}).replace("/", "\\/"),
    "percent": quote(SECRET, safe=""),
    "percent, lower case": quote(SECRET, safe="").lower(),
    "percent, every character": "".join(f"%{b:02x}" for b in SECRET.encode()),
    "percent, twice": quote(quote(SECRET, safe=""), safe=""),
    "escapes": "".join(f"\\u{ord(c):04x}" for c in SECRET),
    "bytes' escapes": "".join(f"\\x{b:02x}" for b in SECRET.encode()),
    "entities": html.escape(SECRET).replace("/", "&#x2F;").replace("-", "&#45;"),
    "entities, every character": "".join(f"&#{ord(c)};" for c in SECRET),
    "base64": base64.b64encode(SECRET.encode()).decode(),
    "basic": "Basic " + base64.b64encode(f"user:{SECRET}".encode()).decode(),
    "base64 of a header": base64.urlsafe_b64encode(f"Bearer {SECRET}".encode()).decode(),
    "base64 behind a slash": "key/" + base64.b64encode(SECRET.encode()).decode(),
    "hex": SECRET.encode().hex(),
    "hex, apart": " ".join(f"0x{b:02X}" for b in SECRET.encode()),
    "codes": str(list(SECRET.encode())),
    "capitals": SECRET.upper(),
    "spaced": " ".join(SECRET),
    "wrapped": "\n".join(SECRET[i : i + 5] for i in range(0, len(SECRET), 5)),
    "zero width": "\u200b".join(SECRET),
    "list": str(list(SECRET)),
    "backwards": SECRET[::-1],
    "masked": f"{SECRET[:7]}***{SECRET[-4:]}",
    "cut": f"{SECRET[:12]}... and ...{SECRET[-12:]}",
}


def test_a_server_that_repeats_a_secret_is_not_repeated() -> None:
    squeezed = "".join(filter(str.isalnum, SECRET.lower()))
    for secret, form in product((Key(SECRET), Key(SECRET, "path")), FORMS):
        said = f"wrong key: {FORMS[form]} (see the manual)"
        line = secret.reason(said)
        assert FORMS[form] not in line, form
        assert line != said, form
        assert repr(secret) in line or "[masked]" in line, form
        left = "".join(filter(str.isalnum, line.lower()))
        assert not [i for i in range(len(squeezed) - 7) if squeezed[i : i + 8] in left], form

    for text in [  # what holds no part of a key stays whole; so does anything where the key is none ("EMPTY")
        "out of memory: 1234567 of 7654321 bytes at 0x7f00deadbeef00112233",
        "no model meta-llama/Llama-3.1-8B-Instruct; have Qwen/Qwen2.5-0.5B",
        "%7B%22error%22%3A%20%22busy%22%7D QWxhZGRpbjpvcGVuIHNlc2FtZQ==",
        "max_tokens must be at least 1, got -5",
    ]:
        assert Key(SECRET).reason(text) == Key("EMPTY").reason(text) == Key().reason(text) == text


@awaited
async def test_logs_do_not_show_the_key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NONDET_API_KEY", KEY)

    async def handler(request: Request, writer: asyncio.StreamWriter) -> bool:
        echo = f"X-Echo: {request.headers.get('authorization')}\r\n"
        writer.write(json_response({"data": [{"id": "m"}]}, 200, echo))
        return True

    async with Server(handler) as server:
        with caplog.at_level(logging.DEBUG):
            async with HttpClient(server.url, protocol="openai") as client:
                await client.complete(Ask(id="a", prompt="x", max_tokens=2))
    assert "x-echo" in caplog.text.lower()
    assert KEY not in caplog.text


@awaited
async def test_a_server_says_how_long_to_wait() -> None:
    async def failure(answer: bytes) -> AttemptError:
        async def handler(request: Request, writer: asyncio.StreamWriter) -> bool:
            writer.write(answer)
            return False

        async with Server(handler) as server:
            transport = Transport(read_address(server.url), Key(), Limits())
            with pytest.raises(AttemptError) as caught:
                async with transport.exchange("POST", "/v1/completions", {"a": 1}):
                    pass
            await transport.close()
        return caught.value

    for header, seconds in [
        ("0", 0.0), ("7", 7.0), (" 120 ", 120.0), ("9" * 40, 999_999_999.0), ("-1", None), ("1.5", None),
        ("\u0663".encode().decode("latin-1"), None),  # a digit of another script
        ("soon", None), ("", None), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
    ]:  # fmt: skip
        refused = await failure(response(503, b'{"error": "busy"}', extra=f"Retry-After: {header}\r\n"))
        assert (refused.kind, refused.reason, refused.retry_after_s) == ("http-503", "HTTP 503: busy", seconds)
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert 60 < ((await failure(response(429, b"", extra=f"Retry-After: {date}\r\n"))).retry_after_s or 0) <= 90
    refused = await failure(response(429, b""))
    assert (refused.kind, refused.reason, refused.retry_after_s) == ("http-429", "HTTP 429", None)
