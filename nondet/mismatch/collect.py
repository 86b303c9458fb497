"""`nondet mismatch`, arm by arm: rollouts are sampled or read, scored by the trainer, and compared with hypotheses."""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from nondet.core.compare import bits
from nondet.core.records import MismatchCost, MismatchPlace, MismatchRollout, MismatchVocabulary, Record
from nondet.core.runfile import RunWriter
from nondet.errors import EngineStoppedError
from nondet.kernels.dispatch.block import batch_invariant
from nondet.mismatch.arms import arm_of
from nondet.mismatch.figures import Logprobs
from nondet.mismatch.kinds import fit
from nondet.mismatch.rollouts import Rollout, by_rollout
from nondet.mismatch.trainer import FORMULAS, Keep, Spec, at_heat, layout, micro_batches, score, widths
from nondet.sampling.engine import run_session
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Load, Request, Sampling, Session, StepLog, Watcher
from nondet.sampling.schedule import requested_logits
from nondet.trace.trainer import Batch, Row, first_differing_call

_SPREAD, _BUDGET = 8, 64  # engine steps over which requests arrive, and query tokens of one: ragged batches
_WHOLE_ROWS = 256  # rows of logits that are compared over the whole vocabulary, about
RowsOf = Mapping[tuple[str, int], torch.Tensor]  # (rollout, position of the token before) -> logits [V]
Say = Callable[[str], None]
Models = Mapping[str, LoadedModel]
FILE = "file"  # the arm of rollouts that are read


@dataclass(frozen=True)
class RolloutPlan:
    """What to sample: each prompt `n` times, `tokens` long."""

    prompts: Sequence[str]
    n: int
    tokens: int
    seed: int


@contextmanager
def kernels(side: str, ran: Counter[str], invariant: bool, families: Sequence[str] = ()) -> Iterator[None]:
    """Stock kernels, or batch-invariant ones, for a side of an arm; what ran is added under the side's name."""
    with batch_invariant(families or None, training=side == "trainer") if invariant else nullcontext() as block:
        yield
    if block is not None:
        ran.update({f"{side}: {what}": count for what, count in block.coverage().counts().items()})


def sample_rollouts(loaded: LoadedModel, plan: RolloutPlan, watcher: Watcher | None = None) -> list[Rollout]:
    """Rollouts drawn at temperature 1 by the engine under load: chunked prefills share steps with decodes."""
    own = plan.seed * 1_000_003
    requests = make_requests(loaded, plan, "mismatch", lambda prompt, i: (own + prompt * 10_007 + i) % 2**63)
    return rollouts_of(run_requests(loaded, requests, watcher))


def rollouts_of(session: Session) -> list[Rollout]:
    """What the engine sampled, in the order of its requests' names."""
    rollouts = []
    for o in sorted(session.outcomes, key=lambda o: o.request.id):
        start, ids = len(o.request.prompt), [*o.request.prompt, *o.token_ids]
        values = np.frombuffer(o.logprobs, dtype="<f4").astype(np.float32)
        rollouts.append(Rollout(o.request.id, ids, range(start, len(ids)), values))
    return rollouts


