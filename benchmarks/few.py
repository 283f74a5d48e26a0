"""How few inputs of each expert are enough for RegMean, which inputs they must be, and does a prior help?

    python -m benchmarks.few digits                              # the demo's six experts, fully fine-tuned
    python -m benchmarks.few adapters --base BASE --data FOLDER  # FOLDER/TASK, TASK.jsonl, TASK.test.jsonl

Of `n` inputs of each expert, `C_t` is the mean of `z z^T` over the inputs `z` of a layer; of a prior, it is
`C_t + a k_t D_t^T D_t` with equal traces of both (`k_t`) and `a = A / n`. The merge is `(sum D_t C_t) (sum C_t)^+`, or
with a ridge in units of the mean eigenvalue in place of the cut-off.
Rows are appended to the result file, and a row that is there is not measured again; `--minutes` ends a run early.

Shapes: `O` out_features, `I` in_features, `N` samples or tokens.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.common import RESULTS, program
from benchmarks.provenance import processor

FILE = RESULTS / "few.jsonl"
NUMBERS = (1, 2, 4, 8, 16, 32, 64)
PRIORS = (1.0, 4.0)
"""`A` of the prior's share `A / n`."""
RIDGES = (0.0, 0.001)
QUESTIONS = 60
BATCH = 20
EPS = torch.finfo(torch.float32).eps

Grams = dict[str, Tensor]
"""Layer -> `Z`, `N I`, whose `Z^T Z` is the mean of `z z^T`."""


