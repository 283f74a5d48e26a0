"""Every file of the suites' data: name, public source, commit, size, SHA-256, license and recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data.images import Arrays, Folder, usps
from benchmarks.data.originals import Original
from benchmarks.data.text import Recipe, copied, instances, labeled, qasc, wikiqa, winogrande

FACTS = Path(__file__).with_name("files.json")
TESTED, TRAINED = slice(0, 1000), slice(1000, 4000)
"""Rows of the permuted files that have no split of their own."""

_TREC = ("data/TREC.train.all", "data/TREC.test.all")
_SUPER_GLUE = [
    (task, part) for task in ("wsc", "rte") for part in ("train", "val", "test") if (task, part) != ("rte", "test")
]
TEXTS: dict[str, Recipe] = {
    **{f"text/trec.{part}.jsonl": labeled(path) for part, path in zip(("train", "test"), _TREC, strict=True)},
    **{
        f"text/{name}.{part}.jsonl": labeled(f"data/{file}.all", rows)
        for name, file in (("subj", "subj"), ("custrev", "custrev"), ("mpqa", "mpqa"), ("mr", "rt-polarity"))
        for part, rows in (("train", TRAINED), ("test", TESTED))
    },
    **{f"text/{t}.{part}.jsonl": copied(f"data/{t.upper()}/{part}.jsonl") for t, part in _SUPER_GLUE},
    **{
        f"text/{name}.{part}.jsonl": instances(f"CL_Benchmark/{folder}/{part}.json")
        for name, folder in (("copa", "COPA/COPA"), ("sst2", "SC/SST-2"))
        for part in ("train", "test")
    },
    "text/agnews.train.jsonl": instances("CL_Benchmark/TC/agnews/train.json", slice(2000)),
    "text/agnews.test.jsonl": instances("CL_Benchmark/TC/agnews/test.json", slice(1000)),
    "text/qasc.dev.jsonl": qasc("qasc/data/dev.jsonl"),
    "text/winogrande.dev.jsonl": winogrande("dataset/winogrande/test.json"),
    **{f"text/wikiqa.{part}.jsonl": wikiqa(f"WikiQA/{part}") for part in ("train", "dev", "test")},
    "reasoning/HumanEval.jsonl.gz": copied("data/HumanEval.jsonl.gz"),
    "reasoning/IFEval_input_data.jsonl": copied("instruction_following_eval/data/input_data.jsonl"),
}


_SIGNS: dict[str, str] = {str(k): name for k, name in enumerate(json.loads(FACTS.read_text(encoding="utf-8"))["signs"])}
"""Folder of GTSRB -> name of its sign."""
IMAGES: dict[str, Callable[[Original], Arrays]] = {
    "images/mnist.npz": Folder("mnist", "t", ".png", 1, (10000, 2000), part=0, gray=True),
    "images/usps.npz": usps("data/usps.h5"),
    "images/cifar10.npz": Folder("cifar10", "t", ".jpg", 1, (4000, 1000), part=0),
    "images/cifar100.npz": Folder("cifar100", "t", ".png", 1, (4000, 1000), part=0),
    "images/eurosat.npz": Folder("eurosat", "data/EuroSAT_RGB/", ".jpg", 2, (4000, 1000), n_test=5400),
    "images/gtsrb.npz": Folder("gtsrb", "gtsrb/", ".ppm", 1, (4000, 998), classes=_SIGNS),
    "images/dtd10.npz": Folder("dtd10", "images/", ".jpg", 1, (900, 300), center=True),
    "images/sign_digits.npz": Folder("sign_digits", "Dataset/", ".jpg", 1, (1662, 400), n_test=400),
}


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of the data.

    Args:
        bytes, sha256: of the file; of images `sha256` is that of the arrays, see `content_hash`.
        license: of the original, as far as it states one.
    """

    name: str
    repo: str
    commit: str
    bytes: int
    sha256: str
    license: str


def files() -> dict[str, DataFile]:
    """All files by name."""
    rows = json.loads(FACTS.read_text(encoding="utf-8"))["files"]
    return {row["name"]: DataFile(**row) for row in rows}
