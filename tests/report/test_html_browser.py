"""The pages in a real browser: nothing complains, nothing sticks out, no name runs."""

from pathlib import Path

import pytest
from tests.helpers.browser import look, needs_browser
from tests.helpers.reports import HOSTILE, diagnosis, diagnosis_json, hostile

from actmat.diagnostics.model import Diagnosis
from actmat.extras.pages.html import render_html

pytestmark = needs_browser

PROBE = """
const edge = document.documentElement.clientWidth;
const inside = (e) => e.closest(".scroll, nav, pre, .unseen, .numbers") === null;
const style = (e) => window.getComputedStyle(e);
all("details").forEach((d) => { d.open = true; });
return {
  wide: document.documentElement.scrollWidth - edge,
  out: all("main *").filter((e) => inside(e) && e.getBoundingClientRect().right > edge + 1)
    .map((e) => e.outerHTML.slice(0, 80)),
  small: all(".x-axis span, .y-axis span").filter((e) => parseFloat(style(e).fontSize) < 10).length,
  flat: all("svg.plot").filter((s) => s.getBoundingClientRect().height < 8).length,
  nav: all("nav ul").map((e) => e.scrollWidth > e.clientWidth),
  hacked: window.hacked ?? null, images: all("img").length, scripts: all("main script").length,
};
"""
CLEAN = {"wide": 0, "out": [], "small": 0, "flat": 0, "nav": [False], "hacked": None, "images": 0, "scripts": 0}
PAGES = {
    "report": lambda: render_html(diagnosis(3, 8)),
    "large": lambda: render_html(diagnosis(8, 71)),
    "hostile": lambda: render_html(Diagnosis.from_json(hostile(diagnosis_json(3, 4)))),
}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_sticks_out_and_nothing_runs(name: str, width: int, tmp_path: Path) -> None:
    seen = look(PAGES[name](), PROBE, tmp_path, width=width)
    assert seen.console == []
    assert seen.found == CLEAN


def test_the_probe_sees_what_would_be_wrong(tmp_path: Path) -> None:
    page = f"<!DOCTYPE html><title>x</title><p style='width:600px'>{HOSTILE}</p><script>console.error('seen')</script>"
    seen = look(page, PROBE, tmp_path, width=390)
    assert seen.found["hacked"] == 1
    assert seen.found["wide"] > 100
    assert any("seen" in line for line in seen.console)
