"""Random bytes, texts and JSON values for cases; a case is a function of its random generator only."""

from __future__ import annotations

import json
import math
import pickletools
import random
from collections.abc import Sequence
from typing import Any

ODD_TEXTS = (
    "", "x", "\x1b[2J", "../x", "/", ".", "\u202e", "\ud800", "\x9b1m", "a" * 300, "model.safetensors", "NaN", "a|b",
    "<b>", "\n", "\r\nactmat: intact", "\0", "\u2028", "\ufeff", "base", "weight", "1e400", "0x10", "null", "~", "\x7f",
    "__metadata__", "(.*)*X", "\U0001f600", "%s", "{}", "0" * 32,
)  # fmt: skip
"""Texts that have a meaning somewhere: to a terminal, a path, a number, a pattern, Markdown, HTML."""
NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 64, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**70), 10**30, 10**400, 0.0, -0.0,
    0.5, -1.5, 1e-320, 1e38, 3.5e38, 1e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
LETTERS = (
    "aZ09._-/\\ \t\n\x00\x1b\x7f\x85\x9b\u00e9\u200b\u202e\u2028\u4e2d\ud800\udfff\U0001f600*?[]{}()!,:=#'\"&<>|`$~@"
)
TOKENS = (
    b"[" * 40, b"{" * 40, b'{"a":' * 150, b"\xff", b"\x00", b"\x1b[2J", b"\xe2\x80\xae", b"NaN", b"1e999", b"-", b"\\ud800",
    b"0" * 60, b"9" * 400, b'"', b"}", b"]", b",", b":", b"null", b"true", b'"__metadata__":{}', b"\n", b"/*", b"\xef\xbb\xbf",
)  # fmt: skip
OPCODES = tuple(op.code.encode("latin1") for op in pickletools.opcodes)
DEEP = 120
"""Nesting of the deepest values, above what any reader takes."""


def text(rng: random.Random) -> str:
    """A short text, often one that has a meaning somewhere."""
    if rng.random() < 0.5:
        return rng.choice(ODD_TEXTS)
    return "".join(rng.choices(LETTERS, k=rng.randrange(9)))


def scalar(rng: random.Random) -> Any:
    """A JSON value without parts."""
    kind = rng.random()
    if kind < 0.35:
        return text(rng)
    if kind < 0.7:
        return rng.choice(NUMBERS)
    if kind < 0.8:
        return rng.choice((None, True, False))
    return rng.randrange(-3, 40) if kind < 0.9 else rng.uniform(-10, 10)


def value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value, sometimes nested or deeper than any reader takes."""
    kind = rng.random()
    if kind < 0.65 or depth > 3:
        return scalar(rng)
    if kind < 0.67:
        return _nested(rng)
    if kind < 0.83:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {text(rng): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def _nested(rng: random.Random) -> Any:
    out = scalar(rng)
    for _ in range(rng.choice((3, 20, DEEP))):
        out = [out] if rng.random() < 0.5 else {text(rng): out}
    return out


def mutated_json(rng: random.Random, given: Any) -> Any:
    """A copy with one to three of its parts replaced, added, moved or removed."""
    out = json.loads(json.dumps(given))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        nodes = _nodes(out)
        node = rng.choice(nodes) if nodes else out
        if not isinstance(node, dict | list):
            break
        keys: Sequence[Any] = list(node) if isinstance(node, dict) else range(len(node))
        kind = rng.random()
        if not keys or kind < 0.15:
            new = value(rng)
            if isinstance(node, dict):
                node[text(rng)] = new
            else:
                node.append(new)
        elif kind < 0.35:
            del node[rng.choice(keys)]
        elif kind < 0.55 and len(nodes) > 1:  # what belongs elsewhere
            node[rng.choice(keys)] = json.loads(json.dumps(rng.choice(nodes)))
        else:
            node[rng.choice(keys)] = value(rng)
    return out


def _nodes(root: Any) -> list[Any]:
    """All lists and objects below a value, itself included."""
    found, todo = [], [root]
    while todo:
        node = todo.pop()
        if isinstance(node, dict | list):
            found.append(node)
            todo.extend(node.values() if isinstance(node, dict) else node)
    return found


def pickled(rng: random.Random, pieces: Sequence[bytes]) -> bytes:
    """Opcodes of pickles and these pieces in any order."""
    return b"".join(rng.choices(OPCODES + tuple(pieces), k=rng.randrange(40))) + b"."


def json_text(rng: random.Random, given: Any) -> bytes:
    """JSON of a mutated value: with escapes or as it is, sometimes with damaged bytes."""
    out = json.dumps(mutated_json(rng, given), ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    return mutated_bytes(rng, out) if rng.random() < 0.3 else out


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """The content with a few bytes replaced, inserted, repeated or cut."""
    out = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out) + 1)
        kind = rng.random()
        if kind < 0.3 and at < len(out):
            out[at] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        elif kind < 0.5:
            out[at:at] = rng.choice(TOKENS)
        elif kind < 0.6:
            out[at:at] = rng.randbytes(rng.randrange(9))
        elif kind < 0.8:
            del out[at : at + rng.choice((1, 2, 8, 100))]
        elif kind < 0.9:
            other = rng.randrange(len(out) + 1)
            out[at:at] = out[other : other + rng.randrange(40)]
        else:
            del out[at:]
    return bytes(out)
