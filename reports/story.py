"""A diagnosis told from top to bottom: the answers, the steps that led there, what was tried. The same everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from nondet.core.records import Run
from nondet.diagnose.verdict import QUESTIONS, batch_step, blamed, conclude
from nondet.sampling.analysis import diagnosed_cost

__all__ = ["Story", "story", "story_headline"]


@dataclass(frozen=True)
class Story:
    """What a report tells.

    Attributes:
        finding: In a word.
        answers: (question, answer) of the verdict; no entry where the question did not arise.
        steps: (number and question, outcome, what was found) in the order in which they were taken.
        axes: (axis, implementation, what was held, differing traces, differing completions, where) of what was varied.
        limits: What was not asked, or has no answer.
    """

    finding: str
    answers: tuple[tuple[str, str], ...]
    steps: tuple[tuple[str, str, str], ...]
    axes: tuple[tuple[str, ...], ...]
    limits: tuple[str, ...]

    AXES_HEAD = ("varied", "under", "held", "other traces", "other tokens", "parted at")


def story(run: Run) -> Story | None:
    """The story of a run of `nondet diagnose`; None for other runs. A run that was stopped tells as far as it came."""
    if not run.steps:
        return None
    verdict = run.diagnoses[-1] if run.diagnoses else conclude(run)
    kept, told = _batch_sentences(run)
    answers = [
        ("Whether", verdict.whether.replace(kept, told) if kept else verdict.whether),
        ("Where", verdict.where),
        ("Why", verdict.why),
        ("Cure", verdict.cure),
        ("Cost", diagnosed_cost(run) or verdict.cost),
    ]
    numbers = {name: i for i, name in enumerate(QUESTIONS, 1)}
    return Story(
        finding=verdict.finding,
        answers=tuple((label, text) for label, text in answers if text),
        steps=tuple(
            (
                f"{numbers.get(s.name, '?')}. {QUESTIONS.get(s.name, s.name)}",
                s.outcome,
                f"{told if s.name == 'batch' else s.sentence}.",
            )
            for s in run.steps
        ),
        axes=tuple(
            (
                a.axis,
                a.impl,
                a.held,
                f"{a.traces} of {a.tried}" if a.tried else "not met",
                f"{a.tokens} of {a.tried}" if a.tried else "",
                ", ".join(a.parted) or "nowhere",
            )
            for a in run.axes
        ),
        limits=tuple(verdict.limits),
    )


def _batch_sentences(run: Run) -> tuple[str, str]:
    """What was found of the batch, as the run file has it and as its completions say it here: intervals by the formulas
    of this version. Where the records are not those of the step, as the run file has it."""
    batch = next((s for s in run.steps if s.name == "batch"), None)
    if batch is None:
        return "", ""
    alone = next((s.facts for s in run.steps if s.name == "greedy"), {})
    again = batch_step(run, "stock", alone) if {"trace", "tokens"} <= alone.keys() else batch
    return batch.sentence, again.sentence if again.figures == batch.figures else batch.sentence


def story_headline(run: Run) -> str:
    """The finding in a sentence, without its full stop; "" for other runs."""
    told = story(run)
    if told is None:
        return ""
    named = next((c for c in blamed(run, told.finding) if c.call), None)
    cured = any(s.name == "cure" and s.outcome == "yes" for s in run.steps)
    text = told.finding
    if named is not None:
        text += f": the first guilty operator is `{named.call}` of {named.module}"
    return text + ("; batch_invariant() left no divergence" if cured else "")
