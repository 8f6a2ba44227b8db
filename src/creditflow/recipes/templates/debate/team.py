"""The workflow: two debaters answer, read each other's answers and answer again; a judge reads both and decides."""

from __future__ import annotations

from creditflow.rollout import topologies

solve = topologies.debate("ann", "bob", rounds=1, judge="judge")
