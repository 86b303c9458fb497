"""The command line: the commands, and how every failure ends. Nothing heavy is imported for `--help`."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from typing import Annotated, Any

import typer

from nondet.commands.help import Command, Group
from nondet.commands.output import command_of, drop_stdout, quick_interrupt
from nondet.core.registry import load_object
from nondet.errors import EngineStoppedError, UserError, no_commands, one_line, reason_of
from nondet.version import VERSION

__all__ = ["application", "main"]

_CODES = """Exit codes:
  0    finished; a divergence is a finding, not a failure
  1    nondet or the engine failed, nothing measured, or --fail-on undecided
  2    the input or the output is at fault
  3    divergence, wrong result or regression: gate, --fail-on, --check
  4    gate: too few samples to detect --rate
  130  stopped with Ctrl-C"""

_MEMORY = "Run less at a time (sizes, requests, prompts); what was finished is in the run file."
# Command -> its function, and what to type, for its help.
_COMMANDS = {
    "diagnose": (
        "nondet.services.diagnose:diagnose", "nondet diagnose ./my-model", "nondet diagnose --report report.html",
    ),
    "probe": (
        "nondet.services.probe:probe", "nondet probe all", "nondet probe matmul --preset qwen3-8b",
        "nondet probe matmul --impl mykernels:linear",
    ),
    "sample": (
        "nondet.services.sample:sample", "nondet sample --n 200",
        "nondet sample --model ./my-model --prompt 'Hello' --fail-on divergent",
    ),
    "embed": (
        "nondet.services.embed:embed", "nondet embed --model ./all-MiniLM-L6-v2 --texts texts.txt",
        "nondet embed ./my-encoder --texts texts.csv --column text",
    ),
    "trace": (
        "nondet.services.trace:trace", "nondet trace",
        "nondet trace --run sample.jsonl --request t000017 --repro repro.py",
        "nondet trace --replay --run sample.jsonl --request divergent --solo",
        "nondet trace --against stock.safetensors --impl invariant",
    ),
    "bench": (
        "nondet.services.bench:bench", "nondet bench", "nondet bench matmul --m 1 --m 64 --k 4096 --n 4096",
    ),
    "certify": (
        "nondet.commands.certify:certify", "nondet certify", "nondet certify --show",
        "nondet certify linear --impl mykernels:linear --class chain",
    ),
    "rl": (
        "nondet.services.rl:rl", "nondet rl", "nondet rl --arms stock,invariant --seeds 3 --report rl.html",
        "nondet rl --sampler fp8 --lr 1e-3 --steps 20",
    ),
    "mismatch": (
        "nondet.services.mismatch:mismatch", "nondet mismatch",
        "nondet mismatch sample.jsonl", "nondet mismatch --rollouts rollouts.jsonl --model ./checkpoint",
        "nondet mismatch --trainer dtype=float32,autocast=bfloat16,micro=4",
    ),
    "report": (
        "nondet.commands.report:report", "nondet report runs",
        "nondet report a.jsonl b.jsonl --out report.html --out report.md",
        "nondet report sample.jsonl --out completions.csv",
        "nondet report probe.jsonl --out map.pdf --figure class-map",
    ),
    "gate": (
        "nondet.commands.gate:gate", "nondet gate sample.jsonl --impl invariant",
        "nondet gate sample.jsonl --rate 1% --by request --junit gate.xml",
    ),
    "diff": (
        "nondet.commands.report:diff", "nondet diff before.jsonl after.jsonl",
        "nondet diff a.jsonl b.jsonl --impl stock --against invariant",
    ),
    "fingerprint": ("nondet.commands.fleet:fingerprint", "nondet fingerprint --out $(hostname).jsonl"),
    "fleet": (
        "nondet.commands.fleet:fleet", "nondet fleet fingerprints/", "nondet fleet a.jsonl b.jsonl --report fleet.html",
    ),
    "env": ("nondet.commands.env:env", "nondet env", "nondet env --json"),
}  # fmt: skip
# How `nondet --help` groups them.
_GROUPS = {
    "Start": ("diagnose", "sample", "probe", "embed"),
    "Explain": ("trace",),
    "Train": ("mismatch", "rl"),
    "CI": ("gate", "diff", "report", "env"),
    "Kernels": ("bench", "certify"),
    "Machines": ("fingerprint", "fleet"),
}
_LARGE = ("torch", "pandas", "matplotlib")  # what takes seconds to import
# Commands of 0.2 and 0.3 -> what to type now; for two releases.
_GONE = {
    "list": "nondet probe --help-all, or that of certify, bench or sample: each lists what it can be given",
    "export": "nondet report RUN --out FILE, where the suffix says what is written",
    "replay": "nondet trace --replay --run RUN --request ID",
    "tune": "python lab/tune.py, in a checkout of nondet's repository",
}


def application(only: str | None = None) -> typer.Typer:
    """The commands, or only the named one: loading the others takes longer than whatever it does first."""
    app = typer.Typer(
        name="nondet",
        cls=Group,
        help="Find out whether an LLM's output depends on its batch, where it differs, why, and what the cure costs.",
        epilog=_CODES,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help", "--help-all"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for name, group in ((name, group) for group, names in _GROUPS.items() for name in names):
        if only in _COMMANDS and name != only:
            continue
        target, *examples = _COMMANDS[name]
        command = load_object(target)
        if target.startswith("nondet.services."):  # it shows what it measured as all services do
            command = command_of(command)
        epilog = "\n".join(["Examples:", *(f"  {example}" for example in examples)]) if examples else None
        app.command(name, cls=Command, epilog=epilog, rich_help_panel=group)(command)
    return app


def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Print the version, if asked."""
    if version:
        typer.echo(f"nondet {VERSION}")
        raise typer.Exit


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: see `_CODES`, which the help prints."""
    # Idle OpenMP threads spin by default: next to one busy process on 2 cores, that made a round of sampling 80 times
    # slower. How threads wait changes no bits; torch reads the variable when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _prepare_streams()
    _warn_of_namesake()
    undo, given = quick_interrupt(), sys.argv[1:] if argv is None else argv
    sys.meta_path.insert(0, announcement := _Announcement(silent=bool({"-q", "--quiet"} & {*given})))
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, less) closed the pipe: not an error
        drop_stdout()
        return 0
    except OSError as error:
        return _system(error)
    finally:
        sys.meta_path.remove(announcement)
        undo()


class _Announcement:
    """Watches imports, and reports the first large one, which takes seconds, or half a minute."""

    def __init__(self, *, silent: bool) -> None:
        # once torch is loaded, libraries only check whether others are installed
        self._silent = silent or "_NONDET_COMPLETE" in os.environ or "torch" in sys.modules
        self._process = os.getpid()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing: the other finders do."""
        if name in _LARGE and not self._silent and os.getpid() == self._process:  # a worker prints nothing
            self._silent = True
            print(f"loading {name} ...", file=sys.stderr, flush=True)  # noqa: T201 - the command's own word


