"""The signature of the functions of a rubric of verifiers: any of its names, `completion` and `state` among them."""

from __future__ import annotations

import copy
import json
from typing import Any

from creditflow.data import Message
from creditflow.rewards.signatures.base import Notes, Signature, Subject, one_score


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


def _offer(subject: Subject, notes: Notes) -> dict[str, Any]:
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


SIGNATURES = (
    Signature(
        "verifiers",
        "(prompt, completion, answer, state, info, task, parser)",
        frozenset({"completion", "state"}),
        _offer,
        one_score,
        objects=frozenset({"parser"}),
    ),
)
