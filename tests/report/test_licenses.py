"""The license of a merged model, from cards; relations to the inputs."""

import shutil
from pathlib import Path

import pytest
from tests.helpers.adapters import save_adapter
from tests.helpers.hub import HubStandIn
from tests.helpers.merging import Family, card

import actmat
from actmat.report.licenses import LicensedInput, read_licenses, shared_license

MODELS = Path(__file__).parents[1] / "data" / "mergekit"


def origin(label: str, *licenses: str) -> LicensedInput:
    return LicensedInput(label, "", licenses)


@pytest.mark.parametrize(
    ("inputs", "license", "said"),
    [
        ([origin("base", "mit"), origin("a", "mit")], "mit", "`mit`: base, a."),
        ([origin("base", "mit"), origin("a", "apache-2.0")], None, "`mit`: base; `apache-2.0`: a. The license of this"),
        ([origin("base", "mit"), origin("a")], None, "`not stated`: a. The license of this model is not stated"),
        ([origin("base")], None, "`not stated`: base."),
        ([origin("base", "gemma"), origin("a", "gemma", "mit")], None, "`gemma`: base, a; `mit`: a"),
    ],
)
def test_only_a_license_of_all_inputs_is_stated(inputs: list[LicensedInput], license: str | None, said: str) -> None:
    found, text = shared_license(inputs)
    assert found == license
    assert said in text


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
    assert read_licenses(text) == licenses


def test_a_merge_takes_licenses_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family.make(tmp_path / "models", layers=1)
    monkeypatch.chdir(tmp_path)
    (family.base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    for expert in family.experts:
        (expert / "README.md").write_text("---\nlicense: llama3.1\n---\n")
    actmat.merge("models/base", ["models/expert0", "models/expert1"], out=family.out, durable=False)
    head, body = card(family.out)
    assert "license" not in head
    assert "`apache-2.0`: base; `llama3.1`: expert0, expert1." in body.partition("## License")[2]
    assert "base_model" not in head, "folders are no ids of the hub, also where they have a slash"


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
    assert "`not stated`: base; `cc-by-nc-4.0`: math; `gemma`: code." in body


def test_an_adapter_names_its_base_as_a_relation(tmp_path: Path) -> None:
    for n in "01":
        save_adapter(tmp_path / n, "llama", int(n), r=2, target_modules=["q_proj"])
        (tmp_path / n / "README.md").write_text("---\nlicense: mit\n---\n")
    actmat.merge(experts=[tmp_path / "0", tmp_path / "1"], out=tmp_path / "out", durable=False)
    head, _ = card(tmp_path / "out")
    assert (head["base_model_relation"], head["license"]) == ("adapter", "mit")


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
    assert "`gemma`: a (org/lora)" in body
