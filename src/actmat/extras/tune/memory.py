"""The memory of a search, estimated from headers before the first model is loaded.

In memory: the live model, the base's weights, a merged model while it is loaded, and its delta, `4 M` for models of `M`
bytes, and further deltas where there is room; `2 M` where all merges are factors. With files: the live model only, `M`,
and a few of its tensors. Merged factors are in memory in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.checkpoints.writing.shards import parse_size
from actmat.engine.devices import check_device, open_devices, parse_devices
from actmat.engine.memory import available_memory
from actmat.errors import RecipeError, format_size
from actmat.extras.collect.data import DataOptions
from actmat.extras.tune.evaluate import TOP
from actmat.extras.tune.inputs import InputSource
from actmat.settings import RunSettings

USABLE = 0.9
"""Share of the free memory that is planned with, if no limit is given."""
COPIES = 4
"""Tensors of the size of a batch's logits in float32 that a comparison holds at most."""
SAMPLES = 256
"""Samples of a data set of unknown size."""
TENSORS = 3
"""Tensors in memory at a time if deltas are in files: the base's, the delta, the result."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of the data that decide its memory.

    Args:
        experts: that are asked.
        predictions: of one expert, at most.
        batch: predictions of one batch, at most.
        classes: of a prediction.
    """

    experts: int
    predictions: int
    batch: int
    classes: int


def sizes_of(data: Mapping[str, InputSource], config: Mapping[str, Any], new_tokens: int) -> Sizes:
    """Sizes of the predictions, at most, from the data's options and the base's config.

    A causal model predicts at every token of a text, of which those of the continuation are kept; a masked one at every
    token; an encoder-decoder model at every token of its answer; all others once for a sample.

    >>> gpt = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 50257}
    >>> sizes_of({"math": DataOptions("math.jsonl", max_samples=64, max_length=100)}, gpt, new_tokens=32)
    Sizes(experts=1, predictions=2048, batch=1056, classes=50257)
    """
    kind = " ".join(map(str, config.get("architectures") or ()))
    predictions = batch = 0
    for source in data.values():
        samples, at_once, length = _counts(source)
        if any(k in kind for k in ("ForCausalLM", "LMHeadModel")):
            kept, computed = new_tokens or length, length + new_tokens
        elif "ForConditionalGeneration" in kind:
            kept = computed = new_tokens or 1
        else:
            kept = computed = length if any(k in kind for k in ("ForMaskedLM", "ForTokenClassification")) else 1
        predictions, batch = max(predictions, samples * kept), max(batch, at_once * computed)
    by_token = any(k in kind for k in ("LM", "Generation"))
    text = config.get("text_config") or {}
    labels = len(config.get("id2label") or ()) or TOP
    classes = (config.get("vocab_size") or text.get("vocab_size")) if by_token else labels
    return Sizes(len(data), predictions, batch, int(classes or TOP))


