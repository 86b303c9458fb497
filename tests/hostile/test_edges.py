"""Run files of every command, changed in one field: a report comes out or one clear line. Packed files that swell."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from pathlib import Path

import pytest

from nondet.commands.certify import _print
from nondet.core import runfile
from nondet.core.runfile import disk_errors, lines_of, read_run
from nondet.diff import diff_runs
from nondet.errors import UserError
from nondet.reports import diff, gate, html, markdown
from nondet.verdict.gate import decide, exit_code
from tests.build import header, line, row
from tests.hostile.samples import KEPT, cut
from tests.hostile.test_mutations import VALUES, edit, on_terminal, places

EACH = 24


def shown(path: Path, whole: Path, number: int) -> None:
    """A run read, and one of the things that are made of it."""
    run = read_run(path)
    made = (
        lambda: html.render([run]),
        lambda: markdown.render([run]),
        lambda: on_terminal([run]),
        lambda: gate.text(decide(run, rate=0.1, confidence=0.95, by="load"), run),
        lambda: diff.text(diff_runs(read_run(whole), run), ("a", "b"), {}, verbose=True),
        lambda: _print(run, verbose=True) if run.header.command == "certify" else exit_code(run, "divergent"),
    )
    made[number % len(made)]()


@pytest.mark.parametrize("name", KEPT)
def test_one_changed_field_of_any_command_is_a_report_or_one_line(tmp_path: Path, name: str) -> None:
    """A field taken out, doubled, or another value of its own type: never a traceback."""
    rng = random.Random(name)  # noqa: S311 - mutations, not secrets
    whole, ends = cut(name, tmp_path), {"shown": 0, "refused": 0}
    for number in range(6):
        shown(whole, whole, number)
    lines = whole.read_bytes().splitlines(keepends=True)
    kinds = [json.loads(text)["type"] for text in lines]
    path = whole.with_name(whole.name.replace(".jsonl", "-changed.jsonl"))
    if (side := whole.with_name(whole.name.replace(".jsonl", ".traces.jsonl"))).exists():
        path.with_name(path.name.replace(".jsonl", ".traces.jsonl")).write_bytes(side.read_bytes())
    for number in range(EACH):
        kind = rng.choice(sorted(set(kinds)))
        place = rng.choice([i for i, of in enumerate(kinds) if of == kind])
        record = json.loads(lines[place])
        *inner, last = rng.choice(places(record))
        parent = record
        for key in inner:
            parent = parent[key]
        if rng.random() < 0.15:
            del parent[last]
        else:
            alike = [value for value in VALUES if type(value) is type(parent[last])]
            parent[last] = rng.choice(alike if alike and rng.random() < 0.8 else VALUES)
        path.write_bytes(b"".join([*lines[:place], json.dumps(record).encode() + b"\n", *lines[place + 1 :]]))
        try:
            shown(path, whole, number)
            ends["shown"] += 1
        except UserError as error:
            ends["refused" if "\n" not in str(error) else "several lines"] += 1
        except Exception as error:
            raise AssertionError(f"{kind} {[*inner, last]} = {json.dumps(record)[:200]}") from error
    assert min(ends.values()) > 0, ends


@pytest.mark.parametrize(
    ("name", "kind", "fields", "reason"),
    [
        ("diagnose", "step", {"name": "fortune", "outcome": "skipped"}, "name"),
        ("diagnose", "step", {"name": "batch", "outcome": "no", "figures": {}}, "figures: an answer without n"),
        ("diagnose", "culprit", {"shapes": [{"0": [1]}, {}], "axes": {"0": ["tokens", ""]}}, "shapes: 0 has fewer"),
        ("mismatch", "mismatch-place", {"rows": [7]}, "rows: 1 numbers"),
        ("certify", "row", {"extra": {"left_at": 3}}, "left_at"),
        ("certify", "row", {"extra": {"first": {"at": 1}}}, "extra.first"),
    ],
)
def test_a_record_that_no_report_can_show_names_its_field(
    tmp_path: Path, name: str, kind: str, fields: dict[str, object], reason: str
) -> None:
    """Where it is read, with the line."""
    path = cut(name, tmp_path)
    edit(path, kind, **fields)
    with pytest.raises(UserError, match=rf"malformed in line \d+: .*{reason}"):
        read_run(path)


def test_lists_without_end_are_refused_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes of a .gz that would be gigabytes of empty lists; the same in one plain line; in a side file."""
    bomb = line(header()) + line(row(extra={"x": [[]]})).replace(b"[[]]", b"[" + b"[]," * 300_000 + b"[]]") * 8
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(bomb))
    decoded: list[bytes] = []
    monkeypatch.setattr(runfile, "decode", lambda decoder, text: decoded.append(text) or decoder.decode(text))
    with pytest.raises(UserError, match="lists and objects by line 8"):
        list(lines_of(tmp_path / "bomb.jsonl.gz"))
    monkeypatch.setattr(runfile, "_NESTED_LEAST", 250_000)
    (tmp_path / "plain.jsonl").write_bytes(bomb)
    with pytest.raises(UserError, match="more than 250,000 lists and objects by line 2"):
        read_run(tmp_path / "plain.jsonl")
    assert max(map(len, decoded)) < 10_000


@pytest.mark.parametrize("behind", [b"garbage", b"\xfd7zXZ\0 and no more", b"x"])
def test_what_stands_behind_an_xz_is_no_silence(tmp_path: Path, behind: bytes) -> None:
    """Python's lzma leaves it out; a second stream belongs to the format."""
    packed = lzma.compress(line(header())), lzma.compress(line(row()))
    path = tmp_path / "run.jsonl.xz"
    path.write_bytes(packed[0] + packed[1])
    assert [text for _, text, _ in lines_of(path)] == [line(header())[:-1], line(row())[:-1]]
    path.write_bytes(packed[0] + behind)
    with pytest.raises(UserError, match="can't unpack"):
        list(lines_of(path))
    path.write_bytes(packed[0][:-7])
    with pytest.raises(UserError, match="can't unpack"):
        list(lines_of(path))


@pytest.mark.parametrize(("name", "said"), [("run.jsonl", "--resume"), ("r.html", "try again"), ("r.py", "try again")])
def test_a_full_disk_advises_resume_where_there_is_one(name: str, said: str) -> None:
    """A page, a table and a script are made anew."""
    with pytest.raises(UserError, match=f"the disk is full: {name}.*{said}"), disk_errors(Path(name)):
        raise OSError(28, "No space left on device")


def test_a_script_of_a_trace_on_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors' own writer turns the system's error into a SafetensorError, which nobody expects."""
    import torch

    from nondet.trace import repro

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(repro, "_callable_name", lambda function: "torch.nn.functional.linear")
    monkeypatch.setattr(repro, "_written", lambda call, held, *_: held.update(a=torch.ones(2)))
    monkeypatch.setattr(repro, "_taken", lambda *_: [])
    monkeypatch.setattr(Path, "write_bytes", full)
    call = type("Call", (), {"function": torch.nn.functional.linear, "row": 0, "rows": 2, "keys": 0})
    culprit = type("Culprit", (), {"call": "linear", "replays": (), "sentence": "s"})
    guilty = type("Guilty", (), {"calls": (call, call), "culprit": culprit})
    with pytest.raises(UserError, match=r"disk is full: .*\.inputs\.safetensors"):
        repro.write_and_run(tmp_path / "r.py", guilty)  # type: ignore[arg-type] # the parts of one that are read
    assert list(tmp_path.iterdir()) == []
