"""Experts of unequal size: what becomes of those that changed the base less?

    python -m benchmarks.evidence.unequal digits            # the demo's first four tasks, two at higher rates
    python -m benchmarks.evidence.unequal mixtures          # experts of two or four of the six tasks, which overlap
    python -m benchmarks.evidence.unequal suites FOLDER     # a cache, with the data in FOLDER/data
    python -m benchmarks.evidence.unequal reactions FOLDER  # of the package rxnfp: models/transformers

`digits`, `suites`: accuracy in % on all tasks, and on those of the smaller experts; mean over the seeds. `reactions`:
two public fine-tunes of one BERT for chemical reactions, one of them with a classifier. Without their data, on `Q`
reactions from ten textbook templates: the share whose class stays, and the share whose nearest neighbor among the
others, by the vector of the first token, stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import actmat
from actmat.extras.demo import training
from actmat.extras.demo.model import load_encoder, save_encoder
from actmat.extras.demo.run import correct
from actmat_experiments.harness.experiment import Experiment, MergeInputs
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.rows import candidates
from actmat_experiments.pretrained import text
from actmat_experiments.vision import small
from benchmarks.common import finish, stored_tensors

METHODS = ("average", "actmat_ridge", "actmat", "tsv", "dc_merge", "aswudi", "iso_c", "ties")
FACTORS, SEEDS, TASKS = (1.0, 2.0, 3.0, 5.0), (0, 1, 2), 4
MIXED = (2, 4)
SETTINGS = training.DemoSettings()
SUITES: Mapping[str, tuple[Any, tuple[str, ...], dict[str, float]]] = {
    "text-minilm": (text, ("sst2", "agnews_backwards", "subj_letters", "trec_letters"), {"epochs": 1, "test": 200}),
    "vision-small": (small, ("mnist", "eurosat", "dtd10", "sign_digits"), {"epochs": 2, "base_epochs": 20}),
}
"""Suite -> its module, tasks, and settings of the smaller experts."""
ROWS = ("average", "actmat_ridge", "tsv", "dc_merge", "task_arithmetic")
LARGER = (("rate", 3), ("rate", 5), ("epochs", 4))

TOKEN = re.compile(r"\[[^\]]+]|Br|Cl|>>|%\d\d|[A-Za-z0-9().=#+\-/\\]")


def ratio(base: Path, experts: Iterable[Path]) -> float:
    """The largest over the smallest `||D||`, over the matrices that an expert and the base have."""
    start, sizes = stored_tensors(base), []
    for tensors in map(stored_tensors, experts):
        names = [n for n, t in start.items() if t.ndim == 2 and n in tensors and n.split(".")[0] != "embeddings"]
        sizes.append(float(sum((tensors[n].double() - start[n].double()).square().sum() for n in names)) ** 0.5)
    return max(sizes) / min(sizes)


def merges(base: Path, experts: list[Path], methods: Sequence[str] = METHODS) -> Iterator[tuple[str, Path]]:
    """Names and places of the merges."""
    for method in methods:
        out = base.parent / "merged"
        actmat.merge(base, [str(e) for e in experts], method=method, out=out, overwrite=True)
        yield method, out


@dataclass(frozen=True)
class Digits:
    """The base of the demo with a seed, and its tasks."""

    folder: Path
    seed: int

    def __post_init__(self) -> None:
        save_encoder(training.train_base(SETTINGS, self.seed), self.base)

    @property
    def base(self) -> Path:
        """Folder of the base."""
        return self.folder / f"base-{self.seed}"

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """Images of every task."""
        return training.load_data(SETTINGS, self.seed)

    @cached_property
    def heads(self) -> Mapping[str, Any]:
        """Frozen head of every task."""
        return training.fit_heads(load_encoder(self.base), self.data, SETTINGS)

    def expert(self, tasks: Sequence[str], factor: float = 1.0) -> Path:
        """Folder of an expert of one task, or of a mixture whose batches take turns; `factor` is of the rate."""
        rate = SETTINGS.finetuning.learning_rate * factor
        expert, schedule = load_encoder(self.base), replace(SETTINGS.finetuning, learning_rate=rate)
        parts = [
            training.task_losses(
                *(expert, self.heads[task], self.data[task].train, schedule),
                training.generator_for(self.seed, f"order of {task}"),
            )
            for task in tasks
        ]
        steps = sum(schedule.steps(len(self.data[task].train)) for task in tasks)
        losses = (next(parts[n % len(parts)]) for n in range(steps))
        training.descend(list(expert.parameters()), losses, steps, schedule)
        out = self.folder / f"{self.seed}-{factor}-{'-'.join(tasks)}"
        save_encoder(expert, out)
        return out

    def scores(self, place: Path, tasks: Iterable[str]) -> list[float]:
        """Accuracies in %."""
        data = {task: self.data[task] for task in tasks}
        return [100 * float(m.double().mean()) for m in correct(self.heads, data, place).values()]

    def rows(self, experts: Mapping[tuple[str, ...], Path], methods: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Accuracies on all tasks of the experts, by method; `experts`: mean of those that learned a task."""
        tasks = list(dict.fromkeys(task for learned in experts for task in learned))
        own = {learned: dict(zip(tasks, self.scores(e, tasks), strict=True)) for learned, e in experts.items()}
        about = {"seed": self.seed, "ratio": ratio(self.base, experts.values()), "smaller": 0}
        yield about | {"method": "base", "scores": self.scores(self.base, tasks)}
        yield about | {"method": "experts", "scores": [fmean(own[x][t] for x in own if t in x) for t in tasks]}
        for method, out in merges(self.base, list(experts.values()), methods):
            yield about | {"method": method, "scores": self.scores(out, tasks)}


