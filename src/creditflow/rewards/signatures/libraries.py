"""The signatures of the reward functions of verl, TRL and verifiers, and how a function shows which it has."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from creditflow.data import Message
from creditflow.errors import RewardError
from creditflow.rewards.signatures.base import Notes, Signature, Subject, is_required
from creditflow.rewards.values import DetailedScore, NotApplicable, number_of, plain, shown


def _one_score(returned: Any, notes: Notes) -> Any:
    """A number, or a dict with the number under `score`. Raises RewardError for a list and for another dict."""
    returned = plain(returned)
    if isinstance(returned, Mapping) and "score" not in returned:
        names = ", ".join(str(name)[:40] for name in list(returned)[:8]) or "no key"
        raise RewardError(f"expected a number, or a dict with `score`, got a dict with {names}")
    if isinstance(returned, list | tuple):
        raise RewardError(f"expected a number, or a dict with `score`, got a {type(returned).__name__}")
    return returned


def _only(returned: Any, expected: str) -> Any:
    """The element of a list of one. Raises RewardError for anything else."""
    values = plain(returned)
    if not isinstance(values, list | tuple) or len(values) != 1:
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        raise RewardError(f"expected {expected}, got {got}")
    return plain(values[0])


# ---- verl: `compute_score` of one text, and of a batch of texts (the reward manager `batch`)

_VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


def _offer_verl(subject: Subject, notes: Notes) -> dict[str, Any]:
    task, step = subject.trajectory.task, subject.step
    exchanges = len(subject.trajectory.steps) if step is None else step.turn + 1
    # verl counts messages, of user and assistant alike, and adds both entries itself. Functions may write to the dict.
    extra_info = copy.deepcopy(task.extra_info) | {"num_turns": 2 * exchanges, "rollout_reward_scores": {}}
    values = (task.data_source, subject.text, copy.deepcopy(task.ground_truth), extra_info)
    return dict(zip(_VERL_NAMES, values, strict=True))


def _offer_verl_batch(subject: Subject, notes: Notes) -> dict[str, Any]:
    return {f"{name}s": [value] for name, value in _offer_verl(subject, notes).items()}


def _read_verl_batch(returned: Any, notes: Notes) -> Any:
    return _one_score(_only(returned, "a list with one score for one text"), notes)


# ---- TRL: lists of prompts and completions, and the data set's columns as lists. The lists have one element: a score
# depends on one text alone, so that it may be cached and computed anywhere.

_TRL_TRUTH = ("solution", "answer")
"""Columns that hold the truth in TRL's data sets. In data of verl it is `ground_truth`."""


def _offer_trl(subject: Subject, notes: Notes) -> dict[str, Any]:
    columns = {name: [copy.deepcopy(value)] for name, value in subject.columns.items()}
    truth = subject.trajectory.task.ground_truth
    steps = subject.trajectory.steps if subject.step is None else [subject.step]
    return {
        **({} if truth is None else {name: [copy.deepcopy(truth)] for name in _TRL_TRUTH}),
        **columns,
        "prompts": [subject.prompt],
        "completions": [subject.completion],
        "completion_ids": [subject.completion_ids],
        # The part of transformers' `TrainerState` that a recorded trajectory determines: updates before the sampling.
        "trainer_state": SimpleNamespace(global_step=max((step.policy_version for step in steps), default=0)),
        "log_extra": partial(_log_extra, notes),
        "log_metric": partial(_log_metric, notes),
    }


def _log_extra(notes: Notes, column: str, values: Sequence[Any]) -> None:
    notes.texts[str(column)] = shown(values[0]) if len(values) == 1 else shown(list(values))


def _log_metric(notes: Notes, name: str, value: float) -> None:
    if (number := number_of(value)) is not None:
        notes.numbers[str(name)] = number


def _read_trl(returned: Any, notes: Notes) -> Any:
    value = _only(returned, "a list with one reward, or None, for one completion")
    if value is None:
        return NotApplicable()
    if number_of(value) is None:
        raise RewardError(f"expected a finite number or None for a completion, got {shown(value)}")
    reason = "; ".join(f"{name}: {text}" for name, text in notes.texts.items())
    return DetailedScore(value, reason=reason, numbers=tuple(notes.numbers.items()))


