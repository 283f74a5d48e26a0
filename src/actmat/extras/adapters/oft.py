"""OFT: rotates blocks of inputs.

    W = W_0 R^T,    R = blockdiag(R_1, ..., R_K),    R_k = (I - S_k)(I + S_k)^-1, or its truncated Neumann series

`S_k` is skew-symmetric; its upper triangle is stored. With `block_share` all blocks are equal.

Source: Qiu et al. (https://arxiv.org/abs/2306.07280, https://arxiv.org/abs/2506.19847); PEFT, `tuners/oft`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.experts.changes.base import Change, Content, Reader
from actmat.extras.adapters.groups import family_keys, group_tensors


@dataclass(frozen=True)
class _Rotation(Change):
    blocks: int  # number of stored blocks
    size: int
    is_shared: bool
    neumann_terms: int  # 0: the exact Cayley transform
    is_even: bool  # the last power of the series counts twice, like the others
    eps: float | None  # for the constrained variant
    reads_base = True

    def misfit(self, shape: tuple[int, int]) -> str:
        if self.is_shared:
            return "" if shape[1] % self.size == 0 else f"its blocks are of {self.size} inputs"
        inputs = self.blocks * self.size
        return "" if shape[1] == inputs else f"it rotates {inputs} inputs"

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor, first: int, last: int) -> Tensor:
        identity = torch.eye(self.size, dtype=base_PI.dtype)
        change = self._rotations(tensors[self.stored[0]]).mT - identity
        parts = base_PI.reshape(base_PI.shape[0], -1, self.size).transpose(0, 1)
        return (parts @ change).transpose(0, 1).reshape(base_PI.shape)

    def _rotations(self, vectors: Tensor) -> Tensor:
        """The blocks `R_k`, from the stored upper triangles."""
        rows, columns = torch.triu_indices(self.size, self.size, 1)
        skew = vectors.new_zeros(self.blocks, self.size, self.size)
        skew[:, rows, columns] = vectors
        skew = skew - skew.mT
        if self.eps is not None:
            largest = self.eps / math.sqrt(self.blocks)
            norms = torch.linalg.matrix_norm(skew, keepdim=True)
            skew = torch.where(norms <= largest, skew, skew * (largest / norms))
        identity = torch.eye(self.size, dtype=skew.dtype).expand_as(skew)
        if not self.neumann_terms:
            exact: Tensor = torch.linalg.solve(identity + skew, identity - skew, left=False)
            return exact
        return identity + _neumann(skew, self.neumann_terms, self.is_even)


def _neumann(skew: Tensor, terms: int, is_even: bool) -> Tensor:
    """`2 S + 2 S^2 + ... + S^(terms - 1)`: the last power counts once, as in PEFT since 0.18, or twice, as before."""
    out = torch.zeros_like(skew)
    if terms < 2:
        return out
    out += 2 * skew
    if terms == 2:
        return out
    power = skew @ skew
    out += 2 * power
    for _ in range(3, terms if is_even else terms - 1):
        power = power @ skew
        out += 2 * power
    return out if is_even else out + power @ skew


def _read(specs: Mapping[str, TensorSpec], fields: Mapping[str, Any]) -> Content:
    groups, extras, problems = group_tensors(specs, ("oft_R",), "OFT")
    is_shared = bool(fields.get("block_share"))
    terms = fields.get("num_cayley_neumann_terms", 5) if fields.get("use_cayley_neumann", True) else 0
    eps = fields.get("eps", 6e-5) if fields.get("coft") else None
    is_even = not fields.get("peft_version")  # written by PEFT since 0.18
    if "use_cayley_neumann" not in fields:
        problems.append(
            "its config has no 'use_cayley_neumann': it was written by an older PEFT, whose OFT rotates "
            "differently. Fix: fold it into its base with that version, and merge full models"
        )
    if not isinstance(terms, int) or not 0 <= terms <= 100 or not isinstance(eps, int | float | None):
        problems.append(f"expected numbers 'num_cayley_neumann_terms' and 'eps', found {terms!r} and {eps!r}")
        return Content([], extras, problems)
    changes = []
    for group in groups:
        shape = group.shape("oft_R")
        size = (1 + math.isqrt(1 + 8 * shape[1])) // 2 if len(shape) == 2 else 0
        if size * (size - 1) // 2 != math.prod(shape[1:]) or not shape:
            problems.append(f"module '{group.module}': oft_R is {shape}; expected blocks x upper triangle")
            continue
        stored = (group.names["oft_R"],)
        changes.append(_Rotation(f"{group.module}.weight", stored, shape[0], size, is_shared, terms, is_even, eps))
    return Content(changes, extras, problems)


OFT = Reader(
    "OFT",
    lambda fields: fields.get("peft_type") == "OFT",
    _read,
    "it rotates the base's weights",
    family_keys(
        ("coft", "eps", "block_share", "use_cayley_neumann", "num_cayley_neumann_terms"), "r", "oft_block_size"
    ),
)
