"""Doors of what users write: recipes, options, patterns of names."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from actmat.api.reading import read_recipe
from actmat.checkpoints.writing.shards import parse_size
from actmat.errors import MergeError
from actmat.experts.lora.patterns import PatternTable
from actmat.layout.patterns import MatchError, compile_pattern
from actmat.methods import all_methods
from actmat.planning.choose import Chooser
from actmat.recipe import make_recipe, parse_option, recipe_yaml, variants
from fuzz.doors.folder import in_folder
from fuzz.draw import LETTERS, NUMBERS, mutated_bytes, mutated_json, scalar, text
from fuzz.harness import Files, door

RECIPE: dict[str, Any] = {
    "base": "org/base", "experts": ["org/math", {"path": "org/code", "name": "code", "weight": 0.5}], "method": "ties",
    "options": {"density": 0.2}, "scale": 0.9, "scope": "linear", "seed": 7, "keep": ["*lm_head*"], "dtype": "bfloat16",
    "rules": [{"match": "*.{q,k}_proj.*", "method": "average"}, {"match": ["re:.*norm.*"], "keep": "base"}],
    "roles": [{"match": "*.qkv.*", "role": "fused_linear", "blocks": {"q": [0, 4], "k": [4, 8]}}],
    "max_shard_size": "5GB", "mute": ["AM402"], "out": "merged", "ties": True, "rank": 4,
}  # fmt: skip
YAML = (
    b"!!int x", b"!!float x", b"!!bool maybe", b"!!timestamp 1", b"!!binary ===", b"!!python/object:os.system", b"!!set {a}",
    b"&a [*a, *a]", b"*a", b"<<: {a: b}", b"? [a]: b", b"|2\n  x", b">-\n\n", b"---\n", b"...\n", b"%YAML 9.9\n", b".inf", b".nan",
    b"-.INF", b"0o777", b"0x" + b"f" * 60, b"1" * 300, b"1:59:59", b"2024-13-45", b"'", b'"\\x1b"', b"\t", b"{" * 60, b"- " * 80,
    b"\n: ", b"#", b"~", b"@", b"`", b"!<tag:x> y", b"\xef\xbb\xbf", b"\xff\xfe",
)  # fmt: skip


@cache
def _known() -> tuple[str, ...]:
    return tuple(yaml.safe_dump({k: v}) for k, v in RECIPE.items())


def _recipe(rng: random.Random) -> Files:
    kind = rng.random()
    if kind < 0.5:  # JSON is YAML, and quicker to write
        given = {k: v for k, v in RECIPE.items() if k in ("base", "experts") or rng.random() < 0.25}
        content = json.dumps(mutated_json(rng, given), indent=rng.choice((None, 1))).encode()
    else:
        parts = [_known()[0], _known()[1], *rng.sample(_known()[2:], 2)]
        content = "".join(parts).encode()
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(content) + 1)
            if rng.random() < 0.8:  # in the place of a value
                at = content.rfind(b": ", 0, at) + 2 if b": " in content[:at] else at
            content = content[:at] + rng.choice(YAML) + content[at:]
    return {"recipe.yaml": mutated_bytes(rng, content) if rng.random() < 0.2 else content}


def _read_recipe(folder: Path) -> str:
    recipe = read_recipe(folder / "recipe.yaml")
    chooser = Chooser(recipe)
    printed = recipe_yaml(recipe)
    again = make_recipe(yaml.safe_load(printed))
    assert again.labels == recipe.labels
    return printed + str(MergeError("The recipe is not valid.", chooser.problems or ["none"]))


@cache
def _options() -> tuple[tuple[str, str], ...]:
    return tuple((m.name, o) for m in all_methods() for o in m.options)


def _option(rng: random.Random) -> Files:
    method, name = rng.choice(_options())
    values = []
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.random()
        if kind < 0.3:
            values.append(rng.choice(YAML).decode("utf-8", "surrogateescape"))
        elif kind < 0.6:
            number = rng.choice((*NUMBERS, rng.uniform(0, 1), rng.randrange(9)))
            values.append(hex(number) if isinstance(number, int) and number > 2**70 else str(number))
        else:
            values.append(json.dumps(scalar(rng), default=str) if rng.random() < 0.5 else text(rng))
    option = f"{name if rng.random() < 0.9 else text(rng)}{'=' if rng.random() < 0.95 else ''}{','.join(values)}"
    fields = {"option": option, "method": method if rng.random() < 0.95 else text(rng), "size": rng.choice(values)}
    return {k: v.encode("utf-8", "surrogatepass") for k, v in fields.items()}


def _read_option(files: Files) -> str:
    option, method, size = (files[k].decode("utf-8", "surrogatepass") for k in ("option", "method", "size"))
    said = []
    try:
        parse_size(size)
    except MergeError as error:
        said.append(str(error))
    fields = {"base": "b", "experts": ["e", "f"], "method": method}
    name, values = parse_option(option)
    for recipe in variants(make_recipe(fields), options={name: values}):
        checked = make_recipe(recipe.model_dump(exclude_defaults=True))
        said.append(str(MergeError("The recipe is not valid.", Chooser(checked).problems or ["none"])))
    return "\n".join(said)


PIECES = (
    "*", "?", "**", "[a-z]", "[!a]", "[", "]", "{q,k}", "{", "}", ",", "re:", "(.*)*", "(a+)+", "X", ".", r"\.", "\\", "(", ")", "|", "^",
    "$", "{2,1000}", "{1000}", "{,5}", "(?=a)", r"\1", "[[:alpha:]]", r"\p{L}", r"\Z", "(?P<a>", "(?i)", "(?:", "+", "q_proj", "layers",
    "0", r"\d+", r"\w", "[^", "\ud800", "\x1b", "\u00e9", "a" * 100, "((((", "))))", r"\C", r"\Q", "x*" * 30, "*a" * 30, "(x+x+)+y",
)  # fmt: skip
TARGETS = ("model.layers.10.self_attn.q_proj.weight", "a" * 300, "x" * 60 + "!", "", "\ud800\x1b", "q_proj", "é" * 40)


def _pattern(rng: random.Random) -> Files:
    def one() -> str:
        pieces = rng.choices(PIECES, k=rng.choice((1, 2, 3, 5, 8, 40)))
        return "".join(pieces) if rng.random() < 0.8 else "".join(rng.choices(LETTERS, k=12))

    patterns = [("re:" if rng.random() < 0.4 else "") + one(), *(one() for _ in range(rng.choice((0, 1, 3))))]
    return {"patterns": json.dumps(patterns).encode()}


def _read_pattern(files: Files) -> str:
    first, *others = json.loads(files["patterns"])
    said = ""
    try:
        matches = compile_pattern(first)
        for name in TARGETS:
            matches(name)
    except MergeError as error:
        said = str(error)
    try:
        table = PatternTable(dict.fromkeys((first, *others), 1))
        for name in TARGETS:
            table.of_module(name, 0)
    except MatchError as error:
        said += "\n" + str(MergeError("adapter_config.json", [f"rank_pattern {error}"]))
    return said


door("recipes", _recipe, in_folder(_read_recipe))
door("options", _option, _read_option)
door("patterns", _pattern, _read_pattern)
