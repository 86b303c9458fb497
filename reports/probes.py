"""Probes in a report: cases under every implementation, in words, tables and class maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nondet.core.records import Axis, ClassError, Row
from nondet.core.registry import PROBES
from nondet.core.statistics import wilson
from nondet.errors import one_line
from nondet.reports.classes import ProductMap, axis_name, letter, map_text, product_map
from nondet.reports.document import ALL, BRIEF, Bit, Block, Details, Figure, Heading, Inline, Items, Paragraph, Table
from nondet.reports.text import apart_text, counted, error_span, extras, findings_text, run_rate, sentence
from nondet.verdict.findings import Finding, plural, sort_impls
from nondet.verdict.rows import axis_of, judge_rows

_DRAWN_MOST = 4  # class maps that are there without a fold
# Rows that come with completions, not from a probe.
_HELP = {
    "sample": "the model's own operators, at the sizes that the completions met",
    "bench": "row 0, or the last query, in batches of every size that was timed",
}


_MAPS = (
    "Every M was tried, with M equal rows; a class holds the calls that gave row 0 equal bits, and every other row "
    "these too, or the same other ones first. Letters begin anew in each line: sizes are not compared."
)
_ORDINARY = ("bell", "wide")  # inputs as a model has them: hard ones show an order, not an accuracy
_HOW_BAD = (
    "The error of each element in ULP of its dtype, of the first result of a class. More or less accurate "
    "is said where a 95% interval of the share of nearer elements, were they independent, leaves out one half."
)


@dataclass(frozen=True)
class CaseGroup:
    """One case under every implementation that ran it; the rows differ only in `impl` and their figures."""

    rows: tuple[Row, ...]

    @property
    def head(self) -> Row:
        """The row to read the case's own fields from."""
        return self.rows[0]

    @property
    def parted(self) -> bool:
        """Whether any implementation was inconsistent."""
        return any(r.differs for r in self.rows)

    @property
    def axis(self) -> str:
        """What the values are called."""
        return axis_name(self.head)

    @property
    def measured(self) -> tuple[Row, ...]:
        """Rows that hold figures."""
        return tuple(r for r in self.rows if r.measured)


@dataclass(frozen=True)
class CaseFamily:
    """Cases that differ only in the kind of input: tabs of one figure."""

    cases: tuple[CaseGroup, ...]

    @property
    def title(self) -> str:
        """The case's name without the kind of input."""
        return _without_inputs(self.cases[0].head)

    @property
    def parted(self) -> bool:
        """Whether any implementation was inconsistent on any input."""
        return any(c.parted for c in self.cases)


def _of_map(case: CaseGroup) -> bool:
    return product_map(case.measured) is not None


def _without_inputs(row: Row) -> str:
    return one_line(row.case.removesuffix(f", {row.inputs}"), 400)


