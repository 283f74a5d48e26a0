"""The page: a row per expert, plan, merge with its stages, and what to do with the result. `Jobs` does the work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr

from actmat.errors import MergeError, format_size
from actmat_app.form import AUTOMATIC, KINDS, SUFFIX, find_models, output_place, recipe_fields
from actmat_app.jobs import Events, Jobs
from actmat_app.view import error_html, frame_html

TITLE = "Merge models"
LOCAL = (
    "Full models or LoRA adapters: folders, files, hub ids or URLs; `NAME=` before an expert names it. Adapters need "
    "no base. With prompts of each task, best eight, the merge is made for them, and says how many answers it kept."
)
SERVED = "Public hub repositories with safetensors: at most {} experts, {} in total."
MOST_EXPERTS = 16
"""Rows of the local page."""
SHOWN_EXPERTS = 2
"""Rows of a new page."""
EXPERT_FIELDS = 3
"""Location, weight, prompts."""
MORE = "Other recipe fields as YAML, or a whole recipe"
TOKEN = "Used for this push only and not stored. Empty: {}"
LONGEST_ANSWER = 64
"""Tokens of an answer to a prompt that is tried."""
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
"""For all events: programs use the command line or the library; a job shows its own progress."""
JOB: dict[str, Any] = {"concurrency_id": "job", "concurrency_limit": 1, **PRIVATE}
"""One job at a time for all buttons."""
AT_ONCE: dict[str, Any] = {"concurrency_limit": None, **PRIVATE}
"""For events that wait for no job."""

KEPT_S = 3600
"""Seconds for which a file can be downloaded."""


class Asker(NamedTuple):
    """Who clicked: id of the owner of jobs, and the token of an account that is signed in."""

    user: str
    token: str


SHOWN: dict[str, Any] = {
    "css_paths": Path(__file__).with_name("style.css"),
    "theme": gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]).set(
        block_info_text_color="*neutral_500", block_info_text_color_dark="*neutral_400"
    ),
    "footer_links": [],
    "run_history": False,  # it would store inputs in the browser, including tokens
    "show_error": False,
    "ssr_mode": False,
}
"""Arguments of Gradio's `launch` and `mount_gradio_app`; the page loads nothing from other hosts."""


def build(jobs: Jobs, methods: Sequence[str]) -> gr.Blocks:
    """Build the page for a job runner."""
    limits = jobs.limits
    with gr.Blocks(analytics_enabled=False, title=TITLE, delete_cache=(600, KEPT_S), fill_width=True) as page:
        about = LOCAL if limits is None else SERVED.format(limits.max_experts, format_size(limits.max_bytes))
        gr.Markdown(f"# {TITLE}\n{about}")
        if _signs_in():
            gr.LoginButton()  # at the top, because signing in reloads the page
        experts = _experts(MOST_EXPERTS if limits is None else limits.max_experts, local=limits is None)
        with gr.Row():
            base = _place("Base", local=limits is None, scale=3)
            output = gr.Textbox(label="Output", placeholder="merged", visible=limits is None, scale=2)
            kind = gr.Radio(KINDS, value=AUTOMATIC, label="Kind", visible=limits is None, scale=5, min_width=420)
        form = [output, base, kind, *_options(methods), *experts]
        with gr.Row():
            plan = gr.Button("Plan", min_width=80)
            merge = gr.Button("Merge", variant="primary", min_width=80)
            stop = gr.Button("Stop", min_width=80)
        shown = gr.HTML(elem_id="am-shown")
        download = gr.DownloadButton("Download", visible=False)
        results = [download, *_results(jobs)]

        def start_plan(asker: Asker, out: str | None, *values: Any) -> Events:
            place = output_place(out or "merged", str(values[1]))
            return jobs.run(asker.user, {"do": "plan", "fields": recipe_fields(*values), "out": place})

        def start_merge(asker: Asker, out: str, *values: Any) -> Events:
            place = output_place(out, str(values[1])) if limits is None else ""
            return jobs.merge(asker.user, recipe_fields(*values), place)

        def stop_job(request: gr.Request) -> None:
            jobs.stop(_user(jobs, request))

        if limits is None:
            fields = [base, *experts[::EXPERT_FIELDS]]
            page.load(lambda: [gr.update(choices=find_models("."))] * len(fields), None, fields, **AT_ONCE)
        _on_click(jobs, plan, start_plan, form, shown)
        _on_click(jobs, merge, start_merge, form, shown, results, _result_values)
        stop.click(stop_job, **AT_ONCE)
    return page.queue(max_size=20, default_concurrency_limit=1, api_open=False)


