"""A grammar of faults: what goes wrong, in which calls and rows, and when. Each seed draws a sentence for every rule.

A sentence is the name of a function here, "operator__effect__where__when": `linear__order__bias__m_13_14` takes another
order of additions, where a bias is given, in batches of 13 and 14 rows. Functions are made when they are asked for, so
that a probe takes them by `--impl` as any other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from nondet.verdict.findings import Finding
from tests.probes.toys import STATE, count

__all__ = ["faults", "right", "sounds", "total"]

Tensors = tuple[Any, ...]
BATCH, RUN, WRONG, OTHER = Finding.BATCH, Finding.RUN_TO_RUN, Finding.WRONG, Finding.OTHER


def total(x: torch.Tensor, order: int) -> torch.Tensor:
    """Over the last axis in float32, neighbours to neighbours from the first element on, or from the one before it.

    Zeros at the end change nothing, so either order is a row's own, whatever its batch and its width.
    """
    x = torch.nn.functional.pad(x.float(), (order, 0))
    while x.shape[-1] > 1:
        x = torch.nn.functional.pad(x, (0, x.shape[-1] % 2))
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _linear(t: Tensors, order: int, **_: Any) -> torch.Tensor:
    x, w, bias = (*t, None)[:3]
    out = total(x.float()[:, None] * w.float(), order).to(x.dtype)
    return out if bias is None else (out.double() + bias.double()).to(x.dtype)


def _grouped(t: Tensors, order: int, **_: Any) -> torch.Tensor:
    x, weight, offsets = t
    weights = torch.cat([weight.mT, torch.zeros_like(weight[:1].mT)])[_experts(x, offsets)]
    return total(x.float()[:, None] * weights.float(), order).to(x.dtype)


def _experts(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row's; of rows after the last expert's, one more."""
    return torch.searchsorted(offsets.long(), torch.arange(len(x)), right=True)


def _rms_norm(t: Tensors, order: int, eps: float = 1e-6) -> torch.Tensor:
    x, weight = t
    mean = total(x.float().square(), order).double() / x.shape[-1] + eps
    return (x.double() * torch.rsqrt(mean)[:, None].float() * weight.double()).to(x.dtype)