class WholeRows:
    """A watcher that keeps the engine's logits at a seeded sample of positions, in all rollouts: `kept`, in the model's
    dtype, as far as the engine came; `trained`: the trainer's."""

    done = False

    def __init__(self, plan: RolloutPlan) -> None:
        self._seed, self._share = plan.seed, _WHOLE_ROWS / (len(plan.prompts) * plan.n * plan.tokens)
        self.kept: dict[tuple[str, int], torch.Tensor] = {}
        self.trained: dict[tuple[str, int], torch.Tensor] = {}

    def of_the_trainer(self, rollouts: Sequence[Rollout]) -> Keep:
        """Keeps the trainer's logits at these positions, as `score` gives them rollout by rollout."""
        following = iter(rollouts)

        def keep(logits: torch.Tensor, _ids: torch.Tensor) -> None:
            rollout = next(following)
            for row, i in zip(logits, rollout.drawn, strict=True):
                if (rollout.name, i - 1) in self.kept:
                    self.trained[rollout.name, i - 1] = row.clone()

        return keep

    @contextmanager
    def attached(self, model: Any, log: StepLog) -> Iterator[None]:
        """A hook on the model, for one session."""

        def keep(_module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
            logits = requested_logits(kwargs, output)
            predicting = [(span.request, span.first + span.rows - 1) for span in log.pack if span.new]
            for row, (request, position) in enumerate(predicting):
                drawn = random.Random(f"nondet mismatch rows {self._seed} {request} {position}")  # noqa: S311
                if drawn.random() < self._share:
                    self.kept[request, position] = logits[row].detach().clone()

        # before the engine's own hook, which changes the logits so that the drawn token is chosen
        with model.register_forward_hook(keep, with_kwargs=True, prepend=True):
            yield


def over_vocabulary(impl: str, sampler: RowsOf, trainer: RowsOf) -> MismatchVocabulary | None:
    """Both sides' logits [V] by (rollout, position), where both have them; None where no position has."""
    positions, differ, kl = sorted(sampler.keys() & trainer.keys()), [], []
    for position in positions:
        one, other = (side[position].double() for side in (sampler, trainer))  # exact
        differ.append(int((bits(one) != bits(other)).sum()))
        mine, theirs = one.log_softmax(-1), other.log_softmax(-1)
        total = float(torch.where(mine.isneginf(), 0.0, mine.exp() * (mine - theirs)).sum()) if differ[-1] else 0.0
        kl.append(max(0.0, total) if math.isfinite(total) else sys.float_info.max)
    if not positions:
        return None
    names, at = zip(*positions, strict=True)
    return MismatchVocabulary(impl=impl, size=len(one), rollouts=list(names), positions=list(at), differ=differ, kl=kl)


def make_requests(
    loaded: LoadedModel, plan: RolloutPlan, command: str, seed: Callable[[int, int], int] | None
) -> list[Request]:
    """The plan's, which arrive over a few steps of the engine; `seed` gives that of the draws of (prompt, rollout), or
    None where nothing is drawn."""
    steps, requests = random.Random(f"nondet {command} {plan.seed}"), []  # noqa: S311 - no secret
    for i, text in enumerate(plan.prompts):
        prompt = tuple(loaded.encode(text))
        for j in range(plan.n):
            draw, name = seed and Sampling(1.0, 0, 1.0, seed(i, j)), f"p{i:03d}-{j:04d}"
            requests.append(Request(name, True, prompt, plan.tokens, steps.randrange(_SPREAD), i, draw))
    return requests


def run_requests(
    loaded: LoadedModel, requests: Sequence[Request], watcher: Watcher | None = None,
    forced: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Session:  # fmt: skip
    """The engine's answers, with chunked prefills that run in steps with decodes. Raises EngineStoppedError."""
    # no background requests, whatever their lengths
    load = Load(0, len(requests), (1, 1), (1, 1), spread=_SPREAD, budget=_BUDGET, requests=_BUDGET)
    loaded.model.eval()
    with torch.no_grad():
        ordered = sorted(requests, key=lambda r: r.arrival_step)
        session = run_session(loaded.model, ordered, load, watcher=watcher, forced=forced)
    bad = next((o for o in session.outcomes if o.reason and o.finish != "cut"), None)
    if session.fatal or bad is not None:
        raise EngineStoppedError(f"{bad.request.id}: {bad.reason}" if bad is not None else session.fatal)
    return session


def collect(
    arms: Sequence[str], writer: RunWriter, spec: Spec, say: Say, models: Models, plan: RolloutPlan | None = None,
    rollouts: Mapping[str, Sequence[Rollout]] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Every arm that the run file does not hold yet. Rollouts are sampled by the plan, or were read, by arm. `models`:
    "sampler", unless rollouts have both sides' logprobs and the kind is not requested; "trainer" where it has another
    dtype; "older": other weights that a side may have had."""
    for arm in arms:
        if ("mismatch-cost", arm) not in writer.done:
            for record in _records(arm, spec, say, models, plan, rollouts.get(arm, ())):
                if record.key not in writer.done:
                    writer.write(record)


def _records(
    arm: str, spec: Spec, say: Say, models: Models, plan: RolloutPlan | None, rollouts: Sequence[Rollout]
) -> Iterator[Record]:
    under, ran, rows, started = arm_of(arm), Counter[str](), None, time.perf_counter()
    sampler, older = models.get("sampler"), models.get("older")
    trainer = models.get("trainer", sampler)
    spec = replace(spec, formula="token_logprobs") if under.trainer else spec
    if plan is not None and sampler is not None:
        say(f"{arm}: sampling")
        rows = WholeRows(plan)
        with kernels("sampler", ran, under.sampler, under.families):
            rollouts = sample_rollouts(sampler, plan, rows)
    sampled_at, values = time.perf_counter(), [r.trainer for r in rollouts if r.trainer is not None]
    with kernels("trainer", ran, under.trainer, under.families):
        if len(values) < len(rollouts) and trainer is not None:
            say(f"{arm}: the trainer's forward")
            keep = rows.of_the_trainer(rollouts) if rows is not None else None
            # as trainers do, under the temperature that a line was drawn with
            formulas = [partial(at_heat, FORMULAS[spec.formula], r.setting.get("temperature", 1.0)) for r in rollouts]
            values = [score(trainer.model, rollouts, spec, gradients=True, keep=keep, formulas=formulas)]
        trained_at, sides = time.perf_counter(), (np.concatenate([r.sampler for r in rollouts]), np.concatenate(values))
        for r, mine in zip(rollouts, by_rollout(sides[1], rollouts), strict=True):
            ids, drawn, own = list(r.ids), list(r.drawn), r.sampler.astype("<f4").tobytes()
            yield MismatchRollout(
                impl=arm,
                name=r.name,
                step=r.step,
                tokens=len(drawn),
                ids=ids,
                sampler=own,
                trainer=mine.astype("<f4").tobytes(),
                drawn=[] if drawn == [*range(len(ids))][-len(drawn) :] else drawn,
            )
        differ = bool((sides[0].view(np.uint32) != sides[1].view(np.uint32)).any())
        if differ and sampler is not None and trainer is not None:
            say(f"{arm}: what kind it is, each hypothesis fitted")
            yield from fit(sampler.model, rollouts, spec, *sides, arm, older and older.model)
    if rows is not None and (whole := over_vocabulary(arm, rows.kept, rows.trained)) is not None:
        differ |= any(whole.differ)
        yield whole
    # in two formats the embedding is always the first to differ
    if differ and plan and sampler and trainer and trainer.dtype == sampler.dtype and not spec.autocast:
        say(f"{arm}: the first call that differs")
        yield find_place(arm, sampler, trainer.model, plan, rollouts, spec)
    seconds = {"sample_seconds": sampled_at - started, "train_seconds": trained_at - sampled_at}
    yield MismatchCost(impl=arm, **seconds, ran=dict(ran))


def find_place(
    arm: str, sampler: LoadedModel, model: Any, plan: RolloutPlan, rollouts: Sequence[Rollout], spec: Spec
) -> MismatchPlace:
    """Where the trainer's `model` diverges first from the sampler. Both sides are computed again, twice."""
    under, packed, batches = arm_of(arm), spec.padding == "packed", []
    requests = make_requests(sampler, plan, "mismatch", None)
    fed = {r.name: [r.ids[i] for i in r.drawn] for r in rollouts}  # and not drawn: the model's logits stay unchanged

    def run(watcher: Watcher) -> Session:
        with kernels("sampler", Counter(), under.sampler, under.families):
            return run_requests(sampler, requests, watcher, fed)

    def forward(part: Sequence[Rollout]) -> Logprobs:
        with kernels("trainer", Counter(), under.trainer, under.families):
            return score(model, part, spec, gradients=True)

    for part in micro_batches(rollouts, spec.micro):
        starts, width = layout([len(r.ids) for r in part], spec.padding, widths(part, 0))
        rows = {
            r.name: Row(1 if packed else len(part), width, 0 if packed else i, starts[i], len(r.ids))
            for i, r in enumerate(part)
        }
        batches.append(Batch(partial(forward, part), rows))
    return first_differing_call(arm, run, model, batches)
