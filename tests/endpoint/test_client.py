"""The client against servers that keep their word."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nondet.endpoint.arms import Answer, Ask, KnownBy
from nondet.endpoint.client import connect
from nondet.endpoint.http import Limits
from nondet.errors import UserError
from tests.endpoint.honest import (
    MODEL,
    Context,
    Honest,
    Request,
    Server,
    awaited,
    json_response,
    response,
    step,
    tokenize,
)
from tests.endpoint.hostile import Hostile


async def answers(dialect: str, *asks: Ask, **client: Any) -> list[Answer]:
    async with Honest(dialect) as server, connect(server.url, **client) as connection:
        return list(await asyncio.gather(*(connection.complete(ask) for ask in asks)))


def expected(prompt: str, tokens: int) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Ids, float32 logprobs and float32 margins that the hash model gives, without any server."""
    context = Context(tokenize(prompt))
    steps = [step(context, temperature=0, draw=(), eos=False, alternatives=2) for _ in range(tokens)]
    tops = np.array([[value for _, value in s.top] for s in steps], "<f4")
    return tuple(s.id for s in steps), np.array([s.logprob for s in steps], "<f4"), tops[:, 0] - tops[:, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dialect", "protocol", "known_by"),
    [
        ("openai", "openai", KnownBy.BYTES),
        ("vllm", "vllm", KnownBy.IDS),
        ("sglang", "sglang", KnownBy.IDS),
        ("llama.cpp", "llama.cpp", KnownBy.IDS),
    ],
)
@awaited
async def test_what_a_server_sends_is_what_comes_out(
    dialect: str, protocol: str, known_by: KnownBy, stream: bool
) -> None:
    """Ids, the bits of the logprobs and of the margins are the model's, streamed or not, in every dialect."""
    prompt = "Once upon a time"
    (answer,) = await answers(dialect, Ask(id="a", prompt=prompt, max_tokens=12), stream=stream)
    ids, logprobs, margins = expected(prompt, 12)
    assert answer.ok, answer.reason
    assert answer.known_by is known_by
    assert answer.text == "".join(map(chr, ids))
    assert answer.token_ids == (ids if known_by is KnownBy.IDS else None)
    assert answer.logprobs == logprobs.tobytes()
    assert answer.margins == margins.astype("<f4").tobytes()
    assert answer.chosen_is_top == 12
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish) == (16, 12, "length")
    assert answer.sent < answer.done
    assert (answer.first is not None) == stream
    assert not answer.notes


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama.cpp"])
@awaited
async def test_half_a_pair_in_a_prompt_is_no_error_of_ours(dialect: str) -> None:
    """Half a surrogate pair is JSON, if no UTF-8."""
    (half,) = await answers(dialect, Ask(id="a", prompt="half \ud83d", max_tokens=8))
    assert half.ok, half.reason


@awaited
async def test_a_thousand_tokens_are_read_in_good_time() -> None:
    """Long answers with many alternatives stay within their bounds, and parsing them does not hold others up."""
    large = Ask(id="a", prompt="Once upon a time", max_tokens=1000, top_logprobs=20)
    begun = time.perf_counter()
    (answer,) = await answers("vllm", large, stream=True)
    assert answer.ok, answer.reason
    assert len(answer.runner_up) == 1000
    assert time.perf_counter() - begun < 30


# Which server, which model, which key, and over what: one line and exit 2 where it is not to be.

KEY = "sk-connecting-0123456789"
QUICK = Limits(page_s=1)


