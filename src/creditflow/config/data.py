"""The section `data`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt

from creditflow._utils.sections import Section, Share, Text, expected

_Files = Annotated[
    Text | list[Text] | None,
    expected("a path, a list of paths, file.py:function, or an address such as reasoning-gym://..."),
]


class CurriculumConfig(Section):
    """Levels of tasks that follow the success at them.

    A task's level is its `extra_info.level`; its family is its `data_source`.
    """

    raise_at: Share = 0.7
    """Mean success at which the next level of a family follows."""
    lower_at: Share = 0.0
    """Mean success below which the level before follows. 0: never."""
    window: PositiveInt = 32
    """Tasks of the current level over which success is averaged."""


class DataConfig(Section):
    """Data sets, batch sizes and length limits."""

    train_files: _Files = None
    """One path or a list, with verl's columns: `.parquet`, `.jsonl` or `.arrow` files, or folders of them or of
    Hugging Face's `save_to_disk`. Or `file.py:function` that makes the tasks, or `reasoning-gym://family?option=value`
    (a list of these may have `weight=`), or the address of a plug-in's tasks. Default: the address in `team.workflow`,
    if it has tasks."""
    val_files: _Files = None
    """The same, for evaluation. Default: `data.train_files`, of which a function may return other tasks for split=val,
    and a folder may have a validation or test split."""
    train_batch_size: PositiveInt = 16
    """Tasks per training step, each with `actor_rollout_ref.rollout.n` rollouts."""
    val_max_samples: Annotated[Literal[-1] | PositiveInt, expected("1 or more, or -1 for all")] = -1
    """Number of tasks to evaluate on, from the first; -1: all."""
    max_prompt_length: PositiveInt = 1024
    """Tokens; a longer prompt ends its trajectory as `truncated`."""
    max_response_length: PositiveInt = 512
    """Tokens per step; a response that reaches it is `truncated`."""
    curriculum: CurriculumConfig | None = None
    """Draw the tasks of each family from one level, which rises with success. Default: draw from all tasks."""
    shuffle: bool = True
    """Draw the tasks of each epoch in a random order."""
    seed: NonNegativeInt = 0
    """Seed of the run; it determines the order of the data and the rollouts."""
