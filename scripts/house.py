"""The house as data: its modules, the arrows between them, its lines by package, and the tests that a change can touch.

python scripts/house.py            lines by package beside the budget; exit code 1 where one is over
python scripts/house.py --near     the test files that what has changed since the last commit (or in it) can touch
python scripts/house.py --entered probe softmax ...    the product's files of which a function is called by this command
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("nondet", "probes", "kernels", "reports")
# Most lines of Python by package. Growth is a decision: an issue that needs more raises a number in its own commit.
BUDGET = {
    "bench": 1434,
    "certify": 497,
    "commands": 913,
    "core": 5307,
    "diagnose": 647,
    "embedded": 7,
    "endpoint": 2810,
    "engines": 623,
    "export": 417,
    "fleet": 596,
    "mismatch": 1920,
    "kernels": 17314,
    "nondet": 1558,
    "probes": 4908,
    "ranks": 647,
    "reports": 4596,
    "sampling": 5041,
    "services": 2687,
    "sglang": 649,
    "testing": 472,
    "trace": 3497,
    "verdict": 2138,
    "vllm": 1765,
}
_NAME = re.compile(r"(?:nondet|tests)(?:\.\w+)+")
_NEAREST = 25  # test files; collecting all of them takes longer than a quick run may


class Arrow(NamedTuple):
    """`source` needs `target`; `text`: it names it in a string, "module:attribute", as tables of targets do."""

    source: str
    target: str
    text: bool


@functools.cache
def modules(*folders: str) -> dict[str, Path]:
    """Every Python file in these folders (the product's) by the name it is imported by, in its real place."""
    found = {}
    for folder in folders or PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if not any((ROOT / Path(*parts[:i])).is_symlink() for i in range(1, len(parts) + 1)):
                head = () if folder in ("nondet", "tests") else ("nondet",)
                found[".".join((*head, *parts)).removesuffix(".__init__")] = path
    return found


def arrows(module: str, path: Path, known: Iterable[str]) -> set[Arrow]:
    """What a file imports, at its top, inside of functions and for types, and what it names in strings."""
    found = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {Arrow(module, alias.name, False) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            head = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*head, *filter(None, [node.module])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            # `from package import module` needs the module, and the package only where that gives something itself
            found |= {Arrow(module, name if name in known else base, False) for name in inner}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for name in _NAME.findall(node.value) if len(node.value) < 120 else ():
                found |= {Arrow(module, ".".join(name.split(".")[:i]), True) for i in range(2, name.count(".") + 2)}
    return {arrow for arrow in found if arrow.target in known and arrow.target != module}


@functools.cache
def graph(*folders: str) -> set[Arrow]:
    """All arrows among the modules of these folders."""
    known = modules(*folders)
    return {arrow for module, path in known.items() for arrow in arrows(module, path, known)}


def package_of(path: Path) -> str:
    """The folder that a module belongs to: the first under nondet/, or one of those at the top; else "nondet"."""
    folder = path.relative_to(ROOT).parts[:-1]
    return folder[1] if folder[0] == "nondet" and len(folder) > 1 else folder[0]


def lines() -> Counter[str]:
    """Lines of Python by package."""
    count: Counter[str] = Counter()
    for path in modules().values():
        count[package_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    return count


def table() -> str:
    """Lines by package beside the budget, those over it marked."""
    count = lines()
    rows = [f"{'lines of':12}{'now':>8}{'budget':>8}{'left':>8}"]
    for name in sorted({*count, *BUDGET}):
        left = BUDGET.get(name, 0) - count[name]
        rows.append(f"{name:12}{count[name]:8,}{BUDGET.get(name, 0):8,}{left:8,}{'  over' if left < 0 else ''}")
    total = sum(BUDGET.values())
    return "\n".join([*rows, f"{'all':12}{count.total():8,}{total:8,}{total - count.total():8,}"])


def changed() -> list[str]:
    """Files that differ from the last commit or are new; where none do, those of the last commit."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
        return done.stdout.splitlines()

    names = git("diff", "--name-only", "HEAD") + git("ls-files", "--others", "--exclude-standard")
    return names or git("diff", "--name-only", "HEAD~1", "HEAD")


def near(names: Iterable[str]) -> list[Path]:
    """The test files that these files can touch, nearest first: by arrows between the change and the test."""
    known = modules(*PRODUCT, "tests")
    needed_by: dict[str, set[str]] = {}
    for arrow in graph(*PRODUCT, "tests"):
        needed_by.setdefault(arrow.target, set()).add(arrow.source)
    for module in known:
        if module.endswith(".conftest"):  # nobody imports it: all tests below it need it
            needed_by[module] = {other for other in known if other.startswith(module.removesuffix("conftest"))}
    places = {path.resolve(): module for module, path in known.items()}
    reached: set[str] = set()
    for name in names:
        if (ROOT / name).resolve() in places:
            reached.add(places[(ROOT / name).resolve()])
        else:  # a template, a page, a table: who names it; a module that is gone: nobody is left to
            reached |= {m for m, p in known.items() if Path(name).name in p.read_text(encoding="utf-8")}
    ring, rank = sorted(reached), dict[str, int]()
    while ring:
        rank |= dict.fromkeys(ring, len(rank))
        ring = sorted({s for module in ring for s in needed_by.get(module, ())} - set(rank))
    own = {part for module in reached for part in module.split(".")[-2:]}  # test_plan.py before others of its ring

    def order(module: str) -> tuple[int, int, str]:
        return rank[module], -len(own & set(module.replace("test_", "").split("."))), module

    return [known[m] for m in sorted(rank, key=order) if known[m].name.startswith("test_")]


def entered(argv: list[str]) -> list[str]:
    """The product's files of which a function is called, by any thread; the bodies of modules and classes are none."""
    from nondet.cli import main as nondet

    codes = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        nondet(argv)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type] # as the manual has it
    functions = (c for c in codes if c.co_flags & inspect.CO_OPTIMIZED and not re.match("<(?!lambda)", c.co_qualname))
    files = {Path(code.co_filename).resolve() for code in functions}
    return sorted(str(path.relative_to(ROOT)) for path in modules().values() if path in files)


def main() -> int:
    """See the top of this file."""
    if "--near" in sys.argv:
        tests = near(changed())
        print("\n".join(str(path.relative_to(ROOT)) for path in tests[:_NEAREST]))
        print(
            f"the nearest {min(len(tests), _NEAREST)} of {len(tests)} test files that the change can touch",
            file=sys.stderr,
        )
        return 0
    if "--entered" in sys.argv:
        files = entered(sys.argv[sys.argv.index("--entered") + 1 :])
        print(*files, f"{len(files)} files", sep="\n")
        return 0
    print(table())
    return any(BUDGET.get(name, 0) < count for name, count in lines().items())


if __name__ == "__main__":
    sys.exit(main())
