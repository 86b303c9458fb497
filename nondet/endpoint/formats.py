"""The forms in which servers take requests and give answers, a class each, a line each in `FORMATS`."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nondet.endpoint.arms import Answer, Ask
from nondet.endpoint.http import AttemptError, count, float32_bytes, item, list_of_ints, malformed, optional

FINISHES = {
    "length": "length",
    "max_tokens": "length",
    "limit": "length",
    "stop": "eos",
    "eos": "eos",
    "eos_token": "eos",
    "word": "eos",
    "stop_sequence": "eos",
}


@dataclass(frozen=True)
class Alternative:
    """A token that could stand at one position: what it is known by, its logprob as sent, its id or -1."""

    key: Hashable
    logprob: Any
    id: int = -1


@dataclass
class Parts:
    """What the documents of one answer have said so far; a stream adds to it piece by piece.

    Attributes:
        text: Pieces of the completion.
        ids, bytes: Of the tokens; None where the server gives none.
        chosen: The token at each position, with its logprob; empty without logprobs.
        top: The alternatives at each position, in no order; empty without them.
        finish: As the server said it; "" until it did.
        prompt_tokens, cached_tokens, completion_tokens, fingerprint, model: As in `Answer`.
        notes: What was odd.
        ids_of_logprobs: Whether the ids came with the logprobs, and so leave out what those leave out.
        streamed: Whether it came as a stream.
        ended: Whether the server marked the end of the answer.
    """

    text: list[str] = field(default_factory=list)
    ids: list[int] | None = None
    bytes: list[bytes] | None = None
    chosen: list[Alternative] = field(default_factory=list)
    top: list[list[Alternative]] = field(default_factory=list)
    finish: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    fingerprint: str = ""
    model: str = ""
    notes: list[str] = field(default_factory=list)
    ids_of_logprobs: bool = False
    streamed: bool = False
    ended: bool = False

    def note(self, what: str) -> None:
        """Remember an oddity, once."""
        if what not in self.notes:
            self.notes.append(what)


def answer_from(ask: Ask, parts: Parts) -> Answer:
    """The answer that the parts of a whole body make, without times and attempts.

    Raises:
        AttemptError: "malformed": lists that do not fit each other, a finish that nobody knows.
    """
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
    said = parts.completion_tokens
    if said is not None and count is not None and said != count:
        parts.note(f"usage says {said} tokens, the answer has {count}")
    if max(count or 0, said or 0) > ask.max_tokens:
        parts.note("more tokens than max_tokens")
    return Answer(
        ask=ask.id,
        text=whole,  # a stream may have cut a pair in two; half of one can't be written as UTF-8
        token_ids=tuple(parts.ids) if parts.ids is not None else None,
        token_bytes=tuple(parts.bytes) if parts.bytes is not None else None,
        logprobs=logprobs,
        margins=margins,
        chosen_is_top=top,
        runner_up=runner_up,
        finish=finish,
        prompt_tokens=parts.prompt_tokens,
        cached_tokens=parts.cached_tokens,
        completion_tokens=said,
        fingerprint=parts.fingerprint,
        model=parts.model,
        notes=tuple(parts.notes),
    )


def _drop_holes(parts: Parts, text: str) -> None:
    """Take no ids and no bytes where some may be missing: a llama.cpp lists no token that begins a character.

    What is known of some tokens would be compared as if it were all: a fork in the others would not be seen. The token
    that ends a text is no hole in a stream, which never has it, nor in the text, which may leave its name out.
    """
    if parts.ids_of_logprobs and parts.ids is not None:
        count, said = len(parts.ids), parts.completion_tokens
        ended = parts.streamed and FINISHES.get(parts.finish) == "eos"
        if said not in (count, count + ended):
            parts.note(f"{count} of {'unknown' if said is None else said} token ids (none taken)")
            parts.ids, parts.bytes, parts.chosen, parts.top = None, None, [], []
    if parts.ids is None and parts.bytes is not None and not b"".join(parts.bytes).startswith(text.encode()):
        parts.note("bytes of tokens that are not the text's (not taken)")
        parts.bytes = None


def _count(parts: Parts) -> int | None:
    """How many tokens there are, where the lists agree on it.

    Raises:
        AttemptError: "malformed": they don't, or ids and logprobs name different tokens.
    """
    some = parts.chosen or parts.top
    named = {
        "ids": parts.ids,
        "bytes": parts.bytes,
        "logprobs": parts.chosen if some else None,
        "alternatives": parts.top if parts.top else None,
    }
    counts = {name: len(values) for name, values in named.items() if values is not None}
    if len(set(counts.values())) > 1:
        raise malformed("lists of different lengths: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    if parts.ids is not None and any(
        token.id not in (-1, identity) for token, identity in zip(parts.chosen, parts.ids, strict=False)
    ):
        raise malformed("ids and logprobs that name different tokens")
    return next(iter(counts.values()), None)


def _alternatives(parts: Parts, chosen: list[float]) -> tuple[bytes, int | None, tuple[int, ...]]:
    """Margins (float32: top-1 minus top-2, rounded once), how often the chosen token is a top one, and runners-up.

    The chosen token counts among the alternatives whether or not the server listed it. Where some position has no
    other token, nothing is said of any.

    Args:
        parts: With as many alternatives as tokens, or none.
        chosen: The chosen tokens' logprobs.
    """
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


# Logprobs as chat endpoints send them: a list of objects, one a token, with its text, its bytes, its alternatives.
#
# llama.cpp sends this form on /v1/completions too, and each object with the token's id.

_AS_ID = "token_id:"  # how vLLM writes a token with return_tokens_as_token_ids


def take_content(content: list[Any], parts: Parts) -> None:
    """Add tokens. Bytes count only as long as every token has some; ids are taken where the server sends them here.

    Raises:
        AttemptError: "malformed".
    """
    for token in content:
        key, raw, identity = _known(token)
        if not parts.chosen:
            parts.bytes = []
        parts.chosen.append(Alternative(key, token.get("logprob"), identity))
        if parts.bytes is not None and raw is not None and len(parts.bytes) + 1 == len(parts.chosen):
            parts.bytes.append(raw)
        else:
            parts.bytes = None
        if token.get("id") is not None:
            parts.ids = [*(parts.ids or []), identity]
            parts.ids_of_logprobs = True
        top = []
        for other in optional(token, "top_logprobs", list) or []:
            other_key, _, other_identity = _known(other)
            if other.get("logprob") is not None:
                top.append(Alternative(other_key, other["logprob"], other_identity))
        parts.top.append(top)


def named_id(token: str) -> int:
    """The id in vLLM's "token_id:N", or -1."""
    digits = token.removeprefix(_AS_ID)
    return int(digits) if digits != token and digits.isascii() and digits.isdigit() and len(digits) < 10 else -1


