"""The part of a markdown report that is about servers."""

from __future__ import annotations

from nondet.reports.endpoint import EndpointSection
from nondet.reports.markdown_text import code, details, escape, table
from nondet.verdict.findings import plural

__all__ = ["endpoint_blocks"]


def endpoint_blocks(endpoint: EndpointSection) -> list[str]:
    """Servers and arms open, the rest folded."""
    blocks = ["### Servers", "\n".join(f"- {escape(line)}" for line in endpoint.servers) or "None answered."]
    if endpoint.arms:
        rows = [tuple(escape(cell) for cell in cells) for cells in endpoint.arms]
        blocks += ["Arms:", table(endpoint.ARMS_HEAD, rows)]
    if endpoint.comparisons:
        rows = [
            (code(impl), escape(prompt), escape(text), f"**{escape(finding)}**", escape(why) or "–")
            for impl, prompt, text, finding, why in endpoint.comparisons
        ]
        blocks.append(table(endpoint.COMPARISONS_HEAD, rows))
    if endpoint.omitted:
        blocks.append(f"… and {plural(endpoint.omitted, 'more comparison')}, in which nothing parted.")
    if endpoint.contract:
        rows = []
        for row in endpoint.contract:
            cells = [f"**{escape(answer)}** {escape(text, 400)}" for answer, text in row.answers]
            rows.append((escape(row.question), *cells))
        broken = plural(
            len(endpoint.broken), "question is not answered with yes", "questions are not answered with yes"
        )
        head = ("contract", *(code(impl) for impl in endpoint.impls))
        blocks.append(details(f"Contract: {broken}", [table(head, rows)]))
    if endpoint.latency:
        rows = [tuple(escape(cell) for cell in cells) for cells in endpoint.latency]
        blocks.append(details("Times", [table(endpoint.LATENCY_HEAD, rows)]))
    return blocks
