"""Two implementations, operator by operator: a recording that one environment writes, and another compares itself with.

A recording is one file of safetensors: for given tokens, in forwards of several lengths, every call of a model with
its inputs and results, as `nondet.trace.capture` sees them. The other side makes each of its own calls once more with
the recorded inputs, so that a difference is the call's own and not inherited. Then it runs from end to end, with the
results of some operators taken from the recording wherever their inputs have the recorded bits: if the logits become
the recorded ones, these operators are the whole difference.

A recording may come from anybody. It is safetensors and never a pickle, its tables are decoded into the types below,
and each tensor must have the digest by which it is named.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nondet.core.compare import difference, identical, value_digest
from nondet.core.records import Control, Count, Difference, OperatorCompared, Record, TraceVerdict
from nondet.core.runfile import read_whole, regular, replacing
from nondet.core.statistics import one_sided_bound
from nondet.core.watch import bound_of
from nondet.errors import UserError, one_line, reason_of
from nondet.trace.align import aligned
from nondet.trace.capture import (
    Event,
    EventKey,
    FineCapture,
    Sizes,
    Slot,
    StepRecord,
    changed_tensors,
    copied,
    find_layers,
    tensors_in,
)

MOST_BYTES = 2 * 2**30  # of tensors in a recording; calls beyond are listed without their numbers
_MOST_TABLES = 64 * 2**20  # bytes of a recording's header
_FORMAT = "nondet-operators-1"
_ROTARY = "apply_rotary_pos_emb"  # a function of the model's file, whatever has its name there
_SINGLES_MOST = 8  # operators that are taken from the recording one at a time
_MODULE = "(module)"  # what the call of a module as a whole is aligned by: its class may have another name
Text = Annotated[str, Meta(max_length=400)]


class Operand(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a call."""

    path: Text
    shape: Annotated[list[Count], Meta(max_length=16)]
    dtype: Text
    tensor: Text  # its name in the file, which is its digest; of a weight only the digest; "" where it was left out
    weight: bool


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call of a model."""

    module: Text
    name: Text
    whole: bool  # whether it is a module's, with all calls inside
    inputs: list[Operand]
    outputs: list[Operand]
    constants: dict[Text, Text]  # arguments that are not tensors, as Python writes them
    weights: Text  # digest of a module's parameters

    def event(self, names: Mapping[str, str]) -> Event:
        """The call without numbers, its module by the name that the other model has for it."""
        return Event(EventKey(renamed(self.module, names), _MODULE if self.whole else self.name, 0), [], [])


class Recorded(msgspec.Struct, frozen=True):
    """What a recording says about itself."""

    format: str
    tokens: Annotated[list[Count], Meta(min_length=1, max_length=2**17)]
    lengths: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=1, max_length=8)]
    calls: list[list[Call]]  # of each forward, in the order in which they end
    logits: list[Text]  # of each forward
    left_out: Count  # calls without their numbers
    dtype: Text
    threads: Count
    made_by: Text  # the model, what computed, and where, for people


class _Calls(FineCapture):
    """The calls of one region in a plain forward pass. Each is given to `seen` as it ends, with its result; what that
    returns takes the result's place."""

    def __init__(self, region: str, seen: Callable[[Event, Any], Any], busy: list[Event]) -> None:
        super().__init__("", 0, region, opaque_attention=True)
        self._seen, self._busy = seen, busy  # the call that is with `seen`, which all regions share: it may repeat it
        self.pack = ()  # of a step's log: there is no schedule here

    @contextmanager
    def attached(self, model: Any, log: Any) -> Iterator[None]:
        """As of the base, and around functions of the models' files that are more than torch's."""
        files = {sys.modules[type(module).__module__] for module in model.modules()}
        wraps = {_ROTARY: self._rotary, "eager_attention_forward": self._attention}
        with super().attached(model, log), ExitStack() as stack:
            for file, (name, wrap) in ((file, item) for file in files for item in wraps.items()):
                if (original := getattr(file, name, None)) is not None:
                    setattr(file, name, wrap(original))
                    stack.callback(setattr, file, name, original)
            try:
                yield
            finally:
                self._end()

    @property
    def _idle(self) -> bool:
        return self._now is None or bool(self._paused)

    def _begin(self, *_: Any) -> None:
        if not self._busy:
            self._start(StepRecord(Sizes(0, 0, 0), 0, range(0), 0))

    def _end(self, *_: Any) -> None:
        if not self._busy:
            super()._end()

    def _taken(self, out: Any) -> Any:
        """The result of the call that was recorded last, if any was."""
        if not self._record.events:
            return out
        self._paused += 1
        self._busy.append(self._record.events.pop())
        try:
            return self._seen(self._busy[-1], out)
        finally:
            self._busy.clear()
            self._paused, self._bytes = self._paused - 1, 0

    def _leave(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if self._idle or not self._entered:
            return output
        super()._leave(module, args, kwargs, output)
        return self._taken(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        return out if self._idle else self._taken(out)

    def _rotary(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._idle:
                return original(*args, **kwargs)
            self._paused += 1
            copies: dict[int, torch.Tensor] = {}
            inputs = self._slots((*args, kwargs), copies)
            out = original(*args, **kwargs)
            event = self._record.add(self._where(), _ROTARY, inputs, self._slots({"out": out}))
            event.function = original
            event.args, event.kwargs = copied(args, copies), copied(kwargs, copies)
            self._paused -= 1
            return self._taken(out)

        return run

    def _attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recording = super()._attention(original)

        @functools.wraps(original)
        def run(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if self._idle:
                return original(module, query, key, value, mask, *args, **kwargs)
            out = recording(module, query, key, value, mask, *args, **kwargs)
            event = self._record.events[-1]
            given = {slot.path: slot.value for slot in event.inputs}
            names = ("query", "key", "value", "attention_mask")
            event.args = tuple(given.get(name, mask) for name in names)
            event.function = lambda *tensors: original(module, *tensors, *args, **kwargs)[0]
            for slot in event.inputs:
                slot.path = str(names.index(slot.path))
            return self._taken(out)

        return run

    def _slots(self, value: Any, copies: dict[int, torch.Tensor] | None = None) -> list[Slot]:
        slots = super()._slots(value, copies)
        for slot, (_, tensor) in zip(slots, tensors_in(value), strict=True):
            slot.value = tensor.detach() if slot.weight else slot.value
            if tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor):
                slot.layout = tensor.stride(), tensor.data_ptr() % 64 // tensor.element_size()
        return slots


def forward(model: Any, tokens: Sequence[int], seen: Callable[[Event, Any], Any] | None = None) -> torch.Tensor:
    """The logits of a plain forward pass, [1, tokens, vocabulary], each of whose calls `seen` gets."""
    ids = torch.tensor([[*tokens]], device=model.device)
    with torch.no_grad(), ExitStack() as stack:
        regions = ("embedding", *map(str, range(len(find_layers(model)))), "head") if seen is not None else ()
        busy: list[Event] = []
        for region in regions:
            calls = _Calls(region, seen or (lambda _, out: out), busy)
            stack.enter_context(calls.attached(model, calls))
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


class _Weights:
    """Digests of weights, each computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], str] = {}

    def of(self, tensor: torch.Tensor) -> str:
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if key not in self._known:
            self._known[key] = value_digest(tensor)
        return self._known[key]

    def of_module(self, event: Event) -> str:
        if not isinstance(event.function, torch.nn.Module):
            return ""
        digests = sorted(map(self.of, event.function.parameters()))
        return hashlib.sha256("".join(digests).encode()).hexdigest()[:16] if digests else ""


def record(model: Any, tokens: Sequence[int], path: Path, about: Mapping[str, Any], most: int = MOST_BYTES) -> Recorded:
    """Write the calls of forwards over the first token, half of them, and all. `about`: the last three fields of a
    recording. Raises UserError: the model's logits change when they are computed again, or the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    kept: dict[str, torch.Tensor] = {}
    size, left_out, weights, calls = 0, 0, _Weights(), list[list[Call]]()

    def name_of(tensor: torch.Tensor, most: float = most) -> str:
        nonlocal size
        name = value_digest(tensor)
        if name not in kept:
            if size + tensor.nbytes > most:
                return ""
            size += tensor.nbytes
            kept[name] = tensor.detach().cpu().contiguous()
        return name

    def operands(slots: Sequence[Slot]) -> list[Operand]:
        found = []
        for slot in slots:
            known = "" if slot.value is None else weights.of(slot.value) if slot.weight else name_of(slot.value)
            found.append(Operand(slot.path, list(slot.shape), str(slot.dtype), known, slot.weight))
        return found

    def seen(event: Event, out: Any) -> Any:
        nonlocal left_out
        constants = {name: repr(value)[:400] for name, value in event.constants.items()}
        inputs, outputs, key = operands(event.inputs), operands(event.outputs), event.key
        left_out += any(not o.tensor for o in (*inputs, *outputs))
        own = weights.of_module(event)
        calls[-1].append(Call(key.module, key.call, event.of_module, inputs, outputs, constants, own))
        return out

    lengths = sorted({1, max(1, len(tokens) // 2), len(tokens)})
    logits = [name_of(forward(model, tokens[:length]), math.inf) for length in lengths]
    for length, name in zip(lengths, logits, strict=True):
        calls.append([])
        if value_digest(forward(model, tokens[:length], seen)) != name:
            raise UserError("the logits change when the same tokens are computed again", "Find out why: nondet trace.")
    recorded = Recorded(_FORMAT, [*tokens], lengths, calls, logits, left_out, **about)
    with replacing(path) as scratch:
        try:
            save_file(kept, str(scratch), metadata={"nondet": msgspec.json.encode(recorded).decode()})
        except SafetensorError as error:
            raise UserError(f"{path} can't be written: {one_line(str(error), 120)}", "Make room.") from error
    return recorded


class Recording:
    """A recording, open for reading. Raises UserError: it is missing, or is none."""

    _hint = "Give a file that `nondet trace --record` wrote."

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path, self._sound = path, set[str]()
        try:
            regular(path)
            with path.open("rb") as stream:
                if int.from_bytes(stream.read(8), "little") > _MOST_TABLES:
                    raise ValueError(f"its header is larger than {_MOST_TABLES >> 20} MiB")
            self._file = safe_open(str(path), framework="pt")
            self.recorded = msgspec.json.decode((self._file.metadata() or {})["nondet"], type=Recorded)
        except FileNotFoundError:
            raise UserError(
                f"there is no recording {path}", "Write it with --record, in the other environment."
            ) from None
        except (SafetensorError, OSError, LookupError, ValueError) as error:
            raise UserError(f"{path} is no recording: {one_line(reason_of(error), 120)}", self._hint) from error
        r = self.recorded
        if r.format != _FORMAT or not len(r.lengths) == len(r.calls) == len(r.logits) or max(r.lengths) > len(r.tokens):
            raise UserError(f"{path} is no recording that this version of nondet reads", self._hint)

    def tensor(self, name: str, device: Any) -> torch.Tensor:
        """The tensor of that name. Raises UserError: it is not there, or not what was written."""
        from safetensors import SafetensorError

        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError, LookupError, ValueError) as error:
            raise UserError(f"{self.path} is damaged: {one_line(reason_of(error), 120)}", self._hint) from error
        if name not in self._sound and value_digest(tensor) != name:
            raise UserError(f"{self.path} is damaged: a tensor does not have its digest", self._hint)
        self._sound.add(name)
        return tensor.to(device)


def read_names(path: Path | None) -> dict[str, str]:
    """Names of modules in the recording -> in this model, "*" for a number. Raises UserError: another file."""
    if path is None:
        return {}
    try:
        return msgspec.convert(json.loads(read_whole(path, 2**20)), dict[str, str])
    except (OSError, ValueError, RecursionError) as error:
        hint = '{"transformer.h.*": "model.layers.*"}: the recording\'s name, and this model\'s.'
        raise UserError(f"--match {path} maps no names: {one_line(reason_of(error), 120)}", hint) from error


def renamed(module: str, names: Mapping[str, str]) -> str:
    """The module by the longest name that begins its own; what follows that name stays."""
    for name in sorted(names, key=len, reverse=True):
        pattern = re.escape(name).replace(r"\*", r"(\d{1,6})") + r"(?=\.|\Z)"
        if found := re.match(pattern, module):
            made = names[name]
            for number in found.groups():
                made = made.replace("*", number, 1)
            return made + module[found.end() :]
    return module


@dataclass
class _Operator:
    """All calls of one kind: those of a module and of its equals in other layers."""

    module: str
    call: str
    whole: bool = False  # whether it is a module's, with all calls inside
    calls: int = 0
    explained: int = 0  # calls of a module that differ because a call inside does
    differing: int = 0
    elements: int = 0
    first: str = ""  # module of the first call that differs
    worst: Difference | None = None
    verdict: str = "equal"
    times: float = 0.0  # the largest difference, in units of the bound
    bound: str = ""  # what that is of

    def add(self, module: str, found: Difference, times: float, bound: str, verdict: str) -> None:
        self.differing, self.first = self.differing + 1, self.first or module
        if self.worst is None or (found.nonfinite, found.max_ulp) > (self.worst.nonfinite, self.worst.max_ulp):
            self.worst = found
        if (_GRAVITY.index(verdict), times) >= (_GRAVITY.index(self.verdict), self.times):
            self.verdict, self.times, self.bound = verdict, times, bound

    @property
    def name(self) -> str:
        return f"`{self.call}` of {self.module}"

    @property
    def said(self) -> str:
        """ "`linear` of model.layers.*.mlp.down_proj: 3 of 12 calls have other bits, at most 2 ULP, ...": in words."""
        d, how = self.worst, self.bound
        far = f"at most {d.max_ulp:,} ULP" if d else ""
        if d and d.max_ulp > _ULP_CLEAR and d.scale:
            far += f" near zero, {d.max_abs / d.scale:.2g} of the largest number"
        far += f" and {d.nonfinite:,} numbers NaN or infinite on one side" if d and d.nonfinite else ""
        if self.times < sys.float_info.max:
            how = f"{self.times:,.3g} times {how}"
        what = f"{self.name}: {self.differing:,} of {self.calls:,} calls have other bits, {far}"
        return f"{what}, which is {self.verdict} ({how})"


ROUNDING, UNDECIDED, BUG = "rounding", "not decided", "not rounding"
_GRAVITY = ("equal", ROUNDING, UNDECIDED, BUG)
_SUM = "what two orders of the same sum can be apart"
_INPUTS = "what the last bits of its inputs change"
_COPY = "a call that only copies numbers"
# They add and round nothing, so that no order explains another result.
_COPIES = ("embedding", "Embedding", "cat", "stack", "getitem", "index_select", "gather", "neg", "where", "repeat")
# Where no bound of the operator is written down: of the change by the last bits of its inputs, what is rounding, and
# what is not any more.
_NEAR, _FAR = 4.0, 32.0
_PERTURBATIONS = 4
_ULP_CLEAR = 1000  # more are of numbers near zero, or of another sign, and say nothing about the size


Change = Callable[[torch.Tensor], torch.Tensor]


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...], offset: int) -> torch.Tensor:
    """A copy with these strides, that far from aligned memory: a kernel may add in another order elsewhere."""
    if len(strides) != tensor.dim() or not tensor.numel():
        return tensor
    once = tensor
    for axis in (axis for axis, stride in enumerate(strides) if stride == 0):
        once = once.narrow(axis, 0, 1)
    size = 1 + offset + sum((length - 1) * stride for length, stride in zip(once.shape, strides, strict=True))
    memory = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    made = memory.as_strided(once.shape, strides, offset).copy_(once).expand(tensor.shape)
    return made if identical(made, tensor) else tensor  # it repeats nothing where the other side does


def judged(
    event: Event, given: Sequence[Any], theirs: torch.Tensor, mine: torch.Tensor,
    again: Callable[[Change], torch.Tensor],
) -> tuple[float, str, str]:  # fmt: skip
    """Whether two results of one call are apart by rounding: (how many times the bound, whose bound, verdict). `given`:
    its arguments, the keywords last. `again` makes the call with inputs that a function changes."""
    *args, kwargs = given
    name = event.key.call.removeprefix("Tensor.")
    gap = (theirs.double() - mine.double()).abs()
    lost = bool((~torch.isfinite(gap) & ~((theirs == mine) | (theirs.isnan() & mine.isnan()))).any())
    if name in _COPIES or not theirs.dtype.is_floating_point:
        return sys.float_info.max, _COPY, BUG
    if lost:
        return sys.float_info.max, _SUM, BUG
    gap = gap.nan_to_num(0.0)
    if (known := _operands(event, name, args, kwargs)) is not None:
        operator, operands, options = known
        reference = theirs.double()
        if operator == "attention" and event.key.call == "attention":
            reference, gap = reference.transpose(1, 2), gap.transpose(1, 2)
        if operator in ("mean", "sum"):
            reference, gap = (x.reshape(operands[0].shape[:-1]) for x in (reference, gap))
        allowed = bound_of(operator, operands, options, reference, theirs.dtype)
        if allowed is not None and allowed.shape == gap.shape:
            times = float(torch.where(gap > 0, gap / (2 * allowed), torch.zeros_like(gap)).max())
            return times, _SUM, ROUNDING if times <= 1.0 else BUG
    generator = torch.Generator().manual_seed(0)

    def last_bits(x: torch.Tensor) -> torch.Tensor:
        signs = (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1).to(x.device, x.dtype)
        return x * (1 + torch.finfo(x.dtype).eps * signs)

    scale = theirs.double().abs().nan_to_num(0.0, 0.0, 0.0).reshape(-1, theirs.shape[-1] if theirs.dim() else 1)
    change = scale.amax(-1) * torch.finfo(theirs.dtype).eps
    for _ in range(_PERTURBATIONS):
        moved = (again(last_bits).double() - mine.double()).abs().nan_to_num(0.0).reshape(scale.shape)
        change = torch.maximum(change, moved.amax(-1))
    most = gap.reshape(scale.shape).amax(-1)
    times = min(float(torch.where(most > 0, most / change, torch.zeros_like(most)).max()), sys.float_info.max)
    return times, _INPUTS, ROUNDING if times <= _NEAR else UNDECIDED if times < _FAR else BUG


def _operands(
    event: Event, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, list[Any], dict[str, Any]] | None:
    """The declared operator that the call is, with its operands and options; None where it is none with a bound."""
    if event.of_module:
        module = event.function
        if type(module).__name__.endswith("RMSNorm") and args:
            return "rms_norm", [args[0]], {}
        plain = type(module) is torch.nn.Linear and args
        return ("linear", [args[0], module.weight, module.bias], {}) if plain else None
    if name == "linear" and len(args) >= 2:
        return "linear", [*args[:2], args[2] if len(args) > 2 else kwargs.get("bias")], {}
    if name in ("matmul", "bmm", "mm") and len(args) == 2 and min(x.dim() for x in args) >= 2:
        return "matmul", [*args], {}
    if name in ("attention", "scaled_dot_product_attention") and len(args) >= 3 and args[0].dim() == 4:
        scale = event.constants.get("scaling", kwargs.get("scale"))
        return "attention", [*args[:3]], {"scale": scale if isinstance(scale, float) else None}
    if name in ("softmax", "mean", "sum") and args and isinstance(args[0], torch.Tensor):
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
        return (name, [args[0]], {}) if axis in (-1, args[0].dim() - 1) else None
    return None


@dataclass
class Against:
    """This process's model against a recording."""

    model: Any
    recording: Recording
    names: Mapping[str, str] = field(default_factory=dict)
    write: Callable[[Record], object] = lambda _: None
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.operators: dict[tuple[str, str], _Operator] = {}  # in the order in which a forward calls them
        self.unjudged: dict[str, Counter[tuple[str, str]]] = {}  # why calls were not compared -> operators -> calls
        self._weights = _Weights()
        self._partners: list[dict[EventKey, Call]] = []
        # calls of the recording, and of this model, that the other does not have
        self._away: tuple[Counter[tuple[str, str]], ...] = (Counter(), Counter())

    def run(self) -> TraceVerdict:
        """Compare. Raises UserError: the recording is damaged, or its tokens are not this model's."""
        r = self.recording.recorded
        if max(r.tokens) >= (known := self.model.get_input_embeddings().num_embeddings):
            raise UserError(
                f"the recording has token {max(r.tokens)}, and this model {known} tokens", "Give its model."
            )
        texts = [r.tokens[:length] for length in r.lengths]
        logits = [self.recording.tensor(name, self.model.device) for name in r.logits]
        own = [forward(self.model, text) for text in texts]
        self.say("each call with the recorded inputs")
        for text, calls in zip(texts, r.calls, strict=True):
            self._match(text, calls)
        for index, text in enumerate(texts):
            self._differing_here: list[EventKey] = []
            result = forward(self.model, text, functools.partial(self._compare, self._partners[index]))
            if not identical(result, own[index]):
                return self._end("run-to-run", ["the model's logits change when the same tokens are computed again"])
        differing = [op for op in self.operators.values() if op.differing]
        gap = self._gap(own, logits)
        return self._concluded(differing, gap, self._closed(texts, logits, differing) if gap else "")

    # --- matching -------------------------------------------------------------------------------------------------

    def _match(self, text: Sequence[int], calls: Sequence[Call]) -> None:
        events: list[Event] = []

        def seen(event: Event, out: Any) -> Any:
            events.append(Event(event.key, [], [], of_module=event.of_module))
            return out

        forward(self.model, text, seen)
        mine = [replace(e, key=e.key._replace(call=_MODULE)) if e.of_module else e for e in events]
        theirs = [call.event(self.names) for call in calls]
        key_of, call_of = dict(zip(map(id, mine), events, strict=True)), dict(zip(map(id, theirs), calls, strict=True))
        pairs = list(aligned(theirs, mine, []))
        self._partners.append({key_of[id(b)].key: call_of[id(a)] for a, b in pairs})
        for side, every, matched in ((0, theirs, {id(a) for a, _ in pairs}), (1, mine, {id(b) for _, b in pairs})):
            self._away[side].update(_operator_of(e.key) for e in every if id(e) not in matched)

    # --- each call by itself --------------------------------------------------------------------------------------

    def _compare(self, partners: Mapping[EventKey, Call], event: Event, out: Any) -> Any:
        call = partners.get(event.key)
        if call is None:
            return out
        key, given = _operator_of(event.key), self._fed(event, call)
        if isinstance(given, str):
            self._leave_out(given, key)
            return out
        theirs = [self.recording.tensor(operand.tensor, self.model.device) for operand in call.outputs]

        layouts = {slot.path: slot.layout for slot in event.inputs}

        def arguments(tensors: Mapping[str, torch.Tensor], change: Change = lambda x: x) -> list[Any]:
            def fed(path: str, own: torch.Tensor) -> torch.Tensor:
                if path not in tensors:
                    return own
                tensor = tensors[path]
                return laid_out(change(tensor) if tensor.dtype.is_floating_point else tensor, *layouts[path])

            return [*changed_tensors((*event.args, event.kwargs), fed)]

        def results(tensors: Mapping[str, torch.Tensor], change: Change = lambda x: x) -> list[torch.Tensor]:
            *args, kwargs = arguments(tensors, change)
            made = event.function(*args, **kwargs) if event.function is not None else ()
            return [t for _, t in tensors_in(list(made.values()) if isinstance(made, dict) else [made])]

        mine = results(given)
        if [(x.shape, x.dtype) for x in mine] != [(x.shape, x.dtype) for x in theirs]:
            self._leave_out("results of other shapes or dtypes", key)
            return out
        differ = [i for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if not identical(a, b)]
        if differ:  # a call that by itself has other bits than in the model, with the same inputs, shows nothing
            own = results(
                {slot.path: slot.value for slot in event.inputs if slot.value is not None and not slot.weight}
            )
            there = [slot.value for slot in event.outputs]
            if any(b is None or not identical(a, b) for a, b in zip(own, there, strict=True)):
                self._leave_out("by itself it has other bits than in the model", key)
                return out
        operator = self.operators.setdefault(key, _Operator(*key, event.of_module))
        if differ and event.of_module and any(_within(k.module, event.key.module) for k in self._differing_here):
            operator.explained += 1
            return out
        operator.calls += 1
        operator.elements += sum(x.numel() for x in mine)
        if differ:
            self._differing_here.append(event.key)
            i = differ[0]
            judgement = judged(event, arguments(given), theirs[i], mine[i], lambda change: results(given, change)[i])
            operator.add(event.key.module, difference(theirs[i], mine[i]), *judgement)
        return out

    def _leave_out(self, why: str, key: tuple[str, str]) -> None:
        self.unjudged.setdefault(why, Counter())[key] += 1

    def _fed(self, event: Event, call: Call) -> dict[str, torch.Tensor] | str:
        """The recorded tensors under the paths of the model's own call; or why it can't be made with them."""
        pairs = _paired(event.inputs, call.inputs)
        if event.function is None:
            return "it can't be made by itself"
        if pairs is None or any(_unlike(slot, operand) for slot, operand in pairs):
            return "inputs of other shapes or dtypes"
        constants = {name: repr(value)[:400] for name, value in event.constants.items()}
        if not event.of_module and event.key.call != "attention" and constants != call.constants:
            return "other constants"
        if any(not o.tensor for o in (*call.inputs, *call.outputs)):
            return "left out of the recording"
        if self._weights.of_module(event) != call.weights or any(
            slot.value is not None and self._weights.of(slot.value) != operand.tensor
            for slot, operand in pairs if slot.weight
        ):  # fmt: skip
            return _OTHER_WEIGHTS
        return {s.path: self.recording.tensor(o.tensor, self.model.device) for s, o in pairs if not s.weight}

    # --- from end to end ------------------------------------------------------------------------------------------

    def _gap(self, logits: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> int:
        """How many logits differ; all of them where their shapes do."""
        same = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(logits, theirs, strict=True))
        pairs = zip(theirs, logits, strict=True)
        return sum(difference(a, b).mismatched for a, b in pairs) if same else sum(x.numel() for x in logits)

    def _closed(
        self, texts: Sequence[Sequence[int]], logits: Sequence[torch.Tensor], differing: Sequence[_Operator]
    ) -> str:
        """Which operators, taken from the recording, give the recorded logits."""
        self.say("from end to end, with operators taken from the recording")
        singles = differing[:_SINGLES_MOST] if len(differing) > 1 else []
        tried = [*([op] for op in singles), [*differing]]
        first = ""
        for taken in tried:
            first, groups = "", {(op.module, op.call) for op in taken}
            results = []
            for text, partners in zip(texts, self._partners, strict=True):
                run = _Replaced(self, partners, groups)
                results.append(forward(self.model, text, run.seen))
                first = first or run.first
            if not self._gap(results, logits) and taken:
                which = taken[0].name if len(taken) == 1 else f"all {len(taken)} operators that differ"
                only = " (no single one does)" if len(taken) > 1 and len(differing) <= _SINGLES_MOST else ""
                return f"taking {which} from the recording gives its logits, bit for bit{only}"
        where = f"; the first that differs then is {first}" if first else ""
        what = "taking all that differ from the recording still leaves" if differing else "code between the calls makes"
        return f"{what} other logits{where}"

    # --- what it comes to -----------------------------------------------------------------------------------------

    def _listed(self) -> list[_Operator]:
        """Those that differ, then the others: without modules whose difference a call inside explains, and without what
        is inside of a module that has equal bits and no other module inside."""
        modules = {op.module: op for op in self.operators.values() if op.whole}
        parents = {other.rpartition(".")[0] for other in modules}

        def covered(op: _Operator) -> bool:
            whole = modules.get(op.module)
            inside = not op.whole and whole is not None and whole.module not in parents
            return inside and not (whole.differing or whole.explained) if whole is not None else False

        shown = [op for op in self.operators.values() if op.differing or not (op.explained or covered(op))]
        return sorted(shown, key=lambda op: not op.differing)

    def _concluded(self, differing: Sequence[_Operator], gap: int, said: str) -> TraceVerdict:
        listed, sentences = self._listed(), list[str]()
        for number, op in enumerate(listed, 1):
            self.write(OperatorCompared(
                number=number, module=op.module, call=op.call, calls=op.calls, differing=op.differing,
                elements=op.elements, verdict=op.verdict, first=op.first, difference=op.worst,
                times=op.times, bound=op.bound,
            ))  # fmt: skip
        finding = "unknown"
        if other := self.unjudged.get(_OTHER_WEIGHTS):
            finding, first = _OTHER_WEIGHTS, _operators_text(Counter([next(iter(other))]))
            sentences.append(f"{other.total():,} calls have other weights than the recording's, the first {first}")
        if not listed:
            sentences.append("no call was compared: names, shapes or dtypes match nowhere (--match maps names)")
        else:
            found, sentence = self._found(listed, differing, gap)
            finding, sentences = finding if other else found, [*sentences, sentence]
        if gap:
            sentences += [f"from end to end {gap:,} logits have other bits", said]
        elif differing:
            sentences.append("from end to end all logits have the recorded bits all the same")
        return self._end(finding, sentences)

    def _found(self, listed: Sequence[_Operator], differing: Sequence[_Operator], gap: int) -> tuple[str, str]:
        """The finding, and its sentence."""
        left = sum(of.total() for of in self.unjudged.values()) + sum(
            n for of in self._away for (module, _), n in of.items() if not self._is_within(module)
        )
        also = f"; {left:,} calls could not be compared, and are listed" if left else ""
        if not differing:
            calls, elements = sum(op.calls for op in listed), sum(op.elements for op in listed)
            bound = f"at 95% fewer than {one_sided_bound(calls):.2%} of such calls do, if they are independent"
            what = f"no operator differs: 0 of {calls:,} calls have other bits ({elements:,} numbers; {bound})"
            if gap:
                return UNDECIDED, f"{what}, but the logits differ{also}"
            return "no divergence observed", f"{what}; the logits have equal bits{also}"
        worst = max(differing, key=lambda op: _GRAVITY.index(op.verdict))
        sentence = f"the first operator to differ is {differing[0].said}"
        sentence += f"; {worst.said}" if worst.verdict != differing[0].verdict else ""
        equal = f"{len(listed) - len(differing)} of {len(listed)} operators have equal bits in every call"
        return worst.verdict, f"{sentence}; {equal}{also}"

    def _is_within(self, module: str) -> bool:
        """Whether the module was compared as a whole."""
        return any(op.whole and op.module == module for op in self.operators.values())

    def _end(self, finding: str, sentences: Sequence[str]) -> TraceVerdict:
        r = self.recording.recorded
        notes = {"recording": f"{r.made_by}; {len(r.tokens):,} tokens, in forwards of {', '.join(map(str, r.lengths))}"}
        if r.left_out:
            notes["left out"] = f"{r.left_out:,} calls are in the recording without their numbers, for lack of room"
        notes |= {f"not compared, {why}": _operators_text(of) for why, of in self.unjudged.items()}
        for side, of in zip(("the recording", "this model"), self._away, strict=True):
            within = Counter({key: n for key, n in of.items() if self._is_within(key[0])})
            if within:
                said = "calls inside of modules that were compared as a whole"
                notes[f"only in {side}"] = f"{said}: {_operators_text(within)}"
            if alone := of - within:
                notes[f"not compared, only in {side}"] = _operators_text(alone)
        for name, sentence in notes.items():
            self.write(Control(name=name, passed=None, sentence=one_line(sentence, 4000)))
        said = [one_line(sentence, 1000) for sentence in sentences]
        return TraceVerdict(finding=finding, culprits=[], families=None, sentences=said)


_OTHER_WEIGHTS = "other weights"


class _Replaced:
    """A run in which some operators are taken from the recording, where their inputs have the recorded bits."""

    def __init__(
        self, against: Against, partners: Mapping[EventKey, Call], groups: Collection[tuple[str, str]]
    ) -> None:
        self.against, self.partners, self.groups = against, partners, groups
        self.first = ""  # the first input with other bits than the recorded ones

    def seen(self, event: Event, out: Any) -> Any:
        """What takes the result's place."""
        call = self.partners.get(event.key)
        given = self.against._fed(event, call) if call is not None else ""
        if call is None or isinstance(given, str):
            return out
        own = {slot.path: slot.value for slot in event.inputs}
        other = [path for path, tensor in given.items() if (x := own[path]) is None or not identical(x, tensor)]
        if other:
            self.first = self.first or f"an input of `{event.key.call}` of {event.key.module}"
            return out
        if _operator_of(event.key) not in self.groups or isinstance(out, dict):
            return out
        recording, names = self.against.recording, iter(call.outputs)

        def taken(_: str, tensor: torch.Tensor) -> torch.Tensor:
            known = recording.tensor(next(names).tensor, tensor.device)
            return laid_out(known, tensor.stride(), tensor.data_ptr() % 64 // tensor.element_size())

        return changed_tensors(out, taken)


def _paired(slots: Sequence[Slot], operands: Sequence[Operand]) -> list[tuple[Slot, Operand]] | None:
    """Inputs of both sides: by their paths, else in order; None where their numbers differ. Attention's mask is the
    model's own where the other side has none, because kernels differ in what they need one for."""
    mine, theirs = {s.path: s for s in slots}, {o.path: o for o in operands}
    if len(mine) != len(theirs) and {*mine} ^ {*theirs} == {"3"}:
        mine.pop("3", None), theirs.pop("3", None)
    if mine.keys() == theirs.keys():
        return [(mine[path], theirs[path]) for path in mine]
    return list(zip(mine.values(), theirs.values(), strict=True)) if len(mine) == len(theirs) else None


def _unlike(slot: Slot, operand: Operand) -> bool:
    return list(slot.shape) != operand.shape or str(slot.dtype) != operand.dtype or slot.weight != operand.weight


def _pattern(module: str) -> str:
    """The module's name with "*" for each number: equal layers are one operator."""
    return one_line(re.sub(r"(?<=\.)\d+(?=\.|\Z)", "*", module), 200)


def _operator_of(key: EventKey) -> tuple[str, str]:
    return _pattern(key.module), one_line(key.call, 80)


def _within(module: str, around: str) -> bool:
    return f"{module}.".startswith(f"{around}.")


def _operators_text(of: Counter[tuple[str, str]]) -> str:
    """ "model.norm: Tensor.mul (3), rsqrt (3); lm_head: linear (3)"."""
    modules: dict[str, list[str]] = {}
    for (module, call), n in of.items():
        modules.setdefault(module, []).append(f"{call} ({n:,})")
    return "; ".join(f"{module}: {', '.join(calls)}" for module, calls in modules.items())