class Subject(Protocol):
    """Experts of one base, their inputs, and a test."""

    tasks: list[str]
    deltas: dict[str, list[Tensor]]  # layer -> delta `O I` of each expert; zeros where it changed nothing
    shares: dict[str, str]  # layer -> the layer whose input it reads too

    def grams(self, task: int, kind: str, draw: int, n: int) -> Grams:
        """Inputs of an expert's layers, over its first `n` inputs of a kind, divided by the root of their number."""

    def root(self, layer: str, task: int) -> Tensor:
        """`K` whose `K^T K` is that of an expert's delta."""

    def score(self, merged: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
        """Accuracy, and share of answers that are the expert's, by task, of the base plus these deltas."""


def solved(deltas: Sequence[Tensor], roots: Sequence[Tensor], ridge: float = 0.0) -> Tensor:
    """`(sum D_t C_t) (sum C_t)^+` with the cut-off of `regmean`, of `C_t = Z_t^T Z_t`; by the smaller of both sides.

    Args:
        ridge: in place of the cut-off, in units of the mean eigenvalue.
    """
    rows_NI = torch.cat(list(roots)).double()
    width = rows_NI.shape[1]
    wide = len(rows_NI) < width
    values, vectors = torch.linalg.eigh(rows_NI @ rows_NI.T if wide else rows_NI.T @ rows_NI)
    shift = ridge * float(values.sum()) / width
    kept = values > (0 if ridge else width * EPS) * values[-1].clamp(min=0)
    values, vectors = values[kept], vectors[:, kept]
    basis_IK = rows_NI.T @ (vectors / values.sqrt()) if wide else vectors
    pairs = [(d.double(), z.double()) for d, z in zip(deltas, roots, strict=True) if bool(d.any())]
    left = sum((d @ z.T) @ (z @ basis_IK) for d, z in pairs)
    return (left / (values + shift)) @ basis_IK.T  # type: ignore[no-any-return]


def merge(subject: Subject, grams: Sequence[Grams] | None, prior: float, ridge: float) -> dict[str, Tensor]:
    """Merged deltas; without inputs by the deltas' own Gram matrices, which is ACTMat."""
    out = {}
    for layer, deltas in subject.deltas.items():
        own = [subject.root(layer, t) for t in range(len(deltas))] if prior or grams is None else []
        roots = own if grams is None else [g[subject.shares[layer]] for g in grams]
        if prior and grams is not None:
            sizes = [
                float(z.square().sum() / s) if (s := k.square().sum()) else 0.0 for z, k in zip(roots, own, strict=True)
            ]
            roots = [torch.cat([z, k * (prior * s) ** 0.5]) for z, k, s in zip(roots, own, sizes, strict=True)]
        out[layer] = solved(deltas, roots, ridge).float()
    return out


def average(subject: Subject) -> dict[str, Tensor]:
    """The mean of the deltas."""
    return {layer: sum(d) / len(d) for layer, d in subject.deltas.items()}  # type: ignore[misc]


def wanted(draws: int, priors: Mapping[float, Sequence[int]], controls: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Every row: kind of inputs, their number, the draw, prior, ridge; the most telling first."""
    plain = {"prior": 0.0, "ridge": 0.0}
    yield {"kind": "average", "n": 0, "draw": 0, **plain}
    yield {"kind": "actmat", "n": 0, "draw": 0, **plain}
    for draw in range(draws):
        for n in sorted(NUMBERS, key=lambda n: n not in controls):
            for a, ridge in itertools.product((0.0, *priors), RIDGES):
                if not a or n in priors[a]:
                    yield {"kind": "own", "n": n, "draw": draw, "prior": a, "ridge": ridge}
        for n in controls:
            for kind in ("random", "other", "mixed"):
                yield {"kind": kind, "n": n, "draw": draw, **plain}


def study(name: str, subject: Subject, rows: Iterator[dict[str, Any]], until: float) -> None:
    """Measure what the file lacks."""
    there = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    done = {tuple(r[k] for k in ("subject", "kind", "n", "draw", "prior", "ridge")) for r in there}
    for row in rows:
        if (name, *row.values()) in done or time.monotonic() > until:
            continue
        if row["kind"] == "average":
            found = average(subject)
        else:
            number = range(len(subject.tasks))
            grams = [subject.grams(t, row["kind"], row["draw"], row["n"]) for t in number] if row["n"] else None
            found = merge(subject, grams, row["prior"] / row["n"] if row["n"] else 0.0, row["ridge"])
        accuracy, kept = subject.score(found)
        line = {"subject": name, **row, "accuracy": accuracy, "kept": kept, "tasks": list(subject.tasks)}
        with FILE.open("a") as file:
            file.write(json.dumps(line | {"processor": processor(), "date": time.strftime("%Y-%m-%d")}) + "\n")
        print(row, f"{100 * sum(accuracy) / len(accuracy):.1f} kept {100 * sum(kept) / len(kept):.1f}", flush=True)


def observed(layers: Mapping[str, nn.Module], calls: Callable[[], None]) -> Grams:
    """Inputs of layers during some calls."""
    found: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda module, given: found.setdefault(name, []).append(given[0].reshape(-1, given[0].shape[-1]))

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in layers.items()]
    with torch.no_grad():
        calls()
    for handle in handles:
        handle.remove()
    return {name: torch.cat(some) for name, some in found.items()}


class Digits:
    """The experts of `actmat demo`."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file

        from actmat.extras.demo.model import Head, features, load_encoder
        from actmat.extras.demo.run import run_demo
        from actmat.extras.demo.tasks import TASKS
        from actmat.extras.demo.training import DemoSettings, load_data

        if not (folder / "results.json").exists():
            run_demo(folder, methods=["average"])
        self._load, self._features, self._data = load_encoder, features, load_data(DemoSettings(), 0)
        stored = load_file(folder / "heads.safetensors")
        self.tasks = [t.name for t in TASKS]
        self._heads = {t: Head(stored[f"{t}.weight"], stored[f"{t}.bias"]) for t in self.tasks}
        self._base = load_encoder(folder / "base")
        self._experts = [load_encoder(folder / "experts" / t) for t in self.tasks]
        self._answers = [self._predict(e, t) for e, t in zip(self._experts, self.tasks, strict=True)]
        start = self._base.state_dict()
        every: dict[str, list[Tensor]] = {n: [e.state_dict()[n] - w for e in self._experts] for n, w in start.items()}
        matrices = [n for n in every if n.endswith(("proj.weight", "in_proj_weight"))]
        self.deltas: dict[str, list[Tensor]] = {n: every[n] for n in matrices}
        self.rest = {n: sum(d) / len(d) for n, d in every.items() if n not in matrices}
        self.shares = {n: n for n in matrices}

    def _predict(self, encoder: Any, task: str) -> Tensor:
        return self._heads[task](self._features(encoder, self._data[task].test.images_NHW)).argmax(1)

    def grams(self, task: int, kind: str, draw: int, n: int) -> Grams:
        """See `Subject`."""
        from actmat.extras.collect.collect import collect
        from actmat.statistics.triangle import unpack

        rng = torch.Generator().manual_seed(1000 * draw + task)
        names = {"other": [self.tasks[(task + 1) % len(self.tasks)]], "mixed": self.tasks}.get(kind, [self.tasks[task]])
        pool = torch.cat([self._data[t].train.images_NHW for t in names])
        images = pool[torch.randperm(len(pool), generator=rng)[:n]]
        if kind == "random":
            images = torch.rand(images.shape, generator=rng) * float(pool.max())
        found = collect(self._experts[task], [(images,)])
        out = {}
        for name in self.deltas:
            info = found.header.grams[found.header.places[name][0].gram]
            gram_II = unpack(found.tensors[f"gram.{found.header.places[name][0].gram}"].double(), info.width)
            values, vectors = torch.linalg.eigh(gram_II / info.rows)
            out[name] = (vectors * values.clamp(min=0).sqrt()).T
        return out

    def root(self, layer: str, task: int) -> Tensor:
        """See `Subject`."""
        return self.deltas[layer][task]

    def score(self, merged: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
        """See `Subject`."""
        import copy

        model = copy.deepcopy(self._base)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor += merged.get(name, self.rest.get(name, 0))
        found = [self._predict(model, t) for t in self.tasks]
        labels = [self._data[t].test.labels_N for t in self.tasks]
        pairs = [zip(found, other, strict=True) for other in (labels, self._answers)]
        accuracy, kept = ([float((a == b).double().mean()) for a, b in some] for some in pairs)
        return accuracy, kept


class Adapters:
    """LoRA adapters of a language model, each with a file of prompts and one of questions with answers."""

    def __init__(self, base: str, folder: Path) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tasks = sorted(p.name for p in folder.iterdir() if p.is_dir())
        self._tokenizer = AutoTokenizer.from_pretrained(base)
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        self._tokenizer.padding_side = "left"
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._prompts = [_lines(folder / f"{t}.jsonl") for t in self.tasks]
        self._tests = [_lines(folder / f"{t}.test.jsonl")[:QUESTIONS] for t in self.tasks]
        adapters = PeftModel.from_pretrained(model, folder / self.tasks[0], adapter_name=self.tasks[0])
        for task in self.tasks[1:]:
            adapters.load_adapter(folder / task, adapter_name=task)
        self._model = adapters.eval()
        self._layers: dict[str, Any] = {
            n: m for n, m in adapters.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")
        }
        self.deltas = {n: [self._delta(m, t) for t in self.tasks] for n, m in self._layers.items()}
        self.shares = {n: n.replace("k_proj", "q_proj").replace("v_proj", "q_proj") for n in self._layers}
        self._weights = {n: m.base_layer.weight.detach().clone() for n, m in self._layers.items()}
        self._answers = []
        for t, task in enumerate(self.tasks):
            adapters.set_adapter(task)
            self._answers.append(self._first(self._tests[t]))

    def _delta(self, layer: Any, task: str) -> Tensor:
        if task not in layer.lora_A:
            return torch.zeros_like(layer.base_layer.weight)
        delta: Tensor = (layer.scaling[task] * layer.lora_B[task].weight @ layer.lora_A[task].weight).detach()
        return delta

    def _first(self, rows: Sequence[dict[str, str]]) -> Tensor:
        """The first token of the answer to each question."""
        found = []
        for start in range(0, len(rows), BATCH):
            given = self._tokenizer([r["text"] for r in rows[start : start + BATCH]], return_tensors="pt", padding=True)
            with torch.no_grad():
                found.append(self._model(**given, logits_to_keep=1).logits[:, -1].argmax(-1))
        return torch.cat(found)

    def _inputs(self, task: int, kind: str, draw: int) -> list[Tensor]:
        """Token ids of 64 inputs; a mixture is the same for all experts."""
        rng = torch.Generator().manual_seed(draw)
        names = {"other": [(task + 1) % len(self.tasks)], "mixed": range(len(self.tasks))}.get(kind, [task])
        pools = [self._prompts[t] for t in names]
        texts = [r["text"] for some in zip(*pools, strict=True) for r in some]
        if draw:
            texts = [texts[i] for i in torch.randperm(len(texts), generator=rng)]
        ids = [self._tokenizer(text, return_tensors="pt").input_ids for text in texts]
        if kind == "random":
            ids = [torch.randint(len(self._tokenizer), i.shape, generator=rng) for i in ids]
        return ids

    def grams(self, task: int, kind: str, draw: int, n: int) -> Grams:
        """See `Subject`."""
        given = self._inputs(task, kind, draw)[:n]
        self._model.set_adapter(self.tasks[task])
        layers = {n: m for n, m in self._layers.items() if self.shares[n] == n}

        def run() -> None:
            for ids in given:
                self._model(input_ids=ids, logits_to_keep=1)

        tokens = sum(i.numel() for i in given)
        return {k: z / tokens**0.5 for k, z in observed(layers, run).items()}

    def root(self, layer: str, task: int) -> Tensor:
        """See `Subject`: `R A` of the factor `B = Q R`."""
        module, name = self._layers[layer], self.tasks[task]
        if name not in module.lora_A:
            return torch.zeros(1, module.base_layer.weight.shape[1])
        reduced = torch.linalg.qr(module.lora_B[name].weight.detach()).R
        root: Tensor = module.scaling[name] * reduced @ module.lora_A[name].weight.detach()
        return root

    def _restore(self) -> None:
        with torch.no_grad():
            for n, w in self._weights.items():
                self._layers[n].base_layer.weight.copy_(w)

    def score(self, merged: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
        """See `Subject`."""
        with torch.no_grad():
            for n, w in self._weights.items():
                self._layers[n].base_layer.weight.copy_(w + merged[n])
        accuracy, kept = [], []
        with self._model.disable_adapter():
            for rows, own in zip(self._tests, self._answers, strict=True):
                found = self._first(rows)
                right = torch.tensor([self._tokenizer(r["answer"]).input_ids[0] for r in rows])
                accuracy.append(float((found == right).double().mean()))
                kept.append(float((found == own).double().mean()))
        self._restore()
        return accuracy, kept


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Measure the rows of one subject that are missing."""
    parser = program(__doc__, "few")
    parser.add_argument("subject", choices=["digits", "adapters"])
    parser.add_argument("--base", help="the model under the adapters")
    parser.add_argument("--data", type=Path, help="folder of adapters, prompts and questions")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no row after so many minutes")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "actmat-few", help="trained experts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * given.minutes
    if given.subject == "digits":
        study("digits", Digits(given.work), wanted(3, dict.fromkeys(PRIORS, (1, 2, 4, 8)), (1, 8, 64)), until)
    else:
        study("adapters", Adapters(given.base, given.data), wanted(1, {PRIORS[1]: (1, 8, 64)}, (8,)), until)


if __name__ == "__main__":
    main()
