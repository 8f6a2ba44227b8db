"""creditflow's own attributes: an agent's name and rewards on any span."""

from __future__ import annotations

from creditflow.traces.conventions.base import Convention

CONVENTION = Convention(
    name="creditflow",
    precedence=0,
    call_agent=("creditflow.agent",),
    span_agent=("creditflow.agent",),
    named_rewards="creditflow.reward",
)
