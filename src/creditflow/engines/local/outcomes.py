"""Run and score rollouts that only measure: their outcomes count, and they are not trained on."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from creditflow.credit.decompose import outcomes
from creditflow.data import Floats, Trajectory, TrajectoryBatch
from creditflow.engines.common.components import Components
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import complete, fill_references
from creditflow.rollout import ChatClient, ModelClient, Scheduler, together

AT_ONCE = 1024
"""The largest number of concurrent rollouts: bounds their memory and sets the interval of progress updates."""


class MeasuringRollouts:
    """Runs rollouts on one scheduler and scores their outcomes."""

    def __init__(self, components: Components, policy_set: PolicySet | None) -> None:
        """`policy_set`: None if all policies are behind endpoints."""
        self.components = components
        clients: dict[str, ModelClient | ChatClient] = dict(components.chat_clients)
        self._references: Mapping[str, Policy] = {}
        if policy_set is not None:
            clients = {**policy_set.policies, **clients}
            self._references = policy_set.references
        self.scheduler = Scheduler(clients, components.recipe.config.actor_rollout_ref.rollout.max_num_seqs)
        self._max_tokens = 0 if policy_set is None else policy_set.max_tokens
        self.first_failure = ""
        """The reason of the first rollout or score that failed."""

    async def run(self, running: Sequence[Awaitable[Trajectory]]) -> tuple[list[Trajectory], Floats]:
        """Run and score P rollouts; returns them and their common outcomes [P], NaN where one failed."""
        components = self.components
        trajectories = await complete(together(running, self.scheduler), components)
        if self._references:
            fill_references(self._references, trajectories, components, self._max_tokens)
        report = await components.rewards.score(trajectories, outcome_only=True, max_failed_frac=1.0)
        # A truncated rollout has an outcome, whether or not truncated trajectories are trained.
        options = replace(components.recipe.config.algorithm, mask_truncated=False)
        known = outcomes(TrajectoryBatch.from_trajectories(trajectories), options)
        errors = [*(one.info["error"] for one in trajectories if one.status == "failed"), *report.reasons]
        self.first_failure = self.first_failure or next(iter(errors), "")
        return trajectories, np.where(known.known_N, known.value_N, np.nan)
