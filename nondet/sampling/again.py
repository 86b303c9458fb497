"""Running rounds again: whether the same requests in the same batches give the same bits.

That is what tells batch-dependent from run-to-run nondeterministic, and it tells for the rounds that were run again
alone. The first round always is. Where a prompt parted and its completions in that round agree, further rounds are
chosen, as few as will do.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from nondet.core.records import Completion, Row, Status
from nondet.core.traces import nonfinite_logprobs, tokens_digest, trace_digest
from nondet.sampling.model import LoadedModel
from nondet.sampling.protocol import Outcome, Session

__all__ = ["completion_of", "digest_of", "repeat_key", "repeat_row", "rounds_to_settle", "settling_row"]

_FIRST = "the first round, twice"


def completion_of(outcome: Outcome, impl: str, index: int) -> Completion:
    """The record of one request under study, of round `index`."""
    failed = outcome.finish == "error"
    return Completion(
        impl=impl,
        request=outcome.request.id,
        round=index,
        prompt=outcome.request.subject,
        tokens_digest="" if failed else tokens_digest(outcome.token_ids),
        trace="" if failed else digest_of(outcome),
        n_tokens=len(outcome.token_ids),
        finish=outcome.finish,
        arrival_step=outcome.request.arrival_step,
        schedule=outcome.schedule,
        batch_min=outcome.batch_min,
        batch_max=outcome.batch_max,
        nonfinite=nonfinite_logprobs(outcome.logprobs),
        status="error" if failed else "ok",
        reason=outcome.reason,
    )


def digest_of(outcome: Outcome) -> str:
    """The digest of its trace."""
    sampling = outcome.request.sampling
    return trace_digest(outcome.token_ids, outcome.logprobs, None if sampling is None else sampling.seed)


def rounds_to_settle(completions: Sequence[Completion], most: int) -> list[int]:
    """Rounds to run again beside the first, so that each prompt that parted does so within rounds that were run twice.

    Greedy: the round that settles most prompts first, the earlier one among equals. A prompt may need two rounds.

    Args:
        completions: Of one implementation, those that succeeded; all that there will be.
        most: Rounds at most; prompts that would need more stay open, and their verdict says so.
    """
    traces: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for c in completions:
        traces[c.prompt][c.round].add(c.trace)
    open_ = {p: rounds for p, rounds in traces.items() if len(set().union(*rounds.values())) > 1}
    seen = {p: set(rounds.get(0, ())) for p, rounds in open_.items()}
    chosen: list[int] = []
    while len(chosen) < most:
        gains: dict[int, tuple[int, int]] = {}
        for p, rounds in open_.items():
            if len(seen[p]) > 1:
                continue
            for number, members in rounds.items():
                settled, nearer = gains.get(number, (0, 0))
                union = len(seen[p] | members)
                gains[number] = (settled + (union > 1), nearer + (union > len(seen[p])))
        gains = {number: gain for number, gain in gains.items() if any(gain) and number not in (0, *chosen)}
        if not gains:
            break
        best = min(gains, key=lambda number: (-gains[number][0], -gains[number][1], number))
        chosen.append(best)
        for p, rounds in open_.items():
            seen[p] |= rounds.get(best, set())
    return chosen


def repeat_key(loaded: LoadedModel, impl: str, index: int = 0) -> tuple[str, ...]:
    """What a resumed run knows the row of a repeated round by."""
    return ("row", "sample", _case(index), loaded.dtype, loaded.device, impl)


def _case(index: int) -> str:
    return _FIRST if index == 0 else f"round {index}, twice"


def repeat_row(loaded: LoadedModel, impl: str, once: Session, again: Session, started: float) -> Row:
    """The first round, twice: tokens, logprobs, margins and schedules of everybody, bit for bit.

    Under CUDA graphs the first step of each size runs without one, and then is captured: each session has an engine of
    its own, so that two equal ones do so in the same steps. Where they did not, a step that ran without a graph would
    stand against a replay, and what parts would be no work of chance: such a pair has no answer.
    """
    failed = [o.reason for s in (once, again) for o in s.outcomes if o.finish == "error"]
    if _captures(once) != _captures(again):
        failed.append("CUDA graphs were captured in other steps the second time: a replay stands against what is none")
    parted = sum(a != b for a, b in zip(once.outcomes, again.outcomes, strict=True))
    return _row(loaded, impl, 0, again, (len(once.outcomes), parted), failed[:1], started)


def _captures(session: Session) -> list[int]:
    """The steps in which a graph was captured."""
    return [number for number, step in enumerate(session.pace) if step.captured]


def settling_row(
    loaded: LoadedModel, impl: str, index: int, before: Mapping[tuple[str, ...], Completion], again: Session,
    started: float,
) -> Row:  # fmt: skip
    """A round, the second time held against its completions on disk: traces and schedules, background left out.

    So is the first one of a run that was stopped: what another process gives otherwise is no work of the batch.

    Args:
        before: The round's completions by key, those that succeeded.
    """
    records = [completion_of(o, impl, index) for o in again.outcomes if o.request.target]
    failed = [r.reason for r in records if r.status != "ok"]
    parted = sum(r.key in before and before[r.key] != r for r in records)
    return _row(loaded, impl, index, again, (len(before), parted), failed[:1], started)


def _row(
    loaded: LoadedModel, impl: str, index: int, again: Session, counted: tuple[int, int], failed: list[str],
    started: float,
) -> Row:  # fmt: skip
    requests, parted = counted
    identity = loaded.identity
    return Row(
        probe="sample",
        case=_case(index),
        operator="engine",
        shape={k: identity[k] for k in ("layers", "hidden", "vocabulary") if isinstance(identity.get(k), int)},
        dtype=loaded.dtype,
        device=loaded.device,
        inputs="prompts",
        varied="run",
        impl=impl,
        status=Status.ERROR if failed else Status.DIVERGENT if parted else Status.IDENTICAL,
        values=[1, 2],
        labels=[0, int(bool(parted))],
        class_sizes=[1, 1] if parted else [2],
        trials=2,
        distinct=2 if parted else 1,
        extra={
            "requests": requests,
            "requests_parted": parted,
            "tokens": again.tokens,
            "steps": again.steps,
            # of the second time alone: every kernel is compiled, proven and planned by then
            "seconds_again": again.seconds,
            "tokens_per_second_again": again.tokens / again.seconds if again.seconds > 0 else 0.0,
            **({"round": index} if index else {}),
        },
        reason=failed[0] if failed else "",
        seconds=time.perf_counter() - started,
    )
