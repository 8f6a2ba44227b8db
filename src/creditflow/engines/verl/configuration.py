"""Convert a recipe to verl's configuration: composed from verl's files by Hydra and checked by verl's code.

Maps each recipe option to its verl name and rejects verl options without effect here. Starts no process and loads no
model or data.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import io
import logging
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from creditflow.config import (
    Config,
    Recipe,
    leaves,
    lora_rank_of,
    model_of,
    optim_of,
    trained_policies,
    with_options,
)
from creditflow.engines.base import expect_capabilities
from creditflow.engines.verl import overridden
from creditflow.engines.verl.policies import optim_values, policy_configs, rollout_devices
from creditflow.engines.verl.recipe import CAPABILITIES, KEY, NAME, read_run_handle, recipe_section
from creditflow.errors import ConfigError, did_you_mean, first_line

_MOST_NAMED = 5
"""Changed methods of verl that an error names."""
_INSTALL = "pip install 'creditflow[verl]'"

_PACKAGE, _CONFIG_NAME, _OWN_NAME = "verl.trainer.config", "ppo_trainer", "creditflow_recipe"
_GROUPS = ("model_engine",)
"""Keys that select verl's config files instead of values."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ONLY_AT_THE_END = 2**31 - 1
"""A frequency for saving and evaluation after the last step only. verl does neither for a frequency of 0 or less."""

# Recipe options and their verl names


def _keys(table: str) -> tuple[str, ...]:
    """The dotted keys of a table that lists sections with the names of their options."""
    lines = (line.split(":") for line in table.strip().splitlines())
    return tuple(f"{section.strip()}.{name}" for section, names in lines for name in names.split())


_SAME = _keys("""
    actor_rollout_ref.model: lora_alpha target_modules enable_gradient_checkpointing
    actor_rollout_ref.actor: ppo_mini_batch_size ppo_epochs ppo_max_token_len_per_gpu clip_ratio clip_ratio_c grad_clip
    actor_rollout_ref.actor: entropy_coeff loss_agg_mode loss_scale_factor use_kl_loss kl_loss_coef kl_loss_type
    actor_rollout_ref.actor.policy_loss: loss_mode
    actor_rollout_ref.rollout: n temperature max_num_seqs
    actor_rollout_ref.rollout.val_kwargs: n temperature do_sample
    algorithm: norm_adv_by_std_in_grpo
    algorithm.filter_groups: enable
    critic: ppo_epochs ppo_max_token_len_per_gpu cliprange_value loss_agg_mode loss_scale_factor
    data: train_batch_size val_max_samples max_prompt_length max_response_length shuffle seed
    trainer: total_training_steps val_before_train resume_mode resume_from_path max_actor_ckpt_to_keep critic_warmup
""")
"""Options with the same name and meaning in verl."""
_OPEN = _keys("""
    actor_rollout_ref.model: enable_gradient_checkpointing
    actor_rollout_ref.actor: ppo_max_token_len_per_gpu
    critic: ppo_max_token_len_per_gpu
""")
"""Options with a default that depends on the engine: verl's own applies unless the recipe sets them."""


def _otherwise(config: Config) -> dict[str, Any]:
    """The verl options with another name, unit or encoding of "only at the end" than the recipe's options."""
    actor, critic, algorithm, trainer = config.actor_rollout_ref.actor, config.critic, config.credit, config.trainer
    trained = trained_policies(config)
    # With several trained policies, `policies.policy_configs` sets the options of each.
    policy = trained[0] if len(trained) == 1 else ""
    return {
        "actor_rollout_ref.model.path": model_of(config, policy)[0],
        "actor_rollout_ref.model.lora_rank": lora_rank_of(config, policy),
        f"{_ACTOR}.clip_ratio_low": _either(actor.clip_ratio_low, actor.clip_ratio),
        f"{_ACTOR}.clip_ratio_high": _either(actor.clip_ratio_high, actor.clip_ratio),
        # verl's engines read this key and ignore `actor.grad_clip`.
        f"{_ACTOR}.optim.clip_grad": actor.grad_clip,
        **_optimizer(_ACTOR, optim_values(optim_of(config, policy), config, actor.ppo_epochs)),
        "critic.model.path": _either(critic.model.path, "${actor_rollout_ref.model.path}"),
        "critic.optim.clip_grad": critic.grad_clip,
        **_optimizer("critic", optim_values(critic.optim, config, critic.ppo_epochs)),
        "algorithm.gamma": algorithm.gamma_token,
        "algorithm.lam": algorithm.lam_token,
        # creditflow's trainer computes credit. verl only derives from this key whether to create a critic.
        "algorithm.adv_estimator": "gae" if algorithm.estimator.critic else "grpo",
        # Enough epochs for all training steps, because verl stops after its epochs. A step is at most one epoch.
        "trainer.total_epochs": max(1, _either(trainer.total_training_steps, trainer.total_epochs)),
        "trainer.test_freq": _every(trainer.test_freq),
        "trainer.save_freq": _every(trainer.save_freq),
    }


