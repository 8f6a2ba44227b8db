import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from creditflow._utils.huggingface import load_folder
from creditflow.config import CriticConfig, OptimConfig
from creditflow.engines.local.critic import Critic, explained
from creditflow.engines.local.loss import value_loss
from creditflow.engines.local.packing import TokenSequences
from creditflow.engines.local.policy import Policy
from creditflow.errors import ModelError
from tests.engines.batches import gradient_error, prompt_of, response_of, sampled_batch, several_steps

CPU = torch.device("cpu")


@pytest.fixture
def batch(word_model_folder: Path):
    return several_steps(sampled_batch(Policy.load(word_model_folder, CPU), 15))


def scattered(folder: Path, config: CriticConfig) -> Critic:
    """A critic in float64 with values far from 0."""
    torch.manual_seed(0)
    model, _ = load_folder(folder, "token_classification", "key", new_head=True)
    for weight in model.double().parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return Critic(model, config)


def test_new_critic_returns_zero_and_saved_critic_its_values(word_model_folder, batch, tmp_path) -> None:
    with pytest.raises(ModelError, match="lacks weights of a token classification model"):
        load_folder(word_model_folder, "token_classification", "key")
    critic = Critic.load(word_model_folder, "critic.model.path", CPU, CriticConfig())
    everything = np.ones(batch.n_steps, dtype=np.bool_)
    assert (critic.values(batch, everything) == 0).all()
    with torch.no_grad():
        for weight in critic.model.parameters():
            weight.add_(torch.full_like(weight, 0.1).cumsum(0).sin())
    critic.model.save_pretrained(tmp_path)
    for file in Path(word_model_folder).glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    again = Critic.load(tmp_path, "critic.model.path", CPU, CriticConfig())
    values = critic.values(batch, everything)
    assert np.ptp(values) > 0
    np.testing.assert_array_equal(again.values(batch, everything), values)


def text_before(batch, s: int, context: str) -> list[int]:
    """The tokens that a critic reads before the prompt of step `s`."""
    trajectory = [k for k in range(s) if batch.trajectory_of_step[k] == batch.trajectory_of_step[s]]
    return (
        [token for k in trajectory for token in (*prompt_of(batch, k), *response_of(batch, k))]
        if context == "trajectory"
        else []
    )


def test_long_trajectory_is_read_in_parts(batch) -> None:
    lengths = np.diff(batch.prompt_offsets) + np.diff(batch.token_offsets)
    steps = np.flatnonzero(np.diff(batch.token_offsets) > 0)
    longest = int(np.sort(lengths)[-1])
    trajectories = TokenSequences.from_trajectories(batch, steps, longest)
    rows = np.diff(trajectories.prompt_offsets) + np.diff(trajectories.token_offsets)
    assert len(rows) > batch.n_trajectories
    assert rows.max() <= longest
    at = trajectories.token_at[trajectories.token_at >= 0]
    assert at.tolist() == list(range(len(batch.response_ids)))
    np.testing.assert_array_equal(trajectories.response_ids[trajectories.token_at >= 0], batch.response_ids)


@pytest.mark.parametrize(
    ("mode", "budget", "context"),
    [("token-mean", 20, "step"), ("token-mean", 10_000, "trajectory"), ("seq-mean-token-mean", 20, "trajectory")],
)
def test_critic_gradient_matches_single_rows(word_model_folder, batch, mode, budget, context) -> None:
    rng = np.random.default_rng(0)
    batch.response_mask[rng.random(len(batch.response_mask)) < 0.2] = False
    config = CriticConfig(
        optim=OptimConfig(lr=1e-12), cliprange_value=0.2, loss_agg_mode=mode, grad_clip=1e9,
        ppo_max_token_len_per_gpu=budget, context=context,
    )  # fmt: skip
    critic = scattered(word_model_folder, config)
    model, slow = critic.model, copy.deepcopy(critic.model)
    trained = rng.random(batch.n_steps) < 0.8
    returns = rng.normal(size=len(batch.response_ids))
    old = np.where(
        batch.response_mask, critic.values(batch, trained) + rng.normal(scale=0.4, size=len(returns)), np.nan
    )

    per_step = []
    for s in np.flatnonzero(trained):
        tokens = slice(batch.token_offsets[s], batch.token_offsets[s + 1])
        before = [*text_before(batch, s, context), *prompt_of(batch, s)]
        ids = torch.tensor([[*before, *response_of(batch, s)]])
        value = slow(ids).logits[0, len(before) - 1 : -1, 0]
        losses = []
        for t in np.flatnonzero(batch.response_mask[tokens]):
            before, target = old[tokens][t], returns[tokens][t]
            near = torch.clamp(value[t], before - 0.2, before + 0.2)
            losses.append(torch.maximum((value[t] - target) ** 2, (near - target) ** 2) / 2)
        if losses:
            per_step.append(torch.stack(losses))
    means = [step.mean() for step in per_step]
    expected = torch.cat(per_step).mean() if mode == "token-mean" else torch.stack(means).mean()
    expected.backward()

    metrics = critic.update(batch, returns, old, trained, np.zeros(batch.n_steps, dtype=np.int64))
    assert metrics["critic/vf_loss"] == pytest.approx(expected.item(), rel=1e-8)
    assert 0.1 < metrics["critic/vf_clipfrac"] < 0.9
    assert gradient_error(model, slow) < 1e-8


def value_by_hand(model, batch, s: int) -> torch.Tensor:
    """The values of a step's response, from one row: the trajectory so far and the step's own tokens."""
    before = [*text_before(batch, s, "trajectory"), *prompt_of(batch, s)]
    row = [*before, *response_of(batch, s)]
    return model(torch.tensor([row])).logits[0, len(row) - len(response_of(batch, s)) - 1 : -1, 0]


def test_critic_reads_the_history_before_a_step(word_model_folder, batch) -> None:
    critic = scattered(word_model_folder, CriticConfig(context="trajectory"))
    valued_S = (batch.turn_of_step != 1) & (np.diff(batch.token_offsets) > 0)
    values = critic.values(batch, valued_S)

    rows = [len(text_before(batch, s, "trajectory")) for s in range(batch.n_steps)]
    assert (np.array(rows) > 0)[valued_S].any()
    for s in range(batch.n_steps):
        own = values[batch.token_offsets[s] : batch.token_offsets[s + 1]]
        if not valued_S[s]:
            assert np.isnan(own).all()
            continue
        expected = value_by_hand(critic.model, batch, s).detach()
        np.testing.assert_allclose(own, expected, rtol=1e-8, atol=1e-9)


def test_value_loss_stops_gradients_beyond_the_clip_range() -> None:
    values = torch.tensor([0.1, 0.9, -0.9]).requires_grad_()
    loss, clipped = value_loss(values, torch.zeros(3), torch.ones(3), 0.5)
    loss.sum().backward()
    assert values.grad is not None
    assert clipped.tolist() == [False, True, False]
    assert (values.grad == 0).tolist() == [False, True, False]


def test_explained_variance_of_exact_and_constant_values(batch) -> None:
    rng = np.random.default_rng(0)
    returns, trained = rng.normal(size=len(batch.response_ids)), np.ones(batch.n_steps, dtype=np.bool_)
    assert explained(batch, returns, returns + 3.0, trained) == {"critic/vf_explained_var": pytest.approx(1.0)}
    assert explained(batch, returns, np.zeros_like(returns), trained) == {"critic/vf_explained_var": pytest.approx(0.0)}
    assert explained(batch, np.ones_like(returns), returns, trained) == {}
