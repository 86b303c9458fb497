"""Reinforcement learning in small: what a step records, that a killed run goes on with its bits, what is said of it."""

import itertools
import json
import math
import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import safetensors
import torch

import nondet
from nondet.cli import main
from nondet.core.records import Header, Run, TrainingStep
from nondet.core.runfile import read_run, write_run
from nondet.errors import UserError
from nondet.mismatch import grpo
from nondet.mismatch.arms import ARMS, TASKS, balanced, summed
from nondet.mismatch.trainer import rounded_to_fp8, weights_changed
from nondet.reports import gate
from nondet.sampling.model import load_model
from nondet.verdict.findings import Finding
from nondet.verdict.gate import decide, exit_code, judge
from nondet.verdict.mismatch import courses
from tests.sampling.conftest import write_tiny_model

SMALL = "--steps 3 --prompts 2 --group 3 --tokens 6 --lr 1e-2 --threads 1 --device cpu --quiet".split()  # noqa: SIM905
EXACT = ("--mismatch-bits", "0", "--k3", "0", "--mult-prob-error", "1")


@pytest.fixture(autouse=True)
def _earning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights hardly ever write parentheses: here a text earns by its length, so that there is a gradient."""
    task = TASKS["parentheses"]._replace(reward=lambda _, text: len(text) % 5 / 4)
    monkeypatch.setitem(TASKS, "parentheses", task)


def settings(**changes: Any) -> grpo.Settings:
    given: dict[str, Any] = {
        "arms": ("stock",), "seed": 0, "seeds": 1, "steps": 3, "task": "parentheses", "groups": 2, "group": 3,
        "tokens": 6, "lr": 1e-2, "epochs": 1, "micro": 0, "cap": 2.0, "rollouts": "",
    }  # fmt: skip
    return grpo.Settings(**given | changes)


def timeless(path: Path) -> list[TrainingStep]:
    return [msgspec.structs.replace(r, sample_seconds=0, train_seconds=0) for r in read_run(path).training_steps]


def test_rewards_and_prompts() -> None:
    texts = ("f(a)", "()", "(a(b)c)", "no pair", "(", ")(", "(a)) (", "(a) (")
    assert [balanced("", text) for text in texts] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert [summed("17+25=", text) for text in ("42", " 42, and", "421", "is 42", "")] == [1, 1, 0, 0, 0]
    seven, again, eight = ({n: t.prompts(4, random.Random(s)) for n, t in TASKS.items()} for s in (7, 7, 8))  # noqa: S311
    assert seven == again
    assert all(len(prompts) == 4 for prompts in seven.values())
    assert seven["sums"] != eight["sums"]


def test_what_can_t_be_compared_is_an_error() -> None:
    with pytest.raises(ArithmeticError, match="a logprob is NaN"):
        grpo.compared(torch.tensor([-1.0, -0.5]), torch.tensor([-1.0, math.nan]))


@pytest.mark.slow
def test_a_run_of_every_arm(tiny_folder: Path, tmp_path: Path) -> None:
    """All but invariant differ, by their own kernels; the first tokens are those of the sampler and the seed."""
    path = tmp_path / "rl.jsonl"
    assert main(["rl", "--model", str(tiny_folder), *SMALL, "--steps", "2", "--out", str(path)]) == 0
    run = read_run(path)
    assert run.complete
    assert [(r.impl, r.step) for r in run.training_steps] == list(itertools.product(ARMS, range(2)))
    assert list(tmp_path.iterdir()) == [path], "checkpoints of finished arms go"
    of = {arm: [r for r in run.training_steps if r.impl == arm] for arm in ARMS}
    assert all((r.differ, r.k3, r.ratio_least, r.ratio_most) == (0, 0.0, 1.0, 1.0) for r in of["invariant"])
    assert main(["gate", str(path), "--quiet", "--impl", "invariant", *EXACT]) == 0
    assert main(["gate", str(path), "--quiet", *EXACT]) == 3
    assert all(any(r.differ for r in of[arm]) for arm in ("stock", "sampler-only"))
    assert of["stock"][0].tokens_digest == of["stock+tis"][0].tokens_digest
    assert all(r.tokens == 2 * 3 * 6 and r.entropy and r.grad_norm is not None for r in run.training_steps)
    assert of["sampler-only"][0].tokens_digest == of["invariant"][0].tokens_digest
    assert len({r.weights_digest for r in run.training_steps}) == 2 * len(ARMS)
    ran = {arm: {name[: len("trainer: replaced")] for name in of[arm][0].ran} for arm in ARMS}
    assert (ran["stock"], "trainer: replaced" in ran["invariant"]) == (set(), True)
    assert "sampler: replaced" in ran["sampler-only"]
    assert not any(name.startswith("trainer") for name in ran["sampler-only"])
    verdicts = {v.impl: v for v in judge(run)}
    assert verdicts["invariant"].finding == Finding.CLEAN
    assert verdicts["invariant"].text.startswith("no divergence observed: KL 0 in 2 of 2 steps (0 of 72 tokens)")
    assert verdicts["stock"].finding == Finding.MISMATCH


def dying(at: int, monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
    """That error, or Ctrl-C, in the call of that number of a step."""
    real, calls = grpo.step_of, iter(range(1, 99))

    def step_of(*args: Any) -> TrainingStep:
        if next(calls) == at:
            raise error or KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(grpo, "step_of", step_of)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_bits(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between steps, and between a checkpoint and its record: the same tokens, weights and figures."""
    more = ["--arms", "stock,stock+tis", "--epochs", "2", "--micro", "4", "--tokens", "4", "--steps", "2"]
    asked = ["rl", "--model", str(tiny_folder), *SMALL, *more]
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert main([*asked, "--out", str(whole)]) == 0
    with monkeypatch.context() as patched:
        dying(2, patched)
        assert main([*asked, "--out", str(cut)]) == 130
    checkpoint = grpo.checkpoint_path(cut, "stock", 0)
    assert checkpoint.exists()
    head, _ = cut.read_bytes().splitlines(keepends=True)
    cut.write_bytes(head)  # as if killed before the first record was written
    assert main([*asked, "--out", str(cut), "--resume"]) == 0
    assert timeless(cut) == timeless(whole)
    assert (checkpoint.exists(), read_run(cut).complete) == (False, True)


