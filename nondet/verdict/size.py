"""Rounding or a bug? Of completions, by their logprobs.

Where two answers have the same tokens so far, another order of the same sums moves a token's logprob a little, and the
two largest logits by about as much. So tokens differ only where these two were that close. A change far beyond what
a dtype's rounding adds up to in a model, or a token that won by much more than any logprob changed, has another cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nondet.core.records import Role, Run, role_of
from nondet.sampling.analysis import SampleSummary

# In nats, by the model's dtype: rounding by itself explains neither a lead of the top token nor a change of a logprob
# that is larger. Sums are in float32 under either short format; of a server the dtype is not known.
_FAR = {"float32": 1 / 64, "float64": 1 / 64}
_FAR_ELSE = 1.0
_SHORT = ("bfloat16", "float16")  # whose rounding hides what float32 shows
_SMALL = "as small as rounding makes it"
_STEP = 4.0  # rounding moves a token's lead about as far as it moves logprobs
DEFECT = "Look for a defect, such as keys or positions of another request that are read"


class Size(NamedTuple):
    """How far answers differ that share their tokens so far, in nats."""

    gap: float  # the largest change of a logprob before tokens differ
    margins: Sequence[float | None]  # where tokens differ, the lead of the token in one of them; None if not on record
    dtype: str = ""  # of the model's weights; "" where it is not known

    @property
    def margin(self) -> float:
        """The largest lead that is known."""
        return max((m for m in self.margins if m is not None), default=0.0)

    @property
    def is_bug(self) -> bool:
        """Whether rounding can't be the cause."""
        return max(self.gap, self.margin) > _FAR.get(self.dtype, _FAR_ELSE)

    @property
    def kind(self) -> str:
        """The finding in words."""
        if self.is_bug:
            return "not rounding"
        is_open = None in self.margins or self.margin > _STEP * self.gap
        return "rounding or a bug is not decided" if is_open else _SMALL

    @property
    def text(self) -> str:
        """The finding with its numbers."""
        lead = f", the two largest logits by up to {self.margin:.2g} where tokens differ" if self.margin else ""
        lead += "; how close the two largest logits were where tokens differ is not on record" * (None in self.margins)
        smaller = " (--dtype float32 would show a smaller bug)" * (self.dtype in _SHORT and not self.is_bug)
        return f"{self.kind}: logprobs differ by up to {self.gap:.2g} nats{lead}{smaller}"

    def beside(self, headline: str, *, brief: bool = False) -> str:
        """A headline with the finding: a bug is said first. `brief`: for a page's head, which has two lines."""
        if self.is_bug:
            return f"{self.text}; {headline}"
        said = f"{self.kind} (logprobs by up to {self.gap:.2g} nats)" if brief else self.text
        return f"{headline}; what differs is {said}" if self.kind == _SMALL else f"{headline}; {said}"


def size_of_samples(run: Run, summaries: Sequence[SampleSummary]) -> Size | None:
    """Of stock's completions, else of all; None where nothing differs, tokens are drawn, or there are no logprobs."""
    mine = [s for s in summaries if role_of(s.impl) in (Role.STOCK, Role.BACKEND)] or summaries
    apart = [s for s in mine if s.distinct_traces > 1]
    plan, settings, model = run.header.plan, run.header.environment, run.header.plan.get("model")
    if plan.get("sampling") or not apart or not all(s.has_logprobs for s in apart):
        return None
    coarse = settings.get("float32_matmul_precision", "highest") != "highest" or settings.get("allow_tf32_matmul")
    coarse = coarse or (isinstance(model, dict) and "quantization" in model)  # rounds more than its dtype says
    margins = [s.margins.largest if s.margins else None for s in apart if s.first_fork]
    return Size(max(s.logprob_spread for s in apart), margins, "" if coarse else str(plan.get("dtype")))
