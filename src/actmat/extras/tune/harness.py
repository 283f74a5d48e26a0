"""Scores on benchmarks of lm-eval (the LM Evaluation Harness), `--score lm-eval:gsm8k_cot,ifeval`.

Optional: `pip install 'actmat[lm-eval]'`. The candidate in memory is handed over as it is, no checkpoint is written.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from actmat.errors import RecipeError, did_you_mean
from actmat.extras.collect.data import pad_token
from actmat.extras.models.loading import extra
from actmat.foreign import in_one_line

SEED = 1234
"""Of lm-eval's few-shot examples and of torch, as lm-eval has them."""
PREFIX = "lm-eval:"
"""Beginning of a score's name that asks for lm-eval."""
_imported = partial(extra, user=f"The score '{PREFIX}...'", group="lm-eval")


class LmEval:
    """A `TaskScore`: the first metric of every task, negated if larger is better.

    Args:
        tasks: names of lm-eval (tasks, groups, tags), or paths of a task's YAML file.
        files: location of the tokenizer: the base's.
        limit: questions of each task; None: all.
        batch_size: questions in one forward pass.

    Raises:
        RecipeError: lm-eval is not installed, or a task is unknown; found before a model is loaded.
    """

    def __init__(self, tasks: Sequence[str], files: str, *, limit: int | None = None, batch_size: int = 8) -> None:
        self.__name__ = f"{PREFIX}{','.join(tasks)}" + ("" if limit is None else f" limit {limit}")
        if not tasks:
            raise RecipeError(f"No task given: pass {PREFIX}TASK,TASK, such as {PREFIX}gsm8k_cot,ifeval.")
        self._tasks, self._files = list(tasks), files
        self._limit, self._batch_size = limit, batch_size
        files_only = all(map(_is_file, tasks))  # reading the thousands of tasks of lm-eval takes seconds
        self._loaded: Any = None
        with _quiet():
            self._evaluate = _imported("lm_eval.evaluator").evaluate
            self._manager = _imported("lm_eval.tasks").TaskManager(include_defaults=not files_only)
        tasks_known = self._manager.all_tasks
        if unknown := [t for t in tasks if t not in tasks_known and not _is_file(t)]:
            problems = [f"lm-eval has no task '{t}'.{did_you_mean(t, tasks_known)}" for t in unknown]
            raise RecipeError("These tasks cannot be scored; 'lm-eval ls tasks' lists all.", problems)

    def losses(self, model: nn.Module) -> dict[str, float]:
        """Task -> loss.

        Raises:
            RecipeError: lm-eval cannot run the tasks on this model; with lm-eval's words.
        """
        results = self._evaluated(model)
        return {task: _loss(task, row, results["higher_is_better"]) for task, row in _scored(results).items()}

    def scores(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Task -> name of a metric -> its value, as lm-eval reports them.

        Raises:
            RecipeError: see `losses`.
        """
        rows = _scored(self._evaluated(model))
        return {task: {name: float(row[name]) for name in _metrics(row)} for task, row in rows.items()}

    def _evaluated(self, model: nn.Module) -> dict[str, Any]:
        """Results of lm-eval, with a number for one task at least."""
        try:
            with _quiet(), torch.random.fork_rng(devices=[]):
                wrapped = _imported("lm_eval.models.huggingface").HFLM(
                    pretrained=model, tokenizer=self._tokenizer(), batch_size=self._batch_size
                )
                torch.manual_seed(SEED)
                results = self._evaluate(
                    wrapped, self._ready_tasks(), limit=self._limit, bootstrap_iters=0, log_samples=False
                )
        except Exception as error:  # tasks, data sets and models of many kinds
            raise RecipeError(f"lm-eval cannot score {', '.join(self._tasks)}: {in_one_line(error)}") from error
        if not _scored(results):
            raise RecipeError(f"lm-eval returned no number for {', '.join(self._tasks)}.")
        return dict(results)

    def _ready_tasks(self) -> Any:
        """The tasks with their data, loaded once, and set up as `lm_eval.simple_evaluate` does.

        That function itself asks the hub for the model and describes the machine in every call, for seconds.
        """
        if self._loaded is None:
            loaded = self._manager.load(self._tasks)
            for task in loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=SEED)
            self._loaded = loaded
        return self._loaded

    def _tokenizer(self) -> Any:
        transformers = _imported("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(self._files)
        pad_token(tokenizer)
        return tokenizer


def _scored(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Results of groups that have a score of their own, and of the tasks that are in no such group."""
    groups = [name for name, row in (results.get("groups") or {}).items() if _metrics(row)]
    inside = {task for name in groups for task in results.get("group_subtasks", {}).get(name, ())}
    return {n: r for n, r in results["results"].items() if _metrics(r) and n not in inside}


def _metrics(row: Mapping[str, Any]) -> list[str]:
    """Names of the metrics with their filters, `exact_match,strict-match`, in the order of the task."""
    return [k for k, v in row.items() if isinstance(v, int | float) and "," in k and "_stderr" not in k]


def _loss(task: str, row: Mapping[str, Any], higher_is_better: Mapping[str, Mapping[str, Any]]) -> float:
    """The first metric, negated unless smaller is better."""
    name = _metrics(row)[0]
    larger = higher_is_better.get(task, {}).get(name.partition(",")[0])
    return float(row[name]) if larger is False else -float(row[name])


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence lm-eval's logging and progress bars."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
