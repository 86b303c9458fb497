"""`nondet probe --from-trace`: the guilty operator's probe at the shapes of the trace, or one line why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nondet.core.records import Culprit, Header, Run
from nondet.core.runfile import open_run
from nondet.errors import UserError
from nondet.probes import attention as packed
from nondet.probes.base import Options
from nondet.probes.runner import met_in, plan_jobs, run_jobs


def culprit(call: str, *shapes: dict[str, list[int]], position: int = 19) -> Culprit:
    return Culprit(
        number=1, replaced=[], position=position, token=-1, layer="0", module="model.layers.0.m", call=call,
        occurrence=0, requests=[], shapes=list(shapes), axes={}, digests={}, differences={}, kernels=[], replays=[],
        family="", sentence="",
    )  # fmt: skip


def run_of(*culprits: Culprit) -> Run:
    header = Header(
        format="nondet-run", schema=3, command="trace", plan={"dtype": "float32"}, environment={}, started=""
    )
    return Run(header=header, culprits=list(culprits))


def attention(rows: int, keys: int) -> dict[str, list[int]]:
    return {"0": [1, 4, rows, 16], "1": [1, 2, keys, 16], "2": [1, 2, keys, 16], "out": [1, 4, rows, 16]}


LINEAR = ({"0": [1, 1, 64], "1": [48, 64], "out": [1, 1, 48]}, {"0": [1, 37, 64], "1": [48, 64], "out": [1, 37, 48]})


def test_a_linear_layer_is_asked_at_its_rows_and_sizes() -> None:
    """Both arms' numbers of rows are among the sizes, and the layer is the one that was met."""
    met = met_in(run_of(culprit("linear", *LINEAR)))
    assert (met.probe, met.k, met.n, met.dtype) == ("matmul", 64, 48, "float32")
    jobs = plan_jobs(["matmul"], ["stock"], met.options(Options(device="cpu", m=8)))
    swept = [
        j.case for j in jobs if j.case.varied == "batch_size" and not j.case.data["layout"] and j.case.inputs == "bell"
    ]
    assert {j.case.dtype for j in jobs} == {"float32"}
    assert all({1, 37} <= set(case.data["values"]) for case in swept)
    assert {(case.shape["K"], case.shape["N"]) for case in swept} == {(64, 48)}


def test_packed_attention_is_asked_as_it_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row and its keys among others' come out as alone under an operator that goes by them alone, and not under
    one whose blocks begin at the first key of the call."""
    met = met_in(run_of(culprit("scaled_dot_product_attention", attention(4, 20), attention(9, 77))))
    assert met.config == {"heads": 4, "kv_heads": 2, "head_dim": 16}
    options = met.options(Options(device="cpu"))
    job = next(j for j in plan_jobs(["attention"], ["stock"], options) if j.case.varied == "load")
    rows = {}
    for name, operator in {"sound": _one_row_in_double, "blocks": _blocks_of_the_call}.items():
        monkeypatch.setattr("nondet.kernels.stock.attention", operator)
        rows[name] = next(run_jobs([job], 0, set()))
    assert rows["sound"].values == ["alone, 20 keys", *(f"9 rows, 77 keys, its own from key {s}" for s in (0, 28, 57))]
    assert rows["sound"].status == "identical"
    assert rows["blocks"].status == "divergent"


def _one_row_in_double(q: Any, k: Any, v: Any, *, mask: Any = None, **_: Any) -> torch.Tensor:
    """Each visible key in its own order, in float64: what others have adds exact zeros."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).double() for x in (k, v))
    out = torch.zeros_like(q, dtype=torch.float64)
    for row in range(q.shape[2]):
        seen = [i for i in range(k.shape[2]) if mask is None or mask[0, 0, row, i] == 0]
        scores = torch.stack([(q[:, :, row].double() * k[:, :, i]).sum(-1) for i in seen], -1)
        weights = torch.softmax(scores / q.shape[-1] ** 0.5, -1)
        for place, i in enumerate(seen):
            out[:, :, row] += weights[:, :, place, None] * v[:, :, i]
    return out.to(q.dtype)


def _blocks_of_the_call(q: Any, k: Any, v: Any, *, mask: Any = None, **more: Any) -> torch.Tensor:
    """As the other, but rounded on its way by how many keys the call has."""
    return _one_row_in_double(q, k, v, mask=mask) * (1 + 2.0**-22 * (k.shape[2] % 2))