@dataclass(frozen=True)
class ProbeSection:
    """One probe's cases, in the order of the run file; demonstrations come after measurements."""

    name: str
    help: str
    cases: tuple[CaseGroup, ...]

    @property
    def demonstration(self) -> bool:
        """Whether it shows a cause on purpose, and is not a finding about a library."""
        return all(c.head.demonstration for c in self.cases)

    @cached_property
    def families(self) -> tuple[CaseFamily, ...]:
        """The cases that were measured, those of one question on several inputs together; those with a difference
        first."""
        grouped: dict[tuple[str, str, str, str], list[CaseGroup]] = {}
        for case in self.cases:
            if case.measured and not _of_map(case):
                head = case.head
                grouped.setdefault((_without_inputs(head), head.dtype, head.device, head.varied), []).append(case)
        families = [CaseFamily(tuple(cases)) for cases in grouped.values()]
        return tuple(sorted(families, key=lambda f: not f.parted))

    @cached_property
    def maps(self) -> list[tuple[str, ProductMap]]:
        """(title, map): lines of one dtype, kind of input and other size, of all implementations."""
        grouped: dict[str, list[Row]] = {}
        for case in filter(_of_map, self.cases):
            row = case.measured[0]
            other = "K" if row.extra["map"]["axis"] == "N" else "N"
            sizes = f"{other}={row.shape.get(other)}"
            title = f"{row.case.partition(',')[0]}, {sizes}, {row.inputs}, {row.dtype}, {row.device}"
            grouped.setdefault(one_line(title, 200), []).extend(case.measured)
        return [(title, drawn) for title, rows in grouped.items() if (drawn := product_map(rows))]

    @property
    def parted(self) -> tuple[CaseGroup, ...]:
        """Cases in which an implementation was inconsistent."""
        return tuple(c for c in self.cases if c.parted)

    @property
    def clean(self) -> tuple[CaseGroup, ...]:
        """Cases that were measured and consistent. A case that was not measured is a problem, not a result."""
        return tuple(c for c in self.cases if c.measured and not c.parted)

    @property
    def summary(self) -> str:
        """ "stock: batch-dependent in 3 of 8 cases; invariant: ...": counts of verdicts, which add up to the run's."""
        rows = [r for c in self.cases for r in c.measured]
        return findings_text(judge_rows(rows)) or "nothing was measured"


def probe_sections(rows: Sequence[Row]) -> list[ProbeSection]:
    """A section for each probe, demonstrations last."""
    grouped: dict[str, dict[tuple[str, str, str], list[Row]]] = {}
    for row in rows:
        grouped.setdefault(row.probe, {}).setdefault((row.case, row.dtype, row.device), []).append(row)
    sections = [
        ProbeSection(
            name=name,
            help=_HELP.get(name, PROBES[name][1] if name in PROBES else ""),
            cases=tuple(CaseGroup(tuple(_by_impl(rows_of_case))) for rows_of_case in cases.values()),
        )
        for name, cases in grouped.items()
    ]
    return sorted(sections, key=lambda s: s.demonstration)


def _by_impl(rows: list[Row]) -> list[Row]:
    order = {impl: i for i, impl in enumerate(sort_impls(r.impl for r in rows))}
    return sorted(rows, key=lambda r: order[r.impl])


_SHORT: dict[str, str] = {
    Finding.RUN_TO_RUN: "run to run",
    Finding.BATCH: "batch",
    Finding.UNATTRIBUTED: "batch or run to run",
}


def hits_table(probes: Sequence[ProbeSection]) -> Table | None:
    """Of the first implementation that differs: operators down, findings across, in the counts of its verdict.

    So the first line is the headline, and the others add up to it. Demonstrations are not counted, as in verdicts. None
    where nothing was found.
    """
    rows = [row for probe in probes if not probe.demonstration for case in probe.cases for row in case.rows]
    found = ((v, [c.numbers for c in v.counts if "hits" in c.numbers]) for v in judge_rows(rows))
    verdict, counts = next(((v, counts) for v, counts in found if counts), (None, []))
    if verdict is None:
        return None
    columns = {str(_SHORT.get(n.get("finding", ""), n.get("finding") or n["varied"])): n["hits"] for n in counts}
    hit = Counter(operator for hits in columns.values() for operator, was_hit in hits if was_hit)
    others = {operator for hits in columns.values() for operator, _ in hits} - {*hit}
    lines = [("all", {*hit, *others}), *((name, {name}) for name, _ in hit.most_common())]
    lines += [(plural(len(others), "other operator"), others)] if others else []
    cells = []
    for name, operators in lines:
        mine = [[was_hit for operator, was_hit in hits if operator in operators] for hits in columns.values()]
        cells.append((name, *(f"{sum(hits)} of {len(hits)}" if hits else "–" for hits in mine)))
    head = (f"{verdict.impl}, cases that differ by", *columns)
    return Table(head, cells, ("", *["num"] * len(columns)), only=ALL)


