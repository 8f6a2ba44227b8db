"""Training on verifiers' tasksets with the embedded engine: `make test-verifiers`, in an environment with both."""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verifiers")

import torch
import verifiers.v1 as vf

from creditflow._utils.progress import Reporter
from creditflow.config import Recipe, load_recipe
from creditflow.data import Trajectory
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.trainer import train
from creditflow.errors import ConfigError, DataError
from creditflow.plugins.verifiers.harness import InProcessHarnessConfig
from creditflow.plugins.verifiers.record import traces_of
from creditflow.plugins.verifiers.tasks import environment_config, parse_address
from creditflow.rollout.chat import parse_tool_calls
from creditflow.runs import Ledger
from tests.plugins.verifiers.model import CALL
from tests.plugins.verifiers.servers import resources, saying, serving_tools

RECIPE = """
data: {train_batch_size: 2, val_max_samples: 1, max_prompt_length: 480, max_response_length: 24}
actor_rollout_ref:
  model: {path: MODEL}
  actor: {optim: {lr: 0.01}, ppo_mini_batch_size: 2, ppo_max_token_len_per_gpu: 1024}
  rollout: {n: 2}
team: {workflow: "ADDRESS"}
trainer: {total_training_steps: 2, test_freq: -1, num_threads: 1, device: cpu, val_before_train: false}
"""
DESK = "verifiers://price-desk?repeat=2"


def recipe(folder: Path, model: Path, address: str, *overrides: str) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.replace("MODEL", str(model)).replace("ADDRESS", address))
    return load_recipe(file, [*overrides, f"trainer.default_local_dir={folder / 'run'}"])


def trajectories_of(folder: Path, *steps: int) -> list[Trajectory]:
    ledger = Ledger.open(folder / "run")
    return [trajectory for step in steps for trajectory in ledger.read(step).batch.to_trajectories()]


@pytest.fixture(scope="module")
def tools_url(tasksets: None) -> Iterator[str]:
    """The desk's tool server. verifiers would launch a process for it, which imports for seconds of CPU time."""
    from price_desk import PriceTools

    with serving_tools(PriceTools(vf.SharedToolsetConfig())) as url:
        yield url


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, tools_url: str) -> Path:
    """Two steps of the desk and its customer."""
    folder = tmp_path_factory.mktemp("desk")
    train(recipe(folder, model_folder, f"{DESK}&tools.url={tools_url}"), Reporter())
    return folder


@pytest.mark.slow
def test_tool_server_is_launched_by_verifiers(tmp_path: Path, model_folder: Path) -> None:
    train(recipe(tmp_path, model_folder, DESK, "trainer.total_training_steps=1"), Reporter())
    assert any(trace.metrics.get("calls") for t in trajectories_of(tmp_path, 1) for trace in traces_of(t))


def test_roles_tasks_and_rewards_are_those_of_the_environment(tmp_path: Path, model_folder: Path) -> None:
    config = recipe(tmp_path, model_folder, DESK).config
    assert list(config.team.agents) == ["desk", "customer"]
    assert config.data.train_files == DESK
    assert [(f.fn, f.name, f.weight, f.args) for f in config.reward.functions] == [
        ("verifiers", None, None, {"range": [0.0, 1.5]}),
        ("verifiers_part", "brief", 0.5, {"part": "brief"}),
        ("verifiers_part", "right", 1.0, {"part": "right"}),
    ]


def test_run_records_tools_roles_and_rewards(desk: Path) -> None:
    trajectories = trajectories_of(desk, 1, 2)
    assert len(trajectories) == 8
    called = 0
    for trajectory in trajectories:
        (own,) = (trace for trace in traces_of(trajectory) if trace.rewards)
        assert own.agent == "desk"
        assert trajectory.outcome is not None
        assert trajectory.outcome.value == own.reward
        last = trajectory.steps[own.steps[-1]]
        assert {name: score.value for name, score in last.scores.items()} == {
            name: pair[0] for name, pair in own.rewards.items() if pair
        }
        assert not any(step.scores for step in trajectory.steps if step is not last)
        called += int(own.metrics["calls"] or 0)
    assert called > 0


def test_role_that_must_not_learn_has_no_sampled_tokens(desk: Path) -> None:
    steps = [step for trajectory in trajectories_of(desk, 1, 2) for step in trajectory.steps]
    assert {step.agent for step in steps} == {"desk", "customer"}
    assert not any(any(step.response_mask) for step in steps if step.agent == "customer")
    assert all(all(step.response_mask) for step in steps if step.agent == "desk")


def test_steps_hold_exactly_the_sampled_tokens(desk: Path, model_folder: Path) -> None:
    policy = Policy.load(model_folder, torch.device("cpu"))
    steps = [s for t in trajectories_of(desk, 1) for s in t.steps if s.agent == "desk"]
    for step in steps:
        ids = torch.tensor([[*step.prompt_ids, *step.response_ids]])
        with torch.no_grad():
            logprobs = torch.log_softmax(policy.model(ids).logits[0].double(), -1)
        at = range(len(step.prompt_ids) - 1, ids.shape[1] - 1)
        again = [float(logprobs[place, token]) for place, token in zip(at, step.response_ids, strict=True)]
        np.testing.assert_allclose(step.logprobs, again, atol=1e-4)
        assert policy.decode(step.response_ids) == step.response


