"""The license of a merged model: from cards, with conflicts named; relations to the inputs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.adapters import save_adapter
from tests.helpers.hub import HubStandIn
from tests.helpers.merging import Family, card

import actmat
from actmat.report.licenses import LicensedInput, combine, read_card

MODELS = Path(__file__).parents[1] / "data" / "mergekit"


def origin(label: str, *licenses: str) -> LicensedInput:
    return LicensedInput(label, "", licenses)


@pytest.mark.parametrize(
    ("inputs", "head", "said"),
    [
        ([origin("base", "mit"), origin("a", "mit")], {"license": "mit"}, "License of this model: `mit`."),
        ([origin("base", "mit"), origin("a", "apache-2.0")], {"license": ["mit", "apache-2.0"]}, "`apache-2.0`: a"),
        ([origin("base", "llama3.1"), origin("a", "mit")], {"license": "llama3.1"}, "notices of `mit` must be kept"),
        ([origin("base", "mit"), origin("a")], {}, "None was found for a. The license of this model is not stated"),
        ([origin("base")], {}, "Licenses that the inputs state: none."),
        ([origin("base", "gemma"), origin("a", "gemma", "mit")], {"license": "gemma"}, "`gemma`: base, a"),
    ],
)
def test_licenses_combine(inputs: list[LicensedInput], head: dict[str, Any], said: str) -> None:
    found = combine(inputs)
    assert found.head == head
    assert said in found.text
    assert "**Conflict**" not in found.text


def test_two_licenses_that_are_not_permissive_conflict_and_both_are_named() -> None:
    found = combine([origin("base", "llama3.1"), origin("math", "cc-by-nc-4.0"), origin("code", "mit"), origin("x")])
    assert found.head == {"license": "other", "license_name": "conflict"}
    assert "**Conflict**: llama3.1 (base) and cc-by-nc-4.0 (math) are not one license" in found.text
    assert "None was found for x." in found.text
    (note,) = read_card(f"---\nlicense: other\n---\n{found.text}\n").notes
    assert "cc-by-nc-4.0" in note


@pytest.mark.parametrize(
    ("text", "licenses"),
    [
        ("---\nlicense: MIT\n---\n", ("mit",)),
        ("---\nlicense: [mit, apache-2.0]\n---\n", ("mit", "apache-2.0")),
        ("---\nlicense: other\nlicense_name: my-terms\n---\n", ("my-terms",)),
        ("---\nlicense: other\n---\n", ("other",)),
        ("---\nlicense: unknown\n---\n", ()),
        ("---\nlicense: {a: 1}\n---\n", ()),
        ("---\nlicense: [1, null]\n---\n", ()),
        ("---\n[not: closed\n---\n", ()),
        ("# No head\nlicense: mit\n", ()),
        ("---\nlicense: \"a\\nb\"\n---\n", (r"a\nb",)),
        ("", ()),
    ],
)  # fmt: skip
def test_cards_are_read_whatever_they_hold(text: str, licenses: tuple[str, ...]) -> None:
    assert read_card(text).licenses == licenses


def test_a_merge_takes_licenses_from_folders(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    (family.base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    for expert in family.experts:
        (expert / "README.md").write_text("---\nlicense: llama3.1\n---\n")
    actmat.merge(family.base, family.experts, out=family.out, durable=False)
    head, body = card(family.out)
    assert head["license"] == "llama3.1"
    assert "`apache-2.0`: base; `llama3.1`: expert0, expert1." in body.partition("## License")[2]
    assert "base_model" not in head, "folders are no ids of the hub, also where they have a slash"


def test_a_folder_with_a_slash_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Family.make(tmp_path / "models", layers=1)
    monkeypatch.chdir(tmp_path)
    actmat.merge("models/base", ["models/expert0"], out="out", durable=False)
    assert "base_model" not in card(tmp_path / "out")[0]


def test_inputs_from_the_hub_are_related_and_their_cards_read_at_the_merged_commit(
    hub: HubStandIn, tmp_path: Path
) -> None:
    family = Family.make(tmp_path, layers=1)
    (family.experts[0] / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    (family.experts[1] / "README.md").write_text("---\nlicense: gemma\n---\n")
    for name, folder in (("base", family.base), ("math", family.experts[0]), ("code", family.experts[1])):
        hub.add(f"org/{name}", folder)
    actmat.merge("hf://org/base", ["hf://org/math@main", "org/code"], out=family.out, durable=False)
    head, body = card(family.out)
    assert head["base_model"] == ["org/base", "org/math", "org/code"]
    assert head["base_model_relation"] == "merge"
    assert (head["license"], head["license_name"]) == ("other", "conflict")
    assert "**Conflict**: cc-by-nc-4.0 (math) and gemma (code) are not one license" in body
    assert "None was found for base." in body


def test_an_adapter_names_its_base_as_a_relation(tmp_path: Path) -> None:
    adapters = [save_adapter(tmp_path / str(n), "llama", n, r=2, target_modules=["q_proj"]) for n in range(2)]
    for adapter in (tmp_path / "0", tmp_path / "1"):
        (adapter / "README.md").write_text("---\nlicense: mit\n---\n")
    actmat.merge(experts=[tmp_path / "0", tmp_path / "1"], out=tmp_path / "out", durable=False)
    head, _ = card(tmp_path / "out")
    assert (head["base_model_relation"], head["license"]) == ("adapter", "mit")
    assert len(adapters) == 2


def test_parts_of_an_input_are_related_and_their_cards_read_at_their_own_commits(
    hub: HubStandIn, tmp_path: Path
) -> None:
    for name, license in (("base", "mit"), ("a", "apache-2.0"), ("b", "mit"), ("lora", "gemma")):
        folder = shutil.copytree(MODELS / name, tmp_path / name)
        (folder / "README.md").write_text(f"---\nlicense: {license}\n---\n")
        hub.add(f"org/{name}", folder)
    actmat.merge("org/base", ["org/a@main+org/lora", "org/b"], out=tmp_path / "out", durable=False)
    head, body = card(tmp_path / "out")
    assert head["base_model"] == ["org/base", "org/a", "org/lora", "org/b"]
    assert head["license"] == "gemma"
    assert "`gemma`: a (org/lora)" in body
