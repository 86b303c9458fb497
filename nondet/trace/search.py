"""`nondet trace`: from two arms that differ to the list of responsible operators, and the smallest fix.

In order: controls; the coarse pass and the least position that differs; the fine pass there; replays of the responsible
call; its invariant implementation in both arms, and again, until the arms agree. Every step is recorded as soon as it
is done, so that a later failure loses nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import torch

from nondet.core.compare import digest, first_difference, row_hashes, weights_digest
from nondet.core.records import Control, Culprit, Record, Replay, Substitution, TraceVerdict
from nondet.core.traces import trace_digest
from nondet.errors import EngineStoppedError
from nondet.sampling.implementations import implementation
from nondet.sampling.plan import Engine, Load, Outcome, Request, Session, StepLog, Watcher
from nondet.sampling.replay import minimal
from nondet.trace.against import BUG, ROUNDING, UNDECIDED, in_words, judged
from nondet.trace.align import Finding, Pair, Roles, first_responsible, select
from nondet.trace.capture import CoarseCapture, FineCapture, Owner, RowHashes
from nondet.trace.recorder import Sizes, StepRecord, add_hooks, tensors_in
from nondet.trace.replays import RecordedCall, families_for, guarded, kernels_of, replays


@dataclass
class Arm:
    """One way to run the request under study: "alone", or "in company", or the round and request of a recorded run; for
    display: `title`. `forced` are the tokens that all requests are fed, once they are known."""

    name: str
    request: str
    requests: Sequence[Request]
    load: Load
    seed: int = 0
    forced: dict[str, list[int]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name in sentences."""
        return {"alone": "solo", "in company": "loaded"}.get(self.name, self.name)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the request's prompt."""
        return next(r.prompt for r in self.requests if r.id == self.request)

    def run(self, engine: Engine, watcher: Watcher | None = None, *, every: bool = False) -> Session:
        """A session of this arm. Raises EngineStoppedError: the engine died, or the request (or any) failed in it."""
        session = engine.run(self.requests, self.load, seed=self.seed, forced=self.forced, watcher=watcher)
        needed = session.outcomes if every or session.fatal else [self.outcome(session)]
        failed = [f"{o.request.id} failed: {o.reason}" for o in needed if o.finish == "error"]
        if session.fatal or failed:
            raise EngineStoppedError(f"arm {self.title}: {session.fatal or failed[0]}")
        return session

    def outcome(self, session: Session) -> Outcome:
        """The result of the request under study."""
        return next(o for o in session.outcomes if o.request.id == self.request)


def arms_of(requests: Sequence[Request], load: Load, seed: int) -> tuple[Arm, Arm]:
    """The first request under study of a round, solo and among the others."""
    target = next(r for r in requests if r.target)
    return Arm("alone", target.id, (target,), load, seed), Arm("in company", target.id, requests, load, seed)


@dataclass(frozen=True)
class Site:
    """The least position where the arms' records differ, and in which record: "input", "3.k", "3.out", "logits".
    `owners` is whose row it is in either arm: the request's own, or that of the writer of the keys that it read."""

    owners: tuple[str, str]
    position: int
    record: str

    @property
    def region(self) -> str:
        """The region for the fine pass: "embedding", "head" or the number of a layer."""
        return {"input": "embedding", "logits": "head"}.get(self.record, self.record.partition(".")[0])


def same_records(a: RowHashes, b: RowHashes) -> Owner | None:
    """The first (request, position) whose records differ between two sessions of one arm; None where none does."""
    for owner in sorted(a.rows.keys() | b.rows.keys(), key=lambda o: (o[1], o[0])):
        one, two = a.rows.get(owner), b.rows.get(owner)
        if one is None or two is None or not np.array_equal(one, two) or a.logits.get(owner) != b.logits.get(owner):
            return owner
    return None


