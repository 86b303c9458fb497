"""Writing: one writer at a time, nobody's file touched unasked, and a run goes on only where bits would be the same."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nondet.core.environment import collect, moved, safe_argv
from nondet.core.runfile import begun, open_run, read_run, replace_text
from nondet.errors import UserError
from nondet.services.sample import prompt_text
from tests.test_runfile import finished, row, writer


def test_a_second_writer_is_one_line(tmp_path: Path) -> None:
    """While one process writes a file, neither --force nor --resume nor a plain start of another opens it."""
    path = tmp_path / "run.jsonl"
    first = writer(path)
    first.write(row("a"))
    before = path.read_bytes()
    for options in ({"force": True}, {"resume": True}):
        with pytest.raises(UserError, match="another nondet is writing"):
            writer(path, **options)
    with pytest.raises(UserError, match="exists"):
        writer(path)
    assert path.read_bytes() == before
    first.close()
    writer(path, resume=True).finish()
    assert [r.case for r in read_run(path).rows] == ["a"]


RACE = """
import sys
from pathlib import Path
from nondet.errors import UserError
from nondet.core.runfile import open_run
won = 0
for number in range(40):
    try:
        writer = open_run(Path(sys.argv[1]) / f"{number}.jsonl", command="probe", plan={}, environment={})
        won += 1
    except UserError:
        pass
print(won)
"""


def test_raced_opens_have_one_winner(tmp_path: Path) -> None:
    """Two processes that begin the same files: each file is created by exactly one of them."""
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    won = [int(racer.communicate()[0]) for racer in racers]
    assert sum(won) == 40
    assert len(list(tmp_path.iterdir())) == 40


@pytest.mark.parametrize("kept", [0, 1, 17, 60, -1])
def test_a_run_killed_in_its_first_line_is_begun_anew(tmp_path: Path, kept: int) -> None:
    """An empty file, a torn header, a header that lacks only its line end: --resume goes on, and loses no record."""
    path = finished(tmp_path / "run.jsonl")
    header = path.read_bytes().split(b"\n")[0]
    path.write_bytes(header[:kept] if kept >= 0 else header)
    assert begun(path) == (kept == -1)
    again = writer(path, resume=True)
    again.write(row("a"))
    again.finish()
    run = read_run(path)
    assert run.complete
    assert [r.case for r in run.rows] == ["a"]


@pytest.mark.parametrize("content", [b"my diary, without a line end", b'{"type":"heather"', b"\x00" * 100])
def test_a_foreign_file_is_not_begun_anew(tmp_path: Path, content: bytes) -> None:
    """What is not the beginning of a header of ours is somebody else's: --resume leaves it."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a nondet run file"):
        writer(path, resume=True)
    assert path.read_bytes() == content


@pytest.mark.parametrize("cut", range(1, 400, 23))
def test_every_later_cut_resumes(tmp_path: Path, cut: int) -> None:
    """Wherever a run was killed after its header, resuming keeps the whole lines and completes the rest."""
    path = finished(tmp_path / "run.jsonl")
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    path.write_bytes(whole[: max(header, len(whole) - cut)])
    again = writer(path, resume=True)
    for case in ("b", "a"):
        if row(case).key not in again.done:
            again.write(row(case))
    again.finish()
    run = read_run(path)
    assert sorted(r.case for r in run.rows) == ["a", "b"]
    assert run.complete


def test_resuming_leaves_links_modes_and_neighbours(tmp_path: Path) -> None:
    """A symbolic link stays one, hard links stay together, 0600 stays 0600, and RUN.jsonl.tmp is not touched."""
    target = finished(tmp_path / "real.jsonl")
    target.chmod(0o600)
    link, hard, neighbour = (tmp_path / name for name in ("run.jsonl", "hard.jsonl", "run.jsonl.tmp"))
    link.symlink_to(target)
    os.link(target, hard)
    neighbour.symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("kept", encoding="utf-8")
    writer(link, resume=True).finish()
    assert link.is_symlink()
    assert target.stat().st_ino == hard.stat().st_ino
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "kept"
    assert neighbour.is_symlink()
    assert len(read_run(link).rows) == 2


