"""Options that several commands have, each written down once, and what a shell completes for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from nondet.sampling.plan import Sampling


# What a shell completes: the closed sets of names that options take. Each is read from its registry when asked.
#
# A name that none of them holds may still be right: a user's "package.module:function", a load of keys, a folder.


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def probes(incomplete: str) -> list[str]:
    """Probes, and all of them."""
    from nondet.core.registry import OPERATOR_PROBES, PROBES

    return _starting(incomplete, [*PROBES, *(name.replace("_", "-") for name in OPERATOR_PROBES), "all"])


def operators(incomplete: str) -> list[str]:
    """Operators that a numerics class has members of."""
    from nondet.core.registry import classes as known

    return _starting(incomplete, ["all", *(name.replace("_", "-") for c in known().values() for name in c.members)])


def classes(incomplete: str) -> list[str]:
    """Numerics classes."""
    from nondet.core.registry import classes as known

    return _starting(incomplete, known())


def probe_impls(incomplete: str) -> list[str]:
    """Implementations of any operator."""
    from nondet.core.registry import operators as known

    names = [i.name for operator in known().values() for i in operator.implementations]
    return _starting(incomplete, ["stock", "invariant", *names])


def bench_impls(incomplete: str) -> list[str]:
    """Those, and the rival libraries."""
    from nondet.bench.rivals import RIVALS

    return [*probe_impls(incomplete), *_starting(incomplete, RIVALS)]


def families() -> list[str]:
    """Families of operators that `batch_invariant` can replace by themselves."""
    from nondet.core.registry import declared

    return list(dict.fromkeys(o.family.name for o in declared().values() if o.family is not None))


def sample_impls(incomplete: str) -> list[str]:
    """What a model is sampled under; one family replaced by itself among them."""
    drawn = ["stock-seeded", "unseeded-invariant"]
    names = [
        "stock",
        "stock-no-cudnn",
        "stock-flash",
        "invariant",
        "both",
        *drawn,
        *(f"invariant:{f}" for f in families()),
    ]
    return _starting(incomplete, names)


def loads(incomplete: str) -> list[str]:
    """The load presets."""
    from nondet.sampling.plan import PRESETS

    return _starting(incomplete, PRESETS)


def presets(incomplete: str) -> list[str]:
    """Models whose layer shapes are known."""
    from nondet.probes.models import PRESETS

    return _starting(incomplete, PRESETS)


# The panels of `--help`: what is measured is under "Options", as Typer calls what has no panel.
OUTPUT, MACHINE = "Output", "Machine"


def choices(*names: str) -> Callable[[str], list[str]]:
    """A shell completion of these names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def opt(
    text: str, *names: str, shown: bool | str = False, panel: str | None = None, complete: Any = None, **more: Any
) -> Any:
    """An option with its help; without names it is called as its field.

    Args:
        shown: The default as the help has it; True: the value itself, False: it is not there or the text says it.
        panel: Part of the help; None: under "Options".
        complete: What a shell completes.
    """
    return typer.Option(*names, help=text, show_default=shown, rich_help_panel=panel, autocompletion=complete, **more)


OUT = Annotated[
    Path | None,
    opt("Run file to write (.jsonl). Default: a new file in runs/.", "--out", "-o", panel=OUTPUT),
]
FORCE = Annotated[bool, opt("Overwrite files that exist.", "--force", panel=OUTPUT)]
RESUME = Annotated[bool, opt("Go on with the run file at --out, with the same options.", "--resume", panel=OUTPUT)]
VERBOSE = Annotated[bool, opt("Print everything, not 25 lines.", "--verbose", "-v", panel=OUTPUT)]
QUIET = Annotated[bool, opt("Print the verdict alone.", "--quiet", "-q", panel=OUTPUT)]
JSON = Annotated[bool, opt("Machine-readable output on stdout, one JSON object a line.", "--json", panel=OUTPUT)]
REPORT = Annotated[list[Path] | None, opt("Also write a report: .html or .md. Repeatable.", panel=OUTPUT)]
FAIL_ON = Annotated[
    str | None,
    opt(
        '"divergent": exit with 3 if anything diverged or is wrong, with 1 if that can\'t be said.',
        complete=choices("divergent"), panel=OUTPUT,
    ),
]  # fmt: skip
SEED = Annotated[int, opt("Seed of everything that is drawn.", shown=True, min=0, max=2**32 - 1, panel=MACHINE)]
DEVICE = Annotated[str, opt("auto, cpu or cuda.", shown=True, complete=choices("auto", "cpu", "cuda"), panel=MACHINE)]
THREADS = Annotated[int | None, opt("CPU threads. They change bits, so they are recorded either way.", panel=MACHINE)]
IMPLS = Annotated[
    list[str] | None,
    opt(
        "stock, invariant, or your own package.module:function or operator=package.module:function. Repeatable.",
        shown="stock, invariant", complete=probe_impls,
    ),
]  # fmt: skip
DTYPES = Annotated[
    list[str] | None,
    opt(
        "bfloat16, float16, float32, ... Repeatable.", complete=choices("bfloat16", "float16", "float32", "float64")
    ),
]  # fmt: skip
LARGEST_M = Annotated[int | None, opt("Largest M (rows) of the sweep.")]
K = Annotated[int | None, opt("K: the axis that is summed over.")]
N = Annotated[int | None, opt("N: output features.")]
PRESET = Annotated[str | None, opt("Layer shapes of a real model, e.g. qwen3-8b.", complete=presets)]
MODEL_FOLDER = Annotated[Path | None, opt("Folder or config.json to read layer shapes from.", "--model")]
INPUTS = Annotated[
    list[str] | None,
    opt(
        "bell, wide, cancel, outlier, order, order-wide, integers. Repeatable.",
        complete=choices("bell", "wide", "cancel", "outlier", "order", "order-wide", "integers"),
    ),
]
PROMPT = Annotated[str | None, opt("The prompt. Default: the embedded model's.")]
PROMPT_FILE = Annotated[Path | None, opt("Read the prompt from a UTF-8 text file.")]
MODEL_DTYPE = Annotated[str, opt("bfloat16, float16 or float32.", shown=True)]
TRUST = Annotated[bool, opt("Run code that a model repository brings. Off unless given.", "--trust-remote-code")]

DRAWING = "Drawing"
TEMPERATURE = Annotated[float, opt("0: greedy. Above: tokens are drawn.", shown=True, panel=DRAWING)]
TOP_K = Annotated[int, opt("Keep so many of the largest; 0: all.", shown=True, panel=DRAWING)]
TOP_P = Annotated[float, opt("Keep the fewest that hold this share of the mass; 1: all.", shown=True, panel=DRAWING)]
SEEDS = Annotated[int, opt("Seeds, 0 and up, each with --n completions of each prompt.", shown=True, panel=DRAWING)]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tokens are drawn."""

    temperature: TEMPERATURE = 0.0
    top_k: TOP_K = 0
    top_p: TOP_P = 1.0
    seeds: SEEDS = 1

    def samplings(self) -> list[Sampling]:
        """One for each seed; none for greedy requests.

        Raises:
            UserError: a value that makes no sense.
        """
        from nondet.sampling.plan import Sampling, check_sampling

        if not check_sampling(self.temperature, self.top_k, self.top_p, self.seeds):
            return []
        return [Sampling(self.temperature, self.top_k, self.top_p, seed) for seed in range(self.seeds)]
