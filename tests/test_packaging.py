"""What gets installed: one top-level name, everything inside it, and a command that answers at once."""

from __future__ import annotations

import email
import re
import runpy
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
    options = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source))
    subprocess.run([sys.executable, "-m", "pip", *options], check=True, capture_output=True, cwd=out)
    (built,) = out.glob("*.whl")
    assert built.name.startswith("nondet_llm-")
    return built


@pytest.mark.slow
def test_the_wheel_holds_nondet_whole_and_nothing_else(built: Path, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(built).namelist()
    assert {top for name in wheel if not (top := name.split("/")[0]).endswith(".dist-info")} == {"nondet"}
    for folder in ("probes", "kernels", "reports"):
        shipped = {n.removeprefix("nondet/") for n in wheel if n.startswith(f"nondet/{folder}/") and n.endswith(".py")}
        assert shipped == {str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*.py")}
    for data in ("embedded/model.safetensors", "embedded/config.json", "embedded/tokenizer.json"):
        assert f"nondet/{data}" in wheel
    for data in (*(ROOT / "reports" / "templates").iterdir(), *(ROOT / "kernels" / "matmul" / "tables").iterdir()):
        assert f"nondet/{data.relative_to(ROOT)}" in wheel
    zipfile.ZipFile(built).extractall(tmp_path)
    [entry_points] = tmp_path.glob("*.dist-info/entry_points.txt")
    entries = entry_points.read_text()
    assert "[pytest11]\nnondet = nondet.testing.plugin\n" in entries
    assert "[sglang.srt.plugins]\nnondet = nondet.sglang.plugin:register\n" in entries
    assert "[vllm.general_plugins]\nnondet = nondet.vllm.plugin:register\n" in entries
    # its digest of sources is the checkout's: a run that was begun in one is gone on with in the other
    of_the_wheel = runpy.run_path(str(tmp_path / "nondet" / "core" / "environment.py"))["collect"]
    assert of_the_wheel()["sources"] == environment.collect()["sources"]
    # its metadata name what was tried
    [metadata_file] = tmp_path.glob("*.dist-info/METADATA")
    metadata = email.message_from_bytes(metadata_file.read_bytes())
    classifiers = set(metadata.get_all("Classifier", []))
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)}
    assert {c for c in classifiers if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", c)} == versions
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
    folders = ("nondet", "probes", "kernels", "reports", "tests", "scripts", "lab")
    texts = {p: p.read_text(encoding="utf-8") for folder in folders for p in (ROOT / folder).rglob("*.py")}
    assert len(texts) > 20
    assert [path for path, text in texts.items() if bare.search(text)] == []


_LIGHT = """
import sys

def loaded(*names):
    assert not {*names} & {*sys.modules}, {*names} & {*sys.modules}

import nondet.testing.plugin as plugin
loaded("torch", "numpy", "httpx", "msgspec", "transformers", "rich")
assert {name for name in vars(plugin) if name.startswith("pytest_")} == {"pytest_addoption", "pytest_configure"}
import nondet
nondet.load, nondet.probe, nondet.sample, nondet.check, nondet.check_operator
import nondet.sglang.plugin, nondet.vllm.plugin
nondet.sglang.plugin.register(), nondet.vllm.plugin.register()
loaded("torch", "pandas", "matplotlib", "transformers", "sglang", "vllm", "triton")
from nondet.cli import main
assert main(["--help"]) == 0
loaded("torch", "triton", "transformers", "pandas", "matplotlib", "numpy")
"""


@pytest.mark.slow
def test_what_answers_at_once_loads_nothing_heavy() -> None:
    """The plugin, which pytest imports everywhere; `import nondet; nondet.probe`; `nondet --help` (under 0.3 s)."""
    done = subprocess.run([sys.executable, "-c", _LIGHT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert "probe" in done.stdout
    assert "sample" in done.stdout
