"""Options that several commands have, each defined once, and their completion in a shell."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from nondet.core import registry
from nondet.errors import UnknownNameError, UserError, each_once, suggestion

if TYPE_CHECKING:
    from nondet.sampling.plan import Sampling


# The panels of `--help`: measurements are under "Options", which is Typer's default.
OUTPUT, MACHINE, DRAWING = "Output", "Machine", "Drawing of tokens"


def choices(*names: str | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A shell completion: these names, and those of registries, which are read when a completion is requested. Other
    names may be valid, too: a user's "package.module:function", a load of keys, a folder."""

    def complete(incomplete: str) -> list[str]:
        known = chain.from_iterable([part] if isinstance(part, str) else part() for part in names)
        return [name for name in dict.fromkeys(known) if name.startswith(incomplete)]

    return complete


def _impls() -> list[str]:
    return [i.name for operator in registry.operators().values() for i in operator.implementations]


def families() -> list[str]:
    """Families of operators that `batch_invariant` can replace by themselves."""
    return list(dict.fromkeys(o.family.name for o in registry.declared().values() if o.family is not None))


def arms(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """The names of `--arms`, each once; `known` may have "invariant:FAMILY". A `UserError` for others or none."""
    named, known = each_once("--arms", (name.strip() for name in text.split(",") if name.strip())), tuple(known)
    if not named:
        raise UserError(f"--arms {text!r} names none", f"Known: {', '.join(known)}.")
    for name in named:
        if name not in known and not (name.startswith("invariant:") and "invariant:FAMILY" in known):
            raise UnknownNameError("arm", name, known)
    return named


PROBES = choices(lambda: registry.PROBES, lambda: (name.replace("_", "-") for name in registry.OPERATOR_PROBES), "all")
OPERATORS = choices("all", lambda: (name.replace("_", "-") for c in registry.classes().values() for name in c.members))
CLASSES = choices(lambda: registry.classes())
PROBE_IMPLS = choices("stock", "invariant", _impls)
SAMPLE_IMPLS = choices(
    *("stock", "stock-no-cudnn", "stock-flash", "invariant", "both", "stock-seeded", "unseeded-invariant"),
    lambda: (f"invariant:{name}" for name in families()),
)
LOADS = choices(lambda: registry.load_object("nondet.sampling.plan:PRESETS"))
SHAPES = choices(lambda: registry.load_object("nondet.probes.models:PRESETS"))


@dataclass(frozen=True)
class Range:
    """The numbers that an option takes, both ends included; never NaN."""

    least: float
    most: float
    hint: str = ""

    def check(self, option: str, value: float) -> None:
        """Refuse, as a `UserError`, another number."""
        if not self.least <= value <= self.most:
            number = f"{value:g}" if isinstance(value, float) else value
            raise UserError(f"{option} {number} makes no sense", self.hint or f"Give {self.least:,} to {self.most:,}.")


@dataclass(frozen=True)
class OneOf:
    """The words that an option takes, and the hint for other words."""

    names: tuple[str, ...]
    what: str = "unknown {option} {value!r}"

    def check(self, option: str, value: str) -> None:
        """Refuse, as a `UserError`, another word."""
        if value not in self.names:
            raise UserError(self.what.format(option=option, value=value), suggestion(value, self.names))


def opt(
    text: str, *names: str, shown: bool | str = False, panel: str | None = None, complete: Any = None, **more: Any
) -> Any:
    """An option with its help, or with a `metavar` an argument; without names it has its field's name. `shown` is the
    default as the help has it; True: the value itself, False: none, or it is in the text."""
    make = typer.Argument if "metavar" in more else typer.Option
    return make(*names, help=text, show_default=shown, rich_help_panel=panel, autocompletion=complete, **more)


def own(
    text: str, *names: str, default: Any = None, shown: bool | str | None = None, check: Any = None, **more: Any
) -> Any:
    """A field that is an option of one command; one that several have is a type, such as `MODEL`. `shown` is as of
    `opt`, None: the default itself, unless it is None or a switch's; `check` is a `Range` or `OneOf` for values."""
    named = default is not None and not isinstance(default, bool) if shown is None else shown
    return field(default=default, metadata={"option": opt(text, *names, shown=named, **more), "check": check})


def declared(part: type) -> dict[str, tuple[Any, Range | OneOf | None]]:
    """The options of a dataclass by field: what Typer has of each, and what its values are checked against."""
    hints, found = get_type_hints(part, include_extras=True), {}
    for f in fields(part):
        if "option" in f.metadata:
            found[f.name] = f.metadata["option"], f.metadata["check"]
        elif known := getattr(hints[f.name], "__metadata__", ()):
            found[f.name] = known[0], next(iter(known[1:]), None)
    return found


def check_fields(request: Any) -> None:
    """Refuse, as a `UserError`, a value that its option's `Range` or `OneOf` does not allow."""
    for name, (_, check) in declared(type(request)).items():
        value = getattr(request, name)
        if check is not None and value is not None:
            for one in value if isinstance(value, list) else [value]:
                check.check(f"--{name.replace('_', '-')}", one)


# An engine beside nondet's own -> target of its `Host` (docs/adding.md), and the --impl that it has.
ENGINES = {"vllm": ("nondet.vllm.engine:VllmHost", ("stock", "vllm-invariant", "invariant"))}
ENGINE = Annotated[
    str,
    opt(
        "nondet's own (over transformers), or vllm, where it is installed: vLLM in its own process, with --impl stock, "
        "vllm-invariant (its own mode) and invariant (nondet's plugin).",
        shown=True,
    ),
    OneOf(("transformers", *ENGINES), "unknown engine {value!r}"),
]


def other_engine(name: str) -> Any:
    """The `Host` of an engine beside nondet's own; None of that one."""
    return registry.load_object(ENGINES[name][0]) if name in ENGINES else None


OUT = Annotated[
    Path | None, opt("Run file to write (.jsonl).", "--out", "-o", shown="a new file in runs/", panel=OUTPUT)
]
FORCE = Annotated[bool, opt("Overwrite existing files.", "--force", panel=OUTPUT)]
RESUME = Annotated[bool, opt("Continue the run file at --out, with the same options.", "--resume", panel=OUTPUT)]
VERBOSE = Annotated[bool, opt("Print everything, not 25 lines.", "--verbose", "-v", panel=OUTPUT)]
QUIET = Annotated[bool, opt("Print only the verdict.", "--quiet", "-q", panel=OUTPUT)]
JSON = Annotated[bool, opt("Print one JSON object per line on stdout.", "--json", panel=OUTPUT)]
REPORT = Annotated[list[Path] | None, opt("Also write a report: .html or .md. Repeatable.", panel=OUTPUT)]
OPEN = Annotated[bool, opt("Open the report in a browser.", "--open", panel=OUTPUT)]
MODEL_ARGUMENT = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A folder, hub name or random weights.")]
FAIL_ON = Annotated[
    str | None,
    opt('"divergent": exit 3 if anything diverged or is wrong, 1 if that cannot be decided.', panel=OUTPUT),
    OneOf(("divergent",)),
]
DEVICES = OneOf(("auto", "cpu", "cuda"), "unknown device {value!r}")
# More is a typing error: each is a thread of the system, and torch creates them all at once.
_THREADS_MOST = max(256, min(1024, 2 * (os.cpu_count() or 1)))
THREAD_COUNTS = Range(1, _THREADS_MOST, f"Give a number of CPU threads from 1 to {_THREADS_MOST}.")
IMPLS = Annotated[
    list[str] | None,
    opt(
        "stock, invariant, or your own package.module:function or operator=package.module:function. Repeatable.",
        shown="stock, invariant", complete=PROBE_IMPLS,
    ),
]  # fmt: skip
# Values of modules that load torch, so that a typing error is reported before.
KINDS = OneOf(
    (
        *("bell", "wide", "cancel", "outlier", "order", "order-wide", "integers", "positive"),
        *("mixed", "tiny", "denormal", "underflow", "masked", "infinite"),
    ),
    "unknown kind of input {value!r}",
)
_STEPS = ("sharing", "chunk", "budget", "page", "scheduler", "preemption", "speculative", "routing", "graphs")
AXES = OneOf((*_STEPS, "dtype", "attention", "threads", "ranks", "all"), "unknown axis {value!r}")
FLOATS = OneOf(("bfloat16", "float16", "float32", "float64"), "{option} {value!r} is not one that operators compute in")
PROBED = OneOf((*FLOATS.names, "float8_e4m3fn", "float8_e5m2"), FLOATS.what)  # the latter only by scaled-matmul
DTYPES = Annotated[list[str] | None, opt("bfloat16, float16, float32, ... Repeatable."), PROBED]
SIZES = Range(1, 2**24)
LARGEST_M = Annotated[int | None, opt("Largest M (rows) of the sweep."), SIZES]
K = Annotated[int | None, opt("K, the axis that is summed."), SIZES]
N = Annotated[int | None, opt("N, the output features."), SIZES]
PRESET = Annotated[str | None, opt("Layer shapes of a real model, e.g. qwen3-8b.", complete=SHAPES)]
MODEL_FOLDER = Annotated[Path | None, opt("Folder or config.json to read layer shapes from.", "--model")]
INPUTS = Annotated[
    list[str] | None,
    opt("Kinds of input: bell, wide, cancel, outlier, order, order-wide, integers. Repeatable."),
    KINDS,
]
PROMPT = Annotated[str | None, opt("The prompt.", shown="the embedded model's")]
PROMPT_FILE = Annotated[Path | None, opt("Read the prompt from a UTF-8 text file.")]
MODEL_DTYPES = OneOf(("bfloat16", "float16", "float32"), "{option} {value!r} is not one that models run in here")
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
MODEL = Annotated[
    str | None, opt("Folder, hub name, or random weights such as random:qwen3-12x1024.", shown="the embedded model")
]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it runs, and from which seed."""

    seed: int = own("Seed of all random draws.", default=0, min=0, max=2**32 - 1, panel=MACHINE)
    device: str = own("auto, cpu or cuda.", default="auto", panel=MACHINE, check=DEVICES)
    threads: int | None = own(
        "CPU threads. They change bits, so they are always recorded.", panel=MACHINE, check=THREAD_COUNTS
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Machine):
    """How a model is loaded, and where it runs."""

    dtype: str = own("bfloat16, float16 or float32.", default="bfloat16", check=MODEL_DTYPES)
    trust_remote_code: bool = own("Run code that a model repository brings.", default=False)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tokens are drawn."""

    temperature: float = own("0: greedy. Above 0: tokens are drawn.", default=0.0, panel=DRAWING, check=Range(0, 100))
    top_k: int = own(
        "Draw from this many of the most probable tokens; 0: all.",
        default=0,
        panel=DRAWING,
        check=Range(0, 2**53, "Give the number of tokens to keep, or 0 for all."),
    )
    top_p: float = own(
        "Draw from the fewest tokens of this probability; 1: all.",
        default=1.0,
        panel=DRAWING,
        check=Range(math.nextafter(0, 1), 1, "Give a share of the mass above 0, up to 1 for all."),
    )
    seeds: int = own("Seeds, 0 and up, sent with each prompt.", default=1, panel=DRAWING, check=Range(1, 10_000))

    @cached_property
    def samplings(self) -> list[Sampling]:
        """One per seed; none for greedy requests. A `UserError` for options that only a draw has."""
        from nondet.sampling.plan import Sampling

        if self.temperature > 0.0:
            return [Sampling(self.temperature, self.top_k, self.top_p, seed) for seed in range(self.seeds)]
        if self.top_k or self.top_p < 1.0 or self.seeds > 1:
            raise UserError("--top-k, --top-p and --seeds need a temperature above 0", "Add --temperature 0.8, say.")
        return []
