"""How few inputs of each expert are enough for RegMean, which inputs they must be, and does a prior help?

    python -m benchmarks.few digits                              # the demo's six experts, fully fine-tuned
    python -m benchmarks.few adapters --base BASE --data FOLDER  # FOLDER/TASK, TASK.jsonl, TASK.test.jsonl
    python -m benchmarks.few whole-texts --base BASE --data FOLDER  # adapters that were trained on prompts and answers
    python -m benchmarks.few encoder-adapters --data TEXTS       # the suite text-minilm, gentle adapters
    python -m benchmarks.few encoder-full --data TEXTS           # the same tasks, fully fine-tuned

Of `n` inputs of each expert, `C_t` is the mean of `z z^T` over the inputs `z` of a layer; of a prior, it is
`C_t + a k_t D_t^T D_t` with equal traces of both (`k_t`) and `a = A / n`. The merge is `(sum D_t C_t) (sum C_t)^+`, or
with a ridge in units of the mean eigenvalue in place of the cut-off. Toward another merge `D_M` without inputs, it is
`D_M + (sum (D_t - D_M) C_t) (sum C_t + l I)^-1` with `C_t` of equal traces.
Of `whole-texts`, prompts and questions are whole chats, and inputs are also prompts that the experts write themselves.
FOLDER/TASK.reworded.jsonl has the same prompts in other words than those of the training, in the same order.
Rows are appended to the result file, and a row that is there is not measured again; `--minutes` ends a run early.

Shapes: `O` out_features, `I` in_features, `N` samples or tokens.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import actmat
from actmat.extras.collect.data import SELF, DataOptions
from actmat.extras.models.loading import Loaded
from actmat.extras.tune.written import write_prompts
from benchmarks.common import RESULTS, program, read_lines
from benchmarks.provenance import commit, processor

FILE = RESULTS / "few.jsonl"
NUMBERS = (1, 2, 4, 8, 16, 32, 64)
PRIORS = (1.0, 4.0)
"""`A` of the prior's share `A / n`."""
RIDGES = (0.0, 0.001)
METHODS = ("ct_merging", "dc_merge", "tsv")
"""Merges without inputs; the regressions go toward the first two."""
TOWARD = 0.05
"""Ridge of these regressions."""
QUESTIONS = 60
GENTLE = {"ranks": "16", "test": "200", "lora_rate": "2.5e-4", "lora_epochs": "4", "alpha": "32"}
WORDS = (1000, 30522)
"""Range of BERT's tokens that are not special."""
BATCH = 20
ROW = ("kind", "n", "draw", "prior", "ridge", "toward")
"""Fields that distinguish the rows of a subject."""

Grams = dict[str, Tensor]
"""Layer -> mean of `z z^T`, `I I`."""


