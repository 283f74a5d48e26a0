"""A small vision transformer in plain PyTorch, stored as an ordinary checkpoint.

Shapes: `N` images, `H = W` pixels, `P` patches, `L = P + 1` tokens, `D` hidden width, `C` channels of a patch.

It has one packed `in_proj_weight` per attention, biases, norms, a class token and a table of positions; its folder
holds `config.json` and `model.safetensors`, so that every command takes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from actmat.errors import CheckpointError

MODEL_TYPE = "actmat-demo-vit"
_INITIAL_STD = 0.02


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
    """Images to features; a head, which is no part of the model, gives the features a meaning."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self._side = config.image_size // config.patch_size  # patches along one side of the image
        self.patch_proj = nn.Linear(config.patch_size**2, config.hidden_size)
        self.class_token = nn.Parameter(torch.randn(1, 1, config.hidden_size) * _INITIAL_STD)
        self.position_embeddings = nn.Embedding(self._side**2 + 1, config.hidden_size)
        nn.init.normal_(self.position_embeddings.weight, std=_INITIAL_STD)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, images_NHW: Tensor) -> Tensor:
        """`N H W -> N D`: the class token after the last layer, normalised."""
        patches_NPC = self._patches(images_NHW)
        class_N1D = self.class_token.expand(len(images_NHW), -1, -1)
        x_NLD = torch.cat([class_N1D, self.patch_proj(patches_NPC)], dim=1) + self.position_embeddings.weight
        for layer in self.layers:
            x_NLD = layer(x_NLD)
        features_ND: Tensor = self.norm(x_NLD[:, 0])
        return features_ND

    def _patches(self, images_NHW: Tensor) -> Tensor:
        """Cut into squares, in reading order: `N H W -> N P C`."""
        n, side = self._side, self.config.patch_size
        squares = images_NHW.reshape(len(images_NHW), n, side, n, side).transpose(2, 3)
        return squares.reshape(len(images_NHW), n * n, side * side)


def new_encoder(config: EncoderConfig, *, seed: int) -> Encoder:
    """A freshly initialised encoder that depends on the seed only; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoder(config)


def save_encoder(encoder: Encoder, directory: Path) -> None:
    """Write `config.json` and `model.safetensors` into a new directory."""
    directory.mkdir(parents=True)
    config = {"model_type": MODEL_TYPE, "architectures": ["Encoder"], "dtype": "float32", **asdict(encoder.config)}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")
    tensors = {name: tensor.detach().contiguous() for name, tensor in encoder.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_encoder(directory: Path) -> Encoder:
    """The encoder of a directory that `save_encoder`, or a merge of such encoders, has written.

    Raises:
        CheckpointError: no config there, or one of another kind of model.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no config.json, so it is no checkpoint of the demo.")
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("model_type") != MODEL_TYPE:
        raise CheckpointError(f"{path}: expected model_type '{MODEL_TYPE}', found {config.get('model_type')!r}.")
    sizes = {name: config[name] for name in EncoderConfig.__dataclass_fields__}
    with torch.device("meta"):
        encoder = Encoder(EncoderConfig(**sizes))
    encoder.load_state_dict(load_file(directory / "model.safetensors"), assign=True)
    return encoder
