"""Load a transformers model, or an adapter on its base. Runs no code from the hub."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from actmat.bounds import local_path
from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.folder import ADAPTER_CONFIG
from actmat.checkpoints.memory import hold_model, tensor_specs
from actmat.checkpoints.model import Model
from actmat.checkpoints.resolve import HUB_ID
from actmat.errors import CheckpointError, StatisticsError, did_you_mean, first_of
from actmat.experts.locate import fields_of, locate, require_model
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import parse_adapter_config
from actmat.experts.lora.stacks import release_of
from actmat.extras.models.layered import AUTO_DTYPE, FLOAT32, ON_CPU, Placement, run_in_layers
from actmat.foreign import in_one_line

POOLING = "add_pooling_layer"
"""Argument of transformers encoders."""
LONGEST = 200
"""Characters of a library's message that are repeated in an error of ours."""


@dataclass(frozen=True)
class Loaded:
    """A loaded model and its origin."""

    model: nn.Module  # in evaluation mode
    checkpoint: str | Model  # location of the checkpoint, or its tensors in memory
    adapter: str | None  # location of the adapter on it, or None
    files: str  # location of tokenizer and image processor: the checkpoint's or the adapter's
    read: dict[str, Any] = field(default_factory=dict, compare=False)  # tokenizer and processor that were loaded
    note: str = ""  # how a model runs that does not fit


def extra(name: str, *, user: str = "Running a model from its files", group: str = "statistics") -> Any:
    """Import a library of the extra `actmat[GROUP]`; the error says how to install it.

    Args:
        user: what needs the library, for the message.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        raise StatisticsError(
            f"{user} needs {missing}, which is not installed: pip install 'actmat[{group}]'"
        ) from None


def from_files(kind: Literal["AutoTokenizer", "AutoImageProcessor"], loaded: Loaded, **options: Any) -> Any:
    """The tokenizer or the image processor of a model.

    Raises:
        StatisticsError: its files are missing or damaged.
    """
    try:
        if kind not in loaded.read:
            transformers = extra("transformers")
            with _silent(transformers):
                path, which = local_files(loaded.files)
                loaded.read[kind] = getattr(transformers, kind).from_pretrained(path, **which, **options)
        return loaded.read[kind]
    except (OSError, ValueError, ImportError) as error:
        what = "tokenizer" if kind == "AutoTokenizer" else "image processor"
        raise StatisticsError(
            f"{loaded.files}: {what} cannot be loaded from there: {in_brief(error)}. Copy its files beside the model."
        ) from error


def load_model(
    location: str,
    *,
    base: str | None = None,
    adapters_base: str | None = None,
    model_class: str | None = None,
    place: Placement = ON_CPU,
) -> Loaded:
    """Load a model, or an adapter on its base; raises if the checkpoint lacks parameters of the model.

    Args:
        location: location of the model or adapter.
        base: base of the adapter at `location`; default: the one named in its config.
        adapters_base: like `base`, but ignored for a model.
        model_class: transformers class, such as `AutoModelForCausalLM`; default: the config's architecture.
        place: where it runs; a model that does not fit there runs layer by layer.

    Raises:
        StatisticsError: it cannot be loaded, or a base is given for a model.
    """
    adapter, checkpoint = None, location
    with locate(location) as located:
        config, note = fields_of(located), "" if isinstance(located, Adapter) else place.layers(located.specs)
        if isinstance(located, Adapter):
            _check_for_peft(located, location)
            adapter, checkpoint = location, base or adapters_base or located.config.base_model
            if not checkpoint:
                raise StatisticsError(f"{adapter} does not name its base: pass --base BASE")
        elif base is not None:
            raise StatisticsError(f"--base goes with an adapter only; {location} is a full checkpoint")
    if adapter is not None:
        with named_base(adapter, checkpoint), locate(checkpoint) as under:
            base_model = require_model(under)
            config, note = base_model.config or {}, place.layers(base_model.specs)
    model = _load(checkpoint, model_class or next(iter(config.get("architectures") or ()), None), place, note)
    if adapter is not None:
        path, revision = local_files(adapter)
        with quiet_peft() as peft:
            model = peft.PeftModel.from_pretrained(model, path, **revision)
    model = model if note else model.to(place.device)
    return Loaded(model.eval(), checkpoint, adapter, _files(adapter, checkpoint), note=note)


def can_switch(location: str) -> bool:
    """True for an adapter whose tensors are all factors: PEFT takes it off a base again."""
    with locate(location) as located:
        return isinstance(located, Adapter) and located.layout == "peft" and not located.extras


def switched(loaded: Loaded, location: str) -> Loaded:
    """The loaded base with another adapter in place of the one on it; see `can_switch`.

    Raises:
        StatisticsError: PEFT would apply it differently than in training.
    """
    with locate(location) as located:
        assert isinstance(located, Adapter)
        assert isinstance(loaded.checkpoint, str)
        _check_for_peft(located, location)
    model: Any = loaded.model
    before = model.active_adapter
    path, revision = local_files(location)
    with quiet_peft():
        model.load_adapter(path, adapter_name="first" if before == "other" else "other", **revision)
        model.set_adapter("first" if before == "other" else "other")
        model.delete_adapter(before)
    files = _files(location, loaded.checkpoint)
    return Loaded(model.eval(), loaded.checkpoint, location, files, loaded.read if files == loaded.files else {})


@contextlib.contextmanager
def quiet_peft() -> Iterator[Any]:
    """PEFT, without its warnings about transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield extra("peft")


