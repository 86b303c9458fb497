"""What an engine session did, counted from its steps: the proofs that a setting took effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nondet.sampling.plan import Load
from nondet.sampling.protocol import Outcome

if TYPE_CHECKING:
    from nondet.sampling.schedule import SessionLog
    from nondet.sampling.speculation import Speculation

__all__ = ["session_figures"]


def session_figures(
    outcomes: Sequence[Outcome], log: SessionLog, load: Load, speculation: Speculation | None
) -> dict[str, int]:
    """Counts of one session; requests that failed or were cut are left out of the counts of tokens.

    Returns:
        "page": tokens in a page, as the engine's cache has it. "step_most": most query tokens of a step. "cached":
        positions that nobody computed for the request, since a page of another one had them. "hits": requests under
        study with such positions. "piece_most": most prompt tokens of one request in one step. "in_pieces": requests
        under study whose prompt took several steps. "preempted": times that a request lost its cache.
        "preempted_targets": requests under study that did. "recomputed": positions computed more than once on that
        account. "drafted" and "accepted": speculated tokens.
        "graphs": 1 if steps ran as CUDA graphs. The engine adds "ran dtype X", "ran attention X" and "ran threads N".
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for pack in log.packs.values():
        for span in pack:
            spans.setdefault(span.request, []).append((span.first, span.rows))
    lost = set(log.preempted)
    figures = dict.fromkeys(
        ("cached", "hits", "piece_most", "in_pieces", "recomputed"),
        0,
    )
    for outcome in outcomes:
        if outcome.finish in ("error", "cut"):
            continue
        request = outcome.request
        mine = spans.get(request.id, [])
        needed = len(request.prompt) + len(outcome.token_ids) - 1  # the last token is never fed back
        computed = {p for first, rows in mine for p in range(first, first + rows) if p < needed}
        cached = needed - len(computed)
        figures["cached"] += cached
        prefill = [rows for first, rows in mine if first < len(request.prompt)]
        figures["piece_most"] = max([figures["piece_most"], *prefill])
        if request.id in lost:
            figures["recomputed"] += sum(rows for _, rows in mine) - len(computed)
        if request.target:
            figures["hits"] += cached > 0
            if request.id not in lost:
                figures["in_pieces"] += len(prefill) > 1
    return figures | {
        "page": log.page,
        "step_most": max(log.batch.values(), default=0),
        "preempted": len(log.preempted),
        "preempted_targets": sum(o.request.target and o.request.id in lost for o in outcomes),
        "drafted": speculation.drafted if speculation else 0,
        "accepted": speculation.accepted if speculation else 0,
        "graphs": int(load.graphs),
    }
