"""All prompts of a run together, as text: the same figures in every report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nondet.core.records import Role, role_of
from nondet.core.statistics import SurvivalStep, percent, percent_range
from nondet.errors import one_line
from nondet.reports import figures
from nondet.sampling.analysis import TOO_FEW, Comparison, Overall, compared
from nondet.verdict.findings import plural

__all__ = ["comparison_lines", "line_of", "overall_table", "prompt_table"]

_POINTS = 5
_TEXT = 60


def line_of(o: Overall) -> str:
    """One implementation in a line."""
    return (
        f"{o.impl}: of {plural(o.prompts, o.unit)}, traces part on {o.parted_traces:,}, texts on "
        f"{o.parted_tokens:,}; {plural(o.n, 'completion')} in {plural(o.rounds, 'round')}"
    )


def overall_table(parts: Sequence[Overall]) -> list[tuple[str, list[str]]]:
    """Measures down, implementations across."""

    def measure(name: str, cell: Callable[[Overall], str]) -> tuple[str, list[str]]:
        return name, [cell(o) for o in parts]

    unit = parts[0].unit if parts else "prompt"
    return [
        measure(f"{unit}s", lambda o: figures.counted(o.prompts)),
        measure("completions (failed), rounds", lambda o: f"{o.n:,} ({o.failed:,}), {o.rounds:,}"),
        measure(f"{unit}s whose logprob traces part", _traces_text),
        measure(f"{unit}s whose texts part", lambda o: f"{o.parted_tokens:,} of {o.prompts:,}"),
        measure(f"pairs that differ, mean over {unit}s", lambda o: _share(o.disagreement)),
        measure(f"chance of a new text next, mean over {unit}s", lambda o: _share(o.new)),
        measure("agree so far (Kaplan-Meier)", _curve_text),
    ]


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _traces_text(o: Overall) -> str:
    counts = f"{o.parted_traces:,} of {o.prompts:,}"
    if o.bound_completions is not None:
        rounds = "" if o.bound_rounds is None else f"below {percent(o.bound_rounds, 'up')} of rounds, "
        bound = f"below {percent(o.bound_completions, 'up')} of completions if they were independent"
        return f"{counts} (at 95%, one-sided: {rounds}{bound})"
    if o.prompts < 2:
        return counts
    return f"{counts} (95% {percent_range(o.share_low, o.share_high)} of {o.unit}s drawn like these, under such loads)"


def _curve_text(o: Overall) -> str:
    """ "100% at token 0, 88.0% (80.1% to 93.0%) from token 17"; steps evenly chosen."""
    if not o.curve:
        return "–"
    steps = list(o.curve)
    if len(steps) > _POINTS:
        steps = [steps[round(i * (len(steps) - 1) / (_POINTS - 1))] for i in range(_POINTS)]
    if len(steps) == 1:
        return "nothing parted"
    return "; ".join(_step_text(s) for s in steps[1:])


def _step_text(s: SurvivalStep) -> str:
    span = percent_range(s.low, s.high) if s.high - s.low < 1.0 else TOO_FEW
    return f"{percent(s.survival)} from token {s.time} on ({span})"


def comparison_lines(parts: Sequence[Overall]) -> list[str]:
    """Stock against invariant, where both are there: one sentence for each question."""
    first = next((o for o in parts if role_of(o.impl) == Role.STOCK), None)
    second = next((o for o in parts if role_of(o.impl) == Role.INVARIANT), None)
    if first is None or second is None:
        return []
    c = compared(first, second)
    return _comparison(c) if c.prompts > 1 else []


def _comparison(c: Comparison) -> list[str]:
    return [
        f"Texts part under {c.first} alone on {plural(c.only_first, c.unit)}, under {c.second} alone on "
        f"{c.only_second:,}, of {c.prompts:,} (McNemar, exact: p = {_p(c.mcnemar)}).",
        f"Shares of pairs that differ, {c.unit} by {c.unit}: p = {_p(c.permutation)} (sign-flip permutation).",
        f"When completions first part, each {c.unit} by itself: {c.log_rank.observed:,} under {c.first}, "
        f"{c.log_rank.expected:.1f} expected if both parted alike (log-rank by round: p = "
        f"{_p(c.log_rank.p)}).",
    ]


def _p(p: float) -> str:
    return "1" if p >= 1.0 else f"{p:.2g}" if p >= 1e-300 else "below 1e-300"


def prompt_table(parts: Sequence[Overall], most: int) -> tuple[tuple[str, ...], list[tuple[str, ...]], int]:
    """(head, one row for each prompt, how many are left out): those that part most come first, then by number."""
    prompts = sorted({p for o in parts for p in o.summaries}, key=lambda p: _weight(parts, p))
    rows = []
    for p in prompts[:most]:
        texts = [o.summaries[p].prompt_text for o in parts if p in o.summaries]
        cells = [_cell(o, p) for o in parts]
        rows.append((str(p + 1), one_line(texts[0], _TEXT), *cells))
    head = ("", "prompt", *(f"{o.impl}: texts / traces, first parting" for o in parts))
    return head, rows, max(0, len(prompts) - most)


def _weight(parts: Sequence[Overall], prompt: int) -> tuple[int, int, int]:
    mine = [o.summaries[prompt] for o in parts if prompt in o.summaries]
    return (-max(s.distinct_completions for s in mine), -max(s.distinct_traces for s in mine), prompt)


def _cell(o: Overall, prompt: int) -> str:
    s = o.summaries.get(prompt)
    if s is None:
        return "–"
    where = f", token {s.first_fork.index}" if s.first_fork else ""
    return f"{s.distinct_completions:,} / {s.distinct_traces:,} of {s.n:,}{where}"
