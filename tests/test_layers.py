"""The arrows between the folders point down."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_FOLDERS = ("nondet", "probes", "kernels", "reports")

# Layer -> the layers it may not import, at the top of a file or inside a function. What is not listed is free to.
# "core" is every module of nondet/ itself and nondet/verdict; the entry points are the command line's.
_FORBIDDEN: dict[str, set[str]] = {
    "kernels": {"commands", "certify", "bench", "sampling", "trace", "reports", "probes", "verdict", "entry"},
    "probes": {"commands", "certify", "bench", "sampling", "trace", "reports", "verdict", "entry"},
    "core": {"commands", "certify", "bench", "reports", "sampling", "trace", "diagnose", "embed", "entry"},
    "sampling": {"commands", "certify", "bench", "reports", "diagnose", "entry"},
    "endpoint": {"commands", "certify", "bench", "reports", "diagnose", "entry"},
    "trace": {"commands", "certify", "bench", "reports", "diagnose", "entry"},
    "embed": {"commands", "certify", "bench", "reports", "trace", "diagnose", "entry"},
    "diagnose": {"commands", "certify", "bench", "reports", "entry"},
    "bench": {"commands", "certify", "sampling", "trace", "reports", "entry"},
    "certify": {"commands", "bench", "sampling", "trace", "reports", "entry"},
    "reports": {"commands", "certify", "entry"},
    "services": {"commands", "entry"},
}
# Modules that stand above the layers: they put commands, reports and records together for a user.
_ENTRY = {"nondet.__main__", "nondet.cli", "nondet.api"}  # and nondet.export, nondet.testing
# Arrows that still run up, each with who takes it away. A new one is no way out: turn the arrow.
_KNOWN: dict[tuple[str, str], str] = {
    (
        "nondet.bench.tune",
        "nondet.bench.cells",
    ): "tuning is a command's body and times kernels; it belongs beside bench",
}


def _files() -> Iterator[tuple[Path, str]]:
    """Every Python file of the product, by its real place, with the name it is imported by."""
    for folder in _FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if any((ROOT / Path(*parts[:i])).is_symlink() for i in range(1, len(parts) + 1)):
                continue  # nondet/kernels -> ../kernels and so on
            name = ".".join(parts if folder == "nondet" else ("nondet", *parts)).removesuffix(".__init__")
            yield path, name


def _layer(module: str) -> str:
    if module in _ENTRY or module.startswith(("nondet.export", "nondet.testing")):
        return "entry"
    second = [*module.split("."), ""][1]
    return second if second in {*_FORBIDDEN, "commands"} else "verdict" if second == "verdict" else "core"


def _imports(path: Path, module: str) -> Iterator[str]:
    """Names of modules of ours that a file imports anywhere, and "module:attribute" strings are data, no imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            head = ".".join(package.split(".")[: -(node.level - 1) or None]) if node.level else ""
            base = ".".join(filter(None, (head, node.module or "")))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


MODULES = {name: path for path, name in _files()}


def test_the_walk_finds_the_product() -> None:
    """A test over no files would pass."""
    for name in ("nondet.verdict.gate", "nondet.kernels.matmul.cpu", "nondet.probes.matmul", "nondet.reports.html"):
        assert name in MODULES
    assert len(MODULES) > 100


@pytest.mark.parametrize("layer", sorted(_FORBIDDEN))
def test_arrows_point_down(layer: str) -> None:
    """Imports inside functions count: what is needed at run time is a dependence, whenever it is loaded."""
    up = set()
    for module, path in MODULES.items():
        own = "core" if _layer(module) == "verdict" else _layer(module)
        if own != layer:
            continue
        for target in _imports(path, module):
            if target in MODULES and _layer(target) in _FORBIDDEN[layer] - ({"verdict"} if own == "core" else set()):
                up.add((module, target))
    assert {arrow for arrow in up if arrow not in _KNOWN} == set()


def test_known_arrows_are_still_there() -> None:
    """An exception that is no longer needed is taken off the list."""
    assert [(m, t) for m, t in _KNOWN if t not in set(_imports(MODULES[m], m))] == []


def test_the_check_would_see_an_arrow(tmp_path: Path) -> None:
    """An import inside a function, a relative one and a submodule are all found."""
    path = tmp_path / "x.py"
    lines = ("def f():", "    from nondet.reports import html", "    from ..bench import timing", "import nondet.cli")
    path.write_text("\n".join(lines))
    assert {"nondet.reports.html", "nondet.bench.cells", "nondet.cli"} <= set(_imports(path, "nondet.sampling.x"))
