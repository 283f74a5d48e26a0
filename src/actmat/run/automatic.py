"""`method: auto`: the named method that the evidence prefers for experts of this kind.

The table is that of `python -m benchmarks.evidence.choice`, which computes it from the committed scores by a criterion
that it states; `evidence/tests/benchmarks/test_choice.py` holds both together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from actmat.errors import RecipeError
from actmat.experts.locate import stored_of
from actmat.experts.lora.adapter import Adapter
from actmat.methods.spaces import Space
from actmat.planning.choose import WHOLE
from actmat.planning.implied import IN_ONE_FILE
from actmat.recipe import Recipe
from actmat.recipe.values import leaves
from actmat.run.adapters import modules_differ, size_and_overlap
from actmat.run.locate import Located

AUTO = "auto"
ModelForm = Literal["full", "gentle", "adapters", "unknown", "other", "changes", "mixed"]
"""All experts are checkpoints; all are adapters with factors, whose deltas
are below `GENTLE`, below `HOT` and start from different `A`, or are so but of unknown size, or neither; all are
adapters, and some have no factors; some of each."""
ModelKind = Literal["encoder", "decoder", "any"]
"""`any`: encoder-decoders and unknown kinds, for which nothing was measured."""

GENTLE, HOT = 0.0074, 0.058
"""Mean of `||D|| / ||W_0||` below which adapters are gentle, and from which they are larger than common ones."""

LARGEST: Mapping[str, int] = {"encoder": 50_000_000, "decoder": 200_000_000}
LARGEST_OF_ADAPTERS: Mapping[str, int] = {"encoder": 150_000_000, "decoder": 700_000_000}
"""Parameters from which models are larger than those that were measured: 22 and 135 million, adapted 109 and 494."""
MOST, HOTTEST = 8, 0.3
"""Experts, and mean `||D|| / ||W_0||` of adapters, that were measured, at most."""

DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures that generate, unless their config says `is_encoder_decoder`."""


@dataclass(frozen=True)
class AutoChoice:
    """The method for experts of one form and kind, and what it gave on bases that took no part in its choice.

    Args:
        method: its name.
        sets: number of these bases.
        gain, worst: points above the average, in the mean over bases and on the worst.
    """

    method: str
    sets: int
    gain: float
    worst: float

    def __str__(self) -> str:
        """The measurement in words."""
        if self.method == "average":
            return "no other method was measured in all sets and was safe there"
        if self.sets == 1:
            return f"{self.gain:+.1f} points over the average on the one base that tests it"
        return f"{self.gain:+.1f} points over the average on {self.sets} bases, {self.worst:+.1f} on the worst"


TABLE: Mapping[tuple[ModelForm, ModelKind], AutoChoice] = {
    ("full", "encoder"): AutoChoice("dc_merge", sets=5, gain=2.7, worst=-0.4),
    ("full", "decoder"): AutoChoice("actmat_ridge", sets=1, gain=11.3, worst=11.3),
    ("full", "any"): AutoChoice("dc_merge", sets=7, gain=3.6, worst=-0.4),
    ("gentle", "any"): AutoChoice("dc_merge", sets=4, gain=8.4, worst=2.6),
    ("adapters", "any"): AutoChoice("ct_merging", sets=4, gain=10.8, worst=2.4),
    ("mixed", "any"): AutoChoice("average", sets=10, gain=0.0, worst=0.0),
}


ON_ADAPTERS: Mapping[ModelForm, AutoChoice] = {
    "gentle": AutoChoice("actmat", sets=4, gain=6.8, worst=-4.0),
    "adapters": AutoChoice("actmat", sets=4, gain=-8.8, worst=-17.9),
    "unknown": AutoChoice("actmat", sets=6, gain=-7.3, worst=-33.4),
    "other": AutoChoice("actmat", sets=5, gain=-26.4, worst=-55.0),
}
"""Measurements of the paper's method on adapters, noted on a merge by it."""