@pytest.mark.slow
def test_a_checkpoint_that_is_not_the_run_s_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 2; the run file stays as it was, an earlier run's checkpoint is not overwritten."""

    run = tmp_path / "a.jsonl"
    asked = ["rl", "--model", str(tiny_folder), *SMALL, "--arms", "stock", "--out", str(run)]
    path = grpo.checkpoint_path(run, "stock", 0)
    path.write_bytes(b"somebody's")
    assert main(asked) == 2
    assert path.read_bytes() == b"somebody's"
    with monkeypatch.context() as patched:
        full = safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        patched.setattr("safetensors.torch.save_file", Mock(side_effect=full))
        capsys.readouterr()
        assert main([*asked, "--force"]) == 2
        [said] = capsys.readouterr().err.strip().splitlines()
        assert "a.stock.0.safetensors can't be written: I/O error: No space left" in said
    with monkeypatch.context() as patched:
        dying(3, patched)
        assert main([*asked, "--force"]) == 130
    data, lines = path.read_bytes(), run.read_bytes()
    for checkpoint, records, wanted in [
        (bytes([*data[:-100], data[-100] ^ 1, *data[-99:]]), lines, "damaged"),
        (data[:1000], lines, "no checkpoint"),
        (data, lines.splitlines(keepends=True)[0], "checkpoint of step 1"),
        (None, lines, "not there"),
    ]:
        path.unlink()
        if checkpoint is not None:
            path.write_bytes(checkpoint)
        run.write_bytes(records)
        capsys.readouterr()
        assert main([*asked, "--resume"]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert [words in said for words in (wanted, str(path))] == [True, True]
        assert run.read_bytes() == records
    path.mkdir()
    assert main([*asked, "--resume"]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_rounded_rollouts_differ_and_leave_the_trainer_s_weights(tiny_folder: Path) -> None:
    """float8 weights for the sampler: K3 far above the kernels' floor, and the trainer's weights come back."""
    loaded = load_model(str(tiny_folder), "float32", "cpu")
    policy = grpo.Policy(loaded.model, 1e-3)
    before = [p.detach().clone() for p in policy.parameters]
    with weights_changed(policy.model, partial(rounded_to_fp8, scale="row")):
        assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters, strict=True))
        wide = next(p for p in policy.parameters if p.dim() == 2)
        assert all(len(row.unique()) < 256 for row in wide)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters, strict=True))
    plain = grpo.step_of(policy, loaded, settings(lr=1e-3), "stock", 0, 0)
    loaded = load_model(str(tiny_folder), "float32", "cpu")
    rounded = grpo.step_of(grpo.Policy(loaded.model, 1e-3), loaded, settings(lr=1e-3, rollouts="fp8"), "stock", 0, 0)
    assert rounded.k3 > 1e3 * max(plain.k3, 1e-12)


