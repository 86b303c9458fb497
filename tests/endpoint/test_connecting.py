"""Which server, which model, which key, and over what: one line and exit 2 where it is not to be."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nondet.endpoint.arms import Ask
from nondet.endpoint.client import connect
from nondet.endpoint.http import Limits
from nondet.errors import UserError
from tests.endpoint.dialects import MODEL
from tests.endpoint.honest import Honest
from tests.endpoint.hostile import Hostile
from tests.endpoint.wire import Request, Server, awaited, json_response, response

KEY = "sk-connecting-0123456789"
QUICK = Limits(page_s=1)


@pytest.mark.parametrize(
    ("dialect", "path", "protocol", "server"),
    [
        ("openai", "", "openai", ""),
        ("openai", "/v1/chat/completions", "openai-chat", ""),
        ("vllm", "/v1", "vllm", "vllm 0.0.hash"),
        ("vllm", "/v1/chat/completions", "vllm-chat", "vllm 0.0.hash"),
        ("sglang", "", "sglang", "sglang"),
        ("llama.cpp", "", "llama.cpp", "llama.cpp b0-hash"),
        ("transformers", "", "transformers", "transformers"),
        ("transformers", "/v1/chat/completions", "transformers-chat", "transformers"),
    ],
)
@awaited
async def test_a_server_is_known_by_its_pages(dialect: str, path: str, protocol: str, server: str) -> None:
    """Each dialect is told from the others, chat from completions, by pages that compute nothing."""
    async with Honest(dialect) as there, connect(there.url + path) as client:
        assert (client.protocol, client.server, client.model) == (protocol, server, MODEL)
        assert client.evidence
        assert there.requests == []
        assert await client.models() == [MODEL]
        answer = await client.complete(Ask(id="a", prompt="Once", max_tokens=4))
        assert answer.ok, answer.reason
        assert len(answer.text) == 4


@awaited
async def test_a_server_of_openai_chats() -> None:
    """Whose models are OpenAI's is asked in the form that its models have; a user's word goes before."""

    async def handler(request: Request, writer: asyncio.StreamWriter) -> bool:
        models = {"data": [{"id": "m", "owned_by": "system"}]}
        writer.write(json_response(models) if request.path == "/v1/models" else response(404, b""))
        return True

    async with Server(handler) as server:
        async with connect(server.url) as client:
            assert client.protocol == "openai-chat"
        async with connect(server.url + "/v1/completions") as client:
            assert client.protocol == "openai"


@awaited
async def test_a_server_without_completions_is_asked_to_chat() -> None:
    """Where /v1/completions is not there, an unknown server gets the other form."""

    async def handler(request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/v1/models":
            writer.write(json_response({"data": [{"id": "m"}]}))
        else:
            writer.write(response(404, b""))
        return True

    async with Server(handler) as server, connect(server.url) as client:
        assert (client.protocol, client.model) == ("openai-chat", "m")


async def _connects(url: str, **options: Any) -> str:
    """Why there is no connection."""
    with pytest.raises(UserError) as caught:
        async with connect(url, **options):
            pass
    return str(caught.value)


async def _never(request: Request, writer: asyncio.StreamWriter) -> bool:
    await asyncio.sleep(60)
    return False


async def _talks_mail(request: Request, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"220 mail.example ESMTP\r\n\r\n")
    return False


async def _moved(request: Request, writer: asyncio.StreamWriter) -> bool:
    writer.write(response(301, b"", extra="Location: https://elsewhere.example/v1/models?token=hunter2\r\n"))
    return True


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (_never, "not done after 1 s"),
        (_talks_mail, "not HTTP"),
        (_moved, "redirects elsewhere, to https://elsewhere.example"),
    ],
)
@awaited
async def test_what_is_no_server_is_one_line(handler: Any, said: str) -> None:
    """Silence, another protocol, somewhere else: said within seconds."""
    async with Server(handler) as server:
        line = await _connects(server.url, limits=QUICK if handler is _never else None)
    assert said in line
    assert "\n" not in line
    assert "hunter2" not in line


@awaited
async def test_nothing_listens() -> None:
    """A port where nobody is."""
    async with Server(_never) as server:
        url = server.url
    assert f"no server that can be asked at {url}" in await _connects(url)


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "-a", "999.1.1.1", "127.0.0.1:1"])
@awaited
async def test_hosts_that_there_are_not(host: str) -> None:
    """Whatever the resolver, IDNA or the socket make of it."""
    assert "no connection" in await _connects(f"http://{host}")


@awaited
async def test_names_are_checked() -> None:
    """A protocol or a model that there is not, with what there is; none named where there are several or none."""
    async with Honest("vllm") as server:
        assert "has no model 'hash-2'. Did you mean hash-1?" in await _connects(server.url, model="hash-2")
        assert "unknown protocol 'vlm'. Did you mean vllm" in await _connects(server.url, protocol="vlm")


@pytest.mark.parametrize("listed", [[], ["a", "b"]])
@awaited
async def test_a_model_must_be_named_where_it_is_not_clear(listed: list[str]) -> None:
    """No guess among several."""

    async def handler(request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(json_response({"data": [{"id": name} for name in listed]}))
        return True

    async with Server(handler) as server:
        assert f"lists {len(listed) or 'no'} models" in await _connects(server.url)


@awaited
async def test_a_server_that_wants_a_key_says_so() -> None:
    """Without it one line; with it an answer."""
    async with Honest("vllm", key=KEY) as server:
        assert "refuses: HTTP 401: wrong key" in await _connects(server.url)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENAI_API_KEY", KEY)
            async with connect(server.url) as client:
                assert KEY not in repr(client)
                assert (await client.complete(Ask(id="a", prompt="x", max_tokens=2))).ok


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
@awaited
async def test_a_certificate_must_be_trusted(tmp_path: Path) -> None:
    """One that nobody signed is refused and said, taken where it is named, taken where any is."""
    paths = {"-keyout": str(tmp_path / "key.pem"), "-out": str(tmp_path / "certificate.pem")}
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    where = [word for pair in paths.items() for word in pair]
    subprocess.run(
        ["openssl", *command.split(), "-addext", "subjectAltName=IP:127.0.0.1", *where], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(paths["-out"], paths["-keyout"])

    server = Honest("vllm")
    server._ssl = context
    async with server:
        assert re.search(r"certificate is not trusted.*--ca-file", await _connects(server.url))
        async with connect(server.url, ca_file=paths["-out"]) as named, connect(server.url, insecure=True) as any_:
            assert named.server == any_.server
    with pytest.raises(UserError, match="certificates"):
        connect("https://127.0.0.1", ca_file=str(tmp_path / "none.pem"))


@awaited
async def test_proxies_of_the_environment_are_not_used() -> None:
    """A key and prompts go where the user said, not where a variable points."""
    async with Hostile() as proxy, Honest("openai") as server:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
                patch.setenv(name, proxy.url)
            patch.delenv("NO_PROXY", raising=False)
            async with connect(server.url) as client:
                assert (await client.complete(Ask(id="a", prompt="x", max_tokens=2))).ok
        assert proxy.requests == []
        assert len(server.requests) == 1
