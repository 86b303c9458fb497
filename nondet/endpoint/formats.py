"""The formats of servers' requests and answers, a class each, a line each in `FORMATS`."""

from __future__ import annotations

import secrets
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from nondet.core.records import TOKENS_MOST
from nondet.endpoint.arms import Answer, Ask
from nondet.endpoint.http import AttemptError, float32_bytes, malformed, read

FINISHES = {
    **dict.fromkeys(("length", "max_tokens", "limit"), "length"),
    **dict.fromkeys(("stop", "eos", "eos_token", "word", "stop_sequence"), "eos"),
}


class Alternative(NamedTuple):
    """A possible token at one position: by what it is identified, its logprob as sent, its id or -1."""

    key: Hashable
    logprob: Any
    id: int = -1


@dataclass
class Parts:
    """The parsed parts of one answer; a stream adds to it piece by piece."""

    text: list[str] = field(default_factory=list)
    ids: list[int] | None = None  # of the tokens; None where the server gives none
    bytes: list[bytes] | None = None
    chosen: list[Any] = field(default_factory=list)  # the `Alternative` at each position; empty without logprobs
    top: list[list[Any]] = field(default_factory=list)  # all of them at each, in no order; or empty
    finish: str = ""  # as the server sent it; "" until then
    prompt_tokens: int | None = None  # as in `Answer`
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    fingerprint: str = ""
    model: str = ""
    notes: list[str] = field(default_factory=list)
    named: bool = False  # whether `bytes` are names of tokens, which may differ from the text's bytes
    ids_of_logprobs: bool = False  # whether ids may lack the tokens that the logprobs or the stream lack
    streamed: bool = False  # whether it came as a stream
    ended: bool = False  # whether the server marked the end of the answer

    def note(self, what: str) -> None:
        """Remember an oddity, once."""
        if what not in self.notes:
            self.notes.append(what)

    def count(self, counts: _Counts) -> None:
        """Take token counts, of those that the server sends; a note if a value is not a count."""
        for name in _Counts.__struct_fields__:
            if (value := getattr(counts, name)) is None:
                continue
            fits = 0 <= value <= TOKENS_MOST
            setattr(self, name, value if fits else None)
            if not fits:
                self.note(f"{name} of {str(value)[:40]} (not taken)")

    def add_ids(self, ids: list[int]) -> None:
        """Append ids of tokens."""
        self.ids = self.ids or []
        self.ids += ids


def answer_from(ask: Ask, parts: Parts) -> Answer:
    """The answer that the parts of a whole body make, without times and attempts. Inconsistent lists, or an unknown
    finish, are an AttemptError ("malformed")."""
    finish = FINISHES.get(parts.finish)
    if finish is None:
        raise malformed(f"it ended for the reason {parts.finish!r}" if parts.finish else "no reason why it ended")
    text = "".join(parts.text)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if "\ufffd" in whole and "\ufffd" not in text:
        parts.note("half a surrogate pair in the text (replaced)")
    _drop_holes(parts, whole)
    count = _count(parts)
    logprobs = float32_bytes([token.logprob for token in parts.chosen])
    margins, top, runner_up = _alternatives(parts, np.frombuffer(logprobs, "<f4").tolist())
    usage = parts.completion_tokens
    if usage is not None and count is not None and usage != count:
        parts.note(f"usage reports {usage} tokens, the answer has {count}")
    if max(count or 0, usage or 0) > ask.max_tokens:
        parts.note("more tokens than max_tokens")
    # a stream may have cut a pair in two; half of one can't be written as UTF-8, so the text is `whole`
    return Answer(
        ask=ask.id, text=whole, finish=finish, logprobs=logprobs, margins=margins, chosen_is_top=top,
        runner_up=runner_up, completion_tokens=usage, notes=tuple(parts.notes),
        token_ids=tuple(parts.ids) if parts.ids is not None else None,
        token_bytes=tuple(parts.bytes) if parts.bytes is not None else None,
        **{name: getattr(parts, name) for name in ("prompt_tokens", "cached_tokens", "fingerprint", "model")},
    )  # fmt: skip


