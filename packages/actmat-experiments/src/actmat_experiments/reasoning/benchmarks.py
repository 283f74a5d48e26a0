"""The benchmarks of the paper's table and GSM8K: data, prompts, sampling, and when an answer is right.

Prompts are plain text that a base model continues, or the same behind the model's chat template. Those of AIME and
GSM8K are this project's own; the paper does not print its prompts.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.errors import CheckpointError, RecipeError, did_you_mean
from actmat_experiments.reasoning.marks import (
    aime_answer,
    check_sentence_model,
    flexible_number,
    followed,
    program,
    same_number,
    strict_number,
)
from actmat_experiments.reasoning.sandbox import Limits, require_protections, run_program

__all__ = ["BENCHMARKS", "Benchmark", "Sampling", "get_benchmarks"]

Problem = Mapping[str, Any]
Marks = Mapping[str, bool]
"""Name of the score -> whether the answer is right."""

_CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")


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
class Benchmark:
    """One benchmark.

    Args:
        skill: which expert is its own: "math", "code" or "instructions".
        files: names under which a local copy is looked for, JSON lines, perhaps gzipped.
        hub: data set, configuration, split.
        prompt: text that the model continues.
        mark: scores of one answer; the first name is that of the benchmark.
        ready: raises what is missing on this machine, before anything is generated.
        fields: what every problem must have, in any case.
        hint: where a copy with these fields is.
    """

    name: str
    title: str
    skill: str
    sampling: Sampling
    ks: tuple[int, ...]
    files: tuple[str, ...]
    hub: tuple[str, str | None, str]
    prompt: Callable[[Problem], str]
    mark: Callable[[Problem, str], Marks]
    ready: Callable[[Sequence[Problem]], None] = lambda problems: None
    fields: tuple[str, ...] = ("prompt",)
    hint: str = "Fetch it again."

    def load(self, data: Path | None) -> list[Problem]:
        """All problems, from a local copy in `data` or, without that, from the hub.

        Raises:
            CheckpointError: there is no such file, a line of it is no JSON, or problems lack a field.
        """
        if data is None:
            from datasets import load_dataset

            path, name, split = self.hub
            return self._complete([dict(row) for row in load_dataset(path, name, split=split)], f"{path} on the hub")
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
        return [json.loads(line) for line in data.decode("utf-8").split("\n") if line.strip()]
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise CheckpointError(f"{path} is no file of JSON lines: {error}. Fetch it again.") from None


def _mark_code(name: str, limits: Limits) -> Callable[[Problem, str], Marks]:
    def mark(problem: Problem, answer: str) -> Marks:
        written = program(problem["prompt"], answer, problem["entry_point"], _CODE_STOPS)
        text = f"{written}\n{problem['test']}\ncheck({problem['entry_point']})\n"
        return {name: run_program(text, limits).passed}

    return mark


def _field(problem: Problem, name: str) -> str:
    """Copies of AIME differ in the case of their fields."""
    return str(next(value for key, value in problem.items() if key.lower() == name))


def _aime_prompt(problem: Problem) -> str:
    return (
        "Solve the following math problem step by step. The answer is an integer from 0 to 999; "
        f"put it in \\boxed{{}} at the end.\n\nProblem: {_field(problem, 'problem')}\n\nSolution:"
    )


def _mark_aime(name: str) -> Callable[[Problem, str], Marks]:
    return lambda problem, answer: {name: aime_answer(answer) == int(_field(problem, "answer"))}


def _mark_ifeval(problem: Problem, answer: str) -> Marks:
    found = followed(problem, answer)
    return {"ifeval": all(found.loose), "ifeval-strict": all(found.strict)}


def _gsm8k_prompt(problem: Problem) -> str:
    return (
        "Solve the following problem step by step. End with a line '#### ' and the number that is the answer.\n\n"
        f"Question: {problem['question']}\nAnswer:"
    )


def _mark_gsm8k(problem: Problem, answer: str) -> Marks:
    wanted = strict_number(problem["answer"]) or ""
    said = {"gsm8k": flexible_number(answer), "gsm8k-strict": strict_number(answer)}
    return {name: same_number(number, wanted) for name, number in said.items()}


_CODE_FIELDS = ("prompt", "entry_point", "test")
_CODE = Sampling(20, 0.8, 0.95, 1024, _CODE_STOPS)
_AIME = Sampling(32, 0.6, 0.95, 16384, ("\nProblem:",))
_NEXT_QUESTION = ("\nQuestion:",)

BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark(
        "humaneval",
        "HumanEval",
        "code",
        _CODE,
        (1, 10),
        ("HumanEval.jsonl.gz", "HumanEval.jsonl"),
        ("openai/openai_humaneval", None, "test"),
        lambda problem: str(problem["prompt"]),
        _mark_code("humaneval", Limits()),
        lambda problems: require_protections(),
        _CODE_FIELDS,
    ),
    Benchmark(
        "humaneval_plus",
        "HumanEval+",
        "code",
        _CODE,
        (1, 10),
        tuple(f"HumanEvalPlus{kind}.jsonl{gz}" for kind in ("-OriginFmt", "") for gz in (".gz", "")),
        ("evalplus/humanevalplus", None, "test"),
        lambda problem: str(problem["prompt"]),
        _mark_code("humaneval_plus", Limits(timeout_s=30.0)),
        lambda problems: require_protections(),
        _CODE_FIELDS,
        "Of the release of EvalPlus take HumanEvalPlus-OriginFmt.jsonl.gz: the other file holds inputs, but no tests.",
    ),
    Benchmark(
        "aime24",
        "AIME 24",
        "math",
        _AIME,
        (1, 32),
        ("aime24.jsonl", "AIME_2024.jsonl", "aime_2024_problems.jsonl"),
        ("Maxwell-Jia/AIME_2024", None, "train"),
        _aime_prompt,
        _mark_aime("aime24"),
        fields=("problem", "answer"),
    ),
    Benchmark(
        "aime25",
        "AIME 25",
        "math",
        _AIME,
        (1, 32),
        ("aime25.jsonl", "AIME_2025.jsonl"),
        ("math-ai/aime25", None, "test"),
        _aime_prompt,
        _mark_aime("aime25"),
        fields=("problem", "answer"),
    ),
    Benchmark(
        "ifeval",
        "IFEval",
        "instructions",
        Sampling(1, 0.0, 1.0, 2048),
        (1,),
        ("IFEval_input_data.jsonl", "input_data.jsonl"),
        ("google/IFEval", None, "train"),
        lambda problem: str(problem["prompt"]),
        _mark_ifeval,
        check_sentence_model,
        ("prompt", "instruction_id_list", "kwargs"),
    ),
    Benchmark(
        "gsm8k",
        "GSM8K",
        "math",
        Sampling(1, 0.0, 1.0, 1024, _NEXT_QUESTION),
        (1,),
        ("gsm8k_test.jsonl", "test.jsonl"),
        ("openai/gsm8k", "main", "test"),
        _gsm8k_prompt,
        _mark_gsm8k,
        fields=("question", "answer"),
    ),
)


def get_benchmarks(names: Sequence[str] | None) -> list[Benchmark]:
    """The benchmarks of these names in the order of the table, or all.

    Raises:
        RecipeError: some are unknown; names all of them.
    """
    known = [b.name for b in BENCHMARKS]
    unknown = [n for n in names or () if n not in known]
    if unknown:
        raise RecipeError(
            f"There are no such benchmarks; known are {', '.join(known)}.",
            [f"'{n}' is unknown.{did_you_mean(n, known)}" for n in unknown],
        )
    return [b for b in BENCHMARKS if names is None or b.name in names]
