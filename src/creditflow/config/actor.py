"""The sections `actor_rollout_ref` and `critic`: the model, its update and its rollouts."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from creditflow._utils.sections import Section, expected
from creditflow.config.model import ActorModelConfig, LossAggMode, ModelConfig, OptimConfig
from creditflow.config.rollout import RolloutConfig

KLLossType = Literal["k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"]
KL_LOSS_TYPES: tuple[str, ...] = get_args(KLLossType)


class PolicyLossConfig(Section):
    """The policy loss, under verl's names."""

    loss_mode: Literal["vanilla", "gspo", "cispo"] = "vanilla"
    """`vanilla`: PPO's clipped surrogate of each token. `gspo`: the ratio of the whole response, the geometric mean of
    its tokens' ratios, in place of each token's (Zheng et al. 2025, arXiv 2507.18071; the paper clips at 3e-4 below and
    4e-4 above, with `seq-mean-token-mean`). `cispo`: the log-prob, weighted by the clipped ratio as a constant (MiniMax
    2025, arXiv 2506.13585). Only `vanilla` has the dual clip."""


class ActorConfig(Section):
    """How the policy is updated."""

    optim: OptimConfig = OptimConfig()
    ppo_mini_batch_size: PositiveInt = 8
    """Tasks per optimizer update; default: 8, or `data.train_batch_size` if that is smaller."""
    ppo_epochs: PositiveInt = 1
    """Passes over a batch."""
    ppo_max_token_len_per_gpu: PositiveInt | None = None
    """Tokens of one micro-batch. Default: derived from the model and the machine's memory, at most 16384; with
    `--engine verl`, verl's own default."""
    clip_ratio: NonNegativeFloat = 0.2
    """How far the probability ratio may move from 1 before its loss is clipped."""
    clip_ratio_low: NonNegativeFloat | None = None
    """The same, below 1; default: `clip_ratio`."""
    clip_ratio_high: NonNegativeFloat | None = None
    """The same, above 1; default: `clip_ratio`."""
    clip_ratio_c: Annotated[float, Field(gt=1), expected("more than 1")] = 3.0
    """Dual clip: upper limit of the ratio in the loss of tokens with negative advantage."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    loss_agg_mode: LossAggMode = "token-mean"
    """`token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum`, `seq-mean-token-sum-norm` (a sequence is one step's
    response) or `traj-mean-step-mean`."""
    loss_scale_factor: PositiveInt | None = None
    """Divisor of `seq-mean-token-sum-norm`; default: `data.max_response_length`, as in verl."""
    use_kl_loss: bool = False
    """Add the divergence from the reference model to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Coefficient of that divergence."""
    kl_loss_type: KLLossType = "low_var_kl"
    """`k1` (or `kl`), `abs`, `k2` (`mse`) or `k3` (`low_var_kl`), as in verl."""
    grad_clip: PositiveFloat = 1.0
    """Upper limit of the gradient's norm."""


class CriticConfig(Section):
    """The value model of an estimator with a critic (`algorithm.adv_estimator: gae`), and how it is updated.

    The critic uses the actor's mini-batches.
    """

    model: ModelConfig = ModelConfig()
    """Default: the policy's model, with a new head that predicts 0."""
    context: Literal["step", "trajectory"] = "step"
    """Input of the value model. `step`: the agent's own prompt; `trajectory`: all prompts and responses of the policy's
    agents in the trajectory so far (a centralised critic; Yu et al. 2022, arXiv 2103.01955). Acting needs no critic, so
    the agents' inputs stay the same."""
    central: bool = False
    """One critic for all trained policies, as in MAPPO (arXiv 2103.01955). Its input is the joint history: the prompts
    and responses of all steps that ended before the step, of any policy, then the step's own. If that exceeds the
    critic's positions, the beginning is cut off. All policies must have the same vocabulary."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    ppo_epochs: PositiveInt = 1
    """Passes over a batch."""
    ppo_max_token_len_per_gpu: PositiveInt | None = None
    """Tokens of one micro-batch. Default: derived as the actor's, at most 32768."""
    cliprange_value: PositiveFloat = 0.5
    """How far a value may move in one training step before its loss is clipped."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Same values as the actor's."""
    loss_scale_factor: PositiveInt | None = None
    """Same meaning as the actor's."""
    grad_clip: PositiveFloat = 1.0
    """Upper limit of the gradient's norm."""


class ActorRolloutRefConfig(Section):
    """Model, update and rollout, together as in verl."""

    model: ActorModelConfig = ActorModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
