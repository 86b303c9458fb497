"""nondet in Python: load a run file or measure one, read its verdict, get its records as pandas frames.

    >>> run = nondet.load("runs/quickstart-sample.jsonl")
    >>> run.verdict()
    >>> run.frame("completions").groupby("impl")["trace"].nunique()
    >>> nondet.probe("softmax", dtype="float32").frame("rows")
    >>> nondet.check(my_function, my_inputs, over=[1, 2, 3, 7, 8, 64])

A function that measures writes a run file as its command does, to `out` or else to a folder that is deleted when Python
ends, and returns it as `nondet.load` would. Nothing is printed. An option has its command's name and meaning; an
invalid one is a `nondet.errors.UserError` with the command's own message. Importing this imports neither torch nor
pandas.
"""

from __future__ import annotations

import html
import inspect
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from nondet.core.records import Run
from nondet.core.runfile import check_outputs, read_run, write_run
from nondet.errors import UnknownNameError, one_line
from nondet.services import mismatch as mismatch_command
from nondet.services import probe as probe_command
from nondet.services import rl as rl_command
from nondet.services import sample as sample_command
from nondet.services.options import declared
from nondet.services.run import Request, Sink, options_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from nondet.core.records import Value
    from nondet.verdict.findings import Verdict


class LoadedRun:
    """A run file: what was run, where, and the results. `records`: as typed (`nondet.core.records.Run`)."""

    def __init__(self, records: Run, path: Path) -> None:
        self.records, self.path = records, path

    @property
    def command(self) -> str:
        """The command that wrote it: probe, sample, bench, certify, ..."""
        return self.records.header.command

    @property
    def environment(self) -> dict[str, Any]:
        """Everything known to change bits or speed there: GPU or CPU, versions, switches, environment variables."""
        return self.records.header.environment

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return self.records.complete

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each implementation, as in every report."""
        from nondet.verdict.gate import judge

        return judge(self.records)

    def verdict(self) -> str:
        """The finding in one sentence: the first line of every report of this run."""
        from nondet.reports.content import headline

        return f"{headline(self.records, self.verdicts)}."

    def frame(self, kind: str | None = None) -> pd.DataFrame:
        """Records of a kind as a pandas frame: "rows", "classes", "completions", "rounds", "training-steps" or "cells".
        A `UserError` if no kind is named, and the run holds several, or if there is no such kind."""
        from nondet.export.frames import frame, only_kind

        return frame([self.records], kind or only_kind([self.records]))

    def figure(self, name: str) -> Figure:
        """A matplotlib figure: class-map, map, speed, jigsaw, survival, tree, training or mismatch. A `UserError` for
        any other, or if the run holds no data for it."""
        from nondet.export.figures import draw

        return draw(name, [self.records])

    def __repr__(self) -> str:
        state = "" if self.complete else ", incomplete"
        return f"<nondet run {one_line(str(self.path), 120)}: {self.command}{state}; {one_line(self.verdict(), 300)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the machine, and a line for each implementation."""
        from nondet.reports.text import environment_line

        lines = "".join(
            f"<tr><td>{html.escape(one_line(v.impl, 80))}</td><td>{html.escape(one_line(v.text, 1000))}</td></tr>"
            for v in self.verdicts
        )
        title = html.escape(one_line(f"nondet {self.command}: {self.path.name}", 200))
        machine = html.escape(environment_line(self.environment))
        return f"<p><b>{title}</b><br>{machine}</p><table>{lines}</table>"


def load(path: str | Path, *, allow_truncated: bool = False) -> LoadedRun:
    """Read a run file; `allow_truncated`: take the whole lines of a run that was killed while writing.

    Raises UserError: missing, malformed, cut off or from a newer nondet; the message names the line.
    """
    path = Path(path)
    return LoadedRun(read_run(path, allow_truncated=allow_truncated), path)


_NUMBERS = itertools.count(1)


def _takes_options_of(request: type[Request]) -> Callable[[Callable[..., LoadedRun]], Callable[..., LoadedRun]]:
    """Show the options of a command in the signature and the help of its function, which takes them as keywords."""
    hints, described = get_type_hints(request), declared(request)
    options = [f for f in options_of(request) if f.name != "names"]

    def decorated(function: Callable[..., LoadedRun]) -> Callable[..., LoadedRun]:
        shown = inspect.signature(function)
        own = [p for p in shown.parameters.values() if p.kind != p.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
            for f in options
            if f.name not in shown.parameters
        ]
        function.__signature__ = shown.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
        lines = [f"    {f.name}: {described[f.name][0].help}" for f in options]
        function.__doc__ = "\n".join([f"{function.__doc__}", "", "Options:", *lines])
        return function

    return decorated


@_takes_options_of(probe_command.ProbeRequest)
def probe(*names: str, **options: Any) -> LoadedRun:
    """Test whether operators' bits depend on the batch, as `nondet probe` does: "matmul", "all", ..."""
    return _measured(probe_command.probe, probe_command.ProbeRequest, names=names, **options)


@_takes_options_of(sample_command.SampleRequest)
def sample(n: int | None = None, prompt: str | None = None, **options: Any) -> LoadedRun:
    """Complete one prompt n times under a changing load, as `nondet sample` does."""
    return _measured(sample_command.sample, sample_command.SampleRequest, n=n, prompt=prompt, **options)


@_takes_options_of(rl_command.RlRequest)
def rl(**options: Any) -> LoadedRun:
    """Train by reinforcement with stock and with batch-invariant kernels, as `nondet rl` does."""
    return _measured(rl_command.rl, rl_command.RlRequest, **options)