def _experts(most: int, *, local: bool) -> list[Any]:
    """Add a row per expert, some of them hidden, and the button that shows one more; returns the fields."""
    rows: list[Any] = []
    fields: list[Any] = []
    removals = []
    for number in range(most):
        with gr.Row(visible=number < SHOWN_EXPERTS) as row:
            fields += [
                _place("Expert", local=local, scale=5),
                gr.Number(1.0, label="Weight", scale=1, min_width=90),
                gr.Textbox(label="Prompts", placeholder="one per line, or a file", max_lines=4, scale=5, visible=local),
            ]
            removals.append(gr.Button("Remove", size="sm", scale=0, min_width=90))
        rows.append(row)
    with gr.Row():
        count, add = gr.State(SHOWN_EXPERTS), gr.Button("Add an expert", size="sm", scale=0, min_width=160)

    def visible(shown: int) -> list[Any]:
        return [shown, *(gr.update(visible=number < shown) for number in range(most))]

    def remove(number: int, shown: int, *values: Any) -> list[Any]:
        start, stop = EXPERT_FIELDS * number, EXPERT_FIELDS * (number + 1)
        return [*visible(max(shown - 1, 1)), *values[:start], *values[stop:], "", 1.0, ""]

    add.click(lambda shown: visible(min(shown + 1, most)), count, [count, *rows], **AT_ONCE)
    for number, button in enumerate(removals):
        button.click(partial(remove, number), [count, *fields], [count, *rows, *fields], **AT_ONCE)
    return fields


def _place(label: str, *, local: bool, scale: int) -> Any:
    """A field for a place; the local page completes it from models below the folder where it was started."""
    if not local:
        return gr.Textbox(label=label, placeholder="org/name", scale=scale)
    return gr.Dropdown(label=label, choices=[], value="", allow_custom_value=True, scale=scale)


def _options(methods: Sequence[str]) -> list[Any]:
    """Add the folded fields that few merges need, in the order of `recipe_fields`."""
    with gr.Accordion("Method and more", open=False):
        with gr.Row():
            method = gr.Dropdown(["auto", *methods], value="auto", label="Method", info="auto: by the inputs")
            scale = gr.Number(1.0, label="Scale", info="Of the merged change")
            rank = gr.Number(
                0, label="Rank", info="Of adapters; 0: as given. Needed of full models", precision=0, minimum=0
            )
        more = gr.Textbox(label="More", info=MORE, lines=2, placeholder="options: {density: 0.3}\ndtype: bfloat16")
    return [method, scale, rank, more]


def _results(jobs: Jobs) -> list[Any]:
    """Add what can be done with a merge, hidden until there is one; returns the components of `_result_values`.

    For visitors no event runs a model or writes a file of a name of theirs.
    """
    local, out = jobs.limits is None, gr.State("")
    with gr.Tabs(visible=False) as results:
        with gr.Tab("Try a prompt", visible=False, id="try") as trying:
            if local:
                _try(jobs, out)
        with gr.Tab("Copy code", id="code"):
            python = gr.Code(label="Python", language="python", lines=3, wrap_lines=True, show_line_numbers=False)
            vllm = gr.Code(label="vLLM", language="shell", lines=1, wrap_lines=True, show_line_numbers=False)
            use = gr.HTML()
        with gr.Tab("GGUF", visible=False) as exporting:
            if local:
                _export(jobs, out)
        with gr.Tab("Push", visible=False) as pushing:
            _push(jobs, out)
        with gr.Tab("Report", visible=False) as reporting:
            report = gr.HTML()
    return [results, out, trying, exporting, pushing, python, vllm, use, reporting, report]


def _result_values(done: Mapping[str, Any]) -> list[Any]:
    """Values of the download and of the components of `_results` for the last event of a merge; hidden without one."""
    if "out" not in done:
        return [gr.update(visible=False), gr.update(visible=False), *[gr.skip()] * 9]
    page = Path(done["page"]) if done["page"] else None
    is_file = done["out"].endswith(SUFFIX)
    can_run = "archive" not in done and not is_file and "diffusers" not in done["python"]
    return [
        gr.update(visible="archive" in done, value=done.get("archive")),
        gr.update(visible=True, selected="try" if can_run else "code"),
        done["out"],
        gr.update(visible=can_run),
        gr.update(visible=can_run),
        gr.update(visible=not is_file),
        gr.update(visible=bool(done["python"]), value=done["python"]),
        gr.update(visible=bool(done["vllm"]), value=done["vllm"]),
        done["use"],
        gr.update(visible=page is not None),
        "" if page is None else frame_html(page.read_text(encoding="utf-8")),
    ]


