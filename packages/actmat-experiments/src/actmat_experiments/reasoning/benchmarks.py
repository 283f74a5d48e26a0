r"""The benchmarks of the paper's table and GSM8K: data, prompts, sampling, and when an answer is right.

Every benchmark is asked in one of three formats:

* `olmes`: as the paper did, by the tasks of Ai2's OLMES whose resolved configurations stand in its published results
  (`codex_humaneval::tulu`, `codex_humanevalplus::tulu`, `ifeval::tulu`, `aime:zs_cot_r1::pass_at_32_2024_deepseek`,
  `..._2025_deepseek`): in the chat template, the answer to a code problem begun with the function to complete, and no
  stop strings but these. `docs/experiments/reasoning.md` says what these configurations leave open.
* `plain`: text that a base model continues.
* `chat`: the same behind the model's chat template. A program is taken out of the whole answer before any stop string
  is applied: "\n```" and "\ndef" stand in front of the function in most answers of chat models.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from actmat.errors import CheckpointError, RecipeError, did_you_mean
from actmat_experiments.harness.hub import load_splits
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

Problem = Mapping[str, Any]
Marks = Mapping[str, bool]
"""Name of the score -> whether the answer is right."""

_CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
_OLMES_STOPS = ("\nclass", "\nif", "\nprint", "\n#", "\n```", "\n```\n\n", "<|eot_id|>")

Format = Literal["olmes", "plain", "chat"]


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
    """Text that a model continues.

    Args:
        text: the user's message, or, without a chat, all of it.
        begun: beginning of the answer, behind the template.
    """

    text: str
    chat: bool = False
    begun: str = ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark.

    Args:
        skill: which expert is its own: "math", "code" or "instructions".
        sampling: in the format "plain".
        files: names under which a local copy is looked for, JSON lines, perhaps gzipped.
        hub: data set, configuration, split.
        prompt: text that the model continues.
        mark: scores of one answer, by the format; the first name is that of the benchmark.
        asked: prompt in the format "olmes"; None: it is none of the paper's, and `prompt` is put into the template.
        sampled: sampling in the format "olmes"; None: as in the others.
        ready: raises what is missing on this machine, before anything is generated.
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
    prompt: Callable[[Problem], str]
    mark: Callable[[Problem, str, Format], Marks]
    asked: Callable[[Problem], Prompt] | None = None
    sampled: Sampling | None = None
    ready: Callable[[Sequence[Problem]], None] = lambda problems: None
    fields: tuple[str, ...] = ("prompt",)
    hint: str = "Fetch it again."
    chosen: Callable[[Problem], bool] = lambda problem: True

    def prompt_in(self, form: Format, problem: Problem) -> Prompt:
        """The problem in a format."""
        if form == "olmes" and self.asked is not None:
            return self.asked(problem)
        return Prompt(self.prompt(problem), chat=form != "plain")

    def sampling_in(self, form: Format) -> Sampling:
        """Sampling in a format; only a text that is continued ends at stop strings."""
        if form == "olmes" and self.sampled is not None:
            return self.sampled
        return self.sampling if form == "plain" else replace(self.sampling, stops=())

    def load(self, data: Path | None) -> list[Problem]:
        """All problems, from a local copy in `data` or, without that, from the hub.

        Raises:
            CheckpointError: there is no such file, a line of it is no JSON, or problems lack a field.
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
        return [json.loads(line) for line in data.decode("utf-8").split("\n") if line.strip()]
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise CheckpointError(f"{path} is no file of JSON lines: {error}. Fetch it again.") from None


def _mark_code(name: str, limits: Limits) -> Callable[[Problem, str, Format], Marks]:
    def mark(problem: Problem, answer: str, form: Format) -> Marks:
        written = (
            problem["prompt"] + answer  # the prompt of this format ends inside the function
            if form == "olmes"
            else program(problem["prompt"], answer, problem["entry_point"], _CODE_STOPS)
        )
        text = f"{written}\n{problem['test']}\ncheck({problem['entry_point']})\n"
        return {name: run_program(text, limits).passed}

    return mark


