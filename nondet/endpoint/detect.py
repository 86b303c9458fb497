"""What a server is, by asking it cheap questions, and which of its models is meant. No question makes it compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import UserError, suggestion
from .document import item, optional, parse
from .failures import AttemptError
from .transport import Transport

__all__ = ["Choice", "choose"]

_NO_SERVER = {"connect", "certificate", "reset", "cut-off", "timeout", "protocol", "redirect"}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which protocol is spoken with which model, and why.

    Attributes:
        protocol: A key of `FORMATS`.
        model: The name to send.
        server: What the server is, "vllm 0.11.0"; "" where nobody can say.
        evidence: What it was known by, a line each.
    """

    protocol: str
    model: str
    server: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class _Question:
    """A page that only one kind of server has: what raises if it is another's, and where the version is."""

    server: str
    path: str
    known_by: Callable[[Any], object]
    version: str = ""


def _routes(document: Any) -> object:
    return item(item(document, "paths", dict), "/load_model", dict)


_QUESTIONS = (
    _Question("sglang", "/get_model_info", lambda page: item(page, "is_generation", bool)),
    _Question("sglang", "/model_info", lambda page: item(page, "is_generation", bool)),
    _Question("llama.cpp", "/props", lambda page: item(page, "default_generation_settings", dict), "build_info"),
    _Question("tgi", "/info", lambda page: item(page, "max_total_tokens", int), "version"),
    _Question("vllm", "/version", lambda page: item(page, "version", str), "version"),
    _Question("transformers", "/openapi.json", _routes),
)
# What a server says of its models' owner -> the question that confirms it and knows the version.
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
_OPENAI = {"openai", "openai-internal", "system"}
# Server and whether the URL ends in /v1/chat/completions -> the form that says most.
_NATIVE = {
    ("vllm", False): "vllm",
    ("vllm", True): "vllm-chat",
    ("sglang", False): "sglang",
    ("sglang", True): "openai-chat",
    ("llama.cpp", False): "llama.cpp",
    ("llama.cpp", True): "openai-chat",
    ("tgi", False): "tgi",
    ("tgi", True): "openai-chat",
    ("transformers", False): "transformers",
    ("transformers", True): "transformers-chat",
}


async def choose(transport: Transport, *, protocol: str, model: str | None) -> Choice:
    """Ask the server what it is and what it holds.

    Args:
        transport: Where.
        protocol: "auto" or what the user said, which is then kept.
        model: What the user said; None takes the only one that is listed.

    Raises:
        UserError: No server, none that is understood, or a model that it does not list.
    """
    listed, owners, evidence = await _models(transport)
    server, version, lines = await _server(transport, [_OWNERS[owner] for owner in owners if owner in _OWNERS])
    evidence += lines
    chosen = protocol
    if protocol == "auto":
        path = transport.address.protocol
        chosen = _NATIVE.get((server, path == "openai-chat"), path)
        if not chosen and _OPENAI & set(owners):
            chosen = "openai-chat"
            evidence += ("the models' owner is OpenAI, whose models chat",)
        elif not chosen:
            chosen, line = await _openai(transport)
            evidence += (line,)
    name = _model(transport, model, listed, strict=server != "transformers")  # which lists what it could load
    return Choice(protocol=chosen, model=name, server=f"{server} {version}".strip(), evidence=evidence)


async def _models(transport: Transport) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Names and owners of /v1/models; the one question whose failure may mean that there is no server.

    Raises:
        UserError: Nothing there that answers.
    """
    key, names, owners = transport.key, [], []
    try:
        for entry in item(await _ask(transport, "/v1/models"), "data", list):
            names.append(key.reason(item(entry, "id", str)))
            owners.append(key.reason(optional(entry, "owned_by", str) or "", 40))
    except AttemptError as failure:
        url = transport.address.url
        if failure.kind in _NO_SERVER:
            hints = {
                "certificate": "Name its certificate with --ca-file, or see --insecure.",
                "redirect": "Give the address that it redirects to, if you trust it.",
            }
            raise UserError(
                f"no server that can be asked at {url}: {transport.reason(failure.reason)}",
                hints.get(failure.kind, "Is it running, and is the address right?"),
            ) from None
        if failure.kind in ("http-401", "http-403"):
            hint = "Put the key into NONDET_API_KEY, or name its variable with --key-env."
            raise UserError(f"the server at {url} refuses: {transport.reason(failure.reason)}", hint) from None
        return [], [], (f"/v1/models: {transport.reason(failure.reason, 80)}",)
    said = f"/v1/models lists {len(names)}" + (f", owned by {owners[0]}" if owners and owners[0] else "")
    return names, owners, (said,)


async def _server(transport: Transport, named: list[str]) -> tuple[str, str, tuple[str, ...]]:
    """Which server has the page that only it has, the one that the models' owner names first."""
    for question in sorted(_QUESTIONS, key=lambda question: question.server not in named):
        try:
            page = await _ask(transport, question.path)
            question.known_by(page)
            version = optional(page, question.version, str) or "" if question.version else ""
        except AttemptError:
            continue
        version = transport.key.reason(version, 40)
        return question.server, version, (f"{question.path} is there: {question.server} {version}".rstrip(),)
    if named:
        return named[0], "", (f"the models' owner names {named[0]}",)
    return "", "", ("no page that a known server has",)


async def _openai(transport: Transport) -> tuple[str, str]:
    """Whether a server has /v1/completions: an empty request is refused there, but not as unknown."""
    try:
        async with transport.exchange("POST", "/v1/completions", {}, within_s=transport.limits.page_s):
            return "openai", "/v1/completions is there"
    except AttemptError as failure:
        if failure.kind in ("http-404", "http-405", "http-501"):
            return "openai-chat", f"/v1/completions is not there (HTTP {failure.kind[5:]})"
        return "openai", "/v1/completions is there"


async def _ask(transport: Transport, path: str) -> Any:
    """The JSON at a path.

    Raises:
        AttemptError: Whatever went wrong.
    """
    async with transport.exchange("GET", path, within_s=transport.limits.page_s) as response:
        return parse(await transport.body(response, transport.limits.most_page_bytes))


def _model(transport: Transport, model: str | None, listed: list[str], strict: bool) -> str:
    """The model's name as the server knows it.

    Raises:
        UserError: None named and not exactly one listed, or one that is not listed.
    """
    url = transport.address.url
    if model is None:
        if len(listed) == 1:
            return listed[0]
        hint = f"Name one with --model: {', '.join(listed[:8])}" if listed else "Name it with --model."
        raise UserError(f"the server at {url} lists {len(listed) or 'no'} models", hint)
    if strict and listed and model not in listed:
        raise UserError(f"the server at {url} has no model {model!r}", suggestion(model, listed))
    return model