def _known(token: Any) -> tuple[int | str | tuple[int, ...], bytes | None, int]:
    """What a token is told from others by (its id, else its bytes, else its text), its bytes, its id or -1."""
    text, values = item(token, "token", str), optional(token, "bytes", list)
    identity = optional(token, "id", int)
    if identity is not None:
        (identity,) = list_of_ints([identity], "id")
    numbers = list_of_ints(values, "bytes") if values is not None else ()
    if any(number > 255 for number in numbers):
        raise malformed("'bytes' has a number above 255")
    key = identity if identity is not None else (numbers or text)
    return key, bytes(numbers) if values is not None else None, identity if identity is not None else named_id(text)


class Format(Protocol):
    """One form of requests and answers.

    Attributes:
        path: Of the requests, behind the server's prefix.
        ids: Whether answers have token ids.
        streams: Whether answers can be asked for as a stream of events.
        cuts: Whether a request can say top_k.
    """

    path: str
    ids: bool
    streams: bool
    cuts: bool

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON. Temperature and limits are always said: a server's own defaults are nobody's business."""

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add what one document (the body, or one event of a stream) says.

        Raises:
            AttemptError: "malformed", or "error" where the server reports one inside of an answer.
        """


def raise_reported(document: Any) -> None:
    """An error that a server reports with status 200 or in a stream.

    Raises:
        AttemptError: "error"; its reason is not yet redacted, which the client does.
    """
    if not isinstance(document, dict):
        return
    said = document if document.get("object") == "error" else document.get("error")  # an older vLLM's form
    if said is None or said is False:
        return
    message = said.get("message") if isinstance(said, dict) else said
    raise AttemptError("error", f"the server reports: {message if isinstance(message, str) else 'an error'}")


