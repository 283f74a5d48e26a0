"""The report as one HTML page."""

from __future__ import annotations

from actmat.extras.pages.html.report import render_html, write_html

__all__ = ["render_html", "write_html"]
