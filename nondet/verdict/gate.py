"""One verdict for each implementation of a run, and the exit code that hangs on them."""

from __future__ import annotations

from nondet.core.records import Role, Run, Status
from nondet.verdict.axes import is_varied, judge_axes
from nondet.verdict.findings import Finding, Verdict, plural
from nondet.verdict.rows import judge_rows
from nondet.verdict.samples import is_replay, judge_samples
from nondet.verdict.served import judge_served
from nondet.verdict.served_arms import is_endpoint

__all__ = ["exit_code", "judge"]

_OK, _NO_ANSWER, _FAULT = 0, 1, 3


def judge(run: Run) -> list[Verdict]:
    """The verdicts that every report of the run gives: completions first, then operators.

    Raises:
        UserError: the records contradict each other.
    """
    judge_completions = judge_axes if is_varied(run) else judge_served if is_endpoint(run) else judge_samples
    sampled = judge_completions(run)
    return sampled + judge_rows([r for r in run.rows if not is_replay(r)])


def exit_code(run: Run, fail_on: str | None) -> tuple[int, str]:
    """The code to end with under --fail-on, and the line that says why the question has no answer ("" otherwise).

    With "divergent": 3 where something diverged that a user would want equal, or where a result is wrong, however
    identical. 1 where neither was seen and the question has no answer: the run was killed, cases failed, or nothing was
    compared for an implementation that was asked for. A gate must not open on that. Without --fail-on 1 where cases
    were asked and not one of them was measured. 0 otherwise.
    Sums that were taken in another order on purpose are no divergence.

    Raises:
        UserError: the records contradict each other.
    """
    if fail_on is None:
        return _unmeasured(run)
    verdicts = judge(run)
    if any(verdict.is_fault for verdict in verdicts):
        return _FAULT, ""
    if not run.complete:
        return _NO_ANSWER, f"--fail-on {fail_on} can't be answered: the run did not come to its end."
    failed = sum(r.status == Status.ERROR for r in run.rows) + sum(c.status != "ok" for c in run.completions)
    if failed:
        return _NO_ANSWER, f"--fail-on {fail_on} can't be answered: {plural(failed, 'case')} failed."
    unproven = list(dict.fromkeys(v.impl for v in verdicts if v.finding == Finding.UNPROVEN))
    if unproven:
        names = ", ".join(unproven)
        why = f"under {names} an axis was not tested" if is_varied(run) else f"the load of {names} is unproven"
        return _NO_ANSWER, f"--fail-on {fail_on} can't be answered: {why}."
    untested = [v.impl for v in verdicts if v.finding == Finding.UNTESTED]
    # a backend that "stock" stands for may be missing here; one that was asked for by its own name is an untested stock
    missing = [impl for impl in dict.fromkeys(untested) if _asked_for(run, impl, verdicts)]
    if missing or all(v.finding == Finding.UNTESTED for v in verdicts):
        of = f" for {', '.join(missing)}" if missing and len(missing) < len(verdicts) else ""
        return _NO_ANSWER, f"--fail-on {fail_on} can't be answered: nothing was compared{of}."
    return _OK, ""


def _unmeasured(run: Run) -> tuple[int, str]:
    """1 and a line for a run whose every case failed or was skipped: a script should not take it for an answer."""
    asked = len(run.rows) + len(run.completions) + sum(len(cell.timed) for cell in run.cells)
    measured = (
        any(row.measured for row in run.rows)
        or any(completion.status == "ok" for completion in run.completions)
        or any(timed.status == Status.TIMED for cell in run.cells for timed in cell.timed)
    )
    if measured or not asked:
        return _OK, ""
    return (
        _NO_ANSWER,
        f"nothing was measured: {plural(asked, 'case')} failed or {'was' if asked == 1 else 'were'} skipped.",
    )


def _asked_for(run: Run, impl: str, verdicts: list[Verdict]) -> bool:
    """Whether it is no backend that came along with stock."""
    verdict = next(v for v in verdicts if v.impl == impl)
    named = run.header.plan.get("impls")
    return verdict.role != Role.BACKEND or (isinstance(named, list) and impl in named)
