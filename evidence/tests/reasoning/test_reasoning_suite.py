"""The suite from end to end with a tiny model: cached, resumed, merged models removed, the paper's table."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evidence.tests.helpers.terminal import console_text

from actmat.errors import CheckpointError, MergeError, RecipeError
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.hub import model_folder
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest, TableRequest
from actmat_experiments.harness.results import Score, append_scores, read_scores
from actmat_experiments.reasoning import evaluate, suite
from actmat_experiments.reasoning.benchmarks import get_benchmarks
from actmat_experiments.reasoning.evaluate import Exam
from actmat_experiments.reasoning.passk import scores_at_k
from actmat_experiments.reasoning.small.model import Size, new_model, save_model

DATA = Path(__file__).parent / "data"
SKILLS = ("math", "code", "instructions")
TASKS = ("aime24", "aime25", "ifeval")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three experts that differ from it a little."""
    folder = tmp_path_factory.mktemp("models")
    for place, name in enumerate(("base", *SKILLS)):
        model = new_model(Size(16, 32, 1, 2), seed=0)
        noise = torch.Generator().manual_seed(place)
        with torch.no_grad():
            for weight in model.parameters() if place else ():
                weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.02)
        save_model(model, folder / name)
        (folder / name / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return folder


def request(there: Path, cache: Path, **changes: object) -> RunRequest:
    settings = {"engine.dtype": "float32", "samples": "2", "max_tokens": "4", "engine.longest": "1024"}
    settings |= {"batch_size": "8"}
    settings |= {skill: str(there / skill) for skill in SKILLS} | dict(changes.pop("settings", {}))  # type: ignore[call-overload]
    given = {
        "tasks": TASKS,
        "methods": ["average", "actmat"],
        "data": DATA,
        "models": [str(there / "base")],
        **changes,
    }
    return RunRequest("reasoning", cache, settings=settings, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cache(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("cache")
    suite.run(request(models, folder))
    return folder


def test_all_models_answer_all_benchmarks(cache: Path) -> None:
    scores = read_scores(cache / "scores" / "reasoning.jsonl")
    rows = {s.method for s in scores}
    assert rows == {"base", "expert math", "expert code", "expert instructions", "experts", "average", "actmat"}
    columns = {s.task for s in scores}
    assert columns == {"aime24@1", "aime24@2", "aime25@1", "aime25@2", "ifeval@1", "ifeval-strict@1"}
    assert len(scores) == len(rows) * len(columns)
    assert {s.total for s in scores if s.task == "ifeval@1"} == {5}
    assert all(s.detail["low"] <= s.share <= s.detail["high"] for s in scores)
    own = {s.task: s.share for s in scores if s.method == "experts"}
    assert own["ifeval@1"] == next(s.share for s in scores if (s.method, s.task) == ("expert instructions", "ifeval@1"))


def test_merged_models_are_removed_when_they_have_answered(cache: Path) -> None:
    assert not list((cache / "reasoning-merges").glob("*/average"))
    assert (cache / "reasoning-answers").is_dir()


def test_a_second_run_draws_nothing(models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*_: object) -> None:
        raise AssertionError("answers were drawn again")

    monkeypatch.setattr(evaluate, "answer_all", draw)
    monkeypatch.setattr(suite, "merge_candidates", draw)
    before = read_scores(cache / "scores" / "reasoning.jsonl")
    suite.run(request(models, cache))
    assert read_scores(cache / "scores" / "reasoning.jsonl") == before


def test_answers_belong_to_the_bytes_of_a_model(models: Path, cache: Path) -> None:
    given = request(models, cache)
    asked = [(b, b.load(DATA)) for b in get_benchmarks(TASKS)]
    exam = Exam(Cache(cache), Watch(), suite._settings(given), asked, 0, "cpu")
    identities = {name: model_folder(str(models / name))[1] for name in ("math", "code")}
    assert exam.answered({"checkpoint": identities["math"]})
    assert not exam.answered({"checkpoint": identities["math"] + "changed"})
    assert identities["math"] != identities["code"]
    assert not replace(exam, seed=1).answered({"checkpoint": identities["math"]})


def test_statistics_come_from_prompts_of_each_expert(models: Path, cache: Path, tmp_path: Path) -> None:
    cache = Path(shutil.copytree(cache, tmp_path / "cache"))
    for skill in SKILLS:
        (tmp_path / f"{skill}.jsonl").write_text(json.dumps({"prompt": f"{skill} 1+2="}) + "\n")
    with_prompts = {"prompts": str(tmp_path), "keep_merged": "true"}
    suite.run(request(models, cache, settings=with_prompts, methods=["regmean"], tasks=["aime25"]))
    assert "regmean" in {s.method for s in read_scores(cache / "scores" / "reasoning.jsonl")}
    (merged,) = (cache / "reasoning-merges").glob("*/regmean")
    manifest = json.loads((merged / "actmat_manifest.json").read_text())
    assert "regmean" in json.dumps(manifest)


def test_missing_prompts_are_named_together(models: Path, tmp_path: Path) -> None:
    (tmp_path / "math.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(CheckpointError) as caught:
        suite.run(request(models, tmp_path / "cache", settings={"prompts": str(tmp_path)}))
    assert len(caught.value.problems) == 3


def test_rules_with_statistics_are_refused_without_prompts(models: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="statistics"):
        suite.run(request(models, tmp_path, methods=["regmean"]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"regimes": ("full", "lora")}, "--lora"),
        ({"models": ["a", "b"]}, "--models"),
        ({"settings": {"math": "none", "code": "none"}}, "two experts"),
        ({"settings": {"sampels": "3"}}, "samples"),
        ({"settings": {"engine.backend": "onnx"}}, "backend"),
        ({"methods": ["actmatt"]}, "actmat"),
        ({"tasks": ["aime2024"]}, "aime24"),
    ],
)
def test_wrong_requests_are_refused_at_once(
    changes: dict[str, object], said: str, models: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        suite.run(request(models, tmp_path, **changes))
    assert said in " ".join([str(caught.value), *caught.value.problems])


def test_a_missing_back_end_is_found_before_models_are_fetched(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "model_folder", lambda location: pytest.fail(f"{location} was fetched"))
    with pytest.raises(MergeError, match="pip install vllm"):
        suite.run(request(models, tmp_path / "cache", settings={"engine.backend": "vllm"}))
    assert not (tmp_path / "cache").exists()


def test_code_is_not_run_where_it_cannot_be_fenced(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actmat_experiments.reasoning.sandbox import run

    monkeypatch.setattr(run, "protections", lambda: dict.fromkeys(run._FENCES, "not on this kernel"))
    with pytest.raises(MergeError, match="fence"):
        suite.run(request(models, tmp_path, tasks=["humaneval"]))
    assert not (tmp_path / "reasoning-answers").exists()


def shown(cache: Path, width: int = 80, **how: object) -> str:
    return console_text(lambda c: suite.table(TableRequest("reasoning", cache, console=c, **how)), width)  # type: ignore[arg-type]


def papers_run(cache: Path, *rows: str) -> None:
    """Scores as of a run of all five benchmarks, with further rows."""
    lines = []
    usual = (("base", 1), ("expert math", 3), ("experts", 3), ("average", 2), ("actmat", 3))
    for method, right in (*usual, *((row, 2) for row in rows)):
        for task in suite.AVERAGED:
            how = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 10}
            like = Score("reasoning", "full", method, "default", task, 0, 0, 0, "olmo", "s", how)
            lines += scores_at_k([right] * 10, 4, (1, 4), like)
    path = cache / "scores" / "reasoning.jsonl"
    path.parent.mkdir(parents=True)
    append_scores(path, lines)


def test_the_papers_figures_stand_beside_an_average_over_the_same_benchmarks(tmp_path: Path) -> None:
    papers_run(tmp_path)
    text = shown(tmp_path)
    assert max(map(len, text.splitlines())) <= 80
    row = next(line for line in text.splitlines() if line.strip().startswith("actmat") and "45.9" in line)
    assert "75.0" in row
    assert "T=0.6, top-p 0.95" in text
    assert "one run and no intervals" in text


def test_a_figure_stands_by_the_row_of_the_papers_own_rule(tmp_path: Path) -> None:
    papers_run(tmp_path, "iso_c", "iso_c_paper", "tsv", "tsv_paper")
    averages = shown(tmp_path, width=400, markdown=True).partition("Average over")[2]
    cells = [[c.strip(" `") for c in line.strip("|").split("|")] for line in averages.splitlines()]
    rows = {row[0]: row for row in cells if len(row) > 2}
    for name, figure in (("iso_c", "40.1"), ("tsv", "43.6")):
        assert figure in rows[f"{name}_paper"]
        assert figure not in rows[name]
        assert "50.0" in " ".join(rows[name]), "the measured average stands in both"


def test_problems_that_nobody_can_solve_stand_under_the_table(tmp_path: Path) -> None:
    papers_run(tmp_path)
    assert "published solution" not in shown(tmp_path)
    path = tmp_path / "scores" / "reasoning.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["task"].startswith("humaneval_plus"):
            row["detail"]["unsolvable"] = ["HumanEval/32"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = " ".join(shown(tmp_path).split())
    assert "humaneval_plus: the published solution of HumanEval/32 fails its own test" in text
    assert text.count("fails its own test") == 1


def test_without_all_five_the_papers_average_is_not_shown(cache: Path) -> None:
    text = shown(cache)
    assert "not the paper's five" in " ".join(text.split())
    assert "41.8" not in text
    assert max(map(len, text.splitlines())) <= 80
