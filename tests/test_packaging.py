"""What gets installed: one top-level name, everything inside it, and a command that answers at once."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nondet.core import environment

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of this tree: a build leaves files, and tests run in parallel."""
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
    return built


@pytest.fixture(scope="module")
def wheel(built: Path) -> list[str]:
    """Names of the files in the wheel."""
    return zipfile.ZipFile(built).namelist()


@pytest.mark.slow
def test_the_only_top_level_name_is_nondet(wheel: list[str]) -> None:
    """A top-level `kernels` would shadow the PyPI package that transformers imports."""
    tops = {name.split("/")[0] for name in wheel}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"nondet"}


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_metadata_name_what_was_tried(built: Path) -> None:
    """Python versions and the system are those of the run files; pictures get addresses with the first URL."""
    with zipfile.ZipFile(built) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    classifiers = set(metadata.get_all("Classifier", []))
    assert {c for c in classifiers if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", c)} == {
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    }
    assert {c for c in classifiers if c.startswith("Operating System")} == {"Operating System :: POSIX :: Linux"}
    text = str(metadata.get_payload())
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(pictures) == 2
    absolute = bool(metadata.get_all("Project-URL"))  # a package index shows no relative path
    for picture in pictures:
        assert picture.startswith("https://") == absolute
        assert picture.startswith("https://") or (ROOT / picture).is_file()
    assert "6 different answers" in re.findall(r'alt="([^"]+)"', text)[0]  # what an index shows in the picture's stead


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


@pytest.mark.slow
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


_KERNELS = """
import torch

def good(x, weight):
    rows = [row * torch.rsqrt(row.square().mean() + 1e-6) * weight.double() for row in x.double()]
    return torch.stack(rows).to(x.dtype)

def faulty(x, weight):
    parts = 1 if len(x) < 16 else 4
    sums = sum(part.float().square().sum(-1, keepdim=True) for part in x.chunk(parts, -1))
    return (x * torch.rsqrt(sums / x.shape[-1] + 1e-6) * weight).to(x.dtype)
"""
_TESTS = """
import time
import kernels_of_mine
from nondet.testing import assert_batch_invariant

def test_faulty():
    assert_batch_invariant(kernels_of_mine.faulty, operator="rms_norm")

def test_good():
    started = time.process_time()
    assert_batch_invariant(kernels_of_mine.good, operator="rms_norm")
    assert time.process_time() - started < 5.0
"""


@pytest.mark.slow
def test_a_new_project_tests_its_kernels(built: Path, tmp_path: Path) -> None:
    """As a new user has it: the plugin comes with the wheel; a faulty kernel is told M, class and place, a good passes.

    The good one has 5 s of CPU time: it does on two busy cores what others do on a quiet machine.
    """
    site, project = tmp_path / "site", tmp_path / "project"
    zipfile.ZipFile(built).extractall(site)
    project.mkdir()
    (project / "kernels_of_mine.py").write_text(_KERNELS)
    (project / "test_mine.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--nondet-runs", "runs", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=project, env=environment)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    for part in (
        "kernels_of_mine:faulty: batch-dependent",
        "class B, ",
        "M 16-64",
        "borders at M 15|16",
        "row 0, column",
    ):
        assert part in done.stdout, done.stdout
    assert sorted(path.name for path in (project / "runs").iterdir()) == [
        "kernels_of_mine-faulty-0.jsonl",
        "kernels_of_mine-good-0.jsonl",
    ]


@pytest.mark.slow
def test_the_plugin_costs_other_projects_nothing() -> None:
    """pytest imports it wherever nondet is installed: no torch, no numpy, no httpx; nothing is marked or collected."""
    code = (
        "import sys\n"
        "import nondet.testing.plugin as plugin\n"
        "heavy = {'torch', 'numpy', 'httpx', 'msgspec', 'transformers', 'rich'} & set(sys.modules)\n"
        "hooks = {name for name in vars(plugin) if name.startswith('pytest_')}\n"
        "extra = hooks - {'pytest_addoption', 'pytest_configure'}\n"
        "sys.exit(f'{heavy} {extra}' if heavy or extra else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_wheel_and_its_checkout_have_one_digest_of_sources(built: Path, tmp_path: Path) -> None:
    """A run that was begun in one is gone on with in the other."""
    zipfile.ZipFile(built).extractall(tmp_path)
    spec = importlib.util.spec_from_file_location("of_the_wheel", tmp_path / "nondet" / "core" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    of_the_wheel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(of_the_wheel)
    assert of_the_wheel.collect()["sources"] == environment.collect()["sources"]
