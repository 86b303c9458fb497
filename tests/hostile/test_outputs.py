"""What a command writes is none of what it reads, and nothing that it writes already: --force destroys no input."""

from __future__ import annotations

import re
from itertools import cycle
from pathlib import Path

import pytest
import typer.main

import nondet
from nondet import cli
from nondet.core import runfile
from nondet.core.runfile import traces_path
from nondet.errors import UserError
from tests.build import Command, line, row, run_of, sampled

# What is typed, {} being a file that is there.
DESTROYED = [
    "trace --run {} --request t000001 --out {}",
    "trace --replay --run {} --request t000001 --out {}",
    "mismatch {} --out {}",
    "mismatch --rollouts {} --out {}",
    "probe --from-trace {} --out {}",
    "sample --prompts {} --out {}",
    "sample --prompt-file {} --out {}",
    "bench --check {} --out {}",
    "embed --model m --texts {} --out {}",
    "gate {} --junit {}",
    "gate {} --summary {}",
    "gate --endpoint http://127.0.0.1:9 --prompts {} --out {}",
    "gate --endpoint http://127.0.0.1:9 --out {} --summary {}",
]


def test_no_command_writes_what_it_reads(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(sampled(tmp_path / "runs", n=2, length=4).source)
    side, kept = traces_path(path), path.read_bytes()
    (linked := path.parent / "linked.jsonl").hardlink_to(path)
    others = cycle((path, path.parent / ".." / "runs" / path.name, linked))
    cases = [(typed, path, next(others)) for typed in DESTROYED]
    (page := tmp_path / "run.html").write_bytes(line(run_of().header))
    (table := tmp_path / "run.json").write_bytes(line(run_of().header))
    for typed in ("report {} --out {}", "diff {} x.jsonl --out {}", "diff x.jsonl {} --out {}"):
        cases.append((typed, page, page))
    cases += [
        ("report {} --section rows --out {}", table, table),
        # the traces beside a run, which may lie where the prompts do, and a folder of rollouts
        ("trace --replay --run {} --request t000001 --out {}", path, side),
        ("sample --prompts {} --out {}", side, path),
        ("mismatch --rollouts {} --out {}", path.parent, path),
    ]
    for typed, reads, writes in cases:
        before = writes.read_bytes()
        first, second = typed.split("{}", 1)
        code, out, err = run(*f"{first}{reads}{second.replace('{}', str(writes))} --force".split())
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert re.search(r"is a file that this command|is one of the rollouts\. Give the output another name", err)
        assert writes.read_bytes() == before
    with pytest.raises(UserError, match="a file that this command reads"):
        nondet.find_mismatch(path, out=path, force=True)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    assert run("gate", path)[0] == 2
    assert path.read_bytes() == kept


def test_every_option_that_writes_is_known() -> None:
    """The help of each says so, and `check_outputs` goes by their names."""
    commands = typer.main.get_command(cli.application()).commands  # type: ignore[attr-defined] # a group
    writes = re.compile(r"(also )?write\b|append\b|.* to write\b", re.IGNORECASE)
    options = [p for command in commands.values() for p in command.params if p.param_type_name == "option"]
    assert {p.name for p in options if writes.match(p.help or "")} == runfile._OUTPUTS


def test_unrelated_files_and_devices_are_let_through(tmp_path: Path) -> None:
    (there := tmp_path / "a.jsonl").write_bytes(line(row()))
    reports = [tmp_path / "b.html"]
    runfile.check_outputs({"run": there, "out": tmp_path / "b.jsonl", "report": reports, "prompt": "x" * 9999})
    runfile.check_outputs({"run": Path("/dev/null"), "summary": Path("/dev/null"), "junit": None, "prompt": "a\0b"})
    with pytest.raises(UserError, match="writes as well"):
        runfile.check_outputs({"out": tmp_path / "new.jsonl", "summary": tmp_path / "new.jsonl"})
