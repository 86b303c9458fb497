"""A fingerprint: digests of fixed computations that reveal the order of additions, on this machine.

Operands are drawn on the CPU, whose `torch.rand` gives the same numbers everywhere; their digest is kept, so that two
machines are compared only where they got the same. A call has many equal copies of a block of rows, so that the work
fills the chip. An invariant implementation gives every copy the same bits wherever it is computed; a copy that differs
shows a unit that adds wrongly. Stock promises this of no copy: of it only repetitions of the whole call are compared.
"""

from __future__ import annotations

import ctypes
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nondet.certify.plan import Question, Wish, plan
from nondet.core.compare import digest, row_hashes
from nondet.core.processes import nvml
from nondet.core.records import Fingerprint, MachineSeen
from nondet.core.registry import class_operators, declared, load_implementation
from nondet.core.traces import tokens_digest, trace_digest
from nondet.embedded import DEFAULT_PROMPT
from nondet.errors import EngineStoppedError, reason_of
from nondet.sampling.engine import run_session
from nondet.sampling.implementations import implementation
from nondet.sampling.model import load_model
from nondet.sampling.plan import Load, Request

IMPLS = ("invariant", "stock")
ROWS = 32  # of a block: one tile of most kernels
_FEWER = {"attention_gradient": 1}  # a row of it is a head's whole prompt
COPIES = {"cuda": 160, "cpu": 8}  # of a block in one call, the most; 5,120 rows are two tiles or more for every SM
ELEMENTS = {"cuda": 2**24, "cpu": 2**20}  # of the first operand, about, with all copies
RUNS = {"cuda": 8, "cpu": 3}
SHAPES = 2  # of each operator and dtype
_LEAST = 1000  # sizes of a shape, multiplied: fewer terms hide an order
_TOKENS = 16
MODEL_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}


@dataclass(frozen=True)
class Case:
    """One computation: a block of `ROWS` rows (or of whole requests, of attention), copied and repeated."""

    question: Question
    calls: Mapping[str, Callable[..., Any]]  # "invariant": the class's; "stock", once for all classes

    @property
    def name(self) -> str:
        """Its sizes, layout and kind of input."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.question.shape.items())
        return " ".join(part for part in (sizes, self.question.layout, self.question.kinds[0]) if part)

    def record(self, impl: str, **figures: Any) -> Fingerprint:
        """Of one implementation."""
        q = self.question
        cls = q.cls if impl == "invariant" else ""
        return Fingerprint(
            impl=impl, cls=cls, operator=q.operator, case=self.name, dtype=q.dtype, device=q.device, **figures
        )


def cases(device: str) -> list[Case]:
    """Of each operator, class and dtype the smallest shapes that hide no order, from what `nondet certify` asks."""
    chosen: dict[tuple[str, str, str], dict[tuple[int, ...], Case]] = {}
    for question, _, members in plan(Wish(device=device, operators=tuple(class_operators(device)))):
        of = (question.operator, question.cls, question.dtype)
        if not any(word in question.layout for word in ("strided", "offset", "bias")):
            chosen.setdefault(of, {}).setdefault(tuple(question.shape.values()), Case(question, members))
    made, known = list[Case](), set[tuple[str, ...]]()
    for by_shape in chosen.values():
        shapes = sorted(by_shape, key=math.prod)
        for shape in ([s for s in shapes if math.prod(s) >= _LEAST] or shapes)[:SHAPES]:
            q, calls = by_shape[shape].question, {"invariant": by_shape[shape].calls["invariant"]}
            whole = _FEWER.get(q.operator, ROWS) if q.axis == "M" else q.whole
            case = Case(replace(q, values=(whole,), kinds=q.kinds[:1]), calls)
            if case.record("stock").key not in known:
                calls["stock"] = load_implementation(q.operator, "stock", device).call
                known.add(case.record("stock").key)
            made.append(case)
    return made


def copied(question: Question, operands: Sequence[Any], copies: int) -> tuple[tuple[Any, ...], Question]:
    """Operands whose batch holds `copies` of the block, one after the other, and the question of all these rows."""
    operator = declared()[question.operator]
    if question.axis == "form":
        return tuple(x.repeat(copies, *(1,) * (x.dim() - 1)) for x in operands), question
    made = []
    for i, x in enumerate(operands):
        batch = -1
        if question.operator == "grouped_matmul":  # x, weight, the expert of each row
            batch = (0, -1, 0)[i]
        elif i < len(operator.operands) and operator.operands[0].axes[0] in operator.operands[i].axes:
            axes = operator.operands[i].axes
            batch = axes.index(operator.operands[0].axes[0]) - len(axes) + x.dim()
        made.append(x if batch < 0 or x.shape[batch] == 1 else torch.cat([x] * copies, batch))
    return tuple(made), replace(question, values=(int(question.whole) * copies,))


def blocks(question: Question, out: torch.Tensor, copies: int) -> torch.Tensor:
    """The result as [copies, ...], by copy: of products of batches [B, M, N] the rows are the second axis."""
    axis = int("B" in question.shape and question.axis == "M")
    return torch.stack(out.chunk(copies, axis))


@dataclass
class Seen:
    """Results of one computation, each a block: their hashes by run and copy, and one result of each hash."""

    hashes: list[list[int]] = field(default_factory=list)
    kept: dict[int, str] = field(default_factory=dict)  # hash -> digest, of the first run's first copy and of others

    def add(self, results: torch.Tensor) -> None:
        """One run's, [copies, ...]."""
        # by rows first: to make a weight for each element of a large result would take seconds
        rows = row_hashes(results.reshape(-1, results.shape[-1]))
        hashes = row_hashes(rows.view(len(results), -1)).tolist()
        self.hashes.append(hashes)
        for i, value in enumerate(hashes):
            if value not in self.kept and len(self.kept) < 16:
                self.kept[value] = digest(results[i])

    def figures(self) -> dict[str, Any]:
        """For the record: what most had, and how many had not."""
        counts = Counter(value for run in self.hashes for value in run)
        most = max(self.kept, key=lambda value: counts[value])
        wrong = [(i, j) for i, run in enumerate(self.hashes) for j, value in enumerate(run) if value != most]
        return {
            "digest": self.kept[most],
            "runs": len(self.hashes),
            "units": len(self.hashes[0]),
            "differing": len(wrong),
            "runs_differing": len({i for i, _ in wrong}),
            "units_differing": len({j for _, j in wrong}),
        }


