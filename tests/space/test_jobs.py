"""Jobs in processes of their own against a stand-in for the hub: plan, merge, push, refusals, limits, tokens."""

from __future__ import annotations

import json
import os
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.hub import HubStandIn
from tests.space.conftest import HOSTILE, SECRET
from tests.tolerances import F32_ELEMENTWISE

from actmat.errors import MergeError
from actmat.run.automatic import TABLE
from actmat_space import jobs as module
from actmat_space.asking import Form
from actmat_space.html import error_html, plan_html, pushed_html, report_html, result_html
from actmat_space.jobs import Jobs
from actmat_space.limits import Limits

World = tuple[HubStandIn, dict[str, torch.Tensor]]
BOTH = "org/math\norg/code"


def leftovers(jobs: Jobs) -> list[str]:
    return [p.name for p in jobs.root.iterdir() if p.name != "merged"]


def test_a_plan_says_what_and_why(world: World, jobs: Jobs) -> None:
    plan, auto = jobs.plan(Form(BOTH)), TABLE["adapters", "decoder"]
    assert (plan["method"], plan["modules"], plan["ranks"], plan["exact_rank"]) == (auto.method, 1, [[8, 1]], 8)
    assert plan["base"] == "org/base"
    shown = plan_html(plan)
    assert "dc_merge with --space pico, for adapters of a decoder" in shown
    assert world[0].branches["org/math", "main"][:8] in shown
    assert leftovers(jobs) == []


def test_a_merge_is_exact_kept_and_pushed_with_the_visitors_token_only(
    world: World, jobs: Jobs, capfd: pytest.CaptureFixture[str]
) -> None:
    hub, deltas = world
    seen: list[tuple[int, int]] = []
    merged = jobs.merge(Form("org/math 0.7\norg/code@main 0.3", method="linear"), lambda *done: seen.append(done))
    assert seen[-1] == (1, 1)
    with zipfile.ZipFile(merged.archive) as archive:
        names = {n.rpartition("/")[2] for n in archive.namelist()}
        archive.extractall(merged.archive.parent / "unpacked")
    assert names >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        "actmat_manifest.json",
        "report.html",
    }
    folder = merged.archive.parent / "unpacked" / "merged-adapter"
    factors = load_file(folder / "adapter_model.safetensors")
    (a,), (b,) = ([v.double() for k, v in factors.items() if f".lora_{x}." in k] for x in "AB")
    config = json.loads((folder / "adapter_config.json").read_text())
    expected = 0.7 * deltas["org/math"] + 0.3 * deltas["org/code"]
    found = config["lora_alpha"] / config["r"] * (b @ a)
    assert float((found - expected).norm() / expected.norm()) < F32_ELEMENTWISE
    card = (folder / "README.md").read_text()
    assert "org/math" in card
    assert hub.branches["org/math", "main"] in (folder / "actmat_manifest.json").read_text()
    assert "exact: nothing was truncated" in result_html(merged.plan, merged.result)
    assert "<iframe" in report_html(merged.report.read_text())
    assert hub.bytes_of("optimizer.pt") == 0

    assert hub.uploads is not None
    for token, words in (("hf_wrong", "HTTP 401: the hub does not know you"), ("", "No token was given"),
                         ("two words", "is none")):  # fmt: skip
        with pytest.raises(MergeError, match=words):
            jobs.push(merged.key, "me/merged", token)
    with pytest.raises(MergeError, match="HTTP 403: the token may not write there"):
        jobs.push(merged.key, "org/merged", SECRET)
    assert "me/merged" not in hub.repositories
    pushed = jobs.push(merged.key, "me/merged", SECRET)
    assert (pushed["repo_id"], pushed["private"], hub.uploads.private["me/merged"]) == ("me/merged", True, True)
    sent = hub.repositories["me/merged"][hub.branches["me/merged", "main"]]
    assert (sent / "README.md").read_text() == card
    assert "me/merged (private)" in pushed_html(pushed)
    assert leftovers(jobs) == []
    everything = [p for p in jobs.root.rglob("*") if p.is_file()]
    assert everything
    assert not any(SECRET.encode() in p.read_bytes() for p in everything)
    assert SECRET not in "".join(capfd.readouterr())
    assert not any(SECRET in path for _, path, _ in hub.requests)
    card_file = merged.archive.parent / "merged-adapter" / "README.md"
    card_file.write_text(card + "\nMore.\n")
    with pytest.raises(MergeError, match="it holds a finished output: choose another name"):
        jobs.push(merged.key, "me/merged", SECRET)


