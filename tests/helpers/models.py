"""Tiny models of many architectures, experts of them, and a naive float64 merge of their stored tensors.

What is a matrix in each architecture is written down here by hand (`matrices`), independently of `actmat.layout`:
every entry maps names to the views `O I` of a stored tensor that the matrix rule must see one at a time.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.helpers.tinymodels import build
from torch import Tensor, nn

VOCABULARY = 60
Views = Callable[[Tensor], list[Tensor]]


def linear(weight: Tensor) -> list[Tensor]:
    return [weight]


def pointwise(weight: Tensor) -> list[Tensor]:
    """A convolution of one point, as a map of channels."""
    return [weight[:, :, 0, 0]]


def conv1d(weight: Tensor) -> list[Tensor]:
    return [weight.T]


def conv1d_thirds(weight: Tensor) -> list[Tensor]:
    return list(weight.T.chunk(3))


def thirds(weight: Tensor) -> list[Tensor]:
    return list(weight.chunk(3))


def halves(weight: Tensor) -> list[Tensor]:
    return list(weight.chunk(2))


def four_query_two_key_heads(weight: Tensor) -> list[Tensor]:
    """Heads of 8 rows: 4 of queries, 2 of keys, 2 of values."""
    return [weight[:32], weight[32:48], weight[48:]]


def stacked_transposed(weight: Tensor) -> list[Tensor]:
    return [one.T for one in weight]


def stacked_alternating(weight: Tensor) -> list[Tensor]:
    """`E x H x 2F`, gate in the even and up in the odd columns."""
    return [one[:, start::2].T for one in weight for start in (0, 1)]


@dataclass(frozen=True)
class Case:
    """One architecture of `tinymodels`: what to feed it, and which stored tensors are matrices."""

    name: str
    matrices: Mapping[str, Views]
    pixels: bool = False
    tied: bool = False

    @cached_property
    def loader(self) -> Any:
        """The transformers class."""
        return type(self.build())

    def build(self) -> Any:
        """A fresh random model, in float32, for inference."""
        return build(self.name, experts=4)

    def inputs(self) -> dict[str, Tensor]:
        """A small batch."""
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        if self.name == "clip":
            return {"input_ids": tokens, "pixel_values": pixels}
        if self.name == "t5":
            return {"input_ids": tokens, "decoder_input_ids": tokens[:, :4]}
        return {"pixel_values": pixels} if self.pixels else {"input_ids": tokens}

    def output(self, model: nn.Module) -> Tensor:
        """Logits for the batch."""
        with torch.no_grad():
            out = model(**self.inputs())
        return torch.cat([out.text_embeds, out.image_embeds]) if self.name == "clip" else out.logits

    def views(self, name: str) -> Views | None:
        """How the matrix rule sees the stored tensor `name`; None: it does not."""
        return next((v for pattern, v in self.matrices.items() if re.fullmatch(pattern, name)), None)


CASES = (
    Case("llama", {r".*_proj\.weight|lm_head\.weight": linear}),
    Case("mixtral", {r".*_proj\.weight|.*\.w[123]\.weight|lm_head\.weight": linear}),
    Case("qwen2_moe", {r".*_proj\.weight|lm_head\.weight": linear}),
    Case(
        "gpt_oss",
        {
            r".*experts\.gate_up_proj": stacked_alternating,
            r".*experts\.down_proj": stacked_transposed,
            r".*[qkvo]_proj\.weight|lm_head\.weight": linear,
        },
    ),
    Case("gpt2", {r".*c_attn\.weight": conv1d_thirds, r".*c_(proj|fc)\.weight": conv1d}, tied=True),
    Case(
        "phi3",
        {
            r".*qkv_proj\.weight": four_query_two_key_heads,
            r".*gate_up_proj\.weight": halves,
            r".*(o|down)_proj\.weight|lm_head\.weight": linear,
        },
    ),
    Case("bert", {r".*(query|key|value|dense)\.weight": linear}, tied=True),
    Case("t5", {r".*\.(q|k|v|o|wi_[01]|wo)\.weight": linear}, tied=True),
    Case("clip", {r".*_proj\.weight|.*fc[12]\.weight|(text|visual)_projection\.weight": linear}),
    Case("vit", {r".*(query|key|value|dense)\.weight|classifier\.weight": linear}, pixels=True),
    Case(
        "resnet",
        {r"classifier\.1\.weight": linear, r".*\.(shortcut|layer\.[02])\.convolution\.weight": pointwise},
        pixels=True,
    ),
)
BY_NAME = {case.name: case for case in CASES}


def perturbed(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Experts' values: every float tensor moved by a tenth of its size or a little, every integer raised."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            out[name] = tensor + seed
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        size = tensor.float().std() if tensor.numel() > 1 else torch.tensor(0.0)
        moved = tensor.float() + noise * (0.1 * float(size) + 0.01)
        out[name] = (moved.abs() if name.endswith("running_var") else moved).to(tensor.dtype)
    return out


def save_family(case: Case, folder: Path, *, n_experts: int = 3) -> tuple[Path, list[Path]]:
    """`base` and `expert1..n` under `folder`, saved by transformers; float32, the last expert in bfloat16.

    Three, because two would make the stacked deltas of the 16-row layers square, and so as badly conditioned as random
    matrices get: there float32 and float64 differ for no fault of the code.
    """
    model = case.build()
    model.save_pretrained(folder / "base")
    start = {k: v.clone() for k, v in model.state_dict().items()}
    experts = []
    for n in range(1, n_experts + 1):
        place = folder / f"expert{n}"
        values = perturbed(start, n)
        if case.tied:
            shared = model.get_input_embeddings().weight
            values |= {
                k: values[next(n for n, v in model.state_dict().items() if v.data_ptr() == shared.data_ptr())]
                for k, v in model.state_dict().items()
                if v.data_ptr() == shared.data_ptr()
            }
        model.load_state_dict(values)
        saved = model.to(torch.bfloat16) if n == n_experts else model
        saved.save_pretrained(place)
        model = model.float()
        experts.append(place)
    return folder / "base", experts


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files in a folder."""
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def naive_actmat(deltas: Sequence[Tensor]) -> Tensor:
    """`(sum D D^T D) (sum D^T D)^+` in float64, eigenvalues up to `I * eps(float32)` of the largest dropped."""
    gram = sum(d.T @ d for d in deltas)
    right = sum(d @ d.T @ d for d in deltas)
    values, vectors = torch.linalg.eigh(gram)
    kept = values > gram.shape[0] * torch.finfo(torch.float32).eps * values[-1]
    basis = vectors[:, kept]
    return (right @ basis) / values[kept] @ basis.T


def naive_merge(
    base: Mapping[str, Tensor],
    experts: Sequence[Mapping[str, Tensor]],
    views: Callable[[str], Views | None],
    *,
    method: str,
) -> dict[str, Tensor]:
    """Merged tensors in float64 (integers as in the base), by a loop over names and matrices."""
    out: dict[str, Tensor] = {}
    for name, start in base.items():
        if not start.is_floating_point():
            out[name] = start.clone()
            continue
        deltas = [e[name].double() - start.double() for e in experts]
        seen = views(name) if method == "actmat" else None
        if seen is None:
            merged = sum(deltas) / len(deltas)
        else:
            merged = torch.zeros_like(deltas[0])
            for target, *parts in zip(seen(merged), *(seen(d) for d in deltas), strict=True):
                target.copy_(naive_actmat(parts))
        out[name] = start.double() + merged
    return out
