"""Merge adapters of a chat model that stand in folders by every candidate of `auto`, and ask the merges.

    python -m benchmarks.evidence.folders "three adapters" --base BASE --data FOLDER

FOLDER has an adapter TASK, eight or more prompts in TASK.jsonl and questions with answers in TASK.test.jsonl. An answer
is right if its first token is. Lines are added to the result file, those of most interest first; what it has is left
out.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import actmat
from actmat.progress import Progress
from actmat_experiments.core import locate_inputs, make_recipe, modules_differ, size_and_overlap
from actmat_experiments.harness.cache import file_digest, library_versions
from actmat_experiments.harness.origin import UNKNOWN, current_origin
from actmat_experiments.harness.results import Score, append_scores, read_scores
from benchmarks.common import own_command, program, read_lines, stored_tensors
from benchmarks.evidence.group import FOLDER, FOLDERS
from benchmarks.provenance import COLLECTED, record

ROWS = (
    *("base", "experts", "average", "ct_merging", "dc_merge", "tsv", "actmat", "cart", "regmean:data=training"),
    *("actmat_ridge", "wudi", "ties", "knots", "iso_c", "task_arithmetic_1", "tsv+mean_norm", "dc_merge+mean_norm"),
    *("task_arithmetic", "aswudi", "swudi", "iso_cts", "karcher", "model_stock", "sce", "breadcrumbs"),
)
PROMPTS, BATCH = 8, 20
VERSIONS = ("actmat", "torch", "transformers", "peft")


@dataclass(frozen=True)
class Chats:
    """Adapters of one base in a folder, with their prompts and questions.

    Args:
        limit: of the questions of a task.
    """

    base: Path
    folder: Path
    limit: int

    @cached_property
    def tasks(self) -> list[str]:
        """Names of the adapters."""
        return sorted(path.parent.name for path in self.folder.glob("*/adapter_config.json"))

    @property
    def experts(self) -> dict[str, str]:
        """Folder of each adapter."""
        return {task: str(self.folder / task) for task in self.tasks}

    @cached_property
    def model(self) -> Any:
        """The base's architecture, whose weights are replaced."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()

    @cached_property
    def tokenizer(self) -> Any:
        """Of the base, with padding in front."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.base, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer

    def facts(self) -> dict[str, float]:
        """Size and overlap of the adapters, as `auto` sees them."""
        experts = [{"path": path, "name": task} for task, path in self.experts.items()]
        with locate_inputs(make_recipe({"base": str(self.base), "experts": experts})) as located:
            size, overlap = size_and_overlap(located) or (None, 0.0)
            differ = modules_differ(located)
        assert size is not None, self.folder
        return {"size": round(size, 6), "overlap": round(overlap, 3), "modules_differ": differ}

    def merged(self, row: str) -> Mapping[str, Tensor]:
        """Weights of a merge, of the base, or of the expert of a task."""
        if row == "base":
            return stored_tensors(self.base)
        if row in self.tasks:
            return actmat.merge(self.base, [self.experts[row]], progress=Progress()).tensors
        if row == "regmean:data=training":
            prompts = {t: [r["text"] for r in read_lines(self.folder / f"{t}.jsonl")[:PROMPTS]] for t in self.tasks}
            with tempfile.TemporaryDirectory() as out:
                actmat.merge(self.base, self.experts, out=out, data=prompts, overwrite=True, progress=Progress())
                return actmat.merge(self.base, [out], progress=Progress()).tensors  # of an adapter
        method, *post = row.removesuffix("_1").split("+")
        fields = {"options": options_of(row), "post": post, "progress": Progress()}
        return actmat.merge(self.base, self.experts, method=method, **fields).tensors

    def scores(self, suite: str, model: str, row: str) -> Iterator[Score]:
        """Right answers to the questions of each task, of a merge, the base, or each task's expert."""
        training = file_digest(Path(p) / "adapter_model.safetensors" for p in self.experts.values())
        facts = {"training": {"weights": training, **UNKNOWN}, "run": current_origin(), "split": "test"}
        facts |= {"versions": library_versions(*VERSIONS), "rule": re.split("[:+]", row)[0], "scale": 1.0}
        for task in self.tasks:
            if row == "experts" or task == self.tasks[0]:
                merged = self.merged(task if row == "experts" else row)
                unknown = self.model.load_state_dict(merged, strict=False).unexpected_keys  # a tied head is missing
                assert not unknown, unknown
                facts |= {"merge": digest_of(merged), "options": options_of(row)}
            rows = sorted(read_lines(self.folder / f"{task}.test.jsonl")[: self.limit], key=lambda r: len(r["text"]))
            right = sum(self._count(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH))
            yield Score(suite, "lora", row, "default", task, 0, right, len(rows), model=model, detail=dict(facts))

    @torch.no_grad()
    def _count(self, rows: Sequence[dict[str, str]]) -> int:
        """Questions whose answer begins right."""
        tokens = self.tokenizer([r["text"] for r in rows], return_tensors="pt", padding=True)
        first = self.model(**tokens, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
        return sum(a == self.tokenizer(r["answer"]).input_ids[0] for a, r in zip(first, rows, strict=True))


def options_of(row: str) -> dict[str, float]:
    """Options of a row's method."""
    return {"scaling": 1.0} if row == "task_arithmetic_1" else {}


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Measure what the result file lacks of one folder."""
    parser = program(__doc__, FOLDERS[0])
    parser.add_argument("set", help="name of the set of adapters, beginning with that of the base")
    parser.add_argument("--base", type=Path, required=True, help="folder of the model under the adapters")
    parser.add_argument("--data", type=Path, required=True, help="adapters, prompts and questions")
    parser.add_argument("--questions", type=int, default=150, help="of a task, at most (default: 150)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chats = Chats(arguments.base, arguments.data, arguments.questions)
    suite = arguments.name.partition("-")[2]
    path, sizes = FOLDER / f"{arguments.name}.jsonl", FOLDER / f"{arguments.name}-sizes.jsonl"
    done = {s.method for s in read_scores(path) if s.model == arguments.set}
    if not done:
        about = {"suite": suite, "model": arguments.set, "regime": "lora", "seed": 0}
        with sizes.open("a") as file:
            file.write(json.dumps(about | chats.facts() | {"commit": current_origin()["commit"]}) + "\n")
    for row in (row for row in ROWS if row not in done):
        scores = list(chats.scores(suite, arguments.set, row))
        append_scores(path, scores)
        print(row, *(f"{100 * s.share:.1f}" for s in scores), f"{100 * fmean(s.share for s in scores):.1f}", flush=True)
    for file in (path, sizes):
        record(file, own_command(), commit_of=COLLECTED)


if __name__ == "__main__":
    main()
