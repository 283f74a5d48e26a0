"""Diagnoses that look like those of real merges, made from a formula: any number of experts, layers and tensors."""

import json
import math
import random
from typing import Any

from tests.helpers.diagnoses import Matrix, a_diagnosis, a_measure

from actmat.diagnostics.model import Diagnosis, ExpertRow, Finding, MatrixRow

MODULES = (
    ("self_attn.q_proj", (64, 64)),
    ("self_attn.k_proj", (16, 64)),
    ("self_attn.v_proj", (16, 64)),
    ("self_attn.o_proj", (64, 64)),
    ("mlp.gate_proj", (176, 64)),
    ("mlp.up_proj", (176, 64)),
    ("mlp.down_proj", (64, 176)),
)
NAMES = ("math", "code", "chat", "law", "medicine", "poetry", "physics", "history")
HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">\'"&\u2028'
"""Would run in a page that does not escape it, wherever it stands."""


def names(experts: int) -> list[str]:
    """Names of so many experts."""
    return [NAMES[t] if t < len(NAMES) else f"expert-{t}" for t in range(experts)]


def _symmetric(rng: random.Random, size: int, center: float, spread: float) -> Matrix:
    out = [[1.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i):
            out[i][j] = out[j][i] = max(-1.0, min(1.0, rng.gauss(center, spread)))
    return tuple(map(tuple, out))


def measure(rng: random.Random, module: str, layer: int | None, shape: tuple[int, int], experts: int) -> MatrixRow:
    """One measured matrix; deep layers change more, the experts interfere most in the middle."""
    depth = 0.5 if layer is None else layer / 32
    norms = [(0.4 + 0.8 * depth) * math.exp(rng.gauss(0, 0.12)) * (1 + 0.15 * t) for t in range(experts)]
    conflict = 0.15 + 0.5 * math.exp(-(((depth - 0.45) / 0.25) ** 2))
    residual = (min(1.3, max(0.01, conflict * (1.4 - 0.1 * t) * math.exp(rng.gauss(0, 0.2)))) for t in range(experts))
    cosine = _symmetric(rng, experts, 0.08, 0.06)
    summed = math.sqrt(sum(cosine[s][t] * norms[s] * norms[t] for s in range(experts) for t in range(experts)))
    return a_measure(
        f"{module}.weight",
        experts,
        layer=layer,
        shape=shape,
        norms=tuple(norms),
        snr=tuple(n * 9 / math.sqrt(shape[0]) for n in norms),
        relative_norms=tuple(n / 40 for n in norms),
        cosine=cosine,
        residual=tuple(residual),
        merged_norm=0.8 * summed,
        sum_norm=summed,
    )


FINDINGS: tuple[Any, ...] = (
    ("AM101", "Change lost in rounding", "issue", "In 3 of 224 matrices the change of expert 'math' is 0.6 "
     "times the rounding step of bfloat16: most of it is noise of storage."),
    ("AM205", "Directions shared", "tip", "The cosine of 'math' and 'code' is 0.9."),
    ("AM202", "Same expert twice", "issue", "'math' and 'code'."),
)  # fmt: skip
MUTED = "AM202"


def diagnosis(experts: int = 3, layers: int = 8, *, extra: int = 0, seed: int = 0) -> Diagnosis:
    """`7 layers` measured matrices, norms, an embedding and `extra` further vectors."""
    rng = random.Random(seed)
    labels = names(experts)
    averaged: list[tuple[int, ...]] = [(512, 64)]
    merged: list[tuple[int, ...]] = []
    measures = []
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        averaged.append((64,))
        for module, shape in MODULES:
            merged.append(shape)
            measures.append(measure(rng, f"{stem}.{module}", layer, shape, experts))
    averaged += [(64,)] * extra
    merged.append((512, 64))
    measures.append(measure(rng, "lm_head", None, (512, 64), experts))
    energy = [sum(m.norms[t] ** 2 for m in measures) for t in range(experts)]
    left = [math.sqrt(sum((m.residual[t] * m.norms[t]) ** 2 for m in measures) / energy[t]) for t in range(experts)]
    found = tuple(m.name for m in measures[:3])
    return a_diagnosis(
        recipe={
            "base": "models/base",
            "experts": [{"path": f"models/{n}", "name": n} for n in labels],
            "method": "actmat",
            "rules": [{"match": ["*lm_head*"], "scale": 0.5}],
        },
        created="2026-03-04T05:06:07+00:00",
        base="models/base",
        out="models/merged",
        experts=tuple(
            ExpertRow(label, f"models/{label}", "model", 1.0, left[t], energy[t] / sum(energy))
            for t, label in enumerate(labels)
        ),
        actions={"merge": len(merged), "average": len(averaged)},
        measures=tuple(measures),
        findings=tuple(Finding(*words, found, 3, words[0] == MUTED) for words in FINDINGS),
    )


def diagnosis_json(experts: int = 3, layers: int = 8) -> dict[str, Any]:
    """The same as plain data, to be changed."""
    return json.loads(json.dumps(diagnosis(experts, layers).to_json()))


def hostile(data: Any) -> Any:
    """Every name, message and reason of a diagnosis with something in it that must stay text."""
    if isinstance(data, dict):
        kept = ("verdict", "severity", "kind", "source", "created", "actmat")
        return {k: v if k in kept else hostile(v) for k, v in data.items()}
    if isinstance(data, list):
        return [hostile(v) for v in data]
    return data + HOSTILE if isinstance(data, str) else data
