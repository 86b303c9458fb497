"""Whether greedy decoding is greedy: every token that was chosen has the largest logit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from nondet.core.records import Step
from nondet.core.traces import nonfinite_logprobs, tokens_digest, trace_digest
from nondet.sampling.plan import Session

__all__ = ["greedy_step"]


def greedy_step(sessions: Sequence[Session], decode: Callable[[Sequence[int]], str]) -> Step:
    """The answer for all tokens of the sessions, the first of which is the prompt alone: its digests are kept."""
    chosen = ties = wrong = lost = 0
    margins: list[float] = []
    first = ""
    for session in sessions:
        for outcome in session.outcomes:
            tops = session.tops.get(outcome.request.id, [])
            lost += nonfinite_logprobs(outcome.logprobs)
            for index, (token, (top, second, *ids)) in enumerate(zip(outcome.token_ids, tops, strict=False)):
                chosen += 1
                ties += top == second
                if math.isfinite(top - second):
                    margins.append(top - second)
                if token != ids[0] and top != second:
                    wrong += 1
                    first = first or f"{outcome.request.id}, token {index}: {token} where {ids[0]} has the top logit"
    alone = sessions[0].outcomes[0]
    sentence = "the engine gives no logits"
    if lost:
        sentence = f"{lost:,} of {chosen:,} tokens chosen, alone and in company, have a NaN or infinite logprob"
    elif wrong:
        sentence = f"{wrong:,} of {chosen:,} tokens chosen, alone and in company, lack the largest logit ({first})"
    elif chosen:
        margin = f"by a margin of {min(margins):.4g} or more" if margins else "and no other is finite"
        sentence = (
            f"each of {chosen:,} tokens chosen, alone and in company, has the largest logit, {margin}; "
            f"{ties:,} are exact ties"
        )
    return Step(
        name="greedy",
        outcome="no" if wrong or lost else "yes" if chosen else "unknown",
        sentence=sentence,
        figures={
            "tokens": chosen,
            "ties": ties,
            "wrong": wrong,
            "nonfinite": lost,
            "smallest_margin": min(margins, default=-1.0),
        },
        facts={
            "trace": trace_digest(alone.token_ids, alone.logprobs),
            "tokens": tokens_digest(alone.token_ids),
            "text": decode(alone.token_ids),
        },
    )
