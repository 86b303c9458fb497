"""The text of a failed assertion: which M, which class, where, how far, by which kernels, and the next command."""

from __future__ import annotations

import os
import shlex
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nondet.core.compare import difference, same
from nondet.core.records import Difference, Row, Run
from nondet.errors import no_commands, one_line
from nondet.probes.functions import name_of
from nondet.reports.classes import axis_name, classes, letter
from nondet.reports.text import apart_text, probe_of_mine, shape_text
from nondet.verdict.findings import plural
from nondet.verdict.gate import judge
from nondet.verdict.wording import Reason, reason, words

__all__ = ["no_answer_text", "run_text", "same_bits_text"]

_ROWS_SHOWN = 2  # cases shown in full; the others in one line each
_LINES_MOST = 6
_FORMATS = {"float32": ("<f", 4), "float16": ("<e", 2), "float64": ("<d", 8)}


def run_text(run: Run, fn: Callable[..., Any] | None = None) -> str:
    """A run with a divergence or a wrong result, for the author of the function."""
    lines = [_line("", f"{verdict.impl}: {verdict.text}") for verdict in judge(run) if verdict.is_fault]
    faulty = sorted((row for row in run.rows if row.wrong or row.parted or row.replays_parted), key=_weight)
    shown = list({(_order(row), row.varied): row for row in reversed(faulty)}.values())[::-1][:_ROWS_SHOWN]
    for row in shown:
        lines += ["", *_row_lines(row)]
    others = [row for row in faulty if row not in shown]
    if others:
        lines += ["", f"and in {plural(len(others), 'more case')}:"]
        lines += _at_most([_line("  ", f"{row.case} ({row.dtype}): {_kind(row)}") for row in others])
    if faulty and fn is not None and faulty[0].probe != "check":
        lines += ["", *_next_lines(faulty[0], fn)]
    return "\n".join(lines)


def no_answer_text(run: Run, why: Sequence[Reason]) -> str:
    """A run in which something failed, or nothing was compared."""
    failed = [row for row in run.rows if row.reason]
    reasons = dict.fromkeys(_line("  ", f"{one_line(row.case, 120)}: {row.reason}") for row in failed)
    return "\n".join([words(reason("invariance", why=tuple(why))), *_at_most([*reasons])])


def _at_most(lines: list[str], what: str = "more", indent: str = "  ") -> list[str]:
    """The first lines, and how many more there are."""
    left = len(lines) - _LINES_MOST
    return [*lines[:_LINES_MOST], f"{indent}... {left} {what}"] if left > 0 else lines


def _line(indent: str, text: str) -> str:
    """One line of text that may hold any character, indented: pytest shows it in a CI's log."""
    return indent + no_commands(one_line(text, 400))


def _order(row: Row) -> int:
    """Wrong results first, then noise, then batch dependence: what explains most comes first."""
    return 0 if row.wrong else 1 if row.replays_parted or row.varied == "run" else 2


def _weight(row: Row) -> tuple[int, int, int]:
    """Sweeps over sizes before other questions, and the finest sweep first."""
    return _order(row), int(row.varied != "batch_size"), -len(row.values)


def _kind(row: Row) -> str:
    if row.wrong:
        return f"wrong: {one_line(row.reason, 200)}" if row.reason else "wrong"
    if row.replays_parted or row.varied == "run":
        return "differs from run to run"
    return f"{plural(row.distinct, 'class', 'classes')} of bits over {row.varied.replace('_', ' ')}"


def _row_lines(row: Row) -> list[str]:
    lines = [_line("", f"{row.operator} {row.dtype} on {row.device}, {shape_text(row.shape)}: {row.case}")]
    if row.wrong:
        lines.append(f"  wrong: {one_line(row.reason, 300) or 'it missed an answer that is exact in every order'}")
        if row.worst_error is not None:
            lines.append(f"  error against float64, ||out - ref|| / ||ref||: {_figure(row.worst_error.relative_norm)}")
    if row.distinct > 1:
        lines += _class_lines(row)
    if row.difference is not None and row.difference.mismatched:
        lines += _difference_lines(row, row.difference)
    if row.replays_parted:
        lines.append(
            f"  run to run: {row.replays_parted} of {plural(row.replays, 'repeated call')} differed: "
            "the batch can't be named as the cause until that is fixed"
        )
    elif row.replays:
        lines.append(f"  run to run: {plural(row.replays, 'call')} repeated, each bit-identical")
    ran = list(dict.fromkeys(row.ran))
    if ran:
        lines.append(_line("  ", f"ran: {', '.join(ran[:8])}{' ...' if len(ran) > 8 else ''}"))
    else:
        lines.append("  ran: kernels unknown (a CPU is not profiled, and the function noted none)")
    return lines


def _class_lines(row: Row) -> list[str]:
    lines = []
    axis = axis_name(row)
    for info in classes(row, 8):
        where = f": {axis} {info.ranges}" if info.ranges else ""
        kernels = "; ".join(" + ".join(names) for _, names in info.kernels)
        lines.append(_line("  ", f"class {info.letter}, {info.count} of {row.trials}{where} {kernels}"))
    lines = _at_most(lines, "more classes")
    pairs = zip(row.labels, row.labels[1:], row.values, row.values[1:], strict=False)
    boundaries = [f"{before}|{after}" for a, b, before, after in pairs if a != b]
    if boundaries and row.varied != "run":
        more = f" and {len(boundaries) - 8} more" if len(boundaries) > 8 else ""
        lines.append(_line("  ", f"boundaries at {axis} {', '.join(boundaries[:8])}{more}"))
    return lines