@pytest.mark.parametrize(
    ("dialect", "path", "protocol", "server"),
    [
        ("openai", "", "openai", ""),
        ("openai", "/v1/chat/completions", "openai-chat", ""),
        ("vllm", "/v1", "vllm", "vllm 0.0.hash"),
        ("vllm", "/v1/chat/completions", "vllm-chat", "vllm 0.0.hash"),
        ("sglang", "", "sglang", "sglang 0.0.9, attention fa3"),
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
    assert f"no server answers at {url}" in await _connects(url)


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


# The fake server keeps its word, and breaks it in the one way it is told to: what other tests stand on.

PROMPTS = ("Once upon a time", "The cat sat on the", "In the beginning was the", "It was a dark and stormy")


def asks(**fields: Any) -> list[Ask]:
    """Each prompt five times."""
    fields = {"max_tokens": 12, **fields}
    return [Ask(id=f"{p}.{i}", prompt=prompt, **fields) for p, prompt in enumerate(PROMPTS) for i in range(5)]


async def solo_and_loaded(server: Honest, wanted: list[Ask]) -> tuple[list[Answer], list[Answer]]:
    """The same requests one after the other and all at once."""
    async with connect(server.url) as client:
        solo = [await client.complete(ask) for ask in wanted]
        loaded = list(await asyncio.gather(*(client.complete(ask) for ask in wanted)))
    assert all(answer.ok for answer in solo + loaded)
    return solo, loaded


async def ask_both(
    dialect: str = "vllm", wanted: list[Ask] | None = None, **options: Any
) -> tuple[list[Answer], list[Answer]]:
    async with Honest(dialect, **options) as server:
        return await solo_and_loaded(server, wanted or asks())


def tokens(answers: list[Answer]) -> set[Any]:
    return {(answer.ask[0], answer.token_ids) for answer in answers}


def traces(answers: list[Answer]) -> set[Any]:
    return {(answer.ask[0], answer.logprobs) for answer in answers}


@awaited
async def test_an_honest_server_gives_one_answer_under_any_load() -> None:
    """Tokens and logprobs, alone and among others, with and without a cache hit; requests did overlap."""

    async with Honest("vllm") as server:
        solo, loaded = await solo_and_loaded(server, asks())
    assert len(tokens(solo)) == len(traces(solo)) == len(PROMPTS)
    assert (tokens(solo), traces(solo)) == (tokens(loaded), traces(loaded))
    assert server.most_running > 8
    assert all(answer.chosen_is_top == 12 for answer in solo)


@pytest.mark.nightly
@awaited
async def test_batch_noise_flips_tokens_or_logprobs_alone() -> None:
    """Large noise changes completions under load, a factor their traces only; alone nothing changes."""
    truth = tokens((await ask_both())[0])
    solo, loaded = await ask_both(batch_noise=0.02)
    assert tokens(solo) == truth != tokens(loaded)
    assert len(tokens(loaded)) > len(PROMPTS)
    solo, loaded = await ask_both(batch_scale=1e-6)
    assert tokens(solo) == tokens(loaded) == truth
    assert len(traces(solo)) == len(PROMPTS) < len(traces(loaded))


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama.cpp"])
@awaited
async def test_a_cache_hit_changes_answers_if_it_cheats_so(dialect: str) -> None:
    """The first answer is cold, the second has hits; asked not to use the cache, or flushed, it is cold again."""
    async with Honest(dialect, cache_noise=0.02) as server, connect(server.url) as client:
        for prompt in PROMPTS:
            cold, warm, salted = [
                await client.complete(Ask(id="a", prompt=prompt * 8, max_tokens=48, cached=cached))
                for cached in (None, None, False)
            ]
            assert (cold.cached_tokens, salted.cached_tokens) == (0, 0)
            assert warm.cached_tokens == (len(prompt) * 8 - 1) // 4 * 4
            assert salted.token_ids == cold.token_ids
            assert warm.logprobs != cold.logprobs
        flushed = await client.flush()
        assert flushed == (dialect != "llama.cpp")
        if flushed:
            assert (await client.complete(Ask(id="a", prompt=PROMPTS[0] * 8, max_tokens=4))).cached_tokens == 0


@awaited
async def test_greedy_that_samples_is_seen() -> None:
    """At temperature 0 the chosen token is not always the top one, and texts vary."""
    solo, _ = await ask_both(greedy_samples=True)
    assert len(tokens(solo)) > len(PROMPTS)
    assert any(answer.chosen_is_top is not None and answer.chosen_is_top < 12 for answer in solo)


@pytest.mark.parametrize(
    ("dialect", "cheat", "seed", "varies"),
    [
        ("openai", {}, 7, False),
        ("llama.cpp", {}, 7, False),
        ("sglang", {}, 7, False),
        ("sglang", {}, None, True),
        ("vllm", {"seed_ignored": True}, 7, True),
        ("vllm", {"never_varies": True}, None, False),
    ],
)
@awaited
async def test_seeds_are_kept_or_not(dialect: str, cheat: dict[str, bool], seed: int | None, varies: bool) -> None:
    """At T > 0 a seed gives one text and none gives many, unless it cheats."""
    solo, loaded = await ask_both(dialect, asks(temperature=1.0, seed=seed), **cheat)
    texts = {(answer.ask[0], answer.text) for answer in solo + loaded}
    assert (len(texts) > len(PROMPTS)) == varies


@pytest.mark.nightly
@awaited
async def test_other_cheats_do_what_they_say() -> None:
    """More tokens than asked for, logprobs of another distribution, no ids, no logprobs, a change at restart."""
    honest_ones, _ = await ask_both()
    more, _ = await ask_both(max_tokens_ignored=True)
    assert {len(answer.token_ids or ()) for answer in more} == {24}
    assert more[0].notes == ("more tokens than max_tokens",)
    flat, _ = await ask_both(other_logprobs=True)
    assert tokens(flat) == tokens(honest_ones)
    assert not traces(flat) & traces(honest_ones)
    without, _ = await ask_both(no_ids=True, no_logprobs=True)
    assert (without[0].token_ids, without[0].logprobs, without[0].chosen_is_top) == (None, b"", None)
    assert without[0].text == honest_ones[0].text

    async with Honest("vllm", restart_changes=True) as server, connect(server.url) as client:
        before = await client.complete(asks()[0])
        server.restart()
        after = await client.complete(asks()[0])
    assert before.text != after.text
    assert before.fingerprint != after.fingerprint


@awaited
async def test_texts_may_end() -> None:
    """With `eos` some texts end early and say so."""
    ended, _ = await ask_both("vllm", asks(max_tokens=200)[::5], eos=True)
    assert {answer.finish for answer in ended} >= {"eos"}
    assert all(len(answer.token_ids or ()) < 200 for answer in ended if answer.finish == "eos")


@pytest.mark.parametrize(
    ("dialect", "path", "running", "cheats"),
    [
        ("vllm", "", "vllm:num_requests_running", {}),
        ("vllm", "/v1/chat/completions", "vllm:num_requests_running", {}),
        ("sglang", "", "sglang:num_running_reqs", {}),
        ("llama.cpp", "", "llamacpp:requests_processing", {}),
        ("llama.cpp", "", "llamacpp:requests_processing", {"no_metrics": True}),
        ("openai", "", None, {}),
    ],
)
@awaited
async def test_counters_show_what_runs(dialect: str, path: str, running: str | None, cheats: Any) -> None:
    """The server's own count of running requests rises and falls with the load, whatever page it is on."""
    async with Honest(dialect, token_s=0.01, **cheats) as server, connect(server.url + path) as client:
        work = [asyncio.create_task(client.complete(ask)) for ask in asks()[:6]]
        while server.running < 6:
            await asyncio.sleep(0.001)
        during = await client.metrics()
        await asyncio.gather(*work)
        after = await client.metrics()
        assert (during.get(running or ""), after.get(running or "")) == ((6, 0) if running else (None, None))
