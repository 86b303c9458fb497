"""The parts that axes are made of: orders of service, routers, drafts, and what --vary takes and refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from nondet.core.records import Run
from nondet.errors import UnknownNameError, UserError
from nondet.reports import html, markdown
from nondet.reports.axes import axes_blocks
from nondet.reports.content import build
from nondet.reports.document import BRIEF
from nondet.reports.terminal import renderables
from nondet.sampling import collect as varying
from nondet.sampling.axes import AXES, Conditions, Subject, Varied, parse_vary, plan_axes
from nondet.sampling.collect import play_replicas
from nondet.sampling.engine import run_session
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel
from nondet.sampling.orders import ORDERS, client_of
from nondet.sampling.plan import PLAIN, Outcome, Plan, Request, Session, Setting, earlier_text, long_prompt, parse_load
from nondet.sampling.routing import route
from nondet.sampling.speculation import check_draft_model, edit, look_up
from nondet.services.sample import check_vary
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from nondet.verdict.samples import tally_axes
from tests.build import tiers
from tests.sampling.conftest import Heard, planned, sampled_into, untimed

LOAD = "others=2,targets=4,spread=4,prompt=6-20,tokens=2-8,budget=16,page=4,requests=16,sharing=off"


def test_orders_of_service() -> None:
    """Each policy arranges as its name says, and clients take turns under deficit round robin."""
    prompts = {"t0": range(40), "t1": range(5), "r0-b000": range(40), "r0-b001": range(100, 110), "t2": range(90, 130)}
    requests = {name: Request(name, name[0] == "t", tuple(p), 8, 0) for name, p in prompts.items()}
    waiting = list(requests)
    assert ORDERS["fifo"](requests).arrange(waiting) == waiting
    assert ORDERS["shortest"](requests).arrange(waiting)[:2] == ["t1", "r0-b001"]
    prefix = ORDERS["prefix"](requests)
    assert prefix.arrange(waiting) == waiting  # nothing is cached yet
    prefix.admitted("t0")
    assert prefix.arrange(["t2", "r0-b001", "t1", "r0-b000"]) == ["r0-b000", "t1", "t2", "r0-b001"]
    deficit = ORDERS["deficit"](requests)
    arranged = deficit.arrange(["t0", "t1", "t2", "r0-b000", "r0-b001"])
    assert sorted(arranged) == sorted(requests)
    assert {client_of(requests[name]) for name in arranged[:3]} == {"targets", "others 0", "others 1"}
    for name in ("t0", "t1", "t2"):
        deficit.admitted(name)
    assert client_of(requests[deficit.arrange(["t0", "r0-b000"])[0]]) != "targets"  # it had its turn


def test_routers() -> None:
    """In turn; a long prefix where it is and no overload; every client's credit spread over the replicas."""
    same = [Request(f"t{i}", True, tuple(range(60)), 4, 0) for i in range(12)]
    assert route("round-robin", same, 3) == [i % 3 for i in range(12)]
    stay = route("prefix-load", same[:4], 3)
    assert len(set(stay)) == 1  # the prefix is there, and the load is small
    assert len(set(route("prefix-load", same * 20, 3))) > 1  # until the replica has far more than the others
    other = [Request(f"t{i}", True, tuple(range(100 * i, 100 * i + 60)), 4, 0) for i in range(3)]
    assert sorted(route("prefix-load", other, 3)) == [0, 1, 2]  # nothing to exploit: the least loaded
    assert len(set(route("deficit-prefix", same * 5, 3))) == 3
    assert route("deficit-prefix", same[:2], 3)[0] == route("deficit-prefix", same[:2], 3)[1]


def test_drafts() -> None:
    """Lookup takes the latest place, editing goes on where the text stands in the earlier one; else nothing."""
    assert look_up([1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3], 2) == [7, 1]
    assert look_up([1, 2, 3], 2) == []
    assert edit([50, 4, 5, 6], 3, earlier=(3, 4, 5, 6, 7, 8, 9)) == [7, 8, 9]
    assert edit([50, 51], 3, earlier=(3, 4, 5)) == []
    assert long_prompt([1] * 60, [2] * 9, 256) == (1,) * 60
    assert len(long_prompt([1, 2], range(90), 256)) == 44
    assert sum(a != b for a, b in zip(earlier_text(range(16)), range(16), strict=True)) == 2


