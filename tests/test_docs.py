"""The documentation keeps up: help pages are the program's, links lead somewhere, commands in the text can be typed."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from nondet.cli import application, main
from nondet.core.registry import PROBES
from nondet.core.runfile import read_run
from nondet.reports.probes import probes_of
from nondet.verdict.findings import sort_impls
from scripts import docs_hooks, house, pages
from tests.words import MOST_NAMES_OUT, OUT_OF_NAMES, names_out, prose, remarks, strings, words_out

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(p for p in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")] if p.name not in ("report.md", "speed.md"))
COMMANDS = typer.main.get_command(application()).commands  # type: ignore[attr-defined] # a group, as there are several commands
_LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
# what a probe's page quotes
_RUN = re.compile(r"\(\[run\]\(\.\./evidence/([\w/-]+)\.jsonl\.gz\)\):")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def test_the_help_in_the_docs_is_the_program_s() -> None:
    text = pages.commands_page()
    assert text == (DOCS / "commands.md").read_text(encoding="utf-8"), "stale: python scripts/pages.py"
    sections = re.split(r"^## nondet ", text, flags=re.MULTILINE)[1:]
    assert [section.split("\n")[0] for section in sections] == list(COMMANDS)
    for section, (name, command) in zip(sections, COMMANDS.items(), strict=True):
        rows = re.findall(r"^\| `.+` \| .+ \|(?: .+ \|| \|)$", section, re.MULTILINE)
        assert len(rows) == len(command.params)
        for option in (opt for param in command.params for opt in param.opts if opt.startswith("--")):
            assert any(option in row.replace("[no-]", "").split("` |")[0] for row in rows)
        assert re.search(rf"^nondet {name} (?!\[|RUN|BEFORE)", section, re.MULTILINE)


@pytest.mark.nightly
def test_the_machines_in_the_docs_are_those_of_the_evidence() -> None:
    text = pages.machines_page()
    assert text == (DOCS / "gpus.md").read_text(encoding="utf-8"), "stale: python scripts/pages.py"
    assert "| 1 x NVIDIA H200 |" in text
    assert re.findall(r"^\| (?!\d+ x )(.* x .*?) \|", text, re.MULTILINE) == []  # how many of them is a number


@functools.cache
def _anchors(page: Path) -> set[str]:
    """What GitHub and mkdocs make of the headings."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def test_links_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        for target in (a or b for a, b in _LINK.findall(text)):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            to = (page.parent / path) if path else page
            if not to.exists() or (anchor and to.suffix == ".md" and anchor not in _anchors(to)):
                dead.append(f"{page}: {target}")
    assert dead == []
    # and each file that the map sends a reader to exists
    files = set(re.findall(r"`([\w/]+/\w+\.(?:py|sh))`", (DOCS / "architecture.md").read_text(encoding="utf-8")))
    assert len(files) > 20
    assert {name for name in files if not (ROOT / name).is_file()} == set()


def test_every_page_is_in_the_site_s_navigation() -> None:
    tags = yaml.BaseLoader
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), tags)["nav"]  # noqa: S506 - strings alone
    listed = set(re.findall(r"[\w/-]+\.md", json.dumps(nav)))
    pages = {str(p.relative_to(DOCS)) for p in PAGES if p.is_relative_to(DOCS) and "evidence" not in p.parts}
    assert pages <= listed
    assert all((DOCS / name).exists() for name in listed - {"notebook.md"})  # made of notebook.ipynb by a hook


def test_commands_in_the_text_can_be_typed() -> None:
    wrong: list[str] = []
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "CHANGELOG.md")
    lines = re.findall(r"`(nondet [^`]+)`", text) + re.findall(r"^ *(?:\$ )?(nondet [a-z].*)$", text, re.MULTILINE)
    for line in lines:
        try:
            words = shlex.split(line.partition("  #")[0], comments=True)
        except ValueError:
            words = line.split()
        name = words[1]
        if words[1:3] in (["bench", "engine"], ["bench", "host"]):
            continue  # how kept runs were made: the program answers with the new command
        if not re.fullmatch(r"[a-z]+", name) or name not in COMMANDS:
            if re.match(r"nondet [a-z]+ (-|[A-Z])", line):
                wrong.append(line)
            continue
        known = {option for p in COMMANDS[name].params for option in p.opts} | {"--help"}
        wrong += [line for word in words[2:] if word.startswith("--") and word.partition("=")[0] not in known]
    assert wrong == []


