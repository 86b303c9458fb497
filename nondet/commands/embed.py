"""`nondet embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nondet.commands import options as o
from nondet.commands.output import Output, pick_device, progress_bar, say, set_threads
from nondet.errors import UserError

__all__ = ["embed"]

_BATCH_MOST = 4096


def embed(
    model: Annotated[
        str | None,
        typer.Option("--model", help="Folder or hub name of an encoder (BERT and its kin).", show_default=False),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts", help="Texts: .txt (one a line), .jsonl, .csv or .parquet (see --column).", show_default=False
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option("--column", help="Field or column that holds the text.", show_default="prompt, or the only one"),
    ] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            help="stock, invariant, both, or one family replaced, such as invariant:attention. Repeatable.",
            show_default="both",
            autocompletion=o.choices("stock", "invariant", "both"),
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Texts in a batch.")] = 32,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="float32, bfloat16 or float16.", autocompletion=o.choices("float32", "bfloat16", "float16")
        ),
    ] = "float32",
    device: o.DEVICE = "auto",
    seed: o.SEED = 0,
    threads: o.THREADS = None,
    out: o.OUT = None,
    force: o.FORCE = False,
    resume: o.RESUME = False,
    report: o.REPORT = None,
    as_json: o.JSON = False,
    fail_on: o.FAIL_ON = None,
    verbose: o.VERBOSE = False,
    quiet: o.QUIET = False,
) -> None:
    """Ask an encoder whether a text's vector depends on its batch, and what that does to nearest neighbours."""
    from nondet.commands.sample import implementations

    if model is None:
        raise UserError("no model was named", "Give --model: a folder or a hub name of an encoder.")
    if texts is None:
        raise UserError("no texts were named", "Give --texts: a file with one text a line.")
    if not 2 <= batch <= _BATCH_MOST:
        raise UserError(f"--batch {batch} makes no sense", f"Give from 2 to {_BATCH_MOST:,} texts.")
    impls = implementations(impl)
    output = Output.of(
        "embed",
        out=out, force=force, resume=resume, reports=report, as_json=as_json, fail_on=fail_on,
        verbose=verbose, quiet=quiet,
    )  # fmt: skip

    from nondet.embed import collect, describe, load_encoder
    from nondet.sampling.plan import load_prompts

    rows = load_prompts(texts, column)
    if len(rows) < 2:
        raise UserError(f"{texts} holds one text", "Give two or more: a text alone has no batch, and no neighbours.")
    target = pick_device(device)
    set_threads(threads)
    loaded = load_encoder(model, dtype, target)
    ids, cut = loaded.encode(rows)
    if cut:
        say(f"nondet: {cut} of {len(rows)} texts are longer than the {loaded.context} tokens of the model, and cut.")
    plan = describe(loaded, rows, ids, cut, impls=impls, batch=batch, seed=seed)
    writer = output.open("embed", plan, seed)
    with output.measuring(writer), progress_bar() as progress:
        tasks = {name: progress.add_task(name, total=None) for name in impls}
        collect(
            loaded,
            ids,
            impls,
            writer,
            batch=batch,
            seed=seed,
            progress=lambda name, arm: progress.update(tasks[name], description=f"{name}, {arm}"),
        )
    output.present()
