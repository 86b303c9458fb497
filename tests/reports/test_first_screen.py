"""The chain from the token to the cure, and what is to be run next: what a report holds, and what it lacks."""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import msgspec
import typer.main

from nondet import cli
from nondet.core.records import Completion, Run, Step, Tape, TraceVerdict
from nondet.core.registry import PROBES, load_object, load_probe, operators
from nondet.core.runfile import read_run
from nondet.kernels.dispatch.operators import FAMILIES
from nondet.probes.base import Options
from nondet.probes.runner import Job
from nondet.reports.axes import AxisEffect
from nondet.reports.content import Report, build, headline
from nondet.reports.first_screen import PROBE_OF, chain, clearest
from nondet.reports.first_screen import Step as Link
from nondet.reports.text import probe_of_mine
from nondet.reports.traces import Story, story_headline
from nondet.sampling.analysis import speed_ratio_of
from nondet.verdict.rows import judge_rows
from tests.build import failed, h200_sweep, row, run_of, sampled, six_rounds, stock_parts
from tests.diagnose.test_verdict import PARTED, traced
from tests.diagnose.test_verdict import run_of as diagnosis
from tests.reports.test_effect import screen_of


def steps_of(report: Report) -> dict[str, Link]:
    return {step.label: step for step in chain(report)}


def said(*runs: Run) -> dict[str, tuple[str, str]]:
    """Label -> (what is known, the command that would tell)."""
    return {label: (step.text, step.command) for label, step in steps_of(build(list(runs))).items()}


def next_of(*runs: Run) -> str:
    following = screen_of(*runs).next
    return f"{following.command}  {following.why}"


def test_the_chain_of_operators_asked_alone() -> None:
    assert set(PROBE_OF) == {"attention", "matmul", "norm", "softmax", "moe"}
    assert set(PROBE_OF) <= set(FAMILIES)
    assert set(PROBE_OF.values()) <= set(PROBES)
    told = said(run_of(*h200_sweep()))
    assert told["kernel"][0].startswith("linear in isolation, row 0 of M rows, K=12288 N=4096, bell: M 1-7: A (nvjet")
    assert told["operator"] == ("tested in isolation, stock diverges in linear", "nondet trace")
    assert told["cost"] == ("not measured", "nondet sample --turns")
    flash = said(run_of(row([0, 1], kernels=[["a"], ["b_splitK"]], impl="stock-flash")))
    assert flash["operator"] == ("tested in isolation, stock-flash diverges in linear", "nondet trace")
    assert flash["kernel"][0].endswith(" M 1: A (a) | 2: B (b_splitK)")
    nothing = said(run_of(row([0, 0])))
    assert nothing == nothing | {
        "operator": ("none of those tested depends on the batch or the run", ""),
        "kernel": ("none to name: no operator depends on the batch or the run", ""),
        "cure": ("the invariant implementation was not run here", "nondet sample --impl both"),
    }


def test_the_chain_of_a_family_that_is_replaced_alone(tmp_path: Path) -> None:
    parts = lambda impl, i: (((4, 1),), 0) if impl == "stock" and i % 9 == 0 else ((), 0)  # noqa: E731 - one line
    run = sampled(tmp_path, impls=("stock", "invariant:attention"), variants=parts)
    told = said(run)
    text = "attention: replacing only it removed every divergence seen, in 60 completions"
    assert told["operator"] == (text, "")
    assert told["kernel"] == ("not probed yet", "nondet probe attention")
    parted = [row([0, 1], probe=probe, operator=name) for probe, name in (("matmul", "linear"), ("attention", "attn"))]
    assert said(run, run_of(*parted))["kernel"][0].startswith("attn in isolation")


