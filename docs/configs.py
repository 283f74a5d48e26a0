"""Write the table of config keys, from the config classes of the installed transformers and diffusers.

    python -m docs.configs             # writes src/actmat/identity/configs.json anew
    python -m docs.configs --check     # exit status 1 when the file is not what the classes say

A class of transformers gives its fields with their defaults, other names of fields, nested configs, older keys that it
reads, and how a list with one entry per layer follows from other keys where the list is absent. A class of diffusers
gives the parameters of its `__init__`. Keys that change no output (`actmat.identity.tables.IGNORED`) are left out.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import inspect
import itertools
import json
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from actmat.identity.tables import DEPTH_KEYS, PATH, expand, is_ignored

OF_RULES = re.compile(r"pattern|interval|period|every|step$|offset|dense_replace|num_dense|window_layers|group_size")
"""Names of keys with numbers from which lists of layers follow."""
LISTS = re.compile(
    r"layer_types|layers_block_type|no_rope_layers|indexer_types|moe_layers$|^attention_layers|_per_layer$"
)
"""Names of keys with an entry per layer, or with numbers of layers, that may follow from other keys."""
DEPTHS = (11, 24)
FUNCTIONS = {("tapas", "temperature"), ("phimoe", "router_jitter_noise")}
"""Keys of generation and of training in other classes, which change what these classes compute."""


def folder(library: str) -> Path:
    """Folder of an installed library."""
    spec = importlib.util.find_spec(library)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def digest(library: str) -> str:
    """Hash of the files of a library that the table is made from."""
    names = {"transformers": "models/*/configuration_*.py", "diffusers": "models/**/*.py"}[library]
    found = hashlib.sha256()
    for path in sorted(folder(library).glob(names)):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def plain(value: Any) -> Any:
    """The value as JSON holds it; None for anything that JSON cannot hold."""
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return None


def entry(cls: Any) -> dict[str, Any]:
    """Keys of a config class of transformers."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    keys = {}
    for name, field in fields.items():
        is_other = is_ignored(name) and (cls.model_type, name) not in FUNCTIONS
        if is_other or name in cls.sub_configs_defaults or name in cls.attribute_map:
            continue
        made = field.default_factory
        keys[name] = plain(made() if made is not dataclasses.MISSING else field.default)
        if field.default is dataclasses.MISSING and made is dataclasses.MISSING:
            keys[name] = None
    older = {k: v for k, v in _older(cls).items() if k not in keys and k not in fields and not is_ignored(k)}
    found: dict[str, Any] = {"keys": keys, "older": older}
    found["names"] = {k: v for k, v in cls.attribute_map.items() if not is_ignored(k)}
    found["nested"] = {k: spec.model_type or "" for k, spec in cls.sub_configs_defaults.items()}
    theta = cls.default_theta
    found["theta"] = theta if isinstance(theta, int | float) else None
    made_of = _instance(cls, {})
    if made_of is not None:
        values = json.loads(made_of.to_json_string(use_diff=False))
        declared = {**keys, **older}
        found["derived"] = sorted(k for k, v in declared.items() if v is None and values.get(k) is not None)
        found["replaced"] = sorted(k for k, v in declared.items() if v is not None and values.get(k, v) != v)
        rope = values.get("rope_parameters") if keys.get("rope_parameters", 0) is None else None
        found["rope"] = rope if rope and rope != {"rope_theta": theta, "rope_type": "default"} else None
        found["rules"] = dict(_rules(cls, {**keys, **older}))
    return {k: v for k, v in found.items() if v not in (None, {}, [], "") or k == "keys"}


def _older(cls: Any) -> dict[str, Any]:
    """Keys that `__post_init__` takes from others' configs -> their defaults."""
    found: dict[str, Any] = {}
    for owner in cls.__mro__:
        if "__post_init__" not in vars(owner) or owner.__name__ == "PreTrainedConfig":
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner.__post_init__)))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            of = node.func.value
            if isinstance(of, ast.Name) and of.id == "kwargs" and isinstance(node.args[0], ast.Constant):
                default = node.args[1] if len(node.args) > 1 else ast.Constant(None)
                found.setdefault(str(node.args[0].value), default.value if isinstance(default, ast.Constant) else None)
    return found


def _instance(cls: Any, given: Mapping[str, Any]) -> Any:
    try:
        return cls(**given)
    except Exception:  # noqa: BLE001
        return None


