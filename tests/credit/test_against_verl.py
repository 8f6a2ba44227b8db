"""Comparison of the estimators with verl's functions of the same name, token by token, and deliberate differences.

Neutral settings: one agent, one step per trajectory, no sub-reward, no propagation, groups by task. Inputs are float64.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from creditflow.credit import assign
from creditflow.data import Score, TrajectoryBatch
from tests.builders import batch_of, credit_options, make_trajectory, step

CLOSE = 1e-6
SEEDS = (0, 1, 2, 3)
NEUTRAL = {"propagation": "none", "outcome_to": "all", "group_by": "task", "gamma": 1.0, "lam": 1.0}


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip(
        "verl.trainer.ppo.core_algos", reason="verl is not installed: nothing to compare with (extra `verl`)"
    )


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@dataclass
class Rows:
    """The same responses as padded rows for verl and as a batch of one-step trajectories."""

    reward: np.ndarray
    """[N]"""
    uid: np.ndarray
    """[N] names of tasks, of dtype object."""
    mask: np.ndarray
    """[N, L] 1 at sampled tokens; 0 at tool tokens and padding."""
    lengths: np.ndarray
    """[N] numbers of response tokens, tool tokens included."""
    values: np.ndarray
    """[N, L] a critic's values."""
    batch: TrajectoryBatch

    @property
    def present(self):
        """[N, L] whether the entry is a token, sampled or not; in order, these are the batch's [T] tokens."""
        return np.arange(self.mask.shape[1]) < self.lengths[:, None]

    @property
    def reward_at_last(self):
        """[N, L] the reward at the row's last sampled token."""
        rewards = np.zeros(self.mask.shape)
        last = self.mask.shape[1] - 1 - np.argmax(self.mask[:, ::-1], axis=1)
        rewards[np.arange(len(last)), last] = self.reward
        return rewards


def rows(seed, *, tasks=5, trajectories=4, longest=7, tools=False, rewards=None):
    """Random responses of 1 to `longest` tokens. `tools`: include tool tokens before the last token."""
    rng = np.random.default_rng(seed)
    n = tasks * trajectories if rewards is None else len(rewards)
    reward = rng.normal(0.4, 1.0, n) if rewards is None else np.asarray(rewards, dtype=np.float64)
    lengths = rng.integers(1, longest + 1, n)
    mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
    if tools:
        mask &= (rng.random(mask.shape) < 0.6) | (np.arange(longest) == lengths[:, None] - 1)
    return rows_of(reward, [f"q{i // trajectories}" for i in range(n)], mask, lengths, rng.normal(0.0, 1.0, mask.shape))


def rows_of(reward, uid, mask, lengths=None, values=None):
    mask = np.asarray(mask)
    lengths = mask.sum(axis=1) if lengths is None else np.asarray(lengths)
    batch = batch_of(
        *(
            make_trajectory(
                f"t{i}", [step(tokens=int(k), response_mask=tuple(int(m) for m in row[:k]))], float(outcome), task=task
            )
            for i, (outcome, task, row, k) in enumerate(zip(reward, uid, mask, lengths, strict=True))
        )
    )
    values = np.zeros(mask.shape) if values is None else values
    return Rows(np.asarray(reward, dtype=np.float64), np.array(uid, dtype=object), mask, lengths, values, batch)


def ours(responses, *, values=False, **options):
    """[N, L] our advantages in verl's layout, 0 at padding."""
    values_T = responses.values[responses.present] if values else None
    laid_out = np.zeros(responses.mask.shape)
    assignment = assign(responses.batch, credit_options(**{**NEUTRAL, **options}), values_T=values_T)
    laid_out[responses.present] = assignment.token_advantages()
    return laid_out


def theirs(torch, function, responses, *, rewards=None, dtype=None, **more):
    """[N, L] verl's advantages, float64, masked here, because verl masks tool tokens for some estimators only."""
    rewards = responses.reward_at_last if rewards is None else rewards
    advantages, _ = function(torch.tensor(rewards, dtype=dtype), response_mask=torch.tensor(responses.mask), **more)
    return advantages.double().numpy() * responses.mask


