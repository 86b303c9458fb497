"""Run files from anywhere: whatever a byte or a field of one is changed into, a report comes out or one clear line.

Of every command there is one, kept or made here, cut down to a few records of each kind.
"""

from __future__ import annotations

import gzip
import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from rich.console import Console

from nondet.commands.output import PipedConsole, put, say
from nondet.core import runfile
from nondet.core.records import Completion, Row
from nondet.core.runfile import lines_of, open_run, read_run, traces_path, write_run
from nondet.diff import RunDiff
from nondet.errors import UserError
from nondet.reports import diff, gate, html, markdown, terminal
from nondet.testing.messages import run_text
from nondet.testing.plugin import assert_open
from nondet.trace import repro
from nondet.trace.replays import RecordedCall
from nondet.verdict.gate import decide, exit_code
from tests import build as factory
from tests.build import failed, header, line, row, run_of, sampled, summaries_of
from tests.endpoint import memory

SEEDS = factory.tiers([0], range(1, 8))
EACH = 12  # mutations of a file

# What a field is replaced by: of its own type and of others, small and far out of range.
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 7, 10**6, 2**31, 2**53, 2**63, 10**30, -(2**40), 0.5, -0.5, 1e300, 1e-300,
    "", "x", "identical", "divergent", "run", "\x1b[31m", "\u202e", "\ud800", "0" * 16, "f" * 16, "A" * 5000,
    [], [0], [[0, 1, 1]], [[0, 10**9, 1]], [[5, 1, 1], [0, 1, 1]], [[0, 1]], [[-3, 2, 1]], {}, {"": 1}, {"a": [1]},
]  # fmt: skip


EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
# The smallest kept runs that have each kind of record of their command.
KEPT = {
    "diagnose": "cpu/diagnose-fp8.jsonl.xz",
    "trace": "cpu/trace-embedded.jsonl",
    "trace of vLLM": "vllm/trace-cpu.jsonl.gz",
    "mismatch": "h200/mismatch.jsonl.gz",
    "rl": "cpu/trl-invariant.jsonl.gz",
    "certify": "cpu/certify-gradients.jsonl.gz",
    "embed": "cpu-xeon/embed.jsonl",
    "gate": "servers/transformers-serve/gate.jsonl",
    "seeds": "servers/transformers-serve/seeds.jsonl.gz",
    "axes": "cpu-xeon/ranks.jsonl.gz",
    "replay": "cpu/shrink.jsonl",
    "coverage": "vllm/coverage-gemma2.jsonl",
}
_EACH = 3  # records of a kind that are left


def cut(name: str, folder: Path) -> Path:
    """The run of that name with few records; what its plan counts on is left out, and the end counts what is left."""
    header, *lines, _ = (json.loads(line) for _, line, _ in lines_of(EVIDENCE / KEPT[name]))
    records, left = [], Counter[str]()
    for record in lines:
        kind = record["type"] + (record["impl"] if record["type"] == "mismatch-rollout" else "")
        left[kind] += 1
        if left[kind] <= (40 if kind in ("step", "axis") else _EACH) and kind != "round":
            records.append(record)
    for counted in ("texts", "steps", "scored"):
        header["plan"].pop(counted, None)
    whole = [header, *records, {"type": "end", "records": len(records), "seconds": 1.0}]
    path = folder / f"{name.replace(' ', '-')}.jsonl"
    if (side := traces_path(EVIDENCE / KEPT[name])).exists():
        traces_path(path).write_bytes(b"".join(line + b"\n" for _, line, _ in lines_of(side)))
    path.write_text("".join(json.dumps(record) + "\n" for record in whole), encoding="utf-8")
    return path


def made(folder: Path) -> list[Path]:
    probed = factory.run_of(*factory.h200_sweep(), factory.failed(case="row 0 of M rows, K=64 N=64, bell"))
    paths = [folder / f"{name}.jsonl" for name in ("probe", "bench")]
    for path, run in zip(paths, (probed, factory.bench_run((1, 16, 512))), strict=True):
        write_run(path, run)
    factory.sampled(folder, n=12, length=24, failures=1, again=True)
    return [*paths, folder / "sample.jsonl"]


