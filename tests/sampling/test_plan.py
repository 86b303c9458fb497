"""The load plan: pure data, the same for one seed wherever it is drawn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from nondet.errors import UserError
from nondet.sampling.plan import PRESETS, Load, build_plan, parse_load

TEXTS = ["".join(chr(97 + (i * i + j) % 26) for i in range(5000)) for j in range(3)]


def encode(text: str) -> list[int]:
    return [ord(c) for c in text[::3]]


def plan_of(load: Load, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "n": 25, "seed": 3, "prompt": [1, 2, 3], "max_new_tokens": 10, "context": 64, "encode": encode, "texts": TEXTS
    }  # fmt: skip
    return build_plan(load, **(given | changes))


LOAD = parse_load("others=7,targets=10,spread=20,prompt=4-40,tokens=2-50")


def test_presets_parse_to_themselves() -> None:
    """Every preset named in the help can be asked for."""
    assert {name: parse_load(name) for name in ("none", "light", "default", "heavy")} == PRESETS


def test_keys_change_the_default_or_the_preset_before_them() -> None:
    """A spec says what it changes and leaves the rest alone."""
    load = parse_load("heavy, budget=512, prompt=5, sharing=off")
    assert (load.budget, load.prompt, load.sharing) == (512, (5, 5), False)
    assert load.others == PRESETS["heavy"].others
    assert parse_load("others=1").targets == PRESETS["default"].targets


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("", "empty"),
        (" , ", "empty"),
        ("heavyy", "heavy"),
        ("other=3", "others"),
        ("others", "others=..."),
        ("others=", "others="),
        ("others=-1", "others=-1"),
        ("others=1.5", "others=1.5"),
        ("targets=0", "targets=0"),
        ("budget=99999999", "budget=99999999"),
        ("page=1", "page=1"),
        ("prompt=9-4", "prompt=4-9"),
        ("prompt=0-4", "prompt=0-4"),
        ("tokens=a-b", "tokens=a-b"),
        ("sharing=yes", "sharing=on"),
        ("others=3,heavy", "must come first"),
        ("others=٣", "others=٣"),
        ("others=90000,targets=90000", "180000"),
    ],
)
def test_bad_specs_name_the_part_and_a_way_out(spec: str, named: str) -> None:
    """Bad input is one clear line, never a traceback or a silent default."""
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
    assert min(lengths) == 4
    assert max(lengths) == 40
    assert len(lengths) > 20
    assert all(len(r.prompt) + r.max_new_tokens <= 64 for r in others)
    assert all(r.prompt == (1, 2, 3) for requests in wide.rounds for r in requests if r.target)


def test_a_round_does_not_depend_on_the_rounds_before_it() -> None:
    """A resumed run, or one with a larger n, meets the same rounds."""
    assert plan_of(LOAD, n=10).rounds[0] == plan_of(LOAD, n=25).rounds[0]


def test_seed_and_text_change_the_plan_and_its_digest() -> None:
    """The digest stands for the whole plan: a run is resumed only under an equal one."""
    base = plan_of(LOAD)
    assert plan_of(LOAD).digest == base.digest
    assert plan_of(LOAD, seed=4).digest != base.digest
    assert plan_of(LOAD, texts=TEXTS[::-1]).digest != base.digest


def test_no_load_needs_no_text() -> None:
    """`--load none` runs alone, without any background text."""
    plan = plan_of(PRESETS["none"], n=3, texts=None)
    assert all(r.target for requests in plan.rounds for r in requests)


@pytest.mark.parametrize("tokens_for", [lambda text: [1], lambda text: [7] * len(text)])
def test_any_tokenizer_fills_a_prompt(tokens_for: Callable[[str], list[int]]) -> None:
    """A tokenizer with very long or very short tokens still gives prompts of the drawn length."""
    others = [r for r in plan_of(LOAD, encode=tokens_for).rounds[0] if not r.target]
    assert {len(r.prompt) for r in others} <= set(range(4, 41))


def test_hash_seed_does_not_matter() -> None:
    """Two interpreters with other hash seeds draw the same plan from Python's own documentation."""
    code = (
        "from nondet.sampling.plan import *\n"
        "p = build_plan(parse_load('others=5,targets=4'), n=8, seed=1, prompt=[1], max_new_tokens=4, context=99,"
        " encode=lambda t: [ord(c) for c in t])\n"
        "print(p.digest)"
    )
    digests = set()
    for hash_seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        digests.add(done.stdout)
    assert len(digests) == 1
