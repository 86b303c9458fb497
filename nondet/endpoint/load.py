"""What a server is put under: how many requests ride along, how long they are, how they arrive. Pure data.

Lengths of prompts are in tokens, and are cut from text by four characters a token, since a server's tokenizer is its
own; what a prompt really came to is what the server counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nondet.errors import UserError, suggestion

__all__ = ["ENDPOINT_PRESETS", "EndpointLoad", "parse_endpoint_load"]


@dataclass(frozen=True)
class EndpointLoad:
    """The load of a server's arm "loaded", a round of which is one burst from an idle client to an idle client.

    Attributes:
        concurrency: Requests under way at once, at most.
        targets: Requests under study in each round; they are load to one another too.
        others: Background requests in each round.
        prompt: Shortest and longest background prompt, in tokens.
        tokens: Shortest and longest background completion, in tokens.
        rate: Requests let go a second, at seeded Poisson times; 0: as fast as `concurrency` lets them.
    """

    concurrency: int
    targets: int
    others: int
    prompt: tuple[int, int]
    tokens: tuple[int, int]
    rate: float = 0.0


ENDPOINT_PRESETS: dict[str, EndpointLoad] = {
    "light": EndpointLoad(concurrency=8, targets=8, others=8, prompt=(4, 64), tokens=(8, 64)),
    "default": EndpointLoad(concurrency=32, targets=16, others=32, prompt=(4, 128), tokens=(8, 96)),
    "heavy": EndpointLoad(concurrency=128, targets=32, others=128, prompt=(4, 512), tokens=(8, 192)),
}
_LEAST = {"others": 0}
_MOST = {"concurrency": 4096, "targets": 10_000, "others": 10_000}
_LENGTH_MOST = 1_000_000
_HINT = "Write light, default or heavy, or keys such as others=60,targets=16,prompt=8-96,tokens=8-64."
_ENGINE_KEYS = {"spread", "budget", "requests", "page", "sharing", "graphs"}


def parse_endpoint_load(spec: str, *, concurrency: int | None = None, rate: float | None = None) -> EndpointLoad:
    """Read `--load` for an endpoint: a preset, or changes to one; then what --concurrency and --rate say.

    Raises:
        UserError: an unknown preset or key, a key that only nondet's own engine has, or a value that makes no sense.
    """
    load = ENDPOINT_PRESETS["default"]
    parts = [part.strip() for part in spec.split(",")]
    if not any(parts):
        raise UserError(f"--load {spec!r} is empty", _HINT)
    for place, part in enumerate(parts):
        key, equals, value = (s.strip() for s in part.partition("="))
        if not equals and key == "none":
            raise UserError("--load none is no load", "Leave the arm out: --arms solo.")
        if not equals and key in ENDPOINT_PRESETS and place == 0:
            load = ENDPOINT_PRESETS[key]
        elif not equals:
            raise UserError(f"--load: unknown load {part!r}", suggestion(key, ENDPOINT_PRESETS))
        elif key in _ENGINE_KEYS:
            raise UserError(f"--load: {key} is a limit of nondet's own engine, and an endpoint has its own", _HINT)
        else:
            change: dict[str, Any] = {key: _value(key, value)}
            load = replace(load, **change)
    if concurrency is not None:
        load = replace(load, concurrency=_whole("--concurrency", str(concurrency), 1, _MOST["concurrency"]))
    if rate is not None:
        if not 0.001 <= rate <= 100_000:
            raise UserError(f"--rate {rate} makes no sense", "Give requests a second, from 0.001 to 100000.")
        load = replace(load, rate=rate)
    return load


def _value(key: str, text: str) -> int | tuple[int, int]:
    if key in ("prompt", "tokens"):
        low, dash, high = text.partition("-")
        first = _whole(f"--load: {key}", low, 1, _LENGTH_MOST)
        last = _whole(f"--load: {key}", high if dash else low, 1, _LENGTH_MOST)
        if first > last:
            raise UserError(f"--load: {key}={text} runs backwards", f"Write {key}={last}-{first}.")
        return first, last
    if key not in _MOST:
        raise UserError(f"--load: unknown key {key!r}", suggestion(key, [*_MOST, "prompt", "tokens"]))
    return _whole(f"--load: {key}", text, _LEAST.get(key, 1), _MOST[key])


def _whole(name: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise UserError(f"{name} {text!r} makes no sense", f"Give a whole number from {least} to {most:,}.")
    return int(text)
