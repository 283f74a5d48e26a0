"""The pages as text: well-formed, complete, self-contained, the same every time, safe with any name."""

import json
import math
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from tests.helpers.pages import Page
from tests.helpers.reports import HOSTILE, diagnosis, diagnosis_json, hostile
from tests.tolerances import F64_IDENTITY

from actmat.diagnostics.model import Diagnosis
from actmat.errors import OutputError
from actmat.extras.pages.html import render_html, write_html
from actmat.extras.pages.html.environment import dotted, environment, listed
from actmat.extras.pages.html.report import layers_of, overall_cosine, residual_over
from actmat.extras.pages.html.scales import (
    number,
    percent,
    range_axis,
    residual_level,
    residual_text,
)
from actmat.foreign import terminal
from actmat.recipe import make_recipe
from actmat.report.words import plural

SECTIONS = ["good", "experts", "layers", "recipe"]
SIZE = {
    "code": "AM402", "title": "Merged delta is much larger than the experts'", "severity": "tip",
    "message": "The merged delta has 9 times the mean expert's norm", "tensors": [], "count": 0,
}  # fmt: skip
ANSWERS = {
    "expert": "code", "data": "d.jsonl", "inputs": 4, "kept": 3, "disagreement": 0.25, "divergence": 0.125,
    "predictions": 640,
}  # fmt: skip


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render_html(diagnosis(3, 8)))


def page_of(**changes: Any) -> Page:
    return Page(render_html(Diagnosis.from_json(diagnosis_json(3, 4) | changes)))


def text_of(page: Page, section: str) -> str:
    return " ".join(page.one("section", id=section).text.split())


# The whole page


def test_it_is_well_formed_and_has_four_sections(page: Page) -> None:
    assert page.problems == []
    assert page.sections == SECTIONS
    assert [a.attributes["href"] for a in page.all("a") if "nav" in a.parents] == [f"#{s}" for s in SECTIONS]
    assert len(page.all("h1")) == 1
    assert page.one("meta", name="viewport")
    assert page.one("html").attributes["lang"] == "en"


def test_it_asks_nothing_of_the_network_and_runs_no_script(page: Page) -> None:
    assert [e for e in page.elements if {"src", "srcset", "action", "poster"} & e.attributes.keys()] == []
    for tag in ("script", "link", "iframe", "img"):
        assert page.all(tag) == []
    assert all(str(e.attributes.get("href", "")).startswith("#") for e in page.all("a"))
    assert "url(" not in page.source
    assert "@import" not in page.source
    policy = page.one("meta", http_equiv="Content-Security-Policy").attributes["content"] or ""
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline';")
    assert not [e for e in page.elements if any(a.startswith("on") for a in e.attributes)]


def test_figures_have_names_and_tables_beside_them(page: Page) -> None:
    for svg in page.all("svg"):
        assert svg.attributes["role"] == "img"
        assert svg.attributes["aria-label"] is not None
    assert len(page.all("details", class_="numbers")) == 1
    assert all(e.attributes.get("scope") for e in page.all("th"))


def test_the_same_diagnosis_gives_the_same_page(tmp_path: Path) -> None:
    found = diagnosis(3, 3)
    again = Diagnosis.from_json(json.dumps(found.to_json()))
    assert render_html(found) == render_html(again)
    assert write_html(found, tmp_path / "a" / "r.html").read_bytes() == render_html(again).encode()
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["r.html"]
    with pytest.raises(OutputError, match=r"is a directory.*add a name"):
        write_html(found, tmp_path)


def test_large_merges_stay_small_pages() -> None:
    assert len(render_html(diagnosis(8, 71)).encode()) < 300_000
    assert len(render_html(diagnosis(2, 300, extra=20_000)).encode()) < 700_000


@given(st.text())
def test_any_text_is_shown_in_an_element_and_an_attribute(text: str) -> None:
    page = Page(environment().from_string('<p title="{{ text }}">{{ text }}</p>').render(text=text))
    text = terminal(text, keep="\n\t")  # signs that are not printable, as they are written
    assert page.problems == []
    assert page.one("p").text == page.one("p").attributes["title"] == text


def test_templates_escape_texts_and_keep_elements() -> None:
    made = environment().from_string(
        "{% set inner %}<b>{{ x }}</b>{% endset %}<p title='{{ y }}'>{{ inner }}{{ z }}{{ 3 }}</p>"
    )
    assert made.render(x="<i>&", z=None, y="'\"") == "<p title='&#39;&#34;'><b>&lt;i&gt;&amp;</b>3</p>"
    with pytest.raises(UndefinedError, match="nothing"):
        environment().from_string("{{ nothing }}").render()
    for name in ("actmat.extras.pages.html", "actmat.extras.tune"):
        for file in (Path(str(files(name))) / "templates").iterdir():
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"\|\s*safe|autoescape|Markup|xmlattr|tojson", text), file.name


