"""Machines by what is equal, and for each two groups the first level that separates them. No torch.

A bit that differs is explained by what differs beside it, and by nothing that was not recorded: with nothing beside it
an invariant result is a defect. Where several levels differ at once, all are named and none is blamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain, combinations, count
from pathlib import Path
from typing import Any

from nondet.core.records import Fingerprint, Role, Run
from nondet.errors import UserError, one_line

Key = tuple[str, ...]  # of a fingerprint: implementation, class, operator, case, dtype


class Level(StrEnum):
    """What separates two groups, the gravest first."""

    DEFECT = "defect"
    OPEN = "not explained"
    DRIFT = "drift"
    SETTINGS = "settings"
    UNCOMPARED = "not compared"
    EXPECTED = "another architecture"


FAILS = (Level.DEFECT, Level.OPEN, Level.DRIFT, Level.SETTINGS)
# Fields of the environment by level; every field that is in none of these is a setting.
_NO_BITS = {"argv", "seed", "os", "python", "commit", "gpu_memory_bytes", "nccl", "variables"}
_NO_BITS |= {"CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY", "NCCL_ALGO", "NCCL_PROTO"}
_HOST = ("cpu", "cpu_isa", "aten_cpu_capability")  # of a GPU's operators the host decides nothing
_HOST_LIBRARIES = ("mkl", "onednn")
_HOST_SETTINGS = ("num_threads", "num_interop_threads")
_GPU = ("gpu", "gpu_capability", "gpu_sms")
_LIBRARIES = ("nondet", "sources", "torch", "numpy", "triton", "transformers")
_GPU_LIBRARIES = ("driver", "cuda", "cublas", "cudnn")
_CALLED = {"sources": "nondet's sources"}
_PAIRS_MOST = 40  # groups of which every pair is compared; of more, each with the largest
_NAMED = 6  # machines, classes and fields in a sentence

# Classes on a CPU belong to the library and the thread count, those on a GPU to its architecture.
_WHY_CHANGED = {True: ": run `nondet certify` on both", False: ", which on a CPU follow the library and its threads"}


@dataclass(frozen=True)
class Machine:
    """One machine's fingerprint; `lost`: why there is none."""

    name: str
    device: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    prints: Mapping[Key, Fingerprint] = field(default_factory=dict)
    lost: str = ""

    @cached_property
    def wrong(self) -> list[Fingerprint]:
        """Results that it does not give alike from run to run, or from copy to copy, and ought to."""
        return [p for p in self.prints.values() if p.wrong]

    @cached_property
    def fields(self) -> dict[str, dict[str, Any]]:
        """What decides bits, by level ("architecture", "libraries", "settings") and name."""
        named = self.environment.get("variables")
        flat = {**self.environment, **(named if isinstance(named, dict) else {})}
        ours = (*_HOST, *_HOST_LIBRARIES, *_HOST_SETTINGS)
        left_out = {*_NO_BITS, *(ours if self.device == "cuda" else (*_GPU, *_GPU_LIBRARIES))}
        made: dict[str, dict[str, Any]] = {"architecture": {"device": self.device}, "libraries": {}, "settings": {}}
        for name in flat.keys() - left_out:
            kind = "architecture" if name in (*_HOST, *_GPU) else "settings"
            kind = "libraries" if name in (*_LIBRARIES, *_GPU_LIBRARIES, *_HOST_LIBRARIES) else kind
            made[kind][name] = flat[name]
        return made

    @cached_property
    def host(self) -> tuple[Any, ...]:
        """What may decide bits of a model's completion on a GPU: its tables are made by the host."""
        return tuple(str(self.environment.get(name)) for name in (*_HOST, *_HOST_SETTINGS))

    @cached_property
    def signature(self) -> str:
        """Equal for machines between which nothing that decides bits differs."""
        return repr(sorted((kind, sorted(fields.items())) for kind, fields in self.fields.items()))


def machines_of(paths: Iterable[Path], read: Any) -> list[Machine]:
    """A machine for each file, `read` by path; one that can't be read is lost, with the reason. Names are unique.
    Raises UserError: none can be read."""
    made: list[Machine] = []
    errors: list[UserError] = []
    names: set[str] = set()
    for path in paths:
        stem = path.name.removesuffix(".gz").removesuffix(".xz").removesuffix(".jsonl")
        try:
            machine = machine_of(read(path), stem)
        except UserError as error:
            errors.append(error)
            machine = Machine(one_line(stem, 80), lost=one_line(str(error), 300))
        numbered = (f"{machine.name} ({number})" for number in count(2))
        name = next(name for name in chain([machine.name], numbered) if name not in names)
        names.add(name)
        made.append(replace(machine, name=name))
    if errors and len(errors) == len(made):
        raise errors[0]
    return made


