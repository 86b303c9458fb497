"""`nondet mismatch` as a command: rollouts that are read, bad ones, a kill in the middle, gates, and what is said."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import pickle
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
import transformers

import nondet
from nondet.cli import main
from nondet.core.records import Run
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.mismatch import collect
from nondet.mismatch import trainer as trainer_module
from nondet.mismatch.rollouts import Rollout, read_rollouts
from nondet.sampling.model import LoadedModel, load_model
from nondet.verdict.findings import Finding
from nondet.verdict.gate import Outcome, decide, judge
from nondet.verdict.mismatch import pairs, removed
from tests.endpoint.honest import serving, text_of

SMALL = ["--n", "2", "--tokens", "6", "--threads", "1", "--device", "cpu", "--prompt", "Return a", "--prompt", "The"]


def lines(count: int = 6, tokens: int = 8, **changes: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        sampler = (-rng.exponential(1.0, tokens)).astype(np.float32)
        trainer = np.minimum(0, sampler + rng.normal(0, 0.01, tokens)).astype(np.float32)
        line = {"prompt_ids": [5, 6, 7], "completion_ids": rng.integers(0, 4096, tokens).tolist()}
        line |= {"sampler_logprobs": sampler.tolist(), "trainer_logprobs": trainer.tolist()} | changes
        made.append({name: value for name, value in line.items() if value is not None})
    return made


def written(path: Path, made: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in made), encoding="utf-8")
    return path


def found(folder: Path, made: list[dict[str, Any]], **options: Any) -> Run:
    """The run of these rollouts, read from a file."""
    path = written(folder / "r.jsonl", made)
    return nondet.find_mismatch(rollouts=path, out=folder / "m.jsonl", force=True, **options).records


def test_rollouts_with_both_sides_need_no_model(tmp_path: Path) -> None:
    [verdict] = judge(found(tmp_path, lines()))
    assert (verdict.impl, verdict.finding) == ("file", Finding.MISMATCH)
    assert "disagree in the logprob bits of 48 of 48 tokens (6 rollouts), K3 " in verdict.text
    assert "Hypotheses were not tested: that takes --model." in verdict.notes
    assert "The logprobs of the sampled tokens were compared, not the whole vocabulary." in verdict.notes
    trained = Path(__file__).parents[2] / "docs" / "evidence" / "cpu" / "trl-invariant.jsonl.gz"
    assert main(["report", str(tmp_path / "m.jsonl"), str(trained), "--out", str(tmp_path / "both.md")]) == 0
    told = (tmp_path / "both.md").read_text(encoding="utf-8")
    assert told.startswith("## Sampler and trainer differ\n"), "no kernel is blamed, for none was probed"
    [verdict] = judge(found(tmp_path, [line | {"trainer_logprobs": line["sampler_logprobs"]} for line in lines()]))
    assert verdict.finding == Finding.CLEAN
    assert "below 6.06% of tokens" in verdict.text


def sides(distance: np.ndarray, *, rounded: bool = False) -> list[dict[str, Any]]:
    """Rollouts of eight tokens whose trainer's logprobs are this far above the sampler's."""
    rng, made = np.random.default_rng(3), []
    for d in distance.reshape(-1, 8):
        sampler = torch.from_numpy(-0.2 - rng.exponential(1.0, 8)).float()
        sampler = sampler.bfloat16().float() if rounded else sampler
        made += lines(1, sampler_logprobs=sampler.tolist(), trainer_logprobs=(sampler.double().numpy() + d).tolist())
    return made


def even(n: int = 240, scale: float = 0.01) -> np.ndarray:
    return np.random.default_rng(5).normal(0.0, scale, n)


SHIFTED = sides(even(scale=1e-5))
for _line in SHIFTED:
    _line["sampler_logprobs"] = [*_line["sampler_logprobs"][1:], -0.7]
# what top-p leaves out, by up to 0.105, and rounding
CUT = sides(-0.105 * np.random.default_rng(4).random(240) + even(scale=1e-3))


def test_what_two_sides_show_without_a_model(tmp_path: Path) -> None:
    """A kind where they show one, none of what rounding does; what is next is the same command with the model."""
    for made, said in [
        (sides(even()), ""),
        (sides(even(), rounded=True), "Only the sampler's logprobs are all numbers of bfloat16"),
        (CUT, "the sampler gives each the larger"),
        (SHIFTED, "The sampler's logprobs stand one token early"),
    ]:
        [verdict] = judge(found(tmp_path, made))
        kinds = [note for note in verdict.notes if note.startswith("Kind")]
        assert [said in kind for kind in kinds] == [True] * bool(said)
        sure = "not rounding: " if made in (CUT, SHIFTED) else "rounding or not is not decided without --model: "
        assert verdict.text.startswith(sure)


def test_exports_of_prime_rl_are_read_by_their_mask(tmp_path: Path) -> None:
    """Tokens in between that a tool wrote are in the text, and in no figure."""
    mask = [False, True, True, False, True]
    line = {
        "token_ids": [1, 2, 3, 4, 5], "loss_mask": mask, "inference_logprobs": [0.0, -1.0, -2.0, 0.0, -3.0],
        "trainer_logprobs": [0.0, -1.0, -2.5, -9.0, -3.0], "entropy": [0.0] * 5,
    }  # fmt: skip
    (tmp_path / "token_exports" / "step_1").mkdir(parents=True)
    written(tmp_path / "token_exports" / "step_1" / "rank_0.jsonl", [line, line])
    run = nondet.find_mismatch(rollouts=tmp_path / "token_exports", out=tmp_path / "m.jsonl").records
    assert [r.drawn for r in run.mismatch_rollouts] == [[1, 2, 4]] * 2
    figures = pairs(run)[0].figures
    assert (figures.tokens, figures.differ) == (6, 2)


LOGPROBS = {"sampler": [-1.0, -2.0, -3.0], "trainer": [-1.5, -2.0, -3.0]}
ROWS: dict[str, dict[str, Any]] = {
    "TRL": {
        "prompt_ids": [0, 5, 6], "prompt_mask": [0, 1, 1], "completion_ids": [7, 8, 9, 4, 0],
        "completion_mask": [1, 1, 1, 1, 0], "tool_mask": [1, 1, 0, 1, 0],
        "sampling_per_token_logps": [-1.0, -2.0, -9.0, -3.0, 0.0], "old_per_token_logps": [-1.5, -2.0, -9.0, -3.0, 0.0],
    },
    "verl": {
        "prompts": [0, 5, 6], "responses": [7, 8, 9, 4, 0], "attention_mask": [0, 1, 1, 1, 1, 1, 1, 0],
        "response_mask": [1, 1, 0, 1, 0], "rollout_log_probs": [-1.0, -2.0, -9.0, -3.0, 0.0],
        "old_log_probs": [-1.5, -2.0, -9.0, -3.0, 0.0],
    },
    "slime": {
        "tokens": [5, 6, 7, 8, 9, 4], "response_length": 4, "loss_mask": [1, 1, 0, 1], "prompt": "text",
        "rollout_log_probs": [-1.0, -2.0, -9.0, -3.0], "log_probs": [-1.5, -2.0, -9.0, -3.0],
    },
    "slime's trainer": {
        "tokens": [5, 6, 7, 8, 9, 4], "response_lengths": 4, "loss_masks": [1, 1, 0, 1],
        "rollout_log_probs": [-1.0, -2.0, -9.0, -3.0], "log_probs": [-1.5, -2.0, -9.0, -3.0],
    },
    "prime-rl": {
        "token_ids": [5, 6, 7, 8, 9, 4], "loss_mask": [False, False, True, True, False, True],
        "inference_logprobs": [0.0, 0.0, -1.0, -2.0, -9.0, -3.0],
        "trainer_logprobs": [0.0, 0.0, -1.5, -2.0, -9.0, -3.0],
    },
    "SkyRL": {
        "prompt_token_ids": [5, 6], "response_ids": [7, 8, 9, 4], "loss_masks": [1, 1, 0, 1],
        "rollout_logprobs": [-1.0, -2.0, -9.0, -3.0], "trainer_logprobs": [-1.5, -2.0, -9.0, -3.0],
    },
}  # fmt: skip


def test_rows_of_each_trainer_are_read_by_its_own_names(tmp_path: Path) -> None:
    """All of them the same rollout: without padding, and a tool's token in no figure."""
    for name, row in ROWS.items():
        [rollout] = read_rollouts(written(tmp_path / "r.jsonl", [row]))
        assert (rollout.ids, rollout.drawn) == ([5, 6, 7, 8, 9, 4], [2, 3, 5]), name
        assert {side: getattr(rollout, side).tolist() for side in LOGPROBS} == LOGPROBS, name


