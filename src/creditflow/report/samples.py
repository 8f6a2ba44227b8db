"""The plays that a report shows: of those that ended right and of the others the ones in which most credit moved."""

from __future__ import annotations

from typing import Any

from creditflow.errors import DataError
from creditflow.ledger import Ledger
from creditflow.report.detail import Spelling, play_graph, step_detail
from creditflow.report.index import Index

_STEPS = 2000
"""Of all samples together: plays of thousands of steps would make a report that no browser opens."""
_TEXT = 2_000_000
"""Characters of all texts together."""


def samples(ledger: Ledger, index: Index, count: int) -> dict[str, Any]:
    """`{plays, graphs, steps}`: rows of the list, the graph of each, and each of their steps, by training step and id.

    From the newest training step that can be read; further ones where it has too few. Where the texts grow long, the
    last plays are left out.
    """
    chosen: list[dict[str, Any]] = []
    for step in sorted(index.taken, reverse=True):
        if len(chosen) >= count:
            break
        chosen += _of_step(index, step, count - len(chosen))
    spelling = Spelling(ledger)
    found: dict[str, Any] = {"plays": [], "graphs": {}, "steps": {}}
    recorded, written = None, 0
    for row in chosen:
        if recorded is None or recorded.step != row["training_step"]:
            try:
                recorded = ledger.read(row["training_step"])
            except DataError:
                continue  # it is named among what was set aside
        graph = play_graph(recorded, row["trajectory_id"])
        # Ids say which training step they are of in our engines; elsewhere two may have the same.
        details = {
            f"{recorded.step} {step['id']}": step_detail(recorded, step["id"], None, spelling)
            for step in graph["steps"]
        }
        size = sum(len(str(detail)) for detail in details.values())
        if found["plays"] and (written + size > _TEXT or len(found["steps"]) + len(details) > _STEPS):
            break
        written += size
        found["plays"].append(row)
        found["graphs"][f"{recorded.step} {row['trajectory_id']}"] = graph
        found["steps"] |= details
    return found


def _of_step(index: Index, step: int, count: int) -> list[dict[str, Any]]:
    return index.ask(
        """
        WITH flowed AS (
            SELECT trajectory_id, sum(abs(credit)) AS flowed FROM steps WHERE training_step = $1 GROUP BY trajectory_id
        ), ranked AS (
            SELECT p.* EXCLUDE (place, task_key), row_number() OVER (
                PARTITION BY coalesce(ended_right, false) ORDER BY flowed DESC NULLS LAST, place
            ) AS rank
            FROM plays p LEFT JOIN flowed USING (trajectory_id) WHERE training_step = $1
        )
        SELECT * EXCLUDE (rank) FROM ranked ORDER BY rank, ended_right LIMIT $2
        """,
        [step, count],
    )
