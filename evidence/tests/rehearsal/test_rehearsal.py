"""The dress rehearsal: the paper's suites from the first download to the last table, as a user runs them, from a
stand-in of the hub with the real repositories' names, commits, lists of files and schemas.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from evidence.tests.helpers.hub import HubStandIn, served
from evidence.tests.helpers.paper_hub import RECORD, PaperHub, publish_language, publish_reasoning, publish_vision

from actmat_experiments.harness.results import Score, read_scores
from actmat_experiments.vision.clip import clip_tasks

METHODS = "average,actmat,regmean"


@pytest.fixture
def paper(tmp_path: Path) -> Iterator[PaperHub]:
    with served() as hub:
        yield PaperHub(hub, tmp_path / "hub")


def experiment(hub: HubStandIn, tmp_path: Path, *arguments: str) -> str:
    """`actmat experiment ...` in a process of its own that knows the stand-in, and nothing else."""
    environment = {n: v for n, v in os.environ.items() if "proxy" not in n.lower() and not n.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "actmat", "experiment", *arguments, "--cache", str(tmp_path / "cache")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def scores(tmp_path: Path, suite: str) -> list[Score]:
    return read_scores(tmp_path / "cache" / "scores" / f"{suite}.jsonl")


def settings(**values: object) -> list[str]:
    return [part for name, value in values.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]


def fetched(hub: HubStandIn) -> set[str]:
    """Files whose content was sent."""
    return {path for method, path, sent in hub.requests if method == "GET" and sent and "/resolve/" in path}


def test_the_record_names_its_sources() -> None:
    for kind in ("models", "datasets"):
        for repo, record in RECORD[kind].items():
            assert record["source"], repo
            assert "commit" not in record or len(record["commit"]) == 40


@pytest.mark.slow
def test_the_documented_run_of_public_experts(paper: PaperHub, tmp_path: Path) -> None:
    """All eight tasks and all rows, by the command of the page; the second time from the cache, without the hub."""
    publish_vision(paper, ["ViT-B/32"], experts="ViT-B/32")
    command = ("run", "vision", "--models", "ViT-B/32", *settings(experts="public"))
    shown = experiment(paper.hub, tmp_path, *command)
    found = scores(tmp_path, "vision")
    assert len({s.task for s in found}) == 8
    rows = {s.method for s in found} - {"majority", "base", "experts"}
    assert {"average", "actmat", "tsv", "regmean", "fisher"} <= rows
    assert "83.3" in shown, "the paper's figure for TSV on ViT-B/32"
    base = {s.task: s.share for s in found if s.method == "base"}
    assert set(base) == {task.name for task in clip_tasks()}
    before = len(fetched(paper.hub))
    experiment(paper.hub, tmp_path, *command)
    assert len(fetched(paper.hub)) == before, "nothing is downloaded twice"
    assert scores(tmp_path, "vision") == found


@pytest.mark.slow
def test_vision_from_download_to_table(paper: PaperHub, tmp_path: Path) -> None:
    publish_vision(paper, ["ViT-B/32", "ViT-B/16", "ViT-L/14"])
    tiny = settings(epochs=1, batch_size=8, warm_up_steps=1, samples=8)
    shown = experiment(paper.hub, tmp_path, "run", "vision", "--lora", "--methods", METHODS, *tiny)
    found = scores(tmp_path, "vision")
    assert {s.model for s in found} == {"ViT-B/32", "ViT-B/16", "ViT-L/14"}
    assert {s.regime for s in found} == {"full", "lora"}
    assert len({s.task for s in found}) == 8
    assert "89.5" in shown, "the paper's figure for ACTMat on ViT-B/16"
    sent = fetched(paper.hub)
    assert not [p for p in sent if "extra-" in p or "motion_blur" in p], "splits that are not used stay there"
    assert not [p for p in sent if p.endswith((".msgpack", ".h5"))]
    large = [p for p in sent if "clip-vit-large-patch14" in p]
    assert any(p.endswith("model.safetensors") for p in large)
    assert not any(p.endswith(".bin") for p in large)
    assert "average" in experiment(paper.hub, tmp_path, "table", "vision", "--markdown")


@pytest.mark.slow
def test_language_from_download_to_table(paper: PaperHub, tmp_path: Path) -> None:
    publish_language(paper, tmp_path / "data")
    tiny = {f"experts__{r}__{n}": v for r in ("full", "lora") for n, v in (("max_updates", 2), ("validate_every", 1))}
    tiny |= {f"experts__{r}__batch_size": 8 for r in ("full", "lora")}
    shown = experiment(
        *(paper.hub, tmp_path, "run", "language", "--lora", "--data", str(tmp_path / "data")),
        *("--methods", METHODS, *settings(**tiny, samples=4)),
    )
    found = scores(tmp_path, "language")
    assert {s.regime for s in found} == {"full", "lora"}
    assert len({s.task for s in found}) == 7
    assert "76.0" in shown
    (base,) = (json.loads(p.read_text()) for p in (tmp_path / "cache" / "base").glob("*/key.json"))
    assert base["base"] == "google-t5/t5-base@" + RECORD["models"]["google-t5/t5-base"]["commit"]
    assert not [p for p in fetched(paper.hub) if p.endswith((".bin", ".ot", ".h5", "/spiece.model.old"))]


@pytest.mark.slow
def test_reasoning_from_download_to_table(paper: PaperHub, tmp_path: Path) -> None:
    publish_reasoning(paper)
    tiny = settings(samples=2, max_tokens=4, measured=4, engine__longest=4096)
    shown = experiment(paper.hub, tmp_path, "run", "reasoning", "--methods", METHODS, *tiny)
    found = scores(tmp_path, "reasoning")
    assert {s.method for s in found} == {
        *("base", "experts", "expert math", "expert code", "expert instructions"),
        *METHODS.split(","),
    }
    assert {s.task.partition("@")[0] for s in found} >= {"humaneval", "humaneval_plus", "aime24", "aime25", "ifeval"}
    assert "45.9" in shown
    key = next(json.loads(p.read_text()) for p in (tmp_path / "cache" / "reasoning-answers").glob("*/key.json"))
    assert key["tokenizer"] is None or len(key["tokenizer"]) == 64
