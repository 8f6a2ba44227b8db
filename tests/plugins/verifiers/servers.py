"""Servers on loopback: tools, a model that says given texts, and a resource server of NeMo Gym."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from creditflow._utils.loopback import bound, url_of
from creditflow.rollout.chat import parse_tool_calls
from tests.rewards.judge_server import Answer, JudgeServer, Request


@contextmanager
def answering(answer: Callable[[str, Any], Any]) -> Iterator[str]:
    """Serve `answer(path, body)` for each POST, both as JSON; yields the URL."""

    def reply(request: Request) -> Answer:
        return Answer(body=json.dumps(answer(request.path, request.body)).encode())

    with JudgeServer(reply) as server:
        yield server.address


@contextmanager
def serving_tools(tools: Any) -> Iterator[str]:
    """Serve a toolset of verifiers from a thread, as its own process would; yields the URL for `tools.url`."""
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    mcp = MCPServer(tools.server_name)
    tools.register(mcp)
    app = mcp.streamable_http_app(json_response=True, stateless_http=True)
    listening = bound("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"{url_of('127.0.0.1', listening)}/mcp"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def saying(said: dict[str, list[tuple[str, str]]]) -> Iterator[str]:
    """An OpenAI-compatible server that answers each model's calls in order, with a text and its finish reason."""

    def answer(path: str, body: Any) -> Any:
        text, finish = said[body["model"]].pop(0)
        calls = []
        if finish == "stop" and body.get("tools"):
            text, calls = parse_tool_calls(text)
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            message["tool_calls"] = [call.to_message(f"call_{i}") for i, call in enumerate(calls)]
        choice = {"index": 0, "message": message, "finish_reason": finish}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        whole = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        return {**whole, "usage": usage}

    with answering(answer) as url:
        yield f"{url}/v1"


@contextmanager
def resources() -> Iterator[tuple[str, list[float]]]:
    """A resource server; the reward is the share of the asked word among those said."""
    verified: list[float] = []

    def answer(path: str, body: Any) -> Any:
        if path != "/verify":
            return {}
        parts = [part["text"] for item in body["response"]["output"] for part in item.get("content", [])]
        words = " ".join(parts).split()
        verified.append(words.count(body["word"]) / max(1, len(words)))
        return {**body, "reward": verified[-1]}

    with answering(answer) as url:
        yield url, verified
