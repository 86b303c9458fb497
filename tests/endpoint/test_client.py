"""The client against servers that keep their word."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nondet.endpoint.arms import Ask, KnownBy
from nondet.endpoint.client import HttpClient
from nondet.endpoint.http import Limits
from nondet.errors import UserError
from tests.endpoint import honest
from tests.endpoint.honest import MODEL, Handler, Honest, Request, Server, awaited, json_response
from tests.endpoint.hostile import Hostile

PROMPTS = ("Once upon a time", "The cat sat on the")


@awaited
async def test_what_a_server_sends_is_what_comes_out() -> None:
    context = honest.context_of(honest.tokenize(PROMPTS[0]))
    steps = [honest.step(context, temperature=0, draw=(), alternatives=2) for _ in range(12)]
    ids, logprobs = tuple(s.id for s in steps), np.array([s.logprob for s in steps], "<f4")
    tops = np.array([[value for _, value in s.top] for s in steps], "<f4")
    for dialect, stream in product(("openai", "vllm", "sglang", "llama.cpp"), (False, True)):
        known_by = KnownBy.BYTES if dialect == "openai" else KnownBy.IDS
        async with Honest(dialect) as server, HttpClient(server.url, stream=stream) as client:
            answer = await client.complete(Ask(id="a", prompt=PROMPTS[0], max_tokens=12))
            half = await client.complete(Ask(id="b", prompt="half \ud83d", max_tokens=8))
        assert answer.ok, answer.reason
        assert half.ok, half.reason
        assert answer.known_by is known_by
        assert answer.text == "".join(map(chr, ids))
        assert answer.token_ids == (ids if known_by is KnownBy.IDS else None)
        assert answer.logprobs == logprobs.tobytes()
        assert answer.margins == (tops[:, 0] - tops[:, 1]).tobytes()
        assert answer.chosen_is_top == 12
        assert (answer.prompt_tokens, answer.completion_tokens, answer.finish) == (16, 12, "length")
        assert answer.sent < answer.done
        assert (answer.first is not None) == stream
        assert not answer.notes


KEY = "sk-connecting-0123456789"


@awaited
async def test_a_server_is_known_by_its_pages() -> None:
    for dialect, path, protocol, name in [
        ("openai", "", "openai", ""),
        ("openai", "/v1/chat/completions", "openai-chat", ""),
        ("vllm", "/v1", "vllm", "vllm 0.0.hash"),
        ("vllm", "/v1/chat/completions", "vllm-chat", "vllm 0.0.hash"),
        ("sglang", "", "sglang", "sglang 0.0.9, attention fa3"),
        ("llama.cpp", "", "llama.cpp", "llama.cpp b0-hash"),
        ("transformers", "", "transformers", "transformers"),
        ("transformers", "/v1/chat/completions", "transformers-chat", "transformers"),
    ]:
        async with Honest(dialect) as there, HttpClient(there.url + path) as client:
            assert (client.protocol, client.server, client.model) == (protocol, name, MODEL)
            assert there.requests == []
            assert client.listed == [MODEL]
            answer = await client.complete(Ask(id="a", prompt="Once", max_tokens=4))
            assert answer.ok, answer.reason
            assert len(answer.text) == 4
    # an unknown one: OpenAI's own models chat, so does a server without /v1/completions; a user's word goes before
    for owner, path, protocol in [
        ("system", "", "openai-chat"), ("system", "/v1/completions", "openai"), ("", "", "openai-chat"),
    ]:  # fmt: skip
        async with Server(lists({"id": "m", "owned_by": owner})) as other, HttpClient(other.url + path) as client:
            assert (client.protocol, client.model) == (protocol, "m")


async def _connects(url: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        async with HttpClient(url, **options):
            pass
    return str(caught.value)


def sends(answer: bytes, path: str = "") -> Handler:
    """A server that says this to everything, or under a path alone, and nothing for a minute where it is empty."""

    async def handler(request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer if request.path.startswith(path) else honest.response(404, b""))
        await asyncio.sleep(0 if answer else 60)
        return bool(path)

    return handler


def lists(*models: dict[str, str]) -> Handler:
    return sends(json_response({"data": models}), "/v1/models")


MOVED = honest.response(301, b"", extra="Location: https://elsewhere.example/v1/models?token=hunter2\r\n")


@awaited
async def test_what_is_no_server_is_one_line() -> None:
    for handler, said in [
        (sends(b""), "not done after 1 s"),
        (sends(b"220 mail.example ESMTP\r\n\r\n"), "not HTTP"),
        (sends(MOVED), "redirects to https://elsewhere.example (not followed)"),
        (lists(), "lists no models"),
        (lists({"id": "a"}, {"id": "b"}), "lists 2 models"),
    ]:
        async with Server(handler) as server:
            line = await _connects(server.url, limits=Limits(page_s=1))
        assert said in line
        assert "\n" not in line
        assert "hunter2" not in line
    assert f"no server answers at {server.url}" in await _connects(server.url)
    async with Honest("vllm", key=KEY) as server:
        assert "refuses: HTTP 401: wrong key" in await _connects(server.url)
    for host in ["a..b", "x" * 70, "-a", "999.1.1.1", "127.0.0.1:1"]:
        assert "no connection" in await _connects(f"http://{host}")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
@awaited
async def test_a_certificate_must_be_trusted(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x -keyout {key}"
    words = ["openssl", *command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Honest("vllm")
    server._ssl = context
    async with server:
        assert re.search(r"certificate is not trusted.*--ca-file", await _connects(server.url))
        named, unchecked = HttpClient(server.url, ca_file=str(certificate)), HttpClient(server.url, insecure=True)
        async with named, unchecked:
            assert named.server == unchecked.server
    with pytest.raises(UserError, match="certificates"):
        HttpClient("https://127.0.0.1", ca_file=str(tmp_path / "none.pem"))


@awaited
async def test_proxies_of_the_environment_are_not_used() -> None:
    """A key and prompts go where the user said, not where a variable points."""
    async with Hostile() as proxy, Honest("openai", key=KEY) as server:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
                patch.setenv(name, proxy.url)
            patch.delenv("NO_PROXY", raising=False)
            patch.setenv("OPENAI_API_KEY", KEY)
            async with HttpClient(server.url) as client:
                assert KEY not in repr(client)
                assert (await client.complete(Ask(id="a", prompt="x", max_tokens=2))).ok
        assert proxy.pages == []
        assert len(server.requests) == 1


@awaited
async def test_a_cache_hit_changes_answers_if_it_cheats_so() -> None:
    for dialect in ("vllm", "sglang", "llama.cpp"):
        async with Honest(dialect, cache_noise=0.02) as server, HttpClient(server.url) as client:
            cold, warm, salted = [
                await client.complete(Ask(id="a", prompt=PROMPTS[0] * 8, max_tokens=48, cached=cached))
                for cached in (None, None, False)
            ]
            assert (cold.cached_tokens, warm.cached_tokens, salted.cached_tokens) == (0, 124, 0)
            assert salted.token_ids == cold.token_ids
            assert warm.logprobs != cold.logprobs
            flushed = await client.flush()
            assert flushed == (dialect != "llama.cpp")
            again = await client.complete(Ask(id="a", prompt=PROMPTS[0] * 8, max_tokens=4))
            assert again.cached_tokens == (0 if flushed else 124)


@awaited
async def test_counters_show_what_runs() -> None:
    for dialect, path, running, cheats in [
        ("vllm", "/v1/chat/completions", "vllm:num_requests_running", {}),
        ("sglang", "", "sglang:num_running_reqs", {}),
        ("llama.cpp", "", "llamacpp:requests_processing", {}),
        ("llama.cpp", "", "llamacpp:requests_processing", {"no_metrics": True}),
        ("openai", "", "", {}),
    ]:
        async with Honest(dialect, token_s=0.01, **cheats) as server, HttpClient(server.url + path) as client:
            asks = [Ask(id=str(i), prompt=PROMPTS[i % 2], max_tokens=4) for i in range(6)]
            work = [asyncio.create_task(client.complete(ask)) for ask in asks]
            while server.running < 6:
                await asyncio.sleep(0.001)
            during = await client.metrics()
            await asyncio.gather(*work)
            after = await client.metrics()
            assert (during.get(running), after.get(running)) == ((6, 0) if running else (None, None))
