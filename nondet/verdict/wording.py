"""The words of verdicts and gates. Until it is shown, a reason is a code with its numbers.

In a sentence `{n:#case}` is "1 case" or "2,000 cases", `{share:up}` a share in percent, rounded up, and a field of
reasons is replaced by their words. In brief verdicts `where` and `tried` name no operators.
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
    """What was counted, or what supports or weakens a finding: a key of `WORDS`, and the fields of its sentence."""

    code: str
    numbers: Mapping[str, Any]


def reason(code: str, **numbers: Any) -> Reason:
    """The reason with these numbers."""
    return Reason(code, numbers)


def stated(*cases: tuple[object, Reason]) -> list[Reason]:
    """A table of (what holds or does not, its reason): the reasons that hold."""
    return [why for holds, why in cases if holds]


def plural(count: int, noun: str, many: str = "") -> str:
    """ "1 case", "2,000 cases"."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


# Code -> sentence or clause. A clause that begins with a comma, a colon or a space continues the one before it.
WORDS: dict[str, str] = {
    # what was counted
    "nonfinite": "{n:#completion} of {of:,} hold NaN or infinite logprobs: wrong",
    "too-few": "{n:#completion}, so nothing was compared",
    "no-tokens": "{n:#completion} without a token, so nothing was compared",
    "distinct": "{n:#distinct completion} of {of:,}{by}",
    "tokens-identical": "tokens identical in {of:,} completions{by}",
    "compared-by": ", compared by {known_by}",
    "no-logprobs": ", without logprobs",
    "one-but": ", but {n:,} distinct logprob traces",
    "traces": " ({n:,} distinct logprob traces)",
    "ended-otherwise": ", {n:,} of which ended for another reason than equal ones",
    "arms": ": {comparisons:; }",
    "against": "{arm} compared with {base}: {seen}",
    "alike": "{n:,} identical",
    "differ": "{traces:,} of {n:,} differ, {tokens} in tokens",
    "differ-texts": "{traces:,} of {n:,} differ",
    "axes-followed": "logprob traces change with {n} of {of:#axis|axes}, each varied by itself{which}",
    "which": " ({names})",
    "axis-apart": "{n:,} distinct traces over the values of {axis}, which may change them",
    "within": "up to {n:,} distinct traces at one value",
    "within-one": "one trace at every value",
    "no-pair": "no two completions can be compared",
    "no-effect": "no axis took effect at any value",
    "but": ", but {what}",
    "differ-idly": "bits differ at {values}, where nothing shows that the value took effect",
    "idle-axes": "no value of {axes} took effect",
    "lone-axes": "nothing was compared along {axes}",
    "rows-none": "nothing was compared in {n:#case}",
    "rows": "{finding} in {hits:where}",
    "rounding": "rounding: {far}, and another order of the same sums gives up to {bound:.1g} in {dtype}",
    "bug": "not rounding: {far}, {bound:.1g} expected in {dtype} by another order of the same sums: {look}",
    "bug-data": "other requests' data in a request's row, not rounding: {look}, {far}{expected}",
    "expected": ", {bound:.1g} expected in {dtype} by rounding",
    "open": "rounding or not is not decided: {far}{expected}; nondet.check of the same function in float64, its "
    "weights too, decides it",
    "cases-rounding": ", all by rounding (at most {share:.1g} of how far orders of the same sums are apart)",
    "cases-some": "{n:#case} by rounding, {left:#case} not decided: with inputs whose right result is zero, with "
    "others' values, or farther apart than orders of the same sums and nearer than the worst of rounding",
    "cases-bug": "not rounding in {bugs:#case}: {where}, {far} ({n:,} more by rounding, {left:,} not decided)",
    "elements": ", {n:#element} of {dtype} compared{few}",
    "elements-few": ", too few to see a sum that is cut in two",
    "rows-class": "left its numerics class in {hits:where}",
    "rows-depend": "bits depend on {varied} in {hits:where}",
    "rows-clean": "{finding} in {trials:#trial} of {n:#case} (0 of {comparisons:#comparison} differed{tried:tried})",
    "vectors": "{findings}: up to {n:,} of {of:#vector} have other bits in a batch than one at a time, 1 - cosine up "
    "to {far:.4g}; another nearest neighbour for {top1:,}, another set of {k} for {topk:,}",
    "vectors-alike": "{findings}: {n:#vector} bit-identical one at a time and in {arms:#other arm}",
    "no-fault": ": this is expected of floating-point, and no fault",
    "order-changed": " while the order of reduction changed",
    "finding": ", {findings}",
    "findings": ": {findings}",
    # what no divergence excludes
    "bounds": " (at 95%, one-sided{each}: {by}below {rate:up} of {of}s if all {n:,} were independent)",
    "bounds-by": "below {rate:up} of {of}s ({n:,} compared), ",
    "each-value": ", at each value",
    "bounds-none": " (too few for a bound)",
    # of completions
    "failed": "{n:#failed request is|failed requests are} counted in no other figure: {kinds}.",
    "ends": "Completions ended for different reasons: {named}.",
    "ends-alone": "Completions that ended for different reasons are equal otherwise: batch or run-to-run effects.",
    "unseeded-engine": "The engine draws from one generator for the whole batch: a request's draws depend on others.",
    "again": "Run again: {what}.",
    "again-none": "not tried",
    "again-differs": "{n:,} of {of:#request} in {rounds:#round} differed",
    "again-equal": "{rounds:#round} ({of:#request}), bit-identical",
    "tokens-agree": "The tokens agree and their logprobs do not: with a smaller margin a token could change.",
    "graphs-first": "Steps ran as CUDA graphs, but for the first step of each size in a round. Where that step gives "
    "other bits than a graph, the order of requests in the round shows as a batch effect.",
    "graphs-padded": "Steps ran as CUDA graphs, padded to a few sizes: matrix products ran at no others.",
    "constant": "Every completion ran solo, in equal batches: batch dependence was not tested.",
    "hardly-tested": "No two completions are known to have had different batches: batch dependence was hardly tested.",
    "alone-differ": "Completions that ran solo, in equal batches at every step, differ: the batch did not change.",
    "batches-unknown": "No two are known to have run in different batches: these may be batch or run-to-run effects.",
    "traces-open": "{n:#trace is|traces are} of rounds not repeated: these may be batch or run-to-run effects.",
    "others-again": "Rounds in which traces differ were not repeated: these may be batch or run-to-run effects.",
    "value-unproven": "{axis}={value} is unproven, and not counted: {proof}.",
    "base-once": "The base was not repeated: differences may be run-to-run effects.",
    "followed-once": "Traces followed an axis only in rounds that were not repeated: these may be run-to-run effects.",
    # of rows
    "left-out": "{cases: and }, counted in no other figure.",
    "cases": "{n:#case} {what}",
    "rows-nonfinite": "{n:#case gave|cases gave} NaN or infinity, which equal themselves whatever was computed.",
    "rows-noted": "{n:#case has|cases have} a note, listed below.",
    "built": "Built by the probe to demonstrate a cause, and not counted in this verdict ({operators}): {shown}.",
    "order": "Another order of reduction, chosen on purpose, gave other bits in {hits:where}: expected, and no fault.",
    "unsteady": "{n:#sweep} of {operators} differed too: these differ from run to run, so the cause is not known.",
    "batch-not-varied": "The batch was not varied: batch dependence was not tested.",
    "not-repeated": "No call of {operators} was repeated: differences there may be batch or run-to-run effects.",
    # of servers
    "contract": "Contract: {what} ({evidence}).",
    "greedy": "temperature 0 does not choose the most likely token here, so differences may come from sampling",
    "max-tokens": "max_tokens is not respected",
    "sums": "logprobs are no probabilities, so their bits show nothing",
    "repeatable": "the same request, sent twice solo, gave different tokens in the contract check",
    "repeatable-bits": "the same request, sent twice solo, gave different logprob bits in the contract check",
    "seed": "a seed is respected: {answer}",
    "tempered": "the server ignores the temperature: wrong ({evidence})",
    "independent": "requests of one batch share a draw: wrong ({evidence})",
    "few-keys": "No request had more than {n:,} tokens with its answer: attention over more keys was not tested.",
    "first-alone": "The very first answer is unlike all later ones, which agree: something that a server does once (an "
    "empty cache, a warm-up, a compilation), and not the load. Restart it and compare the two runs.",
    "first-unsteady": "The very first answer is unlike all later ones, which do not agree with each other either.",
    "greedy-unknown": "Contract: whether temperature 0 is greedy is not known.",
    "arm-unproven": "The arm {arm} is unproven: {proof}.",
    "arm-shown": "{arm:capital}: {proof}{unshown}.",
    "arm-unshown": "; {n:#completion} not known to have run beside other requests",
    "arm-unanswered": "The arm {arm} was planned under load, and got no answer.",
    "no-load": "No arm put the server under load: batch dependence was not tested.",
    "no-fingerprint": "The server gives no fingerprint: whether it stayed the same is not known.",
    "arms-apart": "No two arms that differ were compared: the cause may be the run, the cache or the load.",
    "doubt": "{arm:capital} compared with {base}: {why}",
    "not-held": "It was not compared with server: one of them has no solo answers.",
    "by-texts": "Solo answers compared with those of server, by text only: {seen}.",
    "known-otherwise": "It can't be compared with server: {mine} here, {first} there.",
    "beside": "Solo answers compared with those of server: {seen}.",
    "not-greedy": "Temperature 0 is not greedy here: the cause may be sampling.",
    "seed-not-shown": "At this temperature nothing shows that the server respects a seed: the cause may be sampling.",
    "servers": "By their fingerprints {n} servers answered: that may be the cause.",
    "others-unknown": "Whether the server had other clients is not known: these may be batch or run-to-run effects.",
    "cache-unknown": "What the server had cached is not known: the cause may be the prefix cache.",
    "cache-split": "Answers with equal numbers of cached prompt tokens agree: the cause may be the prefix cache.",
    "cache-differs": "The server had not cached the same in both arms: the cause may be the prefix cache.",
    "base-unsteady": "{base:capital} does not agree with itself: the cause may be the {cause} or the run itself.",
    "arm-unsteady": "{arm:capital} does not agree with itself.",
    "chance": "If the answers that differ fell at random, the {n:#answer} of {base} would hold none of them in "
    "{share:near} of cases. Compare more with nondet sample --endpoint URL --arms {base}=N,{arm}.",
    # what shows that an arm was what it is called
    "none-among": "{proof}, but none of the compared requests is known to have been among them",
    "cached": "the server had {tokens} prompt tokens cached",
    "counter": "the server's counter shows {hits:g} cached prompt tokens",
    "cached-unsaid": "the server does not report what it had cached",
    "one-at-a-time": "one at a time from here; whether the server had other clients is not known",
    "ran-most": "the server ran at most {running:g} at once, in {polls:#poll}",
    "others-too": "the server ran up to {running:g} at once: it had other clients too",
    "ran-at-once": "the server ran up to {running:g} at once, in {polls:#poll}",
    "streamed": "up to {n} answers streamed at the same time",
    "not-formed": "the server ran at most {running:g} at once: the load did not form",
    "not-streamed": "answers did not stream, and the server does not report what it runs",
    # of reinforcement learning
    "rl-none": "no step was made",
    "rl-zero": "no divergence observed: KL 0 in {n:,} of {of:#step} ({differ} of {tokens:#token})",
    "rl-apart": "sampler and trainer disagree in the logprob bits of {differ:,} of {tokens:#token} in {of:#step}, K3 "
    "{low:.1e} to {high:.1e}",
    "rl-ratios": "Ratios: {least:.3f} to {most:.3f}.",
    "rl-zero-steps": "KL 0 in {n:#step}",
    "rl-failed": "Seed {seed} ended after {n:#step}: {why}.",
    "rl-flat": "In {n:#group} of {of:,} all rollouts had one reward, which teaches nothing; in {alike:,} one text.",
    "rl-nothing": "No group had two rewards: nothing could be learnt, and what the arms earned shows nothing.",
    "reward": "Mean rewards differ by {arms:.2f} between arms, {than} than seeds do (up to {seeds:.2f} in one arm).",
    "rl-fell": "Seed {seed} fell: {best:.2f} at its best over five steps, {last:.2f} at its end.",
    # of a sampler and a trainer
    "mm-none": "no rollout was compared",
    "mm-zero": "no divergence observed: 0 of {tokens:#token} in {rollouts:#rollout} have other logprob bits",
    "mm-apart": "{said}: sampler and trainer disagree in the logprob bits of {differ:,} of {tokens:#token} "
    "({rollouts:#rollout}), K3 {k3:.1e}{interval}{bound}",
    "mm-bound": "; {of} {number:.1e}, up to {bound:.1e} by rounding",
    "mm-drift": "K3 grows with the step, from {first:.1e} to {last:.1e}: a side's weights lag behind{by}.",
    "mm-lag": " by about {n:#update}",
    "mm-rows-only": "sampler and trainer agree in the logprob bits of {tokens:#token} ({rollouts:#rollout}), and "
    "{rows:,} of {n:#row} of logits differ elsewhere in the vocabulary",
    "mm-rows-zero": "Whole rows: at {n:#position} drawn by seed all {size:,} logits are the same, so KL is 0 there.",
    "mm-rows": "Whole rows: at {rows:,} of {n:#position} drawn by seed logits differ; KL over the vocabulary of "
    "{size:,} is {kl:.1e} nats a token{interval}, at most {most:.1e}.",
    "mm-rows-none": "The logprobs of the sampled tokens were compared, not the whole vocabulary.",
    "mm-interval": " (95%, by sequence: {low:.1e} to {high:.1e})",
    "mm-tails": "Ratios: {outside:near} outside 0.99 to 1.01, {least:.3f} to {most:.3f}.",
    "kind-fits": "Kind: {layer}. The {side} has {cause} ({fitted}): K3 is {left:.1e} without, {floor:.1e} by rounding.",
    "kind-exact": "Kind: {layer}. The {side} has {cause} ({fitted}): it gives the bits of {exactly:near} of tokens.",
    "kind-numeric": "Kind: numeric. It looks like rounding: no known cause explains it. Both sides are as "
    "close to a {wide} forward pass as rounding allows (K3 {own:.1e}; sampler {sampler:.1e}, trainer {trainer:.1e}).",
    "kind-unexplained": "Kind: unexplained. Farther from a {wide} forward pass than rounding allows: {sides} (K3 "
    "{own:.1e}; sampler {sampler:.1e}, trainer {trainer:.1e}). Other weights (--older) or tokens look so.",
    "call-where": "First diverging call: {call} of {module}, {layer:layer}, at position {position} of {rollout}: its "
    "inputs are equal bit for bit and {differ:,} of {of:,} outputs differ by at most {ulp:,} ULP, at {sampled:#row} in "
    "the sampler's step and {trained:#row} in the trainer's batch.",
    "mm-nowhere": "The first difference is in {layer:layer}, at position {position} of {rollout}; none of "
    "{compared:#call} compared there has equal inputs and other outputs.",
    "mm-formula": "Hidden states and logits agree bit for bit: only how logprobs are computed from them differs.",
    "mm-unsteady": "Where it begins was not found: the {unsteady} gave other bits when it ran again.",
    "kind-few": "Kind: not said of {n:#token}; any one value fits so few. It takes {least}.",
    "kind-rounded": "Kind: format. Only the {side}'s logprobs are all numbers of {name}: they were rounded.",
    "kind-shifted": "Kind: semantic. The {side}'s logprobs stand one token early: shifted by one, their middle |d| is "
    "{moved:.1e}, where it is {here:.1e}.",
    "kind-one-sided": "Kind: not rounding, which has no side: of the {n:,} tokens that differ most the {side} gives "
    "each the larger logprob, by {least:.1e} to {most:.1e}. Top-p or top-k there looks so, and maybe other weights.",
    "mm-unasked": "Hypotheses were not tested: that takes --model.",
    "mm-cure": "{impl:capital} on both sides leaves {differ:,} of {tokens:#token}, K3 {k3:.1e}, in {times:.1f} times "
    "stock's seconds.",
    "mm-failed": "{n:#rollout} could not be compared: {why}.",
    "mm-threshold": "{impl}: {name} {value:figure}{where} is {side} {limit:.9g}",
    # of a gate
    "fail-on": "--fail-on {option} can't be decided: {why}.",
    "invariance": "Batch invariance can't be decided: {why}",
    "unmeasured": "nothing was measured: {n:#case failed or was|cases failed or were} skipped.",
    "incomplete": "the run did not finish",
    "inconclusive": "a step that is needed has no answer",
    "axis-untested": "an axis was not tested under {impls}",
    "load-unproven": "the load of {impls} is unproven",
    "not-compared": "nothing was compared{of}",
    "of-impls": " for {impls}",
    "drawn": "tokens were drawn, and {each:; }",
    "unseeded": "{impl}: nothing shows that it respects a seed ({evidence})",
    "verdict": "{impl}: {clauses}",
    "more": "and {n:#more verdict}",
    "not-enough": "{impl}: {tries:#{by} was|{by}s were} compared, and {needed:,} are needed to see a divergence in "
    "{rate:near} of {by}s with {confidence:near} confidence",
    "power": "a divergence in {rate:near} of {by}s would have been seen with probability {seen:down} ({tries:#{by}} "
    "compared; below {bound:up} at {confidence:near} confidence{independent})",
    "if-independent": ", if requests were independent",
}


