"""Which tensors the paper's own code gave to the matrix rule (the recipe's `scope: paper`).

The rule looks at the shape and the name as stored and knows nothing of roles. It therefore acts on transposed weights
as they lie in the file (GPT-2's `Conv1D`, open_clip's `visual.proj`), takes packed projections whole, and lets
position embeddings and T5's relative attention biases through. It is here to reproduce the paper's numbers; the
default scope goes by role.
"""

from __future__ import annotations

from actmat.checkpoints.base import TensorSpec

__all__ = ["LARGEST_SIDE", "paper_scope"]

LARGEST_SIDE = 20_000
"""Matrices with a side this long or longer are vocabularies to the paper's code, and averaged."""


def paper_scope(name: str, spec: TensorSpec) -> tuple[bool, str]:
    """Whether the matrix rule applies to this tensor *as stored*, and why; if not, the deltas are averaged.

    The matrix rule acts on floating-point tensors with exactly two axes, whose name does not contain
    `text_projection` and whose larger side is below 20000.
    """
    if not spec.is_floating:
        return False, f"paper scope: {spec.dtype} entries are not merged"
    if len(spec.shape) != 2:
        return False, f"paper scope: {len(spec.shape)}-D, so the mean of the deltas"
    if "text_projection" in name:
        return False, "paper scope: the name contains text_projection, so the mean of the deltas"
    if max(spec.shape) >= LARGEST_SIDE:
        return False, f"paper scope: a side of {max(spec.shape)} >= {LARGEST_SIDE}, so the mean of the deltas"
    return True, f"paper scope: 2-D, sides below {LARGEST_SIDE}, in the stored orientation"