def only_choice(document: Any, streamed: bool) -> dict[str, Any] | None:
    """The one element of "choices"; None where an event of a stream has none (usage only).

    Raises:
        AttemptError: "malformed": none, several, or one that is not the first.
    """
    raise_reported(document)
    choices = item(document, "choices", list)
    if not choices and streamed:
        return None
    if len(choices) != 1:
        raise malformed(f"{len(choices)} choices where one was asked for")
    index = optional(choices[0], "index", int)
    if index not in (None, 0):
        raise malformed("a second choice, which nobody asked for")
    choice: dict[str, Any] = choices[0]
    return choice


def take_usage(document: Any, parts: Parts) -> None:
    """What an OpenAI-compatible server says of itself and of its counts.

    Raises:
        AttemptError: "malformed": a value of another type.
    """
    parts.fingerprint = optional(document, "system_fingerprint", str) or parts.fingerprint
    parts.model = optional(document, "model", str) or parts.model
    usage = optional(document, "usage", dict)
    if usage is None:
        return
    prompt, completion = (count(usage, key, parts.note) for key in ("prompt_tokens", "completion_tokens"))
    parts.prompt_tokens = prompt if prompt is not None else parts.prompt_tokens
    parts.completion_tokens = completion if completion is not None else parts.completion_tokens
    details = optional(usage, "prompt_tokens_details", dict)
    cached = count(details, "cached_tokens", parts.note) if details is not None else None
    parts.cached_tokens = cached if cached is not None else parts.cached_tokens


def text_prompt(ask: Ask) -> str:
    """The prompt, for servers that take nothing but text.

    Raises:
        AttemptError: "unsupported".
    """
    if isinstance(ask.prompt, tuple):
        raise AttemptError("unsupported", "this protocol takes no token ids for a prompt")
    return ask.prompt


