"""A planner, a solver and a checker add 3 to 5 numbers; for a small pretrained model, without a warm-up.

The tasks are reasoning-gym's `chain_sum`. The planner splits a sum of three or more terms into two parts. The solver
adds two numbers at a time. The checker adds them again: if its result differs, the solver tries once more. Each prompt
holds two or three worked examples, because a model of 135 M parameters does not follow a description of the format.
With a right plan 5 to 13 turns; a plan that repeats terms can take more. A response in another form ends the rollout
with the worst outcome.

Recipe settings (`recipe.*`): `train_tasks`, `val_tasks`, `val_split` (`val`; `tune` evaluates on the problems of a
third split, for choosing learning rates); `flip`, the share of sub-rewards that are replaced by their opposite; and
`planner_weight` (0: the planner's sub-reward is measured, but no credit).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from creditflow import AgentError, Reply, Step, Task, Team, Trajectory, outcome, reward
from creditflow.data import Message
from creditflow.plugins.gym.tasks import GymSplit, gym_tasks
from creditflow.rewards.support.noise import flipped

FAMILY = "reasoning-gym://chain_sum?min_terms=3&max_terms=5&min_digits=1&max_digits=1&match=%5E%5B%5E-%5D*%24"
"""Sums of 3 to 5 one-digit numbers; `match` skips problems with a minus sign."""
MAX_DIGITS = 9
MAX_RETRIES = 2
EXAMPLES = {
    "planner": (
        ("6 + 1 + 3 + 9 + 2", "6 + 1, 3 + 9 + 2"),
        ("4 + 8 + 5 + 3", "4 + 8, 5 + 3"),
        ("7 + 2 + 9", "7 + 2, 9"),
    ),
    "solver": (("8 + 6", "8 + 6 = 14"), ("12 + 7", "12 + 7 = 19")),
    "checker": (("9 + 4 = 12", "9 + 4 = 13"),),
    "single": (("7 + 2 + 9", "7 + 2 + 9 = 18"), ("4 + 8 + 5 + 3", "4 + 8 + 5 + 3 = 20")),
}
"""Worked examples of each agent: questions with their answers."""


# The task


def make_tasks(split: str, recipe: dict[str, Any]) -> list[Task]:
    """The problems of a split, disjoint from those of every other split."""
    gym_split: GymSplit = recipe.get("val_split", "val") if split == "val" else "train"
    size = recipe["train_tasks"] if split == "train" else recipe["val_tasks"]
    return gym_tasks([f"{FAMILY}&size={size}&split={gym_split}"], f"data.{split}_files", gym_split)


def terms_of(task: Task) -> list[int]:
    """The terms of the task's sum."""
    match = re.search(r"[0-9]+(?: \+ [0-9]+)+", task.text)
    if match is None:
        raise ValueError(f"expected a sum in the task, got {task.text[:80]!r}")
    return read_sum(match[0]) or []


def as_sum(terms: Sequence[int]) -> str:
    """Terms as text, such as `4 + 8`."""
    return " + ".join(map(str, terms))


def read_sum(text: str) -> list[int] | None:
    """The terms of a text such as `4 + 8`; None for any other form."""
    if not re.fullmatch(rf"[0-9]{{1,{MAX_DIGITS}}}(?: \+ [0-9]{{1,{MAX_DIGITS}}})*", text):
        return None
    return [int(term) for term in text.split(" + ")]


def read_result(text: str, terms: Sequence[int]) -> int | None:
    """The result in a text such as `4 + 8 = 12` for these terms; None for any other form."""
    match = re.fullmatch(rf"([0-9+ ]+) = ([0-9]{{1,{MAX_DIGITS}}})", text)
    return int(match[2]) if match is not None and match[1] == as_sum(terms) else None


def read_plan(text: str) -> list[list[int]] | None:
    """The two parts of a plan such as `4 + 8, 5 + 3`; None for any other form."""
    parts = [read_sum(part) for part in text.split(", ")]
    return [part for part in parts if part] if len(parts) == 2 and all(parts) else None


# The workflow


@dataclass(frozen=True, slots=True)
class Number:
    """A number, and the reply that it comes from; None for a term of the task."""

    value: int
    source: Reply | None = None


async def solve(task: Task, team: Team) -> str:
    """Split the sum until two numbers are left; add and check them."""
    rollout = Sums(team)
    return str((await rollout.total([Number(term) for term in terms_of(task)])).value)


