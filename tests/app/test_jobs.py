"""Jobs of the page, each in a process, of the user of this machine and of visitors; limits of visitors."""

import json
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.app.conftest import HOSTILE, SECRET, World
from tests.helpers.docs_fixture import LAYER, save_image_lora
from tests.helpers.merging import Family
from tests.helpers.repository import ROOT
from tests.tolerances import F32_ELEMENTWISE

from actmat.errors import MergeError, RecipeError
from actmat_app import jobs as module
from actmat_app.form import AUTOMATIC, FILE, MODEL, find_models, output_place, recipe_fields
from actmat_app.jobs import COMMAND, Jobs
from actmat_app.limits import Limits, repository_of

# Jobs of the page, each in a process: of the user of this machine, and of visitors.


BOTH = "org/math 0.7\norg/code@main 0.3"


PLAN = {"do": "plan", "out": "merged"}


def fields(experts: str, method: str = "linear", base: str = "", more: str = "") -> dict[str, Any]:
    """Fields of the form, with an expert and its weight per line."""
    rows = [(*line.split(" "), 1)[:2] for line in experts.splitlines()]
    return recipe_fields(base, AUTOMATIC, method, 1.0, 0, more, *(x for p, w in rows for x in (p, float(w), "")))


def last(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    *_, event = events
    return event


@pytest.fixture
def local(forked: None) -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.close()


# The user of this machine


def test_a_local_merge_has_a_plan_with_its_reason_stages_and_a_report(local: Jobs, tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    asked = fields("\n".join(map(str, family.experts)), "auto", str(family.base))
    shown = last(local.run("", {**PLAN, "fields": asked}))["html"]
    assert "auto: actmat_ridge" in shown
    assert "peak memory" in shown
    *events, done = local.merge("", asked, str(family.out))
    assert ["merging" in e["html"] for e in events].count(True) >= 1
    assert done["out"] == str(family.out)
    assert "Merge report" in Path(done["page"]).read_text()
    assert "Is it good?" in done["html"]
    assert "AutoModelForCausalLM" in done["python"]
    for events in (local.run("", {**PLAN, "fields": asked, "out": "m.safetensors"}),
                   local.merge("", asked, f"{tmp_path}/m.safetensors")):  # fmt: skip
        with pytest.raises(MergeError, match=r"ne file (.*)?is made of "):
            last(events)
    with pytest.raises(MergeError, match="expected a folder") as caught:
        last(local.run("", {**PLAN, "fields": fields(f"{tmp_path}/a\n{tmp_path}/b", base=str(family.base))}))
    assert len(caught.value.problems) == 2


def test_files_of_image_models_become_one_file(local: Jobs, tmp_path: Path) -> None:
    files = [save_image_lora(tmp_path / f"{name}.safetensors", 1.0) for name in ("a", "b")]
    out = tmp_path / "merged.safetensors"
    done = last(local.merge("", fields("\n".join(map(str, files)), "auto"), str(out)))
    assert (done["out"], done["page"]) == (str(out), "")
    assert "ComfyUI" in done["use"]
    merged = load_file(out)
    delta = merged[f"{LAYER}.lora_up.weight"] @ merged[f"{LAYER}.lora_down.weight"]
    torch.testing.assert_close(delta * merged[f"{LAYER}.alpha"] / merged[f"{LAYER}.lora_down.weight"].shape[0],
                               torch.full((8, 8), 4.0))  # fmt: skip


# Visitors


def test_a_visitors_merge_is_exact_and_pushed_with_the_visitors_token_only(
    world: World, visitors: Jobs, capfd: pytest.CaptureFixture[str]
) -> None:
    hub, deltas = world
    done = last(visitors.merge("v", fields(BOTH), "/ignored"))
    out = Path(done["out"])
    assert "<html" in Path(done["page"]).read_text()
    with zipfile.ZipFile(done["archive"]) as archive:
        assert {"merged/adapter_config.json", "merged/report.html", "merged/README.md"} <= {*archive.namelist()}
    factors = load_file(out / "adapter_model.safetensors")
    (a,), (b,) = ([v.double() for k, v in factors.items() if f".lora_{x}." in k] for x in "AB")
    config = json.loads((out / "adapter_config.json").read_text())
    expected = 0.7 * deltas["org/math"] + 0.3 * deltas["org/code"]
    found = config["lora_alpha"] / config["r"] * (b @ a)
    assert float((found - expected).norm() / expected.norm()) < F32_ELEMENTWISE
    assert hub.branches["org/math", "main"] in (out / "actmat_manifest.json").read_text()

    for repo, token, words in (
        ("me/merged", "hf_wrong", "HTTP 401"), ("me/merged", "", "No valid token"), ("me/merged", "a b", "No valid"),
        ("org/merged", SECRET, "HTTP 403"), ("me/merged@v1", SECRET, "your-name/name"), (HOSTILE, SECRET, "org/name"),
    ):  # fmt: skip
        with pytest.raises(MergeError, match=words):
            last(visitors.push("v", str(out), repo, token, public=False))
    pushed = last(visitors.push("v", str(out), "me/merged", SECRET, public=False))
    assert "me/merged (private)" in pushed["html"]
    assert hub.uploads.private["me/merged"]
    assert not any(SECRET.encode() in p.read_bytes() for p in visitors.root.rglob("*") if p.is_file())
    assert SECRET not in "".join(capfd.readouterr())
    assert not any(SECRET in path for _, path, _ in hub.requests)
    with pytest.raises(MergeError, match="No merged model to push"):
        last(visitors.push("v", str(visitors.root / "nothing"), "me/merged", SECRET, public=False))


def test_names_in_files_are_shown_and_have_no_effect(visitors: Jobs) -> None:
    done = last(visitors.merge("v", fields("org/hostile\ntwice=org/hostile", "average"), ""))
    plan = last(visitors.run("v", {**PLAN, "fields": fields("org/hostile\ntwice=org/hostile", "average")}))
    assert "&lt;img src=x" in plan["html"]
    for text in (done["html"], plan["html"], Path(done["page"]).read_text()):
        assert "<img src=x" not in text


@pytest.mark.usefixtures("world", "forked")
@pytest.mark.parametrize(
    ("limits", "experts", "words"),
    [
        (Limits(), "org/math\norg/other", "the adapters name different bases"),
        (Limits(), "org/pickled\norg/math", "This page reads safetensors only, found"),
        (Limits(), "org/math\norg/nobody", "org/nobody: not a local path, and not on the hub"),
        (Limits(max_bytes=1000), BOTH, "more than this page allows, 1 kB. Nothing was downloaded"),
        (Limits(max_bytes=50_000), "org/math\norg/long", "org/long: 10[0-9] kB"),
    ],
)
def test_inputs_are_refused_before_a_merge(limits: Limits, experts: str, words: str) -> None:
    jobs = Jobs(limits)
    with pytest.raises(MergeError, match=words):
        last(jobs.merge("v", fields(experts), ""))
    assert not [p for p in jobs.root.rglob("*") if p.is_file()]
    jobs.close()


def test_only_a_few_outputs_are_kept(visitors: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMAND", COMMAND)  # a new process
    for age in range(10):
        folder = visitors.root / f"kept-{age}"
        folder.mkdir()
        os.utime(folder, (time.time() - age - 1,) * 2)
    done = last(visitors.merge("v", fields("org/math", "average"), ""))
    kept = {p.name for p in visitors.root.glob("kept-*")}
    assert kept == {Path(done["out"]).parent.name, *(f"kept-{age}" for age in range(7))}


# Processes that do not end as they should


def scripted(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(module, "COMMAND", [sys.executable, "-c", code])


JOB = {"do": "push", "token": SECRET}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; print('{\"event', end='', flush=True); time.sleep(600)", "was stopped after 2 s, the limit"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "Likely cause: too little memory"),
        ("import sys; print(sys.stdin.read(), file=sys.stderr); sys.exit(3)", r"failed \(exit code 3\)"),
    ],
)
def test_a_job_that_breaks_down_says_so_and_its_log_has_no_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, words: str
) -> None:
    scripted(monkeypatch, code)
    jobs = Jobs(Limits(seconds=2 if "the limit" in words else 600))
    with pytest.raises(MergeError, match=words):
        last(jobs.run("v", JOB))
    said = capsys.readouterr().err
    assert SECRET not in said
    assert ("***" in said) == ("exit code 3" in words)
    assert not list(jobs.root.iterdir())
    jobs.close()


def test_a_job_is_stopped_and_another_one_waits_for_its_end(monkeypatch: pytest.MonkeyPatch, local: Jobs) -> None:
    scripted(monkeypatch, "import signal, time; signal.signal(signal.SIGTERM, lambda *_: 1 / 0); time.sleep(600)")
    events = local.run("", JOB)
    next(events)
    with pytest.raises(MergeError, match="Another job is running"):
        next(local.run("", JOB))
    local.stop("")  # also before the job can report, however its process ends then
    with pytest.raises(MergeError, match=r"^Stopped\.$"):
        next(events)


def test_a_visitors_job_sees_no_secret_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of-the-server")
    monkeypatch.setenv("OAUTH_CLIENT_SECRET", "hidden")
    scripted(
        monkeypatch,
        "import json, os; print(json.dumps({'event': 'done', 'seen': dict(os.environ), 'cwd': os.getcwd()}))",
    )
    jobs = Jobs(Limits())
    found = last(jobs.run("v", JOB))
    assert not {"hf_of-the-server", "hidden"} & {*found["seen"].values()}
    assert Path(found["cwd"]).parent == jobs.root
    assert found["seen"]["HF_HOME"].startswith(found["cwd"])
    jobs.close()


# The form, and guards of a page that is served to others: places, fields, limits.


def test_the_form_makes_the_arguments_of_a_merge() -> None:
    rows = ("a/b ", -0.01, "", "", 1, "", "c=d e", 1, "x = 2", "f", 2, "one\n\n two")
    made = recipe_fields(" base ", AUTOMATIC, "ties", 0.5, 4, "seed: 3\nmethod: average", *rows)
    assert made["experts"] == [
        {"path": "a/b", "weight": -0.01}, {"path": "d e", "name": "c"}, {"path": "f", "weight": 2.0}
    ]  # fmt: skip
    assert (made["base"], made["method"], made["scale"], made["seed"]) == ("base", "average", 0.5, 3)
    assert (made["to"], made["rank"], made["data"]) == ("adapter", 4, {"c": "x = 2", "f": ["one", "two"]})
    unseen = recipe_fields(None, MODEL, "auto", 1.0, 0, None, "a", 1, None, None, 1, None)
    assert (unseen["base"], unseen["to"], unseen["experts"]) == ("", "model", [{"path": "a"}])
    assert "to" not in recipe_fields("", MODEL, "auto", 1.0, 0, "output: adapter", "a", 1, "")
    for more, words in (("a: [", "not valid YAML"), ("[1]", "found list"), ("a" * 20_001, "too long")):
        with pytest.raises(RecipeError, match=words):
            recipe_fields("", AUTOMATIC, "auto", 1.0, 0, more)
    assert [output_place("m", FILE), output_place(" m.safetensors", FILE), output_place("m", MODEL)] == [
        "m.safetensors", "m.safetensors", "m"
    ]  # fmt: skip
    with pytest.raises(RecipeError, match="No output given"):
        output_place(" ", MODEL)


def test_models_below_a_folder_are_offered(tmp_path: Path) -> None:
    files = ("base/config.json", "base/model.safetensors", "base/step-1/config.json", "loras/a/adapter_config.json",
             "ink.safetensors", "x/q.gguf", "x/notes.txt", ".cache/m/config.json", "1/2/3/4/5/config.json")  # fmt: skip
    for file in map(tmp_path.joinpath, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert sorted(find_models(str(tmp_path))) == ["base", "base/step-1", "ink.safetensors", "loras/a", "x/q.gguf"]


@pytest.mark.parametrize(
    "place",
    ["/etc/passwd", "../a", "a/../b", "org/a@../b", "math", "org/a/b", "s3://org/a", "https://elsewhere.org/org/a",
     "a[0:1] + b", "org/a+org/b", HOSTILE, "org/a\x00", "ôrg/a", "", None, 5],
)  # fmt: skip
def test_visitors_name_repositories_of_the_hub_only(place: object) -> None:
    with pytest.raises(RecipeError, match="expected a hub repository"):
        repository_of(place)
    with pytest.raises(MergeError, match="expected a hub repository"):
        Limits().pinned({"experts": [place]})


@pytest.mark.parametrize(
    ("text", "found"),
    [("org/math", None), ("hf://a.b/c_d@refs/pr/1", "refs/pr/1"), ("https://huggingface.co/org/code@v2", "v2")],
)
def test_repositories_have_revisions(text: str, found: str | None) -> None:
    assert repository_of(text)[1] == found


def test_visitors_set_no_field_that_names_a_place_or_a_setting_of_the_run() -> None:
    with pytest.raises(RecipeError) as caught:
        Limits().pinned({"experts": [{"path": "a", "statistics": "/etc"}], "out": "/x", "overwrite": True})
    words = "\n".join(caught.value.problems)
    assert all(f"{name}: visitors" in words for name in ("out", "overwrite", "statistics"))
    for experts in ([], ["org/a"] * 9, "org/a", None):
        with pytest.raises(RecipeError, match="Expected 1 to 8 experts"):
            Limits().pinned({"experts": experts})


def test_limits_come_from_the_environment() -> None:
    given = {"ACTMAT_APP_MAX_BYTES": "3GiB", "ACTMAT_APP_SECONDS": "60", "X": "1"}
    assert Limits.from_environment(given) == Limits(max_bytes=3 << 30, seconds=60)
    with pytest.raises(RecipeError) as caught:
        Limits.from_environment({"ACTMAT_APP_SECONDS": "soon", "ACTMAT_APP_KEEP": "-1", "ACTMAT_APP_BYTES": "1"})
    assert len(caught.value.problems) == 3


def test_the_readmes_name_the_limits_and_the_file_of_the_space() -> None:
    folder = ROOT / "packages" / "actmat-app"
    head = yaml.safe_load((folder / "space" / "README.md").read_text().split("---\n")[1])
    assert (head["sdk"], head["hf_oauth"]) == ("gradio", True)
    assert (folder / "space" / head["app_file"]).is_file()
    for name in Limits.__slots__:
        assert f"`ACTMAT_APP_{name.upper()}`" in (folder / "README.md").read_text()
