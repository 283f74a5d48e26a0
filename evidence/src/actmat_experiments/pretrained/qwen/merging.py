"""Merges of the experts of `llm-qwen`, as deltas for a model in memory.

Methods without data and `merge --data` are `actmat.merge`, from adapters to an adapter. The others are
`actmat.merge_matrices` on the inputs of the experts' layers, on the device of the models; toward another merge, it
merges what the experts have beyond that merge.

Shapes: `N` tokens, `O` out_features, `I` in_features.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import actmat
from actmat_experiments.core import MOST, SELF, DataOptions, Loaded, write_prompts
from actmat_experiments.harness.cache import file_digest
from actmat_experiments.pretrained.decoder import Coded, Coder
from actmat_experiments.pretrained.generated import Question, turn
from actmat_experiments.pretrained.qwen.live import Deltas, Factors, Live, dense, read_factors
from actmat_experiments.pretrained.qwen.rows import Prompts, Row
from actmat_experiments.pretrained.qwen.tasks import Worded, Words


class Merged(NamedTuple):
    """A merge: deltas of linear layers, and facts for the lines of its scores."""

    deltas: Deltas
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Merging:
    """Merges of one set of experts.

    Args:
        live: the base in memory.
        base: its folder.
        experts: task -> adapter.
        tasks: with prompts, the part "validation".
        work: folder of merged adapters; those from which another row starts stay there.
        starts: names of these rows.
        seed: of prompts that are drawn.
        run: settings of the merges, such as `threads`.
    """

    live: Live
    base: Path
    experts: Mapping[str, Path]
    tasks: Sequence[Worded]
    coder: Coder
    work: Path
    starts: frozenset[str]
    seed: int
    run: Mapping[str, Any]
    _inputs: dict[tuple[Prompts, int], list[dict[str, Tensor]]] = field(default_factory=dict)
    _written: dict[str, tuple[list[Coded], float]] = field(default_factory=dict)

    def merge(self, row: Row) -> Merged:
        """The merge of a row.

        Raises:
            MergeError: it cannot be made.
        """
        if row.by != "layers":
            return self._by_actmat(row)
        factors = [read_factors(folder, self.live.device) for folder in self.experts.values()]
        if (key := (row.prompts, row.number)) not in self._inputs:
            self._inputs.clear()  # of one kind of prompts fit the memory of a device
            self._inputs[key] = [
                self._layer_inputs(task, row, expert) for task, expert in zip(self.tasks, factors, strict=True)
            ]
        start = read_factors(self._folder(row.toward), self.live.device) if row.toward else None
        merged = dict(merge_by_inputs(row, factors, self._inputs[key], start))
        facts: dict[str, Any] = {"merge": _digest(merged)}
        if row.prompts in ("self", "mixed"):
            facts["gains"] = {name: round(gain, 3) for name, (_, gain) in self._written.items()}
        return Merged(merged.items(), facts)

    def _by_actmat(self, row: Row) -> Merged:
        """A merge by `actmat.merge`, whose output is read and, unless another row starts from it, removed."""
        out = self._folder(row.name)
        report = actmat.merge(
            self.base if row.method == "auto" else None,
            [{"path": str(path), "name": name} for name, path in self.experts.items()],
            out=out,
            method=row.method,
            options=dict(row.options),
            post=list(row.post),
            output={"kind": "adapter", "layout": "peft"},
            durable=False,
            overwrite=True,
            **self._data(row),
            **self.run,
        )
        recipe = report.plan.recipe
        facts: dict[str, Any] = {"merge": file_digest(out.glob("*.safetensors")), "seconds": round(report.seconds, 1)}
        if row.method == "auto":
            facts |= {"rule": recipe.method, "options": dict(recipe.options), "space": recipe.space}
        factors = read_factors(out, self.live.device)
        if row.name not in self.starts:
            shutil.rmtree(out)
        return Merged(dense(factors), facts)

    def _data(self, row: Row) -> dict[str, Any]:
        """Prompts for `merge --data`, in files."""
        if row.by != "tool":
            return {}
        data = {}
        for task in self.tasks:
            path = self.work / f"{task.name}.jsonl"
            rows = ({"text": question.prompt} for question in task.part(_words(row), "validation"))
            path.write_text("".join(json.dumps(prompt) + "\n" for prompt in rows), encoding="utf-8")
            data[task.name] = str(path)
        return {"data": data, "device": self.live.device}

    def _layer_inputs(self, task: Worded, row: Row, expert: Mapping[str, Factors]) -> dict[str, Tensor]:
        prompts = self._prompts(task, row, expert)
        with self.live.changed(dense(expert)):
            return self.live.layer_inputs(prompts)

    def _prompts(self, task: Worded, row: Row, expert: Mapping[str, Factors]) -> list[Coded]:
        """Prompts of a task for a row."""
        asked = self.coder(task.part(_words(row), "validation"))[: row.number or None]
        if row.prompts == "random":
            tokens = torch.Generator().manual_seed(self.seed)
            words = self.live.model.config.vocab_size
            return [Coded(torch.randint(words, (len(c.prompt),), generator=tokens).tolist(), []) for c in asked]
        if row.prompts not in ("self", "mixed"):
            return asked
        if task.name not in self._written:
            self._written[task.name] = self._write(expert)
        written, _ = self._written[task.name]
        half = row.number // 2
        return written[: row.number] if row.prompts == "self" else [*asked[:half], *written[:half]]

    def _write(self, expert: Mapping[str, Factors]) -> tuple[list[Coded], float]:
        """Prompts that an expert writes, and the nats per token by which they are more probable than under the base."""
        template = turn("{}")
        loaded = Loaded(self.live.model, str(self.base), None, str(self.base))
        with self.live.changed(dense(expert)):
            written = write_prompts(loaded, DataOptions(SELF, template=template), MOST, self.seed)
        prompts = [Question(template.replace("{}", text), "") for text in written.texts]
        return self.coder(prompts), written.gain(self.live.model)

    def _folder(self, row: str) -> Path:
        return self.work / row.replace("=", "-").replace(":", "-")


def _words(row: Row) -> Words:
    """The wording of a row's prompts."""
    return "other" if row.prompts == "other" else "training"


