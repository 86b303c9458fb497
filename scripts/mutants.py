"""Mutants of the core, drawn by seed, and whether the near tests kill them: kept in docs/evidence/lab/mutants.md.

python scripts/mutants.py draw 19 300 > mutants.jsonl     (where `pip install mutmut` was done: mutmut's operators)
python scripts/mutants.py run mutants.jsonl > killed.jsonl    (in a clone that is for nothing else: it changes files)
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_DISPATCH = "again block functions operators replacements state transformers transformers_attention"
CORE = (
    *(f"nondet/core/{name}.py" for name in ("compare", "statistics", "certificates", "proof", "runfile")),
    *(f"nondet/verdict/{name}.py" for name in ("findings", "gate", "rows", "samples", "served", "wording")),
    *(f"kernels/dispatch/{name}.py" for name in _DISPATCH.split()),
    *("nondet/trace/align.py", "nondet/trace/search.py", "reports/first_screen.py"),
)
_TEST_FILES, _CPU_S = 25, 120  # the nearest, as scripts/test.sh --quick has them; seconds of a mutant


def mutants_of(code: str) -> tuple[Any, list[tuple[int, Any, list[Any]]]]:
    """The parsed module, and (line, node, its mutants) where mutmut has any.

    Annotations, docstrings, decorators, imports and __all__ are left out.
    """
    import libcst as cst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.mutators import mutation_operators

    wrapper = MetadataWrapper(cst.parse_module(code))
    places = wrapper.resolve(PositionProvider)
    found: list[tuple[int, Any, list[Any]]] = []

    class Visitor(cst.CSTVisitor):
        def on_visit(self, node: cst.CSTNode) -> bool:
            if isinstance(node, (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)):
                return False
            if isinstance(node, cst.Expr) and isinstance(node.value, (cst.SimpleString, cst.ConcatenatedString)):
                return False
            if isinstance(node, cst.Assign) and cst.Module([]).code_for_node(node).startswith("__all__"):
                return False
            made = [m for kind, operator in mutation_operators if isinstance(node, kind) for m in operator(node)]
            if made:
                found.append((places[node].start.line, node, made))
            return True

    wrapper.visit(Visitor())
    return wrapper.module, found


def draw(seed: int, n: int) -> None:
    """Nodes in proportion to the lines of a file, and one mutant of each."""
    rng = random.Random(seed)  # noqa: S311 - a draw, not a secret
    sources = {name: (ROOT / name).read_text(encoding="utf-8") for name in CORE}
    total = sum(source.count("\n") for source in sources.values())
    shares = {name: n * source.count("\n") / total for name, source in sources.items()}
    quota = {name: int(share) for name, share in shares.items()}
    for name in sorted(shares, key=lambda name: quota[name] - shares[name])[: n - sum(quota.values())]:
        quota[name] += 1
    for name, source in sources.items():
        module, nodes = mutants_of(source)
        for line, node, made in sorted(rng.sample(nodes, quota[name]), key=lambda drawn: drawn[0]):
            mutated = module.deep_replace(node, rng.choice(made)).code
            start = len(os.path.commonprefix([source, mutated]))  # noqa: RUF071 - of characters
            end = len(os.path.commonprefix([source[start:][::-1], mutated[start:][::-1]]))  # noqa: RUF071
            old, new = source[start : len(source) - end], mutated[start : len(mutated) - end]
            print(json.dumps({"file": name, "line": line, "start": start, "old": old, "new": new}))


def run(mutants: Path) -> None:
    """Each in a process forked from one that has torch loaded; in a clean tree every one of these tests passes."""
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    import pytest
    import torch  # noqa: F401 - takes longer than most tests, and is the same in each process

    from scripts.house import near

    for number, line in enumerate(mutants.read_text(encoding="utf-8").splitlines()):
        mutant, began = json.loads(line), time.monotonic()
        path, start = ROOT / mutant["file"], mutant["start"]
        source = path.read_text(encoding="utf-8")
        if source[start : start + len(mutant["old"])] != mutant["old"]:
            raise SystemExit(f"{path} is not the file that mutant {number} was drawn from")
        tests = [str(test) for test in near([mutant["file"]])[:_TEST_FILES]]
        path.write_text(source[:start] + mutant["new"] + source[start + len(mutant["old"]) :], encoding="utf-8")
        os.utime(path, (number, number))  # no byte code of another mutant is of this time
        try:
            if not (child := os.fork()):
                resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
                os.dup2(2, 1)
                os._exit(int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests])))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        finally:
            path.write_text(source, encoding="utf-8")
        print(json.dumps(mutant | {"exit": status, "seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "draw":
        draw(int(sys.argv[2]), int(sys.argv[3]))
    else:
        run(Path(sys.argv[2]))