def test_the_chain_of_a_trace() -> None:
    run = run_of(**traced("batch-dependent"))
    culprit = msgspec.structs.replace(
        run.culprits[0], token=7, kernels=[["cudnn_a", "cudnn_a"], ["cutlass_b"]],
        sentence="position 1, `linear` of m: 3 of 64 outputs differ; cudnn_a at 1 rows against cutlass_b at 9 rows",
    )  # fmt: skip
    run.culprits[:] = [msgspec.structs.replace(culprit, number=2, call="later"), culprit]
    told = said(run)
    assert told["token"] == ("the traced difference reaches the logits of token 7", "")
    text = "in the pair traced, ahead of token 7: position 1, `linear` of m: 3 of 64 outputs differ"
    assert told["operator"] == (text, "")
    assert told["kernel"] == ("cudnn_a compared with cutlass_b", "")
    assert told["cure"] == ("replacing matmul removes the divergence", "")
    run.culprits[:] = [msgspec.structs.replace(culprit, call="", kernels=[])]
    assert said(run)["operator"][1] == "nondet trace"


def test_the_chain_of_what_was_varied_and_of_servers() -> None:
    for lines, text in [  # of each axis: held, first token, traces at one value
        ([(True, 9, 2), (True, 4, 3), (True, None, 1)], "traces of stock differ, first in the bits of token 4"),
        ([(True, None, 2)], "traces of stock differ"),
        ([(False, 6, 2), (False, None, 1)], "traces of stock differ, first in the bits of token 6"),
        ([(True, None, 1)], "no trace changes with what was varied"),
        ([(False, None, 3)], "traces of stock differ"),
    ]:
        report: Any = build([run_of(row([0, 0]))])
        for i, (held, first, count) in enumerate(lines):
            counts = {"moved": count - 1, "traces_within": count}
            tally: Any = SimpleNamespace(held=held, tried=True, values=(), idle=(), **counts)
            report.runs[0].axes[str(i)] = {"stock": AxisEffect("stock", tally, first)}
        assert steps_of(report)["token"].text == text
    report.runs[0].endpoint = SimpleNamespace(differences=[f"s{i}: bits" for i in range(4)], cure="not tried")
    assert steps_of(report)["cause"].text == "s0: bits; s1: bits; s2: bits; and 1 more"


NAMED = traced("batch-dependent", ("repeat", "identical"))


def test_a_diagnosis_names_no_operator_that_is_not_behind_its_finding() -> None:
    """Run-to-run is no fault of the call that a trace found between batches, each arm of which came again equal."""
    innocent = diagnosis(PARTED | {"run": "no"}, **NAMED)
    assert "linear" not in story_headline(Story(innocent))
    told = said(innocent)
    assert "not named" in told["operator"][0]
    assert "linear" not in told["operator"][0]
    assert told["operator"][1] == "nondet trace"
    assert told["kernel"][1] == "nondet probe matmul attention"
    why = Story(innocent).answers["Why"]
    assert why.startswith("No operator could be named: each arm was bit-identical when it was repeated")
    for found in (traced("run-to-run"), traced("batch-dependent", ("repeat", "divergent"))):
        diagnosed = diagnosis(PARTED | {"run": "no"}, **found)
        assert story_headline(Story(diagnosed)).startswith("Run-to-run nondeterministic: ")
        assert story_headline(Story(diagnosed)).endswith("; the first operator to differ is `linear` of m")
        assert said(diagnosed)["operator"] == ("in the pair traced: it parts", "")
    batch = story_headline(Story(diagnosis(PARTED, **NAMED)))
    assert batch == "Batch-dependent: what batch found; the first operator to differ is `linear` of m"


def test_a_cost_that_was_not_measured_is_no_ratio(tmp_path: Path) -> None:
    """The rounds of a diagnosis are no timed rounds: without its cost step there is no ratio anywhere."""
    for cost in ["skipped", "unknown"]:
        run = sampled(tmp_path, name=f"{cost}.jsonl")
        run.steps.extend(diagnosis(PARTED | {"cure": "yes", "cost": cost}).steps)
        assert said(run)["cure"] == ("batch_invariant() left no divergence: what cure found", "")
        assert said(run)["cost"] == ("not measured", "nondet sample --turns")
        assert speed_ratio_of(run) is None
        figures = {"stock_tokens_per_second": 200.0, "invariant_tokens_per_second": 100.0}
        more = {"rounds": 2, "invariant_ratio_low": 0.45, "invariant_ratio_high": 0.55}
        for known, text in (
            (figures, "not measured"),
            (figures | more, "speed ratio 0.45 to 0.55 against stock (2 rounds)"),
        ):
            run.steps[-1] = msgspec.structs.replace(run.steps[-1], outcome="yes", figures=known)
            assert said(run)["cost"][0] == text


