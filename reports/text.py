"""Numbers, shapes, tokens and the environment as text, the same in every report; and untrusted text in markdown."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from nondet.core.records import Axis, Difference, Header, Role, Row
from nondet.core.statistics import one_sided_bound, percent, percent_range, wilson
from nondet.errors import one_line, printable
from nondet.verdict.findings import Finding, Verdict, plural
from nondet.verdict.rows import axis_of
from nondet.verdict.wording import phrase


def number(x: float | None) -> str:
    """Four significant digits; exact where it is a small whole number; a dash where there is no finite figure."""
    if x is None:
        return "not finite"
    if float(x).is_integer() and abs(x) < 1e6:
        return str(int(x))
    return f"{x:.4g}"


def counted(n: int) -> str:
    """Thousands apart; as powers of ten where digits mean nothing."""
    return f"{n:,}" if abs(n) < 10**9 else f"{n:.2e}"


def ulp_text(ulp: int) -> str:
    """ "3 ULP"; a larger distance than 10**7 is not counted, because it means nothing."""
    return f"{counted(ulp)} ULP" if ulp <= 10**7 else f"over {10**7:,} ULP, as where an element crosses zero"


def share_text(d: Difference) -> str:
    """ "0.9% of 4,096 elements"."""
    if not d.compared:
        return "no elements"
    if d.mismatched == d.compared:
        return f"all {counted(d.compared)} elements" if d.compared > 1 else "its one element"
    share = d.mismatched / d.compared
    return f"{f'{share:.1%}' if share >= 0.001 else counted(d.mismatched)} of {plural(d.compared, 'element')}"


def apart_text(d: Difference) -> str:
    """How far results are apart: the share of elements, the largest difference, ULP."""
    largest = f"{number(d.max_abs / d.scale)} of the row's scale" if d.scale else f"{number(d.max_abs)} (max abs)"
    text = f"{share_text(d)} differ, by up to {largest}, {ulp_text(d.max_ulp)}"
    return text + (f"; {counted(d.nonfinite)} not finite" if d.nonfinite else "")


def shape_text(shape: dict[str, int]) -> str:
    """ "M=256 N=4096 K=1024"."""
    return " ".join(f"{one_line(str(k), 20)}={v}" for k, v in shape.items())


def error_span(row: Row) -> str:
    """The first variant's relative error in the norm and, where it differs, the worst class's; else a dash."""
    both = (row.error, row.worst_error) if row.error else ()
    return " … ".join(dict.fromkeys(number(e.relative_norm) for e in both if e)) or "–"


def token(text: str, token_id: int | None = None) -> str:
    """One token's text, quoted, with line ends and tabs made visible: spaces at its ends matter."""
    if token_id is not None and piece(text, token_id) != text:
        return piece(text, token_id)
    shown = printable(text).replace("\n", "⏎").replace("\t", "⇥")
    return f"“{shown}”"


def piece(text: str, token_id: int) -> str:
    """A token's text; by its id where it has none of its own, so that two of them stay distinct."""
    if text.strip("\ufffd"):
        return text
    return f"<token {token_id}>" if token_id >= 0 else "(the end)"


def environment_line(environment: dict[str, Any]) -> str:
    """The machine in one line: the GPU or else the CPU, and what computes."""
    gpu, threads = environment.get("gpu"), environment.get("num_threads")
    parts = [gpu or environment.get("cpu")]
    if gpu is None and threads:
        parts.append(f"{threads} thread{'' if threads == 1 else 's'}")
    for key in ("torch", "triton", "transformers", "driver", "commit"):
        parts.append(environment.get(key) and f"{key.replace('triton', 'Triton')} {environment[key]}")
    return one_line(" · ".join(str(part) for part in parts if part), 400)


