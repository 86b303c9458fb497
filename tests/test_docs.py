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


def _pinned(*names: str) -> bool:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return all(f"{name}=={version(name)}" in pins for name in names)


def test_the_help_in_the_docs_is_the_program_s() -> None:
    """A table of every command's options, and examples: an option that is new or gone shows here."""
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
    """What was run on what follows from run files, and from nothing else."""
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
    """Files and headings alike, from the README and from each page."""
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


def test_every_page_is_in_the_site_s_navigation() -> None:
    """A page that nothing leads to is not found."""
    tags = yaml.BaseLoader
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), tags)["nav"]  # noqa: S506 - strings alone
    listed: set[str] = set()
    stack = list(nav)
    while stack:
        entry = stack.pop()
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                stack += value
            else:
                listed.add(value)
    pages = {str(p.relative_to(DOCS)) for p in PAGES if p.is_relative_to(DOCS) and "evidence" not in p.parts}
    assert pages <= listed
    assert all((DOCS / name).exists() for name in listed - {"notebook.md"})  # made of notebook.ipynb by a hook


def test_commands_in_the_text_can_be_typed() -> None:
    """`nondet COMMAND --option`: the command exists and has the option."""
    wrong: list[str] = []
    pages = [page.read_text(encoding="utf-8") for page in PAGES if page.name != "CHANGELOG.md"]
    lines = [line for text in pages for line in re.findall(r"`(nondet [^`]+)`", text)]
    lines += [line for text in pages for line in re.findall(r"^ *(?:\$ )?(nondet [a-z].*)$", text, re.MULTILINE)]
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


def _counts(text: str) -> list[tuple[str, str, str]]:
    """(implementation, differing cases, all cases) in order, whatever verb is between them."""
    return re.findall(r"([\w-]+) \w+ in (\d+) of (\d+) cases", " ".join(text.split()))


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
    """Its own, or a part of the one of operators over rows: the question, a picture, how to read it, what to do. Its
    counts are those of the run file that it links."""
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
        assert _counts(text[run.end() :])[: len(counts)] == counts, name


@pytest.mark.nightly
def test_the_site_builds(tmp_path: Path) -> None:
    """mkdocs, strictly: every page is reached, every reference to the API resolves, the notebook is a page."""
    if importlib.util.find_spec("mkdocs") is None:
        assert not os.environ.get("CI"), "mkdocs is in the dev extra"
        pytest.skip("mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "python" / "index.html").read_text(encoding="utf-8")
    for name in ("nondet.api.check", "nondet.api.load"):
        assert f'id="{name}"' in page
    notebook = (tmp_path / "notebook" / "index.html").read_text(encoding="utf-8")
    assert "data:image/png" in notebook
    assert "<table>" in notebook  # pandas' own class would keep the theme's style, and its scrolling, away
    assert len(re.findall(r"<div\b", notebook)) == notebook.count("</div>")  # one too many closes the article
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css)"', page)  # nothing is fetched from elsewhere


