"""The assertions of a test suite: what fails, what passes, and whether the message is one to act on."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch

from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.testing import assert_batch_invariant, assert_same_bits
from nondet.testing.assertions import keep_runs_in
from nondet.testing.plugin import Endpoint, Engine, assert_open
from tests.endpoint.honest import serving
from tests.faults.grammar import sum__order__any__from_8
from tests.probes import toys
from tests.verdict.test_gate import loads

# One layer and two kinds of input: enough for every line of a message, at a tenth of a second each.
SMALL = {"operator": "linear", "m": 24, "k": 64, "n": 8, "inputs": ("order",), "varied": {"batch_size", "position"}}


def test_a_faulty_kernel_is_told_its_m_its_classes_and_its_first_mismatch() -> None:
    with pytest.raises(AssertionError) as error:
        assert_batch_invariant(toys.linear_splits_by_m, **SMALL)
    text = str(error.value)
    assert text.startswith("tests.probes.toys:linear_splits_by_m: batch-dependent in")
    parts = (
        "M=24 N=8 K=64",
        "classes of equal bits: M 1-15: A | 16-24: B",
        "B compared with A: ",
        "of the row's scale",
    )
    parts += ("first mismatch at [0, 0]: A ", "(0x", "ULP", "float32", "repeated, each bit-identical")
    parts += ("nondet probe matmul --impl linear=tests.probes.toys:linear_splits_by_m --dtype float32 --k 64 --n 8",)
    assert [part for part in parts if part not in text] == []
    assert len(text.splitlines()) < 40


def test_other_failures_have_their_own_words() -> None:
    """Noise is a race and no tile that follows from M; zeros at every M are wrong; what raises, or says that it is not
    for this, was never compared: a gate must not open on that.
    """
    toys.forget()
    bell = {"inputs": ("bell",)}
    few = bell | {"m": 4, "k": 16, "varied": {"batch_size"}}
    for kernel, options, said in [
        (
            toys.linear_unsteady,
            few,
            "(?s)repeated calls differed.*run-to-run non|run-to-run non.*repeated calls differed",
        ),
        (toys.linear_zeros, bell, "(?s)wrong in 9 of 10 cases.*off by more than any rounding explains"),
        (toys.failing, {}, "can't be decided"),
        (toys.not_here, {}, "can't be decided"),
    ]:
        with pytest.raises(AssertionError, match=said):
            assert_batch_invariant(kernel, **SMALL | options)  # type: ignore[arg-type] # functions of several forms


def test_any_callable_over_its_batch_sizes() -> None:
    x = torch.rand(32, 1000, generator=torch.Generator().manual_seed(1))
    sizes = [1, 2, 7, 8, 9]
    assert_batch_invariant(toys.sum_sound, make_inputs=lambda size: x[:size], over=sizes)
    with pytest.raises(AssertionError, match=r"batch size 1-7: A \| 8-9: B"):
        assert_batch_invariant(sum__order__any__from_8, make_inputs=lambda size: x[:size], over=sizes)
    with pytest.raises(UserError, match="an operator or a function"):
        assert_batch_invariant(toys.sum_sound, make_inputs=lambda size: x[:size])
    with pytest.raises(UserError, match="belong to make_inputs"):
        assert_batch_invariant(toys.linear_sound, "linear", error=0.1)


def test_runs_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    keep_runs_in(tmp_path)
    try:
        assert_batch_invariant(toys.linear_sound, **SMALL)
        with pytest.raises(AssertionError, match="run file: "):
            assert_batch_invariant(toys.linear_zeros, **SMALL)
    finally:
        keep_runs_in(None)
    kept = [read_run(path) for path in sorted(tmp_path.iterdir())]
    assert sorted({row.status for run in kept for row in run.rows}) == ["identical", "wrong"]


SAME = [
    (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, -float("nan")])),
    (np.float32(1.5), np.float32(1.5)),
    ({"a": [torch.ones(2), (3, 4.0)]}, {"a": [torch.ones(2), (3, 4.0)]}),
    (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    ([1.0, 2.0], np.array([1.0, 2.0])),
]
OTHER = [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002]), r"at \[1\]: left 2.0 \(0x40000000\).*0x40000001"),
    (torch.tensor([0.0]), torch.tensor([-0.0]), "sign of zeros"),
    (torch.tensor([1.0]), torch.tensor([float("nan")]), "not finite"),
    (torch.ones(2), torch.ones(3), r"\(2,\) torch.float32"),
    (torch.ones(2), torch.ones(2).double(), "torch.float64"),
    ({"a": 1.0}, {"b": 1.0}, r"left has the parts \['a'\], right has \['b'\]"),
    ([torch.ones(1)], [torch.ones(1), torch.ones(1)], r"has the parts \[0\], right has \[0, 1\]"),
    ([torch.ones(1)], {0: torch.ones(1)}, "nothing to compare"),
    ([torch.ones(1), torch.ones(1)], [torch.ones(1), torch.zeros(1)], r"^\[1\]: "),
    ("text", "text", "nothing to compare bit by bit"),
    (torch.tensor([1, 2]), torch.tensor([1, 3]), "int64"),
    (torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 1.0078125, dtype=torch.bfloat16), r"1\.0078125 \(0x3f81\)"),
]


def test_bits_are_compared_without_tolerance() -> None:
    """NaN equals NaN, through nests, arrays and numbers; structure, shape and dtype count; else no pass."""
    for a, b in SAME:
        assert_same_bits(a, b)
    for a, b, expected in OTHER:
        with pytest.raises(AssertionError, match=expected):
            assert_same_bits(a, b)


# The fixtures, as a test suite has them: an engine and a server, each asked as a gate would.

pytest_plugins = ("pytester",)
SMALL_PLAN = {"max_tokens": 5, "load": "others=2,targets=3,prompt=4-8,tokens=4-8", "rate": 0.9}


def test_a_run_that_a_gate_would_not_open_on_fails() -> None:
    assert_open(loads(30))
    with pytest.raises(AssertionError, match=r"^Gate failed"):
        assert_open(loads(30, parted=[7]))
    with pytest.raises(AssertionError, match=r"^Gate failed, not enough data"):
        assert_open(loads(5))


def test_an_engine_is_asked_in_process(tmp_path: Path) -> None:
    """The embedded model; three loads see no tenth, so that the gate is never open, whatever they show."""
    asked = {"n": 3, "load": "others=1,targets=1,prompt=4-8,tokens=4-8,spread=8", "max_tokens": 3, "impl": "stock"}
    with pytest.raises(AssertionError, match=r"^Gate failed(: stock|, not enough data: stock: 2 loads)"):
        Engine(tmp_path).assert_batch_invariant(prompt="The following", **asked)
    assert len(read_run(tmp_path / "engine-0.jsonl").completions) == 3


def test_a_server_is_asked_over_http(tmp_path: Path) -> None:
    with serving("vllm", token_s=0.001) as server:
        Endpoint(server.url, None, tmp_path).assert_batch_invariant("The following", **SMALL_PLAN)
    with (
        serving("vllm", token_s=0.001, batch_noise=1e-6) as server,
        pytest.raises(AssertionError, match=r"^Gate failed"),
    ):
        Endpoint(server.url, None, tmp_path / "b").assert_batch_invariant("The following", **SMALL_PLAN)


def test_a_project_keeps_runs_and_without_a_server_its_test_is_skipped(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import torch\nfrom nondet.testing import assert_batch_invariant\n"
        "def test_server(nondet_endpoint): assert False\ndef test_engine(nondet_engine): pass\n"
        "def double(x): return x * 2\n"
        "def test_double(): assert_batch_invariant(double, make_inputs=lambda n: torch.ones(n, 4), over=[1, 2])\n"
    )
    installed = any(e.name == "nondet" for e in entry_points(group="pytest11"))  # then pytest has it already
    named = () if installed else ("-p", "nondet.testing.plugin")
    try:
        result = pytester.runpytest_inprocess(*named, "-rs", "--nondet-runs", "runs")
    finally:
        keep_runs_in(None)
    result.assert_outcomes(skipped=1, passed=2)
    result.stdout.fnmatch_lines(["*needs a server: --nondet-endpoint URL*"])
    assert len([*(pytester.path / "runs").iterdir()]) == 1
