"""Compare training with agents over HTTP to training with the same agents in process."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.trainer import train
from creditflow.rollout.client import Generation, GenerationRequest
from creditflow.runs import Ledger
from tests.builders import mostly_slow
from tests.engines.small_runs import expect_the_same, run
from tests.paths import RECIPES

OVER_HTTP = """
from openai import AsyncOpenAI

from SOLVE import solve


class OverHttp:
    def __init__(self, client):
        self.client = client
        self.before = None

    def __getattr__(self, agent):
        async def call(prompt, info=None):
            said = [{"role": "user", "content": prompt}]
            more = {"metadata": info} if info else {}
            if NAMES_PARENTS and self.before:
                more["extra_headers"] = {"X-Creditflow-Parents": self.before}
            answer = await self.client.chat.completions.create(model=agent, messages=said, **more)
            self.before = answer.choices[0].step_id
            return Said(answer.choices[0].message.content)

        return call


class Said(str):
    @property
    def text(self):
        return str(self)


async def solve_over_http(task, team):
    async with AsyncOpenAI(base_url=team.base_url, api_key=team.api_key, max_retries=0) as client:
        return await solve(task, OverHttp(client))
"""


def over_http(module: str, *, names_parents: bool = False) -> str:
    """The workflow `solve` of `module` with agents that are called over HTTP."""
    return OVER_HTTP.replace("SOLVE", module).replace("NAMES_PARENTS", str(names_parents))


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


IN_A_THREAD = """
from openai import OpenAI


def solve_in_a_thread(task, team):
    with OpenAI(base_url=team.base_url, api_key=team.api_key, max_retries=0) as client:

        def ask(agent, prompt):
            said = [{"role": "user", "content": prompt}]
            return client.chat.completions.create(model=agent, messages=said).choices[0].message.content

        return ask("editor", f"{ask('writer', task.text)} i")
"""


WORKFLOWS = ("over_http.py:solve_over_http", "in_a_thread.py:solve_in_a_thread")


@pytest.mark.parametrize("workflow", mostly_slow(WORKFLOWS, WORKFLOWS[:1]))
def test_training_and_audit_over_http_equal_those_in_process(
    recipe_file: Path, workflow: str, batches: list[list[Seed]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe_file.parent / "over_http.py").write_text(over_http("team"))
    (recipe_file.parent / "in_a_thread.py").write_text(IN_A_THREAD)
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
    there = run(recipe_file, "there", *settings, f"team.workflow={workflow}")
    expect_the_same(here, there, steps=2)
    assert tuple(batches) == batches_here
    steps = [step for trajectory in Ledger.open(there).read(2).batch.to_trajectories() for step in trajectory.steps]
    assert {step.turn for step in steps} == {0}


@pytest.mark.slow
def test_arithmetic_chain_over_http_equals_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Read from the texts, the parent of a second attempt is the executor, where the verifier named another number.
    (tmp_path / "over_http.py").write_text(over_http("arithmetic_chain", names_parents=True))
    monkeypatch.syspath_prepend(str(RECIPES))
    settings = ["trainer.total_training_steps=3", "data.train_batch_size=8", "data.val_max_samples=32"]
    paths = {}
    for name, more in {"here": [], "there": [f"team.workflow={tmp_path}/over_http.py:solve_over_http"]}.items():
        paths[name] = tmp_path / name
        overrides = [*settings, *more, f"trainer.default_local_dir={paths[name]}"]
        train(load_recipe(RECIPES / "arithmetic_chain.yaml", overrides), Reporter())
    expect_the_same(paths["here"], paths["there"], steps=3)
