"""How few inputs of each expert are enough for RegMean, which inputs they must be, and does a prior help?

    python -m benchmarks.few digits                              # the demo's six experts, fully fine-tuned
    python -m benchmarks.few adapters --base BASE --data FOLDER  # FOLDER/TASK, TASK.jsonl, TASK.test.jsonl
    python -m benchmarks.few whole-texts --base BASE --data FOLDER  # adapters that were trained on prompts and answers
    python -m benchmarks.few encoder-adapters --data TEXTS       # the suite text-minilm, gentle adapters
    python -m benchmarks.few encoder-full --data TEXTS           # the same tasks, fully fine-tuned

Of `n` inputs of each expert, `C_t` is the mean of `z z^T` over the inputs `z` of a layer; of a prior, it is
`C_t + a k_t D_t^T D_t` with equal traces of both (`k_t`) and `a = A / n`. The merge is `(sum D_t C_t) (sum C_t)^+`, or
with a ridge in units of the mean eigenvalue in place of the cut-off.
Of `whole-texts`, prompts and questions are whole chats, and inputs are also prompts that the experts write themselves.
FOLDER/TASK.reworded.jsonl has the same prompts in other words than those of the training, in the same order.
Rows are appended to the result file, and a row that is there is not measured again; `--minutes` ends a run early.

Shapes: `O` out_features, `I` in_features, `N` samples or tokens.
"""

from __future__ import annotations

import abc
import copy
import functools
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from actmat.extras.collect.data import SELF, DataOptions
from actmat.extras.models.loading import Loaded
from actmat.extras.tune.written import write_prompts
from benchmarks.common import RESULTS, program, read_lines
from benchmarks.provenance import processor

FILE = RESULTS / "few.jsonl"
NUMBERS = (1, 2, 4, 8, 16, 32, 64)
PRIORS = (1.0, 4.0)
"""`A` of the prior's share `A / n`."""
RIDGES = (0.0, 0.001)
QUESTIONS = 60
GENTLE = {"ranks": "16", "test": "200", "lora_rate": "2.5e-4", "lora_epochs": "4", "alpha": "32"}
WORDS = (1000, 30522)
"""Range of BERT's tokens that are not special."""
BATCH = 20
EPS = torch.finfo(torch.float32).eps
SMALL = 1e-4
"""Of a delta's singular values: their squares are far below the cut-off, and rounding makes up those of an adapter."""

Grams = dict[str, Tensor]
"""Layer -> `Z`, `N I`, whose `Z^T Z` is the mean of `z z^T`."""


