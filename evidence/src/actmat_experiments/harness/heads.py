"""Frozen classification heads on the disk, and answers behind them.

Shapes: `N` inputs, `D` features, `P` width of CLIP's joint space, `C` classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actmat.extras.demo.model import Head, fit_head
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.progress import one_thread_on

_VERSION = 2
_FILE = "head.safetensors"


@dataclass(frozen=True, slots=True)
class ClipHead:
    """`logits = text . normalize(projection z)`; the scale `exp(logit_scale)` is in the texts."""

    projection_PD: Tensor
    text_CP: Tensor

    def __call__(self, features_ND: Tensor) -> Tensor:
        """`N D -> N C`."""
        joint_NP = torch.nn.functional.normalize(features_ND @ self.projection_PD.mT, dim=-1)
        return joint_NP @ self.text_CP.mT

    def to(self, device: str) -> ClipHead:
        """The same head elsewhere."""
        return ClipHead(self.projection_PD.to(device), self.text_CP.to(device))


def save_head(head: Head | ClipHead, folder: Path) -> None:
    """Write one head into a folder."""
    if isinstance(head, ClipHead):
        tensors = {"projection": head.projection_PD, "text": head.text_CP}
    else:
        tensors = {"weight": head.weight_CD, "bias": head.bias_C}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _FILE)


def load_head(folder: Path) -> Head | ClipHead:
    """Read what `save_head` wrote."""
    tensors = load_file(folder / _FILE)
    if "text" in tensors:
        return ClipHead(tensors["projection"], tensors["text"])
    return Head(tensors["weight"], tensors["bias"])


def fitted_head(
    cache: Cache,
    key: Mapping[str, Any],
    features_ND: Callable[[], Tensor],
    labels_N: Tensor,
    n_classes: int,
    settings: Any,
    device: str,
) -> Path:
    """Folder of a head in the cache: `fit_head` on the base's features.

    Args:
        key: all that determines features and labels.
        settings: of a suite, with `ridge` and `logit_scale`.
    """

    def make(out: Path) -> None:
        with one_thread_on(device):
            found_ND = features_ND()
        head = fit_head(found_ND, labels_N, n_classes, ridge=settings.ridge, scale=settings.logit_scale)
        save_head(head, out)

    whole = {
        "version": _VERSION,
        "ridge": settings.ridge,
        "scale": settings.logit_scale,
        "device": device.split(":")[0],
    }
    return cache.get("head", {**key, **whole}, make)


def counted(logits_NC: Tensor, labels_N: Tensor, expert_NC: Tensor | None = None) -> dict[str, Any]:
    """Right answers, `correct`, of all, `total`; and, given the expert's logits, the `divergence` from the expert:
    `mean_n KL(softmax(expert_n) || softmax(logits_n))`, in nats, which takes no labels.

    >>> counted(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]), torch.tensor([[2.0, 0.0], [2.0, 0.0]]))
    {'correct': 1, 'total': 2, 'divergence': 0.0}
    """
    found: dict[str, Any] = {"correct": int((logits_NC.argmax(1) == labels_N).sum()), "total": len(labels_N)}
    if expert_NC is not None:
        found["divergence"] = divergence(expert_NC, logits_NC)
    return found


def divergence(expert_NC: Tensor, logits_NC: Tensor) -> float:
    """`mean_n KL(softmax(expert_n) || softmax(logits_n))`, in nats."""
    log_p, log_q = expert_NC.double().log_softmax(-1), logits_NC.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
