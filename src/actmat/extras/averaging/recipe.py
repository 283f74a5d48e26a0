"""Checkpoints of one training run: order, short names, and averaging weights.

`T` checkpoints, `t = 1 ... T` from the oldest to the newest. All weights sum to 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePath, PurePosixPath
from typing import Any

from actmat.bounds import is_url
from actmat.errors import RecipeError
from actmat.recipe.output import with_output
from actmat.recipe.schema import Recipe, make_recipe

NAMED = ("uniform", "linear", "ema", "wsd")
FORMS = "uniform, linear, ema:DECAY (such as ema:0.9), wsd, or one number per checkpoint"


def in_order(places: Sequence[str]) -> list[str]:
    """Sort locations by the numbers in them, so that step 200 precedes step 1000.

    >>> in_order(["run/step-1000", "run/step-200", "run/step-30"])
    ['run/step-30', 'run/step-200', 'run/step-1000']
    """

    def key(place: str) -> list[tuple[int, int, str]]:
        return [(1, int(p), p) if p.isdecimal() else (0, 0, p) for p in re.split("([0-9]+)", place)]

    return sorted(places, key=key)


def distinct_names(places: Sequence[str]) -> list[str]:
    """A short name per location: the last path part that differs for all, else the whole location.

    >>> distinct_names(["run/step-1/model", "run/step-2/model"])
    ['step-1', 'step-2']
    """
    parts = [(PurePosixPath if is_url(p) else PurePath)(p.rstrip("/")).parts for p in places]
    for k in range(1, min(map(len, parts), default=0) + 1):
        names = [p[-k] for p in parts]
        if len(set(names)) == len(names):
            return names
    return list(places)


def trajectory_weights(text: str, count: int) -> tuple[list[float], str]:
    """Weights of `count` checkpoints, oldest first, and the formula as text.

    * `uniform`: `w_t = 1/T` (stochastic weight averaging, Izmailov et al., UAI 2018).
    * `linear`: `w_t = 2 t / (T (T + 1))` (WMA of Li et al., "Model merging in pre-training of LLMs", 2025).
    * `ema:a`: `w_t = a^(T-t) / sum_s a^(T-s)`, an exponential moving average with decay `a` per checkpoint, started
    at zero and divided by the sum of its weights.
    * `wsd`: `w_t = m((t-1)/T) - m(t/T)`, `m(x) = 1 - sqrt(x)`: to first order the effect of the decay phase of a
    warmup-stable-decay schedule with the factor `m` on the updates between checkpoints (Tian et al., "WSM:
    decay-free learning rate schedule via checkpoint merging", 2025, theorem 3.1; `m` of Haegele et al., 2024).
    * comma-separated numbers: divided by their sum.

    >>> trajectory_weights("linear", 3)[0]
    [0.16666666666666666, 0.3333333333333333, 0.5]

    Raises:
        RecipeError: an unknown form, or the numbers of weights and checkpoints differ.
    """
    name, _, argument = text.strip().partition(":")
    steps = range(1, count + 1)
    if name == "uniform" and not argument:
        return _normalized([1.0] * count), "w_t = 1/T"
    if name == "linear" and not argument:
        return _normalized([float(t) for t in steps]), "w_t = 2 t / (T (T + 1))"
    if name == "ema":
        decay = _decay(argument, text)
        return _normalized([decay ** (count - t) for t in steps]), f"w_t = {decay:g}^(T-t) / sum_s {decay:g}^(T-s)"
    if name == "wsd" and not argument:
        weights = [(1 - math.sqrt((t - 1) / count)) - (1 - math.sqrt(t / count)) for t in steps]
        return _normalized(weights), "w_t = m((t-1)/T) - m(t/T), m(x) = 1 - sqrt(x)"
    return _normalized(_listed(text, count)), "as given, divided by their sum"


def _decay(argument: str, text: str) -> float:
    try:
        decay = float(argument)
    except ValueError:
        decay = math.nan
    if not 0 < decay <= 1:
        raise RecipeError(f"WEIGHTS: expected ema:DECAY with a decay in (0, 1], such as ema:0.9; found '{text[:80]}'")
    return decay


def _listed(text: str, count: int) -> list[float]:
    try:
        weights = [float(piece) for piece in text.split(",")]
    except ValueError:
        raise RecipeError(f"WEIGHTS: expected {FORMS}; found '{text[:80]}'") from None
    if len(weights) != count:
        raise RecipeError(f"WEIGHTS: expected one number per checkpoint, {count}, found {len(weights)}")
    if not all(map(math.isfinite, weights)) or math.fsum(weights) == 0:
        raise RecipeError(f"WEIGHTS: expected finite numbers with a sum other than 0, found '{text[:80]}'")
    return weights


def _normalized(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


def average_recipe(
    places: Sequence[str], weights: str | Sequence[float] = "uniform", *, as_given: bool = False, **fields: Any
) -> Recipe:
    """The recipe of an average: `linear` on all tensors, with deltas relative to the newest checkpoint.

    Raises:
        RecipeError: checkpoints are missing or repeated, or weights are invalid; also if weights are listed for
        checkpoints that are not in step order, because the assignment is ambiguous.
    """
    if not places:
        raise RecipeError("An average needs at least two checkpoints: give more.")
    text = weights if isinstance(weights, str) else ",".join(repr(float(w)) for w in weights)
    ordered = list(places) if as_given else in_order(places)
    share, formula = trajectory_weights(text, len(places))
    has_numbers = text.strip().partition(":")[0] not in NAMED
    if has_numbers and ordered != list(places):
        raise RecipeError(
            "WEIGHTS lists one number per checkpoint, but the checkpoints are not in step order: "
            f"{', '.join(ordered)}. Fix: give them in this order, or use actmat.average(..., as_given=True)."
        )
    names = distinct_names(ordered)
    experts = [{"path": p, "name": n, "weight": w} for p, n, w in zip(ordered, names, share, strict=True)]
    listed = ", ".join(f"{n} {w:.6g}" for n, w in zip(names, share, strict=True))
    kind = "numbers" if has_numbers else text
    notes = (
        f"weights '{kind}' ({formula}), oldest first: {listed}",
        f"files and buffers come from the last checkpoint, {names[-1]}; deltas are relative to it, which does not "
        "change the average",
    )
    last = {"base": ordered[-1], "measured_from": names[-1]}
    average = {**last, "experts": experts, "method": "linear", "scope": "all", "notes": notes}
    return make_recipe(with_output(average, fields))
