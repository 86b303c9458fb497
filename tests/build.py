"""What the tests of several files are made of: operands, and how far an implementation may be from float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nondet.bench.work import work_of
from nondet.core import compare, inputs
from nondet.core.records import (
    FORMAT,
    SCHEMA_VERSION,
    Cell,
    Completion,
    Difference,
    ErrorFigures,
    Header,
    Limit,
    Round,
    Row,
    Run,
    Status,
    Timed,
)
from nondet.core.runfile import open_run, read_run
from nondet.core.traces import Trace, TraceWriter, tokens_digest, trace_digest
from nondet.reports.content import build
from nondet.sampling.analysis import SampleSummary


def tiers(always: Iterable[Any], nightly: Iterable[Any]) -> list[Any]:
    """Parameters of every run, and those of nightly runs alone."""
    first = list(always)
    later = [value if isinstance(value, tuple) else (value,) for value in nightly if value not in first]
    return [*first, *(pytest.param(*value, marks=pytest.mark.nightly) for value in later)]


Command = Callable[..., tuple[int, str, str]]  # a command's arguments -> its exit code, stdout and stderr
# torch 2.11 has products with a scale for each row on a GPU alone
needs_row_scales = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch has no scaled products of rows on a CPU",
)
# which transformers asks for to load FP8 weights, and a model in shares
needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKED = getattr(torch, "float4_e2m1fn_x2", None)
# every real floating dtype that this torch has, float8 and packed float4 variants included
FLOAT_DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and (d.is_floating_point or d == PACKED)}, key=str
)


def bell(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Ordinary operands, on a GPU where there is one."""
    return inputs.make("bell", shape, dtype, DEVICE, inputs.generator(seed, DEVICE))


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers in [-1, 1), always the same for one shape, on the CPU."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 2.0 - 1.0).to(dtype)


