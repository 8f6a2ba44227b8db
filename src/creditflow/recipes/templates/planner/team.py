"""The workflow: a planner writes a plan, an executor follows it part by part, and a verifier judges each result."""

from __future__ import annotations

from creditflow.rollout import topologies

solve = topologies.planner_executor_verifier(most_parts=2)