def copied(path: Path, to: Path) -> Path:
    traces_path(to).unlink(missing_ok=True)
    for old, new in ((path, to), (traces_path(path), traces_path(to))):
        if old.exists():
            new.write_bytes(old.read_bytes())
    return to


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    out = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value[:6] if isinstance(value, list) else ())
    for key, child in children:
        out += places(child, (*path, key))
    return out


def change_field(lines: list[bytes], rng: random.Random) -> None:
    kinds = [json.loads(text)["type"] for text in lines]
    kind = rng.choice(sorted(set(kinds)))
    number = rng.choice([i for i, of in enumerate(kinds) if of == kind])
    record = json.loads(lines[number])
    *inner, last = rng.choice(places(record))
    parent = record
    for key in inner:
        parent = parent[key]
    action = rng.random()
    if action < 0.15:
        del parent[last]
    elif action < 0.25 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), rng.choice(VALUES))
    else:
        alike = [value for value in VALUES if type(value) is type(parent[last])]
        parent[last] = rng.choice(alike if alike and rng.random() < 0.6 else VALUES)
    lines[number] = json.dumps(record).encode()


def move_lines(lines: list[bytes], rng: random.Random) -> None:
    a, b, how = rng.randrange(len(lines)), rng.randrange(len(lines)), rng.randrange(3)
    if how == 0:
        del lines[a]
    elif how == 1:
        lines.insert(b, lines[a])
    else:
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


MUTATIONS = {change_field: 16, move_lines: 3, change_bytes: 3, nest: 1}


def captured(show: Callable[[Console], None]) -> str:
    console = Console(width=100, quiet=False, force_terminal=False, no_color=True)
    with console.capture() as text:
        show(console)
    return text.get()


def shown(path: Path, whole: Path, number: int) -> str:
    run, brief = read_run(path), {"verbose": False, "quiet": False}
    reporters: tuple[Callable[[], Any], ...] = (
        lambda: html.render([run]),
        lambda: markdown.render([run]),
        lambda: captured(lambda console: terminal.render([run], console)),
        lambda: gate.text(decide(run, rate=0.1, confidence=0.95, by="load"), run),
        lambda: captured(lambda to: diff.show(RunDiff(read_run(whole), run), ("a", "b"), {}, to, **brief)),
        lambda: exit_code(run, "divergent"),
    )
    text = reporters[number % len(reporters)]()
    return text if isinstance(text, str) else ""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["made", *KEPT])
