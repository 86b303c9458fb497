"""The definition of a probe, what probes take from the user's options, and the cases that all operators share.

A case is a set of variants of one computation that ought to give equal bits. A probe defines the cases and what their
variants compute; the runner computes them under every implementation, sorts the results into classes, and writes rows.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from nondet.core.compare import identical
from nondet.core.inputs import KINDS, placed
from nondet.core.launch import check_device_alive
from nondet.core.measure import Trial, failed, kept_warnings
from nondet.core.processes import free_gpu_memory, free_memory
from nondet.core.records import Row, Value
from nondet.core.registry import load_object, misfit, operators
from nondet.errors import UnknownNameError, UserError, WrongResultError, WrongShapeError, reason_of


@dataclass(frozen=True)
class Options:
    """The options of the command line, checked. None: the probe's own default list."""

    device: str = "cpu"  # "cpu" or "cuda"
    dtypes: tuple[str, ...] | None = None  # dtypes to test
    # `m`, `k`, `n`: sizes given by the user; a probe takes those that its operator has
    m: int | None = None
    k: int | None = None
    n: int | None = None
    # (name, K, N) of real linear layers, from a preset or a model's config
    layers: tuple[tuple[str, int, int], ...] = ()
    # sizes of a model (heads, head_dim, hidden, vocabulary), from a preset or a model's config
    config: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[str, ...] | None = None  # kinds of input (`nondet.core.inputs.KINDS`)
    runs: int | None = None  # repetitions of run-to-run cases
    ranks: tuple[int, ...] | None = None  # numbers of ranks to start, for probes of collectives
    seed: int = 0
    full: bool = False  # the long sweep instead of the default list of under 20 s
    map: str = ""  # "mn" or "mk": every M at some N, or at some K, instead of the default list; "": no map
    # (rows, keys or 0) that a trace saw, see `nondet.probes.runner`: they are added to the sizes
    met: tuple[tuple[int, int], ...] = ()
    own: int = 0  # keys that the row in question saw there
    operator: str = ""  # the operator in the trace, where the probe tests several
    # all probes were named at once: what others nearly show is only run if this probe is named
    one_of_all: bool = False

    @property
    def brief(self) -> bool:
        """All probes on a GPU, which are to end in half a minute: some test fewer layers and dtypes."""
        return self.one_of_all and self.device == "cuda"

    def __post_init__(self) -> None:
        """Check them."""
        for name in ("m", "k", "n", "runs"):
            value, least = getattr(self, name), 2 if name == "runs" else 1
            if value is not None and value < least:
                what = "compares nothing" if name == "runs" else "is not a size"
                raise UserError(f"--{name} {value} {what}", f"Give {least} or more.")
        for kind in self.inputs or ():
            if kind not in KINDS:
                raise UnknownNameError("kind of input", kind, KINDS)


@dataclass(frozen=True)
class Case:
    """One case: variants that ought to give equal bits."""

    name: str  # unique within the probe, device and dtype; it is part of the key that a resumed run skips by
    operator: str  # a declared operator (`nondet.core.registry.operators`), or a name of the probe's own
    shape: Mapping[str, int]  # named sizes, for the row
    dtype: str
    varied: str  # what differs between the variants: batch_size, position, run, query_chunk, split, order, ..
    inputs: str = "bell"
    impls: tuple[str, ...] | None = None  # the implementations of the case; None: the user's
    # the kind of what varies, an `Axis` of `nondet.core.records`; None: what `varied` usually is
    axis: str | None = None
    demonstration: bool = False  # the probe built the operator to show a cause: no verdict on what a library runs
    # every partial sum is exact, so all orders must agree and a difference is a bug; None: by `inputs`
    exact: bool | None = None
    data: Mapping[str, Any] = field(default_factory=dict)  # other data of `prepare` and `trials`

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


Operator = Callable[..., torch.Tensor]


class Classes(NamedTuple):
    """The first result of each class of equal bits, and its value on the axis."""

    results: list[torch.Tensor]
    firsts: list[Value]


