"""The section `guard`, with the default rules."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from creditflow._utils.sections import Section
from creditflow.config.sections import LoraConfig


def default_rules() -> dict[str, Any]:
    """The default guard rules."""
    restore = {"above": 0.0, "window": 3, "recover_epochs": 1, "action": "restore_checkpoint"}
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
        "not_finite": {"metric": "actor/skipped_updates", **restore},
        "not_finite_critic": {"metric": "critic/skipped_updates", **restore},
        "entropy": {"metric": "actor/entropy", "below": 0.1, "times_first": True, "window": 3},
        "sub_reward_var": {"metric": "reward/sub_reward_excess_var/*", "above": 0.2, "window": 10},
        "pass_rate": {"metric": "propagation/pass_rate", "below": 0.8, "window": 10},
        "shut_out": {"metric": "credit/reach/*", "below": 0.05, "window": 3},
        "fidelity_low": {
            "kind": "interval",
            "metric": "credit/fidelity",
            "over": "credit/fidelity_high",
            "below": 0.1,
            "window": 2,
        },
        "propagation_s": {"metric": "timing/propagation_s", "above": 1.0, "window": 3},
    }


class FallbackConfig(LoraConfig):
    """The trained parameters during a fallback to the shared global reward."""

    trainable: Literal["all", "lora"] = "all"
    """`all`: the same as before the fallback; `lora`: only adapters, on the layers below."""
    lora_rank: PositiveInt = 8
    """As in `actor_rollout_ref.model`, and so are the keys below."""


class GuardConfig(Section):
    """The guard rules and their limits."""

    enable: bool = True
    """Watch the run with the rules."""
    rules: dict[str, Any] = Field(default_factory=default_rules)
    """Guard rules by name; null removes one. `metric` (from docs/reference/metrics.md; `*` for any agent or function),
    `kind` (a name from docs/reference/guard.md, or `file.py:kind`) with its options, `over` (the metric with the
    denominator, where `metric` is a share, or with the end of its interval), `action` (`warn`, `set_threshold` with
    `to`, `fallback_identical`, `restore_checkpoint`, `stop`), `cool_down` (checks after a recovery during which the
    rule does not fire), `unless` (`{metric, above}`: while the running mean of that metric is above this, the rule only
    warns)."""
    max_rollbacks: NonNegativeInt = 2
    """Maximum number of checkpoints that the guard restores; at the next rollback, the run stops with a report."""
    fallback: FallbackConfig = FallbackConfig()