def test_a_cure_that_is_none_is_never_advised(tmp_path: Path) -> None:
    refuted = diagnosis(PARTED | {"cure": "no"}, **NAMED)
    text, command = said(refuted)["cure"]
    assert "batch_invariant() is no cure here" in text
    assert "cost" not in said(refuted)
    assert command == ""
    under_it = "nondet trace --impl invariant  names the operator that diverges under it, too"
    operators, run, named = run_of(*h200_sweep()), six_rounds(sampled(tmp_path)), diagnosis(PARTED, **NAMED)
    assert next_of(operators, run, named).endswith("then wrap the model in nondet.batch_invariant()")
    assert next_of(operators, run, refuted) == under_it
    parting = sampled(tmp_path, variants=lambda _, number: stock_parts("stock", number), name="parting.jsonl")
    assert next_of(operators, parting, named) == under_it
    worse = run_of(*h200_sweep(), row([0, 1], impl="invariant", case="another"))
    assert next_of(worse, named) == "nondet sample  shows whether completions change, and from which token on"
    assert next_of(worse, run, named) == under_it
    for outcome in ["skipped", "unknown"]:
        run = diagnosis(PARTED | {"cure": outcome}, **NAMED)
        run.steps.append(Step(name="operator", outcome="yes", sentence="named", facts={"families": "matmul"}))
        text, command = said(run)["cure"]
        replaced = "Replacing matmul by the invariant implementation removes the divergence of the pair traced"
        assert text.startswith(replaced)
        assert command == "nondet sample --impl both"


def test_after_a_failure_the_next_line_is_its_mend(tmp_path: Path) -> None:
    run = run_of(*(failed(case=f"c{i}", reason=f"ValueError: broken {i}") for i in range(52)))
    assert re.fullmatch(
        "nondet probe all  again, once the first of 52 .* matmul: c0, .*ValueError: broken 0", next_of(run)
    )
    assert "again, once the failure is mended: matmul" in next_of(run_of(failed(reason="ValueError: broken")))
    assert "free memory" in next_of(run_of(failed(), row([0, 0])))
    completions = "nondet sample  shows whether completions change, and from which token on"
    assert next_of(run_of(failed(), row([0, 1]))) == completions
    requests = sampled(tmp_path, n=0, failures=3)
    requests.header.environment["argv"] = ["/bin/nondet", "sample", "--out", "r.jsonl", "--prompt", "a b"]
    assert next_of(requests) == (
        "nondet sample --out r.jsonl --prompt 'a b' --force  again, once the first of 6 failures is mended: "
        "3 requests (stock): RuntimeError: the engine stopped"
    )
    requests.header.environment["argv"] = ["my_script.py", "--fast"]
    assert next_of(requests).startswith("nondet sample  again")
    unknown = TraceVerdict(finding="unknown", culprits=[], families=None, sentences=[])  # without a call
    assert said(run_of(trace_verdicts=[unknown]))["operator"] == ("not traced yet", "nondet trace")


def by(command: str, run: Run, *argv: str, **plan: Any) -> Run:
    environment = {**run.header.environment, "argv": ["nondet", command, *argv]}
    run.header = msgspec.structs.replace(run.header, command=command, environment=environment)
    run.header.plan.update(plan)
    return run


MINE = {"impl": "mymodule:batchy", "shape": {"M": 256, "K": 256, "N": 64}, "device": "cpu"}
DEMONSTRATION = {"probe": "float-sum", "operator": "float_sum", "varied": "order", "impl": "torch"}


