"""The recipe's tasks as a verl data set: one row per task, not tokenized, because workflows write the prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from creditflow.data import Task
from creditflow.data.dataset_folders import Split
from creditflow.data.datasets import load_tasks, validation_files
from creditflow.engines.verl.recipe import KEY, read_run_handle
from creditflow.errors import ConfigError


class TaskDataset(Dataset[dict[str, Any]]):
    """The `data.custom_cls` of a run, with the recipe's tasks. `data_files`: `train` or `val`."""

    def __init__(
        self, data_files: str, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        if KEY not in config:
            raise ConfigError(f"data.{KEY}: missing; this data set is made by `creditflow train --engine verl`")
        recipe = read_run_handle(config).recipe
        data = recipe.config.data
        split: Split = "train" if data_files == "train" else "val"
        files = data.train_files if split == "train" else validation_files(data.train_files, data.val_files)
        tasks = load_tasks(files, recipe.folder, recipe.config.recipe, split)
        self.tasks = tasks[:max_samples] if max_samples >= 0 else tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One task in verl's columns, with its position as `index`."""
        return row_from_task(self.tasks[index], index)


def row_from_task(task: Task, index: int) -> dict[str, Any]:
    """Convert a task to verl's columns."""
    return {
        "index": index,
        "raw_prompt": list(task.prompt),
        "data_source": task.data_source,
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
        "extra_info": task.extra_info,
        "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # verl sizes a batch by its tensors
    }


def task_from_row(row: dict[str, Any]) -> Task:
    """Convert verl's columns to a task; the inverse of `row_from_task`."""
    return Task(
        data_source=str(row["data_source"]),
        prompt=tuple(dict(message) for message in row["raw_prompt"]),
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=dict(row["extra_info"]),
    )
