"""Bench cells as blocks of a report: sentences, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nondet.bench.summary import SLOW, BitsCount, Comparison, Section, Summary, failures, is_stock, sections
from nondet.core.records import Cell, Limit, Run, Status, Timed
from nondet.errors import one_line
from nondet.reports.classes import WIDTH, Tick, short_kernel
from nondet.reports.document import BRIEF, Bit, Block, Details, Figure, Inline, Items, Paragraph, Table
from nondet.verdict.findings import plural

# Sizes that are mostly those of one model.
_CONSTANT = {"Hq", "Hkv", "D", "E", "prompt", "tokens", "budget"}
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


class Timings(NamedTuple):
    """The cells of a run, by section, and what they are held against."""

    limits: Sequence[Limit]
    sections: Sequence[Section]


def timings(run: Run) -> Timings:
    """All cells of a run."""
    return Timings(run.limits, sections(run))


def time_text(us: float) -> str:
    """Microseconds with about four digits."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def _rate_text(rate: float, unit: str) -> str:
    """ "4.21 TB/s", "742 TFLOP/s"."""
    scale, prefix = next(((scale, prefix) for scale, prefix in _UNITS if rate >= scale), (1.0, ""))
    return f"{rate / scale:.3g} {prefix}{unit}"


def cell_label(cell: Cell, section: Section) -> str:
    """The sizes that tell it from others: "M=16 K=4096 N=6144", "B=8 Tk=4096"; heads only where they differ."""
    varied = {k for k in cell.shape if len({c.shape.get(k) for c in section.cells}) > 1}
    keys = [k for k in cell.shape if k in varied or k not in _CONSTANT]
    if all(c.shape.get("Tq") in (1, c.shape.get("Tk")) for c in section.cells):
        keys = [k for k in keys if k != "Tq"]  # a decode step or a whole prefill, as the section says
    return one_line(" ".join(f"{k}={cell.shape[k]}" for k in keys), 120)


def bench_blocks(told: Timings, number: int, opened: bool) -> list[Block]:
    """How it was timed, then each section: what it comes to, the plot, a row for each cell."""
    limits = _limits_text(told)
    made: list[Block] = [Paragraph(limits, "soft", "bvmp")] if limits else []
    made.append(Paragraph(_method_text([cell for section in told.sections for cell in section.cells]), "soft"))
    for i, bench in enumerate(told.sections, 1):
        place, label = f"bench-{number}-{i}", f"{bench.name}, {bench.dtype}"
        cells = plural(len(bench.cells), "cell")
        lines: list[Inline] = [(Bit(s.impl, "code"), f": {_summary_text(s, bench)}.") for s in bench.summaries]
        lines += [(Bit(b.impl, "code"), f": {_bits_text(b, bench)}.") for b in bench.bits]
        figure = bench_figure(bench)
        parts: list[Block] = [Items(lines)] if lines else []
        if figure:
            title = f"{bench.name}: how close to the limit, over {figure['axis']}"
            parts.append(Figure("bench", figure, f"{place}-plot", title))
        title = f"{cells}: times, ratios, kernels"
        parts.append(Details(title, [cell_table(bench)], opened=len(bench.cells) <= 12))
        if any(c.within_noise for c in _listed(bench)):
            parts.append(Paragraph("~ within noise: the interval of the ratio holds 1.", "soft"))
        for s in bench.summaries:
            count = f"{s.slow} of {plural(len(s.compared), 'cell')} below {SLOW}"
            made.append(Paragraph(f"{bench.name}, {s.impl}: {_worst_text(s, bench)}; {count}", only=BRIEF))
        made.append(Details(label, parts, place, cells, label, opened=opened))
    return made


