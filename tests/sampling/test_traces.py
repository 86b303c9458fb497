"""The side file: each distinct trace once, whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nondet.core.traces import Trace, TraceWriter, read_traces, trace_digest, traces_path
from nondet.errors import UnrecordableError, UserError


def trace(tokens: list[int], runner_up: list[int] | None = None) -> Trace:
    logprobs = b"\0" * 4 * len(tokens)
    digest = trace_digest(tokens, logprobs)
    return Trace(digest=digest, token_ids=tokens, logprobs=logprobs, runner_up=runner_up or [], text="x")


def piece(token: int) -> str:
    return f"<{token}>"


def test_traces_and_pieces_are_written_once(tmp_path: Path) -> None:
    """A trace met again, by another implementation or round, costs no second line."""
    run = tmp_path / "run.jsonl"
    writer = TraceWriter(run, resume=False, piece=piece)
    writer.write([trace([1, 2], [7, 8]), trace([1, 2], [7, 8])])
    writer.write([trace([1, 2]), trace([1, 3])])
    writer.close()
    traces, pieces = read_traces(run)
    assert [t.token_ids for t in traces.values()] == [[1, 2], [1, 3]]
    assert pieces == {i: f"<{i}>" for i in (1, 2, 3, 7, 8)}
    assert len(traces_path(run).read_bytes().splitlines()) == 4


def test_resuming_drops_a_torn_line_and_writes_it_again(tmp_path: Path) -> None:
    """A run killed in the middle of a line goes on as if that line had never been begun."""
    run = tmp_path / "run.jsonl"
    writer = TraceWriter(run, resume=False, piece=piece)
    writer.write([trace([1])])
    writer.write([trace([2])])
    writer.close()
    whole = traces_path(run).read_bytes()
    traces_path(run).write_bytes(whole[:-5])
    again = TraceWriter(run, resume=True, piece=piece)
    again.write([trace([1]), trace([2])])
    again.close()
    assert traces_path(run).read_bytes() == whole


def test_a_new_run_begins_a_new_side_file(tmp_path: Path) -> None:
    """--force leaves no traces of the run before."""
    run = tmp_path / "run.jsonl"
    TraceWriter(run, resume=False, piece=piece).write([trace([1])])
    TraceWriter(run, resume=False, piece=piece).close()
    assert read_traces(run) == ({}, {})


def test_resuming_without_the_side_file_is_refused(tmp_path: Path) -> None:
    """A run file whose side file is lost can't be gone on with: its completions would name nothing."""
    with pytest.raises(UserError, match="move the two together"):
        TraceWriter(tmp_path / "run.jsonl", resume=True, piece=piece)


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    """The disk filling up is the user's to mend, with a way to go on."""
    writer = TraceWriter(tmp_path / "run.jsonl", resume=False, piece=piece)

    class Full:
        def writelines(self, _: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer._stream.close()
    writer._stream = Full()  # type: ignore[assignment] # a stand-in for a stream on a full disk
    with pytest.raises(UserError, match="disk is full"):
        writer.write([trace([1])])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((b'"token_ids":[1,2]', b'"token_ids":[1,3]'), "digest"),
        ((b'"token_ids":[1,2]', b'"token_ids":[1,-2]'), "token_ids"),
        ((b'"token_ids":[1,2]', b'"token_ids":[1,99999999999999999999]'), "malformed in line 2"),
        ((b'"runner_up":[]', b'"runner_up":[5]'), "runner_up"),
        ((b'"margins":""', b'"margins":"AAA="'), "margins"),
        ((b'{"1":', b'{"one":'), "pieces"),
        ((b"<1>", b"\xff\xfe"), "malformed in line 1"),
    ],
)
def test_an_edited_side_file_is_named_by_line_and_field(
    tmp_path: Path, change: tuple[bytes, bytes], reason: str
) -> None:
    """What a trace holds is what its digest says, and every part of it is as long as its tokens."""
    run = tmp_path / "run.jsonl"
    writer = TraceWriter(run, resume=False, piece=piece)
    writer.write([trace([1, 2])])
    writer.close()
    whole = traces_path(run).read_bytes()
    assert read_traces(run)[0]
    assert change[0] in whole
    traces_path(run).write_bytes(whole.replace(*change))
    with pytest.raises(UserError, match=reason):
        read_traces(run)


def test_a_new_side_file_follows_no_link(tmp_path: Path) -> None:
    """Dangling or not: what a link of its name points to is neither made nor emptied; a resumed run's link stays."""
    run, elsewhere = tmp_path / "run.jsonl", tmp_path / "elsewhere"
    traces_path(run).symlink_to(elsewhere)
    with pytest.raises(UserError, match="link"):
        TraceWriter(run, resume=False, piece=piece)
    assert not elsewhere.exists()
    elsewhere.write_bytes(b"")
    TraceWriter(run, resume=True, piece=piece).close()
    assert traces_path(run).is_symlink()


def test_a_trace_that_no_reader_would_take_leaves_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither it nor those that came with it, nor pieces of either; the writer goes on."""
    monkeypatch.setattr("nondet.core.runfile.LINE_MOST", 2**18)
    run = tmp_path / "run.jsonl"
    writer = TraceWriter(run, resume=False, piece=piece)
    odd = [trace([1] * 2**17), trace([-1]), trace([2**31]), msgspec.structs.replace(trace([1]), margins=b"\0")]
    for bad in odd:
        with pytest.raises(UnrecordableError, match="its trace can't be recorded"):
            writer.write([trace([7]), bad])
        assert traces_path(run).read_bytes() == b""
    many = list(range(9000))
    writer.write([trace([7]), *(trace(many[i : i + 900]) for i in range(0, 9000, 900))])
    writer.close()
    traces, pieces = read_traces(run)
    assert len(traces) == 11
    assert sorted(pieces) == many


def test_long_texts_are_cut_and_counted(tmp_path: Path) -> None:
    """A text of megabytes, a token that reads as one: cut with how much there was, and two stay two."""
    run = tmp_path / "run.jsonl"
    writer = TraceWriter(run, resume=False, piece=lambda token: "y" * 5000 + str(token))
    writer.write([msgspec.structs.replace(trace([1, 2]), text="x" * 5_000_000)])
    writer.close()
    traces, pieces = read_traces(run)
    (text,) = (t.text for t in traces.values())
    assert text.startswith("x" * 2**20 + "… [5,000,000 characters, SHA-256 ")
    assert pieces[1].startswith("y" * 1000 + "… [5,001 characters")
    assert pieces[1] != pieces[2]
    assert traces_path(run).stat().st_size < 2**21
