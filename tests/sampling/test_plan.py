"""The load plan: pure data, the same for one seed wherever it is drawn."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nondet.errors import UserError
from nondet.sampling import plan as module
from nondet.sampling.plan import PRESETS, Load, Sampling, build_plan, load_prompts, parse_load

TEXTS = ["".join(chr(97 + (i * i + j) % 26) for i in range(5000)) for j in range(3)]


def encode(text: str) -> list[int]:
    return [ord(c) for c in text[::3]]


def plan_of(load: Load, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "n": 25, "seed": 3, "prompts": [[1, 2, 3]], "max_new_tokens": 10, "context": 64, "encode": encode,
        "texts": TEXTS,
    }  # fmt: skip
    return build_plan(load, **(given | changes))


LOAD = parse_load("others=7,targets=10,spread=20,prompt=4-40,tokens=2-50")


def test_keys_change_the_default_or_the_preset_before_them() -> None:
    """Every preset named in the help can be asked for; a spec says what it changes and leaves the rest alone."""
    assert {name: parse_load(name) for name in ("none", "light", "default", "heavy")} == PRESETS
    load = parse_load("heavy, budget=512, prompt=5, sharing=off")
    assert (load.budget, load.prompt, load.sharing) == (512, (5, 5), False)
    assert load.others == PRESETS["heavy"].others
    assert parse_load("others=1").targets == PRESETS["default"].targets


def test_bad_specs_name_the_part_and_a_way_out() -> None:
    """Bad input is one clear line, never a traceback or a silent default."""
    numbers = "others= others=-1 others=1.5 others=٣ targets=0 budget=99999999 page=1 prompt=0-4 tokens=a-b"
    for spec, named in [
        *((spec, spec) for spec in numbers.split()),
        ("", "empty"),
        (" , ", "empty"),
        ("heavyy", "heavy"),
        ("other=3", "others"),
        ("others", "others=..."),
        ("prompt=9-4", "prompt=4-9"),
        ("sharing=yes", "sharing=on"),
        ("others=3,heavy", "must come first"),
        ("others=90000,targets=90000", "180000"),
    ]:
        with pytest.raises(UserError) as caught:
            parse_load(spec)
        assert named in str(caught.value)
        assert caught.value.hint


def test_rounds_hold_every_target_once_and_the_rest_in_the_last() -> None:
    """n completions are n completions, whatever the size of a round."""
    plan = plan_of(LOAD)
    assert [sum(r.target for r in requests) for requests in plan.rounds] == [10, 10, 5]
    names = [r.id for requests in plan.rounds for r in requests]
    assert len(set(names)) == len(names) == 25 + 3 * 7
    assert plan.targets == 25
    for requests in plan.rounds:
        assert [r.arrival_step for r in requests] == sorted(r.arrival_step for r in requests)
        assert all(0 <= r.arrival_step < 20 for r in requests)


def test_background_fits_the_ranges_and_the_context() -> None:
    """Lengths are mixed as asked for, and no request can overflow the model."""
    wide = plan_of(LOAD, n=400)
    others = [r for requests in wide.rounds for r in requests if not r.target]
    lengths = {len(r.prompt) for r in others}
    assert (min(lengths), max(lengths), len(lengths) > 20) == (4, 40, True)
    assert all(len(r.prompt) + r.max_new_tokens <= 64 for r in others)
    assert all(r.prompt == (1, 2, 3) for requests in wide.rounds for r in requests if r.target)
    for tokens_for in (lambda text: [1], lambda text: [7] * len(text)):  # very long tokens, very short ones
        assert {len(r.prompt) for r in plan_of(LOAD, encode=tokens_for).rounds[0] if not r.target} <= set(range(4, 41))


def test_seed_and_text_change_the_plan_and_its_digest() -> None:
    """The digest stands for the whole plan: a run is resumed only under an equal one, and with a larger n meets the
    same rounds. `--load none` needs no background text."""
    base = plan_of(LOAD)
    assert plan_of(LOAD).digest == base.digest
    assert plan_of(LOAD, seed=4).digest != base.digest
    assert plan_of(LOAD, texts=TEXTS[::-1]).digest != base.digest
    assert plan_of(LOAD, n=10).rounds[0] == base.rounds[0]
    assert all(r.target for requests in plan_of(PRESETS["none"], n=3, texts=None).rounds for r in requests)


@pytest.mark.slow
def test_hash_seed_does_not_matter() -> None:
    """Two interpreters with other hash seeds draw the same plan from Python's own documentation."""
    code = "from tests.sampling.test_plan import *; print(plan_of(LOAD, texts=None).digest)"
    environments = (os.environ | {"PYTHONHASHSEED": seed} for seed in ("1", "2"))
    digests = {subprocess.check_output([sys.executable, "-c", code], env=env) for env in environments}
    assert len(digests) == 1


