"""Which of the functions that the plugin replaces a release of vLLM still has. Its sources are read, not run.

    curl -LO https://files.pythonhosted.org/.../vllm-0.33.0.tar.gz && tar xzf vllm-0.33.0.tar.gz
    python scripts/vllm_seams.py vllm-0.33.0 ...

It prints a line for each function that is gone or takes other parameters, for a KV cache in a layout that nondet's
attention does not take, and for each `supports_` of FlashAttention's backend that it would inherit and that was not
reviewed; exit code 1 where there is one. What fits was not run: `nondet.vllm.plugin.TRIED` names those that were.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from nondet.vllm.plugin import MOVED, PATCHED, SHAPE


def found_at(source: Path, place: str) -> ast.AST | None:
    """The definition of "module:Class.function" under `source`; None where it is not there."""
    module, _, path = place.partition(":")
    file = source.joinpath(*module.split("."))
    file = file.with_suffix(".py") if file.with_suffix(".py").exists() else file / "__init__.py"
    if not file.exists():
        return None
    found: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for name in path.split("."):
        inside = {n.name: n for n in ast.walk(found) if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        if name not in inside:
            return None
        found = inside[name]
    return found


def parameters(source: Path, place: str) -> str | None:
    """The names of the parameters of "module:Class.function" under `source`; None where it is not there."""
    found = found_at(source, place)
    if found is None or isinstance(found, ast.ClassDef):
        return None if found is None else ""
    taken = found.args  # type: ignore[attr-defined] # it is a function
    every = [*taken.posonlyargs, *taken.args, taken.vararg, *taken.kwonlyargs, taken.kwarg]
    return " ".join(argument.arg for argument in every if argument is not None)


# What `nondet.vllm.plugin` finds by asking, written as vLLM writes it: the shape of a cache, or the layout's axes.
_LAYOUTS = (
    "(num_blocks, 2, block_size, num_kv_heads, head_size)",
    "(num_blocks, num_kv_heads, block_size, 2 * head_size)",
    "LBNHC = (0, 1, 3, 2, 4)",
)


def layout_of(source: Path) -> str:
    """How the KV cache of FlashAttention's backend lies, in the words of its sources."""
    function = found_at(source, SHAPE)
    if function is not None:
        said = [ast.unparse(n.value) for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
    else:
        layouts = found_at(source, "vllm.v1.kv_cache_layout:KVCacheLayout")
        said = [text for n in getattr(layouts, "body", ()) if (text := ast.unparse(n)).startswith("LBNHC =")]
    return " or ".join(said) or "not there"


# Answered by SegmentsBackend, or as FlashAttention's is: what it says of GPUs, options together, and windows.
LOOKED_AT = frozenset(
    (
        *(
            "batch_invariance",
            "non_causal",
            "attn_type",
            "per_head_quant_scales",
            "head_size",
            "kv_cache_dtype",
            "rswa",
        ),
        *("mm_prefix", "sink", "compute_capability", "combination", "sliding_window"),
    )
)


def inherited(source: Path) -> list[str]:
    """Names of what FlashAttention's backend says that it supports, and that were not reviewed."""
    file = source / "vllm/v1/attention/backends/flash_attn.py"
    classes = [n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.ClassDef)]
    said = [
        f.name for c in classes if c.name == "FlashAttentionBackend" for f in c.body if isinstance(f, ast.FunctionDef)
    ]
    return [name for name in said if name.startswith("supports_") and name.removeprefix("supports_") not in LOOKED_AT]


def moved(source: Path) -> Iterator[tuple[str, str, str | None]]:
    """Each function that does not fit: its place, what it should take, and what it takes there."""
    for path, takes in PATCHED.items():
        taken = parameters(source, path)
        if taken is None and path in MOVED:
            path, takes = MOVED[path]
            taken = parameters(source, path)
        if taken != takes:
            yield path, takes, taken


def main(folders: list[str]) -> int:
    """Print the lines of each folder."""
    faults = 0
    for folder in folders:
        if not Path(folder, "vllm", "__init__.py").exists():
            raise SystemExit(f"{folder} holds no sources of vLLM")
        lines = [
            f"  {path}: {'not there' if taken is None else f'takes ({taken}), not ({takes})'}"
            for path, takes, taken in moved(Path(folder))
        ]
        new = [f"  FlashAttentionBackend.{name}: not reviewed" for name in inherited(Path(folder))]
        layout = layout_of(Path(folder))
        new += [f"  another layout of the KV cache: {layout}"] if layout not in _LAYOUTS else []
        print(
            f"{Path(folder).name}: {len(PATCHED) - len(lines)} of {len(PATCHED)} functions fit", *lines, *new, sep="\n"
        )
        faults += len(lines) + len(new)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