def probe_blocks(probes: Sequence[ProbeSection], number: int, opened: bool) -> list[Block]:
    """A part for each probe, demonstrations last."""
    table = hits_table(probes)
    made: list[Block] = [table] if table else []
    for i, probe in enumerate(probes, 1):
        if probe.demonstration and not any(p.demonstration for p in probes[: i - 1]):
            made.append(Heading("Demonstrations"))
            made.append(Paragraph("Built to show a cause; no finding about a library.", "soft"))
        if probe.demonstration and probe.parted:
            made.append(Paragraph(f"{probe.name} (a demonstration, counted apart): {_shown_by(probe)}", only=BRIEF))
        place, mark = f"probe-{number}-{i}", ", differs" if probe.parted and not probe.demonstration else ""
        parts, said = _probe(probe, place, opened), sentence(probe.summary)
        made += _first_tree(probe)
        unfolded = opened and not probe.demonstration
        made.append(Details(probe.name, parts, place, said, probe.name + mark, opened=unfolded))
    clean = [probe.name for probe in probes if probe.clean and not probe.parted]
    if clean:
        made.append(Paragraph(f"no difference in any case of {', '.join(clean)}", only=BRIEF))
    return made


def _shown_by(probe: ProbeSection) -> str:
    drawn = [row for case in probe.parted for row in case.measured if row.distinct > 1 and not row.labels]
    said = [f"{row.case}: {counted(row.distinct)} distinct results" for row in drawn]
    return "; ".join(said) or probe.summary


def _first_tree(probe: ProbeSection) -> list[Block]:
    """On a terminal one tree: a proven one, one of several bit classes before one of a single class."""
    found = [(case, tree) for case in probe.cases for tree in orders(case)]
    if not found:
        return []
    case, tree = min(found, key=lambda one: (not one[1].proven, -one[0].measured[0].distinct, len(one[1].lines)))
    return [replace(block, only=BRIEF) for block in _orders(case, [tree], _TREE_LINES)]


def _probe(probe: ProbeSection, place: str, opened: bool) -> list[Block]:
    made: list[Block] = [Paragraph(sentence(probe.summary), only="vm")]
    if probe.help:
        made.append(Paragraph(sentence(probe.help), "soft", "p"))
    for i, (title, found) in enumerate(probe.maps, 1):
        made.append(Figure("product_map", found, f"{place}-map-{i}", title))
        lines: list[Inline] = [(Bit(impl, "code"), ": ", Bit(text, "code")) for impl, text in found.texts]
        made.append(Details(f"{title}, in words", [Items(lines)]))
    made += [Paragraph(_MAPS, "soft")] if probe.maps else []
    parted = [family for family in probe.families if family.parted]
    drawn = [Figure("family", family, f"{place}-{i}") for i, family in enumerate(parted, 1)]
    made += drawn[:_DRAWN_MOST]
    rest = drawn[_DRAWN_MOST:]
    if rest and opened:
        made.append(Details(plural(len(rest), "more class map"), rest, only="p"))
    elif rest:
        text = (
            f"{plural(len(rest), 'more group')} of cases differ: the table below has them, and `nondet report` of "
            "this run by itself draws them."
        )
        made.append(Paragraph(text, "soft", "p"))
    ordered = [(case, trees) for case in probe.cases if (trees := orders(case))]
    if ordered:
        every = [tree.proven for _, trees in ordered for tree in trees]
        text = f"Reduction trees: {sum(every)} of {len(every)} proven, each by predicting every bit of the sums tested."
        made.append(Paragraph(text))
        pages = [
            Figure("orders", trees, f"{place}-order-{i}", _named(case)) for i, (case, trees) in enumerate(ordered, 1)
        ]
        made.append(Details("Reduction trees", pages, opened=opened, only="p"))
        made.append(Details("Reduction trees", [block for pair in ordered for block in _orders(*pair)], only="vm"))
    if probe.parted:
        others = [case for case in probe.parted if not _of_map(case)]
        if others:
            made.append(Details("How far apart, and how far from float64", [_figures(others)], opened=opened))
        plain = [row for case in probe.parted for row in case.measured if row.inputs in _ORDINARY]
        told = [(row, i) for row in plain for i in range(len(row.class_errors))]
        if told:
            table: list[Block] = [_how_bad(told), Paragraph(_HOW_BAD, "soft")]
            made.append(Details("How bad: each class against float64", table, opened=opened, only="mp"))
        maps = [block for case in others for block in _maps(case)]
        made += [Details("Class maps", maps, only="vm")] if maps else []
    if probe.clean:
        trials = counted(sum(r.trials for c in probe.clean for r in c.measured))
        cases = plural(len(probe.clean), "other case" if probe.parted else "case")
        made.append(Paragraph(f"No difference in {cases} ({trials} trials).", "soft", "v"))
        few = not probe.parted and len(probe.clean) <= 12
        title = f"{plural(len(probe.clean), 'case')} without a difference: identical bits"
        if not probe.maps:  # which has a line for each
            made.append(Details(title, [_clean(probe.clean)], opened=few, only="mp"))
    return made