# What looks like a difference that is no rounding, by `Judged.look`.
LOOKS: dict[str, str] = {
    "leak": "their values change it (a scale, a mask or an index over the batch does that)",
    "leak-factor": "their values change it by one factor (a normalisation over the batch does that)",
    "nan": "a NaN of theirs reaches it (a product with a mask of zeros does that)",
    "padding": "it follows padding (positions, masks or a mean that do not leave padding out)",
    "shapes": "inputs have other shapes in each batch (padding that is not left out looks so)",
    "position": "it follows a request's position in the batch",
    "factor": "all elements change by one factor (a mean or a normalisation over the batch)",
    "varied": "it follows what was varied",
    "number": "it follows the requests beside it or how many they are",
    "micro-mean": "each part is averaged over its own tokens, a mean of means: divide by those of the whole batch",
    "micro-sum": "the parts' gradients add up to the whole's undivided: combine='sum'",
    "micro-parts": "no weights of the parts give the whole's gradient: padding, or a normalisation over the batch",
}


def words(why: Reason, *, brief: bool = False) -> str:
    """The sentence or clause of a reason."""
    return _Writer(brief).vformat(WORDS[why.code], (), why.numbers)


def phrase(clauses: Iterable[Reason], *, brief: bool = False) -> str:
    """Clauses as one phrase: a semicolon before each that does not continue the one before it."""
    text = ""
    for clause in (words(c, brief=brief) for c in clauses):
        text += clause if not text or clause[:1] in ",: " else f"; {clause}"
    return text