NO_TAPE: dict[str, Any] = {
    "requests": [], "prompts": [], "load": {}, "seed": 0, "eos": [], "engine": {}, "weights": "", "steps": [],
}  # fmt: skip


def test_what_is_next_after_completions(tmp_path: Path) -> None:
    run = by("sample", sampled(tmp_path), "--model", "my model", "--n", "60", "--threads=2", model={"name": "my model"})
    prompt = "nondet trace --prompt 'The following exceptions' --model 'my model' --threads=2"
    assert next_of(run) == f"{prompt}  names the operator that diverges first"
    run.tapes.extend(Tape(impl=r.impl, round=0, **NO_TAPE) for r in run.rounds)
    command, _, first, _, second = next_of(run).partition("  ")[0].removeprefix("nondet trace --run ").split()[0:5]
    traces = {c.request: (c.trace, c.tokens_digest) for c in run.completions if c.impl == "stock"}
    assert command.endswith("sample.jsonl")
    assert all(a != b for a, b in zip(traces[first], traces[second], strict=True))
    run.header.plan["sampling"] = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "seeds": 1}
    assert "--run" not in next_of(run)


def test_backends_stay_out_of_the_headline_unless_they_add_to_it():
    """A backend of stock is named there only where it finds what stock's own verdict does not."""
    agreeing, clean = row([0, 1], impl="stock-flash"), row([0, 0], impl="stock-math")
    rows = [row([0, 1]), agreeing, clean]
    assert headline(run_of(*rows), judge_rows(rows)) == "stock: batch-dependent in 1 of 1 case (linear)"
    rows = [row([0, 0]), agreeing]
    assert "stock-flash: batch-dependent" in headline(run_of(*rows), judge_rows(rows))
    rows = [row([0, 0], impl=f"tile-{i}") for i in range(8)]
    agreeing = judge_rows(rows)
    assert "tile-7: no divergence observed" in headline(run_of(*rows), agreeing)
    rows += [row([0, 1], impl="tile-8"), row([0, 0], impl="invariant")]
    said = headline(run_of(*rows), judge_rows(rows))
    assert "tile-8: batch-dependent" in said
    assert "invariant: no divergence observed" in said
    assert said.endswith("; 8 others: no divergence observed")
    rows = [row([0, 1], operator="attention"), row([0, 1]), row([0, 0], case="another")]
    verdict = judge_rows(rows)[0]
    assert "attention 1 of 1" in verdict.text
    assert headline(run_of(*rows), [verdict]) == "stock: batch-dependent in 2 of 3 cases"
    assert headline(run_of(row([0, 0])), []) == "nothing was compared"
    assert headline(run_of(row([0, 0]), complete=False), []) == "incomplete run, so far: nothing was compared"


def test_drawn_tokens_are_not_sent_to_a_greedy_trace(tmp_path: Path) -> None:
    for impls, command in (
        (("stock",), "nondet sample --impl stock-seeded --temperature 0.8"),
        (("stock", "stock-seeded"), ""),
        (("stock-seeded",), "nondet trace"),
        (("invariant",), ""),
    ):
        run = sampled(
            tmp_path, impls=impls, name=f"{len(impls)}{impls[0]}.jsonl",
            variants=stock_parts if len(impls) == 2 else lambda impl, i: stock_parts(impl.removesuffix("-seeded"), i),
        )  # fmt: skip
        run.header.plan["sampling"] = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "seeds": 1}
        report = build([run])
        operator = steps_of(report)["operator"]
        assert operator.command == command
        assert ("greedy" in operator.text) == (command == "nondet trace")
        forks = [s.first_fork for s in report.runs[0].samples[0].summaries]
        branches = [b for f in forks if f is not None for b in f.branches]
        assert {b.margin_min for b in branches} <= {None}
        assert bool(branches) == ("invariant" not in impls)


@functools.cache
def parser(name: str) -> Any:
    return typer.main.get_command(cli.application(name)).commands[name]  # type: ignore[attr-defined]