def _difference_lines(row: Row, d: Difference) -> list[str]:
    lines = []
    label = d.label if isinstance(d.label, int) else 1
    at = next((value for value, other in zip(row.values, row.labels, strict=True) if other == label), None)
    base, other = (f"{axis_name(row)}={value}" if value is not None else "" for value in (_first(row), at))
    if d.first_mismatch is not None and isinstance(d.first_bits, list):
        position = _position(d.first_mismatch)
        first, second = (_element(word, row.dtype) for word in d.first_bits)
        lines.append(
            _line("  ", f"first mismatch in {position}: {first} at {base or 'A'}, {second} at {other or letter(label)}")
        )
    lines.append(f"  {letter(label)} compared with A: {apart_text(d)} ({row.dtype})")
    return lines


def _position(index: Sequence[int]) -> str:
    """The position in the compared rows, which are the first axis."""
    if len(index) == 2:
        return f"row {index[0]}, column {index[1]}"
    return f"element {list(index)}"


def _first(row: Row) -> Any:
    return row.values[0] if row.values else None


def _figure(x: float | None) -> str:
    return "not finite" if x is None else f"{x:.3g}"


def _element(word: str, dtype: str) -> str:
    """ "1.0 (0x3f800000)" """
    raw = bytes.fromhex(word.removeprefix("0x"))[::-1]
    if dtype == "bfloat16":
        raw, dtype = b"\0\0" + raw, "float32"
    layout = _FORMATS.get(dtype)
    if layout is None or len(raw) != layout[1]:
        return word
    return f"{struct.unpack(layout[0], raw)[0]!r} ({word})"


def _next_lines(row: Row, fn: Callable[..., Any]) -> list[str]:
    target, lead = name_of(fn), ""
    module = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    if "<" in target or "." in target.partition(":")[2] or target.startswith("__main__"):
        lead, target = "with the function at the top of a module, ", "package.module:function"
    command = shlex.join(probe_of_mine(row, target))
    if not lead and module is not None:
        folder = Path(module).resolve().parents[target.partition(":")[0].count(".")]
        if folder != Path.cwd():
            command = f"cd {shlex.quote(os.path.relpath(folder))} && {command}"
    return [f"for all of it, {lead}run:" if lead else "for all of it run:", "  " + one_line(command, 600)]


# ---- two results


def same_bits_text(a: Any, b: Any, names: tuple[str, str]) -> str:
    """Why two results are not the same bits; "" where they are."""
    differing: list[str] = []
    _compare(a, b, names, "", differing)
    return "\n".join(_at_most(differing, indent=""))


def _compare(a: Any, b: Any, names: tuple[str, str], where: str, differing: list[str]) -> None:
    at = f"{where}: " if where else ""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            differing.append(one_line(f"{at}keys differ: {sorted(map(str, a))} against {sorted(map(str, b))}", 400))
            return
        for key in a:
            _compare(a[key], b[key], names, f"{where}[{key!r}]", differing)
        return
    if isinstance(a, tuple | list) and isinstance(b, tuple | list) and not _numbers(a) and not _numbers(b):
        if len(a) != len(b):
            differing.append(f"{at}{len(a)} results and {len(b)}")
            return
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            _compare(x, y, names, f"{where}[{index}]", differing)
        return
    x, y = _tensor(a), _tensor(b)
    if x is None or y is None:
        kinds = f"{type(a).__name__} and {type(b).__name__}"
        differing.append(f"{at}nothing to compare bit by bit: {kinds}; give tensors, arrays, numbers, or nests of them")
        return
    if x.shape != y.shape or x.dtype != y.dtype:
        differing.append(f"{at}{names[0]} is {tuple(x.shape)} {x.dtype}, {names[1]} is {tuple(y.shape)} {y.dtype}")
        return
    if not bool(same(x, y).all()):
        differing.append(at + _two(x, y, names))


def _numbers(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, int | float | complex) for value in values)


def _tensor(value: Any) -> torch.Tensor | None:
    """On the CPU: only bits are compared, and they survive a copy."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    try:
        import numpy as np

        if isinstance(value, np.ndarray | np.generic):
            return torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, int | float | complex):
            return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        wide = torch.float64 if _numbers(value) and any(isinstance(x, float) for x in value) else None
        return torch.tensor(value, dtype=wide) if _numbers(value) else None
    except TypeError:
        return None


def _two(x: torch.Tensor, y: torch.Tensor, names: tuple[str, str]) -> str:
    d = difference(x, y)
    dtype = str(x.dtype).removeprefix("torch.")
    lines = [f"{names[0]} and {names[1]} are not the same bits: {dtype} {list(x.shape)}, {apart_text(d)}"]
    if isinstance(d.first_bits, list):
        first, second = (_element(word, dtype) for word in d.first_bits)
        lines.append(f"  first mismatch at {d.first_mismatch}: {names[0]} {first}, {names[1]} {second}")
    if d.max_ulp == 0 and not d.nonfinite and x.dtype.is_floating_point:
        lines.append("  they differ only in the sign of zeros: 0.0 and -0.0 are equal numbers and different bits")
    return "\n".join(lines)
