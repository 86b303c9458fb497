"""Faults of servers that people have reported, each planted in the fake one: what `nondet sample` says of it.

They are asked in OpenAI's plain form, which has names of tokens and logprobs and no ids.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nondet.core.records import Run
from nondet.core.runfile import read_run
from nondet.reports.content import build
from nondet.reports.first_screen import chain
from nondet.sampling.collect import plan_prompts
from nondet.sampling.plan import build_plan, long_prompts, parse_load
from nondet.services.sample import SampleRequest
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from tests.build import Command, tiers
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
    few = ("--arms", "solo=8,loaded", "--n", 18, "--max-tokens", 8)
    made = asked(run, tmp_path, *few, batch_scale=1e-6, split_names=True)
    assert made.servers[0].known_by == "bytes"
    assert {c.status for c in made.completions} == {"ok"}
    assert len({c.tokens_digest for c in made.completions}) == 1
    assert len({c.trace for c in made.completions}) > 1
    assert judge(made)[0].is_fault
    assert "This is not rounding" not in (tmp_path / "a.md").read_text()


def test_a_first_answer_unlike_all_others(run: Command, tmp_path: Path) -> None:
    made = asked(run, tmp_path, "--arms", "solo=4,loaded", "--n", 6, "--max-tokens", 8, first_differs=True)
    told = judge(made)[0]
    assert [r.arm for r in made.rounds][-1] == "first"
    assert (told.finding, Finding.BATCH in told.findings) == (Finding.UNATTRIBUTED, False)
    assert any("very first answer is unlike all later ones, which agree" in note for note in told.notes)
    for page in (tmp_path / "a.md", tmp_path / "b.md"):
        if page.name == "b.md":  # over several prompts, of which one is sent first
            with serving("openai", token_s=0.001, first_differs=True) as server:
                argv = ("--arms", "solo=2,loaded", "--n", 6, "--max-tokens", 8, "--report", page)
                assert run("sample", "--endpoint", server.url, *FEW, *argv, "--out", "b.jsonl")[0] == 0
        said = page.read_text().splitlines()[2]
        assert said.startswith(("The very first answer is unlike all later ones, which agree", "not rounding: ")), said
        assert "very first answer is unlike all later ones" in said
    code, out, _ = run("gate", "a.jsonl")
    assert (code, "very first answer" in out) == (3, True)


def test_another_request_s_keys_are_no_rounding(run: Command, tmp_path: Path) -> None:
    few = ("--arms", "solo=6,loaded", "--n", 30, "--max-tokens", 6)
    made = asked(run, tmp_path, *few, dialect="vllm", confuses=4, prompt="The class is")
    assert judge(made)[0].is_fault
    assert "This is not rounding" in (tmp_path / "a.md").read_text()
    assert (tmp_path / "a.md").read_text().splitlines()[2].startswith("not rounding: ")


def test_draws_that_are_none(run: Command, tmp_path: Path) -> None:
    few = ("--arms", "solo=4,loaded", "--n", 6, "--max-tokens", 8, "--temperature", 1.5, "--force")
    for cheat, said in [
        ("temperature_ignored", "the server ignores the temperature: wrong"),
        ("one_draw", "requests of one batch share a draw: wrong"),
    ]:
        told = judge(asked(run, tmp_path, *few, **{cheat: True}))[0]
        assert (told.finding, said in told.text) == (Finding.WRONG, True)
        with serving("openai", token_s=0.001, **{cheat: True}) as server:  # over several prompts, too
            argv = (*FEW, "--arms", "solo=2,loaded", "--n", 6, "--max-tokens", 8, "--temperature", 1.5, "--force")
            assert run("sample", "--endpoint", server.url, *argv, "--out", "b.jsonl", "--report", "b.md")[0] == 0
        assert (tmp_path / "b.md").read_text().splitlines()[2].startswith(said)


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


# What is asked where nobody chose a prompt: attention over more than 128 and 512 keys, solo and beside others.

MANY = ("--n", "8", "--max-tokens", "4", "--load", "others=3,targets=6,prompt=4-8,tokens=4-8")
ARMS = ("--arms", "solo=8,cold=2,warm=2,loaded")


@pytest.mark.slow
@pytest.mark.parametrize("beyond", tiers([512], [128]))
def test_a_server_that_differs_beyond_some_keys(run: Command, tmp_path: Path, beyond: int) -> None:
    with serving("vllm", token_s=0.001, batch_noise=1e-6, beyond=beyond) as server:
        assert run("sample", "--endpoint", server.url, *MANY, *ARMS, "--out", "a.jsonl")[0] == 0
        second = Finding.BATCH if beyond == 128 else Finding.CLEAN
        found = [v.finding for v in judge(read_run(tmp_path / "a.jsonl"))]
        assert found == [Finding.CLEAN, second, Finding.BATCH]
        code, out, err = run("gate", "--endpoint", server.url, *MANY[2:], "--rate", "70%", "--out", "g.jsonl")
        assert code == 3, out + err


@pytest.mark.slow
def test_ten_lines_for_an_issue(run: Command) -> None:
    """What was sent, what differed in each comparison, and whether rounding does that: said, or said to be open."""
    for cheats, headline, size in [
        ({}, "no divergence observed on 3 of 3 prompts", "nothing differed (at 95%, one-sided: below"),
        ({"batch_noise": 1e-6, "beyond": 128}, "batch-dependent on 2 of 3 prompts", "as small as rounding makes it"),
        ({"confuses": 4}, "divergent on", "not decided: logprobs differ by up to 0 nats"),
    ]:
        with serving("vllm", token_s=0.001, **cheats) as server:
            argv = ("--max-tokens", 6, "--load", "others=3,targets=6,prompt=4-8,tokens=4-8", "--force")
            code, out, err = run("sample", "--endpoint", server.url, "--quick", *argv, "--out", "q.jsonl")
        assert code == 0, err
        lines = out.splitlines()
        assert lines[0].startswith(f"**server: {headline}"), out
        assert len(lines) <= 12
        assert any(size in line for line in lines), out
        assert "- among requests of equal length: " in out
        assert run("report", "q.jsonl")[1] == out
    assert run("sample", "--endpoint", "http://127.0.0.1:1", "--quick", "--n", 5)[0] == 2
    assert run("sample", "--quick")[0] == 2


@pytest.mark.slow
def test_half_of_a_prompt_s_requests_under_load_find_nothing_cached(run: Command, tmp_path: Path) -> None:
    with serving("vllm", token_s=0.001) as server:
        assert run("sample", "--endpoint", server.url, "--n", "4", *MANY[2:], *ARMS, "--out", "a.jsonl")[0] == 0
        code, out, err = run("gate", "--endpoint", server.url, *MANY[2:], "--rate", "90%", "--out", "g.jsonl")
    assert code == 0, out + err
    made = read_run(tmp_path / "a.jsonl")
    loaded = [c for c in made.completions if c.arm == "loaded" and c.served]
    assert Counter((c.prompt, not c.served.cached_tokens) for c in loaded if c.served) == {
        (prompt, cold): 2 for prompt in range(3) for cold in (False, True)
    }
    assert [len(p["text"]) / 4.7 > 600 for p in made.header.plan["prompts"]] == [False, False, True]
    assert [v.finding for v in judge(made)] == [Finding.CLEAN] * 3


def test_a_context_too_short_for_a_long_prompt_leaves_it_out(run: Command, tmp_path: Path) -> None:
    with serving("vllm", token_s=0.001, context=700) as server:
        run("sample", "--endpoint", server.url, *MANY, "--arms", "solo=2", "--out", "b.jsonl")
    lengths = [len(p["text"]) for p in read_run(tmp_path / "b.jsonl").header.plan["prompts"]]
    assert len(lengths) == 2
    assert lengths[1] == len(long_prompts()[0])


def test_long_prompts_ride_with_every_forty_others() -> None:
    load = parse_load("others=3,targets=16,prompt=4-8,tokens=4-8")
    given: dict[str, Any] = {"seed": 1, "prompts": [(1, 2)], "max_new_tokens": 4, "context": 99, "n": 90}
    plan = build_plan(load, texts=["x" * 999], riders=[(3,) * 40, (4,) * 50], encode=lambda _: [7] * 9, **given)
    counts = [Counter((r.subject, len(r.prompt)) for r in requests if r.target) for requests in plan.rounds]
    chosen, with_them = {(0, 2): 16}, {(0, 2): 16, (1, 40): 2, (2, 50): 2}
    assert counts == [chosen, chosen, with_them, chosen, with_them, {(0, 2): 10}]
    ids = [r.id for requests in plan.rounds for r in requests]
    assert len(ids) == len(set(ids))
    assert all(keys > least for keys, least in zip(map(len, long_prompts()), (1_000, 2_800), strict=True))


def test_an_engine_is_asked_beyond_some_keys() -> None:
    request = SampleRequest()
    loaded: Any = SimpleNamespace(
        name="hashes", identity={}, context=1024, device="cpu", dtype="float32", vocabulary=256,
        encode=lambda text: list(text.encode()[::4]), encode_plain=lambda text: list(text.encode()[::4]),
    )  # fmt: skip
    given = (["For example, the"], 80, request.length, 0, ["stock"])
    plan, described = plan_prompts(loaded, request.engine_load, *given, riders=long_prompts())
    assert [p["tokens"] for p in described["prompts"]] == [4, *(len(text.encode()[::4]) for text in long_prompts())]
    for beyond, hit in ((128, [False, True, True]), (512, [False, False, True])):
        beside: dict[int, set[tuple[int, ...]]] = {}
        for requests in plan.rounds:
            spans = {r.id: range(r.arrival_step, r.arrival_step + r.max_new_tokens) for r in requests}  # a token each
            running = Counter(step for span in spans.values() for step in span)
            for r in (r for r in requests if r.target):
                seen = [running[step] for i, step in enumerate(spans[r.id]) if len(r.prompt) + i > beyond]
                beside.setdefault(r.subject, set()).add(tuple(seen))
        assert [len(beside[subject]) > 1 for subject in range(3)] == hit
