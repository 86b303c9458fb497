"""A fake server that speaks the dialects of OpenAI, vLLM, SGLang, llama.cpp and transformers serve.

Its model is a hash, so an honest one gives one answer to one request whatever runs beside it. `Cheats` makes it
dishonest, one way at a time. What runs, and what was cached, is under /metrics as the dialect has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

# HTTP/1.1 by hand on asyncio streams, so that it can also be done wrongly.


class Request(NamedTuple):
    """What a client sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body) if self.body else {}


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request of a connection; None where it ended."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Request(method, path, headers, body)
    return None


def response(status: int, body: bytes, content_type: str = "application/json", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{extra}\r\n".encode() + body


def json_response(document: Any, status: int = 200, extra: str = "") -> bytes:
    return response(status, json.dumps(document).encode(), extra=extra)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document: Any) -> bytes:
    return chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


def awaited(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, in an event loop of its own, for a minute at most."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), 60))

    return run


Handler = Callable[[Request, asyncio.StreamWriter], Awaitable[bool]]
AnyServer = TypeVar("AnyServer", bound="Server")


@contextlib.contextmanager
def in_thread(server: AnyServer) -> Iterator[AnyServer]:
    """A server beside code that has an event loop of its own, or none."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
        yield server
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


class Server:
    """A server on a free port of 127.0.0.1, an async context manager; a handler that gives False closes."""

    def __init__(self, handler: Handler, ssl: Any = None) -> None:
        self._handler, self._port, self._ssl = handler, 0, ssl
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"{'https' if self._ssl else 'http'}://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self._port, ssl=self._ssl)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError, TimeoutError):
            while (request := await read_request(reader)) is not None:
                if not await self._handler(request, writer):
                    break
                await writer.drain()
        self._tasks.discard(task)
        with contextlib.suppress(ConnectionError, RuntimeError):
            writer.close()


# A language model that is a hash: deterministic, instant, with ties and near ties like a real one.
# Token ids are bytes; a completion is printable ASCII. The next token's logits follow from SHA-256 of the context, in
# steps of 1/64, so that ties happen and small disturbances flip tokens now and then.

_CANDIDATES = 8


@dataclass(frozen=True)
class Step:
    """One generated token: its id, its logprob and the alternatives' (float32 values), the best first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def tokenize(text: str) -> tuple[int, ...]:
    return tuple(text.encode("utf-8", "surrogatepass"))


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _draw(*what: object) -> float:
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:6], "big") / 2**48


def context_of(ids: tuple[int, ...]) -> Any:
    return hashlib.sha256(bytes(i % 256 for i in ids))


def step(
    context: Any, *, temperature: float, draw: tuple[object, ...], alternatives: int, noise: float = 0.0,
    scale: float = 0.0, noise_of: object = None,
) -> Step:  # fmt: skip
    """Generate one token and append it. `noise_of` is what noise follows from: how many requests ran, what was cached;
    `scale` disturbs all logits by one factor, which leaves their order, ties included."""
    digest, key, factor = context.digest(), context.hexdigest(), 1 + scale * _draw(noise_of)
    logits = {32 + digest[i] % 95: digest[_CANDIDATES + i] / 64 * factor for i in range(_CANDIDATES)}
    if noise:
        logits = {token: value + noise * (2 * _draw(key, token, noise_of) - 1) for token, value in logits.items()}
    ranked = sorted(logits, key=lambda token: (-logits[token], token))
    if temperature > 0:
        weights = [math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in ranked]
        point = _draw(*draw) * sum(weights)
        places = itertools.accumulate(weights)
        chosen = next((token for token, end in zip(ranked, places, strict=True) if point < end), ranked[-1])
    else:
        chosen = ranked[0]
    total = math.log(sum(math.exp(value) for value in logits.values()))
    logprobs = {token: float32(value - total) for token, value in logits.items()}
    context.update(bytes([chosen]))
    return Step(chosen, logprobs[chosen], tuple((token, logprobs[token]) for token in ranked[:alternatives]))


# How each kind of server words its answers: written from their sources, apart from the client's parsers.
# A dialect is a function: steps and what else the answer tells -> documents. Without `stream` there is one; with it
# there is one for each step (SGLang: one for all of them) and what follows the last.

MODEL = "hash-1"


@dataclass(frozen=True)
class Told:
    """What an answer tells besides its tokens."""

    body: dict[str, Any]
    prompt: tuple[int, ...]
    cached: int
    finish: str


