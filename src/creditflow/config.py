"""Every option, typed and documented, under verl's names wherever verl has one.

A recipe is YAML; `key=value` overrides come after it. This module reads, merges and validates. It knows what an option
may be, not what it does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from creditflow.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

PROPAGATIONS = ("identical", "uniform", "none", "discounted", "threshold")
GROUPINGS = ("task", "task_agent", "task_agent_turn", "task_agent_state", "agent", "agent_turn")


@dataclass
class DataConfig:
    train_files: Any = None
    """One path or a list (verl-schema Parquet or JSONL), or `file.py:function` that makes the tasks."""
    val_files: Any = None
    """The same, for evaluation; default: the training tasks."""
    train_batch_size: int = 16
    """Tasks per training step; each is played `actor_rollout_ref.rollout.n` times."""
    val_max_samples: int = -1
    """Evaluate on the first so many tasks; -1: all."""
    max_prompt_length: int = 1024
    """Tokens; a longer prompt ends its trajectory as `truncated`."""
    max_response_length: int = 512
    """Tokens per step; a response that reaches it is `truncated`."""
    shuffle: bool = True
    seed: int = 0
    """Seed of the run: data order, plays and initial weights follow from it."""


@dataclass
class ModelConfig:
    path: Any = None
    """A Hugging Face folder; `tiny`: a byte-level model made on the spot; or `file.py:function` that makes a folder."""


@dataclass
class OptimConfig:
    lr: float = 1e-6
    lr_warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])


@dataclass
class ActorConfig:
    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_mini_batch_size: int = 8
    """Tasks per optimizer update."""
    ppo_epochs: int = 1
    ppo_max_token_len_per_gpu: int = 16384
    """Tokens (padding included) of one micro-batch."""
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    loss_agg_mode: str = "token-mean"
    """`token-mean`, `seq-mean-token-mean` or `seq-mean-token-sum`; a sequence is one step's response."""
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    """`kl` (k1), `abs`, `mse` (k2) or `low_var_kl` (k3), as in verl."""
    grad_clip: float = 1.0


@dataclass
class ValKwargs:
    n: int = 1
    """Plays of each validation task."""
    temperature: float = 1.0
    do_sample: bool = True
    """Sampled evaluation. A greedy pass is reported beside it in any case (`*_greedy`)."""


@dataclass
class RolloutConfig:
    n: int = 8
    """Plays of each task."""
    temperature: float = 1.0
    max_num_seqs: int = 1024
    """Calls generated together at most."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)


@dataclass
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class AlgorithmConfig:
    reward_decomp: bool = True
    """False: outcome only; no sub-reward enters credit."""
    propagation: str | None = None
    """`identical`, `uniform`, `none`, `discounted` or `threshold` (the default). See docs/credit.md."""
    threshold_share: bool | None = None
    """True/false: the same as `propagation: threshold/discounted`; contradicting it is an error."""
    propagation_threshold: float = 0.5
    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    group_by: str = "agent_turn"
    gamma: float = 0.99
    """Discount per step of propagation (per token in verl; see gamma_token there)."""
    lam: float = 0.95
    error_minimization: Any = None
    """`{gae_lambda: 0.95}` or `gae_lambda=0.95`: the same as `lam`."""
    outcome_to: str = "all"
    """`all`: the outcome is added to every step's credit; `answer`: to the own reward of the answer's steps."""
    sub_reward_origin: float = 1.0
    """1: wrong steps are charged; 0: right steps are paid, so that needless steps pay too."""
    w_r: float = 1.0
    w_o: float = 1.0
    shared_reward: str = "outcome"
    """What `identical` and `uniform` hand out: `outcome`, or `outcome_plus_mean_sub_reward`."""
    gate_unscored: str = "open"
    mask_truncated: bool = False
    strata: str | None = None
    """`file.py:function` of a step that returns a label (from the prompt alone) or None."""


@dataclass
class RewardFunctionConfig:
    fn: str = "???"
    """A built-in's name, `package.module:function`, or `file.py:function`."""
    level: str | None = None
    """`step`, `trajectory` or `outcome`; default: as decorated, else by the function's parameters."""
    agent_match: str | None = None
    """Regular expression (re.search) on the agent's name; default: every agent."""
    weight: float | None = None
    """Share in a step's weighted mean; 0: measured and reported, never part of credit."""
    name: str | None = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardConfig:
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    max_failed_frac: float = 0.2


@dataclass
class AgentConfig:
    system: str = ""
    """System prompt."""


@dataclass
class TeamConfig:
    workflow: str = "???"
    """`package.module:function` or `file.py:function`."""
    agents: dict[str, AgentConfig] = field(default_factory=dict)


@dataclass
class TrainerConfig:
    total_training_steps: int | None = None
    """Default: as many as `total_epochs` over the data takes."""
    total_epochs: int = 1
    default_local_dir: str | None = None
    """The run's folder; default runs/<recipe>-<time>."""
    val_before_train: bool = True
    test_freq: int = -1
    """Evaluate every so many training steps; -1: only at the end."""
    save_freq: int = -1
    """Save the model every so many steps; -1: only at the end."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    num_threads: int = 0
    """torch threads; 0: torch's own choice."""


@dataclass
class Config:
    """A whole recipe."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    team: TeamConfig = field(default_factory=TeamConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    recipe: dict[str, Any] = field(default_factory=dict)
    """Whatever the recipe's own functions read (`recipe.operations` and the like)."""
    compare: dict[str, Any] = field(default_factory=dict)
    """Overrides that an arm of `creditflow compare` carries: `values.<value>` and `arms.<name>`."""
