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
import itertools
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from nondet.core.records import Run
from nondet.core.runfile import check_outputs, read_run
from nondet.errors import UnknownNameError, one_line

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure

    from nondet.core.records import Value
    from nondet.kernels.dispatch.block import Invariance
    from nondet.services.run import Request, Sink
    from nondet.verdict.findings import Verdict


class LoadedRun:
    """A run file: what was run, where, and the results.

    Attributes:
        records: The typed records, as the file has them (`nondet.core.records.Run`).
        path: Where it was read from.
    """

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
        """Records as a pandas frame.

        Args:
            kind: "rows", "classes", "completions", "rounds", "training-steps" or "cells"; None where the run holds one
                kind only.

        Raises:
            UnknownNameError: an unknown kind.
            UserError: no kind was named, and the run holds several.
        """
        from nondet.export.frames import frame, only_kind

        return frame([self.records], kind or only_kind([self.records]))

    def figure(self, name: str) -> Figure:
        """A matplotlib figure: class-map, speed, jigsaw, survival, training or tree.

        Raises:
            UnknownNameError: an unknown figure.
            UserError: the run holds no data for it.
        """
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
    """Read a run file.

    Args:
        allow_truncated: Take the whole lines of a run that was killed while writing.

    Raises:
        UserError: missing, malformed, cut off or from a newer nondet; the message names the line.
    """
    path = Path(path)
    return LoadedRun(read_run(path, allow_truncated=allow_truncated), path)


_NUMBERS = itertools.count(1)


def probe(
    *names: str,
    impl: str | Sequence[str] | None = None,
    device: str = "auto",
    dtype: str | Sequence[str] | None = None,
    m: int | None = None,
    k: int | None = None,
    n: int | None = None,
    inputs: str | Sequence[str] | None = None,
    full: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
    **options: Any,
) -> LoadedRun:
    """Test whether operators' bits depend on the batch, as `nondet probe` does.

    Args:
        names: Probes: "matmul", "attention", ... or "all".
        impl: "stock", "invariant", "package.module:function"; None: stock and invariant.
        dtype: "float32", ...; None: each probe's own.
        m: Largest number of rows; None, here as for k and n: each probe's own.
        k: Length of the axis that is summed.
        n: Output features.
        inputs: Kinds of input (`nondet.core.inputs.KINDS`).
        full: The long sweep.
        out: Run file to write.
        options: Any other of the command's: preset, model, runs, ranks, from_trace, threads, force, resume.

    Returns:
        The run, with a row for each case and implementation.

    Raises:
        UserError: an unknown name, an unknown or invalid option; the run file exists.
    """
    arguments = dict(locals())
    from nondet.services import probe as service

    return _measured(service.probe, service.ProbeRequest, **arguments)


def sample(
    n: int | None = None,
    prompt: str | None = None,
    *,
    model: str | None = None,
    impl: str | Sequence[str] | None = None,
    load: str = "default",
    max_tokens: int | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    seed: int = 0,
    out: str | Path | None = None,
    **options: Any,
) -> LoadedRun:
    """Complete one prompt n times under a changing load, as `nondet sample` does.

    Args:
        n: Completions; None: 1,200, or for an endpoint as many as its arms need by default.
        prompt: The prompt; None: the embedded model's, and two long ones.
        model: Folder, hub name, or random weights such as "random:qwen3-12x1024"; None: the embedded model.
        impl: "stock", "stock-no-cudnn", "invariant", "both", "invariant:attention", ...; None: both.
        load: "none", "light", "default", "heavy", or keys such as "others=60,budget=256".
        max_tokens: Tokens of each completion.
        dtype: "bfloat16", "float16" or "float32".
        out: Run file to write; the traces are written to the same folder.
        options: Any other of the command's: endpoint, arms, prompt_file (a Path), threads, force, resume, ...

    Returns:
        The run, with a record for each completion and each round.

    Raises:
        UserError: an unknown or invalid option; the run file exists; the model can't be loaded.
    """
    arguments = dict(locals())
    from nondet.services import sample as service

    return _measured(service.sample, service.SampleRequest, **arguments)


