"""Rollouts from a file: plain JSONL, or rows by the names that trainers give their fields. Never a pickle: reading one
runs what is in it.

A plain line is {"prompt_ids": [...], "completion_ids": [...], "sampler_logprobs": [...]}, and may have
"trainer_logprobs", "step", "name", and what its tokens were drawn with: "temperature", "top_p", "top_k", "min_p".
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from nondet.core.records import Completion
from nondet.core.runfile import PACKED, decode, lines_of, read_run
from nondet.core.traces import check_traces, read_traces
from nondet.errors import UserError, one_line
from nondet.mismatch.figures import Logprobs

if TYPE_CHECKING:
    from nondet.sampling.model import LoadedModel

_NOT_JSONL = {  # beginning of the first line of a file that is not JSONL -> what the file is
    rb"\x1f\x8b|\xfd7zXZ": "packed, and its name does not end in .gz or .xz",
    rb"\xff\xfe|\xfe\xff|\0|[^\0]\0": "no UTF-8 text: UTF-16, UTF-32 or binary",
    rb"\x80|[](})]|c[\w.]+$|PK|\x93NUMPY|PAR1": "a pickle or another binary file, which is never read",
    rb"\s*\[": "one JSON array",
}
_FORM = "A line needs prompt_ids, completion_ids and sampler_logprobs; docs/on-policy.md has the form."
_MODEL = "Give the model, and so the tokenizer, that the tokens are of."
_SURE = 16  # first characters that identify a text
_LEAST = -104.0  # below it exp() is 0 in float32: no token is drawn
_ID = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


Setting = Mapping[str, float]  # of a distribution: its "temperature", "top-k", "min-p" and "top-p", those that it has
WHOLE: Setting = {}


@dataclass(frozen=True)
class Rollout:
    """A text and its sampled tokens."""

    name: str  # unique in its file
    ids: Sequence[int]  # prompt and completion
    drawn: Sequence[int]  # positions of `ids` that were sampled, in order; the first is 1 or more
    sampler: Logprobs  # [drawn] float32, at temperature 1 over the whole vocabulary unless something is wrong
    trainer: Logprobs | None = None  # the same of the trainer; None where it is to be computed
    step: int = 0  # of the training; 0 where it is unknown
    setting: Setting = field(default_factory=dict)  # that it was drawn with, where its line has it


def by_rollout(values: np.ndarray, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Values [n] of all sampled tokens, cut into those of each rollout."""
    return np.split(values, np.cumsum([len(r.drawn) for r in rollouts])[:-1])


class _Fields(NamedTuple):
    """A line's fields by a trainer's names; docs/on-policy.md has the versions. Without a prompt the completion is the
    last tokens, as many as there are logprobs; a mask is needed where these are of the whole text."""

    completion: str  # token ids, of the whole text where there is no prompt
    sampler: str
    trainer: str
    prompt: str = ""
    counts: str = ""  # mask of the completion: what was sampled
    real: tuple[str, ...] = ()  # masks of prompt and completion: what is no padding


_PADDED = ("prompt_mask", "completion_mask")
_SLIME = _Fields("tokens", "rollout_log_probs", "log_probs", counts="loss_mask")
_FORMS = (
    _Fields("completion_ids", "sampler_logprobs", "trainer_logprobs", "prompt_ids"),
    _Fields("completion_ids", "sampling_per_token_logps", "old_per_token_logps", "prompt_ids", "tool_mask", _PADDED),
    _Fields("responses", "rollout_log_probs", "old_log_probs", "prompts", "response_mask", ("attention_mask",)),
    _SLIME,
    _SLIME._replace(counts="loss_masks"),  # what its trainer saves
    _Fields("token_ids", "inference_logprobs", "trainer_logprobs", counts="loss_mask"),  # prime-rl
    _Fields("response_ids", "rollout_logprobs", "trainer_logprobs", "prompt_token_ids", "loss_masks"),  # SkyRL
)


class _Line(msgspec.Struct):
    """The fields that lines of all trainers may have."""

    step: Annotated[int, msgspec.Meta(ge=0)] = 0
    name: str | int = ""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None  # 0: the most likely token, and no draw
    top_k: int | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None


def _decoder(fields: _Fields) -> msgspec.json.Decoder[Any]:
    types: dict[str, Any] = dict.fromkeys((fields.prompt, fields.completion), list[_ID])
    types |= dict.fromkeys((fields.counts, *fields.real), list[bool | int])
    types |= dict.fromkeys((fields.sampler, fields.trainer), list[float | None])
    own = [(name, of | None, None) for name, of in types.items() if name]
    return msgspec.json.Decoder(msgspec.defstruct("_Row", own, bases=(_Line,)))


