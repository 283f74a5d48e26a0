"""What figures are drawn from: sums over layers against plain loops, scales, ticks, curves."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from tests.helpers.pages import Page, drawn
from tests.helpers.reports import HOSTILE, SHOWN, diagnosis
from tests.tolerances import F64_IDENTITY

from actmat.diagnostics.model import Spectrum
from actmat.extras.pages.html import render_html
from actmat.extras.pages.html.charts import Cell, Curve, HeatMap, Line, Strip, curve, largest_strips, layer_lines, scree
from actmat.extras.pages.html.environment import data_block, environment, spelled
from actmat.extras.pages.html.measures import (
    kind_of_name,
    kinds,
    layers_of,
    overall_cosine,
    overall_share,
    residual_over,
)
from actmat.extras.pages.html.scales import (
    diverging,
    log_axis,
    number,
    percent,
    positive_axis,
    residual_level,
    residual_sign,
    residual_text,
    tick_indices,
)
from actmat.foreign import terminal

POSITIVE = st.floats(1e-12, 1e12)

# Markup


def test_templates_escape_texts_and_keep_elements() -> None:
    made = environment().from_string(
        "{% set inner %}<b>{{ x }}</b>{% endset %}<p title='{{ y }}'>{{ inner }}{{ z }}{{ 3 }}</p>"
    )
    assert made.render(x="<i>&", z=None, y="'\"") == "<p title='&#39;&#34;'><b>&lt;i&gt;&amp;</b>3</p>"
    with pytest.raises(UndefinedError, match="nothing"):
        environment().from_string("{{ nothing }}").render()


def test_no_template_marks_a_text_as_safe() -> None:
    folders = [Path(str(files(name))) / "templates" for name in ("actmat.extras.pages.html", "actmat.extras.tune")]
    found = [file for folder in folders for file in sorted(folder.iterdir())]
    assert len(found) >= 6
    for file in found:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe|autoescape|Markup|xmlattr|tojson", text), file.name


@given(st.text())
def test_any_text_is_shown_in_an_element_an_attribute_and_a_data_block(text: str) -> None:
    made = environment().from_string('<p title="{{ text }}">{{ text }}</p>{{ data_block("rows", {"a": [text]}) }}')
    page = Page(made.render(text=text))
    text = terminal(text, keep="\n\t")  # signs that are not printable, as they are written
    assert page.problems == []
    assert page.one("p").text == text
    assert page.one("p").attributes["title"] == text
    assert page.data == {"a": [text]}


def test_words_between_backticks_are_code_and_nothing_else_is_markup() -> None:
    assert spelled("a `b<` **c**") == "a <code>b&lt;</code> <strong>c</strong>"


@pytest.mark.parametrize("text", [HOSTILE, "<!--", "<script>", "]]>", "</SCRIPT >"])
def test_a_data_block_cannot_be_left(text: str) -> None:
    block = data_block("rows", {text: text})
    assert block.count("<") == 2
    shown = SHOWN if text == HOSTILE else text
    assert json.loads(block[block.index(">") + 1 : block.rindex("<")]) == {shown: shown}


def test_tables_name_their_rows_and_columns() -> None:
    page = drawn("parts.html", "columns_table", ["a", "b"], [["x", "1"], ["<y>", "2"]], caption="both")
    assert page.problems == []
    assert [(e.text, e.attributes["scope"]) for e in page.all("th")] == [
        ("a", "col"), ("b", "col"), ("x", "row"), ("<y>", "row"),
    ]  # fmt: skip


# Scales


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.12345, "0.123"), (99.96, "100"), (1234.5, "1,234"), (1.5e-7, "1.5e-7"), (2e6, "2e6"),
     (-0.5, "-0.5"), (123456.0, "1.23e5")],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(None, "–"), (0, "0 %"), (0.5, "50 %"), (0.0413, "4.1 %"), (0.00001, "< 0.1 %"), (1, "100 %")]
)
def test_percents(share: float | None, text: str) -> None:
    assert percent(share) == text


def test_residuals_have_ten_levels_to_one_and_two_beyond() -> None:
    levels = [residual_level(v) for v in (0.0, 0.05, 0.1, 0.95, 0.9999, 1.0, 1.2499, 1.25, 7.0)]
    assert levels == ["q0", "q0", "q1", "q9", "q9", "h0", "h0", "h1", "h1"]
    assert residual_level(None) == diverging(None) == "none"
    assert [residual_text(v) for v in (None, 0.0, 0.001, 0.005, 0.314)] == ["–", "0.00", "< 0.01", "0.01", "0.31"]
    assert [diverging(v) for v in (0.0, 0.1, -0.1, -1, 0.4)] == ["p0", "p1", "m1", "m4", "p3"]


@given(st.lists(POSITIVE, min_size=1, max_size=9))
def test_axes_hold_all_values_with_few_labels(values: list[float]) -> None:
    axis = positive_axis(values)
    assert axis.low == 0 < max(values) <= axis.high * (1 + 1e-9)
    assert 2 <= len(axis.ticks) <= 6
    assert [axis.position(t) for t in (axis.low, axis.high)] == [0, 1]
    logs = log_axis(values)
    assert logs.low <= min(1.0, *values)
    assert max(1.0, *values) <= logs.high * (1 + 1e-9)
    assert len(logs.ticks) <= 8
    places = [logs.position(v) for v in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= p <= 1 for p in places)


@given(st.integers(1, 3000), st.integers(2, 20))
def test_ticks_are_few_even_and_begin_at_the_first(count: int, wanted: int) -> None:
    places = tick_indices(count, wanted)
    assert places[0] == 0
    assert places[-1] < count
    assert len(places) <= max(wanted, 1)
    assert len({b - a for a, b in itertools.pairwise(places)}) <= 1


# Sums over matrices


def test_sums_over_layers_are_those_of_plain_loops() -> None:
    found = diagnosis(3, 4)
    layers = layers_of(reversed(found.measures))
    assert [x.label for x in layers] == ["0", "1", "2", "3", "other"]
    assert sum(len(x.measures) for x in layers) == len(found.measures)
    for t, summary in enumerate(found.experts_summary):
        assert residual_over(found.measures, t) == pytest.approx(summary.residual, rel=F64_IDENTITY)
    first = layers[0].measures
    top = sum((m.norms[1] * m.residual[1]) ** 2 for m in first) / sum(m.norms[1] ** 2 for m in first)
    assert residual_over(first, 1) == pytest.approx(math.sqrt(top), rel=F64_IDENTITY)


def test_the_overall_cosine_is_that_of_the_matrices_side_by_side() -> None:
    rng = torch.Generator().manual_seed(0)
    experts = [[torch.randn(4, 5, generator=rng, dtype=torch.float64) for _ in range(3)] for _ in range(2)]
    found = diagnosis(2, 1).measures[:3]
    replaced = []
    for i, m in enumerate(found):
        a, b = experts[0][i], experts[1][i]
        c = float((a * b).sum() / (a.norm() * b.norm()))
        fields = {f: getattr(m, f) for f in m.__slots__}
        fields |= {"norms": (float(a.norm()), float(b.norm())), "cosine": ((1.0, c), (c, 1.0))}
        replaced.append(type(m)(**fields))
    flat = [torch.cat([d.flatten() for d in e]) for e in experts]
    wanted = float(torch.dot(*flat) / (flat[0].norm() * flat[1].norm()))
    assert overall_cosine(replaced)[0][1] == pytest.approx(wanted, rel=F64_IDENTITY)
    assert overall_cosine(replaced)[0][0] == pytest.approx(1, rel=F64_IDENTITY)


def test_shares_are_means_over_entries() -> None:
    found = diagnosis(2, 1).measures
    shares = overall_share(found, lambda m: m.sign_conflict)
    assert shares is not None
    sizes = [m.shape[0] * m.shape[1] for m in found]
    mean = sum(n * m.sign_conflict[0][1] for n, m in zip(sizes, found, strict=True) if m.sign_conflict) / sum(sizes)
    assert shares[0][1] == pytest.approx(mean, rel=F64_IDENTITY)
    assert overall_share(found, lambda m: None) is None


def test_kinds_are_those_of_most_energy_in_the_order_of_the_model() -> None:
    names = [name for name, _ in kinds(diagnosis(2, 3).measures, 3)]
    assert len(names) == 3
    every = [name for name, _ in kinds(diagnosis(2, 3).measures, 99)]
    assert names == [n for n in every if n in names]
    assert every[0] == "self_attn.q_proj"
    assert kind_of_name("h.2.attn.c_attn.weight") == "attn.c_attn"


# Drawing


def test_a_gap_lifts_the_pen_and_what_is_no_layer_stands_apart() -> None:
    assert curve([(0, 0.5), None, (2, 0.25), (3, 0)]) == "M0 0.5000M2 0.2500L3 0.0000"
    line = Line("e0", "math", [1.0, 2.0, None, 4.0])
    plot = layer_lines([line], ["0", "1", "2", "other"], positive_axis([4.0]), label="x", floor=1.0)
    page = drawn("charts.html", "plot", plot)
    shown, key = page.all("path", class_="line")
    assert (key.attributes["d"], page.one("div", class_="ends").text) == ("M0 1H4", "math")
    assert shown.attributes["d"] == "M0.5 0.7500L1.5 0.5000"
    assert (page.one("path", class_="dot").attributes["d"] or "").count("M") == 3
    tips = [e.attributes["data-tip"] for e in page.all("rect", class_="hit")]
    assert tips == ["layer 0: math 1", "layer 1: math 2", "layer 2: ", "outside the layers: math 4"]


def test_a_spectrum_falls_from_the_largest_to_the_smallest() -> None:
    spectrum = Spectrum((-4.0, -3.0, -2.0, -1.0, 0.0), (4, 0, 2, 2))
    page = drawn("charts.html", "plot", scree([Curve("d0", "layer 0", spectrum, 4)], label="x"))
    shown = page.all("path", class_="line")[0]
    assert page.one("div", class_="ends").text == "layer 0"
    assert shown.attributes["d"] == ("M0 0.0000L0.25 0.2500L0.5 0.5000L0.5 0.7500L1 1.0000")
    assert page.one("path", class_="stop").attributes["d"] == "M0.5 0.5000h0"
    assert shown.attributes["data-tip"] == "layer 0: 4 of 8 directions kept"


def test_where_few_directions_carry_anything_the_axis_ends_with_them() -> None:
    """As in merges of adapters: the null directions would take the whole width."""
    few = Spectrum((-8.0, -2.0, -1.0, 0.0), (760, 4, 4))
    fewer = Spectrum((-8.0, -2.0, -1.0, 0.0), (764, 2, 2))
    plot = scree([Curve("d0", "layer 0", few, 8), Curve("d1", "layer 1", fewer, 8)], label="x")
    page = drawn("charts.html", "plot", plot)
    first, second = (e.attributes["d"] for e in page.all("path") if "data-tip" in e.attributes)
    assert first == "M0 0.0000L0.5 0.1250L1 0.2500"
    assert second == "M0 0.0000L0.25 0.1250L0.5 0.2500"
    assert [e.attributes["d"] for e in page.all("path", class_="stop")] == ["M1 0.2500h0", "M1 0.2500h0"]
    assert page.one("div", class_="x-axis").text == "00.52 %1 %"


def test_a_residual_near_zero_reads_as_a_sentence() -> None:
    assert (residual_sign(0.25), residual_sign(0.001), residual_sign(0.0)) == ("= 0.25", "< 0.01", "= 0.00")
    alike = replace(diagnosis(2, 2), checks=())
    near = replace(alike, experts_summary=tuple(replace(e, residual=0.001) for e in alike.experts_summary))
    text = Page(render_html(near)).one("section", id="summary").text
    assert ", ρ < 0.01: the merged weights are less than 0.01 of the base's distance away from it; " in text
    assert "fares alike." in text


def test_strips_leave_holes_where_there_is_no_matrix() -> None:
    rows = [Strip("a", [Cell("q1", "here"), None, Cell("h0", "there")], "0.5")]
    page = drawn("charts.html", "strips", HeatMap(rows, ["0", "1", "other"], "all", [0.5]))
    assert [(e.attributes["x"], e.attributes["class"]) for e in page.all("rect")] == [("0", "q1"), ("2", "h0")]
    assert [e.text for e in page.all("span")] == ["0", "1", "other"]


def test_a_strip_shows_the_largest_of_each_cell() -> None:
    items = [("q", 0, 1.0), ("q", 0, 3.0), ("q", 2, 2.0), ("up", 1, 0.5)]
    rows = largest_strips(
        [(kind, [i for i in items if i[0] == kind]) for kind in ("q", "up")],
        [0, 1, 2],
        depth=lambda i: i[1],
        value=lambda i: i[2],
        cell=lambda i: Cell("q1", str(i[2])),
        text=number,
    )
    assert [[None if c is None else c.tip for c in row.cells] for row in rows] == [
        ["3.0", None, "2.0"],
        [None, "0.5", None],
    ]
    assert [(row.name, row.total) for row in rows] == [("q", "3"), ("up", "0.5")]
