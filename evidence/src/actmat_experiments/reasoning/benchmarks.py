"""The benchmarks of the paper's table: data, prompts, sampling, and when an answer is right.

They are asked as in the paper, by the tasks of Ai2's OLMES whose resolved configurations stand in its published
results (`codex_humaneval::tulu`, `codex_humanevalplus::tulu`, `ifeval::tulu`,
`aime:zs_cot_r1::pass_at_32_2024_deepseek`, `..._2025_deepseek`): in the chat template, the answer to a code problem
begun with the function to complete.
`docs/experiments/reasoning.md` lists the open questions of these configurations.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.errors import CheckpointError
from actmat_experiments.harness.hub import load_splits
from actmat_experiments.harness.lines import json_lines
from actmat_experiments.harness.suite import known_names
from actmat_experiments.reasoning.marks import aime_answer, check_sentence_model, followed
from actmat_experiments.reasoning.sandbox import Limits, require_protections, run_program

Problem = Mapping[str, Any]
Marks = Mapping[str, bool]
"""Name of the score -> whether the answer is right."""

_CODE_STOPS = ("\nclass", "\nif", "\nprint", "\n#", "\n```", "\n```\n\n", "<|eot_id|>")
_CODE_TOKENS = 3072
"""Of a program, whose prompt and answer end with a context of 4,096 tokens."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of answers.

    Args:
        temperature: 0 for the most probable text.
        top_p: nucleus.
        stops: texts that end an answer.
    """

    n: int
    temperature: float
    top_p: float
    max_tokens: int
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question to a model.

    Args:
        text: the user's message.
        begun: beginning of the answer, behind the template.
    """

    text: str
    begun: str = ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark.

    Args:
        skill: which expert is its own: "math", "code" or "instructions".
        files: names under which a local copy is looked for, JSON lines, perhaps gzipped.
        hub: data set, configuration, split.
        mark: scores of one answer; the first name is that of the benchmark.
        ready: raises an error for missing requirements, before anything is generated.
        fields: what every problem must have, in any case.
        hint: where a copy with these fields is.
        chosen: the problems of a data set that also holds others.
    """

    name: str
    title: str
    skill: str
    sampling: Sampling
    ks: tuple[int, ...]
    files: tuple[str, ...]
    hub: tuple[str, str | None, str]
    prompt: Callable[[Problem], Prompt]
    mark: Callable[[Problem, str], Marks]
    ready: Callable[[Sequence[Problem]], None] = lambda problems: None
    fields: tuple[str, ...] = ("prompt",)
    hint: str = "Fetch it again."
    chosen: Callable[[Problem], bool] = lambda problem: True

    def load(self, data: Path | None) -> list[Problem]:
        """All problems, from a local copy in `data` or, without that, from the hub.

        Raises:
            CheckpointError: a missing file, a line that is not JSON, or a problem without a field.
        """
        if data is None:
            path, name, split = self.hub
            found, _ = load_splits(path, name, (split,))
            rows = [dict(row) for row in found[split]]
            return self._complete([row for row in rows if self.chosen(row)], f"{path} on the hub")
        for file in self.files:
            if (data / file).is_file():
                return self._complete(_read(data / file), str(data / file))
        raise CheckpointError(
            f"There is no copy of {self.title} in {data}. Expected {' or '.join(self.files)}; "
            "without --data it comes from the hub."
        )

    def _complete(self, problems: list[Problem], where: str) -> list[Problem]:
        have = [{key.lower() for key in problem} for problem in problems]
        lacking = {f: sum(f not in keys for keys in have) for f in self.fields}
        wrong = [f"'{f}' is missing in {n} of {len(have)}" for f, n in lacking.items() if n]
        if wrong or not problems:
            found = f"{len(problems)} problems of {self.title} were found in {where}"
            raise CheckpointError(f"{found}; each must have {', '.join(self.fields)}. {self.hint}", wrong)
        return problems


def _read(path: Path) -> list[Problem]:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return json_lines(data.decode("utf-8"))
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise CheckpointError(f"{path} is no file of JSON lines: {error}. Fetch it again.") from None


def _mark_code(name: str, limits: Limits) -> Callable[[Problem, str], Marks]:
    def mark(problem: Problem, answer: str) -> Marks:
        text = f"{problem['prompt']}{answer}\n{problem['test']}\ncheck({problem['entry_point']})\n"
        return {name: run_program(text, limits).passed}

    return mark


def _ask_code(problem: Problem) -> Prompt:
    begun = f"Here is the completed function:\n\n```python\n{problem['prompt']}"
    return Prompt(f"Complete the following python function.\n\n\n{problem['prompt']}", begun)


def _field(problem: Problem, name: str) -> str:
    """Copies of AIME differ in the case of their fields."""
    return str(next(value for key, value in problem.items() if key.lower() == name))


def _ask_aime(problem: Problem) -> Prompt:
    instruction = "Please reason step by step, and put your final answer within \\boxed{}."
    return Prompt(f"{_field(problem, 'problem')}\n\n{instruction}")


def _mark_aime(name: str) -> Callable[[Problem, str], Marks]:
    return lambda problem, answer: {name: aime_answer(answer) == int(_field(problem, "answer"))}


def _of_year(year: int) -> Callable[[Problem], bool]:
    """Problems of a year: by its column, or by the page that they were taken from (".../2024_AIME_I_Problems/...")."""
    return lambda problem: str(problem.get("year") or problem["url"].split("/")[-2].split("_")[0]) == str(year)


def _mark_ifeval(problem: Problem, answer: str) -> Marks:
    found = followed(problem, answer)
    return {"ifeval": all(found.loose), "ifeval-strict": all(found.strict)}


def _code(name: str, title: str, files: tuple[str, ...], hub: str, limits: Limits, hint: str) -> Benchmark:
    return Benchmark(
        *(name, title, "code", Sampling(20, 0.8, 0.95, _CODE_TOKENS, _CODE_STOPS), (1, 10), files, (hub, None, "test")),
        prompt=_ask_code,
        mark=_mark_code(name, limits),
        ready=lambda problems: require_protections(),
        fields=("prompt", "entry_point", "test"),
        hint=hint,
    )


def _aime(year: int, files: tuple[str, ...]) -> Benchmark:
    name = f"aime{year % 100}"
    return Benchmark(
        *(name, f"AIME {year % 100}", "math", Sampling(32, 0.6, 0.95, 16384), (1, 32), files),
        hub=("allenai/aime-2021-2025", None, "train"),
        prompt=_ask_aime,
        mark=_mark_aime(name),
        fields=("problem", "answer"),
        chosen=_of_year(year),
    )


BENCHMARKS: tuple[Benchmark, ...] = (
    _code(
        "humaneval",
        "HumanEval",
        ("HumanEval.jsonl.gz", "HumanEval.jsonl"),
        "openai/openai_humaneval",
        Limits(),
        "Fetch it again.",
    ),
    _code(
        "humaneval_plus",
        "HumanEval+",
        tuple(f"HumanEvalPlus{kind}.jsonl{gz}" for kind in ("-OriginFmt", "") for gz in (".gz", "")),
        "evalplus/humanevalplus",
        Limits(timeout_s=30.0),
        "Of the release of EvalPlus take HumanEvalPlus-OriginFmt.jsonl.gz: the other file holds inputs, but no tests.",
    ),
    _aime(2024, ("aime24.jsonl", "AIME_2024.jsonl", "aime_2024_problems.jsonl")),
    _aime(2025, ("aime25.jsonl", "AIME_2025.jsonl")),
    Benchmark(
        "ifeval",
        "IFEval",
        "instructions",
        Sampling(1, 0.0, 1.0, 2048),
        (1,),
        ("IFEval_input_data.jsonl", "input_data.jsonl"),
        ("HuggingFaceH4/ifeval", None, "train"),
        lambda problem: Prompt(str(problem["prompt"])),
        _mark_ifeval,
        ready=check_sentence_model,
        fields=("prompt", "instruction_id_list", "kwargs"),
    ),
)


def get_benchmarks(names: Sequence[str] | None) -> list[Benchmark]:
    """The benchmarks of these names in the order of the table, or all.

    Raises:
        RecipeError: some are unknown; names all of them.
    """
    chosen = known_names(names, [b.name for b in BENCHMARKS], "benchmark")
    return [b for b in BENCHMARKS if b.name in chosen]