def _either(first: Any, second: Any) -> Any:
    return second if first is None else first


def _optimizer(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.optim.{name}": value for name, value in values.items()}


def _every(steps: int) -> int:
    return steps if steps > 0 else _ONLY_AT_THE_END


_SOURCES = {
    f"{_ACTOR}.clip_ratio_low": (f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio"),
    f"{_ACTOR}.clip_ratio_high": (f"{_ACTOR}.clip_ratio_high", f"{_ACTOR}.clip_ratio"),
    f"{_ACTOR}.optim.clip_grad": (f"{_ACTOR}.grad_clip",),
    "critic.optim.clip_grad": ("critic.grad_clip",),
    "algorithm.gamma": ("algorithm.gamma_token",),
    "algorithm.lam": ("algorithm.lam_token",),
    "trainer.total_epochs": ("trainer.total_epochs", "trainer.total_training_steps"),
}
"""The recipe options from which a verl option is computed, unless it is the one of the same key."""

_RENAMED = {f"{section}.optim.lr_scheduler_type": f"{section}.optim.lr_decay_style" for section in (_ACTOR, "critic")}
"""Alternative names that some of verl's files use."""


def mapped(config: Config) -> dict[str, Any]:
    """The verl keys and values of all recipe options that verl supports."""
    same = {key: attrgetter(key)(config) for key in _SAME}
    return {key: value for key, value in same.items() if value is not None or key not in _OPEN} | _otherwise(config)


def sources() -> dict[str, tuple[str, ...]]:
    """The recipe keys from which each verl key is computed."""
    keys = {key: (key,) for key in (*_SAME, *_otherwise(Config()))} | _SOURCES
    return keys | {other: keys[key] for key, other in _RENAMED.items()}


_WIDER = _keys("""
    actor_rollout_ref.actor: loss_agg_mode kl_loss_type
    actor_rollout_ref.actor.policy_loss: loss_mode
    critic: loss_agg_mode
""")
"""Options with more values in verl than in the recipe."""

_BACK = tuple(key for key in _SAME if key not in _WIDER) + _keys("""
    actor_rollout_ref.actor: clip_ratio_low clip_ratio_high
    actor_rollout_ref.actor.optim: lr weight_decay betas
    actor_rollout_ref.model: path lora_rank
    critic.optim: lr weight_decay betas
    trainer: total_epochs project_name experiment_name
""")
"""verl options that also set the recipe, because creditflow reads them or computes other verl options from them."""

_LOCAL = (
    "actor_rollout_ref.model.layers_to_transform",
    "algorithm.filter_groups.max_num_gen_batches",
)
"""Options without an equivalent in verl."""
_APART = ("actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.engine_kwargs", "algorithm.rollout_correction")
"""Options of the embedded engine that have the name of a verl option, which is set under `verl`."""
_AUTO = {
    "trainer.device": "verl has the device of its platform",
    "trainer.precision": "set verl's actor_rollout_ref.rollout.dtype and actor_rollout_ref.actor.fsdp_config.dtype",
}
"""Options that must stay `auto`, and what to set in verl instead."""
_LOCAL_VALUES = {
    f"{_ACTOR}.loss_agg_mode": "traj-mean-step-mean",
    "critic.loss_agg_mode": "traj-mean-step-mean",
}
"""Values that only the embedded engine supports."""


def _expect_known_to_verl(config: Config) -> None:
    """Raise ConfigError for options and values that only the embedded engine supports."""
    for key, why in _AUTO.items():
        if (value := attrgetter(key)(config)) != "auto":
            raise ConfigError(f"{key}: {value}, which is for --engine local: leave it auto; {why}")
    expect_capabilities(config, NAME, CAPABILITIES)
    for key in _APART:
        if attrgetter(key)(config) != attrgetter(key)(Config()):
            raise ConfigError(f"{key}: is for --engine local; with verl, set verl.{key}")
    unsupported = [key for key in _LOCAL if attrgetter(key)(config) != attrgetter(key)(Config())]
    unsupported += [key for key, value in _LOCAL_VALUES.items() if attrgetter(key)(config) == value]
    if unsupported:
        key, value = unsupported[0], attrgetter(unsupported[0])(config)
        raise ConfigError(f"{key}: {value} is for --engine local; verl does not support it")


def _fixed(run_folder: Path, recipe: Recipe) -> dict[str, Any]:
    """verl options that this engine requires or sets by default."""
    trainer = recipe.config.trainer
    return {
        "data.train_files": "train",
        "data.val_files": "val",
        "data.custom_cls.path": "pkg://creditflow.engines.verl.dataset",
        "data.custom_cls.name": "TaskDataset",
        f"data.{KEY}": f"${{{KEY}}}",
        "transfer_queue.backend.SimpleStorage.total_storage_size": None,  # steps are rows, limited only by memory
        "data.dataloader_num_workers": 0,  # tasks are in memory already
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{_ROLLOUT}.name": "vllm",
        f"{_ROLLOUT}.calculate_log_probs": True,
        f"{_ROLLOUT}.agent.agent_loop_manager_class": "creditflow.engines.verl.agent_loop.CreditflowAgentLoopManager",
        "algorithm.filter_groups.metric": "acc",
        "reward.num_workers": 1,  # verl's reward workers, which are idle here
        "trainer.use_v1": True,
        "trainer.project_name": trainer.project_name,
        "trainer.experiment_name": trainer.experiment_name or run_folder.name,
        "trainer.logger": [],  # the launching process opens the recipe's trackers
        "trainer.default_local_dir": str(checkpoints(run_folder)),
    }


MODES = ("sync", "colocate_async", "separate_async")
"""verl's trainer modes: rollouts and updates in turn; both on the same devices, with rollouts that go on after an
update; or each on its own devices at the same time."""


def _mode_options(
    config: DictConfig, chosen: Mapping[str, Any], defaults: Mapping[str, Any], recipe: Config
) -> dict[str, Any]:
    """verl options that the trainer mode requires, or sets by default. Raises ConfigError for options that contradict.

    `chosen`: the user's verl options, by dotted key. `defaults`: verl's own values.
    """
    section, rollout, lag = config.trainer.v1, config.actor_rollout_ref.rollout, recipe.credit.max_version_lag
    mode = section.trainer_mode
    if mode not in MODES:
        raise ConfigError(f"trainer.v1.trainer_mode: expected one of {', '.join(MODES)}, got {mode!r}")
    _expect_read_in(mode, chosen, defaults)
    complete = recipe.actor_rollout_ref.rollout.min_complete_frac
    if mode == "sync":
        if complete < 1:
            raise ConfigError(
                f"actor_rollout_ref.rollout.min_complete_frac: {complete:g}, but trainer.v1.trainer_mode=sync stops "
                "the servers when it trains; expected 1, or colocate_async or separate_async"
            )
        return {}
    if section[mode].num_warmup_batches > lag:
        raise ConfigError(
            f"algorithm.max_version_lag: {lag}, but trainer.v1.trainer_mode={mode} samples "
            f"{section[mode].num_warmup_batches} batches ahead (trainer.v1.{mode}.num_warmup_batches); expected at "
            "least as many versions"
        )
    if recipe.data.curriculum is not None:
        raise ConfigError(
            f"data.curriculum: given, but trainer.v1.trainer_mode={mode} draws tasks before the outcomes that move its "
            "levels; expected sync"
        )
    lora, policies = config.actor_rollout_ref.model.lora, trained_policies(recipe)
    adapted = [policy for policy in policies if lora.rank > 0 or lora_rank_of(recipe, policy)]
    if mode == "separate_async" and adapted and not lora.merge:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank: LoRA of policy {adapted[0]}, but trainer.v1.trainer_mode={mode} sends "
            "the base model alone to the servers; add actor_rollout_ref.model.lora.merge=true after --, which merges "
            "the adapter into the weights that are sent"
        )
    values: dict[str, Any] = {
        "trainer.v1.sampler.max_off_policy_threshold": lag + 1,
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
    }
    if mode == "separate_async":
        values["trainer.v1.separate_async.parameter_sync_step"] = 1
        if rollout.nnodes < 1 or rollout.n_gpus_per_node < 1:
            raise ConfigError(
                "actor_rollout_ref.rollout.nnodes: trainer.v1.trainer_mode=separate_async needs devices for rollouts; "
                "set it and actor_rollout_ref.rollout.n_gpus_per_node, beside trainer.nnodes and "
                "trainer.n_gpus_per_node for training"
            )
        if rollout.checkpoint_engine.backend == "naive":
            values["actor_rollout_ref.rollout.checkpoint_engine.backend"] = "nccl"
    if "algorithm.rollout_correction.rollout_is" not in chosen:
        values["algorithm.rollout_correction.rollout_is"] = "token"
    return values


def _expect_read_in(mode: str, chosen: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ConfigError for a changed option that verl reads in another trainer mode."""
    for key, value in chosen.items():
        other = next((name for name in MODES if name != mode and key.startswith(f"trainer.v1.{name}.")), None)
        if other is not None and value != defaults.get(key):
            raise ConfigError(f"{key}: {_OTHER_MODE.format(other)}")
        if key.endswith(".parameter_sync_step") and key not in _REFUSED:
            raise ConfigError(f"{key}: {_REFUSED['trainer.v1.separate_async.parameter_sync_step']}")
        if mode != "separate_async" and value != defaults.get(key) and key.startswith(_SEPARATE_KEYS):
            raise ConfigError(f"{key}: {_OTHER_MODE.format('separate_async')}")


def checkpoints(run_folder: Path) -> Path:
    """The folder of a run's verl checkpoints."""
    return run_folder.absolute() / "checkpoints"


# verl options that have no effect here, or another one than their name suggests

_IN_RECIPE = "set {0} of the recipe (before --)"
_REWARDS = "rewards are the recipe's reward.functions; verl's own reward functions and models are not asked"
_DATA = "tasks are the recipe's, and its workflow writes the prompts"
_STEP_FILES = "every trajectory is in the run folder's steps/*.parquet and evaluation.json"
_WORKFLOW = "turns and tools are the workflow's (team.workflow)"
_OTHER_MODE = "only trainer.v1.trainer_mode={} reads it; leave it out, or set that mode"
_STALENESS = "credit and samples have one limit; set algorithm.max_version_lag of the recipe"
_UNREAD = "verl 0.9's trainer does not read it"

_REASONS = {
    _REWARDS: ("reward", "custom_reward_function", "reward_model"),
    _DATA: _keys("""
        data: custom_cls tokenizer use_shm trust_remote_code prompt_key reward_fn_key truncation
        data: return_raw_input_ids return_raw_chat return_full_prompt return_multi_modal_inputs
        data: filter_overlong_prompts filter_overlong_prompts_workers validation_shuffle
        data: image_key image_patch_size video_key audio_key mm_processor_kwargs
    """),
    _WORKFLOW: _keys("""
        actor_rollout_ref.rollout: multi_turn
        actor_rollout_ref.rollout.agent: agent_loop_manager_class agent_loop_config_path default_agent_loop
        data: tool_config_path function_tool_path
    """),
    _STALENESS: _keys("trainer.v1.sampler: max_off_policy_threshold max_off_policy_strategy"),
    _UNREAD: _keys("""
        actor_rollout_ref: nccl_timeout
        actor_rollout_ref.actor: freeze_vision_tower
        actor_rollout_ref.rollout: over_sample_rate multi_stage_wake_up agent.custom_async_server
        algorithm: use_pf_ppo pf_ppo
        critic: forward_micro_batch_size forward_micro_batch_size_per_gpu
        trainer: esi_redundant_time
    """),
    _STEP_FILES: _keys("trainer: rollout_data_dir validation_data_dir log_val_generations"),
    "mini-batches are dealt out so that each has rows of all tasks": (f"{_ACTOR}.shuffle", "critic.shuffle"),
}
"""Common reasons, and the verl keys and sections that cannot be changed for it."""

_REFUSED: dict[str, str] = {
    **{key: reason for reason, keys in _REASONS.items() for key in keys},
    "trainer.use_v1": "creditflow's trainer is built on verl's V1; leave it true",
    "trainer.v1.separate_async.parameter_sync_step": "every update goes to the servers; use "
    "actor_rollout_ref.actor.ppo_mini_batch_size for several updates in a training step",
    "actor_rollout_ref.hybrid_engine": "verl 0.9.1 fails at the start without it "
    "(PPOTrainerSeparateAsync._setup); leave it at its default",
    "trainer.v1.separate_async.hybrid_rollout": "training devices are not lent to rollouts; leave it at its default",
    "trainer.default_local_dir": "verl's checkpoints lie in the run's folder; "
    + _IN_RECIPE.format("trainer.default_local_dir"),
    "trainer.balance_batch": f"{_UNREAD}: batches are always balanced",
    "trainer.val_only": "creditflow eval evaluates a model",
    "algorithm.adv_estimator": _IN_RECIPE.format("algorithm.adv_estimator"),
    "algorithm.gamma": "a discount per token in verl; " + _IN_RECIPE.format("algorithm.gamma_token"),
    "algorithm.lam": "per token in verl; " + _IN_RECIPE.format("algorithm.lam_token"),
    "algorithm.use_kl_in_reward": f"KL is no part of credit; use {_ACTOR}.use_kl_loss",
    "algorithm.kl_penalty": f"KL is no part of credit; use {_ACTOR}.kl_loss_type",
    "algorithm.kl_ctrl": f"KL is no part of credit; use {_ACTOR}.kl_loss_coef",
    "algorithm.filter_groups.metric": "groups are filtered by acc: whether the outcome of a trajectory is right",
    "algorithm.filter_groups.max_num_gen_batches": f"{_UNREAD}; use algorithm.filter_groups.max_inflight_gen_batches",
    "critic.enable": "whether there is a critic follows from the recipe's algorithm.adv_estimator",
    "critic.grad_clip": f"{_UNREAD}; use critic.optim.clip_grad",
    "critic.ppo_mini_batch_size": "the critic's mini-batches are the actor's",
    "distillation": "creditflow's trainer does not distil",
    "sandbox_fusion": "code runs in the recipe's reward.sandbox",
    "skip": "recorded rollouts hold no trajectories, from which credit is computed",
    f"{_ACTOR}.checkpoint.async_save": "a checkpoint must be whole before the run goes on",
    f"{_ACTOR}.use_prefix_grouper": "the rows of a group are steps with prompts of their own",
    f"{_ROLLOUT}.calculate_log_probs": "credit and metrics need them; leave it true",
    f"{_ROLLOUT}.do_sample": f"{_UNREAD}; use {_ROLLOUT}.temperature",
    f"{_ROLLOUT}.prompt_length": "it is the recipe's data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "it is the recipe's data.max_response_length",
    f"{_ROLLOUT}.trace": "verl 0.9's V1 agent loops trace nothing",
    "data.train_files": _IN_RECIPE.format("data.train_files"),
    "data.val_files": _IN_RECIPE.format("data.val_files"),
    "data.apply_chat_template_kwargs": "prompts are written by the model's own chat template; use "
    "actor_rollout_ref.model.custom_chat_template",
}
"""verl keys and sections that cannot be changed, with the reason."""

_SEPARATE_KEYS = _keys("""
    actor_rollout_ref.rollout: nnodes n_gpus_per_node checkpoint_engine.backend
""")
"""verl keys and sections that only the mode `separate_async` reads."""

_MICRO_BATCHES = {
    f"{_ACTOR}.use_dynamic_bsz": f"{_ACTOR}.ppo_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": "actor_rollout_ref.ref.log_prob_micro_batch_size",
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": f"{_ROLLOUT}.log_prob_micro_batch_size",
    "critic.use_dynamic_bsz": "critic.ppo_micro_batch_size",
}
"""Switches, and the key that has no effect while the switch is on, nor does the key with `_per_gpu`."""


def expect_verl() -> None:
    """Raise ConfigError if verl is not installed, or its version does not fit (`overridden`)."""
    try:
        version, root = overridden.installed()
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"--engine verl: verl is not installed; {_INSTALL}") from None
    if differ := overridden.changed(version, root):
        supported = ", ".join(overridden.supported())
        methods = ", ".join(name.split(": ")[1] for name in differ[:_MOST_NAMED])
        more = f" and {len(differ) - _MOST_NAMED} more" if len(differ) > _MOST_NAMED else ""
        raise ConfigError(
            f"--engine verl: verl {version} is installed, {supported} is supported, and {len(differ)} of the methods "
            f"that creditflow overrides or relies on differ: {methods}{more}; {_INSTALL}"
        )
    try:
        with quiet():
            import transfer_queue  # noqa: F401
            import verl.trainer.main_ppo  # noqa: F401
    except ModuleNotFoundError as error:  # verl does not declare all its dependencies
        raise ConfigError(f"--engine verl: no module {error.name!r}; {_INSTALL}") from None


def compose(recipe: Recipe, verl_overrides: Sequence[str], run_folder: Path) -> DictConfig:
    """Compose verl's complete configuration for a recipe.

    Later sources override earlier ones: verl's defaults, the recipe's options under their verl names, the recipe's
    section `verl`, and `verl_overrides` in Hydra's syntax. An option that the command line sets by `key=value`
    overrides the section `verl`.

    The configuration contains the effective recipe, updated from verl options (`recipe.read_run_handle`). Raises
    ConfigError that names a key: unknown, of the wrong type, or without effect here.
    """
    _expect_known_to_verl(recipe.config)
    options = _VerlOptions.from_recipe(recipe, verl_overrides)
    base, defaults = _files(options.config_name, options.choices)
    options.check(base, defaults)
    recipe = with_options(recipe, {key: options.values[key] for key in _BACK if key in options.values})
    values = _named_as_in(defaults, mapped(recipe.config)) | _fixed(run_folder, recipe) | _ray(recipe.config)
    _expect_meaning(options.values, defaults | values)
    own = _nested({**values, KEY: recipe_section(recipe, run_folder)})
    config = _compose(options.config_name, options.overrides, [own, _nested(options.section)])
    for key, value in _mode_options(config, options.values, defaults, recipe.config).items():
        OmegaConf.update(config, key, value)
    _expect_fit(config, options.values, recipe.config)
    return config


def as_yaml(config: DictConfig) -> str:
    """Format verl's configuration as YAML, with interpolations resolved and the recipe in readable form."""
    import yaml

    resolved: Any = OmegaConf.to_container(config, resolve=True)
    run = read_run_handle(config)
    del resolved["data"][KEY]
    resolved[KEY] = {"name": run.recipe.name, "run_folder": str(run.run_folder), "recipe": run.recipe.to_dict()}
    return str(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True, width=120))


