"""Benchmark cases as blocks of a report: sentences, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from nondet.bench.summary import SLOW, Comparison, Section, is_stock, sections
from nondet.core.records import Cell, Run, Status, Timed
from nondet.errors import one_line
from nondet.reports.classes import short_kernel
from nondet.reports.document import ALL, Bit, Block, Cells, Details, Figure, Inline, Paragraph, Table
from nondet.reports.plots import Mark, Panel, Plot, Plots, Points, Scale, doublings, linear, placed
from nondet.verdict.findings import plural

# Sizes that are mostly those of one model.
_CONSTANT = {"Hq", "Hkv", "D", "E", "prompt", "tokens", "budget"}
_NAMED_MOST = 6  # sections whose speedups a headline names
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def time_text(us: float) -> str:
    """Microseconds with about four digits."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def _rate_text(rate: float, unit: str) -> str:
    scale, prefix = next(((scale, prefix) for scale, prefix in _UNITS if rate >= scale), (1.0, ""))
    return f"{rate / scale:.3g} {prefix}{unit}"


def cell_label(cell: Cell, section: Section) -> str:
    """The sizes that distinguish a case: "M=16 K=4096 N=6144", "B=8 Tk=4096"; heads only where they differ."""
    varied = {k for k in cell.shape if len({c.shape.get(k) for c in section.cells}) > 1}
    keys = [k for k in cell.shape if k in varied or k not in _CONSTANT]
    if all(c.shape.get("Tq") in (1, c.shape.get("Tk")) for c in section.cells):
        keys = [k for k in keys if k != "Tq"]  # a decode step or a whole prefill, as the section's title shows
    return one_line(" ".join(f"{k}={cell.shape[k]}" for k in keys), 120)


def bench_blocks(run: Run, number: int, opened: bool) -> list[Block]:
    """The speeds, how they were timed, then each section: its plot, and a row for each case."""
    listed, note = (
        sections(run),
        "One class: the bits of a row, or of a last query, are the same at every size that was timed.",
    )
    named = [f"{one_line(x.name, 40)} {_rate_text(x.rate, x.unit)} ({one_line(x.what, 80)})" for x in run.limits]
    if named:
        note += f" Limits, measured in this run: {', '.join(named)}."
    elif not all(cell.tokens or cell.bus_bytes for cell in run.cells):  # such as steps of the engine, which have none
        note += " No limit was measured in this run."
    made: list[Block] = [speed_table(listed), Paragraph(note, "soft", ALL), Paragraph(_method_text(run.cells), "soft")]
    for i, bench in enumerate(listed, 1):
        place, label = f"bench-{number}-{i}", f"{bench.name}, {bench.dtype}"
        cells, plots, parts = plural(len(bench.cells), "cell"), bench_plots(bench), list[Block]()
        if plots:
            title = f"{bench.name}: how close to the limit, over {bench.cells[0].axis}"
            parts.append(Figure("plots", plots, f"{place}-plot", title))
        title = f"{cells}: times, ratios, kernels"
        parts.append(Details(title, [cell_table(bench)], opened=len(bench.cells) <= 12))
        if any(c.within_noise for c in _listed(bench)):
            parts.append(Paragraph("~ within noise: the interval of the ratio holds 1.", "soft"))
        made.append(Details(label, parts, place, cells, label, opened=opened))
    return made


def speed_table(listed: Sequence[Section]) -> Table:
    """A row for each implementation in each section, with its bits and stock's."""
    rows: list[Cells] = []
    for bench in listed:
        speeds, kind = {s.impl: s for s in bench.summaries}, "group"
        if bench.cells[0].flops and bench.cells[0].axis == "M":
            kind = "weight shape"
        failed = {b.impl: f" ({b.failed} not compared)" if b.failed else "" for b in bench.bits}
        alike = {b.impl: f"{b.one_class} of {plural(b.groups, kind)}{failed[b.impl]}" for b in bench.bits}
        for impl in speeds or alike:
            named = (f"{one_line(bench.name, 40)}, {bench.dtype}", Bit(one_line(impl, 60), "code"))
            speed: Cells = ("–",) * 4
            if s := speeds.get(impl):
                slow = f"{s.slow} of {len(s.compared)}" + (f", {s.failed} not timed" if s.failed else "")
                share = "–" if s.shares is None else " to ".join(dict.fromkeys(f"{share:.0%}" for share in s.shares))
                worst = f"{s.worst.ratio:.2f} at {cell_label(s.worst.cell, bench)}"
                speed = (f"{s.mean:.3f} ({s.interval[0]:.3f} to {s.interval[1]:.3f})", worst, slow, share)
            rows.append((*named, *speed, alike.get(impl, "–"), alike.get("stock", "–")))
    figures = ("speedup (95%)", "worst", f"below {SLOW}", "of the limit", "one class", "stock's")
    return Table(("operator", "implementation", *figures), rows, ("", "", "num", "", "num", "num"), only=ALL)