def digits(folder: Path) -> Iterator[dict[str, Any]]:
    """Accuracies by seed, factor of the rate, and method."""
    for seed in SEEDS:
        start = Digits(folder, seed)
        tasks = [(task,) for task in list(start.data)[:TASKS]]
        for factor in FACTORS:
            experts: dict[tuple[str, ...], Path] = {
                task: start.expert(task, factor if k % 2 else 1) for k, task in enumerate(tasks)
            }
            yield from ({"set": f"{factor:g} x rate"} | row for row in start.rows(experts, METHODS))


def mixtures(folder: Path) -> Iterator[dict[str, Any]]:
    """Accuracies by seed, number of tasks that each expert has learned, and method; neighbors share all but one."""
    for seed in SEEDS[:1]:
        start = Digits(folder, seed)
        tasks = list(start.data)
        for count in MIXED:
            learned = [tuple((tasks + tasks)[k : k + count]) for k in range(len(tasks))]
            experts = {some: start.expert(some) for some in learned}
            about = {"set": f"each expert of {count} of 6 tasks"}
            yield from (about | row for row in start.rows(experts, (*METHODS, "task_arithmetic", "ct_merging")))


def suites(cache: Path) -> Iterator[dict[str, Any]]:
    """Accuracies by suite, seed, what every second expert has more of, and method."""
    rows, _ = candidates(ROWS, "full", TASKS)
    for suite, seed in itertools.product(SUITES, SEEDS[:1]):
        plain = experiment(suite, cache, seed)
        first = plain.tested(plain.base, plain.names, "test", "base")
        for (setting, times), larger in itertools.product(LARGER, (0, 1)):
            more = experiment(suite, cache, seed, setting, times)
            of = {name: more if k % 2 == larger else plain for k, name in enumerate(plain.names)}
            experts = {name: some.experts()[name] for name, some in of.items()}
            apart = ratio(plain.base.path, (made.path for made in experts.values()))
            about = {"set": f"{suite}, {times} x {setting}", "seed": seed, "ratio": apart, "smaller": 1 - larger}
            found = {"base": first, "experts": {name: some.own_answers("test")[name] for name, some in of.items()}}
            for row, merged in plain.merges(rows, tune=False, inputs=MergeInputs(experts, {})).items():
                found[row] = merged["test"][str(merged["default"])]
            for method, counts in found.items():
                scores = [100 * counts[name]["correct"] / counts[name]["total"] for name in plain.names]
                yield about | {"method": method, "scores": scores}


def experiment(suite: str, cache: Path, seed: int, more: str = "", times: int = 1) -> Experiment:
    """The experts of a suite, with a multiple of one setting."""
    module, tasks, settings = SUITES[suite]
    given = {
        name: f"{value * times if name == more else value:g}" for name, value in ({"rate": 1e-4} | settings).items()
    }
    request = RunRequest(suite, cache, tasks=tasks, seeds=(seed,), data=cache / "data", threads=1, settings=given)
    return next(iter(module.experiments(request, Watch(None, cache / "logs"))))  # type: ignore[no-any-return]


