"""The page: a form, a plan, a merge with its report, a download, a push. All it does is in `Jobs`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gradio as gr

from actmat.errors import MergeError
from actmat_space.asking import AUTO, Form, methods
from actmat_space.html import error_html, plan_html, pushed_html, report_html, result_html
from actmat_space.jobs import Jobs, Merged
from actmat_space.limits import Limits

STYLE = Path(__file__).parent / "style.css"
INTRODUCTION = """# Merge adapters
LoRA adapters of one base into one adapter, on their factors: no base is loaded, and without a rank the result is exact.
At most {adapters} adapters of {size} together. Public adapters in safetensors, at the commit that is there now."""
LIST = "One per line: org/name or org/name@revision, then its weight if it has one"
SIGN_IN = "Sign in, or paste a token that may write. It is used for this push only: it is not stored."
TOKEN = "Paste a token that may write. It is used for this push only: it is not stored."
NOTHING = MergeError("There is no merged adapter yet. Fix: merge, then push.")


def has_sign_in() -> bool:
    """True on a space whose `README.md` has `hf_oauth: true`."""
    return bool(os.environ.get("OAUTH_CLIENT_ID"))


def form_of(adapters: str, method: str, rank: float | None, scale: float | None, any_base: bool) -> Form:
    """The form as filled in; an empty number is its default."""
    return Form(adapters or "", method or AUTO, int(rank or 0), 1.0 if scale is None else float(scale), bool(any_base))


def build(jobs: Jobs) -> gr.Blocks:
    """The page over a runner of jobs."""
    limits = jobs.limits
    with gr.Blocks(analytics_enabled=False, title="Merge adapters", delete_cache=(600, limits.keep_seconds)) as page:
        gr.Markdown(INTRODUCTION.format(adapters=limits.max_adapters, size=f"{limits.max_bytes / 1e9:g} GB"))
        form = _form()
        with gr.Row():
            show, make = gr.Button("Show the plan"), gr.Button("Merge", variant="primary")
        said = gr.HTML(elem_id="am-said")
        download = gr.DownloadButton("Download the adapter", visible=False)
        with gr.Accordion("Report", open=False, visible=False) as frame:
            report = gr.HTML()
        key = gr.State("", time_to_live=limits.keep_seconds)
        with gr.Group(visible=False) as push:
            _push(jobs, key)

        def plan(*values: Any) -> Any:
            try:
                return plan_html(jobs.plan(form_of(*values)))
            except MergeError as error:
                return error_html(error)

        def merge(*values: Any, progress: gr.Progress = gr.Progress()) -> Any:  # noqa: B008 - as Gradio wants it
            hidden = gr.update(visible=False)
            try:
                merged = jobs.merge(form_of(*values), lambda done, total: progress((done, total), unit="tensors"))
            except MergeError as error:
                return error_html(error), hidden, hidden, "", "", hidden
            return _shown(merged)

        job = {"concurrency_id": "job", "concurrency_limit": 1, "api_visibility": "private"}
        show.click(plan, form, said, **job)  # type: ignore[arg-type]
        make.click(merge, form, [said, download, frame, report, key, push], **job)  # type: ignore[arg-type]
    return page.queue(max_size=limits.queue, default_concurrency_limit=1, api_open=False)


def _shown(merged: Merged) -> tuple[Any, ...]:
    shown = gr.update(visible=True)
    said = result_html(merged.plan, merged.result)
    page = report_html(merged.report.read_text(encoding="utf-8"))
    return said, gr.update(visible=True, value=str(merged.archive)), shown, page, merged.key, shown


def _form() -> list[Any]:
    """Fields of the form, in the order of `form_of`."""
    adapters = gr.Textbox(label="Adapters", info=LIST, lines=3, placeholder="org/math-lora 0.7\norg/code-lora@main 0.3")
    with gr.Row():
        method = gr.Dropdown(methods(), value=AUTO, label="Method", info="auto: the one that measurements prefer")
        rank = gr.Number(0, label="Rank", info="0: exact", precision=0, minimum=0)
        scale = gr.Number(1.0, label="Scale", info="Factor of the change")
    any_base = gr.Checkbox(label="The adapters name different copies of one base")
    return [adapters, method, rank, scale, any_base]


def _push(jobs: Jobs, key: gr.State) -> None:
    """Fields and button of a push."""
    with gr.Row():
        repo = gr.Textbox(label="Push to", info="A repository of yours; made if it is not there",
                          placeholder="your-name/name")  # fmt: skip
        token = gr.Textbox(label="Token", info=SIGN_IN if has_sign_in() else TOKEN, type="password")
    public = gr.Checkbox(label="Public (default: private)")
    if has_sign_in():
        gr.LoginButton()
    send = gr.Button("Push to the hub")
    pushed = gr.HTML()

    def push(key: str, repo: str, token: str, public: bool, signed_in: gr.OAuthToken | None) -> tuple[Any, str]:
        given = token or ("" if signed_in is None else signed_in.token)
        try:
            if not key:
                raise NOTHING
            return pushed_html(jobs.push(key, repo or "", given, public=bool(public))), ""
        except MergeError as error:
            return error_html(error), ""

    def push_by_token(key: str, repo: str, token: str, public: bool) -> tuple[Any, str]:
        return push(key, repo, token, public, None)

    function = push if has_sign_in() else push_by_token
    send.click(
        function, [key, repo, token, public], [pushed, token],
        concurrency_id="job", concurrency_limit=1, api_visibility="private",
    )  # fmt: skip


def launch(**options: Any) -> None:
    """Serve the page with the limits of the environment; `options`: of Gradio's `launch`.

    Raises:
        RecipeError: a limit is not valid.
    """
    jobs = Jobs(Limits.from_environment())
    jobs.sweep_forever()
    given = {"css_paths": STYLE, "show_error": False, "ssr_mode": False, "run_history": False, "footer_links": []}
    build(jobs).launch(**given | options)
