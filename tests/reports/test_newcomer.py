"""What somebody meets who reads a report for the first time: its main number, the next step, whose figure is whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from nondet.core.records import Difference, Run
from nondet.core.runfile import read_run
from nondet.core.statistics import percent
from nondet.diff import diff_runs
from nondet.reports import diff, html, markdown
from nondet.reports.content import build
from nondet.reports.first_screen import clearest
from nondet.reports.text import environment_line, share_text
from nondet.verdict.findings import Effect
from tests.build import ENVIRONMENT, Command, header, line, row, run_of, sampled, six_rounds
from tests.reports.golden import nondet
from tests.reports.test_effect import screen_of
from tests.reports.test_terminal import flat, printed

KEPT = Path(__file__).resolve().parents[2] / "docs" / "evidence"


def kept(name: str, *typed: str) -> Run:
    run = read_run(KEPT / name)
    run.header.environment["argv"] = ["nondet", run.header.command, *typed]
    return run


def test_a_certificate_says_who_left_its_class() -> None:
    """Not that nothing depends on the batch, which it did not ask; nor that there are no completions."""
    screen = screen_of(kept("h200/certify.jsonl.gz"))
    assert [(s.label, s.text) for s in screen.steps] == [
        ("operator", "not in the class everywhere: cublaslt (linear, matmul)")
    ]
    assert "Next:" not in html.render([kept("h200/certify.jsonl.gz")])
    (clean,) = screen_of(kept("cpu/certify-gradients.jsonl.gz")).steps
    assert clean.text == "1 member tested, each in its class at every shape tested"


def test_none_depends_on_the_batch_is_said_of_all_that_was_tested() -> None:
    """Stock agrees, and another implementation differs over the batch, or from run to run. A function of one's own has
    no completions; of two cases the finer border is shown; a headline stands over its own run's picture."""
    for bad in (row([0, 1], impl="invariant"), row([0, 0], impl="invariant", replays_parted=1, status="divergent")):
        steps = {s.label: s.text for s in screen_of(run_of(row([0, 0]), bad)).steps}
        assert steps["operator"] == "tested in isolation, invariant diverges in linear"
        assert "none to name" not in steps["kernel"]
    steps = {s.label: s.text for s in screen_of(run_of(row([0, 0]), row([0, 0], impl="invariant"))).steps}
    assert steps["operator"] == "none of those tested depends on the batch or the run"
    assert [s.label for s in screen_of(run_of(row([0, 1], impl="linear=mine:f"))).steps] == ["operator", "kernel"]
    coarse = row([0, 0, 1, 1], values=[1, 17, 33, 64])
    fine = row([0, 0, 1, 1], values=[1, 23, 24, 64], case="finer")
    assert clearest([coarse, fine]) is fine
    screen = screen_of(kept("cpu-xeon/trace.jsonl"), run_of(row([0, 1], case="a case of its own")))
    assert screen.answer.startswith("batch-dependent: the first operator to differ is")
    assert screen.picture.name == "pair"


def test_a_comparison_says_that_the_divergence_went(tmp_path: Path) -> None:
    """First of all, and only where one of the two runs has it."""
    before = six_rounds(sampled(tmp_path, impls=("stock",)))
    quiet = six_rounds(sampled(tmp_path, impls=("stock",), variants=lambda *_: ((), 0), name="after.jsonl"))
    said, back, same = (diff.headline(diff_runs(a, b)) for a, b in ((before, quiet), (quiet, before), (before, before)))
    assert said.startswith("stock: batch-dependent in A, no divergence observed in B; ")
    assert back.startswith("stock: no divergence observed in A, batch-dependent in B; ")
    assert "in A, " not in same


def test_the_page_of_a_comparison_is_as_wide_as_a_page_and_names_both() -> None:
    """It has no contents, whose column it was squeezed into; its second name was hidden behind a macro's."""
    run = run_of(row())
    page = diff.render(diff_runs(run, run), ("first.jsonl", "second.jsonl"), {})
    assert ">A: first.jsonl<" in page
    assert ">B: second.jsonl<" in page
    assert '<div class="layout plain">' in page
    assert ".layout:not(.plain) { display: grid" in page


def test_eighty_columns_have_the_numbers_that_matter() -> None:
    """How many completions a batch changes; how many sums an order makes; the tree that was proven."""
    said = nondet("report", str(KEPT / "cpu/diagnose-fp8.jsonl.xz"))[1]
    assert "19 of 20 completions have different tokens from the same" in said
    tree = nondet("report", str(KEPT / "h200-order/order-stock-bfloat16.jsonl.xz"))[1]
    assert "3 splits of 4,096, added in order" in tree
    assert "one chain of 256 groups of 16" in tree


