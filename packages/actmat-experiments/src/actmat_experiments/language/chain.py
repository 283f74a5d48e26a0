"""From a base and tasks to scores, for one regime and seed: experts, statistics, merges, tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.demo.merging import Candidate
from actmat_experiments.harness.cache import Cache, digest
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.results import Regime
from actmat_experiments.language.compare import Setup, compare
from actmat_experiments.language.exams import Exam, make_exams
from actmat_experiments.language.experts import Made, train_experts
from actmat_experiments.language.items import TextTask
from actmat_experiments.language.measure import measure_experts, needs_statistics
from actmat_experiments.language.models import load_tokenizer
from actmat_experiments.language.report import score_file
from actmat_experiments.language.settings import LanguageSettings
from actmat_experiments.suites import RunRequest

__all__ = ["Chain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """All that one family of experts goes through.

    Args:
        request: what was asked for.
        settings: of the suite.
        base: checkpoint that the experts start from.
        tasks: one expert each.
        regime: how they are trained.
        rows: what is to be merged.
        seed: of the run.
        watch: progress.
        model: name of the base in tables.
        also: what else decided the numbers, beside settings and test items: part of the digest in every score.
    """

    request: RunRequest
    settings: LanguageSettings
    base: Made
    tasks: Sequence[TextTask]
    regime: Regime
    rows: Sequence[Candidate]
    seed: int
    watch: Watch
    model: str = ""
    also: Any = None

    def run(self, share: tuple[int, int] | None = None) -> None:
        """Train, measure, merge, test; scores are added to the suite's file as they become known.

        Args:
            share: number of this process and how many there are: it first trains its share of the experts, and only
                the first process goes on when all are there.
        """
        if share is not None:
            process, n_processes = share
            self._experts(self._exams(self.tasks[process::n_processes]))
            if process:
                return
        cache = Cache(self.request.cache)
        compare(self.prepare(), cache, self.watch, score_file(self.request.cache, self.request.suite))

    def prepare(self) -> Setup:
        """Everything up to the merges: experts, and statistics where a row needs them."""
        exams = self._exams(self.tasks)
        experts = self._experts(exams)
        statistics = measure_experts(
            *(self.base, experts if needs_statistics(self.rows) else {}, exams),
            samples=self.settings.samples,
            seed=self.seed,
            device=self.request.device,
            cache=Cache(self.request.cache),
            watch=self.watch,
        )
        tests = [exam.key("test") for exam in exams.values()]
        return Setup(
            suite=self.request.suite,
            model=self.model,
            regime=self.regime,
            seed=self.seed,
            settings=digest({"settings": self.settings.decisive(), "also": self.also, "tests": tests}),
            base=self.base,
            experts=experts,
            exams=exams,
            rows=self.rows,
            statistics=statistics,
            together=self.settings.together,
            keep=self.settings.keep,
            threads=self.request.threads,
            device=self.request.device,
        )

    def _exams(self, tasks: Sequence[TextTask]) -> dict[str, Exam]:
        max_length = self.settings.experts.of(self.regime).max_length
        return make_exams(load_tokenizer(self.base[0]), tasks, max_length=max_length)

    def _experts(self, exams: Mapping[str, Exam]) -> dict[str, Made]:
        return train_experts(
            *(self.base, exams, self.regime, self.settings.experts),
            seed=self.seed,
            device=self.request.device,
            cache=Cache(self.request.cache),
            watch=self.watch,
        )
