"""The axis of speculative decoding: k drafted tokens and the last one are verified in one step."""

from __future__ import annotations

from dataclasses import replace

from nondet.errors import UserError, suggestion
from nondet.sampling.axes.base import Axis, Conditions, Proof, Seen, Subject
from nondet.sampling.drafters import DRAFTERS

__all__ = ["SPECULATIVE"]

# The draft model runs its layers over the end of each text anew for every drafted token, so it is asked for few.
_TOKENS = {"lookup": 4, "draft": 2, "model": 2, "edit": 4}


def _speculative(subject: Subject, value: str) -> Conditions:
    if value == "none":
        return replace(subject.base, setting=replace(subject.base.setting, drafts=""))
    if value not in DRAFTERS:
        raise UserError(f"--vary: speculative={value} is unknown", suggestion(value, ["none", *DRAFTERS]))
    if value == "draft" and not subject.halves:
        raise UserError(
            "--vary: speculative=draft: the model's layers are not where a draft model could be made of them",
            "Leave it out: --vary speculative=lookup:edit.",
        )
    if value == "model" and not subject.draft_model:
        raise UserError("--vary: speculative=model needs a draft model", "Name it: --draft-model FOLDER.")
    if subject.base.load.graphs:
        raise UserError("--vary: speculative does not go with --load graphs=on", "Leave graphs=on out.")
    setting = replace(
        subject.base.setting,
        drafts=value,
        draft_tokens=_TOKENS[value],
        draft_model=subject.draft_model if value == "model" else "",
        earlier=subject.earlier,
    )
    return replace(subject.base, setting=setting)


def _proof(value: str, seen: Seen, base: Seen) -> Proof:
    drafted, accepted = seen.get("drafted", 0), seen.get("accepted", 0)
    text = f"{accepted} of {drafted} drafted tokens were accepted"
    return Proof(drafted == 0 if value == "none" else accepted > 0, text)


SPECULATIVE = Axis(
    name="speculative",
    changes="where drafts come from: none, prompt lookup, a draft model (half of the layers; another), an edited text",
    why="a verify step computes k + 1 query tokens of a request at once, where plain decoding computes one",
    value=lambda s: s.base.setting.drafts or "none",
    values=lambda s: [name for name in DRAFTERS if {"draft": s.halves, "model": bool(s.draft_model)}.get(name, True)],
    apply=_speculative,
    proof=_proof,
    lacking=lambda s: "drafts can't be verified inside of CUDA graphs" if s.base.load.graphs else "",
)
