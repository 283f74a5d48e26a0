"""The pages in a real browser: nothing complains, the table filters and sorts, nothing sticks out, no name runs."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.browser import look, needs_browser
from tests.helpers.comparisons import comparison
from tests.helpers.reports import HOSTILE, diagnosis, diagnosis_json, hostile

from actmat.diagnostics.model import Diagnosis
from actmat.extras.pages.html import render_html
from actmat.extras.pages.html.comparison import render_comparison

pytestmark = needs_browser

OVERFLOW = """
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
"""

USE = """
const [search, ...selects] = all(".controls input, .controls select");
const rows = () => all("table.big > tbody > tr:not(.detail)").map((r) => r.cells[0].textContent);
const count = () => all(".controls output")[0].textContent;
const seen = { start: rows().length, count: count() };
type(search, "q_proj LAYERS.3");
seen.words = rows();
type(search, "no such thing");
seen.none = [rows().length, count()];
type(search, "");
const action = selects.find((s) => s.options[0].textContent === "any action");
type(action, [...action.options].find((o) => o.textContent === "average").value);
seen.averaged = [count(), all("table.big > tbody > tr").every((r) => r.cells[1].textContent === "average")];
type(action, "");
const heads = () => all("table.big > thead th");
const byRho = heads().find((h) => h.textContent === "largest ρ");
byRho.querySelector("button").click();
seen.sorted = all("table.big > tbody > tr:not(.detail)").map((r) => Number(r.cells[7].textContent));
seen.direction = byRho.getAttribute("aria-sort");
heads()[0].querySelector("button").click();
seen.natural = rows().slice(0, 12);
all(".controls button")[1].click();
seen.second = [rows().length, count(), all(".controls button")[1].disabled];
all("#checks [data-find]")[0].click();
seen.linked = [search.value, rows(), ...[".detail", ".detail tbody tr", ".detail rect"].map((css) => all(css).length)];
seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
all("table.big .open")[0].click();
seen.closed = all(".detail").length;
const cell = all(".strip rect")[0];
cell.dispatchEvent(new window.PointerEvent("pointermove", { bubbles: true, clientX: 30, clientY: 30 }));
const tip = document.getElementById("tip");
seen.tip = [tip.hidden, tip.textContent === cell.dataset.tip, tip.textContent];
seen.copy = all(".copy").every((b) => !b.hidden);
seen.heights = all("svg.plot, svg.strip").filter((s) => s.getBoundingClientRect().height < 8).length;
return seen;
"""


def test_the_report_works_in_a_browser(tmp_path: Path) -> None:
    seen = look(render_html(diagnosis(3, 8)), USE, tmp_path)
    assert seen.console == []
    found = seen.found
    assert "failed" not in found, found
    assert found["wide"] == 0
    assert (found["start"], found["count"]) == (50, "1–50 of 66")
    assert found["words"] == ["model.layers.3.self_attn.q_proj.weight"]
    assert found["none"] == [0, "none of 66"]
    assert found["averaged"] == ["1–9 of 9 (of 66)", True]
    assert found["sorted"] == sorted(found["sorted"], reverse=True)
    assert found["direction"] == "descending"
    assert found["natural"][0] == "lm_head.weight"
    assert found["second"] == [16, "51–66 of 66", True]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert found["linked"] == [f'"{name}"', [name], 1, 3, 24]
    assert found["closed"] == 0
    assert found["tip"][:2] == [False, True]
    assert "math: ρ" in found["tip"][2]
    assert found["copy"]
    assert found["heights"] == 0


def test_on_a_phone_nothing_sticks_out_and_rows_are_cards(tmp_path: Path) -> None:
    probe = (
        'all("table.big .open")[2].click();'
        + OVERFLOW
        + """
    const edge = document.documentElement.clientWidth;
    const inside = (e) => e.closest(".scroll, nav, pre, .unseen, .numbers") === null;
    const style = (e) => window.getComputedStyle(e);
    const out = all("main *").filter((e) => inside(e) && e.getBoundingClientRect().right > edge + 1);
    const small = all(".x-axis span, .y-axis span").filter((e) => parseFloat(style(e).fontSize) < 10);
    const card = style(all("table.big tbody tr")[0]).display;
    return { wide, out: out.map((e) => e.outerHTML.slice(0, 80)), small: small.length, card };
    """
    )
    seen = look(render_html(diagnosis(8, 71)), probe, tmp_path, width=390)
    assert seen.console == []
    assert seen.found == {"wide": 0, "out": [], "small": 0, "card": "block"}


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    page = render_html(Diagnosis.from_json(hostile(diagnosis_json(3, 4))))
    probe = (
        OVERFLOW
        + """
    all("table.big .open")[3].click();
    const cell = all(".strip rect")[0];
    cell.dispatchEvent(new window.PointerEvent("pointermove", { bubbles: true, clientX: 30, clientY: 30 }));
    return { wide, hacked: window.hacked ?? null, images: all("img").length, scripts: all("script").length,
             name: all("table.big tbody th")[0].textContent, tip: document.getElementById("tip").textContent };
    """
    )
    seen = look(page, probe, tmp_path)
    assert seen.console == []
    assert (seen.found["hacked"], seen.found["images"], seen.found["scripts"]) == (None, 0, 2)
    assert seen.found["name"].startswith("model.embed_tokens.weight</script><script>window.hacked=1</script>")
    assert "</script>" in seen.found["tip"]


def test_twenty_thousand_tensors_stay_usable(tmp_path: Path) -> None:
    page = render_html(diagnosis(2, 40, extra=20_000))
    assert len(page.encode()) < 4_000_000
    probe = """
    const search = all(".controls input")[0];
    const started = window.performance.now();
    type(search, "extra.19");
    all("table.big > thead th")[0].querySelector("button").click();
    return { rows: all("table.big > tbody > tr").length, count: all(".controls output")[0].textContent,
             seconds: (window.performance.now() - started) / 1000, elements: all("*").length };
    """
    found = look(page, probe, tmp_path).found
    assert found["rows"] == 50
    assert found["count"] == "1–50 of 1,111 (of 20,322)"
    assert found["elements"] < 10_000
    assert found["seconds"] < 5


def test_the_comparison_works_in_a_browser(tmp_path: Path) -> None:
    probe = (
        OVERFLOW
        + """
    const search = all(".controls input")[0];
    all("#layers [data-find]")[0].click();
    return { wide, search: search.value, rows: all("table.big > tbody > tr").length, cells: all(".strip rect").length };
    """
    )
    seen = look(render_comparison(comparison()), probe, tmp_path, width=390)
    assert seen.console == []
    assert seen.found == {"wide": 0, "search": '"model.layers.3.mlp.up_proj.weight"', "rows": 1, "cells": 8}


def test_the_probe_sees_what_would_be_wrong(tmp_path: Path) -> None:
    page = f"<!DOCTYPE html><title>x</title><p style='width:600px'>{HOSTILE}</p><script>console.error('seen')</script>"
    seen = look(page, OVERFLOW + "return { wide, hacked: window.hacked };", tmp_path, width=390)
    assert seen.found["hacked"] == 1
    assert seen.found["wide"] > 100
    assert any("seen" in line for line in seen.console)
