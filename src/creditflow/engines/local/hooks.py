"""Hooks of the embedded engine, by which plug-ins provide policies, observe training steps and keep state.

An entry point of group `creditflow.engine_hooks` names a function `(recipe, policies) -> EngineHook | None`. It is
called once the models of a run are loaded, with the local policies by name; None if the recipe does not use the hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from creditflow.config import Recipe
from creditflow.data import Trajectory
from creditflow.engines.local.policy import Policy
from creditflow.errors import ConfigError
from creditflow.registry import Registry


class EngineHook:
    """Base class of hooks: every method does nothing."""

    policies: Mapping[str, Policy] = {}
    """The frozen policies that the hook provides. `Policy.generate` chooses what acts in each rollout."""

    def reserved_models(self) -> Sequence[Any]:
        """Models to count in the memory plan beside those of `policies`, once for each copy that may be held."""
        return ()

    def after_batch(self, step: int, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Observe the scored trajectories of a training step, before the update. Returns metrics of the step."""
        return {}

    def after_update(self, step: int, policies: Mapping[str, Policy]) -> None:
        """Observe the policies after the update of a training step."""

    def save(self, folder: Path) -> Any:
        """Write files into a checkpoint's folder, and return the rest of the state as JSON values."""
        return None

    def load(self, folder: Path, state: Any) -> None:
        """Restore what `save` wrote. `state`: None if the checkpoint has none of this hook.

        Raises ConfigError if the state does not fit the recipe.
        """


HookFactory = Callable[[Recipe, Mapping[str, Policy]], EngineHook | None]
HOOKS: Registry[HookFactory] = Registry("engine hook", group="creditflow.engine_hooks", kind=Callable)


def load_hooks(recipe: Recipe, policies: Mapping[str, Policy]) -> dict[str, EngineHook]:
    """The hooks that the recipe uses, by name.

    Raises ConfigError for an entry point that cannot be loaded, and for a policy that no hook provides.
    """
    hooks: dict[str, EngineHook] = {}
    for name in HOOKS.names():  # not `items`: without a hook, this would be another run
        if (hook := HOOKS[name](recipe, policies)) is not None:
            hooks[name] = hook
    provided = {name for hook in hooks.values() for name in hook.policies}
    for name, policy in recipe.config.policies.items():
        if policy.source is not None and name not in provided:
            raise ConfigError(
                f"policies.{name}.{policy.source[0]}: no entry point of creditflow.engine_hooks provides the policy"
            )
    return hooks