def test_what_the_notebook_shows_is_whole_html() -> None:
    """Pandas brings a style inside of its <div>; what is left of each output opens what it closes."""
    page = docs_hooks.markdown_of(json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8")))
    assert page.count("<div") == page.count("</div>") > 0
    assert page.count("<table") == page.count("</table>") > 1
    assert "<style" not in page


def test_the_readme_is_short() -> None:
    """One screen of what it is, and the commands that CI and newcomers type; the rest is in the docs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text) <= 6_500
    for command in ("    bash scripts/quickstart.sh", "    bash scripts/test.sh"):
        assert text.splitlines().count(command) == 1


def test_the_docs_are_no_longer_than_a_reader_takes() -> None:
    """Words of all pages by hand; what scripts make of the program, its kernels and its evidence is not counted."""
    pages = [p for p in [*DOCS.glob("*.md"), *DOCS.glob("probes/*.md")] if p.name not in ("commands.md", "gpus.md")]
    words = sum(len(p.read_text(encoding="utf-8").partition("## The classes\n")[0].split()) for p in pages)
    assert words <= 22_000


def test_the_readme_s_picture_is_that_of_its_run(tmp_path: Path) -> None:
    """The tree of branches, drawn anew: the light one is the program's own, the dark one differs in colours only."""
    if not _pinned("matplotlib"):
        pytest.skip("another matplotlib than the one of constraints.txt draws other bytes")
    made = tmp_path / "tree.svg"
    assert main(["report", str(DOCS / "evidence/h200/sample.jsonl.gz"), "--figure", "tree", "--out", str(made)]) == 0
    light, dark = ((DOCS / f"tree-{name}.svg").read_text(encoding="utf-8") for name in ("light", "dark"))
    assert made.read_text(encoding="utf-8") == light, "stale: bash scripts/reports.sh"
    assert re.sub(r"#\w{6}", "", dark) == re.sub(r"#\w{6}", "", light)


def test_the_map_names_what_is_there() -> None:
    """Each file that docs/architecture.md sends a reader to exists."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w/]+/\w+\.(?:py|sh))`", text))
    assert len(files) > 20
    assert {name for name in files if not (ROOT / name).is_file()} == set()


# The notebook in the docs runs from scratch, and what it says comes out.

NOTEBOOK = DOCS / "notebook.ipynb"


def _text(cell: Any) -> str:
    """Everything that a cell printed or showed."""
    parts = [output.get("text", "") for output in cell.get("outputs", [])]
    parts += ["".join(output.get("data", {}).values()) for output in cell.get("outputs", []) if "data" in output]
    return " ".join(parts)


@pytest.fixture(scope="module")
def executed() -> Any:
    """The notebook with outputs made now, in the folder that it lies in."""
    # of the dev extra, which a borrowed GPU machine may lack
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    places = {"metadata": {"path": str(DOCS)}}
    return nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=places).execute()


@pytest.mark.nightly
def test_the_notebook_runs(executed: Any) -> None:
    """Every cell, in order; a kernel that splits its sum by the batch is found out, and the wrong signature named."""
    shown = [_text(cell) for cell in executed.cells if cell.cell_type == "code"]
    text = " ".join(shown)
    assert "mine: batch-dependent in 1 of 1 case" in text
    assert "Write it as linear(x, weight, bias=None)" in text
    assert "invariant: 1 distinct completion of 10" in text
    assert "stock: 6 distinct completions of 1,000" in text
    assert any("image/png" in output.get("data", {}) for cell in executed.cells for output in cell.get("outputs", []))
    kept = pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)
    assert [bool(_text(cell)) for cell in kept.cells] == [bool(_text(cell)) for cell in executed.cells]


def test_the_kept_notebook_is_executed_and_small() -> None:
    """Outputs are kept for readers, of the cells that are there, without this machine's paths."""
    nbformat = pytest.importorskip("nbformat")
    kept = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(kept)
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert len(NOTEBOOK.read_bytes()) < 100_000
    assert "Traceback" not in " ".join(_text(cell) for cell in code)


# Plain words: what users read is in the field's English, and words that are out stay out.

# page -> words that it keeps, and why
KEPT = {
    "docs/commands.md": ("moved",),  # a value of `nondet diff --fail-on`
}
# What follows this line of docs/classes.md is printed from the declarations of the kernels, and changes with them.
GENERATED = "## The classes\n"
PAGES_WORDS = sorted(
    str(page.relative_to(ROOT)) for page in [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("probes/*.md")]
)


def test_the_pages_are_in_plain_words() -> None:
    """README and docs: no idiom of the project's own where the field has a word."""
    wrong = []
    for page in PAGES_WORDS:
        text = (ROOT / page).read_text(encoding="utf-8")
        kept = tuple(f"'{word}'" for word in KEPT.get(page, ()))
        found = words_out(prose(text.partition(GENERATED)[0]))
        wrong += [f"{page}: {use}" for use in found if not use.startswith(kept)]
        assert all(any(use.startswith(word) for use in found) for word in kept), f"{page}: kept for nothing"
    assert wrong == []


# Product whose strings are not looked at: digests of its code name GPU certificates, which a changed string would void.
CERTIFIED = ("nondet/certify/", *(f"nondet/core/{m}.py" for m in ("certificates", "compare", "inputs", "proof")))
MODULES = [
    name
    for folder in ("nondet", "probes", "reports")  # kernels/ is left out for the same reason
    for name in sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py"))
    if not name.startswith((*CERTIFIED, "nondet/kernels/", "nondet/probes/", "nondet/reports/"))
]
TEMPLATES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "reports" / "templates").glob("*.j2"))
# module -> (a string's beginning, why its word stays): what is recorded, and matched when runs are resumed or compared
_CASE, _ARM = "the name of a case in the records", "the name of an arm in the records"
STAYS: dict[str, tuple[tuple[str, str], ...]] = {
    "nondet/bench/collect.py": (("attention {}: the last query, in company", _CASE),),
    "nondet/commands/report.py": (
        ("Known: moved.", "a value of --fail-on"),
        ("nondet: --fail-on moved", "the same"),
        ('"moved": exit 3', "the same"),
    ),
    "nondet/core/operator.py": (("each row alone", "an anchor's name in the records of certify"),),
    "nondet/diagnose/steps.py": (
        ("ragged company", "the name of an axis in the records: axis_title shows it"),
        ("in company", _ARM),
    ),
    "nondet/diagnose/verdict.py": (("ragged company", "the name of an axis in the records: axis_title shows it"),),
    "nondet/embed.py": (("alone, padded to {}", _ARM), ("{} texts, each alone and in batches", _CASE)),
    "nondet/services/trace.py": (("in company", _ARM),),
    "nondet/trace/search.py": (("in company", _ARM),),
    "probes/attention.py": (("alone, {} keys", "the name of a value in the records"),),
    "probes/grouped_matmul.py": (("one row at every place", _CASE),),
    "probes/matmul.py": (("{} rows at every place", _CASE),),
    "probes/rows.py": (("{} rows at every place", _CASE),),
    "reports/traces.py": (("in company", _ARM),),
}