def test_what_a_line_was_drawn_with_is_read(tmp_path: Path) -> None:
    """As engines write it: -1 and 0 are no top-k, and at temperature 0 nothing is drawn."""
    for given, wanted in [
        ({}, {}),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top-k": 20, "top-p": 0.95}),
        ({"temperature": 0, "top_k": 1}, {}),
        ({"min_p": 0.05}, {"min-p": 0.05}),
    ]:
        assert read_rollouts(written(tmp_path / "r.jsonl", lines(1, **given)))[0].setting == wanted


@pytest.mark.slow
def test_answers_of_a_server_need_token_ids_and_the_prompt_s_tokens(tmp_path, capsys, monkeypatch) -> None:
    """Of a server that gives ids each distinct answer is scored; without ids, or by another tokenizer, one line."""

    def asked(kind: str, prompt: str) -> int:
        run = tmp_path / f"{kind}{len(prompt)}.jsonl"
        arms = ["--arms", "solo=1,loaded=2", "--max-tokens", "8", "--prompt", prompt, "--out", str(run), "-q"]
        if not run.exists():
            with serving(kind) as server:
                assert main(["sample", "--endpoint", server.url, *arms]) == 0
        capsys.readouterr()
        return main(["mismatch", str(run), "--device", "cpu", "--threads", "1", "--out", f"{run}.m.jsonl", "-q"])

    assert asked("vllm", "#!") == 2
    assert re.search("a text is '.*' there and '.*' here, by another tokenizer", capsys.readouterr().err)
    monkeypatch.setattr(LoadedModel, "decode", lambda _, ids: text_of(ids))  # as if the toy had this one
    assert asked("vllm", "#!") == 0  # the toy counts letters, and here a letter is a token
    [pair] = pairs(read_run(tmp_path / "vllm2.jsonl.m.jsonl"))
    assert pair.impl == "server"
    assert pair.figures.tokens == 8
    assert asked("vllm", "Return a") == 2
    assert "prompt 1 has 8 tokens there and 2 here" in capsys.readouterr().err
    assert asked("openai", "#!") == 2
    assert "gave no token ids, its answers are known by their bytes" in capsys.readouterr().err


