"""Keys of another tool's config: each is obeyed, known not to matter, or refused. All others are named to the user.

The lists are data next to the code that reads a config; tests compare them with the tool's own classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from actmat.checkpoints.folder import shown


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

    def judge(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Keys that are set (neither null, false, zero nor empty) and refused -> why; unknown ones -> empty.

        >>> keys = Keys({"r"}, {"dropout": "acts in training only"}, {"use_dora": "not low rank"})
        >>> keys.judge({"r": 8, "dropout": 0.1, "use_dora": True, "sparsity": 0.5, "later": None})
        {'use_dora': 'not low rank', 'sparsity': ''}
        """
        known, judged = self.known, dict[str, str]()
        for key, value in fields.items():
            inner = self.inside.get(key, self.inside.get("*"))
            if not value:
                continue
            if key in self.refused:
                judged[key] = self.refused[key]
            elif key in self.values:
                if str(value).lower() not in self.values[key]:
                    judged[key] = f"expected {' or '.join(self.values[key])}, found {shown(value)}"
            elif inner is not None and isinstance(value, Mapping):
                judged |= {f"{key}.{k}": why for k, why in inner.judge(value).items()}
            elif key not in known and inner is None:
                judged[key] = ""
        return judged

    def unknown(self, fields: Mapping[str, Any]) -> list[str]:
        """The unknown keys that are set, sorted."""
        return sorted(key for key, why in self.judge(fields).items() if not why)


def unknown_note(where: str, unknown: Collection[str]) -> tuple[str, ...]:
    """Remark for plans on unknown keys of the config called `where`; empty without any."""
    listed = ", ".join(unknown)
    return (f"{where} has unknown fields, which are ignored: {listed}",) if unknown else ()
