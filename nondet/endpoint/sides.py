"""What a server can be asked besides completions: its models, its counters, to forget its prefix cache.

This belongs to the server, whichever protocol its completions are asked in: a llama.cpp that chats has its slots, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .document import item, optional, parse
from .failures import AttemptError, malformed
from .metrics import read_metrics
from .transport import Transport

__all__ = ["Sides"]

_NOT_THERE = {"http-401", "http-403", "http-404", "http-405", "http-501"}


def _slots(page: Any) -> dict[str, float]:
    """How many slots of a llama.cpp work, under the name that its /metrics has for it."""
    if not isinstance(page, list):
        raise malformed("slots that are no list")
    return {"llamacpp:requests_processing": float(sum(item(slot, "is_processing", bool) for slot in page))}


@dataclass(frozen=True)
class _Server:
    """Where one kind of server has its counters and empties its cache.

    Attributes:
        flush: The path that empties the prefix cache, by POST; "" where there is none.
        state: A page that shows what runs where /metrics is off, with its reader.
    """

    flush: str = ""
    state: tuple[str, Callable[[Any], dict[str, float]]] | None = None


_SERVERS = {
    "vllm": _Server(flush="/reset_prefix_cache"),  # with VLLM_SERVER_DEV_MODE=1
    "sglang": _Server(flush="/flush_cache"),  # refused while requests run
    "llama.cpp": _Server(state=("/slots", _slots)),  # /metrics needs --metrics, erasing slots --slot-save-path
}


class Sides:
    """One server's pages, each within the limits of a page.

    Args:
        transport: Where.
        server: A name of `nondet.endpoint.detect`, "" for one that nobody knows.
    """

    def __init__(self, transport: Transport, server: str) -> None:
        self._transport = transport
        self._server = _SERVERS.get(server, _Server())
        self._missing: set[str] = set()  # pages that are not there are not asked for at every poll

    async def models(self) -> list[str]:
        """The names that the server lists; empty where it lists none."""
        try:
            listed = item(parse(await self._page("GET", "/v1/models")), "data", list)
            return [self._transport.key.reason(item(entry, "id", str)) for entry in listed]
        except AttemptError:
            return []

    async def metrics(self) -> dict[str, float]:
        """The server's own counters by name, summed over labels; empty if it has none that can be read."""
        try:
            raw = await self._page("GET", "/metrics")
            counters = read_metrics(self._transport.key.redact(raw.decode("utf-8", "replace")))
        except AttemptError:
            counters = {}
        if counters or self._server.state is None:
            return counters
        path, read = self._server.state
        try:
            return read(parse(await self._page("GET", path)))
        except AttemptError:
            return {}

    async def flush(self) -> bool:
        """Empty the prefix cache; False where the server can't be asked to, refuses, or says that it did not.

        True is the server's word only: a vLLM of 2025 says nothing about success, and other requests fill the cache
        again. `Answer.cached_tokens` and the counters of `metrics` are what proves a cold answer.
        """
        if not self._server.flush:
            return False
        try:
            raw = await self._page("POST", self._server.flush)
        except AttemptError:
            return False
        try:
            return optional(parse(raw), "success", bool) is not False
        except AttemptError:  # nothing, or text: SGLang's "Cache flushed."
            return True

    async def _page(self, method: str, path: str) -> bytes:
        """What is at a path.

        Raises:
            AttemptError: Whatever went wrong.
        """
        if path in self._missing:
            raise AttemptError("http-404", "not there, as was found before")
        limits = self._transport.limits
        try:
            async with self._transport.exchange(method, path, within_s=limits.page_s) as response:
                return await self._transport.body(response, limits.most_page_bytes)
        except AttemptError as failure:
            if failure.kind in _NOT_THERE:
                self._missing.add(path)
            raise
