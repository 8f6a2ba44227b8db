"""The plays that a report shows: of those that ended right and of the others the ones in which most credit moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from creditflow.errors import DataError, first_line
from creditflow.ledger import Ledger
from creditflow.report.detail import Spelling, play_graph, step_detail
from creditflow.report.index import Index

_STEPS = 2000
"""Of all samples together: plays of thousands of steps would make a report that no browser opens."""
_TEXT = 2_000_000
"""Characters of all texts together."""


def samples(ledger: Ledger, index: Index, count: int) -> dict[str, Any]:
    """`{plays, graphs, steps, left_out}`: rows of the list, the graph of each, their steps, and what is missing.

    From the newest training step that can be read; further ones where it has too few. Where the texts grow long, the
    last plays are left out. `left_out` has one sentence for each loss that the overview does not state.
    """
    found: dict[str, Any] = {"plays": [], "graphs": {}, "steps": {}, "left_out": []}
    spelling = Spelling(ledger)
    written = 0
    for step in sorted(index.taken, reverse=True):
        wanted = count - len(found["plays"])
        if wanted <= 0:
            break
        if step in index.reasons:  # the overview states it
            continue
        try:
            recorded = ledger.read(step)
        except DataError as error:
            found["left_out"].append(f"no sample is from {ledger.file(step).name}: {first_line(error)}")
            continue
        rows = _of_step(index, step, wanted)
        for done, row in enumerate(rows):
            graph = play_graph(recorded, row["trajectory_id"])
            # Ids say which training step they are of in our engines; elsewhere two may have the same.
            details = {
                f"{recorded.step} {step['id']}": step_detail(recorded, step["id"], None, spelling)
                for step in graph["steps"]
            }
            size = sum(len(str(detail)) for detail in details.values())
            if found["plays"] and (written + size > _TEXT or len(found["steps"]) + len(details) > _STEPS):
                found["left_out"].append(
                    f"{len(rows) - done} of {len(found['plays']) + len(rows) - done} sample trajectories are left out: "
                    "they are long; creditflow view shows all"
                )
                return found | {"left_out": [*found["left_out"], *_unspelled(found["steps"])]}
            written += size
            found["plays"].append(row)
            found["graphs"][f"{recorded.step} {row['trajectory_id']}"] = graph
            found["steps"] |= details
    return found | {"left_out": [*found["left_out"], *_unspelled(found["steps"])]}


def _unspelled(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tokens that the page shows by their ids, because no tokenizer was found, by policy."""
    policies = dict.fromkeys(step["policy"] for step in steps.values() if step["tokens"] and not step["spelled"])
    return [
        f"tokens of policy {policy!r} are shown as ids: no readable tokenizer.json is in the run's checkpoints"
        for policy in policies
    ]


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