@dataclass(frozen=True, slots=True)
class _VerlOptions:
    """The user's verl options, from the recipe's section `verl` and after `--`."""

    config_name: str
    section: dict[str, Any]
    """The flattened section, without options that the command line set under their recipe names."""
    overrides: tuple[str, ...]
    """In Hydra's syntax; begins with the section's `model_engine`."""
    choices: tuple[str, ...]
    """The overrides that select verl's config files."""
    values: dict[str, Any]
    """The flattened keys and values of section and overrides; overrides take precedence."""
    added: frozenset[str]
    """Keys that need not exist in verl's files."""
    deleted: frozenset[str]

    @classmethod
    def from_recipe(cls, recipe: Recipe, verl_overrides: Sequence[str]) -> _VerlOptions:
        section = dict(recipe.config.verl)
        name, engine = section.pop("config_name", _CONFIG_NAME), section.pop("model_engine", None)
        for key, value in (("config_name", name), ("model_engine", engine)):
            if not isinstance(value, str | None):
                raise ConfigError(f"verl.{key}: expected a name, got {value!r}")
        flat = dict(leaves(section))
        added = {key.replace("+", "") for key in flat if "+" in key}
        outranked = {key for key, keys in sources().items() if not recipe.overridden.isdisjoint(keys)}
        outranked -= {key.removeprefix("verl.") for key in recipe.overridden if key.startswith("verl.")}
        kept = {plain: value for key, value in flat.items() if (plain := key.replace("+", "")) not in outranked}
        overrides = (*([] if engine is None else [f"model_engine={engine}"]), *verl_overrides)
        values, choices, deleted = dict(kept), list[str](), set[str]()
        for override in _parsed(overrides):
            key = override.key_or_group
            if override.package is not None or key in _GROUPS:
                choices.append(override.input_line)
            elif override.is_delete():
                deleted.add(key)
            else:
                leaf_values = dict(leaves({key: override.value()}))
                values |= leaf_values
                if override.is_add() or override.is_force_add():
                    added |= leaf_values.keys()
        return cls(name, kept, overrides, tuple(choices), values, frozenset(added), frozenset(deleted))

    def check(self, base: DictConfig, defaults: Mapping[str, Any]) -> None:
        """Raise ConfigError for a key that does not exist in verl, or a value of the wrong type.

        `defaults`: verl's keys and sections, flattened.
        """
        if unknown := next((key for key in self.deleted if key not in defaults), None):
            raise ConfigError(f"unknown verl key {unknown!r}{_nearest(unknown, defaults)}")
        for key, value in self.values.items():
            if key not in self.added and not _is_known(key, defaults):
                raise ConfigError(
                    f"unknown verl key {key!r}{_nearest(key, defaults)}; +{key} would add it to those that verl lists"
                )
            if key in defaults:
                _expect_type(key, value, defaults[key], _declared(base, key))