@pytest.fixture(scope="module")
def probed() -> dict[str, list[tuple[str, str, str]]]:
    """Probe -> what its evidence comes to: [("stock", "19", "43"), ...]."""
    runs = sorted({run for page in DOCS.glob("probes/*.md") for run in _RUN.findall(page.read_text(encoding="utf-8"))})
    counts: dict[str, list[tuple[str, str, str]]] = {}
    for run in runs:
        for section in probes_of(read_run(DOCS / "evidence" / f"{run}.jsonl.gz").rows):
            rows = [row for case in section.cases for row in case.measured]
            impls = sort_impls(row.impl for row in rows)
            parted = {impl: [row.differs for row in rows if row.impl == impl] for impl in impls}
            counts[f"{section.name} in {run}"] = [(i, str(sum(p)), str(len(p))) for i, p in parted.items()]
    return counts


def test_every_probe_has_a_page(probed: dict[str, list[tuple[str, str, str]]]) -> None:
    for name in PROBES:
        page = DOCS / "probes" / f"{name}.md"
        text = (page if page.exists() else DOCS / "probes" / "rows.md").read_text(encoding="utf-8")
        for part in ("## The question", "## How to read it", "## What to do"):
            assert part in text, name
        text = re.split(rf"^##? {name}$", text, flags=re.MULTILINE)[1]
        for part in (f"nondet probe {name}", f"]({name}.png)"):
            assert part in text, name
        run = _RUN.search(text)
        assert run is not None, name
        counts = probed[f"{name} in {run.group(1)}"]
        assert counts
        said = re.findall(r"([\w-]+) \w+ in (\d+) of (\d+) cases", " ".join(text[run.end() :].split()))
        assert said[: len(counts)] == counts, name


