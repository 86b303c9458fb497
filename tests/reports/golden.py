"""What the reports of kept run files say, through the command line alone: whatever moves inside, this stays the same.

    python -m tests.reports.golden --write DIR [--from FOLDER]    all outputs as files: `diff -r` of two trees' folders
    python -m tests.reports.golden --update                       the digests that test_golden.py holds

Of a page scripts, styles and embedded data are left out: they are how it is shown, not what it says.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import combinations
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path("docs/evidence")
DIGESTS = Path(__file__).with_name("golden.txt")
# The digests are of these alone: what else can be written follows from the same verdicts.
FORMATS = ("txt", "md", "html")
PAGES = FORMATS[1:]
_SECONDS = re.compile(rb'\btime="[^"]*"|\btimestamp="[^"]*"')


def run_files(folder: Path) -> list[Path]:
    """Those under a folder that a report can be made of, in order."""
    paths = sorted([*folder.rglob("*.jsonl"), *folder.rglob("*.jsonl.[gx]z")])
    return [p for p in paths if ".traces." not in p.name and p.name != "prompts.jsonl"]


def name_of(path: Path, folder: Path) -> str:
    """The same whether the file is kept packed or not."""
    return path.relative_to(folder).as_posix().removesuffix(".gz").removesuffix(".xz").removesuffix(".jsonl")


def content(page: str) -> str:
    """A page without scripts, styles and embedded data."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"data:[\w/+.-]+;base64,[\w+/=]+", "data:", bare)


def first_words(page: str) -> int:
    """Words of a page's first screen: what a reader sees there without a scroll or a click."""
    first = page.partition('<section class="first"')[2].partition("</section>")[0]
    unseen = r'<svg class="picture post".*?</svg>|<title>.*?</title>|<[^>]*>'
    return len(re.sub(unseen, " ", first, flags=re.DOTALL).split())


def nondet(*argv: str, width: int = 80) -> tuple[int, str, str]:
    """A command in this process, on a terminal of that width without colours: (exit code, stdout, stderr)."""
    from nondet.cli import main

    out, err = io.StringIO(), io.StringIO()
    unset = ("FORCE_COLOR", "CLICOLOR_FORCE", "GITHUB_STEP_SUMMARY", "GITHUB_ACTIONS", "TTY_COMPATIBLE")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    terminal = kept | {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"}
    with mock.patch.dict(os.environ, terminal, clear=True), redirect_stdout(out), redirect_stderr(err):
        code = main(list(argv))
    return code, *(s.getvalue().replace(".jsonl.gz", ".jsonl") for s in (out, err))


def _printed(*argv: str) -> str:
    """Its stdout and stderr; a refusal is kept as well."""
    code, out, err = nondet(*argv)
    return out + (f"{code}: {err}" if code else err)


def _page(path: Path) -> str:
    return content(path.read_text(encoding="utf-8")).replace(".jsonl.gz", ".jsonl")


def reports(paths: list[str], formats: tuple[str, ...] = FORMATS) -> dict[str, str]:
    """Format -> report of these runs together. "verbose", "quiet" and "full" beside those of `FORMATS`."""
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in set(formats) - {*PAGES, "full"}:
            made[form] = _printed("report", *paths, *([] if form == "txt" else [f"--{form}"]))
        for forms, more in ((PAGES, ()), (("full",), ("--full",))):  # pages in one call, which reads the files once
            wanted = {form: Path(folder, "full.md" if form == "full" else f"page.{form}") for form in forms}
            if wanted.keys() & {*formats}:
                outs = [word for page in wanted.values() for word in ("--out", str(page))]
                said = _printed("report", *paths, "--quiet", "--force", *more, *outs)
                made |= {form: _page(page) if page.exists() else said for form, page in wanted.items()}
    return made


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_digests() -> dict[str, dict[str, str]]:
    lines = [line.split() for line in DIGESTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {name: dict(zip(FORMATS, digests, strict=True)) for name, *digests in lines}


def _update() -> None:
    os.chdir(ROOT)
    lines = [f"# run file, and the digests of its report as {', '.join(FORMATS)}: see golden.py"]
    for path in run_files(KEPT):
        made = reports([str(path)])
        lines.append(" ".join([name_of(path, KEPT), *(digest(made[form]) for form in FORMATS)]))
    DIGESTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write(to: Path, folder: Path) -> None:
    def put(name: str, text: str | bytes) -> None:
        path = to / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    os.chdir(folder)
    paths = run_files(Path())
    groups = {"runs/" + name_of(path, Path()): [path] for path in paths}
    for parent in sorted({p.parent for p in paths}):
        groups[f"together/{parent.as_posix().replace('/', '-')}"] = [p for p in paths if p.parent == parent]
    for name, group in groups.items():
        for form, text in reports([str(p) for p in group], ("txt", "verbose", "quiet", "md", "full", "html")).items():
            put(f"{name}.{form}", text)
        if len(group) == 1:
            junit = to / f"{name}.junit"
            put(f"{name}.gate", "\n".join(map(str, nondet("gate", str(group[0]), "--junit", str(junit), "--force"))))
            if junit.exists():
                put(f"{name}.junit", _SECONDS.sub(b"", junit.read_bytes()))
            put(f"{name}.gate.json", "\n".join(map(str, nondet("gate", str(group[0]), "--json"))))
    for a, b in _pairs(paths):
        name = f"diff/{name_of(a, Path())}--{name_of(b, Path())}".replace("/", "-").replace("diff-", "diff/", 1)
        for form, options in {"txt": [], "verbose": ["--verbose"], "json": ["--json"]}.items():
            put(f"{name}.{form}", "\n".join(map(str, nondet("diff", str(a), str(b), *options))))
        for form in ("md", "html"):
            page = to / f"{name}.{form}"
            nondet("diff", str(a), str(b), "--quiet", "--force", "--out", str(page))
            if page.exists():
                put(f"{name}.{form}", _page(page))


def _pairs(paths: list[Path]) -> Iterator[tuple[Path, Path]]:
    """Runs of one name on two machines, and those before and after a restart."""
    for a, b in combinations(paths, 2):
        if name_of(a, a.parent) == name_of(b, b.parent) or (a.stem, b.stem) == ("restarted-after", "restarted-before"):
            yield a, b


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reports.golden")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write all outputs as files")
    parser.add_argument("--from", type=Path, metavar="FOLDER", dest="folder", help="of the run files under FOLDER")
    parser.add_argument("--update", action="store_true", help="write the kept digests anew")
    asked = parser.parse_args()
    if asked.update:
        _update()
    elif asked.write:
        _write(asked.write.resolve(), (asked.folder or KEPT).resolve())
    else:
        parser.error("give --write or --update")


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # the tree at hand, also where this file is another one's
    _main()
