"""The load plan: which requests arrive when, under what setting and temperature, and what an engine is. No torch.

Only the parameters go into a run's header; the plan is rebuilt from them (and from the tokenizer and the text that the
background prompts are cut from, which the plan's digest covers). It doesn't depend on Python's hash seed.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeVar

from msgspec import Meta

from nondet.core.runfile import regular
from nondet.errors import UserError, each_once, one_line, shortened, suggestion

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from nondet.core.launch import FirstUses
    from nondet.core.records import Completion


# Two things make a text at T > 0 depend on the batch: the logits, and the draw. A sampler with one generator for the
# whole batch gives a request other numbers if the other requests change, whatever the logits; a draw by seed and
# position leaves the logits as the only cause. So the implementations are distinguished:
#
#     stock                stock logits, drawn as transformers' engine draws: one generator for the batch
#     stock-seeded         stock logits, our draw
#     unseeded-invariant   invariant logits, drawn as the engine draws
#     invariant            invariant logits, our draw

# Implementations that exist only at a temperature -> the implementation that provides their kernels.
DRAWN = {"stock-seeded": "stock", "unseeded-invariant": "invariant"}
UNSEEDED = ("stock", "unseeded-invariant")  # the draw is left to the engine
_Positive = Annotated[int, Meta(ge=1)]
_Whole = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are drawn."""

    temperature: Annotated[float, Meta(gt=0, le=100)]  # logits are divided by it
    top_k: _Whole  # the number of largest logits that are kept, ties by the smaller token id; 0 keeps all
    # the nucleus: of these the fewest, the largest first, that hold this share of their mass; 1.0 keeps all
    top_p: Annotated[float, Meta(gt=0, le=1)]
    seed: _Whole  # decides the draws, together with the position
    seeded: bool = True  # false leaves the draw to the engine, which has one generator for all requests


@dataclass(frozen=True)
class Setting:
    """An engine's settings in addition to its load; the defaults are those without a varied axis."""

    chunk: int | None = None  # most prompt tokens of one request in one step; None: as many as fit into the budget
    order: str = "fifo"  # which request is admitted first, a key of `nondet.sampling.orders.ORDERS`
    pages: int | None = None  # pages of the KV cache; None: enough that no request is preempted
    drafts: str = ""  # where speculated tokens come from, a key of `nondet.sampling.speculation.DRAFTERS`; "" for none
    draft_tokens: int = 4  # most tokens drafted for one request in one step: k drafts make k + 1 query tokens
    draft_model: str = ""  # with drafts "model": folder or hub name, or "embedded"
    earlier: tuple[int, ...] = ()  # token ids of the earlier text that the editing form takes its drafts from
    attention: str = ""  # the model's attention implementation; "" leaves it as it is


PLAIN = Setting()


# Characters cut per background token before encoding: byte-level BPE gives 3 to 5 characters per token of English
# prose, so 12 leaves enough tokens to cut the prompt from.
_CHARACTERS_PER_TOKEN = 12


@dataclass(frozen=True)
class RoundLoad:
    """The requests of a round, whatever serves it. All lengths are in tokens."""

    others: int  # background requests in each round
    targets: int  # requests under study in each round; they are load for one another too
    prompt: tuple[int, int]  # shortest and longest background prompt
    tokens: tuple[int, int]  # shortest and longest background completion


@dataclass(frozen=True)
class Load(RoundLoad):
    """Concurrent requests, and the engine's limits that turn them into batches."""

    spread: int  # arrivals are drawn evenly over engine steps 0 ... spread-1
    budget: _Positive  # query tokens that one engine step may take: longer prefills are chunked
    requests: _Positive  # requests that one engine step may take
    page: _Positive = 16  # tokens in a page of the KV cache: the grain of prefix sharing
    sharing: bool = True  # whether requests share the cached pages of a common prefix
    graphs: bool = False  # whether steps run as CUDA graphs, padded; operators are then counted where one is captured


