"""The command line. Everything heavy is imported inside the commands: `nondet --help` must answer at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nondet.errors import UserError
from nondet.sampling.errors import EngineStoppedError
from nondet.text import one_line
from nondet.version import VERSION

__all__ = ["app", "main"]

app = typer.Typer(
    name="nondet",
    help="Find out whether an LLM's output depends on its batch, where it parts, why, and what the cure costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

OUT = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Run file to write (.jsonl). Default: a new file in runs/.", show_default=False),
]
FORCE = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
RESUME = Annotated[bool, typer.Option("--resume", help="Go on with the run file at --out, with the same options.")]
SEED = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of everything that is drawn.")]
DEVICE = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
THREADS = Annotated[
    int | None,
    typer.Option(
        "--threads", help="CPU threads. They change bits, so they are recorded either way.", show_default=False
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout, one JSON object a line.")]
REPORT = Annotated[
    list[Path] | None,
    typer.Option("--report", help="Also write a report: .html or .md. Repeatable.", show_default=False),
]
FAIL_ON = Annotated[
    str | None, typer.Option("--fail-on", help='"divergent": exit with 3 if anything diverged.', show_default=False)
]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Print the version, if asked."""
    if version:
        typer.echo(f"nondet {VERSION}")
        raise typer.Exit


@app.command("list")
def list_command(as_json: JSON = False) -> None:
    """List the probes, the operators' implementations, and the reports."""
    from nondet.commands.listing import show

    show(as_json)


@app.command()
def probe(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help='Probes to run (see `nondet list`), or "all".')],
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            help="stock, invariant, or your own package.module:function. Repeatable.",
            show_default="stock, invariant",
        ),
    ] = None,
    device: DEVICE = "auto",
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="bfloat16, float16, float32, ... Repeatable.", show_default=False),
    ] = None,
    m: Annotated[int | None, typer.Option("--m", help="Largest M (rows) of the sweep.", show_default=False)] = None,
    k: Annotated[int | None, typer.Option("--k", help="K: the axis that is summed over.", show_default=False)] = None,
    n: Annotated[int | None, typer.Option("--n", help="N: output features.", show_default=False)] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="Layer shapes of a real model, e.g. qwen3-8b.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Folder or config.json to read layer shapes from.", show_default=False),
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--inputs", help="bell, wide, cancel, outlier. Repeatable.", show_default=False)
    ] = None,
    runs: Annotated[
        int | None, typer.Option("--runs", help="Repetitions of run-to-run cases.", show_default=False)
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="The long sweep (M up to 4096) instead of the default list.")
    ] = False,
    seed: SEED = 0,
    threads: THREADS = None,
    out: OUT = None,
    force: FORCE = False,
    resume: RESUME = False,
    report: REPORT = None,
    as_json: JSON = False,
    fail_on: FAIL_ON = None,
) -> None:
    """Ask operators whether their bits depend on the batch: classes of equal bits, kernel names, ULP, error."""
    from nondet.commands.probe import ProbeRequest, run

    run(
        ProbeRequest(
            names=names,
            impls=impl,
            device=device,
            dtypes=dtype,
            m=m,
            k=k,
            n=n,
            preset=preset,
            model=model,
            inputs=inputs,
            runs=runs,
            full=full,
            seed=seed,
            threads=threads,
            out=out,
            force=force,
            resume=resume,
            reports=report or [],
            as_json=as_json,
            fail_on=fail_on,
        )
    )