def merge(
    subject: Subject, grams: Sequence[Grams], prior: float, ridge: float, start: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Deltas merged by inputs.

    Args:
        start: the merge that the regression goes toward.
    """
    out = {}
    for layer, deltas in subject.deltas.items():
        summed = [with_prior(g[subject.shares[layer]], d, prior) for g, d in zip(grams, deltas, strict=True)]
        start_OI = torch.zeros(()) if start is None else start[layer]
        options: dict[str, Any] = {"ridge": ridge, "normalize": "none" if start is None else "trace"}
        beyond = [d - start_OI for d in deltas]
        out[layer] = start_OI + actmat.merge_matrices("regmean", beyond, statistics={"gram": summed}, **options)
    return out


def with_prior(gram_II: Tensor, delta_OI: Tensor, prior: float) -> Tensor:
    """A Gram matrix, and a share of the delta's own at the same trace; an expert that changed nothing has none."""
    size = float(delta_OI.square().sum())
    share = prior * float(gram_II.trace()) / size if size else 0.0
    return gram_II + share * delta_OI.T @ delta_OI if share else gram_II


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
    yield from toward(("own", *(kind for kind in controls if kind == "reworded")))
    for draw, numbers in enumerate(draws):
        for n in numbers:
            for a, ridge in itertools.product((0.0, *priors), RIDGES):
                if not a or n in priors[a]:
                    yield {"kind": "own", "n": n, "draw": draw, "prior": a, "ridge": ridge}
        for kind, some in controls.items():
            for n in some:
                yield {"kind": kind, "n": n, "draw": draw, **plain}
                yield {"kind": kind, "n": n, "draw": draw, "prior": PRIORS[1], "ridge": RIDGES[1]}


def toward(kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of merges without inputs, and of regressions toward them by eight inputs of some kinds."""
    for method in METHODS:
        yield {"kind": method, "n": 0, "draw": 0, "prior": 0.0, "ridge": 0.0}
    for kind, method in itertools.product(kinds, METHODS[:2]):
        yield {"kind": kind, "n": 8, "draw": 0, "prior": PRIORS[1], "ridge": TOWARD, "toward": method}


def wanted_of_chats() -> Iterator[dict[str, Any]]:
    """Rows of `merge --data` by a user's prompts, by those that the experts write, and by random tokens."""
    yield {"kind": "average", "n": 0, "draw": 0, "prior": 0.0, "ridge": 0.0}
    yield from toward(("own",))
    yield from by_prompts(("self", 8), ("own", 8), ("self", 32), ("random", 8), ("own", 32))


def by_prompts(*kinds: tuple[str, int]) -> Iterator[dict[str, Any]]:
    """Rows of `merge --data` by kinds and numbers of prompts, in three draws."""
    for draw, (kind, n) in itertools.product(range(3), kinds):
        yield {"kind": kind, "n": n, "draw": draw, "prior": PRIORS[1], "ridge": RIDGES[1]}


def merge_weights(subject: Subject, method: str) -> dict[str, Tensor]:
    """Deltas merged by a method that needs no inputs."""
    return {layer: actmat.merge_matrices(method, deltas).float() for layer, deltas in subject.deltas.items()}


def study(name: str, subject: Subject, rows: Iterator[dict[str, Any]], until: float) -> None:
    """Measure what the file lacks."""
    done = [{k: r[k] for k in ROW if k in r} for r in read_lines(FILE) if r["subject"] == name]
    inputs = functools.lru_cache(maxsize=len(subject.tasks))(subject.grams)
    without = functools.lru_cache(maxsize=1)(functools.partial(merge_weights, subject))
    for row in rows:
        if row in done or time.monotonic() > until:
            continue
        if row["n"]:
            grams = [inputs(t, row["kind"], row["draw"], row["n"]) for t in range(len(subject.tasks))]
            start = without(row["toward"]) if "toward" in row else None
            merged = merge(subject, grams, row["prior"] / row["n"], row["ridge"], start)
        else:
            merged = without(row["kind"])
        accuracy, kept = subject.score(merged)
        append_row(FILE, {"subject": name, **row, "accuracy": accuracy, "kept": kept, "tasks": list(subject.tasks)})


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a result file, with processor, date and commit."""
    about = {"processor": processor(), "date": time.strftime("%Y-%m-%d"), "commit": commit()}
    with file.open("a") as lines:
        lines.write(json.dumps({**row, **about}) + "\n")
    print(row, flush=True)


def sources(kind: str, task: int, tasks: int) -> Sequence[int]:
    """Tasks whose inputs an expert is given."""
    return {"other": [(task + 1) % tasks], "mixed": range(tasks)}.get(kind, [task])


def observed(layers: Mapping[str, nn.Module], calls: Callable[[], None]) -> dict[str, Tensor]:
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


class Subject:
    """Experts of one base, their inputs, and what they answer; weights are those of `layers`, all others are averaged.

    Args:
        predict: classes of the test's inputs, of a model and the number of a task.
        labels: the right classes of each task.
    """

    tasks: list[str]
    deltas: dict[str, list[Tensor]]  # layer -> delta `O I` of each expert; zeros where it changed nothing
    shares: dict[str, str]  # layer -> the layer whose input it reads too

    def __init__(
        self,
        base: Any,
        experts: Sequence[Any],
        layers: Callable[[str], bool],
        predict: Callable[[Any, int], Tensor],
        labels: Sequence[Tensor],
    ) -> None:
        self.base, self.experts, self._predict, self._labels = base, experts, predict, labels
        start = base.state_dict()
        states = [e.state_dict() for e in experts]
        every: dict[str, list[Tensor]] = {n: [e[n] - w for e in states] for n, w in start.items()}
        self.deltas = {n: d for n, d in every.items() if layers(n) and any(bool(one.any()) for one in d)}
        self._rest = {n: sum(d) / len(d) for n, d in every.items() if not layers(n)}
        self._answers = [predict(e, t) for t, e in enumerate(experts)]

    def merged(self, deltas: Mapping[str, Tensor]) -> Any:
        """The base plus deltas of its layers, all else averaged."""
        model = copy.deepcopy(self.base)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor += deltas.get(name, self._rest.get(name, 0))
        return model

    def score(self, deltas: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
        """Accuracy, and share of answers that are the expert's, by task, of the base plus these deltas."""
        model = self.merged(deltas)
        answers = [self._predict(model, t) for t in range(len(self._labels))]
        return shares(answers, self._labels), shares(answers, self._answers)

    def inputs(self, task: int, kind: str, draw: int, n: int) -> Any:
        """Arguments of a model, one input each."""
        raise NotImplementedError

    def read(self, model: Any, inputs: Any) -> tuple[Tensor, list[int]]:
        """Last hidden states `N F` of a model for its inputs, and the first tokens of its answers if it writes any."""
        return torch.stack([model(**arguments).last_hidden_state[0].mean(0) for arguments in inputs]), []

    def grams(self, task: int, kind: str, draw: int, n: int) -> Grams:
        """Gram matrices of an expert's layers, over its first `n` inputs of a kind."""
        given, model = self.inputs(task, kind, draw, n), self.experts[task]
        layers = {n: model.get_submodule(n.removesuffix(".weight")) for n in {self.shares[n] for n in self.deltas}}

        def run() -> None:
            for arguments in given:
                model(**arguments)

        number = sum(arguments["input_ids"].numel() for arguments in given)
        return {name: z.T @ z / number for name, z in observed(layers, run).items()}


def shares(found: Sequence[Tensor], others: Sequence[Tensor]) -> list[float]:
    """Share of equal answers, by task."""
    return [float((a == b).double().mean()) for a, b in zip(found, others, strict=True)]


class Digits(Subject):
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

    def inputs(self, task: int, kind: str, draw: int, n: int) -> Tensor:
        """Images."""
        rng = torch.Generator().manual_seed(1000 * draw + task)
        pool = torch.cat([self._data[t].train.images_NHW for t in sources(kind, task, len(self.tasks))])
        images = pool[torch.randperm(len(pool), generator=rng)[:n]]
        return torch.rand(images.shape, generator=rng) * float(pool.max()) if kind == "random" else images

    def read(self, model: Any, inputs: Any) -> tuple[Tensor, list[int]]:
        """See `Subject`."""
        from actmat.extras.demo.model import features

        return features(model, inputs), []

    def grams(self, task: int, kind: str, draw: int, n: int) -> Grams:
        """See `Subject`."""
        from actmat.extras.collect.collect import collect
        from actmat.statistics.triangle import unpack

        found = collect(self.experts[task], [(self.inputs(task, kind, draw, n),)])
        out = {}
        for name in self.deltas:
            info = found.header.grams[found.header.places[name][0].gram]
            gram_II = unpack(found.tensors[f"gram.{found.header.places[name][0].gram}"], info.width)
            out[name] = gram_II / info.rows
        return out


class Texts(Subject):
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
        """See `Subject`."""
        rng = torch.Generator().manual_seed(1000 * draw + task)
        pool = [e for t in sources(kind, task, len(self.tasks)) for e in self._suite.tasks[t].train]
        given = [self._suite.reader([pool[i]]) for i in torch.randperm(len(pool), generator=rng)[:n].tolist()]
        for tokens in given if kind == "random" else []:
            tokens["input_ids"].random_(*WORDS, generator=rng)
        return given


class Adapters(Subject):
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

    def read(self, model: Any, inputs: Any) -> tuple[Tensor, list[int]]:
        """See `Subject`."""
        outputs = [model(**arguments, output_hidden_states=True) for arguments in inputs]
        return torch.stack([o.hidden_states[-1][0, -1] for o in outputs]), [int(o.logits.argmax()) for o in outputs]

    def inputs(self, task: int, kind: str, draw: int, n: int) -> list[dict[str, Any]]:
        """See `Subject`; a mixture is the same for all experts."""
        if kind == "self":
            expert = Loaded(self.experts[task], self._files, None, self._files)
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


def parse(doc: str | None, name: str) -> Namespace:
    """Arguments of a program on one of the subjects."""
    parser = program(doc, name)
    parser.add_argument("subject", choices=["digits", "adapters", "whole-texts", "encoder-adapters", "encoder-full"])
    parser.add_argument("--base", help="the model under the adapters")
    parser.add_argument("--data", type=Path, help="folder of adapters, prompts and questions, or of texts")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no row after so many minutes")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "actmat-few", help="trained experts")
    torch.set_num_threads(1)
    return parser.parse_args()


def open_subject(given: Namespace) -> Subject:
    """The experts of a subject; those that are missing are trained."""
    if given.subject == "digits":
        return Digits(given.work)
    if given.subject in ("adapters", "whole-texts"):
        return Adapters(given.base, given.data)
    return Texts(given.data, given.work, "full" if given.subject == "encoder-full" else "lora")


def main() -> None:
    """Measure the rows of one subject that are missing."""
    given, few, kinds = parse(__doc__, "few"), (1, 8, 64), ("random", "other", "mixed")
    until = time.monotonic() + 60 * given.minutes
    rows = {
        "digits": lambda: wanted([NUMBERS] * 3, dict.fromkeys(PRIORS, (1, 2, 4, 8)), dict.fromkeys(kinds, few)),
        "whole-texts": wanted_of_chats,
        "adapters": lambda: itertools.chain(
            by_prompts(("self", 8), ("self", 32)),
            wanted([NUMBERS, few, few], {PRIORS[1]: few}, dict.fromkeys((*kinds, "reworded"), (8,))),
        ),
    }
    encoders = functools.partial(wanted, [(8, 1, 64, 2, 4, 16)] * 3, {PRIORS[1]: NUMBERS}, dict.fromkeys(kinds, (8,)))
    study(given.subject, open_subject(given), rows.get(given.subject, encoders)(), until)


if __name__ == "__main__":
    main()