def _parsed(overrides: Sequence[str]) -> list[Any]:
    """Parse `overrides` with Hydra."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    parser, parsed = OverridesParser.create(), []
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except OverrideParseException as error:
            lines = [line for line in str(error).splitlines() if "Error parsing" not in line and "hydra.cc" not in line]
            raise ConfigError(
                f"-- {text}: expected an override as Hydra reads it (key=value, +key=value, ~key): {' '.join(lines)}"
            ) from error
        if override.is_sweep_override():
            raise ConfigError(f"-- {text}: one run has one value of each option; a list is key=[a,b]")
        parsed.append(override)
    return parsed


@functools.cache
def _files(config_name: str, choices: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any]]:
    """verl's default configuration, as it is and flattened. Cached: do not modify it."""
    config = _compose(config_name, choices)
    return config, _flat(config)


def _compose(config_name: str, overrides: Iterable[str], layers: Sequence[DictConfig] = ()) -> DictConfig:
    """Compose verl's files, then `layers`, then `overrides`; later ones take precedence."""
    from hydra import compose, initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException

    merged = OmegaConf.merge({"defaults": [config_name, "_self_"]}, *layers)
    ConfigStore.instance().store(name=_OWN_NAME, node=merged)
    try:
        with initialize_config_module(_PACKAGE, version_base=None):
            config: DictConfig = compose(_OWN_NAME if layers else config_name, overrides=list(overrides))
            return config
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"verl's configuration: {' '.join(str(error).split())}") from error


