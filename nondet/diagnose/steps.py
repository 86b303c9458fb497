"""The steps of a diagnosis, in order. Each reads what is in the run file and adds its own evidence to it.

So a run that was killed goes on with the first step that has no record, and comes to the same records: nothing is
carried from step to step in memory but the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from nondet.core.records import Record, Run, Step
from nondet.core.runfile import RunWriter, read_run
from nondet.core.traces import trace_digest
from nondet.diagnose.axes import Axis, arms_of_axis, make_axes, try_axis
from nondet.diagnose.batch import batch_step, companies, flip_text, parted_rounds, run_step
from nondet.diagnose.budget import Budget
from nondet.diagnose.cost import cost_step
from nondet.diagnose.effort import Effort, chosen_effort, effort_of, thinned
from nondet.diagnose.greedy import greedy_step
from nondet.diagnose.margin import measure_noise
from nondet.diagnose.verdict import NOT_MET, QUESTIONS, blamed, conclude, coverage_gaps, settled
from nondet.errors import EngineStoppedError
from nondet.sampling.collect import collect
from nondet.sampling.engine import cheap_collections, pinned
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Engine, Outcome, Plan, Request, Session, make_engine
from nondet.trace.search import Arm, Pace, Search
from nondet.verdict import Finding, plural

__all__ = ["Diagnoser"]

STOCK, INVARIANT = "stock", "invariant"


@dataclass
class Diagnoser:
    """One diagnosis.

    Args:
        plan: Rounds of completions of one prompt among others.
        say: Takes a line for people as each step begins and ends.
        within_s: About how long it may take; 0.0: everything is asked, however long that takes.
        bound: Whether that is held to the end, so that parts that no longer fit are left out; else it only decides,
            once, how much is asked.
        clock: In seconds.
    """

    loaded: LoadedModel
    plan: Plan
    writer: RunWriter
    seed: int
    threads: int | None
    say: Callable[[str], None]
    within_s: float = 0.0
    bound: bool = False
    clock: Callable[[], float] = time.perf_counter
    _kept: dict[str, Session] = field(default_factory=dict)
    _warm: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Every step that the run file lacks, then the verdict.

        Raises:
            EngineStoppedError: the engine died; the steps that were finished stay.
            UserError: the engine refuses the model or the sizes.
        """
        steps: dict[str, Callable[[Run], Step]] = {
            "greedy": self._greedy,
            "run": self._run_to_run,
            "batch": self._batch,
            "axes": self._axes,
            "operator": self._operator,
            "margin": self._margin,
            "cure": self._cure,
            "cost": self._cost,
        }
        earlier = sum(step.seconds for step in self._so_far().steps)
        self._spent = Budget(self.within_s, earlier, self.clock)
        self._budget = self._spent if self.bound else Budget(clock=self.clock)
        with pinned(self.threads), cheap_collections():
            for number, (name, question) in enumerate(QUESTIONS.items(), 1):
                so_far = self._so_far()
                known = next((s for s in so_far.steps if s.name == name), None)
                if known is None:
                    self.say(f"[{number}/{len(QUESTIONS)}] {question}")
                    known = self._timed(name, steps[name], so_far)
                    self.writer.write(known)
                self.say(f"[{number}/{len(QUESTIONS)}] {question} {known.outcome}: {known.sentence}")
        self._write(conclude(self._so_far()))

    def _timed(self, name: str, step: Callable[[Run], Step], so_far: Run) -> Step:
        started = self.clock()
        reason = settled(so_far, name) or self._late(so_far, name)
        if reason:
            return Step(name=name, outcome="skipped", sentence=reason)
        return _with_seconds(step(so_far), self.clock() - started)

    def _late(self, so_far: Run, name: str) -> str:
        """Why there is no time left for the step; "" where there is."""
        effort = self._effort(so_far)
        least = effort.least_cure
        match name:
            case "axes":
                return self._budget.lacks("one value of an axis", effort.axis_s(1))
            case "operator":
                return self._budget.lacks("a trace", effort.naming_s, least.cure_s)
            case "margin":
                return self._budget.lacks("a round", effort.round_s)
            case "cure":
                return self._budget.lacks("the load under the cure", least.cure_s)
            case "cost":
                return self._budget.lacks("timing rounds", effort.cost_s)
        return ""

    # --- the steps ----------------------------------------------------------------------------------------------

    def _greedy(self, _: Run) -> Step:
        """Alone and in the first round."""
        return greedy_step((self._known("alone"), self._known("round 0")), self.loaded.decode)

    def _run_to_run(self, so_far: Run) -> Step:
        """The prompt alone twice more, and the first round twice."""
        traces, seconds = [], []
        for _ in range(2):
            began = self.clock()
            traces.append(_trace_of(self._alone().outcomes[0]))
            seconds.append(self.clock() - began)
        began = self.clock()
        self._collect(STOCK, self.plan.rounds[:1])
        twice = self.clock() - began
        step = run_step(self._so_far(), STOCK, [_facts(so_far, "greedy")["trace"], *traces])
        effort = self._chosen(twice / 2, min(seconds))
        less = effort.sentence(len(self.plan.rounds), self.within_s)
        sentence = f"{step.sentence}; {less}" if less else step.sentence
        facts = {**step.facts, **({"less": less} if less else {})}
        return msgspec.structs.replace(
            step, sentence=sentence, figures={**step.figures, **effort.figures()}, facts=facts
        )

    def _chosen(self, round_s: float, alone_s: float) -> Effort:
        """How much is asked from here on."""
        return chosen_effort(len(self.plan.rounds), round_s, alone_s, self._spent.spent, self.within_s)

    def _batch(self, so_far: Run) -> Step:
        self._collect(STOCK, self._rounds(so_far))
        return batch_step(self._so_far(), STOCK, _facts(so_far, "greedy"))

    def _axes(self, so_far: Run) -> Step:
        counts, late = [], []
        for axis in self._asked_axes(so_far):
            record = next((a for a in so_far.axes if (a.impl, a.axis) == (STOCK, axis.name)), None)
            if record is None:
                less = self._budget.lacks(axis.name, self._effort(so_far).axis_s(len(axis.trials)))
                if less:
                    late.append(less)
                    continue
                record = try_axis(self.engine, axis, STOCK, self.seed)
                self._write(record)
            differ = f"{record.traces} of {record.tried} traces, {record.tokens} of {record.tried} completions"
            counts.append(f"{axis.name}: {differ if record.tried else 'not met'}")
            self.say(f"  {counts[-1]}")
        parted = [a.axis for a in self._so_far().axes if a.impl == STOCK and a.traces]
        sentence = f"differ from the one alone, each varied by itself: {'; '.join([*counts, *late])}"
        answer = "yes" if parted else "no" if counts else "unknown"
        facts = {"parted": ", ".join(parted), **({"less": "; ".join(late)} if late else {})}
        return Step(name="axes", outcome=answer, sentence=sentence, facts=facts)

    def _operator(self, so_far: Run) -> Step:
        """A trace: of a round in which a completion parted, or of an axis, or of the round that differs from itself."""
        arms, keep = self._arms(so_far), self._effort(so_far).least_cure.cure_s
        search = Search(
            self.engine, self.loaded.model, *arms, impl=STOCK, choose=arms[1].name == "in company",
            write=self._write, say=lambda line: self.say(f"  {line}"),
            pace=Pace(lambda: self._budget.left - keep, self.clock),
        )  # fmt: skip
        verdict = search.run()
        self._write(verdict)
        named = [c for c in self._so_far().culprits if c.call]
        outcome = "yes" if named else "no" if verdict.finding == "no divergence observed" else "unknown"
        sentence = "; ".join(verdict.sentences)
        met = verdict.finding == "run-to-run" or blamed(self._so_far(), Finding.RUN_TO_RUN)
        if _outcome(so_far, "run") == "no" and not met:
            outcome, sentence = "unknown", f"{NOT_MET}: {sentence}"
        return Step(
            name="operator",
            outcome=outcome,
            sentence=sentence,
            facts={"families": "+".join(verdict.families or []), **({"less": search.late} if search.late else {})},
        )

    def _margin(self, so_far: Run) -> Step:
        chosen = parted_rounds(so_far, STOCK, _facts(so_far, "greedy")) or [0]
        chosen = chosen[: self._effort(so_far).margins]
        noise = measure_noise(self._known("alone"), (self._known(f"round {number}") for number in chosen))
        sentence, outcome = flip_text(noise)
        return Step(
            name="margin",
            outcome=outcome,
            sentence=sentence,
            figures={
                "flips": len(noise.flips),
                "ties": sum(flip.tie for flip in noise.flips),
                "within": noise.within,
                "largest_margin": max((flip.margin for flip in noise.flips), default=-1.0),
                "spread": noise.spread,
                "near": noise.near,
                "tokens": noise.tokens,
                "first_flip": min((flip.index for flip in noise.flips), default=-1),
            },
        )

    def _cure(self, so_far: Run) -> Step:
        """The same load under the invariant implementation, the request alone, and what parted of the axes."""
        again = settled(so_far, "batch") != ""  # run-to-run: one round, twice, is what there is to compare
        effort = self._effort(so_far)
        less = self._budget.lacks("all of the load under the cure", effort.cure_s)
        effort = effort.least_cure if less else effort
        self._collect(INVARIANT, self.plan.rounds[: 1 if again else effort.rounds])
        self._warm |= {STOCK, INVARIANT}
        axes = thinned(self._asked_axes(so_far), effort.every) if less else self._asked_axes(so_far)  # made under stock
        with implementation(INVARIANT):
            alone = self._alone().outcomes[0]
            parted = {a.axis for a in so_far.axes if a.impl == STOCK and a.traces}
            for axis in axes:
                if axis.name in parted and ("axis", INVARIANT, axis.name) not in self.writer.done:
                    self._write(try_axis(self.engine, axis, INVARIANT, self.seed))
        step = companies(self._so_far(), INVARIANT, _trace_of(alone), coverage_gaps(self._so_far(), INVARIANT))
        if less:
            less = f"{plural(effort.rounds, 'round')} and fewer values of each axis were asked of the cure: {less}"
        return msgspec.structs.replace(step, facts={**step.facts, **({"less": less} if less else {})})

    def _cost(self, so_far: Run) -> Step:
        families = _facts(so_far, "operator").get("families", "")
        times = self._effort(so_far).times
        return cost_step(lambda: self._session(self.plan.rounds[0]), families, times=times, warm=self._warm)

    # --- what the steps share -----------------------------------------------------------------------------------

    @cached_property
    def engine(self) -> Engine:
        """The engine under study."""
        return make_engine("transformers", self.loaded.model)

    @cached_property
    def _target(self) -> Request:
        return next(r for r in self.plan.rounds[0] if r.target)

    @cached_property
    def _all_axes(self) -> list[Axis]:
        alone = self._known("alone").outcomes[0]
        context = self.loaded.context or 2**31
        return make_axes(self.plan.load, self._target.prompt, alone.token_ids, context)

    def _effort(self, so_far: Run) -> Effort:
        return effort_of(so_far, len(self.plan.rounds))

    def _rounds(self, so_far: Run) -> tuple[tuple[Request, ...], ...]:
        return self.plan.rounds[: self._effort(so_far).rounds]

    def _asked_axes(self, so_far: Run) -> list[Axis]:
        return thinned(self._all_axes, self._effort(so_far).every)

    def _known(self, name: str) -> Session:
        """A stock session "alone" or "round 3", run once in this process: what it is asked for is its logits."""
        if name not in self._kept:
            requests = self.plan.rounds[int(name.partition(" ")[2])] if name != "alone" else None
            self._kept[name] = self._alone() if requests is None else self._session(requests)
        return self._kept[name]

    def _alone(self) -> Session:
        return self._session([replace(self._target, arrival_step=0)])

    def _session(self, requests: Any) -> Session:
        session = self.engine.run(requests, self.plan.load, seed=self.seed)
        failed = next((o.reason for o in session.outcomes if o.finish == "error"), "")
        if session.fatal or failed:
            raise EngineStoppedError(session.fatal or failed)
        return session

    def _collect(self, impl: str, rounds: tuple[tuple[Request, ...], ...]) -> None:
        collect(self.loaded, Plan(self.plan.load, rounds), [impl], self.writer, seed=self.seed, threads=self.threads)

    def _arms(self, so_far: Run) -> tuple[Arm, Arm]:
        facts = _facts(so_far, "greedy")
        rounds = parted_rounds(so_far, STOCK, facts)
        unsteady = _outcome(so_far, "run") == "no"
        if rounds or unsteady:
            requests = self.plan.rounds[rounds[0] if rounds else 0]
            target = next(r for r in requests if r.target)
            load = self.plan.load
            return (
                Arm("alone", target.id, (target,), load, self.seed),
                Arm("in company", target.id, requests, load, self.seed),
            )
        name = next(a.axis for a in so_far.axes if a.impl == STOCK and a.traces)
        value = next(a.parted[0] for a in so_far.axes if a.impl == STOCK and a.axis == name)
        return arms_of_axis(next(a for a in self._all_axes if a.name == name), value, self.seed)

    def _so_far(self) -> Run:
        return read_run(self.writer.path, allow_truncated=True)

    def _write(self, record: Record) -> None:
        """Unless a killed run came as far already."""
        if record.key not in self.writer.done:
            self.writer.write(record)


def _facts(run: Run, name: str) -> dict[str, str]:
    return next((s.facts for s in run.steps if s.name == name), {})


def _outcome(run: Run, name: str) -> str:
    return next((s.outcome for s in run.steps if s.name == name), "")


def _trace_of(outcome: Outcome) -> str:
    return trace_digest(outcome.token_ids, outcome.logprobs)


def _with_seconds(step: Step, seconds: float) -> Step:
    return msgspec.structs.replace(step, seconds=seconds)
