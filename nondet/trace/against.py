"""Two implementations, operator by operator: a recording that one environment writes, and another compares itself with.

A recording holds each call of a model, with its inputs and results, in forwards over the first token of a text, a few,
and all. The other side makes each of its own calls with the recorded inputs, so that a difference is the call's
own. Then it runs from end to end, with results taken from the recording wherever their inputs have the recorded bits:
if that gives the recorded logits, these operators are the whole difference.

A recording is not trusted: it is safetensors and never a pickle, its table is decoded into the types below, and each
tensor must have the digest by which it is named.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file

from nondet.core.compare import difference, digest, identical, parts_of
from nondet.core.records import Control, Count, Difference, OperatorCompared, Record, Size, TraceVerdict
from nondet.core.runfile import read_whole, regular, replacing
from nondet.core.statistics import one_sided_bound
from nondet.core.watch import bound_of
from nondet.errors import UserError, one_line, reason_of
from nondet.trace.align import aligned
from nondet.trace.capture import FineCapture
from nondet.trace.recorder import Event, EventKey, Slot, StepRecord, changed_tensors, copied, find_layers, tensors_in

if TYPE_CHECKING:
    from nondet.sampling.model import LoadedModel

MOST_BYTES = 2 * 2**30  # of tensors in a recording: what is beyond is left out
# Tokens of the longest forward, so that attention's sums go over several tiles of 128 keys; of the one before, at most.
LONG, _FEW = 320, 64
_TABLE_MOST = 64 * 2**20  # bytes of its table
_FORMAT = "nondet-operators-2"
_WEIGHT = "weight"  # in the place of a tensor's name
_MODULE = "(module)"  # what the call of a whole module is aligned by: its class may have another name
_ATTENTION, _ROTARY = "attention", "apply_rotary_pos_emb"  # a function of the model's file, whatever has its name there
_OTHER_WEIGHTS = "other weights"
_UNSTEADY = "the logits change when the same tokens are computed again"
_ALONE = "calls with other inputs, or that can't be made by themselves"
_OPTIONAL = {"4", "5.position_ids"}  # attention's mask and positions among its arguments, which not all kernels need
_SINGLES_MOST = 8  # operators that are taken from the recording one at a time
Key = tuple[str, str]  # a module, "*" for each number in its name, and a call of its
Text = Annotated[str, Meta(max_length=400)]
Seen = Callable[[Event, Any], Any]  # takes a call and its result, and gives what takes the result's place


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call in a recording; tensors by their names there, "" where one was left out."""

    module: Text
    name: Text
    whole: bool  # whether it is a module's, with all calls inside
    inputs: dict[Text, Text]
    outputs: list[Text]
    constants: dict[Text, Text]  # arguments that are not tensors, as Python writes them


