"""Chats as texts, by the chat template of a tokenizer, in a process with bounds.

A template is a program that comes with a model. The sandbox of Jinja keeps it from files and from code, but not from
looping for hours, or from making texts that fill the memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from actmat.errors import StatisticsError
from actmat.foreign import in_one_line
from actmat.system import optional_module

TEMPLATE_CHARACTERS = 1_000_000
"""Most characters of a template; those of known models have up to 30,000."""
TEXT_CHARACTERS = 20_000_000
"""Most characters of all texts of one process."""
CPU_S = 5
"""Seconds of computing for all chats of one process; a thousand of them take less than one."""
WALL_S = 60
"""Seconds until the process is ended, its start included."""
MEMORY = 4 << 30
"""Bytes of address space of the process; its libraries take a quarter."""
COMMAND = [sys.executable, "-P", "-m", "actmat.extras.models.chats"]


def render_chats(tokenizer: Any, chats: Sequence[Any], where: str) -> list[str]:
    """Texts of chats, each up to the answer that is asked for.

    Args:
        tokenizer: of transformers.
        chats: lists of messages.
        where: what the chats are, for messages.

    Raises:
        StatisticsError: there is no template, it does not take the messages, or it exceeds a bound.
    """
    try:
        if not getattr(tokenizer, "chat_template", None):  # a class with code of its own, or an error of transformers
            return [str(tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)) for c in chats]
        template = tokenizer.get_chat_template()
        if len(template) > TEMPLATE_CHARACTERS:
            raise ValueError(f"it has {len(template)} characters, expected at most {TEMPLATE_CHARACTERS}")
        return _rendered(template, chats, tokenizer.special_tokens_map)
    except Exception as error:  # noqa: BLE001 - also of foreign code that refuses the messages
        raise StatisticsError(
            f"{where}: the chat template of {tokenizer.name_or_path} cannot be applied: {in_one_line(error)}. "
            "Fix: give the texts themselves, in a column 'text'."
        ) from None


def _rendered(template: str, chats: Sequence[Any], special: Any) -> list[str]:
    request = json.dumps([template, chats, special], default=lambda value: f"<{type(value).__name__}>")
    try:
        done = subprocess.run(COMMAND, input=request.encode(), capture_output=True, timeout=WALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"it was stopped after {WALL_S} s") from None
    if not done.stdout:
        raise ValueError(f"it ended with exit code {done.returncode}, after {CPU_S} s of computing or for its memory")
    said = json.loads(done.stdout)
    if isinstance(said, str):
        raise ValueError(said)
    return list(said)


def _bound() -> None:
    """Limit this process from now on, on systems that have limits."""
    if (resource := optional_module("resource")) is None:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    for kind, most in ((resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + CPU_S), (resource.RLIMIT_AS, MEMORY)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Read a template, chats and special tokens; write the texts, or one text that says why there are none."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template, chats, special = json.load(sys.stdin)
    said: str | list[str]
    _bound()
    try:
        chats = [[{k: v for k, v in m.items() if v is not None} for m in chat] for chat in chats]  # as transformers
        said, _ = render_jinja_template(chats, chat_template=template, add_generation_prompt=True, **special)
        if (length := sum(map(len, said))) > TEXT_CHARACTERS:
            said = f"its texts have {length} characters, expected at most {TEXT_CHARACTERS}"
    except MemoryError:
        said = f"it needs more than {MEMORY >> 30} GB of memory"
    except Exception as error:  # noqa: BLE001 - of foreign code
        said = in_one_line(error)[:1000] or type(error).__name__
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
