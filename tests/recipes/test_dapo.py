"""The recipe dapo_32b against DAPO's published reward (arXiv 2503.14476, equations 7 and 13), worked out by hand."""

import asyncio
import statistics
from pathlib import Path

import pytest
import torch

from creditflow._utils.loading import load_object
from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.credit import assign
from creditflow.data import Task, TrajectoryBatch
from creditflow.data.datasets import write_tasks
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.trainer import train
from creditflow.engines.local.warm_up import supervised_loss
from creditflow.engines.models.tiny import byte_tokenizer, save_tiny_llama
from creditflow.monitoring.evaluation import Evaluation
from creditflow.rewards import RewardManager, load_reward_functions
from creditflow.rollout import AgentSpec, Rollout, Scheduler, run_rollouts
from creditflow.rollout.recorder import Sampling
from creditflow.runs.run_folder import read_metrics
from tests.builders import Scripted
from tests.paths import RECIPES

QUESTION = Task("math_dapo", ({"role": "user", "content": "What is 33 + 1? End with Answer: $Answer"},), "34")


def of_recipe(name):
    return load_object(f"dapo.py:{name}", RECIPES, "test")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So it is 34.\nAnswer: 34", "#### 34"),
        ("Answer: 3\nNo.\nanswer:\\frac{1}{2} ", "#### \\frac{1}{2}"),
        ("ANSWER : $34$\n", "#### $34$"),
        ("it is 34", ""),
        ("Answer:", ""),
        ("Answer: 34" + " thinking" * 50, ""),
    ],
)
def test_answer_follows_the_last_answer_colon_near_the_end(text, expected):
    assert of_recipe("answer_in")(text) == expected


def test_dapo_32b_has_dapo_credit_and_grpo_advantages():
    recipe = load_recipe(RECIPES / "dapo_32b.yaml")
    said = {
        b"1": (b"", b"Answer: 34"),
        b"2": (b"x" * 17408, b"Answer: 34"),
        b"3": (b"x" * 20470, b"Answer: 35"),
        b"4": (b"", b"no idea"),
    }
    rewards = [1.0, 1 - 1034 / 4096, -1 - 4096 / 4096, -1.0]  # 16,384 tokens are free, 10 are the answer's

    counter = iter(said.values())
    model = Scripted(lambda prompt: b"".join(next(counter)))
    functions = load_reward_functions(recipe.config.reward.functions, RECIPES, ["solver"])
    rollouts = [Rollout(QUESTION, "u", f"u-{n}", (n,)) for n in range(4)]
    sampling = Sampling(max_tokens=20480, max_prompt_tokens=2048)
    trajectories = asyncio.run(
        run_rollouts(rollouts, of_recipe("solve"), {"solver": AgentSpec()}, Scheduler({"default": model}, 1), sampling)
    )
    asyncio.run(RewardManager(functions, 0.0).score(trajectories))
    assignment = assign(TrajectoryBatch.from_trajectories(trajectories), recipe.config.algorithm)

    mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
    assert [trajectory.outcome.value for trajectory in trajectories] == [1.0, 1.0, 0.0, 0.0]
    constant = assignment.credit_S - rewards
    assert constant.tolist() == pytest.approx([constant[0]] * 4)
    assert assignment.advantage_S.tolist() == pytest.approx([(r - mean) / (spread + 1e-6) for r in rewards], rel=1e-9)


SUMS = [(1, 2), (3, 4), (2, 6), (5, 3)]


@pytest.fixture(scope="module")
def half_right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers each of `SUMS` right in about half of its attempts."""
    folder = tmp_path_factory.mktemp("dapo")
    tokenizer, template = byte_tokenizer()
    save_tiny_llama(folder, tokenizer, hidden=32, layers=1, positions=256, seed=0, chat_template=template)
    policy = Policy.load(folder, torch.device("cpu"))
    examples = []
    for a, b in SUMS:
        prompt, _ = policy.encode(question(a, b).prompt)
        examples += [(prompt, f"Answer: {a + b}"), (prompt, f"Answer: {(a + b + 1) % 10}")]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.autograd.backward(supervised_loss(policy, examples))
        optimizer.step()
    policy.save(folder)
    return folder


def question(a: int, b: int) -> Task:
    return Task("math_dapo", ({"role": "user", "content": f"{a} + {b}"},), str(a + b))


def test_local_engine_trains_dapo_and_reports_avg_at_32(tmp_path: Path, half_right: Path) -> None:
    tasks = [question(a, b) for a, b in SUMS]
    write_tasks(tasks, tmp_path / "train.parquet")
    write_tasks([task for task in tasks[:2] for _ in range(32)], tmp_path / "val.parquet")
    settings = {
        "data.train_files": tmp_path / "train.parquet",
        "data.val_files": tmp_path / "val.parquet",
        "data.train_batch_size": 2,
        "data.max_response_length": 24,
        "actor_rollout_ref.model.path": half_right,
        "actor_rollout_ref.actor.optim": "{lr: 3.0e-3, lr_warmup_steps: 0}",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "reward.backend": "inline",
        "reward.functions": "[{fn: math_verify, level: outcome, name: correct}, {fn: overlong, args: {max_length: 24, "
        "cache_length: 8}}]",
        "trainer.total_training_steps": 8,
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.device": "cpu",
    }
    recipe = load_recipe(RECIPES / "dapo.yaml", [f"{key}={value}" for key, value in settings.items()])
    path = train(recipe, Reporter()).path
    before, *steps, after = read_metrics(path)
    evaluation = Evaluation.from_json((path / "evaluation.json").read_text(), "evaluation.json")
    assert len(evaluation.sampled) == 64
    assert evaluation.metrics["pass_at_1"] == statistics.mean(evaluation.sampled)
    assert 0.3 < before["val/pass_at_1"] < 0.7
    assert evaluation.metrics["pass_at_1"] > before["val/pass_at_1"] + 0.2
    assert all(row["rollout/gen_batches"] >= 1 for row in (*steps, after))