_DECODERS = {fields: _decoder(fields) for fields in _FORMS}
_NAMES = {name for d in _DECODERS.values() for name in d.type.__struct_fields__}


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts of a file, or of the .jsonl files under a folder, compressed or not, in the order of their names.
    Raises UserError: it is not there, has no rollouts, or a line is not a rollout; which, and what it lacks."""
    paths, found, names = [path], list[Rollout](), set[str]()
    if path.is_dir():
        ends = tuple(f".jsonl{packed}" for packed in ("", *PACKED))
        paths = sorted(one for one in path.rglob("*.jsonl*") if one.name.endswith(ends) and one.is_file())
        if not paths:
            raise UserError(f"{path} holds no {', '.join(ends)} file", "Give the file of rollouts.")
    for one in paths:
        for line, rollout in _of_file(one, f"{one.relative_to(path)}:" if path.is_dir() else ""):
            name = rollout.name
            while name in names:
                name = f"{name}, line {line}"
            names.add(name)
            found.append(replace(rollout, name=name))
    if not found:
        raise UserError(f"{path} holds no rollouts", _FORM)
    if not any(rollout.sampler.any() for rollout in found):
        raise UserError(f"{path}: all of the sampler's logprobs are 0, as of padding", _FORM)
    return found


def rollouts_of_run(path: Path, loaded: LoadedModel) -> dict[str, list[Rollout]]:
    """Each distinct completion of a run of `nondet sample`, with the sampler's logprob bits, by implementation. Raises
    UserError: it has none, its traces file is missing, a server gave no token ids, a prompt has another number of
    tokens here, or no completion has its text."""
    run = read_run(path)
    if not run.completions:
        raise UserError(f"{path} holds no completions", "Give a run of `nondet sample`, or --rollouts FILE.")
    traces, _ = read_traces(path)
    check_traces(run, traces)
    for server in run.servers:
        if server.known_by != "ids":
            what = f"{path}: {server.url} gave no token ids, its answers are known by their {server.known_by}"
            raise UserError(what, "Sample from a server that gives them, such as vLLM.")
    listed = run.header.plan["prompts"]
    prompts, counts = [loaded.encode(p["text"]) for p in listed], {(i, p["tokens"]) for i, p in enumerate(listed)}
    counts |= {(c.prompt, c.served.prompt_tokens or 0) for c in run.completions if c.served is not None}
    for index, tokens in sorted(counts):  # 0: a server did not report it
        if tokens and tokens != len(prompts[index]):
            what = f"{path}: prompt {index + 1} has {tokens} tokens there and {len(prompts[index])} here"
            raise UserError(what, f"{_MODEL} A long prompt is cut there.")
    rows = loaded.model.config.get_text_config().vocab_size
    texts = [(t, loaded.decode([i for i in t.token_ids if i < rows])) for t in traces.values() if t.text.strip()]
    if texts and not any(t.text.strip()[:_SURE] == text.strip()[:_SURE] for t, text in texts):
        there, here = one_line(texts[0][0].text, 30), one_line(texts[0][1], 30)
        raise UserError(f"{path}: a text is {there!r} there and {here!r} here, by another tokenizer", _MODEL)
    distinct, found = dict[tuple[str, int, str], Completion](), dict[str, list[Rollout]]()
    for c in run.completions:
        if c.status == "ok" and c.n_tokens and not c.nonfinite:
            distinct.setdefault((c.impl, c.prompt, c.trace), c)
    for c in distinct.values():
        ids, logprobs = [*prompts[c.prompt], *traces[c.trace].token_ids], traces[c.trace].logprob_array
        drawn = range(len(prompts[c.prompt]), len(ids))
        if len(logprobs) != len(drawn):
            raise UserError(f"{path}: {c.request} has no logprobs", "Sample from an engine that gives them.")
        found.setdefault(c.impl, []).append(Rollout(c.request, ids, drawn, logprobs.astype(np.float32)))
    return found


def _of_file(path: Path, prefix: str) -> Iterator[tuple[str, Rollout]]:
    """Each rollout with its file and line."""
    try:
        for number, line, _ in lines_of(path):
            for begins, what in _NOT_JSONL.items() if number == 1 else ():
                if re.match(begins, line):
                    raise UserError(f"{path} is {what}", "Write one JSON object a line; docs/on-policy.md has them.")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line  # UTF-8's byte order mark
            if not line.strip():
                continue
            try:
                given = _names(line)
                # the one of most of whose fields the line has
                fields = max(_FORMS, key=lambda f: len(given & {f.completion, f.prompt, f.sampler, f.counts}))
                if not given & {f.completion for f in _FORMS} and {"input", "output"} <= given:
                    raise ValueError("only texts, as verl writes them to rollout_data_dir: no token ids, no logprobs")
                rollout = _rollout(decode(_DECODERS[fields], line), fields, f"{prefix}{number}")
                yield f"{prefix}{number}", rollout
            except ValueError as error:
                nan = b"NaN" in line or b"Infinity" in line
                why = "a logprob is NaN or infinite" if nan else one_line(str(error), 160)
                raise UserError(f"{path}, line {number}: {why}", _FORM) from None
    except FileNotFoundError:
        raise UserError(f"no such file: {path}", "Give a .jsonl file of rollouts, or a folder of them.") from None


def _names(line: bytes) -> set[str]:
    """Its fields. Raises ValueError: one is there twice, of which a reader would take one value without a warning."""
    found = Counter[str]()
    with suppress(ValueError, RecursionError, TypeError):  # reported when it is read
        found.update(name for name, _ in json.loads(line, object_pairs_hook=tuple))
    if twice := [name for name, times in found.items() if times > 1 and name in _NAMES]:
        raise ValueError(f"{twice[0]} is there twice")
    return {*found}


def _rollout(line: Any, fields: _Fields, name: str) -> Rollout:
    """Raises ValueError: a field is missing."""

    def mask(names: Sequence[str], size: int, needed: bool) -> npt.NDArray[np.bool_]:
        given = [getattr(line, name) for name in names if name]
        values = [x for values in given for x in values or ()]
        if len(values) != size and (needed or any(values is not None for values in given)):
            raise ValueError(f"{' and '.join(names)} has {len(values)} entries for {size} tokens")
        return np.asarray(values or [True] * size, dtype=bool)

    for name_of in filter(None, (fields.prompt, fields.completion)):
        if not getattr(line, name_of):
            raise ValueError(f"no token ids: {name_of} is missing or empty")
    ids, given = getattr(line, fields.completion), getattr(line, fields.sampler)
    if given is None:
        raise ValueError(f"no logprobs: {fields.sampler} is missing")
    size = len(ids) if fields.prompt else min(len(given), len(ids))
    ids = [*(getattr(line, fields.prompt) if fields.prompt else ()), *ids]
    real = mask(fields.real, len(ids), False)
    taken = np.flatnonzero(mask((fields.counts,), size, size == len(ids)) & real[-size:])
    drawn = (np.cumsum(real) - 1)[taken + len(ids) - size].tolist()  # where padding is dropped
    if not drawn or drawn[0] < 1:
        raise ValueError("no token was sampled after a prompt")
    sampler, trainer = _logprobs("sampler", fields.sampler, given, size, taken), None
    if (given := getattr(line, fields.trainer)) is not None:
        trainer = _logprobs("trainer", fields.trainer, given, size, taken)
    if (sampler < _LEAST).any():
        raise ValueError(f"a sampled token has the logprob {float(sampler.min()):g}; vLLM writes -9999 for -infinity")
    named, ids = one_line(str(line.name), 80) or name, np.asarray(ids)[real].tolist()
    return Rollout(named, ids, drawn, sampler, trainer, line.step, _setting(line))


def _setting(line: _Line) -> Setting:
    """What the line was drawn with; at temperature 0 its logprobs are those of 1."""
    none, values = {"temperature": 1.0, "top-p": 1.0}, {"temperature": line.temperature, "top-k": line.top_k}
    values |= {"min-p": line.min_p, "top-p": line.top_p}
    return {n: v for n, v in values.items() if v and v > 0 and v != none.get(n) and line.temperature != 0}


def _logprobs(side: str, field: str, values: Any, count: int, taken: npt.NDArray[np.int64]) -> Logprobs:
    if len(values) != count:
        raise ValueError(f"{field} has {len(values)} entries for {count} tokens")
    given: Any = [np.nan if v is None else v for v in values]
    with np.errstate(over="ignore"):  # infinite in float32, and refused as that
        found = np.asarray(given, dtype=np.float32)[taken]
    if not np.isfinite(found).all():
        raise ValueError(f"a logprob of the {side} is NaN or infinite")
    if (found > 1e-3).any():
        raise ValueError(f"a logprob of the {side} is {float(found.max()):g}, above 0: is it a probability")
    return found


def check_vocabulary(rollouts: Sequence[Rollout], size: int, context: int | None, model: str) -> None:
    """Refuse, as a `UserError`, texts that this model's tokenizer can't have made, or longer than its context."""
    for r in rollouts:
        if max(r.ids) >= size:
            raise UserError(f"rollout {r.name} has token {max(r.ids)}, and {model} knows {size}", _MODEL)
        if context is not None and len(r.ids) > context:
            what = f"rollout {r.name} has {len(r.ids):,} tokens, and {model} has a context of {context:,}"
            raise UserError(what, _MODEL)
