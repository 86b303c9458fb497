"""The axes of `nondet sample --vary`: what is varied by itself, over which values, and what proves its effect."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

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


class Proof(NamedTuple):
    """Whether a value took effect, and the figures that show it."""

    holds: bool
    text: str


# What transformers' continuous batching takes without further packages; it refuses flex attention and others.
ATTENTIONS = ("sdpa", "eager")
_DTYPES = ("bfloat16", "float16", "float32")
_REPLICAS = 3
# The draft model recomputes the end of each text for every drafted token, so it drafts few.
_DRAFTED = {"lookup": 4, "draft": 2, "model": 2, "edit": 4}
CHANGES = {  # what is varied, a phrase
    "sharing": "whether requests share the cached pages of a common prefix",
    "chunk": "the most prompt tokens of one request in one step: a long prefill comes in pieces",
    "budget": "the query tokens that one step may take",
    "page": "the tokens in a page of the KV cache",
    "scheduler": "which request is admitted first: by arrival, the shortest, longest prefix match, deficit round robin",
    "preemption": "the cache's size: room for so many of the largest requests; others are evicted and recomputed",
    "speculative": "where drafts come from: none, prompt lookup, half of the layers, another model, an edited text",
    "routing": f"which of {_REPLICAS} replicas serves a request: in turn, by prefix and load, by prefix and deficit",
    "graphs": "whether steps run as CUDA graphs, padded to a few sizes",
    "dtype": "the dtype of weights and activations; the weights in hand are cast",
    "attention": "the model's attention implementation",
    "threads": "the CPU threads",
    "ranks": "the number of ranks that the model is cut over by its tensor-parallel plan",
}
_VLLM = ("sharing", "chunk", "budget", "page", "graphs")  # axes that vLLM has as well


@dataclass(frozen=True)
class Axis:
    """One axis: a field of the conditions, and the values that it takes."""

    name: str
    field: str  # of `Conditions`, such as "load.page"
    tried: tuple[str, ...] = ()  # default values, see `values`
    known: tuple[str, ...] = ()  # the values that there are; () for numbers
    plain: str = ""  # what the field's default is called
    most: int = 1_000_000
    # whether an invariant engine gives one trace over all values. Over dtypes, for example, it does not: only the
    # completions at one value are then compared.
    held: bool = True
    held_by: tuple[str, ...] = ()  # implementations that should give one trace even though `held` is False

    def value(self, subject: Subject) -> str:
        """The base's."""
        part, _, name = self.field.rpartition(".")
        now = getattr(getattr(subject.base, part) if part else subject.base, name)
        if isinstance(now, bool):
            return "on" if now else "off"
        return str(now or self.plain or subject.threads)

    def values(self, subject: Subject) -> Sequence[str]:
        """Default values, the base's among them or not; none where the axis has none here."""
        s, budget = subject, subject.base.load.budget
        left_out = {"draft": not s.halves, "model": not s.draft_model}
        ranks_most = s.gpus if s.device == "cuda" else 4
        return {
            "budget": [str(n) for n in (budget // 4, budget // 2, 2 * budget) if n >= 8],
            "page": [str(s.grain * n) for n in (1, 2, 4)] if s.grain else self.tried,
            "speculative": [name for name in DRAFTERS if not left_out.get(name)],
            "threads": [str(n) for n in (1, 2, 4) if n <= max(2, s.threads)],
            "ranks": [str(n) for n in (2, 4) if n <= ranks_most and not s.heads % n],
        }.get(self.name, self.tried)

    def apply(self, subject: Subject, value: str) -> Conditions:
        """The base conditions at another value; a `UserError` of an invalid one."""
        part, _, name = self.field.rpartition(".")
        new: Any = value
        if value == self.plain:
            new = "" if self.known else None
        elif not self.known:
            least = 4 if self.name == "page" else 1
            if not (value.isascii() and value.isdigit()) or not least <= int(value) <= self.most:
                hint = f"Give whole numbers from {least} to {self.most}, such as {self.name}=16:32."
                raise UserError(f"--vary: {self.name}={value} makes no sense", hint)
            new = int(value)
        elif value not in self.known:
            raise UserError(
                f"--vary: {self.name}={value} is unknown", suggestion(value, {*self.known, self.plain} - {""})
            )
        if self.known == ("on", "off"):
            new = value == "on"
        changes = {name: new} | _further(self.name, subject, new)
        base = subject.base
        return replace(base, **{part: replace(getattr(base, part), **changes)} if part else changes)

    def proof(self, value: str, seen: Seen, base: Seen) -> Proof:
        """Whether a value took effect, from the figures of its sessions and of the base's."""
        s, n, prefix = seen, int(value) if value.isdigit() else 0, f"ran {self.name} "
        ran = sorted(name.removeprefix(prefix) for name in seen if name.startswith(prefix))
        used, largest = s["replicas_most"], s["piece_most"]
        replicas = f"{used} replicas served completions, {s['cached']} positions came from their caches"
        elsewhere = Proof(s["rerouted"] > 0, f"{replicas}; {s['rerouted']} requests went elsewhere than in turn")
        turns = {"single": Proof(used <= 1, replicas), "round-robin": Proof(used > 1, replicas)}
        over_ranks = Proof(
            s["ranks_most"] == n and s["share_most"] > 0,
            f"{s['ranks_most'] or 1} ranks came to the same ids and logprobs, the first with {s['share_most']:,} "
            "parameters of the model",
        )
        proofs = {
            "sharing": (
                # where the base took nothing from the cache either, "off" changed nothing
                s["hits"] > 0 if value == "on" else s["cached"] == 0 < base["cached"],
                f"{s['cached']} positions came from the cache, {s['hits']} completions took some",
            ),
            "chunk": (
                value == "none" or (s["in_pieces"] > 0 and largest <= n < base["piece_most"]),
                f"{s['in_pieces']} prompts under study came in pieces, the largest piece had {largest} tokens "
                f"({base['piece_most']} at the base)",
            ),
            "budget": (
                s["step_most"] <= n and s["step_most"] != base["step_most"],
                f"the largest step had {s['step_most']} tokens ({base['step_most']} at the base)",
            ),
            "page": (
                s["page"] == n,
                f"the engine's cache has pages of {s['page']} tokens; {s['cached']} positions came from it",
            ),
            "scheduler": (
                s["reordered"] > 0,
                f"requests were admitted in another order than at the base in {s['reordered']} of {s['rounds']} rounds",
            ),
            "preemption": (
                s["preempted"] == 0 if value == "ample" else s["preempted_targets"] > 0 and s["recomputed"] > 0,
                f"{s['preempted']} times a request lost its cache, {s['preempted_targets']} times one under study; "
                f"{s['recomputed']} positions were computed again",
            ),
            "speculative": (
                s["drafted"] == 0 if value == "none" else s["accepted"] > 0,
                f"{s['accepted']} of {s['drafted']} drafted tokens were accepted",
            ),
            "routing": turns.get(value, elsewhere),
            "graphs": (
                s["graphs"] > 0 if value == "on" else s["graphs"] == 0 < base["graphs"],
                "steps ran as CUDA graphs" if s["graphs"] else "steps ran one by one",
            ),
            "ranks": (s["ranks_most"] <= 1, "one process had the whole model") if n == 1 else over_ranks,
        }
        ran_with = ran == [value], f"the engine ran with {self.name} {', '.join(ran) or 'unknown'}"
        return Proof(*proofs.get(self.name, ran_with))

    def lacking(self, subject: Subject, every: bool) -> str:
        """Why this device or engine has no such axis, or `--vary all` leaves it out; "" where neither holds."""
        s, cuda, ranks = subject, subject.device == "cuda", ""
        if s.grain and self.name not in _VLLM:
            return f"vLLM is varied along {', '.join(_VLLM)}"
        if cuda and s.gpus < 2:
            ranks = "there is one GPU here"
        elif importlib.util.find_spec("accelerate") is None:
            ranks = "the package accelerate is missing, by which a model is loaded in shares"
        elif every and not cuda:
            ranks = "on a CPU ranks are processes, and starting them takes longer than all other axes: name it"
        return {
            "speculative": "drafts can't be verified inside of CUDA graphs" if s.base.load.graphs else "",
            "graphs": "" if cuda else "CUDA graphs need a CUDA device",
            "threads": "threads decide nothing on a CUDA device" if cuda else "",
            "ranks": ranks,
        }.get(self.name, "")


def _further(axis: str, subject: Subject, new: Any) -> dict[str, Any]:
    """What follows for the conditions from a value; a `UserError` where it does not go with the subject."""
    if axis == "page" and subject.grain and new % subject.grain:
        what = f"--vary: page={new}: vLLM's pages are multiples of {subject.grain} here"
        raise UserError(what, f"Write page={subject.grain}:{2 * subject.grain}, say.")
    if axis == "preemption" and new:
        page = subject.base.load.page
        largest = max((ceil((len(r.prompt) + r.max_new_tokens) / page) + 1 for r in subject.requests), default=1)
        return {"pages": new * largest + 4}
    if axis == "routing":
        return {"replicas": _REPLICAS if new else 1}
    if axis == "speculative" and new:
        if new == "draft" and not subject.halves:
            what = "--vary: speculative=draft: the model's layers are not where a draft model could be made of them"
            raise UserError(what, "Leave it out: --vary speculative=lookup:edit.")
        if new == "model" and not subject.draft_model:
            raise UserError("--vary: speculative=model needs a draft model", "Name it: --draft-model FOLDER.")
        draft_model = subject.draft_model if new == "model" else ""
        return {"draft_tokens": _DRAFTED[new], "draft_model": draft_model, "earlier": subject.earlier}
    if axis == "ranks":
        from nondet.ranks.group import check_ranks

        if new > 1:
            check_ranks([new], subject.device, subject.gpus)
        if subject.heads % new:
            what = f"--vary: ranks={new}: the model's heads and key heads can be cut by {subject.heads} at most"
            raise UserError(what, "Give a number that divides them.")
    return {}


_ON_OFF = ("on", "off")
_AXES = (
    Axis("sharing", "load.sharing", _ON_OFF, _ON_OFF),
    Axis("chunk", "setting.chunk", tried=("5", "16", "24"), plain="none"),
    Axis("budget", "load.budget"),
    Axis("page", "load.page", tried=("4", "8", "16", "32")),
    Axis("scheduler", "setting.order", tried=tuple(ORDERS), known=tuple(ORDERS)),
    Axis("preemption", "setting.pages", tried=("2", "1"), plain="ample", most=10_000),
    Axis("speculative", "setting.drafts", known=DRAFTERS, plain="none"),
    Axis("routing", "routing", tried=tuple(POLICIES), known=tuple(POLICIES), plain="single"),
    Axis("graphs", "load.graphs", _ON_OFF, _ON_OFF),
    Axis("dtype", "dtype", tried=_DTYPES, known=_DTYPES, held=False),
    Axis("attention", "setting.attention", ATTENTIONS, ATTENTIONS, "sdpa", held=False),
    Axis("threads", "threads", most=max(2, os.cpu_count() or 1), held=False),
    Axis("ranks", "ranks", most=64, held=False, held_by=("rank-free",)),
)
AXES: dict[str, Axis] = {axis.name: axis for axis in _AXES}
ALL = "all"


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
            hint = f"Write {name}=VALUE, or {name} without = for its default values."
            raise UserError(f"--vary: {part!r} lacks a value", hint)
        wanted[name] = values
    return wanted


def plan_axes(wanted: dict[str, list[str]], subject: Subject) -> list[Varied]:
    """The axes with values and conditions; a `UserError` of a named one that is lacking, or an invalid value."""
    every = ALL in wanted
    varied = []
    for name in AXES if every else wanted:
        axis = AXES[name]
        base, note, hint = axis.value(subject), axis.lacking(subject, every), "Leave it out here."
        conditions: tuple[tuple[str, Conditions], ...] = ()
        if not note:
            values = [v for v in (wanted.get(name) or axis.values(subject)) if v != base]
            conditions = tuple((value, axis.apply(subject, value)) for value in dict.fromkeys(values))
            note = "" if conditions else f"there is no other value than {base}"
            hint = "Name other values, such as --vary chunk=8:16."
        if note and not every:
            raise UserError(f"--vary {name}: {note}", hint)
        varied.append(Varied(axis, base, conditions, note))
    return varied