def least_site(a: RowHashes, b: RowHashes, requests: tuple[str, str], last: int | None = None) -> Site | None:
    """The least position where a record of the arms differs, and there the record that is computed first. A position's
    records are its own, and those of each request that wrote keys and values that the request read there: after a
    prefix hit the writer's are all there is, and an engine that finds two equal pages keeps one of them. Where a
    writer's record differs, the writer's own history is searched first."""
    first, second = requests
    ends = [pos for capture, name in ((a, first), (b, second)) for request, pos in capture.rows if request == name]
    for position in range(min(max(ends, default=-1), 2**62 if last is None else last) + 1):
        mine, theirs = _records(a, first, position), _records(b, second, position)
        if not mine or not theirs:
            continue
        owner_a = mine[0]
        for owner_b in theirs:
            record = _first_unequal(a, b, owner_a, owner_b, foreign=owner_b[0] != second)
            if record is None:
                continue
            if owner_b[0] != second:
                earlier = least_site(a, b, (owner_a[0], owner_b[0]), position)
                if earlier is not None:
                    return earlier
            return Site((owner_a[0], owner_b[0]), position, record)
        one, two = a.logits.get((first, position)), b.logits.get((second, position))
        if one is not None and two is not None and one != two:
            return Site(requests, position, "logits")
    return None


def _records(capture: RowHashes, request: str, position: int) -> list[Owner]:
    """The owners of this position's records: the request itself first."""
    others = capture.foreign.get(request, {}).get(position, set())
    return [owner for owner in ((request, position), *sorted(others)) if owner in capture.rows]


def _first_unequal(a: RowHashes, b: RowHashes, one: Owner, two: Owner, *, foreign: bool) -> str | None:
    differs = a.rows[one] != b.rows[two]
    names = [name for name, unequal in zip(a.names, differs, strict=True) if unequal]
    if foreign and not any(name.endswith((".k", ".v")) for name in names):
        return None  # of another owner's row this request only read keys and values
    return names[0] if names else None


class Until:
    """Ends a session without capture once the request has passed the position `last`; None: at its own end."""

    def __init__(self, request: str, last: int | None) -> None:
        self.request, self.last, self.done = request, last, False

    @contextmanager
    def attached(self, model: Any, log: StepLog) -> Iterator[None]:
        """Attach a hook that only reads the schedule."""

        def look(*_: Any) -> None:
            if self.last is not None:
                mine = [span for span in log.pack if span.request == self.request]
                self.done = self.done or any(span.first + span.rows > self.last for span in mine)

        with ExitStack() as stack:
            add_hooks(stack, model, after=look)
            yield


def logits_at_fault(bare: Session, captured: Session) -> str:
    """Why the logits of a session can't be traced, without capture and with it; "" where they can."""
    for name, tops in bare.tops.items():
        if not all(math.isfinite(top[0]) for top in tops):
            return f"logits of {name} are NaN or infinite: the model is wrong, whatever the batch"
    given = _given(captured)
    for name, values in _given(bare).items():
        if any(x != y for x, y in zip(values, given.get(name, []), strict=False)):
            return f"the {_kind_of(bare)} of {name} change when it is captured, so nothing else is reported"
    return ""


def changed_after_first(first: Session, later: Session, forced: Mapping[str, Sequence[int]]) -> str:
    """Where what an arm's first session in this process gave differs from a later one; "" where nothing does. The
    batches are the same, so a difference comes from what the process did before: a kernel that warms up, or a tuner
    that takes another order at the first call of a size. Contexts are equal as far as the first session chose the
    tokens that the later one was fed."""
    given = _given(first)
    for name, values in _given(later).items():
        chosen = next(o.token_ids for o in first.outcomes if o.request.id == name)
        for index, (x, y) in enumerate(zip(given.get(name, []), values, strict=False)):
            if x != y:
                return (
                    f"its first session in this process differs from a later one with the same batches, in the "
                    f"{_kind_of(later)} of {name} at token {index}: what ran before decides, not the batch"
                )
            if chosen[index : index + 1] != [*forced.get(name, chosen)[index : index + 1]]:
                break
    return ""


def _kind_of(session: Session) -> str:
    return "logits" if session.tops else "logprobs"


def _given(session: Session) -> dict[str, list[object]]:
    """What a session gave for each token of each request, as bits, so that NaN equals NaN and -0.0 is not 0.0: the two
    largest logits and their tokens, or where an engine gives no logits the token and its logprob."""
    if session.tops:
        return {name: [(t[0].hex(), t[1].hex(), *t[2:]) for t in tops] for name, tops in session.tops.items()}
    return {
        o.request.id: [(token, o.logprobs[4 * i : 4 * i + 4]) for i, token in enumerate(o.token_ids)]
        for o in session.outcomes
    }


def step_seconds(session: Session) -> float:
    """Mean wall time of a session's steps."""
    return session.seconds / max(1, session.steps - 1)


