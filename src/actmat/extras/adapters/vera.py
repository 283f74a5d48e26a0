"""VeRA: two frozen random factors shared by all layers, and two trained vectors per layer.

    delta = diag(b) B[:O] diag(d) A[:, :I]

Source: Kopiczko et al. (https://arxiv.org/abs/2310.11454); PEFT, `tuners/vera`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.experts.changes.base import Change, Content, Reader
from actmat.extras.adapters.groups import family_keys, group_tensors
from actmat.linalg.lowrank import LowRank

SHARED_A, SHARED_B = "base_model.vera_A", "base_model.vera_B"


@dataclass(frozen=True)
class _Shared(Change):
    """Factors that all layers share, scaled; `stored`: lambda_b, lambda_d, A, B."""

    rows_of_b: int
    width: int  # columns of the shared A
    rank: int
    reads_base = False

    def misfit(self, shape: tuple[int, int]) -> str:
        fits = shape[0] == self.rows_of_b and shape[1] <= self.width
        return "" if fits else f"it has {self.rows_of_b} outputs, and its factors cover at most {self.width} inputs"

    def factors(self, tensors: Mapping[str, Tensor], base_OI: Tensor, shape: tuple[int, int]) -> LowRank:
        b_O, d_R, a_RI, b_OR = (tensors[n] for n in self.stored)
        return LowRank(b_O[:, None] * b_OR[: shape[0]], d_R[:, None] * a_RI[:, : shape[1]])


def _read(specs: Mapping[str, TensorSpec], fields: Mapping[str, Any]) -> Content:
    trained = {n: s for n, s in specs.items() if n not in (SHARED_A, SHARED_B)}
    groups, extras, problems = group_tensors(trained, ("vera_lambda_b", "vera_lambda_d"), "VeRA")
    if SHARED_A not in specs or SHARED_B not in specs:
        problems.append(
            "the shared factors vera_A and vera_B are not in the file (save_projection: false), and only PEFT draws "
            f"them, from the seed {fields.get('projection_prng_key')}. Load it with PEFT and save it again with "
            "save_projection=True"
        )
        return Content([], extras, problems)
    a, b = specs[SHARED_A].shape, specs[SHARED_B].shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        problems.append(f"the shared factors are {a} and {b}; expected R x I and O x R")
        return Content([], extras, problems)
    changes = []
    for group in groups:
        if missing := group.missing("vera_lambda_b", "vera_lambda_d"):
            problems.append(missing)
            continue
        rows, rank = group.shape("vera_lambda_b"), group.shape("vera_lambda_d")
        if len(rows) != 1 or rank != (a[0],) or rows[0] > b[0]:
            problems.append(f"module '{group.module}': vectors {rows} and {rank} do not match the factors {a} and {b}")
            continue
        stored = (group.names["vera_lambda_b"], group.names["vera_lambda_d"], SHARED_A, SHARED_B)
        changes.append(_Shared(f"{group.module}.weight", stored, rows[0], a[1], a[0]))
    return Content(changes, extras, problems)


VERA = Reader(
    "VeRA",
    lambda fields: fields.get("peft_type") == "VERA",
    _read,
    "the base gives a layer's number of inputs, and so its part of the shared factors",
    family_keys(
        ("projection_prng_key",), "r", "save_projection", d_initial="affects only initial values; the base is unchanged"
    ),
)
