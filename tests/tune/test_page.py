"""The page of a search: its verdict first, axes that hold all points, nothing that sticks out on a phone."""

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.browser import look, needs_browser
from tests.helpers.pages import Page

from actmat.extras.tune.evaluate import Trial
from actmat.extras.tune.page import render_tune
from actmat.extras.tune.report import Rival, TuneReport
from actmat.extras.tune.space import MergeChoice, TuneCandidate
from actmat.recipe import Recipe


def trial(method: str, scale: float, mean: float) -> Trial:
    losses = {"math": mean - 0.1, "code": mean + 0.1}
    return Trial(TuneCandidate(MergeChoice(method, {}), scale), losses, dict.fromkeys(losses, 0.5))


def report(*others: Rival, worst: float = 0.9) -> TuneReport:
    trials = [trial(m, s, base + s) for m, base in (("average", 0.3), ("ties", 0.4)) for s in (0.2, 0.3, 0.5, 1.0)]
    trials.append(trial("dare", 1.0, worst))
    chosen = trials[0]
    losses = dict(chosen.losses)
    missing: Any = None
    return TuneReport(
        out=Path("best"), recipe=Recipe.model_validate({"base": "b", "experts": ["e"]}), chosen=chosen, trials=trials,
        front=[chosen], finals=[Rival("average x 0.2 (chosen)", losses, losses, 0.5), *others], score="divergence",
        refused={}, notes=[], seconds=3.0, merged=missing,
    )  # fmt: skip


def rival(name: str, low: float, high: float) -> Rival:
    return Rival(name, {"math": 0.6, "code": 0.6}, {"math": 0.6, "code": 0.6}, 0.6, low, high)


@pytest.mark.parametrize(
    ("others", "kind", "words"),
    [
        ([rival("base", 0.1, 0.2)], "good", "It beats base."),
        ([rival("base", 0.1, 0.2), rival("average", -0.1, 0.2)], "tip", "It cannot be told apart from average."),
        ([rival("base", -0.2, -0.1)], "bad", "It is beaten by base."),
    ],
)
def test_it_leads_with_whether_the_winner_wins(others: list[Rival], kind: str, words: str) -> None:
    page = Page(render_tune(report(*others)))
    assert page.problems == []
    banner = page.one("div", class_="banner")
    assert banner.attributes["class"] == f"banner {kind}"
    assert banner.text.startswith("Chosen: average x 0.2.")
    assert words in banner.text
    assert len(page.all("rect", class_="bar")) == 1 + len(others)


@needs_browser
def test_nothing_sticks_out_on_a_phone(tmp_path: Path) -> None:
    probe = """
    const edge = document.documentElement.clientWidth;
    const inside = (e) => !e.closest(".scroll, .numbers, .unseen");
    const out = all("main *").filter((e) => inside(e) && e.getBoundingClientRect().right > edge + 1);
    return [document.documentElement.scrollWidth - edge, out.map((e) => e.outerHTML.slice(0, 60))];
    """
    seen = look(render_tune(report(rival("base", 0.1, 0.2))), probe, tmp_path, width=390)
    assert seen.console == []
    assert seen.found == [0, []]
