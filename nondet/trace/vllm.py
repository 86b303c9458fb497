"""`nondet trace --engine vllm`: the first call inside vLLM, in eager mode, with equal inputs and different outputs.

A request runs solo and with others, each arm twice. Hashes of each layer's output, and of attention's keys and values,
are compared position by position; then the calls of the layer where they first differ: vLLM's modules and, inside of
them, the operators that reach torch's dispatcher, vLLM's own among them. Only the rows of the position are compared.
Attention reads the cache, which is not an argument: its contents for earlier positions were compared as inputs there.
Nothing is replaced, and no prefix is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from nondet.core.compare import row_hashes
from nondet.core.records import Culprit, TraceVerdict
from nondet.sampling.plan import Outcome, Session, Span
from nondet.trace.align import Pair
from nondet.trace.capture import RowHashes, step_of
from nondet.trace.recorder import Operators, Recorder, Slot, StepRecord, add_hooks, find_layers, tensors_in
from nondet.trace.search import Arm, NamedCall, Search, Site, named

_LISTED = 4  # prefills that are named
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
        self.late = "which replacements would make the arms agree is not tested inside vLLM"
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
