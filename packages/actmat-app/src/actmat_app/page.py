"""The page: fields, plan, merge with progress and report, comparison, push. `Jobs` does the work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from actmat.errors import MergeError, format_size
from actmat_app.form import recipe_fields
from actmat_app.jobs import Jobs
from actmat_app.view import error_html, frame_html

TITLE = "Merge models"
LOCAL = "Folders, files, hub ids or URLs. Works for full models and for LoRA adapters."
SERVED = "Public hub repositories with safetensors: at most {} experts, {} in total."
EXPERTS = "One per line, optionally followed by a weight; NAME=PATH sets a name"
INPUTS = "NAME=a prompt or a file, one expert per line. The merge is made for them and says how many answers it kept"
MORE = "Other recipe fields as YAML, or a whole recipe"
TOKEN = "Used for this push only and not stored. Empty: {}"
JOB: dict[str, Any] = {"concurrency_id": "job", "concurrency_limit": 1, "api_visibility": "private"}
"""One job at a time for all buttons; programs use the command line or the library."""

KEPT_S = 3600
"""Seconds for which a file can be downloaded."""

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
    with gr.Blocks(analytics_enabled=False, title=TITLE, delete_cache=(600, KEPT_S)) as page:
        about = LOCAL if limits is None else SERVED.format(limits.max_experts, format_size(limits.max_bytes))
        gr.Markdown(f"# {TITLE}\n{about}")
        if _signs_in():
            gr.LoginButton()  # at the top, because signing in reloads the page
        with gr.Row():
            with gr.Column():
                form = _form(methods, local=limits is None)
                output = gr.Textbox(label="Output", info="A new folder", placeholder="merged", visible=limits is None)
                with gr.Row():
                    plan, merge = gr.Button("Plan"), gr.Button("Merge", variant="primary")
                    stop = gr.Button("Stop")
            with gr.Column():
                shown = gr.HTML(elem_id="am-shown", min_height=80)
                download = gr.DownloadButton("Download", visible=False)
        with gr.Accordion("Report", open=False, visible=False) as frame:
            report = gr.HTML()
        with gr.Accordion("Push to the hub", open=False):
            out: Any = gr.Textbox(label="Merged model") if limits is None else gr.State("")
            _push(jobs, out)
        if limits is None:
            with gr.Accordion("Compare two merges", open=False):
                _compare(jobs)

        def show_plan(request: gr.Request, *values: Any) -> str:
            return _result(lambda: jobs.run(_user(jobs, request), {"do": "plan", "fields": recipe_fields(*values)}))[0]

        def show_merge(request: gr.Request, out: str, *values: Any, progress: gr.Progress = gr.Progress()) -> Any:  # noqa: B008
            said, done = _result(lambda: jobs.merge(_user(jobs, request), recipe_fields(*values), out), progress)
            page = Path(done["page"]) if done.get("page") else None
            text = "" if page is None else frame_html(page.read_text(encoding="utf-8"))
            file = gr.update(visible="archive" in done, value=done.get("archive"))
            return said, file, gr.update(visible=page is not None), text, done.get("out", "")

        def stop_job(request: gr.Request) -> None:
            jobs.stop(_user(jobs, request))

        plan.click(show_plan, form, shown, **JOB)
        merge.click(show_merge, [output, *form], [shown, download, frame, report, out], show_progress_on=shown, **JOB)
        stop.click(stop_job, queue=False, api_visibility="private")
    return page.queue(max_size=20, default_concurrency_limit=1, api_open=False)


def _form(methods: Sequence[str], *, local: bool) -> list[Any]:
    """The fields, in the order of `recipe_fields`."""
    base = gr.Textbox(label="Base", info="Not needed to merge adapters into an adapter", placeholder="org/base")
    experts = gr.Textbox(label="Experts", info=EXPERTS, lines=3, placeholder="org/math 0.7\norg/code 0.3")
    inputs = gr.Textbox(label="Inputs", info=INPUTS, lines=2, placeholder="math=What is 2 + 2?", visible=local)
    with gr.Row():
        method = gr.Dropdown(["auto", *methods], value="auto", label="Method", info="auto: by the inputs")
        scale = gr.Number(1.0, label="Scale", info="Of the merged change")
        rank = gr.Number(0, label="Rank", info="Of adapters; 0: as given", precision=0, minimum=0)
    more = gr.Textbox(label="More", info=MORE, lines=2, placeholder="options: {density: 0.3}\ndtype: bfloat16")
    return [base, experts, method, scale, rank, more, inputs]


def _push(jobs: Jobs, out: Any) -> None:
    """Add fields and button of a push."""
    empty = "the account you signed in with" if _signs_in() else "not allowed" if jobs.limits else "this machine's own"
    with gr.Row():
        repo = gr.Textbox(label="Repository", info="Created if missing", placeholder="your-name/name")
        token = gr.Textbox(label="Token", info=TOKEN.format(empty), type="password")
    public = gr.Checkbox(label="Public (default: private)")
    send, pushed = gr.Button("Push"), gr.HTML()

    def push(out: str, repo: str, token: str, public: bool, request: gr.Request) -> tuple[str, str]:
        return _result(lambda: jobs.push(_user(jobs, request), out, repo, token, public=public))[0], ""

    def push_signed_in(
        out: str, repo: str, token: str, public: bool, request: gr.Request, signed_in: gr.OAuthToken | None
    ) -> tuple[str, str]:
        return push(out, repo, token or ("" if signed_in is None else signed_in.token), public, request)

    send.click(push_signed_in if _signs_in() else push, [out, repo, token, public], [pushed, token], **JOB)


def _compare(jobs: Jobs) -> None:
    """Add fields and button of a comparison."""
    with gr.Row():
        first, second = gr.Textbox(label="First merge"), gr.Textbox(label="Second merge")
    start, said = gr.Button("Compare"), gr.HTML()

    def compare(first: str, second: str, request: gr.Request, progress: gr.Progress = gr.Progress()) -> str:  # noqa: B008
        job = {"do": "compare", "first": first, "second": second}
        return _result(lambda: jobs.run(_user(jobs, request), job), progress)[0]

    start.click(compare, [first, second], said, show_progress_on=said, **JOB)


def _result(start: Any, progress: Any = None) -> tuple[str, Mapping[str, Any]]:
    """HTML of a job and its last event; for a failed job, its error and an empty event."""
    events: Iterator[Mapping[str, Any]]
    try:
        with contextlib.closing(start()) as events:
            for event in events:
                if event["event"] == "progress" and progress is not None:
                    progress((event["done"], event["total"]), unit="tensors")
                elif event["event"] == "done":
                    return event["html"], event
    except MergeError as error:
        return error_html(str(error)), {}
    raise AssertionError("a job ends with its result or an error")


def _user(jobs: Jobs, request: gr.Request) -> str:
    """Id of the job's owner: the local user, or one visitor's page."""
    return "" if jobs.limits is None else str(request.session_hash)


def _signs_in() -> bool:
    """True on a Space whose README has `hf_oauth: true`."""
    return bool(os.environ.get("OAUTH_CLIENT_ID"))
