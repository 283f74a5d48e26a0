"""Both suites from end to end on tiny models: stages, cache, scores, tables."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evidence.tests.helpers.language import numbered, tiny_model, write_rows, write_small_data, written_tokenizer
from evidence.tests.helpers.terminal import console_text

from actmat.engine.resources import one_thread
from actmat.errors import RecipeError
from actmat_experiments.harness.report import balanced
from actmat_experiments.harness.request import RunRequest, TableRequest
from actmat_experiments.harness.results import Score, read_scores
from actmat_experiments.harness.suite import score_file
from actmat_experiments.language.exams import counts
from actmat_experiments.language.models import load_t5
from actmat_experiments.language.train import LanguageSettings
from actmat_experiments.suites import get_suite

TINY_TRAINING = {
    f"experts.{regime}.{name}": value
    for regime in ("full", "lora")
    for name, value in {
        "learning_rate": "1e-2",
        "batch_size": "8",
        "max_updates": "4",
        "validate_every": "2",
        "max_length": "48",
        "precision": "no",
    }.items()
} | {"experts.rank": "2", "experts.alpha": "2"}
SMALL = TINY_TRAINING | {
    "architecture.vocabulary": "320",
    "architecture.d_model": "16",
    "architecture.d_kv": "8",
    "architecture.d_ff": "24",
    "architecture.heads": "2",
    "architecture.layers": "1",
    "pretraining.updates": "4",
    "pretraining.batch_size": "8",
    "pretraining.max_length": "32",
    "n_validation": "6",
    "n_test": "10",
    "samples": "6",
}
METHODS = ("average", "knots_tsv", "actmat", "regmean", "fisher")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with one_thread():
        yield


def shown(suite: str, cache: Path, **more) -> str:
    return console_text(lambda console: get_suite(suite).table(TableRequest(suite, cache, console=console, **more)))


def small_request(root: Path, **more) -> RunRequest:
    return RunRequest(
        "language-small",
        root / "cache",
        **{
            "tasks": ["subj", "trec"],
            "methods": METHODS,
            "regimes": ("full", "lora"),
            "data": root / "data",
            "threads": 1,
            "settings": SMALL,
        }
        | more,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("small")
    write_small_data(root / "data")
    get_suite("language-small").run(small_request(root))
    return root


def test_every_model_has_a_score_on_every_task(small: Path) -> None:
    scores = read_scores(score_file(small / "cache", "language-small"))
    found = {(s.regime, s.method, s.scale, s.task) for s in scores}
    rows = {"full": tuple(m for m in METHODS if m != "knots_tsv"), "lora": METHODS}
    references = {(r, m, "default", t) for r in rows for m in ("majority", "base", "experts") for t in ("subj", "trec")}
    merged = {(r, m, k, t) for r in rows for m in rows[r] for k in ("default", "tuned") for t in ("subj", "trec")}
    assert found == references | merged
    assert {s.total for s in scores} == {10}
    assert {s.detail["scale"] for s in scores if s.scale == "default" and "scale" in s.detail} == {1.0}
    assert len({s.settings for s in scores}) == 1


def test_stages_are_kept_and_merged_models_are_not(small: Path) -> None:
    cache = small / "cache"
    assert len(list((cache / "expert").glob("*/key.json"))) == 4
    assert len(list((cache / "expert").glob("*/adapter_config.json"))) == 2
    assert not list(cache.glob("**/*.pt"))
    assert list((cache / "merge").glob("*/scores.json"))
    assert not list((cache / "merge").glob("*/model"))
    base = next((cache / "base").glob("*/key.json")).parent
    assert load_t5(base).config.d_model == 16
    assert json.loads(next(cache.glob("expert/*/training.json")).read_text())["update"] == 4
    assert {p.name for p in (cache / "logs").iterdir()} >= {"base.log", "experts.log", "merges.log"}


def test_a_second_run_makes_nothing_and_changes_no_score(small: Path, monkeypatch) -> None:
    before = read_scores(score_file(small / "cache", "language-small"))
    names = ("language.train.finetune", "language.suite.examine", "language.small.suite.pretrain")
    for name in (*names, "harness.experiment.merge_candidates"):
        monkeypatch.setattr(f"actmat_experiments.{name}", None)
    get_suite("language-small").run(small_request(small))
    assert read_scores(score_file(small / "cache", "language-small")) == before


def test_training_on_a_cpu_takes_one_thread_whatever_the_machine_has(tmp_path: Path, monkeypatch) -> None:
    """Sums that are split among other numbers of threads would train other weights under the same key."""
    write_small_data(tmp_path / "data")

    def stopped(*args, **settings) -> None:
        raise InterruptedError(f"threads: {torch.get_num_threads()}")

    monkeypatch.setattr("actmat_experiments.language.small.suite.pretrain", stopped)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(InterruptedError, match="threads: 1"):
            get_suite("language-small").run(small_request(tmp_path))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_embeddings_norms_and_biases_are_averaged_and_the_rule_acts_on_the_rest(small: Path) -> None:
    place = Path(shutil.copytree(small / "cache", small / "kept"))
    request = replace(
        small_request(small),
        cache=place,
        regimes=("full",),
        methods=["actmat_ridge"],
        settings=SMALL | {"keep": "true"},
    )
    get_suite("language-small").run(request)
    merged = load_t5(next((place / "merge").glob("*/model"))).state_dict()
    experts = [load_t5(p.parent).state_dict() for p in (place / "expert").glob("*/model.safetensors")]
    linear = {
        n for n in merged if n.endswith(("q.weight", "k.weight", "v.weight", "o.weight", "wi.weight", "wo.weight"))
    }
    averaged = {n for n, t in merged.items() if torch.allclose(t, sum(e[n] for e in experts) / len(experts), atol=1e-6)}
    assert averaged >= set(merged) - linear
    assert "shared.weight" in averaged
    assert any("relative_attention_bias" in n for n in averaged)
    assert not averaged & linear


def test_tables_name_seeds_majority_and_tuned_scales(small: Path) -> None:
    text = shown("language-small", small / "cache")
    assert "full fine-tuning, 2 tasks, seed 0" in " ".join(text.split())
    assert "LoRA, 2 tasks, seed 0" in " ".join(text.split())
    assert "majority" in text
    assert "knots_tsv" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "| `actmat` | tuned: " in shown("language-small", small / "cache", markdown=True)


def test_wrong_requests_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    write_small_data(tmp_path / "data")
    for change, message in (
        ({"tasks": ["trek"]}, "Did you mean 'trec'"),
        ({"models": ["T5-base"]}, "--models"),
        ({"data": None}, "--data"),
        ({"methods": ["actmta"]}, "actmat"),
        ({"settings": {"experts.full.batchsize": "3", "n_validation": "x"}}, "experts.full.batch_size"),
    ):
        with pytest.raises(RecipeError, match=message):
            get_suite("language-small").run(small_request(tmp_path, **change))
    with pytest.raises(RecipeError, match="Did you mean 'winogrande'"):
        get_suite("language").run(RunRequest("language", tmp_path / "cache", tasks=["winogrand"]))
    assert not (tmp_path / "cache").exists()
    with pytest.raises(RecipeError, match="experiment run language"):
        shown("language", tmp_path / "cache")


# The paper's tasks


@pytest.fixture(scope="module")
def seven(tmp_path_factory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("seven")
    tiny_model().save_pretrained(root / "base")
    written_tokenizer(root / "base")
    (root / "data").mkdir()
    for task, splits in {"story_cloze": ("validation", "test"), "wikiqa": ("train", "dev", "test")}.items():
        for split in splits:
            write_rows(root / "data" / f"{task}.{split}.jsonl", numbered(task, split, 40))
    get_suite("language").run(seven_request(root))
    return root, str(root / "base")


def seven_request(root: Path) -> RunRequest:
    return RunRequest(
        "language",
        root / "cache",
        models=[str(root / "base")],
        tasks=["story_cloze", "wikiqa"],
        methods=["average", "actmat"],
        data=root / "data",
        threads=1,
        settings=TINY_TRAINING | {"together": "1"},
    )


def test_the_papers_suite_runs_on_local_files_and_a_local_base(seven) -> None:
    root, model = seven
    scores = read_scores(score_file(root / "cache", "language"))
    assert {s.model for s in scores} == {model}
    assert {(s.method, s.scale) for s in scores} == {
        *((m, "default") for m in ("majority", "base", "experts", "average", "actmat")),
        *((m, "tuned") for m in ("average", "actmat")),
    }
    text = shown("language", root / "cache")
    assert "wikiqa, balanced over its answers" in text
    assert "Story Cloze was rendered with empty choices" in text


def test_the_papers_figures_stand_beside_its_models(seven, tmp_path: Path) -> None:
    root, model = seven
    lines = score_file(root / "cache", "language").read_text().replace(json.dumps(model), '"T5-base"')
    score_file(tmp_path, "language").parent.mkdir(parents=True)
    score_file(tmp_path, "language").write_text(lines)
    row = next(
        x for x in shown("language", tmp_path, markdown=True).splitlines() if x.startswith("| `actmat` | default")
    )
    assert "| 76.0 |" in row


def test_default_settings_are_the_protocol() -> None:
    settings = LanguageSettings()
    for training in (settings.experts.full, settings.experts.lora):
        assert (training.learning_rate, training.batch_size, training.max_updates) == (1e-4, 1024, 75_000)
        assert (training.validate_every, training.patience, training.max_length) == (100, 5, 128)
        assert training.precision == "bf16"
        assert training.clip is None
    assert settings.shuffled
    assert (settings.samples, settings.measured) == (320, "train")
    assert (settings.experts.rank, settings.experts.alpha) == (16, 16)


def test_balanced_accuracy_does_not_reward_the_frequent_answer() -> None:
    found = counts(torch.zeros(10, dtype=torch.long), torch.tensor([0] * 9 + [1]))
    assert found == {"correct": 9.0, "total": 10, "balanced": 0.5}
    score = Score("s", "full", "average", "default", "wikiqa", 0, 9, 10, detail={"balanced": 0.5})
    assert balanced([score, Score("s", "full", "average", "default", "qasc", 0, 9, 10)], "wikiqa") == {"average": 0.5}