class Probe:
    """A probe: one file in `probes/`, one line in `nondet.core.registry.PROBES`, one test. `answers`: kinds of input
    whose result is the same in every order, so that any other one is wrong."""

    name: str
    answers: tuple[str, ...] = ()

    def cases(self, options: Options) -> Iterable[Case]:
        """The cases; no tensors are made here. Raises UserError: a size or dtype that the operator can't have."""
        raise NotImplementedError

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """The inputs of a case, shared by all implementations and variants."""
        raise NotImplementedError

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """The variants, with `operator` the launcher of the current implementation."""
        raise NotImplementedError

    def own(self, case: Case, impl: str) -> AbstractContextManager[Operator]:
        """A block around all variants, with the computation of a case whose operator the probe has itself; optional."""
        return nullcontext(torch.empty)  # never called: the probe computes by itself

    def join(self, case: Case, result: torch.Tensor) -> torch.Tensor:
        """What is compared of a variant's result; not profiled."""
        return result

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """A variant's result by the operator's oracle in float64; None where it has none."""
        declaration = operators().get(case.operator)
        if declaration is None or declaration.reference is None:
            return None
        one_position = replace(case, shape={**case.shape, "M": 1}) if case.varied == "position" else case
        wide = {name: _widened(x) for name, x in inputs.items()} if isinstance(inputs, dict) else inputs
        variants = list(self.trials(one_position, wide, load_object(declaration.reference)))
        # one large batch takes one call; a small one as many as there are rows
        large = (v for v in variants if case.varied == "batch_size" and isinstance(v.value, int) and v.value >= 16)
        chosen = next(large, variants[0])
        result = self.join(case, chosen.compute())
        return result[0] if chosen.many else result

    def findings(self, case: Case, inputs: Any, classes: Classes, operator: Operator) -> dict[str, Any]:
        """The probe's own findings about the classes of results, as JSON-able data; optional."""
        return {}


def _widened(x: Any) -> Any:
    """Numbers in float64; float8 is left to the oracle, which knows its scales."""
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.element_size() > 1 else x


# Shapes of results, by the signatures in nondet/kernels/reference.py. A probe compares parts of results: a kernel that
# gives 1,000 rows for 1,200, or float32 for bfloat16, would have equal bits in every part, so `checked` is around all.
_SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {
    "linear": lambda x, weight, *_: (*x.shape[:-1], weight.shape[0]),
    **dict.fromkeys(("grouped_matmul", "scaled_grouped_matmul"), lambda x, weight, *_: (x.shape[0], weight.shape[2])),
    **dict.fromkeys(("matmul", "split_k", "scaled_matmul"), lambda a, b, *_: (*a.shape[:-1], b.shape[-1])),
    "attention": lambda q, _, v, *__: (*q.shape[:-1], v.shape[-1]),
    **dict.fromkeys(("rms_norm", "softmax", "log_softmax", "cumsum"), lambda x, *_: tuple(x.shape)),
    **dict.fromkeys(("index_add", "scatter_add"), lambda x, *_: tuple(x.shape)),
    **dict.fromkeys(("sum", "mean", "logsumexp"), lambda x, *_: tuple(x.shape[:-1])),
}


def require_arguments(call: Operator, *arguments: Any, **keywords: Any) -> None:
    """Refuse a user's function that leaves out an argument of the operator: the case is then skipped."""
    try:
        inspect.signature(call).bind(*arguments, **keywords)
    except ValueError:  # a builtin may not report its arguments
        return
    except TypeError as error:
        raise NotImplementedError(f"the case is not for it: {error}") from None


def checked(operator: str, call: Operator) -> Operator:
    """`call`, with the shape, dtype and device of every result checked, if the operator is in `_SHAPES`."""
    if operator not in _SHAPES:
        return call

    @functools.wraps(call)
    def run(*arguments: Any, **keywords: Any) -> Any:
        out: Any = call(*arguments, **keywords)
        if not isinstance(out, torch.Tensor):
            raise WrongShapeError(f"{operator} gave a {type(out).__name__}, not a tensor")
        if tuple(out.shape) != (shape := _SHAPES[operator](*arguments)):
            raise WrongShapeError(f"{operator} gave the shape {tuple(out.shape)}, not {shape}")
        wanted = next((x for x in arguments if isinstance(x, torch.dtype)), arguments[0].dtype)
        if out.dtype != wanted:
            raise WrongResultError(f"{operator} gave {out.dtype} for {wanted}")
        if out.device != arguments[0].device:
            raise WrongResultError(f"{operator} gave a result on {out.device} for inputs on {arguments[0].device}")
        return out

    return run


# What torch's own operators compute in. The float8 and float4 formats are for storage only.
COMPUTE_DTYPES = ("float64", "float32", "bfloat16", "float16")