def merge_by_inputs(
    row: Row,
    experts: Sequence[Mapping[str, Factors]],
    inputs: Sequence[Mapping[str, Tensor]],
    start: Mapping[str, Factors] | None,
) -> Deltas:
    """Deltas of a merge by the inputs of the experts' layers, one layer at a time.

    Args:
        inputs: of each expert, layer -> `N I`.
        start: the merge that the regression goes toward.
    """
    for name in experts[0]:
        deltas = [factors[name].dense() for factors in experts]
        grams = [gram(rows[name], delta_OI, row.prior) for rows, delta_OI in zip(inputs, deltas, strict=True)]
        start_OI = start[name].dense() if start is not None else 0.0
        beyond = [delta_OI - start_OI for delta_OI in deltas]
        if row.method == "ssr":  # within the span of all A, where it is of the size of the ranks
            span_IR = torch.linalg.qr(torch.cat([factors[name].a_RI for factors in experts]).mT).Q
            cores, inner = [d @ span_IR for d in beyond], [span_IR.mT @ g @ span_IR for g in grams]
            yield name, actmat.merge_matrices("ssr", cores, statistics={"gram": inner}, **row.options) @ span_IR.mT
        else:
            yield name, start_OI + actmat.merge_matrices(row.method, beyond, statistics={"gram": grams}, **row.options)


def gram(rows_NI: Tensor, delta_OI: Tensor, prior: float) -> Tensor:
    """Mean of `z z^T` over the rows, plus a share of `D^T D` at the same trace."""
    gram_II = rows_NI.mT @ rows_NI / len(rows_NI)
    if not prior:
        return gram_II
    own_II = delta_OI.mT @ delta_OI
    return gram_II + prior * gram_II.trace() / own_II.trace() * own_II


def _digest(deltas: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and float32 bytes."""
    digest = hashlib.sha256()
    for name, delta_OI in deltas.items():
        digest.update(name.encode())
        digest.update(delta_OI.float().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
