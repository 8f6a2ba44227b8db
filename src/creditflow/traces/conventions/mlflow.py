"""MLflow, over OTLP."""

from __future__ import annotations

from creditflow.traces.conventions.base import Convention

CONVENTION = Convention(
    name="mlflow",
    precedence=55,
    calls=(("mlflow.spanType", ("LLM", "CHAT_MODEL", '"LLM"', '"CHAT_MODEL"')),),
)
