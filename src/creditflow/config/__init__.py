"""Typed, documented configuration options, under verl's names where verl has the option.

A recipe is a YAML file; `key=value` overrides apply on top of it. This module reads, merges and validates recipes. It
defines the allowed values of each option, not the option's effect.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from creditflow.credit.options import CreditOptions
from creditflow.credit.thresholds.base import make_threshold
from creditflow.errors import ConfigError, did_you_mean, first_line
from creditflow.rewards.entries import RewardFunctionConfig
from creditflow.rewards.execution.backends import BACKENDS
from creditflow.rollout.endpoint import address_of, check_body, check_headers, variable_name

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class DataConfig:
    """Data sets, batch sizes and length limits."""

    train_files: Any = None
    """One path or a list (Parquet or JSONL with verl's columns), or `file.py:function` that makes the tasks."""
    val_files: Any = None
    """The same, for evaluation; default: the training tasks."""
    train_batch_size: int = 16
    """Tasks per training step, each with `actor_rollout_ref.rollout.n` rollouts."""
    val_max_samples: int = -1
    """Number of tasks to evaluate on, from the first; -1: all."""
    max_prompt_length: int = 1024
    """Tokens; a longer prompt ends its trajectory as `truncated`."""
    max_response_length: int = 512
    """Tokens per step; a response that reaches it is `truncated`."""
    shuffle: bool = True
    seed: int = 0
    """Seed of the run; it determines the order of the data and the rollouts."""


@dataclass
class ModelConfig:
    """The model that acts."""

    path: Any = None
    """A Hugging Face folder; `tiny`: a byte-level model made on the spot; or `file.py:function` that makes a folder."""


@dataclass
class ActorModelConfig(ModelConfig):
    """The default model of all policies, and how it is trained."""

    lora_rank: int = 0
    """Rank of the LoRA adapter; only the adapter is trained. 0: train all weights."""
    lora_alpha: int = 16
    """The adapter's output is scaled by lora_alpha / lora_rank."""
    target_modules: Any = "all-linear"
    """The modules with an adapter: a list of names as in peft, or `all-linear`, all linear layers but the last."""
    layers_to_transform: list[int] | None = None
    """Indices of the layers with an adapter, from 0; default: all."""


@dataclass
class OptimConfig:
    """AdamW, as in torch."""

    lr: float = 1e-6
    lr_warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    lr_scheduler_type: str = "constant"
    """Schedule after the warm-up: `constant`, or half a `cosine` that reaches 0 when the run ends."""
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])


KL_LOSS_TYPES = ("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl")
LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "traj-mean-step-mean",
)


@dataclass
class ActorConfig:
    """How the policy is updated."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_mini_batch_size: int = 8
    """Tasks per optimizer update; default: 8, or `data.train_batch_size` if that is smaller."""
    ppo_epochs: int = 1
    ppo_max_token_len_per_gpu: int = 16384
    """Tokens of one micro-batch."""
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    """Dual clip: upper limit of the ratio in the loss of tokens with negative advantage."""
    entropy_coeff: float = 0.0
    """Coefficient of the entropy bonus."""
    loss_agg_mode: str = "token-mean"
    """`token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum`, `seq-mean-token-sum-norm` (a sequence is one step's
    response) or `traj-mean-step-mean`."""
    loss_scale_factor: int | None = None
    """Divisor of `seq-mean-token-sum-norm`; default: `data.max_response_length`, as in verl."""
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    """`k1` (or `kl`), `abs`, `k2` (`mse`) or `k3` (`low_var_kl`), as in verl."""
    grad_clip: float = 1.0


def _critics_optim() -> OptimConfig:
    return OptimConfig(lr=1e-5)


@dataclass
class CriticConfig:
    """The value model of an estimator with a critic (`algorithm.adv_estimator: gae`), and how it is updated.

    The critic uses the actor's mini-batches.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """Default: the policy's model, with a new head that predicts 0."""
    context: str = "step"
    """Input of the value model. `step`: the agent's own prompt; `trajectory`: all prompts and responses of the policy's
    agents in the trajectory so far (a centralised critic; Yu et al. 2022, arXiv 2103.01955). Acting needs no critic, so
    the agents' inputs stay the same."""
    optim: OptimConfig = field(default_factory=_critics_optim)
    ppo_epochs: int = 1
    ppo_max_token_len_per_gpu: int = 32768
    """Tokens of one micro-batch."""
    cliprange_value: float = 0.5
    """How far a value may move in one training step before its loss is clipped."""
    loss_agg_mode: str = "token-mean"
    """Same values as the actor's."""
    loss_scale_factor: int | None = None
    grad_clip: float = 1.0


@dataclass
class ValKwargs:
    """How an evaluation samples."""

    n: int = 1
    """Rollouts per validation task."""
    temperature: float = 1.0
    do_sample: bool = True
    """Evaluate by sampling. A greedy pass (`*_greedy`) is always reported as well."""


@dataclass
class MultiTurnConfig:
    """Turns of an agent with tools, within one step."""

    max_assistant_turns: int = 8
    """Maximum number of the agent's turns."""
    max_parallel_calls: int = 4
    """Tool calls in one turn; further calls are refused."""
    max_tool_response_length: int = 2048
    """Characters of a tool's result; a longer result keeps its beginning and end."""
    format: str = "hermes"
    """Format of tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""


@dataclass
class RolloutConfig:
    """How rollouts are sampled."""

    n: int = 8
    """Rollouts per task."""
    temperature: float = 1.0
    max_num_seqs: int = 1024
    """Maximum number of calls in one batch of generation."""
    max_failed_frac: float = 0.5
    """Stop if a larger share of rollouts fails: the rest would be a biased sample."""
    timeout_s: float = 600.0
    """Seconds for one rollout; time in the run's own sampler does not count. A longer rollout is cancelled."""
    timeout_outcome: str = "mask"
    """`mask`: the trajectory is `failed` and left out of training. `zero`: it gets the worst outcome, by default 0."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)


@dataclass
class ActorRolloutRefConfig:
    """Model, update and rollout, together as in verl."""

    model: ActorModelConfig = field(default_factory=ActorModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling: replace tasks without a learning signal."""

    enable: bool = False
    """Leave out tasks whose rollouts all have the same outcome."""
    max_num_gen_batches: int = 10
    """Maximum number of task batches to roll out for one training step."""


