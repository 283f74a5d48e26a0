"""Neighbours: tiny models of many classes, one thing changed at a time; the plan says it or it is harmless.

    python -m benchmarks.families.neighbours --every 5               # every fifth class; their rows are written anew
    python -m benchmarks.families.neighbours --only Llama T5 --write  # these classes; without --write printed only

A change is of an entry of a config or of settings, of tokens, of a file, of the names of tensors; in the expert or in
the base. Its verdict is `said` (a note that the plan of the unchanged models does not have), `refused`, `harmless`
(the class, its tokenizer and its settings give the same as before), `unusable` (its own library does not load it) or
`silent`, which is a fault.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import actmat
from actmat.checkpoints.resolve import open_model
from actmat.extras.averaging.recipe import average_recipe
from actmat.identity import reader, reading
from actmat.identity.agreement import export_remarks
from actmat.run.recipes import plan_recipe
from benchmarks.common import read_result, write_result
from benchmarks.families.check import _outputs, _perturbed
from benchmarks.families.inputs import batch_of
from benchmarks.families.tiny import VOCABULARY, Architecture, architectures, build

SETTINGS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
ORIGINAL = {"base": "base", "expert": "one"}
PREFIXES = ("model.", "module.", "_orig_mod.", "base_model.model.", "student.")
TEXT = "w5 w6 w7 <s> w8"


@dataclass(frozen=True)
class Neighbour:
    """One change of a folder: its kind, what it changes, and how."""

    kind: str
    what: str
    apply: Callable[[Path], None]


def neighbours(folder: Path) -> Iterator[Neighbour]:
    """All changes of a folder."""
    for name in ("config.json", *SETTINGS):
        if not (folder / name).exists():
            continue
        content = json.loads((folder / name).read_text())
        for at, value in _leaves(content):
            for words, other in _others(value):
                yield Neighbour(name, f"{'.'.join(at)}: {words}", _with_entry(name, at, other))
        yield Neighbour(name, "unknown_entry: added", _with_entry(name, ("unknown_entry",), 0.5))
        yield Neighbour("a file fewer", name, lambda f, name=name: (f / name).unlink())
    if (folder / "tokenizer.json").exists():
        yield Neighbour("a file fewer", "tokenizer.json", lambda f: (f / "tokenizer.json").unlink())
        yield Neighbour("tokens", "two exchanged", _with_tokens(lambda v: v.update(w5=v["w6"], w6=v["w5"])))
        yield Neighbour("tokens", "one renamed", _with_tokens(lambda v: v.update(other=v.pop("w7"))))
        yield Neighbour("tokens", "one added", _with_tokens(lambda v: v.update(more=VOCABULARY - 1)))
    for name in ("model_head.pkl", "projector.pt", "1_Dense/model.safetensors", "adapter_model.safetensors"):
        yield Neighbour("a file more", name, _with_file(name))
    for name in ("1_Pooling/config.json", "settings.json", "modeling_other.py", "chat_template.jinja"):
        yield Neighbour("a file more", name, _with_file(name, b'{"a": 1}'))
    for prefix in PREFIXES:
        yield Neighbour("names", f"prefix {prefix}", _with_names(lambda t, p=prefix: {p + n: v for n, v in t.items()}))
    yield Neighbour("names", "one dropped", _with_names(lambda t: dict([*t.items()][1:])))
    yield Neighbour(
        "names",
        "one renamed",
        _with_names(lambda t: {f"{n}x" * (k == 0) or n: v for k, (n, v) in enumerate(t.items())}),
    )
    yield Neighbour("names", "one added", _with_names(lambda t: {**t, "other_head.weight": torch.ones(3, 3)}))


def _leaves(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*at, key))
    elif at:
        yield at, value


def _others(value: Any) -> Iterator[tuple[str, Any]]:
    """Other values for an entry."""
    if isinstance(value, bool):
        yield "turned", not value
    elif isinstance(value, int):
        yield "one more", value + 1
    elif isinstance(value, float):
        yield "half more", value * 1.5 + 0.1
    elif isinstance(value, str):
        yield "other", "other"
    elif isinstance(value, list) and value:
        yield "shorter", value[:-1]
    elif value is None:
        yield "one", 1
    yield "removed", KeyError


def _with_entry(name: str, at: tuple[str, ...], value: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        inner = content
        for key in at[:-1]:
            inner = inner[key]
        if value is KeyError:
            del inner[at[-1]]
        else:
            inner[at[-1]] = value
        _write(folder / name, json.dumps(content).encode())

    return apply


def _with_tokens(change: Callable[[dict[str, int]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content["model"]["vocab"])
        _write(folder / "tokenizer.json", json.dumps(content).encode())

    return apply


def _with_file(name: str, content: bytes = b"") -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        if name.endswith(".safetensors"):
            save_file({"linear.weight": torch.ones(4, 4)}, folder / name)
        else:
            _write(folder / name, content or b"any")

    return apply


def _with_names(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (file,) = folder.glob("*.safetensors")
        tensors = change(load_file(file))
        file.unlink()
        save_file(tensors, file, metadata={"format": "pt"})

    return apply


def _write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # a link to the unchanged file
    path.write_bytes(content)


def _read_here(texts: Any) -> tuple[list[dict[str, Any]], str]:
    """The answers of `reader` in this process, which has loaded the libraries."""
    return [json.loads(json.dumps(reader.answer(json.loads(text)), default=str)) for text in texts], ""


class Family:
    """A base and two experts of a class, and what its own library gives of a folder."""

    def __init__(self, architecture: Architecture, folder: Path) -> None:
        self.folder, model = folder, build(architecture)
        self.kind = type(model)
        model.save_pretrained(folder / "base")
        self.batch, why = batch_of(model)
        if self.batch is None:
            raise ValueError(f"not run: {why}")
        for seed, name in enumerate(("one", "two"), 1):
            _perturbed(copy.deepcopy(model), seed).save_pretrained(folder / name)
        self.has_text = "input_ids" in self.batch
        has_table = any(p.shape[:1] == (VOCABULARY,) for p in model.parameters())
        is_text = "pixel_values" not in self.batch  # of others no file is exported
        self.exported = ("config.json", "tokens")[: is_text + (is_text and has_table)]
        """Kinds of changes that an export compares before it reads tensors: the rest is no part of its file."""
        for name in ("base", "one", "two"):
            if self.has_text:
                _save_tokenizer(folder / name)
        self.plain: dict[str, tuple[set[str], Any]] = {}
        for command in COMMANDS:
            try:
                self.plain[command] = self.plan(command, folder / "base", folder / "one")
            except actmat.MergeError:
                if command != "stack":  # of models with one row of layers
                    raise
        self.answers(folder / "one")  # raises where the class cannot be asked

    def plan(self, command: str, base: Path, expert: Path) -> tuple[set[str], Any]:
        """Notes of a command's plan, and all that it would do."""
        plan = COMMANDS[command](base, expert, self.folder / "two")
        if isinstance(plan, list):
            return {*plan}, None
        items = [(i.name, i.action, [s is not None and s.kind for s in i.sources]) for i in plan.items]
        where = (str(base), str(expert))
        texts = {note.text.replace(where[0], "BASE").replace(where[1], "EXPERT") for note in plan.notes}
        return texts, (items, [(s.name, s.shape, s.dtype) for s in plan.specs])

    def answers(self, folder: Path) -> Any:
        """What the library of the class makes of a folder: outputs, ids, texts, settings."""
        from transformers import GenerationConfig, PreTrainedTokenizerFast

        model = self.kind.from_pretrained(folder).eval()
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # what is kept for the next token, and in FSMT which logits are returned
        given: list[Any] = [t.double().tolist() for t in _outputs(model, self.batch)]
        if self.has_text:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            chat = [{"role": "user", "content": "w5"}]
            given += [tokenizer(TEXT)["input_ids"], tokenizer.decode(range(VOCABULARY)), tokenizer.special_tokens_map]
            given += [tokenizer.padding_side, tokenizer.truncation_side]
            given.append(tokenizer.apply_chat_template(chat, tokenize=False) if tokenizer.chat_template else None)
        if (folder / "generation_config.json").exists():
            settings = GenerationConfig.from_pretrained(folder).to_dict()
            given.append({k: v for k, v in settings.items() if v and k != "transformers_version" and k[0] != "_"})
        return json.dumps(given, sort_keys=True, default=str)

    def stack(self, base: Path, expert: Path) -> Path:
        """The stack of two layers."""
        out = self.folder / "stack" / f"{base.name}-{expert.name}"
        actmat.merge(f"{base}[0:1] + {expert}[0:1]", [], out=out, overwrite=True, durable=False)
        return out

    def _verdict_of_stacks(self, side: str, changed: Path) -> str:
        plain = self.stack(self.folder / "base", self.folder / "one")
        try:
            if self.answers(plain) == self.answers(changed):
                return "harmless"
        except Exception:  # noqa: BLE001 - whatever the class says of the change
            return "unusable"
        texts = {(folder / "config.json").read_text() for folder in (plain, changed)}
        return "said" if side == "expert" and len(texts) > 1 else "silent"

    def verdict(self, command: str, side: str, neighbour: Neighbour, changed: Path) -> str:
        """What becomes of a change."""
        base = changed if side == "base" else self.folder / "base"
        expert = changed if side == "expert" else self.folder / "one"
        before, done = self.plain[command]
        try:
            texts, doing = self.plan(command, base, expert)
        except actmat.MergeError:
            return "refused"
        except Exception as error:  # noqa: BLE001 - a fault as well
            return f"silent ({type(error).__name__})"
        if texts - before:
            return "said"
        if neighbour.kind == "names" and doing == done:
            return "harmless"
        if command == "stack":  # the output may have the change, or have what the change removes
            try:
                return self._verdict_of_stacks(side, self.stack(base, expert))
            except actmat.MergeError:  # values are judged where they are read
                return "refused"
        try:
            return "harmless" if self.answers(changed) == self.answers(self.folder / ORIGINAL[side]) else "silent"
        except Exception:  # noqa: BLE001 - whatever the class says of the change
            return "unusable"