SOLVING = ("actmat", "actmat_ridge", "wudi", "swudi", "aswudi")
"""Methods that solve for the merge by the deltas' own Gram matrices."""
ORTHOGONAL = ("tsv", "dc_merge", "ct_merging")
"""Methods that make the experts' directions orthogonal to each other."""
APART, SHARED = 0.5, 0.9
"""Overlap from which adapters share the start of `A`, and below which they do not; measured: 0.99, and 0.10 to 0.16."""
SHARED_START = (
    "points over the average in four sets of 2 encoders: actmat -55.4 to -6.8, tsv -10.2 to +5.2, "
    "ct_merging -8.5 to +5.0, dc_merge -4.7 to +5.7"
)
"""Measurement of adapters that share it: see docs/regimes.md."""
DIFFERENT_MODULES = "points over the average in the one set measured: ct_merging -9.3, dc_merge +0.7"
"""Measurement of adapters that do not all change the same modules: see docs/choosing.md."""


def choice_for(form: ModelForm, kind: ModelKind) -> AutoChoice:
    """The row of the table: that of the kind of model, of all kinds, or of all forms."""
    return TABLE.get((form, kind)) or TABLE.get((form, "any")) or TABLE["mixed", "any"]


def with_method(located: Located) -> Recipe:
    """The recipe with a named method in place of `auto`, and the reason in its notes, with the measurements.

    Args:
        located: recipe and inputs; options without a method are refused, see `check_options`.
    """
    recipe = located.recipe
    if recipe.method != AUTO:
        is_measured = recipe.method in (*SOLVING, *ORTHOGONAL) and located.only_adapters
        return _with_measurements(located) if is_measured else recipe
    method, space, options, reason = _chosen(located)
    notes = (*recipe.notes, f"auto: {reason}") if recipe.experts else recipe.notes
    return recipe.model_copy(update={"method": method, "options": options, "space": space, "notes": notes})


def _with_measurements(located: Located) -> Recipe:
    """The recipe of a method that solves or orthogonalizes, on adapters, with measurements among the notes."""
    recipe = located.recipe
    form, size, apart = _by_size(located)
    note = f"{recipe.method} on adapters{size}{apart}"
    if recipe.method == "actmat":
        better, beyond = choice_for(form, "any"), _beyond(located, _kind(located.config))
        note += f": {ON_ADAPTERS[form]}; auto would choose {better.method}: {better.gain:+.1f}{beyond}"
    is_known = note in recipe.notes or len(located.experts) == 1 or (recipe.method != "actmat" and not apart)
    return recipe if is_known else recipe.model_copy(update={"notes": (*recipe.notes, note)})


def _chosen(located: Located) -> tuple[str, Space, dict[str, Any], str]:
    """Method, space, options and reason."""
    recipe = located.recipe
    form, space = _form(located), recipe.space
    if len(located.experts) == 1:
        why = "one expert: task_arithmetic with scaling=1, which adds its delta, times its weight"
        return "task_arithmetic", space, dict(WHOLE), why
    if form == "full" and not recipe.base:
        return "average", space, {}, "checkpoints without a base: average, which needs none"
    if any(e.statistics for e in recipe.experts):
        return "regmean", space, {}, "statistics of the experts' inputs: regmean, which uses them"
    if form == "mixed" and any(leaf != 1.0 for e in recipe.experts for leaf in leaves(e.weight)):
        return "linear", space, {}, "checkpoints and adapters with weights: linear, the weighted mean"
    if form != "full" and any("weight" in e.model_fields_set for e in recipe.experts):
        why = "adapters with weights: task_arithmetic with scaling=1, the sum of w_t D_t, as stacks of LoRA add"
        return "task_arithmetic", space, dict(WHOLE), f"{why} (-m average: the mean)"
    if located.only_adapters and all(isinstance(e, Adapter) and e.layout in IN_ONE_FILE for e in located.experts):
        why = "LoRA files of an image model: task_arithmetic with scaling=1, their sum at strength 1, as image tools do"
        return "task_arithmetic", space, dict(WHOLE), f"{why} (-w for other strengths)"
    kind, size, apart = _kind(located.config) if form != "mixed" else "any", "", ""
    if form == "adapters":
        form, size, apart = _by_size(located)
    choice = choice_for(form, kind)
    what = {"full": "checkpoints", "mixed": "checkpoints and adapters"}.get(form, "adapters")
    of = f" of {'an' if kind == 'encoder' else 'a'} {kind}" if kind != "any" else ""
    beyond = _beyond(located, kind) if form != "mixed" else ""
    reason = f"{choice.method}, for {what}{of}{size}{apart} ({choice}{beyond})"  # of image models tune cannot choose
    writes = kind == "decoder" and located.base is not None and located.only_adapters
    hint = "try: --data self, prompts that experts write" if writes else "actmat tune chooses by unlabeled inputs"
    return choice.method, space, {}, reason + f"; {hint}" * (kind != "any")


