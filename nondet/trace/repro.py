"""A standalone script of the responsible call: only torch, inputs in a safetensors file, run once to verify it.

Where this request's row by itself and among the others differ, the script needs only the second arm's inputs, and makes
the call on all rows and on the one. Otherwise it holds both arms' inputs, and makes both arms' calls.
"""

from __future__ import annotations

import pprint
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

import json
from pathlib import Path

import torch

DATA = {data!r}
THREADS = {threads}  # CPU threads change bits
DEVICE = {device!r}
CALLS = {calls}
ROWS = {rows}


def tensors(path):
    """A safetensors file: the header's length, the header as JSON, the bytes."""
    dtypes = {{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
              "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8}}
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + size]))
    header.pop("__metadata__", None)
    out = {{}}
    for name, entry in header.items():
        begin, end = (8 + size + x for x in entry["data_offsets"])
        raw = torch.frombuffer(data[begin:end], dtype=torch.uint8) if end > begin else torch.empty(0, dtype=torch.uint8)
        out[name] = raw.clone().view(dtypes[entry["dtype"]]).reshape(entry["shape"]).to(DEVICE)
    return out


def build(value, held):
    """Arguments as they were written down: {{"tensor": name, "take": [[axis, indices], ...]}} stands for a tensor."""
    if isinstance(value, dict) and "tensor" in value:
        out = held[value["tensor"]]
        for axis, indices in value["take"]:
            out = out.index_select(axis, torch.tensor(indices, device=out.device))
        return out
    if isinstance(value, dict) and "dtype" in value:
        return getattr(torch, value["dtype"])
    if isinstance(value, list):
        return [build(v, held) for v in value]
    if isinstance(value, tuple):
        return tuple(build(v, held) for v in value)
    if isinstance(value, dict):
        return {{k: build(v, held) for k, v in value.items()}}
    return value


def bits(x):
    return x.contiguous().view({{1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}}[x.element_size()])


def main():
    torch.set_num_threads(THREADS)
    held = tensors(Path(__file__).with_name(DATA))
    results = []
    with torch.no_grad():
        for (args, kwargs), take in zip(CALLS, ROWS):
            out = {function}(*build(args, held), **build(kwargs, held))
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
    from safetensors.torch import save

    function = _callable_name(named.calls[1].function)
    if function is None:
        return f"no script: {named.culprit.call} has no name in torch"
    if "[" in named.culprit.call:
        return f"no script: not torch but another package makes the operands of {named.culprit.call}"
    rows_only = next((r for r in named.culprit.replays if r.name == "rows only"), None)
    by_shape = rows_only is not None and rows_only.status == "divergent"
    held: dict[str, torch.Tensor] = {}
    a, b = named.calls
    if by_shape:
        columns = list(b.visible) if b.keys else None
        calls = [_written(b, held, "b", None, None), _written(b, held, "b", [b.row], columns)]
        rows = [_taken(b, b.row, None), _taken(b, 0, columns)]
        what = f"this row in a call of {b.rows} rows, compared with the row solo"
    else:
        calls = [_written(a, held, "a", None, None), _written(b, held, "b", None, None)]
        rows = [_taken(a, a.row, None), _taken(b, b.row, None)]
        what = f"this row in a call of {a.rows} rows, compared with the same row in a call of {b.rows} rows"
    data = inputs_path(path)
    text = _SCRIPT.format(
        title=one_line(named.culprit.sentence, 400).replace('"""', "'''").replace("\\", "/"),
        data=data.name,
        threads=torch.get_num_threads(),
        device=next(iter(held.values())).device.type,
        calls=pprint.pformat(calls, width=110, compact=True),
        rows=pprint.pformat(rows, width=110, compact=True),
        function=function,
        what=what,
    )
    with replacing(data) as scratch:
        # not save_file, which raises its own kind of error on a full disk
        scratch.write_bytes(save({k: v.detach().cpu().contiguous() for k, v in held.items()}))
    replace_text(path, text)
    return f"python -P {shlex.quote(str(path))}: {_run(path)}"


def inputs_path(script: Path) -> Path:
    """model.py -> model.inputs.safetensors: never the name of a model's own weights."""
    return script.with_suffix(".inputs.safetensors")


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


def _written(
    call: RecordedCall, held: dict[str, torch.Tensor], arm: str, rows: list[int] | None, columns: list[int] | None
) -> tuple[Any, Any]:
    """The call's arguments as data: tensors by name, with the selection of each."""
    paths = {id(t): p for p, t in call.tensors().items()}

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            path = paths[id(value)]
            held[f"{arm}.{path}"] = value
            return {"tensor": f"{arm}.{path}", "take": call.selection(path, rows, columns)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, list | tuple):
            return type(value)(plain(v) for v in value)
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return value

    return plain(call.args), plain(call.kwargs)


def _taken(call: RecordedCall, row: int, columns: list[int] | None) -> Selection:
    """This request's part of the result; a single row is the whole result, whatever the layout of its heads."""
    axes = call.roles.get("out", call.roles.get("out.0", ()))
    return [
        (axis, indices)
        for axis, indices in call.result_selection(row, columns)
        if call.rows > 1 or axes[axis] != call.axis
    ]
