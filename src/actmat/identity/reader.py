"""Program that prints configs as the classes of transformers and diffusers read them; `reading` runs it.

A config is a foreign file, and a class may do anything of its library with it: make lists of any length, or ask the
hub for another config. Hence a process of its own, offline, of bounded memory, which its caller stops after a while.
Code of a repository is never run: classes are looked up by name in the installed libraries.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30
"""Memory of this process; reading a config of each class of transformers takes 120 MB, 430 MB with torch."""
MOST_SECONDS = 60
"""Time of a core for all configs; one of each of 800 classes of transformers takes 10 s."""
FLOAT32 = "_keep_in_fp32_modules"
"""Attribute of classes of transformers and diffusers."""
MOST_TEXT = 10_000_000
"""Characters of an answer; that on a config of 20,000 layers has 500,000."""


def main() -> None:
    """Answer a JSON list of configs on the standard input with one JSON object a line on the standard output."""
    out, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    os.environ["HF_HUB_OFFLINE"] = "1"
    with contextlib.suppress(ImportError, OSError, ValueError):  # not all systems have these limits
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    configs = json.load(sys.stdin)
    modules: Any = sys.modules
    if find_spec("timm") is None:  # which a few configs ask, and which needs torch
        modules["torch"] = None  # no other config does, and its import takes seconds
    for config in configs:
        text = json.dumps(answer(config), default=str)
        too_long = json.dumps({"obstacle": f"its class makes more than {MOST_TEXT} characters of it"})
        print(text if len(text) <= MOST_TEXT else too_long, file=out, flush=True)


def answer(config: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, places of `undeclared` entries, names in `float32`, `release`; or the `obstacle`.

    Empty for an unknown class.
    """
    library = "diffusers" if "_class_name" in config else "transformers" if config.get("model_type") else ""
    if not library:
        return {}
    if find_spec(library) is None:
        return {"obstacle": f"{library} is not installed (pip install {library})"}
    try:
        read = of_diffusers(config) if library == "diffusers" else of_transformers(config)
    except Exception as error:  # noqa: BLE001 - a class may raise anything
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return {"obstacle": f"{library} {version(library)} cannot read it ({words[:300]})"}
    return read and {**read, "release": f"{library} {version(library)}"}


def of_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as `AutoConfig` reads it, without code of its own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig, model_type_to_module_name

    if config["model_type"] not in CONFIG_MAPPING:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8", newline="\n")
        made = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    values, spec = json.loads(made.to_json_string(use_diff=False)), find_spec("transformers")
    modules = {model_type_to_module_name(t).replace(".", "/") for t in _model_types(values)}
    places = [Path(spec.origin).parent / "models" / m for m in sorted(modules)] if spec and spec.origin else []
    classes = [c for place in places for path in place.glob("modeling_*.py") for c in _classes(path.read_text("utf-8"))]
    float32 = [[n.replace("*", ".*"), s] for c in classes for s in (False, True) for n in _float32(c, s)]
    return {"values": values, "undeclared": list(_undeclared(made, ())), "float32": float32}


def _model_types(values: Any) -> Iterator[str]:
    """Model types of a config and of those in it."""
    if isinstance(values, dict):
        yield from (values["model_type"],) if isinstance(values.get("model_type"), str) else ()
        for value in values.values():
            yield from _model_types(value)


def _classes(text: str) -> list[list[Any]]:
    """Bodies of the classes of a module that keep parameters in float32; the others need no parsing."""
    return [n.body for n in ast.parse(text).body if isinstance(n, ast.ClassDef)] if FLOAT32 in text else []


def _float32(body: Sequence[Any], is_strict: bool) -> list[str]:
    """Parts of names that a class keeps in float32 when it is loaded in a coarser dtype.

    Args:
        body: of the class.
        is_strict: those of the attribute that holds for bfloat16 as well.
    """
    name = FLOAT32 + "_strict" * is_strict
    values = [n.value for n in body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == name]
    return [str(part) for value in values for part in ast.literal_eval(value) or ()]


def _undeclared(made: Any, at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Places of entries that the class of a config, or of a nested one, keeps without knowing them."""
    declared = vars(made)
    with contextlib.suppress(Exception):  # a few classes need arguments
        declared = vars(type(made)())
    for key, value in vars(made).items():
        if hasattr(type(value), "model_type"):
            yield from _undeclared(value, (*at, key))
        elif key not in declared:
            yield (*at, key)


def of_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of its class, which is parsed: to import it takes ten seconds."""
    spec, head = find_spec("diffusers"), f"\nclass {config['_class_name']}("
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    for path in (*sorted(folder.glob("models/**/*.py")), *sorted(folder.glob("schedulers/*.py"))):
        text = path.read_text(encoding="utf-8")
        body: list[Any] = vars(ast.parse(text[text.index(head) :]).body[0])["body"] if head in text else []
        for parameters in (f.args for f in body if isinstance(f, ast.FunctionDef) and f.name == "__init__"):
            names = [a.arg for a in (*parameters.args, *parameters.kwonlyargs)]
            nodes: list[Any] = [*parameters.defaults, *parameters.kw_defaults]
            values = {}
            for name, node in zip(names[::-1], nodes[::-1], strict=False):
                with contextlib.suppress(ValueError):  # no default, or no literal
                    values[name] = ast.literal_eval(node)
            float32 = [[rf"(^|\.){re.escape(n)}(\.|$)", True] for n in _float32(body, False)]
            undeclared = [[k] for k in config if k not in names]
            return {"values": {**values, **config}, "undeclared": undeclared, "float32": float32}
    return {}


if __name__ == "__main__":
    main()
