"""`creditflow data`: published data sets as verl-schema Parquet."""

from __future__ import annotations

from pathlib import Path

from creditflow.data import gsm8k_tasks, write_tasks
from creditflow.errors import DataError
from creditflow.progress import Reporter


def gsm8k(source: Path, out: Path, reporter: Reporter) -> None:
    """GSM8K's JSONL as published, turned into verl's columns."""
    if out.suffix != ".parquet":
        raise DataError(f"--out: expected a name that ends with .parquet, got {out}")
    tasks = gsm8k_tasks(source)
    write_tasks(tasks, out)
    reporter.say(f"{out}: {len(tasks)} tasks")
