"""A task of one call, which trainers of single responses support too: word problems answered in letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from creditflow.data import Task, Trajectory
from creditflow.rewards import outcome
from creditflow.rollout import Team

PROBLEMS = Path(__file__).parent.parent / "tests" / "samples" / "gsm8k_64.jsonl"


def questions() -> list[str]:
    """64 questions of GSM8K's training data, the first 200 characters of each."""
    return [problem["question"][:200] for problem in problems()]


def problems() -> list[dict[str, str]]:
    """The same questions, whole and with their solutions."""
    return [json.loads(line) for line in PROBLEMS.read_text().splitlines()]


def make_tasks(split: str, recipe: dict[str, Any]) -> list[Task]:
    """A task for each of the first `recipe.tasks` questions (default: all); one for evaluation."""
    found = questions()[: recipe.get("tasks")] if split == "train" else questions()[:1]
    return [Task("letters", ({"role": "user", "content": question},), None) for question in found]


async def solve(task: Task, team: Team) -> str:
    """Run one call."""
    return str((await team.solver(list(task.prompt))).text)


def share_of_letters(text: str) -> float:
    """The share of letters among a response's characters."""
    return sum(character.isalpha() for character in text) / max(1, len(text))


@outcome
def letters(trajectory: Trajectory) -> float:
    """The reward on both sides."""
    return share_of_letters(str(trajectory.answer))
