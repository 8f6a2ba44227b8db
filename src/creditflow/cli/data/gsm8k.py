"""`creditflow data gsm8k`: convert GSM8K to tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from creditflow._utils.progress import Reporter
from creditflow.errors import DataError
from creditflow.reports.text import counted


def gsm8k(
    source: Annotated[Path, typer.Option("--from", metavar="FILE", help="GSM8K's JSONL file, as published.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The Parquet file to write.")],
) -> None:
    """Convert GSM8K, questions and answers, to tasks."""
    from creditflow.data.datasets import load_tasks, write_tasks

    if out.suffix != ".parquet":
        raise DataError(f"--out: expected a name that ends with .parquet, got {out}")
    if source.suffix != ".jsonl" or not source.is_file():
        raise DataError(f"--from: expected GSM8K's .jsonl file, got {source}")
    tasks = load_tasks(str(source.absolute()), Path(), {}, "train")
    write_tasks(tasks, out)
    Reporter().say(f"{out}: {counted(len(tasks), 'task')}")
