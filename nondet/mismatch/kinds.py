"""What kind of mismatch it is: each hypothesis is computed by the model, fitted, and taken away from what was seen.

With d the trainer's logprob less the sampler's and c what a hypothesis does to a logprob, computed by one side's own
forward, d is c plus rounding where the trainer does so, and -c plus rounding where the sampler does. What K3 is left of
d - c (or d + c) says how much of the mismatch the hypothesis is. Rounding is not a hypothesis but the floor: twice what
the model's own forward is away from one in a wider format, one share for each side, or what the sampler is away from
the plain forward where that is less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nondet.core.records import MismatchFloor, MismatchKind
from nondet.mismatch.figures import Floats, Logprobs
from nondet.mismatch.rollouts import Rollout
from nondet.mismatch.trainer import FORMULAS, Fault, Spec, rounded_to_fp8, score, weights_changed, widened, widths

_TOKENS, _ROLLOUTS = 1024, 24  # that hypotheses are computed for, at least one rollout
_LIKE = 1.5  # times their K3: what K3 of all rollouts may be for them to stand for all
_LOGITS = 2**26  # numbers of logits that are kept for fits
_COLUMNS = 2048  # of the largest logits that top-k and top-p are fitted in
_RANK, _LOW = 64, 0.7  # of a difference of weights: the share of its energy that so few directions hold
CERTAIN = 0.9  # of the tokens whose very bits a hypothesis gives
_SIDES = {"trainer": 1.0, "sampler": -1.0}


@dataclass(frozen=True)
class _Seen:
    """A share of the rollouts with both sides' logprobs, and the model's own."""

    rollouts: Sequence[Rollout]
    padded: Sequence[int]
    sampler: Logprobs
    trainer: Logprobs
    own: Logprobs
    logits: torch.Tensor  # [k, V] float32, of the rows `rows`
    ids: torch.Tensor  # [k]
    rows: np.ndarray

    def given(self, side: str) -> Logprobs:
        return self.sampler if side == "sampler" else self.trainer

    @property
    def distance(self) -> Floats:
        return self.trainer.astype(np.float64) - self.sampler.astype(np.float64)


def _k3(distance: Floats) -> float:
    with np.errstate(over="ignore"):
        return float(np.mean(np.maximum(np.expm1(distance) - distance, 0.0)))


def _same(one: Logprobs, other: Logprobs) -> Floats:
    return (one.view(np.uint32) == other.view(np.uint32)).astype(np.float64)


def share_of(rollouts: Sequence[Rollout]) -> list[int]:
    """Which rollouts hypotheses are computed for, unless these hide what is wrong: evenly, about a thousand tokens."""
    mean = sum(len(r.drawn) for r in rollouts) / len(rollouts)
    count = max(1, min(len(rollouts), _ROLLOUTS, round(_TOKENS / mean)))
    return sorted({int(i) for i in np.linspace(0, len(rollouts) - 1, count).round()})


def fit(
    model: Any, rollouts: Sequence[Rollout], spec: Spec, sampler: Logprobs, trainer: Logprobs, impl: str,
    older: Any = None,
) -> Iterator[MismatchFloor | MismatchKind]:  # fmt: skip
    """The floor, then each hypothesis on each side, with what it leaves.

    Args:
        model: In the sampler's format, on its device.
        spec: The trainer's layout.
        sampler, trainer: [n] float32 of all rollouts.
        older: A model of the same form with other weights that a side may have had; None where none is suspected.
    """
    seen = _seen(model, rollouts, spec, sampler, trainer)
    before = _k3(seen.distance)
    wide, plain = widened(model), _plain(spec)
    exact = score(wide, seen.rollouts, plain, padded=seen.padded)
    away = [_k3(x.astype(np.float64) - exact) for x in (seen.sampler, seen.trainer, seen.own)]
    floor = min(2 * away[2], _k3(seen.own.astype(np.float64) - seen.sampler))
    yield MismatchFloor(
        impl=impl, tokens=len(exact), rollouts=len(seen.rollouts), k3=before, floor=floor, sampler=away[0],
        trainer=away[1], own=away[2], wide=str(next(wide.parameters()).dtype).removeprefix("torch."),
    )  # fmt: skip

    def found(layer: str, cause: str, side: str, fitted: str, left: float, exactly: float, base: float) -> MismatchKind:
        return MismatchKind(
            impl=impl, layer=layer, cause=cause, side=side, fitted=fitted, k3=base, floor=floor, left=left,
            exactly=max(0.0, exactly),
        )  # fmt: skip

    yield from _grids(seen, found)
    yield from _formulas(seen, found)
    for cause, fitted, side, left, base in _logit_fits(seen):
        yield found("semantic", cause, side, fitted, left, 0.0, base)
    for layer, cause, fitted, compute in _forwards(model, wide, older, seen, plain):
        other = compute()
        known = np.isfinite(other)
        if known.mean() < 0.5:
            continue
        change = (other.astype(np.float64) - seen.own)[known]
        for side, sign in _SIDES.items():
            given = seen.given(side)[known]
            gained = float((_same(given, other[known]) - _same(given, seen.own[known])).mean())
            left, base = _k3(seen.distance[known] - sign * change), _k3(seen.distance[known])
            yield found(layer, cause, side, fitted, left, gained, base)


def _plain(spec: Spec) -> Spec:
    """The trainer's layout, and nothing else of it."""
    return Spec(padding=spec.padding, micro=spec.micro)


