"""Images with the classes' names through the text encoder, a head for each expert, labels as a score."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.helpers.clip import write_clip
from tests.helpers.family import move_weights
from tests.helpers.merging import actmat as run
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

import actmat
from actmat.errors import StatisticsError
from actmat.extras.collect.data import DataOptions, class_names, class_prompts
from actmat.extras.models.loading import Loaded, load_model

CLASSES = {"pets": ["cat", "gray_dog", "hen"], "flags": ["red", "blue"]}
PER_CLASS = 4


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIP, two experts that differ in both towers, and a folder of images for each."""
    root = tmp_path_factory.mktemp("clip")
    base = write_clip(root / "base")
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(base)
    rng = np.random.default_rng(0)
    for seed, (name, classes) in enumerate(CLASSES.items()):
        place = shutil.copytree(base, root / name)
        move_weights(place / "model.safetensors", seed)
        for kind in classes:
            folder = root / f"{name}-images" / kind
            folder.mkdir(parents=True)
            for n in range(PER_CLASS):
                Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{n}.png")
    return root


def flags(clip: Path, out: Path, *more: str) -> list[str]:
    experts = [x for n in CLASSES for x in ("-e", str(clip / n))]
    data = [x for n in CLASSES for x in ("--data", f"{n}={clip / n}-images")]
    space = ["--methods", "average,tsv", "--scales", "0.5,1", "--budget", "4"]
    return ["tune", "-b", str(clip / "base"), *experts, *data, *space, "--dtype", "float32", "--out", str(out), *more]


def naive(clip: Path, model: Path, name: str) -> Tensor:
    """Log-probabilities `N C` of the images of a task, each compared with all prompts, in the order of the files."""
    clip_model: Any = CLIPModel.from_pretrained(model).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(model), CLIPImageProcessor.from_pretrained(model)
    prompts = [f"a photo of a {c.replace('_', ' ')}." for c in sorted(CLASSES[name])]
    files = sorted((clip / f"{name}-images").rglob("*.png"))
    pixels = processor([Image.open(f).convert("RGB") for f in files], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        out = clip_model(pixel_values=pixels, **tokenizer(prompts, padding=True, return_tensors="pt"))
    return out.logits_per_image.double().log_softmax(-1)


def check_final_losses(clip: Path, out: Path) -> None:
    """Those of the final comparison, against the model on disk."""
    told = json.loads((out.with_name(f"{out.name}.tune") / "tune.json").read_text())
    for name in CLASSES:
        p, q = (naive(clip, place, name)[1::2] for place in (clip / name, out))
        wanted = float((p.exp() * (p - q)).sum(-1).mean())
        assert told["final"][0]["losses"][name] == pytest.approx(wanted, rel=1e-3, abs=1e-7)


def test_folders_of_images_name_the_classes_of_a_zero_shot_head(clip: Path, tmp_path: Path) -> None:
    """The final losses are those of the model on disk, whose text encoder is merged as well."""
    run(flags(clip, tmp_path / "best"), code=0)
    check_final_losses(clip, tmp_path / "best")


def test_only_the_scale_is_chosen_by_folders_of_images(clip: Path, tmp_path: Path) -> None:
    experts = [x for n in CLASSES for x in ("-e", str(clip / n))]
    data = [x for n in CLASSES for x in ("--data", f"{n}={clip / n}-images")]
    data += ["--set", "tune_scale=true"]
    out = tmp_path / "scaled"
    run(
        ["merge", "-b", clip / "base", *experts, *data, "-m", "tsv", "--dtype", "float32", "--out", out],
        code=0,
    )
    check_final_losses(clip, out)


def test_labels_of_the_folders_score_accuracy(clip: Path, tmp_path: Path) -> None:
    given = tmp_path / "names.txt"
    given.write_text("cat\ngray_dog\nhen\n")
    more = ["--score", "accuracy", "--set", "label_column=label"]
    more += ["--set", f"classes=pets={given}", "--set", "classes=flags=blue,red"]
    run(flags(clip, tmp_path / "best", *more), code=0)
    told = json.loads((tmp_path / "best.tune" / "tune.json").read_text())
    for name, classes in CLASSES.items():
        labels = torch.arange(len(classes)).repeat_interleave(PER_CLASS)[1::2]
        right = naive(clip, tmp_path / "best", name)[1::2].argmax(-1) == labels
        assert told["final"][0]["losses"][name] == pytest.approx(1 - float(right.double().mean()))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--set", "classes=cats=a,b"], "no expert has this name"),
        (["--template", "a photo"], "needs {}"),
        (["--template", "{}" + " long" * 60], "the model reads"),
    ],
)
def test_classes_that_cannot_be_used(clip: Path, tmp_path: Path, more: list[str], says: str) -> None:
    done = run(flags(clip, tmp_path / "best", *more))
    assert done.code in (1, 2)
    assert says in done.words
    assert not (tmp_path / "best").exists()


def test_names_of_classes_are_the_innermost_folders(clip: Path, tmp_path: Path) -> None:
    assert class_names(str(clip / "pets-images")) == ("cat", "gray_dog", "hen")
    for place in ("train/cat", "test/cat", "test/dog"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "x.png").write_bytes(b"")
    assert class_names(str(tmp_path)) == ("cat", "dog")
    assert class_names(str(clip / "base")) == class_names("no/such/folder") == ()
    loaded = load_model(str(clip / "base"))
    prompts = class_prompts(loaded, DataOptions("x", classes=("cat", "gray_dog"), template="my {}"))
    assert prompts["input_ids"].shape[0] == 2


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up_proj(x))


def test_each_expert_has_a_head_of_its_own_and_batches_are_ready(tmp_path: Path) -> None:
    """A model that transformers does not know, with predictions of 3 and of 5 classes."""
    torch.manual_seed(0)
    models = {name: Encoder() for name in ("base", "a", "b")}
    for name, model in models.items():
        (tmp_path / name).mkdir()
        save_file(model.state_dict(), tmp_path / name / "model.safetensors")
    heads = {"a": torch.randn(8, 3), "b": torch.randn(8, 5)}
    batches = {n: [{"x": torch.randn(10, 6)}, {"x": torch.randn(7, 6)}] for n in heads}

    def load(location: str) -> Loaded:
        model = Encoder()
        model.load_state_dict(load_file(Path(location) / "model.safetensors"))
        return Loaded(model, location, None, location)

    def predict(name: str) -> Any:
        return lambda model, batch: model(batch["x"]) @ heads[name]

    found = actmat.tune(
        tmp_path / "base", [tmp_path / "a", tmp_path / "b"], data=batches, out=tmp_path / "best", load=load,
        predict={n: predict(n) for n in heads}, space={"methods": ["average", "regmean"], "scales": [0.5, 1.0]},
        budget=8,
    )  # fmt: skip
    assert {t.candidate.merge.method for t in found.trials} == {"average", "regmean"}
    merged = load(str(tmp_path / "best")).model
    for name, given in batches.items():
        x = torch.cat([b["x"][1::2] for b in given])
        p, q = ((m(x) @ heads[name]).detach().double().log_softmax(-1) for m in (models[name], merged))
        assert found.finals[0].losses[name] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    with pytest.raises(StatisticsError, match="'a' are empty"):
        actmat.tune(tmp_path / "base", [tmp_path / "a"], data={"a": []}, out=tmp_path / "none", load=load)
