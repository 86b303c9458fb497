"""The words of verdicts and gates, made here and nowhere else: a reason is a code with its numbers, until it is shown.

In a sentence `{n:#case}` is "1 case" or "2,000 cases", `{share:up}` a share in percent, rounded up, and a reason or
several of them stand for their own words. Where a verdict is told in brief, `where` and `tried` name no operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from nondet.core.statistics import percent

_OPERATORS_MOST = 6  # named in a phrase; more are counted
_RANGES_MOST = 24  # of sizes, the same


@dataclass(frozen=True)
class Reason:
    """What was counted, or what stands for or against a finding.

    Attributes:
        code: A key of `WORDS`.
        numbers: Counts, rates, names and other reasons, by the fields of its sentence.
    """

    code: str
    numbers: Mapping[str, Any]


def reason(code: str, **numbers: Any) -> Reason:
    """One with these numbers."""
    return Reason(code, numbers)


def plural(count: int, noun: str, many: str = "") -> str:
    """ "1 case", "2,000 cases"."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


# Code -> sentence or clause. A clause that begins with a comma, a colon or a space runs on from the one before it.
WORDS: dict[str, str] = {
    # what was counted
    "nonfinite": "{n:#completion} of {of:,} hold NaN or infinite logprobs: wrong",
    "nonfinite-values": "{n:#completion} hold NaN or infinite logprobs: wrong",
    "all-failed": "nothing was compared: {n:#request} failed and none succeeded",
    "too-few": "{n:#completion}, so nothing was compared",
    "no-tokens": "{n:#completion} without a token, so nothing was compared",
    "failed-beside": "{n:#request} failed",
    "distinct": "{n:#distinct completion} of {of:,}{by}",
    "tokens-identical": "tokens identical in {of:,} completions{by}",
    "compared-by": ", compared by {known_by}",
    "no-logprobs": ", without logprobs",
    "one-but": ", but {n:,} distinct logprob traces",
    "traces": " ({n:,} distinct logprob traces)",
    "ended-otherwise": ", {n:,} of which ended otherwise than equal ones",
    "arms": ": {comparisons:; }",
    "against": "{arm} against {base}: {seen}",
    "alike": "{n:,} alike",
    "parted": "{traces:,} of {n:,} part, {tokens:none} in tokens",
    "parted-texts": "{traces:,} of {n:,} part",
    "axes-followed": "logprob traces follow {n} of {of:#axis|axes} varied alone{which}",
    "which": " ({names})",
    "axis-apart": "{n:,} distinct traces over the values of {axis}, which may change them",
    "within": "at one value up to {n:,} distinct traces",
    "within-one": "one trace at every value",
    "no-pair": "no two completions can be held against each other",
    "no-effect": "no axis took effect at any value",
    "so-nothing": ", so nothing was compared",
    "but": ", but {what}",
    "parted-idly": "bits parted at {values}, which nothing shows to have taken effect",
    "idle-axes": "of {axes} no value took effect",
    "lone-axes": "of {axes} nothing was compared",
    "rows-none": "nothing was compared in {n:#case}",
    "rows": "{finding} in {hits:where}",
    "rows-class": "left its numerics class in {hits:where}",
    "rows-depend": "bits depend on {varied} in {hits:where}",
    "rows-clean": "{finding} in {trials:#trial} of {n:#case} (0 of {comparisons:#comparison} differed{tried:tried})",
    "no-fault": ": floating-point at work, and no fault",
    "order-changed": " while the order of reduction changed",
    "finding": ", {findings}",
    "findings": ": {findings}",
    # what no divergence leaves
    "bounds": " (at 95%, one-sided: below {rounds:up} of rounds ({n:,} compared), below {completions:up} of "
    "completions if they were independent)",
    "bounds-one-round": " (at 95%, one-sided: below {completions:up} of completions if they were independent; one "
    "round bounds no rate of rounds)",
    "bounds-values": " (at 95%, one-sided, at each value: {rounds}below {completions:up} of completions if they were "
    "independent ({n:,}))",
    "bounds-rounds": "below {rate:up} of rounds ({n:#round}), ",
    "bounds-none": " (too few for a bound)",
    "bounds-loads": " (at 95%, one-sided: below {rate:up} of loads ({n:#load}), below {requests:up} of requests if "
    "they were independent ({of:,} that ran beside others))",
    # of completions
    "requests-failed": "{n:#failed request} counted in no other figure.",
    "kinds-failed": "{n:#failed request} counted in no other figure: {kinds}.",
    "axes-failed": "{n:#failed request} in no other figure.",
    "ends": "Completions ended for different reasons: {named}{odd}.",
    "ends-odd": "; {n:,} of them otherwise than most with the same tokens and logprobs",
    "ends-alone": "Answers that ended otherwise agree in all else: batch or run may be the cause.",
    "unseeded-engine": "The engine draws from one generator for the whole batch, so a seed is nobody's own: who else "
    "is there changes what is drawn, whatever the logits.",
    "again": "Run again: {what}.",
    "again-none": "not tried",
    "again-parted": "{n:,} of {of:#request} in {rounds:#round} came out otherwise",
    "again-equal": "{rounds:#round} of {of:#request} the same, bit for bit: {rounds:#repetition}",
    "tokens-agree": "The tokens agree while the numbers under them do not: a closer race would part the tokens.",
    "graphs-first": "Steps ran as CUDA graphs: in each round the first step of a size runs without one. Where that "
    "gives other bits than a replay, who came first in the round shows as the batch.",
    "graphs-padded": "Steps ran as CUDA graphs, padded to a few sizes: products met those sizes, and no others.",
    "constant": "Every completion ran alone, in equal batches: this says nothing about batch dependence.",
    "hardly-tested": "No two completions are known to have met different batches: batch dependence was hardly tested.",
    "nan-agrees": "NaN agrees with itself whatever was computed: that nothing diverged says nothing here.",
    "alone-parted": "Completions that ran alone, in equal batches at every step, parted: the batch is not what "
    "changed.",
    "batches-unknown": "These completions are not known to have met different batches: batch or run may be the cause.",
    "traces-open": "{n:#other trace was|other traces were} seen only in rounds that were not run again: batch or run "
    "may be their cause.",
    "others-again": "The rounds in which traces parted were not run again: batch or run may be the cause.",
    "none-again": "No round was run again: batch or run may be the cause.",
    "value-unproven": "{axis}={value} is unproven, and counts nowhere: {proof}.",
    "base-once": "The base was not run again: run may be the cause.",
    "followed-once": "What followed an axis did so in rounds that were not run again: run may be the cause.",
    # of rows
    "left-out": "{cases: and }: in no other figure.",
    "cases": "{n:#case} {what}",
    "rows-nonfinite": "{n:#case gave|cases gave} NaN or infinity, which agree with themselves whatever was computed.",
    "rows-noted": "{n:#case carries|cases carry} a note, listed below.",
    "built": "Built by the probe to show a cause, and no part of this verdict ({operators}): {shown}.",
    "order": "Another order of reduction, taken on purpose, gave other bits in {hits:where}: that is floating-point at "
    "work, and no fault.",
    "unsteady": "{n:#sweep} of {operators} parted too, whose results change from run to run: whether what was swept "
    "matters there can't be told.",
    "batch-not-varied": "The batch was not varied: this says nothing about batch dependence.",
    "not-repeated": "No call of {operators} was repeated: batch or run may be the cause there.",
    # of servers
    "contract": "Contract: {what} ({evidence}).",
    "greedy": "temperature 0 does not take the likeliest token here: what parts may be sampling",
    "max-tokens": "max_tokens is not kept",
    "sums": "logprobs are no probabilities: their bits say nothing",
    "repeatable": "the same request, alone, twice gave other tokens in the contract check",
    "repeatable-bits": "the same request, alone, twice gave other logprob bits in the contract check",
    "seed-yes": "the server keeps to a seed",
    "seed-no": "the server does not keep to a seed",
    "seed-unknown": "whether the server keeps to a seed can't be told",
    "greedy-unknown": "Contract: whether temperature 0 is greedy can't be told.",
    "arm-unproven": "The arm {arm} is unproven: {proof}.",
    "arm-shown": "{arm:capital}: {proof}{alone}.",
    "arm-alone": "; {n:#completion} of it not known to have had company",
    "arm-unanswered": "The arm {arm} was planned under load, and no answer came of it.",
    "no-load": "No arm put the server under load: this says nothing about the batch.",
    "no-fingerprint": "The server gives no fingerprint: that it stayed the same one is not known.",
    "arms-apart": "The arms that part were not held against one another: run, cache or load may be the cause.",
    "doubt": "{arm:capital} against {base}: {why}",
    "not-held": "It was not held against server: one of them has no solo answers.",
    "by-texts": "Solo, against server's, by their texts alone: {seen}.",
    "known-otherwise": "It can't be held against server: {mine} here, {first} there.",
    "beside": "Solo, against server's: {seen}.",
    "not-greedy": "Temperature 0 is not greedy here: sampling may be the cause.",
    "seed-not-shown": "At this temperature nothing shows that the server keeps to a seed: sampling may be the cause.",
    "servers": "Answers came from {n} servers by their fingerprints: that may be the cause.",
    "no-solo": "There is no solo arm to hold it against.",
    "others-unknown": "Whether the server ran other requests meanwhile is not known: batch or run may be the cause.",
    "cache-unknown": "What the server had cached is not known: the prefix cache may be the cause.",
    "cache-split": "Answers with as many cached prompt tokens agree: the prefix cache may be the cause.",
    "cache-differs": "What the server had cached was not the same in both arms: the prefix cache may be the cause.",
    "base-unsteady": "{base:capital} does not agree with itself either: run or {arm} may be the cause.",
    "arm-unsteady": "{arm:capital} does not agree with itself.",
    "not-shown": "That {arm} was {arm} is unproven: {proof}.",
    "chance": "With {n:#answer} in {base}, chance alone would leave it without an odd one in {share:near} of cases: "
    "run or {arm} may be the cause. More of --arms {base}= would tell.",
    # what shows that an arm was what it is called
    "none-among": "{proof}, and none of these is known to have been among them",
    "cached": "the server had {low}{high} prompt tokens cached",
    "up-to": " to {n}",
    "counter": "the server's counter moved by {hits:g} cached prompt tokens",
    "was-not": "{proof}, so it was not {arm}",
    "cached-unsaid": "the server does not say what it had cached",
    "one-at-a-time": "one at a time from here; whether others asked the server is not known",
    "ran-most": "the server ran {running:g} at most, in {polls:#poll}",
    "others-too": "the server ran up to {running:g}: others asked it too",
    "ran-at-once": "the server ran up to {running:g} at once{waiting}, in {polls:#poll}",
    "waiting": ", {n:g} waiting",
    "streamed": "up to {n} answers streamed at the same time",
    "not-formed": "the server ran {running:g} at most: the load did not form",
    "not-streamed": "answers did not stream, and the server does not say what it runs",
    # of a gate
    "fail-on": "--fail-on {option} can't be answered: {why}.",
    "invariance": "Batch invariance can't be answered: {why}",
    "unmeasured": "nothing was measured: {n:#case} failed or {n:verb} skipped.",
    "incomplete": "the run did not come to its end",
    "inconclusive": "a question that had to be asked has no answer",
    "axis-untested": "under {impls} an axis was not tested",
    "load-unproven": "the load of {impls} is unproven",
    "not-compared": "nothing was compared{of}",
    "of-impls": " for {impls}",
    "drawn": "tokens were drawn, and {each:; }",
    "unseeded": "{impl}: nothing shows that it keeps to a seed ({evidence})",
    "verdict": "{impl}: {clauses}",
    "more": "and {n:#more verdict}",
    "not-enough": "{impl}: {tries:#{by} was|{by}s were} compared, and {needed:,} are needed to see a divergence in "
    "{rate:near} of {by}s with {confidence:near}",
    "power": "a divergence in {rate:near} of {by}s would have been seen with {seen:down} ({tries:#{by}} compared; "
    "below {bound:up} at {confidence:near}{independent})",
    "if-independent": ", if requests were independent",
}


