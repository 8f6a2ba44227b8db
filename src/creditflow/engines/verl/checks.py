"""Checks of verl's configuration: of the recipe, of each verl option of the user, and of the whole."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import StrictBool, StrictFloat, StrictInt

from creditflow._utils.sections import Text, checked
from creditflow.config import Config, lora_rank_of, model_of, trained_policies
from creditflow.engines.base import expect_supported
from creditflow.engines.verl.options import LOCAL, MICRO_BATCHES, MODES, REFUSED, SEPARATE
from creditflow.engines.verl.policies import policy_configs, rollout_devices
from creditflow.engines.verl.recipe import NAME
from creditflow.errors import ConfigError, did_you_mean, first_line

_LOCAL_LOSS = "traj-mean-step-mean"
"""A value of `loss_agg_mode` that only the embedded engine supports."""

SAMPLES = "trainer.log_val_generations"


def expect_for_verl(config: Config) -> None:
    """Raise ConfigError for options and values of a recipe that only the embedded engine supports."""
    expect_supported(config, NAME, LOCAL)
    for key in ("actor_rollout_ref.actor.loss_agg_mode", "critic.loss_agg_mode"):
        if attrgetter(key)(config) == _LOCAL_LOSS:
            raise ConfigError(f"{key}: {_LOCAL_LOSS} is for --engine local; verl does not support it")


# The user's verl options, by dotted key


def unknown(keys: Iterable[str], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Messages for the `keys` that verl does not have. `defaults`: verl's own configuration, flattened."""
    options = [key for key, default in defaults.items() if default != {}]
    return {
        key: f"unknown verl key {key!r}{did_you_mean(key, options)}; +{key} would add it to those that verl lists"
        for key in keys
        if not _is_known(key, defaults)
    }


def _is_known(key: str, defaults: Mapping[str, Any]) -> bool:
    """Whether `key` exists in verl, or its section accepts any key (it is empty or null)."""
    section = next((part for part in _with_sections(key) if part in defaults), None)
    is_open = section is not None and defaults[section] in ({}, None)
    return section == key or (is_open and not any(other.startswith(f"{section}.") for other in defaults))


def _with_sections(key: str) -> list[str]:
    """A dotted key and the sections around it, from the inside."""
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def mistyped(chosen: Mapping[str, Any], base: DictConfig, defaults: Mapping[str, Any]) -> dict[str, str]:
    """Messages for the `chosen` options that have another type in verl.

    `base`, `defaults`: verl's own configuration, nested and flattened.
    """
    problems: dict[str, str] = {}
    for key, value in chosen.items():
        if key in defaults and not (isinstance(value, str) and "${" in value):
            try:
                checked(_kind(key, base, defaults[key]), value, key)
            except ConfigError as error:
                problems[key] = str(error)
    return problems


_KINDS: Any = {bool: StrictBool, int: StrictInt, float: StrictFloat, str: Text, list: list, tuple: list, NoneType: None}
"""The pydantic types of verl's declared types. All other classes are sections."""


def _kind(key: str, base: DictConfig, default: Any) -> Any:
    """The type of verl's `key`: that of its default, and the one that the dataclass of its section declares."""
    from hydra.utils import get_class

    section, _, name = key.rpartition(".")
    node = OmegaConf.select(base, section) if section else base
    declared = get_type_hints(get_class(node._target_)).get(name) if "_target_" in node else None
    kinds = [] if default is None else _pydantic_types(type(default))
    kinds += [] if declared is None else _pydantic_types(declared)
    if key == "trainer.logger":  # one name instead of a list
        kinds.append(str)
    return Any if Any in kinds or not kinds else functools.reduce(operator.or_, kinds)


def _pydantic_types(declared: Any) -> list[Any]:
    origin = get_origin(declared) or declared
    if origin in (Union, UnionType):
        return [kind for option in get_args(declared) for kind in _pydantic_types(option)]
    if origin is Any or not isinstance(origin, type):
        return [Any]
    return [_KINDS.get(origin, dict)]


