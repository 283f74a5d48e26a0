"""Keys of another tool's config: each is obeyed, known not to matter, or refused. All others are named to the user.

The lists are data next to the code that reads a config; tests compare them with the tool's own classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from actmat.checkpoints.folder import shown


class Sorted(NamedTuple):
    """Keys that one config sets: refused -> the reason; and unknown ones."""

    refused: dict[str, str]
    unknown: list[str]


@dataclass(frozen=True)
class Keys:
    """Lists of the keys that a tool writes.

    Args:
        obeyed: the code reads them.
        irrelevant: key -> the reason why no weight depends on it.
        refused: key -> the reason why weights cannot be read if it is set.
        inside: key -> lists of the mapping that is its value; `*` stands for any key.
        values: key -> the accepted values in lower case; any other value is refused.
    """

    obeyed: Collection[str] = ()
    irrelevant: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, Keys] = field(default_factory=dict)
    values: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def known(self) -> frozenset[str]:
        """All keys of the lists."""
        return frozenset((*self.obeyed, *self.irrelevant, *self.refused, *self.inside, *self.values))

    def but(self, *obeyed: str) -> Keys:
        """The same lists with these keys obeyed."""
        irrelevant, refused = (
            {k: w for k, w in of.items() if k not in obeyed} for of in (self.irrelevant, self.refused)
        )
        return replace(self, obeyed=(*self.obeyed, *obeyed), irrelevant=irrelevant, refused=refused)

    def sort(self, fields: Mapping[str, Any]) -> Sorted:
        """The refused and the unknown keys that are set: neither null, false, zero nor empty.

        >>> keys = Keys({"r"}, {"dropout": "acts in training only"}, {"use_dora": "not low rank"})
        >>> keys.sort({"r": 8, "dropout": 0.1, "use_dora": True, "sparsity": 0.5, "later": None})
        Sorted(refused={'use_dora': 'not low rank'}, unknown=['sparsity'])
        """
        known, found = self.known, Sorted({}, [])
        for key, value in fields.items():
            inner = self.inside.get(key, self.inside.get("*"))
            if not value:
                continue
            if key in self.refused:
                found.refused[key] = self.refused[key]
            elif key in self.values:
                if str(value).lower() not in self.values[key]:
                    found.refused[key] = f"expected {' or '.join(self.values[key])}, found {shown(value)}"
            elif inner is not None and isinstance(value, Mapping):
                refused, unknown = inner.sort(value)
                found.refused.update({f"{key}.{k}": why for k, why in refused.items()})
                found.unknown.extend(f"{key}.{k}" for k in unknown)
            elif key not in known and inner is None:
                found.unknown.append(key)
        found.unknown.sort()
        return found


def unknown_note(where: str, unknown: Collection[str]) -> tuple[str, ...]:
    """Remark for plans on unknown keys of the config called `where`; empty without any."""
    listed = ", ".join(unknown)
    return (f"{where} has unknown fields, which are ignored: {listed}",) if unknown else ()
