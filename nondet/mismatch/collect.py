"""`nondet mismatch`, arm by arm: rollouts are sampled or read, scored by the trainer, and compared with hypotheses."""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from nondet.core.compare import bits
from nondet.core.records import MismatchCost, MismatchEffect, MismatchPlace, MismatchRollout, MismatchVocabulary
from nondet.core.runfile import RunWriter
from nondet.errors import EngineStoppedError
from nondet.kernels.dispatch.block import batch_invariant
from nondet.mismatch.arms import arm_of
from nondet.mismatch.figures import Logprobs
from nondet.mismatch.kinds import fit
from nondet.mismatch.rollouts import Rollout
from nondet.mismatch.trainer import Spec, gradient, layout, score, widths
from nondet.sampling.engine import run_session
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Load, Request, Sampling, Session, StepLog, Watcher
from nondet.sampling.schedule import requested_logits
from nondet.trace.trainer import Batch, Row, first_differing_call

SPREAD, _BUDGET = 8, 64  # engine steps over which requests arrive, and query tokens of one: ragged batches
_WHOLE_ROWS = 256  # rows of logits that are compared over the whole vocabulary, at most
_EFFECT = 16  # rollouts of each of the two batches whose gradients are compared, at most
Told = Callable[[str], None]


FILE = "file"  # the arm of rollouts that are read


@dataclass(frozen=True)
class Asked:
    """What to sample: each prompt `n` times, `tokens` long."""

    prompts: Sequence[str]
    n: int
    tokens: int
    seed: int


@contextmanager
def kernels(side: str, ran: Counter[str], invariant: bool, families: Sequence[str] = ()) -> Iterator[None]:
    """Stock kernels, or batch-invariant ones, for a side of an arm; what ran is added under the side's name."""
    if not invariant:
        yield
        return
    with batch_invariant(families or None, training=side == "trainer") as block:
        yield
    ran.update({f"{side}: {what}": count for what, count in block.coverage().counts().items()})


def sampled(loaded: LoadedModel, asked: Asked, watcher: Watcher | None = None) -> list[Rollout]:
    """Rollouts drawn at temperature 1 by the engine under load: chunked prefills share steps with decodes."""
    session, rollouts = _session(loaded, asked, watcher), []
    for o in sorted(session.outcomes, key=lambda o: o.request.id):
        start, ids = len(o.request.prompt), [*o.request.prompt, *o.token_ids]
        values = np.frombuffer(o.logprobs, dtype="<f4").astype(np.float32)
        rollouts.append(Rollout(o.request.id, ids, range(start, len(ids)), values))
    return rollouts


