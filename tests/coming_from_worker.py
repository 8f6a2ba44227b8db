"""Runs the TRL program of a page, then the page's recipe on the same rollouts: `python coming_from_worker.py FOLDER`.

Prints JSON in its last line. TRL runs in a separate process, since verl fails beside it.
"""

import asyncio
import copy
import dataclasses
import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import torch
import trl

from creditflow.config import load_recipe
from creditflow.credit import assign
from creditflow.data import Step, Trajectory, TrajectoryBatch
from creditflow.data.datasets import load_tasks
from creditflow.engines.common.components import load_functions
from creditflow.engines.local.actor import Actor, token_logprobs
from creditflow.engines.local.policy import Policy
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.rewards import RewardManager

MADE = []
"""The trainers, in the order of their construction."""
NAMES = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


class Spy(trl.GRPOTrainer):
    """Keeps the rows of TRL's loss, their rewards, and the trained weights."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.batches, self.rewards = [], []
        MADE.append(self)

    def _calculate_rewards(self, *given, **named):
        rewards = super()._calculate_rewards(*given, **named)
        self.rewards.append(rewards.flatten().tolist())
        return rewards

    def _compute_loss(self, model, inputs):
        self.batches.append(copy.deepcopy({name: inputs[name] for name in NAMES}))
        return super()._compute_loss(model, inputs)


def train(source):
    """Run the program `source` in the working directory; return its trainer."""
    Path("train_spied.py").write_text(source)
    trl.GRPOTrainer = Spy
    runpy.run_path("train_spied.py", run_name="__main__")
    return MADE[-1]


def rows_of(batch):
    """Prompt tokens, response tokens and advantage of each row in a loss of TRL."""
    rows = []
    for i, advantage in enumerate(batch["advantages"].tolist()):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        response = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
        rows.append((tuple(prompt), tuple(response), advantage))
    return rows


def as_trajectories(policy, tasks, rows):
    """Trajectories of one step with the tokens that TRL sampled."""
    by_prompt = {policy.encode(list(task.prompt))[1]: task for task in tasks}
    trajectories = []
    for i, (prompt, response, _) in enumerate(rows):
        task, text = by_prompt[prompt], policy.decode(response)
        step = Step(
            id=f"{i}/0", trajectory_id=str(i), index=0, agent="solver", turn=0, parents=(), prompt=task.text,
            response=text, prompt_ids=prompt, response_ids=response, response_mask=(1,) * len(response),
            logprobs=(0.0,) * len(response), temperature=1.0,
        )  # fmt: skip
        trajectories.append(Trajectory(id=str(i), uid=task.text, task=task, steps=[step], answer=text))
    return trajectories


def with_logprobs(policy, trajectories):
    """The batch, with the policy's own log-probs as those of the sampler."""
    batch = TrajectoryBatch.from_trajectories(trajectories)
    for packed in policy.forward.micro_batches(batch, np.arange(batch.n_steps), 10**6):
        with torch.no_grad():
            logprobs, _ = token_logprobs(policy.forward, packed, batch)
        batch.logprobs[packed.token_at] = logprobs
    return batch


def recompute(trainer, overrides=()):
    """Score TRL's rollouts, assign credit and update the model, all by the recipe."""
    recipe = load_recipe("recipe.yaml", overrides)
    config = recipe.config
    tasks = load_tasks(config.data.train_files, recipe.folder, {}, "train")
    policy = Policy.load(tiny_byte_model(), torch.device("cpu"))
    before = [weight.detach().clone() for weight in policy.parameters]
    actor = Actor(policy, config.actor_rollout_ref.actor)
    manager = RewardManager(load_functions(recipe))
    rewards, advantages = [], []
    for seen, scored in zip(trainer.batches, trainer.rewards, strict=True):
        rows = rows_of(seen)
        trajectories = as_trajectories(policy, tasks, rows)
        asyncio.run(manager.score(trajectories))
        batch = with_logprobs(policy, trajectories)
        assignment = assign(batch, config.credit)
        rewards.append([sorted(scored), sorted(batch.outcome.tolist())])
        groups = (batch.outcome[batch.group_of_trajectory == group] for group in batch.group_of_trajectory)
        theirs = [advantage for _, _, advantage in rows]
        advantages.append(
            [theirs, assignment.advantage.advantage_S.tolist(), [np.std(group, ddof=1) for group in groups]]
        )
        mini_batch_S = np.zeros(batch.n_steps, dtype=np.int64)
        actor.update(batch, assignment.token_advantages(), assignment.groups.trained_S, mini_batch_S)
    trained = [
        (ours.detach(), theirs.detach(), first)
        for ours, theirs, first in zip(policy.parameters, trainer.model.parameters(), before, strict=True)
    ]
    return {
        "rewards": rewards,
        "advantages": advantages,
        "difference": max(float((ours - theirs).abs().max()) for ours, theirs, _ in trained),
        "moved": max(float((ours - first).abs().max()) for ours, _, first in trained),
        "completions": len(trainer.batches[0]["advantages"]),
        "prompts": sorted({row[0] for row in rows_of(trainer.batches[0])}),
    }


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.path.insert(0, "")
    program = Path("train.py").read_text()
    printed = recompute(train(program))
    plain = train(program.replace("    seed=1,", '    seed=1,\n    scale_rewards="none",'))
    unscaled = recompute(plain, ["algorithm.norm_adv_by_std_in_grpo=false"])
    options = [field.name for field in dataclasses.fields(trl.GRPOConfig)]
    print(json.dumps({"printed": printed, "unscaled": unscaled, "options": options}))
