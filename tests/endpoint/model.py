"""A language model that is a hash: deterministic, instant, with ties and near ties like a real one.

Token ids are bytes; a completion is printable ASCII. The next token's logits follow from SHA-256 of the context, in
steps of 1/64, so that ties happen and small disturbances flip tokens now and then.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from dataclasses import dataclass

EOS = 0
_CANDIDATES = 8


@dataclass(frozen=True)
class Step:
    """One generated token: its id, its logprob and the alternatives' (float32 values), the best first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def tokenize(text: str) -> tuple[int, ...]:
    """The UTF-8 bytes of a text."""
    return tuple(text.encode("utf-8", "surrogatepass"))


def text_of(ids: list[int]) -> str:
    """The text of generated ids; the end-of-text token has none."""
    return "".join(chr(i) for i in ids if i != EOS)


def float32(value: float) -> float:
    """The nearest float32, as a Python float."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _draw(*what: object) -> float:
    """A number in [0, 1) that follows from what is given."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:6], "big") / 2**48


class Context:
    """A prefix that grows token by token.

    Args:
        ids: The prompt.
        weights: What tells one model from another.
    """

    def __init__(self, ids: tuple[int, ...], weights: str = "") -> None:
        self._hash = hashlib.sha256(weights.encode() + bytes(i % 256 for i in ids))

    def logits(self, eos: bool) -> dict[int, float]:
        """Candidate -> logit; the end of the text is among them if `eos`, and then seldom likely."""
        digest = self._hash.digest()
        logits = {32 + digest[i] % 95: digest[_CANDIDATES + i] / 64 for i in range(_CANDIDATES)}
        if eos:
            logits[EOS] = 9.0 if digest[31] < 8 else -9.0
        return logits

    def append(self, token: int) -> None:
        """Go on behind a token."""
        self._hash.update(bytes([token]))


def step(
    context: Context,
    *,
    temperature: float,
    draw: tuple[object, ...],
    eos: bool,
    alternatives: int,
    noise: float = 0.0,
    scale: float = 0.0,
    noise_of: object = None,
    flatter: bool = False,
) -> Step:
    """Generate one token and append it.

    Args:
        context: The prefix.
        temperature: 0 takes the first of the largest logits.
        draw: What the draw at temperature > 0 follows from.
        eos: Whether the text may end.
        alternatives: How many to report.
        noise: Size of a disturbance of each logit, which follows from `noise_of`, the token and the context.
        scale: Size of a disturbance of all logits by one factor, which leaves their order, ties included.
        noise_of: What the disturbance belongs to: how many requests ran, whether the cache was hit.
        flatter: Whether the logprobs reported are those of another distribution than the one sampled from.
    """
    logits = context.logits(eos)
    if scale:
        factor = 1 + scale * _draw(noise_of)
        logits = {token: value * factor for token, value in logits.items()}
    if noise:
        key = context._hash.hexdigest()
        logits = {token: value + noise * (2 * _draw(key, token, noise_of) - 1) for token, value in logits.items()}
    ranked = sorted(logits, key=lambda token: (-logits[token], token))
    if temperature > 0:
        weights = [math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in ranked]
        point = _draw(*draw) * sum(weights)
        places = itertools.accumulate(weights)
        chosen = next((token for token, end in zip(ranked, places, strict=True) if point < end), ranked[-1])
    else:
        chosen = ranked[0]
    shown = {token: value / 2 for token, value in logits.items()} if flatter else logits
    total = math.log(sum(math.exp(value) for value in shown.values()))
    logprobs = {token: float32(value - total) for token, value in shown.items()}
    context.append(chosen)
    return Step(chosen, logprobs[chosen], tuple((token, logprobs[token]) for token in ranked[:alternatives]))
