"""Figures to publish, by matplotlib: class maps, speed over M, jigsaw, survival, training, tree. PNG, SVG or PDF.

Colours are those of Okabe and Ito, which colour-blind readers tell apart; lines differ in style as well. The font is
named (DejaVu Sans, which matplotlib brings), text stays text in SVG, and the machine stands under every figure. The
same run file gives the same picture: no dates, no random identifiers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nondet.bench.summary import Section, is_stock, sections
from nondet.core.records import Row, Run
from nondet.errors import UnknownNameError, UserError, one_line
from nondet.reports.classes import ProductMap, axis_name, kernel_sets, letter, segments, short_kernel
from nondet.reports.probes import probe_sections
from nondet.reports.text import environment_line
from nondet.verdict.samples import is_varied
from nondet.verdict.served import is_endpoint
from nondet.verdict.training import courses, lines_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nondet.sampling.analysis import SampleSummary, TreeNode

__all__ = ["FIGURES", "draw", "figures_of", "save"]

# Okabe and Ito (2008), the black first
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#F0E442")
_STYLES = ("-", "--", "-.", ":")
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.parse_math": False,  # a $ in somebody's name is a $
    "svg.fonttype": "none",
    "svg.hashsalt": "nondet",
    "pdf.fonttype": 42,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "figure.dpi": 110,
    "savefig.dpi": 200,
}
_MOST_LANES = 12


def _line_style(number: int) -> dict[str, Any]:
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _STYLES[number % len(_STYLES)]}


def draw(name: str, runs: Sequence[Run], traces: Callable[[Run], Any] | None = None) -> Figure:
    """One figure of these runs.

    Args:
        name: A key of `FIGURES`.
        traces: run -> (traces, pieces), for what is drawn from completions; read from the side file by default.

    Raises:
        UnknownNameError: no such figure.
        UserError: the runs hold nothing that it draws.
    """
    if name not in FIGURES:
        raise UnknownNameError("figure", name, FIGURES)
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        figure = FIGURES[name](runs, traces or _side_file)
        line = "  |  ".join(dict.fromkeys(environment_line(run.header.environment) for run in runs))
        figure.text(0.01, -0.02, one_line(line, 300), fontsize=7, color="#555555", va="top")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the figure; the suffix decides the format. No date goes into the file."""
    import matplotlib

    no_date: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
    with matplotlib.rc_context(_STYLE):
        figure.savefig(path, bbox_inches="tight", metadata=no_date[path.suffix])


def figures_of(runs: Sequence[Run]) -> list[str]:
    """The figures that these runs have anything for."""
    names = ["class-map"] if any(map(_sweeps, runs)) else []
    names += ["map"] if _maps(runs) else []
    names += ["speed", "jigsaw"] if any(_curves(section) for run in runs for section in sections(run)) else []
    names += ["training"] if any(run.training_steps for run in runs) else []
    return [*names, *(["survival", "tree"] if any(map(_is_one_sample, runs)) else [])]


def _is_one_sample(run: Run) -> bool:
    """Whether the completions are drawn from one load: neither at many settings nor in the arms of a server."""
    return bool(run.completions) and not is_varied(run) and not is_endpoint(run)


def _side_file(run: Run) -> Any:
    from nondet.core.traces import check_traces, read_traces

    traces, pieces = read_traces(Path(run.source))
    check_traces(run, traces)
    return traces, pieces


def _subplots(count: int, width: float, height: float, columns: int = 1) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes


def _sweeps(run: Run) -> list[Row]:
    """Rows with a class for each of several values: numbers before names, other things before repetitions of a call."""
    rows = [r for r in run.rows if len(r.values) > 2 and len(r.labels) == len(r.values)]
    for wanted in (
        lambda r: all(isinstance(v, int) for v in r.values),
        lambda r: r.varied != "run",
        lambda r: r.distinct > 1,
    ):
        rows = [r for r in rows if wanted(r)] or rows
    return rows