@dataclass
class AlgorithmConfig(CreditOptions):
    """Credit options (`creditflow.credit.CreditOptions`) and the other keys of `algorithm.*`."""

    propagation: Any = None
    """None: `threshold`, unless `threshold_share` sets the rule."""
    lam: Any = None
    """None: 0.95, unless `error_minimization` sets it."""
    threshold_share: bool | None = None
    """True/false: the same as `propagation: threshold/discounted`; contradicting it is an error."""
    error_minimization: Any = None
    """`{gae_lambda: 0.95}` or `gae_lambda=0.95`: the same as `lam`."""
    strata: str | None = None
    """`file.py:function` that takes a step and returns a label (from the prompt alone) or None."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    counterfactual_rollouts: int = 16
    """With `propagation: shapley`: the maximum number of rollouts to measure the agents' contributions to the
    outcome of one trajectory. At least 2^A - 1 for A agents, up to four; A^2 beyond."""


@dataclass
class RewardConfig:
    """Reward functions, where they run, and how many of their scores may fail."""

    functions: list[RewardFunctionConfig] = field(default_factory=list)
    max_failed_frac: float = 0.2
    """Stop if a larger share of all scores, or of the outcomes alone, fails."""
    backend: str = "process"
    """Execution of functions: `process`, worker processes of this machine; `ray`, Ray actors (`ray_kwargs.ray_init`);
    `inline`, this process, without time-outs, for a debugger."""
    num_workers: int | None = None
    """Worker processes, or Ray actors; default: one per core, at most eight."""
    timeout: float = 60.0
    """Seconds for one call of a function without its own `timeout`."""
    max_in_flight: int = 256
    """Maximum number of pending calls of async functions."""
    cache_size: int = 1_000_000
    """Size of the cache of function results, in numbers; keyed by function and inputs. A result of one number takes
    eleven. 0: no cache."""
    sandbox: dict[str, Any] = field(default_factory=dict)
    """Sandbox for untrusted code: `backend` and its options (`creditflow.sandbox`), for every function with a
    `sandbox` argument."""
    decomp_granularity: str | None = None
    """`trajectory` (outcome only), `agent`, `step` (default) or `token_level`: the same as
    `algorithm.decomp_granularity`; contradicting it is an error."""


DEFAULT_POLICY = "default"
"""The policy of agents that name none, and the only policy of a recipe without `policies`."""


@dataclass
class EndpointConfig:
    """An OpenAI-compatible server with a frozen model. A plain string is read as the `base_url`."""

    base_url: str = ""
    """Such as http://127.0.0.1:8000/v1."""
    model: str | None = None
    """The server's name for the model; default: the policy's `model.path`."""
    api_key_env: str | None = None
    """The environment variable that holds the key, never the key itself; without it, the key sent is `none`."""
    timeout: float = 120.0
    """Seconds for one attempt."""
    max_retries: int = 6
    """Retries after 5xx, broken connections and time-outs. Rate limits (429) do not count."""
    give_up_after: float = 600.0
    """Seconds since the call after which no attempt begins; also the longest wait for rate limits."""
    max_in_flight: int = 256
    """Concurrent requests of each rollout process."""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every request; must not hold API keys."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Extra fields of every request (`top_p`, `chat_template_kwargs`). They override creditflow's own (`max_tokens`,
    `temperature`, `seed`); null removes a field."""


@dataclass
class PolicyConfig:
    """A model that agents act through."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Default: `actor_rollout_ref.model`."""
    lora_rank: int | None = None
    """Default: `actor_rollout_ref.model.lora_rank`. All policies share the other adapter options of that section."""
    optim: dict[str, Any] = field(default_factory=dict)
    """Overrides of `actor_rollout_ref.actor.optim` for this policy."""
    trainable: bool | None = None
    """Default: true; false for a model behind an endpoint."""
    endpoint: EndpointConfig | None = None
    """The server of a remote model. A policy with an endpoint is frozen: its responses cannot be trained on."""

    @property
    def trained(self) -> bool:
        """`trainable`, or its default."""
        return self.endpoint is None if self.trainable is None else self.trainable


@dataclass
class AgentConfig:
    """One agent."""

    system: str = ""
    """System prompt."""
    policy: str = DEFAULT_POLICY
    """The name of the agent's policy in `policies`."""
    match: str = ""
    """Regular expression. An HTTP call without another sign of its agent belongs to this agent if its system prompt
    matches. If no agent's `match` fits, it belongs to the agent with the longest `system` in the prompt."""
    tools: list[Any] = field(default_factory=list)
    """The agent's tools: names of `creditflow.rollout.toolbox`, `file.py:function`, or `{fn, name, args, timeout}`."""


@dataclass
class TeamConfig:
    """The agents and their workflow."""

    workflow: str = "???"
    """`package.module:function` or `file.py:function`."""
    agents: dict[str, AgentConfig] = field(default_factory=dict)
    ignored_fields: list[str] = field(default_factory=list)
    """Fields to ignore in HTTP calls. They would change sampling and are refused by default (`response_format`,
    `tool_choice`, `top_p`). A step's `info["ignored"]` lists the ignored fields of its call."""


