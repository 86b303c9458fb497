"""What the page's own script does, clicked in a headless Chromium; skipped where there is none.

With `NONDET_AXE=FOLDER/axe.min.js` (npm's axe-core: nothing is fetched here) accessibility is checked as well.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from nondet.core.runfile import read_run
from nondet.reports.html import render
from tests.build import h200_sweep, row, run_of, sampled

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
AXE = os.environ.get("NONDET_AXE", "")
KEPT = ("sample", "probe-logits", "diagnose", "trace", "axes", "embed", "engine-avx512", "ci")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium is on the path (Debian: apt-get install chromium)"),
]

Browse = Callable[..., Any]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Opens a page, runs a script in it after the page's own, and returns what the script returns."""

    def ran(page: str, script: str, *, width: int = 1400, dark: bool = False, at: str = "") -> Any:
        code = (
            f"(async () => {{ {script} }})().catch(String).then((said) => {{"
            "const pre = document.body.appendChild(document.createElement('pre'));"
            "pre.id = 'said'; pre.textContent = encodeURIComponent(JSON.stringify(said)); })"
        )
        # the page's policy holds for everything else
        own = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        page = page.replace("script-src '", f"script-src 'sha256-{own}' '", 1)
        path = tmp_path / "page.html"
        path.write_text(page.replace("</body>", f"<script>{code}</script></body>"), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
        options += [f"--window-size={width},900", f"--blink-settings=preferredColorScheme={int(not dark)}"]
        command = [CHROMIUM, *options, path.as_uri() + at]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        said = re.search(r'<pre id="said">([^<]*)</pre>', done.stdout)
        assert said is not None, done.stdout[-2000:]
        return json.loads(unquote(said[1]))

    return ran


@pytest.fixture
def page(tmp_path: Path) -> str:
    """Two operators and a sample: tables, filters, commands, maps."""
    clean = [
        row([0, 0, 0], operator="softmax", probe="softmax", case="a softmax", impl=i) for i in ("stock", "invariant")
    ]
    return render([run_of(*h200_sweep(), *clean), sampled(tmp_path)])


def test_the_search_hides_rows_and_opens_folds(browse: Browse, page: str) -> None:
    """Rows without the text go, folds with one open, the count is said; an emptied box brings all rows back."""
    said = browse(
        page,
        """
        const field = document.querySelector("[data-find]"), rows = [...document.querySelectorAll("main tbody tr")];
        const type = (text) => { field.value = text; field.dispatchEvent(new Event("input")); };
        const shown = () => rows.filter((r) => !r.hidden);
        const before = shown().length;
        type("A SOFTMAX");
        const found = shown().map((r) => r.textContent), told = document.querySelector("[data-found]").textContent;
        const visible = shown().every((r) => r.checkVisibility());
        type("nothing has this text");
        const none = shown().length;
        type("");
        return { before, found, told, visible, none, after: shown().length, hidden: field.closest("p").hidden };
        """,
    )
    assert 0 < len(said["found"]) < said["before"]
    assert all("a softmax" in text.lower() for text in said["found"])
    assert said["visible"], "a row that was found stands in a closed fold"
    assert said["told"] == f"{len(said['found'])} rows match"
    assert (said["none"], said["after"], said["hidden"]) == (0, said["before"], False)


def test_copy_buttons_copy_their_command(browse: Browse, page: str) -> None:
    """Each command has one; a click hands over that command, says so, and names it to a screen reader."""
    said = browse(
        page,
        """
        const copied = [];
        Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => { copied.push(text); } } });
        const commands = [...document.querySelectorAll(".next code, .tells code")];
        const buttons = commands.map((code) => code.nextElementSibling);
        const before = buttons.map((b) => b.textContent);
        for (const button of buttons) button.click();
        await new Promise((done) => setTimeout(done, 10));
        const after = buttons.map((b) => b.textContent);
        return { copied, before, after, commands: commands.map((c) => c.textContent) };
        """,
    )
    assert said["commands"]
    assert all(command.startswith("nondet ") for command in said["commands"])
    assert said["copied"] == said["commands"]
    assert {*said["before"]} == {"Copy"}
    assert {*said["after"]} == {"Copied"}


def test_filters_maps_and_files(browse: Browse, page: str) -> None:
    """The filter leaves one operator's figures; arrow keys read a map; data and figures are saved whole."""
    said = browse(
        page,
        """
        const saved = {}, names = new Map();
        URL.createObjectURL = (blob) => { const url = `blob:${names.size}`; names.set(url, blob); return url; };
        HTMLAnchorElement.prototype.click = function () { saved[this.download] = names.get(this.href); };
        const operator = document.querySelector("[data-filter=operator]");
        operator.value = "softmax";
        operator.dispatchEvent(new Event("change"));
        const figures = [...document.querySelectorAll("main figure[data-operator]")];
        const left = figures.filter((f) => !f.hidden).map((f) => f.dataset.operator), all = figures.length;
        operator.value = "";
        operator.dispatchEvent(new Event("change"));
        for (const fold of document.querySelectorAll("details")) fold.open = true;
        const map = document.querySelector("main .part .map");
        const readout = map.closest("figure, .tab").querySelector(".readout");
        const key = () => map.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        const read = [];
        // sent, not called for: a window that nobody looks at gives no focus
        map.dispatchEvent(new FocusEvent("focus")); read.push(readout.textContent);
        key(); read.push(readout.textContent);
        document.querySelector("[data-save-data]").click();
        document.querySelector("button.save").click();
        const texts = {};
        for (const [name, blob] of Object.entries(saved)) texts[name] = await blob.text();
        return { left, all, read, texts, reached: map.tabIndex };
        """,
    )
    assert len(said["left"]) < said["all"]
    assert {*said["left"]} <= {"softmax"}
    assert said["read"][0].startswith("M 1-7: class A")
    assert said["read"][1] != said["read"][0]
    assert said["reached"] == 0
    data, (figure,) = said["texts"].pop("nondet-report.json"), said["texts"].values()
    assert [run["name"] for run in json.loads(data)] == ["probe.jsonl", "sample.jsonl"]
    assert figure.startswith("<svg ")
    assert "token" in figure


def test_a_phone_sees_the_answer_and_its_picture(browse: Browse, page: str) -> None:
    """Evidence is folded there, nothing is wider than the screen, and a link into a fold opens it."""
    said = browse(
        page,
        """
        const open = document.querySelectorAll("details.part[open]").length;
        const wide = document.documentElement.scrollWidth > innerWidth;
        const picture = document.querySelector("#fig-answer").checkVisibility();
        location.hash = document.querySelector("details.part").id;
        await new Promise((done) => setTimeout(done, 50));
        return { open, wide, picture, opened: document.querySelector("details.part").open };
        """,
        width=500,
    )
    assert said == {"open": 0, "wide": False, "picture": True, "opened": True}


@pytest.mark.skipif(not AXE, reason="NONDET_AXE names no axe.min.js (npm install axe-core)")
@pytest.mark.parametrize("name", KEPT)
def test_axe_finds_nothing(browse: Browse, name: str) -> None:
    """On each kind of page, with all folds open, wide and narrow, in light and dark."""
    (path,) = [p for p in (ROOT / "docs/evidence").glob(f"cpu*/{name}.jsonl*") if ".traces." not in p.name][:1]
    script = Path(AXE).read_text(encoding="utf-8") + (
        "; document.querySelectorAll('details').forEach((fold) => { fold.open = true; });"
        "return (await axe.run(document)).violations.map((v) => [v.id, ...v.nodes.map((n) => n.target.join(' '))]);"
    )
    made = render([read_run(path)])
    for width in (1400, 500):
        for dark in (False, True):
            assert browse(made, script, width=width, dark=dark) == [], (width, dark)


def test_a_map_of_a_product_is_told_by_size_and_fits_a_narrow_page(browse: Browse) -> None:
    """Each cell says its line, its M and its class; a size of 5 digits stands on one line of a narrow page."""
    lines = [
        row([0] * m + [1] * (8 - m), case=f"map of M x N, K=8 N={n}", shape={"M": 8, "N": n, "K": 8},
            extra={"map": {"axis": "N", "unequal": []}})
        for n, m in ((1024, 2), (12288, 5))
    ]  # fmt: skip
    said = browse(
        render([run_of(*lines)]),
        """
        for (const fold of document.querySelectorAll("details")) fold.open = true;
        const figure = document.querySelector("main .part .lines").closest("figure");
        const map = figure.querySelector(".map"), readout = figure.querySelector(".readout"), read = [];
        const key = () => map.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        map.dispatchEvent(new FocusEvent("focus")); read.push(readout.textContent);
        for (let i = 0; i < 3; i++) { key(); read.push(readout.textContent); }
        const heights = [...figure.querySelectorAll(".lane")].map((e) => e.getBoundingClientRect().height);
        return { read, heights, wide: document.documentElement.scrollWidth, operator: figure.dataset.operator };
        """,
        width=500,
    )
    assert [text.partition(",")[0] for text in said["read"]] == ["N 1024", "N 1024", "N 12288", "N 12288"]
    assert "M 1-2: class A" in said["read"][0]
    assert "M 6-8: class B" in said["read"][3]
    assert said["heights"][0] == said["heights"][1]
    assert said["wide"] <= 500
    assert said["operator"] == "linear"


def test_a_link_that_is_no_name_stops_nothing(browse: Browse, page: str) -> None:
    """report.html#%: the rest of the script runs all the same, and a link into a fold still opens it."""
    said = browse(
        page,
        """
        const fold = document.querySelector("details.part");
        fold.open = false;
        location.hash = "#" + fold.id;
        await new Promise((done) => setTimeout(done, 50));
        return { open: fold.open, buttons: document.querySelectorAll(".next button").length };
        """,
        at="#%",
    )
    assert said["open"]
    assert said["buttons"]
