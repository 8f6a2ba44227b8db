"""The scheduler with a real model: concurrent rollouts of unequal lengths against single generation."""

import asyncio

import torch

from creditflow.data import Task, Trajectory
from creditflow.engines.local.policy import Policy
from creditflow.rollout import AgentSpec, Rollout, Scheduler, Team, run_rollouts
from creditflow.rollout.recorder import Sampling

AGENTS = {"writer": AgentSpec(system="write"), "editor": AgentSpec(system="edit what you are given")}


async def solve(task: Task, team: Team) -> str:
    """Run one to three rounds, so that rollouts diverge and batches are mixed."""
    text = task.text
    for turn in range(1 + task.extra_info["k"] % 3):
        draft = await team.writer(text, max_tokens=5 + 3 * turn)
        text = await team.editor(f"{draft} {turn}", max_tokens=9)
    return text


def run_workflow(policy: Policy) -> tuple[list[Trajectory], Scheduler]:
    rollouts = [
        Rollout(Task("t", ({"role": "user", "content": "abc " * (k + 1)},), None, {"k": k}), f"u{k}", f"t{k}", (5, k))
        for k in range(12)
    ]
    scheduler = Scheduler({"default": policy})
    return asyncio.run(run_rollouts(rollouts, solve, AGENTS, scheduler, Sampling(temperature=0.0))), scheduler


def test_scheduled_greedy_steps_match_single_generation(byte_policy: Policy) -> None:
    trajectories, scheduler = run_workflow(byte_policy)
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    assert scheduler.batch_sizes[0] == 12
    assert len(scheduler.batch_sizes) < len(steps) / 4
    limits = {"editor": lambda turn: 9, "writer": lambda turn: 5 + 3 * turn}
    for step in steps:
        out = byte_policy.model.generate(
            torch.tensor([step.prompt_ids]),
            attention_mask=torch.ones(1, len(step.prompt_ids), dtype=torch.long),
            max_new_tokens=limits[step.agent](step.turn),
            do_sample=False,
        )
        assert list(step.response_ids) == out[0, len(step.prompt_ids) :].tolist()