def _rules(cls: Any, keys: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """List of layers -> the rule by which it follows from other keys; empty if no known rule gives it."""
    depth = next((k for k in DEPTH_KEYS if k in keys), None)
    if depth is None:
        return
    whole = {n: _instance(cls, {depth: n}) for n in DEPTHS}
    shown = {n: {} if m is None else json.loads(m.to_json_string(use_diff=False)) for n, m in whole.items()}
    long = [k for k in keys if all(isinstance(v.get(k), list) and len(v[k]) == n for n, v in shown.items())]
    lists = [k for k, v in keys.items() if v is None and LISTS.search(k)]
    yield from ((k, {}) for k in long if k not in lists)
    if any(k.endswith(("_idxs", "_indices")) for k in keys):
        yield from ((k, {}) for k in lists)
        return
    numbers = [k for k in keys if OF_RULES.search(k) and isinstance(keys[k], int) and not isinstance(keys[k], bool)]
    settings: list[dict[str, Any]] = [{}, *({k: n} for k in numbers for n in (2, 3, 5, 13))]
    if "use_sliding_window" in keys:
        settings += [
            {**s, "use_sliding_window": on, "sliding_window": 8} for s in list(settings) for on in (True, False)
        ]
    cases = []
    for n, setting in itertools.product(DEPTHS, settings):
        given = {depth: n, **setting}
        if (made := _instance(cls, given)) is not None:
            cases.append(({**keys, **given}, made))
    for name in lists:
        wanted = [(given, getattr(made, name, None)) for given, made in cases]
        others = [o for o in lists if o != name]
        known = [
            (g | {o: getattr(m, o, None) for o in others}, v) for (g, m), (_, v) in zip(cases, wanted, strict=True)
        ]
        if not known or all(v is None for _, v in known):
            continue
        yield name, next((r for r in _candidates(name, known, numbers, others) if _fits(r, known, depth)), {})


def _fits(rule: Mapping[str, Any], cases: list[tuple[dict[str, Any], Any]], depth: str) -> bool:
    return all(expand(rule, given, given[depth]) == plain(value) for given, value in cases)


def _candidates(name: str, cases: Any, numbers: list[str], others: list[str]) -> Iterator[dict[str, Any]]:
    values = list(dict.fromkeys(x for _, v in cases for x in (v or ()) if isinstance(x, str | int)))
    if name.endswith("moe_layers"):
        yield from ({"kind": "indices", "period": p} for p in [*numbers, *range(1, 5)])
        return
    gates: list[dict[str, Any]] = [{}, *({"if": "use_sliding_window", "else": v} for v in values)]
    if "no_rope_layers" in others and name == "layer_types":
        pairs = {
            (a, b) for g, v in cases if g["no_rope_layers"] and v for a, b in zip(g["no_rope_layers"], v, strict=False)
        }
        for gate in gates:
            mapped = {str(a): b for a, b in pairs if not gate or b != gate["else"]}
            mapped |= {str(a): gate["else"] for a, _ in pairs if gate and str(a) not in mapped}
            yield {"kind": "of", "list": "no_rope_layers", "values": dict(sorted(mapped.items())), **gate}
    if len(values) == 1:
        yield {"kind": "every", "period": 1, "on": values[0], "off": values[0]}
    for (on, off), gate in itertools.product(itertools.permutations(values, 2), gates):
        for period in [*numbers, *range(2, 9)]:
            yield {"kind": "every", "period": period, "on": on, "off": off, **gate}
            yield {"kind": "every", "period": period, "on": on, "off": off, "first": True, **gate}
        for start in [*numbers, *range(1, 4)]:
            yield {"kind": "from", "start": start, "on": on, "off": off, **gate}
        for period, below in itertools.product([*numbers, *range(2, 9)], numbers):
            if period != below:
                yield {"kind": "every", "period": period, "on": on, "off": off, "below": below, **gate}


def of_transformers() -> dict[str, Any]:
    """model_type -> keys."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    return {name: entry(CONFIG_MAPPING[name]) for name in sorted(CONFIG_MAPPING_NAMES)}


def of_diffusers() -> dict[str, Any]:
    """Class name -> keys with defaults."""
    found = {}
    for path in sorted((folder("diffusers") / "models").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            for made in node.body:
                marks = {ast.unparse(d) for d in made.decorator_list} if isinstance(made, ast.FunctionDef) else set()
                if isinstance(made, ast.FunctionDef) and made.name == "__init__" and "register_to_config" in marks:
                    found[node.name] = {"keys": dict(sorted(_parameters(made.args)))}
    return dict(sorted(found.items()))


def _parameters(given: ast.arguments) -> Iterator[tuple[str, Any]]:
    defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    pairs = [*zip(given.args, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    for argument, default in pairs:
        if argument.arg == "self" or is_ignored(argument.arg):
            continue
        try:
            yield argument.arg, None if default is None else plain(ast.literal_eval(default))
        except ValueError:
            yield argument.arg, None


def text() -> str:
    """Content of the file: one class a line."""
    warnings.simplefilter("ignore")
    tables = {"transformers": of_transformers(), "diffusers": of_diffusers()}
    lines = []
    for library, classes in tables.items():
        rows = ",\n".join(f"{json.dumps(n)}:{json.dumps(e, separators=(',', ':'))}" for n, e in classes.items())
        made = json.dumps({"version": version(library), "digest": digest(library)})
        lines.append(f'"{library}":{{"made":{made},"classes":{{\n{rows}\n}}}}')
    return "{" + ",\n".join(lines) + "}\n"


def main(arguments: list[str]) -> int:
    """Write or check the file."""
    made = text()
    if "--check" in arguments:
        return int(made != PATH.read_text(encoding="utf-8"))
    PATH.write_text(made, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