def _by_size(located: Located) -> tuple[ModelForm, str, str]:
    """The form of adapters with factors; their size in words, and what else sets them apart, empty if nothing does."""
    size, overlap = size_and_overlap(located) or (None, 0.0)
    shared, measured = ("the start", SHARED_START) if overlap >= SHARED else ("a part", "not measured")
    apart = f"; they share {shared} of A (overlap {overlap:.2f}; {measured})" if overlap >= APART else ""
    apart += f"; they change different modules ({DIFFERENT_MODULES})" if modules_differ(located) else ""
    if size is None:
        return "other" if apart else "unknown", " of unknown size", apart
    words = f" that change the weights by {100 * size:.2g} %" + ", more than any measured ones" * (size > HOTTEST)
    form: ModelForm = "gentle" if size < GENTLE else "other" if apart or size >= HOT else "adapters"
    return form, words, apart


def _beyond(located: Located, kind: ModelKind) -> str:
    """The part of the inputs' description that no measured set has, for notes."""
    if kind == "any":
        return "; not measured for diffusion models or other kinds"
    if any("experts" in field for field in located.config):
        return "; not measured for mixtures of experts"
    if located.base is None:
        return "; measured on models of up to half a billion parameters"
    weights = sum(math.prod(spec.shape) for spec in stored_of(located.base).specs.values())
    if weights > (LARGEST_OF_ADAPTERS if located.only_adapters else LARGEST)[kind]:
        return "; no model of this size is among them"
    return f"; none of them merges {len(located.experts)} experts" if len(located.experts) > MOST else ""


def _form(located: Located) -> ModelForm:
    """The form of the experts; adapters for which the recipe names a space are not merged as they are."""
    if not located.only_adapters:
        return "mixed" if any(isinstance(e, Adapter) for e in located.experts) else "full"
    return "adapters" if located.have_factors and located.recipe.space == "full" else "changes"


def _kind(config: Mapping[str, Any]) -> ModelKind:
    """The kind of model that the config of a model or of an adapter describes.

    >>> _kind({"architectures": ["LlamaForCausalLM"]}), _kind({"architectures": ["BertModel"]}), _kind({})
    ('decoder', 'encoder', 'any')
    """
    names = config.get("architectures")
    if config.get("is_encoder_decoder") or not isinstance(names, list) or not names:
        return "decoder" if config.get("task_type") == "CAUSAL_LM" else "any"
    return "decoder" if str(names[0]).endswith(DECODERS) else "encoder"


def check_options(recipe: Recipe) -> None:
    """Refuse options without a named method: the known options depend on it.

    Raises:
        RecipeError: there are options; lists them.
    """
    if recipe.method != AUTO:
        return
    owners = [("", recipe.options), *((f" of expert '{e.label}'", e.options) for e in recipe.experts)]
    owners += [(f" of rules.{i}", r.options) for i, r in enumerate(recipe.rules) if r.method is None]
    if listed := [", ".join(options) + owner for owner, options in owners if options]:
        raise RecipeError(
            f"Options belong to a method, but none is named (auto): found {'; '.join(listed)}. Fix: name the method "
            "that they are meant for (--method NAME, 'method' in a recipe; leave -m out for mergekit's), or drop them"
        )
