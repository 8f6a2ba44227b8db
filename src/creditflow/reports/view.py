"""The live view: the report's page with a local server. Reads the folder of a run and writes nothing there.

Only requests with an expected Host header are answered, so that a foreign page that resolves to this address (DNS
rebinding) gets no data.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import duckdb
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.middleware.base import RequestResponseEndpoint

from creditflow._utils.files import json_ready
from creditflow._utils.loopback import bound, expect_loopback, host_name, hosts_of, url_of
from creditflow.errors import BatchError, CreditflowError, InputError, UnknownIdError, first_line
from creditflow.reports.detail import Spelling, step_detail, trajectory_graph
from creditflow.reports.findings import as_json, findings, tables_of
from creditflow.reports.html import page
from creditflow.reports.index import Filter, Index
from creditflow.reports.overview import overview
from creditflow.reports.search import search
from creditflow.runs import Ledger, Recorded

_EVERY = 1.0
"""Seconds between two reads of the folder."""
_MOST = 200
"""Maximum trajectories per page."""
_FIRST_SECONDS = 10.0
"""Maximum wait of a page for the newest training step of a run that has just been opened."""
_LAST_SECONDS = 10.0
"""Maximum wait for the end of an unfinished read at the end."""
_KEPT = 2
"""Training steps kept in memory."""


class Watched:
    """A run's folder with its index, which a separate thread keeps up to date."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = Ledger.open(path)
        self.index = Index(self.ledger)
        self._stop = threading.Event()
        self._overview_lock = threading.Lock()
        self._read = lru_cache(maxsize=_KEPT)(lambda step, written: self.ledger.read(step))
        self.spelling = Spelling(self.ledger)
        self._overview: tuple[Any, dict[str, Any]] = (None, {})
        """The state of the files, and the overview computed for it."""
        self.trouble: str | None = None
        """The error of the last read of the folder; None if it succeeded."""

    def follow(self) -> None:
        """Read new files until `stop`.

        A file may vanish during a read if the run is being rolled back; the next read recovers. A lasting error is
        shown in the overview.
        """
        while not self._stop.is_set():
            try:
                self.look()
                self.trouble = None
            except (OSError, CreditflowError, duckdb.Error) as error:
                self.trouble = first_line(error)
            finally:
                self.index.has_read.set()  # after an error, pages do not wait
            self._stop.wait(_EVERY)

    def look(self) -> None:
        """Read new files once."""
        self.ledger = Ledger.open(self.path)
        self.index.refresh(self.ledger)

    def stop(self) -> None:
        """End `follow`."""
        self._stop.set()
        self.index.ends.set()

    def recorded(self, step: int) -> Recorded:
        """A training step; the last few requested ones are cached.

        Raises InputError if it is not on record, UnknownIdError if its file has just been removed.
        """
        try:
            # A rollback may have replaced the file.
            return self._read(step, self.ledger.file(step).stat().st_mtime_ns)
        except FileNotFoundError as error:
            raise UnknownIdError(f"there is no training step {step} in this run") from error

    def overview(self) -> dict[str, Any]:
        """The overview, computed again only after a change."""
        files = [self.path / name for name in ("metrics.jsonl", "events.jsonl")]
        with self._overview_lock:
            ledger = self.ledger
            now = (
                frozenset(self.index.taken.items()),
                frozenset(self.index.damaged),
                ledger.steps,
                ledger.torn,
                *(file.stat().st_size for file in files if file.is_file()),
            )
            if self._overview[0] != now:
                found = as_json(findings(tables_of(ledger, self.index)))
                self._overview = (now, overview(ledger, self.index) | {"findings": found})
            content = self._overview[1]
            if (trouble := self.trouble) is None:
                return content
            return {**content, "left_out": [f"this page may be outdated: {trouble}", *content["left_out"]]}


def application(watched: Watched, hosts: tuple[str, ...] | None) -> FastAPI:
    """The server's application. `hosts`: allowed names in the Host header; None for any."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, default_response_class=_AsciiJson)

    @app.middleware("http")
    async def guarded(request: Request, call_next: RequestResponseEndpoint) -> Response:
        named = host_name(request.headers.get("host", ""))
        if hosts is not None and named not in hosts:
            return JSONResponse({"detail": f"this server is {' or '.join(hosts)}, not {named}"}, status_code=421)
        response = await call_next(request)
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(CreditflowError)
    async def refused(request: Request, error: Exception) -> Response:
        status = 500
        if isinstance(error, InputError | BatchError):
            status = 404 if isinstance(error, UnknownIdError) else 400
        return JSONResponse({"detail": str(error)}, status_code=status)

    @app.exception_handler(OSError)
    @app.exception_handler(duckdb.Error)
    async def unavailable(request: Request, error: Exception) -> Response:
        """A step file was removed by a rollback, or damaged, after its index was read; or the disk is full."""
        return JSONResponse(
            {"detail": f"the run's files could not be read; if they just changed, try again: {error}"},
            status_code=503,
        )

    @app.get("/", response_class=HTMLResponse)
    def index() -> str:
        return page({"live": True}, f"creditflow: {watched.path.resolve().name}")

    @app.get("/api/overview")
    def whole() -> dict[str, Any]:
        return watched.overview()

    @app.get("/api/trajectories")
    def trajectories(where: Where, offset: Small = 0, limit: int = Query(25, ge=1, le=_MOST)) -> dict[str, Any]:
        watched.index.has_read.wait(_FIRST_SECONDS)
        return watched.index.page(where, offset, limit)

    @app.get("/api/search")
    def matches(
        where: Where,
        text: str,
        begin_step: Small | None = None,
        begin_number: int = Query(-1, ge=-1, le=2**63 - 1),
        limit: int = Query(25, ge=1, le=_MOST),
    ) -> dict[str, Any]:
        watched.index.has_read.wait(_FIRST_SECONDS)
        return search(watched.index, where, text, None if begin_step is None else (begin_step, begin_number), limit)

    @app.get("/api/trajectory")
    def trajectory(trajectory_id: str, training_step: Small) -> dict[str, Any]:
        return trajectory_graph(watched.recorded(training_step), trajectory_id)

    @app.get("/api/step")
    def step(step_id: str, training_step: Small, token: Small | None = None) -> dict[str, Any]:
        return step_detail(watched.recorded(training_step), step_id, token, watched.spelling)

    return app


Where = Annotated[Filter, Depends()]
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
Small = Annotated[int, Query(ge=0, le=2**31 - 1)]


class _AsciiJson(JSONResponse):
    """ASCII JSON: texts that UTF-8 cannot encode are preserved, and non-finite numbers become null."""

    def render(self, content: Any) -> bytes:
        return json.dumps(json_ready(content), allow_nan=False, separators=(",", ":")).encode()


def serve(path: Path, host: str, port: int, *, remote: bool, say: Callable[[str], None]) -> None:
    """Serve until interrupted. Raises InputError for a taken port, or a host open to others unless `remote`."""
    import uvicorn

    expect_loopback(host, "reads the whole run", remote=remote)
    watched = Watched(path)
    socket = bound(host, port)
    follower = threading.Thread(target=watched.follow, daemon=True)
    follower.start()
    try:
        say(f"view: {url_of(host, socket)}/ (ends with Ctrl-C)")
        app = application(watched, hosts_of(host))
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[socket])
    finally:
        socket.close()
        watched.stop()
        follower.join(_LAST_SECONDS)
        if not follower.is_alive():
            watched.index.close()
