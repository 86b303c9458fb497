"""`nondet certify`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from nondet.errors import UserError
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, model_sizes, pick_device, set_threads, user_sources


@dataclass(frozen=True, kw_only=True)
class CertifyRequest(Request):
    """The options of `nondet certify`; `show` and `forget` are for the command, which then measures nothing."""

    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPERATOR]...",
            help='linear, matmul, attention, rms-norm, ... (see `nondet list`), or "all".',
            autocompletion=o.operators,
        ),
    ] = None
    member: Annotated[list[str] | None, o.opt("Only this member of the class, e.g. cublaslt. Repeatable.")] = None
    impl: Annotated[list[str] | None, o.opt("Your own package.module:function, put to the class. Repeatable.")] = None
    cls: Annotated[str | None, o.opt("A numerics class: chain, segments, ...", "--class", complete=o.classes)] = None
    device: o.DEVICE = "auto"
    dtype: Annotated[list[str] | None, o.opt("Dtype of the operands. Repeatable.")] = None
    m: o.LARGEST_M = None
    k: o.K = None
    n: o.N = None
    preset: o.PRESET = None
    model: o.MODEL_FOLDER = None
    inputs: Annotated[
        list[str] | None, o.opt("order, order-wide, wide, cancel, outlier, bell. Repeatable.", shown="all")
    ] = None
    full: Annotated[bool, o.opt("More shapes, head dims and layouts; takes minutes.", "--full")] = False
    show: Annotated[bool, o.opt("List what is proven and excluded here; measure nothing.", "--show")] = False
    forget: Annotated[bool, o.opt("Delete this machine's certificates.", "--forget")] = False
    seed: o.SEED = 0
    threads: o.THREADS = None


def certify(request: CertifyRequest, sink: Sink) -> Path:
    """Prove by bits that kernels share one order of reduction on this machine, and keep the certificates."""
    names, impls = request.names or [], request.impl or []
    output = Output.of(request, f"certify-{'-'.join(names) or 'all'}", sink)

    from nondet.certify.check import ask, row_key
    from nondet.certify.plan import Wish
    from nondet.certify.plan import plan as plan_questions
    from nondet.core.certificates import certificates

    target = pick_device(request.device)
    set_threads(request.threads)
    planned = plan_questions(
        Wish(
            device=target,
            operators=() if "all" in names else tuple(names),
            cls=request.cls,
            members=tuple(request.member or ()),
            impls=tuple(impls),
            dtypes=tuple(request.dtype) if request.dtype else None,
            m=request.m,
            k=request.k,
            n=request.n,
            layers=_layers(request),
            inputs=tuple(request.inputs) if request.inputs else None,
            full=request.full,
            seed=request.seed,
        )
    )
    users = {name: _user_name(name) for name in impls}
    kept = certificates(target)
    described: dict[str, Any] = {
        "operators": names or ["all"],
        "class": request.cls,
        "members": request.member,
        "impls": request.impl,
        "device": target,
        "dtypes": request.dtype,
        "sizes": {"m": request.m, "k": request.k, "n": request.n, "preset": request.preset},
        "model": str(request.model) if request.model else None,
        "inputs": request.inputs,
        "full": request.full,
        "seed": request.seed,
        "machine": kept.machine,
    } | user_sources(impls)
    writer = output.open("certify", described, request.seed)
    total = sum(len(p.members) for p in planned)
    with output.measuring(writer, total), sink.progress() as progress:
        task = progress.add_task("certifying", total=total)
        for item in planned:
            left = {n: c for n, c in item.members.items() if row_key(item.question, n) not in writer.done}
            progress.update(task, advance=len(item.members) - len(left), description=item.question.name)
            for row in ask(item.question, left, item.anchor, kept, users) if left else ():
                writer.write(row)
                progress.update(task, advance=1)
    return output.present([f"certificates: {kept.path or 'kept in memory only'} (machine {kept.machine})"])


def _layers(request: CertifyRequest) -> tuple[tuple[str, int, int], ...]:
    """(name, K, N) of a model's layers, if one was named.

    Raises:
        UserError: a preset and a model, or a model and sizes of one layer.
    """
    sizes = model_sizes(request.preset, request.model)
    if sizes is not None and (request.k is not None or request.n is not None):
        raise UserError("--k and --n name one layer, and a model names others", "Give one of the two.")
    return sizes.layers if sizes is not None else ()


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
