"""The verdict of a page: what it leads with, no praise beside an explosion, figures that say something."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.browser import look, needs_browser
from tests.helpers.comparisons import comparison
from tests.helpers.pages import Page
from tests.helpers.reports import diagnosis_json

from actmat.diagnostics.checks import CHECKS
from actmat.diagnostics.model import Diagnosis
from actmat.extras.pages.html import render_html
from actmat.extras.pages.html.charts import end_labels
from actmat.extras.pages.html.comparison import render_comparison
from actmat.extras.pages.html.environment import dotted, spelled
from actmat.extras.pages.html.scales import HeatScale, range_axis, spread
from actmat.extras.pages.html.verdicts import explanation, next_step

SIZE = {
    "code": "AM402", "title": "Merged delta is much larger than the experts'", "severity": "tip", "verdict": "found",
    "message": "The merged delta has 9 times the mean expert's norm", "tensors": [], "count": 0,
    "docs": "docs/checks.md#am402",
}  # fmt: skip


def page_of(**changes: Any) -> Page:
    return Page(render_html(Diagnosis.from_json(diagnosis_json(3, 4) | changes)))


def part(page: Page, name: str) -> Page:
    """A section as a page of its own."""
    return Page(re.findall(rf'<section [^>]*id="{name}".*?</section>', page.source, re.DOTALL)[0])


def test_a_merge_of_the_wrong_size_is_met_nowhere() -> None:
    page = page_of(checks=[SIZE])
    text = page.one("section", id="experts").text + page.one("section", id="summary").text
    assert not re.search(r"\b(mostly |partly |not )?met\b", text)
    assert text.count("size is off: AM402") == 3
    assert "ρ says little here" in text
    fine = page_of(checks=[{**SIZE, "verdict": "clear"}]).one("section", id="experts").text
    assert "met" in fine
    assert "size is off" not in fine


def test_few_tensors_of_the_wrong_size_do_not_make_the_whole_merge_long() -> None:
    page = page_of(checks=[{**SIZE, "code": "AM403", "tensors": ["a"], "count": 1}])
    text = page.one("section", id="experts").text + page.one("section", id="summary").text
    assert "because the size is off in 1 tensor (AM403)" in text
    assert "size is off in 1 tensor: AM403" in text
    assert not re.search(r"\b(mostly |partly |not )?met\b", text)


@pytest.mark.parametrize(
    ("checks", "kind", "words"),
    [
        ([{**SIZE, "severity": "issue"}], "bad", "Look before you use it: the checks found 1 issue."),
        ([SIZE], "tip", "No issue; the checks have 1 tip."),
        (
            [{**SIZE, "verdict": "muted"}],
            "calm",
            "No check fired. This is not a measure of quality: evaluate",
        ),
        ([], "calm", "No checks ran."),
    ],
)
def test_the_page_leads_with_what_the_checks_found(checks: list[dict[str, Any]], kind: str, words: str) -> None:
    page = page_of(checks=checks)
    banner = page.one("div", class_="banner")
    assert banner.attributes["class"] == f"banner {kind}"
    assert banner.text.startswith(words)
    assert "times the experts' mean norm and" in banner.text
    assert "times the norm of their sum." in banner.text
    assert page.source.index('class="banner') < page.source.index('class="tiles"')
    assert "actmat tune" in page.one("section", id="summary").text


@pytest.mark.parametrize("checks", [[], [{**SIZE, "severity": "issue"}]])
def test_the_merged_change_has_one_colour_in_every_figure(checks: list[dict[str, Any]]) -> None:
    page = page_of(checks=checks)
    bar = part(page, "summary").all("rect", class_="bar")[0]
    assert bar.attributes["class"] == "bar merged solid"
    lines = [p.attributes["class"] for p in part(page, "norms").all("path", class_="line")]
    assert [c for c in lines if "merged" in c]
    assert not [c for c in lines if re.search(r"\be\d\b", c)], "colours of experts mean experts"


def test_a_page_without_findings_says_what_was_and_was_not_checked() -> None:
    clear = [{**SIZE, "code": f"AM40{i}", "verdict": "clear"} for i in (1, 2)]
    text = page_of(checks=[*clear, {**SIZE, "verdict": "not_applicable"}]).one("section", id="checks").text
    assert "2 checks found nothing; 1 check did not apply or was muted." in text
    assert "none looks at what the merged model answers" in text


def test_a_change_far_above_rounding_is_a_sentence_and_no_figure() -> None:
    whole = diagnosis_json(3, 4)
    far = [{**m, "snr": [5e5 for _ in m["snr"]]} for m in whole["measures"]]
    section = part(page_of(measures=far), "rounding")
    assert "every change is at least 5e5 times its rounding" in section.one("section").text
    assert section.all("path", class_="line") == []
    near = [{**m, "snr": [5.0 for _ in m["snr"]]} for m in whole["measures"]]
    assert part(page_of(measures=near), "rounding").all("path", class_="line")


def test_long_parts_are_behind_their_titles_where_the_screen_is_narrow() -> None:
    page = page_of()
    for name in ("spectra", "tensors"):
        (long,) = part(page, name).all("details", class_="long")
        assert "open" not in long.attributes


def test_every_check_is_explained_in_the_page_itself() -> None:
    for check in CHECKS:
        text = explanation(check.code)
        assert text is not None, f"{check.code}: run python -m docs.generate"
        assert text.startswith(f"**{check.title}**")
        assert "](" not in text
        assert "**" not in spelled(text)
        assert next_step(check.code) is not None or check.code == "AM205"
    assert explanation("AM999") is next_step("AM999") is None
    card = page_of(checks=[SIZE]).one("article", id="check-AM402")
    assert "moved farther from its base than anything that was trained" in card.text


def test_heat_maps_use_their_scale() -> None:
    scale = HeatScale.over([0.52, 0.71, 1.4])
    assert (scale.low, scale.high) == (0.5, 0.8)
    assert [scale.level(v) for v in (0.5, 0.65, 0.79, 1.1, 1.3, None)] == ["q0", "q5", "q9", "h0", "h1", "none"]
    assert HeatScale.over([]) == HeatScale.over([1.0, 2.0]) == HeatScale(0.0, 1.0)
    assert HeatScale.over([0.3]).level(0.3) == "q0"
    assert spread([0.5, 0.55]) == (0.5, 0.55)
    assert spread([0.5, 0.7]) is spread([]) is None


def test_a_map_whose_cells_are_all_alike_is_one_sentence() -> None:
    data = diagnosis_json(3, 4)
    for measure in data["measures"]:
        measure |= {"residual": [0.91, 0.93, 0.95], "sign_conflict": [[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]}
    page = Page(render_html(Diagnosis.from_json(data)))
    layers = page.one("section", id="layers").text
    assert "All alike: ρ is 0.91 to 0.95 for every expert in every layer." in layers
    assert page.all("svg", class_="strip") == []
    assert "Every pair: 50 %." in page.one("section", id="overlap").text
    assert page.problems == []


def test_names_break_between_words_only() -> None:
    assert dotted("layers.0.self_attn/q") == "layers.0.<wbr>self_attn/<wbr>q"
    assert dotted("a.vector_to_single_lstm") == "a.<wbr>vector_<wbr>to_<wbr>single_<wbr>lstm"
    assert dotted("<b>") == "&lt;b&gt;"


def test_labels_at_the_ends_of_lines_do_not_overlap() -> None:
    made = end_labels([("e0", "a", 0.5), ("e1", "b", 0.5), ("e2", "c", 1.0), ("e3", "d", 0.99)], height=150)
    places = [100 * place for _, _, place in made]
    assert places == sorted(places)
    assert all(b - a >= 9.99 for a, b in pairwise(places))
    assert 0 <= places[0] <= places[-1] <= 100
    assert end_labels([("e0", "a name that is much too long", 0.5)], height=150) == []
    assert end_labels([("e0", str(i), 0.1 * i) for i in range(9)], height=150) == []


@pytest.mark.parametrize("values", [[0.466, 0.708], [1.0], [-2.0, 3.0], [0.0, 0.0], [1e-9, 2e-9]])
def test_a_range_has_round_ends_around_its_values(values: list[float]) -> None:
    axis = range_axis(values)
    assert axis.low <= min(values) * (1 + 1e-9) or axis.low <= min(values)
    assert axis.high >= max(values) * (1 - 1e-9)
    assert 2 <= len(axis.ticks) <= 7
    assert (axis.ticks[0], axis.ticks[-1]) == (axis.low, axis.high)


def test_a_comparison_is_told_in_the_names_of_its_methods() -> None:
    found = comparison()
    assert found.names == ("actmat", "ties")
    assert replace(found, methods=("ties", "ties")).names == ("actmat", "ties")  # ends of the two places
    assert replace(found, methods=("ties", "ties"), outs=("a/x", "b/x")).names == ("first", "second")
    page = Page(render_comparison(found))
    heads = [e.text for e in page.all("th", scope="col")]
    assert {"actmat", "ties", "ties − actmat", "‖D‖ actmat"} <= set(heads)
    assert "first" not in heads
    assert found.sizes is not None
    assert "between them" in page.one("section", id="summary").text
    assert page.one("span", class_="issue").text == "issue found, 3 tensors"
    assert len(page.all("rect", class_="e0")) == len(page.all("rect", class_="e1")) > 2


@needs_browser
def test_on_a_phone_the_sections_are_a_list_that_opens(tmp_path: Path) -> None:
    probe = """
    const [menu, list] = [all("nav .menu")[0], all("nav ul")[0]];
    const shown = () => window.getComputedStyle(list).display;
    const seen = [window.getComputedStyle(menu).display, shown(), menu.getAttribute("aria-expanded")];
    menu.click();
    seen.push(shown(), menu.getAttribute("aria-expanded"), all("nav a").length);
    all("nav a")[3].click();
    seen.push(shown(), document.documentElement.scrollWidth - document.documentElement.clientWidth);
    const first = all(".banner")[0].getBoundingClientRect();
    return [...seen, all("h1")[0].getBoundingClientRect().top < first.top];
    """
    seen = look(str(page_of(checks=[SIZE]).source), probe, tmp_path, width=390)
    assert seen.console == []
    assert seen.found == ["block", "none", "false", "grid", "true", 11, "none", 0, True]


@needs_browser
def test_the_verdict_is_above_the_fold(tmp_path: Path) -> None:
    probe = """
    const bottom = (css) => all(css).map((e) => e.getBoundingClientRect().bottom);
    return [...bottom(".banner"), ...bottom(".pair")].every((y) => y > 0 && y < 900);
    """
    assert look(page_of(checks=[SIZE]).source, probe, tmp_path, width=1280).found is True
