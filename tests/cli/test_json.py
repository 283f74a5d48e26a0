"""JSON of the commands: the layout of every command is pinned with its version; --quiet and exit codes everywhere."""

from pathlib import Path
from typing import Any

import pytest
import typer.main
from tests.diffusion.test_files import lora
from tests.helpers.json_layouts import PINNED, pinned, said
from tests.helpers.merging import actmat

from actmat.cli.listing import COMMON, declared_command, info_of
from actmat.cli.main import app
from actmat.cli.screen import LAYOUTS
from actmat.diagnostics.model import Diagnosis

ROOT = Path(__file__).resolve().parents[2]


def commands() -> dict[str, Any]:
    """Every command by its name, with its parameters; those of groups as `group sub`."""
    group: Any = typer.main.get_command(app)
    context = group.context_class(group)
    found = {}
    for name in group.list_commands(context):
        if name in ("analyze", "experiment"):  # another distribution
            continue
        _, command, _ = group.resolve_command(context, [name])
        found |= {f"{name} {sub}": c for sub, c in getattr(command, "commands", {name: command}).items()}
    return {name if name.split()[0] != name.split()[1] else name.split()[0]: c for name, c in found.items()}


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_json_quiet_and_exit_codes(name: str) -> None:
    spelled = {option for p in commands()[name].params for option in p.opts}
    home = name.split()[0]
    assert {"--json", "--quiet", "-q"} <= spelled
    (quiet,) = (p for p in commands()[name].params if "--quiet" in p.opts)
    assert quiet.help == "Print only errors and output for scripts."
    exits = info_of(declared_command(home)).exits
    assert home in LAYOUTS
    assert set(exits) == {0, 1}
    shared = (ROOT / "docs/commands/README.md").read_text()
    assert f"| `{home}` | {exits[0]} | {exits[1]} |" in shared, "run python -m docs.generate"
    assert all(f"| {code} | {meaning} |" in shared for code, meaning in COMMON.items())
    shown = actmat([*name.split(), "--help"]).out
    assert f"Exit codes: 0 {exits[0]}; 1 ".replace("`", "") in " ".join(shown.split())
    assert max(len(line) for line in shown.splitlines()) <= 80


def flags(models: Path) -> list[str]:
    return ["-b", f"{models}/base", "-e", f"{models}/experts/math", "-e", f"{models}/experts/code"]


def test_merge_verify_and_inspect(models: Path, tmp_path: Path) -> None:
    inputs, out = flags(models), tmp_path / "both"
    data = pinned(said("merge", *inputs, "-m", "actmat", "-m", "ties", "--out", out, "--diagnose", "--json"), "merge")
    first, second = data["outputs"]
    assert set(first) == PINNED["merge outputs"]
    assert (first["method"], second["method"]) == ("actmat", "ties")
    assert first["actions"]["merge"] == 15
    assert set(first["size"]) == PINNED["merge size"]
    assert ["AM402" in " ".join(run["warnings"]) for run in (first, second)] == [True, False]
    assert "AM402" in first["findings"]
    again = said("merge", *inputs, "-m", "ties", "--out", out / "ties", "--diagnose", "--json")["outputs"][0]
    assert again["was_finished"]
    ties = out / "ties"
    assert pinned(said("verify", ties, "--json"), "verify")["ok"] is True
    shown = pinned(said("inspect", ties, "--json"), "inspect")
    assert shown["left_out"] == {"tensors": 21}
    assert len(said("inspect", ties, "--json", "--full")["tensors"]) == 21
    (ties / "config.json").write_text("{}")
    broken = pinned(said("verify", ties, "--json", "--no-inputs", code=1), "verify")
    assert not broken["ok"]
    assert broken["problems"]


def test_a_command_that_fails_prints_no_json(models: Path, tmp_path: Path) -> None:
    for arguments, code in ((["-b", "nowhere", "-e", models / "base"], 1), (["--no-such-flag"], 2)):
        failed = actmat(["merge", *arguments, "--out", tmp_path / "failed", "--json"])
        assert (failed.code, failed.out) == (code, "")
        assert failed.err


def test_plan_and_diagnose_are_compact_unless_all_is_wanted(models: Path) -> None:
    inputs = flags(models)
    (plan,) = pinned(said("plan", *inputs, "--json"), "plan")["plans"]
    assert set(plan) == PINNED["plan plans"]
    assert sum(g["count"] for g in plan["groups"]) == plan["items"] == 21
    assert plan["groups"][0]["first"] == "model.embed_tokens.weight"
    whole = said("plan", *inputs, "--json", "--full")
    assert len(whole["items"]) == 21
    assert len(said("plan", *inputs, "-m", "ties", "-m", "average", "--json")["plans"]) == 2
    found = pinned(said("diagnose", *inputs, "--json"), "diagnose")
    assert found["left_out"] == {"measures": 15}
    assert Diagnosis.from_json(said("diagnose", *inputs, "--json", "--full")).measures


def test_methods_and_the_recipe_of_another_tool(tmp_path: Path) -> None:
    short = pinned(said("methods", "--json"), "methods")["methods"]
    assert set(short[0]) == {"name", "summary", "needs", "low_rank"}
    assert len(said("methods", "--json", "--full")["methods"]) == len(short)
    (ties,) = said("methods", "ties", "--json")["methods"]
    assert ties["options"]
    file = tmp_path / "mergekit.yml"
    file.write_text("merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: a}, {model: b}]\n")
    assert pinned(said("plan", file, "--json", "-q", "--as-recipe"), "recipe")["recipe"]["method"] == "linear"


def test_quiet_prints_nothing(models: Path, tmp_path: Path) -> None:
    inputs, out = flags(models), tmp_path / "quiet"
    for command in (
        ["merge", *inputs, "-m", "ties", "-m", "average", "--diagnose", "--out", out], ["plan", *inputs], ["methods"],
        ["inspect", models / "base"], ["verify", out / "ties"], ["diagnose", out / "ties"],
        ["merge", *inputs, "-m", "ties", "--out", out / "ties"],
    ):  # fmt: skip
        assert actmat([*command, "--quiet"], code=0).out == "", command


def test_average_export_extract_and_serving(models: Path, tmp_path: Path) -> None:
    merged, model = tmp_path / "averaged", models / "experts/math"
    data = pinned(said("average", "uniform", model, models / "experts/code", "--out", merged, "--json"), "average")
    assert set(data["outputs"][0]) == PINNED["merge outputs"]
    assert pinned(said("inspect", "--serve", merged, "--json"), "serve")["vllm"].startswith("vllm serve")
    exported = said(
        "export", lora(tmp_path / "a.safetensors", 1, "kohya"), "--to", "comfy", "--out", tmp_path / "b", "--json"
    )
    assert pinned(exported, "export")["form"] == "comfy"
    inputs = ("--base", models / "base", "--model", model, "--rank", "2", "--out", tmp_path / "lora")
    (lora_data,) = pinned(said("extract", *inputs, "--json"), "extract")["outputs"]
    assert 0 < lora_data["relative_error"] < 1


def test_layouts_that_other_tests_make_or_that_take_long() -> None:
    """Those of demo, push, statistics, try and tune are pinned where they run."""
    assert PINNED.keys() >= LAYOUTS.keys() - {"analyze", "experiment"}
