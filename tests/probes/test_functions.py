"""Checking a function from Python: the faults that probes find, and inputs that would fake one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from nondet.core.inputs import generator, make
from nondet.core.records import Axis, Run
from nondet.core.registry import load_object
from nondet.core.runfile import read_run
from nondet.errors import MisfitError, UnknownNameError, UserError
from nondet.probes.functions import check, check_operator
from nondet.testing import assert_batch_invariant
from nondet.verdict.findings import Finding
from nondet.verdict.gate import exit_code, judge
from tests.probes import toys

WIDTH = 96


def rows_of(size: int) -> torch.Tensor:
    return make("wide", (32, WIDTH), torch.float32, "cpu", generator(7, "cpu"))[:size]


def finding(run: Run) -> Finding:
    [verdict] = judge(run)
    return verdict.finding


def test_an_operator_that_no_probe_asks_about_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close name is suggested; questions that choose nothing are refused, and never pass."""
    with pytest.raises(UnknownNameError, match="linear"):
        check_operator(toys.linear_sound, "linaer")
    with pytest.raises(UserError, match="no question"):
        check_operator(toys.linear_sound, "linear", varied=("nothing",))


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """Faulty from 8 rows on."""
    return toys.sum_by_rows(x)


def test_any_callable_is_compared_over_its_batch_sizes() -> None:
    """Classes, the border between them and the bits at the first mismatch are in one row."""
    faulty = check(by_rows, rows_of, [1, 2, 7, 8, 9, 20])
    row = faulty.rows[0]
    assert finding(faulty) == Finding.BATCH
    assert (row.values, row.labels) == ([1, 2, 7, 8, 9, 20], [0, 0, 0, 1, 1, 1])
    assert (row.varied, row.axis, row.dtype, row.shape["M"]) == ("batch_size", Axis.BATCH, "float32", 20)
    assert row.difference is not None
    assert row.difference.first_bits is not None
    first, other = (by_rows(rows_of(size))[:1] for size in (1, 8))
    assert row.difference.first_bits == [f"0x{x.view(torch.int32).item() & 0xFFFFFFFF:08x}" for x in (first, other)]
    assert finding(check(toys.sum_sound, rows_of, [1, 2, 7, 8, 9, 20])) == Finding.CLEAN


def test_a_number_among_the_inputs_is_no_batch() -> None:
    """A tensor of no axes, a scale say, has no rows to begin with: it has to be the same in every batch."""
    scale = torch.tensor(2.0)
    assert finding(check(torch.mul, lambda size: (torch.ones(size, 4), scale), over=(1, 3))) == Finding.CLEAN
    with pytest.raises(UserError, match="should be equal"):
        check(torch.mul, lambda size: (torch.ones(size, 4), scale + size), over=(1, 3))


def test_noise_from_run_to_run_is_no_batch_dependence() -> None:
    """The same batch size asked again gives other bits."""
    noise = iter(range(10**6))

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1) * (1 + 2.0**-20 * (next(noise) % 3))

    assert finding(check(noisy, rows_of, [1, 2, 8])) == Finding.RUN_TO_RUN


def test_inputs_that_are_other_requests_are_refused() -> None:
    """Else numbers drawn anew for each batch would be called batch dependence."""
    drawn = torch.Generator().manual_seed(0)

    def anew(size: int) -> torch.Tensor:
        return torch.rand(size, WIDTH, generator=drawn)

    def by_size(size: int) -> torch.Tensor:
        return torch.rand(size, WIDTH, generator=torch.Generator().manual_seed(size))

    def other_weight(size: int) -> dict[str, Any]:
        return {"x": rows_of(size), "weight": torch.full((WIDTH,), float(size))}

    with pytest.raises(UserError, match="called again"):
        check(toys.sum_sound, anew, [1, 2])
    with pytest.raises(UserError, match="first 2 rows"):
        check(toys.sum_sound, by_size, [2, 4])
    with pytest.raises(UserError, match="argument weight"):
        check(toys.rms_norm_sound, other_weight, [1, 2])
    with pytest.raises(UserError, match="compares nothing"):
        check(toys.sum_sound, rows_of, [4])
    with pytest.raises(UserError, match="no batch size"):
        check(toys.sum_sound, rows_of, ["a", "b"])
    with pytest.raises(UserError, match=r"over=\[2, 2\] holds one size"):
        check(toys.sum_sound, rows_of, [2, 2])


def test_a_weight_as_long_as_a_batch_is_not_taken_for_one() -> None:
    """[4, K] in a batch of 4: the same weight in every batch, and no row of it belongs to a request."""
    weight = rows_of(4)
    run = check(
        lambda x, w: torch.stack([w.double() @ r.double() for r in x]), lambda M: (rows_of(M), weight), [4, 2, 8]
    )
    assert finding(run) == Finding.CLEAN