def test_the_product_speaks_in_plain_words() -> None:
    """Each string of the product that has a space in it: a sentence, a clause of one, or a name that a user sees."""
    found, unused = [], []
    for module in MODULES:
        kept = [begin for begin, _ in STAYS.get(module, ())]
        used = set()
        for line, text in strings((ROOT / module).read_text(encoding="utf-8")):
            uses = words_out(text)
            begins = {begin for begin in kept if uses and text.startswith(begin)}
            used |= begins
            found += [] if begins else [f"{module}:{line}: {use}" for use in uses]
        unused += [f"{module}: {begin}" for begin in kept if begin not in used]
    assert found == []
    assert unused == [], "kept for nothing"


def test_what_else_is_shown_is_in_plain_words() -> None:
    """Templates, and what probes test."""
    for template in TEMPLATES:
        text = re.sub(r"\{[{%#].*?[}%#]\}|<[^>]*>", " ", (ROOT / template).read_text(encoding="utf-8"), flags=re.DOTALL)
        assert words_out(text) == []
    assert words_out("; ".join(text for _, text in PROBES.values())) == []


@pytest.mark.slow
def test_the_code_is_in_plain_words() -> None:
    """Its docstrings and comments have no word that is out; its names, by package, may only lose them."""
    count: Counter[str] = Counter()
    for path in house.modules().values():
        source = path.read_text(encoding="utf-8")
        assert words_out(remarks(source)) == [], path
        count[house.package_of(path)] += len(list(names_out(source)))
    more = {name: number for name, number in count.items() if number > MOST_NAMES_OUT.get(name, 0)}
    assert more == {}, f"more names with words that are out: say {OUT_OF_NAMES}"


def test_words_that_are_out_are_found_and_ordinary_ones_are_not() -> None:
    """A part of a whole, a thing in place, a standalone page and code are left in peace."""
    for text in [
        "tokens and logprobs part under load",
        "stock parted in 6 of 28 cases",
        "it parts in 191 of 192 traces",
        "a neighbour's company",
        "each is held bit for bit against the first",
        "a row at its place",
        "the same prompt alone",
        "the guilty operator",
    ]:
        assert words_out(text)
    text = (
        "K in 1 to 16 parts; a part of its keys; written in place; what takes place; a standalone page; we ask again; "
        "compared with the first; prefill in parts at a time"
    )
    assert words_out(text) == []
    assert words_out(prose("`--fail-on moved`\n\n```\nparted\n```\n\n    held against\n\n[run](alone.md)\n")) == []
    source = "def told_by(parts, asked=1):  # in\n    # company\n    self.rooms_at = TAPE = untold = SomeRoom\n"
    assert {name for _, name in names_out(source)} == {"told_by", "rooms_at", "TAPE", "asked"}
    assert len(words_out(remarks('"""Its company, of "alone"."""\n' + source))) == 2