def _run(argv: list[str]) -> int:
    """Turn every failure into one line and a code; tracebacks are for our own bugs."""
    try:
        _check_text(argv)
        if argv and argv[0] in _GONE:
            raise UserError(f"there is no nondet {argv[0]} any more", f"Type {_GONE[argv[0]]}.")
        code: Any = application(argv[0] if argv else None)(args=argv, prog_name="nondet", standalone_mode=False)
    except UserError as error:
        return _fail(str(error))
    except EngineStoppedError as error:
        return _fail(f"{error}. What was finished is in the run file; {error.hint}", code=1)
    except KeyboardInterrupt:
        print("nondet: stopped", file=sys.stderr)  # noqa: T201 - the command's own last word
        return 130
    except SystemExit as error:
        if "_NONDET_COMPLETE" in os.environ:  # a shell's completion ends like this
            raise
        if isinstance(error.__context__, BrokenPipeError):  # rich, where the reader of the help closed the pipe
            drop_stdout()
            return 0
        # our own code never calls it: a user's kernel must not end a gate with its own code
        return _fail(f"something that was run called sys.exit({error.code!r}). Take that call out of it.", code=1)
    except OSError:
        raise
    except Exception as error:
        # Typer's own usage errors; recognized by shape, because newer versions of Typer contain their own click
        message = getattr(error, "format_message", None)
        if message is None:
            lacking = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            if lacking or "DefaultCPUAllocator" in str(error):  # torch raises a RuntimeError of its own
                return _fail(f"out of memory: {reason_of(error)}. {_MEMORY}", code=1)
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message())  # noqa: T201 - the help, shown without arguments
            return 2
        context: Any = getattr(error, "ctx", None)
        where, text = getattr(context, "command_path", "nondet"), message().rstrip(".")
        if text.startswith("Missing argument"):
            wanted = [p.metavar for p in context.command.params if p.param_type_name == "argument"]
            text += f". Usage: {where} {' '.join(wanted)}"
        elif context is not None:
            text = _with_hint(text, context.command.params, where)
        return _fail(f"{text}{'' if text.endswith('?') else '.'} See `{where} --help`.")
    return code if isinstance(code, int) else 0