def _class_map(runs: Sequence[Run], traces: Callable[[Run], Any]) -> Figure:
    cases: dict[tuple[str, str, str, str], list[Row]] = {}
    for run in runs:
        parted = {(r.probe, r.case, r.dtype, r.device) for r in _sweeps(run)}
        for row in run.rows:
            at = (row.probe, row.case, row.dtype, row.device)
            if at in parted and len(row.labels) == len(row.values) > 0:
                cases.setdefault(at, []).append(row)
    if not cases:
        raise UserError("no row of these runs has classes over a sweep", "Draw a run of `nondet probe`.")
    longest = max(len(r.values) for rows in cases.values() for r in rows)
    long = [rows for rows in cases.values() if len(rows[0].values) * 4 >= longest]  # a few values beside it are no map
    shown = sorted(long, key=lambda rows: -max(r.distinct for r in rows))[:8]
    lanes = max(sum(min(r.distinct, _MOST_LANES) for r in rows) for rows in shown)
    figure, axes = _subplots(len(shown), 7.5, 0.9 + 0.22 * max(lanes, 3))
    for axis, rows in zip(axes, shown, strict=False):
        _lanes(axis, rows)
    return figure


def _lanes(axis: Any, rows: Sequence[Row]) -> None:
    names: list[str] = []
    named = not all(isinstance(v, int) for v in rows[0].values)
    for row in rows:
        sets = kernel_sets(row)
        for label in range(min(row.distinct, _MOST_LANES)):
            lane = len(names)
            places = range(len(row.values)) if named else row.values
            values = [v for v, mine in zip(places, row.labels, strict=True) if mine == label]
            colour = _COLOURS[label % len(_COLOURS)]
            axis.plot(values, [lane] * len(values), "|", color=colour, markersize=9, markeredgewidth=1.6)
            used = {row.kernels[i] for i, mine in enumerate(row.labels) if mine == label} if row.kernels else set()
            kernels = ", ".join(short_kernel(k, 34) for i in sorted(used)[:1] for k in sets[i][:2])
            names.append(one_line(f"{one_line(row.impl, 24)} {letter(label)}  {kernels}"))
    first = rows[0]
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_ylim(len(names) - 0.4, -0.6)
    if named:
        axis.set_xticks(range(len(first.values)), [one_line(str(v), 24) for v in first.values], rotation=40, ha="right")
        axis.tick_params("x", labelsize=7)
    elif first.varied != "run" and min(v for v in first.values if isinstance(v, int)) > 0:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_xlabel(one_line(axis_name(first), 60))
    most = max(row.distinct for row in rows)
    cut = f" (the first {_MOST_LANES} of {most} classes)" if most > _MOST_LANES else ""
    axis.set_title(one_line(f"{first.case}, {first.dtype}", 110) + cut, fontsize=8, loc="left")


def _maps(runs: Sequence[Run]) -> list[tuple[str, ProductMap]]:
    return [found for run in runs for section in probe_sections(run.rows) for found in section.maps]


