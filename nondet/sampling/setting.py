"""What an engine session may be told beside its load: chunks, order of service, cache size, drafts, attention.

All defaults together are the engine as it is without an axis varied; see `nondet.sampling.axes`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PLAIN", "Setting"]


@dataclass(frozen=True)
class Setting:
    """The engine's own settings, each at its default.

    Attributes:
        chunk: Most prompt tokens of one request in one step; None: as many as the budget has room for.
        order: Who is admitted first, a key of `nondet.sampling.orders.ORDERS`.
        pages: Pages of the KV cache; None: enough for everybody, so that nobody is preempted.
        drafts: Where speculated tokens come from, a key of `nondet.sampling.drafters.DRAFTERS`; "" for none.
        draft_tokens: Most tokens drafted for one request in one step: k drafts make k + 1 query tokens.
        draft_model: With drafts "model": folder or hub name, or "embedded".
        earlier: The earlier text (token ids of a completion) that the editing form takes its drafts from.
        attention: The model's attention implementation; "" leaves it as it is.
    """

    chunk: int | None = None
    order: str = "fifo"
    pages: int | None = None
    drafts: str = ""
    draft_tokens: int = 4
    draft_model: str = ""
    earlier: tuple[int, ...] = ()
    attention: str = ""


PLAIN = Setting()
