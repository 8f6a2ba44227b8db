"""Convert a recipe to verl's configuration: composed from verl's files by Hydra, from `options` and the user's options.

Starts no process and loads no model or data.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from creditflow.config import Config, Recipe, leaves, with_options
from creditflow.engines.verl import checks
from creditflow.engines.verl.options import BACK, FIXED, RENAMED, mapped, sources
from creditflow.engines.verl.recipe import KEY, read_run_handle, recipe_section
from creditflow.errors import ConfigError

_PACKAGE, CONFIG_NAME, _OWN_NAME = "verl.trainer.config", "ppo_trainer", "creditflow_recipe"


def compose(recipe: Recipe, verl_overrides: Sequence[str], run_folder: Path) -> DictConfig:
    """Compose verl's complete configuration for a recipe.

    Later sources override earlier ones: verl's defaults, the recipe's options under their verl names, the recipe's
    section `verl`, and `verl_overrides` in Hydra's syntax. An option that the command line sets by `key=value`
    overrides the section `verl`.

    The configuration contains the effective recipe, updated from verl options (`recipe.read_run_handle`). Raises
    ConfigError that names all of the user's keys that are unknown, of the wrong type, or without effect here.
    """
    checks.expect_for_verl(recipe.config)
    options = _UserOptions.from_recipe(recipe, verl_overrides)
    base, defaults = files(options.config_name, options.choices)
    unknown = checks.unknown(options.keys, defaults)
    without, own = options.without(unknown), _own_options(recipe, run_folder, defaults)
    chosen = _changes(OmegaConf.merge(base, own), without.composed(own))
    problems = unknown | checks.mistyped(chosen, base, defaults) | checks.without_effect(chosen, defaults)
    if problems:
        raise _refusal(sorted(problems.values()))
    recipe = with_options(recipe, {key: chosen[key] for key in BACK if key in chosen})
    config = options.composed(_own_options(recipe, run_folder, defaults))
    for key, value in checks.mode_options(config, chosen, recipe.config).items():
        OmegaConf.update(config, key, value)
    checks.expect_fit(config, recipe.config)
    return config


def _changes(before: Any, after: Any) -> dict[str, Any]:
    """The dotted keys and values of `after` that `before` does not have, or has otherwise."""
    old, new = (_flat(OmegaConf.to_container(config)) for config in (before, after))
    equal = {key for key in old.keys() & new.keys() if old[key] == new[key]}
    equal -= {key for key in equal if isinstance(old[key], bool) != isinstance(new[key], bool)}  # 1 == True
    return {key: value for key, value in new.items() if key not in equal}


def _refusal(problems: Sequence[str]) -> ConfigError:
    """The error for all problems; several are its notes."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    error = ConfigError(f"{len(problems)} options of verl cannot be used:")
    for problem in problems:
        error.add_note(problem)
    return error


def _own_options(recipe: Recipe, run_folder: Path, defaults: Mapping[str, Any]) -> DictConfig:
    """The verl options that follow from the recipe, and the recipe itself. `defaults`: verl's own, flattened."""
    trainer = recipe.config.trainer
    values = {
        **_named_as_in(defaults, mapped(recipe.config)),
        **FIXED,
        "trainer.project_name": trainer.project_name,
        "trainer.experiment_name": trainer.experiment_name or run_folder.name,
        "trainer.default_local_dir": str(checkpoints(run_folder)),
        **_ray(recipe.config),
        KEY: recipe_section(recipe, run_folder),
    }
    return nested(values)


def checkpoints(run_folder: Path) -> Path:
    """The folder of a run's verl checkpoints."""
    return run_folder.absolute() / "checkpoints"


def as_yaml(config: DictConfig) -> str:
    """Format verl's configuration as YAML, with interpolations resolved and the recipe in readable form."""
    import yaml

    resolved: Any = OmegaConf.to_container(config, resolve=True)
    run = read_run_handle(config)
    del resolved["data"][KEY]
    resolved[KEY] = {"name": run.recipe.name, "run_folder": str(run.run_folder), "recipe": run.recipe.to_dict()}
    return str(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True, width=120))