def _ask_code(problem: Problem) -> Prompt:
    begun = f"Here is the completed function:\n\n```python\n{problem['prompt']}"
    return Prompt(f"Complete the following python function.\n\n\n{problem['prompt']}", chat=True, begun=begun)


def _field(problem: Problem, name: str) -> str:
    """Copies of AIME differ in the case of their fields."""
    return str(next(value for key, value in problem.items() if key.lower() == name))


def _aime_prompt(problem: Problem) -> str:
    return (
        "Solve the following math problem step by step. The answer is an integer from 0 to 999; "
        f"put it in \\boxed{{}} at the end.\n\nProblem: {_field(problem, 'problem')}\n\nSolution:"
    )


def _ask_aime(problem: Problem) -> Prompt:
    instruction = "Please reason step by step, and put your final answer within \\boxed{}."
    return Prompt(f"{_field(problem, 'problem')}\n\n{instruction}", chat=True)


def _mark_aime(name: str) -> Callable[[Problem, str, Format], Marks]:
    return lambda problem, answer, form: {name: aime_answer(answer) == int(_field(problem, "answer"))}


def _of_year(year: int) -> Callable[[Problem], bool]:
    """Problems of a year: by its column, or by the page that they were taken from (".../2024_AIME_I_Problems/...")."""
    return lambda problem: str(problem.get("year") or problem["url"].split("/")[-2].split("_")[0]) == str(year)


def _mark_ifeval(problem: Problem, answer: str, form: Format) -> Marks:
    found = followed(problem, answer)
    return {"ifeval": all(found.loose), "ifeval-strict": all(found.strict)}


def _gsm8k_prompt(problem: Problem) -> str:
    return (
        "Solve the following problem step by step. End with a line '#### ' and the number that is the answer.\n\n"
        f"Question: {problem['question']}\nAnswer:"
    )


def _mark_gsm8k(problem: Problem, answer: str, form: Format) -> Marks:
    wanted = strict_number(problem["answer"]) or ""
    said = {"gsm8k": flexible_number(answer), "gsm8k-strict": strict_number(answer)}
    return {name: same_number(number, wanted) for name, number in said.items()}


def _code(name: str, title: str, files: tuple[str, ...], hub: str, limits: Limits, hint: str) -> Benchmark:
    return Benchmark(
        *(name, title, "code", Sampling(20, 0.8, 0.95, 1024, _CODE_STOPS), (1, 10), files, (hub, None, "test")),
        prompt=lambda problem: str(problem["prompt"]),
        mark=_mark_code(name, limits),
        asked=_ask_code,
        sampled=Sampling(20, 0.8, 0.95, _TO_THE_END, _OLMES_STOPS),
        ready=lambda problems: require_protections(),
        fields=("prompt", "entry_point", "test"),
        hint=hint,
    )


def _aime(year: int, files: tuple[str, ...]) -> Benchmark:
    name = f"aime{year % 100}"
    return Benchmark(
        *(name, f"AIME {year % 100}", "math", Sampling(32, 0.6, 0.95, 16384, ("\nProblem:",)), (1, 32), files),
        hub=("allenai/aime-2021-2025", None, "train"),
        prompt=_aime_prompt,
        mark=_mark_aime(name),
        asked=_ask_aime,
        sampled=Sampling(32, 0.6, 0.95, 16384),
        fields=("problem", "answer"),
        chosen=_of_year(year),
    )


_TO_THE_END = 3072
"""Tokens of a program in the format "olmes", where answers end with the context, of 4,096 tokens."""

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
        lambda problem: str(problem["prompt"]),
        _mark_ifeval,
        ready=check_sentence_model,
        fields=("prompt", "instruction_id_list", "kwargs"),
    ),
    Benchmark(
        "gsm8k",
        "GSM8K",
        "math",
        Sampling(1, 0.0, 1.0, 1024, ("\nQuestion:",)),
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