# Powers of two and their neighbours, and sizes between them: tiles, waves and heuristics change there.
SWEEP = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 160),
    *(192, 224, 255, 256, 257, 320, 384, 448, 511, 512, 513, 640, 768, 1023, 1024, 1025, 1536, 2048, 3072, 4096),
)
_DENSE = 64  # a dense sweep holds every size up to here: a window of few sizes may be anywhere
# Every size up to this one is tried in a full sweep on a CPU, where a product of 4096 rows takes a second or so.
_DENSE_ON_CPU = 512


def given_layer(options: Options) -> tuple[int, int] | None:
    """K and N of the one layer that --k and --n name; one of them gives both. None: neither was given."""
    one = options.k or options.n
    return (one, options.n or one) if one else None


def weight_scale(K: int) -> float:
    """To give weights the variance 1/K, about, as in a trained layer; a power of two keeps every drawn digit."""
    return 2.0 ** -round(math.log2(K) / 2)


def largest_batch(options: Options, default: int) -> int:
    """Rows of the largest batch: --m or the default, and at least those of a trace."""
    return max([options.m or default, *(rows for rows, _ in options.met)])


def dtypes(options: Options, operator: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """The requested dtypes, each once, or the default ones; an error for one that the operator does not have."""
    for name in options.dtypes or ():
        if name not in COMPUTE_DTYPES:
            raise UserError(f"{operator} does not compute in {name}", f"It does in {', '.join(COMPUTE_DTYPES)}.")
    return tuple(dict.fromkeys(options.dtypes or default))


def kinds(options: Options, default: Iterable[str]) -> tuple[str, ...]:
    """The requested kinds of input, each once, or the default ones."""
    return tuple(dict.fromkeys(options.inputs or default))


def drawn(largest: int, options: Options, count: int = 3, above: int = 1) -> set[int]:
    """At most `count` sizes between `above` and `largest` that no list holds: another seed draws others."""
    unlisted = sorted(set(range(above + 1, largest)) - set(SWEEP))
    return set(random.Random(options.seed).sample(unlisted, min(count, len(unlisted))))  # noqa: S311 - sizes


def some(few: Iterable[int], largest: int, options: Options) -> list[int]:
    """Those of a short list that are below `largest`, `largest` itself, and a drawn one."""
    return sorted({x for x in few if x < largest} | {largest} | drawn(largest, options, 1))


def sweep(largest: int, options: Options, *, dense: bool = False) -> list[int]:
    """Sizes up to `largest`, 1 and itself included: a few dozen, or all affordable ones if `options.full`. Some are
    drawn, and those of a trace are included, however large. `dense`: include every size up to 64."""
    every = _DENSE if dense else 1
    chosen = {*SWEEP, *range(1, every + 1), *drawn(largest, options, above=every)}
    if options.full:
        chosen |= set(range(1, (4096 if options.device == "cuda" else _DENSE_ON_CPU) + 1))
    return sorted({x for x in chosen if x < largest} | {largest} | {rows for rows, _ in options.met if rows})


@functools.lru_cache(maxsize=1)
def _free_on_gpu(index: int, second: int) -> int:
    """Free bytes, queried once a second, because a plan needs them for each case, and a busy driver is slow. A process
    that only plans has no context on the device, and gets none for this."""
    free = None
    if not getattr(torch._C, "_cuda_hasPrimaryContext", lambda _: True)(index):
        free = free_gpu_memory(str(torch.cuda.get_device_properties(index).uuid))
    return int(torch.cuda.mem_get_info(index)[0]) if free is None else free


def require_memory(device: str, needed: int, what: str) -> None:
    """Refuse, as a `UserError`, sizes whose tensors do not fit here, before any is made: `needed` bytes are alive at
    once. Also refuses a device that is not there."""
    if device != "cuda":
        free = free_memory()
    elif not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device", "Use --device cpu.")
    else:
        free = _free_on_gpu(torch.cuda.current_device(), int(time.monotonic()))
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if needed > free:
        memory = f"{needed / 2**30:,.3g} GiB of memory on {device}, and {free / 2**30:,.3g} GiB are free"
        raise UserError(f"{what} needs about {memory}", "Give smaller sizes.")


# Cases that all operators share, by `Case.varied`, and the subject of each: other rows' values, operands' layout, and
# earlier calls. A request's bits may depend on concurrent requests without any size changing: a scale taken over other
# requests' rows, a NaN that leaks from a neighbour's, uninitialized memory. And the same call may give other bits at
# another time: the first of a process, after an autotuner changed its choice, while its result's buffer is used again,
# or when a cache did not notice that the inputs were written to.
AXES = {
    "neighbour_values": "while other rows hold other values",
    "alignment": "at other addresses",
    "history": "first, later, after other calls, held, written in place",
}
OTHER_CALLS = 256  # autotuners change their mind after a few calls, or some hundreds
LARGER = 256  # rows of the largest call between: a workspace may have grown since, or a tuner chosen again
# Rows in addition to the compared ones: in sizes first called with other rows, and in sizes first called with these.
# Any range of sizes that holds one list holds a part of the other.
_NEW_SIZES = ((1, 3, 6), (2, 5, 9))
_DIRTY = 16  # blocks of a result's size that held NaN when they were freed
_SHIFTS = (0, 1, 3, 8)  # elements past an aligned address


class Call(NamedTuple):
    """One call of an operator, and which of its rows are compared."""

    tensors: tuple[torch.Tensor, ...]  # as the operator takes them
    # for each tensor the indices along its first axis that belong to others; None: it has none of theirs
    others: tuple[torch.Tensor | None, ...]
    kept: torch.Tensor  # indices along the first axis of the result that are compared

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], mine: torch.Tensor | None = None, batched: int = 1) -> Call:
        """A call that compares the rows that are `mine` [rows], a third of them by default, one row by itself, too; the
        first `batched` tensors hold rows of the batch."""
        rows = torch.arange(len(tensors[0]), device=tensors[0].device)
        mine = (rows % 3 == 1 if len(rows) > 1 else rows == 0) if mine is None else mine
        others = [rows[~mine] if i < batched else None for i in range(len(tensors))]
        return cls(tuple(tensors), tuple(others), rows[mine])

    def compared(self, operator: Operator) -> torch.Tensor:
        """The compared rows."""
        return operator(*self.tensors).index_select(0, self.kept)

    def resized(self, rows: int) -> Call:
        """The call with this many rows, cycling through these; counts of rows per expert are adjusted."""
        count = len(self.tensors[0])
        turn = torch.arange(rows, device=self.tensors[0].device) % count

        def of(x: torch.Tensor, theirs: torch.Tensor | None) -> torch.Tensor:
            if theirs is not None:
                return raw(x).index_select(0, turn).view(x.dtype)
            return x if x.is_floating_point() else (x * (rows // count) if rows >= count else x.clamp(max=rows))

        return self.replaced(map(of, self.tensors, self.others))

    def replaced(self, tensors: Iterable[torch.Tensor]) -> Call:
        """The same call with other tensors."""
        return self._replace(tensors=tuple(tensors))


Fill = Callable[[torch.Tensor], torch.Tensor]
_FILLS: dict[str, Fill] = {  # of other rows
    "as drawn": torch.clone,
    "zeros": torch.zeros_like,
    "huge": lambda x: x * (64.0 if x.dtype == torch.float16 else 2.0**20),  # its ordinary products are finite
    "one outlier": lambda x: (
        x.flatten().index_fill(0, torch.tensor([x.numel() // 2], device=x.device), 60000.0).view_as(x)
    ),
    "NaN": lambda x: torch.full_like(x, torch.nan),
    "infinite": lambda x: torch.full_like(x, torch.inf),
    "hidden": lambda x: torch.full_like(x, -torch.inf),  # completely, as rows of a padded batch
    "negated": torch.neg,
    "larger by one": lambda x: x + 1,  # no column is zero any more
    "in another order": lambda x: x.flip(0),
    "copies of one row": lambda x: x[:1].expand_as(x),
}


def _neighbours(call: Call, operator: Operator) -> Iterator[Trial]:
    for name, fill in _FILLS.items():
        yield Trial(name, partial(_with_neighbours, call, operator, fill))
    yield Trial("copies of the asked rows", partial(_with_neighbours, call, operator))
    yield Trial("that begin as the asked rows", partial(_with_neighbours, call, operator, begin=True))


def _with_neighbours(call: Call, operator: Operator, fill: Fill | None = None, *, begin: bool = False) -> torch.Tensor:
    """The compared rows among others that are filled; without `fill` each is a copy of a compared row, or begins so."""
    filled = []
    for tensor, others in zip(call.tensors, call.others, strict=True):
        if others is not None and len(others) and tensor.is_floating_point():
            own = tensor.index_select(0, others)
            twins = call.kept[torch.arange(len(others), device=others.device) % len(call.kept)]
            theirs = tensor.index_select(0, twins) if fill is None else _filled(own, fill)
            if begin:
                half = tensor[0].numel() // 2
                parts = raw(theirs).flatten(1)[:, :half], raw(own).flatten(1)[:, half:]
                theirs = torch.cat(parts, 1).view(theirs.shape).view(theirs.dtype)
            tensor = raw(tensor).index_copy(0, others, raw(theirs)).view(tensor.dtype)
        filled.append(tensor)
    return call.replaced(filled).compared(operator)


def raw(x: torch.Tensor) -> torch.Tensor:
    """float8 as bytes: torch can copy and pick these on every device."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _filled(x: torch.Tensor, fill: Fill) -> torch.Tensor:
    if x.element_size() > 1:
        return fill(x)
    most = torch.finfo(x.dtype).max
    return fill(x.float()).clamp(-most, most).to(x.dtype)


def _alignments(call: Call, operator: Operator) -> Iterator[Trial]:
    def shifted(shift: int) -> torch.Tensor:
        own = (placed(x, x.stride(), shift, 64 // x.itemsize) if x.is_floating_point() else x for x in call.tensors)
        return call.replaced(own).compared(operator)

    for shift in _SHIFTS:
        yield Trial(f"{shift} elements past" if shift else "aligned", partial(shifted, shift))


def _moments(call: Call, operator: Operator) -> Iterator[Trial]:
    """The same call at other times; calls between have the same shapes and other values."""
    # of the same size: in another order along the first axis, with their signs flipped
    turned = (_filled(x, lambda wide: -wide.flip(0)) if x.is_floating_point() else x for x in call.tensors)
    other = call.replaced(turned)

    def held() -> torch.Tensor:
        mine = operator(*call.tensors)
        operator(*other.tensors)
        return mine.index_select(0, call.kept)

    def after(between: Call, times: int = 1) -> torch.Tensor:
        with nullcontext() if between is other else suppress(Exception):  # another size may not be supported
            for _ in range(times):
                operator(*between.tensors)
        return call.compared(operator)

    def over_nan() -> torch.Tensor:
        shaped = operator(*other.tensors)
        dirty = [torch.full_like(shaped, torch.nan) for _ in range(_DIRTY)]
        del dirty  # the allocator returns the same memory again
        return call.compared(operator)

    yield Trial("first", partial(call.compared, operator))
    yield Trial("second", partial(call.compared, operator))
    yield Trial("after a call with other values", partial(after, other))
    yield Trial("held while another call runs", held)
    for at, tensor in enumerate(call.tensors):
        if tensor.is_floating_point():
            yield Trial(f"argument {at} written in place", partial(_rewritten, call, other, operator, at))
    if call.others[0] is not None:
        n = len(call.tensors[0])
        larger = 4 * n if call.tensors[0].dim() > 2 else LARGER // n * n + n  # of requests fewer than of rows
        for rows, what in ((1, "one row"), (larger, "the largest batch")):
            yield Trial(f"after {what}", partial(after, call.resized(rows)))
        yield Trial("after the first call of a size had other values", partial(_at_new_sizes, call, other, operator))
    yield Trial("into memory that held NaN", over_nan)
    yield Trial(f"after {OTHER_CALLS} other calls", partial(after, other, OTHER_CALLS))


def _at_new_sizes(call: Call, other: Call, operator: Operator) -> torch.Tensor:
    """The compared rows, in calls of sizes that first ran with other values, where that decides their bits: these sizes
    agree, and those that first ran with the compared rows agree on other bits. So the kernel keeps a shape's first
    choice."""
    found, n = [], len(call.tensors[0])
    with suppress(Exception):  # unsupported sizes are left out
        for first, more in zip((other, call), _NEW_SIZES, strict=True):
            given = []
            for rows in more:
                operator(*first.resized(n + rows).tensors)
                given.append(call.resized(n + rows).compared(operator))
            found.append(given)
        (values, *_), (own, *_) = found
        if all(steady(given) for given in found) and not identical(values, own):
            return values
    return call.compared(operator)


def steady(results: Sequence[torch.Tensor]) -> bool:
    """Whether all have equal bits."""
    return all(identical(results[0], other) for other in results[1:])


def _rewritten(call: Call, other: Call, operator: Operator, at: int) -> torch.Tensor:
    """The call after the storage of one argument held other values: a cache must notice."""
    buffer = other.tensors[at].clone(memory_format=torch.preserve_format)
    tensors = [buffer if i == at else x for i, x in enumerate(call.tensors)]
    operator(*tensors)
    buffer.copy_(call.tensors[at])
    return call.replaced(tensors).compared(operator)


def shared_trials(varied: str, call: Call, operator: Operator) -> Iterator[Trial]:
    """The variants of one of `AXES`."""
    return {"neighbour_values": _neighbours, "alignment": _alignments, "history": _moments}[varied](call, operator)


# Messages of torch, NumPy and authors of kernels about operands that do not fit each other.
_MISFIT = re.compile(
    "cannot be multiplied|must match the (existing )?size|(size|dimension|shape) mismatch|incompatible (dimen|shape)"
    "|shapes .* not aligned|(could|does) not (be )?broadcast|first two dimensions|mismatch in its core dimension",
    re.IGNORECASE,
)
_MISCALLED = re.compile("(takes|missing|expected).*argument")


def fitted(operator: str, call: Operator, who: str) -> Operator:
    """A user's function that raises MisfitError for a fault of its form: operands that do not fit each other, a result
    of another shape, a call that can't be made. Any other exception belongs only to this case."""

    @functools.wraps(call)
    def run(*arguments: Any, **keywords: Any) -> Any:
        try:
            return call(*arguments, **keywords)
        except WrongShapeError as error:
            fault = str(error)
        except Exception as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            called = isinstance(error, TypeError) and frame.f_globals is globals() and _MISCALLED.search(str(error))
            if not called and not _MISFIT.search(str(error)):
                raise
            fault = reason_of(error)
        raise misfit(call, operator, who, arguments, fault)

    return run


def tried(head: Row, measured: Callable[[], Row], *, raised: type[UserError], may_refuse: bool = False) -> Row:
    """The row, or one that says why it could not be measured, unless it is `raised`. `may_refuse`: an implementation
    need not take such a case."""
    started = time.perf_counter()
    # torch explains in warnings why a backend refuses, each once per process: kept for the row
    with kept_warnings() as caught:
        try:
            return measured()
        except raised:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a kernel raises becomes a row
            refused = may_refuse and not isinstance(error, WrongResultError | SystemExit)
            shown = NotImplementedError(f"the case is not for it: {reason_of(error)}") if refused else error
            row = failed(head, shown, started, caught)
            check_device_alive(head.device, error)
            return row


def in_batches(operator: Operator, x: torch.Tensor, rows: int, M: int) -> torch.Tensor:
    """The first `rows` rows of x [at least rows and M, ...], each computed in a batch of exactly M rows. A larger batch
    holds one half of them at its head and the other at its tail, where the last tile may be partly filled. Pieces are
    joined by copies, so that on a GPU only the operator's kernels run."""
    if rows <= M:
        head = rows - rows // 2
        out = operator(_joined([x[:head], x[rows:M], x[head:rows]]))
        return _joined([out[:head], out[M - rows + head :]])
    return in_slices(lambda start, stop: operator(x[start:stop]), rows, M)


def in_slices(compute: Callable[[int, int], torch.Tensor], rows: int, M: int) -> torch.Tensor:
    """Rows 0 ... rows - 1 of compute(start, stop), in batches of exactly M; the last one begins early enough."""
    parts = [compute(start, start + M) for start in range(0, rows - M + 1, M)]
    if rest := rows % M:
        parts.append(compute(rows - M, rows)[M - rest :])
    return _joined(parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    whole = parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]))
    for rows, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
        rows.copy_(part)
    return whole


def batch_trials(
    case: Case, compute: Operator, x: torch.Tensor, rows: int, call: Call | None = None, whole: Operator | None = None
) -> Iterator[Trial]:
    """The variants of a case over the rows of a batch `x` (or their indices): the first `rows` of them in batches of M,
    at every position of one batch, all of them again and again; or one of `AXES`, of `call` by `whole`."""
    if call is not None and case.varied in AXES:
        yield from shared_trials(case.varied, call, whole or compute)
    elif case.varied == "position":
        yield Trial(0, partial(at_every_position, compute, x[:rows], case.shape["M"]), many=True)
    else:
        for value in case.data["values"]:
            again = case.varied == "run"
            yield Trial(value, partial(compute, x) if again else partial(in_batches, compute, x, rows, value))


def at_every_position(operator: Operator, x: torch.Tensor, positions: int) -> torch.Tensor:
    """Every row of x [R, ...] at every position of a batch, in R batches that rotate the rows: [positions, R, ...]."""
    rows = len(x)
    at = torch.arange(positions, device=x.device)
    turns = torch.stack([operator(x[(at + turn) % rows]) for turn in range(rows)])
    row = torch.arange(rows, device=x.device)
    return turns[(row[None, :] - at[:, None]) % rows, at[:, None]]