class WholeRows:
    """A watcher that keeps the engine's logits at a seeded sample of positions, in all rollouts. `kept`: (request,
    position of the token before) -> [V], in the model's dtype, as far as the engine came."""

    done = False

    def __init__(self, loaded: LoadedModel, asked: Asked) -> None:
        starts = [len(loaded.encode(text)) for text in asked.prompts]
        every, each = range(len(starts) * asked.n * asked.tokens), asked.n * asked.tokens
        rng = random.Random(f"nondet mismatch rows {asked.seed}")  # noqa: S311 - a sample, not a secret
        drawn = rng.sample(every, min(len(every), _WHOLE_ROWS))
        self._places = {
            (_name(k // each, k % each // asked.tokens), starts[k // each] + k % asked.tokens - 1) for k in drawn
        }
        self.kept: dict[tuple[str, int], torch.Tensor] = {}

    @contextmanager
    def attached(self, model: Any, log: StepLog) -> Iterator[None]:
        """A hook on the model, for one session."""

        def keep(_module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
            logits = requested_logits(kwargs, output)
            predicting = [(span.request, span.first + span.rows - 1) for span in log.pack if span.new]
            for row, place in enumerate(predicting):
                if place in self._places:
                    self.kept[place] = logits[row].detach().clone()

        # before the engine's own hook, which changes the logits so that the drawn token is chosen
        handle = model.register_forward_hook(keep, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            handle.remove()


def over_vocabulary(
    impl: str, sampler: Mapping[tuple[str, int], torch.Tensor], trainer: Mapping[tuple[str, int], torch.Tensor]
) -> MismatchVocabulary | None:
    """Both sides' logits [V] by (rollout, position), where both have them; None where no position has."""
    places = sorted(sampler.keys() & trainer.keys())
    differ, kl = [], []
    for place in places:
        one, other = (side[place].double() for side in (sampler, trainer))  # exact
        differ.append(int((bits(one) != bits(other)).sum()))
        mine, theirs = one.log_softmax(-1), other.log_softmax(-1)
        terms = torch.where(mine.isneginf(), 0.0, mine.exp() * (mine - theirs))
        total = float(terms.sum()) if differ[-1] else 0.0
        kl.append(max(0.0, total) if math.isfinite(total) else sys.float_info.max)
    if not places:
        return None
    names, positions = zip(*places, strict=True)
    return MismatchVocabulary(
        impl=impl, size=len(one), rollouts=list(names), positions=list(positions), differ=differ, kl=kl
    )


def _name(prompt: int, rollout: int) -> str:
    return f"p{prompt:03d}-{rollout:04d}"


def _session(
    loaded: LoadedModel, asked: Asked, watcher: Watcher | None = None, again: Sequence[Rollout] = ()
) -> Session:
    """A session that feeds the earlier tokens of `again` and does not draw them: the model's logits stay unchanged."""
    rng, requests = random.Random(f"nondet mismatch {asked.seed}"), list[Request]()  # noqa: S311 - arrivals, no secret
    for i, text in enumerate(asked.prompts):
        for j in range(asked.n):
            drawn = Sampling(1.0, 0, 1.0, (asked.seed * 1_000_003 + i * 10_007 + j) % 2**63)
            prompt, arrival = tuple(loaded.encode(text)), rng.randrange(SPREAD)
            name, draw = _name(i, j), None if again else drawn
            requests.append(Request(name, True, prompt, asked.tokens, arrival, i, draw))
    return answered(loaded, requests, watcher, {r.name: [r.ids[i] for i in r.drawn] for r in again})


def answered(
    loaded: LoadedModel, requests: Sequence[Request], watcher: Watcher | None = None,
    forced: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Session:  # fmt: skip
    """The engine's answers, with chunked prefills that run in steps with decodes. Raises EngineStoppedError."""
    unused, count = (1, 1), len(requests)  # lengths of background requests
    load = Load(others=0, targets=count, spread=SPREAD, prompt=unused, tokens=unused, budget=_BUDGET, requests=_BUDGET)
    loaded.model.eval()
    with torch.no_grad():
        ordered = sorted(requests, key=lambda r: r.arrival_step)
        session = run_session(loaded.model, ordered, load, watcher=watcher, forced=forced)
    bad = next((o for o in session.outcomes if o.reason and o.finish != "cut"), None)
    if session.fatal or bad is not None:
        raise EngineStoppedError(f"{bad.request.id}: {bad.reason}" if bad is not None else session.fatal)
    return session


def collect(
    arms: Sequence[str], writer: RunWriter, spec: Spec, told: Told, *, sampler: LoadedModel | None,
    trainer: LoadedModel | None = None, older: LoadedModel | None = None, asked: Asked | None = None,
    rollouts: Mapping[str, Sequence[Rollout]] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Every arm that the run file does not hold yet.

    Args:
        sampler: The model; None where the rollouts have both sides' logprobs and the kind is not requested.
        trainer: The same weights in the trainer's dtype; None where that is the sampler's.
        older: Other weights that a side may have had.
        asked, rollouts: What is sampled, or else what was read, by arm.
    """
    for arm in arms:
        if ("mismatch-cost", arm) not in writer.done:
            _arm(arm, writer, spec, told, sampler, trainer or sampler, older, asked, rollouts.get(arm, ()))


def _arm(
    arm: str, writer: RunWriter, spec: Spec, told: Told, sampler: LoadedModel | None, trainer: LoadedModel | None,
    older: LoadedModel | None, asked: Asked | None, rollouts: Sequence[Rollout],
) -> None:  # fmt: skip
    under, ran = arm_of(arm), Counter[str]()
    if under.trainer:
        spec = replace(spec, formula="token_logprobs")
    started, rows, trained = time.perf_counter(), None, dict[tuple[str, int], torch.Tensor]()
    if asked is not None and sampler is not None:
        told(f"{arm}: sampling")
        rows = WholeRows(sampler, asked)
        with kernels("sampler", ran, under.sampler, under.families):
            rollouts = sampled(sampler, asked, rows)
    following = iter(rollouts)

    def keep(logits: torch.Tensor, _ids: torch.Tensor) -> None:
        rollout = next(following)
        for at, i in enumerate(rollout.drawn):
            if rows is not None and (rollout.name, i - 1) in rows.kept:
                trained[rollout.name, i - 1] = logits[at].clone()

    drawn = time.perf_counter()
    trainers = [r.trainer for r in rollouts if r.trainer is not None]
    ours = len(trainers) < len(rollouts)
    with kernels("trainer", ran, under.trainer, under.families):
        if ours and trainer is not None:
            told(f"{arm}: the trainer's forward")
            values = score(trainer.model, rollouts, spec, gradients=True, keep=keep)
        else:
            values = np.concatenate(trainers)
        ended, at = time.perf_counter(), 0
        for rollout in rollouts:
            mine = values[at : at + len(rollout.drawn)]
            at += len(mine)
            _put(writer, _record(arm, rollout, mine))
        seen = np.concatenate([r.sampler for r in rollouts])
        if sampler is not None and (seen.view(np.uint32) != values.view(np.uint32)).any():
            told(f"{arm}: what kind it is, each hypothesis fitted")
            kinds = fit(sampler.model, rollouts, spec, seen, values, arm, older.model if older else None)
            for record in kinds:
                _put(writer, record)
            told(f"{arm}: the gradient")
            effect = _effect(arm, (trainer or sampler).model, rollouts, spec, seen, values)
            if effect is not None:
                _put(writer, effect)
    differ = bool((seen.view(np.uint32) != values.view(np.uint32)).any())
    whole = over_vocabulary(arm, rows.kept, trained) if rows is not None else None
    if whole is not None:
        _put(writer, whole)
        differ = differ or any(whole.differ)
    # in two formats the embedding is always the first to differ
    if differ and asked and sampler and trainer and trainer.dtype == sampler.dtype and not spec.autocast:
        told(f"{arm}: the first call that differs")
        _put(writer, place_of(arm, sampler, trainer.model, asked, rollouts, spec))
    cost = MismatchCost(impl=arm, sample_seconds=drawn - started, train_seconds=ended - drawn, ran=dict(ran))
    writer.write(cost)


def place_of(
    arm: str, sampler: LoadedModel, model: Any, asked: Asked, rollouts: Sequence[Rollout], spec: Spec
) -> MismatchPlace:
    """Where the trainer's `model` diverges first from the sampler. Both sides are computed again, twice."""
    under, size = arm_of(arm), spec.micro or len(rollouts)
    padded = widths(rollouts, spec.micro)

    def run(watcher: Watcher) -> Session:
        with kernels("sampler", Counter(), under.sampler, under.families):
            return _session(sampler, asked, watcher, rollouts)

    def forward(first: int) -> Logprobs:
        part, lengths = rollouts[first : first + size], padded[first : first + size]
        with kernels("trainer", Counter(), under.trainer, under.families):
            return score(model, part, spec, gradients=True, padded=lengths)

    batches = []
    for first in range(0, len(rollouts), size):
        part, packed = rollouts[first : first + size], spec.padding == "packed"
        starts, width = layout([len(r.ids) for r in part], spec.padding, padded[first : first + size])
        rows = {
            r.name: Row(1 if packed else len(part), width, 0 if packed else i, starts[i], len(r.ids))
            for i, r in enumerate(part)
        }
        batches.append(Batch(partial(forward, first), rows))
    return first_differing_call(arm, run, model, batches)


def _put(writer: RunWriter, record: Any) -> None:
    if record.key not in writer.done:
        writer.write(record)


def _record(arm: str, rollout: Rollout, trainer: Logprobs) -> MismatchRollout:
    ids, drawn = list(rollout.ids), list(rollout.drawn)
    last = drawn == list(range(len(ids) - len(drawn), len(ids)))
    return MismatchRollout(
        impl=arm, name=rollout.name, step=rollout.step, tokens=len(drawn), ids=ids, drawn=[] if last else drawn,
        sampler=rollout.sampler.astype("<f4").tobytes(), trainer=trainer.astype("<f4").tobytes(),
    )  # fmt: skip


def _effect(
    arm: str, model: Any, rollouts: Sequence[Rollout], spec: Spec, sampler: Logprobs, trainer: Logprobs
) -> MismatchEffect | None:
    """The effect on gradients; None for fewer than four rollouts, which have no other batch. Advantages are signs,
    drawn with a fixed seed: real rewards are unknown, and the comparison does not need them."""
    count = min(_EFFECT, len(rollouts) // 2)
    if count < 2:
        return None
    rng, ends = np.random.default_rng(0), np.cumsum([0, *(len(r.drawn) for r in rollouts)])
    signs = [1.0 if i % 2 else -1.0 for i in range(count)]
    order = rng.permutation(len(rollouts))
    made = []
    for picked, weighted in ((order[:count], False), (order[:count], True), (order[count : 2 * count], False)):
        places = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in picked])
        distance = trainer[places].astype(np.float64) - sampler[places]
        ratios = np.exp(distance) if weighted else np.ones(len(places))
        gains = np.repeat(signs, [len(rollouts[i].drawn) for i in picked])
        made.append(gradient(model, [rollouts[i] for i in picked], spec, ratios * gains))
    plain, moved, other = made
    if not float(plain.norm()) > 0 or not float(other.norm()) > 0:
        return None
    apart = float((moved - plain).norm() / plain.norm())
    return MismatchEffect(
        impl=arm, rollouts=count, moved=apart, cosine=_cosine(moved, plain), other=_cosine(other, plain)
    )


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()).clamp_min(1e-300))
