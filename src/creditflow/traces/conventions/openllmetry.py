"""OpenLLMetry (Traceloop)."""

from __future__ import annotations

from creditflow.traces.conventions import opentelemetry, semantic_kernel
from creditflow.traces.conventions.base import Convention

_KIND = "traceloop.span.kind"
CONVENTION = Convention(
    name="openllmetry",
    precedence=30,
    kinds=(_KIND,),
    calls=(("llm.request.type", (*opentelemetry.CALL_OPERATIONS, *semantic_kernel.CALL_OPERATIONS)),),
    prompt_list="gen_ai.prompt",
    response_list="gen_ai.completion",
    prompt_tokens=("gen_ai.usage.prompt_tokens",),
    completion_tokens=("gen_ai.usage.completion_tokens",),
    finish_reason=("llm.finish_reason",),
    agent_kinds=((_KIND, ("agent",), "traceloop.entity.name"),),
)
