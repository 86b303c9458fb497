"""What a report says, apart from how: headlines, problems, families, grouping, side files."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from pathlib import Path

import msgspec
import pytest

from nondet.core.records import ContractAnswer, Run
from nondet.core.runfile import traces_path
from nondet.errors import UserError
from nondet.reports import html, markdown, samples
from nondet.reports.content import RunSection, build, headline, problems
from nondet.reports.document import Table, plain
from nondet.sampling.analysis import SampleSummary
from nondet.verdict.findings import Finding, Verdict
from tests.build import failed, row, run_of, sampled, summaries_of
from tests.reports.test_terminal import printed


def test_the_contrast_is_the_headline(tmp_path: Path) -> None:
    (section_,) = build([sampled(tmp_path, impls=("invariant:matmul", "invariant", "stock"))]).runs
    assert section_.headline.startswith("stock: 4 distinct completions of 60")
    assert "; invariant: 1 distinct completion of 60, no divergence" in section_.headline
    assert "matmul" not in section_.headline
    sums = row([0, 1], probe="float-sum", operator="float_sum", demonstration=True, varied="order", impl="python")
    assert "python" not in RunSection(run_of(row([0, 1]), sums)).headline
    assert RunSection(run_of(sums)).headline.startswith("python: dependent on the order of reduction")
    verdicts = [Verdict("stock", (Finding.BATCH if i < 8 else Finding.CLEAN,), (), prompt=i) for i in range(12)]
    counts = "stock: batch-dependent on 8 of 12 prompts, no divergence observed on 4 of 12 prompts"
    assert headline(run_of(row()), verdicts) == counts


def test_recorded_names_are_printed_in_plain_words_and_a_user_s_stay() -> None:
    own = {"case": "32 rows at every place among 64", "values": ["alone", "copies of the asked rows"]}
    (ours, users) = RunSection(run_of(row([0, 1], **own), row([0, 1], probe="check", impl="mine", **own))).run.rows
    assert ours.case == "32 rows at every position among 64"
    assert ours.values == ["one at a time", "copies of the compared rows"]
    assert (users.case, users.values) == (own["case"], own["values"])
    served = "asked of its counters: what it runs under load can then be held against what was sent"
    answer = ContractAnswer(impl="server", question="load", answer="yes", evidence=served)
    (shown,) = RunSection(run_of(row([0, 0]), contract=[answer])).run.contract
    assert shown.evidence == "its counters show it: what it runs under load can be compared with what was sent"
    extra = row([0, 1], extra={"requests": 4, "parted": 2})
    assert "requests 4, differ 2" in printed(run_of(extra), verbose=True)


def test_what_failed_is_named_and_counted(tmp_path: Path) -> None:
    run = run_of(failed(case="x"), failed("skipped", "", case="y"), row([0, 0], reason="2 of 8 elements are NaN"))
    named = [(p.kind, p.name, p.reason) for p in problems(run)]
    assert named == [
        ("failed", "matmul: x, bfloat16, stock", "OutOfMemoryError: CUDA out of memory"),
        ("skipped", "matmul: y, bfloat16, stock", "no reason recorded"),
        ("note", "matmul: row 0 of M rows, K=12288 N=4096, bell, bfloat16, stock", "2 of 8 elements are NaN"),
    ]
    assert "1 failed, 1 skipped" in printed(run, verbose=False)
    requests = problems(sampled(tmp_path, failures=3, impls=("stock",)))
    assert [(p.name, p.count) for p in requests] == [("3 requests (stock)", 3)]


def test_requests_that_all_failed_get_no_verdict(tmp_path: Path) -> None:
    run = sampled(tmp_path, n=4)
    lost = {"status": "error", "reason": "boom"}
    run.completions[:] = [msgspec.structs.replace(c, **lost) if c.impl == "invariant" else c for c in run.completions]
    (section_,) = build([run]).runs
    assert {v.impl: v.finding for v in section_.verdicts}["invariant"] == Finding.UNTESTED
    assert [s.impl for s in section_.samples[0].summaries] == ["stock"]


def test_families_are_judged_against_stock(tmp_path: Path) -> None:
    def variants(impl: str, number: int) -> tuple[tuple[tuple[int, int], ...], int]:
        parts = impl in ("stock", "invariant:matmul") and number % 9 == 0
        return (((4, 1),) if parts else ()), 0

    impls = ("stock", "invariant:attention", "invariant:matmul")
    run = sampled(tmp_path, impls=impls, variants=variants)
    stock, attention, matmul = summaries_of(run)

    def results(*summaries: SampleSummary) -> dict[str, str]:
        made = samples.sample_blocks(samples.Samples(run, summaries), 1, True)
        tables = [b for b in made if isinstance(b, Table) and "replaced" in b.head]
        return {plain(row[0]): plain(row[-1]) for table in tables for row in table.rows}

    removed = "replacing only it removed every divergence seen"
    both = {"attention": removed, "matmul": "divergence remains"}
    assert results(stock, attention, matmul) == both
    assert results(stock, replace(attention, n=3)) == {"attention": "too few completions to tell"}
    assert results(replace(stock, distinct_traces=1, distinct_completions=1), attention) == {}


def test_a_side_file_of_another_run_is_refused(tmp_path: Path) -> None:
    run = sampled(tmp_path)
    side = traces_path(Path(run.source))
    lines = side.read_bytes().splitlines(keepends=True)
    side.write_bytes(lines[0])
    with pytest.raises(UserError, match="lacks traces"):
        build([run])
    side.unlink()
    with pytest.raises(UserError, match="can't be read"):
        build([run])


def test_rows_beside_completions_are_judged_apart(tmp_path: Path) -> None:
    run: Run = sampled(tmp_path)
    run.rows.append(row([0, 0], probe="sample", impl="stock"))
    (section_,) = build([run]).runs
    assert section_.headline.startswith("stock: 4 distinct completions")
    assert [(v.impl, v.prompt) for v in section_.verdicts] == [("stock", 0), ("invariant", 0), ("stock", None)]


NASTY = "<script>alert(1)</script>"


def test_of_many_prompts_those_that_part_most_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs is never among what is left out; a prompt under several seeds is called by its seed."""
    monkeypatch.setattr(samples, "SAMPLES_MOST", 2)
    run = sampled(tmp_path, variants=lambda impl, i: (((4, i),), 0) if impl == "stock" and i % 5 < 2 else ((), 0))
    run.header.plan["prompts"] = [{"text": NASTY, "tokens": 4, "seed": i} for i in range(5)]
    run.completions[:] = [msgspec.structs.replace(c, prompt=i % 5) for i, c in enumerate(run.completions)]
    (section,) = build([run]).runs
    assert [s.prompt for s in section.sampled.shown] == [0, 1]
    assert {v.prompt for v in section.shown_verdicts} == {0, 1}
    assert [s.name for s in section.samples] == ["seed 0", "seed 1", "seed 2", "seed 3", "seed 4"]
    page, document = html.render([run]), unescape(markdown.render([run], full=True))
    for fact in (
        "the 2 that differ most",
        "2 of 5 (95% ",
        "0 of 5 (at 95%, one-sided: ",
        "only under invariant on 0, of 5",
    ):
        assert fact in page, fact
        assert fact in document, fact
    assert NASTY not in page
    (section,) = build([sampled(tmp_path)]).runs
    assert (section.sampled.overall, section.sampled.shown) == ([], section.samples)