def machine_of(run: Run, stem: str) -> Machine:
    """The machine that a run file is of. Raises UserError: the run is another command's, or was not completed."""
    if run.header.command != "fingerprint":
        what = f"{run.source or stem} was made by nondet {one_line(run.header.command, 40)}"
        raise UserError(what, "Give files of `nondet fingerprint`.")
    if not run.complete or not run.fingerprints:
        raise UserError(f"{run.source or stem} is incomplete", "Repeat its command with --resume.")
    name = next((m.name for m in run.machines if m.name.strip()), stem)
    device = run.fingerprints[0].device
    prints = {p.key[1:]: p for p in run.fingerprints}
    return Machine(one_line(name, 80), device, run.header.environment, prints)


@dataclass(frozen=True)
class Changed:
    """Results of one implementation, class, operator and dtype that two groups give other bits."""

    what: str  # "invariant linear bfloat16 (chain)"
    cases: tuple[str, ...]
    of: int  # compared
    invariant: bool
    of_model: bool  # a completion's, which on a GPU the host may move as well

    @property
    def text(self) -> str:
        """With how many, and the first shape."""
        return f"{self.what}: {len(self.cases)} of {self.of} ({self.cases[0]})"


@dataclass(frozen=True)
class Finding:
    """One sentence about machines or groups."""

    level: Level
    groups: tuple[int, ...]  # indices; empty: of machines by themselves
    machines: tuple[str, ...]  # those that it names as the ones that differ; empty where that is not known
    text: str
    changed: tuple[Changed, ...] = ()


@dataclass(frozen=True)
class Fleet:
    """All machines, in groups of equal bits, the largest first."""

    machines: tuple[Machine, ...]
    groups: tuple[tuple[Machine, ...], ...]
    findings: tuple[Finding, ...]  # the gravest first
    unsteady: tuple[Key, ...]  # of stock, that some machine does not repeat: nothing is compared by them
    headline: str

    @property
    def lost(self) -> list[Machine]:
        """Those without a fingerprint."""
        return [m for m in self.machines if m.lost]

    @property
    def code(self) -> int:
        """As of `nondet gate`: 3 where a machine or bits differ without being expected to, 1 where that is open."""
        levels = {f.level for f in self.findings}
        if levels & {*FAILS}:
            return 3
        return 1 if Level.UNCOMPARED in levels or self.lost or len(self.machines) < 2 else 0


def compare(machines: Sequence[Machine]) -> Fleet:
    """Group the machines, and say what separates the groups."""
    there = [m for m in machines if not m.lost]
    every = {key for m in there for key in m.prints}
    unsteady = {k for m in there for k, p in m.prints.items() if p.differing and not p.wrong}
    kept = sorted(every - unsteady)
    by_bits: dict[tuple[Any, ...], list[Machine]] = {}
    for m in there:
        found = [(key, m.prints[key]) for key in kept if key in m.prints]
        by_bits.setdefault(tuple((key, p.status, p.given, p.digest) for key, p in found), []).append(m)
    groups = sorted(by_bits.values(), key=len, reverse=True)
    pairs = list(combinations(range(len(groups)), 2))
    if len(groups) > _PAIRS_MOST:
        pairs = [(0, i) for i in range(1, len(groups))]
    judge = _Judge(groups, kept)
    findings = [judge.itself(m) for m in there if m.wrong] + [judge.pair(i, j) for i, j in pairs]
    findings += [_failed(m, e) for m in there if (e := [p for p in m.prints.values() if p.status == "error"])]
    # the gravest first; then what names a machine
    findings.sort(key=lambda f: (list(Level).index(f.level), not f.machines))
    return Fleet(
        tuple(machines), tuple(map(tuple, groups)), tuple(findings), tuple(sorted(unsteady)),
        _headline(machines, findings),
    )  # fmt: skip


def _failed(m: Machine, errors: Sequence[Fingerprint]) -> Finding:
    """A machine on which computations failed, as they may have on all: nothing is known of those."""
    said = f"{m.name} failed in {len(errors)} of {len(m.prints)} computations: {errors[0].reason}"
    return Finding(Level.UNCOMPARED, (), (m.name,), one_line(said, 400))


