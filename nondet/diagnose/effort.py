"""How much a diagnosis asks: all of it where a session is quick, less where one takes seconds, and it says which.

What a session costs is not guessed from the model or the device but taken from the clock, once, after the first steps:
engines that are slow for each step of the batch are slow for many reasons. What was decided is in the step's record, so
that a resumed run asks the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from nondet.core.records import Run
from nondet.diagnose.axes import Axis
from nondet.verdict import plural

__all__ = ["WITHIN_S", "Effort", "chosen_effort", "effort_of", "thinned"]

# About how long a diagnosis of the default size may take, by device.
WITHIN_S = {"cpu": 180.0, "cuda": 120.0}
_FEWEST = 2  # rounds: completions of one round are not independent
_AXIS_TRIALS = 24
_TRACE_ROUNDS = 6.0  # what a trace takes, in rounds, as counted in runs on a CPU and on an H200
_TRACE_LEAST = 5.0  # sessions of either arm until the first culprit has a name, about
_CURE_SLOWNESS = 2.0  # how many times slower the cure is than stock, where nothing is known of it yet
_AXIS_SHARE = 0.6  # of the prompt alone: half its tokens, some trials with more requests


@dataclass(frozen=True)
class Effort:
    """What is asked.

    Attributes:
        rounds: Of the plan's rounds.
        every: Every so manieth value of an axis, and the last.
        margins: Rounds in which the logits of flips are looked at.
        times: Timed rounds of each implementation.
        round_s, alone_s: What a session in company and alone took, warm, set-up and all; 0.0 where it was not measured.
    """

    rounds: int
    every: int = 1
    margins: int = 2
    times: int = 2
    round_s: float = 0.0
    alone_s: float = 0.0

    def figures(self) -> dict[str, float]:
        """For the step's record."""
        return {name: float(value) for name, value in asdict(self).items()}

    def sentence(self, planned: int, within_s: float) -> str:
        """What is left out and why; "" where nothing is."""
        if self.every == 1 and self.rounds == planned:
            return ""
        axes = "" if self.every == 1 else f" and every {_ORDINALS[self.every]} value of each axis"
        return (
            f"a round takes {self.round_s:.1f} s here and the prompt alone {self.alone_s:.1f} s: "
            f"{plural(self.rounds, 'round')} of {planned}{axes} are asked, to end in about {within_s:.0f} s "
            "(--within 0 asks all)"
        )

    def _seconds(self) -> float:
        """From here to the end, by the two measured sessions."""
        stock = (self.rounds - 1 + _TRACE_ROUNDS + self.margins - 1) * self.round_s + self._axes_s
        return stock + self.cure_s + self.cost_s

    @property
    def _axes_s(self) -> float:
        return self.axis_s(_AXIS_TRIALS) / self.every

    def axis_s(self, trials: int) -> float:
        """What so many completions with one thing varied take."""
        return trials * _AXIS_SHARE * self.alone_s

    @property
    def naming_s(self) -> float:
        """What a trace takes at least: either arm freely, three times under control, and once to name a culprit."""
        return _TRACE_LEAST * (self.round_s + self.alone_s)

    @property
    def cure_s(self) -> float:
        """The rounds and the axes once more, under the cure."""
        return ((self.rounds + 1) * self.round_s + self._axes_s / 2) * _CURE_SLOWNESS  # some axes part

    @property
    def cost_s(self) -> float:
        """The timed rounds."""
        return (1 + 2 * _CURE_SLOWNESS) * self.times * self.round_s

    @property
    def least_cure(self) -> Effort:
        """The same with the cure asked of the fewest rounds, and of as few values as a diagnosis ever asks."""
        return replace(self, rounds=min(self.rounds, _FEWEST), every=max(_ORDINALS))


_ORDINALS = {2: "second", 3: "third"}


def chosen_effort(planned: int, round_s: float, alone_s: float, spent_s: float, within_s: float) -> Effort:
    """The most that fits, or the least there is.

    Args:
        planned: Rounds of the plan.
        spent_s: What has gone by.
        within_s: For everything; 0.0: no limit.
    """
    whole = Effort(planned, round_s=round_s, alone_s=alone_s)
    half, least = max(_FEWEST, -(-planned // 2)), min(planned, _FEWEST)
    steps = [
        whole,
        replace(whole, rounds=min(planned, half)),
        replace(whole, rounds=min(planned, half), every=2, margins=1),
        replace(whole, rounds=least, every=3, margins=1, times=1),
    ]
    if not within_s:
        return whole
    return next((effort for effort in steps if spent_s + effort._seconds() <= within_s), steps[-1])


def effort_of(run: Run, planned: int) -> Effort:
    """As the run's record has it; all, where it says nothing."""
    figures = next((s.figures for s in run.steps if s.name == "run"), {})
    if "rounds" not in figures:
        return Effort(planned)
    counts = {name: int(figures[name]) for name in ("rounds", "every", "margins", "times")}
    return Effort(**counts, round_s=figures["round_s"], alone_s=figures["alone_s"])


def thinned(axes: Sequence[Axis], every: int) -> list[Axis]:
    """The axes with every so manieth trial, and the last: the extremes are where kernels change."""
    return [
        axis if axis.shares else replace(axis, trials=(*axis.trials[:-1][::every], *axis.trials[-1:])) for axis in axes
    ]
