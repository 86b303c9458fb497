"""What the page's own script does, clicked in a headless Chromium; skipped where there is none.

With `NONDET_AXE=FOLDER/axe.min.js` (npm's axe-core: nothing is fetched here) accessibility is checked as well.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
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


def browse(page: str, script: str, *, width: int = 1400, dark: bool = False, at: str = "") -> Any:
    """Open a page, run a script in it after the page's own, and return what the script returns."""
    code = (
        f"(async () => {{ {script} }})().catch(String).then((said) => {{"
        "const pre = document.body.appendChild(document.createElement('pre'));"
        "pre.id = 'said'; pre.textContent = encodeURIComponent(JSON.stringify(said)); })"
    )
    # the page's policy holds for everything else
    own = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    page = page.replace("script-src '", f"script-src 'sha256-{own}' '", 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        path.write_text(page.replace("</body>", f"<script>{code}</script></body>"), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
        options += [f"--window-size={width},900", f"--blink-settings=preferredColorScheme={int(not dark)}"]
        command = [CHROMIUM, *options, path.as_uri() + at]
        for _ in range(3):  # the browser's own time may end before a picture is encoded, on a busy machine
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
            said = re.search(r'<pre id="said">([^<]*)</pre>', done.stdout)
            if said is not None:
                break
    assert said is not None, done.stdout[-2000:]
    return json.loads(unquote(said[1]))


@functools.cache
def page() -> str:
    """Two operators, a map of a product and a sample: tables, filters, commands, maps, the picture of answers."""
    clean = [
        row([0, 0, 0], operator="softmax", probe="softmax", case="a softmax", impl=i) for i in ("stock", "invariant")
    ]
    lines = [
        row([0] * m + [1] * (8 - m), case=f"map of M x N, K=8 N={n}", shape={"M": 8, "N": n, "K": 8},
            operator="matmul", extra={"map": {"axis": "N", "unequal": []}})
        for n, m in ((1024, 2), (12288, 5))
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return render([run_of(*h200_sweep(), *clean, *lines), sampled(Path(folder))])


# Each part is a function of its own, run one after the other in one window; what it returns is under its name.
WIDE = {
    "search": """
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
    "copy": """
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
    "filter": """
        const operator = document.querySelector("[data-filter=operator]");
        operator.value = "softmax";
        operator.dispatchEvent(new Event("change"));
        const figures = [...document.querySelectorAll("main figure[data-operator]")];
        const left = figures.filter((f) => !f.hidden).map((f) => f.dataset.operator), all = figures.length;
        operator.value = "";
        operator.dispatchEvent(new Event("change"));
        for (const fold of document.querySelectorAll("details")) fold.open = true;
        const map = document.querySelector("main .part figure:not(:has(.lines)) .map");
        const readout = map.closest("figure, .tab").querySelector(".readout"), read = [];
        const key = () => map.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        // sent, not called for: a window that nobody looks at gives no focus
        map.dispatchEvent(new FocusEvent("focus")); read.push(readout.textContent);
        key(); read.push(readout.textContent);
        return { left, all, read, reached: map.tabIndex };
    """,
    "saved": """
        const saved = {}, blobs = new Map(), real = URL.createObjectURL;
        URL.createObjectURL = (blob) => { const url = real(blob); blobs.set(url, blob); return url; };
        HTMLAnchorElement.prototype.click = function () { saved[this.download] = blobs.get(this.href); };
        for (const button of document.querySelectorAll("#fig-answer button.save")) button.click();
        for (let i = 0; i < 200 && !saved["nondet.png"]; i++) await new Promise((done) => setTimeout(done, 20));
        const png = [...new Uint8Array(await saved["nondet.png"].slice(0, 24).arrayBuffer())];
        const card = document.querySelector("svg.post"), box = card.viewBox.baseVal;
        const svg = await saved["fig-answer.svg"].text();
        return { png, svg, size: [box.width, box.height], seen: card.checkVisibility() };
    """,
}
NARROW = {
    "phone": """
        const open = document.querySelectorAll("details.part[open]").length;
        const wide = document.documentElement.scrollWidth > innerWidth;
        const picture = document.querySelector("#fig-answer").checkVisibility();
        const words = document.querySelector("#fig-answer .picture text").getBoundingClientRect().height;
        location.hash = document.querySelector("details.part").id;
        await new Promise((done) => setTimeout(done, 50));
        const buttons = document.querySelectorAll(".next button").length > 0;
        return { open, wide, picture, words, buttons, opened: document.querySelector("details.part").open };
    """,
    "map": """
        for (const fold of document.querySelectorAll("details")) fold.open = true;
        const figure = document.querySelector("main .part .lines").closest("figure");
        const map = figure.querySelector(".map"), readout = figure.querySelector(".readout"), read = [];
        const key = () => map.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        map.dispatchEvent(new FocusEvent("focus")); read.push(readout.textContent);
        for (let i = 0; i < 3; i++) { key(); read.push(readout.textContent); }
        const heights = [...figure.querySelectorAll(".lane")].map((e) => e.getBoundingClientRect().height);
        return { read, heights, wide: document.documentElement.scrollWidth, operator: figure.dataset.operator };
    """,
}


@functools.cache
def said(narrow: bool = False) -> dict[str, Any]:
    """What each part returned; the narrow page is opened at report.html#%, a link that is no name."""
    parts = (
        f"said.{name} = await (async () => {{ {code} }})();" for name, code in (NARROW if narrow else WIDE).items()
    )
    script = f"const said = {{}}; {' '.join(parts)} return said;"
    found: dict[str, Any] = browse(page(), script, width=500 if narrow else 1400, at="#%" * narrow)
    assert isinstance(found, dict), found
    return found


def test_search_copy_buttons_filters_and_maps() -> None:
    search, copy, found = (said()[part] for part in ("search", "copy", "filter"))
    assert 0 < len(search["found"]) < search["before"]
    assert all("a softmax" in text.lower() for text in search["found"])
    assert search["visible"], "a row that was found stands in a closed fold"
    assert search["told"] == f"{len(search['found'])} rows match"
    assert (search["none"], search["after"], search["hidden"]) == (0, search["before"], False)
    assert copy["commands"]
    assert all(command.startswith("nondet ") for command in copy["commands"])
    assert copy["copied"] == copy["commands"]
    assert ({*copy["before"]}, {*copy["after"]}) == ({"Copy"}, {"Copied"})
    assert len(found["left"]) < found["all"]
    assert {*found["left"]} <= {"softmax"}
    assert found["read"][0].startswith("M 1-7: class A")
    assert found["read"][1] != found["read"][0]
    assert found["reached"] == 0


def test_the_picture_is_saved_as_a_card() -> None:
    saved = said()["saved"]
    assert bytes(saved["png"][:8]) == b"\x89PNG\r\n\x1a\n"
    size = [int.from_bytes(bytes(saved["png"][at : at + 4])) for at in (16, 20)]
    assert size == [round(2 * side) for side in saved["size"]]
    texts = re.findall(r"<text[^>]*>([^<]*)<", saved["svg"])
    assert texts[0] == "nondet · Completions on NVIDIA H200"
    assert [texts.index(text) for text in ("Output changes", "60 requests, 4 different answers")] == [1, 3]
    assert "60 requests, 1 answer" in texts
    assert [text for text in texts if text in ("operator", "cure", "cost")] == ["operator", "cure", "cost"]
    assert "rgb(" in saved["svg"]
    assert not saved["seen"]


def test_a_phone_sees_the_answer_and_its_picture() -> None:
    phone, found = (said(narrow=True)[part] for part in ("phone", "map"))
    assert phone.pop("words") >= 10
    assert phone == {"open": 0, "wide": False, "picture": True, "buttons": True, "opened": True}
    assert [text.partition(",")[0] for text in found["read"]] == ["N 1024", "N 1024", "N 12288", "N 12288"]
    assert "M 1-2: class A" in found["read"][0]
    assert "M 6-8: class B" in found["read"][3]
    assert found["heights"][0] == found["heights"][1]
    assert found["wide"] <= 500
    assert found["operator"] == "matmul"


@pytest.mark.skipif(not AXE, reason="NONDET_AXE names no axe.min.js (npm install axe-core)")
@pytest.mark.parametrize("name", KEPT)
def test_axe_finds_nothing(name: str) -> None:
    (path,) = [p for p in (ROOT / "docs/evidence").glob(f"cpu*/{name}.jsonl*") if ".traces." not in p.name][:1]
    script = Path(AXE).read_text(encoding="utf-8") + (
        "; document.querySelectorAll('details').forEach((fold) => { fold.open = true; });"
        "return (await axe.run(document)).violations.map((v) => [v.id, ...v.nodes.map((n) => n.target.join(' '))]);"
    )
    made = render([read_run(path)])
    for width in (1400, 500):
        for dark in (False, True):
            assert browse(made, script, width=width, dark=dark) == [], (width, dark)
