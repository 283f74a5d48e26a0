"""The buttons of the page: what is typed goes in, HTML comes out; the page itself, where Gradio is installed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helpers.repository import ROOT
from tests.space.conftest import HOSTILE, SECRET

from actmat.errors import MergeError
from actmat_space import actions
from actmat_space.asking import Form
from actmat_space.jobs import Jobs, Merged
from actmat_space.limits import Limits

PLAN: dict[str, Any] = {
    "method": "cart", "options": {}, "base": HOSTILE, "experts": [], "modules": 1, "full": 0, "ranks": [[8, 1]],
    "exact_rank": 8, "size": "1 kB", "traffic": "", "time": "", "groups": [], "notes": ["auto: a reason", "more"],
}  # fmt: skip
RESULT = {"seconds": 1.0, "error": 0.25, "size": "", "warnings": ["AM1: far"], "findings": []}
VALUES = ("org/a\norg/b", "auto", 0, 1.0, False)


class Recorded(Jobs):
    """Jobs that do nothing but note what they are given."""

    def __init__(self, folder: Path, error: MergeError | None = None) -> None:
        super().__init__(Limits(), folder)
        self.error = error
        self.seen: list[Any] = []

    def _note(self, *what: Any) -> None:
        self.seen.append(what)
        if self.error is not None:
            raise self.error

    def plan(self, form: Form) -> Mapping[str, Any]:
        self._note("plan", form)
        return PLAN

    def merge(self, form: Form, progress: Any = None) -> Merged:
        self._note("merge", form)
        (self.root / "report.html").write_text("<p>'\"</p>")
        return Merged("0" * 32, PLAN, RESULT, self.root / "report.html", self.root / "a.zip")

    def push(self, key: str, repo_id: str, token: str, *, public: bool = False) -> Mapping[str, Any]:
        self._note("push", key, repo_id, token, public)
        return {"repo_id": repo_id, "url": "javascript:alert(1)", "private": not public, "notes": [HOSTILE]}


def test_the_reason_and_the_notes_are_shown(tmp_path: Path) -> None:
    jobs = Recorded(tmp_path)
    shown = actions.plan(jobs, VALUES)
    assert jobs.seen == [("plan", Form("org/a\norg/b"))]
    assert "<dt>Why</dt><dd>a reason</dd>" in shown
    assert "note: more" in shown
    assert "8 (1 module); exact would be up to 8" in shown
    assert "<img" not in shown
    said, merged = actions.merge(jobs, (*VALUES[:2], 4, 0.5, True))
    assert jobs.seen[-1] == ("merge", Form("org/a\norg/b", "auto", 4, 0.5, True))
    assert "truncated: relative error 0.25" in said
    assert "AM1: far" in said
    assert merged is not None


def test_a_link_is_made_of_web_addresses_only(tmp_path: Path) -> None:
    jobs = Recorded(tmp_path)
    said = actions.push(jobs, "0" * 32, "me/a", SECRET, public=True)
    assert jobs.seen == [("push", "0" * 32, "me/a", SECRET, True)]
    assert "href" not in said
    assert "<img" not in said
    assert SECRET not in said


def test_errors_are_shown_as_they_are_and_escaped(tmp_path: Path) -> None:
    jobs = Recorded(tmp_path, MergeError("No.", [HOSTILE, "second"]))
    for said in (
        actions.plan(jobs, VALUES),
        actions.merge(jobs, VALUES)[0],
        actions.push(jobs, "0" * 32, "me/a", SECRET, public=False),
    ):
        assert "<b>No.</b>" in said
        assert "&lt;img src=x onerror=alert(1)&gt;</li><li>second" in said
    assert "There is no merged adapter yet" in actions.push(jobs, "", "me/a", SECRET, public=False)


@pytest.mark.parametrize(("rank", "scale"), [(-1, 1.0), (1.5, 1.0), (1e9, 1.0), (float("nan"), 1.0), (0, float("inf"))])
def test_numbers_that_are_none_are_refused(tmp_path: Path, rank: float, scale: float) -> None:
    jobs = Recorded(tmp_path)
    assert "Expected a rank from 0 (exact) and a finite scale" in actions.plan(jobs, ("a", "auto", rank, scale, False))
    assert jobs.seen == []


def test_the_readme_is_that_of_a_space() -> None:
    folder = ROOT / "packages" / "space"
    head = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert (head["sdk"], head["app_file"], head["hf_oauth"]) == ("gradio", "app.py", True)
    assert (folder / head["app_file"]).is_file()
    assert head["hf_oauth_scopes"] == ["contribute-repos"]
    text = (folder / "README.md").read_text()
    for name in Limits.__slots__:
        assert f"`ACTMAT_SPACE_{name.upper()}`" in text


# The page


@pytest.fixture
def page_module() -> Any:
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'gradio>=6.31'")
    from actmat_space import page

    return page


def functions(blocks: Any) -> dict[str, Any]:
    return {f.fn.__name__: f for f in blocks.fns.values() if f.fn is not None}


def test_the_page_runs_one_job_at_a_time_and_keeps_nothing(page_module: Any, tmp_path: Path) -> None:
    jobs = Recorded(tmp_path)
    found = functions(page_module.build(jobs))
    assert found.keys() >= {"plan", "merge", "push"}
    for name in ("plan", "merge", "push"):
        assert (found[name].concurrency_id, found[name].concurrency_limit) == ("job", 1)
        assert found[name].api_visibility == "private"
    assert page_module.SERVED["run_history"] is False
    cleared, said, file, seen, report, key, _ = found["merge"].fn(*VALUES)
    assert (cleared, file["visible"], seen["visible"], key) == ("", True, True, "0" * 32)
    assert "Merged" in said
    assert "<iframe" in report
    assert 'srcdoc="&lt;p&gt;&#39;&#34;' in report
    assert found["push"].fn("0" * 32, "me/a", SECRET, False)[1] == ""
    jobs.error = MergeError("No.")
    _, said, file, *_, key, _ = found["merge"].fn(*VALUES)
    assert (file["visible"], key) == (False, "")
    assert found["push"].fn("0" * 32, "me/a", SECRET, False)[1] == ""


def test_a_visitor_who_signed_in_needs_no_token(
    page_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gradio

    monkeypatch.setenv("OAUTH_CLIENT_ID", "id")
    monkeypatch.setattr(gradio.routes, "attach_oauth", lambda app: None)  # it wants a space around it
    jobs = Recorded(tmp_path)
    push = functions(page_module.build(jobs))["push_signed_in"].fn
    assert "signed_in" in inspect.signature(push).parameters
    assert gradio.utils.get_type_hints(push)["signed_in"] == gradio.OAuthToken | None
    signed_in = gradio.OAuthToken(token=SECRET, scope="", expires_at=0)
    push("0" * 32, "me/a", "", False, signed_in)
    push("0" * 32, "me/a", "own", False, signed_in)
    push("0" * 32, "me/a", "", False, None)
    assert [token for _, _, _, token, _ in jobs.seen] == [SECRET, "own", ""]