def test_trials_of_too_few_keys_are_not_asked() -> None:
    """A packing that can't hold the row's own keys was not met as such."""
    tensor = torch.zeros(1, 1, 4, 8)
    trials = packed.packed_trials(_one_row_in_double, tensor, tensor, tensor, 4, [(2, 3)])
    assert [trial.value for trial in trials] == ["alone, 4 keys"]


def _product_in_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sound for one product of any rows; among several, K is summed in two parts."""
    if a.dim() == 2 or len(a) == 1:
        return (a.double() @ b.double()).to(a.dtype)
    half = a.shape[-1] // 2
    return a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :]


def _product_alone(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def test_products_in_a_batch_are_asked_as_they_were_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both arms' rows and numbers of products; what minds the others in the call parts, and what does not, does not."""
    shapes = {"0": [4, 3, 32], "1": [4, 32, 8]}, {"0": [12, 3, 32], "1": [12, 32, 8]}
    met = met_in(run_of(culprit("bmm", *shapes)))
    assert (met.probe, met.k, met.n, met.shapes) == ("matmul", 32, 8, ((3, 4), (3, 12)))
    jobs = plan_jobs(["matmul"], ["stock"], met.options(Options(device="cpu", inputs=("order",))))
    assert [job.case.data["batched"] for job in jobs] == [[(3, 1), (3, 4), (3, 12)]]
    for operator, status in ((_product_alone, "identical"), (_product_in_parts, "divergent")):
        monkeypatch.setattr("nondet.kernels.stock.matmul", operator)
        assert next(run_jobs(jobs, 0, set())).status == status
    apart = {"0": [4, 3, 32], "1": [4, 32, 8]}, {"0": [12, 3, 48], "1": [12, 48, 8]}
    with pytest.raises(UserError, match="no probe asks `bmm`"):  # its depth follows the batch: weights over keys
        met_in(run_of(culprit("bmm", *apart)))


def test_a_pointwise_call_is_asked_at_its_numbers_of_elements() -> None:
    """One operator of the probe's, whole and in pieces of the smaller call's size."""
    met = met_in(run_of(culprit("silu", {"0": [1, 1, 96]}, {"0": [1, 5, 96]})))
    cases = [j.case for j in plan_jobs(["pointwise"], ["stock"], met.options(Options(device="cpu")))]
    assert {case.operator for case in cases} == {"silu"}
    assert {case.shape["n"] for case in cases} == {480}
    assert all(96 in case.data["pieces"] for case in cases)


def test_grouped_products_are_asked_at_their_experts() -> None:
    """Experts, depth and width of the weight that was met, and both numbers of rows."""
    met = met_in(run_of(culprit("_grouped_mm", *({"0": [r, 64], "1": [6, 64, 40]} for r in (2, 74)))))
    options = met.options(Options(device="cpu", m=8, inputs=("order",)))
    swept = [j.case for j in plan_jobs([met.probe], ["stock"], options) if j.case.varied == "batch_size"]
    assert [(c.shape["E"], c.shape["K"], c.shape["N"]) for c in swept] == [(6, 64, 40)]
    assert {2, 74} <= set(swept[0].data["values"])


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (run_of(), "it holds no trace"),
        (run_of(culprit("")), "named no operator"),
        (run_of(culprit("Tensor.add", {"0": [1, 1, 8]}, {"0": [1, 3, 8]})), "no probe asks `Tensor.add`"),
        (run_of(culprit("linear", {"0": [8]}, {"0": [8]})), "no probe asks `linear`"),
    ],
)
def test_a_run_without_a_culprit_is_refused_in_one_line(run: Run, reason: str) -> None:
    """Nothing is asked of an operator that nobody named."""
    with pytest.raises(UserError, match=reason) as refused:
        met_in(run)
    assert "\n" not in str(refused.value)


def test_the_command_refuses_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line: exit 2, one line; also where shapes are given twice."""
    from nondet.cli import main

    path = tmp_path / "run.jsonl"
    open_run(path, command="trace", plan={}, environment={}).finish()
    assert main(["probe", "--from-trace", str(path)]) == 2
    assert "no guilty operator" in capsys.readouterr().err
    assert main(["probe", "matmul", "--from-trace", str(path)]) == 2
    assert main(["probe"]) == 2