def test_a_dangling_link_is_not_followed(tmp_path: Path) -> None:
    """A new run is created, never written to where a link points."""
    link = tmp_path / "run.jsonl"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="exists"):
        writer(link)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("commit", "0123456789ab"),
        ("sources", "0" * 16),
        ("nondet", "9.9"),
        ("numpy", "1.0"),
        ("onednn", "0.1"),
        ("driver", "1.2"),
        ("cublas", "1.2.3"),
        ("aten_cpu_capability", "DEFAULT"),
        ("float32_matmul_precision", "high"),
    ],
)
def test_resume_names_what_would_change_bits(tmp_path: Path, field: str, value: Any) -> None:
    """The first half of a run and the second are computed by the same thing, or not at all."""
    path = tmp_path / "run.jsonl"
    here = collect(0)
    open_run(path, command="probe", plan={}, environment=here).close()
    with pytest.raises(UserError, match=rf"another machine or toolchain \({field}\)"):
        open_run(path, command="probe", plan={}, environment={**here, field: value}, resume=True)
    open_run(path, command="probe", plan={}, environment={**here, "argv": ["other"]}, resume=True).close()


@pytest.mark.parametrize("name", ["ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"])
def test_resume_names_a_variable_that_steers_a_library(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Set in one half only, it gives the same prompt two traces, and a false verdict; how threads wait does not."""
    monkeypatch.delenv(name, raising=False)
    before = collect(0)
    monkeypatch.setenv(name, "AVX2")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert f"variables.{name}" in moved(before, collect(0))
    assert "variables.OMP_WAIT_POLICY" not in moved(before, collect(0))
    assert moved(before, before) == []


def test_another_command_does_not_go_on_with_it(tmp_path: Path) -> None:
    """A probe's file is no sample's."""
    path = finished(tmp_path / "run.jsonl")
    with pytest.raises(UserError, match="made by nondet probe"):
        open_run(path, command="sample", plan={}, environment={}, resume=True)


def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    """Opening one to read would wait for a writer for ever."""
    fifo = tmp_path / "run.jsonl"
    os.mkfifo(fifo)
    with pytest.raises(UserError, match="not a regular file"):
        read_run(fifo)
    with pytest.raises(UserError, match="not a regular file"):
        writer(fifo, resume=True)
    for endless in (fifo, Path("/dev/zero")):
        with pytest.raises(UserError, match="not a regular file"):
            prompt_text(None, endless)


def test_a_page_is_replaced_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a kill before the rename, leaves the old page as it was, and no scrap beside it."""
    page = tmp_path / "r.html"
    page.write_text("old", encoding="utf-8")
    page.chmod(0o640)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nondet.core.runfile.os.replace", full)
        with pytest.raises(UserError, match="disk is full"):
            replace_text(page, "new")
    assert page.read_text(encoding="utf-8") == "old"
    replace_text(page, "new \ud800")
    assert page.read_text(encoding="utf-8") == "new \\ud800"
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


@pytest.mark.parametrize(
    "word",
    [
        "--model=hf_" + "a" * 34,
        "prefix ghp_" + "b" * 36,
        "github_pat_" + "c" * 30,
        "sk-proj-" + "d" * 30,
        "xoxb-1234567890-abcdef",
        "AKIA" + "ABCDEFGH12345678",
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "https://ann:hunter2@example.org/model",
        "HF_TOKEN=hunter2",
        "MY_API_KEY=hunter2",
        "Authorization: Bearer hunter2hunter2",
        "--password=hunter2",
        "https://gateway.example/t/hunter2/v1",
        "--endpoint=https://gateway.example/hunter2",
        "--compare-endpoint=HTTPS://gateway.example/v1?key=hunter2",
    ],
)
def test_secrets_do_not_reach_a_run_file(word: str) -> None:
    """Run files are shared: tokens, passwords in addresses and NAME_TOKEN=... are not in them."""
    kept = safe_argv(["nondet", "sample", word])[2]
    assert "<hidden>" in kept or "/(path " in kept
    for secret in ("hunter2", "aaaa", "bbbb", "cccc", "dddd", "1234567890", "ABCDEFGH", "c2lnbmF0"):
        assert secret not in kept


@pytest.mark.parametrize(
    "word",
    ["--max-tokens", "Tokens: 3 to 5", "others=60,budget=256", "a/b.jsonl", "mine:softmax", "http://127.0.0.1:8000/v1"],
)
def test_what_is_no_secret_stays(word: str) -> None:
    """The command can be repeated from the header."""
    assert safe_argv(["nondet", word])[1] == word
