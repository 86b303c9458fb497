"""A fake server that speaks the dialects of OpenAI, vLLM, SGLang, llama.cpp and transformers serve.

    async with Honest("vllm") as server, connect(server.url) as client: ...

Its model is a hash (tests/endpoint/model.py), so an honest one gives one answer to one request whatever runs beside
it. `Cheats` makes it dishonest, one way at a time. Tokens take `token_s` seconds each, so that requests overlap;
`running`, `most_running`, prefix cache hits and queries are counted and shown under /metrics as the dialect would.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

from tests.endpoint.dialects import DIALECTS, MODEL, Told
from tests.endpoint.model import EOS, Context, Step, step, tokenize
from tests.endpoint.wire import (
    STREAM_END,
    STREAM_HEAD,
    Request,
    Server,
    chunk,
    event,
    in_thread,
    json_response,
    response,
)

_BLOCK = 4  # tokens of a cached prefix come in blocks


@dataclasses.dataclass(kw_only=True)
class Cheats:
    """What a dishonest server does; all off is an honest one."""

    greedy_samples: bool = False  # temperature 0 draws as if it were 0.7
    other_logprobs: bool = False  # of a flatter distribution than the one sampled from
    seed_ignored: bool = False  # the same seed gives other texts at T > 0
    never_varies: bool = False  # T > 0 without a seed gives one text
    max_tokens_ignored: bool = False  # twice as many tokens as asked for
    # logits disturbed by up to this much while more than one request runs, by how many they are; 0.02 flips tokens
    batch_noise: float = 0.0
    # logits multiplied by up to one plus this while more than one request runs: tokens stay, logprobs move
    batch_scale: float = 0.0
    cache_noise: float = 0.0  # as batch_noise, where a prefix came from the cache
    restart_changes: bool = False  # `restart()` gives another model
    no_ids: bool = False  # no token ids, as an old version
    no_logprobs: bool = False  # requests for logprobs are ignored
    no_metrics: bool = False  # no /metrics, as llama.cpp's by default


class Honest(Server):
    """The server; an async context manager with `url`.

    Args:
        dialect: A key of `DIALECTS`.
        token_s: Seconds a token takes.
        key: What it wants as Authorization: Bearer; "" takes anybody.
        eos: Whether a text may end before max_tokens.
        cheats: What it does wrong, as `Cheats` names it.

    Attributes:
        requests: Bodies of all completions asked for, in order.
        most_running: Most requests at work at once so far.
    """

    def __init__(
        self, dialect: str = "openai", *, token_s: float = 0.0, key: str = "", eos: bool = False, **cheats: Any
    ) -> None:
        super().__init__(self._answer)
        self.dialect, self.cheats, self.token_s, self.key, self.eos = dialect, Cheats(**cheats), token_s, key, eos
        self.requests: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.hits = self.queries = 0
        self._weights = ""
        self._cache: set[tuple[object, tuple[int, ...]]] = set()
        self._count = itertools.count()

    def restart(self) -> None:
        """As if the server had been started anew: an empty cache, counters at zero, another model if it cheats so."""
        self.flush()
        self.hits = self.queries = 0
        if self.cheats.restart_changes:
            self._weights += "x"

    def flush(self) -> None:
        """Empty the prefix cache."""
        self._cache.clear()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            writer.write(json_response({"error": {"message": "wrong key"}}, 401))
            return True
        chat = request.path == "/v1/chat/completions"
        if request.method == "POST" and request.path in _COMPLETIONS.get(self.dialect, _OPENAI):
            await self._complete(request.json(), chat, writer)
            return True
        page = self._page(request)
        writer.write(page if page is not None else json_response({"detail": "Not Found"}, 404))
        return True

    def _page(self, request: Request) -> bytes | None:
        """What the server says of itself."""
        flush = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}.get(self.dialect)
        if request.method == "POST" and request.path == flush:
            self.flush()
            return response(200, b"")
        if request.method != "GET":
            return None
        if request.path == "/slots" and self.dialect == "llama.cpp":
            return json_response([{"id": i, "is_processing": i < self.running} for i in range(8)])
        if request.path == "/metrics" and self.dialect in _METRICS and not self.cheats.no_metrics:
            return response(200, _METRICS[self.dialect].format(self=self).encode(), "text/plain")
        if request.path == "/v1/models":
            owner = {"llama.cpp": "llamacpp", "openai": "hash"}.get(self.dialect, self.dialect)
            return json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": owner}]})
        document = _PAGES.get((self.dialect, request.path))
        return None if document is None else json_response(document)

    async def _complete(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        prompt = _prompt(body, chat)
        if self.dialect == "transformers" and set(body) - _OF_TRANSFORMERS:
            writer.write(json_response({"detail": "Unexpected fields in the request"}, 422))
            return
        if prompt is None:
            writer.write(json_response({"error": {"message": "no prompt"}}, 400))
            return
        self.requests.append(dict(body))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            cached = self._hit(body, prompt)
            stream, word = bool(body.get("stream")), DIALECTS[self.dialect]
            if stream:
                writer.write(STREAM_HEAD)
            steps: list[Step] = []
            told = Told({k: v for k, v in body.items() if not self._unknown(k)}, prompt, cached, "", self._weights)
            async for new, finish in self._steps(body, prompt, cached):
                steps.append(new)
                told = dataclasses.replace(told, finish=finish)
                if stream:
                    writer.write(event(word(steps if self.dialect == "sglang" else [new], told, True, chat)[0]))
                    await writer.drain()
        finally:
            self.running -= 1
        documents = word(steps, told, stream, chat)
        if not stream:
            writer.write(json_response(documents[0]))
            return
        for document in documents[len(steps) :]:
            writer.write(event(document))
        if self.dialect not in ("transformers", "llama.cpp"):
            writer.write(chunk(b"data: [DONE]\n\n"))
        writer.write(STREAM_END)

    def _unknown(self, field: str) -> bool:
        ids = ("return_token_ids", "return_tokens_as_token_ids")
        logprobs = ("logprobs", "n_probs", "return_logprob")
        return (self.cheats.no_ids and field in ids) or (self.cheats.no_logprobs and field in logprobs)

    def _hit(self, body: dict[str, Any], prompt: tuple[int, ...]) -> int:
        """Tokens of the prompt that the prefix cache has; the prompt is in it from now on."""
        salt = body.get("cache_salt") or body.get("extra_key")
        usable = range((len(prompt) - 1) // _BLOCK * _BLOCK, 0, -_BLOCK)
        cached = next((end for end in usable if (salt, prompt[:end]) in self._cache), 0)
        self._cache |= {(salt, prompt[:end]) for end in usable}
        if self.dialect == "llama.cpp" and body.get("cache_prompt") is False:
            cached = 0
        self.queries += len(prompt)
        self.hits += cached
        return cached

    async def _steps(
        self, body: dict[str, Any], prompt: tuple[int, ...], cached: int
    ) -> AsyncIterator[tuple[Step, str]]:
        """Each token as it is generated, with the reason to end there, or ""."""
        cheats, sampling = self.cheats, body.get("sampling_params", body)
        names = ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict")
        wanted = next((sampling[name] for name in names if name in sampling), 16)
        temperature = sampling.get("temperature", 1.0)
        seed = sampling.get("seed", sampling.get("sampling_seed"))
        if cheats.greedy_samples:
            temperature, seed = temperature or 0.7, None
        if (seed is None or cheats.seed_ignored) and not cheats.never_varies:
            seed = f"drawn {next(self._count)}"
        context = Context(prompt, self._weights)
        last = (2 * wanted if cheats.max_tokens_ignored else wanted) - 1
        for position in range(last + 1):
            await asyncio.sleep(self.token_s)
            beside = self.running if self.running > 1 else 0
            warm = cached if cheats.cache_noise else 0
            new = step(
                context,
                temperature=temperature,
                draw=(seed, position),
                eos=self.eos,
                alternatives=max(2, _alternatives(body)),
                noise=(cheats.batch_noise if beside else 0.0) + (cheats.cache_noise if warm else 0.0),
                scale=cheats.batch_scale if beside else 0.0,
                noise_of=(beside if cheats.batch_noise or cheats.batch_scale else 0, warm),
                flatter=cheats.other_logprobs,
            )
            yield new, "stop" if new.id == EOS else "length" if position == last else ""
            if new.id == EOS:
                return


def _alternatives(body: dict[str, Any]) -> int:
    for name in ("top_logprobs", "top_logprobs_num", "n_probs", "logprobs"):
        if isinstance(body.get(name), int) and not isinstance(body.get(name), bool):
            return int(body[name])
    return 0


def _prompt(body: dict[str, Any], chat: bool) -> tuple[int, ...] | None:
    if chat:
        whole = "".join(f"<{m['role']}>{m['content']}" for m in body.get("messages", ()))
        return tokenize(whole) if whole else None
    given = body.get("prompt", body.get("text"))
    return tokenize(given) if isinstance(given, str) else None


_OPENAI = ("/v1/completions", "/v1/chat/completions")
_COMPLETIONS = {"sglang": ("/generate",), "llama.cpp": ("/completion",)}
_PAGES: dict[tuple[str, str], Any] = {
    ("vllm", "/version"): {"version": "0.0.hash"},
    ("sglang", "/get_model_info"): {"model_path": MODEL, "is_generation": True},
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
    "sglang": "sglang:num_running_reqs {self.running}\nsglang:cached_tokens_total {self.hits}\n",
    "llama.cpp": "llamacpp:requests_processing {self.running}\nllamacpp:requests_deferred 0\n",
}
_OF_TRANSFORMERS = {
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "temperature",
    "seed",
    "stream",
    "stream_options",
}


def serving(dialect: str = "vllm", **options: Any) -> AbstractContextManager[Honest]:
    """The server in a thread of its own while the block runs, for commands in this process or another."""
    return in_thread(Honest(dialect, **options))
