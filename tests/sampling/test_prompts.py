"""Prompt sets: what each format gives, and that a bad row is named instead of being left out."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path

import pytest

from nondet.errors import UserError
from nondet.sampling import plan as module
from nondet.sampling.plan import Sampling, build_plan, load_prompts, parse_load

TEXTS = ["One, two", "a \u2028 separator and a\ttab", "déjà vu"]


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_every_format_gives_the_same_prompts(tmp_path: Path) -> None:
    """JSON lines, text, CSV with quotes and Parquet hold one set; a separator that is no line feed splits nothing."""
    import json

    files = [
        write(tmp_path, "a.txt", "\ufeff" + "\r\n".join(TEXTS)),
        write(tmp_path, "a.jsonl", "".join(json.dumps({"id": 1, "prompt": t}) + "\n" for t in TEXTS)),
        write(tmp_path, "bare.jsonl", "".join(json.dumps(t) + "\n" for t in TEXTS)),
        tmp_path / "a.csv",
    ]
    with files[-1].open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([["n", "prompt"], *([str(i), t] for i, t in enumerate(TEXTS))])
    for file in files:
        assert load_prompts(file) == TEXTS
    assert load_prompts(files[1])[2].place == "a.jsonl, line 3"
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet is optional")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": [1, 2, 3], "words": TEXTS}), tmp_path / "a.parquet")
    assert load_prompts(tmp_path / "a.parquet", "words") == TEXTS


def test_a_quoted_field_goes_over_lines_and_is_named_by_its_first(tmp_path: Path) -> None:
    """CSV rows are not lines: the row after a two-line prompt is still named rightly."""
    path = write(tmp_path, "a.csv", 'prompt,x\n"one\ntwo",1\nthree,2\n')
    assert load_prompts(path) == ["one\ntwo", "three"]
    assert [p.place for p in load_prompts(path)] == ["a.csv, line 2", "a.csv, line 4"]


BAD = [
    ("a.txt", "one\n\nthree\n", None, "a.txt, line 2: the prompt is empty"),
    ("a.txt", b"one\n\xff\n", None, "a.txt, line 2 is not UTF-8 text (its byte 0)"),
    ("a.txt", "one\n", "prompt", "has no columns"),
    ("a.txt", "", None, "holds no prompts"),
    ("a.txt", "x" * (4 * 2**20 + 1), None, "longer than 4 MiB"),
    ("a.txt", "a\x00b\n", None, "NUL"),
    ("a.md", "one", None, ".md"),
    ("a", "one", None, "without a suffix"),
    ("a.jsonl", '{"prompt": "a"}\n\n', None, "line 2 is empty"),
    ("a.jsonl", '{"prompt": "a"}\n{"prompt": ""}\n', None, "line 2: the prompt is empty"),
    ("a.jsonl", '{"prompt": "a"\n', None, "line 1 is no JSON"),
    ("a.jsonl", "[" * 100_000 + "\n", None, "line 1 is no JSON"),
    ("a.jsonl", "[1]\n", None, "no JSON object"),
    ("a.jsonl", '{"prompt": 3}\n', None, "int where the prompt should be"),
    ("a.jsonl", '{"prompt": null}\n', None, "no prompt"),
    ("a.jsonl", '{"prompt": "\\ud800"}\n', None, "half a character"),
    ("a.jsonl", '{"promt": "a", "x": 1}\n', None, "Did you mean promt?"),
    ("a.csv", "prompt,x\na,1\nb\n", None, "line 3 has 1 of 2 columns"),
    ("a.csv", "a,b\nc,d\n", "prompt", "no column 'prompt'"),
    ("a.csv", 'prompt\n"a\n', None, "a.csv, line 2"),
    ("a.parquet", "no parquet", None, "can't be read as Parquet"),
]


@pytest.mark.parametrize(("name", "data", "column", "said"), BAD, ids=[s for *_, s in BAD])
def test_a_bad_file_is_refused_and_the_row_named(
    tmp_path: Path, name: str, data: str | bytes, column: str | None, said: str
) -> None:
    """One line that says which row: a set that lost a prompt silently would be another set."""
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="Parquet is optional")
    with pytest.raises(UserError) as caught:
        load_prompts(write(tmp_path, name, data), column)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_million_rows_are_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is named, and no row beyond it is read; as many as the limit are taken."""
    monkeypatch.setattr(module, "PROMPTS_MOST", 50)
    assert len(load_prompts(write(tmp_path, "most.txt", "x\n" * 50))) == 50
    with pytest.raises(UserError, match="more than 50 prompts"):
        load_prompts(write(tmp_path, "million.txt", "x\n" * 51 + "\xff" * 1000))


def test_without_pyarrow_parquet_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other formats need nothing."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="needs pyarrow, which is not installed"):
        load_prompts(write(tmp_path, "a.parquet", "x"))


def test_prompts_take_turns(tmp_path: Path) -> None:
    """Each prompt's completions are spread over the rounds, n of each; greedy single prompts are planned as before."""

    def plan(**more: object) -> object:
        given = {"n": 4, "seed": 0, "max_new_tokens": 4, "context": 99, "encode": lambda _: [1, 2]}
        return build_plan(parse_load("others=1,targets=6,spread=4"), **(given | more))  # type: ignore[arg-type]

    several = plan(prompts=[[5], [6, 7], [8]])
    targets = [[r for r in requests if r.target] for requests in several.rounds]  # type: ignore[attr-defined]
    assert [Counter(r.subject for r in t) for t in targets] == [Counter({0: 2, 1: 2, 2: 2})] * 2
    assert {r.subject: r.prompt for t in targets for r in t} == {0: (5,), 1: (6, 7), 2: (8,)}
    seeded = plan(prompts=[[5], [6]], samplings=[Sampling(1.0, 0, 1.0, s) for s in (3, 9)])
    pairs = {r.subject: (r.prompt, r.sampling.seed) for t in seeded.rounds for r in t if r.target}  # type: ignore[attr-defined]
    assert pairs == {0: ((5,), 3), 1: ((5,), 9), 2: ((6,), 3), 3: ((6,), 9)}
    greedy, drawn = plan(prompts=[[5]]), plan(prompts=[[5]], samplings=[Sampling(1.0, 0, 1.0, 0)])
    assert plan(prompt=[5]).digest == greedy.digest != drawn.digest  # type: ignore[attr-defined]
