"""Probes in a report: cases under every implementation, in words, tables and class maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from nondet.core.records import Axis, ClassError, Row
from nondet.core.registry import PROBES
from nondet.core.statistics import wilson
from nondet.errors import one_line
from nondet.reports.classes import ProductMap, axis_name, letter, map_text, product_map
from nondet.reports.document import BRIEF, Bit, Block, Details, Figure, Heading, Inline, Items, Paragraph, Table
from nondet.reports.text import apart_text, counted, error_span, extras, findings_text, run_rate, sentence
from nondet.verdict.findings import plural, sort_impls
from nondet.verdict.rows import axis_of, judge_rows
from nondet.verdict.wording import phrase

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
_TREE_DEEP, _TREE_LINES = 8, 6  # steps to the right; lines of a tree on a terminal


class Case:
    """One case under every implementation that ran it; the rows differ only in `impl` and their figures."""

    def __init__(self, rows: Sequence[Row]) -> None:
        order = sort_impls(r.impl for r in rows)
        self.rows = sorted(rows, key=lambda r: order.index(r.impl))
        self.head = head = self.rows[0]  # to read the case's own fields from
        self.measured = [r for r in self.rows if r.measured]
        self.differs = any(r.differs for r in rows)
        self.axis = axis_name(head)  # what the values are called
        self.is_map = product_map(self.measured) is not None  # a line of one
        self.title = one_line(head.case.removesuffix(f", {head.inputs}"), 400)


Family = tuple[Case, ...]  # cases that differ only in the kind of input: tabs of one figure


class Probe:
    """One probe's cases, in the order of the run file; demonstrations come after measurements."""

    def __init__(self, name: str, cases: Sequence[Case]) -> None:
        self.name, self.cases = name, cases
        # it shows a cause on purpose, and is not a finding about a library
        self.demonstration = all(c.head.demonstration for c in cases)
        self.differing = [c for c in cases if c.differs]
        # a case that was not measured is a problem, not a result
        self.clean = [c for c in cases if c.measured and not c.differs]
        # counts of verdicts, which add up to the run's
        self.summary = findings_text(judge_rows([r for c in cases for r in c.measured])) or "nothing was measured"

    @cached_property
    def families(self) -> list[Family]:
        """The cases that were measured, those of one question on several inputs together; differing ones first."""
        grouped: dict[tuple[str, str, str, str], list[Case]] = {}
        for case in self.cases:
            if case.measured and not case.is_map:
                head = case.head
                grouped.setdefault((case.title, head.dtype, head.device, head.varied), []).append(case)
        return sorted(map(tuple[Case, ...], grouped.values()), key=lambda family: not any(c.differs for c in family))

    @cached_property
    def maps(self) -> list[tuple[str, ProductMap]]:
        """(title, map): lines of one dtype, kind of input and other size, of all implementations."""
        grouped: dict[str, list[Row]] = {}
        for case in self.cases:
            if case.is_map:
                row = case.measured[0]
                other = "K" if row.extra["map"]["axis"] == "N" else "N"
                sizes = f"{other}={row.shape.get(other)}"
                title = f"{row.case.partition(',')[0]}, {sizes}, {row.inputs}, {row.dtype}, {row.device}"
                grouped.setdefault(one_line(title, 200), []).extend(case.measured)
        return [(title, drawn) for title, rows in grouped.items() if (drawn := product_map(rows))]


def probes_of(rows: Sequence[Row]) -> list[Probe]:
    """Each probe with its cases, demonstrations last."""
    grouped: dict[str, dict[tuple[str, str, str], list[Row]]] = {}
    for row in rows:
        grouped.setdefault(row.probe, {}).setdefault((row.case, row.dtype, row.device), []).append(row)
    probes = [Probe(name, [*map(Case, cases.values())]) for name, cases in grouped.items()]
    return sorted(probes, key=lambda p: p.demonstration)


