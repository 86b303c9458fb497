"""Run files: nothing written is lost, nothing that exists is overwritten, nothing foreign is taken for ours."""

from __future__ import annotations

import errno
import gzip
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from nondet.core.compare import error_against
from nondet.core.records import SCHEMA_VERSION, Row, Status
from nondet.core.runfile import RunWriter, disk_errors, open_run, read_run, traces_path, write_run
from nondet.core.traces import Trace, TraceWriter, read_traces, trace_digest
from nondet.errors import UnrecordableError, UserError
from tests import build as factory

ENVIRONMENT = {"torch": "2.13.0", "gpu": None, "num_threads": 2}


def row(case: str, **fields: Any) -> Row:
    return factory.row((0, 0), case=case, **fields)


def parted(case: str) -> Row:
    return factory.row((0, 0, 1), case=case, values=[1, 2, "prefill"])


def writer(path: Path, **options: Any) -> RunWriter:
    options = {"command": "probe", "plan": {"seed": 0, "impls": ("stock",)}, "environment": ENVIRONMENT, **options}
    return open_run(path, **options)


def finished(path: Path) -> Path:
    run = writer(path)
    run.write(parted("a"))
    run.write(row("b"))
    run.finish()
    return path


def test_a_run_in_memory_is_written_whole_and_only_where_nothing_is(tmp_path: Path) -> None:
    path, copy = finished(tmp_path / "deep" / "run.jsonl"), tmp_path / "copy.jsonl"
    run, before = read_run(path), path.read_bytes()
    assert (run.complete, run.rows, run.header.environment) == (True, [parted("a"), row("b")], ENVIRONMENT)
    write_run(copy, run)
    assert copy.read_bytes().splitlines()[1:-1] == before.splitlines()[1:-1]
    for refused in (lambda: writer(path), lambda: write_run(path, run)):
        with pytest.raises(UserError, match=r"exists.*--force"):
            refused()
        assert path.read_bytes() == before
    writer(path, force=True).close()
    assert read_run(path).rows == []
    run.rows = run.rows[:1]
    write_run(copy, run, force=True)
    assert (read_run(copy).complete, read_run(copy).rows) == (True, [parted("a")])


