"""What commands share: what they print and where, reports, the answer to --fail-on, and options made of dataclasses."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer
from rich.console import Console

from nondet.core.registry import REPORTERS
from nondet.core.runfile import check_free, check_outputs
from nondet.errors import UserError, no_commands, one_line
from nondet.services import options as o
from nondet.services.run import Sink, end_now, options_of

if TYPE_CHECKING:
    from rich.progress import Progress

    from nondet.core.records import Run

# Characters that JSON leaves as they are and that a terminal acts on (C1 controls, overrides, invisible
# separators), or a CI's runner (##[).
_UNSAFE = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|(?<=#)#(?=\\[|vso\\[)")


def check_shown(paths: Iterable[Path], *, force: bool, verbose: bool, quiet: bool) -> None:
    """Refuse, as a `UserError`, what can't be shown: a report's suffix, or one that exists; --verbose and --quiet."""
    if verbose and quiet:
        raise UserError("--verbose and --quiet exclude each other", "Give one of them.")
    for path in paths:
        if path.suffix not in REPORTERS:
            known = ", ".join(s for s in REPORTERS if s.startswith("."))
            raise UserError(f"no report ends in {path.suffix!r} ({path})", f"Known: {known}.")
        check_free(path, force=force)


def write_reports(
    paths: Iterable[Path], runs: list[Run], *, quiet: bool, full: bool = False, browse: bool = False
) -> None:
    """Render and write each report, and say where it is. `full`: markdown as long as GitHub accepts. `browse`: open the
    page in a browser; if none was requested, one is made in a temporary folder. Raises UserError: a path can't be
    written."""
    from nondet.core.registry import load_object
    from nondet.core.runfile import replace_text

    paths = [*paths]
    if browse and not any(path.suffix == ".html" for path in paths):
        paths.append(Path(tempfile.mkdtemp(prefix="nondet-")) / "report.html")
    for path in paths:
        render = load_object(REPORTERS[path.suffix][0])
        replace_text(path, render(runs, full=True) if full and path.suffix == ".md" else render(runs))
        say(f"report: {path}", quiet=quiet)
        if browse and path.suffix == ".html":
            open_page(path)


def open_page(path: Path) -> None:
    """Open a page in the user's browser."""
    if not webbrowser.open(path.resolve().as_uri()):
        say(f"no browser was found: open {path} yourself")


def say(text: str, *, quiet: bool = False) -> None:
    """A line on stderr, beside the results: where files are, how to go on. Whatever a name holds, it is one line."""
    if not quiet:
        print(no_commands(one_line(text, 4000)), file=sys.stderr)  # noqa: T201 - this is the commands' voice


class _Log:
    """A stream as it is, but for `no_commands`: rich writes whole lines, wrapped, at once."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(no_commands(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PipedConsole(Console):
    """Stdout: a reader that went away is the caller's to see, and no line that was wrapped is a command to a CI."""

    def __init__(self) -> None:
        super().__init__(file=cast("IO[str]", _Log(sys.stdout)))

    def on_broken_pipe(self) -> None:
        """Leave it to the caller."""
        raise BrokenPipeError


def put(lines: Iterable[str], *, as_json: bool = False) -> None:
    """Lines on stdout, safe to show there whatever they quote; of JSON the same JSON."""
    for line in lines:
        sys.stdout.write(_json_line(f"{line}\n", sys.stdout) if as_json else no_commands(f"{line}\n"))
    sys.stdout.flush()