def test_requests_arrive_alike_in_every_step(tiny_folder: Path) -> None:
    """Equal lengths at equal steps of the engine have equal shapes; what is drawn is another."""
    loaded = load_model(str(tiny_folder), "float32", "cpu")
    (first, _), (later, _), (other, _) = (grpo.requests_of(settings(), loaded, *at) for at in ((0, 0), (0, 5), (1, 0)))
    arrivals = [r.arrival_step for r in first]
    assert len(set(arrivals)) > 1
    assert [r.arrival_step for r in later] == arrivals != [r.arrival_step for r in other]
    assert all(a.sampling != b.sampling for a, b in zip(first, later, strict=True))


def test_groups_of_one_reward_teach_nothing(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their advantage is exactly 0, those of one text are counted, and weights stay where no group has two rewards."""
    loaded = load_model(str(tiny_folder), "float32", "cpu")
    requests, texts = grpo.requests_of(settings(), loaded, 0, 0)
    rollouts = grpo.rollouts_of(grpo.run_requests(loaded, requests))
    task = TASKS["parentheses"]
    monkeypatch.setitem(TASKS, "parentheses", task._replace(reward=lambda *_: 1.0))
    advantages, got = grpo.advantages_of(settings(), loaded, rollouts, texts)
    assert got == {"reward": 1.0, "rollouts": 6, "groups": 2, "flat": 2, "alike": 0}
    assert advantages.tolist() == [0.0] * 6
    policy = grpo.Policy(loaded.model, 1e-2)
    before = [p.detach().clone() for p in policy.parameters]
    record = grpo.step_of(policy, loaded, settings(), "stock", 0, 0)
    assert (record.flat, record.grad_norm) == (2, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters, strict=True))
    answers = iter([0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    monkeypatch.setitem(TASKS, "parentheses", task._replace(reward=lambda *_: next(answers)))
    advantages, got = grpo.advantages_of(settings(), loaded, rollouts, texts)
    deviation = math.sqrt(1 / 3)
    expected = [x / (deviation + 1e-4) for x in (-2 / 3, 1 / 3, 1 / 3)]
    assert advantages.tolist() == pytest.approx([*expected, 0, 0, 0], rel=1e-5)
    assert got["flat"] == 1
    one = [rollouts[0]] * 3 + rollouts[3:]  # one group of one text
    answers = iter([1.0] * 6)
    assert grpo.advantages_of(settings(), loaded, one, texts)[1]["alike"] == 1


@pytest.mark.slow
def test_micro_batches_are_the_same_step_but_for_rounding(tiny_folder: Path) -> None:
    loaded = load_model(str(tiny_folder), "float32", "cpu")
    policy = grpo.Policy(loaded.model, 0.0)  # the weights stay
    steps = [grpo.step_of(policy, loaded, settings(micro=micro), "stock", 0, 0) for micro in (0, 2, 5)]
    assert steps[0].grad_norm
    assert [step.grad_norm for step in steps[1:]] == pytest.approx([steps[0].grad_norm] * 2, rel=1e-5)


@pytest.mark.slow
def test_a_failed_step_ends_its_arm_and_no_other(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying(2, monkeypatch, ArithmeticError("the norm of the gradient is nan"))
    path = tmp_path / "rl.jsonl"
    asked = ["rl", "--model", str(tiny_folder), *SMALL, "--steps", "2", "--arms", "stock,stock+tis", "--out", str(path)]
    assert main(asked) == 0
    run = read_run(path)
    assert [(r.impl, r.step, r.status) for r in run.training_steps][:3] == [
        ("stock", 0, "ok"), ("stock", 1, "error"), ("stock+tis", 0, "ok"),
    ]  # fmt: skip
    assert "norm of the gradient is nan" in next(v for v in judge(run) if v.impl == "stock").notes[0]
    lines = path.read_bytes()
    assert main([*asked, "--resume"]) == 0
    assert path.read_bytes().splitlines()[:-1] == lines.splitlines()[:-1], "a failed arm is not tried again"


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, said in [
        ("--arms stok", "unknown arm 'stok'. Did you mean stock"),
        ("--arms ,", "--arms ',' names none"),
        ("--task riddles", "unknown --task 'riddles'"),
        ("--group 1", "--group 1 makes no sense"),
        ("--lr 0", "--lr 0 makes no sense"),
        ("--lr nan", "--lr nan makes no sense"),
        ("--sampler int4", "unknown --sampler 'int4'"),
        ("--rollouts fp8", "It is --sampler now"),
        ("--prompts 9", "--prompts 9 makes no sense"),
        ("--tokens 2000", "exceed the model's context"),
        ("--resume", "--resume without --out"),
        ("--cap 0.5", "--cap 0.5 makes no sense"),
    ]:
        assert main(["rl", *words.split(), "--device", "cpu", "--quiet"]) == 2
        [error] = capsys.readouterr().err.strip().splitlines()
        assert said in error
    engine = {"use_transformers_continuous_batching": True, "_get_per_token_logps_and_entropies": None}
    two, one = (SimpleNamespace(accelerator=SimpleNamespace(num_processes=n), **engine) for n in (2, 1))
    plain = SimpleNamespace(use_transformers_continuous_batching=False)
    for given, out, said in [
        (SimpleNamespace(), "rl.jsonl", "can't watch this SimpleNamespace"),
        (plain, "rl.jsonl", "use_transformers_continuous_batching"),
        (two, "rl.jsonl", "this trainer has several"),
        (one, "rl.pt", "is not a .jsonl file"),
    ]:
        with pytest.raises(UserError, match=said):
            nondet.mismatch_of(given, out=tmp_path / out)
    assert list(tmp_path.iterdir()) == []


def step(impl: str, number: int, *, seed: int = 0, reward: float = 0.5, differ: int = 0, **more: Any) -> TrainingStep:
    apart: dict[str, Any] = {"k3": 1e-4, "ratio_least": 0.9, "ratio_most": 1.1} if differ else {}
    return TrainingStep(
        impl=impl, seed=seed, step=number, reward=reward, entropy=2.0, grad_norm=1.0, rollouts=6, groups=2, tokens=100,
        differ=differ, tokens_digest="0" * 16, weights_digest=f"{number:016x}", **apart | more,
    )  # fmt: skip


def run_of(*steps: TrainingStep, planned: int = 10, complete: bool = True) -> Run:
    plan = {"steps": planned, "groups": 2, "group": 3, "tokens": 6, "lr": 1e-4, "epochs": 1, "task": "parentheses"}
    header = Header(format="nondet-run", schema=3, command="rl", plan=plan, environment={}, started="2026-01-01")
    return Run(header=header, training_steps=list(steps), complete=complete)


def test_verdicts_say_in_how_many_steps() -> None:
    """And a bound where nothing differed, the steps without a difference where some did; --fail-on follows."""
    stock = [step("stock", i, differ=40 if i % 2 else 0) for i in range(10)]
    invariant = [step("invariant", i) for i in range(10)]
    mine, theirs = judge(run_of(*stock, *invariant))
    assert (mine.finding, theirs.finding) == (Finding.MISMATCH, Finding.CLEAN)
    assert "disagree in the logprob bits of 200 of 1,000 tokens in 10 steps, K3 0.0e+00 to 1.0e-04" in mine.text
    assert "KL 0 in 10 of 10 steps (0 of 1,000 tokens) (at 95%, one-sided: below 0.30% of tokens" in theirs.text
    failed = TrainingStep(impl="invariant", seed=0, step=10, status="error", reason="out of memory")
    runs = [run_of(*stock), run_of(*invariant), run_of(*invariant, complete=False), run_of(*invariant, failed)]
    assert [exit_code(run, "divergent")[0] for run in runs] == [3, 0, 1, 1]
    assert judge(run_of(failed))[0].finding == Finding.UNTESTED
    assert decide(run_of(*stock, *invariant), impls=["invariant"], rate=0.1, confidence=0.9, by="load").code == 0


def test_a_gate_goes_by_the_worst_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the means; of the bits by all of an arm. An arm that is within is no failure in JUnit's eyes."""
    steps = [step("stock", i, differ=40 if i % 2 else 0, mult_prob_error=1.01 if i % 2 else 1.0) for i in range(10)]
    steps[7] = step("stock", 7, differ=40, k3=2e-4, mult_prob_error=1.02)
    steps[3] = step("stock", 3, differ=40, mult_prob_error=1.06)
    steps[7], steps[5] = (msgspec.structs.replace(s, differ=n) for s, n in ((steps[7], 41), (steps[5], 39)))
    run = run_of(*steps, *(step("quiet", i, differ=1, k3=1e-9, mult_prob_error=1.0) for i in range(10)))
    killed = msgspec.structs.replace(run, complete=False)
    failed = run_of(*steps, TrainingStep(impl="quiet", seed=0, step=0, status="error", reason="out of memory"))
    limits: dict[str, Any]
    for limits, shut in [
        *(({name: most}, "") for name, most in (("differ", 200), ("k3", 2e-4), ("mult_prob_error", 1.07))),
        ({"differ": 199}, "stock: other bits 200 (most in step 7, seed 0) is above 199"),
        ({"k3": 1.9e-4}, "stock: K3 0.0002 (step 7, seed 0) is above 0.00019"),
        ({"mult_prob_error": 1.05}, "stock: mean of exp |d| 1.06 (step 3, seed 0) is above 1.05"),
        ({"differ": 200, "k3": 1e-5}, "stock: K3 0.0002 (step 7, seed 0) is above 1e-05"),
    ]:
        asked: dict[str, Any] = {"rate": 0.1, "confidence": 0.95, "by": "load", "limits": limits}
        decision = decide(run, **asked)
        assert decision.code == (3 if shut else 0)
        assert shut in gate.text(decision, run)[-1]
        assert gate.junit(decision, run, 0.0).count("<failure") == bool(shut)
        for broken in (killed, failed):
            assert decide(broken, **asked).code == (3 if shut else 1)
    run = str(Path(__file__).parents[2] / "docs" / "evidence" / "cpu" / "rl.jsonl.gz")
    assert main(["gate", run, "--mult-prob-error", "9", "--k3", "1"]) == 2
    assert "holds no mean of exp |d|: an older nondet made it" in capsys.readouterr().err
    assert main(["gate", run, "--k3", "0.015"]) == 0
    assert "Gate passed: stock: K3 0.0" in capsys.readouterr().out
    assert main(["gate", run, "--k3", "0", "--impl", "invariant"]) == 0
    assert main(["gate", run, "--mismatch-bits", "0", "--impl", "stock"]) == 3
    assert "other bits 108,689 (most in step " in capsys.readouterr().out


def test_arms_are_held_against_seeds() -> None:
    """Within the scatter of seeds, beyond it, and not at all with one seed; what fell is said to have."""

    def arms(stock: list[float], invariant: list[float]) -> Run:
        both = (("stock", stock), ("invariant", invariant))
        seeds = [(arm, seed, reward) for arm, rewards in both for seed, reward in enumerate(rewards)]
        return run_of(*(step(arm, i, seed=seed, reward=reward) for arm, seed, reward in seeds for i in range(4)))

    for run, said in [
        (arms([0.5, 0.7], [0.6, 0.65]), "differ by 0.03 between arms, no more than seeds do (up to 0.20 in one arm)."),
        (arms([0.5, 0.52], [0.9, 0.91]), "differ by 0.40 between arms, more than seeds do (up to 0.02 in one arm)."),
        (arms([0.5], [0.9]), ""),
    ]:
        notes = [note for verdict in judge(run) for note in verdict.notes if note.startswith("Mean rewards")]
        assert notes == ([f"Mean rewards {said}"] if said else [])
    fallen = run_of(*(step("stock", i, reward=0.9 if i < 12 else 0.1) for i in range(20)))
    assert "Seed 0 fell: 0.90 at its best over five steps, 0.10 at its end." in judge(fallen)[0].notes
    assert not courses(run_of(*(step("stock", i, reward=i / 20) for i in range(20))))[0].fell


def test_records_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    """A run file may come from anywhere."""
    path = tmp_path / "rl.jsonl"
    write_run(path, run_of(step("stock", 0, differ=40), step("stock", 1, differ=40)))
    lines = path.read_text().splitlines()
    for change in [
        {"differ": 101}, {"differ": 0}, {"flat": 3}, {"alike": 1}, {"ratio_least": 2.0}, {"weights_digest": ""},
        {"k3": float("inf")}, {"mult_prob_error": -1.0}, {"status": "maybe"}, {"outside": 101}, {"reward": 1e300},
    ]:  # fmt: skip
        changed = json.dumps(json.loads(lines[1]) | change).replace("Infinity", "1e999")
        path.write_text("\n".join([lines[0], changed, *lines[2:]]) + "\n")
        with pytest.raises(UserError, match="line 2"):
            read_run(path)


def test_a_name_in_a_file_is_text_in_a_report(tmp_path: Path) -> None:
    """What else a report of training says, the digests of kept files hold (tests/reports/golden.py)."""
    steps = [step(arm, i, differ=30) for arm in ("stock", "<b>evil</b>") for i in range(6)]
    path, page, text = (tmp_path / f"rl.{suffix}" for suffix in ("jsonl", "html", "md"))
    write_run(path, run_of(*steps))
    assert main(["report", str(path), "--out", str(page), "--out", str(text), "--quiet"]) == 0
    assert [what in page.read_text() for what in ("<b>evil", "&lt;b&gt;evil")] == [False, True]
    assert "`<b>evil</b>`" in text.read_text()
    assert "<b>" not in text.read_text().replace("`<b>evil</b>`", "")


STEPS = 3


def trainer(folder: Path, out: Path, **changes: Any) -> Any:
    """A GRPOTrainer on a tiny model, prompts of several lengths, so that TRL pads on the left."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install nondet-llm[trl]")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    engine = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 32}
    given: dict[str, Any] = {
        "output_dir": str(out), "use_cpu": True, "bf16": False, "max_steps": STEPS, "seed": 5, "logging_steps": 1,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "report_to": [],
        "max_completion_length": 8, "learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True,
        "use_transformers_continuous_batching": True, "transformers_continuous_batching_config": engine,
    }  # fmt: skip
    prompts = ["For example, the", "Return", "The class is a kind of", "This"] * 8
    held_out = Dataset.from_dict({"prompt": prompts[:4]}) if "eval_strategy" in changes else None

    def length(completions: list[str], **_: Any) -> list[float]:
        return [len(text) / 100 for text in completions]

    return trl.GRPOTrainer(
        model=model, reward_funcs=length, args=trl.GRPOConfig(**given | changes), processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}), eval_dataset=held_out,
    )  # fmt: skip


def watched(folder: Path, tmp_path: Path, *, invariant: bool) -> list[TrainingStep]:
    """What a run of a few steps left; TRL is its own again afterwards."""
    made, out = trainer(folder, tmp_path / "out"), tmp_path / "rl.jsonl"
    before = made.continuous_batching_config.return_logprobs
    block: Any = nondet.batch_invariant(training=True) if invariant else nullcontext()
    with block, nondet.mismatch_of(made, out=out):
        made.train()
    assert not {"generate_batch", "_get_per_token_logps_and_entropies"} & {*vars(made.model), *vars(made)}
    assert made.continuous_batching_config.return_logprobs == before
    run = read_run(out)
    assert run.complete
    assert [r.step for r in run.training_steps] == list(range(STEPS))
    assert all(r.tokens > 8 and r.grad_norm and r.reward and r.groups == 2 for r in run.training_steps)
    assert len({r.weights_digest for r in run.training_steps}) == STEPS
    return run.training_steps


@pytest.mark.trl
def test_trl_is_on_policy_with_two_lines_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not one bit in any step, with padding on the left, after optimizer steps, in micro-batches."""
    folder = write_tiny_model(tmp_path / "model")
    steps = watched(folder, tmp_path, invariant=False)
    assert all(r.impl == "stock" and r.differ > r.tokens / 4 and r.k3 > 0 for r in steps)
    assert main(["gate", str(tmp_path / "rl.jsonl")]) == 3
    (tmp_path / "rl.jsonl").unlink()
    steps = watched(folder, tmp_path, invariant=True)
    assert [(r.impl, r.differ, r.k3) for r in steps] == [("invariant", 0, 0.0)] * STEPS
    assert main(["gate", str(tmp_path / "rl.jsonl")]) == 0
    assert main(["report", str(tmp_path / "rl.jsonl"), "--quiet"]) == 0
    assert f"KL 0 in {STEPS} of {STEPS} steps (0 of" in " ".join(capsys.readouterr().out.split())


@pytest.mark.trl
def test_what_trl_does_not_train_on_is_in_no_figure(tmp_path: Path) -> None:
    """Rollouts of one generation serve two steps, of which the first is recorded, and each step is evaluated; with
    mask_truncated_completions nobody trains on what was cut off: here most, or all, of them."""
    folder, kept = write_tiny_model(tmp_path / "model"), []
    evaluated = {"max_steps": 4, "steps_per_generation": 4, "eval_strategy": "steps", "eval_steps": 1}
    for i, more in enumerate((evaluated, {"mask_truncated_completions": True, "max_completion_length": 40})):
        made, out = trainer(folder, tmp_path / "out", **more), tmp_path / f"rl{i}.jsonl"
        with nondet.batch_invariant(training=True), nondet.mismatch_of(made, out=out):
            made.train()
        kept.append(read_run(out).training_steps)
    assert [(s.step, s.differ) for s in kept[0]] == [(0, 0), (2, 0)]
    assert made.state.global_step == STEPS, "it went on to its end"
    assert all(step.differ == 0 and 0 < step.tokens < 40 * step.rollouts for step in kept[1])