PRESETS: dict[str, Load] = {
    # one request per step, nothing shared: the control, because every completion gets the same shapes
    "none": Load(others=0, targets=50, spread=1, prompt=(1, 1), tokens=(1, 1), budget=64, requests=1, sharing=False),
    "light": Load(others=6, targets=10, spread=96, prompt=(4, 48), tokens=(8, 64), budget=32, requests=32),
    "default": Load(others=16, targets=40, spread=24, prompt=(8, 96), tokens=(8, 40), budget=96, requests=64),
    "heavy": Load(others=120, targets=60, spread=96, prompt=(8, 256), tokens=(16, 128), budget=256, requests=256),
}

_HINT = "Write none, light, default, heavy, or keys such as others=60,budget=256,prompt=8-96; see --help."
_MOST = 1_000_000
L = TypeVar("L", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    id: str  # unique within the plan: t000017 is a target, r3-b005 the sixth background request of round 3
    target: bool
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_step: int  # the engine step from which it may be scheduled
    subject: int = 0  # index of a target's prompt (and seed) among the header's; 0 of background requests
    sampling: Sampling | None = None  # how its tokens are drawn; None of greedy requests


@dataclass(frozen=True)
class Plan:
    """Rounds of requests by arrival, ties in drawn order. Each starts from an empty engine: the unit of resuming."""

    load: Load
    rounds: tuple[tuple[Request, ...], ...]

    @property
    def targets(self) -> int:
        """Requests under study over all rounds."""
        return sum(r.target for requests in self.rounds for r in requests)

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 over everything that decides the batches: equal digests, equal load."""
        sha = hashlib.sha256(json.dumps(asdict(self.load), sort_keys=True).encode())
        prompt: tuple[int, ...] = ()
        for requests in self.rounds:
            sha.update(b"round")
            for r in requests:
                sha.update(f"{r.id} {r.target} {r.max_new_tokens} {r.arrival_step}".encode())
                if r.sampling is not None:
                    s = r.sampling
                    sha.update(f" drawn {s.temperature!r} {s.top_k} {s.top_p!r} {s.seed}".encode())
                if r.prompt is not prompt:  # all targets share one tuple: a million of them are hashed in seconds
                    prompt = r.prompt
                    sha.update(",".join(map(str, prompt)).encode())
        return sha.hexdigest()[:16]


def parse_load(spec: str) -> Load:
    """Read `--load`: a preset, or changes to one ("default" where none is named); a `UserError` names the error."""
    ranges = {f.name: ({"others": 0, "page": 4}.get(f.name, 1), _MOST) for f in fields(Load)}
    load = changed_load(spec, PRESETS, ranges, _HINT)
    if (requests := load.others + load.targets) > 100_000:
        raise UserError(f"--load {spec!r}: {requests} requests in one round", "Stay under 100,000 requests a round.")
    return load


def changed_load(spec: str, presets: Mapping[str, L], ranges: Mapping[str, tuple[int, int]], hint: str) -> L:
    """A preset, or changes to one, of any kind of load; `ranges`: key -> least and largest number. As `parse_load`."""
    parts = [p.strip() for p in spec.split(",")]
    if not any(parts):
        raise UserError(f"--load {spec!r} is empty", hint)
    each_once("--load", (part.partition("=")[0].strip() for part in parts))
    load = presets[parts[0]] if parts[0] in presets else presets["default"]
    for part in parts[parts[0] in presets :]:
        key, equals, value = (s.strip() for s in part.partition("="))
        if not equals and key in presets:
            raise UserError(f"--load {spec!r}: {key!r} must come first", hint)
        if not equals:
            known = [*presets, *(f"{k}=..." for k in ranges)]
            raise UserError(f"--load: unknown load {part!r}", suggestion(key, known))
        if key not in ranges:
            raise UserError(f"--load: unknown key {key!r}", suggestion(key, ranges))
        change: dict[str, Any] = {key: _value(key, value, getattr(load, key), *ranges[key])}
        load = replace(load, **change)
    return load


def _value(key: str, text: str, before: object, least: int, most: int) -> int | bool | tuple[int, int]:
    if isinstance(before, bool):
        if text not in ("on", "off"):
            raise UserError(f"--load: {key}={text} makes no sense", f"Write {key}=on or {key}=off.")
        return text == "on"
    ranged = isinstance(before, tuple)
    low, dash, high = text.partition("-") if ranged else (text, "", "")
    ends = [low, high if dash else low]
    # int() takes some thousand digits at most
    if not all(e.isascii() and e.isdigit() and len(e) < 20 and least <= int(e) <= most for e in ends):
        hint = f"Give whole numbers from {least} to {most}, such as {key}={'8-96' if ranged else '32'}."
        raise UserError(f"--load: {key}={shortened(text, 60)} makes no sense", hint)
    first, last = map(int, ends)
    if first > last:
        raise UserError(f"--load: {key}={text} runs backwards", f"Write {key}={last}-{first}.")
    return (first, last) if ranged else first


def background_text() -> list[str]:
    """The texts that background prompts are cut from: the documentation topics that ship with Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        what = "this Python lacks pydoc_data, the text that background requests are cut from"
        raise UserError(what, "Install the full standard library, or use --load none.") from error
    return [topics[name] for name in sorted(topics) if len(topics[name]) > 2000]


# Attention's key tiles begin to matter at 129 keys, and a tile or a split may be of 256 or 512: so, in addition to a
# short default prompt, one is cut to some 250 tokens, and one to more than 600, in characters.
_LONG_PROMPTS = (1_100, 2_900)
RIDERS_EVERY = 40
KEYS_LEAST = 512  # with fewer keys in every request, a test does not cover long ones


def long_prompts() -> list[str]:
    """What is completed in addition to the default prompt: two pieces of Python's documentation."""
    text = next((t for t in background_text() if len(t) > sum(_LONG_PROMPTS)), "")
    ends = [0, *itertools.accumulate(_LONG_PROMPTS)]
    return [text[a:b].strip() for a, b in itertools.pairwise(ends)] if text else []


def build_plan(
    load: Load,
    *,
    n: int,
    seed: int,
    max_new_tokens: int,
    context: int,
    encode: Callable[[str], list[int]],
    texts: Sequence[str] | None = None,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling] = (),
    riders: Sequence[Sequence[int]] = (),
) -> Plan:
    """Draw the plan.

    Subjects are prompts, or at a temperature each prompt with each seed, seeds fastest. They take turns, so that the
    completions of one are spread over all rounds: rounds are independent, their members are not.

    Args:
        n: Targets of each subject, over all rounds; the last round holds what is left.
        prompts: Token ids of each request under study.
        samplings: For each prompt, one per seed; () for greedy ones. Background requests draw with seeds of their own.
        riders: Further prompts, each twice for every `RIDERS_EVERY` targets, in one round: one computes its keys, one
            may find them cached. Their subjects follow the others'; at a temperature their seeds take turns by round.
        context: Positions that the model has: background requests are cut to fit.
        encode: Text to token ids, without special tokens.
        texts: What background prompts are cut from; None: Python's documentation.
    """
    texts = background_text() if texts is None and load.others else texts or []
    draws: Sequence[Sampling | None] = samplings or (None,)
    subjects = [(tuple(p), sampling) for p in prompts for sampling in draws]
    rounds = []
    for index, first in enumerate(range(0, n * len(subjects), load.targets)):
        # a string seeds through SHA-512, so that neither the hash seed nor earlier rounds matter
        rng = random.Random(f"nondet load plan {seed} {index}")  # noqa: S311 - a load plan, not a secret
        requests = []
        for i in range(first, min(first + load.targets, n * len(subjects))):
            subject = i % len(subjects)
            tokens, drawn = subjects[subject]
            arrival = rng.randrange(load.spread)
            requests.append(Request(f"t{i:06d}", True, tokens, max_new_tokens, arrival, subject, drawn))
        due = (first + len(requests)) // RIDERS_EVERY > first // RIDERS_EVERY
        for k, rider in itertools.product(range(2), range(len(riders) if due else 0)):
            turn = index % len(draws)
            subject, arrival = len(subjects) + rider * len(draws) + turn, rng.randrange(load.spread)
            name, tokens = f"l{index:05d}-{rider}-{k}", tuple(riders[rider])
            requests.append(Request(name, True, tokens, max_new_tokens, arrival, subject, draws[turn]))
        for j in range(load.others):
            request = _background(f"r{index}-b{j:03d}", load, rng, context, encode, texts)
            if samplings:
                request = replace(request, sampling=replace(samplings[0], seed=rng.getrandbits(63)))
            requests.append(request)
        rng.shuffle(requests)
        rounds.append(tuple(sorted(requests, key=lambda r: r.arrival_step)))
    return Plan(load, tuple(rounds))


