"""`actmat diagnose` and `actmat merge --diagnose`: what they print, write and return."""

from pathlib import Path

import pytest
from tests.helpers.diagnoses import a_diagnosis, some_facts
from tests.helpers.merging import Family, actmat

from actmat.diagnostics.checks import run_checks
from actmat.diagnostics.model import Diagnosis, read_diagnosis

EXPLODED = ("--scale", "20")
"""Flags of a merge with an issue."""


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family.make(tmp_path)


def test_a_summary_of_eighty_columns(family: Family) -> None:
    outcome = actmat(family.argv(command="diagnose"), code=0)
    lines = outcome.out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert "expert0" in outcome.out
    assert "share of change" in outcome.out
    assert "is it good? Not measured." in outcome.out
    assert "actmat diagnose merged --data expert0=INPUTS ..." in outcome.out
    assert "checks: " in outcome.out
    assert not family.out.exists()


def test_checks_are_printed_by_severity(capsys: pytest.CaptureFixture[str]) -> None:
    from actmat.cli.summary import print_diagnosis

    facts = some_facts(of_records={"AM402": "far", "AM403": "exploded"})
    print_diagnosis(a_diagnosis(findings=run_checks(**facts, mute=["AM402"])))
    out = capsys.readouterr().out
    assert "issue AM403" in out
    assert "muted: AM402" in out
    assert "tip AM402" not in out


def test_out_is_a_file_or_a_directory(family: Family, tmp_path: Path) -> None:
    actmat(family.argv("--quiet", "--out", str(tmp_path / "mine.json"), command="diagnose"), code=0)
    (tmp_path / "folder").mkdir()
    actmat(family.argv("--quiet", "--out", str(tmp_path / "folder"), command="diagnose"), code=0)
    one, other = read_diagnosis(tmp_path / "mine.json"), read_diagnosis(tmp_path / "folder")
    assert one.measures == other.measures
    actmat(family.argv("--quiet", "--out", str(tmp_path / "mine.html"), command="diagnose"), code=0)
    told = actmat(family.argv("--out", str(tmp_path / "new" / "folder"), command="diagnose")).out  # is made
    assert told.count("report: ") == 2
    assert {p.name for p in (tmp_path / "new" / "folder").iterdir()} == {"report.json", "report.html"}
    assert sorted(p.name for p in tmp_path.glob("mine*")) == ["mine.html", "mine.json"]
    for page in (tmp_path / "mine.html", tmp_path / "folder" / "report.html"):
        assert page.read_text().startswith("<!DOCTYPE html>")


def test_strict_is_an_exit_code_and_mute_takes_it_back(family: Family) -> None:
    actmat(family.argv(*EXPLODED, command="diagnose"), code=0)
    outcome = actmat(family.argv(*EXPLODED, "--strict", command="diagnose"), code=1)
    assert "issue AM403" in outcome.out
    muted = ["--set", "mute=AM402,AM403"]
    outcome = actmat(family.argv(*EXPLODED, "--strict", *muted, command="diagnose"), code=0)
    assert "muted: AM403" in outcome.out


def test_findings_of_a_merge_that_is_made_return_1(family: Family) -> None:
    actmat(family.argv("--diagnose", *EXPLODED), code=0)
    actmat(["diagnose", family.out, "--strict"], code=1)
    assert {p.name for p in family.out.iterdir()} >= {
        "model.safetensors",
        "actmat_manifest.json",
        "report.json",
        "report.html",
    }
    actmat(["verify", family.out], code=0)
    assert [c.code for c in read_diagnosis(family.out).issues] == ["AM403"]


def test_mutes_of_a_recipe_count(family: Family, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    experts = "".join(f"  - {e}\n" for e in family.experts)
    text = f"base: {family.base}\nexperts:\n{experts}scale: 20\nmute: [AM402, AM403]\n"
    recipe.write_text(text)
    actmat(["diagnose", recipe, "--quiet", "--strict"], code=0)
    recipe.write_text(text.replace("AM403", "AM999"))
    outcome = actmat(["diagnose", recipe, "--quiet"], code=1)
    assert "there is no check 'AM999'" in outcome.err


def test_a_merged_model_shows_its_report(family: Family) -> None:
    actmat(family.argv("--diagnose"), code=0)
    written = read_diagnosis(family.out)
    shown = actmat(["diagnose", family.out, "--json", "--full", "--quiet"])
    assert Diagnosis.from_json(shown.out) == written
    (family.out / "report.json").unlink()
    again = actmat(["diagnose", family.out, "--json", "--full"])
    assert Diagnosis.from_json(again.out).measures == written.measures


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--option", "rtol=1e-4,1e-6"], 2, "one value per option"),
        (["--device", "cuda:99"], 1, "cuda"),
        (["--set", "mute=everything"], 1, "mute"),
    ],
)
def test_wrong_flags(family: Family, flags: list[str], code: int, says: str) -> None:
    outcome = actmat(family.argv(*flags, "--quiet", command="diagnose"), code=code)
    assert says in outcome.err.replace("\n", " ")
