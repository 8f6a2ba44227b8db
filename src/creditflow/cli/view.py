"""`creditflow view`: show a run live in a browser."""

from __future__ import annotations

import signal

from creditflow._utils.progress import Reporter
from creditflow.cli._options import AllowRemote, Host, Port, Run

EXTRA = "report"


def view(
    run: Run,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8321,
    allow_remote: AllowRemote = False,
) -> None:
    """Show a run in a browser, live while it trains.

    The page is that of `creditflow report`, with all trajectories and a search. Writes nothing to the run.

    Example: creditflow view runs/RUN
    """
    from creditflow.reports.view import serve

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that temporary files are removed
    serve(run, host, port, remote=allow_remote, say=Reporter().say)
