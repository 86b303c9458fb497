"""What the header of an endpoint run says: everything that decides which requests go out, and nothing secret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nondet.endpoint.load import EndpointLoad
from nondet.endpoint.plan import ArmPlan
from nondet.endpoint.settings import Server, Settings

__all__ = ["describe"]


def describe(
    servers: Sequence[Server], plan: ArmPlan, settings: Settings, load: EndpointLoad, *, seed: int, **asked: Any
) -> dict[str, Any]:
    """The plan of an endpoint run, for its header. A run is resumed only under an equal one.

    Args:
        asked: Further options that decide what is sent: the protocol, whether answers stream.
    """
    return {
        "prompts": [
            {"text": str(text), "tokens": 0, **({"seed": settings.seeds[i]} if settings.seeds else {})}
            for i, text in enumerate(settings.prompts)
        ],
        "endpoint": {"servers": [{"impl": s.impl, "url": s.url, "model": s.model} for s in servers], **asked},
        "model": {"name": servers[0].model},
        "arms": dict(plan.arms),
        "load": asdict(load),
        "load_digest": plan.digest,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "request_seed": None,
        **({"sampling": _sampling(settings)} if settings.seeds else {}),
        "top_logprobs": settings.top_logprobs,
        "ignore_eos": settings.ignore_eos,
        "extra": dict(settings.extra),
        "impls": [s.impl for s in servers],
        "seed": seed,
    }


def _sampling(settings: Settings) -> dict[str, Any]:
    """As the header of a run in process says it."""
    return {
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "seeds": len(set(settings.seeds)),
    }
