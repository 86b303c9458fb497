"""The house: arrows between its parts point down, nothing is a cycle or an annex, and no package is over its budget."""

from __future__ import annotations

import functools
import graphlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import house

MOST_LEFT_OUT = 65  # rules of complexity that files leave out, together

# From the ground up. A module may need what lies below its own layer, and its own package; packages of one layer are
# siblings, which don't need each other. "cli" and the like are the files beside the folders of nondet/.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("version", "errors", "embedded"),
    ("nondet",),
    ("core",),
    ("kernels",),
    ("ranks",),  # starts processes and knows nothing of what they run: a probe asks it as well
    ("probes",),
    ("sampling",),
    ("endpoint",),
    ("engines",),
    ("vllm", "sglang"),
    ("trace", "bench", "certify", "embed"),
    ("mismatch", "fleet"),
    ("verdict",),
    ("diagnose", "diff"),  # they compare verdicts
    ("reports",),
    ("export",),
    ("services",),
    ("api", "commands"),
    ("testing",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Files that name others of their folder: a file with one line there is what a new section, member or backend is.
REGISTRIES = (".operator", "nondet.reports.content", "nondet.kernels.matmul.cuda")
# Modules whose only importer lies in their own folder: two files for one idea, but for the reason given.
ANNEXES: dict[str, str] = {
    "nondet.kernels.all_reduce.tree_cuda": "CUDA source and its calls, which no CPU loads",
    "nondet.kernels.attention.gluon_kernels": "Triton compiles functions of plain modules; loaded on Hopper alone",
    "nondet.kernels.matmul.gluon_kernels": "Triton compiles functions of plain modules; loaded on Hopper alone",
    "nondet.kernels.dispatch.functions": "torch's functions, a page by themselves",
    "nondet.vllm.attention": "imports vLLM at its top, which loads it by name",
    "nondet.vllm.operators": "loads torch, which the plugin does only where it is enabled",
    "nondet.sglang.attention": "imports SGLang at its top, and is loaded only under SGLang",
    "nondet.mismatch.kinds": "the hypotheses, a page by themselves",
    "nondet.testing.messages": "loads torch and the verdicts, once a test has failed; the assertions load neither",
}


@functools.cache
def imports() -> list[tuple[str, str]]:
    return sorted({(arrow.source, arrow.target) for arrow in house.graph() if not arrow.text})


def layer(module: str) -> str:
    return [*module.split("."), module][1] if "." in module else module


def folder(module: str) -> str:
    """The package of a module, "core" or "kernels.matmul"; a file beside the folders is one of its own."""
    parts = module.split(".")
    return ".".join(parts[1:-1]) if len(parts) > 2 else parts[-1]


def cycle(edges: set[tuple[str, str]]) -> list[str]:
    """The names along one cycle; empty where there is none."""
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for source, target in edges:
        sorter.add(source, target)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_arrows_point_down() -> None:
    """Imports inside of functions and for types count; a test over no files would pass: the walk finds the product."""
    for name in ("nondet.verdict.gate", "nondet.kernels.matmul.cpu", "nondet.probes.matmul", "nondet.reports.html"):
        assert name in house.modules()
    assert len(house.modules()) > 100
    assert len(imports()) > 500
    assert {layer(name) for name in house.modules()} <= RANK.keys(), "a new package needs its place in LAYERS"
    assert [(a, b) for a, b in imports() if layer(a) != layer(b) and RANK[layer(a)] <= RANK[layer(b)]] == []
    assert cycle(set(imports())) == []
    assert cycle({(folder(a), folder(b)) for a, b in imports() if folder(a) != folder(b)}) == []


def test_the_map_shows_the_layers() -> None:
    text = (house.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[1]
    shown = [re.findall(r"\w+", line[:36]) for line in picture.splitlines()[::-1]]
    assert set(shown[0]) < {*LAYERS[0], *LAYERS[1]}
    assert [sorted(names) for names in shown[1:]] == [sorted(names) for names in LAYERS[2:]]


def test_no_annex() -> None:
    importers: dict[str, set[str]] = {}
    for arrow in house.graph():
        importers.setdefault(arrow.target, set()).add(arrow.source)
    annexes = {
        name
        for name, (by, *others) in importers.items()
        if not others and not by.endswith(REGISTRIES) and name.count(".") > 1 and folder(name) == folder(by)
    }
    assert annexes == set(ANNEXES), "new annexes, or exceptions that are no longer needed"
    assert len(ANNEXES) < 10


def test_the_checks_would_see_it(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nondet.api import LoadedRun\n"
        "def f():\n    from nondet.reports import html\n    from ..bench import cells\n"
        'import nondet.cli\nTARGET = "nondet.kernels.rows.cpu:softmax"\n'
    )
    found = house.arrows("nondet.sampling.x", path, house.modules())
    assert {a.target for a in found if not a.text} == {
        *("nondet.api", "nondet.reports.html", "nondet.bench.cells", "nondet.cli")
    }
    assert "nondet.kernels.rows.cpu" in {a.target for a in found if a.text}
    assert cycle({("a", "b"), ("b", "c")}) == []
    assert set(cycle({("a", "b"), ("b", "c"), ("c", "a")})) == {"a", "b", "c"}


def test_packages_are_within_their_budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ruff = tomllib.loads((house.ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    left = [c for codes in ruff["per-file-ignores"].values() for c in codes if re.match(r"C901|PLR09", c)]
    assert len(left) <= MOST_LEFT_OUT
    monkeypatch.setattr(sys, "argv", ["house.py"])
    assert house.main() == 0, capsys.readouterr().out
    assert "over" not in capsys.readouterr().out
    monkeypatch.setitem(house.BUDGET, "verdict", 1)
    assert house.main() == 1
    assert re.search(r"^verdict .* over$", capsys.readouterr().out, re.MULTILINE)


def test_a_change_is_asked_by_its_nearest_tests() -> None:

    def names(*changed: str) -> list[str]:
        return [str(path.relative_to(house.ROOT / "tests")) for path in house.near(changed)]

    assert names("tests/test_layers.py")[0] == "test_layers.py"
    assert names("nondet/trace/align.py")[0] == "trace/test_align.py"
    assert "test_layers.py" in names("scripts/house.py")
    assert "trace/test_search.py" in names("tests/trace/conftest.py")
    assert "probes/test_matmul.py" not in names("tests/trace/conftest.py")
    assert names("reports/templates/report.html.j2")
