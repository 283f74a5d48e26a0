"""Flags come from fields: of the recipe's schema, and of dataclasses of settings."""

import dataclasses
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from tests.helpers.merging import actmat
from typer.testing import CliRunner

from actmat.cli.diagnose import OF_OUTPUT, diagnose
from actmat.cli.flags import _NOT_SET, FlagFields, RecipeFlags, with_flags
from actmat.cli.listing import declared_command
from actmat.cli.merge import merge
from actmat.cli.plan import plan
from actmat.errors import RecipeError
from actmat.flag import Flag, Setting
from actmat.recipe import ExpertRef, Recipe
from actmat.recipe.output import KINDS
from actmat.settings import RunSettings

EXPERTS = ["math", "code"]


def flagged(model: Any) -> set[str]:
    return {n for n, f in model.model_fields.items() if any(isinstance(m, Flag) for m in f.metadata)}


def taken(command: Any) -> list[str]:
    return list(inspect.signature(with_flags(command)).parameters)


def run(command: Any, *argv: str) -> Any:
    app = typer.Typer()
    app.command()(with_flags(command))
    return CliRunner().invoke(app, argv)


def recipes(**values: Any) -> list[Recipe]:
    return RecipeFlags({"base": "org/base", "experts": EXPERTS} | values).recipes(None)


# Where flags come from


def test_commands_take_every_flag_of_the_schema_but_those_they_name() -> None:
    fields = flagged(Recipe).union(*map(flagged, (ExpertRef, *KINDS.values()))) - {"output"} | {"to", "blocks"}
    assert fields >= {"base", "experts", "weight", "statistics", "method", "options", "scale", "out"}
    settings = {"device", "max_memory", "threads", "overwrite", "diagnose"}
    own = {"recipe", "json", "quiet", "data", "check", "template", "set"}
    assert set(taken(merge)) == fields | settings | own
    own = {"device", "recipe", "json", "as_recipe", "full", "quiet", "data", "check", "template", "set"}
    assert set(taken(plan)) == fields | own
    flags = {"device", "max_memory", "threads", "recipe", "data", "template", "strict", "out", "json"}
    assert set(taken(diagnose)) == fields - {*OF_OUTPUT, "to", "drop"} | flags | {"full", "quiet", "set"}


@pytest.mark.parametrize(("command", "most"), [("merge", 26), ("tune", 24), ("diagnose", 20), ("try", 20)])
def test_commands_have_few_flags(command: str, most: int) -> None:
    """Counted with --help, and with lines of the text that begin with a flag."""
    lines = actmat([command, "--help-all"]).out.splitlines()
    assert 15 < len([line for line in lines if re.match("│? *(-[a-zA-Z], )?--", line)]) <= most


def test_every_field_of_a_recipe_is_a_flag_or_set() -> None:
    """But for structures; those that a command cannot use it names."""
    flags, settings = taken(merge), vars(with_flags(merge))["settings"]
    fields = {*Recipe.model_fields}.union(*(kind.model_fields for kind in KINDS.values())) - {*_NOT_SET, "output"}
    assert fields | {"to", "stacks", "statistics"} <= {*flags, *settings}
    assert {f.name for f in dataclasses.fields(RunSettings)} - {"held"} <= {*flags, *settings}
    assert not {*flags} & {*settings}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["statistics", "collect", "--split", "x"], "Missing argument 'model'"),
        (["merge", "--normalize", "--out", "x"], "--set takes NAME=VALUE, found 'normalize'"),
        (["merge", "--strict"], "'actmat diagnose MERGED --strict'"),
        (["tune", "--model-dtpe", "bfloat16"], "Did you mean 'model_dtype'? Fields are set with --set NAME=VALUE"),
        (["diagnose", "--set", "dtype=float32"], "--set takes no 'dtype'."),
        (["tune", "--set", "method=ties"], "--set takes no 'method'."),
        (["merge", "mergekit.yml", "outdir"], "(outdir). Name the output with --out OUT"),
        (["merge", "mergekit.yml", "--cuda"], "For GPUs use --device cuda"),
    ],
)
def test_flags_that_are_set_are_pointed_at(flags: list[str], says: str) -> None:
    done = actmat(flags)
    assert done.code in (1, 2)
    assert says in done.words