def _background(
    name: str, load: Load, rng: random.Random, context: int, encode: Callable[[str], list[int]], texts: Sequence[str]
) -> Request:
    length = min(rng.randint(*load.prompt), context - 1)
    new = min(rng.randint(*load.tokens), context - length)
    text = texts[rng.randrange(len(texts))]
    wanted = length * _CHARACTERS_PER_TOKEN
    start = rng.randrange(max(1, len(text) - wanted))
    ids = encode(text[start : start + wanted])
    if not ids:
        raise ValueError("the tokenizer gives no tokens for the background text")
    ids *= ceil(length / len(ids))  # a tokenizer with very long tokens, or a text that is too short
    return Request(name, False, tuple(ids[:length]), new, rng.randrange(load.spread))


# An engine takes requests under a load, and returns a session with what happened to each request: token ids; logprobs,
# margins and the schedule are optional. One that can force tokens and be watched can be traced.


class Span(NamedTuple):
    """The rows of one request in one step: positions first ... first+rows-1, in this order."""

    request: str
    first: int
    rows: int
    new: bool  # whether its last row predicts a token; False in the middle of a chunked prefill


@dataclass(frozen=True)
class Outcome:
    """The result of one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: bytes = b""  # little-endian float32, one for each token; empty where the engine gives none
    margins: bytes = b""  # little-endian float32, top-1 minus top-2 logit of each step; empty where not recorded
    runner_up: list[int] = field(default_factory=list)  # the better of the two top tokens that was not chosen, by step
    finish: str = "error"  # "length", "eos", "error", or "cut" where a watched session ended before the request did
    # run-length list of [first_step, steps, query_tokens]; empty where the engine does not report it
    schedule: list[list[int]] = field(default_factory=list)
    # `batch_min`, `batch_max`: query tokens in the steps that it took part in; 0 if it never ran
    batch_min: int = 0
    batch_max: int = 0
    reason: str = ""
    # `border`, `cut`, `nucleus`: little-endian float32, how near each draw was to another token, see
    # `nondet.sampling.engine.Draw`; empty where we drew nothing
    border: bytes = b""
    cut: bytes = b""
    nucleus: bytes = b""


class Pace(NamedTuple):
    """One step: its seconds until the next, or the last request's end; `captured`: without a graph, to capture one."""

    seconds: float
    tokens: int
    captured: bool