def _json_line(line: str, stream: IO[str]) -> str:
    """The same JSON without a character that a terminal would act on, or that the stream can't encode."""
    safe = _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", line)
    if (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8":
        return safe
    return json.dumps(json.loads(safe)) + "\n"


def to_stdout(write: Callable[[], object]) -> str:
    """Call what writes to stdout. Returns why that failed, or "": a closed pipe (head, less) is no failure."""
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()
    except OSError as error:
        drop_stdout()
        return f"can't write to stdout: {error.strerror or error}"
    return ""


def drop_stdout() -> None:
    """Send what is still buffered nowhere: python flushes stdout again while it exits, and would complain."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def quick_interrupt() -> Callable[[], object]:
    """Ctrl-C ends the process at once, with 130 and one line, until something is measured: see `interruptible`. Nothing
    is on disk yet that could be lost, and an exception in the middle of an import can't be shown. Returns what undoes
    it."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    return partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, end_now))


@dataclass(frozen=True, kw_only=True)
class Terminal(Sink):
    """A person, or a script, that reads a command's streams: what it wants to see is options of every such command."""

    report: o.REPORT = None
    browse: o.OPEN = False
    as_json: o.JSON = False
    fail_on: o.FAIL_ON = None
    verbose: o.VERBOSE = False
    quiet: o.QUIET = False

    shown = True

    def say(self, text: str) -> None:
        """A line on stderr."""
        say(text)

    def progress(self) -> Progress:
        """A bar on a terminal; elsewhere, a log say, a line each half minute."""
        from rich import progress

        from nondet.core.progress import Lines

        console = Console(stderr=True)
        if console.is_dumb_terminal or not sys.stderr.isatty():
            return super().progress() if self.quiet else Lines(say)
        return progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    @contextmanager
    def steps(self) -> Iterator[Callable[[str], None]]:
        """Lines on stderr; the last one again, with its time, each half minute in which nothing else is said."""
        from nondet.core.progress import Lines

        with super().progress() if self.quiet else Lines(say) as progress:
            step = progress.add_task("", total=None)

            def tell(text: str) -> None:
                say(text)
                progress.reset(step, description=one_line(text, 100))

            yield tell

    def present(self, path: Path, notes: Iterable[str] = (), code: int = 0) -> None:
        """Write the reports, show the finished run on stdout, answer --fail-on, whose exit code comes before `code`.
        Neither depends on stdout. Raises UserError: a report or stdout can't be written."""
        from nondet.core.runfile import read_run
        from nondet.reports.terminal import render
        from nondet.verdict.gate import exit_code

        run = read_run(path)
        for line in (*notes, f"run file: {path}"):
            say(line, quiet=self.quiet)
        write_reports(self.report or [], [run], quiet=self.quiet, browse=self.browse)

        def show() -> None:
            if not self.as_json:
                render([run], PipedConsole(), verbose=self.verbose, quiet=self.quiet)
                return
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    sys.stdout.write(_json_line(line, sys.stdout))

        failed = to_stdout(show)
        decided, reason = exit_code(run, self.fail_on)
        if reason:
            say(f"nondet: {reason}")
        if decided or code:
            raise typer.Exit(decided or code)
        if failed:
            raise UserError(failed, f"The run itself is in {path}.")


def command_of(
    service: Callable[..., Any], sink: type[Terminal] = Terminal, without: tuple[str, ...] = ()
) -> Callable[..., None]:
    """The Typer command of service(request, sink), whose docstring is its help: the fields of its request and of the
    sink are its options, but for those in `without`."""
    request = get_type_hints(service)["request"]
    parameters = [Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    options = {part: [f for f in options_of(part) if f.name not in without] for part in (request, sink)}
    for part, declared in options.items():
        hints, known = get_type_hints(part), o.declared(part)
        arguments = [f.name for f in declared if isinstance(known[f.name][0], typer.models.ArgumentInfo)]
        if "model" in hints and not arguments:  # with an argument of its own, a command has only --model
            parameters.append(Parameter("named", Parameter.KEYWORD_ONLY, default=None, annotation=o.MODEL_ARGUMENT))
        for field in declared:
            option, check = known[field.name]
            if isinstance(check, o.OneOf) and option.autocompletion is None:
                option.autocompletion = o.choices(*check.names)
            if hints[field.name] is bool and option.default is ...:  # without a name of its own: no --no-NAME
                option.default = f"--{field.name.replace('_', '-')}"
            default = Parameter.empty if field.default is MISSING else field.default
            annotation: Any = Annotated[hints[field.name], option]
            parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    def command(ctx: typer.Context, **values: Any) -> None:
        # by name: Typer may bring its own click
        sources = {name: ctx.get_parameter_source(name) for name in values}
        typed = (n for n, source in sources.items() if source and source.name == "COMMANDLINE")
        values["given"] = frozenset("model" if name == "named" else name for name in typed)
        if (named := values.pop("named", None)) is not None:
            if values["model"] is not None:
                raise UserError(f"{named} and --model {values['model']} name two models", "Give one of them.")
            values["model"] = named
        terminal = sink(**{f.name: values.pop(f.name) for f in options[sink]})
        o.check_fields(terminal)
        check_outputs(values | {"report": terminal.report})
        check_shown(terminal.report or [], force=values["force"], verbose=terminal.verbose, quiet=terminal.quiet)
        service(request(**values), terminal)

    command.__doc__ = service.__doc__
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined] # inspect.signature looks there
    return command
