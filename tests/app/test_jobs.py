"""Jobs of the page, each in a process, and the arguments that its form makes."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.app.conftest import SECRET
from tests.helpers.docs_fixture import LAYER, save_image_lora
from tests.helpers.hub import HubStandIn
from tests.helpers.merging import Family

from actmat.errors import MergeError, RecipeError
from actmat_app import jobs as module
from actmat_app.form import AUTOMATIC, FILE, MODEL, find_models, output_place, recipe_fields
from actmat_app.jobs import Jobs

PLAN, MERGE = {"do": "plan", "out": "merged"}, {"do": "merge"}


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


def test_a_local_merge_has_a_plan_with_its_reason_stages_and_a_report(local: Jobs, tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    asked = fields("\n".join(map(str, family.experts)), "auto", str(family.base))
    shown = last(local.run({**PLAN, "fields": asked}))["html"]
    assert "auto: actmat_ridge" in shown
    assert "peak memory" in shown
    *events, done = local.run({**MERGE, "fields": asked, "out": str(family.out)})
    assert ["merging" in e["html"] for e in events].count(True) >= 1
    assert done["out"] == str(family.out)
    assert "Merge report" in Path(done["page"]).read_text()
    assert "Is it good?" in done["html"]
    assert "AutoModelForCausalLM" in done["python"]
    for events in (local.run({**PLAN, "fields": asked, "out": "m.safetensors"}),
                   local.run({**MERGE, "fields": asked, "out": f"{tmp_path}/m.safetensors"})):  # fmt: skip
        with pytest.raises(MergeError, match="ne file is made of "):
            last(events)
    with pytest.raises(MergeError, match="expected a folder") as caught:
        last(local.run({**PLAN, "fields": fields(f"{tmp_path}/a\n{tmp_path}/b", base=str(family.base))}))
    assert len(caught.value.problems) == 2


def test_files_of_image_models_become_one_file(local: Jobs, tmp_path: Path) -> None:
    files = [save_image_lora(tmp_path / f"{name}.safetensors", 1.0) for name in ("a", "b")]
    out = tmp_path / "merged.safetensors"
    done = last(local.run({**MERGE, "fields": fields("\n".join(map(str, files)), "auto"), "out": str(out)}))
    assert (done["out"], done["page"]) == (str(out), "")
    assert "ComfyUI" in done["use"]
    merged = load_file(out)
    delta = merged[f"{LAYER}.lora_up.weight"] @ merged[f"{LAYER}.lora_down.weight"]
    torch.testing.assert_close(delta * merged[f"{LAYER}.alpha"] / merged[f"{LAYER}.lora_down.weight"].shape[0],
                               torch.full((8, 8), 4.0))  # fmt: skip


def test_a_push_uses_the_token_of_the_form_and_nothing_else_shows_it(
    hub: HubStandIn, local: Jobs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    family = Family.make(tmp_path, layers=1)
    last(local.run({"do": "merge", "fields": fields("\n".join(map(str, family.experts)), base=str(family.base)),
                    "out": str(family.out)}))  # fmt: skip
    job = {"do": "push", "out": str(family.out), "repo": "me/merged", "token": SECRET, "public": False}
    for changed, words in (({"token": "hf_wrong"}, "HTTP 401"), ({"repo": "org/merged"}, "HTTP 403"),
                           ({"repo": "me/merged@v1"}, "expected a hub repository")):  # fmt: skip
        with pytest.raises(MergeError, match=words):
            last(local.run(job | changed))
    assert "me/merged (private)" in last(local.run(job))["html"]
    assert hub.uploads is not None
    assert hub.uploads.private["me/merged"]
    assert SECRET not in "".join(capfd.readouterr())
    assert not any(SECRET in path for _, path, _ in hub.requests)


# Processes that do not end as they should


def scripted(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(module, "COMMAND", [sys.executable, "-c", code])


JOB = {"do": "push", "token": SECRET}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "Likely cause: too little memory"),
        ("import sys; print(sys.stdin.read(), file=sys.stderr); sys.exit(3)", r"failed \(exit code 3\)"),
    ],
)
def test_a_job_that_breaks_down_says_so_and_its_log_has_no_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, words: str
) -> None:
    scripted(monkeypatch, code)
    jobs = Jobs()
    with pytest.raises(MergeError, match=words):
        last(jobs.run(JOB))
    said = capsys.readouterr().err
    assert SECRET not in said
    assert ("***" in said) == ("exit code 3" in words)
    jobs.close()


def test_a_job_is_stopped_and_another_one_waits_for_its_end(monkeypatch: pytest.MonkeyPatch, local: Jobs) -> None:
    scripted(monkeypatch, "import signal, time; signal.signal(signal.SIGTERM, lambda *_: 1 / 0); time.sleep(600)")
    events = local.run(JOB)
    next(events)
    with pytest.raises(MergeError, match="Another job is running"):
        next(local.run(JOB))
    local.stop()  # also before the job can report, however its process ends then
    with pytest.raises(MergeError, match=r"^Stopped\.$"):
        next(events)


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
