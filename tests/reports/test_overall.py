"""Several prompts: all of them together, then those that part most, in every report."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from nondet.core.records import Run
from nondet.core.runfile import open_run, read_run
from nondet.core.traces import Trace, TraceWriter, tokens_digest, trace_digest
from nondet.reports import html, markdown, samples, terminal
from nondet.reports.content import Report, build
from tests.reports.factory import ENVIRONMENT, replayed, sampled

NASTY = "<script>alert(1)</script>"


def several(folder: Path, prompts: int = 6, parting: tuple[int, ...] = (4,), seeds: int = 0) -> Run:
    """Ten completions of each prompt under two implementations, in two rounds; stock parts on some prompts."""
    from nondet.core.records import Completion, Round

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


def terminal_text(run: Run, **how: bool) -> str:
    console = Console(file=StringIO(), width=120, force_terminal=False)
    terminal.render([run], console, **how)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_all_prompts_together_in_every_report(tmp_path: Path) -> None:
    """One of six prompts parts under stock and none under invariant: counts, intervals over prompts, both bounds."""
    run = several(tmp_path)
    (section,) = build([run]).runs
    assert section.sampled is not None
    stock, invariant = section.sampled.overall
    assert (stock.prompts, stock.parted_traces, stock.parted_tokens, stock.rounds) == (6, 1, 1, 2)
    assert invariant.bound_rounds == pytest.approx(0.95)
    assert invariant.bound_completions == pytest.approx(1 - 0.05 ** (1 / 54))
    facts = (
        "1 of 6 (95% ", "of prompts drawn like these, under such loads)",
        "0 of 6 (at 95%, one-sided: below 95.0% of rounds, below 5.40% of completions if they were independent)",
        "Texts part under stock alone on 1 prompt, under invariant alone on 0, of 6",
    )  # fmt: skip
    page, document, full = html.render([run]), markdown.render([run], full=True), terminal_text(run, verbose=True)
    for fact in facts:
        assert fact in page, fact
        assert fact in markdown_plain(document), fact
    assert "prompts whose texts part" in full.replace("\n", " ")
    assert facts[-1] in " ".join(full.split())
    assert NASTY not in page
    brief = terminal_text(run)
    assert "stock: of 6 prompts, traces part on 1, texts on 1; 60 completions in 2 rounds" in brief
    assert "batch-dependent on 1 of 6 prompts" in " ".join(brief.split())
    assert len(brief.splitlines()) <= terminal.LINES_MOST


def markdown_plain(text: str) -> str:
    """Character references of ASCII punctuation undone."""
    import html as escapes

    return escapes.unescape(text)


def test_of_many_prompts_those_that_part_most_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of ten thousand sections is read by nobody; what parts is never among what is left out."""
    monkeypatch.setattr(samples, "SAMPLES_MOST", 2)
    (section,) = build([several(tmp_path, parting=(4,))]).runs
    assert section.sampled is not None
    assert [s.prompt for s in section.sampled.shown] == [0, 4]
    assert {v.prompt for v in section.told} == {0, 4}
    assert "the 2 that part most" in html.render([several(tmp_path)])


def test_an_effect_without_bound_is_no_number_in_the_data(tmp_path: Path) -> None:
    """Where no round was held against another the design effect is infinite, which JSON has no word for."""
    (section,) = build([several(tmp_path)]).runs
    assert section.sampled is not None
    overall = tuple(replace(o, effect=float("inf")) for o in section.sampled.overall)
    endless = replace(section, sampled=replace(section.sampled, overall=overall))
    data, _ = html.page_data(Report((endless,)), 10**7)
    assert [o["effect"] for o in json.loads(data)[0]["overall"]] == [None] * 2


def test_one_prompt_has_no_overall(tmp_path: Path) -> None:
    """Its own table says all of it."""
    (section,) = build([sampled(tmp_path)]).runs
    assert section.sampled is not None
    assert (section.sampled.overall, section.sampled.shown) == ((), section.samples)


def test_seeds_are_named(tmp_path: Path) -> None:
    """A prompt under several seeds is several subjects, called by their seeds."""
    (section,) = build([several(tmp_path, prompts=3, parting=(), seeds=3)]).runs
    assert [s.name for s in section.samples] == ["seed 0", "seed 1", "seed 2"]
