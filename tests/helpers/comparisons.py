"""A comparison of two merges, made up."""

from __future__ import annotations

from actmat.extras.pages.comparison import Difference, MergeComparison, TensorDifference


def comparison(mark: str = "") -> MergeComparison:
    """Four layers of two kinds, growing apart with depth; `mark` stands in every text."""
    tensors = [TensorDifference(f"model.embed_tokens.weight{mark}", (32, 8), ("average", "average"), True, 0.0)]
    for layer in range(4):
        for k, kind in enumerate(("self_attn.q_proj", "mlp.up_proj")):
            relative = 0.1 + 0.4 * layer + 0.2 * k
            tensors.append(
                TensorDifference(
                    f"model.layers.{layer}.{kind}{mark}.weight",
                    (8, 8),
                    ("actmat", f"ties{mark}"),
                    same=False,
                    distance=relative,
                    norms=(1.0, 1.0),
                    relative=relative,
                    cosine=1 - relative**2 / 2,
                )
            )
    return MergeComparison(
        outs=(f"merged/actmat{mark}", f"merged/ties{mark}"),
        methods=("actmat", f"ties{mark}"),
        base=f"base{mark}",
        experts=((f"math{mark}", f"math{mark}"), (f"code{mark}", f"coding{mark}")),
        settings=(
            Difference("method", "actmat", f"ties{mark}"),
            Difference("options", None, {"density": 0.3, "why": mark}),
        ),
        tensors=tuple(tensors),
        diagnosed=(True, True),
        residuals=(Difference(f"math{mark}", 0.25, 0.5), Difference(f"code{mark}", 0.5, 0.125)),
        checks=(Difference(f"AM101 Change lost in rounding{mark}", "issue found, 3 tensors", "clear"),),
        notes=(f"the base was on a slow disk{mark}",),
    )
