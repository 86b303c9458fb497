"""Pictures of runs as files: PNG, SVG or PDF of what a page draws, from the same numbers, by matplotlib.

Colours are those of a page in light mode; lines differ in style as well. The font is named (DejaVu Sans, which
matplotlib brings), text stays text in SVG, and the machine is written under every figure. The same run file gives the
same picture: no dates, no random identifiers.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nondet.bench.summary import sections
from nondet.core.records import Row, Run
from nondet.errors import UnknownNameError, UserError, one_line
from nondet.reports import html
from nondet.reports.bench import bench_plots
from nondet.reports.classes import letter, map_figures
from nondet.reports.content import RunSection
from nondet.reports.mismatch import mismatch_figure, training_figure
from nondet.reports.plots import WIDE, WIDTH, Panel, Picture, Plot, Plots, answers_picture, hue, tint
from nondet.reports.probes import probes_of
from nondet.reports.samples import Sample, curve_plots
from nondet.reports.text import environment_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FIGURES", "draw", "figures_of", "save"]

_STYLES = ("-", "--", ":", "-.")
# A page's colours in light mode, by their names in its style sheet.
_SHEET = (Path(html.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8").partition("@media")[0]
_COLOURS: dict[str, str] = dict(re.findall(r"--(\w+): (#\w{6})", _SHEET))
_HUES = [_COLOURS[name] for name in ("stock", "invariant", "third", "fourth")]
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.parse_math": False,  # a $ in a name is a $
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
_POINT = 0.72  # of a unit of the answers' picture, which has a hundred in an inch
_MAPS_MOST, _LANES_MOST = 8, 24  # maps in one figure; lanes named in one map

# A picture with its own axes: inches wide and high, and the function that draws it there.
Drawing = tuple[float, float, Callable[[Any], None]]


def draw(name: str, runs: Sequence[Run]) -> Figure:
    """One figure (a key of `FIGURES`) of these runs. Raises UnknownNameError: no such figure. UserError: the runs hold
    nothing for it."""
    if name not in FIGURES:
        raise UnknownNameError("figure", name, FIGURES)
    import matplotlib
    from matplotlib.figure import Figure

    drawings_of, columns, missing = FIGURES[name]
    drawings = list(drawings_of(runs))
    if not drawings:
        raise UserError(f"these runs hold no {missing[0]}", missing[1])
    columns = min(columns, len(drawings))
    with matplotlib.rc_context(_STYLE):
        rows = [drawings[i : i + columns] for i in range(0, len(drawings), columns)]
        heights = [max(high for _, high, _ in row) for row in rows]
        figure = Figure(figsize=(drawings[0][0] * columns, sum(heights)), layout="constrained")
        axes = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights).flatten().tolist()
        for axis in axes[len(drawings) :]:
            axis.set_visible(False)
        for axis, (_, _, onto) in zip(axes, drawings, strict=False):
            onto(axis)
        line = one_line("  |  ".join(dict.fromkeys(environment_line(run.header.environment) for run in runs)), 300)
        size = 12 if name == "tree" else 7  # whose words are read at half their size, too
        figure.text(0.01, -0.02, textwrap.fill(line, 840 // size), fontsize=size, color="#555555", va="top")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the figure; the suffix decides the format. No date goes into the file."""
    import matplotlib

    no_date: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
    with matplotlib.rc_context(_STYLE):
        figure.savefig(path, bbox_inches="tight", metadata=no_date[path.suffix])


def figures_of(runs: Sequence[Run]) -> list[str]:
    """The figures that these runs have records for."""
    return [name for name, (drawings_of, *_) in FIGURES.items() if next(drawings_of(runs), None) is not None]


def _sweeps(run: Run) -> list[Row]:
    """Rows with a class for each of several values: numbers before names, repetitions of a call last."""
    rows = [r for r in run.rows if len(r.values) > 2 and len(r.labels) == len(r.values)]
    rows = [r for r in rows if all(isinstance(v, int) for v in r.values)] or rows
    rows = [r for r in rows if r.varied != "run"] or rows
    return [r for r in rows if r.distinct > 1] or rows


