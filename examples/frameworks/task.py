"""Shared parts of the examples: a task that a random model can improve on, and its rewards."""

from __future__ import annotations

from typing import Any

from creditflow import Step, Task, Trajectory, outcome, reward

WORDS = ("rain", "bread", "a ladder", "the sea", "moss", "an old clock", "dust", "a fox")


def tasks(split: str, recipe: dict[str, Any]) -> list[Task]:
    """Eight subjects to write about."""
    return [Task("example", ({"role": "user", "content": f"Write of {word}."},), None) for word in WORDS]


def share_of_letters(text: str) -> float:
    """Return the share of ASCII letters in the text."""
    return sum(character.isascii() and character.isalpha() for character in text) / max(1, len(text))


@reward(agent_match="writer|editor")
def letters(step: Step, trajectory: Trajectory) -> float:
    """The share of letters in the response."""
    return share_of_letters(step.response)


@outcome
def answer_has_letters(trajectory: Trajectory) -> float:
    """Whether the answer consists mostly of letters."""
    return float(share_of_letters(trajectory.answer or "") > 0.5)