def speed_table(listed: Sequence[Section]) -> Table | None:
    """The answer of a bench: a row for each implementation in each section; None where stock alone was timed."""
    rows: list[tuple[Inline, ...]] = []
    for bench in listed:
        alike = {b.impl: _bits_text(b, bench).removeprefix("one class of bits in ") for b in bench.bits}
        for s in bench.summaries:
            low, high = s.interval
            rows.append((
                f"{one_line(bench.name, 40)}, {bench.dtype}", Bit(one_line(s.impl, 60), "code"),
                f"{s.mean:.3f} ({low:.3f} to {high:.3f})",
                f"{s.worst.ratio:.2f} at {cell_label(s.worst.cell, bench)}", alike.get(s.impl, "not compared"),
            ))  # fmt: skip
    head = ("operator", "implementation", "speedup (95%)", "worst", "one class of bits in")
    return Table(head, rows, ("", "", "num", "wide", "nowrap"), only="mp") if rows else None


def _listed(section: Section) -> Iterator[Comparison]:
    """Of each cell the implementations that are not stock; its best stock where there is none."""
    for compared in section.compared:
        mine = [c for c in compared if not is_stock(c.timed.impl)]
        yield from mine or [c for c in compared if c.timed is c.baseline]


def cell_table(section: Section) -> Table:
    """A row for each of what is listed.

    A ratio is best stock over this one, "~" where its interval holds 1; bad below what the project holds itself to.
    """
    several = sum(map(is_stock, section.impls)) > 1
    rows = [_row(c, section, several) for c in _listed(section)]
    unit = "µs (tokens/s)" if any(cell.tokens for cell in section.cells) else "µs"
    unshown = ("95%",) if any(c.limit_us is not None for c in section.cells) else ("95%", "limit")
    head = ("cell", f"stock {unit}", unit, "ratio", "95%", "limit", "impl", "ran")
    kinds = ("nowrap", "num", "num", "num", "num", "num", "nowrap", "kernels")
    return Table(head, rows, kinds, unshown=unshown, clipped=True)


def _row(c: Comparison, section: Section, several: bool) -> tuple[Inline, ...]:
    best = c.baseline
    stock = "–"
    ran, stock_ran = _kernel(c.timed), _kernel(best) if best is not None else ""
    if best is not None:
        which = f" ({one_line(best.impl, 40)})" if several else ""
        stock = time_text(best.median_us) + _tokens(c.cell, best) + which
    time = one_line(c.timed.status, 40)
    if c.timed.samples_us:
        us = c.timed.median_us
        bus = f" ({_rate_text(c.cell.bus_bytes / us * 1e6, 'B/s')})" if c.cell.bus_bytes and us > 0 else ""
        time = time_text(us) + bus + _tokens(c.cell, c.timed)
    ratio: Inline = "–"
    interval = ""
    if c.ratio is not None:
        ratio = Bit(f"{c.ratio:.2f}{'~' * c.within_noise}", "bad" if c.ratio < SLOW else "")
        interval = f"{c.interval[0]:.3f} to {c.interval[1]:.3f}{' (noise)' * c.within_noise}"
    kernel = Bit(ran, "code") if ran else Bit(one_line(c.timed.reason, 200) or "–")
    same = stock_ran == ran and c.timed.kernels
    theirs = [Bit(f"stock: {'the same' if same else stock_ran}", "below")] if stock_ran else []
    share = "–" if c.share is None else f"{c.share:.0%}"
    impl = Bit(one_line(c.timed.impl, 80), "code")
    return cell_label(c.cell, section), stock, time, ratio, interval, share, impl, (kernel, *theirs)


def _tokens(cell: Cell, timed: Timed) -> str:
    """ " (2,584)": tokens a second in a run of the engine, whose times are of steps; as the table's head says."""
    if not cell.tokens or not cell.calls or timed.median_us <= 0:
        return ""
    return f" ({cell.tokens / cell.calls / timed.median_us * 1e6:,.0f})"


def _kernel(timed: Timed) -> str:
    """What the profiler saw, or what the launchers noted where nothing was profiled."""
    names = list(dict.fromkeys(short_kernel(k) for k in timed.kernels)) or [one_line(r, 60) for r in timed.ran]
    return " + ".join(names[:3]) + (f" + {len(names) - 3} more" if len(names) > 3 else "")


