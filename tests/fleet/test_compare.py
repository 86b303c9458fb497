"""Fleets with one planted difference each: the machine, the level and what changed are named; sound ones are not."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nondet.core.records import FORMAT, SCHEMA_VERSION, Fingerprint, Header, MachineSeen, Run
from nondet.core.runfile import read_run, write_run
from nondet.errors import UserError
from nondet.fleet.compare import Fleet, Level, Machine, compare, machine_of, machines_of
from nondet.reports import fleet as texts

H200 = {
    "gpu": "NVIDIA H200", "gpu_capability": "9.0", "gpu_sms": 132, "torch": "2.13.0", "driver": "580.1",
    "cublas": "13.1", "sources": "0" * 16, "cpu": "EPYC", "num_threads": 8, "allow_tf32_matmul": False, "variables": {},
}  # fmt: skip
_OPERATORS = ("linear", "attention", "rms_norm")
Bits = Mapping[tuple[str, str, str], str]  # implementation, operator, case -> digest


def run_of(changes: Bits | None = None, /, name: str = "", wrong: tuple[str, int] = ("", 0), **environment: Any) -> Run:
    """A fingerprint with these digests changed; `wrong`: an operator of which so many results differ."""
    header = Header(
        format=FORMAT, schema=SCHEMA_VERSION, command="fingerprint", plan={}, environment=H200 | environment,
        started="2026-11-29T00:00:00",
    )  # fmt: skip
    run = Run(header=header)
    for impl in ("invariant", "stock"):
        for operator in (*_OPERATORS, "completion"):
            for case in ("tokens", "logprobs") if operator == "completion" else ("K=1000", "K=4096"):
                usual = f"{sum(map(ord, impl + operator + case)):016x}"
                units = 160 if impl == "invariant" and operator != "completion" else 1
                bad = wrong[1] if (impl, operator, case) == ("invariant", wrong[0], "K=1000") else 0
                cls = "chain" if units > 1 else ""
                run.fingerprints.append(
                    Fingerprint(
                        impl=impl, cls=cls, operator=operator, case=case, dtype="bfloat16", device="cuda",
                        given="1" * 16, digest=(changes or {}).get((impl, operator, case), usual), runs=8, units=units,
                        differing=bad, runs_differing=min(bad, 1), units_differing=min(bad, 1),
                    )
                )  # fmt: skip
    run.machines.append(MachineSeen(name=name))
    return run


def fleet_of(*runs: Run) -> Fleet:
    return compare([machine_of(run, f"m{i:02d}") for i, run in enumerate(runs)])


FLIPPED = {("invariant", "linear", "K=4096"): "f" * 16}
STOCK = {("stock", "linear", "K=1000"): "e" * 16, ("stock", "completion", "logprobs"): "d" * 16}


@pytest.mark.parametrize("seed", range(5))
def test_one_of_fifty_computes_wrongly(seed: int) -> None:
    bad = random.Random(seed).randrange(50)  # noqa: S311 - a test's choice, no secret
    fleet = fleet_of(*(run_of(FLIPPED if i == bad else None) for i in range(50)))
    assert fleet.code == 3
    first = fleet.headline
    assert first.startswith(f"m{bad:02d} computes wrongly, 49 machines of the same environment agree: ")
    assert "invariant linear bfloat16 (chain): 1 of 2 (K=4096)" in first
    assert [f.level for f in fleet.findings] == [Level.DEFECT]
    assert fleet.findings[0].machines == (f"m{bad:02d}",)


def test_of_two_that_disagree_none_is_blamed() -> None:
    fleet = fleet_of(run_of(), run_of(FLIPPED))
    assert (fleet.code, fleet.findings[0].level, fleet.findings[0].machines) == (3, Level.DEFECT, ())
    assert fleet.headline.startswith("one of m00, m01 computes wrongly, which is not known")


def test_two_bad_ones_are_both_named() -> None:
    other = {("invariant", "rms_norm", "K=1000"): "c" * 16}
    fleet = fleet_of(*(run_of({3: FLIPPED, 5: other}.get(i)) for i in range(8)))
    assert {f.level for f in fleet.findings} == {Level.DEFECT}
    assert {name for f in fleet.findings for name in f.machines} == {"m03", "m05"}


def test_a_machine_that_disagrees_with_itself() -> None:
    fleet = fleet_of(run_of(), run_of(), run_of(name="rack 7", wrong=("attention", 3)))
    assert len(fleet.groups) == 1  # most of its results are the others'
    assert fleet.code == 3
    assert fleet.headline == (
        "rack 7 computes wrongly: it disagrees with itself in invariant attention bfloat16 (chain) K=1000: "
        "3 of 1,280 results have other bits (1 of 160 copies, 1 of 8 runs)."
    )
    assert fleet_of(run_of(wrong=("linear", 1))).code == 3  # by itself as well


def test_a_library_that_moved_stock_is_drift() -> None:
    fleet = fleet_of(run_of(), run_of(), run_of(STOCK, torch="2.11.0", cublas="12.9"))
    assert (fleet.code, fleet.findings[0].level, fleet.findings[0].machines) == (3, Level.DRIFT, ("m02",))
    assert fleet.headline.startswith(
        "m02 differs from 2 other machines: cublas 12.9 and 13.1, torch 2.11.0 and 2.13.0."
    )
    assert "stock linear bfloat16: 1 of 2 (K=1000)" in fleet.headline
    assert "Invariant" not in fleet.headline
    moved = fleet_of(run_of(), run_of({**STOCK, **FLIPPED}, torch="2.11.0"))
    assert moved.findings[0].level == Level.DRIFT  # a library may explain it: no defect is claimed
    assert "Invariant results changed as well: run `nondet certify`" in moved.headline


def test_a_switch_is_a_setting_and_an_architecture_is_expected() -> None:
    fleet = fleet_of(run_of(), run_of(STOCK, variables={"NVIDIA_TF32_OVERRIDE": "1"}))
    assert (fleet.code, fleet.findings[0].level) == (3, Level.SETTINGS)
    assert "NVIDIA_TF32_OVERRIDE 1 and none" in fleet.headline
    other = {"gpu": "NVIDIA B200", "gpu_capability": "10.0", "gpu_sms": 148}
    fleet = fleet_of(run_of(), run_of(), run_of({**STOCK, **FLIPPED}, **other, torch="2.11.0"))
    assert (fleet.code, fleet.findings[0].level, fleet.findings[0].machines) == (0, Level.EXPECTED, ())
    assert "expected of another architecture" in fleet.headline
    assert "these differ as well: torch 2.11.0 and 2.13.0" in fleet.headline
    same = {"gpu": "NVIDIA H100", "gpu_sms": 114}  # of one architecture: invariant bits ought to be one
    assert fleet_of(run_of(), run_of(STOCK, **same)).code == 0
    assert fleet_of(run_of(), run_of(FLIPPED, **same)).findings[0].level == Level.OPEN


def test_no_false_alarm() -> None:
    """What decides no bits may differ, and libraries and settings that changed none."""
    for i in range(50):
        other = [{"driver": "570.2"}, {"argv": ["x"]}, {"num_threads": 2}, {"variables": {"NCCL_ALGO": "Ring"}}][i % 4]
        fleet = fleet_of(run_of(), run_of(None, **other))
        assert (fleet.code, fleet.findings) == (0, ())
        assert fleet.headline == "all 2 machines give equal bits."


def test_stock_without_a_reason_is_open_and_unsteady_stock_is_not_compared() -> None:
    fleet = fleet_of(run_of(), run_of(), run_of(STOCK))
    assert (fleet.code, fleet.findings[0].level, fleet.findings[0].machines) == (3, Level.OPEN, ("m02",))
    assert "computes wrongly" not in fleet.headline
    runs = [run_of(), run_of({("stock", "linear", "K=1000"): "e" * 16})]
    unsteady = runs[1].fingerprints
    at = next(i for i, p in enumerate(unsteady) if (p.impl, p.operator, p.case) == ("stock", "linear", "K=1000"))
    values = {name: getattr(unsteady[at], name) for name in unsteady[at].__struct_fields__}
    unsteady[at] = Fingerprint(**values | {"differing": 1, "runs_differing": 1, "units_differing": 1})
    fleet = fleet_of(*runs)
    assert (fleet.code, len(fleet.unsteady)) == (0, 1)


def test_on_a_gpu_the_host_s_cpu_may_move_a_completion_and_nothing_else() -> None:
    moved = {("invariant", "completion", "logprobs"): "a" * 16}
    assert fleet_of(run_of(), run_of(moved)).findings[0].level == Level.DEFECT
    assert fleet_of(run_of(), run_of(moved, cpu="Xeon")).findings[0].level == Level.EXPECTED
    assert fleet_of(run_of(), run_of(FLIPPED, cpu="Xeon")).findings[0].level == Level.DEFECT


def test_what_was_not_compared_is_not_equal() -> None:
    short = run_of()
    del short.fingerprints[0]
    assert (fleet_of(run_of(), short).code, fleet_of(run_of(), short).findings[0].level) == (1, Level.UNCOMPARED)
    failed = [run_of(), run_of()]
    for run in failed:  # alike on both: still nothing is known of it
        first = run.fingerprints[0]
        run.fingerprints[0] = first.refused("out of memory")
    fleet = fleet_of(*failed)
    assert (fleet.code, fleet.findings[0].text) == (1, "m00 failed in 1 of 16 computations: out of memory")
    assert fleet_of(run_of()).code == 1


def test_long_lists_are_compared_whole() -> None:
    isa = [f"avx512_{i:02d}" for i in range(30)]
    for device in ("cpu", "cuda"):
        one, other = (machine_of(run_of(changes), name) for changes, name in ((None, "a"), (STOCK, "b")))
        machines = [
            replace(m, device=device, environment={**m.environment, "cpu_isa": flags})
            for m, flags in ((one, isa), (other, [*isa, "amx_bf16"]))
        ]
        fleet = compare(machines)
        assert fleet.code == (0 if device == "cpu" else 3)
        assert ("(cpu_isa amx_bf16 and none)" in fleet.headline) == (device == "cpu")


def kept(folder: Path, *runs: Run) -> list[Path]:
    paths = [folder / f"n{i}.jsonl" for i in range(len(runs))]
    for path, run in zip(paths, runs, strict=True):
        write_run(path, run)
    return paths


def test_files_that_are_lost_or_hostile_are_rows_with_a_reason(tmp_path: Path) -> None:
    paths = kept(tmp_path, run_of(), run_of(), run_of())
    paths[2].write_bytes(paths[2].read_bytes()[:-40])
    paths.append(tmp_path / "gone.jsonl")
    paths.append(tmp_path / "wrong.jsonl")
    paths[-1].write_text(paths[0].read_text().replace('"differing":0', '"differing":9999', 1))
    machines = machines_of(paths, read_run)
    assert [m.name for m in machines if m.lost] == ["n2", "gone", "wrong"]
    assert "cut off" in machines[2].lost
    assert "differing: 9999 is not from 0 to" in machines[4].lost
    fleet = compare(machines)
    assert fleet.code == 1
    assert fleet.headline == "all 2 machines give equal bits; no fingerprint of n2, gone, wrong."
    with pytest.raises(UserError, match="no run file at"):
        machines_of([tmp_path / "gone.jsonl"], read_run)


def test_reports_escape_and_name_all(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>|`x`\x1b[31m"
    run = run_of(FLIPPED, name=evil)
    fleet = compare([*(machine_of(run_of(), name) for name in ("a", "b")), machine_of(run, "c")])
    page, markdown = texts.render(fleet), texts.markdown(fleet)
    for text in (page, markdown):
        assert "<script>alert" not in text
        assert "\x1b" not in text
    assert 'class="key c1"' in page  # another group's colour
    assert "computes wrongly" in page
    data = json.loads(texts.as_json(fleet))
    assert (data["code"], data["findings"][0]["level"], data["groups"][0]) == (3, "defect", ["a", "b"])
    assert data["findings"][0]["changed"][0]["cases"] == ["K=4096"]


def test_machines_of_one_name_get_a_number(tmp_path: Path) -> None:
    machines = machines_of(kept(tmp_path, *(run_of(name=n) for n in ("node", "node (2)", "node"))), read_run)
    assert [m.name for m in machines] == ["node", "node (2)", "node (3)"]
    assert isinstance(machines[1], Machine)