class Completions:
    """The form that nearly every server has; what only some understand is left out of the request."""

    path = "/v1/completions"
    ids = False
    streams = True
    cuts = False

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(ask.prompt) if isinstance(ask.prompt, tuple) else ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
        }
        if ask.temperature:  # a server may take defaults from the model's own configuration
            body["top_p"] = ask.top_p
        if ask.top_logprobs:
            body["logprobs"] = ask.top_logprobs
        if ask.seed is not None:
            body["seed"] = ask.seed
        if stream:
            body["stream_options"] = {"include_usage": True}
        return {**body, **ask.extra, "stream": stream}

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event."""
        choice = only_choice(document, streamed)
        take_usage(document, parts)
        if choice is None:
            return
        parts.text.append(item(choice, "text", str))
        parts.finish = optional(choice, "finish_reason", str) or parts.finish
        logprobs = optional(choice, "logprobs", dict)
        if logprobs is None:
            return
        if isinstance(logprobs.get("content"), list):  # llama.cpp's server: the form of chats here too
            take_content(logprobs["content"], parts)
        else:
            _take_logprobs(logprobs, parts)


def _take_logprobs(logprobs: dict[str, Any], parts: Parts) -> None:
    """`tokens`, `token_logprobs` and `top_logprobs`: three lists of one length, the last one of objects by token.

    Raises:
        AttemptError: "malformed".
    """
    tokens, values = item(logprobs, "tokens", list), item(logprobs, "token_logprobs", list)
    tops = optional(logprobs, "top_logprobs", list)
    if len(tokens) != len(values) or (tops is not None and len(tops) != len(tokens)):
        raise malformed("logprobs of different lengths")
    for index, (token, value) in enumerate(zip(tokens, values, strict=True)):
        if not isinstance(token, str):
            raise malformed("a token of logprobs that is no text")
        parts.chosen.append(Alternative(token, value, named_id(token)))
        if tops is not None:
            top = tops[index] if tops[index] is not None else {}
            if not isinstance(top, dict):
                raise malformed("'top_logprobs' has something that is no object")
            # A value of null is a token that can't occur.
            parts.top.append(
                [Alternative(name, logprob, named_id(name)) for name, logprob in top.items() if logprob is not None]
            )


class Chat:
    """What every chat server has; what only some understand is left out of the request."""

    path = "/v1/chat/completions"
    ids = False
    streams = True
    cuts = False

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON.

        Raises:
            AttemptError: "unsupported": token ids for a prompt.
        """
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": text_prompt(ask)}],
            "temperature": ask.temperature,
        }
        if "max_completion_tokens" not in ask.extra:  # OpenAI's newer models take this name only, others the old one
            body["max_tokens"] = ask.max_tokens
        if ask.temperature:
            body["top_p"] = ask.top_p
        if ask.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": ask.top_logprobs}
        if ask.seed is not None:
            body["seed"] = ask.seed
        if stream:
            body["stream_options"] = {"include_usage": True}
        return {**body, **ask.extra, "stream": stream}

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event."""
        choice = only_choice(document, streamed)
        take_usage(document, parts)
        if choice is None:
            return
        message = item(choice, "delta" if streamed else "message", dict)
        thought = optional(message, "reasoning_content", str) or optional(message, "reasoning", str)
        if thought:
            parts.note("the text holds the reasoning as well")
            parts.text.append(thought)
        parts.text.append(optional(message, "content", str) or "")
        parts.finish = optional(choice, "finish_reason", str) or parts.finish
        logprobs = optional(choice, "logprobs", dict)
        content = optional(logprobs, "content", list) if logprobs is not None else None
        take_content(content or [], parts)


# vLLM's own fields on the OpenAI forms: token ids, and a salt that keeps a request from cached prefixes.
#
# `return_token_ids` puts `token_ids` into every choice (deltas in a stream), `return_tokens_as_token_ids` names the
# tokens of `logprobs` "token_id:N", so that two ids with one text stay two alternatives. The counter of prefix cache
# hits is in /metrics; `usage.prompt_tokens_details.cached_tokens` is there with --enable-prompt-tokens-details only,
# and /reset_prefix_cache with VLLM_SERVER_DEV_MODE=1 only.


class VllmCompletions(Completions):
    """/v1/completions of vLLM."""

    ids = True
    cuts = True

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON."""
        return _own_fields(ask) | super().body(ask, model, stream)

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event."""
        super().take(document, parts, streamed)
        _take_ids(document, parts)


class VllmChat(Chat):
    """/v1/chat/completions of vLLM. The bytes of its logprobs are those of decoded text, so ids take their place."""

    ids = True
    cuts = True

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON."""
        return _own_fields(ask) | super().body(ask, model, stream)

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event."""
        super().take(document, parts, streamed)
        parts.bytes = None
        _take_ids(document, parts)


def _own_fields(ask: Ask) -> dict[str, Any]:
    fields: dict[str, Any] = {"return_token_ids": True}
    if ask.top_logprobs:
        fields["return_tokens_as_token_ids"] = True
    if ask.temperature:
        fields["top_k"] = ask.top_k  # 0 keeps all
    if ask.ignore_eos:
        fields["ignore_eos"] = True
    if ask.cached is False:
        fields["cache_salt"] = secrets.token_hex(16)  # a prefix that no earlier request can have left behind
    return fields


def _take_ids(document: Any, parts: Parts) -> None:
    choices = item(document, "choices", list)
    if choices and choices[0].get("token_ids") is not None:  # old versions know no return_token_ids
        parts.ids = (parts.ids or []) + list(list_of_ints(item(choices[0], "token_ids", list), "token_ids"))


# SGLang's /generate: token ids, logprobs as [logprob, id, text], and how many prompt tokens the cache gave.
#
# A stream sends the whole answer so far with every event, or what is new where the server runs with
# --incremental-streaming-output; `completion_tokens` counts the whole so far in both, which tells them apart. The seed
# is kept with --enable-deterministic-inference only. `extra_key` keeps a request in a part of the prefix cache of its
# own.


class SglangGenerate:
    """The native form of SGLang."""

    path = "/generate"
    ids = True
    streams = True
    cuts = True

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON; the server holds one model, whose name is not sent."""
        sampling: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "temperature": ask.temperature}
        if ask.temperature:
            sampling |= {"top_k": ask.top_k or -1, "top_p": ask.top_p}
        if ask.ignore_eos:
            sampling["ignore_eos"] = True
        if ask.seed is not None:
            sampling["sampling_seed"] = ask.seed
        extra = dict(ask.extra)
        sampling |= extra.pop("sampling_params", {})
        body: dict[str, Any] = {"sampling_params": sampling}
        body |= {"input_ids": list(ask.prompt)} if isinstance(ask.prompt, tuple) else {"text": ask.prompt}
        if ask.top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": ask.top_logprobs, "logprob_start_len": -1}
        if ask.cached is False:
            body["extra_key"] = secrets.token_hex(16)
        return {**body, **extra, "stream": stream}

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event."""
        raise_reported(document)
        meta = item(document, "meta_info", dict)
        ids = list(list_of_ints(item(document, "output_ids", list), "output_ids"))
        completion = count(meta, "completion_tokens", parts.note)
        if parts.ids and (completion is None or completion != len(ids)):
            parts.ids += ids  # an incremental stream
        else:
            parts.ids, parts.text, parts.chosen, parts.top = ids, [], [], []
        parts.text.append(item(document, "text", str))
        parts.completion_tokens = completion
        parts.prompt_tokens = count(meta, "prompt_tokens", parts.note)
        parts.cached_tokens = count(meta, "cached_tokens", parts.note)
        parts.fingerprint = optional(meta, "weight_version", str) or ""
        finish = optional(meta, "finish_reason", dict)
        if finish is not None:
            parts.finish = item(finish, "type", str)
            if parts.finish == "abort":
                raise AttemptError(
                    "error", f"the server aborted it: {optional(finish, 'message', str) or 'no reason given'}"
                )
        tokens = optional(meta, "output_token_logprobs", list) or []
        tops = optional(meta, "output_top_logprobs", list) or []
        parts.chosen += [_alternative(token) for token in tokens]
        for top in tops:
            if not isinstance(top, list):
                raise malformed("'output_top_logprobs' has something that is no list")
            parts.top.append([_alternative(other) for other in top])


def _alternative(entry: Any) -> Alternative:
    if not isinstance(entry, list) or len(entry) < 2:
        raise malformed("a logprob that is not [logprob, id, text]")
    (identity,) = list_of_ints([entry[1]], "output_token_logprobs")
    return Alternative(identity, entry[0], identity)


# llama.cpp's /completion: token ids, probabilities with ids and bytes, and no reuse of cached prompts if asked.
#
# `timings.cache_n` counts the prompt tokens that were reused; `tokens_cached`, in spite of its name, how many the slot
# holds at the end. The server leaves a token without probability while the character that it begins is not finished,
# so the two lists can differ in length: then there are no logprobs, and a note says so. A stream leaves such tokens
# out altogether, ids too (and the end-of-text token, which every answer that ends by it has): then there are no ids
# either.


class Completion:
    """The native form of llama.cpp's server."""

    path = "/completion"
    ids = True
    streams = True
    cuts = True

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON; the server holds one model, whose name is not sent."""
        body: dict[str, Any] = {
            "prompt": list(ask.prompt) if isinstance(ask.prompt, tuple) else ask.prompt,
            "n_predict": ask.max_tokens,
            "temperature": ask.temperature,
            "return_tokens": True,
        }
        if ask.temperature:  # its defaults keep 40 tokens, 95% of the mass, and none below 5% of the likeliest
            body |= {"top_k": ask.top_k, "top_p": ask.top_p, "min_p": 0.0}
        if ask.top_logprobs:
            body["n_probs"] = ask.top_logprobs
        if ask.seed is not None:
            body["seed"] = ask.seed
        if ask.ignore_eos:
            body["ignore_eos"] = True
        if ask.cached is not None:
            body["cache_prompt"] = ask.cached
        return {**body, **ask.extra, "stream": stream}

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event; the last event of a stream repeats nothing."""
        raise_reported(document)
        parts.text.append(item(document, "content", str))
        parts.ids = (parts.ids or []) + list(list_of_ints(optional(document, "tokens", list) or [], "tokens"))
        for entry in optional(document, "completion_probabilities", list) or []:
            parts.chosen.append(_alternative_llama_cpp(entry))
            parts.top.append([_alternative_llama_cpp(other) for other in item(entry, "top_logprobs", list)])
        if streamed and not item(document, "stop", bool):
            return
        parts.finish = item(document, "stop_type", str)
        parts.ended = True
        parts.model = optional(document, "model", str) or parts.model
        parts.prompt_tokens = count(document, "tokens_evaluated", parts.note)
        parts.completion_tokens = count(document, "tokens_predicted", parts.note)
        timings = optional(document, "timings", dict)
        parts.cached_tokens = count(timings, "cache_n", parts.note) if timings is not None else None
        missing = (parts.completion_tokens or 0) - len(parts.ids)
        if streamed and missing > (parts.finish == "eos"):
            parts.note(f"the stream left out {missing} of {parts.completion_tokens} token ids (none taken)")
            parts.ids, parts.chosen, parts.top = None, [], []
        elif parts.chosen and len(parts.chosen) != len(parts.ids):
            parts.note(f"logprobs of {len(parts.chosen)} of {len(parts.ids)} tokens (dropped)")
            parts.chosen, parts.top = [], []


