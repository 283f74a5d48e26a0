"""`reasoning-small` from end to end with a few steps: stages, caches, tables."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from actmat.errors import RecipeError
from actmat_experiments.harness.request import RunRequest, TableRequest
from actmat_experiments.harness.results import read_scores
from actmat_experiments.reasoning.small import suite

pytestmark = pytest.mark.slow  # the other small suites run the same driver in every run of the tests
SETTINGS = {
    "hidden": "16",
    "intermediate": "32",
    "layers": "1",
    "heads": "2",
    "base_steps": "2",
    "base_batch": "12",
    "steps": "2",
    "prompts": "2",
    "test": "6",
    "validation": "4",
    "samples": "4",
    "k": "2",
    "measured": "8",
    "validation_samples": "2",
    "scales": "0.5,1.0",
}
METHODS = ["average", "actmat", "regmean"]


def request(cache: Path, **changes: object) -> RunRequest:
    settings = SETTINGS | dict(changes.pop("settings", {}))  # type: ignore[call-overload]
    return RunRequest("reasoning-small", cache, settings=settings, **{"methods": METHODS, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("cache")
    suite.run(request(folder))
    return folder


def test_all_rows_and_columns_are_scored(cache: Path) -> None:
    scores = read_scores(cache / "scores" / "reasoning-small.jsonl")
    columns = {s.task for s in scores}
    assert columns == {"add@1", "add@2", "sort@1", "sort@2", "form@1", "form@2"}
    rows = {(s.scale, s.method) for s in scores}
    references = {"base", "expert add", "expert sort", "expert form", "experts"}
    assert {m for scale, m in rows if scale == "default"} == references | set(METHODS)
    assert {m for scale, m in rows if scale == "tuned"} == set(METHODS)
    assert len(scores) == len(rows) * len(columns)
    assert {s.detail["scale"] for s in scores if s.scale == "tuned"} <= {0.5, 1.0}
    assert all(s.total == 6 for s in scores)


def shown(cache: Path, width: int = 80, **how: object) -> str:
    file = io.StringIO()
    console = Console(width=width, file=file, highlight=False)
    suite.table(TableRequest("reasoning-small", cache, console=console, **how))  # type: ignore[arg-type]
    return file.getvalue()


def test_tables_fit_the_terminal_and_name_what_they_show(cache: Path) -> None:
    text = shown(cache)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("add@1", "form@2", "expert sort", "regmean", "tuned", "6 prompts", "seeds 0"):
        assert word in " ".join(text.split()), word
    page = shown(cache, width=300, markdown=True)
    assert "| add@1 | add@2 |" in page
    assert "±" in page
    assert page.count("`actmat`") >= 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": ["adding"]}, "'add"),
        ({"regimes": ("lora",)}, "--lora"),
        ({"data": Path("x")}, "--data"),
        ({"models": ["x"]}, "--models"),
        ({"settings": {"stepz": "1"}}, "steps"),
        ({"settings": {"steps": "many"}}, "steps"),
        ({"methods": ["fisher"]}, "fisher"),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_made(
    changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        suite.run(request(tmp_path, **changes))
    assert said in " ".join([str(caught.value), *caught.value.problems])
    assert not list(tmp_path.iterdir())