def _flat(config: DictConfig) -> dict[str, Any]:
    """Flatten a configuration to dotted keys, with interpolations resolved if possible; a section's value is {}."""
    flat: dict[str, Any] = {}

    def walk(node: DictConfig, path: str) -> None:
        for name in map(str, node):
            value = None
            if not OmegaConf.is_missing(node, name):
                with contextlib.suppress(OmegaConfBaseException):  # it may refer to a key that the recipe adds
                    value = node[name]
            if isinstance(value, DictConfig):
                flat[f"{path}{name}"] = {}
                walk(value, f"{path}{name}.")
            else:
                flat[f"{path}{name}"] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    walk(config, "")
    return flat


def _nested(flat: Mapping[str, Any]) -> DictConfig:
    nested = OmegaConf.create()
    for key, value in flat.items():
        OmegaConf.update(nested, key, value, force_add=True)
    return nested


def _named_as_in(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `values` to the names in the selected verl files, `defaults` (flattened)."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = next((name for name in (key, _RENAMED.get(key)) if name in defaults), None)
        if name is not None:
            named[name] = value
        elif value != mapped(Config())[key]:
            engine = defaults["model_engine"]
            raise ConfigError(f"{key}: {value!r}, but verl's model_engine={engine} has no such option")
    return named


def _ray(config: Config) -> dict[str, Any]:
    """Ray's start options: defaults, the thread count and the recipe's `ray_kwargs.ray_init`."""
    chosen = {f"ray_kwargs.ray_init.{key}": value for key, value in leaves(config.ray_kwargs.ray_init)}
    quiet = {"ray_kwargs.ray_init.log_to_driver": False, "ray_kwargs.ray_init.logging_level": "warning"}
    threads = config.trainer.num_threads
    name = "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS"
    return quiet | ({name: str(threads)} if threads else {}) | chosen


# Checks


def _is_known(key: str, defaults: Mapping[str, Any]) -> bool:
    """Whether `key` exists in verl, or its section accepts any key (it is empty or null)."""
    section = key
    while section and section not in defaults:
        section, _, _ = section.rpartition(".")
    if section == key:
        return True
    if not section or defaults[section] not in ({}, None):
        return False
    return not any(other.startswith(f"{section}.") for other in defaults)


def _nearest(key: str, defaults: Mapping[str, Any]) -> str:
    """A suggestion for an unknown key: a similar name in its section, or the same name in another."""
    section, _, name = key.rpartition(".")
    beside = {other.rpartition(".")[2]: other for other in defaults if other.rpartition(".")[0] == section}
    elsewhere = [other for other in defaults if other.rpartition(".")[2] == name]
    close = difflib.get_close_matches(name, beside, n=1)
    if close or elsewhere:
        return f" (did you mean {beside[close[0]] if close else elsewhere[0]!r}?)"
    return did_you_mean(key, [other for other, value in defaults.items() if value != {}])


def _expect_type(key: str, value: Any, default: Any, declared: Any) -> None:
    """Raise ConfigError if `value` has neither verl's declared type nor its default's (None: unknown type)."""
    kinds = [declared] if declared is not None else []
    if default is not None:
        kinds = [type(default), *kinds]
    if key == "trainer.logger":  # one name instead of a list
        kinds.append(str)
    if kinds and not any(_is_a(value, kind) for kind in kinds) and not (isinstance(value, str) and "${" in value):
        raise ConfigError(f"{key}: expected {_in_words(kinds[0])}, got {value!r}")


def _declared(base: DictConfig, key: str) -> Any:
    """The type of `key` in the verl dataclass of its section; None without such a field."""
    from hydra.utils import get_class

    section, _, name = key.rpartition(".")
    node = OmegaConf.select(base, section) if section else base
    return get_type_hints(get_class(node._target_)).get(name) if "_target_" in node else None


def _is_a(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_is_a(value, option) for option in get_args(kind))
    if not isinstance(kind := origin or kind, type):
        return True
    types_of_kind, _ = _KINDS.get(kind, _SECTION)
    return isinstance(value, types_of_kind) and (kind is bool or not isinstance(value, bool))


def _in_words(kind: Any) -> str:
    options = [option for option in get_args(kind) if option is not types.NoneType] if get_origin(kind) else [kind]
    return " or ".join(_KINDS.get(get_origin(option) or option, _SECTION)[1] for option in options)


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str, int, float), "a text"),
    list: ((list,), "a list"),
    tuple: ((list,), "a list"),
    types.NoneType: ((types.NoneType,), "null"),
}
"""The accepted types of a value for each declared type, and the words for them. All other types are sections."""
_SECTION = (Mapping,), "a mapping of options"


