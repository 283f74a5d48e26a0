"""Flags that several commands share, and how flags become recipes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.errors import RecipeError

if TYPE_CHECKING:
    from actmat.recipe import Recipe

MODEL_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""In which a model can run."""

RecipeFile = Annotated[
    Path | None, typer.Argument(metavar="[RECIPE.yaml]", help="A recipe file; flags given beside it win.")
]
Base = Annotated[
    str | None, typer.Option("--base", "-b", help="The checkpoint all experts come from: directory, file or hub id.")
]
Experts = Annotated[
    list[str] | None,
    typer.Option("--expert", "-e", help="A fine-tuned checkpoint; once per expert. NAME=PATH gives it a name."),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method", "-m", help="Merge rule, see 'actmat methods' (default: actmat); several give an output each."
    ),
]
Method = Annotated[
    str | None, typer.Option("--method", "-m", help="Merge rule, see 'actmat methods' (default: actmat).")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="name=value of the rule; name=a,b tries each, with one output each."),
]
Weights = Annotated[
    list[float] | None, typer.Option("--weight", "-w", help="Weight of an expert, once per expert, in their order.")
]
Statistics = Annotated[
    list[str] | None,
    typer.Option("--statistics", help="NAME=PATH: what 'actmat statistics collect' wrote for expert NAME."),
]
_DATA = "Data and the models that run on it"
ModelClass = Annotated[
    str | None,
    typer.Option(
        "--model-class", help="Class of transformers to load it with (default: the config's).", rich_help_panel=_DATA
    ),
]
Split = Annotated[
    str, typer.Option("--split", help="Split of a data set on the hub or of a folder.", rich_help_panel=_DATA)
]
Subset = Annotated[
    str | None, typer.Option("--subset", help="Configuration of a data set on the hub.", rich_help_panel=_DATA)
]
TextColumn = Annotated[
    str | None, typer.Option("--text-column", help="Column of texts (default: found).", rich_help_panel=_DATA)
]
ImageColumn = Annotated[
    str | None, typer.Option("--image-column", help="Column of images (default: found).", rich_help_panel=_DATA)
]
TargetColumn = Annotated[
    str | None,
    typer.Option("--target-column", help="What the decoder of an encoder-decoder model reads.", rich_help_panel=_DATA),
]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Samples in one forward pass.", rich_help_panel=_DATA)]
MaxLength = Annotated[int, typer.Option("--max-length", help="Tokens of one text at most.", rich_help_panel=_DATA)]
ModelDtype = Annotated[str, typer.Option("--dtype", help="dtype of the model while it runs.", rich_help_panel=_DATA)]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="File, folder or hub id of unlabelled inputs: compare the answers of MERGED with its experts'. NAME=DATA "
        "gives an expert its own; once per expert.",
        rich_help_panel=_DATA,
    ),
]
Samples = Annotated[
    int, typer.Option("--samples", help="How many samples per expert at most.", min=1, rich_help_panel=_DATA)
]
Scale = Annotated[float | None, typer.Option("--scale", help="Factor of the merged delta (default: 1.0).")]
Scope = Annotated[
    str | None,
    typer.Option(
        "--scope",
        help="What the rule acts on: linear (linear-like tensors), paper (the paper's 2-D rule), all "
        "(everything it can); the rest is averaged (default: linear).",
    ),
]
Keep = Annotated[
    list[str] | None, typer.Option("--keep", help="Pattern of tensors to copy from the base, such as '*lm_head*'.")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Output dtype: float32, bfloat16, float16 (default: the base's).")
]
ComputeDtype = Annotated[str | None, typer.Option("--compute-dtype", help="float32 or float64 (default: float32).")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of random rules (default: 0).")]
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Treat NaN and Inf in an expert as 'unchanged' instead of stopping.")
]
FilesFrom = Annotated[
    str | None,
    typer.Option("--files-from", help="Expert whose tokenizer files to copy (default: base)."),
]
Ties = Annotated[
    bool, typer.Option("--ties/--no-ties", help="Merge tensors that config.json ties once, or each by itself.")
]
MaxShardSize = Annotated[str | None, typer.Option("--max-shard-size", help="Largest output file (default: 5GB).")]
Device = Annotated[str, typer.Option("--device", help="Where matrix rules compute: cpu, cuda, cuda:N or mps.")]
To = Annotated[
    str | None,
    typer.Option("--to", help="Write an adapter or a model (default: adapter if all experts are and no --base)."),
]
Rank = Annotated[int | None, typer.Option("--rank", help="Rank of the merged adapter, cut optimally (default: exact).")]
Ranks = Annotated[
    str | None, typer.Option("--ranks", help="uniform, or pattern: each module its own rank (default: uniform).")
]
MaxMemory = Annotated[
    str | None, typer.Option("--max-memory", help="Limit of memory, such as 4GB (default: what is free).")
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Tensors at work at once; same bytes for any (default: all cores).")
]
Mute = Annotated[list[str] | None, typer.Option("--mute", help="Code of a check that shall not count, such as AM103.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if a check of severity 'issue' found something.")]
Exact = Annotated[bool, typer.Option("--exact", help="Measure without random probes: no sampling error, slower.")]
AnyBase = Annotated[bool, typer.Option("--any-base", help="Merge adapters although they name different bases.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def build_recipes(
    recipe: Path | None,
    *,
    base: str | None,
    experts: Sequence[str] | None,
    methods: Sequence[str] | None,
    options: Sequence[str] | None,
    weights: Sequence[float] | None,
    out: Path | None,
    fields: Mapping[str, Any],
    statistics: Sequence[str] | None = None,
) -> list[Recipe]:
    """One recipe, or one for each combination of methods and listed option values, each with its own `out`.

    Raises:
        RecipeError: the flags or the file do not make a recipe.
    """
    from actmat.recipe import load_recipe, make_recipe

    overrides: dict[str, Any] = {k: v for k, v in fields.items() if v is not None}
    if base is not None:
        overrides["base"] = base
    if experts:
        overrides["experts"] = _experts(experts, weights)
    elif weights:
        raise RecipeError("--weight goes with --expert, one each; in a recipe file each expert has its 'weight'.")
    if out is not None:
        overrides["out"] = str(out)
    if methods and len(methods) == 1:
        overrides["method"] = methods[0]
    if recipe is None:
        lone = bool(experts) and not base and overrides.get("to") != "model" and _all_adapters(overrides["experts"])
        missing = [f for f, given in (("--base", base or lone), ("--expert", experts)) if not given]
        if missing:
            raise typer.BadParameter(f"give {' and '.join(missing)}, or a recipe file (actmat merge RECIPE.yaml)")
        first = make_recipe(overrides)
    else:
        first = load_recipe(recipe, overrides)
    if statistics:
        first = _with_statistics(first, statistics)
    return _variants(first, list(methods or [first.method]), options or ())


def _with_statistics(recipe: Recipe, given: Sequence[str]) -> Recipe:
    """The recipe with statistics for its experts: NAME=PATH, or paths alone, one per expert in their order."""
    from actmat.recipe import ExpertRef, add_statistics

    experts = add_statistics([e.model_dump() for e in recipe.experts], statistics_of(given))
    return recipe.model_copy(update={"experts": tuple(ExpertRef.model_validate(e) for e in experts)})


def statistics_of(given: Sequence[str]) -> dict[str, str] | list[str]:
    """NAME=PATH as a mapping, or paths alone as they are.

    Raises:
        RecipeError: a name is given twice.
    """
    pairs = [text.partition("=") for text in given]
    by_name = all(equals and "/" not in name for name, equals, _ in pairs)
    if by_name and len({name for name, _, _ in pairs}) < len(pairs):
        raise RecipeError("--statistics is given twice for one expert.")
    return {name: path for name, _, path in pairs} if by_name else list(given)


def _all_adapters(experts: Sequence[Mapping[str, Any]]) -> bool:
    """Adapters merge into an adapter without a base."""
    from actmat.experts.resolve import is_adapter

    return all(is_adapter(e["path"]) for e in experts)


def _experts(given: Sequence[str], weights: Sequence[float] | None) -> list[dict[str, Any]]:
    if weights and len(weights) != len(given):
        raise RecipeError(f"There are {len(given)} experts and {len(weights)} weights; give one --weight each.")
    out: list[dict[str, Any]] = []
    for i, text in enumerate(given):
        name, equals, path = text.partition("=")
        named = bool(equals) and not Path(text).exists() and "/" not in name
        entry: dict[str, Any] = {"path": path, "name": name} if named else {"path": text}
        out.append(entry | ({"weight": weights[i]} if weights else {}))
    return out


def _variants(first: Recipe, methods: Sequence[str], texts: Sequence[str]) -> list[Recipe]:
    from actmat.methods import get_method
    from actmat.recipe import parse_option

    choices = dict(parse_option(t) for t in texts)
    twice = len(choices) < len(texts)
    if twice:
        raise RecipeError("An option is given twice; list its values in one --option name=a,b.")
    # a single method may be misspelt: the plan says so, together with everything else that is wrong
    known = {m: get_method(m).options for m in methods} if len(methods) > 1 else {}
    unused = [n for n in choices if known and not any(n in o for o in known.values())]
    if unused:
        raise RecipeError(f"None of the methods has an option '{unused[0]}'.")
    recipes, labels = [], []
    for method in methods:
        # with several methods, an option goes to those that have it; with one, a misspelt option must be refused
        mine = {n: v for n, v in choices.items() if len(methods) == 1 or n in known[method]}
        kept = first.options if method == first.method else {}
        for values in itertools.product(*mine.values()):
            chosen = dict(zip(mine, values, strict=True))
            varied = [f"{n}={v}" for n, v in chosen.items() if len(mine[n]) > 1]
            labels.append(",".join([method, *varied]) if len(methods) > 1 else ",".join(varied))
            recipes.append(first.model_copy(update={"method": method, "options": {**kept, **chosen}}))
    if len(recipes) == 1 or first.out is None:
        return recipes
    return [
        r.model_copy(update={"out": str(Path(first.out) / label)}) for r, label in zip(recipes, labels, strict=True)
    ]