def test_select_says_what_is_compared() -> None:
    """A request at the end of its batch is treated otherwise; the leading rows alone do not show it."""

    def last(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([rows_of(size)[1:], rows_of(1)]), rows_of(5)

    sizes = [8, 9, 16]
    run = check(toys.linear_tail_rows, last, sizes, varied="position", select=lambda out, _: out[-1:])
    assert (run.rows[0].labels, finding(run)) == ([0, 1, 0], Finding.BATCH)
    head = check(toys.linear_tail_rows, lambda size: (rows_of(size), rows_of(5)), sizes[:2])
    assert (head.rows[0].extra["rows"], head.rows[0].status, finding(head)) == (8, "identical", Finding.BATCH)


def test_wrong_is_wrong_however_identical() -> None:
    """The oracle's shape, its size, inputs written to, fewer rows than requests."""

    def oracle(x: torch.Tensor) -> torch.Tensor:
        return x.double().sum(-1)

    sizes = [1, 2, 4]
    assert finding(check(lambda x: x.sum(-1) * 0, rows_of, sizes, oracle=oracle, allowed=1e-3)) == Finding.WRONG
    assert finding(check(toys.sum_sound, rows_of, sizes, oracle=oracle, allowed=1e-3)) == Finding.CLEAN
    assert finding(check(lambda x: x.mul_(1.0).add_(1).sum(-1), rows_of, sizes)) == Finding.WRONG
    assert finding(check(lambda x: x.sum(-1) * torch.nan, rows_of, sizes, oracle=oracle)) == Finding.WRONG
    assert finding(check(lambda x: x[:3].sum(-1), rows_of, sizes)) == Finding.WRONG
    assert finding(check(lambda x: x.sum(-1, keepdim=True), rows_of, sizes, oracle=oracle)) == Finding.WRONG


def test_nothing_and_nan_are_wrong_though_they_agree_with_themselves() -> None:
    """Empty results of any kind, and results without a number in them; a single infinity is only told."""
    sizes = [1, 2, 4]
    for run in (
        check(lambda x: x[:0], rows_of, sizes),
        check(lambda x: x[:, :0], rows_of, sizes),
        check(toys.sum_sound, rows_of, sizes, select=lambda out, _: out[:0]),
    ):
        assert finding(run) == Finding.WRONG
        assert run.rows[0].reason == "it gave nothing: an empty result compares nothing"
    nan = check(lambda x: x * torch.nan, rows_of, sizes)
    assert finding(nan) == Finding.WRONG
    assert nan.rows[0].reason == f"all {WIDTH} elements are NaN or infinite, which agrees with itself"
    assert exit_code(nan, "divergent")[0] == 3
    masked = check(lambda x: torch.cat([x, x[:, :1] / 0.0], dim=1), rows_of, sizes)
    assert (finding(masked), masked.rows[0].nonfinite) == (Finding.CLEAN, 1)
    shared = check(lambda x: x * torch.nan, rows_of, sizes, oracle=lambda x: x.double() * torch.nan)
    assert finding(shared) == Finding.CLEAN


def test_a_kernel_that_fails_is_no_pass() -> None:
    """What it raised is the row's reason, and nothing was compared."""
    run = check(toys.failing, rows_of, [1, 2])
    assert run.rows[0].reason == "RuntimeError: the kernel failed"
    assert finding(run) == Finding.UNTESTED


FORMS = """
import torch

right = torch.nn.functional.linear


def product(a, b):
    return a @ b


def tutorial(a, b):
    assert a.shape[1] == b.shape[0], "Incompatible dimensions"
    return a @ b


def turned(x, weight, bias=None):
    return right(x, weight, bias).T


def short(x, weight, bias=None):
    if x.dtype != torch.float32:
        raise TypeError("takes float32 as its argument")
    return right(x, weight, bias)


def once(x, weight, bias=None, calls=[]):
    calls.append(x)
    return right(x, weight, bias) + (len(calls) == 1)


def late(x, weight, bias=None):
    if x.shape[0] > 8:
        raise RuntimeError("The size of tensor a must match the size of tensor b")
    return right(x, weight, bias)
"""
LINEAR = ("--device", "cpu", "--k", "64", "--n", "48", "--m", "16", "--inputs", "order")


@pytest.mark.parametrize(
    ("name", "fault", "jobs"),
    [
        ("product", "mat1 and mat2 shapes cannot be multiplied (8x64 and 48x64)", "1"),
        ("product", "mat1 and mat2 shapes cannot be multiplied (8x64 and 48x64)", "2"),
        ("tutorial", "AssertionError: Incompatible dimensions", "1"),
        ("turned", "linear gave the shape (48, 8), not (8, 48)", "1"),
    ],
)
def test_a_function_of_another_form_stops_at_one_call(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: str, jobs: str
) -> None:
    """What it takes, what it is called with and how to write it; no run file stays, whoever was measured before it."""
    (tmp_path / "forms_1.py").write_text(FORMS)
    monkeypatch.syspath_prepend(tmp_path)
    impls = ("--impl", "stock", "--impl", f"forms_1:{name}")
    code, _, err = run("probe", "linear", *impls, *LINEAR, "--jobs", jobs, "--out", "a.jsonl")
    assert code == 2
    line = err.splitlines()[-1]
    assert "can't be called as linear is, with x [8, 64], weight [48, 64]: " in line
    assert fault in line
    assert "Write it as linear(x, weight, bias=None)" in line
    assert not Path("a.jsonl").exists()


def test_a_function_of_another_form_stops_every_caller(run: Any, tmp_path: Path) -> None:
    """`certify`, `check_operator` and the assertion of a test suite say the same line, and leave no file."""
    (tmp_path / "forms_3.py").write_text(FORMS)
    name = "forms_3:product"
    code, _, err = run("certify", "linear", "--class", "cpu-tiles", "--impl", name, *LINEAR, "--out", "a.jsonl")
    assert (code, Path("a.jsonl").exists()) == (2, False)
    assert f"nondet: --impl '{name}' takes (a, b), and can't be called as linear is, with x [1, 64]" in err
    product = load_object(name)
    for caller in (check_operator, assert_batch_invariant):
        with pytest.raises(MisfitError, match=r"^forms_3:product takes \(a, b\), and can't be called as linear is"):
            caller(product, "linear", m=8, k=64, n=48, inputs=["order"])
    with pytest.raises(UserError, match=r"fn takes \(a, b\), and what make_inputs gives is 1 positional"):
        assert_batch_invariant(product, make_inputs=lambda m: torch.ones(m, 8), over=[1, 2])


@pytest.mark.parametrize(("name", "failed"), [("short", True), ("late", True), ("once", False)])
def test_errors_of_its_own_stay_rows(run: Any, tmp_path: Path, name: str, failed: bool) -> None:
    """A dtype that it does not support, or what it says after it has answered; and its first call is measured."""
    (tmp_path / "forms_2.py").write_text(FORMS)
    code, _, err = run("probe", "linear", "--impl", f"forms_2:{name}", *LINEAR, "--out", "a.jsonl")
    assert code == 0, err
    rows = read_run(Path("a.jsonl")).rows
    assert {"error"} <= {r.status for r in rows} if failed else rows[0].status == "divergent"
    assert any(r.status == "identical" for r in rows)


def first_angles(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The fault of a rotary embedding that turns all requests by the angles of request 0."""
    return x * angles[:1].cos()


def test_every_request_is_held_against_itself_in_the_largest_batch() -> None:
    """The leading rows agree, and every other request has other bits solo; sound functions pass, packed ones say so."""
    angles = torch.arange(8.0)[:, None]
    faulty = check(first_angles, lambda size: (rows_of(size), angles[:size]), [1, 2, 8])
    leading, each = faulty.rows
    assert (leading.status, each.status, each.values) == ("identical", "divergent", [1, 8])
    assert each.difference is not None
    assert each.difference.first_mismatch == [1, 0]
    assert (each.difference.compared, leading.extra["elements"]) == (8 * WIDTH, 8 * WIDTH)
    sound = check(
        lambda x, angles: x * angles.cos(), lambda size: {"x": rows_of(size), "angles": angles[:size]}, [2, 7]
    )
    assert (finding(sound), sound.rows[1].case) == (Finding.CLEAN, "7 of 7 requests, each in batches of 2 and 7")
    packed = check(lambda x: x.double().sum(-1), lambda size: rows_of(3 * size), [1, 4])
    assert (len(packed.rows), finding(packed)) == (1, Finding.CLEAN)
    assert "only the first 1 of each batch were compared: a tensor among the inputs" in packed.rows[0].reason
    sizes = check(lambda x, n: x.double().sum(-1) / n, lambda size: (rows_of(size), float(size) * 0 + 1), [1, 4])
    assert len(sizes.rows) == 2
    named = check(lambda x, n: x.double().sum(-1), lambda size: (rows_of(size), size), [1, 4])
    assert "an input that is no tensor" in named.rows[0].reason


def test_so_few_elements_that_a_cut_of_k_would_not_show_are_a_warning() -> None:
    """32 numbers of bfloat16: one in 10,000 differs where a sum is cut in two. Enough of them, or float32, are none."""
    make = lambda size: rows_of(size).bfloat16()  # noqa: E731
    with pytest.warns(UserWarning, match=r"only 32 elements of bfloat16 were compared: .*takes 30,000"):
        run = check(lambda x: x.double().sum(-1).bfloat16(), make, [1, 32], name="sum")
    assert "30,000" in run.rows[0].reason
    with warnings.catch_warnings(action="error"):
        check(lambda x: x.double().sum(-1), make, [1, 32])
        check(lambda x: x.double().sum(-1, keepdim=True).expand(-1, 1000).bfloat16(), make, [1, 32])
