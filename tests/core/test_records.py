"""What a reader takes and what it refuses: each limit itself, and one beyond it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nondet.core import records
from nondet.core.records import STEPS_MOST, Completion, Limit, Record, Round, Row, RunChecks
from nondet.core.runfile import encoded
from tests import build as factory

LARGEST, FARTHEST, WIDEST, TOKENS = 2**53, 2**63 - 1, 2**64, 2**24


def row(labels: tuple[int, ...] = (0, 1), **fields: Any) -> Row:
    return factory.row(labels, **fields)


def difference(**fields: Any) -> Row:
    filled: dict[str, Any] = {"mismatched": 3, "compared": 8, "max_abs": 1.0, "max_ulp": 1}
    return row(difference=records.Difference(**(filled | fields)))


def nested(depth: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for _ in range(depth - 1):
        tree = {"a": tree}
    return tree


def completion(**fields: Any) -> Completion:
    filled: dict[str, Any] = {"tokens_digest": "a" * 16, "trace": "f" * 16, "n_tokens": 4, "batch_max": 4}
    return factory.completion(**(filled | fields))


def served(**fields: Any) -> Completion:
    return completion(served=records.Served(**({"done": 1.0} | fields)))


def round_(**fields: Any) -> Round:
    filled: dict[str, Any] = {"impl": "stock", "round": 0, "targets": 0, "others": 0, "steps": 0, "tokens": 0}
    return Round(**(filled | {"seconds": 0.0} | fields))


def traffic(**fields: Any) -> Round:
    return round_(traffic=records.Traffic(pattern="p", concurrency=1, **fields))


def limit(**fields: Any) -> Limit:
    return msgspec.structs.replace(factory.limits()[0], **fields)


def cell(**fields: Any) -> Record:
    return factory.cell(1, factory.timed("stock", 2.0, **fields))


def contract(answer: str) -> records.ContractAnswer:
    return records.ContractAnswer(impl="server", question="greedy", answer=answer, evidence="e")


IDENTICAL = {"status": records.Status.IDENTICAL}

# A record of one figure, the largest (or smallest) that it takes, the first that it does not, and the field told.
EDGES: list[tuple[Callable[[Any], Record], Any, Any, str]] = [
    (lambda labels: row(labels, **IDENTICAL), (0, 0), (0, 1), "status"),
    (lambda n: row((0, 0), replays_parted=n, **IDENTICAL), 0, 1, "status"),
    (lambda n: row(replays=2, replays_parted=n), 2, 3, "replays_parted"),
    (lambda label: row((0, label), class_sizes=[1, 1], distinct=2), 1, 2, "labels"),
    (lambda n: row(class_sizes=[1, n], trials=1 + n), 1, 0, "class_sizes"),
    (lambda n: row((), class_sizes=[], distinct=n, trials=0, values=[]), 1, 2, "distinct"),
    (lambda n: row(values=[1, 2][:n]), 2, 1, "labels"),
    (lambda n: msgspec.structs.replace(row(), kernel_sets=[["a"], ["b"]], kernels=[0, n]), 1, 2, "kernels"),
    (lambda n: msgspec.structs.replace(row(), kernel_sets=[["a"]], kernels=[0] * n), 2, 1, "kernels"),
    (lambda n: row(shape={"K": n}), LARGEST, LARGEST + 1, "shape"),
    (lambda n: row(values=[1, n]), LARGEST, LARGEST + 1, "values"),
    (lambda n: row(nonfinite=n), LARGEST, LARGEST + 1, "nonfinite"),
    (lambda n: row(nonfinite=n), 0, -1, "nonfinite"),
    (lambda s: row(seconds=s), 0.0, -5e-324, "seconds"),
    (lambda n: row(extra={"n": n}), WIDEST, WIDEST + 1, "extra"),
    (lambda depth: row(extra=nested(depth)), 16, 17, "extra"),
    (lambda n: row(extra={"requests": n}), 0, -1, "extra.requests"),
    (lambda n: difference(mismatched=n), 8, 9, "difference.mismatched"),
    (lambda n: difference(nonfinite=n), 3, 4, "difference.nonfinite"),
    (lambda n: difference(max_ulp=n), FARTHEST, FARTHEST + 1, "difference.max_ulp"),
    (lambda n: difference(label=n), 1, 2, "difference.label"),
    (lambda digits: difference(first_bits=["0x" + "f" * digits]), 16, 17, "difference.first_bits"),
    (lambda digits: difference(first_bits=["0x" + "f" * digits]), 1, 0, "difference.first_bits"),
    (lambda n: completion(nonfinite=n), 4, 5, "nonfinite"),
    (lambda n: completion(batch_min=n), 4, 5, "batch_min"),
    (lambda n: completion(prompt=n), 0, 1, "prompt"),
    (lambda digits: completion(trace="f" * digits), 16, 17, "trace"),
    (lambda digits: completion(tokens_digest="f" * digits), 16, 15, "tokens_digest"),
    (lambda digits: completion(trace="f" * digits, status="error"), 0, 1, "trace"),
    (lambda first: completion(schedule=[[0, 3, 1], [first, 1, 1]]), 3, 2, "schedule"),
    (lambda steps: completion(schedule=[[0, steps, 1]]), 1, 0, "schedule"),
    (lambda tokens: completion(schedule=[[0, 1, tokens]]), TOKENS, TOKENS + 1, "schedule"),
    (lambda end: completion(schedule=[[0, end - 1, 1], [end - 1, 1, 1]]), STEPS_MOST, STEPS_MOST + 1, "schedule"),
    (lambda first: served(sent=0.5, first=first), 0.5, 0.25, "served"),
    (lambda first: served(sent=0.5, first=first), 1.0, 1.5, "served"),
    (lambda digits: served(text="f" * digits), 16, 15, "served.text"),
    (lambda n: served(cached_tokens=n), TOKENS, TOKENS + 1, "served.cached_tokens"),
    (lambda n: round_(targets=n), 0, 1, "targets"),
    (lambda n: round_(figures={"cached": n}), 0, -1, "figures"),
    (lambda n: round_(background={"b": [[0, n, 1]]}), 1, 0, "background"),
    (lambda n: traffic(polls=n), 0, -1, "traffic"),
    (lambda n: traffic(running_most=n), 0.0, -0.5, "traffic"),
    (lambda rate: limit(rate=rate), 5e-324, 0.0, "rate"),
    (lambda us: cell(samples_us=[us, 2.0]), 5e-324, 0.0, "timed.samples_us"),
    (lambda us: cell(low_us=us), 2.0, 2.5, "timed.median_us"),
    (lambda us: cell(high_us=us), 2.0, 1.5, "timed.median_us"),
    (contract, "unknown", "perhaps", "answer"),
]  # fmt: skip


def checks() -> RunChecks:
    return RunChecks(factory.header("sample", {"prompts": [{"text": "p", "tokens": 4}]}))


def test_a_limit_is_taken_and_one_beyond_is_refused() -> None:
    """A rule that is a step too wide or too narrow lets a contradiction in, or keeps a good file out."""
    for made, fits, beyond, field in EDGES:
        checks().record(encoded(made(fits))[1])
        with pytest.raises(ValueError, match=r"^[\w.\[\]]+: ") as caught:
            checks().record(encoded(made(beyond))[1])
        assert str(caught.value).partition(": ")[0].startswith(field)


def test_a_figure_out_of_range_is_told_with_its_value() -> None:
    told = [(traffic(polls=-7), r"^traffic\.polls: Expected `int` >= 0, not -7$"),
            (row((0, 1), class_sizes=[1, 0]), r"^class_sizes\[1\]: Expected `int` >= 1, not 0$"),
            (round_(figures={"cached": -1}), r"^figures\[\.\.\.\]: Expected `int` >= 0, not {'cached': -1}$"),
            (contract("\x1b[31m" * 99), r"^answer: .{1,140}…$")]  # fmt: skip
    for record, line in told:
        with pytest.raises(ValueError, match=line):
            encoded(record)


def test_a_plan_names_tokens_that_a_prompt_can_have() -> None:
    header = factory.header("sample", {"prompts": [{"text": "p", "tokens": TOKENS}]})
    assert RunChecks(header).header(header) is None
    for tokens in (TOKENS + 1, True):
        header.plan["prompts"][0]["tokens"] = tokens
        with pytest.raises(records.ContradictionError, match=r"plan\.prompts"):
            RunChecks(header).header(header)


def test_a_run_that_ended_has_all_that_was_planned() -> None:
    """Where a line is taken out and the last one's count mended, the arm's verdict would be of the rest in silence."""

    def step(impl: str, i: int, **fields: Any) -> Record:
        usual = {"tokens": 4, "weights_digest": "0" * 16}
        return records.TrainingStep(impl=impl, seed=0, step=i, **(fields or usual))

    def rollout(impl: str, i: int) -> Record:
        return records.MismatchRollout(impl=impl, name=f"{i}", tokens=1, ids=[1, 2], sampler=bytes(4), trainer=bytes(4))

    def ended(command: str, lines: list[Record]) -> None:
        sizes = {"steps": 3, "seeds": 1} if command == "rl" else {"n": 3, "texts": ["a"], "tokens": 1}
        read = RunChecks(factory.header(command, {"arms": ["stock", "invariant"], **sizes}))
        for record in lines:
            read.record(record)
        read.end(records.End(records=len(lines), seconds=0.0))

    for command, made in (("rl", step), ("mismatch", rollout)):
        whole = [made(impl, i) for impl in ("stock", "invariant") for i in range(3)]
        ended(command, whole)
        for left in (whole[:-1], whole[:3]):
            with pytest.raises(records.ContradictionError, match=r"of 3 .* of invariant, as planned"):
                ended(command, left)
    ended("rl", [step("stock", i) for i in range(3)] + [step("invariant", 0, status="error")])  # that arm ended there


def test_steps_are_bounded_over_all_rounds_and_records_are_counted() -> None:
    most = checks()
    for number in range(16):
        most.record(completion(request=f"t{number}", round=number, schedule=[[0, STEPS_MOST, 1]]))
    most.end(records.End(records=16, seconds=0.0))
    with pytest.raises(records.ContradictionError, match="records: 15, with 16"):
        most.end(records.End(records=15, seconds=0.0))
    with pytest.raises(records.ContradictionError, match="steps together"):
        most.record(completion(request="one more", round=16, schedule=[[0, 1, 1]]))
    late = checks()
    late.record(completion())
    late.record(round_(targets=1))
    with pytest.raises(records.ContradictionError, match="round: 0 of stock is over before it"):
        late.record(completion(request="t1"))