@pytest.mark.nightly
def test_the_site_builds(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        assert not os.environ.get("CI"), "mkdocs is in the dev extra"
        pytest.skip("mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    page = (tmp_path / "python" / "index.html").read_text(encoding="utf-8")
    for name in ("nondet.api.check", "nondet.api.load"):
        assert f'id="{name}"' in page
    notebook = (tmp_path / "notebook" / "index.html").read_text(encoding="utf-8")
    assert "data:image/png" in notebook
    assert "<table>" in notebook  # pandas' own class would keep the theme's style, and its scrolling, away
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css)"', page)  # nothing is fetched from elsewhere


def test_readme_and_docs_are_no_longer_than_a_reader_takes() -> None:
    """Of the docs all words by hand count; what scripts make does not."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text) <= 6_500
    for command in ("    bash scripts/quickstart.sh", "    bash scripts/test.sh"):
        assert text.splitlines().count(command) == 1
    by_hand = [p for p in [*DOCS.glob("*.md"), *DOCS.glob("probes/*.md")] if p.name not in ("commands.md", "gpus.md")]
    made = re.compile(f"^{GENERATED}|^{pages.RUN_HEADING}", re.MULTILINE)
    words = sum(len(made.split(p.read_text(encoding="utf-8"))[0].split()) for p in by_hand)
    assert words <= 22_000


def test_the_readme_s_picture_is_that_of_its_run(tmp_path: Path) -> None:
    if f"matplotlib=={version('matplotlib')}" not in (ROOT / "constraints.txt").read_text(encoding="utf-8"):
        pytest.skip("another matplotlib than the one of constraints.txt draws other bytes")
    made = tmp_path / "tree.svg"
    assert main(["report", str(DOCS / "evidence/h200/sample.jsonl.gz"), "--figure", "tree", "--out", str(made)]) == 0
    light, dark = ((DOCS / f"tree-{name}.svg").read_text(encoding="utf-8") for name in ("light", "dark"))
    assert made.read_text(encoding="utf-8") == light, "stale: bash scripts/reports.sh"
    assert re.sub(r"#\w{6}", "", dark) == re.sub(r"#\w{6}", "", light)


def test_the_readme_s_example_is_what_its_run_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (run,) = re.findall(r"\[run\]\((docs/evidence/\S+/diagnose\.jsonl\.gz)\)", text)
    assert main(["report", str(ROOT / run)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    parts = [part.strip(" ,") for line in example.splitlines() for part in line.split("...")]
    assert len(example.splitlines()) == 4
    assert [part for part in parts if part not in printed] == []


def test_the_engines_in_the_guide_are_those_of_the_evidence_and_the_plugins() -> None:
    text = pages.engines_page()
    assert text == (DOCS / "engines.md").read_text(encoding="utf-8"), "stale: python scripts/pages.py"
    assert "| vLLM | 0.26.0 | 1, 2, 4 x NVIDIA H200 | not run | yes |" in text
    assert "| SGLang | 0.5.17 | 1 x NVIDIA H200 | not run | yes |" in text


NOTEBOOK = DOCS / "notebook.ipynb"


def _text(cell: Any) -> str:
    """Everything that a cell printed or showed."""
    parts = [output.get("text", "") for output in cell.get("outputs", [])]
    parts += ["".join(output.get("data", {}).values()) for output in cell.get("outputs", []) if "data" in output]
    return " ".join(parts)


@pytest.mark.nightly
def test_the_notebook_runs() -> None:
    # of the dev extra, which a borrowed GPU machine may lack
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    where = {"metadata": {"path": str(DOCS)}}
    executed = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    text = " ".join(_text(cell) for cell in executed.cells if cell.cell_type == "code")
    assert "mine: rounding: " in text
    assert "Write it as linear(x, weight, bias=None)" in text
    assert "invariant: 1 distinct completion of 10" in text
    assert "stock: 6 distinct completions of 1,000" in text
    assert any("image/png" in output.get("data", {}) for cell in executed.cells for output in cell.get("outputs", []))
    kept = nbformat.read(NOTEBOOK, as_version=4)
    assert [bool(_text(cell)) for cell in kept.cells] == [bool(_text(cell)) for cell in executed.cells]


def test_the_kept_notebook_is_executed_and_small() -> None:
    page = docs_hooks.markdown_of(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    assert page.count("<div") == page.count("</div>") > 0
    assert page.count("<table") == page.count("</table>") > 1
    assert "<style" not in page  # which pandas brings inside of its <div>
    nbformat = pytest.importorskip("nbformat")
    kept = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(kept)
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert len(NOTEBOOK.read_bytes()) < 100_000
    assert "Traceback" not in " ".join(_text(cell) for cell in code)


# Plain words: what users read is in the field's English, and words that are out stay out.

# What follows this line of docs/classes.md is printed from the declarations of the kernels, and changes with them.
GENERATED = "## The classes\n"


def test_the_pages_are_in_plain_words() -> None:
    for page in [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("probes/*.md")]:
        found = words_out(prose(page.read_text(encoding="utf-8").partition(GENERATED)[0]))
        # a value of `nondet diff --fail-on`
        assert [use for use in found if page.name != "commands.md" or not use.startswith("'moved'")] == [], page
    for template in (ROOT / "reports" / "templates").glob("*.j2"):
        text = re.sub(r"\{[{%#].*?[}%#]\}|<[^>]*>", " ", template.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert words_out(text) == []
    assert words_out("; ".join(text for _, text in PROBES.values())) == []


# Product whose strings are not looked at: digests of its code name GPU certificates, which a changed string would void.
CERTIFIED = ("nondet/certify/", *(f"nondet/core/{m}.py" for m in ("certificates", "compare", "inputs", "proof")))
MODULES = [
    name
    for folder in ("nondet", "probes", "reports")  # kernels/ is left out for the same reason
    for name in sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py"))
    if not name.startswith((*CERTIFIED, "nondet/kernels/", "nondet/probes/", "nondet/reports/"))
]
# How strings begin whose words stay: what is recorded, and matched when runs are resumed or compared (names of cases,
# arms, axes, anchors and values); three are a value of --fail-on; the last are patterns of what reports put plainly.
STAYS = (
    *("attention {}: the last query, in company", "in company", "ragged company", "each row alone", "alone, {} keys"),
    *("alone, padded to {}", "{} texts, each alone and in batches", "one row at every place", "{} rows at every place"),
    *("Known: moved.", "nondet: --fail-on moved", '"moved": exit 3', r"\b"),
)


def test_the_product_speaks_in_plain_words() -> None:
    found, used = [], set()
    for module in MODULES:
        for line, text in strings((ROOT / module).read_text(encoding="utf-8")):
            uses = words_out(text)
            begins = {begin for begin in STAYS if uses and text.startswith(begin)}
            used |= begins
            found += [] if begins else [f"{module}:{line}: {use}" for use in uses]
    assert found == []
    assert set(STAYS) - used == set(), "kept for nothing"


@pytest.mark.slow
def test_the_code_is_in_plain_words() -> None:
    count: Counter[str] = Counter()
    for path in house.modules().values():
        source = path.read_text(encoding="utf-8")
        assert words_out(remarks(source)) == [], path
        count[house.package_of(path)] += len(list(names_out(source)))
    more = {name: number for name, number in count.items() if number > MOST_NAMES_OUT.get(name, 0)}
    assert more == {}, f"more names with words that are out: say {OUT_OF_NAMES}"


def test_words_that_are_out_are_found_and_ordinary_ones_are_not() -> None:
    for text in ("tokens and logprobs part under load", "it parts in 191 of 192 traces", "a row at its place"):
        assert words_out(text)
    text = "K in 1 to 16 parts; a part of its keys; written in place; what takes place; a standalone page; we ask again"
    assert words_out(text) == []
    assert words_out(prose("`--fail-on moved`\n\n```\nparted\n```\n\n    held against\n\n[run](alone.md)\n")) == []
    source = "def told_by(parts, asked=1):  # in\n    # company\n    self.rooms_at = TAPE = untold = SomeRoom\n"
    assert {name for _, name in names_out(source)} == {"told_by", "rooms_at", "TAPE", "asked"}
    assert len(words_out(remarks('"""Its company, of "alone"."""\n' + source))) == 2
