"""`actmat ui`: merge in a browser page."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.listing import command


@command("choose", "ended by Ctrl-C", "the page cannot be opened on that port")
def ui(
    port: Annotated[int, typer.Option("--port", help="Port on this machine; 0: any free port.", min=0)] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Open a page to plan, merge, try and push.

    Only this machine can open the page, at an address with a secret token.
    Ctrl-C ends it; a running merge stops and keeps its finished tensors.
    On a remote machine: ssh -L 8000:127.0.0.1:8000 HOST actmat ui --port 8000
    """
    from actmat.cli.screen import console, print_result
    from actmat.errors import MergeError

    if importlib.util.find_spec("gradio") is None:
        raise MergeError("The page needs Gradio, which is not installed. Fix: pip install 'gradio>=6.31'")
    from actmat_app.serving import local_server

    with local_server(port) as (url, server, listening):
        if json:
            print_result("ui", {"url": url, "port": listening.getsockname()[1]})
        else:
            console.print(url, soft_wrap=True)
        if not json and not quiet:
            console.print("Ctrl-C ends this page and stops its merge.")
        sys.stdout.flush()  # a program reading a pipe waits for the address
        if browser:
            import webbrowser

            threading.Timer(1.0, webbrowser.open, args=(url,)).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
