"""Faulty variants of the rewards and the team of `arithmetic_chain`.

In `benchmarks.guard` faults start during a run, in other benchmarks at the beginning. Evaluations use the recipe's
correct verdicts.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

from creditflow import AgentError, Step, Task, Team, Trajectory, reward
from creditflow._utils.loading import load_object
from creditflow.config.loading import find_recipe

_RECIPES = find_recipe("arithmetic_chain").parent
FAILS = 15
"""Percentage of verdicts in `failing` that raise."""
SABOTAGED = 10
"""Percentage of operations whose result the saboteur replaces."""
SLOW, SLOW_SECONDS = 10, 15.0
"""Percentage of rollouts whose tool is slow, and the seconds that it takes."""


@cache
def _of(name: str) -> Callable[..., Any]:
    """Load a function of the recipe."""
    found: Callable[..., Any] = load_object(f"arithmetic_chain.py:{name}", _RECIPES, name)
    return found


def _training_step(trajectory_id: str) -> int | None:
    """The training step in an id 0-STEP-TASK-ROLLOUT; None for an evaluation (1-TASK-ROLLOUT)."""
    kind, at = trajectory_id.split("-")[:2]
    return int(at) if kind == "0" else None


def _percent(step: Step, of: str) -> int:
    """Pseudo-random number from 0 to 99 for a step of a run. Ids repeat between runs; texts and log-probs differ."""
    return zlib.crc32(f"{of} {recorded_step_id(step)} {step.prompt} {step.response} {step.logprobs[:1]}".encode()) % 100


_CONTINUATION = re.compile(r"~(with|without)(\d+)~\d+$")
"""The end of the id of a trajectory that continues another one, with or without one of its steps."""


def recorded_step_id(step: Step) -> str:
    """The step's id; for a kept step of a continuation, the recorded step's id, so that its draws are the same."""
    continued = _CONTINUATION.search(step.trajectory_id)
    if continued is None or step.index >= int(continued[2]) + (continued[1] == "with"):
        return step.id
    return step.trajectory_id[: continued.start()] + step.id.removeprefix(step.trajectory_id)


# Faults by name: a function of the step and its correct verdict.

_WRONG: dict[str, Callable[[Step, float], float]] = {}


def _wrong(function: Callable[[Step, float], float]) -> Callable[[Step, float], float]:
    _WRONG[function.__name__] = function
    return function


@_wrong
def failing(step: Step, value: float) -> float:
    """Some verdicts fail."""
    if _percent(step, "failing") < FAILS:
        raise TimeoutError("no verdict")
    return value


@_wrong
def contradictory(step: Step, value: float) -> float:
    """Every verdict is inverted."""
    return 1.0 - value


@_wrong
def misleading(step: Step, value: float) -> float:
    """The executor is rewarded for wrong steps."""
    return 1.0 - value if step.agent == "executor" else value


@_wrong
def never_enough(step: Step, value: float) -> float:
    """The executor's scores are at most 0.5, the threshold."""
    return 0.5 * value if step.agent == "executor" else value


NOISE = {"binary20": 0.80, "binary35": 0.65, "judge": 0.75}
"""The share of right guesses that a score alone allows where right and wrong steps are equally frequent.

Only whether a step is right enters: a share of right digits between 0 and 1 would show through any inversion.
"""


@_wrong
def binary20(step: Step, value: float) -> float:
    """Whether the step is right, inverted for one step in five."""
    return float((value == 1) != (_percent(step, "noisy") < 20))


@_wrong
def binary35(step: Step, value: float) -> float:
    """Whether the step is right, inverted for 35 % of the steps."""
    return float((value == 1) != (_percent(step, "noisy") < 35))


GRADES = {True: (1, 3, 10, 30, 100), False: (10, 25, 50, 80, 100)}
"""Percentage of right and of wrong steps with a grade of at most 0, 1/4, 1/2, 3/4 and 1."""


@_wrong
def judge(step: Step, value: float) -> float:
    """A lenient judge's grade: half of the wrong steps get 3/4 or 1, a tenth of them 0."""
    percent = _percent(step, "judge")
    return sum(percent >= below for below in GRADES[value == 1]) / 4


def _judged(name: str, step: Step, trajectory: Trajectory, wrong: str | None, first: int) -> float:
    value = float(_of(name)(step, trajectory))
    at = _training_step(trajectory.id)
    return value if wrong is None or at is None or at < first else _WRONG[wrong](step, value)


@reward(agent_match="planner")
def plan_right(step: Step, trajectory: Trajectory, *, wrong: str | None = None, first: int = 0) -> float:
    """The recipe's function, with the fault `wrong` from training step `first` on."""
    return _judged("plan_right", step, trajectory, wrong, first)


@reward(agent_match="executor|saboteur")
def digits_right(step: Step, trajectory: Trajectory, *, wrong: str | None = None, first: int = 0) -> float:
    """The recipe's function with a fault; the saboteur is scored on the sum that it should have computed."""
    return _judged("digits_right", step, trajectory, wrong, first)


@reward(agent_match="verifier")
def verdict_right(step: Step, trajectory: Trajectory, *, wrong: str | None = None, first: int = 0) -> float:
    """The recipe's function, with a fault."""
    return _judged("verdict_right", step, trajectory, wrong, first)


# Scores that inherit upstream errors


@reward(agent_match="executor")
def digits_of_reference(step: Step, trajectory: Trajectory) -> float:
    """Share of digits equal to the story's own chain at this operation, regardless of the step's prompt."""
    if _training_step(trajectory.id) is None:
        return float(_of("digits_right")(step, trajectory))
    checked = sum(other.agent == "verifier" for other in trajectory.steps[: step.index])
    operation = checked - 1 if step.prompt.endswith("bad =") else checked
    reference = _reference(trajectory.task)
    if operation >= len(reference):
        return 0.0
    return float(_of("_share_equal")(step.response.split(), reference[operation].split()))


def _reference(task: Task) -> list[str]:
    """The value after each operation of the story."""
    start, *operations = task.extra_info["plan"].split(" ; ")
    values, value = [], int(start.replace(" ", ""))
    for operation in operations:
        sign, _, number = operation.partition(" ")
        value = int(_of("compute")(value, sign, int(number.replace(" ", ""))))
        values.append(f"{value // 10} {value % 10}")
    return values


# A team with a saboteur


async def solve_sabotaged(task: Task, team: Team) -> str:
    """The recipe's workflow with a saboteur: it is not trained and replaces some results with those of another sum."""
    value, operations = await _of("read_plan")(task, team)
    for operation in operations:
        before, value = value, await _of("compute_and_check")(value, operation, team)
        if _percent(value.step, "sabotage") < SABOTAGED:
            tens, ones = before.split()
            other = f"{(int(tens) + 3) % 10} {ones} {operation} ="
            value = await team.saboteur(other, info={"sum": f"{before} {operation} ="})
            if not _of("is_number")(value):
                raise AgentError(f"not a number: {value[:40]!r}")
    return str(value)


# A team with a slow tool


async def solve_slowly(task: Task, team: Team) -> str:
    """The recipe's workflow after a tool of the planner has answered, which takes five times as long for a tenth.

    The sampler takes about a second for a rollout on an idle core, so the slowest tenth of rollouts takes about four
    times the median.
    """
    plan = await team.planner(task.text)
    slow = zlib.crc32(f"slow {plan} {plan.logprobs[:1]}".encode()) % 100 < SLOW
    await asyncio.sleep(SLOW_SECONDS if slow else SLOW_SECONDS / 5)
    return str(await _of("solve")(task, team))