AGREE = "hidden states, K, V, logits and logprobs agree in every position"


def site_in_words(site: Site) -> str:
    """ "layer 4, its output"."""
    what = {"k": ", K as written", "v": ", V as written", "out": ", its output"}
    named = what.get(site.record.partition(".")[2], "")
    return f"layer {site.region}{named}" if site.region.isdigit() else f"the {site.region}"


def culprit_sentence(culprit: Culprit, sizes: Sequence[Sizes]) -> str:
    """ "position 37, layer 4, `linear` of down_proj: inputs equal bit for bit, 3 of 1,024 outputs differ ..."."""
    difference = next(iter(culprit.differences.values()))
    far = f"by at most {difference.max_ulp:,} ULP"
    if difference.nonfinite:
        far += f", {difference.nonfinite} of them NaN or infinite on one side"
    what = (
        f"position {culprit.position}, {_where(culprit)}, `{culprit.call}` of {culprit.module} (call "
        f"{culprit.occurrence + 1} there): inputs equal bit for bit, {difference.mismatched:,} of "
        f"{difference.compared:,} outputs differ {far}"
    )
    reads_keys = any("keys" in roles for roles in culprit.axes.values())
    arms = []
    for size, kernels in zip(sizes, culprit.kernels or [[] for _ in sizes], strict=False):
        shown = kernels if len(kernels) <= 4 else [*kernels[:2], "...", *kernels[-2:]]  # a product is among the last
        ran = ", ".join(shown) or "kernels unknown"
        arms.append(f"{ran} at {size.tokens:,} rows" + (f" and {size.keys:,} keys" if reads_keys else ""))
    return f"{what}; {' compared with '.join(arms)}"


def verdict_sentences(
    finding: str, culprits: Sequence[Culprit], families: Sequence[str] | None, notes: Sequence[str], left_out: str = ""
) -> list[str]:
    """The verdict; the first sentence is the shortest answer. `left_out`: a sentence on what was not tested."""
    if finding != "batch-dependent":
        return [f"{finding}: {note}" for note in notes] or [finding]
    first = culprits[0]
    named = f"is `{first.call}` of {first.module}" if first.call else f"could not be named; it is in {_where(first)}"
    where = f"the first operator to differ {named}, at position {first.position}"
    size = next((r.sentence for r in first.replays if r.name == "rounding" and r.status != "error"), "")
    is_bug = BUG in size
    lines = [f"{size}: {where}; batch-dependent" if is_bug else f"batch-dependent: {where}{f'; {size}' * bool(size)}"]
    listed = [f"{c.number}. `{c.call}` of {c.module}, position {c.position}" for c in culprits if c.call]
    if len(listed) > 1:
        lines.append(f"in the order in which replacing one showed the next: {'; '.join(listed)}")
    if left_out:
        lines.append(left_out)
    elif families is None:
        lines.append("no available set of replacements makes the arms agree on this load")
    elif len(families) < 2:
        lines.append(f"replacing only {families[0]} makes the arms agree on this load")
    else:
        lines.append(
            f"the smallest set of replacements that makes the arms agree on this load: {', '.join(families)} (with any "
            "one left out the arms differ again)"
        )
    # the order of the sum, or what no order fixes
    return [*lines, *(r.sentence for r in first.replays if r.name == "tree" or "; at risk under all" in r.sentence)]


def _rounded(pair: Pair, roles: Roles, record: StepRecord, out: torch.Tensor, done: Sequence[Replay]) -> Replay:
    """Whether the second arm's part `out` of the pair's result is apart from the first arm's by rounding. No order of
    a sum explains what follows the values of other requests, but that order itself may."""
    whole = cast("torch.Tensor", pair.a.outputs[0].value)
    theirs = whole.clone()
    cast("torch.Tensor", select(theirs, roles, record)).copy_(out)
    inputs = {slot.path for slot in pair.a.inputs if not slot.weight}
    given = {path: x for path, x in tensors_in((*pair.a.args, pair.a.kwargs)) if path in inputs}
    found = judged(pair.a, given, theirs, whole, 0)
    leaks = any(r.name == "values" and r.status == "divergent" for r in done)
    kind = UNDECIDED if leaks and found[0] == ROUNDING else found[0]
    begins = {BUG: "other requests' data in this request's row, " * leaks, UNDECIDED: "rounding or not is "}
    said = f"{begins.get(kind, '')}{in_words(kind, *found[1:])}"
    said += "; nondet.check of this operator decides it" * (kind == UNDECIDED)
    return Replay(name="rounding", status="identical" if kind == ROUNDING else "divergent", sentence=said)


