"""Jobs of the page run in a process of their own: they end well, fail with their reasons, stop, and one at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.merging import Family

from actmat.errors import OutputError
from actmat.extras.ui.jobs import Jobs


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    made.close()


def ended(jobs: Jobs) -> dict[str, Any]:
    """State of the job when it has ended."""
    until = time.monotonic() + 120
    while (state := jobs.state())["state"] == "running":
        assert time.monotonic() < until, state
        time.sleep(0.05)
    return state


def a_form(samples: Family, out: Path, **settings: Any) -> dict[str, Any]:
    experts = [{"path": str(e)} for e in samples.experts]
    return {"recipe": {"base": str(samples.base), "experts": experts}, "out": str(out), "settings": settings}


def test_a_merge_is_made_once_and_compared(samples: Family, jobs: Jobs, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    jobs.start({"do": "merge", "form": a_form(samples, out, diagnose=True)})
    with pytest.raises(OutputError, match="Another job is running"):
        jobs.start({"do": "merge", "form": a_form(samples, out)})
    state = ended(jobs)
    assert state["state"] == "done", repr(state)
    assert state["tensors"] == 11
    assert (out / "actmat_manifest.json").is_file()
    assert state["page"] == f"/pages/{state['id']}"
    assert jobs.page(state["id"]) == out / "report.html"
    jobs.start({"do": "compare", "first": str(out), "second": str(out)})
    state = ended(jobs)
    assert state["state"] == "done", repr(state)
    assert state["differing"] == 0
    page = jobs.page(state["id"])
    assert page is not None
    assert "Two merges compared" in page.read_text()


def test_a_merge_that_cannot_be_says_all_problems(samples: Family, jobs: Jobs, tmp_path: Path) -> None:
    form = a_form(samples, tmp_path / "merged")
    form["recipe"]["experts"] += [{"path": str(tmp_path / "one")}, {"path": str(tmp_path / "two")}]
    jobs.start({"do": "merge", "form": form})
    state = ended(jobs)
    assert state["state"] == "failed"
    assert len(state["problems"]) == 2
    assert not (tmp_path / "merged").exists()


def test_a_job_stops_when_it_is_told_to(samples: Family, jobs: Jobs, tmp_path: Path) -> None:
    jobs.start({"do": "merge", "form": a_form(samples, tmp_path / "merged")})
    assert jobs.stop()["stopping"]
    assert ended(jobs)["state"] == "stopped"
    assert not (tmp_path / "merged").exists()


def test_a_job_that_dies_says_its_last_words(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actmat.extras.ui.jobs.COMMAND", [sys.executable, "-c", "raise ValueError('broken')"])
    jobs.start({"do": "merge", "form": {}})
    state = ended(jobs)
    assert state["state"] == "failed"
    assert "code 1" in state["headline"]
    assert state["problems"][-1] == "ValueError: broken"