def accepted(command: str) -> None:
    """Parse as `nondet` would, and make the request of a service; nothing is measured."""
    program, name, *rest = shlex.split(command)
    assert program == "nondet"
    parsed = parser(name).make_context(name, rest)
    target = load_object(cli._COMMANDS[name][0])
    if target.__module__.startswith("nondet.services."):
        request = get_type_hints(target)["request"]
        given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")}
        values = {
            f.name: parsed.params[f.name] for f in fields(request) if parsed.params.get(f.name) not in (None, [], ())
        }
        request(**values, given=frozenset(given))


def kept(name: str, *typed: str) -> Run:
    """As it would be after these words, where there are any."""
    run = read_run(Path(__file__).parents[2] / "docs" / "evidence" / name)
    if typed:
        run.header.environment["argv"] = ["nondet", run.header.command, *typed]
    return run


def still(run: Run) -> Run:
    """The run as if nothing had differed in it."""
    first: dict[int, Completion] = {}
    for place, c in enumerate(run.completions):
        one = first.setdefault(c.prompt, c)
        same = {"trace": one.trace, "tokens_digest": one.tokens_digest, "n_tokens": one.n_tokens, "finish": one.finish}
        run.completions[place] = msgspec.structs.replace(c, **same)
    run.neighbours[:] = [msgspec.structs.replace(n, parted=0, top1_changed=0, topk_changed=0) for n in run.neighbours]
    alike = {"distinct": 1, "status": "identical", "difference": None}
    run.rows[:] = [msgspec.structs.replace(r, labels=[0] * r.trials, class_sizes=[r.trials], **alike) for r in run.rows]
    return run


def under(run: Run, *impls: str) -> Run:
    """An encoder's run as if each of these had done what stock did."""
    for records in (run.neighbours, run.rows, run.embed_passes):
        records[:] = [msgspec.structs.replace(r, impl=i) for r in records if r.impl == "stock" for i in impls]  # type: ignore[index]
    return run


