"""What an engine session did, step by step, and the figures counted from it."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nondet.core.launch import FirstUses
from nondet.errors import UserError
from nondet.sampling.plan import Outcome, Pace, Span

# A replay of a CUDA graph runs no Python, so a hook on the model runs only twice for each graph: in the step before its
# capture and during the capture. What it launches is in the graph. So it writes the two largest logits of a step to a
# ring of slots on the device and advances a counter there; the host reads the ring when it is full, and at the end.

_PLACES = 512


def two_largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (float32) and token ids (int64), [rows, 2], of logits [rows, vocabulary]; reads only. Maxima rather than
    topk: among equal values topk may choose by the number of rows."""
    rows = logits.float()
    first = rows.max(dim=-1, keepdim=True)
    second = rows.scatter(-1, first.indices, float("-inf")).max(dim=-1, keepdim=True)
    return torch.cat([first.values, second.values], -1), torch.cat([first.indices, second.indices], -1)


def requested_logits(kwargs: Mapping[str, Any], output: Any) -> torch.Tensor:
    """[rows, vocabulary]: a model without logits_to_keep gives a row for every query token."""
    logits: torch.Tensor = output.logits[0]
    wanted = kwargs["logits_indices"]
    return logits if logits.shape[0] == wanted.shape[0] else logits[wanted]


