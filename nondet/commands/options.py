"""Options that several commands have, each written down once, and what a shell completes for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.errors import UserError

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


OUT = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="Run file to write (.jsonl). Default: a new file in runs/.", show_default=False,
        rich_help_panel=OUTPUT,
    ),
]  # fmt: skip
FORCE = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.", rich_help_panel=OUTPUT)]
RESUME = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run file at --out, with the same options.", rich_help_panel=OUTPUT),
]
VERBOSE = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print everything, not 25 lines.", rich_help_panel=OUTPUT)
]
QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict alone.", rich_help_panel=OUTPUT)]
SEED = Annotated[
    int,
    typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of everything that is drawn.", rich_help_panel=MACHINE),
]
DEVICE = Annotated[
    str,
    typer.Option(
        "--device", help="auto, cpu or cuda.", autocompletion=choices("auto", "cpu", "cuda"), rich_help_panel=MACHINE
    ),
]
THREADS = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="CPU threads. They change bits, so they are recorded either way.",
        show_default=False,
        rich_help_panel=MACHINE,
    ),
]
JSON = Annotated[
    bool,
    typer.Option("--json", help="Machine-readable output on stdout, one JSON object a line.", rich_help_panel=OUTPUT),
]
REPORT = Annotated[
    list[Path] | None,
    typer.Option(
        "--report", help="Also write a report: .html or .md. Repeatable.", show_default=False, rich_help_panel=OUTPUT
    ),
]
FAIL_ON = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        help='"divergent": exit with 3 if anything diverged or is wrong, with 1 if that can\'t be said.',
        show_default=False,
        autocompletion=choices("divergent"),
        rich_help_panel=OUTPUT,
    ),
]
IMPLS = Annotated[
    list[str] | None,
    typer.Option(
        "--impl",
        help="stock, invariant, or your own package.module:function or operator=package.module:function. Repeatable.",
        show_default="stock, invariant",
        autocompletion=probe_impls,
    ),
]
DTYPES = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        help="bfloat16, float16, float32, ... Repeatable.",
        show_default=False,
        autocompletion=choices("bfloat16", "float16", "float32", "float64"),
    ),
]
LARGEST_M = Annotated[int | None, typer.Option("--m", help="Largest M (rows) of the sweep.", show_default=False)]
K = Annotated[int | None, typer.Option("--k", help="K: the axis that is summed over.", show_default=False)]
N = Annotated[int | None, typer.Option("--n", help="N: output features.", show_default=False)]
PRESET = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Layer shapes of a real model, e.g. qwen3-8b.",
        show_default=False,
        autocompletion=presets,
    ),
]
MODEL_FOLDER = Annotated[
    Path | None,
    typer.Option("--model", help="Folder or config.json to read layer shapes from.", show_default=False),
]
INPUTS = Annotated[
    list[str] | None,
    typer.Option(
        "--inputs",
        help="bell, wide, cancel, outlier, order, order-wide, integers. Repeatable.",
        show_default=False,
        autocompletion=choices("bell", "wide", "cancel", "outlier", "order", "order-wide", "integers"),
    ),
]


PANEL = "Drawing"

TEMPERATURE = Annotated[
    float, typer.Option("--temperature", help="0: greedy. Above: tokens are drawn.", rich_help_panel=PANEL)
]
TOP_K = Annotated[int, typer.Option("--top-k", help="Keep so many of the largest; 0: all.", rich_help_panel=PANEL)]
TOP_P = Annotated[
    float,
    typer.Option("--top-p", help="Keep the fewest that hold this share of the mass; 1: all.", rich_help_panel=PANEL),
]
SEEDS = Annotated[
    int,
    typer.Option(
        "--seeds", help="Seeds, 0 and up, each with --n completions of each prompt.", rich_help_panel=PANEL
    ),
]  # fmt: skip


def samplings_of(temperature: float, top_k: int, top_p: float, seeds: int) -> list[Sampling]:
    """One for each seed; none for greedy requests.

    Raises:
        UserError: a value that makes no sense.
    """
    from nondet.sampling.plan import Sampling, check_sampling

    if not check_sampling(temperature, top_k, top_p, seeds):
        return []
    return [Sampling(temperature, top_k, top_p, seed) for seed in range(seeds)]


def check_drawn(impls: Sequence[str], drawn: bool, graphs: bool) -> None:
    """Refuse implementations that differ in the draw alone where nothing is drawn, and our draw inside of graphs.

    Raises:
        UserError: as said.
    """
    from nondet.sampling.plan import DRAWN, draws_itself

    for impl in impls:
        if not drawn and impl in DRAWN:
            raise UserError(f"--impl {impl} draws, and greedy completions draw nothing", "Add --temperature 0.8, say.")
        if drawn and graphs and not draws_itself(impl):
            raise UserError(f"--impl {impl} draws in a hook, which a CUDA graph does not run", "Leave CUDA graphs out.")


def subjects_of(
    texts: Sequence[str], tokens: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> list[dict[str, Any]]:
    """The prompts of a run's header, one for each prompt and seed, in the plan's order."""
    plain = [{"text": str(text), "tokens": len(ids)} for text, ids in zip(texts, tokens, strict=True)]
    return [p | {"seed": s.seed} for p in plain for s in samplings] if samplings else plain