class Subject(abc.ABC):
    """Experts of one base, their inputs, and a test."""

    tasks: list[str]
    deltas: dict[str, list[Tensor]]  # layer -> delta `O I` of each expert; zeros where it changed nothing
    shares: dict[str, str]  # layer -> the layer whose input it reads too

    @abc.abstractmethod
    def grams(self, task: int, kind: str, draw: int, n: int) -> Grams:
        """Inputs of an expert's layers, over its first `n` inputs of a kind, divided by the root of their number."""

    @abc.abstractmethod
    def score(self, merged: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
        """Accuracy, and share of answers that are the expert's, by task, of the base plus these deltas."""

    @functools.cached_property
    def roots(self) -> dict[str, list[Tensor]]:
        """Layer -> `K` of each expert, whose `K^T K` is that of the delta."""
        return {layer: [root(d) for d in deltas] for layer, deltas in self.deltas.items()}


def root(delta: Tensor) -> Tensor:
    """`O I -> R I` with the same Gram matrix of columns; directions below `SMALL` of the largest are left out."""
    _, values, rows = torch.linalg.svd(delta, full_matrices=False)
    kept = values > SMALL * values[0]
    return values[kept, None] * rows[kept]  # type: ignore[no-any-return]


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
        own = subject.roots[layer] if prior or grams is None else []
        roots = own if grams is None else [g[subject.shares[layer]] for g in grams]
        if prior and grams is not None:
            sizes = [
                float(z.square().sum() / s) if (s := k.square().sum()) else 0.0 for z, k in zip(roots, own, strict=True)
            ]
            roots = [torch.cat([z, k * (prior * s) ** 0.5]) for z, k, s in zip(roots, own, sizes, strict=True)]
        out[layer] = solved(deltas, roots, ridge).float()
    return out


def wanted(
    draws: Sequence[Sequence[int]], priors: Mapping[float, Sequence[int]], controls: Mapping[str, Sequence[int]]
) -> Iterator[dict[str, Any]]:
    """Every row: kind of inputs, their number, the draw, prior, ridge; the first draw first.

    Args:
        draws: numbers of inputs of each.
        priors: `A` -> numbers of inputs with it.
        controls: kind of inputs -> their numbers.
    """
    plain = {"prior": 0.0, "ridge": 0.0}
    yield {"kind": "average", "n": 0, "draw": 0, **plain}
    yield {"kind": "actmat", "n": 0, "draw": 0, **plain}
    for draw, numbers in enumerate(draws):
        for n in numbers:
            for a, ridge in itertools.product((0.0, *priors), RIDGES):
                if not a or n in priors[a]:
                    yield {"kind": "own", "n": n, "draw": draw, "prior": a, "ridge": ridge}
        for kind, some in controls.items():
            for n in some:
                yield {"kind": kind, "n": n, "draw": draw, **plain}
                yield {"kind": kind, "n": n, "draw": draw, "prior": PRIORS[1], "ridge": RIDGES[1]}


def wanted_of_chats() -> Iterator[dict[str, Any]]:
    """Rows of `merge --data` by a user's prompts, by those that the experts write, and by random tokens."""
    yield {"kind": "average", "n": 0, "draw": 0, "prior": 0.0, "ridge": 0.0}
    for draw in range(3):
        for kind, n in (("self", 8), ("own", 8), ("self", 32), ("random", 8), ("own", 32)):
            yield {"kind": kind, "n": n, "draw": draw, "prior": PRIORS[1], "ridge": RIDGES[1]}


def study(name: str, subject: Subject, rows: Iterator[dict[str, Any]], until: float) -> None:
    """Measure what the file lacks."""
    done = {tuple(r[k] for k in ("subject", "kind", "n", "draw", "prior", "ridge")) for r in read_lines(FILE)}
    inputs = functools.lru_cache(maxsize=len(subject.tasks))(subject.grams)
    for row in rows:
        if (name, *row.values()) in done or time.monotonic() > until:
            continue
        if row["kind"] == "average":
            found = {layer: sum(d) / len(d) for layer, d in subject.deltas.items()}  # type: ignore[misc]
        else:
            number = range(len(subject.tasks))
            grams = [inputs(t, row["kind"], row["draw"], row["n"]) for t in number] if row["n"] else None
            found = merge(subject, grams, row["prior"] / row["n"] if row["n"] else 0.0, row["ridge"])
        accuracy, kept = subject.score(found)
        line = {"subject": name, **row, "accuracy": accuracy, "kept": kept, "tasks": list(subject.tasks)}
        with FILE.open("a") as file:
            file.write(json.dumps(line | {"processor": processor(), "date": time.strftime("%Y-%m-%d")}) + "\n")
        print(row, f"{100 * sum(accuracy) / len(accuracy):.1f} kept {100 * sum(kept) / len(kept):.1f}", flush=True)


def sources(kind: str, task: int, tasks: int) -> Sequence[int]:
    """Tasks whose inputs an expert is given."""
    return {"other": [(task + 1) % tasks], "mixed": range(tasks)}.get(kind, [task])


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


class Classifiers(Subject):
    """Models of one base and what they answer; weights are those of `layers`, all others are averaged.

    Args:
        predict: classes of the test's inputs, of a model and the number of a task.
        labels: the right classes of each task.
    """

    def __init__(
        self,
        base: Any,
        experts: Sequence[Any],
        layers: Callable[[str], bool],
        predict: Callable[[Any, int], Tensor],
        labels: Sequence[Tensor],
    ) -> None:
        self._base, self._experts, self._predict, self._labels = base, experts, predict, labels
        start = base.state_dict()
        states = [e.state_dict() for e in experts]
        every: dict[str, list[Tensor]] = {n: [e[n] - w for e in states] for n, w in start.items()}
        self.deltas = {n: d for n, d in every.items() if layers(n) and any(bool(one.any()) for one in d)}
        self._rest = {n: sum(d) / len(d) for n, d in every.items() if not layers(n)}
        self._answers = [predict(e, t) for t, e in enumerate(experts)]

    def score(self, merged: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
        """See `Subject`."""
        model = copy.deepcopy(self._base)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor += merged.get(name, self._rest.get(name, 0))
        found = [self._predict(model, t) for t in range(len(self._labels))]
        return shares(found, self._labels), shares(found, self._answers)

    def inputs(self, task: int, kind: str, draw: int, n: int) -> list[dict[str, Any]]:
        """Arguments of a model, one input each."""
        raise NotImplementedError

    def grams(self, task: int, kind: str, draw: int, n: int) -> Grams:
        """See `Subject`."""
        given, model = self.inputs(task, kind, draw, n), self._experts[task]
        layers = {n: model.get_submodule(n.removesuffix(".weight")) for n in {self.shares[n] for n in self.deltas}}

        def run() -> None:
            for arguments in given:
                model(**arguments)

        number = sum(arguments["input_ids"].numel() for arguments in given)
        return {k: z / number**0.5 for k, z in observed(layers, run).items()}


def shares(found: Sequence[Tensor], others: Sequence[Tensor]) -> list[float]:
    """Share of equal answers, by task."""
    return [float((a == b).double().mean()) for a, b in zip(found, others, strict=True)]


class Digits(Classifiers):
    """The experts of `actmat demo`."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file

        from actmat.extras.demo.model import Head, features, load_encoder
        from actmat.extras.demo.run import run_demo
        from actmat.extras.demo.tasks import TASKS
        from actmat.extras.demo.training import DemoSettings, load_data

        if not (folder / "results.json").exists():
            run_demo(folder, methods=["average"])
        stored, data = load_file(folder / "heads.safetensors"), load_data(DemoSettings(), 0)
        self.tasks = [t.name for t in TASKS]
        heads = [Head(stored[f"{t}.weight"], stored[f"{t}.bias"]) for t in self.tasks]
        self._data = [data[t] for t in self.tasks]
        super().__init__(
            load_encoder(folder / "base"),
            [load_encoder(folder / "experts" / t) for t in self.tasks],
            lambda name: name.endswith(("proj.weight", "in_proj_weight")),
            lambda model, task: heads[task](features(model, self._data[task].test.images_NHW)).argmax(1),
            [own.test.labels_N for own in self._data],
        )
        self.shares = {n: n for n in self.deltas}

    def grams(self, task: int, kind: str, draw: int, n: int) -> Grams:
        """See `Subject`."""
        from actmat.extras.collect.collect import collect
        from actmat.statistics.triangle import unpack

        rng = torch.Generator().manual_seed(1000 * draw + task)
        pool = torch.cat([self._data[t].train.images_NHW for t in sources(kind, task, len(self.tasks))])
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


class Texts(Classifiers):
    """The experts of the suite `text-minilm`: adapters of the regime 'gentle, `alpha` 32', or full models."""

    def __init__(self, data: Path, cache: Path, regime: Literal["lora", "full"]) -> None:
        from actmat_experiments.harness.progress import Watch
        from actmat_experiments.harness.request import RunRequest
        from actmat_experiments.pretrained.text import experiments

        self.tasks = ["trec", "trec_backwards", "agnews_letters", "mr", "mpqa"]
        request = RunRequest("text-minilm", cache, tasks=self.tasks, regimes=(regime,), data=data, settings=GENTLE)
        with Watch() as watch:
            (self._suite,) = experiments(request, watch)
            experts = [self._suite.load(made.path) for made in self._suite.experts().values()]
        logits = [self._suite.logits(task) for task in self.tasks]
        tests = [task.test for task in self._suite.tasks]
        base = self._suite.load(self._suite.base.path)
        layers = {f"{n}.weight" for n, m in base.named_modules() if isinstance(m, nn.Linear)}
        self.shares = {n: n.replace("self.key", "self.query").replace("self.value", "self.query") for n in layers}

        @torch.no_grad()
        def predict(model: Any, task: int) -> Tensor:
            return logits[task](model, self._suite.reader(tests[task])).argmax(1)

        labels = [torch.tensor([e.label for e in test]) for test in tests]
        super().__init__(base, experts, layers.__contains__, predict, labels)

    def inputs(self, task: int, kind: str, draw: int, n: int) -> list[dict[str, Any]]:
        """See `Classifiers`."""
        rng = torch.Generator().manual_seed(1000 * draw + task)
        pool = [e for t in sources(kind, task, len(self.tasks)) for e in self._suite.tasks[t].train]
        given = [self._suite.reader([pool[i]]) for i in torch.randperm(len(pool), generator=rng)[:n].tolist()]
        for tokens in given if kind == "random" else []:
            tokens["input_ids"].random_(*WORDS, generator=rng)
        return given


class Adapters(Classifiers):
    """LoRA adapters of a language model, each with a file of prompts and one of questions with answers."""

    def __init__(self, base: str, folder: Path) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tasks = sorted(p.name for p in folder.iterdir() if p.is_dir())
        self._files, self._tokenizer = base, AutoTokenizer.from_pretrained(base)
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        self._tokenizer.padding_side = "left"
        self._prompts = [[read_lines(folder / f"{t}{end}.jsonl") for t in self.tasks] for end in ("", ".reworded")]
        tests = [read_lines(folder / f"{t}.test.jsonl")[:QUESTIONS] for t in self.tasks]
        models = [AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval() for _ in range(len(tests) + 1)]
        experts = [PeftModel.from_pretrained(models.pop(), folder / t).merge_and_unload() for t in self.tasks]
        right = [torch.tensor([self._tokenizer(r["answer"]).input_ids[0] for r in rows]) for rows in tests]
        self.shares = {n: n.replace("k_proj", "q_proj").replace("v_proj", "q_proj") for n in models[0].state_dict()}
        first = self._first
        super().__init__(models[0], experts, lambda n: "_proj" in n, lambda model, t: first(model, tests[t]), right)

    @torch.no_grad()
    def _first(self, model: Any, rows: Sequence[dict[str, str]]) -> Tensor:
        """The first token of the answer to each question."""
        found = []
        for start in range(0, len(rows), BATCH):
            given = self._tokenizer([r["text"] for r in rows[start : start + BATCH]], return_tensors="pt", padding=True)
            found.append(model(**given, logits_to_keep=1).logits[:, -1].argmax(-1))
        return torch.cat(found)

    def inputs(self, task: int, kind: str, draw: int, n: int) -> list[dict[str, Any]]:
        """See `Classifiers`; a mixture is the same for all experts."""
        if kind == "self":
            expert = Loaded(self._experts[task], self._files, None, self._files)
            texts = write_prompts(expert, DataOptions(SELF), n, seed=draw).texts
            chats = [[{"role": "user", "content": text}] for text in texts]
            made = [self._tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
            return [{**self._tokenizer(text, return_tensors="pt"), "logits_to_keep": 1} for text in made]
        rng = torch.Generator().manual_seed(draw)
        pools = [self._prompts[kind == "reworded"][t] for t in sources(kind, task, len(self.tasks))]
        texts = [r["text"] for some in zip(*pools, strict=True) for r in some]
        if draw:
            texts = [texts[i] for i in torch.randperm(len(texts), generator=rng)]
        ids = [self._tokenizer(text, return_tensors="pt").input_ids for text in texts[:n]]
        if kind == "random":
            ids = [torch.randint(len(self._tokenizer), i.shape, generator=rng) for i in ids]
        return [{"input_ids": i, "logits_to_keep": 1} for i in ids]


def main() -> None:
    """Measure the rows of one subject that are missing."""
    parser = program(__doc__, "few")
    parser.add_argument("subject", choices=["digits", "adapters", "whole-texts", "encoder-adapters", "encoder-full"])
    parser.add_argument("--base", help="the model under the adapters")
    parser.add_argument("--data", type=Path, help="folder of adapters, prompts and questions, or of texts")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no row after so many minutes")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "actmat-few", help="trained experts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * given.minutes
    kinds = ("random", "other", "mixed")
    if given.subject == "digits":
        rows = wanted([NUMBERS] * 3, dict.fromkeys(PRIORS, (1, 2, 4, 8)), dict.fromkeys(kinds, (1, 8, 64)))
        study("digits", Digits(given.work), rows, until)
    elif given.subject == "whole-texts":
        study("whole-texts", Adapters(given.base, given.data), wanted_of_chats(), until)
    elif given.subject == "adapters":
        few = (1, 8, 64)
        rows = wanted([NUMBERS, few, few], {PRIORS[1]: few}, dict.fromkeys((*kinds, "reworded"), (8,)))
        study("adapters", Adapters(given.base, given.data), rows, until)
    else:
        rows = wanted([(8, 1, 64, 2, 4, 16)] * 3, {PRIORS[1]: NUMBERS}, dict.fromkeys(kinds, (8,)))
        regime: Literal["lora", "full"] = "full" if given.subject == "encoder-full" else "lora"
        study(given.subject, Texts(given.data, given.work, regime), rows, until)


if __name__ == "__main__":
    main()
