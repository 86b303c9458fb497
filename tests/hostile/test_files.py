"""Files and folders that can't be deleted, searched or taken over; links, FIFOs and devices in the place of files."""

from __future__ import annotations

import gzip
import os
import stat
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest

from nondet.core import certificates as store
from nondet.core import runfile
from nondet.core.certificates import certificates
from nondet.core.environment import collect, moved, safe_argv
from nondet.core.runfile import append_text, create_locked, read_run, replace_text, traces_path
from nondet.core.traces import TraceWriter
from nondet.errors import UserError
from nondet.services.sample import prompt_text
from tests.build import Command, header, line, row
from tests.core.test_runfile import finished, writer
from tests.core.test_runfile import row as runfile_row


def test_certificates_are_shown_and_kept(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NONDET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_instances", {})
    evidence = "compared\x1b]0;title\x07 with the anchor"
    certificates("cpu").record("mine\x1b[31m:linear", "chain float32 M=1", True, evidence)
    code, out, err = run("certify", "--show", "--device", "cpu")
    assert code == 0
    assert "mine" in out
    assert not [bad for bad in ("\x1b]0", "\x07", "\x1b[31m:linear") if bad in out + err]
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError(30, "Read-only file system", "x")))
    code, out, err = run("certify", "--forget", "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1), (out, err)
    assert "Read-only file system" in err


def test_somebody_elses_side_file_is_not_taken_over(run: Command, tmp_path: Path) -> None:
    side, argv = tmp_path / "a.traces.jsonl", ("sample", "--n", "2", "--max-tokens", "2", "--out", "a.jsonl")
    side.write_text("somebody's\n", encoding="utf-8")
    for option, said in [("", "exists"), ("--resume", "exists"), ("", "link"), ("--force", "is a symbolic link")]:
        if said == "link":
            assert side.read_text(encoding="utf-8") == "somebody's\n"
            side.unlink()
            side.symlink_to(tmp_path / "new")
        code, _, err = run(*argv, *option.split())
        assert (code, err.count("\n")) == (2, 1)
        assert "a.traces.jsonl" in err
        assert said in err
    assert not (tmp_path / "new").exists()


def test_no_link_is_followed(tmp_path_factory: pytest.TempPathFactory) -> None:
    writers: tuple[Callable[[Path], object], ...] = (
        lambda path: create_locked(path, force=True),
        lambda path: TraceWriter(path, resume=False, piece=str),  # whose link is that of the side file
        lambda path: replace_text(path, "x"),
        lambda path: runfile.replacing(path).__enter__(),
    )
    for write, dangling in product(writers, (False, True)):
        tmp_path = tmp_path_factory.mktemp("case")
        (there := tmp_path / "elsewhere").mkdir()
        (there / "precious").write_text("kept", encoding="utf-8")
        path = tmp_path / "a.jsonl"
        (traces_path(path) if write is writers[1] else path).symlink_to(there / ("new" if dangling else "precious"))
        with pytest.raises(UserError, match="is a symbolic link"):
            write(path)
        assert (there / "precious").read_text(encoding="utf-8") == "kept"
        assert [p.name for p in there.iterdir()] == ["precious"]
        assert len(list(tmp_path.iterdir())) == 2


def test_a_summary_is_appended_and_waits_for_nobody(tmp_path: Path) -> None:
    """A step summary may be a link to a file of the runner's; a FIFO may have no reader."""
    (precious := tmp_path / "precious").write_text("kept", encoding="utf-8")
    (tmp_path / "link").symlink_to(precious)
    append_text(tmp_path / "link", "\udcff, too")
    assert precious.read_text(encoding="utf-8") == "kept\\udcff, too"
    (tmp_path / "nowhere").symlink_to(precious.with_name("new"))
    with pytest.raises(UserError, match="link to nothing"):
        append_text(tmp_path / "nowhere", "x")
    assert not precious.with_name("new").exists()
    for write in (append_text, replace_text):
        fifo, text = tmp_path / write.__name__, "x" * 300_000
        os.mkfifo(fifo)
        with pytest.raises(UserError, match="can't write"):
            write(fifo, text)
        read: list[str] = []
        number = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(number, True)
        reader = threading.Thread(target=lambda n=number, r=read: r.append(os.fdopen(n).read()))
        with fifo.open("wb"):  # keeps the reader from an early end
            reader.start()
            write(fifo, text)
        reader.join(60)
        assert read == [text]


def test_a_run_file_is_no_fifo_and_no_device(tmp_path: Path) -> None:
    """It would fill up and hold the run, or wait for a writer for ever."""
    fifo = tmp_path / "r.jsonl"
    os.mkfifo(fifo)
    os.mkfifo(traces_path(fifo))
    for opened, said in [
        (lambda: TraceWriter(fifo, resume=False, piece=str), "can't write"),  # nobody reads it: that is not waited for
        (lambda: create_locked(fifo, force=True), "not a regular file"),
        (lambda: read_run(fifo), "not a regular file"),
        (lambda: writer(fifo, resume=True), "not a regular file"),
        (lambda: prompt_text(None, fifo), "not a regular file"),
        (lambda: prompt_text(None, Path("/dev/zero")), "not a regular file"),
    ]:
        with pytest.raises(UserError, match=said):
            opened()


def test_what_is_read_is_a_file_and_ends(run: Command, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "endless").symlink_to("/dev/zero")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(64 * 2**20)
    there = {p.name for p in tmp_path.iterdir()}
    for typed, suffix in [
        ("sample --prompt-file", ".txt"), ("sample --prompts", ".jsonl"), ("embed --model m --texts", ".csv"),
        ("report", ".jsonl"),
    ]:  # fmt: skip
        for kind in sorted(there):
            path = (tmp_path / kind).rename(tmp_path / f"{kind}{suffix}")
            code, out, err = run(*typed.split(), path)
            assert (code, out) == (2, "")
            assert path.name in err
            assert err.count("\n") == 1
            path.rename(tmp_path / kind)
    assert {p.name for p in tmp_path.iterdir()} == there
    (tmp_path / "a").write_bytes(b"x" * 10)
    assert runfile.read_whole(tmp_path / "a", 10) == b"x" * 10
    with pytest.raises(UserError, match="larger than"):
        runfile.read_whole(tmp_path / "a", 9)


def test_a_packed_file_unpacks_to_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = b"".join(line(row(case=f"case {i}")) for i in range(600))
    whole = line(header()) + rows
    bomb = line(header()) + line(row(case="the same")) * 10_000
    for name, data in (("run.jsonl.gz", gzip.compress(whole)), ("bomb.jsonl.gz", gzip.compress(bomb))):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "plain.jsonl").write_bytes(whole)
    assert len(list(runfile.lines_of(tmp_path / "bomb.jsonl.gz"))) == 10_001  # 8 MB are few, however they are packed
    monkeypatch.setattr(runfile, "_UNPACKED_LEAST", 2**16)
    assert len(bomb) > 200 * (tmp_path / "bomb.jsonl.gz").stat().st_size
    with pytest.raises(UserError, match="unpacks to more than"):
        list(runfile.lines_of(tmp_path / "bomb.jsonl.gz"))
    for name in ("run.jsonl.gz", "plain.jsonl"):
        assert len(read_run(tmp_path / name).rows) == 600