# Prompt sets: what each format gives, and that a bad row is named instead of being left out.

PROMPTS = ["One, two", "a \u2028 separator and a\ttab", "déjà vu"]


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_every_format_gives_the_same_prompts(tmp_path: Path) -> None:
    """JSON lines, text, CSV with quotes and Parquet hold one set; a separator that is no line feed splits nothing."""
    files = [
        write(tmp_path, "a.txt", "\ufeff" + "\r\n".join(PROMPTS)),
        write(tmp_path, "a.jsonl", "".join(json.dumps({"id": 1, "prompt": t}) + "\n" for t in PROMPTS)),
        write(tmp_path, "bare.jsonl", "".join(json.dumps(t) + "\n" for t in PROMPTS)),
        tmp_path / "a.csv",
    ]
    with files[-1].open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([["n", "prompt"], *([str(i), t] for i, t in enumerate(PROMPTS))])
    for file in files:
        assert load_prompts(file) == PROMPTS
    assert load_prompts(write(tmp_path, "b.csv", 'prompt,x\n"one\ntwo",1\nthree,2\n')) == ["one\ntwo", "three"]
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet is optional")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": [1, 2, 3], "words": PROMPTS}), tmp_path / "a.parquet")
    assert load_prompts(tmp_path / "a.parquet", "words") == PROMPTS


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
    ("a.csv", 'prompt,x\n"a\nb",1\n"",2\n', None, "line 4: the prompt is empty"),
    ("a.csv", "a,b\nc,d\n", "prompt", "no column 'prompt'"),
    ("a.csv", 'prompt\n"a\n', None, "a.csv, line 2"),
    ("a.parquet", "no parquet", None, "can't be read as Parquet"),
]


def test_a_bad_file_is_refused_and_the_row_named(tmp_path: Path) -> None:
    """One line that says which row: a set that lost a prompt silently would be another set."""
    for name, data, column, said in BAD:
        if name.endswith(".parquet") and find_spec("pyarrow") is None:
            continue
        with pytest.raises(UserError) as caught:
            load_prompts(write(tmp_path, name, data), column)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_too_many_rows_or_no_pyarrow_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is named, and no row beyond it is read; as many as the limit are taken. Parquet needs pyarrow."""
    monkeypatch.setattr(module, "PROMPTS_MOST", 50)
    assert len(load_prompts(write(tmp_path, "most.txt", "x\n" * 50))) == 50
    with pytest.raises(UserError, match="more than 50 prompts"):
        load_prompts(write(tmp_path, "million.txt", "x\n" * 51 + "\xff" * 1000))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="needs pyarrow, which is not installed"):
        load_prompts(write(tmp_path, "a.parquet", "x"))


def test_prompts_take_turns() -> None:
    """Each prompt's completions are spread over the rounds, n of each; greedy single prompts are planned as before."""
    plan = partial(plan_of, parse_load("others=1,targets=6,spread=4"), n=4)
    several = plan(prompts=[[5], [6, 7], [8]])
    targets = [[r for r in requests if r.target] for requests in several.rounds]
    assert [Counter(r.subject for r in t) for t in targets] == [Counter({0: 2, 1: 2, 2: 2})] * 2
    assert {r.subject: r.prompt for t in targets for r in t} == {0: (5,), 1: (6, 7), 2: (8,)}
    seeded = plan(prompts=[[5], [6]], samplings=[Sampling(1.0, 0, 1.0, s) for s in (3, 9)])
    pairs = {r.subject: (r.prompt, r.sampling.seed) for t in seeded.rounds for r in t if r.target}
    assert pairs == {0: ((5,), 3), 1: ((5,), 9), 2: ((6,), 3), 3: ((6,), 9)}
    greedy, drawn = plan(prompts=[[5]]), plan(prompts=[[5]], samplings=[Sampling(1.0, 0, 1.0, 0)])
    assert greedy.digest != drawn.digest
