"""What a reader checks of a run file and its side file: that each record fits itself, its plan and its neighbours.

A file comes from anywhere. Whoever computes with a record (class maps, batches, trees, pages) relies on what is checked
here, and checks nothing again. A failed check names the field; the reader adds the file and the line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from nondet.records import Axis, Difference, ErrorFigures, Record, Role, Row, Status
from nondet.records_bench import Cell, Limit
from nondet.records_sample import Completion, Round
from nondet.records_served import ContractAnswer, Served, Traffic
from nondet.result import End, Header

__all__ = ["STEPS_MOST", "TOKENS_MOST", "ContradictionError", "RunChecks"]

_DEPTH_MOST = 16  # of a plan, an environment, a row's extra: ours have 4
_NUMBER_MOST = 2**53  # what JSON's readers agree on; a ULP distance in float64 may be larger, and has its own limit
_ULP_MOST = 2**64
TOKENS_MOST = 2**24
STEPS_MOST = 2**22  # engine steps of one round, idle ones between arrivals counted: ten times what a plan can ask for
_STEPS_MOST_OF_ALL = 2**26
_STATUSES = frozenset(v for k, v in vars(Status).items() if k.isupper() and isinstance(v, str))
# Entries of a row's extra that verdicts and reports count with.
_COUNTED = {"elements", "requests", "requests_parted", "round", "seconds_again", "tokens_per_second_again"}
_DIGEST = frozenset("0123456789abcdef")
_HEX_MOST = 16  # digits of the widest element, float64


class ContradictionError(ValueError):
    """A field that can't be what it says."""


def _need(holds: bool, field: str, why: str) -> None:
    if not holds:
        raise ContradictionError(f"{field}: {why}")


def _count(field: str, *values: int, least: int = 0, most: int = _NUMBER_MOST) -> None:
    for value in values:
        _need(least <= value <= most, field, f"{str(value)[:40]} is not from {least} to {most}")


def _finite(field: str, *values: float | None, least: float = -math.inf) -> None:
    for value in values:
        if value is not None:
            _need(math.isfinite(value) and value >= least, field, f"{value} is no figure")


def _tree(field: str, root: Any) -> None:
    """Free-form data: not deeper than ours, no number that is none. A loop, so that nothing nests too deep for it."""
    pending: list[tuple[Any, int]] = [(root, 0)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, dict | list):
            _need(depth < _DEPTH_MOST, field, f"nested more than {_DEPTH_MOST} deep")
            pending += [(child, depth + 1) for child in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, float):
            _finite(field, value)
        elif isinstance(value, int):
            _need(abs(value) <= _ULP_MOST, field, "a number of more digits than any of ours")


def _row(row: Row) -> None:
    _need(row.status in _STATUSES - {Status.TIMED}, "status", f"{row.status[:40]!r} is unknown")
    _need(row.axis in set(Axis), "axis", f"{row.axis[:40]!r} is unknown")
    _need(row.role in set(Role), "role", f"{row.role[:40]!r} is unknown")
    for name, size in row.shape.items():
        _need(abs(size) <= _NUMBER_MOST, f"shape.{name[:40]}", "too large a number")
    _count("trials, distinct, replays", row.trials, row.distinct, row.replays)
    _count("replays_parted", row.replays_parted, most=row.replays)
    _count("class_sizes", *row.class_sizes, least=1)
    for value in row.values:
        _need(not isinstance(value, int) or abs(value) <= _NUMBER_MOST, "values", "too large a number")
    _need(len(row.labels) == len(row.values), "labels", f"{len(row.labels)} of {len(row.values)} values")
    _need(len(row.kernels) in (0, len(row.values)), "kernels", f"{len(row.kernels)} of {len(row.values)} values")
    _count("kernels", *row.kernels, most=len(row.kernel_sets) - 1)
    if row.class_sizes:
        _need(sum(row.class_sizes) == row.trials, "class_sizes", f"{sum(row.class_sizes)} trials of {row.trials}")
        _need(len(row.class_sizes) == row.distinct, "distinct", f"{row.distinct} with {len(row.class_sizes)} sizes")
    _labels(row)
    _need(row.distinct <= max(row.trials, 1), "distinct", f"{row.distinct} of {row.trials} trials")
    if row.status == Status.IDENTICAL:
        _need(
            row.distinct <= 1 and not row.replays_parted, "status", f"identical, with {row.distinct} distinct results"
        )
    _difference(row.difference)
    if row.difference is not None and isinstance(row.difference.label, int):
        _count("difference.label", row.difference.label, most=max(row.distinct - 1, 0))
    for name, error in (("error", row.error), ("worst_error", row.worst_error)):
        _error(name, error)
    if row.accuracy is not None:
        _count("accuracy", row.accuracy.calls, row.accuracy.elements)
        _finite("accuracy.worst", row.accuracy.worst, least=0.0)
    _count("nonfinite", row.nonfinite)
    _tree("extra", row.extra)
    for name in _COUNTED & row.extra.keys():
        value = row.extra[name]
        _need(isinstance(value, int | float), f"extra.{name}", f"{str(value)[:40]!r} is no number")
        _finite(f"extra.{name}", value, least=0.0)
    _finite("seconds", row.seconds, least=0.0)