def test_a_run_killed_anywhere_resumes(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole.jsonl").read_bytes()
    header = whole.index(b"\n")
    writer(tmp_path / "long.jsonl", plan={"long": "x" * 5000}).close()  # longer than the header that comes next
    (path := tmp_path / "run.jsonl").write_bytes((tmp_path / "long.jsonl").read_bytes()[:4000])
    again = writer(path, resume=True)
    assert (again.done, again.resumed) == (set(), False)
    again.finish()
    assert read_run(path).complete
    for kept in (0, 1, 17, 60, header, header + 1, *(max(header + 1, len(whole) - cut) for cut in range(0, 400, 23))):
        path = tmp_path / "run.jsonl"
        path.write_bytes(whole[:kept])
        assert runfile.begun(path) == (kept > header)
        again = writer(path, resume=True)
        for case in ("b", "a"):
            if runfile_row(case).key not in again.done:
                again.write(runfile_row(case))
        again.finish()
        run = read_run(path)
        assert sorted(r.case for r in run.rows) == ["a", "b"]
        assert run.complete
        assert path.read_bytes().count(b'"type":"end"') == 1


def test_a_foreign_file_is_not_begun_anew(tmp_path: Path) -> None:
    """What is not the beginning of a header of ours is somebody else's; so is what another process writes."""
    path = tmp_path / "run.jsonl"
    for content in [b"my diary, without a line end", b'{"type":"heather"', b"\x00" * 100]:
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a nondet run file"):
            writer(path, resume=True)
        assert path.read_bytes() == content
    (link := tmp_path / "link.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="exists"):
        writer(link)
    assert not (tmp_path / "elsewhere").exists()
    path = tmp_path / "locked.jsonl"
    first = writer(path)
    first.write(runfile_row("a"))
    before = path.read_bytes()
    for options, said in (({"force": True}, "another nondet"), ({"resume": True}, "another nondet"), ({}, "exists")):
        with pytest.raises(UserError, match=said):
            writer(path, **options)
    assert path.read_bytes() == before
    first.close()
    writer(path, resume=True).finish()
    assert [r.case for r in read_run(path).rows] == ["a"]


def test_resuming_leaves_links_modes_and_neighbours(tmp_path: Path) -> None:
    target = finished(tmp_path / "real.jsonl")
    target.chmod(0o600)
    link, hard, neighbour = (tmp_path / name for name in ("run.jsonl", "hard.jsonl", "run.jsonl.tmp"))
    link.symlink_to(target)
    (elsewhere := tmp_path / "traces").touch()
    traces_path(link).symlink_to(elsewhere)
    TraceWriter(link, resume=True, piece=str).close()
    assert traces_path(link).is_symlink()
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


def test_resume_names_what_would_change_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set in one half only, a variable gives the same prompt two traces, and a false verdict."""
    path, here = tmp_path / "run.jsonl", collect(0)
    names = ("commit", "sources", "nondet", "numpy", "onednn", "driver", "cublas", "num_threads", "aten_cpu_capability")
    writer(path, plan={}, environment=here).close()
    for field in (*names, "float32_matmul_precision"):
        with pytest.raises(UserError, match=rf"another machine or toolchain \({field}\)"):
            writer(path, plan={}, environment={**here, field: "1.2"}, resume=True)
    writer(path, plan={}, environment={**here, "argv": ["other"]}, resume=True).close()
    with pytest.raises(UserError, match="made by nondet probe"):
        writer(path, command="sample", plan={}, environment=here, resume=True)
    for name in ["ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"]:
        monkeypatch.delenv(name, raising=False)
        before = collect(0)
        monkeypatch.setenv(name, "AVX2")
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
        assert f"variables.{name}" in moved(before, collect(0))
        assert "variables.OMP_WAIT_POLICY" not in moved(before, collect(0))


def test_a_page_is_replaced_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "r.html"
    page.write_text("old", encoding="utf-8")
    page.chmod(0o640)

    with monkeypatch.context() as patch:
        patch.setattr("nondet.core.runfile.os.replace", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(UserError, match="disk is full"):
            replace_text(page, "new")
    assert page.read_text(encoding="utf-8") == "old"
    replace_text(page, "new \ud800")
    assert page.read_text(encoding="utf-8") == "new \\ud800"
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_secrets_do_not_reach_a_run_file() -> None:
    for word in [
        "--model=hf_" + "a" * 34, "prefix ghp_" + "b" * 36, "github_pat_" + "c" * 30, "sk-proj-" + "d" * 30,
        "xoxb-1234567890-abcdef", "AKIA" + "ABCDEFGH12345678", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "https://ann:hunter2@example.org/model", "HF_TOKEN=hunter2", "MY_API_KEY=hunter2",
        "Authorization: Bearer hunter2hunter2", "--password=hunter2", "https://gateway.example/t/hunter2/v1",
        "--endpoint=https://gateway.example/hunter2", "--compare-endpoint=HTTPS://gateway.example/v1?key=hunter2",
    ]:  # fmt: skip
        kept = safe_argv(["nondet", "sample", word])[2]
        assert "<hidden>" in kept or "/(path " in kept
        for secret in ("hunter2", "aaaa", "bbbb", "cccc", "dddd", "1234567890", "ABCDEFGH", "c2lnbmF0"):
            assert secret not in kept
    assert safe_argv(["/home/ann/bin/nondet", "--api-key", "s3cret", "x"]) == ["nondet", "--api-key", "<hidden>", "x"]
    assert safe_argv(["nondet", "--api-key=s3cret", "-n", "3"]) == ["nondet", "--api-key=<hidden>", "-n", "3"]
    for word in [
        "--max-tokens", "Tokens: 3 to 5", "others=60,budget=256", "a/b.jsonl", "mine:softmax",
        "http://127.0.0.1:8000/v1",
    ]:  # fmt: skip
        assert safe_argv(["nondet", word])[1] == word  # the command can be repeated from the header
