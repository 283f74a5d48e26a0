"""Small questions to a model in memory: the continuation of a prompt, the classes of a folder of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from actmat.errors import StatisticsError
from actmat.extras.collect.data import IMAGES, DataOptions, class_names, class_prompts, known_ids, pad_token
from actmat.extras.models.chats import render_chats
from actmat.extras.models.loading import Loaded, from_files
from actmat.foreign import in_one_line

BATCH = 16
"""Images in one forward pass."""


@dataclass(frozen=True, slots=True)
class Classified:
    """An image, its most probable class and that one's probability; `folder`: the class by its folder, if it is one."""

    image: str
    label: str
    probability: float
    folder: str | None = None


def answer(loaded: Loaded, prompt: str, *, new_tokens: int = 64, chat: bool | None = None) -> str:
    """The model's continuation of a prompt, without sampling; an encoder-decoder model's answer.

    Args:
        loaded: a model that generates, and the location of its tokenizer.
        prompt: text.
        new_tokens: at most.
        chat: put the prompt into the tokenizer's chat template; None: if it has one.

    Raises:
        StatisticsError: the model does not generate, or has no tokenizer.
    """
    model: Any = loaded.model
    if not getattr(model, "can_generate", lambda: False)():
        raise StatisticsError(f"{type(model).__name__} writes no text: give --images or --lm-eval")
    tokenizer = from_files("AutoTokenizer", loaded)
    if chat is None:
        chat = bool(getattr(tokenizer, "chat_template", None))
    if chat:
        [text] = render_chats(tokenizer, [[{"role": "user", "content": prompt}]], "prompt")
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        tokens = tokenizer(prompt, return_tensors="pt")
    device = next(model.parameters()).device
    inputs = {k: tokens[k].to(device) for k in ("input_ids", "attention_mask") if k in tokens}
    inputs["input_ids"] = known_ids(model, **inputs)
    pad_token(tokenizer)
    with torch.inference_mode():
        written = model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )[0]
    if not getattr(model.config, "is_encoder_decoder", False):
        written = written[inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(written, skip_special_tokens=True))


def images_of(folder: str | Path) -> list[Path]:
    """Images in a folder and below it, sorted.

    Raises:
        StatisticsError: no images found.
    """
    images = sorted(p for p in Path(folder).rglob("*") if p.suffix.lower() in IMAGES)
    if not images:
        raise StatisticsError(f"{folder}: expected a folder with images ({', '.join(sorted(IMAGES))}), found none")
    return images


def classify(
    loaded: Loaded, folder: str | Path, *, classes: Sequence[str] = (), template: str | None = None
) -> Iterator[Classified]:
    """The most probable class of every image of a folder.

    Args:
        loaded: an image classifier, or a model that compares images with texts (CLIP).
        folder: images, possibly in a folder for each class.
        classes: of a model that compares with texts; default: the names of the folders.
        template: prompt of a class, for such a model; default `collect.data.TEMPLATE`.

    Raises:
        StatisticsError: no images, no classes, or a model that gives no probabilities of classes.
    """
    model: Any = loaded.model
    paths, folders = images_of(folder), class_names(str(folder))
    more: dict[str, Any] = {}
    if hasattr(model.config, "text_config") and hasattr(model.config, "vision_config"):
        names = tuple(classes) or folders
        if not names:
            raise StatisticsError(f"{folder} has no folder for each class: name them with --set classes=a,b,c")
        more = class_prompts(loaded, replace(DataOptions(str(folder)), classes=names, template=template))
    else:
        labels = getattr(model.config, "id2label", None) or {}
        names = tuple(str(labels[i]) for i in sorted(labels))
    processor = from_files("AutoImageProcessor", loaded)
    for start in range(0, len(paths), BATCH):
        batch = paths[start : start + BATCH]
        with torch.inference_mode():
            output = model(**_pixels(processor, batch, model), **more)
        logits_NC = getattr(output, "logits_per_image", getattr(output, "logits", None))
        if logits_NC is None or logits_NC.ndim != 2 or logits_NC.shape[1] != len(names):
            raise StatisticsError(f"{type(model).__name__} gives no probabilities of {len(names)} classes of images")
        values, places = logits_NC.float().softmax(1).max(1)
        for path, value, place in zip(batch, values.tolist(), places.tolist(), strict=True):
            own_folder = path.parent.name if path.parent.name in folders else None
            yield Classified(str(path.relative_to(folder)), names[place], value, own_folder)


def _pixels(processor: Any, paths: Sequence[Path], model: Any) -> dict[str, torch.Tensor]:
    from PIL import Image

    opened = []
    for path in paths:
        try:
            with Image.open(path) as image:
                opened.append(image.convert("RGB"))
        except OSError as error:
            raise StatisticsError(f"{path}: cannot be read as an image: {in_one_line(error)}") from error
    parameter = next(model.parameters())
    pixels = processor(images=opened, return_tensors="pt")["pixel_values"]
    return {"pixel_values": pixels.to(parameter.device, parameter.dtype)}
