"""A verifiers harness that runs its chat loop in this process: `harness.id = "creditflow"`.

verifiers' own `null` harness runs the same loop as a script, and downloads packages for it on first use. Imports
verifiers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

HARNESS = "creditflow"
"""The harness's id."""
STEPS = "creditflow_steps"
"""The key of `trace.info` for the ids of the steps that the trace's calls made."""
_MODULE = f"verifiers.v1.harnesses.{HARNESS}"
_CONNECT_SECONDS = 5.0


class InProcessHarnessConfig(HarnessConfig):  # type: ignore[misc]
    """The options of every harness, and no more."""

    id: str = HARNESS


class InProcessHarness(Harness[InProcessHarnessConfig]):  # type: ignore[misc]
    """Ask the model, call the tools that it asks for, and repeat until a reply without calls.

    The model gets no shell and no files. Tools are those of the taskset's tool servers.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Run the loop on the task's prompt, or on the conversation so far."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message_to_wire(message) for message in prompt or ()]
        )
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                httpx.AsyncClient(
                    headers={"Authorization": f"Bearer {secret}"},
                    timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                    trust_env=False,  # the interception server is on loopback
                )
            )
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                response = await http.post(f"{endpoint}/chat/completions", json=body)
                if response.is_error:
                    # As in verifiers' chat loop, a conversation that no longer fits ends the run by itself.
                    fits = "context_length_exceeded" not in response.text
                    return ProgramResult(exit_code=int(fits), stdout="", stderr=response.text)
                answer = response.json()
                trace.info.setdefault(STEPS, []).append(answer["id"])
                message = answer["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    denied = await _denied(http, tool_interception_url, call) if tool_interception_url else None
                    messages.append(denied or await _called(connections, dispatch, call))


async def _called(
    connections: dict[str, Any], dispatch: dict[str, tuple[str, str]], call: Mapping[str, Any]
) -> dict[str, Any]:
    """Run one call; return the message with its result, or with the error that the model reads."""
    name = call["function"]["name"]
    content: Any
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except json.JSONDecodeError as error:
        content = f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    else:
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            content = f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
        elif name in dispatch:
            content = await call_mcp(connections, dispatch, name, arguments)
        else:
            content = f"error: unknown tool {name!r}"
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


async def _denied(http: httpx.AsyncClient, url: str, call: Mapping[str, Any]) -> dict[str, Any] | None:
    """The message that the taskset's hooks put in place of a call's result; None if the call may run."""
    text = call["function"]["arguments"]
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError:
        arguments = text
    asked = {"tool_call_id": call["id"], "name": call["function"]["name"], "arguments": arguments}
    response = await http.post(url, json=asked)
    response.raise_for_status()
    decision = response.json()
    if decision["action"] == "stop":
        raise RuntimeError(decision["reason"])
    return dict(decision["message"]) if decision["action"] == "deny" else None


__all__ = ["InProcessHarness"]
# verifiers looks a harness up by the name of a module in this package, and an entry here is found like a file.
sys.modules.setdefault(_MODULE, sys.modules[__name__])
