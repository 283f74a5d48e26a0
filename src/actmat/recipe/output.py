"""The output of a recipe: a full model, a merged adapter, or an extracted one, each with fields of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from actmat.flag import Flag
from actmat.recipe.values import Strict
from actmat.recipe.vocabulary import Vocabulary


class ModelOutput(Strict):
    """A full model, merged into the base."""

    kind: Literal["model"] = "model"
    vocabulary: Vocabulary | None = Field(
        default=None,
        description="tokens of the merged model: those of the 'base', the 'union' of base and experts, or those "
        "of an expert (its name); default: tables of one shape, merged row by row",
    )
    files_from: str | None = Field(
        default=None,
        description="source of tokenizer and settings such as generation_config.json: 'base' or an expert's name; "
        "default: the experts' where they agree, else the base's",
    )
    config_from: str | None = Field(
        default=None,
        description="whose entries of config.json are written where inputs differ in what the model computes: 'base' "
        "or an expert's name; default: such inputs are refused",
    )
    chat_template: str | None = Field(
        default=None,
        description="Jinja text of the chat template, or 'auto' for the most frequent one of the inputs; default: that "
        "of the tokenizer's files",
    )

    @property
    def files_of(self) -> str:
        """Source of the tokenizer's files: `files_from`, or the expert whose vocabulary is taken."""
        source = self.vocabulary.source if self.vocabulary is not None else "base"
        return source if source not in ("base", "union") else self.files_from or "base"

    @property
    def names_files(self) -> bool:
        """True if the recipe says whose files are written."""
        return self.files_from is not None or self.files_of != "base"


class _Ranked(Strict):
    """Ranks of an adapter."""

    rank: Annotated[Annotated[int, Field(gt=0)] | None, Flag()] = Field(
        default=None, description="rank of the adapter, truncated optimally; default: the exact rank"
    )
    ranks: Literal["uniform", "pattern"] = Field(
        default="uniform",
        description="ranks if no rank is given: one for all modules, filled with zeros ('uniform'), or one per "
        "module ('pattern')",
    )


class AdapterOutput(_Ranked):
    """An adapter that is merged from adapters."""

    kind: Literal["adapter"] = "adapter"
    layout: Literal["same", "peft", "kohya", "diffusers", "comfy"] = Field(
        default="same", description="names of its tensors: as the experts', or as in peft, kohya, diffusers or comfy"
    )
    any_base: bool = Field(default=False, description="merge adapters that name different bases")


class ExtractedOutput(_Ranked):
    """An adapter for PEFT that is extracted from a merge into the base."""

    kind: Literal["extracted"] = "extracted"
    others: Literal["save", "leave"] = Field(
        default="save",
        description="changed tensors that an extracted adapter's factors cannot hold (norms, tables): 'save' them "
        "whole, or 'leave' them out",
    )


AnyOutput: TypeAlias = Annotated[ModelOutput | AdapterOutput | ExtractedOutput, Field(discriminator="kind")]
"""The kind of output, resolved against the experts when the inputs are opened."""

KINDS: Mapping[str, type[Strict]] = {"model": ModelOutput, "adapter": AdapterOutput, "extracted": ExtractedOutput}

TO: Mapping[str, Mapping[str, str]] = {
    "peft": {"kind": "adapter", "layout": "peft"},
    "kohya": {"kind": "adapter", "layout": "kohya"},
    "diffusers": {"kind": "adapter", "layout": "diffusers"},
    "comfy": {"kind": "adapter", "layout": "comfy"},
}
"""Short names of an output, as in `--to peft` -> its fields; any other name is a kind."""

OF_OUTPUTS = tuple(dict.fromkeys(n for k in KINDS.values() for n in k.model_fields if n not in ("kind", "layout")))
"""Fields of outputs that are flags, and parameters of functions, of their own."""


def from_text(output: Any) -> Any:
    """Fields of an output that is given in one word; anything else unchanged.

    >>> from_text("peft"), from_text("model")
    ({'kind': 'adapter', 'layout': 'peft'}, {'kind': 'model'})
    """
    return dict(TO.get(output, {"kind": output})) if isinstance(output, str) else output


def with_output(fields: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe with those of flags or parameters, of which `to` and those of an output go into `output`.

    >>> with_output({}, {"to": "peft", "rank": 8})
    {'output': {'kind': 'adapter', 'layout': 'peft', 'rank': 8}}
    >>> with_output({"base": "base"}, {"to": "adapter", "others": "leave"})["output"]
    {'kind': 'extracted', 'others': 'leave'}
    """
    of_output = {name: arguments[name] for name in OF_OUTPUTS if arguments.get(name) is not None}
    recipe = {**fields, **{name: value for name, value in arguments.items() if name not in (*OF_OUTPUTS, "to")}}
    output = from_text(recipe.get("output"))
    if isinstance(output, ModelOutput | AdapterOutput | ExtractedOutput):
        output = {"kind": output.kind, **output.model_dump(exclude_defaults=True)}
    if not (of_output or arguments.get("to")) or not (output is None or isinstance(output, Mapping)):
        return recipe  # the schema says what it expects
    merged = {**(output or {}), **of_output}
    if arguments.get("to"):
        settings = {name: value for name, value in merged.items() if name not in ("kind", "layout")}
        merged = {**from_text(arguments["to"]), **settings}
    kind = merged.pop("kind", None) or _kind(merged, has_base=bool(recipe.get("base")))
    if kind == "adapter" and merged.get("layout", "peft") in ("same", "peft") and "others" in merged:
        kind = "extracted"
        merged.pop("layout", None)
    return {**recipe, "output": {"kind": kind, **merged}}


def _kind(fields: Mapping[str, Any], *, has_base: bool) -> str:
    """Default kind of an output: a model if there is a base, else the kind that has these fields."""
    if has_base:
        return "model"
    owners = [kind for kind, model in KINDS.items() if fields.keys() & model.model_fields.keys()]
    return owners[0] if len(owners) == 1 else "adapter"
