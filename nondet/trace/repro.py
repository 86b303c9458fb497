"""A standalone script of the responsible call: only torch, inputs in a file beside it, run once to verify it.

Where this request's row by itself and among the others differ, the script makes the second arm's call on all rows and
on the one. Otherwise it makes both arms' calls.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import resolve_name

from nondet.core.runfile import replace_text, replacing
from nondet.errors import one_line
from nondet.trace.recorder import changed_tensors
from nondet.trace.replays import RecordedCall, Selection
from nondet.trace.search import NamedCall

_SECONDS = 300
_SCRIPT = '''"""{title}

Written by nondet. Needs only torch, and the inputs in the file of DATA, next to this one. Run it with python -P.
Prints how this row differs, and exits with 0 if it does and with 1 if it does not.
"""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # a json.py or torch.py next to this file is not what is meant

from pathlib import Path

import torch

DATA = {data!r}  # [(arguments, keyword arguments)] of two calls; read without running anything that is in it
THREADS = {threads}  # CPU threads change bits
DEVICE = {device!r}
ROWS = {rows}  # of each result, [(axis, indices)]


def bits(x):
    return x.contiguous().view({{1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}}[x.element_size()])


def main():
    torch.set_num_threads(THREADS)
    calls = torch.load(Path(__file__).with_name(DATA), map_location=DEVICE, weights_only=True)
    results = []
    with torch.no_grad():
        for (args, kwargs), take in zip(calls, ROWS):
            out = {function}(*args, **kwargs)
            out = out if isinstance(out, torch.Tensor) else out[0]
            for axis, indices in take:
                out = out.index_select(axis, torch.tensor(indices, device=out.device))
            results.append(out.flatten())
    first, second = results
    differing = int((bits(first) != bits(second)).sum())
    far = (first.double() - second.double()).abs().max().item()
    print(f"torch {{torch.__version__}}, {{DEVICE}}, {{THREADS}} threads: {what}")
    print(f"{{differing}} of {{first.numel()}} elements of this row differ, by at most {{far:.6g}}")
    return 0 if differing else 1


if __name__ == "__main__":
    sys.exit(main())
'''


def write_and_run(path: Path, named: NamedCall) -> str:
    """Write the script and its inputs, run it in a process of its own, and return its result. Raises UserError: the
    disk is full, or the path can't be written."""
    a, b = named.calls
    function = _callable_name(b.function)
    if function is None:
        return f"no script: {named.culprit.call} has no name in torch"
    if "[" in named.culprit.call:
        return f"no script: not torch but another package makes the operands of {named.culprit.call}"
    columns = list(b.visible) if b.keys else None
    if any(r.name == "rows only" and r.status == "divergent" for r in named.culprit.replays):
        calls = [b.arguments(), b.arguments([b.row], columns)]
        rows = [_taken(b, b.row, None), _taken(b, 0, columns)]
        what = f"this row in a call of {b.rows} rows, compared with the row solo"
    else:
        calls, rows = [a.arguments(), b.arguments()], [_taken(a, a.row, None), _taken(b, b.row, None)]
        what = f"this row in a call of {a.rows} rows, compared with the same row in a call of {b.rows} rows"
    data = inputs_path(path)
    text = _SCRIPT.format(
        title=one_line(named.culprit.sentence, 400).replace('"""', "'''").replace("\\", "/"),
        data=data.name,
        threads=torch.get_num_threads(),
        device=next(iter(b.tensors().values())).device.type,
        rows=rows,
        function=function,
        what=what,
    )
    plain: dict[int, torch.Tensor] = {}  # each once, without what a parameter is besides its numbers
    content = changed_tensors(calls, lambda _, t: plain.setdefault(id(t), t.detach().cpu().as_subclass(torch.Tensor)))
    held = io.BytesIO()
    torch.save(content, held)
    with replacing(data) as scratch:
        scratch.write_bytes(held.getbuffer())  # torch raises its own kind of error on a full disk
    replace_text(path, text)
    return f"python -P {shlex.quote(str(path))}: {_run(path)}"


def inputs_path(script: Path) -> Path:
    """model.py -> model.inputs.pt: never the name of a model's own weights."""
    return script.with_suffix(".inputs.pt")


def _run(path: Path) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - our own script, with this interpreter
            [sys.executable, "-P", str(path.absolute())], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not verified: it ran for {_SECONDS} s"
    lines = (done.stdout or done.stderr).strip().splitlines()
    last = one_line(lines[-1], 200) if lines else "it printed nothing"
    if done.returncode == 0:
        return f"run by itself, it shows the difference: {last}"
    return f"run by itself, it does NOT show the difference (exit {done.returncode}): {last}"


def _callable_name(function: Callable[..., Any]) -> str | None:
    """As "torch.nn.functional.linear", if that leads to the function again."""
    name = resolve_name(function) or ""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    if name.startswith("torch.") and found is not None and (found is function or found == function):
        return name
    return None


def _taken(call: RecordedCall, row: int, columns: list[int] | None) -> Selection:
    """This request's part of the result; a single row is the whole result, whatever the layout of its heads."""
    axes = call.roles.get("out", call.roles.get("out.0", ()))
    return [
        (axis, indices)
        for axis, indices in call.result_selection(row, columns)
        if call.rows > 1 or axes[axis] != call.axis
    ]