COMMANDS: dict[str, Callable[[Path, Path, Path], Any]] = {
    "merge": lambda base, one, two: actmat.plan(base, [one, two], method="average"),
    "extract": lambda base, one, two: actmat.plan(base, [one], method="average", output="extracted", rank=2),
    "average": lambda base, one, two: plan_recipe(average_recipe([str(one), str(two)])),
    "stack": lambda base, one, two: actmat.plan(f"{base}[0:1] + {one}[0:1]", []),
    "export": lambda base, one, two: export_remarks([("base", open_model(base)), ("model", open_model(one))]),
}


def _save_tokenizer(folder: Path) -> None:
    words = {w: k for k, w in enumerate(["<pad>", "<s>", "</s>", *(f"w{k}" for k in range(3, VOCABULARY - 1))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "padding_side": "right",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps(special))


def check(architecture: Architecture, changes: int, seconds: float = float("inf")) -> dict[str, Any]:
    """Verdicts on changes of a class, drawn at random where there are more than `changes`."""
    warnings.simplefilter("ignore")
    reading._ask = _read_here
    began, row = time.monotonic(), {"library": architecture.library, "class": architecture.name}
    counts: Counter[str] = Counter()
    silent: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        try:
            family = Family(architecture, Path(temporary))
        except Exception as error:  # noqa: BLE001 - a class that cannot be built tiny, or not run
            return row | {"why": f"{type(error).__name__}: {error}"[:200]}
        drawn = [*neighbours(family.folder / "one")]
        random.Random(0).shuffle(drawn)
        for number, neighbour in enumerate(drawn[:changes]):
            if time.monotonic() - began > seconds:
                break
            side = "base" if number % 3 == 2 else "expert"
            changed = family.folder / "changed"
            shutil.copytree(family.folder / ORIGINAL[side], changed, copy_function=os.link)
            neighbour.apply(changed)
            for command in family.plain:
                if (side == "base" and command == "average") or (
                    command == "export" and neighbour.kind not in family.exported
                ):
                    continue
                verdict = family.verdict(command, side, neighbour, changed)
                counts[verdict.split()[0]] += 1
                if verdict.startswith("silent"):
                    silent.append(f"{command}, {side}: {neighbour.kind}, {neighbour.what}{verdict[6:]}")
            shutil.rmtree(changed)
    return row | {"verdicts": dict(sorted(counts.items())), "silent": sorted(silent)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="classes whose names begin so")
    parser.add_argument("--every", type=int, default=1, help="only the classes that are so far apart")
    parser.add_argument("--first", type=int, default=0, help="begin with this class")
    parser.add_argument("--write", action="store_true", help="write the rows of --only")
    parser.add_argument("--changes", type=int, default=1_000_000, help="most changes of a class")
    parser.add_argument("--seconds", type=float, default=120.0, help="most time of a class")
    given = parser.parse_args()
    rows = {row["class"]: row for row in read_result("neighbours")["rows"]}
    chosen = [a for a in architectures() if given.only is None or a.name.startswith(tuple(given.only))]
    for architecture in chosen[given.first :: given.every]:
        rows[architecture.name] = check(architecture, given.changes, given.seconds)
        print(json.dumps(rows[architecture.name]), flush=True)
        if given.only is None or given.write:
            write_result("neighbours", [*rows.values()])


if __name__ == "__main__":
    main()
