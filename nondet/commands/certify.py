"""`nondet certify`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nondet.commands import options as o
from nondet.commands.output import (
    Output,
    PipedConsole,
    check_fail_on,
    pick_device,
    progress_bar,
    say,
    set_threads,
    user_sources,
)
from nondet.errors import UserError, one_line

if TYPE_CHECKING:
    from nondet.core.records import Run

__all__ = ["certify"]

# Without -v: members in a table, and lines of a list.
_TABLE_MOST, _LINES_MOST = 8, 3


def certify(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPERATOR]...",
            help='linear, matmul, attention, rms-norm, ... (see `nondet list`), or "all".',
            autocompletion=o.operators,
        ),
    ] = None,
    member: Annotated[
        list[str] | None,
        typer.Option("--member", help="Only this member of the class, e.g. cublaslt. Repeatable.", show_default=False),
    ] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl", help="Your own package.module:function, put to the class. Repeatable.", show_default=False
        ),
    ] = None,
    cls: Annotated[
        str | None,
        typer.Option(
            "--class",
            help="A numerics class: chain, segments, ...",
            show_default=False,
            autocompletion=o.classes,
        ),
    ] = None,
    device: o.DEVICE = "auto",
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="Dtype of the operands. Repeatable.", show_default=False)
    ] = None,
    m: o.LARGEST_M = None,
    k: o.K = None,
    n: o.N = None,
    preset: o.PRESET = None,
    model: o.MODEL_FOLDER = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--inputs", help="order, order-wide, wide, cancel, outlier, bell. Repeatable.", show_default="all"
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="More shapes, head dims and layouts; takes minutes.")] = False,
    seed: o.SEED = 0,
    threads: o.THREADS = None,
    out: o.OUT = None,
    force: o.FORCE = False,
    resume: o.RESUME = False,
    report: o.REPORT = None,
    as_json: o.JSON = False,
    fail_on: o.FAIL_ON = None,
    show: Annotated[
        bool, typer.Option("--show", help="List what is proven and excluded here; measure nothing.")
    ] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Delete this machine's certificates.")] = False,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Prove by bits that kernels share one order of reduction on this machine, and keep the certificates."""
    if show or forget:
        check_fail_on(fail_on)
        if forget and (show or names or member):
            raise UserError(
                "--forget deletes every certificate of this machine",
                "Give it alone, with --device and --threads at most.",
            )
        _standing(device, threads, forget=forget, as_json=as_json)
        return
    output = Output.of(
        f"certify-{'-'.join(names or []) or 'all'}",
        out=out, force=force, resume=resume, reports=report, as_json=as_json, fail_on=fail_on,
        verbose=verbose, quiet=quiet,
    )  # fmt: skip

    from nondet.certify.check import ask, row_key
    from nondet.certify.plan import Wish
    from nondet.certify.plan import plan as plan_questions
    from nondet.core.certificates import certificates

    target = pick_device(device)
    set_threads(threads)
    planned = plan_questions(
        Wish(
            device=target,
            operators=() if "all" in (names or []) else tuple(names or []),
            cls=cls,
            members=tuple(member or ()),
            impls=tuple(impl or ()),
            dtypes=tuple(dtype) if dtype else None,
            m=m,
            k=k,
            n=n,
            layers=_layers(preset, model, sized=k is not None or n is not None),
            inputs=tuple(inputs) if inputs else None,
            full=full,
            seed=seed,
        )
    )
    users = {name: _user_name(name) for name in impl or ()}
    kept = certificates(target)
    described: dict[str, Any] = {
        "operators": names or ["all"],
        "class": cls,
        "members": member,
        "impls": impl,
        "device": target,
        "dtypes": dtype,
        "sizes": {"m": m, "k": k, "n": n, "preset": preset},
        "model": str(model) if model else None,
        "inputs": inputs,
        "full": full,
        "seed": seed,
        "machine": kept.machine,
    } | user_sources(impl or ())
    writer = output.open("certify", described, seed)
    total = sum(len(p.members) for p in planned)
    with output.measuring(writer, total), progress_bar() as progress:
        task = progress.add_task("certifying", total=total)
        for item in planned:
            left = {n: c for n, c in item.members.items() if row_key(item.question, n) not in writer.done}
            progress.update(task, advance=len(item.members) - len(left), description=item.question.name)
            for row in ask(item.question, left, item.anchor, kept, users) if left else ():
                writer.write(row)
                progress.update(task, advance=1)
    place = f"certificates: {kept.path or 'kept in memory only'} (machine {kept.machine})"
    output.present(None if quiet else partial(_print, verbose=verbose), lambda _: [place])


def _layers(preset: str | None, model: Path | None, *, sized: bool) -> tuple[tuple[str, int, int], ...]:
    """(name, K, N) of a model's layers, if one was named.

    Raises:
        UserError: a preset and a model, or a model and sizes of one layer.
    """
    if preset is not None and model is not None:
        raise UserError("--preset and --model exclude each other", "Give one source of layer shapes.")
    if preset is None and model is None:
        return ()
    from nondet.probes.models import preset as preset_sizes
    from nondet.probes.models import read_config

    layers = (preset_sizes(preset) if preset is not None else read_config(Path(str(model)))).layers
    if sized:
        raise UserError("--k and --n name one layer, and a model names others", "Give one of the two.")
    return layers


def _user_name(impl: str) -> str:
    """ "package.module:function @digest of its file": another version of the file is another member."""
    import inspect

    from nondet.core.certificates import digest_of
    from nondet.core.registry import load_object

    found = load_object(impl)
    try:
        source = Path(inspect.getsourcefile(inspect.unwrap(found)) or "").read_bytes()
    except (TypeError, OSError):  # a builtin, or made in memory: nothing tells one version from another
        return f"{impl} @unknown source"
    return f"{impl} @{digest_of(source)[:12]}"


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
        table.add_row(one.cls, f"{one.operator} {one.dtype}", one.member, equal, one.verdict)
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
            console.print(f"{held} of {len(found)} members in their class at every shape asked; all of them: -v")
            return
        for name in dict.fromkeys(one.cls for one in found):
            console.print(f"\n{name}: {classes()[name].order}", markup=False, highlight=False)
    except BrokenPipeError:
        return


def _standing(device: str, threads: int | None, *, forget: bool, as_json: bool) -> None:
    """--show and --forget: what is kept for this machine, and that there is more for others.

    Raises:
        UserError: the certificates can't be deleted.
    """
    from nondet.core.certificates import certificates, read_folder
    from nondet.core.certificates import forget as delete
    from nondet.core.runfile import disk_errors

    target = pick_device(device)
    set_threads(threads)
    kept = certificates(target)
    if forget:
        with disk_errors(kept.path or Path(), "Check who owns the folder, or set NONDET_CACHE."):
            gone = kept.path is not None and delete(kept.path)
        say(f"deleted {kept.path}" if gone else "no certificates are kept for this machine and toolchain")
        return
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
    _print_standing(kept, others)


def _print_standing(kept: Any, others: list[Any]) -> None:
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