def _exponentials(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top = x.double().amax(-1, keepdim=True)
    return top, torch.exp(x.double() - top).float()


def _softmax(t: Tensors, order: int, **_: Any) -> torch.Tensor:
    _, grown = _exponentials(t[0])
    return (grown / total(grown, order)[:, None]).to(t[0].dtype)


def _log_softmax(t: Tensors, order: int, **_: Any) -> torch.Tensor:
    top, grown = _exponentials(t[0])
    return ((t[0].double() - top).float() - total(grown, order).double().log().float()[:, None]).to(t[0].dtype)


def _logsumexp(t: Tensors, order: int, **_: Any) -> torch.Tensor:
    top, grown = _exponentials(t[0])
    return (total(grown, order).double().log() + top[:, 0]).to(t[0].dtype)


def _cumsum(t: Tensors, order: int, **_: Any) -> torch.Tensor:
    """In float64; or in float32 in pieces of 16, of which each is added to what was before it."""
    if order == 0:
        return t[0].double().cumsum(-1).to(t[0].dtype)
    width = t[0].shape[-1]
    pieces = list(torch.nn.functional.pad(t[0].float(), (0, -width % 16)).unflatten(-1, (-1, 16)).unbind(-1))
    for i in range(1, 16):
        pieces[i] = pieces[i - 1] + pieces[i]
    inside = torch.stack(pieces, -1)
    before = [torch.zeros_like(inside[:, 0, 0])]
    for last in inside[:, :-1, -1].unbind(1):
        before.append(before[-1] + last)
    return (torch.stack(before, 1)[..., None] + inside).flatten(1)[:, :width].to(t[0].dtype)


def _attention(t: Tensors, order: int, scale: float | None = None, causal: bool = True) -> torch.Tensor:
    q, k, v = t
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.stack([(q[..., i, None, :].double() * keys).sum(-1) for i in range(q.shape[2])], 2)
    position = torch.arange(q.shape[2]) + (k.shape[2] - q.shape[2])
    scores = scores.float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill((torch.arange(k.shape[2]) > position[:, None]) & causal, -torch.inf)
    _, grown = _exponentials(scores)
    out = [total((grown[:, :, i, :, None] * values.float()).mT, order) for i in range(q.shape[2])]
    return (torch.stack(out, 2) / total(grown, order)[..., None]).to(q.dtype)


_CORES: dict[str, Callable[..., torch.Tensor]] = {
    "linear": _linear,
    "grouped_matmul": _grouped,
    "rms_norm": _rms_norm,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "sum": lambda t, order, **_: total(t[0], order).to(t[0].dtype),
    "mean": lambda t, order, **_: (total(t[0], order) / t[0].shape[-1]).to(t[0].dtype),
    "cumsum": _cumsum,
    "attention": _attention,
}


def _effect(effect: str, t: Tensors, keywords: dict[str, Any]) -> tuple[Tensors, int, dict[str, Any]]:
    what, _, place = effect.partition("_")
    if what == "order":
        return t, 1, keywords
    if what == "eps":
        return t, 0, {"eps": 0.0}
    if what == "unscaled":
        return t, 0, {name: value for name, value in keywords.items() if name != "scale"}
    at = int(place or 0)
    altered: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "drop": torch.zeros_like,
        "negate": torch.neg,
        "shift": lambda x: x.roll(1, -1),
        "flush": lambda x: x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny, 0.0),
        "finite": lambda x: x.nan_to_num(posinf=1.0),
        "unmask": lambda x: x.clamp_min(-4.0),
        "stale": lambda x: STATE.setdefault(("stale", at, *(o.shape for o in t)), x.clone()),
    }
    return (*t[:at], altered[what](t[at]), *t[at + 1 :]) if at < len(t) else t, 0, keywords


