"""Recipes from files: layers, overrides, aliases, dependent defaults and notices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from creditflow._utils.sections import checked, mergeable
from creditflow.config.algorithm import AlgorithmConfig
from creditflow.config.guard import adapt_rules
from creditflow.config.plugins import workflow_source
from creditflow.config.recipe import Config, Recipe
from creditflow.config.rule_files import load_named_files, with_loaded_files
from creditflow.config.sections import SUM_NORM
from creditflow.config.validation import validate
from creditflow.credit.options import CreditOptions
from creditflow.credit.presets import KEY as PRESET
from creditflow.credit.presets import find_preset
from creditflow.credit.records import ADVANTAGE_ESTIMATORS, GATE_OPTIONS, PROPAGATION_RULES, SCORE_OPTIONS
from creditflow.errors import ConfigError, did_you_mean, first_line
from creditflow.removed import removed_hint

if TYPE_CHECKING:
    from omegaconf import DictConfig

RECIPES = Path(__file__).parents[1] / "recipes"
"""The folder of the shipped recipes. It is no package: their Python files are loaded by path, as users' files are."""


def find_recipe(name: Path | str, folder: Path = Path()) -> Path:
    """Find a recipe by its path relative to `folder`, or a shipped one by its bare name, with or without `.yaml`.

    A file in `folder` comes first. Returns the path in `folder` if neither exists.
    """
    path = folder / name
    if path.is_file() or Path(name).name != str(name):
        return path
    shipped = RECIPES / f"{path.name.removesuffix('.yaml')}.yaml"
    return shipped if shipped.is_file() else path


def shipped_recipes() -> list[str]:
    """The names of the shipped recipes, in alphabetical order."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply `key=value` overrides, resolve aliases and validate.

    `path`: a file, or the bare name of a shipped recipe. A recipe may extend another one: `extends: other.yaml`,
    relative to itself, or a shipped one by name. Raises ConfigError with the key, the expected and the actual value; an
    unknown key names the nearest known one.
    """
    from omegaconf import OmegaConf

    path = find_recipe(path)
    layers = [*_layers(path), _dotlist(overrides)]
    replaced = _spell_out_preset(layers)
    config = _merged(layers, path)
    validate(config)
    keys = [_credit_keys(OmegaConf.to_container(layer)) for layer in layers]
    notices = (*replaced, *_without_effect(config.algorithm, keys))
    overridden = frozenset(key for key, _ in leaves(OmegaConf.to_container(layers[-1])))
    return Recipe(config=config, name=path.stem, folder=path.resolve().parent, notices=notices, overridden=overridden)


