"""Names, paths and options with control characters, newlines, markup or HTML: nothing of it takes effect."""

import re
import unicodedata
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.adapters import save_adapter
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.merging import Family, Outcome, actmat

from actmat.errors import RecipeError
from actmat.foreign import html, in_one_line, markdown, terminal

FORGED = "\nall-good: everything\r\x1b[2K\x1b]0;title\x07\x9b31m\u202egnp\u2066\u200b\u2028x[bold red]:bomb:|<b>`"
"""A part of a name that would clear the line, change colors and directions, and add a line of output."""
LINE = re.compile(r"^ {0,3}all-good", re.MULTILINE)
"""A line of its own; what a long line goes on with is indented further, and may begin anywhere in the name."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def check(text: str) -> None:
    """Only printable characters, newlines and colors of our own; no forged line."""
    bad = {c for c in ANSI.sub("", text) if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert not bad, f"{bad} in\n{text}"
    assert not LINE.search(text), text
    assert "\U0001f4a3" not in text, "an emoji code of the name was replaced"


def run(*argv: str, code: int | None = None) -> Outcome:
    outcome = actmat(argv)
    check(outcome.out)
    check(outcome.err)
    assert "Traceback" not in outcome.err
    assert code is None or outcome.code == code, outcome
    return outcome


@pytest.fixture
def hostile(tmp_path: Path) -> Family:
    """A family in folders, and with tensors, whose names hold the forged line."""
    family = Family.make(tmp_path / f"of{FORGED.replace('/', '')}", layers=1)
    for folder in (family.base, *family.experts):
        family.change(folder, lambda t: t.update({f"extra.{FORGED}.weight": torch.ones(8, 8)}))
    return family


def test_every_command_on_hostile_names(hostile: Family) -> None:
    merged = [*hostile.argv("--diagnose", "--keep", "*norm*")]
    merged.remove("--quiet")
    run(*merged, code=0)
    out = str(hostile.out)
    assert r"\nall-good" in run("inspect", str(hostile.base), "--all", code=0).out
    run("inspect", str(hostile.base), code=0)
    run("inspect", str(hostile.base), "--json", "--full", code=0)
    run(*hostile.argv("--all", command="plan"), code=0)
    run(*hostile.argv(command="plan"), code=0)
    run(*hostile.argv("--json", "--full", command="plan"), code=0)
    run("verify", out, code=0)
    assert r"\nall-good" in re.sub(r"\n *", "", run("diagnose", out, code=0).out)  # continued lines are indented
    run("diagnose", out, "--json", code=0)
    run("diagnose", out, "--out", str(hostile.root / "page.html"), code=0)
    text = (hostile.root / "page.html").read_text()
    assert not set(text) & set("\x1b\x07\x9b\u202e\u2066\u200b")
    assert "x[bold red]:bomb:|<b>" not in text
    check((hostile.out / "README.md").read_text())
    hostile.change(hostile.out, lambda t: next(iter(t.values())).add_(1.0))
    assert r"\nall-good" in run("verify", out, code=1).out.replace("\n", "")


def test_errors_show_hostile_names_in_one_line(hostile: Family) -> None:
    hostile.change(hostile.experts[0], lambda t: t.pop(f"extra.{FORGED}.weight"))
    hostile.change(hostile.experts[1], lambda t: t.update({f"extra.{FORGED}.weight": torch.full((8, 8), torch.nan)}))
    outcome = run(*hostile.argv(), code=1)
    assert outcome.err.count("\n") == 2, "the headline and a problem"
    assert r"\nall-good" in outcome.err
    run(*hostile.argv("--keep", "extra*"), code=0)
    hostile.change(hostile.experts[0], lambda t: t.update({f"extra.{FORGED}.weight": torch.ones(8, 8)}))
    assert r"\nall-good" in run(*hostile.argv("--overwrite"), code=1).err


@pytest.mark.parametrize(
    "flags",
    [
        ("merge", "--base", FORGED, "--expert", FORGED, "--out", "x"),
        ("plan", "--base", f"org/{FORGED}", "--expert", f"a={FORGED}"),
        ("plan", "--base", "b", "--expert", f"{FORGED}=x", "--method", FORGED),
        ("plan", "--base", "b", "--expert", "x", "--option", FORGED),
        ("plan", "--base", "b", "--expert", "x", "--option", f"{FORGED}={FORGED}"),
        ("plan", "--base", "b", "--expert", "x", "--dtype", FORGED),
        ("plan", "--base", "b", "--expert", "x", "--keep", FORGED),
        ("plan", "--base", "b", "--expert", "x", "--scale", FORGED),
        ("plan", "--base", "b", "--expert", "x", "--device", FORGED),
        ("plan", FORGED),
        ("plan", f"--{FORGED}"),
        (f"--{FORGED}",),
        (FORGED,),
        ("inspect", FORGED),
        ("verify", FORGED),
        ("report", FORGED),
        ("diagnose", FORGED),
        ("methods", FORGED),
        ("statistics", FORGED),
        ("statistics", "show", FORGED),
        ("statistics", "collect", FORGED, "--data", FORGED, "--out", "x"),
    ],
    ids=lambda flags: " ".join(f.replace(FORGED, "X") for f in flags),
)
def test_hostile_arguments(flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*flags).code in (1, 2)


def test_a_recipe_file_with_hostile_texts(hostile: Family) -> None:
    recipe = hostile.root / f"recipe{FORGED}.yaml"
    experts = [{"path": str(e), "name": f"e{i}{FORGED}"} for i, e in enumerate(hostile.experts)]
    fields = {"base": str(hostile.base), "experts": experts, "out": str(hostile.out)}
    recipe.write_text(yaml.safe_dump(fields))
    run("merge", str(recipe), code=0)
    run("verify", str(hostile.out), code=0)
    run("diagnose", str(hostile.out), code=0)
    recipe.write_text(yaml.safe_dump(fields | {FORGED: FORGED, "rules": [{"match": FORGED, FORGED: 1}]}))
    run("merge", str(recipe), code=1)
    recipe.write_text(f"base: [{FORGED}")
    run("merge", str(recipe), code=1)


def test_an_adapter_with_hostile_texts(tmp_path: Path) -> None:
    folder = tmp_path / f"adapter{FORGED}"
    save_adapter(folder, "llama", 0, r=2, target_modules=["q_proj"])
    config = folder / "adapter_config.json"
    edit_json(config, base_model_name_or_path=FORGED)
    assert r"\nall-good" in run("inspect", str(folder), code=0).out
    edit_json(config, base_model_name_or_path=None, rank_pattern={FORGED: FORGED}, peft_type=FORGED)
    assert r"\nall-good" in run("inspect", str(folder), code=0).out
    assert run("merge", "-e", str(folder), "--out", str(tmp_path / "out"), code=1).err.count(r"\nall-good") > 1


def test_the_model_card_of_hostile_paths_has_the_structure_of_any_other(hostile: Family) -> None:
    plain = Family.make(hostile.root / "plain", layers=1)
    recipe = hostile.root / "r.yaml"
    cards = []
    for family, name in ((plain, "e"), (hostile, f"e{FORGED}```\n# owned")):
        experts = [{"path": str(e), "name": f"{i}{name}"} for i, e in enumerate(family.experts)]
        recipe.write_text(yaml.safe_dump({"base": str(family.base), "experts": experts, "out": str(family.out)}))
        run("merge", str(recipe), "--quiet", code=0)
        cards.append((family.out / "README.md").read_text())
    starts = [[line[:3] for line in card.splitlines() if line[:1] in "|#`-"] for card in cards]
    assert starts[0] == [s[:3] for s in starts[1]]
    assert "<b>" not in cards[1].partition("## Recipe")[0]
    block = re.search(r"^(`{3,})yaml\n(.*?)^\1$", cards[1], re.MULTILINE | re.DOTALL)
    assert yaml.safe_load(block[2])["experts"][0]["name"] == f"0e{FORGED}```\n# owned", "the recipe can be run again"


@given(st.text())
def test_terminal_text_is_printable_and_ordinary_text_stays(text: str) -> None:
    assert terminal(text).isprintable()
    assert terminal(terminal(text)) == terminal(text)
    assert terminal("naïve/модель-模型.weight") == "naïve/модель-模型.weight"


@given(st.text())
def test_html_text_has_no_elements(text: str) -> None:
    assert not set(html(text)) & set("<>\"'")
    assert html(html(text)) == html(text)


@given(st.text())
def test_markdown_text_renders_as_itself(text: str) -> None:
    from markdown_it import MarkdownIt

    shown = markdown(text).strip()
    rendered = MarkdownIt("commonmark").enable("table").render(f"| a |\n|---|\n| x{shown}x |\n")
    cells = re.findall(r"<td>(.*)</td>", rendered)
    assert cells == [f"x{str(html(terminal(text).strip())).replace('&#34;', '&quot;').replace('&#39;', chr(39))}x"]


def test_a_problem_is_one_line_whatever_it_names() -> None:
    error = RecipeError("bad\nrecipe", [f"tensor {FORGED}", "another"])
    assert str(error).count("\n") == 2
    assert error.problems[0] == f"tensor {FORGED}", "the text itself is not changed"
    assert in_one_line("a\n   b") == "a b"


@pytest.mark.parametrize("text", ["a_b", "org/model_7b-v2.1", "C:/x y"])
def test_ordinary_names_stay_as_they_are(text: str) -> None:
    assert terminal(text) == markdown(text) == str(html(text)) == text