def _where(culprit: Culprit) -> str:
    return f"layer {culprit.layer}" if culprit.layer.isdigit() else f"the {culprit.layer}"


_SAMPLER = (
    "the logits agree and the logprobs do not: what differs is the engine's own softmax over the vocabulary, outside "
    "of the model, and no call is named"
)
_CAPTURE = "the fine pass did not reproduce the bits of the coarse one: the capture is at fault, and no call is named"


@dataclass
class NamedCall:
    """A culprit, and what a script needs: the call of either arm, None where it can't be made by itself."""

    culprit: Culprit
    calls: list[RecordedCall] = field(default_factory=list)


def _agrees(record: StepRecord, coarse: RowHashes, owner: str, site: Site) -> bool:
    """Whether the layer's output in the fine pass has the hash of the coarse pass."""
    if not site.region.isdigit() or record.limited or record.cut or not record.events:
        return True
    value = record.events[-1].outputs[0].value
    hashes = coarse.rows.get((owner, site.position))
    if value is None or hashes is None:
        return True
    rows = value[0][record.row : record.row + 1]
    return int(row_hashes(rows)[0]) == int(hashes[coarse.names.index(f"{site.region}.out")])


def named(culprit: Culprit, pair: Pair, records: Sequence[StepRecord], **about: Any) -> Culprit:
    """The culprit with the call that is responsible, and its sentence."""
    about |= {"differences": dict(pair.unequal), "not_understood": pair.not_understood} | pair.a.key._asdict()
    culprit = msgspec.structs.replace(culprit, **about)
    return msgspec.structs.replace(culprit, sentence=culprit_sentence(culprit, [r.sizes for r in records]))


def _digests(pair: Pair, record: StepRecord) -> dict[str, str]:
    known = [(slot.path, slot.value) for slot in pair.a.inputs if slot.value is not None and slot.path in pair.roles]
    parts = {path: select(value, pair.roles[path], record) for path, value in known}
    return {path: digest(part) for path, part in parts.items() if part is not None}


def _what_is_known(finding: Finding) -> str:
    if finding.after is None:
        none = f"{finding.compared} calls were compared and none has equal inputs and unequal outputs"
        return f"{none}: what differs there was not seen by the capture"
    key, names = finding.after.a.key, ", ".join(finding.after.unequal_inputs)
    differ = f"the inputs of `{key.call}` in {key.module} differ already ({names}), "
    if finding.outside:
        return differ + (
            "and they are given to the layer from outside, as a rotary embedding's cos and sin are: what computes them "
            "is the culprit, and it is not among the layer's calls"
        )
    return differ + (
        "though no call before it that was understood has equal inputs and unequal outputs: something wrote in between "
        "that the capture does not see"
    )


_MOST_CULPRITS = 12  # more than there are families