def _headline(machines: Sequence[Machine], findings: Sequence[Finding]) -> str:
    lost, there = [m for m in machines if m.lost], [m for m in machines if not m.lost]
    if findings:
        said, more = findings[0].text, len(findings) - 1
        said += f"; and {more} more finding{'s' * (more > 1)}" * bool(more)
    elif len(there) == 1:
        said = f"{there[0].name} agrees with itself, and there is no other machine"
    else:
        said = f"all {len(there)} machines give equal bits"
    said += f"; no fingerprint of {listed(lost)}" * bool(lost)
    return one_line(said, 1400) + "."


def listed(of: Sequence[str | Machine]) -> str:
    """ "a, b and 3 more"."""
    names, more = [x.name if isinstance(x, Machine) else x for x in of], len(of) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class _Judge:
    """Says what separates groups of machines by their common keys."""

    def __init__(self, groups: Sequence[Sequence[Machine]], keys: Sequence[Key]) -> None:
        self.groups, self.keys = groups, keys
        # among machines between which nothing else differs, those that most of them do not agree with
        self.outvoted: set[str] = set()
        of = {m.name: i for i, group in enumerate(groups) for m in group}
        alike: dict[str, list[Machine]] = {}
        for group in groups:
            for m in group:
                alike.setdefault(m.signature, []).append(m)
        for same in alike.values():
            most, votes = Counter(of[m.name] for m in same).most_common(1)[0]
            if 2 * votes > len(same) and votes > 1:
                self.outvoted |= {m.name for m in same if of[m.name] != most}

    def itself(self, m: Machine) -> Finding:
        """A machine that does not agree with itself."""
        worst = max(m.wrong, key=lambda p: p.differing)
        more = f", and {len(m.wrong) - 1} others" * (len(m.wrong) > 1)
        where = f"{worst.units_differing} of {worst.units} copies, {worst.runs_differing} of {worst.runs} runs"
        text = (
            f"{m.name} computes wrongly: it disagrees with itself in {_what(worst)} {worst.case}: "
            f"{worst.differing:,} of {worst.results:,} results have other bits ({where}){more}"
        )
        return Finding(Level.DEFECT, (), (m.name,), one_line(text, 600))

    def pair(self, i: int, j: int) -> Finding:
        """Two groups, the larger first."""
        a, b = self._nearest(self.groups[i], self.groups[j])
        changed, lacking = self._changed(a, b)
        differ = {kind: self._fields(a, b, kind) for kind in ("architecture", "libraries", "settings")}
        by_host = a.device == "cuda" and a.host != b.host and bool(changed) and all(m.of_model for m in changed)
        differ["architecture"] += ["the host's CPU"] * by_host
        fewer, rest = self.groups[j], self.groups[i]
        who, others = listed(fewer), listed(rest)
        single = len(fewer) < len(rest)
        named: tuple[str, ...] = tuple(m.name for m in fewer) if single else ()
        if single:
            others = f"{len(rest)} other machines" if len(rest) > 1 else others
        subject = f"{who} {'differs' if len(fewer) == 1 else 'differ'} from {others}"
        bits = listed([m.text for m in sorted(changed, key=lambda m: not m.invariant)])
        invariant = [m for m in changed if m.invariant]
        if not changed:
            level, named = Level.UNCOMPARED, ()
            said = f"{who} can't be compared with {others} in all: {lacking}"
        elif not any(differ.values()):
            level, named, said = self._unexplained(a, b, i, j, bool(invariant), bits)
        elif differ["architecture"]:
            one, other = (m.fields["architecture"].get("gpu_capability", m.name) for m in (a, b))
            beside = differ["libraries"] + differ["settings"]
            ought = one == other and not by_host and invariant and not beside
            level = Level.OPEN if ought else Level.EXPECTED
            said = f"{subject}, which is expected of another architecture ({listed(differ['architecture'])}): {bits}"
            if level == Level.OPEN:
                said = f"{subject} in invariant bits, which GPUs of one architecture ought to share: {bits}"
            else:
                named, said = (), said + f"; these differ as well: {listed(beside)}" * bool(beside)
        else:
            level = Level.DRIFT if differ["libraries"] else Level.SETTINGS
            by = "; ".join(listed(differ[kind]) for kind in ("libraries", "settings") if differ[kind])
            said = f"{subject}: {by}. Other bits: {bits}"
            if invariant:
                said += f". Invariant results changed as well{_WHY_CHANGED[a.device == 'cuda']}"
        if changed and lacking:
            said += f"; {lacking}"
        return Finding(level, (i, j), named, one_line(said, 900), tuple(changed))

    def _unexplained(
        self, a: Machine, b: Machine, i: int, j: int, invariant: bool, bits: str
    ) -> tuple[Level, tuple[str, ...], str]:
        """Nothing that was recorded differs, and bits do."""
        sides = [m for g in (i, j) for m in self.groups[g] if m.signature == a.signature]
        wrong = [m for m in sides if m.name in self.outvoted]
        rest = len([m for m in sides if m not in wrong])
        if not invariant:
            who = f"{listed(wrong)} against {rest} machines" if wrong else f"{b.name} against {a.name}"
            said = f"{who} of the same environment: other stock bits, which nothing that was recorded explains"
            return Level.OPEN, tuple(m.name for m in wrong), f"{said}: {bits}"
        if not wrong:
            said = f"one of {listed(sides)} computes wrongly, which is not known: their environments are equal"
            return Level.DEFECT, (), f"{said}: {bits}"
        verb = "computes" if len(wrong) == 1 else "compute"
        beside = f"{rest} machines of the same environment agree" if rest else "and do not agree with each other"
        return Level.DEFECT, tuple(m.name for m in wrong), f"{listed(wrong)} {verb} wrongly, {beside}: {bits}"

    def _nearest(self, one: Sequence[Machine], other: Sequence[Machine]) -> tuple[Machine, Machine]:
        """A machine of each between which the least differs: what separates those separates the groups."""
        mine, theirs = ({m.signature: m for m in reversed(group)} for group in (one, other))
        if shared := mine.keys() & theirs.keys():
            signature = min(shared)
            return mine[signature], theirs[signature]
        pairs = [(a, b) for a in list(mine.values())[:_PAIRS_MOST] for b in list(theirs.values())[:_PAIRS_MOST]]
        kinds = ("architecture", "libraries", "settings")
        return min(pairs, key=lambda pair: [len(self._fields(pair[0], pair[1], kind)) for kind in kinds])

    def _fields(self, a: Machine, b: Machine, kind: str) -> list[str]:
        """ "torch 2.11.0 and 2.13.0" for each field of the kind that differs."""
        both = [
            (n, b.fields[kind].get(n), a.fields[kind].get(n)) for n in a.fields[kind].keys() | b.fields[kind].keys()
        ]
        return sorted(
            f"{one_line(_CALLED.get(n, n), 40)} {_beside(x, y)} and {_beside(y, x)}" for n, x, y in both if x != y
        )

    def _changed(self, a: Machine, b: Machine) -> tuple[list[Changed], str]:
        """(what has other bits, why something was not compared)."""
        cases: dict[tuple[str, bool, bool], list[str]] = {}
        compared: Counter[tuple[str, bool, bool]] = Counter()
        lacking: Counter[str] = Counter()
        for key in self.keys:
            p, q = a.prints.get(key), b.prints.get(key)
            if p is None or q is None:
                lacking["only one has it"] += p is not q
            elif p.status != q.status:
                why = one_line((p if p.status != "ok" else q).reason, 120)
                lacking[f"one of them failed or skipped it ({why})"] += 1
            elif p.given != q.given:
                lacking["their operands differ, which are drawn from one seed"] += 1
            elif p.status == "ok":
                of = (_what(p), p.role == Role.INVARIANT, p.operator == "completion")
                compared[of] += 1
                if p.digest != q.digest:
                    cases.setdefault(of, []).append(p.case)
        changed = [Changed(of[0], tuple(names), compared[of], *of[1:]) for of, names in cases.items()]
        why = "; ".join(f"{n} not compared: {why}" for why, n in lacking.most_common(3) if n)
        return changed, why


def _beside(value: Any, other: Any) -> str:
    """A field's value, beside another machine's; of lists what only this one has."""
    if isinstance(value, list) and isinstance(other, list):
        value = " ".join(sorted({*map(str, value)} - {*map(str, other)}))
    return one_line(str("none" if value in (None, "") else value), 80)


def _what(p: Fingerprint) -> str:
    """ "invariant linear bfloat16 (chain)"."""
    cls = f" ({one_line(p.cls, 40)})" if p.cls else ""
    return f"{one_line(p.impl, 40)} {one_line(p.operator, 40)} {one_line(p.dtype, 20)}{cls}"
