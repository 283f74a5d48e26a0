"""Texts of data: chats through templates of foreign models, tables, byte-order marks."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from actmat.errors import StatisticsError
from actmat.extras.collect.data import MESSAGES, DataOptions, read_rows
from actmat.extras.models import chats

CHATS = [
    [{"role": "system", "content": "a", "tool_calls": None}, {"role": "user", "content": "\u00e4"}],
    [{"role": "user", "content": [{"type": "text", "text": "b"}]}],
]
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    LOOP: "exit code -24, after 5 s of computing",
    "{{ 'a' * 10**10 }}": "more than 4 GB of memory",
    "{{ 'a' * 10**8 }}": "texts have 200000000 characters, expected at most 20000000",
    "{{ raise_exception('no roles') }}": "cannot be applied: no roles. Fix: give the texts",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "x" * 1_000_001: "it has 1000001 characters, expected at most 1000000",
}


def tokenizer(template: Any) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>")), bos_token="<s>"
    )
    made.name_or_path = "org/chatty"
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [PLAIN, {"default": PLAIN, "tool_use": "{{ 1 }}"}])
def test_chats_are_rendered_as_transformers_does(template: Any) -> None:
    made = tokenizer(template)
    right = [made.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in CHATS]
    assert chats.render_chats(made, CHATS, "chats.jsonl") == right


@pytest.mark.parametrize("template", TEMPLATES, ids=[str(n) for n in range(len(TEMPLATES))])
def test_templates_are_bounded(template: str) -> None:
    with pytest.raises(StatisticsError, match=TEMPLATES[template]) as error:
        chats.render_chats(tokenizer(template), CHATS, "chats.jsonl")
    assert str(error.value).startswith("chats.jsonl: the chat template of org/chatty")


def test_a_template_is_bounded_where_the_system_has_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "WALL_S", 0.1)
    with pytest.raises(StatisticsError, match=r"stopped after 0\.1 s"):
        chats.render_chats(tokenizer(LOOP), CHATS, "chats.jsonl")


def test_a_tokenizer_without_a_template_is_an_error() -> None:
    with pytest.raises(StatisticsError, match="template of org/chatty cannot be applied"):
        chats.render_chats(tokenizer(None), CHATS, "chats.jsonl")


A, B = {"text": "what is two , or three ?"}, {"text": "b"}
FILES = {  # name, text -> rows, or words of the error
    ("q.csv", 'text\n"what is two , or three ?"\n\nb\n'): [A, B],
    ("q.csv", "\ufefftext\r\nb\r\n"): [B],
    ("q.csv", "label,question\n-1,b\n"): [{"label": -1, "question": "b"}],
    ("q.csv", "label,other\n1,b\n"): [{"label": 1, "other": "b"}],
    ("q.csv", "text\nwhat is two , or three ?\n"): "q.csv: line 2 has more values than the first line names columns, 1",
    ("q.csv", "text,other\nb\n"): "line 2 has fewer values than the first line names columns, 2",
    ("q.csv", "what is two , or three ?\nb\n"): "q.csv: expected a first line that names each column once",
    ("q.csv", "text;other\nb;c\n"): "found 'text;other'. Fix: --set text_column=NAME",
    ("q.csv", "text,text\nb,c\n"): "names each column once",
    ("q.csv", 'text\n"b\n'): "unexpected end of data",
    ("q.csv", ""): "is empty",
    ("q.jsonl", "\ufeff" + json.dumps(A) + "\n" + json.dumps(B) + "\n"): [A, B],
    ("q.txt", "\ufeffwhat is two , or three ?\nb\n"): [A, B],
    ("q.json", "\ufeff" + json.dumps([A, B])): [A, B],
    ("q.jsonl", '{"text": "a"}\n{"prompt": "b"}\n'): "texts of all rows in one column, found them in text, prompt. Fix",
    ("q.jsonl", '{"text": "a"}\n{"text": null}\n'): "found them in text, none of these",
}


@pytest.mark.parametrize(("file", "right"), FILES.items(), ids=[str(n) for n in range(len(FILES))])
@pytest.mark.parametrize("in_folder", [False, True])
def test_files_of_texts(tmp_path: Path, file: tuple[str, str], right: Any, in_folder: bool) -> None:
    name, text = file
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    options = DataOptions(str(tmp_path if in_folder else tmp_path / name), label_column="label")
    if isinstance(right, str):
        with pytest.raises(StatisticsError, match=right):
            read_rows(options)
    else:
        assert read_rows(options) == right


ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHAT_ROWS: list[tuple[dict[str, Any], str | None, Any, Any]] = [  # row, column -> messages, answer
    ({"messages": [ASKED, SAID]}, None, [ASKED], "b"),
    ({"messages": [ASKED], "prompt": "c"}, None, [ASKED], None),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, None, [ASKED], "b"),
    ({"id": "7", "prompt": [ASKED], "completion": [SAID]}, None, [ASKED], "b"),
    ({"rejected": [ASKED], "chosen": [ASKED, SAID]}, "chosen", [ASKED], "b"),
    ({"prompt": "a", "chosen": [ASKED, SAID]}, None, None, None),
    ({"text": "a", "messages": [ASKED, SAID]}, "text", None, None),
    ({"text": "a", "tags": [{"name": "b"}]}, None, None, None),
]


@pytest.mark.parametrize(("row", "column", "messages", "answer"), CHAT_ROWS)
def test_chats_in_the_columns_of_trainers(row: dict[str, Any], column: str | None, messages: Any, answer: Any) -> None:
    (asked,) = read_rows(DataOptions("rows", rows=(row,), text_column=column))
    assert (asked.get(MESSAGES), asked.get("answer")) == (messages, answer)