def _listed(section: Section) -> Iterator[Comparison]:
    """The implementations of each case that are not stock; its best stock where there is none."""
    for compared in section.compared:
        mine = [c for c in compared if not is_stock(c.timed.impl)]
        yield from mine or [c for c in compared if c.timed is c.baseline]


def cell_table(section: Section) -> Table:
    """A row for each comparison: the ratio has a "~" where its interval holds 1, and is bad below the limit."""
    several = sum(map(is_stock, section.impls)) > 1
    rows = [_row(c, section, several) for c in _listed(section)]
    unit = "µs (tokens/s)" if any(cell.tokens for cell in section.cells) else "µs"
    unshown = ("95%",) if any(c.limit_us is not None for c in section.cells) else ("95%", "limit")
    head = ("cell", f"stock {unit}", unit, "ratio", "95%", "limit", "impl", "ran")
    kinds = ("nowrap", "num", "num", "num", "num", "num", "nowrap", "kernels")
    return Table(head, rows, kinds, unshown=unshown, clipped=True)


def _row(c: Comparison, section: Section, several: bool) -> tuple[Inline, ...]:
    stock, time, ratio, interval = "–", one_line(c.timed.status, 40), "–", ""
    style, ran, stock_ran = "", _kernel(c.timed), _kernel(c.baseline) if c.baseline is not None else ""
    if c.baseline is not None:
        which = f" ({one_line(c.baseline.impl, 40)})" if several else ""
        stock = time_text(c.baseline.median_us) + _tokens(c.cell, c.baseline) + which
    if c.timed.samples_us:
        us = c.timed.median_us
        bus = f" ({_rate_text(c.cell.bus_bytes / us * 1e6, 'B/s')})" if c.cell.bus_bytes and us > 0 else ""
        time = time_text(us) + bus + _tokens(c.cell, c.timed)
    if c.ratio is not None:
        ratio, style = f"{c.ratio:.2f}{'~' * c.within_noise}", "bad" if c.ratio < SLOW else ""
        interval = f"{c.interval[0]:.3f} to {c.interval[1]:.3f}{' (noise)' * c.within_noise}"
    kernel = Bit(ran, "code") if ran else Bit(one_line(c.timed.reason, 200) or "–")
    same = stock_ran == ran and c.timed.kernels
    theirs = [Bit(f"stock: {'the same' if same else stock_ran}", "below")] if stock_ran else []
    share, impl = "–" if c.share is None else f"{c.share:.0%}", Bit(one_line(c.timed.impl, 80), "code")
    return cell_label(c.cell, section), stock, time, Bit(ratio, style), interval, share, impl, (kernel, *theirs)


def _tokens(cell: Cell, timed: Timed) -> str:
    """ " (2,584)": tokens per second of an engine's run, whose times are of steps."""
    if not cell.tokens or not cell.calls or timed.median_us <= 0:
        return ""
    return f" ({cell.tokens / cell.calls / timed.median_us * 1e6:,.0f})"


def _kernel(timed: Timed) -> str:
    names = list(dict.fromkeys(short_kernel(k) for k in timed.kernels)) or [one_line(r, 60) for r in timed.ran]
    return " + ".join(names[:3]) + (f" + {len(names) - 3} more" if len(names) > 3 else "")


def _method_text(cells: Sequence[Cell]) -> str:
    replays = sorted({len(t.samples_us) for c in cells for t in c.timed if t.samples_us})
    if not replays:
        return "Nothing was timed."
    if all(c.tokens for c in cells):
        over = " Over ranks a run's time is the slowest rank's." if any("ranks" in c.shape for c in cells) else ""
        return (
            f"Times are microseconds a step, medians of {_span(replays)} runs of the engine by the host's clock, "
            "implementations in turn; proofs, compilation and the capture of CUDA graphs come before. Ratio: the best "
            "stock's time over the implementation's, above 1 is faster; with a 95% bootstrap interval over runs, in "
            f"pairs.{over}"
        )
    if all(c.operator.startswith("host ") for c in cells):
        each, turns = one_line(cells[0].method, 40), "stock and inside of batch_invariant() in turn"
        return (
            f"Times are what a call costs the host, medians of {_span(replays)} replays of {cells[0].calls} calls one "
            f"after the other ({each}), {turns}. Ratio: stock's time over the one inside."
        )
    methods = " and ".join(dict.fromkeys(one_line(c.method, 40) for c in cells))
    warm = sum(not c.cold and c.limit_us is not None for c in cells)
    text = (
        f"Times are medians of {_span(replays)} replays ({methods}), implementations in turn, each replay over "
        f"{_span(sorted({c.sets for c in cells}))} rotating sets of buffers. Ratio: the best stock time over the "
        "implementation's, median over pairs of replays, with a 95% bootstrap interval; above 1 is faster. Limit: the "
        "longer of bytes over copy bandwidth and operations over the peak, as a share of the time."
    )
    if any(c.bus_bytes for c in cells):
        text += (
            " Over ranks a time is the slowest rank's, of messages that stay in their buffers; in brackets the bus "
            "bandwidth: 2 (ranks - 1) / ranks times the message over the time."
        )
    if warm:
        text += f" In {plural(warm, 'cell')} all sets fit the cache together: memory's bandwidth is no limit there."
    return text


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def bench_headline(run: Run) -> str:
    """Each implementation's geometric mean against stock, and its bits; for a run of stock only, what was timed."""
    benches, parts = sections(run), []
    several = len({section.dtype for section in benches}) > 1
    for impl in dict.fromkeys(s.impl for section in benches for s in section.summaries):
        timed = [(s.mean, section) for section in benches for s in section.summaries if s.impl == impl]
        named = [(mean, f"{one_line(s.name, 40)}{f' ({s.dtype})' * several} {mean:.2f}") for mean, s in timed]
        means = [text for _, text in named]
        if len(means) > _NAMED_MOST:
            means = [f"from {min(named)[1]} to {max(named)[1]} in {len(means)} sections"]
        rows = {r.key: r for section in benches for r in section.rows if r.impl == impl}.values()
        compared = [r.status for r in rows if r.status in (Status.IDENTICAL, Status.DIVERGENT)]
        alike = f"{compared.count(Status.IDENTICAL)} of {plural(len(compared), 'group')}"
        bits = f"; one class of bits in {alike}" if compared else ""
        parts.append(f"{one_line(impl, 80)}, speedup over the best stock: {', '.join(means)}{bits}")
    return ". ".join(parts) or f"{plural(sum(len(s.cells) for s in benches), 'cell')} timed, with nothing beside stock"


