"""LangSmith, over OTLP."""

from __future__ import annotations

from creditflow.traces.conventions.base import Convention

_KIND = "langsmith.span.kind"
CONVENTION = Convention(name="langsmith", precedence=55, kinds=(_KIND,), calls=((_KIND, ("llm", "LLM")),))