def _with_hint(text: str, params: list[Any], where: str) -> str:
    """A usage error with what was probably meant: an argument given as an option, a short option, a number."""
    if (wrong := re.match(r"Invalid value for '(-[\w-]+)'.*: .*valid (integer|number|float)", text)) is not None:
        return f"{wrong[1]} must be a {'whole ' * (wrong[2] == 'integer')}number"
    if (unknown := re.match(r"No such option: (--[\w-]+)", text)) is not None:
        arguments = {f"--{p.name}": p.metavar for p in params if p.param_type_name == "argument"}
        if f"{where} {unknown[1]}" == "nondet rl --rollouts":  # until 0.5
            return f"{unknown[0]}. It is --sampler now"
        if unknown[1] in arguments:
            return f"{unknown[0]}. It is an argument here: {where} {arguments[unknown[1]]}"
        longer = [name for p in params for name in p.opts if name.startswith(unknown[1])]
        return f"{unknown[0]}. Did you mean {' or '.join(longer)}?" if longer else text
    return text


def _warn_of_namesake() -> None:
    """Warn in one line where another package called nondet is installed: the last one installed owns the command. A
    shell that asks for a completion gets no warning."""
    from importlib.metadata import PackageNotFoundError, version

    if "_NONDET_COMPLETE" in os.environ:
        return
    try:
        theirs = version("nondet")
    except PackageNotFoundError:
        return
    line = f"another package, nondet {theirs}, is installed beside nondet-llm and brings a command of the same name."
    print(f"nondet: {one_line(line)} Uninstall one of them.", file=sys.stderr)  # noqa: T201 - the command's own word


def _check_text(argv: list[str]) -> None:
    """Refuse arguments that are not text: no run file could store them and no page could show them."""
    for word in argv:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"the argument {word!r} is not UTF-8 text", "Rename the file, or retype it.") from None


def _prepare_streams() -> None:
    """Make stdout and stderr exist and take every character: what an encoding lacks is written as an escape."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed by the parent: the next file opened would take its number
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115 - for good
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _system(error: OSError) -> int:
    what = error.strerror or str(error)
    if error.filename is None:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT, errno.EFBIG):
            raise error
        drop_stdout()
        return _fail(f"can't write to stdout: {what}. Send it elsewhere.")
    return _fail(f"{error.filename}: {what}. Give another path.")


def _fail(message: str, code: int = 2) -> int:
    print(no_commands(f"nondet: {one_line(message)}"), file=sys.stderr)  # noqa: T201 - the command's own last word
    return code


if __name__ == "__main__":
    sys.exit(main())