@app.command()
def sample(
    n: Annotated[int, typer.Option("--n", help="Completions of the prompt under study.")] = 1000,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="The prompt. Default: the embedded model's.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="Read the prompt from a UTF-8 text file.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens of each completion.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Folder, hub name, or random weights such as random:qwen3-12x1024. Default: the embedded model.",
            show_default=False,
        ),
    ] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            help="stock, stock-no-cudnn (attention without cuDNN), invariant, both (stock and invariant), or one "
            "family replaced, such as invariant:attention. Repeatable.",
            show_default="both",
        ),
    ] = None,
    load: Annotated[
        str,
        typer.Option("--load", help='What runs alongside: none, light, default, heavy, or "others=60,budget=256,...".'),
    ] = "default",
    seed: SEED = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    device: DEVICE = "auto",
    threads: THREADS = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that a model repository brings. Off unless given.")
    ] = False,
    out: OUT = None,
    force: FORCE = False,
    resume: RESUME = False,
    report: REPORT = None,
    as_json: JSON = False,
    fail_on: FAIL_ON = None,
) -> None:
    """Complete one prompt N times under a changing load, and see whether, where and how the completions part."""
    from nondet.commands.sample import SampleRequest, run

    run(
        SampleRequest(
            n=n,
            prompt=prompt,
            prompt_file=prompt_file,
            max_tokens=max_tokens,
            model=model,
            impls=impl,
            load=load,
            seed=seed,
            dtype=dtype,
            device=device,
            threads=threads,
            trust_remote_code=trust_remote_code,
            out=out,
            force=force,
            resume=resume,
            reports=report or [],
            as_json=as_json,
            fail_on=fail_on,
        )
    )


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPERATOR]...",
            help="all, or some of: matmul, attention, rms-norm, rms-norm-residual, softmax, log-softmax, mean, "
            "logsumexp, grouped.",
            show_default="all",
        ),
    ] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            help="stock, invariant, a rival library by name, or your own package.module:function. Repeatable.",
            show_default="stock, invariant, and every rival that is installed",
        ),
    ] = None,
    device: DEVICE = "auto",
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            help="bfloat16, float16 or float32. Repeatable.",
            show_default="bfloat16 on CUDA, float32 on a CPU",
        ),
    ] = None,
    m: Annotated[
        list[str] | None,
        typer.Option(
            "--m",
            help="Rows (attention: batch): 16, or 1-4096 around the borders of tiles, or 1-4096:64. Repeatable.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", help="K of a product, a row operator's width, attention's KV length.", show_default=False),
    ] = None,
    n: Annotated[int | None, typer.Option("--n", help="N of a product.", show_default=False)] = None,
    jigsaw: Annotated[
        bool, typer.Option("--jigsaw", help="Products at M on both sides of every border of tiles, up to 4096.")
    ] = False,
    seed: SEED = 0,
    threads: THREADS = None,
    out: OUT = None,
    force: FORCE = False,
    resume: RESUME = False,
    report: REPORT = None,
    as_json: JSON = False,
    fail_on: FAIL_ON = None,
) -> None:
    """Time stock, invariant and rival kernels in one run, in turn, beside what the machine can do at most."""
    from nondet.commands.bench import BenchRequest, run

    run(
        BenchRequest(
            names=names or ["all"],
            impls=impl,
            device=device,
            dtypes=dtype,
            m=m or [],
            k=k,
            n=n,
            jigsaw=jigsaw,
            seed=seed,
            threads=threads,
            out=out,
            force=force,
            resume=resume,
            reports=report or [],
            as_json=as_json,
            fail_on=fail_on,
        )
    )


@app.command()
def tune(
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="K by N of a weight, as 4096x6144. Repeatable.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="Layer shapes of a real model, e.g. qwen3-8b.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Folder or config.json to read layer shapes from.", show_default=False),
    ] = None,
    m: Annotated[
        list[int] | None, typer.Option("--m", help="Rows. Repeatable.", show_default="19 from 1 to 8192")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="bfloat16, float16 or float32. Repeatable.", show_default="bfloat16"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Table to write (.json). Default: this GPU's, in the cache folder.", show_default=False
        ),
    ] = None,
    force: FORCE = False,
) -> None:
    """Measure on this GPU which invariant matmul is fastest at each shape. Changes speed, never bits."""
    from nondet.commands.tune import TuneRequest, run

    run(TuneRequest(shapes=shape or [], preset=preset, model=model, ms=m, dtypes=dtype, out=out, force=force))


