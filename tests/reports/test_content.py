"""What a report says, apart from how: headlines, problems, families, grouping, side files."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from pathlib import Path

import msgspec
import pytest

from nondet.core.records import Completion, Difference, Round, Run
from nondet.core.runfile import open_run, read_run, traces_path
from nondet.core.statistics import percent
from nondet.core.traces import Trace, TraceWriter, tokens_digest, trace_digest
from nondet.errors import UserError
from nondet.reports import html, markdown, samples, terminal
from nondet.reports.content import RunSection, build, headline, problems
from nondet.reports.document import Table, plain
from nondet.reports.text import environment_line, share_text
from nondet.sampling.analysis import SampleSummary
from nondet.verdict.findings import Finding, Verdict
from tests.build import ENVIRONMENT, failed, replayed, row, run_of, sampled, summaries_of
from tests.reports.test_terminal import flat, printed


def test_the_contrast_is_the_headline(tmp_path: Path) -> None:
    """Stock's count stands beside invariant's; replacements of single families have a table instead. What
    floating-point does by nature is told below, and alone it is the headline. Over twelve prompts it counts prompts."""
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


def test_an_incomplete_run_says_so_first(tmp_path: Path) -> None:
    """A count of half a run is never mistaken for that of a whole one."""
    assert RunSection(run_of(row([0, 1]), complete=False)).headline.startswith("incomplete run, so far: stock: ")
    assert build([sampled(tmp_path, finish=False)]).runs[0].headline.startswith("incomplete run, so far: stock: 4")
    assert RunSection(run_of()).headline == "nothing was measured"


def test_what_failed_is_named_and_counted(tmp_path: Path) -> None:
    """Failed and skipped rows by name and reason, failed requests by reason, notes of rows that did run."""
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
    """An implementation under which nothing completed is untested, and the other one is still judged."""
    run = sampled(tmp_path, n=4)
    lost = {"status": "error", "reason": "boom"}
    run.completions[:] = [msgspec.structs.replace(c, **lost) if c.impl == "invariant" else c for c in run.completions]
    (section_,) = build([run]).runs
    assert {v.impl: v.finding for v in section_.verdicts}["invariant"] == Finding.UNTESTED
    assert [s.impl for s in section_.samples[0].summaries] == ["stock"]


def test_families_are_judged_against_stock(tmp_path: Path) -> None:
    """Replacing attention removed everything, replacing matmul nothing, and too few completions prove nothing."""

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


def test_cases_are_grouped_and_stock_comes_first() -> None:
    """A case's implementations stand together, whatever order they were measured in; demonstrations come last."""
    order = {"operator": "float_sum", "demonstration": True, "varied": "order", "impl": "python", "case": "s"}
    tested = row([0], impl="invariant"), row([0, 1]), row([0, 1], dtype="float32"), failed(case="never ran")
    matmul, sums = RunSection(run_of(row([0, 1], probe="float-sum", **order), *tested)).probes
    assert (matmul.name, sums.name) == ("matmul", "float-sum")
    assert [[r.impl for r in c.rows] for c in matmul.cases] == [["stock", "invariant"], ["stock"], ["stock"]]
    assert [len(matmul.differing), len(matmul.clean)] == [2, 0]
    said = "stock: batch-dependent in 2 of 2 cases (linear); invariant: nothing was compared in 1 case"
    assert matmul.summary == said


def test_a_side_file_of_another_run_is_refused(tmp_path: Path) -> None:
    """Missing or foreign traces stop the report with one line that names the file."""
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
    """Operators that a sampled run compared have their own verdict, and the completions keep the headline."""
    run: Run = sampled(tmp_path)
    run.rows.append(row([0, 0], probe="sample", impl="stock"))
    (section_,) = build([run]).runs
    assert section_.headline.startswith("stock: 4 distinct completions")
    assert "trials" not in section_.headline
    assert [(v.impl, v.prompt) for v in section_.verdicts] == [("stock", 0), ("invariant", 0), ("stock", None)]


# Several prompts: all of them together, then those that part most, in every report.

NASTY = "<script>alert(1)</script>"