def _class_maps(runs: Sequence[Run]) -> Iterator[Drawing]:
    """The cases that differ most; a few values next to a long sweep are not a map."""
    cases: dict[tuple[str, str, str, str], list[Row]] = {}
    for run in runs:
        sweeps = {(r.probe, r.case, r.dtype, r.device) for r in _sweeps(run)}
        for row in run.rows:
            at = (row.probe, row.case, row.dtype, row.device)
            if at in sweeps and len(row.labels) == len(row.values) > 0:
                cases.setdefault(at, []).append(row)
    longest = max((len(row.values) for rows in cases.values() for row in rows), default=0)
    long = [rows for rows in cases.values() if max(len(row.values) for row in rows) * 4 >= longest]
    for rows in sorted(long, key=lambda rows: -max(row.distinct for row in rows))[:_MAPS_MOST]:
        for drawn in map_figures(rows):
            yield _lanes(drawn, f"{rows[0].case}, {rows[0].dtype}")


def _product_maps(runs: Sequence[Run]) -> Iterator[Drawing]:
    for title, found in (found for run in runs for probe in probes_of(run.rows) for found in probe.maps):
        yield _lanes(found.drawn, title, found.axis)


def _lanes(drawn: dict[str, Any], title: str, unit: str = "") -> Drawing:
    """A lane per class, or per size of a product: a bar for each stretch of values, in the colour of its class."""
    lanes = [(panel["row"], lane) for panel in drawn["panels"] for lane in panel["lanes"]]
    step = -(-len(lanes) // _LANES_MOST)
    named = [i for i, (row, _) in enumerate(lanes) if i % step == 0 or row is not lanes[i - 1][0]]
    gap = 0.06 if step == 1 else 0.0

    def onto(axis: Any) -> None:
        for i, (row, lane) in enumerate(lanes):
            for cell in lane["cells"]:
                spans = [(left, right - left) for left, right in cell["spans"]]
                colour = _colour(tint(cell["label"], row))
                axis.broken_barh(spans, (i + gap, 1 - 2 * gap), color=colour, linewidth=0)
        axis.set_yticks([i + 0.5 for i in named], [_lane_name(*lanes[i]) for i in named], fontsize=7)
        axis.set_ylim(len(lanes), 0)
        axis.set_xlim(0, WIDTH)
        axis.set_xticks([t.x for t in drawn["ticks"]], [t.text for t in drawn["ticks"]])
        axis.grid(visible=False)
        axis.set_xlabel(", ".join(filter(None, (drawn["axis"], drawn["scale"]))))
        axis.set_ylabel(one_line(unit, 60))
        axis.set_title(one_line(title, 110), fontsize=8, loc="left")

    return 7.5, 1.0 + min(0.22 * max(3, len(lanes)), 0.6 + 0.06 * len(lanes)), onto


def _colour(name: str) -> str:
    """Of a class, "c0", of an implementation, "r1", or of text."""
    return _HUES[int(name[1])] if name[0] == "r" else _COLOURS["soft" if name == "faded" else name]


def _lane_name(row: Row, lane: dict[str, Any]) -> str:
    name = f"{row.impl} {lane['name']}" if "name" in lane else ""
    return one_line(name or f"{one_line(row.impl, 24)} {letter(lane['label'])}  {lane['kernels']}", 80)


def _plots(found: Plots | None, only: int | None = None, prefix: str = "") -> Iterator[Drawing]:
    """A drawing per plot, the first with the legend; `only`: the index of the one to draw."""
    if found is not None:
        wanted = slice(None) if only is None else slice(only, only + 1)
        plots = [(panel, plot) for panel in found.panels for plot in panel.plots[wanted]]
        for number, (panel, plot) in enumerate(plots):
            yield 4.4, 2.9, partial(_plot, found.impls, panel, plot, prefix, not number)


# Style of a mark -> how matplotlib draws it.
_MARKS: dict[str, dict[str, Any]] = {
    "limit": {"color": "#555555", "linewidth": 0.8, "linestyle": ":"},
    "spot": {"marker": "o", "linestyle": "", "markersize": 2.5},
    "thin": {"linewidth": 0.6, "alpha": 0.45, "linestyle": "-"},
    "curve": {},
}


def _plot(impls: Sequence[tuple[str, str]], panel: Panel, plot: Plot, prefix: str, legend: bool, axis: Any) -> None:
    unnamed = dict(enumerate(impls)) if legend else {}
    for mark in plot.marks:
        across, up = zip(*mark.points, strict=True)
        index = mark.impl or 0
        number = hue(impls[index][0], index)
        if mark.style == "band":
            axis.fill(across, up, alpha=0.16, linewidth=0, color=_HUES[number])
        elif mark.style in _MARKS:
            shown: dict[str, Any] = {"color": _HUES[number]} | _MARKS[mark.style]
            if mark.style in ("curve", "spot") and index in unnamed:
                shown["label"] = one_line("".join(unnamed.pop(index)), 40)
            axis.plot(across, up, **({"linestyle": _STYLES[number]} | shown))
    axis.set_xlim(0, 1)
    axis.set_ylim(-0.02, 1.02)
    axis.set_xticks([t.x / WIDTH for t in panel.ticks], [t.text for t in panel.ticks])
    axis.set_yticks([height for _, height in plot.levels], [text for text, _ in plot.levels])
    axis.set_xlabel(one_line(panel.axis, 60))
    axis.set_ylabel(one_line(plot.unit, 60))
    axis.set_title(one_line(prefix + panel.title, 64), fontsize=8, loc="left")
    if legend:
        axis.legend(fontsize=7, frameon=False)


def _bench(runs: Sequence[Run], only: int) -> Iterator[Drawing]:
    for section in (section for run in runs for section in sections(run)):
        yield from _plots(bench_plots(section), only, f"{section.name}, {section.dtype}, ")


def _prompts(runs: Sequence[Run]) -> Iterator[Sample]:
    """With completions that are drawn from one load: not at many settings or in the arms of a server."""
    for section in (RunSection(run) for run in runs if run.completions):
        yield from section.samples if section.endpoint is None else ()


def _survival(runs: Sequence[Run]) -> Iterator[Drawing]:
    return _plots(curve_plots([s for prompt in _prompts(runs) for s in prompt.summaries]))


def _trees(runs: Sequence[Run]) -> Iterator[Drawing]:
    for prompt in _prompts(runs):
        if any(s.distinct_completions > 1 for s in prompt.main):
            picture = answers_picture(prompt.main)
            yield WIDE / 100, picture.height / 100, partial(_answers, picture)


def _answers(picture: Picture, axis: Any) -> None:
    for line in picture.strokes:
        xs, ys = (line.x0, line.x1), (line.y0, line.y1)
        axis.plot(xs, ys, color=_colour(line.colour), linewidth=line.width * _POINT, solid_capstyle="butt")
    for one in picture.words:
        style = {"ha": "right" if one.end else "left", "weight": "bold" if one.bold else "normal"}
        axis.text(one.x, one.y, one.text, fontsize=one.size * _POINT, color=_colour(one.colour), **style)
    axis.set_xlim(0, WIDE)
    axis.set_ylim(picture.height, 0)
    axis.set_axis_off()


def _of_trainer(runs: Sequence[Run], figure_of: Callable[[Run], Any]) -> Iterator[Drawing]:
    for figure in map(figure_of, runs):
        yield from _plots(figure.data if figure else None)


_TIMED = ("cell that was timed over four sizes or more", "Draw a run of `nondet bench`.")
_IN_TRAINING, _MISMATCH = (partial(_of_trainer, figure_of=f) for f in (training_figure, mismatch_figure))
# Name -> what draws it, columns, and (what runs without it lack, what to draw instead).
FIGURES: dict[str, tuple[Callable[[Sequence[Run]], Iterator[Drawing]], int, tuple[str, str]]] = {
    "class-map": (_class_maps, 1, ("row with classes over a sweep", "Draw a run of `nondet probe`.")),
    "map": (_product_maps, 1, ("map of a product", "Draw a run of `nondet probe matmul --map mk`.")),
    "speed": (partial(_bench, only=1), 2, _TIMED),
    "jigsaw": (partial(_bench, only=0), 2, _TIMED),
    "survival": (_survival, 1, ("completions of one load", "Draw a run of `nondet sample`; a server has none.")),
    "training": (_IN_TRAINING, 3, ("two steps of an arm", "Draw a run of `nondet rl`.")),
    "mismatch": (_MISMATCH, 2, ("arms that differ", "Draw a run of `nondet mismatch`.")),
    "tree": (_trees, 1, ("completions of one load that differ: there is no tree", "Try --figure survival.")),
}