@dataclass
class TrainerConfig:
    """Length of the run, hardware, logging and checkpoints."""

    total_training_steps: int | None = None
    """Default: the number of steps in `total_epochs` passes over the data."""
    total_epochs: int = 1
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Metrics trackers, in addition to the run's metrics.jsonl, which is always written: `console`, `wandb`,
    `tensorboard`, `mlflow`."""
    project_name: str = "creditflow"
    """The project, or experiment, of the run in trackers."""
    experiment_name: str | None = None
    """The run's name in trackers; default: the name of its folder."""
    default_local_dir: str | None = None
    """The run's folder; default runs/<recipe>-<time>."""
    val_before_train: bool = True
    test_freq: int = -1
    """Evaluate every `test_freq` training steps; -1: only at the end."""
    save_freq: int = -1
    """Write a checkpoint every `save_freq` training steps; -1: only at the end."""
    resume_mode: str = "auto"
    """If `default_local_dir` already holds a run: `auto` resumes it from its newest complete checkpoint, `disable` is
    an error, `resume_path` resumes it from `resume_from_path`."""
    resume_from_path: str | None = None
    """A checkpoint of the run in `default_local_dir`; sets the default of `resume_mode` to `resume_path`. Options may
    differ from those of the interrupted run."""
    max_actor_ckpt_to_keep: int | None = None
    """Number of newest checkpoints to keep; default: all."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    num_threads: int = 0
    """torch threads; 0: torch's own choice."""
    critic_warmup: int = 0
    """Training steps at the beginning in which only the critic is trained."""


def default_rules() -> dict[str, Any]:
    """The default guard rules."""
    return {
        "accuracy": {
            "kind": "drop",
            "metric": "val/pass_at_1",
            "over": "val/trajectories",
            "by": 0.05,
            "window": 5,
            "action": "set_threshold",
            "to": 0.4,
        },
        "error_rate": {
            "metric": "reward/error_rate",
            "over": "reward/judged_trajectories",
            "above": 0.1,
            "window": 5,
            "p_value": 1e-3,
            "recover": 0.05,
            "recover_epochs": 5,
            "action": "fallback_identical",
            "unless": {"metric": "reward/agreement", "above": 0.5},
        },
        "agreement": {
            "metric": "reward/agreement",
            "over": "reward/agreement_over",
            "below": 0.4,
            "window": 10,
            "shortest": 2,
            "recover": 0.5,
            "recover_epochs": 5,
            "action": "fallback_identical",
        },
        "not_finite": {
            "metric": "actor/skipped_updates",
            "above": 0.0,
            "window": 3,
            "recover_epochs": 1,
            "action": "restore_checkpoint",
        },
        "not_finite_critic": {
            "metric": "critic/skipped_updates",
            "above": 0.0,
            "window": 3,
            "recover_epochs": 1,
            "action": "restore_checkpoint",
        },
        "entropy": {"metric": "actor/entropy", "below": 0.1, "times_first": True, "window": 3},
        "sub_reward_var": {"metric": "reward/sub_reward_var/*", "above": 0.2, "window": 10},
        "pass_rate": {"metric": "propagation/pass_rate", "below": 0.8, "window": 10},
        "shut_out": {"metric": "credit/reach/*", "below": 0.05, "window": 3},
        "propagation_s": {"metric": "timing/propagation_s", "above": 1.0, "window": 3},
    }


@dataclass
class FallbackConfig:
    """The trained parameters during a fallback to the shared global reward."""

    trainable: str = "all"
    """`all`: the same as before the fallback; `lora`: only adapters, on the layers below."""
    lora_rank: int = 8
    lora_alpha: int = 16
    target_modules: Any = "all-linear"
    layers_to_transform: list[int] | None = None
    """As in `actor_rollout_ref.model`."""


@dataclass
class GuardConfig:
    """The guard rules and their limits."""

    enable: bool = True
    rules: dict[str, Any] = field(default_factory=default_rules)
    """Guard rules by name; null removes one. `metric` (from docs/metrics.md; `*` for any agent or function), `kind`
    (`level`, `drop`, or `file.py:kind`) with its options, `over` (the metric with the denominator, where `metric` is a
    share), `action` (`warn`, `set_threshold` with `to`, `fallback_identical`, `restore_checkpoint`, `stop`),
    `cool_down` (checks after a recovery during which the rule does not fire), `unless` (`{metric, above}`: while that
    condition holds, the rule only warns)."""
    max_rollbacks: int = 2
    """Maximum number of checkpoints that the guard restores; at the next rollback, the run stops with a report."""
    fallback: FallbackConfig = field(default_factory=FallbackConfig)


@dataclass
class RayConfig:
    """Connection to Ray."""

    ray_init: dict[str, Any] = field(default_factory=dict)
    """Arguments of `ray.init`: `address` joins a cluster; without it, a private Ray starts on this machine."""


@dataclass
class Config:
    """A whole recipe."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    policies: dict[str, PolicyConfig] = field(default_factory=dict)
    """Default: one trained policy, `default`, with the model `actor_rollout_ref.model`."""
    team: TeamConfig = field(default_factory=TeamConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    ray_kwargs: RayConfig = field(default_factory=RayConfig)
    verl: dict[str, Any] = field(default_factory=dict)
    """Any options of verl, nested as in its own files; only `--engine verl` reads them. `verl.config_name` chooses the
    base file."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Options of the recipe's own functions (`recipe.operations` and the like)."""
    compare: dict[str, Any] = field(default_factory=dict)
    """Overrides for the arms of `creditflow compare`: `values.<value>` and `arms.<name>`."""


@dataclass(frozen=True)
class Recipe:
    """A configuration and its origin."""

    config: Config
    name: str
    folder: Path
    """The folder of relative `file.py:function` references."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Options of an extended or overridden recipe that have become ineffective; `check` and `train` print them."""
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The keys set on the command line; they take precedence over the recipe."""

    def validation_words(self, count: int) -> str:
        """Count and source of the validation tasks, for messages."""
        from creditflow.data.datasets import validation_words

        return validation_words(self.config.data.train_files, self.config.data.val_files, count)

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, as stored with a run."""
        from dataclasses import asdict

        return asdict(self.config)

    def to_yaml(self) -> str:
        """The resolved configuration as YAML that loads again as a recipe, from any folder."""
        from omegaconf import OmegaConf

        config = _escaped(_absolute(self.to_dict(), self.folder))
        config["trainer"]["default_local_dir"] = None  # a run of this recipe gets a new folder
        return str(OmegaConf.to_yaml(OmegaConf.create(config)))

    def absolute(self) -> Recipe:
        """Make relative paths and references absolute, so that they hold in any working directory."""
        config = recipe_of_dict(_absolute(self.to_dict(), self.folder), self.name, self.folder).config
        return dataclasses.replace(self, config=config)


