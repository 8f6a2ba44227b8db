"""Tasks from questions with other columns than verl's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from creditflow import Task

QUESTIONS = Path(__file__).with_name("questions.jsonl")


def tasks(split: str, recipe: dict[str, Any]) -> Iterator[Task]:
    """Yield a task for each question; one question in `hold_out_every` is held out for validation."""
    for k, line in enumerate(QUESTIONS.read_text().splitlines()):
        row = json.loads(line)
        held_out = k % recipe["hold_out_every"] == 0
        if held_out == (split == "val"):
            yield Task(
                data_source="questions",
                prompt=({"role": "user", "content": row["question"]},),
                ground_truth=str(row["answer"]),
                extra_info={"index": k, "topic": row["topic"]},
            )