def test_hostile_names_stay_text() -> None:
    data = hostile(diagnosis_json(3, 4))
    page = Page(render_html(Diagnosis.from_json(data | {"agreement": [ANSWERS | {"expert": f"code{HOSTILE}"}]})))
    assert page.problems == []
    assert page.sections == SECTIONS
    assert page.all("script") == page.all("img") == []
    assert HOSTILE not in page.source
    recipe = next(e.text for e in page.all("code") if "pre" in e.parents)
    assert yaml.safe_load(recipe) == data["recipe"]


def test_half_of_a_surrogate_pair_can_still_be_written(tmp_path: Path) -> None:
    odd = replace(diagnosis(2, 2), method="half of a pair \ud800")
    assert "half of a pair" in write_html(odd, tmp_path / "report.html").read_text(encoding="utf-8")


def test_sections_without_numbers_are_left_out() -> None:
    data = diagnosis_json(1, 2)
    for measure in data["measures"]:
        measure |= {"snr": None, "relative_norms": None}
    page = Page(render_html(Diagnosis.from_json(data)))
    assert page.problems == []
    assert page.sections == SECTIONS
    assert "Cosines" not in page.source
    assert "None" not in page.source
    bare = Page(render_html(Diagnosis.from_json(data | {"measures": [], "findings": []})))
    assert bare.sections == ["good", "experts", "recipe"]
    assert "No check found anything" in text_of(bare, "good")


# Is it good?


def test_without_answers_it_is_not_measured_and_says_how_to(page: Page) -> None:
    text = text_of(page, "good")
    assert "Not measured: the merged model has not been run." in text
    assert "actmat diagnose models/merged --data math=INPUTS ..." in text
    unwritten = text_of(page_of(out=None, source="diagnose"), "good")
    assert "actmat merge ... --out merged actmat diagnose merged --data" in unwritten


def test_with_answers_it_is_what_was_measured() -> None:
    page = page_of(agreement=[ANSWERS])
    text = text_of(page, "good")
    assert page.problems == []
    assert "kept 3 of 4 answers; compared with no other merge" in text
    assert re.search(r"code\s*3 of 4\s*4\s*–\s*-\s*-\s*d\.jsonl", text)
    rivals = {"without": {"kept": 1, "gained": 5, "lost": 0}, "average": {"kept": 4, "gained": 3, "lost": 1}}
    more = {"inputs": 8, "kept": 6, "measured": True, "low": 0.4, "high": 0.9, "accuracy": 0.25, "expert_accuracy": 1.0}
    text = text_of(page_of(agreement=[ANSWERS | more | rivals]), "good")
    assert re.search(r"code\s*75% \(25.0%\)\s*8\*\s*40 % to 90 %\s*12%\s*50%\s*100 %\s*d\.jsonl", text)
    assert "the merge has seen these inputs" in text
    assert "Not measured" not in text


@pytest.mark.parametrize("residual", [0.0, 0.05, 0.6, 1.2])
def test_no_residual_and_no_norm_is_praised(residual: float) -> None:
    data = diagnosis_json(3, 2)
    data["measures"] = [m | {"residual": [residual] * 3} for m in data["measures"]]
    data["experts"] = [e | {"residual": residual} for e in data["experts"]]
    page = Page(render_html(Diagnosis.from_json(data)))
    words = " ".join(text_of(page, s) for s in ("experts", "layers")).lower()
    assert not re.search(r"\b(met|well|best|fine|ok)\b", words)
    assert "no number here says how the model answers" in words


def test_findings_are_cards_with_issues_first_and_the_rest_is_folded(page: Page) -> None:
    cards = page.all("article", class_="check")
    assert [c.attributes["id"] for c in cards] == ["check-AM101", "check-AM205"]
    assert "0.6 times the rounding step of bfloat16" in cards[0].text
    assert "model.layers.0.self_attn.q_proj.weight" in cards[0].text
    assert "Same expert twice" in page.one("ul", class_="quiet").text
    clear = text_of(page_of(findings=[{**SIZE, "muted": True}]), "good")
    assert "No check found anything; none of them looks at answers." in clear


# Experts, layers, recipe


