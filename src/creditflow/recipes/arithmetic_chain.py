"""Word problems of k chained operations for a planner, an executor and a verifier; learned on a CPU in minutes.

The planner turns the story into operations. The executor computes one operation a turn, on two-digit numbers modulo
100; the verifier recomputes it and answers `ok` or `bad`; on `bad` the executor tries once more. With k operations that
is 1 + 2k turns and up to k retries. Scores are graded and judge a step given its input: a right sum on a wrong plan is
right.

Recipe settings (`recipe.*`): `operations` (k); `train_tasks`, `val_tasks`, `val_split` (`val`; `tune` evaluates on the
tasks of a third split, for choosing learning rates); `hidden`, `layers`; `warmup_planner` and `warmup_executor`, the
sampled accuracies at which the warm-up stops; `warmup_seed`, which decides its initial weights and examples.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from creditflow import AgentError, Reply, Step, Task, Team, Trajectory, outcome, reward
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.warm_up import Example, sampled_accuracy, warm_up, word_model

VERBS = {
    "+": ("gets", "finds", "buys", "wins"),
    "-": ("loses", "eats", "sells", "drops"),
}
MULTIPLES = {2: "makes it double", 3: "makes it triple"}
NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn")
SIGNS = (*VERBS, "*")
DIGITS = tuple("0123456789")
MAX_PLAN_FACTOR = 2
"""A plan with more than this many times k operations is refused: a hostile plan must not run forever."""


# The task


def compute(a: int, operation: str, b: int) -> int:
    """One operation modulo 100."""
    return {"+": a + b, "-": a - b, "*": a * b}[operation] % 100


def digits(number: int) -> str:
    """Two digits, one token each."""
    return f"{number // 10} {number % 10}"


def make_task(rng: random.Random, operations: int, index: int, split: str) -> Task:
    """A random word problem."""
    start = rng.randrange(100)
    chain = [_operation(rng) for _ in range(operations)]
    value = start
    for operation, number in chain:
        value = compute(value, operation, number)
    story = [f"{rng.choice(NAMES)} has {digits(start)} ."]
    story += [
        f"{MULTIPLES[number]} ." if operation == "*" else f"{rng.choice(VERBS[operation])} {digits(number)} ."
        for operation, number in chain
    ]
    return Task(
        data_source="arithmetic_chain",
        prompt=({"role": "user", "content": " ".join(story)},),
        ground_truth=digits(value),
        extra_info={
            "index": index,
            "split": split,
            "plan": " ; ".join([digits(start), *(f"{operation} {digits(number)}" for operation, number in chain)]),
        },
    )


def _operation(rng: random.Random) -> tuple[str, int]:
    operation = rng.choice("++--*")
    return operation, rng.choice(list(MULTIPLES)) if operation == "*" else rng.randrange(1, 100)


def make_tasks(split: str, recipe: dict[str, Any]) -> list[Task]:
    """The tasks of a split; `tune` is a third split, with unreported problems for choosing learning rates."""
    number = {"train": recipe["train_tasks"], "val": recipe["val_tasks"]}[split]
    split = recipe.get("val_split", split) if split == "val" else split
    rng = random.Random(f"{split}-{recipe['operations']}")
    return [make_task(rng, recipe["operations"], index, split) for index in range(number)]


# The workflow


async def solve(task: Task, team: Team) -> str:
    """Plan, then compute and check one operation at a time."""
    value, operations = await read_plan(task, team)
    for operation in operations:
        value = await compute_and_check(value, operation, team)
    return str(value)


async def read_plan(task: Task, team: Team) -> tuple[str, list[str]]:
    """The plan's start value and its operations."""
    plan = await team.planner(task.text)
    start, *operations = plan.split(" ; ")
    if not is_number(start):
        raise AgentError(f"the plan does not start with a number: {start[:40]!r}")
    if len(operations) > MAX_PLAN_FACTOR * (task.extra_info["plan"].count(";")):
        raise AgentError(f"the plan has {len(operations)} operations")
    return start, operations


async def compute_and_check(value: str, operation: str, team: Team) -> Reply:
    """The executor's result, or its second one if the verifier answers `bad`."""
    sign, _, number = operation.partition(" ")
    if sign not in SIGNS or not is_number(number):
        raise AgentError(f"not an operation: {operation[:40]!r}")
    sum_ = f"{value} {operation} ="
    candidate = await team.executor(sum_, info={"sum": sum_})
    verdict = await team.verifier(f"{sum_} {candidate} ?", info={"sum": sum_, "candidate": candidate.text})
    if verdict.split()[-1:] == ["bad"]:
        candidate = await team.executor(f"{sum_} {candidate} bad =", info={"sum": sum_})
    if not is_number(candidate):
        raise AgentError(f"not a number: {candidate[:40]!r}")
    return candidate


def is_number(text: str) -> bool:
    """Whether the text is a number of two digits, as in the tasks."""
    return len(text) == 3 and text[0] in DIGITS and text[1] == " " and text[2] in DIGITS


def _true_value(step: Step) -> str:
    """The result of the sum in an executor's or verifier's prompt (the workflow checked its operands)."""
    first, second, operation, third, fourth, _ = step.info["sum"].split()
    return digits(compute(int(first + second), operation, int(third + fourth)))