def without_effect(chosen: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Reasons why some `chosen` options must not be changed or have no effect."""
    mode = chosen.get("trainer.v1.trainer_mode", defaults["trainer.v1.trainer_mode"])
    unread = {
        key: f"has no effect while {switch} is true: micro-batches are cut by tokens; use "
        + size.replace("micro_batch_size", "max_token_len_per_gpu")
        for switch, size in MICRO_BATCHES.items()
        if chosen.get(switch, True)
        for key in (size, f"{size}_per_gpu")
    }
    problems: dict[str, str] = {}
    for key in chosen:
        why = next((REFUSED[part] for part in _with_sections(key) if part in REFUSED), None)
        if (reason := why or unread.get(key) or _of_another_mode(key, mode)) is not None:
            problems[key] = f"{key}: {reason}"
    if chosen.get(SAMPLES) and not chosen.get("trainer.logger"):
        problems[SAMPLES] = f"{SAMPLES}: verl's own trackers show them; add trainer.logger=[wandb] after --"
    return problems


def _of_another_mode(key: str, mode: str) -> str | None:
    other = next((other for other in MODES if other != mode and key.startswith(f"trainer.v1.{other}.")), None)
    if mode != "separate_async" and key.startswith(SEPARATE):
        other = "separate_async"
    return other and f"only trainer.v1.trainer_mode={other} reads it; leave it out, or set that mode"


# The whole configuration


def mode_options(config: DictConfig, chosen: Mapping[str, Any], recipe: Config) -> dict[str, Any]:
    """verl options that the trainer mode requires, or sets by default. Raises ConfigError for options that contradict.

    `chosen`: the user's verl options, by dotted key.
    """
    section, rollout, lag = config.trainer.v1, config.actor_rollout_ref.rollout, recipe.credit.max_version_lag
    mode = section.trainer_mode
    if mode not in MODES:
        raise ConfigError(f"trainer.v1.trainer_mode: expected one of {', '.join(MODES)}, got {mode!r}")
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


def expect_fit(config: DictConfig, recipe: Config) -> None:
    """Raise ConfigError if options contradict each other."""
    trained = trained_policies(recipe)
    if len(trained) > 1 and config.actor_rollout_ref.rollout.name == "trtllm":
        raise ConfigError(
            f"policies: expected one trained policy with actor_rollout_ref.rollout.name=trtllm, got {len(trained)} "
            f"({', '.join(trained)}): verl would send the weights of all to the servers of {trained[0]}. Let all "
            "agents act through one policy (team.agents.<name>.policy; actor_rollout_ref.model.lora_rank trains it by "
            "LoRA), serve the others frozen (policies.<name>.endpoint), or train with --engine local"
        )
    for name, policy in recipe.policies.items():
        if policy.source is not None:
            raise ConfigError(f"policies.{name}.{policy.source[0]}: a plug-in's policy, which needs --engine local")
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
        names, hint = ", ".join(servers), did_you_mean(rollout, servers)
        raise ConfigError(f"actor_rollout_ref.rollout.name: expected one of {names}, got {rollout!r}{hint}")
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), quiet():
            auto_set_device(config)
            plain, critic = _without_models(config), need_critic(config)
            validate_config(plain, use_reference_policy=need_reference_policy(config), use_critic=critic)
            for section in ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm", "critic"):
                if section != "critic" or critic:
                    omega_conf_to_dataclass(OmegaConf.select(plain, section))
    except (*_REFUSALS, HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"verl refuses the configuration: {first_line(_root(error))}") from error
    return [line for line in output.getvalue().splitlines() if line.startswith(("WARNING", "NOTICE"))]


def _without_models(config: DictConfig) -> Any:
    """A copy that verl can check without models and vLLM. Raises TypeError for an unknown option of a model."""
    from hydra.utils import get_class

    plain: Any = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    for section in ("actor_rollout_ref.model", "critic.model"):
        model = OmegaConf.select(plain, section)
        fields = get_type_hints(get_class(model.pop("_target_")))
        if unknown := next((key for key in model if key not in fields), None):
            raise TypeError(f"{section} has no option {unknown!r}")
    if importlib.util.find_spec("vllm") is None:  # verl asks it whether it takes adapters of this rank
        model = plain.actor_rollout_ref.model
        model.lora.rank = model.lora_rank = 0
    return plain


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