def probe_blocks(probes: Sequence[Probe], number: int, opened: bool) -> list[Block]:
    """A part for each probe, demonstrations last."""
    tested = judge_rows([row for p in probes if not p.demonstration for case in p.cases for row in case.rows])
    # the headline leaves operators out
    by_operator = [v for v in tested if v.is_fault and v.text != phrase(v.clauses, brief=True)][:1]
    made: list[Block] = [Paragraph(f"{v.impl}: {sentence(v.text)}", only=BRIEF, lines=4) for v in by_operator]
    for i, probe in enumerate(probes, 1):
        if probe.demonstration and not any(p.demonstration for p in probes[: i - 1]):
            made.append(Heading("Demonstrations"))
            made.append(Paragraph("Built to show a cause; no finding about a library.", "soft"))
        if probe.demonstration and probe.differing:
            drawn = [row for case in probe.differing for row in case.measured if row.distinct > 1 and not row.labels]
            results = "; ".join(f"{row.case}: {counted(row.distinct)} distinct results" for row in drawn)
            said = f"{probe.name} (a demonstration, counted apart): {results or probe.summary}"
            made.append(Paragraph(said, only=BRIEF))
        place, mark = f"probe-{number}-{i}", ", differs" if probe.differing and not probe.demonstration else ""
        trees = [(case, found) for case in probe.cases if (found := list(trees_of(case)))]
        if trees:  # on a terminal one: a proven one, one of several bit classes before one of a single class
            each = [(case, tree) for case, found in trees for tree in found]
            case, tree = min(each, key=lambda x: (not x[1].proven, -x[0].measured[0].distinct, len(x[1].lines)))
            made += [replace(block, only=BRIEF) for block in _drawn(case, [tree], _TREE_LINES)]
        parts, said = _probe(probe, trees, place, opened), sentence(probe.summary)
        unfolded = opened and not probe.demonstration
        made.append(Details(probe.name, parts, place, said, probe.name + mark, opened=unfolded))
    if clean := [probe.name for probe in probes if probe.clean and not probe.differing]:
        made.append(Paragraph(f"no difference in any case of {', '.join(clean)}", only=BRIEF))
    return made


def _probe(probe: Probe, trees: Sequence[tuple[Case, list[Tree]]], place: str, opened: bool) -> list[Block]:
    made: list[Block] = [Paragraph(sentence(probe.summary), only="vm")]
    if help_ := _HELP.get(probe.name, PROBES[probe.name][1] if probe.name in PROBES else ""):
        made.append(Paragraph(sentence(help_), "soft", "p"))
    for i, (title, found) in enumerate(probe.maps, 1):
        made.append(Figure("product_map", found, f"{place}-map-{i}", title))
        lines: list[Inline] = [(Bit(impl, "code"), ": ", Bit(text, "code")) for impl, text in found.texts]
        made.append(Details(f"{title}, in words", [Items(lines)]))
    made += [Paragraph(_MAPS, "soft")] if probe.maps else []
    differing = [family for family in probe.families if any(c.differs for c in family)]
    drawn = [Figure("family", family, f"{place}-{i}") for i, family in enumerate(differing, 1)]
    made += drawn[:_DRAWN_MOST]
    if rest := drawn[_DRAWN_MOST:]:
        said = "the table below has them, and `nondet report` of this run by itself draws them."
        more = Paragraph(f"{plural(len(rest), 'more group')} of cases differ: {said}", "soft", "p")
        made.append(Details(plural(len(rest), "more class map"), rest, only="p") if opened else more)
    if trees:
        every = [tree.proven for _, of in trees for tree in of]
        text = f"Reduction trees: {sum(every)} of {len(every)} proven, each by predicting every bit of the sums tested."
        blocks = [block for case, of in trees for block in _drawn(case, of)]
        made += [Paragraph(text), Details("Reduction trees", blocks, opened=opened)]
    if probe.differing:
        made += _differences([case for case in probe.differing if not case.is_map], probe.differing, opened)
    if probe.clean:
        trials = counted(sum(r.trials for c in probe.clean for r in c.measured))
        cases = plural(len(probe.clean), "other case" if probe.differing else "case")
        made.append(Paragraph(f"No difference in {cases} ({trials} trials).", "soft", "v"))
        few = not probe.differing and len(probe.clean) <= 12
        title = f"{plural(len(probe.clean), 'case')} without a difference: identical bits"
        if not probe.maps:  # which has a line for each
            made.append(Details(title, [_clean(probe.clean)], opened=few, only="mp"))
    return made


class Tree(NamedTuple):
    """The reduction tree of one class of a row."""

    proven: bool
    head: Inline
    lines: Sequence[str]  # from the root down, a dot for each step to the right; repeated subtrees are there once
    between: str  # how it differs from the next class's tree; "" for the last


def trees_of(case: Case) -> Iterator[Tree]:
    """The trees that a probe found, of every implementation; malformed entries of an edited file are left out."""
    for row in case.measured:
        held = row.extra.get("reduction_trees")
        classes, between = (held.get(key) if isinstance(held, dict) else None for key in ("classes", "between"))
        for i, tree in enumerate(classes if isinstance(classes, list) else ()):
            if not isinstance(tree, dict) or not isinstance(tree.get("drawn"), list):
                continue
            said = f"unproven: {tree.get('failed_on') or 'no reason was kept'}"
            if proven := tree.get("proven") is True:
                which = f", of {tree['which']}" if tree.get("which") else ""
                said = f"proven{which}: {tree.get('checked')} sums predicted bit for bit, {tree.get('arithmetic')}"
            m = tree["M"] if isinstance(tree.get("M"), int) else 0
            head = (Bit(row.impl, "code"), f", M = {m}: {one_line(said, 600)}")
            lines = [
                "· " * min(line[0], _TREE_DEEP) + one_line(str(line[1]), 300)
                for line in tree["drawn"]
                if isinstance(line, list) and len(line) == 2 and isinstance(line[0], int) and line[0] >= 0
            ]
            next_to = between[i] if isinstance(between, list) and i < len(between) else ""
            yield Tree(proven, head, lines, one_line(str(next_to), 300))


