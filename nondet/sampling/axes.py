"""The axes of `nondet sample --vary`: what is varied by itself, over which values, and what proves its effect."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from nondet.errors import UnknownNameError, UserError, each_once, suggestion
from nondet.sampling.orders import ORDERS
from nondet.sampling.plan import PLAIN, Load, Request, Setting
from nondet.sampling.routing import POLICIES
from nondet.sampling.speculation import DRAFTERS

# An axis is one engine setting that is varied while everything else is fixed. It names its values, how a session is run
# at each, and decides from the session's figures whether the value took effect. A value without effect is unproven:
# that nothing diverged there is then no evidence.

# Figures of sessions over all rounds: sums, and maxima for names that end in "_most" and for "page".
Seen = Counter[str]


@dataclass(frozen=True)
class Conditions:
    """How the sessions of one value are run."""

    load: Load
    dtype: str
    setting: Setting = PLAIN
    threads: int | None = None
    replicas: int = 1  # engines that the requests of a round are spread over
    routing: str = ""  # a key of `nondet.sampling.routing.POLICIES`; "" with one replica
    ranks: int = 1  # processes that the model is cut over by its tensor-parallel plan


@dataclass(frozen=True)
class Subject:
    """What an axis may use to choose its values."""

    base: Conditions
    device: str
    requests: Sequence[Request] = ()
    threads: int = 1  # of this process
    earlier: tuple[int, ...] = ()  # the earlier text that the editing form of speculation starts from
    gpus: int = 0  # of this host
    heads: int = 0  # greatest common divisor of heads and key heads, which ranks divide; 0 if unknown
    halves: bool = True  # whether a draft model can be made of the model's first layers
    draft_model: str = ""
    grain: int = 0  # of vLLM, whose pages are multiples of it; 0 for nondet's own engine


@dataclass(frozen=True)
class Proof:
    """Whether a value took effect, and the figures that show it."""

    holds: bool
    text: str


@dataclass(frozen=True)
class Axis:
    """One axis."""

    name: str
    changes: str  # what is varied, a phrase
    value: Callable[[Subject], str]
    # default values, in addition to the base's; () where the axis has none here
    values: Callable[[Subject], Sequence[str]]
    # the base conditions at another value; raises `UserError` for an invalid one
    apply: Callable[[Subject, str], Conditions]
    # whether a value took effect: (value, figures of its sessions, figures of the base's)
    proof: Callable[[str, Seen, Seen], Proof]
    # whether an invariant engine gives one trace over all values. Over dtypes, for example, it does not: only the
    # completions at one value are then compared.
    held: bool = True
    held_by: tuple[str, ...] = ()  # implementations that should give one trace even though `held` is False
    # why this device or engine has no such axis; "" where it does
    lacking: Callable[[Subject], str] = field(default=lambda subject: "")
    slow_on_cpu: str = ""  # why "all" leaves it out on a CPU, where it can be named; "" where it does not


# What transformers' continuous batching takes without further packages; it refuses flex attention and others.
ATTENTIONS = ("sdpa", "eager")
_DTYPES = ("bfloat16", "float16", "float32")
_REPLICAS = 3
# The draft model recomputes the end of each text for every drafted token, so it drafts few.
_DRAFTED = {"lookup": 4, "draft": 2, "model": 2, "edit": 4}


def number(axis: str, text: str, least: int, most: int = 1_000_000) -> int:
    """A value that is a whole number in this range; else a `UserError`."""
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise UserError(
            f"--vary: {axis}={text} makes no sense", f"Give whole numbers from {least} to {most}, such as {axis}=16:32."
        )
    return int(text)


def _known(axis: str, value: str, names: Iterable[str], why: str = " is unknown") -> str:
    if value not in names:
        raise UserError(f"--vary: {axis}={value}{why}", suggestion(value, names))
    return value


def _on(value: bool) -> str:
    return "on" if value else "off"


def _with_load(subject: Subject, **changes: Any) -> Conditions:
    return replace(subject.base, load=replace(subject.base.load, **changes))


def _with_setting(subject: Subject, **changes: Any) -> Conditions:
    return replace(subject.base, setting=replace(subject.base.setting, **changes))


def _switch(name: str, **more: Any) -> Axis:
    def apply(subject: Subject, value: str) -> Conditions:
        if value not in ("on", "off"):
            raise UserError(f"--vary: {name}={value} makes no sense", f"Write {name}=on or {name}=off.")
        return _with_load(subject, **{name: value == "on"})

    return Axis(
        name=name,
        value=lambda s: _on(getattr(s.base.load, name)),
        values=lambda s: (_on(not getattr(s.base.load, name)),),
        apply=apply,
        **more,
    )


def _sharing_proof(value: str, seen: Seen, base: Seen) -> Proof:
    cached, hits = seen["cached"], seen["hits"]
    text = f"{cached} positions came from the cache, {hits} completions took some"
    # where the base took nothing from the cache either, "off" changed nothing
    return Proof(hits > 0 if value == "on" else cached == 0 < base["cached"], text)


def _chunk_proof(value: str, seen: Seen, base: Seen) -> Proof:
    most, pieces, before = seen["piece_most"], seen["in_pieces"], base["piece_most"]
    text = f"{pieces} prompts under study came in pieces, the largest piece had {most} tokens ({before} at the base)"
    return Proof(value == "none" or (pieces > 0 and most <= int(value) < before), text)


def _budget_proof(value: str, seen: Seen, base: Seen) -> Proof:
    most, before = seen["step_most"], base["step_most"]
    return Proof(most <= int(value) and most != before, f"the largest step had {most} tokens ({before} at the base)")


def _page_proof(value: str, seen: Seen, base: Seen) -> Proof:
    page, cached = seen["page"], seen["cached"]
    return Proof(page == int(value), f"the engine's cache has pages of {page} tokens; {cached} positions came from it")


def _page(subject: Subject, value: str) -> Conditions:
    page = number("page", value, 4)
    if subject.grain and page % subject.grain:
        what = f"--vary: page={value}: vLLM's pages are multiples of {subject.grain} here"
        raise UserError(what, f"Write page={subject.grain}:{2 * subject.grain}, say.")
    return _with_load(subject, page=page)


def _graphs_proof(value: str, seen: Seen, base: Seen) -> Proof:
    ran = seen["graphs"]
    holds = ran > 0 if value == "on" else ran == 0 < base["graphs"]
    return Proof(holds, "steps ran as CUDA graphs" if ran else "steps ran one by one")


def _ran(what: str) -> Callable[[str, Seen, Seen], Proof]:
    def proof(value: str, seen: Seen, base: Seen) -> Proof:
        prefix = f"ran {what} "
        ran = sorted(name.removeprefix(prefix) for name in seen if name.startswith(prefix))
        return Proof(ran == [value], f"the engine ran with {what} {', '.join(ran) or 'unknown'}")

    return proof


def _dtype(subject: Subject, value: str) -> Conditions:
    return replace(subject.base, dtype=_known("dtype", value, _DTYPES, " is not one that models run in here"))


def _attention(subject: Subject, value: str) -> Conditions:
    why = f": transformers' continuous batching takes {' and '.join(ATTENTIONS)} here"
    return _with_setting(subject, attention=_known("attention", value, ATTENTIONS, why))


def _ranks(subject: Subject, value: str) -> Conditions:
    from nondet.ranks.group import check_ranks
    from nondet.sampling.ranks import check_loader

    check_loader()
    world = number("ranks", value, 1, 64)
    if world > 1:
        check_ranks([world], subject.device, subject.gpus)
    if subject.heads % world:
        raise UserError(
            f"--vary: ranks={value}: the model's heads and key heads can be cut by {subject.heads} at most",
            "Give a number that divides them.",
        )
    return replace(subject.base, ranks=world)


def _ranks_tried(subject: Subject) -> list[str]:
    most = subject.gpus if subject.device == "cuda" else 4
    return [str(world) for world in (2, 4) if world <= most and not subject.heads % world]


def _no_ranks(subject: Subject) -> str:
    if subject.device == "cuda" and subject.gpus < 2:
        return "there is one GPU here"
    if importlib.util.find_spec("accelerate") is None:
        return "the package accelerate is missing, by which a model is loaded in shares"
    return ""


def _ranks_proof(value: str, seen: Seen, base: Seen) -> Proof:
    world, share = seen["ranks_most"] or 1, seen["share_most"]
    if value == "1":
        return Proof(world == 1, "one process had the whole model")
    text = f"{world} ranks came to the same ids and logprobs, the first with {share:,} parameters of the model"
    return Proof(world == int(value) and share > 0, text)


def _scheduler_proof(value: str, seen: Seen, base: Seen) -> Proof:
    other, rounds = seen["reordered"], seen["rounds"]
    return Proof(other > 0, f"requests were admitted in another order than at the base in {other} of {rounds} rounds")


def _preemption(subject: Subject, value: str) -> Conditions:
    if value == "ample":
        return _with_setting(subject, pages=None)
    room = number("preemption", value, 1, 10_000)
    page = subject.base.load.page
    largest = max((ceil((len(r.prompt) + r.max_new_tokens) / page) + 1 for r in subject.requests), default=1)
    return _with_setting(subject, pages=room * largest + 4)


def _preemption_proof(value: str, seen: Seen, base: Seen) -> Proof:
    times, targets = seen["preempted"], seen["preempted_targets"]
    text = (
        f"{times} times a request lost its cache, {targets} times one under study; "
        f"{seen.get('recomputed', 0)} positions were computed again"
    )
    return Proof(times == 0 if value == "ample" else targets > 0 and seen["recomputed"] > 0, text)


def _routing(subject: Subject, value: str) -> Conditions:
    if value == "single":
        return replace(subject.base, replicas=1, routing="")
    _known("routing", value, ["single", *POLICIES])
    return replace(subject.base, replicas=_REPLICAS, routing=value)


def _routing_proof(value: str, seen: Seen, base: Seen) -> Proof:
    used, elsewhere = seen["replicas_most"], seen["rerouted"]
    text = f"{used} replicas served completions, {seen.get('cached', 0)} positions came from their caches"
    if value == "single":
        return Proof(used <= 1, text)
    if value == "round-robin":
        return Proof(used > 1, text)
    return Proof(elsewhere > 0, f"{text}; {elsewhere} requests went elsewhere than in turn")


def _speculative(subject: Subject, value: str) -> Conditions:
    if value == "none":
        return _with_setting(subject, drafts="")
    _known("speculative", value, ["none", *DRAFTERS])
    if value == "draft" and not subject.halves:
        raise UserError(
            "--vary: speculative=draft: the model's layers are not where a draft model could be made of them",
            "Leave it out: --vary speculative=lookup:edit.",
        )
    if value == "model" and not subject.draft_model:
        raise UserError("--vary: speculative=model needs a draft model", "Name it: --draft-model FOLDER.")
    if subject.base.load.graphs:
        raise UserError("--vary: speculative does not go with --load graphs=on", "Leave graphs=on out.")
    draft_model = subject.draft_model if value == "model" else ""
    return _with_setting(
        subject, drafts=value, draft_tokens=_DRAFTED[value], draft_model=draft_model, earlier=subject.earlier
    )


def _speculative_proof(value: str, seen: Seen, base: Seen) -> Proof:
    drafted, accepted = seen["drafted"], seen["accepted"]
    text = f"{accepted} of {drafted} drafted tokens were accepted"
    return Proof(drafted == 0 if value == "none" else accepted > 0, text)


_AXES = (
    _switch(
        "sharing",
        changes="whether requests share the cached pages of a common prefix",
        proof=_sharing_proof,
    ),
    Axis(
        name="chunk",
        changes="the most prompt tokens of one request in one step: a long prefill comes in pieces",
        value=lambda s: str(s.base.setting.chunk or "none"),
        values=lambda s: ("5", "16", "24"),
        apply=lambda s, v: _with_setting(s, chunk=None if v == "none" else number("chunk", v, 1)),
        proof=_chunk_proof,
    ),
    Axis(
        name="budget",
        changes="the query tokens that one step may take",
        value=lambda s: str(s.base.load.budget),
        values=lambda s: [str(b) for b in (s.base.load.budget * n // 4 for n in (1, 2, 8)) if b >= 8],
        apply=lambda s, v: _with_load(s, budget=number("budget", v, 1)),
        proof=_budget_proof,
    ),
    Axis(
        name="page",
        changes="the tokens in a page of the KV cache",
        value=lambda s: str(s.base.load.page),
        values=lambda s: [str(s.grain * n) for n in (1, 2, 4)] if s.grain else ("4", "8", "16", "32"),
        apply=_page,
        proof=_page_proof,
    ),
    Axis(
        name="scheduler",
        changes="which request is admitted first: by arrival, the shortest, longest prefix match, deficit round robin",
        value=lambda s: s.base.setting.order,
        values=lambda s: list(ORDERS),
        apply=lambda s, v: _with_setting(s, order=_known("scheduler", v, ORDERS)),
        proof=_scheduler_proof,
    ),
    Axis(
        name="preemption",
        changes="the cache's size: room for so many of the largest requests, so that others are evicted and recomputed",
        value=lambda s: str(s.base.setting.pages or "ample"),
        values=lambda s: ("2", "1"),
        apply=_preemption,
        proof=_preemption_proof,
    ),
    Axis(
        name="speculative",
        changes="where drafts come from: none, prompt lookup, a draft model (half of the layers; another), "
        "an edited text",
        value=lambda s: s.base.setting.drafts or "none",
        values=lambda s: [n for n in DRAFTERS if {"draft": s.halves, "model": bool(s.draft_model)}.get(n, True)],
        apply=_speculative,
        proof=_speculative_proof,
        lacking=lambda s: "drafts can't be verified inside of CUDA graphs" if s.base.load.graphs else "",
    ),
    Axis(
        name="routing",
        changes=f"which of {_REPLICAS} replicas serves a request: in turn, by prefix and load, by prefix and deficit",
        value=lambda s: s.base.routing or "single",
        values=lambda s: list(POLICIES),
        apply=_routing,
        proof=_routing_proof,
    ),
    _switch(
        "graphs",
        changes="whether steps run as CUDA graphs, padded to a few sizes",
        proof=_graphs_proof,
        lacking=lambda s: "" if s.device == "cuda" else "CUDA graphs need a CUDA device",
    ),
    Axis(
        name="dtype",
        changes="the dtype of weights and activations; the weights in hand are cast",
        value=lambda s: s.base.dtype,
        values=lambda s: _DTYPES,
        apply=_dtype,
        proof=_ran("dtype"),
        held=False,
    ),
    Axis(
        name="attention",
        changes="the model's attention implementation",
        value=lambda s: s.base.setting.attention or "sdpa",
        values=lambda s: ATTENTIONS,
        apply=_attention,
        proof=_ran("attention"),
        held=False,
    ),
    Axis(
        name="threads",
        changes="the CPU threads",
        value=lambda s: str(s.base.threads or s.threads),
        values=lambda s: [str(n) for n in (1, 2, 4) if n <= max(2, s.threads)],
        apply=lambda s, v: replace(s.base, threads=number("threads", v, 1, max(2, os.cpu_count() or 1))),
        proof=_ran("threads"),
        held=False,
        lacking=lambda s: "" if s.device == "cpu" else "threads decide nothing on a CUDA device",
    ),
    Axis(
        name="ranks",
        changes="the number of ranks that the model is cut over by its tensor-parallel plan",
        value=lambda s: str(s.base.ranks),
        values=_ranks_tried,
        apply=_ranks,
        proof=_ranks_proof,
        held=False,
        held_by=("rank-free",),
        lacking=_no_ranks,
        slow_on_cpu="on a CPU ranks are processes, and starting them takes longer than all other axes: name it",
    ),
)
AXES: dict[str, Axis] = {axis.name: axis for axis in _AXES}
ALL = "all"
_VLLM = ("sharing", "chunk", "budget", "page", "graphs")  # axes that vLLM has as well


@dataclass(frozen=True)
class Varied:
    """An axis, the base's value, and the other values with their conditions; a note where there are none."""

    axis: Axis
    base: str
    values: tuple[tuple[str, Conditions], ...] = ()
    note: str = ""