def rl(
    *,
    arms: str = "stock,stock+tis,sampler-only,invariant",
    steps: int = 60,
    seeds: int = 1,
    model: str | None = None,
    device: str = "auto",
    seed: int = 0,
    out: str | Path | None = None,
    **options: Any,
) -> LoadedRun:
    """Train by reinforcement with stock and with batch-invariant kernels, as `nondet rl` does.

    Args:
        arms: With commas.
        steps: Of each arm under each seed.
        model: Folder, hub name, or random weights; None: the embedded model.
        out: Run file to write; checkpoints are in its folder until an arm has finished.
        options: Any other of the command's: task, prompts, group, tokens, lr, epochs, rollouts, threads, resume, ...

    Returns:
        The run, with a record for each step.

    Raises:
        UserError: an unknown or invalid option; the run file exists; the model can't be loaded.
    """
    arguments = dict(locals())
    from nondet.services import rl as service

    return _measured(service.rl, service.RlRequest, **arguments)


def find_mismatch(
    run: str | Path | None = None,
    *,
    model: str | None = None,
    trainer: str = "",
    rollouts: str | Path | None = None,
    older: str | None = None,
    arms: str = "stock,invariant",
    n: int = 12,
    tokens: int = 48,
    dtype: str = "bfloat16",
    device: str = "auto",
    seed: int = 0,
    out: str | Path | None = None,
    **options: Any,
) -> LoadedRun:
    """Compare a sampler with a trainer, as `nondet mismatch` does.

    Args:
        run: A run of `nondet sample`, whose tokens and logprobs are the sampler's; None: sample now, or read
            `rollouts`.
        model: Folder, hub name, or random weights; None: the embedded model.
        trainer: How the trainer differs: "dtype=float32,autocast=bfloat16,padding=left,micro=4".
        rollouts: A file or folder of tokens and logprobs; then nothing is sampled.
        older: Older weights that one side may still use.
        arms: Of stock, sampler-only and invariant, with commas.
        n: Rollouts of each prompt.
        tokens: Of each rollout.
        out: Run file to write.
        options: Any other of the command's: prompt, threads, trust_remote_code, force, resume.

    Returns:
        The run, with a record for each rollout and each hypothesis.

    Raises:
        UserError: an invalid option, a file that holds no rollouts, or a model that can't be loaded.
    """
    arguments = dict(locals())
    from nondet.services import mismatch as service

    return _measured(service.mismatch, service.MismatchRequest, **arguments)


def check(
    fn: Callable[..., Any],
    make_inputs: Callable[[Any], Any],
    over: Sequence[Value],
    *,
    varied: str = "batch_size",
    select: Callable[[Any, Any], torch.Tensor] | None = None,
    oracle: Callable[..., Any] | None = None,
    allowed: float | None = None,
    name: str = "",
    out: str | Path | None = None,
    force: bool = False,
) -> LoadedRun:
    """Compare a function's results for the same requests in batches of other sizes: any callable, any device.

    `make_inputs(size)` gives the inputs of a batch: a tensor, a tuple for `fn(*inputs)` or a mapping for
    `fn(**inputs)`. The leading requests must be the same in every batch, as many as the smallest has, and their part of
    the result is compared, bit for bit; then every request of the largest batch with itself in the smallest.
    `nondet.probes.functions.check` describes what that covers and what it does not.

    Args:
        over: Two or more batch sizes, or with `select` any numbers or names.
        varied: What `over` holds: batch_size, position, neighbour_values, run, ...
        select: select(result, value) is the tensor to compare.
        oracle: Takes the inputs of the first value and gives what `fn` should, in float64.
        allowed: The largest ||result - oracle|| / ||oracle|| that is right.
        name: The name of the function in the run.
        out: Run file to write.
        force: Overwrite it.

    Returns:
        The run, of a row or two.

    Raises:
        UserError: fewer than two values, inputs that are not the same requests, or that `fn` can't be called with.
    """
    from nondet.probes.functions import check as measure

    run = measure(fn, make_inputs, over, varied=varied, select=select, oracle=oracle, allowed=allowed, name=name)
    return _kept(run, out, force=force)


