"""Files of a release agree with each other: citation, extras, workflows, issue forms, changelog."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml
from docs.published import FILES
from tests.helpers.repository import ROOT

from actmat.version import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(p for p in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if p.name != "config.yml")
PINNED = re.compile(r"^[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})$")
LONGEST_CHANGELOG = 800
LONGEST_STABILITY = 500
"""Words."""


def jobs(workflow: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text())["jobs"]


def test_the_citation_is_of_this_version_and_license() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (found["version"], found["license"]) == (__version__, PROJECT["license"])
    assert found["url"] == PROJECT["urls"]["Paper"] == found["preferred-citation"]["url"]
    names = [a["family-names"] for a in found["preferred-citation"]["authors"]]
    assert ", ".join(names[:-1]) in (ROOT / "README.md").read_text()


def test_the_extra_all_is_every_extra_for_users() -> None:
    extras = PROJECT["optional-dependencies"]

    def reached(name: str) -> set[str]:
        inner = [x for d in extras[name] if d.startswith("actmat[") for x in d[7:-1].split(",")]
        return {name, *(n for x in inner for n in reached(x))}

    assert reached("all") == extras.keys() - {"dev", "docs"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_a_workflow_pins_its_actions_and_says_that_it_was_not_run(path: Any) -> None:
    text = path.read_text()
    assert "Not run yet" in text.partition("\nname:")[0]
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert [u for u in used if not PINNED.match(u)] == []
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_tests_run_on_three_systems_and_three_pythons() -> None:
    matrix = jobs("tests.yml")["core"]["strategy"]["matrix"]
    assert {system.partition("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}
    claimed = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c}
    assert len(matrix["python"]) == 3
    assert set(matrix["python"]) <= claimed


def test_only_the_job_that_publishes_has_an_identity() -> None:
    found = jobs("release.yml")
    assert {name for name, job in found.items() if "permissions" in job} == {"publish"}
    assert found["publish"]["permissions"] == {"id-token": "write"}
    assert found["publish"]["environment"] == "release"
    assert found["publish"]["needs"] == "try"
    assert "password" not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.name)
def test_an_issue_form_has_the_fields_of_a_form(path: Any) -> None:
    form = yaml.safe_load(path.read_text())
    assert form.keys() >= {"name", "description", "body"}
    asked = [e for e in form["body"] if e["type"] != "markdown"]
    ids = [e["id"] for e in asked]
    assert len(ids) == len(set(ids))
    assert all(e["type"] in ("textarea", "input", "dropdown", "checkboxes") for e in asked)
    assert all(e["attributes"]["label"] for e in asked)
    assert any(e.get("validations", {}).get("required") for e in asked)


def test_the_changelog_is_one_entry_for_people() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.*?)\]", text, re.MULTILINE) == ["Unreleased"]
    assert f": {__version__}" in text
    assert len(text.split()) <= LONGEST_CHANGELOG


def test_the_page_on_stability_is_short_and_names_every_schema() -> None:
    text = (ROOT / "docs" / "limits.md").read_text().partition("## What is public")[2]
    assert (
        len(re.sub(r"<!-- generated.*?<!-- end generated -->", "", text, flags=re.DOTALL).split()) <= LONGEST_STABILITY
    )
    for kind, (version, *_) in FILES.items():
        assert f"(schemas/{kind}-{version}.json)" in text