def test_what_makes_no_sense_is_refused_in_one_line() -> None:
    """Unknown axes, values that are none, axes that the device lacks: before a model is asked anything."""
    refused = {
        "nonsense": ["nonsense"],
        "empty part": ["sharing,,chunk"],
        "twice": ["sharing,sharing"],
        "excludes other axes": ["all,chunk"],
        "lacks a value": ["chunk="],
        "makes no sense": ["chunk=0", "chunk=many", "page=1", "threads=100000"],
        "unknown": ["scheduler=fastest", "speculative=guess", "routing=random", "sharing=maybe"],
        "--draft-model FOLDER": ["speculative=model"],
        "attention=flex is unknown. Known: eager, sdpa$": ["attention=flex"],
        "dtype=float8 is unknown": ["dtype=float8"],
        "CUDA": ["graphs"],
        "no other value": ["budget=16"],
    }
    subject = Subject(Conditions(parse_load(LOAD), "float32"), "cpu", (), 2)
    for message, specs in refused.items():
        for spec in specs:
            with pytest.raises((UserError, UnknownNameError), match=message) as error:
                plan_axes(parse_vary(spec), subject)
            assert "\n" not in str(error.value)


def test_what_is_lacking_or_did_nothing_counts_nowhere() -> None:
    """Of "all" an axis that the device lacks is left out with its reason. Where the engine reports nothing, no value is
    proven but "none"; "off" takes effect only where the base did it."""
    subject, nothing = Subject(Conditions(parse_load(LOAD), "float32"), "cuda", (), 2), Counter[str]()
    notes = {v.axis.name: v.note for v in plan_axes(parse_vary("all"), subject)}
    assert "CUDA device" in notes["threads"]
    assert not notes["graphs"]
    for name, axis in AXES.items():
        proofs = {value: axis.proof(value, nothing, nothing) for value in axis.values(subject)}
        assert not [value for value, proof in proofs.items() if proof.holds and value != "none"], name
    for name, figure in [("sharing", "cached"), ("graphs", "graphs")]:
        for now, before, holds in ((0, 3, True), (0, 0, False), (1, 3, False)):
            assert AXES[name].proof("off", Counter({figure: now}), Counter({figure: before})).holds == holds


def test_a_draft_model_drafts_where_it_is_asked_to(tiny_float32: LoadedModel, tiny_folder: Path) -> None:
    """It joins the axis's own values; without the axis, or with other tokens than the model's, it is refused."""
    subject = Subject(Conditions(parse_load(LOAD), "float32"), "cpu", (), 2, draft_model=str(tiny_folder))
    assert "model" in AXES["speculative"].values(subject)
    (varied,) = plan_axes(check_vary("speculative=model", ["x"], str(tiny_folder)) or {}, subject)
    assert [c.setting.draft_model for _, c in varied.values] == [str(tiny_folder)]
    for spec in (None, "chunk", "speculative=lookup:draft"):
        with pytest.raises(UserError, match="--draft-model"):
            check_vary(spec, ["x"], str(tiny_folder))
    assert check_vary(None, ["x"]) is None
    assert check_draft_model(str(tiny_folder), tiny_float32)["parameters"] > 0
    other = replace(tiny_float32, tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0}))
    with pytest.raises(UserError, match="other tokens"):
        check_draft_model(str(tiny_folder), other)


# One thing about the engine varied alone: each axis takes effect and proves it, and bits follow it where they may.

# a value or two of each: the others are asked below, one by one
ALL = (
    "sharing,chunk=5,budget=8,page=8,scheduler=shortest,preemption=1,speculative=edit,routing=prefix-load,"
    "dtype=bfloat16,attention,threads=2"
)
NEW = 5
TEXT = "The following exceptions are raised when an operand is not what the operator takes"
BY_VALUE = {"dtype", "attention", "threads"}
# CUDA graphs need CUDA; ranks on a CPU are processes, which "all" leaves out: see test_ranks.py
NOT_HERE = {"graphs", "ranks"}


@contextmanager
def by_rows() -> Iterator[type[Counter[str]]]:
    """A stock product with a planted fault: what a row gets follows how many rows there are."""

    def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, weight = x.reshape(-1, x.shape[-1]).double(), w.double()
        out = torch.stack([torch.mv(weight, row) for row in rows]) * (1.0 + len(rows) / 2**20)
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    library = torch.library.Library("aten", "IMPL")
    library.impl("linear", linear, "CPU", allow_override=True)
    try:
        yield Counter
    finally:
        library._destroy()


def planted(name: str, model: Any) -> Any:
    """Stock is the faulty product; invariant is invariant."""
    return by_rows() if name == "stock" else implementation(name, model)


def plan_of(loaded: LoadedModel, n: int = 4) -> Plan:
    return planned(loaded, LOAD, TEXT, n=n, new=NEW)


def axes_of(loaded: LoadedModel, plan: Plan, spec: str = ALL) -> tuple[Conditions, list[Varied]]:
    base = Conditions(plan.load, loaded.dtype, threads=1)
    with implementation("invariant"):
        alone = run_session(loaded.model, [r for r in plan.rounds[0] if r.target][:1], plan.load)
    requests = [r for requests in plan.rounds for r in requests]
    subject = Subject(base, "cpu", requests, 2, earlier_text(alone.outcomes[0].token_ids))
    return base, plan_axes(parse_vary(spec), subject)


