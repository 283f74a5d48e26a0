"""The pages as text: well-formed, complete, self-contained, small, the same every time, and safe with any name."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from tests.helpers.comparisons import comparison
from tests.helpers.pages import Page
from tests.helpers.reports import HOSTILE, SHOWN, diagnosis, diagnosis_json, hostile

from actmat.diagnostics.model import Diagnosis
from actmat.errors import OutputError
from actmat.extras.pages.html import render_html, write_html
from actmat.extras.pages.html.comparison import render_comparison, write_comparison
from actmat.extras.pages.html.environment import CAVEAT, listed
from actmat.extras.pages.html.tensors import DETAILED, PAGE_ROWS
from actmat.extras.pages.html.verdicts import rho_words
from actmat.recipe import make_recipe
from actmat.report.words import plural

SECTIONS = [
    "summary", "checks", "experts", "layers", "overlap", "spectra", "norms", "rounding", "cost", "tensors", "recipe",
]  # fmt: skip


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render_html(diagnosis(3, 8)))


def test_it_is_well_formed_and_has_all_sections(page: Page) -> None:
    assert page.problems == []
    assert page.sections == SECTIONS
    assert [a.attributes["href"] for a in page.all("a") if "nav" in a.parents] == [f"#{s}" for s in SECTIONS]
    assert len(page.all("h1")) == 1
    assert page.one("meta", name="viewport")
    assert page.one("html").attributes["lang"] == "en"


def test_it_asks_nothing_of_the_network(page: Page) -> None:
    loading = [e for e in page.elements if {"src", "srcset", "action", "poster"} & e.attributes.keys()]
    assert loading == []
    assert page.all("link") == page.all("iframe") == page.all("img") == []
    places = {str(e.attributes.get("href", "")).partition(":")[0] for e in page.all("a")}
    assert places == {"data"} | {f"#{s}" for s in [*SECTIONS, "content", "check-AM101", "check-AM204"]}
    assert "url(" not in page.source
    assert "@import" not in page.source


def test_only_its_own_script_may_run(page: Page) -> None:
    policy = page.one("meta", http_equiv="Content-Security-Policy").attributes["content"] or ""
    script = next(e for e in page.all("script") if "type" not in e.attributes)
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}';" in policy
    assert not [e for e in page.elements if any(a.startswith("on") for a in e.attributes)]


def test_figures_have_names_and_tables_beside_them(page: Page) -> None:
    assert len(page.all("svg", class_="plot")) >= 10
    assert len(page.all("svg", class_="strip")) == 3 + 8
    for svg in page.all("svg"):
        assert svg.attributes["role"] == "img"
        assert svg.attributes["aria-label"] is not None
    assert len(page.all("details", class_="numbers")) == 4
    assert all(e.attributes.get("scope") for e in page.all("th"))
    assert all("table" in e.parents for e in page.all("caption"))


def test_it_says_what_the_residual_is_not(page: Page) -> None:
    assert "not a forecast of quality" in CAVEAT
    for section in ("summary", "layers"):
        assert CAVEAT in page.one("section", id=section).text


def test_the_summary_is_in_words(page: Page) -> None:
    text = page.one("section", id="summary").text
    assert "3 experts of models/base (math, code and chat) were merged with actmat." in text
    assert "66 tensors: 57 merged by the rule, 9 averaged (mean of the deltas)." in text
    assert "Look before you use it: the checks found 1 issue." in text
    assert re.search(r"math, ρ = [\d.]+: the merged weights are [\d.]+ of the base's distance away", text)
    assert "; best is chat with" in text
    assert "and 0.8 times the norm of their sum." in text
    assert "2 clear, 2 without a verdict" in text


def test_experts_have_a_verdict_each(page: Page) -> None:
    found = diagnosis(3, 8)
    rows = page.one("section", id="experts").text
    for summary in found.experts_summary:
        assert f"{summary.residual:.2f}" in rows
        assert rho_words(summary.residual)[1] in rows
        for worst in summary.worst[:3]:
            assert worst.name.removesuffix(".weight") in rows


@pytest.mark.parametrize(
    ("residual", "word"),
    [(0.0, "met"), (0.0999, "met"), (0.1, "mostly met"), (0.5, "partly met"), (0.999, "partly met"), (1.0, "not met")],
)
def test_verdicts_change_at_a_tenth_a_half_and_one(residual: float, word: str) -> None:
    assert rho_words(residual)[0] == word


def test_checks_are_ordered_and_lead_to_tensors(page: Page) -> None:
    cards = page.all("article", class_="check")
    assert [c.attributes["id"] for c in cards] == ["check-AM101", "check-AM204"]
    assert "docs/checks.md" not in page.source
    assert "Delta below the rounding of its storage" in cards[0].text
    links = [e for e in page.all("a", class_="find") if "article" in e.parents]
    assert links[0].attributes["data-find"] == "model.layers.0.self_attn.q_proj.weight"
    assert "Muted by the recipe." in page.one("ul", class_="quiet").text


def test_an_address_of_documentation_becomes_a_link_and_nothing_else_does() -> None:
    data = diagnosis_json(2, 2)
    data["checks"][0]["docs"] = "https://example.org/checks#am101"
    data["checks"][1]["docs"] = "javascript:alert(1)"
    found = [e.attributes["href"] for e in Page(render_html(Diagnosis.from_json(data))).all("a", rel="noreferrer")]
    assert found == ["https://example.org/checks#am101"]


def test_every_tensor_is_in_the_data(page: Page) -> None:
    found, data = diagnosis(3, 8), page.data
    columns = {c["title"]: c for c in data["columns"]}
    assert columns["tensor"]["values"] == [t.name for t in found.tensors]
    reasons = columns["reason"]
    assert [reasons["words"][i] for i in reasons["values"]] == [t.reason for t in found.tensors]
    worst = {m.name: max(m.residual) for m in found.measures}
    shown = columns["largest ρ"]["values"]
    assert shown == [pytest.approx(worst[t.name], rel=1e-3) if t.name in worst else None for t in found.tensors]
    assert len(page.all("tr")) > PAGE_ROWS
    detail = data["details"]["matrices"][str([t.name for t in found.tensors].index("lm_head.weight"))]
    assert detail[0]["values"][5] == pytest.approx(found.measures[-1].residual, rel=1e-3)
    assert sum(detail[0]["counts"]) == sum(found.measures[-1].spectrum.counts)


def test_the_recipe_on_the_page_makes_the_same_merge(page: Page) -> None:
    texts = [e.text for e in page.all("code") if "pre" in e.parents]
    wanted = make_recipe(diagnosis(3, 8).recipe)
    assert make_recipe(yaml.safe_load(texts[0])) == wanted
    assert texts[1:] == ["actmat merge recipe.yaml --out models/merged", "actmat verify models/merged"]
    download = next(str(e.attributes["href"]) for e in page.all("a") if "download" in e.attributes)
    assert make_recipe(yaml.safe_load(unquote(download.partition(",")[2]))) == wanted


def test_the_place_of_the_output_is_quoted_for_the_shell() -> None:
    data = diagnosis_json(2, 2) | {"out": "my merge; rm -rf x"}
    assert "--out 'my merge; rm -rf x'" in Page(render_html(Diagnosis.from_json(data))).one("section", id="recipe").text


def test_hostile_names_stay_text() -> None:
    data = hostile(diagnosis_json(3, 4))
    page = Page(render_html(Diagnosis.from_json(data)))
    assert page.problems == []
    assert page.sections == SECTIONS
    assert len(page.all("script")) == 2
    assert page.all("img") == []
    assert HOSTILE not in page.source
    assert page.data["columns"][0]["values"][0] == "model.embed_tokens.weight" + SHOWN
    assert not re.search(r"[<>&\u2028]", page.one("script", id="rows").text)
    recipe = next(e.text for e in page.all("code") if "pre" in e.parents)
    assert yaml.safe_load(recipe) == data["recipe"]


def test_what_is_no_unicode_can_still_be_written(tmp_path: Path) -> None:
    data = diagnosis_json(2, 2)
    data["tensors"][0]["name"] = "half of a pair \ud800"
    found = Diagnosis.from_json(diagnosis_json(2, 2))
    row = found.tensors[0].__class__(**{**data["tensors"][0], "shape": (1,)})
    odd = found.__class__(**{**{f: getattr(found, f) for f in found.__slots__}, "tensors": (row,)})
    assert "half of a pair" in write_html(odd, tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_same_diagnosis_gives_the_same_page(tmp_path: Path) -> None:
    found = diagnosis(3, 3)
    again = Diagnosis.from_json(json.dumps(found.to_json()))
    assert render_html(found) == render_html(again)
    assert write_html(found, tmp_path / "a" / "r.html").read_bytes() == render_html(again).encode()
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["r.html"]


def test_eight_experts_and_five_hundred_matrices_stay_below_a_megabyte() -> None:
    found = diagnosis(8, 71)
    assert len(found.measures) >= 498
    assert len(render_html(found).encode()) < 1_000_000


def test_with_very_many_matrices_the_page_says_what_it_leaves_out() -> None:
    found = diagnosis(2, 300)
    page = Page(render_html(found))
    assert len(page.source.encode()) < 4_000_000
    kept = sum(len(m) for m in page.data["details"]["matrices"].values())
    assert kept == DETAILED
    lead = page.one("section", id="tensors").text
    assert f"{len(found.measures) - DETAILED:,} more are in report.json" in lead
    lowest = min(max(m["values"][5]) for ms in page.data["details"]["matrices"].values() for m in ms)
    assert sum(m.contested > lowest * 1.001 for m in found.measures) < DETAILED


def test_what_was_not_measured_is_left_out() -> None:
    data = diagnosis_json(1, 2)
    for measure in data["measures"]:
        measure |= {"snr": None, "sign_conflict": None, "relative_norms": None, "rank_kept": None, "energy_kept": None}
    data["totals"] |= {"seconds": None, "peak_bytes": None, "bytes_read": None, "bytes_written": None}
    data["totals"]["stages"] = {"measure": None}
    page = Page(render_html(Diagnosis.from_json(data)))
    assert page.problems == []
    assert page.sections == [s for s in SECTIONS if s not in ("overlap", "rounding")]
    assert "None" not in re.sub(r"<script.*?</script>", "", page.source, flags=re.DOTALL).replace("None of", "")
    bare = data | {"measures": [], "checks": []}
    bare["experts_summary"] = [s | {"residual": 0.0, "energy_share": 0.0, "worst": []} for s in data["experts_summary"]]
    page = Page(render_html(Diagnosis.from_json(bare)))
    assert page.sections == ["summary", "checks", "experts", "cost", "tensors", "recipe"]
    assert "No matrix was measured" in page.one("section", id="summary").text
    assert "no change" in page.one("section", id="experts").text


def test_answers_stand_beside_the_experts_where_there_are_any() -> None:
    data = diagnosis_json(3, 2)
    assert "answers" not in Page(render_html(Diagnosis.from_json(data))).one("section", id="experts").text.lower()
    row = {"expert": "code", "data": HOSTILE, "disagreement": 0.25, "divergence": 0.125, "predictions": 640}
    page = Page(render_html(Diagnosis.from_json(data | {"agreement": [row]})))
    assert page.problems == []
    text = page.one("section", id="experts").text
    assert re.search(r"code\s*25 %\s*0\.125\s*640", text)
    assert SHOWN in text
    assert "forecasts no accuracy" in text
    held = {"expert": "math", "statistics": "stats/math", "residual": 0.25, "matrices": 14}
    unmoved = held | {"expert": "code", "residual": None}
    other = Page(render_html(Diagnosis.from_json(data | {"residual_on_data": [held, unmoved]})))
    assert other.problems == []
    text = other.one("section", id="experts").text
    assert re.search(r"math\s*0\.25\s*14\s*stats/math", text)
    assert re.search(r"code\s*–\s*14\s*stats/math", text)


def test_a_directory_is_no_place_for_a_page(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"found the directory .*add a name"):
        write_html(diagnosis(2, 2), tmp_path)


def test_words() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more"
    assert (plural(1, "matrix", "matrices"), plural(1200, "matrix", "matrices")) == ("1 matrix", "1,200 matrices")


def test_the_comparison_is_complete_and_safe(tmp_path: Path) -> None:
    page = Page(render_comparison(comparison()))
    assert page.problems == []
    assert page.sections == ["summary", "settings", "experts", "checks", "layers", "tensors"]
    assert "8 of 9 tensors differ." in page.one("section", id="summary").text
    assert "code (in the second coding)" in page.one("section", id="summary").text
    assert "+0.25" in page.one("section", id="experts").text
    assert CAVEAT in page.one("section", id="experts").text
    assert "issue found, 3 tensors" in page.one("section", id="checks").text
    assert page.data["columns"][5]["values"][:3] == [0.0, 0.1, 0.3]
    unsafe = comparison(HOSTILE)
    page = Page(write_comparison(unsafe, tmp_path / "c.html").read_text(encoding="utf-8"))
    assert page.problems == []
    assert len(page.all("script")) == 2
    assert HOSTILE not in page.source
    assert page.source == render_comparison(unsafe)
