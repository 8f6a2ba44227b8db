"""The arms of a comparison, and the overrides that define each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from creditflow.config import Recipe, leaves
from creditflow.errors import ConfigError, did_you_mean

RESERVED = "before"
"""Folder name of the evaluations before training; no arm may use it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One variant of the recipe to train."""

    name: str
    overrides: tuple[str, ...]
    """`key=value` settings; overrides on the command line are applied after them."""

    @property
    def folder(self) -> str:
        """The arm's name as a valid folder name."""
        return re.sub(r"[^\w.+-]+", "_", self.name)


def split_values(text: str) -> list[str]:
    """The parts of `a,b,c`, without blanks around them; commas inside brackets do not separate them."""
    depths = accumulate((c in "[{(") - (c in ")}]") for c in text)
    cuts = [place for place, (c, depth) in enumerate(zip(text, depths, strict=True)) if c == "," and depth <= 0]
    return [text[before + 1 : cut].strip() for before, cut in pairwise([-1, *cuts, len(text)])]


def parse_vary(vary: str) -> tuple[str, list[str]]:
    """Split `KEY=a,b,c` into the key and its values."""
    key, equals, text = vary.partition("=")
    values = split_values(text)
    if not key or not equals or not all(values):
        raise ConfigError(f"--vary: expected KEY=a,b,c, got {vary!r}")
    if len(set(values)) < len(values):
        raise ConfigError(f"--vary: expected each value once, got {text!r}")
    return key, values


def arms_of(recipe: Recipe, key: str, values: Sequence[str], *, extra: bool, only: Sequence[str]) -> list[Arm]:
    """One arm for each value of `key`, with the overrides in `compare.values.<value>`.

    `extra`: also the arms in `compare.arms`. `only`: names of the arms to keep; empty keeps all.
    """
    compare = recipe.config.compare
    if unknown := [name for name in compare if name not in ("values", "arms")]:
        hint = did_you_mean(unknown[0], ("values", "arms"))
        raise ConfigError(f"unknown key 'compare.{unknown[0]}'; expected compare.values or compare.arms{hint}")
    of_arm = {str(name): settings for name, settings in _mapping(compare.get("arms"), "compare.arms").items()}
    arms = [Arm(value, (*_carried(recipe, value), f"{key}={value}")) for value in values]
    if extra:
        arms += [Arm(name, tuple(_overrides(settings, f"compare.arms.{name}"))) for name, settings in of_arm.items()]
    folders = [arm.folder for arm in arms]
    for arm in arms:
        if folders.count(arm.folder) > 1 or arm.folder == RESERVED:
            raise ConfigError(f"compare: {arm.name!r} names its runs' folder {arm.folder!r}, which is taken")
    return _chosen(arms, only)


def without_entry(recipe: Recipe, values: Sequence[str]) -> list[str]:
    """The values without an entry in `compare.values`; none if no value has one, since it is for another key then."""
    missing = [value for value in values if not _entries(recipe, value)]
    return missing if len(missing) < len(values) else []


def _carried(recipe: Recipe, value: str) -> list[str]:
    """The overrides in `compare.values` for a value; the later of two matching entries wins."""
    entries = _entries(recipe, value)
    return [override for name in entries for override in _overrides(entries[name], f"compare.values.{name}")]


def _entries(recipe: Recipe, value: str) -> dict[Any, Any]:
    """The entries of `compare.values` with a key equal to `value` in YAML, where `true` and `0.50` are not strings."""
    entries = _mapping(recipe.config.compare.get("values"), "compare.values")
    return {name: entry for name, entry in entries.items() if _same(_meaning(name), _meaning(value))}


def _meaning(text: object) -> object:
    """`text` parsed as the value of an option."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[call-overload, index]
    except (yaml.YAMLError, OmegaConfBaseException):
        return text  # loading the recipe with it raises


def _same(a: object, b: object) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)  # True == 1


def _chosen(arms: list[Arm], only: Sequence[str]) -> list[Arm]:
    names = [arm.name for arm in arms]
    for name in only:
        if name not in names:
            raise ConfigError(f"--only: no arm {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}")
    return [arm for arm in arms if arm.name in only] if only else arms


def _mapping(value: object, key: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: expected a mapping, got {value!r}")
    return dict(value)


def _overrides(settings: object, key: str) -> list[str]:
    """Flatten `{dotted.key: value}`, nested or not, to `dotted.key=value`; the later of two equal keys wins."""
    flat = dict(leaves(_mapping(settings, key)))
    return [f"{name}={as_yaml(value)}" for name, value in flat.items() if value != {}]


def as_yaml(value: Any) -> str:
    """`value` as the right-hand side of an override."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z_/.]([\w./:+-]*[\w./+-])?", value)
        and value.lower() not in _YAML_WORDS
    ):
        return value
    return json.dumps(value)


_YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n", ".nan", ".inf")
