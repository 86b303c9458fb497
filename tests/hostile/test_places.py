"""Files and folders that can't be deleted, searched or taken over; links, FIFOs and devices in the place of files."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nondet.core import certificates as store
from nondet.core import runfile
from nondet.core.certificates import certificates
from nondet.core.runfile import append_text, create_locked, read_run, read_whole, replace_text, replacing
from nondet.core.traces import TraceWriter, traces_path
from nondet.errors import UserError
from tests.reports.factory import header, line, row

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> store.Certificates:
    """One certificate of this CPU, in a folder of the test's own, whose member has a control code in its name."""
    monkeypatch.setenv("NONDET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_instances", {})
    proofs = certificates("cpu")
    proofs.record("mine\x1b[31m:linear", "chain float32 M=1", True, "compared\x1b]0;title\x07 with the anchor")
    return proofs


def test_show_writes_no_control_codes(run: Run, kept: store.Certificates) -> None:
    """What a certificate calls its member could move the cursor or rename the window."""
    code, out, err = run("certify", "--show", "--device", "cpu")
    assert code == 0
    assert "mine" in out
    assert "\x1b]0" not in out + err
    assert "\x07" not in out + err
    assert "\x1b[31m:linear" not in out + err


def test_forget_in_a_folder_that_can_not_be_written_is_one_line(
    run: Run,
    kept: store.Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read-only cache: the certificates are still there, and the line says so. (Tests may run as root: pretended.)"""

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    code, out, err = run("certify", "--forget", "--device", "cpu")
    assert code == 2, (out, err)
    assert err.count("\n") == 1
    assert "Read-only file system" in err


def test_a_folder_that_can_not_be_searched_is_one_line(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run file in a folder without the right to search it."""
    (tmp_path / "closed").mkdir()
    right = Path.stat

    def refuse(self: Path, *, follow_symlinks: bool = True) -> object:
        if "closed" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        return right(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", refuse)
    code, out, err = run("report", str(tmp_path / "closed" / "run.jsonl"))
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1


def test_somebody_elses_side_file_is_not_taken_over(run: Run, tmp_path: Path) -> None:
    """RUN.traces.jsonl without its run: neither a fresh run nor --resume may write into it."""
    side = tmp_path / "mine.traces.jsonl"
    side.write_text("somebody's\n", encoding="utf-8")
    for more in ([], ["--resume"]):
        code, _, err = run("sample", "--n", "2", "--max-tokens", "2", "--out", str(tmp_path / "mine.jsonl"), *more)
        assert code == 2
        assert "mine.traces.jsonl exists" in err
        assert err.count("\n") == 1
    assert side.read_text(encoding="utf-8") == "somebody's\n"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Somebody's file, outside of where anything is written."""
    path = tmp_path / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_text("kept", encoding="utf-8")
    return path


WRITERS: dict[str, Callable[[Path], object]] = {
    "run file": lambda path: create_locked(path, force=True),
    "side file": lambda path: TraceWriter(path, resume=False, piece=str),
    "report": lambda path: replace_text(path, "x"),
    "scratch": lambda path: replacing(path).__enter__(),
}


@pytest.mark.parametrize("dangling", [False, True], ids=["to a file", "to nothing"])
@pytest.mark.parametrize("kind", WRITERS)
def test_no_link_is_followed(tmp_path: Path, precious: Path, kind: str, dangling: bool) -> None:
    """A link where something is written is refused, with --force too: what it points to stays, or stays away."""
    target = precious.with_name("new") if dangling else precious
    path = tmp_path / "a.jsonl"
    (traces_path(path) if kind == "side file" else path).symlink_to(target)
    with pytest.raises(UserError, match="is a symbolic link"):
        WRITERS[kind](path)
    assert precious.read_text(encoding="utf-8") == "kept"
    assert sorted(p.name for p in precious.parent.iterdir()) == ["precious"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_summary_is_appended_and_goes_nowhere_new(tmp_path: Path, precious: Path) -> None:
    """A step summary may be a link to a file of the runner's; a link to nothing makes none."""
    (tmp_path / "link").symlink_to(precious)
    append_text(tmp_path / "link", "\udcff, too")
    assert precious.read_text(encoding="utf-8") == "kept\\udcff, too"
    (tmp_path / "nowhere").symlink_to(precious.with_name("new"))
    with pytest.raises(UserError, match="link to nothing"):
        append_text(tmp_path / "nowhere", "x")
    assert not precious.with_name("new").exists()


@pytest.mark.parametrize("write", [append_text, replace_text])
def test_a_fifo_is_written_to_whoever_reads_and_waits_for_nobody(
    tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    """Without a reader it is one line; with one all of it arrives, beyond what a pipe holds."""
    fifo, text = tmp_path / "fifo", "x" * 300_000
    os.mkfifo(fifo)
    with pytest.raises(UserError, match="can't write"):
        write(fifo, text)
    read: list[str] = []
    number = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(number, True)
    reader = threading.Thread(target=lambda: read.append(os.fdopen(number).read()))
    with fifo.open("wb"):  # keeps the reader from an early end
        reader.start()
        write(fifo, text)
    reader.join(60)
    assert read == [text]


def test_a_run_file_is_no_fifo(tmp_path: Path) -> None:
    """It would fill up and hold the run."""
    os.mkfifo(tmp_path / "r.jsonl")
    with pytest.raises(UserError, match="not a regular file"):
        create_locked(tmp_path / "r.jsonl", force=True)


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "folder", "large"])
@pytest.mark.parametrize(
    ("option", "suffix"),
    [("--prompt-file", ".txt"), ("--prompts", ".jsonl"), ("--texts", ".csv"), ("report", ".jsonl")],
)
def test_what_is_read_is_a_file_and_ends(
    run: Run,
    tmp_path: Path,
    kind: str,
    option: str,
    suffix: str,
) -> None:
    """A FIFO without a writer, a device without an end, a folder, a line of many megabytes: one line at once."""
    path = tmp_path / f"given{suffix}"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        with path.open("wb") as stream:
            stream.truncate(64 * 2**20)
    else:
        path.symlink_to(kind)
    command = {"report": ["report"], "--texts": ["embed", "--model", "m", "--texts"]}.get(option, ["sample", option])
    code, out, err = run(*command, str(path))
    assert (code, out) == (2, "")
    assert path.name in err
    assert err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    """As many bytes as allowed are read; one more is too many."""
    (tmp_path / "a").write_bytes(b"x" * 10)
    assert read_whole(tmp_path / "a", 10) == b"x" * 10
    with pytest.raises(UserError, match="larger than"):
        read_whole(tmp_path / "a", 9)


def test_a_packed_file_unpacks_to_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes that hold gigabytes are left at the bound; what a run packs to is not, nor a plain file."""
    rows = b"".join(line(row(case=f"case {i}")) for i in range(600))
    whole = line(header()) + rows
    bomb = line(header()) + (line(row(case="the same")) * 40_000)
    for name, data in (("run.jsonl.gz", gzip.compress(whole)), ("bomb.jsonl.gz", gzip.compress(bomb))):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "plain.jsonl").write_bytes(whole)
    monkeypatch.setattr(runfile, "_UNPACKED_LEAST", 2**16)
    assert len(bomb) > 200 * (tmp_path / "bomb.jsonl.gz").stat().st_size
    with pytest.raises(UserError, match="unpacks to more than"):
        list(runfile.lines_of(tmp_path / "bomb.jsonl.gz"))
    for name in ("run.jsonl.gz", "plain.jsonl"):
        assert len(read_run(tmp_path / name).rows) == 600


def test_a_new_run_asks_before_its_side_file_goes_through_a_link(
    run: Run,
    tmp_path: Path,
    precious: Path,
) -> None:
    """RUN.traces.jsonl as a link to nothing: refused before a model is loaded, with --force as well."""
    (tmp_path / "mine.traces.jsonl").symlink_to(precious.with_name("new"))
    for more in ([], ["--force"]):
        code, _, err = run("sample", "--n", "2", "--max-tokens", "2", "--out", str(tmp_path / "mine.jsonl"), *more)
        assert (code, err.count("\n")) == (2, 1)
        assert "mine.traces.jsonl is a symbolic link" in err
    assert not precious.with_name("new").exists()