def by_set(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Means over the seeds: a row of all tasks and one of the smaller experts' for each set."""
    for name, part in itertools.product(dict.fromkeys(r["set"] for r in rows), ("all", "smaller")):
        here = [r for r in rows if r["set"] == name]
        row = {"set": name, "ratio": sum(r["ratio"] for r in here) / len(here), "tasks of": part}
        for method in dict.fromkeys(r["method"] for r in here):
            own = [r for r in here if r["method"] == method]
            some = [r["scores"] if part == "all" else r["scores"][r["smaller"] :: 2] for r in own]
            row[method] = round(sum(map(sum, some)) / sum(map(len, some)), 1)
        yield row


def reactions() -> list[str]:
    """A fifth of all pairs of rings and chains, with each template."""
    parts = json.loads(Path(__file__).with_name("reactions.json").read_text())
    pairs = list(enumerate(itertools.product(parts["rings"], parts["chains"])))
    return [
        template.format(a=f"c1{ring}", s=chain)
        for i, template in enumerate(parts["templates"].values())
        for j, (ring, chain) in pairs
        if (i + j) % 5 == 0
    ]


def neighbors(vectors_QI: Tensor) -> Tensor:
    """Of each reaction, the nearest other one by cosine."""
    unit_QI = torch.nn.functional.normalize(vectors_QI, dim=1)
    return (unit_QI @ unit_QI.T).fill_diagonal_(-2).argmax(1)


def public(given: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """What merges of the public family keep of both experts."""
    from transformers import BertConfig, BertModel

    names = ("bert_pretrained", "bert_ft", "bert_ft_10k_25s")
    words = {word: k for k, word in enumerate((given / names[0] / "vocab.txt").read_text().split())}
    read: Callable[[str], dict[str, Tensor]] = lambda name: torch.load(  # noqa: E731
        given / name / "pytorch_model.bin", map_location="cpu", weights_only=True
    )
    head = read(names[2])
    weight_CI, bias_C = head["classifier.weight"], head["classifier.bias"]
    for name in names:
        model = BertModel(BertConfig.from_pretrained(given / name))
        tensors = {
            n.removeprefix("bert."): t for n, t in read(name).items() if not n.startswith(("cls.", "classifier"))
        }
        model.load_state_dict(tensors, strict=False)
        model.save_pretrained(folder / name)
    asked = [[words["[CLS]"], *(words[t] for t in TOKEN.findall(r)), words["[SEP]"]] for r in reactions()]

    def answers(place: Path) -> tuple[Tensor, Tensor]:
        model = BertModel.from_pretrained(place).eval()
        with torch.no_grad():
            outputs = [model(torch.tensor([ids])) for ids in asked]
        classes = [int((weight_CI @ o.pooler_output[0] + bias_C).argmax()) for o in outputs]
        return torch.tensor(classes), neighbors(torch.stack([o.last_hidden_state[0, 0] for o in outputs]))

    base, one, other = (folder / name for name in names)
    (_, near_one), (classes, near_other) = answers(one), answers(other)
    places = {"base": base, "bert_ft": one, "bert_ft_10k_25s": other}
    for name, place in itertools.chain(places.items(), merges(base, [one, other])):
        found, near = answers(place)
        kept = {
            "class": found == classes,
            "neighbor, classifier": near == near_other,
            "neighbor, bert_ft": near == near_one,
        }
        yield {"merge": name, "ratio": ratio(base, (one, other))} | {
            k: float(v.double().mean()) for k, v in kept.items()
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("digits", "mixtures", "suites", "reactions"))
    parser.add_argument("folder", nargs="?", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if given.study == "reactions":
            rows = list(public(given.folder, Path(folder)))
            finish("reactions", rows, list(rows[0]), questions=len(reactions()))
            return
        studies = {"digits": digits, "mixtures": mixtures}
        raw = list(suites(given.folder) if given.study == "suites" else studies[given.study](Path(folder)))
        rows = [row for row in by_set(raw) if given.study != "mixtures" or row["tasks of"] == "all"]
        name = {"digits": "unequal", "suites": "unequal-suites"}.get(given.study, given.study)
        finish(name, rows, list(rows[0]), raw=raw)


if __name__ == "__main__":
    main()
