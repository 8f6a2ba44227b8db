"""Tests of this project: `python -m pytest` in its folder.

Change the cases of the outcome first: they say what a right answer to your tasks is.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from rewards import answer_is_right, share_of_ascii

from creditflow import Task, Trajectory

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(("answer", "expected"), [("7", 1.0), (" 7\n", 1.0), ("8", 0.5), ("é8", 0.25), ("", 0.0)])
def test_outcome_prefers_the_right_answer(answer: str, expected: float) -> None:
    task = Task("sums", ({"role": "user", "content": "What is 3 + 4?"},), "7")
    trajectory = Trajectory(id="t", uid="3+4", task=task, answer=answer)
    assert answer_is_right(trajectory) == expected


def test_sub_reward_is_the_share_of_readable_text() -> None:
    assert share_of_ascii("12\x00é") == 0.5


def test_recipe_passes_the_check() -> None:
    command = [sys.executable, "-m", "creditflow", "check", str(FOLDER / "recipe.yaml"), "--tasks", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