def _drawn(case: Case, trees: Sequence[Tree], most: int = 1000) -> list[Block]:
    notes = []
    for tree in trees:
        more = [f"… and {plural(len(tree.lines) - most, 'more line')}"] if len(tree.lines) > most else []
        notes.append([*tree.lines[:most], *more, *filter(None, [tree.between])])
    return [Paragraph(Bit(f"{case.title}, {case.head.dtype}", "strong")), Items([tree.head for tree in trees], notes)]


def _differences(cases: Sequence[Case], differing: Sequence[Case], opened: bool) -> list[Block]:
    """How far apart, how bad, and which class each value is in; `cases`: those that differ and are no line of a map."""
    made: list[Block] = [Details("How far apart, and how far from float64", [_figures(cases)], opened=opened)]
    plain = [row for case in differing for row in case.measured if row.inputs in _ORDINARY]
    if errors := [(row, label) for row in plain for label in range(len(row.class_errors))]:
        table: list[Block] = [_how_bad(errors), Paragraph(_HOW_BAD, "soft")]
        made.append(Details("How bad: each class against float64", table, opened=opened, only="mp"))
    return [*made, Details("Class maps", [block for case in cases for block in _map(case)], only="vm")]


def _map(case: Case) -> list[Block]:
    lines: list[Inline] = []
    for row in case.measured:
        text = map_text(row, 4 if axis_of(row) == Axis.ORDER else 8)  # which order gave which class shows little
        lines.append((Bit(row.impl, "code"), ": ", Bit(text or "no values listed", "code")))
    lines += [(Bit(impl, "code"), ": ", Bit(text)) for impl, text in extras(case.measured)]
    return [Paragraph((Bit(case.head.case, "strong"), f", {case.head.dtype}")), Items(lines)]


def _figures(cases: Sequence[Case]) -> Table:
    rows = [row for case in cases for row in case.rows]
    styles = {"divergent": "bad", "error": "bad", "identical": ""}
    cells = []
    for r in rows:
        d, error = r.difference, r.worst_error or r.error
        named = (Bit(f"{r.case}, {r.dtype}"), Bit(r.impl, "code"), Bit(r.status, styles.get(r.status, "dull")))
        classes = f"{counted(r.distinct)} / {_trials(r)}" if r.trials else "–"
        apart, first = apart_text(d) if d and d.mismatched else "–", str((d and d.first_mismatch) or "–")
        ulp = counted(error.max_ulp) if r.error and error else "–"
        cells.append((*named, classes, apart, first, error_span(r), ulp))
    head = ("case", "impl", "result", "classes / trials", "how far apart", "first", "relative error", "error, max ULP")
    kinds = ("wide", "nowrap", "", "num", "wide", "", "num", "num")
    return Table(head, cells, kinds, [_marks(row) for row in rows])


def _marks(row: Row) -> dict[str, str]:
    """For the page's filter."""
    return {"operator": row.operator, "impl": row.impl} | ({"differs": ""} if row.differs else {})


def _how_bad(errors: Sequence[tuple[Row, int]]) -> Table:
    cells = []
    for row, label in errors:
        e = row.class_errors[label]
        figures = (f"{e.median:.3g}", f"{e.p99:.3g}", f"{e.most:.3g}", f"{e.mean:+.2g}")
        named = (Bit(f"{row.case}, {row.dtype}"), Bit(row.impl, "code"), letter(label))
        cells.append((*named, *figures, _than_first(e) if label else "–"))
    head = ("case", "impl", "class", "median, ULP", "99%", "largest", "bias", "than class A")
    return Table(head, cells, ("wide", "nowrap", "", *["num"] * 4, "wide"), [_marks(row) for row, _ in errors])


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


def _clean(cases: Sequence[Case]) -> Table:
    rows = []
    for c in cases:
        impls = Bit(", ".join(r.impl if r.status == "identical" else f"{r.impl}: {r.status}" for r in c.rows))
        trials, errors = (", ".join(map(text, c.measured)) for text in (_trials, error_span))
        rows.append((Bit(f"{c.head.case}, {c.head.dtype}"), impls, trials, errors))
    marks = [{"operator": case.head.operator} for case in cases]
    return Table(("case", "impl", "trials", "relative error"), rows, ("wide", "", "num", "num"), marks)