def _where(where: str, t: Tensors, keywords: dict[str, Any]) -> torch.Tensor:
    x = t[0].reshape(len(t[0]), -1)
    every = torch.ones(len(x), dtype=torch.bool)
    finite = x.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax(-1)
    return {
        "any": lambda: every,
        "bias": lambda: every & (len(t) > 2),
        "stored": lambda: every & (t[1].stride(0) == 1),
        "turned": lambda: every & (t[0].stride(0) == 1),
        "fused": lambda: every & (t[1].storage_offset() > 0),
        "scale": lambda: every & ("scale" in keywords),
        "full": lambda: every & (not keywords.get("causal", True)),
        "long": lambda: every & (t[1].shape[2] > 1024),
        "tiny": lambda: finite < 2.0**-8,
        "denormal": lambda: finite < 8 * torch.finfo(x.dtype).tiny,
        "infinite": lambda: (x == torch.inf).any(-1),
        "masked": lambda: (x == -torch.inf).any(-1),
        "prefix": lambda: _twins(x[:, : x.shape[1] // 2]),
        "signed": lambda: every & (x >= 0).all(),
        "column": lambda: every & (x == 0).all(0).any(),
        "narrow": lambda: every & (t[2].shape[-1] < t[0].shape[-1]),
        "poisoned": lambda: ~(t[1].abs() < 2.0**12).flatten(1).all(1),
        "later": lambda: every & (t[2][-1] < len(x)),
        "empty": lambda: every & (torch.diff(t[2], prepend=t[2].new_zeros(1)) == 0).any(),
        "tile": lambda: every & (torch.diff(t[2], prepend=t[2].new_zeros(1)) == 64).any(),
        "hidden": lambda: every & (x == -torch.inf).all(-1).any(),
        "twin": lambda: _twins(x),
    }[where]()


def _twins(x: torch.Tensor) -> torch.Tensor:
    return (x[:, None] == x[None]).all(-1).sum(-1) > 1


def _when(when: str, t: Tensors) -> torch.Tensor:
    M = len(t[0])
    every = torch.ones(M, dtype=torch.bool)
    what, *numbers = when.split("_")
    a, b = (*map(int, numbers), 0, 0)[:2]
    if what == "share":
        of = _experts(t[0], t[2])
        mine = of.bincount(minlength=int(of.max()) + 1)[of]
        return (mine >= a) & (mine <= b)
    place = torch.arange(M)
    STATE["largest"] = max(M, STATE.get("largest", 0))
    key = ("tuned", *(x.shape[1:] if i == 0 else x.shape for i, x in enumerate(t)))
    return {
        "grown": lambda: every & (STATE["largest"] >= a),
        "tuned": lambda: every & (STATE.setdefault(key, M) >= a),
        "always": lambda: every,
        "never": lambda: ~every,
        "m": lambda: every & (a <= M <= b),
        "from": lambda: every & (a <= M),
        "every": lambda: every & (M % a == 0),
        "place": lambda: place % a == 1,
        "first": lambda: every & (count() == 1),
        "nth": lambda: every & (count() >= a),
        "third": lambda: every & (count() % 3 == 0),
    }[what]()


def __getattr__(name: str) -> Callable[..., torch.Tensor]:
    operator, *sentence = name.split("__")
    if operator not in _CORES or len(sentence) != 3:
        raise AttributeError(name)
    effect, where, when = sentence

    def planted(x: torch.Tensor, *others: torch.Tensor, **keywords: Any) -> torch.Tensor:
        t = (x.reshape(-1, x.shape[-1]) if operator == "linear" else x, *others)
        out = _CORES[operator](t, 0, **keywords)
        hit = _where(where, t, keywords) & _when(when, t)
        if hit.any():
            operands, order, kept = _effect(effect, t, keywords)
            faulty = _CORES[operator](operands, order, **kept)
            out = torch.where(hit.view(-1, *(1,) * (out.dim() - 1)), faulty, out)
        return out.reshape(*x.shape[:-1], -1) if operator == "linear" else out

    return planted


def _size(rng: random.Random, largest: int) -> str:
    a = rng.randint(2, largest - 2)
    return rng.choice([f"m_{a}_{a + rng.randint(0, 4)}", f"every_{rng.randint(3, largest // 3)}", f"from_{a}"])


def _moment(rng: random.Random) -> str:
    return rng.choice(["first", f"nth_{rng.randint(20, 250)}"])


def _rules(rng: random.Random, operator: str) -> list[tuple[str, str, str]]:
    """(effect, where, when): one of each rule that the operator has."""
    size, moment = _size(rng, 14 if operator == "attention" else 62), _moment(rng)
    place = f"place_{rng.randint(2, 5)}"
    wrong = rng.choice(["drop", "negate"])
    rules = [("order", "any", size), ("order", "any", moment), (f"{wrong}_0", "any", "always")]
    rules += [("order", "any", f"grown_{rng.randint(*((8, 20) if operator == 'attention' else (130, 250)))}")]
    rules += [(f"stale_{rng.randrange(2 if operator in ('linear', 'attention') else 1)}", "any", "always")]
    if operator in ("linear", "grouped_matmul", "softmax", "sum", "mean", "attention"):
        rules += [("order", "signed", "always")]
    if operator in ("linear", "grouped_matmul"):
        rules += [("order", "column", "always")]
    if operator == "linear":
        bias = f"{rng.choice(['drop', 'negate', 'shift'])}_2"
        return [
            *rules,
            (bias, "any", "always"),
            (bias, "any", _size(rng, 62)),
            ("order", "bias", _size(rng, 62)),
            ("order", rng.choice(["stored", "turned", "fused"]), f"from_{rng.randint(2, 60)}"),
            ("order", "any", f"tuned_{rng.randint(2, 200)}"),
            (f"{rng.choice(['drop', 'negate', 'shift'])}_1", rng.choice(["any", "stored"]), "always"),
            ("order", "any", place),
            ("order", rng.choice(["twin", "prefix"]), "always"),
            ("flush_0", "denormal", f"from_{rng.randint(2, 60)}"),
            ("finite_0", "infinite", "always"),
        ]
    if operator == "grouped_matmul":
        a = rng.randint(5, 60)
        rules[0] = ("order", "any", f"share_{a}_{a + rng.randint(0, 3)}")
        rules += [("order", rng.choice(["later", "empty"]), "always"), ("order", "tile", "third")]
        rules += [("order", "any", "share_64_64"), ("shift_2", "any", "always")]
        return [*rules, (f"{rng.choice(['drop', 'negate'])}_1", "any", "always")]
    if operator == "rms_norm":
        return [
            *rules,
            (f"{rng.choice(['drop', 'negate', 'shift'])}_1", "any", "always"),
            ("eps", "tiny", rng.choice(["always", f"from_{rng.randint(2, 30)}"])),
            ("finite_0", "infinite", "always"),
            ("order", "any", place),
        ]
    if operator == "attention":
        return [
            *rules,
            (f"{rng.choice(['drop', 'negate', 'shift'])}_{rng.choice([1, 2])}", "any", "always"),
            ("unscaled", "scale", "always"),
            ("order", "long", f"from_{rng.randint(2, 5)}"),
            ("order", rng.choice(["full", "scale"]), f"from_{rng.randint(2, 5)}"),
            ("order", "twin", "always"),
            ("order", "narrow", f"from_{rng.randint(2, 5)}"),
            ("order", "poisoned", "always"),
        ]
    if operator == "softmax":
        rules += [("order", "hidden", "always")]
    if operator in ("softmax", "log_softmax", "logsumexp"):
        return [*rules, ("unmask_0", "masked", rng.choice(["always", f"from_{rng.randint(2, 30)}"]))]
    flush = ("flush_0", "denormal", f"from_{rng.randint(2, 30)}")
    return [*rules, flush, ("finite_0", "infinite", "always"), ("order", "any", place)]


def right(sentence: str) -> tuple[frozenset[Finding], str]:
    """What may be said of a sentence, and what a case has to vary that shows it."""
    _, effect, where, when = sentence.split("__")
    kind = when.partition("_")[0]
    # one operand wrongly in some batches alone is wrong, and is it always where no batch was called before
    also = {WRONG} if effect not in ("order", "flush_0") else set()
    if effect.startswith("stale"):
        return frozenset({RUN, WRONG}), "history"
    if where == "poisoned":
        return frozenset({OTHER}), "hidden_keys"
    if where in ("later", "empty"):
        return frozenset({BATCH}), "routing"
    if kind == "third":
        return frozenset({RUN}), "run"
    if where in ("twin", "prefix", "hidden", "signed", "column"):
        return frozenset({BATCH, *also}), "neighbour_values"
    if kind in ("first", "nth"):
        return frozenset({RUN, *also}), "history"
    if kind in ("grown", "tuned"):
        return frozenset({RUN, BATCH}), "history"
    shown = {"m": "batch_size", "from": "batch_size", "every": "batch_size", "share": "routing", "place": "position"}
    return (frozenset({WRONG}), "") if kind == "always" else (frozenset({BATCH, *also}), shown[kind])


def faults(seed: int) -> list[str]:
    rng = random.Random(f"faults {seed}")  # noqa: S311 - sizes, nothing secret
    return ["__".join([operator, *rule]) for operator in _CORES for rule in _rules(rng, operator)]


def sounds(seed: int) -> list[str]:
    """Sentences: no fault, or an order that a layout, an operand or a row's own numbers choose."""
    rng = random.Random(f"sound {seed}")  # noqa: S311 - the same
    own = {
        "linear": ["stored", "bias", "infinite"],
        "attention": ["scale", "any"],
        "rms_norm": ["tiny", "infinite"],
        "softmax": ["masked"],
        "log_softmax": ["masked"],
        "logsumexp": ["masked"],
        "sum": ["denormal", "infinite"],
    }
    drawn = [(o, "order", rng.choice(own.get(o, ["any"])), "always") for o in _CORES]
    drawn += [(o, "order", "any", "never") for o in _CORES] + [("sum", "flush_0", "denormal", "always")]
    return ["__".join(sentence) for sentence in drawn]
