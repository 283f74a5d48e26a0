"""Answers of a model, by the back ends of lm-evaluation-harness; and statistics of its layers' inputs.

The back ends (transformers, vLLM) load models, batch prompts and stop answers. The task files of the harness are not
used: HumanEval there runs code in the evaluating process, AIME is greedy and compares strings, and neither draws the
`n` answers that `@k` needs.

Answers are kept as JSON lines, `{"problem": 17, "answers": [...]}`; an interrupted run goes on behind the last line.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from actmat.errors import MergeError
from actmat_experiments.reasoning.benchmarks import Prompt, Sampling

_PROBLEMS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Engine:
    """The back end and its settings.

    Args:
        backend: "hf" (transformers) or "vllm".
        dtype: of weights and arithmetic.
        longest: most tokens of prompt and answer together; None: the limit of the model's config.
        tensor_parallel: GPUs over which each layer is divided ("vllm" only).
        data_parallel: copies of the model ("vllm" only).
        memory_fraction: share of a GPU's memory ("vllm" only).
    """

    backend: Literal["hf", "vllm"] = "hf"
    dtype: str = "bfloat16"
    longest: int | None = None
    tensor_parallel: int = 1
    data_parallel: int = 1
    memory_fraction: float = 0.8

    def check(self) -> None:
        """Raise `MergeError` if the back end is not installed: the models take hours to download."""
        if self.backend == "vllm" and importlib.util.find_spec("vllm") is None:
            raise MergeError("The back end 'vllm' is not installed: pip install vllm. Or choose engine.backend=hf.")

    def arguments(self, device: str, seed: int) -> dict[str, Any]:
        """For the harness's class of the back end."""
        common = {"dtype": self.dtype, "max_length": self.longest}
        if self.backend == "hf":
            return common | {"device": device}
        parallel = {"tensor_parallel_size": self.tensor_parallel, "data_parallel_size": self.data_parallel}
        memory = {"gpu_memory_utilization": self.memory_fraction, "batch_size": "auto"}
        return common | parallel | memory | {"seed": seed}


@dataclass(frozen=True, slots=True)
class Questions:
    """One benchmark for one model.

    Args:
        prompts: in the order of the problems.
        batch_size: answers drawn together ("hf" only).
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    path: Path
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """All that one model is asked.

    Args:
        tokenizer: folder of the tokenizer and its chat template; None: the model's.
        seed: of the answers; together with the place of a problem it determines them on one device.
        questions: per benchmark.
    """

    model: str
    tokenizer: str | None
    engine: Engine
    device: str
    seed: int
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
    engine = job.engine
    settings = {"pretrained": job.model, "tokenizer": job.tokenizer} | engine.arguments(job.device, job.seed)
    try:
        return get_model(engine.backend)(**settings)
    except ImportError as error:  # one that is installed may miss a library of the device
        raise MergeError(f"The back end '{engine.backend}' cannot be loaded: {error}. Choose backend=hf.") from error


def _answer(model: Any, job: Job, questions: Questions, done: int, on_problems: Callable[[int], object]) -> None:
    from lm_eval.api.instance import Instance

    sampling, vllm = questions.sampling, job.engine.backend == "vllm"
    how = {
        "until": list(sampling.stops),
        "max_gen_toks": sampling.max_tokens,
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature,
        **({"top_p": sampling.top_p, "top_k": -1 if vllm else 0} if sampling.temperature > 0 else {}),
    }
    _check_length(model, job, questions)
    if not vllm:
        model.batch_size_per_gpu = questions.batch_size
    with torch.random.fork_rng(), questions.path.open("a", encoding="utf-8") as file:
        for start in range(done, len(questions.prompts), _PROBLEMS_AT_ONCE):
            torch.manual_seed(_seed(job, start, 0))
            texts = [_text(model, p) for p in questions.prompts[start : start + _PROBLEMS_AT_ONCE]]
            requests = [
                Instance("generate_until", {}, (text, how | _own_seed(job, start + i, j)), idx=i * sampling.n + j)
                for i, text in enumerate(texts)
                for j in range(sampling.n)
            ]
            found = model.generate_until(requests, disable_tqdm=True)
            for i in range(len(texts)):
                answers = found[i * sampling.n : (i + 1) * sampling.n]
                file.write(json.dumps({"problem": start + i, "answers": answers}) + "\n")
            file.flush()
            on_problems(len(texts))


def _check_length(model: Any, job: Job, questions: Questions) -> None:
    """The back ends cut prompts that leave too few tokens for an answer, from their beginning."""
    longest, most = getattr(model, "max_length", None), questions.sampling.max_tokens
    if longest is None or not questions.prompts:
        return
    prompt = max(len(model.tok_encode(_text(model, p))) for p in questions.prompts)
    if prompt + most > longest:
        raise MergeError(
            f"{job.model} takes {longest} tokens, but prompts of up to {prompt} and answers of up to {most} are asked "
            "for: the longest prompts would be cut. Set max_tokens to a smaller number, or engine.longest to a larger "
            "one that the model can take."
        )


def _seed(job: Job, problem: int, answer: int) -> int:
    return (job.seed * 1_000_003 + problem) * 1_009 + answer


def _own_seed(job: Job, problem: int, answer: int) -> dict[str, int]:
    """vLLM's answers have a seed each, so that they do not depend on what else it is asked; transformers has one for a
    group of problems.
    """
    return {"seed": _seed(job, problem, answer)} if job.engine.backend == "vllm" else {}


def _text(model: Any, prompt: Prompt) -> str:
    return str(model.apply_chat_template([{"role": "user", "content": prompt.text}])) + prompt.begun


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
    """Remove the unfinished end of an interrupted run."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").split("\n")[:n_problems]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def in_template(folder: Path, prompts: Sequence[str]) -> list[str]:
    """Prompts as a user's messages in the chat template of a tokenizer; as they are where it has none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        return list(prompts)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [str(text) for text in tokenizer.apply_chat_template(chats, tokenize=False)]


_MEASURED = 32
"""Prompts of a batch."""


def measure(checkpoint: Path, prompts: Sequence[str], out: Path, *, longest: int, device: str, dtype: str) -> None:
    """Run an expert on prompts and write the second moments of all its layers' inputs to the folder `out`.

    Products are computed where the model is, in float32; sums are float64 and on the host: 22 GB of a model of 7B.

    Args:
        longest: tokens of a prompt that are looked at.
        dtype: of the model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from actmat_experiments.core import collect

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def batches() -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(prompts), _MEASURED):
            some = list(prompts[start : start + _MEASURED])
            found = tokenizer(some, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            yield {"input_ids": found.input_ids.to(device), "attention_mask": found.attention_mask.to(device)}

    collect(model, batches(), checkpoint=checkpoint, out=out, sums_on="cpu")
