"""The page that report and view are: one HTML file that brings its script, its charts and, in the report, its data.

What models wrote goes into it as JSON in which no `<` stands, and reaches the screen as text. A policy allows no script
but these, by their hashes, and no address but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from typing import Any

_PAGE = resources.files("creditflow.report") / "page"


def page(data: dict[str, Any], title: str) -> str:
    """The page. `data`: `{"live": true}` for one that asks its server, else all that it shows; JSON without NaN."""
    style, script, charts = (_read(name) for name in ("page.css", "page.js", "charts.min.js"))
    allowed = " ".join(f"'sha256-{_hash(text)}'" for text in (script, charts))
    connect = "'self'" if data.get("live") else "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src {connect}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"policy": policy, "title": html.escape(title), "style": style, "data": embedded}
    parts |= {"charts": charts, "script": script}
    # Cut at the marks and joined, so that no mark within a part is taken for one.
    return "".join(parts.get(piece, piece) for piece in _read("page.html").split("@"))


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