def parse_vary(spec: str) -> dict[str, list[str]]:
    """Read `--vary`: axis -> values, [] for its own; "all" by itself. A `UserError` of an unknown or repeated one."""
    parts = [part.strip() for part in spec.split(",")]
    if not all(parts):
        raise UserError(f"--vary {spec!r} has an empty part", f"Name axes such as sharing,chunk=8:16, or {ALL}.")
    each_once("--vary", (part.partition("=")[0] for part in parts))
    wanted: dict[str, list[str]] = {}
    for part in parts:
        name, equals, text = part.partition("=")
        values = [value.strip() for value in text.split(":")] if equals else []
        if name == ALL and (len(parts) > 1 or equals):
            raise UserError(f"--vary {spec!r}: {ALL} excludes other axes", f"Write --vary {ALL}, or name the axes.")
        if name not in AXES and name != ALL:
            raise UnknownNameError("axis", name, [*AXES, ALL])
        if equals and not all(values):
            raise UserError(
                f"--vary: {part!r} lacks a value", f"Write {name}=VALUE, or {name} without = for its default values."
            )
        wanted[name] = values
    return wanted


def plan_axes(wanted: dict[str, list[str]], subject: Subject) -> list[Varied]:
    """The axes with values and conditions; a `UserError` of a named one that is lacking, or an invalid value."""
    every = ALL in wanted
    varied = []
    for name in AXES if every else wanted:
        axis = AXES[name]
        lacking = f"vLLM is varied along {', '.join(_VLLM)}" if subject.grain and name not in _VLLM else ""
        lacking = lacking or axis.lacking(subject) or (axis.slow_on_cpu if every and subject.device == "cpu" else "")
        if lacking and not every:
            raise UserError(f"--vary {name}: {lacking}", "Leave it out here.")
        base = axis.value(subject)
        if lacking:
            varied.append(Varied(axis, base, note=lacking))
            continue
        values = [v for v in (wanted.get(name) or axis.values(subject)) if v != base]
        conditions = tuple((value, axis.apply(subject, value)) for value in dict.fromkeys(values))
        note = "" if conditions else f"there is no other value than {base}"
        if not conditions and not every:
            raise UserError(f"--vary {name}: {note}", "Name other values, such as --vary chunk=8:16.")
        varied.append(Varied(axis, base, conditions, note))
    return varied