def ends(tmp_path: Path) -> list[tuple[str, tuple[Run, ...]]]:
    """How the next command begins after each kind of report, and the runs that it is of."""
    clean = six_rounds(sampled(tmp_path, variants=lambda impl, number: ((), 0), name="clean.jsonl"))
    parting = sampled(tmp_path, variants=lambda _, number: stock_parts("stock", number), name="parting.jsonl")
    only_invariant = by("sample", sampled(tmp_path, impls=("invariant",), name="i.jsonl"))
    typed, engine = ("--engine", "vllm", "--model", "m"), {"name": "vllm", "impls": ["stock"]}  # as another may be
    alike = sampled(tmp_path, variants=lambda *_: ((), 0), impls=("stock",), name="o.jsonl")
    other_engine = by("sample", alike, *typed, engine=engine)
    cured = diagnosis(PARTED, **NAMED)
    demonstration = row([0, 1], demonstration=True, axis="order", **DEMONSTRATION)
    met = by("probe", run_of(row([0, 1]), row([0, 0], impl="invariant")), "--from-trace", "t", met={"k": 64})
    refuted_too = under(kept("cpu-xeon/embed.jsonl"), "stock", "invariant", "invariant:matmul")
    mismatch = functools.partial(kept, "h200/mismatch.jsonl.gz")
    arms = "--arms stock --steps 40 --out a.jsonl --lr=1e-3 --force --group 8"
    trl = kept("cpu/trl-invariant.jsonl.gz", *arms.split())
    mine, sizes = "nondet probe matmul --impl linear=mymodule:batchy", "--dtype bfloat16 --k 256 --n 64 --m 256"
    wrong, order = row([0, 0], status="wrong", reason="zeros", **MINE), row([0, 1], inputs="order", **MINE)
    fine, both = row([0, 0], case="other", **MINE), (row([0, 1]), row([0, 0], impl="invariant"))
    typed = ("--model", "m", "--prompt", "p q", "--within", "90", "--dtype", "float16")
    traced_run, other_family, unknown = (by("trace", run_of(**traced("batch-dependent"))) for _ in range(3))
    traced_run.source = "runs/my trace.jsonl"
    traced_run.culprits[:] = [msgspec.structs.replace(traced_run.culprits[0], family="matmul")]
    other_family.culprits[:] = [msgspec.structs.replace(other_family.culprits[0], family="convolution")]
    unknown.culprits.clear()
    unknown.trace_verdicts[:] = [msgspec.structs.replace(unknown.trace_verdicts[0], families=None, finding="unknown")]
    by("trace", unknown, "--model", "my model", "--load", "heavy", model={"name": "my model"})
    diagnoses = []
    for steps, more, begins in (
        (PARTED, {}, "nondet trace --model m --prompt 'p q' --dtype float16"),
        (PARTED | {"cure": "skipped"}, NAMED, "nondet sample --impl both --model m --prompt 'p q' --dtype float16"),
        (PARTED | {"cure": "yes"}, NAMED, "nondet sample --turns --model m --dtype float16"),
    ):
        run = by("diagnose", diagnosis(steps, **more), *typed, model={"name": "m"})
        run.culprits[:] = [msgspec.structs.replace(c, kernels=[["a"], ["b"]]) for c in run.culprits]
        diagnoses.append((begins, (run,)))
    return [
        *diagnoses,
        ("nondet probe --from-trace 'runs/my trace.jsonl'", (traced_run,)),
        ("with nondet.batch_invariant(['matmul']): ...", (other_family,)),  # replaces what diverged
        ("nondet sample --impl both --model 'my model'", (unknown,)),
        ("nondet sample --threads 1", (by("probe", run_of(row([0, 1])), "matmul", "--threads", "1"),)),
        ("nondet sample", (by("probe", run_of(row([0, 0]), row([0, 0], impl="invariant"))),)),
        (f"{mine} {sizes} --inputs order", (by("probe", run_of(order, fine)),)),
        (f"{mine} {sizes} --inputs bell", (by("probe", run_of(wrong, order)),)),
        (f"{mine} --full --dtype=float32", (by("probe", run_of(fine), "linear", "--dtype=float32"),)),
        ("nondet report runs/probe.jsonl --out report.html", (by("probe", run_of(fine), full=True),)),
        ("nondet sample --impl both --device cpu", (by("bench", run_of(*both), "--device", "cpu", "--m", "16"),)),
        (" ", (kept("h200-x2/engine-2-ranks.jsonl"),)),
        ("nondet mismatch --rollouts r --model FOLDER", (mismatch("--rollouts", "r"),)),
        ("nondet mismatch --rollouts r --model m --older", (mismatch("--rollouts", "r", "--model", "m"),)),
        ("nondet rl --steps 20 --model m", (mismatch("--model", "m"),)),
        ("nondet rl --arms stock,invariant --steps 40 --lr=1e-3 --group 8", (trl,)),
        ("nondet trace --model FOLDER", (kept("servers/vllm-cpu/sample.jsonl.gz"),)),
        ("nondet sample --n 3000 --load heavy", (still(kept("servers/vllm-cpu/sample.jsonl.gz")),)),
        ("nondet probe --from-trace", (kept("cpu/trace-embedded.jsonl"),)),
        (" ", (by("certify", run_of(row([0, 1], **MINE))),)),
        ("nondet sample --impl both", (kept("cpu-xeon/ci.jsonl"),)),
        ("nondet probe all", (by("probe", run_of(demonstration), "float-sum"),)),
        ("nondet sample --ranks 2", (kept("cpu/probe-all-reduce.jsonl.gz"),)),
        ("nondet certify all", (met,)),
        ("nondet embed --impl stock --impl invariant:matmul", (kept("cpu-xeon/embed.jsonl"),)),
        ("nondet embed --batch 128", (still(kept("cpu-xeon/embed.jsonl")),)),
        ("nondet certify all", (refuted_too,)),
        ("nondet trace --impl invariant", (run_of(*h200_sweep()), parting, cured)),
        ("with nondet.batch_invariant(): ...", (kept("cpu/diagnose-fp8.jsonl.xz"),)),
        ("nondet certify all", (run_of(*h200_sweep()), six_rounds(sampled(tmp_path)), cured)),
        ("nondet gate", (clean,)),
        ("nondet sample --turns", (only_invariant,)),
        ("nondet sample --impl both --model m", (other_engine,)),  # which has no invariant: not under it
        ("nondet sample --n 10000", (run_of(row([0, 0])), clean)),
    ]


