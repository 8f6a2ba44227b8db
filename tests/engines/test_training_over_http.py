"""Compare training with agents over HTTP to training with the same agents in process."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from creditflow.engines.local.policy import Policy
from creditflow.rollout.client import Generation, GenerationRequest
from creditflow.runs import Ledger
from tests.engines.small_runs import expect_the_same, run

OVER_HTTP = """
from openai import AsyncOpenAI

from team import solve


class OverHttp:
    def __init__(self, client):
        self.client = client

    def __getattr__(self, agent):
        async def call(prompt):
            said = [{"role": "user", "content": prompt}]
            return (await self.client.chat.completions.create(model=agent, messages=said)).choices[0].message.content

        return call


async def solve_over_http(task, team):
    async with AsyncOpenAI(base_url=team.base_url, api_key=team.api_key, max_retries=0) as client:
        return await solve(task, OverHttp(client))
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the scheduler's time limits, so that it waits for every rollout even on a busy machine."""
    for seconds in ("_PATIENCE", "_LONGEST_WAIT"):
        monkeypatch.setattr(f"creditflow.rollout.scheduler.{seconds}", 600.0)


Seed = tuple[int, ...]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[Seed]]:
    """The seeds of every generation's calls. The log-probs of a call depend on its batch in their last bits."""
    seeds: list[list[Seed]] = []
    generate = Policy.generate

    def noted(policy: Policy, requests: Sequence[GenerationRequest]) -> list[Generation]:
        seeds.append([request.seed for request in requests])
        return generate(policy, requests)

    monkeypatch.setattr(Policy, "generate", noted)
    return seeds


def test_training_and_audit_over_http_equal_those_in_process(
    recipe_file: Path, batches: list[list[Seed]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe_file.parent / "over_http.py").write_text(OVER_HTTP)
    monkeypatch.syspath_prepend(str(recipe_file.parent))
    settings = (
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "actor_rollout_ref.rollout.n=4",
        "audit.every=2",
        "audit.max_token_frac=0.9",
        "audit.continuations=2",
    )
    here, batches_here = run(recipe_file, "here", *settings), tuple(batches)
    batches.clear()
    there = run(recipe_file, "there", *settings, "team.workflow=over_http.py:solve_over_http")
    expect_the_same(here, there, steps=2)
    assert tuple(batches) == batches_here
    steps = [step for trajectory in Ledger.open(there).read(2).batch.to_trajectories() for step in trajectory.steps]
    assert {step.turn for step in steps} == {0}
