"""`nondet certify`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nondet.commands.common import (
    PipedConsole,
    check_fail_on,
    check_reports,
    gate,
    pick_device,
    pick_out,
    progress_bar,
    say,
    set_threads,
    show,
    write_reports,
)
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.result import Run

__all__ = ["CertifyRequest", "run"]


@dataclass(frozen=True)
class CertifyRequest:
    """The command line of `nondet certify`, as typed."""

    names: list[str]
    members: list[str] | None = None
    impls: list[str] | None = None
    cls: str | None = None
    device: str = "auto"
    dtypes: list[str] | None = None
    m: int | None = None
    k: int | None = None
    n: int | None = None
    preset: str | None = None
    model: Path | None = None
    inputs: list[str] | None = None
    full: bool = False
    seed: int = 0
    threads: int | None = None
    out: Path | None = None
    force: bool = False
    resume: bool = False
    reports: list[Path] = field(default_factory=list)
    as_json: bool = False
    fail_on: str | None = None
    show_standing: bool = False
    forget: bool = False


def run(request: CertifyRequest) -> None:
    """Put members to the questions of their class, streaming rows, and keep what was proven; then show it.

    Raises:
        UserError: bad input, found before anything is measured or written.
        typer.Exit: as `gate` says.
    """
    check_fail_on(request.fail_on)
    if request.show_standing or request.forget:
        _standing(request)
        return
    check_reports(request.reports, force=request.force)
    stem = f"certify-{'-'.join(request.names) or 'all'}"
    out = pick_out(request.out, stem, force=request.force, resume=request.resume)
    sys.path.insert(0, "")  # a user's module:function is looked for where they stand, as with `python -m`

    from nondet.certificates import certificates
    from nondet.certify.check import ask, row_key
    from nondet.certify.plan import plan
    from nondet.environment import collect
    from nondet.runfile import open_run, read_run

    device = pick_device(request.device)
    set_threads(request.threads)
    wish = _wish(request, device)
    asked = plan(wish)
    names = {impl: _user_name(impl) for impl in wish.impls}
    kept = certificates(device)
    described: dict[str, Any] = {
        "operators": request.names or ["all"],
        "class": request.cls,
        "members": request.members,
        "impls": request.impls,
        "device": device,
        "dtypes": request.dtypes,
        "sizes": {"m": request.m, "k": request.k, "n": request.n, "preset": request.preset},
        "model": str(request.model) if request.model else None,
        "inputs": request.inputs,
        "full": request.full,
        "seed": request.seed,
        "machine": kept.machine,
    }
    writer = open_run(
        out,
        command="certify",
        plan=described,
        environment=collect(request.seed),
        force=request.force,
        resume=request.resume,
    )
    total = sum(len(one.members) for one in asked)
    try:
        with progress_bar() as progress:
            task = progress.add_task("certifying", total=total)
            for one in asked:
                left = {n: c for n, c in one.members.items() if row_key(one.question, n) not in writer.done}
                progress.update(task, advance=len(one.members) - len(left), description=one.question.name)
                for row in ask(one.question, left, one.anchor, kept, names) if left else ():
                    writer.write(row)
                    progress.update(task, advance=1)
        writer.finish()
    except KeyboardInterrupt:
        writer.close()
        say(f"nondet: stopped; {len(writer.done)} of {total} rows are in {out}.")
        say(f"Repeat the command with --out {out} --resume.")
        raise
    finished = read_run(out)
    if request.as_json:
        show(finished, out, as_json=True)
    else:
        _print(finished)
    say(f"run file: {out}")
    say(f"certificates: {kept.path or 'kept in memory only'} (machine {kept.machine})")
    for path in write_reports(request.reports, [finished]):
        say(f"report: {path}")
    gate(finished, request.fail_on)


def _wish(request: CertifyRequest, device: str) -> Any:
    from nondet.certify.plan import Wish

    if request.preset is not None and request.model is not None:
        raise UserError("--preset and --model exclude each other", "Give one source of layer shapes.")
    layers: tuple[tuple[str, int, int], ...] = ()
    if request.preset is not None or request.model is not None:
        from nondet.probes.presets import preset, read_config

        layers = (
            preset(request.preset) if request.preset is not None else read_config(Path(str(request.model)))
        ).layers
        if request.k is not None or request.n is not None:
            raise UserError("--k and --n name one layer, and a model names others", "Give one of the two.")
    return Wish(
        device=device,
        operators=() if "all" in request.names else tuple(request.names),
        cls=request.cls,
        members=tuple(request.members or ()),
        impls=tuple(request.impls or ()),
        dtypes=tuple(request.dtypes) if request.dtypes else None,
        m=request.m,
        k=request.k,
        n=request.n,
        layers=layers,
        inputs=tuple(request.inputs) if request.inputs else None,
        full=request.full,
        seed=request.seed,
    )


def _user_name(impl: str) -> str:
    """ "package.module:function @digest of its file": another version of the file is another member."""
    import inspect

    from nondet.machine import digest_of
    from nondet.registry import load_object

    found = load_object(impl)
    try:
        source = Path(inspect.getsourcefile(inspect.unwrap(found)) or "").read_bytes()
    except (TypeError, OSError):  # a builtin, or made in memory: nothing tells one version from another
        return f"{impl} @unknown source"
    return f"{impl} @{digest_of(source)[:12]}"


def _print(finished: Run) -> None:
    """Verdicts in a table, then every exclusion, then what could not be asked, and what was tried."""
    from rich.table import Table

    from nondet.certify.findings import exclusions, findings, tried, unanswered
    from nondet.kernels.classes import classes

    console = PipedConsole()
    found = findings(finished.rows)
    table = Table("class", "operator", "member", "equal", "verdict")
    for one in found:
        out = sum(len(row.extra.get("left_at", [])) for row in one.left)
        equal = f"{one.variants - out} of {one.variants}"
        table.add_row(one.cls, f"{one.operator} {one.dtype}", one.member, equal, one.verdict)
    try:
        console.print(table, markup=False)
        for text in (*exclusions(found), *unanswered(found), *tried(finished.rows, found)):
            console.print(text, markup=False, highlight=False)
        for name in dict.fromkeys(one.cls for one in found):
            console.print(f"\n{name}: {classes()[name].order}", markup=False, highlight=False)
    except BrokenPipeError:
        return


def _standing(request: CertifyRequest) -> None:
    """--show and --forget: what is kept for this machine, and that there is more for others.

    Raises:
        UserError: --forget with something that would narrow it down.
    """
    from nondet.certificates import certificates, forget, read_folder

    if request.forget and (request.show_standing or request.names or request.members):
        raise UserError(
            "--forget deletes every certificate of this machine", "Give it alone, with --device and --threads at most."
        )
    device = pick_device(request.device)
    set_threads(request.threads)
    kept = certificates(device)
    if request.forget:
        gone = kept.path is not None and forget(kept.path)
        say(f"deleted {kept.path}" if gone else "no certificates are kept for this machine and toolchain")
        return
    others = [f for f in read_folder() if f.machine != kept.machine]
    if request.as_json:
        import msgspec

        listing = {
            "machine": kept.machine,
            "described": kept.described,
            "path": str(kept.path),
            "certificates": [msgspec.to_builtins(c) for c in kept.all()],
            "other_machines": [{"path": f.path, "certificates": len(f.certificates)} for f in others],
        }
        print(json.dumps(listing, indent=2))  # noqa: T201 - machine-readable output goes to stdout as it is
        return
    _print_standing(kept, others)


def _print_standing(kept: Any, others: list[Any]) -> None:
    from rich.table import Table

    console = PipedConsole()
    facts = ", ".join(
        f"{k} {v}" for k, v in kept.described.items() if isinstance(v, str | int | float) and k != "device"
    )
    try:
        console.print(f"This machine ({kept.machine}): {facts}", markup=False, highlight=False)
        for title, wanted in (("standing", True), ("excluded", False)):
            proofs = [c for c in kept.all() if c.holds == wanted]
            if not proofs:
                console.print(f"\n{title}: none", markup=False)
                continue
            table = Table(title=f"{title}: {len(proofs)}", title_justify="left")
            for column in ("member", "at", "evidence", "proven"):
                table.add_column(column, overflow="fold")
            for proof in proofs:
                table.add_row(proof.member, proof.key, proof.evidence, proof.proven[:10])
            console.print(table, markup=False)
        for one in others:
            count = f"{len(one.certificates)} proofs" + (f", {one.ignored} broken lines" if one.ignored else "")
            said = f"{one.path}: {count} of another machine, toolchain or version of our kernels; void here"
            console.print(said, markup=False, highlight=False)
    except BrokenPipeError:
        return