@dataclass(frozen=True)
class Session:
    """One engine session. Entries that the engine does not report are empty."""

    outcomes: list[Outcome]  # one for each request, in the plan's order
    steps: int
    tokens: int  # tokens generated for all requests
    seconds: float  # from the first step's beginning to the last request's end, without `first_use_seconds`
    fatal: str = ""  # why the engine died; "" if it did not
    packs: dict[int, tuple[Span, ...]] = field(default_factory=dict)  # step -> its requests, in the order of the rows
    # request id -> the two largest logits of each generated token and their ids, cut requests included
    tops: dict[str, list[tuple[float, float, int, int]]] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)  # counts, see `nondet.sampling.schedule`
    admitted: list[str] = field(default_factory=list)  # requests in the order in which they got their first steps
    pace: list[Pace] = field(default_factory=list)  # each step's time and tokens
    # of these steps, spent on compiling kernels and proving members, once for all later runs
    first_use_seconds: float = 0.0


class StepLog(Protocol):
    """What a watcher can read during a step."""

    @property
    def pack(self) -> tuple[Span, ...]:
        """The requests of the step."""


class Watcher(Protocol):
    """Code that watches from inside of the engine while it runs."""

    @property
    def done(self) -> bool:
        """Whether it needs nothing more: the session may end."""

    def attached(self, model: Any, log: StepLog) -> AbstractContextManager[None]:
        """Put its hooks in place for one session."""