def _map(runs: Sequence[Run], traces: Callable[[Run], Any]) -> Figure:
    """Classes over M and one other size: a panel an implementation, a line a size, a colour a class of that line."""
    found = [(title, drawn, impl) for title, drawn in _maps(runs) for impl in drawn.rows]
    if not found:
        raise UserError("these runs hold no map of a product", "Draw a run of `nondet probe matmul --map mk`.")
    figure, axes = _subplots(len(found), 4.6, 2.9, columns=min(2, len(found)))
    for axis, (title, drawn, impl) in zip(axes, found, strict=False):
        rows = drawn.rows[impl]
        for place, row in enumerate(rows):
            for part in segments(row):  # whose values are every M
                width, colour = part.stop - part.start, _COLOURS[part.label % len(_COLOURS)]
                axis.barh(place, width, left=part.start + 1, height=1.0, align="edge", color=colour, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_xlim(1, max(len(row.values) for row in rows) + 1)
        shown = range(0, len(rows), -(-len(rows) // 8))
        axis.set_yticks([i + 0.5 for i in shown], [f"{rows[i].shape[drawn.axis]:,}" for i in shown])
        axis.set_ylim(len(rows), 0)
        axis.grid(visible=False)
        axis.set_xlabel("M, from each to the next")
        axis.set_ylabel(drawn.axis)
        axis.set_title(one_line(f"{impl}: {title}", 90), fontsize=7, loc="left")
    return figure


def _curves(section: Section) -> dict[str, list[Any]]:
    """Groups with enough sizes for a curve."""
    return {
        title: rows
        for title, rows in section.groups.items()
        if len({row[0].cell.shape[row[0].cell.axis] for row in rows}) > 3
    }


def _bench(runs: Sequence[Run], value: Callable[[Any], float | None], quantity: str, baseline: bool) -> Figure:
    panels = [
        (section, title, rows) for run in runs for section in sections(run) for title, rows in _curves(section).items()
    ]
    if not panels:
        raise UserError("no cell of these runs was timed over four sizes or more", "Draw a run of `nondet bench`.")
    figure, axes = _subplots(len(panels), 4.2, 2.7, columns=min(2, len(panels)))
    for axis, (section, title, rows) in zip(axes, panels, strict=False):
        impls = [i for i in section.impls if not is_stock(i)]
        names = (["best stock"] if baseline else []) + impls
        for i, name in enumerate(names):
            points = sorted(
                (c.cell.shape[c.cell.axis], value(c))
                for row in rows
                for c in row
                if (c.timed is c.baseline if name == "best stock" else c.timed.impl == name) and value(c) is not None
            )
            if points:
                label = one_line(name, 40)
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label, **_line_style(i))
        axis.axhline(1.0, color="#888888", linewidth=0.8)
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0.0 if baseline else 0.8), max(high, 1.05 if baseline else 1.2))  # noise is no mountain
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_xlabel(one_line(section.cells[0].axis, 60))
        axis.set_ylabel(quantity)
        axis.set_title(one_line(f"{section.name}, {title}, {section.dtype}", 64), fontsize=8, loc="left")
    axes[0].legend(fontsize=7, frameon=False)
    return figure


def _summaries(runs: Sequence[Run], traces: Callable[[Run], Any]) -> list[SampleSummary]:
    from nondet.sampling.analysis import summarize

    summaries = []
    for run in runs:
        if _is_one_sample(run):
            by_digest, pieces = traces(run)
            keys = dict.fromkeys((c.impl, c.prompt) for c in run.completions)
            summaries += [summarize(run, by_digest, pieces, impl, prompt) for impl, prompt in keys]
    if not summaries and any(is_endpoint(run) for run in runs):
        raise UserError("the arms of a server are no one sample to draw", "Read them with `nondet report`.")
    if not summaries:
        raise UserError("these runs hold no completions", "Draw a run of `nondet sample`.")
    return summaries


def _survival(runs: Sequence[Run], traces: Callable[[Run], Any]) -> Figure:
    figure, (axis,) = _subplots(1, 6.0, 3.2)
    for i, summary in enumerate(_summaries(runs, traces)):
        label = f"{one_line(summary.impl, 40)} (n = {summary.n:,})"
        axis.step(range(len(summary.survival)), summary.survival, where="post", label=label, **_line_style(i))
    axis.set_ylim(top=1.005)
    axis.set_xlabel("tokens")
    axis.set_ylabel("share equal to the most common so far")
    axis.legend(fontsize=7, frameon=False)
    return figure


def _tree(runs: Sequence[Run], traces: Callable[[Run], Any]) -> Figure:
    parted = [s for s in _summaries(runs, traces) if s.distinct_completions > 1]
    if not parted:
        raise UserError("all completions of these runs are equal: there is no tree", "Try --figure survival.")
    figure, axes = _subplots(len(parted), 7.0, 2.8)
    for axis, summary in zip(axes, parted, strict=False):
        _branches(axis, summary)
    return figure


