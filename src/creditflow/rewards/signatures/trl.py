"""The signature of TRL's reward functions: lists of prompts and completions, and the data set's columns as lists.

The lists have one element: a score depends on one text alone, so that it may be cached and computed anywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from creditflow.errors import RewardError
from creditflow.rewards.signatures.base import Notes, Signature, Subject
from creditflow.rewards.values import DetailedScore, NotApplicable, number_of, shown

_TRUTH = ("solution", "answer")
"""Columns that hold the truth in TRL's data sets. In data of verl it is `ground_truth`."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of transformers' `TrainerState` that a recorded trajectory determines."""

    global_step: int
    """Updates of the policy before it sampled the text."""


def _offer(subject: Subject, notes: Notes) -> dict[str, Any]:
    columns = {name: [copy.deepcopy(value)] for name, value in subject.columns.items()}
    truth = subject.trajectory.task.ground_truth
    steps = subject.trajectory.steps if subject.step is None else [subject.step]
    return {
        **({} if truth is None else {name: [copy.deepcopy(truth)] for name in _TRUTH}),
        **columns,
        "prompts": [subject.prompt],
        "completions": [subject.completion],
        "completion_ids": [subject.completion_ids],
        "trainer_state": TrainerState(max((step.policy_version for step in steps), default=0)),
        "log_extra": partial(_log_extra, notes),
        "log_metric": partial(_log_metric, notes),
    }


def _log_extra(notes: Notes, column: str, values: Sequence[Any]) -> None:
    notes.texts[str(column)] = shown(values[0]) if len(values) == 1 else shown(list(values))


def _log_metric(notes: Notes, name: str, value: float) -> None:
    if (number := number_of(value)) is not None:
        notes.numbers[str(name)] = number


def _read(returned: Any, notes: Notes) -> Any:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple) or len(values) != 1:
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        raise RewardError(f"expected a list with one reward, or None, for one completion, got {got}")
    value = values[0].tolist() if hasattr(values[0], "tolist") else values[0]
    if value is None:
        return NotApplicable()
    if number_of(value) is None:
        raise RewardError(f"expected a finite number or None for a completion, got {shown(value)}")
    if not notes.texts and not notes.numbers:
        return value
    reason = "; ".join(f"{name}: {text}" for name, text in notes.texts.items())
    return DetailedScore(value, reason=reason, numbers=tuple(notes.numbers.items()))


SIGNATURES = (
    Signature(
        "trl",
        "(prompts, completions, **columns)",
        frozenset({"prompts", "completions", "completion_ids"}),
        _offer,
        _read,
    ),
)
