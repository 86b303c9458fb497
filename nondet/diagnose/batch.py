"""What the completions of a diagnosis show: run to run, in company, and under the cure. Functions of records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nondet.core.records import Completion, Run, Step
from nondet.core.statistics import one_sided_bound, percent, percent_range, round_interval
from nondet.diagnose.margin import Noise
from nondet.verdict import plural, replays

__all__ = ["batch_step", "companies", "flip_text", "parted_rounds", "run_step"]


def run_step(run: Run, impl: str, alone: Sequence[str]) -> Step:
    """Whether the same requests in the same batches gave the same bits.

    Args:
        alone: Digests of the traces of the request alone, once for each time.
    """
    rows = replays(run).get(impl, [])
    round_parted = any(row.parted for row in rows)
    alone_parted = len(set(alone)) > 1
    requests = sum(int(row.extra.get("requests", 0)) for row in rows)
    other = sum(int(row.extra.get("requests_parted", 0)) for row in rows)
    if not rows:
        failed = next((r.reason for r in run.rows if r.impl == impl and r.varied == "run"), "it was not run again")
        return Step(name="run", outcome="unknown", sentence=f"the first round could not be compared: {failed}")
    sentence = (
        f"the prompt alone, {len(alone)} times: {plural(len(set(alone)), 'trace')}; the first round twice: "
        f"{f'{other} of {requests} requests differ' if round_parted else f'all {requests} requests equal in every bit'}"
    )
    return Step(
        name="run",
        outcome="no" if round_parted or alone_parted else "yes",
        sentence=sentence,
        figures={"alone": len(alone), "alone_traces": len(set(alone)), "requests": requests, "requests_parted": other},
    )


def batch_step(run: Run, impl: str, alone: Mapping[str, str]) -> Step:
    """How many completions in company are not the one alone: traces first, then tokens.

    Args:
        alone: Its "trace" and "tokens", as digests.
    """
    good = _completions(run, impl)
    sizes, traces, tokens = _by_round(good, alone)
    n, rounds = len(good), len(sizes)
    figures = {
        "n": float(n),
        "rounds": float(rounds),
        "traces": float(sum(traces)),
        "tokens": float(sum(tokens)),
        "rounds_traces": float(sum(k > 0 for k in traces)),
        "rounds_tokens": float(sum(k > 0 for k in tokens)),
        # of the round that came again equal: what parted there has been laid to the batch already
        "repeated_round_traces": float(traces[0] if traces else 0),
        "distinct_traces": float(len({c.trace for c in good})),
        "distinct_completions": float(len({c.tokens_digest for c in good})),
    }
    if not n:
        return Step(name="batch", outcome="unknown", sentence="no completion came to its end", figures=figures)
    parts = [
        f"of {plural(n, 'completion')} in {plural(rounds, 'round')}, {sum(traces)} have other logprob bits than "
        f"the same prompt alone ({_share(traces, sizes)}), in {sum(k > 0 for k in traces)} of "
        f"{plural(rounds, 'round')}",
        f"{sum(tokens)} have other tokens ({_share(tokens, sizes)}), in {sum(k > 0 for k in tokens)} of "
        f"{plural(rounds, 'round')}",
    ]
    return Step(name="batch", outcome="yes" if sum(traces) else "no", sentence="; ".join(parts), figures=figures)


def companies(run: Run, impl: str, alone: str, gaps: Sequence[str]) -> Step:
    """What is left of the divergence under another implementation, with what that implementation did not reach.

    Args:
        alone: Digest of the trace of the request alone, under it.
        gaps: Calls that it left stock without proof.
    """
    good = _completions(run, impl)
    traces = {c.trace for c in good} | {alone}
    rows = replays(run).get(impl, [])
    unsteady = any(row.parted for row in rows)
    axes = [a for a in run.axes if a.impl == impl]
    tried, differ = sum(a.tried for a in axes), sum(a.traces for a in axes)
    failed = sum(c.impl == impl and c.status != "ok" for c in run.completions)
    lost = sum(c.nonfinite > 0 for c in good)  # NaN agrees with itself: that is no cure
    parted = len(traces) > 1 or unsteady or bool(differ) or bool(lost)
    # a sample with holes, or without a round that came again, shows neither a cure nor that there is none
    cured = not parted and bool(good) and bool(rows) and not failed
    rounds = len({c.round for c in good})
    seen = f"{plural(len(traces), 'distinct trace')} of {plural(len(good), 'completion')}"
    parts = [f"{seen} in company and the one alone"]
    if cured:
        parts[0] += f" (at 95%, one-sided: below {percent(one_sided_bound(rounds), 'up')} of rounds, below "
        parts[0] += f"{percent(one_sided_bound(len(good)), 'up')} of completions if they were independent)"
    if axes:
        parts.append(f"of the axes that parted, {differ} of {tried} completions differ from the one alone")
    if failed:
        parts.append(f"{plural(failed, 'completion')} failed")
    if lost:
        parts.append(f"{plural(lost, 'completion')} hold NaN or infinite logprobs")
    if rows:
        again = "the first round, run again, differs from itself" if unsteady else "the first round came again equal"
    else:
        again = "no round was run again"
    parts.append(again)
    parts.append(
        f"its coverage is not complete: {', '.join(gaps)}"
        if gaps
        else "its coverage is complete: no call was left stock without proof, none is at risk"
    )
    return Step(
        name="cure",
        outcome="no" if parted else "yes" if cured else "unknown",
        sentence="; ".join(parts),
        figures={
            "n": float(len(good)), "rounds": float(rounds), "traces": float(len(traces)), "gaps": float(len(gaps)),
            "axes_tried": float(tried), "axes_traces": float(differ), "unsteady": float(unsteady),
        },
        facts={"gaps": "; ".join(gaps)},
    )  # fmt: skip


def parted_rounds(run: Run, impl: str, alone: Mapping[str, str]) -> list[int]:
    """Rounds with a completion that is not the one alone: those with other tokens first, then by number."""
    good = _completions(run, impl)
    tokens = {c.round for c in good if c.tokens_digest != alone.get("tokens")}
    traces = {c.round for c in good if c.trace != alone.get("trace")}
    return sorted(traces, key=lambda number: (number not in tokens, number))


def flip_text(noise: Noise) -> tuple[str, str]:
    """The sentence on margins, and the answer to whether every flip is within the noise."""
    spread = (
        f"the logits of the top tokens move by up to {noise.spread:.4g} between the arms ({noise.moved:,} of "
        f"{noise.compared:,} compared move at all)"
    )
    near = f"{noise.near} of {noise.tokens} tokens alone have a margin of at most twice that"
    if not noise.flips:
        return f"no token flipped in the rounds looked at; {spread}; {near}", "unknown"
    count = len(noise.flips)
    first = min(flip.index for flip in noise.flips)
    largest = max(flip.margin for flip in noise.flips)
    ties = sum(flip.tie for flip in noise.flips)
    sentence = (
        f"{plural(count, 'completion')} flipped, the first at token {first}, where the two largest logits alone are at "
        f"most {largest:.4g} apart; {spread}, so {noise.within} of {count} flips are within it (at most twice that); "
        f"{ties} of {count} are exact ties in one arm; {near}"
    )
    return sentence, "yes" if noise.within == count else "no"


def _completions(run: Run, impl: str) -> list[Completion]:
    return [c for c in run.completions if c.impl == impl and c.status == "ok"]


def _by_round(good: Sequence[Completion], alone: Mapping[str, str]) -> tuple[list[int], list[int], list[int]]:
    """(completions, those with another trace, those with other tokens), of each round."""
    rounds = sorted({c.round for c in good})
    mine = [[c for c in good if c.round == number] for number in rounds]
    return (
        [len(cs) for cs in mine],
        [sum(c.trace != alone["trace"] for c in cs) for cs in mine],
        [sum(c.tokens_digest != alone["tokens"] for c in cs) for cs in mine],
    )


def _share(hits: Sequence[int], sizes: Sequence[int]) -> str:
    """The interval of a rate over rounds; where nothing was seen, or nothing else, the bound by either unit."""
    bounds = one_sided_bound(len(sizes)), one_sided_bound(sum(sizes))
    if not any(hits):
        by_round, by_completion = (f"below {percent(bound, 'up')}" for bound in bounds)
    elif list(hits) == list(sizes):
        by_round, by_completion = (f"above {percent(1.0 - bound, 'down')}" for bound in bounds)
    else:
        return f"95%: {percent_range(*round_interval(hits, sizes))}"
    return f"at 95%, one-sided: {by_round} of rounds, {by_completion} of completions if they were independent"
