"""The probe of sums over ranks, with ranks of its own (gloo): what parts is said to part, what does not is not."""

from __future__ import annotations

import pytest
import torch

from nondet.core.records import Status
from nondet.errors import UserError
from nondet.probes.all_reduce import AllReduce
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from nondet.ranks import group


def test_gloo_depends_on_the_message_and_the_order_of_ranks_does_not():
    """On three ranks gloo's row follows M and its place; in the order of ranks it does not; a gather copies."""
    options = Options(ranks=(3,), dtypes=("float32",), m=16, n=128, runs=3)
    rows = list(run_jobs(plan_jobs(["all-reduce"], ["stock", "invariant"], options), 0))
    assert all(row.status in (Status.IDENTICAL, Status.DIVERGENT) for row in rows), [row.reason for row in rows]
    parted = {(row.impl, row.operator, row.varied) for row in rows if row.status == Status.DIVERGENT}
    assert ("stock", "all_reduce", "batch_size") in parted
    assert not [p for p in parted if p[0] == "invariant" or p[1] == "all_gather" or p[2] in ("run", "rank")]
    for row in rows:
        assert row.error is not None
        assert row.error.relative_norm < 1e-6
        assert row.extra["backend"] == "gloo"


@pytest.mark.nightly
def test_a_rank_that_dies_is_a_row_and_the_next_case_has_new_ranks():
    """The case in which a rank is killed is an error row with its reason; the next one is measured."""
    options = Options(ranks=(2,), dtypes=("float32",), m=4, n=16, runs=3)
    jobs = plan_jobs(["all-reduce"], ["stock"], options)
    rows = run_jobs(jobs, 0)
    assert next(rows).status == Status.IDENTICAL
    first = group._shared[0]
    assert first is not None
    first._processes[1].kill()
    row = next(rows)  # the ranks are found dead and started again, or die under the question
    if row.status == Status.ERROR:
        assert "rank 1 of 2" in row.reason
        row = next(rows)
    assert row.status == Status.IDENTICAL
    assert group._shared[0] is not first


def test_too_few_gpus_and_every_algorithm(monkeypatch):
    """Ranks asked for by number are refused in one line; default ones are rows that say what is missing. --full holds
    NCCL to ring and tree and to each protocol, in ranks of their own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="--ranks 3 needs 3 GPUs, and 1 GPU is here"):
        list(AllReduce().cases(Options(device="cuda", ranks=(3,))))
    case = next(iter(AllReduce().cases(Options(device="cuda"))))
    with pytest.raises(UserError, match="2 ranks need 2 GPUs; there are 1"):
        AllReduce().prepare(case, "cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cases = list(AllReduce().cases(Options(device="cuda", ranks=(2,), dtypes=("bfloat16",), full=True)))
    environments = {c.data["message"].environment for c in cases} - {()}
    assert len(environments) == 6
    assert (("NCCL_ALGO", "Tree"), ("NCCL_PROTO", "LL128")) in environments