def several(folder: Path, prompts: int = 6, parting: tuple[int, ...] = (4,), seeds: int = 0) -> Run:
    """Ten completions of each prompt under two implementations, in two rounds; stock parts on some prompts."""
    listed = [{"text": f"{NASTY} {p}", "tokens": 4} | ({"seed": p} if seeds else {}) for p in range(prompts)]
    path = folder / "several.jsonl"
    plan = {"prompts": listed, "n": 10 * prompts, "impls": ["stock", "invariant"]}
    writer = open_run(path, command="sample", plan=plan, environment=dict(ENVIRONMENT), force=True)
    side = TraceWriter(path, resume=False, piece=lambda i: f" w{i}")
    for impl in ("stock", "invariant"):
        for number in range(2):
            for p in range(prompts):
                for i in range(5):
                    ids = [p, 1, 2, 3 + (impl == "stock" and p in parting and i == 4)]
                    bits = bytes(16)
                    side.write([Trace(digest=trace_digest(ids, bits), token_ids=ids, logprobs=bits)])
                    writer.write(
                        Completion(
                            impl=impl, request=f"t{number}-{p}-{i}", round=number, prompt=p, n_tokens=4,
                            tokens_digest=tokens_digest(ids), trace=trace_digest(ids, bits), finish="length",
                            arrival_step=i, schedule=[[i, 1, 4], [i + 1, 3, 1]], batch_min=1, batch_max=20,
                        )
                    )  # fmt: skip
            writer.write(Round(impl=impl, round=number, targets=5 * prompts, others=0, steps=9, tokens=99, seconds=1.0))
        writer.write(replayed(impl, 5 * prompts))
    side.close()
    writer.finish()
    return read_run(path)


def test_all_prompts_together_in_every_report(tmp_path: Path) -> None:
    """One of six prompts parts under stock and none under invariant: counts, intervals over prompts, both bounds."""
    run = several(tmp_path)
    (section,) = build([run]).runs
    assert section.sampled is not None
    stock, invariant = section.sampled.overall
    assert (stock.prompts, stock.differing_traces, stock.differing_texts, stock.rounds) == (6, 1, 1, 2)
    assert invariant.bound_rounds == pytest.approx(0.95)
    assert invariant.bound_completions == pytest.approx(1 - 0.05 ** (1 / 54))
    facts = (
        "1 of 6 (95% ", "of prompts drawn like these, under such loads)",
        "0 of 6 (at 95%, one-sided: below 95.0% of rounds, below 5.40% of completions if they were independent)",
        "Texts differ only under stock on 1 prompt, only under invariant on 0, of 6",
    )  # fmt: skip
    page, document, full = html.render([run]), markdown.render([run], full=True), printed(run, width=120)
    for fact in facts:
        assert fact in page, fact
        assert fact in unescape(document), fact
    assert "prompts whose texts differ" in flat(full)
    assert facts[-1] in flat(full)
    assert NASTY not in page
    brief = printed(run, width=120, verbose=False)
    assert "batch-dependent on 1 of 6 prompts" in flat(brief)
    assert len(brief.splitlines()) <= terminal.LINES_MOST


def test_of_many_prompts_those_that_part_most_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of ten thousand sections is read by nobody; what parts is never among what is left out. A prompt under
    several seeds is several subjects, called by their seeds; one prompt has no overall."""
    monkeypatch.setattr(samples, "SAMPLES_MOST", 2)
    run = several(tmp_path, parting=(4,))
    (section,) = build([run]).runs
    assert section.sampled is not None
    assert [s.prompt for s in section.sampled.shown] == [0, 4]
    assert {v.prompt for v in section.shown_verdicts} == {0, 4}
    assert "the 2 that differ most" in html.render([run])
    (section,) = build([sampled(tmp_path)]).runs
    assert section.sampled is not None
    assert (section.sampled.overall, section.sampled.shown) == ([], section.samples)
    (section,) = build([several(tmp_path, prompts=3, parting=(), seeds=3)]).runs
    assert [s.name for s in section.samples] == ["seed 0", "seed 1", "seed 2"]


def test_numbers_are_written_as_numbers() -> None:
    """No percentage of a hundred zeros, and one of a thing is one."""
    assert (percent(3e-150, "down"), percent(3e-150, "up")) == ("2.99e-148%", "3.02e-148%")
    assert percent(3e-7) == "0.000030%"
    assert "1 thread ·" in environment_line(ENVIRONMENT | {"gpu": None, "num_threads": 1})
    assert "2 threads ·" in environment_line(ENVIRONMENT | {"gpu": None, "num_threads": 2})
    one = Difference(mismatched=1, compared=1, max_abs=1.0, max_ulp=1)
    assert share_text(one) == "its one element"
    assert share_text(msgspec.structs.replace(one, compared=4096)) == "1 of 4,096 elements"
