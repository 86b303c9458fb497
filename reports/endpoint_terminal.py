"""The part of a terminal report that is about servers: lines, since its tables are wider than a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from nondet.errors import one_line
from nondet.reports.endpoint import EndpointSection
from nondet.verdict.findings import plural

__all__ = ["print_endpoint"]


def _say(console: Console, text: str, style: str = "") -> None:
    """One paragraph of plain text."""
    console.print(Text(one_line(text, 4000), style=style))


def print_endpoint(endpoint: EndpointSection, console: Console) -> None:
    """Servers, contract, arms, times, comparisons."""
    for line in endpoint.servers:
        _say(console, line, "bold")
    _say(console, "Contract", "bold")
    for row in endpoint.contract:
        for impl, (answer, seen) in zip(endpoint.impls, row.answers, strict=True):
            who = f"{impl}: " if len(endpoint.impls) > 1 else ""
            style = {"yes": "green", "no": "red"}.get(answer, "yellow")
            question = one_line(f"{who}{row.question}", 200)
            text = Text.assemble((f"{answer:8}", style), question, (f": {one_line(seen)}", "dim"))
            console.print(Padding(text, (0, 0, 0, 2)))
    for title, head, rows in (
        ("Arms", endpoint.ARMS_HEAD, endpoint.arms),
        ("Times", endpoint.LATENCY_HEAD, endpoint.latency),
    ):
        _say(console, title, "bold")
        for cells in rows:
            told = ", ".join(f"{name} {cell}" for name, cell in zip(head[1:], cells[1:], strict=True))
            console.print(
                Padding(Text.assemble((one_line(cells[0]), "bold"), ": ", one_line(told, 1000)), (0, 0, 0, 2))
            )
    _say(console, "Held against each other", "bold")
    for impl, prompt, seen, finding, why in endpoint.comparisons:
        line = f"{impl}, prompt {prompt}: {seen}: {finding}" + (f". {why}" if why else "")
        console.print(Padding(Text(one_line(line, 1000), overflow="fold"), (0, 0, 0, 2)))
    if endpoint.omitted:
        _say(console, f"  … and {plural(endpoint.omitted, 'more comparison')}, in which nothing parted.", "dim")
