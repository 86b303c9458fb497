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
from tests.faults.grammar import sum__order__any__from_8 as sum_by_rows
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


def test_any_callable_is_compared_over_its_batch_sizes() -> None:
    """Classes, the border between them and the bits at the first mismatch are in one row."""
    faulty = check(sum_by_rows, rows_of, [1, 2, 7, 8, 9, 20])
    row = faulty.rows[0]
    assert finding(faulty) == Finding.BATCH
    assert (row.values, row.labels) == ([1, 2, 7, 8, 9, 20], [0, 0, 0, 1, 1, 1])
    assert (row.varied, row.axis, row.dtype, row.shape["M"]) == ("batch_size", Axis.BATCH, "float32", 20)
    assert row.difference is not None
    assert row.difference.first_bits is not None
    first, other = (sum_by_rows(rows_of(size))[:1] for size in (1, 8))
    assert row.difference.first_bits == [f"0x{x.view(torch.int32).item() & 0xFFFFFFFF:08x}" for x in (first, other)]
    assert finding(check(toys.sum_sound, rows_of, [1, 2, 7, 8, 9, 20])) == Finding.CLEAN


def test_a_number_or_a_weight_among_the_inputs_is_no_batch() -> None:
    """A tensor of no axes, a scale say, has no rows to begin with: it has to be the same in every batch. Of a weight
    [4, K] in a batch of 4 no row belongs to a request."""
    scale, weight = torch.tensor(2.0), rows_of(4)
    assert finding(check(torch.mul, lambda size: (torch.ones(size, 4), scale), over=(1, 3))) == Finding.CLEAN
    with pytest.raises(UserError, match="should be equal"):
        check(torch.mul, lambda size: (torch.ones(size, 4), scale + size), over=(1, 3))
    assert finding(check(toys.linear_sound, lambda M: (rows_of(M), weight), [4, 2, 8])) == Finding.CLEAN


def test_noise_from_run_to_run_is_no_batch_dependence() -> None:
    """The same batch size asked again gives other bits."""
    noise = iter(range(10**6))
    run = check(lambda x: x.sum(-1) * (1 + 2.0**-20 * (next(noise) % 3)), rows_of, [1, 2, 8])
    assert finding(run) == Finding.RUN_TO_RUN


def test_inputs_that_are_other_requests_are_refused() -> None:
    """Else numbers drawn anew for each batch would be called batch dependence."""
    drawn = torch.Generator().manual_seed(0)

    def by_size(size: int) -> torch.Tensor:
        return torch.rand(size, WIDTH, generator=torch.Generator().manual_seed(size))

    def other_weight(size: int) -> dict[str, Any]:
        return {"x": rows_of(size), "weight": torch.full((WIDTH,), float(size))}

    refused: list[tuple[Any, Any, list[Any], str]] = [
        (toys.sum_sound, lambda size: torch.rand(size, WIDTH, generator=drawn), [1, 2], "called again"),
        (toys.sum_sound, by_size, [2, 4], "first 2 rows"),
        (toys.rms_norm_sound, other_weight, [1, 2], "argument weight"),
        (toys.sum_sound, rows_of, [4], "compares nothing"),
        (toys.sum_sound, rows_of, ["a", "b"], "no batch size"),
        (toys.sum_sound, rows_of, [2, 2], "compares nothing"),
    ]
    for function, make_inputs, over, said in refused:
        with pytest.raises(UserError, match=said):
            check(function, make_inputs, over)


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
    """The oracle's shape, its size, inputs written to, fewer rows than requests; empty results of any kind, and results
    without a number in them. A single infinity is only told."""
    sizes: list[Any] = [1, 2, 4]
    oracle: dict[str, Any] = {"reference": lambda x: x.double().sum(-1)}
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (lambda x: x.sum(-1) * 0, oracle | {"error": 1e-3}),
        (lambda x: x.mul_(1.0).add_(1).sum(-1), {}),
        (lambda x: x.sum(-1) * torch.nan, oracle),
        (lambda x: x[:3].sum(-1), {}),
        (lambda x: x.sum(-1, keepdim=True), oracle),
    ]
    assert [finding(check(function, rows_of, sizes, **how)) for function, how in wrong] == [Finding.WRONG] * 5
    assert finding(check(toys.sum_sound, rows_of, sizes, error=1e-3, **oracle)) == Finding.CLEAN
    empty = {"select": lambda out, _: out[:0]}
    nothing: list[tuple[Any, dict[str, Any]]] = [
        (lambda x: x[:0], {}),
        (lambda x: x[:, :0], {}),
        (toys.sum_sound, empty),
    ]
    for function, how in nothing:
        run = check(function, rows_of, sizes, **how)
        assert finding(run) == Finding.WRONG
        assert run.rows[0].reason == "it gave nothing: an empty result compares nothing"
    nan = check(lambda x: x * torch.nan, rows_of, sizes)
    assert finding(nan) == Finding.WRONG
    assert nan.rows[0].reason == f"all {WIDTH} elements are NaN or infinite, which agrees with itself"
    assert exit_code(nan, "divergent")[0] == 3
    masked = check(lambda x: torch.cat([x, x[:, :1] / 0.0], dim=1), rows_of, sizes)
    assert (finding(masked), masked.rows[0].nonfinite) == (Finding.CLEAN, 1)
    shared = check(lambda x: x * torch.nan, rows_of, sizes, reference=lambda x: x.double() * torch.nan)
    assert finding(shared) == Finding.CLEAN
    with pytest.warns(UserWarning, match="RuntimeError: the kernel failed"):  # the verdict does not say why
        failed = check(toys.failing, rows_of, [1, 2])  # a kernel that fails is no pass: nothing was compared
    assert (failed.rows[0].reason, finding(failed)) == ("RuntimeError: the kernel failed", Finding.UNTESTED)


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


