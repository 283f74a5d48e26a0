"""The page in a browser, from an empty form to a comparison. Needs Chromium and playwright; else it is skipped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.browser import browser, needs_browser
from tests.helpers.merging import Family

from actmat.cli.catalogue import read_catalogue
from actmat.extras.ui.server import Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture
def page(samples: Family, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page of a server in the folder of the models; an error in its script fails the test."""
    monkeypatch.chdir(samples.root)
    with Server(list(read_catalogue().values())) as server, sync_api.sync_playwright() as started:
        thread = threading.Thread(target=server.run)
        thread.start()
        chromium = started.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        shown = chromium.new_page(viewport={"width": 1280, "height": 1000})
        wrong: list[str] = []
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        shown.goto(server.url)
        shown.locator("#method option").first.wait_for(state="attached")
        yield shown
        chromium.close()
        server.shutdown()
        thread.join()
        assert wrong == []


def fill(page: Any, css: str, value: str) -> None:
    page.fill(css, value)
    page.press(css, "Tab")


def test_from_an_empty_form_to_a_comparison(page: Any, samples: Family, tmp_path: Path) -> None:
    assert page.text_content("#status") == "Choose a base (adapters need none) and the experts."
    assert "appears when the inputs are chosen" in page.text_content("#plan")
    assert all(page.is_disabled(f"#{id}") for id in ("merge", "diagnose-now", "compare"))
    page.click("[data-browse=base]")
    page.click("[aria-label='Use base']")
    assert page.input_value("#base") == str(samples.base)
    fill(page, "[aria-label='Expert 1']", "expert0")
    fill(page, "[aria-label='Expert 2']", "expert7")
    page.locator(".problems", has_text="Did you mean 'expert").wait_for()
    fill(page, "[aria-label='Expert 2']", "expert1")
    page.locator("#status .good").wait_for()
    assert page.is_enabled("#diagnose-now")
    assert page.is_disabled("#merge")
    assert page.is_visible("#out-missing")
    page.select_option("#method", "ties")
    page.select_option("#grouping", "kind")
    fill(page, "[aria-label='scale of mlp']", "0.5")
    page.locator("#recipe", has_text="scale: 0.5").wait_for()
    assert "method: ties" in page.text_content("#recipe")
    for out in ("one", "two"):
        fill(page, "#out", out)
        page.locator("#command", has_text=f"--out {out}").wait_for()
        page.click("#merge")
        page.locator("#job", has_text=f"{out} is complete").wait_for(timeout=60_000)
        assert (samples.root / out / "actmat_manifest.json").is_file()
        page.select_option("#method", "average")
    page.click("#compare")
    with page.expect_popup(timeout=60_000) as opened:
        page.click("text=Open the comparison")
    assert "Two merges compared" in opened.value.text_content("h1")


def test_methods_are_in_groups_with_a_recommendation_first(page: Any) -> None:
    assert page.input_value("#method") == "auto"
    groups = page.locator("#method optgroup")
    labels = [groups.nth(i).get_attribute("label") for i in range(groups.count())]
    assert labels[:2] == ["Recommended", "Basics"]
    assert page.locator("#method option").count() == len(read_catalogue()) + 1
    assert page.locator("#method optgroup").first.locator("option").first.get_attribute("value") == "auto"
    assert page.locator("#recipe").text_content() == ""


def test_auto_says_what_it_takes_and_why_and_a_search_is_one_command_away(page: Any) -> None:
    assert page.is_hidden("#why")
    for field, value in (
        ("#base", "base"),
        ("[aria-label='Expert 1']", "expert0"),
        ("[aria-label='Expert 2']", "expert1"),
    ):
        fill(page, field, value)
    page.locator("#why", has_text="points over the average").wait_for()
    assert page.text_content("#why").startswith("For these experts: ")
    assert page.text_content("#tune").startswith("actmat tune -b base -e expert0 -e expert1 --data ")
    page.select_option("#method", "ties")
    page.locator("#command", has_text="-m ties").wait_for()
    assert page.is_hidden("#why")


def test_a_recipe_is_saved_and_opened_and_the_form_survives_a_reload(page: Any, samples: Family) -> None:
    (samples.root / "old.yaml").write_text("base: base\nexperts: [expert0, expert1]\nmethod: tsv\nseed: 7\n")
    page.click("#load")
    page.click("[aria-label='Use old.yaml']")
    page.locator("#status .good").wait_for()
    assert page.input_value("#method") == "tsv"
    page.reload()
    page.locator("#recipe", has_text="method: tsv").wait_for()
    fill(page, "#recipe-path", "new.yaml")
    page.click("#save")
    page.locator("#saved", has_text="written to").wait_for()
    text = (samples.root / "new.yaml").read_text()
    assert "seed: 7" in text
    assert str(samples.base) in text


def test_it_fits_on_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
