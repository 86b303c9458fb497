"""One measurement, for every command: variants computed, sorted into classes of equal bits, replayed and checked."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch

from nondet.core.compare import ClassBook, class_errors, errors_against, looked_at
from nondet.core.launch import listen
from nondet.core.records import Axis, ErrorFigures, Row, Status, Value
from nondet.core.watch import Watch
from nondet.errors import UserError, WrongResultError

# One profiler session per case records device activity only: matching kernels to operators through the CPU's call
# stack, as `torch.profiler` does, takes longer than the measurement. Instead a kernel that nothing else launches marks
# the beginning and the end of each variant. torch.nextafter is compiled into torch, and no kernel of ours computes it.
_MARK = "nextafter"
_NOT_KERNELS = ("Memcpy", "Memset")  # they belong to the allocator or the launcher, not to the arithmetic


class VariantProfile:
    """Marks variants while they run, and gives the kernels that each launched."""

    def __init__(self, session: Any = None, mark: torch.Tensor | None = None) -> None:
        self._session, self._mark = session, mark
        self._marked: list[int] = []
        self._elsewhere: dict[int, list[str]] = {}

    @contextmanager
    def variant(self, index: int) -> Iterator[None]:
        """Run one variant inside this block."""
        global _under_way
        self._marked.append(index)
        _under_way = self
        if self._mark is not None:
            torch.nextafter(self._mark, self._mark)
        yield
        if self._mark is not None:
            torch.nextafter(self._mark, self._mark)

    def kernels(self, variants: int) -> list[list[str]]:
        """Distinct kernel names of each variant, in launch order; [] where nothing was profiled."""
        if self._elsewhere:
            return [self._elsewhere.get(i, []) for i in range(variants)]
        if self._session is None:
            return []
        cuda = torch.autograd.DeviceType.CUDA
        events = [event for event in self._session.kineto_results.events() if event.device_type() == cuda]
        stretches = between_marks([name for _, name in sorted((event.start_ns(), event.name()) for event in events)])
        if len(stretches) != len(self._marked):
            raise RuntimeError(f"the profiler saw {len(stretches)} of {len(self._marked)} variants")
        # a variant with many results was marked once, at its first index
        by_index = dict(zip(self._marked, stretches, strict=True))
        out: list[list[str]] = []
        for i in range(variants):
            out.append(by_index[i] if i in by_index else out[-1])
        return out


_under_way: VariantProfile | None = None


def launched_elsewhere(names: Sequence[str]) -> None:
    """Add the kernels that the current variant launched in other processes, which the profiler here does not see."""
    if names and _under_way is not None:
        _under_way._elsewhere.setdefault(_under_way._marked[-1], list(names))


def between_marks(names: Sequence[str]) -> list[list[str]]:
    """Kernel names in launch order -> the distinct ones of each marked stretch; others are left out."""
    stretches: list[dict[str, None]] = []
    inside = False
    for name in names:
        if _MARK in name:
            inside = not inside
            if inside:
                stretches.append({})
        elif inside and not name.startswith(_NOT_KERNELS):
            stretches[-1].setdefault(name)
    return [list(stretch) for stretch in stretches]


@contextmanager
def profile_variants(device: str) -> Iterator[VariantProfile]:
    """Profile the block if the device is "cuda"; else do nothing, because the launchers' own notes name what ran."""
    if device != "cuda":
        yield VariantProfile()
        return
    mark = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    # torch.profiler.profile would first import torch's compiler, nine hundred modules that are not needed
    with torch.autograd.profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True) as session:
        yield VariantProfile(session, mark)
        torch.cuda.synchronize()


# Above this many variants only the class sizes are kept: a list of 10,000 labels is of no use to a reader.
LISTED_VARIANTS = 4096
# The first and the last variant of each class are replayed; in a sweep with more classes, of the smallest ones.
_CLASSES_REPLAYED = 12


class Trial(NamedTuple):
    """One variant."""

    value: int | str  # its name on the axis `varied`: M, a position, a run, "prefill", ..
    # gives the result to compare: a tensor of the same shape and dtype for all variants of a case, or parts that make
    # one. Must not copy to the host.
    compute: Callable[[], Any]
    # `compute` gives [n, ...], n results of which each counts as one trial. An int value names the first of them, and
    # the others count up from it (positions); a string names them all (shuffles).
    many: bool = False