class Engine(Protocol):
    """One way to serve a model."""

    def describe(self) -> dict[str, Any]:
        """What is fixed in addition to the load: name, version, attention, and what it gives. JSON-able."""

    def run(self, requests: Sequence[Request], load: Load, **options: Any) -> Session:
        """Run the requests from an empty engine to an empty one; options as of `nondet.sampling.engine.run_session`."""


class Notes:
    """What is called while rounds are played; here it does nothing."""

    def progress(self, impl: str, arm: str, done: int, tokens: int) -> None:
        """A target is finished: `done` of them under the implementation, after so many tokens."""

    def preparing(self, impl: str, done: int, total: int, uses: FirstUses) -> None:
        """Before an implementation's first round: calls done, all calls, and first uses so far."""

    def first_round(self, impl: str, completions: Sequence[Completion]) -> None:
        """The first round's completions, where more rounds follow."""


# Files of prompts. If a prompt can't be used, its line is named and nothing is sampled: dropping it changes the set.

# Each prompt has its own completions, figures and section of a report; ten thousand of them are a benchmark's size.
PROMPTS_MOST = 10_000
_ROW_BYTES = 4 * 2**20  # a longer prompt is beyond the context of any model here
_COLUMN = "prompt"


def load_prompts(path: Path, column: str | None = None) -> list[str]:
    """The prompts of a file, in its order; equal prompts stay separate. `column` is the field or column that holds
    them; None: "prompt", or the only one there is. Raises UserError: no such file or column, another format, not UTF-8,
    an empty or missing prompt, no prompt at all, or more than `PROMPTS_MOST`."""
    suffix = path.suffix.lower()
    read = _READERS.get(suffix)
    if read is None:
        raise UserError(f"{path}: prompts in a {suffix or 'file without a suffix'}", f"Use {', '.join(_READERS)}.")
    if suffix == ".txt" and column is not None:
        raise UserError(f"--column {column}: {path.name} is plain text and has no columns", "Leave --column out.")
    prompts: list[str] = []
    try:
        regular(path)  # opening a FIFO would wait
        for place, value in read(path, column):
            where = f"{path.name}, {place}"
            if len(prompts) == PROMPTS_MOST:
                raise UserError(f"{path} holds more than {PROMPTS_MOST:,} prompts", "Draw fewer of them.")
            if not isinstance(value, str):
                shown = "no prompt" if value is None else f"{type(value).__name__} where the prompt should be"
                raise UserError(f"{where}: {shown}", "Give every row a text.")
            if not value.strip():
                raise UserError(f"{where}: the prompt is empty", "Take the row out, or give it some text.")
            if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
                raise UserError(f"{where}: the prompt holds a NUL or half a character", "Clean the row.")
            prompts.append(value)
    except FileNotFoundError:
        raise UserError(f"no prompt file at {path}", "Check the path.") from None
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}", "Give a readable file of prompts.") from error
    if not prompts:
        raise UserError(f"{path} holds no prompts", f"Write one a row; {suffix} was read as such.")
    return prompts


