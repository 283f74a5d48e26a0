"""Conflicts between LoRA of one image or video model: modules in common, and the angles between their deltas, by block.

    cos(t, u) = sum_l <D_t,l, D_u,l> / (||D_t|| ||D_u||)      over the modules l of a block that both have

computed from factors. Files of different layouts are compared by diffusers' names.

Shapes: `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

from actmat.errors import CheckpointError
from actmat.experts.lora.adapter import Adapter
from actmat.experts.resolve import open_adapter
from actmat.extras.diffusion.layouts import in_layout
from actmat.linalg.lowrank import LowRank

_BLOCK = re.compile(r".*?\.\d+(?=\.)(?:\.(?:attentions|resnets|downsamplers|upsamplers)\.\d+)?")


@dataclass(frozen=True)
class BlockConflict:
    """One block of a model, in two files.

    Args:
        block: such as `transformer.transformer_blocks.3`.
        first, second: labels of the files.
        modules: number of modules that both change.
        cosine: between their deltas; None where one is zero.
        norms: Frobenius norms of both, over the modules in common.
    """

    block: str
    first: str
    second: str
    modules: int
    cosine: float | None
    norms: tuple[float, float]


@dataclass(frozen=True)
class Conflicts:
    """Result of `image_conflicts`.

    Args:
        blocks: of each pair of files, those that both change, in the model's order.
        cosines: (first, second) -> over all modules in common.
        only_in: label -> modules that no other file changes.
        norms: label -> norm of the whole delta.
    """

    blocks: tuple[BlockConflict, ...]
    cosines: Mapping[tuple[str, str], float | None]
    only_in: Mapping[str, tuple[str, ...]]
    norms: Mapping[str, float]


def block_of(module: str) -> str:
    """The block of a module by diffusers' name; its first two parts, where blocks are not numbered.

    >>> block_of("transformer.transformer_blocks.3.attn.to_q")
    'transformer.transformer_blocks.3'
    >>> block_of("unet.down_blocks.1.attentions.0.transformer_blocks.2.attn1.to_q"), block_of("transformer.x_embedder")
    ('unet.down_blocks.1.attentions.0', 'transformer.x_embedder')
    """
    found = _BLOCK.match(module)
    return found[0] if found else ".".join(module.split(".")[:2])


def image_conflicts(files: Sequence[str | Path]) -> Conflicts:
    """Measure what LoRA of one image or video model have in common, from their factors; no base is needed.

    Raises:
        CheckpointError: fewer than two files, a file that is no LoRA, or modules of different shapes.
    """
    labels = _labels(files)
    if len(files) < 2:
        raise CheckpointError(f"Expected two LoRA or more to compare, found {len(files)}.")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_adapter(file)) for file in files]
        adapters = dict(zip(labels, map(_in_one_spelling, opened), strict=True))
        names = list(dict.fromkeys(n for a in adapters.values() for n in a.modules))
        sums: dict[tuple[str, str, str], list[float]] = {}
        norms = dict.fromkeys(labels, 0.0)
        for name in names:
            deltas = {label: a.factors(a.modules[name], torch.float64) for label, a in adapters.items()
                      if name in a.modules}  # fmt: skip
            if len({d.shape for d in deltas.values()}) > 1:
                raise CheckpointError(
                    f"module '{name}' has deltas of shapes {' and '.join(str(tuple(d.shape)) for d in deltas.values())}"
                    f" in {', '.join(deltas)}. Likely cause: LoRA of different models. Fix: compare those of one model."
                )
            own = {label: inner_product(d, d) for label, d in deltas.items()}
            for label, square in own.items():
                norms[label] += square
            for one, two in combinations(deltas, 2):
                total = sums.setdefault((one, two, block_of(name)), [0.0, 0.0, 0.0, 0])
                found = (inner_product(deltas[one], deltas[two]), own[one], own[two], 1)
                sums[one, two, block_of(name)] = [a + b for a, b in zip(total, found, strict=True)]
    return Conflicts(
        tuple(
            BlockConflict(block, one, two, int(n), _cosine(dot, p, q), (p**0.5, q**0.5))
            for (one, two, block), (dot, p, q, n) in sums.items()
        ),
        {
            pair: _cosine(*(sum(v[i] for (a, b, _), v in sums.items() if (a, b) == pair) for i in range(3)))
            for pair in combinations(labels, 2)
        },
        {
            label: tuple(n for n in a.modules if all(n not in o.modules for k, o in adapters.items() if k != label))
            for label, a in adapters.items()
        },
        {label: square**0.5 for label, square in norms.items()},
    )


def _labels(files: Sequence[str | Path]) -> list[str]:
    """Names of the files; with a number where two have one name."""
    names = [Path(str(f)).name for f in files]
    return [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names, 1)]


def _in_one_spelling(adapter: Adapter) -> Adapter:
    found, problems = (adapter, []) if adapter.layout == "diffusers" else in_layout(adapter, "diffusers")
    if listed := [*adapter.problems, *problems]:
        raise CheckpointError(f"{adapter.location}: cannot be compared.", listed)
    return found


def inner_product(one: LowRank, two: LowRank) -> float:
    """`<B_1 A_1, B_2 A_2>` in time linear in the sides.

    >>> inner_product(LowRank(torch.ones(3, 1), torch.ones(1, 2)), LowRank(torch.ones(3, 1), torch.ones(1, 2)))
    6.0
    """
    return float(((two.b_OR.mT @ one.b_OR) * (two.a_RI @ one.a_RI.mT)).sum())


def _cosine(dot: float, first: float, second: float) -> float | None:
    return dot / (first * second) ** 0.5 if first > 0 and second > 0 else None
