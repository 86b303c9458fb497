"""Assertions for tests. A failure has what a kernel's author needs to find the fault: see `nondet.testing.messages`."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nondet.api import LoadedRun
    from nondet.core.records import Run, Value

__all__ = ["assert_batch_invariant", "assert_no_fault", "assert_same_bits", "keep_runs_in"]

# Set where `--nondet-runs` requests a run file of every assertion.
_kept_in: list[Path] = []


def keep_runs_in(folder: Path | None) -> None:
    """Write the run of every later assertion there; None: keep none."""
    _kept_in[:] = [] if folder is None else [folder]


def assert_batch_invariant(
    fn: Callable[..., Any],
    operator: str | None = None,
    *,
    make_inputs: Callable[[Any], Any] | None = None,
    over: Sequence[Value] | None = None,
    varied: Container[str] | str | None = None,
    **options: Any,
) -> Run:
    """Fail where the bits of `fn` depend on the batch, change from run to run, or are wrong, even if consistent.

    With `operator` the function replaces that operator, and is tested as by `nondet probe --impl`: hard inputs, every
    position, other rows in the batch, another call order, the float64 oracle. With `make_inputs` and `over` any
    callable is compared over its batch sizes; `nondet.probes.functions.check` documents what that covers.

    If nothing is compared it fails: a kernel that raises, or skips every case, passes no test.

    Args:
        operator: linear, attention, rms_norm, softmax, ...; "linear" where neither it nor `make_inputs` is given.
        make_inputs, over: As `nondet.probes.functions.check`, for any callable.
        varied: For an operator what is tested; for any callable what `over` holds.
        options: With `make_inputs`: select, axis, reference, error. Else m, k, n, config, dtypes, device, inputs,
            full, seed: as `nondet.probes.functions.check_operator`.

    Returns:
        The run, as the commands write it.

    Raises:
        AssertionError: it diverged, it is wrong, or nothing could be compared.
        UserError: the arguments make no sense.
    """
    __tracebackhide__ = True
    from nondet.errors import UserError
    from nondet.probes.functions import check, check_operator

    if (make_inputs is None) != (over is None) or (make_inputs is not None and operator is not None):
        raise UserError(
            "assert_batch_invariant takes an operator or a function", "Give operator=, or make_inputs= and over=."
        )
    if make_inputs is not None and over is not None:
        run = check(fn, make_inputs, over, varied=varied if isinstance(varied, str) else "batch_size", **options)
    else:
        if {"select", "axis", "reference", "error"} & options.keys():
            raise UserError("select, axis, reference, error belong to make_inputs", "An operator has its own oracle.")
        tested = {varied} if isinstance(varied, str) else varied
        run = check_operator(fn, operator or "linear", varied=tested, **options)
    assert_no_fault(run, fn=fn)
    return run


def assert_no_fault(run: Run | LoadedRun, *, fn: Callable[..., Any] | None = None) -> None:
    """Fail where a run shows a divergence or a wrong result, or nothing at all: as `--fail-on divergent` would.

    Args:
        fn: The function under test, for the command that continues with it.

    Raises:
        AssertionError: the run has a divergence, a wrong result, or nothing compared.
    """
    __tracebackhide__ = True
    from nondet.api import LoadedRun
    from nondet.testing.messages import no_answer_text, run_text
    from nondet.verdict.gate import Outcome, answer, judge

    records = run.records if isinstance(run, LoadedRun) else run
    path = _keep(records)
    outcome, why = answer(records, judge(records))
    if outcome == Outcome.OPEN:
        return
    text = no_answer_text(records, why) if outcome == Outcome.NO_ANSWER else run_text(records, fn)
    raise AssertionError(text + (f"\nrun file: {path}" if path is not None else ""))


def assert_same_bits(a: Any, b: Any, *, names: tuple[str, str] = ("left", "right")) -> None:
    """Fail where two results are not equal bit by bit. There is no tolerance.

    NaN equals NaN whatever its payload; -0.0 and 0.0 are different bits.

    Args:
        a, b: Tensors, NumPy arrays, numbers, or tuples, lists and mappings of them. Devices may differ.
        names: What the two are called in the message.

    Raises:
        AssertionError: shapes, dtypes, structure or bits differ.
    """
    __tracebackhide__ = True
    from nondet.testing.messages import same_bits_text

    text = same_bits_text(a, b, names)
    if text:
        raise AssertionError(text)


def _keep(run: Run) -> Path | None:
    if not _kept_in or run.source:
        return None
    import re

    from nondet.core.runfile import write_run

    folder = _kept_in[0]
    name = re.sub(r"\W+", "-", ",".join(run.header.plan.get("impls", ["run"])))[:80].strip("-")
    taken = sum(1 for _ in folder.glob(f"{name}-*.jsonl")) if folder.exists() else 0
    path = folder / f"{name}-{taken}.jsonl"
    write_run(path, run, force=True)
    return path
