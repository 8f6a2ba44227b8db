"""Batches of token ids, one update on them, and the comparison of its gradients."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from creditflow.data import Floats, Task, Trajectory, TrajectoryBatch
from creditflow.engines.local.policy import Policy
from creditflow.rollout import GenerationRequest
from tests import builders
from tests.builders import make_trajectory, step

Ids = Sequence[int]


def batch_of(
    rows: Sequence[tuple[Ids, Ids]], logprobs: Sequence[Sequence[float]] = (), temperatures: Sequence[float] = ()
) -> TrajectoryBatch:
    """One trajectory, of one step, per prompt and response; default log-probs: -1."""
    trajectories = []
    for k, (prompt, response) in enumerate(rows):
        tokens: dict[str, Any] = {"prompt_ids": tuple(prompt), "response_ids": tuple(response)}
        tokens["response_mask"] = (1,) * len(response)
        tokens["logprobs"] = tuple(logprobs[k]) if logprobs else (-1.0,) * len(response)
        temperature = temperatures[k] if temperatures else 1.0
        trajectories.append(make_trajectory(str(k), [step("a", temperature=temperature, **tokens)], task=str(k // 4)))
    return builders.batch_of(*trajectories)


def sampled_batch(policy: Policy, n: int = 12, temperatures: tuple[float, ...] = (1.0,)) -> TrajectoryBatch:
    """Sample `n` one-step trajectories with prompts and responses of many lengths."""
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            tuple(rng.integers(1, 11, 2 + k % 5).tolist()), 3 + k % 7, temperatures[k % len(temperatures)], (k,)
        )
        for k in range(n)
    ]
    generations = policy.generate(requests)
    prompts, responses = [request.prompt_ids for request in requests], [g.response_ids for g in generations]
    temperature_S = [request.temperature for request in requests]
    return batch_of(list(zip(prompts, responses, strict=True)), [g.logprobs for g in generations], temperature_S)


def several_steps(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Regroup the steps into trajectories of one to three steps."""
    steps, trajectories = [trajectory.steps[0] for trajectory in batch.to_trajectories()], list[Trajectory]()
    while steps:
        n, size = len(trajectories), (3, 1, 2)[len(trajectories) % 3]
        own = [dataclasses.replace(step, trajectory_id=str(n), index=i, turn=i) for i, step in enumerate(steps[:size])]
        trajectories.append(Trajectory(id=str(n), uid=str(n // 2), task=Task("t", (), None), steps=own))
        del steps[:size]
    return TrajectoryBatch.from_trajectories(trajectories)


def prompt_of(batch: TrajectoryBatch, s: int) -> list[int]:
    return batch.prompt_ids[batch.prompt_offsets[s] : batch.prompt_offsets[s + 1]].tolist()


def response_of(batch: TrajectoryBatch, s: int) -> list[int]:
    return batch.response_ids[batch.token_offsets[s] : batch.token_offsets[s + 1]].tolist()


def update_once(
    actor: Any, batch: TrajectoryBatch, advantage_T: Floats | None = None, trained_S: Any = None
) -> dict[str, float]:
    """Train the actor on one mini-batch; default: random advantages, all steps."""
    if advantage_T is None:
        advantage_T = np.random.default_rng(0).normal(size=len(batch.response_ids))
    if trained_S is None:
        trained_S = np.ones(batch.n_steps, dtype=np.bool_)
    return actor.update(batch, advantage_T, trained_S, np.zeros(batch.n_steps, dtype=np.int64))


def gradients(model: Any) -> torch.Tensor:
    """The gradients of all weights in one row."""
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def gradient_error(model: Any, expected: Any) -> float:
    """The difference of two models' gradients, relative to the second."""
    ours, theirs = gradients(model), gradients(expected)
    return float((ours - theirs).norm() / theirs.norm())
