import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("verl_cpu")

import torch

from creditflow._utils.huggingface import load_tokenizer
from creditflow.config import load_recipe
from creditflow.credit import assign, explain, make_threshold
from creditflow.data import Score, Trajectory
from creditflow.engines.local.policy import Policy
from creditflow.engines.models.folders import model_folder
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.plugins.model_rewards.information_gain import InformationGain
from creditflow.runs import Ledger
from tests.builders import mostly_slow
from tests.engines.test_tracked_runs import close, expected_rows, tensorboard_numbers, tensorboard_texts
from tests.engines.verl.runs import CHAIN, SMALL, TWO_POLICIES, Run, recomputed, run
from tests.paths import ROOT, TOY

pytestmark = pytest.mark.usefixtures("verl_ray")

TASKS, TRAJECTORIES = 4, 3
LITTLE = (
    *SMALL,
    "recipe.val_tasks=4",
    f"data.train_batch_size={TASKS}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "reward.num_workers=1",
)
CHAIN_REWARDS = ("answer_right", "plan_right", "digits_right", "verdict_right")
GAIN = "creditflow.plugins.model_rewards.information_gain:InformationGain"
EPOCH = 2
"""Training steps per epoch; an epoch contains every task once. The longer run resumes in the second epoch."""


@pytest.fixture(scope="module", params=mostly_slow([(2,), (3, 4)], {(2,)}), ids=str)
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of the arithmetic team; or four on two ranks, the last one after a resume."""
    folder = tmp_path_factory.mktemp("chain") / "run"
    functions = ", ".join(f"{{fn: 'arithmetic_chain.py:{name}'}}" for name in CHAIN_REWARDS)
    options = (
        *(*LITTLE, f"recipe.train_tasks={EPOCH * TASKS}", "trainer.logger=[console,tensorboard]"),
        f"reward.functions=[{functions}, {{fn: '{GAIN}', weight: 0, args: {{cue: ' =', limit: 50}}}}]",
    )
    for steps in request.param:
        last = (f"trainer.total_training_steps={steps}", "trainer.save_freq=1")
        trained = run(CHAIN, folder, *options, *last, n_ranks=len(request.param))
    assert len(trained.steps) == request.param[-1]
    return trained


def test_trackers_have_the_metrics_and_report(chain: Run):
    for key in ("actor/grad_norm", "credit/mean/executor", "guard/fallback", "val/pass_at_1"):
        assert close(tensorboard_numbers(chain.folder, key), chain.folder, key), key
    texts = tensorboard_texts(chain.folder)
    assert "| `verifier` |" in texts["report"]
    assert len(texts["final_trajectories"].splitlines()) == 2 + len(expected_rows(chain.folder))


def test_information_gain_is_under_the_initial_weights(chain: Run):
    recipe = load_recipe(CHAIN, LITTLE)
    function = InformationGain(path=str(model_folder(recipe, "default")), cue=" =", limit=50)

    async def gains(trajectories: list[Trajectory]) -> list[Score]:
        return await asyncio.gather(*(function(step, t) for t in trajectories for step in t.steps))

    for number in range(1, len(chain.steps) + 1):
        trajectories = chain.batch(number).to_trajectories()
        recorded = [step.scores["information_gain"].value for t in trajectories for step in t.steps]
        expected = [score.value for score in asyncio.run(gains(trajectories))]
        np.testing.assert_allclose(recorded, expected, atol=1e-4)
        assert np.ptp(expected) > 1


def test_rollout_and_actor_agree_on_log_probs(chain: Run):
    assert chain.series("training/rollout_probs_diff_mean").max() < 1e-6
    largest = chain.series("training/rollout_probs_diff_max")  # of some 1,500 tokens; without weight sync, above 1e-3
    assert np.median(largest) < 1e-5
    assert largest.max() < 1e-4  # in float32, single tokens differ by some 1e-5 in any computation: see below


def test_log_prob_differences_are_float32_rounding(chain: Run):
    last = len(chain.steps)
    batch = chain.batch(last)  # sampled with the weights of the step before
    folder = chain.folder / f"checkpoints/global_step_{last - 1}/actor/huggingface"
    logprobs_T, largest = recomputed(batch, range(batch.n_steps), folder)
    # Logits are sums of many products, with errors of some units in the last place; so are probabilities.
    rounding = 32 * float(np.finfo(np.float32).eps) * largest
    assert 0 < np.abs(np.exp(logprobs_T) - np.exp(batch.logprobs)).max() < rounding
    assert 0 < chain.series("training/rollout_probs_diff_max")[-1] < rounding < 1e-3  # exceeded without weight sync


@pytest.mark.slow
def test_probabilities_diverge_without_weight_sync(tmp_path: Path):
    control = ("++actor_rollout_ref.rollout.custom.weight_sync=false",)
    trained = run(TOY, tmp_path / "run", "trainer.val_before_train=false", verl=control)
    first, *later = trained.series("training/rollout_probs_diff_max")
    assert first < 1e-5  # the folder's weights are the trainer's initial ones
    assert min(later) > 1e-3


def test_training_makes_better_steps_more_likely(chain: Run):
    for recorded in Ledger.open(chain.folder):
        folder = chain.folder / f"checkpoints/global_step_{recorded.step}/actor/huggingface"
        logprobs_T, _ = recomputed(recorded.batch, range(recorded.batch.n_steps), folder)
        # The same responses before and after the update: no sampling noise.
        assert recorded.assignment.token_advantages() @ (logprobs_T - recorded.batch.logprobs) > 0


def test_run_trains_each_task_once_per_epoch(chain: Run):
    assert [row["step"] for row in chain.metrics] == [0, *range(1, len(chain.steps) + 1)]
    assert (chain.series("actor/grad_norm") > 0).all()
    for first in range(1, len(chain.steps), EPOCH):  # also in an epoch with a resume
        of_epoch = [chain.batch(step) for step in range(first, first + EPOCH)]
        assert len({task.text for batch in of_epoch for task in batch.tasks}) == EPOCH * TASKS
    assert (chain.folder / "evaluation.json").exists()


def test_step_files_hold_every_rollout_of_every_task(chain: Run):
    for step, row in enumerate(chain.metrics[1:], start=1):
        batch = chain.batch(step)
        assert batch.n_trajectories == TASKS * TRAJECTORIES
        assert np.bincount(batch.group_of_trajectory).tolist() == [TRAJECTORIES] * TASKS
        assert batch.agent_names == ("planner", "executor", "verifier")
        assert set(batch.policy_version.tolist()) == {step - 1}
        lengths = np.bincount(batch.trajectory_of_step)
        assert lengths.min() < lengths.max()  # trajectories differ in length
        assert row["rollout/tokens"] == batch.prompt_ids.size + batch.response_ids.size
        assert row["rollout/lost_frac"] == 0


def assert_every_step_can_be_asked_why(folder: Path) -> None:
    for recorded in Ledger.open(folder):
        assert recorded.assignment is not None
        for s in range(recorded.batch.n_steps):
            assert explain(recorded.assignment, s).replay() == recorded.assignment.advantage.advantage_S[s]


def test_recorded_credit_matches_the_recorded_rollouts(chain: Run):
    config = load_recipe(CHAIN, LITTLE).config
    for recorded in Ledger.open(chain.folder):
        batch = recorded.batch
        assignment = assign(batch, config.credit, threshold=make_threshold(0.5, config.team.agents))
        file = pq.read_table(chain.folder / f"steps/{recorded.step:06d}.parquet")
        assert file["advantage"].to_numpy().tolist() == assignment.advantage.advantage_S.tolist()
        assert file["credit"].to_numpy().tolist() == assignment.credit.total_S.tolist()
        assert batch.scored.any(axis=1).all()
        assert len(np.unique(batch.scores[batch.scored])) > 2
        assert not np.isnan(batch.outcome).any()
    assert_every_step_can_be_asked_why(chain.folder)


@pytest.mark.slow
def test_two_policies_train_on_their_own_agents_steps(tmp_path: Path):
    trained = run(TOY, tmp_path / "run", *TWO_POLICIES, "trainer.total_training_steps=2", n_ranks=2)
    batch = trained.batch(2)
    assert batch.policy_names == ("first", "second")
    for name in ("first", "second"):
        assert (trained.series(f"{name}/actor/grad_norm") > 0).all()
        assert trained.series(f"{name}/training/rollout_probs_diff_max").max() < 1e-5
    folder = trained.folder / "checkpoints/global_step_2"
    weights = [
        Policy.load(path / "actor/huggingface", torch.device("cpu")).model.state_dict()
        for path in (folder, folder / "policies/second")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert any(not torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.slow
def test_template_options_and_samples_have_effect(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    template = '{% for m in messages %}{{ m.content }} {% endfor %}{{ "loud" if enable_thinking else "quiet" }}:'
    verl = (
        f"actor_rollout_ref.model.custom_chat_template='{template}'",
        "+data.apply_chat_template_kwargs.enable_thinking=true",
        *("trainer.logger=[tensorboard]", "trainer.log_val_generations=2"),
    )
    trained = run(TOY, tmp_path / "run", "trainer.total_training_steps=1", verl=verl)
    batch, tokenizer = trained.batch(1), load_tokenizer(tiny_byte_model(), "test")
    prompts = np.split(batch.prompt_ids, batch.prompt_offsets[1:-1])
    assert {tokenizer.decode(ids).rpartition(" ")[2] for ids in prompts} == {"loud:"}
    logged = [file.read_bytes() for file in (tmp_path_factory.getbasetemp() / "tensorboard").rglob("events.*")]
    assert sum(events.count(b"### Sample 2") for events in logged) == 2  # before and after training


@pytest.mark.slow
def test_kl_in_the_reward_is_part_of_outcomes(tmp_path: Path):
    verl = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5")
    trained = run(CHAIN, tmp_path / "run", *LITTLE, "trainer.total_training_steps=2", verl=verl)
    batch, reference = trained.batch(2), model_folder(load_recipe(CHAIN, LITTLE), "default")
    kl_T = (batch.logprobs - recomputed(batch, range(batch.n_steps), reference)[0]) * batch.response_mask
    kl_S = np.diff(np.append(0.0, np.cumsum(kl_T))[batch.token_offsets])
    kl_N = np.bincount(batch.trajectory_of_step, kl_S)
    right_N = np.array([score.value for score in batch.outcome_scores])
    np.testing.assert_allclose(batch.outcome, right_N - 0.5 * kl_N, atol=1e-3)
    assert np.abs(kl_N).max() > 0.1
    assert trained.series("actor/reward_kl_penalty")[0] == pytest.approx(0, abs=1e-5)
    assert_every_step_can_be_asked_why(trained.folder)


@pytest.mark.slow
def test_gae_trains_a_critic(tmp_path: Path):
    trained = run(
        TOY, tmp_path / "run", "algorithm.adv_estimator=gae", "algorithm.outcome_to=answer", "trainer.save_freq=1"
    )
    assert (trained.series("critic/grad_norm") > 0).all()
    assert (trained.series("actor/grad_norm") > 0).all()
    assert trained.series("critic/vf_loss")[-1] != trained.series("critic/vf_loss")[0]
    assert_every_step_can_be_asked_why(trained.folder)


@pytest.mark.slow
def test_groups_without_variance_are_filtered_and_refilled(tmp_path: Path):
    filtered = ("algorithm.filter_groups.enable=true",)
    trained = run(TOY, tmp_path / "run", "trainer.total_training_steps=6", "recipe.tasks=3", verl=filtered)
    assert sum(row.get("training/filter_groups/evicted_samples", 0) for row in trained.metrics) > 0
    for step in range(1, 7):
        batch = trained.batch(step)
        assert batch.n_trajectories == 8
        assert not np.isnan(batch.outcome).any()
        for group in range(len(batch.group_names)):
            assert len(set(batch.outcome[batch.group_of_trajectory == group])) > 1


@pytest.mark.slow
def test_http_agents_are_trained_on_their_samples(tmp_path: Path):
    recipe = ROOT / "examples/frameworks/recipe.yaml"
    trained = run(recipe, tmp_path / "run", "team.workflow=with_langgraph.py:solve", "trainer.total_training_steps=2")
    assert trained.series("training/rollout_probs_diff_max").max() < 1e-4
    assert (trained.series("actor/grad_norm") > 0).all()
    batch = trained.batch(2)
    assert batch.agent_names == ("writer", "editor")
    assert (batch.n_trajectories, batch.n_steps) == (16, 32)
    assert_every_step_can_be_asked_why(trained.folder)


HALVES = """
from dataclasses import dataclass, replace

from creditflow.credit import OutcomeRule, propagation_rule


@propagation_rule("halves")
@dataclass(frozen=True)
class Halves(OutcomeRule):
    def credit(self, inputs):
        credit = self.paid(inputs)
        return replace(credit, own_S=0.5 * credit.own_S, paid_S=None)
"""


@pytest.mark.slow
def test_rule_of_a_file_assigns_credit(tmp_path: Path):
    for file in (TOY, TOY.with_suffix(".py")):
        shutil.copy(file, tmp_path)
    (tmp_path / "rules.py").write_text(HALVES)
    rule = "algorithm.propagation=rules.py:Halves"
    run(tmp_path / TOY.name, tmp_path / "run", rule, "trainer.total_training_steps=1")
    recorded = Ledger.open(tmp_path / "run").read(1)
    assert recorded.assignment.options.propagation.name == f"{tmp_path}/rules.py:Halves"
    plain = assign(recorded.batch, replace(recorded.assignment.options, propagation="own"))
    np.testing.assert_array_equal(recorded.assignment.credit.own_S, 0.5 * plain.credit.own_S)
