"""docs/adding.md, tried: an operator with its backend is added to a copy of the package, and everything sees it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from nondet.core.runfile import read_run

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

DECLARATION = """
from nondet.core.operator import ANY, INVARIANT, AtenOperator, Claim, Family, Implementation, Operator
from nondet.kernels.rows.operator import CPU_ROWS
from nondet.core.operator import Bench, Operand, RowProbing, row_cells, row_questions

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
    questions=row_questions(("bell",), {"cpu": (64,)}, {"cpu": (1, 2, 5)}),
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
    note("fraction[mine]")
    return x - x.trunc()
"""
TRY = """
import json
import torch
import nondet
from nondet.bench import cells
from nondet.cli import main
from nondet.kernels.dispatch.block import batch_invariant
from nondet.core.launch import listen

cells.COPY_BYTES, cells.PRODUCT_SIZES = {"cpu": 2**20}, {"cpu": 64}  # what this machine can do is no matter here
common = ["--device", "cpu", "--dtype", "float32"]
codes = [main(argv) for argv in (
    ["probe", "fraction", *common, "--m", "8", "--impl", "by-batch", "--impl", "invariant", "--out", "p.jsonl"],
    ["bench", "fraction", *common, "--m", "1", "--m", "3", "--out", "b.jsonl"],
    ["certify", "fraction", *common, "--out", "c.jsonl"],
)]
x = torch.randn(3, 5)
with listen() as ran, torch.no_grad(), batch_invariant(["fraction"]) as block:
    fine = torch.equal(torch.frac(x), x - x.trunc())
print(json.dumps({"at": nondet.__file__, "codes": codes, "fine": fine, "ran": list(ran),
                  "replaced": dict(block.coverage().replaced)}))
"""


def statuses(records: Iterable[Any]) -> dict[str, set[str]]:
    """Implementation -> statuses of its records."""
    seen: dict[str, set[str]] = {}
    for record in records:
        seen.setdefault(record.impl, set()).add(record.status)
    return seen


def test_an_operator_is_a_folder_and_one_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "nondet", tmp_path / "nondet", ignore=shutil.ignore_patterns("*.safetensors"))
    folder = tmp_path / "nondet" / "kernels" / "fraction"
    folder.mkdir()
    for name, text in (("operator", DECLARATION), ("functions", FUNCTIONS), ("cpu", BACKEND)):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    registry = tmp_path / "nondet" / "core" / "registry.py"
    text = registry.read_text(encoding="utf-8")
    mark = "DECLARATIONS: tuple[str, ...] = (\n"
    assert text.count(mark) == 1
    line = '    "nondet.kernels.fraction.operator:FRACTION",\n'
    registry.write_text(text.replace(mark, mark + line), encoding="utf-8")
    (at := tmp_path / "here").mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NONDET_CACHE": str(at / "cache")}
    command = [sys.executable, "-c", TRY]
    done = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["at"].startswith(str(tmp_path)), "another nondet was imported"
    assert said["codes"] == [0, 0, 0]
    probed = statuses(read_run(at / "p.jsonl").rows)
    assert "divergent" in probed["by-batch"]
    assert probed["invariant"] == {"identical"}
    assert "fraction[mine]" in (at / "p.jsonl").read_text(encoding="utf-8")
    timed = [one for cell in read_run(at / "b.jsonl").cells for one in cell.timed]
    assert statuses(timed) == {"stock": {"timed"}, "invariant": {"timed"}}
    assert statuses(read_run(at / "c.jsonl").rows) == {"by-batch": {"divergent"}, "invariant": {"identical"}}
    assert said["fine"] is True
    assert (said["replaced"], said["ran"]) == ({"frac": 1}, ["fraction[mine]"])