def test_a_function_of_another_form_stops_every_caller_at_one_call(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes, what it is called with and how to write it; no run file stays, whoever was measured before it.
    `certify`, `check_operator` and the assertion of a test suite say the same line."""
    (tmp_path / "forms_1.py").write_text(FORMS)
    monkeypatch.syspath_prepend(tmp_path)
    for name, fault, jobs in (
        ("product", "mat1 and mat2 shapes cannot be multiplied (8x64 and 48x64)", "1"),
        ("product", "mat1 and mat2 shapes cannot be multiplied (8x64 and 48x64)", "2"),
        ("tutorial", "AssertionError: Incompatible dimensions", "1"),
        ("turned", "linear gave the shape (48, 8), not (8, 48)", "1"),
    ):
        impls = ("--impl", "stock", "--impl", f"forms_1:{name}")
        code, _, err = run("probe", "linear", *impls, *LINEAR, "--jobs", jobs, "--out", "a.jsonl")
        assert (code, Path("a.jsonl").exists()) == (2, False)
        line = err.splitlines()[-1]
        assert "can't be called as linear is, with x [8, 64], weight [48, 64]: " in line
        assert fault in line
        assert "Write it as linear(x, weight, bias=None)" in line
    name = "forms_1:product"
    code, _, err = run("certify", "linear", "--class", "cpu-tiles", "--impl", name, *LINEAR, "--out", "a.jsonl")
    assert (code, Path("a.jsonl").exists()) == (2, False)
    assert f"nondet: --impl '{name}' takes (a, b), and can't be called as linear is, with x [1, 64]" in err
    product = load_object(name)
    for caller in (check_operator, assert_batch_invariant):
        with pytest.raises(MisfitError, match=r"^forms_1:product takes \(a, b\), and can't be called as linear is"):
            caller(product, "linear", m=8, k=64, n=48, inputs=["order"])
    with pytest.raises(UserError, match=r"fn takes \(a, b\), and what make_inputs gives is 1 positional"):
        assert_batch_invariant(product, make_inputs=lambda m: torch.ones(m, 8), over=[1, 2])


def test_errors_of_its_own_stay_rows(run: Any, tmp_path: Path) -> None:
    """A dtype that it does not support, or what it says after it has answered; and its first call is measured."""
    (tmp_path / "forms_2.py").write_text(FORMS)
    for name in ("short", "late", "once"):
        code, _, err = run("probe", "linear", "--impl", f"forms_2:{name}", *LINEAR, "--out", f"{name}.jsonl")
        assert code == 0, err
        rows = read_run(Path(f"{name}.jsonl")).rows
        assert rows[0].status == "divergent" if name == "once" else {"error"} <= {r.status for r in rows}
        assert any(r.status == "identical" for r in rows)


def test_every_request_is_compared_with_itself_in_the_largest_batch() -> None:
    """The leading rows agree, and every other request has other bits solo; sound functions pass, packed ones say so."""
    angles = torch.arange(8.0)[:, None]
    # the fault of a rotary embedding that turns all requests by the angles of request 0
    faulty = check(lambda x, angles: x * angles[:1].cos(), lambda size: (rows_of(size), angles[:size]), [1, 2, 8])
    leading, each, *others = faulty.rows
    assert (leading.status, each.status, each.values) == ("identical", "divergent", [1, 8])
    assert [(row.varied, row.status) for row in others] == [
        ("position", "divergent"),
        ("neighbour_values", "divergent"),
    ]
    assert each.difference is not None
    assert each.difference.first_mismatch == [1, 0]
    assert (each.difference.compared, leading.extra["elements"]) == (8 * WIDTH, 8 * WIDTH)
    sound = check(
        lambda x, angles: x * angles.cos(), lambda size: {"x": rows_of(size), "angles": angles[:size]}, [2, 7]
    )
    assert (finding(sound), sound.rows[1].case) == (Finding.CLEAN, "7 of 7 requests, each in batches of 2 and 7")
    assert judge(sound)[0].text.endswith(f", {7 * WIDTH} elements of float32 compared")
    packed = check(lambda x: x.double().sum(-1), lambda size: rows_of(3 * size), [1, 4])
    assert (len(packed.rows), finding(packed)) == (1, Finding.CLEAN)
    assert "only the first 1 of each batch were compared: a tensor among the inputs" in packed.rows[0].reason
    number = check(lambda x, n: x[:n].double().sum(-1), lambda size: (rows_of(size), size), [1, 4])
    assert (len(number.rows), finding(number)) == (4, Finding.CLEAN)
    named = check(lambda x, n: x.double().sum(-1), lambda size: (rows_of(size), str(size)), [1, 4])
    assert "an input that is no tensor" in named.rows[0].reason


def test_requests_of_unequal_lengths_are_items_of_lists() -> None:
    """Each has its own result; padded to another shape in each batch it is refused, and so are other requests."""
    texts = [list(range(1, 3 + length)) for length in (4, 2, 7)]
    each = check(lambda texts: [torch.tensor(t).sum(0, True) for t in texts], lambda n: (texts[:n],), [1, 3])
    assert finding(each) == Finding.CLEAN
    assert [row.varied for row in each.rows[2:]] == ["position", "neighbour_values", "neighbour_length"]
    longest = lambda texts: torch.ones(len(texts), max(map(len, texts)))  # noqa: E731
    with pytest.raises(UserError, match=r"gave \(1, 9\)(?s:.*)a list with a tensor for each request"):
        check(longest, lambda n: (texts[:n],), [1, 3])
    with pytest.raises(UserError, match="first 1 items of a list"):
        check(lambda texts: torch.ones(len(texts)), lambda n: (texts[-n:],), [1, 3])


def test_layout_varies_where_the_axis_is_given() -> None:
    """Wider rows of memory; what takes no such memory is not called with it; results have the axis of the inputs."""
    strided = check(lambda x: x + (x.stride(0) > WIDTH), rows_of, [1, 4], axis=0)
    assert [(row.varied, row.status) for row in strided.rows if row.differs] == [("layout", "divergent")]
    refused = check(lambda x: x.view(-1).view(x.shape) + 1, rows_of, [1, 4], axis=0)
    assert ([row.varied for row in refused.rows][-1], finding(refused)) == ("neighbour_values", Finding.CLEAN)
    turned = check(lambda x: x.double().cumsum(0), lambda n: rows_of(4).t()[:, :n], [1, 4], axis=1)
    assert finding(turned) == Finding.CLEAN


def test_so_few_elements_that_a_cut_of_k_would_not_show_are_a_warning() -> None:
    """32 numbers of bfloat16: one in 10,000 differs where a sum is cut in two. Enough of them, or float32, are none."""
    make = lambda size: rows_of(size).bfloat16()  # noqa: E731
    with pytest.warns(UserWarning, match=r"only 32 elements of bfloat16 were compared: .*takes 30,000"):
        run = check(lambda x: x.double().sum(-1).bfloat16(), make, [1, 32], name="sum")
    assert "30,000" in run.rows[0].reason
    assert judge(run)[0].text.endswith("32 elements of bfloat16 compared, too few to see a sum that is cut in two")
    with warnings.catch_warnings(action="error"):
        check(lambda x: x.double().sum(-1), make, [1, 32])
        check(lambda x: x.double().sum(-1, keepdim=True).expand(-1, 1000).bfloat16(), make, [1, 32])
