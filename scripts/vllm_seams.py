"""Which of the plugin's seams a release of vLLM still has: its sources are read, nothing of them is run.

    curl -LO https://files.pythonhosted.org/.../vllm-0.33.0.tar.gz && tar xzf vllm-0.33.0.tar.gz
    python scripts/vllm_seams.py vllm-0.33.0 ...

A line for each seam that is gone or takes other parameters; exit code 1 where there is one. A release that fits was not
run: `nondet.vllm.plugin.TRIED` names those that were.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from nondet.vllm.plugin import MOVED, SEAMS, Seam


def parameters(source: Path, place: str) -> str | None:
    """The names of the parameters of "module:Class.function" under `source`; None where it is not there."""
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
    if isinstance(found, ast.ClassDef):
        return ""
    taken = found.args  # type: ignore[attr-defined] # it is a function
    every = [*taken.posonlyargs, *taken.args, taken.vararg, *taken.kwonlyargs, taken.kwarg]
    return " ".join(argument.arg for argument in every if argument is not None)


def moved(source: Path) -> Iterator[tuple[Seam, str | None]]:
    """Each seam that does not fit, and what it takes there."""
    for first in SEAMS:
        for seam in filter(None, (first, MOVED.get(first.place))):
            taken = parameters(source, seam.place)
            if taken is not None:
                break
        if taken != seam.takes:
            yield seam, taken


def main(folders: list[str]) -> int:
    """Say it of each folder."""
    faults = 0
    for folder in folders:
        if not Path(folder, "vllm", "__init__.py").exists():
            raise SystemExit(f"{folder} holds no sources of vLLM")
        lines = [
            f"  {seam.place}: {'not there' if taken is None else f'takes ({taken}), not ({seam.takes})'}"
            for seam, taken in moved(Path(folder))
        ]
        print(f"{Path(folder).name}: {len(SEAMS) - len(lines)} of {len(SEAMS)} seams fit", *lines, sep="\n")
        faults += len(lines)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
