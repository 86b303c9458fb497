"""Two runs side by side: for the terminal, in markdown, JSON, and on one HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from nondet.diff import CompletionDiff, RunDiff
from nondet.errors import one_line
from nondet.reports.document import ALL, BRIEF, VERBOSE, Bit, Block, Cells, Heading, Paragraph, Table
from nondet.reports.html import render_page
from nondet.reports.markdown import blocks as as_markdown
from nondet.reports.terminal import renderables
from nondet.reports.text import escape
from nondet.verdict.findings import plural

_MOST = 6  # names of records that only one run has
_VALUE = 60

Names = tuple[str, str]
# Completion group -> (first token that differs, first logprob that differs) of the most common traces.
Firsts = Mapping[int, tuple[int | None, int | None]]


def headline(diff: RunDiff) -> str:
    """One sentence that claims nothing that was not compared."""
    parts = list(diff.verdicts) if diff.held else ["no record of A could be compared with one of B", *diff.verdicts]
    better = sum(change.better for change in diff.changes)
    other, same = len(diff.changes) - diff.worse - better, sum(kind.same for kind in diff.kinds)
    counts = {"got worse in B": diff.worse, "got better in B": better, "changed otherwise": other}
    parts += [f"{plural(n, 'record')} {what}" for what, n in counts.items() if n]
    compared = [c for c in diff.completions if not c.reason]
    if compared:
        groups = plural(len(compared), "group")
        parts.append(f"completions differ in {len(diff.differing)} of {groups} that could be compared")
    parts += [f"{plural(same, 'record')} unchanged"] if same else []
    only = [sum(len(getattr(kind, side)) for kind in diff.kinds) for side in ("only_a", "only_b")]
    missing = [f"{only[0]} only in A", f"{only[1]} only in B"] if any(only) else []
    unheld = len(diff.completions) - len(compared)
    missing += [f"{plural(unheld, 'group')} of completions can't be compared"] if unheld else []
    parts += [f"not matched: {', '.join(missing)}"] if missing else []
    if diff.failed_more:
        parts.append(f"more completions failed in B in {plural(diff.failed_more, 'group')}")
    return "; ".join(parts)


def show(diff: RunDiff, names: Names, firsts: Firsts, console: Console, *, verbose: bool, quiet: bool) -> None:
    """Print it, the headline last: the first rows of each table, all with `verbose`; with `quiet` only the headline."""
    if not quiet:
        for side, name in zip("AB", names, strict=True):
            console.print(Text(one_line(f"{side}: {name}", 300)))
        for part in renderables(blocks(diff, firsts), console, VERBOSE if verbose else BRIEF):
            console.print(part)
    console.print(Text(f"{one_line(headline(diff), 600)}.", style="bold"))


def _value(value: Any) -> Bit:
    return Bit("-" if value is None else one_line(value if isinstance(value, str) else json.dumps(value), _VALUE))


def _only(names: Sequence[str]) -> Bit:
    """How many, and the first names."""
    more = f"; … and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return Bit(f"{len(names):,}{': ' * bool(names)}{'; '.join(one_line(name, 200) for name in names[:_MOST])}{more}")


def _group_text(c: CompletionDiff, first: tuple[int | None, int | None] | None) -> str:
    if c.reason:
        return one_line(f"not compared: {c.reason}", 400)
    same, words = [], []
    for noun, digests in (("answer", c.tokens), ("trace", c.traces if c.with_logprobs else {})):
        only = [sum(not counts[1 - side] for counts in digests.values()) for side in (0, 1)]
        common = len(digests) - sum(only)
        if any(only):
            words.append(f"{plural(common, noun)} in both, {only[0]} only in A, {only[1]} only in B")
        elif digests:
            same.append(f"the same {plural(common, noun)}")
    words = [*([f"{' and '.join(same)} in both"] if same else []), *words]
    if not c.with_logprobs:
        words.append("logprobs are not in both runs: bits were not compared")
    if c.pairs:
        bits = f", {c.traces_alike:,} with equal bits" if c.with_logprobs else ""
        words.append(f"of {plural(c.pairs, 'request')} with one name {c.tokens_alike:,} have equal tokens{bits}")
    if c.ended_otherwise:
        words.append(f"{c.ended_otherwise:,} of them ended for another reason with all else equal")
    if first is not None:
        token, bit = first
        where = "are identical" if bit is None else "have equal tokens, and first differ in the logprob of"
        where = f"{where} token {bit}" if bit is not None else where
        words.append(f"the most common ones {where if token is None else f'first differ at token {token}'}")
    each = f"{plural(c.n_a, 'completion')} in each run"
    counts = each if c.n_a == c.n_b else f"{plural(c.n_a, 'completion')} in A and {c.n_b:,} in B"
    return f"{counts}: {'; '.join(words)}"


def blocks(diff: RunDiff, firsts: Firsts) -> list[Block]:
    """What is shown below both names: the tables that have rows, and the notes."""
    changes = [
        (Bit(c.name), Bit(one_line("; ".join(c.what), 400)), "worse" if c.worse else "better" if c.better else "")
        for c in diff.changes
    ]
    counts = [(k.name, f"{k.matched:,}", f"{k.same:,}", _only(k.only_a), _only(k.only_b)) for k in diff.kinds]
    groups = []
    for i, c in enumerate(diff.completions):
        name = ", ".join(part for part in (c.impl, c.arm, f"“{one_line(c.prompt, 40)}”") if part)
        groups.append((Bit(name), Bit(_group_text(c, firsts.get(i)))))
    environment, plan = (
        [(Bit(one_line(f["name"], 80)), _value(f["a"]), _value(f["b"])) for f in listed]
        for listed in (diff.environment, diff.plan)
    )
    sheets: tuple[tuple[str, Cells, Sequence[Cells]], ...] = (
        ("Environment", ("", "A", "B"), environment),
        ("Plan", ("", "A", "B"), plan),
        ("Moved", ("record", "A → B", ""), changes),
        ("Matched by key", ("records", "in both", "as before", "only in A", "only in B"), counts),
        ("Completions", ("of", "what was seen"), groups),
    )
    made: list[Block] = []
    if not diff.environment:
        made.append(Paragraph("No field of the environments differs.", "soft", ALL))
    for title, head, rows in sheets:
        if rows:
            kinds = ("wide", *("wide" if rows is groups else "cell" for _ in head[1:]))
            made += [Heading(title, level=2, only=ALL), Table(head, rows, kinds, lines=8, only=ALL)]
    return [*made, *(Paragraph(Bit(note), "soft", ALL, 3) for note in diff.notes)]


def markdown(diff: RunDiff, names: Names, firsts: Firsts) -> str:
    """For a pull request."""
    head = [f"# {escape(names[0], 200)} against {escape(names[1], 200)}", f"{escape(headline(diff), 1500)}."]
    return "\n\n".join([*head, *as_markdown(blocks(diff, firsts))]) + "\n"


def as_json(diff: RunDiff, names: Names, firsts: Firsts) -> str:
    """One JSON object on a line."""
    data: dict[str, Any] = {name: getattr(diff, name) for name in ("environment", "plan", "notes", "verdicts")}
    data |= {"a": names[0], "b": names[1], "headline": headline(diff), "completions": []}
    data |= {name: [vars(one) for one in getattr(diff, name)] for name in ("kinds", "changes")}
    for i, c in enumerate(diff.completions):
        token, logprob = firsts.get(i) or (None, None)
        data["completions"].append({**vars(c), "first_divergence": {"token": token, "logprob": logprob}})
    return json.dumps(data, ensure_ascii=True)


def render(diff: RunDiff, names: Names, firsts: Firsts) -> str:
    """The page. Its answer: "yes" where something of B differs from A, "no" where all that was compared is the same,
    "not known" where something was not compared."""
    changed = diff.changes or diff.differing or diff.failed_more
    answer = "yes" if changed else "no" if diff.compared else "not known"
    first, second = (one_line(name, 200) for name in names)
    said, parts = one_line(headline(diff), 1500), blocks(diff, firsts)
    return render_page("diff.html.j2", first=first, second=second, answer=answer, headline=said, blocks=parts)
