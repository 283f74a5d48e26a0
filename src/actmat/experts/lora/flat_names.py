"""Module names with underscores for dots (kohya's), found among the tensors of a base.

`down_blocks_0_attentions_0_proj_in` may be `down_blocks.0.attentions.0.proj_in` or `down.blocks_0...`: only the base
says which. Its tensors may have one more prefix (`model.diffusion_model.`), the same for all modules of an adapter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from actmat.checkpoints.base import TensorSpec

__all__ = ["find_flat_names"]

_WEIGHT = ".weight"


def find_flat_names(specs: Mapping[str, TensorSpec], flat: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Tensor of the base for each flat name that is found, and problems.

    >>> specs = {n: TensorSpec(n, (2, 2), "float32", "") for n in ("unet.mid_block.proj_in.weight", "x.weight")}
    >>> find_flat_names(specs, ["mid_block_proj_in"])
    ({'mid_block_proj_in': 'unet.mid_block.proj_in.weight'}, [])
    """
    wanted = set(flat)
    by_prefix: dict[str, dict[str, list[str]]] = {}
    for name, spec in specs.items():
        if not name.endswith(_WEIGHT) or len(spec.shape) < 2:
            continue
        for prefix, rest in _splits(name.removesuffix(_WEIGHT)):
            if (found := rest.replace(".", "_")) in wanted:
                by_prefix.setdefault(prefix, {}).setdefault(found, []).append(name)
    if not by_prefix:
        return {}, []
    counts = Counter({prefix: len(found) for prefix, found in by_prefix.items()})
    (best, most), *others = counts.most_common()
    tied = [p for p, n in others if n == most]
    if tied:
        shown = " and ".join(f"'{p}'" for p in sorted([best, *tied]))
        return {}, [
            f"{most} of its {len(wanted)} modules are found in the base under each of the prefixes {shown}, and the "
            "file does not say which is meant. Give one of these models by itself as the base"
        ]
    problems = [
        f"module '{found}' may be any of {', '.join(names)} of the base, which differ only in dots and underscores"
        for found, names in by_prefix[best].items()
        if len(names) > 1
    ]
    return {found: names[0] for found, names in by_prefix[best].items() if len(names) == 1}, problems


def _splits(module: str) -> Iterable[tuple[str, str]]:
    """A dotted name as prefix and rest, at every dot."""
    yield "", module
    for i, c in enumerate(module):
        if c == ".":
            yield module[: i + 1], module[i + 1 :]