def _merged(layers: Sequence[DictConfig], path: Path) -> Config:
    """Merge the layers, later ones over earlier ones; resolve aliases, check types and keys, load files of rules."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    set_keys: set[str] = set()
    merged = OmegaConf.create(Config().model_dump())
    try:
        for layer in layers:
            keys = OmegaConf.to_container(layer)
            set_keys |= {key for key, _ in leaves(keys)}
            _spell_out_endpoints(keys)
            merged.merge_with(mergeable(keys, Config))
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or path}: {first_line(error)}") from error
    config = checked(Config, values)
    if (source := workflow_source(config.team.workflow)) is not None:
        source.fill(config)
    _resolve_aliases(config, set_keys)
    config.algorithm = with_loaded_files(config.algorithm, path.resolve().parent)
    _adapt_defaults(config, set_keys)
    return config


def _resolve_aliases(config: Config, set_keys: Set[str]) -> None:
    """Rewrite the aliases of credit options to the options."""
    algorithm, reward = config.algorithm.without_aliases(set_keys), config.reward
    if (granularity := reward.decomp_granularity) is not None:
        if algorithm.decomp_granularity not in (CreditOptions.decomp_granularity, granularity):
            raise ConfigError(
                f"reward.decomp_granularity: {granularity!r}, but algorithm.decomp_granularity is "
                f"{algorithm.decomp_granularity!r}"
            )
        algorithm, reward.decomp_granularity = replace(algorithm, decomp_granularity=granularity), None
    config.algorithm = algorithm


def _spell_out_preset(layers: Sequence[DictConfig]) -> tuple[str, ...]:
    """Add the options of the preset in force to the layer that chose it.

    Returns notices of options set by layers beneath, which the preset replaces. Raises ConfigError if the same layer or
    a later one sets one of its options to another value.
    """
    from omegaconf import OmegaConf

    keys_of_layers = [dict(leaves(OmegaConf.to_container(layer))) for layer in layers]
    chosen = [i for i, keys in enumerate(keys_of_layers) if PRESET in keys]
    if not chosen or (name := keys_of_layers[chosen[-1]][PRESET]) is None:
        return ()
    place, notices = chosen[-1], []
    for key, value in find_preset(name).options.items():
        for i, keys in enumerate(keys_of_layers):
            own = keys.get(key)
            if own is None or own == value:
                continue
            if i >= place:
                raise ConfigError(f"{key}: got {own!r}, but {PRESET}: {name} sets {value!r}; leave one of them out")
            notices.append(f"{key}: {own!r} of an extended recipe is replaced: {PRESET}: {name} sets {value!r}")
        OmegaConf.update(layers[place], key, value)
    return tuple(notices)


def _adapt_defaults(config: Config, set_keys: Set[str]) -> None:
    """Replace defaults that contradict a key that was set. A contradiction between two set keys stays an error."""
    data, actor, trainer = config.data, config.actor_rollout_ref.actor, config.trainer
    if "actor_rollout_ref.actor.ppo_mini_batch_size" not in set_keys:
        actor.ppo_mini_batch_size = min(actor.ppo_mini_batch_size, data.train_batch_size)
    for averaged in (actor, config.critic):
        if averaged.loss_agg_mode == SUM_NORM and averaged.loss_scale_factor is None:
            averaged.loss_scale_factor = data.max_response_length
    if "trainer.resume_mode" not in set_keys and trainer.resume_from_path is not None:
        trainer.resume_mode = "resume_path"
    if "algorithm.propagation" not in set_keys and config.algorithm.propagation == AlgorithmConfig.propagation:
        names = {key.removeprefix("algorithm.").partition(".")[0] for key in set_keys if key.startswith("algorithm.")}
        config.algorithm = replace(config.algorithm, propagation=usable_rule(config.algorithm, names))
    adapt_rules(config.guard.rules, set_keys)
    gated = PROPAGATION_RULES[config.algorithm.propagation].gated
    if not gated and not any(key.startswith("guard.rules.pass_rate") for key in set_keys):
        config.guard.rules["pass_rate"] = None  # it watches gates


def usable_rule(options: CreditOptions, set_options: Set[str]) -> str:
    """Choose the rule where none is set: the default, unless it cannot use the estimator or an option that is set."""
    if not set_options.isdisjoint(GATE_OPTIONS) or ADVANTAGE_ESTIMATORS[options.adv_estimator].critic:
        return "threshold"
    needs_scores = any(getattr(options, name) != getattr(CreditOptions, name) for name in SCORE_OPTIONS)
    by_token = options.decomp_granularity == "token_level"
    return "none" if needs_scores or by_token else options.propagation


def options_from(changed: Mapping[str, Any]) -> CreditOptions:
    """The default options with `changed`; without a rule in `changed`, one that can use them."""
    options = CreditOptions(**changed)
    return options if "propagation" in changed else replace(options, propagation=usable_rule(options, changed.keys()))


def with_effect(path: Path | str, chosen: Sequence[str], others: Sequence[str]) -> list[str]:
    """Remove the credit options from `others` that have no effect beside `chosen`.

    A comparison gives the same overrides to all its arms; an arm whose rule ignores one of them trains without it.
    """
    path = find_recipe(path)
    layers = [*_layers(path), _dotlist([*chosen, *others])]
    _spell_out_preset(layers)
    merged = _merged(layers, path)
    merged.algorithm.validate()
    ignored = {f"algorithm.{name}" for name in merged.algorithm.ignored()}
    return [other for other in others if other.partition("=")[0] not in ignored]


def _credit_keys(keys: Any) -> dict[str, Any]:
    """The credit options that a layer sets, including `reward.decomp_granularity`."""
    sections = keys if isinstance(keys, dict) else {}
    named = (sections.get(name) for name in ("algorithm", "reward"))
    algorithm, reward = (section if isinstance(section, dict) else {} for section in named)
    return {**algorithm, "decomp_granularity": reward.get("decomp_granularity", algorithm.get("decomp_granularity"))}


def _without_effect(algorithm: AlgorithmConfig, layers: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Notices of options that the rule in force ignores, set by a layer beneath the one that chose the rule.

    Raises ConfigError if the same layer sets both the option and the rule (a contradiction), or if a later layer sets
    the option (it would change nothing). A layer that sets most of the options is the record of a run, not a choice by
    hand; the record of an older version lacks the newer options.
    """
    every = {field.name for field in fields(CreditOptions)}
    by_hand = [{} if 2 * len(every & layer.keys()) > len(every) else layer for layer in layers]
    notices = []
    for name, causes in algorithm.ignored().items():
        if (set_in := _last(by_hand, name)) < 0:
            continue
        why = algorithm.why_ignored(name, causes)
        if set_in >= _last(layers, *causes):
            raise ConfigError(f"{why}; leave it out, or {algorithm.reader_of(name, causes)}")
        notices.append(why)
    return tuple(notices)