@dataclass(frozen=True)
class OrderDrawn:
    """The reduction tree of one class of a row."""

    impl: str
    m: int
    proven: bool
    said: str
    lines: tuple[tuple[int, str, str], ...]  # (depth, glyph, text) from the root down; repeated subtrees are drawn once
    between: str  # how it differs from the next class's tree; "" for the last


# What a line of a folded tree begins with or holds -> the glyph that a page draws.
_GLYPHS = (("binary tree", "tree"), ("lanes", "lanes"), ("splits", "lanes"), ("parts", "lanes"), ("step", "step"))
_DRAWN_DEEP = 8
_TREE_LINES = 6  # of a tree on a terminal


def orders(case: CaseGroup) -> list[OrderDrawn]:
    """The trees that a probe found, of every implementation; malformed entries of an edited file are left out."""
    found = []
    for row in case.measured:
        held = row.extra.get("reduction_trees")
        classes = held.get("classes") if isinstance(held, dict) else None
        between = held.get("between") if isinstance(held, dict) else None
        for i, tree in enumerate(classes if isinstance(classes, list) else ()):
            if not isinstance(tree, dict) or not isinstance(tree.get("drawn"), list):
                continue
            next_to = between[i] if isinstance(between, list) and i < len(between) else ""
            m, proven = tree["M"] if isinstance(tree.get("M"), int) else 0, tree.get("proven") is True
            which = f", of {tree['which']}" if tree.get("which") else ""
            said = f"unproven: {tree.get('failed_on') or 'no reason was kept'}"
            if proven:
                said = f"proven{which}: {tree.get('checked')} sums predicted bit for bit, {tree.get('arithmetic')}"
            lines = tuple(_order_lines(tree["drawn"]))
            found.append(OrderDrawn(row.impl, m, proven, one_line(said, 600), lines, one_line(str(next_to), 300)))
    return found


def _order_lines(drawn: list[Any]) -> Iterator[tuple[int, str, str]]:
    for line in drawn:
        if isinstance(line, list) and len(line) == 2 and isinstance(line[0], int) and line[0] >= 0:
            text = one_line(str(line[1]), 300)
            glyph = next((glyph for word, glyph in _GLYPHS if word in text.partition(":")[0]), "chain")
            yield min(line[0], _DRAWN_DEEP), glyph, text


def _named(case: CaseGroup) -> str:
    return f"{_without_inputs(case.head)}, {case.head.dtype}"


