"""An open LoRA adapter: its pairs of factors, and full tensors that were trained with them; no base is needed.

Shapes: `O` out_features, `I` in_features, `R` rank, `E` stacked experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorsHandle, versions_of_files
from actmat.checkpoints.composed import renamed
from actmat.checkpoints.folder import ADAPTER_CONFIG
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.keys import unknown_note
from actmat.checkpoints.model import Config, Model
from actmat.checkpoints.raw import raw_bytes
from actmat.experts.lora.config import AdapterConfig
from actmat.experts.lora.fields import LORA, StackWord
from actmat.experts.lora.modules import AdapterLayout, AdapterModule, Listing, list_modules
from actmat.layout.patterns import compile_pattern
from actmat.linalg.inner import is_finite
from actmat.linalg.lowrank import LowRank


@dataclass(frozen=True, slots=True)
class AdapterHandle:
    """Address from which `locate.open_handle` opens an adapter again, also in another process. Plain data.

    A relative `location` is one of the working directory; `base` is what the adapter was fitted to, `config` its
    `config.json`; `etags` are name, size and version of remote files, which must be the same. `stacks` is the user's
    statement on stacked experts, `layout` the one that it was converted to, `weights` its tensors if their rows are
    those of another vocabulary, `drop` the recipe's patterns of tensors that are left out.
    """

    location: str
    base: TensorsHandle | None = None
    config: Config | None = None
    etags: tuple[tuple[str, int, str], ...] = ()
    stacks: tuple[StackWord, ...] = ()
    layout: AdapterLayout | None = None
    weights: TensorsHandle | None = None
    drop: tuple[str, ...] = ()


class Adapter(AbstractContextManager["Adapter"]):
    """An open adapter: its modules, and all problems, one sentence each. Use as a context manager.

    `extras` are tensors trained in full, `copies` unused copies of base weights: name in the model -> stored name.
    `layout` is how it is stored.

    Args:
        model: the stored tensors with their files, closed with it; `weights` are its tensors.
        config: settings that determine its deltas.
        problems: of the config.
        listing: its content; default: as PEFT names it.

    Attributes:
        family: name of the plug-in that it is of; empty for PEFT's.
        has_other_rows: its tables have the rows of another vocabulary, see `with_rows`.
        converted_to: the layout that it was brought into, see `locate.in_layout`.
        drop: patterns of tensors that were left out, see `without`.
        origin: the stored adapter that it was converted from, whose tensors identify the input; closed with it.
        sources: factor that a conversion put together -> the stored tensors that it is made of.
    """

    family = ""
    has_other_rows = False
    converted_to: AdapterLayout | None = None
    drop: tuple[str, ...] = ()
    origin: Adapter | None = None
    sources: Mapping[str, Sequence[str]] = {}

    def __init__(
        self, model: Model, config: AdapterConfig, problems: Sequence[str], listing: Listing | None = None
    ) -> None:
        self.listing = listing or list_modules(model.specs, config)
        self.model, self.weights = model, model.tensors
        self.config = config
        self.layout: AdapterLayout = self.listing.layout
        self.location = model.location
        self.modules, self.extras, self.copies = self.listing.modules, self.listing.extras, self.listing.copies
        is_lora = config.fields.get("peft_type", "LORA") == "LORA"  # tensors of others are not its factors
        self.problems = (*problems, *(self.listing.problems if is_lora else ()))

    @property
    def parts(self) -> dict[str, int]:
        """Components of a pipeline that it changes -> number of their modules; a single empty name for any other."""
        return dict(Counter(m.part for m in self.modules.values()))

    def renamed(self, names: Mapping[str, str], extras: Mapping[str, str] | None = None) -> Adapter:
        """The same adapter, open as long as this one, with only these modules: new name -> own name.

        Args:
            names: of the modules.
            extras: tensors trained in full, new name -> stored name; default: its own.
        """
        modules = {new: self.modules[old] for new, old in names.items()}
        full = self.extras if extras is None else extras
        return self._derived(self.model, replace(self.listing, modules=modules, extras=full), self.problems)

    def with_rows(self, aligned: Model) -> Adapter:
        """The same adapter with tables that have the rows of another vocabulary, by the same names."""
        adapter = self._derived(aligned, self.listing, self.problems)
        adapter.has_other_rows = True
        return adapter

    def without(self, patterns: Sequence[str]) -> Adapter:
        """The same adapter without the stored tensors that match; itself if none does."""
        model, lost = leave_out(self.model, patterns)
        if lost:
            modules = {n: m for n, m in self.modules.items() if m.a in model.specs}
            extras, copies = ({n: s for n, s in of.items() if s in model.specs} for of in (self.extras, self.copies))
            listing = replace(self.listing, modules=modules, extras=extras, copies=copies)
            adapter = self._derived(model, listing, self.problems)
            adapter.drop = tuple(patterns)
            return adapter
        return self

    def with_problems(self, problems: Sequence[str]) -> Adapter:
        """The same adapter, open as long as this one, with other problems."""
        return self._derived(self.model, self.listing, problems)

    def _derived(self, model: Model, listing: Listing, problems: Sequence[str]) -> Adapter:
        adapter = Adapter(model, self.config, problems, replace(listing, problems=()))
        adapter.family, adapter.drop = self.family, self.drop
        return adapter

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for plans on its factors: unknown fields of its config, and unused tensors."""
        notes = ["it holds copies of base weights; the base's own are used"] if self.copies else []
        if problem := self.config.targets.problem:
            notes.append(f"{problem}. Not checked that it names the modules in the file: all are merged")
        if self.modules and not any(m.scaling for m in self.modules.values()):
            notes.append("its alpha (lora_alpha) is 0 in every module, so that it changes nothing")
        return (*unknown_note(ADAPTER_CONFIG, LORA.unknown(self.config.fields)), *self.listing.notes, *notes)

    @property
    def dtype(self) -> str:
        """Widest floating dtype of the stored factors."""
        dtypes = {self.weights.specs[m.a].dtype for m in self.modules.values()}
        dtypes |= {self.weights.specs[n].dtype for n in self.extras.values()}
        return widest(dtypes)

    def factors(self, module: AdapterModule, dtype: torch.dtype) -> LowRank:
        """The delta of a module, of the shape `module.shape`; `b` includes the scaling."""
        return module_product(module, self.weights.read(module.a).to(dtype), self.weights.read(module.b).to(dtype))

    def bias_delta(self, module: AdapterModule, dtype: torch.dtype) -> Tensor | None:
        """`scaling * lora_B.bias`, the delta of the layer's bias; None without one."""
        return None if module.bias is None else self.weights.read(module.bias).to(dtype) * module.scaling

    @cached_property
    def hashes(self) -> Mapping[str, str]:
        """Content hash of every stored tensor."""
        out = {}
        for name in self.weights.specs:
            seen = ContentHash()
            seen.update(raw_bytes(self.weights.read(name)))
            out[name] = seen.hexdigest()
        return out

    def check_values(self, label: str) -> list[str]:
        """One sentence for each tensor with NaN or Inf of the adapter called `label`; its copies are not merged."""
        problems, copies = [], set(self.copies.values())
        for name in (n for n in self.weights.specs if n not in copies):
            value = self.weights.read(name)
            if not is_finite(value):
                bad = int((~torch.isfinite(value)).sum())
                problems.append(f"tensor '{name}' of expert '{label}' has {bad} values that are NaN or Inf")
        return problems

    def handle(self) -> AdapterHandle:
        """Its location, the versions of remote files, and the user's words that decided how it is read."""
        etags = versions_of_files(self.weights.identity())
        return AdapterHandle(
            self.location, etags=etags, stacks=self.config.stacks, layout=self.converted_to, drop=self.drop
        )

    def close(self) -> None:
        """Close its tensors. May be called twice."""
        self.model.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def leave_out(model: Model, patterns: Sequence[str]) -> tuple[Model, int]:
    """A model without the tensors that match, with a note; and their number."""
    matching = [compile_pattern(pattern) for pattern in patterns]
    names = {n: n for n in model.specs if not any(matches(n) for matches in matching)}
    if not (lost := len(model.specs) - len(names)):
        return model, 0
    aliases = {a: n for a, n in model.tensors.aliases.items() if a in names and n in names}
    folder = model.folder.noted(f"{lost} of its tensors are not merged, as the recipe says (drop)")
    return replace(model, tensors=renamed(model.tensors, names, aliases), folder=folder), lost


def widest(dtypes: Collection[str]) -> str:
    """The widest of these floating dtypes; float32 without one."""
    return next((d for d in ("float64", "float32", "bfloat16", "float16") if d in dtypes), "float32")


def module_product(module: AdapterModule, a: Tensor, b: Tensor) -> LowRank:
    """The delta of a module from its stored factors; `b` of the product includes the scaling."""
    if module.kind == "embedding":
        return LowRank(a.mT.contiguous() * module.scaling, b.mT.contiguous())
    if module.is_stack:
        n = module.shape[0]
        a_ERI = a.reshape(n, module.rank, a.shape[-1])
        split = (n, module.rank) if module.is_grouped else (module.rank, n)
        b_EOR = b.reshape(b.shape[0], *split).permute((1, 0, 2) if module.is_grouped else (2, 0, 1))
        return LowRank(b_EOR * module.scaling, a_ERI)
    return LowRank(b.flatten(1) * module.scaling, a.flatten(1))
