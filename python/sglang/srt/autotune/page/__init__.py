"""`GET /autotune` and `sglang autotune report --html`: a report as one page that needs nothing else.

No script, no outside asset; every value is escaped. It reads on a phone, in the dark, and on paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.autotune.page import sections
from sglang.srt.autotune.page.markup import Html, join, tag
from sglang.srt.autotune.page.style import CSS

#: Seconds after which a page of a start that goes on loads itself again.
REFRESH_S = 2

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_page(report: Mapping[str, Any]) -> str:
    """The page of ``report``: the stage's document, or what stands in its place while the stage runs.

    Fields that are missing, as in a report of an engine that is starting, leave their part of the page out.
    """
    running = report.get("status") in ("pending", "running")
    body = sections.progress(report) if running else _finished(report)
    head = [
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        Html(f'<meta http-equiv="refresh" content="{REFRESH_S}">') if running else Html(""),
        tag("title", f"Autotune: {report.get('status', 'unknown')}"),
        tag("style", Html(CSS)),
    ]
    page = tag("html", tag("head", *head), tag("body", tag("main", body)), lang="en")
    return f"<!doctype html>\n{page}\n"


def _finished(report: Mapping[str, Any]) -> Html:
    return join(
        sections.headline(report),
        sections.attention(report),
        sections.times(report),
        sections.winners(report),
        sections.megamoe(report),
        sections.plan(report),
        sections.records(report),
        sections.ranks(report),
        sections.environment(report),
        sections.document(report),
    )
