"""Semantic Kernel: OpenTelemetry's conventions with its own operation names."""

from __future__ import annotations

from creditflow.traces.conventions.base import Convention

CALL_OPERATIONS = (
    *("chat.completions", "chat.streaming_completions", "text.completions", "text.streaming_completions"),
)
CONVENTION = Convention(name="semantic_kernel", precedence=15, calls=(("gen_ai.operation.name", CALL_OPERATIONS),))
