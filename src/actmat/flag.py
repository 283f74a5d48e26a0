"""`Flag` and `Setting`: mark a field that the command line offers, next to the field's type and default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    """Annotation of a field that commands take as a flag: `seed: Annotated[int, Flag()] = 0`.

    Args:
        names: spellings, such as `("--base", "-b")`, or `("--on/--off",)` for a switch; default: from the field's name.
        help: a sentence; default: the field's description. Text after "; default: " is shown as the default.
        type: type of the value on the command line; default: from the field's type.
        repeated: the flag may be given several times, although the field holds one value.
        low: smallest value.
    """

    names: tuple[str, ...] = ()
    help: str = ""
    type: type | None = None
    repeated: bool = False
    low: float | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """Annotation of a field that commands take by --set: `split: Annotated[str, Setting("...")] = "train"`.

    Args:
        help: a sentence. Text after "; default: " is shown as the default.
        low, high: smallest and largest value.
    """

    help: str
    low: float | None = None
    high: float | None = None