def test_a_mutated_file_is_a_report_or_one_line(tmp_path: Path, name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")  # noqa: S311 - mutations, not secrets
    originals = made(tmp_path) if name == "made" else [cut(name, tmp_path)]
    lines_said, pages = list[str](), 0
    for whole in originals:
        for number in range(6):
            assert shown(whole, whole, number) or number > 2
        for number in range(EACH):
            target = path = copied(whole, tmp_path / "changed.jsonl")
            if traces_path(path).exists():
                target = rng.choice([path, traces_path(path)])
            [mutation] = rng.choices([*MUTATIONS], [*MUTATIONS.values()])
            lines = target.read_bytes().splitlines()
            mutation(lines, rng)
            target.write_bytes(b"\n".join(lines) + b"\n")
            try:
                page = shown(path, whole, number)
            except UserError as error:
                lines_said.append(str(error))
            except Exception as error:
                raise AssertionError(f"mutation {number} of {whole}: {mutation.__name__} of {target}") from error
            else:
                pages += 1
                assert "\x1b[31m" not in page
                assert "\u202e" not in page
    assert [text for text in lines_said if "\n" in text or len(text) > 2000] == []
    assert min(len(lines_said), pages) > 0, (lines_said, pages)  # some reach what is checked, some do no harm


def edit(path: Path, place: int | str, **fields: Any) -> None:
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    found = records[place] if isinstance(place, int) else next(r for r in records if r["type"] == place)
    found.update(fields)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def test_a_contradiction_names_line_and_field(tmp_path: Path) -> None:
    """Each limit of a field by itself: tests/core/test_records.py."""
    wholes = {path.stem: path for path in made(tmp_path)}
    wholes |= {name: cut(name, tmp_path) for name in ("diagnose", "mismatch", "embed", "certify")}
    for name, place, fields, reason in [
        ("probe", 1, {"labels": [0, 5]}, "line 2: labels"),
        ("probe", 1, {"status": "splendid"}, "line 2: status"),
        ("probe", 1, {"axis": "sideways"}, "line 2: axis"),
        ("sample", "row", {"extra": {"requests": "run"}}, r"extra\.requests"),
        ("bench", "cell", {"axis": "Z"}, r"line \d+: axis"),
        ("sample", 0, {"plan": {"prompts": "none"}}, r"line 1: plan\.prompts"),
        ("sample", 1, {"request": "t000001"}, r"line 3: key.*twice"),
        ("sample", 1, {"tokens_digest": "0" * 16}, "tokens_digest"),
        ("sample", 1, {"n_tokens": 3}, "n_tokens"),
        ("sample", -1, {"records": 3}, "records"),
        ("diagnose", "step", {"name": "fortune", "outcome": "skipped"}, r"line \d+: .*name"),
        ("diagnose", "step", {"name": "batch", "outcome": "no", "figures": {}}, "figures: an answer without n"),
        ("diagnose", "culprit", {"shapes": [{"0": [1]}, {}], "axes": {"0": ["tokens", ""]}}, "shapes: 0 has fewer"),
        ("mismatch", "mismatch-place", {"rows": [7]}, "rows: 1 numbers"),
        ("embed", 0, {"plan": {"cut": "s"}}, r"line 1: plan\.cut"),
        ("certify", "row", {"extra": {"left_at": 3}}, "left_at"),
        ("certify", "row", {"extra": {"first": {"at": 1}}}, "extra.first"),
    ]:
        path = copied(wholes[name], tmp_path / "changed.jsonl")
        edit(path, place, **fields)
        with pytest.raises(UserError, match=reason):
            markdown.render([read_run(path)])
    for name in ("probe", "bench", "sample"):  # deleted: the end counts records, a round its completions; or doubled
        path = wholes[name]
        lines = path.read_bytes().splitlines(keepends=True)
        for changed in (lines[2:], [lines[1], *lines[1:]]):
            path.write_bytes(b"".join([lines[0], *changed]))
            with pytest.raises(UserError, match="is malformed in line"):
                read_run(path)


def test_lists_without_end_are_refused_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes of a .gz would be gigabytes of empty lists."""
    bomb = line(header()) + line(row(extra={"x": [[]]})).replace(b"[[]]", b"[" + b"[]," * 300_000 + b"[]]") * 8
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(bomb))
    decoded: list[bytes] = []
    monkeypatch.setattr(runfile, "decode", lambda decoder, text: decoded.append(text) or decoder.decode(text))
    with pytest.raises(UserError, match="lists and objects by line 8"):
        list(lines_of(tmp_path / "bomb.jsonl.gz"))
    monkeypatch.setattr(runfile, "_NESTED_LEAST", 250_000)
    (tmp_path / "plain.jsonl").write_bytes(bomb)
    with pytest.raises(UserError, match="lists and objects by line 2"):
        read_run(tmp_path / "plain.jsonl")
    assert max(map(len, decoded)) < 10_000
    monkeypatch.setattr(runfile, "LINE_MOST", 2**16)
    (tmp_path / "plain.jsonl").write_bytes(line(header()) + b"[" + b"0," * 2**16)
    with pytest.raises(UserError, match="line of more than"):
        read_run(tmp_path / "plain.jsonl")


def test_tensors_of_a_script_on_a_full_disk_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own writer would raise an error of its own."""
    monkeypatch.setattr(Path, "write_bytes", mock.Mock(side_effect=OSError(28, "No space left on device")))
    call = RecordedCall(torch.nn.functional.linear, (torch.ones(2),), {}, {}, "", 0, 2, range(0), 0)
    named = SimpleNamespace(calls=(call, call), culprit=SimpleNamespace(call="linear", replays=(), sentence="s"))
    with pytest.raises(UserError, match=r"disk is full: .*\.inputs\.pt"):
        repro.write_and_run(tmp_path / "r.py", named)  # type: ignore[arg-type] # the parts of one that are read
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("nondet.core.runfile.LINE_MOST", 2**17)
    rng = random.Random(seed)  # noqa: S311 - mutations, not secrets
    ends, lines = {"as it was": 0, "as failed": 0}, []
    served = memory.planned({"solo": 9, "loaded": 9})
    wholes = [read_run(path) for path in made(tmp_path)]
    wholes.append(memory.sampled(tmp_path / "server.jsonl", memory.MemoryClient(), plan=served))
    for whole in wholes:
        path = tmp_path / "run.jsonl"
        run = open_run(path, command=whole.header.command, plan=whole.header.plan, environment={}, force=True)
        wanted = []
        for record in whole.records():
            changed = odd(record, rng) if rng.random() < 0.4 else record
            try:
                written = run.write(changed)
            except UserError as error:
                lines.append(str(error))
                continue
            wanted.append(written)
            ends["as it was" if written is changed else "as failed"] += 1
            if written is not changed:
                assert isinstance(written, Row | Completion)
                assert written.status == "error"
                assert written.key == changed.key
        run.finish()
        read = read_run(path)
        assert read.complete
        assert sorted(r.key for r in read.records()) == sorted(r.key for r in wanted)
    assert min(*ends.values(), len(lines)) > 3, ends
    assert not [line for line in lines if "\n" in line or "no reader would take" not in line]


@pytest.mark.nightly
def test_six_hundred_nested_forks_are_a_page(tmp_path: Path) -> None:
    run = sampled(tmp_path, n=600, length=640, impls=("stock",), variants=lambda _, number: ([(number, 11)], 0))
    (summary,) = summaries_of(run)
    assert summary.distinct_completions >= 500
    assert sum(b.count for b in summary.first_fork.branches) == 600
    assert "<svg" in html.render([run])
    assert markdown.render([run])


def test_margins_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    for margin in (float("nan"), float("inf")):
        run = sampled(tmp_path / str(margin), n=30, length=24, margin=margin)
        summary = summaries_of(run)[0]
        assert all(branch.margin_min is None for branch in summary.first_fork.branches)
        assert "not recorded" in html.render([run])


WORDS = [
    "::error::owned", "::set-output name=a::b", "::stop-commands::x", "##[error]owned", "##vso[task.x]", "at::mm", "a",
]  # fmt: skip


def commands(text: str) -> list[str]:
    """The lines that a CI's runner would obey: GitHub trims a line's beginning, and finds ##[ anywhere."""
    return [x for x in text.splitlines() if x.strip().startswith("::") or "##[" in x or "##vso[" in x]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_line_is_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a test's inputs

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    rows = [failed(impl=words(3), case=words(6), reason=words(30)), row((0, 1, 1), impl=words(9), case=words(12))]
    run, raw = run_of(*rows), io.StringIO()
    for width in rng.sample(range(30, 140), 4):
        monkeypatch.setenv("COLUMNS", str(width))
        for verbose in (False, True):
            terminal.render([run], PipedConsole(), verbose=verbose)
        terminal.render([run], Console(file=raw, width=width), verbose=True)
    say(words(20))
    put(gate.text(decide(run, rate=0.1, confidence=0.95, by="load"), run))
    with pytest.raises(AssertionError) as caught:  # pytest shows it in the same log
        assert_open(run)
    seen = capsys.readouterr()
    for text in (str(caught.value), run_text(run), seen.out, seen.err):
        assert "error" in text
        assert commands(text) == []
    assert commands(raw.getvalue())
    put([json.dumps({"a": "##[error] ##vso[x] #1"})], as_json=True)  # an escape in JSON, which reads as it was
    out = capsys.readouterr().out
    assert (commands(out), json.loads(out)) == ([], {"a": "##[error] ##vso[x] #1"})


def test_junit_is_xml_whatever_a_run_holds() -> None:
    for bad in [0, 8, 0xB, 0x1F, 0x7F, 0x85, 0x2028, 0xD800, 0xFFFE, 0xFFFF, 0x1FFFE]:
        text = f"a{chr(bad)}b]]>&<"
        run = run_of(failed(impl=text, case=text, reason=f"{text}\n{text}"), row((0, 1), impl=text, case=text))
        run.header = msgspec.structs.replace(run.header, command=text, started=text)
        xml = gate.junit(decide(run, rate=0.1, confidence=0.95, by="load"), run, 1.0)
        root = ElementTree.fromstring(xml.encode("utf-8"))  # noqa: S314 - written a line above
        assert "]]>&<" in str(root[0].get("timestamp"))
        assert any("]]>&<" in str(case.get("name")) for case in root.iter("testcase"))