def measure(
    head: Row,
    trials: Sequence[Trial],
    *,
    watch: Watch | None = None,
    join: Callable[[Any], torch.Tensor] | None = None,
    replay: bool = True,
    profile: bool = True,
    warm: bool = False,
    enough: int = 0,
    reference: torch.Tensor | None = None,
    extra: Callable[[list[torch.Tensor], list[Value]], Mapping[str, Any]] | None = None,
    started: float | None = None,
) -> Row:
    """Compute every variant, sort the results into classes, replay some, and describe it all as a row; a
    `WrongResultError` for a result of another shape or dtype than the operator's.

    Args:
        watch: The operator that the variants call, if they call one: results are checked while variants are replayed.
        join: Makes one tensor of what a variant gives, unseen by the profiler.
        replay: Compute variants a second time. A case that repeats one call does that already.
        warm: Compute all variants once before, unprofiled: a first use may compile, or prove a member of its class.
        enough: Stop after so many variants if two of them differ; 0: never.
        reference: What the first variant should be, in float64.
        extra: Called with the first result of each class and its value; its entries go into the row's `extra`.
    """
    started = time.perf_counter() if started is None else started
    book = ClassBook()
    values: list[Value] = []
    starts = [0]
    for trial in trials[: 1 if head.axis == Axis.RUN else None] if warm else ():
        trial.compute()
    with listen() as noted, profile_variants(head.device if profile else "") as session:
        for trial in trials:
            with session.variant(len(values)):
                result = trial.compute()
            if join is not None:
                result = join(result)
            book.add(result if trial.many else result[None])
            count = len(result) if trial.many else 1
            values += [trial.value + i if isinstance(trial.value, int) else trial.value for i in range(count)]
            starts.append(len(values))
            del result
            if len(values) == enough and len(book.representatives) > 1:
                break
    if len(values) < 2:
        reason = "fewer than two variants: nothing to compare"
        return _finished(head, started, status=Status.SKIPPED, reason=reason)
    replays = differing = 0
    if replay:
        replays, differing = _replay(trials, starts, book, watch, join)
    elif watch is not None:
        _checked(trials[0], watch)
        replays = differing = int(False in looked_at(watch.repeated()))
    kernels = session.kernels(len(values))
    sets = list(dict.fromkeys(map(tuple, kernels)))
    listed = len(values) <= LISTED_VARIANTS
    errors = errors_against(book.representatives, reference) if reference is not None else []
    nonfinite = int(_nonfinite(book.representatives[0], reference))
    firsts = [values[book.labels.index(i)] for i in range(len(book.representatives))]
    details = dict(extra(book.representatives, firsts)) if extra is not None else {}
    # where a demonstration adds in a narrow accumulator, one order may overflow and another not
    fault = _fault(watch, [] if head.demonstration else errors, details)
    status = Status.DIVERGENT if len(book.representatives) > 1 or differing else Status.IDENTICAL
    of, reason = book.representatives[0].numel(), details.get("note", "")
    if fault:
        status, reason = Status.WRONG, fault
    elif nonfinite:
        reason = f"{nonfinite} of {of} elements of the first variant are NaN or infinite"
    row = row_of(
        head, values, book.labels, status=status, reason=reason, replays=replays, replays_parted=differing,
        ran=sorted(set(noted) | {k for names in sets for k in names}),
        kernel_sets=[list(names) for names in sets] if listed else [],
        kernels=[sets.index(tuple(names)) for names in kernels] if listed else [],
        difference=book.widest_difference(), error=errors[0] if errors else None, nonfinite=nonfinite, extra=details,
        worst_error=max(errors, key=lambda e: math.inf if e.relative_norm is None else e.relative_norm, default=None),
        class_errors=class_errors(book.representatives, reference) if reference is not None else [],
        accuracy=watch.accuracy if watch is not None else None,
    )  # fmt: skip
    return _finished(row if listed else msgspec.structs.replace(row, values=[], labels=[]), started)


def row_of(head: Row, values: Sequence[Value], results: Sequence[Hashable], **figures: Any) -> Row:
    """The row of computed trials: equal `results` are one class, by first appearance; `figures` as in `Row`."""
    sizes = Counter(results)
    number = {result: i for i, result in enumerate(sizes)}
    found = {
        "status": Status.DIVERGENT if len(sizes) > 1 else Status.IDENTICAL,
        "values": list(values),
        "labels": [number[result] for result in results],
        "class_sizes": list(sizes.values()),
        "trials": len(results),
        "distinct": len(sizes),
    }
    return msgspec.structs.replace(head, **found | figures)


def _finished(head: Row, started: float, **figures: Any) -> Row:
    return msgspec.structs.replace(head, seconds=time.perf_counter() - started, **figures)


def _replay(
    trials: Sequence[Trial],
    starts: Sequence[int],
    book: ClassBook,
    watch: Watch | None,
    join: Callable[[Any], torch.Tensor] | None,
) -> tuple[int, int]:
    """Compute some variants again: (how many, how many differed from their first result, or between two calls). A class
    that only noise made does not recur: so the first and the last variant of each class are repeated, the smallest
    classes first, and those of the sweep. `starts` is where the results of each trial begin in the book's labels, and
    the number of labels."""
    owner = [i for i, (start, stop) in enumerate(itertools.pairwise(starts)) for _ in range(start, stop)]
    members: dict[int, list[int]] = {}
    for place, label in enumerate(book.labels):
        members.setdefault(label, []).append(owner[place])
    again_at = {0, len(trials) - 1}
    for places in sorted(members.values(), key=len)[:_CLASSES_REPLAYED]:
        again_at |= {places[0], places[-1]}
    flags: list[torch.Tensor] = []  # bools of one element
    of: list[int] = []  # the index of each flag's variant
    for i in sorted(again_at, key=lambda at: (at != len(trials) - 1, at)):  # the last is the largest, mostly
        labels = book.labels[starts[i] : starts[i + 1]]
        again = _checked(trials[i], watch)
        again = again if join is None else join(again)
        results = again if trials[i].many else again[None]
        flags += [book.come_again(results, labels), *(watch.repeated() if watch is not None else ())]
        of += [i] * (len(flags) - len(of))
    return len(again_at), len({i for i, alike in zip(of, looked_at(flags), strict=True) if not alike})


