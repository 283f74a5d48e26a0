"""A model in memory whose parameters become `W_0 + factor * D*`, in place, for one candidate after another.

Checkpoints are loaded by transformers, which may rename, stack or transpose tensors; all of that is linear, so the
difference of two loaded models is the loaded difference. Merged adapters are not loaded: their factors are put on the
parameters that the stored tensors make up (`LiveProducts`).

`W_0` and `D*` are kept in memory; or, if they do not fit, in files from which a candidate is formed tensor by tensor.
Then only one model is in memory at any time: one that is loaded takes the place of the live one.

Shapes: `O` rows and `I` columns of a matrix, `R` rank.
"""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.writing.staging import disk_errors
from actmat.errors import RecipeError, StatisticsError
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import parse_adapter_config
from actmat.experts.lora.expert import AdapterExpert
from actmat.extras.collect.binding import locate_parameters
from actmat.extras.models.in_memory import MemoryMerge
from actmat.extras.models.loading import Loaded, load_model
from actmat.extras.tune.groups import FIXED
from actmat.extras.tune.merges import Merges
from actmat.extras.tune.space import MergeChoice
from actmat.layout.in_memory import TensorOnDisk, TensorSlice
from actmat.linalg.lowrank import LowRank

ModelParts = Sequence[tuple[TensorSlice, LowRank]]
"""Deltas of the stored tensors that make up a parameter, and their places in it."""


class LiveProducts(Mapping[str, Tensor]):
    """Deltas by parameter, in float32; each is formed on its device when it is asked for.

    Args:
        parts: by parameter.
        shapes: of the parameters.
    """

    def __init__(self, parts: Mapping[str, ModelParts], shapes: Mapping[str, torch.Size]) -> None:
        self._parts, self._shapes = parts, shapes
        factors = [f for own in parts.values() for _, value in own for f in (value.b_OR, value.a_RI)]
        self.nbytes = sum(f.nbytes for f in factors)

    def __getitem__(self, name: str) -> Tensor:
        """The delta of a parameter."""
        parts = self._parts[name]
        out = parts[0][1].b_OR.new_zeros(self._shapes[name])
        for place, value in parts:
            target = place.of(out)
            target.copy_(value.dense().view(target.shape))
        return out

    def add_to(self, name: str, base: Tensor, factor: float, out: Tensor) -> bool:
        """Write `base + factor * delta` in one pass, without forming the delta; False where it is no plain product."""
        (_, value), *others = self._parts[name]
        is_plain = not others and value.shape == out.shape == base.shape and out.ndim == 2
        if not is_plain or out.dtype != torch.float32 or base.device != out.device:
            return False
        torch.addmm(base, value.b_OR, value.a_RI, alpha=factor, out=out)
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def locate_state(model: nn.Module, state: Mapping[str, Tensor], base: Checkpoint) -> dict[str, TensorOnDisk]:
    """Name in `state` -> the stored tensors that make up the parameter.

    Args:
        state: tensors of the model, of which those that share memory stand once.
    """
    whole = model.state_dict()
    first = {(t.data_ptr(), t.numel()): name for name, t in state.items()}
    located, _ = locate_parameters(model, list(whole), base)
    names = {name: first.get((whole[name].data_ptr(), whole[name].numel())) for name in located}
    return {own: located[name] for name, own in names.items() if own is not None}