def test_adapters_that_do_not_fit_are_refused_with_our_words(jobs: Jobs) -> None:
    with pytest.raises(MergeError, match="the adapters name different bases") as caught:
        jobs.plan(Form("org/math\norg/other"))
    assert HOSTILE in str(caught.value)
    assert "<img" not in error_html(caught.value)
    with pytest.raises(MergeError, match="DoRA"):
        jobs.merge(Form("org/math\norg/dora"))
    assert leftovers(jobs) == []


def test_names_in_adapters_are_shown_and_have_no_effect(jobs: Jobs) -> None:
    merged = jobs.merge(Form("org/hostile1\norg/hostile2", method="average"))
    shown = result_html(merged.plan, merged.result)
    assert "&lt;img src=x onerror=alert(1)&gt;.q_proj" in shown
    for text in (shown, report_html(merged.report.read_text()), merged.report.read_text()):
        assert "<img src=x" not in text


def test_an_output_that_would_be_too_large_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    small = Jobs(Limits(max_bytes=1), tmp_path)
    with pytest.raises(MergeError, match="Nothing was downloaded"):
        small.merge(Form(BOTH))
    assert list(small.root.rglob("*")) == [small.root / "merged"]


# Processes that do not end as they should


def scripted(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(module, "COMMAND", [sys.executable, "-c", code])


def test_a_job_is_stopped_at_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripted(monkeypatch, "import subprocess; print('{\"event', end='', flush=True); subprocess.run(['sleep', '600'])")
    jobs, began = Jobs(Limits(seconds=2), tmp_path), time.monotonic()
    with pytest.raises(MergeError, match="The merge was stopped after 2 s, the limit of this space"):
        jobs.merge(Form(BOTH))
    assert time.monotonic() - began < 60
    assert list(tmp_path.rglob("*")) == [tmp_path / "merged"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "Likely cause: too little memory"),
        ("import sys; print(sys.stdin.read(), file=sys.stderr); sys.exit(3)", r"broke down \(exit code 3\)"),
    ],
)
def test_a_job_that_breaks_down_is_told_and_its_log_has_no_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, words: str
) -> None:
    scripted(monkeypatch, code)
    jobs = Jobs(Limits(), tmp_path)
    (tmp_path / "merged" / ("0" * 32) / "merged-adapter").mkdir(parents=True)
    with pytest.raises(MergeError, match=words):
        jobs.push("0" * 32, "me/merged", SECRET)
    said = capsys.readouterr().err
    assert SECRET not in said
    assert ("***" in said) == ("exit code" in words)


def test_a_job_sees_no_secret_of_the_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of-the-space")
    monkeypatch.setenv("OAUTH_CLIENT_SECRET", "hidden")
    scripted(
        monkeypatch,
        "import json, os; print(json.dumps({'event': 'done', 'plan': dict(os.environ) | {'cwd': os.getcwd()}}))",
    )
    seen = Jobs(Limits(), tmp_path).plan(Form(BOTH))
    assert not {"HF_TOKEN", "OAUTH_CLIENT_SECRET"} & seen.keys()
    assert not {"hf_of-the-space", "hidden"} & set(seen.values())
    assert Path(seen["cwd"]).parent == tmp_path
    assert seen["HF_HOME"].startswith(seen["cwd"])


@pytest.mark.parametrize("key", ["", "../..", "0" * 32, "a/b"])
def test_a_key_that_is_none_pushes_nothing(tmp_path: Path, key: str) -> None:
    with pytest.raises(MergeError, match="There is no merged adapter to push"):
        Jobs(Limits(), tmp_path).push(key, "me/merged", SECRET)


@pytest.mark.parametrize("repo", ["", "merged", "me/merged@v1", "a/b/c", HOSTILE, "https://huggingface.co/me/a/tree/b"])
def test_a_repository_that_is_none_is_refused(tmp_path: Path, repo: str) -> None:
    with pytest.raises(MergeError, match="Expected the repository to push to"):
        Jobs(Limits(), tmp_path).push("0" * 32, repo, SECRET)


def test_merged_adapters_are_kept_for_a_while_and_only_a_few(tmp_path: Path) -> None:
    jobs = Jobs(Limits(keep=3, keep_seconds=100), tmp_path)
    now = time.time()
    for age in (5, 50, 20, 200, 30):
        folder = tmp_path / "merged" / f"{age:032d}"
        folder.mkdir()
        os.utime(folder, (now - age, now - age))

    def kept() -> list[int]:
        return sorted(int(p.name) for p in (tmp_path / "merged").iterdir())

    jobs.sweep()
    assert kept() == [5, 20, 30]
    jobs.sweep(room=1)
    assert kept() == [5, 20]