def environment_rows(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Every entry as (label, text), in the header's order."""
    rows = []
    for key, value in environment.items():
        memory = key == "gpu_memory_bytes" and isinstance(value, int)
        text = f"{value / 2**30:.1f} GiB" if memory else one_line(_plain(value), 2000)
        rows.append((one_line(key.replace("_", " "), 80), text))
    return rows


def _plain(value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k}={_plain(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ("; " if any(isinstance(v, dict) for v in value) else " ").join(map(_plain, value))
    return str(value)


# Options of a run that a command about the same model, or server, takes over, as they were typed.
MACHINE = ("--device", "--threads")
_DRAW = ("--max-tokens", "--temperature", "--top-k", "--top-p", "--seeds")
MODEL = ("--engine", "--model", "--prompt", "--prompt-file", "--dtype", "--trust-remote-code", *MACHINE)
SAMPLE = (*MODEL, "--prompts", "--column", "--ranks", *_DRAW)
_HTTP = ("--endpoint", "--protocol", "--key-env", "--ca-file", "--allow-plain-http", "--insecure", "--no-stream")
SERVER = (*_HTTP, "--model", "--prompt", "--prompt-file", "--prompts", *_DRAW)
_FLAGS = ("--trust-remote-code", "--cuda-graphs", "--no-cuda-graphs", "--allow-plain-http", "--insecure", "--no-stream")


def typed_words(header: Header) -> list[str]:
    """The run's command line after the program's name; none where the run file, which may be edited, has none."""
    argv = header.environment.get("argv")
    return [str(word) for word in argv][1:] if isinstance(argv, list) else []


def own_options(header: Header, names: Collection[str]) -> list[str]:
    """The options of these names from the run's own command line, with their values."""
    typed = iter(typed_words(header))
    kept = []
    for word in typed if next(typed, "") == header.command else ():  # else a script's own
        name, equals, _ = word.partition("=")
        if name in names:
            kept += [word] if equals or name in _FLAGS else [word, next(typed, "")]
    return kept


def repeated(header: Header, *words: str, names: Collection[str] = ()) -> str:
    """A command with the options of these names from the run's own command line."""
    return shlex.join(["nondet", *words, *own_options(header, names)])


def sizes(row: Row) -> list[tuple[str, int]]:
    """Options of `nondet probe` that give this row's sizes: (name, value); attention's come from a model."""
    if row.operator == "attention":
        return []
    first = "ranks" if row.operator == "all_reduce" else "k"
    sizes = [(first, row.shape.get("K", row.shape.get("ranks"))), ("n", row.shape.get("N")), ("m", row.shape.get("M"))]
    if "K" not in row.shape and len(row.shape) == 2:  # an operator over rows, whose axis has a name of its own
        sizes[0] = ("k", next(size for name, size in row.shape.items() if name != "M"))
    return [(flag, size) for flag, size in sizes if size]


def probe_of_mine(row: Row, target: str) -> list[str]:
    """The probe that tests a function as an operator, and repeats the test of a row."""
    words = ["nondet", "probe", row.probe, "--impl", f"{row.operator}={target}", "--dtype", row.dtype]
    if row.inputs == "linspace":  # a probe's one case, at its own sizes
        return words
    words += [word for flag, size in sizes(row) for word in (f"--{flag}", str(size))]
    return words if row.inputs == "ones" else [*words, "--inputs", row.inputs]  # --inputs has no such word


def findings_text(
    verdicts: Sequence[Verdict], most: int = 5, said: Callable[[Verdict], str] = lambda v: phrase(v.clauses, brief=True)
) -> str:
    """Each implementation with its finding; of more than `most` stock, invariant and those that are not clean, if they
    are no more than that. The others are counted."""
    main = [v for v in verdicts if v.role in (Role.STOCK, Role.INVARIANT)]
    found = [v for v in verdicts if v not in main and v.finding != Finding.CLEAN]
    kept = [*main, *found] if len(main) + len(found) <= most else main
    named = [v for v in verdicts if v in kept] if len(verdicts) > most else verdicts
    rest = Counter(v.finding for v in verdicts if named and v not in named)
    parts = [f"{v.impl}: {said(v) or v.text}" for v in named or verdicts]
    return "; ".join([*parts, *(f"{plural(n, 'other')}: {finding}" for finding, n in rest.items())])


def verdict_data(v: Verdict) -> dict[str, Any]:
    """A verdict as JSON has it."""
    return {"impl": v.impl, "prompt": v.prompt, "findings": list(v.findings), "text": v.text, "notes": v.notes}


def run_rate(row: Row) -> str:
    """How often repeated calls gave other bits than the most common, with the interval; empty for a sweep. A sweep's
    counts are exact for the variants that it tried; repeated calls are a sample."""
    if axis_of(row) != Axis.RUN or row.trials < 2 or not row.class_sizes:
        return ""
    others = row.trials - max(row.class_sizes)
    if others:
        share, bound = f"{counted(others)} of {counted(row.trials)}", percent_range(*wilson(others, row.trials))
    else:
        share, bound = f"0 of {counted(row.trials)}", f"below {percent(one_sided_bound(row.trials - 1), 'up')}"
    return f"other bits in {share} ({bound} if calls are independent)"


def sentence(text: str) -> str:
    """A phrase with a full stop."""
    return text if text.endswith((".", "…", "?")) else f"{text}."


def extras(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The probe's own figures, as (implementations, figures): implementations with the same are grouped."""
    impls_of: dict[str, list[str]] = {}
    for r in rows:
        kept = {k.replace("parted", "differ"): v for k, v in r.extra.items() if isinstance(v, int | float | str | list)}
        if kept:
            text = ", ".join(f"{k.replace('_', ' ')} {one_line(_plain(v), 120)}" for k, v in kept.items())
            impls_of.setdefault(one_line(text, 600), []).append(r.impl)
    return [(", ".join(impls), text) for text, impls in impls_of.items()]


# Not here: characters with no meaning in markdown, or one only at the start of a line, where escaped text never is.
_HARMFUL = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[^A-Za-z0-9\s.,:;()=+%/_'?-]")
_WORD_JOINER = "&#8288;"


def escape(text: str, limit: int = 2000) -> str:
    """Text on one line in which nothing is markup, link or mention. GitHub finds mentions and references in the
    rendered text, where a character reference is the character itself: a word joiner after @ and # prevents that."""

    def reference(match: re.Match[str]) -> str:
        char = match.group()
        if not char.isascii():
            return char
        return f"&#{ord(char)};" + (_WORD_JOINER if char in "@#" else "")

    plain = _HARMFUL.sub(reference, one_line(text, limit))
    return re.sub(r"(?i)(www)\.", r"\1&#46;", plain.replace(":/", "&#58;/"))


def code(text: str, limit: int = 400, *, cell: bool = True) -> str:
    """A code span on one line. In a table cell a pipe must be escaped even inside it."""
    flat = one_line(text, limit) or " "
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", flat)), default=0))
    pad = " " if flat.startswith(("`", " ")) or flat.endswith(("`", " ")) else ""
    span = f"{ticks}{pad}{flat}{pad}{ticks}"
    return span.replace("|", "\\|") if cell else span


def fence(text: str) -> str:
    """A fenced block that nothing in the text can end."""
    shown = printable(text)
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", shown)), default=0))
    return f"{ticks}text\n{shown}\n{ticks}"