def _absolute(value: Any, folder: Path) -> Any:
    """Make the paths and `file.py:function` references in `value` that are relative to `folder` absolute."""
    if isinstance(value, dict):
        return {key: _absolute(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, folder) for item in value]
    if isinstance(value, str) and value:
        file, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
        if colon or file.endswith((".parquet", ".jsonl")):
            found = next((path for path in (folder / file, Path(file)) if path.is_file()), None)
            value = f"{found.resolve()}{colon}{name}" if found else value
    return value


def _escaped(value: Any) -> Any:
    """Escape `${` in all strings of `value`, so that resolved text is not interpolated again."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply `key=value` overrides, resolve aliases and validate.

    A recipe may extend another one: `extends: other.yaml`, relative to itself. Raises ConfigError with the key, the
    expected and the actual value; an unknown key names the nearest known one.
    """
    from omegaconf import OmegaConf

    path = Path(path)
    layers = [*_layers(path), given := _dotlist(overrides)]
    config = _merged(layers, path)
    _validate(config)
    notices = _without_effect(config.algorithm, [_credit_keys(OmegaConf.to_container(layer)) for layer in layers])
    keys_given = frozenset(key for key, _ in leaves(OmegaConf.to_container(given)))
    return Recipe(config=config, name=path.stem, folder=path.resolve().parent, notices=notices, given=keys_given)


def _merged(layers: Sequence[DictConfig], path: Path) -> Config:
    """Merge the layers, later ones over earlier ones; resolve aliases and check types and keys."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    merged = OmegaConf.structured(Config)
    given: set[str] = set()
    try:
        for layer in layers:
            keys = OmegaConf.to_container(layer)
            given |= {key for key, _ in leaves(keys)} if isinstance(keys, dict) else set()
            _spell_out_endpoints(keys)
            merged = OmegaConf.merge(merged, OmegaConf.create(_checked(keys, Config, "")))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or path}: {first_line(error)}") from error
    assert isinstance(config, Config)
    _resolve_aliases(config.algorithm, config.reward)
    _adapt_defaults(config, given)
    return config


def _adapt_defaults(config: Config, given: Set[str]) -> None:
    """Replace defaults that contradict a key that was set. A contradiction between two set keys stays an error."""
    data, algorithm, actor, trainer = config.data, config.algorithm, config.actor_rollout_ref.actor, config.trainer
    if "actor_rollout_ref.actor.ppo_mini_batch_size" not in given and data.train_batch_size > 0:
        actor.ppo_mini_batch_size = min(actor.ppo_mini_batch_size, data.train_batch_size)
    for averaged in (actor, config.critic):
        if averaged.loss_agg_mode == _BY_LENGTH and averaged.loss_scale_factor is None:
            averaged.loss_scale_factor = data.max_response_length
    if "trainer.resume_mode" not in given and trainer.resume_from_path is not None:
        trainer.resume_mode = "resume_path"
    if "algorithm.outcome_to" not in given and algorithm.outcome_to_answer_alone():
        algorithm.outcome_to = "answer"
    for name, defaults in default_rules().items():
        if isinstance(rule := config.guard.rules.get(name), dict):
            _adapt_rule(rule, {key for key in defaults if f"guard.rules.{name}.{key}" not in given})


def _adapt_rule(rule: dict[str, Any], by_default: Set[str]) -> None:
    """Keep the defaults `shortest` within the rule's window and `recover` on the good side of its limit."""
    limits = (("shortest", "window", min), ("recover", "above", min), ("recover", "below", max))
    for key, limit, within in limits:
        if key in by_default and _is_number(rule.get(key)) and _is_number(rule.get(limit)):
            rule[key] = within(rule[key], rule[limit])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def with_effect(path: Path | str, chosen: Sequence[str], others: Sequence[str]) -> list[str]:
    """Remove the credit options from `others` that have no effect beside the overrides `chosen`.

    A comparison gives the same overrides to all its arms; an arm whose rule ignores one of them trains without it.
    """
    merged = _merged([*_layers(Path(path)), _dotlist([*chosen, *others])], Path(path))
    merged.algorithm.validate()
    ignored = {f"algorithm.{name}" for name in merged.algorithm.ignored()}
    return [other for other in others if other.partition("=")[0] not in ignored]


def _credit_keys(keys: Any) -> dict[str, Any]:
    """The credit options that a layer sets, including `reward.decomp_granularity`."""
    sections = keys if isinstance(keys, dict) else {}
    algorithm, reward = (one if isinstance(one := sections.get(name), dict) else {} for name in ("algorithm", "reward"))
    return {**algorithm, "decomp_granularity": reward.get("decomp_granularity", algorithm.get("decomp_granularity"))}


