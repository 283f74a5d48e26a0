"""The recipe: everything that decides what the merged model is, strict and frozen.

Settings of a run (threads, memory, overwriting) are in `actmat.settings`: they must not change the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from actmat.checkpoints.layer_names import stack_parts
from actmat.errors import RecipeError, did_you_mean
from actmat.flag import Flag
from actmat.recipe.aliases import with_real_method
from actmat.recipe.experts import ExpertRef, OptionValues
from actmat.recipe.output import (
    KINDS,
    TO,
    AdapterOutput,
    AnyOutput,
    ExtractedOutput,
    ModelOutput,
    from_text,
)
from actmat.recipe.text import UnreadableError, parse_yaml
from actmat.recipe.values import (
    Patterns,
    Strict,
    Value,
    Weight,
    WeightOrNone,
    listed,
)
from actmat.recipe.vocabulary import Vocabulary

TO_HELP = (
    "Kind of output: model, adapter, peft, kohya, diffusers or comfy; default: adapter, of adapters without a base."
)
Scope = Literal["linear", "paper", "all"]
OutputDtype = Literal["float64", "float32", "bfloat16", "float16"]


class Rule(Strict):
    """Choices for the tensors that match; the first rule that matches a tensor decides."""

    match: Patterns = Field(description="patterns on tensor names: globs (* crosses dots, {a,b}), or re:REGEX")
    method: str | None = Field(default=None, description="merge method of these tensors; default: the recipe's")
    options: OptionValues = Field(default_factory=dict, description="options of that method")
    scale: WeightOrNone = Field(default=None, description="factor of the merged delta; default: the recipe's")
    keep: Literal[False] | Literal["base"] = Field(default=False, description="'base': copy the base's tensor")
    optional: bool = Field(default=False, description="true: its patterns may match no tensor, otherwise an error")

    @model_validator(mode="before")
    @classmethod
    def _real_method(cls, value: Any) -> Any:
        return with_real_method(value)

    @model_validator(mode="after")
    def _one_thing(self) -> Rule:
        if self.keep and (self.method or self.options or self.scale is not None):
            raise ValueError("a rule either keeps the base's tensor or merges it: drop 'keep', or the other fields")
        return self


RoleName = Literal[
    "linear", "fused_linear", "stacked_experts", "router", "convolution", "embedding", "vector", "buffer"
]
"""Roles that a recipe may give a tensor; see `layout.types.Role`."""


class RoleRule(Strict):
    """Meaning of the tensors that match, in place of what names, shapes and config.json suggest."""

    match: str = Field(description="pattern on tensor names, as in `rules`")
    role: RoleName | None = Field(default=None, description="role of the tensor; default: as recognized")
    orientation: Literal["OI", "IO"] | None = Field(
        default=None, description="OI as nn.Linear, IO transposed, as Conv1D"
    )
    blocks: dict[str, tuple[int, int]] = Field(
        default_factory=dict, description="name -> [start, stop] rows of a packed tensor, along its output axis"
    )


class PostRef(Strict):
    """One step of post-processing: its name and options; as text, `isotropize` or `isotropize:mean=rank`."""

    name: str = Field(description="name of the step, see docs/post")
    options: OptionValues = Field(default_factory=dict, description="options of that step")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, colon, rest = value.partition(":")
        options: dict[str, Any] = {}
        for text in rest.split(",") if colon else ():
            option, equals, setting = text.partition("=")
            if not equals or not option.strip() or not setting.strip():
                raise ValueError(f"found '{value[:200]}', expected NAME or NAME:OPTION=VALUE,OPTION=VALUE")
            try:
                options[option.strip()] = parse_yaml(setting)[1]
            except UnreadableError as error:
                raise ValueError(
                    f"found '{setting[:200]}' as the value of '{option.strip()}': {error.problem}"
                ) from None
        return {"name": name.strip(), "options": options}


class Recipe(Strict):
    """One merge, completely. A field annotated with a `Flag` is a flag of commands; `--set` takes the others."""

    base: Annotated[
        str,
        Flag(("--base", "-b"), "Base of all experts: folder, file, hub id or URL; adapters need none."),
    ] = Field(
        default="",
        description="the checkpoint that all experts were fine-tuned from: folder, file, hub id or URL; not "
        "needed for adapters, averages and interpolations",
    )
    experts: Annotated[
        tuple[ExpertRef, ...],
        Flag(("--expert", "-e"), "A fine-tuned checkpoint; once per expert. NAME=PATH gives it a name."),
    ] = Field(default=(), description="fine-tuned checkpoints: paths or mappings; none: copy a stack of layers")
    method: Annotated[
        str,
        Flag(
            ("--method", "-m"),
            "Merge method, see 'actmat methods'; merge and plan take several; default: by a table of measurements.",
            repeated=True,
        ),
    ] = Field(default="auto", description="merge method, see `actmat methods`; auto: by a table of measurements")
    options: Annotated[
        OptionValues,
        Flag(("--option", "-o"), "Option of the method, name=value; merge and plan try each value of name=a,b."),
    ] = Field(default_factory=dict, description="options of the merge method")
    normalize: bool = Field(
        default=False,
        description="divide the experts' weights by their sum, for each tensor, unless the sum is 0",
    )
    scale: Annotated[Weight, Flag(help="Factor of the merged delta, W* = W_0 + scale * D*.", type=float)] = Field(
        default=1.0,
        description="factor of the merged delta where the method merges, W* = W_0 + scale * D*: a number, a "
        "gradient over depth, or entries by pattern",
    )
    scope: Scope = Field(
        default="linear",
        description="tensors that the method merges: linear layers (linear), the paper's 2-D rule (paper), or all "
        "that it can (all); the others are averaged, or added up by a method that adds",
    )
    rules: tuple[Rule, ...] = Field(default=(), description="exceptions by pattern; the first match decides")
    roles: tuple[RoleRule, ...] = Field(default=(), description="roles by pattern; the first match decides")
    keep: Annotated[Patterns, Flag(help="Pattern of tensors to copy from the base.")] = Field(
        default=(), description="patterns of tensors to copy from the base, such as '*lm_head*'"
    )
    drop: Annotated[Patterns, Flag(help="Pattern of experts' tensors to leave out.")] = Field(
        default=(), description="patterns of tensors of experts that are not merged, such as 'lora_te2_*'"
    )
    ties: bool = Field(
        default=True, description="merge tensors that config.json ties as one; otherwise each separately"
    )
    space: Literal["full", "core", "factors", "pico"] = Field(
        default="full",
        description="space in which adapters are merged: their deltas (full), the core space of their factors "
        "(core), A and B separately (factors), or deltas with shared output directions damped (pico)",
    )
    post: Annotated[
        tuple[PostRef, ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str | Mapping) else value),
    ] = Field(
        default=(),
        description="post-processing of every merged matrix, in the given order: subspace_boosting, "
        "isotropize, mean_norm",
    )
    dtype: Annotated[OutputDtype | None, Flag()] = Field(
        default=None,
        description="dtype of the output: float64, float32, bfloat16 or float16; default: the base's, per tensor",
    )
    compute_dtype: Literal["float32", "float64"] = Field(
        default="float32", description="dtype of deltas and methods: float32 or float64"
    )
    seed: int = Field(default=0, description="seed of random methods, combined with each tensor's name")
    max_shard_size: Annotated[str, Field(coerce_numbers_to_str=True)] = Field(
        default="5GB", description="largest size of a weight file, such as 500MB (powers of ten), or bytes"
    )
    output: Annotated[AnyOutput | None, BeforeValidator(from_text), Flag(("--to",), TO_HELP, str)] = Field(
        default=None,
        description="kind of output: model, adapter (in the experts' layout), peft, kohya, diffusers or comfy; "
        "default: adapter if all experts are adapters and no base is given",
    )
    mute: Annotated[tuple[Annotated[str, Field(pattern=r"^AM\d{3}$")], ...], BeforeValidator(listed)] = Field(
        default=(), description="codes of checks to silence, such as AM402; see `actmat diagnose`"
    )
    out: Annotated[
        str | None, BeforeValidator(lambda out: os.path.expanduser(out) if isinstance(out, str) else out), Flag()
    ] = Field(default=None, description="folder or URL of the output; in a recipe file, relative to its folder")

    measured_from: str | None = Field(
        default=None, description="expert that is the base, where the result depends on none; set where none is given"
    )
    notes: tuple[str, ...] = Field(default=(), description="remarks that plans and summaries repeat")
    warnings: tuple[str, ...] = Field(default=(), description="remarks on likely mistakes, which are shown first")
    executor: str | None = Field(
        default=None,
        exclude=True,  # not in plans, manifests and fingerprints: it decides nothing about the result
        description="executor if the run names none: threads, ray or ray=ADDRESS, see docs/cluster.md",
    )

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        fields = with_real_method(value)
        is_model = isinstance(fields, Mapping) and fields.get("base") and fields.get("output") is None
        return {**fields, "output": {"kind": "model"}} if is_model else fields

    @model_serializer(mode="wrap")
    def _with_kind(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Plain data in which an output names its kind; without the output of a recipe with a base by default."""
        data: dict[str, Any] = plain(self)
        if "output" in data and self.output is not None:
            data["output"] = {"kind": self.output.kind, **data["output"]}
        if self.base and self.output == ModelOutput():
            data.pop("output", None)
        return data

    @model_validator(mode="after")
    def _distinct_names(self) -> Recipe:
        if not self.experts and not stack_parts(self.base):
            raise ValueError(
                "experts: this field is required, except where the base is a stack of layers, which is copied"
            )
        labels = [e.label for e in self.experts]
        twice = sorted({n for n in labels if labels.count(n) > 1})
        if twice:
            raise ValueError(
                f"experts need distinct names; {', '.join(twice)} occurs more than once: set 'name', -e NAME=PATH"
            )
        files, vocabulary = self.model.files_from, self.model.vocabulary
        source = vocabulary and vocabulary.source
        for field, name, others in (
            ("files_from", files, ("base",)),
            ("config_from", self.model.config_from, ("base",)),
            ("measured_from", self.measured_from, ()),
            ("vocabulary", source, ("base", "union")),
        ):
            if name is not None and name not in (*others, *labels):
                raise ValueError(f"{field} names '{name}'; it must be one of {[*others, *labels]}")
        if vocabulary is not None and files not in (None, "base", source):
            raise ValueError(f"vocabulary: the tokenizer is that of '{source}': drop 'files_from: {files}'")
        return self

    @property
    def model(self) -> ModelOutput:
        """Settings of a full model; the defaults for another kind of output."""
        return self.output if isinstance(self.output, ModelOutput) else ModelOutput()

    @property
    def adapter(self) -> AdapterOutput:
        """Settings of a merged adapter; the defaults for another kind of output."""
        return self.output if isinstance(self.output, AdapterOutput) else AdapterOutput()

    @property
    def extracted(self) -> ExtractedOutput:
        """Settings of an extracted adapter; the defaults for another kind of output."""
        return self.output if isinstance(self.output, ExtractedOutput) else ExtractedOutput()

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the experts, in order."""
        return tuple(e.label for e in self.experts)

    @property
    def weights(self) -> tuple[Value, ...]:
        """Weights of the experts, in order; see `recipe.values`."""
        return tuple(e.weight for e in self.experts)


def add_statistics(
    experts: Sequence[Mapping[str, Any]], places: Mapping[str, Any] | Sequence[str], field: str = "statistics"
) -> list[dict[str, Any]]:
    """Add statistics, or another field, to experts, by their names, or one for each in their order; plain data.

    >>> add_statistics([{"path": "math"}, {"path": "code"}], {"code": "stats/code"})
    [{'path': 'math'}, {'path': 'code', 'statistics': 'stats/code'}]

    Raises:
        RecipeError: a name that no expert has, or another number than there are experts.
    """
    labels = [ExpertRef.model_validate(e).label for e in experts]
    if not isinstance(places, Mapping):
        if len(places) != len(labels):
            raise RecipeError(f"{len(labels)} experts, but {len(places)} {field}: give one each, or by name.")
        places = dict(zip(labels, places, strict=True))
    if unknown := [n for n in places if n not in labels]:
        hint = did_you_mean(unknown[0], labels)
        raise RecipeError(f"{field.capitalize()} are given for '{unknown[0]}', but no expert has this name.{hint} "
                          f"Experts: {', '.join(labels)}")  # fmt: skip
    return [{**e, field: str(places[n])} if n in places else dict(e) for e, n in zip(experts, labels, strict=True)]


def make_recipe(fields: Mapping[str, Any], *, where: Mapping[str, str] | None = None) -> Recipe:
    """Validate `fields` into a `Recipe`.

    >>> recipe = make_recipe({"base": "base", "experts": ["math", "org/code"], "options": {"rtol": 1e-6}})
    >>> recipe.labels, recipe.options, recipe.scope
    (('math', 'code'), {'rtol': 1e-06}, 'linear')

    Args:
        fields: the recipe as plain data.
        where: dotted field path -> "file:line", for messages about a file.

    Raises:
        RecipeError: every problem, with its place and the most similar name of a misspelled field.
    """
    try:
        return Recipe.model_validate(dict(fields))
    except ValidationError as error:
        problems = [_problem(e["loc"], _with_value(e), e["type"], where or {}) for e in error.errors()]
        raise RecipeError("The recipe is not valid.", dict.fromkeys(problems)) from None


_MODELS: dict[str, type[BaseModel]] = {
    "experts": ExpertRef,
    "rules": Rule,
    "roles": RoleRule,
    "post": PostRef,
}


_OF_VALUES = ("literal_error", "less_than_equal", "greater_than", "greater_than_equal")
"""Kinds of pydantic's errors that are shown with the value."""
_QUOTED = re.compile(r"'([^']*)'")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
"""Other names of dtypes -> ours."""


