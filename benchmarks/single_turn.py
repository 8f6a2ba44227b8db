"""A task of one call, which trainers of single responses support too: word problems answered in letters.

Also the model and the batches that benchmarks of the embedded engine share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from creditflow.data import Step, Task, Trajectory, TrajectoryBatch
from creditflow.rewards import outcome
from creditflow.rollout import GenerationRequest, Team
from creditflow.rollout.client import Generation

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


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, converted once into the cache."""
    from creditflow.config import load_recipe
    from creditflow.engines.models.folders import model_folder

    recipe = load_recipe(Path(__file__).parent / "single_turn.yaml", ["actor_rollout_ref.model.path=smollm2"])
    return model_folder(recipe, "default")


def one_step_batch(
    rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]], group: int = 8
) -> TrajectoryBatch:
    """A batch with one step per trajectory. `rows`: prompt, response and its log-probs; `group`: rows of one task."""
    trajectories = []
    for k, (prompt, response, logprobs) in enumerate(rows):
        step = Step(
            f"{k}/0", str(k), 0, "solver", 0, (), "", "", prompt_ids=tuple(prompt), response_ids=tuple(response),
            response_mask=(1,) * len(response), logprobs=tuple(logprobs),
        )  # fmt: skip
        trajectories.append(Trajectory(str(k), str(k // group), Task("", (), None), [step]))
    return TrajectoryBatch.from_trajectories(trajectories)


def sampled_batch(
    requests: Sequence[GenerationRequest], generations: Sequence[Generation], group: int = 8
) -> TrajectoryBatch:
    """The batch of sampled responses."""
    pairs = zip(requests, generations, strict=True)
    return one_step_batch([(request.prompt_ids, one.response_ids, one.logprobs) for request, one in pairs], group)