def _checked(trial: Trial, watch: Watch | None) -> Any:
    if watch is not None:
        watch.next_variant()
        watch.checking = True
    try:
        return trial.compute()
    finally:
        if watch is not None:
            watch.checking = False


def _fault(watch: Watch | None, errors: Sequence[ErrorFigures], details: Mapping[str, Any]) -> str:
    """Why the result is not a valid answer, identical or not; "" where nothing shows that."""
    if watch is not None and watch.fault:
        return watch.fault
    if any(error.max_abs is None for error in errors):
        return "the result is NaN or infinite where the oracle is not"
    if details.get("exact") is False:
        return "it missed an answer that is exact in every order"
    return ""


def _nonfinite(result: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
    """How many elements are NaN or infinite. NaN equals NaN, so a kernel that gives only NaN counts as identical. Where
    the reference itself is not finite, they are right."""
    if not (result.dtype.is_floating_point and result.element_size() > 1):
        return torch.zeros((), dtype=torch.int64, device=result.device)
    lost = ~torch.isfinite(result)
    return (lost if reference is None else lost & torch.isfinite(reference)).sum()


# ---- why something could not be measured


@contextmanager
def kept_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Keep warnings off the terminal: in them torch gives the reason why a backend refuses, each once per process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def reason_of(error: BaseException, caught: Sequence[warnings.WarningMessage] = ()) -> tuple[str, str]:
    """(status, reason) of a failed measurement: "skipped" for a refusal, "wrong" for an invalid answer, else
    "error"."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:500]
    if "No available kernel" in line:
        # "... not used because:" is a heading, and "has been runtime disabled" is our own restriction to one backend
        texts = [str(w.message).partition(" (Triggered")[0] for w in caught]
        reasons = [text for text in texts if "because:" not in text and "runtime disabled" not in text]
        return Status.SKIPPED, " ".join([line, *dict.fromkeys(reasons)])[:500]
    if isinstance(error, WrongResultError):
        return Status.WRONG, line
    if isinstance(error, (NotImplementedError, UserError)):
        return Status.SKIPPED, line
    if isinstance(error, SystemExit):
        return Status.ERROR, f"it called sys.exit({error.code!r})"[:500]
    return Status.ERROR, f"{type(error).__name__}: {line}"


def failed(head: Row, error: BaseException, started: float, caught: Sequence[warnings.WarningMessage] = ()) -> Row:
    """The row of a case that could not be measured."""
    status, reason = reason_of(error, caught)
    return _finished(head, started, status=status, reason=reason)


# ---- inputs that were written to

Fingerprint = dict[str, tuple[torch.Tensor, ...]]


def named_tensors(inputs: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """All tensors of nested inputs. Names are the keys of a mapping, or positions in a sequence."""
    if isinstance(inputs, torch.Tensor):
        return [(name, inputs)]
    several = inputs if isinstance(inputs, Mapping | tuple | list) else ()
    parts = several.items() if isinstance(several, Mapping) else enumerate(several)
    return [pair for part, value in parts for pair in named_tensors(value, f"{name}.{part}" if name else str(part))]


def fingerprint(inputs: Any) -> Fingerprint:
    """Sums of the bits of every tensor in nested inputs, on its device: by row and by column, so that moves show."""
    prints: Fingerprint = {}
    for name, x in named_tensors(inputs):
        raw = torch.view_as_real(x.detach()) if x.dtype.is_complex else x.detach()
        if raw.dtype.is_floating_point:
            raw = raw.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.element_size()])
        rows = raw.sum(-1, dtype=torch.int64) if raw.dim() else raw.to(torch.int64)
        columns = raw.flatten(0, -2).sum(0, dtype=torch.int64) if raw.dim() > 1 else raw.to(torch.int64)
        prints[name] = (rows, columns)
    return prints


def written_to(before: Fingerprint, inputs: Any) -> list[str]:
    """Names of the tensors whose bits have changed."""
    after = fingerprint(inputs)
    pairs = [(name, a, b) for name, sums in before.items() for a, b in zip(sums, after[name], strict=True)]
    same = looked_at([(a == b).all() if a.shape == b.shape else torch.tensor(False) for _, a, b in pairs])
    return list(dict.fromkeys(name for (name, _, _), kept in zip(pairs, same, strict=True) if not kept))
