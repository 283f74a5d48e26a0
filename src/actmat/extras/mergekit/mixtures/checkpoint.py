"""A mixture of experts as a checkpoint: its description file is opened like a weight file.

Attention, norms, embeddings and config come from the base model, the experts from the MLPs of the other models. Tensors
are read from their models on demand, so that a merge without experts writes the mixture in bounded memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from actmat.bounds import read_bytes
from actmat.checkpoints.base import Checkpoint, CheckpointHandle, FileIdentity, TensorSpec, torch_dtype
from actmat.checkpoints.raw import copy_range, raw_bytes
from actmat.checkpoints.resolve import open_checkpoint
from actmat.checkpoints.source import Format, LocalSource, Source
from actmat.errors import CheckpointError, format_size
from actmat.extras.mergekit.config import ConfigFindings
from actmat.extras.mergekit.mixtures.architectures import DENSE, choose
from actmat.extras.mergekit.mixtures.config import (
    DTYPES,
    RUNS,
    SUFFIXES,
    MixedExpert,
    Mixture,
    is_mixture,
    read_mixture,
)
from actmat.extras.mergekit.mixtures.gates import gates_of
from actmat.extras.stack.composed import ComposedCheckpoint, Origin, models_of
from actmat.recipe.load import MAX_BYTES, local_location
from actmat.recipe.text import UnreadableError, parse_yaml

NAME = "mixture"
"""Name of the format and of the view."""
COMPUTED = "<gates>"
_MLP = re.compile(r"model\.layers\.(?P<layer>\d+)\.mlp\.(?P<rest>.+)")
_BIAS = re.compile(r"model\.layers\.\d+\.self_attn\.(?P<module>\w+)\.bias")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")


class MixtureCheckpoint(ComposedCheckpoint):
    """Tensors of a mixture; closes its models.

    Args:
        location: the file as given by the user.
        mixture: its content, with resolved locations of the models.
        models: location -> open model.
    """

    def __init__(self, location: str, mixture: Mixture, models: Mapping[str, Checkpoint]) -> None:
        base = models[mixture.base]
        self.mixture, self._models = mixture, dict(models)
        types = {str((c.config or {}).get("model_type")) for c in models.values()}
        self._architecture = choose(mixture, types)
        self._changes: dict[str, MixedExpert] = {}
        origins = self._origins(base)
        super().__init__(location, base, origins)
        self.models = models_of(models.values())
        config = base.config or {}
        stated = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        self.dtype = mixture.dtype or (stated if stated in DTYPES else "")
        self.specs = MappingProxyType({n: self._spec(s) for n, s in self.specs.items()} | self._computed(base))
        gates = f"gates: {mixture.gate_mode}"
        if mixture.gate_mode in RUNS:
            running = format_size(2 * sum(s.numel for s in base.specs.values() if s.is_floating))
            gates += f", for which the base runs in bfloat16: {running} of memory in addition to this plan"
        self.notes = (f"mixture of {len(mixture.experts)} experts, {mixture.per_token} per token, as "
                      f"{self._architecture.name}; {gates}",)  # fmt: skip

    @property
    def config(self) -> Mapping[str, Any]:
        """The base's config with the mixture's entries."""
        base = self.first.config or {}
        out = self._architecture.config(base, self.mixture)
        key = "torch_dtype" if "torch_dtype" in base else "dtype"
        return out | ({key: self.dtype} if self.dtype else {})

    @property
    def written_config(self) -> Mapping[str, Any]:
        """The config, written instead of a copy."""
        return self.config

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of all weight files and of the description's content, which must be equal to continue a run."""
        text = json.dumps(asdict(self.mixture)).encode()
        described = FileIdentity(self.location, len(text), etag=hashlib.sha256(text).hexdigest())
        return (described, *super().identity())

    def scheme(self, name: str) -> str:
        """Every tensor is read as floats."""
        return ""

    def stored_specs(self, name: str) -> tuple[TensorSpec, ...]:
        """Specs in the tensor's model; gates are not stored."""
        return super().stored_specs(name) if name in self.origins else (self.specs[name],)

    def read(self, name: str) -> Tensor:
        """Read the whole tensor: a converted tensor of a model, or gates."""
        spec = self.find_spec(name)
        origin = self.origins.get(name)
        if origin is None:
            return self._gate(name).to(torch_dtype(spec.dtype)).contiguous()
        return self._changed(name, origin.checkpoint.read(origin.name), 0)

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill with the tensor's bytes; a tensor with another dtype or factor is converted for this range only."""
        origin = self.origins.get(spec.name)
        if origin is None:
            copy_range(self.read(spec.name), start, out)
            return
        if origin.spec.dtype == spec.dtype and spec.name not in self._changes:
            super().fill(spec, start, out)
            return
        first, last = start // spec.itemsize, -(-(start + len(out)) // spec.itemsize)
        values = torch.empty(last - first, dtype=torch_dtype(origin.spec.dtype))
        origin.checkpoint.read_into(origin.name, first * origin.spec.itemsize, raw_bytes(values))
        copy_range(self._changed(spec.name, values, first), start - first * spec.itemsize, out)

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on for stored tensors."""
        super().prefetch(name for name in names if name in self.origins)

    def handle(self) -> CheckpointHandle:
        """The mixture and the handles of its models; another process does not read the file again."""
        view = MixtureHandle(self.location, self.mixture, {n: c.handle() for n, c in self._models.items()})
        return CheckpointHandle(self.location, NAME, self.location, view=view)

    def _spec(self, spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=self.dtype) if self.dtype and spec.is_floating else spec

    def _changed(self, name: str, values: Tensor, first: int) -> Tensor:
        """Convert entries of a model's tensor, starting at `first`: computed in their dtype, then cast."""
        expert = self._changes.get(name)
        if expert is not None and expert.noise is not None:
            generator = torch.Generator().manual_seed(self.mixture.seed + zlib.crc32(name.encode()))
            noise = torch.randn(self.specs[name].numel, generator=generator, dtype=values.dtype)
            values = values + noise[first : first + values.numel()].view_as(values) * expert.noise
        if expert is not None and expert.residual is not None and self._is_residual(name):
            values = values * expert.residual
        return values.to(torch_dtype(self.specs[name].dtype))

    def _is_residual(self, name: str) -> bool:
        return f".{self._architecture.projections['down_proj']}." in name

    def _origins(self, base: Checkpoint) -> dict[str, Origin]:
        """Origins of all stored tensors.

        Raises:
            CheckpointError: tensors that the architecture does not support or a model lacks; lists all problems.
        """
        kind, mixture = self._architecture, self.mixture
        known = {f"{p}.weight": f"{new}.weight" for p, new in kind.projections.items()}
        out: dict[str, Origin] = {}
        problems: list[str] = []
        for name, spec in base.specs.items():
            bias, mlp = _BIAS.fullmatch(name), _MLP.fullmatch(name)
            if bias is not None and bias["module"] not in kind.biases:
                problems.append(f"{base.location}: {kind.name} does not support the bias '{name}'")
            elif mlp is not None and mlp["rest"] not in known:
                problems.append(f"{base.location}: expected {', '.join(known)} in every MLP, found '{name}'")
            elif mlp is None:
                out |= {} if name.endswith("rotary_emb.inv_freq") else {name: Origin(base, name)}
            else:
                block = f"model.layers.{mlp['layer']}.{kind.block}."
                places = [(f"experts.{i}", e) for i, e in enumerate(mixture.experts)]
                for place, expert in [*places, *((kind.shared, e) for e in mixture.shared)]:
                    checkpoint = self._models[expert.model]
                    new = f"{block}{place}.{known[mlp['rest']]}"
                    found = checkpoint.specs.get(name)
                    if found is None or found.shape != spec.shape:
                        had = "no such tensor" if found is None else f"{list(found.shape)}"
                        problems.append(
                            f"{checkpoint.location}: expected '{name}' of shape {list(spec.shape)}, as in "
                            f"{base.location}; found {had}"
                        )
                    out[new] = Origin(checkpoint, name)
                    is_residual = mlp["rest"] == "down_proj.weight" and expert.residual is not None
                    if is_residual or expert.noise is not None:
                        self._changes[new] = expert
        if not any(_MLP.fullmatch(n) for n in base.specs):
            problems.append(f"{base.location}: expected model.layers.N.mlp.*, found none of that name")
        if problems:
            raise CheckpointError("The mixture cannot be built.", list(dict.fromkeys(problems)))
        return out

    def _computed(self, base: Checkpoint) -> dict[str, TensorSpec]:
        """Specs of the gates, and of biases that the architecture requires and the models lack."""
        kind, config = self._architecture, base.config or {}
        dtype = self.dtype or next(s.dtype for s in base.specs.values() if s.is_floating)
        size = int(config["hidden_size"])
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(int(config["num_hidden_layers"])):
            at = f"model.layers.{layer}"
            shapes[f"{at}.{kind.block}.gate.weight"] = (len(self.mixture.experts), size)
            if kind.gated:
                shapes[f"{at}.{kind.block}.{kind.shared}_gate.weight"] = (1, size)
                for module in kind.biases:
                    name = f"{at}.self_attn.{module}"
                    if f"{name}.bias" not in base.specs:
                        shapes[f"{name}.bias"] = base.specs[f"{name}.weight"].shape[:1]
        return {n: TensorSpec(n, shape, dtype, COMPUTED) for n, shape in shapes.items()}

    def _gate(self, name: str) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(self.specs[name].shape)
        config = self.first.config or {}
        gates = gates_of(self.mixture, self.first, int(config["num_hidden_layers"]), int(config["hidden_size"]))
        rows, n = gates[int(name.split(".")[2])], len(self.mixture.experts)
        return rows[n:] if name.endswith("_gate.weight") else rows[:n]