@pytest.fixture(scope="module")
def varied(tiny_float32: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Every axis, stock with a planted fault and invariant kernels."""
    path = tmp_path_factory.mktemp("vary") / "run.jsonl"
    plan = plan_of(tiny_float32)
    base, axes = axes_of(tiny_float32, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varying, "implementation", planted)
        return sampled_into(path, tiny_float32, plan, ["stock", "invariant"], base=base, axes=axes)


def test_every_axis_takes_effect_and_proves_it(varied: Run) -> None:
    """A value counts only with its proof: here each has one, under both implementations. CUDA graphs need CUDA."""
    for impl in ("stock", "invariant"):
        tallies = {t.axis: t for t in tally_axes(varied, impl)}
        assert set(tallies) == set(AXES) - NOT_HERE
        assert not [name for name, t in tallies.items() if not t.tried]
    assert not [f"{r.axis}={r.value}, {r.impl}: {r.proof}" for r in varied.axis_values if not r.proven]


def test_the_planted_fault_follows_the_axes_and_the_cure_does_not(varied: Run) -> None:
    """Stock whose rows follow the batch parts along every axis; with invariant kernels one trace is left of all."""
    stock, invariant = ({t.axis: t for t in tally_axes(varied, impl)} for impl in ("stock", "invariant"))
    assert stock["page"].moved == 0  # nothing is shared at this base: pages decide nothing of the batches
    for name in set(AXES) - NOT_HERE - {"page"} - BY_VALUE:
        assert stock[name].moved > 0, name
        assert stock[name].traces > 1, name
        assert (invariant[name].moved, invariant[name].traces) == (0, 1), name
    for name in BY_VALUE:  # another dtype has other bits; within one value nothing parts
        assert stock[name].traces_within > 1
        assert invariant[name].traces_within == 1
    assert invariant["dtype"].traces == 2
    verdicts = {v.impl: v for v in judge(varied)}
    assert set(verdicts["stock"].findings) == {Finding.BATCH, Finding.OTHER}
    assert verdicts["invariant"].findings == (Finding.CLEAN,)
    # within one value of dtype the one round holds the first completion, and bounds no rate of rounds
    assert "at each value: below 63.2% of completions" in verdicts["invariant"].text


def test_what_a_file_says_acts_nowhere(varied: Run) -> None:
    """Names and proofs of a file from anywhere are escaped in markdown and in HTML, and printable in the terminal,
    where each axis is a line of 80 columns."""
    hostile = "<script>alert(1)</script>|`x`\x1b[31m"
    records = [
        msgspec.structs.replace(r, axis=hostile, value=hostile, proof=hostile, note="") if r.axis == "page" else r
        for r in varied.axis_values
    ]
    run = msgspec.structs.replace(varied, axis_values=records)
    console = Console(file=StringIO(), width=80)
    console.print(*renderables(axes_blocks(run, build([run]).runs[0].axes, 1), console, BRIEF), sep="\n")
    lines = console.file.getvalue().splitlines()
    assert len(lines) > len(AXES) - len(NOT_HERE)
    assert max(map(len, lines)) <= 80
    for shown in (html.render([run]), markdown.render([run], full=True)):
        assert "One setting of the engine changed at a time" in shown
        assert "<script>alert(1)" not in shown
        assert "\x1b" not in shown + "".join(lines)


def test_a_run_that_was_stopped_goes_on(tiny_float32: LoadedModel, tmp_path: Path) -> None:
    """Stopped between two arms and resumed: no completion is lost, none is there twice, all are as in one go. Where the
    base comes out otherwise by then, no arm is held against what it was."""
    plan = plan_of(tiny_float32)
    base, axes = axes_of(tiny_float32, plan, "sharing,scheduler=shortest")

    def run(path: Path, stop: str = "nowhere") -> Run:
        def halt(impl: str, arm: str, *_: int) -> None:
            if arm == stop:
                raise KeyboardInterrupt

        more: dict[str, Any] = {"base": base, "axes": axes, "resume": path.exists()}
        return sampled_into(path, tiny_float32, plan, notes=Heard(progress=halt), **more)

    whole = run(tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped.jsonl", stop="scheduler=shortest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varying, "implementation", planted)  # another process has other bits
        with pytest.raises(UserError, match="differs from before the stop"):
            run(tmp_path / "stopped.jsonl")
    resumed = run(tmp_path / "stopped.jsonl")
    assert resumed.axis_values == whole.axis_values
    assert untimed(resumed) == untimed(whole)


def test_a_round_of_several_engines_loses_nothing_of_theirs() -> None:
    """First use, steps, figures and admissions of every replica are in the round's one session; the requests of a
    single one have its whole session."""

    def run(requests: list[Request], *_: Any, **__: Any) -> Session:
        made, ids = [Outcome(r, [7], bytes(4), finish="length") for r in requests], [r.id for r in requests]
        more = {"packs": {1: ()}, "figures": {"hits": 1}, "admitted": ids, "first_use_seconds": 1.5}
        return Session(made, steps=2, tokens=len(made), seconds=1.0, **more)

    requests = [Request(f"t{i}", True, (1, 2, 3), 1, 0) for i in range(3)]
    engine: Any = SimpleNamespace(run=run)
    session = play_replicas(engine, requests, parse_load(LOAD), 3, "round-robin")
    assert (session.steps, session.seconds, session.tokens, session.first_use_seconds) == (6, 3.0, 3, 4.5)
    assert [o.request for o in session.outcomes] == requests
    assert session.admitted == ["t0", "t1", "t2"]
    assert (session.figures["hits"], session.figures["replicas_most"], session.figures["rerouted"]) == (3, 3, 0)
    one = play_replicas(engine, requests, parse_load(LOAD), 1, "")
    assert (one.packs, one.admitted) == ({1: ()}, session.admitted)
    kept = play_replicas(engine, requests, parse_load(LOAD), 3, "prefix-load")
    assert (kept.figures["replicas_most"], kept.figures["rerouted"]) == (1, 2), "one prefix: all go to one replica"


def results(session: Session) -> list[Any]:
    return [(o.token_ids, o.logprobs, o.margins, o.reason) for o in session.outcomes]


@pytest.mark.parametrize("drafts", tiers(["draft"], ["lookup", "model", "edit"]))
def test_a_verify_step_keeps_the_ids_of_greedy_decoding(tiny_float32, tiny_folder, drafts) -> None:
    """With kernels whose bits follow no batch, drafts change steps and nothing else: ids, logprobs, margins."""
    plan = plan_of(tiny_float32)
    tokens = 24 if drafts == "lookup" else 10  # until the text repeats something
    requests = [replace(r, max_new_tokens=tokens) for r in plan.rounds[0]]
    with implementation("invariant"):
        plain = run_session(tiny_float32.model, requests, plan.load)
        text = tuple(next(o for o in plain.outcomes if o.request.target).token_ids)
        earlier = earlier_text(text) if drafts == "edit" else text
        # the draft model is the model itself, but for the little of each text that a drafter sees
        setting = Setting(drafts=drafts, draft_tokens=3, earlier=earlier, draft_model=str(tiny_folder))
        drafted = run_session(tiny_float32.model, requests, plan.load, setting=setting)
    assert 0 < drafted.figures["accepted"] < drafted.figures["drafted"]
    assert results(plain) == results(drafted)
    assert drafted.steps != plain.steps


def test_right_drafts_save_steps_and_sharing_stays_sound(tiny_float32: LoadedModel) -> None:
    """Drafts that are always right take a fraction of the steps; pages of rejected ones are never shared."""
    load = parse_load("none,targets=2,page=4,sharing=on")
    prompt = tuple(tiny_float32.encode(TEXT))
    requests = [Request("t0", True, prompt, 24, 0), Request("t1", True, prompt, 24, 40)]
    with implementation("invariant"):
        plain = run_session(tiny_float32.model, requests, load)
        right = tuple(plain.outcomes[0].token_ids)
        setting = Setting(drafts="edit", draft_tokens=4, earlier=(*prompt, *right))
        drafted = run_session(tiny_float32.model, requests, load, setting=setting)
    assert results(drafted) == results(plain)
    assert drafted.steps < 0.7 * plain.steps
    assert drafted.figures["hits"] == plain.figures["hits"] == 1, "the first one computed what the second one took"


def test_preempted_requests_are_computed_again(tiny_float32: LoadedModel) -> None:
    """A cache with room for few evicts and recomputes; with room for all nobody is; the bits agree."""
    requests = [Request(f"t{i}", True, tuple(range(10 + i, 26 + i)), 24, 0) for i in range(4)]
    load = parse_load("none,targets=4,page=4,budget=32,requests=4,sharing=off")
    with implementation("invariant"):
        ample, small = (run_session(tiny_float32.model, requests, load, setting=s) for s in (PLAIN, Setting(pages=20)))
    assert [ample.figures[name] for name in ("preempted", "recomputed", "hits", "cached")] == [0] * 4
    assert small.figures["preempted_targets"] > 0
    assert small.figures["recomputed"] > 0
    assert results(small) == results(ample)