def _labels(row: Row) -> None:
    """Numbered by first appearance, and as many of each as class_sizes say."""
    following = 0
    for label in row.labels:
        _need(0 <= label <= following, "labels", f"{str(label)[:40]} before {following}")
        following += label == following
    if row.labels:
        counts = Counter(row.labels)
        sizes = [counts[i] for i in range(following)]
        _need(sizes == row.class_sizes, "class_sizes", f"{row.class_sizes[:8]}, counted {sizes[:8]}")


def _difference(difference: Difference | None) -> None:
    if difference is None:
        return
    _count("difference.compared", difference.compared)
    _count("difference.mismatched", difference.mismatched, most=difference.compared)
    _count("difference.nonfinite", difference.nonfinite, most=difference.mismatched)
    _count("difference.max_ulp", difference.max_ulp, most=_ULP_MOST)
    _finite("difference.max_abs", difference.max_abs, difference.scale, least=0.0)
    _count("difference.first_mismatch", *(difference.first_mismatch or ()))
    for word in difference.first_bits or ():
        fits = word.startswith("0x") and 0 < len(word[2:]) <= _HEX_MOST and set(word[2:]) <= _DIGEST
        _need(fits, "difference.first_bits", f"{word[:40]!r} is no number in hex")


def _error(name: str, error: ErrorFigures | None) -> None:
    if error is not None:
        _finite(name, error.max_abs, error.relative_norm, least=0.0)
        _count(f"{name}.max_ulp", error.max_ulp, most=_ULP_MOST)


def _completion(c: Completion) -> None:
    _need(c.status in ("ok", "error"), "status", f"{c.status[:40]!r} is unknown")
    _count("round, prompt, n_tokens, arrival_step", c.round, c.prompt, c.n_tokens, c.arrival_step)
    _count("nonfinite", c.nonfinite, most=c.n_tokens)
    _count("batch_min", c.batch_min, most=c.batch_max)
    _count("batch_max", c.batch_max)
    for name, digest in (("trace", c.trace), ("tokens_digest", c.tokens_digest)):
        fits = len(digest) == 16 and set(digest) <= _DIGEST
        _need(fits if c.status == "ok" else fits or not digest, name, "not 16 hex digits")
    _schedule("schedule", c.schedule)
    if c.served is not None:
        _served(c.served)


def _served(s: Served) -> None:
    _finite("served.sent, first, done", s.sent, s.first, s.done)
    first = s.done if s.first is None else s.first
    _need(s.sent <= first <= s.done, "served", "an answer that came before it was asked for")
    _count("served.attempts, in_flight", s.attempts, s.in_flight)
    _count("served.refusals", *s.refusals.values())
    _need(not s.text or (len(s.text) == 16 and set(s.text) <= _DIGEST), "served.text", "not 16 hex digits")
    counts = (s.prompt_tokens, s.cached_tokens, s.completion_tokens)
    _count("served tokens", *(n for n in counts if n is not None), most=TOKENS_MOST)


def _traffic(t: Traffic) -> None:
    _count("traffic", t.concurrency, t.polls, t.decoding_most, t.in_company, t.parts)
    _finite("traffic", t.rate, t.running_most, t.running_median, t.waiting_most, least=0.0)
    _finite("traffic.counters", *t.counters.values())
    _count("traffic", *t.others_failed.values(), *t.fingerprints.values())


def _contract(answer: ContractAnswer) -> None:
    _need(answer.answer in ("yes", "no", "unknown"), "answer", f"{answer.answer[:40]!r} is unknown")


def _schedule(field: str, schedule: list[list[int]]) -> None:
    """[first step, steps, query tokens], one after the other."""
    end = 0
    for part in schedule:
        _need(len(part) == 3, field, "an entry is not [first step, steps, tokens]")
        first, steps, tokens = part
        _need(end <= first, field, f"step {str(first)[:40]} comes after step {end}")
        _count(field, steps, tokens, least=1, most=TOKENS_MOST)
        end = first + steps
        _need(end <= STEPS_MOST, field, f"goes beyond step {STEPS_MOST:,}")


def _round(record: Round) -> None:
    _count("round, targets, others, steps, tokens", record.round, record.targets, record.others, record.steps)
    _count("tokens", record.tokens)
    _finite("seconds", record.seconds, least=0.0)
    for schedule in record.background.values():
        _schedule("background", schedule)
    _count("ran", *record.ran.values())
    _count("figures", *record.figures.values())
    if record.traffic is not None:
        _traffic(record.traffic)


