"""`nondet certify`: its table, and what is kept already."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nondet.commands.output import PipedConsole, Terminal, command_of, say
from nondet.errors import one_line
from nondet.services import certify as service
from nondet.services.certify import CertifyRequest
from nondet.services.run import pick_device

if TYPE_CHECKING:
    from nondet.certify.check import Finding
    from nondet.core.certificates import Certificates
    from nondet.core.records import Run

# Without -v: members in a table, and lines of a list.
_TABLE_MOST, _LINES_MOST = 8, 3


@dataclass(frozen=True, kw_only=True)
class CertifyTerminal(Terminal):
    """Members by class, where other commands have their report."""

    def render(self, run: Run) -> None:
        """Print the table, or of a quiet command the verdict; of vLLM's layers the report."""
        if self.quiet or run.layer_standings:
            super().render(run)
        else:
            _print(run, verbose=self.verbose)


def _certify(request: CertifyRequest, sink: CertifyTerminal) -> None:
    if not request.show and not request.forget:
        service.certify(request, sink)
        return
    from nondet.core.certificates import certificates

    kept = certificates(pick_device(request.device, request.threads))
    if request.forget:
        _forget(kept)
    else:
        _print_standing(kept, as_json=sink.as_json)


_certify.__doc__ = service.certify.__doc__
certify = command_of(_certify, CertifyTerminal)


def _print(finished: Run, *, verbose: bool) -> None:
    """Verdicts in a table, then every exclusion, then what could not be asked, and what was tried.

    Without `verbose` a long table is cut down to the members that left their class, and lists to their first lines.
    """
    from rich.table import Table

    from nondet.certify.check import exclusions, findings, tried, unanswered
    from nondet.core.registry import classes

    console = PipedConsole()
    found = findings(finished.rows)
    table = Table("class", "operator", "member", "equal", "verdict")
    brief = not verbose and len(found) > _TABLE_MOST
    for one in [one for one in found if one.left][:_TABLE_MOST] if brief else found:
        out = sum(len(row.extra.get("left_at", [])) for row in one.left)
        equal = f"{one.variants - out} of {one.variants}"
        table.add_row(one.cls, f"{one.operator} {one.dtype}", one.member, equal, _verdict(one, out))
    try:
        if table.row_count:
            console.print(table, markup=False)
        for lines in map(list, (exclusions(found), unanswered(found), tried(finished.rows, found))):
            shown = lines[:_LINES_MOST] if brief else lines
            for text in shown:
                console.print(one_line(text, 76) if brief else text, markup=False, highlight=False)
            if len(shown) < len(lines):
                console.print(f"… and {len(lines) - len(shown)} more: -v", markup=False, highlight=False)
        if brief:
            held = sum(not one.left for one in found)
            console.print(f"{held} of {len(found)} members in their class at every shape tested; all of them: -v")
            return
        for name in dict.fromkeys(one.cls for one in found):
            console.print(f"\n{name}: {classes()[name].order}", markup=False, highlight=False)
    except BrokenPipeError:
        return


def _verdict(one: Finding, out: int) -> str:
    """As the finding's own, but for a member that left its class in most cases."""
    if not out or 2 * out <= one.variants or out >= one.variants:
        return one.verdict
    return f"not in the class: {one.variants - out} of {one.variants} cases agree"


def _forget(kept: Certificates) -> None:
    """Delete what is kept for this machine; a `UserError` where that can't be."""
    from nondet.core.certificates import forget
    from nondet.core.runfile import disk_errors

    with disk_errors(kept.path or Path(), "Check who owns the folder, or set NONDET_CACHE."):
        gone = kept.path is not None and forget(kept.path)
    say(f"deleted {kept.path}" if gone else "no certificates are kept for this machine and toolchain")


def _print_standing(kept: Certificates, *, as_json: bool) -> None:
    """What is kept for this machine, and that there is more for others."""
    from nondet.core.certificates import read_folder

    others = [f for f in read_folder() if f.machine != kept.machine]
    if as_json:
        import msgspec

        listing = {
            "machine": kept.machine,
            "described": kept.described,
            "path": str(kept.path),
            "certificates": [msgspec.to_builtins(c) for c in kept.all()],
            "other_machines": [{"path": f.path, "certificates": len(f.certificates)} for f in others],
        }
        print(json.dumps(listing))  # noqa: T201 - machine-readable output goes to stdout as it is
        return

    from rich.table import Table
    from rich.text import Text

    console = PipedConsole()
    facts = ", ".join(
        f"{k} {v}" for k, v in kept.described.items() if isinstance(v, str | int | float) and k != "device"
    )
    try:
        console.print(one_line(f"This machine ({kept.machine}): {facts}"), markup=False, highlight=False)
        for title, wanted in (("standing", True), ("excluded", False)):
            proofs = [c for c in kept.all() if c.holds == wanted]
            if not proofs:
                console.print(f"\n{title}: none", markup=False)
                continue
            table = Table(title=f"{title}: {len(proofs)}", title_justify="left")
            for column in ("member", "at", "evidence", "proven"):
                table.add_column(column, overflow="fold")
            for proof in proofs:
                cells = (proof.member, proof.key, proof.evidence, proof.proven[:10])
                table.add_row(*(Text(one_line(cell)) for cell in cells))
            console.print(table, markup=False)
        for one in others:
            count = f"{len(one.certificates)} proofs" + (f", {one.ignored} broken lines" if one.ignored else "")
            count += f", {one.older} lines of an older schema" if one.older else ""
            said = f"{one.path}: {count} of another machine, toolchain or version of our kernels; void here"
            console.print(one_line(said), markup=False, highlight=False)
    except BrokenPipeError:
        return
