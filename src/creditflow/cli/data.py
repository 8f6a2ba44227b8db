"""`creditflow data`: convert published data sets to verl-schema Parquet."""

from __future__ import annotations

from pathlib import Path

from creditflow._utils.progress import Reporter
from creditflow.data.datasets import gsm8k_tasks, write_tasks
from creditflow.errors import DataError


def gsm8k(source: Path, out: Path, reporter: Reporter) -> None:
    """Convert GSM8K's published JSONL to verl's columns."""
    if out.suffix != ".parquet":
        raise DataError(f"--out: expected a name that ends with .parquet, got {out}")
    tasks = gsm8k_tasks(source)
    write_tasks(tasks, out)
    reporter.say(f"{out}: {len(tasks)} tasks")