def _seen(model: Any, rollouts: Sequence[Rollout], spec: Spec, sampler: Logprobs, trainer: Logprobs) -> _Seen:
    chosen = share_of(rollouts)
    whole = np.split(np.arange(len(sampler)), np.cumsum([len(r.drawn) for r in rollouts])[:-1])
    distance = trainer.astype(np.float64) - sampler
    if _k3(distance) > _LIKE * _k3(distance[np.concatenate([whole[i] for i in chosen])]):  # the one that adds most, too
        chosen = sorted({*chosen, int(np.argmax([_k3(distance[mine]) * len(mine) for mine in whole]))})
    places = np.concatenate([whole[i] for i in chosen])
    lengths, part = widths(rollouts, spec.micro), [rollouts[i] for i in chosen]
    padded = [lengths[i] for i in chosen]
    stride = max(1, -(-len(places) * model.config.get_text_config().vocab_size // _LOGITS))
    logits: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    rows: list[int] = []
    count = 0

    def keep(values: torch.Tensor, chosen_ids: torch.Tensor) -> None:
        nonlocal count
        mine = [i for i in range(len(values)) if (count + i) % stride == 0]
        logits.append(values[mine].float())
        ids.append(chosen_ids[mine])
        rows.extend(count + i for i in mine)
        count += len(values)

    own = score(model, part, _plain(spec), padded=padded, keep=keep)
    seen_sampler, seen_trainer = sampler[places], trainer[places]
    return _Seen(part, padded, seen_sampler, seen_trainer, own, torch.cat(logits), torch.cat(ids), np.asarray(rows))


_Found = Callable[[str, str, str, str, float, float, float], MismatchKind]


def coarse(values: Logprobs) -> str:
    """The narrower format that all of these are numbers of; "" where there is none. By chance one in 2^16 is."""
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        tensor = torch.from_numpy(values)
        if len(values) >= 8 and torch.equal(tensor.to(dtype).float(), tensor):
            return name
    return ""


def _grids(seen: _Seen, found: _Found) -> Iterator[MismatchKind]:
    """Logprobs that were rounded on one side."""
    for side, other in (("sampler", "trainer"), ("trainer", "sampler")):
        name = coarse(seen.given(side))
        if name and name != coarse(seen.given(other)):
            dtype = torch.bfloat16 if name == "bfloat16" else torch.float16
            rounded = torch.from_numpy(seen.given(other)).to(dtype).double().numpy()
            left = _k3(rounded - seen.given(side).astype(np.float64))
            yield found("format", "rounded logprobs", side, name, left, 1.0, _k3(seen.distance))


def _formulas(seen: _Seen, found: _Found) -> Iterator[MismatchKind]:
    """Both sides have the bits of the same logits, by two formulas."""
    values = {name: f(seen.logits, seen.ids).cpu().numpy() for name, f in FORMULAS.items() if name != "low-precision"}
    by = {}
    for side in _SIDES:
        given = seen.given(side)[seen.rows]
        by[side] = max(((float(_same(given, v).mean()), name) for name, v in values.items()), key=lambda x: x[0])
    (one, sampler), (two, trainer) = by["sampler"], by["trainer"]
    if sampler != trainer and (seen.sampler.view(np.uint32) != seen.trainer.view(np.uint32)).any():
        k3 = _k3(seen.distance)
        share = min(one, two) if _same(values[sampler], values[trainer]).mean() < 1.0 else 0.0
        if share >= CERTAIN:
            yield found("formula", "another formula", "trainer", f"{trainer} for {sampler}", 0.0, share, k3)


def _logit_fits(seen: _Seen) -> Iterator[tuple[str, str, str, float, float]]:
    """Temperature, top-k and top-p, each fitted to what it leaves: (cause, fitted, side, left, before)."""
    logits, ids = seen.logits.double(), seen.ids[:, None]
    distance, base = seen.distance[seen.rows], logits.log_softmax(-1).gather(-1, ids).squeeze(-1)
    ranked = logits.topk(min(_COLUMNS, logits.shape[-1]), -1).values
    sums = (ranked - logits.logsumexp(-1, keepdim=True)).exp().cumsum(-1).clamp(max=1.0)

    def hot(value: float) -> Floats:
        return ((logits / value).log_softmax(-1).gather(-1, ids).squeeze(-1) - base).cpu().numpy()

    def kept_k(value: float) -> Floats:
        return -sums[:, min(round(value), sums.shape[1]) - 1].log().cpu().numpy()

    def kept_p(value: float) -> Floats:
        size = (sums < value).sum(-1, keepdim=True).clamp(max=sums.shape[1] - 1)
        return -sums.gather(-1, size).squeeze(-1).log().cpu().numpy()

    k_most = min(sums.shape[1], logits.shape[-1] - 1)
    grids: dict[str, tuple[Callable[[float], Floats], Floats]] = {
        "temperature": (hot, np.geomspace(0.2, 5.0, 33)),
        "top-k": (kept_k, np.unique(np.geomspace(1, k_most, 40).round())),
        "top-p": (kept_p, np.concatenate([np.linspace(0.1, 0.9, 33), np.linspace(0.91, 0.999, 30)])),
    }
    for cause, (change, grid) in grids.items():
        for side, sign in _SIDES.items():
            value, left = _best(lambda v, c=change, s=sign: _k3(distance - s * c(v)), grid, whole=cause == "top-k")  # type: ignore[misc] # the defaults bind the loop's
            yield cause, f"{value:.4g}", side, left, _k3(distance)


def _best(left: Callable[[float], float], grid: Floats, *, whole: bool) -> tuple[float, float]:
    """The value that leaves least: of a grid, then between its neighbours, three times as finely."""
    for _ in range(4):
        costs = [left(float(v)) for v in grid]
        at = int(np.argmin(costs))
        low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
        best = float(grid[at]), costs[at]
        grid = np.unique(
            np.append(np.linspace(low, high, 13), best[0]).round() if whole else np.linspace(low, high, 13)
        )
    return best


_Forward = tuple[str, str, str, Callable[[], Logprobs]]


def _forwards(model: Any, wide: Any, older: Any, seen: _Seen, plain: Spec) -> Iterator[_Forward]:
    """(layer, cause, what of it, how to compute the logprobs under it)."""

    def run(other: Any = model, spec: Spec = plain, fault: Fault | None = None) -> Logprobs:
        return score(other, seen.rollouts, spec, fault, padded=seen.padded)

    def faulty(**changes: Any) -> Callable[[], Logprobs]:
        return lambda: run(fault=Fault(**changes))

    for name in ("gap", "restart", "double"):
        yield "semantic", "positions", name, faulty(positions=name)
    if plain.padding != "packed":
        unmasked, what = replace(plain, padding="left"), "padding on the left is attended to"
        yield "semantic", "padding mask", what, lambda: run(model, unmasked, Fault(mask=False))
    for name, changes in {
        "its first token is missing": {"front": 1}, "its first 2 tokens are missing": {"front": 2},
        "its first token is there twice": {"front": -1}, "its last token is missing": {"back": 1},
        "its last 2 tokens are missing": {"back": 2},
    }.items():  # fmt: skip
        yield "semantic", "template", name, faulty(**changes)

    def rounded(scale: str) -> Logprobs:
        with weights_changed(model, lambda name, weight: rounded_to_fp8(name, weight, scale)):
            return run()

    for scale in ("row", "tensor", "block"):
        yield "weights", "fp8 weights", f"a scale a {scale}", lambda scale=scale: rounded(scale)  # type: ignore[misc] # binds the loop's
    own = str(next(model.parameters()).dtype).removeprefix("torch.")
    if own in ("bfloat16", "float16"):
        mixed = replace(plain, autocast=own)
        yield "format", "autocast over float32 weights", own, lambda: run(wide, mixed)
        yield "format", "computed in float32", own, lambda: run(wide)
        yield "format", "a float32 head", own, lambda: run(model, replace(plain, head="float32"))
    else:
        mixed = replace(plain, autocast="bfloat16")
        yield "format", "autocast over float32 weights", "bfloat16", lambda: run(model, mixed)
    if older is not None:
        cause, what = difference_of(model, older)
        yield "weights", cause, what, lambda: run(older)


def difference_of(model: Any, older: Any) -> tuple[str, str]:
    """Whether other weights differ by matrices of low rank, as an adapter's do, or by all directions."""
    theirs = dict(older.named_parameters())
    shares: list[float] = []
    for name, weight in model.named_parameters():
        delta = weight.detach().float() - theirs[name].detach().float()
        if weight.dim() == 2 and len(shares) < 8 and float(delta.norm()) > 0:
            q = max(1, min(_RANK, min(delta.shape) // 4))
            top = torch.svd_lowrank(delta, q=q)[1]
            shares.append(float(top.square().sum() / delta.square().sum()))
    low = bool(shares) and float(np.median(shares)) >= _LOW
    if not shares:
        return "stale weights", "the other weights are the same"
    name = "an unmerged LoRA" if low else "stale weights"
    return name, f"--older, whose difference has {float(np.median(shares)):.0%} of its energy in a quarter of the rank"