def words(why: Reason, *, brief: bool = False) -> str:
    """Its sentence or clause."""
    return _Writer(brief).vformat(WORDS[why.code], (), why.numbers)


def phrase(clauses: Iterable[Reason], *, brief: bool = False) -> str:
    """Clauses as one: a semicolon before each that does not run on."""
    text = ""
    for clause in (words(c, brief=brief) for c in clauses):
        text += clause if not text or clause[:1] in ",: " else f"; {clause}"
    return text


class _Writer(Formatter):
    """Fills in numbers, as the head of this module says."""

    def __init__(self, brief: bool) -> None:
        self._brief = brief

    def format_field(self, value: Any, spec: str) -> str:
        """One field."""
        match spec:
            case "where":
                return _where(value, brief=self._brief)
            case "tried":
                return "" if self._brief else _tried(**value)
            case "near" | "up" | "down":
                return percent(value, spec)
            case "capital":
                return str(value).capitalize()
            case "none":
                return f"{value:,}" if value else "none"
            case "verb":
                return "was" if value == 1 else "were"
        if spec.startswith("#"):
            return plural(value, *spec[1:].split("|"))
        if value is None or isinstance(value, Reason):
            return words(value, brief=self._brief) if value else ""
        if isinstance(value, tuple) and value and isinstance(value[0], Reason):
            return spec.join(words(v, brief=self._brief) for v in value) if spec else phrase(value, brief=self._brief)
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {count:,}" for name, count in sorted(value.items()))
        return ", ".join(map(str, value)) if isinstance(value, tuple) else format(value, spec)