def _orders(case: CaseGroup, drawn: Sequence[OrderDrawn], most: int = 1000) -> list[Block]:
    heads: list[Inline] = [(Bit(tree.impl, "code"), f", M = {tree.m}: {tree.said}") for tree in drawn]
    notes = []
    for tree in drawn:
        more = [f"… and {plural(len(tree.lines) - most, 'more line')}"] if len(tree.lines) > most else []
        lines = ["· " * depth + text for depth, _, text in tree.lines[:most]]
        notes.append([*lines, *more, *filter(None, [tree.between])])
    return [Paragraph(Bit(_named(case), "strong")), Items(heads, notes)]


def _maps(case: CaseGroup) -> list[Block]:
    lines: list[Inline] = []
    for row in case.measured:
        text = map_text(row, 4 if axis_of(row) == Axis.ORDER else 8)  # which order gave which class shows little
        lines.append((Bit(row.impl, "code"), ": ", Bit(text or "no values listed", "code")))
    lines += [(Bit(impl, "code"), ": ", Bit(text)) for impl, text in extras(case.measured)]
    return [Paragraph((Bit(case.head.case, "strong"), f", {case.head.dtype}")), Items(lines)]


def _figures(cases: Sequence[CaseGroup]) -> Table:
    rows = [row for case in cases for row in case.rows]
    styles = {"divergent": "bad", "error": "bad", "identical": ""}
    marks = [{"operator": r.operator, "impl": r.impl} | ({"parted": ""} if r.differs else {}) for r in rows]
    cells = []
    for r in rows:
        d, error = r.difference, r.worst_error or r.error
        cells.append(
            (
                Bit(f"{r.case}, {r.dtype}"),
                Bit(r.impl, "code"),
                Bit(r.status, styles.get(r.status, "dull")),
                f"{counted(r.distinct)} / {_trials(r)}" if r.trials else "–",
                apart_text(d) if d and d.mismatched else "–",
                str((d and d.first_mismatch) or "–"),
                error_span(r),
                counted(error.max_ulp) if r.error and error else "–",
            )
        )
    head = ("case", "impl", "result", "classes / trials", "how far apart", "first", "relative error", "error, max ULP")
    return Table(head, cells, ("wide", "nowrap", "", "num", "wide", "", "num", "num"), marks)


def _how_bad(told: Sequence[tuple[Row, int]]) -> Table:
    cells = []
    for row, label in told:
        e = row.class_errors[label]
        figures = (f"{e.median:.3g}", f"{e.p99:.3g}", f"{e.most:.3g}", f"{e.mean:+.2g}")
        named = (Bit(f"{row.case}, {row.dtype}"), Bit(row.impl, "code"), letter(label))
        cells.append((*named, *figures, _than_first(e) if label else "–"))
    head = ("case", "impl", "class", "median, ULP", "99%", "largest", "bias", "than class A")
    marks = [{"operator": row.operator, "impl": row.impl, "parted": ""} for row, _ in told]
    return Table(head, cells, ("wide", "nowrap", "", *["num"] * 4, "wide"), marks)


def _than_first(error: ClassError) -> str:
    apart = error.closer + error.farther
    if not apart:
        return "as near at every element"
    low, high = wilson(error.closer, apart)
    word = "more accurate" if low > 0.5 else "less accurate" if high < 0.5 else "merely different"
    nearer = f"nearer at {counted(error.closer)}, farther at {counted(error.farther)}"
    return f"{word}: {nearer} of {counted(error.elements)}"


def _trials(row: Row) -> str:
    return "; ".join(filter(None, (counted(row.trials), run_rate(row))))


def _clean(cases: Sequence[CaseGroup]) -> Table:
    rows = []
    for c in cases:
        impls = Bit(", ".join(r.impl if r.status == "identical" else f"{r.impl}: {r.status}" for r in c.rows))
        trials, errors = (", ".join(map(text, c.measured)) for text in (_trials, error_span))
        rows.append((Bit(f"{c.head.case}, {c.head.dtype}"), impls, trials, errors))
    marks = [{"operator": case.head.operator} for case in cases]
    return Table(("case", "impl", "trials", "relative error"), rows, ("wide", "", "num", "num"), marks)