class TopRing:
    """Slots for the two largest logits of `rows` rows, padding included, in each of many steps."""

    def __init__(self, rows: int, device: torch.device, places: int = _PLACES) -> None:
        self.places = places
        self._values = torch.zeros(places, rows, 2, dtype=torch.float32, device=device)
        self._ids = torch.zeros(places, rows, 2, dtype=torch.int64, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._read = 0

    def write(self, logits: torch.Tensor) -> None:
        """Launch what keeps the step's two largest of logits [rows, vocabulary], and advances the counter."""
        values, ids = two_largest(logits)
        place = self._steps % self.places
        self._values[:, : len(values)].index_copy_(0, place, values[None])
        self._ids[:, : len(ids)].index_copy_(0, place, ids[None])
        self._steps += 1

    def full(self, steps: int) -> bool:
        """Whether the next step, after `steps` in all, would overwrite an unread one."""
        return steps - self._read >= self.places

    def read(self, rows: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The unread steps, on the host: the first `rows` of each. A step that crashed has left none."""
        values, ids, ran = self._values.cpu(), self._ids.cpu(), int(self._steps)
        if ran > len(rows):
            raise RuntimeError(f"{ran} forwards for {len(rows)} steps: which step a margin belongs to is not known")
        steps, self._read = range(self._read, ran), ran
        places = [(step % self.places, rows[step]) for step in steps]
        return [(values[place, :count].clone(), ids[place, :count].clone()) for place, count in places]


# Whether the engine serves a model: every layer has to write its keys to the paged cache, once per step.
#
# transformers packs the requests of a step into one row, and its attention functions fill the cache and separate the
# requests. A model whose layers compute attention by code of their own (Falcon), have another state than keys
# (RecurrentGemma), or call those functions twice (DiffLlama, whose second values replace the first ones) runs without
# an error. Its requests then read each other's tokens, or forget their own past, so the output depends on the batch.


class UnservedError(UserError):
    """Layers of the model bypass the engine's cache, or overwrite what they have there."""


class KeptKeys:
    """How often each layer writes keys into a session's cache in its first step."""

    def __init__(self) -> None:
        self._cache: weakref.ref[Any] | None = None  # the closure below must not hold a cache's memory
        self._written: Counter[int] = Counter()

    def watch(self, cache: Any) -> None:
        """Count this cache's updates from now on, until `check`."""
        self._cache = weakref.ref(cache)
        own: Any = self._cache
        self._written.clear()

        def update(*args: Any, **kwargs: Any) -> Any:
            self.note(kwargs["layer_idx"] if "layer_idx" in kwargs else args[2])
            return type(own()).update(own(), *args, **kwargs)  # the class's current method: a trace changes it

        cache.update = update
        cache.note_written = self.note  # for attention that writes without `update`

    def note(self, layer: int) -> None:
        """Count one write of that layer."""
        self._written[layer] += 1

    def check(self) -> None:
        """After the step, later calls do nothing: an `UnservedError` if a layer wrote no keys, or more than once."""
        cache = None if self._cache is None else self._cache()
        self._cache = None
        if cache is None:
            return
        del cache.update, cache.note_written
        # all groups of the cache; 5.17 and 5.23 name them differently
        names = ("layer_to_allocator", "layer_index_to_group_indices")
        layers = set(next(getattr(cache, name) for name in names if hasattr(cache, name)))
        absent = sorted(layers - set(self._written))
        again = sorted(layer for layer, times in self._written.items() if times > 1)
        if absent or again:
            what = f"layer {absent[0]} keeps no keys" if absent else f"layer {again[0]} overwrites its own keys"
            raise UnservedError(
                f"transformers' continuous batching does not serve this model: {what} in the engine's cache "
                f"({len(absent or again)} of {len(layers)} layers), so that no completion would be the model's own",
                "Choose another model, or compare its own forward pass with nondet.check.",
            )


@dataclass
class SessionLog:
    """The steps of one session."""

    arrivals: dict[str, int]
    clock: int = 0  # the current engine step. It skips steps before the next arrival
    steps: int = 0
    rows: list[list[str]] = field(default_factory=list)  # requests that get a token, in the order of the logits' rows
    top: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # float32 logits, int64 ids, [rows, 2]
    packs: dict[int, tuple[Span, ...]] = field(default_factory=dict)  # step -> its requests, in the order of rows
    # request -> the tokens that it is fed, whatever it chose
    forced: Mapping[str, Sequence[int]] = field(default_factory=dict)
    cut: Callable[[], bool] = lambda: False  # whether nothing more is to be scheduled
    page: int = 0  # tokens in a page of the cache, and CPU threads, as the engine's own thread has them
    threads: int = 0
    admitted: list[str] = field(default_factory=list)  # by first steps; a preempted one appears again
    preempted: list[str] = field(default_factory=list)  # requests that lost their cache, once for each time
    ended: float = 0.0  # clock time of the last request's end
    first_uses: FirstUses = field(default_factory=FirstUses)  # not part of any step's time
    marks: list[float] = field(default_factory=list)
    captures: set[int] = field(default_factory=set)  # steps in which a CUDA graph was captured, from 0
    ring: TopRing | None = None
    kept: KeptKeys = field(default_factory=KeptKeys)  # layers' keys in the first step; not seen under CUDA graphs
    graphs: bool = False  # a step that captures runs the model more than once, a replay no Python
    drafted: int = 0  # speculated tokens, over all requests
    accepted: int = 0

    @property
    def pack(self) -> tuple[Span, ...]:
        """The requests of the step that runs now."""
        return self.packs[self.clock - 1]

    def record_step(self, scheduled: Iterable[Any]) -> None:
        """Note the batch of the step that runs next (transformers' FutureRequestStates)."""
        self.marks.append(time.perf_counter())
        self.packs[self.clock] = tuple(
            Span(f.state.request_id, f.state.position_offset, f.query_length, f.has_new_token) for f in scheduled
        )
        self.rows.append([span.request for span in self.packs[self.clock] if span.new])
        self.steps += 1
        self.clock += 1
        self.ended = time.perf_counter()

    def before_step(self, cache: Any, states: Iterable[Any]) -> None:
        """Check the engine's cache, make room in the ring, and give active RequestStates their forced tokens."""
        # transformers 5.17 calls a page a block
        self.page = int(getattr(cache, "block_size", 0) or next(iter(cache.cache_allocators.values())).tokens_per_page)
        self.threads = torch.get_num_threads()
        if self.steps:
            self.kept.check()
        elif not self.graphs:
            self.kept.watch(cache)
        if self.ring is not None and self.ring.full(self.steps):
            self.drain()
        for state in states:
            tokens = self.forced.get(state.request_id)
            done = len(state.generated_tokens)
            if tokens is not None and 0 < done <= len(tokens):
                state.generated_tokens[-1] = tokens[done - 1]
                state.tokens_to_process = [tokens[done - 1]]

    def record_logits(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: keep the two largest logits of each row. Reads only, so no bit of the model's changes."""
        # one row for each request of the batch; those after the requests that get a token are padding
        self.top.append(two_largest(requested_logits(kwargs, output)[: len(self.rows[-1])]))

    def note_capture(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: the model's Python runs in this step, so what is launched here is captured into a graph."""
        self.captures.add(self.steps - 1)
        if self.ring is not None:
            self.ring.write(requested_logits(kwargs, output))

    def drain(self) -> None:
        """Read what the graphs have kept since the last time; between steps."""
        if self.ring is not None:
            self.top += self.ring.read([len(names) for names in self.rows])

    def tops(self) -> dict[str, list[tuple[float, float, int, int]]]:
        """Request id -> (top-1 and top-2 logit, their token ids) of each generated token."""
        found: dict[str, list[tuple[float, float, int, int]]] = {}
        if not self.top:
            return found
        names = [name for rows in self.rows[: len(self.top)] for name in rows]  # a step that crashed has no logits
        values = torch.cat([v for v, _ in self.top]).cpu().tolist()
        tokens = torch.cat([t for _, t in self.top]).cpu().tolist()
        for name, best, chosen in zip(names, values, tokens, strict=True):
            found.setdefault(name, []).append((*best, *chosen))
        return found

    def pace(self) -> list[Pace]:
        """Each step's time and tokens. The last one is over when its last request is."""
        ends = [*self.marks[1:], max(self.ended, self.marks[-1])] if self.marks else []
        spans = zip(self.marks, ends, self.rows, strict=True)
        return [
            Pace(self.spent(mark, end), len(names), i in self.captures) for i, (mark, end, names) in enumerate(spans)
        ]

    def spent(self, begin: float, end: float) -> float:
        """Seconds between two clock times, without those of first uses."""
        return max(0.0, end - begin - self.first_uses.within(begin, end))


def run_lengths(entries: Iterable[tuple[int, int]]) -> list[list[int]]:
    """[(step, query tokens), ...] -> [[first_step, steps, query_tokens], ...] over neighbouring steps of equal size."""
    runs: list[list[int]] = []
    for step, tokens in entries:
        if runs and runs[-1][0] + runs[-1][1] == step and runs[-1][2] == tokens:
            runs[-1][1] += 1
        else:
            runs.append([step, 1, tokens])
    return runs


Parts = dict[str, list[tuple[int, Span]]]  # request -> (step, its rows in it), in the order of steps


def parts_of(packs: Mapping[int, Sequence[Span]]) -> Parts:
    """The steps of each request."""
    parts: Parts = {}
    for step, pack in packs.items():
        for span in pack:
            parts.setdefault(span.request, []).append((step, span))
    return parts


def scheduled(outcomes: Sequence[Outcome], parts: Parts, log: SessionLog) -> list[Outcome]:
    """The outcomes with their schedules, and with the sizes of the batches that they were in."""
    batch = {step: sum(span.rows for span in pack) for step, pack in log.packs.items()}
    made = []
    for outcome in outcomes:
        mine = parts.get(outcome.request.id, [])
        sizes = [batch[step] for step, _ in mine] or [0]
        schedule = run_lengths((step, span.rows) for step, span in mine)
        made.append(replace(outcome, schedule=schedule, batch_min=min(sizes), batch_max=max(sizes)))
    return made


def session_figures(outcomes: Sequence[Outcome], log: SessionLog, parts: Parts) -> dict[str, int]:
    """Counts of one session; requests that failed or were cut are left out of the counts of tokens. The engine adds
    "ran dtype X", "ran attention X" and "ran threads N"."""
    lost, good = set(log.preempted), [o for o in outcomes if o.finish not in ("error", "cut")]
    figures = Counter(
        page=log.page,  # tokens in a page, as the engine's cache has it
        step_most=max((sum(span.rows for span in pack) for pack in log.packs.values()), default=0),  # query tokens
        cached=0,  # positions that were not computed for the request, because another request's page had them
        hits=0,  # requests under study with such positions
        piece_most=0,  # prompt tokens of one request in one step
        in_pieces=0,  # requests under study whose prompt took several steps
        recomputed=0,  # positions computed more than once because their request lost its cache
        preempted=len(log.preempted),  # times that one did
        preempted_targets=sum(o.request.target and o.request.id in lost for o in outcomes),
        drafted=log.drafted,
        accepted=log.accepted,
        graphs=int(log.graphs),
        order=admission_number(log.admitted),
    )
    for outcome in good:
        request = outcome.request
        mine = [(span.first, span.rows) for _, span in parts.get(request.id, ())]
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
            figures["in_pieces"] += len(prefill) > 1 and request.id not in lost
    return dict(figures)


def admission_number(admitted: Sequence[str]) -> int:
    """A number that identifies an order of admission, small enough for every reader of JSON."""
    return int(hashlib.sha256(" ".join(admitted).encode()).hexdigest()[:12], 16)


def summed_figures(rounds: Sequence[Mapping[str, int]]) -> Counter[str]:
    """Figures over rounds: sums, and maxima of "page" and of names that end in "_most"; without "order"."""
    total: Counter[str] = Counter()
    for figures in rounds:
        for name, value in figures.items():
            most = name == "page" or name.endswith("_most")
            total[name] = max(total[name], value) if most else total[name] + value
    total.pop("order", None)
    return total
