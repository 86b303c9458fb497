"""What a reader needs to trust a figure: everything known to change bits or speed, read from the running process."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nondet.core.processes import nvml
from nondet.errors import without_path
from nondet.version import VERSION

# Environment variables that change bits (which library path or order is taken). No other variable is recorded.
_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"),
    *("TORCH_BLAS_PREFER_HIPBLASLT", "TORCH_CUDNN_SDPA_ENABLED", "TRITON_INTERPRET", "NPY_DISABLE_CPU_FEATURES"),
    *("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE"),
    *("DNNL_CPU_ISA_HINTS", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "GLIBC_TUNABLES"),
    *("ONEDNN_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE"),
    *("MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS"),
    *("NCCL_ALGO", "NCCL_PROTO"),
    *("KMP_DETERMINISTIC_REDUCTION", "KMP_FORCE_REDUCTION", "OMP_DYNAMIC", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
)
# The instruction sets by which numeric libraries choose their kernels.
_ISA = re.compile(r"^(sse4_2|avx|avx2|fma|f16c|avx_vnni|avx512\w*|amx_\w+|asimd\w*|sve\w*|bf16|i8mm)$")
# What may differ between the parts of a resumed run; everything else in `collect` may change bits.
_HARMLESS = {"argv", "seed", "os", "python", "gpu_memory_bytes"}  # the plan holds the seed, and a digest of the texts
_HARMLESS_VARIABLES = {"CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY"}  # which of the GPUs, how threads wait

_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")

_NAME = r"(?:token(?!s)|secret|passwo?r?d|passwd|api[-_]?key|access[-_]?key|private[-_]?key|authorization|credential)"
_SECRET_OPTION = re.compile(rf"(?i)^-.*{_NAME}")
# NAME_TOKEN=..., as in `env` or a load string; Authorization: ...
_SECRET_VALUE = re.compile(rf"(?i)(\b[\w.-]*{_NAME}[\w.-]*\s*[=:]\s*)(?:(?:bearer|basic)\s+)?[^\s,;&]+")
# The shapes of tokens: Hugging Face, OpenAI and kin, GitHub, GitLab, Slack, AWS, Google, PyPI, npm, JSON web tokens.
_TOKENS = re.compile(
    r"hf_\w{20,}|\b(?:sk|pk|rk)-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|pypi-[\w-]{16,}|npm_\w{20,}|r8_\w{20,}|nvapi-[\w-]{20,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|(?i:\bbearer\s+)[\w.~+/=-]{8,}"
)
_PASSWORD = re.compile(r"(\w[\w+.-]*://)[^\s/@]+@")
_HIDDEN = "<hidden>"


def collect(seed: int | None = None) -> dict[str, Any]:
    """The environment header of a run, as JSON-able data. Unknown values are None, never left out."""
    return {
        "nondet": VERSION,
        "commit": _commit(),
        "sources": sources_digest(),
        "argv": safe_argv(sys.argv),
        "seed": seed,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "transformers": _version("transformers"),
        **deciding(),
    }


def deciding() -> dict[str, Any]:
    """The part of `collect` that decides bits, the process's own switches included: what two processes must share."""
    return {
        "num_interop_threads": torch.get_num_interop_threads(),
        **numerics(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allow_tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        "allow_tf32_cudnn": _flag(lambda: torch.backends.cudnn.allow_tf32),
        **{name: _flag(functools.partial(getattr, torch.backends.cuda.matmul, name)) for name in _REDUCTIONS},
        "preferred_blas": _flag(lambda: str(torch.backends.cuda.preferred_blas_library())),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "inductor_batch_invariant": inductor_switch(),
    }


def inductor_switch() -> bool | None:
    """Whether the compiler's own `batch_invariant` is on; None before torch 2.13, which has none."""
    config = sys.modules.get("torch._inductor.config")  # not imported for this: it loads the compiler
    if config is not None:
        return getattr(config, "batch_invariant", None)
    return os.environ.get("TORCHINDUCTOR_BATCH_INVARIANT") == "1" if torch.__version__ >= "2.13" else None


def numerics() -> dict[str, Any]:
    """The part of `deciding` that is not a switch, read without starting a process: cheap enough for a forward pass."""
    return {
        "torch": str(torch.__version__),
        "numpy": _version("numpy"),
        "triton": _version("triton"),
        "cpu": _cpu_name(),
        "cpu_isa": cpu_flags(),
        "aten_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": _onednn(),
        "num_threads": torch.get_num_threads(),
        **_gpu(),
        "variables": variables(_VARIABLES),
    }


def variables(names: Iterable[str]) -> dict[str, str]:
    """Those environment variables that are set; bytes that are not UTF-8, which no run file could hold, as escapes."""
    return {name: _text(os.environ[name]) for name in names if name in os.environ}


def _text(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode()


def moved(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of what changes bits and has changed: the fields of `collect`, and "variables.NAME"."""
    theirs: dict[str, Any] = before.get("variables") or {}
    ours: dict[str, Any] = now.get("variables") or {}
    names = sorted((before.keys() | now.keys()) - _HARMLESS - {"variables"})
    differing = [k for k in names if before.get(k) != now.get(k)]
    names = sorted((theirs.keys() | ours.keys()) - _HARMLESS_VARIABLES)
    return differing + [f"variables.{k}" for k in names if theirs.get(k) != ours.get(k)]


def safe_argv(argv: list[str]) -> list[str]:
    """argv with whatever looks like a secret replaced: run files are shared."""
    out: list[str] = []
    hide_next = False
    for word in map(_text, argv):
        name, equals, value = word.partition("=")
        if hide_next:
            word, hide_next = _HIDDEN, False
        elif _SECRET_OPTION.search(name):
            word, hide_next = f"{name}={_HIDDEN}" if equals else name, not equals
        else:
            option, url = (name + equals, value) if word.startswith("-") else ("", word)
            url = without_path(url) if url.lower().startswith(("http://", "https://")) else url
            word = _PASSWORD.sub(rf"\1{_HIDDEN}@", option + url)
            word = _TOKENS.sub(_HIDDEN, _SECRET_VALUE.sub(rf"\1{_HIDDEN}", word))
        out.append(word)
    return [Path(out[0]).name, *out[1:]] if out else []  # the installation path is of no use, and may name a person


def _gpu() -> dict[str, Any]:
    names = ("gpu", "gpu_capability", "gpu_sms", "gpu_memory_bytes", "driver", "cuda", "cublas", "cudnn", "nccl")
    if not torch.cuda.is_available():
        return dict.fromkeys(names)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "gpu_sms": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cublas": _cublas(),
        "cudnn": _flag(lambda: torch.backends.cudnn.version()),
        "nccl": _flag(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
    }


def _flag(read: Callable[[], Any]) -> Any:
    """`read()`, or None where this build has no such flag."""
    try:
        value = read()
    except (AttributeError, RuntimeError, ImportError):
        return None
    return list(value) if isinstance(value, tuple) else value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cublas() -> str | None:
    """The version that the loaded library reports, because the wheel's version may be another one's."""
    library = _cuda_library("cublas")
    parts = [ctypes.c_int() for _ in range(3)]  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL of libraryPropertyType
    if library is None or any(library.cublasGetProperty(i, ctypes.byref(value)) for i, value in enumerate(parts)):
        return None
    return ".".join(str(value.value) for value in parts)


def _cuda_library(name: str) -> ctypes.CDLL | None:
    """The library of PyTorch's own CUDA, as the system may have another one; None of a CPU build."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"lib{name}.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


@functools.cache
def cublaslt() -> ctypes.CDLL | None:
    """The cuBLASLt that PyTorch has loaded, or None: a CPU build, or a library under another name."""
    library = _cuda_library("cublasLt")
    if library is not None:
        library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


def cublaslt_version() -> int:
    """The library's own number, as 130100; 0 without a library."""
    library = cublaslt()
    return 0 if library is None else int(library.cublasLtGetVersion())


def _driver() -> str | None:
    text = ctypes.create_string_buffer(96)
    with nvml() as driver, suppress(AttributeError):
        if driver is not None and driver.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) == 0:
            return text.value.decode("ascii", "replace")
    return None


def _commit() -> str | None:
    """Of a checkout, with "+changes" where the tree differs, or NONDET_COMMIT for a copy without its .git."""
    root = Path(__file__).resolve().parent.parent.parent
    commit = _run(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]) if (root / ".git").exists() else None
    if commit is None:
        return _text(os.environ.get("NONDET_COMMIT", "")) or None
    return commit + ("+changes" if _run(["git", "-C", str(root), "status", "--porcelain", "-uno"]) else "")


@functools.cache
def sources_digest(*names: str) -> str:
    """First 16 hex digits of the SHA-256 over our own source files, or those of the folders and files of these names,
    each once, by its path in the package. A checkout and an installation from it have one digest."""
    root = Path(__file__).resolve().parent.parent
    files: dict[str, Path] = {}
    for name in names or ("", "kernels", "probes", "reports"):  # links in a checkout, which "**" need not follow
        at = (root / name).resolve()
        found = [at] if at.is_file() else at.rglob("*.py")
        files |= {(Path(name) / path.relative_to(at)).as_posix(): path for path in found}
    sha = hashlib.sha256()
    for name, path in sorted(files.items()):
        sha.update(f"{name}:".encode() + hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()[:16]


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - fixed commands
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None


def _cpu_info() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    first = text.split("\n\n")[0]
    return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in first.splitlines())}


def _cpu_name() -> str:
    info = _cpu_info()
    name = info.get("model name") or platform.processor() or platform.machine()
    known = "cpu family" in info and "model" in info
    return f"{name} (family {info['cpu family']}, model {info['model']})" if known else name


def cpu_flags() -> list[str]:
    """The instruction sets of this CPU by which numeric libraries dispatch."""
    info = _cpu_info()
    return sorted(f for f in (info.get("flags") or info.get("Features") or "").split() if _ISA.match(f))


def _onednn() -> str | None:
    match = re.search(r"(?:MKL-DNN|oneDNN) v([\d.]+)", torch.__config__.show())
    return match.group(1) if match else None
