"""Which server, which model, which key, and over what: one line and exit 2 where it is not to be."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from nondet.endpoint.arms import Answer, Ask
from nondet.endpoint.client import connect
from nondet.endpoint.http import Limits
from nondet.errors import UserError
from tests.endpoint.dialects import MODEL
from tests.endpoint.honest import Honest, honest
from tests.endpoint.hostile import Hostile
from tests.endpoint.wire import Request, Server, json_response, response

KEY = "sk-connecting-0123456789"
QUICK = Limits(page_s=1)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


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
def test_a_server_is_known_by_its_pages(dialect: str, path: str, protocol: str, server: str) -> None:
    """Each dialect is told from the others, chat from completions, by pages that compute nothing."""

    async def work() -> None:
        async with honest(dialect) as there, connect(there.url + path) as client:
            assert (client.protocol, client.server, client.model) == (protocol, server, MODEL)
            assert client.evidence
            assert there.requests == []
            assert await client.models() == [MODEL]
            answer = await client.complete(Ask(id="a", prompt="Once", max_tokens=4))
            assert answer.ok, answer.reason
            assert len(answer.text) == 4

    run(work())


def test_a_server_of_openai_chats() -> None:
    """Whose models are OpenAI's is asked in the form that its models have; a user's word goes before."""

    async def handler(request: Request, writer: asyncio.StreamWriter) -> bool:
        models = {"data": [{"id": "m", "owned_by": "system"}]}
        writer.write(json_response(models) if request.path == "/v1/models" else response(404, b""))
        return True

    async def work() -> None:
        async with Server(handler) as server:
            async with connect(server.url) as client:
                assert client.protocol == "openai-chat"
            async with connect(server.url + "/v1/completions") as client:
                assert client.protocol == "openai"

    run(work())


def test_a_server_without_completions_is_asked_to_chat() -> None:
    """Where /v1/completions is not there, an unknown server gets the other form."""

    async def handler(request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/v1/models":
            writer.write(json_response({"data": [{"id": "m"}]}))
        else:
            writer.write(response(404, b""))
        return True

    async def work() -> None:
        async with Server(handler) as server, connect(server.url) as client:
            assert (client.protocol, client.model) == ("openai-chat", "m")

    run(work())


async def _connects(url: str, **options: Any) -> None:
    async with connect(url, **options):
        pass


def _free_port() -> str:
    async def closed() -> str:
        async with Server(_never) as server:
            return server.url

    return str(asyncio.run(closed()))


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
def test_what_is_no_server_is_one_line(handler: Any, said: str) -> None:
    """Silence, another protocol, somewhere else: said within seconds."""

    async def work() -> str:
        async with Server(handler) as server:
            with pytest.raises(UserError) as caught:
                await _connects(server.url, limits=QUICK if handler is _never else None)
            return str(caught.value)

    line = run(work())
    assert said in line
    assert "\n" not in line
    assert "hunter2" not in line


def test_nothing_listens() -> None:
    """A port where nobody is."""
    with pytest.raises(UserError, match=r"no server that can be asked at http://127\.0\.0\.1"):
        run(_connects(_free_port()))


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "-a", "999.1.1.1", "127.0.0.1:1"])
def test_hosts_that_there_are_not(host: str) -> None:
    """Whatever the resolver, IDNA or the socket make of it."""
    with pytest.raises(UserError, match="no connection"):
        run(_connects(f"http://{host}"))


def test_names_are_checked() -> None:
    """A protocol or a model that there is not, with what there is; none named where there are several or none."""

    async def work() -> list[str]:
        lines = []
        async with Honest("vllm") as server:
            for options in ({"model": "hash-2"}, {"protocol": "vlm"}):
                with pytest.raises(UserError) as caught:
                    await _connects(server.url, **options)
                lines.append(str(caught.value))
        return lines

    model, protocol = run(work())
    assert "has no model 'hash-2'. Did you mean hash-1?" in model
    assert "unknown protocol 'vlm'. Did you mean vllm" in protocol


@pytest.mark.parametrize("listed", [[], ["a", "b"]])
def test_a_model_must_be_named_where_it_is_not_clear(listed: list[str]) -> None:
    """No guess among several."""

    async def handler(request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(json_response({"data": [{"id": name} for name in listed]}))
        return True

    async def work() -> None:
        async with Server(handler) as server:
            await _connects(server.url)

    with pytest.raises(UserError, match=f"lists {len(listed) or 'no'} models"):
        run(work())


def test_a_server_that_wants_a_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it one line; with it an answer."""

    async def work() -> Answer:
        async with Honest("vllm", key=KEY) as server:
            with pytest.raises(UserError, match="refuses: HTTP 401: wrong key"):
                await _connects(server.url)
            monkeypatch.setenv("OPENAI_API_KEY", KEY)
            async with connect(server.url) as client:
                assert KEY not in repr(client)
                return await client.complete(Ask(id="a", prompt="x", max_tokens=2))

    assert run(work()).ok


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_certificate_must_be_trusted(tmp_path: Path) -> None:
    """One that nobody signed is refused and said, taken where it is named, taken where any is."""
    paths = {"-keyout": str(tmp_path / "key.pem"), "-out": str(tmp_path / "certificate.pem")}
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    where = [word for pair in paths.items() for word in pair]
    subprocess.run(
        ["openssl", *command.split(), "-addext", "subjectAltName=IP:127.0.0.1", *where], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(paths["-out"], paths["-keyout"])

    async def work() -> None:
        server = Honest("vllm")
        server._ssl = context
        async with server:
            with pytest.raises(UserError, match=r"certificate is not trusted.*--ca-file"):
                await _connects(server.url)
            await _connects(server.url, ca_file=paths["-out"])
            await _connects(server.url, insecure=True)

    run(work())
    with pytest.raises(UserError, match="certificates"):
        connect("https://127.0.0.1", ca_file=str(tmp_path / "none.pem"))


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key and prompts go where the user said, not where a variable points."""

    async def work() -> Answer:
        async with Hostile() as proxy, honest("openai") as server:
            for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
                monkeypatch.setenv(name, proxy.url)
            monkeypatch.delenv("NO_PROXY", raising=False)
            async with connect(server.url) as client:
                answer = await client.complete(Ask(id="a", prompt="x", max_tokens=2))
            assert proxy.requests == []
            assert len(server.requests) == 1
            return answer

    assert run(work()).ok
