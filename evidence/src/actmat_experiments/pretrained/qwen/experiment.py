"""Experts of one seed and way of training, tested in the words of the training and in other words.

An answer is right if greedy decoding writes all its tokens with the end, see `decoder`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from actmat.errors import MergeError
from actmat_experiments.core import in_one_line
from actmat_experiments.harness.cache import file_digest, library_versions
from actmat_experiments.harness.experiment import Counts, Experiment, mean_share
from actmat_experiments.harness.measuring import Batch
from actmat_experiments.harness.merging import merging_code
from actmat_experiments.harness.progress import Stage
from actmat_experiments.harness.results import ScaleKind, Score, append_scores, read_scores
from actmat_experiments.harness.training import Schedule, Start, Training, train_by
from actmat_experiments.pretrained.decoder import (
    Coded,
    Coder,
    answer_logits,
    collated,
    load_decoder,
    right,
    trainable_decoder,
)
from actmat_experiments.pretrained.qwen.live import Live, dense, read_factors
from actmat_experiments.pretrained.qwen.merging import Merging
from actmat_experiments.pretrained.qwen.rows import Row
from actmat_experiments.pretrained.qwen.tasks import WORDS, Worded, Words

Loss = Literal["answers", "whole"]
"""The tokens of a training example that the loss is of: the answer's, or all."""
Precision = Literal["float32", "tf32", "bfloat16"]
_TESTED = 128
"""Questions of one pass."""
_SAVE_EVERY = 32
_VERSIONS = ("actmat", "torch", "transformers", "peft")