def products_of(
    merged: MemoryMerge, base: Checkpoint, located: Mapping[str, TensorOnDisk], state: Mapping[str, Tensor]
) -> LiveProducts:
    """The deltas of a merged adapter by parameter of a model.

    Args:
        merged: an adapter of PEFT.
        located, state: see `locate_state`.

    Raises:
        CheckpointError: it does not fit the base.
        StatisticsError: the model has no parameter for a delta.
    """
    config, problems = parse_adapter_config(merged.plan.adapter_config or {})
    weights = MemoryCheckpoint(merged.tensors, location="the merged adapter")
    parts: dict[str, list[tuple[TensorSlice, LowRank]]] = {}
    with AdapterExpert(Adapter(weights, config, problems), base) as expert:
        missing = {n for n in expert.specs if expert.source(n).kind == "formed"}
        for name, found in located.items():
            for place in found.slices:
                if place.name not in missing:
                    continue
                spec = expert.specs[place.name]
                if expert.source(place.name).rank:
                    value = expert.factors(place.name, spec.shape, torch.float32)
                else:  # a bias: a row
                    row = expert.delta(place.name, 0, spec.numel, torch.float32)
                    value = LowRank(torch.ones(1, 1), row[None])
                device = state[name].device
                parts.setdefault(name, []).append((place, LowRank(value.b_OR.to(device), value.a_RI.to(device))))
        missing -= {place.name for own in parts.values() for place, _ in own}
    if missing:
        raise StatisticsError(
            f"The adapters change '{min(missing)}' of the base, and the model that was loaded has no parameter for it. "
            "Choose the class that the base was saved from (--model-class)."
        )
    return LiveProducts(parts, {name: state[name].shape for name in parts})


D = TypeVar("D", bound=Mapping[str, Tensor])

ALIGNMENT = 64
"""Bytes: where a tensor may begin in the file."""


