"""The versions of the weights that sampled a response on verl's servers.

In asynchronous modes a server aborts its calls before an update, and verl's client continues them afterwards, so a
response may have tokens of several versions.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from creditflow.engines.verl.servers import SPANS

_parts: ContextVar[list[tuple[int, int | None]]] = ContextVar("parts")


class _RecordingClient(LLMServerClient):  # type: ignore[misc]
    """Records the number of tokens and the version of each answer of a server."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await super().generate(*args, **kwargs)
        _parts.get().append((len(output.token_ids), output.extra_fields.get("global_steps")))
        return output


class VersionedClient(FullyAsyncLLMServerClient, _RecordingClient):  # type: ignore[misc]
    """verl's client for servers whose calls are aborted and continued, which records the version of every token.

    verl's client keeps only the first and the last version.
    """

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate one response, in as many parts as the servers need."""
        token = _parts.set([])
        try:
            output = await super().generate(*args, **kwargs)
            output.extra_fields[SPANS] = version_spans(_parts.get())
        finally:
            _parts.reset(token)
        return output


def version_spans(parts: list[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """The first token and the version of each span, from the number of tokens and the version of each part.

    Parts without tokens are left out, unless all parts are.
    """
    spans: list[tuple[int, int | None]] = []
    begin = 0
    for n_tokens, version in parts:
        if n_tokens and (not spans or spans[-1][1] != version):
            spans.append((begin, version))
        begin += n_tokens
    return spans or [(0, parts[-1][1])]