async def solve_alone(task: Task, team: Team) -> str:
    """One call of a single agent, for a comparison with the team."""
    terms = terms_of(task)
    result = read_result((await ask(team, "single", as_sum(terms), (), {"terms": terms})).text, terms)
    return "" if result is None else str(result)


async def ask(
    team: Team, agent: str, question: str, numbers: Sequence[Number], info: dict[str, Any], *others: Reply
) -> Reply:
    """Call an agent with its worked examples. Its step's parents are the sources of `numbers`, and `others`."""
    messages: list[Message] = []
    for example, answer in EXAMPLES[agent]:
        messages += [{"role": "user", "content": example}, {"role": "assistant", "content": answer}]
    parents = [*others, *(number.source for number in numbers if number.source is not None)]
    return await team[agent]([*messages, {"role": "user", "content": question}], parents=parents, info=info)


@dataclass
class Sums:
    """One rollout of the team."""

    team: Team
    retries: int = MAX_RETRIES

    async def total(self, numbers: Sequence[Number]) -> Number:
        """The sum of one or more numbers. Raises AgentError for a response in another form."""
        if len(numbers) == 1:
            return numbers[0]
        if len(numbers) == 2:
            return await self.add(numbers)
        terms = [number.value for number in numbers]
        plan = await ask(self.team, "planner", as_sum(terms), numbers, {"terms": terms})
        parts = read_plan(plan.text)
        if parts is None:
            raise AgentError(f"expected two parts of a sum, got {plan.text[:40]!r}")
        if any(len(part) >= len(terms) for part in parts):
            raise AgentError(f"expected parts of fewer than {len(terms)} terms, got {plan.text[:40]!r}")
        return await self.add([await self.total([Number(term, plan) for term in part]) for part in parts])

    async def add(self, pair: Sequence[Number]) -> Number:
        """The solver's result; its second one if the checker's differs."""
        terms = [number.value for number in pair]
        info = {"terms": terms}
        reply = await ask(self.team, "solver", as_sum(terms), pair, info)
        result = expect_result(reply, terms)
        question = f"{as_sum(terms)} = {result}"
        check = await ask(self.team, "checker", question, (), {**info, "candidate": result}, reply)
        if read_result(check.text, terms) != result and self.retries:
            self.retries -= 1
            reply = await ask(self.team, "solver", as_sum(terms), pair, info, check)
            result = expect_result(reply, terms)
        return Number(result, reply)


def expect_result(reply: Reply, terms: Sequence[int]) -> int:
    """The result in the solver's reply. Raises AgentError for any other form."""
    result = read_result(reply.text, terms)
    if result is None:
        raise AgentError(f"expected {as_sum(terms)} = a number, got {reply.text[:40]!r}")
    return result


# The sub-rewards


@reward(agent_match="planner")
def split_right(step: Step, trajectory: Trajectory, flip: float = 0.0) -> float:
    """Whether the two parts hold every term of the sum exactly once."""
    parts = read_plan(step.response)
    right = parts is not None and sorted(parts[0] + parts[1]) == sorted(step.info["terms"])
    return flipped(right, step, trajectory, flip)


@reward(agent_match="solver")
def sum_right(step: Step, trajectory: Trajectory, flip: float = 0.0) -> float:
    """Whether the result is the sum of the two numbers in the prompt."""
    return flipped(result_is_right(step), step, trajectory, flip)


@reward(agent_match="checker")
def check_right(step: Step, trajectory: Trajectory, flip: float = 0.0) -> float:
    """Whether the checker's own result is the sum; then its verdict on the candidate is right, too."""
    return flipped(result_is_right(step), step, trajectory, flip)


@outcome
def total_right(trajectory: Trajectory) -> float:
    """Whether the answer is the task's sum."""
    return float(trajectory.answer == trajectory.task.ground_truth)


def result_is_right(step: Step) -> bool:
    """Whether the step's result is the sum of its two numbers."""
    terms: list[int] = step.info["terms"]
    return read_result(step.response, terms) == sum(terms)


def candidate_kind(step: Step) -> str | None:
    """Stratum of a checker's step: right and wrong candidates are not equally hard to check."""
    if step.agent != "checker":
        return None
    return "right" if step.info["candidate"] == sum(step.info["terms"]) else "wrong"
