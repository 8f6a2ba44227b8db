"""LangGraph's nodes, as OpenLLMetry and OpenInference record them: a node is an agent."""

from __future__ import annotations

from creditflow.traces.content import json_of
from creditflow.traces.conventions.base import Attributes, Convention
from creditflow.traces.spans import text_of

_NODE = "traceloop.association.properties.langgraph_node"


def _node(attributes: Attributes) -> str:
    metadata = attributes.get("metadata")
    data = json_of(metadata) if isinstance(metadata, str) and "langgraph_node" in metadata else None
    node = data.get("langgraph_node") if isinstance(data, dict) else None
    return text_of(node) or text_of(attributes.get(_NODE))


CONVENTION = Convention(
    name="langgraph",
    precedence=45,
    call_agent=(_NODE,),
    agent_node=_node,
    agent_attributes=("metadata", _NODE),
)
