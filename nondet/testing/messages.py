"""The text of a failed assertion: which M, which class, where, how far, by which kernels, and the next command."""

from __future__ import annotations

import os
import shlex
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nondet.core.compare import difference, same
from nondet.core.records import Difference, Row, Run
from nondet.errors import no_commands, one_line
from nondet.probes.functions import name_of
from nondet.reports.classes import letter, map_text
from nondet.reports.text import apart_text, error_span, probe_of_mine, shape_text
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
    faulty = sorted((row for row in run.rows if row.wrong or row.differs or row.replays_parted), key=_weight)
    shown = list({(_weight(row)[0], row.varied): row for row in reversed(faulty)}.values())[::-1][:_ROWS_SHOWN]
    for row in shown:
        lines += ["", *_row_lines(row)]
    others = [row for row in faulty if row not in shown]
    if others:
        lines += ["", f"and in {plural(len(others), 'more case')}:"]
        lines += _at_most([_line("  ", f"{row.case} ({row.dtype}): {row.status}") for row in others])
    if faulty and fn is not None and faulty[0].probe != "check":
        lines += ["", *_next_lines(faulty[0], fn)]
    return "\n".join(lines)


def no_answer_text(run: Run, why: Sequence[Reason]) -> str:
    """A run in which something failed, or nothing was compared."""
    failed = [row for row in run.rows if row.reason]
    reasons = dict.fromkeys(_line("  ", f"{one_line(row.case, 120)}: {row.reason}") for row in failed)
    return "\n".join([words(reason("invariance", why=tuple(why))), *_at_most([*reasons])])


def _at_most(lines: list[str], indent: str = "  ") -> list[str]:
    """The first lines, and how many more there are."""
    left = len(lines) - _LINES_MOST
    return [*lines[:_LINES_MOST], f"{indent}... {left} more"] if left > 0 else lines


def _line(indent: str, text: str) -> str:
    """One line of text that may hold any character, indented: pytest shows it in a CI's log."""
    return indent + no_commands(one_line(text, 400))


def _weight(row: Row) -> tuple[int, int, int]:
    """What explains most comes first: wrong results, noise, others' data, batch dependence; the finest sweep first."""
    order = (
        0 if row.wrong else 1 if row.replays_parted or row.varied == "run" else 2 + (row.varied != "neighbour_values")
    )
    return order, int(row.varied != "batch_size"), -len(row.values)


def _row_lines(row: Row) -> list[str]:
    lines = [_line("", f"{row.operator} {row.dtype} on {row.device}, {shape_text(row.shape)}: {row.case}")]
    if row.wrong:
        lines.append(f"  wrong: {one_line(row.reason, 300) or 'it missed an answer that is exact in every order'}")
        if row.worst_error is not None:
            lines.append(f"  error against float64, ||out - ref|| / ||ref||: {error_span(row)}")
    if row.distinct > 1:
        lines.append(_line("  ", f"classes of equal bits: {map_text(row)}"))
    if row.difference is not None and row.difference.mismatched:
        label = row.difference.label if isinstance(row.difference.label, int) else 1
        lines += [f"  {line}" for line in _difference_lines(row.difference, row.dtype, ("A", letter(label)))]
    if row.replays_parted:
        lines.append(
            f"  run to run: {row.replays_parted} of {plural(row.replays, 'repeated call')} differed: "
            "the batch can't be named as the cause until that is fixed"
        )
    elif row.replays:
        lines.append(f"  run to run: {plural(row.replays, 'call')} repeated, each bit-identical")
    ran = list(dict.fromkeys(row.ran)) or ["kernels unknown (a CPU is not profiled, and the function noted none)"]
    lines.append(_line("  ", f"ran: {', '.join(ran[:8])}{' ...' if len(ran) > 8 else ''}"))
    return lines


def _difference_lines(d: Difference, dtype: str, names: tuple[str, str]) -> list[str]:
    """How far two results are apart, and both values at the first element that differs."""
    lines = [f"{names[1]} compared with {names[0]}: {apart_text(d)} ({dtype})"]
    if isinstance(d.first_bits, list):
        first, second = (_element(word, dtype) for word in d.first_bits)
        lines.append(f"first mismatch at {d.first_mismatch}: {names[0]} {first}, {names[1]} {second}")
    return lines


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
        lead, target = " with the function at the top of a module", "package.module:function"
    command = shlex.join(probe_of_mine(row, target))
    if not lead and module is not None:
        folder = Path(module).resolve().parents[target.partition(":")[0].count(".")]
        if folder != Path.cwd():
            command = f"cd {shlex.quote(os.path.relpath(folder))} && {command}"
    return [f"to repeat this case{lead}:", "  " + one_line(command, 600)]


def same_bits_text(a: Any, b: Any, names: tuple[str, str]) -> str:
    """Why two results are not the same bits; "" where they are."""
    differing: list[str] = []
    _compare(a, b, names, "", differing)
    return "\n".join(_at_most(differing, indent=""))


def _compare(a: Any, b: Any, names: tuple[str, str], where: str, differing: list[str]) -> None:
    at = f"{where}: " if where else ""
    mine, theirs = _parts(a), _parts(b)
    if mine is not None and theirs is not None and isinstance(a, Mapping) == isinstance(b, Mapping):
        if mine.keys() != theirs.keys():
            differing.append(one_line(f"{at}{names[0]} has the parts {[*mine]}, {names[1]} has {[*theirs]}", 400))
            return
        for key, part in mine.items():
            _compare(part, theirs[key], names, f"{where}[{key!r}]", differing)
        return
    x, y = _tensor(a), _tensor(b)
    if x is None or y is None:
        kinds = f"{type(a).__name__} and {type(b).__name__}"
        differing.append(f"{at}nothing to compare bit by bit: {kinds}; give tensors, arrays, numbers, or nests of them")
    elif x.shape != y.shape or x.dtype != y.dtype:
        differing.append(f"{at}{names[0]} is {tuple(x.shape)} {x.dtype}, {names[1]} is {tuple(y.shape)} {y.dtype}")
    elif not bool(same(x, y).all()):
        d, dtype = difference(x, y), str(x.dtype).removeprefix("torch.")
        lines = [f"{at}not the same bits in {list(x.shape)}: ", *_difference_lines(d, dtype, names)]
        if d.max_ulp == 0 and not d.nonfinite and x.dtype.is_floating_point:
            lines.append("they differ only in the sign of zeros: 0.0 and -0.0 are equal numbers and different bits")
        differing.append(lines[0] + "\n  ".join(lines[1:]))


def _parts(value: Any) -> dict[Any, Any] | None:
    """The parts of a mapping or a sequence; None for a tensor, a number, or a list of numbers."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, tuple | list) or (value and all(isinstance(x, int | float | complex) for x in value)):
        return None
    return dict(enumerate(value))


def _tensor(value: Any) -> torch.Tensor | None:
    """On the CPU: only bits are compared, and they survive a copy. None for what holds no numbers."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError):
        return None