def _with_value(error: Mapping[str, Any]) -> str:
    """The message of an error, with the value if it is not one of the choices, or beyond a bound."""
    if error["type"] not in _OF_VALUES or not isinstance(error["input"], str | int | float | bool):
        return str(error["msg"])
    value = str(error["input"])[:200]
    near = f" Did you mean '{_DTYPES[value]}'?" if value in _DTYPES and error["loc"][-1:] == ("dtype",) else ""
    return f"{error['msg']}; found {value!r}.{near or did_you_mean(value, _QUOTED.findall(error['msg']))}"


def _problem(loc: Sequence[int | str], message: str, kind: str, where: Mapping[str, str]) -> str:
    of_output = KINDS.get(str(loc[1])) if len(loc) > 1 and loc[0] == "output" else None
    if of_output is not None:  # pydantic puts the kind into the path; flags give only the field
        written = (loc[0], *loc[2:]) if f"{loc[0]}.{loc[-1]}" in where else loc[2:]
        owners = " or ".join(_named(kind) for kind, model in KINDS.items() if str(loc[-1]) in model.model_fields)
        if kind == "extra_forbidden" and len(loc) == 3 and owners:
            message = f"goes with {owners}, but the output is {_named(str(loc[1]))}: leave one of them out"
            kind = "other_kind"
        loc = written
    path = ".".join(str(p) for p in loc)
    place = next((where[p] for n in range(len(loc), 0, -1) if (p := ".".join(map(str, loc[:n]))) in where), "")
    if kind == "extra_forbidden":
        nested = Vocabulary if of_output is not None and "vocabulary" in loc[:-1] else of_output
        model: type[BaseModel] = nested or (_MODELS.get(str(loc[0]), Recipe) if len(loc) > 1 else Recipe)
        known = list(model.model_fields)
        owner = next((k for k, m in KINDS.items() if loc[-1] in m.model_fields), "") if len(loc) == 1 else ""
        hint = f" Write output: {{kind: {owner}, {loc[-1]}: ...}}." if owner else did_you_mean(str(loc[-1]), known)
        message = f"there is no field '{loc[-1]}'.{hint} Fields: {', '.join(known)}"
    elif kind == "union_tag_invalid":
        unknown, kinds = next(iter(_QUOTED.findall(message)), ""), (*KINDS, *TO)
        message = f"found '{unknown}', expected {', '.join(kinds)} (--to).{did_you_mean(unknown, kinds)}"
    elif kind == "union_tag_not_found":
        message = f"name its kind: {', '.join(KINDS)}"
    elif kind == "missing":
        message = "this field is required"
    message = message.removeprefix("Value error, ")
    text = f"{path}: {message}" if path else message
    return f"{place}: {text}" if place else text


def _named(kind: str) -> str:
    """The kind in words, with the flags that select it."""
    return {
        "model": "a model (--to model)",
        "adapter": "an adapter (--to adapter)",
        "extracted": "an extracted adapter (--to adapter, with a base)",
    }[kind]