def _summary_text(summary: Summary, section: Section) -> str:
    """The implementation over all cells, as one sentence without its full stop."""
    low, high = summary.interval
    text = (
        f"{summary.mean:.2f} times the speed of the best stock in geometric mean over "
        f"{plural(len(summary.compared), 'cell')} (95% {low:.3f} to {high:.3f})"
    )
    text += f"; {_worst_text(summary, section)}" if len(summary.compared) > 1 else ""
    text += f"; {plural(summary.slow, 'cell')} below {SLOW}"
    if summary.shares is not None:
        text += f"; {' to '.join(dict.fromkeys(f'{share:.0%}' for share in summary.shares))} of the limit"
    return text + (f"; {plural(summary.failed, 'cell')} not timed" if summary.failed else "")


def _worst_text(summary: Summary, section: Section) -> str:
    """ "worst 0.96 at M=64 K=4096 N=24576"."""
    return f"worst {summary.worst.ratio:.2f} at {cell_label(summary.worst.cell, section)}"


def _bits_text(count: BitsCount, section: Section) -> str:
    """ "one class of bits in 6 of 6 weight shapes"."""
    kind = "weight shape" if section.cells[0].flops and section.cells[0].axis == "M" else "group"
    text = f"one class of bits in {count.one_class} of {plural(count.groups, kind)}"
    return text + (f" ({count.failed} not compared)" if count.failed else "")


def _limits_text(told: Timings) -> str:
    """The limits of a run, as one sentence; empty where no cell is held against one, as steps of the engine."""
    if not told.limits and all(cell.tokens or cell.bus_bytes for section in told.sections for cell in section.cells):
        return ""
    named = [f"{one_line(x.name, 40)} {_rate_text(x.rate, x.unit)} ({one_line(x.what, 80)})" for x in told.limits]
    return f"Limits, measured in this run: {', '.join(named)}." if named else "No limit was measured in this run."


