"""`nondet list`. Reads the registries alone: no torch."""

from __future__ import annotations

import json

from rich.table import Table

from nondet.commands import options as o
from nondet.commands.common import PipedConsole
from nondet.core.operator import ANY, Family
from nondet.core.registry import PROBES, REPORTERS, classes, declared, operators
from nondet.probes.models import PRESETS
from nondet.sampling.plan import PRESETS as LOADS

__all__ = ["list_registries"]


def _families() -> list[Family]:
    """What `batch_invariant` can replace by itself."""
    return list(dict.fromkeys(o.family for o in declared().values() if o.family is not None))


def list_registries(as_json: o.JSON = False) -> None:
    """List probes, implementations, classes, loads, families, presets of shapes, and reports."""
    if as_json:
        listing = {
            "probes": {name: text for name, (_, text) in PROBES.items()},
            "implementations": {
                name: {"reference": ["*"]} | {i.name: sorted(i.targets) for i in operator.implementations}
                for name, operator in operators().items()
            },
            "classes": {
                c.name: {
                    "device": c.device,
                    "dtypes": c.dtypes,
                    "order": c.order,
                    "formula": c.formula,
                    "members": {op: list(members) for op, members in c.members.items()},
                }
                for c in classes().values()
            },
            "presets": list(PRESETS),
            "loads": list(LOADS),
            "families": {f.name: f.text for f in _families()},
            "reports": {name: text for name, (_, text) in REPORTERS.items()},
        }
        print(json.dumps(listing))  # noqa: T201 - machine-readable output goes to stdout as it is
        return
    console = PipedConsole()
    probes = Table("probe", "what it asks", title="nondet probe NAME", title_justify="left")
    for name, (_, text) in PROBES.items():
        probes.add_row(name, text)
    probes.add_row("all", "every probe above")
    console.print(probes)
    by_operator = Table("operator", "implementation", "runs on", title="--impl", title_justify="left")
    for operator, declaration in operators().items():
        by_operator.add_row(operator, "reference", "any device")
        for implementation in declaration.implementations:
            targets = implementation.targets
            by_operator.add_row("", implementation.name, "any device" if ANY in targets else ", ".join(sorted(targets)))
    console.print(by_operator)
    by_class = Table("class", "device", "operators", "members", title="nondet certify --class", title_justify="left")
    for found in classes().values():
        names = dict.fromkeys(name for members in found.members.values() for name in members)
        by_class.add_row(found.name, found.device, ", ".join(found.members), ", ".join(names))
    console.print(by_class)
    loads = Table("load", "what it is", title="nondet sample --load", title_justify="left")
    for name, load in LOADS.items():
        others = f"{load.others} others beside" if load.others else "nobody beside, one request a step:"
        loads.add_row(name, f"{others} {load.targets} requests a round, budget {load.budget} tokens a step")
    console.print(loads)
    by_family = Table("family", "what it replaces", title="nondet sample --impl invariant:FAMILY", title_justify="left")
    for family in _families():
        by_family.add_row(family.name, family.text)
    console.print(by_family)
    console.print("nondet probe --preset: " + ", ".join(PRESETS), highlight=False)
    reports = Table("nondet report --out", "what it writes", title_justify="left")
    for suffix, (_, text) in REPORTERS.items():
        reports.add_row(suffix, text)
    console.print(reports)
