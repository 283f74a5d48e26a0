"""Names of labels and chat templates of the inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.adapters import save_adapter
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.merging import actmat

from actmat.checkpoints.memory import MemoryTensors
from actmat.checkpoints.model import Model, ModelFolder
from actmat.checkpoints.source import LocalSource
from actmat.identity.entries import label_names
from actmat.identity.templates import chat_template
from actmat.run.output import most_frequent_template

ORDERED, TURNED = ["neg", "neu", "pos"], ["pos", "neu", "neg"]
GENERIC = ["LABEL_0", "LABEL_1", "LABEL_2"]


def classifier(folder: Path, names: list[str] | None, seed: int, template: str = "") -> Path:
    torch.manual_seed(seed)
    tensors = {"model.layers.0.mlp.weight": torch.randn(8, 8), "score.weight": torch.randn(3, 8)}
    labels: dict[str, object] = {}
    if names is not None:
        labels = {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
    save_folder(folder, tensors, {"model_type": "llama"} | labels)
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
    found = actmat([*run, "--out", f"{tmp_path}/out", *flags], code=int(refused))
    assert ("id2label" in found.out + found.err) == (refused or "--set" in flags or base == GENERIC)


HEADS = {
    "class_labels_classifier.weight": (4, True),  # DETR: a row for "no object"
    "model.decoder.class_embed.1.weight": (3, True),  # RT-DETR: a head per layer
    "decode_head.classifier.weight": (3, True),
    "model.embed.weight": (3, False),
    "model.layers.1.mlp.bias": (3, False),
}
"""Tensor with a row per label, or not -> number of its rows."""


@pytest.mark.parametrize("head", HEADS)
def test_heads_of_all_kinds_have_labels(tmp_path: Path, head: str) -> None:
    rows, refused = HEADS[head]
    for i, (name, labels) in enumerate({"base": ORDERED, "one": TURNED}.items()):
        folder = classifier(tmp_path / name, labels, i)
        tensors = {"model.layers.0.mlp.weight": torch.randn(8, 8), head: torch.randn(rows, 8)}
        save_folder(folder, tensors)
    run = ["merge", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/one", "-m", "linear", "--out", f"{tmp_path}/out"]
    found = actmat(run, code=int(refused))
    if refused:
        keep = found.err.split("(--keep '")[1].split("'")[0]
        actmat([*run, "--keep", keep], code=0)


@pytest.mark.parametrize(
    ("base", "one", "two", "flags", "written"),
    [
        (ORDERED, ORDERED, TURNED, ["--set", "config_from=two"], TURNED),
        (ORDERED, ORDERED, TURNED, ["--set", "config_from=one"], ORDERED),
        (ORDERED, TURNED, TURNED, ["--set", "config_from=base"], ORDERED),
        (ORDERED, TURNED, TURNED, ["--set", "config_from=two", "--keep", "score.*"], ORDERED),
        (GENERIC, TURNED, TURNED, [], TURNED),
        (None, TURNED, TURNED, [], TURNED),
    ],
)
def test_labels_are_those_of_the_head(
    tmp_path: Path, base: list[str], one: list[str], two: list[str], flags: list[str], written: list[str]
) -> None:
    for i, (name, labels) in enumerate({"base": base, "one": one, "two": two}.items()):
        classifier(tmp_path / name, labels, i)
    run = ["merge", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/one", "-e", f"{tmp_path}/two", "-m", "average"]
    actmat([*run, "--out", f"{tmp_path}/out", *flags], code=0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert label_names(config) == tuple(written)
    assert config["label2id"] == {n: i for i, n in enumerate(written)}


@pytest.mark.parametrize(
    ("base", "one", "flags", "words"),
    [
        ("{{a}}", "{{a}}", [], ""),
        ("{{a}}", "{{b}}", [], "(default in expert 'one'): that of the base is written"),
        ("", "{{b}}", [], "(only in expert 'one'): none is written"),
        ("{{a}}", "{{b}}", ["--set", "files_from=one"], "(default in the base): that of expert 'one' is written"),
    ],
)
def test_chat_templates_that_differ_are_a_note(
    tmp_path: Path, base: str, one: str, flags: list[str], words: str
) -> None:
    for i, (name, template) in enumerate({"base": base, "one": one}.items()):
        classifier(tmp_path / name, None, i, template)
    run = ["merge", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/one", "-m", "linear", "--out", f"{tmp_path}/out"]
    found = actmat([*run, *(flags or ["--set", "files_from=base"])], code=0)
    text = found.words
    assert words in text
    assert ("chat template differs" in text) == bool(words)


@pytest.mark.parametrize(
    ("file", "base", "one", "flags", "words"),
    [
        ("generation_config.json", {"eos_token_id": 2}, {"eos_token_id": [2, 7]}, [], "eos_token_id in expert 'one'"),
        ("generation_config.json", {"eos_token_id": 2}, {"eos_token_id": 2, "transformers_version": "5"}, [], ""),
        ("preprocessor_config.json", {"image_mean": [0.5]}, {"image_mean": [0.48]}, [], "that of the base is written"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, {"image_mean": [0.48]}, ["--set", "files_from=one"],
         "image_mean in the base): that of expert 'one' is written"),
        ("preprocessor_config.json", {"image_processor_type": "A"}, {"image_processor_type": "AFast"}, [], ""),
        ("tokenizer_config.json", {"add_bos_token": True, "model_max_length": 8}, {"add_bos_token": False}, [],
         "tokenizer_config.json differs (add_bos_token in expert 'one'): that of the base is written"),
        ("tokenizer_config.json", {"model_max_length": 8, "name_or_path": "a"}, {"model_max_length": 9}, [], ""),
        ("processor_config.json", {"image_seq_length": 4}, {"image_seq_length": 9}, [], "image_seq_length in expert"),
        ("sentence_bert_config.json", {"do_lower_case": True}, {"do_lower_case": False}, [], "do_lower_case"),
        ("config_sentence_transformers.json", {"prompts": {"query": "q: "}}, {"prompts": {}}, [], "prompts in expert"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}, {"pooling_mode_mean_tokens": False}, [],
         "1_Pooling/config.json differs (pooling_mode_mean_tokens in expert 'one'): that of the base is written"),
        ("tokenizer.json", {"normalizer": {"lowercase": True}}, {"normalizer": {"lowercase": False}}, [],
         "tokenizer.json differs (normalizer in expert 'one'): that of the base is written. Another one: --set"),
        ("tokenizer.json", {"post_processor": {"type": "ByteLevel"}},
         {"post_processor": {"type": "Sequence"}, "truncation": {}}, [], "post_processor in expert 'one'"),
        ("tokenizer.json", {"model": {"merges": ["a b"]}}, {"model": {"merges": [["a", "c"]]}}, [], "(merges in"),
        ("tokenizer.json", {"model": {"merges": ["a b"]}}, {"model": {"merges": [["a", "b"]]}}, [], ""),
        ("tokenizer.json", {"pre_tokenizer": None, "padding": None}, {"pre_tokenizer": None, "padding": {}}, [], ""),
        ("tokenizer.json", {"model": {"vocab": {"a": 0}}}, {"model": {"vocab": {"a": 0}, "fuse_unk": False}}, [], ""),
        ("tokenizer.json", {"model": {}}, {"model": {"ignore_merges": True}, "decoder": {"type": "Fuse"}}, [],
         "tokenizer.json differs (decoder in expert 'one', ignore_merges in expert 'one'): that of the base is"),
        ("tokenizer.json", {"model": {"vocab": [["a", -1]]}}, {"model": {"vocab": [["a", -2]]}}, [],
         "(scores in expert 'one')"),
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}}},
         {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 1, "content": "b", "special": True}]}, [],
         "(added_tokens in expert 'one')"),
        ("tokenizer.json", {"added_tokens": [{"id": 0, "content": "a", "special": True}]},
         {"added_tokens": [{"id": 0, "content": "a", "special": False}, {"id": 1, "content": "b"}]}, [],
         "added_tokens in expert 'one'"),
        ("tokenizer.json", {"added_tokens": [{"id": 0, "content": "a"}]},
         {"added_tokens": [{"id": 0, "content": "a"}, {"id": 1, "content": "b"}]}, [], "(tokens in expert 'one')"),
        ("modules.json", [{"path": "", "type": "a.Transformer"}], [{"path": "", "type": "b.c.Transformer"}], [], ""),
        ("modules.json", [{"path": ""}], [{"path": ""}, {"path": "1_Normalize", "type": "models.Normalize"}], [],
         "modules.json differs (its modules in expert 'one'): that of the base is written"),
        ("1_Pooling/config.json", {"pooling_mode": "mean"}, {"pooling_mode_cls_token": False}, [],
         "1_Pooling/config.json differs (pooling_mode in expert 'one')"),
        ("generation_config.json", None, {"eos_token_id": 7}, [], "(only in expert 'one'): none is written. Another"),
        ("processor_config.json", None, {}, [], "differs (only in expert 'one'): none is written"),
        ("preprocessor_config.json", {}, None, [], "differs (not in expert 'one'): that of the base is written"),
        ("preprocessor_config.json", {}, None, ["--set", "files_from=one"], "(only in the base): none is written"),
        ("tokenizer_config.json", {"add_bos_token": True}, None, [], ""),
    ],
)  # fmt: skip
def test_settings_beside_the_weights_that_differ_are_a_note(
    tmp_path: Path, file: str, base: Any, one: Any, flags: list[str], words: str
) -> None:
    for i, (name, settings) in enumerate({"base": base, "one": one}.items()):
        path = classifier(tmp_path / name, None, i) / file
        path.parent.mkdir(exist_ok=True)
        if settings is not None:
            path.write_text(json.dumps(settings))
        if "/" in file:
            (tmp_path / name / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    run = ["plan", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/one", "-m", "linear"]
    found = actmat([*run, *(flags or ["--set", "files_from=base"])], code=0)
    text = found.words
    assert words in text
    assert (f"note: {file}" in text) == bool(words)


FILES: dict[str, Any] = {
    "tokenizer_config.json": {"eos_token": {"content": "w2"}, "padding_side": "left", "added_tokens_decoder": {}},
    "generation_config.json": {"eos_token_id": [2, 7]},
    "chat_template.jinja": "<turn>",
    "additional_chat_templates/tool.jinja": "<call>",
    "preprocessor_config.json": {"image_mean": [0.48]},
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}},
    "own_settings.json": {"threshold": 2},
}
"""A file of every kind, as experts have it; the base has another, or none."""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("base", [None, "text"])
@pytest.mark.parametrize("second", ["equal", "other", "none"])
def test_settings_follow_the_rule_of_weights(tmp_path: Path, name: str, base: str | None, second: str) -> None:
    text = json.dumps(FILES[name]) if isinstance(FILES[name], dict) else FILES[name]
    other = text.replace("w2", "w9").replace("2", "3").replace(">", "/>").replace("q: ", "p: ").replace("0.4", "0.1")
    texts = {"base": base and other.replace("3", "4").replace("/", "+").replace("p", "r").replace("0.1", "0.9"),
             "one": text, "two": {"equal": text, "other": other, "none": None}[second]}  # fmt: skip
    for i, (label, content) in enumerate(texts.items()):
        path = classifier(tmp_path / label, None, i) / name
        path.parent.mkdir(exist_ok=True)
        if content is not None:
            path.write_text(content)
    run = ["merge", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/one", "-e", f"{tmp_path}/two", "-m", "average"]
    found = actmat([*run, "--out", f"{tmp_path}/out"], code=0)
    said, path = found.words, tmp_path / "out" / name
    assert (path.read_text() if path.exists() else None) == (text if second == "equal" else texts["base"])
    assert ("the experts agree, and theirs are written" in said) == (second == "equal")
    assert ("that of the base is written" in said or "none is written" in said) == (second != "equal")


PIXELS = {"image_mean": [0.5]}
PROCESSORS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # files of the base, of the experts
    ({"preprocessor_config.json": PIXELS, "processor_config.json": {}},
     {"processor_config.json": {"image_processor": {"image_mean": [0.1]}}}),
    ({"processor_config.json": {"image_processor": PIXELS}},
     {"preprocessor_config.json": {"image_mean": [0.1]}, "processor_config.json": {"patch_size": 8}}),
    ({"processor_config.json": {"image_processor": PIXELS}}, {"preprocessor_config.json": {"image_mean": [0.1]}}),
]  # fmt: skip
"""Transformers takes the entries in `processor_config.json` where that has any."""


@pytest.mark.parametrize(("base", "experts"), PROCESSORS)
def test_files_of_a_processor_are_those_of_one_input(tmp_path: Path, base: Any, experts: Any) -> None:
    for i, (label, files) in enumerate({"base": base, "one": experts, "two": experts}.items()):
        folder = classifier(tmp_path / label, None, i)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
    run = ["merge", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/one", "-e", f"{tmp_path}/two", "-m", "average"]
    assert "the experts agree, and theirs are written" in actmat([*run, "--out", f"{tmp_path}/out"], code=0).words
    written = {p.name: json.loads(p.read_text()) for p in (tmp_path / "out").glob("*processor_config.json")}
    assert written == experts


def test_adapters_keep_the_tokenizer_on_which_they_agree(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two", "other")):
        save_adapter(tmp_path / name, "llama", seed, r=2, target_modules=["q_proj"])
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"w{seed // 2}"}))
        (tmp_path / name / "chat_template.jinja").write_text("<turn>")
    both = {"tokenizer_config.json", "chat_template.jinja"}
    for experts, names in ((("one", "two"), both), (("one", "other"), set())):
        argv = [word for name in experts for word in ("-e", str(tmp_path / name))]
        found = actmat(["merge", *argv, "-m", "average", "--out", f"{tmp_path}/out-{experts[1]}"], code=0)
        written = {p.name for p in (tmp_path / f"out-{experts[1]}").iterdir()}
        assert written & both == names
        words = (
            "the experts agree, and theirs"
            if names
            else "tokenizer_config.json differs (only in expert 'one', expert 'other')"
        )
        assert words in found.words


def test_a_chat_template_is_found_in_each_file(tmp_path: Path) -> None:
    assert chat_template(LocalSource(tmp_path)) is None
    assert chat_template(None) is None
    listed = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert chat_template(LocalSource(tmp_path)) == json.dumps(listed)
    assert chat_template(LocalSource(tmp_path), name="default") == "d"
    assert chat_template(LocalSource(tmp_path), name="other") is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "b"}))
    assert chat_template(LocalSource(tmp_path)) == "b"
    (tmp_path / "chat_template.jinja").write_text("c\n")
    assert chat_template(LocalSource(tmp_path)) == "c"


class RemoteFiles:
    """Files that are elsewhere until they are fetched; the folder of a checkpoint with nothing else."""

    location, hub_id, named = "org/model", "org/model", None

    def __init__(self, folder: Path, template: str) -> None:
        self.names = ["config.json", "tokenizer_config.json"]
        self._folder, self._template = folder, template

    def fetch(self, name: str) -> Path:
        self._folder.mkdir(exist_ok=True)
        (self._folder / name).write_text(json.dumps({"chat_template": self._template}))
        return self._folder / name

    def whole(self) -> RemoteFiles:
        return self


def test_chat_templates_are_fetched(tmp_path: Path) -> None:
    """Of inputs on a hub; the most frequent one, the first of several."""
    files: list[Any] = [RemoteFiles(tmp_path / str(i), text) for i, text in enumerate(("a ", "b", "c", "c"))]
    inputs = [Model(MemoryTensors({}), ModelFolder(files=(of_one,))) for of_one in files]
    assert most_frequent_template(inputs) == "c"
    assert most_frequent_template(inputs[:3]) == "a"
    assert most_frequent_template([]) is None


@pytest.mark.parametrize(
    ("given", "written", "status"),
    [("{{ messages }}", "{{ messages }}", 0), ("chatml", "<|im_start|>", 0), ("auto", "{{b}}", 0), ("alpaca", "", 1)],
)
def test_the_chat_template_of_mergekit_is_obeyed(tmp_path: Path, given: str, written: str, status: int) -> None:
    for i, (name, template) in enumerate((("base", "{{a}}"), ("one", "{{b}}"), ("two", "{{b}}"))):
        classifier(tmp_path / name, None, i, template)
    (tmp_path / "merge.yml").write_text(
        f"merge_method: task_arithmetic\nbase_model: {tmp_path}/base\nchat_template: '{given}'\n"
        f"models:\n  - model: {tmp_path}/one\n  - model: {tmp_path}/two\nparameters: {{weight: 0.5}}\n"
    )
    found = actmat(["merge", f"{tmp_path}/merge.yml", "--out", f"{tmp_path}/out"], code=status)
    assert "chat_template" in found.out + found.err or status == 0
    if not status:
        assert written in (chat_template(LocalSource(tmp_path / "out")) or "")
