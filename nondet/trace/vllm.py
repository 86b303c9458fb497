"""`nondet trace --engine vllm`: the first call inside vLLM, in eager mode, with equal inputs and different outputs.

A request runs solo and with others, each arm twice. Hashes of each layer's output, and of attention's keys and values,
are compared position by position; then the calls of the layer where they first differ: vLLM's modules and, inside of
them, the operators that reach torch's dispatcher, vLLM's own among them. Only the rows of the position are compared.
Attention reads the cache, which is not an argument: its contents for earlier positions were compared as inputs there.
Nothing is replaced, and no prefix is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nondet.core.compare import memory_of, row_hashes
from nondet.core.records import Control, Culprit, TraceVerdict
from nondet.errors import EngineStoppedError
from nondet.sampling.plan import Load, Request, Session, Span
from nondet.trace.align import Pair, first_responsible
from nondet.trace.capture import (
    RowHashes,
    Sizes,
    Slot,
    StepRecord,
    add_hooks,
    find_layers,
    modules_of,
    tensors_in,
    with_starts,
)
from nondet.trace.search import (
    AGREE,
    Site,
    Tracing,
    culprit_sentence,
    least_site,
    same_records,
    site_in_words,
    targets_that_differ,
    unnamed_culprit,
    verdict_sentences,
)
from nondet.vllm.engine import VllmEngine

_MOST_BYTES, _LISTED = 2**26, 4  # of one tensor's copy, which no KV cache fits into; prefills that are named
_CUT = Sizes(-1, -1, -1)  # every tensor was cut to the position's rows: no axis counts anything any more
_ATTENTION = "Attention"  # the class of vLLM's attention layer, whose inputs are query, key and value


def parts_of(batch: Any, counts: Mapping[str, int]) -> list[Span]:
    """The requests of the running step, in the order of its rows, with the scheduler's `counts` of their tokens.
    `batch` is the runner's: of its second version that of the step, of its first that of all requests it holds."""
    whole = getattr(batch, "num_computed_tokens_np", None)
    computed = batch.num_computed_tokens_cpu if whole is None else whole
    return [Span(r, int(computed[i]), counts[r], True) for i, r in enumerate(batch.req_ids) if r in counts]


@contextmanager
def batch_of(runner: Any) -> Iterator[Callable[[], Any]]:
    """A function that gives the running step's batch: the runner keeps one, or makes one per step."""
    if hasattr(runner, "input_batch"):
        yield lambda: runner.input_batch
        return
    made: list[Any] = [None]
    prepare = runner.prepare_inputs

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        made[0] = prepare(*args, **kwargs)
        return made[0]

    runner.prepare_inputs = prepare_inputs
    try:
        yield lambda: made[0]
    finally:
        del runner.prepare_inputs


class Looker:
    """An object that is sent into vLLM's process, records one round there, and is sent back with its records."""

    @contextmanager
    def attached(self, llm: Any, taken: Sequence[Any]) -> Iterator[None]:
        """Hooks on the model for one round."""
        [runner] = llm.collective_rpc(lambda worker: worker.model_runner)
        with ExitStack() as stack:
            batch = stack.enter_context(batch_of(runner))
            self.put(runner.get_model(), lambda: parts_of(batch(), taken[-1].num_scheduled_tokens), stack)
            yield

    def put(self, model: Any, parts: Callable[[], list[Span]], stack: ExitStack) -> None:
        """Add the hooks; closing the stack removes them."""
        raise NotImplementedError


