"""The page: a form, a plan, a merge with its report, a download, a push. The work of its buttons is in `actions`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gradio as gr

from actmat_space import actions
from actmat_space.asking import AUTO, methods
from actmat_space.html import report_html
from actmat_space.jobs import Jobs
from actmat_space.limits import Limits

STYLE = Path(__file__).parent / "style.css"
INTRODUCTION = """# Merge adapters
LoRA adapters of one base into one adapter, on their factors: no base is loaded, and nothing is truncated without a
rank. At most {adapters} public adapters in safetensors, {size} GB together."""
LIST = "One per line: org/name or org/name@revision, then its weight if it has one"
TOKEN = "Paste a token that may write{}. It is used for this push only and is not stored."
JOB: dict[str, Any] = {"concurrency_id": "job", "concurrency_limit": 1, "api_visibility": "private"}
"""One job at a time, whatever its button; none is offered to programs."""
SERVED: dict[str, Any] = {
    "css_paths": STYLE,
    "footer_links": [],
    "run_history": False,  # it keeps in the browser what was typed, tokens included
    "show_error": False,
    "ssr_mode": False,
}


def has_sign_in() -> bool:
    """True on a space whose `README.md` has `hf_oauth: true`."""
    return bool(os.environ.get("OAUTH_CLIENT_ID"))


def build(jobs: Jobs) -> gr.Blocks:
    """The page over a runner of jobs."""
    limits = jobs.limits
    with gr.Blocks(analytics_enabled=False, title="Merge adapters", delete_cache=(600, limits.keep_seconds)) as page:
        gr.Markdown(INTRODUCTION.format(adapters=limits.max_adapters, size=f"{limits.max_bytes / 1e9:g}"))
        if has_sign_in():
            gr.LoginButton()  # above all else: signing in loads the page again, and what was merged is gone
        form = _form()
        with gr.Row():
            show, make = gr.Button("Show the plan"), gr.Button("Merge", variant="primary")
        planned, merged = gr.HTML(elem_id="am-planned"), gr.HTML(elem_id="am-merged")
        download = gr.DownloadButton("Download the adapter", visible=False)
        with gr.Accordion("Report", open=False, visible=False) as frame:
            report = gr.HTML()
        key = gr.State("", time_to_live=limits.keep_seconds)
        with gr.Accordion("Push to the hub", open=False, visible=False) as push:
            _push(jobs, key)

        def plan(*values: Any) -> Any:
            return actions.plan(jobs, values)

        def merge(*values: Any, progress: gr.Progress = gr.Progress()) -> Any:  # noqa: B008 - as Gradio wants it
            said, done = actions.merge(jobs, values, lambda n, total: progress((n, total), unit="tensors"))
            seen = gr.update(visible=done is not None)
            page = "" if done is None else report_html(done.report.read_text(encoding="utf-8"))
            file = gr.update(visible=done is not None, value=None if done is None else str(done.archive))
            return "", said, file, seen, page, "" if done is None else done.key, seen

        show.click(plan, form, planned, **JOB)
        make.click(merge, form, [planned, merged, download, frame, report, key, push], **JOB)
    return page.queue(max_size=limits.queue, default_concurrency_limit=1, api_open=False)


def _form() -> list[Any]:
    """Fields of the form, in the order of `actions.form_of`."""
    adapters = gr.Textbox(label="Adapters", info=LIST, lines=3, placeholder="org/math-lora 0.7\norg/code-lora@main 0.3")
    with gr.Row():
        method = gr.Dropdown(methods(), value=AUTO, label="Method", info="auto: the one that measurements prefer")
        rank = gr.Number(0, label="Rank", info="0: exact", precision=0, minimum=0)
        scale = gr.Number(1.0, label="Scale", info="Factor of the change")
    any_base = gr.Checkbox(label="The adapters name different copies of one base")
    return [adapters, method, rank, scale, any_base]


def _push(jobs: Jobs, key: gr.State) -> None:
    """Fields and button of a push."""
    signs_in = has_sign_in()
    with gr.Row():
        repo = gr.Textbox(
            label="Repository", info="One of yours; made if it is not there", placeholder="your-name/name"
        )
        token = gr.Textbox(
            label="Token", info=TOKEN.format(", or sign in before you merge" * signs_in), type="password"
        )
    public = gr.Checkbox(label="Public (default: private)")
    send = gr.Button("Push")
    pushed = gr.HTML()

    def push(key: str, repo: str, token: str, public: bool) -> tuple[Any, str]:
        return actions.push(jobs, key, repo, token, public=bool(public)), ""  # the field is emptied

    def push_signed_in(
        key: str, repo: str, token: str, public: bool, signed_in: gr.OAuthToken | None
    ) -> tuple[Any, str]:
        return push(key, repo, token or ("" if signed_in is None else signed_in.token), public)

    send.click(push_signed_in if signs_in else push, [key, repo, token, public], [pushed, token], **JOB)


def launch(**options: Any) -> None:
    """Serve the page with the limits of the environment; `options`: of Gradio's `launch`.

    Raises:
        RecipeError: a limit is not valid.
    """
    jobs = Jobs(Limits.from_environment())
    jobs.sweep_forever()
    build(jobs).launch(**SERVED | options)
