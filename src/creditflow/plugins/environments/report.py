"""The metrics of self-play, and the table of ratings in the report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from creditflow.monitoring.catalog import Metric
from creditflow.reports.plugin_tables import PluginTable

METRICS = [
    Metric(
        "pool/<policy>/size", "snapshots", "local", "snapshots in a pool of earlier versions (`policies.<policy>.pool`)"
    ),
    Metric(
        "pool/<policy>/games",
        "games",
        "local",
        "trajectories of the training step in which the learner met a snapshot and both have an outcome",
    ),
    Metric(
        "pool/<policy>/win_rate", "share", "local", "the learner's points in these games: 1 for a win, 1/2 for a draw"
    ),
    Metric(
        "pool/<policy>/rating",
        "Elo",
        "local",
        "the learner's rating since its last snapshot (Bradley-Terry, from all games of the run; the policy before "
        "training has 0)",
    ),
    Metric(
        "pool/<policy>/rating/<version>",
        "Elo",
        "local",
        "the rating of the snapshot with this version of the policy, if it has played",
    ),
]


def ratings(metrics: Sequence[Mapping[str, Any]]) -> PluginTable | None:
    """The ratings of each pool at the last training step with games; None without games."""
    newest: dict[str, Mapping[str, Any]] = {}
    for row in metrics:
        newest |= {match[1]: row for name in row if (match := re.fullmatch("pool/([^/]+)/rating", name))}
    if not newest:
        return None
    rows: list[list[str]] = []
    for pool, row in newest.items():
        prefix = f"pool/{pool}/rating/"
        snapshots = {int(key.removeprefix(prefix)): value for key, value in row.items() if key.startswith(prefix)}
        rows.append([f"{pool}: the learner now", f"{row[f'pool/{pool}/rating']:,.0f}"])
        rows += [[f"{pool}: version {version}", f"{snapshots[version]:,.0f}"] for version in sorted(snapshots)]
    curves = {pool: f"pool/{pool}/rating" for pool in newest}
    columns = [("player", ""), ("rating [Elo]", "n")]
    return PluginTable("Ratings in self-play", columns, rows, "rating of the learner", "Elo", curves)
