"""Measures, rows and whole diagnoses made by hand."""

from typing import Any

from actmat.diagnostics.model import (
    Diagnosis,
    ExpertRow,
    MatrixRow,
)

Matrix = tuple[tuple[float, ...], ...]


def table(n: int, diagonal: float, off: float) -> Matrix:
    """`n x n` with two values."""
    return tuple(tuple(diagonal if s == t else off for s in range(n)) for t in range(n))


def a_measure(name: str = "model.layers.0.q_proj.weight", n: int = 2, **fields: Any) -> MatrixRow:
    """An unremarkable matrix: two unrelated experts of one size, merged by their mean."""
    settings: dict[str, Any] = {
        "part": "",
        "layer": 0,
        "shape": (64, 64),
        "norms": (1.0,) * n,
        "snr": (30.0,) * n,
        "relative_norms": (0.02,) * n,
        "cosine": table(n, 1.0, 0.05),
        "residual": (0.6,) * n,
        "merged_norm": 0.72,
        "sum_norm": 1.44,
    }
    return MatrixRow(name=name, **(settings | fields))


def some_facts(n: int = 2, **fields: Any) -> dict[str, Any]:
    """What checks judge: two matrices of unremarkable experts, nothing wrong."""
    names = ["model.layers.0.q_proj.weight", "model.layers.1.q_proj.weight"]
    settings: dict[str, Any] = {
        "labels": ["math", "code", "law"][:n],
        "measures": [a_measure(name, n) for name in names],
        "of_records": {},
    }
    return settings | fields


def a_diagnosis(**fields: Any) -> Diagnosis:
    """A whole one."""
    settings: dict[str, Any] = {
        "actmat": "0.1.0",
        "created": "2026-01-01T00:00:00+00:00",
        "recipe": {"base": "base"},
        "method": "actmat",
        "source": "merge",
        "base": "base",
        "out": "merged",
        "experts": tuple(ExpertRow(n, f"experts/{n}", "model", 1.0, 0.6, 0.5) for n in ("math", "code")),
        "actions": {"merge": 1},
        "measures": (a_measure(),),
        "findings": (),
    }
    return Diagnosis(**(settings | fields))