def check_operator(
    fn: Callable[..., Any],
    operator: str = "linear",
    *,
    m: int | None = None,
    k: int | None = None,
    n: int | None = None,
    config: Mapping[str, int] | None = None,
    dtype: str | Sequence[str] = "float32",
    device: str = "cpu",
    inputs: str | Sequence[str] | None = None,
    varied: Container[str] | None = None,
    full: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
) -> LoadedRun:
    """Test a function as an implementation of an operator, with everything that the operator's probe tests: hard
    inputs, positions, other rows' values, and the float64 reference.

    Args:
        fn: Takes what the operator takes: linear(x, weight, bias=None), softmax(x), attention(q, k, v, ...), ...
        operator: linear, matmul, attention, rms_norm, softmax, ...
        config: Sizes of a model, for attention: heads, kv_heads, head_dim.
        varied: What is tested: batch_size, position, run, ...; None: everything.
        out: Run file to write.
        force: Overwrite it.

    Returns:
        The run, with a row for each case.

    Raises:
        UserError: an unknown operator, invalid sizes, or a function that takes other arguments.
    """
    from nondet.probes.functions import check_operator as measure

    run = measure(
        fn, operator, m=m, k=k, n=n, config=config, dtypes=_listed(dtype) or (), device=device, inputs=_listed(inputs),
        varied=varied, full=full, seed=seed,
    )  # fmt: skip
    return _kept(run, out, force=force)


def batch_invariant(families: Iterable[str] | None = None, *, training: bool = False) -> Invariance:
    """Within `with nondet.batch_invariant():` the bits of each request no longer depend on the others in its batch.

    Torch's operators and transformers' functions compute by kernels with one order of addition for all batch sizes, in
    all threads; what has no such kernel stays torch's and is counted: `print(block.coverage())`, or show the block in
    a notebook. `nondet.kernels.dispatch.block.batch_invariant` has the fine print.

    Args:
        families: "matmul", "attention", "norm", ... (`nondet sample --help-all`); None: all.
        training: Attention and norms also keep their bits where a gradient is needed.
    """
    began = time.perf_counter()
    from nondet.kernels.dispatch.block import batch_invariant as made

    plain = made(families, training=training)
    return _shown()(plain.families, plain.training, time.perf_counter() - began)


@cache
def _shown() -> type[Any]:
    """Loaded late, because it loads torch, and not with the kernels, because certificates depend on their folder's
    code."""
    from nondet.kernels.dispatch.block import FAMILIES, Invariance, devices
    from nondet.kernels.dispatch.state import KINDS, Coverage

    class Counts(Coverage):
        def lines(self) -> list[str]:
            clean = self.replaced and not self.left and not self.at_risk
            return super().lines() + (["nothing was left stock, and nothing is at risk"] if clean else [])

    Counts.__qualname__ = Coverage.__qualname__  # what its repr begins with

    class Block(Invariance):
        def __init__(self, families: frozenset[str], training: bool, took: float) -> None:
            super().__init__(families, training)
            self._coverage, self._state, self._took = Counts(), "not entered", took

        def __enter__(self) -> Invariance:
            began = time.perf_counter()
            super().__enter__()
            self._state = f"open, ready after {self._took + time.perf_counter() - began:.1f} s"
            self._took = 0.0
            return self

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self._state = "closed"

        def __repr__(self) -> str:
            names = [name for name in FAMILIES if name in self.families]
            counts = (f"{sum(getattr(self._coverage, kind).values()):,} {label}" for kind, label in KINDS.items())
            on = " and ".join(devices())
            return f"<batch_invariant: {self._state}; {', '.join(names)} on {on}; calls so far: {', '.join(counts)}>"

    return Block


def _measured(
    service: Callable[[Any, Sink], Path], request: type[Request], out: str | Path | None, options: Mapping[str, Any],
    **arguments: Any,
) -> LoadedRun:  # fmt: skip
    from nondet.services.run import Sink

    hints = get_type_hints(request)
    defaults = {field.name: field.default for field in fields(request) if field.name not in ("given", "out")}
    for name in options:
        if name not in defaults:
            raise UnknownNameError(f"option of nondet.{service.__name__}", name, defaults)
    for name, value in arguments.items():
        if value is not None and list[str] in get_args(hints[name]):
            arguments[name] = _listed(value)
    given = {name for name, value in arguments.items() if value != defaults[name]} | options.keys()
    path = _path(out, service.__name__)
    check_outputs({**arguments, **options, "out": path})
    return load(service(request(given=frozenset(given), out=path, **arguments, **options), Sink()))


def _kept(run: Run, out: str | Path | None, *, force: bool) -> LoadedRun:
    from nondet.core.runfile import write_run

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
