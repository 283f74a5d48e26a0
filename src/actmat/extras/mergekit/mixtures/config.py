"""Structure of a mergekit-moe configuration, and its problems; opens no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actmat.errors import did_you_mean
from actmat.extras.mergekit.config import ConfigFindings, list_at, model_at

TOP = ("base_model", "experts", "gate_mode", "dtype", "experts_per_token", "shared_experts", "architecture")
EXPERT = ("source_model", "positive_prompts", "negative_prompts", "noise_scale", "residual_scale")
SEED = "random_seed"
"""Field of actmat: mergekit takes the seed from its command line."""
RUNS = ("hidden", "hidden_avg", "hidden_last")
RANDOM = ("random", "uniform_random")
GATE_MODES = (*RUNS, "cheap_embed", *RANDOM)
DTYPES = ("float32", "bfloat16", "float16")
SUFFIXES = (".yml", ".yaml")


@dataclass(frozen=True)
class MixedExpert:
    """One model whose MLPs become experts.

    Args:
        model: location of the model.
        positive, negative: prompts for the gate.
        noise: standard deviation of the noise on its MLPs; None: no noise.
        residual: factor of its `down_proj`; None: 1.
    """

    model: str
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    noise: float | None = None
    residual: float | None = None


@dataclass(frozen=True)
class Mixture:
    """A configuration with a valid structure; `shared` has at most one expert."""

    base: str
    experts: tuple[MixedExpert, ...]
    shared: tuple[MixedExpert, ...] = ()
    gate_mode: str = "hidden"
    per_token: int = 2
    dtype: str | None = None
    architecture: str | None = None
    seed: int = 0

    @property
    def gated(self) -> tuple[MixedExpert, ...]:
        """Experts with rows in the gates: a shared one needs prompts, unless gates are random."""
        has_gate = self.gate_mode in RANDOM or any(e.positive for e in self.shared)
        return (*self.experts, *self.shared) if has_gate else self.experts

    @property
    def models(self) -> list[str]:
        """Distinct locations of all models."""
        return list(dict.fromkeys([self.base, *(e.model for e in (*self.experts, *self.shared))]))


def is_mixture(data: Mapping[str, Any]) -> bool:
    """True if the data is a mergekit-moe configuration.

    >>> is_mixture({"experts": [{"source_model": "a"}]}), is_mixture({"experts": [{"path": "a"}]})
    (True, False)
    """
    experts = data.get("experts")
    listed = [e for e in experts if isinstance(e, Mapping)] if isinstance(experts, list) else []
    return "gate_mode" in data or any("source_model" in e for e in listed)


def read_mixture(data: Mapping[str, Any], found: ConfigFindings) -> Mixture | None:
    """Read the mixture; None if there are problems, which are added to the findings."""
    found.ignored("", data, (*TOP, SEED))
    if data.get("base_model") is None:
        found.problem("", "'base_model' is missing; it gives attention, norms and embeddings")
    base = model_at(data["base_model"], "base_model", found) if data.get("base_model") is not None else ""
    experts = _experts(data.get("experts"), "experts", found)
    shared = _experts(data["shared_experts"], "shared_experts", found) if data.get("shared_experts") else ()
    if len(shared) > 1:
        found.problem("shared_experts", f"expected at most one shared expert, found {len(shared)}")
    mode = _choice(data, "gate_mode", GATE_MODES, "hidden", found)
    dtype = data.get("dtype")
    name = str(dtype).removeprefix("torch.") if dtype is not None else None
    if name is not None and name not in DTYPES:
        found.problem("dtype", f"expected one of {', '.join(DTYPES)}, found '{dtype}'")
    per_token = _count(data, "experts_per_token", 2, found)
    if experts and not 1 <= per_token <= len(experts):
        found.problem(
            "experts_per_token", f"expected 1 to {len(experts)}, the number of experts, found {per_token}" +
            ("; the default is 2" if "experts_per_token" not in data else "")
        )  # fmt: skip
    architecture = data.get("architecture")
    if architecture is not None and not isinstance(architecture, str):
        found.problem("architecture", f"expected a name, found {str(architecture)[:80]!r}")
    _check_prompts(experts, shared, mode, found)
    if found.problems:
        return None
    mixture = Mixture(base, experts, shared, mode, per_token, name, architecture, _count(data, SEED, 0, found))
    return None if found.problems else mixture


def _choice(data: Mapping[str, Any], key: str, known: tuple[str, ...], default: str, found: ConfigFindings) -> str:
    value = data.get(key)
    if value is None or value in known:
        return default if value is None else str(value)
    hint = did_you_mean(str(value), known)
    found.problem(key, f"expected one of {', '.join(known)}, found {str(value)[:80]!r}.{hint}")
    return default


def _count(data: Mapping[str, Any], key: str, default: int, found: ConfigFindings) -> int:
    value = data.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    found.problem(key, f"expected a non-negative integer, found {str(value)[:80]!r}")
    return default


def _experts(listed: Any, path: str, found: ConfigFindings) -> tuple[MixedExpert, ...]:
    out = []
    for i, one in enumerate(list_at(listed, path, found)):
        at = f"{path}.{i}"
        if not isinstance(one, Mapping) or "source_model" not in one:
            found.problem(at, "expected a mapping with 'source_model'")
            continue
        found.ignored(at, one, EXPERT)
        prompts = [_prompts(one, key, at, found) for key in EXPERT[1:3]]
        numbers = [_number(one, key, at, found) for key in EXPERT[3:]]
        model = model_at(one["source_model"], f"{at}.source_model", found)
        out.append(MixedExpert(model, prompts[0], prompts[1], numbers[0], numbers[1]))
    return tuple(out)


def _prompts(data: Mapping[str, Any], key: str, path: str, found: ConfigFindings) -> tuple[str, ...]:
    value = data.get(key)
    if value is None:
        return ()
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    found.problem(f"{path}.{key}", f"expected a list of strings, found {str(value)[:80]!r}")
    return ()


def _number(data: Mapping[str, Any], key: str, path: str, found: ConfigFindings) -> float | None:
    value = data.get(key)
    if value is None:
        return None
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) < float("inf"):
        found.problem(f"{path}.{key}", f"expected a number, found {str(value)[:80]!r}")
        return None
    return number


def _check_prompts(
    experts: tuple[MixedExpert, ...], shared: tuple[MixedExpert, ...], mode: str, found: ConfigFindings
) -> None:
    """Add problems for gates that cannot distinguish the experts, and notes on experts from one model."""
    if mode not in RANDOM:
        for i, expert in enumerate(experts):
            if not expert.positive:
                found.problem(
                    f"experts.{i}", f"'positive_prompts' are missing; gate_mode {mode} computes the gate from them. "
                    "Fix: add typical prompts, or set 'gate_mode: random' for a model that is trained further"
                )  # fmt: skip
        if (
            len(experts) > 1
            and all(e.positive for e in experts)
            and len({(e.positive, e.negative) for e in experts}) == 1
        ):
            found.problem(
                "experts", "the prompts of all experts are equal, so the gates would be equal too. Fix: give each "
                "expert prompts of its own task"
            )  # fmt: skip
    if len(experts) > 1 and len({e.model for e in experts}) == 1:
        found.note(
            "all experts are the same model: the mixture gives the answers of that model, with more memory, until it "
            "is trained further",
            warns=True,
        )
    if len(experts) & (len(experts) - 1):
        found.note(f"{len(experts)} experts: llama.cpp expects a power of two")