class Seen(TorchDispatchMode):
    """Keeps the names of the operators that are called, as "aten.mul.Tensor"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Wide(TorchDispatchMode):
    """float64 wherever a model asks for float32: in norms, rotations, a router's softmax, the loss. None is left."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        out = function(*args, **kwargs)
        floats = [x.dtype for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        assert set(floats) <= {torch.float64}, function
        return out


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||, as `accuracy_bound` bounds it."""
    return compare.error_against(out, ref).relative_norm


def accuracy_bound(dtype: torch.dtype, terms: int) -> float:
    """Bound on ||out - ref|| / ||ref|| for ordinary inputs: one rounding to `dtype` plus a float32 accumulation. The
    accumulation term is the probabilistic bound of Higham & Mary (2019, doi 10.1137/18M1226312), sqrt(n) u with a
    factor of 8 for the confidence and for products of rounded operands; u is the unit roundoff of float32, and of
    float64 for float64. It does not hold for inputs that cancel: those are judged against stock on the same inputs."""
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    unit = torch.finfo(accumulator).eps / 2
    return torch.finfo(dtype).eps / 2 + 8.0 * math.sqrt(terms) * unit


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In float64: exact enough to have one order."""
    return (x.double() @ weight.double().T + (0 if bias is None else bias.double())).to(x.dtype)


def split_k(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    parts = [x[:, s].float() @ weight[:, s].float().T for s in (slice(20), slice(20, None))]
    return (parts[0] + parts[1] + (0 if bias is None else bias.float())).to(x.dtype)


def absent(*_: Any) -> torch.Tensor:
    raise NotImplementedError("not on this machine")


# Runs as they come from machines, made by hand: what a reporter is tested on.

ENVIRONMENT: dict[str, Any] = {
    "nondet": "0.1.0", "commit": "0123456789ab", "argv": ["nondet", "probe", "all"], "seed": 0, "os": "Linux 6.8",
    "python": "3.12.3", "torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0",
    "cpu": "Intel(R) Xeon(R) Platinum 8480+ (family 6, model 143)", "cpu_isa": ["amx_bf16", "avx2", "avx512f"],
    "num_threads": 16, "gpu": "NVIDIA H200", "gpu_sms": 132, "gpu_memory_bytes": 150_000_000_000,
    "driver": "580.65.06", "cuda": "13.0", "float32_matmul_precision": "highest", "allow_tf32_matmul": False,
    "nccl": None, "variables": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
}  # fmt: skip

NVJET = "nvjet_tst_{tile}_coopB_{split}TNT"
REDUCE = (
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, true, false>"
    "(cublasLt::cublasSplitKParams<float>, float const*, __nv_bfloat16 const*)"
)


def line(record: Any) -> bytes:
    """As a run file has it."""
    return msgspec.json.encode(record) + b"\n"


def header(command: str = "probe", plan: dict[str, Any] | None = None) -> Header:
    return Header(
        format=FORMAT, schema=SCHEMA_VERSION, command=command, plan=plan or {"probes": ["matmul"], "seed": 0},
        environment=dict(ENVIRONMENT), started="2026-03-01T12:00:00+00:00",
    )  # fmt: skip


def row(labels: Sequence[int] = (0, 0), **fields: Any) -> Row:
    """A row whose counts follow from its labels."""
    sizes = [list(labels).count(i) for i in range(max(labels, default=-1) + 1)]
    distinct = len(sizes)
    filled: dict[str, Any] = {
        "probe": "matmul", "case": "row 0 of M rows, K=12288 N=4096, bell", "operator": "linear",
        "shape": {"M": 4096, "N": 4096, "K": 12288}, "dtype": "bfloat16", "device": "cuda", "inputs": "bell",
        "varied": "batch_size", "impl": "stock", "labels": list(labels), "values": list(range(1, len(labels) + 1)),
        "class_sizes": sizes, "trials": len(labels), "distinct": distinct, "seconds": 0.5,
        "replays": min(2, len(labels)),
        "status": Status.IDENTICAL if distinct <= 1 else Status.DIVERGENT,
        "error": ErrorFigures(max_abs=0.0078125, relative_norm=0.001726, max_ulp=1),
        "worst_error": ErrorFigures(max_abs=0.015625, relative_norm=0.001731 if distinct > 1 else 0.001726, max_ulp=2),
        "difference": Difference(mismatched=0, compared=4096, max_abs=0.0, max_ulp=0)
        if distinct <= 1
        else Difference(mismatched=37, compared=4096, max_abs=0.015625, max_ulp=3, first_mismatch=[0, 12]),
    }  # fmt: skip
    named: list[list[str]] = fields.pop("kernels", [])
    sets = list(dict.fromkeys(map(tuple, named)))
    fields |= {"kernel_sets": [list(s) for s in sets], "kernels": [sets.index(tuple(names)) for names in named]}
    return Row(**(filled | fields))


def failed(status: str = Status.ERROR, reason: str = "OutOfMemoryError: CUDA out of memory", **fields: Any) -> Row:
    empty: dict[str, Any] = {"difference": None, "error": None, "worst_error": None, "values": [], "class_sizes": []}
    return row((), status=status, reason=reason, **(empty | fields))


def run_of(*rows: Row, complete: bool = True, **fields: Any) -> Run:
    return Run(header=header(), rows=list(rows), complete=complete, source="runs/probe.jsonl", **fields)


def h200_sweep() -> list[Row]:
    """The shape of a stock cuBLAS sweep: split-K at some M, and so four classes; and the invariant kernel beside it."""
    values = [*range(1, 129), *range(144, 1025, 16), *range(1152, 4097, 128)]
    labels, kernels = [], []
    for m in values:
        if m <= 16:
            labels.append(0 if m % 8 else 1)
            kernels.append([NVJET.format(tile="64x8", split="splitK_"), REDUCE])
        elif m <= 64:
            labels.append(2)
            kernels.append([NVJET.format(tile=f"64x{16 * (m // 16)}", split="splitK_"), REDUCE])
        elif m <= 144:
            labels.append(0 if m < 100 else 3)
            kernels.append([NVJET.format(tile="128x64", split=""), *([REDUCE] if m >= 100 else [])])
        else:
            labels.append(2)
            kernels.append([NVJET.format(tile="256x128" if m > 1000 else "128x128", split="")])
    shared = {"values": values, "extra": {"layer": "Qwen3-8B down_proj"}}
    chain = [["_matmul_chain_kernel"]] * len(values)
    return [
        row(labels, kernels=kernels, ran=["nvjet", "splitKreduce"], **shared),
        row([0] * len(values), impl="invariant", kernels=chain, ran=["matmul_chain[16x64x128]"], **shared),
    ]


COPY_RATE, PEAK_RATE = 4.2e12, 7.4e14


def limits() -> list[Limit]:
    """What an H200 does, about."""
    shared: dict[str, Any] = {"device": "cuda", "method": "cuda graph", "samples_us": [1.0, 1.0]}
    return [
        Limit(name="copy", what="copy_ of 1024 MiB", unit="B/s", rate=COPY_RATE, work=2**31, **shared),
        Limit(name="peak bfloat16", what="torch.mm, 8192 cubed", unit="FLOP/s", rate=PEAK_RATE, work=2**40, **shared),
    ]


def timed(impl: str, us: float, **fields: Any) -> Timed:
    """An implementation timed 11 times around `us`, within one percent."""
    samples = [us * (1 + 0.002 * ((7 * i) % 11 - 5)) for i in range(11)]
    filled: dict[str, Any] = {
        "impl": impl, "status": Status.TIMED, "samples_us": samples, "median_us": us, "low_us": us * 0.995,
        "high_us": us * 1.005, "ran": [f"{impl} launcher"],
    }  # fmt: skip
    return Timed(**(filled | fields))


def cell(m: int, *timed_: Timed, k: int = 4096, n: int = 4096, **fields: Any) -> Cell:
    """A cell of a product."""
    shape = {"M": m, "K": k, "N": n}
    work = work_of("linear", shape, "bfloat16")
    memory, arithmetic = work.bytes / COPY_RATE * 1e6, work.flops / PEAK_RATE * 1e6
    filled: dict[str, Any] = {
        "section": "matmul", "operator": "linear", "case": f"M={m} K={k} N={n}", "group": f"K={k} N={n}", "axis": "M",
        "shape": shape, "dtype": "bfloat16", "device": "cuda", "bytes": work.bytes, "flops": work.flops,
        "limit_us": max(memory, arithmetic), "limited_by": "memory" if memory > arithmetic else "arithmetic",
        "method": "cuda graph", "sets": 4, "calls": 32, "cold": True, "timed": list(timed_),
    }  # fmt: skip
    return Cell(**(filled | fields))


def jigsaw_us(m: int, k: int, n: int, tile: int) -> float:
    """A product in whole tiles of `tile` rows and 128 columns, in whole waves of 132 of them: the jigsaw."""
    tiles = -(-m // tile) * -(-n // 128)
    waves = -(-tiles // 132)
    flops = waves * 132 * tile * 128 * 2 * k
    return max(flops / (PEAK_RATE * 0.9), (m * k + n * k + m * n) * 2 / (COPY_RATE * 0.85)) * 1e6 + 1.5


def bench_run(sizes: Sequence[int] = (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)) -> Run:
    """Stock, ours and a rival over M at three weight shapes, and their bits; the shapes are real, the times are not."""
    cells, rows = [], []
    for k, n in ((4096, 6144), (12288, 4096), (8192, 8192)):
        for m in sizes:
            stock = jigsaw_us(m, k, n, 64 if m <= 64 else 128)
            ours = jigsaw_us(m, k, n, 16 if m <= 16 else 64 if m <= 512 else 128) * (1.03 if m > 64 else 0.97)
            rival = jigsaw_us(m, k, n, 128) * 1.5
            named = {"kernels": ["_matmul_chain_kernel"], "ran": ["matmul_chain[16x64x128]"]}
            cells.append(
                cell(
                    m, timed("stock", stock, kernels=[NVJET.format(tile="64x8", split=""), REDUCE]),
                    timed("invariant", ours, **named), timed("batch-invariant-ops", rival), k=k, n=n,
                )
            )  # fmt: skip
        case, group = f"matmul K={k} N={n}: row 0 of M rows", f"K={k} N={n}"
        shared = {"probe": "bench", "case": case, "group": group, "values": list(sizes)}
        rows.append(row([i % 2 for i in range(len(sizes))], **shared))
        rows.append(row([0] * len(sizes), impl="invariant", **shared))
    run = run_of(*rows, cells=cells, limits=limits())
    run.header = header("bench", {"operators": ["matmul"]})
    return run


WORDS = (
    " the exception is raised when an operation or function that has no meaning was applied to its argument, and "
    "the following clause handles errors of that kind.\n The value of a name is looked up in the local namespace first."
)


def sampled(
    folder: Path,
    *,
    n: int = 60,
    length: int = 40,
    impls: Sequence[str] = ("stock", "invariant"),
    prompt: str = "The following exceptions",
    variants: Callable[[str, int], tuple[Sequence[tuple[int, int]], int]] | None = None,
    pieces: Sequence[str] | None = None,
    failures: int = 0,
    margin: float = 0.0625,
    finish: bool = True,
    again: bool = True,
    name: str = "sample.jsonl",
) -> Run:
    """A sampled run on disk, read back.

    Args:
        variants: (impl, request number) -> (replaced tokens as (index, token id), logprob variant). Default: under
            any "stock" implementation a few requests part at tokens 5 and 17, and nothing parts elsewhere.
        again: The round was run twice, and came out the same.
    """
    pieces = [f" {w}" for w in WORDS.split(" ") if w] if pieces is None else pieces
    path = folder / name
    plan = {"prompts": [{"text": prompt, "tokens": 4}], "n": n, "impls": list(impls), "seed": 0, "turns": True}
    writer = open_run(path, command="sample", plan=plan, environment=dict(ENVIRONMENT), force=True)
    side = TraceWriter(path, resume=False, piece=lambda i: pieces[i % len(pieces)])
    rng = random.Random(1)  # noqa: S311 - a schedule, not a secret
    choose = variants or stock_parts
    for impl in impls:
        done = []
        for number in range(n):
            changes, numerics = choose(impl, number)
            ids = [i % len(pieces) for i in range(length)]
            for index, token in changes:
                ids[index:] = [(token + 7 * i) % len(pieces) for i in range(length - index)]
            logprobs = (np.arange(length, dtype="<f4") * -0.01 - 0.001 * numerics).astype("<f4").tobytes()
            trace = Trace(
                digest=trace_digest(ids, logprobs), token_ids=ids, logprobs=logprobs, runner_up=ids,
                margins=np.full(length, margin * (1 + len(changes)), dtype="<f4").tobytes(),
                text="".join(pieces[i] for i in ids),
            )  # fmt: skip
            side.write([trace])
            start = rng.randrange(30)
            schedule = [[start, 1, 4], [start + 1, length - 1, 1]]
            done.append(
                Completion(
                    impl=impl, request=f"t{number:06d}", round=0, prompt=0, tokens_digest=tokens_digest(ids),
                    trace=trace.digest, n_tokens=length, finish="length", arrival_step=start, schedule=schedule,
                    batch_min=1, batch_max=90,
                )
            )  # fmt: skip
        lost = {"impl": impl, "batch_min": 0, "batch_max": 0, "reason": "RuntimeError: the engine stopped"}
        done += [completion(f"f{i}", "", **lost) for i in range(failures)]
        for record in done:
            writer.write(record)
        background = {f"r0-b{i:03d}": [[3 * i, 1, 20 + i], [3 * i + 1, 30, 1]] for i in range(20)}
        seconds = 2.0 if impl == "stock" else 3.1
        writer.write(
            Round(
                impl=impl, round=0, targets=n + failures, others=len(background), steps=200,
                tokens=n * length, seconds=seconds, background=background,
            )
        )  # fmt: skip
        if again:
            writer.write(replayed(impl, n))
    side.close()
    if finish:
        writer.finish()
    return read_run(path)


def six_rounds(run: Run) -> Run:
    """With five rounds more, played as fast as the first."""
    run.rounds.extend(msgspec.structs.replace(r, round=n) for r in list(run.rounds) for n in range(1, 6))
    return run


def summaries_of(run: Run) -> list[SampleSummary]:
    """Of each prompt under each implementation, as its report has them."""
    return [summary for sample in build([run]).runs[0].samples for summary in sample.summaries]


def completion(request: str = "t0", trace: str = "a", **fields: Any) -> Completion:
    """Under stock, in round 0; one without a trace failed."""
    usual: dict[str, Any] = {"impl": "stock", "round": 0, "prompt": 0, "arrival_step": 0, "schedule": [], "n_tokens": 8}
    usual |= {"tokens_digest": "0" * 16, "finish": "length", "batch_min": 1, "batch_max": 9}
    lost = {"tokens_digest": "", "finish": "error", "status": "error", "reason": "it stopped", "n_tokens": 0}
    return Completion(**(usual | ({} if trace else lost) | {"request": request, "trace": trace} | fields))


def beside(first: Run, second: Run, impl: str = "invariant") -> Run:
    """Both in one file, what is the second's under that name."""
    fields = ("completions", "rounds", "axis_values", "rows", "servers", "contract")
    moved = {name: [msgspec.structs.replace(r, impl=impl) for r in getattr(second, name)] for name in fields}
    return msgspec.structs.replace(first, **{name: getattr(first, name) + moved[name] for name in fields})


def replayed(impl: str, requests: int, parted: int = 0, number: int = 0) -> Row:
    """Round `number` of so many requests, run twice; `parted` of them came out otherwise."""
    return row(
        [0, int(parted > 0)], probe="sample", case=f"round {number}, twice", operator="engine", varied="run", impl=impl,
        difference=None, extra={"round": number, "requests": requests, "requests_parted": parted},
    )  # fmt: skip


def stock_parts(impl: str, number: int) -> tuple[Sequence[tuple[int, int]], int]:
    later = {7: ((17, 2),), 9: ((17, 2), (30, 5))}
    if impl != "stock" or number in later:
        return later.get(number, ()) if impl == "stock" else (), 0
    return (((5, 11),), 1) if number % 10 == 3 else ((), number % 2)


# Text that attacks every format: markup, terminals, tables, fences, mentions, reading order.

PIECES = [
    " plain",
    "<script>alert(1)</script>",
    "</script><!--",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    " | a | b |",
    "`tick` ```fence",
    "\u202egnp.exe",
    "\x00nul",
    "\x9b31mC1",
    "[link](http://evil.example/)",
    "![i](http://evil.example/i)",
    "@everyone #1",
    "\n# heading\n- item\n",
    "\n```\nout of the fence\n````\n",
    "[bold red]rich[/bold red]",
    "$x^2$ ~~gone~~ **bold**",
    "&amp;&lt;",
    "\"'>",
    "\u2028",
    "https://evil.example www.evil.example",
    "{{ 7 * 7 }}{% raw %}",
    "</details></td>",
    "<img src=x onerror=alert(1)>",
    " end",
]
NAME = "mine.mod:<b>|`f`\x1b[1m\u202e@user"


def parts(impl: str, number: int) -> tuple[Sequence[tuple[int, int]], int]:
    """A few completions that part in the middle of all this."""
    return (((3 + number % 4, 1),), 1) if number % 5 == 0 else ((), 0)


def with_packages(made: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """A toy's modules with the packages that hold them, for sys.modules."""
    for name in list(made):
        parts = name.split(".")
        for i in range(1, len(parts)):
            made.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        if len(parts) > 1:
            setattr(made[".".join(parts[:-1])], parts[-1], made[name])
    return made
