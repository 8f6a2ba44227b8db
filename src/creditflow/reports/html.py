"""The page of report and view: one HTML file with its script, its charts and, for the report, its data.

Texts of models are embedded as JSON without any `<`, and displayed as text. The content security policy allows only
the embedded scripts, by their hashes, and no address other than the page's.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from typing import Any

_PAGE = resources.files("creditflow.reports") / "page"


def page(data: dict[str, Any], title: str) -> str:
    """The page as HTML. `data`: `{"live": true}` for a page with a server, else all of its content, without NaN."""
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
    # Split at the marks and joined, so that a mark inside a part is not replaced.
    return "".join(parts.get(piece, piece) for piece in _read("page.html").split("@"))


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
