"""The pill of the first screen: what changes, by the facts of each kind of run and never by its sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from nondet.core.records import AxisValue, Control, Neighbours, Run, TraceVerdict
from nondet.reports import html, markdown
from nondet.reports.axes import AxesTable, AxisCell, AxisLine
from nondet.reports.content import Report, build, section
from nondet.reports.first_screen import FirstScreen, Pill, first_screen
from nondet.verdict.samples import AxisTally, ValueTally
from tests.build import bench_run, failed, row, run_of, sampled
from tests.diagnose.test_verdict import CLEAN, PARTED, traced
from tests.diagnose.test_verdict import run_of as diagnosis


def screen_of(*runs: Run) -> FirstScreen:
    screen = first_screen(build(list(runs)))
    assert screen is not None
    return screen


def of_logprobs(impl: str, number: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """Stock's logprobs change, and no token."""
    return (), number % 2 if impl == "stock" else 0


def test_of_completions(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Other tokens are another output; other logprobs alone are less; a run that is not complete says so far."""
    for how, pill in [
        ({}, Pill.OUTPUT),
        ({"variants": of_logprobs}, Pill.LOGPROBS),
        ({"variants": lambda *_: ((), 0)}, Pill.NONE),
        ({"variants": lambda *_: ((), 0), "finish": False}, Pill.SO_FAR),
        ({"impls": ("invariant",)}, Pill.NO_STOCK),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        assert screen_of(sampled(tmp_path, **how)).pill is pill


def test_of_operators() -> None:
    """What differs beside any model changes nobody's output yet; a wrong result stands before all."""
    for run, pill in [
        (run_of(row([0, 1])), Pill.KERNELS),
        (run_of(row([0, 0])), Pill.NONE),
        (run_of(row([0, 1]), complete=False), Pill.KERNELS),
        (run_of(row([0, 0], status="wrong")), Pill.WRONG),
        (run_of(failed()), Pill.NOTHING),
    ]:
        assert screen_of(run).pill is pill


def test_completions_stand_before_operators(tmp_path: Path) -> None:
    """Kernels that differ are of less weight than what a model's completions show."""
    assert screen_of(run_of(row([0, 1])), sampled(tmp_path, variants=of_logprobs)).pill is Pill.LOGPROBS


def test_of_a_trace() -> None:
    """By its controls; of two recorded arms alone it is not known what other requests did."""
    for figures, pill in [
        ({"parting": {"first_logprob": 4.0, "first_token": 9.0}}, Pill.OUTPUT),
        ({"parting": {"first_logprob": 4.0, "first_token": -1.0}, "company": {"tokens": 3.0}}, Pill.OUTPUT),
        ({"parting": {"first_logprob": 4.0, "first_token": -1.0}, "company": {"tokens": 0.0}}, Pill.LOGPROBS),
        ({"parting": {"first_logprob": 4.0, "first_token": -1.0}}, Pill.MODEL),
        ({}, Pill.MODEL),
    ]:
        controls = [Control(name=name, passed=None, sentence="", figures=of) for name, of in figures.items()]
        verdict = TraceVerdict(finding="batch-dependent", culprits=[], families=None, sentences=["Output changes"])
        assert screen_of(run_of(controls=controls, trace_verdicts=[verdict])).pill is pill


def test_of_a_diagnosis() -> None:
    """By the figures of the batch step; what is a defect is a wrong result."""

    def of(outcomes: dict[str, str], tokens: float = 0.0, **more: Any) -> Pill:
        run = diagnosis(outcomes, **more)
        steps = [
            msgspec.structs.replace(s, figures=s.figures | {"tokens": tokens * (s.name == "batch")}) for s in run.steps
        ]
        return screen_of(msgspec.structs.replace(run, steps=steps)).pill

    assert of(PARTED, 3.0, **traced("batch-dependent")) is Pill.OUTPUT
    assert of(PARTED, **traced("batch-dependent")) is Pill.LOGPROBS
    assert of(PARTED, 3.0, **traced("batch-dependent", ("values", "divergent"))) is Pill.WRONG
    assert of(PARTED | {"run": "no"}) is Pill.RUNS
    assert of(CLEAN) is Pill.NONE
    assert of({"greedy": "no"}) is Pill.NOT_GREEDY
    assert of({"greedy": "yes"}) is Pill.UNKNOWN


@pytest.mark.parametrize(
    ("held", "texts", "pill"),
    [
        (True, ({"a": 3}, {"b": 3}), Pill.OUTPUT),
        (True, ({"a": 3}, {"a": 3}), Pill.LOGPROBS),
        (False, ({"a": 3}, {"b": 3}), Pill.LOGPROBS),
        (False, ({"a": 3}, {"b": 2, "c": 1}), Pill.OUTPUT),
    ],
)
def test_of_axes(held: bool, texts: tuple[dict[str, int], ...], pill: Pill, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an axis may change the arithmetic only what differs at one value is a change of the output."""
    from nondet.reports import content
    from nondet.verdict.findings import Finding, Verdict

    verdict = Verdict("stock", (Finding.BATCH,), (), prompt=0)
    monkeypatch.setattr(content, "judge", lambda run: [verdict])
    values = tuple(
        ValueTally(
            record=AxisValue(
                axis="x", value=str(i), impl="stock", arm="x", held=held, changes="", proven=True, proof=""
            ),
            n=3, texts=of, traces={"s": 1, "t": 2}, moved=1, moved_first=0, compared=3,
        )
        for i, of in enumerate(texts)
    )  # fmt: skip
    tally = AxisTally("x", held, values, (), "", 2, 2, 2, 2)
    table = AxesTable(("stock",), (AxisLine("x", "", ["stock"], [], {"stock": AxisCell(tally, None)}, ""),), 3, "", 0)
    screen = first_screen(Report((section(run_of(), [], axes=table),)))
    assert screen is not None
    assert screen.pill is pill


def test_of_an_encoder() -> None:
    """Whether a search would answer otherwise is another thing than other bits."""
    for top1, pill in [(1, Pill.NEIGHBOURS), (0, Pill.VECTORS)]:
        beside = Neighbours(
            impl="stock", arm="batch", pooling="mean", texts=4, parted=4, max_ulp=1, cosine_distance=0.0, k=2,
            top1_changed=top1, topk_changed=0, topk_reordered=0,
        )  # fmt: skip
        assert screen_of(run_of(row([0, 1]), neighbours=[beside])).pill is pill


def test_a_bench_has_a_card_of_its_own() -> None:
    """A table of speeds and bits; nothing of tokens, and no chain."""
    screen = screen_of(bench_run())
    assert (screen.pill, screen.steps, screen.picture) == (Pill.SPEED, (), None)
    assert screen.table is not None
    assert screen.table.head == ("operator", "implementation", "speedup (95%)", "worst", "one class of bits in")
    assert [row[0] for row in screen.table.rows] == ["matmul, bfloat16"] * 2
    assert "3 of 3 weight shapes" in str(screen.table.rows)
    document, page = markdown.render([bench_run()]), html.render([bench_run()])
    assert document.startswith("## Speed measured\n")
    for text in (document, page):
        assert "no completions here" not in text
    assert screen_of(bench_run(), run_of(row([0, 1]))).pill is Pill.KERNELS


def test_every_pill_has_a_style() -> None:
    """Red is what changes, blue is one that saw nothing; all others leave it open."""
    assert {p for p in Pill if p.style == "good"} == {Pill.NONE}
    assert {p for p in Pill if p.style == "dull"} == set(list(Pill)[list(Pill).index(Pill.NONE) + 1 :])