@dataclass(frozen=True, slots=True)
class _UserOptions:
    """The user's verl options, from the recipe's section `verl` and after `--`."""

    config_name: str
    section: Mapping[str, Any]
    """The flattened section, without options that the command line set under their recipe names."""
    overrides: tuple[str, ...]
    """In Hydra's syntax; begins with the section's `model_engine`."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, verl_overrides: Sequence[str]) -> _UserOptions:
        section = dict(recipe.config.verl)
        name, engine = section.pop("config_name", CONFIG_NAME), section.pop("model_engine", None)
        for key, value in (("config_name", name), ("model_engine", engine)):
            if not isinstance(value, str | None):
                raise ConfigError(f"verl.{key}: expected a name, got {value!r}")
        outranked = {key for key, keys in sources().items() if not recipe.overridden.isdisjoint(keys)}
        outranked -= {key.removeprefix("verl.") for key in recipe.overridden if key.startswith("verl.")}
        kept = {key: value for key, value in leaves(section) if key not in outranked}
        return cls(name, kept, (*([] if engine is None else [f"model_engine={engine}"]), *verl_overrides))

    @property
    def choices(self) -> tuple[str, ...]:
        """The overrides that select verl's config files."""
        return tuple(text for text in self.overrides if "@" in _key(text) or _key(text) == "model_engine")

    @property
    def keys(self) -> list[str]:
        """The keys that must exist in verl's files."""
        named = [_key(text) for text in self.overrides if text not in self.choices and text[:1] not in ("+", "~")]
        return [key for key in self.section if "+" not in key] + named

    def without(self, keys: Collection[str]) -> _UserOptions:
        """These options without those with `keys`."""
        section = {key: value for key, value in self.section.items() if key not in keys}
        return replace(self, section=section, overrides=tuple(o for o in self.overrides if _key(o) not in keys))

    def composed(self, own: DictConfig) -> DictConfig:
        """verl's files, then the `own` options of creditflow, then these.

        Hydra refuses `+` for a key that is there, as one that only creditflow adds to verl's files.
        """
        section = nested({key.replace("+", ""): value for key, value in self.section.items()})
        there = {f"+{key}" for key in _flat(own)}
        overrides = [f"+{text}" if _key(text) in there else text for text in self.overrides]
        return _compose(self.config_name, overrides, [own, section])


def _key(override: str) -> str:
    return override.partition("=")[0]


@functools.cache
def files(config_name: str, choices: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any]]:
    """verl's default configuration, as it is and flattened. Cached: do not modify it."""
    config = _compose(config_name, choices)
    OmegaConf.set_struct(config, False)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    return config, _flat(resolved)


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


def _flat(section: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys; a section's own value is {}."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        is_section = isinstance(value, Mapping)
        flat[f"{path}{name}"] = {} if is_section else value
        if is_section:
            flat |= _flat(value, f"{path}{name}.")
    return flat


def nested(flat: Mapping[str, Any]) -> DictConfig:
    """The inverse of `_flat`."""
    config = OmegaConf.create()
    for key, value in flat.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def _named_as_in(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `values` to the names in the selected verl files, `defaults` (flattened)."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = next((name for name in (key, RENAMED.get(key)) if name in defaults), None)
        if name is not None:
            named[name] = value
        elif value != mapped(Config())[key]:
            engine = defaults["model_engine"]
            raise ConfigError(f"{key}: {value!r}, but verl's model_engine={engine} has no such option")
    return named


def _ray(config: Config) -> dict[str, Any]:
    """Ray's start options: the thread count and the recipe's `ray_kwargs.ray_init`."""
    chosen = {f"ray_kwargs.ray_init.{key}": value for key, value in leaves(config.ray_kwargs.ray_init)}
    threads = config.trainer.num_threads
    name = "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS"
    return ({name: str(threads)} if threads else {}) | chosen
