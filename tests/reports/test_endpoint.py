"""Reports of servers: made from the run file alone, short on a terminal, and safe whatever a server sends."""

from __future__ import annotations

import msgspec
import pytest

from nondet.core.records import Run
from nondet.core.runfile import read_run
from nondet.reports import html, markdown
from nondet.reports.content import build
from tests.endpoint.memory import ARMS, MemoryClient, sampled
from tests.reports.test_terminal import flat, printed

EVIL = "<script>alert(1)</script>\x1b]0;owned\x07|`[x](http://evil)`"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("endpoint") / "run.jsonl"
    evil = MemoryClient(batch="tokens", fingerprint=EVIL, listed=("tiny", EVIL), fails=37)
    sampled(out, evil, MemoryClient())
    return read_run(out)


def test_every_report_has_the_contract_the_arms_and_the_times(run: Run) -> None:
    made = html.render([run]), markdown.render([run], full=True), printed(run, width=100)
    for text in map(flat, made):
        for words in (
            *ARMS, "temperature 0 takes the token of the largest logprob", "loaded compared with solo",
            "tokens/s of all requests",
        ):  # fmt: skip
            assert words in text
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "<script>alert" not in made[0] + made[1]
    lines = printed(run, width=100, verbose=False).splitlines()
    assert (len(lines) <= 25, "batch-dependent" in " ".join(lines[-6:])) == (True, True)
    bare = msgspec.structs.replace(run, completions=[], rounds=[], complete=False)
    for text in (html.render([bare]), markdown.render([bare]), printed(bare, width=100)):
        assert "nothing was measured" in text


def test_figures_of_the_arms(run: Run) -> None:
    endpoint = build([run]).runs[0].endpoint
    by_arm = {(f.impl, f.arm): f for f in endpoint.arms}
    loaded, other = by_arm["server", "loaded"], by_arm["server-2", "loaded"]
    assert min(d.token for d, _ in loaded.divergences if d.token is not None) >= 5
    assert {(d.token, d.bits) for d, _ in other.divergences} <= {(None, None)}
    assert max(c.served.in_flight for c in loaded.requests if c.served) == 12
    assert sum(len(f.requests) for f in endpoint.arms) == 2 * sum(ARMS.values())
    assert any("http-500" in str(f.cells) for f in endpoint.arms)


def test_what_parted_is_a_fact_and_no_wording(run: Run) -> None:
    """The cause that the first screen names is of comparisons with parted traces, whatever their sentence says."""
    endpoint = build([run]).runs[0].endpoint
    alike = [c for _, _, c in endpoint.comparisons if not c.traces_off]
    parted = [c for _, _, c in endpoint.comparisons if c.traces_off]
    assert alike
    assert parted
    assert endpoint.differences == [f"{c.text}: {c.finding.value}" for c in parted]
    plan = {"prompts": run.header.plan["prompts"] * 2}
    header = msgspec.structs.replace(run.header, plan=run.header.plan | plan)
    again = [msgspec.structs.replace(c, prompt=1, request=f"{c.request}-again") for c in run.completions]
    both = build([msgspec.structs.replace(run, header=header, completions=[*run.completions, *again])]).runs[0].endpoint
    assert {text.partition(", ")[0] for text in both.differences} == {"prompt 1", "prompt 2"}
