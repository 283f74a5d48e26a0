"""Answers of a model, by the back ends of lm-evaluation-harness; and statistics of its layers' inputs.

The back ends (transformers, vLLM) load models, batch prompts and stop answers. The task files of the harness are not
used: HumanEval there runs code in the evaluating process, AIME is greedy and compares strings, and neither draws the
`n` answers that `@k` needs.

Answers are kept as JSON lines, `{"problem": 17, "answers": [...]}`; an interrupted run goes on behind the last line.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from actmat.errors import MergeError
from actmat_experiments.harness.progress import quiet
from actmat_experiments.reasoning.benchmarks import Sampling

__all__ = ["Job", "Questions", "answer_all", "measure", "read_answers", "release"]


Backend = Literal["hf", "vllm"]
_PROBLEMS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Questions:
    """One benchmark for one model.

    Args:
        prompts: in the order of the problems.
    """

    prompts: Sequence[str]
    sampling: Sampling
    path: Path


@dataclass(frozen=True, slots=True)
class Job:
    """All that one model is asked.

    Args:
        batch_size: answers drawn together ("hf" alone).
        chat: put prompts into the model's chat template.
        seed: of the answers; together with the place of a problem it determines them on one device.
        longest: most tokens of prompt and answer together; None: what the model's config says.
        questions: per benchmark.
    """

    model: str
    backend: Backend
    device: str
    dtype: str
    batch_size: int
    chat: bool
    seed: int
    longest: int | None
    questions: Sequence[Questions]


def answer_all(job: Job, on_problems: Callable[[int], object] = lambda n: None) -> None:
    """Draw all answers that are not on file yet. The model is loaded if some are missing, and kept for the next job.

    Args:
        job: what to do.
        on_problems: called with the number of problems that have got their answers.

    Raises:
        MergeError: the harness or the back end is not installed, or the model is too short for the answers.
    """
    open_ones = [(q, _whole_groups(q)) for q in job.questions]
    for questions, done in open_ones:
        on_problems(done)
        _cut(questions.path, done)
    for questions, done in open_ones:
        if done < len(questions.prompts):
            _answer(_load(replace(job, questions=())), job, questions, done, on_problems)


def release() -> None:
    """Give back the memory of the model that answered last."""
    _load.cache_clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@functools.lru_cache(maxsize=1)
def _load(job: Job) -> Any:
    """The model of a job without questions; kept until another is asked for, or `release`."""
    try:
        from lm_eval.api.registry import get_model
    except ImportError:
        raise MergeError("Evaluation needs lm-evaluation-harness: pip install actmat-experiments") from None
    settings: dict[str, Any] = {"pretrained": job.model, "dtype": job.dtype, "max_length": job.longest}
    if job.backend == "hf":
        settings |= {"device": job.device, "batch_size": job.batch_size}
    else:
        settings |= {"seed": job.seed, "batch_size": "auto"}
    try:
        with quiet():
            return get_model(job.backend)(**settings)
    except ModuleNotFoundError as error:
        raise MergeError(f"The back end '{job.backend}' is not installed: {error}. Choose backend=hf.") from None


def _answer(model: Any, job: Job, questions: Questions, done: int, on_problems: Callable[[int], object]) -> None:
    from lm_eval.api.instance import Instance

    sampling = questions.sampling
    how = {
        "until": list(sampling.stops),
        "max_gen_toks": sampling.max_tokens,
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature,
        **({"top_p": sampling.top_p, "top_k": 0 if job.backend == "hf" else -1} if sampling.temperature > 0 else {}),
    }
    longest = getattr(model, "max_length", None)
    if longest is not None and longest <= sampling.max_tokens:
        raise MergeError(
            f"{job.model} takes {longest} tokens, but answers of up to {sampling.max_tokens} are asked for. "
            "Set max_tokens to a smaller number."
        )
    with torch.random.fork_rng(), questions.path.open("a", encoding="utf-8") as file:
        for start in range(done, len(questions.prompts), _PROBLEMS_AT_ONCE):
            torch.manual_seed(job.seed * 1_000_003 + start)
            some = questions.prompts[start : start + _PROBLEMS_AT_ONCE]
            texts = [_in_template(model, p) if job.chat else p for p in some]
            requests = [
                Instance("generate_until", {}, (text, how), idx=i * sampling.n + j)
                for i, text in enumerate(texts)
                for j in range(sampling.n)
            ]
            found = model.generate_until(requests, disable_tqdm=True)
            for i in range(len(some)):
                answers = found[i * sampling.n : (i + 1) * sampling.n]
                file.write(json.dumps({"problem": start + i, "answers": answers}) + "\n")
            file.flush()
            on_problems(len(some))


def _in_template(model: Any, prompt: str) -> str:
    return str(model.apply_chat_template([{"role": "user", "content": prompt}]))


def read_answers(path: Path) -> list[list[str]]:
    """Answers per problem, as far as there are any; a last line without its end is passed over.

    Raises:
        MergeError: the file lacks a problem in between.
    """
    if not path.is_file():
        return []
    found: list[list[str]] = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        row = json.loads(line)
        if row["problem"] != len(found):
            raise MergeError(f"{path} lacks the answers to problem {len(found)}; remove it, and it is made again.")
        found.append(row["answers"])
    return found


def _whole_groups(questions: Questions) -> int:
    """Problems that need no more answers. Of a group that was drawn together all are drawn again if some are missing:

    the answers would differ otherwise from those of a run without interruption.
    """
    n = len(read_answers(questions.path))
    return n if n == len(questions.prompts) else n - n % _PROBLEMS_AT_ONCE


def _cut(path: Path, n_problems: int) -> None:
    """Take off what an interruption has left unfinished."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").split("\n")[:n_problems]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def measure(
    checkpoint: str,
    prompts: Sequence[str],
    out: Path,
    *,
    batch_size: int = 32,
    longest: int = 1024,
    device: str = "cpu",
    dtype: str = "float32",
) -> None:
    """Run an expert on prompts and write the second moments of all its layers' inputs to the folder `out`.

    Args:
        checkpoint: directory or hub id of the expert.
        out: folder to write, as `actmat merge` reads it.
        longest: tokens of a prompt that are looked at.
        dtype: of the model; sums are in float32.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from actmat_experiments.core import collect

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def batches() -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(prompts), batch_size):
            some = list(prompts[start : start + batch_size])
            found = tokenizer(some, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            yield {"input_ids": found.input_ids.to(device), "attention_mask": found.attention_mask.to(device)}

    collect(model, batches(), checkpoint=checkpoint, out=out)
