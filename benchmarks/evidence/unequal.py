"""Experts of unequal size: what becomes of those that changed the base less?

    python -m benchmarks.evidence.unequal digits            # the demo's first four tasks, two at higher rates
    python -m benchmarks.evidence.unequal reactions FOLDER  # of the package rxnfp: models/transformers

`digits`: accuracy in % on all tasks, and on those of the experts whose rate stays; mean over the seeds. `reactions`:
two public fine-tunes of one BERT for chemical reactions, one of them with a classifier. Without their data, on `Q`
reactions from ten textbook templates: the share whose class stays, and the share whose nearest neighbor among the
others, by the vector of the first token, stays.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import actmat
from actmat.extras.demo import training
from actmat.extras.demo.model import load_encoder, save_encoder
from actmat.extras.demo.run import correct
from benchmarks.common import finish, stored_tensors

METHODS = ("average", "actmat_ridge", "actmat", "tsv", "dc_merge", "aswudi", "iso_c", "ties")
FACTORS, SEEDS, TASKS = (1.0, 2.0, 3.0, 5.0), (0, 1, 2), 4

RINGS = ("ccccc1", "ccc(F)cc1", "ccc(OC)cc1", "ccc(C)cc1", "cccc(Cl)c1", "ccncc1", "ccc(C#N)cc1", "ccc2ccccc2c1",
         "ccc(C(F)(F)F)cc1", "ccsc1")  # fmt: skip
CHAINS = ("C", "CC", "CCC", "CC(C)", "C1CC1", "CCOC", "CC(C)C", "C1CCCC1", "COCC", "CCCC")
TEMPLATES = (
    "OC(=O){a}.{s}N>>{s}NC(=O){a}",
    "Br{a}.OB(O)c3ccc(O{s})cc3>>{s}Oc3ccc(cc3)-{a}",
    "OC(=O){a}.O{s}>>{s}OC(=O){a}",
    "{s}OC(=O){a}.[Na+].[OH-]>>OC(=O){a}",
    "O=[N+]([O-]){a}.{s}O.[H][H]>>N{a}",
    "O{a}.{s}Br.O=C([O-])[O-].[K+].[K+]>>{s}O{a}",
    "O=C{a}.{s}N.[BH3-]C#N.[Na+]>>{s}NC{a}",
    "ClS(=O)(=O){a}.{s}N>>{s}NS(=O)(=O){a}",
    "CC(C)(C)OC(=O)N({s}){a}.O=C(O)C(F)(F)F>>{s}N{a}",
    "O=C{a}.{s}[Mg]Br>>{s}C(O){a}",
)
"""Amide, Suzuki, ester, hydrolysis, reduction, ether, amination, sulfonamide, removal of Boc, Grignard."""
TOKEN = re.compile(r"\[[^\]]+]|Br|Cl|>>|%\d\d|[A-Za-z0-9().=#+\-/\\]")


def size(base: Mapping[str, Tensor], expert: Mapping[str, Tensor]) -> float:
    """`||D||` over the matrices that both have."""
    names = [n for n, t in base.items() if t.ndim == 2 and n in expert and n.split(".")[0] != "embeddings"]
    return float(sum((expert[n].double() - base[n].double()).square().sum() for n in names)) ** 0.5


def merges(base: Path, experts: list[Path]) -> Iterator[tuple[str, Path]]:
    """Names and places of the merges."""
    for method in METHODS:
        out = base.parent / "merged"
        actmat.merge(base, [str(e) for e in experts], method=method, out=out, overwrite=True)
        yield method, out


def digits(folder: Path) -> Iterator[dict[str, Any]]:
    """Accuracies by seed, factor of the rate, and method."""
    settings = training.DemoSettings()
    for seed in SEEDS:
        base = folder / f"base-{seed}"
        data = training.load_data(settings, seed)
        save_encoder(training.train_base(settings, seed), base)
        heads = training.fit_heads(load_encoder(base), data, settings)
        data = dict(list(data.items())[:TASKS])

        def scores(place: Path) -> list[float]:
            return [100 * float(m.double().mean()) for m in correct(heads, data, place).values()]  # noqa: B023

        for factor in FACTORS:
            experts = []
            for k, (task, split) in enumerate(data.items()):
                rate = settings.finetuning.learning_rate * (factor if k % 2 else 1)
                expert, order = load_encoder(base), training.generator_for(seed, f"order of {task}")
                schedule = replace(settings.finetuning, learning_rate=rate)
                training.finetune(expert, heads[task], split.train, schedule, order)
                experts.append(folder / f"{seed}-{factor}-{task}")
                save_encoder(expert, experts[-1])
            sizes = [size(stored_tensors(base), stored_tensors(e)) for e in experts]
            own = [scores(e)[k] for k, e in enumerate(experts)]
            about = {"seed": seed, "factor": factor, "ratio": max(sizes) / min(sizes)}
            yield about | {"method": "base", "scores": scores(base)}
            yield about | {"method": "experts", "scores": own}
            for method, out in merges(base, experts):
                yield about | {"method": method, "scores": scores(out)}


def by_factor(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Means over the seeds: a row of all tasks and one of the smaller experts' for each factor."""
    for factor, (tasks, part) in itertools.product(FACTORS, {"all": slice(None), "smaller": slice(0, None, 2)}.items()):
        here = [r for r in rows if r["factor"] == factor]
        row = {"rate": factor, "ratio": sum(r["ratio"] for r in here) / len(here), "tasks of": tasks}
        for method in dict.fromkeys(r["method"] for r in here):
            found = [s for r in here if r["method"] == method for s in r["scores"][part]]
            row[method] = round(sum(found) / len(found), 1)
        yield row


def reactions() -> list[str]:
    """A fifth of all pairs of rings and chains, with each template."""
    pairs = list(enumerate(itertools.product(RINGS, CHAINS)))
    return [
        template.format(a=f"c1{ring}", s=chain)
        for i, template in enumerate(TEMPLATES)
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
    sizes = [size(stored_tensors(base), stored_tensors(e)) for e in (one, other)]
    places = {"base": base, "bert_ft": one, "bert_ft_10k_25s": other}
    for name, place in itertools.chain(places.items(), merges(base, [one, other])):
        found, near = answers(place)
        kept = {
            "class": found == classes,
            "neighbor, classifier": near == near_other,
            "neighbor, bert_ft": near == near_one,
        }
        yield {"merge": name, "ratio": sizes[0] / sizes[1]} | {k: float(v.double().mean()) for k, v in kept.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("digits", "reactions"))
    parser.add_argument("folder", nargs="?", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if given.study == "digits":
            raw = list(digits(Path(folder)))
            rows = list(by_factor(raw))
            finish("unequal", rows, list(rows[0]), raw=raw)
        else:
            rows = list(public(given.folder, Path(folder)))
            finish("reactions", rows, list(rows[0]), questions=len(reactions()))


if __name__ == "__main__":
    main()