def _counts(source: InputSource) -> tuple[int, int, int]:
    """Samples, samples of a batch, tokens of a sample."""
    if isinstance(source, DataOptions):
        return source.max_samples or SAMPLES, source.batch_size, source.max_length
    tensors = [next(iter(b.values())) for b in source]
    longest = max((t.shape[1] for t in tensors if t.ndim == 2), default=1)
    return sum(map(len, tensors)), -(-max(map(len, tensors)) // 2), longest


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a search will hold, estimated.

    Args:
        limit: bytes that may be used.
        source: origin of the limit, in words.
        device: of the models.
        model: one model: an expert while it is asked; the live model.
        answers: the experts' predictions, kept for all of the search.
        batch: logits of one batch, while it is compared.
        statistics: of one expert while they are measured; 0: none are needed.
        merging: peak of the merges, which are made one after the other before the search, with one worker.
        largest: the largest tensor.
        merges: methods with their options.
        whole: those of them that are written as whole models; the others are adapters in memory.
        factors: of all merged adapters.
        experts: that are asked.
    """

    limit: int
    source: str
    device: str
    model: int
    answers: int
    batch: int
    statistics: int
    merging: int
    largest: int
    merges: int
    whole: int
    factors: int = 0
    experts: int = 0

    @property
    def in_memory(self) -> int:
        """The least that a search in memory needs."""
        return (4 if self.whole else 2) * self.model + self.factors + self.answers + self.batch

    @property
    def with_files(self) -> int:
        """The least that a search with deltas in files needs."""
        asking = self.model + self.answers + self.batch + self.statistics
        return max(asking, self.model + TENSORS * self.largest + self.factors + self.answers + self.batch)

    @property
    def held(self) -> Literal["memory", "files"]:
        """Place of the base's weights and of the merged deltas."""
        return "memory" if self.in_memory <= self.limit else "files"

    @property
    def deltas(self) -> int:
        """Bytes of merged deltas that are kept in memory at a time."""
        return max(self.model, self.limit - 3 * self.model - self.answers - self.batch)

    @property
    def why_files(self) -> str | None:
        """The reason why merged deltas stay in files; None if they do not."""
        if self.held == "memory":
            return None
        return (
            f"Merged deltas stayed in files: in memory the search would need {format_size(self.in_memory)}, and "
            f"{format_size(self.limit)} may be used ({self.source}). Candidates were formed tensor by tensor."
        )

    def check(self) -> None:
        """Refuse a search that does not fit.

        Raises:
            RecipeError: not even one model at a time.
        """
        if self.with_files > self.limit:
            raise RecipeError(
                f"The search needs about {format_size(self.with_files)} ({format_size(self.model)} for a model, "
                f"{format_size(self.answers)} for the experts' answers, {format_size(self.batch)} for a batch), and "
                f"{format_size(self.limit)} may be used ({self.source}). Use --model-dtype bfloat16, a smaller "
                "--batch-size or --max-length, fewer --samples, or more memory."
            )

    def lines(self) -> list[str]:
        """The plan in words, a line of at most 80 columns each."""
        size = format_size
        found = [
            f"memory: {size(self.limit)} may be used ({self.source})",
            f"  a model {size(self.model)}, answers {size(self.answers)}, a batch {size(self.batch)}, "
            f"a merge {size(self.merging)}",
        ]
        if self.statistics:
            found.append(f"  statistics of one expert, while they are measured: {size(self.statistics)}")
        if self.held == "memory":
            kept = min(self.whole, self.deltas // max(1, self.model)) + self.merges - self.whole
            found.append(f"  search: {size(self.in_memory)}; {kept} of {self.merges} merged deltas kept in memory")
        else:
            found += [
                f"  search: {size(self.with_files)}; merged deltas stay in files and candidates are",
                f"  formed tensor by tensor, since in memory the search would need {size(self.in_memory)}",
            ]
        disk = (self.whole + (self.whole + 1 if self.held == "files" else 0)) * self.model
        return [*found, f"  disk: about {size(disk + self.experts * self.statistics)} until the end, and the output"]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"held": self.held, "in_memory": self.in_memory, "with_files": self.with_files}


def plan_memory(
    specs: Mapping[str, TensorSpec],
    sizes: Sizes,
    run: RunSettings,
    *,
    dtype: str,
    merging: int,
    merges: Sequence[int],
    gram: bool,
) -> MemoryPlan:
    """The plan of a search.

    Args:
        specs: tensors of the base.
        dtype: of the models while they run.
        merging: peak memory of a merge.
        merges: of each method with its options, the bytes of its merged factors; 0: it is written as a whole model.
        gram: Gram matrices are measured.

    Raises:
        RecipeError: a limit that is no size, or a device that is not there.
    """
    floats = [s.numel * torch_dtype(dtype).itemsize for s in specs.values() if s.is_floating]
    device, _ = model_device(run.device)
    limit, source = _limit(run, device)
    return MemoryPlan(
        limit=limit,
        source=source,
        device=device,
        model=sum(floats),
        answers=sizes.experts * sizes.predictions * min(sizes.classes, TOP) * (4 + 8),
        batch=COPIES * sizes.batch * sizes.classes * 4,
        statistics=_gram_bytes(list(specs.values())) if gram else 0,
        merging=merging,
        largest=max(floats, default=0),
        merges=len(merges),
        whole=sum(not m for m in merges),
        factors=sum(merges),
        experts=sizes.experts,
    )


def _gram_bytes(specs: Sequence[TensorSpec]) -> int:
    """Gram matrices `I I` of the inputs of all matrices in float32; matrices of one module share theirs."""
    inputs = {(s.name.rpartition(".")[0].rpartition(".")[0], s.shape[1]) for s in specs if len(s.shape) == 2}
    return sum(4 * width * width for _, width in inputs)


def _limit(run: RunSettings, device: str) -> tuple[int, str]:
    if device != "cpu":
        if run.device_memory is not None:
            return parse_size(run.device_memory), f"--device-memory, of {device}"
        check_device(device)
        return int(USABLE * open_devices(device)[0].free_bytes()), f"nine tenths of the free memory on {device}"
    if run.max_memory is not None:
        return parse_size(run.max_memory), "--max-memory"
    return int(USABLE * available_memory()), "nine tenths of the free memory"


def model_device(text: str) -> tuple[str, str]:
    """The device that models run on, and a note if it is one of several; merges use all of them.

    >>> model_device("cuda:1,2")
    ('cuda:1', 'models run on cuda:1, the first of cuda:1,2; merges use all of these')
    >>> model_device("cpu")
    ('cpu', '')

    Raises:
        RecipeError: the text names no device.
    """
    names = parse_devices(text)
    if names.kind != "cuda":
        return ("cpu" if names.kind == "cpu" else names.kind), ""
    if names.numbers is None:
        return "cuda:0", "models run on cuda:0; merges use all GPUs"
    first = f"cuda:{names.numbers[0]}"
    if len(names.numbers) == 1:
        return first, ""
    return first, f"models run on {first}, the first of {text}; merges use all of these"
