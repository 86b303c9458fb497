"""Run files from anywhere: whatever a byte or a field of one is changed into, a report comes out or one clear line."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from rich.console import Console

from nondet.commands.output import PipedConsole, put, say
from nondet.core.records import Completion, ContractAnswer, End, Record, Row, Served, ServerSeen, Traffic
from nondet.core.runfile import open_run, read_run
from nondet.core.traces import Trace, TraceWriter, trace_digest, traces_path
from nondet.errors import UserError
from nondet.reports import gate, html, markdown, terminal
from nondet.testing.messages import run_text
from nondet.testing.plugin import assert_open
from nondet.verdict.gate import decide, exit_code
from tests import build as factory
from tests.build import failed, row, run_of, sampled, summaries_of

SEEDS = factory.tiers([0], range(1, 8))
PER_SEED = 60

# What a field is replaced by: of its own type and of others, small and far out of range.
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 7, 10**6, 2**31, 2**53, 2**63, 10**30, -(2**40), 0.5, -0.5, 1e300, 1e-300,
    "", "x", "identical", "divergent", "run", "\x1b[31m", "\u202e", "\ud800", "0" * 16, "f" * 16, "A" * 5000,
    [], [0], [[0, 1, 1]], [[0, 10**9, 1]], [[5, 1, 1], [0, 1, 1]], [[0, 1]], [[-3, 2, 1]], {}, {"": 1}, {"a": [1]},
]  # fmt: skip


def samples(folder: Path) -> list[Path]:
    """One file of each kind that reports are made of."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, run in (
        ("probe", factory.run_of(*factory.h200_sweep(), factory.failed(case="row 0 of M rows, K=64 N=64, bell"))),
        ("bench", factory.bench_run((1, 16, 512))),
    ):
        path = folder / f"{name}.jsonl"
        records = [run.header, *run.records()]
        lines = [*records, End(records=len(records) - 1, seconds=1.0)]
        path.write_bytes(b"".join(factory.line(record) for record in lines))
        paths.append(path)
    factory.sampled(folder, n=12, length=24, failures=1, again=True)
    return [*paths, folder / "sample.jsonl"]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a decoded line."""
    out = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value[:6]) if isinstance(value, list) else ()
    for key, child in children:
        out += places(child, (*path, key))
    return out


def change_field(lines: list[bytes], rng: random.Random) -> None:
    number = rng.randrange(len(lines))
    record = json.loads(lines[number])
    path = rng.choice(places(record))
    parent = record
    for key in path[:-1]:
        parent = parent[key]
    action = rng.random()
    if action < 0.15:
        del parent[path[-1]]
    elif action < 0.3 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), rng.choice(VALUES))
    else:
        parent[path[-1]] = rng.choice(VALUES)
    lines[number] = json.dumps(record).encode()


def drop_line(lines: list[bytes], rng: random.Random) -> None:
    del lines[rng.randrange(len(lines))]


def double_line(lines: list[bytes], rng: random.Random) -> None:
    number = rng.randrange(len(lines))
    lines.insert(rng.randrange(len(lines) + 1), lines[number])


def swap_lines(lines: list[bytes], rng: random.Random) -> None:
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]


def change_bytes(lines: list[bytes], rng: random.Random) -> None:
    number = rng.randrange(len(lines))
    data = bytearray(lines[number])
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    lines[number] = bytes(data)


def nest(lines: list[bytes], rng: random.Random) -> None:
    number, depth = rng.randrange(len(lines)), rng.choice([20, 1000, 100_000])
    lines[number] = lines[number][:-1] + b',"extra":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"


MUTATIONS: list[tuple[int, Callable[[list[bytes], random.Random], None]]] = [
    (12, change_field), (1, drop_line), (1, double_line), (1, swap_lines), (3, change_bytes), (1, nest),
]  # fmt: skip


def mutate(path: Path, rng: random.Random) -> str:
    weights = [weight for weight, _ in MUTATIONS]
    mutation = rng.choices([m for _, m in MUTATIONS], weights)[0]
    lines = path.read_bytes().splitlines()
    mutation(lines, rng)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return mutation.__name__


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mutated_file_is_a_report_or_one_line(tmp_path: Path, seed: int) -> None:
    """No traceback, no hang, no control code: the reader checks once, and nothing behind it stumbles."""
    rng = random.Random(seed)  # noqa: S311 - mutations, not secrets
    originals = samples(tmp_path / "whole")
    refused = shown = 0
    lengths: list[int] = []
    for number in range(PER_SEED):
        original = rng.choice(originals)
        copy = tmp_path / original.name
        copy.write_bytes(original.read_bytes())
        target = copy
        if traces_path(original).exists():
            traces_path(copy).write_bytes(traces_path(original).read_bytes())
            target = rng.choice([copy, traces_path(copy)])
        what = mutate(target, rng)
        try:
            run = read_run(copy)
            reporter = rng.choice([html.render, markdown.render, on_terminal])
            page = reporter([run])
            exit_code(run, "divergent")
        except UserError as error:
            refused += 1
            lengths.append(len(str(error)) + 10**6 * str(error).count("\n"))
        except Exception as error:
            raise AssertionError(f"seed {seed}, mutation {number} ({what} of {target.name}): {error!r}") from error
        else:
            shown += 1
            assert "\x1b[31m" not in page
            assert "\u202e" not in page
    assert max(lengths) < 2000  # each is one line
    assert refused > PER_SEED // 4  # the mutations do reach what is checked
    assert shown > 2  # and some do no harm: the test's own files are good


def on_terminal(runs: list[Any]) -> str:
    console = Console(width=100, record=True, file=None, quiet=False, force_terminal=False, no_color=True)
    with console.capture() as captured:
        terminal.render(runs, console)
    return captured.get()


def test_the_files_themselves_are_whole(tmp_path: Path) -> None:
    """Unmutated, each of them makes all three reports."""
    paths = samples(tmp_path)
    assert [path.stem for path in paths] == ["probe", "bench", "sample"]
    for path in paths:
        run = read_run(path)
        assert html.render([run])
        assert markdown.render([run])
        assert on_terminal([run])


def edit(path: Path, place: int | str, **fields: Any) -> None:
    """Change the line of that index, or the first of that type."""
    lines = path.read_bytes().splitlines()
    kinds = [json.loads(line)["type"] for line in lines]
    number = place if isinstance(place, int) else kinds.index(place)
    record = json.loads(lines[number])
    record.update(fields)
    lines[number] = json.dumps(record).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")


def test_a_contradiction_names_line_and_field(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fields that don't fit each other, their plan or the side file are one line that says where."""
    for name, line, fields, reason in [
        ("probe", 1, {"labels": [0, 5]}, "line 2: labels"),
        ("probe", 1, {"class_sizes": [1, 1]}, "line 2: class_sizes"),
        ("probe", 1, {"kernels": [0]}, "line 2: kernels"),
        ("probe", 1, {"status": "splendid"}, "line 2: status"),
        ("probe", 1, {"status": "identical"}, "line 2: status"),
        ("probe", 1, {"axis": "sideways"}, "line 2: axis"),
        ("probe", 1, {"seconds": -1.0}, "line 2: seconds"),
        ("sample", "row", {"extra": {"requests": "run"}}, r"extra\.requests"),
        ("bench", "limit", {"rate": 0.0}, r"line \d+: rate"),
        ("bench", "cell", {"axis": "Z"}, r"line \d+: axis"),
        ("sample", 0, {"plan": {"prompts": "none"}}, r"line 1: plan\.prompts"),
        ("sample", 1, {"prompt": 3}, "line 2: prompt"),
        ("sample", 1, {"schedule": [[0, 10**12, 1]]}, "line 2: schedule"),
        ("sample", 1, {"schedule": [[-1, 2, 1]]}, "line 2: schedule"),
        ("sample", 1, {"trace": "zz"}, "line 2: trace"),
        ("sample", 1, {"request": "t000001"}, r"line 3: key.*twice"),
        ("sample", 1, {"tokens_digest": "0" * 16}, "tokens_digest"),
        ("sample", 1, {"n_tokens": 3}, "n_tokens"),
        ("sample", -1, {"records": 3}, "records"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        samples(tmp_path)
        path = tmp_path / f"{name}.jsonl"
        edit(path, line, **fields)
        with pytest.raises(UserError, match=reason):
            markdown.render([read_run(path)])


def test_records_that_were_deleted_or_doubled_are_missed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The end line counts the records, a round its completions, and no key is there twice."""
    for change in ["deleted", "doubled"]:
        tmp_path = tmp_path_factory.mktemp("case")
        paths = samples(tmp_path)
        assert len(paths) == 3
        for path in paths:
            lines = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(lines[:1] + (lines[1:2] * 2 if change == "doubled" else []) + lines[2:]))
            with pytest.raises(UserError, match="is malformed in line"):
                read_run(path)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line beyond every record of ours is not read to its end."""
    monkeypatch.setattr("nondet.core.runfile.LINE_MOST", 2**16)
    path = samples(tmp_path)[0]
    with path.open("ab") as stream:
        stream.write(b"[" + b"0," * 2**16)
    with pytest.raises(UserError, match="line of more than"):
        read_run(path)


# By the type of what is there: figures that are none, counts that count nothing, texts that no file takes.
ODD: dict[type, list[Any]] = {
    int: [-1, -(2**63), 2**24 + 1, 2**53 + 1, 2**63, 10**30],
    float: [-1.0, float("nan"), float("inf"), -1e308],
    str: ["\ud800", "", "\x00", "x" * 2**17],
    list: [[], [-1], [float("nan")], [[0, 1]], ["\udcff"] * 3],
    dict: [{}, {"a": -1}, {"a": float("inf")}, {"\ud800": 1}],
    type(None): [-1, float("nan")],
}


def odd(struct: Any, rng: random.Random) -> Any:
    """The same with one field, perhaps of a part of it, made odd."""
    name = rng.choice(struct.__struct_fields__)
    value = getattr(struct, name)
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(struct, **{name: odd(value, rng)})
    return msgspec.structs.replace(struct, **{name: rng.choice(ODD.get(type(value), [value]))})


def written_by_us(folder: Path) -> list[tuple[Any, list[Record]]]:
    """Headers, with records of every kind that reports are made of, a server's among them."""
    runs = [read_run(path) for path in samples(folder)]
    served = Served(sent=0.0, first=0.5, done=1.0, prompt_tokens=3, cached_tokens=0, completion_tokens=2, text="0" * 16)
    asked = [msgspec.structs.replace(c, impl="server", served=served) for c in runs[-1].completions]
    traffic = Traffic(pattern="p", concurrency=4, running_most=2.0, counters={"hits": 1.0}, fingerprints={"f": 1})
    rounds = [msgspec.structs.replace(r, impl="server", traffic=traffic) for r in runs[-1].rounds]
    said = [
        ServerSeen(
            impl="server", number=0, url="http://h", protocol="vllm", model="m", answered_as="m", listed=["m"],
            fingerprint="f", known_by="ids", logprobs=True,
        ),
        ContractAnswer(impl="server", question="seed", answer="yes", evidence="seen"),
    ]  # fmt: skip
    return [*((run.header, list(run.records())) for run in runs), (runs[-1].header, [*said, *asked, *rounds])]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every record goes through the reader's checks before it is written: it is there, is there as failed, or is said
    in one line and is not; in no case is what was written before it lost."""
    monkeypatch.setattr("nondet.core.runfile.LINE_MOST", 2**17)
    rng = random.Random(seed)  # noqa: S311 - mutations, not secrets
    ends, lines = {"as it was": 0, "as failed": 0}, []
    for header, records in written_by_us(tmp_path / "whole"):
        path = tmp_path / "run.jsonl"
        run = open_run(path, command=header.command, plan=header.plan, environment={}, force=True)
        wanted = []
        for record in records:
            made = odd(record, rng) if rng.random() < 0.4 else record
            try:
                written = run.write(made)
            except UserError as error:
                lines.append(str(error))
                continue
            wanted.append(written)
            ends["as it was" if written is made else "as failed"] += 1
            if written is not made:
                assert isinstance(written, Row | Completion)
                assert written.status == "error"
                assert written.key == made.key
        run.finish()
        read = read_run(path)
        assert read.complete
        assert sorted(r.key for r in read.records()) == sorted(r.key for r in wanted)
    assert min(*ends.values(), len(lines)) > 3, ends
    assert not [line for line in lines if "\n" in line or "no reader would take" not in line]


# Reports of extreme runs: deep trees, figures that are no numbers, many completions; in bounded time and memory.


def comb(impl: str, number: int) -> tuple[list[tuple[int, int]], int]:
    """Request i leaves the others at token i: every fork lies within the one before."""
    return ([(number, 11)] if impl == "stock" else []), 0


@pytest.mark.nightly
def test_six_hundred_nested_forks_are_a_page(tmp_path: Path) -> None:
    """A tree that nests deeper than Python recurses is drawn, cut, and none of it is lost in the figures."""
    run = sampled(tmp_path, n=600, length=640, impls=("stock",), variants=comb)
    (summary,) = summaries_of(run)
    assert len(summary.forks) >= 500
    assert sum(b.count for b in summary.forks[0].branches) == 600
    assert "<svg" in html.render([run])
    assert markdown.render([run])


@pytest.mark.parametrize("margin", [float("nan"), float("inf")])
def test_margins_that_are_no_numbers_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, margin: float
) -> None:
    """A model that computes NaN has NaN for margins: the page is made, and says that there is no figure."""
    write = TraceWriter.write

    def spoilt(self: TraceWriter, traces: list[Trace]) -> None:
        changed = []
        for t in traces:
            margins = np.full(len(t.token_ids), margin, dtype="<f4").tobytes()
            digest = trace_digest(t.token_ids, t.logprobs)
            assert digest == t.digest
            changed.append(Trace(digest=digest, token_ids=t.token_ids, logprobs=t.logprobs, margins=margins))
        write(self, changed)

    monkeypatch.setattr(TraceWriter, "write", spoilt)
    run = sampled(tmp_path, n=30, length=24)
    summary = summaries_of(run)[0]
    assert summary.first_fork is not None
    assert all(branch.margin_min is None for branch in summary.first_fork.branches)
    assert "not recorded" in html.render([run])


WORDS = [
    "::error::owned",
    "::set-output name=a::b",
    "::stop-commands::x",
    "##[error]owned",
    "##vso[task.x]",
    "at::mm",
    "a",
]


def commands(text: str) -> list[str]:
    """The lines that a CI's runner would obey: GitHub trims a line's beginning, and finds ##[ anywhere."""
    return [x for x in text.splitlines() if x.strip().startswith("::") or "##[" in x or "##vso[" in x]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_line_that_is_wrapped_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """Names and reasons of a run at many widths: on a terminal as it is a line begins with ::error, here none does."""
    rng = random.Random(seed)  # noqa: S311 - a test's inputs

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    rows = [failed(impl=words(3), case=words(6), reason=words(30)), row((0, 1, 1), impl=words(9), case=words(12))]
    run = run_of(*rows)
    for width in rng.sample(range(30, 140), 8):
        monkeypatch.setenv("COLUMNS", str(width))
        for verbose in (False, True):
            terminal.render([run], PipedConsole(), verbose=verbose)
    say(words(20))
    put(gate.text(decide(run, rate=0.1, confidence=0.95, by="load"), run))
    with pytest.raises(AssertionError) as caught:  # pytest shows it in the same log
        assert_open(run)
    assert "owned" in str(caught.value)
    assert commands(str(caught.value)) + commands(run_text(run)) == []
    seen = capsys.readouterr()
    assert "owned" in seen.out
    assert "error" in seen.err
    assert commands(seen.out) + commands(seen.err) == []
    raw = io.StringIO()
    for width in range(30, 140, 5):
        terminal.render([run], Console(file=raw, width=width), verbose=True)
    assert commands(raw.getvalue())


def test_json_on_stdout_is_the_same_and_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """##[ is found anywhere in a line, inside of JSON too: it is written as an escape, and reads as it was."""
    put([json.dumps({"a": "##[error] ##vso[x] #1"})], as_json=True)
    out = capsys.readouterr().out
    assert commands(out) == []
    assert json.loads(out) == {"a": "##[error] ##vso[x] #1"}


def test_junit_is_xml_whatever_a_run_holds() -> None:
    """No character that a parser refuses gets into the file: not by a name, a reason, nor what a header says."""
    for bad in [0, 8, 0xB, 0x1F, 0x7F, 0x85, 0x2028, 0xD800, 0xFFFE, 0xFFFF, 0x1FFFE]:
        text = f"a{chr(bad)}b]]>&<"
        run = run_of(failed(impl=text, case=text, reason=f"{text}\n{text}"), row((0, 1), impl=text, case=text))
        run.header = msgspec.structs.replace(run.header, command=text, started=text)
        xml = gate.junit(decide(run, rate=0.1, confidence=0.95, by="load"), run, 1.0)
        root = ElementTree.fromstring(xml.encode("utf-8"))  # noqa: S314 - written a line above
        assert "]]>&<" in str(root[0].get("timestamp"))
        assert any("]]>&<" in str(case.get("name")) for case in root.iter("testcase"))
