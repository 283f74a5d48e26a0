"""One model through all benchmarks: answers drawn, marked, counted; every step in the cache."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from actmat_experiments.harness.cache import Cache, digest, file_digest, library_versions
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.reasoning.benchmarks import Benchmark, Problem
from actmat_experiments.reasoning.generate import Engine, Job, Questions, answer_all, read_answers, release


@dataclass(frozen=True, slots=True)
class ReasoningSettings:
    """Settings of the suite, for `--set name=value`; the defaults are those of the paper where it states them.

    Args:
        base: hub id or directory; `--models` says the same.
        math, code, instructions: experts, hub ids or directories; "none" leaves one out.
        template: expert whose tokenizer and chat template the base and merged models use, as in the paper; none: the
            base's own.
        engine: the back end, see `generate.Engine`.
        batch_size: answers drawn together by "hf"; what fits depends on the device and on the longest answer.
        samples: answers per problem where the paper samples; none: as in the paper.
        temperature: where the paper samples; none: as in the paper.
        max_tokens: longest answer; none: as in the paper.
        problems: only the first so many of each benchmark; none: all.
        prompts: training prompts per expert for the rules that want statistics: "hub", those of `PROMPTS`, as in the
            paper, but not with --data; or a folder with `math.jsonl`, `code.jsonl`, `instructions.jsonl`, each line
            {"prompt": ...}; none: those rules are left out.
        measured, measured_tokens: prompts per expert that are looked at, and tokens of each.
        keep_merged: leave merged models in the cache; otherwise each is removed when it has answered.
        programs: that run at the same time when code is judged.
    """

    base: str = "allenai/Olmo-3-1025-7B"
    math: str | None = "allenai/Olmo-3-7B-RL-Zero-Math"
    code: str | None = "allenai/Olmo-3-7B-RL-Zero-Code"
    instructions: str | None = "allenai/Olmo-3-7B-RL-Zero-IF"
    template: Literal["math", "code", "instructions"] | None = "math"
    engine: Engine = field(default_factory=Engine)
    batch_size: int = 8
    samples: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    problems: int | None = None
    prompts: str | None = "hub"
    measured: int = 320
    measured_tokens: int = 256
    keep_merged: bool = False
    programs: int = 4

    @property
    def experts(self) -> dict[str, str]:
        """Skill -> expert, in the order of the merge."""
        skills = {"math": self.math, "code": self.code, "instructions": self.instructions}
        return {skill: place for skill, place in skills.items() if place}


_VERSION = 2

Counts = Mapping[str, Sequence[int]]
"""Name of a score -> right answers per problem."""


@dataclass(frozen=True, slots=True)
class Exam:
    """The benchmarks with their problems, and how they are put to a model.

    Args:
        tokenizer: folder of the tokenizer of base and merged models; None: their own.
        unsolvable: benchmark -> problems whose published solution fails their own test; for the table.
    """

    cache: Cache
    watch: Watch
    settings: ReasoningSettings
    benchmarks: Sequence[tuple[Benchmark, Sequence[Mapping[str, Any]]]]
    seed: int
    device: str
    tokenizer: Path | None = None
    unsolvable: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def asked(self, benchmark: Benchmark) -> Benchmark:
        """The benchmark as this run samples it; `@k` beyond the number of answers falls to that number."""
        s, sampling = self.settings, benchmark.sampling
        if sampling.temperature > 0:
            n = s.samples or sampling.n
            temperature = sampling.temperature if s.temperature is None else s.temperature
            sampling = replace(sampling, n=n, temperature=temperature)
        if s.max_tokens:
            sampling = replace(sampling, max_tokens=min(s.max_tokens, sampling.max_tokens))
        ks = tuple(dict.fromkeys(min(k, sampling.n) for k in benchmark.ks))
        return replace(benchmark, sampling=sampling, ks=ks)

    def key(self, benchmark: Benchmark, problems: Sequence[Mapping[str, Any]], model: Any) -> dict[str, Any]:
        """All that determines the answers of a model to a benchmark; how vLLM is divided over GPUs is no part of it."""
        engine = self.settings.engine
        vllm = engine.backend == "vllm"
        return {
            "version": _VERSION,
            "model": model,
            "prompts": digest([benchmark.prompt(p) for p in problems]),
            "tokenizer": file_digest(_tokenizer_files(self.tokenizer)) if self.tokenizer else None,
            "sampling": asdict(self.asked(benchmark).sampling),
            "engine": [engine.backend, engine.dtype, engine.longest],
            "batch_size": self.settings.batch_size,
            "device": self.device.partition(":")[0],
            "seed": self.seed,
            "libraries": library_versions("lm_eval", "transformers", "torch", *(["vllm"] if vllm else [])),
        }

    def answered(self, model: Any) -> bool:
        """True if all answers of a model are in the cache, so that the model is not needed."""
        return all(self.cache.holds("reasoning-answers", self.key(b, p, model)) for b, p in self.benchmarks)

    def take(self, location: Path, model: Any, label: str, *, own_tokenizer: bool = False) -> dict[str, Counts]:
        """Benchmark -> counts of right answers.

        Args:
            location: the model's folder.
            model: all that determines the model, as plain data.
            own_tokenizer: the model has a tokenizer, and a chat template, of its own.
        """
        if own_tokenizer and self.tokenizer is not None:
            return replace(self, tokenizer=None).take(location, model, label)
        missing = [
            (b, p) for b, p in self.benchmarks if not self.cache.holds("reasoning-answers", self.key(b, p, model))
        ]
        total = sum(len(p) for _, p in missing)
        if missing:
            with self.watch.stage(f"answers: {label}", total) as stage, self._worker() as work:
                for benchmark, problems in missing:
                    stage.say(benchmark.title)
                    self._draw(location, benchmark, problems, model, lambda job: work(job, stage))
        return {b.name: self._marks(b, p, model, label) for b, p in self.benchmarks}

    @contextmanager
    def _worker(self) -> Iterator[Callable[[Job, Stage], None]]:
        """Runs jobs, the model loaded once, and gives its memory back."""
        if self.settings.engine.backend == "hf":
            try:
                yield lambda job, stage: answer_all(job, stage.advance)
            finally:
                release()
            return
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # vLLM frees nothing before its end

            def work(job: Job, stage: Stage) -> None:
                pool.submit(answer_all, job).result()
                stage.advance(sum(len(q.prompts) for q in job.questions))

            yield work

    def _draw(
        self,
        location: Path,
        benchmark: Benchmark,
        problems: Sequence[Mapping[str, Any]],
        model: Any,
        work: Callable[[Job], None],
    ) -> None:
        def make(folder: Path) -> None:
            prompts = [benchmark.prompt(p) for p in problems]
            asked = self.asked(benchmark).sampling
            questions = Questions(prompts, asked, folder / "answers.jsonl", self.settings.batch_size)
            tokenizer = str(self.tokenizer) if self.tokenizer else None
            work(Job(str(location), tokenizer, self.settings.engine, self.device, self.seed, (questions,)))

        self.cache.get("reasoning-answers", self.key(benchmark, problems, model), make, resumable=True)

    def _marks(self, benchmark: Benchmark, problems: Sequence[Mapping[str, Any]], model: Any, label: str) -> Counts:
        key = self.key(benchmark, problems, model)
        source = self.cache.path("reasoning-answers", key) / "answers.jsonl"

        def make(folder: Path) -> None:
            drawn = read_answers(source)
            work = [(i, p, a) for i, (p, some) in enumerate(zip(problems, drawn, strict=True)) for a in some]
            with self.watch.stage(f"marks: {benchmark.title}, {label}", len(work)) as stage:

                def mark(item: tuple[int, Mapping[str, Any], str]) -> tuple[int, Mapping[str, bool]]:
                    found = benchmark.mark(item[1], item[2])
                    stage.advance()
                    return item[0], found

                with ThreadPoolExecutor(self.settings.programs) as pool:
                    marked = list(pool.map(mark, work))
            counts: dict[str, list[int]] = {}
            for place, marks in marked:
                for name, right in marks.items():
                    counts.setdefault(name, [0] * len(problems))[place] += int(right)
            (folder / "counts.json").write_text(json.dumps(counts), encoding="utf-8")

        full: dict[str, Any] = {"benchmark": benchmark.name, "answers": digest(key), "problems": digest(list(problems))}
        full |= {"version": _VERSION}
        folder = self.cache.get("reasoning-marks", full, make)
        found: Counts = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
        return found


def _tokenizer_files(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.is_file() and ("token" in p.name or "template" in p.name)]


def unsolvable(
    benchmark: Benchmark, problems: Sequence[Problem], cache: Cache, watch: Watch, threads: int | None
) -> list[str]:
    """Ids of the problems whose published solution fails their own test; run once per set of problems.

    Problems without a published solution are passed over.
    """

    def make(folder: Path) -> None:
        known = [(n, p) for n, p in enumerate(problems) if p.get("canonical_solution")]
        with watch.stage(f"published solutions: {benchmark.title}", len(known)) as stage:

            def fails(numbered: tuple[int, Problem]) -> str | None:
                n, problem = numbered
                right = benchmark.mark(problem, problem["canonical_solution"])[benchmark.name]
                stage.advance()
                return None if right else str(problem.get("task_id", n))

            with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
                found = [name for name in pool.map(fails, known) if name is not None]
        (folder / "failing.json").write_text(json.dumps(found), encoding="utf-8")

    key = {
        "benchmark": benchmark.name,
        "problems": digest({"problems": list(problems)}),
        "python": platform.python_version(),
    }
    folder = cache.get("reasoning-published", key, make)
    return [str(name) for name in json.loads((folder / "failing.json").read_text(encoding="utf-8"))]
