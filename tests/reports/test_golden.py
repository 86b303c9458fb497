"""What the reports of kept run files say is what they said: see golden.py for how to look at a difference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from matplotlib.image import imread

from nondet.core.registry import PROBES
from tests.reports import golden

PATHS = {golden.name_of(p, golden.ROOT / golden.KEPT): p for p in golden.run_files(golden.ROOT / golden.KEPT)}
DIGESTS = golden.read_digests()
# The smallest run file of each kind of report.
KINDS = (
    "cpu-xeon/ci", "cpu-xeon/embed", "cpu-xeon/ranks", "cpu/trace-embedded", "cpu/trace-sample", "cpu/shrink",
    "cpu/certify-gradients", "cpu/diagnose-fp8", "cpu/probe-logits", "cpu/trl-invariant", "h200-order/long-norm",
    "h200-x2/engine-2-ranks", "h200/end-to-end-32-cudnn", "h200/engine-8b", "h200/mismatch",
    "servers/transformers-serve/gate", "servers/transformers-serve/seeds", "vllm/coverage-gemma2", "vllm/trace-cpu",
    "vllm/trace-h200",
)  # fmt: skip

FIRST_WORDS = 120  # at most: the answer, its number, its picture and the next command


def test_every_kept_run_has_its_digests() -> None:
    assert sorted(PATHS) == sorted(DIGESTS)
    assert sum(len(set(digests.values())) == len(golden.FORMATS) for digests in DIGESTS.values()) > 60


def changed(names: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reports that say something else than they did: on a terminal of 80 columns, in markdown, on the bare page."""
    monkeypatch.chdir(golden.ROOT)
    found = []
    for name in names:
        made = golden.reports([str(PATHS[name].relative_to(golden.ROOT))])
        found += [f"{name}: {form}" for form, text in made.items() if golden.digest(text) != DIGESTS[name][form]]
        if golden.first_words(made["html"]) > FIRST_WORDS:
            found.append(f"{name}: {golden.first_words(made['html'])} words on its first screen")
    return found


def test_a_report_of_each_kind_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """python -m tests.reports.golden --write DIR, in both trees, and diff -r show a change; --update takes it."""
    assert changed([*KINDS], monkeypatch) == []


@pytest.mark.nightly
def test_every_report_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changed(sorted(PATHS.keys() - {*KINDS}), monkeypatch) == []


# The reports and pictures in docs/ are those of the run files beside them: made anew, they are the same bytes.

ROOT = Path(__file__).resolve().parents[2]
REPORTS = sorted(p.relative_to(ROOT / "docs") for p in (ROOT / "docs" / "evidence").rglob("*") if p.suffix == ".html")
PICTURES = ("class-map.png", "map.png", "speed-matmul.png", *(f"probes/{name}.png" for name in PROBES))
# Bytes of a PNG follow the version of what draws it.
_PIN = re.search(r"^matplotlib==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run(["bash", "scripts/reports.sh", str(folder)], cwd=ROOT, env=environment, check=True)
    return folder


@pytest.mark.nightly
def test_a_kept_report_is_current(made: Path) -> None:
    for name in [str(p.with_suffix(s)) for p in REPORTS for s in (".html", ".md")]:
        assert (made / name).is_file(), f"no run files make {name}"
        stale = (made / name).read_bytes() != (ROOT / "docs" / name).read_bytes()
        assert not stale, f"docs/{name} is stale: bash scripts/reports.sh"
    page, brief = ((made / "evidence" / "h200" / f"report.{s}").read_text(encoding="utf-8") for s in ("html", "md"))
    assert len(page.encode()) < 1_500_000
    assert '<details class="part"' in page
    assert not re.search(r'<details class="part"[^>]* open', page)
    assert len(brief) <= 20_000


@pytest.mark.nightly
@pytest.mark.parametrize("name", PICTURES)
def test_a_kept_picture_is_current(name: str, made: Path) -> None:
    if _PIN is None or version("matplotlib") != _PIN.group(1):
        pytest.skip("another matplotlib than the one of constraints.txt draws other bytes")
    here, kept = (imread(folder / name) for folder in (made, ROOT / "docs"))  # bytes follow the CPU: edges are smoothed
    assert here.shape == kept.shape, f"{name} is stale: bash scripts/reports.sh"
    assert abs(here - kept).mean() < 1e-3, f"{name} is stale: bash scripts/reports.sh"
