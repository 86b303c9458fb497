"""`nondet embed`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nondet.errors import UserError
from nondet.sampling.plan import load_prompts
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, pick_device
from nondet.services.sample import implementations

_BATCH_MOST = 4096


@dataclass(frozen=True, kw_only=True)
class EmbedRequest(o.Machine, Request):
    """The options of `nondet embed`."""

    model: str | None = o.own("Folder or hub name of an encoder (BERT and similar).")
    texts: Path | None = o.own("File of texts: .txt (one per line), .jsonl, .csv or .parquet (see --column).")
    column: str | None = o.own("Field or column that holds the text.", shown='"prompt", or the only one')
    impl: list[str] | None = o.own(
        "stock, invariant, both, or only one family invariant, such as invariant:attention. Repeatable.", shown="both"
    )
    batch: int = o.own(
        "Texts per batch.", default=32, check=o.Range(2, _BATCH_MOST, f"Give from 2 to {_BATCH_MOST:,} texts.")
    )
    dtype: str = o.own("float32, bfloat16 or float16.", default="float32", check=o.MODEL_DTYPES)

    def _check(self) -> None:
        if self.model is None:
            raise UserError("no model was named", "Give --model: a folder or a hub name of an encoder.")
        if self.texts is None:
            raise UserError("no texts were named", "Give --texts: a file with one text a line.")
        _ = self.impls

    @cached_property
    def impls(self) -> list[str]:
        """The implementations, each once."""
        return implementations(self.impl)


def embed(request: EmbedRequest, sink: Sink) -> Path:
    """Test whether an encoder's vectors depend on the batch, and what that does to nearest neighbours."""
    output, impls = Output(request, "embed", sink), request.impls

    from nondet.embed import build_arms, collect, describe, encode, load_encoder

    rows = load_prompts(Path(str(request.texts)), request.column)
    if len(rows) < 2:
        what = f"{request.texts} holds one text"
        raise UserError(what, "Give two or more: one text has no batch, and no neighbours.")
    loaded = load_encoder(str(request.model), request.dtype, pick_device(request.device, request.threads))
    ids, cut = encode(loaded, rows)
    if cut:
        sink.say(
            f"nondet: {cut} of {len(rows)} texts are longer than the {loaded.context} tokens of the model, and cut."
        )
    plan = describe(loaded, rows, ids, cut, impls=impls, batch=request.batch, seed=request.seed)
    with output.recording("embed", plan, request.seed) as writer, sink.progress() as progress:
        passes = len(build_arms([len(row) for row in ids], request.batch, request.seed))
        tasks = {name: progress.add_task(name, total=passes, start=False) for name in impls}

        def advance(name: str, arm: str) -> None:
            progress.start_task(tasks[name])
            progress.update(tasks[name], advance=1, description=f"{name}, {arm}")

        collect(loaded, ids, impls, writer, batch=request.batch, seed=request.seed, progress=advance)
    return output.present()
