"""The plug-in that `import verl` loads in every process.

The import is light: additions to a verl module are made when that module is imported.
"""

from __future__ import annotations

import os
from types import ModuleType

from verl_cpu.imports import after_import

BACKEND = "transformers"


def _add_replica(replica: ModuleType) -> None:
    def load() -> type:
        from verl_cpu.rollout import TransformersReplica

        return TransformersReplica

    replica.RolloutReplicaRegistry.register(BACKEND, load)


def _add_adapter(base: ModuleType) -> None:
    base._ROLLOUT_REGISTRY[BACKEND, "async"] = "verl_cpu.rollout.TransformersRollout"


def use_cpu() -> None:
    """Register the platform `cpu` in this process. Called automatically if `VERL_PLATFORM=cpu`."""
    from verl_cpu import patches, platform

    platform.register()
    patches.apply()


after_import("verl.workers.rollout.replica", _add_replica)
after_import("verl.workers.rollout.base", _add_adapter)
if os.environ.get("VERL_PLATFORM") == "cpu":
    use_cpu()
