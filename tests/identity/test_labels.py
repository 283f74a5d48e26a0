"""Names of labels and chat templates of the inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.merging import actmat

from actmat.identity.inputs import chat_template

ORDERED, TURNED = ["neg", "neu", "pos"], ["pos", "neu", "neg"]
GENERIC = ["LABEL_0", "LABEL_1", "LABEL_2"]


def classifier(folder: Path, names: list[str] | None, seed: int, template: str = "") -> Path:
    folder.mkdir()
    torch.manual_seed(seed)
    tensors = {"model.layers.0.mlp.weight": torch.randn(8, 8), "score.weight": torch.randn(3, 8)}
    save_file(tensors, folder / "model.safetensors")
    labels = {} if names is None else {"id2label": {str(i): n for i, n in enumerate(names)}}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | labels))
    if template:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("base", "one", "two", "flags", "refused"),
    [
        (ORDERED, ORDERED, ORDERED, [], False),
        (ORDERED, ORDERED, TURNED, [], True),
        (GENERIC, ORDERED, TURNED, [], True),
        (None, ORDERED, TURNED, [], True),
        (GENERIC, ORDERED, ORDERED, [], False),
        (ORDERED, GENERIC, ORDERED, [], False),
        (ORDERED, ["a", "b", "c"], ORDERED, [], True),
        (ORDERED, ORDERED, TURNED, ["--keep", "score.*"], False),
        (ORDERED, ORDERED, TURNED, ["--set", "config_from=base"], False),
    ],
)
def test_rows_of_a_head_mean_the_same_labels(
    tmp_path: Path, base: list[str], one: list[str], two: list[str], flags: list[str], refused: bool
) -> None:
    inputs = {"base": base, "one": one, "two": two}
    for i, (name, labels) in enumerate(inputs.items()):
        classifier(tmp_path / name, labels, i)
    run = ["merge", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/one", "-e", f"{tmp_path}/two", "-m", "average"]
    found = actmat([*run, "--out", f"{tmp_path}/out", *flags])
    assert found.code == int(refused), found
    assert ("id2label" in found.out + found.err) == (refused or "--set" in flags)


@pytest.mark.parametrize(
    ("base", "one", "flags", "words"),
    [
        ("{{a}}", "{{a}}", [], ""),
        ("{{a}}", "{{b}}", [], "('one'): that of the base is written"),
        ("", "{{b}}", [], "the base has none, and none is written"),
        ("{{a}}", "{{b}}", ["--set", "files_from=one"], "('base'): that of expert 'one' is written"),
    ],
)
def test_chat_templates_that_differ_are_a_note(
    tmp_path: Path, base: str, one: str, flags: list[str], words: str
) -> None:
    for i, (name, template) in enumerate({"base": base, "one": one}.items()):
        classifier(tmp_path / name, None, i, template)
    run = ["merge", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/one", "-m", "linear", "--out", f"{tmp_path}/out"]
    found = actmat([*run, *flags])
    text = " ".join(found.out.split())
    assert found.code == 0, found
    assert words in text
    assert ("chat templates differ" in text) == bool(words)


def test_a_chat_template_is_found_in_each_file(tmp_path: Path) -> None:
    assert chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    assert chat_template(tmp_path) == '[{"name": "default"}]'
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "b"}))
    assert chat_template(tmp_path) == "b"
    (tmp_path / "chat_template.jinja").write_text("c\n")
    assert chat_template(tmp_path) == "c"


@pytest.mark.parametrize(
    ("given", "written", "status"),
    [("{{ messages }}", "{{ messages }}", 0), ("chatml", "<|im_start|>", 0), ("auto", "{{a}}", 0), ("alpaca", "", 1)],
)
def test_the_chat_template_of_mergekit_is_obeyed(tmp_path: Path, given: str, written: str, status: int) -> None:
    for i, name in enumerate(("base", "one")):
        classifier(tmp_path / name, None, i, "{{a}}")
    (tmp_path / "merge.yml").write_text(
        f"merge_method: task_arithmetic\nbase_model: {tmp_path}/base\nchat_template: '{given}'\n"
        f"models:\n  - model: {tmp_path}/one\n    parameters: {{weight: 1.0}}\n"
    )
    found = actmat(["merge", f"{tmp_path}/merge.yml", "--out", f"{tmp_path}/out"])
    assert found.code == status, found
    assert "chat_template" in found.out + found.err or status == 0
    if not status:
        assert written in (chat_template(tmp_path / "out") or "")