def open_mixture(location: str, mixture: Mixture, open_model: Callable[[str], Checkpoint]) -> MixtureCheckpoint:
    """Open every model of a mixture once; reads only headers.

    Raises:
        CheckpointError: a model cannot be opened or is incompatible with the others; lists all problems.
    """
    with contextlib.ExitStack() as stack:
        models: dict[str, Checkpoint] = {}
        problems: list[str] = []
        for model in mixture.models:
            try:
                models[model] = stack.enter_context(open_model(model))
            except CheckpointError as error:
                problems += error.problems
        for model, checkpoint in models.items():
            config = checkpoint.config or {}
            if config.get("model_type") not in DENSE or not all(isinstance(config.get(k), int) for k in _SIZES):
                problems.append(
                    f"{model}: expected a config.json of {', '.join(DENSE)} with {', '.join(_SIZES)}, found model type "
                    f"{config.get('model_type')!r}. Mixtures are made of dense models of these types"
                )
        if problems:
            raise CheckpointError(f"The mixture {location} cannot be built.", problems)
        made = MixtureCheckpoint(location, mixture, models)
        stack.pop_all()
        return made


def _open(source: Source) -> Checkpoint:
    """Open the mixture described by a file; paths of its models are relative to the file's folder.

    Raises:
        CheckpointError: the file does not describe a mixture, or its models cannot be opened.
    """
    assert source.named is not None
    path = source.fetch(source.named)
    try:
        data = parse_yaml(read_bytes(path, most=MAX_BYTES).decode("utf-8"))[1]
    except (UnreadableError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source.location}: cannot be read as YAML: {error}") from None
    found = ConfigFindings()
    mixture = read_mixture(data, found) if isinstance(data, Mapping) and is_mixture(data) else None
    if mixture is None:
        raise CheckpointError(
            f"{source.location}: expected a mixture of experts in the form of mergekit-moe (base_model, experts with "
            "source_model), found something else" if not found.problems else f"{source.location}: invalid mixture",
            found.problems,
        )  # fmt: skip
    folder = path.parent

    def here(experts: Sequence[MixedExpert]) -> tuple[MixedExpert, ...]:
        return tuple(replace(e, model=local_location(e.model, folder)) for e in experts)

    base = local_location(mixture.base, folder)
    mixture = replace(mixture, base=base, experts=here(mixture.experts), shared=here(mixture.shared))
    return open_mixture(source.location, mixture, open_checkpoint)


def _claims(source: Source) -> bool:
    return isinstance(source, LocalSource) and source.named is not None and source.named.endswith(SUFFIXES)


@dataclass(frozen=True, slots=True)
class MixtureHandle:
    """Address of a mixture: a `View`."""

    location: str
    mixture: Mixture
    models: Mapping[str, CheckpointHandle]

    def open(self, open_handle: Callable[[CheckpointHandle], Checkpoint]) -> Checkpoint:
        """The mixture."""
        return open_mixture(self.location, self.mixture, lambda model: open_handle(self.models[model]))


MIXTURE = Format(NAME, (), _claims, _open)