@_takes_options_of(mismatch_command.MismatchRequest)
def find_mismatch(run: str | Path | None = None, **options: Any) -> LoadedRun:
    """Compare a sampler with a trainer, as `nondet mismatch` does. `run`: of `nondet sample`; None: sample now."""
    return _measured(mismatch_command.mismatch, mismatch_command.MismatchRequest, run=run, **options)


def check(
    fn: Callable[..., Any],
    make_inputs: Callable[[Any], Any],
    over: Sequence[Value],
    *,
    out: str | Path | None = None,
    force: bool = False,
    **options: Any,
) -> LoadedRun:
    """Compare a function's results for the same requests in other batches: any callable, any device.

    `make_inputs(size)` gives the inputs of a batch: a tensor, a tuple for `fn(*inputs)` or a mapping for
    `fn(**inputs)`, with a list for requests of unequal lengths. The leading requests must be the same in every batch.
    Their results are compared, bit for bit, and those of every request of the largest batch, solo and beside others.
    The verdict says whether a difference is rounding.

    Args:
        over: Two or more batch sizes, or with `select` any numbers or names.
        out, force: Run file to write, and whether it may be overwritten.
        options: varied: what `over` holds (batch_size, position, neighbour_values, run, ...); select: select(result,
            value) is the tensor to compare, and inputs are not compared; axis: of the batch in inputs and results, 0
            by default (if given, memory layout varies too); reference: takes the inputs of the first value and gives
            what `fn` should, in float64; error: the largest ||result - reference|| / ||reference|| that is right, or
            without a reference what counts as rounding, as a share of the result's scale; name: of the function.

    Returns:
        The run, with a row for each thing that varied.

    Raises:
        UserError: fewer than two values, inputs that are not the same requests, or that `fn` can't be called with.
    """
    from nondet.probes.functions import check as measure

    return _kept(measure(fn, make_inputs, over, **options), out, force=force)


def check_gradient(
    loss: Callable[[Any], Any],
    batch: Any,
    over: Sequence[int] = (1, 2, 4),
    *,
    out: str | Path | None = None,
    force: bool = False,
    **options: Any,
) -> LoadedRun:
    """Compare the gradient of a batch with the one accumulated over its micro-batches: rounding, or a mean of means.

    Args:
        loss: loss(part) of a tensor with one element; its parameters are found by its graph.
        batch: A tensor, a list of requests, or a tuple or mapping of such.
        over: Numbers of parts.
        out, force: Run file to write, and whether it may be overwritten.
        options: combine: "mean" (each part's loss is divided by the number of parts) or "sum"; error: what counts as
            rounding, as a share of the largest element; name: of the loss.

    Raises:
        UserError: more parts than requests, or a loss without a gradient.
    """
    from nondet.probes.gradients import check_gradient as measure

    return _kept(measure(loss, batch, over, **options), out, force=force)


def check_operator(
    fn: Callable[..., Any],
    operator: str = "linear",
    *,
    dtype: str | Sequence[str] = "float32",
    inputs: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **options: Any,
) -> LoadedRun:
    """Test a function as an implementation of an operator, with everything that the operator's probe tests: hard
    inputs, positions, other rows' values, and the float64 reference.

    Args:
        fn: Takes what the operator takes: linear(x, weight, bias=None), softmax(x), attention(q, k, v, ...), ...
        operator: linear, matmul, attention, rms_norm, softmax, ...
        inputs: Kinds of input (`nondet.core.inputs.KINDS`); None: the probe's.
        out, force: Run file to write, and whether it may be overwritten.
        options: m, k, n, config (heads, kv_heads, head_dim of attention), device, full, seed; varied: what is tested
            (batch_size, position, run, ...; everything by default).

    Returns:
        The run, with a row for each case.

    Raises:
        UserError: an unknown operator, invalid sizes, or a function that takes other arguments.
    """
    from nondet.probes.functions import check_operator as measure

    run = measure(fn, operator, dtypes=_listed(dtype) or (), inputs=_listed(inputs), **options)
    return _kept(run, out, force=force)


def _measured(service: Callable[[Any, Sink], Path], request: type[Request], **options: Any) -> LoadedRun:
    hints, defaults = get_type_hints(request), {f.name: f.default for f in options_of(request)}
    for name, value in options.items():
        if name not in defaults:
            raise UnknownNameError(f"option of nondet.{service.__name__}", name, defaults)
        kinds = get_args(hints[name])
        if value is not None and list[str] in kinds:
            options[name] = _listed(value)
        elif isinstance(value, str) and Path in kinds:
            options[name] = Path(value)
    given = frozenset(name for name, value in options.items() if name != "out" and value != defaults[name])
    options["out"] = _path(options.get("out"), service.__name__)
    check_outputs(options)
    return load(service(request(given=given, **options), Sink()))


def _kept(run: Run, out: str | Path | None, *, force: bool) -> LoadedRun:
    path = _path(out, run.header.command)
    write_run(path, run, force=force)
    return load(path)


def _path(out: str | Path | None, stem: str) -> Path:
    return Path(out) if out is not None else _scratch() / f"{stem}-{next(_NUMBERS)}.jsonl"


@cache
def _scratch() -> Path:
    """The folder of runs without an `out`; deleted when Python ends."""
    import atexit
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="nondet-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _listed(value: str | Sequence[str] | None) -> list[str] | None:
    return [value] if isinstance(value, str) else list(value) if value is not None else None