def _expect_meaning(chosen: Mapping[str, Any], in_force: Mapping[str, Any]) -> None:
    """Raise ConfigError for a changed key that must not change, or has no effect here."""
    for key, value in chosen.items():
        parts = key.split(".")
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        why = next((_REFUSED[prefix] for prefix in prefixes if prefix in _REFUSED), None)
        if why is not None and value != in_force.get(key):
            raise ConfigError(f"{key}: {why}")


_ONE_POLICY = ("trtllm",)
"""verl rollout back ends that `policy_servers` does not extend to several trained policies."""


def _expect_fit(config: DictConfig, chosen: Mapping[str, Any], recipe: Config) -> None:
    """Raise ConfigError if options contradict each other."""
    for switch, size in _MICRO_BATCHES.items():
        for key in (size, f"{size}_per_gpu"):
            if OmegaConf.select(config, switch) and chosen.get(key) is not None:
                raise ConfigError(f"{key}: has no effect while {switch} is true: micro-batches are cut by tokens")
    trained = trained_policies(recipe)
    backend = config.actor_rollout_ref.rollout.name
    if len(trained) > 1 and backend in _ONE_POLICY:
        raise ConfigError(
            f"policies: expected one trained policy with actor_rollout_ref.rollout.name={backend}, got {len(trained)} "
            f"({', '.join(trained)}). verl's workers find {backend} servers by rank alone, so the weights of all "
            f"policies would go to the servers of {trained[0]}, and the others would sample from their first weights. "
            "Let all agents act through one policy (team.agents.<name>.policy; actor_rollout_ref.model.lora_rank "
            "trains it by LoRA), serve the others frozen (policies.<name>.endpoint), or train with --engine local"
        )
    for name, policy in recipe.policies.items():
        if policy.source is not None:
            raise ConfigError(
                f"policies.{name}.{policy.source[0]}: a plug-in provides the policy, which needs --engine local"
            )
        if name not in trained and policy.endpoint is None:
            raise ConfigError(
                f"policies.{name}.trainable: false, but verl holds the models that it trains and no others; serve this "
                f"one, and name its address as policies.{name}.endpoint"
            )
    for name in trained:
        path, key = model_of(recipe, name)
        if not isinstance(path, str) or not path:
            raise ConfigError(
                f"{key}: expected a Hugging Face folder, a name on the hub, `tiny`, `smollm2` or `file.py:function`, "
                f"got {'nothing' if path is None else repr(path)}"
            )
    actor, data = config.actor_rollout_ref.actor, config.data
    longest = data.max_prompt_length + data.max_response_length
    # The option's old key, and the one that verl's engines read.
    ulysses = "ulysses_sequence_parallel_size"
    parallel = [section.get(ulysses, 1) for section in (actor, actor.get("fsdp_config", {}))]
    room = actor.ppo_max_token_len_per_gpu * max(parallel)
    if actor.use_dynamic_bsz and longest > room:
        raise ConfigError(
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu: {actor.ppo_max_token_len_per_gpu}, which a row of "
            f"data.max_prompt_length + data.max_response_length = {longest} tokens does not fit into"
        )
    _expect_divisible(config, recipe)


