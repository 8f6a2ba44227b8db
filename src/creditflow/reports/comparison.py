"""Several runs side by side: the settings that differ, curves and agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from creditflow.reports.index import Index
from creditflow.reports.overview import curves, different, of_agents, settings
from creditflow.runs import Ledger


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