class _Writer(Formatter):
    """Fills in numbers, as this module's docstring describes."""

    def __init__(self, brief: bool) -> None:
        self._brief = brief

    def format_field(self, value: Any, spec: str) -> str:
        match spec:
            case "where":
                return _where(value, brief=self._brief)
            case "tried":
                return "" if self._brief else _tried(**value)
            case "near" | "up" | "down":
                return percent(value, spec)
            case "capital":
                return str(value).capitalize()
            case "figure":
                return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
            case "layer":
                return f"layer {value}" if str(value).isdigit() else f"the {value}"
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
    `hits`: the operator of each case, and whether it was hit."""
    hit, tried = Counter(operator for operator, was_hit in hits if was_hit), Counter(operator for operator, _ in hits)
    count = f"{hit.total()} of {plural(len(hits), 'case')}"
    if len(tried) == 1:
        return f"{count} ({next(iter(tried))})".removesuffix(" ()")
    if brief:
        return count
    named = ", ".join(f"{operator} {n} of {tried[operator]}" for operator, n in hit.most_common(_OPERATORS_MOST))
    more = f", and {plural(len(hit) - _OPERATORS_MOST, 'more operator')}" if len(hit) > _OPERATORS_MOST else ""
    clean = sum(n for operator, n in tried.items() if operator not in hit)
    return f"{count} ({named}{more}{f', others 0 of {clean:,}' if clean else ''})"


def _tried(varied: Sequence[str], operators: Sequence[str], sizes: Sequence[int]) -> str:
    """What a clean sweep tried; consecutive sizes as a range."""
    more = f" and {len(operators) - _OPERATORS_MOST} more" if len(operators) > _OPERATORS_MOST else ""
    text = f"; varied: {', '.join(varied)}; operators: {', '.join(operators[:_OPERATORS_MOST])}{more}"
    ends = ([v for v in sizes if v - 1 not in sizes], [v for v in sizes if v + 1 not in sizes])
    ranges = [f"{a}-{b}" if a < b else str(a) for a, b in zip(*ends, strict=True)]
    hidden = f" and {len(ranges) - _RANGES_MOST} more up to {sizes[-1]}" if len(ranges) > _RANGES_MOST else ""
    return text + (f"; batch sizes over all cases: {', '.join(ranges[:_RANGES_MOST])}{hidden}" if ranges else "")