def measure(case: Case) -> Iterator[Fingerprint]:
    """The case under each implementation. What an implementation does not do here is skipped, with its reason."""
    question, device = case.question, case.question.device
    operands = replace(question, device="cpu").prepare(question.kinds[0])
    given = digest(*(x.contiguous() for x in operands if isinstance(x, torch.Tensor)))
    here = [x.to(device) if isinstance(x, torch.Tensor) else x for x in operands]
    copies = max(2, min(COPIES[device], ELEMENTS[device] // max(1, here[0].numel())))
    many, asks = copied(question, here, copies)
    for impl, call in case.calls.items():
        seen = Seen()
        try:
            for _ in range(RUNS[device]):
                out = asks.answer(many, call, asks.whole)
                # stock may give each copy other bits: all of them are one result
                seen.add(blocks(question, out, copies) if impl == "invariant" else out[None])
        except NotImplementedError as error:
            yield case.record(impl, status="skipped", reason=reason_of(error))
        except Exception as error:  # noqa: BLE001 - reported in its record, as other cases may work
            yield case.record(impl, status="error", reason=reason_of(error))
        else:
            yield case.record(impl, given=given, **seen.figures())


def completions(device: str) -> Iterator[Fingerprint]:
    """Tokens, and tokens with logprob bits, of a greedy completion by the embedded model, computed twice, solo."""
    loaded = load_model(None, MODEL_DTYPE[device], device)
    prompt = tuple(loaded.encode(DEFAULT_PROMPT))
    given = tokens_digest([*prompt])
    load = Load(0, 1, (1, 1), (1, 1), spread=1, budget=64, requests=1)
    for impl in IMPLS:
        made: dict[str, list[str]] = {"tokens": [], "logprobs": []}
        with implementation(impl, loaded.model), torch.no_grad():
            for _ in range(2):
                session = run_session(loaded.model, [Request("fingerprint", True, prompt, _TOKENS, 0)], load)
                if session.fatal or session.outcomes[0].reason:
                    raise EngineStoppedError(session.fatal or session.outcomes[0].reason)
                answer = session.outcomes[0]
                made["tokens"].append(tokens_digest(answer.token_ids))
                made["logprobs"].append(trace_digest(answer.token_ids, answer.logprobs))
        for case, (first, second) in made.items():
            moved = int(first != second)
            yield Fingerprint(
                impl=impl,
                cls="",
                operator="completion",
                case=case,
                dtype=loaded.dtype,
                device=device,
                given=given,
                digest=first,
                runs=2,
                units=1,
                differing=moved,
                runs_differing=moved,
                units_differing=moved,
            )


_CLOCKS = {"sm": 1, "memory": 2}  # nvmlClockType_t
_ECC = {"corrected since boot": (0, 0), "uncorrected since boot": (1, 0), "uncorrected in all": (1, 1)}


def machine(name: str, device: str, *, identify: bool) -> MachineSeen:
    """Who this is: a host's name and a GPU's numbers only with `identify`. NVML's figures where it reports them."""
    figures: dict[str, Any] = {"name": name, "clocks_mhz": {}, "ecc": {}}
    if identify:
        figures["host"] = socket.gethostname()
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if device == "cuda" else ""
    handle, serial = ctypes.c_void_p(), ctypes.create_string_buffer(64)
    number, large = ctypes.c_uint(), ctypes.c_ulonglong()
    with nvml() as driver, suppress(AttributeError):
        named = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        if driver is None or not uuid or driver.nvmlDeviceGetHandleByUUID(named, ctypes.byref(handle)) != 0:
            return MachineSeen(**figures, gpu_uuid=uuid * identify)
        for clock, kind in _CLOCKS.items():
            if driver.nvmlDeviceGetClockInfo(handle, kind, ctypes.byref(number)) == 0:
                figures["clocks_mhz"][clock] = number.value
        for what, (kind, span) in _ECC.items():
            if driver.nvmlDeviceGetTotalEccErrors(handle, kind, span, ctypes.byref(large)) == 0:
                figures["ecc"][what] = large.value
        if identify and driver.nvmlDeviceGetSerial(handle, serial, ctypes.c_uint(64)) == 0:
            figures["gpu_serial"] = serial.value.decode("ascii", "replace")
    return MachineSeen(**figures, gpu_uuid=uuid * identify)
