"""CLIP: the base's image encoder, and zero-shot heads from the texts of the classes.

Shapes: `C` classes, `K` templates, `P` width of the joint space.

A task's file, `tasks/<task>.json`, holds where its data are, how long its expert trains, its prompt templates, and the
words for its classes where the data set's own names are not what CLIP was asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actmat.errors import CheckpointError
from actmat_experiments.harness.cache import Cache, library_versions
from actmat_experiments.harness.heads import ClipHead, save_head
from actmat_experiments.harness.hub import model_folder
from actmat_experiments.harness.suite import known_names
from actmat_experiments.vision.images import HubSet, ImageTask

_VERSION = 1
_TEXT_BATCH = 64


@dataclass(frozen=True, slots=True)
class ClipTask:
    """A task of the paper.

    Args:
        hub: where its data are.
        expert: last part of the hub id of its public expert.
        epochs: of full fine-tuning, about 2,000 steps.
        templates: prompts, with `{}` for the class.
        classes: words for the classes; None: those of the data set.
        names: the published names of the data set's classes, in the order of its labels, where a copy has none.
    """

    name: str
    hub: HubSet
    expert: str
    epochs: int
    templates: tuple[str, ...]
    classes: tuple[str, ...] | None
    names: tuple[str, ...] = ()


def clip_tasks(names: Sequence[str] | None = None) -> list[ClipTask]:
    """The paper's eight tasks, or some of them.

    Raises:
        RecipeError: a name is unknown.
    """
    tasks = {}
    for file in sorted(files("actmat_experiments.vision").joinpath("tasks").iterdir(), key=lambda f: f.name):
        fields = json.loads(file.read_text(encoding="utf-8"))
        name = file.name.removesuffix(".json")
        tasks[name] = ClipTask(
            name=name,
            hub=HubSet(**fields["hub"]),
            expert=fields["expert"],
            epochs=fields["epochs"],
            templates=tuple(fields["templates"]),
            classes=tuple(fields["classes"]) if "classes" in fields else None,
            names=tuple(fields.get("names", ())),
        )
    return [tasks[name] for name in known_names(names, tasks)]


def class_words(name: str) -> str:
    """A data set's name of a class as words: `/a/abbey` -> "abbey", `baseball_diamond` -> "baseball diamond".

    A slash in a name of several words is part of it: "Ram C/V Cargo Van Minivan 2012" of the Cars.
    """
    bare = re.sub(r"^/\w/", "", name)
    return re.sub(r"_+" if " " in bare else r"[_/]+", " ", bare).strip()


def clip_base(cache: Cache, location: str) -> Path:
    """The image encoder of a CLIP checkpoint, as a checkpoint of its own, with projection and text parts next to it.

    Returns:
        The stage's folder: `encoder/`, `text/` (the whole model, for the heads), `projection.safetensors`.
    """
    folder, identity = model_folder(location)
    key = {"version": _VERSION, "source": identity, "libraries": library_versions("transformers")}

    def make(out: Path) -> None:
        from transformers import CLIPModel, CLIPVisionModel

        CLIPVisionModel.from_pretrained(folder).float().save_pretrained(out / "encoder")
        whole = CLIPModel.from_pretrained(folder)
        tensors = {"projection": whole.visual_projection.weight.detach().float().contiguous()}
        tensors["scale"] = whole.logit_scale.detach().float().exp().reshape(1)
        save_file(tensors, out / "projection.safetensors")

    return cache.get("clip-base", key, make)


def public_expert(cache: Cache, location: str) -> Path:
    """A ready-made expert, stored under the same names as the base's encoder.

    Raises:
        CheckpointError: it lacks weights of an image encoder of CLIP, which transformers would draw at random.
    """
    folder, identity = model_folder(location)
    key = {"version": _VERSION, "source": identity, "libraries": library_versions("transformers")}

    def make(out: Path) -> None:
        from transformers import CLIPVisionModel

        model, loading = CLIPVisionModel.from_pretrained(folder, output_loading_info=True)
        if missing := sorted(loading["missing_keys"]):
            raise CheckpointError(
                f"'{location}' lacks {len(missing)} weights of an image encoder of CLIP. Is it an adapter, or another "
                "part of the model? Without it, leave out the task (--tasks), or train experts (experts=train).",
                missing,
            )
        model.float().save_pretrained(out)

    return cache.get("public-expert", key, make)


def clip_head(cache: Cache, location: str, base: Path, task: ImageTask, known: ClipTask, device: str = "cpu") -> Path:
    """The frozen zero-shot head of a task: per class the mean over templates of the normalized text features,
    normalized again, times `exp(logit_scale)`.

    Args:
        location: of the CLIP model, for its text encoder and tokenizer.
        base: what `clip_base` made of it.
    """
    words = known.classes or tuple(class_words(c) for c in task.class_names)
    if len(words) != len(task.class_names):
        raise CheckpointError(
            f"The task '{task.name}' has {len(task.class_names)} classes, but words for {len(words)}."
        )
    key = {"version": _VERSION, "base": base.name, "words": words, "templates": known.templates}

    def make(out: Path) -> None:
        from transformers import AutoTokenizer, CLIPModel

        folder, _ = model_folder(location)
        model, tokenizer = CLIPModel.from_pretrained(folder).eval().to(device), AutoTokenizer.from_pretrained(folder)
        stored = load_file(base / "projection.safetensors")
        rows = [text_feature([t.format(word) for t in known.templates], model, tokenizer, device) for word in words]
        text_CP = torch.nn.functional.normalize(torch.stack(rows), dim=-1) * stored["scale"]
        save_head(ClipHead(stored["projection"], text_CP), out)

    return cache.get("clip-head", key, make)


@torch.inference_mode()
def text_feature(prompts_K: Sequence[str], model: Any, tokenizer: Any, device: str) -> Tensor:
    """Mean of the normalized features of the prompts: `K -> P`.

    Raises:
        CheckpointError: a prompt has more tokens than the model reads.
    """
    features, most = [], model.config.text_config.max_position_embeddings
    for start in range(0, len(prompts_K), _TEXT_BATCH):
        batch = list(prompts_K[start : start + _TEXT_BATCH])
        tokens = tokenizer(batch, padding=True, return_tensors="pt").to(device)
        lengths = tokens["attention_mask"].sum(1).tolist()
        if (longest := max(lengths)) > most:
            raise CheckpointError(
                f"The prompt '{batch[lengths.index(longest)]}' has {longest} tokens; the text encoder reads {most}. "
                "Give the class a shorter name."
            )
        features_KP = model.text_projection(model.text_model(**tokens).pooler_output)
        features.append(torch.nn.functional.normalize(features_KP, dim=-1).float().cpu())
    return torch.cat(features).mean(0)