def test_steps_of_training_are_told_apart(tmp_path: Path) -> None:
    """K3 a step, in numbers and drawn; rollouts of one step have none."""
    made = [line | {"step": 10 * (i // 2)} for i, line in enumerate(lines())]
    made[4]["trainer_logprobs"] = [x - 1.0 for x in made[4]["trainer_logprobs"]]
    [pair] = pairs(found(tmp_path, made))
    assert [(b.low, b.tokens) for b in pair.steps] == [(0, 16), (10, 16), (20, 16)]
    assert pair.steps[2].k3 > 100 * pair.steps[1].k3
    assert sum(b.k3 * b.tokens for b in pair.steps) == pytest.approx(pair.figures.k3 * 48)
    assert main(["report", str(tmp_path / "m.jsonl"), "--out", str(tmp_path / "m.html"), "--quiet"]) == 0
    assert "K3 by step" in (tmp_path / "m.html").read_text(encoding="utf-8")
    assert pairs(found(tmp_path, lines()))[0].steps == []


def by_step(k3: Any, tokens: int = 64) -> list[dict[str, Any]]:
    """A rollout of every step, whose K3 is about this."""
    rng = np.random.default_rng(0)
    d = [(math.sqrt(2 * k) * rng.choice([-1.0, 1.0], tokens)).reshape(-1, 8) for k in k3]
    return [line | {"step": i} for i, each in enumerate(d) for line in sides(each)]


def test_weights_that_lag_behind_show_by_the_step(tmp_path: Path) -> None:
    """By n updates logprobs are farther off in n steps and no farther later; what scatters has no drift."""
    for behind in (1, 2, 4):
        k3 = [1e-6 + 1e-2 * (min(step, behind) / behind) ** 2 for step in range(12)]
        notes = " ".join(judge(found(tmp_path, by_step(k3)))[0].notes)
        assert f"a side's weights lag behind by about {behind} update" in notes
    growing = " ".join(judge(found(tmp_path, by_step([1e-6 + 1e-4 * step**2 for step in range(12)])))[0].notes)
    assert "K3 grows with the step, from 1.0e-06 to 9.2e-03: a side's weights lag behind." in growing
    rng = np.random.default_rng(1)
    for _ in range(20):
        assert "grows" not in " ".join(judge(found(tmp_path, by_step(1e-3 * rng.lognormal(0, 0.5, 12))))[0].notes)


@pytest.mark.nightly
@pytest.mark.slow
def test_where_it_begins_and_what_cures_it(tmp_path: Path) -> None:
    """The first call that diverges is named, and so is what one family of operators leaves."""
    arms = ["--arms", "stock,invariant:attention,invariant", "--out", str(tmp_path / "m.jsonl")]
    assert main(["mismatch", *SMALL, *arms]) == 0
    stock, part, cured = pairs(read_run(tmp_path / "m.jsonl"))
    assert cured.place is None
    notes = " ".join(judge(read_run(tmp_path / "m.jsonl"))[0].notes)
    assert re.search(f"First diverging call: .*{re.escape(stock.place.module)}", notes)
    assert f"Invariant:attention on both sides leaves {part.figures.differ} of" in notes
    assert "leaves 0 of 24 tokens, K3 0.0e+00" in notes


ONE = json.dumps(lines(1)[0])
BAD: dict[str, tuple[Any, str]] = {
    "no ids": (lines(1, completion_ids=None), r"line 1: no token ids: completion_ids is missing"),
    "no logprobs": (lines(1, sampler_logprobs=None), r"line 1: no logprobs: sampler_logprobs is missing"),
    "other length": (lines(1, sampler_logprobs=[-1.0]), r"line 1: sampler_logprobs has 1 entries for 8 tokens"),
    "below float32": (lines(1, sampler_logprobs=[-1e300] * 8), r"line 1: a logprob of the sampler is NaN or infinite"),
    "null": (lines(1, sampler_logprobs=[None] * 8), r"line 1: a logprob of the sampler is NaN or infinite"),
    "probabilities": (lines(1, sampler_logprobs=[0.5] * 8), r"above 0: is it a probability"),
    "vLLM's -infinity": (lines(1, sampler_logprobs=[-9999.0] * 8), r"logprob -9999; vLLM writes -9999 for -infinity"),
    "no prompt": (lines(1, prompt_ids=[]), r"prompt_ids is missing or empty"),
    "an id below 0": (lines(1, completion_ids=[-1] * 8), r"line 1: .*completion_ids"),
    "no trainer": (lines(1, trainer_logprobs=None), r"no trainer_logprobs, and no --model"),
    "no JSON": ("prompt,completion\n", r"line 1: "),
    "NaN": (ONE.replace('"sampler_logprobs": [', '"sampler_logprobs": [NaN, '), r"NaN or infinite"),
    "a name twice": (ONE.replace("{", '{"sampler_logprobs": [-1.0], ', 1), r"line 1: sampler_logprobs is there twice"),
    "twice, once escaped": (ONE.replace("{", r'{"st\u0065p": 3, "step": 4, ', 1), r"line 1: step is there twice"),
    "empty": ("", r"holds no rollouts"),
    "padding": (lines(2, sampler_logprobs=[0.0] * 8, trainer_logprobs=[0.0] * 8), r"of the sampler's logprobs are 0"),
    "verl's texts": ([{"input": "a", "output": "b", "step": 1}], r"line 1: only texts, as verl writes them"),
    "a mask of padding that is short": ([ROWS["verl"] | {"attention_mask": [1]}], r"attention_mask has 1 entries"),
    "all logprobs": ([ROWS["slime"] | {"rollout_log_probs": [0.0] * 7, "loss_mask": None}], "loss_mask has 0 entries"),
    "slime without": ([ROWS["slime"] | {"rollout_log_probs": None}], "no logprobs: rollout_log_probs is missing"),
    "no temperature": (lines(1, temperature=-1), r"line 1: temperature: .*-1"),
    "a mask of another length": ([ROWS["prime-rl"] | {"loss_mask": [True]}], r"loss_mask has 1 entries for 6"),
}  # fmt: skip


TEXT = "".join(json.dumps(line) + "\n" for line in lines()).encode()
PICKLE, PACKED = "is a pickle or another binary file, which is never read", "is packed, and its name"
NO_JSONL: list[tuple[bytes, str]] = [
    *((pickle.dumps(made, protocol), PICKLE) for made in (lines(1), lines(1)[0]) for protocol in range(6)),
    (pickle.dumps(pickle.Pickler, 0), PICKLE),
    (b"PK\x03\x04", PICKLE),  # an .npz, and torch.save
    (b"\x93NUMPY", PICKLE),
    (gzip.compress(TEXT, mtime=0), PACKED),
    (lzma.compress(TEXT), PACKED),
    *((TEXT.decode().encode(name), "is no UTF-8") for name in ("utf-16", "utf-16-be", "utf-32", "utf-32-be")),
    (TEXT.decode().encode("utf-16-le"), "is no UTF-8"),
    (json.dumps(lines()).encode(), "is one JSON array"),
    (TEXT.replace(b'"prompt_ids"', b'"name": "\xe9", "prompt_ids"'), "line 1: not UTF-8 text (byte "),
    (b"prompt,completion\n", "line 1: JSON is malformed"),
]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_bad_rollouts_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.jsonl"

    def refused(name: str) -> str:
        assert main(["mismatch", "--rollouts", str(tmp_path / name), "--out", str(out)]) == 2, name
        assert not out.exists()
        return capsys.readouterr().err.strip().splitlines()[-1]

    for name, (made, said) in BAD.items():
        text = made if isinstance(made, str) else "".join(json.dumps(line) + "\n" for line in made)
        (tmp_path / "bad.jsonl").write_text(text, encoding="utf-8")
        assert re.search(said, refused("bad.jsonl")), name
    for content, what in NO_JSONL:
        for name in ("rollouts.jsonl", "rollouts.pkl"):
            (tmp_path / name).write_bytes(content)
            assert what in refused(name)


def test_a_mark_packed_files_of_a_folder_and_names_that_are_there_twice_are_read(tmp_path: Path) -> None:
    """Rollouts of one name were taken for one, so that most of a file was in no figure."""
    made = [line | {"name": "problem 7"} for line in lines()]
    text = "".join(json.dumps(line) + "\n" for line in made).encode()
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text)
    (tmp_path / "step" / "b.jsonl.gz").write_bytes(gzip.compress(text))
    run = nondet.find_mismatch(rollouts=tmp_path / "step", out=tmp_path / "m.jsonl").records
    assert [r.tokens for r in run.mismatch_rollouts] == [8] * 12
    assert [r.name for r in run.mismatch_rollouts[:2]] == ["problem 7", "problem 7, line a.jsonl:2"]


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without rollouts, another tokenizer's tokens, a trainer that is none, a gate's limit on another run."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "step.pt").write_bytes(b"")
    path = written(tmp_path / "r.jsonl", lines(1, completion_ids=[99_999] * 8))
    run = Path(__file__).parents[2] / "docs" / "evidence" / "cpu" / "sample.jsonl.gz"
    for arguments, said in [
        (["mismatch", "--rollouts", str(tmp_path / "folder")], "holds no .jsonl, .jsonl.gz, .jsonl.xz file"),
        (["mismatch", "--rollouts", str(path), "--model", "embedded"], "has token 99999, and embedded knows 4096"),
        (["mismatch", "--arms", "invariant:attn"], "unknown operator family 'attn'"),
        (["mismatch", "--trainer", "dtype=int8"], "dtype='int8'"),
        (["mismatch", "--trainer", "colour=red"], "unknown key 'colour'"),
        (["mismatch", "--trainer", "micro=-1"], "micro='-1'"),
        (["mismatch", "--older", "random:qwen3-2x128", "--arms", "stock", "--n", "1", "--tokens", "2"], "--older"),
        (["gate", str(run), "--k3", "1"], "compared no sampler with a trainer, which thresholds are of"),
    ]:
        assert main([*arguments, *(["--out", str(tmp_path / "m.jsonl")] if arguments[0] == "mismatch" else [])]) == 2
        assert said in capsys.readouterr().err


WHOLE = ["mismatch", *SMALL, "--arms", "stock,invariant", "--quiet"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mismatch") / "m.jsonl"
    assert main([*WHOLE, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_the_embedded_model_differs_stock_and_not_invariant(whole: Path) -> None:
    """The invariant arm's forward has a gradient: what a trainer runs."""
    stock, invariant = judge(read_run(whole))
    assert (stock.finding, invariant.finding) == (Finding.MISMATCH, Finding.CLEAN)
    assert "Kind: numeric." in " ".join(stock.notes)
    assert re.match(r"rounding: .*; K3 to float32 [\d.e-]+, up to [\d.e-]+ by rounding$", stock.text)
    assert "Invariant on both sides leaves 0 of 24" in " ".join(stock.notes)
    assert "at 24 positions drawn by seed all 4,096 logits are the same, so KL is 0 there." in invariant.notes[0]
    kl = [pair.kl for pair in pairs(read_run(whole)) if len(pair.whole.differ) == 24]
    assert 0 < kl[0] < 1e-2
    assert kl[1] == 0


def of_positions(rows: dict[int, list[float]], dtype: torch.dtype) -> dict[tuple[str, int], torch.Tensor]:
    return {("r", place): torch.tensor(row, dtype=dtype) for place, row in rows.items()}


def test_whole_rows_are_compared_by_number_and_by_their_distributions() -> None:
    """Against KL by hand; a row that one side lacks is left out; a token that both exclude is no difference."""
    sampler = of_positions({3: [0.0, 1.0], 4: [2.0, -math.inf], 5: [1.0, 2.0]}, torch.bfloat16)
    trainer = of_positions({3: [0.0, 0.0], 4: [2.0, -math.inf], 6: [1.0, 2.0]}, torch.float32)
    found = collect.over_vocabulary("stock", sampler, trainer)
    assert (found.size, found.positions, found.differ) == (2, [3, 4], [1, 0])
    p = 1 / (1 + math.e)
    assert found.kl == pytest.approx([p * math.log(2 * p) + (1 - p) * math.log(2 - 2 * p), 0.0], rel=1e-12)
    assert collect.over_vocabulary("stock", sampler, {}) is None
    beyond_all = collect.over_vocabulary("stock", sampler, of_positions({3: [0.0, -math.inf]}, torch.float32))
    assert beyond_all.kl == [sys.float_info.max]


@pytest.mark.slow
def test_a_trainer_that_swaps_two_other_tokens_is_seen_by_whole_rows(tmp_path, monkeypatch, capsys) -> None:
    """The sampled tokens' logprobs have the very bits: the sum goes over the same numbers."""
    sound = trainer_module.predicting_rows

    def swapped(*args: Any) -> Any:
        logits, ids, counts = sound(*args)
        for row, token in zip(logits, ids.tolist(), strict=True):
            one, other = sorted(set(range(10)) - {token})[:2]
            row.data[[one, other]] = row.data[[other, one]]
        return logits, ids, counts

    monkeypatch.setattr(trainer_module, "predicting_rows", swapped)
    out = tmp_path / "m.jsonl"
    assert main(["mismatch", *SMALL, "--arms", "invariant", "--out", str(out), "--quiet"]) == 0
    run = read_run(out)
    [verdict] = judge(run)
    assert pairs(run)[0].figures.differ == 0
    assert verdict.finding == Finding.MISMATCH
    assert "agree in the logprob bits of 24 tokens (4 rollouts), and 24 of 24 rows" in verdict.text
    assert main(["gate", str(out), "--quiet", "--mismatch-bits", "0"]) == 3
    assert main(["gate", str(out), "--quiet"]) == 3
    assert "rows of other logits" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_bits(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(collect, "fit", Mock(side_effect=KeyboardInterrupt))
        assert main([*WHOLE, "--out", str(out)]) == 130
    assert read_run(out, allow_truncated=True).mismatch_rollouts
    assert main([*WHOLE, "--out", str(out), "--resume"]) == 0
    runs = read_run(out), read_run(whole)
    timeless = [[r for r in run.records() if r not in run.mismatch_costs] for run in runs]
    assert timeless[0] == timeless[1]


@pytest.mark.slow
def test_gates_of_a_run(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user's thresholds; there is no answer for what failed or was cut off."""
    gate = ["gate", str(whole), "--quiet"]
    assert main([*gate, "--mismatch-bits", "0"]) == 3
    assert main([*gate, "--mismatch-bits", "0", "--impl", "invariant"]) == 0
    assert main([*gate, "--k3", "0.015", "--mult-prob-error", "1.05"]) == 0
    assert main([*gate, "--k3", "1e-9"]) == 3
    assert "K3" in capsys.readouterr().out
    assert main(gate) == 3
    run = read_run(whole)
    bad = run.mismatch_rollouts[0].refused("out of memory")
    failed = msgspec.structs.replace(run, mismatch_rollouts=[*run.mismatch_rollouts[1:], bad])
    killed = msgspec.structs.replace(run, complete=False)
    for each, outcome in ((run, Outcome.OPEN), (failed, Outcome.NO_ANSWER), (killed, Outcome.NO_ANSWER)):
        assert decide(each, rate=0.1, confidence=0.95, by="load", limits={"k3": 0.015}).outcome == outcome


@pytest.mark.nightly
@pytest.mark.slow
def test_tokens_of_a_sampled_run_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An arm an implementation; drawn under invariant kernels they have the bits of an invariant trainer."""
    made = tmp_path / "s.jsonl"
    drawn: dict[str, Any] = {"temperature": 1.0, "seeds": 2, "load": "light", "threads": 1}
    nondet.sample(2, "Return a", impl=["stock-seeded", "invariant"], out=made, max_tokens=8, **drawn)
    run = nondet.find_mismatch(made, threads=1, out=tmp_path / "m.jsonl").records
    stock, invariant = judge(run)
    assert (stock.impl, stock.finding) == ("stock-seeded", Finding.MISMATCH)
    assert (invariant.impl, invariant.finding) == ("invariant", Finding.CLEAN)
    assert main(["mismatch", str(tmp_path / "m.jsonl"), "--out", str(tmp_path / "n.jsonl")]) == 2
    assert "holds no completions" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trainer_that_is_computed_divides_by_a_line_s_temperature(tmp_path: Path, monkeypatch: Any) -> None:
    """As trainers do; only the sampler's cuts are not theirs."""
    monkeypatch.setattr(collect, "fit", lambda *_: iter(()))
    made, model = lines(2, trainer_logprobs=None), load_model(None, "bfloat16", "cpu").model
    for given, heat in (({}, 1.0), ({"temperature": 0.5, "top_p": 0.9}, 0.5)):
        run = found(tmp_path, [line | given for line in made], model="embedded", threads=1)
        cold = [lambda x, ids, heat=heat: (x / heat).float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]] * 2
        texts = read_rollouts(tmp_path / "r.jsonl")
        wanted = trainer_module.score(model, texts, trainer_module.Spec(), formulas=cold)
        assert b"".join(r.trainer for r in run.mismatch_rollouts) == wanted.tobytes()


@pytest.mark.slow
def test_no_kind_is_said_of_a_few_tokens(tmp_path: Path) -> None:
    """Invented logprobs of two tokens: a temperature fits them, and was named."""
    made = lines(2, 1, completion_ids=[2], sampler_logprobs=[-0.5], trainer_logprobs=[-0.1])
    run = found(tmp_path, made, model="embedded", threads=1)
    assert any(removed(k) > 0.9 and k.left < k.floor for k in pairs(run)[0].kinds)
    [verdict] = judge(run)
    assert verdict.text.startswith("rounding or not is not decided of so few tokens: sampler and trainer disagree")
    assert [n for n in verdict.notes if n.startswith("Kind")] == [
        "Kind: not said of 2 tokens; any one value fits so few. It takes 16."
    ]


def test_the_trainer_has_the_kernels_of_the_arm_that_was_sampled() -> None:
    """Of an unseeded draw over invariant logits, too."""
    of = {name: collect.arm_of(name).trainer for name in ("invariant", "unseeded-invariant", "stock-seeded", "server")}
    assert of == {"invariant": True, "unseeded-invariant": True, "stock-seeded": False, "server": False}


@pytest.mark.parametrize("name", ["Granite", "Phi", "Cohere", "Gemma2"])
def test_a_float32_head_keeps_what_a_model_does_to_its_logits(name: str) -> None:
    """A scale, a bias, a soft cap: in a model of float32 such a head changes no bit."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    scaled = {"logits_scaling": 4.0} if name == "Granite" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **scaled)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for bias in (p for n, p in model.named_parameters() if n == "lm_head.bias"):
        torch.nn.init.normal_(bias)
    texts = [Rollout("r", [3, 4, 5, 6], [2, 3], np.zeros(2, np.float32))]
    plain, single = (trainer_module.score(model, texts, trainer_module.Spec(head=h)) for h in ("", "float32"))
    assert (plain.view(np.uint32) == single.view(np.uint32)).all()


def test_a_run_of_saved_rollouts_that_lacks_one_is_malformed(tmp_path: Path) -> None:
    """Its plan says how many each arm has, so that a last line that was mended is seen."""
    found(tmp_path, lines())
    out = tmp_path / "m.jsonl"
    first, *others, last = out.read_text(encoding="utf-8").splitlines()
    cut = [first, *others[1:], last.replace(f'"records":{len(others)}', f'"records":{len(others) - 1}')]
    out.write_text("\n".join(cut) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="5 of 6 mismatch-rollout of file, as planned"):
        read_run(out)