@pytest.mark.parametrize("flags", ["--vocabulary {}", "--vocabulary={}", "--set vocabulary={}", "--set=vocabulary={}"])
def test_a_field_without_a_flag_is_taken_as_one(flags: str) -> None:
    command = "plan -b base -e expert -m ties -o density=0.5 --as-recipe --max-shard-size 1GB"
    done = actmat([*command.split(), *flags.format("expert").split()], code=0)
    assert "source: expert" in done.out
    assert "max_shard_size: 1GB" in done.out


def test_a_new_field_of_the_recipe_is_a_flag_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Larger(Recipe):
        color: Annotated[Literal["red", "blue"] | None, Flag()] = Field(
            default=None, description="color of `merged` tensors; default: gray"
        )
        depth: Annotated[int, Flag(("--depth", "-d"))] = Field(default=3, description="depth")
        hidden: int = 0

    monkeypatch.setattr("actmat.recipe.Recipe", Larger)
    seen: list[RecipeFlags] = []

    def command(*, given: RecipeFlags) -> None:
        seen.append(given)

    result = run(command, "--color", "red", "-d", "5", "--set", "ties=false")
    assert result.exit_code == 0, result.output
    assert {k: v for k, v in seen[0].values.items() if v is not None} == {
        "color": "red",
        "depth": 5,
        "ties": False,
    }
    text = " ".join(run(command, "--help").output.replace("│", " ").split())
    assert "Color of 'merged' tensors (default: gray)." in text
    assert "Depth (default: 3)." in text
    assert "--hidden" not in text


@dataclass(frozen=True)
class Kitchen:
    """Flags and settings of a toy."""

    heat: Annotated[int, Flag(help="Heat of the stove.")] = 5
    pan: Annotated[str | int | None, Flag(help="Pan; default: the largest.")] = None
    fan: Annotated[bool, Flag(("--fan/--quiet",), help="Run the fan.")] = True
    timer: Annotated[float | None, typer.Option("--timer", help="Minutes.")] = None
    salt: Annotated[int, Setting("Grams of salt; default: some.", low=1, high=9)] = 2
    herbs: Annotated[tuple[str, ...], Setting("Herbs.")] = ()
    gas: Annotated[bool, Setting("Burn gas.")] = True
    hidden: int = 0


def test_a_dataclass_is_its_flags_and_settings_with_its_defaults() -> None:
    seen: list[Kitchen] = []

    def cook(*, kitchen: Annotated[Kitchen, FlagFields(set=("timer",))], dish: str) -> None:
        seen.append(kitchen)

    assert taken(cook) == ["heat", "pan", "fan", "dish", "set"]
    assert vars(with_flags(cook))["settings"] == {
        "timer": "Minutes.",
        "salt": "Grams of salt (default: some).",
        "herbs": "Herbs.",
        "gas": "Burn gas (default: true).",
    }
    more = ["salt=3", "herbs=a,b", "herbs=c=d", "gas=no", "timer=1.5", "salt=4"]
    assert run(cook, "soup").exit_code == 0
    more = [x for text in more for x in ("--set", text)]
    assert run(cook, "soup", "--heat", "7", "--pan", "small", "--quiet", *more).exit_code == 0
    assert seen == [Kitchen(), Kitchen(7, "small", False, 1.5, 4, ("a,b", "c=d"), False)], "the last salt, all herbs"
    assert "Pan (default: the largest)." in " ".join(run(cook, "--help").output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("salt=10", "--set salt=10: Input should be less than or equal to 9"),
        ("salt=much", "--set salt=much: Input should be a valid integer"),
        ("slat=3", "--set takes no 'slat'. Did you mean 'salt'?"),
        ("hidden=3", "--set takes no 'hidden'. Expected one of salt, herbs, gas."),
        ("tiemr=1", "--set takes no 'tiemr'. Did you mean 'timer'? Its flag is --timer."),
        ("salt", "--set takes NAME=VALUE, found 'salt'"),
    ],
)
def test_a_wrong_setting_is_named(text: str, says: str) -> None:
    def cook(*, kitchen: Kitchen) -> None: ...

    found = run(cook, "--set", text)
    assert isinstance(found.exception, RecipeError)
    assert says in str(found.exception)


