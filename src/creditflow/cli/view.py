"""`creditflow view`: show a run live in a browser."""

from __future__ import annotations

from pathlib import Path

from creditflow._utils.progress import Reporter
from creditflow.errors import InputError


def view(path: Path, host: str, port: int, *, remote: bool, reporter: Reporter) -> None:
    """Serve the run's folder until interrupted."""
    try:
        from creditflow.reports.view import serve
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed: pip install 'creditflow[report]'") from error
    serve(path, host, port, remote=remote, say=reporter.say)
