"""Completions of two runs: the same requests, so the same digests, or not; and where they part.

Digests of tokens and of traces (tokens with logprob bits) hold across runs and machines. They are compared where both
runs asked for the same: prompt, length, temperature, model, and what tokens are known by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nondet.core.records import Completion, Run
from nondet.core.traces import Trace

__all__ = ["CompletionDiff", "compare_completions", "first_divergence"]

# Entries of a plan without whose equality two completions are answers to two questions.
_ASKED = ("max_tokens", "temperature", "request_seed", "eos", "ignore_eos", "extra", "sampling", "top_k", "top_p")


@dataclass(frozen=True)
class CompletionDiff:
    """The completions of one prompt under one implementation, in one arm, in both runs.

    Attributes:
        reason: Why they can't be held against each other; empty where they can.
        n_a, n_b: Completions that succeeded.
        failed_a, failed_b: Those that failed, counted even where there is a reason.
        tokens, traces: Digests -> (how many in A, how many in B).
        with_logprobs: Whether traces hold logprobs in both runs; else tokens alone were compared.
        pairs: Requests of one name in both runs; tokens_alike, traces_alike: those with equal digests; ended_otherwise:
            those that have all else alike, and ended for another reason.
    """

    prompt: str
    impl: str
    arm: str
    reason: str = ""
    n_a: int = 0
    n_b: int = 0
    tokens: Mapping[str, tuple[int, int]] | None = None
    traces: Mapping[str, tuple[int, int]] | None = None
    with_logprobs: bool = True
    pairs: int = 0
    tokens_alike: int = 0
    traces_alike: int = 0
    ended_otherwise: int = 0
    failed_a: int = 0
    failed_b: int = 0

    @property
    def same(self) -> bool:
        """Whether both runs gave one and the same set of traces, and each request of one name ended alike."""
        return not self.reason and not self.ended_otherwise and all(x and y for x, y in (self.traces or {}).values())

    @property
    def commonest(self) -> tuple[str, str] | None:
        """The commonest trace of each run."""
        if self.reason or not self.traces:
            return None
        a, b = (max(self.traces, key=lambda digest: self.traces[digest][side]) for side in (0, 1))  # type: ignore[index] # checked above
        return a, b


def compare_completions(a: Run, b: Run) -> list[CompletionDiff]:
    """Every prompt, implementation and arm that either run has."""
    asked_otherwise = _asked_otherwise(a, b)
    mine, theirs = _groups(a), _groups(b)
    out = []
    for key in dict.fromkeys([*mine, *theirs]):
        prompt, impl, arm = key
        x, y = mine.get(key, []), theirs.get(key, [])
        reason = asked_otherwise
        if not x or not y:
            reason = f"only {'A' if x else 'B'} has completions of it"
        else:
            reason = reason or _known_otherwise(a, b, impl)
            good_a, good_b = ([c for c in group if c.status == "ok"] for group in (x, y))
            reason = reason or ("" if good_a and good_b else "one run has none that succeeded")
        group = (
            CompletionDiff(prompt, impl, arm, reason)
            if reason
            else _compared(prompt, impl, arm, good_a, good_b, _has_logprobs(a, impl) and _has_logprobs(b, impl))
        )
        failures = [sum(c.status != "ok" for c in completions) for completions in (x, y)]
        out.append(replace(group, failed_a=failures[0], failed_b=failures[1]))
    return out


def _groups(run: Run) -> dict[tuple[str, str, str], list[Completion]]:
    prompts = run.header.plan.get("prompts", [])
    groups: dict[tuple[str, str, str], list[Completion]] = {}
    for completion in run.completions:
        prompt = prompts[completion.prompt]
        seed = f" [seed {prompt['seed']}]" if prompt.get("seed") is not None else ""
        key = (f"{prompt['text']}{seed}", completion.impl, str(getattr(completion, "arm", "")))
        groups.setdefault(key, []).append(completion)
    return groups


def _asked_otherwise(a: Run, b: Run) -> str:
    mine, theirs = a.header.plan, b.header.plan
    for name in _ASKED:
        if mine.get(name) != theirs.get(name):
            return f"they were asked with another {name.replace('_', ' ')}"
    models = [plan.get("model") for plan in (mine, theirs)]
    weights: list[Any] = [model.get("weights") if isinstance(model, dict) else None for model in models]
    if all(weights):
        return "" if weights[0] == weights[1] else "they are of other weights"
    named = [model.get("name") if isinstance(model, dict) else model for model in models]
    return "" if named[0] == named[1] else f"they are of models of other names ({named[0]}, {named[1]})"


def _server(run: Run, impl: str) -> Any:
    return next((s for s in getattr(run, "servers", []) if s.impl == impl), None)


def _known_otherwise(a: Run, b: Run, impl: str) -> str:
    """Tokens are known by ids in a run of ours, and by what a server gives in a run of its."""
    known = [server.known_by if (server := _server(run, impl)) else "ids" for run in (a, b)]
    if known[0] != known[1]:
        return f"they are known by {known[0]} in A and by {known[1]} in B"
    return ""


def _has_logprobs(run: Run, impl: str) -> bool:
    server = _server(run, impl)
    return True if server is None else bool(server.logprobs)


def _compared(
    prompt: str, impl: str, arm: str, a: list[Completion], b: list[Completion], with_logprobs: bool
) -> CompletionDiff:
    tokens = [Counter(c.tokens_digest for c in group) for group in (a, b)]
    # without logprobs in both, a trace of one is no trace of the other: tokens alone are compared
    traces = [Counter(c.trace for c in group) for group in (a, b)] if with_logprobs else tokens
    mine, theirs = ({c.request: c for c in group} for group in (a, b))
    pairs = [(mine[name], theirs[name]) for name in mine if name in theirs]
    return CompletionDiff(
        prompt,
        impl,
        arm,
        n_a=len(a),
        n_b=len(b),
        tokens={digest: (tokens[0][digest], tokens[1][digest]) for digest in tokens[0] | tokens[1]},
        traces={digest: (traces[0][digest], traces[1][digest]) for digest in traces[0] | traces[1]},
        with_logprobs=with_logprobs,
        pairs=len(pairs),
        tokens_alike=sum(x.tokens_digest == y.tokens_digest for x, y in pairs),
        traces_alike=sum(x.trace == y.trace for x, y in pairs) if with_logprobs else 0,
        ended_otherwise=sum(_alike(x, y, with_logprobs) and x.finish != y.finish for x, y in pairs),
    )


def _alike(x: Completion, y: Completion, with_logprobs: bool) -> bool:
    return x.trace == y.trace if with_logprobs else x.tokens_digest == y.tokens_digest


def first_divergence(a: Trace, b: Trace) -> tuple[int | None, int | None]:
    """(first token that differs, first logprob whose bits differ), indices into the completion; None: none does.

    Where one completion is the beginning of the other, its end is where they part.
    """
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    token = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if token is None and len(a.token_ids) != len(b.token_ids):
        token = min(len(a.token_ids), len(b.token_ids))
    if not a.logprobs or not b.logprobs:
        return token, None
    width = min(len(a.logprobs), len(b.logprobs)) // 4
    bits = (i for i in range(width) if a.logprobs[4 * i : 4 * i + 4] != b.logprobs[4 * i : 4 * i + 4])
    return token, next(bits, None)
