"""Presets: methods of credit that are a choice of options, by name. All but `calibrated` are published ones.

`algorithm.preset: NAME` sets the options of one preset, as if the recipe had spelled them out. The equations, sources
and deviations are in docs/concepts/published_rules.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from creditflow.errors import ConfigError, did_you_mean
from creditflow.removed import removed_hint

KEY = "algorithm.preset"


@dataclass(frozen=True, slots=True)
class Preset:
    """The options of a method."""

    source: str
    """The paper, as arXiv number; empty for creditflow's own method."""
    options: Mapping[str, Any]
    """Values by dotted key of the recipe."""


def _credit(source: str, **options: Any) -> Preset:
    """A preset of options of `algorithm.*`."""
    return Preset(source, {f"algorithm.{name}": value for name, value in options.items()})


_GRPO = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True}
_DR_GRPO = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}
_RELATIVE = {"adv_estimator": "relative", "norm_adv_by_std_in_grpo": True, "group_by": "task"}
"""Options of rules that compare trajectories themselves."""
_OUTCOME = {"rule": "identical", "shared_reward": "outcome"}

PRESETS: dict[str, Preset] = {
    "at_grpo": _credit(
        "2510.11062", propagation={"rule": "own", "outcome_to": "all"}, **_GRPO, group_by="task_agent_turn"
    ),
    "calibrated": _credit("", propagation="calibrated", **_GRPO, group_by="task_agent"),
    "dr_mas": _credit("2602.08847", propagation=_OUTCOME, **_GRPO, group_by="task_agent"),
    "gagpo": _credit("2605.13217", propagation="gagpo", **_RELATIVE),
    "gigpo": _credit("2505.10978", propagation="gigpo", **_RELATIVE, gamma=0.95),
    "irc": _credit("2604.02869", propagation={"rule": "irc", "episode_weight": 0.3}, **_RELATIVE, gamma=0.9),
    "magrpo": _credit("2508.04652", propagation=_OUTCOME, **_DR_GRPO, group_by="task_agent_turn"),
    "mappo": Preset(
        "2103.01955",
        {
            "algorithm.propagation": {"rule": "discounted", "outcome_to": "answer"},
            "algorithm.reward_decomp": False,
            "algorithm.adv_estimator": "gae",
            "critic.context": "trajectory",
        },
    ),
    "mt_grpo": _credit("2505.11821", propagation="mt_grpo", **_RELATIVE, gamma=1.0),
}


def find_preset(name: object) -> Preset:
    """The preset `name`. Raises ConfigError for an unknown one, with the known names."""
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    hint = removed_hint(KEY, name) or did_you_mean(name, PRESETS)
    raise ConfigError(f"{KEY}: expected one of {', '.join(PRESETS)}, got {name!r}{hint}")


def preset_text(name: str) -> str:
    """The options that a preset sets, in one line."""
    preset = find_preset(name)
    options = ", ".join(
        f"{key.removeprefix('algorithm.')}: {str(value).lower() if isinstance(value, bool) else value}"
        for key, value in preset.options.items()
    )
    source = f" (arXiv {preset.source})" if preset.source else ""
    return f"preset {name}{source} sets {options}"
