"""A small vision transformer in plain PyTorch, stored as a normal checkpoint, and frozen classification heads.

Shapes: `N` images, `H = W` pixels, `L` tokens, `D` hidden width, `C` classes.

The encoder has one packed `in_proj_weight` per attention, biases, norms, a class token and a table of positions; its
folder has configs and `model.safetensors`, so that every command accepts it. One head per task is fitted in
closed form to the base's features and shared by base, expert and merged models, so that only the encoders differ; the
vision experiments in the literature build such heads from text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from actmat.errors import CheckpointError
from actmat.extras.demo.tasks import WHITE

MODEL_TYPE = "actmat-demo-vit"
_INITIAL_STD = 0.02
_BATCH = 100


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes. `image_size` must be a multiple of `patch_size`, `hidden_size` of `num_attention_heads`."""

    image_size: int = 8
    patch_size: int = 2
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4


class Layer(nn.Module):
    """Pre-norm transformer layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = nn.MultiheadAttention(config.hidden_size, config.num_attention_heads, batch_first=True)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_NLD: Tensor) -> Tensor:
        """`N L D -> N L D`."""
        normed_NLD = self.attention_norm(x_NLD)
        x_NLD = x_NLD + self.attention(normed_NLD, normed_NLD, normed_NLD, need_weights=False)[0]
        down_NLD: Tensor = self.down_proj(nn.functional.gelu(self.up_proj(self.mlp_norm(x_NLD))))
        return x_NLD + down_NLD


class Encoder(nn.Module):
    """Images to features; the heads are not part of the model."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_proj = nn.Linear(config.patch_size**2, config.hidden_size)
        self.class_token = nn.Parameter(torch.randn(1, 1, config.hidden_size) * _INITIAL_STD)
        n_patches = (config.image_size // config.patch_size) ** 2
        self.position_embeddings = nn.Embedding(n_patches + 1, config.hidden_size)
        nn.init.normal_(self.position_embeddings.weight, std=_INITIAL_STD)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, images_NHW: Tensor) -> Tensor:
        """`N H W -> N D`: the class token after the last layer, normalized."""
        size = self.config.patch_size
        squares = images_NHW.unfold(1, size, size).unfold(2, size, size)  # row by row
        patches_NPC = squares.reshape(len(images_NHW), -1, size * size)
        class_N1D = self.class_token.expand(len(images_NHW), -1, -1)
        x_NLD = torch.cat([class_N1D, self.patch_proj(patches_NPC)], dim=1) + self.position_embeddings.weight
        for layer in self.layers:
            x_NLD = layer(x_NLD)
        features_ND: Tensor = self.norm(x_NLD[:, 0])
        return features_ND


def new_encoder(config: EncoderConfig, *, seed: int) -> Encoder:
    """A newly initialized encoder that depends only on the seed; the global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoder(config)


def save_encoder(encoder: Encoder, directory: Path) -> None:
    """Write `config.json`, `preprocessor_config.json` and `model.safetensors` into a new directory."""
    directory.mkdir(parents=True)
    config = {"model_type": MODEL_TYPE, "architectures": ["Encoder"], "dtype": "float32", **asdict(encoder.config)}
    pixels = {"do_rescale": True, "rescale_factor": 1 / WHITE}
    for name, data in {"config.json": config, "preprocessor_config.json": pixels}.items():
        (directory / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8", newline="\n")
    tensors = {name: tensor.detach().contiguous() for name, tensor in encoder.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_encoder(directory: Path) -> Encoder:
    """Load an encoder written by `save_encoder` or by a merge of such encoders.

    Raises:
        CheckpointError: the config is missing, or of another kind of model.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if (model_type := config.get("model_type")) != MODEL_TYPE:
        raise CheckpointError(
            f"{path}: expected model_type '{MODEL_TYPE}' of a model of the demo, found {model_type!r}."
        )
    with torch.device("meta"):
        encoder = Encoder(EncoderConfig(**{name: config[name] for name in EncoderConfig.__dataclass_fields__}))
    encoder.load_state_dict(load_file(directory / "model.safetensors"), assign=True)
    return encoder


@torch.no_grad()
def features(encoder: Encoder, images_NHW: Tensor) -> Tensor:
    """`N H W -> N D`, without gradients, in batches that fit a cache."""
    return torch.cat([encoder(batch) for batch in torch.split(images_NHW, _BATCH)])


@dataclass(frozen=True, slots=True)
class Head:
    """`logits = z weight^T + bias`. The tensors need no gradient and are never written to."""

    weight_CD: Tensor
    bias_C: Tensor

    def __call__(self, features_ND: Tensor) -> Tensor:
        """`N D -> N C`."""
        return nn.functional.linear(features_ND, self.weight_CD, self.bias_C)

    def to(self, device: str) -> Head:
        """The head on another device."""
        return Head(self.weight_CD.to(device), self.bias_C.to(device))


def fit_head(features_ND: Tensor, labels_N: Tensor, n_classes: int, *, ridge: float, scale: float) -> Head:
    """Fit a head by ridge regression onto one-hot labels, in closed form in float64.

    `W = Y^T Z (Z^T Z + ridge * tr(Z^T Z)/D * I)^{-1}` with centered features `Z` and centered one-hot labels `Y`, and
    `b = mean(y) - W mean(z)`; both are multiplied by `scale`, because a regression's outputs between 0 and 1 would be
    far too flat as logits.

    Args:
        ridge: regularization relative to the mean variance of a feature, above 0.
    """
    features_ND = features_ND.double()
    targets_NC = nn.functional.one_hot(labels_N, n_classes).double()
    mean_D, mean_C = features_ND.mean(0), targets_NC.mean(0)
    centered_ND = features_ND - mean_D
    gram_DD = centered_ND.mT @ centered_ND
    gram_DD.diagonal().add_(ridge * gram_DD.diagonal().mean())
    weight_CD = torch.linalg.solve(gram_DD, centered_ND.mT @ (targets_NC - mean_C)).mT
    bias_C = mean_C - weight_CD @ mean_D
    return Head((scale * weight_CD).float().contiguous(), (scale * bias_C).float())


def save_heads(heads: Mapping[str, Head], path: Path) -> None:
    """Save all heads in one file, as `<task>.weight` and `<task>.bias`."""
    tensors = {f"{task}.weight": head.weight_CD for task, head in heads.items()}
    save_file(tensors | {f"{task}.bias": head.bias_C for task, head in heads.items()}, path)