def test_what_follows_each_kind_of_report_is_a_command_that_can_be_typed(tmp_path: Path) -> None:
    for begins, runs in ends(tmp_path):
        screen = screen_of(*runs)
        assert f"{screen.next.command} ".startswith(begins), begins
        for command in (screen.next.command, *(step.command for step in screen.steps)):
            if command and not command.startswith("with "):
                accepted(command)


def test_a_case_of_a_users_function_can_be_asked_again() -> None:
    """Whatever the probe: its command names the operator, sizes and inputs, and its plan holds the case."""
    for probe in [name for name in PROBES if name != "all-reduce"]:
        asked = {}
        for case in load_probe(probe).cases(Options(device="cpu")):
            if case.impls is None and case.operator in operators():
                asked.setdefault((case.operator, case.inputs, case.varied), case)
        for case in asked.values():
            head = Job(load_probe(probe), case, "torch:matmul", "cpu").head
            words = probe_of_mine(head, "torch:matmul")
            accepted(shlex.join(words))
            given = dict(zip(words[5::2], words[6::2], strict=True))
            sizes = {axis: int(given[f"--{axis}"]) for axis in "mkn" if f"--{axis}" in given}
            kinds = (given["--inputs"],) if "--inputs" in given else None
            names = [c.name for c in load_probe(probe).cases(Options("cpu", (case.dtype,), inputs=kinds, **sizes))]
            assert case.name in names or probe == "attention"  # whose sizes are a model's


def test_a_case_is_pinned_once_and_only_where_an_option_can_name_its_function() -> None:
    """For a function of a notebook, of another function, or compared by `nondet.check`, there is the page."""
    typed = ("linear", "--impl", "linear=mymodule:batchy", "--dtype", "bfloat16")
    sizes = ("--k", "256", "--n", "64", "--m", "256", "--inputs", "bell")
    page = "nondet report runs/probe.jsonl --out report.html"
    again = next_of(by("probe", run_of(row([0, 1], **MINE)), *typed, *sizes))
    assert again == f"{page}  shows every case with its batch sizes"
    for fields_ in ({"impl": "__main__:mine"}, {"impl": "m:make.<locals>.f"}, {"impl": "m:f", "probe": "check"}):
        assert next_of(by("check", run_of(row([0, 1], **{**MINE, **fields_})))).partition("  ")[0] == page
    accepted(page)


def test_none_depends_on_the_batch_is_said_of_all_that_was_tested() -> None:
    for bad in (row([0, 1], impl="invariant"), row([0, 0], impl="invariant", replays_parted=1, status="divergent")):
        steps = said(run_of(row([0, 0]), bad))
        assert steps["operator"][0] == "tested in isolation, invariant diverges in linear"
        assert "none to name" not in steps["kernel"][0]
    assert [*said(run_of(row([0, 1], impl="linear=mine:f")))] == ["operator", "kernel"]
    coarse = row([0, 0, 1, 1], values=[1, 17, 33, 64])
    fine = row([0, 0, 1, 1], values=[1, 23, 24, 64], case="finer")
    assert clearest([coarse, fine]) is fine
    certificate = said(kept("h200/certify.jsonl.gz"))
    assert (list(certificate), certificate["operator"][1]) == (["operator"], "")
    assert certificate["operator"][0].startswith("not in the class everywhere: cublaslt (linear, matmul); triton/16x64")
