"""AgentOps: the messages of OpenLLMetry, with its own span kinds."""

from __future__ import annotations

from creditflow.traces.conventions.base import Convention

_KIND = "agentops.span.kind"
CONVENTION = Convention(
    name="agentops", precedence=20, kinds=(_KIND,), agent_kinds=((_KIND, ("agent",), "operation.name"),)
)