@app.command()
def certify(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPERATOR]...", help='linear, matmul, attention, rms-norm, ... (see `nondet list`), or "all".'
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
        str | None, typer.Option("--class", help="A numerics class: chain, segments, ...", show_default=False)
    ] = None,
    device: DEVICE = "auto",
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="Dtype of the operands. Repeatable.", show_default=False)
    ] = None,
    m: Annotated[int | None, typer.Option("--m", help="Largest M (rows) of the sweep.", show_default=False)] = None,
    k: Annotated[int | None, typer.Option("--k", help="K: the axis that is summed over.", show_default=False)] = None,
    n: Annotated[int | None, typer.Option("--n", help="N: output features.", show_default=False)] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="Layer shapes of a real model, e.g. qwen3-8b.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Folder or config.json to read layer shapes from.", show_default=False),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--inputs", help="order, order-wide, wide, cancel, outlier, bell. Repeatable.", show_default="all"
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="More shapes, head dims and layouts; takes minutes.")] = False,
    seed: SEED = 0,
    threads: THREADS = None,
    out: OUT = None,
    force: FORCE = False,
    resume: RESUME = False,
    report: REPORT = None,
    as_json: JSON = False,
    fail_on: FAIL_ON = None,
    show: Annotated[
        bool, typer.Option("--show", help="List what is proven and excluded here; measure nothing.")
    ] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Delete this machine's certificates.")] = False,
) -> None:
    """Prove by bits that kernels share one order of reduction on this machine, and keep the certificates."""
    from nondet.commands.certify import CertifyRequest, run

    run(
        CertifyRequest(
            names=names or [],
            members=member,
            impls=impl,
            cls=cls,
            device=device,
            dtypes=dtype,
            m=m,
            k=k,
            n=n,
            preset=preset,
            model=model,
            inputs=inputs,
            full=full,
            seed=seed,
            threads=threads,
            out=out,
            force=force,
            resume=resume,
            reports=report or [],
            as_json=as_json,
            fail_on=fail_on,
            show_standing=show,
            forget=forget,
        )
    )


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run files of `nondet probe`, `sample`, `bench` and `certify`."),
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out", "-o", help="Report to write: .html or .md. Repeatable. Default: the terminal.", show_default=False
        ),
    ] = None,
    force: FORCE = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Read a run that was killed, without its cut-off line.")
    ] = False,
) -> None:
    """Turn run files into one report: terminal, .md or .html."""
    from nondet.commands.report import run

    run(runs, out or [], force=force, allow_truncated=allow_truncated)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: it ran (a divergence is a finding, not a failure). 1: something of ours failed. 2: the user's input.
    3: `--fail-on divergent`, and something diverged. 130: stopped with Ctrl-C.
    """
    # Idle OpenMP threads spin by default. Beside one other busy process on 2 cores, that made a round of sampling 80
    # times slower (docs/log.md). How threads wait changes no bits; torch reads the variable when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code: Any = app(args=argv, standalone_mode=False)
    except UserError as error:
        return _fail(str(error))
    except EngineStoppedError as error:
        _fail(f"{error}. What was finished is in the run file; run again with --force, or a smaller --load")
        return 1
    except KeyboardInterrupt:
        print("nondet: stopped", file=sys.stderr)  # noqa: T201 - the command's own last word
        return 130
    except BrokenPipeError:
        # the reader (head, less) went away: not an error, and python must not complain again while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # Typer's own usage errors; told by shape, since newer versions of Typer carry a click of their own
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message())  # noqa: T201 - the help that was asked for by giving nothing
            return 2
        return _fail(f"{message().rstrip('.')}. See `nondet --help`.")
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    print(f"nondet: {one_line(message)}", file=sys.stderr)  # noqa: T201 - the command's own last word
    return 2


if __name__ == "__main__":
    sys.exit(main())
