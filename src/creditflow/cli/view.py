"""`creditflow view`: show a run live in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from creditflow._utils.progress import Reporter
from creditflow.cli._options import AllowRemote, Host, Run

EXTRA = "report"


def view(
    run: Run,
    *,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8321,
    allow_remote: AllowRemote = False,
) -> None:
    """Show a run in a browser, live while it trains.

    The page is that of `creditflow report`, with all trajectories and a search. Writes nothing to the run.
    """
    from creditflow.reports.view import serve

    serve(run, host, port, remote=allow_remote, say=Reporter().say)