def _alternative_llama_cpp(entry: Any) -> Alternative:
    identity = item(entry, "id", int)
    if "logprob" not in entry:
        raise malformed("a probability without 'logprob'")
    return Alternative(identity, entry["logprob"], *list_of_ints([identity], "id"))


# Text Generation Inference's /generate: token ids and logprobs in `details`, one body (its streams are not asked for).
#
# Its temperature must be above 0, so a greedy request leaves it out and says `do_sample: false`. The end-of-text token
# is among the tokens, marked as special.


class Generate:
    """The native form of TGI."""

    path = "/generate"
    ids = True
    streams = False
    cuts = True

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON; the server holds one model, whose name is not sent.

        Raises:
            AttemptError: "unsupported": token ids for a prompt.
        """
        parameters: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "details": True, "do_sample": False}
        if ask.temperature:
            parameters |= {"temperature": ask.temperature, "do_sample": True}
            parameters |= {"top_k": ask.top_k} if ask.top_k else {}  # it takes neither 0 nor 1.0 for all
            parameters |= {"top_p": ask.top_p} if ask.top_p < 1.0 else {}
        if ask.top_logprobs:
            parameters["top_n_tokens"] = ask.top_logprobs
        if ask.seed is not None:
            parameters["seed"] = ask.seed
        extra = dict(ask.extra)
        parameters |= extra.pop("parameters", {})
        return {"inputs": text_prompt(ask), "parameters": parameters, **extra}

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body."""
        raise_reported(document)
        parts.text.append(item(document, "generated_text", str))
        details = item(document, "details", dict)
        parts.finish = item(details, "finish_reason", str)
        parts.completion_tokens = count(details, "generated_tokens", parts.note)
        parts.chosen = [_alternative_tgi(token) for token in item(details, "tokens", list)]
        parts.ids = [token.id for token in parts.chosen]
        for others in optional(details, "top_tokens", list) or []:
            if not isinstance(others, list):
                raise malformed("'top_tokens' has something that is no list")
            parts.top.append([_alternative_tgi(other) for other in others])


def _alternative_tgi(token: Any) -> Alternative:
    (identity,) = list_of_ints([item(token, "id", int)], "id")
    return Alternative(identity, token.get("logprob"), identity)


class TransformersCompletions(Completions):
    """/v1/completions of transformers serve; its streams end without [DONE]."""

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON, without logprobs, which it would ignore.

        Raises:
            AttemptError: "unsupported": token ids for a prompt.
        """
        return super().body(dataclasses.replace(ask, prompt=text_prompt(ask), top_logprobs=0), model, stream)


class TransformersChat(Chat):
    """/v1/chat/completions of transformers serve."""

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON, without logprobs, which it would ignore."""
        return super().body(dataclasses.replace(ask, top_logprobs=0), model, stream)


FORMATS: dict[str, Format] = {
    "openai": Completions(),
    "openai-chat": Chat(),
    "vllm": VllmCompletions(),
    "vllm-chat": VllmChat(),
    "sglang": SglangGenerate(),
    "llama.cpp": Completion(),
    "tgi": Generate(),
    "transformers": TransformersCompletions(),
    "transformers-chat": TransformersChat(),
}