# ---- verifiers: functions of a rubric, with any of its names, `completion` and `state` among them


class PlainParser:
    """The default `parser`: the text itself, or that of the last message of an assistant."""

    def parse(self, text: str) -> str:
        """Return the text."""
        return text

    def parse_answer(self, completion: str | list[Message]) -> str | None:
        """Return the text of a completion; None if no assistant has spoken."""
        if isinstance(completion, str):
            return self.parse(completion)
        spoken = [str(said.get("content") or "") for said in completion if said.get("role") == "assistant"]
        return self.parse(spoken[-1]) if spoken else None


def _offer_verifiers(subject: Subject, notes: Notes) -> dict[str, Any]:
    trajectory, columns = subject.trajectory, copy.deepcopy(subject.columns)
    truth = columns["ground_truth"]
    named = {
        "prompt": subject.prompt,
        "completion": subject.completion,
        "answer": "" if truth is None else truth,
        "info": _info(columns),
        "task": columns.get("task", columns["data_source"]),
    }
    recorded = [
        {"agent": step.agent, "prompt": step.prompt, "completion": step.response, "reward": None, "advantage": None}
        for step in trajectory.steps
    ]
    state = {**copy.deepcopy(trajectory.info), **named, "trajectory": recorded}
    return {**columns, **named, "state": state, "parser": PlainParser()}


def _info(columns: dict[str, Any]) -> Any:
    """The column `info`, an object or its JSON text; without one, all columns of `extra_info`."""
    info = columns.get("info")
    if isinstance(info, str):
        try:
            return json.loads(info)
        except ValueError:
            return info
    return info if info is not None else {k: v for k, v in columns.items() if k not in ("data_source", "ground_truth")}


_ALL = (
    Signature(
        "verl",
        "(data_source, solution_str, ground_truth, extra_info)",
        frozenset({"solution_str"}),
        _offer_verl,
        _one_score,
        offered=frozenset(_VERL_NAMES),
    ),
    Signature(
        "verl_batch",
        "(data_sources, solution_strs, ground_truths, extra_infos)",
        frozenset({"solution_strs"}),
        _offer_verl_batch,
        _read_verl_batch,
        offered=frozenset(f"{name}s" for name in _VERL_NAMES),
    ),
    Signature(
        "trl",
        "(prompts, completions, **columns)",
        frozenset({"prompts", "completions", "completion_ids"}),
        _offer_trl,
        _read_trl,
    ),
    Signature(
        "verifiers",
        "(prompt, completion, answer, state, info, task, parser)",
        frozenset({"completion", "state"}),
        _offer_verifiers,
        _one_score,
        objects=frozenset({"parser"}),
    ),
)
SIGNATURES: Mapping[str, Signature] = {signature.name: signature for signature in _ALL}
"""The signatures by name."""
_NATIVE = frozenset({"step", "trajectory"})
_GROUP = frozenset({"states", "infos"})
"""Parameters of a group function of verifiers, which compares several rollouts."""


def recognised(parameters: Sequence[inspect.Parameter], key: str) -> Signature | None:
    """The signature of a function; None if it has none of these and may be one of creditflow.

    Raises RewardError for an ambiguous signature, and for a function that compares several texts.
    """
    names = {parameter.name for parameter in parameters}
    required = {parameter.name for parameter in parameters if is_required(parameter)}
    fitting = [candidate for candidate in SIGNATURES.values() if candidate.marks & names]
    if not fitting or (required & _NATIVE and not any(candidate.marks & required for candidate in fitting)):
        return None
    takes = f"it takes ({', '.join(parameter.name for parameter in parameters)})"
    if group := sorted(_GROUP & names):
        raise RewardError(
            f"{key}: expected a function of one text, got one of several: {group[0]!r} is a parameter of group "
            f"functions of verifiers; set signature: trl if it is a column of the data set; {takes}"
        )
    if len(fitting) > 1 or _NATIVE & names:
        options = " or ".join(candidate.name for candidate in fitting)
        native = ", or decorate it with @reward or @outcome" if _NATIVE & names else ""
        raise RewardError(f"{key}: ambiguous parameters: set signature: {options}{native}; {takes}")
    return fitting[0]