def _expect_divisible(config: DictConfig, recipe: Config) -> None:
    """Raise ConfigError if the devices of a policy cannot be divided into rollout servers."""
    rollout = config.actor_rollout_ref.rollout
    for name, own in policy_configs(config, recipe).items():
        devices = own.trainer.n_gpus_per_node * own.trainer.nnodes
        server = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        owner = f" of policy {name}" if len(trained_policies(recipe)) > 1 else ""
        for number, keys in (
            (devices, "trainer.n_gpus_per_node * trainer.nnodes"),
            (rollout_devices(own), "actor_rollout_ref.rollout.n_gpus_per_node * nnodes"),
        ):
            if number % server:
                raise ConfigError(
                    f"actor_rollout_ref.rollout.tensor_model_parallel_size: rollout servers of {server} devices, which "
                    f"the {number}{owner} ({keys}) cannot be divided into"
                )


_REFUSALS = (AssertionError, ValueError, TypeError, NotImplementedError)
"""Exceptions that verl raises for an invalid configuration."""


def validate(config: DictConfig) -> list[str]:
    """Run verl's own checks of a configuration; returns their warnings. Raises ConfigError if they fail.

    In the models' sections only field names are checked, because verl's checks would load the model files.
    """
    from hydra.errors import HydraException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.utils.device import auto_set_device
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    servers = sorted({name for name, _ in _ROLLOUT_REGISTRY})
    if (rollout := config.actor_rollout_ref.rollout.name) not in servers:
        hint = did_you_mean(rollout, servers)
        raise ConfigError(
            f"actor_rollout_ref.rollout.name: expected one of {', '.join(servers)}, got {rollout!r}{hint}"
        )
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), quiet():
            auto_set_device(config)
            checked, unchecked = _without_models(config)
            critic = need_critic(config)
            validate_config(checked, use_reference_policy=need_reference_policy(config), use_critic=critic)
            for section in (_ACTOR, "actor_rollout_ref.rollout", "algorithm", "critic"):
                if section != "critic" or critic:
                    omega_conf_to_dataclass(OmegaConf.select(checked, section))
    except (*_REFUSALS, HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"verl refuses the configuration: {first_line(_root(error))}") from error
    return unchecked + [line for line in output.getvalue().splitlines() if line.startswith(("WARNING", "NOTICE"))]


def _without_models(config: DictConfig) -> tuple[DictConfig, list[str]]:
    """A copy that verl can check without models and vLLM, and warnings about options left unchecked.

    Raises TypeError for an unknown option in a model's section.
    """
    from hydra.utils import get_class

    resolved: Any = OmegaConf.to_container(config, resolve=True)
    checked: Any = OmegaConf.create(resolved)
    for section in ("actor_rollout_ref.model", "critic.model"):
        model = OmegaConf.select(checked, section)
        fields = get_type_hints(get_class(model.pop("_target_")))
        if unknown := next((key for key in model if key not in fields), None):
            raise TypeError(f"{section} has no option {unknown!r}")
    model = checked.actor_rollout_ref.model
    rank = model.lora.rank if model.lora.rank > 0 else model.lora_rank
    if rank > 0 and checked.actor_rollout_ref.rollout.name == "vllm" and importlib.util.find_spec("vllm") is None:
        model.lora.rank = model.lora_rank = 0
        return checked, [f"vLLM is not installed here: whether it takes LoRA of rank {rank} was not checked"]
    return checked, []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings that do not concern the user, such as verl's about a process without an accelerator."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
