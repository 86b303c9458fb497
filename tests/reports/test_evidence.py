"""The reports and pictures in docs/ are those of the run files beside them: made anew, they are the same bytes."""

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

ROOT = Path(__file__).resolve().parents[2]
REPORTS = sorted(p.relative_to(ROOT / "docs") for p in (ROOT / "docs" / "evidence").rglob("*") if p.suffix == ".html")
PICTURES = ("class-map.png", "speed-matmul.png", *(f"probes/{name}.png" for name in PROBES))
# Bytes of a PNG follow the version of what draws it.
_PIN = re.search(r"^matplotlib==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, by the script that makes those in docs/."""
    folder = tmp_path_factory.mktemp("docs")
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run(["bash", "scripts/reports.sh", str(folder)], cwd=ROOT, env=environment, check=True)
    return folder


@pytest.mark.parametrize("name", [str(p.with_suffix(s)) for p in REPORTS for s in (".html", ".md")])
def test_a_kept_report_is_current(name: str, made: Path) -> None:
    """A report that says something else than its run files under the code at hand is stale."""
    assert (made / name).is_file(), f"no run files make {name}"
    stale = (made / name).read_bytes() != (ROOT / "docs" / name).read_bytes()
    assert not stale, f"docs/{name} is stale: bash scripts/reports.sh"


@pytest.mark.parametrize("name", PICTURES)
def test_a_kept_picture_is_current(name: str, made: Path) -> None:
    """So is a picture."""
    if _PIN is None or version("matplotlib") != _PIN.group(1):
        pytest.skip("another matplotlib than the one of constraints.txt draws other bytes")
    here, kept = (imread(folder / name) for folder in (made, ROOT / "docs"))  # bytes follow the CPU: edges are smoothed
    assert here.shape == kept.shape, f"{name} is stale: bash scripts/reports.sh"
    assert abs(here - kept).mean() < 1e-3, f"{name} is stale: bash scripts/reports.sh"


def test_the_combined_page_is_one_that_people_open(made: Path) -> None:
    """Below 1.5 MB, and what is folded is not open."""
    page = (made / "evidence" / "h200" / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 1_500_000
    assert '<details class="part"' in page
    assert not re.search(r'<details class="part"[^>]* open', page)
    brief = (made / "evidence" / "h200" / "report.md").read_text(encoding="utf-8")
    assert len(brief) <= 20_000
