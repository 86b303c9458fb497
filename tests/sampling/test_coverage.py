"""Coverage from a run file's rounds: grouped, counted over rounds, and never quiet about what is exposed."""

from __future__ import annotations

from nondet.result import FORMAT, SCHEMA_VERSION, Header, Round, Row, Run
from nondet.sampling.coverage import coverage_lines, coverage_of, speed_lines


def run_of(*rounds: tuple[str, dict[str, int]]) -> Run:
    header = Header(format=FORMAT, schema=SCHEMA_VERSION, command="sample", plan={}, environment={}, started="")
    records = [
        Round(impl=impl, round=i, targets=1, others=0, steps=1, tokens=1, seconds=1.0, ran=ran)
        for i, (impl, ran) in enumerate(rounds)
    ]
    return Run(header=header, rounds=records)


def test_rounds_add_up_by_group() -> None:
    """What launchers launched is no coverage; stock has none."""
    run = run_of(
        ("stock", {}),
        ("invariant", {"replaced: linear": 3, "matmul_chain[16x32x64]": 3}),
        ("invariant", {"replaced: linear": 4, "certified stock: cumsum float32: each row as alone": 1}),
    )
    assert coverage_of(run, "invariant") == {
        "replaced": {"linear": 7},
        "certified stock": {"cumsum float32: each row as alone": 1},
    }
    assert coverage_of(run, "stock") == {}
    lines = coverage_lines(run)
    assert lines[0].startswith("invariant, replaced")
    assert lines[0].endswith("linear (7)")
    assert lines[-1] == "invariant: nothing left stock unproven, nothing at risk"


def test_what_is_exposed_is_said() -> None:
    """An operator at risk is named, and then nothing says that all is well."""
    lines = coverage_lines(run_of(("invariant", {"replaced: linear": 3, "at risk: cumsum float32": 2})))
    assert lines[-1].endswith("cumsum float32 (2)")
    assert not any("nothing" in line for line in lines)


def test_speed_is_that_of_the_warm_round() -> None:
    """Invariant over each kind of stock, from the rounds that were run again, and nothing without them."""
    run = run_of(("stock", {}), ("invariant", {}))
    assert speed_lines(run) == []
    for impl, rate in (("stock", 400.0), ("stock-no-cudnn", 1600.0), ("invariant", 2000.0)):
        run.rows.append(
            Row(
                probe="sample",
                case="the first round, twice",
                operator="engine",
                shape={},
                dtype="bfloat16",
                device="cuda",
                inputs="prompts",
                varied="run",
                impl=impl,
                status="identical",
                extra={"tokens_per_second_again": rate},
            )
        )
    assert [line.rpartition(" ")[2] for line in speed_lines(run)] == ["5.00", "1.25"]
