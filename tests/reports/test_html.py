"""The HTML page: everything is on it, nothing acts, nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

from nondet.core.records import Difference, Status
from nondet.reports import html, markdown
from nondet.reports.html import render
from tests.build import cell, failed, h200_sweep, limits, row, run_of, sampled, timed
from tests.reports.test_terminal import flat, hostile_runs, printed

NOT_FINITE = Difference(mismatched=1, compared=1, max_abs=0.0, max_ulp=0, nonfinite=1)
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Reads a page as a browser would: tags, attributes, visible text, scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.style = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts[-1] += data
        elif "style" in self.open:
            self.style += data
        else:
            self.text += data


def check(text: str) -> Page:
    """What holds for every page: balanced, our script, no handler, no style attribute, nothing to fetch."""
    page = Page(text)
    assert page.open == []
    (script,) = page.scripts
    assert script == (Path(html.__file__).parent / "templates" / "page.js").read_text(encoding="utf-8")
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = {value[1:] for tag, name, value in page.attributes if tag == "a" and name == "href"}
    assert links <= set(ids), links - set(ids)
    assert not set(page.tags) & {"img", "iframe", "link", "object", "embed", "form", "base", "b"}
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("style", "src", "srcset", "action", "xlink:href")
        assert name != "href" or value.startswith("#"), (tag, value)
        assert "var(" not in value
    assert "url(" not in page.style
    assert "@import" not in page.style
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", text)
    return page


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path) -> None:
    page = check(render(hostile_runs(tmp_path)))
    scripts = "<script>alert(1)</script>", "<img src=x onerror=alert(1)>"
    for text in (*scripts, "{{ 7 * 7 }}", "␛[31mred␛[0m", "\ufffdgnp.exe"):
        assert text in page.text


def test_the_policy_allows_what_is_ours_and_nothing_else() -> None:
    text = render([run_of(row())])
    page = Page(text)
    (policy,) = [v for tag, name, v in page.attributes if tag == "meta" and name == "content" and "default-src" in v]
    style, script = (
        base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (page.style, page.scripts[0])
    )
    allowed = f"style-src 'sha256-{style}'; script-src 'sha256-{script}'; img-src blob:"
    assert policy == f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    assert text.index("Content-Security-Policy") < text.index("<style>")


def test_odd_runs_make_a_report_in_every_format() -> None:
    nothing = timed("stock", 0.0, status=Status.SKIPPED, samples_us=[], reason="no kernel")
    bare = {"difference": None, "error": None, "worst_error": None}
    far = Difference(mismatched=1, compared=1, max_abs=1e300, max_ulp=2**62)
    sizes = (1, 2, 3, 4, 5)
    for run, *said in [
        (run_of(), "nothing was measured."),
        (run_of(complete=False), "incomplete run, so far: nothing was measured."),
        (run_of(failed(), failed("skipped", "no kernel", impl="invariant")), "nothing was compared in 1 case"),
        (run_of(failed(), failed("skipped", "no kernel")), "1 failed, 1 skipped"),
        (run_of(*[failed(case=f"c{i}") for i in range(20)]), "matmul: c19"),
        (run_of(row([0] * 5)), "no divergence observed in 5 trials of 1 case"),
        (run_of(row(list(range(60)))), "60 classes over 60 trials", "… 52 more", "… 52 more"),
        (run_of(row([0, 1] * 2048)), "2 classes over 4,096 trials", "… 4088 more", "… 4088 more"),
        (run_of(row(list(range(50)), varied="run")), "50 classes", "50 classes, the largest 1 of 50", "50 classes"),
        (run_of(row([], class_sizes=[5000, 3000, 2000], trials=10_000, distinct=3)), "3 classes"),
        (run_of(row([0, 0], **bare)), "no divergence observed"),
        (run_of(row([0, 1], difference=NOT_FINITE)), "1 not finite"),
        (run_of(row([0, 1], difference=far)), "over 10,000,000 ULP, as where an element crosses zero"),
        (run_of(row([0, 1]), complete=False), "This run did not come to its end"),
        (run_of(cells=[cell(1, timed("stock", 1.0), limit_us=None)]), "No limit was measured"),
        (run_of(cells=[cell(1, timed("stock", 1.0))], complete=False), "1 cell timed, with nothing beside stock"),
        (run_of(limits=limits()), "nothing was measured"),
        (run_of(cells=[cell(m, timed("mine:f", 1.0)) for m in sizes], limits=limits()), "mine:f"),
        (run_of(cells=[cell(m, nothing) for m in sizes], limits=limits()), "Nothing was timed."),
        (run_of(cells=[cell(m, timed("stock", 1.0), timed("invariant", 0.0)) for m in sizes]), "invariant"),
        (run_of(cells=[cell(m, timed("stock", 0.0), timed("invariant", 1.0), cold=False) for m in sizes]), "invariant"),
        (run_of(cells=[cell(m) for m in sizes]), "Nothing was timed."),
    ]:
        page, text = check(render([run])).text, unescape(markdown.render([run]))
        for i, report in enumerate((page, text, flat(printed(run, width=120)))):
            assert said[i % len(said)] in report, said


def test_text_can_be_read() -> None:
    """WCAG: 4.5 for text on what it stands on, 3 for the colours of a map on its ground, in light and dark."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one: str, two: str) -> float:
        low, high = sorted((luminance(colours[one]), luminance(colours[two])))
        return (high + 0.05) / (low + 0.05)

    grounds = {"ink": "bg panel faint mark bad-bg", "soft": "bg panel faint", "good": "bg panel good-bg"}
    grounds |= {"bad": "bg panel bad-bg", "dull": "dull-bg"}
    drawn = ["stock", "invariant", *(f"c{i}" for i in range(8))]
    least = {(text, ground): 4.5 for text, of in grounds.items() for ground in of.split()}
    least |= {(name, "faint"): 3.0 for name in ("third", "fourth", *drawn)}
    least |= {("bg", name): 4.5 for name in drawn}  # the letter on its key
    style = (Path(html.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
    for theme in style.split(":root {")[1:3]:
        colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", theme))
        assert [pair for pair, wanted in least.items() if contrast(*pair) < wanted] == []


def test_backticks_become_code_and_nothing_else() -> None:
    page = html._environment().from_string('{% import "figures.html.j2" as draw with context %}{{ draw.inline(text) }}')
    for text, shown in (
        ("a `b` c", "a <code>b</code> c"),
        ("`<b>` & `c`", "<code>&lt;b&gt;</code> &amp; <code>c</code>"),
        ("<i> ` alone", "&lt;i&gt; ` alone"),
        ("K3 7.3e-05<br>", 'K3 <span class="whole">7.3e-05</span>&lt;br&gt;'),
    ):
        assert page.render(text=text, screen=None) == shown


def test_several_runs_make_one_page(tmp_path: Path) -> None:
    run, other = sampled(tmp_path), sampled(tmp_path, n=30, name="other.jsonl", impls=("stock", "invariant:attention"))
    run.header.plan["model"], other.header.plan["model"] = {"name": "m"}, {"name": "another"}
    text = render([run_of(*h200_sweep()), other, run])
    page = check(text)
    assert page.tags.count("h1") == 1
    assert page.tags.count("h2") == 3  # the runs
    assert ("a", "href", "#sample-2-1") in page.attributes, "the contents lead to a part"
    first, *parts = re.split(r'<section class="run"', text)
    assert '<span class="answer">sample.jsonl: stock: 4 distinct completions of 60' in first
    assert "<dd>stock diverges at token 5: of 60 completions" in first
    assert "<dd>probe.jsonl: stock: batch-dependent in 1 of 1 case" in first
    assert "<dd>tested in isolation, stock diverges in linear" in first, "not what the other model showed"
    pictures = [re.findall(r'class="picture" .*?"Stock kernels: (\d+) requests', part) for part in (first, *parts)]
    assert pictures == [["60"], [], ["30"], []]
    heads = [re.findall(r'<p class="headline">.*? of (\d+)', part) for part in (first, *parts)]
    assert heads == [[], ["1"], ["30"], ["60"]]
