"""Runs: the JSONL file that holds records, as it is in memory, and the one table of kinds of record.

A run file is one header line (format, schema, environment, plan), then one line a record, written and flushed as the
record is made, then one end line. Everything people see is rendered from these records and nothing else. This module
imports neither torch nor pandas.

A new kind of record is one class (a `Record` with a tag and a key) and one field of `Run`: what the reader decodes,
where it stores it, and by what a resumed run skips it all follow from the fields of `Run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from nondet.records import (
    Accuracy,
    Axis,
    Difference,
    ErrorFigures,
    Record,
    Role,
    Row,
    Status,
    Value,
    families_of,
    role_of,
)
from nondet.records_axes import AxisValue
from nondet.records_bench import Cell, Limit, Timed
from nondet.records_diagnose import AxisTried, Diagnosis, Step
from nondet.records_embed import EmbedPass, Neighbours
from nondet.records_sample import Completion, Round
from nondet.records_served import ContractAnswer, ServerSeen
from nondet.records_trace import Control, Culprit, Replay, Replayed, Substitution, Tape, TapedRequest, TraceVerdict

__all__ = [
    "FORMAT",
    "RECORDS",
    "SCHEMA_VERSION",
    "Accuracy",
    "Axis",
    "AxisTried",
    "AxisValue",
    "Cell",
    "Completion",
    "ContractAnswer",
    "Control",
    "Culprit",
    "Diagnosis",
    "Difference",
    "EmbedPass",
    "End",
    "ErrorFigures",
    "Header",
    "Limit",
    "Neighbours",
    "Record",
    "Replay",
    "Replayed",
    "Role",
    "Round",
    "Row",
    "Run",
    "ServerSeen",
    "Status",
    "Step",
    "Substitution",
    "Tape",
    "TapedRequest",
    "Timed",
    "TraceVerdict",
    "Value",
    "families_of",
    "line_decoder",
    "role_of",
]

FORMAT = "nondet-run"
SCHEMA_VERSION = 3  # 2: cells and limits of `nondet bench`; 3: the status "wrong", and fields for what was in names


class Header(msgspec.Struct, frozen=True, tag="header", kw_only=True):
    """The first line of a run file.

    Attributes:
        plan: The options that decide which records the run holds. A run is resumed only under an equal plan.
        environment: What a reader needs to trust the figures; see `nondet.environment.collect`.
        started: UTC, ISO 8601.
    """

    format: str
    schema: int
    command: str
    plan: dict[str, Any]
    environment: dict[str, Any]
    started: str


class End(msgspec.Struct, frozen=True, tag="end", kw_only=True):
    """The last line of a run that came to its end."""

    records: int
    seconds: float


class Run(msgspec.Struct, kw_only=True):
    """A run file in memory: a list for each kind of record, in the order of the file.

    Attributes:
        complete: Whether the end line is there.
        source: Where it was read from, for messages.
    """

    header: Header
    rows: list[Row] = []
    completions: list[Completion] = []
    rounds: list[Round] = []
    limits: list[Limit] = []
    cells: list[Cell] = []
    tapes: list[Tape] = []
    replayed: list[Replayed] = []
    controls: list[Control] = []
    culprits: list[Culprit] = []
    substitutions: list[Substitution] = []
    trace_verdicts: list[TraceVerdict] = []
    steps: list[Step] = []
    axes: list[AxisTried] = []
    diagnoses: list[Diagnosis] = []
    servers: list[ServerSeen] = []
    contract: list[ContractAnswer] = []
    axis_values: list[AxisValue] = []
    embed_passes: list[EmbedPass] = []
    neighbours: list[Neighbours] = []
    complete: bool = True
    source: str = ""

    def add(self, record: Record) -> None:
        """Store a record with its kind."""
        getattr(self, RECORDS[type(record)]).append(record)

    def records(self) -> Iterator[Record]:
        """Every record, kind by kind."""
        for name in RECORDS.values():
            yield from getattr(self, name)


# Kind of record -> the field of `Run` that holds it.
RECORDS: dict[type[Record], str] = {
    get_args(hint)[0]: name for name, hint in get_type_hints(Run).items() if get_origin(hint) is list
}


def line_decoder() -> msgspec.json.Decoder[Any]:
    """A decoder for any line of a run file: its header, a record of any kind, its end."""
    return msgspec.json.Decoder(Union[(Header, End, *RECORDS)])
