"""docs/adding.md, tried: an operator and a backend are added to a copy of the package, and everything sees them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

DECLARATION = """
from nondet.core.operator import ANY, INVARIANT, AtenOperator, Claim, Family, Implementation, Operator
from nondet.kernels.rows.operator import CPU_ROWS
from nondet.core.operator import Bench, Operand, RowForm, RowProbing, row_cells

_AT = "nondet.kernels.fraction.functions"

FRACTION = Operator(
    name="fraction",
    reference=f"{_AT}:oracle",
    implementations=(
        Implementation(name="stock", stock=True, targets={ANY: f"{_AT}:stock"}),
        Implementation(name="by-batch", targets={ANY: f"{_AT}:by_batch"}),
        Implementation(name="invariant", invariant=True, targets={"cpu": "nondet.kernels.fraction.cpu:fraction"}),
    ),
    family=Family("fraction", "what stands before the point is taken away"),
    aten=(AtenOperator(name="frac", replacement=f"{_AT}:replace", out="frac.out", in_place=True),),
    claims=(Claim(order=CPU_ROWS, members={INVARIANT: INVARIANT, "by-batch": f"{_AT}:by_batch"}),),
    operands=(Operand(("M", "V")),),
    probe=RowProbing(widths=(64,), width_keys=()),
    bench=Bench(
        cells=row_cells("fraction", "V", ((1, 64),)), work=lambda s: (2 * s["M"] * s["V"], 0), group=("V",)
    ),
    questions={"cpu": RowForm(kinds=("bell",), widths=(64,), batches=(1, 2, 5), elements=2**10)},
)
"""
FUNCTIONS = """
import torch
from nondet.core.launch import note

def oracle(x: torch.Tensor) -> torch.Tensor:
    return x.double() - x.double().trunc()

def stock(x: torch.Tensor) -> torch.Tensor:
    note("torch.frac")
    return torch.frac(x)

def by_batch(x: torch.Tensor) -> torch.Tensor:
    return torch.frac(x) * (1 + x.shape[0] % 2 * 2.0**-20)

def replace(kernels, x):
    return kernels.fraction(x)
"""
BACKEND = """
import torch
from nondet.core.launch import note

def fraction(x: torch.Tensor) -> torch.Tensor:
    note("NAME")
    return x - x.trunc()
"""
TRY = """
import json, sys
import torch
import nondet
from nondet.cli import main
from nondet.kernels.dispatch.block import batch_invariant
from nondet.core.launch import listen

common = ["--device", "cpu", "--dtype", "float32"]
commands = [
    ["probe", "fraction", *common, "--m", "8", "--impl", "by-batch", "--impl", "invariant", "--out", "p.jsonl"],
    ["bench", "fraction", *common, "--m", "1", "--m", "3", "--out", "b.jsonl"],
    ["certify", "fraction", *common, "--out", "c.jsonl"],
]
codes = [main(argv) for argv in commands if argv[0] in sys.argv]
x = torch.randn(3, 5)
with listen() as ran, torch.no_grad(), batch_invariant(["fraction"]) as block:
    fine = torch.equal(torch.frac(x), x - x.trunc())
print(json.dumps({"at": nondet.__file__, "codes": codes, "fine": fine, "ran": list(ran),
                  "replaced": dict(block.coverage().replaced)}))
"""


def tried(package: Path, at: Path, *commands: str) -> dict[str, object]:
    """What the copy says of the operator, by these commands and in a block, in a process of its own."""
    at.mkdir()
    environment = os.environ | {"PYTHONPATH": str(package), "NONDET_CACHE": str(at / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", TRY, *commands], cwd=at, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert str(said["at"]).startswith(str(package)), "another nondet was imported"
    return said


def statuses(run_file: Path, kind: str) -> dict[str, set[str]]:
    """Implementation -> statuses of the records of that type."""
    records = [json.loads(line) for line in run_file.read_text(encoding="utf-8").splitlines()]
    seen: dict[str, set[str]] = {}
    for record in records:
        for part in record.get("timed", []) if kind == "cell" else [record]:
            if record["type"] == kind:
                seen.setdefault(part["impl"], set()).add(part["status"])
    return seen


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with a new operator: a folder, and one line in the registry."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "nondet", root / "nondet", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    folder = root / "nondet" / "kernels" / "fraction"
    folder.mkdir()
    for name, text in (("operator", DECLARATION), ("functions", FUNCTIONS)):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / "cpu.py").write_text(BACKEND.replace("NAME", "fraction[first]"), encoding="utf-8")
    registry = root / "nondet" / "core" / "registry.py"
    text = registry.read_text(encoding="utf-8")
    mark = "DECLARATIONS: tuple[str, ...] = (\n"
    assert text.count(mark) == 1
    line = '    "nondet.kernels.fraction.operator:FRACTION",\n'
    registry.write_text(text.replace(mark, mark + line), encoding="utf-8")
    return root


def test_an_operator_is_a_folder_and_one_line(package: Path, tmp_path: Path) -> None:
    """Probe, bench, certify and batch_invariant() all see it; the kernel that minds its batch is caught by each."""
    at = tmp_path / "operator"
    said = tried(package, at, "probe", "bench", "certify")
    assert said["codes"] == [0, 0, 0]
    probed = statuses(at / "p.jsonl", "row")
    assert "divergent" in probed["by-batch"]
    assert probed["invariant"] == {"identical"}
    assert statuses(at / "b.jsonl", "cell") == {"stock": {"timed"}, "invariant": {"timed"}}
    assert statuses(at / "c.jsonl", "row") == {"by-batch": {"divergent"}, "invariant": {"identical"}}
    assert said["fine"] is True
    assert (said["replaced"], said["ran"]) == ({"frac": 1}, ["fraction[first]"])


def test_a_backend_is_a_file_and_its_line(package: Path, tmp_path: Path) -> None:
    """Another file for the device and its line in the declaration: probes and batch_invariant() run it."""
    folder = package / "nondet" / "kernels" / "fraction"
    (folder / "other.py").write_text(BACKEND.replace("NAME", "fraction[second]"), encoding="utf-8")
    declaration = folder / "operator.py"
    text = declaration.read_text(encoding="utf-8")
    try:
        declaration.write_text(text.replace("fraction.cpu:fraction", "fraction.other:fraction"), encoding="utf-8")
        said = tried(package, tmp_path / "backend", "probe")
    finally:
        declaration.write_text(text, encoding="utf-8")
    assert said["ran"] == ["fraction[second]"]
    assert "fraction[second]" in (tmp_path / "backend" / "p.jsonl").read_text(encoding="utf-8")