class LiveTensors(Mapping[str, Tensor]):
    """The float tensors of a model in one file that `store` wrote; each is mapped into memory when it is asked for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stored = LiveTensors.store(Path(folder) / "a", {"w": torch.tensor([1.0, 2.0])})
    ...     stored["w"].clone(), list(stored)
    (tensor([1., 2.]), ['w'])
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index: dict[str, tuple[int, list[int], str]] = json.loads(_index_of(path).read_text(encoding="utf-8"))

    @classmethod
    def store(cls, path: Path, tensors: Mapping[str, Tensor]) -> LiveTensors:
        """Write tensors one after the other; the index, which makes the file complete, comes last."""
        index: dict[str, tuple[int, list[int], str]] = {}
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for name, tensor in tensors.items():
                    file.write(bytes(-file.tell() % ALIGNMENT))
                    index[name] = (file.tell(), list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                    file.write(raw_bytes(tensor.detach().cpu().contiguous()))
            part = path.with_name(f"{path.name}.part")
            part.write_text(json.dumps(index), encoding="utf-8")
            os.replace(part, _index_of(path))
        return cls(path)

    @staticmethod
    def is_complete(path: Path) -> bool:
        """True if `store` has finished there."""
        return _index_of(path).is_file()

    def __getitem__(self, name: str) -> Tensor:
        """The tensor in mapped memory, which is not to be written to."""
        start, shape, dtype = self._index[name]
        kind = torch_dtype(dtype)
        stop = start + math.prod(shape) * kind.itemsize
        mapped = torch.from_file(str(self._path), shared=False, size=stop, dtype=torch.uint8)
        return mapped[start:].view(kind).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def _index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Float parameters and buffers by name; tensors that share memory once."""
    first: dict[tuple[int, int], tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.numel():
            first.setdefault((tensor.data_ptr(), tensor.numel()), (name, tensor))
    return dict(first.values())


@dataclass(frozen=True)
class Direction:
    """A merged delta at scale 1, `D*`, by name of the parameter; those that do not change are left out."""

    deltas: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of memory; none for deltas in a file."""
        if isinstance(self.deltas, LiveTensors):
            return 0
        if isinstance(self.deltas, LiveProducts):
            return self.deltas.nbytes
        return sum(d.numel() * d.element_size() for d in self.deltas.values())


class LiveModel:
    """The base's model, which takes the weights of candidates.

    Args:
        model: loaded from the base; its parameters are changed.
        groups: names of the groups of layers, by their numbers.
        numbers: see `group_numbers`.
        folder: for files of the base and of merged deltas; None: these stay in memory.
    """

    def __init__(
        self, model: nn.Module, groups: tuple[str, ...], numbers: Mapping[str, Tensor], folder: Path | None = None
    ) -> None:
        self.groups = groups
        self._numbers = numbers
        self._folder = folder
        self._model: nn.Module | None = model
        self._state = state_of(model)
        self._changed: set[str] = set()
        self._located: dict[str, TensorOnDisk] = {}
        self._base: Mapping[str, Tensor]
        if folder is None:
            self._base = {name: t.detach().clone() for name, t in self._state.items()}
        else:
            self._base = LiveTensors.store(folder / "base", self._state)

    @property
    def model(self) -> nn.Module:
        """The model with the weights that were written last."""
        assert self._model is not None, "a model is being loaded"
        return self._model

    def direction(self, name: str, load: Callable[[], nn.Module]) -> Direction:
        """`D*` of a merged model at scale 1.

        Args:
            name: of its file, if deltas are kept in files.
            load: loads the merged model.

        Raises:
            StatisticsError: a changed parameter is of no known group.
        """
        if self._folder is None:
            return Direction(self._known(dict(self._deltas(state_of(load()), in_place=False))))
        path = self._folder / name
        if not LiveTensors.is_complete(path):
            self._state, self._model = {}, None  # freed before the other one is loaded, which takes its place
            self._model = load()
            self._state = state_of(self._model)
            self._changed = set(self._state)
            LiveTensors.store(path, self._known(dict(self._deltas(self._state, in_place=True))))
        return Direction(LiveTensors(path))

    def products(self, merged: MemoryMerge, base: Checkpoint) -> Direction:
        """`D*` of a merged adapter at scale 1, as factors.

        Raises:
            CheckpointError, StatisticsError: it does not fit the base, or this model.
        """
        self._located = self._located or locate_state(self.model, self._state, base)
        return Direction(self._known(products_of(merged, base, self._located, self._state)))

    def _known(self, deltas: D) -> D:
        if unknown := [name for name in deltas if name not in self._numbers]:
            raise StatisticsError(
                f"'{unknown[0]}' changes in a merge, but the base's checkpoint has no tensor of this name, so its "
                "scale is unknown. Models of load= keep the names of their checkpoint, with or without a prefix."
            )
        return deltas

    def _deltas(self, state: Mapping[str, Tensor], *, in_place: bool) -> list[tuple[str, Tensor]]:
        """The merged deltas that are not zero; `in_place`: the merged weights are overwritten by them."""
        out = []
        with torch.no_grad():
            for name, tensor in state.items():
                if (base := self._base.get(name)) is not None:
                    there = base.to(tensor.device)
                    if not torch.equal(tensor, there):
                        out.append((name, tensor.sub_(there) if in_place else tensor - there))
        return out

    def write(self, direction: Direction, factor: Callable[[str], float]) -> None:
        """Make the parameters `W_0 + factor(group) * D*`; entries of the group `FIXED` get factor 1."""
        table = torch.tensor([1.0 if g == FIXED else factor(g) for g in self.groups])
        with torch.no_grad():
            for name in self._changed | set(direction.deltas):
                self._form(name, direction.deltas, table)
        self._changed = set(direction.deltas)

    def _form(self, name: str, deltas: Mapping[str, Tensor], table: Tensor) -> None:
        """Write one parameter of a candidate, or the base's where there is no delta."""
        tensor, base = self._state[name], self._base[name]
        if name not in deltas:
            tensor.copy_(base)
            return
        number = self._numbers[name]
        factor = float(table[int(number)]) if number.numel() == 1 else None
        if factor is None or not isinstance(deltas, LiveProducts) or not deltas.add_to(name, base, factor, tensor):
            tensor.copy_(base)
            _add(tensor, deltas[name].to(tensor.device), number, table)

    def restore(self) -> None:
        """Make the parameters the base's."""
        self.write(Direction({}), lambda group: 0.0)


def _add(tensor: Tensor, delta: Tensor, number: Tensor, table: Tensor) -> None:
    if number.numel() == 1:
        tensor.add_(delta, alpha=float(table[int(number)]))
    else:
        tensor.addcmul_(delta, table.to(tensor)[number.to(tensor.device, torch.long)])


@dataclass(frozen=True)
class Loader:
    """Loads models of transformers, or as `given` says; adapters get the base."""

    base: str
    model_class: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    given: Callable[[str], Loaded] | None = None

    def load(self, location: str) -> Loaded:
        """The model at a location."""
        if self.given is not None:
            return self.given(location)
        return load_model(
            location, adapters_base=self.base, model_class=self.model_class, dtype=self.dtype, device=self.device
        )

    @property
    def is_exact(self) -> bool:
        """True if an adapter may be folded into its base without a rounding that its answers would show."""
        return self.given is None and self.dtype == "float32"

    def merged(self, location: str) -> nn.Module:
        """The model at a location; an adapter is merged into its base."""
        return folded(self.load(location).model)


def folded(model: Any) -> nn.Module:
    """The model with its adapter, if it has one, added to its weights."""
    return cast(nn.Module, model.merge_and_unload() if hasattr(model, "merge_and_unload") else model)


class Directions:
    """Merged deltas by choice, those of adapters as factors; those used last stay in memory.

    Args:
        live: the base's model.
        base: its checkpoint.
        merges: makes what is missing.
        loader: of the merged models.
        memory: bytes of directions that are kept.
    """

    def __init__(self, live: LiveModel, base: Checkpoint, merges: Merges, loader: Loader, memory: int) -> None:
        self._live, self._base, self._merges, self._loader, self._memory = live, base, merges, loader, memory
        self._kept: OrderedDict[str, Direction] = OrderedDict()

    def of(self, choice: MergeChoice) -> Direction:
        """The direction of a merge, which is made if it is missing.

        Raises:
            RecipeError: it cannot be merged.
        """
        if choice.key not in self._kept:
            if not self._merges.make([choice]):
                raise RecipeError(f"{choice} cannot be merged: {self._merges.refused[choice.key]}")
            loaded = self._load(choice)
            while self._kept and sum(d.nbytes for d in self._kept.values()) + loaded.nbytes > self._memory:
                self._kept.popitem(last=False)
            self._kept[choice.key] = loaded
        self._kept.move_to_end(choice.key)
        return self._kept[choice.key]

    def _load(self, choice: MergeChoice) -> Direction:
        if self._merges.is_factored(choice):
            return self._live.products(self._merges.take(choice), self._base)
        folder = self._merges.folder_of(choice)
        return self._live.direction(folder.name, lambda: self._loader.merged(str(folder)))


def group_numbers(
    model: nn.Module, base: Checkpoint, groups: Mapping[str, str], names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Parameter of a model -> number of its group: one for all entries, or one each if they are of several groups.

    Parameters that are not found in the checkpoint are left out, unless there is only one group.

    Args:
        model: loaded from `base`.
        groups: tensor of the checkpoint -> name of its group.
        names: of the groups, by their numbers.
    """
    number_of = {name: names.index(group) for name, group in groups.items()}
    state = state_of(model)
    out = {name: torch.zeros(1, dtype=torch.uint8) for name in state} if len(names) == 1 else {}
    for name, found in locate_state(model, state, base).items():
        pieces = [(piece, number_of[piece.name]) for piece in found.slices if piece.name in number_of]
        if len({number for _, number in pieces}) == 1:
            out[name] = torch.tensor([pieces[0][1]], dtype=torch.uint8)
        elif pieces:
            out[name] = torch.zeros(state[name].shape, dtype=torch.uint8)
            for piece, number in pieces:
                piece.of(out[name]).fill_(number)
    return out
