"""The rewards: a sub-reward for every step, and the outcome of a trajectory."""

from __future__ import annotations

from creditflow import Step, Trajectory, outcome, reward


def share_of_ascii(text: str) -> float:
    """Share of the characters that are printable ASCII, in [0, 1]."""
    return sum(" " <= character <= "~" for character in text) / max(1, len(text))


@reward
def is_readable(step: Step, trajectory: Trajectory) -> float:
    """Sub-reward of a step: the share of readable characters in its response."""
    return share_of_ascii(step.response)


@outcome
def answer_is_right(trajectory: Trajectory) -> float:
    """Outcome: 1 for the right answer, else up to 0.5 for readable text, so that an untrained model can start."""
    answer = (trajectory.answer or "").strip()
    return 1.0 if answer == trajectory.task.ground_truth else 0.5 * share_of_ascii(answer)