class Recorded(msgspec.Struct, frozen=True):
    """The table of a recording."""

    format: str
    tokens: Annotated[list[Count], Meta(min_length=1, max_length=2**17)]
    calls: Annotated[list[list[Call]], Meta(min_length=1, max_length=3)]  # of each forward, in the order of their ends
    logits: list[Text]  # of each forward
    weights: dict[Text, Text]  # digests of what each module holds by itself
    left_out: Count  # calls without some of their tensors
    dtype: Text
    threads: Size
    made_by: Text  # for people

    @property
    def texts(self) -> list[list[int]]:
        """The tokens of each forward: the first one, half of them or few, and all."""
        return [self.tokens[:n] for n in sorted({1, max(1, min(_FEW, len(self.tokens) // 2)), len(self.tokens)})]


class _Calls(FineCapture):
    """The calls of one region in a plain forward, for `seen`."""

    def __init__(self, region: str, seen: Seen) -> None:
        super().__init__("", 0, region)
        self._seen = seen
        self.pack = ()  # of a step's log: there is no schedule here

    @contextmanager
    def attached(self, model: Any, log: Any) -> Iterator[None]:
        """Around functions of the models' files as well, which are more than torch's."""
        files = {sys.modules[type(module).__module__] for module in model.modules()}
        wraps: dict[str, Callable[..., Any]] = {"eager_attention_forward": self._attention}
        wraps[_ROTARY] = functools.partial(self._called, _ROTARY)
        with super().attached(model, log), ExitStack() as stack:
            for file, name in ((file, name) for file in files for name in wraps if hasattr(file, name)):
                stack.callback(setattr, file, name, getattr(file, name))
                setattr(file, name, wraps[name](getattr(file, name)))
            stack.callback(self._end)  # also where the forward fails
            yield

    def _begin(self, *_: Any) -> None:
        self.start(StepRecord.whole())

    def _attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._called(_ATTENTION, original)

    def _called(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def shown(out: Any) -> Any:
            return out[:1] if name == _ATTENTION else out  # not its weights, which few kernels give

        def again(*args: Any, **kwargs: Any) -> Any:
            return shown(original(*args, **kwargs))

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.sees:
                return original(*args, **kwargs)
            copies: dict[int, torch.Tensor] = {}
            inputs = self.kept((*args, kwargs), copies)
            with self.unseen():
                out = original(*args, **kwargs)
            event = self.add(name, inputs, {"out": shown(out)})
            self.repeats(event, again, copied(args, copies), copied(kwargs, copies))
            return self.taken(event, out)

        return run

    def _noted(self, slot: Slot, tensor: torch.Tensor) -> Slot:
        if not slot.weight:
            slot.layout = tensor.stride(), tensor.data_ptr() % 64 // tensor.element_size()
        return slot


def forward(model: Any, tokens: Sequence[int], seen: Seen | None = None, *, last: bool = False) -> torch.Tensor:
    """The logits of a plain forward, only the last token's if `last`; `seen` gets each of its calls."""
    regions = ["embedding", *map(str, range(len(find_layers(model)))), "head"]
    given: dict[str, Any] = {"logits_to_keep": 1} if last else {}
    with torch.no_grad(), ExitStack() as stack:
        for calls in [_Calls(region, seen) for region in regions] if seen else []:
            stack.enter_context(calls.attached(model, calls))
        ids = torch.tensor([[*tokens]], device=model.device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **given).logits
    return logits


def _weights(model: Any) -> dict[str, str]:
    """Digests of what each module holds by itself, where it holds anything."""
    held = {path: [*module._parameters.values()] for path, module in model.named_modules()}
    parts = {path: [p for t in of if t is not None for _, p in parts_of("", t)] for path, of in held.items()}
    return {path: digest(*of) for path, of in parts.items() if of}


class Kept:
    """The calls of a recording's forwards, and their tensors by digest, of which so many bytes at most."""

    def __init__(self, most: int) -> None:
        self.calls: list[list[Call]] = []
        self.logits: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._left = most

    def name(self, tensor: torch.Tensor | None, *, whatever: bool = False) -> str:
        """Its digest, with the tensor kept; "" where it is left out, because it is larger than what is left."""
        name = "" if tensor is None else digest(tensor)
        if tensor is not None and name not in self.tensors:
            if not whatever and tensor.nbytes > self._left:
                return ""
            self._left -= tensor.nbytes
            self.tensors[name] = tensor.detach().cpu().contiguous()
        return name

    def __getstate__(self) -> dict[str, Any]:
        """To another process in one piece: each tensor by itself takes a file's descriptor."""
        return {**vars(self), "tensors": save(self.tensors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, tensors=load(state["tensors"]))

    def add(self, event: Event, out: Any = None) -> Any:
        """Keep a call of the last forward."""
        inputs = {slot.path: _WEIGHT if slot.weight else self.name(slot.value) for slot in event.inputs}
        outputs = [self.name(slot.value) for slot in event.outputs]
        self.calls[-1].append(Call(*event.key[:2], event.of_module, inputs, outputs, _constants(event)))
        return out


Play = Callable[[Sequence[Sequence[int]]], Kept]  # an engine's forwards over texts


def text_of(loaded: LoadedModel, prompt: Sequence[int], new: int, least: int = 0) -> list[int]:
    """A prompt and its completion, repeated until there are `least` tokens, or the context has one left."""
    with torch.no_grad():
        ids = torch.tensor([[*prompt]], device=loaded.device)
        text: list[int] = loaded.model.generate(ids, do_sample=False, max_new_tokens=new)[0].tolist()
    wanted = max(len(text), min(least, (loaded.context or least + 1) - 1))
    return (text * -(-wanted // len(text)))[:wanted]


def record(
    model: Any, tokens: Sequence[int], path: Path, about: Mapping[str, Any], play: Play | None = None
) -> Recorded:
    """Write a recording; `about` has its last three fields, and `play` gives another engine's forwards. Raises
    UserError: the model's logits change when they are computed again, or the disk is full."""
    made = Recorded(_FORMAT, [*tokens], [], [], _weights(model), 0, **about)
    kept = (play or functools.partial(played, model))(made.texts)
    left_out = sum("" in (*call.inputs.values(), *call.outputs) for calls in kept.calls for call in calls)
    made = msgspec.structs.replace(made, calls=kept.calls, logits=kept.logits, left_out=left_out)
    with replacing(path) as scratch:
        try:
            save_file(kept.tensors, str(scratch), metadata={"nondet": msgspec.json.encode(made).decode()})
        except SafetensorError as error:
            raise UserError(f"{path} can't be written: {one_line(str(error), 120)}", "Make room.") from error
    return made


def played(model: Any, texts: Sequence[Sequence[int]], most: int = MOST_BYTES) -> Kept:
    """The model's forwards over the texts. Raises UserError: the logits change when they are computed again."""
    kept = Kept(most)
    for text in texts:
        kept.calls.append([])
        kept.logits.append(kept.name(forward(model, text), whatever=True))
        if digest(forward(model, text, kept.add)) != kept.logits[-1]:
            raise UserError(_UNSTEADY, "Find out why: nondet trace.")
    return kept


def _constants(event: Event) -> dict[str, str]:
    return {name: repr(value)[:400] for name, value in event.constants.items()}


def read_recording(path: Path) -> tuple[Recorded, dict[str, torch.Tensor]]:
    """A recording and its tensors. Raises UserError: it is missing, damaged, or none."""
    hint = "Write it with nondet trace --record, in the other environment."
    try:
        regular(path)
        with path.open("rb") as stream:
            if int.from_bytes(stream.read(8), "little") > _TABLE_MOST:
                raise ValueError(f"its table is larger than {_TABLE_MOST >> 20} MiB")
        with safe_open(str(path), framework="pt") as file:
            made = msgspec.json.decode((file.metadata() or {})["nondet"], type=Recorded)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"there is no recording {path}", hint) from None
    except (SafetensorError, OSError, LookupError, ValueError) as error:
        raise UserError(f"{path} is no recording: {one_line(reason_of(error), 120)}", hint) from error
    if made.format != _FORMAT or not len(made.texts) == len(made.calls) == len(made.logits):
        raise UserError(f"{path} is no recording that this version of nondet reads", hint)
    named = {x for calls in made.calls for call in calls for x in (*call.inputs.values(), *call.outputs)}
    if not named | {*made.logits} <= {*tensors, "", _WEIGHT} or any(digest(x) != n for n, x in tensors.items()):
        raise UserError(f"{path} is damaged: its tensors are not those that its table names", hint)
    return made, tensors


def read_names(path: Path | None) -> dict[str, str]:
    """Names of modules in a recording -> in this model, "*" for a number. Raises UserError: another file."""
    try:
        return {} if path is None else msgspec.convert(json.loads(read_whole(path, 2**20)), dict[str, str])
    except (OSError, ValueError, RecursionError) as error:
        what = f"--match {path} maps no names: {one_line(reason_of(error), 120)}"
        raise UserError(what, '{"transformer.h.*": "model.layers.*"}: the name there, and the name here.') from error


def renamed(module: str, names: Mapping[str, str]) -> str:
    """The module with the longest name that begins its own replaced."""
    for name in sorted(names, key=len, reverse=True):
        pattern = re.escape(name).replace(r"\*", r"(\d{1,6})") + r"(?=\.|\Z)"
        if found := re.match(pattern, module):
            made = names[name]
            for number in found.groups():
                made = made.replace("*", number, 1)
            return made + module[found.end() :]
    return module


ROUNDING, UNDECIDED, BUG = "rounding", "not decided", "not rounding"
_GRAVITY = ("equal", ROUNDING, UNDECIDED, BUG)
# What a difference is compared with; the last where no bound is written down: _NEAR times it is rounding, _FAR times it
# is not any more.
_COPY, _SUM, _INPUTS = (
    "it only copies numbers, or takes the largest",
    "what two orders of the same sum can be apart",
    "what the last bits of its inputs change",
)
_NEAR, _FAR, _PERTURBATIONS = 4.0, 32.0, 4
_EXACT = {"embedding", "Embedding", "cat", "stack", "getitem", "index_select", "gather", "neg", "where", "repeat"}
_EXACT |= {"amax", "amin", "max", "min", "maximum", "minimum", "abs", "round", "clamp", "sort", "topk"}
_ULP_CLEAR = 1000  # more are of numbers near zero, whose distance in ULP has no meaning
Change = Callable[[torch.Tensor], torch.Tensor]


class Compared(NamedTuple):
    """One call, made with the recorded inputs."""

    elements: int
    difference: Difference | None = None
    verdict: str = "equal"
    times: float = 0.0  # how far apart, in units of
    bound: str = ""


def remade(
    event: Event, tensors: Mapping[str, torch.Tensor | None], change: Change = lambda x: x
) -> tuple[list[Any], list[torch.Tensor]]:
    """The arguments of a call with these inputs in the places of its own, the keywords last, and its results."""
    layouts = {slot.path: slot.layout for slot in event.inputs}

    def fed(path: str, here: torch.Tensor) -> torch.Tensor:
        if (tensor := tensors.get(path)) is None:
            return here
        return laid_out(change(tensor) if tensor.is_floating_point() else tensor, *layouts[path])

    *args, kwargs = changed_tensors((*event.args, event.kwargs), fed)
    with torch.no_grad():
        made: Any = event.function(*args, **kwargs) if event.function else None
    return [*args, kwargs], [x for _, x in tensors_in([*made.values()] if isinstance(made, dict) else [made])]


def _gravity(one: Compared) -> tuple[int, float]:
    return _GRAVITY.index(one.verdict), one.times


@torch.no_grad()
def judged(
    event: Event, given: Mapping[str, torch.Tensor | None], theirs: torch.Tensor, mine: torch.Tensor, place: int
) -> tuple[str, float, str]:
    """Whether the results at this place of a call with the inputs `given` are apart by rounding, how many times its
    bound, and what that is."""
    if (
        event.key.call.removeprefix("Tensor.") in _EXACT
        or not theirs.is_floating_point()
        or (theirs.isfinite() != mine.isfinite()).any()
    ):
        return BUG, sys.float_info.max, _COPY if mine.isfinite().all() else "NaN or infinity on one side only"
    wide, gap = theirs.double(), (theirs.double() - mine.double()).abs().nan_to_num(0.0)
    operator, operands, options = _declared(event, remade(event, given)[0])
    if event.key.call == _ATTENTION:  # [batch, tokens, heads, depth]
        wide, gap = wide.transpose(1, 2), gap.transpose(1, 2)
    allowed = bound_of(operator, operands, options, wide, theirs.dtype)
    if allowed is not None:
        times = float((gap / (2 * allowed)).nan_to_num(0.0).max())
        return ROUNDING if times <= 1.0 else BUG, times, _SUM
    generator = torch.Generator().manual_seed(0)

    def last_bits(x: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator).mul(2).sub(1).to(x.device, x.dtype)
        return x * (1 + torch.finfo(x.dtype).eps * signs)

    again = [remade(event, given, last_bits)[1][place].double() for _ in range(_PERTURBATIONS)]
    moved = [(x - mine.double()).abs().nan_to_num(0.0) for x in again]
    change = torch.stack([wide.abs().nan_to_num(0.0, 0.0, 0.0) * torch.finfo(theirs.dtype).eps, *moved]).amax(0)
    if gap.dim():  # by rows
        gap, change = gap.amax(-1), change.amax(-1)
    times = min(float((gap / change).nan_to_num(0.0).max()), sys.float_info.max)
    return ROUNDING if times <= _NEAR else UNDECIDED if times < _FAR else BUG, times, _INPUTS


def _declared(event: Event, given: Sequence[Any]) -> tuple[str, list[Any], dict[str, Any]]:
    """The declared operator that the call is, its operands and options; "" where it is none that has a bound."""
    *args, kwargs = given
    name, module = event.key.call.removeprefix("Tensor."), cast("Any", event.function if event.of_module else None)
    if type(module).__name__.endswith("RMSNorm") and args:
        return "rms_norm", [args[0]], {}
    if type(module) is torch.nn.Linear and args:
        return "linear", [args[0], module.weight, module.bias], {}
    if name == "linear" and len(args) >= 2:
        return "linear", [*args, *[kwargs.get("bias")] * (3 - len(args))], {}
    if name in ("matmul", "bmm", "mm") and len(args) == 2 and min(x.dim() for x in args) >= 2:
        return "matmul", args, {}
    if name == _ATTENTION:
        return "attention", args[1:4], {"scale": kwargs.get("scaling")}
    if name == "scaled_dot_product_attention" and len(args) >= 3 and args[0].dim() == 4:
        keys_values = [x.repeat_interleave(args[0].shape[1] // x.shape[1], 1) for x in args[1:3]]
        return "attention", [args[0], *keys_values], {"scale": kwargs.get("scale")}
    return "", [], {}


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...], offset: int) -> torch.Tensor:
    """A copy with these strides, that far from aligned memory: elsewhere a kernel may add in another order."""
    if len(strides) != tensor.dim():  # they were not noted
        return tensor
    once = tensor
    for axis in (axis for axis, stride in enumerate(strides) if stride == 0 and tensor.numel()):
        once = once.narrow(axis, 0, 1)
    size = 1 + offset + sum((n - 1) * stride for n, stride in zip(once.shape, strides, strict=True) if n)
    memory = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    made = memory.as_strided(once.shape, strides, offset).copy_(once).expand(tensor.shape)
    return made if identical(made, tensor) else tensor  # it repeats nothing where the other side does


class Against:
    """A model against a recording. `names`: as of `read_names`."""

    def __init__(
        self, model: Any, recording: tuple[Recorded, Mapping[str, torch.Tensor]], names: Mapping[str, str]
    ) -> None:
        self.model, self._names = model, names
        self.made, self._tensors = recording
        self._found: dict[Key, list[Compared]] = {}  # the calls of each operator
        self._left: dict[str, Counter[Key]] = {}  # why calls were not compared -> those calls
        self._wholes: set[str] = set()  # modules that were compared as a whole
        self._explained: set[Key] = set()  # modules that differ because a call inside does
        self._partners: list[dict[EventKey, Call]] = []  # of each forward
        one = [recording[1][name].shape[1:2] == (1,) for name in self.made.logits]
        self._run = functools.partial(forward, model, last=all(one))  # vLLM gives one token's
        mine, theirs = _weights(model), {renamed(path, names): held for path, held in self.made.weights.items()}
        self._other = {path for path, held in theirs.items() if mine.get(path, held) != held}  # with other weights

    def run(self) -> Iterator[Record]:
        """What was found, the verdict last. Raises UserError: the tokens are not this model's, or its logits change
        when they are computed again."""
        most, known = max(self.made.tokens), self.model.get_input_embeddings().num_embeddings
        if most >= known:
            raise UserError(f"the recording has token {most}, and this model {known} tokens", "Give its model.")
        logits = [self._run(text) for text in self.made.texts]
        for text, calls, before in zip(self.made.texts, self.made.calls, logits, strict=True):
            if not identical(self._forward(text, calls), before):
                raise UserError(_UNSTEADY, "Find out why: nondet trace.")
        rows = [_row(key, of) for key, of in self._found.items() if of]
        rows = [row for row in rows if row.differing or (row.module, row.call) not in self._explained]
        rows.sort(key=lambda row: not row.differing)
        yield from (msgspec.structs.replace(row, number=number) for number, row in enumerate(rows))
        gap = self._gap(logits)
        closed = self._closed([(row.module, row.call) for row in rows if row.differing]) if gap else ""
        yield from self._concluded(rows, gap, closed)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self.model.device)

    # --- each call by itself --------------------------------------------------------------------------------------

    def _forward(self, text: Sequence[int], calls: Sequence[Call]) -> torch.Tensor:
        """Match the calls of a forward with the recorded ones, and compare each."""
        events: list[Event] = []

        def seen(event: Event, out: Any) -> Any:
            events.append(event)
            return out

        def numbered(module: str, name: str, whole: bool, number: int) -> Event:
            return Event(EventKey(module, _MODULE if whole else name, number), [], [])

        logits = self._run(text, seen)
        mine = [numbered(*e.key[:2], e.of_module, i) for i, e in enumerate(events)]
        theirs = [numbered(renamed(c.module, self._names), c.name, c.whole, i) for i, c in enumerate(calls)]
        pairs = {b.key.occurrence: a.key.occurrence for a, b in aligned(theirs, mine, [])}
        self._partners.append({events[b].key: calls[a] for b, a in pairs.items()})
        for side, every, matched in (("the recording", theirs, pairs.values()), ("this model", mine, pairs)):
            alone = [_operator(e.key) for e in every if e.key.occurrence not in {*matched}]
            self._left.setdefault(f"only in {side}", Counter()).update(alone)
        differing: list[str] = []  # modules of the calls that differ
        for number, event in enumerate(events):
            if number in pairs and (why := self._compare(event, calls[pairs[number]], differing)):
                self._left.setdefault(why, Counter())[_operator(event.key)] += 1
        return logits

    def _compare(self, event: Event, call: Call, differing: list[str]) -> str:
        """Make a call with the recorded inputs; why it can't be compared."""
        given = self._given(event, call)
        if isinstance(given, str):
            return given
        try:
            mine, theirs = remade(event, given)[1], [self._tensor(name) for name in call.outputs]
        except (RuntimeError, ValueError, TypeError, IndexError):
            return _ALONE
        if [(x.shape, x.dtype) for x in mine] != [(x.shape, x.dtype) for x in theirs]:
            return "results of other shapes or dtypes"
        differ = [i for i, both in enumerate(zip(theirs, mine, strict=True)) if not identical(*both)]
        if differ:
            own = remade(event, {slot.path: None if slot.weight else slot.value for slot in event.inputs})[1]
            there = [slot.value for slot in event.outputs]
            if any(b is None or not identical(a, b) for a, b in zip(own, there, strict=True)):
                return "by itself it has other bits than in the model"
        key, inside = _operator(event.key), [_within(module, event.key.module) for module in differing]
        self._wholes |= {key[0]} if event.of_module else set()
        of, found = self._found.setdefault(key, []), [Compared(sum(x.numel() for x in mine))]
        if differ and event.of_module and any(inside):  # a call inside explains it
            self._explained.add(key)
            return ""
        for i in differ:
            verdict = judged(event, given, theirs[i], mine[i], i)
            found.append(Compared(found[0].elements, difference(theirs[i], mine[i]), *verdict))
        of.append(max(found, key=_gravity))
        differing += [event.key.module] if differ else []
        return ""

    def _given(self, event: Event, call: Call) -> dict[str, torch.Tensor] | str:
        """The recorded inputs under the paths of the model's own call; or why it can't be made with them."""
        own, theirs = {slot.path: slot for slot in event.inputs}, {**call.inputs}
        if event.key.call == _ATTENTION and (single := own.keys() ^ theirs.keys()) <= _OPTIONAL:
            for path in single:
                own.pop(path, None), theirs.pop(path, None)
        if len(own) != len(theirs) or event.function is None:
            return _ALONE
        if own.keys() != theirs.keys():  # by keyword on one side
            theirs = dict(zip(own, theirs.values(), strict=True))
        if any(
            _within(path, event.key.module) if event.of_module else path == event.key.module for path in self._other
        ):
            return _OTHER_WEIGHTS
        if "" in (*theirs.values(), *call.outputs):
            return "left out of the recording"
        if not event.of_module and _constants(event) != call.constants:
            return "other constants"
        given = {path: self._tensor(name) for path, name in theirs.items() if name != _WEIGHT}
        known = {path: (slot.shape, slot.dtype) for path, slot in own.items() if not slot.weight}
        if known != {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in given.items()}:
            return "inputs of other shapes or dtypes"
        # tokens, positions, masks: a stranger's could reach beyond a table
        fixed = [(x, own[path].value) for path, x in given.items() if not x.is_floating_point()]
        if not all(y is not None and identical(x, y) for x, y in fixed):
            return "other integers or masks"
        return given

    # --- from end to end ------------------------------------------------------------------------------------------

    def _gap(self, logits: Sequence[torch.Tensor]) -> int:
        """How many logits are not the recorded ones; all where their shapes differ."""
        pairs = [(self._tensor(name), x) for name, x in zip(self.made.logits, logits, strict=True)]
        same = all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)
        return sum(difference(a, b).mismatched if same else b.numel() for a, b in pairs)

    def _closed(self, differing: Sequence[Key]) -> str:
        """Which operators, taken from the recording, give the recorded logits."""
        singles = [[key] for key in differing[:_SINGLES_MOST] if len(differing) > 1]
        away: list[EventKey] = []  # calls whose inputs then have other bits than the recorded ones
        for taken in [*singles, [*differing]]:
            away.clear()
            runs = zip(self.made.texts, self._partners, strict=True)
            logits = [self._run(text, self._replacing(taken, partners, away)) for text, partners in runs]
            if not self._gap(logits):
                which = _said(taken[0]) if len(taken) == 1 else f"all {len(taken)} operators that differ"
                return f"taking {which} from the recording gives its logits, bit for bit"
        where = f"; the first call whose inputs differ then is {_said(away[0][:2])}" if away else ""
        what = "taking all that differ from the recording" if differing else "code between the calls"
        return f"{what} gives other logits than the recorded ones{where}"

    def _replacing(self, taken: Sequence[Key], partners: Mapping[EventKey, Call], away: list[EventKey]) -> Seen:
        def seen(event: Event, out: Any) -> Any:
            call = partners.get(event.key)
            given = "" if call is None else self._given(event, call)
            if call is None or isinstance(given, str):
                return out
            here = {slot.path: slot.value for slot in event.inputs}
            if not all((x := here[path]) is not None and identical(x, known) for path, known in given.items()):
                away.append(event.key)
            elif _operator(event.key) in taken and not isinstance(out, dict):
                known = [
                    laid_out(self._tensor(n), *slot.layout) for n, slot in zip(call.outputs, event.outputs, strict=True)
                ]
                rest = iter(known)
                return changed_tensors(out, lambda _, tensor: next(rest, tensor))
            return out

        return seen

    # --- what it comes to -----------------------------------------------------------------------------------------

    def _concluded(self, rows: Sequence[OperatorCompared], gap: int, closed: str) -> Iterator[Record]:
        texts, missing = ", ".join(str(len(text)) for text in self.made.texts), 0
        notes = {"recording": f"{self.made.made_by}; {texts} tokens; {self.made.left_out:,} calls left out of it"}
        for why, of in self._left.items():
            inside = Counter({key: n for key, n in of.items() if why.startswith("only") and key[0] in self._wholes})
            missing += (of - inside).total()
            notes |= {f"{why}, in modules that were compared": _listed(inside)} if inside else {}
            notes |= {f"not compared, {why}": _listed(of - inside)} if of - inside else {}
        for name, sentence in notes.items():
            yield Control(name=name, passed=None, sentence=one_line(sentence, 4000))
        calls, differing = sum(row.calls for row in rows), [row for row in rows if row.differing]
        if differing:
            worst = max(differing, key=lambda row: _GRAVITY.index(row.verdict))
            finding, said = worst.verdict, f"the first operator to differ is {said_of(rows[0])}"
            said += f"; {said_of(worst)}" if worst.verdict != rows[0].verdict else ""
            said += f"; {len(rows) - len(differing):,} of {len(rows):,} operators have equal bits in every call"
        elif calls:
            finding, numbers = UNDECIDED if gap else "no divergence observed", sum(row.elements for row in rows)
            bound = f"at 95% fewer than {one_sided_bound(calls):.2%} of such calls do, if they are independent"
            said = f"no operator differs: 0 of {calls:,} calls have other bits ({numbers:,} numbers; {bound})"
        else:
            finding = "unknown"
            said = "no call was compared: names, shapes or dtypes match nowhere (--match maps names)"
        said += f"; {missing:,} calls could not be compared, and are listed" if missing else ""
        ends = (
            f"from end to end {gap:,} logits have other bits; {closed}"
            if gap
            else "from end to end the logits have equal bits"
        )
        sentences = [said, ends]
        if other := self._left.get(_OTHER_WEIGHTS):
            finding = _OTHER_WEIGHTS
            sentences.insert(0, f"{other.total():,} calls have other weights: {_listed(other)}")
        made = [one_line(sentence, 1000) for sentence in sentences]
        yield TraceVerdict(finding=finding, culprits=[], families=None, sentences=made)


def _row(key: Key, of: Sequence[Compared]) -> OperatorCompared:
    found, worst = [one.difference for one in of if one.difference is not None], max(of, key=_gravity)
    far = max(found, key=lambda d: (d.nonfinite, d.max_ulp), default=None)
    about: dict[str, Any] = {"calls": len(of), "differing": len(found), "elements": sum(one.elements for one in of)}
    about |= {"verdict": worst.verdict, "times": worst.times, "bound": worst.bound, "difference": far}
    return OperatorCompared(number=0, module=key[0], call=key[1], **about)


def said_of(row: OperatorCompared) -> str:
    """ "`linear` of model.layers.*.mlp.down_proj: 3 of 12 calls have other bits, at most 2 ULP, ...": in words."""
    d = row.difference
    far = f"at most {d.max_ulp:,} ULP" if d else ""
    if d and d.max_ulp > _ULP_CLEAR and d.scale:
        far += f" near zero, {d.max_abs / d.scale:.2g} of the largest number"
    what = f"{_said((row.module, row.call))}: {row.differing:,} of {row.calls:,} calls have other bits, {far}"
    return f"{what}, which is {in_words(row.verdict, row.times, row.bound)}"


def in_words(verdict: str, times: float, bound: str) -> str:
    """ "rounding (0.1 times what two orders of the same sum can be apart)": what `judged` found."""
    return f"{verdict} ({f'{times:,.3g} times ' * (times < sys.float_info.max)}{bound})"


def _said(key: Sequence[Any]) -> str:
    return f"`{key[1]}` of {key[0]}"


def _operator(key: EventKey) -> Key:
    """The call without the numbers of layers: equal layers are one operator."""
    return one_line(re.sub(r"(?<=\.)\d+(?=\.|\Z)", "*", key.module), 200), one_line(key.call, 80)


def _within(module: str, around: str) -> bool:
    return f"{module}.".startswith(f"{around}.")


def _listed(of: Mapping[Key, int]) -> str:
    """ "model.norm: Tensor.mul (3), rsqrt (3); lm_head: linear (3)"."""
    modules: dict[str, list[str]] = {}
    for (module, call), n in of.items():
        modules.setdefault(module, []).append(f"{call} ({n:,})")
    return "; ".join(f"{module}: {', '.join(calls)}" for module, calls in modules.items())