def _drop_holes(parts: Parts, text: str) -> None:
    """Drop ids and bytes where some may be missing (llama.cpp lists no token that begins a character), because a
    difference in the missing ones would not be seen. The end-of-text token does not count as missing: a stream never
    has it, and the text may leave its name out."""
    if parts.ids_of_logprobs and parts.ids is not None:
        count, usage = len(parts.ids), parts.completion_tokens
        ended = parts.streamed and FINISHES.get(parts.finish) == "eos"
        if usage not in (count, count + ended):
            parts.note(f"{count} of {'unknown' if usage is None else usage} token ids (none taken)")
            parts.ids, parts.bytes, parts.chosen, parts.top = None, None, [], []
    if parts.named:
        parts.bytes = None if parts.ids is not None else parts.bytes
    elif parts.ids is None and parts.bytes is not None and not b"".join(parts.bytes).startswith(text.encode()):
        parts.note("bytes of tokens that are not the text's (not taken)")
        parts.bytes = None


def _count(parts: Parts) -> int | None:
    """How many tokens there are: the lists must agree on it, and ids and logprobs name the same tokens."""
    logprobs = parts.chosen if parts.chosen or parts.top else None
    named = {"ids": parts.ids, "bytes": parts.bytes, "logprobs": logprobs, "alternatives": parts.top or None}
    counts = {name: len(values) for name, values in named.items() if values is not None}
    if len(set(counts.values())) > 1:
        raise malformed("lists of different lengths: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    if parts.ids is not None and any(
        token.id not in (-1, identity) for token, identity in zip(parts.chosen, parts.ids, strict=False)
    ):
        raise malformed("ids and logprobs that name different tokens")
    return next(iter(counts.values()), None)


def _alternatives(parts: Parts, chosen: list[float]) -> tuple[bytes, int | None, tuple[int, ...]]:
    """Margins (float32: top-1 minus top-2, rounded once), how often the chosen token is a top one, and runners-up. The
    chosen token counts among the alternatives whether or not the server listed it. If some position has no other token,
    all are left out. There are as many alternatives as tokens, or none."""
    listed = [other for others in parts.top for other in others]
    values = iter(np.frombuffer(float32_bytes([other.logprob for other in listed], "top_logprobs"), "<f4").tolist())
    margins, top, runner_up = [], 0, []
    for token, others, logprob in zip(parts.chosen, parts.top, chosen, strict=bool(parts.top)):
        row = {}
        for other in others:
            value = next(values)
            if other.key != token.key:
                row[other.key] = (value, other.id)
            elif value != logprob:
                parts.note("a token with two logprobs")
        if row:
            best, identity = max(row.values(), key=lambda pair: pair[0])
            second, first = sorted((logprob, *(value for value, _ in row.values())))[-2:]
            margins.append(first - second)
            top += logprob >= best
            runner_up.append(identity)
    if not margins or len(margins) < len(parts.chosen):
        return b"", None, ()
    return np.array(margins, "<f4").tobytes(), top, tuple(runner_up)


# The parts of a document that a format reads: `read` refuses other types and numbers out of range, and skips any other
# field. Logprobs may be anything until `float32_bytes` takes them.

_Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_AS_ID = "token_id:"  # how vLLM writes a token with return_tokens_as_token_ids


def named_id(token: str) -> int:
    """The id in vLLM's "token_id:N", or -1."""
    digits = token.removeprefix(_AS_ID)
    return int(digits) if digits != token and digits.isascii() and digits.isdigit() and len(digits) < 10 else -1


class _Named(Struct):
    """A token in an OpenAI form: identified by its id, else its bytes, else its text."""

    token: str
    logprob: Any = None
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None = None
    id: _Id | None = None

    @property
    def alternative(self) -> Alternative:
        if self.id is not None:
            return Alternative(self.id, self.logprob, self.id)
        return Alternative(tuple(self.bytes or ()) or self.token, self.logprob, named_id(self.token))


class _Chosen(_Named):
    top_logprobs: list[_Named] | None = None


class _Numbered(Struct):
    """A token in a native form, which is the alternative itself."""

    logprob: Any  # first: SGLang sends [logprob, id, text]
    id: _Id

    @property
    def key(self) -> int:
        return self.id


