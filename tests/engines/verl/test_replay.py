"""Replay credit in runs on verl: the same trees as on the embedded engine, trained once, within the budget."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl_cpu")

from creditflow.config import load_recipe, trained_agents
from creditflow.credit import assign
from creditflow.credit.history import History
from creditflow.credit.trees import KEY, branch_entries, rollouts_of, trees_of
from creditflow.engines.common.branches import GeneratedTokens, plan_branches
from creditflow.engines.common.components import load_functions
from creditflow.engines.local.loss import token_weights
from creditflow.errors import ConfigError
from creditflow.rollout.branching import REFUSED
from creditflow.runs import Ledger
from tests.engines.verl.runs import CHAIN, Run, run
from tests.engines.verl.test_training import SMALL, TASKS, TRAJECTORIES

REPLAY = (
    *SMALL,
    "algorithm.propagation=replay",
    "actor_rollout_ref.rollout.branching={budget: 0.4, alternatives: 3, continuations: 2}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.save_freq=1",
)


@pytest.fixture(scope="module")
def replay(verl_ray, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two training steps with branches on two ranks, the second one after a resume."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    run(CHAIN, folder, *REPLAY, "trainer.total_training_steps=1", n_ranks=2)
    return run(CHAIN, folder, *REPLAY, "trainer.total_training_steps=2", n_ranks=2)


def test_verl_samples_trees_within_the_budget(replay: Run) -> None:
    assert (replay.series("rollout/branches") > replay.series("rollout/branch_decisions")).all()
    assert (replay.series("rollout/branch_decisions") > 0).all()
    assert (replay.series("rollout/branch_refused_frac") == 0).all()
    assert (replay.series("rollout/branch_failed_frac") == 0).all()
    assert replay.series("rollout/branch_tokens_frac")[-1] == pytest.approx(0.4, abs=0.1)
    assert (replay.series("actor/grad_norm") > 0).all()


def test_verl_keeps_the_prefix_token_for_token(replay: Run) -> None:
    seen = 0
    for recorded in Ledger.open(replay.folder):
        batch = recorded.batch
        trees = trees_of(batch)
        assert trees is not None
        tokens = [batch.response_ids[a:b].tolist() for a, b in itertools.pairwise(batch.token_offsets)]
        rows = {id: s for s, id in enumerate(batch.step_ids)}
        for s in np.flatnonzero(trees.copied_S(batch)).tolist():
            n, index = batch.trajectory_of_step[s], batch.index_of_step[s]
            first = next(i for i in range(s, batch.n_steps) if batch.branch_of[i] is not None)
            other = rows[f"{batch.branch_of[first].rsplit('/', 1)[0]}/{index}"]
            assert batch.trajectory_of_step[first] == n
            assert tokens[s] == tokens[other]
            assert batch.prompts[s] == batch.prompts[other]
            assert not recorded.assignment.trained_S[s]
            seen += 1
    assert seen > 20


def test_branches_on_verl_are_scored_and_counted_apart(replay: Run) -> None:
    for row, recorded in zip(
        [row for row in replay.metrics if row["step"] > 0], Ledger.open(replay.folder), strict=True
    ):
        batch, rollout_N = recorded.batch, rollouts_of(recorded.batch)
        assert rollout_N.sum() == TASKS * TRAJECTORIES
        assert row["train/pass_at_1"] == pytest.approx(batch.outcome[rollout_N].mean())
        assert np.isfinite(batch.outcome[~rollout_N]).all()
        assert row["rollout/branches"] == (~rollout_N).sum()
        a = recorded.assignment
        again = assign(batch, a.options, history=a.history)
        assert np.array_equal(a.advantage_S, again.advantage_S)
        branch_S = ~rollout_N[batch.trajectory_of_step]
        assert a.trained_S[branch_S].any()


def test_verl_policy_loss_weighs_like_the_embedded_engine(replay: Run) -> None:
    differences = []
    for loss, recorded in zip(replay.series("actor/pg_loss"), Ledger.open(replay.folder), strict=True):
        a, batch = recorded.assignment, recorded.batch
        n_tokens_S = np.where(a.trained_S, np.diff(batch.token_offsets), 0)
        weight_S = token_weights("token-mean", n_tokens_S, batch.trajectory_of_step, share_S=a.share_S)
        plain_S = token_weights("token-mean", n_tokens_S, batch.trajectory_of_step)
        advantage_T, step_T = a.token_advantages(), np.repeat(np.arange(batch.n_steps), np.diff(batch.token_offsets))
        expected, without = (-float((own_S[step_T] * advantage_T).sum()) for own_S in (weight_S, plain_S))
        assert loss == pytest.approx(expected, rel=1e-3, abs=1e-5)  # one update, so that all ratios are 1
        differences.append(abs(without - expected))
    assert max(differences) > 0.001  # the loss without shares differs by more than the tolerance


def test_verl_draws_the_decisions_of_the_embedded_engine(replay: Run) -> None:
    recipe = load_recipe(CHAIN, [*REPLAY, "trainer.device=auto"])
    batch = Ledger.open(replay.folder).read(1).batch
    rollouts = [one for one, kept in zip(batch.to_trajectories(), rollouts_of(batch), strict=True) if kept]
    expected = {one.id: one.info.pop(KEY) for one in rollouts if KEY in one.info}
    tokens = sum(len(step.response_ids) for one in rollouts for step in one.steps)
    agents, before = trained_agents(recipe.config), GeneratedTokens(0, 0)
    plan_branches(recipe.config, load_functions(recipe), 1, agents, rollouts, tokens, before, History())
    assert {one.id: one.info[KEY] for one in rollouts if KEY in one.info} == expected


def test_generated_tokens_survive_a_resume_on_verl(replay: Run) -> None:
    total = branches = 0
    for recorded in Ledger.open(replay.folder):
        batch = recorded.batch
        copied_S = trees_of(batch).copied_S(batch)
        length_S = np.where(copied_S, 0, np.diff(batch.token_offsets))
        of_branch_S = ~rollouts_of(batch)[batch.trajectory_of_step]
        total, branches = total + int(length_S.sum()), branches + int(length_S[of_branch_S].sum())
    state = json.loads((replay.folder / "checkpoints/global_step_2/creditflow.json").read_text())
    assert (state["generated_tokens"], state["branch_tokens"]) == (total, branches)
    assert replay.series("rollout/branch_tokens_frac")[-1] == pytest.approx(branches / total)
    assert not any(REFUSED in info for info in batch.trajectory_info)
    assert any(entry is not None for entry in branch_entries(batch))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("actor_rollout_ref.actor.use_kl_loss=true", "use_kl_loss: True, but with algorithm.propagation: replay"),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "entropy_coeff: 0.01, but with algorithm.propagation: replay"),
    ],
)
def test_loss_terms_without_shares_are_refused_on_verl(tmp_path: Path, option: str, said: str) -> None:
    from creditflow.engines.verl.configuration import compose

    with pytest.raises(ConfigError, match=said):
        compose(load_recipe(CHAIN, [*REPLAY, "trainer.device=auto", option]), [], tmp_path)