def _try(jobs: Jobs, out: Any) -> None:
    """Add the fields of a prompt that the merge, its experts and its base answer."""
    prompt = gr.Textbox(label="Prompt", placeholder="for the merge, the experts and the base", max_lines=4)
    ask, answers = gr.Button("Ask"), gr.HTML()

    def start(asker: Asker, out: str, prompt: str) -> Events:
        return jobs.run(asker.user, {"do": "try", "out": out, "prompt": prompt, "new_tokens": LONGEST_ANSWER})

    _on_click(jobs, ask, start, [out, prompt], answers)


def _export(jobs: Jobs, out: Any) -> None:
    """Add fields and button of a GGUF file."""
    with gr.Row():
        file = gr.Textbox(label="File", info="A new file, for llama.cpp", placeholder="merged.gguf", scale=2)
        like = gr.Textbox(label="GGUF file of the base", info="Gives names, metadata and tokenizer", scale=2)
        form = gr.Dropdown(["bf16", "f16", "f32", "q8_0"], label="Type", info="Of the matrices")
    write, written = gr.Button("Write"), gr.HTML()

    def start(asker: Asker, out: str, file: str, like: str, form: str) -> Events:
        options = {"type": form} | ({"like": like.strip()} if like.strip() else {})
        job = {"do": "export", "out": out, "file": file.strip() or f"{out}.gguf", "options": options}
        return jobs.run(asker.user, job)

    _on_click(jobs, write, start, [out, file, like, form], written)


def _push(jobs: Jobs, out: Any) -> None:
    """Add fields and button of a push."""
    empty = "the account you signed in with" if _signs_in() else "not allowed" if jobs.limits else "this machine's own"
    with gr.Row():
        repo = gr.Textbox(label="Repository", info="Created if missing", placeholder="your-name/name")
        token = gr.Textbox(label="Token", info=TOKEN.format(empty), type="password")
    public = gr.Checkbox(label="Public (default: private)")
    send, pushed = gr.Button("Push"), gr.HTML()

    def start(asker: Asker, out: str, repo: str, token: str, public: bool) -> Events:
        return jobs.push(asker.user, out, repo, token or asker.token, public=public)

    _on_click(jobs, send, start, [out, repo, token, public], pushed, [token], lambda _: [""])


def _on_click(
    jobs: Jobs,
    button: gr.Button,
    start: Callable[..., Events],
    inputs: Sequence[Any],
    shown: gr.HTML,
    outputs: Sequence[Any] = (),
    values: Callable[[Mapping[str, Any]], Sequence[Any]] = lambda _: (),
) -> None:
    """Run a job when a button is clicked: show its progress, then, in an event of its own, its result or its error.

    Gradio ignores a click on a button whose event still runs; when the result is shown, the event of the job has ended.

    Args:
        jobs: runs the job.
        button: that is clicked.
        start: from who clicked and the values of `inputs` to the job's events.
        inputs: fields.
        shown: for progress, result or error.
        outputs: other components that the job changes.
        values: from the job's last event, or without any, to the values of `outputs`.
    """
    ended = gr.State()

    def run(request: gr.Request, signed_in: gr.OAuthToken | None, *fields: Any) -> Iterator[tuple[Any, ...]]:
        event: Mapping[str, Any] = {}
        try:
            asker = Asker(_user(jobs, request), "" if signed_in is None else signed_in.token)
            with contextlib.closing(start(asker, *fields)) as events:
                for event in events:
                    if event["event"] == "progress":
                        yield event["html"], gr.skip(), *values({})
        except MergeError as error:
            event = {"html": error_html(str(error))}
        yield gr.skip(), event, *(gr.skip() for _ in outputs)

    button.click(run, list(inputs), [shown, ended, *outputs], **JOB).then(
        lambda event: [event["html"], *values(event)], ended, [shown, *outputs], **AT_ONCE
    )


def _user(jobs: Jobs, request: gr.Request) -> str:
    """Id of the job's owner: the local user, or one visitor's page."""
    return "" if jobs.limits is None else str(request.session_hash)


def _signs_in() -> bool:
    """True on a Space whose README has `hf_oauth: true`."""
    return bool(os.environ.get("OAUTH_CLIENT_ID"))
