"""Files and folders that can't be deleted, searched or taken over, and certificates that hold control codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nondet import certificates as store
from nondet.certificates import certificates
from tests.test_cli import run  # noqa: F401 - a fixture

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> store.Certificates:
    """One certificate of this CPU, in a folder of the test's own, whose member has a control code in its name."""
    monkeypatch.setenv("NONDET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_instances", {})
    proofs = certificates("cpu")
    proofs.record("mine\x1b[31m:linear", "chain float32 M=1", True, "compared\x1b]0;title\x07 with the anchor")
    return proofs


def test_show_writes_no_control_codes(run: Run, kept: store.Certificates) -> None:  # noqa: F811 - the fixture
    """What a certificate calls its member could move the cursor or rename the window."""
    code, out, err = run("certify", "--show", "--device", "cpu")
    assert code == 0
    assert "mine" in out
    assert "\x1b]0" not in out + err
    assert "\x07" not in out + err
    assert "\x1b[31m:linear" not in out + err


def test_forget_in_a_folder_that_can_not_be_written_is_one_line(
    run: Run,  # noqa: F811 - the fixture
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
    run: Run,  # noqa: F811 - the fixture
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


def test_somebody_elses_side_file_is_not_taken_over(run: Run, tmp_path: Path) -> None:  # noqa: F811 - the fixture
    """RUN.traces.jsonl without its run: neither a fresh run nor --resume may write into it."""
    side = tmp_path / "mine.traces.jsonl"
    side.write_text("somebody's\n", encoding="utf-8")
    for more in ([], ["--resume"]):
        code, _, err = run("sample", "--n", "2", "--max-tokens", "2", "--out", str(tmp_path / "mine.jsonl"), *more)
        assert code == 2
        assert "mine.traces.jsonl exists" in err
        assert err.count("\n") == 1
    assert side.read_text(encoding="utf-8") == "somebody's\n"
