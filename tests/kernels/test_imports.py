"""What kernels may lean on: the core below them, and none of the commands and tools above."""

from __future__ import annotations

import ast
from pathlib import Path

import nondet.kernels

_TREE = Path(nondet.kernels.__path__[0])
_ABOVE = ("nondet.commands", "nondet.services", "nondet.certify", "nondet.bench", "nondet.cli")


def imported(path: Path) -> set[str]:
    """Names of modules that a file imports, and those that it names in a string."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.partition(":")[0])
    return names


def test_kernels_import_nothing_from_above() -> None:
    """An operator can be read, used and shipped without the tools that examine it."""
    files = sorted(_TREE.rglob("*.py"))
    assert len(files) > 40
    for path in files:
        up = {name for name in imported(path) if any(name == a or name.startswith(f"{a}.") for a in _ABOVE)}
        assert not up, f"{path.relative_to(_TREE)} imports {up}"
