"""`actmat try`: merges in memory have the bytes of those on disk, and answer as they do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.helpers.clip import write_clip
from tests.helpers.family import TEXTS, experts_of, model_flags
from tests.helpers.json_layouts import pinned
from tests.helpers.merging import actmat as run
from tests.helpers.tinymodels import made
from tests.tolerances import F32_PRODUCT

import actmat
from actmat.errors import OutputError, RecipeError, StatisticsError
from actmat.extras.models import in_memory
from actmat.extras.models.loading import Loaded, load_model
from actmat.extras.tune import harness, trying
from actmat.run.automatic import TABLE

PROMPT = "w3 w4 w5"


def continued(place: str, prompt: str, tokens: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(place)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    for _ in range(tokens):
        following = model(ids).logits[0, -1].argmax().reshape(1, 1)
        ids = torch.cat([ids, following], 1)
        if int(following) == model.config.eos_token_id:
            break
    return str(tokenizer.decode(ids[0, tokenizer(prompt, return_tensors="pt")["input_ids"].shape[1] :],
                                skip_special_tokens=True))  # fmt: skip


def test_strengths_of_one_expert_are_tried_one_after_the_other(family: Path) -> None:
    one = ["-b", str(family / "base"), "-e", str(experts_of(family)[0]), "-w", "0.5,-1"]
    tried = run(["try", *one, "--prompt", PROMPT, "--new-tokens", "1", "--json"])
    assert [row["model"].rpartition(" -w ")[2] for row in json.loads(tried.out)["models"]] == ["0.5", "-1"]
    assert "one weight per expert" in run(["tune", *one, "--out", "x", "--data", "a=b"]).err


def test_adapters_are_merged_in_memory_onto_their_base(family: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(family)
    adapters = [f"adapters/{n}" for n in TEXTS]
    actmat.merge(experts=adapters, out=tmp_path / "out", method="average", durable=False)
    found = actmat.merge(experts=adapters, method="average")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(torch.equal(found.tensors[n], t) for n, t in written.items())
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        ours = found.load().model(ids).logits
        theirs = load_model(str(tmp_path / "out"), base="base").model(ids).logits
    assert torch.equal(ours, theirs)


def test_a_prompt_is_answered_as_the_model_on_disk_does(family: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    command = [*model_flags(family), "-m", "average", "-m", "ties"]
    run(["merge", *command, "--out", "all", "--quiet"], code=0)
    before = sorted(tmp_path.rglob("*"))
    done = run(["try", *command, "--prompt", PROMPT, "--new-tokens", "4", "--compare", "--json"], code=0)
    places = {"average": "all/average", "ties": "all/ties", "base": str(family / "base")}
    places |= {n: str(family / "experts" / n) for n in TEXTS}
    found = pinned(json.loads(done.out), "try")
    assert {m["model"]: m["answers"] for m in found["models"]} == {
        name: [continued(place, PROMPT, 4)] for name, place in places.items()
    }
    assert len({m["answers"][0] for m in found["models"]}) > 1, "the models differ"
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


def test_answers_are_printed_below_the_name_of_the_merge(family: Path) -> None:
    done = run(["try", *model_flags(family), "--prompt", PROMPT, "--prompt", "w9", "--new-tokens", "3", "--quiet"])
    lines = done.out.splitlines()
    assert lines[0] == TABLE["full", "decoder"].method
    assert lines[1] == f"  {PROMPT}"
    assert "  w9" in lines


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for kind in ("cat", "hen"):
        (root / kind).mkdir()
        for n in range(2):
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(root / kind / f"{n}.png")
    return root


def test_images_are_compared_with_the_names_of_their_folders(tmp_path: Path, images: Path) -> None:
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    base = write_clip(tmp_path / "base")
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(base)
    done = run(["try", "-b", base, "-e", base, "-m", "average", "--images", images, "--json"], code=0)
    rows = json.loads(done.out)["models"][0]["images"]
    model: Any = CLIPModel.from_pretrained(base).eval()
    text = AutoTokenizer.from_pretrained(base)(["a photo of a cat.", "a photo of a hen."], padding=True,
                                               return_tensors="pt")  # fmt: skip
    pixels = CLIPImageProcessor.from_pretrained(base)(
        [Image.open(images / r["image"]).convert("RGB") for r in rows], return_tensors="pt"
    )["pixel_values"]
    with torch.no_grad():
        wanted = model(pixel_values=pixels, **text).logits_per_image.softmax(1)
    assert [r["label"] for r in rows] == [("cat", "hen")[i] for i in wanted.argmax(1)]
    assert [r["probability"] for r in rows] == pytest.approx(wanted.max(1).values.tolist(), rel=F32_PRODUCT)
    assert [r["folder"] for r in rows] == ["cat", "cat", "hen", "hen"]
    right = sum(r["folder"] == r["label"] for r in rows)
    done = run(["try", "-b", base, "-e", base, "-m", "average", "--images", images, "--quiet"])
    assert f"{right} of 4 images are in the folder of their class" in done.out


def test_a_classifier_has_its_own_classes(tmp_path: Path, images: Path) -> None:
    from transformers import ViTImageProcessor

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = made("vit", **sizes, image_size=32, patch_size=16, id2label={0: "cat", 1: "dog", 2: "hen"})
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    rows = list(trying.classify(Loaded(model, "base", None, str(tmp_path)), images))
    assert {r.label for r in rows} <= {"cat", "dog", "hen"}
    assert len(rows) == 4
    (images / "cat" / "broken.png").write_bytes(b"no image")
    try:
        with pytest.raises(StatisticsError, match=r"broken\.png: cannot be read as an image"):
            list(trying.classify(Loaded(model, "base", None, str(tmp_path)), images))
    finally:
        (images / "cat" / "broken.png").unlink()
    with pytest.raises(StatisticsError, match="writes no text"):
        trying.answer(Loaded(model, "base", None, str(tmp_path)), "hello")


def test_a_chat_template_is_used_unless_plain(family: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(family / "base")
    tokenizer.chat_template = "w7 {% for m in messages %}{{ m['content'] }}{% endfor %} w8"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_model(str(family / "experts" / "math"))
    chatty = Loaded(loaded.model, loaded.checkpoint, None, str(tmp_path))
    assert trying.answer(chatty, "w3", new_tokens=3) == trying.answer(loaded, "w7 w3 w8", new_tokens=3)
    assert trying.answer(chatty, "w3", new_tokens=3, chat=False) == trying.answer(loaded, "w3", new_tokens=3)


def test_benchmarks_are_asked_of_the_model_in_memory(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tune.test_harness import StandIn

    found = {"results": {"wiki": {"acc,none": 0.5, "acc_stderr,none": 0.1}}, "higher_is_better": {}}
    stand_in = StandIn(found)
    monkeypatch.setattr(harness, "_imported", stand_in.modules.__getitem__)
    done = run(["try", *model_flags(family), "--lm-eval", "wiki", "--limit", "5", "--quiet"])
    assert done.out == f"{TABLE['full', 'decoder'].method}\n  wiki: acc,none 0.5\n"
    (asked,) = stand_in.asked
    assert asked["limit"] == 5
    assert asked["model"]["pretrained"].config.model_type == "llama"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "no query given"),
        (["--prompt", "x", "--set", "classes=a"], "classes need --images"),
        (["--prompt", "x", "--limit", "3"], "--limit needs --lm-eval"),
    ],
)
def test_questions_that_make_no_sense_are_refused(family: Path, more: list[str], said: str) -> None:
    done = run(["try", *model_flags(family), *more], code=2)
    assert said in done.words


def test_problems_are_told_before_the_merge(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(["try", *model_flags(family), "--images", tmp_path], code=1)
    assert "expected a folder with images" in done.err
    base, experts = family / "base", [family / "experts" / "math"]
    with pytest.raises(RecipeError, match="merges on other machines"):
        actmat.merge(base, experts, executor="ray")
    monkeypatch.setattr(in_memory, "available_memory", lambda: 1000)
    with pytest.raises(OutputError, match="1 kB of memory are free"):
        actmat.merge(base, experts)