def _limit(limit: Limit) -> None:
    _finite("rate", limit.rate, least=0.0)
    _need(limit.rate > 0, "rate", "is not positive")
    _count("work", limit.work)
    _finite("samples_us", *limit.samples_us, least=0.0)


def _cell(cell: Cell) -> None:
    for name, size in cell.shape.items():
        _count(f"shape.{name[:40]}", size)
    _need(cell.axis in cell.shape, "axis", f"{cell.axis[:40]!r} is no size of the cell")
    _count("bytes, flops, bus_bytes", cell.bytes, cell.flops, cell.bus_bytes, most=_ULP_MOST)
    _count("sets, calls, tokens", cell.sets, cell.calls, cell.tokens)
    _finite("limit_us", cell.limit_us, least=0.0)
    _finite("seconds", cell.seconds, least=0.0)
    names = [t.impl for t in cell.timed]
    _need(len(set(names)) == len(names), "timed", "an implementation twice")
    for t in cell.timed:
        _need(t.status in (Status.TIMED, Status.SKIPPED, Status.ERROR), "timed.status", f"{t.status[:40]!r} is unknown")
        _finite("timed", *t.samples_us, t.low_us, t.median_us, t.high_us, least=0.0)
        if t.status == Status.TIMED:
            _need(bool(t.samples_us) and min(t.samples_us) > 0, "timed.samples_us", "no time at all")
            _need(0 < t.low_us <= t.median_us <= t.high_us, "timed.median_us", "is not between its quartiles")


_CHECKS: dict[type[Any], Callable[[Any], None]] = {
    Row: _row,
    Completion: _completion,
    Round: _round,
    Limit: _limit,
    Cell: _cell,
    ContractAnswer: _contract,
}


class RunChecks:
    """The checks of one file, record by record, and what only all records together show."""

    def __init__(self, header: Header) -> None:
        self._keys: set[tuple[str, ...]] = set()
        prompts = header.plan.get("prompts")
        self._prompts = len(prompts) if isinstance(prompts, list) else 0
        self._ends: dict[tuple[str, int], int] = {}
        self._steps = 0
        self._finished: Counter[tuple[str, int]] = Counter()
        self._over: set[tuple[str, int]] = set()

    def header(self, header: Header) -> None:
        """The plan is shaped as one. Raises ContradictionError."""
        _tree("plan", header.plan)
        _tree("environment", header.environment)
        prompts = header.plan.get("prompts", [])
        _need(isinstance(prompts, list), "plan.prompts", "is no list")
        for prompt in prompts:
            fits = isinstance(prompt, dict) and isinstance(prompt.get("text"), str)
            _need(fits and type(prompt.get("tokens")) is int, "plan.prompts", "an entry without its text and tokens")
            _count("plan.prompts", prompt["tokens"], most=TOKENS_MOST)

    def record(self, record: Record) -> None:
        """One record, by itself and beside those before it. Raises ContradictionError; then it was not counted."""
        check = _CHECKS.get(type(record))
        if check is not None:
            check(record)
        else:  # a kind without rules of its own: no number that is none, and nothing nested beyond reason
            _tree(record.key[0], msgspec.to_builtins(record))
        _need(record.key not in self._keys, "key", f"{' '.join(record.key)[:200]} is there twice")
        if isinstance(record, Completion):
            _need(record.prompt < self._prompts, "prompt", f"{record.prompt} of {self._prompts} in the plan")
            place = (record.impl, record.round)
            _need(place not in self._over, "round", f"{record.round} of {record.impl[:80]} is over before it")
            self._span(place, [record.schedule])
            self._finished[place] += 1
        elif isinstance(record, Round):
            place = (record.impl, record.round)
            counted = self._finished[place]
            _need(counted == record.targets, "targets", f"{record.targets}, with {counted} completions before it")
            self._span(place, record.background.values())
            self._over.add(place)
        self._keys.add(record.key)

    def end(self, end: End) -> None:
        """The last line counts what came before it. Raises ContradictionError."""
        _need(end.records == len(self._keys), "records", f"{end.records}, with {len(self._keys)} in the file")
        _finite("seconds", end.seconds, least=0.0)

    def _span(self, place: tuple[str, int], schedules: Iterable[list[list[int]]]) -> None:
        before = self._ends.get(place, 0)
        last = max(before, *(s[-1][0] + s[-1][1] for s in schedules if s), 0)
        total = self._steps + last - before
        _need(total <= _STEPS_MOST_OF_ALL, "schedule", f"the rounds go over {total:,} steps together")
        self._ends[place], self._steps = last, total
