"""The recipe dapo_32b against DAPO's published reward (arXiv 2503.14476, equations 7 and 13), worked out by hand."""

import asyncio
import statistics

import pytest

from creditflow.config import load_recipe
from creditflow.credit import assign
from creditflow.data import Task, TrajectoryBatch
from creditflow.rewards import RewardManager
from creditflow.rollout import AgentSpec, Rollout, Scheduler, run_rollouts
from creditflow.rollout.recorder import Sampling
from tests.builders import Scripted
from tests.paths import RECIPES
from tests.recipes.team import functions_of, loader

of_recipe = loader("dapo")
QUESTION = Task("math_dapo", ({"role": "user", "content": "What is 33 + 1? End with Answer: $Answer"},), "34")


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
    replies = iter([b"Answer: 34", b"x" * 17408 + b"Answer: 34", b"x" * 20470 + b"Answer: 35", b"no idea"])
    rewards = [1.0, 1 - 1034 / 4096, -1 - 4096 / 4096, -1.0]  # 16,384 tokens are free, 10 are the answer's

    model = Scripted(lambda prompt: next(replies))
    rollouts = [Rollout(QUESTION, "u", f"u-{n}", (n,)) for n in range(4)]
    sampling = Sampling(max_tokens=20480, max_prompt_tokens=2048)
    trajectories = asyncio.run(
        run_rollouts(rollouts, of_recipe("solve"), {"solver": AgentSpec()}, Scheduler({"default": model}, 1), sampling)
    )
    asyncio.run(RewardManager(functions_of("dapo_32b"), 0.0).score(trajectories))
    assignment = assign(TrajectoryBatch.from_trajectories(trajectories), recipe.config.credit)

    mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
    assert [trajectory.outcome.value for trajectory in trajectories] == [1.0, 1.0, 0.0, 0.0]
    constant = assignment.credit.total_S - rewards
    assert constant.tolist() == pytest.approx([constant[0]] * 4)
    assert assignment.advantage.advantage_S.tolist() == pytest.approx(
        [(r - mean) / (spread + 1e-6) for r in rewards], rel=1e-9
    )
