"""Recipes from files: layers, overrides, aliases, dependent defaults and notices."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from creditflow._utils.sections import checked, leaves, mergeable
from creditflow.config.algorithm import (
    CHOOSING,
    FLAT,
    KEY,
    RENAMED,
    chosen_rule,
    expect_options,
    merge_options,
    refuse_misplaced,
    rule_name,
    rule_options,
    with_lambda,
)
from creditflow.config.guard import default_rules
from creditflow.config.plugins import workflow_source
from creditflow.config.presets import KEY as PRESET
from creditflow.config.presets import find_preset
from creditflow.config.recipe import Config, Recipe, absolute_paths
from creditflow.config.rule_files import load_named_files
from creditflow.config.sections import SUM_NORM
from creditflow.config.validation import validate
from creditflow.credit.records import PROPAGATION_RULES, RULE
from creditflow.errors import ConfigError, did_you_mean, first_line
from creditflow.monitoring.guard import without_gates
from creditflow.removed import REMOVED, removed_hint

RECIPES = Path(__file__).parents[1] / "recipes"
"""The folder of the shipped recipes. Their Python files are loaded by path, as users' files are."""


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


def load_recipe(path: Path | str, overrides: Sequence[str] = (), recorded: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe, apply `key=value` overrides, resolve aliases and validate.

    `path`: a file, or the bare name of a shipped recipe. A recipe may extend another one: `extends: other.yaml`,
    relative to itself, or a shipped one by name. `recorded`: the `run.json` of the run that wrote the file, whose
    removed keys are left out. Raises ConfigError with the key, the expected and the actual value; an unknown key names
    the nearest known one.
    """
    path = find_recipe(path)
    layers = _with_overrides(path, overrides)
    if recorded is not None:
        layers = [without_removed(layer, recorded) for layer in layers]
    replaced = _spell_out_preset(layers)
    former = [name for layer in layers for name in _former_names(layer)]
    config = _merged(layers, path)
    validate(config)
    notices = (
        *replaced,
        *(f"{KEY}: {name} is now called {RENAMED[name]}" for name in dict.fromkeys(former)),
        *(
            f"guard.rules.{name}: left out, as the propagation rule {config.credit.propagation} has no gates"
            for name in without_gates(config.guard.rules, config.credit)
            if config.guard.rules[name] != default_rules().get(name)
        ),
    )
    overridden = frozenset(key for key, _ in leaves(layers[-1]))
    return Recipe(config=config, name=path.stem, folder=path.resolve().parent, notices=notices, overridden=overridden)


def without_removed(options: Mapping[str, Any], facts: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A run's recorded options without the removed keys, which are recorded as null or false if they had no effect.

    `facts`: the run's `run.json`. Raises ConfigError for a removed key with an effect.
    """
    kept: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{path}{key}"
        if name not in REMOVED:
            kept[key] = without_removed(value, facts, f"{name}.") if isinstance(value, Mapping) else value
        elif value is not None and value is not False:
            of = f"of creditflow {facts.get('versions', {}).get('creditflow', 'unknown')}"
            raise ConfigError(f"{name}: {value!r} in a run {of}, which cannot go on{removed_hint(name)}")
    return kept


def _with_overrides(path: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """The layers of a recipe and its overrides. A key that chooses the rule is unset by null in a later layer."""
    layers = [*_layers(path), _dotlist(overrides)]
    sections = [section for layer in layers if isinstance(section := layer.get("algorithm"), dict)]
    for i, section in enumerate(sections):
        for key in [key for key in CHOOSING if key in section and section[key] is None]:
            for beneath in sections[: i + 1]:
                beneath.pop(key, None)
    return layers


def _merged(layers: Sequence[dict[str, Any]], path: Path) -> Config:
    """Merge the layers, later ones over earlier ones; resolve aliases, check types and keys, load files of rules."""
    values, choices = _resolved(layers, path)
    set_keys = {key for layer in layers for key, _ in leaves(layer)}
    folder = path.resolve().parent
    if isinstance(algorithm := values["algorithm"], dict):
        refuse_misplaced(algorithm)
        algorithm["propagation"] = chosen_rule([load_named_files(layer, folder) for layer in choices])
        values["algorithm"] = load_named_files(algorithm, folder)
    config = checked(Config, values)
    if (source := workflow_source(config.team.workflow)) is not None:
        source.fill(config)
    _resolve_aliases(config, set_keys)
    _adapt_defaults(config, set_keys)
    return config


def _resolved(layers: Sequence[dict[str, Any]], path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The merged values of the layers, and the keys of each layer that choose the rule and its options."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    merged = OmegaConf.create(Config().model_dump())
    choices: list[dict[str, Any]] = []
    try:
        for layer in copy.deepcopy(layers):
            _spell_out_endpoints(layer)
            section = layer.get("algorithm")
            taken = section if isinstance(section, dict) else {}
            choices.append({key: taken.pop(key) for key in CHOOSING if key in taken})
            if isinstance(spec := _value(layer, _SHADOW), str | dict):  # replaces the options of another rule beneath
                before = rule_options(_value(OmegaConf.to_container(merged), _SHADOW))  # type: ignore[arg-type]
                _set(layer, _SHADOW, merge_options(before, rule_options(spec)))
                OmegaConf.update(merged, _SHADOW, None)
            merged.merge_with(mergeable(layer, Config))
        # Beside the recipe's own values, so that interpolations in them are resolved.
        both = OmegaConf.merge(merged, {"choices_of_rules": choices})
        values: Any = OmegaConf.to_container(both, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_yaml_fault(error)) from error
    return values, values.pop("choices_of_rules")


_SHADOW = "algorithm.shadow.propagation"


def _value(layer: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, without interpolation; None without one."""
    value: Any = layer
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _former_names(layer: Mapping[str, Any]) -> list[str]:
    """Former names of rules in a layer."""
    specs = [_value(layer, KEY), _value(layer, _SHADOW)]
    names = [spec.get(RULE) if isinstance(spec, dict) else spec for spec in specs]
    return [name for name in names if isinstance(name, str) and name in RENAMED]


def _resolve_aliases(config: Config, set_keys: Set[str]) -> None:
    """Rewrite the aliases of credit options to the options."""
    algorithm, reward = with_lambda(config.algorithm, "algorithm.lam" in set_keys), config.reward
    if (granularity := reward.decomp_granularity) is not None:
        general: Any = algorithm
        if "algorithm.decomp_granularity" in set_keys and general.decomp_granularity != granularity:
            raise ConfigError(
                f"reward.decomp_granularity: {granularity!r}, but algorithm.decomp_granularity is "
                f"{general.decomp_granularity!r}"
            )
        algorithm = algorithm.model_copy(update={"decomp_granularity": granularity})
        reward.decomp_granularity = None
    config.algorithm = algorithm


def _spell_out_preset(layers: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Add the options of the preset in force to the layer that chose it.

    Returns notices of options set by layers beneath, which the preset replaces. Raises ConfigError if the same layer or
    a later one sets one of its options to another value.
    """
    chosen = [i for i, layer in enumerate(layers) if PRESET in dict(leaves(layer))]
    if not chosen or (name := _value(layers[chosen[-1]], PRESET)) is None:
        return ()
    place, notices = chosen[-1], []
    for key, value in find_preset(name).options.items():
        options = rule_options(value) if key == KEY else value
        for i, layer in enumerate(layers):
            own = _value(layer, key)
            if key == KEY:
                flat = {option: _value(layer, f"algorithm.{flat}") for flat, option in FLAT.items()}
                own = rule_options(own) | {k: v for k, v in flat.items() if v is not None and k in options}
            if _agree(own, options):
                continue
            if i >= place:
                raise ConfigError(f"{key}: got {own!r}, but {PRESET}: {name} sets {value!r}; leave one of them out")
            notices.append(f"{key}: {own!r} of an extended recipe is replaced: {PRESET}: {name} sets {value!r}")
        if isinstance(options, dict):
            options = rule_options(_value(layers[place], key)) | options
        _set(layers[place], key, options)
    return tuple(notices)


def _agree(own: Any, preset: Any) -> bool:
    """Whether a value agrees with a preset's. Options that the preset does not set agree."""
    if isinstance(own, Mapping) and isinstance(preset, Mapping):
        return all(preset.get(key, value) == value for key, value in own.items())
    return own is None or bool(own == preset)


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
    options = config.algorithm.options()
    general: Any = config.algorithm
    if options.propagation.relative and "algorithm.group_by" in set_keys and general.group_by != "task":
        raise ConfigError(
            f"algorithm.group_by: {options.propagation} compares the steps of a task in its own groups: expected task, "
            f"got {general.group_by}"
        )


def with_effect(path: Path | str, chosen: Sequence[str], others: Sequence[str]) -> list[str]:
    """Remove the overrides from `others` that set an option which the rule in force does not have.

    A comparison gives the same overrides to all its arms; an arm whose rule has no such option trains without it.
    """
    path = find_recipe(path)
    layers = _with_overrides(path, [*chosen, *others])
    _spell_out_preset(layers)
    choices = [load_named_files(choice, path.resolve().parent) for choice in _resolved(layers, path)[1]]
    options = {field.name for field in fields(PROPAGATION_RULES[rule_name(choices)[1]])} | {RULE}

    def applies(override: str) -> bool:
        key = override.partition("=")[0]
        name = FLAT.get(key.removeprefix("algorithm."), key.removeprefix(f"{KEY}."))
        return name in options or not (key.startswith(f"{KEY}.") or key.removeprefix("algorithm.") in FLAT)

    return [other for other in others if applies(other)]


def credit_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Keys of `algorithm` by name, from `key=value` with or without their section (`algorithm.`, `reward.`).

    `preset=NAME` stands for the options of credit that the preset sets; later overrides replace them. A rule's option
    is `propagation.OPTION=value`. Loads the files that the values name. Raises ConfigError for a key that is no option
    of credit.
    """
    options: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        key = "decomp_granularity" if key == "reward.decomp_granularity" else key.removeprefix("algorithm.")
        if key == "preset" and equals:
            names = find_preset(value).options
            options |= {k.removeprefix("algorithm."): v for k, v in names.items() if k.startswith("algorithm.")}
            continue
        made = _dotlist([f"algorithm.{key}{equals}{value}"])["algorithm"]
        before, after = (rule_options(layer.get("propagation")) for layer in (options, made))
        options |= made | ({"propagation": merge_options(after | before, after)} if before and after else {})
    options = load_named_files(options, Path.cwd())
    expect_options(options)
    return options


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key."""
    *sections, name = key.split(".")
    for section in sections:
        inner = values.get(section)
        values[section] = values = inner if isinstance(inner, dict) else {}
    values[name] = value


def with_options(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """`recipe` with options (dotted keys) set, validated again. Raises ConfigError as `load_recipe` does."""
    values = recipe.to_dict()
    for key, value in options.items():
        _set(values, key, value)
    config = checked(Config, values)
    validate(config)
    return replace(recipe, config=config)


def _layers(path: Path) -> list[dict[str, Any]]:
    """The recipe at `path` and the recipes that it extends, the base first."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    chain: list[dict[str, Any]] = []
    folder, seen = path.parent.resolve(), set[Path]()
    while True:
        if path.resolve() in seen:
            raise ConfigError(f"{path}: `extends` runs in a circle")
        seen.add(path.resolve())
        try:
            layer: Any = OmegaConf.to_container(OmegaConf.load(path))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            beside = sorted(map(str, (path if path.is_dir() else path.parent).glob("*.yaml")))
            meant = beside[0] if path.is_dir() and beside else path
            hint = removed_hint(f"recipe {path.stem}") or did_you_mean(meant, [*beside, *shipped_recipes()])
            raise ConfigError(f"{path}: no such recipe{hint or '; `creditflow recipes` lists the shipped'}") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"{path}: not readable as YAML: {_yaml_fault(error)}") from error
        if not isinstance(layer, dict):
            raise ConfigError(f"{path}: expected a mapping of options at the top level")
        base = layer.pop("extends", None)
        if path.parent.resolve() != folder:
            layer = absolute_paths(layer, path.parent.resolve())  # the recipe's own folder is another one
        chain.insert(0, {str(key): value for key, value in layer.items()})
        if base is None:
            return chain
        path = find_recipe(str(base), path.parent)


_ADDRESS = re.compile(r"(policies\.[^.=]+\.endpoint)=(https?://.*)")
_RULE = re.compile(r"(algorithm\.(?:shadow\.)?propagation)=((?!null$)[A-Za-z].*)")


def _dotlist(overrides: Sequence[str]) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        if "=" not in override or override.startswith("="):
            raise ConfigError(f"{override}: expected key=value")
    try:
        # As a key of its section, a bare address or rule merges with other overrides instead of replacing them.
        spelled_out = [_ADDRESS.sub(r"\1.base_url=\2", override) for override in overrides]
        layer = OmegaConf.from_dotlist([_RULE.sub(rf"\1.{RULE}=\2", override) for override in spelled_out])
        return {str(key): value for key, value in OmegaConf.to_container(layer).items()}  # type: ignore[union-attr]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(overrides)}: not readable as YAML: {_yaml_fault(error)}") from error


def _spell_out_endpoints(keys: Any) -> None:
    """Rewrite `endpoint: http://...` as `endpoint: {base_url: http://...}`, so that overrides of both forms merge."""
    policies = keys.get("policies") if isinstance(keys, dict) else None
    for policy in policies.values() if isinstance(policies, dict) else ():
        if isinstance(policy, dict) and isinstance(policy.get("endpoint"), str):
            policy["endpoint"] = {"base_url": policy["endpoint"]}


def _yaml_fault(error: Exception) -> str:
    """The parser's message, with its line or key if there is one, and the remedy for a text with `${`."""
    from omegaconf.errors import GrammarParseError, InterpolationResolutionError

    mark, problem, key = (getattr(error, name, None) for name in ("problem_mark", "problem", "full_key"))
    place = f"line {mark.line + 1}: " if mark and problem else f"{key}: " if key else ""
    remedy = (
        "; write \\${ for the text ${" if isinstance(error, GrammarParseError | InterpolationResolutionError) else ""
    )
    return f"{place}{problem or getattr(error, 'strerror', '') or first_line(error)}{remedy}"


def different_options(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """The dotted names of the options that differ between two configurations, given as nested sections."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in before.keys() | now.keys():
            yield from different_options(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif before != now:
        yield path