def _last(layers: Sequence[Mapping[str, Any]], *names: str) -> int:
    """The last layer that sets one of the options; -1 if none does."""
    having = [i for i, layer in enumerate(layers) if any(layer.get(name) is not None for name in names)]
    return having[-1] if having else -1


def credit_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Credit options by name, from `key=value` with or without their section (`algorithm.`, `reward.`).

    `preset=NAME` stands for the options of credit that the preset sets; later overrides replace them. A
    file that they name is looked up in the working directory, and loaded. Raises ConfigError for an unknown key or
    preset, naming the nearest, and for a value that is not valid YAML or cannot be loaded.
    """
    from omegaconf import OmegaConf

    names = [field.name for field in fields(CreditOptions)]
    options: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        key = "decomp_granularity" if key == "reward.decomp_granularity" else key.removeprefix("algorithm.")
        if key == "preset" and equals:
            of_preset = {key.removeprefix("algorithm."): set_to for key, set_to in find_preset(value).options.items()}
            options |= {name: set_to for name, set_to in of_preset.items() if name in names}
            continue
        if not equals or key not in names:
            hint = removed_hint(f"algorithm.{key}") or did_you_mean(key, names)
            raise ConfigError(f"{override}: expected an option of credit{hint if equals else ', as key=value'}")
        options |= OmegaConf.to_container(_dotlist([f"{key}={value}"]))  # type: ignore[arg-type]
    return load_named_files(options, Path.cwd())


def leaves(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested sections; an empty section counts as a value."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def with_options(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """`recipe` with options (dotted keys) set, validated again. Raises ConfigError as `load_recipe` does."""
    values = recipe.to_dict()
    for key, value in options.items():
        *sections, name = key.split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    config = checked(Config, values)
    validate(config)
    return replace(recipe, config=config)


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
            hint = removed_hint(f"recipe {path.stem}") or did_you_mean(path.stem, shipped_recipes())
            raise ConfigError(f"{path}: no such recipe{hint}") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"{path}: not readable as YAML: {_yaml_fault(error)}") from error
        if not isinstance(layer, DictConfig):
            raise ConfigError(f"{path}: expected a mapping of options at the top level")
        base = OmegaConf.to_container(layer).get("extends")  # type: ignore[union-attr]
        layer = OmegaConf.masked_copy(layer, [str(key) for key in layer if key != "extends"])
        chain.insert(0, layer)
        if base is None:
            return chain
        path = find_recipe(str(base), path.parent)


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


def _yaml_fault(error: Exception) -> str:
    """The parser's message, with its line number if there is one."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}: {problem}" if mark and problem else first_line(error)


def different_options(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """The dotted names of the options that differ between two configurations, given as nested sections."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in before.keys() | now.keys():
            yield from different_options(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif before != now:
        yield path
