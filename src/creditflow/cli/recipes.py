"""`creditflow recipes`: list the shipped recipes."""

from __future__ import annotations

import csv

from creditflow.config.loading import RECIPES
from creditflow.reports.text import aligned

EXTRA = "report"


def recipes() -> None:
    """List the shipped recipes, with team, model and time.

    check, train, eval and compare take their names. The time is that of training on one core, without evaluations. A
    model of 0.3 M parameters is made and warmed up at its first use, which takes some minutes more.

    Example: creditflow recipes
    """
    with (RECIPES / "shipped.csv").open(encoding="utf-8", newline="") as file:
        shipped = list(csv.DictReader(file))
    rows = [(row["recipe"], row["model"], row["time"]) for row in shipped]
    head, *lines = aligned([("recipe", "model", "time on one core"), *rows], left={0, 1})
    print(head)
    for line, row in zip(lines, shipped, strict=True):
        print(f"{line}\n    {row['team']}: {row['shows']}")
    print("\nnext:\n  creditflow check arithmetic_chain")