def _choice(steps: list[Step], told: Told, own: bool, key: str) -> dict[str, Any]:
    """Of /v1/completions with `key` "text"; of /v1/chat/completions with "message" or "delta"."""
    as_id = own and bool(told.body.get("return_tokens_as_token_ids"))
    text, chat = text_of([s.id for s in steps]), key != "text"

    def named(token: int) -> str:
        return f"token_id:{token}" if as_id else text_of([token])

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": named(token), "logprob": value, "bytes": list(named(token).encode())}

    choice: dict[str, Any] = {"index": 0, key: {"role": "assistant", "content": text} if chat else text}
    choice["logprobs"] = None
    if told.body.get("logprobs") and chat:
        content = [{**entry(s.id, s.logprob), "top_logprobs": [entry(*pair) for pair in s.top]} for s in steps]
        choice["logprobs"] = {"content": content}
    elif told.body.get("logprobs"):
        choice["logprobs"] = {
            "tokens": [named(s.id) for s in steps],
            "token_logprobs": [s.logprob for s in steps],
            "top_logprobs": [{named(token): value for token, value in s.top} for s in steps],
        }
    if own and told.body.get("return_token_ids"):
        choice["token_ids"] = [s.id for s in steps]
    return choice


def _openai(steps: list[Step], told: Told, stream: bool, chat: bool, own: bool) -> list[dict[str, Any]]:
    def word(some: list[Step], finish: str | None) -> dict[str, Any]:
        key = "text" if not chat else "delta" if stream else "message"
        return {"model": MODEL, "choices": [{**_choice(some, told, own, key), "finish_reason": finish}]}

    usage = {"prompt_tokens": len(told.prompt), "completion_tokens": len(steps)}
    end = {"usage": {**usage, "prompt_tokens_details": {"cached_tokens": told.cached}}, "system_fingerprint": "hash-"}
    if not stream:
        return [{**word(steps, told.finish), **end}]
    documents = [word([step], None) for step in steps[:-1]] + [word(steps[-1:], told.finish or None)]
    return [*documents, {"model": MODEL, "choices": [], **end}]


def transformers(steps: list[Step], told: Told, stream: bool, chat: bool) -> list[dict[str, Any]]:
    """Transformers serve: text, usage in the last event, an empty fingerprint."""
    told.body.pop("logprobs", None)
    documents = _openai(steps, told, stream, chat, own=False)
    if stream:
        documents[-1]["usage"] = documents.pop()["usage"]
    for document in documents:
        document["system_fingerprint"] = ""
    return documents


def sglang(steps: list[Step], told: Told, stream: bool, chat: bool) -> list[dict[str, Any]]:
    """SGLang's /generate: every event holds the whole answer so far; asked event by event here."""
    ids, finish = [s.id for s in steps], {"type": "length", "length": len(steps)}
    meta: dict[str, Any] = {"prompt_tokens": len(told.prompt), "completion_tokens": len(ids)}
    meta |= {"finish_reason": finish if told.finish else None, "cached_tokens": told.cached}
    if told.body.get("return_logprob"):
        meta["output_token_logprobs"] = [[s.logprob, s.id, None] for s in steps]
        meta["output_top_logprobs"] = [[[value, token, None] for token, value in s.top] for s in steps]
    return [{"text": text_of(ids), "output_ids": ids, "meta_info": meta}]


def llama_cpp(steps: list[Step], told: Told, stream: bool, chat: bool) -> list[dict[str, Any]]:
    """llama.cpp's /completion: an event for each token, and a last one without any."""

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"id": token, "token": text_of([token]), "bytes": list(text_of([token]).encode()), "logprob": value}

    def document(some: list[Step]) -> dict[str, Any]:
        ids = [s.id for s in some]
        scored = [{**entry(s.id, s.logprob), "top_logprobs": [entry(*pair) for pair in s.top]} for s in some]
        said: dict[str, Any] = {"index": 0, "content": text_of(ids), "tokens": ids, "stop": False, "id_slot": 0}
        return said | ({"completion_probabilities": scored} if told.body.get("n_probs") else {})

    end: dict[str, Any] = {"stop": True, "stop_type": "limit", "model": MODEL, "timings": {"cache_n": told.cached}}
    end |= {"tokens_predicted": len(steps), "tokens_evaluated": len(told.prompt)}
    if not stream:
        return [{**document(steps), **end}]
    return [*(document([s]) for s in steps), {**document([]), **end}]


Dialect = Callable[[list[Step], Told, bool, bool], list[dict[str, Any]]]
DIALECTS: dict[str, Dialect] = {
    "openai": functools.partial(_openai, own=False),
    "vllm": functools.partial(_openai, own=True),  # token ids; cached tokens as with --enable-prompt-tokens-details
    "sglang": sglang,
    "llama.cpp": llama_cpp,
    "transformers": transformers,
}


_BLOCK = 4  # tokens of a cached prefix come in blocks