def test_experts_have_a_row_each() -> None:
    held = {"expert": "math", "statistics": "stats/math", "residual": 0.25, "matrices": 14}
    page = page_of(residual_on_data=[held])
    rows = [" ".join(e.text.split()) for e in page.all("tr") if "section" in e.parents]
    found = diagnosis(3, 4)
    for t, expert in enumerate(found.experts):
        row = next(r for r in rows if r.startswith(f"{expert.name}models/"))
        assert f"{expert.residual:.2f}" in row
        snr = [m.snr[t] for m in found.measures if m.snr]
        assert f"{number(min(snr))} to {number(max(snr))}" in row
        assert row.endswith("0.25" if expert.name == "math" else "–")
    assert "size of the merge is off (AM402)" in text_of(page_of(findings=[SIZE]), "experts")
    assert "size of the merge is off" not in text_of(page, "experts")
    assert "size of the merge is off" not in text_of(page_of(findings=[{**SIZE, "code": "AM203"}]), "experts")


def test_the_recipe_on_the_page_makes_the_same_merge(page: Page) -> None:
    texts = [e.text for e in page.all("code") if "pre" in e.parents]
    assert make_recipe(yaml.safe_load(texts[1])) == make_recipe(diagnosis(3, 8).recipe)
    assert texts[2] == "actmat merge recipe.yaml --out models/merged\nactmat verify models/merged"
    assert "66 tensors: 57 merged, 9 averaged." in text_of(page, "recipe")
    quoted = page_of(out="my merge; rm -rf x")
    assert "--out 'my merge; rm -rf x'" in text_of(quoted, "recipe")


# Numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.12345, "0.123"), (99.96, "100"), (1234.5, "1,234"), (1.5e-7, "1.5e-7"), (2e6, "2e6"),
     (-0.5, "-0.5"), (123456.0, "1.23e5")],
)  # fmt: skip
def test_texts_of_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_texts_and_levels() -> None:
    assert [percent(v) for v in (None, 0, 0.5, 0.0413, 0.00001)] == ["–", "0 %", "50 %", "4.1 %", "< 0.1 %"]
    levels = [residual_level(v) for v in (0.0, 0.1, 0.9999, 1.0, 1.25, None)]
    assert levels == ["q0", "q1", "q9", "h0", "h1", "none"]
    assert [residual_text(v) for v in (None, 0.0, 0.001, 0.005, 0.314)] == ["–", "0.00", "< 0.01", "0.01", "0.31"]
    assert [listed(["a"]), listed(["a", "b", "c"])] == ["a", "a, b and c"]
    assert listed(list("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more"
    assert (plural(1, "matrix", "matrices"), plural(1200, "matrix", "matrices")) == ("1 matrix", "1,200 matrices")
    assert dotted("layers.0.self_attn/q") == "layers.0.<wbr>self_attn/<wbr>q"
    assert dotted("a.vector_to_single_lstm") == "a.<wbr>vector_<wbr>to_<wbr>single_<wbr>lstm"
    assert dotted("<b>") == "&lt;b&gt;"


@pytest.mark.parametrize("values", [[0.466, 0.708], [1.0], [-2.0, 3.0], [0.0, 0.0], [1e-9, 2e-9]])
def test_a_range_has_round_ends_around_its_values(values: list[float]) -> None:
    axis = range_axis(values)
    assert axis.low <= min(values) * (1 + 1e-9) or axis.low <= min(values)
    assert axis.high >= max(values) * (1 - 1e-9)
    assert 2 <= len(axis.ticks) <= 7


def test_sums_over_layers_are_those_of_plain_loops() -> None:
    found = diagnosis(3, 4)
    layers = layers_of(list(reversed(found.measures)))
    assert list(layers) == [0, 1, 2, 3, None]
    for t, expert in enumerate(found.experts):
        assert residual_over(found.measures, t) == pytest.approx(expert.residual, rel=F64_IDENTITY)
    first = layers[0]
    top = sum((m.norms[1] * m.residual[1]) ** 2 for m in first) / sum(m.norms[1] ** 2 for m in first)
    assert residual_over(first, 1) == pytest.approx(math.sqrt(top), rel=F64_IDENTITY)


def test_the_overall_cosine_is_that_of_the_matrices_side_by_side() -> None:
    rng = torch.Generator().manual_seed(0)
    experts = [[torch.randn(4, 5, generator=rng, dtype=torch.float64) for _ in range(3)] for _ in range(2)]
    replaced = []
    for m, a, b in zip(diagnosis(2, 1).measures[:3], *experts, strict=True):
        c = float((a * b).sum() / (a.norm() * b.norm()))
        replaced.append(replace(m, norms=(float(a.norm()), float(b.norm())), cosine=((1.0, c), (c, 1.0))))
    flat = [torch.cat([d.flatten() for d in e]) for e in experts]
    wanted = float(torch.dot(*flat) / (flat[0].norm() * flat[1].norm()))
    assert overall_cosine(replaced)[0][1] == pytest.approx(wanted, rel=F64_IDENTITY)