def _branches(axis: Any, summary: SampleSummary) -> None:
    """Each run of shared tokens as a line, as thick as its share; a loop, since forks nest deeply."""
    total = max(1, summary.n)
    leaf = 0
    places: dict[int, float] = {}
    order: list[tuple[TreeNode, bool]] = [(summary.tree, False)]
    while order:
        node, placed = order.pop()
        if not placed and node.children:
            order.append((node, True))
            order += [(child, False) for child in reversed(node.children)]
            continue
        if node.children:
            places[id(node)] = places[id(node.children[0])]
            for child in node.children:
                axis.plot([child.start] * 2, [places[id(node)], places[id(child)]], color="#888888", linewidth=0.8)
        else:
            places[id(node)] = float(leaf)
            leaf += 1
        x, y = [node.start, node.start + node.length], [places[id(node)]] * 2
        axis.plot(
            x, y, solid_capstyle="butt", color=_COLOURS[int(places[id(node)]) % 7], linewidth=1 + 6 * node.count / total
        )
        if not node.children:
            axis.annotate(f" {node.count:,}", (x[1], y[1]), fontsize=7, va="center")
    axis.invert_yaxis()
    axis.set_yticks([])
    axis.grid(visible=False)
    axis.spines["left"].set_visible(False)
    axis.set_xlabel("tokens")
    title = f"{summary.impl}: {summary.distinct_completions} distinct of {summary.n:,}"
    axis.set_title(one_line(title, 100), fontsize=8, loc="left")


def _training(runs: Sequence[Run], traces: Callable[[Run], Any]) -> Figure:
    """Reward, K3 and entropy by step: a line an arm, of several seeds their mean, with each seed as a thin one."""
    told = [course for run in runs for course in courses(run) if len(course.steps) > 1]
    if not told:
        raise UserError("these runs hold no two steps of an arm", "Draw a run of `nondet rl`.")
    figure, axes = _subplots(3, 4.2, 2.9, columns=3)
    impls = list(dict.fromkeys(course.impl for course in told))
    panels = {"reward": "reward", "k3": "K3, sampler to trainer", "entropy": "entropy, nats a token"}
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for line in lines_of(told, name):
            i = impls.index(line.impl)
            thin = (
                {"linewidth": 0.6, "alpha": 0.4, "linestyle": "-"} if line.thin else {"label": one_line(line.impl, 40)}
            )
            axis.plot(*zip(*line.points, strict=True), **_line_style(i) | thin)
        axis.set_title(title, fontsize=8, loc="left")
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
    above = [math.log10(step.k3) for course in told for step in course.steps if step.k3 > 0]
    least, most = math.floor(min(above, default=-6.0)), math.ceil(max(above, default=-3.0))
    axes[1].set_yscale("symlog", linthresh=10.0**least)
    axes[1].set_ylim(bottom=-0.3 * 10.0**least)  # so that a line at 0 is not the axis
    decades = [10.0**e for e in range(most, least - 1, -max(1, (most - least) // 3))]
    axes[1].set_yticks([0.0, *decades], ["0", *(f"{x:.0e}" for x in decades)], minor=False)
    axes[1].minorticks_off()
    axes[0].legend(fontsize=7, frameon=False)
    return figure


FIGURES: dict[str, Callable[[Sequence[Run], Callable[[Run], Any]], Figure]] = {
    "class-map": _class_map,
    "map": _map,
    "speed": lambda runs, _: _bench(
        runs, lambda c: c.ratio, "best stock time / time (above 1: faster)", baseline=False
    ),
    "jigsaw": lambda runs, _: _bench(runs, lambda c: c.share, "share of the machine's limit", baseline=True),
    "survival": _survival,
    "training": _training,
    "tree": _tree,
}