@dataclasses.dataclass(kw_only=True)
class Cheats:
    """What a dishonest server does; all off is an honest one."""

    seed_ignored: bool = False  # the same seed gives other texts at T > 0
    batch_noise: float = 0.0  # disturbs logits by up to this while more requests run, by how many: 0.02 flips tokens
    batch_scale: float = 0.0  # as well, by a factor of up to one plus this: tokens stay, logprobs change
    cache_noise: float = 0.0  # as batch_noise, where a prefix came from the cache
    beyond: int = 0  # batch_noise and batch_scale with more keys than this alone; a key is four characters of a prompt
    first_differs: bool = False  # the first answer after a start goes another way from its fifth token on
    confuses: int = 0  # each so many-th request beside one of another length goes on in the other's text
    temperature_ignored: bool = False  # greedy at any temperature
    one_draw: bool = False  # without a seed, requests that run at the same time share their draws
    context: int = 0  # what /v1/models says of it; 0 says nothing
    split_names: bool = False  # a token in three has no text, as half a character, and the answer's text is another
    deterministic: bool = False  # what /server_info says of its mode, and at a temperature a seed of its own
    no_metrics: bool = False  # no /metrics, as llama.cpp's by default


class Honest(Server):
    """The server of a dialect, which takes `token_s` seconds a token, wants a key, and cheats as `Cheats` names it.
    `requests` are the bodies of all completions, `pages` the paths of everything that was requested, in order."""

    def __init__(self, dialect: str = "openai", *, token_s: float = 0.0, key: str = "", **cheats: Any) -> None:
        super().__init__(self._answer)
        self.dialect, self.cheats, self.token_s, self.key = dialect, Cheats(**cheats), token_s, key
        self.requests: list[dict[str, Any]] = []
        self.pages: list[str] = []
        self.running = self.hits = self.queries = self._answered = self._batches = self._beside = 0
        self._cache: set[bytes] = set()
        self._count = itertools.count()
        self._prompts: dict[int, tuple[int, ...]] = {}

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        self.pages.append(request.path)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            writer.write(json_response({"error": {"message": "wrong key"}}, 401))
            return True
        chat = request.path == "/v1/chat/completions"
        if request.method == "POST" and request.path in _COMPLETIONS.get(self.dialect, _OPENAI):
            await self._complete(request.json(), chat, writer)
            return True
        writer.write(self._page(request) or json_response({"detail": "Not Found"}, 404))
        return True

    def _page(self, request: Request) -> bytes | None:
        flush = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}.get(self.dialect)
        if request.method == "POST" and request.path == flush:
            self._cache.clear()
            return response(200, b"")
        if request.method != "GET":
            return None
        if request.path == "/metrics" and self.dialect in _METRICS and not self.cheats.no_metrics:
            return response(200, _METRICS[self.dialect].format(self=self).encode(), "text/plain")
        owner = {"llama.cpp": "llamacpp", "openai": "hash"}.get(self.dialect, self.dialect)
        model = {"id": MODEL, "object": "model", "owned_by": owner}
        model |= {"max_model_len": self.cheats.context} if self.cheats.context else {}
        sglang = {"version": "0.0.9", "enable_deterministic_inference": self.cheats.deterministic}
        pages: dict[tuple[str, str], Any] = {
            (self.dialect, "/v1/models"): {"object": "list", "data": [model]},
            ("llama.cpp", "/slots"): [{"id": i, "is_processing": i < self.running} for i in range(8)],
            ("sglang", "/server_info"): {**sglang, "attention_backend": "fa3", "tp_size": 1},
            **_PAGES,
        }
        document = pages.get((self.dialect, request.path))
        return document and json_response(document)

    async def _complete(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        whole = "".join(f"<{m['role']}>{m['content']}" for m in body.get("messages", ()))
        prompt = tokenize(whole if chat else body.get("prompt", body.get("text", "")))
        unexpected = set(body) - _OF_TRANSFORMERS if self.dialect == "transformers" else ()
        if unexpected or not prompt:
            writer.write(json_response({"error": {"message": f"no prompt, or unexpected {unexpected}"}}, 400))
            return
        self.requests.append(dict(body))
        number = len(self.requests)
        self._batches += not self.running
        self.running += 1
        self._prompts[number] = prompt
        try:
            cached = self._hit(body, prompt)
            stream, word = bool(body.get("stream")), DIALECTS[self.dialect]
            if stream:
                writer.write(STREAM_HEAD)
            steps: list[Step] = []
            told = Told(dict(body), prompt, cached, "")
            async for new, finish in self._steps(body, prompt, cached, number):
                steps.append(new)
                told = dataclasses.replace(told, finish=finish)
                if stream:
                    said = word(steps if self.dialect == "sglang" else [new], told, True, chat)[0]
                    if self.cheats.split_names and new.id % 3 == 0:
                        said["choices"][0]["logprobs"]["tokens"] = ["bytes:\\xe2"]
                    writer.write(event(said))
                    await writer.drain()
        finally:
            self.running -= 1
            del self._prompts[number]
        documents = word(steps, told, stream, chat)
        if not stream:
            writer.write(json_response(documents[0]))
            return
        for document in documents[len(steps) :]:
            writer.write(event(document))
        if self.dialect not in ("transformers", "llama.cpp"):
            writer.write(chunk(b"data: [DONE]\n\n"))
        writer.write(STREAM_END)

    def _hit(self, body: dict[str, Any], prompt: tuple[int, ...]) -> int:
        salt = body.get("cache_salt") or body.get("extra_key")
        chain, prefixes = hashlib.sha256(repr(salt).encode()), list[bytes]()
        for first in range(0, (len(prompt) - 1) // _BLOCK * _BLOCK, _BLOCK):
            chain.update(bytes(prompt[first : first + _BLOCK]))
            prefixes.append(chain.digest())
        cached = _BLOCK * sum(1 for _ in itertools.takewhile(self._cache.__contains__, prefixes))
        self._cache.update(prefixes)
        if self.dialect == "llama.cpp" and body.get("cache_prompt") is False:
            cached = 0
        self.queries += len(prompt)
        self.hits += cached
        return cached

    async def _steps(
        self, body: dict[str, Any], prompt: tuple[int, ...], cached: int, number: int
    ) -> AsyncIterator[tuple[Step, str]]:
        cheats, sampling = self.cheats, body.get("sampling_params", body)
        names = ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict")
        wanted = next((sampling[name] for name in names if name in sampling), 16)
        temperature = sampling.get("temperature", 1.0)
        seed = sampling.get("seed", sampling.get("sampling_seed"))
        if cheats.temperature_ignored:
            temperature = 0.0
        if seed is None and cheats.one_draw:
            seed = f"batch {self._batches}"
        elif (seed is None or cheats.seed_ignored) and not cheats.deterministic:
            seed = f"drawn {next(self._count)}"
        given = (body.get(name) for name in ("top_logprobs", "top_logprobs_num", "n_probs", "logprobs"))
        alternatives = max(2, next((number for number in given if type(number) is int), 0))
        first, self._answered = not self._answered, self._answered + 1
        context = context_of(prompt)
        for position in range(wanted):
            await asyncio.sleep(self.token_s)
            if position == 4 and first and cheats.first_differs:
                context.update(b"\1")
            others = [p for n, p in self._prompts.items() if n != number and len(p) != len(prompt)]
            self._beside += position == 3 and bool(others)
            if cheats.confuses and position == 3 and others and self._beside % cheats.confuses == 0:
                context = context_of(others[0])
            beside = self.running if self.running > 1 and len(prompt) // 4 + position > cheats.beyond else 0
            noise = (cheats.batch_noise if beside else 0.0) + (cheats.cache_noise if cached else 0.0)
            of = (beside if cheats.batch_noise or cheats.batch_scale else 0, cached if cheats.cache_noise else 0)
            how = {"temperature": temperature, "draw": (seed, position), "alternatives": alternatives, "noise_of": of}
            new = step(context, noise=noise, scale=cheats.batch_scale if beside else 0.0, **how)
            yield new, "length" * (position == wanted - 1)


_OPENAI = ("/v1/completions", "/v1/chat/completions")
_COMPLETIONS = {"sglang": ("/generate",), "llama.cpp": ("/completion",)}
_PAGES: dict[tuple[str, str], Any] = {
    ("vllm", "/version"): {"version": "0.0.hash"},
    ("sglang", "/model_info"): {"model_path": MODEL, "is_generation": True, "weight_version": "default"},
    ("llama.cpp", "/props"): {"default_generation_settings": {}, "total_slots": 4, "build_info": "b0-hash"},
    ("transformers", "/openapi.json"): {"paths": {"/load_model": {}, "/v1/completions": {}}},
}
_METRICS = {
    "vllm": (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{{model_name="hash-1"}} {self.running}.0\n'
        'vllm:prefix_cache_queries_total{{model_name="hash-1"}} {self.queries}.0\n'
        'vllm:prefix_cache_hits_total{{model_name="hash-1"}} {self.hits}.0\n'
    ),
    "sglang": (
        "sglang:num_running_reqs {self.running}\nsglang:cached_tokens_total {self.hits}\n"
        "sglang:num_retracted_reqs 0\nsglang:cache_hit_rate 0.{self.running}\n"
    ),
    "llama.cpp": "llamacpp:requests_processing {self.running}\nllamacpp:requests_deferred 0\n",
}
_OF_TRANSFORMERS = {"model", "prompt", "messages", "max_tokens", "temperature", "seed", "stream", "stream_options"}


def serving(dialect: str = "vllm", **options: Any) -> AbstractContextManager[Honest]:
    return in_thread(Honest(dialect, **options))