class _Counts(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Format:
    """One format of requests and answers."""

    path: str  # of the requests, after the server's prefix
    cuts = True  # whether a request can have top_k

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON. It always has temperature and limits, because servers' defaults differ."""
        raise NotImplementedError

    def take(self, document: Any, parts: Parts) -> None:
        """Add one document: the body, or one event of a stream. An invalid one is an AttemptError: "malformed", or
        "error" where the server reports an error in it."""
        if isinstance(document, dict):
            # an error with status 200 or in a stream, an older vLLM's too; the client redacts its reason
            error = document if document.get("object") == "error" else document.get("error")
            if error is not None and error is not False:
                message = error.get("message") if isinstance(error, dict) else error
                message = message if isinstance(message, str) else "an error"
                raise AttemptError("error", f"the server reports: {message}")
        self._take(document, parts)

    def _take(self, document: Any, parts: Parts) -> None:
        raise NotImplementedError


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# OpenAI's formats, for completions and for chats, with only the fields that all servers understand; and vLLM's own
# fields on them: token ids, and a salt that keeps a request from cached prefixes.
#
# `return_token_ids` puts `token_ids` into every choice (deltas in a stream), `return_tokens_as_token_ids` names the
# tokens of `logprobs` "token_id:N", so that two ids with one text stay two alternatives. The counter of prefix cache
# hits is in /metrics; `usage.prompt_tokens_details.cached_tokens` exists only with --enable-prompt-tokens-details, and
# /reset_prefix_cache only with VLLM_SERVER_DEV_MODE=1.


class _Usage(_Counts):
    prompt_tokens_details: _Counts | None = None


class _Message(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(Struct):
    index: int | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    token_ids: list[_Id] | None = None  # vLLM's


class _Document(Struct):
    choices: list[_Choice]
    system_fingerprint: str | None = None
    model: str | None = None
    usage: _Usage | None = None


class _Lists(Struct):
    """Logprobs as three lists of one length, the last one of objects by token."""

    tokens: list[str]
    token_logprobs: list[Any]
    top_logprobs: list[dict[str, Any] | None] | None = None


def _name(token: str) -> bytes:
    return token.encode("utf-8", "surrogatepass")


def _take_content(content: Any, parts: Parts) -> None:
    """Logprobs as a list of objects, one per token. A token without bytes is identified by its name; ids are taken
    where the server sends them here."""
    for token in read(content, list[_Chosen]):
        parts.chosen.append(token.alternative)
        parts.named |= token.bytes is None
        parts.bytes = parts.bytes or []
        parts.bytes.append(_name(token.token) if token.bytes is None else bytes(token.bytes))
        if token.id is not None:
            parts.add_ids([token.id])
            parts.ids_of_logprobs = True
        parts.top.append([other.alternative for other in token.top_logprobs or () if other.logprob is not None])


def _take_lists(lists: _Lists, parts: Parts) -> None:
    tops = lists.top_logprobs
    if len(lists.tokens) != len(lists.token_logprobs) or (tops is not None and len(tops) != len(lists.tokens)):
        raise malformed("logprobs of different lengths")
    parts.chosen += [_Named(*pair).alternative for pair in zip(lists.tokens, lists.token_logprobs, strict=True)]
    parts.bytes, parts.named = [*(parts.bytes or ()), *map(_name, lists.tokens)], True
    for top in tops or ():  # a value of null is a token that can't occur
        pairs = (pair for pair in (top or {}).items() if pair[1] is not None)
        parts.top.append([_Named(*pair).alternative for pair in pairs])


class OpenAi(Format):
    """/v1/completions, which nearly every server has, or /v1/chat/completions.

    Args:
        vllm: Whether the server is vLLM, and understands its fields.
        logprobs: False for transformers serve, which would ignore a request for them.
    """

    def __init__(self, *, chat: bool = False, vllm: bool = False, logprobs: bool = True) -> None:
        self.path = "/v1/chat/completions" if chat else "/v1/completions"
        self._chat, self.cuts, self._logprobs = chat, vllm, logprobs

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """As `Format.body`."""
        alternatives = (ask.top_logprobs or None) if self._logprobs else None
        body = _given(
            model=model,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p if ask.temperature else None,  # defaults may come from the model's own configuration
            seed=ask.seed,
            stream=stream,
            stream_options={"include_usage": True} if stream else None,
        )
        if self._chat:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
            body |= _given(logprobs=True if alternatives else None, top_logprobs=alternatives)
        else:
            body |= _given(prompt=ask.prompt, logprobs=alternatives)
        if self.cuts:
            body |= _given(
                return_token_ids=True,
                return_tokens_as_token_ids=True if alternatives else None,
                top_k=ask.top_k if ask.temperature else None,  # 0 keeps all
                # so that no earlier request can have left this prefix in the cache
                cache_salt=secrets.token_hex(16) if ask.cached is False else None,
            )
        return body

    def _take(self, document: Any, parts: Parts) -> None:
        """The one choice, and the server's fields about itself and its counts."""
        whole = read(document, _Document)
        parts.fingerprint = whole.system_fingerprint or parts.fingerprint
        parts.model = whole.model or parts.model
        usage = whole.usage or _Usage()
        cached = (usage.prompt_tokens_details or _Counts()).cached_tokens
        parts.count(_Counts(usage.prompt_tokens, usage.completion_tokens, cached))
        if not whole.choices and parts.streamed:  # usage only
            return
        if len(whole.choices) != 1:
            raise malformed(f"{len(whole.choices)} choices where one was requested")
        (choice,) = whole.choices
        if choice.index not in (None, 0):
            raise malformed("a second choice, which was not requested")
        parts.finish = choice.finish_reason or parts.finish
        parts.text.append(self._text(choice, parts))
        logprobs = choice.logprobs or {}
        content = logprobs.get("content")
        if content is not None and (self._chat or isinstance(content, list)):  # llama.cpp sends it in both
            _take_content(content, parts)
        elif choice.logprobs is not None and not self._chat:
            _take_lists(read(logprobs, _Lists), parts)
        if self.cuts and choice.token_ids is not None:  # old versions don't know return_token_ids
            parts.add_ids(choice.token_ids)
        if self.cuts and self._chat:
            parts.bytes = None  # those of vLLM's logprobs are of decoded text: ids replace them

    def _text(self, choice: _Choice, parts: Parts) -> str:
        if not self._chat:
            if choice.text is None:
                raise malformed("no 'text' in the answer")
            return choice.text
        name = "delta" if parts.streamed else "message"
        message: _Message | None = getattr(choice, name)
        if message is None:
            raise malformed(f"no {name!r} in the answer")
        thought = message.reasoning_content or message.reasoning or ""
        if thought:
            parts.note("the text holds the reasoning as well")
        return thought + (message.content or "")


# SGLang's /generate: token ids, logprobs as [logprob, id, text], and how many prompt tokens the cache gave.
#
# A stream sends the whole answer so far with every event, or only what is new where the server runs with
# --incremental-streaming-output; `completion_tokens` counts the whole so far in both, which distinguishes them. The
# seed is respected only with --enable-deterministic-inference. `extra_key` gives a request a separate part of the
# prefix cache.


class _Entry(_Numbered, array_like=True):
    pass


class _Finish(Struct):
    type: str
    message: str | None = None


class _Meta(_Counts):
    weight_version: str | None = None
    num_retractions: Any = None
    finish_reason: _Finish | None = None
    output_token_logprobs: list[_Entry] | None = None
    output_top_logprobs: list[list[_Entry]] | None = None


class _Generated(Struct):
    text: str
    output_ids: list[_Id]
    meta_info: _Meta


class SglangGenerate(Format):
    """The native form of SGLang."""

    path = "/generate"

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """As `Format.body`."""
        drawn = ask.temperature > 0
        sampling = _given(
            max_new_tokens=ask.max_tokens,
            temperature=ask.temperature,
            top_k=(ask.top_k or -1) if drawn else None,
            top_p=ask.top_p if drawn else None,
            sampling_seed=ask.seed,
        )
        return _given(
            text=ask.prompt,
            sampling_params=sampling,
            return_logprob=True if ask.top_logprobs else None,
            top_logprobs_num=ask.top_logprobs or None,
            logprob_start_len=-1 if ask.top_logprobs else None,
            extra_key=secrets.token_hex(16) if ask.cached is False else None,
            stream=stream,
        )

    def _take(self, document: Any, parts: Parts) -> None:
        whole = read(document, _Generated)
        meta, ids = whole.meta_info, whole.output_ids
        parts.count(meta)
        if not parts.ids or parts.completion_tokens == len(ids):  # not an incremental stream
            parts.ids, parts.text, parts.chosen, parts.top = [], [], [], []
        parts.add_ids(ids)
        parts.text.append(whole.text)
        if meta.weight_version not in (None, "default"):  # every server's default name
            parts.fingerprint = f"weight_version {meta.weight_version}"
        if meta.num_retractions:
            parts.note("preempted while it ran")
        if meta.finish_reason is not None:
            parts.finish = meta.finish_reason.type
            if parts.finish == "abort":
                message = meta.finish_reason.message or "no reason given"
                raise AttemptError("error", f"the server aborted it: {message}")
        parts.chosen += meta.output_token_logprobs or ()
        parts.top += meta.output_top_logprobs or ()


# llama.cpp's /completion: token ids, probabilities with ids and bytes, and on request no reuse of cached prompts.
#
# `timings.cache_n` counts the prompt tokens that were reused; `tokens_cached`, in spite of its name, how many the slot
# holds at the end. The server leaves a token without probability while its first character is not finished, so the two
# lists can differ in length: then there are no logprobs, and a note reports that. A stream leaves these tokens out
# altogether, ids too (and the end-of-text token, which ends every answer): then there are no ids either.


class _Probability(_Numbered):
    top_logprobs: list[_Numbered]


class _Timings(Struct):
    cache_n: int | None = None


class _Event(Struct):
    content: str
    tokens: list[_Id] | None = None
    completion_probabilities: list[_Probability] | None = None
    stop: Any = None  # of events; the last one has the following
    stop_type: str = ""
    model: str | None = None
    tokens_evaluated: int | None = None
    tokens_predicted: int | None = None
    timings: _Timings | None = None


class Completion(Format):
    """The native form of llama.cpp's server."""

    path = "/completion"

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """As `Format.body`."""
        # its defaults keep 40 tokens, 95% of the mass, and none below 5% of the most likely
        drawn = ask.temperature > 0
        return _given(
            prompt=ask.prompt,
            n_predict=ask.max_tokens,
            temperature=ask.temperature,
            return_tokens=True,
            n_probs=ask.top_logprobs or None,
            seed=ask.seed,
            cache_prompt=ask.cached,
            stream=stream,
            **({"top_k": ask.top_k, "top_p": ask.top_p, "min_p": 0.0} if drawn else {}),
        )

    def _take(self, document: Any, parts: Parts) -> None:
        """The last event of a stream repeats nothing."""
        event = read(document, _Event)
        parts.text.append(event.content)
        parts.add_ids(event.tokens or [])
        for token in event.completion_probabilities or ():
            parts.chosen.append(token)
            parts.top.append(token.top_logprobs)
        if parts.streamed and not read(event.stop, bool):
            return
        parts.finish, parts.model, parts.ended = event.stop_type, event.model or parts.model, True
        cached = event.timings.cache_n if event.timings is not None else None
        parts.count(_Counts(event.tokens_evaluated, event.tokens_predicted, cached))
        count = len(parts.ids or [])
        parts.ids_of_logprobs = parts.streamed
        if parts.chosen and len(parts.chosen) != count:
            parts.note(f"logprobs of {len(parts.chosen)} of {count} tokens (dropped)")
            parts.chosen, parts.top = [], []


FORMATS: dict[str, Format] = {
    "openai": OpenAi(),
    "openai-chat": OpenAi(chat=True),
    "vllm": OpenAi(vllm=True),
    "vllm-chat": OpenAi(chat=True, vllm=True),
    "sglang": SglangGenerate(),
    "llama.cpp": Completion(),
    "transformers": OpenAi(logprobs=False),
    "transformers-chat": OpenAi(chat=True, logprobs=False),
}