def test_what_is_not_our_run_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begins = b'{"format":"nondet-run","schema":'
    path = tmp_path / "run.jsonl"
    for content, said in [
        (None, "no run file at"),
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"hello\nworld\n", "is not a nondet run file"),
        (b'{"some": "json"}\n', "is not a nondet run file"),
        (b"[1, 2]\n", "is not a nondet run file"),
        (b"\xff\xfe\x00binary\n", "is not a nondet run file"),
        (begins + b"%d}\n" % (SCHEMA_VERSION + 1), "reads 3. Upgrade nondet."),
        (begins + b'"x"}\n', "reads 3. Upgrade nondet."),
        (begins + b'2,"type":"header"}\n', "from before 0.3.0"),
        (begins + b'3,"type":"header"}\n', "malformed in line 1"),
    ]:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=said) as caught:
            read_run(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="a folder"):
        read_run(tmp_path)
    monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(UserError, match=r"can't read .*run\.jsonl: Input/output error"):
        read_run(path)
    monkeypatch.setattr(Path, "stat", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(UserError, match="Permission denied"):
        read_run(path)


def test_a_cut_off_line_is_named_unless_allowed(tmp_path: Path) -> None:
    path = finished(tmp_path / "run.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(UserError, match=r"cut off in line 4.*--allow-truncated"):
        read_run(path)
    assert [r.case for r in read_run(path, allow_truncated=True).rows] == ["a", "b"]
    for torn in (40, whole.index(b"\n")):
        path.write_bytes(whole[:torn])
        for allowed in (False, True):
            with pytest.raises(UserError, match="cut off in line 1"):
                read_run(path, allow_truncated=allowed)


def test_a_full_disk_is_one_line_and_keeps_what_was_written(tmp_path: Path) -> None:
    """A run goes on with --resume; a page, a table and a script are made anew."""
    path = tmp_path / "run.jsonl"
    run, side = writer(path), TraceWriter(path, resume=False, piece=piece)
    run.write(row("a"))
    no_space = OSError(errno.ENOSPC, "No space left on device")
    full = Mock(**dict.fromkeys(("write.side_effect", "writelines.side_effect"), no_space))
    run._stream = side._stream = full
    with pytest.raises(UserError, match=r"disk is full.*--resume"):
        run.write(row("b"))
    with pytest.raises(UserError, match="disk is full"):
        side.write([trace([1])])
    assert [r.case for r in read_run(path).rows] == ["a"]
    if Path("/dev/full").exists():
        with pytest.raises(UserError, match="disk is full"):
            writer(Path("/dev/full"), force=True)
    for name in ("r.html", "r.py"):
        with pytest.raises(UserError, match=f"the disk is full: {name}.*try again"), disk_errors(Path(name)):
            raise no_space


def test_a_packed_run_reads_as_the_plain_one(tmp_path: Path) -> None:
    """Python's lzma leaves out what stands behind its end. A second stream belongs to the format."""
    path = finished(tmp_path / "run.jsonl")
    whole = path.read_bytes()
    middle = whole.index(b"\n") + 1
    for end, pack in [(".gz", gzip.compress), (".xz", lzma.compress)]:
        packed = tmp_path / f"run.jsonl{end}"
        assert traces_path(packed).name == f"run.traces.jsonl{end}"
        for streams in (pack(whole), pack(whole[:middle]) + pack(whole[middle:])):
            packed.write_bytes(streams)
            assert read_run(packed).rows == read_run(path).rows
        wrong = [pack(whole)[:-9], b"plainly not packed"]
        wrong += [pack(whole) + behind for behind in (b"garbage", b"\xfd7zXZ\0 and no more", b"x")]
        for data in wrong:
            packed.write_bytes(data)
            with pytest.raises(UserError, match="can't unpack"):
                read_run(packed)


def test_a_row_that_no_reader_would_take_is_written_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has neither NaN nor infinity: an error that overflowed is None in the file."""
    path = tmp_path / "run.jsonl"
    run = writer(path)
    written = run.write(row("nan", extra={"bound": float("inf")}, seconds=float("nan")))
    assert isinstance(written, Row)
    assert (written.status, written.case) == (Status.ERROR, "nan")
    out, reference = torch.tensor([float("inf"), 1.0]), torch.tensor([1.0, 1.0], dtype=torch.float64)
    run.write(row("b", error=error_against(out, reference)))
    for bad in (row("b"), row("half \ud800")):
        before = path.read_bytes()
        with pytest.raises(UserError, match="no reader would take"):
            run.write(bad)
        assert path.read_bytes() == before
    length = len(msgspec.json.encode(row("a", reason="x" * 2000))) + 1
    for case, most in (("a", length), ("c", length - 1)):
        monkeypatch.setattr("nondet.core.runfile.LINE_MOST", most)
        run.write(row(case, reason="x" * 2000))
    monkeypatch.undo()
    run.finish()
    first, second, third, fourth = read_run(path).rows
    assert first.reason.startswith("it can't be recorded: ")
    assert (second.error.max_abs, second.error.relative_norm) == (None, None)
    assert (third.status, fourth.status) == (Status.IDENTICAL, Status.ERROR)


def asked(texts: list[str]) -> dict[str, Any]:
    return {"prompts": [{"text": text, "tokens": 0} for text in texts], "seed": 0}


def test_prompts_of_any_size_make_a_header_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 16 MiB each is cut, and says how long it was."""
    monkeypatch.setattr("nondet.core.runfile.LINE_MOST", 2**16)
    for plan in (asked(["a" * 50] * 1000), asked(["\ud800"]), {"a": float("nan"), "prompts": "none"}):
        with pytest.raises(UserError, match="no run file can hold this plan"):
            writer(tmp_path / "run.jsonl", command="sample", plan=plan)
    assert list(tmp_path.iterdir()) == []
    for texts, left, most in [
        (["x" * 100_000, "y\n" * 50_000], 10**6, 2**24),
        ([f"{i:05d}" + "a" * 35_000 for i in range(100)], 1000, 2**21),
        (["a" * 9_000_000, "b"], 1000, 2**22),
        ([f"{i:05d}" + "\x01" * 900 for i in range(100)], 200, 2**18),
        (["a" * 500] * 400, 200, 2**17),
        (["a" * 500] * 400, 0, 2**16),
    ]:
        path = tmp_path / "run.jsonl"
        monkeypatch.setattr("nondet.core.runfile._PROMPTS_MOST", most)
        monkeypatch.setattr("nondet.core.runfile.LINE_MOST", 2 * most)
        writer(path, command="sample", plan=asked(texts), force=True).close()
        writer(path, command="sample", plan=asked(texts), resume=True).finish()
        shown = [p["text"] for p in read_run(path).header.plan["prompts"]]
        assert len(shown) == len(texts)
        begun = [a if len(a) <= left else f"{a[:left]}… [{len(a):,} characters, SHA-256 " for a in texts]
        assert [b[: len(a)] for a, b in zip(begun, shown, strict=True)] == begun
        assert len(set(shown)) == len(set(texts))


def test_a_half_finished_run_of_an_older_nondet_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.3.0 wrote whole prompts and whole addresses into headers: the same command is still the same plan."""
    path = tmp_path / "run.jsonl"
    servers = [{"impl": "server", "url": "https://gateway.example/t/hunter2-hunter2", "model": "m"}]
    plan = {**asked(["a" * 900, "b"]), "endpoint": {"servers": servers, "protocol": "auto"}}
    with monkeypatch.context() as old:
        old.setattr("nondet.core.runfile._bounded", lambda plan: plan)
        writer(path, command="sample", plan=plan).close()
    assert b"hunter2" in path.read_bytes()
    monkeypatch.setattr("nondet.core.runfile._PROMPTS_MOST", 500)
    writer(path, command="sample", plan=plan, resume=True).close()
    moved = {"endpoint": {"servers": [{**servers[0], "url": "https://gateway.example/t"}]}}
    for other in (asked(["a" * 901, "b"]), moved):
        with pytest.raises(UserError, match="other options"):
            writer(path, command="sample", plan={**plan, **other}, resume=True)


def trace(tokens: list[int], runner_up: Sequence[int] = ()) -> Trace:
    digest, logprobs = trace_digest(tokens, bytes(4 * len(tokens))), bytes(4 * len(tokens))
    return Trace(digest=digest, token_ids=tokens, logprobs=logprobs, runner_up=[*runner_up], text="x")


def piece(token: int) -> str:
    return f"<{token}>"


def with_traces(run: Path, *parts: list[Trace], resume: bool = False, piece: Callable[[int], str] = piece) -> None:
    writer = TraceWriter(run, resume=resume, piece=piece)
    for part in parts:
        writer.write(part)
    writer.close()


def test_a_new_run_begins_a_new_side_file_and_a_resumed_one_needs_it(tmp_path: Path) -> None:
    """Completions of a run whose side file is lost would name nothing."""
    run = tmp_path / "run.jsonl"
    with_traces(run, [trace([1, 2], [7, 8]), trace([1, 2], [7, 8])], [trace([1, 2]), trace([1, 3])])
    traces, pieces = read_traces(run)
    assert [t.token_ids for t in traces.values()] == [[1, 2], [1, 3]]
    assert pieces == {i: f"<{i}>" for i in (1, 2, 3, 7, 8)}
    whole = traces_path(run).read_bytes()
    assert len(whole.splitlines()) == 4
    traces_path(run).write_bytes(whole[:-5])
    with_traces(run, [trace([1, 2]), trace([1, 3])], resume=True)
    assert traces_path(run).read_bytes() == whole
    with_traces(run)
    assert read_traces(run) == ({}, {})
    traces_path(run).unlink()
    with pytest.raises(UserError, match="move the two together"):
        with_traces(run, resume=True)


def test_an_edited_side_file_is_named_by_line_and_field(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    for change, reason in [
        ((b'"token_ids":[1,2]', b'"token_ids":[1,3]'), "digest"),
        ((b'"token_ids":[1,2]', b'"token_ids":[1,-2]'), "token_ids"),
        ((b'"token_ids":[1,2]', b'"token_ids":[1,99999999999999999999]'), "malformed in line 2"),
        ((b'"runner_up":[]', b'"runner_up":[5]'), "runner_up"),
        ((b'"margins":""', b'"margins":"AAA="'), "margins"),
        ((b'{"1":', b'{"one":'), "pieces"),
        ((b"<1>", b"\xff\xfe"), "malformed in line 1"),
    ]:
        with_traces(run, [trace([1, 2])])
        whole = traces_path(run).read_bytes()
        assert read_traces(run)[0]
        assert change[0] in whole
        traces_path(run).write_bytes(whole.replace(*change))
        with pytest.raises(UserError, match=reason):
            read_traces(run)


def test_a_trace_that_no_reader_would_take_leaves_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.undo()
    long = msgspec.structs.replace(trace([1, 2]), text="x" * 5_000_000)
    with_traces(run, [long], piece=lambda token: "y" * 5000 + str(token))
    traces, pieces = read_traces(run)
    assert traces[long.digest].text.startswith("x" * 2**20 + "… [5,000,000 characters, SHA-256 ")
    assert pieces[1].startswith("y" * 1000 + "… [5,001 characters")
    assert pieces[1] != pieces[2]