def test_rewards_equal_those_of_verifiers_alone(desk: Path, tools_url: str) -> None:
    trajectories = trajectories_of(desk, 1)
    recorded = [[(trace.agent, dict(trace.rewards)) for trace in traces_of(one)] for one in trajectories]
    assert asyncio.run(replayed(trajectories, f"{DESK}&tools.url={tools_url}")) == recorded


async def replayed(
    trajectories: Sequence[Trajectory], address: str
) -> list[list[tuple[str, dict[str, tuple[float, float]]]]]:
    """The rewards of verifiers' own runs of the environment, with a server that says the recorded responses."""
    config = environment_config(parse_address(address, "test"), "test")
    seat = {"harness": InProcessHarnessConfig(), "runtime": vf.SubprocessConfig()}
    roles = {name: one for name, one in config if isinstance(one, vf.AgentConfig)}
    env = vf.load_environment(
        config.model_copy(update={name: one.model_copy(update={**seat, "model": name}) for name, one in roles.items()})
    )
    task_type = env.taskset.task_type()
    rewards = []
    async with env.serving():
        for trajectory in trajectories:
            said: dict[str, list[tuple[str, str]]] = defaultdict(list)
            for step in trajectory.steps:
                said[step.agent].append((step.response, step.info.get("finish_reason", "stop")))
            data = task_type.data_type().model_validate_json(trajectory.task.extra_info["data"])
            with saying(said) as url:
                context = vf.ModelContext(model="?", client=vf.EvalClientConfig(base_url=url, api_key_var="NONE"))
                (slot,) = env.slots(task_type(data, env.config.taskset.task))
                episode = await env.run_slot(slot, context)
            assert episode.ok, [trace.errors for trace in episode.traces]
            rewards.append(
                [
                    (trace.agent.name, {name: (reward.score, reward.weight) for name, reward in trace.rewards.items()})
                    for trace in episode.traces
                ]
            )
    return rewards


# Tasksets that verifiers ships


def test_textarena_trains(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("textarena")
    words = tmp_path / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (words / name).write_text("yes\ntea\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    monkeypatch.setattr(nltk, "download", lambda *names, **options: False)  # textarena asks for it at each import
    address = "verifiers://textarena?game=Hangman-v0&size=4&env.player.max_turns=3"
    train(recipe(tmp_path, model_folder, address, "trainer.total_training_steps=1"), Reporter())
    for trajectory in trajectories_of(tmp_path, 1):
        (trace,) = traces_of(trajectory)
        assert (trace.agent, list(trace.rewards)) == ("player", ["game_reward"])
        assert trajectory.outcome is not None
        assert trajectory.outcome.value == trace.reward


def test_nemo_gym_trains(tmp_path: Path, model_folder: Path, tools_url: str) -> None:
    rows = [{"responses_create_params": {"input": f"say {word}"}, "word": word} for word in ("3", "5", "yes") * 4]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with resources() as (url, verified):
        address = f"verifiers://nemo-gym?dataset={tmp_path}/rows.jsonl&task.resources_url={url}&split=all"
        address += f"&tools.url={tools_url}"
        train(recipe(tmp_path, model_folder, address, "trainer.total_training_steps=1"), Reporter())
    trajectories = trajectories_of(tmp_path, 1)
    recorded = Counter(trace.reward for trajectory in trajectories for trace in traces_of(trajectory))
    assert recorded.total() == 4
    assert recorded <= Counter(verified)  # which has the validation's, too


# Refusals


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("price-dsk", "no taskset 'price-dsk' is installed"),
        ("textarna", "did you mean 'textarena'"),
        ("price-desk?repeat=many", "repeat: Input should be a valid integer"),
        ("price-desk?repaet=2", "repaet"),
        ("price-desk?env.desk.harness.id=bash", "role desk is run by the program bash"),
        ("price-desk?tools.runtime.type=docker", "the tool server shop runs in docker"),
        ("boxed", "BoxedTask needs a container"),
        ("commanding", "CommandingTask.runs_code runs commands in the rollout's box"),
        ("price-desk?task.judges=[{%22id%22:%22commanding%22}]", "CommandingJudge.score runs commands in the"),
    ],
)
def test_unusable_taskset_is_refused(tmp_path: Path, model_folder: Path, address: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        recipe(tmp_path, model_folder, f"verifiers://{address}")


def test_numeric_text_is_a_text(tmp_path: Path, model_folder: Path) -> None:
    config = environment_config(parse_address("verifiers://price-desk?label=007&repeat=1", "test"), "test")
    assert (config.taskset.label, config.taskset.repeat) == ("007", 1)


def test_call_is_one_word_of_the_model() -> None:
    assert [call.name for call in parse_tool_calls(CALL)[1]] == ["shop_price"]
