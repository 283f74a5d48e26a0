"""Selection of tensors by the authors' code of the ACTMat paper (the recipe's `scope: paper`).

It goes by the stored shape and the name, not by roles. It therefore includes transposed weights as stored (GPT-2's
`Conv1D`, open_clip's `visual.proj`), packed projections as one matrix, position embeddings and T5's relative attention
biases. It exists to reproduce the paper's numbers; the default scope goes by role.
"""

from __future__ import annotations

from actmat.checkpoints.base import TensorSpec

LARGEST_SIDE = 20_000
"""Matrices with a side this long or longer are taken for vocabularies and averaged."""


def paper_scope(name: str, spec: TensorSpec) -> tuple[bool, str]:
    """True if the matrix method is applied to this tensor as stored, else its deltas are averaged; and the reason.

    It is applied to floating-point tensors with exactly two axes, whose name does not contain `text_projection` and
    whose larger side is below 20000.

    >>> paper_scope("fc.weight", TensorSpec("fc.weight", (4, 3), "float32", ""))
    (True, 'paper scope: 2-D, sides below 20000, in the stored orientation')
    """
    if not spec.is_floating:
        return False, f"paper scope: {spec.dtype} entries are not merged"
    if len(spec.shape) != 2:
        return False, f"paper scope: {len(spec.shape)}-D"
    if "text_projection" in name:
        return False, "paper scope: the name contains text_projection"
    if max(spec.shape) >= LARGEST_SIDE:
        return False, f"paper scope: a side of {max(spec.shape)} >= {LARGEST_SIDE}"
    return True, f"paper scope: 2-D, sides below {LARGEST_SIDE}, in the stored orientation"