def test_a_demonstration_says_how_many_results_it_drew() -> None:
    """102, the number that float-sum is there for."""
    counts: dict[str, Any] = {"values": [], "trials": 10_000, "distinct": 102, "class_sizes": [9_899, *[1] * 101]}
    named = {"probe": "float-sum", "operator": "float_sum", "case": "10,000 shuffles", "impl": "python"}
    drawn = row([], varied="order", status="divergent", replays=0, demonstration=True, **named, **counts)
    assert "10,000 shuffles: 102 distinct results" in flat(printed(run_of(drawn), verbose=False))


def test_what_follows_an_engines_times_and_rollouts() -> None:
    """Nothing after times; a file's rollouts again with a model, then with older weights; sampled ones in training,
    which keeps what was typed but what is asked anew, and where the last one was written. `ends` of
    test_first_screen.py has what follows the other kinds."""
    assert "\nNext:" not in markdown.render([kept("h200-x2/engine-2-ranks.jsonl")])
    mismatch, rl, again = "h200/mismatch.jsonl.gz", "cpu/trl-invariant.jsonl.gz", "nondet mismatch --rollouts r --model"
    arms = "--arms stock --steps 40 --out a.jsonl --lr=1e-3 --force --group 8"
    for name, typed, command in [
        ("h200-x2/engine-2-ranks.jsonl", "", ""),
        (mismatch, "--rollouts r", f"{again} FOLDER"),
        (mismatch, "--rollouts r --model m", f"{again} m --older CHECKPOINT"),
        (mismatch, "--model m", "nondet rl --model m --steps 20"),
        (rl, arms, "nondet rl --steps 40 --lr=1e-3 --group 8 --arms stock,invariant"),
    ]:
        assert screen_of(kept(name, *typed.split())).next.command == command


def test_a_picture_denies_no_fault(tmp_path: Path) -> None:
    """Stock stands beside an invariant implementation that differs; what ended otherwise is no line of one answer."""
    stock, ours = "Stock kernels: 60 requests, ", "; Batch-invariant kernels: 60 requests, "
    odd = lambda impl, i: (((4, 1),) if impl != "stock" and i == 3 else (), 0)  # noqa: E731 - one line
    for run, panels in (
        (sampled(tmp_path), f"{stock}4 different answers{ours}1 answer"),
        (sampled(tmp_path, variants=odd, name="b.jsonl"), f"{stock}1 answer{ours}2 different answers"),
        (sampled(tmp_path, variants=lambda *_: ((), 0), impls=("stock",), name="c.jsonl"), f"{stock}1 answer"),
    ):
        assert screen_of(run).picture.data.label == panels
    run.completions[0] = msgspec.structs.replace(run.completions[0], finish="stop")
    screen = screen_of(run)
    assert (screen.effect, screen.picture, screen.card) == (Effect.OUTPUT, None, None)


def test_a_server_is_no_machine_of_the_client() -> None:
    """Its address, software and model first, then where it was asked from; and why it is divergent."""
    run = read_run(KEPT / "servers/transformers-serve/gate.jsonl")
    screen = screen_of(run)
    assert screen.machines[0].startswith("http://127.0.0.1:55001: transformers, model ")
    assert screen.machines[1].startswith("requests sent from: Intel(R)")
    assert screen.answer.startswith("server: divergent on 1 of 3 prompts, ")
    assert "loaded compared with solo: 1 of 1 differ" in screen.steps[1].text
    assert "Intel" not in build([run]).title


def test_numbers_are_written_as_numbers() -> None:
    """No percentage of a hundred zeros, and one of a thing is one."""
    assert (percent(3e-150, "down"), percent(3e-150, "up")) == ("2.99e-148%", "3.02e-148%")
    assert percent(3e-7) == "0.000030%"
    assert "1 thread ·" in environment_line(ENVIRONMENT | {"gpu": None, "num_threads": 1})
    assert "2 threads ·" in environment_line(ENVIRONMENT | {"gpu": None, "num_threads": 2})
    one = Difference(mismatched=1, compared=1, max_abs=1.0, max_ulp=1)
    assert share_text(one) == "its one element"
    assert share_text(msgspec.structs.replace(one, compared=4096)) == "1 of 4,096 elements"


def test_a_quiet_report_prints_its_verdict(run: Command, tmp_path: Path) -> None:
    """-q: only the verdict, with --out as without."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(line(header()) + line(row([0, 1])) + b'{"type":"end","records":1,"seconds":1.0}\n')
    assert run("report", path, "-q", "--out", "r.html") == run("report", path, "-q")
    assert run("report", path, "-q")[1] == "stock: batch-dependent in 1 of 1 case (linear).\n"