def _lines(path: Path, _: str | None = None) -> Iterator[tuple[str, str]]:
    """(position, text without its line end): split only at line feeds, because text may hold other separators."""
    with path.open("rb") as stream:
        for number in itertools.count(1):
            if not (line := stream.readline(_ROW_BYTES + 1)):
                return
            where = f"{path.name}, line {number}"
            if len(line) > _ROW_BYTES:
                raise UserError(f"{where} is longer than {_ROW_BYTES >> 20} MiB", "Is it a file of prompts?")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                what = f"{where} is not UTF-8 text (its byte {error.start})"
                raise UserError(what, "Save it as UTF-8.") from error
            yield f"line {number}", text.removesuffix("\n").removesuffix("\r")


def _json(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    for place, text in _lines(path):
        where = f"{path.name}, {place}"
        if not text.strip():
            raise UserError(f"{where} is empty", "Take the line out.")
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is no JSON: {one_line(str(error), 120)}", "Write one object a line.") from error
        if isinstance(record, dict):
            yield place, record[_named(where, "field", list(record), column)]
        elif isinstance(record, str) and column is None:
            yield place, record
        else:
            raise UserError(f"{where} is no JSON object", 'Write {"prompt": "..."} a line.')


def _csv(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    rows = csv.reader((f"{text}\n" for _, text in _lines(path)), strict=True)
    limit = csv.field_size_limit(_ROW_BYTES)
    try:
        if (header := next(rows, None)) is None:
            return
        index = header.index(_named(path.name, "column", header, column))
        begins = rows.line_num + 1
        # a quoted field may contain line ends: a row is named by its first line
        for row in rows:
            if len(row) != len(header):
                what = f"{path.name}, line {begins} has {len(row)} of {len(header)} columns"
                raise UserError(what, "Take the line out, or quote the commas in it.")
            yield f"line {begins}", row[index]
            begins = rows.line_num + 1
    except csv.Error as error:
        message = one_line(str(error), 120)
        raise UserError(f"{path.name}, line {rows.line_num}: {message}", "Is it CSV, with a header?") from error
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        what = f"{path.name}: Parquet needs pyarrow, which is not installed"
        raise UserError(what, "Run pip install pyarrow, or save it as CSV.") from error
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        with parquet.ParquetFile(path) as file:
            if file.metadata.num_rows > PROMPTS_MOST:
                what = f"{path} holds {file.metadata.num_rows:,} rows; {PROMPTS_MOST:,} prompts are the most"
                raise UserError(what, "Draw fewer of them.")
            name = _named(path.name, "column", list(file.schema_arrow.names), column)
            batches = file.iter_batches(batch_size=256, columns=[name])
            values = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            for row, value in enumerate(values, 1):
                yield f"row {row}", value
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        message = one_line(str(error), 120)
        raise UserError(f"{path.name} can't be read as Parquet: {message}", "Write it again.") from error


_READERS: dict[str, Callable[[Path, str | None], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".txt": _lines,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _named(where: str, kind: str, names: list[str], column: str | None) -> str:
    wanted = column if column is not None else _COLUMN
    if wanted in names:
        return wanted
    if column is None and len(names) == 1:
        return names[0]
    hint = suggestion(wanted, [one_line(name, 80) for name in names[:50]]) if names else "Is there a header?"
    hint = hint if column is not None else f"Name another with --column. {hint}"
    raise UserError(f"{where} has no {kind} {one_line(wanted, 80)!r}", hint)


LONG = 44  # a shorter prompt is followed by its own completion, so that there is something to chunk or share
_EVERY = 8


def long_prompt(prompt: Sequence[int], completion: Sequence[int], context: int) -> tuple[int, ...]:
    """The prompt, with its own completion appended up to `LONG` tokens if it is short."""
    if len(prompt) >= LONG:
        return tuple(prompt)
    return (*prompt, *completion)[: max(len(prompt), min(LONG, context - 1))]


def earlier_text(completion: Sequence[int]) -> tuple[int, ...]:
    """The completion before an edit: every eighth token is replaced by the one before it."""
    return tuple(completion[i - 1] if i % _EVERY == _EVERY - 1 else token for i, token in enumerate(completion))
