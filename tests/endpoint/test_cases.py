"""Faults of servers that people have reported, each planted in the fake one: what `nondet sample` says of it.

They are asked in OpenAI's plain form, which has names of tokens and logprobs and no ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nondet.core.records import Run
from nondet.core.runfile import read_run
from nondet.reports.content import build
from nondet.reports.first_screen import chain
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from tests.build import Command
from tests.endpoint.honest import serving

FEW = ("--load", "others=6,targets=6,prompt=4-16,tokens=4-12")


def asked(
    run: Command, folder: Path, *argv: object, dialect: str = "openai", prompt: str = "For example, the", **cheats: Any
) -> Run:
    files = ("--prompt", prompt, "--out", "a.jsonl", "--report", "a.md")
    with serving(dialect, token_s=0.001, **cheats) as server:
        code, _, err = run("sample", "--endpoint", server.url, *FEW, *argv, *files)
    assert code == 0, err
    return read_run(folder / "a.jsonl")


def test_plain_logprobs_are_compared(run: Command, tmp_path: Path) -> None:
    """By names of tokens alone, of half a character too, it is seen that logprobs differ."""
    few = ("--arms", "solo=8,loaded", "--n", 18, "--max-tokens", 8)
    made = asked(run, tmp_path, *few, batch_scale=1e-6, split_names=True)
    assert made.servers[0].known_by == "bytes"
    assert {c.status for c in made.completions} == {"ok"}
    assert len({c.tokens_digest for c in made.completions}) == 1
    assert len({c.trace for c in made.completions}) > 1
    assert judge(made)[0].is_fault
    assert "rounding does not do that" not in (tmp_path / "a.md").read_text()


def test_a_first_answer_unlike_all_others(run: Command, tmp_path: Path) -> None:
    """It was kept, and the same request at the end differs: divergent, and neither the load nor chance is blamed."""
    made = asked(run, tmp_path, "--arms", "solo=4,loaded", "--n", 6, "--max-tokens", 8, first_differs=True)
    told = judge(made)[0]
    assert [r.arm for r in made.rounds][-1] == "first"
    assert (told.finding, Finding.BATCH in told.findings) == (Finding.UNATTRIBUTED, False)
    assert any("very first answer is unlike all later ones, which agree" in note for note in told.notes)
    assert "very first answer" in (tmp_path / "a.md").read_text().split("## ")[1]
    code, out, _ = run("gate", "a.jsonl")
    assert (code, "very first answer" in out) == (3, True)


def test_another_request_s_keys_are_no_rounding(run: Command, tmp_path: Path) -> None:
    """Batch-dependent, by nats: the report says that no order of additions does this."""
    few = ("--arms", "solo=6,loaded", "--n", 30, "--max-tokens", 6)
    made = asked(run, tmp_path, *few, dialect="vllm", confuses=4, prompt="The class is")
    assert judge(made)[0].is_fault
    assert "rounding does not do that" in (tmp_path / "a.md").read_text()


def test_draws_that_are_none(run: Command, tmp_path: Path) -> None:
    few = ("--arms", "solo=4,loaded", "--n", 6, "--max-tokens", 8, "--temperature", 1.5, "--force")
    for cheat, said in [
        ("temperature_ignored", "the server ignores the temperature: wrong"),
        ("one_draw", "requests of one batch share a draw: wrong"),
    ]:
        told = judge(asked(run, tmp_path, *few, **{cheat: True}))[0]
        assert (told.finding, said in told.text) == (Finding.WRONG, True)


def test_a_deterministic_sglang(run: Command, tmp_path: Path) -> None:
    """Three answers show that it keeps to a seed; its mode is on, so nobody is told to switch it on."""
    one = ("--arms", "solo=6,loaded", "--n", 18, "--max-tokens", 8, "--temperature", 0.8)
    made = asked(run, tmp_path, *one, dialect="sglang", deterministic=True, batch_noise=0.02)
    assert made.servers[0].software == "sglang 0.0.9, deterministic inference, attention fa3"
    assert made.servers[0].fingerprint == ""
    assert {a.question: a.answer for a in made.contract}["seed"] == "yes"
    moved = {name for r in made.rounds if r.traffic for name in r.traffic.counters}
    assert moved == {"sglang:cached_tokens_total", "sglang:num_retracted_reqs"}
    assert judge(made)[0].finding == Finding.BATCH
    cure = chain(build([made]))[-1].text
    assert "its own mode is on" in cure
    assert "not tried" not in cure


def test_a_gate_at_a_temperature_opens_on_one(run: Command) -> None:
    """Whose answers without a seed are all alike: one draw for everybody is not wrong there."""
    with serving("sglang", token_s=0.001, deterministic=True) as server:
        few = ("--load", "others=2,targets=3,prompt=4-16,tokens=4-12", "--prompt", "For example, the")
        argv = (*few, "--max-tokens", 8, "--rate", "95%", "--temperature", 0.8, "--out", "g.jsonl")
        code, out, err = run("gate", "--endpoint", server.url, *argv)
        assert all(path != "/get_model_info" for path in server.pages)
    assert code == 0, out + err
