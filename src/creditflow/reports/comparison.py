"""Several runs side by side: settings, curves, agents, and the tasks that one run solves more often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from creditflow.reports.index import Index
from creditflow.reports.overview import curves, different, of_agents, settings
from creditflow.runs import Ledger

_TASKS = 25


def comparison(ledgers: Sequence[Ledger], indices: Sequence[Index]) -> dict[str, Any]:
    """Return `{runs: [{name, curves, agents}], settings: {key: values}}`; settings that differ alone."""
    runs = [
        {"name": name, "curves": curves(ledger), "agents": of_agents(index)}
        for name, ledger, index in zip(names_of(ledgers), ledgers, indices, strict=True)
    ]
    return {"runs": runs, "settings": different([settings(ledger) for ledger in ledgers])}


def names_of(ledgers: Sequence[Ledger]) -> list[str]:
    """The names of the runs' folders, with those of their parents where two are equal."""
    names = [ledger.path.resolve().name for ledger in ledgers]
    if len(set(names)) == len(names):
        return names
    return [f"{ledger.path.resolve().parent.name}/{name}" for ledger, name in zip(ledgers, names, strict=True)]


def tasks_apart(first: Index, other: Index) -> dict[str, Any]:
    """Return `{shared, tasks}`: tasks of both runs by the difference of their success rates, the largest first."""
    mine, its = first.tasks(), other.tasks()
    shared = [key for key in mine if key in its]
    shared.sort(key=lambda key: (-abs(its[key][1] - mine[key][1]), key))
    tasks = []
    for key in shared[:_TASKS]:
        newest = [index.of_task(key, 1)[0] for index in (first, other)]
        tasks.append(
            {
                "prompt": newest[0]["prompt"],
                "trajectories": [mine[key][0], its[key][0]],
                "ended_right": [mine[key][1], its[key][1]],
                "newest": [
                    {"trajectory_id": row["trajectory_id"], "training_step": row["training_step"]} for row in newest
                ],
            }
        )
    return {"shared": len(shared), "tasks": tasks}
