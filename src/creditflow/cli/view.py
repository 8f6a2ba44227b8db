"""`creditflow view`: show a run live in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from creditflow._utils.progress import Reporter
from creditflow.cli._options import AllowRemote, Host
from creditflow.errors import InputError

MOST_RUNS = 2


def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="The folder of a run, and of a second one to compare.")
    ],
    *,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8321,
    allow_remote: AllowRemote = False,
) -> None:
    """Show one or two runs in a browser, live while they train.

    The page is that of `creditflow report`, with all trajectories, a search and an export. Writes nothing to the run.
    """
    if len(runs) > MOST_RUNS:
        raise InputError(f"view: expected at most {MOST_RUNS} runs, got {len(runs)}")
    try:
        from creditflow.reports.view import serve
    except ModuleNotFoundError as error:
        raise InputError(f"view: {error.name} is not installed: pip install 'creditflow[report]'") from error
    serve(runs, host, port, remote=allow_remote, say=Reporter().say)
