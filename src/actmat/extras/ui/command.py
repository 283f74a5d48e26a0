"""`actmat ui`: a page in the browser to merge with."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.listing import command


@command("choose", "ended by Ctrl-C", "the page cannot be opened on that port")
def ui(
    port: Annotated[int, typer.Option("--port", help="Port on this machine; 0: one that is free.", min=0)] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Open a page to choose models, see the plan as you type, merge, watch and compare.

    Only this machine can open the page, at an address with a secret token.
    Nothing is sent elsewhere, except your searches on the hub. The page shows
    the recipe and the command for everything that it does. Ctrl-C ends it; a
    running merge stops and keeps its finished tensors.
    On a remote machine: ssh -L 8000:127.0.0.1:8000 HOST actmat ui --port 8000
    """
    from actmat.cli.catalogue import read_catalogue
    from actmat.cli.screen import console, print_result
    from actmat.extras.ui.server import Server

    with Server(list(read_catalogue().values()), port) as server:
        if json:
            print_result("ui", {"url": server.url, "port": server.port})
        else:
            console.print(server.url, soft_wrap=True)
        if not json and not quiet:
            console.print("Ctrl-C ends this page and stops its merge.")
        sys.stdout.flush()  # who reads it through a pipe waits for the address
        if browser:
            import webbrowser

            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.run()
