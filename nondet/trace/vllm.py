"""`nondet trace --engine vllm`: the first call inside vLLM, in eager mode, with equal inputs and different outputs.

A request runs solo and with others, each arm twice. Hashes of each layer's output, and of attention's keys and values,
are compared position by position; then the calls of the layer where they first differ: vLLM's modules and, inside of
them, the operators that reach torch's dispatcher, vLLM's own among them. Only the rows of the position are compared.
Attention reads the cache, which is not an argument: its contents for earlier positions were compared as inputs there.
Nothing is replaced, and no prefix is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from nondet.core.compare import row_hashes
from nondet.core.records import Culprit, TraceVerdict
from nondet.errors import UserError
from nondet.sampling.plan import PRESETS, Outcome, Request, Session, Span
from nondet.trace.against import MOST_BYTES, Call, Kept
from nondet.trace.align import Pair
from nondet.trace.capture import RowHashes, step_of
from nondet.trace.recorder import Event, Operators, Recorder, Slot, StepRecord, add_hooks, find_layers, tensors_in
from nondet.trace.search import Arm, NamedCall, Search, Site, logits_at_fault, named

if TYPE_CHECKING:
    from nondet.sampling.model import LoadedModel

_LISTED = 4  # prefills that are named
# classes of vLLM's: the attention layer, whose inputs are query, key and value, and what makes logits
_ATTENTION, _LOGITS = "Attention", "LogitsProcessor"


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

    def __getstate__(self) -> dict[str, Any]:
        """What is sent: modes and modules, under names with _, stay in their process."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class Coarse(RowHashes, Looker):
    """Hashes of each row of a step; no prefix is cached, so that each row is its request's own."""

    _spans: Sequence[Span] = ()

    def put(self, model: Any, parts: Callable[[], list[Span]], stack: ExitStack) -> None:
        """On the model, its layers, their attention, and what makes logits."""
        layers = find_layers(model)
        add_hooks(stack, model, lambda _, args, kwargs: self._begin(parts(), args, kwargs), self._end)
        add_hooks(stack, layers[0][1], lambda _m, args, kwargs: self.note("input", *self._floats([args, kwargs])))
        for i, (path, layer) in enumerate(layers):
            add_hooks(stack, layer, after=lambda _m, _a, _k, out, i=i: self.note(f"{i}.out", *self._floats(out)))
            for name, inner in model.named_modules():
                if name.startswith(f"{path}.") and type(inner).__name__ == _ATTENTION:
                    add_hooks(stack, inner, partial(self._keys, i))
        for _, module in model.named_modules():
            if type(module).__name__ == _LOGITS:
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

    def _keys(self, layer: int, _module: Any, args: Any, kwargs: Any) -> None:
        for name, tensor in zip("qkv", self._floats([args, kwargs]), strict=False):
            self.note(f"{layer}.{name}", tensor)

    def _end(self, *_: Any) -> None:
        self.keep(self._spans)

    def _logits(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        """A row for each request, of its last token in the step."""
        if isinstance(output, torch.Tensor) and len(output) == len(self._spans):
            for span, hashed in zip(self._spans, row_hashes(output.detach()).tolist(), strict=True):
                self.logits[span.request, span.first + span.rows - 1] = hashed


class Fine(Looker, Recorder):
    """Every call in one region in the step that computes one position, of that position's rows; `record` and `step`,
    its requests, are None and empty until it ran. The mode is on inside of the region's modules, of which some are
    called outside of the model's forward."""

    most_of_one = 2**26  # which no KV cache fits into

    def __init__(self, request: str, position: int, region: str) -> None:
        super().__init__(region)
        self.request, self.position = request, position
        self.record: StepRecord | None = None
        self.step: list[Span] = []

    def put(self, model: Any, parts: Callable[[], list[Span]], stack: ExitStack) -> None:
        """On the modules of the region, and a mode that sees the operators inside."""
        self._inside = Operators(self)
        add_hooks(stack, model, lambda *_: self._begin(parts()))
        self.watch(model, stack)

    def _begin(self, step: list[Span]) -> None:
        """Check whether the step is the one to record."""
        self._now, record = None, step_of(step, self.request, self.position)
        if record.row >= 0:
            record.predicted = [span.request for span in step].index(self.request)
            record.cut, self.record, self.step = True, record, step
            self.start(record)

    def _enter(self, *given: Any) -> None:
        if self._now is not None and not self._entered:
            self._inside.__enter__()
        super()._enter(*given)

    def _leave(self, *given: Any) -> Any:
        inside = self._now is not None and bool(self._entered)
        out = super()._leave(*given)
        if inside and not self._entered:
            self._inside.__exit__(None, None, None)
        return out

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its rows, if the first axis counts tokens."""
        record, count = self._now, tensor.shape[0] if tensor.dim() else 0
        if count == record.sizes.predicted != record.sizes.tokens:  # rows of the logits
            return tensor[record.predicted : record.predicted + 1]
        each, rest = divmod(count, record.sizes.tokens)  # a token's heads may have rows of their own
        return tensor if rest or not each else tensor[record.row * each : (record.row + 1) * each]

    def _noted(self, slot: Slot, _tensor: torch.Tensor) -> Slot:
        slot.value = None if slot.value is None else slot.value.cpu()  # it goes to another process
        return slot


class Whole(Looker):
    """Every module's call in each step of a session, in transformers' form, as a recording has them."""

    def __init__(self, most: int) -> None:
        self.kept = Kept(most)

    def put(self, model: Any, parts: Callable[[], list[Span]], stack: ExitStack) -> None:
        """On all modules."""
        packed = getattr(model, "packed_modules_mapping", {})

        def begin(*_: Any) -> None:
            self.kept.calls.append([])
            modules.start(StepRecord.whole())

        def seen(event: Event, out: Any) -> Any:
            self.kept.calls[-1] += in_transformers_form(event, packed, self.kept)
            return out

        modules = Recorder("", seen)
        add_hooks(stack, model, begin)
        modules.watch(model, stack)


def in_transformers_form(event: Event, packed: Mapping[str, Sequence[str]], kept: Kept) -> Iterator[Call]:
    """A module's call as transformers makes it: with an axis for the batch, a product for each of those that are
    `packed` in one, a norm of a sum that was made before it, and attention by heads. None where the module is given
    positions: transformers gives it cosines and sines."""
    module: Any = event.function
    path, kind, _ = event.key
    parent, _, name = path.rpartition(".")
    slots = [[slot.value for slot in of if slot.value is not None] for of in (event.inputs, event.outputs)]
    given, out = ([x[None] if x.is_floating_point() else x[None].long() for x in of] for of in slots)
    if module is None or not given or not out or (len(given) > 1 and not all(x.is_floating_point() for x in given)):
        return
    made, whole = {path: (given, out)}, kind != _ATTENTION
    if not whole:
        heads = [x.view(*x.shape[:2], -1, module.head_size) for x in (*given[:3], out[0])]
        made, kind = {parent: ([x.transpose(1, 2) for x in heads[:3]], heads[3:])}, "attention"
    elif name in packed:
        pieces = out[0].split(module.output_sizes, -1)
        made = {f"{parent}.{part}": (given, [piece]) for part, piece in zip(packed[name], pieces, strict=True)}
    elif kind.endswith("RMSNorm") and len(given) == len(out) == 2:
        made = {path: (out[1:], out[:1])}
    elif kind == _LOGITS:
        made = {"lm_head": (given, out)}
        kept.logits.append(kept.name(out[0], whatever=True))
    for where, (read, results) in made.items():
        inputs = {str(i): kept.name(x) for i, x in enumerate(read, 1 - whole)}  # a function is given its module first
        yield Call(where, kind, whole, inputs, [kept.name(x) for x in results], {})


def played(loaded: LoadedModel, impl: str, texts: Sequence[Sequence[int]]) -> Kept:
    """The forwards of vLLM over the texts, one request after the other. Raises UserError: it did not start, or its
    answers change when it is recorded."""
    from nondet.vllm.engine import VllmEngine

    longest = len(texts[-1]) + 1
    load = replace(PRESETS["none"], budget=longest)
    requests = [Request(f"t{i}", True, tuple(text), 1, i) for i, text in enumerate(texts)]
    arm, whole = Arm("recorded", requests[0].id, requests, load), cast("Any", Whole(MOST_BYTES))
    with closing(VllmEngine(loaded, load, longest)) as engine, engine.implementation(impl):
        sessions = arm.run(engine, every=True), arm.run(engine, whole, every=True)
    if (note := logits_at_fault(*sessions)) or not len(whole.kept.calls) == len(whole.kept.logits) == len(texts):
        raise UserError(note or "vLLM's steps are not one for each text", "Find out why: nondet trace --engine vllm.")
    kept: Kept = whole.kept
    return kept


class VllmTrace(Search):
    """A trace inside vLLM's process, where no token is forced and nothing replaced: it names the first call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lookers: dict[str, Fine] = {}  # arm's name -> its last fine pass

    def _implementation(self) -> AbstractContextManager[Any]:
        engine: Any = self.engine
        context: AbstractContextManager[Any] = engine.implementation(self.impl)
        return context

    def _weights(self) -> None:
        """They are in another process."""

    def _force(self, sessions: tuple[Session, Session], solo: Outcome) -> None:
        """Each request chooses its tokens again, so positions are compared up to the first that differs."""

    def _bare(self, arm: Arm, last: int | None) -> Session:
        return arm.run(self.engine)

    def _coarse(self, arm: Arm, last: int | None) -> tuple[RowHashes, Session]:
        capture: Any = Coarse()
        return capture, arm.run(self.engine, capture)

    def _fine(self, arm: Arm, owner: str, site: Site) -> tuple[StepRecord | None, list[StepRecord]]:
        looker: Any = Fine(owner, site.position, site.region)
        arm.run(self.engine, looker)
        self._lookers[arm.name] = looker
        return looker.record, []

    def _until_fixed(self, site: Site) -> TraceVerdict:
        self._name(1, site)
        self.left_out = "which replacements would make the arms agree is not tested inside vLLM"
        return self._end("batch-dependent")

    def _replayed(self, culprit: Culprit, pair: Pair, records: Sequence[StepRecord]) -> NamedCall:
        """The named call with the sizes that its step had, which the records were cut from."""
        self._control("step", None, _alongside(self._lookers[self.b.name]))
        given = [s for s in pair.a.inputs if not s.weight and s.dtype.is_floating_point and len(s.shape) > 1]
        shapes = [{slot.path: [record.sizes.tokens, *slot.shape[1:]] for slot in given} for record in records]
        axes = {slot.path: ["tokens", *[""] * (len(slot.shape) - 1)] for slot in given}
        kernels = [_operators_in(pair, record) for record in records]
        return NamedCall(named(culprit, pair, records, kernels=kernels, shapes=shapes, axes=axes))


def _operators_in(pair: Pair, record: StepRecord) -> list[str]:
    """The operators that an arm's module called, where the responsible call is a module; they are its kernels."""
    key, made = pair.a.key, [event.key for event in record.events]
    return [] if "::" in key.call else [k.call for k in made if k.module == key.module and "::" in k.call]


def _alongside(looker: Fine) -> str:
    """The other requests of the step, prefills first, because a decode seldom runs with one."""
    others = [part for part in looker.step if part.request != looker.request]
    prefills = [f"{part.request} ({part.rows} tokens from position {part.first})" for part in others if part.rows > 1]
    text = f"alongside {looker.request} that step computed {len(others) - len(prefills)} requests' next tokens"
    listed = ", ".join(prefills[:_LISTED]) + (", ..." if len(prefills) > _LISTED else "")
    return f"{text} and prefills of {listed}" if prefills else f"{text} and no prefill"
