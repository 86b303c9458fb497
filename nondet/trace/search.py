"""`nondet trace`: from two arms that part to the list of guilty operators, and the smallest cure.

In order: controls; the coarse pass and the least place that differs; the fine pass there; replays of the guilty call
alone; its invariant implementation in both arms, and again, until the arms agree. Every step is a record as soon as it
is done, so that what was found stays, whatever comes after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from nondet.core.compare import first_difference, weights_digest
from nondet.core.records import Control, Culprit, Record, Substitution, TraceVerdict
from nondet.core.traces import trace_digest
from nondet.sampling.implementations import implementation
from nondet.sampling.plan import Engine, Outcome, Session
from nondet.sampling.replay import minimal
from nondet.trace.arms import Arm, Site, least_site, same_records
from nondet.trace.coarse import CoarseCapture
from nondet.trace.controls import Until, logits_at_fault, step_seconds
from nondet.trace.naming import Guilty, name_culprit
from nondet.trace.pace import OutOfTimeError, Pace
from nondet.trace.words import AGREE, late_sentence, place_of, substitution_sentence, verdict_sentences

__all__ = ["Search"]

# Culprits looked for at most: more than there are families would be asked for in vain.
_MOST_CULPRITS = 12


class Search:
    """One trace.

    Args:
        a, b: The arms. Their first sessions run free; from then on the first arm's tokens are fed to both.
        impl: What is under both: stock, or an implementation as `nondet sample` takes it.
        choose: Whether any request under study of the second arm will do: then one that parts is taken.
        expected: Arm's name -> digest of the trace that it has to have, where it was recorded.
        write: Takes each record as it is made.
        say: Takes a line for people as each step begins or ends.
        earlier: What a process that was stopped has written of this trace: it is not made again, the controls apart.
        script: Whether `guilty` is asked for, which no record holds.
        pace: How long it may take; the controls and the first culprit are asked whatever it says.

    Attributes:
        late: What was left out for want of time; "" where nothing was.
        guilty: The first culprit with what a stand-alone script needs; None until there is one.
    """

    def __init__(
        self,
        engine: Engine,
        model: Any,
        a: Arm,
        b: Arm,
        *,
        impl: str,
        choose: bool,
        write: Callable[[Record], object],
        say: Callable[[str], None],
        expected: Mapping[str, str] | None = None,
        earlier: Sequence[Record] = (),
        script: bool = False,
        pace: Pace | None = None,
    ) -> None:
        self.engine, self.model, self.a, self.b, self.impl = engine, model, a, b, impl
        self.choose, self.say, self.expected = choose, say, expected or {}
        self._known, self._write, self._script = {record.key: record for record in earlier}, write, script
        self.guilty: Guilty | None = None
        self.late, self._pace = "", pace or Pace()
        self._culprits: list[Culprit] = []
        self._families: list[str] = []
        self._tried: dict[frozenset[str], tuple[Site | None]] = {}
        self._recorded: tuple[CoarseCapture, CoarseCapture]
        self._started = time.perf_counter()

    def write(self, record: Record) -> None:
        """Unless it is on record."""
        if record.key not in self._known:
            self._write(record)

    def run(self) -> TraceVerdict:
        """The whole search.

        Raises:
            EngineStoppedError: an arm died; what was found by then is written.
            UserError: the engine refuses the model, or an implementation the call.
        """
        with implementation(self.impl):
            last = self._plain()
            site = self._controlled(last)
            if isinstance(site, TraceVerdict):
                return site
            if site is None:
                return self._end("no divergence observed", notes=[f"{AGREE}, with {self._company()} in company"])
            return self._until_cured(site)

    # --- controls -----------------------------------------------------------------------------------------------

    def _plain(self) -> int | None:
        """Both arms without capture; then everybody's tokens are forced. The last position to look at first."""
        self.say("controls: the weights, and each arm without capture")
        self._control("weights", None, f"weights {weights_digest(self.model)}, hashed once, are those of both arms")
        with self._pace.timed():
            sessions = self.a.run(self.engine), self.b.run(self.engine)
        alone = self.a.outcome(sessions[0])
        if self.choose:
            self._choose(alone, sessions[1])
        company = self.b.outcome(sessions[1])
        for arm, outcome in ((self.a, alone), (self.b, company)):
            self._expect(arm, outcome)
        token, place = first_difference(alone, company)
        prompt = len(self.a.prompt)
        if place is None:
            sentence = f"{len(alone.token_ids)} tokens and their logprobs agree between the arms"
        else:
            tokens = "no token differs" if token is None else f"the first token that differs is token {token}"
            sentence = f"the arms' logprobs part at token {place} (position {prompt - 1 + place}); {tokens}"
        places = {
            "first_logprob": float(-1 if place is None else place),
            "first_token": float(-1 if token is None else token),
        }
        self._control("parting", None, sentence, places)
        self.a.forced = {o.request.id: o.token_ids for o in sessions[0].outcomes}
        self.b.forced = {o.request.id: o.token_ids for o in sessions[1].outcomes}
        self.a.forced[self.a.request] = self.b.forced[self.b.request] = alone.token_ids  # every position is comparable
        return None if place is None else prompt - 1 + place

    def _choose(self, alone: Outcome, company: Session) -> None:
        """Of the requests with this prompt, one whose tokens part if there is any, and of those the first to part."""
        targets = [o for o in company.outcomes if o.request.target and o.finish != "error"]
        parted = []
        for index, outcome in enumerate(targets):
            token, place = first_difference(alone, outcome)
            if place is not None:
                parted.append((token is None, place, index))
        tokens = sum(not same for same, _, _ in parted)
        sentence = (
            f"of {len(targets)} requests with this prompt in company, {len(parted)} part from it alone in logprobs"
        )
        self._control(
            "company",
            None,
            f"{sentence}, {tokens} in tokens",
            {"requests": float(len(targets)), "logprobs": float(len(parted)), "tokens": float(tokens)},
        )
        if parted:
            self.b.request = targets[min(parted)[2]].request.id

    def _expect(self, arm: Arm, outcome: Outcome) -> None:
        """A recorded arm has to come again bit for bit, or the tape is not this machine's."""
        wanted = self.expected.get(arm.name)
        if wanted is None:
            return
        got = trace_digest(outcome.token_ids, outcome.logprobs)
        same = got == wanted
        again = (
            "bit for bit as recorded" if same else f"with trace {got} instead of {wanted}: it is traced as it is now"
        )
        self._control(f"tape of {arm.request}", same, f"{arm.name}: it came again {again}")

    def _controlled(self, last: int | None) -> Site | TraceVerdict | None:
        """Each arm twice with capture, and once forced without: run to run, capture, then the least difference."""
        self.say("coarse pass: each arm twice, with hashes of every position and layer, and once without")
        arms = self.a, self.b
        with self._pace.timed():
            once = [self._coarse(arm, last) for arm in arms]
        again = [self._coarse(arm, last) for arm in arms]
        for arm, (first, _), (second_capture, _) in zip(arms, once, again, strict=True):
            if first.full:
                self._control("memory", False, "hashes of late positions were not kept, for lack of memory")
            if same_records(first, second_capture) is not None:
                return self._run_to_run(arm, (first, second_capture))
        cost: dict[str, float] = {}
        for arm, (_, session), (_, second) in zip(arms, once, again, strict=True):
            bare = arm.run(self.engine, Until(arm.request, last))
            note = logits_at_fault(bare, session)
            if note:
                self._control("capture", False, f"arm {arm.name}: {note}")
                return self._end("unknown", notes=[f"arm {arm.name}: {note}"])
            cost[arm.name] = step_seconds(second) / max(step_seconds(bare), 1e-9)
        costs = ", ".join(f"{ratio:.2f} times a step of arm {name}" for name, ratio in cost.items())
        self._control(
            "capture",
            True,
            "capture changes no logit: the two largest of every token have the same bits with it and without it; it "
            f"costs {costs}",
            cost,
        )
        rows = sum(len(capture.rows) for capture, _ in once)
        self._control(
            "run to run", True, f"each arm twice: all records of {rows} rows agree, so the batch alone differs"
        )
        self._recorded = once[0][0], once[1][0]
        return least_site(*self._recorded, (self.a.request, self.b.request), last)

    def _run_to_run(self, arm: Arm, captures: tuple[CoarseCapture, CoarseCapture]) -> TraceVerdict:
        """The arm against itself: the batches are the same, so nothing here is about batches."""
        site = least_site(*captures, (arm.request, arm.request))
        where = (
            "in somebody else's rows alone" if site is None else f"first at position {site.position}, {place_of(site)}"
        )
        note = f"arm {arm.name}, run again with the same batches, differs from itself, {where}"
        self._control("run to run", False, note)
        if site is not None:
            self.a = self.b = arm
            self._recorded = captures
            self._name(1, site, steady=False)
        return self._end("run-to-run", notes=[note])

    def _coarse(self, arm: Arm, last: int | None) -> tuple[CoarseCapture, Session]:
        capture = CoarseCapture(arm.request, last, sharing=arm.load.sharing)
        return capture, arm.run(self.engine, capture)

    # --- the loop -----------------------------------------------------------------------------------------------

    def _until_cured(self, site: Site) -> TraceVerdict:
        try:
            return self._cured(site)
        except OutOfTimeError:
            cures = [families for families, moved in self._tried.items() if moved[0] is None]
            self.late = late_sentence(min(cures, key=len, default=()))
            return self._end("batch-dependent")

    def _cured(self, site: Site) -> TraceVerdict:
        """Name, replace, look again."""
        for number in range(1, _MOST_CULPRITS + 1):
            with self._replaced(self._families):
                if number > 1 and ("culprit", str(number)) not in self._known:
                    self._pace.check()
                culprit = self._named(number) or self._name(number, site)
            if culprit is None or not culprit.family or culprit.family in self._families:
                break
            self._families.append(culprit.family)
            now = self._again("search", self._families)
            if now is None:
                return self._end("batch-dependent", families=self._minimal(self._families))
            site = now  # the same place as before where the next call of one layer is guilty, too
        from nondet.kernels.dispatch.operators import FAMILIES

        if self._again("all", list(FAMILIES)) is None:  # nothing named goes on: do all of them together cure?
            return self._end("batch-dependent", families=self._minimal(list(FAMILIES)))
        return self._end("batch-dependent")

    def _named(self, number: int) -> Culprit | None:
        """The culprit of that number, where it is on record and that is enough."""
        record = self._known.get(("culprit", str(number)))
        if not isinstance(record, Culprit) or (self._script and self.guilty is None):
            return None
        self._culprits.append(record)
        self.say(f"on record: {record.sentence}")
        return record

    def _name(self, number: int, site: Site, *, steady: bool = True) -> Culprit | None:
        """The guilty call there, on record; None where it is the one named before, whose replacement did not help."""
        self.say(f"fine pass: position {site.position}, {place_of(site)}")
        guilty = name_culprit(
            self.engine,
            self.model,
            (self.a, self.b),
            self._recorded,
            site,
            number=number,
            replaced=self._families,
            opaque_attention="attention" in self._families or self.impl.startswith("invariant"),
            steady=steady,
        )
        if self._culprits and _call_of(guilty.culprit) == _call_of(self._culprits[-1]):
            self.say(f"unmoved: the replacement does not reach `{guilty.culprit.call}` of {guilty.culprit.module}")
            return None
        self._culprits.append(guilty.culprit)
        self.write(guilty.culprit)
        self.say(guilty.culprit.sentence)
        if self.guilty is None and guilty.calls:
            self.guilty = guilty
        return guilty.culprit

    def _again(self, role: str, families: Sequence[str]) -> Site | None:
        """The whole run with these families replaced in both arms: where the arms part now."""
        known = self._tried.get(frozenset(families))
        if known is not None:
            return known[0]
        record = self._known.get(("substitution", role, "+".join(families)))
        # where the arms part now is looked at again if there is a culprit to be named there
        enough = role != "search" or ("culprit", str(len(self._culprits) + 1)) in self._known
        if isinstance(record, Substitution) and (record.agree or enough):
            self.say(f"on record: {record.sentence}")
            moved = None if record.agree else Site(("", ""), record.position, record.layer)
            self._tried[frozenset(families)] = (moved,)
            return moved
        self._pace.check()
        self.say(f"substitution: {' and '.join(families)} invariant in both arms, the whole run again")
        with self._pace.timed(), self._replaced(families) as coverage:
            runs = [self._coarse(arm, None) for arm in (self.a, self.b)]
            left = sorted({*coverage().at_risk, *coverage().left})
        self._recorded = runs[0][0], runs[1][0]
        site = least_site(*self._recorded, (self.a.request, self.b.request))
        _, place = first_difference(*(arm.outcome(s) for arm, (_, s) in zip((self.a, self.b), runs, strict=True)))
        if site is None and place is not None:
            site = Site((self.a.request, self.b.request), len(self.a.prompt) - 1 + place, "logprob")
        sentence = substitution_sentence(families, site, self._culprits[-1] if role == "search" else None)
        self.write(
            Substitution(
                role=role,
                families=list(families),
                agree=site is None,
                position=-1 if site is None else site.position,
                layer="" if site is None else site.region,
                sentence=sentence,
                at_risk=left,
            )
        )
        self.say(sentence)
        self._tried[frozenset(families)] = (site,)
        return site

    def _minimal(self, families: Sequence[str]) -> list[str]:
        """The smallest set found by leaving families out: none of those that remain can be."""
        return minimal(families, lambda kept: bool(kept) and self._again("left out", kept) is None)

    @contextmanager
    def _replaced(self, families: Sequence[str]) -> Iterator[Callable[[], Any]]:
        """Families replaced in both arms; what the dispatcher says so far."""
        from nondet.kernels.dispatch.block import batch_invariant

        with ExitStack() as stack:
            block = stack.enter_context(batch_invariant(list(families))) if families else None
            yield lambda: block.coverage() if block is not None else None

    # --- records ------------------------------------------------------------------------------------------------

    def _company(self) -> str:
        others = len(self.b.requests) - 1
        return f"{others} other request{'' if others == 1 else 's'}"

    def _control(self, name: str, passed: bool | None, sentence: str, figures: dict[str, float] | None = None) -> None:
        self.write(Control(name=name, passed=passed, sentence=sentence, figures=figures or {}))
        self.say(sentence)

    def _end(self, finding: str, *, families: list[str] | None = None, notes: Sequence[str] = ()) -> TraceVerdict:
        return TraceVerdict(
            finding=finding,
            culprits=[c.sentence for c in self._culprits],
            families=families,
            sentences=verdict_sentences(finding, self._culprits, families, notes, self.late),
            seconds=time.perf_counter() - self._started,
        )


def _call_of(culprit: Culprit) -> tuple[object, ...]:
    """Which call it is, by its place and family: once replaced, attention is seen as one call of another name."""
    return culprit.position, culprit.requests, culprit.module, culprit.family or culprit.call
