"""`actmat statistics` on files: text, images, encoder-decoders, adapters; and what can be wrong with them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.helpers.json_layouts import PINNED, pinned
from tests.helpers.merging import actmat as run
from tests.helpers.models import BY_NAME, VOCABULARY
from tests.tolerances import F32_PRODUCT, relative_error

from actmat.errors import StatisticsError
from actmat.extras.collect.collect import collect
from actmat.extras.collect.data import DataOptions, make_batches
from actmat.extras.models.loading import Loaded, load_model
from actmat.statistics import open_statistics

TEXTS = ["one two", "three four five six", "seven"]


def text_file(folder: Path, kind: str) -> Path:
    place = folder / f"data.{kind}"
    content = {
        "txt": "\n".join(TEXTS) + "\n",
        "csv": "id,text\n" + "".join(f"{i},{t}\n" for i, t in enumerate(TEXTS)),
        "json": json.dumps([{"text": t} for t in TEXTS]),
        "jsonl": "".join(json.dumps({"note": 3, "sentence": t}) + "\n" for t in TEXTS),
    }
    place.write_text(content[kind])
    return place


@pytest.mark.parametrize("kind", ["txt", "csv", "json", "jsonl", "folder"])
def test_text_from_every_kind_of_file(kind: str, family: Path, tmp_path: Path) -> None:
    place = text_file(tmp_path, "jsonl" if kind == "folder" else kind)
    if kind == "folder":
        (tmp_path / "texts").mkdir()
        place = place.rename(tmp_path / "texts" / "a.jsonl").parent
    done = run(
        ["statistics", "collect", family / "experts" / "math", "--data", place, "--out", tmp_path / "s",
         "--set", "batch_size=2"],
        code=0,
    )  # fmt: skip
    assert "3 samples" in done.out
    assert "9 Gram matrices for 15 tensors" in done.out
    with open_statistics(tmp_path / "s") as found:
        assert found.header.model.location == str(family / "experts" / "math")
        assert found.header.data[0].source == str(place)
        assert found.header.tokens == sum(len(t.split()) for t in TEXTS)


def test_batches_of_any_size_give_the_same_sums(family: Path, tmp_path: Path) -> None:
    place = text_file(tmp_path, "txt")
    loaded = load_model(str(family / "base"))
    one, all_at_once = (
        collect(loaded.model, make_batches(loaded, DataOptions(str(place), batch_size=n)), checkpoint=family / "base")
        for n in (1, 3)
    )
    assert one.header.tokens == all_at_once.header.tokens
    for name in one.tensors:
        assert relative_error(one.tensors[name], all_at_once.tensors[name]) < F32_PRODUCT


def test_an_adapter_on_its_base_and_merging_of_files(family: Path, tmp_path: Path) -> None:
    place = text_file(tmp_path, "jsonl")
    (tmp_path / "more.txt").write_text("eight nine\n")
    for n, data in enumerate((place, tmp_path / "more.txt")):
        done = run(
            ["statistics", "collect", family / "adapters" / "math", "--base", family / "base", "--data",
             data, "--out", tmp_path / f"s{n}", "--store-dtype", "float64", "-q"],
            code=0,
        )  # fmt: skip
        assert done.out == ""
    run(["statistics", "merge", tmp_path / "s0", tmp_path / "s1", "--out", tmp_path / "all"], code=0)
    shown = run(["statistics", "show", tmp_path / "all"])
    told = pinned(json.loads(run(["statistics", "show", tmp_path / "all", "--json"]).out), "statistics")
    assert set(told["statistics"][0]) == PINNED["statistics statistics"]
    written = f"with the adapter {family / 'adapters' / 'math'}"
    assert "".join(written.split()) in "".join(shown.out.split()), "long lines are continued anywhere"
    assert "4 samples" in shown.out
    assert all(len(line) <= 80 or str(tmp_path) in line for line in shown.out.splitlines())


def vision(folder: Path) -> Path:
    import transformers

    case = BY_NAME["vit"]
    case.build().save_pretrained(folder / "vit")
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder / "vit")
    return folder / "vit"


def pictures(folder: Path, *labels: str) -> Path:
    """A folder of five images, with a class for each in turn."""
    from PIL import Image

    images = numpy.random.default_rng(0).integers(0, 255, (5, 20, 20, 3), dtype=numpy.uint8)
    for i, image in enumerate(images):
        place = folder / labels[i % len(labels)] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place)
    return folder


def test_images_from_a_folder(tmp_path: Path) -> None:
    place, grams = vision(tmp_path), []
    for name, labels in (("one", ("cat", "dog")), ("two", ("dog", "cat"))):  # the same images, in another order
        out = tmp_path / f"s-{name}"
        data = pictures(tmp_path / name, *labels)
        done = run(["statistics", "collect", place, "--data", data, "--out", out], code=0)
        assert "5 samples of" in done.out
        assert "tokens" not in done.out
        with open_statistics(out) as found:
            assert found.header.samples == 5
            assert len(found.header.places) == 14
            key = found.find("vit.encoder.layer.0.attention.attention.query.weight")
            grams.append(found.gram(key))
    assert relative_error(grams[0], grams[1]) < F32_PRODUCT
    shown = json.loads(run(["statistics", "show", out, "--json"]).out)["statistics"][0]
    assert (shown["samples"], shown["tokens"]) == (5, None)
    inputs = ["-b", str(place), "-e", str(place), "-m", "regmean", "--statistics", str(out)]
    plan = run(["plan", *inputs]).words
    assert "statistics of 'vit': 5 samples" in plan


def test_labels_for_the_fisher_come_from_a_column(tmp_path: Path) -> None:
    place, out = vision(tmp_path), tmp_path / "s"
    flags = ["--fisher", "--fisher-labels", "given", "--set", "label_column=label", "--no-gram"]
    data = ["--data", str(pictures(tmp_path / "images", *"abcd")), "--out", str(out)]
    run(["statistics", "collect", place, *data, *flags], code=0)
    with open_statistics(out) as found:
        assert found.header.kinds == {"fisher"}
        assert found.fisher("classifier.weight").shape == (5, 32)
        assert float(found.fisher("classifier.bias").sum()) > 0


def test_targets_feed_the_decoder_shifted_by_one(family: Path, tmp_path: Path) -> None:
    case = BY_NAME["t5"]
    case.build().save_pretrained(tmp_path / "t5")
    model: Any = case.loader.from_pretrained(tmp_path / "t5").eval()
    rows = [{"text": "one two three", "answer": "four"}, {"text": "five", "answer": "six seven"}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    loaded = Loaded(model, str(tmp_path / "t5"), None, str(family / "base"))
    options = DataOptions(str(tmp_path / "d.jsonl"), target_column="answer", max_length=VOCABULARY)
    (batch,) = make_batches(loaded, options)
    assert batch["decoder_input_ids"].shape == batch["decoder_attention_mask"].shape == (2, 2)
    assert batch["decoder_input_ids"][:, 0].tolist() == [0, 0]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1], [1, 1]]
    assert batch["labels"][0, 1] == -100
    assert torch.equal(batch["decoder_input_ids"][1, 1:], batch["labels"][1, :1])
    (without,) = make_batches(loaded, DataOptions(str(tmp_path / "d.jsonl"), text_column="text"))
    assert without["decoder_input_ids"].tolist() == [[0], [0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--data": "nothing.jsonl"}, "nothing.jsonl: no such file or folder"),
        ({"--data": "~nobody-of-this-name/x.jsonl"}, "nobody-of-this-name"),
        ({"--data": "x.md"}, "expected one of .json, .jsonl, .csv, .txt, .parquet, .arrow, a folder"),
        ({"--set": "text_column=txet"}, "no column of texts 'txet'; it has text. Did you mean 'text'?"),
        ({"--set": "model_class=AutoModelForCausaLM"}, "no model class 'AutoModelForCausaLM'. Did you mean"),
        ({"--set": "model_class=LlamaForTokenClassification"}, "parameters that the checkpoint lacks"),
        ({"--set": "batch_size=0"}, "--set batch_size=0: Input should be greater than or equal to 1"),
        ({"--base": "elsewhere"}, "--base goes with an adapter"),
        ({"--fisher-labels": "none"}, "not one of 'drawn', 'given'"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, str], message: str, family: Path, tmp_path: Path) -> None:
    (tmp_path / "x.md").write_text("x")
    flags = {"--data": str(text_file(tmp_path, "txt")), "--out": str(tmp_path / "s")}
    flags |= {k: str(tmp_path / v) if k == "--data" and v[0] != "~" else v for k, v in change.items()}
    given = [x for pair in flags.items() for x in pair]
    done = run(["statistics", "collect", family / "base", *given], code=2 if "--fisher-labels" in change else 1)
    assert message in done.words
    assert not (tmp_path / "s").exists()


def test_activations_that_are_not_finite_are_refused() -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(StatisticsError, match="the inputs of 'weight' hold NaN or Inf"):
        collect(model, [torch.tensor([[1.0, float("nan"), 2.0]])])
    with pytest.raises(StatisticsError, match="No batches"):
        collect(model, [])


def test_rows_that_the_mask_does_not_tell_apart_are_not_measured() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(6, 2)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            x = self.first(torch.nn.functional.one_hot(input_ids, 3).float())
            return self.second(x.unflatten(1, (-1, 2)).flatten(2))  # two tokens side by side

    ids = torch.ones(2, 4, dtype=torch.int64)
    padded = collect(Model(), [{"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}])
    assert list(padded.header.places) == ["first.weight"]
    assert "2 x 2 rows, which the model's mask (2 x 4) does not divide" in padded.header.absent["second.weight"]
    whole = collect(Model(), [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    assert set(whole.header.places) == {"first.weight", "second.weight"}


def test_a_shared_input_that_is_shared_no_longer_is_an_error() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x if len(x) > 1 else x + 1)

    batches = [torch.randn(2, 3), torch.randn(1, 3)]
    with pytest.raises(StatisticsError, match=r"'b.weight' read the same input as 'a.weight' in the first batch"):
        collect(Model(), batches)
    apart = collect(Model(), batches, share=False)
    assert len(apart.header.grams) == 2


def test_staged_statistics_of_two_experts(family: Path, tmp_path: Path) -> None:
    """The command, its output for a merge, and a second call that measures nothing again."""
    texts = text_file(tmp_path, "txt")
    experts = [f"{n}={family / 'experts' / n}" for n in ("math", "code")]
    given = ["-b", str(family / "base"), *(f"--expert={e}" for e in experts)]
    data = [f"--data={n}={texts}" for n in ("math", "code")]
    command = ["statistics", "staged", *given, *data, "--out", str(tmp_path / "s")]
    done = run(command, code=0)
    assert done.out.count("Gram matrices for") == 2
    stage = tmp_path / "s" / "stages" / "0000" / "math" / "statistics.safetensors"
    before = stage.stat().st_mtime_ns
    assert run([*command, "--quiet"]).out == ""
    assert stage.stat().st_mtime_ns == before
    statistics = [f"--statistics={n}={tmp_path / 's' / n}" for n in ("math", "code")]
    run(["merge", *given, "-m", "regmean", *statistics, "--out", tmp_path / "merged"], code=0)
    refused = run(["statistics", "staged", *given, data[0], "--out", tmp_path / "t"], code=1)
    assert "'code' has no batches" in refused.err
    same = ["-e", "a/m", "-e", "b/m", "--data=m=d"]
    twice = run(["statistics", "staged", "-b", "x", *same, "--out", tmp_path / "u"])
    assert "two experts have the same name" in twice.err


@pytest.mark.parametrize("tokens", [{"eos_token": "</s>"}, {"unk_token": "<unk>"}, {}])
def test_texts_are_padded_for_a_tokenizer_that_has_no_token_for_it(
    tokens: dict[str, str], family: Path, tmp_path: Path
) -> None:
    """By any token, which is masked: the sums are those of a tokenizer with a pad token, and a note says so."""
    expert = shutil.copytree(family / "experts" / "math", tmp_path / "expert")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    grams = []
    for name, more in (("padded", {"pad_token": "</s>"}), ("bare", tokens)):
        (expert / "tokenizer_config.json").write_text(json.dumps(config | more))
        out = tmp_path / name
        done = run(["statistics", "collect", expert, "--data", text_file(tmp_path, "txt"), "--out", out], code=0)
        assert ("no pad token" in done.err) == (name == "bare")
        with open_statistics(out) as found:
            grams.append(found.gram(next(iter(found.header.grams))))
    assert torch.equal(*grams)


def test_an_encoder_that_was_saved_without_its_pooler_is_measured(tmp_path: Path) -> None:
    """As the suite text-minilm saves its base."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=60, **sizes), add_pooling_layer=False).save_pretrained(tmp_path / "base")
    loaded = load_model(str(tmp_path / "base"))
    assert not any("pooler" in name for name in loaded.model.state_dict())
    ids = torch.tensor([[5, 6, 7]])
    found = collect(loaded.model, [{"input_ids": ids}], checkpoint=loaded.checkpoint)
    assert found.header.model.architecture == "BertModel"
