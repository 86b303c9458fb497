"""Meeting a server: one that gives no completion, and one that is not the one that a run began with."""

from __future__ import annotations

from collections.abc import Sequence

from nondet.core.records import ContractAnswer, ServerSeen
from nondet.endpoint.exchange import Answer
from nondet.errors import UserError

__all__ = ["check_same", "check_seeded", "refused"]


def refused(url: str, model: str, answer: Answer, listed: Sequence[str]) -> UserError:
    """Why there is nothing to sample, in one line."""
    hints = {
        "connect": "Is it running, and is that its address?",
        "http-401": "Put its key into NONDET_API_KEY, or name its variable with --key-env.",
        "http-403": "Put its key into NONDET_API_KEY, or name its variable with --key-env.",
    }
    hint = hints.get(answer.kind, "See whether it answers a request of another client.")
    if listed and model not in listed:
        hint = f"It has: {', '.join(listed[:8])}."
    return UserError(f"{url} gave no completion: {answer.reason or answer.kind}", hint)


def check_same(first: ServerSeen, now: ServerSeen) -> None:
    """Refuse to mix two servers in one run.

    Raises:
        UserError: another model, fingerprint, protocol, or completions known by something else.
    """
    for name in ("model", "answered_as", "fingerprint", "protocol", "known_by", "logprobs"):
        was, is_ = getattr(first, name), getattr(now, name)
        if was != is_:
            raise UserError(
                f"the server is not the one that the run began with: {name.replace('_', ' ')} was {was!r}, is {is_!r}",
                "Start a new run with another --out, and compare the two with `nondet diff`.",
            )


def check_seeded(url: str, contract: Sequence[ContractAnswer]) -> None:
    """Refuse a server that draws its tokens and is not shown to keep to a seed.

    Raises:
        UserError: as said; with what the contract saw.
    """
    seen = next((a for a in contract if a.question == "seed"), None)
    if seen is None or seen.answer != "yes":
        shown = "keeps to no seed" if seen is not None and seen.answer == "no" else "is not shown to keep to a seed"
        raise UserError(
            f"{url} {shown}, so its draws say nothing of batches: {seen.evidence if seen else 'it was not asked'}",
            "Gate it at temperature 0; `nondet sample --temperature` counts what parts.",
        )