def _method_text(cells: Sequence[Cell]) -> str:
    """How they were timed, and what a ratio is."""
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
        return (
            f"Times are what a call costs the host, medians of {_span(replays)} replays of {cells[0].calls} calls one "
            f"after the other ({one_line(cells[0].method, 40)}), stock and inside of batch_invariant() in turn. "
            "Ratio: stock's time over the one inside."
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


def untimed(run: Run) -> list[tuple[str, str, str]]:
    """(status, which, reason) of whatever was not timed."""
    return failures(sections(run))


def bench_headline(run: Run) -> str:
    """The geometric means of each implementation against stock, and its bits; what the cells are for a stock run."""
    benches = sections(run)
    several = len({section.dtype for section in benches}) > 1
    parts = []
    for impl in dict.fromkeys(s.impl for section in benches for s in section.summaries):
        means = [
            f"{one_line(section.name, 40)}{f' ({section.dtype})' if several else ''} {s.mean:.2f}"
            for section in benches
            for s in section.summaries
            if s.impl == impl
        ]
        rows = {r.key: r for section in benches for r in section.rows if r.impl == impl}.values()
        compared = [r for r in rows if r.status in (Status.IDENTICAL, Status.DIVERGENT)]
        alike = sum(r.status == Status.IDENTICAL for r in compared)
        bits = f"; one class of bits in {alike} of {plural(len(compared), 'group')}" if compared else ""
        parts.append(f"{one_line(impl, 80)}, speedup over the best stock: {', '.join(means)}{bits}")
    return ". ".join(parts) or f"{plural(sum(len(s.cells) for s in benches), 'cell')} timed, with nothing beside stock"


# Geometry of bench plots: share of the limit over M, where the jigsaw of tiles shows, and the ratio under it.
#
# Places are in thousandths of the plot's width and hundredths of its height, as in `samples`. The share, not the rate,
# is drawn: over M = 1 ... 8192 the rate spans three decades, in which no jigsaw could be seen, while the share has the
# limit as a straight line on top.

# Fewer sizes than this are a table, not a curve.
_POINTS_LEAST = 4
_STOCK = "best stock"

Points = Mapping[str, Sequence[tuple[int, float]]]


def bench_figure(section: Section) -> dict[str, Any] | None:
    """What the page's macro draws: a panel for each group with enough sizes on its axis; None where there is none.

    Of each panel the lines of the shares and of the ratios under them, an implementation's `index` alike in all of
    them; the grid as (text, height), and the heights of the limit and of ratio 1.
    """
    axis = section.cells[0].axis
    impls = (_STOCK, *(impl for impl in section.impls if not is_stock(impl)))
    panels = []
    for title, rows in section.groups.items():
        sizes = sorted({row[0].cell.shape[axis] for row in rows})
        if len(sizes) < _POINTS_LEAST:
            continue
        shares: dict[str, list[tuple[int, float]]] = {impl: [] for impl in impls}
        ratios: dict[str, list[tuple[int, float]]] = {impl: [] for impl in impls[1:]}
        for row in sorted(rows, key=lambda row: row[0].cell.shape[axis]):
            for c in row:
                name, size = _STOCK if c.timed is c.baseline else c.timed.impl, c.cell.shape[axis]
                if name in shares and c.share is not None:
                    shares[name].append((size, c.share))
                if name in ratios and c.ratio is not None:
                    ratios[name].append((size, c.ratio))
        panels.append(_panel(one_line(title, 120), sizes, shares, ratios))
    return {"axis": axis, "impls": [one_line(impl, 80) for impl in impls], "panels": panels} if panels else None


def _panel(title: str, sizes: Sequence[int], shares: Points, ratios: Points) -> dict[str, Any]:
    first, span = math.log2(sizes[0]), math.log2(sizes[-1] / sizes[0]) or 1.0
    drawn_shares = [share for points in shares.values() for _, share in points]
    top = max([1.0, *drawn_shares]) * 1.04
    foot = max((x for x in (0.0, 0.25, 0.5, 0.75, 0.9) if x < min(drawn_shares, default=0.0)), default=0.0)
    # tenths around all ratios and 1, never tighter than 0.8 to 1.2
    drawn = [0.8, 1.2, *(ratio for points in ratios.values() for _, ratio in points)]
    low, high = math.floor(min(drawn) * 10.0 + 1e-9) / 10.0, math.ceil(max(drawn) * 10.0 - 1e-9) / 10.0

    def place(size: int) -> float:
        return WIDTH * (math.log2(size) - first) / span

    def height(value: float, bottom: float, ceiling: float) -> float:
        return 100.0 - 100.0 * (min(max(value, bottom), ceiling) - bottom) / (ceiling - bottom)

    def lines(points_of: Points, bottom: float, ceiling: float, words: str) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for impl, points in points_of.items():
            spots = [
                (f"{place(size):.1f} {height(v, bottom, ceiling):.2f}", size, words.format(v)) for size, v in points
            ]
            path = "M" + " ".join(spot for spot, _, _ in spots)
            made.append({"index": list(shares).index(impl), "path": path, "spots": spots})
        return [line for line in made if len(line["spots"]) > 1]

    # powers of two, about seven of them
    powers = range(math.ceil(math.log2(sizes[0])), math.floor(math.log2(sizes[-1])) + 1)
    return {
        "title": title,
        "lines": lines(shares, foot, top, "{:.0%} of the limit"),
        "ratios": lines(ratios, low, high, "{:.2f} times the best stock"),
        "ticks": [Tick(place(2**e), f"{2**e:,}") for e in powers[:: max(1, -(-len(powers) // 7))]],
        "limit": height(1.0, foot, top),
        "levels": [(f"{share:.3g}%", height(share / 100, foot, top)) for share in (foot * 100, foot * 50 + 50, 100)],
        "at_one": height(1.0, low, high),
        "ratio_levels": [(f"{x:.4g}", height(x, low, high)) for x in (low, 1.0, high)],
    }
