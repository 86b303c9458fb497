"""What `--help` shows: a command's common options in two columns; with `--help-all`, which each has, every option."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

# Command -> the options of its short help, beside those that are common wherever they exist.
COMMON = {
    "diagnose": "prompt prompt_file n within max_tokens load dtype device",
    "sample": "n prompt prompts max_tokens model impl turns load vary temperature endpoint device",
    "probe": "from_trace impl dtype m k n preset inputs full map device",
    "embed": "model texts column impl batch dtype device",
    "trace": "prompt max_tokens model impl load run request replay solo shrink most repro record against match device",
    "mismatch": "model trainer rollouts older arms n tokens device",
    "rl": "arms steps seeds task tokens lr epochs sampler model device",
    "gate": "impl rate confidence by endpoint model prompt load junit summary",
    "diff": "impl against",
    "env": "as_json",
    "report": "full records figure force quiet",
    "bench": "impl dtype m k n check device",
    "fingerprint": "name identify device",
    "fleet": "as_json",
    "certify": "cls impl dtype k n full vllm show forget device",
}
EVERYWHERE = "out report fail_on verbose"
_KINDS = {"int": "INT", "float": "NUMBER", "path": "PATH"}  # what typer calls a type -> what stands for a value

_ARGUMENTS = "Arguments"


class Described(NamedTuple):
    """One argument or option, for its help and for docs/commands.md."""

    names: str
    text: str
    default: str
    panel: str
    name: str


def _described(param: Any, ctx: Any) -> Described:
    """A parameter in words; its default is "" where there is none to name."""
    panel = getattr(param, "rich_help_panel", None)
    if param.param_type_name == "argument":
        names, panel = param.metavar, _ARGUMENTS
    elif param.secondary_opts:
        names = param.opts[0].replace("--", "--[no-]")
    else:
        names = ", ".join(sorted(param.opts, key=len))
        if not param.is_flag:
            # newer versions of Typer have no click type
            kind = (param.type.name if hasattr(param, "type") else param.display_type(ctx)).lower()
            names += f" {next((name for part, name in _KINDS.items() if part in kind), 'TEXT')}"
    default = param.show_default if isinstance(param.show_default, str) else ""
    if param.show_default is True and not param.required and param.default is not None:
        default = ("off", "on")[param.default] if param.secondary_opts else str(param.default)
    return Described(names, param.help or "", default, panel or "Options", param.name)


class Command(TyperCommand):
    """A command whose help is short unless all of it is asked for; a shell completes every option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note which help was asked for: --help and --help-all are one eager option."""
        ctx.meta[__name__] = "--help-all" in args
        return super().parse_args(ctx, args)

    def described(self, ctx: Any) -> tuple[str, list[Described]]:
        """The usage in one line; arguments, then options, but for that of the help itself."""
        found = [_described(param, ctx) for param in self.get_params(ctx) if "--help" not in param.opts]
        arguments = [one for one in found if one.panel == _ARGUMENTS]
        usage = " ".join([ctx.command_path, "[OPTIONS]", *(one.names for one in arguments)])
        return usage, [*arguments, *(one for one in found if one.panel != _ARGUMENTS)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, what the command does, its options by panel, examples, and how to see the rest."""
        usage, every = self.described(ctx)
        common = {_ARGUMENTS, *COMMON.get(str(self.name), "").split(), *EVERYWHERE.split()}
        shown = [one for one in every if ctx.meta.get(__name__) or common & {one.name, one.panel}]
        panels: dict[str, list[tuple[str, str]]] = {}
        for one in shown:
            default = f" [default: {one.default}]" if one.default else ""
            panels.setdefault(one.panel, []).append((one.names, one.text + default))
        last, lists = [self.epilog or ""], _lists(str(self.name))
        if len(shown) == len(every):
            panels |= lists
        else:
            options = sum(one.panel != _ARGUMENTS for one in every)
            also = f", and the {' and '.join(lists).lower()}" if lists else ""
            last.append(f"`{ctx.command_path} --help-all` shows all {options} options{also}.")
        formatter.write(_page(f"Usage: {usage}", self.help, panels, last))


def _lists(command: str) -> dict[str, list[tuple[str, str]]]:
    """What a command's arguments and options can name, by the title of its panel."""
    from nondet.core.registry import PROBES, classes, declared

    if command == "probe":
        from nondet.probes.models import PRESETS as SHAPES

        probes = [(name, text) for name, (_, text) in PROBES.items()]
        return {"Probes": probes, "Operators": _operators(), "Presets": [("shapes of", ", ".join(SHAPES))]}
    if command == "bench":
        return {"Operators": [(name, text) for name, text in _operators() if declared()[name].bench is not None]}
    if command == "certify":
        listed = []
        for c in classes().values():
            members = dict.fromkeys(name for of_operator in c.members.values() for name in of_operator)
            listed.append((c.name, f"on {c.device}, of {', '.join(c.members)}: {', '.join(members)}"))
        return {"Classes": listed}
    if command == "sample":
        from nondet.sampling.plan import PRESETS as LOADS

        loads = []
        for name, load in LOADS.items():
            others = f"among {load.others} others" if load.others else "one at a time"
            loads.append((name, f"{load.targets} requests a round, {others}, at most {load.budget} tokens a step"))
        families = {o.family.name: o.family.text for o in declared().values() if o.family is not None}
        return {"Loads": loads, "Families": list(families.items())}
    return {}


def _operators() -> list[tuple[str, str]]:
    """Every operator with its implementations, and with their devices where these are not all."""
    from nondet.core.operator import ANY
    from nondet.core.registry import operators

    listed = []
    for name, operator in operators().items():
        names = ["reference"]
        for one in operator.implementations:
            names.append(one.name if ANY in one.targets else f"{one.name} ({' and '.join(sorted(one.targets))})")
        listed.append((name, ", ".join(names)))
    return listed


class Group(TyperGroup):
    """The help of `nondet` itself: its commands by group."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, options, groups of commands, exit codes."""
        panels = {"Options": [_described(param, ctx)[:2] for param in self.get_params(ctx)]}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            panels.setdefault(command.rich_help_panel, []).append((name, command.help))
        formatter.write(_page(self.get_usage(ctx), self.help, panels, [self.epilog or ""]))


def _page(usage: str, text: str | None, panels: Mapping[str, Iterable[tuple[str, str]]], last: list[str]) -> str:
    console, wide = Console(), max((len(name) for rows in panels.values() for name, _ in rows), default=0)
    with console.capture() as seen:
        console.print(Text(usage, style="bold"), Padding(Text(f"\n{text}\n"), (0, 1)), sep="\n")
        for title, rows in panels.items():
            table = Table.grid(padding=(0, 2))
            table.add_column(style="cyan", no_wrap=True, min_width=wide)
            table.add_column()
            for name, said in rows:
                table.add_row(Text(name), Text(said))
            console.print(Panel(table, title=title, title_align="left", border_style="dim"))
        for paragraph in filter(None, last):
            console.print(Padding(Text(f"\n{paragraph}"), (0, 1)))
    return "\n".join(line.rstrip() for line in seen.get().splitlines())