_POINTS_LEAST = 4  # fewer sizes than this are a table, not a curve
_STOCK = "best stock"


def bench_plots(section: Section) -> Plots | None:
    """A panel for each group with enough sizes on its axis; None where there is none. The share of the limit is drawn,
    not the rate: over M = 1 ... 8192 the rate spans three decades, which would hide the jumps between tile sizes."""
    axis = section.cells[0].axis
    impls = [_STOCK, *(impl for impl in section.impls if not is_stock(impl))]
    panels = []
    for title, rows in section.groups.items():
        sizes = sorted({row[0].cell.shape[axis] for row in rows})
        if len(sizes) < _POINTS_LEAST:
            continue
        shares, ratios = ({impl: list[tuple[float, float]]() for impl in impls} for _ in range(2))
        for c in (c for row in sorted(rows, key=lambda row: row[0].cell.shape[axis]) for c in row):
            name, size = _STOCK if c.timed is c.baseline else c.timed.impl, c.cell.shape[axis]
            if name in impls and c.share is not None:
                shares[name].append((size, c.share))
            if name in impls[1:] and c.ratio is not None:
                ratios[name].append((size, c.ratio))
        across, shown = doublings(sizes[0], sizes[-1]), one_line(title, 120)
        drawn = [share for points in shares.values() for _, share in points]
        # from a round share below all of them to a little above the limit
        foot = max((x for x in (0.0, 0.25, 0.5, 0.75, 0.9) if x < min(drawn, default=0.0)), default=0.0)
        levels = {f"{share * 100:.3g}%": share for share in (foot, (foot + 1.0) / 2, 1.0)}
        up = linear(foot, max([1.0, *drawn]) * 1.04, levels)
        plots = [_plot("share of the limit", 130, f"{axis}, {shown}", shares, across, up, "{:.0%} of the limit")]
        if any(len(points) > 1 for points in ratios.values()):
            # tenths around all of them and 1, never tighter than 0.8 to 1.2
            drawn = [0.8, 1.2, *(ratio for points in ratios.values() for _, ratio in points)]
            low, high = math.floor(min(drawn) * 10.0 + 1e-9) / 10.0, math.ceil(max(drawn) * 10.0 - 1e-9) / 10.0
            up = linear(low, high, {f"{x:.4g}": x for x in (low, 1.0, high)})
            said = "{:.2f} times the best stock"
            plots.append(_plot("ratio to the best stock", 60, f"{axis}, {shown}", ratios, across, up, said))
        panels.append(Panel(shown, plots, across.ticks, f"{axis}, log2 scale"))
    return Plots([(one_line(impl, 80), "") for impl in impls], panels, "limit; ratio 1") if panels else None


def _plot(unit: str, height: int, over: str, points: Mapping[str, Points], across: Scale, up: Scale, said: str) -> Plot:
    """A curve for each implementation of several points, with each point's figures under the pointer."""
    marks = [Mark("limit", None, [(0.0, up.at(1.0)), (1.0, up.at(1.0))])]
    for i, (impl, mine) in enumerate(points.items()):
        if len(mine) > 1:
            marks.append(Mark("curve", i, placed(mine, across, up)))
            for x, y in mine:
                words = f"{one_line(impl, 80)}, {over.partition(',')[0]} {x:,}: {said.format(y)}"
                marks.append(Mark("spot", i, placed([(x, y)], across, up), words))
    return Plot(unit, height, up.levels, marks, f"{unit} over {over}")