@dataclass(eq=False)
class Search:
    """One trace, of transformers' engine; `nondet.trace.vllm` has what is different inside vLLM."""

    engine: Engine
    model: Any
    # a, b: the arms. Their first sessions run free; from then on the first arm's tokens are fed to both.
    a: Arm
    b: Arm
    _: KW_ONLY
    impl: str  # what is under both: stock, or an implementation as `nondet sample` takes it
    write: Callable[[Record], object]  # takes each record as it is made
    say: Callable[[str], None]  # takes a line for display as each step begins or ends
    # whether any request under study of the second arm may be used: then one that differs is taken
    choose: bool = True
    # records of a stopped process for this trace: they are not made again, except the controls
    earlier: Sequence[Record] = ()
    # arm's name -> digest that its trace must have, where it was recorded
    expected: Mapping[str, str] = field(default_factory=dict)
    script: bool = False  # whether `named` is needed, which no record holds
    sweeps: bool = True  # as `replays` has it
    left_out: str = field(default="", init=False)  # what was not tested, as a sentence; "" where everything was
    # the first culprit with what a separate script needs; None until there is one
    named: NamedCall | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.known = {record.key: record for record in self.earlier}
        self._culprits: list[Culprit] = []
        self._families: list[str] = []
        self._tried: dict[frozenset[str], Site | None] = {}  # families -> where the arms differed with them replaced
        self._recorded: tuple[RowHashes, RowHashes]
        self._first: tuple[Session, Session]
        self._started = time.perf_counter()

    def run(self) -> TraceVerdict:
        """The whole search. Raises EngineStoppedError: an arm died; what was found by then is written; UserError: the
        engine refuses the model, or an implementation the call."""
        with self._implementation():
            last = self._run_uncaptured()
            site = self._run_controls(last)
            if isinstance(site, TraceVerdict):
                return site
            if site is None and last is not None:
                note = "what the first sessions of the arms showed did not come again: it was seen once, not reproduced"
                return self._end("unknown", notes=[note])
            if site is None:
                others = len(self.b.requests) - 1
                concurrent = f"{others} other request{'' if others == 1 else 's'}"
                return self._end("no divergence observed", notes=[f"{AGREE}, alongside {concurrent}"])
            return self._until_fixed(site)

    def keep(self, record: Record) -> None:
        """Write the record, unless it was written before, by whichever process."""
        if record.key not in self.known:
            self.write(record)

    # --- what depends on the engine -----------------------------------------------------------------------------

    def _implementation(self) -> AbstractContextManager[Any]:
        """The block in which both arms run."""
        return implementation(self.impl)

    def _weights(self) -> None:
        self._control("weights", None, f"both arms use the same weights ({weights_digest(self.model)})")

    def _force(self, sessions: tuple[Session, Session], solo: Outcome) -> None:
        """From now on feed all requests the tokens that they have chosen, and both arms' the first one's."""
        for arm, session in zip((self.a, self.b), sessions, strict=True):
            arm.forced = {o.request.id: o.token_ids for o in session.outcomes} | {arm.request: solo.token_ids}

    def _bare(self, arm: Arm, last: int | None) -> Session:
        """A session without capture, up to the position `last`."""
        return arm.run(self.engine, Until(arm.request, last))

    def _coarse(self, arm: Arm, last: int | None) -> tuple[RowHashes, Session]:
        """Hashes of a session up to that position, and the session."""
        capture = CoarseCapture(arm.request, last, sharing=arm.load.sharing)
        return capture, arm.run(self.engine, capture)

    def _fine(self, arm: Arm, owner: str, site: Site) -> tuple[StepRecord | None, list[StepRecord]]:
        """The calls at the site, None where it was not computed again; and the shapes of other steps."""
        opaque = "attention" in self._families or self.impl.startswith("invariant")
        fine = FineCapture(owner, site.position, site.region, opaque_attention=opaque)
        arm.run(self.engine, fine)
        return fine.site, fine.shapes

    # --- controls -----------------------------------------------------------------------------------------------

    def _run_uncaptured(self) -> int | None:
        """Run both arms without capture, then force all tokens. Returns the last position to compare."""
        self.say("controls: the weights, and each arm without capture")
        self._weights()
        sessions = self._first = self.a.run(self.engine), self.b.run(self.engine)
        solo = self.a.outcome(sessions[0])
        if self.choose:
            self._choose(solo, sessions[1])
        loaded = self.b.outcome(sessions[1])
        for arm, outcome in ((self.a, solo), (self.b, loaded)):
            self._expect(arm, outcome)
        token, logprob = first_difference(solo, loaded)
        prompt = len(self.a.prompt)
        if logprob is None:
            sentence = f"{len(solo.token_ids)} tokens and their logprobs agree between the arms"
        else:
            tokens = "no token differs" if token is None else f"the first token that differs is token {token}"
            sentence = f"the arms' logprobs first differ at token {logprob} (position {prompt - 1 + logprob}); {tokens}"
        first = {"first_logprob": logprob, "first_token": token}
        self._control("parting", None, sentence, {k: float(-1 if v is None else v) for k, v in first.items()})
        self._force(sessions, solo)
        return None if logprob is None else prompt - 1 + logprob

    def _choose(self, solo: Outcome, loaded: Session) -> None:
        """Of the requests with this prompt, the first whose tokens differ, if any do."""
        targets = [o for o in loaded.outcomes if o.request.target and o.finish != "error"]
        differing = [(*first_difference(solo, o), o.request.id) for o in targets]
        differing = [found for found in differing if found[1] is not None]
        tokens = sum(token is not None for token, _, _ in differing)
        sentence = (
            f"of {len(targets)} requests with this prompt under load, {len(differing)} differ from it solo in "
            f"logprobs, {tokens} in tokens"
        )
        figures = {"requests": float(len(targets)), "logprobs": float(len(differing)), "tokens": float(tokens)}
        self._control("company", None, sentence, figures)
        if differing:
            self.b.request = min(differing, key=lambda found: (found[0] is None, found[1]))[2]

    def _expect(self, arm: Arm, outcome: Outcome) -> None:
        """Check that a recorded arm is reproduced bit for bit; otherwise the recording is not this machine's."""
        wanted = self.expected.get(arm.name)
        if wanted is None:
            return
        got, again = trace_digest(outcome.token_ids, outcome.logprobs), "bit-identical to the record"
        if got != wanted:
            again = f"trace {got} instead of {wanted}, and is traced as it is now"
        self._control(f"record of {arm.request}", got == wanted, f"{arm.title}: repeated, it is {again}")

    def _run_controls(self, last: int | None) -> Site | TraceVerdict | None:
        """Each arm twice with capture, and once forced without: run to run, capture, then the least difference."""
        self.say("coarse pass: each arm twice, with hashes of every position and layer, and once without")
        arms = self.a, self.b
        once = [self._coarse(arm, last) for arm in arms]
        again = [self._coarse(arm, last) for arm in arms]
        for arm, (first, _), (again_capture, _) in zip(arms, once, again, strict=True):
            if first.full:
                self._control("memory", False, "hashes of late positions were not kept, for lack of memory")
            if same_records(first, again_capture) is not None:
                return self._run_to_run(arm, (first, again_capture))
        cost: dict[str, float] = {}
        for arm, initial, (_, session), (_, second) in zip(arms, self._first, once, again, strict=True):
            bare = self._bare(arm, last)
            if note := changed_after_first(initial, bare, arm.forced):
                self._control("run to run", False, f"arm {arm.title}: {note}")
                return self._end("run-to-run", notes=[f"arm {arm.title}: {note}"])
            note = logits_at_fault(bare, session)
            if note:
                self._control("capture", False, f"arm {arm.title}: {note}")
                return self._end("unknown", notes=[f"arm {arm.title}: {note}"])
            cost[arm.name] = step_seconds(second) / max(step_seconds(bare), 1e-9)
        slower = [
            f"a step of arm {a.title} takes {cost[a.name]:.2f} times as long" for a in arms if cost[a.name] > 1.05
        ]
        same = "recording changes no result: all logits and logprobs that the engine gives are bit-identical without it"
        self._control("capture", True, "; with it ".join([same, *([" and ".join(slower)] if slower else [])]), cost)
        rows = sum(len(capture.rows) for capture, _ in once)
        agree = f"each arm twice: all records of {rows} rows agree, so only the batch differs"
        self._control("run to run", True, agree)
        if last is None and self.choose:  # no answer differs: hidden states of any of them may
            for name in [o.request.id for o in once[1][1].outcomes if o.request.target and o.finish != "error"]:
                self.b.request = name
                if (site := self._least(once, last)) is not None:
                    return site
        return self._least(once, last)

    def _least(self, runs: Sequence[tuple[RowHashes, Session]], last: int | None = None) -> Site | None:
        """Where the arms' records differ first, or only their logprobs; None: nowhere."""
        self._recorded = runs[0][0], runs[1][0]
        site = least_site(*self._recorded, (self.a.request, self.b.request), last)
        outcomes = [arm.outcome(session) for arm, (_, session) in zip((self.a, self.b), runs, strict=True)]
        _, logprob = first_difference(*outcomes)
        if site is None and logprob is not None and all(o.finish != "cut" for o in outcomes):
            return Site((self.a.request, self.b.request), len(self.a.prompt) - 1 + logprob, "logprob")
        return site

    def _run_to_run(self, arm: Arm, captures: tuple[RowHashes, RowHashes]) -> TraceVerdict:
        """The arm compared with itself: the batches are the same, so a difference has another cause."""
        site = least_site(*captures, (arm.request, arm.request))
        where = " only in rows of other requests"
        if site is not None:
            where = f", first at position {site.position}, {site_in_words(site)}"
        note = f"arm {arm.title}, repeated with the same batches, differs from itself{where}"
        self._control("run to run", False, note)
        if site is not None:
            self.a = self.b = arm
            self._recorded = captures
            self._name(1, site, steady=False)
        return self._end("run-to-run", notes=[note])

    # --- the loop -----------------------------------------------------------------------------------------------

    def _until_fixed(self, site: Site) -> TraceVerdict:
        """Name a call, replace its family, and repeat."""

        def fewest(families: Iterable[str]) -> list[str]:
            return minimal(list(families), lambda kept: bool(kept) and self._substituted("left out", kept) is None)

        for number in range(1, _MOST_CULPRITS + 1):
            with self._replaced(self._families):
                culprit = self._on_record(number) or self._name(number, site)
            if culprit is None or not culprit.family or culprit.family in self._families:
                break
            self._families.append(culprit.family)
            now = self._substituted("search", self._families)
            if now is None:
                return self._end("batch-dependent", families=fewest(self._families))
            site = now  # same position as before if the next call in the layer is responsible too
        from nondet.kernels.dispatch.operators import FAMILIES

        if self._substituted("all", list(FAMILIES)) is None:
            return self._end("batch-dependent", families=fewest(FAMILIES))
        return self._end("batch-dependent")

    def _on_record(self, number: int) -> Culprit | None:
        """The culprit of that number, if it is on record and that suffices."""
        record = self.known.get(("culprit", str(number)))
        if not isinstance(record, Culprit) or (self.script and self.named is None):
            return None
        self._culprits.append(record)
        self.say(f"on record: {record.sentence}")
        return record

    def _name(self, number: int, site: Site, *, steady: bool = True) -> Culprit | None:
        """The responsible call there, on record; None if it is the previous one, whose replacement did not help."""
        self.say(f"fine pass: position {site.position}, {site_in_words(site)}")
        found = self._compared(number, site, steady=steady)
        if self._culprits and _call_of(found.culprit) == _call_of(self._culprits[-1]):
            self.say(f"unchanged: the replacement does not reach `{found.culprit.call}` of {found.culprit.module}")
            return None
        self._culprits.append(found.culprit)
        self.keep(found.culprit)
        self.say(found.culprit.sentence)
        self.named = self.named or (found if found.calls else None)
        return found.culprit

    def _compared(self, number: int, site: Site, *, steady: bool) -> NamedCall:
        """Run both arms to the site, compare their calls, and replay the responsible one. The fine pass must reproduce
        the bits of the coarse one, which led to the site, unless an arm is not `steady`."""

        def unnamed(note: str, **about: Any) -> NamedCall:
            sentence = f"position {site.position}, {site_in_words(site)}: {note}"
            token = max(-1, site.position - len(self.a.prompt) + 1)
            about |= {"position": site.position, "token": token, "layer": site.region, "requests": list(site.owners)}
            return NamedCall(Culprit(number=number, replaced=list(self._families), sentence=sentence, **about))

        if site.record == "logprob":
            return unnamed(_SAMPLER)
        shapes: list[StepRecord] = []
        records: list[StepRecord] = []
        for arm, owner, before in zip((self.a, self.b), site.owners, self._recorded, strict=True):
            record, others = self._fine(arm, owner, site)
            if record is None:
                return unnamed(f"arm {arm.title} did not compute that position again in the fine pass")
            if steady and not _agrees(record, before, owner, site):
                return unnamed(f"arm {arm.title}: {_CAPTURE}")
            shapes += others
            records.append(record)
        finding = first_responsible(records[0], records[1], shapes)
        pair, note = finding.responsible, ""
        if pair is None:
            note = _what_is_known(finding)
            if any(record.limited for record in records):
                note += "; the copies of that step's tensors reached the memory limit, so not every call was compared"
        found = unnamed(note, unmatched=finding.unmatched, compared=finding.compared)
        return found if pair is None else self._replayed(found.culprit, pair, records)

    def _replayed(self, culprit: Culprit, pair: Pair, records: Sequence[StepRecord]) -> NamedCall:
        """The named call, repeated by itself."""
        name = pair.a.key.call.removeprefix("Tensor.")
        calls: list[RecordedCall] = []
        parts: list[torch.Tensor] = []
        for event, record in zip((pair.a, pair.b), records, strict=True):
            call, first = RecordedCall.of(event, pair, record), event.outputs[0]
            out = None if first.value is None else select(first.value, pair.roles.get(first.path, ()), record)
            if call is not None and out is not None:
                calls.append(call)
                parts.append(out)
        kernels: list[list[str]] = []
        done: list[Replay] = []
        if len(calls) == 2:
            kernels = [kernels_of(call, self.model.device.type) for call in calls]
            done = list(replays(calls[0], calls[1], parts[0], parts[1], name, sweeps=self.sweeps))
            roles = pair.roles.get(pair.a.outputs[0].path, ())
            if done[0].status == "identical" and done[0].equals_second:
                done.append(guarded("rounding", _rounded, pair, roles, records[0], parts[1], done))
        suggested = [str(r.values[0]) for r in done if r.name == "substitution" and r.status == "identical"]
        if not suggested and any("keys" in roles for roles in pair.roles.values()):
            suggested = ["attention"]  # a part of attention: the fix is one order over a request's own keys
        elif not suggested and not any(r.name == "substitution" for r in done):
            # it can't be made by itself, or was not: the family that its name suggests is tried in the whole run
            suggested = list(families_for(name)[:1])
        shapes = [{s.path: list(s.shape) for s in (*e.inputs, *e.outputs)} for e in (pair.a, pair.b)]
        about = {"kernels": kernels, "replays": done, "family": suggested[0] if suggested else "", "shapes": shapes}
        axes = {path: list(roles) for path, roles in pair.roles.items()}
        culprit = named(culprit, pair, records, axes=axes, digests=_digests(pair, records[0]), **about)
        return NamedCall(culprit, calls if len(calls) == 2 else [])

    def _substituted(self, role: str, families: Sequence[str]) -> Site | None:
        """The whole run with these families replaced in both arms; returns where the arms differ now."""
        tried = frozenset(families)
        if tried in self._tried:
            return self._tried[tried]
        record = self.known.get(("substitution", role, "+".join(families)))
        # if there is a culprit to be named there, the arms are compared again
        enough = role != "search" or ("culprit", str(len(self._culprits) + 1)) in self.known
        if isinstance(record, Substitution) and (record.agree or enough):
            self.say(f"on record: {record.sentence}")
            self._tried[tried] = None if record.agree else Site(("", ""), record.position, record.layer)
            return self._tried[tried]
        replaced = f"{' and '.join(families)} invariant"
        self.say(f"substitution: {replaced} in both arms, the whole run again")
        with self._replaced(families) as block:
            runs = [self._coarse(arm, None) for arm in (self.a, self.b)]
        coverage, site = block.coverage(), self._least(runs)
        sentence = f"with {replaced} {AGREE}: the divergence is gone"
        if site is not None:
            sentence = f"with {replaced} the arms differ at position {site.position}, {site_in_words(site)}"
            if role == "search":
                before = self._culprits[-1]
                sentence += f"; before that at position {before.position}, {_where(before)}"
        at: Any = {"position": -1, "layer": ""} if site is None else {"position": site.position, "layer": site.region}
        at["at_risk"] = sorted({*coverage.at_risk, *coverage.left})
        record = Substitution(role=role, families=list(families), agree=site is None, sentence=sentence, **at)
        self.keep(record)
        self.say(sentence)
        self._tried[tried] = site
        return site

    def _replaced(self, families: Sequence[str]) -> AbstractContextManager[Any]:
        """The block that replaces families in both arms."""
        from nondet.kernels.dispatch.block import batch_invariant

        return batch_invariant(list(families)) if families else nullcontext()

    # --- records ------------------------------------------------------------------------------------------------

    def _control(self, name: str, passed: bool | None, sentence: str, figures: dict[str, float] | None = None) -> None:
        self.keep(Control(name=name, passed=passed, sentence=sentence, figures=figures or {}))
        self.say(sentence)

    def _end(self, finding: str, *, families: list[str] | None = None, notes: Sequence[str] = ()) -> TraceVerdict:
        return TraceVerdict(
            finding=finding,
            culprits=[c.sentence for c in self._culprits],
            families=families,
            sentences=verdict_sentences(finding, self._culprits, families, notes, self.left_out),
            seconds=time.perf_counter() - self._started,
        )


def _call_of(culprit: Culprit) -> tuple[object, ...]:
    """Identifies a call by its position and family: once replaced, attention has another name."""
    return culprit.position, culprit.requests, culprit.module, culprit.family or culprit.call