@dataclass(frozen=True, kw_only=True)
class WordedLlm(Experiment):
    """The stages after the base.

    Args:
        steps_each: optimizer steps of every expert; a task with fewer examples repeats them.
        schedule: of these steps, in one epoch.
        loss: the tokens that are learnt.
        start: of LoRA's `A`.
        precision: of matrix products: TF32 is a GPU's, of which a CPU makes float32; bfloat16 is by autocast.
    """

    coder: Coder
    tasks: Sequence[Worded]
    steps_each: int
    schedule: Schedule
    loss: Loss
    rank: int = 16
    alpha: int = 32
    start: Start = "apart"
    precision: Precision = "tf32"

    def majority(self) -> dict[str, Counts]:
        """See `Experiment`: answers are written, not chosen."""
        return {}

    def training(self, task: Worded) -> Mapping[str, Any]:
        """See `Experiment`."""
        fields = ("rank", "alpha", "start", "loss", "precision", "steps_each", "schedule")
        return {"data": task.training.content["train"], **{name: getattr(self, name) for name in fields}}

    def steps(self, task: Worded) -> int:
        """See `Experiment`."""
        return self.steps_each

    def train(self, task: Worded, out: Path, stage: Stage) -> None:
        """See `Experiment`."""
        coded = self.coder(task.part("training", "train"))
        if self.loss == "whole":  # there is nothing to predict the first token from
            coded = [Coded(c.prompt[:1], c.prompt[1:] + c.answer) for c in coded]
        lora: dict[str, Any] = {"rank": self.rank, "alpha": self.alpha, "start": self.start}
        how = Training(task.name, self.seed, self.schedule, "lora", device=self.device, save_every=_SAVE_EVERY, **lora)
        model = trainable_decoder(self.base.path, how)

        def loss(index: Tensor) -> Tensor:
            batch = collated([coded[i % len(coded)] for i in index.tolist()], self.device)
            return nn.functional.cross_entropy(answer_logits(model, batch), batch.target_T)

        with self._products():
            train_by(model, loss, self.steps_each * self.schedule.batch_size, how, out, stage.advance)

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        return [[t.content[f"{part}, {words}"] for part in parts for words in WORDS] for t in map(self.task, tasks)]

    def read(self, folder: Path) -> Any:
        """See `Experiment`."""
        return load_decoder(folder)

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`: `correct` in the words of the training, `other` in other words."""
        return self._test_all(model, [task], part)[task]

    def inputs(self, task: str, n: int) -> Iterator[Batch]:
        """See `Experiment`: training examples with their answers."""
        for coded in self.coder(self.task(task).part("training", "train")[:n]):
            yield collated([coded], self.device).inputs

    def lines(
        self, method: str, kind: ScaleKind, found: Mapping[str, Counts], detail: Mapping[str, Any] | None = None
    ) -> list[Score]:
        """See `Experiment`: lines in the words of the training, then, as another model's, in other words."""
        counts = [{task: {"correct": c[key], "total": c["total"]} for task, c in found.items()} for key in _COUNTED]
        plain, other = (super(WordedLlm, self).lines(method, kind, some, detail) for some in counts)
        return plain + [replace(line, model=f"{line.model}, asked in other words") for line in other]

    def measure(self, rows: Sequence[Row], path: Path) -> None:
        """Train the experts, then merge and test by each row; its scores are added to a file at once.

        Rows that the file has of the same training and code are left out. A row that cannot be made is noted, and the
        next begins.
        """
        experts = {task: made.path for task, made in self.experts().items()}
        same = {"training": self.trained_by(), "merging": merging_code()}
        done = {
            score.method
            for score in read_scores(path)
            if score.model == self.model and all(score.detail.get(name) == value for name, value in same.items())
        }
        about = {**same, "base": file_digest(self.base.path.glob("*.safetensors")), "split": "test"}
        about["versions"] = library_versions(*_VERSIONS)
        live = Live(self.read(self.base.path), self.device)

        def add(method: str, counts: Mapping[str, Counts], facts: Mapping[str, Any]) -> None:
            append_scores(path, self.lines(method, "default", counts, {**about, **facts}))

        with self.watch.stage(f"merges: {self.model}, seed {self.seed}", total=len(rows)) as stage:
            if "experts" not in done:
                add("base", self._test_all(live.model, self.names, "test"), {})
                add("experts", {task: self._test_expert(live, task, folder) for task, folder in experts.items()}, {})
            with tempfile.TemporaryDirectory(prefix="actmat-merges-") as work:
                merging = self._merging(live, experts, Path(work), rows)
                for row in rows:
                    stage.say(row.name)
                    if row.name not in done:
                        with self._noted(row):
                            counts, facts = self._score_row(merging, row)
                            stage.log(f"{row.name}: {100 * mean_share(counts):.1f} %")
                            add(row.name, counts, facts)
                    stage.advance()

    def _merging(self, live: Live, experts: Mapping[str, Path], work: Path, rows: Sequence[Row]) -> Merging:
        starts = frozenset(row.toward for row in rows)
        run = {"threads": self.threads}
        return Merging(live, self.base.path, experts, self.tasks, self.coder, work, starts, self.seed, run)

    def _score_row(self, merging: Merging, row: Row) -> tuple[dict[str, Counts], dict[str, Any]]:
        merged = merging.merge(row)
        with merging.live.changed(merged.deltas) as model:
            return self._test_all(model, self.names, "test"), {**row.about, "scale": 1.0, **merged.facts}

    @contextlib.contextmanager
    def _noted(self, row: Row) -> Iterator[None]:
        try:
            yield
        except (MergeError, RuntimeError) as error:  # torch's: memory of a device, a decomposition
            self.watch.note([f"{row.name} failed ({self.model}, seed {self.seed}): {in_one_line(error)}"])

    def _test_expert(self, live: Live, task: str, folder: Path) -> Counts:
        with live.changed(dense(read_factors(folder, self.device))) as model:
            return self.test(model, task, "test")

    def _test_all(self, model: Any, tasks: Sequence[str], part: str) -> dict[str, Counts]:
        """Right answers by task in both wordings; questions of similar length share a pass, whatever their task."""
        asked = [
            (task, key, coded) for task in tasks for key, w in _COUNTED.items() for coded in self._code(task, w, part)
        ]
        asked.sort(key=lambda item: len(item[2].prompt) + len(item[2].answer))
        with self._products():
            verdicts = right(model, [coded for _, _, coded in asked], self.device, _TESTED).tolist()
        counts = {task: dict.fromkeys((*_COUNTED, "total"), 0) for task in tasks}
        for (task, key, _), verdict in zip(asked, verdicts, strict=True):
            counts[task][key] += int(verdict)
            counts[task]["total"] += key == "correct"
        return dict(counts)

    def _code(self, task: str, words: Words, part: str) -> list[Coded]:
        """Questions in tokens, computed once."""
        key = f"{part} of {task}, {words}"
        if key not in self.known:
            self.known[key] = self.coder(self.task(task).part(words, part))
        coded: list[Coded] = self.known[key]
        return coded

    @contextlib.contextmanager
    def _products(self) -> Iterator[None]:
        """Matrix products in the precision of the experiment."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" and "cuda" in self.device else before)
        halved = self.precision == "bfloat16"
        try:  # casts are not kept: in training they would be those of the first weights until the end
            with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=halved, cache_enabled=False):
                yield
        finally:
            torch.set_float32_matmul_precision(before)


_COUNTED: Mapping[str, Words] = {"correct": "training", "other": "other"}
"""Field of the counts -> the wording of its questions."""
