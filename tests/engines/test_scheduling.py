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


def run_workflow(policy: Policy, temperature: float, n: int = 12) -> tuple[list[Trajectory], Scheduler]:
    rollouts = [
        Rollout(Task("t", ({"role": "user", "content": "abc " * (k + 1)},), None, {"k": k}), f"u{k}", f"t{k}", (5, k))
        for k in range(n)
    ]
    scheduler = Scheduler({"default": policy})
    return asyncio.run(run_rollouts(rollouts, solve, AGENTS, scheduler, Sampling(temperature=temperature))), scheduler


def test_scheduled_greedy_steps_match_single_generation(byte_policy: Policy) -> None:
    trajectories, scheduler = run_workflow(byte_policy, temperature=0.0)
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


def test_scheduled_steps_record_exact_logprobs(byte_policy: Policy) -> None:
    trajectories, _ = run_workflow(byte_policy, temperature=0.8, n=6)
    for step in (step for trajectory in trajectories for step in trajectory.steps):
        ids = torch.tensor([step.prompt_ids + step.response_ids])
        with torch.no_grad():
            logits = byte_policy.model(ids).logits[0, len(step.prompt_ids) - 1 : -1] / step.temperature
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(step.prompt_ids) :, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(step.logprobs), expected, atol=1e-4, rtol=0)
