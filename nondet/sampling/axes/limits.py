"""Axes that are limits of the engine's steps: sharing, chunk, budget, page, graphs."""

from __future__ import annotations

from dataclasses import replace

from nondet.errors import UserError
from nondet.sampling.axes.base import Axis, Conditions, Proof, Seen, Subject, number

__all__ = ["BUDGET", "CHUNK", "GRAPHS", "PAGE", "SHARING"]


def _switch(axis: str, value: str) -> bool:
    if value not in ("on", "off"):
        raise UserError(f"--vary: {axis}={value} makes no sense", f"Write {axis}=on or {axis}=off.")
    return value == "on"


def _on(value: bool) -> str:
    return "on" if value else "off"


def _sharing_proof(value: str, seen: Seen, base: Seen) -> Proof:
    cached, hits = seen.get("cached", 0), seen.get("hits", 0)
    text = f"{cached} positions came from the cache, {hits} completions took some"
    # where the base took nothing from the cache either, "off" changed nothing
    return Proof(hits > 0 if value == "on" else cached == 0 < base.get("cached", 0), text)


SHARING = Axis(
    name="sharing",
    changes="whether requests share the cached pages of a common prefix",
    why="a hit skips part of the prefill: keys come from another batch, and fewer rows are computed",
    value=lambda s: _on(s.base.load.sharing),
    values=lambda s: (_on(not s.base.load.sharing),),
    apply=lambda s, v: replace(s.base, load=replace(s.base.load, sharing=_switch("sharing", v))),
    proof=_sharing_proof,
)


def _chunk(subject: Subject, value: str) -> Conditions:
    if value == "none":
        return replace(subject.base, setting=replace(subject.base.setting, chunk=None))
    return replace(subject.base, setting=replace(subject.base.setting, chunk=number("chunk", value, 1)))


def _chunk_proof(value: str, seen: Seen, base: Seen) -> Proof:
    most, pieces, before = seen.get("piece_most", 0), seen.get("in_pieces", 0), base.get("piece_most", 0)
    text = f"{pieces} prompts under study came in pieces, the largest piece had {most} tokens ({before} at the base)"
    return Proof(value == "none" or (pieces > 0 and most <= int(value) < before), text)


CHUNK = Axis(
    name="chunk",
    changes="the most prompt tokens of one request in one step: a long prefill comes in pieces",
    why="a row is computed among others, and the keys of its own prompt come partly from the cache",
    value=lambda s: "none" if s.base.setting.chunk is None else str(s.base.setting.chunk),
    values=lambda s: ("5", "16", "24"),
    apply=_chunk,
    proof=_chunk_proof,
)


def _budgets(subject: Subject) -> tuple[str, ...]:
    budget = subject.base.load.budget
    return tuple(str(b) for b in (budget // 4, budget // 2, budget * 2) if b >= 8)


def _budget_proof(value: str, seen: Seen, base: Seen) -> Proof:
    most, before = seen.get("step_most", 0), base.get("step_most", 0)
    return Proof(most <= int(value) and most != before, f"the largest step had {most} tokens ({before} at the base)")


BUDGET = Axis(
    name="budget",
    changes="the query tokens that one step may take",
    why="M of every product follows it, and prefills that do not fit are cut",
    value=lambda s: str(s.base.load.budget),
    values=_budgets,
    apply=lambda s, v: replace(s.base, load=replace(s.base.load, budget=number("budget", v, 1))),
    proof=_budget_proof,
)


def _pages(subject: Subject) -> tuple[str, ...]:
    return tuple(str(p) for p in (4, 8, 16, 32) if p != subject.base.load.page)


def _page_proof(value: str, seen: Seen, base: Seen) -> Proof:
    page, cached = seen.get("page", 0), seen.get("cached", 0)
    return Proof(page == int(value), f"the engine's cache has pages of {page} tokens; {cached} positions came from it")


PAGE = Axis(
    name="page",
    changes="the tokens in a page of the KV cache",
    why="it is the grain in which prefixes are shared, and of kernels that walk pages",
    value=lambda s: str(s.base.load.page),
    values=_pages,
    apply=lambda s, v: replace(s.base, load=replace(s.base.load, page=number("page", v, 4))),
    proof=_page_proof,
)


def _graphs_proof(value: str, seen: Seen, base: Seen) -> Proof:
    ran = seen.get("graphs", 0)
    holds = ran > 0 if value == "on" else ran == 0 < base.get("graphs", 0)
    return Proof(holds, "steps ran as CUDA graphs" if ran else "steps ran one by one")


GRAPHS = Axis(
    name="graphs",
    changes="whether steps run as CUDA graphs, padded to a few sizes",
    why="padding makes other sizes of every product, and another kernel may be chosen for them",
    value=lambda s: _on(s.base.load.graphs),
    values=lambda s: (_on(not s.base.load.graphs),),
    apply=lambda s, v: replace(s.base, load=replace(s.base.load, graphs=_switch("graphs", v))),
    proof=_graphs_proof,
    lacking=lambda s: "" if s.device == "cuda" else "CUDA graphs need a CUDA device",
)
