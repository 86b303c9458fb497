"""`nondet certify`."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nondet.errors import MisfitError, UserError
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, model_sizes, pick_device, source_of, user_sources
from nondet.services.sample import open_model

if TYPE_CHECKING:
    from nondet.certify.plan import Call, Question

_WORTH_SAYING_S = 10.0
_STEP = 256  # tokens of a step of vLLM's, unless --m is given


@dataclass(frozen=True, kw_only=True)
class CertifyRequest(o.Machine, Request):
    """The options of `nondet certify`; `show` and `forget` are for the command, which then measures nothing."""

    names: list[str] | None = o.own(
        'linear, matmul, attention, rms-norm, ... or "all"; --help-all lists classes.',
        metavar="[OPERATOR]...",
        complete=o.OPERATORS,
    )
    member: list[str] | None = o.own("Only this member of the class, e.g. cublaslt. Repeatable.")
    impl: list[str] | None = o.own("Your own package.module:function, to test. Repeatable.")
    cls: str | None = o.own("Numerics class: chain, segments, ...", "--class", complete=o.CLASSES)
    dtype: list[str] | None = o.own("Dtype of the operands. Repeatable.", check=o.PROBED)
    m: o.LARGEST_M = None
    k: o.K = None
    n: o.N = None
    preset: o.PRESET = None
    model: o.MODEL_FOLDER = None
    inputs: list[str] | None = o.own(
        "order, order-wide, wide, cancel, outlier, bell. Repeatable.",
        shown="all",
        check=o.OneOf(("order", "order-wide", "wide", "cancel", "outlier", "bell", "underflow"), o.KINDS.what),
    )
    full: bool = o.own("More shapes, head dims and layouts; takes minutes.", default=False)
    vllm: bool = o.own(
        "Test each layer of --model as vLLM would run it, with up to --m tokens per step.", default=False
    )
    show: bool = o.own("List what is proven and excluded on this machine; measure nothing.", default=False)
    forget: bool = o.own("Delete this machine's certificates.", default=False)

    def _check(self) -> None:
        if self.forget and (self.show or self.names or self.member):
            what = "--forget deletes every certificate of this machine"
            raise UserError(what, "Give it by itself, with --device and --threads at most.")
        if self.vllm and (self.names or self.member or self.impl or self.cls or self.show or self.forget):
            raise UserError("--vllm asks vLLM's layers", "Leave operators, members and classes out.")


def certify(request: CertifyRequest, sink: Sink) -> Path:
    """Check bit for bit that kernels share one order of reduction on this machine, and keep the certificates."""
    if request.vllm:
        return _under_vllm(request, sink)
    names, impls = request.names or [], request.impl or []
    output = Output(request, f"certify-{'-'.join(names) or 'all'}", sink)

    from nondet.certify.check import ask, estimate
    from nondet.certify.plan import Wish
    from nondet.certify.plan import plan as plan_questions
    from nondet.core.certificates import certificates
    from nondet.core.progress import in_words

    target = pick_device(request.device, request.threads)
    sizes = model_sizes(request.preset, request.model)
    if sizes is not None and (request.k is not None or request.n is not None):
        raise UserError("--k and --n name one layer, and a model names others", "Give one of the two.")
    lists: dict[str, Any] = {"dtypes": request.dtype, "inputs": request.inputs, "m": request.m and [request.m]}
    wish: dict[str, Any] = {name: tuple(value) if value else None for name, value in lists.items()}
    wish |= {name: getattr(request, name) for name in ("cls", "k", "n", "full", "seed")}
    wish |= {"operators": () if "all" in names else tuple(names), "layers": sizes.layers if sizes is not None else ()}
    planned = plan_questions(Wish(device=target, members=tuple(request.member or ()), impls=tuple(impls), **wish))
    for name in impls:
        _try(name, planned[0].question, planned[0].members[name])
    # another version of a user's file is another member
    users = {name: f"{name} @{(source_of(name) or '')[:12] or 'unknown source'}" for name in impls}
    kept = certificates(target)
    fields = {"class": "cls", "members": "member", "impls": "impl", "dtypes": "dtype"}
    fields |= {name: name for name in ("inputs", "full", "seed")}
    described: dict[str, Any] = {name: getattr(request, field) for name, field in fields.items()} | user_sources(impls)
    described |= {"operators": names or ["all"], "device": target, "machine": kept.machine}
    described["sizes"] = {name: getattr(request, name) for name in ("m", "k", "n", "preset")}
    described["model"] = str(request.model) if request.model else None
    with output.recording("certify", described, request.seed, sum(len(p.members) for p in planned)) as writer:
        left = []
        for p in planned:
            members = {name: c for name, c in p.members.items() if p.question.head(name).key not in writer.done}
            left += [p._replace(members=members)] if members else []
        seconds = estimate(left)
        if sum(seconds) > _WORTH_SAYING_S:
            sink.say(f"nondet: {sum(len(p.members) for p in left):,} rows will take about {in_words(sum(seconds))}.")
        with sink.progress() as progress:
            task = progress.add_task("certifying", total=sum(seconds))
            for item, each in zip(left, seconds, strict=True):
                progress.update(task, description=f"{item.question.name}, seconds")
                for row in ask(item.question, item.members, item.anchor, kept, users):
                    writer.write(row)
                    progress.update(task, advance=each / len(item.members))
    return output.present([f"certificates: {kept.path or 'kept in memory only'} (machine {kept.machine})"])


def _under_vllm(request: CertifyRequest, sink: Sink) -> Path:
    """Tests every layer's own kernel as vLLM would run it here, in vLLM's own process."""
    output = Output(request, "certify-vllm", sink)

    from nondet.sampling.plan import Load
    from nondet.vllm import ENABLED, OWN
    from nondet.vllm.engine import VllmEngine
    from nondet.vllm.plugin import Look

    steps, model = request.m or _STEP, None if request.model is None else str(request.model)
    own, ours = (os.environ.get(name) == "1" for name in (OWN, ENABLED))
    way = "invariant" if ours else "vllm-invariant" if own else "stock"
    wanted = {"engine": "vllm", "model": model, "dtype": (request.dtype or ["bfloat16"])[0]}
    loaded = open_model(SimpleNamespace(**wanted, device=request.device, threads=request.threads), sink)
    load = Load(others=0, targets=1, spread=1, prompt=(1, 1), tokens=(1, 1), budget=steps, requests=steps)
    with closing(VllmEngine(loaded, load, steps)) as engine:
        plan = {"vllm": way, "model": {"name": loaded.name, **loaded.identity}, "engine": engine.describe()}
        plan["device"] = loaded.device
        with output.recording("vllm", plan, request.seed) as writer, sink.steps() as step:
            step(f"vLLM starts as {way}")
            with engine.implementation(way):
                step("each layer's kernel is tested")
                look = Look()
                session = engine.run([], load, look)
            if session.fatal:
                raise UserError(session.fatal, "See docs/engines.md.")
            for record in look.records():
                if record.key not in writer.done:
                    writer.write(record)
    return output.present()


def _try(impl: str, question: Question, call: Call) -> None:
    """Call a user's function once; raises `MisfitError` if it does not take what its operator does."""
    from nondet.probes.base import checked, fitted

    call = fitted(question.operator, checked(question.operator, call), f"--impl {impl!r}")
    try:
        question.answer(question.prepare(question.kinds[0]), call, question.values[0])
    except Exception as error:  # any other error will be a row's reason
        if isinstance(error, MisfitError):
            raise
