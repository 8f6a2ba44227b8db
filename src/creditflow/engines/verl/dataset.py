"""The recipe's tasks as a verl data set: one row per task, not tokenized, because workflows write the prompts."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.utils.data import Dataset

from creditflow.data.dataset_folders import Split
from creditflow.data.datasets import load_tasks, validation_files
from creditflow.engines.verl.recipe import read_run_handle


class TaskDataset(Dataset[dict[str, Any]]):
    """The `data.custom_cls` of a run, with the recipe's tasks. `data_files`: `train` or `val`."""

    def __init__(self, data_files: str, config: Any, max_samples: int = -1, **_: Any) -> None:
        recipe = read_run_handle(config).recipe
        data = recipe.config.data
        split: Split = "train" if data_files == "train" else "val"
        files = data.train_files if split == "train" else validation_files(data.train_files, data.val_files)
        tasks = load_tasks(files, recipe.folder, recipe.config.recipe, split)
        self.tasks = tasks[:max_samples] if max_samples >= 0 else tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One task and its position, in columns that verl requires."""
        task = pickle.dumps(self.tasks[index])  # TransferQueue, which stores unfinished tasks, would change objects
        size = torch.zeros(1, dtype=torch.uint8)  # verl sizes a batch by its tensors
        return {"index": index, "raw_prompt": task, "size": size}