def _check_for_peft(adapter: Adapter, location: str) -> None:
    """Raise for an adapter that PEFT cannot load, or would apply differently than in training.

    Raises:
        StatisticsError: gives the reason and the fix.
    """
    if adapter.problems:
        raise StatisticsError(f"{location}: the adapter cannot be used.", adapter.problems)
    if adapter.layout != "peft":
        raise StatisticsError(
            f"{location}: expected an adapter of PEFT, which runs on a model, found the layout '{adapter.layout}'. "
            "Image models are merged, but not run. Fix: leave out the inputs"
        )
    if reason := _unlike_peft(adapter):
        raise StatisticsError(
            f"{location}: PEFT, which loads it into a model, would apply its stacked experts differently than in "
            f"training: {reason}. Fix: merge it into its base and load the model (actmat merge "
            "-b BASE -e ADAPTER -m linear --out MODEL)"
        )


def _unlike_peft(adapter: Adapter) -> str:
    """The reason why PEFT from 0.19.1 on misreads its stacks (no field of the config prevents it); else empty."""
    stacks = [m for m in adapter.modules.values() if m.is_stack]
    release = release_of(adapter.config.version)
    if any(m.is_grouped for m in stacks):
        return "the columns of B are grouped by expert"
    if (release is None or release <= (0, 19, 0)) and any(m.shape[-1] == m.shape[-2] for m in stacks):
        return f"peft_version is {adapter.config.version or 'not given'}, and a stack is square"
    return ""


@contextlib.contextmanager
def named_base(adapter: str | None, base: str) -> Iterator[None]:
    """Name the adapter in errors about its base.

    Raises:
        CheckpointError: the base cannot be opened; adds the fix.
    """
    try:
        yield
    except CheckpointError as error:
        if adapter is None:
            raise
        raise CheckpointError(
            f"The base '{base}' of {adapter} cannot be opened. Without --base, it comes from {ADAPTER_CONFIG} "
            "(base_model_name_or_path). Fix: pass the base's location with --base BASE.",
            error.problems,
        ) from error