# The sub-rewards


def _share_equal(said: list[str], right: list[str]) -> float:
    same = sum(a == b for a, b in zip(said, right, strict=False))
    return same / max(len(said), len(right))


@reward(agent_match="planner")
def plan_right(step: Step, trajectory: Trajectory) -> float:
    """Share of the plan's parts that are right."""
    return _share_equal(step.response.split(" ; "), trajectory.task.extra_info["plan"].split(" ; "))


@reward(agent_match="executor")
def digits_right(step: Step, trajectory: Trajectory) -> float:
    """Share of the digits that are right, given the sum in the prompt."""
    return _share_equal(step.response.split(), _true_value(step).split())


@reward(agent_match="verifier")
def verdict_right(step: Step, trajectory: Trajectory) -> float:
    """Whether the verdict is right, given the candidate in the prompt."""
    right = "ok" if step.info["candidate"] == _true_value(step) else "bad"
    return float(step.response.split()[-1:] == [right])


@outcome
def answer_right(trajectory: Trajectory) -> float:
    """Whether the final value is the story's."""
    return float(trajectory.answer == trajectory.task.ground_truth)


def candidate_kind(step: Step) -> str | None:
    """Stratum of a verifier's step; without it, a constant `ok` scores well while most sums are right."""
    if step.agent != "verifier":
        return None
    return "right" if step.info["candidate"] == _true_value(step) else "wrong"


# The model, warmed up by supervised learning, so that reinforcement has something to start from


def warm_model(recipe: dict[str, Any]) -> Path:
    """The folder of a small Llama that half solves these tasks; made on first use, in about a minute, and cached."""
    keys = ("operations", "hidden", "layers", "warmup_planner", "warmup_executor", "warmup_seed")
    settings = {key: recipe[key] for key in keys}
    return word_model(f"arithmetic_chain-{WARM_UP_VERSION}", settings, WORDS, 512, _teach)


WORDS = (
    *("plan", "exec", "check", "has", ".", ";", "=", "?", "ok", "bad", *DIGITS, *NAMES),
    *(*SIGNS, "makes", "it", "double", "triple", *(verb for verbs in VERBS.values() for verb in verbs)),
)
"""The vocabulary, one token per word."""


def _example(role: str, rng: random.Random, operations: int) -> tuple[str, str]:
    if role == "planner":
        task = make_task(rng, operations, 0, "warm-up")
        return f"plan {task.text}", task.extra_info["plan"]
    a, (operation, b) = rng.randrange(100), _operation(rng)
    right = digits(compute(a, operation, b))
    wrong = digits((compute(a, operation, b) + rng.choice((-10, -1, 1, 10, rng.randrange(1, 100)))) % 100)
    sum_ = f"{digits(a)} {operation} {digits(b)} ="
    if role == "executor":
        return f"exec {sum_}", right
    if role == "retry":
        return f"exec {sum_} {wrong} bad =", right
    good = rng.random() < 0.5 or wrong == right
    return f"check {sum_} {right if good else wrong} ?", f"{right} {'ok' if good else 'bad'}"


WARM_UP_VERSION = 4
"""Part of the cached folder's name; to be raised with every change of the warm-up."""
EXECUTOR_ROLES = {"executor": 96, "verifier": 96, "retry": 32}
"""Examples per warm-up step; the planner gets enough examples for PLANNER_OPERATIONS operations."""
PLANNER_OPERATIONS = 320
HEAD_START = 0.3
"""The planner's lessons begin when the executor is this close to its target."""


def _teach(policy: Policy, settings: dict[str, Any]) -> None:
    rng = random.Random(settings["warmup_seed"])
    operations = settings["operations"]
    rows, planning = dict(EXECUTOR_ROLES), False

    def learned(step: int) -> bool:
        nonlocal rows, planning
        if step % (5 if planning else 25):
            return False
        roles = ("planner", "executor") if planning else ("executor",)
        accuracy = {role: _sampled_accuracy(policy, role, operations) for role in roles}
        reached = {role: value >= settings[f"warmup_{role}"] for role, value in accuracy.items()}
        if step % 25 == 0:
            said = ", ".join(f"{role} {value:.2f}" for role, value in accuracy.items())
            print(f"warm-up step {step}: {said}", file=sys.stderr, flush=True)
        if planning and all(reached.values()):
            return True
        # The planner learns within a hundred steps, so its lessons come last and stop half-way: reinforcement learning
        # corrects its remaining errors.
        planning = planning or accuracy["executor"] >= settings["warmup_executor"] - HEAD_START
        rows = dict(EXECUTOR_ROLES)
        if planning and not reached.get("planner"):
            rows["planner"] = PLANNER_OPERATIONS // operations
        return False

    def lessons() -> Iterator[list[Example]]:
        for role, n in rows.items():
            yield [_example(role, rng, operations) for _ in range(n)]

    warm_up(policy, lessons, learned, most_steps=3000)


def _sampled_accuracy(policy: Policy, role: str, operations: int) -> float:
    rng = random.Random(1)
    return sampled_accuracy(policy, [_example(role, rng, operations) for _ in range(256)])
