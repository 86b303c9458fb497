"""What gets installed: one top-level name, everything inside it, and a command that answers at once."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a wheel built from a copy of this tree: a build leaves files, and tests run in parallel."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "runs", "docs")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=out)
    (built,) = out.glob("*.whl")
    assert built.name.startswith("nondet_llm-")
    return zipfile.ZipFile(built).namelist()


def test_the_only_top_level_name_is_nondet(wheel: list[str]) -> None:
    """A top-level `kernels` would shadow the PyPI package that transformers imports."""
    tops = {name.split("/")[0] for name in wheel}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"nondet"}


def test_the_wheel_holds_every_module_and_data_file(wheel: list[str]) -> None:
    """The folders behind symlinks, the embedded model and the templates come along."""
    for folder in ("probes", "kernels", "reports"):
        shipped = {n.removeprefix("nondet/") for n in wheel if n.startswith(f"nondet/{folder}/") and n.endswith(".py")}
        assert shipped == {str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*.py")}
    for data in ("embedded/model.safetensors", "embedded/config.json", "embedded/tokenizer.json"):
        assert f"nondet/{data}" in wheel
    for template in (ROOT / "reports" / "templates").iterdir():
        assert f"nondet/reports/templates/{template.name}" in wheel
    for table in (ROOT / "kernels" / "matmul" / "tables").iterdir():
        assert f"nondet/kernels/matmul/tables/{table.name}" in wheel


def test_nothing_imports_the_folders_by_their_bare_names() -> None:
    """`import kernels` would work in a checkout and fail once installed."""
    bare = re.compile(r"^\s*(?:from|import) (?:probes|kernels|reports)\b", re.MULTILINE)
    files = [
        p
        for folder in ("nondet", "probes", "kernels", "reports", "tests", "scripts")
        for p in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 20
    assert [str(p) for p in files if bare.search(p.read_text(encoding="utf-8"))] == []


def test_help_loads_nothing_heavy() -> None:
    """`nondet --help` must not import torch, transformers, pandas or matplotlib: that is what keeps it under 0.3 s."""
    code = (
        "import sys\n"
        "from nondet.cli import main\n"
        "code = main(['--help'])\n"
        "heavy = {'torch', 'triton', 'transformers', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "probe" in done.stdout
    assert "sample" in done.stdout
