"""What a text answers: the integer of an AIME problem, the number of a word problem, the program of a task."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

__all__ = ["aime_answer", "first_before", "flexible_number", "program", "same_number", "strict_number"]

_SAID = re.compile(r"answer\s*(?:is|:|=)?\s*[:=]?\s*\**\s*(\$?\\?\(?\s*[\d,]+)", re.IGNORECASE)
_WRAPPING = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}|\\[,;!: ]|[\s$*]|\\[()\[\]]|\{,\}")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_FENCE = re.compile(r"```[ \t]*(?:python|py|Python)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def aime_answer(text: str) -> int | None:
    r"""The answer of an AIME problem, an integer from 0 to 999 (written 000 to 999), or None if the text gives none.

    The last `\boxed{...}` that holds such an integer counts, else the last "answer is ..." or "Answer: ...". A number
    somewhere in the reasoning is no answer.
    """
    for content in reversed(_boxed(text)):
        number = _integer(content)
        if number is not None:
            return number
    for said in reversed(_SAID.findall(text)):
        number = _integer(said)
        if number is not None:
            return number
    return None


def _boxed(text: str) -> list[str]:
    r"""Contents of all `\boxed{...}`, `\fbox{...}` and `\boxed 7`, braces matched."""
    found = []
    for start in re.finditer(r"\\(?:boxed|fbox)\s*", text):
        rest = text[start.end() :]
        if not rest.startswith("{"):
            number = re.match(r"\d+", rest)
            found += [number[0]] if number else []
            continue
        depth = 0
        for place, sign in enumerate(rest):
            depth += (sign == "{") - (sign == "}")
            if depth == 0:
                found.append(rest[1:place])
                break
    return found


def _integer(text: str) -> int | None:
    plain = text
    while (shorter := _WRAPPING.sub(lambda m: m[1] or "", plain)) != plain:
        plain = shorter
    plain = plain.rpartition("=")[2].rstrip(".").replace(",", "")
    return int(plain) if re.fullmatch(r"[0-9]{1,3}", plain) else None


def strict_number(text: str) -> str | None:
    """What stands behind the first `#### `, the form that GSM8K itself uses."""
    found = _STRICT.search(text)
    return found[1] if found else None


def flexible_number(text: str) -> str | None:
    """The last number in the text."""
    found = _FLEXIBLE.findall(text)
    return next((part for part in found[-1] if part), None) if found else None


def same_number(given: str | None, wanted: str) -> bool:
    """Whether two texts are one number; thousands separators, dollars and a final point do not matter."""
    if given is None:
        return False
    try:
        return _decimal(given) == _decimal(wanted)
    except InvalidOperation:
        return False


def _decimal(text: str) -> Decimal:
    return Decimal(text.strip().replace(",", "").replace("$", "").rstrip("."))


def first_before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stops."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def program(prompt: str, answer: str, entry_point: str, stops: Sequence[str]) -> str:
    """The program that an answer stands for, without its tests.

    A fenced block that defines the function is taken as it is, behind what the prompt has above its function
    (imports, helpers); the last such block counts. Without one, the answer continues the prompt, up to the first
    stop; a fenced block without the function continues it, too.

    Args:
        prompt: signature and docstring of the function to write.
        stops: texts at which a continuation has left the function.
    """
    blocks = _FENCE.findall(answer)
    whole = [b for b in blocks if re.search(rf"^\s*def {re.escape(entry_point)}\b", b, re.MULTILINE)]
    if whole:
        above = prompt[: prompt.rfind(f"def {entry_point}")] if f"def {entry_point}" in prompt else ""
        return f"{above}\n{whole[-1]}"
    return prompt + first_before(blocks[-1] if blocks else answer, stops)
