"""Which kernels compute each layer of a loaded model: in the log, in a run file, and as a reason not to start."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nondet.engines import ALLOWED, WRITTEN, Engine
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.core.records import LayerStanding

REPLACED, CERTIFIED, ELEMENTWISE, AT_RISK = "replaced", "certified stock", "elementwise", "at risk"


class Standing(NamedTuple):
    """What computes one layer, or the configuration as a whole, and why it has this standing."""

    layer: str
    kind: str
    standing: str
    why: str


def ancestors(module: Any) -> set[str]:
    """The names of its class and of those that it descends from."""
    return {cls.__name__ for cls in type(module).__mro__}


def get(config: Any, path: str, default: Any = None) -> Any:
    """The attribute at "name.name"; the default where one of them is missing or None."""
    for name in path.split("."):
        config = getattr(config, name, None)
        if config is None:
            return default
    return config


def report(found: Sequence[Standing], engine: Engine, plan: Mapping[str, Any], rank: int = 0) -> None:
    """Log the standings and write them. Raises UserError: a layer is at risk, and NONDET_ALLOW_AT_RISK is not 1."""
    kinds = Counter(one.standing for one in found)
    engine.log(", ".join(f"{kinds[name]} {name}" for name in (REPLACED, CERTIFIED, ELEMENTWISE, AT_RISK)) + ".")
    risky = [one for one in grouped(found) if one.standing == AT_RISK]
    for one in risky[:20]:
        engine.log(f"at risk: {one.first} ({one.kind}): {one.why}.")
    path = write_coverage(found, engine, plan, rank)
    if path is not None:
        engine.log(f"coverage: nondet report {path}")
    if risky and os.environ.get(ALLOWED) != "1":
        what = f"{kinds[AT_RISK]} layers are at risk, the first {risky[0].first} ({risky[0].kind}): {risky[0].why}"
        raise UserError(what, f"Set {ALLOWED}=1 to start all the same. {engine.stock}")


def refuse_missed(missed: Sequence[str], looked_for: int, engine: Engine) -> None:
    """Log how many layers that were looked for ran by nondet's operators. Raises UserError: some did not, for example
    because the engine put another kernel there, and NONDET_ALLOW_AT_RISK is not 1."""
    engine.log(f"{looked_for - len(missed)} of {looked_for} layers that were looked for ran by nondet's operators.")
    if missed:
        what = f"{len(missed)} layers reported as proven did not run by nondet's operators, the first {missed[0]}"
        engine.log(f"{what}.")
        if os.environ.get(ALLOWED) != "1":
            raise UserError(what, f"Set {ALLOWED}=1 to start all the same. {engine.stock}")


def grouped(found: Sequence[Standing]) -> list[LayerStanding]:
    """As a run file holds them: layers of one kind, standing and reason together."""
    from nondet.core.records import LayerStanding

    groups: dict[tuple[str, str, str], list[str]] = {}
    for one in found:
        groups.setdefault((one.kind, one.standing, one.why), []).append(one.layer)
    return [
        LayerStanding(number=number, kind=kind, standing=standing, why=why, first=layers[0], layers=len(layers))
        for number, ((kind, standing, why), layers) in enumerate(groups.items())
    ]


def write_coverage(found: Sequence[Standing], engine: Engine, plan: Mapping[str, Any], rank: int = 0) -> Path | None:
    """The run file that `nondet report` reads; None where none can be written. NONDET_COVERAGE names it; if that file
    exists it is kept, and this one's name also gets the date and the process. By default it is in nondet's cache
    folder, with both in its name."""
    from nondet.core.certificates import cache_folder
    from nondet.core.environment import collect
    from nondet.core.runfile import open_run

    folder, named = cache_folder(), os.environ.get(WRITTEN)
    if folder is None and not named:
        return None
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    try:
        path = Path(named) if named else Path(folder or "").parent / engine.package / f"coverage-{stamp}.jsonl"
        path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}") if named and rank else path
        path = path.with_name(f"{path.stem}-{stamp}{path.suffix}") if path.exists() else path
        plan = {"model": "", engine.package: engine.version, **plan}
        writer = open_run(path, command=engine.package, plan=plan, environment=collect())
        for record in grouped(found):
            writer.write(record)
        writer.finish()
    except (UserError, OSError, ValueError) as error:  # a full disk or an invalid name: the log has the same
        engine.log(f"no coverage file: {error}")
        return None
    return path


def rows_of(layer: Any, counts: Sequence[int], requests: int) -> Sequence[int]:
    """The numbers of rows that a layer can get: a head has one row per request."""
    from nondet.engines.layers import padded_rows

    most = padded_rows(requests) if "VocabParallelEmbedding" in ancestors(layer) else max(counts, default=0)
    return [m for m in counts if m <= most]
