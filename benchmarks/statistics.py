"""What measuring costs: Gram matrices of every layer's inputs, against the forward passes alone.

    python -m benchmarks.statistics                      # hidden 256, 768 and 1024
    python -m benchmarks.statistics --hidden 64 --tokens 512

Random models of two families at each hidden size (a Llama-like decoder whose feed-forward layer is 8/3 times as wide,
and a BERT-like encoder with 4 times), four layers, batches of 8 sequences of 128 tokens with padding. The same batches
are run alone and under observation, in turn; medians of three. What is compared is the passes; reading the checkpoint
to hash it and writing the file are listed apart.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import markdown, write_result

VOCABULARY = 1000
LENGTH, SAMPLES = 128, 8
REPEATS = 3


def make_model(family: str, hidden: int, layers: int, folder: Path) -> Any:
    """A random model, saved and loaded again."""
    import transformers as hf

    torch.manual_seed(0)
    common = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": max(1, hidden // 64)}
    common |= {"vocab_size": VOCABULARY, "max_position_embeddings": 2 * LENGTH}
    if family == "llama":
        wide = -(-8 * hidden // 3 // 32) * 32
        config = hf.LlamaConfig(**common, intermediate_size=wide, num_key_value_heads=max(1, hidden // 64))
        model: Any = hf.LlamaForCausalLM(config)
    else:
        model = hf.BertForMaskedLM(hf.BertConfig(**common, intermediate_size=4 * hidden))
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


def make_batches(tokens: int) -> list[dict[str, Tensor]]:
    """About this many tokens, a quarter of the positions padding in half of the samples."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
    mask[::2, -LENGTH // 4 :] = 0
    n = max(1, round(tokens / int(mask.sum())))
    shape = (SAMPLES, LENGTH)
    return [
        {"input_ids": torch.randint(0, VOCABULARY, shape, generator=generator), "attention_mask": mask}
        for _ in range(n)
    ]


def compare(family: str, hidden: int, layers: int, tokens: int) -> dict[str, Any]:
    """One model: seconds of the passes alone and under observation, and of all that comes with it."""
    from actmat.extras.collect.collect import collect

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(family, hidden, layers, folder / "model")
        batches = make_batches(tokens)

        def alone() -> None:
            with torch.no_grad():
                for batch in batches:
                    model(**batch)

        spent: list[float] = []

        def observed() -> float:
            """Seconds between the first batch and the end of the last."""
            marks: list[float] = []

            def feed() -> Any:
                for batch in batches:
                    marks.append(time.perf_counter())
                    yield batch

            began = time.perf_counter()
            result = collect(model, feed(), progress=lambda samples, tokens: marks.append(time.perf_counter()))
            result.save(folder / "stats", overwrite=True)
            spent.append(time.perf_counter() - began)
            return marks[-1] - marks[0]

        alone()
        seconds: dict[str, list[float]] = {"alone": [], "observed": []}
        for _ in range(REPEATS):
            seconds["alone"].append(clock(alone))
            seconds["observed"].append(observed())
        size = (folder / "stats" / "statistics.safetensors").stat().st_size
    forward, watched = (statistics.median(v) for v in seconds.values())
    return {
        "model": f"{family}, hidden {hidden}",
        "tokens": sum(int(b["attention_mask"].sum()) for b in batches),
        "forward_s": forward,
        "observed_s": watched,
        "ratio": watched / forward,
        "with_hashes_and_file_s": statistics.median(spent),
        "written_b": size,
    }


def clock(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 768, 1024])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    given = parser.parse_args()
    rows = [compare(f, h, given.layers, given.tokens) for h in given.hidden for f in ("llama", "bert")]
    print(markdown(rows, tuple(rows[0])))
    write_result("statistics", rows)


if __name__ == "__main__":
    main()
