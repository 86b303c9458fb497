"""Records of `nondet embed`: what an encoder computed, and what other batches did to vectors. Plain data, no torch."""

from __future__ import annotations

import msgspec

from nondet.records import Record

__all__ = ["EmbedPass", "Neighbours"]


class EmbedPass(Record, frozen=True, tag="embed_pass", kw_only=True):
    """All texts through the encoder once, in one arm.

    Attributes:
        arm: How they were put together: "alone", "sorted by 32", ...
        batches: Forward passes.
        tokens: Tokens of the texts; computed: the same with padding.
        seconds: Wall time of the passes.
        ran: What the dispatcher says ran: "replaced: linear" -> calls.
        reason: Why the arm could not be had; empty where it was.
    """

    impl: str
    arm: str
    texts: int
    batches: int
    tokens: int
    computed: int
    seconds: float
    ran: dict[str, int] = msgspec.field(default_factory=dict)
    reason: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """As `Record.key`."""
        return ("embed_pass", self.impl, self.arm)


class Neighbours(Record, frozen=True, tag="neighbours", kw_only=True):
    """One arm's vectors against those of the texts alone, under the same implementation.

    Attributes:
        pooling: "mean" or "cls".
        parted: Texts whose vector has other bits.
        max_ulp: The largest distance of an element.
        cosine_distance: The largest 1 - cosine of a text's two vectors, in float64.
        top1_changed: Texts whose nearest neighbour is another text.
        topk_changed: Texts whose k nearest neighbours are another set; topk_reordered: the same set in another order.
        first: Index of the first text whose vector parted; None where none did.
    """

    impl: str
    arm: str
    pooling: str
    texts: int
    parted: int
    max_ulp: int
    cosine_distance: float
    k: int
    top1_changed: int
    topk_changed: int
    topk_reordered: int
    first: int | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """As `Record.key`."""
        return ("neighbours", self.impl, self.pooling, self.arm)
