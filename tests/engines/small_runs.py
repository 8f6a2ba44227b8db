"""Runs of a team of two agents with a model of a dozen words, whole and stopped."""

from pathlib import Path

import pytest

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.trainer import train
from creditflow.runs.run_folder import read_metrics

TEAM = """
from creditflow import Task, outcome, reward


def tasks(split, recipe):
    return [
        Task("toy", ({"role": "user", "content": "a b c d e f g h"[: 2 * k + 1]},), "a", {"level": k // 4})
        for k in range(8)
    ]


async def solve(task, team):
    first = await team.writer(task.text)
    return await team.editor(f"{first} i")


async def always_breaks(task, team):
    raise ZeroDivisionError("broken")


@reward(agent_match="writer")
def says_a(step, trajectory):
    words = step.response.split()
    return words.count("a") / max(1, len(words))


@outcome
def ends_with_a(trajectory):
    return float(trajectory.answer.split()[-1:] == ["a"])


@outcome
def never(trajectory):
    return 0.0


def candidate(step):
    return "long" if step.agent == "writer" and len(step.prompt) > 7 else "short"
"""

RECIPE = """
data: {train_files: "team.py:tasks", train_batch_size: 4, max_prompt_length: 48, max_response_length: 6}
actor_rollout_ref:
  model: {path: MODEL}
  actor: {optim: {lr: 0.01}, ppo_mini_batch_size: 2, ppo_max_token_len_per_gpu: 256}
  rollout: {n: 8}
algorithm: {group_by: agent, strata: "team.py:candidate"}
team: {workflow: "team.py:solve", agents: {writer: {}, editor: {}}}
reward: {backend: inline, functions: [{fn: "team.py:ends_with_a"}, {fn: "team.py:says_a"}]}
trainer: {total_training_steps: 3, device: cpu}
guard: {rules: {propagation_s: null}}  # it reads the clock
"""


EVERY_STEP = ("trainer.save_freq=1", "trainer.test_freq=2", "trainer.total_training_steps=4")
WATCHED = (*EVERY_STEP, "guard.rules.often={metric: rollout/tokens, above: 1, window: 2}")
"""Settings with a guard rule that fires once, at step 2."""
CRITIC = ("algorithm.adv_estimator=gae", "algorithm.outcome_to=answer", "trainer.critic_warmup=1")
TWO_POLICIES = (
    "policies={one: {}, two: {lora_rank: 2, optim: {lr: 0.02}}}",
    "team.agents.writer.policy=one",
    "team.agents.editor.policy=two",
)


def write_recipe(folder: Path, model: Path) -> Path:
    """Write the team and its recipe; returns the recipe."""
    (folder / "team.py").write_text(TEAM)
    (folder / "toy.yaml").write_text(RECIPE.replace("MODEL", str(model)))
    return folder / "toy.yaml"


def run(recipe_file: Path, folder: str | Path, *overrides: str) -> Path:
    path = recipe_file.parent / folder
    return train(load_recipe(recipe_file, [f"trainer.default_local_dir={path}", *overrides]), Reporter()).path


class Stopped(Exception):
    """The error of a run that a test ends."""


def stopped(recipe_file: Path, folder: str | Path, after: int, *overrides: str) -> Path:
    """Run until an error in the update after step `after`; returns the run's folder."""
    update, seen = PolicySet.update, []

    def breaks(self, *args, **kwargs):
        seen.append(1)
        if len(seen) > after:
            raise Stopped
        return update(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicySet, "update", breaks)
        with pytest.raises(Stopped):
            run(recipe_file, folder, *overrides)
    return recipe_file.parent / folder


def without_clock(path: Path) -> list[dict]:
    clocked = ("timing/", "throughput/", "latency", "memory/")
    return [{k: v for k, v in row.items() if not any(part in k for part in clocked)} for row in read_metrics(path)]


def expect_the_same(path: Path, other: Path, steps: int = 4) -> None:
    """Compare the metrics, events, step files, evaluations and last weights of two finished runs."""
    assert without_clock(path) == without_clock(other)
    weights = sorted((path / "checkpoints" / f"global_step_{steps}").rglob("*.safetensors"))
    assert weights
    for file in (*sorted((path / "steps").iterdir()), path / "evaluation.json", *path.glob("events.jsonl"), *weights):
        assert file.read_bytes() == (other / file.relative_to(path)).read_bytes(), file.name