def test_a_command_takes_some_of_the_fields() -> None:
    def only(*, kitchen: Annotated[Kitchen, FlagFields(only=("heat", "fan"))]) -> None: ...
    def without(*, kitchen: Annotated[Kitchen, FlagFields(without=("heat",))]) -> None: ...
    def unknown(*, kitchen: Annotated[Kitchen, FlagFields(without=("heet",))]) -> None: ...

    assert taken(only) == ["heat", "fan"]
    assert taken(without) == ["pan", "fan", "timer", "set"]
    with pytest.raises(AssertionError, match="heet"):
        taken(unknown)


def test_the_help_shows_the_main_flags_first() -> None:
    names = taken(merge)
    assert names[:8] == ["recipe", "base", "experts", "weight", "method", "options", "scale", "data"]
    lines = actmat(["merge", "--help-all"]).out.splitlines()
    panels = [line.split()[1:-1] for line in lines if line.startswith("╭─")]
    titles = [" ".join(w for w in words if "─" not in w) for words in panels]
    assert titles == ["Arguments", "Options", "More"]


@pytest.mark.parametrize("command", ["merge", "plan", "diagnose", "tune", "try"])
def test_the_help_fits_80_lines_and_the_long_one_adds_the_fields(command: str) -> None:
    short, full = (actmat([command, flag]).out for flag in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 80
    assert max(len(line) for line in full.splitlines()) <= 80
    settings = vars(with_flags(declared_command(command)))["settings"]
    assert len(settings) > 15
    missing = [name for name, text in settings.items() if f"{name}: {text}" not in " ".join(full.split())]
    assert not missing
    assert "compute_dtype" not in short


# What flags mean


def test_flags_replace_fields_of_the_file_and_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("base: org/b\nexperts: [org/x]\nties: false\nscale: 0.5\nmethod: ties\noptions: {density: 0.3}\n")
    (kept,) = RecipeFlags({"seed": 3, "keep": [], "ties": None}).recipes(file)
    assert (kept.ties, kept.scale, kept.seed, kept.options) == (False, 0.5, 3, {"density": 0.3})
    (changed,) = RecipeFlags({"ties": True, "scale": 0.0, "options": ["trim=x"]}).recipes(file)
    assert (changed.ties, changed.scale, changed.options) == (True, 0.0, {"density": 0.3, "trim": "x"})


def test_experts_have_names_weights_and_statistics() -> None:
    (recipe,) = recipes(experts=["math=org/m", "org/code"], weight=[2.0, 1.0], statistics=["code=stats/code"])
    assert [(e.label, e.path, e.weight, e.statistics) for e in recipe.experts] == [
        ("math", "org/m", 2.0, ""),
        ("code", "org/code", 1.0, "stats/code"),
    ]
    with pytest.raises(RecipeError, match="2 experts and 1 weights"):
        recipes(weight=[1.0])
    with pytest.raises(RecipeError, match="--weight needs one --expert each"):
        RecipeFlags({"weight": [1.0]}).recipes(Path("recipe.yaml"))
    with pytest.raises(RecipeError, match="given twice for one expert"):
        recipes(statistics=["math=a", "math=b"])


def test_methods_and_listed_options_are_variants_with_an_output_each() -> None:
    found = recipes(method=["actmat", "ties"], options=["rtol=1e-6,1e-4", "density=0.3"], out=Path("grid"))
    assert [(r.method, r.options, r.out) for r in found] == [
        ("actmat", {"rtol": 1e-6}, str(Path("grid/actmat,rtol=1e-06"))),
        ("actmat", {"rtol": 1e-4}, str(Path("grid/actmat,rtol=0.0001"))),
        ("ties", {"density": 0.3}, str(Path("grid/ties"))),
    ]


@pytest.mark.parametrize("values", [{"experts": None}, {"base": None, "to": "model"}])
def test_flags_without_a_base_or_experts_are_a_wrong_command_line(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="or a recipe file"):
        recipes(**{"experts": [str(tmp_path)], **values})