def load_tensors(
    tensors: Mapping[str, Tensor],
    location: str,
    files: str,
    *,
    config: Mapping[str, Any],
    adapter: Mapping[str, Any] | None = None,
    model_class: str | None = None,
    place: Placement = ON_CPU,
) -> Loaded:
    """Load a model from tensors in memory; the counterpart of `load_model`.

    Args:
        tensors: tensors named as in a checkpoint, or as in an adapter's weight file.
        location: location of the base, for messages and to load an adapter's base.
        files: location of tokenizer and image processor.
        config: content of `config.json`, for a whole model.
        adapter: content of `adapter_config.json`; None for a whole model.
        model_class, place: as in `load_model`.

    Raises:
        StatisticsError: the model cannot be loaded, PEFT would misread it, or parameters are missing.
    """
    if adapter is not None:
        parsed, problems = parse_adapter_config(adapter)
        with Adapter(hold_model(tensors, location="the merged adapter"), parsed, problems) as opened:
            _check_for_peft(opened, opened.location)
    architecture = model_class or next(iter(config.get("architectures") or ()), None)
    with tempfile.TemporaryDirectory() as folder, _silent(extra("transformers")):
        if adapter is not None:
            with named_base("the merged adapter", location):
                loaded = load_model(location, model_class=model_class, place=place)
            Path(folder, "adapter_config.json").write_text(json.dumps(dict(adapter)), encoding="utf-8")
            with quiet_peft() as peft:
                model = peft.get_peft_model(loaded.model, peft.PeftConfig.from_pretrained(folder))
                result = peft.set_peft_model_state_dict(model, dict(tensors))
            if result.unexpected_keys:
                raise StatisticsError(f"PEFT finds no module for {result.unexpected_keys[0]} in {location}")
            model = model if loaded.note else model.to(place.device)
            return Loaded(model.eval(), location, None, files, note=loaded.note)
        if architecture is None or "model_type" not in config:
            raise StatisticsError(_unnamed(location))
        Path(folder, "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        parsed = extra("transformers").AutoConfig.from_pretrained(folder)
    note = place.layers(tensor_specs(tensors, "memory", location=location))
    model = _load(location, architecture, place, note, config=parsed, state_dict=dict(tensors))
    return Loaded((model if note else model.to(place.device)).eval(), location, None, files, note=note)


def _unnamed(location: str) -> str:
    """Error of a checkpoint that cannot be run."""
    return (
        f"{location} cannot be run: no config.json names its architecture (image models are merged, but not run). Fix: "
        "name the class, such as --set model_class=AutoModelForCausalLM"
    )


def _load(location: str, model_class: str | None, place: Placement, note: str, **more: Any) -> Any:
    """Load a transformers model onto the host.

    Args:
        note: not empty if it is to run layer by layer.
        more: config and tensors instead of the files at `location`.
    """
    transformers = extra("transformers")
    if model_class is None:
        raise StatisticsError(_unnamed(location))
    kind = getattr(transformers, model_class, None)
    if kind is None or not hasattr(kind, "from_pretrained"):
        near = did_you_mean(model_class, [n for n in dir(transformers) if "Model" in n or "For" in n])
        raise StatisticsError(f"transformers {transformers.__version__} has no model class '{model_class}'.{near}")
    path, revision = (None, {}) if "state_dict" in more else local_files(location)
    dtype = AUTO_DTYPE if note and place.running == FLOAT32 else place.running  # layers are widened one at a time
    try:
        with _silent(transformers):
            model, info = kind.from_pretrained(
                path,
                dtype=dtype if dtype == AUTO_DTYPE else torch_dtype(dtype),
                output_loading_info=True,
                **revision,
                **more,
            )
    except (OSError, ValueError) as error:
        raise StatisticsError(
            f"{location}: transformers {transformers.__version__} cannot load it as {model_class}: {in_brief(error)}. "
            "Fix: pass another class (--set model_class=...), or install a version of transformers that knows the model"
        ) from error
    missing = sorted(info.get("missing_keys") or ())
    if missing and _is_optional_pooler(kind, missing) and POOLING not in more:
        return _load(location, model_class, place, note, **more, **{POOLING: False})
    if missing:
        raise StatisticsError(
            f"{location}: {model_class} has {len(missing)} parameters that the checkpoint lacks ({first_of(missing)}); "
            "they would be random, and so would all results that depend on them. Fix: pass the class that it was saved "
            "from (--set model_class=...)."
        )
    if note:
        run_in_layers(model, place)
    return model


def _is_optional_pooler(kind: Any, missing: Sequence[str]) -> bool:
    """True if only an encoder's optional pooler is missing; encoders are often saved without it."""
    optional = POOLING in inspect.signature(kind.__init__).parameters
    return optional and all(".pooler." in f".{name}" for name in missing)


@contextlib.contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Silence progress bars, remarks on configs, and the table of missing parameters, which `_load` reports."""
    logging = transformers.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def local_files(location: str) -> tuple[str, dict[str, str]]:
    """Arguments of `from_pretrained`: path or id, and revision; of a GGUF, which it decodes, folder and file."""
    if (path := local_path(location)).exists():
        return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (str(path), {})
    match = HUB_ID.fullmatch(location)
    if match is None:
        return location, {}
    return match["repo"], {"revision": match["revision"]} if match["revision"] else {}


def _files(adapter: str | None, checkpoint: str) -> str:
    """Location of tokenizer and image processor."""
    names = ("tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")
    return adapter if adapter is not None and any((Path(adapter) / n).is_file() for n in names) else checkpoint


def in_brief(text: object) -> str:
    r"""First sentence of a library's message, without its full stop; the rest is advice about that library.

    >>> in_brief("There is no `x`.\nYou can update it with `pip install`.")
    'There is no `x`'
    """
    first = re.split(r"(?<=[.!?:])\s+(?=[A-Z])", in_one_line(text), maxsplit=1)[0].rstrip(".")
    return first if len(first) <= LONGEST else f"{first[:LONGEST].rsplit(' ', 1)[0]} ..."
