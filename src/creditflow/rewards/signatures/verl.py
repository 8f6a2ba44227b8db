"""The signatures of verl's `compute_score`: of one text, and of a batch of texts (the reward manager `batch`)."""

from __future__ import annotations

import copy
from typing import Any

from creditflow.errors import RewardError
from creditflow.rewards.signatures.base import Notes, Signature, Subject, one_score

_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


def _offer(subject: Subject, notes: Notes) -> dict[str, Any]:
    task, step = subject.trajectory.task, subject.step
    exchanges = len(subject.trajectory.steps) if step is None else step.turn + 1
    # verl counts messages, of user and assistant alike, and adds both entries itself. Functions may write to the dict.
    extra_info = copy.deepcopy(task.extra_info) | {"num_turns": 2 * exchanges, "rollout_reward_scores": {}}
    return dict(
        zip(_NAMES, (task.data_source, subject.text, copy.deepcopy(task.ground_truth), extra_info), strict=True)
    )


def _offer_batch(subject: Subject, notes: Notes) -> dict[str, Any]:
    return {f"{name}s": [value] for name, value in _offer(subject, notes).items()}


def _read_batch(returned: Any, notes: Notes) -> Any:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple) or len(values) != 1:
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        raise RewardError(f"expected a list with one score for one text, got {got}")
    return one_score(values[0], notes)


SIGNATURES = (
    Signature(
        "verl",
        "(data_source, solution_str, ground_truth, extra_info)",
        frozenset({"solution_str"}),
        _offer,
        one_score,
        frozenset(_NAMES),
    ),
    Signature(
        "verl_batch",
        "(data_sources, solution_strs, ground_truths, extra_infos)",
        frozenset({"solution_strs"}),
        _offer_batch,
        _read_batch,
        frozenset(f"{name}s" for name in _NAMES),
    ),
)