def neutral_config(gamma=1.0):
    return SimpleNamespace(gamma=gamma)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(
    ("estimator", "options", "more"),
    [
        ("grpo", {"norm_adv_by_std_in_grpo": True}, {"norm_adv_by_std_in_grpo": True}),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, {"norm_adv_by_std_in_grpo": False}),
        ("rloo", {}, {}),
        ("reinforce_plus_plus", {"gamma_token": 1.0}, {"config": neutral_config(1.0)}),
        ("reinforce_plus_plus", {"gamma_token": 0.9}, {"config": neutral_config(0.9)}),
        ("reinforce_plus_plus_baseline", {}, {}),
    ],
)
def test_estimator_equals_verl(verl, torch, estimator, options, more, seed, tools):
    responses = rows(seed, tools=tools)
    index = {} if estimator == "reinforce_plus_plus" else {"index": responses.uid}
    expected = theirs(torch, getattr(verl, f"compute_{estimator}_outcome_advantage"), responses, **index, **more)
    np.testing.assert_allclose(ours(responses, adv_estimator=estimator, **options), expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma_token", "lam_token"), [(1.0, 1.0), (0.97, 1.0), (1.0, 0.9), (0.95, 0.8), (0.9, 0.0)])
@pytest.mark.parametrize("tools", [False, True])
def test_gae_equals_verl(verl, torch, seed, gamma_token, lam_token, tools):
    responses = rows(seed, longest=11, tools=tools)
    expected = theirs(torch, verl.compute_gae_advantage_return, responses, values=torch.tensor(responses.values),
                      gamma=gamma_token, lam=lam_token)  # fmt: skip
    got = ours(responses, values=True, adv_estimator="gae", outcome_to="answer", gamma_token=gamma_token,
               lam_token=lam_token)  # fmt: skip
    np.testing.assert_allclose(got, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_with_one_reward_per_token_equals_verl(verl, torch, seed):
    rng = np.random.default_rng(seed)
    responses = rows(seed)
    rho = rng.random(responses.mask.shape) * responses.mask
    trajectories = []
    for i, (outcome, task, k) in enumerate(zip(responses.reward, responses.uid, responses.lengths, strict=True)):
        per_token = Score(tuple(rho[i, :k].tolist()))
        trajectories.append(
            make_trajectory(f"t{i}", [step("solver", per_token, tokens=int(k))], float(outcome), task=task)
        )
    # A step's own reward is the mean over its tokens, so that long responses earn no more than short ones.
    rewards = responses.reward_at_last + rho / responses.lengths[:, None]
    expected = theirs(torch, verl.compute_gae_advantage_return, responses, rewards=rewards,
                      values=torch.tensor(responses.values), gamma=0.95, lam=0.9)  # fmt: skip
    responses.batch = batch_of(*trajectories)
    got = ours(responses, values=True, adv_estimator="gae", outcome_to="answer", decomp_granularity="token_level",
               sub_reward_origin=0.0, gamma_token=0.95, lam_token=0.9)  # fmt: skip
    np.testing.assert_allclose(got, expected, rtol=0, atol=CLOSE)


# Deliberate differences.


@pytest.mark.parametrize(
    ("estimator", "scaling"),
    [("grpo", {"norm_adv_by_std_in_grpo": True}), ("grpo", {"norm_adv_by_std_in_grpo": False}), ("rloo", {})],
)
def test_group_of_one_differs_from_verl(verl, torch, estimator, scaling):
    responses = rows_of([0.7], ["q0"], [[1, 1]])
    function = getattr(verl, f"compute_{estimator}_outcome_advantage")
    expected = theirs(torch, function, responses, index=responses.uid, **scaling)
    np.testing.assert_allclose(expected, [[0.7, 0.7]], rtol=0, atol=CLOSE)
    assert ours(responses, adv_estimator=estimator, **scaling).tolist() == [[0.0, 0.0]]


def test_grpo_backs_off_for_a_group_of_one_unlike_verl(verl, torch):
    responses = rows_of([0.7, 0.1, 0.3], ["q0", "q1", "q1"], [[1], [1], [1]])
    expected = theirs(
        torch, verl.compute_grpo_outcome_advantage, responses, index=responses.uid, norm_adv_by_std_in_grpo=False
    )
    assert expected[0, 0] == pytest.approx(0.7)
    got = ours(responses, norm_adv_by_std_in_grpo=False)
    assert got[0, 0] == pytest.approx(0.7 - np.mean([0.7, 0.1, 0.3]))
    np.testing.assert_allclose(got[1:], expected[1:], rtol=0, atol=CLOSE)


def test_grpo_for_tied_rewards_differs_from_verl(verl, torch):
    responses = rows_of([0.7] * 8, ["q0"] * 8, [[1]] * 8)
    in_float32 = theirs(torch, verl.compute_grpo_outcome_advantage, responses, dtype=torch.float32, index=responses.uid)
    assert np.abs(in_float32).min() > 0.05
    assert np.abs(in_float32).max() < 0.06
    assert ours(responses).tolist() == [[0.0]] * 8


def test_whitening_tied_rewards_differs_from_verl(verl, torch):
    responses = rows_of([0.7] * 8, ["q0"] * 8, [[1, 1]] * 8)
    function = verl.compute_reinforce_plus_plus_outcome_advantage
    assert np.abs(theirs(torch, function, responses, dtype=torch.float32, config=neutral_config())).max() > 1e-4
    assert not ours(responses, adv_estimator="reinforce_plus_plus").any()


def test_whitening_a_single_token_differs_from_verl(verl, torch):
    responses = rows_of([0.7], ["q0"], [[1]])
    with pytest.raises(ValueError, match="sum of the mask is one"):
        theirs(torch, verl.compute_reinforce_plus_plus_outcome_advantage, responses, config=neutral_config())
    assert ours(responses, adv_estimator="reinforce_plus_plus").tolist() == [[0.0]]


def test_reward_at_a_tool_token_differs_from_verl(verl, torch):
    """verl puts the reward at the last token of the response, even a tool token, and its passes skip tool tokens."""
    responses = rows_of([1.0, 0.25], ["q0", "q0"], [[1, 1, 0], [1, 1, 1]], lengths=[3, 3])
    at_the_end = np.zeros((2, 3))
    at_the_end[:, -1] = responses.reward
    values = torch.zeros(2, 3, dtype=torch.float64)
    _, verls = verl.compute_gae_advantage_return(
        torch.tensor(at_the_end), values, torch.tensor(responses.mask), 1.0, 1.0
    )
    assert verls[0, :2].tolist() == [0.0, 0.0]
    assert verls[1].tolist() == [0.25, 0.25, 0.25]
    options = credit_options(**{**NEUTRAL, "adv_estimator": "gae", "outcome_to": "answer"})
    returns_T = assign(responses.batch, options, values_T=np.zeros(6)).returns_T
    assert returns_T[:2].tolist() == [1.0, 1.0]

    _, verls = verl.compute_reinforce_plus_plus_outcome_advantage(
        torch.tensor(at_the_end), torch.tensor(responses.mask), neutral_config()
    )
    assert verls[0].tolist() == [0.0, 0.0, 0.0]
    got = ours(responses, adv_estimator="reinforce_plus_plus")
    assert got[0, 0] > 0 > got[1, 0]


def test_advantage_of_tool_tokens_differs_from_verl(verl, torch):
    responses = rows_of([1.0, 0.0], ["q0", "q0"], [[1, 0, 1], [1, 0, 1]], lengths=[3, 3])
    advantages, _ = verl.compute_gae_advantage_return(
        torch.tensor(responses.reward_at_last), torch.zeros(2, 3).double(), torch.tensor(responses.mask), 1.0, 1.0
    )
    assert advantages[:, 1].abs().min() > 0
    assert not ours(responses, values=True, adv_estimator="gae", outcome_to="answer")[:, 1].any()


# Several steps per trajectory: separate rows in verl.


def step_rows(seed, *, steps=lambda i: 3, tasks=4, trajectories=4):
    """`identical` credit: every step has its trajectory's reward. One token per step. The arrays are [S]."""
    rng = np.random.default_rng(seed)
    n = tasks * trajectories
    reward = rng.normal(0.4, 1.0, n)
    counts = [steps(i) for i in range(n)]
    made = [
        make_trajectory(
            f"t{i}", [step(tokens=1) for _ in range(counts[i])], float(reward[i]), task=f"q{i // trajectories}"
        )
        for i in range(n)
    ]
    names = np.array([f"q{i // trajectories}" for i in range(n)], dtype=object)
    repeated = {"reward": reward, "uid": names, "trajectory": np.arange(n)}
    return SimpleNamespace(batch=batch_of(*made), **{k: np.repeat(of_n, counts) for k, of_n in repeated.items()})


def of_steps(torch, function, responses, **more):
    rewards = torch.tensor(responses.reward)[:, None]
    return function(rewards, torch.ones(rewards.shape, dtype=torch.int64), index=responses.uid, **more)[0][:, 0].numpy()


def shared(responses, **options):
    return assign(
        responses.batch, credit_options(**{**NEUTRAL, "propagation": "identical", **options})
    ).token_advantages()


@pytest.mark.parametrize("seed", SEEDS)
def test_spread_over_trajectories_differs_from_verl(verl, torch, seed):
    """The same deviations over n - 1 of n trajectories here, and over nK - 1 of nK rows in verl: a constant factor."""
    responses, n, k = step_rows(seed), 4, 3
    factor = np.sqrt(n / (n - 1) / (n * k / (n * k - 1)))
    expected = of_steps(torch, verl.compute_grpo_outcome_advantage, responses, epsilon=0.0) / factor
    np.testing.assert_allclose(shared(responses), expected, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_baseline_over_trajectories_differs_from_verl(verl, torch, seed):
    responses = step_rows(seed, steps=lambda i: 1 + 5 * (i % 2))
    got = shared(responses, norm_adv_by_std_in_grpo=False)
    rows_weigh = of_steps(torch, verl.compute_grpo_outcome_advantage, responses, norm_adv_by_std_in_grpo=False)
    first = np.unique(responses.trajectory, return_index=True)[1]
    reward, uid = responses.reward[first], responses.uid[first]
    trajectories_weigh = np.array(
        [r - reward[uid == u].mean() for r, u in zip(responses.reward, responses.uid, strict=True)]
    )
    np.testing.assert_allclose(got, trajectories_weigh, rtol=0, atol=CLOSE)
    assert np.abs(got - rows_weigh).max() > 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_over_trajectories_differs_from_verl(verl, torch, seed):
    """In verl other steps of a trajectory count as other trajectories, so its own reward is in its baseline."""
    responses = step_rows(seed)
    got = shared(responses, adv_estimator="rloo")
    one_row_out = of_steps(torch, verl.compute_rloo_outcome_advantage, responses)
    first = np.unique(responses.trajectory, return_index=True)[1]
    reward, uid = responses.reward[first], responses.uid[first]
    others = np.array([reward[(uid == uid[i]) & (np.arange(len(uid)) != i)].mean() for i in range(len(uid))])
    np.testing.assert_allclose(got, (reward - others)[responses.trajectory], rtol=0, atol=CLOSE)
    # (nK / (nK - 1)) (r - m) in verl, (n / (n - 1)) (r - m) here.
    np.testing.assert_allclose(one_row_out * (4 / 3) / (12 / 11), got, rtol=0, atol=CLOSE)
