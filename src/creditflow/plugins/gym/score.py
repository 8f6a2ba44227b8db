"""The scorers of reasoning-gym's families, as an outcome.

Some scorers evaluate the answer as Python or with sympy, repeat moves by a count in it, or give full marks to wrong
answers. `creditflow.plugins.gym.answers` has the checks before and after them.
"""

from __future__ import annotations

import re

from creditflow.data import Score, Trajectory
from creditflow.plugins.gym.answers import MAX_CHARACTERS, is_right, refusal
from creditflow.plugins.gym.tasks import gym_data_set, gym_entry
from creditflow.rewards.registry import outcome
from creditflow.rewards.support.text import without_thoughts

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).){0,4000}?)</answer>", re.DOTALL)


@outcome(timeout=30.0)
def reasoning_gym(trajectory: Trajectory, strict: bool = False) -> Score:
    """The family's own `score_answer(answer, entry)`, for a task from a `reasoning-gym://` address.

    The answer is the text in the last `<answer>...</answer>`, else after the last `####`, else all of it.

    `strict`: 1 for full marks, else 0. Without it, families may give partial marks, such as for a right number within
    other text.

    With or without it, an answer scores 0 that the scorer cannot read, that has digits other than 0 to 9 or a number
    that is not finite, or that is wrong where the scorer gives full marks. Where the scorer evaluates the answer,
    formulas and literals are limited in length, degree, terms, functions and names first.

    Range: 0 to 1. Cost: microseconds to milliseconds; more for a formula that sympy simplifies. Source:
    reasoning-gym 0.1.25. Raises DataError for a task from another source; an error of the scorer that does not come
    from the answer passes through.
    """
    entry = gym_entry(trajectory.task)
    if trajectory.answer is None:
        return Score(0.0, reason="the workflow returned no answer")
    family, text = trajectory.task.extra_info["family"], answer_in(trajectory.answer)
    if reason := refusal(family, text, entry):
        return Score(0.0, reason=reason)
    data_set = gym_data_set(trajectory.task)
    try:
        value = float(data_set.score_answer(text, entry))
    except Exception as error:
        data_set.score_answer(entry["answer"], entry)  # raises here if the scorer or the entry is at fault
        return Score(0.0, reason=f"the scorer cannot read the answer: {type(error).__name__}")
    if not 0.0 <= value <= 1.0:
        return Score(0.0, reason=f"the scorer returned {value:g}, outside [0, 1]")
    if value == 1.0 and not is_right(family, text, entry):
        return Score(0.0, reason="the scorer gives full marks to this wrong answer")
    return Score(float(value == 1.0) if strict else value)


def answer_in(text: str) -> str:
    """Return the tagged or marked answer of a text, which may have several lines, or else the whole text."""
    text = without_thoughts(text)
    tagged = _TAGGED.findall(text[-2 * MAX_CHARACTERS :])
    return (tagged[-1] if tagged else text.rpartition("####")[2]).strip()