class Coarse(RowHashes, Looker):
    """Hashes of each row of a step; no prefix is cached, so that each row is its request's own."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[Span] = []

    def put(self, model: Any, parts: Callable[[], list[Span]], stack: ExitStack) -> None:
        """On the model, its layers, their attention, and what makes logits."""

        layers = find_layers(model)
        add_hooks(stack, model, lambda _, args, kwargs: self._begin(parts(), args, kwargs), self._end)
        add_hooks(stack, layers[0][1], self._given("input"))
        for i, (path, layer) in enumerate(layers):
            add_hooks(stack, layer, after=lambda _m, _a, _k, out, i=i: self.note(f"{i}.out", *self._floats(out)))
            for name, inner in model.named_modules():
                if name.startswith(f"{path}.") and type(inner).__name__ == _ATTENTION:
                    add_hooks(stack, inner, self._given(f"{i}.q", f"{i}.k", f"{i}.v"))
        for _, module in model.named_modules():
            if type(module).__name__ == "LogitsProcessor":
                add_hooks(stack, module, after=self._logits)

    def _begin(self, step: list[Span], args: Any, kwargs: Any) -> None:
        self._step, self._spans = {}, step
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        wanted = [p for span in step for p in range(span.first, span.first + span.rows)]
        if positions is None or positions.dim() != 1 or positions[: len(wanted)].tolist() != wanted:
            raise RuntimeError("the rows of a step are not where vLLM's schedule puts them")

    def _floats(self, value: Any) -> list[torch.Tensor]:
        rows = sum(span.rows for span in self._spans)
        return [tensor[:rows] for _, tensor in tensors_in(value) if tensor.is_floating_point()]

    def _given(self, *names: str) -> Callable[..., None]:
        """Hash what a module is given: each tensor under its name, or all under the only one."""

        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            tensors = self._floats([args, kwargs])
            if len(names) == 1:
                self.note(names[0], *tensors)
            for name, tensor in zip(names, tensors, strict=False) if len(names) > 1 else ():
                self.note(name, tensor)

        return hook

    def _end(self, *_: Any) -> None:
        self.keep(self._spans)

    def _logits(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        """A row for each request, of its last token in the step."""
        if isinstance(output, torch.Tensor) and len(output) == len(self._spans):
            for span, hashed in zip(self._spans, row_hashes(output.detach()).tolist(), strict=True):
                self.logits[span.request, span.first + span.rows - 1] = hashed


class Fine(Looker):
    """Every call inside one layer in the step that computes one position, of that position's rows; `record` and `step`,
    its requests, are None and empty until it ran."""

    def __init__(self, request: str, position: int, region: str) -> None:
        self.request, self.position, self.region = request, position, region
        self.record: StepRecord | None = None
        self.step: list[Span] = []

    def put(self, model: Any, parts: Callable[[], list[Span]], stack: ExitStack) -> None:
        """On the modules of the region, and a mode that sees the operators inside."""
        recorder = _Recorder(self, model, parts)
        add_hooks(stack, model, recorder.begin)
        for path, module in modules_of(model, self.region):
            add_hooks(stack, module, recorder.enter(path), recorder.leave(path))


class _Recorder(TorchDispatchMode):
    """Modules by their hooks, and the operators that reach the dispatcher in them."""

    def __init__(self, looker: Fine, model: Any, parts: Callable[[], list[Span]]) -> None:
        super().__init__()
        self._looker, self._parts = looker, parts
        self._storages = {memory_of(t) for t in (*model.parameters(), *model.buffers())}
        self._open: list[tuple[str, list[Slot]]] = []
        self._fresh: set[int] = set()  # new storages without contents
        self._tokens = self._row = self._index = self._requests = 0
        self._now: StepRecord | None = None

    def begin(self, *_: Any) -> None:
        """Check whether the step is the one to record."""
        looker, step, self._now = self._looker, self._parts(), None
        for index, (start, part) in enumerate(with_starts(step)):
            if part.request == looker.request and part.first <= looker.position < part.first + part.rows:
                self._row, self._index = start + looker.position - part.first, index
                self._tokens, self._requests, looker.step = sum(p.rows for p in step), len(step), step
                looker.record = self._now = StepRecord(_CUT, 0, range(0), 0, cut=True)

    def enter(self, path: str) -> Callable[..., None]:
        """At the beginning of a module; the first one turns the mode on."""

        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            if self._now is not None:
                with _disable_current_modes():
                    slots = self._slots([*args, *([kwargs] if kwargs else [])])
                if not self._open:
                    self.__enter__()
                self._open.append((path, slots))

        return hook

    def leave(self, path: str) -> Callable[..., None]:
        def hook(module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
            if self._now is not None and self._open and self._open[-1][0] == path:
                _, slots = self._open.pop()
                if not self._open:
                    self.__exit__(None, None, None)
                with _disable_current_modes():
                    self._now.add(path, type(module).__name__, slots, self._slots({"out": output}))

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operator: what it writes is a result, what it reads an input."""
        kwargs, schema = kwargs or {}, func._schema
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return func(*args, **kwargs)  # a view: nothing is computed
        if "empty" in schema.name:  # it holds old memory
            out = func(*args, **kwargs)
            self._fresh.add(memory_of(out))
            return out
        given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
        fresh = {n for n in written if isinstance(given.get(n), torch.Tensor) and self._is_fresh(given[n])}
        read = {n: v for n, v in given.items() if n not in fresh}
        inputs = self._slots(read)
        out = func(*args, **kwargs)
        results = {"out": out} | {name: given[name] for name in sorted(written) if name in given}
        if self._now is not None:
            self._now.add(self._open[-1][0], schema.name, inputs, self._slots(results))
        return out

    def _is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether nothing was written to it yet; from now on something is."""
        storage = memory_of(tensor)
        known = storage in self._fresh
        self._fresh.discard(storage)
        return known

    def _slots(self, value: Any) -> list[Slot]:
        """The tensors, cut to the position's rows if their first axis counts tokens."""
        made = []
        for path, tensor in tensors_in(value):
            weight = memory_of(tensor) in self._storages
            mine = tensor.detach() if weight or not tensor.dim() else self._mine(tensor.detach())
            kept = not weight and mine.numel() * mine.element_size() <= _MOST_BYTES
            slot = Slot(path, tuple(mine.shape), tensor.dtype, weight, mine.clone().cpu() if kept else None)
            made.append(slot)
        return made

    def _mine(self, tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.shape[0]
        if count == self._requests != self._tokens:  # rows of the logits
            return tensor[self._index : self._index + 1]
        each, rest = divmod(count, self._tokens)  # a token's heads may have rows of their own
        return tensor if rest or not each else tensor[self._row * each : (self._row + 1) * each]


@dataclass(eq=False)
class VllmTrace(Tracing):
    """One trace: controls, the least position that differs, and the call there."""

    engine: VllmEngine
    load: Load
    impl: str  # "stock", "vllm-invariant" or "invariant"
    # solo, loaded: the requests of either arm; those under study in the second are its targets
    solo: Sequence[Request]
    loaded: Sequence[Request]

    def run(self) -> TraceVerdict:
        """The whole search. Raises EngineStoppedError: vLLM died, or a request failed in it."""
        with self.engine.implementation(self.impl):
            self.say("each arm twice, with hashes of every position and layer")
            coarse, sessions, cost = list[Coarse](), list[Session](), dict[str, float]()
            for name, title, arm in (("alone", "solo", self.solo), ("in company", "loaded", self.loaded)):
                bare, one, two = self._run(arm), Coarse(), Coarse()
                sessions.append(self._run(arm, one))
                self._run(arm, two)
                if same_records(one, two) is not None:
                    return self._run_to_run(f"arm {title}, repeated with the same batches, differs from itself")
                if _answers(bare) != _answers(sessions[-1]):
                    # the first session in the process, or the capture? a run without capture, but with forced tokens,
                    # decides
                    if _answers(self._run(arm)) == _answers(sessions[-1]):
                        return self._run_to_run(
                            f"arm {title}: its first session in this process differs from later ones with the same "
                            "batches: what ran before decides, not the batch"
                        )
                    note = f"the logprobs of arm {title} change when it is captured, so nothing else is reported"
                    self._control("capture", False, note)
                    return self._verdict("unknown", notes=[note])
                coarse.append(one)
                cost[name] = sessions[-1].seconds / max(bare.seconds, 1e-9)
            self._control("capture", True, "capture changes no logprob of either arm", cost)
            rows = sum(len(one.rows) for one in coarse)
            self._control("run to run", True, f"each arm twice: all records of {rows} rows agree")
            target = self.solo[0].id
            request = self._chosen(*sessions)
            names = [request] if request else [r.id for r in self.loaded if r.target]
            sites = [least_site(coarse[0], coarse[1], (target, name)) for name in names]
            site = min((s for s in sites if s is not None), key=lambda s: s.position, default=None)
            if site is None and not request:
                others = len(self.loaded) - 1
                return self._verdict("no divergence observed", notes=[f"{AGREE}, alongside {others} other requests"])
            if site is None:
                nowhere = Site((target, request), -1, "logits")
                note = "hidden states and logits agree and logprobs do not: what differs is vLLM's own softmax"
                return self._unnamed(nowhere, note)
            self.say(f"the calls at position {site.position}, {site_in_words(site)}")
            return self._compared(site)

    def _run_to_run(self, note: str) -> TraceVerdict:
        self._control("run to run", False, note)
        return self._verdict("run-to-run", notes=[note])

    def _run(self, arm: Sequence[Request], looker: Looker | None = None) -> Session:
        session = self.engine.run(arm, self.load, looker=looker)
        failed = [f"{o.request.id}: {o.reason}" for o in session.outcomes if o.reason]
        if session.fatal or failed:
            raise EngineStoppedError(session.fatal or failed[0])
        return session

    def _chosen(self, solo: Session, loaded: Session) -> str:
        """The first target that differs from the solo one; "" where none does."""
        count = sum(o.request.target for o in loaded.outcomes)
        differing = targets_that_differ(solo.outcomes[0], loaded)
        sentence = f"of {count} requests with this prompt under load, {len(differing)} differ from it solo"
        self._control("company", None, sentence, {"requests": count, "logprobs": len(differing)})
        return min((logprob, name) for logprob, _, name in differing)[1] if differing else ""

    def _compared(self, site: Site) -> TraceVerdict:
        """Name the responsible call at the position where the arms first differ."""
        lookers = [Fine(owner, site.position, site.region) for owner in site.owners]
        for arm, looker in zip((self.solo, self.loaded), lookers, strict=True):
            self._run(arm, looker)
        one, two = (looker.record for looker in lookers)
        if one is None or two is None:
            return self._unnamed(site, "an arm did not compute that position again")
        finding = first_responsible(one, two, [])
        if finding.responsible is None:
            return self._unnamed(
                site, f"{finding.compared} calls were compared and none has equal inputs and unequal outputs"
            )
        pair = finding.responsible
        tokens = [sum(part.rows for part in looker.step) for looker in lookers]
        given = [
            slot for slot in pair.a.inputs if not slot.weight and slot.dtype.is_floating_point and len(slot.shape) > 1
        ]
        culprit = msgspec.structs.replace(
            unnamed_culprit(site, len(self.solo[0].prompt), ""), **pair.a.key._asdict(),
            differences=dict(pair.unequal),
            kernels=[_operators_in(pair, record) for record in (one, two)],
            shapes=[{slot.path: [count, *slot.shape[1:]] for slot in given} for count in tokens],
            axes={slot.path: ["tokens", *[""] * (len(slot.shape) - 1)] for slot in given},
            unmatched=finding.unmatched, compared=finding.compared, not_understood=pair.not_understood,
        )  # fmt: skip
        sizes = [Sizes(count, 0, 0) for count in tokens]
        culprit = msgspec.structs.replace(culprit, sentence=culprit_sentence(culprit, sizes))
        self._control("step", None, _alongside(lookers[1]))
        return self._verdict("batch-dependent", [culprit])

    def _control(self, name: str, passed: bool | None, sentence: str, figures: dict[str, float] | None = None) -> None:
        self.keep(Control(name=name, passed=passed, sentence=sentence, figures=figures or {}))

    def _unnamed(self, site: Site, note: str) -> TraceVerdict:
        return self._verdict("batch-dependent", [unnamed_culprit(site, len(self.solo[0].prompt), note)])

    def _verdict(self, finding: str, culprits: Sequence[Culprit] = (), notes: Sequence[str] = ()) -> TraceVerdict:
        for culprit in culprits:
            self.keep(culprit)
        late = "which replacements would make the arms agree is not tested inside vLLM"
        sentences = verdict_sentences(finding, culprits, None, notes, late)
        return TraceVerdict(
            finding=finding, culprits=[c.sentence for c in culprits], families=None, sentences=sentences, seconds=0.0
        )


def _operators_in(pair: Pair, record: StepRecord) -> list[str]:
    """The operators that an arm's module called, where the responsible call is a module; they are its kernels."""
    key = pair.a.key
    if "::" in key.call:
        return []
    return [event.key.call for event in record.events if event.key.module == key.module and "::" in event.key.call]


def _answers(session: Session) -> list[tuple[list[int], bytes]]:
    return [(o.token_ids, o.logprobs) for o in session.outcomes]


def _alongside(looker: Fine) -> str:
    """The other requests of the step, prefills first, because a decode seldom runs with one."""
    others = [part for part in looker.step if part.request != looker.request]
    prefills = [f"{part.request} ({part.rows} tokens from position {part.first})" for part in others if part.rows > 1]
    text = f"alongside {looker.request} that step computed {len(others) - len(prefills)} requests' next tokens"
    listed = ", ".join(prefills[:_LISTED]) + (", ..." if len(prefills) > _LISTED else "")
    return f"{text} and prefills of {listed}" if prefills else f"{text} and no prefill"