def _where(hits: Sequence[tuple[str, bool]], *, brief: bool = False) -> str:
    """ "5 of 12 cases (linear 3 of 4, attention 2 of 8)"; of several operators a few are named, and none in brief.

    Args:
        hits: The operator of each case, and whether it was hit.
    """
    hit, tried = Counter(operator for operator, was_hit in hits if was_hit), Counter(operator for operator, _ in hits)
    count = f"{hit.total()} of {plural(len(hits), 'case')}"
    if len(tried) == 1:
        return f"{count} ({next(iter(tried))})"
    if brief:
        return count
    named = ", ".join(f"{operator} {n} of {tried[operator]}" for operator, n in hit.most_common(_OPERATORS_MOST))
    more = f", and {plural(len(hit) - _OPERATORS_MOST, 'more operator')}" if len(hit) > _OPERATORS_MOST else ""
    return f"{count} ({named}{more})"


def _tried(varied: Sequence[str], operators: Sequence[str], sizes: Sequence[int]) -> str:
    """What a clean sweep tried; sizes that follow each other as a range."""
    more = f" and {len(operators) - _OPERATORS_MOST} more" if len(operators) > _OPERATORS_MOST else ""
    text = f"; tried: {', '.join(varied)}, of {', '.join(operators[:_OPERATORS_MOST])}{more}"
    ends = ([v for v in sizes if v - 1 not in sizes], [v for v in sizes if v + 1 not in sizes])
    ranges = [f"{a}-{b}" if a < b else str(a) for a, b in zip(*ends, strict=True)]
    hidden = f" and {len(ranges) - _RANGES_MOST} more up to {sizes[-1]}" if len(ranges) > _RANGES_MOST else ""
    listed = f"; batch sizes in one case or another: {', '.join(ranges[:_RANGES_MOST])}{hidden}" if ranges else ""
    return text + listed