def _without_effect(algorithm: AlgorithmConfig, layers: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Notices of options that the rule in force ignores, set by a layer beneath the one that chose the rule.

    Raises ConfigError if the same layer sets both the option and the rule (a contradiction), or if a later layer sets
    the option (it would change nothing). A layer that sets every option is the record of a run, not a choice by hand.
    """
    every = {one.name for one in dataclasses.fields(CreditOptions)}
    by_hand = [{} if every <= layer.keys() else layer for layer in layers]

    def last(layers: Sequence[Mapping[str, Any]], *names: str) -> int:
        having = [i for i, layer in enumerate(layers) if any(layer.get(name) is not None for name in names)]
        return having[-1] if having else -1

    notices = []
    for name, causes in algorithm.ignored().items():
        if (set_in := last(by_hand, name)) < 0:
            continue
        why = algorithm.why_ignored(name, causes)
        if set_in >= last(layers, *causes):
            raise ConfigError(f"{why}; leave it out, or {algorithm.reader_of(name, causes)}")
        notices.append(why)
    return tuple(notices)


def credit_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Credit options by name, from `key=value` with or without their section (`algorithm.`, `reward.`).

    Raises ConfigError for an unknown key, naming the nearest, and for a value that is not valid YAML.
    """
    from omegaconf import OmegaConf

    known = [one.name for one in dataclasses.fields(CreditOptions)]
    found: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        key = "decomp_granularity" if key == "reward.decomp_granularity" else key.removeprefix("algorithm.")
        if not equals or key not in known:
            raise ConfigError(f"{override}: expected an option of credit, key=value{did_you_mean(key, known)}")
        found |= OmegaConf.to_container(_dotlist([f"{key}={value}"]))  # type: ignore[arg-type]
    return found


def leaves(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested sections; an empty section counts as a value."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def with_options(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """`recipe` with options (dotted keys) set, validated again. Raises ConfigError as `load_recipe` does."""
    config = copy.deepcopy(recipe.config)
    for key, value in options.items():
        sections, _, name = key.rpartition(".")
        section = functools.reduce(getattr, sections.split("."), config)
        setattr(section, name, _typed(type(section), name, value, key))
    _validate(config)
    return dataclasses.replace(recipe, config=config)


def _typed(kind: Any, name: str, value: Any, key: str) -> Any:
    """Convert `value` to the type of the field `name` of `kind`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    section = OmegaConf.structured(kind)
    try:
        section[name] = value
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {first_line(error)}") from error
    return OmegaConf.to_container(section)[name]  # type: ignore[index, call-overload]


def recipe_of_dict(values: Mapping[str, Any], name: str, folder: Path) -> Recipe:
    """Rebuild a recipe from `Recipe.to_dict`, without interpolating its values again."""
    return Recipe(config=_made(Config, values), name=name, folder=folder)


def _made(kind: Any, value: Any) -> Any:
    """Convert plain dicts and lists to the dataclasses of `kind`."""
    if (section := _optional_section(kind)) is not None and value is not None:
        kind = section
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        return kind(**{key: _made(hints[key], item) for key, item in value.items()})  # type: ignore[operator]
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {key: _made(get_args(kind)[1], item) for key, item in value.items()}
    if get_origin(kind) is list and isinstance(value, list):
        return [_made(get_args(kind)[0], item) for item in value]
    return value


def _layers(path: Path) -> list[DictConfig]:
    """The recipe at `path` and the recipes that it extends, the base first."""
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    chain: list[DictConfig] = []
    seen: set[Path] = set()
    while True:
        if path.resolve() in seen:
            raise ConfigError(f"{path}: `extends` runs in a circle")
        seen.add(path.resolve())
        try:
            layer = OmegaConf.load(path)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such recipe") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"{path}: not readable as YAML: {_yaml_fault(error)}") from error
        if not isinstance(layer, DictConfig):
            raise ConfigError(f"{path}: expected a mapping of options at the top level")
        base = layer.pop("extends", None)
        chain.insert(0, layer)
        if base is None:
            return chain
        path = path.parent / str(base)


_ADDRESS = re.compile(r"(policies\.[^.=]+\.endpoint)=(https?://.*)")


def _dotlist(overrides: Sequence[str]) -> DictConfig:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        if "=" not in override or override.startswith("="):
            raise ConfigError(f"{override}: expected key=value")
    try:
        # As `base_url`, a bare address merges with other overrides of its section instead of replacing them.
        return OmegaConf.from_dotlist([_ADDRESS.sub(r"\1.base_url=\2", override) for override in overrides])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(overrides)}: a value is not readable as YAML") from error


def _spell_out_endpoints(keys: Any) -> None:
    """Rewrite `endpoint: http://...` as `endpoint: {base_url: http://...}`, so that overrides of both forms merge."""
    policies = keys.get("policies") if isinstance(keys, dict) else None
    for policy in policies.values() if isinstance(policies, dict) else ():
        if isinstance(policy, dict) and isinstance(policy.get("endpoint"), str):
            policy["endpoint"] = {"base_url": policy["endpoint"]}


def _checked(value: Any, kind: Any, path: str) -> Any:
    """Return `value` if `kind` has all its keys (an empty section is {}); else raise ConfigError (nearest key)."""
    if (section := _optional_section(kind)) is not None:
        return None if value is None else _checked(value, section, path)
    if dataclasses.is_dataclass(kind) and value is None:
        return {}
    if (dataclasses.is_dataclass(kind) or get_origin(kind) is dict) and not isinstance(value, dict | None):
        raise ConfigError(f"{path.removesuffix('.')}: expected a mapping of options, got {value!r}")
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        for key in value:
            if key not in hints:
                raise ConfigError(f"unknown key {path + str(key)!r}{_nearest(str(key), path, list(hints))}")
        return {key: _checked(item, hints[key], f"{path}{key}.") for key, item in value.items()}
    if get_origin(kind) is dict and isinstance(value, dict):
        return {key: _checked(item, get_args(kind)[1], f"{path}{key}.") for key, item in value.items()}
    if get_origin(kind) is list and isinstance(value, list):
        where = path.removesuffix(".")
        return [_checked(item, get_args(kind)[0], f"{where}[{i}].") for i, item in enumerate(value)]
    return value


def _optional_section(kind: Any) -> Any:
    """The dataclass in `Section | None`; None for any other kind."""
    return next((part for part in get_args(kind) if dataclasses.is_dataclass(part)), None) if _is_union(kind) else None


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _nearest(key: str, path: str, siblings: Sequence[str]) -> str:
    """The most likely intended key: a sibling of `key`, or a key of the same name elsewhere."""
    same_name = [name for name in _known_keys(Config) if name.rpartition(".")[2] == key]
    if not difflib.get_close_matches(key, siblings, n=1) and same_name:
        return f" (did you mean {same_name[0]!r}?)"
    return did_you_mean(path + key, [path + name for name in siblings]) or did_you_mean(path + key, _known_keys(Config))


def _known_keys(kind: Any, path: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        yield path + name
        if dataclasses.is_dataclass(hint):
            yield from _known_keys(hint, f"{path}{name}.")


def _yaml_fault(error: Exception) -> str:
    """The parser's message, with its line number if there is one."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}: {problem}" if mark and problem else first_line(error)


def _resolve_aliases(algorithm: AlgorithmConfig, reward: RewardConfig) -> None:
    """Rewrite the aliases `threshold_share`, `error_minimization` and `reward.decomp_granularity` to `propagation`,
    `lam` and `decomp_granularity`.
    """
    if reward.decomp_granularity is not None:
        if algorithm.decomp_granularity not in (CreditOptions.decomp_granularity, reward.decomp_granularity):
            raise ConfigError(
                f"reward.decomp_granularity: {reward.decomp_granularity!r}, but algorithm.decomp_granularity is "
                f"{algorithm.decomp_granularity!r}"
            )
        algorithm.decomp_granularity, reward.decomp_granularity = reward.decomp_granularity, None
    if algorithm.threshold_share is not None:
        meant = "threshold" if algorithm.threshold_share else "discounted"
        if algorithm.propagation not in (None, meant):
            raise ConfigError(
                f"algorithm.threshold_share: {str(algorithm.threshold_share).lower()} means propagation {meant!r}, "
                f"but algorithm.propagation is {algorithm.propagation!r}"
            )
        algorithm.propagation, algorithm.threshold_share = meant, None
    if algorithm.propagation is None:
        algorithm.propagation = "threshold"
    if algorithm.lam is not None and not isinstance(algorithm.lam, int | float):
        raise ConfigError(f"algorithm.lam: expected a number from 0 to 1, got {algorithm.lam!r}")
    if algorithm.error_minimization is not None:
        meant_lam = _gae_lambda(algorithm.error_minimization)
        if algorithm.lam not in (None, meant_lam):
            raise ConfigError(
                f"algorithm.error_minimization: means lam {meant_lam}, but algorithm.lam is {algorithm.lam}"
            )
        algorithm.lam, algorithm.error_minimization = meant_lam, None
    if algorithm.lam is None:
        algorithm.lam = CreditOptions.lam


def _gae_lambda(value: Any) -> float:
    if isinstance(value, str) and (match := re.fullmatch(r"\s*gae_lambda\s*=\s*(\S+)\s*", value)):
        value = {"gae_lambda": match[1]}
    if isinstance(value, dict) and set(value) == {"gae_lambda"}:
        try:
            return float(value["gae_lambda"])
        except (TypeError, ValueError):
            pass  # raised below, with the expected format
    raise ConfigError(
        f"algorithm.error_minimization: expected {{gae_lambda: 0.95}} or the string gae_lambda=0.95, got {value!r}"
    )


def _positive(key: str, value: float, *, zero: bool = False) -> None:
    if not math.isfinite(value) or not (value > 0 or (zero and value == 0)):
        raise ConfigError(f"{key}: expected a number {'of at least' if zero else 'above'} 0, got {value}")


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}: expected one of {', '.join(allowed)}, got {value!r}{did_you_mean(value, allowed)}")


def _validate_actor(actor: ActorConfig) -> None:
    _validate_optim("actor_rollout_ref.actor.optim", actor.optim)
    for key, value in {
        "ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "ppo_epochs": actor.ppo_epochs,
        "ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        "grad_clip": actor.grad_clip,
    }.items():
        _positive(f"actor_rollout_ref.actor.{key}", value)
    for key, value in {
        "kl_loss_coef": actor.kl_loss_coef,
        "clip_ratio": actor.clip_ratio,
        "clip_ratio_low": actor.clip_ratio_low or 0,
        "clip_ratio_high": actor.clip_ratio_high or 0,
        "entropy_coeff": actor.entropy_coeff,
    }.items():
        _positive(f"actor_rollout_ref.actor.{key}", value, zero=True)
    if actor.clip_ratio_c <= 1:
        raise ConfigError(f"actor_rollout_ref.actor.clip_ratio_c: expected more than 1, got {actor.clip_ratio_c}")
    _one_of("actor_rollout_ref.actor.kl_loss_type", actor.kl_loss_type, KL_LOSS_TYPES)
    _validate_averaging("actor_rollout_ref.actor", actor)


_BY_LENGTH = "seq-mean-token-sum-norm"


def _validate_averaging(section: str, config: ActorConfig | CriticConfig) -> None:
    _one_of(f"{section}.loss_agg_mode", config.loss_agg_mode, LOSS_AGG_MODES)
    _positive(f"{section}.loss_scale_factor", 1 if config.loss_scale_factor is None else config.loss_scale_factor)
    if config.loss_agg_mode == _BY_LENGTH and config.loss_scale_factor is None:
        raise ConfigError(
            f"{section}.loss_scale_factor: seq-mean-token-sum-norm divides by it; expected a number, such as "
            "data.max_response_length"
        )


def _validate_critic(critic: CriticConfig) -> None:
    _validate_optim("critic.optim", critic.optim)
    for key, value in {
        "ppo_epochs": critic.ppo_epochs,
        "ppo_max_token_len_per_gpu": critic.ppo_max_token_len_per_gpu,
        "cliprange_value": critic.cliprange_value,
        "grad_clip": critic.grad_clip,
    }.items():
        _positive(f"critic.{key}", value)
    _one_of("critic.context", critic.context, ("step", "trajectory"))
    _validate_averaging("critic", critic)


def _validate_optim(section: str, optim: OptimConfig) -> None:
    _positive(f"{section}.lr", optim.lr)
    _positive(f"{section}.lr_warmup_steps", optim.lr_warmup_steps, zero=True)
    _positive(f"{section}.weight_decay", optim.weight_decay, zero=True)
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"{section}.betas: expected two numbers in [0, 1), got {optim.betas}")
    _one_of(f"{section}.lr_scheduler_type", optim.lr_scheduler_type, ("constant", "cosine"))


def _validate_lora(config: Config) -> None:
    model, key = config.actor_rollout_ref.model, "actor_rollout_ref.model"
    _positive(f"{key}.lora_rank", model.lora_rank, zero=True)
    _positive(f"{key}.lora_alpha", model.lora_alpha)
    names = model.target_modules
    if names != "all-linear" and not (isinstance(names, list) and names and all(isinstance(n, str) for n in names)):
        hint = did_you_mean(names, ["all-linear"])
        raise ConfigError(f"{key}.target_modules: expected names of modules, or all-linear, got {names!r}{hint}")
    if model.layers_to_transform is not None and not model.layers_to_transform:
        raise ConfigError(f"{key}.layers_to_transform: expected numbers of layers, got none")
    for name, policy in config.policies.items():
        _positive(f"policies.{name}.lora_rank", policy.lora_rank or 0, zero=True)
        _validate_optim(f"policies.{name}.optim", optim_of(config, name))
        frozen = policy.endpoint is not None or policy.trainable is False
        if frozen and (given := next((key for key in ("lora_rank", "optim") if getattr(policy, key)), None)):
            raise ConfigError(f"policies.{name}.{given}: is of how a policy is trained, and this one is not")
    from creditflow.credit.records import ADVANTAGE_ESTIMATORS

    if config.trainer.critic_warmup and not ADVANTAGE_ESTIMATORS[config.algorithm.adv_estimator].critic:
        raise ConfigError(
            f"trainer.critic_warmup: {config.trainer.critic_warmup}, but algorithm.adv_estimator: "
            f"{config.algorithm.adv_estimator} has no critic"
        )


def _validate(config: Config) -> None:
    """Check constraints beyond types. `algorithm` validates itself (`creditflow.credit`)."""
    from creditflow.monitoring.trackers import expect_names

    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    config.algorithm.validate()
    _validate_actor(actor)
    _validate_critic(config.critic)
    _validate_lora(config)
    make_threshold(config.algorithm.propagation_threshold, config.team.agents)
    for key, value in {
        "data.train_batch_size": data.train_batch_size,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        "actor_rollout_ref.rollout.n": rollout.n,
        "actor_rollout_ref.rollout.max_num_seqs": rollout.max_num_seqs,
        "actor_rollout_ref.rollout.temperature": rollout.temperature,
        "actor_rollout_ref.rollout.timeout_s": rollout.timeout_s,
        "actor_rollout_ref.rollout.val_kwargs.n": rollout.val_kwargs.n,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": rollout.multi_turn.max_assistant_turns,
        "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": rollout.multi_turn.max_parallel_calls,
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": rollout.multi_turn.max_tool_response_length,
        "algorithm.filter_groups.max_num_gen_batches": config.algorithm.filter_groups.max_num_gen_batches,
        "algorithm.counterfactual_rollouts": config.algorithm.counterfactual_rollouts,
        "trainer.total_epochs": config.trainer.total_epochs,
        "reward.timeout": config.reward.timeout,
        "reward.max_in_flight": config.reward.max_in_flight,
        "trainer.max_actor_ckpt_to_keep": config.trainer.max_actor_ckpt_to_keep or 1,
        "reward.num_workers": 1 if config.reward.num_workers is None else config.reward.num_workers,
    }.items():
        _positive(key, value)
    for key, value in {
        "data.seed": data.seed,
        "actor_rollout_ref.rollout.val_kwargs.temperature": rollout.val_kwargs.temperature,
        "trainer.num_threads": config.trainer.num_threads,
        "trainer.critic_warmup": config.trainer.critic_warmup,
        "reward.cache_size": config.reward.cache_size,
    }.items():
        _positive(key, value, zero=True)
    if data.val_max_samples != -1 and data.val_max_samples < 1:
        raise ConfigError(f"data.val_max_samples: expected 1 or more, or -1 for all, got {data.val_max_samples}")
    for key, value in {
        "reward.max_failed_frac": config.reward.max_failed_frac,
        "actor_rollout_ref.rollout.max_failed_frac": rollout.max_failed_frac,
    }.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{key}: expected a share from 0 to 1, got {value}")
    _one_of("reward.backend", config.reward.backend, tuple(BACKENDS))
    _one_of("trainer.resume_mode", config.trainer.resume_mode, ("auto", "disable", "resume_path"))
    if (config.trainer.resume_mode == "resume_path") != (config.trainer.resume_from_path is not None):
        raise ConfigError(
            "trainer.resume_from_path: expected a checkpoint's path with trainer.resume_mode=resume_path, and none "
            "otherwise"
        )
    _one_of("actor_rollout_ref.rollout.timeout_outcome", rollout.timeout_outcome, ("mask", "zero"))
    _one_of("actor_rollout_ref.rollout.multi_turn.format", rollout.multi_turn.format, ("hermes",))
    _one_of("trainer.device", config.trainer.device, ("auto", "cpu", "cuda"))
    if rollout.n == 1 and config.algorithm.adv_estimator == "grpo":
        raise ConfigError(
            "actor_rollout_ref.rollout.n: 1 rollout of each task; grpo compares trajectories of the same task, so a "
            "group of one would train on nothing: use 2 or more"
        )
    if actor.ppo_mini_batch_size > data.train_batch_size:
        raise ConfigError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size: expected at most data.train_batch_size, "
            f"{data.train_batch_size} tasks, got {actor.ppo_mini_batch_size}; lower it, or raise data.train_batch_size"
        )
    _validate_agents(config.team.agents)
    _validate_ignored_fields(config.team.ignored_fields)
    _validate_policies(config)
    _validate_guard(config.guard)
    expect_names(config.trainer.logger)
    if config.trainer.total_training_steps is not None:
        _positive("trainer.total_training_steps", config.trainer.total_training_steps, zero=True)


def _validate_agents(agents: Mapping[str, AgentConfig]) -> None:
    if not agents:
        raise ConfigError("team.agents: expected at least one agent, got none")
    for agent in agents:
        if agent.startswith("_") or agent in {"answer_from", "close"}:
            raise ConfigError(f"team.agents.{agent}: `team.{agent}` has a meaning of its own; name the agent otherwise")
        if "/" in agent or "*" in agent:
            raise ConfigError(f"team.agents.{agent}: expected a name without / and *, as metrics are named by agents")


def _validate_ignored_fields(fields: Sequence[str]) -> None:
    if not fields:
        return
    try:
        from creditflow.rollout.http.openai_api import REFUSED_FIELDS
    except ImportError as missing:
        raise ConfigError(f"team.ignored_fields needs {missing.name}: pip install 'creditflow[serve]'") from missing
    for name in fields:
        if name not in REFUSED_FIELDS:
            meant = did_you_mean(name, REFUSED_FIELDS)
            raise ConfigError(f"team.ignored_fields: {name!r} is no field that is refused{meant}")


def _validate_guard(guard: GuardConfig) -> None:
    """Check the rules without their metrics, which need the names of the reward functions."""
    from creditflow.monitoring.guard import specs

    specs(guard.rules)
    _positive("guard.max_rollbacks", guard.max_rollbacks, zero=True)
    _one_of("guard.fallback.trainable", guard.fallback.trainable, ("all", "lora"))
    _positive("guard.fallback.lora_rank", guard.fallback.lora_rank)
    _positive("guard.fallback.lora_alpha", guard.fallback.lora_alpha)


def _validate_policies(config: Config) -> None:
    """Check that every agent's policy exists, every policy has an agent, and at least one policy is trained."""
    agents_of = policies_in_use(config)
    names = list(config.policies) or [DEFAULT_POLICY]
    for policy, agents in agents_of.items():
        if policy not in names:
            raise ConfigError(
                f"team.agents.{agents[0]}.policy: {policy!r} is no policy of the recipe{did_you_mean(policy, names)}; "
                f"there is {', '.join(names)}"
            )
    for name, policy_config in config.policies.items():
        if name not in agents_of:
            raise ConfigError(
                f"policies.{name}: no agent acts through it{did_you_mean(name, agents_of)}; name it as the policy of "
                "an agent (team.agents), or leave it out"
            )
        if policy_config.endpoint is not None:
            _validate_endpoint(f"policies.{name}", policy_config, policy_config.endpoint)
    if not trained_policies(config):
        raise ConfigError(f"policies: expected one at least that is trained; {', '.join(names)} is frozen")


def _validate_endpoint(key: str, policy: PolicyConfig, endpoint: EndpointConfig) -> None:
    if policy.trainable:
        raise ConfigError(f"{key}.trainable: a model behind an endpoint cannot be trained; take `endpoint` away")
    named = [name for name in (endpoint.model, policy.model.path) if name is not None]
    if not named or not all(isinstance(name, str) and name for name in named) or len(set(named)) > 1:
        got = " and ".join(map(repr, named)) or "nothing"
        raise ConfigError(f"{key}.endpoint.model: expected the model's name as the server knows it, got {got}")
    _positive(f"{key}.endpoint.timeout", endpoint.timeout)
    _positive(f"{key}.endpoint.give_up_after", endpoint.give_up_after)
    _positive(f"{key}.endpoint.max_in_flight", endpoint.max_in_flight)
    _positive(f"{key}.endpoint.max_retries", endpoint.max_retries, zero=True)
    try:
        address_of(endpoint.base_url, "base_url")
        variable_name(endpoint.api_key_env)
        check_headers(endpoint.headers)
        check_body(endpoint.extra_body)
    except ValueError as error:
        raise ConfigError(f"{key}.endpoint.{error}") from error


def different_options(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """The dotted names of the options that differ between two configurations, given as nested sections."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in before.keys() | now.keys():
            yield from different_options(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif before != now:
        yield path


def policies_in_use(config: Config) -> dict[str, tuple[str, ...]]:
    """The agents of each policy that any agent names, in the order of the recipe."""
    named = {agent.policy: () for agent in config.team.agents.values()}
    return {policy: tuple(a for a, spec in config.team.agents.items() if spec.policy == policy) for policy in named}


def trained_policies(config: Config) -> tuple[str, ...]:
    """The names of the policies that are trained, in the order of the recipe."""
    return (
        tuple(name for name, policy in config.policies.items() if policy.trained)
        if config.policies
        else (DEFAULT_POLICY,)
    )


def lora_rank_of(config: Config, policy: str) -> int:
    """The rank of a policy's trained adapter; 0: all weights are trained."""
    own = config.policies[policy].lora_rank if policy in config.policies else None
    return config.actor_rollout_ref.model.lora_rank if own is None else own


def optim_of(config: Config, policy: str) -> OptimConfig:
    """The optimizer options of a policy."""
    base = config.actor_rollout_ref.actor.optim
    own = config.policies[policy].optim if policy in config.policies else {}
    return _with(base, own, f"policies.{policy}.optim") if own else base


def _with(base: OptimConfig, own: Mapping[str, Any], key: str) -> OptimConfig:
    """Merge `own` into `base`. Raises ConfigError for unknown options and for values of the wrong type."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = [one.name for one in dataclasses.fields(base)]
    if unknown := next((name for name in own if name not in known), None):
        raise ConfigError(f"unknown key '{key}.{unknown}'{did_you_mean(unknown, known)}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(base), OmegaConf.create(dict(own)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {first_line(error)}") from error
    made = OmegaConf.to_object(merged)
    assert isinstance(made, OptimConfig)
    return made


def model_of(config: Config, policy: str) -> tuple[Any, str]:
    """The model path of a local policy, and its config key."""
    own = config.policies[policy].model.path if policy in config.policies else None
    if own is not None:
        return own, f"policies.{policy}.model.path"
    return config.actor_rollout_ref.model.path, "actor_rollout_ref.model.path"
