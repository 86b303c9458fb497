"""One machine's fingerprint: whether it agrees with itself, and its digests."""

from __future__ import annotations

from nondet.core.records import Fingerprint, Run
from nondet.errors import one_line
from nondet.reports.document import Bit, Block, Cells, Heading, Paragraph, Table


def column(p: Fingerprint) -> str:
    """Of a matrix: a numerics class, stock's operators by kind, or a completion."""
    if p.operator == "completion":
        return f"{p.impl} completion"
    return one_line(p.cls or f"{p.impl} {p.operator}", 40)


def fingerprint_headline(run: Run) -> str:
    """Whether the machine agrees with itself, in a sentence without its full stop."""
    wrong = [p for p in run.fingerprints if p.wrong]
    measured = [p for p in run.fingerprints if p.status == "ok"]
    if wrong:
        worst = max(wrong, key=lambda p: p.differing)
        which = f"{worst.operator} {worst.dtype} {worst.case} ({worst.cls})"
        often = f"{worst.differing:,} of {worst.results:,} results"
        others = f", and {len(wrong) - 1} others" * (len(wrong) > 1)
        return one_line(f"this machine computes wrongly: it disagrees with itself in {which}, {often}{others}", 600)
    unsteady = sum(p.differing > 0 for p in measured)
    invariant = sum(p.results for p in measured if p.impl == "invariant")
    agrees = f"this machine agrees with itself, run to run and unit to unit, in {invariant:,} results"
    said = f"{len(measured)} digests; {agrees}"
    return said + f"; {unsteady} of stock's change from run to run" * bool(unsteady)


def fingerprint_blocks(run: Run, number: int) -> list[Block]:
    """Every digest, and the machine's own figures."""
    rows: list[Cells] = []
    for p in run.fingerprints:
        found = p.reason or f"{p.results - p.differing:,} of {p.results:,}"
        style = "bad" if p.wrong or p.status == "error" else ""
        rows.append(
            (Bit(column(p)), Bit(f"{p.operator} {p.case}"), Bit(p.dtype), Bit(p.digest, "code"), Bit(found, style))
        )
    made: list[Block] = [
        Heading("Fingerprint", f"fingerprint-{number}", "fingerprint"),
        Table(("class", "computation", "dtype", "digest", "equal"), rows, ("", "wide"), only="vmp"),
    ]
    for m in run.machines:
        known = {"host": m.host, "GPU": m.gpu_uuid, "serial": m.gpu_serial} | m.clocks_mhz | m.ecc
        facts = [f"{name} {value}" for name, value in known.items() if value != ""]
        if facts:
            made.append(Paragraph(Bit(one_line(", ".join(facts), 400)), "soft"))
    return made
